"""Bars of learned priors: heights, deviations and starts, by hand; kinds of priors that do not match."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.report.prior_bars import prior_bars
from wmcli.stages.pictures import LoggedPriors, plot_prior_groups, plot_priors


def test_bars_are_means_and_deviations_over_runs_by_head_and_layer() -> None:
    mean = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # two layers of three heads
    both = {"mean": mean, "deviation": mean / 2, "span": mean * 2}
    groups = {"gaussian": [{"mean": mean}, {"mean": mean + 2}], "both": [both]}
    initial = {"gaussian": {"mean": 6.0}, "both": {"mean": 6.0, "deviation": 1.0, "span": 10.0}}
    figure = prior_bars(groups, initial)
    panels = np.array(figure.axes).reshape(3, 2)  # mean, deviation, span; gaussian, both
    assert [axes.get_title(loc="left") for axes in panels[0]] == ["gaussian", "both"]
    assert [axes.axison for axes in panels[:, 0]] == [True, False, False]
    bars = panels[0, 0].containers[-1].patches if hasattr(panels[0, 0].containers[-1], "patches") else []
    assert [bar.get_height() for bar in bars] == (mean + 1).ravel().tolist()
    errors = next(each for each in panels[0, 0].collections if len(each.get_segments()) == 6).get_segments()
    for segment, middle in zip(errors, (mean + 1).ravel(), strict=True):
        assert segment[:, 1].tolist() == pytest.approx([middle - np.sqrt(2), middle + np.sqrt(2)])
    assert [tick.get_text() for tick in panels[0, 0].get_xticklabels()] == ["1", "2", "3"] * 2
    for axes, start in zip(panels[:, 1], (6.0, 1.0, 10.0), strict=True):
        assert axes.get_lines()[-1].get_ydata()[0] == start and not axes.collections  # of one run no deviation


def test_long_names_of_groups_stay_over_their_bars() -> None:
    label = "backbone.prior.kind=gaussian_span, backbone.prior.regularizer=l1, seed="
    groups = {f"{label}{n}": [{"mean": np.ones((1, 2))}] for n in range(3)}
    figure = prior_bars(groups, {name: {"mean": 6.0} for name in groups})
    figure.canvas.draw()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.endswith(f"seed={n}") for n, title in enumerate(titles)] == [True] * 3
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes]
    assert all(one.x1 < other.x0 for one, other in zip(boxes, boxes[1:], strict=False))
    assert boxes[-1].x1 < figure.bbox.x1


def test_kinds_that_differ_are_refused_in_one_line() -> None:
    one: LoggedPriors = {3: {"mean": [[1.0]]}}
    other: LoggedPriors = {3: {"span": [[1.0]]}}
    with pytest.raises(UsageError, match="learned priors of different kinds: add --by backbone.prior.kind"):
        plot_priors([one, other], SimpleNamespace())  # type: ignore[arg-type]
    settings: Any = {"g": SimpleNamespace(attention_prior=SimpleNamespace(mean=6.0, span=6.0))}
    with pytest.raises(UsageError, match="the priors of g differ in kind, heads or layers"):
        plot_prior_groups({"g": [one, other]}, settings)
    with pytest.raises(UsageError, match="a run of g has learned no priors: omit it"):
        plot_prior_groups({"g": [one, {}]}, settings)
    figure = plot_prior_groups({"g": [{3: {"mean": [[1.0, 2.0]]}}]}, settings)
    assert len(figure.axes) == 1
