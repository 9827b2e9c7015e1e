"""EAGLE-3's layer ids: SGLang's rule by family, and its inverse; which targets a runtime serves with such a head."""

import pytest
from transformers import CONFIG_MAPPING

from eagle.errors import EagleError
from eagle.formats.targets import SERVING, unserved
from eagle.heads.layer_ids import sglang_applied, sglang_default, sglang_ids


@pytest.mark.parametrize(
    ("family", "ids", "applied"),
    [
        ("llama", [1, 15, 28], [2, 16, 29]),
        ("qwen3_moe", [0, 1, 2], [1, 2, 3]),
        ("deepseek_v3", [1, 29, 57], [2, 30, 58]),
        ("deepseek_v3", [2, 29, 57], [2, 29, 57]),
        ("gpt_oss", [5, 11, 20], [6, 12, 21]),
        ("gpt_oss", [6, 12, 32], [6, 12, 32]),
        ("glm4_moe_lite", [1, 19, 29], [2, 20, 30]),
        ("glm4_moe_lite", [3, 20, 30], [3, 20, 30]),
        ("glm_moe_dsa", [2, 19, 29], [2, 19, 29]),
        ("glm4_moe", [2, 19, 29], [3, 20, 30]),
        ("some_family", [1, 2, 3], [2, 3, 4]),
    ],
)
def test_sglang_reads_ids_by_the_targets_family(family: str, ids: list[int], applied: list[int]) -> None:
    assert sglang_applied(ids, family, 32) == applied


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "some_family"])
@pytest.mark.parametrize("layers", [[2, 16, 29], [3, 10, 20], [5, 6, 31]])
def test_written_ids_say_the_layers(family: str, layers: list[int]) -> None:
    assert sglang_applied(sglang_ids(layers, family, 32), family, 32) == layers


@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 3, 5]), ("deepseek_v3", [1, 3, 5])])
def test_layers_that_no_ids_say_are_refused(family: str, layers: list[int]) -> None:
    with pytest.raises(EagleError, match="no layer ids that say so"):
        sglang_ids(layers, family, 32)


def test_what_sglang_captures_without_ids_differs_by_family() -> None:
    assert sglang_default("llama", 32) == [2, 16, 29]
    assert sglang_default("minimax_m3_vl_text", 32) == [3, 17, 30]


@pytest.mark.parametrize(
    ("runtime", "lacking", "serving", "untried"),
    [
        ("vllm", ("gemma2", "cohere", "gpt2", "mixtral", "glm4_moe_lite"), ("llama", "granite", "qwen3", "gpt_oss"), ("olmo2",)),
        ("speculators", ("gemma2", "mixtral"), ("llama", "deepseek_v3"), ("smollm3",)),
        ("sglang", ("granite", "gemma2", "olmo2", "cohere", "mixtral"), ("llama", "gemma3_text", "glm4_moe_lite"), ("xlnet",)),
        ("reference", ("gemma2", "qwen2", "mixtral"), ("llama", "qwen3"), ()),
    ],
)  # fmt: skip
def test_targets_that_a_runtime_does_not_serve_with_eagle3_are_known(
    runtime: str, lacking: tuple[str, ...], serving: tuple[str, ...], untried: tuple[str, ...]
) -> None:
    told = {family: unserved(runtime, "eagle3", family) for family in (*lacking, *serving, *untried)}
    assert {family for family, limit in told.items() if limit is not None and limit.certain} == set(lacking)
    assert {family for family, limit in told.items() if limit is None} == set(serving)
    assert all(limit.effect and limit.remedy for limit in told.values() if limit is not None)


def test_no_family_is_in_two_lists_and_all_are_model_types() -> None:
    for pair, table in SERVING.items():
        assert not table.serves & (table.refuses or set()), pair
        unknown = {*table.serves, *(table.refuses or ())} - set(CONFIG_MAPPING)
        assert unknown <= {"bailing_moe", "internlm3", "iquestcoder", "kimi_k2", "minicpm3", "exaone"}, (pair, unknown)
    assert unserved("trtllm", "eagle3", "gemma2") is None
    assert unserved("vllm", "eagle1", "gemma2") is None
    limit = unserved("sglang", "eagle1", "granite")
    assert limit is not None
    assert limit.certain
