"""`eagle data report`: is this data worth training on? Written to report.json in the prepared data's folder.

* off-policy score: by source, the target's mean negative log-likelihood of the answers' tokens, beside its own entropy at
  the same places. Text the target sampled itself scores about its entropy, greedy answers less, others' answers more:
  a head learns what it is shown, but drafts what the target would say.
* answers that occur twice, or nearly so; prompts that do; and what `data.max_len` cut.
* draft vocabulary: the share of answers' tokens that the most frequent 1k, 2k, 4k ... training tokens cover.

Features come from the store when there is one, else the target computes them. V vocabulary, C rows of a chunk.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.table import Table
from rich.text import Text

from eagle.config import Recipe
from eagle.data.chunks import chunk_rows
from eagle.data.documents import Documents, spread
from eagle.data.duplicates import near_duplicates, signature
from eagle.data.inspect import count_samples, printable
from eagle.data.match import require_match
from eagle.data.online import TargetDocuments
from eagle.data.prepare import load_prepared
from eagle.data.store import FeatureStore
from eagle.files import write_json
from eagle.launch import whole_models
from eagle.progress import ProgressBar, console
from eagle.target.loading import load_tokenizer
from eagle.target.target import Target

_BATCH = 1000


def report(recipe: Recipe) -> dict[str, Any]:
    """Prints the report, writes it to data/report.json and returns it.

    Raises EagleError when the data is not prepared, or the target does not fit it.
    """
    data, manifest = load_prepared(recipe.data_dir)
    source = _source(recipe, manifest["fingerprint"])
    counts = manifest["counts"]
    vocab_size = source.token_layers().vocab_size
    figures: dict[str, Any] = {
        "data": manifest["fingerprint"],
        "target": source.target_identity,
        "features_from": source.name,
        "duplicates": _duplicates(data, load_tokenizer(recipe.target, recipe.data.chat_template)),
        "truncation": {
            "max_len": manifest["max_len"],
            "samples_cut": counts["cut"],
            "turns_beyond_max_len": counts["turns_beyond_max_len"],
        },
        "draft_vocabulary": vocabulary_coverage(*_token_counts(data, vocab_size)),
        "sources": off_policy(source, [str(name) for name in data["source"]], limit=recipe.data.report_documents),
    }
    write_json(recipe.data_dir / "report.json", figures)
    for table in _tables(figures):
        console.print(table)
    console.print(f"data: the report is in {recipe.data_dir / 'report.json'}", markup=False, soft_wrap=True)
    return figures


def _source(recipe: Recipe, fingerprint: str) -> Documents:
    """The recipe's store when it is finished and of this data, else the target.

    Raises EagleError for a store of this data and another target.
    """
    if (recipe.store_dir / "manifest.json").is_file():
        store = FeatureStore.open(recipe.store_dir)
        if store.manifest.get("data") == fingerprint:
            require_match(store, recipe)
            return store.for_layers(())
    with whole_models(Accelerator()):
        return TargetDocuments(recipe, Target.from_config(recipe.target))


@torch.inference_mode()
def off_policy(documents: Documents, sources: list[str], *, limit: int | None) -> dict[str, dict[str, float]]:
    """By source: documents and tokens scored, mean NLL and entropy (nats per token), share of greedy tokens.

    sources: each document's. limit: about this many documents in all, as many of each source, spread evenly.
    """
    of_source: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(sources):
        of_source[name].append(number)
    share = len(sources) if limit is None else -(-limit // max(1, len(of_source)))
    chosen = {name: [numbers[i] for i in spread(len(numbers), share)] for name, numbers in of_source.items()}
    tokens = documents.token_layers()
    rows = chunk_rows(tokens.vocab_size, tokens.lm_head_VH.device)
    figures = {}
    with ProgressBar("report", total=sum(map(len, chosen.values())), unit="documents") as bar:
        for name, numbers in chosen.items():
            sums = np.zeros(3)
            count = 0
            for number in numbers:
                document = documents[number]
                place_S = document.loss_mask_T[1:].nonzero()[:, 0]  # p(t_i) comes from the feature before it
                for place_C in place_S.split(rows):
                    said_C1 = document.input_ids_T[place_C + 1, None]
                    features_CH = document.features_TH[place_C.to(document.features_TH.device)]
                    log_p_CV = tokens.logits(features_CH).float().log_softmax(dim=-1)
                    said_C1 = said_C1.to(log_p_CV.device)
                    sums += (
                        -float(log_p_CV.gather(1, said_C1).sum()),
                        -float((log_p_CV.exp() * log_p_CV).nan_to_num().sum()),
                        int((log_p_CV.argmax(dim=-1, keepdim=True) == said_C1).sum()),
                    )
                count += len(place_S)
                bar.advance(1)
            nll, entropy, greedy = (sums / max(1, count)).tolist()
            figures[name] = {
                "documents": len(of_source[name]),
                "documents_scored": len(numbers),
                "tokens_scored": count,
                "nll": nll,
                "entropy": entropy,
                "greedy_share": greedy,
            }
    return figures


def vocabulary_coverage(train_V: torch.Tensor, validation_V: torch.Tensor) -> dict[str, dict[str, float | None]]:
    """By draft vocabulary size (1024, 2048, ... up to V): the share of the splits' answer tokens that it covers.

    The vocabularies are the most frequent tokens of the TRAINING answers, as training would choose them. None: no tokens.
    """
    order_V = train_V.sort(descending=True, stable=True).indices
    sizes = [size for size in (2**n for n in range(10, 31)) if size < len(train_V)] + [len(train_V)]
    shares: dict[str, dict[str, float | None]] = {}
    for size in sizes:
        inside_D = order_V[:size]
        shares[str(size)] = {
            name: float(counts_V[inside_D].sum() / counts_V.sum()) if int(counts_V.sum()) else None
            for name, counts_V in (("train", train_V), ("validation", validation_V))
        }
    return shares


def _token_counts(data: Any, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [V] for training and validation: how often each token is supervised."""
    counts = {name: torch.zeros(vocab_size, dtype=torch.int64) for name in ("train", "validation")}
    for batch in data.iter(batch_size=_BATCH):
        for ids, mask, split in zip(batch["input_ids"], batch["loss_mask"], batch["split"], strict=True):
            counts[split] += torch.bincount(torch.tensor(ids)[torch.tensor(mask)], minlength=vocab_size)
    return counts["train"], counts["validation"]


