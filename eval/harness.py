"""The evaluation: every method answers every request, side by side, in one process.

Fairness: the same loaded weights, prompts, token limit, EOS and token counting for all; requests interleave the methods
and rotate their order, so a slow minute of the machine hits all alike; warm-up prompts are not counted. Two baselines:
Hugging Face `generate` and this package's own loop without drafting. Several processes (processes.py) share out the prompts.
"""

import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from eagle.config import Recipe, as_dict
from eagle.draft.tuning import tuned_for
from eagle.environment import git_commit, hardware, peak_memory, versions
from eagle.errors import EagleError
from eagle.eval.answers import AnswerLog, Request
from eagle.eval.figures import peaks
from eagle.eval.identity import answers_identity, evaluation_identity, text_identity
from eagle.eval.ledger.ledger import ledger_of
from eagle.eval.methods import make_methods
from eagle.eval.processes import Processes, join_processes, share
from eagle.eval.record_steps import record_trees
from eagle.eval.report.page import REPORT, write_report, write_results
from eagle.eval.report.summary import print_results
from eagle.eval.results import FORMAT, read_results
from eagle.eval.runner import Runner, every_request, known
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.suites.prompt_set import Prompt, PromptSet, prompts_in, recipe_sets
from eagle.eval.suites.spec_bench import write_answer_files
from eagle.eval.summarise import summarise
from eagle.eval.throughput import Curves
from eagle.eval.which_head import own_or_given
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead
from eagle.plots.tau import read_taus
from eagle.progress import ProgressBar, console
from eagle.reading import read_object
from eagle.target.target import Target


def evaluate(recipe: Recipe, head: str | Path | None = None) -> dict[str, Any]:
    """Evaluates a head (default: the recipe's own) on the recipe's prompts; writes results.json, summary.md, report.html and
    spec_bench/.

    Resumes an interrupted evaluation, or one of fewer prompts; when results.json is of exactly this one, prints it and measures
    nothing.
    Every process of an accelerate launch calls this; the first one writes the results and returns them, the others {}.
    Raises EagleError for a missing head or prompt file, or a head that does not fit the target.
    """
    processes = join_processes()
    head_path = own_or_given(recipe, head)
    sets = recipe_sets(recipe.eval)
    identity = evaluation_identity(recipe, head_path, prompts_in(sets))
    done = read_results(recipe.eval_dir)
    if done is not None and done["identity"] == identity:
        if processes.first:
            if not (recipe.eval_dir / REPORT).is_file():
                write_report(recipe.eval_dir, done)
            print_results(done)
            _say(f"{recipe.eval_dir} is complete; delete that folder to measure again")
        return done if processes.first else {}
    result = _measure(recipe, head_path, sets, identity, processes)
    if not processes.first:
        return {}
    write_results(recipe.eval_dir, result)
    (recipe.eval_dir / "recipe.yaml").write_text(yaml.safe_dump(as_dict(recipe), sort_keys=False), encoding="utf-8")
    print_results(result)
    _say(f"to look at: {recipe.eval_dir / REPORT}")
    return result


def _measure(
    recipe: Recipe,
    head_path: str | Path,
    sets: Sequence[PromptSet],
    identity: Mapping[str, Any],
    processes: Processes,
) -> dict[str, Any]:
    """The results; of a process that is not the first: {}, when every process has answered its share."""
    loading = peak_memory()
    head, prompts = load_head(head_path), prompts_in(sets)
    target = Target.from_config(processes.on_own_device(recipe.target), recipe.data.chat_template)
    text = text_identity(target)
    target.use_engine(recipe.decode.engine)
    answers = answers_identity(identity, {**text, "runs": target.engine_facts})
    methods = make_methods(
        recipe.eval.methods,
        target,
        head,
        decode=recipe.decode,
        chain_depth=recipe.eval.chain_depth,
        draft_model=recipe.eval.draft_model,
    )
    settings = parse_settings(recipe.eval.sampling)
    curves = Curves(recipe, target, head_path, prompts)
    runner = Runner(
        target,
        methods,
        settings,
        max_new_tokens=recipe.eval.max_new_tokens,
        seed=recipe.eval.seed,
        processes=processes.on_machine,
    )
    log_of = functools.partial(AnswerLog, recipe.eval_dir / "answers.jsonl", answers)
    _answer(runner, prompts, log_of(process=processes.index), processes, warm_up=recipe.eval.warmup_prompts)
    processes.wait()
    processes.leave()
    if not processes.first:
        return {}
    with log_of() as log, ProgressBar("eval", total=0, unit="requests", quiet=True) as bar:
        # What the others answered is in the log now; what is passed over is found again.
        skipped = [passed for prompt in prompts for passed in runner.answer(prompt, log, bar)]
        requests = in_order(log, prompts, settings)
    if not requests:
        raise EagleError(
            "every evaluation prompt is longer than the target's context; see eval.prompts and eval.max_new_tokens"
        )
    write_answer_files(recipe.eval_dir / "spec_bench", requests, prompts, runner.tokenizer, model=target.name)
    throughput = curves.measure(settings, answers)
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": dict(identity),
        "target": target.identity(),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "runs": target.engine_facts,
        "head": {
            "path": str(head_path),
            "sha256": identity["head_sha256"],
            "config": json.loads(head.config.to_json_string()),
        },
        "training": _training(recipe, head.folder),
        "recipe": as_dict(recipe),
        "hardware": hardware(),
        "versions": versions(),
        "commit": git_commit(),
        "peak_memory": _highest(loading, requests, target.device),
        "skipped": skipped,
        "suites": [one.as_dict() for one in sets],
        "processes": shared_by(requests, processes),
        "throughput": throughput,
        "ledger": ledger_of(recipe, target, methods, settings, requests, prompts, throughput),
        "tune": tuned_entry(head, target),
        "trees": record_trees(
            methods, settings, prompts, max_new_tokens=recipe.eval.max_new_tokens, seed=recipe.eval.seed
        ),
        **summarise(
            requests,
            {one.label: {name: method.check(one) for name, method in methods.items()} for one in settings},
            seed=recipe.eval.seed,
        ),
    }


