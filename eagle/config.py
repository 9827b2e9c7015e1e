"""A recipe: one YAML file that describes one head, from its conversations to its evaluation.

Every section is a frozen dataclass; the text under a field says what it is and its unit, and is what
`eagle train --help` prints. Parsing (YAML, then `--section.key value` overrides) is jsonargparse's; what is added here
is that an unknown key is named together with the nearest known one. `read_recipe` is the only way in.
"""

import argparse
import dataclasses
import datetime
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from eagle.data_config import DataConfig as DataConfig
from eagle.data_config import FeaturesConfig as FeaturesConfig
from eagle.data_config import RegenerateConfig as RegenerateConfig
from eagle.errors import EagleError
from eagle.train_config import TrainConfig as TrainConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def check_choices(section: object, name: str) -> None:
    """Raises EagleError for a value that a section (a dataclass, `name` in the recipe) does not know, however it was made."""
    for field, hint in get_type_hints(type(section)).items():
        if get_origin(hint) is Literal and (value := getattr(section, field)) not in get_args(hint):
            raise EagleError(f"{name}.{field} is {value!r}, expected one of {', '.join(map(str, get_args(hint)))}")


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
class DecodeConfig:
    """How drafts are made and verified.

    With budget, top_k, depth and level_cost all left open, eagle2 takes the tree that `eagle tune` stored beside the head for
    this machine, engine and dtype, else the one published for EAGLE-2 and EAGLE-3. Where any of them is given, the others
    are the published ones.
    """

    drafter: Literal["eagle2", "static", "chain", "model", "ngram", "none"] = "eagle2"
    """What proposes. eagle2: the head, in a tree of its most confident guesses; static: the head, in a tree of fixed shape
    (EAGLE-1); chain: the head, one guess after the other; model: a small language model, in eagle2's tree (top_k 1: a
    chain); ngram: what followed the last tokens before (prompt lookup); none: plain decoding."""
    budget: int | None = None
    """Nodes per verification, the root included; null: tuned, or 60 as published."""
    top_k: int | None = None
    """Children per expanded node, and nodes expanded per level; null: tuned, or 10 as published."""
    depth: int | None = None
    """Levels below the root; null: tuned, or 6 (8 for an EAGLE-3 head) as published."""
    level_cost: float | None = None
    """Dynamic depth of eagle2, chain and model: no further level is drafted when what it can be expected to add, in accepted
    tokens, is below this. Worth while: about tau times the share of a cycle that one draft forward takes. 0: the full depth;
    null: tuned, or 0 as published."""
    tree_file: str | None = None
    """static: a JSON list of child-rank paths, [[0], [1], [0, 0], ...]; null: the 25 published for EAGLE-1."""
    draft_model: str | None = None
    """model: a folder, hub id or .gguf file with the target's tokenizer."""
    ngram_min: int = 1
    """ngram: shortest suffix looked up, in tokens."""
    ngram_max: int = 4
    """ngram: longest one, tried first."""
    ngram_continuations: int = 1
    """ngram: different continuations per tree; 1: a chain."""
    rule: Literal["coupled", "rejection", "block", "top_k", "typical"] = "coupled"
    """Verification rule. coupled: plain decoding's text, token for token; rejection, block (chains: top_k 1): the target's
    distribution; top_k, typical: lossy."""
    rule_top_k: int = 3
    """Rule top_k, wherever it is named: a draft is accepted among so many of the target's likeliest tokens."""
    rule_epsilon: float = 0.3
    """Rule typical, wherever it is named: probability that is always enough."""
    rule_delta: float = 0.09
    """Rule typical: else a draft needs more than this times exp(-entropy), so that flat distributions accept less likely ones."""
    children: Literal["auto", "coupled", "sampled", "top"] = "auto"
    """How children are chosen: with verification's noise, drawn without replacement, or the top-k; auto: as the rule wants."""
    engine: Literal["auto", "eager", "compiled", "cudagraph"] = "auto"
    """auto: cudagraph where it can be captured, else compiled where it can be packed, else eager. eager: PyTorch as it is.
    compiled: linear layers by the product that is fastest here (CPU, float32; a second copy of the weights), and attention
    whose result for a token does not depend on its neighbours. cudagraph: forwards of fixed shapes, captured as CUDA graphs
    and replayed (one CUDA device)."""
    kernels: Literal["auto", "reference", "triton"] = "auto"
    """What runs tree attention and commits. auto: Triton on CUDA devices, where it takes the tensors, else PyTorch; reference:
    PyTorch; triton: Triton, or an error that says why it cannot."""

    def __post_init__(self) -> None:
        check_choices(self, "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """`eagle eval`: acceptance and speed on prompts, against Hugging Face generate and our own plain loop."""

    prompts: tuple[str, ...] = ("shipped:mt_bench",)
    """`suite:NAME` (spec-bench-open, mt-bench, humaneval, gsm8k, alpacaeval-open, mbpp), prompt files (question_id / category /
    turns, or any conversation shape; Spec-Bench's own question.jsonl is recognised), hub ids or `shipped:NAME`."""
    split: str = "train"
    """Split of hub data sets."""
    tasks: tuple[str, ...] | None = None
    """Only these tasks or categories of the prompts; null: all."""
    limit: int | None = None
    """Prompts per task of a suite, per source of anything else, spread evenly over its categories."""
    methods: tuple[str, ...] = ("hf", "plain", "eagle2", "chain")
    """What is compared, in one interleaved run. hf: Hugging Face generate; hf-lookup: its prompt lookup; hf-assisted: its
    assisted decoding with decode.draft_model; plain: our loop without drafting (always needed); eagle2, static, chain, ngram,
    model: our drafters, each also as DRAFTER@RULE, such as eagle2@rejection; tuned: eagle2 with the tree of eagle tune;
    default: with nothing said of its tree (eagle2 itself: decode.budget, top_k and depth, or what was published)."""
    sampling: tuple[str, ...] = ("T=0",)
    """Settings every method answers under: "T=0", "T=0.7", "T=1 top_p=0.9" (top_k and min_p likewise)."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    warmup_prompts: int = 1
    """Prompts run through every method first and not counted."""
    chain_depth: int = 5
    """Length of the draft chain that measures n-alpha."""
    check_rows: int = 1600
    """`--check distribution`: continuations drawn per rule and setting; with fewer, mild faults are not told apart."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: with more than [1], throughput against batch size is measured too, plain and drafted (decode.drafter)
    alternately."""
    ledger: Literal["on", "off"] = "on"
    """The cost ledger: after the requests, the parts of a cycle are timed by nodes (and by eval.batches), the speed-up is
    predicted from them and held against the measured one, and what holds it back is named. Up to minutes per setting on a CPU,
    more with every size of eval.batches."""
    seed: int = 0
    """Seed of the requests' noise and of the bootstrap intervals."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("warmup_prompts", 0),
            ("chain_depth", 1),
            ("check_rows", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None or value < least:
                raise EagleError(f"eval.{name} is {value}, expected {least} or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """`eagle tune`: the fastest draft tree for the head on this machine, kept beside the head (see decode)."""

    prompts: tuple[str, ...] = ()
    """Prompts to tune with, as eval.prompts; none: those of the held-out conversations, or, without prepared data, what
    eval.limit leaves of eval.prompts."""
    count: int = 24
    """That many of them: the first half of them chooses, the second confirms."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    sampling: tuple[str, ...] = ("T=0",)
    """Settings, as eval.sampling; decoding takes the tree of the nearest temperature."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes, a tree for each; decoding takes that of the nearest size."""
    confirm: int = 3
    """Best forecasts that are decoded with in earnest, beside the published trees, a chain and plain decoding."""


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

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


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
    _check_keys(values, Recipe, where=path)
    for argument in overrides:
        key = argument.removeprefix("--").split("=")[0]
        if argument.startswith("--") and key not in _FIELDS:
            raise EagleError(_did_you_mean(key))
    parser = recipe_parser()
    try:
        parsed = parser.parse_args([f"--config={path}", *overrides])
        instance = parser.instantiate_classes(parsed)
    except (ArgumentError, TypeError, ValueError) as error:
        raise EagleError(f"{path}: {_readable(str(error))}") from error
    sections = {field.name: getattr(instance, field.name) for field in dataclasses.fields(Recipe)}
    return Recipe(**sections)


def sections_help(names: Sequence[str] = ()) -> str:
    """The keys of these sections of a recipe, each with its type and default, and where the others' are told; (): all."""
    known = [field.name for field in dataclasses.fields(Recipe) if field.name != "output_dir"]
    texts = ["Keys of a recipe; each can be given as --section.key VALUE, and --output_dir DIR."]
    for name in names or known:
        parser = ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
        parser.add_class_arguments(Recipe, skip={"output_dir", *known} - {name})
        texts.append(parser.format_help().strip())
    if others := [name for name in known if names and name not in names]:
        texts.append(f"Keys of {', '.join(others)}: eagle run --help")
    return "\n\n".join(texts)


def recipe_parser() -> ArgumentParser:
    """What reads a recipe: `--config RECIPE` and one option per key."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config", help="The recipe (YAML).")
    parser.add_class_arguments(Recipe)
    return parser


def _flat_fields(cls: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            yield from _flat_fields(field.type, f"{prefix}{field.name}.")


_FIELDS = tuple(_flat_fields(Recipe))


def _check_keys(values: Mapping[str, Any], cls: type, *, where: Path, prefix: str = "") -> None:
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    for key, value in values.items():
        kind = fields.get(key)
        if kind is None:
            raise EagleError(f"{where}: {_did_you_mean(f'{prefix}{key}')}")
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, Mapping):
                raise EagleError(
                    f"{where}: {prefix}{key} is {value!r}, expected a section of keys (key: value lines below it)"
                )
            _check_keys(value, kind, where=where, prefix=f"{prefix}{key}.")


def _did_you_mean(key: str) -> str:
    near = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]}?" if near else f"sections are {', '.join(f.name for f in dataclasses.fields(Recipe))}"
    )
    return f"unknown key {key}; {hint}"


def _readable(text: str) -> str:
    """jsonargparse's message in this project's words: what was got, what was expected."""
    found = re.search(r'key "(?P<key>[\w.]+)":\s+Expected an? (?P<kind>.+?)\.? Got value: (?P<got>.*)', text, re.DOTALL)
    if found is None:
        return "\n".join(text.strip().splitlines()[:6])
    kind = re.sub(r"<class '(\w+)'>|typing\.", r"\1", found["kind"])
    return f"{found['key']} is {found['got'].strip().splitlines()[0]}, expected {kind}"
