"""From settings to an environment, and to the block that says exactly how it was played."""

from __future__ import annotations

import math
from enum import EnumType
from importlib import metadata
from typing import Any

import gymnasium

from wmcli.envs import atari
from wmcli.envs.adapter import Adapted
from wmcli.envs.catch import CATCH_ID
from wmcli.envs.checked import Checked, nearest, one_line, run
from wmcli.envs.delayed_copy import DELAYED_COPY_ID
from wmcli.envs.grid_world import GRID_WORLD_GOAL_ID, GRID_WORLD_ID
from wmcli.envs.pace import Pace
from wmcli.envs.plain import describe_families, open_plain, packages_of, wrappers_of
from wmcli.envs.quarters import QUARTERS_ID
from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError


def make(settings: EnvironmentSettings, *, train: bool, number: int | None = None) -> gymnasium.Env:
    """Open an environment in the form of `wmcli.spaces`, seeded by `reset(seed=...)`. Its `spaces` describe it.

    Args:
        settings: Of the environment.
        train: Use the training rules of an Atari protocol, else its test rules.
        number: Of the environment in messages, where it is one of several.

    Raises:
        UsageError: The id is unknown, a package is missing, the protocol does not fit, or wm cannot use its
            observations or actions.
        EnvironmentFault: The environment fails, now or later.
    """
    game = atari.game_of(settings.id)
    if settings.protocol in atari.PROTOCOLS:
        if changed := _choices(settings):
            raise UsageError(
                f"environment.{next(iter(changed))} is for protocol 'plain'; protocol '{settings.protocol}' states all"
                " of its rules itself: leave it out"
            )
        if game is None:
            near = nearest(settings.id.removeprefix("ALE/").split("-")[0], list(atari.games()))
            raise UsageError(
                f"environment.id = '{settings.id}' is no Atari game{f' (did you mean {near}?)' if near else ''}, and "
                f"protocol '{settings.protocol}' is for Atari alone; for others: --set environment.protocol=plain"
            )
        try:
            return Checked(atari.Atari(game, settings.size, settings.protocol, train=train), settings.id, number)
        except (OSError, gymnasium.error.Error) as error:
            raise UsageError(f"{settings.id}: it does not open: {one_line(error)}") from error
    if game is not None:
        raise UsageError(
            f"environment.id = '{settings.id}' is an Atari game, which needs an Atari protocol: "
            f"--set environment.protocol=rem"
        )
    env: gymnasium.Env = Checked(open_plain(settings), settings.id, number)
    if settings.action_repeat > 1 or settings.time_limit:
        env = Pace(env, settings.action_repeat, settings.time_limit)
    return run(lambda: f"{settings.id}: reading its spaces", Adapted, env, settings.size)


def _choices(settings: EnvironmentSettings) -> dict[str, Any]:
    """Return the settings of protocol `plain` that are not at their defaults."""
    names = ("kwargs", "observe", "wrappers", "time_limit", "action_repeat")
    fields = EnvironmentSettings.model_fields
    values = {name: getattr(settings, name) for name in names if getattr(settings, name) != fields[name].default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def protocol(settings: EnvironmentSettings) -> dict[str, Any]:
    """How the environment is played, complete and as plain JSON values, for the manifest of every artifact.

    Everything but `versions` must agree where experience or models are used together.
    """
    env: Any = make(settings, train=True)
    packages = ["gymnasium", "pillow"]
    block: dict[str, Any] = {"id": settings.id, "protocol": settings.protocol, "size": settings.size}
    block |= env.spaces.describe()
    if (meanings := _action_meanings(env, settings.id)) is not None:
        block["action_meanings"] = meanings
    if isinstance(env, Adapted):
        steps = time_limit(env, settings)
        if not isinstance(env.spaces.observation, dict) and env.parts[0].resizing:
            block |= {"frame": list(env.env.observation_space.shape or ()), "resize": env.parts[0].resizing}
        else:
            block |= {"resize": {part.name: part.resizing for part in env.parts if part.resizing}}
        block |= _choices(settings)
        if wrappers := wrappers_of(settings):
            block["wrappers"] = list(wrappers)
        packages += packages_of(settings.id)
        block |= {"train": {"time_limit": steps}, "test": {"time_limit": steps}}
    else:
        game = atari.game_of(settings.id)
        assert game is not None
        block |= atari.describe(game, settings.protocol)
        packages.append("ale-py")
    env.close()
    return block | {"versions": {package: _version(package) for package in packages}}


def time_limit(env: gymnasium.Env, settings: EnvironmentSettings) -> int | None:
    """Return the decisions after which an episode is cut off, None where it is not known to be.

    Args:
        env: From `make`.
        settings: Those it was made with, of protocol `plain`.
    """
    limits = [env.spec.max_episode_steps if env.spec else None]
    if packages_of(settings.id):
        limits.append(getattr(env.unwrapped, "max_steps", None))
    decisions = [math.ceil(steps / settings.action_repeat) for steps in limits if steps]
    if settings.time_limit:
        decisions.append(settings.time_limit)
    return min(decisions, default=None)


def _action_meanings(env: gymnasium.Env, name: str) -> list[str] | None:
    """Return the names of discrete actions, if the environment tells them."""
    ask = getattr(env.unwrapped, "get_action_meanings", None)
    if ask is not None:
        return run(lambda: f"{name}: get_action_meanings()", lambda: [*map(str, ask())])
    actions = getattr(env.unwrapped, "actions", None)  # of MiniGrid
    return list(actions.__members__) if isinstance(actions, EnumType) else None


def _version(package: str) -> str:
    """Return the version of a package by the name of its distribution, or of its module."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(metadata.packages_distributions()[package][0])


def list_environments() -> list[dict[str, Any]]:
    """Return the rows of `wm envs`: id, protocols and description."""
    about = {
        CATCH_ID: "catch a falling ball: learns in minutes on a CPU",
        QUARTERS_ID: "push a puck into the quarter of the named color: an image, numbers and a category, any actions",
        DELAYED_COPY_ID: "repeat the cue of three frames ago: a test of memory",
        GRID_WORLD_ID: "reach the goal in a room of 5 x 5 cells, without end: a test of long sequences",
        GRID_WORLD_GOAL_ID: "the same, but only the goal is placed anew when it is reached",
    }
    about |= {name: task.about for name, task in TASKS.items()}
    about |= describe_families()
    return [{"id": name, "protocols": ["plain"], "about": text} for name, text in about.items()] + [
        {"id": f"ALE/{name}-v5", "protocols": list(atari.PROTOCOLS), "about": "Atari 2600"} for name in atari.games()
    ]
