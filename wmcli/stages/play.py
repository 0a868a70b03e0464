"""`wm play`: film the trained agent in the real environment, or in its own imagination."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent
from wmcli.envs import AnyStreams, open_streams
from wmcli.errors import UsageError
from wmcli.report.images import check_animation, short_number, write_animation
from wmcli.spaces import ActionSpace, Continuous, Discrete, row_of
from wmcli.stages.context import Context
from wmcli.stages.pictures import Dream, Ending, Film, ending
from wmcli.training.device import derived_seed, isolated_randomness

FPS = 10
STEPS = 500  # most frames of a film


class Filmed(NamedTuple):
    """Summary of a film; in imagination, of the imagined side."""

    path: Path
    frames: int
    """Frames that were acted on."""
    total: float
    """Return so far."""
    ended: Ending


def play(
    context: Context,
    *,
    source: Literal["real", "imagination"],
    out: Path,
    controller: str | None,
    seed: int,
    actions: str | None = None,
    context_frames: int | None = None,
) -> Filmed:
    """Film one episode to `out`.

    Args:
        context: The run.
        source: "real" plays a test episode; for a planner it also shows visit shares and value of the search.
            "imagination" plays the first frames, then acts in the world model until this predicts an end. Beside it is
            the real episode under the same actions.
        out: A .webp, .gif or .mp4 file, outside of artifacts.
        controller: Reference; None is the newest.
        seed: Of the environment and of all draws.
        actions: Numbers or names separated by commas, taken in turn before those of the controller. An action of
            several numbers has colons between them.
        context_frames: Real frames before imagination begins; None is as many as in training.

    Raises:
        UsageError: An unknown action, a file that cannot be written, or a model that decodes nothing.
        ArtifactError: There is no controller, or it is of another environment.
    """
    check_animation(out)
    first = [] if actions is None else _parse(actions, context.spaces.action, context.environment)
    settings = context.settings
    actor = context.run.resolve(controller or "controller", "controller")
    check_same_environment(context.environment, actor)
    world_model, policy = load_controller(actor, context.machine, settings.acting)
    if source == "imagination" and not world_model.decodes:
        raise UsageError(f"{actor.name} plans in latents that no picture is made of; omit --imagination")
    meanings, space = context.environment.get("action_meanings"), context.spaces.observation
    with isolated_randomness(derived_seed(seed, "play"), context.machine.device), context.machine.autocast():
        streams = open_streams(
            settings.environment.model_copy(update={"count": 1}), train=False, seed=derived_seed(seed, "play")
        )
        agent = Agent(
            world_model,
            policy,
            1,
            temperature=settings.evaluation.temperature,
            epsilon=0.0,
            generator=torch.Generator().manual_seed(derived_seed(seed, "play actions")),
        )
        if source == "real":
            film = _real(streams, agent, first)
            movie, about = film.render(space, meanings), _described(film)
        else:
            context_frames = context_frames or world_model.context
            dream = _imagined(streams, agent, first, context_frames)
            film, movie = dream.imagined, dream.render(space, meanings)
            if dream.context < context_frames:
                context.progress.say(
                    f"play: the real episode was over after {dream.context} of the {context_frames} frames before"
                    " imagination; give fewer with --context"
                )
            about = f"imagined from frame {dream.context} on: {_described(film)}; in reality: {_described(dream.real)}"
        streams.close()
    write_animation(out, movie, FPS)
    context.progress.say(f"play: {about}; written to {out}")
    assert film.ended is not None
    return Filmed(out, len(film.frames), film.total, film.ended)


def _real(streams: AnyStreams, agent: Agent, first: Sequence[np.ndarray]) -> Film:
    film = Film()
    while film.ended is None:
        frame = row_of(streams.observation)
        agent.perceive(streams.observation, streams.first)
        action = agent.decide(_next(first, len(film.frames)))
        after = streams.step(action)
        film.add(frame, action[0], after.reward[0], agent.summarize_search())
        how = ending(after) or ("cut" if len(film.frames) == STEPS else None)
        if how is not None:
            film.end(after.final.get(0, row_of(streams.observation)), how)
    return film


def _imagined(streams: AnyStreams, agent: Agent, first: Sequence[np.ndarray], context: int) -> Dream:
    """Imagine from frame `context` on, or from the end of the real episode if it comes earlier."""
    dream = Dream(context=0)
    real, imagined = dream.real, dream.imagined
    while imagined.ended is None:
        if real.ended is None and len(real.frames) < context:
            agent.perceive(streams.observation, streams.first)
            dream.context += 1
        shown = row_of(agent.frame())
        action = agent.decide(_next(first, len(imagined.frames)))
        if real.ended is None:
            frame = row_of(streams.observation)
            after = streams.step(action)
            real.add(frame, action[0], after.reward[0], {})
            how = ending(after)
            if how is not None:
                real.end(after.final[0], how)
        if real.ended is None and len(real.frames) < context:
            imagined.add(shown, action[0], after.reward[0], {})
            continue
        step = agent.imagine()
        imagined.add(shown, action[0], float(step.reward), {})
        if step.terminated:
            imagined.end(shown, "terminated")  # models learn no frame behind an end
        elif len(imagined.frames) == STEPS:
            imagined.end(row_of(agent.frame()), "cut")
    if real.ended is None:
        real.end(row_of(streams.observation), "cut")
    return dream


def _next(first: Sequence[np.ndarray], frame: int) -> np.ndarray | None:
    """Return the given action of a frame, (1, ...), None where the controller decides."""
    return first[frame][None] if frame < len(first) else None


def _parse(actions: str, space: ActionSpace, environment: dict[str, Any]) -> list[np.ndarray]:
    """Parse actions given by number or name, or by several numbers; continuous ones as the environment takes them."""
    names = environment.get("action_meanings", [])
    parsed = []
    for word in (part.strip() for part in actions.split(",")):
        action = _parse_one(word, space, [name.casefold() for name in names])
        if action is None:
            raise UsageError(
                f"--actions: '{word}' is no action of {environment['id']}; it has {_choices(space, names)}"
            )
        parsed.append(action)
    return parsed


def _parse_one(word: str, space: ActionSpace, names: Sequence[str]) -> np.ndarray | None:
    if word.casefold() in names:
        return np.array(names.index(word.casefold()))
    try:
        numbers = np.array([float(number) for number in word.split(":")])
    except ValueError:
        return None
    if isinstance(space, Continuous):
        low, high = np.array(space.low), np.array(space.high)
        if numbers.shape != low.shape or ((numbers < low) | (numbers > high)).any():
            return None
        return ((numbers - low) / (high - low) * 2 - 1).astype(np.float32)
    sizes = np.array((space.count,) if isinstance(space, Discrete) else space.sizes)
    if numbers.shape != sizes.shape or not all(number.isdecimal() for number in word.split(":")):
        return None
    whole = numbers.astype(np.int64)
    if (whole >= sizes).any():
        return None
    return whole[0] if isinstance(space, Discrete) else whole


def _choices(space: ActionSpace, names: Sequence[str]) -> str:
    """Describe the actions of a space."""
    if isinstance(space, Discrete):
        return ", ".join(f"{number} {name}" for number, name in enumerate(names)) or f"0 to {space.count - 1}"
    if isinstance(space, Continuous):
        bounds = zip(space.low, space.high, strict=True)
        return f"{len(space.low)} numbers, {':'.join(f'{low:g}..{high:g}' for low, high in bounds)}"
    return f"{len(space.sizes)} numbers, {':'.join(f'0..{size - 1}' for size in space.sizes)}"


def _described(film: Film) -> str:
    """Describe the film in one line."""
    if film.ended == "cut":
        return f"cut after {len(film.frames)} frames, the episode went on; return so far {short_number(film.total)}"
    return f"{len(film.frames)} frames, return {short_number(film.total)}, {film.ended}"
