"""`wm collect`: act in the environment and publish a segment of experience."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from wmcli.artifacts import Artifact, Job, Work
from wmcli.artifacts.environment import check_same_environment, is_imported, is_recorded
from wmcli.artifacts.failpoint import failpoint
from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import Actor, Controller
from wmcli.envs import AnyStreams, Transition, follows_seed, open_streams
from wmcli.envs.vector import MOST_LIVES
from wmcli.errors import ArtifactError, EnvironmentFault, Stopped, UsageError
from wmcli.experience import Recorder, read_segment, write_segment
from wmcli.experience.load import SEGMENT, lives_end_episodes
from wmcli.experience.segment import lives_left, opens_game
from wmcli.interrupt import stop_requests
from wmcli.nn.actions import no_action
from wmcli.settings import LearnedCollectSettings, Settings
from wmcli.spaces import column_names, from_columns, map_parts, parts_of
from wmcli.stages.context import Context
from wmcli.stages.recorded import collect_recorded, recorded_job
from wmcli.stages.scripted import collect_scripted, scripted_job
from wmcli.training.checkpoint import load_tensors, save_tensors
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

STREAMS = "streams.safetensors"  # where the environments stand at the segment's end: the next collect goes on there
CHECKPOINT = "checkpoint.safetensors"


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
        UsageError: `steps` or `controller` are given for whole episodes, or the environment is imported data.
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
    if policy != "learned":
        if controller not in (None, "random") or steps:
            raise UsageError(f"--policy {policy} adds whole episodes: omit --controller and --steps.")
        return (collect_scripted if policy == "scripted" else collect_recorded)(context, before)
    played = _played(before)
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
    with context.work(job) as work:
        who = actor.name if actor else "the uniformly random policy"
        context.progress.say(f"collect: {rounds * settings.environment.count} steps of {environment['id']} by {who}")
        streams, recorder, agent, parts = _begin(context, work, before, actor, rounds)
        _play(context, work, streams, recorder, agent, rounds, parts)
        arrays = recorder.arrays()
        write_segment(work.payload / SEGMENT, arrays)
        save_tensors(work.payload / STREAMS, *_streams_tensors(streams.state()))
        total = len(recorder) + (before.metrics["total_steps"] if before else 0)
        lives = lives_end_episodes(environment)
        metrics = _summary(arrays, _at_start(before, settings.environment.count) if lives else None)
        context.log(job, total, {"stage": "collect", **metrics})
        artifact = context.publish(work, metrics | {"total_steps": total})
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


def _controller(context: Context, reference: str | None) -> Artifact | None:
    if reference == "random":
        return None
    if reference is None:
        return context.run.latest("controller")
    return context.run.resolve(reference, "controller")


def _begin(
    context: Context, work: Work, before: Artifact | None, actor: Artifact | None, rounds: int
) -> tuple[AnyStreams, Recorder, Actor, int]:
    """Restore the environments from this job's checkpoint, else from the previous experience, else start them.

    Returns the environments, the recorder, the actor, and the number of files in the work directory with rows so far.
    """
    settings = context.settings
    parts = 0
    checkpoint = work.path / CHECKPOINT
    if checkpoint.exists():
        tensors, about = load_tensors(checkpoint)
        streams = open_streams(settings.environment, train=True, state=_streams_from(tensors, about))
    elif before is not None and context.streams is not None and context.streams[0] == before.digest:
        streams, context.streams = context.streams[1], None  # from here on they have moved on
    elif (played := _played(before)) is not None:
        played.verify()
        state = _streams_from(*load_tensors(played.file(STREAMS)))
        streams = open_streams(settings.environment, train=True, state=state)
    else:
        if settings.environment.protocol == "plain":
            _check_seed(context)
        streams = open_streams(settings.environment, train=True, seed=derived_seed(settings.seed, "collect"))
    if streams.restarted.any():
        context.progress.warn(
            f"collect: {settings.environment.id}: replaying the saved actions gave other frames: it ignores its seed,"
            " or was changed. New episodes start; unfinished ones count as truncated."
        )
    agent = _agent(context, actor, before.version if before else 0)
    recorder = Recorder(rounds, settings.environment.count)
    if checkpoint.exists():
        parts = about["parts"]
        saved = [load_tensors(work.path / _part(index))[0] for index in range(parts)]
        if saved:
            recorder.load({name: torch.cat([part[name] for part in saved]).numpy() for name in saved[0]})
        of_agent = {name: value for name, value in tensors.items() if name.startswith("agent/")}
        with context.machine.autocast():
            agent.load({name.removeprefix("agent/"): value for name, value in of_agent.items()})
        context.progress.say(f"collect: resuming at step {len(recorder)}")
    elif before is not None and isinstance(agent, Agent):
        with context.machine.autocast():
            agent.burn_in(*_last_frames(before, streams, agent.lookback, across_ends=agent.across_ends))
    return streams, recorder, agent, parts


def _played(before: Artifact | None) -> Artifact | None:
    """Return the newest experience up to `before` that environments played; None if all was imported."""
    while before is not None and is_imported(before):
        before = before.input("previous") if "previous" in before.inputs else None
    return before


def _check_seed(context: Context) -> None:
    """Warn if the environment ignores its seed."""
    environment = context.settings.environment
    if not follows_seed(environment, context.spaces.action):
        context.progress.warn(
            f"collect: {environment.id} does not follow the seed given to reset(): the same actions led elsewhere."
            " Results cannot be repeated exactly, and each later command begins new episodes."
        )


def _agent(context: Context, actor: Artifact | None, number: int) -> Actor:
    settings = context.settings
    generator = torch.Generator().manual_seed(derived_seed(settings.seed, "collect actions", number))
    count = settings.environment.count
    collecting = settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    if actor is None:
        hold = collecting.random_actions == "held"
        return UniformAgent(context.spaces.action, count, hold=hold, generator=generator)
    return build_agent(settings, *load_controller(actor, context.machine, settings.acting), generator=generator)


def build_agent(
    settings: Settings, world_model: WorldModel, controller: Controller, *, generator: torch.Generator
) -> Agent:
    """Build the agent that collects with a controller, both models frozen."""
    collecting = settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    return Agent(
        world_model,
        controller,
        settings.environment.count,
        temperature=collecting.temperature,
        epsilon=collecting.epsilon,
        hold=collecting.random_actions == "held",
        explore=True,
        feed_executed_action=collecting.feed_executed_action,
        generator=generator,
    )


def _last_frames(
    before: Artifact, streams: AnyStreams, length: int, *, across_ends: bool
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Read the last `length` rows of each unfinished episode or, with `across_ends`, game.

    Returns observations (E, T, ...), actions (E, T, ...), and whether they are real (E, T).
    """
    count = len(streams.first)

    def empty(part: np.ndarray) -> np.ndarray:
        return np.zeros((count, length, *part.shape[1:]), part.dtype)

    frames = map_parts(empty, streams.observation)
    action = no_action(streams.spaces.action, (count, length)).numpy()
    valid = np.zeros((count, length), bool)
    missing = np.minimum(streams.age(across_ends), length)
    end = np.full(count, length)  # places from there on are filled
    segment = before
    while missing.any():
        if is_imported(segment):  # no environment's rows, and perhaps many
            segment = segment.input("previous")
            continue
        segment.verify()
        arrays = read_segment(segment.path / SEGMENT)
        observation = from_columns("observation", arrays)
        for stream in np.flatnonzero(missing):
            rows = np.flatnonzero(arrays["stream"] == stream)[-missing[stream] :]
            places = slice(end[stream] - len(rows), end[stream])
            for part, recorded in zip(parts_of(frames).values(), parts_of(observation).values(), strict=True):
                part[stream, places] = recorded[rows]
            action[stream, places] = arrays["action"][rows]
            valid[stream, places] = True
            missing[stream] -= len(rows)
            end[stream] = places.start
        if missing.any():
            segment = segment.input("previous")
    return frames, action, valid


