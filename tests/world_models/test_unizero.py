"""UniZero: targets and losses by hand, acting and searching against fresh runs of the backbone on raw elements.

Axes: B batch, T frames, D width, A actions. All sizes differ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError
from small_backbones import NAMES, small
from small_spaces import ACTIONS, OBSERVATIONS, actions, observations
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map
from watching import NoWaiting, Replayable

from wmcli.backbones import build
from wmcli.backbones.transformer import TransformerSettings
from wmcli.controllers.mcts import MCTS, MCTSSettings
from wmcli.errors import UsageError
from wmcli.kernels.dispatch import using
from wmcli.nn import value_bins
from wmcli.nn.policies import build_policy
from wmcli.nn.simnorm import divergence
from wmcli.spaces import Discrete, Vector, map_parts
from wmcli.training.device import Machine
from wmcli.training.optim import build_optimizer, update
from wmcli.world_models.base import Batch, Targets
from wmcli.world_models.planners import bootstrap_frames, n_step_returns, policy_terms
from wmcli.world_models.unizero import UniZero, UniZeroSettings

pytestmark = pytest.mark.matrix

B, D, A, SIZE = 4, 16, 5, 12
HORIZON, STEPS, CONTEXT = 6, 3, 4
T = HORIZON + STEPS
WINDOW = 2 * CONTEXT - 1


def make(backbone="transformer", *, lively=True, dropout=0.0, **settings) -> UniZero:
    torch.manual_seed(0)
    values = {
        "sequence_length": HORIZON,
        "td_steps": STEPS,
        "context": CONTEXT,
        "channels": (4, 6),
        "bound": 7,
        **settings,
    }
    chosen = UniZeroSettings(**values)
    model = UniZero(
        chosen, small(backbone, max_length=2 * chosen.sequence_length, block=2, width=D, dropout=dropout), A, SIZE
    )
    if lively:
        liven(model)
    return model


@torch.no_grad()
def liven(model: UniZero) -> None:
    """Heads that say something, and everything that is read as large as the rest; the target differs from the model."""
    heads = (model.latent_head, model.reward_head, model.policy_head, model.value_head, model.termination_head)
    for head in heads:
        if head is not None:
            nn.init.normal_(head[0].weight, std=0.5)
            nn.init.normal_(head[-1].weight, std=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith(("action_embedding.weight", "positions.weight")):
            nn.init.normal_(parameter)
        if name == "encoder.2.weight":
            nn.init.normal_(parameter, std=3.0)
        if name.startswith("target."):
            parameter.mul_(1.1)
    nn.init.normal_(model.target["value_head"][-1].weight, std=0.5)


def frames(*lead: int, seed: int = 1) -> Tensor:
    return torch.randint(256, (*lead, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def segment(lengths=(T, 5, 7, 1), ended=(False, False, True, False), searched=None, **changes) -> Batch:
    """Rows with so many real frames, whose last one may end the task, padded as a sampler pads."""
    generator = torch.Generator().manual_seed(2)
    rows = len(lengths)
    length = torch.tensor(lengths)[:, None]
    place = torch.arange(T).clamp(max=length - 1)  # padding repeats the last real frame
    valid = torch.arange(T) < length
    action = torch.randint(A, (rows, T), generator=generator).gather(1, place)
    reward = torch.randint(-2, 3, (rows, T), generator=generator).float().gather(1, place)
    last = place == length - 1
    no = torch.zeros_like(valid)
    terminated = last & torch.tensor(ended)[:, None]
    first = no.clone()
    first[:, 0] = True
    targets = None
    if searched is not None:
        policy = torch.rand(rows, T, A, generator=generator).softmax(-1)
        value = torch.randn(rows, T, generator=generator)
        targets = Targets(policy, value, searched)
    image = frames(rows, T)[torch.arange(rows)[:, None], place]
    return Batch(image, action, reward, terminated, no, first, valid, targets)._replace(**changes)


def some(chance: float, seed: int = 5) -> Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < chance


# -- sizes ------------------------------------------------------------------------------------------------------------


def learning(model: UniZero) -> list[nn.Parameter]:
    return [parameter for group in model.parameter_groups() for parameter in group["params"]]


@pytest.mark.parametrize("actions", [3, 6, 18])
def test_the_papers_parameter_count(actions):
    with torch.device("meta"):
        backbone = build(TransformerSettings(width=768, layers=2, heads=8), max_length=20, block=2)
        model = UniZero(UniZeroSettings(), backbone, actions, 64)
    assert sum(parameter.numel() for parameter in learning(model)) == 20_762_090 + 1_537 * actions
    assert sum(parameter.numel() for parameter in model.encoder.parameters()) == 3_461_152
    assert sum(parameter.numel() for parameter in model.backbone.parameters()) == 14_177_280 + 15_360
    assert model.segment == 15 and model.context == 4 and model.lookback == 3


def test_the_first_weights():
    torch.manual_seed(0)
    model = UniZero(UniZeroSettings(), small("gru", max_length=20, block=2, width=256), 18, 64)
    for layer in (model.action_embedding, model.encoder[2], model.policy_head[0]):
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    convolution = model.encoder[0][4].conv1.weight.detach()  # 32 to 64 channels
    assert float(convolution.std()) == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.05)
    heads = (model.latent_head, model.reward_head, model.policy_head, model.value_head)
    assert not any(each.any() for head in heads for each in (head[0].bias, head[2].weight, head[2].bias))
    ours, target = model.state_dict(), model.target.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in target.items())


@pytest.mark.parametrize("size", [12, 16, 33])
def test_sizes(size):
    model = UniZero(UniZeroSettings(channels=(4, 6)), small("gru", max_length=20, block=2), A, size)
    z = model.encode(torch.zeros(2, 3, size, size, 3, dtype=torch.uint8))
    assert z.shape == (2, 3, *model.feature_shape) == (2, 3, 16)
    assert_close(z.unflatten(-1, (2, 8)).sum(-1), torch.ones(2, 3, 2))
    assert not model.decodes and model.uniforms_per_step == 0 and model.discount == 0.997


def test_settings_that_do_not_fit_are_one_line():
    with pytest.raises(UsageError, match=r"backbone.width = 16: .* dynamics.group = 5"):
        make(group=5)
    with pytest.raises(ValidationError, match="context = 7 must not be more than sequence_length = 6"):
        make(context=7)


# -- value targets ----------------------------------------------------------------------------------------------------


def slow_return(reward, ended, valid, value, t, steps, discount):
    """One return by walking from frame to frame, or None; `value` is that of every frame."""
    last = max(i for i, real in enumerate(valid) if real)
    total, weight = 0.0, 1.0
    for i in range(t, t + steps):
        if i == last and not ended[i]:
            return None if i == t else total + weight * value[i]
        total += weight * reward[i]
        weight *= discount
        if ended[i]:
            return total
    return total + weight * value[t + steps]


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_are_those_of_a_walk(steps, discount):
    generator = torch.Generator().manual_seed(0)
    horizon, rows = 6, 60
    time = horizon + steps
    length = torch.randint(1, time + 1, (rows, 1), generator=generator)
    valid = torch.arange(time) < length
    # Padding repeats the last frame, and so the end.
    ended = (torch.arange(time) >= length - 1) & (torch.rand(rows, 1, generator=generator) < 0.5)
    reward, values = torch.randn(2, rows, time, dtype=torch.float64, generator=generator)
    where = bootstrap_frames(valid, horizon, steps)
    got, learned = n_step_returns(reward, ended, valid, values.gather(1, where), steps, discount)
    both = 0
    for row in range(rows):
        for t in range(horizon):
            want = None
            if valid[row, t]:
                arguments = (each[row].tolist() for each in (reward, ended, valid, values))
                want = slow_return(*arguments, t, steps, discount)
            assert bool(learned[row, t]) == (want is not None)
            if want is not None:
                assert float(got[row, t]) == pytest.approx(want, abs=1e-12)
                both += 1
    assert both > rows


def test_golden_return():
    reward = torch.tensor([[1.0, 0.0, 0.0, -1.0, 0.0, 9.0]])
    no, yes = torch.zeros(1, 6, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)
    got, _ = n_step_returns(reward, no, yes, torch.tensor([[3.0]]), 5, 0.997)
    assert float(got) == pytest.approx(2.964242, abs=1e-6)


def read(model: UniZero, z: Tensor, action: Tensor, parts: object = None) -> Tensor:
    """Outputs (2 T, D) of one row's latents (T, D) and actions (T,), element by element from nothing."""
    parts = model if parts is None else parts
    state, outputs = parts.backbone.initial_state(1), []
    for latent, act in zip(z, action, strict=True):
        for element in (latent, parts.action_embedding.weight[act]):
            y, state = parts.backbone.step(element[None], state)
            outputs.append(y[0])
    return torch.stack(outputs)


