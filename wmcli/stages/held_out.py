"""`wm eval --protocol held-out`: dreams beside the held-out test episodes of any environment.

The model observes C frames of an episode and imagines up to H steps under the actions taken there, with one sample a
step. Windows of C + H frames cover each episode, at most `WINDOWS` of them. W windows, S = C + H frames.

The error of a part of the observation is its mean squared error (images in [0, 1]), or the share of wrong categories.
It stands beside that of reconstructed frames, and of the last observed frame, as if nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact, Work
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import load_world_model, settings_of
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import NONE_HELD_OUT, find_held_out
from wmcli.metrics.memory_tasks import curve, diverged_in, estimate, finite_or_infinite
from wmcli.report.plots import Band, error_curves, write_figure
from wmcli.settings import Settings
from wmcli.spaces import Categories, Image, PartSpace, map_parts, parts_of
from wmcli.stages.context import Context
from wmcli.stages.pictures import EPISODES, beside, write_side_by_side
from wmcli.stages.protocol import Protocol
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.transfer import take_rows
from wmcli.world_models.base import WorldModel
from wmcli.world_models.open_loop import open_loop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "held-out"
STEP = "imagined step"
STEPS = 15  # imagined at most, as DreamerV3 imagines
WINDOWS = 8  # of an episode
BATCH = 32  # windows imagined side by side
KINDS = ("generation", "reconstruction", "no change")
"""Errors of a part: imagined, observed and decoded, and of the last observed frame."""


class _Windows(NamedTuple):
    """Windows of the test episodes. The frame that the last action of an episode led to may be unknown."""

    rows: np.ndarray
    """int64 (W, S); unknown frames repeat the row before."""
    known: np.ndarray
    """bool (W, S): the frame is known."""
    taken: np.ndarray
    """bool (W, S): an action led to the frame inside of the episode."""
    episode: np.ndarray
    """int64 (W,)."""
    context: int
    """Observed frames C."""


def evaluate_held_out(context: Context, *, dynamics: str | None = None, experience: str | None = None) -> Artifact:
    """Measure a dynamics model on up to `evaluation.episodes` held-out test episodes and publish the errors.

    Args:
        context: Of the run.
        dynamics: Reference; None is the newest of the run.
        experience: Reference of the experience with the test episodes; None is that of the dynamics.

    Raises:
        ArtifactError: An input is missing, or there are no test episodes.
        UsageError: The model makes neither frames nor rewards, or the episodes are too short.
    """
    settings, machine, run = context.settings, context.machine, context.run
    model = run.resolve(dynamics or "dynamics", "dynamics")
    newest = run.resolve(experience, "experience") if experience else model.input("experience")
    for artifact in (model, newest):
        check_same_environment(context.environment, artifact)
    source = find_held_out(newest, "test")
    if source is None:
        raise ArtifactError(f"{newest.name} {NONE_HELD_OUT}")
    trained = settings_of(model)
    HELD_OUT.check(trained)
    identity = settings.identity("seed", "environment") | {
        "protocol": NAME,
        "episodes": settings.evaluation.episodes,
        "precision": machine.precision,
    }
    job = run.job("evaluation", identity, {"dynamics": model, "experience": source})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is up to date, nothing to do (--force measures again)")
        return existing
    with context.work(job) as work:
        world_model, replay = load_world_model(model, machine), context.held_out(source, "test")
        windows = _windows(world_model, replay, settings.evaluation.episodes)
        episodes = len(np.unique(windows.episode))
        context.progress.say(f"eval: dreams beside {episodes} held-out episodes on {machine}")
        seed = derived_seed(settings.seed, "eval held-out")
        with isolated_randomness(seed, machine.device), machine.autocast():
            scores = _measure(context, world_model, replay, windows, work)
        artifact = context.publish(
            work,
            scores
            | {
                "protocol": NAME,
                "environment": settings.environment.id,
                "episodes": episodes,
                "windows": len(windows.rows),
                "observed": windows.context,
                "preset": context.preset,
                "parameters": sum(parameter.numel() for parameter in world_model.parameters()),
                "updates": model.metrics["updates"],
            },
        )
    context.progress.say(summarize(artifact))
    return artifact


def _windows(world_model: WorldModel, replay: Replay, most: int) -> _Windows:
    """Cut the first `most` episodes into windows.

    Raises:
        UsageError: No episode is long enough for an imagined step.
    """
    starts, lengths = (each[:most] for each in replay.episodes)
    closing = np.zeros(len(replay), bool) if replay.is_closing is None else replay.is_closing.cpu().numpy()
    ends = closing[replay.order[starts + lengths - 1]]  # the frame behind the last action is known
    frames = lengths + ~ends
    observed = min(world_model.context, int(lengths.max()) - 1)  # of the longest, a known frame is left to imagine
    if observed < 1 or lengths.max() < 2:
        raise UsageError("the held-out episodes have one frame each, and dreaming begins behind one.")
    longest = world_model.settings.longest_imagination
    size = observed + (STEPS if longest is None else max(1, min(STEPS, longest - observed)))
    rows, known, taken, episode = [], [], [], []
    for number, (start, length, total) in enumerate(zip(starts, lengths, frames, strict=True)):
        begins = np.arange(0, total - observed, size)
        chosen = np.unique(np.linspace(0, len(begins) - 1, min(WINDOWS, len(begins))).round().astype(int))
        for begin in begins[chosen] if len(begins) else ():
            places = begin + np.arange(size)
            rows.append(replay.order[start + np.minimum(places, length - 1)])
            known.append(places < length)
            taken.append(places < total)
            episode.append(number)
    return _Windows(np.stack(rows), np.stack(known), np.stack(taken), np.array(episode), observed)


@torch.no_grad()
def _measure(
    context: Context, world_model: WorldModel, replay: Replay, windows: _Windows, work: Work
) -> dict[str, Any]:
    """Return the errors of frames and rewards, and write pictures."""
    observed = windows.context
    known, taken = windows.known[:, observed:], windows.taken[:, observed:]
    found: list[dict[str, np.ndarray]] = []
    with context.progress.bar("dream", len(windows.rows), "windows") as bar:
        for begin in range(0, len(windows.rows), BATCH):
            rows = windows.rows[begin : begin + BATCH]
            found.append(_errors(world_model, replay, rows, observed))
            bar.advance(len(rows))
    errors = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    imagined, real = errors.pop("reward", None), errors.pop("real reward")
    scores: dict[str, Any] = {"errors": {}, "curves": {}, "reward": None}
    for name, error in errors.items():
        scores["errors"][name] = estimate(_over_episodes(error, known, windows.episode))
        scores["curves"][name] = curve(*_steps_of_episodes(error, known, windows.episode))
    if imagined is not None:
        constant = real[taken].mean()
        scores["reward"] = {
            "error": estimate(_over_episodes(np.abs(imagined - real), taken, windows.episode)),
            "constant": estimate(_over_episodes(np.abs(constant - real), taken, windows.episode)),
        }
    if context.pictures and errors:
        _draw(context, world_model, replay, windows, scores["curves"], work)
    return scores


def _errors(world_model: WorldModel, replay: Replay, rows: np.ndarray, observed: int) -> dict[str, np.ndarray]:
    """Return errors (B, H) by kind and part, and imagined and real rewards of the steps, of windows (B, S)."""
    device = replay.device
    frames, action = take_rows(replay.observation, rows, device), take_rows(replay.action, rows, device)
    latent = world_model.encode(frames)
    features, steps = open_loop(world_model, latent[:, :observed], action)
    reward = world_model.learned_reward(take_rows(replay.reward, rows[:, observed - 1 : -1], device))
    found = {"real reward": reward}
    if world_model.learns_rewards:
        found["reward"] = torch.stack([step.reward for step in steps], 1)
    if world_model.decodes is not None:
        if world_model.decodes == "features":
            imagined = features[:, observed:]
            seen = open_loop(world_model, latent, action)[0][:, observed:]
        else:
            imagined = torch.stack([step.latent for step in steps], 1)
            seen = latent[:, observed:]
        still = map_parts(lambda part: part[:, observed - 1 : observed].expand_as(part[:, observed:]), frames)
        guesses = (world_model.decode(imagined), world_model.decode(seen), still)
        for kind, guess in zip(KINDS, guesses, strict=True):
            for name, space in parts_of(world_model.observation_space).items():
                real = parts_of(frames)[name][:, observed:]
                found[f"{kind} {name}".rstrip()] = _error(space, parts_of(guess)[name], real)
    return {name: value.double().cpu().numpy() for name, value in found.items()}


def _error(space: PartSpace, guess: Tensor, real: Tensor) -> Tensor:
    """Return the error (B, H) of a part (B, H, ...)."""
    if isinstance(space, Categories):
        return (guess != real).float().flatten(2).mean(-1)
    scale = 255 if isinstance(space, Image) else 1
    return ((guess.float() - real.float()) / scale).square().flatten(2).mean(-1)


def _over_episodes(error: np.ndarray, counts: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """Return each episode's mean error (E,) over the frames of its windows that count, as `over_episodes` does."""
    total, number = np.zeros(episode.max() + 1), np.zeros(episode.max() + 1)
    np.add.at(total, episode, finite_or_infinite(np.where(counts, error, 0)).sum(1))
    np.add.at(number, episode, counts.sum(1))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _steps_of_episodes(error: np.ndarray, counts: np.ndarray, episode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each episode's mean error (E, H) at each step over its windows that count there, and where any does."""
    shape = (episode.max() + 1, error.shape[1])
    total, number = np.zeros(shape), np.zeros(shape)
    np.add.at(total, episode, np.where(counts, error, 0))
    np.add.at(number, episode, counts)
    return total / np.maximum(number, 1), number > 0


def _draw(
    context: Context,
    world_model: WorldModel,
    replay: Replay,
    windows: _Windows,
    curves: dict[str, dict[str, list[float | None]]],
    work: Work,
) -> None:
    """Write a film of the windows with the most frames, and the errors over the imagined steps."""
    length = windows.known.sum(1)
    longest = np.argsort(-length, kind="stable")[:EPISODES]
    chosen = np.sort(longest[length[longest] > windows.context])
    if len(chosen):
        rows = windows.rows[chosen, : length[chosen].min()]
        frames, action = (take_rows(column, rows, replay.device) for column in (replay.observation, replay.action))
        write_side_by_side(work.payload, beside(world_model, frames, action, windows.context))
    title = context.settings.environment.id
    write_figure(work.payload / "errors.png", error_curves(_lines(curves), x_label=STEP, y_label="error", title=title))


def _lines(curves: dict[str, dict[str, list[float | None]]]) -> dict[str, tuple[range, Band]]:
    """Return the errors by imagined step as `error_curves` takes them."""
    bands = {name: [np.array(each[key], float) for key in ("mean", "low", "high")] for name, each in curves.items()}
    return {name: (range(1, 1 + len(mean)), (mean, low, high)) for name, (mean, low, high) in bands.items()}


# -- the protocol ------------------------------------------------------------------------------------------------------


def unfit(settings: Settings) -> str | None:
    """Return why dynamics with these settings cannot be measured so, or None if they can."""
    dynamics = settings.dynamics
    if dynamics.predicts_cells:
        return "dynamics on cells play a grid world: use --protocol gridworld"
    if not (dynamics.makes_frames or dynamics.learns_rewards):
        return f"dynamics of kind '{dynamics.kind}' make neither frames nor rewards"
    return None


def _cells(metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each error."""
    errors = metrics["errors"]  # a manifest sorts them by name
    named = {name: errors[name] for kind in KINDS for name in errors if name.startswith(kind)}
    if metrics["reward"] is not None:
        named |= {"reward": metrics["reward"]["error"], "constant reward": metrics["reward"]["constant"]}
    for name, error in named.items():
        if said := diverged_in(error):
            yield name, said
            continue
        interval = "" if error["low"] is None else f" ({error['low']:.3g}-{error['high']:.3g})"
        yield name, f"{error['value']:.3g}{interval}"


def summarize(evaluation: Artifact) -> str:
    """Return an evaluation in one line."""
    cells = ", ".join(f"{name} {cell}" for name, cell in _cells(evaluation.metrics))
    return f"eval: {evaluation.name}: {evaluation.metrics['episodes']} held-out episodes: {cells}"


def table(evaluations: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return a row for each evaluation, with 95 % intervals over episodes."""
    rows = [
        {"run": each.run.name, "environment": each.metrics["environment"]}
        | {key: each.metrics[key] for key in ("parameters", "updates", "episodes")}
        | dict(_cells(each.metrics))
        for each in evaluations
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column, "-") for column in columns} for row in rows]


def plot_curves(evaluations: Sequence[Artifact]) -> Figure:
    """Plot errors over imagined steps: of one run all of them, of several those of imagined frames.

    Raises:
        UsageError: The evaluations are of several environments, or have no errors of frames.
    """
    environments = {each.metrics["environment"] for each in evaluations}
    if len(environments) > 1:
        raise UsageError(f"curves are drawn of one environment: these runs are of {', '.join(sorted(environments))}.")
    lines = {}
    names = [each.run.name for each in evaluations]
    for each in evaluations:
        run = each.run.name if names.count(each.run.name) == 1 else str(each.run)
        for name, line in _lines(each.metrics["curves"]).items():
            if len(evaluations) == 1:
                lines[name] = line
            elif name.startswith(KINDS[0]):
                lines[f"{run}: {name}"] = line
    return error_curves(lines, x_label=STEP, y_label="error", title=environments.pop())


HELD_OUT = Protocol(
    name=NAME,
    needs="dynamics",
    evaluate=evaluate_held_out,
    unfit=unfit,
    summarize=summarize,
    table=table,
    reads_experience=True,
    plot_curves=plot_curves,
)
