"""`eagle export`: a head becomes a folder that a runtime loads, with a model card and the command that serves it."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.cli.import_ import add_trust
from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.formats.target_facts import TargetFacts
    from eagle.heads.eagle1 import DraftHead

RUNTIMES = ("reference", "vllm", "sglang", "speculators", "trtllm")
DTYPES = ("bfloat16", "float16", "float32")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle export`."""
    parser.add_argument("head", metavar="HEAD", help="the head's folder or hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--to", required=True, choices=RUNTIMES, help="whose files")
    parser.add_argument(
        "--target", metavar="MODEL", help="the head's target (default: the one recorded in it); the fit is checked"
    )
    add_trust(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights (default: bfloat16)")
    parser.add_argument(
        "--name",
        metavar="ID",
        help="the target's public name (owner/name), for the files, the card and the command (default: --target)",
    )
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        default=3,
        metavar="N",
        help="tokens drafted per step, in the command (default: 3)",
    )
    parser.add_argument("--license", metavar="ID", help="the head's licence, for the model card, such as apache-2.0")
    parser.add_argument(
        "--results",
        metavar="PATH",
        help="results.json of eagle eval, for the card (default: beside the head, where it is)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")
    parser.add_argument("--push-to-hub", metavar="REPO", help="then upload OUT to this hub repository (owner/name)")
    parser.add_argument("--private", action="store_true", help="create that repository as a private one")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG


_EPILOG = """\
reference    SafeAILab/EAGLE: EAGLE-1/2 and EAGLE-3
vllm         EAGLE-1/2 and EAGLE-3
sglang       EAGLE-1/2 (with a token map for a reduced draft vocabulary) and EAGLE-3
speculators  EAGLE-3, the target's embeddings included; vLLM serves it
trtllm       EAGLE-3, with TensorRT-LLM's options in trtllm.yaml
A head that the runtime would compute otherwise is refused, with the reason. OUT gets a README.md (model card), and the
files are read back and compared before they are put there. Example:
  eagle export runs/mine/head out --to vllm --target Qwen/Qwen3-8B --license apache-2.0
"""


def export(options: argparse.Namespace) -> None:
    """Checks, writes, reads back, prints what was lost and how to serve it."""
    from eagle.cli.import_ import check_lm_head, refuse_existing, target_facts
    from eagle.formats.checkpoint import check_fits
    from eagle.formats.format import VERSION_NAMES
    from eagle.formats.own import OWN
    from eagle.formats.read import read_head
    from eagle.formats.registry import format_named
    from eagle.formats.write import drop_idle_bias, export_head, write_export

    out = Path(options.out)
    if options.speculative_tokens < 1:
        raise EagleError(f"--speculative-tokens is {options.speculative_tokens}, expected at least 1")
    if options.private and options.push_to_hub is None:
        raise EagleError("--private does nothing without --push-to-hub REPO; add it")
    read = read_head(options.head)
    head = read.head
    model = options.target or (head.config.target_identity or {}).get("model")
    if model is None:
        raise EagleError("the head names no target; give --target MODEL")
    refuse_existing(out, head=options.head, target=str(model), overwrite=options.overwrite)
    format, name = format_named(options.to), options.name or str(model)
    unnamed = _not_public(name, format.title, given=options.name is not None)
    if unnamed is not None and options.push_to_hub is not None:
        raise EagleError(f"{unnamed}: files for the hub need its name there; give --name OWNER/MODEL")
    target = target_facts(str(model), read.files.folder, trust_remote_code=options.trust_remote_code)
    head.embed_tokens_VH = read.carried.get("embed_tokens.weight")
    check_fits(head, target)
    if "lm_head.weight" in read.carried:
        check_lm_head(read.carried["lm_head.weight"], target)
    drop_idle_bias(head)
    made = export_head(
        head,
        format,
        target,
        folder=options.push_to_hub or str(out),
        uploaded=options.push_to_hub is not None,
        dtype=options.dtype,
        verifier=name if unnamed is None else None,
        tokens=options.speculative_tokens,
    )
    training = _training(read.files.folder)
    results, skipped = _results(options.results, read.files.folder)
    verified: list[str] = []

    def finish(folder: Path) -> dict[str, str]:
        verified.extend(_verify(head, folder, target, options.dtype))
        return {"README.md": _card(head, made, target, name, training, results, options, verified)}

    write_export(made, out, finish=finish)
    print(f"{out}: {VERSION_NAMES[head.version]} head for {made.format.title}, {options.dtype}")
    read_as = [f"read as {read.format.title}: {line}" for line in read.assumptions if read.format is not OWN]
    for line in (*read_as, *verified, *made.notes, *skipped):
        print(f"  {line}")
    if unnamed is not None:
        print(f"  {unnamed}: give --name OWNER/MODEL, its name on the hub")
    if options.license is None:
        print("  README.md names no licence: give --license ID, such as apache-2.0")
    print(f"serve it:\n{made.serve}")
    if options.push_to_hub is not None:
        print(f"uploaded to {push_to_hub(out, options.push_to_hub, private=options.private)}")


