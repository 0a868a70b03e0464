"""`wm collect --policy scripted`: whole episodes of a memory task, some held back, as one version of experience.

Frames are stored as compact states and drawn when the experience is loaded.

Axes: E episodes, T frames each, N = E T rows, S bytes of a compact state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from wmcli.artifacts import Artifact, Job, Work
from wmcli.artifacts.environment import check_same_environment
from wmcli.envs.memory_task import Played, Task, play
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.experience import write_segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.settings import EpisodesCollectSettings
from wmcli.stages.context import Context
from wmcli.training.device import derived_seed

TOGETHER = 64  # episodes played side by side
ALONE = 8 * TOGETHER * 250  # frames that are played before other processes would have started


def task_of(context: Context) -> Task:
    """The run's memory task. Raises UsageError when its environment is none, or shows frames of another size."""
    environment = context.settings.environment
    task = TASKS.get(environment.id)
    if task is None:
        raise UsageError(
            f"environment.id = '{environment.id}' has no script; those that have: {', '.join(sorted(TASKS))}."
        )
    if environment.size != task.side:
        raise UsageError(
            f"environment.size = {environment.size}: the frames of {environment.id} have {task.side} pixels; use"
            f" --set environment.size={task.side}"
        )
    return task


def scripted_job(context: Context, before: Artifact | None) -> Job:
    """Return the job."""
    collect = context.settings.collect
    identity = context.settings.identity("seed", "environment")
    identity |= {key: getattr(collect, key) for key in ("policy", "episodes", *HELD_OUT)}
    return context.run.job("experience", identity, {} if before is None else {"previous": before})


def collect_scripted(context: Context, before: Artifact | None) -> Artifact:
    """Play `collect.episodes` episodes behind the experience `before`, and those held back, and publish them.

    Every episode has a seed of its own, whoever plays it and beside which others. Raises UsageError for an environment
    without a script, ArtifactError when `before` is of another one.
    """
    task, settings = task_of(context), context.settings
    assert isinstance(settings.collect, EpisodesCollectSettings)
    if before is not None:
        check_same_environment(context.environment, before)
    job = scripted_job(context, before)
    if existing := context.done(job):
        context.progress.say(f"collect: {existing.name} is up to date, nothing to do")
        return existing
    counts = {"train": settings.collect.episodes} | {part: getattr(settings.collect, part) for part in HELD_OUT}
    played = before.metrics.get("total_episodes", 0) if before else 0
    with context.work(job, fresh=True) as work:
        counted = ", ".join(f"{count} {part}" for part, count in counts.items())
        context.progress.say(f"collect: episodes of {settings.environment.id} by its script: {counted}")
        frames = sum(counts.values()) * (task.context + task.query)
        with context.progress.bar("collect", sum(counts.values()), "episodes") as bar, _workers(frames) as workers:
            summary: dict[str, Any] = {}
            for part, count in counts.items():
                if count:
                    seeds = _seeds(settings.seed, part, played if part == "train" else 0, count)
                    episodes = _play(task, seeds, workers, bar.advance)
                    about = {"environment": settings.environment.id, "seeds": seeds.tolist()}
                    summary |= write_episodes(work, part, episodes, **about)
        return publish_episodes(context, work, before, summary | counts)


def publish_episodes(
    context: Context, work: Work, before: Artifact | None, metrics: dict[str, Any], command: str = "collect"
) -> Artifact:
    """Whole episodes that were written, `metrics["train"]` of them to train on, as the version behind `before`."""
    earlier = before.metrics if before else {}
    played, steps = earlier.get("total_episodes", 0), earlier.get("total_steps", 0)
    artifact = context.publish(
        work,
        metrics
        | {
            "episodes": metrics["train"],
            "total_episodes": played + metrics["train"],
            "total_steps": steps + metrics["steps"],
        },
    )
    context.progress.say(f"{command}: published {artifact.name}")
    return artifact


def _seeds(seed: int, part: str, start: int, count: int) -> np.ndarray:
    """Seeds (count,) of the episodes from number `start` on: those of a part have none in common with another's."""
    base = derived_seed(seed, "scripted", part)
    numbers = range(start, start + count)
    return np.array([np.random.SeedSequence((base, number)).generate_state(1)[0] for number in numbers], np.int64)


@contextmanager
def _workers(frames: int) -> Iterator[Executor]:
    """Processes, one a core, where there is enough to do for them; else this one."""
    if frames < ALONE:
        with ThreadPoolExecutor(1) as executor:
            yield executor
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as executor:
        yield executor


def _play(task: Task, seeds: np.ndarray, workers: Executor, advance: Any) -> Played:
    parts = []
    for played in workers.map(partial(play, task), np.split(seeds, range(TOGETHER, len(seeds), TOGETHER))):
        parts.append(played)
        advance(len(played.action))
    return Played(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def write_episodes(
    work: Work, part: str, played: Played, frames: Iterable[np.ndarray] | None = None, **about: Any
) -> dict[str, Any]:
    """Write the segment of a part, "train" or one of HELD_OUT. Return the metrics of the training part.

    For `frames`, of recordings, and `about` see `write_segment`.
    """
    episodes, time = played.action.shape
    first, last = (np.zeros((episodes, time), bool) for _ in range(2))
    first[:, 0] = last[:, -1] = True
    arrays = {
        "sketch": played.compact_states,
        "action": played.action,
        "reward": played.reward,
        "terminated": played.over,
        "truncated": last & ~played.over,
        "first": first,
        "lives": np.full((episodes, time), -1, np.int16),
        "stream": np.zeros((episodes, time), np.int16),
    }
    folder = work.payload / (SEGMENT if part == "train" else HELD_OUT[part])
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    write_segment(folder, flat, frames, **about)
    if part != "train":
        return {}
    return {"steps": episodes * time, "mean_return": float(played.reward.sum(1).mean())}
