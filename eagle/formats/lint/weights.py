"""Lint rules on tensors: which keys a runtime takes, skips or stumbles over, their shapes, dtypes and values."""

from collections.abc import Iterator

from eagle.formats.lint.rules import Found, Look, rule
from eagle.formats.sglang import QWEN2_EAGLE

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = {
    "eagle1": ("post_attention_layernorm",),
    "eagle3": ("hidden_norm", "input_layernorm", "post_attention_layernorm"),
}
_IDLE_ENDING = "rotary_emb.inv_freq"


def required(look: Look) -> set[str]:
    """Keys that the runtime has a parameter for and nothing else to fill it with."""
    version = look.head.version
    prefix = "layers.0."
    if version == "eagle3" and look.runtime != "speculators":
        prefix = look.head.layer_prefix if look.runtime in ("vllm", "sglang") else "midlayer."
    keys = {f"{prefix}{name}.weight" for name in (*_PROJECTIONS, *_MLP, *_NORMS[version])} | {"fc.weight"}
    if version == "eagle1":
        return keys
    return keys | {"norm.weight"} | (set() if _shares_lm_head(look) else {"lm_head.weight"})


def _shares_lm_head(look: Look) -> bool:
    """Whether an EAGLE-3 head without lm_head.weight drafts by the target's there: one over the whole vocabulary."""
    size = look.head.draft_vocab_size
    return (look.runtime == "vllm" and size in (None, look.head.vocab_size)) or (
        look.runtime == "sglang" and size is None
    )


def _made_biases(look: Look) -> set[str]:
    """Biases of the layer that the runtime makes parameters for, by their names without the layer's prefix."""
    layer, version = look.head.layer, look.head.version
    attention = bool(layer.get("attention_bias"))
    either = attention or bool(layer.get("bias"))
    qkv = attention if version == "eagle3" or look.runtime == "speculators" else either
    out = either
    if look.runtime == "vllm" and version == "eagle1" and "qkv_bias" in layer:
        qkv = bool(layer["qkv_bias"])
    if look.runtime == "sglang" and look.head.config.get("architectures") == [QWEN2_EAGLE]:
        qkv, out = True, False
    elif look.runtime == "reference":
        qkv, out = version == "eagle1" and bool(layer.get("qkv_bias")), False
    elif look.runtime == "sglang" and version == "eagle3":
        qkv = False
    elif look.runtime == "speculators":
        out = attention
    names = [f"{name}.bias" for name in _PROJECTIONS[:3] if qkv] + [f"{_PROJECTIONS[3]}.bias" for _ in [0] if out]
    mlp = bool(layer.get("mlp_bias")) and look.runtime in ("vllm", "speculators")
    return {*names, *(f"{name}.bias" for name in _MLP if mlp)}


def _held_biases(look: Look) -> set[str]:
    return {f"{name}.bias" for name in (*_PROJECTIONS, *_MLP) if look.head.part(f"{name}.bias") is not None}


@rule("missing-keys", "every parameter is in the file")
def missing_keys(look: Look) -> Iterator[Found]:
    missing = sorted(required(look) - look.head.tensors.keys())
    if missing:
        yield Found(
            severity="silently wrong",
            evidence=f"not in the file: {_listed(missing)}",
            effect=f"{look.name} does not check: those parameters stay as they were initialised",
            remedy=_renaming(look) or "the file is incomplete: save or fetch it again",
        )


@rule("stray-keys", "nothing in the file that the runtime has no parameter for")
def stray_keys(look: Look) -> Iterator[Found]:
    head = look.head
    known = required(look) | {"fc.bias", "embed_tokens.weight", "lm_head.weight"}
    known |= {"d2t", "t2d"} if head.version == "eagle3" else set()
    biases = {prefix + name for prefix in ("midlayer.", "layers.0.") for name in _held_biases(look)}
    stray = sorted(key for key in head.tensors.keys() - known - biases if not key.endswith(_IDLE_ENDING))
    if not stray:
        return
    remedy = f"remove them, or {look.again}"
    if head.version == "eagle1" and {"d2t", "t2d"} & set(stray):
        remedy = f"no runtime has a reduced vocabulary in an EAGLE-1 head; to draft from all tokens, {look.again}"
    yield Found(
        severity="breaks" if look.runtime == "vllm" else "warning",
        evidence=f"not a parameter there: {_listed(stray)}",
        effect="vLLM raises on a key that it has no parameter for"
        if look.runtime == "vllm"
        else f"{look.name} skips them without a word",
        remedy=_renaming(look) or remedy,
    )


