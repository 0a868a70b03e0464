"""Figures: which records and lines they hold, and that files are reproducible."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from wmcli.errors import UsageError
from wmcli.metrics.statistics import bootstrap
from wmcli.report import plots


def record(update, loss, stage="train-dynamics", **more):
    return {"time": "2024-05-01T10:00:00+00:00", "stage": stage, "update": update, "loss": loss, **more}


def labels(axes):
    return [line.get_label() for line in axes.get_lines()]


def test_repeated_rows_of_a_job_replace_its_earlier_ones():
    killed = [record(u, 1.0, job="a") for u in (10, 20, 30, 40)]
    resumed = [record(u, 2.0, job="a") for u in (25, 35)]
    other = [record(30, 7.0, job="b"), record(30, 8.0, "imagine", job="a"), {"stage": "collect", "job": "a"}]
    got = plots.latest_records([*killed, *other, *resumed])
    assert [(r.get("update"), r.get("loss")) for r in got if r["stage"] == "train-dynamics" and r["job"] == "a"] == [
        (10, 1.0),
        (20, 1.0),
        (25, 2.0),
        (35, 2.0),
    ]
    assert all(r in got for r in other)
    again = plots.latest_records([*killed, *other, *resumed, record(10, 3.0, job="a")])
    assert [r["loss"] for r in again if r["job"] == "a" and r["stage"] == "train-dynamics"] == [3.0]
    assert [r["loss"] for r in plots.latest_records([record(10, 1.0), record(20, 2.0), record(20, 3.0)])] == [1.0, 3.0]


def test_one_line_of_descent_is_selected_by_its_jobs():
    first, second = record(10, 1.0, job="a"), record(20, 2.0, job="b")
    stranger = record(20, 9.0, job="x")
    assert plots.along([first, stranger, second], ["b", "a"]) == [first, second]
    old = [record(10, 1.0), record(20, 2.0)]
    assert plots.along([*old, stranger], ["a"]) == old
    assert plots.along([*old, first], ["a"]) == [first]
    assert plots.along([], ["a"]) == []


def test_no_records_are_a_user_error():
    with pytest.raises(UsageError):
        plots.learning_curves([{"stage": "collect", "steps": 5}])
    with pytest.raises(UsageError):
        plots.learning_curves([record(1, 1.0)], stages=["imagine"])
    with pytest.raises(UsageError):
        plots.return_curve([])
    with pytest.raises(UsageError):
        plots.returns_histogram([])


def test_curves_hold_the_finite_numbers_of_each_stage_in_order():
    records = [
        record(10, 3.0),
        {"kl": 0.5, **record(20, 2.0, done=True, note="x", empty=None)},
        record(30, float("nan"), kl=float("inf")),
        record(5, 8.0, "imagine"),
        {"stage": "collect", "steps": 100},
    ]
    curves = plots.curves_by_stage(records)
    assert {stage: list(metrics) for stage, metrics in curves.items()} == {
        "train-dynamics": ["loss", "kl"],
        "imagine": ["loss"],
    }
    np.testing.assert_array_equal(curves["train-dynamics"]["loss"], [[10, 20], [3, 2]])


def test_when_and_where_something_was_logged_is_no_metric():
    records = [record(10, 3.0, job="a", version=2, epoch=1, environment_step=500)]
    records += [{"stage": "eval", "job": "e", "version": 1, "environment_step": 500, "mean_return": -20.0}]
    assert {stage: list(metrics) for stage, metrics in plots.curves_by_stage(records).items()} == {
        "train-dynamics": ["loss"]
    }


def test_updates_count_on_from_version_to_version_and_unrelated_ones_are_never_joined():
    parent = [record(u, u, job="parent", version=1) for u in (10, 20)]
    child = [record(u, u, job="child", version=2) for u in (30, 40)]
    for records in (parent + child, child + parent):
        x, y = plots.curves_by_stage(records)["train-dynamics"]["loss"]
        np.testing.assert_array_equal([x, y], [[10, 20, 30, 40], [10, 20, 30, 40]])
    sibling = [record(u, -u, job="sibling", version=3) for u in (30, 35)]
    x, y = plots.curves_by_stage([*parent, *child, *sibling])["train-dynamics"]["loss"]
    np.testing.assert_array_equal([x, y], [[10, 20, 30, 35], [10, 20, -30, -35]])
    anew = [record(u, -u, job="anew", version=4) for u in (10, 20)]
    x, y = plots.curves_by_stage([*parent, *anew])["train-dynamics"]["loss"]
    np.testing.assert_array_equal([x, y], [[10, 20], [-10, -20]])
    old = [record(u, 1.0) for u in (10, 20, 30)] + [record(u, 2.0) for u in (10, 20)]  # trained twice, no job logged
    x, y = plots.curves_by_stage(old)["train-dynamics"]["loss"]
    np.testing.assert_array_equal([x, y], [[10, 20], [2, 2]])


def test_learning_curves_has_a_named_panel_per_metric():
    records = [record(u, 1 / u, observation_loss=2 / u) for u in range(1, 201)]
    records += [record(u, u, "imagine", entropy=1.0, value_loss=3.0) for u in (1, 2, 3)]
    figure = plots.learning_curves(records, columns=2)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes[:2]}
    assert list(panels) == ["loss", "observation loss"]
    raw, smooth = panels["observation loss"].get_lines()
    np.testing.assert_allclose(raw.get_ydata(), 2 / np.arange(1, 201))
    assert smooth.get_ydata()[0] > smooth.get_ydata()[-1]
    shown = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert shown == ["loss", "observation loss", "loss", "entropy", "value loss"]
    assert len(figure.axes[2].get_lines()) == 1  # few points: no smoothing
    only = plots.learning_curves(records, stages=["imagine"])
    assert len([axes for axes in only.axes if axes.get_visible()]) == 3


def test_compared_curves_has_a_panel_per_metric_and_a_line_per_name():
    few, many = np.arange(5.0), np.arange(80.0)
    curves = {"gru": {"loss": (few, 2 * few)}, "s5": {"loss": (many, 3 * many), "reward_loss": (few, few)}}
    figure = plots.compared_curves(curves, title="train-dynamics")
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["loss", "reward loss"]
    lines = [line for line in panels["loss"].get_lines() if len(line.get_xdata())]
    assert [line.get_color() for line in lines] == [plots.COLORS[0], plots.COLORS[1], plots.COLORS[1]]  # raw and smooth
    np.testing.assert_array_equal(lines[0].get_ydata(), 2 * few)
    np.testing.assert_array_equal(lines[1].get_ydata(), 3 * many)
    (only,) = panels["reward loss"].get_lines()
    assert only.get_color() == plots.COLORS[1]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["gru", "s5"]
    assert not plots.compared_curves({"gru": curves["gru"]}).legends
    (legend,) = plots.compared_curves({"gru": {"loss": (few, few, few - 1, few + 1)}}, band="a deviation").legends
    assert [text.get_text() for text in legend.get_texts()] == ["gru", "band: a deviation"]
    with pytest.raises(UsageError, match="no training records to draw"):
        plots.compared_curves({"gru": {}})


def test_smoothing_keeps_a_straight_line_straight_and_a_mean_unbiased():
    line = np.arange(50.0)
    np.testing.assert_allclose(plots._smoothed(line, 5)[2:-2], line[2:-2])
    np.testing.assert_allclose(plots._smoothed(np.full(9, 3.0), 4), 3.0)


def evaluation(step, mean, stderr=None, episodes=10):
    return {"environment_step": step, "mean": mean, "stderr": stderr, "episodes": episodes, "protocol": "returns"}


def test_return_curve_draws_intervals_and_keeps_other_numbers_of_episodes_apart():
    evaluations = [
        evaluation(3000, 4.0, 0.5),
        evaluation(1000, 0.0, 1.0),
        evaluation(1000, 1.0),
        evaluation(2000, 9.0, 2.0, episodes=3),
    ]
    figure = plots.return_curve(evaluations, references={"random": -1.0, "human": 4.01}, title="Catch")
    (axes,) = figure.axes
    ten, three = axes.containers
    assert (ten.get_label(), three.get_label()) == ("10 episodes, 95 % interval", "3 episodes, 95 % interval")
    np.testing.assert_array_equal(ten[0].get_xydata(), [[1000, 1], [3000, 4]])
    np.testing.assert_array_equal(three[0].get_xydata(), [[2000, 9]])
    assert ten[0].get_marker() != three[0].get_marker()
    bars = [bar.tolist() for bar in ten[2][0].get_segments() if len(bar)]
    assert bars == [[[3000, 4 - 1.96 * 0.5], [3000, 4 + 1.96 * 0.5]]], "none where nothing is known"
    assert {"random -1", "human 4.01"} == {text.get_text() for text in axes.texts}
    assert axes.get_xlabel() == "environment steps" and axes.get_xlim()[0] == 0
    low, high = axes.get_ylim()
    assert low < -1 and high > 9 + 1.96 * 2


@pytest.mark.parametrize("stderr", [None, 0.25])
def test_a_single_evaluation_is_seen(stderr):
    (axes,) = plots.return_curve([evaluation(5000, 0.5, stderr)]).axes
    assert axes.containers[0][0].get_marker() == "o"
    left, right = axes.get_xlim()
    assert left == 0 and 5000 < right < 6000
    assert axes.containers[0].get_label().startswith("10 episodes")


def test_names_of_near_references_do_not_overlap():
    figure = plots.return_curve(
        [evaluation(1, 0), evaluation(2, 100)], references={"IRIS": 50.0, "human": 50.0, "REM": 50.5}
    )
    heights = [text.get_position()[1] for text in figure.axes[0].texts]
    assert np.diff(heights).min() >= 0.05


def test_histogram_counts_every_episode_once():
    whole = [-1, -1, 1, 1, 1, 0]
    bars = plots.returns_histogram(whole, references={"random": -0.5}).axes[0].patches
    assert [bar.get_height() for bar in bars] == [2, 1, 3]
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx([-1, 0, 1])
    many = np.random.default_rng(0).gamma(3, 400, 100)
    figure = plots.returns_histogram(many)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 100
    assert f"mean {many.mean():.4g}" in labels(figure.axes[0])
    assert sum(bar.get_height() for bar in plots.returns_histogram([2.5]).axes[0].patches) == 1


def test_one_episode_leaves_room_beside_its_bar_and_whole_returns_have_whole_ticks():
    (axes,) = plots.returns_histogram([3.0]).axes
    low, high = axes.get_xlim()
    (bar,) = axes.patches
    assert bar.get_width() < (high - low) / 4 and axes.get_title(loc="left") == "1 episode"
    assert all(tick == round(tick) for tick in axes.get_xticks())
    (axes,) = plots.returns_histogram([3.0], references={"random": -20}).axes
    assert axes.get_xlim()[0] < -20


def test_profiles_have_one_named_line_each_and_a_band_where_there_is_one():
    taus, share = np.linspace(0, 2, 5), np.linspace(1, 0, 5)
    figure = plots.performance_profiles(
        taus, {"ours": (share, share - 0.1, share + 0.1), "theirs": (share, None, None)}
    )
    (axes,) = figure.axes
    assert labels(axes) == ["ours", "theirs"]
    assert len(axes.collections) == 1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_figure_gives_the_same_bytes_again(tmp_path, suffix):
    for name in ("a", "b"):
        plots.write_figure(tmp_path / (name + suffix), plots.returns_histogram([1, 2, 2]))
    data = (tmp_path / ("a" + suffix)).read_bytes()
    assert data == (tmp_path / ("b" + suffix)).read_bytes() and len(data) > 1000


def test_a_figure_is_a_picture_and_an_unknown_suffix_is_refused(tmp_path):
    plots.write_figure(tmp_path / "a.png", plots.returns_histogram([1, 2]))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 400
    with pytest.raises(UsageError, match=r"\.png, \.svg or \.pdf"):
        plots.write_figure(tmp_path / "a.bmp", plots.returns_histogram([1, 2]))


def test_nothing_heavy_is_imported_and_pyplot_never(tmp_path):
    code = (
        "import sys, wmcli.metrics.atari, wmcli.metrics.statistics, wmcli.report.images, wmcli.report.plots as p\n"
        "assert not {'torch', 'matplotlib', 'zarr', 'imageio_ffmpeg'} & set(sys.modules), 'at import'\n"
        f"p.write_figure(p.Path({str(tmp_path / 'a.png')!r}), p.returns_histogram([1, 2]))\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules), 'after drawing'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_costs_have_one_line_each_in_the_same_color_everywhere():
    panels = {
        "training": {"gru": [(64, 2.0), (256, 4.0)], "s4": [(64, 1.0)]},
        "imagination": {"s4": [(64, 3.0), (1024, 3.0)]},
    }
    figure = plots.cost_by_length(panels)
    training, imagination = figure.axes
    assert (training.get_title("left"), imagination.get_title("left")) == ("training", "imagination")
    lines = {line.get_label(): line for line in training.get_lines()}
    assert set(lines) == {"gru", "s4"}
    assert lines["gru"].get_xydata().tolist() == [[64, 2], [256, 4]]
    (s4,) = imagination.get_lines()
    assert s4.get_color() == lines["s4"].get_color() != lines["gru"].get_color()
    assert training.get_xscale() == training.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gru", "s4"]
    with pytest.raises(UsageError):
        plots.cost_by_length({})


def test_costs_may_have_a_spread_and_another_axis():
    panels = {"frames/s": {"s4": [(64, 10.0, 8.0, 11.0), (128, 9.0, 7.0, 9.5)]}, "MB": {"s4": [(64, 5.0), (128, 9.0)]}}
    rates, memory = plots.cost_by_length(panels, x_label="frames of an episode").axes
    (line,) = rates.get_lines()
    assert line.get_xydata().tolist() == [[64, 10], [128, 9]]
    (band,) = rates.collections
    corners = {tuple(corner) for path in band.get_paths() for corner in path.vertices.tolist()}
    assert {(64, 8), (64, 11), (128, 7), (128, 9.5)} <= corners
    assert not memory.collections and {axes.get_xlabel() for axes in (rates, memory)} == {"frames of an episode"}
    assert plots.cost_by_length({"MB": {"s4": [(64, 5.0)]}}).axes[0].get_xlabel() == "elements"


def test_learned_priors_have_a_panel_per_layer_and_number_and_a_line_per_head():
    updates = [0, 1000, 2000]
    mean = 6 + np.arange(3 * 2 * 8).reshape(3, 2, 8) / 10  # (K, layers, heads)
    runs = [{"mean": mean + seed, "span": np.full((3, 2, 8), 4.0)} for seed in (-1, 0, 1)]
    figure = plots.learned_priors(updates, runs, {"mean": 6.0, "span": 5.0})
    assert [axes.get_title("left") for axes in figure.axes] == ["mean", "span", "", ""]
    for layer, axes in enumerate(figure.axes[::2]):
        *heads, dashed = axes.get_lines()
        for head, line in enumerate(heads):
            assert line.get_xdata().tolist() == updates
            np.testing.assert_allclose(line.get_ydata(), mean[:, layer, head])
        assert len({(line.get_color(), line.get_linestyle()) for line in heads}) == 8
        assert dashed.get_ydata()[0] == 6.0 and dashed.get_linestyle() == "--"
        (corners, *_) = axes.collections[7].get_paths()
        assert corners.vertices[:, 1].max() == pytest.approx(mean[:, layer, 7].max() + 1)  # the deviation of -1, 0, 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"head {head}" for head in range(1, 9)]
    alone = plots.learned_priors(updates, [{"deviation": mean.tolist()}], {})
    assert not alone.axes[0].collections and len(alone.axes) == 2 and len(alone.axes[0].get_lines()) == 8


@pytest.mark.parametrize(
    ("updates", "runs", "message"),
    [
        ([], [{"mean": np.zeros((0, 1, 1))}], "no priors"),
        ([1], [], "no priors"),
        ([1], [{}], "no priors"),
        ([1], [{"mean": np.zeros((1, 1, 2))}, {"mean": np.zeros((1, 1, 3))}], "differ"),
        ([1], [{"mean": np.zeros((1, 1, 2))}, {"span": np.zeros((1, 1, 2))}], "differ"),
    ],
)
def test_learned_priors_that_cannot_be_drawn_together(updates, runs, message):
    with pytest.raises(UsageError, match=message):
        plots.learned_priors(updates, runs, {})


def named(axes):
    """Lines with a name in the legend."""
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_returns_over_are_a_line_for_one_run_and_mean_and_shade_for_several():
    figure = plots.returns_over(
        {
            "gru": [[(2000, 4.0), (0, 0.0), (1000, 3.0)]],
            "s4": [[(0, 0.0), (1000, 2.0)], [(0, 4.0), (500, 6.0), (2000, 0.0)]],
        },
        references={"random": -1.0},
        title="Catch",
    )
    (axes,) = figure.axes
    lines = named(axes)
    assert list(lines) == ["gru (1 run)", "s4 (2 runs)"]  # of one there is no band
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "band: 95 % bootstrap interval of the mean over runs"
    np.testing.assert_array_equal(lines["gru (1 run)"].get_xydata(), [[0, 0], [1000, 3], [2000, 4]])
    # Where both seeds were evaluated, at the steps of either: (0+4)/2, (1+6)/2, (2+4)/2.
    np.testing.assert_array_equal(lines["s4 (2 runs)"].get_xydata(), [[0, 2], [500, 3.5], [1000, 3]])
    (shade, _) = axes.collections  # the other one is in the legend
    corners = shade.get_paths()[0].vertices
    assert {(500.0, 1.0), (500.0, 6.0), (1000.0, 2.0), (1000.0, 4.0)} <= set(map(tuple, corners.tolist()))
    thin = [line for line in axes.get_lines() if line.get_color() == lines["s4 (2 runs)"].get_color()]
    assert [len(line.get_xdata()) for line in thin] == [2, 3, 3], "each seed is there in full"
    assert lines["gru (1 run)"].get_color() != lines["s4 (2 runs)"].get_color()
    assert [text.get_text() for text in axes.texts] == ["random -1"]
    assert axes.get_xlabel() == "environment steps" and axes.get_xlim()[0] == 0


def test_returns_over_take_the_last_of_a_step_and_runs_of_one_point_or_none_in_common():
    (axes,) = plots.returns_over({"a": [[(100, 1.0), (100, 2.0), (200, float("nan"))]]}).axes
    np.testing.assert_array_equal(named(axes)["a"].get_xydata(), [[100, 2]])
    assert named(axes)["a"].get_marker() == "o", "one point is seen"
    (axes,) = plots.returns_over({"a": [[(100, 1.0)], [(100, 3.0)]]}).axes
    np.testing.assert_array_equal(named(axes)["a (2 runs)"].get_xydata(), [[100, 2]])
    (axes,) = plots.returns_over({"a": [[(100, 1.0)], [(200, 3.0)]]}).axes
    assert len(named(axes)["a (2 runs)"].get_xdata()) == 0 and len(axes.get_lines()) == 3
    assert all(line.get_marker() for line in axes.get_lines())


def test_returns_over_without_returns_are_user_errors():
    for groups in ({}, {"gru": []}, {"gru": [[(1, 2.0)], []]}, {"gru": [[(1, float("nan"))]]}):
        with pytest.raises(UsageError, match="wm eval"):
            plots.returns_over(groups)


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(lambda: plots.returns_histogram([1, 1, -1], references={"random": -0.6}), id="histogram"),
        pytest.param(lambda: plots.return_curve([evaluation(50, 0.5, 0.1), evaluation(9, 0, episodes=3)]), id="curve"),
        pytest.param(
            lambda: plots.returns_over({f"dynamics.backbone={n}": [[(0, 1.0), (9, 2.0)]] for n in range(9)}),
            id="over steps",
        ),
        pytest.param(
            lambda: plots.error_curves(
                {n: ([1, 2], (np.ones(2), None, None)) for n in "abcdefghij"}, x_label="x", y_label="y"
            ),
            id="errors",
        ),
        pytest.param(lambda: plots.performance_profiles([0, 1], {"a": (np.ones(2), None, None)}), id="profiles"),
        pytest.param(lambda: plots.cost_by_length({"a": {n: [(1, 1.0), (2, 2.0)] for n in "abcdefghij"}}), id="costs"),
        pytest.param(lambda: plots.learned_priors([0, 1], [{"mean": np.ones((2, 1, 8))}], {}), id="priors"),
    ],
)
def test_a_legend_lies_on_no_data_and_within_the_picture(figure):
    figure = figure()
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert all(axes.get_window_extent().width > 200 for axes in figure.axes), "room is left for the data"


def test_ten_lines_look_different_with_colors_and_without():
    (axes,) = plots.cost_by_length({"training": {name: [(64, 1.0), (128, 2.0)] for name in "abcdefghij"}}).axes
    lines = axes.get_lines()
    assert len({line.get_marker() for line in lines}) == 10
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 10


@pytest.mark.parametrize(("top", "labels"), [(200.0, {"100", "200"}), (1e5, {"100", "1000", "10000"})])
def test_errors_on_a_logarithmic_axis_have_plain_numbers(top, labels):
    band = np.array([60.0, top]), None, None
    figure = plots.error_curves({"a": ([1, 2], band)}, x_label="x", y_label="y", log=True)
    figure.canvas.draw()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels(which="both")]
    assert labels <= set(shown) and not any("$" in label for label in shown)


def test_the_band_of_an_interval_is_the_bootstrap_interval_of_the_mean():
    rng = np.random.default_rng(3)
    runs = [[(step, float(rng.normal(step))) for step in (0, 1, 2)] for _ in range(8)]
    (axes,) = plots.returns_over({"a": runs}).axes
    corners = axes.collections[0].get_paths()[0].vertices
    for step in (0, 1, 2):
        estimate = bootstrap({"a": [run[step][1] for run in runs]}, "mean", np.random.default_rng(0))
        drawn = corners[corners[:, 0] == step, 1]
        assert (drawn.min(), drawn.max()) == pytest.approx((estimate.low, estimate.high), abs=0.05)
    np.testing.assert_array_equal(named(axes)["a (8 runs)"].get_xydata()[:, 1], np.mean(runs, 0)[:, 1])


def band_of(runs, **options):
    """The band of runs of two points: low and high at each."""
    (axes,) = plots.returns_over({"a": runs}, **options).axes
    corners = axes.collections[0].get_paths()[0].vertices
    return [(min(at), max(at)) for at in ([y for x, y in corners if x == step] for step in (0, 1))]


def test_a_band_is_that_which_was_asked_for_and_the_legend_names_it():
    runs = [[(0, value), (1, value + 1)] for value in (0.0, 5.0, 1.0)]
    assert band_of(runs, band="range") == [(0, 5), (1, 6)]
    error = np.std([0.0, 5.0, 1.0], ddof=1) / 3**0.5
    assert band_of(runs, band="stderr") == [pytest.approx((mean - error, mean + error)) for mean in (2, 3)]
    assert band_of(runs) == band_of(runs, band="bootstrap") == band_of(runs, band="range")  # of three runs
    more = [*runs, *([(0, 2.0), (1, 3.0)] for _ in range(9))]
    low, high = band_of(more)[0]
    assert 0 < low < 2 < high < 5
    for band, name in [("range", "lowest to highest run"), ("stderr", "one standard error"), ("bootstrap", "95 %")]:
        (legend,) = plots.returns_over({"a": runs}, band=band).legends
        assert name in legend.get_texts()[-1].get_text()
    (legend,) = plots.returns_over({"a": runs[:1]}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a"]
    plots.svg_text(plots.returns_over({"a": [[(0, 1.0)], [(1, 1.0)]]}), "a")  # no step in common


def bars(axes):
    """Row -> low and high of the bars of intervals."""
    return {
        round(bar.get_y() + bar.get_height() / 2): pytest.approx((bar.get_x(), bar.get_x() + bar.get_width()))
        for bar in axes.patches
    }


def test_statistics_have_a_panel_each_and_a_row_for_each_variant():
    panels = {
        "mean": {"gru": (0.5, 0.25, 0.75), "s4": (1.0, 0.5, 2.0)},
        "IQM": {"s4": (0.9, 0.8, 1.0), "a single run": (0.3, None, None)},
    }
    figure = plots.interval_panels(panels, x_label="human-normalized score", title="Scores")
    mean, iqm = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["mean", "IQM"]
    assert [label.get_text() for label in mean.get_yticklabels()] == ["gru", "s4", "a single run"]
    assert mean.get_ylim()[0] > mean.get_ylim()[1], "the first on top"
    assert bars(mean) == {0: (0.25, 0.75), 1: (0.5, 2.0)} and bars(iqm) == {1: (0.8, 1.0)}
    values = [[(line.get_xdata()[0], np.mean(line.get_ydata())) for line in axes.get_lines()] for axes in figure.axes]
    assert values == [[(0.5, 0), (1.0, 1)], [(0.9, 1), (0.3, 2)]]
    colors = [{round(np.mean(line.get_ydata())): line.get_color() for line in axes.get_lines()} for axes in figure.axes]
    assert colors[0][1] == colors[1][1] != colors[0][0], "a variant has one color"
    (left, right), (lowest, highest) = mean.get_xlim(), (0.25, 2.0)
    assert left < lowest - 0.05 and highest + 0.05 < right, "bars keep away from the edges"
    with pytest.raises(UsageError, match="wm compare"):
        plots.interval_panels({"mean": {}})


def test_improvements_have_a_row_for_each_pair_and_a_line_at_one_half():
    figure = plots.improvement({("gru", "s4"): (0.7, 0.6, 0.9), ("s4", "mamba"): (0.2, None, None)})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gru", "s4"]
    (others,) = axes.child_axes
    figure.canvas.draw()
    assert [label.get_text() for label in others.get_yticklabels()] == ["s4", "mamba"]
    assert others.get_ylim() == axes.get_ylim(), "both names of a pair are level"
    first, second, half = axes.get_lines()
    assert (first.get_xdata()[0], second.get_xdata()[0]) == (0.7, 0.2) and list(half.get_xdata()) == [0.5, 0.5]
    assert bars(axes) == {0: (0.6, 0.9)} and axes.get_xlim() == (-0.02, 1.02), "0 and 1 are seen"
    with pytest.raises(UsageError, match="wm compare"):
        plots.improvement({})


def test_long_names_keep_both_ends_and_room_for_the_data():
    long = "dynamics.backbone.kind=transformer_xl, controller.kind=actor_critic"
    figure = plots.interval_panels({name: {long: (1, 0, 2)} for name in ("mean", "median", "IQM", "optimality gap")})
    (label,) = figure.axes[0].get_yticklabels()
    start, _, end = label.get_text().partition("…")
    assert long.startswith(start) and long.endswith(end) and len(start) == len(end) == 16
    figure.canvas.draw()
    assert all(axes.get_window_extent().width > 70 for axes in figure.axes)


THIRTY = [f"dynamics.backbone.kind=a-long-name, controller.kind=actor_critic, seed={n}" for n in range(30)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(lambda: plots.performance_profiles([0, 1, 2], dict.fromkeys(THIRTY, BAND)), id="profiles"),
        pytest.param(lambda: plots.returns_over({n: [[(0, 1.0)], [(0, 2.0)]] for n in THIRTY}), id="returns"),
        pytest.param(
            lambda: plots.error_curves({n: ([1, 2, 3], BAND) for n in THIRTY}, x_label="x", y_label="y"), id="errors"
        ),
        pytest.param(
            lambda: plots.compared_curves({n: {"loss": (np.arange(3), BAND[0])} for n in THIRTY}), id="losses"
        ),
    ],
)
def test_the_legend_of_thirty_variants_leaves_room_for_their_lines(figure):
    figure = figure()
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_window_extent().height > 0.8 * figure.dpi
    box = legend.get_window_extent()
    assert box.y0 >= 0 and box.x1 <= figure.bbox.x1 and not box.overlaps(axes.get_tightbbox())


def test_bands_of_many_variants_stay_apart():
    for count, alpha in ((3, 0.15), (10, 0.15), (30, 0.05)):
        (axes,) = plots.performance_profiles([0, 1, 2], dict.fromkeys(THIRTY[:count], BAND)).axes
        assert {round(band.get_alpha(), 4) for band in axes.collections} == {alpha}


# -- within a page ----------------------------------------------------------------------------------------------------

HOSTILE = "</svg><script>alert(1)</script>\"'&<!-- $\\frac{$ \x00\ud800 $x$"
BAND = np.ones(3), np.full(3, 0.5), np.full(3, 2.0)
FIGURES = {
    "learning": lambda name: plots.learning_curves([record(u, 1 / u, name, kl=u % 7) for u in range(1, 99)]),
    "curve": lambda name: plots.return_curve([evaluation(50, 0.5, 0.1), evaluation(90, 1)], references={name: 1.0}),
    "over": lambda name: plots.returns_over({name: [[(0, 1.0), (9, 2.0)], [(0, 3.0), (9, 3.0)]]}, title=name),
    "histogram": lambda name: plots.returns_histogram([1, 2, 2, 5], references={name: 1.0}),
    "profiles": lambda name: plots.performance_profiles([0, 1, 2], {name: BAND}),
    "intervals": lambda name: plots.interval_panels({name: {name: (1, 0, 2), "b": (2, 1, 3)}}),
    "improvement": lambda name: plots.improvement({(name, name): (0.7, 0.6, 0.8)}),
    "costs": lambda name: plots.cost_by_length({name: {name: [(1, 1.0), (2, 5.0)]}}),
    "priors": lambda name: plots.learned_priors([0, 1], [{name: np.ones((2, 1, 8))}] * 2, {name: 1.0}),
    "errors": lambda name: plots.error_curves(
        {name: ([1, 2, 3], BAND), "b": ([1, 2, 4], BAND)}, x_label="x", y_label=name
    ),
}


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_a_figure_in_a_page_has_text_and_the_page_s_colors_and_ids_of_its_own(make):
    svg = plots.svg_text(make("a variant"), "fig-1")
    root = ElementTree.fromstring(svg)
    assert root.tag == "svg" and float(root.attrib["width"]) == pytest.approx(
        1.5 * float(root.attrib["viewBox"].split()[2]), abs=1
    )
    attributes = [(key, value) for element in root.iter() for key, value in element.attrib.items()]
    assert {element.tag for element in root.iter()} <= {"svg", "g", "defs", "path", "use", "text", "clipPath", "rect"}
    colors = {value for key, value in attributes if key in ("fill", "stroke")}
    assert {"var(--ink)", "var(--muted)"} <= colors
    assert all(color == "none" or re.fullmatch(r"var\(--(ink|muted|line|paper|c[0-6])\)", color) for color in colors)
    ids = [value for key, value in attributes if key == "id"]
    used = {match for _, value in attributes for match in re.findall(r"^(?:url\()?#([^)]+)", value)}
    assert len(ids) == len(set(ids)) and used == set(ids) and all(each.startswith("fig-1-") for each in ids)
    assert not any(key in ("style", "font-family", "class") for key, _ in attributes)
    assert not re.search(r"\d\.\d{3}", svg), "two decimals"
    assert any(text.startswith("a variant") for text in root.itertext())
    assert svg == plots.svg_text(make("a variant"), "fig-1")


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_names_in_a_figure_are_text_whatever_they_hold(make, tmp_path):
    svg = plots.svg_text(make(HOSTILE), "a")
    texts = " ".join(ElementTree.fromstring(svg).itertext())
    assert "<script" not in svg and svg.count("</svg>") == 1 and "<!--" not in svg
    start, end = HOSTILE[:14], "\ufffd\ufffd $x$"
    assert (start in texts and end in texts) or f"{start}…" in texts.replace(HOSTILE[14:16], "…")
    plots.write_figure(tmp_path / "a.png", make(HOSTILE))


IN_FILES = {"ink": "#222222", "muted": "#777777", "line": "#e6e6e6", "paper": "#ffffff"}
IN_FILES |= {f"c{index}": color for index, color in enumerate(plots.COLORS)}


def shapes(svg):
    """Kind, numbers and style of each shape of an SVG, whatever its groups are, with the colors of files."""
    root = ElementTree.fromstring(svg)
    found, targets = [], {element.get("id"): element for element in root.iter()}

    def visit(element, style):
        tag = element.tag.rpartition("}")[2]
        if tag in ("defs", "metadata"):
            return
        own = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        own |= dict(part.strip().split(": ") for part in own.pop("style", "").split(";") if part)
        style = style | {key: value for key, value in own.items() if key.startswith(("fill", "stroke-", "stroke"))}
        shape = targets[own["href"][1:]] if tag == "use" else element
        numbers = [own.get(key, "0") for key in ("x", "y")] + re.findall(r"-?\d+(?:\.\d+)?", shape.get("d") or "")
        colors = {key: re.sub(r"var\(--(\w+)\)", lambda name: IN_FILES[name[1]], value) for key, value in style.items()}
        if tag in ("path", "use", "text") and not (colors["fill"] == "none" and "stroke" not in colors):
            found.append((tag, element.text or "", np.array(numbers, float), colors))
        for child in element:
            visit(child, style)

    visit(root, {"fill": "#000000"})
    return found


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_shapes_of_a_figure_in_a_page_are_those_of_the_file(make):
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        make("a variant").savefig(data, format="svg", transparent=True)
    theirs, ours = shapes(data.getvalue()), shapes(plots.svg_text(make("a variant"), "a"))
    assert len(ours) == len(theirs) >= 20
    for (tag, text, places, style), (their_tag, their_text, their_places, their_style) in zip(
        ours, theirs, strict=True
    ):
        assert (tag, text.strip()) == (their_tag, their_text.strip())
        np.testing.assert_allclose(places, their_places, atol=0.0051)
        assert style.keys() - {"stroke-linejoin"} == their_style.keys() - {"stroke-linejoin"}
        assert all(style[key] == their_style[key] for key in ("fill", "stroke") if key in style)


@pytest.mark.slow
def test_a_browser_draws_the_same_as_from_matplotlib_s_own_file(browser):
    variables = ";".join(f"--{name}:{color}" for name, color in IN_FILES.items())
    tab = browser.new_page(viewport={"width": 1600, "height": 1200})

    def drawn(svg):
        tab.set_content(f"<style>body{{margin:0;{variables};font-family:DejaVu Sans}}svg{{width:900px}}</style>{svg}")
        return np.asarray(Image.open(io.BytesIO(tab.locator("svg").screenshot())).convert("RGB")).astype(float)

    for name in ("over", "histogram", "profiles", "improvement", "priors"):
        make = FIGURES[name]
        data = io.BytesIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            make("a variant").savefig(data, format="svg")
        theirs = re.sub(r' height="[^"]+pt"', "", data.getvalue().decode().partition("<svg")[2], count=1)
        ours = re.sub(r' height="[^"]+"', "", plots.svg_text(make("a variant"), "a"), count=1)
        difference = abs(drawn(f"<svg{theirs}") - drawn(ours))
        assert difference.mean() < 0.1, name  # rounding gives up to 0.05, of 255
    tab.close()
