"""Checks before work begins: does the experience that is still to be collected fit the settings?"""

from __future__ import annotations

from typing import Literal

from wmcli import ranks
from wmcli.envs.tasks import TASKS
from wmcli.errors import MachineError, UsageError
from wmcli.memory import machine_memory
from wmcli.settings import Settings
from wmcli.trainers.batches import check_episode_fits


def check_rows(settings: Settings, *, is_held_out: bool = False) -> None:
    """Check that dynamics will have rows that hold their episodes, and validation episodes if they need some.

    Args:
        settings: Of the run.
        is_held_out: There are validation episodes that were not collected here.

    Raises:
        UsageError: They will not.
    """
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


def check_held_back(settings: Settings, part: Literal["validation", "test"], key: str, *, none: str) -> None:
    """Check that collecting holds back episodes of a part.

    Args:
        settings: Of the run.
        part: The part that is needed.
        key: The setting that needs it.
        none: Its value that needs none.

    Raises:
        UsageError: It holds back none.
    """
    policy = settings.collect.policy
    if policy == "learned":
        lacking = "collect.policy = learned holds none back: set collect.policy=scripted"
    elif not getattr(settings.collect, part):
        lacking = f"collect.{part} = 0: set collect.{part}=100"
    else:
        return
    raise UsageError(f"{key} needs {part} episodes, and {lacking}, or {key}={none}.")