def _duplicates(data: Any, tokenizer: Any) -> dict[str, int]:
    counted = count_samples(data, tokenizer)
    signatures = [
        signature(np.asarray(ids)[np.asarray(mask)])
        for batch in data.iter(batch_size=_BATCH)
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
    ]
    return {
        "samples": counted["samples"],
        "exact": counted["exact_duplicates"],
        "near_answers": int(near_duplicates(np.stack(signatures)).sum()),
        "same_prompts": counted["same_prompts"],
        "prompts_in_both_splits": counted["prompts_in_both_splits"],
    }


def _tables(figures: dict[str, Any]) -> list[Table]:
    by_source = Table(title="off-policy score, nats per answer token", title_justify="left")
    for heading in ("source", "documents", "scored", "NLL", "entropy", "greedy tokens"):
        by_source.add_column(heading, justify="left" if heading == "source" else "right")
    for name, row in figures["sources"].items():
        by_source.add_row(
            Text(printable(name)),
            f"{row['documents']:,}",
            f"{row['documents_scored']:,}",
            f"{row['nll']:.3f}",
            f"{row['entropy']:.3f}",
            f"{row['greedy_share']:.1%}",
        )
    coverage = Table(title="draft vocabulary: share of answer tokens covered", title_justify="left")
    for heading in ("size", "train", "validation"):
        coverage.add_column(heading, justify="right")
    for size, row in figures["draft_vocabulary"].items():
        shares = ("none" if row[name] is None else f"{row[name]:.2%}" for name in ("train", "validation"))
        coverage.add_row(f"{int(size):,}", *shares)
    found, cut = figures["duplicates"], figures["truncation"]
    rest = Table(title="duplicates and truncation", title_justify="left", show_header=False)
    for label, value in (
        (f"exact duplicates, of {found['samples']:,} samples", found["exact"]),
        ("answers nearly the same as an earlier one", found["near_answers"]),
        ("samples whose prompt occurred before", found["same_prompts"]),
        ("prompts in both train and validation", found["prompts_in_both_splits"]),
        (f"samples cut at max_len {cut['max_len']:,}", cut["samples_cut"]),
        ("turns beyond max_len", cut["turns_beyond_max_len"]),
    ):
        rest.add_row(label, f"{value:,}")
    return [by_source, coverage, rest]
