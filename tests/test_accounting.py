"""Memory of updates at paper size, by accounting on tensors without numbers."""

from __future__ import annotations

import pytest
import torch
from accounting import Alive, dynamics_update
from torch._subclasses.fake_tensor import FakeTensorMode


def test_what_is_alive_is_counted_once() -> None:
    with FakeTensorMode(), Alive() as alive:
        x = torch.zeros(100)  # 400 bytes
        weight = torch.ones(100, requires_grad=True)
        y = (x[:50] * weight[:50]).exp()  # a product of 200, and the result, which the backward pass keeps
        assert (alive.now, alive.peak) == (1000, 1200)
        y.sum().backward()
        assert weight.grad is not None
        del x, y
        assert alive.now == 800  # weight and gradient


@pytest.mark.slow
def test_an_update_of_s4wm_3d_fits_on_a_card_of_24_gb() -> None:
    """With its 37 GB of frames in host memory. All frames at once would take three times as much."""
    memory = dynamics_update("s4wm-3d")
    assert memory.moments == pytest.approx(2 * memory.weights, rel=1e-3)
    assert 4 * memory.weights < memory.peak < 8e9
