"""results.json as dataclasses: what `eagle eval` measured, and all that its tables, page, cards and comparisons are made of.

The file is their serialisation: reading one checks it against them and names the place where it is damaged; keys that a later
version added are passed over. `schema` derives the shipped results.schema.json. What each figure means stands in
eagle/eval/figures.py; optional fields are there when they were measured.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from eagle.errors import EagleError
from eagle.eval.checks.found import Check, Exactness, kind_of, margins_of
from eagle.eval.figures import Figures, Record
from eagle.eval.results_parts import Curve, Ledger, Part, RecordedAnswer, Tuned
from eagle.reading import read_object

FORMAT = 5
"""Version of results.json, raised by a change that readers of an older file would trip over; new optional fields are none. 4:
tau counts what reached the answers (tau_raw: what 3 called tau); intervals draw prompts."""
RESULTS = "results.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodFigures(Figures):
    """Figures of a method, what its tokens are held against, and how many answers equal those."""

    check: Check
    exact: Exactness | None


class Method(Part):
    overall: MethodFigures
    categories: dict[str, MethodFigures]
    trees: list[str] = dataclasses.field(default_factory=list)
    """The draft trees' sizes, and where they come from; empty where nothing drafts by trees"""
    request_tau: list[float]
    """tau of each request, of methods that draft"""
    request_tau_raw: list[float] = dataclasses.field(default_factory=list)
    """The same before EOS and the length limit cut"""


class Divergence(Part):
    """Where an answer leaves the one it is held against."""

    method: str
    prompt: str
    turn: int
    versus: str
    index: int
    token: int | None = None
    expected: int | None = None
    margin: float
    tie_below: float | None = None
    tie: bool
    kind: Literal["tie", "router tie", "different"] | None = None
    router: dict[str, Any] | None = None
    """The closest choice between two experts on the way there"""

    @property
    def word(self) -> str:
        return kind_of({key: value for key, value in vars(self).items() if value is not None})

    @property
    def margins(self) -> str:
        return margins_of(vars(self))


class SettingResult(Part):
    """Under one sampling setting."""

    requests: int
    methods: dict[str, Method]
    """As in eval.methods; plain is always among them"""
    n_alpha: list[float] | None
    divergences: list[Divergence]
    errors: list[str]
    """Methods that are not exact; they have no speed-up"""

    def __post_init__(self) -> None:
        if "plain" not in self.methods:
            raise ValueError("methods.plain is missing")

    @property
    def main(self) -> str:
        return main_method(self.methods)

    @property
    def main_figures(self) -> MethodFigures:
        return self.methods[self.main].overall


class Summary(Part):
    """What the answers say."""

    prompts: int
    """Prompts answered"""
    settings: dict[str, SettingResult]
    """Sampling setting, such as T=0 -> its figures"""
    record: dict[str, dict[str, Record]] | None = None
    """Sampling setting -> method -> what an experiment notes of it"""
    definitions: dict[str, str]
    """Each figure's one definition"""

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError("settings is empty")


class MeasuredTarget(Part):
    """Of Target.identity(), what is shown."""

    model: str | None = None
    weights_sha256: str | None = None


class MeasuredHead(Part):
    path: str
    sha256: str | None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: str | None = None
    """In a zoo: whether these weights were measured, or those before rounding"""


class TauAtStep(Part):
    """From metrics.jsonl."""

    step: int
    decoded_tau: float | None
    """Of the real decoder on held-out prompts"""
    estimated_tau: float | None
    """Of a teacher-forced chain on validation documents"""


class Training(Part):
    """What the head was trained on and how tau rose, where its training lies beside it."""

    documents: int | None = None
    tokens: int | None = None
    supervised_tokens: int | None = None
    """Those of the tokens that are the assistant's"""
    tau: list[TauAtStep] = dataclasses.field(default_factory=list)


class AskedEval(Part):
    prompts: list[str]
    max_new_tokens: int
    methods: list[str]


class AskedDecode(Part):
    drafter: dict[str, Any]
    engine: str | None = None
    kernels: str | None = None


class Asked(Part):
    """Of the recipe, what is shown."""

    eval: AskedEval
    decode: AskedDecode


class Hardware(Part):
    cpu: str
    cores: int
    torch_threads: int
    gpus: list[str]
    system: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.torch_threads} threads, {self.system}"

    @property
    def gpu(self) -> str:
        return ", ".join(self.gpus)


class Runs(Part):
    """What the target ran on."""

    engine: str = "not recorded"
    products: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of compiled: every weight's shape -> what multiplies by it"""
    packed_bytes: int | None = None


