"""What public code gave for weights and inputs that formulas make, so that ours can be held to it without that code.

LightZero (Niu et al. 2023, arXiv 2310.08348), version 0.2.0: UniZero, MuZero, their losses and targets, the search in
C++. "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946), commit 7cc5e3a: attention priors.

D width, T time (elements or frames), B batch, A actions.
"""

from __future__ import annotations

import pytest
import torch
from formulas import filled, numbers
from torch import Tensor, nn
from torch.testing import assert_close

from wmcli.backbones import build
from wmcli.backbones.transformer import TransformerSettings
from wmcli.controllers.mcts import search
from wmcli.kernels.tree_search import summarize
from wmcli.kernels.tree_search_lightzero import LightZeroNoise, lightzero_rule
from wmcli.world_models.base import Batch, Prediction, Targets
from wmcli.world_models.muzero import MuZero, MuZeroSettings
from wmcli.world_models.unizero import UniZero, UniZeroSettings

A = 3


def backbone(width: int, layers: int, max_length: int, **prior) -> nn.Module:
    sizes = {"width": width, "layers": layers, "dropout": 0.0, "heads": 2}
    settings = TransformerSettings.model_validate(sizes | {"activation": "gelu_tanh", "prior": prior})
    return build(settings, max_length=max_length, block=2)


# -- attention priors --------------------------------------------------------------------------------------------------

GAUSSIAN = {"kind": "gaussian", "form": "scale", "mean_bound": "clamp", "mean": 2.0}
TRIANGLE = {"kind": "span", "form": "scale", "span_mask": "triangle", "leak": True}


def transformer(**prior) -> tuple[nn.Module, Tensor]:
    return filled(backbone(8, 2, 6, **prior).double()), 1.5 * numbers(2, 6, 8, phase=7)


