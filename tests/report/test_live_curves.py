"""Curves that grow record by record equal those of all records; thinned ones keep every extreme and the end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from wmcli.report.live_curves import LiveCurves, thin
from wmcli.report.plots import curves_by_stage


def records(stage, job, updates, **metrics):
    return [
        {"stage": stage, "job": job, "update": u, "time": "t", "epoch": 1, "loss": u + 0.5} | metrics for u in updates
    ]


HISTORIES = {
    "epochs": [
        *records("train-dynamics", "a", range(1, 6)),
        *records("imagine", "c", range(1, 4), entropy=2.0),
        *records("train-dynamics", "b", range(6, 11), reward_loss=1.0),
    ],
    "killed and resumed": [*records("imagine", "a", range(1, 9)), *records("imagine", "a", range(5, 12), loss=0.0)],
    "resumed before a metric began": [
        *records("imagine", "a", [1, 2]),
        *records("imagine", "a", [3], late=1.0),
        *records("imagine", "a", [2, 3]),
    ],
    "trained again": [*records("imagine", "a", range(1, 9)), *records("imagine", "b", range(1, 12), loss=0.0)],
    "from an epoch on": [
        *records("imagine", "a", range(1, 5)),
        *records("imagine", "b", range(5, 9)),
        *records("imagine", "c", range(5, 7), loss=-1.0),
    ],
    "an old version": [{"stage": "imagine", "update": u, "loss": 1.0 / u} for u in range(1, 5)],
    "odd values": [
        {"stage": "imagine", "update": 1, "loss": math.nan, "x": 1},
        {"stage": "imagine", "update": 2, "loss": None, "x": True, "y": "1"},
        {"stage": 3, "update": 3, "loss": 1.0},
        {"stage": "eval", "mean_return": 1.0},
        {"stage": "imagine", "update": 4, "x": 7, "loss": 2.0},
    ],
    "nothing": [],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_they_are_the_curves_of_all_records_at_any_time(history):
    live = LiveCurves()
    for end, record in enumerate(history, 1):
        live.add(record)
        got, want = live.by_stage(), curves_by_stage(history[:end])
        assert [(stage, list(metrics)) for stage, metrics in got.items()] == [
            (stage, list(metrics)) for stage, metrics in want.items()
        ]
        for stage, metrics in want.items():
            for name, curve in metrics.items():
                np.testing.assert_array_equal(got[stage][name], curve, f"{stage} {name} after {end}")


def test_what_is_no_update_adds_nothing():
    live = LiveCurves()
    for update in (True, None, 1.5, "1", 10**400):
        assert not live.add({"stage": "imagine", "update": update, "loss": 1.0})
    assert live.by_stage() == {}


def test_a_short_curve_stays_as_it_is():
    assert thin(np.arange(1, 4.0), np.array([0.25, -1.0, 1 / 3])) == [(1, 0.25), (2, -1), (3, 0.333333)]
    assert thin(np.array([]), np.array([])) == []


@pytest.mark.parametrize("count", [600, 601, 1200, 1201, 9999])
def test_a_long_curve_keeps_means_extremes_and_end(count):
    x, y = np.arange(1, count + 1.0) * 50, np.random.default_rng(0).normal(size=count)
    y[count // 3] = 1e3  # one spike
    points = thin(x, y)
    assert 300 <= len(points) <= 600
    assert points[-1][0] == x[-1]
    if count > 600:
        assert max(high for *_, high in points) == 1000 and all(low <= mean <= high for _, mean, low, high in points)
        size = 2 ** math.ceil(math.log2(count / 600))
        assert points[0] == pytest.approx((x[size - 1], y[:size].mean(), y[:size].min(), y[:size].max()), rel=1e-5)
        left = len(x) - (len(points) - 1) * size
        assert points[-1][1] == pytest.approx(y[-left:].mean(), rel=1e-5)


def test_growing_changes_only_the_end():
    x, y = np.arange(5000.0), np.random.default_rng(1).normal(size=5000)
    before = thin(x[:3000], y[:3000])
    assert thin(x[:3010], y[:3010])[: len(before) - 1] == before[:-1]


def test_huge_values_are_json():
    y = np.full(2000, 1.7976931348623157e308)
    assert math.isfinite(json.loads(json.dumps(thin(np.arange(2000.0), y), allow_nan=False))[0][1])
