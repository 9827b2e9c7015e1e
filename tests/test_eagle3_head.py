"""The EAGLE-3 head: its definition against a plain reference (tests/eagle3_reference.py), its files, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle.config import HeadConfig
from eagle.errors import EagleError
from eagle.formats.checkpoint import check_fits, load_head, save_head
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig, aux_layers_of, default_aux_layers
from eagle.heads.vocabulary import DraftTokens
from eagle.target.target import Target
from tests import eagle3_reference as reference
from tests.exact import same
from tests.tiny import tiny_model

LAYERS = 8


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=LAYERS))


def loaded(folder: Path, state: dict[str, torch.Tensor], **config: Any) -> Eagle3Head:
    head = load_head(reference.write_reference(folder, state, **config))
    assert isinstance(head, Eagle3Head)
    return head


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ({}, {}),
        ({"kv": 4}, {"num_key_value_heads": 4}),
        ({"head_dim": 16}, {"head_dim": 16, "rope_theta": 500000.0}),
        ({"qkv_bias": True, "kv": 1}, {"num_key_value_heads": 1}),
        ({"layers": 2}, {"eagle_aux_hidden_state_layer_ids": [1, 5]}),
        ({}, {"norm_before_residual": True}),
    ],
)
@torch.inference_mode()
def test_a_reference_folder_computes_what_the_reference_computes(
    shape: dict[str, Any], config: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    state = reference.random_state(**shape)
    head = loaded(tmp_path, state, **config)
    options = {"theta": config.get("rope_theta", 10000.0), "norm_before_residual": "norm_before_residual" in config}
    states_TX, embeddings_TH = torch.randn(11, head.fc.in_features), torch.randn(11, 32)
    expected_TH = reference.fuse(state, states_TX)
    got_TH = head.fuse(states_TX[None])[0]
    for _ in range(2):  # the second time from its own predictions, without `fc` and without `norm`
        expected_TH = reference.forward(state, expected_TH, embeddings_TH, **options)
        got_TH = head(got_TH[None], embeddings_TH[None])[0]
        assert same(got_TH, expected_TH)
    got_TD = head.logits(got_TH, DraftTokens(target.tokens, head.vocabulary))
    assert same(got_TD, reference.logits(state, expected_TH))


@pytest.mark.parametrize("form", ["bin", "safetensors", "sharded"])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("draft", [reference.D, reference.V])
def test_reference_files_load_in_every_form(
    form: str, embeddings: bool, draft: int, target: Target, tmp_path: Path
) -> None:
    state = reference.random_state(draft=draft)
    file = {**state, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if embeddings:
        file["embed_tokens.weight"] = target.tokens.embedding_VH.clone()
    head = load_head(reference.write_reference(tmp_path, file, form=form, draft_vocab_size=draft))
    assert head.version == "eagle3"
    assert {key: value.tolist() for key, value in head.state_dict().items()} == {
        key: value.tolist() for key, value in state.items()
    }
    assert (head.vocabulary is None) == (draft == reference.V)
    check_fits(head, target)
    assert head.aux_layers == (2, 4, 5)  # [2, L//2, L-3]
    assert head.config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}}, (2, 4, 7)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
            },
            (1, 3, 6),
        ),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        ({"aux_layers": [0, 6, 7]}, (0, 6, 7)),
    ],
)
def test_layer_ids_of_every_convention_become_layers_applied(
    config: dict[str, Any], layers: tuple[int, ...], target: Target, tmp_path: Path
) -> None:
    head = loaded(tmp_path / "reference", reference.random_state(), **config)
    check_fits(head, target)
    assert head.aux_layers == layers
    save_head(head, tmp_path / "ours")
    assert load_head(tmp_path / "ours").aux_layers == layers


def test_a_config_without_layer_ids_needs_its_target(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="names no aux layers"):
        loaded(tmp_path, reference.random_state()).aux_layers  # noqa: B018


def test_the_default_layers_need_seven() -> None:
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(7) == (2, 3, 4)
    with pytest.raises(EagleError, match=r"6 layers, too few.* 7 or more.* head\.aux_layers"):
        default_aux_layers(6)


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        (HeadConfig(), 3, None),
        (HeadConfig(version="eagle3"), 30, None),
        (HeadConfig(version="eagle3", aux_layers=(0, 1)), 3, None),
        (HeadConfig(version="eagle3"), 3, "too few"),
        (HeadConfig(version="eagle3", aux_layers=(2, 1)), 3, r"aux_layers is \[2, 1\], expected .*ascending"),
        (HeadConfig(version="eagle3", aux_layers=(1, 1)), 3, r"different"),
        (HeadConfig(version="eagle3", aux_layers=()), 3, "expected different numbers"),
        (HeadConfig(version="eagle3", aux_layers=(1, 3)), 3, r"hidden states 0 \.\. 2"),
        (HeadConfig(aux_layers=(1,)), 3, "set head.version to eagle3"),
    ],
)
def test_a_recipes_layers_are_checked(config: HeadConfig, layers: int, message: str | None) -> None:
    if message is not None:
        with pytest.raises(EagleError, match=message):
            aux_layers_of(config, layers)
    else:
        expected = {"eagle1": (), "eagle3": config.aux_layers or (2, 15, 27)}[config.version]
        assert aux_layers_of(config, layers) == expected


def _spoil(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids_D = state["d2t"] + torch.arange(reference.D)
    if name == "all zeros":
        state["d2t"].zero_()
    elif name == "ids, not offsets":
        state["d2t"] = ids_D
    elif name == "a duplicate":
        state["d2t"][5] = ids_D[9] - 5
    elif name == "negative":
        state["d2t"][0] = -3
    elif name == "t2d of another head":
        state["t2d"] = state["t2d"].roll(1)
    elif name == "t2d all zeros":
        state["t2d"].zero_()
    elif name == "int32":
        state["d2t"] = state["d2t"].to(torch.int32)
    return state


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("all zeros", "d2t is all zeros"),
        ("ids, not offsets", r"expected 0 \.\. 383"),
        ("a duplicate", "draft ids 5 and 9 both stand for"),
        ("negative", r"target ids -3 \.\. \d+, expected 0 \.\. 383"),
        ("t2d of another head", r"d2t and t2d disagree on \d+ tokens"),
        ("t2d all zeros", r"t2d has 0 draft tokens, d2t 90"),
        ("int32", "d2t is torch.int32"),
    ],
)
def test_each_defect_of_the_draft_vocabulary_is_named(name: str, message: str, tmp_path: Path) -> None:
    state = _spoil(name, reference.random_state())
    with pytest.raises(EagleError, match=message):
        loaded(tmp_path, state)


def test_a_missing_or_stray_vocabulary_is_named(tmp_path: Path) -> None:
    state = reference.random_state()
    with pytest.raises(EagleError, match="missing keys: t2d; stray keys: none"):
        loaded(tmp_path / "a", {key: value for key, value in state.items() if key != "t2d"})
    with pytest.raises(EagleError, match="stray keys: d2t, t2d"):
        loaded(tmp_path / "b", state, draft_vocab_size=None)
    with pytest.raises(EagleError, match=r"lm_head.weight \(90, 32\) instead of \(80, 32\)"):
        loaded(tmp_path / "c", state, draft_vocab_size=80)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc.weight \(32, 96\) instead of \(32, 64\)"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "no layer ids"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"num_key_value_heads": 4}, r"k_proj.weight \(16, 64\) instead of \(32, 64\)"),
    ],
)
def test_a_config_that_its_tensors_contradict_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=message):
        loaded(tmp_path, reference.random_state(), **config)


@pytest.mark.parametrize("draft", [reference.D, reference.V])
def test_saved_heads_load_bit_for_bit(draft: int, target: Target, tmp_path: Path) -> None:
    head = loaded(tmp_path / "reference", reference.random_state(draft=draft, qkv_bias=True), draft_vocab_size=draft)
    check_fits(head, target)
    head.config.draft_coverage, head.config.target_identity = 0.75, target.identity()
    save_head(head, tmp_path / "ours")
    again = load_head(tmp_path / "ours")
    assert isinstance(again, Eagle3Head)
    ours, theirs = again.config.to_dict(), head.config.to_dict()
    assert {key for key in ours if ours[key] != theirs[key]} <= {"architectures", "dtype"}  # which name the file's own
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, head.state_dict()[key]) for key, value in again.state_dict().items())
    x = torch.randn(1, 5, 32)
    assert torch.equal(again(x, x), head(x, x))
    if again.vocabulary is not None:
        assert again.vocabulary.coverage == 0.75
    half = load_head(tmp_path / "ours", dtype=torch.bfloat16)
    assert half.fc.weight.dtype == torch.bfloat16
    assert half.vocabulary is None or half.d2t.dtype == torch.int64
    assert torch.equal(Eagle3Head.from_pretrained(tmp_path / "ours").lm_head.weight, head.lm_head.weight)

    file = tmp_path / "ours" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "midlayer.extra": torch.ones(1)}, file)
    with pytest.raises(EagleError, match=r"not an EAGLE-3 head: missing keys: none; stray keys: midlayer\.extra"):
        load_head(tmp_path / "ours")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, "width 32"),
        ({"vocab_size": 400}, "384 tokens, target .* has 400"),
        ({"num_hidden_layers": 6}, "6 layers, too few"),
        ({"seed": 1}, "weights_sha256"),
    ],
)
def test_another_target_is_refused(other: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    head = loaded(tmp_path, reference.random_state())
    if "seed" in other:
        head.config.target_identity = target.identity()
    with pytest.raises(EagleError, match=message):
        check_fits(head, Target(tiny_model(**{"num_hidden_layers": LAYERS, **other}), probe=False))


def test_a_full_lm_head_of_another_size_and_foreign_embeddings_are_refused(target: Target, tmp_path: Path) -> None:
    full = reference.random_state(draft=reference.V)
    head = loaded(tmp_path / "full", full, draft_vocab_size=reference.V)
    with pytest.raises(EagleError, match=r"LM head has 384 tokens, target .* has 400"):
        check_fits(head, Target(tiny_model(num_hidden_layers=LAYERS, vocab_size=400), probe=False))
    state = {**full, "embed_tokens.weight": torch.randn(reference.V, reference.H)}
    with pytest.raises(EagleError, match=r"embed_tokens\.weight .* trained for another model"):
        check_fits(loaded(tmp_path / "foreign", state, draft_vocab_size=reference.V), target)
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}
    head = loaded(tmp_path / "deep", reference.random_state(), **layers)
    with pytest.raises(EagleError, match=r"aux_layers is \[2, 5, 8\], but the target has hidden states 0 \.\. 7"):
        check_fits(head, target)


def test_the_lm_head_starts_as_the_targets_rows(target: Target) -> None:
    config = Eagle3HeadConfig.for_target(target.config, draft_vocab_size=reference.D, aux_layers=[1, 2, 3])
    head = Eagle3Head(config)
    state = reference.random_state()
    head.d2t.copy_(state["d2t"])
    head.t2d.copy_(state["t2d"])
    head.copy_lm_head(target.tokens)
    ids_D = state["d2t"] + torch.arange(reference.D)
    assert torch.equal(head.lm_head.weight, target.tokens.lm_head_VH[ids_D])
