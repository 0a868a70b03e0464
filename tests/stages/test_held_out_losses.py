"""Losses on held-out episodes while a dynamics model trains, and the games that are held back for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_systems import SYSTEMS, same, tensors, weights
from tiny_run import Killed, copied, kill_at, latest, opened

from wmcli.artifacts import Artifact, Run
from wmcli.cli import main
from wmcli.errors import ArtifactError, Stopped, UsageError
from wmcli.experience import Replay, read_segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.stages import held_back, loss_pictures
from wmcli.stages import train as training
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.trainers.held_out import fixed_windows

GAMES = 4
HOLDS = f"collect.test_games={GAMES}"
LENGTH = 7  # steps of every game of Catch


def segment(experience: Artifact, part: str | None = None) -> dict[str, np.ndarray]:
    return read_segment(experience.path / (SEGMENT if part is None else HELD_OUT[part]))


def records(run: Path, *, after: int = 0) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that training of dynamics logged, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[after:]]
    unlike = ("time", "began", "updates_per_second", "job")
    return [
        {name: value for name, value in line.items() if name not in unlike}
        for line in lines
        if line["stage"] == "train-dynamics"
    ]


def measured(run: Path, **given: int) -> dict[int, dict[str, float]]:
    """The held-out losses of a run, by update."""
    found = {
        line["update"]: {name: value for name, value in line.items() if name.startswith("held_out_")}
        for line in records(run, **given)
    }
    return {update: losses for update, losses in found.items() if losses}


@pytest.fixture(scope="module")
def holding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that held games back, with a tokenizer. Only to be read."""
    folder = tmp_path_factory.mktemp("holding") / "run"
    collect(opened(folder, HOLDS, new=True))
    train_tokenizer(opened(folder))
    return folder


# -- games that are held back -----------------------------------------------------------------------------------------


def test_the_segment_is_the_same_beside_games_that_are_held_back(holding: Path, tmp_path: Path) -> None:
    collect(opened(tmp_path / "run", new=True))
    mine, other = latest(holding, "experience"), latest(tmp_path / "run", "experience")
    for name, column in segment(other).items():
        np.testing.assert_array_equal(segment(mine)[name], column, err_msg=name)
    assert mine.metrics == other.metrics | {"test": GAMES} and mine.metrics["total_steps"] == 90
    assert not (other.path / HELD_OUT["test"]).exists()


