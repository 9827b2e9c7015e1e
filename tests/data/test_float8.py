"""Features in 8 bits: how far off they may be, what they take, and what an extraction of them is worth."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.config import Recipe
from eagle.data.compare_stores import compare, main
from eagle.data.features import extract
from eagle.data.float8 import dequantise, quantise
from eagle.data.layers import token_bytes
from eagle.data.store import FeatureStore, shard_path
from eagle.errors import EagleError
from eagle.target.target import Target
from tests.data.test_features import make_recipe, store_bytes, with_features


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=24, max_size=24),
    st.sampled_from([1e-38, 1e-6, 1.0, 1e6]),
)
@settings(max_examples=200, deadline=None)
def test_the_error_is_bounded_by_the_mantissa_and_the_scale(blocks: int, values: list[float], factor: float) -> None:
    values_SA = (
        (torch.tensor(values) * factor).view(-1, 2 * blocks) if blocks != 4 else torch.tensor(values).view(-1, 8)
    )
    stored, scale_SN = quantise(values_SA, blocks=blocks)
    back = dequantise(stored, scale_SN)
    assert stored.dtype == torch.float8_e4m3fn
    assert scale_SN.shape == (len(values_SA), blocks)
    scale = scale_SN.repeat_interleave(values_SA.shape[1] // blocks, dim=1)
    bound = torch.maximum(values_SA.abs() * (1 / 16 + 1e-6), scale * 2**-10)
    assert back.isfinite().all()
    assert ((back - values_SA).abs() <= bound).all()


def test_each_block_of_a_token_has_its_own_scale_and_zeros_stay_zeros() -> None:
    values = torch.tensor([[448.0, 1.0, 0.001, -0.0005], [0.0, 0.0, 3.0, 0.0]])
    stored, scale = quantise(values, blocks=2)
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.001 / 448], [1.0, 3.0 / 448]]))
    torch.testing.assert_close(dequantise(stored, scale), values, rtol=1e-6, atol=0)


def test_what_is_not_finite_stays_visible() -> None:
    values = torch.ones(3, 4)
    values[0, 1], values[2, 0] = float("nan"), float("inf")
    _, scale = quantise(values)
    assert scale.isfinite().flatten().tolist() == [False, True, False]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path, aux_layers=(1, 2))


def _elsewhere(recipe: Recipe, folder: Path, **features: Any) -> Recipe:
    """The same prepared data, another store."""
    folder.mkdir()
    (folder / "data").symlink_to(recipe.data_dir)
    return dataclasses.replace(with_features(recipe, **features), output_dir=str(folder))


def test_a_float8_store_reads_back_close_to_the_targets_states_in_half_of_bfloat16s_bytes(
    recipe: Recipe, tmp_path: Path
) -> None:
    stores = {}
    for dtype in ("float32", "bfloat16", "float8"):
        other = _elsewhere(recipe, tmp_path / dtype, dtype=dtype)
        extract(other)
        stores[dtype] = FeatureStore.open(other.store_dir)
    small, exact = stores["float8"], stores["float32"]
    assert small.manifest["dtype"] == "float8"
    for number in range(len(exact)):
        ours, theirs = small[number], exact[number]
        assert ours.features_TH.dtype == torch.float32
        assert ours.aux_TA is not None
        assert theirs.aux_TA is not None
        pairs = [(ours.features_TH, theirs.features_TH)]
        pairs += zip(ours.aux_TA.chunk(2, dim=-1), theirs.aux_TA.chunk(2, dim=-1), strict=True)
        for mine, true in pairs:
            scale = true.abs().amax(dim=-1, keepdim=True) / 448
            assert ((mine - true).abs() <= torch.maximum(true.abs() / 15.9, scale * 2**-10) + 1e-5).all()
    # With H = 32 the scale is 4 of 36 bytes; with H = 4096 it is a thousandth.
    tokens = int(exact.lengths.sum())
    sizes = {
        dtype: sum(shard_path(store.directory, k).stat().st_size for k in range(len(store.manifest["shards"])))
        for dtype, store in stores.items()
    }
    assert sizes["bfloat16"] - sizes["float8"] == pytest.approx(3 * (32 - 4) * tokens, rel=0.05)


def test_half_of_bfloat16s_bytes_at_a_real_width() -> None:
    small, usual = (token_bytes(4096, 4, dtype) for dtype in ("float8", "bfloat16"))
    assert small / usual == pytest.approx(0.5, abs=0.001)


def test_float8_extraction_resumes_to_the_same_files(recipe: Recipe) -> None:
    recipe = with_features(recipe, dtype="float8")
    extract(recipe)
    before = store_bytes(recipe.store_dir)
    (recipe.store_dir / "manifest.json").unlink()
    shard_path(recipe.store_dir, 1).unlink()
    shard_path(recipe.store_dir, 2).write_bytes(b"torn")
    extract(recipe)
    assert store_bytes(recipe.store_dir) == before
    FeatureStore.open(recipe.store_dir).verify()
    with pytest.raises(EagleError, match="dtype is 'float8', expected 'bfloat16'"):
        extract(with_features(recipe, dtype="bfloat16"))


def test_features_that_are_not_finite_are_refused_in_float8_too(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Target.features

    def poisoned(self: Target, ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        states = original(self, ids_BT, layers)
        features = states[0].clone()
        features[0, 0, 3] = float("inf") if layers else features[0, 0, 3]  # not where the target is probed
        return states._replace(features_BNH=features)

    monkeypatch.setattr(Target, "features", poisoned)
    with pytest.raises(EagleError, match="are not finite"):
        extract(with_features(recipe, dtype="float8"))


def test_stores_are_compared_by_what_the_teacher_would_say(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, small = _elsewhere(recipe, tmp_path / "a"), _elsewhere(recipe, tmp_path / "b", dtype="float8")
    extract(exact)
    extract(small)
    same = compare(exact.store_dir, exact.store_dir)
    assert same["mean_kl"] == pytest.approx(0, abs=1e-7)
    assert same["same_top_token"] == 1.0
    assert same["largest_feature_error"] == 0.0
    figures = compare(exact.store_dir, small.store_dir)
    store, coarse = FeatureStore.open(exact.store_dir), FeatureStore.open(small.store_dir)
    tokens, total, count = store.token_layers(), 0.0, 0
    for number in range(len(store)):
        ours, theirs = store[number], coarse[number]
        for i in range(1, len(ours.input_ids_T)):
            if ours.loss_mask_T[i]:
                p, q = (tokens.logits(d.features_TH[i - 1]).log_softmax(-1) for d in (ours, theirs))
                total += float((p.exp() * (p - q)).sum())
                count += 1
    assert figures["positions"] == count
    assert figures["mean_kl"] == pytest.approx(total / count, rel=1e-3)
    assert 0 < figures["mean_kl"] < 0.05
    assert figures["bytes_ratio"] < 0.4
    assert main([str(exact.store_dir), str(small.store_dir), "--documents", "3"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["documents"] == 3


def test_stores_of_other_data_are_not_compared(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    extract(recipe)
    (tmp_path / "other").mkdir()
    other = make_recipe(tmp_path / "other", documents=12)
    extract(other)
    assert main([str(recipe.store_dir), str(other.store_dir)]) == 2
    assert "prepared data differs" in capsys.readouterr().err