@torch.no_grad()
def by_the_target(model: UniZero, batch: Batch) -> Tensor:
    """What every frame's return goes on with, (B, HORIZON), row by row."""
    values = torch.zeros(len(batch.action), HORIZON)
    for row, valid in enumerate(batch.valid):
        last = int(valid.sum()) - 1
        start = min(STEPS, last)
        real = slice(start, last + 1)
        z = model.target.encoder.eval()(batch.inputs[row, real])
        y = read(model, z, batch.action[row, real], model.target)[::2]
        value = value_bins.decode(model.target.value_head(y))
        for t in range(HORIZON):
            values[row, t] = value[max(min(t + STEPS, last) - start, 0)]
    return values


@pytest.mark.parametrize("backbone", NAMES)
def test_values_are_those_of_the_target_on_its_own_sequence(backbone):
    model, batch = make(backbone), segment()
    where = bootstrap_frames(batch.valid, HORIZON, STEPS)
    with torch.no_grad():
        got = model._target_values(batch, where)
    assert_close(got, by_the_target(model, batch), rtol=1e-4, atol=1e-5)


def test_a_stored_search_goes_before_the_target_where_it_is_asked_for():
    batch = segment(searched=some(0.5))
    where = bootstrap_frames(batch.valid, HORIZON, STEPS)
    model = make(bootstrap="search")
    seen = {}

    def target_values(at):
        seen["where"] = at
        return torch.full(at.shape, 100.0)

    got, _ = model._value_targets(batch, HORIZON, target_values)
    value = torch.where(batch.targets.is_searched, batch.targets.value, 100.0).gather(1, where)
    want, _ = n_step_returns(batch.reward, batch.terminated, batch.valid, value, STEPS, 0.997)
    assert torch.equal(seen["where"], where) and torch.equal(got, want)
    plain = make()._value_targets(batch, HORIZON, target_values)[0]
    assert_close(model._value_targets(batch._replace(targets=None), HORIZON, target_values)[0], plain)
    assert (plain - got).abs().max() > 1


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_first_losses_are_those_of_no_opinion():
    model = make(lively=False, bound=50, predict_termination=True)
    total, log = model.loss(segment(searched=some(1.0)))
    assert_close(log["reward_loss"], torch.tensor(math.log(101)))
    assert_close(log["value_loss"], torch.tensor(math.log(101)))
    assert_close(log["policy_loss"], torch.tensor(math.log(A)))
    assert_close(log["policy_entropy"], torch.tensor(math.log(A)))
    assert_close(log["termination_loss"], torch.tensor(math.log(2)))
    assert_close(log["value_mean"], torch.tensor(0.0))
    assert 0 <= log["latent_loss"] <= math.log(8)
    weighted = 10 * log["latent_loss"] + 1.5 * math.log(101) + (1 - 1e-4) * math.log(A) + math.log(2)
    assert_close(total, weighted)


