"""What a world model remembers of an episode: `wm eval --protocol generation | recall | reward | doors | probe`.

The measures of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064): on test episodes that nobody learned from, the model
sees the C frames of context and imagines the Q frames of the query from the actions that were taken there, one draw of
the prior a step; probe.py only looks at what it makes of frames that it sees. B episodes, T = C + Q frames, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact, Work
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import load_world_model, settings_of
from wmcli.envs import tiles
from wmcli.envs.distracting_memory import DistractingMemory
from wmcli.envs.mazes import Maze
from wmcli.envs.memory_task import Task
from wmcli.envs.multi_doors_keys import MultiDoorsKeys
from wmcli.envs.rooms import TELEPORT, TeleportRooms
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import HELD_OUT
from wmcli.metrics import memory_tasks as metrics
from wmcli.report.files import check_target
from wmcli.report.images import side_by_side, strip, write_gif, write_png
from wmcli.settings import Measure, Settings
from wmcli.stages.checks import check_held_back
from wmcli.stages.context import Context, open_context
from wmcli.stages.memory_table import AXES, draw_curves, table, told, write_curves
from wmcli.stages.probe import probe
from wmcli.stages.protocol import Protocol
from wmcli.stages.scripted import task_of
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

BATCH = 32  # episodes imagined side by side
FRAMES = 256  # decoded at a time
FILMED = 3  # episodes of a film, one under the other
COLUMNS = 16  # frames of a strip
RECALLED = (0, 1, 2, 5, 10, 20)  # k: frames seen behind the teleport, besides the one that it arrives at


class Episodes(NamedTuple):
    """Test episodes, on the host but for what is computed with."""

    frames: Tensor
    """(E, T, H, W, 3) uint8."""
    action: Tensor
    """(E, T) int64."""
    reward: np.ndarray
    """(E, T), of each action."""
    sketch: np.ndarray
    """(E, T, S) uint8."""
    counts: np.ndarray
    """(E, T) bool: False in frames that only fill a phase up."""


def evaluate_memory(
    context: Context, measure: Measure, *, dynamics: str | None = None, experience: str | None = None
) -> Artifact:
    """Measure the run's dynamics model on `evaluation.episodes` test episodes (fewer if there are fewer) and publish.

    The test episodes are those of `experience`, by default of what the model was trained on.

    Raises UsageError for a model or a task that the measure does not fit, ArtifactError where one is missing or there
    are no test episodes.
    """
    settings, machine, run = context.settings, context.machine, context.run
    model = run.resolve(dynamics or "dynamics", "dynamics")
    check_same_environment(context.environment, model)
    played = run.resolve(experience, "experience") if experience else model.input("experience")
    trained = settings_of(model)
    _protocol(measure).check(trained)
    task = task_of(context)
    identity = settings.identity("seed", "environment") | {
        "protocol": measure,
        "episodes": settings.evaluation.episodes,
        "precision": machine.precision,
    }
    identity |= {key: getattr(settings.evaluation, key) for key in _MEASURES[measure].settings}
    job = run.job("evaluation", identity, {"dynamics": model, "experience": played})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is this very job, nothing to do (--force measures again)")
        return existing
    with context.work(job) as work:
        world_model = load_world_model(model, machine)
        episodes = _episodes(context, played, task)
        context.progress.say(f"eval: {measure} in {len(episodes.action)} test episodes of {task.about} on {machine}")
        seed = derived_seed(settings.seed, "eval memory")
        with isolated_randomness(seed, machine.device), machine.autocast():
            found = _MEASURES[measure].score(context, world_model, task, episodes, work)
        artifact = context.publish(
            work,
            found
            | {
                "protocol": measure,
                "environment": settings.environment.id,
                "episodes": len(episodes.action),
                "preset": context.preset,
                "backbone": trained.backbone.kind,
                **{key: trained.plain()["dynamics"][key] for key in ("posterior", "rows")},
                "parameters": sum(parameter.numel() for parameter in world_model.parameters()),
                "updates": model.metrics["updates"],
            },
        )
    context.progress.say(told(artifact))
    return artifact


def unfit(measure: Measure, settings: Settings) -> str | None:
    """Return why dynamics with these settings cannot be measured so, or None if they can."""
    name, dynamics, needs = settings.environment.id, settings.dynamics, _MEASURES[measure]
    if not isinstance(TASKS.get(name), needs.task):
        return f"needs {needs.example}, and environment.id = {name}"
    if not dynamics.scores_frames:
        return f"needs dynamics of kind 'latent', and dynamics.kind = {dynamics.kind}"
    if needs.rewards and not dynamics.learns_rewards:
        return "needs dynamics that learn rewards, and dynamics.reward = none"
    return None


def measures_of(settings: Settings) -> tuple[Measure, ...]:
    """What `wm run` measures: the measures that are named, or all that fit but the probe."""
    asked = settings.evaluation.measures
    return _fitting(settings) if asked == "auto" else asked


def _fitting(settings: Settings) -> tuple[Measure, ...]:
    return tuple(name for name, measure in _MEASURES.items() if measure.automatic and unfit(name, settings) is None)


def check_measures(settings: Settings) -> None:
    """Raises UsageError where dynamics with these settings, or what is collected for them, could not be measured as
    `wm run` is to do it."""
    measures = measures_of(settings)
    for measure in measures:
        if reason := unfit(measure, settings):
            fitting = ", ".join(_fitting(settings))
            remedy = f"auto, here {fitting}" if fitting else "[]"
            raise UsageError(f"evaluation.measures holds {measure}, which {reason}: set evaluation.measures={remedy}.")
    if measures:
        check_held_back(settings, "test", "evaluation.measures", none="[]")


def _episodes(context: Context, played: Artifact, task: Task) -> Episodes:
    memory = context.held_out(played, "test")
    sketch = read_segment(played.path / HELD_OUT["test"], "sketch")["sketch"]
    time = task.context + task.query
    count = min(len(memory) // time, context.settings.evaluation.episodes)
    shape, rows = (count, time), count * time  # whole episodes of one length, one after the other
    action = memory.action[:rows].view(shape)
    counts = np.ones(shape, bool)
    if task.padding is not None:
        counts[:, 1:] = action[:, :-1].cpu().numpy() != task.padding
    return Episodes(
        memory.frames[:rows].view(*shape, *memory.frames.shape[1:]),
        action,
        memory.reward[:rows].view(shape).cpu().numpy(),
        sketch[:rows].reshape(*shape, -1),
        counts,
    )


# -- the model at work ------------------------------------------------------------------------------------------------


@torch.no_grad()
def imagined(world_model: WorldModel, frames: Tensor, action: Tensor, known: int, *, likeliest: bool = False) -> Tensor:
    """Features (B, T, F) of frames (B, T, H, W, 3) of which the first `known` were seen, and the others imagined under
    the actions (B, T). With `likeliest` every latent is the likeliest one and not drawn.

    Raises UsageError for a backbone that cannot read those that were seen.
    """
    world_model.check_reads(known - 1)
    latent = world_model.encode(frames[:, :known])
    features, _ = open_loop(world_model, latent, action, likeliest=likeliest)
    return features


@torch.no_grad()
def frame_errors(world_model: WorldModel, features: Tensor, frames: Tensor) -> np.ndarray:
    """Squared errors (B, T), summed over a frame's pixels, of what features (B, T, F) are decoded to."""
    flat, real = features.flatten(0, 1), frames.flatten(0, 1)
    found = [
        world_model.frame_error(some, true) for some, true in zip(flat.split(FRAMES), real.split(FRAMES), strict=True)
    ]
    return torch.cat(found).view(features.shape[:2]).double().cpu().numpy()


