"""Pictures: films of episodes, open-loop predictions beside real frames, and learned attention priors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Run
from wmcli.artifacts.manifest import IMAGINATION
from wmcli.envs.vector import Transition
from wmcli.errors import UsageError
from wmcli.experience.replay import Replay
from wmcli.report.files import write_whole
from wmcli.report.images import (
    captioned,
    over_shares,
    play_captions,
    short_number,
    side_by_side,
    strip,
    write_png,
    write_webp,
)
from wmcli.report.observations import draw_observations
from wmcli.report.plots import learned_priors, write_figure
from wmcli.report.prior_bars import prior_bars
from wmcli.settings import Settings
from wmcli.spaces import ObservationSpace, column_names, first_part, from_columns, map_parts, stack_parts
from wmcli.transfer import take_rows
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPISODES = 3  # in a film, one below the other
MEASURED = 16  # most episodes of the error by imagined step
STEPS = 24  # most imagined steps
HOLD = 10  # frames for which a film shows its end before it repeats

Ending = Literal["terminated", "time limit", "cut"]
"""How a film ends; "cut" where the episode continued."""
LISTS = ("actions", "rewards", "policies", "values")
"""Lists of a film with one entry a frame, beside the frames."""

LoggedPriors = Mapping[int, Mapping[str, list[list[float]]]]
"""update -> parameter -> values by layer and head."""


class SideBySide(NamedTuple):
    """Pictures of real and imagined observations (T, H, W, 3) uint8, episodes one below the other.

    Before `context` the imagined side is reconstruction.
    """

    real: np.ndarray
    imagined: np.ndarray
    context: int
    height: int
    """Of one episode's pictures. [pixels]"""
    errors: np.ndarray
    """float64 (E, T): mean squared difference of each frame's two pictures in [0, 1], also of episodes not shown."""


