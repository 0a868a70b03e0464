"""Probes: what they tell of features that hold the answer or nothing, constants, and the stage from script to table."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import TINY_S4WM, latest
from torch import Tensor

from wmcli.assemble import load_world_model
from wmcli.envs.mazes import Labels
from wmcli.envs.memory_task import play
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import HELD_OUT
from wmcli.stages import memory_tasks as memory
from wmcli.stages import probe
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.memory_table import table
from wmcli.stages.opening import open_context

TASK = TASKS["wm/MazeSmall-v0"]
CPU = torch.device("cpu")
SETTINGS = [
    *TINY_S4WM,
    "environment.id=wm/MazeSmall-v0",
    "environment.size=32",
    "collect.episodes=18",
    "collect.validation=0",
    "collect.test=5",
    "dynamics.reward=none",
    "dynamics.sequence_length=120",
    "dynamics.updates=2",
    "dynamics.validate_every=0",
    "dynamics.warmup=1",
    "evaluation.probe_updates=3",
]


@pytest.fixture(autouse=True)
def narrow_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WALLS_WIDTH", 128)
    monkeypatch.setattr(probe, "OBJECTS_WIDTH", 64)
    monkeypatch.setattr(probe, "LEARNING_RATE", 1e-3)


def opened(folder: Path, *overrides: str, new: bool = False, **how: bool) -> Context:
    given = [*SETTINGS, *overrides] if new else overrides
    context = open_context(folder, "memory-small" if new else None, given, create=new, quiet=True, **how)
    context.pictures = False
    return context


@pytest.fixture(scope="module")
def maze_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned from two versions of experience."""
    folder = tmp_path_factory.mktemp("probe") / "run"
    collect(opened(folder, new=True))
    collect(opened(folder))
    train_dynamics(opened(folder))
    return folder


def answers(labels: Labels) -> Tensor:
    """Features (N, F) that hold the labels."""
    return torch.from_numpy(np.concatenate([labels.walls, labels.objects.reshape(len(labels.walls), -1)], -1)).float()


def nothing(labels: Labels) -> Tensor:
    return torch.ones(len(labels.walls), 4)


@functools.cache
def states_of(first: int, last: int) -> np.ndarray:
    """Uint8 (E, T, S), of episodes with these seeds."""
    return play(TASK, np.arange(first, last)).compact_states


def probed(features, updates: int) -> tuple[probe.Scores, probe.Scores]:
    """Scores of probes that learned from frames of 300 mazes, and of constants, in 40 others."""
    compact_states, other = states_of(0, 300), states_of(1000, 1040)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)

    def some() -> tuple[Tensor, probe.Truth]:
        labels = TASK.labels(compact_states.reshape(-1, compact_states.shape[-1])[rng.integers(300 * 120, size=256)])
        return features(labels), probe.truth_of(labels, CPU)

    probes = probe.fit(some, updates, lambda: None)
    labels = TASK.labels(other.reshape(-1, other.shape[-1]))
    predictions = probes.predict(features(labels), probe.truth_of(labels, CPU).pose)
    constant = probe.constants(TASK, compact_states)
    return probe.scores(*predictions, labels), probe.scores(*constant, labels)


# -- probes -----------------------------------------------------------------------------------------------------------


def test_probes_of_features_that_hold_the_answer_find_it() -> None:
    found, constant = probed(answers, 150)
    assert found.walls.mean() > 0.995 and found.objects.mean() < 0.2
    assert constant.walls.mean() < 0.8 and constant.objects.mean() > 5


def test_probes_of_features_that_say_nothing_are_no_better_than_constants() -> None:
    """The walls' probe knows the pose besides: where the agent is there is no wall."""
    found, constant = probed(nothing, 120)
    assert found.objects.mean() == pytest.approx(constant.objects.mean(), rel=0.02)
    assert -0.02 < found.walls.mean() - constant.walls.mean() < 0.06


def test_constants_are_the_majority_and_the_mean() -> None:
    compact_states = states_of(0, 9)
    walls, objects = probe.constants(TASK, compact_states)
    every = TASK.labels(compact_states.reshape(-1, compact_states.shape[-1]))
    assert (walls == (2 * every.walls.sum(0) > len(every.walls))).all()
    assert np.allclose(objects, every.objects.mean(0), atol=1e-4)
    best = probe.scores(walls, objects, every)
    for cell in range(49):
        flipped = walls.copy()
        flipped[cell] ^= True
        assert probe.scores(flipped, objects, every).walls.mean() <= best.walls.mean()
    for shift in ([0.1, 0], [-0.1, 0], [0, 0.1], [0, -0.1]):
        assert probe.scores(walls, objects + shift, every).objects.mean() > best.objects.mean()


