"""A folder of any format -> a head of ours, strictly: a missing or stray tensor is named, never skipped.

What a format does not tell is filled in by its own rules (eagle/formats/*.py), and every such step is written down in
`assumptions`. H hidden, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import LlamaConfig

from eagle.errors import EagleError
from eagle.formats.files import REMEDY, read_files
from eagle.formats.format import SIDECAR, VERSION_NAMES, Format, HeadFiles, Version, lookup
from eagle.formats.keys import check_keys
from eagle.formats.own import OWN
from eagle.formats.registry import detect
from eagle.formats.rope import check_rotation, read_rope
from eagle.formats.window import FULL, SLIDING, read_window
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.layer_ids import sglang_applied
from eagle.heads.vocabulary import DraftVocabulary, doubt_of_d2t
from eagle.reading import BROKEN, reason

CARRIED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the target that a file may carry: taken out, to be compared with the target's. (EAGLE-3 owns its lm_head.)"""
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range", "draft_vocab_size"),
    *("attention_dropout", "norm_before_residual", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What is taken from another project's config.json."""


class TargetShape(Protocol):
    """What the reader asks of a target, where one is known."""

    @property
    def num_layers(self) -> int: ...
    @property
    def model_type(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user knows better than the files."""

    rope_theta: float | None = None
    norm_before_residual: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadHead:
    """A head, and how it was read."""

    head: DraftHead
    format: Format
    evidence: str
    assumptions: tuple[str, ...]
    carried: dict[str, torch.Tensor]
    """Of CARRIED, what the file held."""
    files: HeadFiles
    unknown: tuple[str, ...]
    """Keys of config.json, with their values, of which nothing is known here; among the assumptions too."""


def read_head(
    path: str | Path,
    *,
    revision: str | None = None,
    format: Format | None = None,
    target: TargetShape | None = None,
    overrides: Overrides | None = None,
) -> ReadHead:
    """Reads a head in its file's dtype. format: None detects it. target: settles layer ids by SGLang's rule for its family.

    Raises EagleError: no such head, a damaged file, tensors missing or stray (each named), shapes that disagree with
    config.json, settings under which our heads would compute something else.
    """
    files = read_files(path, revision=revision)
    found, evidence = detect(files) if format is None else (format, "as --format says")
    version, notes = files.version, list[str]()
    file = files.folder / "config.json"
    state = {found.ours(name, version): value for name, value in files.state.items() if name not in found.of_target}
    if len(state) != len(files.state):
        notes.append(f"left out {', '.join(sorted(set(files.state) & set(found.of_target)))}: the target's")
    carried = {name: state.pop(name) for name in CARRIED[: 1 if version == "eagle3" else 2] if name in state}
    _drop_zero_biases(state, found, version, notes)
    try:
        unknown, told = check_keys(files.values, found, own=_own_keys() if found is OWN else frozenset())
        notes += told
        values = dict(files.values) if found.flatten is None else found.flatten(dict(files.values))
        if found is OWN and overrides not in (None, Overrides()):
            raise EagleError(
                "it is a folder of this project, which tells all settings: --rope-theta and --norm-before-residual have no "
                "effect; leave them out"
            )
        if found is OWN:
            _check_own(values)
        else:
            values = _settings(values, state, found, version, target, overrides, notes)
            _restore(values, state, files, version, notes)
        sglang_ids = values.pop("sglang_ids", None)
        head = _blank_head(values, state, version)
        if isinstance(head, Eagle3Head):
            head.sglang_ids = sglang_ids
    except EagleError as error:
        raise EagleError(f"{file}: {error}") from error
    except BROKEN as error:
        raise EagleError(f"{file} describes no head ({reason(error)}); mend that value, or {REMEDY}") from error
    _load(head, state, found, version, path)
    notes += [f"config.json says {key}: unknown here, taken to change nothing that it computes" for key in unknown]
    notes += found.doubts
    return ReadHead(
        head=head.eval(),
        format=found,
        evidence=evidence,
        assumptions=tuple(notes),
        carried=carried,
        files=files,
        unknown=unknown,
    )


def _settings(
    values: dict[str, Any],
    state: dict[str, torch.Tensor],
    format: Format,
    version: Version,
    target: TargetShape | None,
    overrides: Overrides | None,
    notes: list[str],
) -> dict[str, Any]:
    """Another project's config.json as our config's values; what was assumed goes into notes."""
    for key in ("hidden_size", "num_attention_heads", "vocab_size"):
        if type(values.get(key)) is not int or values[key] < 1:
            raise EagleError(f"{key} is {values.get(key)!r}, expected a whole number of at least 1; {REMEDY}")
    asked = overrides or Overrides()
    out = {key: values[key] for key in _FIELDS if values.get(key) is not None}
    if values.get("num_hidden_layers") not in (None, 1):
        notes.append(f"config.json says num_hidden_layers {values['num_hidden_layers']!r}, the tensors decide: 1 layer")
    out["sliding_window"], told = read_window(values)
    notes += [] if told is None else [told]
    layer = FULL if out["sliding_window"] is None else SLIDING
    out["rope_parameters"], where = read_rope(
        values, default_theta=format.rope_theta, layer=layer, asked=asked.rope_theta
    )
    fixed = format.scaled_rope_theta
    if fixed is not None and asked.rope_theta is None and out["rope_parameters"]["rope_type"] != "default":
        theta = out["rope_parameters"]["rope_theta"]
        where = f"{format.title} rotates so wherever there is a scaling" + (
            "" if theta == fixed else f"; config.json says {theta:g}"
        )
        out["rope_parameters"]["rope_theta"] = fixed
    notes.append(f"RoPE theta {out['rope_parameters']['rope_theta']:g} ({where})" + _scaling(out["rope_parameters"]))
    if not 0 < out.get("rms_norm_eps", 1e-6) < 1:
        raise EagleError(
            f"rms_norm_eps is {out['rms_norm_eps']!r}, expected a small positive number such as 1e-05; {REMEDY}"
        )
    eps = "config.json" if "rms_norm_eps" in out else "Llama's default: config.json names none"
    notes.append(f"norm epsilon {out.get('rms_norm_eps', LlamaConfig().rms_norm_eps):g} ({eps})")
    if version == "eagle3":
        _eagle3_settings(out, values, format, target, asked, notes)
    else:
        if asked.norm_before_residual is not None:
            raise EagleError("--norm-before-residual is of EAGLE-3 heads, this is an EAGLE-1/2 one; leave it out")
        out.pop("norm_before_residual", None)
        out.pop("draft_vocab_size", None)
        bias = values.get("bias")
        if format.name == "reference" and isinstance(bias, bool) and bias != ("fc.bias" in state):
            notes.append(f"config.json says bias {str(bias).lower()}, the tensors decide: fc.bias is {_there(state)}")
    if "d2t" in state and version == "eagle3" and format.derives_t2d and "t2d" not in state:
        doubt = doubt_of_d2t(state["d2t"].flatten(), int(out["vocab_size"]))
        if doubt is not None:
            raise EagleError(
                f"{doubt}, and the file has no t2d to tell; write d2t[i] = target id - i, and beside it t2d (bool, "
                f"{out['vocab_size']} long, true at the draft tokens' ids), or {REMEDY}"
            )
        state["t2d"] = _derived_t2d(state["d2t"], int(out["vocab_size"]))
        notes.append("t2d is not in the file: derived from d2t")
    if out.get("draft_vocab_size") == out.get("vocab_size") and "d2t" not in state:
        out.pop("draft_vocab_size", None)
    size = out.get("draft_vocab_size")
    notes.append(f"draft vocabulary: {'all ' + str(out.get('vocab_size')) if size is None else size} tokens")
    return out


def _own_keys() -> frozenset[str]:
    """What `save_pretrained` writes of our configs with this version of transformers."""
    return frozenset({**EagleHeadConfig().to_dict(), **Eagle3HeadConfig().to_dict()})


def _check_own(values: Mapping[str, Any]) -> None:
    """Raises EagleError for what a changed folder of ours may say and heads here do not compute."""
    check_rotation(values.get("rope_parameters") or {})
    window = values.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise EagleError(f"sliding_window is {window!r}, expected a whole number of at least 1, or null for no window")


def _restore(
    values: dict[str, Any], state: dict[str, torch.Tensor], files: HeadFiles, version: Version, notes: list[str]
) -> None:
    """Puts back what `eagle export` wrote beside the files because the format cannot hold it."""
    kept = files.sidecar or {}
    identity, coverage = kept.get("target_identity", {}), kept.get("draft_coverage", 0.0)
    if not isinstance(identity, dict) or type(coverage) not in (int, float):
        raise EagleError(
            f"{SIDECAR}: target_identity is {identity!r}, draft_coverage {coverage!r}, expected an object and a number; remove "
            f"{SIDECAR}, or export the head again"
        )
    values |= {key: kept[key] for key in ("draft_coverage", "target_identity") if key in kept}
    ids = kept.get("draft_token_ids")
    if ids is None or version != "eagle1":
        return
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < values["vocab_size"] for i in ids):
        raise EagleError(
            f"{SIDECAR}: draft_token_ids are not ids of tokens; remove {SIDECAR}, or export the head again"
        )
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=int(values["vocab_size"]))
    values["draft_vocab_size"] = vocabulary.size
    state |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    notes[:] = [note for note in notes if not note.startswith("draft vocabulary:")]
    notes.append(f"draft vocabulary: {vocabulary.size} tokens, put back from {SIDECAR}")


def _eagle3_settings(
    out: dict[str, Any],
    values: Mapping[str, Any],
    format: Format,
    target: TargetShape | None,
    asked: Overrides,
    notes: list[str],
) -> None:
    width = values.get("target_hidden_size")
    if width not in (None, values.get("hidden_size")):
        raise EagleError(
            f"target_hidden_size is {width}, hidden_size {values.get('hidden_size')}; heads narrower or wider "
            "than their target's features are not supported"
        )
    told, where = out.get("norm_before_residual"), "config.json"
    if asked.norm_before_residual is not None:
        told, where = asked.norm_before_residual, "as --norm-before-residual says"
    elif told is None:
        told, where = format.norm_before_residual, f"{format.title} heads are so: config.json does not tell"
    if not isinstance(told, bool):
        raise EagleError(
            f"norm_before_residual is {told!r}, and its defaults disagree between speculators and vLLM; say with "
            "--norm-before-residual true|false how the head was trained"
        )
    out["norm_before_residual"] = told
    notes.append(f"norm_before_residual {str(told).lower()} ({where})")
    out["aux_layers"], where, out["sglang_ids"] = _aux_layers(values, format, target)
    layers = "the target's [2, L//2, L-3]" if out["aux_layers"] is None else str(out["aux_layers"])
    notes.append(f"aux layers c = {layers} ({where})")
    if out["aux_layers"] is None and format.layers_doubt is not None:
        notes.append(format.layers_doubt)


def _aux_layers(
    values: Mapping[str, Any], format: Format, target: TargetShape | None
) -> tuple[list[int] | None, str, list[int] | None]:
    """The layers c that config.json names, and by which key; None when it names none.

    Last: SGLang's ids as they are, where a target that is not known yet will settle what they mean.
    """
    found: list[tuple[list[int], str, list[int] | None]] = []
    for place in format.layer_ids:
        ids = lookup(values, place.path)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(v) is int for v in ids):
            raise EagleError(
                f"{place.key}: {ids!r} are no layer ids, expected a list of whole numbers such as [2, 16, 29]"
            )
        if place.sglang and target is not None:
            applied = sglang_applied(ids, target.model_type, target.num_layers)
            rule = f"as SGLang reads it for {target.model_type}"
        else:
            applied = [v + place.added for v in ids]
            rule = "layers applied" if place.added == 0 else "plus one: it counts from the layer before"
            rule += ", as SGLang does for most families: a target settles it" if place.sglang else ""
        unsettled = list(ids) if place.sglang and target is None else None
        found.append((applied, f"{place.key} {ids}, {rule}", unsettled))
    if not found:
        return None, "config.json names none: the published choice", None
    layers, where, unsettled = found[0]
    if layers != sorted(set(layers)) or layers[0] < 0:
        raise EagleError(
            f"{where}: the layers would be {layers}, expected different ones of 0 and up, in ascending order"
        )
    for others, elsewhere, _ in found[1:]:
        if others != layers:
            where += f"; {elsewhere} would be {others}: not taken"
    return layers, where, unsettled


def _derived_t2d(d2t_D: torch.Tensor, size: int) -> torch.Tensor:
    ids_D = d2t_D.long() + torch.arange(len(d2t_D))
    t2d_V = torch.zeros(size, dtype=torch.bool)
    t2d_V[ids_D[(ids_D >= 0) & (ids_D < size)]] = True
    return t2d_V


def _drop_zero_biases(state: dict[str, torch.Tensor], format: Format, version: Version, notes: list[str]) -> None:
    """Leaves out biases that a loader's parameters made its writer add; a bias that is not zero stays, to be named."""
    names = ["layers.0.self_attn.o_proj.bias", "midlayer.self_attn.o_proj.bias"]
    limits = format.limits.get(version)
    if limits is not None and limits.fc_bias == "always":
        names.append("fc.bias")
    for name in names:
        if name in state and not bool(state[name].any()):
            del state[name]
            notes.append(f"{name} is zero: left out")


def _blank_head(values: dict[str, Any], state: Mapping[str, torch.Tensor], version: Version) -> DraftHead:
    """A head of the shape that the values and the tensors tell, its weights not yet loaded.

    Biases are told by the tensors: published configs do not always name them.
    """
    for key in ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "bias"):
        values.pop(key, None)
    layer = "midlayer" if version == "eagle3" else "layers.0"
    values |= {
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
        "attention_bias": f"{layer}.self_attn.q_proj.bias" in state,
        "mlp_bias": f"{layer}.mlp.gate_proj.bias" in state,
    }
    if version == "eagle3":
        return Eagle3Head(Eagle3HeadConfig(**values))
    return EagleHead(EagleHeadConfig(**{**values, "fc_bias": "fc.bias" in state}))


def _load(head: DraftHead, state: dict[str, torch.Tensor], format: Format, version: Version, path: str | Path) -> None:
    """Fills the head, in the file's dtype. Raises EagleError unless the tensors are exactly the head's."""
    expected = head.state_dict()
    missing, stray = (
        sorted(format.theirs(name, version) for name in names)
        for names in (expected.keys() - state.keys(), state.keys() - expected.keys())
    )
    if missing or stray:
        raise EagleError(
            f"head {path} is not an {VERSION_NAMES[version]} head: missing keys: {', '.join(missing) or 'none'}; "
            f"stray keys: {', '.join(stray) or 'none'}; expected exactly "
            f"{', '.join(sorted(format.theirs(name, version) for name in expected))} "
            "(embed_tokens.weight, fc.bias (EAGLE-1) and q/k/v biases are optional; d2t and t2d are there exactly when "
            "config.json has a draft_vocab_size below its vocab_size)" + _hint(stray)
        )
    wrong = [
        f"{format.theirs(name, version)} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if state[name].shape != expected[name].shape
    ]
    if wrong:
        raise EagleError(
            f"head {path}: its tensors disagree with its config.json: {'; '.join(wrong)}; take both from one source"
        )
    odd = {str(value.dtype) for name, value in state.items() if name not in ("d2t", "t2d") and not _is_plain(value)}
    if odd:
        raise EagleError(
            f"head {path}: weights are {', '.join(sorted(odd))}, expected float32, bfloat16 or float16; export it unquantised"
        )
    broken = sorted(name for name, value in state.items() if _is_plain(value) and not bool(value.isfinite().all()))
    if broken:
        raise EagleError(
            f"head {path}: NaN or infinite values in {', '.join(format.theirs(name, version) for name in broken)}; take an "
            "earlier checkpoint (a cast to float16 overflows above 65504)"
        )
    if head.config.draft_vocab_size is not None:
        DraftVocabulary.from_tensors(state["d2t"], state["t2d"], where=f"head {path}")
    dtypes = {value.dtype for name, value in state.items() if name not in ("d2t", "t2d")}
    head.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    head.load_state_dict(state)


def _is_plain(value: torch.Tensor) -> bool:
    return value.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _hint(stray: list[str]) -> str:
    if any("q_norm" in name or "k_norm" in name for name in stray):
        return "; norms of q and k (Qwen3's layer) are not supported"
    if any("input_norm" in name or "fc_norm" in name or "layernorm" in name for name in stray):
        return "; norms before fc are not supported"
    return ""


def _there(state: Mapping[str, torch.Tensor]) -> str:
    return "there" if "fc.bias" in state else "not there"


def _scaling(rope: Mapping[str, Any]) -> str:
    return "" if rope["rope_type"] == "default" else f", scaling {rope['rope_type']}"
