"""Lint rules on the ids of the target's layers that an EAGLE-3 head looks at: the main trap between runtimes.

c = number of layers applied, Hugging Face's hidden_states index. vLLM and speculators read `eagle_aux_hidden_state_layer_ids`
at the top level as c. SGLang reads it inside `eagle_config` only, and adds 1 for most families. The EAGLE authors' code reads
none. All of them take [2, L//2, L-3] where they find none (formats/layer_ids.py has the exceptions by family). Also here:
whether the runtime serves the target with such a head at all.
"""

from collections.abc import Iterator
from typing import Any

from eagle.errors import EagleError
from eagle.formats.lint.files import LAYER_IDS
from eagle.formats.lint.rules import Found, Look, rule
from eagle.formats.targets import unserved
from eagle.heads.eagle3 import LOW_MID_HIGH
from eagle.heads.layer_ids import published_layers, sglang_applied, sglang_default, sglang_ids

NOBODYS_IDS = "aux_hidden_states_layer_ids"
"""AngelSlim's key, in layers before: no runtime reads it."""


@rule("target-family", "the runtime serves such targets with such a head")
def target_family(look: Look) -> Iterator[Found]:
    limit = None if look.target is None else unserved(look.runtime, look.head.version, look.target.model_type)
    if limit is not None and look.target is not None:
        yield Found(
            severity="breaks" if limit.certain else "warning",
            evidence=f"target {look.target.name} is of family {look.target.model_type}",
            effect=limit.effect,
            remedy=limit.remedy,
        )


@rule("layer-ids-missing", "the layers are named", runtimes=("vllm", "sglang", "speculators"), versions=("eagle3",))
def layer_ids_missing(look: Look) -> Iterator[Found]:
    if any(ids is not None for ids in _given(look).values()):
        return
    taken, default = "[2, L//2, L-3]", _default(look)
    unread = look.head.config.get(NOBODYS_IDS)
    yield Found(
        severity="warning",
        evidence="config.json names no layer ids"
        + ("" if unread is None else f" that are read ({NOBODYS_IDS} is {unread}, in layers before)"),
        effect=f"{look.name} captures {taken if default is None else default}: right for heads of the EAGLE authors and of "
        "trainers with their choice, silently wrong for others (AngelSlim's takes [2, (L+1)//2, L-2])",
        remedy=f'write the layers of the training into "{LAYER_IDS}" at the top level (number of layers applied)'
        + (", and into eagle_config as SGLang counts" if look.runtime == "sglang" else ""),
    )


@rule("layer-ids", "the ids are whole numbers, ascending, different, and the target has them", versions=("eagle3",))
def layer_ids(look: Look) -> Iterator[Found]:
    for where, ids in _given(look).items():
        if ids is None:
            continue
        remedy = f"write different ids in ascending order into {where}, such as [2, 16, 29]"
        if not isinstance(ids, list) or not ids or not all(type(c) is int for c in ids):
            evidence = f"{where} is {ids!r}"
            yield Found(severity="breaks", evidence=evidence, effect="no list of whole numbers", remedy=remedy)
            continue
        evidence = f"{where} is {ids}"
        if len(set(ids)) < len(ids):
            effect = "a layer named twice is captured once: fc gets fewer states than it has inputs for"
            yield Found(severity="breaks", evidence=f"{evidence}: repeated", effect=effect, remedy=remedy)
        elif ids != sorted(ids):
            effect = "states are captured as the layers run, in ascending order: fc multiplies the wrong ones"
            yield Found(severity="silently wrong", evidence=f"{evidence}: not ascending", effect=effect, remedy=remedy)
        limit = None if look.target is None else look.target.num_layers
        applied = ids
        if look.target is not None and where.startswith("eagle_config"):
            applied = sglang_applied(ids, look.target.model_type, look.target.num_layers)
        if limit is not None and (min(applied) < 0 or max(applied) >= limit):
            yield Found(
                severity="breaks",
                evidence=f"{evidence}, target {look.target.name if look.target else ''} has {limit} layers",
                effect=f"hidden states run from 0 to {limit - 1} layers applied: that one is never captured",
                remedy="write the layers that the head was trained on, or give the target that it was trained for",
            )


@rule("layer-count", "fc takes the states of as many layers as are named", versions=("eagle3",))
def layer_count(look: Look) -> Iterator[Found]:
    fc, wide = look.head.tensors.get("fc.weight"), look.head.feature_size
    if fc is None or fc.ndim != 2 or not wide or fc.shape[1] % wide:
        return  # the rule `shapes` says so
    taken = fc.shape[1] // wide
    used = _used(look)
    count = 3 if used is None else len(used)
    if taken != count:
        yield Found(
            severity="breaks",
            evidence=f"fc.weight takes {taken} states of {wide}, the ids name {count}",
            effect=f"{look.name} hands it {count} x {wide} values",
            remedy="write the ids of exactly those layers that fc was trained on",
        )
    elif taken != _made(look):
        yield Found(
            severity="breaks",
            evidence=f"fc.weight takes {taken} states of {wide}",
            effect=f"{'vLLM' if look.runtime == 'speculators' else look.name} makes an fc for {_made(look)}, whatever the ids at "
            "the top: loading raises on the shape",
            remedy="train a head that looks at three layers"
            if look.runtime == "reference"
            else f'write "num_aux_hidden_states": {taken}{" into transformer_layer_config" if look.head.speculators else ""}',
        )
    elif taken == 1 and look.runtime == "sglang":
        yield Found(
            severity="silently wrong",
            evidence=f"fc.weight takes one state of {wide}",
            effect="SGLang passes over fc where the states are as wide as the head: the layer gets what fc should have changed",
            remedy="serve it with vLLM (eagle export HEAD OUT --to vllm), or train a head that looks at two layers or more",
        )


