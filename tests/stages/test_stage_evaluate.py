"""Evaluation: exactly the episodes asked for, none favored by its length."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from odd_lengths import LONG, ODD_LENGTHS, SHORT, STARTED
from PIL import Image
from tiny_run import latest, opened
from wrong_steps import ENDLESS, FAULTY, Endless

from wmcli.controllers.agent import UniformAgent
from wmcli.envs import EnvironmentSettings
from wmcli.errors import EnvironmentFault, UsageError
from wmcli.progress import Progress
from wmcli.stages.episodes import PlayedEpisodes, play_episodes
from wmcli.stages.evaluate import evaluate, score

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


def played(episodes: int, environments: int, seed: int = 3, environment: str = ODD_LENGTHS) -> PlayedEpisodes:
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
        name="test",
    )


# -- which episodes count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("episodes", "environments"), [(1, 1), (1, 4), (3, 7), (6, 3), (7, 3), (20, 6), (5, 1)])
def test_exactly_the_first_episodes_that_were_started_count(episodes: int, environments: int) -> None:
    result = played(episodes, environments)
    assert result.lengths == STARTED[:episodes]
    assert result.returns == [length / 2 for length in result.lengths]


def test_long_episodes_are_as_frequent_as_they_are() -> None:
    """Half of the episodes are long. Counting the first that end, or one for each environment, favors one."""
    result = played(400, 8)
    assert abs(np.mean(np.array(result.lengths) == LONG) - 0.5) < 0.075  # three standard deviations
    assert set(result.lengths) == {SHORT, LONG}


def test_more_environments_do_not_play_other_numbers_of_episodes() -> None:
    assert [len(played(9, environments).returns) for environments in (1, 2, 4, 8, 16)] == [9] * 5


def test_an_episode_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmcli.stages.episodes.LONGEST_EPISODE", 50)
    played(3, 2)  # none lasts longer
    with pytest.raises(UsageError, match=f"{ENDLESS}: an episode has not ended after 50 steps.*max_episode_steps=N"):
        played(3, 2, environment=ENDLESS)
    gymnasium.registry.pop("wm-test/Limited-v0", None)
    gymnasium.register("wm-test/Limited-v0", entry_point=Endless, max_episode_steps=60)
    assert played(3, 2, environment="wm-test/Limited-v0").lengths == [60] * 3


def test_faults_of_an_environment_are_reported() -> None:
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


FILMS = {"episode.webp": 8, "imagination.webp": 7}
"""Seven frames that were acted on; in the film also the outcome, however long it is shown."""


def test_pictures_of_an_evaluation_can_be_looked_at(tiny: Path) -> None:
    artifact = latest(tiny, "evaluation")
    names = {entry["path"] for entry in artifact.manifest["files"]}
    assert names == {*FILMS, "imagination.png", "imagination.json", "returns.png", "curve.png"}
    for name in names - {"imagination.json"}:
        with Image.open(artifact.path / name) as picture:
            picture.load()
            frames = getattr(picture, "n_frames", 1)
        assert frames == FILMS.get(name, 1)
    errors = json.loads((artifact.path / "imagination.json").read_text(encoding="utf-8"))
    assert errors.keys() == {"context", "episodes", "mean_squared_error"}
    assert (errors["context"], errors["episodes"], len(errors["mean_squared_error"])) == (2, 1, 7)
