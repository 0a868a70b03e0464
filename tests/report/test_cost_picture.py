"""The table and the bars of an epoch's seconds."""

from __future__ import annotations

from typing import Any

import pytest

from wmcli.errors import UsageError
from wmcli.report.cost import epoch_bars, epoch_table
from wmcli.report.plots import COLORS

STAGES = ("collect", "train-dynamics", "imagine")


def row(variant: str, stage: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"variant": variant, "stage": stage, "seconds": seconds} | more


ROWS = [
    row("rem", "collect", 1.0),
    row("rem", "train-dynamics", 39.0),
    row("rem", "imagine", 20.0),
    row("rem", "epoch", 61.0, seconds_25=58.0, seconds_75=65.0),
    row("iris", "train-dynamics", 55.0, times_as_long=1.4, times_as_long_25=1.3, times_as_long_75=1.5),
    row("iris", "imagine", 309.0),
    row("iris", "epoch", 364.5),
]


def test_a_table_has_a_row_for_each_stage_and_the_sum_below() -> None:
    table = epoch_table([ROWS[3], *ROWS[:3], *ROWS[4:]], "variant")
    assert [line["stage"] for line in table] == [*STAGES, "epoch"]
    assert table[0] == {"stage": "collect", "rem": "1 s"}
    assert table[1] == {"stage": "train-dynamics", "rem": "39 s", "iris": "55 s, 1.4 times"}
    assert table[-1] == {"stage": "epoch", "rem": "61 s (58 to 65)", "iris": "364 s"}
    first = row("rem", "imagine", 2.0, times_as_long=1.0, times_as_long_25=1.0, times_as_long_75=1.0)
    assert epoch_table([first], "variant") == [{"stage": "imagine", "rem": "2 s"}]  # compared with itself


def test_bars_are_stacked_by_stage_with_the_quartiles_of_the_whole() -> None:
    figure = epoch_bars(ROWS, "variant", STAGES)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rem", "iris"]
    bars = [[(bar.get_x(), bar.get_width()) for bar in container] for container in axes.containers]
    assert bars == [[(0, 1), (0, 0)], [(1, 39), (0, 55)], [(40, 20), (55, 309)]]
    assert [container.get_label() for container in axes.containers] == list(STAGES)
    assert len({container[0].get_facecolor() for container in axes.containers}) == 3 <= len(COLORS)
    (spread,) = axes.collections
    assert [segment.tolist() for segment in spread.get_segments()] == [[[58, 0], [65, 0]]]
    assert {text.get_text(): text.xy for text in axes.texts} == {"61 s": (65, 0), "364 s": (364, 1)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["quartiles of an epoch", *STAGES]
    figure.canvas.draw()
    assert all(text.get_window_extent().x1 <= axes.get_window_extent().x1 for text in axes.texts)


def test_bars_without_quartiles_have_none_in_the_legend() -> None:
    figure = epoch_bars(ROWS[4:], "variant", STAGES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train-dynamics", "imagine"]


def test_nothing_to_draw_is_one_line() -> None:
    with pytest.raises(UsageError, match="no epochs to draw"):
        epoch_bars([], "variant", STAGES)
