"""Words in the place of numbers that follow from a memory task.

A preset serves tasks whose episodes have different lengths. So it says `sequence_length = "episode"` and
`updates = "50 epochs"`. Settings in force hold the numbers alone: they are what a run is bound to and what identifies a
job, whichever way they were given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wmcli.envs.tasks import TASKS
from wmcli.settings.sections import EpisodesCollectSettings
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

EPISODE = "episode"
EPOCHS = re.compile(r"([1-9]\d{0,5}) epochs?")


def in_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the words in `dynamics` by numbers.

    Args:
        values: Plain values of all settings, possibly without those at their defaults.

    Returns:
        The values: `sequence_length` "episode" as the frames of an episode, `updates` "N epochs" as the updates that
            learn from each training frame N times on average, to the nearest update but one at least.

    Raises:
        ValueError: The environment has no such episodes, or these dynamics no such rows.
    """
    dynamics = values.get("dynamics")
    if not isinstance(dynamics, Mapping):
        return dict(values)
    dynamics = dict(dynamics)
    if dynamics.get("sequence_length") == EPISODE:
        dynamics["sequence_length"] = _episode(values, "dynamics.sequence_length = 'episode'", "sequence_length=250")
    epochs = EPOCHS.fullmatch(updates) if isinstance(updates := dynamics.get("updates"), str) else None
    if epochs:
        dynamics["updates"] = _updates(values, dynamics, int(epochs[1]))
    return {**values, "dynamics": dynamics}


def _episode(values: Mapping[str, Any], said: str, example: str) -> int:
    environment = values.get("environment")
    name = environment.get("id") if isinstance(environment, Mapping) else None
    if name not in TASKS:
        raise ValueError(
            f"{said} counts the frames of an episode, which only memory tasks know beforehand, and environment.id ="
            f" {name!r} is none: set dynamics.{example}"
        )
    return TASKS[name].context + TASKS[name].query


def _updates(values: Mapping[str, Any], dynamics: Mapping[str, Any], epochs: int) -> int:
    said, example = f"dynamics.updates = '{epochs} epochs'", "updates=1000"
    episode = _episode(values, said, example)
    collect = values.get("collect")
    collect = collect if isinstance(collect, Mapping) else {}
    if dynamics.get("kind") != "latent" or collect.get("policy") not in ("scripted", "recorded"):
        raise ValueError(
            f"{said} counts how often dynamics of kind 'latent' learn from collect.episodes episodes, and here is"
            f" another kind, or collect.policy = learned, which counts steps: set dynamics.{example}"
        )

    def number(section: Any, table: Mapping[str, Any], key: str) -> int:
        value = table.get(key, section.model_fields[key].default)
        return value if isinstance(value, int) and value > 0 else 1  # what is wrong with it, validation says

    rows, across_ends = (
        dynamics.get(key, LatentWorldModelSettings.model_fields[key].default) for key in ("rows", "across_ends")
    )
    row: float = number(LatentWorldModelSettings, dynamics, "sequence_length")
    if rows == "episodes":
        row = episode
    elif rows == "windows" and not across_ends:
        row = _frames_of_window(episode, int(row))
    frames = number(EpisodesCollectSettings, collect, "episodes") * episode
    return max(1, round(epochs * frames / (number(LatentWorldModelSettings, dynamics, "batch") * row)))


def _frames_of_window(episode: int, length: int) -> float:
    """Return the mean number of frames in the windows of an episode: the last ones are padded behind it."""
    windows = episode - LatentWorldModel.min_segment + 1
    return sum(min(length, episode - begin) for begin in range(windows)) / windows