def _by_batches(
    context: Context, episodes: Episodes, what: str, function: Callable[[Tensor, Tensor, slice], Any]
) -> list[Any]:
    """function(frames, action, which) of batch after batch of episodes."""
    total, found = len(episodes.action), []
    with context.progress.bar(what, total, "episodes") as bar:
        for begin in range(0, total, BATCH):
            which = slice(begin, min(begin + BATCH, total))
            found.append(function(episodes.frames[which], episodes.action[which], which))
            bar.advance(which.stop - which.start)
    return found


# -- the measures -----------------------------------------------------------------------------------------------------


def _generation(
    context: Context, world_model: WorldModel, task: Task, episodes: Episodes, work: Work
) -> dict[str, Any]:
    """Reconstruction error, every frame seen, and generation error, the query imagined; with a curve over its steps,
    and films of both beside the truth."""
    known = task.context
    films: list[tuple[np.ndarray, np.ndarray]] = []

    def errors(frames: Tensor, action: Tensor, which: slice) -> tuple[np.ndarray, ...]:
        seen = imagined(world_model, frames, action, frames.shape[1])
        drawn = imagined(world_model, frames, action, known)
        likeliest = imagined(world_model, frames, action, known, likeliest=True)
        if not films:
            films.append((frames[:FILMED].cpu().numpy(), _decoded(world_model, drawn[:FILMED])))
        query = [frame_errors(world_model, each[:, known:], frames[:, known:]) for each in (drawn, likeliest)]
        return frame_errors(world_model, seen, frames), *query

    seen, drawn, likeliest = (
        np.concatenate(parts) for parts in zip(*_by_batches(context, episodes, "generation", errors), strict=True)
    )
    counts = episodes.counts[:, known:]
    everywhere = episodes.counts.copy()
    everywhere[:, 0] = False  # of the first frame a model need know nothing
    error_curve = {
        "generation": metrics.curve(drawn, counts),
        "reconstruction": metrics.curve(seen[:, known:], counts),
    }
    if context.pictures:
        _write_film(work.payload, *films[0], known)
        lines = {name: (range(1, 1 + len(curve["mean"])), _band(curve)) for name, curve in error_curve.items()}
        write_curves(work.payload / "generation.png", "generation", lines, context.settings.environment.id)
    return {
        "reconstruction": metrics.estimate(metrics.over_episodes(seen[:, known:], counts)),
        "reconstruction_everywhere": metrics.estimate(metrics.over_episodes(seen, everywhere)),
        "generation": metrics.estimate(metrics.over_episodes(drawn, counts)),
        "generation_likeliest": metrics.estimate(metrics.over_episodes(likeliest, counts)),
        "curve": error_curve,
    }


