"""The actor-critic: sizes, rollouts, every term of its loss by plain loops, what follows the weights, and learning."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from draws import assert_torchs_default
from rollouts import imagine, learn
from safetensors.torch import load, save
from torch import Tensor
from torch.distributions import Categorical
from watching import NoWaiting

from wmcli.config import validate
from wmcli.controllers.actor_critic import ActorCritic, ActorCriticSettings, FeatureRollout
from wmcli.errors import UsageError
from wmcli.nn import two_hot
from wmcli.nn.categorical import sample
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete
from wmcli.training.optim import build_optimizer, update
from wmcli.world_models.base import Batch, ImaginedStep

FEATURES = 30
SMALL: dict[str, Any] = {
    "actor_layers": 2,
    "actor_width": 7,
    "critic_layers": 1,
    "critic_width": 6,
    "imagination_horizon": 5,
    "discount": 0.9,
    "trace_decay": 0.7,
    "entropy_weight": 0.3,
    "slow_weight": 0.8,
    "slow_rate": 0.25,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "drama": {"returns": "drama"},
    "storm": {"returns": "storm", "norm": "layer", "activation": "relu", "normalize_inputs": False},
    "dreamer": {
        "start": "posterior",
        "slow_target": "values",
        "action_unimix": 0.1,
        "weigh_by_continuation": True,
        "normalize_inputs": False,
    },
    "prior-and-weights": {"weigh_by_continuation": True, "returns": "drama"},
    "small-rewards": {"least_range": 0.05},
}


def small(dtype=torch.float64, **changes) -> ActorCritic:
    """With last layers that say something: as they come, every policy is uniform and every value 0."""
    torch.manual_seed(3)
    controller = ActorCritic(ActorCriticSettings(**(SMALL | changes)), (5, 2, 3), actions=4, window=6)
    for network in (controller.actor, controller.critic, controller.slow_critic):
        torch.nn.init.normal_(network[-1].weight, std=0.5)
    return controller.to(dtype)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def same_state(one: ActorCritic, other: ActorCritic) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


# -- sizes and settings ---


@pytest.mark.parametrize(("layers", "actor", "critic"), [(3, 527_366, 1_444_607), (2, 461_318, 1_181_439)])
def test_parameter_counts(layers, actor, critic):
    settings = ActorCriticSettings(actor_layers=layers, critic_layers=layers)
    with torch.device("meta"):
        controller = ActorCritic(settings, (1536,), actions=6, window=8)
        more = ActorCritic(settings, (6, 16, 16), actions=18, window=8)
    assert (parameters(controller.actor), parameters(controller.critic)) == (actor, critic)
    assert parameters(controller) == actor + 2 * critic
    assert parameters(more.actor) == actor + 12 * 257
    (group,) = controller.parameter_groups()
    learned = [*controller.actor.parameters(), *controller.critic.parameters()]
    assert {id(each) for each in group["params"]} == {id(each) for each in learned}
    assert group["weight_decay"] == 0
    assert [each.requires_grad for each in controller.slow_critic.parameters()] == [False] * len(
        list(controller.critic.parameters())
    )
    assert controller.window == 8


def test_settings_from_a_table():
    settings = validate(ActorCriticSettings, {"returns": "drama", "discount": 1}, "here")
    assert validate(ActorCriticSettings, settings.model_dump(mode="json"), "here") == settings
    assert next(iter(ActorCriticSettings.model_fields)) == "kind"
    with pytest.raises(UsageError, match=r"here: returns = 'drama' .* start = 'prior'"):
        validate(ActorCriticSettings, {"returns": "drama", "start": "posterior"}, "here")
    with pytest.raises(UsageError, match="action_unimix = 1"):
        validate(ActorCriticSettings, {"action_unimix": 1.0}, "here")


# -- how it starts ---


@pytest.mark.parametrize("network", ["actor", "critic"])
def test_initialization(network):
    torch.manual_seed(0)
    settings = ActorCriticSettings(actor_width=16, critic_width=16)
    controller = ActorCritic(settings, (24,), actions=6, window=8)
    linear = [layer for layer in getattr(controller, network) if isinstance(layer, torch.nn.Linear)]
    for layer, gain in zip(linear, [math.sqrt(2)] * 3 + [0.001], strict=True):
        weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
        want = gain**2 * torch.eye(len(weight))
        torch.testing.assert_close(weight @ weight.T, want, atol=1e-5 * gain**2, rtol=0)
        assert not layer.bias.any()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_torchs_defaults(norm):
    torch.manual_seed(0)
    controller = ActorCritic(ActorCriticSettings(initialization="torch", norm=norm), (300,), actions=6, window=8)
    for network in (controller.actor, controller.critic, controller.slow_critic):
        for layer in network:
            if isinstance(layer, torch.nn.Linear):
                assert_torchs_default(layer)


def test_it_starts_nearly_uniform_and_expects_nothing():
    torch.manual_seed(0)
    controller = ActorCritic(ActorCriticSettings(), (24,), actions=6, window=8)
    feature = torch.randn(50, 24)
    with torch.no_grad():
        entropy = Categorical(logits=controller.policy(feature)).entropy()
        value = two_hot.decode(controller.critic(feature))
    assert float((entropy - math.log(6)).abs().max()) < 1e-3
    assert float(value.abs().max()) < 0.1
    torch.testing.assert_close(two_hot.decode(controller.slow_critic(feature)), value, rtol=0, atol=0)


# -- acting ---


def test_the_policy_with_a_share_of_the_uniform():
    plain, mixed = small(), small(action_unimix=0.2)
    feature = torch.randn(3, 2, FEATURES, dtype=torch.float64)
    got, base = mixed.policy(feature), plain.policy(feature)
    torch.testing.assert_close(got.exp(), 0.8 * base.exp() + 0.05)
    torch.testing.assert_close(base, plain.actor(feature).log_softmax(-1))
    mixed.actor[-1].weight.data *= 1e6
    assert float(mixed.policy(feature).detach().min()) == pytest.approx(math.log(0.05))


def test_it_decides_on_features_and_remembers_nothing(world):
    controller = small(torch.float32)
    controller.normalizer.update(torch.randn(10, FEATURES))
    before = copy.deepcopy(controller)
    state = controller.initial_state(3)
    assert state == ()
    observation = torch.full((3, 8, 8, 3), 7, dtype=torch.uint8)
    action, reset = torch.tensor([1, 2, 3]), torch.tensor([True, False, False])
    world_state = world.perceive(None, observation, action, reset)
    logits, after = controller.decide(world, world_state, state)
    assert logits.shape == (3, 4) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, controller.policy(world.features(world_state).reshape(3, 30)))
    assert (logits[0] != logits[1]).any()
    assert after == controller.clear_rows(state, reset) == controller.follow(action, state) == ()
    assert controller.burn_in(world, world_state, action, state) == ()
    same_state(controller, before)  # nothing is learned, or counted, while acting


def test_an_agent_without_memory_sees_the_frame_alone(world, make_batch):
    """The first features, in acting and in imagination; whatever the others are."""
    world.frame_features = 7
    torch.manual_seed(3)
    controller = ActorCritic(ActorCriticSettings(**SMALL, input="frame"), (7,), actions=4, window=6)
    torch.nn.init.normal_(controller.actor[-1].weight, std=0.5)
    observation = torch.full((3, 8, 8, 3), 7, dtype=torch.uint8)
    action, reset = torch.tensor([1, 2, 3]), torch.tensor([True, False, False])
    world_state = world.perceive(None, observation, action, reset)
    logits, _ = controller.decide(world, world_state, ())
    torch.testing.assert_close(logits, controller.policy(world.features(world_state).reshape(3, 30)[:, :7]))
    rollout = imagine(controller, world, make_batch((3, 6, 4), 6))
    whole = imagine(small(torch.float32), world, make_batch((3, 6, 4), 6))
    assert rollout.feature.shape == (3, 6, 7)
    torch.testing.assert_close(rollout.feature[:, 0], whole.feature[:, 0, :7])


def test_an_agent_may_see_all_that_is_remembered(world, make_batch):
    """Beside the features, in acting and in imagination."""
    world.memory_features, world.memory = 4, lambda state: world.features(state).flatten(1)[:, :4] + 100
    torch.manual_seed(3)
    controller = ActorCritic(ActorCriticSettings(**SMALL, input="memory"), (34,), actions=4, window=6)
    world_state = world.perceive(
        None, torch.full((3, 8, 8, 3), 7, dtype=torch.uint8), torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.bool)
    )
    features = world.features(world_state).reshape(3, 30)
    logits, _ = controller.decide(world, world_state, ())
    torch.testing.assert_close(logits, controller.policy(torch.cat((features, features[:, :4] + 100), 1)))
    feature = imagine(controller, world, make_batch((3, 6, 4), 6)).feature
    assert feature.shape == (3, 6, 34)
    torch.testing.assert_close(feature[..., 30:], feature[..., :4] + 100)


@pytest.mark.parametrize("variant", ["v3", "dreamer"])
def test_a_reloaded_policy_acts_the_same(variant, world, make_batch):
    """Bit for bit, after the normalizer has seen something."""
    controller = small(torch.float32, **VARIANTS[variant])
    learn(controller, world, make_batch((3, 6, 4), 6))
    other = ActorCritic(controller.settings, (5, 2, 3), actions=4, window=6)
    other.load_state_dict(load(save(controller.state_dict())))
    feature = 5 * torch.randn(20, FEATURES)
    assert torch.equal(other.eval().policy(feature), controller.policy(feature))
    if controller.normalizer is not None:
        controller.normalizer.mean.zero_()
        assert not torch.equal(other.policy(feature), controller.policy(feature))


# -- imagination ---


@pytest.mark.parametrize("variant", ["v3", "dreamer"])
def test_a_rollout_records_the_steps_of_the_world_model(variant, world, make_batch):
    controller = small(**VARIANTS[variant])
    batch = make_batch((3, 6, 4), 6)
    rollout = imagine(controller, world, batch)
    starts = torch.arange(6) == 6 - torch.tensor([[3], [6], [4]])
    features, state = world.observe(batch.inputs, batch.action, starts)
    if variant == "v3":
        imagined, state = world.imagine(state, batch.action[:, -1])
        torch.testing.assert_close((rollout.reward[:, 0], rollout.terminated[:, 0]), imagined[1:3])
        assert rollout.reward[:, 0].any()
    else:
        torch.testing.assert_close(rollout.feature[:, 0], features[:, -1].flatten(1))
        assert not rollout.reward[:, 0].any() and not rollout.terminated[:, 0].any()
    for t in range(5):
        torch.testing.assert_close(rollout.feature[:, t], world.features(state).reshape(3, 30))
        imagined, state = world.imagine(state, rollout.action[:, t])
        torch.testing.assert_close(rollout.reward[:, t + 1], imagined.reward)
        torch.testing.assert_close(rollout.terminated[:, t + 1], imagined.terminated)
    torch.testing.assert_close(rollout.feature[:, 5], world.features(state).reshape(3, 30))
    assert rollout.action.shape == (3, 5) and rollout.feature.shape == (3, 6, 30)
    assert not any(tensor.requires_grad for tensor in rollout if tensor is not None)
    assert rollout.terminated.any(), "the test wants a termination inside a rollout"


def test_padding_leaves_no_trace(world, make_batch):
    controller = small()
    batch, other = make_batch((3, 6, 1), 6), make_batch((3, 6, 1), 6, seed=1)
    mixed = batch._replace(
        inputs=torch.where(batch.valid, batch.inputs, other.inputs),
        action=torch.where(batch.valid, batch.action, other.action),
        is_first=batch.is_first & torch.tensor([True, False] * 3),
    )
    torch.manual_seed(0)
    want = imagine(controller, world, batch)
    torch.manual_seed(0)
    torch.testing.assert_close(imagine(controller, world, mixed), want, rtol=0, atol=0)


def test_a_window_over_the_end_of_an_episode(world, make_batch):
    """What came before the frame that opens an episode is forgotten."""
    controller = small()
    batch, other = make_batch((6, 6, 6), 6), make_batch((6, 6, 6), 6, seed=1)
    opens = torch.arange(6).expand(3, 6) == 4
    torch.manual_seed(0)
    want = imagine(controller, world, batch._replace(is_first=opens))
    mixed = batch._replace(is_first=opens, inputs=torch.cat([other.inputs[:, :4], batch.inputs[:, 4:]], 1))
    torch.manual_seed(0)
    torch.testing.assert_close(imagine(controller, world, mixed), want, rtol=0, atol=0)
    torch.manual_seed(0)
    assert not torch.equal(imagine(controller, world, mixed._replace(is_first=~opens & opens)).feature, want.feature)


def test_actions_follow_the_policy(world, make_batch):
    controller = small()
    rollout = imagine(controller, world, make_batch((6,) * 4000, 6))
    probability = controller.policy(rollout.feature[:, :-1]).detach().exp().mean((0, 1))
    share = torch.nn.functional.one_hot(rollout.action, 4).double().mean((0, 1))
    torch.testing.assert_close(share, probability, atol=0.015, rtol=0)
    assert float(probability.max() - probability.min()) > 0.05


def test_a_world_model_in_training_mode_is_refused(world, make_batch):
    with pytest.raises(AssertionError, match="eval"):
        imagine(small(), world.train(), make_batch((3, 6, 4), 6))


# -- the loss ---


def returns_by_hand(settings, reward, ended, values) -> list[float]:
    """Lambda-returns of one rollout: `reward` and `ended` of n states, on the way to each, and n values."""
    target, targets = values[-1], []
    for t in reversed(range(len(values) - 1)):
        r, d = (reward[t], ended[t]) if settings.returns == "drama" else (reward[t + 1], ended[t + 1])
        trusted = values[t + 1] if settings.returns == "v3" else values[t]
        future = (1 - settings.trace_decay) * trusted + settings.trace_decay * target
        target = r + (0.0 if d else settings.discount * future)
        targets.append(target)
    return targets[::-1]


def loss_with_the_graph_kept(controller: ActorCritic, world, batch) -> tuple[torch.Tensor, float]:
    """The losses term by term, with autograd running through imagination itself; and the percentiles' new range."""
    settings, horizon = controller.settings, controller.settings.imagination_horizon
    starts = batch.valid.clone()
    starts[:, 1:] &= ~batch.valid[:, :-1]
    uniforms = controller.draw_uniforms(world, batch)
    _, state = world.observe(batch.inputs, batch.action, starts)
    reward, ended = [torch.zeros(3)], [torch.zeros(3, dtype=torch.bool)]
    if settings.start == "prior":
        imagined, state = world.imagine(state, batch.action[:, -1])
        reward, ended = [imagined.reward], [imagined.terminated]
    policies, actions, logits, slow = [], [], [], []
    for t in range(horizon + 1):
        feature = world.features(state).reshape(3, 30).double()
        logits.append(controller.critic(feature))
        slow.append(controller.slow_critic(feature).detach())
        if t < horizon:
            policies.append(Categorical(logits=controller.policy(feature)))
            actions.append(sample(policies[-1].logits.detach(), uniforms.action[t, :, 0]))
            imagined, state = world.imagine(state, actions[-1])
            reward.append(imagined.reward)
            ended.append(imagined.terminated)

    def column(tensors, row):
        return [float(tensor[row]) for tensor in tensors]

    bins = torch.linspace(-20, 20, 255, dtype=torch.float64)

    def value_of(some_logits):
        return two_hot.symexp((some_logits.detach().softmax(-1) * bins).sum(-1))

    values, slow_values = [value_of(each) for each in logits], [value_of(each) for each in slow]
    targets, slow_targets = [], []
    for row in range(3):
        told = column(reward, row), column(ended, row)
        targets.append(returns_by_hand(settings, *told, column(values, row)))
        of_slow = column(slow_values, row)
        slow_targets.append(
            returns_by_hand(settings, *told, of_slow) if settings.slow_target == "returns" else of_slow[:-1]
        )
    ordered = sorted(sum(targets, []))
    k_low, k_high = max(1, int(0.05 * len(ordered))), int(0.95 * len(ordered))
    low = 0.99 * float(controller.return_range.low) + 0.01 * ordered[k_low - 1]
    high = 0.99 * float(controller.return_range.high) + 0.01 * ordered[k_high - 1]

    total, uneven = torch.zeros((), dtype=torch.float64), set()
    for t in range(horizon):
        log_probability, entropy = policies[t].log_prob(actions[t]), policies[t].entropy()
        for row in range(3):
            weight = 1.0
            if settings.weigh_by_continuation:
                weight = settings.discount**t * (not any(ended[k][row] for k in range(t + 1)))
            uneven.add(weight)
            advantage = (targets[row][t] - float(values[t][row])) / max(settings.least_range, high - low)
            log_bins = logits[t][row].log_softmax(-1)
            code, slow_code = (
                two_hot.encode(torch.tensor(goal[row][t], dtype=torch.float64)) for goal in (targets, slow_targets)
            )
            term = -log_probability[row] * advantage - (code * log_bins).sum()
            term = term - settings.slow_weight * (slow_code * log_bins).sum() - settings.entropy_weight * entropy[row]
            total = total + weight * term
    assert (0 in uneven) == settings.weigh_by_continuation, "the test wants an early end"
    return total / (3 * horizon), high - low


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_and_its_gradient_by_hand(variant, wide, world, make_batch):
    controller = small(**VARIANTS[variant])
    batch = make_batch((3, 6, 4), 6)
    learn(controller, world, make_batch((3, 6, 4), 6, seed=1))  # so that the statistics are not those of the beginning
    controller.return_range.low.zero_()
    controller.return_range.high.fill_(7 if wide else 0.1)  # the advantages are divided, or left as they are
    learned = controller.parameter_groups()[0]["params"]

    torch.manual_seed(11)
    want, scale = loss_with_the_graph_kept(controller, world, batch)
    want_gradients = torch.autograd.grad(want, learned)
    torch.manual_seed(11)
    total, metrics = learn(controller, world, batch)
    gradients = torch.autograd.grad(total, learned)
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(gradients, want_gradients)
    assert float(metrics["return_scale"]) == pytest.approx(scale)
    assert (scale > 1) == wide
    assert all(bool(gradient.any()) for gradient in gradients), "every parameter learns"
    assert not any(metric.requires_grad for metric in metrics.values())


