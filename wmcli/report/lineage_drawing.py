"""Draw artifacts and what they were made from as an SVG.

Kinds are columns and time runs down. An artifact stands below its inputs, or beside them if their column is further to
the left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple
from xml.etree import ElementTree

_KINDS = ("experience", "tokenizer", "dynamics", "controller", "evaluation")  # columns; others follow
_MOST = 60  # nodes that are all drawn
_FIRST, _LAST = 2, 8  # versions of each kind that are drawn of more

# In pixels:
_HEIGHT = 26  # of a box
_LETTER = 7.3  # width, about
_LONGEST = 24  # letters of a name
_ACROSS, _DOWN = 44, 24  # between two boxes
_HEADING = 30
_CORNER = 8  # radius of an edge's corner
_LANE = 3  # between edges of two kinds in one gap


class Node(NamedTuple):
    """An artifact."""

    key: str
    """Of the artifact alone, such as its digest."""
    name: str
    kind: str
    version: int
    pruned: bool = False


class _Box(NamedTuple):
    node: Node
    column: int
    row: int
    hides: int = 0
    """Number of versions that it stands for; 0 is a box for its node."""


def draw_lineage(nodes: Sequence[Node], edges: Iterable[tuple[str, str]]) -> str:
    """Return a drawing of artifacts as an `<svg>` element to stand in a page, with the page's colors and font.

    Inputs that another input implies are faint. Of more than 60 nodes the first 2 and the last 8 versions of each kind
    are drawn; a box says how many lie between them.

    Args:
        nodes: Artifacts, of one or more runs, in any order.
        edges: Key of an input and key of what was made from it. Edges of unknown keys are left out.

    Raises:
        graphlib.CycleError: An artifact is made from itself.
    """
    known = {node.key: node for node in nodes}
    pairs = sorted({(source, target) for source, target in edges if source in known and target in known})
    boxes, pairs = _shown(_placed(known, pairs), pairs)
    return _svg(boxes, pairs)


# -- layout -----------------------------------------------------------------------------------------------------------


def _placed(nodes: Mapping[str, Node], pairs: Collection[tuple[str, str]]) -> dict[str, _Box]:
    """Return the boxes of all nodes by key."""
    present = {node.kind for node in nodes.values()}
    kinds = [kind for kind in _KINDS if kind in present] + sorted(present - set(_KINDS))
    column = {key: kinds.index(node.kind) for key, node in nodes.items()}
    inputs: dict[str, set[str]] = {key: set() for key in nodes}
    for source, target in pairs:
        inputs[target].add(source)
    order = sorted(nodes.values(), key=lambda node: (node.version, column[node.key], node.name, node.key))
    rows: dict[str, int] = {}
    lowest = [-1] * len(kinds)  # row in use, by column
    for key in TopologicalSorter({node.key: inputs[node.key] for node in order}).static_order():
        below = (rows[source] + (column[source] >= column[key]) for source in inputs[key])
        rows[key] = max(lowest[column[key]] + 1, *below, 0)
        lowest[column[key]] = rows[key]
    return {node.key: _Box(node, column[node.key], rows[node.key]) for node in order}


def _shown(boxes: dict[str, _Box], pairs: list[tuple[str, str]]) -> tuple[dict[str, _Box], list[tuple[str, str]]]:
    """Return the boxes and edges to draw: those of the middle versions are one box for each kind if there are many."""
    shown, stands_for = dict(boxes), {key: key for key in boxes}
    if len(boxes) > _MOST:
        for column in {box.column for box in boxes.values()}:
            keys = sorted((key for key, box in boxes.items() if box.column == column), key=lambda key: boxes[key].row)
            middle = keys[_FIRST:-_LAST]
            if len(middle) < 2:
                continue
            first = boxes[middle[0]]
            for key in middle:
                stands_for[key] = middle[0]
                del shown[key]
            name = f"… {len(middle)} versions"
            shown[middle[0]] = _Box(first.node._replace(name=name, pruned=False), column, first.row, len(middle))
    drawn = {(stands_for[source], stands_for[target]) for source, target in pairs}
    hidden = {key for key, box in shown.items() if box.hides}
    drawn = {(source, target) for source, target in drawn if source != target and not {source, target} <= hidden}
    ranks = {row: rank for rank, row in enumerate(sorted({box.row for box in shown.values()}))}
    return {key: box._replace(row=ranks[box.row]) for key, box in shown.items()}, sorted(drawn)


def _implied(pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges whose target is made from something that is made from their source."""
    targets: dict[str, set[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, set()).add(target)

    def reachable(key: str) -> set[str]:
        found: set[str] = set()
        pending = [key]
        while pending:
            for target in targets.get(pending.pop(), set()) - found:
                found.add(target)
                pending.append(target)
        return found

    below = {key: reachable(key) for key in targets}
    return {
        (source, target)
        for source, target in pairs
        if any(target in below.get(between, set()) for between in targets[source] - {target})
    }


# -- drawing ----------------------------------------------------------------------------------------------------------


def _svg(boxes: Mapping[str, _Box], pairs: Sequence[tuple[str, str]]) -> str:
    kinds = {box.column: box.node.kind for box in boxes.values()}
    names = {key: _shortened(box.node.name) for key, box in boxes.items()}
    width = round(max([len(name) for name in [*names.values(), *kinds.values()]], default=0) * _LETTER) + 20
    rows = max((box.row for box in boxes.values()), default=0) + 1
    across, down = width + _ACROSS, _HEIGHT + _DOWN
    legend = any(box.node.pruned for box in boxes.values())
    size = (_ACROSS + across * max(len(kinds), 1), _HEADING + down * rows + 26 * legend)
    svg = ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {size[0]} {size[1]}",
            "width": f"{size[0]}",
            "height": f"{size[1]}",
            "fill": "none",
            "font-size": "12",
        },
    )
    for column, kind in sorted(kinds.items()):
        _text(svg, _ACROSS + column * across + width / 2, 16, kind)
    corners = {
        key: (_ACROSS + box.column * across, _HEADING + _DOWN // 2 + box.row * down) for key, box in boxes.items()
    }
    implied = _implied(pairs)
    for source, target in sorted(pairs, key=lambda pair: pair not in implied):  # faint ones below the others
        column = boxes[source].column
        path = _route(boxes[source], boxes[target], corners[source], corners[target], width)
        faint = {"opacity": "0.3"} if (source, target) in implied else {}
        ElementTree.SubElement(
            svg, "path", {"d": _path(path), "stroke": f"var(--c{column % 7})", "stroke-width": "1.5"} | faint
        )
    for key, box in boxes.items():
        x, y = corners[key]
        style = {"stroke": f"var(--c{box.column % 7})", "fill": "var(--panel)"}
        if box.hides:
            style = {"fill": "var(--paper)"}
        elif box.node.pruned:
            style |= {"stroke-dasharray": "3 3", "fill": "var(--paper)"}
        group = ElementTree.SubElement(svg, "g")
        ElementTree.SubElement(
            group, "rect", {"x": f"{x}", "y": f"{y}", "width": f"{width}", "height": f"{_HEIGHT}", "rx": "5"} | style
        )
        if names[key] != box.node.name:
            ElementTree.SubElement(group, "title").text = box.node.name
        color = "var(--muted)" if box.hides or box.node.pruned else "var(--ink)"
        _text(group, x + width / 2, y + 17, names[key], color)
    if legend:
        _text(svg, _ACROSS, size[1] - 8, "dashed: pruned, only manifest and pictures remain", anchor="start")
    return ElementTree.tostring(svg, encoding="unicode")


def _text(
    parent: ElementTree.Element, x: float, y: float, text: str, fill: str = "var(--muted)", anchor: str = "middle"
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor, "fill": fill}
    ElementTree.SubElement(parent, "text", place).text = text


def _shortened(name: str) -> str:
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"


def _route(
    source: _Box, target: _Box, start: tuple[int, int], end: tuple[int, int], width: int
) -> list[tuple[float, float]]:
    """Return the points of an edge that goes through the gaps between boxes.

    Edges of one kind of source share lanes, since colors tell kinds apart.
    """
    lane = (source.column % 6 - 2.5) * _LANE
    right, left = start[0] + width, end[0]
    middle, arrival = start[1] + _HEIGHT / 2, end[1] + _HEIGHT / 2 + lane
    if target.column == source.column and target.row == source.row + 1:
        x = start[0] + width / 2
        return [(x, start[1] + _HEIGHT), (x, end[1])]
    before = left - _ACROSS / 2 + lane  # the gap before the target
    if target.column == source.column + 1:
        return [(right, middle + lane), (before, middle + lane), (before, arrival), (left, arrival)]
    under = start[1] + _HEIGHT + _DOWN / 2 + lane  # the gap below the source
    x = start[0] + width / 2 + 3 * lane
    return [(x, start[1] + _HEIGHT), (x, under), (before, under), (before, arrival), (left, arrival)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a path through points, its corners rounded."""
    points = list(dict.fromkeys(points))
    x, y = points[0]
    path = [f"M{x:g} {y:g}"]
    for place in range(1, len(points) - 1):
        before, corner, after = points[place - 1 : place + 2]
        a, b = _toward(corner, before), _toward(corner, after)
        path.append(f"L{a[0]:g} {a[1]:g}Q{corner[0]:g} {corner[1]:g} {b[0]:g} {b[1]:g}")
    x, y = points[-1]
    return "".join([*path, f"L{x:g} {y:g}"])


def _toward(point: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the point at a corner's radius from `point`, at most half way to `other`."""
    dx, dy = other[0] - point[0], other[1] - point[1]
    length = abs(dx) + abs(dy)  # all lines are level or upright
    share = min(_CORNER / length, 0.5) if length else 0.0
    return point[0] + dx * share, point[1] + dy * share