class Skipped(Part):
    """A request that was passed over."""

    prompt: str
    turn: int
    setting: str
    reason: str


class Suite(Part):
    """What an entry of eval.prompts gave, and how a report may call it."""

    source: str
    """The entry"""
    title: str
    """What the prompts may be called"""
    is_spec_bench: bool
    """True only of Spec-Bench's own questions"""
    tasks: dict[str, int]
    """Task -> prompts asked (after eval.tasks and eval.limit)"""
    available: dict[str, int]
    """Task -> prompts that the source holds"""
    wording: str | None
    """Where the prompts' wording comes from"""
    note: str | None
    """What a report must say about them"""


class Sharing(Part):
    processes: int
    """That the last start of this evaluation had"""
    requests_by_sharing: dict[str, int]
    """How many processes shared the machine -> requests answered so"""
    note: str | None
    """What a report must say about the times"""


class Results(Summary):
    """An evaluation."""

    format: Literal[5]
    """eagle.eval.results.FORMAT"""
    created: str
    """ISO 8601, UTC"""
    identity: dict[str, Any]
    """What must be equal for these results to stand for another call of eagle eval"""
    target: MeasuredTarget
    target_dtype: str
    runs: Runs = Runs()
    head: MeasuredHead
    training: Training | None = None
    recipe: dict[str, Any]
    """The resolved recipe"""
    asked: Annotated[Asked, Field(validation_alias="recipe")]
    hardware: Hardware
    versions: dict[str, str]
    commit: str | None
    """Of this package's checkout; null when installed"""
    peak_memory: dict[str, int]
    """Of the whole evaluation (of its first process), loading included: rss_bytes, and of each GPU's allocator cudaN_bytes"""
    skipped: list[Skipped]
    suites: list[Suite]
    processes: Sharing
    throughput: list[Curve] = dataclasses.field(default_factory=list)
    """A curve per sampling setting; empty when eval.batches is [1]"""
    ledger: Ledger | None = None
    """null where eval.ledger is off or nothing drafts"""
    tune: Tuned | None = None
    """null where it was not tuned"""
    trees: list[RecordedAnswer] = dataclasses.field(default_factory=list)


Kind = TypeVar("Kind")


def parse(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """A part of results.json, or all of it (`Results`). Raises pydantic's ValidationError where it is none."""
    of: Any = kind
    found: Kind = _adapter(of).validate_json(json.dumps(values), strict=True)
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def schema() -> dict[str, Any]:
    """JSON Schema of results.json."""
    made = _adapter(Results).json_schema()
    required = list(dict.fromkeys(made["required"]))  # recipe is read twice
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "results.json of eagle eval"}
    return {**made, **title, "required": required}


def read_values(folder: Path) -> dict[str, Any]:
    """results.json in `folder` as it stands there, checked. Raises EagleError when there is none that this version reads."""
    path = folder / RESULTS
    if not path.is_file():
        raise EagleError(f"there is no {RESULTS} in {folder}; give the folder that eagle eval wrote (OUTPUT_DIR/eval)")
    values = read_object(path, remedy="delete it and measure again with eagle eval RECIPE")
    found = values.get("format")
    if found != FORMAT:
        raise EagleError(
            f"{path} has format {found}, this version of eagle reads format {FORMAT}; run eagle eval RECIPE again (it "
            "takes over the answers beside it that it knows)"
        )
    try:
        parse(Results, values)
    except ValidationError as error:
        first, *others = error.errors()
        place = ".".join(map(str, ("results", *first["loc"])))
        what = "is missing" if first["type"] == "missing" else f"is {first['input']!r:.40}: {first['msg']}"
        more = f" (and {len(others)} more)" if others else ""
        raise EagleError(
            f"{path} is damaged or was changed: {place} {what}{more}; delete it and run eagle eval RECIPE again (the answers "
            "beside it are kept)"
        ) from error
    return values


def load_results(folder: Path) -> Results:
    """The results that lie in `folder`. Raises EagleError when there are none, or none that this version reads."""
    return parse(Results, read_values(folder))


def read_results(folder: Path) -> dict[str, Any] | None:
    """`read_values`; None where that raises."""
    try:
        return read_values(folder)
    except EagleError:
        return None


def main_method(methods: Iterable[str]) -> str:
    """The one whose categories and time split are shown: the EAGLE-2 tree, else the first drafter of ours, else plain."""
    drafting = [name for name in methods if name not in ("hf", "hf-lookup", "hf-assisted", "plain")]
    return "eagle2" if "eagle2" in drafting else (drafting or ["plain"])[0]
