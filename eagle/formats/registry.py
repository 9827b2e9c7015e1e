"""All formats, and which one a folder is."""

from eagle.errors import EagleError
from eagle.formats.angelslim import ANGELSLIM
from eagle.formats.format import SIDECAR, Format, HeadFiles
from eagle.formats.modelopt import MODELOPT
from eagle.formats.own import OWN
from eagle.formats.reference import REFERENCE
from eagle.formats.sglang import SGLANG
from eagle.formats.specforge import SPECFORGE
from eagle.formats.speculators import SPECULATORS
from eagle.formats.trtllm import TRTLLM
from eagle.formats.vllm import VLLM

FORMATS = {
    format.name: format
    for format in (OWN, SPECULATORS, ANGELSLIM, MODELOPT, SGLANG, VLLM, TRTLLM, SPECFORGE, REFERENCE)
}
"""By name, those with the surest signs first: the first whose sign a folder shows is its format."""
EXPORTED = tuple(name for name in ("reference", "vllm", "sglang", "speculators", "trtllm") if FORMATS[name].limits)
"""What `eagle export --to` writes."""


def format_named(name: str) -> Format:
    """Raises EagleError for a name that is none."""
    if name not in FORMATS:
        raise EagleError(f"there is no format {name!r} of draft heads; expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect(files: HeadFiles) -> tuple[Format, str]:
    """A folder's format, and the evidence for it."""
    name = None if files.sidecar is None else files.sidecar.get("to")
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name], f"{SIDECAR} says that eagle export wrote it --to {name}"
    for format in FORMATS.values():
        evidence = format.sign(files)
        if evidence is not None:
            return format, evidence
    raise AssertionError("the reference's sign is always given")
