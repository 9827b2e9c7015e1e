"""Decoding with EAGLE-3 heads: the target's aux states on the way to the drafter, the drafts, and the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_head import HeadDrafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.fixed_forward import StaticForward
from eagle.target.target import Target
from tests import eagle3_reference as reference
from tests.decoding import decode_config
from tests.exact import same
from tests.head_drafters import eagle2_drafter
from tests.oracles import BatchOracle, answers, padded, prompt, with_oracle
from tests.tiny import tiny_model

AUX = (2, 4, 5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=8))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    return reference_head(tmp_path_factory.mktemp("head"))


def reference_head(folder: Path, draft: int = reference.D) -> Eagle3Head:
    loaded = load_head(reference.write_reference(folder, reference.random_state(draft=draft), draft_vocab_size=draft))
    assert isinstance(loaded, Eagle3Head)
    return loaded


def hidden_states(target: Target, ids_BT: torch.Tensor, layers: Sequence[int] = AUX) -> torch.Tensor:
    """Hugging Face's own, [B, T, X]."""
    with torch.inference_mode():
        states = target.model(ids_BT, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[c] for c in layers], dim=-1)


def test_hooks_live_for_one_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in target.model.modules())

    cache = target.new_cache(rows=1, capacity=16)
    target.prefill(prompt(), torch.tensor([9]), cache, AUX)
    assert hooks() == 0
    monkeypatch.setattr(target.decoder.norm, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.features(prompt(), AUX)
    assert hooks() == 0
    with pytest.raises(EagleError, match=r"aux layers \[8\] do not exist"):
        target.prefill(prompt(), torch.tensor([9]), target.new_cache(rows=1, capacity=16), (2, 8))


class _Recorder(BatchOracle):
    """Keeps what each row observed."""

    aux_layers = AUX

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        super().reset(rows, capacity=capacity)
        self.observed: dict[int, list[torch.Tensor]] = {id(row): [] for row in rows}
        self.followed: dict[int, list[int]] = {id(row): [] for row in rows}
        self.all_rows = list(rows)
        _Recorder.last = self

    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        super().observe(states_BKX, next_tokens_BK, counts_B)
        for row, states_KX, tokens_K, count in zip(self.rows, states_BKX, next_tokens_BK, counts_B.tolist()):
            self.observed[id(row)].append(states_KX[:count])
            self.followed[id(row)] += tokens_K[:count].tolist()

    last: "_Recorder"


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_drafter_sees_the_aux_states_of_committed_tokens_and_of_no_other(target: Target, side: str) -> None:
    ids, mask = padded([prompt(length, seed=length)[0].tolist() for length in (3, 17, 9)], side)
    plain, out = with_oracle(target, ids, mask, kind=_Recorder, max_new_tokens=24, eos_token_id=[])
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats is not None
    assert max(stats.tau for stats in out.stats) > 1.5  # whole paths were accepted
    recorder = _Recorder.last
    for row in recorder.all_rows:
        seen_TX, tokens = torch.cat(recorder.observed[id(row)]), row.tokens
        assert recorder.followed[id(row)][: len(tokens) - 1] == tokens[1:][: len(seen_TX)]
        count = min(len(seen_TX), len(tokens))
        assert count > 20
        expected_TX = hidden_states(target, torch.tensor([tokens]))[0, :count]
        assert same(seen_TX[:count], expected_TX)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 12])
def test_drafts_are_the_references_chain(target: Target, tmp_path: Path, window: int | None) -> None:
    head = reference_head(tmp_path)
    head.bind(target.num_layers)
    head.config.sliding_window = window
    state = reference.random_state()
    ids_T = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(3))
    states_TX = hidden_states(target, ids_T[None])[0]
    drafter = eagle2_drafter(head, target.tokens, budget=6, top_k=1, depth=5)
    assert drafter.aux_layers == AUX
    row = Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)
    drafter.reset([row], capacity=32)
    seen = 0
    for block in (9, 1, 4):  # proposals in between: what a tree left in the cache must not matter
        drafter.observe(
            states_TX[None, seen : seen + block], ids_T[None, seen + 1 : seen + block + 1], torch.tensor([block])
        )
        seen += block
        expected = reference.draft_chain(
            state, states_TX[:seen], ids_T[1 : seen + 1].tolist(), target.tokens.embedding_VH, depth=5, window=window
        )
        assert drafter.propose().tokens_BN[0].tolist() == [int(ids_T[seen]), *expected]


