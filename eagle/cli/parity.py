"""Parity: does a head say the same whichever way it is run? The largest logit difference per draft depth, over real prompts.

The judge is the training module: `unroll` (eagle/train/unroll.py) over the target's plain forward. Held against it are
- the decoder: the target's cache and the draft head's cache, fed piece by piece as decoding feeds them, a chain of the
  document's own tokens drafted behind every root;
- each file format: the head exported to it, imported again, and run as the training module; also the largest difference of
  any weight.
All in float32; what may lie between them follows from how far rounding alone moves the judge at that depth
(eagle/eval/checks/rounding.py). Depth k predicts the token k places behind the root; a chain of k - 1 drafted tokens lies
between. T tokens, D draft vocabulary.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle.config import TargetConfig
from eagle.decode.arguments import resolve
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.eval.checks.forced_chain import ForcedChain
from eagle.eval.checks.rounding import ROUNDINGS, shaken
from eagle.eval.suites.prompt_set import load_prompts
from eagle.formats.checkpoint import check_fits, load_head, save_head
from eagle.formats.own import OWN
from eagle.formats.registry import EXPORTED, FORMATS
from eagle.formats.target_facts import TargetFacts, settings_as_trained
from eagle.formats.write import Export, drop_idle_bias, export_head, write_export
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.progress import ProgressBar
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target, TargetStates, weights_hash
from eagle.train.unroll import unroll

SHAKES = 2
"""Times that each prompt is run with random rounding."""
LONGEST = 64
"""Tokens taken of each prompt: every position of them is a root."""
PIECE = 3
"""Tokens committed at a time, behind the prefill of the first half."""


def parity(
    head: str | Path,
    *,
    target: str,
    prompts: Sequence[str] = ("shipped:mt_bench",),
    limit: int = 4,
    depth: int = 4,
    tolerance: float | None = None,
    formats: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Compares; returns the table as plain values (`print_parity` shows it). `within`: whether all is within tolerance.

    target: path, hub id or .gguf file. limit: prompts per source. formats: names of file formats; None: all that take this head.
    tolerance: largest difference, as a share of the largest logit of that depth; None: ROUNDINGS times what rounding alone moves.
    Raises EagleError for a head that does not fit the target, and for no prompt long enough.
    """
    if not 1 <= depth <= LONGEST - 2:
        raise EagleError(f"depth is {depth}, expected 1 to {LONGEST - 2} ({LONGEST} tokens of each prompt are taken)")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise EagleError(f"tolerance is {tolerance}, expected 0 or a positive number such as 1e-4")
    loaded = load_head(head)
    assert loaded.folder is not None
    trained = settings_as_trained(target, loaded.folder, trust_remote_code=trust_remote_code)
    model = Target.from_config(dataclasses.replace(trained, dtype="float32"))
    facts = _facts(loaded, model, trained)
    check_fits(loaded, facts)
    drop_idle_bias(loaded)
    loaded = loaded.to(device=model.device)
    documents = _documents(model, prompts, limit, depth)
    variants, skipped = _variants(loaded, model, facts, formats)
    compared = _Compared(depth)
    with ProgressBar("parity", total=len(documents) * (1 + len(variants)), unit="prompts") as bar:
        for ids in documents:
            judge_KTD = training_logits(loaded, model, ids, depth=depth)
            compared.judge(judge_KTD)
            for seed in range(SHAKES if tolerance is None else 0):
                with shaken(model.decoder, loaded, seed=seed):
                    compared.shaken(judge_KTD, training_logits(loaded, model, ids, depth=depth))
            compared.add("decoder", judge_KTD, decoder_logits(loaded, model, ids, depth=depth))
            bar.advance(1)
            for name, (variant, _) in variants.items():
                logits_KTD = training_logits(variant, model, ids, depth=depth)
                if logits_KTD.shape[-1] != judge_KTD.shape[-1]:  # a format without reduced vocabularies
                    assert loaded.vocabulary is not None
                    logits_KTD = logits_KTD[..., loaded.vocabulary.target_ids_D.to(logits_KTD.device)]
                compared.add(name, judge_KTD, logits_KTD)
                bar.advance(1)
    allowed = compared.allowed(tolerance)
    return {
        "head": str(head),
        "version": loaded.version,
        "target": model.name,
        "dtype": "float32",
        "prompts": len(documents),
        "roots": sum(len(ids) - depth for ids in documents),
        "depth": depth,
        "tolerance": tolerance,
        "largest_logit": compared.largest,
        "allowed": allowed,
        "difference": compared.difference,
        "weights": {name: difference for name, (_, difference) in variants.items()},
        "not_compared": skipped,
        "within": compared.within(allowed) and all(value == 0 for _, value in variants.values()),
    }


