"""Figures: which records and lines they hold, and that files are reproducible."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from wmcli.errors import UsageError
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
    assert list(lines) == ["gru", "s4 (2 runs)"]
    np.testing.assert_array_equal(lines["gru"].get_xydata(), [[0, 0], [1000, 3], [2000, 4]])
    # Where both seeds were evaluated, at the steps of either: (0+4)/2, (1+6)/2, (2+4)/2.
    np.testing.assert_array_equal(lines["s4 (2 runs)"].get_xydata(), [[0, 2], [500, 3.5], [1000, 3]])
    (shade,) = axes.collections
    corners = shade.get_paths()[0].vertices
    assert {(500.0, 1.0), (500.0, 6.0), (1000.0, 2.0), (1000.0, 4.0)} <= set(map(tuple, corners.tolist()))
    thin = [line for line in axes.get_lines() if line.get_color() == lines["s4 (2 runs)"].get_color()]
    assert [len(line.get_xdata()) for line in thin] == [2, 3, 3], "each seed is there in full"
    assert lines["gru"].get_color() != lines["s4 (2 runs)"].get_color()
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