def test_scores_by_hand() -> None:
    labels = Labels(np.array([[True, False, True, True]]), np.zeros((1, 4)), np.array([[[1.0, 2.0], [0.0, -3.0]]]))
    found = probe.scores(np.array([[True, True, True, False]]), np.array([[[0.0, 0.0], [3.0, 1.0]]]), labels)
    assert found.walls.tolist() == [0.5] and found.objects.tolist() == [(1 + 4 + 9 + 16) / 2]


def test_the_walls_are_told_from_the_pose_as_well_and_the_objects_are_not() -> None:
    probes = probe.Probes(3, 5, 2)
    features, pose = torch.randn(6, 3), torch.randn(6, 4)
    (walls, objects), (others, same) = probes(features, pose), probes(features, pose + 1)
    assert not torch.allclose(walls, others) and torch.equal(objects, same)


# -- the stage --------------------------------------------------------------------------------------------------------


def test_observing_gives_the_state_of_inference(maze_run: Path) -> None:
    """That which the other measures go on from, every frame known."""
    context = opened(maze_run)
    model = load_world_model(latest(maze_run, "dynamics"), context.machine)
    held = context.held_out(latest(maze_run, "experience"), "test")
    frames, action = held.observation.view(5, 120, 32, 32, 3), held.action.view(5, 120)
    torch.manual_seed(7)
    seen = probe.observed_features(model, frames, action)
    torch.manual_seed(7)
    assert torch.equal(seen, memory.roll_out(model, frames, action, 120))
    assert seen.shape == (5, 120, 3 * 5 + 16)


@pytest.mark.slow
def test_a_model_whose_state_holds_the_answer_is_probed_rightly(maze_run: Path, monkeypatch) -> None:
    """Frames of training, of both versions of experience, and of test stand with their own labels."""
    context = opened(maze_run, "evaluation.probe_updates=120", force=True)
    experience = latest(maze_run, "experience")
    test = read_segment(experience.path / HELD_OUT["test"])["sketch"]
    compact_states = np.concatenate([probe._compact_states(experience), test])
    assert len(compact_states) == (2 * 18 + 5) * 120
    known = {frame.tobytes(): row for row, frame in enumerate(TASK.draw(compact_states))}
    features = answers(TASK.labels(compact_states))

    def look_up(model, frames: Tensor, action: Tensor) -> Tensor:
        rows = [known[frame.tobytes()] for frame in frames.flatten(0, 1).numpy()]
        return features[rows].unflatten(0, action.shape)

    monkeypatch.setattr(probe, "observed_features", look_up)
    found = memory.evaluate_memory(context, "probe").metrics
    assert found["walls"]["value"] > 0.9 > 0.8 > found["constant_walls"]["value"]
    assert found["objects"]["value"] < 1.5 < 5 < found["constant_objects"]["value"]


def test_from_a_model_to_a_table_and_twice_the_same(maze_run: Path) -> None:
    first = memory.evaluate_memory(opened(maze_run), "probe")
    again = memory.evaluate_memory(opened(maze_run, force=True), "probe")
    assert again.version == first.version + 1 and again.metrics == first.metrics
    assert memory.evaluate_memory(opened(maze_run), "probe").digest in (first.digest, again.digest)
    longer = memory.evaluate_memory(opened(maze_run, "evaluation.probe_updates=4"), "probe")
    assert longer.metrics["walls"] != first.metrics["walls"] and longer.metrics["probe_updates"] == 4

    experience = latest(maze_run, "experience")
    query = read_segment(experience.path / HELD_OUT["test"])["sketch"].reshape(5, 120, -1)[:, 60:]
    constant = probe.constants(TASK, probe._compact_states(experience).reshape(36, 120, -1))
    scores = probe.scores(*constant, TASK.labels(query))
    assert first.metrics["constant_walls"]["value"] == pytest.approx(scores.walls.mean())
    assert first.metrics["constant_objects"]["value"] == pytest.approx(scores.objects.mean())
    assert first.metrics["constant_objects"]["low"] < scores.objects.mean() < first.metrics["constant_objects"]["high"]
    row = table([first])[0]
    assert row["task"] == "MazeSmall" and row["walls %"].startswith(f"{100 * first.metrics['walls']['value']:.1f} (")
    assert not any(column.startswith("paper") for column in row)


def test_a_task_without_labels_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = [
        "environment.id=wm/TwoRoomsSmall-v0",
        "dynamics.sequence_length=110",
        "collect.episodes=2",
        "collect.test=2",
    ]
    collect(opened(folder, *other, new=True))
    train_dynamics(opened(folder))
    with pytest.raises(UsageError, match="--protocol probe: needs a task with labels .* wm/TwoRoomsSmall-v0"):
        memory.evaluate_memory(opened(folder), "probe")
