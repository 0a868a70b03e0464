"""The token world model on observations of several parts and actions of any kind.

Axes: B batch, T blocks, K tokens of a frame, L = K + 1, N codes, D width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_backbones import small
from test_token import PREDICTIONS, follow
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.nn.actions import random_actions
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete, Image, ObservationSpace, Vector, map_parts
from wmcli.tokenizers import TokenizerSettings, VQTokenizer
from wmcli.world_models.base import Batch
from wmcli.world_models.token import TokenWorldModel, TokenWorldModelSettings

B, T, D = 3, 5, 16
ACTIONS: dict[str, ActionSpace] = {
    "discrete": Discrete(4),
    "categories": Categories((2, 3)),
    "continuous": Continuous((-1.0, 0.0), (1.0, 5.0)),
}
OBSERVATIONS: dict[str, ObservationSpace] = {
    "all kinds": {"gear": Categories((2, 4)), "camera": Image(8, 4, 1), "body": Vector(2)},
    "two shapes": {"near": Image(8, 4), "far": Image(4, 4, 1)},
    "vector": Vector(3),
    "number": Vector(1),
    "category": Categories((5,)),
    "categories": Categories((5, 2)),
}
PAIRS = [("all kinds", action) for action in ACTIONS] + [(name, "discrete") for name in list(OBSERVATIONS)[1:]]


def make(
    observation: ObservationSpace | str = "all kinds",
    action: ActionSpace | str = "discrete",
    backbone: str = "retnet",
    **settings: Any,
) -> TokenWorldModel:
    torch.manual_seed(0)
    space = OBSERVATIONS[observation] if isinstance(observation, str) else observation
    of_tokenizer = TokenizerSettings(channels=8, downsamples=2, width=D, codes=6, network="patch", vector_bins=9)
    tokenizer = VQTokenizer(of_tokenizer, space).requires_grad_(False)
    of_model = TokenWorldModelSettings(**{"sequence_length": T, **settings})
    block = tokenizer.tokens + 1
    network = small(backbone, max_length=of_model.sequence_length * block, block=block, width=D)
    actions = ACTIONS[action] if isinstance(action, str) else action
    return TokenWorldModel(of_model, network, tokenizer, actions).eval()


def frames(model: TokenWorldModel, *lead: int, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(part: Any) -> Tensor:
        if isinstance(part, Image):
            return torch.randint(256, (*lead, *part.shape), dtype=torch.uint8, generator=generator)
        if isinstance(part, Vector):
            return torch.randn(*lead, part.size, generator=generator) * 4
        return torch.stack([torch.randint(size, lead, generator=generator) for size in part.sizes], -1)

    return map_parts(draw, model.observation_space)


def segment(model: TokenWorldModel, time: int = T) -> tuple[Tensor, Tensor]:
    """Tokens (B, time, K) and actions (B, time, ...)."""
    action = random_actions(model.action_space, (B, time), torch.Generator().manual_seed(2))
    return model.encode(frames(model, B, time)), action


def experience(model: TokenWorldModel) -> Batch:
    tokens, action = segment(model)
    generator = torch.Generator().manual_seed(3)
    reward, ends = torch.randn(B, T, generator=generator), torch.rand(B, T, generator=generator)
    no = torch.zeros(B, T, dtype=torch.bool)
    return Batch(tokens, action, reward, ends < 0.3, no, no, ~no)


def in_range(model: TokenWorldModel, tokens: Tensor) -> bool:
    first, stop = torch.tensor(model.tokenizer.ranges).unbind(1)
    return bool(((first <= tokens) & (tokens < stop)).all())


# -- prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", ["retnet", "transformer"])
@pytest.mark.parametrize(("observation", "action"), PAIRS)
def test_imagination_step_by_step_has_the_distribution_of_parallel_training(observation, action, backbone, prediction):
    model = make(observation, action, backbone, prediction=prediction, context=2, observation_burn_in=0)
    tokens, acts = segment(model)
    features, state = model.observe(tokens[:, :2], acts[:, :2], torch.zeros(B, 2, dtype=torch.bool))
    assert features.shape == (B, 2, *model.feature_shape)
    assert_close(features[:, -1], model.features(state))
    got, want = follow(model, state, tokens[:, 2:], acts[:, 1:-1]), model.predict(tokens, acts)
    assert_close(got[0], want.reward[:, 1:-1], rtol=1e-4, atol=1e-5)
    assert_close(got[1], want.termination[:, 1:-1], rtol=1e-4, atol=1e-5)
    assert_close(got[2], want.observation[:, -(T - 2) :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("observation", ["all kinds", "number"])
def test_pop_predicts_as_if_each_prefix_were_run_by_itself(observation):
    model = make(observation, "continuous", observation_burn_in=0)
    tokens, action = segment(model)
    got = model.predict(tokens, action).observation
    queries = model.queries.weight.expand(B, -1, D)
    for t in range(1, T):
        x = torch.cat([model._blocks(tokens[:, s], action[:, s]) for s in range(t)] + [queries], 1)
        y, _ = model.backbone(x, None)
        assert_close(got[:, t - 1], model._token_logits(y[:, -model.tokenizer.tokens :]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_each_number_of_an_action_matters_from_its_step_on(action, prediction):
    model = make("all kinds", action, prediction=prediction, observation_burn_in=1)
    tokens, acts = segment(model)
    before = model.predict(tokens, acts)
    for number in range(max(1, acts[0, 0].numel())):
        other = acts.clone()
        if action == "continuous":
            other[:, 2, number] = -other[:, 2, number] + 0.1
        elif action == "categories":
            other[:, 2, number] = (other[:, 2, number] + 1) % model.action_space.sizes[number]
        else:
            other[:, 2] = (other[:, 2] + 1) % 4
        after = model.predict(tokens, other)
        changed = (before.reward - after.reward).abs().amax((0, 2)) > 1e-6
        assert changed.tolist() == [False, False, True, True, True]
        changed = (before.observation - after.observation).abs().amax((0, 2, 3)) > 1e-6
        assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("observation", "action"), PAIRS)
def test_frames_perceived_one_by_one_are_those_observed(observation, action, prediction):
    model = make(observation, action, prediction=prediction, context=3)
    seen, acts = frames(model, B, T), segment(model)[1]
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[:, 0] = reset[1, 3] = True
    state, before = None, torch.zeros_like(acts[:, 0])
    for t in range(T):
        now = map_parts(lambda part, t=t: part[:, t], seen)
        state = model.perceive(state, now, before, reset[:, t])
        before = acts[:, t]
        features, observed = model.observe(model.encode(seen)[:, : t + 1], acts[:, : t + 1], reset[:, : t + 1])
        assert_close(model.features(state), features[:, -1])
        uniforms = torch.rand(B, model.uniforms_per_step)
        assert_close(model.imagine(state, before, uniforms)[0], model.imagine(observed, before, uniforms)[0])
    shown = model.frame(state)
    assert map_parts(lambda part: (part.shape, part.dtype), shown) == map_parts(
        lambda part: (part[:, 0].shape, part.dtype), seen
    )


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_no_sample_is_outside_of_its_range(observation, prediction):
    model = make(observation, prediction=prediction, ensemble=2)
    with torch.no_grad():
        model.observation_head[2].bias.normal_(std=20)  # codes of other parts would be the likeliest
    tokens, action = segment(model)
    _, state = model.observe(tokens[:, :2], action[:, :2], torch.zeros(B, 2, dtype=torch.bool))
    extremes = torch.tensor([0.0, 0.5, 1 - 2.0**-24])[:, None].expand(B, model.uniforms_per_step)
    for step in range(20):
        imagined, state = model.imagine(state, action[:, 0], extremes if step % 2 else None)
        assert in_range(model, imagined.latent)
        assert (imagined.disagreement >= -1e-6).all() and imagined.disagreement.isfinite().all()
    model.decode(imagined.latent)  # each code has a meaning in its place


def test_a_code_of_probability_zero_is_not_drawn_whatever_the_rounding(monkeypatch):
    """On a GPU equal sums may be rounded differently."""
    model = make("all kinds")
    tokens, action = segment(model)
    _, state = model.observe(tokens[:, :2], action[:, :2], torch.zeros(B, 2, dtype=torch.bool))
    for drawn in (0, model.tokenizer.codes - 1):
        monkeypatch.setattr(
            "wmcli.world_models.token.sample",
            lambda logits, uniforms, drawn=drawn: torch.full(uniforms.shape, min(drawn, logits.shape[-1] - 1)),
        )
        assert in_range(model, model.imagine(state, action[:, 0])[0].latent)


def test_probabilities_are_those_of_each_range_alone():
    model = make("all kinds", observation_burn_in=0)
    tokens, action = segment(model)
    got = model.predict(tokens, action)
    plain = model.observation_head(got.at_tokens)
    for place, (first, stop) in enumerate(model.tokenizer.ranges):
        of_place = got.observation[:, :, place].softmax(-1)
        assert_close(of_place[..., first:stop], plain[:, :, place, first:stop].softmax(-1))
        assert of_place[..., :first].sum() == of_place[..., stop:].sum() == 0


@pytest.mark.parametrize("observation", ["vector", "number", "category"])
def test_where_all_tokens_have_one_range_nothing_is_masked(observation):
    model = make(observation)
    assert model.possible is None and model.ranges is None
    assert make("all kinds").possible.sum(1).tolist() == [2, 4, 6, 6, 9, 9]


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_ensemble_knows_the_ranges(prediction):
    model = make("all kinds", prediction=prediction, ensemble=3)
    batch = experience(model)
    total, log = model.loss(batch)
    total.backward()
    start = T - model.predict(batch.inputs, batch.action).observation.shape[1]
    at_tokens, losses = model.predict(batch.inputs, batch.action).at_tokens, []
    for place, (first, stop) in enumerate(model.tokenizer.ranges):
        for head in model.ensemble.heads:
            logits = head(at_tokens[:, :, place])[..., first:stop]
            target = batch.inputs[:, start:, place] - first
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    assert_close(log["ensemble_loss"], torch.stack(losses).mean().detach())
    assert all(parameter.grad.isfinite().all() for parameter in model.ensemble.parameters())

    _, state = model.observe(batch.inputs, batch.action, batch.is_first)
    _, _, at_tokens, _ = model.advance(state, batch.action[:, -1], lambda logits, start: logits.argmax(-1))
    _, state = model.observe(batch.inputs, batch.action, batch.is_first)
    with torch.no_grad():
        model.observation_head[2].weight.mul_(1e6)  # so certain that samples are the likeliest tokens as well
        model.observation_head[2].bias.mul_(1e6)
    got = model.imagine(state, batch.action[:, -1])[0].disagreement
    want = []
    for place, (first, stop) in enumerate(model.tokenizer.ranges):
        p = torch.stack([head(at_tokens[:, place])[:, first:stop].softmax(-1) for head in model.ensemble.heads])
        want.append((p * (p / p.mean(0)).log()).sum(-1).mean(0))
    assert_close(got, torch.stack(want).mean(0).detach(), rtol=1e-3, atol=1e-6)


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("observation", "rows"), [("all kinds", 9 + 6), ("vector", 9), ("two shapes", None)])
def test_codes_of_images_are_embedded_as_their_vectors_and_others_in_a_table(observation, rows):
    model = make(observation)
    assert (None if model.token_embedding is None else len(model.token_embedding.weight)) == rows
    tokens, _ = segment(model)
    got = model._embed(tokens)
    images = model.tokenizer.image_codes
    for token, vector in zip(tokens.flatten().tolist(), got.flatten(0, -2), strict=True):
        want = model.tokenizer.codebook()[token] if token < images else model.token_embedding.weight[token - images]
        assert torch.equal(vector, want)
    everything = make(observation, shared_embeddings=False)
    assert everything.token_embedding.weight.shape == (everything.tokenizer.codes, D)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("observation", "action"), PAIRS)
def test_gradients_reach_everything_but_the_tokenizer(observation, action, prediction, shared):
    model = make(observation, action, prediction=prediction, shared_embeddings=shared)
    total, log = model.loss(experience(model))
    total.backward()
    unreached = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert unreached == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert not any("tokenizer" in name or "possible" in name for name in model.state_dict())
    assert all(value.isfinite() for value in log.values())


def test_losses_start_near_those_of_a_guess_within_the_ranges():
    model = make("all kinds", initialization="gpt", shared_embeddings=False)
    _, log = model.loss(experience(model))
    want = sum(math.log(stop - first) for first, stop in model.tokenizer.ranges) / model.tokenizer.tokens
    assert abs(log["observation_loss"] - want) < 0.1


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_half_precision_stays_near(prediction):
    model = make("all kinds", "continuous", prediction=prediction, ensemble=2)
    batch = experience(model)
    want, _ = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = model.loss(batch)
        _, state = model.observe(batch.inputs, batch.action, batch.is_first)
        imagined, _ = model.imagine(state, batch.action[:, 0])
    assert_close(got, want, rtol=0.03, atol=0)
    assert in_range(model, imagined.latent)


# -- observations that close an episode -------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_closing_frame_is_predicted_and_has_no_outcome(prediction):
    model = make(prediction=prediction, closing_frames=True, reward_burn_in=0, observation_burn_in=0)
    assert model.settings.reads_closing and not make().settings.reads_closing
    closing = torch.zeros(B, T, dtype=torch.bool)
    closing[0, T - 1] = closing[2, T - 1] = True
    batch = experience(model)._replace(is_closing=closing)
    _, log = model.loss(batch)

    garbage = batch._replace(
        reward=batch.reward.masked_fill(closing, 7.0),
        terminated=batch.terminated ^ closing,
        action=torch.where(closing, 3 - batch.action, batch.action),
    )
    _, same = model.loss(garbage)
    assert_close(same, log)

    # Without the mark the outcome counts; the tokens count either way.
    _, marked = model.loss(batch)
    _, unmarked = model.loss(batch._replace(is_closing=None))
    assert marked["observation_loss"] == unmarked["observation_loss"]
    assert marked["reward_loss"] != unmarked["reward_loss"]
    assert marked["termination_loss"] != unmarked["termination_loss"]
    logits = model.predict(batch.inputs, batch.action)
    losses = F.cross_entropy(logits.reward.mT, batch.reward.sign().long() + 1, reduction="none")
    assert_close(log["reward_loss"], losses[~closing].mean().detach())
    losses = F.cross_entropy(logits.termination.mT, batch.terminated.long(), reduction="none")
    assert_close(log["termination_loss"], losses[~closing].mean().detach())


# -- learning ---------------------------------------------------------------------------------------------------------

COUNTER: ObservationSpace = {"body": Vector(2), "gear": Categories((3,))}


def counting(model: TokenWorldModel, rows: int, generator: torch.Generator, time: int = 4) -> Batch:
    """A gear that the action shifts, and a vector of two numbers that it determines. Reward 1 in gear 0."""
    action = torch.rand(rows, time, 1, generator=generator) * 2 - 1
    step = (action[..., 0] > 0).long() + 1
    gear = torch.randint(3, (rows, 1), generator=generator)
    gear = (gear + F.pad(step.cumsum(1), (1, 0))) % 3
    seen = gear[:, :-1]
    body = torch.stack((seen * 5.0 - 3, (seen == 1) * 30.0), -1)
    tokens = model.encode({"body": body, "gear": seen[..., None]})
    no = torch.zeros(rows, time, dtype=torch.bool)
    return Batch(tokens, action, (gear[:, 1:] == 0).float(), no, no, no, ~no)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_vector_and_a_category_moved_by_continuous_actions_are_learned_and_imagined(prediction):
    settings = {"sequence_length": 4, "observation_burn_in": 1, "context": 2, "prediction": prediction}
    model = make(COUNTER, Continuous((-1.0,), (1.0,)), **settings).train()
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 150)
    generator = torch.Generator().manual_seed(3)
    for _ in range(150):
        total, _ = model.loss(counting(model, 32, generator))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    real = counting(model, 128, torch.Generator().manual_seed(4))
    _, log = model.eval().loss(real)
    assert log["observation_loss"] < 0.15 and log["reward_loss"] < 0.15
    _, state = model.observe(real.inputs[:, :2], real.action[:, :2], torch.zeros(128, 2, dtype=torch.bool))
    for t in (1, 2):
        imagined, state = model.imagine(state, real.action[:, t])
        assert (imagined.latent == real.inputs[:, t + 1]).all(-1).float().mean() > 0.9
        assert (imagined.reward == real.reward[:, t]).float().mean() > 0.9