@pytest.mark.parametrize(("activation", "least", "most"), [("gelu_tanh", 0.7, 0.9), ("leaky_relu", 0.8, 1.05)])
def test_the_first_latent_loss_at_the_papers_size(activation, least, most):
    """Fresh predictions are uniform, fresh labels are not: 4,096 features behind a batch norm, times weights of
    deviation 0.02, make logits of deviation 2. LightZero 0.2.0, gelu_tanh, begins at 0.74 to 0.82 nats a group.
    Frames without any content have none to predict."""
    torch.manual_seed(0)
    settings = UniZeroSettings(activation=activation, sequence_length=5, td_steps=1)
    model = UniZero(settings, small("gru", max_length=10, block=2, width=768), A, 64)
    image = torch.randint(256, (3, 6, 64, 64, 3), dtype=torch.uint8)
    no = torch.zeros(3, 6, dtype=torch.bool)
    batch = Batch(image, torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, 6), no, no, no, ~no)
    first = float(model.loss(batch)[1]["latent_loss"])
    label = model._labels(image[:, :5])[:, 1:].unflatten(-1, (96, 8))
    assert first == pytest.approx(math.log(8) - float(torch.special.entr(label).sum(-1).mean()), abs=1e-4)
    assert least < first < most
    assert float(model.loss(batch._replace(inputs=torch.zeros_like(image)))[1]["latent_loss"]) < 1e-6


@pytest.mark.parametrize("backbone", ["transformer", "mamba1"])
def test_the_loss_is_its_definition(backbone):
    """Recomputed frame by frame, in eval mode."""
    searched = some(0.6)
    settings = {"latent_weight": 3.0, "policy_weight": 0.7, "entropy_weight": 0.2, "predict_termination": True}
    model, batch = make(backbone, **settings).eval(), segment(searched=searched)
    total, log = model.loss(batch)
    bootstrap = by_the_target(model, batch)
    sums = {name: [] for name in ("latent", "reward", "policy", "value", "entropy", "learned", "end", "mean")}
    with torch.no_grad():
        for row in range(B):
            z = model.encode(batch.inputs[row : row + 1, :HORIZON])[0]
            label = model.target.encoder(batch.inputs[row, :HORIZON])
            output = read(model, z, batch.action[row, :HORIZON])
            arguments = [each[row].tolist() for each in (batch.reward, batch.terminated, batch.valid)]
            for t in range(min(int(batch.valid[row].sum()), HORIZON)):
                y, x = output[2 * t], output[2 * t + 1]
                if t + 1 < HORIZON and batch.valid[row, t + 1]:
                    sums["latent"].append(divergence(label[t + 1], model._next_latent(x), 8))
                code = value_bins.encode(batch.reward[row, t], 7)
                sums["reward"].append(-(code * model.reward_head(x).log_softmax(-1)).sum())
                logit = model.termination_head(x)[0]
                sums["end"].append(-F.logsigmoid(logit if batch.terminated[row, t] else -logit))
                policy = model.policy_head(y).log_softmax(-1)
                entropy = -(policy.exp() * policy).sum()
                sums["entropy"].append(entropy)
                if searched[row, t]:
                    sums["policy"].append(-(batch.targets.policy[row, t] * policy).sum())
                    sums["learned"].append(entropy)
                values = [0.0] * T
                last = int(batch.valid[row].sum()) - 1
                values[min(t + STEPS, last)] = float(bootstrap[row, t])
                goal = slow_return(*arguments, values, t, STEPS, 0.997)
                sums["mean"].append(value_bins.decode(model.value_head(y)))
                if goal is not None:
                    code = value_bins.encode(torch.tensor(goal), 7)
                    sums["value"].append(-(code * model.value_head(y).log_softmax(-1)).sum())
    want = {name: torch.stack(each).mean() for name, each in sums.items()}
    for name, key in (("latent", "latent_loss"), ("reward", "reward_loss"), ("policy", "policy_loss")):
        assert_close(log[key], want[name], rtol=2e-4, atol=1e-5, msg=name)
    for name, key in (("value", "value_loss"), ("entropy", "policy_entropy"), ("end", "termination_loss")):
        assert_close(log[key], want[name], rtol=2e-4, atol=1e-5, msg=name)
    assert_close(log["value_mean"], want["mean"], rtol=2e-4, atol=1e-5)
    weighted = 3 * want["latent"] + want["reward"] + 0.5 * want["value"] + want["end"]
    weighted = weighted + 0.7 * (want["policy"] - 0.2 * want["learned"])
    assert_close(total, weighted, rtol=2e-4, atol=1e-5)


