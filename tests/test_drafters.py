"""Every drafter: the text is plain decoding's, whatever is proposed; what each proposes; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.decoder import SpeculativeDecoder, SpeculativeOutput
from eagle.decode.make import make_drafter
from eagle.draft.by_level import TreeShape
from eagle.draft.by_model import ModelDrafter
from eagle.draft.by_ngram import NgramDrafter, NgramIndex
from eagle.draft.drafter import Drafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import PUBLISHED, StaticTree, read_paths
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.exact import LOG_Q, head_in_float64, in_float64
from tests.head_drafters import static_drafter
from tests.test_drafting import log_q_after
from tests.tiny import VOCAB, save_tiny_target, tiny_model, tiny_tokenizer

SAMPLINGS: dict[str, dict[str, Any]] = {
    "T0": {},
    "T0.7": {"do_sample": True, "temperature": 0.7, "seed": 11},
    "T1 top-p": {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "seed": 12},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


@pytest.fixture(scope="module")
def other() -> Target:
    """A draft model of another shape, with the target's tokenizer."""
    return Target(tiny_model("qwen2", seed=4, num_hidden_layers=1), tiny_tokenizer(), name="other")


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 300, (4, 21), generator=torch.Generator().manual_seed(8))
    ids[2, 10:] = ids[2, :11].clone()  # a repetition, for the n-grams
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, :20], mask[3, :13] = 0, 0, 0
    return ids, mask


def check_same_text(target: Target, drafter: Drafter, **arguments: Any) -> SpeculativeOutput:
    """Decodes a ragged batch with the drafter and plainly; returns the first."""
    ids, mask = ragged()
    arguments = {"max_new_tokens": 24, "eos_token_id": [], **arguments}
    out = SpeculativeDecoder(target, drafter).generate(ids, mask, **arguments)
    plain = SpeculativeDecoder(target).generate(ids, mask, **arguments)
    assert torch.equal(out.sequences, plain.sequences)
    return out


def taus(out: SpeculativeOutput) -> list[float]:
    assert out.stats is not None
    return [stats.tau for stats in out.stats]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "decode",
    [
        dict(budget=12, top_k=3, depth=4),
        dict(budget=12, top_k=3, depth=4, level_cost=0.4),
        dict(drafter="static"),
        dict(drafter="chain", depth=4),
        dict(drafter="model", budget=12, top_k=3, depth=4),
        dict(drafter="ngram"),
        dict(drafter="ngram", continuations=3, depth=5),
    ],
    ids=lambda decode: "-".join(str(value) for value in decode.values()),
)
def test_no_drafter_changes_the_text_of_a_ragged_batch(
    decode: dict[str, Any], sampling: dict[str, Any], target: Target, head: EagleHead, other: Target
) -> None:
    model = other if decode.get("drafter") == "model" else None
    drafter = make_drafter(target, decode_config(**decode), head=head, draft_model=model)
    assert drafter is not None
    check_same_text(target, drafter, **sampling)


@pytest.mark.slow
def test_rows_that_end_early_leave_the_others_text_as_it_is(target: Target, head: EagleHead, other: Target) -> None:
    ids, mask = ragged()
    plain = SpeculativeDecoder(target).generate(ids, mask, max_new_tokens=24, eos_token_id=[]).sequences[:, 21:]
    eos = [int(plain[1, 3]), int(plain[3, 9])]
    for drafter in (
        static_drafter(head, target.tokens),
        ModelDrafter(other, target, DynamicTree(budget=9, top_k=2, depth=4)),
        ModelDrafter(target, target, DynamicTree(budget=5, top_k=1, depth=4)),
        NgramDrafter(),
    ):
        out = check_same_text(target, drafter, eos_token_id=eos)
        assert out.stats is not None
        assert len({stats.new_tokens for stats in out.stats}) > 1


def test_rows_keep_their_own_noise_when_others_have_ended(target: Target) -> None:
    ids, mask = ragged()
    sampling = dict(do_sample=True, temperature=1.0, seed=9)
    plain = SpeculativeDecoder(target).generate(ids, mask, max_new_tokens=24, eos_token_id=[], **sampling)
    eos = [int(plain.sequences[0, 21 + 4]), int(plain.sequences[2, 21 + 9])]
    out = check_same_text(target, ModelDrafter(target, target, StaticTree()), eos_token_id=eos, **sampling)
    assert out.stats is not None
    assert len({stats.new_tokens for stats in out.stats}) > 1
    for stats in out.stats:  # nothing is drafted behind the end of the last block
        assert stats.accepted[:-1] == [5] * (len(stats.accepted) - 1)
        assert len(stats.accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("shape", "depth"), [(DynamicTree(budget=5, top_k=1, depth=4), 4), (StaticTree(), 5)])