def _recall(context: Context, world_model: WorldModel, task: Task, episodes: Episodes, work: Work) -> dict[str, Any]:
    """Generation error behind the teleport after k more frames were seen; the same frames are scored for every k."""
    ks = [k for k in RECALLED if k + 1 < task.query]
    last = ks[-1] + 1

    def errors(frames: Tensor, action: Tensor, which: slice) -> np.ndarray:
        assert bool((action[:, task.context - 1] == TELEPORT).all())
        scored = frames[:, task.context + last :]
        return np.stack(
            [
                frame_errors(world_model, features[:, task.context + last :], scored)
                for features in (imagined(world_model, frames, action, task.context + 1 + k) for k in ks)
            ]
        )

    found = np.concatenate(_by_batches(context, episodes, "recall", errors), 1)  # (K, E, frames)
    by_k = {str(k): metrics.estimate(error.mean(1)) for k, error in zip(ks, found, strict=True)}
    if context.pictures:
        values = [by_k[str(k)] for k in ks]
        band = tuple(np.array([value[key] for value in values], float) for key in ("value", "low", "high"))
        write_curves(work.payload / "recall.png", "recall", {"recall": (ks, band)}, context.settings.environment.id)
    return {"recall": by_k, "frames_scored": task.query - last}


def _reward(context: Context, world_model: WorldModel, task: Task, episodes: Episodes, work: Work) -> dict[str, Any]:
    """How often the last reward is told rightly: all frames seen (inference), or the query imagined (imagination)."""

    def right(frames: Tensor, action: Tensor, which: slice) -> np.ndarray:
        true = episodes.reward[which, -2] > 0.5  # earned by the step into the last frame
        found = []
        for known in (frames.shape[1], task.context):
            last = imagined(world_model, frames, action, known)[:, -1]
            found.append((world_model.arrival_reward(last) > 0.5).cpu().numpy() == true)
        return np.stack(found).astype(float)

    inference, imagination = np.concatenate(_by_batches(context, episodes, "reward", right), 1)
    return {
        "inference": metrics.estimate(inference),
        "imagination": metrics.estimate(imagination),
        "rewarded": float((episodes.reward[:, -2] > 0.5).mean()),
    }


def _doors(context: Context, world_model: WorldModel, task: Task, episodes: Episodes, work: Work) -> dict[str, Any]:
    """How many of the doors in sight of an imagined frame are locked or open as they are, and of their colors."""
    templates, side = tiles.PICTURES[tiles.DOORS], tiles.PIXELS

    def compared(frames: Tensor, action: Tensor, which: slice) -> tuple[np.ndarray, np.ndarray]:
        drawn = imagined(world_model, frames, action, task.context)[:, task.context :].flatten(0, 1)
        codes = episodes.sketch[which, task.context :].reshape(len(drawn), -1)  # (N, 25)
        here = np.isin(codes, tiles.DOORS) & episodes.counts[which, task.context :].reshape(-1, 1)
        pictures = torch.cat([world_model.images(some) for some in drawn.split(FRAMES)])
        tiled = pictures.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
        shown = 255 * tiled.float().cpu().numpy()[here]
        return metrics.nearest(shown, templates), codes[here].astype(np.int64) - tiles.LOCKED

    found, true = (
        np.concatenate(parts) for parts in zip(*_by_batches(context, episodes, "doors", compared), strict=True)
    )
    return metrics.doors(found, true, len(tiles.COLORS))._asdict()


class _Measure(NamedTuple):
    score: Callable[[Context, WorldModel, Task, Episodes, Work], dict[str, Any]]
    task: type[Task]
    """The kind of task that it measures."""
    example: str
    """Names the kind of task, with an example."""
    rewards: bool = False
    """Whether it needs dynamics that learn rewards."""
    settings: tuple[str, ...] = ()
    """Keys of `evaluation` that its results depend on."""
    automatic: bool = True
    """Whether `evaluation.measures=auto` includes it."""


