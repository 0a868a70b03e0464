"""Any backbone with any kind of world model: one training step, one imagined step and one rollout of each pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_latent
import test_token
import test_unizero
import torch
from small_backbones import NAMES
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from watching import DEVICES, Replayable, record_without_a_graph

from wmcli.backbones import BACKBONES, map_state
from wmcli.controllers.actor_critic import ActorCritic, ActorCriticSettings
from wmcli.controllers.base import Uniforms
from wmcli.controllers.reinforce import ReinforceController, ReinforceSettings
from wmcli.kernels.dispatch import using
from wmcli.training.graph import WARM_UPS, RecordedFunction
from wmcli.training.optim import build_optimizer, update
from wmcli.world_models.base import Batch, WorldModel
from wmcli.world_models.token import TokenWorldModel

pytestmark = pytest.mark.matrix

STEPS = 7  # more than the backbones with a limited number of positions have room for


def _latent(backbone: str) -> tuple[WorldModel, Batch]:
    settings = {"dropout": 0.1, "free_nats": 0.0, "imagined_termination": "sampled"}
    return test_latent.make(backbone, **settings), test_latent.segment()


def _token(prediction: str) -> Callable[[str], tuple[WorldModel, Batch]]:
    def make(backbone: str) -> tuple[WorldModel, Batch]:
        model = test_token.make(backbone, prediction=prediction, observation_burn_in=1, context=1)
        return model, test_token.experience()

    return make


def _unizero(backbone: str) -> tuple[WorldModel, Batch]:
    searched = test_unizero.some(0.7)
    return test_unizero.make(backbone, dropout=0.1), test_unizero.segment(searched=searched)


MODELS = {
    "token, parallel": _token("pop"),
    "token, sequential": _token("sequential"),
    "latent": _latent,
    "unizero": _unizero,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backbone", NAMES)
def test_a_training_step_and_an_imagined_step(backbone: str, kind: str) -> None:
    model, batch = MODELS[kind](backbone)
    assert isinstance(model.backbone, BACKBONES[backbone])
    optimizer = build_optimizer("adamw", model.parameter_groups(), 3e-3, 0.01)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)  # the same dropout and the same draws each time
        return model.train().loss(batch)[0]

    before = loss()
    for _ in range(3):
        norm = update(optimizer, loss(), 100.0)
        assert norm.isfinite() and norm > 0
    assert loss() < before
    model.after_update()  # only now: a target that follows moves what is to be learned
    _check_imagination(model.eval(), batch)


def _check_imagination(model: WorldModel, batch: Batch) -> None:
    latent = batch.inputs if model.frozen_encoder else model.encode(batch.inputs)
    rows = len(latent)
    features, state = model.observe(latent[:, :3], batch.action[:, :3], batch.is_first[:, :3])
    assert features.shape == (rows, 3, *model.feature_shape)
    for _ in range(2):
        imagined, state = model.imagine(state, batch.action[:, 3])
        assert imagined.latent.shape == latent[:, 0].shape and imagined.latent.dtype == latent.dtype
        assert imagined.reward.shape == imagined.terminated.shape == (rows,)
        assert imagined.reward.isfinite().all() and imagined.terminated.dtype == torch.bool
        assert model.features(state).shape == (rows, *model.feature_shape)
        assert torch.equal(model.latent(state), imagined.latent)


CONTROLLERS = {
    "reinforce": lambda model: ReinforceController(
        ReinforceSettings(width=6, latent_channels=(4,), burn_in=2, imagination_horizon=STEPS),
        model.feature_shape,
        16,
        model.action_space,
    ),
    "actor-critic": lambda model: ActorCritic(
        ActorCriticSettings(actor_width=5, critic_width=5, imagination_horizon=STEPS),
        model.feature_shape,
        model.action_space,
        3,
    ),
}


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backbone", NAMES)
def test_a_rollout_is_a_function_of_its_arguments(backbone: str, kind: str, controller: str) -> None:
    """It can be recorded and replayed: nothing is drawn but the noise, nothing waited for, nothing left behind."""
    model, window = _window(backbone, kind)
    player = CONTROLLERS[controller](model)
    uniforms = player.draw_uniforms(model, window)
    player.imagine(model, window, uniforms)  # as before a recording: fills the tables that all models share
    before = torch.get_rng_state()
    with Replayable():
        want = player.imagine(model, window, uniforms)
    assert torch.equal(torch.get_rng_state(), before)
    other = player.imagine(model, window, Uniforms(*(1 - part for part in uniforms)))
    assert not torch.equal(want.action, other.action)
    assert_close(player.imagine(model, window, uniforms), want, rtol=0, atol=0)
    for part in ("start", "action", "world"):  # each of them decides something
        if getattr(uniforms, part).numel():
            changed = player.imagine(model, window, uniforms._replace(**{part: 1 - getattr(uniforms, part)}))
            assert any(not torch.equal(*pair) for pair in zip(tree_leaves(changed), tree_leaves(want), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backbone", NAMES)
def test_a_recorded_rollout_is_the_rollout(
    backbone: str, kind: str, controller: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        record_without_a_graph(monkeypatch)
    model, window = _window(backbone, kind, device)
    player = CONTROLLERS[controller](model).to(device)
    for kernels in ("torch", "triton") if device == "cuda" else ("torch",):
        recorded = RecordedFunction(partial(player.imagine, model))
        for _ in range(WARM_UPS + 2):
            with using(kernels):
                uniforms = player.draw_uniforms(model, window)
                want = player.imagine(model, window, uniforms)
                assert_close(recorded(window, uniforms), want, rtol=0, atol=0)
            with torch.no_grad():  # as an optimizer does
                for parameter in player.parameters():
                    parameter.mul_(1.1)


def _window(backbone: str, kind: str, device: str = "cpu") -> tuple[WorldModel, Batch]:
    """A frozen model, and three real frames to imagine from."""
    model, batch = MODELS[kind](backbone)
    model = model.to(device).eval().requires_grad_(False)
    if isinstance(model, TokenWorldModel):
        model.tokenizer.to(device)
    batch = map_state(lambda part: part.to(device), batch)
    latent = batch.inputs if model.frozen_encoder else model.encode(batch.inputs)
    first, valid = torch.zeros_like(batch.is_first[:, :3]), torch.ones_like(batch.valid[:, :3])
    return model, Batch(latent[:, :3], *(part[:, :3] for part in batch[1:5]), first, valid)


def test_the_pairs_are_all_pairs() -> None:
    assert set(NAMES) == set(BACKBONES) and len(NAMES) >= 7
    assert all(isinstance(make("gru")[0], nn.Module) for make in MODELS.values())
