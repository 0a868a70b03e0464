"""Drawings of lineage: what is in them, and that boxes and edges keep apart."""

from __future__ import annotations

import random
import re
from graphlib import CycleError
from xml.etree import ElementTree

import pytest

from wmcli.report.lineage_drawing import Node, draw_lineage

HOSTILE = "</svg><script>alert(1)</script>\"'&"
KINDS = ("experience", "tokenizer", "dynamics", "controller")
INPUTS = (
    ("experience", "tokenizer"),
    ("experience", "dynamics"),
    ("tokenizer", "dynamics"),
    ("experience", "controller"),
    ("dynamics", "controller"),
)


def loop(epochs: int) -> tuple[list[Node], list[tuple[str, str]]]:
    """The artifacts of a run of several epochs, with an evaluation at its end."""
    nodes = [
        Node(f"{kind}-{v}", f"{kind}@{v}", kind, v, pruned=kind != "experience" and v < epochs)
        for v in range(1, epochs + 1)
        for kind in KINDS
    ]
    edges = [(f"{source}-{v}", f"{target}-{v}") for v in range(1, epochs + 1) for source, target in INPUTS]
    for v in range(1, epochs):
        edges += [(f"{kind}-{v}", f"{kind}-{v + 1}") for kind in KINDS] + [(f"controller-{v}", f"experience-{v + 1}")]
    nodes.append(Node("evaluation-1", "evaluation@1", "evaluation", 1))
    return nodes, [*edges, (f"controller-{epochs}", "evaluation-1")]


