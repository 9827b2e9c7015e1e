"""Random configurations, ends of the positions, self-drafting: the text is always plain decoding's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.row import Row
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.oracles import NEW, BatchOracle, answers, padded, prompt, with_oracle
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def targets(target: Target) -> dict[str, Target]:
    """Rotary, learned and windowed positions."""
    return {"llama": target, "gpt2": Target(tiny_model("gpt2")), "mistral": Target(tiny_model("mistral-window"))}


def head_of(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


@pytest.mark.slow
def test_ragged_rows_up_to_the_last_position_of_a_position_table() -> None:
    """Trees of different shapes: a row's nodes must not reach past the table because another row's tree is broad."""
    target = Target(tiny_model("gpt2", n_positions=30))
    ids, mask = padded([list(range(3, 13)), list(range(20, 25)), list(range(40, 50))], "left")
    for seed in range(6):
        plain, drafted = with_oracle(target, ids, mask, max_new_tokens=20, eos_token_id=[], do_sample=True, seed=seed)
        assert torch.equal(plain.sequences, drafted.sequences)


def test_text_beyond_the_heads_positions_is_still_the_targets(target: Target) -> None:
    """vllm 48894 crashed there."""
    torch.manual_seed(1)
    config = EagleHeadConfig.for_target(target.config, initializer_range=0.2, max_position_embeddings=16)
    decoder = SpeculativeDecoder.from_pretrained(target, EagleHead(config).eval())
    out = decoder.generate(prompt(12), max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(
        out.sequences, decoder.plain().generate(prompt(12), max_new_tokens=NEW, eos_token_id=[]).sequences
    )


class _SelfDrafter(BatchOracle):
    """The target drafts a chain for itself, with the coupled scores of its own logits."""

    def __init__(self, target: Target, depth: int):
        super().__init__([])
        self.target, self.depth = target, depth

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        self.rows = list(rows)
        self.running = [[] for _ in rows]

    def propose(self) -> DraftTree:
        chains = []
        for row in self.rows:
            ids = list(row.tokens)
            for _ in range(self.depth):
                with torch.no_grad():
                    logits_V = self.target.model(torch.tensor([ids])).logits[0, -1]
                processed_V = row.sampler.processed(logits_V, ids, [])
                ids.append(int(row.sampler.draft_scores(processed_V[None], len(ids)).argmax()))
            chains.append(ids[len(row.tokens) - 1 :])
        tokens = torch.tensor(chains)
        return DraftTree.from_parents(tokens, torch.arange(-1, self.depth).expand(len(chains), -1).contiguous())


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_the_target_drafting_for_itself_has_everything_accepted(target: Target, temperature: float) -> None:
    ids, mask = padded([[5, 6, 7], [8, 9]], "left")
    arguments: dict[str, Any] = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 30,
        "top_p": 0.95,
        "seed": 2,
        "repetition_penalty": 1.3,
    }
    decoder = SpeculativeDecoder(target, _SelfDrafter(target, depth=3))
    out = decoder.generate(ids, mask, max_new_tokens=17, eos_token_id=[], **arguments)
    assert [stats.accepted for stats in out.stats or ()] == [[3, 3, 3, 3]] * 2
    assert [stats.tau for stats in out.stats or ()] == [4.0, 4.0]


def _per_row(values: Sequence[Any], rows: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(values), st.lists(st.sampled_from(values), min_size=rows, max_size=rows))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(1, 5))
    token = st.integers(3, 300)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=rows, max_size=rows))
    arguments: dict[str, Any] = {
        "max_new_tokens": draw(st.integers(1, NEW)),
        "eos_token_id": draw(st.sampled_from([[], list(range(3, 300, 23))])),
        "seed": draw(st.integers(0, 2**40)),
    }
    if draw(st.booleans()):
        arguments |= {
            "do_sample": True,
            "temperature": draw(_per_row([0.0, 0.4, 1.0, 1.8], rows)),
            "top_k": draw(_per_row([0, 4, 60], rows)),
            "top_p": draw(_per_row([1.0, 0.9, 0.4], rows)),
            "min_p": draw(_per_row([0.0, 0.05], rows)),
            "filter_order": draw(st.sampled_from(["sequential", "joint"])),
            "num_return_sequences": draw(st.sampled_from([1, 1, 2])),
        }
    processors: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: draw(st.sampled_from([0.8, 1.4])),
        "no_repeat_ngram_size": lambda: draw(st.integers(1, 3)),
        "presence_penalty": lambda: 1.5,
        "frequency_penalty": lambda: 0.7,
        "bad_words_ids": lambda: [[5], [6, 7], [40, 41, 42]],
        "min_new_tokens": lambda: draw(st.integers(1, 20)),
        "min_length": lambda: draw(st.integers(1, 30)),
        "suppress_tokens": lambda: list(range(10, 30)),
        "forced_eos_token_id": lambda: 300,
    }
    for name in draw(st.lists(st.sampled_from(sorted(processors)), max_size=3, unique=True)):
        arguments[name] = processors[name]()
    return {
        "family": draw(st.sampled_from(["llama", "llama", "gpt2", "mistral"])),
        "prompts": prompts,
        "side": draw(st.sampled_from(["left", "right"])),
        "arguments": arguments,
        "tree": {
            "budget": draw(st.integers(1, 40)),
            "top_k": draw(st.integers(1, 6)),
            "depth": draw(st.integers(1, 5)),
        },
        "nodes": draw(st.integers(1, 70)),
    }


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(calls())
def test_drafting_never_changes_the_text_nor_do_batch_mates(targets: dict[str, Target], call: dict[str, Any]) -> None:
    target, arguments = targets[call["family"]], call["arguments"]
    ids, mask = padded(call["prompts"], call["side"])
    plain, drafted = with_oracle(target, ids, mask, nodes=call["nodes"], **arguments)
    assert torch.equal(drafted.sequences, plain.sequences)
    head = SpeculativeDecoder.from_pretrained(target, head_of(target), decode=decode_config(**call["tree"]))
    assert torch.equal(head.generate(ids, mask, **arguments).sequences, plain.sequences)
    assert plain.stats is not None
    copies = arguments.get("num_return_sequences", 1)
    for row, (answer, stats) in enumerate(zip(answers(plain, ids.shape[1]), plain.stats)):
        place = row // copies
        alone = {
            name: value[place : place + 1] if _is_per_row(name, value) else value for name, value in arguments.items()
        }
        alone |= {"seed": [stats.seed], "num_return_sequences": 1}
        out = head.generate(torch.tensor([call["prompts"][place]]), **alone)
        assert answers(out, len(call["prompts"][place])) == [answer]
        assert out.stats is not None
        assert out.stats[0].finish_reason == stats.finish_reason


def _is_per_row(name: str, value: Any) -> bool:
    return name in ("temperature", "top_k", "top_p", "min_p") and isinstance(value, list)
