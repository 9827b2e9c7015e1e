"""The verification kernels: their reference is eagle's rules row by row, and the Triton version is its reference."""

import math
from collections import Counter

import pytest
import torch

from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.kernels import dispatch
from eagle.kernels.sample.op import sample, sample_and_describe
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.verify.op import coupled_walk, decide, rejection_walk, walk
from eagle.kernels.verify.reference import Tree, Walks
from eagle.sample.noise import FINALS, coin
from eagle.sample.sampling import RowSampler, Sampling, draw
from eagle.verify.coupled import Coupled, Rule
from eagle.verify.rejection import Rejection
from tests.kernels.poison import poisoned

__all__ = ["poisoned"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4]
WIDTH = 4
ROWS = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=12, top_p=0.9),
    dict(temperature=1.4, min_p=0.02),
]


class Case:
    """Random logits, and trees drafted from noisy copies of them: children of a node are drawn without replacement."""

    def __init__(self, seed: int, *, vocab_size: int = 40, parents: list[int] = PARENTS, only: int | None = None):
        torch.manual_seed(seed)
        self.kinds = ROWS if only is None else [ROWS[only]]
        rows, nodes = len(self.kinds), len(parents)
        self.seeds = [(seed * 1_000_003 + b * (2**61 + 1)) % 2**64 for b in range(rows)]
        self.logits_BNV = torch.randn(rows, nodes, vocab_size) * 2
        self.positions_BN = torch.tensor([self._depth(parents, node) for node in range(nodes)]) + 10
        self.positions_BN = self.positions_BN.expand(rows, nodes) + torch.arange(rows)[:, None] * 100
        inner = sorted(set(parents) - {-1})
        log_q_BEV = (self.logits_BNV[:, inner] + torch.randn(rows, len(inner), vocab_size)).log_softmax(-1)
        if len(inner) > 1 and vocab_size > 6:  # this node's q holds two tokens: later children are fillers
            log_q_BEV[:, 1] = log_q_BEV[:, 1].masked_fill(torch.arange(vocab_size) >= 2, -math.inf).log_softmax(-1)
        tokens_BN, q_row_BN = torch.zeros(rows, nodes, dtype=torch.int64), torch.full((rows, nodes), -1)
        for place, node in enumerate(inner):
            children = [child for child in range(nodes) if parents[child] == node]
            noise_BV = -torch.log(-torch.log(torch.rand(rows, vocab_size)))
            tokens_BN[:, children] = (log_q_BEV[:, place] + noise_BV).topk(len(children)).indices
            q_row_BN[:, node] = place
        self.parents_BN = torch.tensor(parents).expand(rows, nodes)
        self.sampled = Tree(tokens_BN, self.parents_BN, log_q_BEV, q_row_BN)
        self.top = Tree(tokens_BN, self.parents_BN)
        self.most_children = max(Counter(parents).values())
        off = dict(top_k=0, top_p=1.0, min_p=0.0)
        columns = {name: [kind.get(name, off.get(name)) for kind in self.kinds] for name in ("temperature", *off)}
        self.settings = RowSettings.of(seeds=self.seeds, device=DEVICE, **columns)  # type: ignore[arg-type]

    @staticmethod
    def _depth(parents: list[int], node: int) -> int:
        return 0 if node == 0 else 1 + Case._depth(parents, parents[node])

    def expected(self, rule: Rule, tree: Tree, row: int) -> tuple[list[int], list[int], bool]:
        """What eagle's own rule does."""
        sampled = tree.log_q_BEV is not None
        draft = DraftTree.from_parents(
            tree.tokens_BN,
            self.parents_BN.contiguous(),
            children="sampled" if sampled else "top",
            log_q_BEV=tree.log_q_BEV,
            q_row_BN=tree.q_row_BN,
        )
        one = Sampling(seed=self.seeds[row], **self.kinds[row])  # type: ignore[arg-type]
        walked = rule.walk(draft, row, _View(self, row, RowSampler(sampling=one)))
        return walked.path, walked.tokens, walked.at_leaf

    def on(self, tree: Tree) -> Tree:
        return Tree(*(None if one is None else one.to(DEVICE) for one in tree))