def test_padding_leaves_no_trace():
    model = make(predict_termination=True, bootstrap="search").eval()
    batch = segment(searched=some(0.6))
    pad = ~batch.valid
    assert batch.targets is not None
    found, value = batch.targets.is_searched | pad, batch.targets.value.masked_fill(pad, 99.0)
    other = batch._replace(
        inputs=torch.where(pad[..., None, None, None], frames(B, T, seed=9), batch.inputs),
        action=torch.where(pad, (batch.action + 1) % A, batch.action),
        reward=torch.where(pad, 77.0, batch.reward),
        terminated=batch.terminated ^ pad,
        targets=batch.targets._replace(is_searched=found, value=value),
    )
    want, got = model.loss(batch), model.loss(other)
    assert_close(got[0], want[0])
    for name, value in want[1].items():
        assert_close(got[1][name], value, msg=name)


@pytest.mark.parametrize("searched", [None, torch.zeros(B, T, dtype=torch.bool)])
def test_without_a_search_no_policy_is_learned(searched):
    model = make()
    total, log = model.loss(segment(searched=searched))
    assert log["policy_loss"] == 0 and log["policy_entropy"] > 0
    gradients = torch.autograd.grad(total, list(model.policy_head.parameters()), allow_unused=True)
    assert all(each is None or not each.any() for each in gradients)
    assert_close(total, 10 * log["latent_loss"] + log["reward_loss"] + 0.5 * log["value_loss"])


def test_time_limits_are_ends_only_if_asked_for():
    batch = segment()
    cut = batch._replace(truncated=batch.valid & ~F.pad(batch.valid[:, 1:], (0, 1)))
    losses = {key: make(end_on_truncation=key, predict_termination=True).eval().loss for key in (False, True)}
    for name in ("value_loss", "termination_loss"):
        assert_close(losses[False](cut)[1][name], losses[False](batch)[1][name])
        assert (losses[True](cut)[1][name] - losses[True](batch)[1][name]).abs() > 1e-3


@pytest.mark.parametrize("backbone", NAMES)
def test_every_parameter_learns_but_the_targets(backbone):
    model, batch = (
        make(backbone, predict_termination=True, bootstrap="search", dropout=0.1),
        segment(searched=some(0.8)),
    )
    with NoWaiting():
        total, _ = model.loss(batch)
    total.backward()
    ours = learning(model)
    assert len(ours) == len(set(ours)) and all(each.requires_grad and each.grad is not None for each in ours)
    assert all(each.grad.any() or not each.any() for each in ours)
    rest = set(model.parameters()) - set(ours)
    assert rest == set(model.target.parameters()) and not any(each.requires_grad for each in rest)


@pytest.mark.parametrize(
    ("backbone", "exempt"), [("transformer", set()), ("s4", {"log_decay", "frequency", "p", "b", "c_tilde", "log_dt"})]
)
def test_decay_falls_on_all_that_has_two_axes_unless_it_is_exempt(backbone, exempt):
    model = make(backbone, weight_decay=0.3)
    decayed, plain = model.parameter_groups()
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays, spared = ({names[id(each)] for each in group["params"]} for group in (decayed, plain))
    assert {"action_embedding.weight", "encoder.0.0.weight", "value_head.2.weight"} <= decays
    assert ("backbone.positions.weight" in decays) == (backbone == "transformer")
    matrices = {name for name in spared if model.get_parameter(name).ndim > 1}
    assert {name.rsplit(".", 1)[1] for name in matrices} <= exempt and bool(matrices) == bool(exempt)


# -- the target -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", NAMES)
def test_the_target_follows_the_parameters(backbone):
    model = make(backbone, target_rate=0.25)
    batch = segment()
    where = bootstrap_frames(batch.valid, HORIZON, STEPS)
    optimizer = build_optimizer("adamw", model.parameter_groups(), 1e-2, 0.0)
    model._target_values(batch, where)  # what a backbone prepares from its weights must not outlive them
    before = copy.deepcopy(model.target.state_dict())
    update(optimizer, model.loss(batch)[0], 100.0)
    batch_statistics = {name: value for name, value in model.target.state_dict().items() if "running" in name}
    batch_statistics = copy.deepcopy(batch_statistics)
    model.after_update()
    now = model.state_dict()
    for name, parameter in model.target.named_parameters():
        assert_close(parameter.data, 0.75 * before[name] + 0.25 * now[name], rtol=1e-5, atol=1e-6)
    for name, value in batch_statistics.items():
        assert torch.equal(model.target.state_dict()[name], value)
    assert_close(model._target_values(batch, where), by_the_target(model, batch), rtol=1e-4, atol=1e-5)


