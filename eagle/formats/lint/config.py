"""Lint rules on config.json: names that a runtime looks up, RoPE, the residual's norm, and what speculators' form needs."""

import json
from collections.abc import Iterator
from typing import Any

from eagle.errors import EagleError
from eagle.formats.lint.files import DEFAULT_THETA
from eagle.formats.lint.rules import Found, Look, Runtime, Version, rule
from eagle.formats.rope import scaling_of
from eagle.formats.sglang import QWEN2_EAGLE
from eagle.formats.window import SLIDING, read_window

_ARCHITECTURES: dict[tuple[Runtime, Version], tuple[str, ...]] = {
    ("vllm", "eagle1"): ("EagleLlamaForCausalLM", "LlamaForCausalLM", "EagleMistralForCausalLM"),
    ("vllm", "eagle3"): (
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
        *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
    ),
    ("sglang", "eagle1"): ("LlamaForCausalLMEagle", QWEN2_EAGLE, "MistralForCausalLMEagle"),
    ("sglang", "eagle3"): ("LlamaForCausalLMEagle3",),
    ("speculators", "eagle3"): ("Eagle3Speculator", "Eagle3DraftModel"),
}

_OTHER_RUNTIME = (
    "serve this head with vLLM or SGLang (eagle export HEAD OUT --to vllm), or train it without RoPE scaling"
)


@rule("architectures", "the class name under which the runtime finds the head's code")
def architectures(look: Look) -> Iterator[Found]:
    wanted = _ARCHITECTURES.get((look.runtime, look.head.version))
    if wanted is None or (look.runtime == "vllm" and look.head.speculators):  # vLLM writes it itself there
        return
    got = look.head.config.get("architectures")
    if not (isinstance(got, list) and len(got) == 1 and got[0] in wanted):
        yield Found(
            severity="breaks",
            evidence=f"architectures is {got}, expected one of {', '.join(wanted)}",
            effect=f"{look.name} has no {'EAGLE-1' if look.head.version == 'eagle1' else 'EAGLE-3'} head under that name",
            remedy=f'write "architectures": ["{wanted[0]}"], or {look.again}',
        )


@rule("model-type", "the config class that transformers makes of config.json", runtimes=("vllm", "sglang"))
def model_type(look: Look) -> Iterator[Found]:
    got = look.head.config.get("model_type")
    if look.head.speculators:
        if look.runtime == "sglang":
            yield Found(
                severity="breaks",
                evidence="config.json is in speculators' form (transformer_layer_config)",
                effect="SGLang reads a flat Llama config: there is no hidden_size at its top level",
                remedy=look.again,
            )
        return
    if got not in ("llama", "qwen2", "qwen3", "mistral"):
        yield Found(
            severity="breaks",
            evidence=f"model_type is {got!r}, expected 'llama'",
            effect="transformers' AutoConfig knows no such type: loading ends before the weights are read",
            remedy=f'write "model_type": "llama", or {look.again}',
        )


@rule("top-level-model-type", "speculators' form has none", runtimes=("speculators",), versions=("eagle3",))
def top_level_model_type(look: Look) -> Iterator[Found]:
    if look.head.speculators and "model_type" in look.head.config:
        yield Found(
            severity="warning",
            evidence=f"model_type {look.head.config['model_type']!r} at the top level",
            effect="loaders that look at model_type first take the folder for a plain model of that type",
            remedy="remove model_type; speculators_model_type says what it is",
        )


@rule("speculators-config", "what speculators and vLLM need to know of the proposal", runtimes=("speculators", "vllm"))
def speculators_config(look: Look) -> Iterator[Found]:
    head = look.head
    if look.runtime == "vllm" and not head.speculators:
        return
    if head.version == "eagle1":
        yield Found(
            severity="breaks",
            evidence="the tensors are an EAGLE-1 head's (layers.0.* without hidden_norm)",
            effect="speculators 0.9 has EAGLE-3 heads (and others), no EAGLE-1",
            remedy="export it for vLLM or SGLang, or train an EAGLE-3 head (head.version: eagle3)",
        )
        return
    missing = _missing(head.config)
    if missing:
        yield Found(
            severity="breaks",
            evidence=f"config.json lacks {', '.join(missing)}",
            effect="vLLM raises 'Invalid speculators config structure', speculators cannot build the model",
            remedy="export the head for it: eagle export HEAD OUT --to speculators",
        )


