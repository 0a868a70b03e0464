"""Evaluations that were interrupted, and those that stand beside others of their run."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from odd_lengths import ODD_LENGTHS
from tiny_run import TRAINING, Killed, copied, kill_at, opened
from wrong_steps import UNSEEDED

from wmcli.artifacts import Run
from wmcli.artifacts.manifest import render
from wmcli.config import digest
from wmcli.controllers.agent import UniformAgent
from wmcli.envs import EnvironmentSettings, Streams
from wmcli.errors import ArtifactError, Stopped, UsageError
from wmcli.progress import Progress
from wmcli.settings import MAX_EPISODES
from wmcli.stages import evaluate as module
from wmcli.stages.collect import collect
from wmcli.stages.episodes import PlayedEpisodes, play_episodes
from wmcli.stages.evaluate import evaluate, score
from wmcli.stages.imagine import imagine
from wmcli.stages.pictures import Film

# -- interrupted ------------------------------------------------------------------------------------------------------

EAGER = "training.checkpoint_seconds=0"
UNEVEN = [f"environment.id={ODD_LENGTHS}", "evaluation.episodes=7", "evaluation.environments=3"]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which episodes are of different lengths, up to its controller."""
    folder = tmp_path_factory.mktemp("uneven") / "run"
    collect(opened(folder, *UNEVEN, new=True))
    for stage in TRAINING.values():
        stage(opened(folder))
    return folder


@pytest.mark.parametrize("game", ["uneven", "tiny"])  # where lengths differ, and where returns follow from actions
@pytest.mark.slow
def test_killed_at_every_checkpoint_it_has_the_same_score(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, game: str
) -> None:
    source = request.getfixturevalue(game)
    how = [EAGER, "evaluation.episodes=8", "evaluation.environments=3"]
    whole = evaluate(opened(copied(source, tmp_path / "whole"), *how))
    run, artifact, kills = copied(source, tmp_path / "run"), None, 0
    while artifact is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 2)
                artifact = evaluate(opened(run, *how))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills > 4
    assert artifact.metrics == whole.metrics
    files = [{entry["path"]: entry["sha256"] for entry in each.manifest["files"]} for each in (artifact, whole)]
    assert files[0] == files[1]  # the film as well
    assert Run.open(run, create=False).unfinished() == []


def test_asked_to_stop_it_goes_on(uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps, original = copied(uneven, tmp_path / "run"), [], Streams.step

    def signals(streams: Streams, action: np.ndarray) -> object:
        steps.append(action)
        if len(steps) == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(streams, action)

    monkeypatch.setattr(Streams, "step", signals)
    with pytest.raises(Stopped, match="eval stopped after [1-6] of 7 episodes") as stopped:
        evaluate(opened(run))
    assert stopped.value.exit_code == 75
    first = len(steps)
    interrupted = evaluate(opened(run))
    assert interrupted.metrics == evaluate(opened(copied(uneven, tmp_path / "whole"))).metrics
    assert first == 9


def test_episodes_that_cannot_be_resumed_begin_again(tmp_path: Path) -> None:
    """Every episode of this environment has a return of 4, and the same seed leads to another frame."""
    settings = EnvironmentSettings(id=UNSEEDED, size=16)

    def played(checkpoint: Path | None) -> PlayedEpisodes:
        agent = UniformAgent(4, 3, generator=torch.Generator().manual_seed(3))
        given = {"episodes": 8, "environments": 3, "seed": 1, "progress": Progress(quiet=True), "name": "eval"}
        return play_episodes(settings, agent, **given, checkpoint=checkpoint, checkpoint_seconds=0)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 6)  # two steps into the second round
        played(tmp_path / "checkpoint")
    assert played(tmp_path / "checkpoint").returns == played(None).returns == [4.0] * 8


def test_a_damaged_old_evaluation_is_passed_over(run: Path) -> None:
    evaluate(opened(run), episodes=2)
    (run / "evaluation" / "v0001" / "manifest.json").write_text("damaged")
    assert evaluate(opened(run), episodes=3).version == 3


# -- under other settings ---------------------------------------------------------------------------------------------

MEASURED = 'evaluation.measures=["training"]'


@pytest.mark.parametrize("unrelated", [MEASURED, "evaluation.probe_updates=7", "evaluation.episodes=9"])
def test_settings_that_do_not_touch_the_returns_play_nothing_again(run: Path, unrelated: str) -> None:
    context = opened(run, unrelated)
    assert (evaluate(context, episodes=5).version, context.worked) == (1, 0)


