"""Probes of a world model's state in mazes: `wm eval --protocol probe`.

A frozen model observes whole episodes; nothing is imagined. Two probes learn from its features of training episodes.
One predicts walls from features and the agent's pose, the other where each object is from the agent's point of view.
They are scored on the query, the second half of each test episode: by then the agent has been in most of the maze.
B episodes, T frames, F features, N frames of any episodes, A cells, K objects.

Source: the offline benchmark of Memory Maze (Pasukonis, Lillicrap and Hafner 2022, arXiv 2210.13383), as S4WM reports
it (Deng, Park and Ahn 2023, arXiv 2307.02064, table 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.artifacts import Artifact, Work
from wmcli.envs.mazes import Labels, Maze
from wmcli.envs.memory_task import Task
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.metrics import memory_tasks as metrics
from wmcli.nn.mlp import mlp
from wmcli.stages.context import Context
from wmcli.training.optim import build_optimizer
from wmcli.transfer import take_rows, to_device
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

if TYPE_CHECKING:
    from wmcli.stages.memory_tasks import TaskEpisodes

TOGETHER = 16  # episodes observed side by side, and of an update
FRAMES = 512  # of an update
LEARNING_RATE = 3e-4
LAYERS = 4
WALLS_WIDTH, OBJECTS_WIDTH = 1024, 400


class Truth(NamedTuple):
    """Labels of N frames as float32 tensors (see `Labels`)."""

    walls: Tensor
    """(N, A), 0 or 1."""
    pose: Tensor
    """(N, 4)."""
    objects: Tensor
    """(N, K, 2)."""


class Scores(NamedTuple):
    """Scores of frames (...)."""

    walls: np.ndarray
    """Accuracy over cells."""
    objects: np.ndarray
    """Squared distance (cells^2) between predicted and real places, mean over objects."""


class Probes(nn.Module):
    """Multilayer perceptrons with LayerNorm and ELU: four layers of 1024 for walls, of 400 for objects."""

    def __init__(self, features: int, cells: int, objects: int) -> None:
        super().__init__()

        def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
            return mlp(inputs, width, LAYERS, outputs, norm_kind="layer", activation="elu")

        self.walls = perceptron(features + 4, WALLS_WIDTH, cells)
        self.objects = perceptron(features, OBJECTS_WIDTH, 2 * objects)

    def forward(self, features: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
        """Map features (N, F) and poses (N, 4) to logits of walls (N, A) and places of objects (N, K, 2)."""
        return self.walls(torch.cat((features, pose), -1)), self.objects(features).unflatten(-1, (-1, 2))

    def loss(self, features: Tensor, truth: Truth) -> Tensor:
        """Return the cross-entropy per cell plus the squared error per coordinate.

        The latter is the likelihood of a Gaussian of fixed width. The probes share no weights, so the sum trains each
        by itself.
        """
        walls, objects = self(features, truth.pose)
        return F.binary_cross_entropy_with_logits(walls, truth.walls) + F.mse_loss(objects, truth.objects)

    @torch.no_grad()
    def predict(self, features: Tensor, pose: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return walls, bool (N, A), and places of objects (N, K, 2)."""
        walls, objects = self(features, pose)
        return (walls > 0).cpu().numpy(), objects.cpu().numpy()


