"""A head's folder or hub id -> config.json and tensors, unchanged. Weights of any kind: safetensors, bin, sharded."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file

from eagle.errors import EagleError
from eagle.formats.format import SIDECAR, HeadFiles
from eagle.formats.zoo.catalogue import known, zoo_folder
from eagle.reading import BROKEN, read_object, reason, shard_names, verdict

REMEDY = "fetch or save the head again"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FETCHED = ("*.json", "*.safetensors", "*.bin", "*.yaml", "*.pt")
_IGNORED = ("rotary.inv_freq", "rotary.original_inv_freq")
_IGNORED_ENDING = "rotary_emb.inv_freq"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def head_folder(path: str | Path, revision: str | None = None) -> Path:
    """The local folder of a path, a name of the zoo, or a hub id, in that order. Raises EagleError when there is none."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    shipped = zoo_folder(str(path))
    if shipped is not None:
        return shipped
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=list(_FETCHED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EagleError(
            f"head {path}: no such folder, and no such hub id can be reached; give either ({known()})"
        ) from error


def read_files(path: str | Path, *, revision: str | None = None) -> HeadFiles:
    """Reads everything. Raises EagleError, naming the file, for what is missing or damaged."""
    folder = head_folder(path, revision)
    file = folder / "config.json"
    if not file.is_file():
        raise EagleError(f"head {folder} has no config.json; expected a folder with config.json and weights")
    values = read_object(file, remedy=REMEDY)
    weights, state = _read_weights(folder)
    kept = {key: value for key, value in state.items() if key not in _IGNORED and not key.endswith(_IGNORED_ENDING)}
    sidecar = folder / SIDECAR
    return HeadFiles(
        folder=folder,
        values=values,
        state=kept,
        weights=weights,
        sidecar=read_object(sidecar, remedy=f"remove {SIDECAR}, or export the head again")
        if sidecar.is_file()
        else None,
    )


def _read_weights(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = shard_names(index, remedy=REMEDY)
            _require_one_layer(index, read_object(index, remedy=REMEDY)["weight_map"])
            return index.name, {key: value for shard in shards for key, value in _read_tensors(folder / shard).items()}
        if (folder / name).is_file():
            return name, _read_tensors(folder / name)
    raise EagleError(f"head {folder} has no weights; expected {' or '.join(_WEIGHTS)} (or their sharded form)")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        _require_one_layer(file, _opened(file, _names))  # before a whole target is read
        return dict(_opened(file, load_file))
    state = _opened(file, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise EagleError(
            f"{file} holds a {type(state).__name__}, expected a dict of tensors (a module's state_dict); {REMEDY}"
        )
    _require_one_layer(file, state)
    return dict(state)


def _opened(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except BROKEN as error:
        raise EagleError(f"{file} cannot be read ({reason(error)}): {verdict(error, REMEDY)}") from error


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _require_one_layer(file: Path, names: Iterable[str]) -> None:
    """Counted by the tensors: published configs carry their target's num_hidden_layers."""
    layers = {found[1] for found in map(_LAYER.search, names) if found is not None}
    if len(layers) > 1:
        raise EagleError(
            f"{file} has the tensors of {len(layers)} layers, an EAGLE head has 1; is this the target's own folder?"
        )
