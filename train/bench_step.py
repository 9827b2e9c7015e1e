"""Peak memory and speed of a training step: `python -m eagle.train.bench_step --tokens 512 1024 2048 --steps 5`.

Methods, on one random row of T tokens and a head of the given shape (default: SmolLM2-135M's), AdamW included:

    plain          softmax over an explicit [T, k T] mask at each unroll step; full [T, V] logits, kept for the backward
    ours           what training does: attention merged by log-sum-exp, losses by chunks (eagle/train/step.py); with a reduced
                   vocabulary, in an epoch after the first (eagle/train/draftable.py)
    checkpointed   the same with each unroll step computed a second time in the backward

Each case runs in a process of its own, so that no peak hides another's. Memory is what the step adds to the head, the
target's layers and the batch: on the CPU the growth of resident memory, on a GPU that of the allocator's peak. A ratio to
the plain step is printed only where losses and gradients agree. Ends with one JSON line.
"""

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from eagle.environment import git_commit, hardware, peak_memory
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.target.token_layers import TokenLayers
from eagle.train.batches import Batch
from eagle.train.draftable import Draftable
from eagle.train.objective import PUBLISHED, Objective
from eagle.train.step import batch_losses
from eagle.train.unroll import ahead

METHODS = ("plain", "ours", "checkpointed")
AGREE = 1e-3
"""Relative difference of losses and gradient norms above which methods do not compute the same (float32 sums of T * V)."""


