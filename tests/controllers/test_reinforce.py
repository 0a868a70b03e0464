"""The recurrent controller: sizes, order of updates, burn-in, and its loss against a graph kept in imagination."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rollouts import imagine, learn
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

from wmcli.config import validate
from wmcli.controllers.reinforce import RecurrentRollout, ReinforceController, ReinforceSettings
from wmcli.errors import UsageError
from wmcli.nn import two_hot
from wmcli.nn.actions import random_actions
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete, Image, ObservationSpace, Vector
from wmcli.world_models.base import ImaginedStep

SMALL: dict[str, Any] = {
    "width": 7,
    "latent_channels": (6, 2),
    "pixel_channels": (3, 2),
    "burn_in": 5,
    "imagination_horizon": 4,
    "discount": 0.9,
    "trace_decay": 0.7,
    "entropy_weight": 0.3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rem": {},
    "no-burn-in-actions": {"burn_in_actions": False},
    "no-actions": {"action_inputs": False},
    "iris": {"input": "pixels", "action_inputs": False},
    "pixels-and-actions": {"input": "pixels"},
    "no-burn-in": {"burn_in": 0},
    "until-the-end": {"learn_after_end": False},
    "unimix": {"action_unimix": 0.2},
}


TWO_NUMBERS, TWO_CATEGORIES = Continuous((-1.0, 0.0), (1.0, 5.0)), Categories((3, 2))
SPACES: dict[str, tuple[ActionSpace, dict[str, Any]]] = {
    "categories": (TWO_CATEGORIES, {}),
    "mixed-categories": (TWO_CATEGORIES, {"action_unimix": 0.2}),
    "bins": (TWO_NUMBERS, {"bins": 4}),
    "normal": (TWO_NUMBERS, {"continuous": "normal"}),
    "no-actions": (TWO_NUMBERS, {"continuous": "normal", "action_inputs": False}),
    "pixels": (TWO_NUMBERS, {"continuous": "bins", "bins": 3, "input": "pixels"}),
}


def small(dtype=torch.float64, actions: ActionSpace | int = 4, **changes) -> ReinforceController:
    torch.manual_seed(3)
    settings = ReinforceSettings(**(SMALL | changes))
    return ReinforceController(settings, (5, 2, 3), 8, actions).to(dtype)


def on_actions(world: Any, space: ActionSpace) -> Any:
    """The counting world with other actions, of which every number counts."""

    def whole(action: Tensor) -> Tensor:
        return (action * torch.tensor([7, 3])).round().long().sum(-1) % 4

    class OtherActions(type(world)):
        def observe(self, latent, action, reset, numbers=None):
            return super().observe(latent, whole(action), reset)

        def imagine(self, state, action, numbers=None):
            return super().imagine(state, whole(action))

    world = OtherActions()
    world.action_space = space
    return world


def torch_policy(controller: ReinforceController, outputs: Tensor) -> tuple[Distribution, list[Categorical]]:
    """The policy of the outputs of the policy's head, as torch has it: one distribution, or several categories."""
    space, settings = controller.action_space, controller.settings
    if isinstance(space, Continuous) and settings.continuous == "normal":
        mean, deviation = outputs.chunk(2, -1)
        return Independent(Normal(mean.tanh(), 0.1 + 0.9 * torch.sigmoid(deviation + 2)), 1), []
    sizes = [settings.bins] * 2 if isinstance(space, Continuous) else list(getattr(space, "sizes", outputs.shape[-1:]))
    categories = []
    for logits in outputs.split(sizes, -1):
        share = settings.action_unimix
        categories.append(Categorical(probs=(1 - share) * logits.softmax(-1) + share / logits.shape[-1]))
    return categories[0], categories


def log_probability_and_entropy(controller: ReinforceController, outputs: Tensor, action: Tensor) -> tuple:
    whole, categories = torch_policy(controller, outputs)
    if not categories:
        return whole.log_prob(action), whole.entropy()
    if isinstance(controller.action_space, Continuous):
        action = ((action + 1) / 2 * (controller.settings.bins - 1)).round().long()
    action = action[..., None] if isinstance(controller.action_space, Discrete) else action
    each = list(zip(categories, action.unbind(-1), strict=True))
    return sum(part.log_prob(one) for part, one in each), sum(part.entropy() for part, _ in each)


