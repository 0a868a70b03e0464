"""What public code gave for weights and inputs that formulas make, so that ours can be held to it without that code.

LightZero (Niu et al. 2023, arXiv 2310.08348), version 0.2.0: UniZero, MuZero, their losses and targets, the search in
C++. "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946), commit 7cc5e3a: attention priors.

D width, T time (elements or frames), B batch, A actions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from wmcli.backbones import BackboneSettings, build
from wmcli.controllers.mcts import MCTSSettings, SearchNoise, search
from wmcli.world_models.base import Batch, Prediction, Targets
from wmcli.world_models.muzero import MuZero, MuZeroSettings
from wmcli.world_models.planning import UniZero, UniZeroSettings

A = 3


def numbers(*shape: int, phase: int = 0) -> Tensor:
    """In [-1, 1], float64, without a pattern that a matrix would notice, and exact."""
    i = torch.arange(math.prod(shape))
    return (((31 * i * i + 17 * i + 101 * phase) % 1009).double() / 504 - 1).view(shape)


@torch.no_grad()
def filled(model: nn.Module) -> nn.Module:
    """Every weight and statistic from the place of its name in the alphabet, of a size that keeps outputs near 1."""
    for phase, (name, value) in enumerate(sorted(model.state_dict().items())):
        new = numbers(*value.shape, phase=phase)
        if ".raw_" in name:
            value.copy_(2 + 1.5 * new)  # means, deviations and spans
        elif value.ndim > 1:
            value.copy_(new * math.sqrt(3 / value[0].numel()))
        elif value.ndim == 1:
            value.copy_(0.3 * new + name.endswith(("norm.weight", "var")) * 1.0)
    return model


def backbone(width: int, layers: int, max_length: int, **prior) -> nn.Module:
    transformer = {"heads": 2, "activation": "gelu_tanh", "prior": prior}
    values = {"name": "transformer", "width": width, "layers": layers, "dropout": 0.0, "transformer": transformer}
    return build(BackboneSettings.model_validate(values), max_length=max_length, block=2)


# -- attention priors --------------------------------------------------------------------------------------------------

GAUSSIAN = {"kind": "gaussian", "form": "scale", "mean_bound": "clamp", "mean": 2.0}
TRIANGLE = {"kind": "span", "form": "scale", "span_mask": "triangle", "leak": True}


def transformer(**prior) -> tuple[nn.Module, Tensor]:
    return filled(backbone(8, 2, 6, **prior).double()), 1.5 * numbers(2, 6, 8, phase=7)


@torch.no_grad()
@pytest.mark.parametrize(
    ("prior", "how", "want"),
    [
        ({"kind": "none"}, "whole", []),
        ({"kind": "local", "window": 2}, "whole", []),
        (GAUSSIAN, "whole", []),
        (GAUSSIAN, "steps", []),
        (TRIANGLE, "whole", []),
        (TRIANGLE, "steps", []),
    ],
)
def test_attention(prior, how, want):
    """Outputs 0 to 2 of elements 0, 3 and 5 of the second row, in training; the leak is in whole sequences alone."""
    model, x = transformer(**prior)
    if how == "whole":
        y = model.train()(x, None)[0]
    else:
        state, outputs = model.initial_state(2), []
        for element in x.unbind(1):
            out, state = model.step(element, state)
            outputs.append(out)
        y = torch.stack(outputs, 1)
    assert_close(y[1, [0, 3, 5], :3].flatten(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=2e-6)


# -- UniZero -----------------------------------------------------------------------------------------------------------


def unizero() -> UniZero:
    settings = UniZeroSettings(horizon=3, td_steps=2, context=2, activation="gelu_tanh", discount=0.9)
    return filled(UniZero(settings, backbone(16, 1, 6), A, 64))


def frames(*lead: int) -> Tensor:
    return ((numbers(*lead, 64, 64, 3, phase=3) + 1) * 127).to(torch.uint8)


def two_rows() -> Batch:
    """One in the middle of an episode, one whose second frame is the last before the task ends."""
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    no, last = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    last[1, 1] = True
    action = torch.tensor([[0, 2, 1, 1, 0], [2, 0, 0, 0, 0]])
    targets = Targets(3 * numbers(2, 5, A).float(), torch.zeros(2, 5), valid)
    targets = targets._replace(policy=targets.policy.softmax(-1))
    return Batch(frames(2, 5), action, 5 * numbers(2, 5, phase=2).float(), last, no, no, valid, targets)


@torch.no_grad()
@pytest.mark.parametrize(("training", "want"), [(False, []), (True, [])])
def test_latents(training, want):
    """Numbers 0, 5, 10 and 15 of the latents of two frames."""
    z = unizero().train(training).encode(frames(2, 1))
    assert_close(z[:, 0, ::5].flatten(), torch.tensor(want), rtol=0, atol=2e-6)


def test_losses_of_unizero():
    total, log = unizero().train().loss(two_rows())
    want = {}
    assert_close({name: log[name].item() for name in want}, want, rtol=2e-5, atol=0)
    assert float(total) == pytest.approx(0.0, rel=2e-5)


# -- MuZero ------------------------------------------------------------------------------------------------------------


def muzero() -> MuZero:
    sizes = {"channels": (4, 8), "head_channels": 4, "head_width": 8, "projection_width": 12, "predictor_width": 6}
    return filled(MuZero(MuZeroSettings(**sizes, bound=2), A, 64))


@torch.no_grad()
def test_muzero():
    """Two frames' stacks, eval mode: logits of policy, value, and of the reward and the next value of actions 2 and 0,
    the last two bins of each; the first three numbers that predict the next projection."""
    model = muzero().eval()
    stack = (numbers(2, 4, 64, 64, phase=3).float() + 1) / 2
    state = model._represent(stack)
    after = model.dynamics(state, torch.tensor([2, 0]))
    values = [model.value_head(model.prediction(each))[:, -2:] for each in (state, after)]
    policy, reward = model.policy_head(model.prediction(state)), model.reward_head(after)[:, -2:]
    predicted = model.predictor(model.projection(after))[:, :3]
    want = []
    assert_close(torch.cat((policy, *values, reward, predicted), 1), torch.tensor(want), rtol=0, atol=2e-6)


# -- search ------------------------------------------------------------------------------------------------------------

PLACES = 11


def world() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Next places, rewards and policy logits (PLACES, A), and values (PLACES,)."""
    onward = (torch.arange(PLACES)[:, None] * 4 + torch.arange(A) * 3 + 1) % PLACES
    return onward, *(each.float() for each in (numbers(PLACES, A, phase=1), 2 * numbers(PLACES, A), 3 * numbers(PLACES)))


@pytest.mark.parametrize(
    ("explore", "visits", "value"),
    [(False, [], []), (True, [], [])],
)
def test_search_of_lightzero(explore, visits, value):
    onward, reward, logits, worth = world()
    noise = SearchNoise(dirichlet=torch.tensor([[0.1, 0.0, 0.9], [0.0, 1.0, 0.0], [0.5, 0.3, 0.2]]))

    def predict(place: Tensor) -> Prediction:
        return Prediction(logits[place], worth[place])

    def expand(state, action):
        after = onward[state[0], action]
        return reward[state[0], action], torch.zeros(3, dtype=torch.bool), predict(after), (after,)

    settings, place = MCTSSettings(rules="lightzero", simulations=50), torch.arange(3)
    found = search(predict(place), (place,), expand, settings, 0.997, noise if explore else None)
    assert found.visits.tolist() == visits
    assert_close(found.value, torch.tensor(value), rtol=0, atol=2e-5)
