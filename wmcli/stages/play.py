"""`wm play`: a film of the trained agent in the real environment, or in its own imagination."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent
from wmcli.controllers.base import Controller
from wmcli.envs import Streams
from wmcli.errors import UsageError
from wmcli.nn.categorical import choose
from wmcli.report.images import write_animation
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.pictures import Film
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.world_models.base import WorldModel

FPS = 10
STEPS = 500  # filmed at most


def play(
    context: Context, *, source: Literal["real", "imagination"], out: Path, controller: str | None, seed: int
) -> Path:
    """Film one episode to `out` (.gif or .mp4) and return it.

    "real" plays a test episode, and shows of a planner also what share of the search went to each action, and the value
    it found. "imagination" shows the controller one real frame and lets it act in the world model from there until the
    model says that the episode ends.

    Raises ArtifactError when there is no controller or it is of another environment, UsageError for another file type.
    """
    settings = context.settings
    actor = context.run.resolve(controller or "controller", "controller")
    check_same_environment(context.environment, actor)
    world_model, policy = load_controller(actor, context.machine, context.settings.acting)
    if source == "imagination" and not world_model.decodes:
        raise UsageError(f"{actor.name} plans in latents that no picture is made of; leave out --imagination")
    with isolated_randomness(derived_seed(seed, "play"), context.machine.device), context.machine.autocast():
        streams = Streams(
            settings.environment.model_copy(update={"count": 1}), train=False, seed=derived_seed(seed, "play")
        )
        if source == "real":
            agent = Agent(
                world_model,
                policy,
                1,
                temperature=settings.evaluation.temperature,
                epsilon=0.0,
                generator=torch.Generator().manual_seed(derived_seed(seed, "play actions")),
            )
            film = _real(streams, agent)
        else:
            film = _imagined(streams, world_model, policy, settings.evaluation.temperature)
        streams.close()
    write_animation(out, film.drawn(context.environment.get("action_meanings")), FPS)
    context.progress.say(f"play: {len(film.frames)} frames, return {sum(film.rewards):g}, written to {out}")
    return out


def _real(streams: Streams, agent: Agent) -> Film:
    film, ended = Film(), False
    while not ended and len(film.frames) < STEPS:
        frame = streams.observation[0]
        action = agent.act(streams.observation, streams.first)
        after = streams.step(action)
        film.add(frame, action[0], after.reward[0], agent.searched())
        ended = bool(after.terminated[0] | after.truncated[0])
    return film


@torch.no_grad()
def _imagined(streams: Streams, world_model: WorldModel, policy: Controller, temperature: float) -> Film:
    device = next(policy.parameters()).device
    frame = torch.from_numpy(streams.observation).to(device)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    world = world_model.perceive(None, frame, nothing, torch.ones(1, dtype=torch.bool, device=device))
    state = policy.initial_state(1)
    film, ended = Film(), False
    while not ended and len(film.frames) < STEPS:
        shown = world_model.frame(world)[0].cpu().numpy()
        logits, state = policy.decide(world_model, world, state)
        action = choose(logits, temperature)
        state = policy.follow(action, state)
        imagined, world = world_model.imagine(world, action)
        film.add(shown, int(action), float(imagined.reward), {})
        ended = bool(imagined.terminated)
    return film
