"""What DreamerV3's public code gave for weights and inputs that formulas make: core, losses, two-hot values, optimizer.

danijar/dreamerv3 (Hafner et al. 2023, arXiv 2301.04104), commit e3f0224, computed in float32. That code's percentiles
interpolate between returns and its learning rate rises from 0, so both stand still here.

B windows, K frames, T time (elements), D width, H hidden width, F features.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from formulas import filled, numbers
from torch import Tensor, nn
from torch.testing import assert_close

from wmcli.backbones import build
from wmcli.backbones.block_gru import BlockGRUSettings
from wmcli.controllers.actor_critic import ActorCritic, ActorCriticSettings, FeatureRollout, ReplayedFrames
from wmcli.nn import two_hot
from wmcli.nn.mlp import RMSNorm
from wmcli.spaces import ActionSpace, Continuous, Discrete
from wmcli.training.optim import build_optimizer, clip_adaptively

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def norms(named: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(gradient.norm()) for name, gradient in named.items()}


def test_the_core_and_its_projections():
    """Four steps of two hidden layers in three blocks: the last state, and the gradients of a weighted sum."""
    settings = BlockGRUSettings(width=12, layers=2, blocks=3, hidden_size=4, input_width=8)
    core: Any = filled(build(settings, 16, 1).double())
    inputs = {"latent": 6, "action": 3}
    stem = nn.ModuleDict({k: nn.Sequential(nn.Linear(n, 4), RMSNorm(4, 1e-4), nn.SiLU()) for k, n in inputs.items()})
    filled(stem.double())
    latent, action = numbers(2, 4, 2, 3, phase=1).flatten(2), (1.2 * numbers(2, 4, 3, phase=2)).clamp(-1, 1)
    y, _ = core(torch.cat((stem["latent"](latent), stem["action"](action)), -1), numbers(2, 12, phase=3))
    want = """0.39935925602912903 0.18140195310115814 0.1004127562046051 -0.16136181354522705 -0.05284469574689865
        -0.04307105392217636 0.10835536569356918 0.2570455074310303 0.3547351658344269 -0.1526951640844345
        0.04416096210479736 0.2173336297273636"""
    assert_close(y[1, 3], torch.tensor([float(each) for each in want.split()], dtype=torch.float64), **CLOSE)
    (y * numbers(2, 4, 12, phase=4)).sum().backward()
    got = {name: weight.grad for part in (core, stem) for name, weight in part.named_parameters()}
    assert norms(got) == pytest.approx(
        {
            "gates.bias": 1.2186533212661743,
            "gates.weight": 0.9418742060661316,
            "hidden.0.bias": 0.5004197955131531,
            "hidden.0.weight": 1.1261706352233887,
            "norms.0.weight": 0.13873189687728882,
            "hidden.1.bias": 0.38210487365722656,
            "hidden.1.weight": 0.604611337184906,
            "norms.1.weight": 0.12990468740463257,
            "projection.bias": 0.12721285223960876,
            "projection.weight": 0.1908896416425705,
            "projection_norm.weight": 0.031078914180397987,
            "latent.0.bias": 0.05953097343444824,
            "latent.0.weight": 0.18329055607318878,
            "latent.1.weight": 0.08652906864881516,
            "action.0.bias": 0.2260216772556305,
            "action.0.weight": 0.18346846103668213,
            "action.1.weight": 0.07962598651647568,
        },
        rel=2e-5,
    )


# -- actor and critic --------------------------------------------------------------------------------------------------

OF_CRITIC = {
    "critic.3.bias": 0.27864232659339905,
    "critic.3.weight": 0.4471897780895233,
    "critic.0.bias": 0.45902538299560547,
    "critic.0.weight": 0.5835301876068115,
    "critic.1.weight": 0.43432891368865967,
}
GRADIENTS = {
    "discrete": {
        "actor.6.bias": 0.08267612755298615,
        "actor.6.weight": 0.12395059317350388,
        "actor.0.bias": 0.08613427728414536,
        "actor.0.weight": 0.1767445057630539,
        "actor.3.bias": 0.04200174659490585,
        "actor.3.weight": 0.12000317126512527,
        "actor.1.weight": 0.03889795392751694,
        "actor.4.weight": 0.015313730575144291,
    },
    "continuous": {
        "actor.6.bias": math.hypot(0.38135868310928345, 0.04328427091240883),  # there of mean and deviation
        "actor.6.weight": math.hypot(0.5608032941818237, 0.060089122503995895),
        "actor.0.bias": 0.2340274602174759,
        "actor.0.weight": 0.3945295214653015,
        "actor.3.bias": 0.2858988642692566,
        "actor.3.weight": 0.34302082657814026,
        "actor.1.weight": 0.12253495305776596,
        "actor.4.weight": 0.28179052472114463,
    },
}
SPACES: dict[str, ActionSpace] = {"discrete": Discrete(3), "continuous": Continuous((-1.0, -1.0), (1.0, 1.0))}
TOTAL = {"discrete": 6.456896763920504, "continuous": 6.995838134436575}
POLICY = {"discrete": 0.2237739691445737, "continuous": 0.7627153396606445}  # the entropy bonus included


@pytest.mark.parametrize("kind", SPACES)
def test_the_losses_of_actor_and_critic(kind):
    """Imagined and replayed: 2 windows of 4 frames, 3 actions from each. One episode terminates, one is cut off."""
    settings = ActorCriticSettings(
        actor_layers=2,
        actor_width=8,
        critic_layers=1,
        critic_width=6,
        norm_eps=1e-4,
        initialization="fan-in",
        normalize_inputs=False,
        start="posterior",
        slow_target="values",
        weigh_by_continuation=True,
        expected_continuation=True,
        two_hot="symexp",
        discount=0.9,
        trace_decay=0.7,
        entropy_weight=0.02,
        starts=4,
        replay_weight=0.3,
    )
    controller: Any = filled(ActorCritic(settings, (10,), SPACES[kind], window=4).double()).eval()
    with torch.no_grad():
        for critic in (controller.critic, controller.slow_critic):
            critic[-1].bias.sub_(0.15 * (torch.arange(255) - 127).abs())  # values of the order of 1
        controller.return_range.low.fill_(-1.5)
        controller.return_range.high.fill_(1.0)
    drawn = numbers(8, 4, 2, phase=8)[:, :-1]
    action = drawn if kind == "continuous" else ((drawn[..., 0] + 1) * 1.4999).long()
    continuation = 0.5 + 0.5 * numbers(8, 4, phase=7).square()
    continuation[:, 0] = 1
    # There rewards and flags belong to the frame that they lead to; the episodes' last frames are closing ones.
    last, terminated = torch.zeros(2, 2, 4, dtype=torch.bool)
    last[0, 2] = terminated[0, 1] = last[1, 1] = True
    rollout = FeatureRollout(
        numbers(8, 4, 10, phase=5),
        action,
        numbers(8, 4, phase=6),
        torch.zeros(8, 4, dtype=torch.bool),
        torch.zeros(8, 4),
        torch.ones(8, dtype=torch.bool),
        continuation,
        ReplayedFrames(numbers(2, 4, phase=9).roll(-1, 1), terminated, ~last),
    )
    total, metrics = controller.loss(rollout)
    total.backward()
    assert float(total.detach()) == pytest.approx(TOTAL[kind], rel=2e-6)
    assert float(metrics["value_loss"] + metrics["slow_loss"]) == pytest.approx(4.787966526422065, rel=2e-6)
    assert float(metrics["replay_loss"]) == pytest.approx(4.817187561179551, rel=2e-6)
    assert float(metrics["imagined_return"]) == pytest.approx(-0.26874011754989624, rel=2e-5)
    assert float(metrics["policy_loss"] - 0.02 * metrics["entropy"]) == pytest.approx(POLICY[kind], rel=2e-5)
    learned = {name: weight.grad for name, weight in controller.named_parameters() if weight.requires_grad}
    assert norms(learned) == pytest.approx(GRADIENTS[kind] | OF_CRITIC, rel=5e-5)


def test_two_hot_in_the_space_of_rewards():
    logits = (3 * numbers(3, 255, phase=10)).float()
    decoded = two_hot.decode(logits, "symexp")
    assert_close(decoded, torch.tensor([6030341.0, 13808860.0, -810472.1875]), rtol=5e-6, atol=0)
    losses = two_hot.loss(logits, torch.tensor([0.3, -17.0, 1234.5]), "symexp")
    assert_close(losses, torch.tensor([6.856834479018161, 5.297378171297481, 5.53226936213774]), rtol=1e-6, atol=0)


def test_laprop_with_adaptive_clipping():
    """Four updates of two tensors. One begins at 0; the gradient of the other falls by a factor of 9 each time."""
    weights = [nn.Parameter(numbers(3, 4, phase=11)), nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    optimizer = build_optimizer("laprop", weights, 0.01, 0.0)
    for k in range(4):
        weights[0].grad, weights[1].grad = 3.0 ** (2 - 2 * k) * numbers(3, 4, phase=12 + k), numbers(5, phase=22 + k)
        clip_adaptively(weights, 0.3)
        optimizer.step()
    want = """-0.768063485622406 -0.6738168597221375 -0.4614552855491638 -0.1836121380329132 0.28562864661216736
        0.9398251175880432 -0.3691085875034332 0.4213133156299591 -0.5685497522354126 0.4548689126968384
        -0.31160059571266174 -0.9613434672355652 0.042602118104696274 0.0376286543905735 0.01929527334868908
        -0.050924308598041534 -0.04093702882528305"""
    got = torch.cat([weight.detach().flatten() for weight in weights])
    assert_close(got, torch.tensor([float(each) for each in want.split()], dtype=torch.float64), **CLOSE)
