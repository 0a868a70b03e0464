"""`wm play`: a film of the trained agent in the real environment, or in its own imagination."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent
from wmcli.envs import Streams
from wmcli.errors import UsageError
from wmcli.report.images import check_animation, short_number, write_animation
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.pictures import Dream, Ending, Film, ending
from wmcli.training.device import derived_seed, isolated_randomness

FPS = 10
STEPS = 500  # filmed at most


class Filmed(NamedTuple):
    """What was filmed: of a dream the imagined side."""

    path: Path
    frames: int
    """That were acted on."""
    total: float
    """The return, so far."""
    ended: Ending


def play(
    context: Context,
    *,
    source: Literal["real", "imagination"],
    out: Path,
    controller: str | None,
    seed: int,
    actions: str | None = None,
    known: int | None = None,
) -> Filmed:
    """Film one episode to `out`.

    Args:
        context: of the run.
        source: "real" plays a test episode, and shows of a planner also what share of the search went to each action,
            and the value it found. "imagination" plays the first frames, then acts in the world model until this
            says that the episode ends. Beside it stands the real episode under the same actions.
        out: a .gif or .mp4 file, outside of artifacts.
        controller: a reference; None is the newest.
        seed: of the environment and of all draws.
        actions: numbers or names with commas between, taken one after the other instead of the controller's own, which
            go on behind them.
        known: real frames before imagination begins; None is as many as in training.

    Raises:
        UsageError: an unknown action, a file that cannot be written, or a model that makes no pictures.
        ArtifactError: no controller, or one of another environment.
    """
    check_animation(out)
    given = [] if actions is None else _numbers(actions, context.environment)
    settings = context.settings
    actor = context.run.resolve(controller or "controller", "controller")
    check_same_environment(context.environment, actor)
    world_model, policy = load_controller(actor, context.machine, settings.acting)
    if source == "imagination" and not world_model.decodes:
        raise UsageError(f"{actor.name} plans in latents that no picture is made of; leave out --imagination")
    meanings = context.environment.get("action_meanings")
    with isolated_randomness(derived_seed(seed, "play"), context.machine.device), context.machine.autocast():
        streams = Streams(
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
            film = _real(streams, agent, given)
            movie, about = film.drawn(meanings), _described(film)
        else:
            known = known or world_model.context
            dream = _imagined(streams, agent, given, known)
            film, movie = dream.imagined, dream.drawn(meanings)
            if dream.context < known:
                context.progress.say(
                    f"play: the real episode was over after {dream.context} of the {known} frames that imagination"
                    " was to start from; give fewer with --context"
                )
            about = f"imagined from frame {dream.context} on: {_described(film)}; in reality: {_described(dream.real)}"
        streams.close()
    write_animation(out, movie, FPS)
    context.progress.say(f"play: {about}; written to {out}")
    assert film.ended is not None
    return Filmed(out, len(film.frames), film.total, film.ended)


def _real(streams: Streams, agent: Agent, given: list[int]) -> Film:
    film = Film()
    while film.ended is None:
        frame = streams.observation[0]
        agent.perceive(streams.observation, streams.first)
        action = agent.decide(_next(given, len(film.frames)))
        after = streams.step(action)
        film.add(frame, action[0], after.reward[0], agent.summarize_search())
        how = ending(after) or ("cut" if len(film.frames) == STEPS else None)
        if how is not None:
            film.end(after.final.get(0, streams.observation[0]), how)
    return film


def _imagined(streams: Streams, agent: Agent, given: list[int], context: int) -> Dream:
    """Imagine from frame `context` on, or from the end of the real episode if that comes before."""
    dream = Dream(context=0)
    real, imagined = dream.real, dream.imagined
    while imagined.ended is None:
        if real.ended is None and len(real.frames) < context:
            agent.perceive(streams.observation, streams.first)
            dream.context += 1
        shown = agent.frame()[0]
        action = agent.decide(_next(given, len(imagined.frames)))
        if real.ended is None:
            frame = streams.observation[0]
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
            imagined.end(shown, "terminated")  # no frame is learned behind an end, so none is imagined
        elif len(imagined.frames) == STEPS:
            imagined.end(agent.frame()[0], "cut")
    if real.ended is None:
        real.end(streams.observation[0], "cut")
    return dream


def _next(given: list[int], frame: int) -> np.ndarray | None:
    """The action that was given for a frame, (1,) int64; None where it is left to the controller."""
    return np.array([given[frame]]) if frame < len(given) else None


def _numbers(actions: str, environment: dict[str, Any]) -> list[int]:
    names = [name.casefold() for name in environment.get("action_meanings", [])]
    count = environment["actions"]
    numbers = []
    for word in (part.strip() for part in actions.split(",")):
        if word.casefold() in names:
            numbers.append(names.index(word.casefold()))
        elif word.isdecimal() and int(word) < count:
            numbers.append(int(word))
        else:
            known = ", ".join(f"{number} {name}" for number, name in enumerate(environment.get("action_meanings", [])))
            raise UsageError(
                f"--actions: '{word}' is no action of {environment['id']}; it has {known or f'0 to {count - 1}'}"
            )
    return numbers


def _described(film: Film) -> str:
    """The film in one line."""
    if film.ended == "cut":
        return f"cut after {len(film.frames)} frames, the episode went on; return so far {short_number(film.total)}"
    return f"{len(film.frames)} frames, return {short_number(film.total)}, {film.ended}"
