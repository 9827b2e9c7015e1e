"""Extraction: the target's features of every prepared document, into a feature store.

The work is planned up front from the documents' lengths: shards of at most `features.shard_tokens` tokens, in data set
order, training and validation apart. Shard s is process s % world's. Inside a shard, documents of similar length share
a target forward; a background thread writes the shard while the next one is computed. A shard's bytes depend on nothing
but the plan, so a killed and resumed extraction, or one by several processes, gives the same files.

Also a program: `accelerate launch -m eagle.data.features --config RECIPE [--features.dtype float32 ...]`.
"""

import errno
import hashlib
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate import Accelerator

from eagle.config import Recipe, as_dict, read_recipe
from eagle.data.devices import own_device
from eagle.data.layers import layers_to_store, readable_size, token_bytes
from eagle.data.prepare import load_prepared
from eagle.data.shards import ShardBuffer, ShardPlan, plan_shards
from eagle.data.store import (
    FORMAT,
    REBUILD,
    STAMP,
    TOKEN_LAYERS,
    finished_shard,
    read_json,
    require_same,
    shard_path,
    write_manifest,
)
from eagle.data.target_files import weights_stamp
from eagle.errors import EagleError
from eagle.exits import exit_code
from eagle.files import atomic_path, write_json
from eagle.heads.eagle1 import EagleHeadConfig
from eagle.launch import check_world, whole_models
from eagle.progress import ProgressBar, console
from eagle.quiet import quieten
from eagle.target.target import Target, load_tokenizer, tokenizer_identity


