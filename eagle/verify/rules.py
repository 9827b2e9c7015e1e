"""What walks for the options of a rule (eagle/decode_config.py)."""

from eagle import decode_config
from eagle.verify.block import Block
from eagle.verify.coupled import Coupled, Rule
from eagle.verify.lossy import TopK, Typical
from eagle.verify.rejection import Rejection

_WALKING: dict[str, type[Rule]] = {rule.name: rule for rule in (Coupled, Rejection, Block, TopK, Typical)}


def make_rule(what: str | decode_config.RuleOptions) -> Rule:
    """The rule of that name, or of those options; a rule that walks already is itself. Raises EagleError for an unknown name."""
    if isinstance(what, str):
        what = decode_config.DecodeConfig().kind_of_rule(what)
    return what if isinstance(what, Rule) else _WALKING[what.name](**vars(what))
