"""Weights of rows: what a row contributes to the loss is the gradient of its weight."""

from __future__ import annotations

import copy

import pytest
import test_cells
import test_latent
import test_muzero
import test_token
import test_unizero
import torch
from torch.testing import assert_close

MAKES = {
    "cells": lambda: (test_cells.make("retnet"), test_cells.experience(*test_cells.segment())),
    "muzero": lambda: (test_muzero.make(), test_muzero.segment(searched=test_muzero.some(0.7))),
    "token": lambda: (test_token.make("retnet", ensemble=2), test_token.experience()),
    "latent": lambda: (test_latent.make("retnet", free_nats=0.0, ensemble=2), test_latent.segment()),
    "latent, free nats": lambda: (test_latent.make("retnet", free_nats_of="each"), test_latent.segment()),
    "unizero": lambda: (test_unizero.make("retnet"), test_unizero.segment(searched=test_unizero.some(0.7))),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_loss_is_the_sum_of_what_rows_contribute(name: str) -> None:
    """It is linear in the weights, so every part of it is weighed."""
    model, batch = MAKES[name]()
    random, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())

    def loss(weight: torch.Tensor | None) -> torch.Tensor:
        torch.set_rng_state(random)
        model.load_state_dict(state)
        return model.loss(batch if weight is None else batch._replace(weight=weight.expand_as(batch.valid)))[0]

    plain, weight = loss(None), torch.ones(len(batch.valid), 1, requires_grad=True)
    total = loss(weight)
    assert_close(total, plain)
    total.backward()
    assert weight.grad is not None
    assert_close(weight.grad.sum(), total)
    assert (weight.grad != weight.grad[0]).any()
    for row in range(len(weight)):  # a row of no weight leaves out what it contributes
        without = torch.ones_like(weight)
        without[row] = 0
        assert_close(loss(without), total - weight.grad[row, 0])
