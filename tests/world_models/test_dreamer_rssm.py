"""DreamerV3's recurrent model: numbers of its public code, a learned opening, many starts, and gradients of actions.

The numbers are those of danijar/dreamerv3, commit e3f0224, in float32, where the likeliest classes replaced samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formulas import filled, numbers
from torch import Tensor
from torch.testing import assert_close

from wmcli.backbones import build, map_state
from wmcli.backbones.block_gru import BlockGRUSettings
from wmcli.config import validate
from wmcli.errors import UsageError
from wmcli.nn.categorical import one_hot
from wmcli.spaces import ActionSpace, Continuous
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.world_models import latent
from wmcli.world_models.base import Batch, part_of
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

B, T, D = 2, 5, 12
SETTINGS: dict[str, Any] = {
    "stem": "separate",
    "posterior": "recurrent",
    "decoder_reads": "state",
    "heads_read": "state",
    "prior_layers": 2,
    "prior_width": 4,
    "prior_norm": "rms",
    "opening": "learned",
    "head_width": 5,
    "norm_eps": 1e-4,
    "initialization": "fan-in",
    "two_hot": "symexp",
    "sequence_length": T,
    "context": T,
    "act_window": 0,
    "act_on": "posterior",
    "free_nats": 0.1,
    "free_nats_of": "each",
    "reconstruction_weight": 0.0,
}


def small(actions: ActionSpace | int = 3, **changes: Any) -> LatentWorldModel:
    settings = LatentWorldModelSettings(**(SETTINGS | changes))
    of_tokenizer = CategoricalTokenizerSettings(
        categoricals=2,
        classes=3,
        channels=(3,),
        strides=(2,),
        kernel=4,
        norm="rms",
        posterior_layers=1,
        posterior_width=4,
        posterior_norm="rms",
        norm_eps=1e-4,
    )
    backbone = build(BlockGRUSettings(width=D, blocks=3, hidden_size=4, input_width=8), 16, 1)
    reads = LatentWorldModel.tokenizer_reads(settings, of_tokenizer.stack.features(8), D)
    model = LatentWorldModel(settings, backbone, CategoricalTokenizer(of_tokenizer, 8, **reads), actions)
    filled(model)
    torch.manual_seed(0)
    return model


def segments(actions: int = 3, time: int = T) -> Batch:
    """Two rows; the second holds two episodes, the first ends with a termination."""
    first, terminated = torch.zeros(2, B, time, dtype=torch.bool)
    first[:, 0] = first[1, 3] = True
    terminated[0, time - 2] = True
    frames = ((numbers(B, time, 8, 8, 3, phase=7) + 1) * 127).to(torch.uint8)
    action = ((numbers(B, time, phase=2) + 1) * actions / 2.001).long()
    reward = 3 * numbers(B, time, phase=3).float()
    last = torch.zeros_like(first)
    last[1, 2] = True
    return Batch(frames, action, reward, terminated, last & False, first, torch.ones_like(first), is_last=last)


def take_likeliest(probabilities: Tensor) -> Tensor:
    likeliest = one_hot(probabilities.argmax(-1), probabilities.shape[-1], probabilities.dtype)
    return likeliest + (probabilities - probabilities.detach())


GRADIENTS = {
    "termination_head.3.bias": 0.38486701250076294,
    "termination_head.3.weight": 0.33594611287117004,
    "termination_head.0.bias": 0.5194071531295776,
    "termination_head.0.weight": 0.7222455739974976,
    "termination_head.1.weight": 0.07646442949771881,
    "backbone.gates.bias": 0.08703075349330902,
    "backbone.gates.weight": 0.07603099942207336,
    "backbone.hidden.0.bias": 0.04402316361665726,
    "backbone.hidden.0.weight": 0.07745695859193802,
    "backbone.norms.0.weight": 0.008579632267355919,
    "backbone.projection.bias": 0.09012706577777863,
    "backbone.projection.weight": 0.004496946465224028,
    "backbone.projection_norm.weight": 0.010169219225645065,
    "stem.latent.0.bias": 0.007733820006251335,
    "stem.latent.0.weight": 0.012721965089440346,
    "stem.latent.1.weight": 0.0053847734816372395,
    "stem.action.0.bias": 0.014010487124323845,
    "stem.action.0.weight": 0.0050778016448020935,
    "stem.action.1.weight": 0.0015387682942673564,
    "tokenizer.posterior_head.0.bias": 0.029914192855358124,
    "tokenizer.posterior_head.0.weight": 0.6332271099090576,
    "tokenizer.posterior_head.1.weight": 0.10652150213718414,
    "tokenizer.posterior_head.3.bias": 0.05556434020400047,
    "tokenizer.posterior_head.3.weight": 0.10893773287534714,
    "prior_head.0.bias": 0.0780966728925705,
    "prior_head.0.weight": 0.0105208745226264,
    "prior_head.1.weight": 0.02349734865128994,
    "prior_head.3.bias": 0.048583801835775375,
    "prior_head.3.weight": 0.04297880455851555,
    "prior_head.4.weight": 0.021021848544478416,
    "prior_head.6.bias": 0.2359861135482788,
    "prior_head.6.weight": 0.12269559502601624,
    "reward_head.3.bias": 0.32371985912323,
    "reward_head.3.weight": 0.2678436040878296,
    "reward_head.0.bias": 0.4817470610141754,
    "reward_head.0.weight": 0.967378556728363,
    "reward_head.1.weight": 0.1739751696586609,
}


def test_loss_and_gradients_of_the_public_code(monkeypatch):
    """Dynamics, representation, reward and continuation; heads there also learn at an episode's first frame."""
    model, batch = small(), segments()
    batch = batch._replace(action=((numbers(B, T, phase=2) + 1) * 1.4999).long())
    monkeypatch.setattr(model.tokenizer, "embed", lambda frames, at_once: 2 * numbers(B, T, 48, phase=1).float())
    monkeypatch.setattr(latent, "straight_through", take_likeliest)
    total, metrics = model.loss(batch)
    total.backward()
    assert float(total.detach()) == pytest.approx(6.661116600036621, rel=1e-5)
    wanted = {
        "reward_loss": 5.64946985244751,
        "termination_loss": 0.7064604759216309,
        "posterior_entropy": 1.9618138074874878,
        "prior_entropy": 2.150996446609497,
    }
    assert {name: float(metrics[name]) for name in wanted} == pytest.approx(wanted, rel=1e-5)
    got = {name: float(each.grad.norm()) for name, each in model.named_parameters() if name in GRADIENTS}
    assert got == pytest.approx(GRADIENTS, rel=2e-3, abs=1e-6)


