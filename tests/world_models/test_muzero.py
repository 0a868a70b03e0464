"""MuZero: stacks at the beginning of episodes, losses by hand, the target's clock, and what augmentation does.

Axes: B batch, T frames (history included), A actions, N frames of a stack. All sizes differ.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from PIL import Image as Picture
from small_spaces import ACTIONS, OBSERVATIONS, actions, observations
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map
from watching import NoWaiting, Replayable

from wmcli.controllers.mcts import MCTS, MCTSSettings
from wmcli.nn import value_bins
from wmcli.spaces import Continuous, Discrete, Image, Vector, map_parts
from wmcli.training.device import Machine
from wmcli.training.optim import build_optimizer, update
from wmcli.world_models.base import Batch, Targets, part_of
from wmcli.world_models.muzero import MuZero, MuZeroSettings, ObservedState, UnrolledState, augment, to_gray
from wmcli.world_models.planners import bootstrap_frames, n_step_returns

B, A, N, SIZE = 4, 5, 3, 20
UNROLL, STEPS = 2, 4
HISTORY = N - 1
REAL = UNROLL + 1 + STEPS  # frames of a window behind its history
T = HISTORY + REAL
SMALL = {
    "frame_stack": N,
    "unroll_steps": UNROLL,
    "td_steps": STEPS,
    "channels": (4, 6),
    "head_channels": 3,
    "head_width": 7,
    "projection_width": 8,
    "predictor_width": 5,
    "bound": 9,
}


def make(*, lively=True, **settings) -> MuZero:
    torch.manual_seed(0)
    model = MuZero(MuZeroSettings(**{**SMALL, **settings}), A, SIZE)
    if lively:
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
                    module.running_mean.normal_(std=0.1)
                    module.running_var.uniform_(0.1, 0.3)
                if name.endswith("_head.7"):
                    nn.init.normal_(module.weight)
    return model


def frames(*lead: int, seed: int = 1) -> Tensor:
    """Coarse ones, since fine noise looks all the same to convolutions."""
    coarse = torch.randint(256, (*lead, 5, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return coarse.repeat_interleave(SIZE // 5, -3).repeat_interleave(SIZE // 5, -2)


def segment(lengths=(REAL, 3, 2, 1), ended=(False, True, False, True), searched=None, early=(2,)) -> Batch:
    """Rows with so many real frames behind the history; those in `early` begin with their episode."""
    generator = torch.Generator().manual_seed(2)
    rows = len(lengths)
    last = HISTORY + torch.tensor(lengths)[:, None] - 1
    opens = torch.tensor([HISTORY if row in early else 0 for row in range(rows)])[:, None]
    time = torch.arange(T)
    place = time.minimum(last).maximum(opens)
    valid = (time >= opens) & (time <= last)
    action = torch.randint(A, (rows, T), generator=generator).gather(1, place)
    reward = torch.randint(-2, 3, (rows, T), generator=generator).float().gather(1, place)
    terminated = (place == last) & torch.tensor(ended)[:, None]
    targets = None
    if searched is not None:
        policy = (3 * torch.randn(rows, T, A, generator=generator)).softmax(-1)
        targets = Targets(policy, torch.randn(rows, T, generator=generator), searched)
    image = frames(rows, T)[torch.arange(rows)[:, None], place]
    no = torch.zeros_like(valid)
    return Batch(image, action, reward, terminated, no, valid & (place == opens), valid, targets)


def some(chance: float) -> Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < chance


def learning(model: MuZero) -> list[nn.Parameter]:
    return [parameter for group in model.parameter_groups() for parameter in group["params"]]


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_the_papers_sizes():
    actions = 6
    with torch.device("meta"):
        model = MuZero(MuZeroSettings(), actions, 64)
    block = 2 * 9 * 64**2 + 4 * 64

    def head(outputs: int) -> int:
        return 64 * 16 + 2 * 16 + 1024 * 32 + 2 * 32 + 32 * outputs + outputs

    trunk = 9 * 4 * 32 + 2 * 32 + (2 * 9 * 32**2 + 4 * 32) + (9 * (2 * 32 * 64 + 64**2) + 4 * 64) + 3 * block
    dynamics = 9 * (64 + actions) * 64 + 2 * 64 + block
    projection = 4096 * 1024 + 2 * 1024**2 + 3 * 2 * 1024
    predictor = 1024 * 512 + 2 * 512 + 512 * 1024 + 1024
    want = trunk + dynamics + block + 2 * head(601) + head(actions) + projection + predictor
    assert sum(parameter.numel() for parameter in learning(model)) == want
    assert model.feature_shape == (64, 8, 8)
    assert (model.history, model.segment, model.context, model.lookback) == (3, 3 + 6 + 5, 4, 3)


def test_gray_is_luminance():
    pictures = frames(3)
    got = to_gray(pictures)
    want = (pictures.double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)).round().to(torch.uint8)
    assert torch.equal(got, want)
    by_pillow = torch.tensor(list(Picture.fromarray(pictures[0].numpy()).convert("L").tobytes())).view(SIZE, SIZE)
    assert int((got[0].int() - by_pillow).abs().max()) <= 1
    assert int(to_gray(torch.full((1, 1, 3), 255, dtype=torch.uint8))) == 255


# -- stacks -----------------------------------------------------------------------------------------------------------


def play(model, steps, reset):
    seen, states, state = frames(B, steps), [], None
    for t in range(steps):
        state = model.perceive(state, seen[:, t], torch.zeros(B, dtype=torch.long), reset[:, t])
        states.append(state)
    return states, seen


@torch.no_grad()
def test_an_episodes_first_frame_stands_for_those_before_it():
    model = make().eval()
    reset = torch.zeros(B, 7, dtype=torch.bool)
    reset[:, 0] = reset[1, 3] = reset[2, 6] = reset[3, 4] = reset[3, 5] = True
    states, seen = play(model, 7, reset)
    shades = model.encode(seen)
    assert shades.shape == (B, 7, SIZE, SIZE) and shades.dtype == torch.uint8
    features, state = model.observe(shades, torch.zeros(B, 7, dtype=torch.long), reset)
    assert features.shape == (B, 7, *model.feature_shape)
    for row in range(B):
        for t in range(7):
            opens = max(u for u in range(t + 1) if reset[row, u])
            stack = torch.stack([shades[row, max(t - back, opens)] for back in (2, 1, 0)])
            assert torch.equal(states[t].stack[row], stack)
            want = model.representation(stack[None].float() / 255)[0]
            assert_close(model.features(states[t])[row], want)
            assert_close(features[row, t], want)
            assert (want >= 0).all() and want.any()
    assert torch.equal(state.stack, states[-1].stack)


@torch.no_grad()
def test_a_stack_of_one_frame_has_no_history():
    model = make(frame_stack=1).eval()
    assert (model.history, model.lookback, model.context, model.segment) == (0, 0, 1, REAL)
    model.loss(Batch(*(each[:, HISTORY:] for each in segment()[:7])))
    reset = torch.zeros(B, 3, dtype=torch.bool)
    states, seen = play(model, 3, reset)
    features, _ = model.observe(model.encode(seen), torch.zeros(B, 3, dtype=torch.long), reset)
    assert_close(torch.stack([state.state for state in states], 1), features)


def test_a_left_padded_window_ignores_earlier_steps():
    model = make().eval()
    shades = to_gray(frames(B, 4))
    reset = torch.tensor([[False, False, True, False]] * B)
    action = torch.zeros(B, 4, dtype=torch.long)
    other = shades.clone()
    other[:, :2] = 0
    want, got = (model.observe(each, action, reset)[1] for each in (shades, other))
    assert_close(got, want)


@torch.no_grad()
def test_the_dynamics_are_their_definition():
    model = make().eval()
    state, action = torch.randn(B, *model.feature_shape), torch.arange(B) % A
    weight, layer = model.dynamics.conv.weight, model.dynamics.norm
    want = torch.zeros_like(state)
    for row in range(B):
        plane = torch.zeros(A, *state.shape[2:])
        plane[action[row]] = 1
        y = F.conv2d(torch.cat((state[row], plane))[None], weight, None, 1, 1)
        y = F.batch_norm(y, layer.running_mean, layer.running_var, layer.weight, layer.bias)
        want[row] = model.dynamics.block((state[row] + y).clamp(min=0))[0]
    assert_close(model.dynamics(state, action), want, rtol=1e-4, atol=1e-5)
    assert (model.dynamics(state, action) >= 0).all()


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_first_losses_are_those_of_no_opinion():
    model = make(lively=False, predict_termination=True)
    _, log = model.loss(segment(searched=some(1.0)))
    assert_close(log["reward_loss"], torch.tensor(math.log(19)))
    assert_close(log["value_loss"], torch.tensor(math.log(19)))
    assert_close(log["policy_loss"], torch.tensor(math.log(A)))
    assert_close(log["policy_entropy"], torch.tensor(math.log(A)))
    assert_close(log["termination_loss"], torch.tensor(math.log(2)))
    assert_close(log["value_mean"], torch.tensor(0.0))
    assert -1 <= log["consistency_loss"] <= 1


def cross_entropy(logits: Tensor, number: Tensor) -> Tensor:
    return -(value_bins.encode(number, 9) * logits.log_softmax(-1)).sum()


@pytest.mark.parametrize("bootstrap", ["target", "search"])
@torch.no_grad()
def test_the_loss_is_observing_and_imagining_step_by_step(bootstrap):
    searched = some(0.7)
    weights = {"reward_weight": 0.3, "policy_weight": 0.7, "value_weight": 1.1, "consistency_weight": 1.7}
    model, batch = make(predict_termination=True, bootstrap=bootstrap, **weights).eval(), segment(searched=searched)
    total, log = model.loss(batch)
    sums = {name: [] for name in ("reward", "policy", "value", "consistency", "end", "entropy", "mean")}
    shades = model.encode(batch.inputs)
    own = part_of(batch, slice(HISTORY, None))
    for row in range(B):
        alone = slice(row, row + 1)

        def at(frame, alone=alone):
            """The state of a frame behind the history, seen."""
            window = slice(frame, frame + N)
            no = torch.zeros(1, N, dtype=torch.bool)
            return model.observe(shades[alone, window], batch.action[alone, window], no)[1]

        def target_value(frame, row=row):
            image = shades[row, frame : frame + N][None].float() / 255
            hidden = model.target.prediction(model.target.representation(image))
            return value_bins.decode(model.target.value_head(hidden))[0]

        where = bootstrap_frames(own.valid[alone], UNROLL + 1, STEPS)[0].tolist()
        value = [target_value(frame) for frame in where]
        if bootstrap == "search":
            value = [
                own.targets.value[row, frame] if own.targets.is_searched[row, frame] else value[k]
                for k, frame in enumerate(where)
            ]
        goal, learned = n_step_returns(
            own.reward[alone], own.terminated[alone], own.valid[alone], torch.stack(value)[None], STEPS, 0.997
        )
        state, ends = at(0), bool((own.terminated[row] & own.valid[row])[: UNROLL + 1].any())
        for k in range(UNROLL + 1):
            if k:
                imagined, state = model.imagine(state, own.action[alone, k - 1])
                if ends and not own.valid[row, k - 1]:  # nothing is earned there, whatever is done
                    sums["reward"].append(cross_entropy(model.reward_head(state.state)[0], torch.zeros(())))
                if own.valid[row, k - 1]:
                    logits = model.reward_head(state.state)[0]
                    assert_close(imagined.reward[0], value_bins.decode(logits))
                    sums["reward"].append(cross_entropy(logits, own.reward[row, k - 1]))
                    end = model.termination_head(state.state)[0, 0]
                    assert imagined.terminated[0] == (end > 0)
                    sums["end"].append(-F.logsigmoid(end if own.terminated[row, k - 1] else -end))
                if own.valid[row, k]:
                    a = model.predictor(model.projection(state.state))[0]
                    b = model.projection(at(k).state)[0]
                    sums["consistency"].append(-(a @ b) / (a.norm() * b.norm()))
            policy, value = model.predict(state)
            if own.valid[row, k]:
                log_policy = policy[0].log_softmax(-1)
                sums["entropy"].append(-(log_policy.exp() * log_policy).sum())
                sums["mean"].append(value[0])
                if own.targets.is_searched[row, k]:
                    sums["policy"].append(-(own.targets.policy[row, k] * log_policy).sum())
            if learned[0, k] or (ends and not own.valid[row, k]):
                hidden = model.prediction(state.state)
                aim = goal[0, k] if learned[0, k] else torch.zeros(())
                sums["value"].append(cross_entropy(model.value_head(hidden)[0], aim))
    keys = {"entropy": "policy_entropy", "mean": "value_mean", "end": "termination_loss"}
    for name, each in sums.items():
        assert_close(log[keys.get(name, f"{name}_loss")], torch.stack(each).mean(), rtol=1e-4, atol=1e-5, msg=name)
    summed = {name: torch.stack(each).sum() for name, each in sums.items()}
    want = 0.3 * summed["reward"] + 0.7 * summed["policy"] + 1.1 * summed["value"] + 1.7 * summed["consistency"]
    assert_close(total, (want + summed["end"]) / (B * UNROLL), rtol=1e-4, atol=1e-5)
    assert len(sums["consistency"]) < len(sums["end"]) < len(sums["reward"])  # something was left out


def test_padding_leaves_no_trace():
    """But for the actions behind an end, which lead nowhere: what they lead to is learned to be worth nothing."""
    model = make(predict_termination=True).eval()
    batch = segment(searched=some(0.6))
    pad = ~batch.valid & (torch.arange(T) > HISTORY)  # the history is shown, whether padded or not
    ended = (batch.terminated & batch.valid).any(1, keepdim=True)
    assert ended.any() and not ended.all()
    other = batch._replace(
        inputs=torch.where(pad[..., None, None, None], frames(B, T, seed=9), batch.inputs),
        action=torch.where(pad & ~ended, (batch.action + 1) % A, batch.action),
        reward=torch.where(pad, 77.0, batch.reward),
        terminated=batch.terminated ^ pad,
        targets=batch.targets._replace(is_searched=batch.targets.is_searched | pad),
    )
    want, got = model.loss(batch), model.loss(other)
    assert_close(got[0], want[0])
    for name, value in want[1].items():
        assert_close(got[1][name], value, msg=name)


def test_every_parameter_learns_but_the_targets():
    model, batch = make(predict_termination=True, bootstrap="search"), segment(searched=some(0.9))
    with NoWaiting():
        total, _ = model.loss(batch)
    total.backward()
    ours = learning(model)
    assert len(ours) == len(set(ours)) and all(each.grad is not None and each.grad.any() for each in ours)
    rest = set(model.parameters()) - set(ours)
    assert rest == set(model.target.parameters()) and not any(each.requires_grad for each in rest)


def test_the_true_frames_side_of_consistency_learns_nothing():
    model = make()
    images = torch.rand(B, HISTORY + UNROLL, SIZE, SIZE)
    arrived = torch.randn(B * UNROLL, *model.feature_shape, requires_grad=True)
    model._inconsistency(arrived, images).sum().backward()
    assert arrived.grad.any() and all(each.grad is None for each in model.representation.parameters())


def test_without_a_search_no_policy_is_learned():
    model = make()
    for searched in (None, torch.zeros(B, T, dtype=torch.bool)):
        total, log = model.loss(segment(searched=searched))
        gradients = torch.autograd.grad(total, list(model.policy_head.parameters()), allow_unused=True)
        assert log["policy_loss"] == 0 and all(each is None or not each.any() for each in gradients)


# -- the target -------------------------------------------------------------------------------------------------------


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_the_target_is_renewed_by_the_clock_which_is_saved():
    def step(model):
        update(optimizers[model], model.loss(batch)[0], 1.0)
        model.after_update()

    def renewed(model):
        return all(same(part, getattr(model, name)) for name, part in model.target.items())

    model, batch = make(target_every=3), segment()
    assert set(model.target) == {"representation", "prediction", "value_head"}
    optimizers = {model: build_optimizer("sgd", model.parameter_groups(), 0.01, 0.0)}
    seen = []
    for _ in range(7):
        torch.manual_seed(len(seen))
        step(model)
        seen.append(renewed(model))
        if len(seen) == 4:
            saved = copy.deepcopy(model.state_dict())
    assert seen == [False, False, True, False, False, True, False]
    again = make(lively=False, target_every=3)
    again.load_state_dict(saved)
    optimizers[again] = build_optimizer("sgd", again.parameter_groups(), 0.01, 0.0)
    for seed in (4, 5, 6):
        torch.manual_seed(seed)
        step(again)
        assert renewed(again) == seen[seed]
    assert same(model, again)


def test_the_target_stays_in_eval_mode_and_batch_statistics_stand_still_outside_training():
    model, batch = make().train(), segment()
    before = copy.deepcopy(model.target.state_dict())
    model.loss(batch)
    assert not any(module.training for module in model.target.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.target.state_dict().items())
    model.eval()
    before = copy.deepcopy(model.state_dict())
    model.loss(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_rows_are_shifted_as_one():
    torch.manual_seed(3)
    images = torch.rand(200, 2, 6, 8)
    got = augment(images, 2, 0.0)
    padded = F.pad(images, (2, 2, 2, 2), mode="replicate")
    seen = set()
    for row in range(200):
        places = [
            (y, x) for y in range(5) for x in range(5) if torch.equal(padded[row, :, y : y + 6, x : x + 8], got[row])
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 25


def test_rows_are_made_brighter_or_darker():
    torch.manual_seed(3)
    images = torch.rand(5_000, 2, 2, 2) + 0.5
    factor = augment(images, 0, 0.05) / images
    assert_close(factor, factor[:, :1, :1, :1].expand_as(factor))
    assert float(factor.max()) == pytest.approx(1.1) and float(factor.min()) == pytest.approx(0.9)
    assert float(factor[:, 0, 0, 0].std()) == pytest.approx(0.05 * 0.96, abs=0.002)  # cut at two deviations


def test_only_training_varies():
    model, images = make(), torch.rand(2, 3, SIZE, SIZE)
    assert not torch.equal(model.train()._augment_rows(images), images)
    assert torch.equal(model.eval()._augment_rows(images), images)
    assert torch.equal(make(shift=0, intensity=0.0).train()._augment_rows(images), images)


# -- searching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_nodes_of_a_search(autocast):
    model = make(predict_termination=True).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states, _ = play(model, 3, torch.tensor([[True, False, True]] * B))
        assert len({str([(each.shape, each.dtype) for each in state]) for state in states}) == 1
        root = model.root(states[-1])
        assert isinstance(states[-1], ObservedState) and isinstance(root, UnrolledState)
        kept, action = tree_map(torch.clone, root), torch.arange(B) % A
        with Replayable():
            imagined, node = model.imagine(root, action)
            policy, value = model.predict(node)
        assert [(each.shape, each.dtype) for each in tree_leaves(root)] == [
            (each.shape, each.dtype) for each in tree_leaves(node)
        ]
        assert root.state.dtype == policy.dtype == value.dtype == imagined.reward.dtype == torch.float32
        assert policy.shape == (B, A) and value.shape == imagined.terminated.shape == (B,)
        assert torch.equal(model.latent(node), imagined.latent) and torch.equal(root.state, kept.state)
        order = torch.tensor([2, 0])
        _, got = model.imagine(tree_map(lambda each: each[order], node), torch.tensor([1, 1]))
        _, want = model.imagine(node, torch.ones(B, dtype=torch.long))
        assert_close(got.state, want.state[order], rtol=0.02 if autocast else 1e-4, atol=0.02 if autocast else 1e-5)
    other = model.imagine(root, (action + 1) % A)[0].latent
    assert not torch.equal(other, imagined.latent)


def test_autocast_and_a_frozen_model():
    model, batch = make().eval(), segment(searched=some(1.0))
    want, _ = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = model.loss(batch)
    assert got.dtype == torch.float32
    assert_close(got, want, rtol=0.05, atol=0.02)
    machine = Machine(torch.device("cpu"), "bfloat16", 1)
    model = machine.freeze(model)
    with machine.autocast():
        frozen, _ = model.loss(batch)
    assert_close(frozen, want, rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_a_fixed_batch_is_learned_by_heart():
    torch.manual_seed(1)
    batch = segment(searched=some(1.0))
    policy = F.one_hot(torch.randint(A, (B, T)), A).float()
    # Rewards whole in the bins, and values as good as rewards, so that nothing of the losses has to stay.
    batch = batch._replace(targets=batch.targets._replace(policy=policy), reward=value_bins.stretch(batch.reward))
    settings = {"discount": 1e-6, "consistency_weight": 0.0, "shift": 0, "intensity": 0.0, "head_width": 32}
    model = make(lively=False, predict_termination=True, **settings)
    optimizer = build_optimizer("sgd", model.parameter_groups(), 0.1, 1e-4, momentum=0.9)
    first = None
    for _ in range(300):
        total, _ = model.loss(batch)
        first = total.detach() if first is None else first
        update(optimizer, total, 10.0)
        model.after_update()
    assert total < 0.1 * first


# -- any observation, any action --------------------------------------------------------------------------------------


def make_for(observation, action, **settings) -> MuZero:
    torch.manual_seed(0)
    return MuZero(MuZeroSettings(**{**SMALL, **settings}), action, observation)


def segment_of(observation, action, searched=None) -> Batch:
    """As `segment`, without the repeated frames in padding; the targets have seven samples."""
    batch = segment(searched=searched)
    if searched is not None and not isinstance(action, Discrete):
        policy = torch.rand(B, T, 7, generator=torch.Generator().manual_seed(3)).softmax(-1)
        batch = batch._replace(targets=batch.targets._replace(policy=policy, sampled=actions(action, B, T, 7)))
    return batch._replace(inputs=observations(observation, B, T), action=actions(action, B, T))


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_any_observation_and_any_action(observation, action):
    model = make_for(observation, action, predict_termination=True)
    for name, module in model.named_modules():
        if name.endswith("_head.7"):
            nn.init.normal_(module.weight)
    batch = segment_of(observation, action, searched=some(0.8))
    with NoWaiting():
        total, log = model.loss(batch)
    total.backward()
    assert torch.isfinite(total) and all(torch.isfinite(each) for each in log.values())
    ours = learning(model)
    assert all(each.grad is not None and each.grad.any() for each in ours)
    assert set(model.parameters()) - set(ours) == set(model.target.parameters())
    model.after_update()

    model.eval()
    with torch.no_grad():
        reset = torch.zeros(B, T, dtype=torch.bool)
        reset[:, 0] = reset[1, 3] = True
        features, state = model.observe(model.encode(batch.inputs), batch.action, reset)
        assert features.shape == (B, T, *model.feature_shape)
        perceived = None
        for t in range(T):
            frame = map_parts(lambda part, at=t: part[:, at], batch.inputs)
            perceived = model.perceive(perceived, frame, batch.action[:, t - 1], reset[:, t])
            assert_close(model.features(perceived), features[:, t], rtol=1e-4, atol=1e-5)
        assert_close(perceived.stack, state.stack, rtol=0, atol=0)
    controller = MCTS(MCTSSettings(simulations=5, sampled_actions=4), action)
    logits, found = controller.decide(model, perceived, controller.initial_state(B), torch.Generator().manual_seed(0))
    chosen = controller.choose(logits, found, 1.0, torch.Generator().manual_seed(0))
    assert chosen.shape == (B, *action.shape) and chosen.dtype == batch.action.dtype
    imagined, _ = model.imagine(model.root(perceived), chosen)
    other, _ = model.imagine(model.root(perceived), actions(action, B, seed=9))
    assert not torch.equal(imagined.reward, other.reward), "the action matters"


@torch.no_grad()
def test_a_state_is_the_sum_of_what_images_and_numbers_say():
    space = OBSERVATIONS["all"]
    model, seen = make_for(space, 5).eval(), observations(space, 2, N)
    assert model.feature_shape == (6, 2, 3) and model.numbers[0].in_features == N * (3 + 6)
    _, state = model.observe(model.encode(seen), torch.zeros(2, N, dtype=torch.long), torch.zeros(2, N).bool())
    pixels = [seen[name].permute(0, 1, 4, 2, 3).flatten(1, 2) / 255 for name in ("camera", "depth")]
    joints = seen["joints"].sign() * (1 + seen["joints"].abs()).log()
    bag = torch.cat((F.one_hot(seen["bag"][..., 0], 2), F.one_hot(seen["bag"][..., 1], 4)), -1)
    numbers = model.numbers(torch.cat((joints.flatten(1), bag.flatten(1)), 1).float())
    assert_close(state.state, model.representation(torch.cat(pixels, 1)) + numbers[..., None, None])
    assert numbers.any() and set(model.target) == {"representation", "numbers", "prediction", "value_head"}


def test_without_an_image_the_state_has_one_place_and_the_convolutions_are_linear():
    model = make_for(Vector(3), ACTIONS["continuous"])
    assert model.feature_shape == (6, 1, 1) and model.representation is None
    assert {module.kernel_size for module in model.modules() if isinstance(module, nn.Conv2d)} == {(1, 1)}
    state, action = torch.rand(B, 6, 1, 1), actions(ACTIONS["continuous"], B)
    far = torch.where(action > 0, 3.0, -3.0)
    assert torch.equal(model.eval().dynamics(state, far), model.dynamics(state, far.clamp(-1, 1)))


def test_only_one_image_in_three_colors_is_seen_in_gray():
    for space, channels in (
        (Image(12, 20), 1),
        (Image(12, 20, 1), 1),
        ({"a": Image(12, 20)}, 3),
        (Image(12, 20, 4), 4),
    ):
        model = make_for(space, 5)
        assert model.representation[0].in_channels == N * channels
        seen = observations(space, 2, 3)
        latent = model.encode(seen)
        latent = latent["a"] if isinstance(latent, dict) else latent
        assert latent.shape == (2, 3, *([] if model.in_gray else [channels]), 12, 20) and latent.dtype == torch.uint8
        assert model.feature_shape == (6, 2, 3)


def test_augmentation_changes_images_alone_and_all_colors_of_a_row_alike():
    space = OBSERVATIONS["all"]
    model = make_for(space, 5, shift=2, intensity=0.0).train()
    inputs = model._scaled(model.encode(observations(space, 40, 2)))
    inputs["camera"] = inputs["camera"][:, :1, :1].expand(-1, 2, 3, -1, -1)
    torch.manual_seed(0)
    changed = model._augment_rows(inputs)
    assert changed["joints"] is inputs["joints"] and changed["bag"] is inputs["bag"]
    assert changed["camera"].shape == inputs["camera"].shape and changed["depth"].shape == inputs["depth"].shape
    assert not torch.equal(changed["depth"], inputs["depth"]) and not torch.equal(changed["camera"], inputs["camera"])
    assert_close(changed["camera"], changed["camera"][:, :1, :1].expand(-1, 2, 3, -1, -1))
    padded = F.pad(inputs["depth"].flatten(1, 2), (2, 2, 2, 2), mode="replicate")
    views = padded.unfold(2, 12, 1).unfold(3, 20, 1).flatten(2, 3).movedim(2, 1)
    assert (views == changed["depth"].flatten(1, 2)[:, None]).flatten(2).all(2).any(1).all()


# -- frames that close an episode -------------------------------------------------------------------------------------


def closed(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """The same, where in some rows the first frame of padding closes the episode; it repeats the flags."""
    closing = torch.zeros_like(batch.valid)
    for row in rows:
        closing[row, 1 + int(batch.valid[row].nonzero().max())] = True
    seen = torch.where(closing[..., None, None, None], frames(B, T, seed=8), batch.inputs)
    return batch._replace(inputs=seen, valid=batch.valid | closing, is_closing=closing)


def test_behind_a_termination_only_consistency_is_learned_besides_zeros():
    model = make(predict_termination=True, bootstrap="search").eval()
    batch = segment(lengths=(REAL, 2, 2, 1), searched=some(1.0))
    (_, want), (_, got) = model.loss(batch), model.loss(closed(batch, (1, 3)))
    for name, value in want.items():
        assert (got[name] == value) == (name != "consistency_loss"), name
    no = torch.zeros_like(batch.valid)
    assert_close(model.loss(batch._replace(is_closing=no)), model.loss(batch), rtol=0, atol=0)


def test_a_cut_episode_goes_on_to_the_frame_that_closes_it():
    model = make(predict_termination=True, closing_frames=True).eval()
    assert model.settings.reads_closing and not make().settings.reads_closing
    batch = segment(lengths=(REAL, 3, 2, 1), ended=(False,) * 4, searched=some(1.0))
    batch = closed(batch, (1, 2, 3))
    closing = batch.is_closing
    other = batch._replace(
        action=torch.where(closing, (batch.action + 1) % A, batch.action),
        reward=torch.where(closing, 77.0, batch.reward),
        targets=batch.targets._replace(policy=batch.targets.policy.masked_fill(closing[..., None], 1.0)),
    )
    assert_close(model.loss(other), model.loss(batch))
    seen = torch.where(closing[..., None, None, None], frames(B, T, seed=9), batch.inputs)
    changed, want = model.loss(batch._replace(inputs=seen))[1], model.loss(batch)[1]
    differ = {name for name in want if changed[name] != want[name]}
    assert differ == {"consistency_loss", "value_loss"}
    own = part_of(batch, slice(HISTORY, None))
    values = torch.arange(REAL).float().expand(B, -1)
    got, learned = model._value_targets(own, UNROLL + 1, lambda at: values.gather(1, at))
    assert learned.tolist() == [[True] * 3, [True] * 3, [True, True, False], [True, False, False]]
    assert_close(got[2, 1], own.reward[2, 1] + 0.997 * 2)


# -- learning with a search among samples -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "simulations"), [("gumbel", 16), ("mctx", 30)])
def test_a_continuous_action_is_learned_by_search(rule, simulations):
    """A target on a line is shown, and the reward is less the farther the action is from it."""
    space, rows, kept = Continuous((-1.0,), (1.0,)), 64, 20
    sizes = {"channels": (4, 32), "head_channels": 16, "head_width": 32, "bound": 3, "target_every": 10}
    unrolled = {"frame_stack": 1, "unroll_steps": 1, "td_steps": 1, "consistency_weight": 0.0}
    model = make_for(Vector(1), space, **sizes, **unrolled, predict_termination=True)
    controller = MCTS(MCTSSettings(simulations=simulations, sampled_actions=8, rule=rule), space)
    optimizer = build_optimizer("adamw", model.parameter_groups(), 3e-3, 1e-4)
    generator = torch.Generator().manual_seed(0)
    only_first = torch.tensor([True, False, False]).expand(rows, -1)
    errors, losses, found_better, batches = [], [], [], []

    def thrice(part: Tensor) -> Tensor:
        return part[:, None].expand(-1, 3, *part.shape[1:])

    for rounds in range(60):
        target = torch.rand(rows, 1, generator=generator) * 1.4 - 0.7
        state = model.eval().perceive(None, target, torch.zeros(rows, 1), torch.ones(rows, dtype=torch.bool))
        mean = model.distribution.choose(model.distribution.parameters(model.predict(state).policy), 0.0)
        errors.append(float((mean - target).abs().mean()))
        logits, found = controller.decide(model, state, controller.initial_state(rows), generator)
        scores = -2 * (found.sampled.clamp(-1, 1) - target[:, None]).square().sum(-1)
        found_better.append(float((found.policy * scores).sum(1).mean() - scores.mean()))
        action = controller.choose(logits, found, 1.0, generator)
        reward = -2 * (action.clamp(-1, 1) - target).square().sum(-1)
        targets = Targets(thrice(found.policy), thrice(found.value), only_first, thrice(found.sampled))
        no = torch.zeros_like(only_first)
        flags = only_first, no, only_first, only_first
        batches.append(Batch(thrice(target), thrice(action), thrice(reward), *flags, targets))
        if rounds < 5:
            continue
        leaves = zip(*(tree_leaves(batch) for batch in batches[-kept:]), strict=True)
        together = [torch.cat(each) for each in leaves if each[0] is not None]
        model.train()
        for _ in range(6):
            some_rows = torch.randint(len(together[0]), (128,), generator=generator)
            parts = [each[some_rows] for each in together]
            total, log = model.loss(Batch(*parts[:7], Targets(*parts[7:])))
            update(optimizer, total, 10.0)
            model.after_update()
        losses.append(float(log["policy_loss"]))
    assert sum(errors[:5]) / 5 > 0.3 and sum(errors[-10:]) / 10 < 0.1, errors
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.8, losses
    assert min(found_better[20:]) > 0, found_better
