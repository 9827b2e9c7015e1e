"""The kernels' models of bytes and FLOP against what their programs load, store and multiply in the interpreter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle.kernels.commit import model as commit_model
from eagle.kernels.commit.op import commit
from eagle.kernels.draft_loss import model as draft_loss_model
from eagle.kernels.draft_loss.op import draft_loss, soft_cross_entropy
from eagle.kernels.noise import model as noise_model
from eagle.kernels.noise.op import gumbel_rows
from eagle.kernels.sample import model as sample_model
from eagle.kernels.sample import triton as sample_kernel
from eagle.kernels.sample.op import sample, sample_and_describe
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.tree_build import model as tree_build_model
from eagle.kernels.tree_build.op import ancestry, tree_links
from eagle.kernels.tree_build.triton import BLOCK
from eagle.kernels.verify import model as verify_model
from eagle.kernels.verify.op import decide, walk
from eagle.kernels.verify.reference import Tree
from tests.kernels.counting import counted
from tests.kernels.interpreted import INTERPRETED

pytestmark = INTERPRETED


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 80), (torch.float32, 5)])
def test_commit(dtype: torch.dtype, head_dim: int) -> None:
    rows, kv_heads, accepted = 3, 2, 19  # more than a chunk
    buffers = [torch.randn(rows, kv_heads, 64, head_dim).to(dtype) for _ in range(4)]
    path_BK = torch.arange(accepted).mul(2).expand(rows, -1).contiguous()  # node 0 is where it must be
    counts_B, lengths_B = torch.full((rows,), accepted), torch.arange(rows)
    with counted({f"buffer {i}": buffer for i, buffer in enumerate(buffers)}) as counts:
        commit(buffers, path_BK=path_BK, counts_B=counts_B, lengths_B=lengths_B, backend="triton")
    shape: dict[str, Any] = dict(
        buffers=4, rows=rows, kv_heads=kv_heads, accepted=accepted, moved=accepted - 1, head_dim=head_dim
    )
    assert counts.distinct_bytes == commit_model.cost(**shape, element=dtype.itemsize).bytes
    assert counts.bytes == commit_model.requested(**shape, element=dtype.itemsize)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (2, 63), (1, 130)])
def test_tree_build(rows: int, nodes: int, links: bool) -> None:
    picks_BN = torch.rand(rows, nodes, generator=torch.Generator().manual_seed(0))
    parents_BN = (picks_BN * torch.arange(nodes)).long()
    parents_BN[:, 0] = -1
    lengths_B = torch.arange(rows)
    depths_BN, _ = ancestry(parents_BN, backend="reference")
    with counted({}) as counts:
        if links:
            tree_links(parents_BN, lengths_B, backend="triton")
        else:
            ancestry(parents_BN, backend="triton")
    assert counts.distinct_bytes == tree_build_model.cost(rows=rows, nodes=nodes, links=links).bytes
    assert counts.bytes == tree_build_model.requested(
        rows=rows, nodes=nodes, total_depth=int(depths_BN.sum()), block=BLOCK, links=links
    )


def test_noise() -> None:
    seeds_B, at_B = torch.tensor([5, -3]), torch.tensor([7, 1])
    with counted({}) as counts:
        gumbel_rows(seeds_B, at_B, 1500, cycles_B=at_B + 1, backend="triton")
    assert counts.distinct_bytes == noise_model.cost(rows=2, tokens=1500).bytes


@pytest.mark.parametrize("top", [0, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draft_loss_of_logits(dtype: torch.dtype, top: int) -> None:
    rows, tokens = 3, 5003
    student_CD, teacher_CD = (torch.randn(rows, tokens).to(dtype) for _ in range(2))
    ids_CK = teacher_CD.topk(top, dim=-1).indices if top else None
    with counted({"student": student_CD, "teacher": teacher_CD}) as counts:
        soft_cross_entropy(
            student_CD=student_CD, teacher_CD=teacher_CD, top_ids_CK=ids_CK, top_weight=0.5, backend="triton"
        )
    shape: dict[str, Any] = dict(rows=rows, tokens=tokens, element=dtype.itemsize, top=top)
    assert counts.distinct_bytes == draft_loss_model.logits_cost(**shape).bytes
    assert counts.bytes == draft_loss_model.logits_requested(**shape)
    assert counts.read["student"] == counts.read["teacher"] == counts.written["student"]


def test_draft_loss_of_features() -> None:
    """Its matrix products are the library's: counted by torch. Of the logits, the kernel's part of the traffic."""
    positions, hidden, tokens, chunk = 11, 8, 300, 4
    student_TH, teacher_TH = torch.randn(positions, hidden, requires_grad=True), torch.randn(positions, hidden)
    head_VH = torch.randn(tokens, hidden)
    with counted({}) as counts, FlopCounterMode(display=False) as flops:
        loss = draft_loss(
            student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, chunk_rows=chunk, backend="triton"
        )
        loss.backward()
    shape = dict(positions=positions, hidden=hidden, tokens=tokens, element=4)
    model = draft_loss_model.features_cost(**shape, chunk=chunk)
    assert flops.get_total_flops() == model.flops
    # The products write both logits and read the slopes; of the kernel's reads and writes, besides, the losses are left out.
    logits = counts.bytes - 2 * 4 * positions * tokens - 4 * positions  # its second reading of both logits, the losses
    assert logits == 3 * 4 * positions * tokens
    assert model.bytes == 2 * logits + 4 * hidden * (3 * 3 * tokens + 3 * positions)  # three chunks


def settings_of(kind: str, temperature: float = 0.8) -> RowSettings:
    filters: dict[str, Any] = {"top_k": [50], "top_p": [0.9]} if kind == "filtered" else {}
    return RowSettings.of(seeds=[7], temperature=[0.0 if kind == "greedy" else temperature], **filters)


def candidates_of(logits_RV: torch.Tensor, settings: RowSettings) -> int:
    """Tokens above the first pivot that has top-k's number of them."""
    scores_RV = (logits_RV.float() - logits_RV.float().amax(-1, keepdim=True)) / settings.temperature_B
    step_P = torch.arange(1, sample_model.PIVOTS + 1).float()
    above_RP = (scores_RV[..., None] >= -(step_P + step_P**3 / 128)).sum(1)
    return int(sum(next(n for n in row if n >= 50) for row in above_RP.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "noise", "filtered"])