_MEASURES: dict[Measure, _Measure] = {
    "generation": _Measure(
        _generation,
        Task,  # type: ignore[type-abstract]  # asked of an instance, never built
        "a memory task, such as wm/DistractingMemory-100-v0",
    ),
    "recall": _Measure(
        _recall,
        TeleportRooms,
        "a task with a teleport, such as wm/TwoRoomsTeleport-v0",
    ),
    "reward": _Measure(
        _reward,
        DistractingMemory,
        "a task whose last frame earns, such as wm/DistractingMemory-100-v0",
        rewards=True,
    ),
    "doors": _Measure(
        _doors,
        MultiDoorsKeys,
        "a task with doors, such as wm/MultiDoorsKeys-3-v0",
    ),
    "probe": _Measure(
        probe,
        Maze,
        "a task with labels of its walls and objects, such as wm/Maze-9-v0",
        settings=("probe_updates",),
        automatic=False,
    ),
}


# -- pictures ---------------------------------------------------------------------------------------------------------


def _decoded(world_model: WorldModel, features: Tensor) -> np.ndarray:
    """Features (B, T, F) to frames (B, T, H, W, 3) uint8."""
    flat = features.flatten(0, 1)
    pictures = torch.cat([world_model.images(some) for some in flat.split(FRAMES)])
    pixels = (255 * pictures).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return pixels.unflatten(0, features.shape[:2]).cpu().numpy()


def _write_film(folder: Path, real: np.ndarray, drawn: np.ndarray, known: int) -> None:
    """`imagination.gif`, episodes under each other, real left and imagined right; `imagination.png`, a strip of the
    first one's query and the end of its context."""
    stacked = [np.concatenate(list(frames), axis=1) for frames in (real, drawn)]
    write_gif(folder / "imagination.gif", side_by_side(stacked[0], stacked[1], context=known), fps=10)
    write_png(folder / "imagination.png", _query_strip({"real": real[0], "imagined": drawn[0]}, known))


def _query_strip(rows: Mapping[str, np.ndarray], known: int) -> np.ndarray:
    """The query and the end of the context of one episode, (T, H, W, 3) by name."""
    length = len(next(iter(rows.values())))
    every = max(1, (length - known) // COLUMNS)
    return strip(rows, start=max(0, known - 2 * every), every=every, context=known)


def draw_strips(runs: Sequence[Path], path: Path) -> None:
    """Draw how the newest dynamics model of each run imagines the query of one test episode, below the truth.

    Raises UsageError for a model that is none of a memory task or runs with other test episodes, ArtifactError where a
    model or its experience is missing.
    """
    check_target(path, (".png",))
    rows: dict[str, np.ndarray] = {}
    for folder in runs:
        context = open_context(folder, None, create=False, quiet=True)
        model = context.run.resolve("dynamics", "dynamics")
        if reason := unfit("generation", settings_of(model)):
            raise UsageError(f"{folder}: --strips {reason}.")
        world_model, task = load_world_model(model, context.machine), task_of(context)
        episodes = _episodes(context, model.input("experience"), task)
        frames, action = episodes.frames[:1], episodes.action[:1]
        real = frames[0].cpu().numpy()
        if not np.array_equal(rows.setdefault("real", real), real):
            raise UsageError(f"{folder}: its test episodes are others than those of {runs[0]}: give runs of one task.")
        seed = derived_seed(context.settings.seed, "eval memory")
        with isolated_randomness(seed, context.machine.device), context.machine.autocast():
            drawn = _decoded(world_model, imagined(world_model, frames, action, task.context))
        name = folder.resolve().name
        rows[str(folder) if name in rows else name] = drawn[0]
    write_png(path, _query_strip(rows, task.context))


def _band(curve: dict[str, list[float | None]]) -> tuple[np.ndarray, ...]:
    """Value, low and high; NaN where nothing was scored."""
    return tuple(np.array(curve[part], float) for part in ("mean", "low", "high"))


# -- the protocols ----------------------------------------------------------------------------------------------------


def _protocol(measure: Measure) -> Protocol:
    return Protocol(
        name=measure,
        needs="dynamics",
        evaluate=partial(evaluate_memory, measure=measure),
        unfit=partial(unfit, measure),
        summarize=told,
        table=table,
        reads_experience=True,
        draw_curves=draw_curves if measure in AXES else None,
        draw_strips=draw_strips if measure == "generation" else None,
    )


MEASURES = tuple(_protocol(measure) for measure in _MEASURES)
