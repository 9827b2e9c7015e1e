"""Target: features, aux features, identity, the probe's refusals. (Families: tests/test_decode.py.)"""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
)

from eagle.config import TargetConfig
from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_ngram import NgramDrafter
from eagle.errors import EagleError
from eagle.formats.files import read_files
from eagle.formats.lint.files import read_head
from eagle.target import attention
from eagle.target.attention import TreeStep
from eagle.target.loading import load_tokenizer, resolve_device
from eagle.target.target import Target, weights_hash
from eagle.target.token_layers import TokenLayers
from tests.exact import same
from tests.tiny import FAMILIES, save_tiny_target, tiny_model, tiny_tokenizer

IDS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_aux_features_are_hugging_faces_hidden_states(family: str) -> None:
    model = tiny_model(family)
    target = Target(model)
    expected = model(IDS, output_hidden_states=True)
    features_BTH, aux_BTA = target.features(IDS, aux_layers=(0, 2))
    assert same(features_BTH, expected.hidden_states[-1])
    assert aux_BTA is not None
    want = torch.cat([expected.hidden_states[0], expected.hidden_states[2]], dim=-1)
    assert same(aux_BTA, want)
    assert same(target.logits(features_BTH), expected.logits)


def test_right_padding_does_not_touch_the_real_tokens() -> None:
    target = Target(tiny_model())
    padded = torch.nn.functional.pad(IDS, (0, 9), value=2)
    assert same(target.features(padded)[0][:, :20], target.features(IDS)[0])


def test_ragged_rows_decode_as_if_alone() -> None:
    target = Target(tiny_model("mistral-window"))
    lengths = torch.tensor([20, 13])
    cache = target.new_cache(rows=2, capacity=4)  # grows
    prefilled = target.prefill(IDS, lengths, cache).features_BNH
    tokens = torch.tensor([[7, 8], [9, 10]])
    depths, ancestors = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[[1], [3]], [[1], [3]]])
    got = target.tree_forward(tokens, depths, ancestors, cache).features_BNH
    for row, length in enumerate(lengths.tolist()):
        alone = target.features(torch.cat([IDS[row : row + 1, :length], tokens[row : row + 1]], dim=1))[0]
        assert same(prefilled[row, :length], alone[0, :length])
        assert same(got[row], alone[0, length:])


def test_an_aux_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(EagleError, match=r"aux layers \[3\] do not exist; .* 0 .. 2"):
        Target(tiny_model()).features(IDS, aux_layers=(1, 3))


def test_a_fine_tune_has_another_identity() -> None:
    model = tiny_model()
    before = weights_hash(model)
    assert weights_hash(tiny_model()) == before
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1e-3)
    assert weights_hash(model) != before


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "gemma3_text", "cohere", "granite"])
def test_token_layers_survive_the_disk(family: str, tmp_path: Path) -> None:
    target = Target(tiny_model(family))
    target.tokens.save(tmp_path)
    loaded = TokenLayers.load(tmp_path)
    assert torch.equal(loaded.embed(IDS), target.embed(IDS))
    features = target.features(IDS)[0]
    assert torch.equal(loaded.logits(features), target.logits(features))
    (tmp_path / "token_layers.safetensors").write_bytes(b"torn")
    with pytest.raises(EagleError, match="eagle features"):
        TokenLayers.load(tmp_path)


def _bloom() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4))


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4))


def _t5() -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=300, d_model=32, num_layers=2, d_ff=64, d_kv=8, num_heads=4)
    )


def _linear_attention() -> PreTrainedModel:
    return tiny_model(
        "qwen3_next", linear_num_key_heads=2, linear_num_value_heads=2, num_experts=2, num_experts_per_tok=1
    )


def _dynamic_rope() -> PreTrainedModel:
    return tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


