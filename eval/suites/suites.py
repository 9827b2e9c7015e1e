"""Suites: sets of shipped prompts under a name, `suite:NAME`, with the tasks they are reported by.

The files and their licences are in prompts/LICENSES.md. What a suite is called in a report, and what must be said about it
there, is written here once.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType

from eagle.errors import EagleError

PREFIX = "suite:"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_TASK: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(MT_BENCH, "mt_bench"),
        "translation": "translation",
        "summarization": "summarization",
        "qa": "qa",
        "math_reasoning": "math_reasoning",
        "rag": "rag",
    }
)
"""Spec-Bench's 13 categories -> the six tasks it publishes (Xia et al. 2024; evaluation/speed.py of its repository)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Prompts of one shipped file."""

    file: str
    """As in shipped:FILE"""
    task: str | None = None
    """All of them are of this task; None: Spec-Bench's folding of their categories."""
    only: str | None = None
    """Only this category of the file"""
    count: int | None = None
    """That many, spread evenly; None: all"""
    first_id: int = 0
    """Added to the file's question ids, which must not clash within a suite."""
    before: str = ""
    """Put before the first turn: the wording that chat models are asked with."""
    replace: tuple[str, str] = ("", "")
    """Text of the first turn -> what stands there instead, once"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A set of prompts with a name."""

    name: str
    title: str
    parts: tuple[Part, ...]
    by_task: bool = False
    """Figures by task; False: by the files' own categories"""
    wording: str
    """Where the wording of the prompts comes from"""
    note: str | None = None
    """What a report must say"""


_ALL = (
    Suite(
        name="spec-bench-open",
        title="spec-bench-open",
        by_task=True,
        parts=(
            Part(file="spec_bench_open"),
            Part(file="translation_tatoeba", task="translation", only="translation_de", count=80, first_id=1000),
            Part(file="summarization_wiki", task="summarization", count=80, first_id=2000),
        ),
        wording="Spec-Bench's questions and its instructions for translation and summarisation (Xia et al. 2024)",
        note="This is not Spec-Bench: 320 of its 480 questions (mt_bench, qa, math_reasoning, rag) are its own; German sentences "
        "of Tatoeba stand in for its translation (WMT14) and Wikipedia passages for its summarisation (CNN/DailyMail).",
    ),
    Suite(
        name="mt-bench",
        title="MT-Bench",
        parts=(Part(file="mt_bench", task="mt_bench"),),
        wording="MT-Bench's 80 questions of two turns, verbatim (Zheng et al. 2023)",
    ),
    Suite(
        name="humaneval",
        title="HumanEval",
        by_task=True,
        parts=(Part(file="humaneval", task="humaneval"),),
        wording='"Complete the code I provided." before the problem, as the EAGLE papers ask chat models (Li et al. 2024)',
    ),
    Suite(
        name="gsm8k",
        title="GSM8K",
        by_task=True,
        parts=(Part(file="gsm8k_test", task="gsm8k"),),
        wording="the bare question, as EAGLE and Spec-Bench ask it",
    ),
    Suite(
        name="alpacaeval-open",
        title="alpacaeval-open",
        parts=(Part(file="alpacaeval_open", task="alpacaeval"),),
        wording="the bare instruction",
        note="This is not AlpacaEval: its own 805 instructions may not be shipped (CC-BY-NC); these are from three of the sets "
        "it was put together from.",
    ),
    Suite(
        name="mbpp",
        title="MBPP",
        by_task=True,
        parts=(
            Part(
                file="mbpp_test",
                task="mbpp",
                before="You are an expert Python programmer, and here is your task: ",
                replace=("\nYour code should pass these tests:\n", " Your code should pass these tests:\n\n"),
            ),
        ),
        wording="the prompt of Austin et al. 2021 without its examples and [BEGIN] mark, which base models need",
    ),
)
SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in _ALL})
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "spec_bench_open": "This is not Spec-Bench, but 320 of its 480 questions: translation and summarisation are missing.",
        "alpacaeval_open": str(SUITES["alpacaeval-open"].note),
    }
)
"""What a report must say about shipped files that are named by themselves."""


def suite_of(source: str) -> Suite | None:
    """The suite that an entry of eval.prompts names; None for every other source.

    Raises EagleError for a suite that does not exist, with the nearest one.
    """
    if not source.startswith(PREFIX):
        return None
    name = source.removeprefix(PREFIX)
    if name not in SUITES:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), SUITES, n=1, cutoff=0.4)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise EagleError(f"eval.prompts holds {source}, which does not exist; {hint}suites: {', '.join(SUITES)}")
    return SUITES[name]