def test_the_target_drafting_for_itself_accepts_everything(
    shape: TreeShape, depth: int, sampling: dict[str, Any], target: Target
) -> None:
    """Coupled noise: the draft's likeliest token IS the one verification emits, at every temperature."""
    new = 1 + 5 * (depth + 1)  # one from the prefill, then whole trees
    out = check_same_text(target, ModelDrafter(target, target, shape), max_new_tokens=new, **sampling)
    assert taus(out) == [depth + 1.0] * 4


def test_a_draft_model_that_ignores_the_noise_accepts_less(target: Target) -> None:
    """The test above is about the noise: with plain top-k children a sampling target does not accept everything."""
    shape = DynamicTree(budget=5, top_k=1, depth=4, children="top")
    out = check_same_text(target, ModelDrafter(target, target, shape), do_sample=True, temperature=1.0, seed=1)
    assert max(taus(out)) < 4


class _Recorded:
    """A drafter that keeps what it proposed."""

    def __init__(self, drafter: Any):
        self.drafter, self.trees = drafter, list[DraftTree]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self) -> DraftTree:
        self.trees.append(self.drafter.propose())
        return self.trees[-1]


def observed(drafter: Drafter, target: Target, rows: list[list[int]]) -> DraftTree:
    """What a greedy drafter proposes after rows (without their last tokens) were fed in two uneven blocks."""
    drafter.reset(
        [
            Row(prompt_length=1, tokens=row[:1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)
            for row in rows
        ],
        capacity=32,
    )
    first = [max(1, len(row) // 2) for row in rows]
    features = [target.features(torch.tensor([row]))[0][0] for row in rows]
    for starts, ends in (([0] * len(rows), first), (first, [len(row) - 1 for row in rows])):
        parts = [features[b][start:end] for b, (start, end) in enumerate(zip(starts, ends))]
        following = [torch.tensor(rows[b][start + 1 : end + 1]) for b, (start, end) in enumerate(zip(starts, ends))]
        drafter.observe(
            torch.nn.utils.rnn.pad_sequence(parts, batch_first=True),
            torch.nn.utils.rnn.pad_sequence(following, batch_first=True),
            torch.tensor([end - start for start, end in zip(starts, ends)]),
        )
        tree = drafter.propose()
    return tree


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root's child on; padding nodes have none."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


@pytest.mark.parametrize("paths", [PUBLISHED, ((0,),), ((0,), (2,), (2, 1), (0, 0), (0, 3), (2, 1, 0))])
def test_static_trees_hold_the_ranked_children_of_the_plain_procedure(
    paths: tuple[tuple[int, ...], ...], target: Target, head: EagleHead
) -> None:
    target, head = in_float64(target), head_in_float64(head)
    rows = [torch.randint(3, 300, (length,)).tolist() for length in (13, 5, 17)]
    tree = observed(static_drafter(head, target.tokens, paths), target, rows)
    assert tree.nodes == len(paths) + 1
    assert tree.depths_BN[0].tolist() == sorted(tree.depths_BN[0].tolist())
    for b, row in enumerate(rows):
        assert tree.tokens_BN[b, 0] == row[-1]
        features_LH = target.features(torch.tensor([row[:-1]]))[0][0]
        expected: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        confidence = {(): 0.0}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            above = expected[path[:-1]]
            best = log_q_after(head, target, features_LH, row[1:], list(above)).sort(descending=True)
            expected[path] = (*above, int(best.indices[path[-1]]))
            confidence[path] = confidence[path[:-1]] + float(best.values[path[-1]])
        assert paths_of(tree, b) == list(expected.values())
        assert tree.log_confidence_BN[b].tolist() == pytest.approx(list(confidence.values()), rel=0, abs=LOG_Q)


def test_the_published_tree_has_25_nodes_below_the_root_and_six_levels_of_context() -> None:
    shape = StaticTree()
    assert (len(shape.paths), shape.depth, shape.widest) == (25, 5, 4)
    # expanded below the root: [0] [1] [2] [3], [0,0] [0,1] [0,2] [1,0], [0,0,0], [0,0,0,0]
    assert shape.columns == 10


def test_a_tree_file_gives_its_paths_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps([[1], [0, 0, 2], [0], [0, 0]]))
    assert read_paths(tmp_path / "tree.json") == ((0,), (1,), (0, 0), (0, 0, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [0, 0, 1]]", r"\[0, 0, 1\] has no parent; add \[0, 0\]"),
        ("[[0], [0]]", "there twice"),
        ("[[0], []]", r"\[\] is not a path"),
        ("[[0], [-1]]", "not a path"),
        ("[[0], [true]]", "not a path"),
        ("[0, 1]", "0 is not a path"),
        ("[]", "no paths"),
        ('{"paths": []}', "holds dict"),
        ("[[0]", "not valid JSON"),
    ],
)
def test_tree_files_that_hold_no_tree_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(EagleError, match=message):
        read_paths(tmp_path / "tree.json")
    with pytest.raises(EagleError, match=r"no\.json cannot be read"):
        read_paths(tmp_path / "no.json")


def test_a_draft_models_chain_is_its_own_greedy_continuation(target: Target, other: Target) -> None:
    rows = [torch.randint(3, 300, (length,)).tolist() for length in (9, 14, 3)]
    tree = observed(ModelDrafter(other, target, DynamicTree(budget=6, top_k=1, depth=5)), target, rows)
    for b, row in enumerate(rows):
        ids = torch.tensor([row])
        expected = SpeculativeDecoder(other).generate(ids, max_new_tokens=5, eos_token_id=[]).sequences[0, len(row) :]
        assert tree.tokens_BN[b].tolist() == [row[-1], *expected.tolist()]


@pytest.mark.slow
def test_draft_models_with_position_tables_draft_up_to_their_end_and_no_further(target: Target) -> None:
    short = Target(tiny_model("gpt2", n_positions=40), tiny_tokenizer(), name="short")
    drafter = ModelDrafter(short, target, DynamicTree(budget=20, top_k=2, depth=6))
    check_same_text(target, drafter, max_new_tokens=19)  # 21 + 19 = 40
    with pytest.raises(EagleError, match="41 tokens, the draft model short has 40 positions"):
        check_same_text(target, drafter, max_new_tokens=20)
    same = ModelDrafter(short, short, DynamicTree(budget=7, top_k=1, depth=6))
    assert max(taus(check_same_text(short, same, max_new_tokens=19))) > 4


def test_near_the_end_of_a_position_table_trees_get_shallow_and_padding_stays_inside(target: Target) -> None:
    short = Target(tiny_model("gpt2", n_positions=40), tiny_tokenizer(), name="short")
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    rows = [
        Row(prompt_length=1, tokens=[int(ids[b, 0])], sampler=RowSampler(sampling=Sampling()), max_new_tokens=39)
        for b in range(2)
    ]
    for shape in (DynamicTree(budget=40, top_k=2, depth=6), StaticTree()):
        drafter = ModelDrafter(short, target, shape)
        drafter.reset(rows, capacity=40)
        nothing = torch.empty(2, 0, 32)
        drafter.observe(nothing, ids[:, 1:37], torch.tensor([36, 5]))
        drafter.observe(nothing, ids[:, 31:38], torch.tensor([1, 7]))  # beside row 1's 7 tokens, 6 of padding for row 0
        assert drafter.cache.lengths_B.tolist() == [38, 13]
        # Children of the root are run at position 38, theirs at 39: a third level is the last.
        assert int(drafter.propose().depths_BN.max()) == 3
        drafter.observe(nothing, ids[:, 38:40], torch.tensor([2, 1]))
        assert int(drafter.propose().depths_BN.max()) == 1


@pytest.mark.slow
def test_a_draft_model_with_another_tokenizer_is_refused_and_padding_of_the_vocabulary_is_not(target: Target) -> None:
    changed = tiny_tokenizer()
    changed.add_tokens(["<|another|>"])
    with pytest.raises(EagleError, match=r"another tokenizer .* 1 tokens differ, e\.g\. '<\|another\|>'"):
        ModelDrafter(Target(tiny_model(), changed), target, DynamicTree())
    with pytest.raises(EagleError, match=r"has 400 tokens, the target .* 384"):
        ModelDrafter(Target(tiny_model(vocab_size=400)), target, DynamicTree())
    for size in (VOCAB + 16, VOCAB - 16):
        padded = Target(tiny_model(vocab_size=size), tiny_tokenizer())
        tree = _Recorded(ModelDrafter(padded, target, DynamicTree(budget=40, top_k=6, depth=3)))
        check_same_text(target, tree)
        assert max(int(tree.tokens_BN[:, 1:].max()) for tree in tree.trees) < min(size, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("size", [VOCAB + 16, VOCAB - 16])
@pytest.mark.parametrize(("rule", "top_k"), [("coupled", 3), ("rejection", 3), ("rejection", 1), ("block", 1)])
def test_a_draft_model_of_another_padding_serves_every_rule(rule: str, top_k: int, size: int, target: Target) -> None:
    """It never proposes what only one of the two has, and what it is tested against has the target's width."""
    padded = Target(tiny_model(vocab_size=size), tiny_tokenizer())
    decode = decode_config(drafter="model", budget=9, top_k=top_k, depth=3)
    decoder = SpeculativeDecoder.from_pretrained(target, decode=decode, rule=rule, draft_model=padded)
    ids, mask = ragged()
    for sampling in SAMPLINGS.values():
        out = decoder.generate(ids, mask, max_new_tokens=8, eos_token_id=[], **sampling)
        assert out.sequences.shape == (4, 21 + 8)
        if rule == "coupled" or not sampling:
            plain = decoder.plain().generate(ids, mask, max_new_tokens=8, eos_token_id=[], **sampling)
            assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_depth_that_batch_mates_decide_is_refused_where_the_text_depends_on_it(
    rule: str, target: Target, head: EagleHead
) -> None:
    with pytest.raises(EagleError, match="depth would depend on the batch"):
        decode_config(rule=rule, top_k=1, budget=4, depth=3, level_cost=0.4)
    decode = decode_config(top_k=1, budget=4, depth=3, level_cost=0.4)
    with pytest.raises(EagleError, match="depth would depend on the batch"):
        SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule)


def test_two_texts_of_one_decoder_do_not_mix(target: Target, head: EagleHead) -> None:
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(budget=6, top_k=2, depth=3))
    prompts = [torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    first = decoder.pieces(prompts[0], max_new_tokens=20, do_sample=False, eos_token_id=[])
    next(first)
    second = [piece.token for piece in decoder.pieces(prompts[1], max_new_tokens=20, do_sample=False, eos_token_id=[])]
    alone = decoder.plain().generate(prompts[1], max_new_tokens=20, do_sample=False, eos_token_id=[])
    assert second == alone.sequences[0, 9:].tolist()
    with pytest.raises(EagleError, match="another text was begun with this decoder"):
        list(first)
    plain = decoder.plain()
    both = [plain.pieces(prompt, max_new_tokens=12, do_sample=False, eos_token_id=[]) for prompt in prompts]
    assert len(list(zip(*both))) == 12, "plain decoding has no drafter to share"


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    shortest=st.integers(1, 2),
    extra=st.integers(0, 3),
    count=st.integers(1, 3),
    length=st.integers(1, 6),
)
@settings(deadline=None)
def test_the_index_finds_what_a_search_through_the_whole_row_finds(
    tokens: list[int], shortest: int, extra: int, count: int, length: int
) -> None:
    index = NgramIndex(tokens[0], shortest=shortest, longest=shortest + extra, places=count)
    for start in range(1, len(tokens), 3):
        index.extend(tokens[start : start + 3])
    expected: list[list[int]] = []
    for n in range(shortest + extra, shortest - 1, -1):
        matches = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[len(tokens) - n :]]
        for end in matches[::-1][:count]:
            text = list(tokens)
            for i in range(length):
                text.append(text[end + i])  # beyond the row's end it reads what it has just written
            if text[len(tokens) :] not in expected:
                expected.append(text[len(tokens) :])
    assert index.continuations(length=length, count=count) == expected[:count]