def parameters(controller: ReinforceController) -> int:
    return sum(parameter.numel() for parameter in controller.parameters())


# -- sizes ---


@pytest.mark.parametrize("actions", [4, 18])
def test_parameter_counts(actions):
    with torch.device("meta"):
        rem = ReinforceController(ReinforceSettings(), (256, 8, 8), 64, actions)
        coarse = ReinforceController(ReinforceSettings(), (256, 4, 4), 64, actions)
        silent = ReinforceController(ReinforceSettings(action_inputs=False), (256, 8, 8), 64, actions)
        iris = ReinforceController(ReinforceSettings(input="pixels", action_inputs=False), (256, 4, 4), 64, actions)
        flat = ReinforceController(ReinforceSettings(), (1536,), 64, actions)
    assert parameters(rem) == 4_568_257 + 1_025 * actions
    assert parameters(coarse) == 2_999_493 + 1_025 * (actions - 4)
    assert parameters(silent) == 4_568_257 + 513 * actions
    assert parameters(iris) == 3_215_905 + 513 * actions
    lstm_and_heads = 4 * 512 * (2 * 512 + 2) + 513 * (actions + 1) + 512 * actions
    assert parameters(flat) == 1537 * 512 + lstm_and_heads
    (group,) = rem.parameter_groups()
    assert sum(parameter.numel() for parameter in group["params"]) == parameters(rem)
    assert group["weight_decay"] == 0.01
    assert rem.window == 21


def test_settings_from_a_table():
    settings = validate(ReinforceSettings, {"latent_channels": [8, 4], "discount": 1}, "here")
    assert settings.latent_channels == (8, 4)
    assert validate(ReinforceSettings, settings.model_dump(mode="json"), "here") == settings
    with pytest.raises(UsageError, match=r"here: pixel_channels\.1 = 2\.5"):
        validate(ReinforceSettings, {"pixel_channels": [8, 2.5]}, "here")


def test_an_input_that_does_not_fit():
    with pytest.raises(UsageError, match=r"controller\.input=pixels"):
        ReinforceController(ReinforceSettings(), (5, 6), 64, 4)
    with pytest.raises(UsageError, match=r"environment\.size = 40 must be a multiple of 16"):
        ReinforceController(ReinforceSettings(input="pixels"), (256, 8, 8), 40, 4)


def test_it_starts_nearly_uniform():
    torch.manual_seed(0)
    controller = ReinforceController(ReinforceSettings(width=64), (16, 4, 4), 64, 6)
    logits, _, _ = controller.policy(torch.randn(50, 16, 4, 4), controller.initial_state(50))
    entropy = Categorical(logits=logits.detach()).entropy()
    assert float((entropy - math.log(6)).abs().max()) < 0.03


def test_encoders_layer_by_layer():
    """Channels, rows and columns where the papers have them; bytes become [-1, 1]."""
    features = torch.randn(3, 5, 2, 3, dtype=torch.float64)
    first, second, dense = [layer for layer in small().encoder if list(layer.parameters())]
    x = F.silu(F.conv2d(features, first.weight, first.bias, padding=1))
    x = F.silu(F.conv2d(x, second.weight, second.bias, padding=1))
    want = F.silu(F.linear(x.reshape(3, 12), dense.weight, dense.bias))
    torch.testing.assert_close(small()._encode(features), want)

    flat = ReinforceController(ReinforceSettings(width=7), (30,), 8, 4).double()
    dense = flat.encoder[0]
    want = F.silu(F.linear(features.reshape(3, 30), dense.weight, dense.bias))
    torch.testing.assert_close(flat._encode(features.reshape(3, 30)), want)

    images = torch.randint(256, (3, 8, 8, 3), dtype=torch.uint8)
    first, second = [layer for layer in small(input="pixels").encoder if list(layer.parameters())]
    x = torch.stack([images[..., channel].double() * 2 / 255 - 1 for channel in range(3)], dim=1)
    x = F.max_pool2d(F.relu(F.conv2d(x, first.weight, first.bias, padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, second.weight, second.bias, padding=1)), 2)
    torch.testing.assert_close(small(input="pixels")._encode(images), x.reshape(3, 8))


