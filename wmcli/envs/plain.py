"""Open environments by id: those of gymnasium, of other packages, and of the user's own modules, with wrappers."""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.util
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from wmcli.envs.checked import nearest, one_line, run
from wmcli.envs.control import PREFIX, ControlTask
from wmcli.envs.crafter_game import CrafterGame
from wmcli.envs.display import check_mujoco, prepare_mujoco, prepare_pygame
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import EnvironmentFault, UsageError

PARTIAL_VIEW = ("minigrid.wrappers:RGBImgPartialObsWrapper", "minigrid.wrappers:ImgObsWrapper")


class Family(NamedTuple):
    """Environments that need another package."""

    package: str
    """Imported first. The import registers those that gymnasium does not."""
    extra: str
    """Extra of wm that installs it."""
    wrappers: tuple[str, ...] = ()
    """Of observations, unless the settings name others or only a picture."""
    make: Callable[..., gymnasium.Env] | None = None
    """Makes one from the rest of its id; None where it is registered with gymnasium."""
    mujoco: bool = False
    """Whether MuJoCo renders its pictures."""


FAMILIES = {
    PREFIX: Family("dm_control", "dmc", make=ControlTask, mujoco=True),
    "Crafter": Family("crafter", "crafter", make=lambda name, **kwargs: CrafterGame(**kwargs)),
    "MiniGrid-": Family("minigrid", "minigrid", PARTIAL_VIEW),
    "BabyAI-": Family("minigrid", "minigrid", PARTIAL_VIEW),
}
"""By their id, or by its beginning."""
MODULES = {
    "gymnasium.envs.box2d": Family("Box2D", "box2d"),
    "gymnasium.envs.mujoco": Family("mujoco", "mujoco", mujoco=True),
}
"""Those that gymnasium registers itself, by the modules that hold them."""
EXAMPLES = {
    "CartPole-v1": "gymnasium's own: classic control, toy texts",
    "LunarLander-v3": "gymnasium's Box2D games",
    "HalfCheetah-v5": "gymnasium's MuJoCo robots",
    "dmc/cartpole-balance": "DeepMind Control Suite: dmc/DOMAIN-TASK",
    "Crafter": "the game Crafter",
    "MiniGrid-Empty-5x5-v0": "Minigrid: MiniGrid-NAME-vN",
    "BabyAI-GoToRedBall-v0": "Minigrid: BabyAI-NAME-vN",
}
"""An environment of each family, and a description."""
NO_FAMILY = Family("", "")


def describe_families() -> dict[str, str]:
    """Return an id of each family, with a description that says what is missing."""

    def described(name: str, about: str) -> str:
        package, extra = _family(name)[1][:2]
        missing = package and importlib.util.find_spec(package) is None
        return f"{about}; needs: pip install 'wmcli[{extra}]'" if missing else about

    return {name: described(name, about) for name, about in EXAMPLES.items()}


def packages_of(identifier: str) -> list[str]:
    """Return the package that an environment comes from, if it is of a family."""
    return [package] if (package := _family(identifier)[1].package) else []