def _renaming(look: Look) -> str | None:
    """The remedy where the keys are right but for their prefix."""
    wanted = next(iter(sorted(key for key in required(look) if "self_attn.q_proj" in key)))
    near = [key for key in look.head.tensors if key.endswith("self_attn.q_proj.weight")]
    if not near or near[0] == wanted:
        return None
    return (
        f"rename {near[0].removesuffix('self_attn.q_proj.weight')}* to "
        f"{wanted.removesuffix('self_attn.q_proj.weight')}* (or {look.again})"
    )


@rule("fc-bias", "the fusing projection's bias, which only some runtimes have")
def fc_bias(look: Look) -> Iterator[Found]:
    head, there = look.head, "fc.bias" in look.head.tensors
    made = {
        "vllm": False,
        "speculators": False,
        "sglang": head.version == "eagle1" or bool(head.config.get("bias")),
        "reference": head.version == "eagle1" and bool(head.config.get("bias", True)),
    }[look.runtime]
    if there and not made:
        zero = not bool(head.tensors["fc.bias"].any())
        breaks = look.runtime == "vllm"
        yield Found(
            severity="breaks" if breaks else "warning" if zero else "silently wrong",
            evidence=f"fc.bias is in the file{' (all zero)' if zero else ''}",
            effect="vLLM's fc has no bias: loading raises"
            if breaks
            else f"{look.name} makes fc without a bias and skips it",
            remedy="remove fc.bias, it is zero" if zero else "train the head without it (head.fc_bias: false)",
        )
    if made and not there:
        why = "whatever the config says" if look.runtime == "sglang" and head.version == "eagle1" else "config key bias"
        yield Found(
            severity="silently wrong",
            evidence=f"fc.bias is not in the file, and {look.name} makes one ({why}{_default(look)})",
            effect="it stays as it was initialised: random numbers are added to every feature",
            remedy="write fc.bias as zeros" if look.runtime == "sglang" else 'write "bias": false',
        )


def _default(look: Look) -> str:
    return ", true where it is missing" if look.runtime == "reference" else ""


@rule("attention-bias", "biases of the layer are in the file exactly when the runtime makes them")
def attention_bias(look: Look) -> Iterator[Found]:
    held, made = _held_biases(look), _made_biases(look)
    if held - made:
        never = look.runtime == "reference" or (look.runtime == "sglang" and look.head.version == "eagle3")
        yield Found(
            severity="breaks" if look.runtime == "vllm" else "silently wrong",
            evidence=f"in the file: {_listed(sorted(held - made))}; attention_bias is {look.head.layer.get('attention_bias')}",
            effect="vLLM has no such parameter: loading raises"
            if look.runtime == "vllm"
            else f"{look.name} has no such parameter and skips them",
            remedy=f"{look.name} has none for this head: serve it with another runtime"
            if never
            else 'write "attention_bias": true (mlp_bias for the MLP\'s)',
        )
    unfilled = sorted(made - held)
    if unfilled and not (look.runtime == "vllm" and look.head.config.get("bias")):  # config-bias says that one
        yield Found(
            severity="silently wrong",
            evidence=f"not in the file: {_listed(unfilled)}; attention_bias is {look.head.layer.get('attention_bias')}",
            effect=f"{look.name} makes them from the config, and they stay as they were initialised",
            remedy='write "attention_bias": false' if not held else "write the others as zeros",
        )