def _sinks() -> PreTrainedModel:
    return tiny_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_mamba, "recurrent layers"),
        (_linear_attention, "recurrent layers"),
        (_t5, "encoder-decoder"),
        (_dynamic_rope, "dynamic RoPE"),
        (_bloom, "cannot run a forward over a tree"),
        (_sinks, "attention sinks"),
    ],
)
def test_targets_that_cannot_be_verified_as_a_tree_are_refused_with_the_reason(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(EagleError, match=reason):
        Target(make().eval())


def test_a_device_that_pytorch_cannot_use_is_one_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> torch.Tensor:
        raise NotImplementedError(
            "Could not run 'aten::empty' on 'MPS'. This could be because " + "of many things. " * 50
        )

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(EagleError) as caught:
        resolve_device("mps")
    assert str(caught.value) == (
        "device 'mps' asked for, but PyTorch cannot use it here (Could not run 'aten::empty' on 'MPS'); use cpu, cuda or auto"
    )


def test_positions_of_a_long_prompt_need_no_ancestor_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are N * N / 64 words a row: 2 GB at 131,072 tokens."""
    monkeypatch.setattr(attention, "own_bits", lambda *arguments, **options: pytest.fail("made"))
    step = TreeStep(lengths_B=torch.tensor([0, 3]), depths_BN=torch.arange(4).expand(2, -1), ancestors_BNW=None)
    assert step.positions_on(torch.device("cpu")).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


def test_under_longrope_texts_end_where_its_frequencies_would_change() -> None:
    """Beyond that length transformers rotates a forward by its longest position, so pieces of a text would disagree."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    sizes = {"max_position_embeddings": 160, "original_max_position_embeddings": 40}
    model = tiny_model("phi3", rope_parameters=rope, pad_token_id=0, **sizes)
    target = Target(model)
    assert target.max_positions == 40
    ids = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    decoder = SpeculativeDecoder(target, NgramDrafter())
    out = decoder.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=[])
    own = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(out.sequences, own)
    with pytest.raises(EagleError, match="40"):
        decoder.generate(ids, max_new_tokens=21, do_sample=False)
    assert Target(tiny_model("llama")).max_positions == tiny_model("llama").config.max_position_embeddings