def test_metrics(world, make_batch):
    controller = small()
    batch = make_batch((3, 6, 4), 6)
    torch.manual_seed(11)
    rollout = imagine(controller, world, batch)
    torch.manual_seed(11)
    total, metrics = learn(controller, world, batch)
    assert set(metrics) == {
        "value_loss",
        "policy_loss",
        "slow_loss",
        "entropy",
        "value_mean",
        "imagined_return",
        "imagined_reward",
        "imagined_terminations",
        "return_scale",
    }
    parts = metrics["policy_loss"] + metrics["value_loss"] + 0.8 * metrics["slow_loss"] - 0.3 * metrics["entropy"]
    torch.testing.assert_close(total, parts)
    assert float(metrics["imagined_reward"]) == pytest.approx(float(rollout.reward[:, 1:].mean()))
    assert float(metrics["imagined_terminations"]) == pytest.approx(float(rollout.terminated[:, 1:].float().mean()))
    assert float(metrics["value_mean"]) == pytest.approx(
        float(two_hot.decode(controller.critic(rollout.feature[:, :-1].double()).detach()).mean())
    )


def test_float32_and_bfloat16(world, make_batch):
    controller = small(torch.float32, actor_width=32, critic_width=32)
    batch = make_batch((3, 6, 4), 6)
    rollout = imagine(controller, world, batch)
    want, _ = copy.deepcopy(controller).loss(rollout)
    with torch.autocast("cpu", torch.bfloat16):
        imagine(controller, world, batch)  # without gradient, in the same autocast: its casts must not be reused
        logits, _ = controller.decide(world, world.observe(batch.inputs, batch.action, batch.is_first)[1], ())
        total, metrics = controller.loss(rollout)
    total.backward()
    assert {tensor.dtype for tensor in [total, logits, *metrics.values(), *controller.buffers()]} == {torch.float32}
    for parameter in controller.parameter_groups()[0]["params"]:
        assert parameter.grad is not None and parameter.grad.any()
    assert float(total.detach()) == pytest.approx(float(want.detach()), rel=2e-2)


