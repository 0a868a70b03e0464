"""The settings of a run: all sections in one tree, resolved from a preset and overrides."""

from wmcli.settings.resolve import flatten, resolve
from wmcli.settings.sections import (
    MAX_EPISODES,
    EpisodesCollectSettings,
    EvaluationSettings,
    LearnedCollectSettings,
    Measure,
    RecordedCollectSettings,
    RunSettings,
)
from wmcli.settings.tree import Settings

__all__ = [
    "MAX_EPISODES",
    "EpisodesCollectSettings",
    "EvaluationSettings",
    "LearnedCollectSettings",
    "Measure",
    "RecordedCollectSettings",
    "RunSettings",
    "Settings",
    "flatten",
    "resolve",
]
