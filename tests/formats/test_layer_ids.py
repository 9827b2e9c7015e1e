"""EAGLE-3's layer ids: SGLang's rule by family, and its inverse."""

import pytest

from eagle.errors import EagleError
from eagle.formats.layer_ids import sglang_applied, sglang_ids


@pytest.mark.parametrize(
    ("family", "ids", "applied"),
    [
        ("llama", [1, 15, 28], [2, 16, 29]),
        ("qwen3_moe", [0, 1, 2], [1, 2, 3]),
        ("deepseek_v3", [1, 29, 57], [2, 30, 58]),
        ("deepseek_v3", [2, 29, 57], [2, 29, 57]),
        ("gpt_oss", [5, 11, 20], [6, 12, 21]),
        ("gpt_oss", [6, 12, 32], [6, 12, 32]),
        ("some_family", [1, 2, 3], [2, 3, 4]),
    ],
)
def test_sglang_reads_ids_by_the_targets_family(family: str, ids: list[int], applied: list[int]) -> None:
    assert sglang_applied(ids, family, 32) == applied


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3", "gpt_oss", "some_family"])
@pytest.mark.parametrize("layers", [[2, 16, 29], [3, 10, 20], [5, 6, 31]])
def test_written_ids_say_the_layers(family: str, layers: list[int]) -> None:
    assert sglang_applied(sglang_ids(layers, family, 32), family, 32) == layers


@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 3, 5]), ("deepseek_v3", [1, 3, 5])])
def test_layers_that_no_ids_say_are_refused(family: str, layers: list[int]) -> None:
    with pytest.raises(EagleError, match="no layer ids that say so"):
        sglang_ids(layers, family, 32)