def test_values_are_not_rounded_under_autocast():
    """A critic that is sure of 100: with bfloat16 logits or bins its value would be off by more than a percent."""
    controller = small(torch.float32, critic_layers=1)
    rollout = FeatureRollout(
        torch.randn(4, 6, FEATURES),
        torch.zeros(4, 5, dtype=torch.long),
        torch.zeros(4, 6),
        torch.zeros(4, 6).bool(),
        torch.zeros(4, 6),
        torch.ones(4).bool(),
    )
    with torch.no_grad():
        controller.critic[-1].weight.zero_()
        controller.critic[-1].bias.copy_(two_hot.encode(torch.tensor(100.0)).log().clamp(min=-60))
    with torch.autocast("cpu", torch.bfloat16):
        _, metrics = controller.loss(rollout)
    assert float(metrics["value_mean"]) == pytest.approx(100, rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_device_is_never_waited_for(variant, world, make_batch):
    controller = small(**VARIANTS[variant])
    batch = make_batch((3, 6, 4), 6)
    with NoWaiting():
        total, _ = learn(controller, world, batch)
        total.backward()
        controller.after_update()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        float(total.detach())


# -- what follows the weights ---


def test_the_slow_critic_follows(world):
    controller = small()
    torch.nn.init.zeros_(controller.slow_critic[-1].weight)
    start = [slow.clone() for slow in controller.slow_critic.parameters()]
    critic = [weight.clone() for weight in controller.critic.parameters()]
    for step in range(1, 4):
        controller.after_update()
        for slow, first, weight in zip(controller.slow_critic.parameters(), start, critic, strict=True):
            left = 0.75**step
            torch.testing.assert_close(slow, left * first + (1 - left) * weight)
            assert not slow.requires_grad and slow.grad is None
    torch.testing.assert_close(list(controller.critic.parameters()), critic, rtol=0, atol=0)


def test_the_normalizer_knows_all_that_was_imagined(world, make_batch):
    controller = small()
    seen = []
    for seed in range(4):
        batch = make_batch((3, 6, 4), 6, seed=seed)
        torch.manual_seed(seed)
        rollout = imagine(controller, world, batch)  # the policy depends on the normalizer: it has to come first
        torch.manual_seed(seed)
        learn(controller, world, batch)
        seen.append(rollout.feature.reshape(-1, FEATURES).double())
    whole = torch.cat(seen)
    torch.testing.assert_close(controller.normalizer.mean, whole.mean(0), atol=1e-4, rtol=0)
    torch.testing.assert_close(controller.normalizer.variance, whole.var(0, correction=0), atol=1e-4, rtol=0)
    assert float(controller.normalizer.count) == pytest.approx(len(whole) + 1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_statistics_change_in_training_mode_only(training, world, make_batch):
    controller = small().train(training)
    before = copy.deepcopy(controller)
    learn(controller, world, make_batch((3, 6, 4), 6))
    changed = {
        name for name, value in controller.state_dict().items() if not torch.equal(value, before.state_dict()[name])
    }
    normalizer = {"normalizer.mean", "normalizer.variance", "normalizer.count"}
    assert changed == (normalizer | {"return_range.low", "return_range.high"} if training else set())


def trained(controller: ActorCritic, optimizer, world, batches) -> None:
    for batch in batches:
        total, _ = learn(controller, world, batch)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        controller.after_update()


def test_resume_is_exact(world, make_batch):
    batches = [make_batch((3, 6, 4), 6, seed=seed) for seed in range(6)]
    whole = small(torch.float32)
    optimizer = torch.optim.Adam(whole.parameter_groups(), lr=1e-2)
    trained(whole, optimizer, world, batches[:3])
    stored, moments = load(save(whole.state_dict())), copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    trained(whole, optimizer, world, batches[3:])

    other = ActorCritic(whole.settings, (5, 2, 3), actions=4, window=6)
    other.load_state_dict(stored)
    optimizer = torch.optim.Adam(other.parameter_groups(), lr=1e-2)
    optimizer.load_state_dict(moments)
    torch.set_rng_state(random)
    trained(other, optimizer, world, batches[3:])
    same_state(other, whole)


# -- learning ---


@pytest.mark.parametrize(
    "changes",
    [{}, {"returns": "drama"}, {"returns": "storm"}, {"start": "posterior", "slow_target": "values"}],
    ids=["v3", "drama", "storm", "dreamer"],
)
def test_it_finds_the_good_arm(changes, world, make_batch):
    """A bandit whose frames show which of three arms pays: a policy that ignores them earns a third."""

    class Bandit(type(world)):
        feature_shape = (3,)

        def _features(self, total):
            return torch.nn.functional.one_hot(total % 3, 3).float()

        def imagine(self, state, action, uniforms=None):
            frame = torch.randint(3, action.shape)
            reward = (action == state.total % 3).float()
            return ImaginedStep(frame, reward, torch.zeros_like(reward, dtype=torch.bool)), state._replace(total=frame)

    bandit = Bandit(actions=3)
    torch.manual_seed(0)
    settings = ActorCriticSettings(
        actor_layers=1, actor_width=16, critic_layers=1, critic_width=16, imagination_horizon=6, discount=0.7, **changes
    )
    controller = ActorCritic(settings, bandit.feature_shape, bandit.action_space, window=1)
    optimizer = torch.optim.Adam(controller.parameter_groups(), lr=1e-2)
    reward = []
    for seed in range(150):
        total, metrics = learn(controller, bandit, make_batch((1,) * 32, 1, actions=3, seed=seed))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        controller.after_update()
        reward.append(float(metrics["imagined_reward"]))
    assert sum(reward[:5]) / 5 < 0.45
    assert sum(reward[-20:]) / 20 > 0.95


@pytest.mark.parametrize(("start", "count"), [("prior", False), ("posterior", True)])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nothing_is_learned_behind_the_real_end_of_an_episode(world, make_batch, start, count, end):
    """Imagination after the last real action would begin where nothing follows; from the frame itself it is sound."""
    controller = small(start=start)
    batch = make_batch((6, 6, 6), 6)
    over = torch.zeros(3, 6, dtype=torch.bool)
    over[1, -1] = True
    rollout = imagine(controller, world, batch._replace(**{end: over}))
    assert rollout.valid.tolist() == [True, count, True]
    total, _ = controller.loss(rollout)
    other = rollout._replace(reward=rollout.reward.clone())
    other.reward[1] += 5.0
    controller.eval()
    same = float(controller.loss(rollout)[0].detach()) == float(controller.loss(other)[0].detach())
    assert same != count


@pytest.mark.parametrize("start", ["prior", "posterior"])
def test_rollouts_begin_behind_a_lost_life_but_not_behind_the_end_of_a_game(world, make_batch, start):
    batch = make_batch((6, 6, 6), 6)
    terminated, last = torch.zeros(2, 3, 6, dtype=torch.bool)
    terminated[1:, -1] = last[2, -1] = True
    rollout = imagine(small(start=start), world, batch._replace(terminated=terminated, is_last=last))
    assert rollout.valid.tolist() == [True, True, start == "posterior"]


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


# -- any action space, and the gradient of the returns through the world model ---

SPACES: dict[str, ActionSpace] = {
    "discrete": Discrete(3),
    "categories": Categories((2, 3)),
    "continuous": Continuous((-1.0, 0.0), (1.0, 3.0)),
}


class Numbers(NamedTuple):
    x: Tensor
    """(B, 3)"""


class SmoothModel:
    """Three numbers that the action moves smoothly. `observe` reads the last frame; nothing is sampled."""

    settings = None
    feature_shape = (3,)
    frame_features = memory_features = None
    uniforms_per_frame = uniforms_per_step = 0
    context = 1
    training = False
    has_ensemble = False
    differentiable = True
    starts_anywhere = True

    def __init__(self, action_space: ActionSpace, dtype: torch.dtype = torch.float64) -> None:
        self.action_space = action_space
        self.dtype = dtype
        generator = torch.Generator().manual_seed(4)
        self.by_state = torch.randn(3, 3, generator=generator, dtype=dtype)
        self.by_action = torch.randn(8, 3, generator=generator, dtype=dtype)

    def _features(self, latent: Tensor) -> Tensor:
        return torch.sin(latent[..., None] * torch.arange(1, 4)).to(self.dtype)

    def observe(self, latent, action, reset, uniforms=None):
        features = self._features(latent)
        return features, Numbers(features[:, -1])

    def observe_each(self, latent, action, reset, uniforms=None, last=1):
        features = self._features(latent)
        return features, Numbers(features[:, -last:].flatten(0, 1))

    def imagine(self, state, action, uniforms=None):
        moved = action.reshape(len(action), -1).to(self.dtype)
        x = torch.tanh(state.x @ self.by_state + moved @ self.by_action[: moved.shape[1]])
        reward = (x * torch.tensor([1.0, -0.5, 0.7])).sum(1)
        continuation = torch.sigmoid(2 + x[:, 0])
        return ImaginedStep(x, reward, x[:, 0].detach() > 0.9, continuation=continuation), Numbers(x)

    def features(self, state):
        return state.x

    def find_ends(self, batch):
        return batch.terminated


def windows(space: ActionSpace, rows: int, frames: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    never = torch.zeros(rows, frames, dtype=torch.bool)
    return Batch(
        torch.randint(50, (rows, frames), generator=generator),
        torch.zeros(rows, frames, *space.shape, dtype=torch.float32 if isinstance(space, Continuous) else torch.int64),
        torch.randn(rows, frames, generator=generator, dtype=torch.float64),
        never,
        never,
        never,
        ~never,
    )


def of(space: ActionSpace, world_model: Any = None, **changes) -> ActorCritic:
    """A small actor-critic that starts at real frames, built as the settings build it."""
    torch.manual_seed(3)
    world_model = world_model or SmoothModel(space)
    values = SMALL | {"start": "posterior", "normalize_inputs": False} | changes
    controller = ActorCriticSettings(**values).build(world_model, lambda function: function)
    for network in (controller.actor, controller.critic, controller.slow_critic):
        torch.nn.init.normal_(network[-1].weight, std=0.5)
    return controller.double()


@pytest.mark.parametrize("space", SPACES)
def test_rollouts_of_any_actions(space):
    action_space = SPACES[space]
    controller, model = of(action_space), SmoothModel(action_space)
    batch = windows(action_space, 7, 1)
    uniforms = controller.draw_uniforms(model, batch)
    rollout = controller.imagine(model, batch, uniforms)
    assert rollout.action.shape == (7, 5, *action_space.shape)
    state = model.observe(batch.inputs, None, None)[1]
    for t in range(5):
        parameters = controller.policy(rollout.feature[:, t])
        want = controller.distribution.sample(parameters, uniforms.action[t])
        torch.testing.assert_close(rollout.action[:, t], want, rtol=0, atol=0)
        step, state = model.imagine(state, want)
        torch.testing.assert_close(rollout.feature[:, t + 1], state.x)
        torch.testing.assert_close(rollout.reward[:, t + 1], step.reward)
    decided, _ = controller.decide(model, Numbers(rollout.feature[:, 0]), ())
    assert controller.choose(decided, (), 0.0).shape == (7, *action_space.shape)


@pytest.mark.parametrize("continuous", ["normal", "truncated-normal", "bins"])
@pytest.mark.parametrize("space", SPACES)
def test_the_loss_of_any_actions_by_its_formula(space, continuous):
    """-log pi(a) (G - V) / S - entropy weight H(pi), over the recorded actions."""
    action_space = SPACES[space]
    controller, model = of(action_space, continuous=continuous).eval(), SmoothModel(action_space)
    rollout = imagine(controller, model, windows(action_space, 7, 1))
    total, _ = controller.loss(rollout)
    gradients = torch.autograd.grad(total, list(controller.actor.parameters()))

    parameters = controller.policy(rollout.feature[:, :-1])
    value = two_hot.decode(controller.critic(rollout.feature)).detach()
    target = value[:, -1]
    want = torch.zeros((), dtype=torch.float64)
    for t in reversed(range(5)):
        future = 0.3 * value[:, t + 1] + 0.7 * target
        target = rollout.reward[:, t + 1] + 0.9 * future.masked_fill(rollout.terminated[:, t + 1], 0)
        log_probability = controller.distribution.log_probability(parameters[:, t], rollout.action[:, t])
        entropy = controller.distribution.entropy(parameters[:, t])
        want = want - (log_probability * (target - value[:, t]) + 0.3 * entropy).sum() / (7 * 5)
    torch.testing.assert_close(gradients, torch.autograd.grad(want, list(controller.actor.parameters())))


@pytest.mark.parametrize("continuous", ["normal", "truncated-normal"])
@pytest.mark.parametrize("changes", [{}, {"weigh_by_continuation": True, "expected_continuation": True}])
def test_the_reparameterized_gradient_is_that_of_finite_differences(continuous, changes):
    """Of the mean weighted return over the range, with the random numbers and the weights of the steps fixed."""
    space = SPACES["continuous"]
    changes = changes | {"continuous": continuous, "gradient": "reparameterized", "entropy_weight": 0.0}
    controller, model = of(space, **changes).eval(), SmoothModel(space)
    controller.return_range.high.fill_(3.0)
    batch = windows(space, 6, 1)
    uniforms = controller.draw_uniforms(model, batch)
    assert controller.differentiates

    def policy_loss(weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rollout = controller.imagine(model, batch, uniforms)
        with torch.no_grad():
            value = two_hot.decode(controller.critic(rollout.feature))
            returns = controller._returns(rollout, value)
            weights = controller._weights(rollout, value.dtype) if weights is None else weights
        total, metrics = controller.loss(rollout)
        torch.testing.assert_close(
            metrics["policy_loss"], -(controller._weights(rollout, value.dtype) * returns).mean() / 3
        )
        return -(weights * returns).mean() / 3, total

    _, total = policy_loss()
    with torch.no_grad():
        weights = controller._weights(controller.imagine(model, batch, uniforms), torch.float64)
    gradients = torch.autograd.grad(total, list(controller.actor.parameters()), retain_graph=True)
    assert all(bool(gradient.any()) for gradient in gradients)
    for parameter, gradient in zip(controller.actor.parameters(), gradients, strict=True):
        for index in (0, parameter.numel() - 1):
            numbers = []
            for step in (1e-5, -1e-5):
                parameter.data.view(-1)[index] += step
                numbers.append(float(policy_loss(weights)[0]))
                parameter.data.view(-1)[index] -= step
            want = (numbers[0] - numbers[1]) / 2e-5
            assert float(gradient.view(-1)[index]) == pytest.approx(want, rel=1e-5, abs=1e-8)

    # The critic learns from the value and slow losses alone.
    of_critic = torch.autograd.grad(total, list(controller.critic.parameters()))
    plain = of(space, **(changes | {"gradient": "reinforce"})).eval()
    plain.load_state_dict(controller.state_dict())
    with torch.no_grad():
        constant = controller.imagine(model, batch, uniforms)
    want = torch.autograd.grad(plain.loss(constant)[0], list(plain.critic.parameters()))
    torch.testing.assert_close(of_critic, want)


def test_a_rollout_has_a_gradient_only_where_it_is_needed():
    space = SPACES["continuous"]
    model, batch = SmoothModel(space), windows(space, 3, 1)
    assert not imagine(of(space), model, batch).reward.requires_grad
    controller = of(space, gradient="reparameterized")
    assert imagine(controller, model, batch).reward.requires_grad
    with torch.no_grad():
        assert not imagine(controller, model, batch).reward.requires_grad


def test_what_cannot_be_differentiated_is_refused():
    with pytest.raises(UsageError, match="needs continuous actions and a normal policy"):
        of(SPACES["discrete"], gradient="reparameterized")
    with pytest.raises(UsageError, match="needs continuous actions and a normal policy"):
        of(SPACES["continuous"], gradient="reparameterized", continuous="bins")
    model = SmoothModel(SPACES["continuous"])
    model.differentiable = False
    with pytest.raises(UsageError, match="imagination of this dynamics model has no gradient"):
        of(SPACES["continuous"], model, gradient="reparameterized")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient", "continuous"),
    [
        ("reinforce", "normal"),
        ("reinforce", "bins"),
        ("reparameterized", "normal"),
        ("reparameterized", "truncated-normal"),
    ],
)
def test_it_finds_the_right_number(gradient, continuous):
    """The reward is the negative squared distance of the action to a number that the frame shows."""

    class Target(SmoothModel):
        def imagine(self, state, action, uniforms=None):
            reward = -(action[:, 0] - 0.8 * state.x[:, 0]).square()
            x = self._features(torch.randint(50, reward.shape))
            return ImaginedStep(x, reward, torch.zeros_like(reward, dtype=torch.bool)), Numbers(x)

    model = Target(Continuous((-1.0,), (1.0,)))
    changes = {"gradient": gradient, "continuous": continuous, "actor_width": 32, "critic_width": 32}
    controller = of(model.action_space, model, **changes, entropy_weight=1e-3, discount=0.5, least_range=0.1)
    optimizer = torch.optim.Adam(controller.parameter_groups(), lr=1e-2)
    reward = []
    for seed in range(150):
        total, metrics = learn(controller, model, windows(model.action_space, 64, 1, seed=seed))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        controller.after_update()
        reward.append(float(metrics["imagined_reward"]))
    assert sum(reward[:5]) / 5 < -0.3
    assert sum(reward[-20:]) / 20 > -0.15


# -- rollouts from many frames, and values of real frames ---

DREAMER: dict[str, Any] = {
    "slow_target": "values",
    "weigh_by_continuation": True,
    "expected_continuation": True,
    "two_hot": "symexp",
    "slow_weight": 1.0,
}


def of_many(space: ActionSpace, starts: int, **changes) -> tuple[ActorCritic, SmoothModel]:
    model = SmoothModel(space)
    model.context = 6
    return of(space, model, starts=starts, **(DREAMER | changes)).eval(), model


def test_rollouts_start_from_each_of_the_last_frames():
    space = SPACES["discrete"]
    controller, model = of_many(space, 4)
    batch = windows(space, 3, 6)
    uniforms = controller.draw_uniforms(model, batch)
    rollout = controller.imagine(model, batch, uniforms)
    assert rollout.feature.shape == (12, 6, 3) and rollout.valid.shape == (12,)
    alone, model.context = of(space, **DREAMER).eval(), 6
    alone.window = 6
    alone.load_state_dict(controller.state_dict())
    for k in range(4):
        cut = batch._replace(inputs=batch.inputs.roll(3 - k, 1))  # the last frame is the k-th start
        rows = torch.arange(3) * 4 + k
        part = uniforms._replace(action=uniforms.action[:, rows], world=uniforms.world[:, rows])
        want = alone.imagine(model, cut, part)
        for got, each in zip(rollout[:6], want[:6], strict=True):
            torch.testing.assert_close(got[rows], each)


def lambda_returns_of_dreamer(last, term, rew, boot, discount, trace) -> list[float]:
    """DreamerV3's recursion for one row: flags and rewards belong to the frames that they lead to."""
    mixed, returns = boot[-1], []
    for t in reversed(range(len(rew) - 1)):
        live = (1 - term[t + 1]) * discount
        go_on = (1 - last[t + 1]) * trace
        mixed = rew[t + 1] + (1 - go_on) * live * boot[t + 1] + live * go_on * mixed
        returns.append(mixed)
    return returns[::-1]


def test_values_of_real_frames_are_those_of_dreamer():
    """Two episodes with their closing frames in one window: one terminates, one is cut off."""
    space = SPACES["discrete"]
    controller, model = of_many(space, 6, replay_weight=0.4)
    batch = windows(space, 2, 6)
    flags = torch.zeros(4, 2, 6, dtype=torch.bool)
    first, terminated, truncated, closing = flags
    first[:, 0] = first[:, 4] = True
    closing[:, 3] = True
    terminated[0, 2:4] = truncated[1, 2:4] = True
    batch = batch._replace(is_first=first, terminated=terminated, truncated=truncated, is_closing=closing)
    rollout = imagine(controller, model, batch)
    assert rollout.valid.view(2, 6).tolist() == [[True, True, True, False, True, True], [True] * 6]
    _, metrics = controller.loss(rollout)

    value = two_hot.decode(controller.critic(rollout.feature), "symexp").detach()
    boot = controller._returns(rollout, value)[:, 0].view(2, 6)
    logits = controller.critic(rollout.feature[:, 0]).detach().view(2, 6, -1)
    slow = two_hot.decode(controller.slow_critic(rollout.feature[:, 0]), "symexp").detach().view(2, 6)
    want = 0.0
    for row in range(2):
        # DreamerV3 has rewards and terminations at the frame that they lead to, and `last` at the closing frame.
        rew = [0.0, *batch.reward[row, :-1].tolist()]
        term = [0.0, *terminated[row, :-1].double().tolist()]
        term = [each * float(closing[row, t]) for t, each in enumerate(term)]
        last = closing[row].double().tolist()
        returns = lambda_returns_of_dreamer(last, term, rew, boot[row].tolist(), 0.9, 0.7)
        for t in range(5):
            targets = [torch.tensor(returns[t], dtype=torch.float64), slow[row, t]]
            want += (
                (1 - last[t]) * sum(float(two_hot.loss(logits[row, t], target, "symexp")) for target in targets) / 10
            )
    assert float(metrics["replay_loss"]) == pytest.approx(want)
    parts = {"replay_loss": 0.4, "policy_loss": 1, "value_loss": 1, "slow_loss": 1, "entropy": -0.3}
    total = sum(weight * float(metrics[name]) for name, weight in parts.items())
    assert float(controller.loss(rollout)[0].detach()) == pytest.approx(total)


def test_nothing_is_learned_of_a_real_frame_whose_successor_is_unknown():
    """A cut episode without its closing frame, and padding. A termination needs no successor."""
    space = SPACES["discrete"]
    controller, model = of_many(space, 6, replay_weight=0.4)
    batch = windows(space, 2, 6)
    first, terminated, truncated, valid = torch.zeros(4, 2, 6, dtype=torch.bool)
    first[0, 2] = first[0, 4] = first[1, 3] = True
    terminated[0, 1] = truncated[0, 3] = True
    valid[0], valid[1, 3:] = True, True
    batch = batch._replace(is_first=first, terminated=terminated, truncated=truncated, valid=valid)
    replayed = imagine(controller, model, batch).replayed
    assert replayed.is_known.tolist() == [[True, True, True, False, True, False], [False] * 3 + [True, True, False]]
    got = []
    for row, t in [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 4), (1, 5)]:
        changed = batch.reward.clone()
        changed[row, t] += 3
        losses = []
        for reward in (batch.reward, changed):
            torch.manual_seed(0)
            losses.append(float(controller.loss(imagine(controller, model, batch._replace(reward=reward)))[0].detach()))
        got.append(losses[0] != losses[1])
    assert got == [True, True, True, False, True, False, True, False]


def test_expected_continuations_in_returns_and_weights():
    space = SPACES["discrete"]
    controller, model = of_many(space, 1)
    controller.window = 1
    rollout = imagine(controller, model, windows(space, 4, 1))
    value = torch.randn(4, 6, dtype=torch.float64)
    assert rollout.continuation is not None and not rollout.continuation[:, 1:].eq(1).any()
    got, weights = controller._returns(rollout, value), controller._weights(rollout, torch.float64)
    for row in range(4):
        mixed = value[row, -1]
        for t in reversed(range(5)):
            live = 0.9 * rollout.continuation[row, t + 1]
            mixed = rollout.reward[row, t + 1] + live * (0.3 * value[row, t + 1] + 0.7 * mixed)
            torch.testing.assert_close(got[row, t], mixed)
            want = 0.9**t * float(rollout.continuation[row, : t + 1].prod())
            assert float(weights[row, t]) == pytest.approx(want)
    plain = rollout._replace(continuation=None)
    same = rollout._replace(continuation=(~rollout.terminated).double())
    torch.testing.assert_close(controller._returns(same, value), controller._returns(plain, value))
    torch.testing.assert_close(controller._weights(same, value.dtype), controller._weights(plain, value.dtype))


def test_settings_of_many_starts():
    with pytest.raises(UsageError, match="starts = 3 needs start = 'posterior'"):
        validate(ActorCriticSettings, {"starts": 3}, "here")
    with pytest.raises(UsageError, match=r"replay_weight = 0.3 needs starts of at least 2"):
        validate(ActorCriticSettings, {"replay_weight": 0.3}, "here")
    with pytest.raises(UsageError, match="expected_continuation = true needs"):
        validate(ActorCriticSettings, {"expected_continuation": True}, "here")
    with pytest.raises(UsageError, match=r"controller.starts = 3: windows have dynamics.context = 1 frames"):
        of(SPACES["discrete"], starts=3)
    model = SmoothModel(SPACES["discrete"])
    model.context, model.starts_anywhere = 4, False
    with pytest.raises(UsageError, match="imagines from the last frame of a window alone"):
        of(SPACES["discrete"], model, starts=3)


def test_dreamers_first_weights():
    """A nearly uniform policy, and a value of exactly 0."""
    torch.manual_seed(0)
    settings = ActorCriticSettings(initialization="fan-in", two_hot="symexp", norm_eps=1e-4, normalize_inputs=False)
    controller = ActorCritic(settings, (300,), actions=6, window=8)
    feature = torch.randn(10, 300)
    assert not two_hot.decode(controller.critic(feature), "symexp").any()
    assert float((controller.policy(feature) + math.log(6)).abs().max()) < 0.1
    assert float(controller.actor[0].weight.std()) * 300**0.5 == pytest.approx(1, abs=0.03)
    assert float(controller.actor[-1].weight.std()) * 256**0.5 == pytest.approx(0.01, abs=0.001)
    assert {layer.eps for layer in controller.actor if hasattr(layer, "eps")} == {1e-4}


@pytest.mark.parametrize("changes", [{"replay_weight": 0.4}, {"gradient": "reparameterized", "replay_weight": 0.4}])
def test_the_device_is_not_waited_for_by_dreamers_losses_either(changes):
    space = SPACES["continuous"]
    controller, model = of_many(space, 4, **changes)
    batch = windows(space, 3, 6)
    optimizer = build_optimizer("laprop", controller.parameter_groups(), 1e-3, 0.0, agc=0.3)
    with NoWaiting():
        update(optimizer, learn(controller.train(), model, batch)[0], 1e9)
        controller.after_update()