def test_sample(kind: sample_model.Kind, described: bool) -> None:
    assert (sample_model.SPLIT, sample_model.PIVOTS) == (sample_kernel.SPLIT, sample_kernel.PIVOTS)
    rows, vocab_size, settings = 2, 9001, settings_of(kind)
    logits_RV = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    with counted({"logits": logits_RV}) as counts:
        run = sample_and_describe if described else sample
        run(logits_RV, positions_R=torch.arange(rows), settings=settings, backend="triton")
    candidates = candidates_of(logits_RV, settings) if kind == "filtered" else 0
    shape: dict[str, Any] = dict(rows=rows, vocab_size=vocab_size)
    scratch = sample_model.scratch(**shape, kind=kind, described=described, candidates=candidates)
    assert counts.read["logits"] + 8 * rows == sample_model.cost(**shape, element=2).bytes
    assert counts.loaded["logits"] == sample_model.passes(kind=kind, described=described) * counts.read["logits"]
    assert counts.written["other"] == scratch + rows * (20 if described else 8)


@pytest.mark.parametrize("by_token", [True, False])
def test_verify_walk(by_token: bool) -> None:
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 3]] * 2)
    tree = Tree(tokens_BN=torch.tensor([[0, 5, 6, 7, 8, 9]] * 2), parents_BN=parents_BN)
    emitted_BN = torch.tensor([[5, 7, 0, 9, 0, 1], [6, 0, 0, 0, 0, 0]])  # 0 1 3 5; 0 2
    followers_BN = torch.tensor([[1, 3, -1, 5, -1, -1], [2, -1, -1, -1, -1, -1]])
    with counted({}) as counts:
        walks = walk(
            tree=tree, emitted_BN=emitted_BN, followers_BN=None if by_token else followers_BN, width=4, backend="triton"
        )
    visited = int(walks.counts_B.sum())
    assert visited == 6
    model = verify_model.walk_cost(rows=2, nodes=6, visited=visited, by_token=by_token)
    assert counts.distinct_bytes == counts.bytes == model.bytes


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_verify_sweeps(sampled: bool) -> None:
    """Nodes that accept their first child look at that child alone; all others at all of their logits."""
    rows, vocab_size, parents = 4, 603, [-1, 0, 0, 1, 1, 3]
    generator = torch.Generator().manual_seed(1)
    logits_BNV = torch.randn(rows, len(parents), vocab_size, generator=generator)
    logits_BNV[::2, :2, 77] += 20  # these accept it, and the others surely not
    tokens_BN = torch.tensor([[0, 77, 78, 77, 79, 80]] * rows)
    inner = [0, 1, 3]
    log_q_BEV = torch.randn(rows, len(inner), vocab_size, generator=generator)
    log_q_BEV[..., 77] += 9
    q_row_BN = torch.tensor([[0, 1, -1, 2, -1, -1]] * rows)
    parents_BN = torch.tensor([parents] * rows)
    tree = Tree(tokens_BN, parents_BN, log_q_BEV.log_softmax(-1), q_row_BN) if sampled else Tree(tokens_BN, parents_BN)
    settings = RowSettings.of(seeds=list(range(rows)), temperature=[1.0] * rows)
    positions_R = torch.arange(rows * len(parents))
    logits_RV = logits_BNV.flatten(0, 1)
    choice = sample_and_describe(logits_RV, positions_R=positions_R, settings=settings, backend="reference")
    named = {"logits": logits_RV, **({"log q": tree.log_q_BEV} if tree.log_q_BEV is not None else {})}
    with counted(named) as counts:
        decisions = decide(
            logits_RV, tree=tree, choice=choice, positions_R=positions_R, settings=settings, most_children=2, backend="triton"
        )  # fmt: skip
    first_N = torch.tensor([1, 3, -2, 5, -2, -2])
    accepted = int((decisions.followers_BN == first_N).sum())
    inner_swept = int((decisions.followers_BN != first_N)[:, inner].sum())
    assert accepted >= 2, "the case must tell something"
    assert inner_swept >= 2, "the case must tell something"
    model = verify_model.sweeps_cost(
        swept=rows * len(parents) - accepted,
        sampled=inner_swept if sampled else 0,
        accepted=accepted,
        accepted_sampled=accepted if sampled else 0,
        vocab_size=vocab_size,
        element=4,
    )
    assert counts.read["logits"] + counts.read["log q"] == model.bytes
    most = verify_model.cost(
        rows=rows, nodes=len(parents), expanded=len(inner) if sampled else 0, width=4, vocab_size=vocab_size, element=4
    )
    assert model.bytes < most.bytes
