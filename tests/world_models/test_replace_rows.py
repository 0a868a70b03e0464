"""Trajectories of different age in one batch: each row is imagined as it would be among rows of its own age."""

from __future__ import annotations

import pytest
import torch
from test_perceiving import CASES
from torch import Tensor
from torch.testing import assert_close

from wmcli.world_models.base import State, WorldModel

pytestmark = pytest.mark.matrix

BEFORE, AFTER = 2, 2  # imagined steps before rows are replaced, and after
CONTEXTS = [(case, 3) for case in CASES] + [(case, 1) for case in CASES if case.endswith("transformer")]
"""Each model, and the real frames that it starts from."""


@pytest.mark.parametrize(("case", "context"), CONTEXTS)
@torch.no_grad()
def test_replaced_rows_are_imagined_as_among_their_own_age_and_the_others_as_before(case: str, context: int) -> None:
    torch.manual_seed(7)
    make, draw = CASES[case]
    frames, others = draw()[:, :context], draw()[:, :context]
    model = make().eval()
    rows = len(frames)
    replaced = torch.tensor([2, 0])
    action = torch.randint(model.action_space.count, (rows, BEFORE + AFTER))
    numbers = torch.rand(rows, BEFORE + AFTER, model.uniforms_per_step)
    reset = torch.zeros(frames.shape[:2], dtype=torch.bool)
    reset[:, :2] = reset[0, -1] = True  # short episodes behind padding
    kept = sorted(set(range(rows)) - set(replaced.tolist()))

    state = _observed(model, frames, reset)
    for step in range(BEFORE):
        _, state = model.imagine(state, action[:, step], numbers[:, step])
    state = model.replace_rows(state, replaced[:1], _observed(model, others[:1], reset[:1]))
    state = model.replace_rows(
        state, replaced[1:], _observed(model, others[1:2], reset[1:2])
    )  # and once more in the same step
    got = _imagined(model, state, action[:, BEFORE:], numbers[:, BEFORE:])
    ages = _imagined(model, _observed(model, frames, reset), action, numbers)
    young = _imagined(
        model, _observed(model, others[:2], reset[:2]), action[replaced, BEFORE:], numbers[replaced, BEFORE:]
    )

    assert got.keys() == ages.keys() == young.keys()
    for name, value in got.items():
        _same(value[kept], ages[name][kept, BEFORE:])
        _same(value[replaced], young[name])


def _observed(model: WorldModel, frames: Tensor, reset: Tensor) -> State:
    action = torch.arange(frames.shape[1]).expand(frames.shape[:2]) % model.action_space.count
    numbers = torch.full((*frames.shape[:2], model.uniforms_per_frame), 0.5)
    return model.observe(model.encode(frames), action, reset, numbers)[1]


def _imagined(model: WorldModel, state: State, action: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    """Return all that is imagined, each (B, steps, ...)."""
    steps = []
    for step in range(action.shape[1]):
        imagined, state = model.imagine(state, action[:, step], numbers[:, step])
        steps.append({**imagined._asdict(), "features": model.features(state)})
    return {name: torch.stack([each[name] for each in steps], 1) for name, part in steps[0].items() if part is not None}


def _same(got: Tensor, want: Tensor) -> None:
    assert_close(got, want, rtol=1e-4, atol=2e-4)
