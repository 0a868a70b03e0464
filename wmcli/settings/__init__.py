"""The settings of a run: all sections in one tree, and how a preset and overrides become it."""

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
