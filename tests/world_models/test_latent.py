"""The latent world model: losses by hand, imagination and acting against plain runs of the backbone.

Axes: B batch, T frames, K variables, C classes, D width, A actions, W acting window. All sizes differ.
"""

from __future__ import annotations

import copy

import pytest
import torch
from draws import assert_fan_average, assert_torchs_default
from small_backbones import NAMES, small
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.nn import two_hot
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.world_models.base import Batch
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

B, T, K, C, D, A, SIZE = 3, 7, 4, 5, 16, 6, 16


def make(backbone="retnet", *, unimix=0.01, dropout=0.0, **settings) -> LatentWorldModel:
    torch.manual_seed(0)
    tokenizer = CategoricalTokenizerSettings(
        categoricals=K, classes=C, unimix=unimix, channels=(6, 8), strides=(2, 2), kernel=4
    )
    dynamics = LatentWorldModelSettings(
        **{"sequence_length": 12, "context": 3, "act_window": 5, "head_width": 9, **settings}
    )
    sequence_model = small(backbone, max_length=dynamics.sequence_length, block=1, width=D, dropout=dropout)
    model = LatentWorldModel(dynamics, sequence_model, CategoricalTokenizer(tokenizer, SIZE), A)
    with torch.no_grad():  # so that priors are not all but uniform
        model.prior_head.weight.mul_(20)
        model.tokenizer.posterior_head.weight.mul_(20)
    return model


