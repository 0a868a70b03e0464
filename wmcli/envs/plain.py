"""Open environments by id: those of gymnasium, of other packages, and of the user's own modules, with wrappers."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from wmcli.envs.checked import one_line, run
from wmcli.envs.control import PREFIX, ControlTask
from wmcli.envs.crafter_game import CrafterGame
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import EnvironmentFault, UsageError

PARTIAL_VIEW = ("minigrid.wrappers:RGBImgPartialObsWrapper", "minigrid.wrappers:ImgObsWrapper")


class Family(NamedTuple):
    """Environments of another package, by the beginning of their ids."""

    package: str
    """Imported first. Its import registers them."""
    extra: str
    """Extra of wm that installs it."""
    wrappers: tuple[str, ...] = ()
    """Of observations, unless the settings name others or a picture."""
    make: Callable[..., gymnasium.Env] | None = None
    """Makes one from the rest of its id; None where it is registered with gymnasium."""


FAMILIES = {
    PREFIX: Family("dm_control", "dmc", make=ControlTask),
    "Crafter": Family("crafter", "crafter", make=CrafterGame),
    "MiniGrid-": Family("minigrid", "minigrid", PARTIAL_VIEW),
    "BabyAI-": Family("minigrid", "minigrid", PARTIAL_VIEW),
}
NO_FAMILY = Family("", "")


def packages_of(identifier: str) -> list[str]:
    """Return the package that an environment comes from, if it is one of FAMILIES."""
    return [package] if (package := _family(identifier)[1].package) else []


def wrappers_of(settings: EnvironmentSettings) -> tuple[str, ...]:
    """Return the wrappers around an environment: those of the settings, or of its family."""
    default = _family(settings.id)[1].wrappers if settings.observe == "observation" else ()
    return settings.wrappers or default


def open_plain(settings: EnvironmentSettings) -> gymnasium.Env:
    """Open an environment with its keyword arguments, wrappers and rendered pictures.

    Raises:
        UsageError: The id, a wrapper or an argument is unknown, or a package is missing.
        EnvironmentFault: The environment fails.
    """
    module, colon, name = settings.id.rpartition(":")
    if colon:
        _import(settings.id, module)
    prefix, family = _family(settings.id)
    if family.package:
        _import_package(settings.id, family)
    if family.make is None:
        _check_registered(name, module)
    make = partial(gymnasium.make, name, disable_env_checker=True)
    if family.make is not None:
        make = partial(family.make, name.removeprefix(prefix))
    kwargs = dict(settings.kwargs)
    if settings.observe != "observation":
        kwargs.setdefault("render_mode", "rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there is a newer version of it: the id is explicit
        env = _opened(name, settings, partial(make, **kwargs))
    for wrapper in wrappers_of(settings):
        env = run(partial("{}: wrapper {}".format, name, wrapper), _wrapper(wrapper), env)
    return env if settings.observe == "observation" else _with_pictures(name, env, settings)


def _family(identifier: str) -> tuple[str, Family]:
    """Return the family of an environment, and the beginning of its id."""
    return next((each for each in FAMILIES.items() if identifier.startswith(each[0])), ("", NO_FAMILY))


def _import_package(identifier: str, family: Family) -> None:
    try:
        run(lambda: f"{identifier}: importing {family.package}", importlib.import_module, family.package)
    except EnvironmentFault as fault:
        raise UsageError(
            f"{identifier} needs the package {family.package}, and importing it fails ({one_line(fault.__cause__)}):"
            f" pip install 'wmcli[{family.extra}]'"
        ) from fault


def _check_registered(name: str, module: str) -> None:
    """Raise UsageError unless gymnasium knows an id; `module` was imported for it."""
    if name not in gymnasium.registry:
        if name.startswith("data/"):  # see wmcli.artifacts.environment
            raise UsageError(
                f"environment.id: '{name}' is imported data, which nobody can play; name a game with --env."
            )
        near = nearest(name, list(gymnasium.registry))
        hint = f"did you mean '{near}'?" if near else "list them with: wm envs"
        if "/" in name and not module:
            hint += f" An id of another package needs it imported first: --set environment.id=package:{name}"
        if module:
            hint += f" '{module}' was imported from {getattr(sys.modules[module], '__file__', None)}"
        raise UsageError(f"environment.id: no environment called '{name}'; {hint}")
    if str(gymnasium.registry[name].entry_point).startswith("ale_py"):
        raise UsageError(f"'{name}' is Atari, which needs an Atari protocol: --set environment.protocol=rem")


def _opened(name: str, settings: EnvironmentSettings, make: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    try:
        return run(lambda: f"{name}: opening it", make)
    except EnvironmentFault as fault:
        cause = fault.__cause__
        if isinstance(cause, gymnasium.error.DependencyNotInstalled):
            raise UsageError(f"{name}: {one_line(cause)}") from fault
        if isinstance(cause, TypeError) and settings.kwargs:
            given = ", ".join(settings.kwargs)
            raise UsageError(f"environment.kwargs: {name} does not take {given}: {one_line(cause)}") from fault
        raise


def _wrapper(name: str) -> Callable[[gymnasium.Env], gymnasium.Env]:
    """Return a wrapper's class by `module:Class`, or by its name in gymnasium.wrappers."""
    module, colon, attribute = name.rpartition(":")
    if colon:
        _import(name, module, "environment.wrappers")
    place: Any = sys.modules[module] if colon else gymnasium.wrappers
    found = getattr(place, attribute, None)
    if found is None:
        near = nearest(attribute, [each for each in dir(place) if each[0].isupper()])
        hint = f"did you mean '{near}'?" if near else "give one of gymnasium.wrappers, or module:Class"
        raise UsageError(f"environment.wrappers: no wrapper called '{name}'; {hint}")
    return found


def _with_pictures(name: str, env: gymnasium.Env, settings: EnvironmentSettings) -> gymnasium.Env:
    """Add the rendered picture to the observations, or put it in their place."""
    if settings.observe == "render":
        add = partial(gymnasium.wrappers.AddRenderObservation, render_only=True)
    elif isinstance(env.observation_space, gymnasium.spaces.Dict):
        add = partial(gymnasium.wrappers.AddRenderObservation, render_only=False, render_key="render")
    else:
        add = partial(
            gymnasium.wrappers.AddRenderObservation, render_only=False, render_key="render", obs_key="observation"
        )
    return run(lambda: f"{name}: rendering it", add, env)


def _import(identifier: str, module: str, key: str = "environment.id") -> None:
    """Import the module of `module:Id`, from the current folder if nothing installed has its name.

    The folder stays on sys.path: the environment may import its neighbors later, and a process that collects inherits
    it.
    """
    if not module or module.startswith("."):
        raise UsageError(f"{key} = '{identifier}': write it as module:Name, for example ocean:Fish-v0")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        run(lambda: f"{key} = '{identifier}': importing '{module}'", importlib.import_module, module)
    except EnvironmentFault as fault:
        error = fault.__cause__
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
            raise UsageError(
                f"{key} = '{identifier}': cannot import '{module}': it is neither installed nor in the current"
                f" folder {folder}; cd to the folder that holds it, or run with PYTHONPATH=FOLDER"
            ) from error
        if isinstance(error, ImportError):
            raise UsageError(f"{key} = '{identifier}': cannot import '{module}': {one_line(error)}") from error
        raise


def nearest(word: str, names: list[str]) -> str | None:
    """Return the name that a mistyped word may have meant."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.7)), None)