@torch.no_grad()
@pytest.mark.parametrize(
    ("prior", "whole", "steps"),
    [
        ({"kind": "none"}, [-0.887429, -1.190743, -0.266434, 0.192713, -1.888435, -0.617513], None),
        ({"kind": "local", "window": 2}, [0.046371, -2.432896, -0.358759, 0.584301, -1.907358, -0.515596], None),
        (GAUSSIAN, [-1.051492, -1.076765, -0.214683, -0.137148, -1.666638, -0.661631], None),
        (
            TRIANGLE,
            [-0.894323, -1.264852, -0.265854, 0.325268, -1.904129, -0.618586],
            [-0.965998, -1.105659, -0.364447, 0.300383, -1.850236, -0.673589],
        ),
    ],
)
def test_attention(prior, whole, steps):
    """Outputs 0 to 2 of elements 3 and 5, of a whole sequence in training and with a cache one by one, where nothing
    leaks. The second layer makes the leak of element 3 that of element 5 as well."""
    model, x = transformer(**prior)
    state, outputs = model.initial_state(2), []
    for element in x.unbind(1):
        y, state = model.step(element, state)
        outputs.append(y)
    for got, want in ((model.train()(x, None)[0], whole), (torch.stack(outputs, 1), steps or whole)):
        assert_close(got[1, [3, 5], :3].flatten(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=2e-6)


# -- UniZero -----------------------------------------------------------------------------------------------------------


def unizero() -> UniZero:
    settings = UniZeroSettings(
        sequence_length=4, td_steps=2, context=2, activation="gelu_tanh", discount=0.9, entropy_weight=0.2
    )
    return filled(UniZero(settings, backbone(16, 1, 8), A, 64))


def frames(*lead: int) -> Tensor:
    return ((numbers(*lead, 64, 64, 3, phase=3) + 1) * 127).to(torch.uint8)


def two_rows() -> Batch:
    """One in the middle of an episode, one whose third frame is the last before the task ends."""
    valid = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    no, last = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    last[1, 2] = True
    action = torch.tensor([[0, 2, 1, 1, 0, 2], [2, 0, 1, 1, 1, 1]])
    targets = Targets(3 * numbers(2, 6, A).float(), torch.zeros(2, 6), valid)
    targets = targets._replace(policy=targets.policy.softmax(-1))
    return Batch(frames(2, 6), action, 5 * numbers(2, 6, phase=2).float(), last, no, no, valid, targets)


@torch.no_grad()
@pytest.mark.parametrize(
    ("training", "want"),
    [
        (False, [0.226515, 0.049819, 0.104353, 0.139371, 0.219509, 0.052152, 0.108478, 0.138737]),
        (True, [0.109188, 0.132169, 0.137658, 0.020620, 0.054909, 0.021876, 0.023053, 0.021922]),
    ],
)
def test_latents(training, want):
    """Numbers 0, 5, 10 and 15 of the latents of two frames."""
    z = unizero().train(training).encode(frames(2, 1))
    assert_close(z[:, 0, ::5].flatten(), torch.tensor(want), rtol=0, atol=2e-6)


def test_losses_of_unizero():
    """With value targets from the replay buffer of the public code, and batch norms in eval mode."""
    total, log = unizero().eval().loss(two_rows())
    names = ("latent_loss", "reward_loss", "policy_loss", "value_loss")
    want = [0.324386, 4.398213, 1.308181, 4.885654, 11.183431]
    assert_close(torch.stack([*(log[name] for name in names), total.detach()]), torch.tensor(want), rtol=2e-5, atol=0)


# -- MuZero ------------------------------------------------------------------------------------------------------------


def muzero() -> MuZero:
    sizes = {"channels": (4, 8), "head_channels": 4, "head_width": 8, "projection_width": 12, "predictor_width": 6}
    return filled(MuZero(MuZeroSettings(**sizes, bound=2), A, 64))


@torch.no_grad()
def test_muzero():
    """Two stacks of frames, then actions 2 and 0, in eval mode: some logits, and what predicts a projection."""
    model = muzero().eval()
    state = model._represent((numbers(2, 4, 64, 64, phase=3).float() + 1) / 2)
    after = model.dynamics(state, torch.tensor([2, 0]))
    got = {
        "policy": model.policy_head(model.prediction(state)),
        "value": model.value_head(model.prediction(state))[:, :3],
        "reward": model.reward_head(after)[:, :3],
        "value after": model.value_head(model.prediction(after))[:, :3],
        "projection": model.predictor(model.projection(after))[:, :3],
    }
    want = {
        "policy": [[-0.133026, 0.049931, -0.119323], [-0.189265, 0.051932, -0.179075]],
        "value": [[-0.202315, -0.172258, -0.106485], [-0.196872, -0.163510, -0.097076]],
        "reward": [[-0.014056, -0.020785, -0.365129], [-0.019515, -0.026335, -0.370319]],
        "value after": [[-0.238489, -0.032402, -0.057020], [-0.337955, -0.126327, -0.238219]],
        "projection": [[-0.226075, -0.149645, -0.308446], [-0.260289, -0.224140, -0.190545]],
    }
    assert_close(got, {name: torch.tensor(rows) for name, rows in want.items()}, rtol=0, atol=2e-6)


# -- search ------------------------------------------------------------------------------------------------------------

PLACES = 11


def world() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Next places, rewards and policy logits (PLACES, A), and values (PLACES,)."""
    onward = (torch.arange(PLACES)[:, None] * 4 + torch.arange(A) * 3 + 1) % PLACES
    reward, logits, value = numbers(PLACES, A, phase=1), 2 * numbers(PLACES, A), 3 * numbers(PLACES)
    return onward, reward.float(), logits.float(), value.float()


@pytest.mark.parametrize(
    ("explore", "visits", "value"),
    [
        (False, [[4, 39, 7], [4, 2, 44], [10, 38, 2]], [0.146132, 0.581205, 0.238390]),
        (True, [[4, 33, 13], [4, 6, 40], [29, 19, 2]], [-0.117289, 0.047601, 0.432580]),
    ],
)
def test_search_of_lightzero(explore, visits, value):
    onward, reward, logits, worth = world()
    uniforms = LightZeroNoise(torch.tensor([[0.1, 0.0, 0.9], [0.0, 1.0, 0.0], [0.5, 0.3, 0.2]]))

    def predict(place: Tensor) -> Prediction:
        return Prediction(logits[place], worth[place])

    def expand(state, action):
        after = onward[state[0], action]
        return reward[state[0], action], torch.zeros(3, dtype=torch.bool), predict(after), (after,)

    place = torch.arange(3)
    rule, noise = lightzero_rule(), uniforms if explore else None
    output = summarize(search(predict(place), (place,), expand, rule, 50, 0.997, noise), rule)
    assert output.visits.tolist() == visits
    assert_close(output.value, torch.tensor(value), rtol=0, atol=2e-6)