def test_labels_have_the_statistics_of_the_batch_in_training_and_values_never():
    model, batch = make().train(), segment()
    assert not any(module.training for module in model.target.modules())
    before = copy.deepcopy(model.target.state_dict())
    where = bootstrap_frames(batch.valid, HORIZON, STEPS)
    want = model._target_values(batch, where)
    assert all(torch.equal(value, before[name]) for name, value in model.target.state_dict().items())
    seen = batch.inputs[:, :HORIZON]
    label = model._labels(seen)
    assert_close(label, copy.deepcopy(model.target["encoder"]).train()(seen))
    assert not any(module.training for module in model.target.modules())
    moved = {name for name, value in model.target.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("running" in name or "num_batches" in name for name in moved)
    assert (model._target_values(batch, where) - want).abs().max() > 0

    found = []
    values_at = model._target_values
    model._target_values = lambda *given: found.append(values_at(*given)) or found[-1]
    want = values_at(batch, where)
    model.loss(batch)
    assert torch.equal(found[0], want), "labels move the statistics after the values were read, not before"

    model.eval()
    before = copy.deepcopy(model.state_dict())
    model.loss(batch)
    model.encode(seen)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_close(model._labels(seen), model.target["encoder"](seen))
    assert (model._labels(seen) - label).abs().max() > 1e-4


def test_training_goes_on_exactly_from_saved_weights():
    def step(model):
        optimizer = torch.optim.SGD(model.parameter_groups(), 0.1)
        update(optimizer, model.loss(segment())[0], 1.0)
        model.after_update()

    model = make()
    step(model)
    other = make(lively=False)
    other.load_state_dict(model.state_dict())
    step(model)
    step(other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# -- windows: acting and searching ------------------------------------------------------------------------------------


def fresh(model: UniZero, elements: Tensor) -> Tensor:
    """The last output of one row's elements (n, D), read at once from nothing."""
    return model.backbone(elements[None], None)[0][0, -1]


def interleaved(model: UniZero, z: Tensor, action: Tensor) -> Tensor:
    """Latents (n, D) and the actions between them (n - 1,) to elements (2 n - 1, D)."""
    elements = torch.zeros(2 * len(z) - 1, D)
    elements[::2], elements[1::2] = z, model.action_embedding.weight[action]
    return elements


def imagined_by_hand(model: UniZero, elements: Tensor, action: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Output at each action (n,), latent and output at it, of one row, each from all elements that it may see."""
    for act in action:
        if model.rereads:
            elements = elements[-(WINDOW - 2) :]
        elements = torch.cat((elements, model.action_embedding.weight[act][None]))
        x = fresh(model, elements)
        z = model._next_latent(x)
        elements = torch.cat((elements, z[None]))
        yield x, z, fresh(model, elements)


def latents(*lead: int, seed: int = 3) -> Tensor:
    draw = torch.randn(*lead, 2, 8, generator=torch.Generator().manual_seed(seed))
    return (2 * draw).softmax(-1).flatten(-2)


@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_rows_of_different_lengths_equal_each_row_alone(backbone):
    """Windows of 1, 3, 5 and 7 elements in one batch: features, predictions and imagined steps."""
    model = make(backbone, predict_termination=True).eval()
    z, action = latents(B, 6), torch.randint(A, (B, 6))
    reset = torch.zeros(B, 6, dtype=torch.bool)
    opens = [5, 4, 3, 0]  # the last has had more frames than the window holds
    for row, place in enumerate(opens):
        reset[row, place] = True
    features, state = model.observe(z, action, reset)
    assert state.length.tolist() == [1, 3, 5, 5]
    acts = torch.randint(A, (8, B))
    root = model.root(state)
    steps = [model.imagine(root, acts[0])]
    for act in acts[1:]:
        steps.append(model.imagine(steps[-1][1], act))
    for row in range(B):
        for t in range(opens[row], 6):
            start = max(opens[row], t - CONTEXT + 1)
            elements = interleaved(model, z[row, start : t + 1], action[row, start:t])
            assert_close(features[row, t], fresh(model, elements), rtol=0, atol=5e-5)
        assert_close(model.features(root)[row], features[row, 5])
        assert_close(model.latent(root)[row], z[row, 5])
        by_hand = imagined_by_hand(model, elements, acts[:, row])
        for (imagined, after), (x, latent, output) in zip(steps, by_hand, strict=True):
            assert_close(imagined.latent[row], latent, rtol=0, atol=5e-5)
            assert_close(imagined.reward[row], value_bins.decode(model.reward_head(x)), rtol=1e-3, atol=1e-4)
            assert imagined.terminated[row] == (model.termination_head(x)[0] > 0)
            assert_close(model.features(after)[row], output, rtol=0, atol=1e-4)
            policy, value = model.predict(after)
            assert_close(policy[row], model.policy_head(output), rtol=0, atol=5e-4)
            assert_close(value[row], value_bins.decode(model.value_head(output)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_thirty_imagined_steps(backbone):
    model = make(backbone).eval()
    z, action = latents(1, 2), torch.randint(A, (1, 2))
    _, state = model.observe(z, action, torch.tensor([[True, False]]))
    elements = interleaved(model, z[0], action[0, :1])
    acts = torch.randint(A, (30,))
    for act, (_, latent, output) in zip(acts, imagined_by_hand(model, elements, acts), strict=True):
        imagined, state = model.imagine(state, act[None])
        assert_close(imagined.latent[0], latent, rtol=0, atol=2e-4)
        assert_close(model.features(state)[0], output, rtol=0, atol=5e-4)
    assert int(state.length) == state.tokens.shape[1] == WINDOW - 2


def play(model, steps, reset):
    """States after each of some frames, perceived one by one."""
    seen, action = frames(B, steps), torch.randint(A, (B, steps), generator=torch.Generator().manual_seed(4))
    states, state = [], None
    for t in range(steps):
        previous = action[:, t - 1] if t else torch.full((B,), -1 % A)
        state = model.perceive(state, seen[:, t], previous, reset[:, t])
        states.append(state)
    return states, seen, action


@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_thirty_frames_of_acting(backbone):
    """The window rolls, and is read from position 0 each time; episodes begin anew in between."""
    model = make(backbone).eval()
    reset = torch.zeros(B, 30, dtype=torch.bool)
    reset[:, 0] = reset[1, 3] = reset[2, 20] = reset[2, 22] = True
    states, seen, action = play(model, 30, reset)
    z = model.encode(seen)
    features, state = model.observe(z, action, reset)
    for row in range(B):
        for t in range(30):
            start = max(t - CONTEXT + 1, *(u for u in range(t + 1) if reset[row, u]), 0)
            elements = interleaved(model, z[row, start : t + 1], action[row, start:t])
            want = fresh(model, elements)
            assert_close(model.features(states[t])[row], want, rtol=0, atol=5e-5)
            assert_close(model.latent(states[t])[row], z[row, t])
            assert_close(features[row, t], want, rtol=0, atol=5e-5)
    acts = torch.randint(A, (B,))
    assert_close(model.imagine(state, acts)[0], model.imagine(model.root(states[-1]), acts)[0], rtol=1e-3, atol=1e-4)


def form(tree):
    return [(each.shape, each.dtype) for each in tree_leaves(tree)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_nodes_of_a_search(backbone, autocast):
    """Trees of tensors of constant shape, which can be gathered in any order and are not written to."""
    model = make(backbone).eval().requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states, _, _ = play(model, 5, torch.tensor([[True, False, False, True, False]] * B))
        assert form(states[0]) == form(states[1]) == form(states[4])
        root = model.root(states[4])
        assert all(isinstance(each, Tensor) and len(each) == B for each in tree_leaves(root))
        assert root.tokens.dtype == (torch.bfloat16 if autocast else torch.float32)
        assert root.tokens.shape[1] == (WINDOW - 2 if model.rereads else 1)
        kept = tree_map(torch.clone, root)
        action = torch.arange(B) % A
        with Replayable():
            imagined, node = model.imagine(root, action)
            again, other = model.imagine(root, (action + 1) % A)
            _, deep = model.imagine(node, action)
            policy, value = model.predict(node)
        assert form(root) == form(node) == form(deep)
        assert policy.shape == (B, A) and value.shape == imagined.reward.shape == (B,)
        assert policy.dtype == value.dtype == imagined.reward.dtype == imagined.latent.dtype == torch.float32
        assert imagined.terminated.dtype == torch.bool and not imagined.terminated.any()
        assert torch.equal(model.latent(node), imagined.latent)
        assert_close(root, kept, rtol=0, atol=0)
        assert not torch.equal(imagined.latent, again.latent)
        # The nodes in one tensor, taken out in another order: as if each had been imagined from alone.
        order = torch.tensor([6, 1, 3])
        mixed = tree_map(lambda a, b: torch.cat((a, b))[order], node, other)
        _, got = model.imagine(mixed, torch.tensor([2, 2, 2]))
        for place, source in enumerate((other, node, node)):
            row = int(order[place]) % B
            alone = tree_map(lambda each, row=row: each[row : row + 1], source)
            _, want = model.imagine(alone, torch.tensor([2]))
            tolerance = 0.1 if autocast else 5e-5
            assert_close(model.features(got)[place], model.features(want)[0], rtol=tolerance, atol=tolerance)


# -- precision, and learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", NAMES)
def test_autocast_and_a_frozen_model(backbone):
    model = make(backbone).eval()
    batch = segment(searched=some(1.0))
    want, _ = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        got, log = model.loss(batch)
        assert got.dtype == log["value_mean"].dtype == torch.float32
        z = model.encode(batch.inputs)
        assert z.dtype == torch.float32
        features, state = model.observe(z, batch.action, batch.is_first)
        imagined, after = model.imagine(state, batch.action[:, 0])
        expected = model.predict(after)
    assert_close(got, want, rtol=0.1, atol=0.05)
    with using("torch"):
        machine = Machine(torch.device("cpu"), "bfloat16", 1)
        model = machine.freeze(model)
        assert not any(each.requires_grad for each in model.parameters())
        with machine.autocast():
            state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)[1]
            _, after = model.imagine(model.root(state), batch.action[:, 0])
            prediction = model.predict(after)
            model.loss(batch)
    assert_close(prediction, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("backbone", ["transformer", "gru"])
@pytest.mark.slow
def test_a_fixed_batch_is_learned_by_heart(backbone):
    torch.manual_seed(1)
    policy = F.one_hot(torch.randint(A, (B, T)), A).float()
    batch = segment(searched=some(1.0))
    batch = batch._replace(targets=batch.targets._replace(policy=policy))
    # Values whole in the bins, rewards as well, so that nothing of the losses has to stay.
    batch = batch._replace(
        reward=value_bins.stretch(batch.reward), terminated=batch.valid & ~F.pad(batch.valid[:, 1:], (0, 1))
    )
    model = make(backbone, lively=False, td_steps=STEPS, discount=1e-6, predict_termination=True, entropy_weight=0.0)
    optimizer = build_optimizer("adamw", model.parameter_groups(), 3e-3, 1e-4, beta2=0.95)
    first = None
    for _ in range(300):
        total, _ = model.loss(batch)
        first = total.detach() if first is None else first
        update(optimizer, total, 5.0)
        model.after_update()
    assert total < 0.1 * first


# -- any observation, any action --------------------------------------------------------------------------------------


def make_for(observation, action, **settings) -> UniZero:
    torch.manual_seed(0)
    values = {"sequence_length": HORIZON, "td_steps": STEPS, "context": CONTEXT, "channels": (4, 6), "bound": 7}
    chosen = UniZeroSettings(**{**values, **settings})
    return UniZero(chosen, small("transformer", max_length=2 * HORIZON, block=2, width=D), action, observation)


def segment_of(observation, action, rows: int = B, searched=None) -> Batch:
    """As `segment`, without the repeated frames in padding; the targets have seven samples."""
    batch = segment(searched=searched)
    if searched is not None and not isinstance(action, Discrete):
        policy = torch.rand(rows, T, 7, generator=torch.Generator().manual_seed(3)).softmax(-1)
        batch = batch._replace(targets=batch.targets._replace(policy=policy, sampled=actions(action, rows, T, 7)))
    return batch._replace(inputs=observations(observation, rows, T), action=actions(action, rows, T))


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_any_observation_and_any_action(observation, action):
    model = make_for(observation, action, predict_termination=True)
    liven(model)
    batch = segment_of(observation, action, searched=some(0.8))
    with NoWaiting():
        total, log = model.loss(batch)
    total.backward()
    assert torch.isfinite(total) and all(torch.isfinite(each) for each in log.values())
    assert all(each.grad is not None and (each.grad.any() or not each.any()) for each in learning(model))

    model.eval()
    with torch.no_grad():
        reset = torch.zeros(B, T, dtype=torch.bool)
        reset[:, 0] = reset[1, 3] = True
        features, state = model.observe(model.encode(batch.inputs), batch.action, reset)
        assert features.shape == (B, T, D)
        perceived = None
        for t in range(T):
            frame = map_parts(lambda part, at=t: part[:, at], batch.inputs)
            perceived = model.perceive(perceived, frame, batch.action[:, t - 1], reset[:, t])
            assert_close(model.features(perceived), features[:, t], rtol=0, atol=5e-5)
    controller = MCTS(MCTSSettings(simulations=5, sampled_actions=4), action)
    logits, found = controller.decide(model, perceived, controller.initial_state(B), torch.Generator().manual_seed(0))
    chosen = controller.choose(logits, found, 1.0, torch.Generator().manual_seed(0))
    assert chosen.shape == (B, *action.shape) and chosen.dtype == batch.action.dtype
    imagined, _ = model.imagine(model.root(perceived), chosen)
    other, _ = model.imagine(model.root(perceived), actions(action, B, seed=9))
    assert not torch.equal(imagined.reward, other.reward), "the action matters"


@pytest.mark.parametrize("name", ["joints", "camera", "bag", "depth"])
def test_the_encoder_reads_every_part(name):
    space = OBSERVATIONS["all"]
    model, seen = make_for(space, 5).eval(), observations(space, 2, 3)
    other = seen | {name: observations(space, 2, 3, seed=7)[name]}
    shuffled = dict(reversed(seen.items()))
    assert torch.equal(model.encode(shuffled), model.encode(seen)), "in any order"
    assert not torch.equal(model.encode(other), model.encode(seen))


@torch.no_grad()
def test_the_encoder_is_its_definition():
    space = OBSERVATIONS["all"]
    model, seen = make_for(space, 5).eval(), observations(space, 4)
    trunk, _, last, numbers = model.encoder
    pixels = torch.cat((seen["camera"], seen["depth"]), -1).permute(0, 3, 1, 2) / 255
    joints = seen["joints"].sign() * (1 + seen["joints"].abs()).log()
    bag = torch.cat((F.one_hot(seen["bag"][:, 0], 2), F.one_hot(seen["bag"][:, 1], 4)), 1)
    features = torch.cat((trunk(pixels).flatten(1), numbers(torch.cat((joints, bag), 1))), 1)
    assert features.shape == (4, 6 * 2 * 3 + D)
    assert_close(model.encode(seen), last(features).unflatten(1, (2, 8)).softmax(-1).flatten(1))


def test_a_camera_alone_has_the_weights_and_the_draws_of_an_image():
    image, named = make_for(12, 5), make_for(OBSERVATIONS["camera alone"], 5)
    for (name, weight), (other_name, other) in zip(image.state_dict().items(), named.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(weight, other)
    seen = frames(2, 3)
    assert torch.equal(image.eval().encode(seen), named.eval().encode({"camera": seen}))


@pytest.mark.parametrize("kind", ["normal", "truncated-normal", "bins"])
def test_a_policy_learns_from_samples_by_cross_entropy(kind):
    """Shares times log-probabilities, by hand from torch's distributions."""
    space = ACTIONS["continuous"]
    distribution = build_policy(space, kind)
    outputs = torch.randn(B, T, distribution.outputs)
    batch = segment_of(Vector(1), space, searched=some(0.6))
    terms = policy_terms(outputs, batch, distribution)
    assert torch.equal(terms.mask, batch.valid & batch.targets.is_searched)
    parameters = distribution.parameters(outputs)
    for row, t in ((0, 0), (2, 5)):
        want = 0.0
        for share, action in zip(batch.targets.policy[row, t], batch.targets.sampled[row, t], strict=True):
            if kind == "bins":
                logits = parameters[row, t].unflatten(0, (2, 15))
                index = ((action + 1) * 7).round().long()
                log_density = torch.distributions.Categorical(logits=logits).log_prob(index).sum()
            else:
                mean, deviation = parameters[row, t].chunk(2)
                normal = torch.distributions.Normal(mean, deviation)
                log_density = normal.log_prob(action).sum()
                if kind == "truncated-normal":
                    one = torch.ones(2)
                    log_density = log_density - (normal.cdf(one) - normal.cdf(-one)).log().sum()
            want = want - share * log_density
        assert_close(terms.loss[row, t], want, rtol=1e-4, atol=1e-5)
    assert_close(terms.entropy, distribution.entropy(parameters))
    model = make_for(Vector(1), space, continuous=kind)
    assert type(model.distribution) is type(distribution) and model.policy_head[2].out_features == distribution.outputs


def test_all_actions_as_samples_are_a_plain_policy():
    batch = segment(searched=some(0.7))
    outputs, distribution = torch.randn(B, T, A), build_policy(Discrete(A))
    want = policy_terms(outputs, batch, distribution)
    order = torch.tensor([3, 0, 4, 1, 2])
    sampled = order.expand(B, T, A)
    shuffled = batch.targets._replace(policy=batch.targets.policy[..., order], sampled=sampled)
    assert_close(policy_terms(outputs, batch._replace(targets=shuffled), distribution), want)


# -- frames that close an episode -------------------------------------------------------------------------------------


def closed(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """The same, where in some rows the first frame of padding closes the episode; it repeats the flags."""
    closing = torch.zeros_like(batch.valid)
    for row in rows:
        closing[row, int(batch.valid[row].sum())] = True
    seen = torch.where(closing[..., None, None, None], frames(B, T, seed=8), batch.inputs)
    return batch._replace(inputs=seen, valid=batch.valid | closing, is_closing=closing)


def test_behind_a_termination_only_the_next_latent_is_learned():
    model = make(predict_termination=True, bootstrap="search").eval()
    batch = segment(lengths=(T, 5, 4, 1), searched=some(1.0))
    (_, want), (_, got) = model.loss(batch), model.loss(closed(batch, (2,)))
    for name, value in want.items():
        assert (got[name] == value) == (name != "latent_loss"), name
    no = torch.zeros_like(batch.valid)
    assert_close(model.loss(batch._replace(is_closing=no)), model.loss(batch), rtol=0, atol=0)


def test_returns_lead_to_the_value_of_the_frame_that_closes_a_cut_episode():
    batch = segment(searched=some(0.5))
    batch = closed(batch._replace(truncated=batch.valid & ~F.pad(batch.valid[:, 1:], (0, 1))), (1, 2, 3))
    batch = batch._replace(truncated=batch.truncated | batch.is_closing)
    values = torch.randn(B, T, generator=torch.Generator().manual_seed(4))
    got, learned = make()._value_targets(batch, HORIZON, lambda at: values.gather(1, at))
    for row in range(B):
        valid = batch.valid[row].clone()
        if batch.terminated[row].any():
            valid &= ~batch.is_closing[row]
        arguments = (each.tolist() for each in (batch.reward[row], batch.terminated[row], valid, values[row]))
        arguments = list(arguments)
        for t in range(HORIZON):
            want = slow_return(*arguments, t, STEPS, 0.997) if valid[t] else None
            assert bool(learned[row, t]) == (want is not None)
            if want is not None:
                assert float(got[row, t]) == pytest.approx(want, abs=1e-5)
    assert learned[1].tolist() == [True] * 5 + [False]
    _, as_ends = make(end_on_truncation=True)._value_targets(batch, HORIZON, lambda at: values.gather(1, at))
    assert torch.equal(as_ends[1:], learned[1:])


def test_a_closing_frame_has_no_outcome_and_no_policy():
    model = make(predict_termination=True, closing_frames=True).eval()
    assert model.settings.reads_closing and not make().settings.reads_closing
    batch = closed(segment(searched=some(1.0)), (1, 2, 3))
    closing = batch.is_closing
    other = batch._replace(
        action=torch.where(closing, (batch.action + 1) % A, batch.action),
        reward=torch.where(closing, 77.0, batch.reward),
        targets=batch.targets._replace(policy=batch.targets.policy.masked_fill(closing[..., None], 1.0)),
    )
    assert_close(model.loss(other), model.loss(batch))
    seen = torch.where(closing[..., None, None, None], frames(B, T, seed=9), batch.inputs)
    changed = model.loss(batch._replace(inputs=seen))[1]
    want = model.loss(batch)[1]
    assert changed["latent_loss"] != want["latent_loss"] and changed["value_loss"] != want["value_loss"]
    assert changed["reward_loss"] == want["reward_loss"] and changed["policy_loss"] == want["policy_loss"]
    alone = batch._replace(is_closing=batch.valid, terminated=torch.ones_like(batch.valid))
    assert torch.isfinite(model.loss(alone)[0]), "a window that begins with the closing frame"
