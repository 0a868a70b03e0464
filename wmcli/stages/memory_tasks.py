"""The memory measures: `wm eval --protocol generation | recall | reward | doors | probe`.

The model observes the C context frames of a held-out test episode. It then imagines the Q frames of the query under
the actions taken there, with one sample of the prior per step. The probe imagines nothing, see probe.py.
B episodes, T = C + Q frames, F features.

Source: S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import read_segment, segment_about
from wmcli.experience.load import HELD_OUT
from wmcli.experience.segment import SKETCH
from wmcli.metrics import memory_tasks as metrics
from wmcli.report.files import check_target
from wmcli.report.images import columns_that_fit, side_by_side, strip, write_png, write_webp
from wmcli.settings import Measure, Settings
from wmcli.stages.context import Context
from wmcli.stages.memory_strips import RECALLED, Plan, plan_doors, plan_query, plan_recall
from wmcli.stages.memory_table import DISPLAYS, model_names, plot_curves, pools, summarize, table, write_curves
from wmcli.stages.opening import open_context
from wmcli.stages.probe import probe
from wmcli.stages.protocol import Protocol
from wmcli.stages.scripted import task_of
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.transfer import to_device
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

BATCH = 32  # episodes imagined side by side
FRAMES = 256  # decoded at a time
FILMED = 3  # episodes of a film, one under the other


class TaskEpisodes(NamedTuple):
    """Test episodes. Tensors are where the replay is, arrays on the host."""

    frames: Tensor
    """(E, T, H, W, 3) uint8."""
    action: Tensor
    """(E, T) int64."""
    reward: np.ndarray
    """(E, T), of each action."""
    compact_states: np.ndarray
    """(E, T, S) uint8, compact states."""
    counts: np.ndarray
    """(E, T) bool: False for padding at the end of a phase."""

    @property
    def lengths(self) -> np.ndarray:
        """(E,), frames without the padding at the end of the query."""
        return self.counts.shape[1] - self.counts[:, ::-1].argmax(1)


def evaluate_memory(
    context: Context, measure: Measure, *, dynamics: str | None = None, experience: str | None = None
) -> Artifact:
    """Measure a dynamics model on up to `evaluation.episodes` test episodes and publish the scores.

    Args:
        context: Of the run.
        measure: Name of the measure.
        dynamics: Reference; None is the newest of the run.
        experience: Reference of the experience with the test episodes; None is that of the dynamics.

    Raises:
        ArtifactError: An input is missing, or there are no test episodes.
        UsageError: The measure does not fit the dynamics or the task.
    """
    settings, machine, run = context.settings, context.machine, context.run
    model = run.resolve(dynamics or "dynamics", "dynamics")
    check_same_environment(context.environment, model)
    source = run.resolve(experience, "experience") if experience else model.input("experience")
    trained = settings_of(model)
    _protocol(measure).check(trained)
    task = task_of(context)
    identity = settings.identity("seed", "environment") | {
        "protocol": measure,
        "episodes": settings.evaluation.episodes,
        "precision": machine.precision,
    }
    identity |= {key: getattr(settings.evaluation, key) for key in _MEASURES[measure].settings}
    job = run.job("evaluation", identity, {"dynamics": model, "experience": source})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is up to date, nothing to do (--force measures again)")
        return existing
    with context.work(job) as work:
        world_model = load_world_model(model, machine)
        episodes = _episodes(context, source, task)
        context.progress.say(f"eval: {measure} in {len(episodes.action)} test episodes of {task.about} on {machine}")
        seed = derived_seed(settings.seed, "eval memory")
        with isolated_randomness(seed, machine.device), machine.autocast():
            scores = _MEASURES[measure].score(context, world_model, task, episodes, work)
        artifact = context.publish(
            work,
            scores
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
    context.progress.say(summarize(artifact))
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


def _episodes(context: Context, experience: Artifact, task: Task) -> TaskEpisodes:
    replay = context.held_out(experience, "test")
    folder = experience.path / HELD_OUT["test"]
    if SKETCH not in segment_about(folder)["columns"]:
        raise ArtifactError(f"{experience.name}: its test episodes follow no script, so their states are unknown.")
    compact_states = read_segment(folder, SKETCH)[SKETCH]
    time = task.context + task.query
    count = min(len(replay) // time, context.settings.evaluation.episodes)
    shape, rows = (count, time), count * time  # whole episodes of one length, one after the other
    action = replay.action[:rows].view(shape)
    counts = np.ones(shape, bool)
    if task.padding is not None:
        counts[:, 1:] = action[:, :-1].cpu().numpy() != task.padding
    return TaskEpisodes(
        replay.observation[:rows].view(*shape, *replay.observation.shape[1:]),
        action,
        replay.reward[:rows].view(shape).cpu().numpy(),
        compact_states[:rows].reshape(*shape, -1),
        counts,
    )


# -- rollouts ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def roll_out(
    world_model: WorldModel, frames: Tensor, action: Tensor, context_frames: int, *, likeliest: bool = False
) -> Tensor:
    """Observe the first frames of each episode, and imagine the others.

    Args:
        world_model: In eval mode.
        frames: (B, T, H, W, 3) uint8.
        action: (B, T) int64.
        context_frames: Number of frames to observe.
        likeliest: Take the likeliest latents instead of samples.

    Returns:
        Features (B, T, F).

    Raises:
        UsageError: The backbone cannot read the context.
    """
    world_model.check_reads(context_frames - 1)
    latent = world_model.encode(frames[:, :context_frames])
    features, _ = open_loop(world_model, latent, action, likeliest=likeliest)
    return features


@torch.no_grad()
def frame_errors(world_model: WorldModel, features: Tensor, frames: Tensor) -> np.ndarray:
    """Return squared errors (B, T), summed over a frame's pixels, of decoded features (B, T, F)."""
    parts = zip(features.flatten(0, 1).split(FRAMES), frames.flatten(0, 1).split(FRAMES), strict=True)
    errors = [world_model.frame_error(some, real) for some, real in parts]
    return torch.cat(errors).view(features.shape[:2]).double().cpu().numpy()