# -- the order of LSTM updates ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_unroll_is_policy_and_follow_in_turn(variant, world):
    controller = small(**VARIANTS[variant])
    frames, actions = torch.randint(97, (3, 6)), torch.randint(4, (3, 6))
    pixels = controller.settings.input == "pixels"
    observation = world.decode(frames) if pixels else world._features(frames)
    reset = torch.rand(3, 6) < 0.3
    reset[:, 0] = False
    reset[1, 4] = True
    start = (torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64))

    state, hidden = start, []
    for t in range(6):
        state = controller.clear_rows(state, reset[:, t])
        logits, value, state = controller.policy(observation[:, t], state)
        assert logits.shape == (3, 4)
        assert value.shape == (3,)
        hidden.append(state[0])
        state = controller.follow(actions[:, t], state)
    got, got_state = controller.unroll(observation, actions, start, reset)
    torch.testing.assert_close(got, torch.stack(hidden, dim=1))
    torch.testing.assert_close(got_state, state)
    got, _ = controller.unroll(observation, actions[:, :-1], start, reset)  # the last action is not seen by any output
    torch.testing.assert_close(got, torch.stack(hidden, dim=1))


def test_an_action_is_known_from_the_next_frame_on(world):
    controller = small()
    observation, actions = world._features(torch.randint(97, (3, 6))), torch.randint(4, (3, 6))
    before, _ = controller.unroll(observation, actions, controller.initial_state(3))
    actions[:, 2] = (actions[:, 2] + 1) % 4
    after, _ = controller.unroll(observation, actions, controller.initial_state(3))
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=0)
    assert (after[:, 3:] != before[:, 3:]).all()


def test_a_reset_is_a_new_start(world):
    controller = small()
    observation, actions = world._features(torch.randint(97, (3, 6))), torch.randint(4, (3, 6))
    reset = torch.zeros(3, 6, dtype=torch.bool)
    reset[1, 4] = True
    got, _ = controller.unroll(observation, actions, controller.initial_state(3), reset)
    whole, _ = controller.unroll(observation, actions, controller.initial_state(3))
    tail, _ = controller.unroll(observation[:, 4:], actions[:, 4:], controller.initial_state(3))
    torch.testing.assert_close(got[1, 4:], tail[1])
    torch.testing.assert_close(got[1, :4], whole[1, :4])
    torch.testing.assert_close(got[[0, 2]], whole[[0, 2]])


# -- imagination ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_burn_in_equals_going_over_the_real_frames_alone(variant, world, make_batch):
    controller = small(**VARIANTS[variant])
    settings, window = controller.settings, controller.window
    real = tuple(min(n, window) for n in (3, 6, 1))
    batch = make_batch(real, window)
    rollout = imagine(controller, world, batch)
    for row, n in enumerate(real):
        frames, actions = batch.inputs[row, -n:], batch.action[row, -n:]
        seen, _ = world.observe(frames[None], actions[None], torch.arange(n)[None] == 0)
        seen = world.decode(frames[None]) if settings.input == "pixels" else seen
        state = controller.initial_state(1)
        for t in range(n - 1):
            _, _, state = controller.policy(seen[:, t], state)
            if settings.burn_in_actions:
                state = controller.follow(actions[t : t + 1], state)
        torch.testing.assert_close((rollout.start[0][row], rollout.start[1][row]), (state[0][0], state[1][0]))
        torch.testing.assert_close(rollout.observation[row, 0], seen[0, -1])


def test_padding_leaves_no_trace(world, make_batch):
    controller = small()
    batch = make_batch((3, 6, 1), 6)
    other = make_batch((3, 6, 1), 6, seed=1)
    mixed = batch._replace(
        inputs=torch.where(batch.valid, batch.inputs, other.inputs),
        action=torch.where(batch.valid, batch.action, other.action),
        is_first=batch.is_first & torch.tensor([True, False] * 3),
    )
    torch.manual_seed(0)
    want = imagine(controller, world, batch)
    torch.manual_seed(0)
    torch.testing.assert_close(imagine(controller, world, mixed), want, rtol=0, atol=0)