def wrappers_of(settings: EnvironmentSettings) -> tuple[str, ...]:
    """Return the wrappers around an environment: those of the settings, or of its family."""
    default = _family(settings.id)[1].wrappers if settings.observe != "render" else ()
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
    prepare_pygame()
    if family.mujoco:
        prepare_mujoco()
    if family.package:
        _import_package(settings.id, family)
    if family.make is None:
        _check_registered(name, module)
        make = partial(gymnasium.make, name, disable_env_checker=True)
    else:
        make = partial(family.make, name.removeprefix(prefix))
    kwargs = dict(settings.kwargs)
    if settings.observe != "observation":
        kwargs.setdefault("render_mode", "rgb_array")
        if family.mujoco:
            check_mujoco(settings.id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there is a newer version of it: the id is explicit
        warnings.filterwarnings("ignore", message=".*render_modes", category=UserWarning)  # told in one line
        env = _opened(name, settings, family, partial(make, **kwargs))
    for wrapper in wrappers_of(settings):
        env = _wrapped(name, wrapper, env)
    return env if settings.observe == "observation" else _with_pictures(name, env, settings, family)


def _family(identifier: str) -> tuple[str, Family]:
    """Return the family of an environment, and the beginning of its id."""
    module, _, name = identifier.rpartition(":")
    for start, family in FAMILIES.items():
        ours = family.make is None or not module
        if ours and (name == start or (name.startswith(start) and start[-1] in "/-")):
            return start, family
    spec = gymnasium.registry.get(name)
    place = str(spec.entry_point) if spec else ""
    return "", next((family for start, family in MODULES.items() if place.startswith(start)), NO_FAMILY)


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
        near = nearest(name, [*gymnasium.registry, *EXAMPLES])
        hint = f"did you mean '{near}'?" if near else "list them with: wm envs"
        if "/" in name and not module:
            hint += f" An id of another package needs it imported first: --set environment.id=package:{name}"
        if module:
            hint += f" '{module}' was imported from {getattr(sys.modules[module], '__file__', None)}"
        raise UsageError(f"environment.id: no environment called '{name}'; {hint}")
    if str(gymnasium.registry[name].entry_point).startswith("ale_py"):
        raise UsageError(f"'{name}' is Atari, which needs an Atari protocol: --set environment.protocol=rem")


def _opened(
    name: str, settings: EnvironmentSettings, family: Family, make: Callable[[], gymnasium.Env]
) -> gymnasium.Env:
    try:
        return run(lambda: f"{name}: opening it", make)
    except EnvironmentFault as fault:
        _check_installed(name, family, fault)
        cause, text = fault.__cause__, one_line(fault.__cause__).partition(" was raised from ")[0]
        if settings.observe != "observation" and "render_mode" in text:
            raise UsageError(f"environment.observe = {settings.observe}: {name} renders no pictures") from fault
        if isinstance(cause, TypeError | KeyError | ValueError) and settings.kwargs:
            given = ", ".join(settings.kwargs)
            raise UsageError(f"environment.kwargs: {name} does not open with {given}: {text}") from fault
        raise


def _check_installed(name: str, family: Family, fault: EnvironmentFault) -> None:
    """Raise UsageError where an environment failed because a package is missing."""
    if isinstance(fault.__cause__, gymnasium.error.DependencyNotInstalled | ImportError):
        remedy = f": pip install 'wmcli[{family.extra}]'" if family.extra else ""
        raise UsageError(f"{name} needs another package ({one_line(fault.__cause__)}){remedy}") from fault


def _wrapped(name: str, wrapper: str, env: gymnasium.Env) -> gymnasium.Env:
    """Put one wrapper of the settings around an environment."""
    function, arguments = _wrapper(wrapper)
    try:
        wrapped = run(lambda: f"{name}: wrapper {wrapper}", function, env, **arguments)
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, TypeError | ValueError | AssertionError):
            raise UsageError(
                f"environment.wrappers: {wrapper} does not fit {name}: {one_line(fault.__cause__)}; arguments are given"
                " as in --set 'environment.wrappers=[\"FrameStackObservation(stack_size=4)\"]'"
            ) from fault
        raise
    if not isinstance(wrapped, gymnasium.Env):
        raise UsageError(f"environment.wrappers: {wrapper} returns one {type(wrapped).__name__}, no environment")
    return wrapped


def _wrapper(text: str) -> tuple[Callable[..., gymnasium.Env], dict[str, Any]]:
    """Return a wrapper's class by `module:Class`, or by its name in gymnasium.wrappers, and its keyword arguments."""
    name, arguments = _call(text)
    module, colon, attribute = name.rpartition(":")
    if colon:
        _import(name, module, "environment.wrappers")
    place: Any = sys.modules[module] if colon else gymnasium.wrappers
    found = getattr(place, attribute, None)
    if not callable(found):
        near = nearest(attribute, [each for each in dir(place) if each[0].isupper()])
        hint = f"did you mean '{near}'?" if near else "give one of gymnasium.wrappers, or module:Class"
        raise UsageError(f"environment.wrappers: no wrapper called '{name}'; {hint}")
    return found, arguments


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """Split `Name(key=value, ...)`, or `Name` alone, into name and keyword arguments."""
    name, opening, arguments = text.partition("(")
    if not opening:
        return name, {}
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return name, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise UsageError(
            f"environment.wrappers: '{text}': write arguments as in FrameStackObservation(stack_size=4)"
        ) from None


def _with_pictures(name: str, env: gymnasium.Env, settings: EnvironmentSettings, family: Family) -> gymnasium.Env:
    """Add the rendered picture to the observations, or put it in their place."""
    keys: dict[str, Any] = {"render_only": settings.observe == "render"}
    if settings.observe == "both":
        keys["render_key"] = "render"
        if not isinstance(env.observation_space, gymnasium.spaces.Dict):
            keys["obs_key"] = "observation"

    def add() -> gymnasium.Env:
        env.reset(seed=0)
        env.render()  # MuJoCo's camera looks where the robot was in the first picture
        return gymnasium.wrappers.AddRenderObservation(env, **keys)

    if family.mujoco:
        atexit.register(_close, weakref.ref(env))  # or freeing its renderer prints errors
    try:
        return run(lambda: f"{name}: rendering it", add)
    except EnvironmentFault as fault:
        _check_installed(name, family, fault)
        raise


def _close(reference: weakref.ref[gymnasium.Env]) -> None:
    """Close an environment that is still there."""
    if (env := reference()) is not None:
        env.close()


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
