"""Playing the environments for one segment of experience, with checkpoints in a folder.

E environments (streams), T time. Observations are trees of parts, see `wmcli.spaces`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import is_imported
from wmcli.artifacts.failpoint import failpoint
from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import Actor, Controller
from wmcli.envs import AnyStreams, Transition, follows_seed, open_streams
from wmcli.envs.vector import check_count, state_of, without_long_games
from wmcli.errors import EnvironmentFault, Stopped
from wmcli.experience import Recorder, read_segment
from wmcli.experience.load import SEGMENT
from wmcli.interrupt import stop_requests
from wmcli.nn.actions import no_action
from wmcli.reading import damage
from wmcli.settings import LearnedCollectSettings, Settings
from wmcli.spaces import column_names, from_columns, map_parts, parts_of
from wmcli.stages.context import Context
from wmcli.training.checkpoint import (
    CHECKPOINT,
    find_checkpoint,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_work,
)
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

STREAMS = "streams.safetensors"  # where the environments stand at the segment's end: the next collect goes on there


class Played(NamedTuple):
    """What was played for a segment."""

    arrays: dict[str, np.ndarray]
    """Columns for `write_segment`."""
    streams: AnyStreams
    """The environments, where they stand behind it."""


class Player:
    """Plays the environments of a segment behind the experience `before`: side by side, or one of them alone.

    Args:
        context: Of the run.
        before: The experience to go on behind; None begins a run.
        actor: The controller; None plays uniformly at random.
        rounds: Steps of each environment.
    """

    def __init__(self, context: Context, before: Artifact | None, actor: Artifact | None, rounds: int) -> None:
        self.context = context
        self.before = before
        self.rounds = rounds
        self._models = load_models(context, actor)

    def play(self, folder: Path, stream: int | None = None) -> Played:
        """Play from the checkpoint in a folder on, if it has one, to the end of the segment.

        Args:
            folder: Of checkpoints; it exists.
            stream: The environment to play alone. Its agent has a batch of one and a generator of its own, so whatever
                else is played has no influence on it. None plays all of them side by side.

        Raises:
            ArtifactError: The checkpoint is damaged.
            EnvironmentFault: The environment failed. The same call goes on, with new games.
            Stopped: A signal arrived. The same call resumes.
        """
        streams, recorder, agent, parts = self._begin(folder, stream)
        self._fill(folder, streams, recorder, agent, parts, stream)
        arrays = recorder.arrays()
        if stream is not None:
            arrays["stream"] = np.full_like(arrays["stream"], stream)
        return Played(arrays, streams)

    def _begin(self, folder: Path, stream: int | None) -> tuple[AnyStreams, Recorder, Actor, int]:
        """Restore the environments from a checkpoint, else from the experience before, else start them.

        Returns the environments, the recorder, the actor, and the number of files in the folder with rows so far.
        """
        context, before = self.context, self.before
        assert isinstance(context.settings.collect, LearnedCollectSettings)
        parts, longest = 0, context.settings.collect.longest_game
        checkpoint, kept = load_play(folder), context.streams
        if checkpoint is not None:
            tensors, about, saved = checkpoint
            streams = self._open(stream, streams_from(tensors, about))
        elif (
            stream is None
            and before is not None
            and kept is not None
            and kept[0] == before.digest
            and kept[1].age(across_ends=True).max() <= longest  # else they go on as in a later process
        ):
            streams, context.streams = kept[1], None  # from here on they have moved on
        elif (played := played_before(before)) is not None:
            played.verify()
            state = without_long_games(streams_from(*load_tensors(played.file(STREAMS))), longest)
            if stream is not None:
                check_count(context.settings.environment.id, state, context.settings.environment.count)
                state = state_of(state, slice(stream, stream + 1))
            with damage(played.path / STREAMS):
                streams = self._open(stream, state)
        else:
            streams = self._open(stream, None)
        if streams.restarted.any():
            context.progress.warn(
                f"collect: {context.settings.environment.id}: replaying the saved actions gave other frames: it ignores"
                " its seed, or was changed. New episodes start; unfinished ones count as truncated."
            )
        agent = self._agent(stream)
        numbers = range(context.settings.environment.count) if stream is None else [stream]
        recorder = Recorder(self.rounds, len(numbers))
        if checkpoint is not None:
            parts = len(saved)
            if saved:
                recorder.load({name: torch.cat([part[name] for part in saved]).numpy() for name in saved[0]})
            of_agent = {name: value for name, value in tensors.items() if name.startswith("agent/")}
            with context.machine.autocast():
                agent.load({name.removeprefix("agent/"): value for name, value in of_agent.items()})
            context.progress.say(f"collect: resuming at step {len(recorder)}{_of(stream)}")
        elif before is not None and isinstance(agent, Agent):
            with context.machine.autocast():
                agent.burn_in(*_last_frames(before, streams, numbers, agent.lookback, across_ends=agent.across_ends))
        return streams, recorder, agent, parts

    def _open(self, stream: int | None, state: dict[str, Any] | None) -> AnyStreams:
        """Open all environments, or one of them, new or from a state."""
        settings = self.context.settings
        seed = derived_seed(settings.seed, "collect") if state is None else state["seed"]
        numbers = None if stream is None else [stream]
        return open_streams(settings.environment, train=True, seed=seed, state=state, numbers=numbers)

    def _agent(self, stream: int | None) -> Actor:
        context, number = self.context, self.before.version if self.before else 0
        settings = context.settings
        place = ("collect actions", number) if stream is None else ("collect actions", number, stream)
        generator = torch.Generator().manual_seed(derived_seed(settings.seed, *place))
        return actor_of(context, self._models, settings.environment.count if stream is None else 1, generator)

    def _fill(
        self, folder: Path, streams: AnyStreams, recorder: Recorder, agent: Actor, parts: int, stream: int | None
    ) -> None:
        """Fill the recorder, with checkpoints every `training.checkpoint_seconds`, on a signal and after a fault.

        After a fault new episodes start, because the same actions would fail again.
        """
        context, count = self.context, len(streams.first)
        total = self.rounds * count
        saved, closings = len(recorder), recorder.closings
        saved_at = time.monotonic()

        def save(state: dict[str, Any]) -> None:
            nonlocal saved, closings, saved_at, parts
            if len(recorder) > saved:
                rows = {name: torch.from_numpy(array) for name, array in recorder.arrays(saved, closings).items()}
                save_work(folder / _part(parts), rows, {})
                saved, closings, parts = len(recorder), recorder.closings, parts + 1
            tensors, about = streams_tensors(state)
            tensors |= {f"agent/{name}": value for name, value in agent.state().items()}
            save_checkpoint(folder / CHECKPOINT, tensors, about | {"parts": parts}, f"step {saved}{_of(stream)}")
            failpoint("checkpoint")
            saved_at = time.monotonic()

        with stop_requests() as stop, context.progress.bar(f"collect{_of(stream)}", total, "steps", start=saved) as bar:
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
                        f"{fault} The {saved} of {total} steps{_of(stream)} before it are saved; new episodes follow"
                        " them."
                    ) from fault
                recorder.add(step_columns(observation, first, action, after) | agent.summarize_search(), after.final)
                bar.advance(count)
                due = time.monotonic() - saved_at >= context.settings.training.checkpoint_seconds
                if stop or (due and len(recorder) < total):
                    save(streams.state())
                    if stop:
                        raise Stopped(
                            f"collect stopped after step {saved} of {total}{_of(stream)}; the same command resumes it."
                        )


def load_play(folder: Path) -> tuple[dict[str, torch.Tensor], Any, list[dict[str, torch.Tensor]]] | None:
    """Load the checkpoint in a folder, as `load_checkpoint` returns it with the rows so far; None if there is none.

    Raises:
        ArtifactError: It is damaged.
    """
    checkpoint = folder / CHECKPOINT
    if find_checkpoint(checkpoint) is None:
        return None
    return load_checkpoint(checkpoint, lambda about: [folder / _part(index) for index in range(about["parts"])])


def _of(stream: int | None) -> str:
    return "" if stream is None else f" of environment {stream}"


def played_before(before: Artifact | None) -> Artifact | None:
    """Return the newest experience up to `before` that environments played; None if all was imported."""
    while before is not None and is_imported(before):
        before = before.input("previous") if "previous" in before.inputs else None
    return before


def check_seed(context: Context) -> None:
    """Warn if the environment ignores its seed."""
    environment = context.settings.environment
    if not follows_seed(environment, context.spaces.action):
        context.progress.warn(
            f"collect: {environment.id} does not follow the seed given to reset(): the same actions led elsewhere."
            " Results cannot be repeated exactly, and each later command begins new episodes."
        )


def load_models(context: Context, actor: Artifact | None) -> tuple[WorldModel, Controller] | None:
    """Load the world model and the controller of an artifact, frozen; None for random play."""
    return None if actor is None else load_controller(actor, context.machine, context.settings.acting)


def actor_of(
    context: Context, models: tuple[WorldModel, Controller] | None, environments: int, generator: torch.Generator
) -> Actor:
    """Build what acts while collecting: with the models, or at random without them."""
    settings, collecting = context.settings, context.settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    if models is None:
        hold = collecting.random_actions == "held"
        return UniformAgent(context.spaces.action, environments, hold=hold, generator=generator)
    return build_agent(settings, *models, environments=environments, generator=generator)


def build_agent(
    settings: Settings,
    world_model: WorldModel,
    controller: Controller,
    *,
    environments: int,
    generator: torch.Generator,
) -> Agent:
    """Build the agent that collects with a controller, both models frozen."""
    collecting = settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    return Agent(
        world_model,
        controller,
        environments,
        temperature=collecting.temperature,
        epsilon=collecting.epsilon,
        hold=collecting.random_actions == "held",
        explore=True,
        feed_executed_action=collecting.feed_executed_action,
        generator=generator,
    )


def _last_frames(
    before: Artifact, streams: AnyStreams, numbers: Sequence[int], length: int, *, across_ends: bool
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Read the last `length` rows of each unfinished episode or, with `across_ends`, game.

    `numbers` (E,) of the streams. Returns observations (E, T, ...), actions (E, T, ...), and whether they are real
    (E, T).
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
        for place in np.flatnonzero(missing).tolist():
            rows = np.flatnonzero(arrays["stream"] == numbers[place])[-missing[place] :]
            places = slice(end[place] - len(rows), end[place])
            for part, recorded in zip(parts_of(frames).values(), parts_of(observation).values(), strict=True):
                part[place, places] = recorded[rows]
            action[place, places] = arrays["action"][rows]
            valid[place, places] = True
            missing[place] -= len(rows)
            end[place] = places.start
        if missing.any():
            segment = segment.input("previous")
    return frames, action, valid


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


def streams_tensors(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of streams as tensors and JSON values, for a file."""
    tensors = {name: torch.tensor(value) for name, value in state.items() if isinstance(value, np.ndarray)}
    return tensors, {"seed": state["seed"]}


def streams_from(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> dict[str, Any]:
    """Return the state of streams of a file. Raises ArtifactError if it lacks something."""
    names = ("game", "length", "action", "frame")
    with damage("a state of environments"):
        return {"seed": int(about["seed"])} | {name: tensors[name].numpy() for name in names}
