"""Evaluation: exactly the episodes asked for, none favoured by its length; and statistics over runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from odd_lengths import LONG, ODD_LENGTHS, SHORT, STARTED
from PIL import Image
from tiny_run import latest, opened
from wrong_steps import ENDLESS, FAULTY, Endless

from wmcli.artifacts import Run
from wmcli.controllers.agent import UniformAgent
from wmcli.envs import EnvironmentSettings
from wmcli.errors import ArtifactError, EnvironmentFault, UsageError
from wmcli.progress import Progress
from wmcli.stages import evaluate as stage
from wmcli.stages.evaluate import Played, aggregate, compare_settings, evaluate, play_episodes, score

KEYS = {
    "mean",
    "median",
    "stderr",
    "episodes",
    "returns",
    "lengths",
    "random_mean",
    "human_normalized",
    "protocol",
    "environment",
    "total_steps",
}


def played(episodes: int, environments: int, seed: int = 3, environment: str = ODD_LENGTHS) -> Played:
    STARTED.clear()
    agent = UniformAgent(4, min(episodes, environments), generator=torch.Generator().manual_seed(seed))
    settings = EnvironmentSettings(id=environment, size=16, count=5)  # the count is for collection
    return play_episodes(
        settings,
        agent,
        episodes=episodes,
        environments=environments,
        seed=seed,
        progress=Progress(quiet=True),
        what="test",
    )


# -- which episodes count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("episodes", "environments"), [(1, 1), (1, 4), (3, 7), (6, 3), (7, 3), (20, 6), (5, 1)])
def test_exactly_the_first_episodes_that_were_started_count(episodes: int, environments: int) -> None:
    result = played(episodes, environments)
    assert result.lengths == STARTED[:episodes]
    assert result.returns == [length / 2 for length in result.lengths]


def test_long_episodes_are_as_frequent_as_they_are() -> None:
    """Half of the episodes are long. Counting the first that end, or one for each environment, favours one."""
    result = played(400, 8)
    assert abs(np.mean(np.array(result.lengths) == LONG) - 0.5) < 0.075  # three standard deviations
    assert set(result.lengths) == {SHORT, LONG}


def test_more_environments_do_not_play_other_numbers_of_episodes() -> None:
    assert [len(played(9, environments).returns) for environments in (1, 2, 4, 8, 16)] == [9] * 5


def test_an_episode_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LONGEST_EPISODE", 50)
    played(3, 2)  # none lasts longer
    with pytest.raises(UsageError, match=f"{ENDLESS}: an episode has not ended after 50 steps.*max_episode_steps=N"):
        played(3, 2, environment=ENDLESS)
    gymnasium.registry.pop("wm-test/Limited-v0", None)
    gymnasium.register("wm-test/Limited-v0", entry_point=Endless, max_episode_steps=60)
    assert played(3, 2, environment="wm-test/Limited-v0").lengths == [60] * 3


def test_what_an_environment_does_wrong_is_told() -> None:
    with pytest.raises(EnvironmentFault, match=f"{FAULTY}: step 12 after reset, action .*: .* reward nan"):
        played(3, 2, environment=FAULTY)


def test_the_film_is_of_the_first_episode_alone() -> None:
    for seed in range(4):
        result = played(6, 3, seed)
        length = result.lengths[0]
        film, frames = result.film, np.stack(result.film.frames)
        assert len(frames) == len(film.actions) == len(film.rewards) == length
        assert frames[:, 0, 0, 0].tolist() == list(range(length))  # the time, from its start
        assert set(frames[:, 0, 1, 0].tolist()) == {length}
        assert sum(film.rewards) == result.returns[0]
        assert film.policies == film.values == []


def test_the_summary_of_some_returns() -> None:
    assert score([1.0, 2.0, 6.0]) == {
        "mean": 3.0,
        "median": 2.0,
        "stderr": pytest.approx(np.std([1, 2, 6], ddof=1) / np.sqrt(3)),
        "episodes": 3,
        "returns": [1.0, 2.0, 6.0],
    }
    assert score([4.0])["stderr"] is None


# -- the stage --------------------------------------------------------------------------------------------------------


def test_the_metrics_of_an_evaluation(tiny: Path) -> None:
    metrics = latest(tiny, "evaluation").metrics
    assert set(metrics) == KEYS
    assert metrics["episodes"] == len(metrics["returns"]) == len(metrics["lengths"]) == 5
    assert metrics["lengths"] == [7] * 5 and set(metrics["returns"]) <= {-1.0, 1.0}
    assert metrics["mean"] == pytest.approx(np.mean(metrics["returns"]))
    assert metrics["random_mean"] * 5 == pytest.approx(round(metrics["random_mean"] * 5))  # over 5 episodes
    assert metrics["human_normalized"] is None  # nobody has measured people at Catch
    assert (metrics["protocol"], metrics["environment"], metrics["total_steps"]) == ("returns", "wm/Catch-v0", 90)


@pytest.mark.parametrize("episodes", [1, 3])
def test_the_number_of_episodes_may_be_given(run: Path, episodes: int) -> None:
    artifact = evaluate(opened(run), episodes=episodes)
    assert artifact.version == 2
    assert artifact.metrics["episodes"] == len(artifact.metrics["returns"]) == episodes
    assert evaluate(opened(run), episodes=episodes).version == 2


def test_pictures_of_an_evaluation_can_be_looked_at(tiny: Path) -> None:
    artifact = latest(tiny, "evaluation")
    for entry in artifact.manifest["files"]:
        with Image.open(artifact.path / entry["path"]) as picture:
            picture.load()
            frames = getattr(picture, "n_frames", 1)
        assert frames == (7 if entry["path"].endswith(".gif") else 1)


# -- several runs -----------------------------------------------------------------------------------------------------


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
