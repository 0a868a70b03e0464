"""Exact numbers of parameters of DreamerV3's sizes, against those of its public code (danijar/dreamerv3, e3f0224).

The public code counts no slow critic.
"""

from __future__ import annotations

import pytest

from wmcli.assemble import parameter_counts
from wmcli.settings import resolve
from wmcli.spaces import Spaces

# With 4 and with 18 actions, frames of 64 x 64 x 3.
SIZES = {
    "dreamer-1m": (686_198, 688_004),
    "dreamer": (10_491_590, 10_498_772),
    "dreamer-25m": (23_485_478, 23_496_244),
    "dreamer-50m": (41_644_934, 41_659_284),
    "dreamer-100m": (93_460_550, 93_482_068),
    "dreamer-200m": (165_938_438, 165_967_124),
    "dreamer-400m": (372_881_030, 372_924_052),
}


@pytest.mark.parametrize("preset", SIZES)
def test_all_parameters(preset: str) -> None:
    for actions, want in zip((4, 18), SIZES[preset], strict=True):
        found = parameter_counts(resolve(preset), Spaces.of_images(64, actions))
        assert found["dynamics"] + found["controller"] - found["controller.slow_critic"] == want


def test_the_parts_of_the_twelve_million() -> None:
    found = parameter_counts(resolve("dreamer"), Spaces.of_images(64, 4))
    posterior = (3072 * 256 + 2 * 256) + (256 * 512 + 512)
    assert found["dynamics.tokenizer"] == 220_416 + 1_272_003 + posterior  # encoder, decoder
    core = posterior + sum(found[f"dynamics.{part}"] for part in ("stem", "backbone", "prior_head"))
    assert core == 5_979_136
    assert (found["dynamics.reward_head"], found["dynamics.termination_head"]) == (721_407, 656_129)
    assert (found["controller.actor"], found["controller.critic"]) == (788_996, 853_503)
