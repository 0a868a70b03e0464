"""`wm collect`: act in the environment and publish a segment of experience."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wmcli.artifacts import Artifact, Job
from wmcli.artifacts.environment import check_same_environment, is_recorded
from wmcli.envs.vector import MOST_LIVES
from wmcli.errors import ArtifactError, MachineError, UsageError
from wmcli.experience import write_segment
from wmcli.experience.games import finished_spans
from wmcli.experience.load import HELD_OUT, SEGMENT, lives_end_episodes
from wmcli.experience.segment import lives_left, opens_game
from wmcli.memory import machine_memory
from wmcli.reading import damage
from wmcli.settings import LearnedCollectSettings
from wmcli.spaces import parts_of
from wmcli.stages.apart import play_apart
from wmcli.stages.checks import check_episodes
from wmcli.stages.context import Context
from wmcli.stages.held_back import holds_back, play_test_games
from wmcli.stages.player import STREAMS, Player, check_seed, played_before, streams_tensors
from wmcli.stages.recorded import collect_recorded, recorded_job
from wmcli.stages.scripted import collect_scripted, scripted_job
from wmcli.training.checkpoint import load_tensors, save_tensors


def collect(
    context: Context,
    *,
    controller: str | None = None,
    steps: int | None = None,
    previous: str | None = None,
    extend: bool = True,
) -> Artifact:
    """Play the environment and publish the new experience.

    Imported experience in between is a stream of its own: the environments go on where they stood.

    For `collect.policy` "scripted" or "recorded" see `collect_scripted` and `collect_recorded`.

    Args:
        context: Of the run.
        controller: Reference, or "random". None is the newest controller of the run, or random play.
        steps: Number of decisions, rounded up to a multiple of the environments. None is `collect.steps`.
        previous: Reference of the experience to continue. None is the newest one.
        extend: Continue the newest experience if `previous` is None.

    Raises:
        ArtifactError: The previous experience is of another environment or policy.
        UsageError: `steps` or `controller` are given for whole episodes, these are longer than the rows that dynamics
            learn from, or the environment is imported data.
        EnvironmentFault: The environment failed. The same call resumes.
        Stopped: A signal arrived. The same call resumes.
    """
    settings, run = context.settings, context.run
    if is_recorded(settings.environment.id):
        raise UsageError(
            f"environment.id = '{settings.environment.id}' is imported data, which nobody can play: to collect behind"
            " it, import it into another --run with: wm import --env ID"
        )
    environment = context.environment
    before = run.resolve(previous, "experience") if previous else run.latest("experience") if extend else None
    policy = settings.collect.policy
    if before is not None and (before.metrics.get("recorded", 0) > 0) != (policy == "recorded"):
        raise ArtifactError(
            f"{before.name}: recordings and frames played here look different and cannot be mixed; collect into another"
            " --run"
        )
    if not isinstance(settings.collect, LearnedCollectSettings):
        if controller not in (None, "random") or steps:
            raise UsageError(f"--policy {policy} adds whole episodes: omit --controller and --steps.")
        check_episodes(settings)
        return (collect_scripted if policy == "scripted" else collect_recorded)(context, before)
    played = played_before(before)
    if played is not None and not (played.path / STREAMS).exists():
        raise ArtifactError(
            f"{played.name} was played by a script, so no environment can continue it: collect into another --run, or"
            " use --policy scripted"
        )
    actor = _controller(context, controller)
    inputs = {"previous": before, "controller": actor}
    present = {role: artifact for role, artifact in inputs.items() if artifact is not None}
    for artifact in present.values():
        check_same_environment(environment, artifact)
    rounds = _rounds(context, steps)
    job = collect_job(context, present, steps)
    if existing := context.done(job):
        context.progress.say(f"collect: {existing.name} is up to date, nothing to do")
        return existing
    _check_memory(context, rounds)
    with context.work(job) as work:
        who = actor.name if actor else "the uniformly random policy"
        context.progress.say(f"collect: {rounds * settings.environment.count} steps of {environment['id']} by {who}")
        if played is None and not work.resumed and settings.environment.protocol == "plain":
            check_seed(context)
        # Before the segment, whose checkpoints then lose nothing.
        held_back = play_test_games(context, before, actor, work.path) if holds_back(context, before) else None
        streams = None
        if settings.collect.apart:
            arrays, state = play_apart(context, work.path, before, actor, rounds)
        else:
            arrays, streams = Player(context, before, actor, rounds).play(work.path)
            state = streams.state()
        write_segment(work.payload / SEGMENT, arrays)
        if held_back is not None:
            write_segment(work.payload / HELD_OUT["test"], held_back)
        save_tensors(work.payload / STREAMS, *streams_tensors(state))
        total = len(arrays["action"]) + (before.metrics["total_steps"] if before else 0)
        lives = lives_end_episodes(environment)
        metrics = _summary(arrays, _at_start(before, settings.environment.count) if lives else None)
        if held_back is not None:
            metrics["test"] = settings.collect.test_games
        context.log(job, total, {"stage": "collect", **metrics})
        artifact = context.publish(work, metrics | {"total_steps": total})
    if streams is not None:
        context.streams = (artifact.digest, streams)
    context.progress.say(summary(artifact))
    return artifact


def collect_job(context: Context, inputs: dict[str, Artifact], steps: int | None = None) -> Job:
    """Return the job of `collect`. Without inputs it is the first collection of a run."""
    if context.settings.collect.policy != "learned":
        job = scripted_job if context.settings.collect.policy == "scripted" else recorded_job
        return job(context, inputs.get("previous"))
    identity = context.settings.identity("seed", "environment", "collect") | {"rounds": _rounds(context, steps)}
    if "controller" in inputs:
        identity |= context.settings.acting_identity()
    return context.run.job("experience", identity, inputs)


def _rounds(context: Context, steps: int | None) -> int:
    """Return the number of steps of each environment."""
    settings = context.settings
    assert isinstance(settings.collect, LearnedCollectSettings)
    return -(-(steps or settings.collect.steps) // settings.environment.count)


def _check_memory(context: Context, rounds: int) -> None:
    """Raise MachineError if a segment, which is recorded in memory, is larger than that of this machine."""
    rows = rounds * context.settings.environment.count
    size = rows * sum(
        np.dtype(part.dtype).itemsize * math.prod(part.shape) for part in parts_of(context.spaces.observation).values()
    )
    memory = machine_memory().total
    if size > memory:
        raise MachineError(
            f"{rows} steps at a time take {size / 1e9:,.0f} GB of memory, and this machine has {memory / 1e9:,.0f} GB:"
            " lower collect.steps or environment.count, and collect more often."
        )


def _controller(context: Context, reference: str | None) -> Artifact | None:
    if reference == "random":
        return None
    if reference is None:
        return context.run.latest("controller")
    return context.run.resolve(reference, "controller")


def summary(artifact: Artifact) -> str:
    """Return an experience in one line: its version, and the returns of complete episodes and games."""
    metrics = artifact.metrics
    returns = [
        f"{metrics[mean]:.3f} over {metrics[count]} {unit}"
        for mean, count, unit in (("mean_return", "episodes", "episodes"), ("mean_game_return", "games", "whole games"))
        if metrics.get(mean) is not None
    ]
    return f"collect: published {artifact.name}" + (f": mean return {', '.join(returns)}" if returns else "")


def _summary(arrays: dict[str, np.ndarray], at_start: np.ndarray | None) -> dict[str, Any]:
    """Count steps, and average the returns of complete episodes and games.

    `at_start` (E,): the streams that stood at the start of a game before the segment; None where episodes are games.
    """
    ended, left = arrays["terminated"] | arrays["truncated"], lives_left(arrays)
    episodes: list[float] = []
    games: list[float] = []
    for stream in np.unique(arrays["stream"]):
        rows = np.flatnonzero(arrays["stream"] == stream)
        reward, first = arrays["reward"][rows], arrays["first"][rows]
        episodes += finished_spans(reward, first, ended[rows]).total.tolist()
        if at_start is not None:
            before = np.append(-1 if at_start[stream] else MOST_LIVES, left[rows][:-1])
            opens = opens_game(first, arrays["lives"][rows], before)
            games += finished_spans(reward, opens, (ended & (left < 0))[rows]).total.tolist()
    metrics: dict[str, Any] = {"steps": len(arrays["action"])} | _mean("episodes", "mean_return", episodes)
    return metrics if at_start is None else metrics | _mean("games", "mean_game_return", games)


def _mean(count: str, mean: str, returns: list[float]) -> dict[str, Any]:
    return {count: len(returns), mean: float(np.mean(returns)) if returns else None}


def _at_start(before: Artifact | None, count: int) -> np.ndarray:
    """Return which of the streams stand at the start of a game behind the experience `before`, bool (E,)."""
    played = played_before(before)
    if played is None:
        return np.ones(count, bool)
    with damage(path := played.file(STREAMS)):
        return load_tensors(path)[0]["length"].numpy() == 0
