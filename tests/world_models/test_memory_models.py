"""S4WM, RSSM and their variants: what is read, what is learned and what is carried, by hand and step by step.

Axes: B batch, T frames, K variables, C classes, D width, A actions. All sizes differ. Where draws must agree,
posteriors are certain: scaled until each variable has all of its probability on one class.
"""

from __future__ import annotations

import pytest
import torch
from small_backbones import NAMES, small
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import map_state
from wmcli.errors import UsageError
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.world_models.base import Batch
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

pytestmark = pytest.mark.matrix

B, T, K, C, D, A, SIZE = 3, 7, 4, 5, 16, 6, 16
S4WM = {
    "stem": "dreamer",
    "decoder_reads": "state",
    "heads_read": "state",
    "prior_layers": 1,
    "prior_width": 11,
    "head_norm": "layer",
    "norm_eps": 1e-3,
    "reward": "bernoulli",
    "predict_termination": False,
    "first_frame": False,
    "rows": "episodes",
    "across_ends": False,
    "free_nats": 0.0,
    "act_window": 0,
    "act_on": "posterior",
}
POSTERIORS = ("factorized", "recurrent", "full")
ENDLESS = [name for name in NAMES if small(name, max_length=12, block=1, width=D).max_length is None]


def make(backbone="s4", *, certain=False, **settings) -> LatentWorldModel:
    torch.manual_seed(0)
    dynamics = LatentWorldModelSettings(**{"sequence_length": 12, "context": 3, "head_width": 9, **S4WM, **settings})
    coder = CategoricalTokenizerSettings(
        categoricals=K,
        classes=C,
        unimix=0.0 if certain else 0.01,
        channels=(6, 8),
        strides=(2, 2),
        kernel=4,
        bias=False,
        norm="layer",
        norm_eps=1e-3,
        output="centered",
        posterior_layers=1,
        posterior_width=13,
    )
    sequence_model = small(backbone, max_length=dynamics.sequence_length, block=1, width=D)
    posterior_encoder = (
        small(backbone, max_length=dynamics.sequence_length, block=1, width=D) if dynamics.posterior == "full" else None
    )
    reads = LatentWorldModel.tokenizer_reads(dynamics, coder.stack.features(SIZE), D)
    model = LatentWorldModel(dynamics, sequence_model, CategoricalTokenizer(coder, SIZE, **reads), A, posterior_encoder)
    with torch.no_grad():
        for head in (model.prior_head, model.tokenizer.posterior_head):
            if isinstance(head, torch.nn.Sequential):
                head[-1].weight.mul_(1e6 if certain and head is model.tokenizer.posterior_head else 10)
    return model