@rule("lm-head", "an EAGLE-1 head uses the target's", versions=("eagle1",))
def lm_head(look: Look) -> Iterator[Found]:
    if "lm_head.weight" in look.head.tensors:
        breaks = look.runtime == "vllm"
        yield Found(
            severity="breaks" if breaks else "warning",
            evidence="lm_head.weight is in the file",
            effect="vLLM's EAGLE-1 head has none when it is loaded: loading raises"
            if breaks
            else f"{look.name} drafts with the target's LM head and skips it",
            remedy="remove lm_head.weight",
        )


@rule("embed-tokens", "the embedding is the target's")
def embed_tokens(look: Look) -> Iterator[Found]:
    embeddings = look.head.tensors.get("embed_tokens.weight")
    if embeddings is None:
        if look.runtime == "speculators":
            yield Found(
                severity="warning",
                evidence="embed_tokens.weight is not in the file",
                effect="vLLM shares the target's; speculators fetches it from the verifier, which must then be at hand",
                remedy="write the target's embedding, or " + look.again,
            )
        return
    own = None if look.target is None else look.target.embedding_VH
    if own is None:
        return
    if embeddings.shape != own.shape:
        difference = f"{tuple(embeddings.shape)} instead of {tuple(own.shape)}"
    else:
        far = (embeddings.float() - own.float()).abs().max()
        if float(far) <= 1e-2 * float(own.float().abs().max()):
            return
        difference = f"it differs by up to {float(far):.3g}"
    evidence = f"embed_tokens.weight is not that of target {look.target.name if look.target else ''}: {difference}"
    if look.runtime in ("vllm", "speculators") and embeddings.shape == own.shape:
        yield Found(
            severity="warning",
            evidence=evidence,
            effect="vLLM keeps the head's own beside the target's: right for a head trained with an embedding of its own, wrong "
            "for one of another model",
            remedy="check that the target is the one that the head was trained for",
        )
        return
    yield Found(
        severity="silently wrong",
        evidence=evidence,
        effect=f"the head was trained for another model, or with an embedding of its own, which {look.name} replaces by the "
        "target's",
        remedy="give the head its own target; one with an embedding of its own is served by vLLM",
    )


@rule("shapes", "the tensors have the shapes that config.json says")
def shapes(look: Look) -> Iterator[Found]:
    expected = _expected_shapes(look)
    wrong = []
    for key, shape in expected.items():
        tensor = look.head.tensors.get(key)
        tensor = look.head.part(key) if tensor is None else tensor
        if tensor is not None and tuple(tensor.shape) != shape:
            wrong.append(f"{key} is {list(tensor.shape)} instead of {list(shape)}")
    if wrong:
        yield Found(
            severity="breaks",
            evidence="; ".join(wrong[:4]) + (f"; {len(wrong) - 4} more" if len(wrong) > 4 else ""),
            effect=f"{look.name} builds the layer from config.json: loading raises on the shape",
            remedy="take config.json and weights from one source (a head_dim other than hidden_size / heads must be written)",
        )