def test_a_rollout_records_the_steps_of_the_world_model(world, make_batch):
    controller = small()
    batch = make_batch((3, 6, 4), 6)
    rollout = imagine(controller, world, batch)
    starts = torch.arange(6) == 6 - torch.tensor([[3], [6], [4]])
    _, state = world.observe(batch.inputs, batch.action, starts)
    for t in range(4):
        torch.testing.assert_close(rollout.observation[:, t], world.features(state))
        imagined, state = world.imagine(state, rollout.action[:, t])
        torch.testing.assert_close(rollout.reward[:, t], imagined.reward)
        torch.testing.assert_close(rollout.terminated[:, t], imagined.terminated)
    torch.testing.assert_close(rollout.observation[:, 4], world.features(state))
    assert not any(tensor.requires_grad for tensor in [*rollout.start, *rollout[1:]])
    assert rollout.terminated.any(), "the test wants a termination inside a rollout"


@pytest.mark.parametrize("variant", ["rem", "iris"])
def test_a_batch_holds_latents_also_where_the_encoder_learns(variant, world, make_batch):
    controller = small(**VARIANTS[variant])
    batch = make_batch((3, 6, 4), 6)
    torch.manual_seed(0)
    want = imagine(controller, world, batch)
    world.frozen_encoder = False
    torch.manual_seed(0)
    torch.testing.assert_close(imagine(controller, world, batch), want)


def test_flat_features(world, make_batch):
    class Flat(type(world)):
        feature_shape = (30,)

        def _features(self, total):
            return super()._features(total).flatten(-3)

    flat, batch = Flat(), make_batch((3, 6, 4), 6)
    torch.manual_seed(3)
    controller = ReinforceController(ReinforceSettings(**SMALL), (30,), 8, 4)
    rollout = imagine(controller, flat, batch)
    assert rollout.observation.shape == (3, 5, 30)
    total, _ = controller.loss(rollout)
    total.backward()
    assert all(bool(parameter.grad.any()) for parameter in controller.parameters())


def test_a_world_model_in_training_mode_is_refused(world, make_batch):
    with pytest.raises(AssertionError, match="eval"):
        imagine(small(), world.train(), make_batch((3, 6, 4), 6))


# -- the loss ---


def loss_with_the_graph_kept(controller: ReinforceController, world, rollout: RecurrentRollout, batch) -> torch.Tensor:
    """The losses term by term, with autograd running through imagination itself."""
    settings = controller.settings
    starts = batch.valid.clone()
    starts[:, 1:] &= ~batch.valid[:, :-1]
    uniforms = controller.draw_uniforms(world, batch)
    _, world_state = world.observe(batch.inputs, batch.action, starts)
    state, value, log_probability, entropy, reward, ended = rollout.start, [], [], [], [], []
    for t in range(settings.imagination_horizon):
        parameters, v, state = controller.policy(controller.view(world, world_state), state)
        action = controller.distribution.sample(parameters.detach(), uniforms.action[t])
        torch.testing.assert_close(action, rollout.action[:, t], check_dtype=False)
        value.append(v)
        taken, spread = log_probability_and_entropy(controller, controller.policy_head(state[0]), action)
        log_probability.append(taken)
        entropy.append(spread)
        state = controller.follow(action, state)
        imagined, world_state = world.imagine(world_state, action)
        reward.append(imagined.reward)
        ended.append(imagined.terminated)
    _, v, _ = controller.policy(controller.view(world, world_state), state)
    value.append(v)

    target = value[-1].detach()
    total = torch.zeros((), dtype=v.dtype)
    decisions = 0
    for t in reversed(range(settings.imagination_horizon)):
        future = (1 - settings.trace_decay) * value[t + 1].detach() + settings.trace_decay * target
        target = reward[t] + settings.discount * (1 - ended[t].double()) * future
        for row in range(len(target)):
            if settings.learn_after_end or not any(ended[earlier][row] for earlier in range(t)):
                total = total + (value[t][row] - target[row]) ** 2
                total = total - log_probability[t][row] * (target[row] - value[t][row].detach())
                total = total - settings.entropy_weight * entropy[t][row]
                decisions += 1
    assert (decisions == settings.imagination_horizon * len(target)) == settings.learn_after_end, (
        "the test wants an early end"
    )
    return total / decisions


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_phases_give_the_gradient_of_one(variant, world, make_batch):
    controller = small(**VARIANTS[variant])
    window = controller.window
    batch = make_batch(tuple(min(n, window) for n in (3, 6, 4)), window)

    torch.manual_seed(11)
    rollout = imagine(controller, world, batch)
    torch.manual_seed(11)
    want = loss_with_the_graph_kept(controller, world, rollout, batch)
    want_gradients = torch.autograd.grad(want, list(controller.parameters()))

    torch.manual_seed(11)
    total, metrics = learn(controller, world, batch)
    gradients = torch.autograd.grad(total, list(controller.parameters()))
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(gradients, want_gradients)
    assert all(bool(gradient.any()) for gradient in gradients), "every parameter learns"
    assert not any(metric.requires_grad for metric in metrics.values())
    if controller.settings.learn_after_end:
        assert float(metrics["imagined_reward"]) == pytest.approx(float(rollout.reward.mean()))


