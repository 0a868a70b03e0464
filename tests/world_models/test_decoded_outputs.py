"""What planners decode to numbers comes of float32 logits, in training, in imagination and when frozen.

A search compares siblings whose values differ little, so that logits in bfloat16 would choose for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_backbones import small
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.controllers.mcts import MCTS, MCTSSettings
from wmcli.training.device import Machine
from wmcli.world_models.base import Batch, PlanningWorldModel
from wmcli.world_models.muzero import MuZero, MuZeroSettings
from wmcli.world_models.unizero import UniZero, UniZeroSettings

A, SIZE = 4, 16
CPU = torch.device("cpu")
DECODED = ("reward_head", "policy_head", "value_head", "termination_head")


def unizero() -> UniZero:
    settings = UniZeroSettings(sequence_length=4, td_steps=2, context=2, channels=(4, 6), predict_termination=True)
    model = UniZero(settings, small("transformer", max_length=8, block=2, width=32), A, SIZE)
    nn.init.normal_(model.action_embedding.weight)
    nn.init.normal_(model.encoder[2].weight, std=0.5)
    return model


def muzero() -> MuZero:
    narrow = {"head_channels": 4, "projection_width": 8, "predictor_width": 4}
    return MuZero(
        MuZeroSettings(frame_stack=2, unroll_steps=3, channels=(4, 6), bound=50, predict_termination=True, **narrow),
        A,
        SIZE,
    )


MODELS = pytest.mark.parametrize("make", [unizero, muzero])


@torch.no_grad()
def in_mid_training(make: Callable[[], PlanningWorldModel], seed: int = 0) -> PlanningWorldModel:
    """Heads as they become where rewards are rare: sure of about 0, with small differences."""
    torch.manual_seed(seed)
    model = make().eval()
    for name in DECODED:
        *_, last = getattr(model, name)
        if name != "policy_head":
            nn.init.normal_(last.weight, std=0.03)
            last.bias.fill_(-5)
        if last.out_features > A:
            last.bias[last.out_features // 2] = 5
    return model


def frames(*lead: int) -> Tensor:
    return torch.randint(256, (*lead, SIZE, SIZE, 3), dtype=torch.uint8)


def segment(model: PlanningWorldModel, rows: int = 2) -> Batch:
    shape = rows, model.segment
    no = torch.zeros(shape, dtype=torch.bool)
    return Batch(frames(*shape), torch.randint(A, shape), torch.rand(shape), no, no, no, ~no)


@MODELS
@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_layers_are_those_of_float32(make, frozen):
    model, machine = in_mid_training(make), Machine(CPU, "bfloat16", 1)
    nn.init.normal_(model.policy_head[-1].weight)
    weights = {name: copy.deepcopy(getattr(model, name)[-1]) for name in DECODED}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in DECODED}
    for name, calls in seen.items():
        getattr(model, name)[-1].register_forward_hook(lambda _, x, y, calls=calls: calls.append((x[0], y)))
    if frozen:
        machine.freeze(model)
    with machine.autocast():
        model.loss(segment(model))
        state = model.root(model.perceive(None, frames(3), torch.zeros(3, dtype=torch.int64), torch.ones(3) > 0))
        model.predict(state)
        model.imagine(state, torch.tensor([0, 1, 2]))
    for name, calls in seen.items():
        assert len(calls) == 2, name
        for hidden, logits in calls:
            want = F.linear(hidden.float(), weights[name].weight, weights[name].bias)
            assert torch.equal(logits, want), name
            assert not torch.equal(logits, logits.bfloat16().float()), name


@torch.no_grad()
def greedy(model: PlanningWorldModel, precision: str, images: Tensor) -> Tensor:
    """The actions (E,) that a search in the frozen model takes at images (E, H, W, 3)."""
    machine, none = Machine(CPU, precision, 1), torch.zeros(len(images), dtype=torch.int64)
    model, planner = machine.freeze(copy.deepcopy(model)), MCTS(MCTSSettings(simulations=8), A)
    with machine.autocast():
        state = model.perceive(None, images, none, none == 0)
        return planner.decide(model, state, planner.initial_state(len(images)))[0].argmax(-1)


@MODELS
def test_precision_does_not_choose_the_action(make):
    """Agreement with float32: 98 % and more; with plain layers, as autocast would have them, less than 90 %."""
    agree, rounded = [], []
    for seed in range(8):
        model, images = in_mid_training(make, seed), frames(32)
        want = greedy(model, "float32", images)
        agree.append(greedy(model, "bfloat16", images) == want)
        for name in DECODED:
            getattr(model, name)[-1].__class__ = nn.Linear
        rounded.append(greedy(model, "bfloat16", images) == want)
    assert torch.cat(agree).float().mean() > 0.98
    assert torch.cat(rounded).float().mean() < 0.9