def push_to_hub(folder: Path, repo: str, *, private: bool = False, client: Any = None) -> str:
    """Creates the repository where there is none and uploads the folder; returns its address.

    client: a huggingface_hub.HfApi, or what looks like one. Raises EagleError when the hub cannot be reached or refuses, and for
    a private upload into a repository that is public.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi() if client is None else client
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise EagleError(
                f"{repo} exists and is public, which --private does not change: nothing was uploaded, the files are complete in "
                f"{folder}; make it private on the hub, name another repository, or leave --private out"
            )
        api.upload_folder(
            folder_path=str(folder), repo_id=repo, commit_message="Draft head, exported by eagle-draft-toolkit"
        )
    except EagleError:
        raise
    except Exception as error:
        # The hub's client passes on errors of whichever HTTP library its version is built on.
        known = isinstance(error, (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError))
        if isinstance(error, ValueError) and not known:  # what the hub finds wrong with the model card
            raise EagleError(
                f"{repo} was not uploaded to ({' '.join(str(error).split())}); the files are complete in {folder}: mend the "
                f"metadata at the top of its README.md (--license, --name), then `hf upload {repo} {folder}`"
            ) from error
        if not known and type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "requests"):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EagleError(
            f"{repo} could not be uploaded to ({reason}); the files are complete in {folder}: check the connection, "
            f"HF_HUB_OFFLINE and `hf auth login`, then `hf upload {repo} {folder}`"
        ) from error
    return str(address)


def _not_public(name: str, title: str, *, given: bool) -> str | None:
    """Why a runtime elsewhere cannot open a target by this name; None: it is a hub id. given: as --name, which is no folder."""
    folder = Path(name).is_dir()
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf") and (given or not folder):
        return None
    if folder:
        return f"the target {name} is a folder of this machine, which {title} can open here alone"
    return f"{title} cannot open the target {name}, which is no hub id"


def _verify(head: "DraftHead", folder: Path, target: "TargetFacts", dtype: str) -> list[str]:
    """Reads the files back, strictly, and compares. Raises EagleError when a weight differs from the rounded one."""
    from copy import deepcopy

    from eagle.formats.checkpoint import check_fits
    from eagle.formats.compare import STEPS, TOKENS, difference
    from eagle.formats.read import read_head
    from eagle.formats.write import DTYPES as TORCH_DTYPES

    again = read_head(folder, target=target).head
    check_fits(again, target)
    if again.aux_layers != head.aux_layers:
        raise EagleError(
            f"the exported files read back for the layers {list(again.aux_layers)} instead of {list(head.aux_layers)}: this is a "
            "defect of the export, please report it"
        )
    rounded = deepcopy(head).to(TORCH_DTYPES[dtype])
    stored = difference(rounded, again, target.tokens)
    exact = difference(head, again, target.tokens)
    if stored.weights != 0 or stored.logits != 0:
        raise EagleError(
            f"the exported files read back differently (weights by {stored.weights:.3g}, logits by {stored.logits:.3g}): this is "
            "a defect of the export, please report it"
        )
    return [
        f"read back by eagle import: largest weight difference {stored.weights:g}, largest logit difference {stored.logits:g} "
        f"({TOKENS} random positions, {STEPS} steps), against the weights in {dtype}",
        f"rounding to {dtype}: largest weight difference {exact.weights:.3g}, largest logit difference {exact.logits:.3g}",
    ]


def _card(
    head: "DraftHead",
    made: Any,
    target: "TargetFacts",
    name: str,
    training: dict[str, Any],
    results: str | None,
    options: argparse.Namespace,
    verified: list[str],
) -> str:
    from eagle.formats.card import Card, model_card, public, section

    out = Path(options.out)
    serve = made.serve.replace(f"{out.parent}/", "") if out.is_absolute() else made.serve
    return model_card(
        Card(
            version=head.version,
            format=made.format,
            weights=sum(parameter.numel() for parameter in head.parameters()),
            dtype=options.dtype,
            target=public(name),
            target_identity=target.identity(),
            target_revision=section(training, "target").get("revision"),
            training=training,
            results=results,
            license=options.license,
            verified=verified,
            notes=made.notes,
            serve=public(serve),
            draft_tokens=None if made.drops_vocabulary else head.config.draft_vocab_size,
            aux_layers=head.aux_layers,
        )
    )


def _training(folder: Path) -> dict[str, Any]:
    from eagle.reading import read_object

    file = folder / "training.json"
    return read_object(file, remedy="remove it, or train the head again") if file.is_file() else {}


def _results(asked: str | None, folder: Path) -> tuple[str | None, list[str]]:
    """The card's results, and what is to say about those that were not taken. Only results of this very head count."""
    from eagle.eval.report.summary import card_section
    from eagle.eval.results import RESULTS, load_results
    from eagle.formats.checkpoint import head_hash

    places = [folder, folder.parent / "eval"] if asked is None else [_folder_of(Path(asked))]
    for place in places:
        if asked is None and not (place / RESULTS).is_file():
            continue
        try:
            result = load_results(place)
        except EagleError as error:
            if asked is not None:
                raise
            return None, [f"left out of the card: {error}"]
        if result.head.sha256 == head_hash(folder):
            return card_section(result), []
        if asked is None:
            return None, [f"{place / RESULTS} is of another head: left out of the card"]
        raise EagleError(
            f"{asked} holds results of another head; evaluate this one (eagle eval), or leave --results out"
        )
    return None, ["no results.json of this head was found: the card says so (eagle eval makes one)"]


def _folder_of(path: Path) -> Path:
    return path.parent if path.name == "results.json" else path
