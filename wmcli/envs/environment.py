"""From settings to an environment, and to the block that says exactly how it was played."""

from __future__ import annotations

import difflib
import importlib
import warnings
from importlib import metadata
from typing import Any

import gymnasium

from wmcli.envs import atari
from wmcli.envs.catch import CATCH_ID
from wmcli.envs.delayed_copy import DELAYED_COPY_ID
from wmcli.envs.frames import Frames
from wmcli.envs.grid_world import GRID_WORLD_GOAL_ID, GRID_WORLD_ID
from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError


def make(settings: EnvironmentSettings, *, train: bool) -> gymnasium.Env:
    """Open the environment: frames (size, size, 3) uint8, actions 0 .. n-1, seeded by `reset(seed=...)`.

    `train` chooses between the two halves of an Atari protocol; a plain environment is the same in both.
    Raises UsageError, in one line, for an unknown id, a missing package, a protocol that does not fit, and for
    observations or actions that wm cannot use.
    """
    game = atari.game_of(settings.id)
    if settings.protocol in atari.PROTOCOLS:
        if game is None:
            near = _near(settings.id.removeprefix("ALE/").split("-")[0], list(atari.games()))
            raise UsageError(
                f"environment.id = '{settings.id}' is no Atari game{f' (did you mean {near}?)' if near else ''}, and "
                f"protocol '{settings.protocol}' is for Atari alone; for others: --set environment.protocol=plain"
            )
        try:
            return atari.Atari(game, settings.size, settings.protocol, train=train)
        except (OSError, gymnasium.error.Error) as error:
            raise UsageError(f"{settings.id}: it does not open: {_one_line(error)}") from error
    if game is not None:
        raise UsageError(
            f"environment.id = '{settings.id}' is an Atari game, which needs an Atari protocol: "
            f"--set environment.protocol=rem"
        )
    return Frames(_open_plain(settings.id), settings.size)


def protocol(settings: EnvironmentSettings) -> dict[str, Any]:
    """How the environment is played, complete and as plain JSON values, for the manifest of every artifact.

    Everything but `versions` must agree where experience or models are used together.
    """
    env = make(settings, train=True)
    packages = ["gymnasium", "pillow"]
    block: dict[str, Any] = {"id": settings.id, "protocol": settings.protocol, "size": settings.size}
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    block["actions"] = int(env.action_space.n)
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings is not None:
        block["action_meanings"] = [str(name) for name in meanings()]
    if isinstance(env, Frames):
        steps = env.spec.max_episode_steps if env.spec else None
        shape = env.env.observation_space.shape
        assert shape is not None
        block |= {"frame": list(shape), "resize": env.resizing}
        block |= {"train": {"time_limit": steps}, "test": {"time_limit": steps}}  # steps; None is unlimited
    else:
        game = atari.game_of(settings.id)
        assert game is not None
        block |= atari.describe(game, settings.protocol)
        packages.append("ale-py")
    env.close()
    return block | {"versions": {package: metadata.version(package) for package in packages}}


def list_environments() -> list[dict[str, Any]]:
    """What `wm envs` shows: id, the protocols it can be played with, and one line about it."""
    small = {
        CATCH_ID: "catch a falling ball: learns in minutes on a CPU",
        DELAYED_COPY_ID: "do now what was shown three frames ago: a test of memory",
        GRID_WORLD_ID: "reach the goal in a room of 5 x 5 cells, without end: a test of long sequences",
        GRID_WORLD_GOAL_ID: "the same, but only the goal is placed anew when it is reached",
    }
    small |= {name: task.about for name, task in TASKS.items()}
    return [{"id": name, "protocols": ["plain"], "about": about} for name, about in small.items()] + [
        {"id": f"ALE/{name}-v5", "protocols": list(atari.PROTOCOLS), "about": "Atari 2600"} for name in atari.games()
    ]


def _open_plain(identifier: str) -> gymnasium.Env:
    module, colon, name = identifier.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"environment.id = '{identifier}': cannot import '{module}': {_one_line(error)}"
            ) from error
        except ValueError:
            raise UsageError(
                f"environment.id = '{identifier}': write it as module:Id, for example ocean:Fish-v0"
            ) from None
    if name not in gymnasium.registry:
        near = _near(name, list(gymnasium.registry))
        hint = f"did you mean '{near}'?" if near else "list them with: wm envs"
        if "/" in name and not colon:
            hint += f" An id of another package needs it imported first: --set environment.id=package:{name}"
        raise UsageError(f"environment.id: no environment called '{name}'; {hint}")
    if str(gymnasium.registry[name].entry_point).startswith("ale_py"):
        raise UsageError(f"'{name}' is Atari, which needs an Atari protocol: --set environment.protocol=rem")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # that there is a newer version of it: the id is explicit
            env = gymnasium.make(name, disable_env_checker=True)
    except Exception as error:  # whatever a stranger's constructor raises: it stays attached for --debug
        raise UsageError(f"{name}: it does not open: {type(error).__name__}: {_one_line(error)}") from error
    return env


def _near(word: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.7)), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
