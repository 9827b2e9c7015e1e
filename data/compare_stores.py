"""What a smaller store loses: `python -m eagle.data.compare_stores A B`, A being the reference (bfloat16 or float32).

Over the supervised tokens' positions of the documents that both hold: the mean KL(softmax(logits of A) || softmax(logits
of B)), the share of positions where both have the same likeliest token, the features' largest and root-mean-square
errors beside A's own, and the bytes. Ends with one JSON line. C rows of a chunk, H hidden, V vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle.data.chunks import chunk_rows
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.progress import ProgressBar


@torch.inference_mode()
def compare(first: Path | str, second: Path | str, *, limit: int | None = None) -> dict[str, Any]:
    """The figures of the module's docstring. limit: at most this many documents, spread evenly.

    Raises EagleError when the two are not of the same target and documents.
    """
    a, b = FeatureStore.open(first), FeatureStore.open(second)
    for what, of_a, of_b in (
        ("target", (a.target_identity or {}).get("weights_sha256"), (b.target_identity or {}).get("weights_sha256")),
        ("prepared data", a.manifest.get("data"), b.manifest.get("data")),
        ("number of documents", len(a), len(b)),
    ):
        if of_a != of_b:
            raise EagleError(
                f"the stores {first} and {second} cannot be compared: their {what} differs ({of_a} and {of_b}); extract both "
                "from the same prepared data with the same target"
            )
    tokens = a.token_layers().float()
    rows = chunk_rows(tokens.vocab_size, tokens.lm_head_VH.device)
    count = len(a) if limit is None else min(limit, len(a))
    kl = agreed = positions = squared = norm = values = 0.0
    largest = 0.0
    with ProgressBar("compare", total=count, unit="documents") as bar:
        for number in (place * len(a) // count for place in range(count)):
            ours, theirs = a[number], b[number]
            assert torch.equal(ours.input_ids_T, theirs.input_ids_T)
            f_TH, g_TH = ours.features_TH.float(), theirs.features_TH.float()
            error_TH = f_TH - g_TH
            largest = max(largest, float(error_TH.abs().max()))
            squared, norm, values = (
                squared + float(error_TH.double().square().sum()),
                norm + float(f_TH.double().square().sum()),
                values + error_TH.numel(),
            )
            # p(t_i) comes from the feature before it.
            before_S = ours.loss_mask_T[1:].nonzero()[:, 0]
            for place_C in before_S.split(rows):
                p_CV = tokens.logits(f_TH[place_C]).log_softmax(dim=-1)
                q_CV = tokens.logits(g_TH[place_C]).log_softmax(dim=-1)
                kl += float((p_CV.exp() * (p_CV - q_CV)).sum(dtype=torch.float64))
                agreed += int((p_CV.argmax(dim=-1) == q_CV.argmax(dim=-1)).sum())
            positions += len(before_S)
            bar.advance(1)
    stores = [
        {
            "store": str(store.directory),
            "dtype": store.manifest.get("dtype"),
            "bytes": store.manifest["counts"]["bytes"],
        }
        for store in (a, b)
    ]
    return {
        "first": stores[0],
        "second": stores[1],
        "bytes_ratio": stores[1]["bytes"] / stores[0]["bytes"],
        "documents": count,
        "positions": int(positions),
        "mean_kl": kl / max(1.0, positions),
        "same_top_token": agreed / max(1.0, positions),
        "largest_feature_error": largest,
        "rms_feature_error": (squared / max(1.0, values)) ** 0.5,
        "rms_feature": (norm / max(1.0, values)) ** 0.5,
    }


def main(arguments: Sequence[str]) -> int:
    """`A B [--documents N]`; the exit code is 2 for a mistake that is explained."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle.data.compare_stores", description="What a smaller store loses."
    )
    parser.add_argument("first", metavar="A", help="the reference store (a folder)")
    parser.add_argument("second", metavar="B", help="the store to judge")
    parser.add_argument("--documents", type=int, metavar="N", help="compare N documents, spread evenly (default: all)")
    options = parser.parse_args(arguments)
    try:
        figures = compare(options.first, options.second, limit=options.documents)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in ("first", "second"):
        store = figures[name]
        print(f"{store['store']}: {store['dtype']}, {store['bytes'] / 1e6:,.1f} MB")
    print(
        f"{figures['positions']:,} positions: mean KL {figures['mean_kl']:.2e} nats, same likeliest token "
        f"{figures['same_top_token']:.2%}; features off by at most {figures['largest_feature_error']:.3g}, "
        f"{figures['rms_feature_error']:.3g} rms of {figures['rms_feature']:.3g}"
    )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