class _Compared:
    """Largest logits and differences by depth."""

    def __init__(self, depth: int):
        self.largest = [0.0] * depth
        self.rounding = [0.0] * depth
        self.difference: dict[str, list[float]] = {}

    def judge(self, logits_KTD: torch.Tensor) -> None:
        self.largest = _larger(self.largest, [float(x.abs().max()) for x in logits_KTD])

    def shaken(self, judge_KTD: torch.Tensor, shaken_KTD: torch.Tensor) -> None:
        self.rounding = _larger(self.rounding, _apart(judge_KTD, shaken_KTD))

    def add(self, name: str, judge_KTD: torch.Tensor, other_KTD: torch.Tensor) -> None:
        far = _apart(judge_KTD, other_KTD)
        self.difference[name] = _larger(self.difference.get(name, far), far)

    def allowed(self, tolerance: float | None) -> list[float]:
        """The largest difference allowed at each depth."""
        if tolerance is None:
            return [ROUNDINGS * moved for moved in self.rounding]
        return [tolerance * largest for largest in self.largest]

    def within(self, allowed: Sequence[float]) -> bool:
        return all(
            far < float("inf") and far <= most
            for row in self.difference.values()
            for far, most in zip(row, allowed, strict=True)
        )


def _apart(x_KTD: torch.Tensor, y_KTD: torch.Tensor) -> list[float]:
    """Largest difference at each depth; infinite where one of the two is not finite."""
    far_KTD = torch.nan_to_num((x_KTD - y_KTD).abs(), nan=float("inf"), posinf=float("inf"))
    return [float(far_TD.max()) for far_TD in far_KTD]


def _larger(old: Sequence[float], new: Sequence[float]) -> list[float]:
    return [max(pair) for pair in zip(old, new, strict=True)]


@torch.inference_mode()
def training_logits(head: DraftHead, target: Target, ids: Sequence[int], *, depth: int) -> torch.Tensor:
    """[depth, T - depth, D]: what the training module predicts at every root, by draft depth."""
    ids_1T = torch.tensor([list(ids)])
    states = target.features(ids_1T, head.aux_layers)
    predictions = unroll(head, _states(states).to(head.fc.weight), target.embed(ids_1T).to(head.fc.weight), steps=depth)
    tokens = DraftTokens(target.tokens, head.vocabulary)
    roots = len(ids) - depth
    return torch.stack([head.logits(step[0, :roots], tokens) for step in predictions])


@torch.inference_mode()
def decoder_logits(head: DraftHead, target: Target, ids: Sequence[int], *, depth: int) -> torch.Tensor:
    """The same from the decoder's incremental path; roots are the tokens 1 .. T - depth, as above."""
    chain = ForcedChain(depth)
    drafter = HeadDrafter(head, target.tokens, chain)
    cache = target.new_cache(rows=1, capacity=len(ids) + depth)
    call = resolve(target, torch.tensor([list(ids[: len(ids) - depth])]), max_new_tokens=depth, do_sample=False)
    drafter.reset(call.rows, capacity=len(ids) + depth)
    roots, half = len(ids) - depth, max(1, (len(ids) - depth) // 2)
    states = _states(target.prefill(torch.tensor([list(ids[:half])]), torch.tensor([half]), cache, head.aux_layers))
    logits_TKD = []
    for start in range(half, roots, PIECE):  # as verification does: a path, of which all is committed
        path = list(ids[start : min(start + PIECE, roots)])
        tree = _path(path)
        forward = target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, cache, head.aux_layers)
        cache.commit(torch.arange(len(path))[None], torch.tensor([len(path)]))
        states = torch.cat([states, _states(forward)], dim=1)
    for i in range(roots):
        drafter.observe(states[:, i : i + 1], torch.tensor([[ids[i + 1]]]), torch.tensor([1]))
        chain.tokens = list(ids[i + 2 : i + 1 + depth])
        drafter.propose()
        logits_TKD.append(chain.logits_KD)
    return torch.stack(logits_TKD, dim=1)


def _states(states: TargetStates) -> torch.Tensor:
    return states.features_BNH if states.aux_BNA is None else states.aux_BNA