def _play(
    context: Context, work: Work, streams: AnyStreams, recorder: Recorder, agent: Actor, rounds: int, parts: int
) -> None:
    """Fill the recorder, with checkpoints every `training.checkpoint_seconds`, on a signal and after a fault.

    After a fault new episodes start, because the same actions would fail again.
    """
    count, total = context.settings.environment.count, rounds * context.settings.environment.count
    saved, closings = len(recorder), recorder.closings
    saved_at = time.monotonic()

    def save(state: dict[str, Any]) -> None:
        nonlocal saved, closings, saved_at, parts
        if len(recorder) > saved:
            rows = {name: torch.from_numpy(array) for name, array in recorder.arrays(saved, closings).items()}
            save_tensors(work.path / _part(parts), rows, {})
            saved, closings, parts = len(recorder), recorder.closings, parts + 1
        tensors, about = _streams_tensors(state)
        tensors |= {f"agent/{name}": value for name, value in agent.state().items()}
        save_tensors(work.path / CHECKPOINT, tensors, about | {"parts": parts})
        failpoint("checkpoint")
        saved_at = time.monotonic()

    with stop_requests() as stop, context.progress.bar("collect", total, "steps", start=saved) as bar:
        while len(recorder) < total:
            observation, first = streams.observation, streams.first
            with context.machine.autocast():
                action = agent.act(observation, streams.age(agent.across_ends) == 0)
            try:
                after = streams.step(action)
            except EnvironmentFault as fault:
                save(streams.broken_state())
                if not saved:
                    raise
                raise EnvironmentFault(
                    f"{fault} The {saved} of {total} steps before it are saved; new episodes follow them."
                ) from fault
            recorder.add(step_columns(observation, first, action, after) | agent.summarize_search(), after.final)
            bar.advance(count)
            due = time.monotonic() - saved_at >= context.settings.training.checkpoint_seconds
            if stop or (due and len(recorder) < total):
                save(streams.state())
                if stop:
                    raise Stopped(f"collect stopped after step {saved} of {total}; the same command resumes it.")