def frames(*lead: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (*lead, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def segment(time: int = T, **changes) -> Batch:
    generator = torch.Generator().manual_seed(2)
    no = torch.zeros(B, time, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = True
    batch = Batch(
        frames(B, time),
        torch.randint(A, (B, time), generator=generator),
        torch.randint(2, (B, time), generator=generator).float(),
        no,
        no,
        first,
        ~no,
    )
    return batch._replace(**changes)


def flags(*places: tuple[int, int], time: int = T) -> torch.Tensor:
    flag = torch.zeros(B, time, dtype=torch.bool)
    for row, at in places:
        flag[row, at] = True
    return flag


def by_hand(model: LatentWorldModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Everything that the loss is made of, from the equations, one frame after the other; posteriors are certain."""
    found: dict[str, list] = {name: [] for name in ("past", "z", "log_posterior", "image", "reward")}
    with torch.no_grad():
        for row in range(B):
            memory = model.backbone.initial_state(1)
            second = None if model.settings.posterior != "full" else model.posterior_encoder.initial_state(1)
            past, before = torch.zeros(1, D), torch.zeros(1, A)
            for t in range(batch.action.shape[1]):
                if batch.is_first[row, t]:
                    memory, past, before = model.backbone.initial_state(1), torch.zeros(1, D), torch.zeros(1, A)
                    second = None if second is None else model.posterior_encoder.initial_state(1)
                e = model.tokenizer.embed(batch.inputs[row, t][None])
                if model.settings.posterior == "recurrent":
                    e = torch.cat((e, past), -1)
                elif model.settings.posterior == "full":
                    e, second = model.posterior_encoder.step(model.posterior_stem(torch.cat((e, before), -1)), second)
                log_posterior = model.tokenizer.log_probabilities(model.tokenizer.posterior_head(e))
                z = F.one_hot(log_posterior.argmax(-1), C).float()
                state = torch.cat((z.flatten(1), past), -1)
                image = model.tokenizer.decoder(state) + 0.5
                for name, value in (("past", past), ("z", z), ("log_posterior", log_posterior), ("image", image)):
                    found[name].append(value[0])
                found["reward"].append(model.reward_head(state)[0, 0] if model.settings.reward != "none" else z.sum())
                before = F.one_hot(batch.action[row, t], A).float()[None]
                past, memory = model.backbone.step(model.stem(torch.cat((z.flatten(1), before), -1)), memory)
    return {name: torch.stack(values).unflatten(0, (B, -1)) for name, values in found.items()}


# -- the loss (self-check 16: parallel == recurrent, end to end) ------------------------------------------------------


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_loss_is_its_definition(posterior):
    """An episode a row, of which one ends early; the first frame is not modelled, and rewards are read on arrival."""
    model = make(posterior=posterior, certain=True).eval()
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[1, 4:] = False
    batch = segment(valid=valid)
    _, log = model.loss(batch)
    want = by_hand(model, batch)
    truth = batch.inputs.permute(0, 1, 4, 2, 3).float() / 255
    follows = valid.clone()
    follows[:, 0] = False
    error = (want["image"] - truth).square().flatten(2).sum(-1)
    assert_close(log["reconstruction"], error[follows].mean(), rtol=1e-4, atol=0)
    bernoulli = F.binary_cross_entropy_with_logits(want["reward"][:, 1:], batch.reward[:, :-1], reduction="none")
    assert_close(log["reward_loss"], bernoulli[follows[:, 1:]].mean(), rtol=1e-4, atol=1e-6)
    log_prior = model._prior(want["past"])
    kl = -(want["z"] * log_prior).sum((-2, -1))  # a certain posterior has no entropy
    assert_close(log["observation_loss"], kl[follows].mean(), rtol=1e-3, atol=0)
    assert log["termination_loss"] == 0


@pytest.mark.parametrize(("first_frame", "heads_read"), [(True, "state"), (False, "past")])
def test_the_settings_add_loss_terms(first_frame, heads_read):
    model = make(certain=True, first_frame=first_frame, heads_read=heads_read, predict_termination=True).eval()
    batch = segment(terminated=flags((0, 3), (2, 6)))
    _, log = model.loss(batch)
    want = by_hand(make(certain=True, predict_termination=False).eval(), batch)
    if first_frame:
        truth = batch.inputs.permute(0, 1, 4, 2, 3).float() / 255
        assert_close(
            log["reconstruction"], (want["image"] - truth).square().flatten(2).sum(-1).mean(), rtol=1e-4, atol=0
        )
        reading = torch.cat((want["z"].flatten(2), want["past"]), -1)[:, 1:]
        ends = batch.terminated[:, :-1]
    else:  # what the last frame's action leads to is known as well
        elements = model.stem(torch.cat((want["z"].flatten(2), F.one_hot(batch.action, A).float()), -1))
        reading, _ = model.backbone(elements, None)
        ends = batch.terminated
    logit = model.termination_head(reading).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logit, ends.float())
    assert_close(log["termination_loss"], loss.detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_balancing_changes_no_value_and_shares_the_gradient(alpha):
    """Self-check 15: alpha of the gradient is the prior's, 1 - alpha the posterior's."""
    changes = {"reconstruction_weight": 0.0, "reward": "none", "certain": False}
    whole = make(dynamics_weight=1.0, representation_weight=1.0, **changes)
    shared = make(dynamics_weight=alpha, representation_weight=1 - alpha, **changes)
    gradients = []
    for model in (whole, shared):
        torch.manual_seed(3)
        total, log = model.loss(segment())
        weights = [model.prior_head[-1].weight, model.tokenizer.posterior_head[-1].weight]
        gradients.append(torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True))
        assert_close(total.detach(), log["observation_loss"] * (2 if model is whole else 1))
    (prior, _), (prior_share, _) = gradients
    assert_close(prior_share, alpha * prior, rtol=1e-4, atol=1e-7)
    if alpha == 1.0:  # what is left of the posterior's gradient goes through the pasts: cut them, and nothing is left
        posterior = make(dynamics_weight=1.0, representation_weight=0.0, **changes)
        torch.manual_seed(3)
        posterior._elements = lambda z, action: LatentWorldModel._elements(posterior, z.detach(), action)
        total, _ = posterior.loss(segment())
        weight = posterior.tokenizer.posterior_head[-1].weight
        (left,) = torch.autograd.grad(total, [weight], allow_unused=True, materialize_grads=True)
        assert not left.any()


def test_the_loss_is_the_sum_of_its_weighted_parts():
    model = make(reconstruction_weight=0.25, reward_weight=30.0, dynamics_weight=0.5, representation_weight=0.125)
    total, log = model.loss(segment())
    assert log["reward_loss"] > 0 and log["observation_loss"] > 0
    want = 0.25 * log["reconstruction"] + 30 * log["reward_loss"] + log["termination_loss"]
    want = want + (0.5 + 0.125) * log["observation_loss"]
    assert_close(total.detach(), want)


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("backbone", NAMES)
def test_every_parameter_learns_on_every_backbone(backbone, posterior):
    if posterior == "full" and backbone not in ENDLESS:
        pytest.skip("a full posterior needs a backbone without end")
    model = make(backbone, posterior=posterior)
    total, _ = model.loss(segment())
    total.backward()
    assert total.isfinite()
    silent = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not silent


# -- truncated backpropagation (self-check 14) ------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("backbone", ENDLESS)
def test_chunks_that_are_carried_equal_one_long_row(backbone, posterior):
    """Values, with episodes that open in the middle of a chunk and at its beginning."""
    model = make(backbone, posterior=posterior, certain=True, rows="streams").eval()
    batch = segment(9, is_first=flags((0, 0), (1, 0), (2, 0), (0, 4), (1, 6), (2, 3), time=9))
    carry, parts = model.initial_carry(B), []
    with torch.no_grad():
        for chunk in (slice(0, 3), slice(3, 6), slice(6, 9)):
            some = Batch(*(None if part is None else part[:, chunk] for part in batch))
            _, z, read, carry = model._read(model.tokenizer.embed(some.inputs), some, some.is_first, carry)
            past = read.masked_fill(some.is_first[..., None], 0)
            parts.append((z, past))
    want = by_hand(model, batch)
    z, past = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    assert_close(z, want["z"])
    assert_close(past.float(), want["past"], rtol=0, atol=1e-4)


def test_a_loss_carried_over_chunks_counts_terms_across_their_borders():
    """Two chunks have the terms of one row: means over frames, so that they agree when weighted by their counts."""
    model = make("gru", certain=True, rows="streams").eval()
    batch = segment(6)
    with torch.no_grad():
        whole, log = model.loss(batch)
        carry, logs = model.initial_carry(B), []
        for chunk in (slice(0, 3), slice(3, 6)):
            some = Batch(*(None if part is None else part[:, chunk] for part in batch))
            _, found, carry = model.carried_loss(some, carry)
            logs.append(found)
    for name in ("reconstruction", "observation_loss", "reward_loss"):  # 2 of the 3 frames of the first chunk count
        assert_close((2 * logs[0][name] + 3 * logs[1][name]) / 5, log[name], rtol=1e-4, atol=1e-6)
    assert whole.isfinite()


@pytest.mark.parametrize("backbone", ENDLESS)
def test_no_gradient_goes_through_a_carry(backbone):
    model = make(backbone, posterior="recurrent", rows="streams")
    _, _, carry = model.carried_loss(segment(), model.initial_carry(B))
    leaves = []
    map_state(lambda tensor: leaves.append(tensor) or tensor, carry)
    assert len(leaves) > 6 and not any(leaf.requires_grad for leaf in leaves)
    assert getattr(carry.backbone_state, "systems", None) is None  # S4's: of the weights before the update
    empty = []
    map_state(lambda tensor: empty.append((tensor.shape, tensor.dtype)) or tensor, model.initial_carry(B))
    assert empty == [(leaf.shape, leaf.dtype) for leaf in leaves]


def test_streams_need_a_backbone_without_end():
    with pytest.raises(UsageError, match=r"rows = 'streams'.*transformer-xl"):
        make("transformer", rows="streams")
    with pytest.raises(UsageError, match="posterior = 'full'"):
        make("transformer", posterior="full")


# -- imagination and acting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("backbone", NAMES)
def test_imagination_with_the_posterior_forced_has_the_pasts_of_training(backbone, posterior):
    """Self-check 16, with the context handed over after three frames."""
    if posterior == "full" and backbone not in ENDLESS:
        pytest.skip("a full posterior needs a backbone without end")
    model = make(backbone, posterior=posterior, certain=True).eval()
    batch = segment()
    want = by_hand(model, batch)
    latent = model.encode(batch.inputs)
    features, _ = model.observe(latent, batch.action, batch.is_first)
    z, past = features.split((K * C, D), -1)
    assert_close(z.unflatten(-1, (K, C)), want["z"])
    assert_close(past, want["past"], rtol=0, atol=1e-4)
    _, state = model.observe(latent[:, :3], batch.action[:, :3], batch.is_first[:, :3])
    for t in range(2, T - 1):
        imagined, state = model.imagine(state, batch.action[:, t])
        assert_close(state.deterministic, want["past"][:, t + 1], rtol=0, atol=1e-4)
        assert_close(imagined.reward, model.arrival_reward(model.features(state)))
        state = state._replace(latent=want["z"][:, t + 1])


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_acting_and_training_encode_frames_alike(posterior):
    model = make("mamba2", posterior=posterior, certain=True).eval()
    batch = segment(is_first=flags((0, 0), (1, 0), (2, 0), (1, 4)))
    want = by_hand(model, batch)
    state, before = None, torch.zeros(B, dtype=torch.int64)
    for t in range(T):
        state = model.perceive(state, batch.inputs[:, t], before, batch.is_first[:, t])
        assert_close(model.latent(state), want["z"][:, t])
        assert_close(state.deterministic, want["past"][:, t], rtol=0, atol=1e-4)
        before = batch.action[:, t]


def test_pictures_show_the_past_as_well():
    model = make(certain=True).eval()
    batch = segment()
    features, state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    want = (255 * by_hand(model, batch)["image"]).round().clamp(0, 255).permute(0, 1, 3, 4, 2)
    assert model.decodes == "features"
    assert_close(model.decode(features).float(), want, rtol=0, atol=1)
    assert torch.equal(model.frame(state), model.decode(features)[:, -1])
    images = model.images(features.flatten(0, 1)).unflatten(0, (B, T)).permute(0, 1, 3, 4, 2)
    assert_close(255 * images, 255 * by_hand(model, batch)["image"].permute(0, 1, 3, 4, 2), rtol=0, atol=1e-2)


def test_the_likeliest_latents_are_not_drawn():
    model = make(posterior="recurrent").eval()
    batch = segment()
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        features, state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first, likeliest=True)
        imagined, state = model.imagine(state, batch.action[:, 0], likeliest=True)
        runs.append(torch.cat((features[:, -1], imagined.latent.flatten(1)), -1))
    assert torch.equal(*runs)
    torch.manual_seed(1)
    drawn, _ = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    assert not torch.equal(drawn[:, -1], runs[0][:, : K * C + D])


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["two-hot", "bernoulli", "mse", "none"])
def test_rewards_are_learned_in_any_form(reward):
    model = make("gru", reward=reward, certain=True)
    batch = segment()
    learned = [*model.backbone.parameters(), *model.stem.parameters()]
    if reward != "none":
        learned += model.reward_head.parameters()
    optimizer = torch.optim.Adam(learned, 1e-2)
    for _ in range(200):
        total, log = model.loss(batch)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    model.eval()
    features, _ = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    told = model.arrival_reward(features[:, 1:])
    if reward == "none":
        assert not told.any() and log["reward_loss"] == 0
    else:
        assert ((told > 0.5) == (batch.reward[:, :-1] > 0.5)).float().mean() > 0.95
