"""What a world model's state tells of a maze that it walked through: `wm eval --protocol probe`.

Memory Maze's offline benchmark (Pasukonis, Lillicrap and Hafner 2022, arXiv 2210.13383) as S4WM reports it (Deng, Park
and Ahn 2023, arXiv 2307.02064, table 6). A frozen model sees whole episodes; nothing is imagined. Two probes learn from
what it makes of training episodes, its features, latent and past of each frame: one tells from them and the agent's
pose where walls are, the other where each object is as the agent sees it. They are scored on the query, the second half
of each test episode, when most of the maze was seen before.

B episodes, T frames, F features, N frames of any episodes, A cells, K objects.
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
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

if TYPE_CHECKING:
    from wmcli.stages.memory_tasks import Episodes

TOGETHER = 16  # episodes seen side by side, and in an update
FRAMES = 512  # of these that an update learns from
LEARNING_RATE = 3e-4
LAYERS = 4
WALLS_WIDTH, OBJECTS_WIDTH = 1024, 400


class Truth(NamedTuple):
    """Labels of N frames as float32 tensors, see `Labels`."""

    walls: Tensor
    """(N, A), 0 or 1."""
    pose: Tensor
    """(N, 4)."""
    objects: Tensor
    """(N, K, 2)."""


class Scores(NamedTuple):
    """Of each frame (...)."""

    walls: np.ndarray
    """Share of the cells of which it is told rightly whether they are walls."""
    objects: np.ndarray
    """Squared distance (cells^2) between where objects are and where they are told to be, mean over objects."""


class Probes(nn.Module):
    """Multilayer perceptrons with LayerNorm and ELU: four layers of 1024 for walls, of 400 for objects."""

    def __init__(self, features: int, cells: int, objects: int) -> None:
        super().__init__()

        def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
            return mlp(inputs, width, LAYERS, outputs, norm_kind="layer", activation="elu")

        self.walls = perceptron(features + 4, WALLS_WIDTH, cells)
        self.objects = perceptron(features, OBJECTS_WIDTH, 2 * objects)

    def forward(self, features: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, F) and poses (N, 4) to logits of walls (N, A) and places of objects (N, K, 2)."""
        return self.walls(torch.cat((features, pose), -1)), self.objects(features).unflatten(-1, (-1, 2))

    def loss(self, features: Tensor, truth: Truth) -> Tensor:
        """Cross-entropy a cell, and squared error a coordinate: the likelihood of a Gaussian of fixed width. The two
        probes share nothing, so their sum trains each by itself."""
        walls, objects = self(features, truth.pose)
        return F.binary_cross_entropy_with_logits(walls, truth.walls) + F.mse_loss(objects, truth.objects)

    @torch.no_grad()
    def tell(self, features: Tensor, pose: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Walls, bool (N, A), and objects (N, K, 2)."""
        walls, objects = self(features, pose)
        return (walls > 0).cpu().numpy(), objects.cpu().numpy()


def probe(context: Context, world_model: WorldModel, task: Task, episodes: Episodes, work: Work) -> dict[str, Any]:
    """Train both probes on the training episodes of what the job names as its experience, and score them on the test
    `episodes`, beside constants: what is the likelier in each cell, and the mean of each object's place."""
    assert isinstance(task, Maze)
    played, device = work.job.inputs["experience"], context.machine.device
    memory, time = context.experience(played), task.context + task.query
    sketch = _sketches(played).reshape(-1, time, episodes.sketch.shape[-1])
    frames, action = (column.view(len(sketch), time, *column.shape[1:]) for column in (memory.frames, memory.action))

    def some() -> tuple[Tensor, Truth]:
        which = torch.randperm(len(sketch))[:TOGETHER]
        features = observed_features(
            world_model, frames[which.to(frames.device)], action[which.to(action.device)]
        ).flatten(0, 1)
        taken = torch.randperm(len(features))[:FRAMES]
        labels = task.labels(sketch[which.numpy()].reshape(len(features), -1)[taken.numpy()])
        return features[taken.to(device)], truth_of(labels, device)

    with context.progress.bar("probe", context.settings.evaluation.probe_updates, "updates") as bar:
        probes = fitted(some, context.settings.evaluation.probe_updates, bar.advance)
    constant = constants(task, sketch)
    found: list[list[np.ndarray]] = []
    for begin in range(0, len(episodes.action), TOGETHER):
        which = slice(begin, begin + TOGETHER)
        features = observed_features(world_model, episodes.frames[which], episodes.action[which])[:, task.context :]
        query = episodes.sketch[which, task.context :]
        labels = task.labels(query.reshape(-1, query.shape[-1]))
        with torch.autocast(device.type, enabled=False):
            told = probes.tell(features.flatten(0, 1), truth_of(labels, device).pose)
        each = (*scores(*told, labels), *scores(*constant, labels))
        found.append([of_frames.reshape(query.shape[:2]).mean(1) for of_frames in each])
    walls, objects, constant_walls, constant_objects = (
        metrics.estimate(np.concatenate(of_episodes)) for of_episodes in zip(*found, strict=True)
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


def fitted(some: Callable[[], tuple[Tensor, Truth]], updates: int, advance: Callable[[], None]) -> Probes:
    """Probes after so many updates, in float32, each on the features (N, F) and the truth that `some` gives next."""
    features, truth = some()
    probes = Probes(features.shape[-1], truth.walls.shape[-1], truth.objects.shape[-2]).to(features.device)
    optimizer = build_optimizer("adam", probes.parameters(), LEARNING_RATE, 0.0)
    for update in range(updates):
        if update:
            features, truth = some()
        with torch.autocast(features.device.type, enabled=False):
            loss = probes.loss(features, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        advance()
    return probes


def constants(task: Maze, sketch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What tells the most without looking, of training episodes as sketches (E, T, S): in which cells walls are more
    often than not, bool (A,), and the mean places of the objects (K, 2)."""
    walls = task.labels(sketch[:, 0]).walls.mean(0) > 0.5  # the same in all of an episode's frames
    means = [task.labels(episode).objects.mean(0, dtype=np.float64) for episode in sketch]
    return walls, np.mean(means, 0)


def scores(walls: np.ndarray, objects: np.ndarray, labels: Labels) -> Scores:
    """Of walls bool (..., A) and objects (..., K, 2) as they are told; constants go with all frames."""
    return Scores(
        (walls == labels.walls).mean(-1),
        np.square(objects - labels.objects).sum(-1, dtype=np.float64).mean(-1),
    )


def truth_of(labels: Labels, device: torch.device) -> Truth:
    """Labels of N frames where the probes are."""
    return Truth(*(torch.from_numpy(np.asarray(each, np.float32)).to(device) for each in labels))


def _sketches(played: Artifact) -> np.ndarray:
    """All rows of experience up to `played`, as it lies in memory: uint8 (N, S)."""
    chain = [played]
    while "previous" in chain[-1].inputs:
        chain.append(chain[-1].input("previous"))
    return np.concatenate([read_segment(each.path / SEGMENT, "sketch")["sketch"] for each in reversed(chain)])
