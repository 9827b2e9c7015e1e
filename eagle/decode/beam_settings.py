"""How to search: the settings of beam search, and what a call's keywords make of them."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from transformers import GenerationConfig

from eagle.decode.pruning import Pruning
from eagle.errors import EagleError

SearchForm = Literal["huggingface", "textbook"]


@dataclass(frozen=True, kw_only=True)
class BeamSettings:
    """How to search. Raises EagleError for a value out of its range."""

    num_beams: int
    """Hypotheses carried along, k."""
    length_penalty: float = 1.0
    """Finished hypotheses are ranked by s / length ** length_penalty (length: new tokens, the EOS included)."""
    early_stopping: bool | str = False
    """When k hypotheses are finished: True stops; False stops unless the best live one could, ended now, get in; "never" also
    counts on what a positive length penalty would give it at the limit."""
    num_return_sequences: int = 1
    """Best hypotheses returned per row, at most k."""
    search: SearchForm = "huggingface"
    """huggingface: finished hypotheses are set aside, k live ones go on. textbook: one heap of k by score s; finished ones stay
    in it as they are, and the search ends when all k are finished."""
    pruning: Pruning = field(default_factory=Pruning)
    """Thresholds that drop candidates."""
    sample_first: int = 0
    """Tokens sampled (with the row's settings and seed) before the search; they count as prompt in scores and lengths."""

    def __post_init__(self) -> None:
        ranges = {
            "num_beams": (self.num_beams > 1, "2 or more (1: plain decoding)"),
            "early_stopping": (self.early_stopping in (True, False, "never"), 'True, False or "never"'),
            "num_return_sequences": (
                1 <= self.num_return_sequences <= self.num_beams,
                f"from 1 to num_beams ({self.num_beams})",
            ),
            "search": (self.search in get_args(SearchForm), " or ".join(get_args(SearchForm))),
            "sample_first": (self.sample_first >= 0, "0 (search from the prompt) or more"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise EagleError(f"{name} is {getattr(self, name)!r}, expected {expected}")
        if self.search == "textbook" and self.early_stopping:
            raise EagleError(
                f"early_stopping is {self.early_stopping!r}, but the textbook search ends when its whole heap is finished; "
                'leave it out or take search="huggingface"'
            )


_OWN_KEYWORDS = ("search", "sample_first", "prune_relative", "prune_absolute", "prune_local")


def take_own_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Takes the keywords of a search that Hugging Face has no name for out of `keywords`, those that say something."""
    taken = {name: keywords.pop(name) for name in _OWN_KEYWORDS if name in keywords}
    return {name: value for name, value in taken.items() if value is not None}


def beam_settings(config: GenerationConfig, own: dict[str, Any]) -> BeamSettings | None:
    """The search that a call asks for; None: none (num_beams 1). Raises EagleError for what cannot be combined."""
    beams = 1 if config.num_beams is None else int(config.num_beams)
    if beams == 1:
        if own:
            raise EagleError(f"{', '.join(own)}: these belong to a search; set num_beams above 1, or leave them out")
        return None
    own = dict(own)
    if config.do_sample and not own.get("sample_first"):
        raise EagleError(
            f"do_sample with num_beams={beams}: beams are not sampled here; set do_sample=False, or sample_first=K to sample "
            "K tokens and search from there"
        )
    if own.get("sample_first") and not config.do_sample:
        raise EagleError(f"sample_first={own['sample_first']} has no effect on greedy decoding; set do_sample=True")
    if config.output_scores:
        raise EagleError(
            "output_scores is not supported with num_beams: the scores of every step are not kept; leave it out "
            "(sequences_scores are always returned)"
        )
    pruning = Pruning(**{rule: own.pop(f"prune_{rule}", None) for rule in ("relative", "absolute", "local")})
    return BeamSettings(
        num_beams=beams,
        length_penalty=1.0 if config.length_penalty is None else float(config.length_penalty),
        early_stopping=False if config.early_stopping is None else config.early_stopping,
        num_return_sequences=config.num_return_sequences or 1,
        pruning=pruning,
        **own,
    )