def _map_batches(
    context: Context, episodes: TaskEpisodes, name: str, function: Callable[[Tensor, Tensor, slice], Any]
) -> list[Any]:
    """Return function(frames, action, which) of every batch of episodes."""
    total, results = len(episodes.action), []
    with context.progress.bar(name, total, "episodes") as bar:
        for begin in range(0, total, BATCH):
            which = slice(begin, min(begin + BATCH, total))
            frames = to_device(episodes.frames[which], context.machine.device)
            results.append(function(frames, episodes.action[which], which))
            bar.advance(which.stop - which.start)
    return results


# -- the measures -----------------------------------------------------------------------------------------------------


def _generation(
    context: Context, world_model: WorldModel, task: Task, episodes: TaskEpisodes, work: Work
) -> dict[str, Any]:
    """Measure the reconstruction error (all frames observed) and the generation error (the query imagined).

    Write a curve over the steps of the query, and films beside the real episodes.
    """
    start = task.context
    films: list[tuple[np.ndarray, np.ndarray]] = []

    def errors(frames: Tensor, action: Tensor, which: slice) -> tuple[np.ndarray, ...]:
        observed = roll_out(world_model, frames, action, frames.shape[1])
        sampled = roll_out(world_model, frames, action, start)
        likeliest = roll_out(world_model, frames, action, start, likeliest=True)
        if not films:
            films.append((frames[:FILMED].cpu().numpy(), _decode(world_model, sampled[:FILMED])))
        query = [frame_errors(world_model, each[:, start:], frames[:, start:]) for each in (sampled, likeliest)]
        return frame_errors(world_model, observed, frames), *query

    observed, sampled, likeliest = (
        np.concatenate(parts) for parts in zip(*_map_batches(context, episodes, "generation", errors), strict=True)
    )
    counts = episodes.counts[:, start:]
    everywhere = episodes.counts.copy()
    everywhere[:, 0] = False  # nothing predicts the first frame
    error_curve = {
        "generation": metrics.curve(sampled, counts),
        "reconstruction": metrics.curve(observed[:, start:], counts),
    }
    if context.pictures:
        _write_film(work.payload, *films[0], task, episodes)
        lines = {name: (range(1, 1 + len(curve["mean"])), _band(curve)) for name, curve in error_curve.items()}
        write_curves(work.payload / "generation.png", "generation", lines, context.settings.environment.id)
    return {
        "reconstruction": metrics.estimate(metrics.over_episodes(observed[:, start:], counts)),
        "reconstruction_everywhere": metrics.estimate(metrics.over_episodes(observed, everywhere)),
        "generation": metrics.estimate(metrics.over_episodes(sampled, counts)),
        "generation_likeliest": metrics.estimate(metrics.over_episodes(likeliest, counts)),
        "curve": error_curve,
    }