def opened(model: LatentWorldModel) -> tuple[Tensor, Any]:
    """Past and state after an element of zeros, from the state zero."""
    element = model.stem(torch.zeros(1, 6 + model.action_space.encoded))
    y, state = model.backbone(element[:, None], model.backbone.initial_state(1))
    return y[0, 0], state[0]


@pytest.mark.parametrize("first", [0, 3])
def test_an_episode_begins_with_the_opening(first):
    """Its past, and the state that the next frame follows from, wherever in a window it begins."""
    model, batch = small().eval(), segments()
    with torch.no_grad():
        past, state = opened(model)
        features, _ = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
        assert float(past.abs().max()) > 0.01
        assert_close(features[1, first, 6:], past)
        z = features[1, first, :6].view(1, 2, 3)
        y, _ = model.backbone.step(model._elements(z, batch.action[1:, first]), state[None])
        assert_close(features[1, first + 1, 6:], y[0])


def test_frames_perceived_one_by_one_are_those_observed_at_once(monkeypatch):
    monkeypatch.setattr(latent, "draw_one_hot", lambda p, uniforms=None: one_hot(p.argmax(-1), 3, p.dtype))
    model, batch = small().eval(), segments()
    want, last = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    state = None
    for t in range(T):
        previous = batch.action[:, t - 1] if t else torch.zeros(B, dtype=torch.int64)
        state = model.perceive(state, batch.inputs[:, t], previous, batch.is_first[:, t], torch.Generator())
        assert_close(model.features(state), want[:, t])
    got = [model.imagine(each, batch.action[:, -1], torch.zeros(B, 2)) for each in (state, last)]
    assert_close(model.features(got[0][1]), model.features(got[1][1]))