@dataclass
class Film:
    """An episode of one environment; each list has one entry for every frame that was acted on."""

    frames: list[Any] = field(default_factory=list)
    """Observations, trees of arrays."""
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    policies: list[np.ndarray] = field(default_factory=list)
    """(A,): visit shares of the actions, if there was a search."""
    values: list[float] = field(default_factory=list)
    """Value of the frame by the search."""
    outcome: Any = None
    """The observation that the last action led to."""
    ended: Ending | None = None
    """None until `end` is called."""

    @property
    def total(self) -> float:
        """Return the sum of rewards so far."""
        return sum(self.rewards)

    def add(self, frame: Any, action: Any, reward: float, searched: Mapping[str, np.ndarray]) -> None:
        """Add an observation, its action and reward, and policy (1, A) and value (1,) of a search if there was one."""
        assert self.ended is None, "the film has ended"
        self.frames.append(frame)
        self.actions.append(np.asarray(action).tolist())
        self.rewards.append(float(reward))
        if searched:
            self.policies.append(searched["policy"][0])
            self.values.append(float(searched["value"][0]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all entries for a checkpoint, without empty lists."""
        lists = {name: np.array(getattr(self, name)) for name in LISTS if getattr(self, name)}
        if self.frames:
            lists |= column_names("frames", stack_parts(self.frames))
        if self.outcome is None or self.ended is None:
            return lists
        how = np.array(get_args(Ending).index(self.ended))
        return lists | column_names("outcome", self.outcome) | {"ended": how}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Film:
        """Build the film that returned these `arrays`."""
        film = cls()
        for name in LISTS:
            if name in arrays:
                values = arrays[name]
                setattr(film, name, list(values) if name == "policies" else values.tolist())
        if film.actions:
            frames = from_columns("frames", arrays)
            film.frames = [map_parts(lambda part, at=time: part[at], frames) for time in range(len(film.actions))]
        if "ended" in arrays:
            film.end(from_columns("outcome", arrays), get_args(Ending)[int(arrays["ended"])])
        return film

    def end(self, frame: Any, how: Ending) -> None:
        """Close the film with the observation that the last action led to."""
        self.outcome, self.ended = frame, how

    def with_captions(
        self, space: ObservationSpace, meanings: Sequence[str] | None
    ) -> tuple[list[np.ndarray], list[str]]:
        """Return pictures of all observations, the outcome last, and their captions.

        `meanings` are the names of the actions.
        """
        captions = play_captions(self.actions, self.rewards, meanings, self.values)
        shown = self.frames if self.outcome is None else [*self.frames, self.outcome]
        pictures = list(draw_observations(space, stack_parts(shown)))
        if self.outcome is None:
            return pictures, captions
        how = f"cut after {len(self.frames)} frames" if self.ended == "cut" else str(self.ended)
        so_far = " so far" if self.ended == "cut" else ""
        return pictures, [*captions, f"{how}\nreturn{so_far} {short_number(self.total)}"]

    def render(self, space: ObservationSpace, meanings: Sequence[str] | None) -> np.ndarray:
        """Draw the film (T, H', W', 3) uint8, captions below the frames; the outcome is held for `HOLD` frames."""
        shown, captions = self.with_captions(space, meanings)
        frames = np.stack(shown)
        if self.policies:
            nobody = [] if self.outcome is None else [np.zeros_like(self.policies[0])]
            chosen = [action if isinstance(action, int) else -1 for action in self.actions]  # none of the samples
            frames = over_shares(frames, np.stack(self.policies + nobody), [*chosen, *[-1] * len(nobody)])
        return _held(captioned(frames, captions), self.ended)


@dataclass
class Dream:
    """An imagined episode beside the real one under the same actions."""

    context: int
    """Real frames that the model observed."""
    real: Film = field(default_factory=Film)
    """As long as the imagined episode, or shorter if it ended before."""
    imagined: Film = field(default_factory=Film)

    def render(self, space: ObservationSpace, meanings: Sequence[str] | None) -> np.ndarray:
        """Draw the film (T, H', W', 3) uint8: real left, imagined right. An episode that has ended stands still."""
        real, left = self.real.with_captions(space, meanings)
        imagined, right = self.imagined.with_captions(space, meanings)
        over = None if self.real.ended in (None, "cut") else len(self.real.frames)
        rest = len(imagined) - len(real)
        movie = side_by_side(
            np.stack(real + real[-1:] * rest),
            np.stack(imagined),
            context=self.context,
            over=over,
            captions=(left + left[-1:] * rest, right),
        )
        return _held(movie, self.imagined.ended)


def ending(after: Transition, environment: int = 0) -> Ending | None:
    """Return how a step ended the episode of one environment, None if it continues."""
    if after.terminated[environment]:
        return "terminated"
    return "time limit" if after.truncated[environment] else None


def _held(movie: np.ndarray, ended: Ending | None) -> np.ndarray:
    """Return the movie (T, ...) with its last frame held if the episode has ended."""
    return movie if ended is None else np.concatenate((movie, movie[-1:].repeat(HOLD - 1, 0)))


@torch.no_grad()
def imagined_beside_real(world_model: WorldModel, replay: Replay, context: int) -> SideBySide | None:
    """Imagine the newest episodes of the experience from their first `context` frames, under the actions taken.

    Up to `EPISODES` of them are shown, equally long. Up to `MEASURED` that are so long are measured.

    Returns:
        The frames, or None if no episode is long enough for one step or the model decodes nothing.
    """
    starts, lengths = replay.episodes.start, np.minimum(replay.episodes.length, context + STEPS)
    enough = np.flatnonzero(lengths > context)[-50:]
    if len(enough) == 0 or not world_model.decodes:
        return None
    longest = enough[np.argsort(lengths[enough], kind="stable")][::-1]  # of equally long ones the newest first
    length = int(lengths[longest[:EPISODES]].min())
    chosen = longest[lengths[longest] >= length][:MEASURED]
    rows = replay.order[starts[chosen][:, None] + np.arange(length)]
    frames, action = (take_rows(column, rows, replay.device) for column in (replay.observation, replay.action))
    return beside(world_model, frames, action, context)


@torch.no_grad()
def beside(world_model: WorldModel, frames: Any, action: Tensor, context: int) -> SideBySide:
    """Imagine episodes from their first frames on, under the actions that were taken.

    Args:
        world_model: One that decodes.
        frames: Observations, a tree of (B, T, ...). The first `EPISODES` rows are shown, all are measured.
        action: (B, T, ...).
        context: Frames that the model observes; before it the right side is reconstruction.
    """
    groups = [slice(begin, begin + EPISODES) for begin in range(0, len(action), EPISODES)]  # decoders need much memory
    latent = torch.cat([world_model.encode(map_parts(lambda part, at=at: part[at, :context], frames)) for at in groups])
    features, steps = open_loop(world_model, latent, action)
    if world_model.decodes == "features":
        codes = features
    else:
        codes = torch.cat([latent, *(step.latent[:, None] for step in steps)], 1)
    space = world_model.observation_space
    drawn, errors = [], []
    for at in groups:
        real = _draw(space, map_parts(lambda part, at=at: part[at], frames))
        imagined = _draw(space, world_model.decode(codes[at]))
        squared = np.square(real.astype(np.int32) - imagined).reshape(len(real), len(codes[at]), -1)
        errors.append(squared.mean(-1).T / 255**2)
        drawn.append((real, imagined))
    real, imagined = drawn[0]
    return SideBySide(real, imagined, context, real.shape[1] // len(errors[0]), np.concatenate(errors))


def _draw(space: ObservationSpace, frames: Any) -> np.ndarray:
    """Draw observations (B, T, ...) as pictures (T, H, W, 3), the rows one below the other."""
    rows = range(len(first_part(frames)))
    drawn = [draw_observations(space, map_parts(lambda part, at=row: part[at].cpu().numpy(), frames)) for row in rows]
    return np.concatenate(drawn, axis=1)


def write_imagination(folder: Path, pictures: SideBySide | None) -> None:
    """Write the pictures of `write_side_by_side`, and beside them the error of each frame: `imagination.json`."""
    write_side_by_side(folder, pictures)
    if pictures is None:
        return
    content = {
        "context": pictures.context,
        "episodes": len(pictures.errors),
        "mean_squared_error": pictures.errors.mean(0).tolist(),
    }
    write_whole(folder / IMAGINATION, lambda draft: draft.write_text(json.dumps(content) + "\n", encoding="utf-8"))


def write_side_by_side(folder: Path, pictures: SideBySide | None) -> None:
    """Write `imagination.webp` (real left, imagined right) and `imagination.png` (real above, imagined below)."""
    if pictures is None:
        return
    write_webp(
        folder / "imagination.webp", side_by_side(pictures.real, pictures.imagined, context=pictures.context), fps=5
    )
    one = pictures.height
    write_png(
        folder / "imagination.png",
        strip({"real": pictures.real[:, :one], "imagined": pictures.imagined[:, :one]}, context=pictures.context),
    )


def draw_priors(runs: Sequence[Run], settings: Settings, path: Path) -> None:
    """Draw the picture of `plot_priors`."""
    write_figure(path, plot_priors([logged_priors(run.history()) for run in runs], settings))


def check_same_priors(groups: Mapping[str, Sequence[Settings]]) -> None:
    """Check that the runs of each group, of which means are drawn, have one attention prior.

    Args:
        groups: Settings of each run, by the name of its group.

    Raises:
        UsageError: They differ in a setting of the prior.
    """
    for label, members in groups.items():
        priors = [settings.attention_prior.model_dump() for settings in members]
        for key in dict.fromkeys(key for prior in priors for key in prior):
            if len({str(prior.get(key)) for prior in priors}) > 1:
                raise UsageError(
                    f"{label}: the runs have different attention priors, whose mean says nothing: add --by"
                    f" backbone.prior.{key}."
                )


def plot_priors(logged: Sequence[LoggedPriors], settings: Settings) -> Figure:
    """Plot the attention priors that runs learned, over updates: of several runs mean and spread.

    Args:
        logged: Of at least one run.
        settings: Give the initial values.

    Raises:
        UsageError: There are none, or those of the runs do not match.
    """
    common = sorted(set.intersection(*(set(records) for records in logged)))
    kinds = {tuple(records[common[0]]) for records in logged} if common else {()}
    if len(kinds) > 1:
        raise UsageError("these runs learned priors of different kinds: add --by backbone.prior.kind.")
    names = list(kinds.pop())
    lines = [{name: [records[update][name] for update in common] for name in names} for records in logged]
    prior = settings.attention_prior
    initial = {name: getattr(prior, name) for name in names if hasattr(prior, name)}  # of one learned since, none
    return learned_priors(common, lines, initial)


def plot_prior_groups(groups: Mapping[str, Sequence[LoggedPriors]], settings: Mapping[str, Settings]) -> Figure:
    """Plot the priors that groups of runs ended with, each with a column of its own.

    Args:
        groups: Of each run, by the name of its group.
        settings: Of each group; give the initial values.

    Raises:
        UsageError: A run has none, or those of a group do not match.
    """
    ended: dict[str, list[dict[str, np.ndarray]]] = {}
    for label, runs in groups.items():
        for logged in runs:
            if not logged:
                raise UsageError(f"a run of {label} has learned no priors: omit it.")
            last = {name: np.array(values, float) for name, values in logged[max(logged)].items()}
            ended.setdefault(label, []).append(last)
        shapes = {str({name: value.shape for name, value in last.items()}) for last in ended[label]}
        if len(shapes) > 1:
            raise UsageError(f"the priors of {label} differ in kind, heads or layers: group them with --by, too.")
    initial = {
        label: {name: getattr(settings[label].attention_prior, name) for name in runs[0]}
        for label, runs in ended.items()
    }
    return prior_bars(ended, initial)


def logged_priors(history: Iterable[Mapping[str, Any]]) -> LoggedPriors:
    """Return the priors among the records of a run, those of the same shape as the newest."""
    records = {
        record["update"]: record["priors"]
        for record in history
        if type(record.get("update")) is int and isinstance(record.get("priors"), dict)
    }

    def shapes(priors: Mapping[str, list[list[float]]]) -> dict[str, tuple[int, ...]]:
        return {name: np.shape(values) for name, values in priors.items()}

    return {update: each for update, each in records.items() if shapes(each) == shapes(records[max(records)])}
