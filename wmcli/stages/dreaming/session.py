"""What one browser plays: reality, dreams beside it, and the requests of the page.

A *tick* takes one action in reality and one in every dream. Time counts ticks; one can go back to any that is kept.

The *main actor* chooses the action of reality and of all dreams whose actor is "main". Others choose their own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from wmcli.artifacts import Artifact
from wmcli.browser.server import Message
from wmcli.controllers.mcts import MCTS
from wmcli.errors import EnvironmentFault, UsageError, WmError
from wmcli.nn.actions import random_actions
from wmcli.report.observations import draw_observations
from wmcli.spaces import Categories, Continuous, Discrete, map_parts
from wmcli.stages.context import Context
from wmcli.stages.dreaming.pane import Mind, Model, Pane, PaneState, Witness
from wmcli.stages.dreaming.reality import Moment, Reality
from wmcli.stages.dreaming.stored import StoredEpisodes
from wmcli.stages.dreaming.tape import Tape, publish_moments
from wmcli.training.device import derived_seed

MOST_PANES = 4
KEPT = 512  # ticks that one can go back to
MOST_EPISODES = 2000  # in the list to start from
MOST_WAITING = 8  # actions that wait for their tick
FASTEST = 60.0  # ticks a second
MAIN_ACTORS = ("you", "agent", "dreamer", "random", "stored")
PANE_ACTORS = ("main", "you", "agent", "random")


@dataclass(frozen=True)
class Options:
    """How to play; the page changes them."""

    horizon: int = 0
    """Imagined steps after which a dream starts again from reality; 0 for none."""
    temperature: float = 1.0
    """Of the controller's policy; 0 takes the likeliest action."""
    rate: float = 15.0
    """Ticks a second."""
    mode: Literal["realtime", "turns"] = "realtime"
    """"turns" waits for an action of yours before each tick."""


class Studio(NamedTuple):
    """What all sessions share. None of it changes."""

    context: Context
    models: Sequence[Model]
    stored: StoredEpisodes | None
    plays: bool
    """False: the environment is imported data, which nobody can play."""


class Choices:
    """The actions that the user has asked for and that no tick has taken yet."""

    def __init__(self) -> None:
        self._held: np.ndarray | None = None
        self._held_id: Any = None
        self._counted = True  # a tick has taken the held action
        self._once: deque[tuple[np.ndarray, Any]] = deque(maxlen=MOST_WAITING)

    def add(self, action: np.ndarray | None, hold: bool, request: Any) -> None:
        """Note an action: held until another one comes, or for one tick.

        None releases the held one, which counts for one tick at least.
        """
        if action is not None and not hold:
            self._once.append((action, request))
            return
        if action is None and self._held is not None and not self._counted:
            self._once.append((self._held, self._held_id))
        self._held, self._held_id, self._counted = action, request, False

    def waiting(self) -> bool:
        """Return whether an action waits for a tick."""
        return bool(self._once) or self._held is not None

    def take(self) -> tuple[np.ndarray | None, Any]:
        """Return the action of this tick, None without one, and the request that asked for it, once."""
        if self._once:
            return self._once.popleft()
        self._counted = True
        request, self._held_id = self._held_id, None
        return self._held, request