@pytest.mark.parametrize("name", SPACES)
def test_two_phases_give_the_gradient_of_one_on_any_actions(name, world, make_batch):
    """And the formula's terms are those of torch's distributions."""
    space, changes = SPACES[name]
    controller, world = small(actions=space, **changes), on_actions(world, space)
    batch = make_batch((3, 6, 4), controller.window)
    batch = batch._replace(action=random_actions(space, batch.valid.shape, torch.Generator().manual_seed(1)))
    torch.manual_seed(11)
    rollout = imagine(controller, world, batch)
    assert rollout.action.shape == (3, 4, 2)
    assert rollout.action.dtype == (torch.int64 if isinstance(space, Categories) else torch.float32)
    torch.manual_seed(11)
    want = loss_with_the_graph_kept(controller, world, rollout, batch)
    gradients = torch.autograd.grad(want, list(controller.parameters()))
    total, metrics = controller.loss(rollout)
    close = {"rtol": 1e-5, "atol": 1e-7}  # actions are float32
    torch.testing.assert_close(total, want, **close)
    torch.testing.assert_close(torch.autograd.grad(total, list(controller.parameters())), gradients, **close)
    assert all(bool(gradient.any()) for gradient in gradients), "every parameter learns"
    assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("name", SPACES)
def test_acting_decides_by_the_parameters_that_imagination_samples_from(name, world):
    space, changes = SPACES[name]
    controller, world = small(torch.float32, actions=space, **changes), on_actions(world, space)
    frame = torch.randint(256, (5, 8, 8, 3), dtype=torch.uint8)
    before = random_actions(space, (5,))
    state = world.perceive(None, frame, torch.zeros(5, dtype=torch.long), torch.ones(5, dtype=torch.bool))
    parameters, own = controller.decide(world, state, controller.initial_state(5))
    assert parameters.shape == (5, controller.distribution.outputs) and parameters.dtype == torch.float32
    action = controller.choose(parameters, own, 1.0, torch.Generator().manual_seed(0))
    assert action.shape == (5, 2) and action.dtype == before.dtype
    likeliest = controller.choose(parameters, own, 0.0)
    taken, _ = log_probability_and_entropy(controller, controller.policy_head(own[0]), likeliest)
    other, _ = log_probability_and_entropy(controller, controller.policy_head(own[0]), action)
    assert (taken >= other).all()
    follow = controller.follow(action, own)
    assert torch.equal(follow[0], own[0]) == (not controller.settings.action_inputs)


def test_continuous_actions_are_bins_by_default():
    controller = ReinforceController(ReinforceSettings(), (8,), 64, TWO_NUMBERS)
    assert controller.distribution.outputs == 2 * 51, "as in Simulus"
    with pytest.raises(UsageError, match="bins = 1"):
        validate(ReinforceSettings, {"bins": 1}, "controller")


@pytest.mark.parametrize(
    "space",
    [Image(8, 8, 1), Vector(3), {"left": Image(8, 8), "right": Image(8, 8)}, {"body": Vector(2)}],
    ids=["gray", "vector", "two images", "no image"],
)
def test_pixels_need_a_single_image_in_three_colors(space: ObservationSpace):
    with pytest.raises(UsageError, match=r"a single image, in three colors.*controller\.input=latent"):
        ReinforceController(ReinforceSettings(input="pixels"), (8,), space, 4)
    ReinforceController(ReinforceSettings(), (8,), space, 4)


