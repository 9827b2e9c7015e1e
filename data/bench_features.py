"""What extraction costs beside the bare target forward: `python -m eagle.data.bench_features --config RECIPE`.

Both do the same batches of the recipe's prepared data: the bare forward throws its features away, the extraction copies
them to host memory and writes shards (to a temporary folder beside the store). Interleaved rounds, medians; the ceiling
is 1.0, the aim at least 0.95. Ends with one JSON line.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from eagle.config import read_recipe
from eagle.data.features import config_and_overrides, write_shards
from eagle.data.layers import layers_to_store
from eagle.data.prepare import load_prepared
from eagle.data.shards import plan_batches, plan_shards
from eagle.quiet import quieten
from eagle.target.target import Target

TOKENS, ROUNDS = 4096, 5


def main(arguments: Sequence[str]) -> None:
    quieten()
    recipe = read_recipe(*config_and_overrides(arguments))
    target = Target.from_config(recipe.target)
    data, _ = load_prepared(recipe.data_dir)
    lengths = np.asarray(data.with_format("numpy")["length"][:], dtype=np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), TOKENS)) + 1]
    # At least three shards, so that writing one while computing the next is part of what is measured.
    plan = plan_shards(lengths, ["train"] * len(lengths), min(recipe.features.shard_tokens, TOKENS // 3))
    tokens = sum(shard.tokens for shard in plan)

    def bare() -> None:
        for shard in plan:
            rows = data.select(shard.documents_D)["input_ids"][:]
            for batch_B in plan_batches(shard.lengths_D, recipe.features.batch_tokens):
                ids_BT = torch.zeros(len(batch_B), int(shard.lengths_D[batch_B].max()), dtype=torch.int64)
                for b, document in enumerate(batch_B):
                    ids_BT[b, : len(rows[document])] = torch.tensor(rows[document])
                target.features(ids_BT.to(target.device), layers_to_store(recipe, target.num_layers))
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    def extraction() -> None:
        recipe.store_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=recipe.store_dir.parent) as folder:
            write_shards(recipe, target, Path(folder), plan, quiet=True)

    seconds: dict[str, list[float]] = {"bare": [], "extraction": []}
    runs: dict[str, Callable[[], None]] = {"bare": bare, "extraction": extraction}
    for turn in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        spread = f"{tokens / max(times):,.0f} - {tokens / min(times):,.0f}"
        print(f"{name:<11} {rates[name]:>8,.0f} tokens/s ({spread})")
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine()
    result = {
        "benchmark": "extraction",
        "target": target.name,
        "device": f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "tokens": tokens,
        "bare_tokens_per_s": round(rates["bare"], 1),
        "extraction_tokens_per_s": round(rates["extraction"], 1),
        "ratio": round(rates["extraction"] / rates["bare"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