def test_a_stream_in_two_parts_is_the_stream_at_once(monkeypatch):
    monkeypatch.setattr(latent, "straight_through", take_likeliest)
    model, batch = small(across_ends=False, rows="streams"), segments(time=6)
    batch = batch._replace(is_last=None)

    def part(start: int, stop: int) -> Batch:
        return Batch(*(None if each is None else each[:, start:stop] for each in batch))

    _, whole, after = model.carried_loss(batch, model.initial_carry(B))
    _, one, carry = model.carried_loss(part(0, 2), model.initial_carry(B))
    _, other, carry = model.carried_loss(part(2, 6), carry)
    for name in ("observation_loss", "posterior_entropy"):  # of 4 and 8 frames
        assert_close(whole[name], (2 * one[name] + 4 * other[name]) / 6)
    for got, want in zip(latent.state_tensors(carry), latent.state_tensors(after), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("opens", [True, False], ids=["from the start", "in the middle"])
@pytest.mark.parametrize("posterior", ["recurrent", "factorized"])
def test_frames_of_the_burn_in_are_only_read(posterior, opens, monkeypatch):
    """The loss is that of what follows them, with the state behind them as a constant. They begin as any window."""
    monkeypatch.setattr(latent, "straight_through", take_likeliest)
    opening = "learned" if posterior == "recurrent" else "zeros"
    changes = {"posterior": posterior, "opening": opening, "context": 2, "sequence_length": 4}
    model, batch = small(**changes, burn_in=2), segments(time=6)
    assert (model.history, model.segment) == (2, 6)
    opened = batch  # its first frames open episodes
    batch = opened._replace(is_first=torch.cat((opened.is_first[:, :1] & opens, opened.is_first[:, 1:]), 1))
    behind = part_of(batch, slice(2, None))

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))

    loss, metrics = model.loss(batch)
    with torch.no_grad():
        carry = model.carried_loss(part_of(opened, slice(2)), model.initial_carry(B))[2]
    want, of_behind, _ = model.carried_loss(behind, carry)
    assert_close((loss, metrics), (want, of_behind))
    assert_close(gradients(loss), gradients(want))

    whole = small(**changes | {"sequence_length": 6})
    valid = batch.valid.clone()
    valid[:, :2] = False
    metrics_of_whole = whole.loss(batch._replace(valid=valid))[1]
    for name in ("reconstruction", "observation_loss", "posterior_entropy"):
        assert_close(metrics[name], metrics_of_whole[name])
    assert abs(metrics["observation_loss"] - small(**changes).loss(behind)[1]["observation_loss"]) > 1e-4


def test_what_a_burn_in_needs():
    for changes in ({"rows": "streams", "across_ends": False}, {"validate_every": 10}, {"reset_at_ends": False}):
        with pytest.raises(UsageError, match="burn_in = 3 needs rows = 'windows'"):
            validate(LatentWorldModelSettings, SETTINGS | {"burn_in": 3} | changes, "dynamics")


@pytest.mark.parametrize("opening", ["learned", "zeros"])
def test_imagination_from_each_frame_is_that_from_its_window(opening):
    model, batch = small(opening=opening, context=4).eval(), segments()
    z, uniforms = model.encode(batch.inputs), torch.rand(B, T, model.uniforms_per_frame)
    features, state = model.observe_each(z, batch.action, batch.is_first, uniforms, last=4)
    assert model.starts_anywhere
    action, steps = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), torch.rand(8, model.uniforms_per_step)
    got, after = model.imagine(state, action, steps)
    for k in range(4):
        stop, rows = k + 2, torch.tensor([k, 4 + k])
        cut = [each[:, :stop] for each in (z, batch.action, batch.is_first, uniforms)]
        want_features, want_state = model.observe(*cut)
        assert_close(features[:, :stop], want_features)
        assert_close(model.features(state)[rows], want_features[:, -1])
        want, want_after = model.imagine(want_state, action[rows], steps[rows])
        assert_close((got.reward[rows], got.continuation[rows]), (want.reward, want.continuation), rtol=1e-4, atol=1e-5)
        assert_close(model.features(after)[rows], model.features(want_after))