def test_pixels_are_those_of_the_image_among_the_parts(world, make_batch):
    class TwoParts(type(world)):
        def decode(self, latent, state=None):
            return {"body": latent[..., None].float(), "camera": super().decode(latent)[..., :4, :, :]}

    space, batch = {"body": Vector(1), "camera": Image(4, 8)}, make_batch((3, 6, 4), 6)
    torch.manual_seed(3)
    controller = ReinforceController(ReinforceSettings(**(SMALL | {"input": "pixels"})), (5, 2, 3), space, 4)
    rollout = imagine(controller, TwoParts(), batch)
    assert rollout.observation.shape == (3, 5, 4, 8, 3)
    assert torch.equal(rollout.observation[:, 0], TwoParts().decode(batch.inputs[:, -1])["camera"])
    with pytest.raises(UsageError, match="the image's 4 x 6 pixels must be a multiple of 4"):
        ReinforceController(controller.settings, (5,), Image(4, 6), 4)


def policy_gradient(controller: ReinforceController, rollout: RecurrentRollout) -> torch.Tensor:
    """The gradient of the policy's head, to which only the policy loss contributes where entropy has no weight."""
    total, _ = controller.loss(rollout)
    return torch.autograd.grad(total, controller.policy_head.weight)[0]


@pytest.mark.parametrize(("least", "divisor"), [(0.01, "the range"), (50.0, 50.0)])
def test_normalized_advantages_are_divided_by_the_range_of_the_returns(world, make_batch, least, divisor):
    plain = small(entropy_weight=0.0).train()
    normalized = small(entropy_weight=0.0, normalize_advantages=True, least_range=least).train()
    rollout = imagine(plain, world, make_batch((3, 6, 4), 6))
    assert normalized.return_range is not None
    normalized.return_range.high.fill_(3.0)
    normalized.eval()
    policy_gradient(normalized, rollout)
    assert float(normalized.return_range()) == 3.0, "only training moves the range"
    normalized.train()
    gradient = policy_gradient(normalized, rollout)
    assert float(normalized.return_range()) != 3.0
    scale = float(normalized.return_range()) if divisor == "the range" else divisor
    torch.testing.assert_close(gradient * scale, policy_gradient(plain, rollout))


def test_the_entropy_of_a_mixed_policy_is_bounded(world, make_batch):
    controller = small(action_unimix=0.2)
    torch.nn.init.constant_(controller.policy_head.bias, 0)
    with torch.no_grad():
        controller.policy_head.bias[2] = 1e3
    observation = world._features(torch.randint(97, (3,)))
    logits, _, _ = controller.policy(observation, controller.initial_state(3))
    want = torch.tensor([0.05, 0.05, 0.85, 0.05], dtype=torch.float64).expand(3, 4)
    torch.testing.assert_close(logits.softmax(-1), want)