def frames(*lead: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (*lead, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def segment(**changes) -> Batch:
    generator = torch.Generator().manual_seed(2)
    no = torch.zeros(B, T, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = True
    batch = Batch(
        frames(B, T),
        torch.randint(A, (B, T), generator=generator),
        torch.randint(-2, 3, (B, T), generator=generator).float(),
        no,
        no,
        first,
        ~no,
    )
    return batch._replace(**changes)


def drawn(*lead: int, seed: int = 3) -> torch.Tensor:
    return F.one_hot(torch.randint(C, (*lead, K), generator=torch.Generator().manual_seed(seed)), C).float()


def resets(*places: tuple[int, int]) -> torch.Tensor:
    reset = torch.zeros(B, T, dtype=torch.bool)
    for row, time in places:
        reset[row, time] = True
    return reset


def test_sizes():
    model = make()
    assert model.feature_shape == (K * C + D,)
    assert model.encode(frames(B, T)).shape == (B, T, K, C)
    assert model.decode(drawn(B, T)).shape == (B, T, SIZE, SIZE, 3)
    assert model.decode(drawn(B, T)).dtype == torch.uint8


@pytest.mark.parametrize("kind", ["fan-average", "torch"])
@pytest.mark.parametrize(("stem", "prior_layers"), [("linear", 0), ("deep", 0), ("dreamer", 1)])
def test_first_weights(kind, stem, prior_layers):
    torch.manual_seed(0)
    tokenizer = CategoricalTokenizer(CategoricalTokenizerSettings(strides=(2, 2), channels=(8, 8), kernel=4), SIZE)
    dynamics = LatentWorldModelSettings(stem=stem, prior_layers=prior_layers, initialization=kind)
    model = LatentWorldModel(dynamics, small("gru", max_length=128, block=1, width=128), tokenizer, A)
    drawn = {"reward_head": kind, "termination_head": kind, "stem": "torch", "prior_head": "torch"}
    if stem == "dreamer":
        drawn = dict.fromkeys(drawn, kind)
    if stem == "linear":  # as Drama's public code leaves it
        assert not model.stem[0].bias.any()
        model.stem[0].bias = None
    for name, how in drawn.items():
        layers = [layer for layer in getattr(model, name).modules() if isinstance(layer, nn.Linear)]
        assert layers
        for layer in layers:
            (assert_torchs_default if how == "torch" else assert_fan_average)(layer)


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_its_definition():
    """Recomputed frame by frame. Draws are made certain by nearly one-hot posteriors."""
    model = make(unimix=0.0, dynamics_weight=0.7, representation_weight=0.3, free_nats=0.0).eval()
    with torch.no_grad():
        model.tokenizer.posterior_head.weight.mul_(1e4)
    batch = segment(terminated=resets((0, 3), (2, 6)))
    total, log = model.loss(batch)

    z = model.encode(batch.inputs)
    assert set(z.unique().tolist()) == {0.0, 1.0}
    sums = dict.fromkeys(("image", "reward", "termination", "kl"), 0.0)
    for row in range(B):
        state = model.backbone.initial_state(1)
        for t in range(T):
            image = model.tokenizer.reconstruct(z[row, t][None])[0]
            sums["image"] += (image - batch.inputs[row, t].permute(2, 0, 1) / 255).square().sum()
            element = torch.cat((z[row, t].flatten(), F.one_hot(batch.action[row, t], A).float()))
            d, state = model.backbone.step(model.stem(element[None]), state)
            target = two_hot.encode(batch.reward[row, t])
            sums["reward"] -= (target * model.reward_head(d)[0].log_softmax(-1)).sum()
            logit = model.termination_head(d)[0, 0]
            sums["termination"] -= F.logsigmoid(logit if batch.terminated[row, t] else -logit)
            if t + 1 < T:
                log_prior = model.prior_head(d).view(K, C).log_softmax(-1)
                sums["kl"] -= (z[row, t + 1] * log_prior).sum()  # a certain posterior has no entropy
    assert_close(log["reconstruction"], sums["image"] / (B * T), rtol=1e-4, atol=0)
    assert_close(log["reward_loss"], sums["reward"] / (B * T), rtol=1e-4, atol=0)
    assert_close(log["termination_loss"], sums["termination"] / (B * T), rtol=1e-4, atol=1e-6)
    assert_close(log["observation_loss"], sums["kl"] / (B * (T - 1)), rtol=1e-3, atol=0)
    parts = (sums["image"] + sums["reward"] + sums["termination"]) / (B * T) + sums["kl"] / (B * (T - 1))
    assert_close(total, parts, rtol=1e-4, atol=0)  # 0.7 + 0.3 of the same number


def test_the_loss_weighs_object_pixels():
    """`tokenizer.object_share` is a share of the world model's reconstruction as well."""
    plain, weighing = make(), make()
    weighing.load_state_dict(plain.state_dict())
    weighing.tokenizer.settings = weighing.tokenizer.settings.model_copy(update={"object_share": 0.5})
    observation = torch.full((B, T, SIZE, SIZE, 3), 10, dtype=torch.uint8)
    observation[0, :3, 0, 0] = 255
    batch = segment(inputs=observation)
    logs = []
    for model in (plain.eval(), weighing.eval()):
        torch.manual_seed(0)
        logs.append({name: float(value) for name, value in model.loss(batch)[1].items()})
    assert logs[1].pop("reconstruction") != pytest.approx(logs[0].pop("reconstruction"))
    assert logs[0] == logs[1]


def test_free_nats_of_the_mean_silence_both_kl_gradients():
    model = make(free_nats=1000.0)
    total, _ = model.loss(segment())
    (gradient,) = torch.autograd.grad(total, [model.prior_head.weight], allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize(("of", "want"), [("mean", 2.0), ("each", (1.5 + 1.5 + 4.0) / 3)])
def test_free_nats_of_the_mean_or_of_each(of, want):
    model = make(free_nats=1.5, free_nats_of=of)
    kl = torch.tensor([[1.0, 1.0, 4.0, 99.0]])
    assert_close(model._with_free_nats(kl, torch.tensor([[True, True, True, False]])), torch.tensor(want))


def test_which_side_learns_from_which_loss():
    """The dynamics loss moves the prior, the representation loss the posterior: with one off, its side stands still."""
    for off, silent in (("dynamics_weight", "prior_head"), ("representation_weight", None)):
        model = make(free_nats=0.0, **{off: 0.0})
        total, _ = model.loss(segment())
        total.backward()
        gradient = model.prior_head.weight.grad
        assert (gradient is None or not gradient.any()) == (silent == "prior_head")


@pytest.mark.parametrize("backbone", NAMES)
def test_every_parameter_learns(backbone):
    model = make(backbone, free_nats=0.0)
    total, _ = model.loss(segment(is_first=resets((0, 0), (1, 3))))
    total.backward()
    silent = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not silent
    grouped = [parameter for group in model.parameter_groups() for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


def test_gradients_of_the_dynamics_reach_the_encoder():
    model = make(free_nats=0.0, representation_weight=0.0)
    batch = segment()
    z = model.tokenizer.posterior(batch.inputs)
    total, log = model.loss(batch)
    assert z.requires_grad and log["reward_loss"] > 0
    image = model.tokenizer.decoder
    for parameter in image.parameters():
        parameter.requires_grad_(False)
    with_dynamics = torch.autograd.grad(total, [model.tokenizer.posterior_head.weight], retain_graph=True)[0]
    assert with_dynamics.abs().max() > 0


def _logged(model, batch):
    torch.manual_seed(5)
    return model.loss(batch)[1]


def test_steps_after_an_end_are_not_predicted_and_start_without_memory():
    model = make().eval()
    batch = segment(is_first=resets((0, 0), (1, 0), (2, 0), (1, 4)))
    changed = batch._replace(action=batch.action.clone())
    changed.action[1, 3] = (changed.action[1, 3] + 1) % A  # the last action before the end
    before, after = _logged(model, batch), _logged(model, changed)
    # Only what is read at that very step may differ: nothing of the rows' frames after it.
    assert_close(before["observation_loss"], after["observation_loss"], rtol=0, atol=1e-6)
    leaky = make(reset_at_ends=False).eval()
    assert (_logged(leaky, batch)["observation_loss"] - _logged(leaky, changed)["observation_loss"]).abs() > 1e-4


def test_padding_leaves_no_trace():
    model = make(across_ends=False).eval()
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 4:] = False
    batch = segment(valid=valid)
    other = batch._replace(action=batch.action.clone(), reward=batch.reward.clone(), inputs=batch.inputs.clone())
    other.action[0, 4:] = 0
    other.reward[0, 4:] = 9.0
    for name, value in _logged(model, batch).items():
        assert_close(_logged(model, other)[name], value, msg=name)


@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ({}, [2, 4]),
        ({"across_ends": False}, [2, 4]),
        ({"reset_at_ends": False}, []),
        ({"across_ends": False, "reset_at_ends": False}, [2, 4]),
    ],
    ids=str,
)
def test_nothing_is_known_behind_an_end_unless_the_model_learns_to_read_on(settings, over):
    batch = segment(terminated=resets((1, 2)), truncated=resets((1, 4)))
    assert make(**settings).find_ends(batch).nonzero().tolist() == [[1, time] for time in over]
    if settings.get("across_ends", True):  # a lost life at 2
        games = batch._replace(is_last=resets((1, 4)))
        assert make(**settings).find_ends(games).nonzero().tolist() == [[1, time] for time in over[1:]]


@pytest.mark.parametrize("key", [True, False])
def test_time_limits_are_ends_only_if_asked_for(key):
    model = make(end_on_truncation=key).eval()
    batch = segment()
    cut = batch._replace(truncated=resets((1, 2)))
    same = torch.equal(_logged(model, batch)["termination_loss"], _logged(model, cut)["termination_loss"])
    assert same != key


# -- imagination ------------------------------------------------------------------------------------------------------


def by_hand(model, z, action, opens=0):
    """Summaries d_0 ... d_{T-1} of one row (T, K, C), read step by step from `opens` on."""
    state, summaries = model.backbone.initial_state(1), []
    for t in range(opens, len(z)):
        element = torch.cat((z[t].flatten(), F.one_hot(action[t], A).float()))
        d, state = model.backbone.step(model.stem(element[None]), state)
        summaries.append(d[0])
    return torch.stack(summaries)


@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_observe_then_imagine_is_the_backbone_step_by_step(backbone):
    model = make(backbone).eval()
    z, action = drawn(B, T), torch.randint(A, (B, T))
    reset = resets((0, 0), (1, 3), (2, T - 1))
    features, state = model.observe(z, action, reset)
    assert features.shape == (B, T, *model.feature_shape)
    opens = [0, 3, T - 1]
    for row in range(B):
        want = by_hand(model, z[row], action[row], opens[row])
        for t in range(opens[row], T):
            before = want[t - opens[row] - 1] if t > opens[row] else torch.zeros(D)
            assert_close(features[row, t], torch.cat((z[row, t].flatten(), before)), rtol=0, atol=2e-5)
    assert_close(model.features(state), features[:, -1])
    imagined, after = model.imagine(state, action[:, -1])
    for row in range(B):
        d = by_hand(model, z[row], action[row], opens[row])[-1]
        assert_close(after.deterministic[row], d, rtol=0, atol=2e-5)
        assert_close(imagined.reward[row], two_hot.decode(model.reward_head(d)), rtol=1e-4, atol=1e-5)
        assert imagined.terminated[row] == (model.termination_head(d)[0] > 0)
    assert torch.equal(model.latent(after), imagined.latent)
    assert (imagined.latent.sum(-1) == 1).all()


@torch.no_grad()
def test_terminations_are_sampled_or_the_likelier():
    """A risk below one half ends some imagined episodes, or none. Latents and rewards are the same either way."""
    likelier, sampled = make("gru"), make("gru", imagined_termination="sampled")
    for model in (likelier, sampled):
        model.termination_head[-1].bias.fill_(-2.0)
    rows = 4000
    z, action = drawn(1, 2).expand(rows, -1, -1, -1), torch.zeros(rows, 2, dtype=torch.int64)
    _, state = likelier.observe(z, action, torch.zeros(rows, 2, dtype=torch.bool))
    numbers = torch.rand(rows, sampled.uniforms_per_step)
    assert sampled.uniforms_per_step == likelier.uniforms_per_step + 1
    plain, after = likelier.imagine(state, action[:, 0], numbers[:, :-1])
    risky, _ = sampled.imagine(state, action[:, 0], numbers)
    assert torch.equal(plain.latent, risky.latent) and torch.equal(plain.reward, risky.reward)
    share = likelier.termination_head(after.deterministic[0]).sigmoid()
    assert 0.05 < share < 0.3 and not plain.terminated.any()
    assert torch.equal(risky.terminated, numbers[:, -1] < share)
    of_itself, _ = sampled.imagine(state, action[:, 0])
    assert abs(of_itself.terminated.float().mean() - share) < 0.03
    assert not sampled.imagine(state, action[:, 0], likeliest=True)[0].terminated.any()


@pytest.mark.parametrize("window", [0, T])
@pytest.mark.parametrize("backbone", NAMES)
@torch.no_grad()
def test_memory_is_all_that_the_backbone_keeps_of_earlier_frames(backbone, window):
    """Whichever way they were read, and nothing of the current one; of backbones whose state is of one size."""
    model = make(backbone, act_window=window).eval()
    assert (model.memory_features is None) == backbone.startswith("transformer")
    if model.memory_features is None:
        return
    z, action, reset = drawn(B, T), torch.randint(A, (B, T)), resets((0, 0), (1, 3), (2, T - 1))
    at_once = model.memory(model.observe(z, action, reset)[1])
    assert at_once.shape == (B, model.memory_features) and at_once.dtype == torch.float32
    assert_close(at_once[:2].square().mean(1), torch.ones(2), rtol=1e-3, atol=0)
    assert (at_once[2] == 0).all()
    other = torch.cat((z[:, :-1], z[:, -1:].roll(1, -1)), 1)
    assert torch.equal(model.memory(model.observe(other, action, reset)[1]), at_once)
    _, state = model.observe(z[:, :1], action[:, :1], reset[:, :1])
    model.encode = lambda frame: frame
    acting = model.perceive(None, z[:, 0], action[:, 0], torch.ones(B, dtype=torch.bool))
    for t in range(1, T):
        _, after = model.imagine(state, action[:, t - 1])
        opens = reset[:, t]
        state = after._replace(latent=z[:, t], is_first=opens, backbone_state=after.backbone_state)
        acting = model.perceive(acting, z[:, t], action[:, t - 1], opens)
    assert_close(model.memory(state), at_once, rtol=0, atol=2e-4)
    assert_close(model.memory(acting), at_once, rtol=0, atol=2e-4)


@torch.no_grad()
def test_a_single_frame_is_context_enough():
    model = make().eval()
    z, action = drawn(B, 1), torch.randint(A, (B, 1))
    features, state = model.observe(z, action, torch.ones(B, 1, dtype=torch.bool))
    assert_close(features[:, 0, K * C :], torch.zeros(B, D))
    _, after = model.imagine(state, action[:, 0])
    assert_close(after.deterministic[1], by_hand(model, z[1], action[1])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [0, 4])
@torch.no_grad()
def test_imagination_and_acting_outlast_the_positions_of_attention(window):
    """A transformer of 12 positions, 30 frames: it starts again from the current frame when they are used up."""
    model = make("transformer", act_window=window).eval()
    _, state = model.observe(drawn(B, 3), torch.zeros(B, 3, dtype=torch.long), resets((0, 0), (1, 1))[:, :3])
    lengths = []
    for _ in range(30):
        imagined, state = model.imagine(state, torch.ones(B, dtype=torch.long))
        lengths.append(state.length)
        assert imagined.reward.isfinite().all()
    assert lengths[:14] == [*range(3, 13), 1, 2, 3, 4] and max(lengths) == 12
    reset = torch.zeros(B, 30, dtype=torch.bool)
    reset[:, 0] = reset[1, 20] = True
    states, _, _ = play(model, 30, reset)
    assert states[-1].deterministic.isfinite().all()


@torch.no_grad()
def test_without_resets_imagination_reads_on_across_ends():
    z, action = drawn(B, T), torch.zeros(B, T, dtype=torch.long)
    reset = resets((0, 0), (1, 0), (2, 0), (1, 4))
    with_resets, without = (make(reset_at_ends=key).eval().observe(z, action, reset)[0] for key in (True, False))
    assert_close(with_resets[:, :4], without[:, :4])
    assert (with_resets[1, 4, K * C :] == 0).all() and (without[1, 4, K * C :] != 0).any()
    assert_close(with_resets[0], without[0])


@torch.no_grad()
def test_imagined_latents_follow_the_prior():
    model = make().eval()
    rows = 20_000
    z, action = drawn(1, 1).expand(rows, 1, K, C), torch.zeros(rows, 1, dtype=torch.long)
    _, state = model.observe(z, action, torch.ones(rows, 1, dtype=torch.bool))
    imagined, after = model.imagine(state, action[:, 0])
    prior = model._prior(after.deterministic[0]).exp()
    assert_close(imagined.latent.mean(0), prior, rtol=0, atol=4 * (0.25 / rows) ** 0.5)


@torch.no_grad()
def test_real_latents_are_drawn_from_their_posterior():
    model = make().eval()
    latent = model.encode(frames(1, 2)).expand(20_000, 2, K, C)
    _, state = model.observe(latent, torch.zeros(20_000, 2, dtype=torch.long), torch.zeros(20_000, 2, dtype=torch.bool))
    assert_close(state.latent.mean(0), latent[0, 1], rtol=0, atol=4 * (0.25 / 20_000) ** 0.5)


@torch.no_grad()
def test_the_rounding_fault_of_the_public_code_empties_latents_of_the_dynamics_only():
    model = make(truncate_latents=True).eval()
    rows = 500
    _, state = model.observe(
        drawn(rows, 2), torch.zeros(rows, 2, dtype=torch.long), torch.zeros(rows, 2, dtype=torch.bool)
    )
    _, after = model.imagine(state, torch.zeros(rows, dtype=torch.long))
    empty = (after.latent.sum(-1) == 0).float().mean()
    assert 0.05 < empty < 0.4
    assert (after.policy_latent.sum(-1) == 1).all()
    assert torch.equal(model.features(after)[:, : K * C], after.policy_latent.flatten(1))
    again = make().eval()
    _, sound = again.imagine(state, torch.zeros(rows, dtype=torch.long))
    assert (sound.latent.sum(-1) == 1).all()


# -- acting -----------------------------------------------------------------------------------------------------------


def certain(model):
    """Posteriors so sharp that draws are certain: then acting can be compared with observing."""
    with torch.no_grad():
        model.tokenizer.posterior_head.weight.mul_(1e4)
    return model.eval()


def play(model, steps, reset, seed=0):
    """States after each of some frames, perceived one by one."""
    generator = torch.Generator().manual_seed(seed)
    seen = frames(B, steps)
    action = torch.randint(A, (B, steps), generator=torch.Generator().manual_seed(4))
    states, state = [], None
    for t in range(steps):
        previous = action[:, t - 1] if t else torch.zeros_like(action[:, 0])
        state = model.perceive(state, seen[:, t], previous, reset[:, t], generator)
        states.append(state)
    return states, seen, action


@pytest.mark.parametrize("backbone", NAMES)
@pytest.mark.parametrize("window", [0, 4])
def test_acting_and_observing_give_the_same_features(backbone, window):
    """The summary after each frame is that of the frames before it in the episode, at most `window` of them."""
    model = certain(make(backbone, unimix=0.0, act_on="posterior", act_window=window))
    reset = resets((0, 0), (1, 0), (2, 0), (1, 4))
    states, seen, action = play(model, T, reset)
    z = model.encode(seen)
    for row in range(B):
        for t in range(T):
            opens = max(u for u in range(t + 1) if reset[row, u])
            start = max(opens, t - window) if window else opens
            want = by_hand(model, z[row, :t], action[row], start)[-1] if t > start else torch.zeros(D)
            assert_close(states[t].deterministic[row], want, rtol=0, atol=2e-5)
            assert_close(model.features(states[t])[row, : K * C], z[row, t].flatten())


@pytest.mark.parametrize("window", [0, 4])
def test_acting_on_the_prior_does_not_see_the_current_frame(window):
    model = make(act_on="prior", act_window=window).eval()
    reset = resets((0, 0), (1, 0), (2, 0))

    def shown(last):
        generator, state = torch.Generator().manual_seed(0), None
        for t in range(3):
            image = frames(B, seed=last) if t == 2 else frames(B, seed=t)
            state = model.perceive(state, image, torch.ones(B, dtype=torch.long), reset[:, t], generator)
        return model.features(state), model.latent(state)

    assert torch.equal(shown(7)[0], shown(8)[0])
    assert_close(shown(7)[0][:, : K * C], shown(7)[1].flatten(1))


def test_an_episodes_first_frame_is_always_seen():
    model = certain(make(unimix=0.0, act_on="prior"))
    states, seen, _ = play(model, 1, torch.ones(B, 1, dtype=torch.bool))
    assert_close(model.latent(states[0]), model.encode(seen)[:, 0])
    assert_close(states[0].deterministic, torch.zeros(B, D))


@pytest.mark.parametrize("window", [0, 4])
@torch.no_grad()
def test_imagination_goes_on_from_a_perceived_frame(window):
    model = certain(make(unimix=0.0, act_on="posterior", act_window=window))
    states, seen, action = play(model, 4, resets((0, 0), (1, 0), (2, 0), (2, 3))[:, :4])
    _, after = model.imagine(states[-1], action[:, 3])
    z = model.encode(seen)
    for row, opens in enumerate((0, 0, 3)):
        assert_close(after.deterministic[row], by_hand(model, z[row], action[row], opens)[-1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [0, 4])
def test_perceiving_leaves_the_global_generator_alone_and_keeps_its_tree(window):
    model = make(act_window=window).eval()
    before = torch.get_rng_state()
    states, _, _ = play(model, 3, resets((0, 0), (1, 0), (2, 0)))
    assert torch.equal(torch.get_rng_state(), before)

    def tree(value):
        if isinstance(value, torch.Tensor):
            return value.shape, value.dtype
        return [tree(each) for each in value] if isinstance(value, tuple) else type(value)

    assert tree(states[0]) == tree(states[1]) == tree(states[2])


# -- precision, and learning ------------------------------------------------------------------------------------------


def test_autocast_keeps_losses_states_and_features_in_float32():
    model = make().eval()
    want, _ = model.loss(segment())
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = model.loss(segment())
        latent = model.encode(frames(B, 2))
        features, state = model.observe(
            latent, torch.zeros(B, 2, dtype=torch.long), torch.zeros(B, 2, dtype=torch.bool)
        )
        imagined, after = model.imagine(state, torch.zeros(B, dtype=torch.long))
    for value in (
        got,
        latent,
        features,
        state.deterministic,
        imagined.reward,
        after.deterministic,
        model.features(after),
    ):
        assert value.dtype == torch.float32
    assert_close(got, want, rtol=0.05, atol=0)


def test_batch_statistics_are_left_alone_outside_training():
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    model.encode(frames(B, T))
    model.loss(segment())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def dots(generator, batch, time=6):
    """A bright square moves round four places by 0 or 1; reward 1 for arriving at place 0."""
    action = torch.randint(2, (batch, time), generator=generator)
    place = torch.randint(4, (batch, 1), generator=generator)
    place = (place + F.pad(action.cumsum(1), (1, 0))) % 4
    image = torch.zeros(batch, time, SIZE, SIZE, 3, dtype=torch.uint8)
    for p in range(4):
        y, x = 8 * (p // 2), 8 * (p % 2)
        image[:, :, y : y + 8, x : x + 8] = 255 * (place[:, :-1] == p).to(torch.uint8)[..., None, None, None]
    no = torch.zeros(batch, time, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = True
    return Batch(image, action, (place[:, 1:] == 0).float(), no, no, first, ~no), place


@pytest.mark.slow
def test_a_moving_square_is_learned_and_imagined():
    model = make(free_nats=0.1, head_width=32)
    with torch.no_grad():
        model.prior_head.weight.div_(20)
        model.tokenizer.posterior_head.weight.div_(20)
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=5e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(250):  # after 150 the third step is right in 0.89 to 0.94 of all rows
        total, log = model.loss(dots(generator, 16)[0])
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    model.eval()
    batch, _ = dots(generator, 64)
    reset = batch.is_first[:, :2]
    _, state = model.observe(model.encode(batch.inputs[:, :2]), batch.action[:, :2], reset)
    for t in (1, 2, 3):
        imagined, state = model.imagine(state, batch.action[:, t])
        error = (model.decode(imagined.latent).float() - batch.inputs[:, t + 1].float()).abs().mean((1, 2, 3))
        assert (error < 20).float().mean() > 0.9, t
        assert ((imagined.reward - batch.reward[:, t]).abs() < 0.2).float().mean() > 0.9, t


def test_an_ensemble_adds_its_loss_and_leaves_the_rest_alone():
    model = make(ensemble=3)
    rest = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("ensemble.")}

    def learn():
        torch.manual_seed(3)  # latents are sampled
        total, log = model.loss(segment())
        return total, log, torch.autograd.grad(total, rest.values(), allow_unused=True)

    total, log, gradients = learn()
    model.ensemble = None
    without, others, same = learn()
    assert_close(total, without + log.pop("ensemble_loss"))
    assert log == others and all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True) if a is not None)


def test_an_imagined_step_has_the_disagreement_of_the_ensemble():
    model = make(ensemble=3).eval()
    assert model.has_ensemble and not make().has_ensemble
    batch = segment()
    _, state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    step, state = model.imagine(state, batch.action[:, -1])
    assert step.disagreement.shape == (B,) and (step.disagreement > 0).all()
    assert_close(step.disagreement, model.ensemble.disagreement(state.deterministic))
    model.ensemble = None
    assert model.imagine(state, batch.action[:, -1])[0].disagreement is None