def test_planted_repetitions_are_found_and_rows_are_padded_beside_them(target: Target) -> None:
    phrase = [7, 8, 9, 10, 11, 12]
    rows = [[3, 4, *phrase, 50, 51, 7, 8], [5, 6, 7, 8, 9], [60, 1, 2, 61, 1, 2, 62, 1, 2]]
    tree = observed(NgramDrafter(depth=4, continuations=2, longest=2), target, rows)
    assert paths_of(tree, 0)[-4:] == [(9,), (9, 10), (9, 10, 11), (9, 10, 11, 12)]
    assert set(paths_of(tree, 1)) == {()}  # nothing there before: the root and padding
    # The latest continuation of [1, 2] runs to the end and repeats; the other follows the first occurrence.
    assert set(paths_of(tree, 2)[1:]) == {
        *((62,), (62, 1), (62, 1, 2), (62, 1, 2, 62)),
        *((61,), (61, 1), (61, 1, 2), (61, 1, 2, 62)),
    }
    for b in range(3):
        depths = tree.depths_BN[b].tolist()
        assert depths == sorted(depths)
        # Padding nodes hang nowhere: a walk from the root meets every other node and none of them.
        reached, children = [0], tree.children_of(b)
        for node in reached:
            reached.extend(children[node])
        paths = paths_of(tree, b)
        assert sorted(reached) == [0] + [node for node in range(1, tree.nodes) if paths[node]]
        assert len({paths[node] for node in reached}) == len(reached)


