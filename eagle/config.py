"""A recipe: one YAML file that describes one head, from its conversations to its evaluation.

Every section is a frozen dataclass; the text under a field says what it is and its unit, and is what
`eagle train --help` prints. Parsing (YAML, then `--section.key value` overrides) is jsonargparse's; what is added here
is that an unknown key is named together with the nearest known one. `read_recipe` is the only way in.
"""

import argparse
import copy
import dataclasses
import datetime
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from eagle.data_config import DataConfig as DataConfig
from eagle.data_config import FeaturesConfig as FeaturesConfig
from eagle.data_config import RegenerateConfig as RegenerateConfig
from eagle.decode_config import DRAFTERS as DRAFTERS
from eagle.decode_config import RULES as RULES
from eagle.decode_config import DecodeConfig as DecodeConfig
from eagle.decode_config import DrafterOptions, RuleOptions
from eagle.errors import EagleError, check_choices
from eagle.eval_config import EvalConfig as EvalConfig
from eagle.eval_config import TuneConfig as TuneConfig
from eagle.train_config import TrainConfig as TrainConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen causal LM that the head drafts for."""

    model: str
    """A local folder, a hub id, a .gguf file, or `package:NAME/FILE.gguf` for a file inside an installed Python package."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' dtype; auto: what the checkpoint says (float32 for a .gguf file)."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: cuda where there is one. Of several processes each has a GPU of its own: auto or cuda."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""
    date: str = "2024-07-26"
    """YYYY-MM-DD: today, to chat templates that read the date (`strftime_now`), in every stage and at every time. The default is
    the date that Llama 3's templates fall back to."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))  # a torch.dtype is one too
        check_choices(self, "target")
        try:
            date = datetime.date.fromisoformat(str(self.date))  # YAML makes a date of an unquoted one
        except ValueError:
            raise EagleError(f"target.date is {self.date!r}, expected YYYY-MM-DD") from None
        object.__setattr__(self, "date", date.isoformat())


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The draft head. Its layer takes the shape of the target's (GQA, head size, RoPE, norm epsilon) unless said otherwise."""

    version: Literal["eagle1", "eagle3"] = "eagle1"
    """eagle1: the EAGLE-1 / EAGLE-2 head (their weights are the same; the trees differ). eagle3: the EAGLE-3 head, which
    looks at several layers of the target and has an LM head of its own."""
    aux_layers: tuple[int, ...] | None = None
    """eagle3: the hidden states it looks at, by the number of layers applied (Hugging Face's hidden_states index), ascending;
    null: the published [2, L//2, L-3] of a target of L layers."""
    lm_head_init: Literal["target", "random"] = "target"
    """eagle3: its LM head starts as the target's rows of the draft vocabulary, or random."""
    fc_init: Literal["least_squares", "random"] = "least_squares"
    """Where a new head starts. least_squares: fc is solved for, to predict the next feature linearly, and attention and MLP add
    nothing yet (eagle/train/least_squares.py): seconds that save much of a short run; random: as published."""
    fc_bias: bool = False
    """eagle1: bias of the fusing projection; servers such as vLLM cannot load one."""
    draft_vocab_size: int | None = None
    """Draft only this many tokens, the most frequent ones of the training store's supervised positions: drafting's LM head
    costs so much less. null: all of the target's."""
    init_from: str | None = None
    """Start from this head (a folder or hub id) instead of random weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One head, end to end. Relative paths are relative to the current directory."""

    output_dir: str
    """Where everything goes: data/, features/, train/, head/, eval/."""
    target: TargetConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    features: FeaturesConfig = dataclasses.field(default_factory=FeaturesConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tune: TuneConfig = dataclasses.field(default_factory=TuneConfig)

    @property
    def data_dir(self) -> Path:
        return Path(self.output_dir) / "data"

    @property
    def store_dir(self) -> Path:
        return Path(self.output_dir) / "features"

    @property
    def train_dir(self) -> Path:
        return Path(self.output_dir) / "train"

    @property
    def head_dir(self) -> Path:
        return Path(self.output_dir) / "head"

    @property
    def eval_dir(self) -> Path:
        return Path(self.output_dir) / "eval"


def as_dict(config: Any) -> dict[str, Any]:
    """A recipe or a section as plain YAML / JSON values (tuples become lists)."""
    result: dict[str, Any] = _plain(config)
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {KIND: value.name} if isinstance(value, DrafterOptions | RuleOptions) else {}
        return kind | {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


KIND = "kind"
_KINDS: dict[str, Mapping[str, type]] = {"decode.drafter": DRAFTERS, "decode.rule": RULES}
"""Keys that are one of several kinds: a kind's name, or a section with `kind` (else: the default's) and its options."""
Kinds = Mapping[str, Any]
"""The class that each key of _KINDS has in one recipe."""


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies `--section.key value` overrides.

    Raises EagleError for a missing or malformed file, an unknown key (with the nearest known one), a missing required
    key or a value of the wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise EagleError(f"recipe {path} does not exist; give the path of a YAML recipe (examples are in configs/)")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EagleError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise EagleError(f"recipe {path} holds {type(values).__name__}, expected a mapping of sections (target: ...)")
    return recipe_of(values, overrides, where=str(path))


def recipe_of(values: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "the command line") -> Recipe:
    """The recipe of these sections, `--section.key value` overrides applied. Raises EagleError as read_recipe; where: who
    gave the values, for the message."""
    sections = copy.deepcopy(dict(values))
    kinds, overrides = _take_kinds(sections, overrides, where)
    _check_keys(sections, Recipe, kinds, where=where)
    for argument in overrides:
        key = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and key not in set(_flat_fields(Recipe, kinds)):
            raise EagleError(unknown_key(key, kinds))
    parser = _parser(kinds)
    try:
        parsed = parser.parse_args([f"--config={yaml.safe_dump(sections)}", *overrides])
        instance = parser.instantiate_classes(parsed)
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(error, EagleError):
            raise
        raise EagleError(f"{where}: {_readable(str(error))}") from error
    return _as(Recipe, instance, kinds)


def sections_help(names: Sequence[str] = ()) -> str:
    """The keys of these sections of a recipe, each with its type and default, and where the others' are told; (): all."""
    known = [field.name for field in dataclasses.fields(Recipe) if field.name != "output_dir"]
    named = {key: dataclasses.make_dataclass("Kind", [], namespace={"name": _default_kind(key).name}) for key in _KINDS}
    texts = ["Keys of a recipe; each can be given as --section.key VALUE, and --output_dir DIR."]
    for name in names or known:
        parser = ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
        parser.add_class_arguments(_of_kinds(Recipe, named), skip={"output_dir", *known} - {name})
        texts.append(parser.format_help().strip())
        for place, kind in ((key, kind) for key, known in _KINDS.items() for kind in known.values()):
            if not place.startswith(f"{name}."):
                continue
            if not dataclasses.fields(kind):
                texts.append((kind.__doc__ or "").strip())
                continue
            parser = ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
            parser.add_class_arguments(kind, place)
            texts.append(parser.format_help().strip())
    if others := [name for name in known if names and name not in names]:
        texts.append(f"Keys of {', '.join(others)}: eagle run --help")
    return "\n\n".join(texts)


def _parser(kinds: Kinds) -> ArgumentParser:
    """What reads a recipe: `--config RECIPE` and one option per key."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config", help="The recipe (YAML).")
    parser.add_class_arguments(_of_kinds(Recipe, kinds))
    return parser


def _of_kinds(cls: type, kinds: Kinds, prefix: str = "") -> type:
    """The dataclass with the class that `kinds` says for each key of several kinds: what jsonargparse can read exactly."""
    changed: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(cls):
        kind = kinds.get(prefix + field.name)
        if kind is None and _is_section(field.type):
            kind = _of_kinds(field.type, kinds, f"{prefix}{field.name}.")
        if kind is not None and not dataclasses.fields(kind):  # jsonargparse takes no section without keys
            changed.append((field.name, str, dataclasses.field(default=kind.name)))
        elif kind is not None and kind is not field.type:
            changed.append((field.name, kind, dataclasses.field(default_factory=kind)))
    if not changed:
        return cls
    unchecked = {"__post_init__": lambda self: None, "__doc__": cls.__doc__}  # `_as` makes, and so checks, the real one
    return dataclasses.make_dataclass(
        cls.__name__, changed, bases=(cls,), namespace=unchecked, frozen=True, kw_only=True
    )


def _as(cls: Any, instance: Any, kinds: Kinds, prefix: str = "") -> Any:
    """The instance of `_of_kinds(cls, kinds)` as one of `cls` itself."""
    values = {}
    for field in dataclasses.fields(cls):
        value, kind = getattr(instance, field.name), kinds.get(prefix + field.name)
        if kind is None and _is_section(field.type):
            value = _as(field.type, value, kinds, f"{prefix}{field.name}.")
        values[field.name] = value if kind is None or dataclasses.fields(kind) else kind()
    return cls(**values)


def _is_section(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _take_kinds(values: dict[str, Any], overrides: Sequence[str], where: str) -> tuple[dict[str, type], list[str]]:
    """Which kind each key of several kinds has, by the overrides, else the values, else the default; takes the kinds' names
    out of both. Options of another kind than the override's go with it."""
    found: dict[str, type] = {}
    for key, known in _KINDS.items():
        section, name = key.split(".")
        inside = values.get(section)
        given = inside.get(name) if isinstance(inside, dict) else None
        options = {KIND: given} if isinstance(given, str) else given if given is not None else {}
        if not isinstance(options, dict):
            raise EagleError(
                f"{where}: {key} is {given!r}, expected one of {', '.join(known)}, or a section with {KIND}: NAME"
            )
        said = options.pop(KIND, _default_kind(key).name)
        chosen, overrides = _overridden(key, overrides)
        if chosen not in (None, said):
            said, options = chosen, {}
        if said not in known:
            near = difflib.get_close_matches(str(said), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise EagleError(f"{where}: {key} is {said!r}, expected one of {', '.join(known)}{hint}")
        found[key] = known[said]
        if isinstance(inside, dict):
            inside.pop(name, None)
            if options:
                inside[name] = options
    return found, list(overrides)


def _default_kind(key: str) -> Any:
    return type(getattr(DecodeConfig(), key.split(".")[1]))


def _overridden(key: str, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The kind that the overrides name, and the overrides without it."""
    chosen, kept = None, list[str]()
    words = iter(overrides)
    for word in words:
        name, equals, value = word.partition("=")
        if name in (f"--{key}", f"--{key}.{KIND}"):
            chosen = value if equals else next(words, "")
        else:
            kept.append(word)
    return chosen, kept


def _flat_fields(cls: type, kinds: Kinds, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        yield name
        kind = kinds.get(name, field.type)
        if _is_section(kind):
            yield from _flat_fields(kind, kinds, f"{name}.")


def _check_keys(values: Mapping[str, Any], cls: type, kinds: Kinds, *, where: str, prefix: str = "") -> None:
    fields = {field.name: kinds.get(prefix + field.name, field.type) for field in dataclasses.fields(cls)}
    for key, value in values.items():
        kind = fields.get(key)
        if kind is None:
            raise EagleError(f"{where}: {unknown_key(f'{prefix}{key}', kinds)}")
        if _is_section(kind):
            if not isinstance(value, Mapping):
                raise EagleError(
                    f"{where}: {prefix}{key} is {value!r}, expected a section of keys (key: value lines below it)"
                )
            _check_keys(value, kind, kinds, where=where, prefix=f"{prefix}{key}.")


def unknown_key(key: str, kinds: Kinds | None = None) -> str:
    """What to say of a key that there is not: the kinds that have it, or the nearest one that there is."""
    kinds = {key: _default_kind(key) for key in _KINDS} if kinds is None else kinds
    section, _, option = key.rpartition(".")
    if section in kinds:
        owners = [
            name for name, kind in _KINDS[section].items() if option in {f.name for f in dataclasses.fields(kind)}
        ]
        if owners:
            return f"{key} is read by {', '.join(owners)}, and {section} is {kinds[section].name}; change that, or leave it out"
    near = difflib.get_close_matches(key, list(_flat_fields(Recipe, kinds)), n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]}?" if near else f"sections are {', '.join(f.name for f in dataclasses.fields(Recipe))}"
    )
    return f"unknown key {key}; {hint}"


def _readable(text: str) -> str:
    """jsonargparse's message in this project's words: what was got, what was expected."""
    found = re.search(r'key "(?P<key>[\w.]+)":\s+Expected an? (?P<kind>.+?)\.? Got value: (?P<got>.*)', text, re.DOTALL)
    either = re.search(
        r'key "(?P<key>[\w.]+)":.*?Subtypes: \[(?P<kinds>.*?)\]\n.*Given value: (?P<got>.*)', text, re.DOTALL
    )
    if either is not None:
        kinds = re.sub(r"<class '(\w+)'>|typing\.", r"\1", either["kinds"]).replace("NoneType", "null").split(", ")
        return f"{either['key']} is {either['got'].strip().splitlines()[0]}, expected {' or '.join(kinds)}"
    if found is None:
        return "\n".join(text.strip().splitlines()[:6])
    kind = re.sub(r"<class '(\w+)'>|typing\.", r"\1", found["kind"])
    return f"{found['key']} is {found['got'].strip().splitlines()[0]}, expected {kind}"
