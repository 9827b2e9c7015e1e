"""Reading a page as a browser would, strictly: tags must nest, ids must be unique."""

import dataclasses
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclasses.dataclass(eq=False)
class Element:
    """A tag with what is inside; text children are strings."""

    tag: str
    attributes: dict[str, str]
    children: "list[Element | str]" = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str | None = None) -> "list[Element]":
        """Every element inside, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child] if tag in (None, child.tag) else []
                found += child.all(tag)
        return found

    def by_id(self, name: str) -> "Element | None":
        return next((one for one in self.all() if one.attributes.get("id") == name), None)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open[-1].tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(text: str) -> Element:
    """Raises AssertionError where tags do not nest or an id occurs twice."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [one.tag for one in reader.open] == ["page"], f"still open: {[one.tag for one in reader.open]}"
    page = reader.open[0]
    ids = [one.attributes["id"] for one in page.all() if "id" in one.attributes]
    assert len(set(ids)) == len(ids), f"ids occur twice: {sorted(name for name in ids if ids.count(name) > 1)}"
    return page


def rows_of(table: Element) -> list[list[str]]:
    """The cells of a table's body."""
    (body,) = table.all("tbody")
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in body.all("tr")]