def plain_losses(
    head: DraftHead, *, batch: Batch, objective: Objective, tokens: DraftTokens, draftable: Draftable | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch_losses` as one would write it down: explicit masks, whole logits, one document a row. The sums are zeros."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=query.device)
        mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=-1)
        scores = query @ torch.cat(keys, dim=2).mT * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return weights @ torch.cat(values, dim=2).to(weights.dtype)

    with torch.no_grad():
        logits_BTV = tokens.full.logits(batch.features_BTH).float()
        learns_BT = tokens.holds(logits_BTV.argmax(dim=-1))
        p_BTD = tokens.restrict(logits_BTV).softmax(dim=-1)
        del logits_BTV
    embeddings_BTH = tokens.full.embed(batch.ids_BT)
    inputs_BTH, total = head.fuse(batch.states_BTX), torch.zeros((), device=p_BTD.device)
    for step, weight in enumerate(objective.step_weights):
        positions_BT = batch.positions_BT + step
        predicted_BTH = head(inputs_BTH, ahead(embeddings_BTH, 1 + step), positions_BT=positions_BT, attend=attend)
        inputs_BTH = predicted_BTH.detach() if objective.between == "detach" else predicted_BTH
        counts_BT = batch.mask(step)[:, : -1 - step].float()
        log_q_BTD = head.logits(predicted_BTH[:, : -1 - step], tokens).float().log_softmax(dim=-1)
        losses_BT = -(p_BTD[:, 1 + step :] * log_q_BTD).sum(dim=-1)
        total = (
            total + objective.classification_weight * weight * (losses_BT * counts_BT * learns_BT[:, 1 + step :]).sum()
        )
        if objective.regression_weight > 0:
            predicted, target = predicted_BTH[:, : -1 - step].float(), batch.features_BTH[:, 1 + step :]
            gaps_BT = functional.smooth_l1_loss(predicted, target, reduction="none").mean(dim=-1)
            total = total + objective.regression_weight * weight * (gaps_BT * counts_BT).sum()
    return total, torch.zeros(3, objective.steps)


def run_case(options: argparse.Namespace, *, method: str, tokens: int) -> dict[str, Any]:
    """One method at one length, in this process: peak memory, seconds of each step, loss and gradient norm of the first."""
    device = torch.device(options.device)
    head, draft_tokens = make_head(options, device)
    batch = make_batch(head, rows=options.rows, tokens=tokens, vocabulary=options.vocab, device=device)
    published = PUBLISHED[options.version]
    objective = Objective(
        steps=options.steps,
        decay=published["unroll_weight"],
        between="detach" if published["detach_between_steps"] else "flow",
        regression_weight=published["regression_weight"],
        classification_weight=published["classification_weight"],
        checkpointing="steps" if method == "checkpointed" else "none",
    )
    work: Callable[[DraftHead], tuple[torch.Tensor, torch.Tensor]] = functools.partial(
        plain_losses if method == "plain" else batch_losses,
        batch=batch,
        objective=objective,
        tokens=draft_tokens,
        draftable=Draftable(draft_tokens),
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-6)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bf16")
    seconds, loss, norm = [], 0.0, 0.0
    gc.collect()
    before = _memory_now(device)
    for repeat in range(options.warmup + options.repeats):
        start = _clock(device)
        with autocast:
            total, _ = work(head)
        (total / max(1, batch.supervised_count)).backward()
        if repeat == 0:
            loss = total.item() / max(1, batch.supervised_count)
            norm = float(torch.stack([p.grad.norm() for p in head.parameters() if p.grad is not None]).norm())
        optimizer.step()
        optimizer.zero_grad()
        del total
        if repeat >= options.warmup:
            seconds.append(_clock(device) - start)
    return {
        "method": method,
        "tokens": tokens,
        "peak_bytes": max(0, _memory_peak(device) - before),
        "median_seconds": statistics.median(seconds),
        "min_max_seconds": [min(seconds), max(seconds)],
        "tokens_per_second": options.rows * tokens / statistics.median(seconds),
        "loss": loss,
        "grad_norm": norm,
    }


def make_head(options: argparse.Namespace, device: torch.device) -> tuple[DraftHead, DraftTokens]:
    """A random head and random target layers of the given shape."""
    torch.manual_seed(0)
    reduced = options.draft_vocab is not None and options.draft_vocab < options.vocab
    shape = dict(
        hidden_size=options.hidden, intermediate_size=options.intermediate, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.hidden // options.heads, vocab_size=options.vocab,
        num_hidden_layers=1, draft_vocab_size=options.draft_vocab if reduced else None,
    )  # fmt: skip
    eagle1 = options.version == "eagle1"
    head: DraftHead = EagleHead(EagleHeadConfig(**shape)) if eagle1 else Eagle3Head(Eagle3HeadConfig(**shape))
    weight_VH = torch.randn(options.vocab, options.hidden) * options.hidden**-0.5
    chosen_D = torch.arange(options.draft_vocab or options.vocab)
    vocabulary = DraftVocabulary(target_ids_D=chosen_D, target_size=options.vocab) if reduced else None
    if vocabulary is not None:
        head.set_vocabulary(vocabulary)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    layers = TokenLayers(embedding_VH=weight_VH, lm_head_VH=weight_VH).to(device, dtype)
    return head.to(device), DraftTokens(layers, vocabulary)


def make_batch(head: DraftHead, *, rows: int, tokens: int, vocabulary: int, device: torch.device) -> Batch:
    """Whole rows of one document each, all supervised."""
    size = head.config.hidden_size
    features_BTH = torch.randn(rows, tokens, size)
    states_BTX = features_BTH if head.version == "eagle1" else torch.randn(rows, tokens, head.fc.in_features)
    batch = Batch(
        states_BTX=states_BTX,
        ids_BT=torch.randint(vocabulary, (rows, tokens)),
        supervised_BT=torch.ones(rows, tokens, dtype=torch.bool),
        features_BTH=features_BTH,
        document_BT=torch.zeros(rows, tokens, dtype=torch.int64),
        positions_BT=torch.arange(tokens).expand(rows, -1).contiguous(),
        token_count=rows * (tokens - 2),
        supervised_count=rows * (tokens - 2),
        numbers=tuple((row,) for row in range(rows)),
    )
    return batch.to(device)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _memory_now(device: torch.device) -> int:
    """Bytes held; the peak starts anew from here, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets VmHWM
    except OSError:
        pass  # not Linux, or not allowed: the peak of what came before counts
    return _status("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    """A size from /proc/self/status, in bytes; elsewhere than on Linux the peak so far (which no reset touches)."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return peak_memory()["rss_bytes"]


def in_its_own_process(options: argparse.Namespace, *, method: str, tokens: int) -> dict[str, Any] | None:
    """`run_case` in a child; None where it ended without a result (out of memory, most likely)."""
    arguments = [sys.executable, "-m", "eagle.train.bench_step", "--case", method, "--tokens", str(tokens)]
    for name in ("vocab", "steps", "version", "rows", "repeats", "warmup", "device", "precision", *SHAPE):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    child = subprocess.run(arguments, stdout=subprocess.PIPE, text=True)
    if child.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


SHAPE = {"draft_vocab": None, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eagle.train.bench_step", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="T, one or several")
    parser.add_argument("--vocab", type=int, default=49152, help="the target's vocabulary")
    parser.add_argument("--steps", type=int, default=5, help="unroll steps")
    parser.add_argument("--version", choices=("eagle1", "eagle3"), default="eagle3")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--warmup", type=int, default=1, help="steps not timed")
    parser.add_argument("--repeats", type=int, default=3, help="steps timed; the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--case", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line per case; ratios are to the plain step of the same length, and there are none without it."""
    lines = [f"{'T':>6} {'method':<13} {'peak MiB':>9} {'tokens/s':>9} {'s/step':>8}  {'memory':>7} {'speed':>6}"]
    plain_first = sorted(results, key=lambda result: result["method"] != "plain")
    for result in results:
        base = next(other for other in plain_first if other["tokens"] == result["tokens"])
        pairs = [(result[key], base[key]) for key in ("loss", "grad_norm")]
        same = all(abs(mine - its) <= AGREE * abs(its) for mine, its in pairs)
        memory, speed = "differs", "-"
        if same and base["method"] != "plain":
            memory = "-"
        elif same:
            memory = f"{result['peak_bytes'] / base['peak_bytes']:.2f}x" if base["peak_bytes"] else "-"
            speed = f"{result['tokens_per_second'] / base['tokens_per_second']:.2f}x"
        lines.append(
            f"{result['tokens']:>6} {result['method']:<13} {result['peak_bytes'] / 2**20:>9.0f} "
            f"{result['tokens_per_second']:>9.0f} {result['median_seconds']:>8.3f}  {memory:>7} {speed:>6}"
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit code: 1 when methods disagree or a case ended without a result."""
    options = parse(arguments)
    if options.case is not None:
        print(json.dumps(run_case(options, method=options.case, tokens=options.tokens[0])))
        return 0
    machine, commit = hardware(), git_commit()
    print(f"{machine['cpu']}, {machine['torch_threads']} torch threads, GPUs {machine['gpus']}, commit {commit}")
    print(
        f"{options.version}, {options.steps} unroll steps, {options.rows} row(s), V = {options.vocab}, "
        f"Vd = {options.draft_vocab or options.vocab}, H = {options.hidden}, {options.precision} on {options.device}"
    )
    results, missing = [], []
    for tokens in options.tokens:
        for method in options.methods:
            result = in_its_own_process(options, method=method, tokens=tokens)
            if result is None:
                missing.append({"method": method, "tokens": tokens})
                print(f"{method} at T = {tokens} ended without a result (out of memory?)")
            else:
                results.append(result)
    lines = table(results)
    print("\n".join(lines))
    right = not any("differs" in line for line in lines) and not missing
    settings = {key: value for key, value in vars(options).items() if key != "case"}
    summary = {"benchmark": "training step", "hardware": machine, "commit": commit, **settings}
    print(json.dumps({**summary, "agree": right, "results": results, "missing": missing}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
