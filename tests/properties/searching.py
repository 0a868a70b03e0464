"""How much hypothesis searches: a little by default, the same in every run, and much where tests are slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def counts(few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with `examples`: few of them, and many where it is slow."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def searching(examples: int) -> settings:
    """Return the settings of a search: repeatable, without a database or a time limit for an example."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=QUIET,
        phases=(Phase.explicit, Phase.generate, Phase.target, Phase.shrink),
        print_blob=False,
    )