class _ScaledLogits(LlamaForCausalLM):
    """A family whose logits are not lm_head(features), unknown to us."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5 + 0.1
        return output


def test_an_unknown_scaling_of_the_logits_is_refused() -> None:
    model = _ScaledLogits(
        CONFIG_MAPPING["llama"](vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(EagleError, match="logits\\(features\\) differ"):
        Target(model.eval())


def test_a_broken_compaction_would_be_caught_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle.target.cache import TreeCache

    def commit_without_moving(self: TreeCache, path_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        self.lengths_B = self.lengths_B + counts_B

    monkeypatch.setattr(TreeCache, "commit", commit_without_moving)
    with pytest.raises(EagleError, match="differs from the plain forward"):
        Target(tiny_model())


@pytest.mark.slow
def test_a_target_loads_from_a_folder(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    target = Target.from_pretrained(str(tmp_path / "target"), device="cpu")
    assert target.tokenizer is not None
    assert target.eos_token_ids == (2,)
    assert target.dtype == torch.float32
    half = Target.from_pretrained(str(tmp_path / "target"), device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert half.identity()["weights_sha256"] != target.identity()["weights_sha256"]


def test_an_answer_ends_at_every_source_s_eos_ids_and_generate_at_hugging_faces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path)
    assert Target.from_pretrained(str(tmp_path), device="cpu").eos_token_ids == (2,)
    assert "an answer ends" not in capsys.readouterr().err, "all sources agree"
    answer = tiny_model().generate(IDS[:1], max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 20:].tolist()
    turn, late = answer[3], answer[9]  # ends of turns by the config alone, and by the generation config
    with_value(eos_token_id=turn)(tmp_path / "config.json")
    with_value(eos_token_id=[late, 377])(tmp_path / "generation_config.json")
    target = Target.from_pretrained(str(tmp_path), device="cpu")
    assert target.eos_token_ids == (late, 377, turn, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{turn} {target.tokenizer.convert_ids_to_tokens(turn)} (config); 2 <|im_end|> (tokenizer)" in said
    decoder = SpeculativeDecoder.from_pretrained(target)
    call = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    theirs = target.model.generate(IDS[:1], **call)[0, 20:].tolist()
    assert decoder.generate(IDS[:1], **call).sequences[0, 20:].tolist() == theirs == answer[: answer.index(late) + 1]
    union = decoder.generate(IDS[:1], eos_token_id=list(target.eos_token_ids), **call).sequences[0, 20:].tolist()
    assert union == answer[: answer.index(turn) + 1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("./nowhere", "no such folder or file"),
        ("./nowhere.gguf", "does not exist"),
        ("owner/unreachable", "HF_HUB_OFFLINE"),
        ("package:no_such_package/x.gguf", "not installed"),
        ("package:torch/x.gguf", "holds no file"),
    ],
)
def test_a_target_that_is_not_there_is_one_clear_message(model: str, reason: str) -> None:
    with pytest.raises(EagleError, match=reason):
        Target.from_config(TargetConfig(model=model, device="cpu"))
    with pytest.raises(EagleError, match=reason):
        load_tokenizer(TargetConfig(model=model))


def damage(text: str | bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(text.encode() if isinstance(text, str) else text) and None


def with_value(**values: object) -> Callable[[Path], None]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | values)) and None


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("config.json", damage("[1]"), "holds a list"),
        ("config.json", damage(b'{"a": "\xff"}'), "not valid JSON"),
        ("config.json", with_value(hidden_size="32"), "'hidden_size'.*expected int, got str"),
        ("config.json", with_value(num_attention_heads=0), "if .*config.json in it is damaged"),
        ("generation_config.json", damage("{"), "not valid JSON"),
        ("model.safetensors.index.json", damage('{"weight_map": {"lm_he'), "not valid JSON"),
        ("model.safetensors.index.json", damage('{"metadata": 3}'), "has no weight_map"),
        ("model.safetensors", damage(b"abc"), "model.safetensors"),
        ("pytorch_model.bin", lambda file: torch.save([1], file), "pytorch_model.bin"),
        ("pytorch_model.bin", damage(b"abc"), "pytorch_model.bin"),
        ("tokenizer_config.json", damage("[1]"), "holds a list"),
        ("tokenizer.json", damage('{"version"'), "not valid JSON"),
    ],
)
def test_a_broken_file_is_one_message_that_names_it_and_the_remedy(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    save_tiny_target(tmp_path)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    spoil(tmp_path / name)
    with pytest.raises(EagleError, match=rf"(?s){name}.*{reason}|{reason}") as caught:
        Target.from_pretrained(str(tmp_path), device="cpu")
    assert name in str(caught.value)
    assert "fetch or save the model again" in str(caught.value)
    assert "\n" not in str(caught.value)


class Extra:
    """What a training script saved beside the tensors."""


def _with_code(file: Path) -> None:
    torch.save({"weight": torch.ones(2), "arguments": Extra()}, file)


def _with_call(file: Path) -> None:
    torch.save({"weight": torch.ones(2), "path": Path("x")}, file)


def _script(file: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(file))


def _legacy_tar(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))


@pytest.mark.filterwarnings("ignore:.*jit", "ignore:.*TorchScript")
@pytest.mark.parametrize(
    ("write", "held"),
    [(_with_code, "Extra"), (_with_call, "pathlib"), (_script, "TorchScript"), (_legacy_tar, "legacy .tar")],
)
def test_weights_with_code_in_them_are_named_as_such_without_advice_to_run_it(
    tmp_path: Path, write: Callable[[Path], None], held: str
) -> None:
    save_tiny_target(tmp_path, num_hidden_layers=1)  # as many as a head has
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path / "pytorch_model.bin")
    messages = []
    for read in (lambda: Target.from_pretrained(str(tmp_path), device="cpu"), lambda: read_files(tmp_path)):
        with pytest.raises(EagleError) as caught:
            read()
        messages.append(str(caught.value))
    trouble = read_head(tmp_path).troubles[0]
    messages.append(f"{trouble.evidence}: {trouble.remedy}")
    for message in messages:
        assert "pytorch_model.bin" in message
        assert held in message
        assert "more than tensors" in message
        for word in ("damaged", "weights_only", "trust", "safe_globals", "\n"):
            assert word not in message


def test_a_model_with_code_of_its_own_is_named_as_such(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    with_value(model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})(
        tmp_path / "config.json"
    )
    with pytest.raises(EagleError, match=r"code of its own, .*target\.trust_remote_code") as caught:
        Target.from_pretrained(str(tmp_path), device="cpu")
    assert "damaged" not in str(caught.value)


def test_settings_of_loading_are_refused_where_they_have_no_effect(tmp_path: Path) -> None:
    target = Target(tiny_model())
    with pytest.raises(EagleError, match="dtype given with a loaded Target, where they have no effect"):
        SpeculativeDecoder.from_pretrained(target, dtype="bfloat16")
    with pytest.raises(EagleError, match="nonsense given with a loaded Target"):
        SpeculativeDecoder.from_pretrained(target, nonsense=1)
    with pytest.raises(EagleError, match="tokenizer given with a loaded Target"):
        SpeculativeDecoder.from_pretrained(target, tokenizer=tiny_tokenizer())
    with pytest.raises(EagleError, match="device given with a loaded model"):
        Target.from_pretrained(tiny_model(), device="cpu")
    with pytest.raises(EagleError, match="unknown target setting dtyp; expected some of revision, dtype, device"):
        Target.from_pretrained(str(tmp_path), dtyp="bfloat16")


def test_a_path_s_tokenizer_may_be_replaced(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    own = tiny_tokenizer(chat_template="{{ messages }}")
    assert Target.from_pretrained(str(tmp_path), own, device="cpu").tokenizer is own


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    with pytest.raises(EagleError, match="expected auto, cpu"):
        Target.from_pretrained(str(tmp_path), device="quantum")
    if not torch.cuda.is_available():
        with pytest.raises(EagleError, match="no CUDA device"):
            Target.from_pretrained(str(tmp_path), device="cuda")


def test_a_model_without_a_language_head_is_refused() -> None:
    bare = tiny_model().model
    assert isinstance(bare, nn.Module)
    with pytest.raises(EagleError, match="no LM head"):
        Target(bare)


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_loads_from_its_package(smollm2: Target) -> None:
    assert (smollm2.hidden_size, smollm2.num_layers, smollm2.vocab_size) == (576, 30, 49152)
    assert smollm2.tokenizer is not None
    text = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