def step_columns(observation: Any, first: np.ndarray, action: np.ndarray, after: Transition) -> dict[str, np.ndarray]:
    """Return the columns of one step for a `Recorder`."""
    return column_names("observation", observation) | {
        "action": action.astype(np.int32) if action.dtype.kind == "i" else action,
        "reward": after.reward,
        "terminated": after.terminated,
        "truncated": after.truncated,
        "first": first,
        "lives": after.lives,
    }


def _part(index: int) -> str:
    return f"part-{index:04d}.safetensors"


def _streams_tensors(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {name: torch.from_numpy(value) for name, value in state.items() if isinstance(value, np.ndarray)}
    return tensors, {"seed": state["seed"]}


def _streams_from(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> dict[str, Any]:
    names = ("game", "length", "action", "frame")
    return {"seed": about["seed"]} | {name: tensors[name].numpy() for name in names}


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
        episodes += _returns(reward, first, ended[rows])
        if at_start is not None:
            before = np.append(-1 if at_start[stream] else MOST_LIVES, left[rows][:-1])
            games += _returns(reward, opens_game(first, arrays["lives"][rows], before), (ended & (left < 0))[rows])
    metrics: dict[str, Any] = {"steps": len(arrays["action"])} | _mean("episodes", "mean_return", episodes)
    return metrics if at_start is None else metrics | _mean("games", "mean_game_return", games)


def _returns(reward: np.ndarray, opens: np.ndarray, ended: np.ndarray) -> list[float]:
    """Return the sums of the rewards (n,) from each row that `opens` on to the one before the next, if that `ended`."""
    starts = np.flatnonzero(opens)
    if not len(starts):
        return []
    totals = np.add.reduceat(reward, starts)
    lasts = np.append(starts[1:], len(reward)) - 1  # the last row ended nothing where an episode was cut
    return totals[ended[lasts]].tolist()


def _mean(count: str, mean: str, returns: list[float]) -> dict[str, Any]:
    return {count: len(returns), mean: float(np.mean(returns)) if returns else None}


def _at_start(before: Artifact | None, count: int) -> np.ndarray:
    """Return which of the streams stand at the start of a game behind the experience `before`, bool (E,)."""
    played = _played(before)
    if played is None:
        return np.ones(count, bool)
    return load_tensors(played.file(STREAMS))[0]["length"].numpy() == 0