def _missing(config: dict[str, Any]) -> list[str]:
    missing = [
        key
        for key, right in (
            ("speculators_model_type: eagle3", config.get("speculators_model_type") == "eagle3"),
            ("transformer_layer_config", isinstance(config.get("transformer_layer_config"), dict)),
            ("speculators_version", "speculators_version" in config),
        )
        if not right
    ]
    inner = config.get("speculators_config")
    inner = inner if isinstance(inner, dict) else {}
    methods, verifier = inner.get("proposal_methods"), inner.get("verifier")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    if type(first.get("speculative_tokens")) is not int:
        missing.append("speculators_config.proposal_methods[0].speculative_tokens")
    if not isinstance(verifier, dict) or "name_or_path" not in verifier:
        missing.append("speculators_config.verifier.name_or_path")
    return missing


@rule("norm-before-residual", "whether the residual is the normed feature", versions=("eagle3",))
def norm_before_residual(look: Look) -> Iterator[Found]:
    value = look.head.config.get("norm_before_residual")
    if value and look.runtime in ("sglang", "reference"):
        yield Found(
            severity="silently wrong",
            evidence="norm_before_residual is true",
            effect=f"{look.name} does not implement it: the residual stays un-normed and the drafts are other ones",
            remedy="serve this head with vLLM, or train it with norm_before_residual false",
        )
    if value is None and look.head.speculators:
        yield Found(
            severity="silently wrong",
            evidence="norm_before_residual is not in config.json",
            effect="the defaults disagree: speculators' class takes false, vLLM takes true",
            remedy='write "norm_before_residual": false (or true, as the head was trained)',
        )


@rule("tie-word-embeddings", "an EAGLE-3 head has an LM head of its own", versions=("eagle3",))
def tie_word_embeddings(look: Look) -> Iterator[Found]:
    for where, config in (("", look.head.config), ("transformer_layer_config.", look.head.layer)):
        if config.get("tie_word_embeddings") and not (where and config is look.head.config):
            wrong = look.runtime == "sglang"
            yield Found(
                severity="silently wrong" if wrong else "warning",
                evidence=f"{where}tie_word_embeddings is true",
                effect="SGLang takes the embedding as LM head and skips lm_head.weight"
                if wrong
                else "a loader that ties weights would draft with the embedding instead of lm_head.weight",
                remedy='write "tie_word_embeddings": false',
            )


@rule("layers", "one decoder layer")
def layers(look: Look) -> Iterator[Found]:
    head = look.head
    numbers = {key.split(".")[1] for key in head.tensors if key.startswith("layers.")}
    held = max(1, len(numbers))
    got = head.whole("num_hidden_layers")
    if got is None and look.runtime != "reference":
        yield Found(
            severity="breaks",
            evidence="num_hidden_layers is not in config.json",
            effect=f"{look.name} builds Llama's default of 32 layers, of which the file has {held}",
            remedy=f'write "num_hidden_layers": {held}',
        )
    elif got is not None and got != held:
        yield Found(
            severity="silently wrong",
            evidence=f"num_hidden_layers is {got}, the file has {held}",
            effect=f"{look.name} builds {got} layers; those without weights stay as they were initialised",
            remedy=f'write "num_hidden_layers": {held}',
        )


@rule("rope-theta", "the base of the rotation, where the config names none")
def rope_theta(look: Look) -> Iterator[Found]:
    if look.head.theta is None and look.target is not None and look.target.theta != DEFAULT_THETA:
        yield Found(
            severity="warning",
            evidence=f"config.json names no RoPE theta, target {look.target.name} has {look.target.theta:g}",
            effect=f"{look.name} rotates with {DEFAULT_THETA:g}: right only if the head was trained so, as some published ones",
            remedy="write rope_theta and rope_parameters with the theta of the training",
        )