@rule("layer-convention", "the ids are written where and how this runtime reads them", versions=("eagle3",))
def layer_convention(look: Look) -> Iterator[Found]:
    top, nested = (ids if _whole(ids) else None for ids in _given(look).values())
    if top is None and nested is None:
        return
    target = look.target
    family, layers = ("llama", 0) if target is None else (target.model_type, target.num_layers)
    default = _default(look)
    read = None if nested is None else sglang_applied(nested, family, layers)
    if top is not None and read is not None and read != top and look.runtime != "reference":
        yield Found(
            severity="silently wrong",
            evidence=f"{LAYER_IDS} is {top} at the top level and {nested} inside eagle_config, which SGLang reads as {read}",
            effect="vLLM and speculators capture the first, SGLang the second: one of them drafts from the wrong layers",
            remedy=f"write {_sglang(top, look)} inside eagle_config (or leave it out when the layers are the default ones)",
        )
        return
    meant = top if top is not None else read
    assert meant is not None
    if look.runtime == "sglang" and nested is None and meant != default:
        known = "cannot be told without --target" if default is None else f"are {default}"
        yield Found(
            severity="warning" if default is None else "silently wrong",
            evidence=f"{LAYER_IDS} {top} stands at the top level alone; the target's default layers {known}",
            effect="SGLang reads eagle_config alone and captures its default layers",
            remedy=f'write "eagle_config": {{"{LAYER_IDS}": {_sglang(meant, look)}}}',
        )
    if look.runtime in ("vllm", "speculators") and top is None and meant != default:
        yield Found(
            severity="silently wrong",
            evidence=f"{LAYER_IDS} {nested} stands inside eagle_config alone (layers {meant} as SGLang and SpecForge count)",
            effect="vLLM's runner V1 captures the numbers as they are, one layer too low; V2 and speculators the default ones",
            remedy=f'write "{LAYER_IDS}": {meant} at the top level',
        )
    if look.runtime == "reference" and meant != default:
        yield Found(
            severity="warning" if default is None else "silently wrong",
            evidence=f"the head looks at layers {meant}",
            effect="the EAGLE authors' code reads no ids: it always captures [2, L//2, L-3]"
            + ("" if default is None else f" = {default}"),
            remedy="serve it with another runtime, or train on the default layers (head.aux_layers: null)",
        )


def _default(look: Look) -> list[int] | None:
    """The layers that the runtime captures without ids; None: not known without a target."""
    if look.target is None:
        return None
    if look.runtime == "sglang":
        return sglang_default(look.target.model_type, look.target.num_layers)
    return published_layers(look.target.num_layers)


def _given(look: Look) -> dict[str, Any]:
    """The ids where they may stand, the top level first."""
    nested = look.head.config.get("eagle_config")
    below = nested.get(LAYER_IDS) if isinstance(nested, dict) else None
    return {LAYER_IDS: look.head.config.get(LAYER_IDS), f"eagle_config.{LAYER_IDS}": below}


def _whole(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(c) is int for c in ids)


def _used(look: Look) -> list[int] | None:
    """The ids that the runtime reads; None: none, so that it takes three."""
    top, nested = _given(look).values()
    if look.runtime == "reference":
        return None
    ids = nested if look.runtime == "sglang" else top if _whole(top) or look.runtime == "speculators" else nested
    return ids if _whole(ids) else None


def _made(look: Look) -> int:
    """How many states the runtime makes fc for, as far as it is vLLM's and SGLang's Llama head (LOW_MID_HIGH: by default)."""
    if look.runtime == "reference":
        return LOW_MID_HIGH
    top, nested = _given(look).values()
    config = look.head.layer if look.head.speculators else look.head.config
    named = config.get("num_aux_hidden_states")
    if type(named) is int:
        return named
    if look.head.speculators:  # vLLM flattens it: no eagle_config is left; its qwen3 head counts the ids
        return len(top) if _whole(top) and config.get("model_type") == "qwen3" else LOW_MID_HIGH
    return len(nested) if _whole(nested) else LOW_MID_HIGH


def _sglang(layers: list[int], look: Look) -> str:
    """What to write inside eagle_config so that SGLang captures those layers, in words."""
    family, count = ("llama", 0) if look.target is None else (look.target.model_type, look.target.num_layers)
    try:
        return str(sglang_ids(layers, family, count))
    except EagleError:
        return "(no ids of SGLang's lead to these layers)"
