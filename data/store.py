"""The feature store: shards of documents with the target's features, a manifest, and the reader that training uses.

    manifest.json                what the store holds, what it was made from and its files' hashes (`write_manifest`)
    shard-00000.safetensors      some documents of one split, concatenated in data set order
    shard-00000.json             that shard's sha256, bytes, tokens, documents and split: written after it, so that it
                                 exists only where the shard is whole; an extraction resumes by these
    token_layers.*               the target's embedding and LM head, so that training needs no target in memory

Tensors of a shard of D documents and S = sum of their lengths tokens, with H the target's hidden size and
A = len(layers) * H:

    input_ids int32 [S] · loss_mask bool [S] · features bf16, fp32 or e4m3 [S, H] · aux (optional) [S, A]
    with e4m3: features_scale fp32 [S, 1] · aux_scale fp32 [S, len(layers)] (eagle/data/float8.py)
    offsets int64 [D + 1] (document d is tokens offsets[d] .. offsets[d + 1]) · documents int64 [D], their numbers

The documents' ids are in the file's metadata. A document's number is its row in the prepared data set.
"""

import copy
import hashlib
import json
import platform
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eagle.data import float8
from eagle.data.documents import Document as Document
from eagle.data.documents import only_layers
from eagle.data.identity import without_name
from eagle.errors import EagleError
from eagle.files import atomic_path, sha256_file, sha256_text, write_json
from eagle.target.token_layers import TokenLayers

FORMAT = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": float8.DTYPE}
REBUILD = "delete the folder (or choose another output_dir) and run `eagle features RECIPE`"
TOKEN_LAYERS = "token_layers.safetensors"
STAMP = "target_weights_stamp"
"""The manifest's field with `weights_stamp` of the target (eagle/data/target_files.py), where it has files."""
_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


# --- writing -----------------------------------------------------------------------------------------------------


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def write_shard(
    path: Path, *, tensors: Mapping[str, torch.Tensor], lengths: Sequence[int], ids: Sequence[str], split: str
) -> dict[str, Any]:
    """Writes one shard and then its sidecar, each atomically, and returns the sidecar.

    `tensors`: input_ids, loss_mask, features, documents and perhaps aux and scales, as above; offsets: from `lengths`.
    The safetensors format (a length, a JSON header, the bytes) is written here rather than by `save_file`: the hash is
    taken on the way, a full disk stays an OSError with its errno, and the same shard always gives the same bytes.
    """
    offsets_D1 = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), dim=0, out=offsets_D1[1:])
    tensors = {**tensors, "offsets": offsets_D1}
    assert len(ids) == len(lengths)
    assert tensors["input_ids"].shape[0] == offsets_D1[-1]
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"ids": json.dumps(list(ids), ensure_ascii=False)}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        kind = _NAMES[tensors[name].dtype]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    head = json.dumps(header, ensure_ascii=False).encode("utf-8")
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        for block in (len(head).to_bytes(8, "little"), head):
            digest.update(block)
            file.write(block)
        for name in names:
            block_bytes = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(block_bytes)
            file.write(block_bytes)
    sidecar = {
        "file": path.name,
        "sha256": digest.hexdigest(),
        "bytes": 8 + len(head) + end,
        "tokens": int(offsets_D1[-1]),
        "documents": len(ids),
        "split": split,
    }
    write_json(path.with_suffix(".json"), sidecar)
    return sidecar