@rule("target-rope", "the target's RoPE is spelled as the runtime reads it", runtimes=("reference",))
def target_rope(look: Look) -> Iterator[Found]:
    if look.target is not None and look.target.unspelled_rope:
        keys = json.dumps(dict(look.target.unspelled_rope))[1:-1]
        yield Found(
            severity="silently wrong",
            evidence=f"config.json of target {look.target.name} has its RoPE in rope_parameters alone (transformers 5's form)",
            effect=f"{look.name} reads rope_theta and rope_scaling of it, and rotates the target with its defaults",
            remedy=f"add {keys} to the target's config.json",
        )


@rule("rope-spelling", "rope_theta / rope_scaling and rope_parameters say the same")
def rope_spelling(look: Look) -> Iterator[Found]:
    layer = look.head.layer
    rope, old = look.head.rope, layer.get("rope_theta")
    if rope and rope is not layer.get("rope_parameters") and look.runtime in ("vllm", "speculators"):
        yield Found(
            severity="silently wrong",
            evidence=f"rope_parameters is nested by kind of layer ({', '.join(layer['rope_parameters'])})",
            effect="a Llama layer reads it flat and finds no theta: loading ends, or it rotates with the default",
            remedy=f'write those of the head\'s layer: "rope_parameters": {json.dumps(dict(rope))}',
        )
    new = rope.get("rope_theta")
    for name, theta in (("rope_theta", old), ("rope_parameters.rope_theta", new)):
        if theta is not None and (
            isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < 1e300
        ):
            yield Found(
                severity="breaks",
                evidence=f"{name} is {theta!r}",
                effect="no base to rotate with",
                remedy="write the theta of the training, a positive number such as 10000",
            )
            return
    both = 'write both: "rope_theta": T, "rope_parameters": {"rope_type": "default", "rope_theta": T}'
    if old is not None and new is not None and float(old) != float(new):
        yield Found(
            severity="silently wrong",
            evidence=f"rope_theta is {old:g}, rope_parameters.rope_theta {new:g}",
            effect="transformers 5 reads rope_parameters (or rope_scaling, where that is there), SGLang and transformers 4 read "
            "rope_theta: one of them rotates wrongly",
            remedy=both,
        )
    elif old is None and new is not None and float(new) != DEFAULT_THETA:
        reads_new = look.runtime in ("vllm", "speculators")
        yield Found(
            severity="warning" if reads_new else "silently wrong",
            evidence=f"theta {new:g} stands in rope_parameters alone, not in rope_theta",
            effect=f"with transformers 4, {look.name} rotates with {DEFAULT_THETA:g}"
            if reads_new
            else f"{look.name} reads rope_theta, finds none and rotates with {DEFAULT_THETA:g}",
            remedy=both,
        )
    kind, scaling = rope.get("rope_type", "default"), layer.get("rope_scaling")
    if kind != "default" and not scaling and look.runtime in ("sglang", "reference"):
        yield Found(
            severity="silently wrong",
            evidence=f"rope_parameters has rope_type {kind!r}, rope_scaling is missing",
            effect=f"{look.name} reads rope_scaling: positions are rotated without scaling",
            remedy="write the scaling into rope_scaling too" if look.runtime == "sglang" else _OTHER_RUNTIME,
        )
    if rope and isinstance(scaling, dict) and scaling and scaling_of(rope) != scaling_of(scaling):
        yield Found(
            severity="silently wrong",
            evidence=f"rope_scaling is {scaling}, rope_parameters {rope}: two different scalings",
            effect="transformers and SGLang take rope_scaling, other loaders rope_parameters, `eagle import` refuses both",
            remedy="write the scaling of the training into both",
        )