@pytest.mark.parametrize("related", ["evaluation.temperature=0.25", "evaluation.environments=3", "seed=5"])
def test_settings_that_change_the_returns_play_again(run: Path, related: str) -> None:
    context = opened(run, related)
    assert (evaluate(context, episodes=5).version, context.worked) == (2, 1)


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("then", [[], [MEASURED, "evaluation.probe_updates=7"]])
def test_evaluations_that_these_settings_identified_are_recognized(run: Path, schema: int, then: list[str]) -> None:
    shutil.rmtree(run / "evaluation")
    evaluate(opened(run, *then))
    settings = opened(run, *then).settings
    identity = settings.identity("seed", "environment", "evaluation") | {"episodes": 5, "protocol": "returns"}
    identity |= settings.acting_identity()
    as_then(run, {1: identity.earlier[-1], 2: identity.values}[schema])
    for now in ([], [MEASURED], then):
        context = opened(run, *now)
        assert (evaluate(context).version, context.worked) == (1, 0), now
    assert evaluate(opened(run, *then, "evaluation.temperature=0.25")).version == 2


def as_then(run: Path, identity: dict[str, object]) -> None:
    """Give the first evaluation the job that an earlier version gave it."""
    evaluation = Run.open(run, create=False).get("evaluation", 1)
    inputs = {"controller": evaluation.inputs["controller"].digest}
    body = {key: value for key, value in evaluation.manifest.items() if key != "digest"}
    body["job"] = digest({"kind": "evaluation", "identity": identity, "inputs": inputs})
    assert body["job"] != evaluation.manifest["job"]
    (evaluation.path / "manifest.json").write_bytes(render(body | {"digest": digest(body)}))


# -- several controllers ----------------------------------------------------------------------------------------------


def test_the_curve_is_of_one_line_of_descent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = module._earlier
    monkeypatch.setattr(module, "_earlier", lambda *given: seen.append(original(*given)) or seen[-1])
    context = opened(run)
    imagine(opened(run, more=True))
    evaluate(context)
    imagine(opened(run, "controller.updates=1"))  # of another line
    evaluate(context)
    assert [len(earlier) for earlier in seen] == [1, 0]
    assert seen[0][0]["mean"] == Run.open(run, create=False).get("evaluation", 1).metrics["mean"]


def test_best_is_the_controller_with_the_highest_mean(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    means = iter([5.0, 7.0, 6.0, 1.0])
    monkeypatch.setattr(module, "score", lambda returns: score(returns) | {"mean": next(means)})
    for version in (2, 3, 4):
        imagine(opened(run, more=True))
        evaluate(opened(run))
        best = Run.open(run, create=False).resolve("controller@best", "controller")
        assert best.version == min(version, 3)
    assert (run / "controller" / "best").readlink() == Path("v0003")
    assert evaluate(opened(run), controller="controller@best", episodes=2).inputs["controller"].version == 3


def test_more_episodes_of_the_same_controller_replace_fewer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lucky evaluation of few episodes does not make a controller the best once it has more."""
    shutil.rmtree(run / "evaluation")
    means = iter([9.0, 5.0, 3.0, 8.0])
    monkeypatch.setattr(module, "score", lambda returns: score(returns) | {"mean": next(means)})

    def best(version: int, episodes: int) -> int:
        evaluate(opened(run), controller=f"controller@{version}", episodes=episodes)
        return Run.open(run, create=False).resolve("best", "controller").version

    imagine(opened(run, more=True))
    assert best(1, episodes=1) == 1
    assert best(2, episodes=2) == 1
    assert best(1, episodes=4) == 2
    assert best(1, episodes=3) == 2, "three episodes say less than the four before"


def test_a_controller_without_weights_is_not_the_best(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More games may lower the score of the best below that of one that was pruned for it."""
    means = iter([7.0, 8.0, 1.0, 6.0])
    monkeypatch.setattr(module, "score", lambda returns: score(returns) | {"mean": next(means)})
    for _ in (2, 3, 4):
        imagine(opened(run, more=True))
        evaluate(opened(run))
    opened_run = Run.open(run, create=False)
    opened_run.prune("controller", {2})
    evaluate(opened(run), controller="best", episodes=9)
    assert opened_run.resolve("best", "controller").version == 3


def test_without_an_evaluation_there_is_no_best(run: Path) -> None:
    (run / "controller" / "best").unlink()
    with pytest.raises(ArtifactError, match="no controller of .* was evaluated yet; do so with: wm eval --run"):
        evaluate(opened(run), controller="best", episodes=2)


def test_an_evaluation_that_could_not_be_read_again_is_refused_before_it_is_played(run: Path) -> None:
    with pytest.raises(UsageError, match="at most 50,000"):
        evaluate(opened(run), episodes=50_001)


def test_the_largest_evaluation_can_be_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns as long as JSON makes them, from as many episodes as are allowed."""
    returns = (np.random.default_rng(1).normal(size=MAX_EPISODES) * 1e5).tolist()
    film = film_of_one_step()
    played = PlayedEpisodes(returns, [108_000] * MAX_EPISODES, film)
    monkeypatch.setattr(module, "play_episodes", lambda *_, **__: played)
    artifact = evaluate(opened(run), episodes=MAX_EPISODES)
    assert Run.open(run, create=False).get("evaluation", artifact.version).metrics["returns"] == returns


def film_of_one_step() -> Film:
    film = Film()
    film.add(np.zeros((16, 16, 3), np.uint8), 0, 1.0, {})
    film.end(np.ones((16, 16, 3), np.uint8), "terminated")
    return film