def extract(recipe: Recipe, accelerator: Accelerator | None = None) -> dict[str, Any]:
    """Writes the recipe's feature store, resuming what an earlier run finished, and returns its manifest.

    Every process of an accelerate launch calls this; each writes its own shards and the first one the manifest.
    Raises EagleError when the prepared data does not fit the target's tokenizer or positions, the folder holds another
    extraction's shards, the disk is or will be too small, or a feature is not finite.
    """
    state = accelerator or Accelerator()
    check_world(state)
    with whole_models(state):
        target = Target.from_config(own_device(recipe.target, state))
    data, data_manifest = load_prepared(recipe.data_dir)
    lengths = np.asarray(data.with_format("numpy")["length"][:], dtype=np.int64)
    require_layers(layers_to_store(recipe, target.num_layers), target, where="features.aux_layers")
    shards = plan_shards(lengths, list(data["split"]), recipe.features.shard_tokens)
    identity = _identity(recipe, target, data_manifest, shards)
    require_fitting(recipe, target, data_manifest, lengths)
    directory = recipe.store_dir
    if (directory / "plan.json").is_file():
        begun = read_json(directory / "plan.json")
        require_same(begun, identity, what=f"the extraction begun in {directory}", remedy=REBUILD)
    finished = [shard.number for shard in shards if finished_shard(shard_path(directory, shard.number))]
    whole = len(finished) == len(shards) and (directory / TOKEN_LAYERS).is_file()
    if (directory / "manifest.json").is_file() and whole:
        manifest = read_json(directory / "manifest.json")
        if state.is_main_process:
            _say(f"features: {directory} is complete ({_summary(manifest)})")
        return manifest

    todo = [shard for shard in shards if shard.number not in set(finished)]
    if state.is_main_process:
        _require_disk(directory, target, recipe, tokens=sum(s.tokens for s in todo), total=int(lengths.sum()))
        _remove_leftovers(directory)
        write_json(directory / "plan.json", identity)
        with atomic_path(directory / "recipe.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(as_dict(recipe), sort_keys=False), encoding="utf-8")
        target.tokens.save(directory)
    state.wait_for_everyone()
    start = time.monotonic()
    try:
        mine = [shard for shard in shards if shard.number % state.num_processes == state.process_index]
        write_shards(recipe, target, directory, mine, quiet=not state.is_main_process)
        state.wait_for_everyone()
        if state.is_main_process:
            sidecars = [finished_shard(shard_path(directory, shard.number)) for shard in shards]
            missing = [number for number, sidecar in enumerate(sidecars) if sidecar is None]
            if missing:
                raise EagleError(
                    f"{len(missing)} of {len(shards)} shards are not in {directory} (first: {missing[0]}); all "
                    "processes must write to one shared folder. Run the same command again: it writes what is missing"
                )
            stamp = weights_stamp(recipe.target)
            made_from = identity if stamp is None else {**identity, STAMP: stamp}
            write_manifest(directory, identity=made_from, shards=[sidecar for sidecar in sidecars if sidecar])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EagleError(_disk_full(directory, shards, error)) from error
    state.wait_for_everyone()
    manifest = read_json(directory / "manifest.json")
    if state.is_main_process:
        rate = sum(shard.tokens for shard in todo) / (time.monotonic() - start)
        _say(f"features: {directory} holds {_summary(manifest)}; {rate:,.0f} tokens/s")
    return manifest


def write_shards(
    recipe: Recipe, target: Target, directory: Path, shards: Sequence[ShardPlan], *, quiet: bool = False
) -> None:
    """Computes and writes those of `shards` that are not there yet; quiet: without a progress bar."""
    todo = [shard for shard in shards if finished_shard(shard_path(directory, shard.number)) is None]
    capacity = max((shard.tokens for shard in todo), default=0)
    buffers = [ShardBuffer(recipe, target, capacity) for _ in range(min(2, len(todo)))]
    total = sum(shard.tokens for shard in shards)
    bar = ProgressBar("features", total=total, done=total - sum(s.tokens for s in todo), unit="tokens", quiet=quiet)
    writing: Future[Any] | None = None
    with ThreadPoolExecutor(1, "shard-writer") as pool, bar:
        for turn, shard in enumerate(todo):
            buffer = buffers[turn % 2]  # free: the write of two turns ago was waited for before the last one began
            for tokens in buffer.fill(target, shard, batch_tokens=recipe.features.batch_tokens):
                bar.advance(tokens)
                if writing is not None and writing.done():
                    writing.result()  # a full disk stops the run now, not a shard later
            if writing is not None:
                writing.result()
            writing = pool.submit(buffer.write, shard_path(directory, shard.number), shard)
        if writing is not None:
            writing.result()


# --- what an extraction is made from, and whether it can be made ---------------------------------------------------


def _identity(
    recipe: Recipe, target: Target, data_manifest: dict[str, Any], shards: Sequence[ShardPlan]
) -> dict[str, Any]:
    """What decides the store's bytes: the fields two runs must share to write to the same folder."""
    plan = hashlib.sha256()
    for shard in shards:
        plan.update(shard.split.encode())
        plan.update(shard.documents_D.astype("<i8").tobytes() + shard.lengths_D.astype("<i8").tobytes())
    return {
        "format": FORMAT,
        "target": target.identity(),
        "tokenizer": data_manifest["tokenizer"],
        "data": data_manifest["fingerprint"],
        "layers": list(layers_to_store(recipe, target.num_layers)),
        "dtype": recipe.features.dtype,
        "hidden_size": target.hidden_size,
        "arguments": {
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "batch_tokens": recipe.features.batch_tokens,
            "shard_tokens": recipe.features.shard_tokens,
        },
        "plan_sha256": plan.hexdigest(),
    }


def require_layers(layers: Sequence[int], target: Target, *, where: str) -> None:
    """Raises EagleError naming those of `layers` that the target has no hidden states after."""
    wrong = [layer for layer in layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise EagleError(f"{where} has {wrong}; {target.name} has hidden states 0 .. {target.num_layers - 1}")


def require_fitting(recipe: Recipe, target: Target, data_manifest: dict[str, Any], lengths: np.ndarray) -> None:
    """Refuses targets that no new head can be made for, prepared data of another tokenizer or template, and documents beyond
    the target's positions."""
    if recipe.head.init_from is None:
        EagleHeadConfig.for_target(target.config)
    if len(lengths) == 0:
        raise EagleError(f"the prepared data in {recipe.data_dir} has no documents; see `eagle data inspect RECIPE`")
    tokenizer = tokenizer_identity(load_tokenizer(recipe.target, recipe.data.chat_template))
    again = "prepare it for this target: `eagle data prepare RECIPE`"
    require_same(data_manifest["tokenizer"], tokenizer, what=f"the prepared data in {recipe.data_dir}", remedy=again)
    if target.max_positions is not None and lengths.max() > target.max_positions:
        raise EagleError(
            f"the longest document has {lengths.max()} tokens, the target {target.name} has {target.max_positions} "
            f"positions; set data.max_len to {target.max_positions} and run `eagle data prepare RECIPE`"
        )


def _remove_leftovers(directory: Path) -> None:
    """The half-written files of a run that was killed."""
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink()


def _require_disk(directory: Path, target: Target, recipe: Recipe, *, tokens: int, total: int) -> None:
    """Prints what the run will write and refuses one that cannot fit."""
    directory.mkdir(parents=True, exist_ok=True)
    blocks = 1 + len(layers_to_store(recipe, target.num_layers))
    width, per_token = target.hidden_size * blocks, token_bytes(target.hidden_size, blocks, recipe.features.dtype)
    free, needed = shutil.disk_usage(directory).free, tokens * per_token
    left = "" if tokens == total else f", {tokens:,} of them ({readable_size(needed)}) still to do"
    _say(
        f"features: {total:,} tokens x {width} in {recipe.features.dtype} = {readable_size(total * per_token)}{left}; "
        f"{readable_size(free)} free in {directory}"
    )
    if needed > free:
        raise EagleError(
            f"the features need {readable_size(needed)}, the disk of {directory} has {readable_size(free)} free; free some "
            "space, set output_dir to another disk, store them in fewer bytes (features.dtype float8) or not at all "
            "(train.features online), or take less data (data.max_samples, data.max_supervised_tokens)"
        )


def _disk_full(directory: Path, shards: Sequence[ShardPlan], error: OSError) -> str:
    missing = [shard for shard in shards if finished_shard(shard_path(directory, shard.number)) is None]
    saved = sum(shard.tokens for shard in shards) - sum(shard.tokens for shard in missing)
    return (
        f"the disk of {directory} is full ({error.strerror}): {len(shards) - len(missing)} of {len(shards)} shards "
        f"({saved:,} tokens) are saved, {len(missing)} remain ({sum(shard.tokens for shard in missing):,} tokens); "
        "free some space and run the same command again, it goes on from there"
    )


def _summary(manifest: dict[str, Any]) -> str:
    counts = manifest["counts"]
    return (
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens in {len(manifest['shards'])} shards, "
        f"{readable_size(counts['bytes'])}"
    )


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def main(arguments: Sequence[str]) -> int:
    """`--config RECIPE [--section.key value ...]`; returns the exit code: 2 for a mistake the user can mend."""
    quieten()
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    accelerator = Accelerator()
    try:
        extract(read_recipe(*config_and_overrides(arguments)), accelerator)
    finally:
        accelerator.end_training()  # leaves the process group
    return 0


def config_and_overrides(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Splits `--config RECIPE` (or `--config=RECIPE`) from the overrides."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        if argument == "--config" and place + 1 < len(rest):
            return rest[place + 1], rest[:place] + rest[place + 2 :]
        if argument.startswith("--config="):
            return argument.removeprefix("--config="), rest[:place] + rest[place + 1 :]
    raise EagleError("no recipe given; say --config RECIPE.yaml")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