@rule("rotation", "angles and their share of the head dim, on which runtimes and trainers agree")
def rotation(look: Look) -> Iterator[Found]:
    layer = look.head.layer
    for where in (look.head.rope, layer.get("rope_scaling")):
        if isinstance(where, dict) and "dynamic" in (where.get("rope_type"), where.get("type")):
            yield Found(
                severity="silently wrong",
                evidence="RoPE scaling dynamic",
                effect="vLLM and SGLang scale at every length, transformers and the EAGLE authors' code by the longest text seen",
                remedy="train the head with another scaling (yarn, linear, llama3) or none",
            )
            return
    shares = [place.get("partial_rotary_factor") for place in (layer, look.head.rope)]
    if any(share not in (None, 1) for share in shares):
        yield Found(
            severity="warning",
            evidence=f"partial_rotary_factor is {next(share for share in shares if share not in (None, 1))}",
            effect="vLLM and SGLang rotate that share of the head dim, most trainers and the EAGLE authors' code all of it",
            remedy='write "partial_rotary_factor": 1.0 if the head was trained so',
        )


@rule("window", "the head's attention window, which some runtimes keep and others pass over")
def window(look: Look) -> Iterator[Found]:
    try:
        size, _ = read_window(look.head.layer)
    except EagleError as error:
        yield Found(
            severity="silently wrong",
            evidence=error.found,
            effect=f"{look.name} sees another part of the text than the head was trained with, or raises",
            remedy=error.remedy,
        )
        return
    told = look.head.layer.get("layer_types") is not None
    if size is None or (told and look.runtime in ("vllm", "speculators")):
        return
    yield Found(
        severity="silently wrong",
        evidence=f"an attention window of {size} positions",
        effect=f"{look.name} passes over sliding_window"
        + (" where layer_types is missing" if look.runtime in ("vllm", "speculators") else "")
        + ": behind longer texts the head drafts otherwise than it was trained",
        remedy=f'write "layer_types": ["{SLIDING}"]'
        if look.runtime in ("vllm", "speculators")
        else "serve it with vLLM, or train it without a window"
        + (
            f" (--speculative-draft-window-size {size} is close: it counts the tree apart)"
            if look.runtime == "sglang"
            else ""
        ),
    )


@rule("rope-scaling", "a scaling that the runtime computes otherwise", runtimes=("reference",))
def rope_scaling(look: Look) -> Iterator[Found]:
    scaling = look.head.layer.get("rope_scaling")
    if scaling is None:
        return
    known = (
        isinstance(scaling, dict) and set(scaling) == {"type", "factor"} and scaling["type"] in ("linear", "dynamic")
    )
    factor = scaling["factor"] if known else None
    if not (isinstance(factor, float) and factor > 1):
        yield Found(
            severity="breaks",
            evidence=f"rope_scaling is {scaling}",
            effect='its config class takes exactly a "type", linear or dynamic, and a "factor", a float above 1',
            remedy=_OTHER_RUNTIME,
        )
    elif look.head.theta not in (None, DEFAULT_THETA):
        yield Found(
            severity="silently wrong",
            evidence=f"rope_scaling is {scaling}, theta {look.head.theta:g}",
            effect=f"{look.name} rotates with {DEFAULT_THETA:g} wherever there is a scaling",
            remedy=_OTHER_RUNTIME,
        )


@rule("positions", "room for the target's context")
def positions(look: Look) -> Iterator[Found]:
    got = look.head.whole("max_position_embeddings")
    longest = None if look.target is None else look.target.max_positions
    if got is not None and longest is not None and got < longest and look.runtime != "reference":
        yield Found(
            severity="warning",
            evidence=f"max_position_embeddings is {got}, the target's is {longest}",
            effect=f"{look.name} drafts no further than position {got}, or refuses longer contexts",
            remedy=f"write the positions that the head was trained for, if they are more than {got}",
        )


@rule("config-bias", "the config key `bias` means other things in other places", runtimes=("vllm",))
def config_bias(look: Look) -> Iterator[Found]:
    if look.head.config.get("bias") and look.head.part("self_attn.o_proj.bias") is None:
        yield Found(
            severity="silently wrong",
            evidence="bias is true (the EAGLE authors' key for fc's bias)",
            effect="vLLM takes it for the attention's: it adds biases to q, k, v and o that no tensor fills",
            remedy='write "bias": false',
        )
