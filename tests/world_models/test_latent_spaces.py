"""The latent world model on observations of any parts and actions of any kind.

Axes: B batch, T frames, K variables, C classes, D width. Posteriors are certain where draws must agree.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_backbones import NAMES, small
from torch import Tensor
from torch.testing import assert_close

from wmcli.assemble import build_tokenizer, build_world_model
from wmcli.nn.actions import encode_action, random_actions
from wmcli.settings import resolve
from wmcli.spaces import (
    ActionSpace,
    Categories,
    Continuous,
    Discrete,
    Image,
    ObservationSpace,
    Spaces,
    Vector,
    map_parts,
)
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.world_models.base import Batch
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

B, T, K, C, D = 3, 6, 4, 5, 16
SEEN: dict[str, ObservationSpace] = {
    "image": Image(8, 12, 1),
    "vector": Vector(5),
    "dict": {"camera": Image(8, 8), "body": Vector(3), "mode": Categories((3, 2))},
}
ACTIONS: dict[str, ActionSpace] = {
    "discrete": Discrete(6),
    "categories": Categories((3, 2)),
    "continuous": Continuous((-1.0, -2.0), (1.0, 2.0)),
}
READS: dict[str, dict[str, Any]] = {
    "factorized": {"act_window": 0},
    "window": {"act_window": T - 1},
    "state": {"act_window": 0, "decoder_reads": "state", "heads_read": "state"},
    "recurrent": {"act_window": 0, "decoder_reads": "state", "posterior": "recurrent"},
    "opening": {"act_window": 0, "decoder_reads": "state", "posterior": "recurrent", "opening": "learned"},
    "full": {"act_window": 0, "decoder_reads": "state", "posterior": "full"},
}


def make(
    shown: str = "dict", actions: str = "continuous", backbone: str = "gru", *, certain: bool = False, **settings: Any
) -> LatentWorldModel:
    torch.manual_seed(0)
    dynamics = LatentWorldModelSettings(
        **{"sequence_length": 12, "context": 3, "head_width": 9, "act_window": 5, "act_on": "posterior", **settings}
    )
    of_tokenizer = CategoricalTokenizerSettings(
        categoricals=K,
        classes=C,
        unimix=0.0 if certain else 0.01,
        channels=(6, 8),
        strides=(2, 2),
        kernel=4,
        norm="rms",
        mlp_layers=2,
        mlp_width=7,
    )
    networks = [small(backbone, max_length=12, block=1, width=D) for _ in range(1 + (dynamics.posterior == "full"))]
    reads = LatentWorldModel.tokenizer_reads(dynamics, of_tokenizer.features(SEEN[shown]), D)
    tokenizer = CategoricalTokenizer(of_tokenizer, SEEN[shown], **reads)
    model = LatentWorldModel(dynamics, networks[0], tokenizer, ACTIONS[actions], *networks[1:])
    with torch.no_grad():
        model.prior_head.weight.mul_(20)
        tokenizer.posterior_head.weight.mul_(1e6 if certain else 20)
    return model


def observations(shown: str, *lead: int, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def part(space: Any) -> Tensor:
        if isinstance(space, Image):
            return torch.randint(256, (*lead, *space.shape), dtype=torch.uint8, generator=generator)
        if isinstance(space, Vector):
            return 3 * torch.randn(*lead, space.size, generator=generator)
        return random_actions(space, lead, generator)

    return map_parts(part, SEEN[shown])


def segment(model: LatentWorldModel, shown: str, time: int = T, **changes: Any) -> Batch:
    generator = torch.Generator().manual_seed(2)
    no = torch.zeros(B, time, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = first[1, 3] = True
    action = random_actions(model.action_space, (B, time), generator)
    reward = torch.randn(B, time, generator=generator)
    return Batch(observations(shown, B, time), action, reward, no, no, first, ~no)._replace(**changes)


def cut(batch: Batch, some: slice) -> Batch:
    inputs = map_parts(lambda part: part[:, some], batch.inputs)
    return Batch(inputs, *(None if part is None else part[:, some] for part in batch[1:]))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("shown", SEEN)
def test_every_parameter_learns(shown, actions, reads):
    model = make(shown, actions, free_nats=0.0, **READS[reads])
    total, log = model.loss(segment(model, shown))
    total.backward()
    assert total.isfinite() and not [name for name, each in model.named_parameters() if each.grad is None]
    names = {f"reconstruction.{name}" for name in SEEN["dict"]} if shown == "dict" else set()
    assert {name for name in log if name.startswith("reconstruction.")} == names
    if names:
        assert_close(sum(log[name] for name in names), log["reconstruction"])


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("shown", SEEN)
@torch.no_grad()
def test_frames_perceived_one_by_one_are_those_observed_at_once(shown, actions, reads):
    model = make(shown, actions, "s4", certain=True, **READS[reads]).eval()
    batch = segment(model, shown)
    latent, state = model.encode(batch.inputs), None
    uniforms = torch.rand(2, B, model.uniforms_per_step)
    for t in range(T):
        before = batch.action[:, max(t - 1, 0)]
        frame = map_parts(lambda part, t=t: part[:, t], batch.inputs)
        state = model.perceive(state, frame, before, batch.is_first[:, t])
        whole = [each[:, : t + 1] for each in (latent, batch.action, batch.is_first)]
        features, observed = model.observe(*whole)
        assert_close(model.features(state), features[:, -1], rtol=0, atol=1e-4)
        if t not in (0, 3, T - 1):
            continue
        dreams = []
        for start in (state, observed):
            for each in uniforms:
                step, start = model.imagine(start, batch.action[:, t], each)
            dreams.append((step.latent, step.reward, step.continuation, model.features(start)))
        assert_close(*dreams, rtol=0, atol=1e-3)
    shape = map_parts(lambda space: (B, *space.shape), SEEN[shown])
    assert map_parts(lambda part: tuple(part.shape), model.frame(state)) == shape


@pytest.mark.parametrize("actions", ACTIONS)
@torch.no_grad()
def test_actions_move_what_is_imagined(actions):
    model = make("vector", actions, act_window=0).eval()
    batch = segment(model, "vector")
    _, state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first)
    first, other = batch.action[:, 0], batch.action[:, 1]
    changed = encode_action(model.action_space, first, torch.float32) != encode_action(
        model.action_space, other, torch.float32
    )
    uniforms = torch.rand(B, model.uniforms_per_step)
    pasts = [model.imagine(state, action, uniforms)[1].deterministic for action in (first, other)]
    assert changed.any() and torch.equal((pasts[0] != pasts[1]).any(-1), changed.any(-1))


def test_numbers_beyond_the_bounds_act_like_the_bounds():
    model = make("vector", "continuous", act_window=0).eval()
    batch = segment(model, "vector")
    beyond = batch._replace(action=batch.action.sign() * (1 + batch.action.abs()))
    bounds = batch._replace(action=batch.action.sign())
    found = []
    for each in (beyond, bounds):
        torch.manual_seed(3)
        found.append(model.loss(each)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("posterior", ["factorized", "recurrent", "full"])
@pytest.mark.parametrize("actions", ACTIONS)
@torch.no_grad()
def test_chunks_that_are_carried_are_one_long_row(actions, posterior):
    """Latents and pasts, by the losses whose terms are counted in both."""
    settings = {"rows": "streams", "across_ends": False, "act_window": 0, "posterior": posterior}
    model = make("dict", actions, "s4", certain=True, **settings).eval()
    batch = segment(model, "dict")
    batch.is_first[:, 1:] = False
    _, log = model.loss(batch)
    carry, logs = model.initial_carry(B), []
    for some in (slice(0, 3), slice(3, T)):
        _, found, carry = model.carried_loss(cut(batch, some), carry)
        logs.append(found)
    for name in ("reconstruction", "reconstruction.body", "reconstruction.mode"):
        assert_close((logs[0][name] + logs[1][name]) / 2, log[name], rtol=1e-4, atol=1e-5)
    kl = (2 * logs[0]["observation_loss"] + 3 * logs[1]["observation_loss"]) / 5
    assert_close(kl, log["observation_loss"], rtol=1e-3, atol=1e-4)


# -- the observation that closes an episode ---------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("heads_read", ["past", "state"])
def test_a_closing_frame_is_learned_and_nothing_behind_it(heads_read, reset):
    """The frame counts in reconstruction and prediction, and is where the last outcome is read. What follows it is
    not predicted, with or without a clearing of the state."""
    model = make(
        "vector",
        "discrete",
        heads_read=heads_read,
        reset_at_ends=reset,
        free_nats=0.0,
        closing_frames=True,
        certain=True,
    ).eval()
    at, behind = 3, 4
    closing, first = (torch.zeros(B, T, dtype=torch.bool) for _ in range(2))
    first[:, 0], first[:, behind], closing[:, at] = True, True, True

    def losses(**changes: Any) -> dict[str, float]:
        torch.manual_seed(5)
        batch = segment(model, "vector", is_first=first, is_closing=closing)
        _, log = model.loss(batch._replace(**{name: change(batch) for name, change in changes.items()}))
        return {name: float(value) for name, value in log.items()}

    def moved(name: str, time: int) -> Any:
        def change(batch: Batch) -> Tensor:
            value = getattr(batch, name).clone()
            value[:, time] += 1
            return value

        return {name: change}

    want = losses()
    assert losses(**moved("reward", at)) == want
    assert losses(**moved("reward", at - 1))["reward_loss"] != want["reward_loss"]
    assert losses(**moved("reward", behind))["reward_loss"] != want["reward_loss"]
    shown = losses(**moved("inputs", at))
    assert shown["reconstruction"] != want["reconstruction"] and shown["observation_loss"] != want["observation_loss"]
    # Frames behind the closing one are predicted, except for the first.
    counted = []
    original = model._with_free_nats
    model._with_free_nats = lambda kl, mask, weight: counted.append(mask) or original(kl, mask, weight)
    losses()
    predicted = [True] * (T - 1)
    predicted[behind - 1] = False
    assert all(mask.tolist() == [predicted] * B for mask in counted)


# -- gradients of imagination -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", NAMES)
def test_imagination_has_the_gradient_of_actions_on_every_backbone(backbone):
    """Through latents and pasts of several steps. The numbers are those without a gradient, to rounding."""
    model = make("dict", "continuous", backbone, act_window=0).eval().requires_grad_(False)
    batch = segment(model, "dict")
    uniforms = torch.rand(3, B, model.uniforms_per_step, generator=torch.Generator().manual_seed(4))

    def dream(action: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        _, state = model.observe(model.encode(batch.inputs), batch.action, batch.is_first, torch.full((B, T, K), 0.5))
        rewards, features = [], []
        for each in uniforms:
            step, state = model.imagine(state, action, each)
            rewards.append(step.reward + step.continuation)
            features.append(model.features(state))
        return rewards, features

    action = batch.action[:, 0].clone().requires_grad_()
    rewards, features = dream(action)
    for each in (*rewards, *features):
        (gradient,) = torch.autograd.grad(each.sum(), action, retain_graph=True)
        assert gradient.isfinite().all() and gradient.any()
    with torch.no_grad():
        plain = dream(action)
    assert_close(
        ([each.detach() for each in rewards], [each.detach() for each in features]), plain, rtol=1e-4, atol=1e-4
    )


# -- from settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["drama", "dreamer-1m", "s4wm-2d", "rssm-tbtt-2d", "s4wm-full-posterior"])
def test_presets_are_built_for_any_spaces(preset):
    settings = resolve(preset)
    for shown in (Vector(5), {"camera": Image(64, 64, 1), "body": Vector(3), "mode": Categories((3, 2))}):
        spaces = Spaces(shown, ACTIONS["continuous"])
        with torch.device("meta"):
            tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.encoder == "dynamics" else None
            model = build_world_model(settings, tokenizer, spaces)
        assert model.observation_space == shown and model.action_space == spaces.action
        assert model.tokenizer.vector_decoder.heads[0].out_features == (5 if shown == Vector(5) else 3)


# -- learning ---------------------------------------------------------------------------------------------------------


def drives(generator: torch.Generator, rows: int, time: int = 8) -> Batch:
    """A point on a line from -4 to 4 that moves by its action, up to one; the reward is minus its new distance to 0."""
    action = torch.rand(rows, time, 2, generator=generator) * 2 - 1
    place = [torch.rand(rows, generator=generator) * 8 - 4]
    for t in range(time):
        place.append((place[-1] + action[:, t, 0]).clamp(-4, 4))
    places = torch.stack(place, 1)
    no = torch.zeros(rows, time, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = True
    shown = torch.stack((places, -10 * places, places.abs(), places * 0, places * 0 + 7), -1)
    return Batch(shown[:, :-1], action, -places[:, 1:].abs(), no, no, first, ~no)


@pytest.mark.slow
def test_a_moving_point_is_learned_imagined_and_has_a_sensible_gradient():
    model = make("vector", "continuous", free_nats=0.1, head_width=32, reward="mse", **READS["opening"])
    with torch.no_grad():
        model.prior_head.weight.div_(20)
        model.tokenizer.posterior_head.weight.div_(20)
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=4e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(500):
        total, _ = model.loss(drives(generator, 32))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    model.eval()
    batch = drives(generator, 256)
    seen = [each[:, :2] for each in (model.encode(batch.inputs), batch.action, batch.is_first)]
    _, state = model.observe(*seen)
    for t in (1, 2, 3):
        with torch.no_grad():
            imagined, state = model.imagine(state, batch.action[:, t])
        place = model.decode(model.features(state))[:, 0]
        # Of places up to 4 apart from 0; without knowledge both errors are over 1.
        assert (place - batch.inputs[:, t + 1, 0]).abs().mean() < 0.8, t
        assert (imagined.reward - batch.reward[:, t]).abs().mean() < 0.7, t
    _, state = model.observe(*seen)
    action = batch.action[:, 1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.imagine(state, action)[0].reward.sum(), action)
    place = batch.inputs[:, 1, 0]
    far = place.abs() > 2
    assert (gradient[far, 0].sign() == -place[far].sign()).float().mean() > 0.95
    assert gradient[:, 1].abs().mean() < 0.1 * gradient[:, 0].abs().mean()  # the second number moves nothing
