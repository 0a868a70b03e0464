"""Statistics over the evaluations of several runs, and which of them may stand together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import latest, opened

from wmcli.artifacts import Run
from wmcli.errors import ArtifactError, UsageError
from wmcli.stages.aggregate import aggregate, compare_settings
from wmcli.stages.evaluate import evaluate, score


def scored(
    folder: Path,
    mean: float,
    environment: str = "ALE/Pong-v5",
    normalized: float | None = None,
    settings: dict[str, Any] | None = None,
    **block: Any,
) -> Path:
    """A run whose only artifact is an evaluation with this mean return."""
    run = Run.open(folder, create=True)
    with run.job("evaluation", {"mean": mean}, {}).work() as work:
        (work.payload / "x").touch()
        work.publish(
            settings=settings or {},
            metrics=score([mean]) | {"environment": environment, "human_normalized": normalized, "protocol": "returns"},
            environment={"id": environment, "protocol": "rem"} | block,
            machine={},
        )
    return folder


def test_runs_of_one_environment_are_pooled_as_returns(run: Path, tiny: Path) -> None:
    evaluate(opened(run), episodes=3)
    result = aggregate([tiny, run])
    scores = [latest(folder, "evaluation").metrics["mean"] for folder in (tiny, run)]  # the newest of each
    assert result["scores"] == {"wm/Catch-v0": scores}
    assert (result["unit"], result["runs"], result["tasks"]) == ("return", 2, 1)
    assert result["mean"]["value"] == pytest.approx(np.mean(scores))
    for name in ("mean", "median", "iqm", "optimality_gap"):
        assert set(result[name]) == {"value", "low", "high"}
    profile = result["performance_profile"]
    assert len(profile["threshold"]) == len(profile["share"]) == 21 and profile["share"][-1] == 0
    assert "probability_of_improvement" not in result
    json.dumps(result, allow_nan=False)


def test_games_with_reference_scores_are_pooled_as_human_normalised_scores(tmp_path: Path) -> None:
    runs = [
        scored(tmp_path / "a", 10.0, normalized=0.5),
        scored(tmp_path / "b", 20.0, normalized=1.5),
        scored(tmp_path / "c", 7.0, "ALE/Breakout-v5", normalized=3.0),
    ]
    result = aggregate(runs)
    assert result["scores"] == {"ALE/Pong-v5": [0.5, 1.5], "ALE/Breakout-v5": [3.0]}
    assert (result["unit"], result["runs"], result["tasks"]) == ("human-normalised score", 3, 2)
    assert result["mean"]["value"] == pytest.approx(2.0)  # of the two games' means
    assert result["optimality_gap"]["value"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert result["mean"]["low"] < 2.0 < result["mean"]["high"]


def test_one_set_of_runs_against_another(tmp_path: Path) -> None:
    ours = [scored(tmp_path / f"a{mean}", mean) for mean in (1.0, 3.0)]
    theirs = [scored(tmp_path / f"b{mean}", mean) for mean in (0.0, 2.0)]
    result = aggregate(ours, theirs)
    assert result["probability_of_improvement"]["value"] == pytest.approx(3 / 4)
    assert result["scores"] == {"ALE/Pong-v5": [1.0, 3.0]}
    assert result["runs"] == 2
    assert aggregate(theirs, ours)["probability_of_improvement"]["value"] == pytest.approx(1 / 4)


def test_runs_are_sorted_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    def run(name: str, mean: float, **settings: Any) -> Path:
        return scored(tmp_path / name, mean, settings=settings)

    runs = [
        run("a", 1.0, seed=1, backbone={"name": "gru"}),
        run("b", 5.0, seed=1),
        run("c", 2.0, seed=2, backbone={"name": "gru"}),
        run("d", 6.0, seed=1, dynamics={"batch": 3}),
    ]
    rows = compare_settings(runs, ["backbone.name", "dynamics.batch"])
    assert [(row["backbone.name"], row["dynamics.batch"], row["runs"], row["mean"]) for row in rows] == [
        ("gru", "64", 2, 1.5),
        ("retnet", "64", 1, 5.0),
        ("retnet", "3", 1, 6.0),
    ]
    assert rows[0]["low"] == 1.0 and rows[0]["high"] == 2.0 and rows[1]["low"] is None
    with pytest.raises(UsageError, match="--by backbone.nam: no such setting; did you mean 'backbone.name'"):
        compare_settings(runs, ["backbone.nam"])


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    pong = scored(tmp_path / "pong", 1.0)
    known = scored(tmp_path / "known", 1.0, normalized=0.5)
    for other, words in [
        (scored(tmp_path / "breakout", 1.0, "ALE/Breakout-v5"), "different environments cannot be pooled"),
        (scored(tmp_path / "sticky", 1.0, protocol="plain"), r"different protocols \(plain, rem\)"),
    ]:
        with pytest.raises(UsageError, match=words):
            aggregate([pong, other])
        with pytest.raises(UsageError, match=words):
            aggregate([pong], [other])
    with pytest.raises(UsageError, match="only one of them has: ALE/Breakout-v5"):
        aggregate([known], [scored(tmp_path / "other", 1.0, "ALE/Breakout-v5", normalized=0.5)])


def test_a_run_without_evaluation_ends_in_the_command_that_makes_one(tmp_path: Path, elsewhere: Path) -> None:
    with pytest.raises(
        ArtifactError, match=f"no such evaluation in {elsewhere}; make one with: wm eval --run {elsewhere}"
    ):
        aggregate([elsewhere])
    with pytest.raises(ArtifactError, match="no run at"):
        aggregate([tmp_path / "nowhere"])
