"""Pictures of decode steps: the draft tree with its accepted path.

What is emitted runs along the top line of a picture, from the root on; accepted nodes have a thick frame and a check mark, so
nothing depends on colour.
"""

import html
import unicodedata
from collections.abc import Sequence

from eagle.eval.report.parts import Plot
from eagle.eval.results_parts import Emitted, Node, VerifyStep

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT, PAD = 124, 44, 104, 36, 8
MOST_DRAWN = 28
"""Nodes of a picture: the likeliest, and the accepted path always. The table below it holds all."""
_LONGEST = 12
"""Columns of a token's text in its box"""
_SHOWN = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    """The text with its spaces and line ends as signs."""
    return "".join(_SHOWN.get(c, c if unicodedata.category(c)[0] != "C" else "□") for c in text) or "∅"


def tree_picture(step: VerifyStep, *, key: str) -> Plot:
    """One verify step: root at the left, one column per level, the token that followed in a box of its own."""
    nodes, emitted = step.nodes, step.emitted
    drawn = _drawn(nodes)
    places, rows = _places(nodes, drawn, emitted)
    columns = 1 + max(column for column, _ in places.values())
    width, height = PAD * 2 + COLUMN * (columns - 1) + BOX_WIDTH, PAD * 2 + ROW * (rows - 1) + BOX_HEIGHT
    parts = []
    for node in drawn:
        if nodes[node].parent >= 0:
            parts.append(_edge(places[nodes[node].parent], places[node], "on" if nodes[node].accepted else "off"))
    parts.append(_edge(places[emitted.parent], places[-1], "out"))
    for node in drawn:
        kind = "root" if node == 0 else "on" if nodes[node].accepted else "off"
        parts.append(_box(places[node], nodes[node].text, _below(node, nodes[node]), kind))
    parts.append(_box(places[-1], emitted.text, emitted.origin, "out"))
    drawing = (
        f'<svg class="tree" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true" '
        f'focusable="false">{"".join(parts)}</svg>'
    )
    path = [visible(node.text) for node in nodes[1:] if node.accepted]
    said = f"accepted: {' '.join(path)}" if path else "no draft accepted"
    hidden = len(nodes) - len(drawn)
    return Plot(
        key=key,
        title=f"Verify step {step.step + 1}: {len(path)} of {max(len(nodes) - 1, 0)} drafts accepted",
        drawing=drawing,
        alt=f"Draft tree of {len(nodes)} nodes behind the token {visible(nodes[0].text)}; {said}; then the "
        f"{emitted.origin} {visible(emitted.text)}.",
        definition=f"{hidden} less likely nodes are not drawn; the table has all." if hidden else "",
        caption="Nodes of this tree; confidence is the product of the draft's probabilities along the path",
        headings=("node", "token", "parent", "depth", "confidence", "accepted"),
        rows=_rows(nodes, emitted),
    )


def _drawn(nodes: Sequence[Node]) -> list[int]:
    """The nodes to draw, ascending; a node's parent is never less confident than itself, so none lacks its parent."""
    order = sorted(
        range(len(nodes)), key=lambda i: (not nodes[i].accepted, nodes[i].depth > 0, -nodes[i].confidence, i)
    )
    return sorted(order[:MOST_DRAWN])


def _places(nodes: Sequence[Node], drawn: Sequence[int], emitted: Emitted) -> tuple[dict[int, tuple[int, int]], int]:
    """(column, row) of every node, -1 being the emitted token, and the number of rows.

    A node stands in the row of its first child; children come accepted first, then by confidence.
    """
    children: dict[int, list[int]] = {node: [] for node in [*drawn, -1]}
    for node in drawn:
        if nodes[node].parent >= 0:
            children[nodes[node].parent].append(node)
    for listed in children.values():
        listed.sort(key=lambda node: (not nodes[node].accepted, -nodes[node].confidence, node))
    children[emitted.parent].insert(0, -1)
    places: dict[int, tuple[int, int]] = {}
    rows = 0

    def place(node: int, column: int) -> None:
        nonlocal rows
        places[node] = (column, rows)
        for child in children[node]:
            place(child, column + 1)
        rows += not children[node]

    place(0, 0)
    return places, rows


def _below(number: int, node: Node) -> str:
    return "root" if number == 0 else f"{'✓ ' if node.accepted else ''}{node.confidence:.2f}"


def _edge(parent: tuple[int, int], child: tuple[int, int], kind: str) -> str:
    x, y = PAD + parent[0] * COLUMN + BOX_WIDTH, PAD + parent[1] * ROW + BOX_HEIGHT / 2
    end_x, end_y = PAD + child[0] * COLUMN, PAD + child[1] * ROW + BOX_HEIGHT / 2
    middle = (x + end_x) / 2
    return f'<path class="edge {kind}" d="M{x} {y}C{middle} {y} {middle} {end_y} {end_x} {end_y}"/>'


def _box(place: tuple[int, int], token: str, below: str, kind: str) -> str:
    x, y = PAD + place[0] * COLUMN, PAD + place[1] * ROW
    whole = visible(token)
    return (
        f'<g class="node {kind}"><title>{html.escape(whole)}</title>'
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{BOX_HEIGHT / 2 if kind == "out" else 5}"/>'
        f'<text x="{x + BOX_WIDTH / 2}" y="{y + 16}" class="token">{html.escape(_cut(whole))}</text>'
        f'<text x="{x + BOX_WIDTH / 2}" y="{y + 30}">{html.escape(below)}</text></g>'
    )


def _cut(text: str) -> str:
    """As much as fits into a box; wide characters take two columns."""
    taken = 0
    for i, character in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if taken > _LONGEST:
            return text[:i] + "…"
    return text


def _rows(nodes: Sequence[Node], emitted: Emitted) -> tuple[tuple[str, ...], ...]:
    rows = [
        (
            *(str(number), visible(node.text), "" if node.parent < 0 else str(node.parent), str(node.depth)),
            *(f"{node.confidence:.3f}", "root" if number == 0 else "yes" if node.accepted else "no"),
        )
        for number, node in enumerate(nodes)
    ]
    depth = str(nodes[emitted.parent].depth + 1)
    return *rows, ("", visible(emitted.text), str(emitted.parent), depth, "", emitted.origin)