def test_they_are_whole_games_of_their_own(holding: Path) -> None:
    """More of them than environments side by side, which are `evaluation.environments` = 2 here."""
    held = segment(latest(holding, "experience"), "test")
    assert np.flatnonzero(held["first"]).tolist() == [LENGTH * game for game in range(GAMES)]
    assert np.flatnonzero(held["terminated"] | held["truncated"]).tolist() == [
        LENGTH * (game + 1) - 1 for game in range(GAMES)
    ]
    assert len(held["closing"]) == GAMES and len(held["action"]) == GAMES * LENGTH
    for begin in range(0, GAMES * LENGTH, LENGTH):  # the ball falls by one row a step, from the top
        frames = np.concatenate([held["observation"][begin : begin + LENGTH], held["closing"][[begin // LENGTH]]])
        assert all((one != next_one).any() for one, next_one in zip(frames, frames[1:], strict=False))
    trained = segment(latest(holding, "experience"))["observation"]
    assert held["observation"].shape[1:] == trained.shape[1:]
    assert len(np.unique(held["action"])) > 1


@pytest.mark.slow
def test_they_are_held_back_at_an_interval(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    opened(folder, "collect.test_games=1", "collect.test_games_every=3", "collect.steps=9", new=True)
    for _ in range(7):
        collect(opened(folder))
    run = Run.open(folder, create=False)
    assert [(each.path / HELD_OUT["test"]).exists() for each in run.artifacts("experience")] == [
        version % 3 == 1 for version in range(1, 8)
    ]
    first, again = (segment(run.get("experience", version), "test") for version in (1, 4))
    assert any((first[name] != again[name]).any() for name in ("observation", "action"))


@pytest.mark.parametrize("moment", ["among the games", "in the segment"])
@pytest.mark.slow
def test_a_stopped_collect_ends_with_the_same(
    holding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "run"
    opened(folder, HOLDS, new=True)
    with monkeypatch.context() as patch:
        if moment == "among the games":
            patch.setattr(held_back, "stop_requests", lambda: _Asked())
            with pytest.raises(Stopped, match="among the games that are held back"):
                collect(opened(folder))
        else:
            kill_at(patch, "checkpoint", 3)
            with pytest.raises(Killed):
                collect(opened(folder, "training.checkpoint_seconds=0"))
            patch.undo()
            assert list((folder / "experience").glob(f".work-*/{held_back.FILE}"))
            patch.setattr(held_back, "_play", None)  # they are not played again
    collect(opened(folder))
    mine, other = latest(folder, "experience"), latest(holding, "experience")
    for part in (None, "test"):
        for name, column in segment(other, part).items():
            np.testing.assert_array_equal(segment(mine, part)[name], column, err_msg=name)


class _Asked:
    """A stop that was asked for before the first step."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


# -- losses -----------------------------------------------------------------------------------------------------------


def test_training_does_not_notice(holding: Path, tmp_path: Path) -> None:
    """Nor does it read held-out frames: with others in their place the weights are the same."""
    plain, measuring = copied(holding, tmp_path / "plain"), copied(holding, tmp_path / "measuring")
    train_dynamics(opened(plain))
    train_dynamics(opened(measuring, "training.held_out_every=1"))
    one, other = latest(plain, "dynamics"), latest(measuring, "dynamics")
    assert one.manifest["job"] == other.manifest["job"] and one.metrics == other.metrics
    assert same(weights(one), weights(other))
    assert one.file("training.safetensors").read_bytes() == other.file("training.safetensors").read_bytes()
    assert not measured(plain) and list(measured(measuring)) == [2, 4, 5]
    strip = [{name: value for name, value in line.items() if "held_out" not in name} for line in records(measuring)]
    assert strip == records(plain)


def test_losses_are_those_of_the_model_on_the_held_out_windows(
    holding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: every window of a held-out episode, in eval mode; a trainer sees no held-out row."""
    folder, models, read = copied(holding, tmp_path / "run"), {}, []
    build = training.fit

    def keep(trainer: Any, updates: int, **given: Any) -> Any:
        measure = trainer.measure_held_out

        def one(since: int) -> dict[str, float]:
            found = measure(since)
            models[trainer.state.update] = tensors(trainer.world_model)
            return found

        trainer.measure_held_out = one
        models["model"] = trainer.world_model
        read.append(trainer.replay)
        return build(trainer, updates, **given)

    monkeypatch.setattr(training, "fit", keep)
    context = opened(folder, "training.held_out_every=2", "dynamics.batch=50", "dynamics.min_segment=3")
    artifact = train_dynamics(context)
    model = models.pop("model").eval()
    episodes = context.held_out(latest(folder, "experience"), "test")
    assert {id(replay) for replay in read} == {id(context.replay)} and len(context.replay) == 90
    segment_length, least = model.segment, model.min_segment
    tokens = model.encode(episodes.observation.view(GAMES, LENGTH, *episodes.observation.shape[1:]))
    columns = (episodes.action, episodes.reward, episodes.terminated, episodes.truncated)
    for update, losses in measured(folder).items():
        model.load_state_dict(models[update])
        observation, reward, total = [], [], []
        with torch.no_grad():
            for game in range(GAMES):
                for begin in range(LENGTH - least + 1):
                    span = slice(begin, min(begin + segment_length, LENGTH))
                    action, rewards, _, _ = (each.view(GAMES, LENGTH)[game : game + 1, span] for each in columns)
                    logits = model.predict(tokens[game : game + 1, span], action)
                    burned = model.settings.observation_burn_in
                    seen = tokens[game, burned + begin : span.stop]
                    of_tokens = torch.log_softmax(logits.observation[0].float(), -1)
                    observation += (-of_tokens.gather(-1, seen[..., None])[..., 0]).flatten().tolist()
                    signs = torch.log_softmax(logits.reward[0, 1:].float(), -1)
                    reward += (-signs.gather(-1, rewards[0, 1:].sign().long()[:, None] + 1)[:, 0]).tolist()
                    total.append(len(seen))
        assert len(total) == GAMES * (LENGTH - least + 1) <= 50
        assert losses["held_out_observation_loss"] == pytest.approx(np.mean(observation), rel=1e-5)
        assert losses["held_out_reward_loss"] == pytest.approx(np.mean(reward), rel=1e-5)
        assert losses["held_out_loss"] > losses["held_out_observation_loss"] > 0
    assert list(measured(folder)) == [2, 4] and artifact.metrics["updates"] == 5


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.slow
def test_every_world_model_is_measured(tmp_path: Path, name: str) -> None:
    """And left as it is: weights, moments, generators and buffers are those of training alone."""
    folder = tmp_path / "run"
    preset, overrides = SYSTEMS[name]
    context = open_context(folder, preset, [*overrides, *([HOLDS] * (name != "s4wm"))], create=True, quiet=True)
    context.pictures = False
    if name == "cells":  # games never end, so none are held back
        with pytest.raises(UsageError, match=r"collect.test_games = 4: episodes of .* never end.*collect.test_games=0"):
            collect(context)
        return
    collect(context)
    if context.settings.dynamics.encoder == "tokenizer":
        train_tokenizer(context)
    plain = copied(folder, tmp_path / "plain")
    for run, more in ((plain, []), (folder, ["training.held_out_every=2"])):
        train_dynamics(opened(run, "dynamics.updates=3", *more))
    one, other = latest(plain, "dynamics"), latest(folder, "dynamics")
    assert one.file("training.safetensors").read_bytes() == other.file("training.safetensors").read_bytes()
    assert same(weights(one), weights(other))
    (losses,) = measured(folder).values()
    (line,) = (line for line in records(folder) if line["update"] == 2)
    parts = {key for key in losses if key.removeprefix("held_out_") in line}
    assert parts == set(losses) and len(parts) >= 3 and all(np.isfinite(value) for value in losses.values())


@pytest.mark.slow
def test_a_resumed_training_measures_the_same(holding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["training.held_out_every=2", "training.log_every=1", "dynamics.updates=6"]
    whole = copied(holding, tmp_path / "whole")
    train_dynamics(opened(whole, *every))
    for checkpoint in (1, 2, 3):
        folder = copied(holding, tmp_path / f"killed {checkpoint}")
        with monkeypatch.context() as patch:
            kill_at(patch, "checkpoint", checkpoint)
            with pytest.raises(Killed):
                train_dynamics(opened(folder, *every, "training.checkpoint_seconds=0"))
        train_dynamics(opened(folder, *every))
        assert measured(folder) == measured(whole) and list(measured(whole)) == [2, 4, 6]
        assert same(weights(latest(folder, "dynamics")), weights(latest(whole, "dynamics")))


def test_the_interval_counts_on_from_version_to_version(holding: Path, tmp_path: Path) -> None:
    folder = copied(holding, tmp_path / "run")
    for _ in range(3):
        train_dynamics(
            opened(folder, "training.held_out_every=7", "training.log_every=1", more=True)
            if Run.open(folder, create=False).versions("dynamics")
            else opened(folder, "training.held_out_every=7", "training.log_every=1")
        )
    assert list(measured(folder)) == [7, 14]


def test_windows_are_spread_over_all_episodes() -> None:
    replay = Replay("cpu")
    rows = 40
    first = np.zeros(rows, bool)
    first[[0, 20]] = True
    replay.extend(
        {
            "observation": np.zeros((rows, 2, 2, 3), np.uint8),
            "action": np.zeros(rows, np.int32),
            "reward": np.zeros(rows, np.float32),
            "terminated": np.roll(first, -1),
            "truncated": np.zeros(rows, bool),
            "first": first,
            "lives": np.full(rows, -1, np.int16),
            "stream": np.zeros(rows, np.int16),
        }
    )

    class Model:
        rows, across_ends, segment, history, min_segment = "windows", False, 6, 0, 6

    chosen = fixed_windows(Model(), replay, 4)  # type: ignore[arg-type]
    assert chosen.rows[:, 0].tolist() == [0, 10, 24, 34] and chosen.valid.all()
    Model.min_segment = Model.segment = 21
    with pytest.raises(UsageError, match="longest held-out sequence has 20 frames, .* learns from 21"):
        fixed_windows(Model(), replay, 4)  # type: ignore[arg-type]


def test_what_is_not_held_out_cannot_be_measured(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    collect(opened(folder, new=True))
    train_tokenizer(opened(folder))
    before = len(list(folder.rglob("*")))
    with pytest.raises(
        ArtifactError, match="experience@1 holds no test episodes back; .*test_games=N .*held_out_every=0"
    ):
        train_dynamics(opened(folder, "training.held_out_every=5"))
    assert len(list(folder.rglob("*"))) == before


# -- pictures of several runs -----------------------------------------------------------------------------------------


def _run(folder: Path, losses: dict[int, float | None], *overrides: str) -> Path:
    """A run with a controller that was scored and a dynamics model that logged these losses by update."""
    context = opened(folder, "dynamics.updates=0", "controller.updates=1", *overrides, new=True)
    collect(context)
    train_tokenizer(context)
    job = train_dynamics(context).manifest["job"]
    imagine(context)
    evaluate(opened(folder), episodes=1)
    with (folder / "metrics.jsonl").open("a") as file:
        for update, loss in losses.items():
            line = {"stage": "train-dynamics", "job": job, "update": update, "observation_loss": (loss or 0.0) + 1}
            for other in (job, "another job"):
                held = {"held_out_observation_loss": loss if other == job else 99.0, "held_out_nonzero_rewards": 0.5}
                file.write(json.dumps(line | held | {"job": other}) + "\n")
    return folder


@pytest.mark.slow
def test_losses_of_variants_are_drawn_with_a_band_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sequential = "dynamics.prediction=sequential"
    runs = [
        _run(tmp_path / "a", {10: 4.0, 20: 2.0, 30: 1.0}),
        _run(tmp_path / "b", {10: 6.0, 20: 5.0}, "seed=1"),
        _run(tmp_path / "c", {10: 8.0, 20: 7.0}, sequential),
    ]
    drawn: list[Any] = []
    draw = loss_pictures.compared_curves
    monkeypatch.setattr(loss_pictures, "compared_curves", lambda *a, **k: drawn.append((a[0], k)) or draw(*a, **k))
    words = ["compare", *map(str, runs), "--losses", str(tmp_path / "l.png"), "--by", "dynamics.prediction"]
    assert main.run(words) == 0
    ((held, given),) = drawn
    updates, mean, low, high = held["dynamics.prediction=pop (2 runs)"]["observation_loss"]
    assert updates.tolist() == [10, 20] and mean.tolist() == [5.0, 3.5]
    np.testing.assert_allclose(high - mean, np.std([[4, 2], [6, 5]], axis=0, ddof=1))
    np.testing.assert_allclose(mean - low, high - mean)
    assert [len(curve) for curve in held["dynamics.prediction=sequential (1 run)"].values()] == [2]
    assert given["band"] == "one standard deviation over runs"
    trained = given["faint"]["dynamics.prediction=pop (2 runs)"]["observation_loss"]
    assert [each.tolist() for each in trained] == [[10, 20], [6.0, 4.5]]
    assert (tmp_path / "l.png").stat().st_size > 5000 and "other frames" not in capsys.readouterr().err
    burned = _run(tmp_path / "d", {10: 9.0, 20: 7.0}, sequential, "dynamics.observation_burn_in=0", "seed=3")
    assert main.run(["compare", str(runs[0]), str(burned), "--losses", str(tmp_path / "m.png")]) == 0
    assert "dynamics.observation_burn_in = 0, 2 with dynamics.prediction = pop, sequential" in capsys.readouterr().err
    without = _run(tmp_path / "e", {})
    assert main.run(["compare", str(without), "--losses", str(tmp_path / "n.png")]) == 2
    assert "has no losses on held-out episodes; train with --set training.held_out_every=N" in capsys.readouterr().err
    assert not (tmp_path / "n.png").exists()
    words = ["--losses", str(tmp_path / "o.png")]
    diverging = _run(tmp_path / "f", {10: 4.0, 20: None, 30: None, 40: None, 50: None, 60: 1.0})
    assert main.run(["compare", str(diverging), *words]) == 0
    assert "4 values of observation_loss from update 20 on are not finite" in capsys.readouterr().err
    job = train_dynamics(opened(diverging, "dynamics.updates=1", more=True)).manifest["job"]
    line = {"stage": "train-dynamics", "job": job, "update": 70, "held_out_observation_loss": 0.5}
    with (diverging / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    shutil.rmtree(diverging / "dynamics" / "v0001")
    assert main.run(["compare", str(diverging), *words]) == 0
    assert f"warning: the losses of {diverging} begin late: " in capsys.readouterr().err
    diverged = _run(tmp_path / "g", {10: None, 20: None})
    assert main.run(["compare", str(diverged), *words]) == 2
    assert f"{diverged}: no loss on held-out episodes is finite" in capsys.readouterr().err


def test_what_a_mean_over_runs_leaves_out_is_said() -> None:
    said: list[str] = []
    progress: Any = SimpleNamespace(warn=said.append)
    one = (np.array([1, 2]), np.array([3.0, 4.0]))
    late = (np.array([7, 8]), np.array([3.0, 4.0]))
    runs = [{"loss": one, "reward_loss": one, "kl_loss": one}, {"kl_loss": late, "loss": one, "end_loss": one}]
    assert list(loss_pictures._over_runs("gru", runs, progress)) == ["loss"]
    assert said == [
        "gru: not all runs have reward_loss, end_loss: left out of the picture",
        "gru: no update has kl_loss of all runs: left out of the picture",
    ]


def test_the_loop_refuses_before_it_collects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["run", "quickstart", "--run", str(folder), "--set", "training.held_out_every=5", "-q"]
    assert main.run(words) == 2
    expected = "training.held_out_every needs test episodes, and collect.test_games = 0: set collect.test_games=5, or"
    assert expected in capsys.readouterr().err and not (folder / "experience").exists()