class _View:
    def __init__(self, case: Case, row: int, sampler: RowSampler):
        self.case, self.row, self.sampler = case, row, sampler

    def processed(self, node: int, accepted: list[int]) -> torch.Tensor:
        return self.case.logits_BNV[self.row, node].clone()

    def _position(self, accepted: list[int]) -> int:
        return int(self.case.positions_BN[self.row, 0]) + len(accepted)

    def choose(self, node: int, accepted: list[int]) -> int:
        return self.sampler.choose(self.processed(node, accepted), self._position(accepted))

    def probabilities(self, node: int, accepted: list[int]) -> torch.Tensor:
        return self.sampler.probabilities(self.processed(node, accepted))

    def accepts(self, probability: float, accepted: list[int], attempt: int) -> bool:
        return coin(self.case.seeds[self.row], self._position(accepted), attempt) < probability

    def draw(self, weights_V: torch.Tensor, accepted: list[int]) -> int:
        return draw(weights_V, coin(self.case.seeds[self.row], self._position(accepted), 0, stream=FINALS))

    def stops(self, accepted: list[int]) -> bool:
        return False

    def ends(self, accepted: list[int]) -> bool:
        return False


def unpack(walks: Walks, row: int) -> tuple[list[int], list[int], bool]:
    count = int(walks.counts_B[row])
    assert bool((walks.tokens_BK[row, count:] == -1).all())
    assert bool((walks.path_BK[row, count:] == 0).all())
    return walks.path_BK[row, :count].tolist(), walks.tokens_BK[row, :count].tolist(), bool(walks.at_leaf_B[row])


def walked(case: Case, kind: str, backend: str) -> Walks:
    arguments = dict(positions_BN=case.positions_BN.to(DEVICE), settings=case.settings, width=WIDTH, backend=backend)
    logits_BNV = case.logits_BNV.to(DEVICE)
    with dispatch.record() as paths:
        if kind == "coupled":
            walks = coupled_walk(logits_BNV, tree=case.on(case.top), **arguments)  # type: ignore[arg-type]
        else:
            tree = case.on(case.sampled if kind == "sampled" else case.top)
            walks = rejection_walk(logits_BNV, tree=tree, most_children=case.most_children, **arguments)  # type: ignore[arg-type]
    assert {path for _, path in paths} == {backend}
    return walks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["coupled", "sampled", "top"])
def test_the_reference_walks_as_the_rules_do(kind: str) -> None:
    lengths = Counter[int]()
    for seed in range(12):
        case = Case(seed)
        if kind == "coupled":  # the first child is what the target emits, at every second node
            emitted = sample(
                case.logits_BNV.flatten(0, 1), positions_R=case.positions_BN.flatten(), settings=case.settings
            ).view(case.positions_BN.shape)
            for node, parent in ((1, 0), (4, 1), (6, 2)):
                case.top.tokens_BN[:, node] = emitted[:, parent]
        walks = walked(case, kind, "reference")
        for row in range(len(ROWS)):
            rule: Rule = Coupled() if kind == "coupled" else Rejection()
            tree = case.sampled if kind == "sampled" else case.top
            assert unpack(walks, row) == case.expected(rule, tree, row)
            lengths[int(walks.counts_B[row])] += 1
    assert len(lengths) > 2  # short and long walks have been seen


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["coupled", "sampled", "top"])
def test_the_kernels_walk_as_the_reference(kind: str) -> None:
    case = Case(1, parents=[-1, 0, 0, 1])
    got, expected = walked(case, kind, "triton"), walked(case, kind, "reference")
    for row in range(len(ROWS)):
        assert unpack(got, row) == unpack(expected, row)


