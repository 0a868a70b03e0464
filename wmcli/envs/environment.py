"""From settings to an environment, and to the block that says exactly how it was played."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium

from wmcli.envs import atari
from wmcli.envs.catch import CATCH_ID
from wmcli.envs.checked import Checked, one_line, run
from wmcli.envs.delayed_copy import DELAYED_COPY_ID
from wmcli.envs.frames import Frames
from wmcli.envs.grid_world import GRID_WORLD_GOAL_ID, GRID_WORLD_ID
from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.tasks import TASKS
from wmcli.errors import EnvironmentFault, UsageError


def make(settings: EnvironmentSettings, *, train: bool) -> gymnasium.Env:
    """Open an environment with frames (size, size, 3) uint8 and actions 0 .. n-1, seeded by `reset(seed=...)`.

    Args:
        settings: Of the environment.
        train: Use the training rules of an Atari protocol, else its test rules.

    Raises:
        UsageError: The id is unknown, a package is missing, the protocol does not fit, or wm cannot use its
            observations or actions.
        EnvironmentFault: The environment fails, now or later.
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
            return Checked(atari.Atari(game, settings.size, settings.protocol, train=train), settings.id)
        except (OSError, gymnasium.error.Error) as error:
            raise UsageError(f"{settings.id}: it does not open: {one_line(error)}") from error
    if game is not None:
        raise UsageError(
            f"environment.id = '{settings.id}' is an Atari game, which needs an Atari protocol: "
            f"--set environment.protocol=rem"
        )
    env = _open_plain(settings.id)
    return run(lambda: f"{settings.id}: reading its spaces", lambda: Frames(Checked(env, settings.id), settings.size))


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
        block["action_meanings"] = run(lambda: f"{settings.id}: get_action_meanings()", lambda: [*map(str, meanings())])
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
    """Return the rows of `wm envs`: id, protocols and description."""
    small = {
        CATCH_ID: "catch a falling ball: learns in minutes on a CPU",
        DELAYED_COPY_ID: "repeat the cue of three frames ago: a test of memory",
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
        _import(identifier, module)
    if name not in gymnasium.registry:
        near = _near(name, list(gymnasium.registry))
        hint = f"did you mean '{near}'?" if near else "list them with: wm envs"
        if "/" in name and not colon:
            hint += f" An id of another package needs it imported first: --set environment.id=package:{name}"
        if colon:
            hint += f" '{module}' was imported from {getattr(sys.modules[module], '__file__', None)}"
        raise UsageError(f"environment.id: no environment called '{name}'; {hint}")
    if str(gymnasium.registry[name].entry_point).startswith("ale_py"):
        raise UsageError(f"'{name}' is Atari, which needs an Atari protocol: --set environment.protocol=rem")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there is a newer version of it: the id is explicit
        return run(lambda: f"{name}: opening it", gymnasium.make, name, disable_env_checker=True)


def _import(identifier: str, module: str) -> None:
    """Import the module of `module:Id`, from the current folder if nothing installed has its name.

    The folder stays on sys.path: the environment may import its neighbors later, and a process that collects inherits
    it.
    """
    if not module or module.startswith("."):
        raise UsageError(f"environment.id = '{identifier}': write it as module:Id, for example ocean:Fish-v0")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        run(lambda: f"environment.id = '{identifier}': importing '{module}'", importlib.import_module, module)
    except EnvironmentFault as fault:
        error = fault.__cause__
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
            raise UsageError(
                f"environment.id = '{identifier}': cannot import '{module}': it is neither installed nor in the current"
                f" folder {folder}; cd to the folder that holds it, or run with PYTHONPATH=FOLDER"
            ) from error
        if isinstance(error, ImportError):
            raise UsageError(f"environment.id = '{identifier}': cannot import '{module}': {one_line(error)}") from error
        raise


def _near(word: str, names: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.7)), None)