class DreamSession:
    """A play in one browser; satisfies `wmcli.browser.server.Session`.

    Args:
        studio: Models, environment and stored frames.
        number: Of the session, from 0; sessions play different games.
    """

    @torch.inference_mode()
    def __init__(self, studio: Studio, number: int = 0) -> None:
        self._studio = studio
        settings = studio.context.settings
        self._space = studio.context.spaces.action
        self._lookback = max(max(each.world_model.lookback, each.controller.lookback) for each in studio.models)
        self._idle, waits = _idle_action(studio)
        decodes = any(model.world_model.decodes is not None for model in studio.models)
        self._options = Options(horizon=0 if decodes else 1, mode="turns" if waits else "realtime")
        self.rate = self._options.rate
        """Calls of `advance` a second."""
        self._seed = derived_seed(settings.seed, "play", number)
        self._games = 0
        self._random = torch.Generator().manual_seed(derived_seed(settings.seed, "play random", number))
        self._choices = Choices()
        self._actor = "you" if studio.plays else "stored"
        self._lends_keys = False  # "you" was chosen, and acts in branches as long as there are some
        self._playing = self._dirty = True
        self._steps = 0  # ticks that are due although it stands still
        self._echo: Any = None
        self._ticks: deque[float] = deque(maxlen=60)  # when the last ones were
        self._outbox: deque[Message] = deque()
        self._tape: Tape | None = None
        self._tape_start = 0  # moment of its first row
        self._reality: Reality | None = None
        self._new_game()

    # -- the contract with the server ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def hello(self) -> Message:
        """Return everything that a page needs, the current view included."""
        studio, view = self._studio, self._view()
        about = {
            "type": "hello",
            "title": f"{studio.context.run} · {studio.context.preset}",
            "environment": studio.context.environment["id"],
            "actions": _describe_actions(studio),
            "idle": self._idle.tolist(),
            "actors": [name for name in MAIN_ACTORS if self._is_possible(name)],
            "models": [
                {
                    "name": model.name,
                    "about": model.about,
                    "decodes": model.world_model.decodes is not None,
                    "searches": isinstance(model.controller, MCTS),
                    "acts": model.acts,
                }
                for model in studio.models
            ],
            "episodes": [] if studio.stored is None else studio.stored.describe(MOST_EPISODES),
            "most_panes": MOST_PANES,
            "view": view.head,
        }
        return Message(about, view.frames)

    @torch.inference_mode()
    def receive(self, request: Mapping[str, Any]) -> Message | None:
        """Do what the page asks for.

        Raises:
            UsageError: It cannot be done, or the request is not one.
        """
        name = request.get("do")
        do = self._requests().get(name) if isinstance(name, str) else None
        if do is None:
            raise UsageError(f"unknown request {str(name)[:40]!r}.")
        do(request)
        if name != "act":
            self._echo = request.get("id", self._echo)
        self._dirty = True
        return self._outbox.popleft() if self._outbox else None

    @torch.inference_mode()
    def advance(self) -> Message | None:
        """Take a tick if one is due, and return what changed."""
        if self._outbox:
            return self._outbox.popleft()
        try:
            if self._is_due():
                self._steps = max(0, self._steps - 1)
                self._tick()
        except WmError as error:
            self._playing, self._steps, self._dirty = False, 0, True
            remedy = " To go on, begin a new game." if isinstance(error, EnvironmentFault) else ""
            self._outbox.append(Message({"type": "error", "message": f"{error}{remedy}"}))
            return self._outbox.popleft()
        if not self._dirty:
            return self._outbox.popleft() if self._outbox else None
        self._dirty = False
        return self._view()

    def close(self) -> str | None:
        """Publish what was recorded, and end."""
        line = None
        if self._tape is not None:
            count = len(self._tape)
            try:
                artifact = self._publish()
                line = None if artifact is None else f"play: {count} recorded steps are now {artifact.name}"
            except WmError as error:
                line = f"play: {count} recorded steps are kept, and published by the next wm play --browser: {error}"
        assert self._reality is not None
        self._reality.close()
        return line

    # -- requests -----------------------------------------------------------------------------------------------------

    def _requests(self) -> dict[str, Callable[[Mapping[str, Any]], None]]:
        return {
            "act": self._act,
            "play": lambda _: self._set_playing(True),
            "pause": lambda _: self._set_playing(False),
            "step": self._step_once,
            "back": self._back,
            "goto": lambda request: self._go(_whole(request, "time")),
            "actor": self._set_actor,
            "branch": self._branch,
            "close": self._close_pane,
            "wake": self._wake,
            "options": self._set_options,
            "restart": self._restart,
            "start": self._start,
            "record": self._record,
        }

    def _act(self, request: Mapping[str, Any]) -> None:
        action = None if request.get("action") is None else self._action(request["action"])
        hold = bool(request.get("hold", False)) and self._options.mode == "realtime"
        if action is None and self._options.mode == "turns":
            return
        self._choices.add(action, hold, request.get("id"))

    def _set_playing(self, playing: bool) -> None:
        self._playing, self._steps = playing, 0
        self._ticks.clear()

    def _step_once(self, _: Mapping[str, Any]) -> None:
        self._steps = 1 if self._playing else min(self._steps + 1, MOST_WAITING)
        self._playing = False

    def _back(self, request: Mapping[str, Any]) -> None:
        self._go(max(self.time - _whole(request, "steps", 1), self.earliest))

    def _set_actor(self, request: Mapping[str, Any]) -> None:
        actor = request.get("actor")
        if request.get("pane") is None:
            if not isinstance(actor, str) or not self._is_possible(actor):
                possible = ", ".join(name for name in MAIN_ACTORS if self._is_possible(name))
                raise UsageError(f"actor {str(actor)[:40]!r}: choose one of {possible}.")
            self._actor, self._lends_keys = actor, False
            return
        pane = self._pane(request)
        if isinstance(actor, Mapping):
            pane.actor = {"action": self._action(actor.get("action")).tolist()}
        elif actor in PANE_ACTORS and isinstance(actor, str):
            if actor == "agent" and not pane.mind.model.acts:
                raise UsageError(f"{pane.mind.model.name}: nobody learned to act in it; choose another actor.")
            pane.actor = actor
        else:
            raise UsageError(f"actor {str(actor)[:40]!r}: choose one of {', '.join(PANE_ACTORS)}, or a fixed action.")
        self._hand_keys()

    def _branch(self, request: Mapping[str, Any]) -> None:
        pane = self._pane(request)
        if len(self._panes) >= MOST_PANES:
            raise UsageError(f"{MOST_PANES} dreams are the most: close one first.")
        branch = pane.copy(self._new_number())
        branch.actor = "you"
        self._panes.insert(self._panes.index(pane) + 1, branch)
        self._lends_keys |= self._actor == "you"
        self._hand_keys()
        self._states[self.time] = self._pane_states()

    def _close_pane(self, request: Mapping[str, Any]) -> None:
        pane = self._pane(request)
        if len(self._panes) == 1:
            raise UsageError("this is the last dream.")
        self._panes.remove(pane)
        self._hand_keys()

    def _hand_keys(self) -> None:
        """Give keys that are lent to a branch, or back where no dream is under them any more."""
        if self._lends_keys:
            other = "dreamer" if self._is_possible("dreamer") else "random"
            self._actor = other if any(pane.actor == "you" for pane in self._panes) else "you"

    def _wake(self, request: Mapping[str, Any]) -> None:
        self._check_real()
        panes = self._panes if request.get("pane") is None else [self._pane(request)]
        for pane in panes:
            self._wake_pane(pane)
        self._states[self.time] = self._pane_states()

    def _set_options(self, request: Mapping[str, Any]) -> None:
        changes: dict[str, Any] = {}
        if "horizon" in request:
            changes["horizon"] = _whole(request, "horizon")
        if "temperature" in request:
            changes["temperature"] = _number(request, "temperature", 0.0, 100.0)
        if "rate" in request:
            changes["rate"] = _number(request, "rate", 0.5, FASTEST)
        if "mode" in request:
            if request["mode"] not in ("realtime", "turns"):
                raise UsageError("mode: choose realtime or turns.")
            changes["mode"] = request["mode"]
        self._options = replace(self._options, **changes)
        self.rate = self._options.rate
        for mind in self._minds():
            mind.agent.temperature = self._options.temperature

    def _restart(self, request: Mapping[str, Any]) -> None:
        if not self._studio.plays:
            raise UsageError("this environment is imported data: start from a stored frame.")
        seed = request.get("seed")
        self._new_game(None if seed is None else _whole(request, "seed"))

    def _start(self, request: Mapping[str, Any]) -> None:
        self._start_at(_whole(request, "episode"), _whole(request, "frame", 0))

    def _record(self, request: Mapping[str, Any]) -> None:
        if not request.get("on"):
            if self._tape is None:
                raise UsageError("nothing is being recorded.")
            steps = len(self._tape)
            artifact = self._publish()
            if artifact is None:
                self._outbox.append(Message({"type": "note", "message": "nothing was played, so nothing is recorded."}))
                return
            run = self._studio.context.run
            about = {"artifact": artifact.name, "steps": steps, "episodes": artifact.metrics["episodes"]}
            about["command"] = f"wm train-dynamics --run {run} --more"
            self._outbox.append(Message({"type": "recorded", **about}))
            return
        assert self._reality is not None
        if self._reality.source != "environment":
            raise UsageError("only what is played in the environment can be recorded: begin a new game.")
        if self._tape is None:
            self._tape, self._tape_start = Tape(self._studio.context.run), self.time

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def time(self) -> int:
        """Ticks since the start, with the frames before a stored one."""
        assert self._reality is not None
        return self._reality.now

    @property
    def earliest(self) -> int:
        """The first time that is kept."""
        return min(self._states)

    def _new_game(self, seed: int | None = None) -> None:
        """Begin a new game, or where none can be played the newest stored episode."""
        if not self._studio.plays:
            stored = self._studio.stored
            if stored is None or not len(stored):
                raise UsageError("there are no stored frames to start from, and the environment cannot be played.")
            self._start_at(len(stored) - 1, 0)
            return
        if seed is None:
            seed, self._games = derived_seed(self._seed, "game", self._games), self._games + 1
        self._begin(Reality(self._studio.context.settings.environment, seed))

    def _start_at(self, episode: int, frame: int) -> None:
        studio = self._studio
        if studio.stored is None:
            raise UsageError("no experience is loaded to start from.")
        start = studio.stored.start(episode, frame, self._lookback)
        settings = studio.context.settings.environment if studio.plays else None
        self._begin(Reality(settings, self._seed, start))

    def _begin(self, reality: Reality) -> None:
        """Go on with another reality: every model dreams of its current frame, in one pane each."""
        self._end_recording()
        if self._reality is not None:
            self._reality.close()
        self._reality = reality
        self._witnesses = [Witness(model, self._seed) for model in self._studio.models]
        self._panes: list[Pane] = []
        self._numbers = 0
        for place, model in enumerate(self._studio.models):
            generator = torch.Generator().manual_seed(derived_seed(self._seed, "dream"))
            pane = Pane(self._new_number(), Mind(model, self._seed + place), generator)
            self._wake_pane(pane)
            self._panes.append(pane)
        self._set_options({})  # of the new minds
        self._hand_keys()
        self._states: dict[int, list[tuple[Pane, PaneState]]] = {self.time: self._pane_states()}
        self._errors: dict[int, dict[int, float | None]] = {}
        self._dirty = True

    def _is_due(self) -> bool:
        if self._steps:
            return True
        if not self._playing:
            return False
        uses_you = self._actor == "you" or any(pane.actor == "you" for pane in self._panes)
        return self._choices.waiting() if uses_you and self._options.mode == "turns" else True

    def _tick(self) -> None:
        reality = self._reality
        assert reality is not None
        yours, request = self._choices.take()
        yours = self._idle if yours is None else yours
        main = self._main_action(yours)
        actions = [self._pane_action(pane, main, yours) for pane in self._panes]
        self._forget_future()
        before = reality.now
        reality.step(main)
        if self._tape is not None:
            self._tape_start = min(self._tape_start, before)
            self._tape.cut(before - self._tape_start)
            self._tape.add(reality.moments[before])
        is_known, came = reality.source != "none", reality.came
        for pane, action in zip(self._panes, actions, strict=True):
            is_done = came is not None and came.ended is not None and pane.actor == "main"
            wakes = is_known and (is_done or 0 < self._options.horizon <= pane.age + 1)
            if not pane.is_over:
                pane.step(action, think=not wakes)
                pane.is_over &= not wakes
            if wakes:
                self._wake_pane(pane)
        self._states[self.time] = self._pane_states()
        while len(self._states) > KEPT:
            self._errors.pop(self.earliest, None)
            del self._states[self.earliest]
        reality.forget(self.earliest - self._lookback)
        self._echo = self._echo if request is None else request
        self._ticks.append(time.monotonic())
        self._dirty = True

    def _forget_future(self) -> None:
        for later in [each for each in self._states if each > self.time]:
            del self._states[later]

    def _go(self, time: int) -> None:
        assert self._reality is not None
        if time not in self._states:
            raise UsageError(f"time {time}: {self.earliest} to {max(self._states)} are kept.")
        self._reality.go(time)
        self._panes = []
        for pane, state in self._states[time]:
            pane.load(state)
            self._panes.append(pane)
        self._hand_keys()
        self._playing, self._steps = False, 0
        self._tell_history()

    def _tell_history(self) -> None:
        """Send the past of every pane, since the page has another one."""
        times = [each for each in sorted(self._states) if each <= self.time]
        for pane in self._panes:
            past = [next((state for each, state in self._states[t] if each is pane), None) for t in times]
            rows = {
                name: [None if state is None else state.last[name] for state in past] for name in ("reward", "entropy")
            }
            rows["value"] = [None if state is None else state.thought.value for state in past]
            rows["error"] = [self._errors.get(t, {}).get(pane.number) for t in times]
            self._outbox.append(Message({"type": "history", "pane": pane.number, "from": times[0], **rows}))

    # -- actions ------------------------------------------------------------------------------------------------------

    def _main_action(self, yours: np.ndarray) -> np.ndarray:
        assert self._reality is not None
        if self._actor == "you":
            return yours
        if self._actor == "stored":
            stored = self._reality.stored_action()
            return yours if stored is None else np.array(stored)
        if self._actor == "agent" and self._reality.source != "none":
            return self._witness(self._panes[0]).choice
        if self._actor == "random":
            return random_actions(self._space, (1,), self._random)[0].numpy()
        return self._panes[0].mind.choice

    def _pane_action(self, pane: Pane, main: np.ndarray, yours: np.ndarray) -> np.ndarray:
        if isinstance(pane.actor, Mapping):
            return self._action(pane.actor["action"])
        if pane.actor == "random":
            return random_actions(self._space, (1,), self._random)[0].numpy()
        return {"main": main, "you": yours, "agent": pane.mind.choice}[pane.actor]

    def _action(self, value: Any) -> np.ndarray:
        """Return an action of the page (...,).

        Raises:
            UsageError: It is none of this environment.
        """
        space = self._space
        try:
            action = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise UsageError("an action is a number or a list of numbers.") from None
        if action.shape != space.shape or not np.isfinite(action).all():
            raise UsageError(f"an action has {math.prod(space.shape) or 1} numbers here.")
        if isinstance(space, Continuous):
            return action.clip(-1, 1).astype(np.float32)
        sizes = np.array(space.count if isinstance(space, Discrete) else space.sizes)
        if (action != action.round()).any() or (action < 0).any() or (action >= sizes).any():
            raise UsageError(f"an action has whole numbers from 0 to {np.max(sizes) - 1} here.")
        return action.astype(np.int64)

    def _is_possible(self, actor: str) -> bool:
        if actor == "stored":
            return self._studio.stored is not None
        return actor in ("you", "random") or (actor in MAIN_ACTORS and self._studio.models[0].acts)

    # -- panes --------------------------------------------------------------------------------------------------------

    def _wake_pane(self, pane: Pane) -> None:
        """Let a dream start from the current moment."""
        assert self._reality is not None
        came = self._reality.came
        pane.wake(self._witness(pane), None if came is None else came.action)

    def _witness(self, pane: Pane) -> Mind:
        assert self._reality is not None
        for witness in self._witnesses:
            if witness.mind.model is pane.mind.model:
                return witness.attend(self._reality)
        raise AssertionError(pane)

    def _pane(self, request: Mapping[str, Any]) -> Pane:
        number = _whole(request, "pane", self._panes[0].number)
        for pane in self._panes:
            if pane.number == number:
                return pane
        raise UsageError(f"there is no dream {number}.")

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def _pane_states(self) -> list[tuple[Pane, PaneState]]:
        return [(pane, pane.state()) for pane in self._panes]

    def _minds(self) -> list[Mind]:
        return [witness.mind for witness in self._witnesses] + [pane.mind for pane in self._panes]

    def _check_real(self) -> None:
        assert self._reality is not None
        if self._reality.source == "none":
            raise UsageError("reality is not known here: go back, or start again.")

    # -- recording ----------------------------------------------------------------------------------------------------

    def _publish(self) -> Artifact | None:
        """Publish the tape and put it away; None if it is empty. On failure it stays for a later command."""
        tape, self._tape = self._tape, None
        assert tape is not None
        tape.cut(max(0, self.time - self._tape_start))
        if not len(tape):
            tape.close(keep=False)
            return None
        try:
            artifact = publish_moments(self._studio.context, tape.moments, tape.path.stem)
        except BaseException:
            tape.close(keep=True)
            raise
        tape.close(keep=False)
        return artifact

    def _end_recording(self) -> None:
        if self._tape is not None:
            self._record({"on": False})

    # -- views --------------------------------------------------------------------------------------------------------

    def _view(self) -> Message:
        reality, frames = self._reality, list[np.ndarray]()
        assert reality is not None
        real_picture = self._picture(reality.moment)
        real: dict[str, Any] = {"source": reality.source, "frame": None, "note": reality.note}
        came = reality.came
        real |= {
            "reward": None if came is None else came.reward,
            "return": reality.total(),
            "ended": None if came is None else came.ended,
            "action": None if came is None else came.action.tolist(),
        }
        if real_picture is not None:
            real["frame"] = len(frames)
            frames.append(real_picture)
        panes = []
        for pane in self._panes:
            row = pane.describe() | {"model": self._studio.models.index(pane.mind.model), "frame": None, "error": None}
            if pane.picture is not None:
                row["frame"] = len(frames)
                frames.append(pane.picture)
                if real_picture is not None:
                    row["error"] = float(np.abs(pane.picture.astype(np.int16) - real_picture).mean())
            self._errors.setdefault(self.time, {})[pane.number] = row["error"]
            panes.append(row)
        head = {
            "type": "view",
            "echo": self._echo,
            "time": self.time,
            "earliest": self.earliest,
            "latest": max(self._states),
            "playing": self._playing,
            "fps": self._fps(),
            "options": asdict(self._options),
            "actor": self._actor,
            "recording": None if self._tape is None else {"steps": max(0, self.time - self._tape_start)},
            "real": real,
            "panes": panes,
        }
        return Message(head, tuple(frames))

    def _picture(self, moment: Moment) -> np.ndarray | None:
        if moment.observation is None:
            return None
        space = self._studio.context.spaces.observation
        return draw_observations(space, map_parts(lambda part: part[None], moment.observation))[0]

    def _fps(self) -> float | None:
        if len(self._ticks) < 2 or self._ticks[-1] == self._ticks[0]:
            return None
        return round((len(self._ticks) - 1) / (self._ticks[-1] - self._ticks[0]), 2)