def test_a_repetitive_text_is_accepted_in_long_blocks(target: Target) -> None:
    """The target, made to repeat itself, agrees with the n-grams."""

    def repeat(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[0, 100 + ids.shape[1] % 5] = 0
        return forced

    ids = torch.tensor([[100 + i % 5 for i in range(12)]])
    out = SpeculativeDecoder(target, NgramDrafter(depth=7)).generate(
        ids, max_new_tokens=41, eos_token_id=[], logits_processor=[repeat]
    )
    assert out.sequences[0].tolist() == [100 + i % 5 for i in range(53)]
    assert taus(out) == [8.0]


def test_the_budget_cuts_n_gram_trees(target: Target) -> None:
    rows = [[1, 2, 3, 4, 1, 5, 6, 7, 1, 8, 9, 10, 1]]
    full = observed(NgramDrafter(depth=3, continuations=3), target, rows)
    cut = observed(NgramDrafter(depth=3, continuations=3, budget=6), target, rows)
    assert (full.nodes, cut.nodes) == (10, 6)
    assert paths_of(cut, 0) == [(), (8,), (5,), (2,), (8, 9), (5, 6)]


class _CountedList(list):  # type: ignore[type-arg]
    """Counts how many elements are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        got = super().__getitem__(place)
        _CountedList.reads += len(got) if isinstance(place, slice) else 1
        return got


def test_a_step_reads_as_much_of_a_long_row_as_of_a_short_one() -> None:
    def reads(length: int) -> int:
        index = NgramIndex(0, shortest=1, longest=3, places=2)
        index.tokens = _CountedList(index.tokens)
        index.extend([i % 7 for i in range(1, length)])
        _CountedList.reads = 0
        index.extend([length % 7, (length + 1) % 7])
        index.continuations(length=5, count=2)
        return _CountedList.reads

    assert 0 < reads(70) == reads(7000)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (
            dict(drafter="model", depth=2, rule="rejection", level_cost=0.1),
            'under the rule "rejection" a text depends on its trees',
        ),
        (dict(drafter="model"), "set decode.drafter.model"),
        (dict(drafter="static"), '"static" needs a draft head'),
        (dict(drafter="ngram", shortest=3, longest=2), "below decode.drafter.shortest 3"),
        (dict(drafter="ngram", shortest=0), "shortest is 0"),
        (dict(drafter="ngram", children="sampled"), 'cannot choose children "sampled", only top'),
        (dict(drafter="model", depth=0), "decode.drafter.depth is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(decode: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(EagleError, match=message):
        SpeculativeDecoder.from_pretrained(
            target, decode=decode_config(**decode), **({"draft_model": target} if "depth" in decode else {})
        )


def test_plain_decoding_is_what_none_stands_for(target: Target, head: EagleHead) -> None:
    assert SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(drafter="none")).drafter is None
    assert SpeculativeDecoder.from_pretrained(target).drafter is None


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "top_k", "typical"])
@pytest.mark.parametrize("drafter", ["static", "ngram", "model", "chain"])
def test_every_drafter_works_with_every_rule_for_trees(
    drafter: str, rule: str, target: Target, head: EagleHead, other: Target
) -> None:
    sizes: dict[str, dict[str, int]] = {
        "model": dict(budget=9, top_k=2, depth=3),
        "ngram": dict(depth=3),
        "chain": dict(depth=3),
    }
    decode = decode_config(drafter, **sizes.get(drafter, {}))
    model = other if drafter == "model" else None
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule, draft_model=model)
    ids, mask = ragged()
    out = decoder.generate(ids, mask, max_new_tokens=12, eos_token_id=[], do_sample=True, seed=4)
    assert out.sequences.shape == (4, 33)


def test_a_draft_model_is_loaded_from_its_folder(target: Target, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "draft")
    decode = decode_config(drafter="model", model=str(folder), top_k=1, budget=4, depth=3)
    decoder = SpeculativeDecoder.from_pretrained(target, decode=decode)
    ids, mask = ragged()
    out = decoder.generate(ids, mask, max_new_tokens=21, eos_token_id=[])
    assert taus(out) == [4.0] * 4  # tiny_model's weights are a function of its seed: it is the target itself
