"""Open-loop rollouts against a step-by-step loop, for models that draw in different ways."""

from __future__ import annotations

import pytest
import test_cells
import test_latent
import test_unizero
import torch
from torch.testing import assert_close

from wmcli.world_models.open_loop import open_loop

B, T = 3, 6
MAKES = {
    "latent": lambda: (test_latent.make("retnet"), test_latent.frames(B, T)),
    "cells": lambda: (test_cells.make("retnet", sequence_length=8, context=3), test_cells.played(T)[0]),
    "unizero": lambda: (test_unizero.make("retnet"), test_unizero.frames(B, T)),
}


@pytest.mark.parametrize("context", [1, 3, T])
@pytest.mark.parametrize("name", MAKES)
@torch.no_grad()
def test_it_observes_then_imagines_under_the_given_actions(name, context):
    model, frames = MAKES[name]()
    model.eval()
    action = torch.randint(model.action_space.count, (len(frames), T))
    latent = model.encode(frames)[:, :context]

    torch.manual_seed(5)
    features, steps = open_loop(model, latent, action)

    torch.manual_seed(5)
    reset = torch.tensor([[True] + [False] * (context - 1)]).expand(len(frames), -1)
    want, state = model.observe(latent, action[:, :context], reset)
    assert torch.equal(features[:, :context], want)
    assert len(steps) == T - context and features.shape[:2] == (len(frames), T)
    for t, step in enumerate(steps, start=context):
        imagined, state = model.imagine(state, action[:, t - 1])
        assert_close(step, imagined, rtol=0, atol=0)
        assert torch.equal(features[:, t], model.features(state))


def test_options_reach_the_model():
    """The likeliest rollout depends on no draw."""
    model, frames = MAKES["latent"]()
    model.eval()
    latent, action = model.encode(frames)[:, :2], torch.zeros(B, T, dtype=torch.int64)
    likeliest = [open_loop(model, latent, action, likeliest=True)[0] for _ in range(2)]
    drawn = [open_loop(model, latent, action)[0] for _ in range(2)]
    assert torch.equal(*likeliest) and not torch.equal(*drawn)
    assert not likeliest[0].requires_grad