def test_imagined_rewards_have_the_gradient_of_actions():
    """Through state and samples, the latter as if they were their probabilities. Discrete actions have none."""
    model, batch = small(Continuous((-1.0, -1.0), (1.0, 1.0))).eval(), segments()
    moves = numbers(B, T, 2).float()
    _, start = model.observe(model.encode(batch.inputs), moves, batch.is_first)
    model.requires_grad_(False)
    first = moves[:, 0].clone().requires_grad_()
    uniforms = torch.rand(2, B, model.uniforms_per_step)
    step, state = model.imagine(start, first, uniforms[0])
    assert_close(step.latent.detach().sort(-1).values, torch.tensor([0.0, 0, 1]).expand(B, 2, 3), rtol=0, atol=0)
    later, _ = model.imagine(state, moves[:, 1], uniforms[1])
    (of_first,) = torch.autograd.grad(step.reward.sum(), first, retain_graph=True)
    (of_later,) = torch.autograd.grad(later.reward.sum(), first, retain_graph=True)
    assert of_first.all() and of_later.all()
    weights = numbers(B, 2, 3, phase=9).float()
    (of_sample,) = torch.autograd.grad((step.latent * weights).sum(), first, retain_graph=True)
    prior = model._prior(model._step(start, first)[0]).exp()
    assert_close(of_sample, torch.autograd.grad((prior * weights).sum(), first)[0])
    with torch.no_grad():
        plain, _ = model.imagine(start, first, uniforms[0])
    assert_close(plain.reward, step.reward.detach())

    discrete = small().eval()
    _, start = discrete.observe(discrete.encode(batch.inputs), batch.action, batch.is_first)
    assert not discrete.imagine(start, batch.action[:, 0])[0].reward.requires_grad


def test_the_gradient_of_the_expected_reward():
    """Where the reward reads the past alone, the first step has no sample in it: finite differences hold."""
    model, batch = small(Continuous((-1.0, -1.0), (1.0, 1.0)), heads_read="past").eval(), segments()
    _, start = model.observe(model.encode(batch.inputs), numbers(B, T, 2).float(), batch.is_first)
    start = map_state(lambda each: each.double() if each.is_floating_point() else each, start)
    model.double()
    model.requires_grad_(False)

    def reward(action: Tensor) -> Tensor:
        return model.imagine(start, action, torch.full((B, 2), 0.5))[0].reward

    assert torch.autograd.gradcheck(reward, (0.5 * numbers(B, 2, phase=4)).requires_grad_())


def test_what_an_opening_needs():
    with pytest.raises(UsageError, match=r"opening = 'learned' needs posterior = 'recurrent'"):
        validate(LatentWorldModelSettings, {"opening": "learned"}, "here")
    with pytest.raises(UsageError, match="context = 5 must be less than"):
        validate(LatentWorldModelSettings, SETTINGS | {"opening": "zeros"}, "here")


@pytest.mark.parametrize("heads_read", ["past", "state"])
@pytest.mark.parametrize("streams", [{}, {"across_ends": False, "rows": "streams"}], ids=["windows", "streams"])
def test_closing_frames_have_no_outcome(heads_read, streams, monkeypatch):
    """Their reward and termination change nothing; those of the step that leads to them count."""
    monkeypatch.setattr(latent, "straight_through", take_likeliest)
    model, batch = small(closing_frames=True, heads_read=heads_read, **streams), segments()
    assert model.settings.reads_closing and not small().settings.reads_closing
    closing = torch.zeros(B, T, dtype=torch.bool)
    closing[1, 2] = True

    def losses() -> list[float]:
        each = batch._replace(is_closing=closing)
        if model.settings.rows == "streams":
            parts = [Batch(*(None if x is None else x[:, some] for x in each)) for some in (slice(3), slice(3, T))]
            _, _, carry = model.carried_loss(parts[0], model.initial_carry(B))
            log = model.carried_loss(parts[1], carry)[1]
        else:
            log = model.loss(each)[1]
        return [float(log[name]) for name in ("reward_loss", "termination_loss")]

    want = losses()
    batch.reward[1, 2] += 5
    batch.terminated[1, 2] ^= True
    assert losses() == want
    batch.reward[1, 3] += 5
    batch.terminated[1, 3] ^= True
    assert all(got != before for got, before in zip(losses(), want, strict=True))
