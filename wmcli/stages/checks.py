"""Checks before work begins: does the experience that is still to be collected fit the settings?"""

from __future__ import annotations

from typing import Literal

from wmcli import ranks
from wmcli.envs.tasks import TASKS
from wmcli.errors import MachineError, UsageError
from wmcli.memory import machine_memory
from wmcli.settings import Settings
from wmcli.settings.sections import CollectSettings
from wmcli.trainers.batches import check_episode_fits

HELD_OUT_EVERY = "training.held_out_every"  # needs episodes, whoever plays them


def check_rows(settings: Settings, *, is_held_out: bool = False) -> None:
    """Check that dynamics will have rows that hold their episodes, and validation episodes if they need some.

    Args:
        settings: Of the run.
        is_held_out: There are validation episodes that were not collected here.

    Raises:
        UsageError: They will not.
    """
    if settings.training.held_out_every and not is_held_out:
        check_held_back(settings, "test", HELD_OUT_EVERY, none="0", played=True)
    if settings.dynamics.needs_validation and not is_held_out:
        check_held_back(settings, "validation", "dynamics.validate_every", none="0")
    check_episodes(settings)


def check_episodes(settings: Settings) -> None:
    """Raise UsageError if the episodes of a script are longer than the rows that dynamics learn from."""
    longest, task = settings.dynamics.longest_episode, TASKS.get(settings.environment.id)
    if longest is not None and task is not None and settings.collect.policy != "learned":
        check_episode_fits(task.context + task.query, longest)


def check_memory(settings: Settings) -> None:
    """Raise MachineError if training could not hold the frames of the episodes that a script is to play."""
    task = TASKS.get(settings.environment.id)
    if task is None or settings.collect.policy != "scripted":
        return
    episodes, frames = settings.collect.episodes, task.context + task.query
    size, memory = episodes * frames * task.side**2 * 3, machine_memory().total
    if size > memory:
        raise MachineError(
            f"collect.episodes = {episodes}: as many episodes of {frames:,} frames take {size / 1e9:,.0f} GB of memory"
            f" while dynamics learn, and this machine has {memory / 1e9:,.0f} GB: lower collect.episodes, to"
            f" {memory // (size // episodes) // 2:,} for instance."
        )


def check_batches(settings: Settings) -> None:
    """Raise UsageError if the batches of the models that learn cannot be shared out among the ranks."""
    sections = ["dynamics"]
    if settings.dynamics.takes_tokenizer:
        sections.append("tokenizer")
    if settings.controller.acts and not settings.controller.searches:
        sections.append("controller")
    for name in sections:
        if batch := getattr(getattr(settings, name), "batch", 0):
            ranks.own_count(batch, f"{name}.batch")


def check_held_back(
    settings: Settings, part: Literal["validation", "test"], key: str, *, none: str, played: bool = False
) -> None:
    """Check that collecting holds back episodes of a part.

    Args:
        settings: Of the run.
        part: The part that is needed.
        key: The setting that needs it.
        none: Its value that needs none.
        played: Whether games that a controller played do, too.

    Raises:
        UsageError: It holds back none.
    """
    learned = settings.collect.policy == "learned"
    name = f"collect.{_key(settings.collect, part)}"
    if learned and not played:
        lacking = "collect.policy = learned holds none back: set collect.policy=scripted"
    elif not held_back_by(settings.collect, part):
        lacking = f"{name} = 0: set {name}={5 if learned else 100}"
    else:
        return
    raise UsageError(f"{key} needs {part} episodes, and {lacking}, or {key}={none}.")


def held_back_by(collecting: CollectSettings, part: Literal["validation", "test"]) -> int:
    """Return the number of episodes, or games, of a part that a collect holds back."""
    return int(getattr(collecting, _key(collecting, part), 0))


def _key(collecting: CollectSettings, part: str) -> str:
    return f"{part}_games" if collecting.policy == "learned" else part