def probe(context: Context, world_model: WorldModel, task: Task, episodes: TaskEpisodes, work: Work) -> dict[str, Any]:
    """Train both probes on the training episodes of the job's experience, and score them on the test episodes.

    Constant predictions are scored too: the more frequent label of each cell, and the mean place of each object.
    """
    assert isinstance(task, Maze)
    experience, device = work.job.inputs["experience"], context.machine.device
    replay, time = context.experience(experience), task.context + task.query
    compact_states = _compact_states(experience).reshape(-1, time, episodes.compact_states.shape[-1])
    frames, action = (
        column[:].view(len(compact_states), time, *column.shape[1:]) for column in (replay.observation, replay.action)
    )

    def sample() -> tuple[Tensor, Truth]:
        which = torch.randperm(len(compact_states))[:TOGETHER]
        features = observed_features(
            world_model, *(take_rows(column, which.numpy(), device) for column in (frames, action))
        ).flatten(0, 1)
        rows = torch.randperm(len(features))[:FRAMES]
        labels = task.labels(compact_states[which.numpy()].reshape(len(features), -1)[rows.numpy()])
        return features[rows.to(device)], truth_of(labels, device)

    with context.progress.bar("probe", context.settings.evaluation.probe_updates, "updates") as bar:
        probes = fit(sample, context.settings.evaluation.probe_updates, bar.advance)
    constant = constants(task, compact_states)
    results: list[list[np.ndarray]] = []
    for begin in range(0, len(episodes.action), TOGETHER):
        which = slice(begin, begin + TOGETHER)
        frames = to_device(episodes.frames[which], device)
        features = observed_features(world_model, frames, episodes.action[which])[:, task.context :]
        query = episodes.compact_states[which, task.context :]
        labels = task.labels(query.reshape(-1, query.shape[-1]))
        with torch.autocast(device.type, enabled=False):
            predictions = probes.predict(features.flatten(0, 1), truth_of(labels, device).pose)
        each = (*scores(*predictions, labels), *scores(*constant, labels))
        every = np.ones(query.shape[:2], bool)
        results.append([metrics.over_episodes(of_frames.reshape(every.shape), every) for of_frames in each])
    walls, objects, constant_walls, constant_objects = (
        metrics.estimate(np.concatenate(of_episodes)) for of_episodes in zip(*results, strict=True)
    )
    return {
        "walls": walls,
        "objects": objects,
        "constant_walls": constant_walls,
        "constant_objects": constant_objects,
        "probe_updates": context.settings.evaluation.probe_updates,
    }


def observed_features(world_model: WorldModel, frames: Tensor, action: Tensor) -> Tensor:
    """Return features (B, T, F) float32 of whole episodes.

    Args:
        world_model: In eval mode.
        frames: (B, T, H, W, 3) uint8.
        action: (B, T) int64.

    Raises:
        UsageError: The backbone cannot read a whole episode.
    """
    world_model.check_reads(frames.shape[1] - 1)
    return open_loop(world_model, world_model.encode(frames), action)[0].float()


def fit(sample: Callable[[], tuple[Tensor, Truth]], updates: int, advance: Callable[[], None]) -> Probes:
    """Train fresh probes in float32.

    Args:
        sample: Returns the features (N, F) and the truth of the next update.
        updates: Number of updates.
        advance: Called after each.
    """
    features, truth = sample()
    probes = Probes(features.shape[-1], truth.walls.shape[-1], truth.objects.shape[-2]).to(features.device)
    optimizer = build_optimizer("adam", probes.parameters(), LEARNING_RATE, 0.0)
    for update in range(updates):
        if update:
            features, truth = sample()
        with torch.autocast(features.device.type, enabled=False):
            loss = probes.loss(features, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        advance()
    return probes


def constants(task: Maze, compact_states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best constant predictions on training episodes.

    Args:
        task: The maze.
        compact_states: (E, T, S), compact states.

    Returns:
        bool (A,), cells that are walls in most episodes, and the mean places of the objects (K, 2).
    """
    walls = task.labels(compact_states[:, 0]).walls.mean(0) > 0.5  # the same in all of an episode's frames
    means = [task.labels(episode).objects.mean(0, dtype=np.float64) for episode in compact_states]
    return walls, np.mean(means, 0)


def scores(walls: np.ndarray, objects: np.ndarray, labels: Labels) -> Scores:
    """Score walls, bool (..., A), and objects (..., K, 2). Constants broadcast over all frames."""
    return Scores(
        (walls == labels.walls).mean(-1),
        np.square(objects - labels.objects).sum(-1, dtype=np.float64).mean(-1),
    )


def truth_of(labels: Labels, device: torch.device) -> Truth:
    """Move the labels of N frames to a device."""
    return Truth(*(torch.from_numpy(np.asarray(each, np.float32)).to(device) for each in labels))


def _compact_states(experience: Artifact) -> np.ndarray:
    """Return the compact states of all experience up to an artifact, in the order of the replay: uint8 (N, S)."""
    chain = [experience]
    while "previous" in chain[-1].inputs:
        chain.append(chain[-1].input("previous"))
    return np.concatenate([read_segment(each.path / SEGMENT, "sketch")["sketch"] for each in reversed(chain)])
