"""What `wm run` measures at its end besides returns: the protocols of `evaluation.measures`."""

from __future__ import annotations

from wmcli.errors import UsageError
from wmcli.settings import Settings
from wmcli.settings.sections import Measure
from wmcli.stages.checks import check_held_back
from wmcli.stages.held_out import HELD_OUT
from wmcli.stages.memory_tasks import AUTOMATIC
from wmcli.stages.protocols import PROTOCOLS

WITHOUT_TEST_EPISODES = ("gridworld", "training")
"""Measures of what is played for them, or was played for training."""


def measures_of(settings: Settings) -> tuple[Measure, ...]:
    """Return the measures of `wm run`: those of the settings, or with "auto" those of memory tasks that fit but the
    probe."""
    measures = settings.evaluation.measures
    return _fitting(settings) if measures == "auto" else measures


def check_measures(settings: Settings) -> None:
    """Check that `wm run` can take its measures.

    Raises:
        UsageError: A measure does not fit, or needs test episodes and none are collected.
    """
    measures = measures_of(settings)
    for measure in measures:
        if reason := PROTOCOLS[measure].unfit(settings):
            fitting = ", ".join(_fitting(settings))
            remedy = f"auto, here {fitting}" if fitting else "[]"
            raise UsageError(f"evaluation.measures holds {measure}, which {reason}: set evaluation.measures={remedy}.")
    if needing := set(measures).difference(WITHOUT_TEST_EPISODES):
        played = needing == {HELD_OUT.name}
        check_held_back(settings, "test", "evaluation.measures", none="[]", played=played)


def _fitting(settings: Settings) -> tuple[Measure, ...]:
    return tuple(name for name in AUTOMATIC if PROTOCOLS[name].unfit(settings) is None)