def decisions(case: Case, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    logits_RV, positions_R = case.logits_BNV.flatten(0, 1).to(DEVICE), case.positions_BN.flatten().to(DEVICE)
    choice = sample_and_describe(logits_RV, positions_R=positions_R, settings=case.settings, backend="reference")
    both = [
        decide(
            logits_RV,
            tree=case.on(tree),
            choice=choice,
            positions_R=positions_R,
            settings=case.settings,
            most_children=case.most_children,
            backend=backend,  # type: ignore[arg-type]
        )
        for backend in ("triton", "reference")
    ]
    assert both[0].emitted_BN.tolist() == both[1].emitted_BN.tolist()
    assert both[0].followers_BN.tolist() == both[1].followers_BN.tolist()
    return both[0]


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("vocab_size", "seed", "kinds"), [(8, 0, None), (331, 0, 2), (4099, 8, 1)])
def test_every_node_decides_as_the_reference(vocab_size: int, seed: int, kinds: int | None) -> None:
    """Visited or not: acceptances, rejections, fillers and final draws, in two splits of the vocabulary too."""
    case = Case(seed, vocab_size=vocab_size, only=kinds)
    for tree in (case.sampled, case.top):
        _, followers_BN = decisions(case, tree)
        inner = followers_BN[:, [0, 1, 2, 4]]
        assert bool((inner >= 0).any())
        assert bool((inner < 0).any())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [22, 24, 26, 52])
def test_many_siblings(seed: int) -> None:
    """What q holds without the rejected counts the more, the more were rejected."""
    case = Case(seed, vocab_size=12, parents=[-1, *([0] * 7)], only=1)
    decisions(case, case.sampled)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
def test_chains_and_lonely_roots() -> None:
    for parents in ([-1, 0, 1, 2], [-1]):
        case = Case(3, parents=parents)
        decisions(case, case.top)
        if len(parents) > 1:
            decisions(case, case.sampled)


@pytest.mark.slow
def test_a_rejected_chain_draws_from_the_residual_alone() -> None:
    """p = (.7, .3), q = (.4, .6): a rejected B is always replaced by A, and the share of B in the output is p's."""
    nodes = 60
    parents_BN = torch.tensor([[-1, *range(nodes - 1)]], device=DEVICE)  # a chain: one child a node
    log_q_BEV = torch.tensor([0.4, 0.6], device=DEVICE).log().expand(1, nodes, 2).contiguous()
    tokens_BN = torch.ones(1, nodes, dtype=torch.int64, device=DEVICE)  # every draft is B
    tree = Tree(tokens_BN, parents_BN, log_q_BEV, torch.arange(nodes, device=DEVICE)[None])
    rows = RowSettings.of(seeds=[9], temperature=[1.0], device=DEVICE)
    logits_RV = torch.tensor([0.7, 0.3], device=DEVICE).log().expand(nodes, 2).contiguous()
    positions_R = torch.arange(nodes, device=DEVICE)
    choice = sample_and_describe(logits_RV, positions_R=positions_R, settings=rows, backend="reference")
    emitted_BN, followers_BN = decide(
        logits_RV,
        tree=tree,
        choice=choice,
        positions_R=positions_R,
        settings=rows,
        most_children=1,
        backend="triton",
    )
    accepted_N, emitted_N = followers_BN[0, :-1] >= 0, emitted_BN[0, :-1]
    assert abs(float(accepted_N.float().mean()) - 0.5) < 4 * 0.5 / nodes**0.5  # p(B) / q(B)
    assert bool((emitted_N[accepted_N] == 1).all())
    assert bool((emitted_N[~accepted_N] == 0).all())