def _recall(
    context: Context, world_model: WorldModel, task: Task, episodes: TaskEpisodes, work: Work
) -> dict[str, Any]:
    """Measure the generation error after the teleport and k more observed frames, on the same frames for every k."""
    ks = [k for k in RECALLED if k + 1 < task.query]
    last = ks[-1] + 1

    def errors(frames: Tensor, action: Tensor, which: slice) -> np.ndarray:
        assert bool((action[:, task.context - 1] == TELEPORT).all())
        query = frames[:, task.context + last :]
        return np.stack(
            [
                frame_errors(world_model, features[:, task.context + last :], query)
                for features in (roll_out(world_model, frames, action, task.context + 1 + k) for k in ks)
            ]
        )

    error = np.concatenate(_map_batches(context, episodes, "recall", errors), 1)  # (K, E, frames)
    every = np.ones(error.shape[1:], bool)
    by_k = {str(k): metrics.estimate(metrics.over_episodes(each, every)) for k, each in zip(ks, error, strict=True)}
    if context.pictures:
        values = [by_k[str(k)] for k in ks]
        band = tuple(np.array([value[key] for value in values], float) for key in ("value", "low", "high"))
        write_curves(work.payload / "recall.png", "recall", {"recall": (ks, band)}, context.settings.environment.id)
    return {"recall": by_k, "frames_scored": task.query - last}


def _reward(
    context: Context, world_model: WorldModel, task: Task, episodes: TaskEpisodes, work: Work
) -> dict[str, Any]:
    """Measure the accuracy of the last reward: all frames observed (inference), or the query imagined (imagination)."""

    def right(frames: Tensor, action: Tensor, which: slice) -> np.ndarray:
        true = episodes.reward[which, -2] > 0.5  # earned by the step into the last frame
        hits = []
        for context_frames in (frames.shape[1], task.context):
            last = roll_out(world_model, frames, action, context_frames)[:, -1]
            reward = world_model.arrival_reward(last).cpu().numpy()
            hits.append(((reward > 0.5) == true) & np.isfinite(reward))
        return np.stack(hits).astype(float)

    inference, imagination = np.concatenate(_map_batches(context, episodes, "reward", right), 1)
    return {
        "inference": metrics.estimate(inference),
        "imagination": metrics.estimate(imagination),
        "rewarded": float((episodes.reward[:, -2] > 0.5).mean()),
    }


