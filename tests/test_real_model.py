"""SmolLM2-135M-Instruct, float32: real trees with real acceptances, against Hugging Face and against plain sampling."""

import pytest
import torch

from eagle.eval.checks.exactness import divergence, tie_margin
from eagle.eval.suites.prompt_set import load_prompts
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.oracles import answers, padded, with_oracle

pytestmark = [pytest.mark.real, pytest.mark.slow]


def prompts(target: Target, count: int) -> list[list[int]]:
    """Token ids of some shipped evaluation prompts."""
    assert target.tokenizer is not None
    chosen = load_prompts(["shipped:mt_bench"], count)
    return [prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


def equal_or_tied(target: Target, prompt: list[int], tokens: list[int], reference: list[int]) -> bool:
    found = divergence(target, prompt_ids=prompt, tokens=tokens, reference=reference, versus="reference")
    return found is None or (found["tie"] and found["margin"] < tie_margin(torch.float32, 0.0))


def test_greedy_text_is_hugging_faces(smollm2: Target) -> None:
    for prompt in prompts(smollm2, 2):
        ids = torch.tensor([prompt])
        expected = smollm2.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=2
        )[0, len(prompt) :].tolist()
        plain, drafted = with_oracle(smollm2, ids, nodes=12, max_new_tokens=24, do_sample=False)
        assert drafted.stats is not None
        assert drafted.stats[0].tau > 1.2
        for out in (plain, drafted):
            assert equal_or_tied(smollm2, prompt, answers(out, len(prompt))[0], expected)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.9)])
def test_sampled_rows_of_a_ragged_batch_are_plain_samplings(smollm2: Target, temperature: float, top_p: float) -> None:
    rows = prompts(smollm2, 2)
    ids, mask = padded(rows, "left")
    settings = dict(max_new_tokens=20, do_sample=True, temperature=temperature, top_p=top_p, seed=[11, 12])
    plain, drafted = with_oracle(smollm2, ids, mask, nodes=8, **settings)
    assert answers(drafted, ids.shape[1]) == answers(plain, ids.shape[1])
    assert drafted.stats is not None
    assert min(stats.tau for stats in drafted.stats) > 1.2
    alone, _ = with_oracle(smollm2, torch.tensor(rows[:1]), nodes=8, **{**settings, "seed": [11]})
    assert answers(alone, len(rows[0]))[0] == answers(plain, ids.shape[1])[0]