def test_two_hot_values_start_at_zero_and_learn_the_return(world, make_batch):
    """The loss is the cross entropy of the distribution; its mean, the value, comes to the return of any size."""
    controller = small(value="two-hot", entropy_weight=0.0, discount=0.0)
    batch = make_batch((3, 6, 4), 6)
    rollout = imagine(controller, world, batch)._replace(
        reward=torch.full((3, controller.settings.imagination_horizon), -30.0, dtype=torch.float64)
    )
    _, first = controller.loss(rollout)
    assert float(first["value_mean"]) == pytest.approx(0)
    assert float(first["value_loss"]) == pytest.approx(math.log(two_hot.BINS))
    optimizer = torch.optim.Adam([controller.value_head.weight, controller.value_head.bias], lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        total, last = controller.loss(rollout)
        total.backward()
        optimizer.step()
    assert float(last["value_mean"]) == pytest.approx(-30, rel=0.02)


@pytest.mark.parametrize("name", ["discrete", *SPACES])
def test_float32_and_bfloat16(name, world, make_batch):
    batch = make_batch((3, 6, 4), 6)
    if name == "discrete":
        controller = small(torch.float32, width=32)
    else:
        space, changes = SPACES[name]
        controller, world = small(torch.float32, space, width=32, **changes), on_actions(world, space)
        batch = batch._replace(action=random_actions(space, batch.valid.shape, torch.Generator().manual_seed(1)))
    rollout = imagine(controller, world, batch)
    want, _ = controller.loss(rollout)
    with torch.autocast("cpu", torch.bfloat16):
        rough = imagine(
            controller, world, batch
        )  # without gradient, in the same autocast: its casts must not be reused
        total, metrics = controller.loss(rollout)
    total.backward()
    assert {tensor.dtype for tensor in [*rough.start, total, *metrics.values()]} == {torch.float32}
    for parameter in controller.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()
    assert float(total.detach()) == pytest.approx(float(want.detach()), rel=2e-2)


# -- learning ---


def test_reinforce_finds_the_good_arm(world, make_batch):
    """A bandit whose frames show which of three arms pays: a policy that ignores them earns a third."""

    class Bandit(type(world)):
        feature_shape = (3, 1, 1)

        def _features(self, total):
            return torch.nn.functional.one_hot(total % 3, 3).float()[..., None, None]

        def imagine(self, state, action, uniforms=None):
            frame = torch.randint(3, action.shape)
            reward = (action == state.total % 3).float()
            return ImaginedStep(frame, reward, torch.ones_like(reward, dtype=torch.bool)), state._replace(total=frame)

    bandit = Bandit(actions=3)
    torch.manual_seed(0)
    settings = ReinforceSettings(width=16, latent_channels=(4,), burn_in=0, imagination_horizon=4, entropy_weight=0.01)
    controller = ReinforceController(settings, bandit.feature_shape, 8, bandit.action_space)
    optimizer = torch.optim.AdamW(controller.parameter_groups(), lr=1e-2)
    reward = []
    for seed in range(200):
        total, metrics = learn(controller, bandit, make_batch((1,) * 16, 1, actions=3, seed=seed))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        reward.append(float(metrics["imagined_reward"]))
    assert sum(reward[:10]) / 10 < 0.5
    assert sum(reward[-20:]) / 20 > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("continuous", ["bins", "normal", "truncated-normal"])
def test_reinforce_finds_the_good_number(continuous, world, make_batch):
    """A bandit whose frames show which of two numbers pays best."""

    class Bandit(type(world)):
        feature_shape = (2,)
        action_space = Continuous((0.0,), (1.0,))

        def _features(self, total):
            return torch.nn.functional.one_hot(total % 2, 2).float()

        def observe(self, latent, action, reset, numbers=None):
            return super().observe(latent, action[..., 0].long(), reset)

        def imagine(self, state, action, uniforms=None):
            frame = torch.randint(2, action.shape[:1])
            reward = -(action[:, 0] - (state.total % 2 - 0.5)).abs()
            return ImaginedStep(frame, reward, torch.ones_like(reward, dtype=torch.bool)), state._replace(total=frame)

    torch.manual_seed(0)
    settings = ReinforceSettings(
        width=16, burn_in=0, imagination_horizon=4, entropy_weight=0.0, continuous=continuous, bins=9
    )
    controller = ReinforceController(settings, (2,), 8, Bandit.action_space)
    bandit, optimizer = Bandit(), torch.optim.AdamW(controller.parameter_groups(), lr=1e-2)
    bandit.action_space = Bandit.action_space
    reward = []
    for seed in range(300):
        batch = make_batch((1,) * 32, 1, seed=seed)
        total, metrics = learn(controller, bandit, batch._replace(action=torch.zeros(32, 1, 1)))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        reward.append(float(metrics["imagined_reward"]))
    assert sum(reward[:10]) / 10 < -0.4
    assert sum(reward[-20:]) / 20 > -0.25


def test_curiosity_adds_the_disagreement_to_the_rewards_that_are_learned_from(world, make_batch, monkeypatch):
    """And not to the recorded rewards."""
    plain_step = world.imagine

    def curious_step(state, action, uniforms=None):
        step, state = plain_step(state, action, uniforms)
        return step._replace(disagreement=1.0 + action), state

    batch = make_batch((3, 6, 4), 6)
    monkeypatch.setattr(world, "imagine", curious_step)
    controller = small(curiosity=0.25)
    rollout = imagine(controller, world, batch)
    monkeypatch.undo()
    plain = imagine(small(), world, batch)
    assert torch.equal(rollout.reward, plain.reward) and not plain.bonus.any()
    torch.testing.assert_close(
        rollout.bonus[:, -plain.action.shape[1] :], 0.25 * (1.0 + rollout.action), check_dtype=False
    )
    total, metrics = controller.eval().loss(rollout)
    same, others = controller.loss(rollout._replace(reward=rollout.reward + rollout.bonus, bonus=0 * rollout.bonus))
    torch.testing.assert_close((total, metrics["imagined_return"]), (same, others["imagined_return"]))
    without = controller.loss(rollout._replace(bonus=0 * rollout.bonus))[1]
    assert metrics["imagined_return"] > without["imagined_return"]
