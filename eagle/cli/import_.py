"""`eagle import`: another project's head becomes a folder of this one; what was assumed is said."""

import argparse
import glob
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.formats.read import ReadHead
    from eagle.formats.target_facts import TargetFacts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle import`."""
    parser.add_argument("source", metavar="SOURCE", help="a head's folder or hub id, of any format listed below")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="the head's target (as eagle generate --target): checks the fit, settles layers",
    )
    add_trust(parser)
    parser.add_argument("--format", metavar="NAME", help="what the files are, where the detection is wrong")
    parser.add_argument("--revision", metavar="REV", help="the hub revision of SOURCE (branch, tag or commit)")
    parser.add_argument(
        "--norm-before-residual",
        choices=["true", "false"],
        help="EAGLE-3: whether the residual is the normed feature, where config.json does not tell (or is wrong)",
    )
    parser.add_argument("--rope-theta", type=float, metavar="THETA", help="RoPE base, where config.json is wrong")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declares --trust-remote-code. A head's papers are no reason to run code: whoever made the folder wrote them."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the target's own code, where its repository has some"
    )


_EPILOG = """\
Formats: reference (EAGLE-1, 2 and 3), specforge, speculators, angelslim, modelopt, and the folders that eagle export
writes (vllm, sglang, trtllm). Weights: safetensors or pytorch_model.bin (read without running code), also sharded.
Example:
  eagle import yuhuili/EAGLE3-LLaMA3.1-Instruct-8B heads/llama --target meta-llama/Llama-3.1-8B-Instruct
"""


def import_head(options: argparse.Namespace) -> None:
    """Reads, checks against the target, prints what was assumed, writes."""
    from eagle.formats.files import head_folder
    from eagle.formats.read import Overrides, read_head
    from eagle.formats.registry import format_named

    out = Path(options.out)
    refuse_existing(out, head=options.source, target=options.target, overwrite=options.overwrite)
    if options.rope_theta is not None and not 0 < options.rope_theta < float("inf"):
        raise EagleError(f"--rope-theta is {options.rope_theta:g}, expected a positive number such as 10000")
    format = None if options.format is None else format_named(options.format)
    target = None
    if options.target is not None:
        folder = head_folder(options.source, options.revision)
        target = target_facts(options.target, folder, trust_remote_code=options.trust_remote_code)
    told = options.norm_before_residual
    overrides = Overrides(rope_theta=options.rope_theta, norm_before_residual=None if told is None else told == "true")
    read = read_head(options.source, revision=options.revision, format=format, target=target, overrides=overrides)
    write_imported(read, out, source=options.source, target=target, say=print)


def write_imported(
    read: "ReadHead", out: Path, *, source: str, target: "TargetFacts | None", say: Callable[[str], Any]
) -> None:
    """Checks a head that was read against its target, says what was assumed, and writes it as this project's folder.

    Raises EagleError when it does not fit, or carries layers of a target that there is none to compare with.
    """
    from eagle.formats.checkpoint import check_fits, save_head
    from eagle.formats.format import VERSION_NAMES
    from eagle.formats.target_facts import settings_told

    head, version = read.head, read.head.version
    kind = "this project's" if read.format.name == "eagle" else read.format.title
    say(f"{source}: {VERSION_NAMES[version]} head, {kind} format ({read.evidence}; {read.files.weights})")
    for line in read.assumptions:
        say(f"  {line}")
    say(f"  {_biases(read)}")
    if read.carried and target is None:
        raise EagleError(
            f"the file carries {', '.join(read.carried)}, which must be the target's own; give --target MODEL to compare"
        )
    if target is not None:
        head.embed_tokens_VH = read.carried.get("embed_tokens.weight")
        check_fits(head, target)
        if "lm_head.weight" in read.carried:
            check_lm_head(read.carried["lm_head.weight"], target)
        for name in read.carried:
            say(f"  {name} equals the target's: left out")
        if head.config.target_identity is None:  # the name and shapes; that the weights are those nobody can tell
            fields = ("architecture", "hidden_size", "num_layers", "vocab_size")
            head.config.target_identity = {"model": target.name} | {key: getattr(target, key) for key in fields}
        layers = f", aux layers c = {list(head.aux_layers)} of {target.num_layers}" if version == "eagle3" else ""
        say(f"fits target {target.name}: width {target.hidden_size}, {target.vocab_size} tokens{layers}")
    else:
        say("not checked against a target: give --target MODEL")
    if lacking := _undrafted_ends(read, target):
        say(f"its draft vocabulary lacks the EOS ids {lacking}: the end of an answer is never drafted")
    origin: dict[str, Any] = {
        "imported_from": source,
        "format": read.format.name,
        "assumptions": list(read.assumptions),
    }
    if target is not None and (settings := settings_told(target.settings)):
        origin["recipe"] = {"target": {"model": target.name, **settings}}
    save_head(head, out, extra=origin)
    weights = sum(parameter.numel() for parameter in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    say(f"{out}: {weights:,} weights, {dtype}")


def _undrafted_ends(read: "ReadHead", target: "TargetFacts | None") -> list[int]:
    """EOS ids, the target's or else config.json's, that a reduced draft vocabulary leaves out."""
    from eagle.formats.format import lookup
    from eagle.formats.keys import LAYER_CONFIG
    from eagle.target.loading import eos_token_ids

    vocabulary, values = read.head.vocabulary, read.files.values
    if vocabulary is None:
        return []
    if target is not None:
        return vocabulary.without(eos_token_ids(target.settings))
    told = [lookup(values, ("eos_token_id",)), lookup(values, (LAYER_CONFIG, "eos_token_id"))]
    ids = [one for ids in told for one in (ids if isinstance(ids, list) else [ids])]
    return vocabulary.without([one for one in ids if type(one) is int])


def refuse_existing(out: Path, *, head: str, target: str | None, overwrite: bool) -> None:
    """Raises EagleError for a folder that holds something and was not given up, or must not be: it is replaced as a whole.

    head, target: what is read, which may lie in folders. A folder that a killed command had renamed aside is put back first.
    """
    from eagle.files import clear_leftovers

    clear_leftovers(out.parent, glob.escape(out.name))
    if out.is_file():
        raise EagleError(f"{out} is a file, expected a folder to write; name another")
    if _lies_in(out, Path.cwd()):
        raise EagleError(
            f"{out} is the folder that you are in, or above it, and OUT is replaced as a whole; name one in it"
        )
    if not out.is_dir() or not any(out.iterdir()):
        return
    for what, name in (("head", head), ("target", target)):
        if name is not None and _lies_in(out, Path(name)):
            raise EagleError(f"{out} holds the {what} that is read ({name}); name another folder")
    if not overwrite:
        raise EagleError(f"{out} exists and is not empty; name another folder, or add --overwrite to replace it")
    why = _no_head(out)
    if why is not None:
        raise EagleError(f"{out} is no head's folder ({why}), and --overwrite replaces heads alone; name another")


def _lies_in(folder: Path, path: Path) -> bool:
    return path.exists() and folder.resolve() in (path.resolve(), *path.resolve().parents)


def _no_head(folder: Path) -> str | None:
    """Why a folder is not a head's, of this project or of another; None: it is."""
    from eagle.formats.format import SIDECAR
    from eagle.formats.keys import LAYER_CONFIG
    from eagle.formats.own import MODEL_TYPES
    from eagle.reading import read_object

    if not (folder / "config.json").is_file():
        return "no config.json"
    try:
        values = read_object(folder / "config.json", remedy="")
    except EagleError:
        return "its config.json is damaged"
    layers = values.get("num_hidden_layers")
    if values.get("model_type") in MODEL_TYPES or (folder / SIDECAR).is_file() or LAYER_CONFIG in values or layers == 1:
        return None
    return f"num_hidden_layers is {layers}, a head has 1"


def target_facts(model: str, folder: Path, *, trust_remote_code: bool) -> "TargetFacts":
    """What head files need to know of a target, from its config, loaded as the training of the head in `folder` loaded it.

    Raises EagleError when there is no such model.
    """
    from eagle.formats.target_facts import TargetFacts, settings_as_trained

    return TargetFacts(settings_as_trained(model, folder, trust_remote_code=trust_remote_code, device="cpu"))


def check_lm_head(weight_VH: Any, target: "TargetFacts") -> None:
    """Raises EagleError when an EAGLE-1 head's file carries another lm_head than its target's: it would be dropped."""
    import torch

    own_VH = target.tokens.lm_head_VH
    if weight_VH.shape != own_VH.shape or not torch.allclose(
        weight_VH.float(), own_VH.detach().float(), rtol=1e-2, atol=1e-3
    ):
        raise EagleError(
            f"the head's lm_head.weight {tuple(weight_VH.shape)} is not that of target {target.name} {tuple(own_VH.shape)}: an "
            "EAGLE-1 head drafts with its target's LM head; use the target that it was trained for"
        )


def _biases(read: "ReadHead") -> str:
    config = read.head.config
    found = {
        "fc": getattr(config, "fc_bias", False),
        "q/k/v": config.attention_bias,
        "MLP": config.mlp_bias,
    }
    told = [name for name, there in found.items() if there]
    return f"biases (as the tensors tell): {', '.join(told) or 'none'}"
