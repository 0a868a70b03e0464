"""Any backbone with either kind of world model: one training step and one imagined step of each pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_latent
import test_token
import torch
from small_backbones import NAMES
from torch import nn

from wmcli.backbones import BACKBONES
from wmcli.training.optim import build_optimiser, update
from wmcli.world_models.base import Batch, WorldModel


def _latent(backbone: str) -> tuple[WorldModel, Batch]:
    return test_latent.make(backbone, dropout=0.1, free_nats=0.0), test_latent.segment()


def _token(prediction: str) -> Callable[[str], tuple[WorldModel, Batch]]:
    def make(backbone: str) -> tuple[WorldModel, Batch]:
        model = test_token.make(backbone, prediction=prediction, observation_burn_in=1, context=1)
        return model, test_token.experience()

    return make


MODELS = {"token, parallel": _token("pop"), "token, sequential": _token("sequential"), "latent": _latent}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backbone", NAMES)
def test_a_training_step_and_an_imagined_step(backbone: str, kind: str) -> None:
    model, batch = MODELS[kind](backbone)
    assert isinstance(model.backbone, BACKBONES[backbone])
    optimiser = build_optimiser("adamw", model.parameter_groups(), 3e-3, 0.01)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)  # the same dropout and the same draws each time
        return model.train().loss(batch)[0]

    before = loss()
    for _ in range(3):
        norm = update(optimiser, loss(), 100.0)
        assert norm.isfinite() and norm > 0
    assert loss() < before
    _check_imagination(model.eval(), batch)


def _check_imagination(model: WorldModel, batch: Batch) -> None:
    latent = batch.latent if model.frozen_encoder else model.encode(batch.latent)
    rows = len(latent)
    features, state = model.observe(latent[:, :3], batch.action[:, :3], batch.first[:, :3])
    assert features.shape == (rows, 3, *model.feature_shape)
    for _ in range(2):
        imagined, state = model.imagine(state, batch.action[:, 3])
        assert imagined.latent.shape == latent[:, 0].shape and imagined.latent.dtype == latent.dtype
        assert imagined.reward.shape == imagined.terminated.shape == (rows,)
        assert imagined.reward.isfinite().all() and imagined.terminated.dtype == torch.bool
        assert model.features(state).shape == (rows, *model.feature_shape)
        assert torch.equal(model.latent(state), imagined.latent)


def test_the_pairs_are_all_pairs() -> None:
    assert set(NAMES) == set(BACKBONES) and len(NAMES) >= 7
    assert all(isinstance(make("gru")[0], nn.Module) for make in MODELS.values())