def _path(tokens: Sequence[int]) -> DraftTree:
    parents = torch.arange(-1, len(tokens) - 1)[None]
    return DraftTree.from_parents(torch.tensor([list(tokens)]), parents)


def _documents(target: Target, prompts: Sequence[str], limit: int, depth: int) -> list[list[int]]:
    """The prompts' ids, cut."""
    if target.tokenizer is None:
        raise EagleError(f"target {target.name} has no tokenizer: prompts cannot be read")
    documents = []
    for prompt in load_prompts(prompts, limit):
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])[:LONGEST]
        if len(ids) > depth + 1:
            documents.append(ids)
    if not documents:
        raise EagleError(f"no prompt of {', '.join(prompts)} has more than {depth + 1} tokens; give other --prompts")
    return documents


def _facts(head: DraftHead, target: Target, trained: TargetConfig) -> TargetFacts:
    """The target that fit is checked against. trained: how it was loaded for the head's training: the identity that the head
    records is of weights in that dtype, which float32's may not be equal to."""
    facts = TargetFacts(dataclasses.replace(trained, device="cpu"))
    recorded = (head.config.target_identity or {}).get("weights_sha256")
    if recorded not in (None, weights_hash(target.model)):
        facts.identity()  # of the weights in that dtype, which are let go again
    facts._model = target.model  # in memory already
    return facts


def _variants(
    head: DraftHead, target: Target, facts: TargetFacts, formats: Sequence[str] | None
) -> tuple[dict[str, tuple[DraftHead, float]], dict[str, str]]:
    """The head after a trip through each format with its largest weight difference; and formats that do not take it."""
    known = (OWN.name, *EXPORTED)
    unknown = set(formats or ()) - set(known)
    if unknown:
        raise EagleError(f"unknown formats {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    variants, skipped = {}, {}
    for name in known if formats is None else formats:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "head"
            try:
                made = (
                    None if name == OWN.name else export_head(head, FORMATS[name], facts, folder=name, dtype="float32")
                )
            except EagleError as error:  # a refusal; what was exported must come back
                if formats is not None:
                    raise
                skipped[name] = str(error)
                continue
            back = _round_trip(head, facts, made, folder).to(device=target.device)
        variants[name] = (back, _weight_difference(head, back))
    return variants, skipped


def _round_trip(head: DraftHead, target: TargetFacts, made: Export | None, folder: Path) -> DraftHead:
    """The head that comes back from a folder. made: what an export put there; None: this project's own form."""
    if made is None:
        save_head(head, folder)
    else:
        write_export(made, folder)
    back = load_head(folder)
    check_fits(back, target)
    return back


def _weight_difference(head: DraftHead, back: DraftHead) -> float:
    """The largest difference of any weight, by our names; infinite where one is missing."""
    largest = 0.0
    theirs = back.state_dict()
    for key, value in head.state_dict().items():
        if key in ("d2t", "t2d") and key not in theirs:
            continue  # a format without reduced vocabularies
        if key not in theirs or theirs[key].shape != value.shape:
            return float("inf")
        largest = max(largest, float((theirs[key].float() - value.float()).abs().max()))
    return largest


def print_parity(result: dict[str, Any]) -> None:
    """The table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("largest logit difference from the training module")
    for k in range(result["depth"]):
        table.add_column(f"depth {k + 1}", justify="right")
    table.add_column("weights", justify="right")
    for name, row in result["difference"].items():
        weights = result["weights"].get(name)
        label = name if name == "decoder" else f"{name}, exported and imported"
        table.add_row(label, *(f"{far:.2g}" for far in row), "" if weights is None else f"{weights:.2g}")
    for label, key in (("(allowed)", "allowed"), ("(largest logit)", "largest_logit")):
        table.add_row(label, *(f"{value:.3g}" for value in result[key]), "", style="dim")
    console.print(f"{result['head']} behind {result['target']}, {result['dtype']}", markup=False, soft_wrap=True)
    console.print(table)
    for name, reason in result["not_compared"].items():
        console.print(f"{name}: not exported: {reason}", markup=False, soft_wrap=True)
    verdict = "within" if result["within"] else "BEYOND"
    tolerance = result["tolerance"]
    allowed = (
        f"{ROUNDINGS} times what rounding alone moves a logit"
        if tolerance is None
        else f"{tolerance:g} times the largest logit"
    )
    console.print(
        f"{result['roots']} roots of {result['prompts']} prompts; {verdict} the tolerance of {allowed} (weights: exactly equal)",
        markup=False,
        soft_wrap=True,
    )