class Drawn:
    """A drawing, read again."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)
        self.width, self.height = (float(self.root.attrib[side]) for side in ("width", "height"))
        self.boxes: dict[str, tuple[float, float, float, float]] = {}  # name -> left, top, right, bottom
        for group in self.root.iter("g"):
            rectangle, name = group.find("rect"), group.findtext("title") or group.findtext("text")
            assert rectangle is not None and name
            x, y, w, h = (float(rectangle.attrib[key]) for key in ("x", "y", "width", "height"))
            name += f" ({x:g})" * name.startswith("…")  # each kind has such a box
            assert name not in self.boxes
            self.boxes[name] = (x, y, x + w, y + h)
        self.lines = [(path, corners(path.attrib["d"])) for path in self.root.iter("path")]

    def box_at(self, point: tuple[float, float]) -> str:
        """The box on whose border a point lies."""
        x, y = point
        (name,) = (
            name
            for name, (left, top, right, bottom) in self.boxes.items()
            if (x in (left, right) and top <= y <= bottom) or (y in (top, bottom) and left <= x <= right)
        )
        return name

    def edges(self) -> dict[tuple[str, str], bool]:
        """(source, target) -> whether the edge is faint."""
        return {
            (self.box_at(points[0]), self.box_at(points[-1])): "opacity" in path.attrib for path, points in self.lines
        }


def corners(path: str) -> list[tuple[float, float]]:
    """The points of a path without the rounding of its corners."""
    parts = [(letter, list(map(float, numbers.split()))) for letter, numbers in re.findall(r"([MLQ])([^MLQ]+)", path)]
    assert [letter for letter, _ in parts[:1] + parts[-1:]] == ["M", "L"]
    return [(x, y) for letter, (x, y, *_) in [parts[0], *parts[1:-1], parts[-1]] if letter != "L"] + [
        (parts[-1][1][0], parts[-1][1][1])
    ]


@pytest.mark.parametrize("epochs", [1, 2, 5, 12])
def test_each_artifact_is_a_box_and_each_input_an_edge(epochs):
    nodes, edges = loop(epochs)
    drawn, names = Drawn(draw_lineage(nodes, edges)), {node.key: node.name for node in nodes}
    assert set(drawn.boxes) == set(names.values())
    assert set(drawn.edges()) == {(names[source], names[target]) for source, target in edges}
    assert len(drawn.lines) == len(edges)


@pytest.mark.parametrize("epochs", [1, 5, 12, 90])
def test_boxes_lie_apart_within_the_picture_and_no_edge_crosses_one(epochs):
    drawn = Drawn(draw_lineage(*loop(epochs)))
    boxes = list(drawn.boxes.values())
    for place, (left, top, right, bottom) in enumerate(boxes):
        assert min(left, top) >= 0 and right <= drawn.width and bottom <= drawn.height
        for other in boxes[:place]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for _, points in drawn.lines:
        assert all(0 <= x <= drawn.width and 0 <= y <= drawn.height for x, y in points)
        for (a, b), (c, d) in zip(points, points[1:], strict=False):
            assert a == c or b == d, "level or upright"
            for left, top, right, bottom in boxes:
                apart = max(a, c) <= left or right <= min(a, c) or max(b, d) <= top or bottom <= min(b, d)
                assert apart, (points, (left, top, right, bottom))


def test_an_artifact_stands_below_its_inputs_or_to_the_right_of_them():
    drawn = Drawn(draw_lineage(*loop(5)))
    for source, target in drawn.edges():
        (x, y, *_), (right, below, *_) = drawn.boxes[source], drawn.boxes[target]
        assert below > y or (below == y and right > x), (source, target)
    back = [Node("a", "controller@1", "controller", 1), Node("b", "experience@1", "experience", 1)]
    boxes = Drawn(draw_lineage(back, [("a", "b")])).boxes
    assert boxes["experience@1"][1] > boxes["controller@1"][1]
    columns = {name.partition("@")[0]: box[0] for name, box in drawn.boxes.items()}
    assert list(columns) == [*KINDS, "evaluation"] and sorted(columns.values()) == list(columns.values())


def test_inputs_that_others_imply_are_faint():
    drawn = Drawn(draw_lineage(*loop(2)))
    edges = drawn.edges()
    assert edges["experience@1", "dynamics@1"], "the tokenizer implies it"
    assert edges["experience@1", "experience@2"], "the controller implies it"
    faint = ["opacity" in path.attrib for path, _ in drawn.lines]
    assert faint == sorted(faint, reverse=True), "below the others"
    assert not edges["experience@1", "tokenizer@1"] and not edges["controller@1", "experience@2"]


def test_of_many_versions_the_first_and_the_last_are_drawn():
    nodes, edges = loop(90)
    drawn = Drawn(draw_lineage(nodes, edges))
    for kind in KINDS:
        shown = [name for name in drawn.boxes if name.startswith(kind)]
        assert shown == [f"{kind}@{v}" for v in (1, 2, *range(83, 91))]
    between = [name for name in drawn.boxes if name.startswith("… 80 versions")]
    assert len(between) == 4
    assert {"experience@2", "experience@83"} <= {name for edge in drawn.edges() if between[0] in edge for name in edge}
    assert "evaluation@1" in drawn.boxes


def test_sixty_artifacts_are_all_drawn():
    nodes = [Node(f"{v}", f"experience@{v}", "experience", v) for v in range(1, 61)]
    edges = [(f"{v}", f"{v + 1}") for v in range(1, 60)]
    assert len(Drawn(draw_lineage(nodes, edges)).boxes) == 60
    more = Drawn(draw_lineage([*nodes, Node("61", "experience@61", "experience", 61)], [*edges, ("60", "61")]))
    assert len(more.boxes) == 11 and "… 51 versions (44)" in more.boxes
    assert len(more.lines) == 10, "a chain through the box between"


def test_pruned_artifacts_are_told_apart():
    plain, pruned = (draw_lineage([Node("a", "dynamics@1", "dynamics", 1, pruned)], []) for pruned in (False, True))
    assert "dasharray" in pruned and "dashed: pruned" in pruned
    assert "dasharray" not in plain and "pruned" not in plain


def test_names_are_text_and_long_ones_are_whole_in_a_title():
    long = "dynamics of a run with a long name@12"
    svg = draw_lineage([Node("a", HOSTILE, HOSTILE, 1), Node("b", long, "dynamics", 1)], [("a", "b")])
    drawn = Drawn(svg)
    assert set(drawn.boxes) == {HOSTILE, long}
    assert "<script" not in svg and svg.count("</svg>") == 1
    assert all(len(text.text or "") <= 24 for group in drawn.root.iter("g") for text in group.iter("text"))


def test_order_of_nodes_and_edges_changes_nothing_and_unknown_edges_are_left_out():
    nodes, edges = loop(20)
    expected = draw_lineage(nodes, edges)
    random.Random(0).shuffle(nodes)
    random.Random(1).shuffle(edges)
    assert draw_lineage(nodes, [*edges, *edges, ("nowhere", "experience-1")]) == expected


def test_two_runs_of_one_kind_stand_side_by_side_and_nothing_is_a_drawing_too():
    ours, theirs = Node("a", "experience@1", "experience", 1), Node("b", "runs/other experience@1", "experience", 1)
    drawn = Drawn(draw_lineage([ours, theirs], []))
    assert len({box[:2] for box in drawn.boxes.values()}) == 2
    assert not Drawn(draw_lineage([], [])).boxes


def test_an_artifact_made_from_itself_is_an_error():
    nodes = [Node("a", "a@1", "dynamics", 1), Node("b", "b@1", "dynamics", 1)]
    with pytest.raises(CycleError):
        draw_lineage(nodes, [("a", "b"), ("b", "a")])


def test_only_variables_of_the_page_are_colors():
    svg = draw_lineage(*loop(3))
    colors = set(re.findall(r'(?:fill|stroke)="([^"]+)"', svg))
    assert colors == {
        "none",
        *(f"var(--{name})" for name in ("ink", "muted", "panel", "paper", "c0", "c1", "c2", "c3", "c4")),
    }