def _answer(runner: Runner, prompts: Sequence[Prompt], log: AnswerLog, processes: Processes, *, warm_up: int) -> None:
    """Answers this process's share of what the log lacks."""
    with contextlib.ExitStack() as stack:
        with processes.first_goes_first():
            stack.enter_context(log)
        mine = share(runner.unanswered(prompts, log), index=processes.index, count=processes.count)
        total = len(runner.settings) * sum(len(prompt.turns) for prompt in prompts)
        if processes.count > 1:
            total = len(runner.settings) * sum(len(prompt.turns) for prompt in mine)
        done = len(in_order(log, prompts, runner.settings)) if processes.count == 1 else 0
        bar = ProgressBar("eval", total=total, unit="requests", done=done, quiet=not processes.first)
        with bar:
            if mine:
                runner.warm_up(prompts[:warm_up], mine)
            for prompt in mine:
                runner.answer(prompt, log, bar)


def in_order(log: AnswerLog, prompts: Sequence[Prompt], settings: Sequence[Setting]) -> list[Request]:
    """Those of these prompts, by prompt, setting and turn, whoever answered them and when."""
    found = (known(log, *request) for request in every_request(prompts, settings))
    return [request for request in found if request is not None]


def shared_by(requests: Sequence[Request], processes: Processes) -> dict[str, Any]:
    """Under how many processes on one machine the requests were answered, and what to say of it."""
    counts = Counter(request.processes for request in requests)
    note = None
    if max(counts) > 1:
        how = ", ".join(f"{count} with {number}" for number, count in sorted(counts.items()))
        note = f"times are of one process among several on one machine (requests by their number: {how}); ratios are paired"
    return {
        "processes": processes.count,
        "requests_by_sharing": {str(number): count for number, count in sorted(counts.items())},
        "note": note,
    }


def _highest(loading: Mapping[str, int], requests: Sequence[Request], device: torch.device) -> dict[str, int]:
    """The peaks over the whole evaluation: what every answer notes sets the process's own back."""
    highest = {name: max(value, loading.get(name, 0)) for name, value in peak_memory().items()}
    noted = peaks([answer for request in requests for answer in request.answers.values()])
    for name, peak in (("rss_bytes", noted["rss_bytes"]), (f"cuda{device.index or 0}_bytes", noted["cuda_bytes"])):
        if peak is not None:
            highest[name] = max(highest.get(name, 0), peak)
    return highest


def _say(text: str) -> None:
    console.print(f"eval: {text}", markup=False, soft_wrap=True)


def tuned_entry(head: DraftHead, target: Target) -> dict[str, Any] | None:
    """What eagle tune left beside the head for this machine; None where there is nothing."""
    found = tuned_for(head.folder, device=target.device, engine=target.engine, dtype=target.dtype)
    return None if found is None else dataclasses.asdict(found)


def _training(recipe: Recipe, head: Path | None) -> dict[str, Any] | None:
    """What the head's record says of its data, and tau over the training, whose log lies beside the head or in it (a
    zoo's); None where neither is known."""
    if head is None:
        return None
    record = head / "training.json"
    remedy = "put back the one that training wrote, or remove it; the answers are kept"
    found = read_object(record, remedy=remedy).get("learnt_from", {}) if record.is_file() else {}
    logs = (head / "metrics.jsonl", head.parent / recipe.train_dir.name / "metrics.jsonl")
    taus = read_taus(next((log for log in logs if log.is_file()), logs[0]))
    return {**found, "tau": taus} if found or taus else None