def _idle_action(studio: Studio) -> tuple[np.ndarray, bool]:
    """Return the action of ticks in which the user takes none, and whether to wait for one instead."""
    space = studio.context.spaces.action
    if isinstance(space, Continuous):
        return np.zeros(space.shape, np.float32), False
    if isinstance(space, Categories):
        return np.zeros(space.shape, np.int64), False
    names = [name.casefold() for name in studio.context.environment.get("action_meanings", [])]
    for nothing in ("noop", "stay", "none", "wait", "nothing"):
        if nothing in names:
            return np.array(names.index(nothing)), False
    return np.array(0), True


def _describe_actions(studio: Studio) -> dict[str, Any]:
    space = studio.context.spaces.action
    if isinstance(space, Continuous):
        return {"kind": "continuous", "low": [-1.0] * len(space.low), "high": [1.0] * len(space.low)}
    if isinstance(space, Categories):
        return {"kind": "categories", "sizes": list(space.sizes)}
    names = studio.context.environment.get("action_meanings") or [str(number) for number in range(space.count)]
    return {"kind": "discrete", "names": list(names)}


def _whole(request: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = request.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise UsageError(f"{key}: a whole number from 0 on is needed.")
    return value


def _number(request: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = request[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{key}: a number from {low:g} to {high:g} is needed.")
    return float(value)