@pytest.mark.slow
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("window", [None, 2, 5, 13])
@torch.inference_mode()
def test_every_path_of_a_tree_sees_the_window_of_its_own_positions(
    target: Target, tmp_path: Path, window: int | None, fixed_shapes: bool
) -> None:
    """Siblings share a position, and rows differ in length: a window by cache slots would cut other tokens off."""
    head = reference_head(tmp_path)
    head.bind(target.num_layers)
    head.config.sliding_window = window
    state, embedding_VH = reference.random_state(), target.tokens.embedding_VH
    static = StaticForward(layers=1, device=torch.device("cpu"), capture="none") if fixed_shapes else None
    drafter = HeadDrafter(head, target.tokens, DynamicTree(budget=24, top_k=3, depth=4), static=static)
    rows = [Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9) for _ in "ab"]
    ids_BT = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(3))
    states_BTX = hidden_states(target, ids_BT)
    drafter.reset(rows, capacity=32)
    drafter.observe(states_BTX[:, :9], ids_BT[:, 1:10], torch.tensor([9, 4]))
    drafter.propose()
    lengths = torch.tensor([9, 4]), torch.tensor([2, 3])
    more = [(states_BTX[b, n : n + 3], ids_BT[b, n + 1 : n + 4]) for b, n in enumerate(lengths[0].tolist())]
    drafter.observe(torch.stack([one for one, _ in more]), torch.stack([two for _, two in more]), lengths[1])
    tree = drafter.propose()
    for b, length in enumerate((lengths[0] + lengths[1]).tolist()):
        for node in range(1, tree.nodes):
            path = [node]
            while int(tree.parents_BN[b, path[0]]) > 0:
                path.insert(0, int(tree.parents_BN[b, path[0]]))
            features_TH, total = reference.fuse(state, states_BTX[b, :length]), 0.0
            tokens = ids_BT[b, 1 : length + 1].tolist()
            for one in path:
                out_H = reference.forward(state, features_TH, embedding_VH[tokens], window=window)[-1]
                draft_ids = (state["d2t"] + torch.arange(reference.D)).tolist()
                token = int(tree.tokens_BN[b, one])
                total += float(reference.logits(state, out_H).log_softmax(-1)[draft_ids.index(token)])
                features_TH, tokens = torch.cat([features_TH, out_H[None]]), [*tokens, token]
            assert float(tree.log_confidence_BN[b, node]) == pytest.approx(total, abs=1e-3), path


def test_an_lm_head_of_its_own_leaves_the_targets_rows_uncopied(target: Target, head: Eagle3Head) -> None:
    head.bind(target.num_layers)
    drafter = eagle2_drafter(head, target.tokens)
    assert drafter.draft_logits(torch.randn(1, 2, 32)).shape == (1, 2, reference.D)
    assert "layers" not in vars(drafter.vocabulary)


DECODES: list[dict[str, Any]] = [
    {},
    {"budget": 8, "top_k": 3, "depth": 4},
    {"drafter": "static"},
    {"drafter": "chain", "depth": 5},
    {"engine": "compiled"},
]


@pytest.mark.slow
@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": [7, 8, 9]}])
@pytest.mark.parametrize("draft", [reference.D, reference.V])
def test_a_head_does_not_change_the_text(
    decode: dict[str, Any], sampling: dict[str, Any], draft: int, target: Target, tmp_path: Path
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        target, reference_head(tmp_path, draft), decode=decode_config(**decode)
    )
    ids, mask = padded([prompt(length, seed=length)[0].tolist() for length in (2, 19, 8)], "left")
    call: dict[str, Any] = {"max_new_tokens": 24, **sampling}
    try:
        out, plain = decoder.generate(ids, mask, **call), decoder.plain().generate(ids, mask, **call)
    finally:
        target.use_engine("eager")
    assert answers(out, ids.shape[1]) == answers(plain, ids.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_take_the_heads_probabilities(rule: Any, target: Target, head: Eagle3Head) -> None:
    decode = decode_config(rule=rule, drafter="chain", depth=3)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
    greedy = decoder.generate(prompt(), max_new_tokens=12, do_sample=False, eos_token_id=[])
    assert torch.equal(
        greedy.sequences, decoder.plain().generate(prompt(), max_new_tokens=12, eos_token_id=[]).sequences
    )
    sampled = decoder.generate(prompt(), max_new_tokens=12, do_sample=True, seed=1, eos_token_id=[])
    assert sampled.sequences.shape == greedy.sequences.shape


def test_a_head_that_knows_the_target_is_believed(tmp_path: Path) -> None:
    """A target without attention and MLP says by its embeddings alone; a head that reads them through `fc` says the same."""
    model = tiny_model(num_hidden_layers=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)  # so it repeats its last token
    state = reference.random_state(draft=reference.V)
    for key in ("fc.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        state[key].zero_()
    state["fc.weight"][:, -32:] = torch.eye(32)  # the last of the three layers
    state["norm.weight"].fill_(1)
    state["lm_head.weight"] = model.lm_head.weight.detach().clone()
    layers: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}
    folder = reference.write_reference(tmp_path, state, draft_vocab_size=reference.V, **layers)
    decoder = SpeculativeDecoder.from_pretrained(model, folder, decode=decode_config(drafter="chain", depth=3))
    out = decoder.generate(prompt(), max_new_tokens=21, eos_token_id=[])
    assert torch.equal(out.sequences, decoder.plain().generate(prompt(), max_new_tokens=21, eos_token_id=[]).sequences)
    assert out.stats is not None
    assert out.stats[0].tau == 4.0


def test_the_tree_is_as_deep_as_published_for_the_heads_version(target: Target, head: Eagle3Head) -> None:
    one = EagleHead(EagleHeadConfig.for_target(target.config)).eval()
    for made, asked, depth in ((one, None, 6), (head, None, 8), (head, 3, 3)):
        decoder = SpeculativeDecoder.from_pretrained(target, made, decode=decode_config(depth=asked).as_published())
        assert isinstance(decoder.drafter, HeadDrafter)
        assert isinstance(decoder.drafter.shape, DynamicTree)
        assert decoder.drafter.shape.depth == depth


def test_an_eagle1_head_asks_for_features_only(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    asked: list[Sequence[int]] = []
    run_step = Target.run_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[4])
        return run_step(*args, **kwargs)

    monkeypatch.setattr(Target, "run_step", spy)
    one = EagleHead(EagleHeadConfig.for_target(target.config)).eval()
    SpeculativeDecoder.from_pretrained(target, one).generate(prompt(), max_new_tokens=4)
    assert asked
    assert not any(asked)
