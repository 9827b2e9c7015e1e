"""Exported folders, loaded by loaders written from the runtimes' own rules, draft what our head drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle.cli.parity import training_logits
from eagle.config import TargetConfig
from eagle.formats.lint.check import lint
from eagle.formats.registry import FORMATS
from eagle.formats.target_facts import TargetFacts
from eagle.formats.write import export_head, write_export
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.target.target import Target
from tests.runtimes import reference_loader, sglang_loader, speculators_loader, vllm_loader
from tests.runtimes.loaded import Loaded
from tests.tiny import VOCAB, save_tiny_target

DEPTH, LAYERS, D = 4, 8, 90
IDS = torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(3)).tolist()
RUNTIMES: dict[str, Callable[..., Loaded]] = {
    "vllm": vllm_loader.load,
    "sglang": sglang_loader.load,
    "speculators": speculators_loader.load,
    "reference": reference_loader.load,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    rope = {"rope_type": "default", "rope_theta": 300000.0}
    save_tiny_target(folder, num_hidden_layers=LAYERS, rope_parameters=rope)
    return Target.from_config(TargetConfig(model=str(folder), device="cpu"))


def make_head(version: str, target: Target, *, reduced: bool = True, **overrides: Any) -> DraftHead:
    torch.manual_seed(5)
    kinds = {"eagle1": (EagleHead, EagleHeadConfig), "eagle3": (Eagle3Head, Eagle3HeadConfig)}
    make, config = kinds[version]
    overrides = {"initializer_range": 0.2, "draft_vocab_size": D if reduced else None, **overrides}
    head = make(config.for_target(target.config, **overrides)).eval()
    if reduced:
        head.set_vocabulary(DraftVocabulary.most_frequent(torch.randperm(VOCAB), D))
    for name, weight in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    if isinstance(head, Eagle3Head):
        head.bind(target.num_layers)
    return head


def export(head: DraftHead, target: Target, to: str, folder: Path, *, dtype: str = "float32") -> Path:
    facts = TargetFacts(TargetConfig(model=target.name))
    write_export(export_head(head, FORMATS[to], facts, folder=str(folder), dtype=dtype), folder)
    return folder


def load(runtime: str, folder: Path, head: DraftHead, target: Target) -> Loaded:
    eagle3 = head.version == "eagle3"
    told = {"vllm": {"method": "eagle3" if eagle3 else "eagle"}, "reference": {"eagle3": eagle3}}.get(runtime, {})
    return RUNTIMES[runtime](folder, target_layers=LAYERS, lm_head_VH=target.tokens.lm_head_VH, **told)


@torch.inference_mode()
def chains(loaded: Loaded, target: Target) -> torch.Tensor:
    """[depth, roots, V]: what the runtime drafts behind every token, from Hugging Face's own hidden states."""
    out = target.model(torch.tensor([IDS]), output_hidden_states=True)
    states = [out.hidden_states[c][0] for c in loaded.layers] or [out.hidden_states[-1][0]]
    states_TX, embedding = torch.cat(states, dim=-1), target.tokens.embedding_VH
    roots = range(len(IDS) - DEPTH)
    return torch.stack(
        [loaded.chain(states_TX[: i + 1], IDS[1 : i + 1 + DEPTH], embedding, depth=DEPTH) for i in roots], dim=1
    )


def drafted(head: DraftHead, logits: torch.Tensor) -> torch.Tensor:
    """The draft tokens' part of logits over the target's tokens."""
    return logits if head.vocabulary is None else logits[..., head.vocabulary.target_ids_D]