def finished_shard(path: Path) -> dict[str, Any] | None:
    """The sidecar of a shard that was written whole (sidecar there, size as it says), else None."""
    try:
        sidecar: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        whole = path.stat().st_size == sidecar["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sidecar if whole else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of ours. Raises EagleError when it does not hold an object."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EagleError(f"{path} is not valid JSON ({error}); {REBUILD}") from error
    if not isinstance(value, dict):
        raise EagleError(f"{path} holds {type(value).__name__}, expected an object; {REBUILD}")
    return value


def write_manifest(
    directory: Path, *, identity: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes manifest.json from what the store was made from (`identity`) and the shards' sidecars; returns it."""
    counts: dict[str, Any] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    for split in sorted({shard["split"] for shard in shards}):
        counts[split] = sum(shard["documents"] for shard in shards if shard["split"] == split)
    packages = ("eagle-draft-toolkit", "torch", "transformers", "datasets", "safetensors")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    manifest = {**identity, "counts": counts, "versions": versions, "shards": [dict(shard) for shard in shards]}
    layers = directory / TOKEN_LAYERS
    if layers.is_file():
        manifest["token_layers"] = {"file": layers.name, "sha256": sha256_file(layers), "bytes": layers.stat().st_size}
    write_json(directory / "manifest.json", manifest)
    return manifest


# --- reading -----------------------------------------------------------------------------------------------------


def require_same(got: Mapping[str, Any], expected: Mapping[str, Any], *, what: str, remedy: str) -> None:
    """Raises EagleError naming every field of `expected` (nested ones by dotted path) that `got` has otherwise.

    target.model, a path or hub id, may differ: the weights' hash says whether it is the same target after a move.
    """
    differing = list(_differences(got, expected))
    if differing:
        lines = "; ".join(f"{key} is {have!r}, expected {want!r}" for key, have, want in differing)
        raise EagleError(f"{what} does not match: {lines}; {remedy}")


def _differences(
    got: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key, want in expected.items():
        have = got.get(key)
        if isinstance(want, Mapping) and isinstance(have, Mapping):
            yield from _differences(have, want, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "target.model" and have != (list(want) if isinstance(want, tuple) else want):
            yield f"{prefix}{key}", have, want


class FeatureStore:
    """Reads a store's documents lazily, by slice: memory holds an index of 24 bytes a document and a few open files.

    Picklable (open files stay behind), so it can go to a DataLoader's workers. Not for several threads at once.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], *, open_shards: int = 8):
        self.directory, self.manifest = directory, manifest
        self.aux_layers: tuple[int, ...] = tuple(manifest["layers"])
        self._open_shards = open_shards
        self._handles: OrderedDict[int, tuple[Any, list[str]]] = OrderedDict()
        count = manifest["counts"]["documents"]
        self.lengths = np.full(count, -1, dtype=np.int64)
        """int64 [documents]: tokens of each document"""
        self._shard_of, self._start_of = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int64)
        self._row_of = np.zeros(count, dtype=np.int32)
        for number in range(len(manifest["shards"])):
            handle, _ = self._open(number)
            offsets_D1, documents_D = handle.get_tensor("offsets").numpy(), handle.get_tensor("documents").numpy()
            self.lengths[documents_D] = np.diff(offsets_D1)
            self._shard_of[documents_D], self._start_of[documents_D] = number, offsets_D1[:-1]
            self._row_of[documents_D] = np.arange(len(documents_D))
        assert (self.lengths >= 0).all(), "every document is in a shard"

    @classmethod
    def open(cls, directory: str | Path, expect: Mapping[str, Any] | None = None) -> "FeatureStore":
        """Opens a finished store.

        expect: fields the manifest must have, nested as there ({"target": target.identity(), "layers": [], ...}).
        Raises EagleError when there is no finished store, a field differs, or a shard is missing, torn or of another
        size than recorded.
        """
        directory = Path(directory)
        path = directory / "manifest.json"
        if not path.is_file():
            begun = (directory / "plan.json").is_file()
            state = "its extraction did not end" if begun else "there is no feature store here"
            raise EagleError(f"{path} is missing: {state}; run `eagle features RECIPE`" + " again, it resumes" * begun)
        manifest = read_json(path)
        if manifest.get("format") != FORMAT:
            raise EagleError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}; {REBUILD}")
        require_same(manifest, expect or {}, what=f"the feature store {directory}", remedy=REBUILD)
        return cls(directory, manifest)

    @property
    def hidden_size(self) -> int:
        return int(self.manifest["hidden_size"])

    @property
    def name(self) -> str:
        return f"the feature store {self.directory}"

    @property
    def remedy(self) -> str:
        return "extract them again with `eagle features RECIPE`"

    @property
    def target_identity(self) -> dict[str, Any] | None:
        return self.manifest.get("target")

    def for_layers(self, aux_layers: Sequence[int]) -> "FeatureStore":
        """The store as a head with these aux layers reads it. Raises EagleError when a layer was not extracted."""
        have = list(self.manifest["layers"])
        if not set(aux_layers) <= set(have):
            raise EagleError(
                f"{self.name} has features of {_layers(have)}, the head wants {_layers(aux_layers)}; delete the folder (or "
                "choose another output_dir) and rebuild it with `eagle features RECIPE` "
                f"--features.aux_layers {json.dumps(list(aux_layers))}"
            )
        view = copy.copy(self)
        view.aux_layers, view._handles = tuple(aux_layers), OrderedDict()
        return view

    def fingerprint(self) -> str:
        """Of the target's identity and every shard's bytes."""
        shards = [(shard["sha256"], shard["split"]) for shard in self.manifest["shards"]]
        target = without_name(self.target_identity)
        return sha256_text(json.dumps([target, shards], sort_keys=True))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, name: str) -> list[int]:
        """The numbers of the documents in split "train" or "validation", ascending."""
        shards = [number for number, shard in enumerate(self.manifest["shards"]) if shard["split"] == name]
        numbers: list[int] = np.flatnonzero(np.isin(self._shard_of, shards)).tolist()
        return numbers

    def __getitem__(self, number: int) -> Document:
        """Document `number`, read from its shard's file; the tensors are the caller's own (copies).

        Features are in the store's dtype, those of a float8 store in float32.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        handle, ids = self._open(int(self._shard_of[number]))
        start = int(self._start_of[number])
        end = start + int(self.lengths[number])

        def read(name: str) -> torch.Tensor:
            part: torch.Tensor = handle.get_slice(name)[start:end]
            return part.clone()  # off the file's mapping

        def states(name: str) -> torch.Tensor:
            scaled = self.manifest.get("dtype") == "float8"
            return float8.dequantise(read(name), read(f"{name}_scale")) if scaled else read(name)

        return Document(
            id=ids[self._row_of[number]],
            input_ids_T=read("input_ids").to(torch.int64),
            loss_mask_T=read("loss_mask"),
            features_TH=states("features"),
            aux_TA=only_layers(states("aux"), self.manifest["layers"], self.aux_layers) if self.aux_layers else None,
        )

    def read(self, numbers: Sequence[int]) -> list[Document]:
        """Several documents, one read after the other."""
        return [self[number] for number in numbers]

    def ids_and_mask(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 [T] and loss_mask bool [T] of a document, without reading its features."""
        handle, _ = self._open(int(self._shard_of[number]))
        start = int(self._start_of[number])
        end = start + int(self.lengths[number])
        ids_T, mask_T = handle.get_slice("input_ids")[start:end], handle.get_slice("loss_mask")[start:end]
        return ids_T.to(torch.int64), mask_T.clone()

    def token_layers(self) -> TokenLayers:
        """The target's frozen embedding and LM head."""
        return TokenLayers.load(self.directory)

    def recorded_files(self) -> list[dict[str, Any]]:
        """{"file", "sha256", "bytes"} of the shards and, where they are recorded, the token layers."""
        layers = self.manifest.get("token_layers")
        return [*self.manifest["shards"], *([] if layers is None else [layers])]

    def verify(self) -> None:
        """Reads every recorded file and raises EagleError for the first whose SHA-256 is not the recorded one."""
        for file in self.recorded_files():
            if (reason := self.difference(file)) is not None:
                raise self.damaged(file["file"], reason)

    def difference(self, file: Mapping[str, Any]) -> str | None:
        """Reads a recorded file: None where its SHA-256 is the recorded one, else what is wrong."""
        path = self.directory / file["file"]
        if not path.is_file():
            return "it is missing"
        digest = sha256_file(path)
        return None if digest == file["sha256"] else f"its SHA-256 is {digest}, the manifest says {file['sha256']}"

    def _open(self, number: int) -> tuple[Any, list[str]]:
        """The shard's open file and its documents' ids, from the few kept open."""
        if number in self._handles:
            self._handles.move_to_end(number)
            return self._handles[number]
        shard = self.manifest["shards"][number]
        path = self.directory / shard["file"]
        try:
            size = path.stat().st_size
            if size != shard["bytes"]:
                raise self.damaged(shard["file"], f"it has {size} bytes, the manifest says {shard['bytes']}")
            handle = safe_open(path, framework="pt")
            entry = handle, json.loads(handle.metadata()["ids"])
        except (OSError, SafetensorError, TypeError, KeyError) as error:
            raise self.damaged(shard["file"], str(error)) from error
        self._handles[number] = entry
        if len(self._handles) > self._open_shards:
            self._handles.popitem(last=False)
        return entry

    def damaged(self, file: str, reason: str) -> EagleError:
        """The error to raise for a file of the store."""
        kind = "shard" if file.startswith("shard-") else "file"
        return EagleError(
            f"{kind} {file} of the feature store {self.directory} is damaged: {reason}; delete it and run "
            "`eagle features RECIPE` again, which writes only what is missing"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": OrderedDict()}


def _layers(layers: Sequence[int]) -> str:
    """ "no aux layer", "1 aux layer (2)", "3 aux layers (2, 16, 29)"."""
    if not layers:
        return "no aux layer"
    return f"{len(layers)} aux layer{'s' * (len(layers) > 1)} ({', '.join(map(str, layers))})"