def _expected_shapes(look: Look) -> dict[str, tuple[int, ...]]:
    head = look.head
    hidden, heads, mlp = (head.whole(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    if not hidden or not heads or not mlp:
        return {}
    kv = head.whole("num_key_value_heads") or heads
    size = head.whole("head_dim") or hidden // heads
    if look.runtime == "reference":
        size = hidden // heads  # whatever config.json says
    width = hidden if head.version == "eagle1" else 2 * hidden
    expected = {
        "self_attn.q_proj.weight": (heads * size, width),
        "self_attn.k_proj.weight": (kv * size, width),
        "self_attn.v_proj.weight": (kv * size, width),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        **{f"{name}.weight": (hidden,) for name in _NORMS[head.version]},
    }
    if head.version == "eagle1":
        return {**expected, "fc.weight": (hidden, 2 * hidden)}
    wide = head.feature_size or hidden
    fc = head.tensors.get("fc.weight")
    states = fc.shape[1] // wide if fc is not None and fc.ndim == 2 and fc.shape[1] % wide == 0 else 3
    lm_head = head.tensors.get("lm_head.weight")
    rows = (
        lm_head.shape[0] if lm_head is not None and lm_head.ndim == 2 else head.draft_vocab_size or head.vocab_size or 0
    )
    return {
        **expected,
        "fc.weight": (hidden, states * wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
    }


@rule("config-numbers", "the layer's sizes are in config.json")
def config_numbers(look: Look) -> Iterator[Found]:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    missing = [key for key in keys if not isinstance(look.head.layer.get(key), (int, float))]
    if missing:
        yield Found(
            severity="breaks" if missing != ["rms_norm_eps"] else "silently wrong",
            evidence=f"config.json lacks {', '.join(missing)}",
            effect=f"{look.name} takes Llama's defaults (hidden size 4096, 32 heads, epsilon 1e-6)",
            remedy=look.again,
        )


@rule("hidden-size", "features of the target fit")
def hidden_size(look: Look) -> Iterator[Found]:
    head, target = look.head, look.target
    got = head.feature_size
    if target is not None and got is not None and got != target.hidden_size:
        yield Found(
            severity="breaks",
            evidence=f"the head is for features of width {got}, target {target.name} has {target.hidden_size}",
            effect="fc cannot take the target's states",
            remedy="give the head its own target, or train one for this target",
        )


@rule("values", "weights are finite, and not all zero")
def values(look: Look) -> Iterator[Found]:
    real = {key: tensor for key, tensor in look.head.tensors.items() if tensor.is_floating_point() and tensor.numel()}
    broken = [key for key, tensor in real.items() if not bool(tensor.float().isfinite().all())]
    if broken:
        first = real[broken[0]].float()
        yield Found(
            severity="silently wrong",
            evidence=f"{int((~first.isfinite()).sum())} values of {broken[0]} are NaN or infinite{_more(broken)}",
            effect="every draft is the same token, or none: acceptance falls to nothing without an error",
            remedy="take an earlier checkpoint; a cast to float16 overflows above 65504",
        )
    zero = [key for key, tensor in real.items() if not key.endswith(".bias") and not bool(tensor.any())]
    if zero:
        yield Found(
            severity="silently wrong",
            evidence=f"{zero[0]} is all zero{_more(zero)}",
            effect="that part of the head does nothing: it was never filled or gathered",
            remedy="save the head again (under FSDP and ZeRO-3: gather the weights first)",
        )


def _more(keys: list[str]) -> str:
    return f", and {len(keys) - 1} more tensors" if len(keys) > 1 else ""


@rule("dtype", "weights are of one floating dtype, the config's")
def dtype(look: Look) -> Iterator[Found]:
    weights = {key: tensor for key, tensor in look.head.tensors.items() if key not in ("d2t", "t2d")}
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    usual = {"float32", "bfloat16", "float16"}
    odd = [key for key, tensor in weights.items() if str(tensor.dtype).removeprefix("torch.") not in usual]
    if odd:
        yield Found(
            severity="breaks" if not weights[odd[0]].is_floating_point() else "warning",
            evidence=f"{_listed(odd)}: {str(weights[odd[0]].dtype).removeprefix('torch.')}",
            effect=f"{look.name} casts it to the model's dtype, without the scales that a quantised weight has",
            remedy="write the weights as bfloat16, float16 or float32",
        )
    elif len(kinds) > 1:
        yield Found(
            severity="warning",
            evidence=f"dtypes {', '.join(kinds)} side by side",
            effect=f"{look.name} casts all of them to one",
            remedy="write all weights in one dtype",
        )
    said = look.head.config.get("dtype", look.head.config.get("torch_dtype"))
    if isinstance(said, str) and len(kinds) == 1 and kinds[0] in usual and said not in (kinds[0], "auto"):
        yield Found(
            severity="warning",
            evidence=f"config.json says {said}, the weights are {kinds[0]}",
            effect=f"{look.name} casts them to {said}",
            remedy=f'write "torch_dtype": "{kinds[0]}"',
        )


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