CASES = [
    ("eagle1", "vllm", {}),
    ("eagle1", "vllm", {"reduced": False}),
    ("eagle1", "vllm", {"attention_bias": True}),
    ("eagle1", "sglang", {}),
    ("eagle1", "sglang", {"fc_bias": True}),
    ("eagle1", "sglang", {"attention_bias": True}),
    *(("eagle1", "reference", one) for one in ({}, {"reduced": False}, {"fc_bias": True}, {"attention_bias": True})),
    *(
        ("eagle3", runtime, overrides)
        for runtime in RUNTIMES
        for overrides in (
            *({}, {"reduced": False}, {"aux_layers": [1, 4, 6]}, {"aux_layers": [3, 6]}, {"aux_layers": [1, 3, 4, 7]}),
            {"head_dim": 16},
        )
        if runtime != "reference" or not overrides.keys() & {"aux_layers", "head_dim"}
    ),
    *(("eagle3", runtime, {"aux_layers": [5]}) for runtime in ("vllm", "speculators")),
    ("eagle3", "vllm", {"norm_before_residual": True}),
    ("eagle3", "speculators", {"norm_before_residual": True}),
    ("eagle3", "vllm", {"attention_bias": True}),
    *((version, "vllm", {"sliding_window": size}) for version in ("eagle1", "eagle3") for size in (3, 6)),
    ("eagle3", "speculators", {"sliding_window": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "runtime", "overrides"), CASES, ids=str)
@torch.inference_mode()
def test_an_exported_folder_drafts_the_same_in_the_runtime(
    version: str, runtime: str, overrides: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    head = make_head(version, target, **overrides)
    for name, weight in head.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(weight, -1, 1)
    folder = export(head, target, runtime, tmp_path / "out")
    loaded = load(runtime, folder, head, target)
    assert loaded.unfilled == []
    assert set(loaded.skipped) <= {"t2d", "embed_tokens.weight"}
    ours, theirs = training_logits(head, target, IDS, depth=DEPTH), chains(loaded, target)
    assert ours.shape[:2] == (DEPTH, len(IDS) - DEPTH)
    torch.testing.assert_close(drafted(head, theirs), ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    if version == "eagle3" and head.vocabulary is not None:  # and nothing else is ever drafted
        assert int(theirs.isfinite().sum(-1).max()) == D
    report = lint(folder, runtime=runtime, target=TargetConfig(model=target.name))  # type: ignore[arg-type]
    unread = ["target-rope"] if runtime == "reference" else []  # the target was saved by transformers 5
    assert [finding.rule for finding in report.findings] == unread


@pytest.mark.parametrize(("version", "runtime"), [("eagle1", "vllm"), ("eagle1", "sglang"), ("eagle3", "speculators")])
@torch.inference_mode()
def test_half_precision_files_hold_the_rounded_weights(
    version: str, runtime: str, target: Target, tmp_path: Path
) -> None:
    head = make_head(version, target)
    folder = export(head, target, runtime, tmp_path / "out", dtype="bfloat16")
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16())
    theirs = chains(load(runtime, folder, head, target), target)
    ours = training_logits(head, target, IDS, depth=DEPTH)
    torch.testing.assert_close(drafted(head, theirs), ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


def spoil(folder: Path, *, drop: str | None = None, add: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
    file = folder / "model.safetensors"
    state = {key: value for key, value in load_file(file).items() if key != drop} | (add or {})
    save_file(state, file)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))


@torch.inference_mode()
def test_the_loaders_follow_the_runtimes_where_folders_are_wrong(target: Target, tmp_path: Path) -> None:
    """The judges of this file do raise and skip: else the tests above could not fail."""
    eagle1, eagle3 = make_head("eagle1", target), make_head("eagle3", target)
    folder = export(eagle1, target, "vllm", tmp_path / "vllm")
    spoil(folder, add={"fc.bias": torch.zeros(32)})
    with pytest.raises(ValueError, match=r"no module or parameter named 'model.fc.bias'"):
        load("vllm", folder, eagle1, target)
    folder = export(eagle1, target, "sglang", tmp_path / "sglang")
    spoil(folder, drop="fc.bias", add={"stray": torch.zeros(1)})
    loaded = load("sglang", folder, eagle1, target)
    assert (loaded.unfilled, loaded.skipped) == (["model.fc.bias"], ["stray"])
    assert not bool(chains(loaded, target).isfinite().any())
    folder = export(eagle1, target, "reference", tmp_path / "reference1")
    spoil(folder, add={"layers.0.self_attn.q_proj.bias": torch.ones(32)})
    assert load("reference", folder, eagle1, target).skipped == ["layers.0.self_attn.q_proj.bias"]
    spoil(folder, rope_scaling={"rope_type": "linear", "factor": 2.0, "type": "linear"})
    with pytest.raises(ValueError, match="two fields"):
        load("reference", folder, eagle1, target)
    for version in ("eagle1", "eagle3"):
        wide = make_head(version, target, head_dim=16)
        folder = export(wide, target, "vllm", tmp_path / f"wide {version}")
        with pytest.raises(RuntimeError, match="size mismatch"):
            load("reference", folder, wide, target)
    pair = make_head("eagle3", target, aux_layers=[3, 6])
    folder = export(pair, target, "vllm", tmp_path / "pair")
    spoil(folder, num_aux_hidden_states=None)
    with pytest.raises(AssertionError, match=r"model\.fc\.weight"):
        load("vllm", folder, pair, target)
    folder = export(eagle3, target, "reference", tmp_path / "reference3")
    spoil(folder, add={"midlayer.self_attn.q_proj.bias": torch.ones(32)}, qkv_bias=True, drop="norm.weight")
    loaded = load("reference", folder, eagle3, target)
    assert (loaded.skipped, loaded.unfilled) == (["midlayer.self_attn.q_proj.bias"], ["norm.weight"])
    folder = export(eagle3, target, "speculators", tmp_path / "speculators")
    values = json.loads((folder / "config.json").read_text())
    del values["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(values))
    ours = training_logits(eagle3, target, IDS, depth=DEPTH)
    theirs = drafted(eagle3, chains(load("speculators", folder, eagle3, target), target))
    assert not torch.allclose(theirs, ours, atol=1e-2), "a missing norm_before_residual means true there"
    folder = export(eagle3, target, "sglang", tmp_path / "layers")
    spoil(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers)})
    loaded = load("sglang", folder, eagle3, target)
    assert loaded.layers == [c + 1 for c in eagle3.aux_layers]