def test_a_certain_draft_is_always_accepted_and_an_impossible_one_never() -> None:
    """Whatever the coin."""
    logits_RV = torch.full((2, 5), -math.inf, device=DEVICE)
    logits_RV[:, 2] = 0.0
    rows = RowSettings.of(seeds=[3], temperature=[1.0], device=DEVICE)
    for token, follower in ((2, 1), (4, -1)):
        tree = Tree(*(torch.tensor([one], device=DEVICE) for one in ([0, token], [-1, 0])))
        for start in range(0, 40, 10):
            positions_R = torch.tensor([start, start + 1], device=DEVICE)
            choice = sample_and_describe(logits_RV, positions_R=positions_R, settings=rows, backend="reference")
            got = decide(
                logits_RV,
                tree=tree,
                choice=choice,
                positions_R=positions_R,
                settings=rows,
                most_children=1,
                backend="triton",
            )
            assert got.followers_BN.tolist() == [[follower, -1]]
            assert got.emitted_BN.tolist() == [[2, 2]]


def test_a_walk_that_outgrows_the_width_ends_there() -> None:
    nodes = 6
    tree = Tree(torch.arange(nodes, device=DEVICE)[None], torch.tensor([[-1, *range(nodes - 1)]], device=DEVICE))
    emitted_BN = torch.arange(1, nodes + 1, device=DEVICE)[None]
    for backend in ("triton", "reference"):
        full = walk(tree=tree, emitted_BN=emitted_BN, width=nodes, backend=backend)  # type: ignore[arg-type]
        assert unpack(full, 0) == ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], True)
        cut = walk(tree=tree, emitted_BN=emitted_BN, width=3, backend=backend)  # type: ignore[arg-type]
        assert unpack(cut, 0) == ([0, 1, 2], [1, 2, 3], False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["coupled", "sampled", "top"])
def test_a_node_without_a_token_to_choose_emits_none_and_ends_the_walk(kind: str) -> None:
    """The other nodes decide as ever: a nan that no walk gets to is none of its business."""
    whole, broken = Case(1, parents=[-1, 0, 0, 1]), Case(1, parents=[-1, 0, 0, 1])
    expected = walked(whole, kind, "reference")
    visited = {node for row in range(len(ROWS)) for node in unpack(expected, row)[0]}
    for node in range(4):
        broken.logits_BNV = whole.logits_BNV.clone()
        broken.logits_BNV[:, node, 2] = math.nan
        for backend in ("reference", "triton") if node < 2 else ("reference",):
            got = walked(broken, kind, backend)
            for row in range(len(ROWS)):
                path, tokens, at_leaf = unpack(expected, row)
                if node in path:
                    place = path.index(node)
                    assert got.counts_B[row] == place + 1
                    assert got.tokens_BK[row, : place + 1].tolist() == [*tokens[:place], -1]
                else:
                    assert unpack(got, row) == (path, tokens, at_leaf)
    assert 0 in visited


def test_mistakes_are_named() -> None:
    case = Case(0)
    logits_BNV, positions_BN = case.logits_BNV.to(DEVICE), case.positions_BN.to(DEVICE)
    tree = case.on(case.top)
    with pytest.raises(EagleError, match="do not belong together"):
        coupled_walk(logits_BNV[:, 1:], tree=tree, positions_BN=positions_BN, settings=case.settings, width=WIDTH)
    with pytest.raises(EagleError, match=r"emitted tokens are torch.int64 \(4, 7\), the tree wants int64 \(4, 8\)"):
        walk(tree=tree, emitted_BN=positions_BN[:, 1:], width=WIDTH)
    with pytest.raises(EagleError, match="width is 0"):
        walk(tree=tree, emitted_BN=positions_BN, width=0)
    many = torch.zeros(1, 300, dtype=torch.int64, device=DEVICE)
    with pytest.raises(EagleError, match="300 nodes are more than 256"):
        walk(tree=Tree(many, many - 1), emitted_BN=many, width=2, backend="triton")
    with pytest.raises(EagleError, match="log_q is over 39 tokens, the logits over 40"):
        rejection_walk(
            logits_BNV,
            tree=case.on(case.sampled._replace(log_q_BEV=case.sampled.log_q_BEV[..., 1:])),  # type: ignore[index]
            positions_BN=positions_BN,
            settings=case.settings,
            most_children=3,
            width=WIDTH,
        )
