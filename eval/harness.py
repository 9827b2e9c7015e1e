"""The evaluation: every method answers every request, side by side, in one process.

Fairness: the same loaded weights, prompts, token limit, EOS and token counting for all; requests interleave the methods
and rotate their order, so a slow minute of the machine hits all alike; warm-up prompts are not counted. Two baselines:
Hugging Face `generate` and this package's own loop without drafting.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from eagle.checkpoint import head_hash, load_head
from eagle.config import Recipe, as_dict
from eagle.environment import git_commit, hardware, package_version, peak_memory, versions
from eagle.errors import EagleError
from eagle.eval.answers import FORMAT, AnswerLog
from eagle.eval.methods import make_methods
from eagle.eval.prompt_set import Prompt, load_prompts, prompts_sha256
from eagle.eval.results import print_results, read_results, write_results
from eagle.eval.runner import Runner
from eagle.eval.settings import parse_settings
from eagle.eval.summarise import summarise
from eagle.progress import ProgressBar, console
from eagle.target import Target


def evaluate(recipe: Recipe, head: str | Path | None = None) -> dict[str, Any]:
    """Evaluates a head (default: the recipe's own) on the recipe's prompts; writes results.json and summary.md.

    Resumes an interrupted evaluation; when results.json is of exactly this one, prints it and measures nothing.
    Raises EagleError for a missing head or prompt file, or a head that does not fit the target.
    """
    if head is None and not recipe.head_dir.is_dir():
        raise EagleError(
            f"there is no head at {recipe.head_dir}; train it first (eagle train RECIPE) or give --head PATH"
        )
    head_path = head if head is not None else recipe.head_dir
    prompts = load_prompts(recipe.eval.prompts, recipe.eval.limit)
    identity = evaluation_identity(recipe, head_path, prompts)
    done = read_results(recipe.eval_dir)
    if done is not None and done["identity"] == identity:
        print_results(done)
        console.print(
            f"eval: {recipe.eval_dir} is complete; delete that folder to measure again", markup=False, soft_wrap=True
        )
        return done
    result = _measure(recipe, head_path, prompts, identity)
    write_results(recipe.eval_dir, result)
    (recipe.eval_dir / "recipe.yaml").write_text(yaml.safe_dump(as_dict(recipe), sort_keys=False), encoding="utf-8")
    print_results(result)
    return result


def evaluation_identity(recipe: Recipe, head: str | Path | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What must be the same for earlier results (or answers) to stand. Hardware is in it: times would not mix."""
    return {
        "version": package_version(),
        "target": as_dict(recipe.target),
        "chat_template": recipe.data.chat_template,
        "head_sha256": None if head is None else head_hash(head),
        "prompts_sha256": prompts_sha256(prompts),
        "eval": as_dict(recipe.eval),
        "decode": as_dict(recipe.decode),
        "hardware": hardware(),
        "libraries": {name: version for name, version in versions().items() if name in ("torch", "transformers")},
    }


def _measure(
    recipe: Recipe, head_path: str | Path, prompts: Sequence[Prompt], identity: Mapping[str, Any]
) -> dict[str, Any]:
    head = load_head(head_path)
    target = Target.from_config(recipe.target, recipe.data.chat_template)
    methods = make_methods(recipe.eval.methods, target, head, decode=recipe.decode, chain_depth=recipe.eval.chain_depth)
    settings = parse_settings(recipe.eval.sampling)
    runner = Runner(target, methods, settings, max_new_tokens=recipe.eval.max_new_tokens, seed=recipe.eval.seed)
    skipped: list[dict[str, Any]] = []
    with AnswerLog(recipe.eval_dir / "answers.jsonl", {**identity, "weights": target.identity()}) as log:
        if log.restarted:
            console.print(f"eval: {log.path} was of another evaluation; starting afresh", markup=False, soft_wrap=True)
        total = len(settings) * sum(len(prompt.turns) for prompt in prompts)
        with ProgressBar("eval", total=total, unit="requests", done=len(log.requests)) as bar:
            for prompt in prompts[: recipe.eval.warmup_prompts] if len(log.requests) < total else []:
                runner.warm_up(prompt)
            for prompt in prompts:
                skipped += runner.answer(prompt, log, bar)
        requests = list(log.requests.values())
    if not requests:
        raise EagleError(
            "every evaluation prompt is longer than the target's context; see eval.prompts and eval.max_new_tokens"
        )
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": dict(identity),
        "target": target.identity(),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "head": {
            "path": str(head_path),
            "sha256": identity["head_sha256"],
            "config": json.loads(head.config.to_json_string()),
        },
        "training": _training_size(recipe),
        "recipe": as_dict(recipe),
        "hardware": hardware(),
        "versions": versions(),
        "commit": git_commit(),
        "peak_memory": peak_memory(),
        "skipped": skipped,
        "suites": [],
        "processes": {"processes": 1, "requests_by_sharing": {"1": len(requests)}, "note": None},
        "throughput": [],
        **summarise(
            requests,
            {one.label: {name: method.check(one) for name, method in methods.items()} for one in settings},
            seed=recipe.eval.seed,
        ),
    }


def _training_size(recipe: Recipe) -> dict[str, Any] | None:
    """Counts of the prepared data beside this recipe, for the reader of the table; None where there is none."""
    path = recipe.data_dir / "manifest.json"
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return {key: manifest[key] for key in ("counts", "supervised_tokens", "tokens") if key in manifest}