def _doors(context: Context, world_model: WorldModel, task: Task, episodes: TaskEpisodes, work: Work) -> dict[str, Any]:
    """Measure the accuracy of state and color of the doors in sight in imagined frames."""
    templates, side = tiles.PICTURES[tiles.DOORS], tiles.PIXELS

    def numbers(frames: Tensor, action: Tensor, which: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        features = roll_out(world_model, frames, action, task.context)[:, task.context :].flatten(0, 1)
        codes = episodes.compact_states[which, task.context :].reshape(len(features), -1)  # (N, 25)
        here = np.isin(codes, tiles.DOORS) & episodes.counts[which, task.context :].reshape(-1, 1)
        pictures = torch.cat([world_model.images(some) for some in features.split(FRAMES)])
        tiled = pictures.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
        doors = 255 * tiled.float().cpu().numpy()[here]
        episode = which.start + np.nonzero(here)[0] // task.query
        return metrics.nearest(doors, templates), codes[here].astype(np.int64) - tiles.LOCKED, episode

    imagined, real, episode = (
        np.concatenate(parts) for parts in zip(*_map_batches(context, episodes, "doors", numbers), strict=True)
    )
    return metrics.doors(imagined, real, episode, len(tiles.COLORS))._asdict()


class _Measure(NamedTuple):
    """A memory measure."""

    score: Callable[[Context, WorldModel, Task, TaskEpisodes, Work], dict[str, Any]]
    task: type[Task]
    """The kind of task that it measures."""
    example: str
    """The kind of task in words, with an example."""
    rewards: bool = False
    """Whether it needs dynamics that learn rewards."""
    settings: tuple[str, ...] = ()
    """Keys of `evaluation` that its results depend on."""
    plan: Plan | None = None
    """Columns of `wm compare --strips`; None if it draws none."""
    caption: Callable[[WorldModel, Tensor], str] | None = None
    """Takes a model and the features (T, F) of an episode of a strip. Returns what to add to the model's name."""
    automatic: bool = True
    """Whether `evaluation.measures=auto` includes it."""


_MEASURES: dict[Measure, _Measure] = {
    "generation": _Measure(
        _generation,
        Task,  # type: ignore[type-abstract]  # for isinstance only
        "a memory task, such as wm/DistractingMemory-100-v0",
        plan=plan_query,
    ),
    "recall": _Measure(
        _recall,
        TeleportRooms,
        "a task with a teleport, such as wm/TwoRoomsTeleport-v0",
        plan=plan_recall,
    ),
    "reward": _Measure(
        _reward,
        DistractingMemory,
        "a task whose last frame earns, such as wm/DistractingMemory-100-v0",
        rewards=True,
        plan=plan_query,
        caption=lambda world_model, features: f"reward {float(world_model.arrival_reward(features[-1])):z.2f}",
    ),
    "doors": _Measure(
        _doors,
        MultiDoorsKeys,
        "a task with doors, such as wm/MultiDoorsKeys-3-v0",
        plan=plan_doors,
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


def _decode(world_model: WorldModel, features: Tensor) -> np.ndarray:
    """Decode features (B, T, F) to frames (B, T, H, W, 3) uint8."""
    flat = features.flatten(0, 1)
    pictures = torch.cat([world_model.images(some) for some in flat.split(FRAMES)])
    pixels = (255 * pictures).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return pixels.unflatten(0, features.shape[:2]).cpu().numpy()


def _write_film(folder: Path, real: np.ndarray, imagined: np.ndarray, task: Task, episodes: TaskEpisodes) -> None:
    """Write `imagination.webp` (episodes below each other, real left, imagined right) and `imagination.png`.

    The film ends with the shortest of its episodes, the first ones. The strip is of the first one's query and the end
    of its context.
    """
    lengths = episodes.lengths[: len(real)]
    stacked = [np.concatenate(list(frames[:, : lengths.min()]), axis=1) for frames in (real, imagined)]
    write_webp(folder / "imagination.webp", side_by_side(stacked[0], stacked[1], context=task.context), fps=10)
    rows, action = {"real": real[0], "imagined": imagined[0]}, episodes.action[0].cpu().numpy()
    shown = plan_query(task, action, int(lengths[0]), columns_that_fit(real[0], list(rows)))
    write_png(folder / "imagination.png", strip(rows, steps=shown.steps, phases=shown.phases))


class _Shown(NamedTuple):
    """A row of a strip: a model, and the first test episode that it was measured on."""

    context: Context
    dynamics: Artifact
    episode: TaskEpisodes


def draw_strips(measure: Measure, evaluations: Sequence[Artifact], path: Path) -> None:
    """Draw one test episode as each measured model imagines it, below the real one.

    Args:
        measure: Determines the frames that a model observes and those to show.
        evaluations: Of this measure.
        path: A .png.

    Raises:
        ArtifactError: A dynamics model or its experience is missing.
        UsageError: The runs have different test episodes, or the picture cannot be written.
    """
    check_target(path, (".png",))
    shown = [_open_strip(each) for each in evaluations]
    names = model_names(evaluations)
    real = shown[0].episode.frames[0].cpu().numpy()
    for each, evaluation in zip(shown, evaluations, strict=True):
        if not np.array_equal(each.episode.frames[0].cpu().numpy(), real):
            raise UsageError(
                f"{evaluation.run} and {evaluations[0].run} have different test episodes: give runs of one task and"
                " seed."
            )
    task, episode, of = task_of(shown[0].context), shown[0].episode, _MEASURES[measure]
    assert of.plan is not None
    labels = [f"{name}: reward 0.00" if of.caption else name for name in ("real", *names)]
    plan = of.plan(task, episode.action[0].cpu().numpy(), int(episode.lengths[0]), columns_that_fit(real, labels))
    rows = {f"real: reward {episode.reward[0, -2]:zg}" if of.caption else "real": real}
    for name, each in zip(names, shown, strict=True):
        machine = each.context.machine
        world_model, frames = load_world_model(each.dynamics, machine), to_device(each.episode.frames, machine.device)
        seed = derived_seed(each.context.settings.seed, "eval memory")
        with isolated_randomness(seed, machine.device), machine.autocast():
            features = roll_out(world_model, frames, each.episode.action, plan.observed)
            label = f"{name}: {of.caption(world_model, features[0])}" if of.caption else name
            rows[label] = _decode(world_model, features)[0]
    write_png(path, strip(rows, steps=plan.steps, phases=plan.phases))


def _open_strip(evaluation: Artifact) -> _Shown:
    context = open_context(evaluation.run, None, create=False, quiet=True)
    episodes = _episodes(context, evaluation.input("experience"), task_of(context))
    first = TaskEpisodes._make(each[:1] for each in episodes)
    return _Shown(context, evaluation.input("dynamics"), first)


def _band(curve: dict[str, list[float | None]]) -> tuple[np.ndarray, ...]:
    """Return mean, low and high, NaN where nothing was scored."""
    return tuple(np.array(curve[part], float) for part in ("mean", "low", "high"))


# -- the protocols ----------------------------------------------------------------------------------------------------


def _protocol(measure: Measure) -> Protocol:
    return Protocol(
        name=measure,
        needs="dynamics",
        evaluate=partial(evaluate_memory, measure=measure),
        unfit=partial(unfit, measure),
        summarize=summarize,
        table=table,
        pools=pools,
        reads_experience=True,
        plot_curves=plot_curves if DISPLAYS[measure].curve else None,
        draw_strips=partial(draw_strips, measure) if _MEASURES[measure].plan else None,
    )


MEASURES = tuple(_protocol(measure) for measure in _MEASURES)
AUTOMATIC = tuple(name for name, measure in _MEASURES.items() if measure.automatic)
"""Names of those that `evaluation.measures = "auto"` takes where they fit."""
