"""Tokens of observations with several parts: vocabulary, round trips, features, losses and measures of each part."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wmcli.config import validate
from wmcli.errors import UsageError
from wmcli.experience import Episodes
from wmcli.nn.two_hot import symlog
from wmcli.spaces import Categories, Image, ObservationSpace, Vector, map_parts, parts_of
from wmcli.tokenizers import TokenizerSettings, VQTokenizer
from wmcli.tokenizers.fixed import bin_values
from wmcli.trainers import TokenizerTrainer
from wmcli.training.device import Machine
from wmcli.training.loop import fit
from wmcli.training.settings import TrainingSettings

SETTINGS = TokenizerSettings(channels=8, downsamples=2, width=16, codes=6, network="patch", vector_bins=9)
BODY, GEAR = Vector(3), Categories((2, 4, 1))
SPACES: dict[str, ObservationSpace] = {
    "image": Image(12, 12),
    "wide image of one color": Image(8, 12, 1),
    "vector": BODY,
    "categories": GEAR,
    "named image": {"camera": Image(8, 8)},
    "two vectors": {"body": BODY, "goal": Vector(1)},
    "all kinds": {"gear": GEAR, "camera": Image(8, 12, 4), "body": BODY},
    "two images": {"left": Image(8, 8), "body": BODY, "right": Image(8, 8)},
    "two shapes": {"near": Image(8, 12), "far": Image(4, 8, 1), "gear": GEAR},
}


def make(space: ObservationSpace | str, **changes: Any) -> VQTokenizer:
    torch.manual_seed(0)
    return VQTokenizer(SETTINGS.model_copy(update=changes), SPACES[space] if isinstance(space, str) else space)


def observations(space: ObservationSpace, *lead: int, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(part: Any) -> Tensor:
        if isinstance(part, Image):
            return torch.randint(256, (*lead, *part.shape), dtype=torch.uint8, generator=generator)
        if isinstance(part, Vector):
            return torch.randn(*lead, part.size, generator=generator) * 4
        each = [torch.randint(size, lead, generator=generator) for size in part.sizes]
        return torch.stack(each, -1)

    return map_parts(draw, space)


# -- the vocabulary ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "tokens", "codes", "image_codes"),
    [
        ("image", 9, 6, 6),
        ("wide image of one color", 6, 6, 6),
        ("vector", 3, 9, 0),
        ("categories", 3, 7, 0),
        ("named image", 4, 6, 6),
        ("two vectors", 4, 9, 0),
        ("all kinds", 3 + 6 + 3, 6 + 9 + 7, 6),
        ("two images", 4 + 3 + 4, 6 + 9, 6),
        ("two shapes", 6 + 2 + 3, 2 * 6 + 7, 12),
    ],
)
def test_sizes_of_the_vocabulary(space: str, tokens: int, codes: int, image_codes: int) -> None:
    model = make(space)
    assert (model.tokens, model.codes, model.image_codes) == (tokens, codes, image_codes)
    assert len(model.ranges) == tokens
    if image_codes:
        assert model.codebook().shape == (image_codes, 16)


def test_images_come_first_then_bins_then_categories() -> None:
    assert make("all kinds").ranges == ((15, 17), (17, 21), (21, 22), *[(0, 6)] * 6, *[(6, 15)] * 3)
    assert make("two images").ranges == (*[(0, 6)] * 4, *[(6, 15)] * 3, *[(0, 6)] * 4)
    assert make("two shapes").ranges == (*[(0, 6)] * 6, *[(6, 12)] * 2, (12, 14), (14, 18), (18, 19))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0)])
def test_tokens_are_in_their_ranges_and_shapes_are_kept(space: str, lead: tuple[int, ...]) -> None:
    model = make(space)
    seen = observations(model.observation_space, *lead)
    tokens = model.encode(seen)
    assert tokens.shape == (*lead, model.tokens) and tokens.dtype == torch.int64
    first, stop = torch.tensor(model.ranges).unbind(1)
    assert ((first <= tokens) & (tokens < stop)).all()
    decoded = model.decode(tokens)
    assert map_parts(lambda part: (part.shape, part.dtype), decoded) == map_parts(
        lambda part: (part.shape, part.dtype), seen
    )
    features = model.features(tokens)
    assert features.shape == (*lead, *model.feature_shape) and features.dtype == torch.float32
    assert not features.requires_grad


# -- fixed codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [5, 9, 125, 201])
def test_bins_are_symmetric_and_dense_up_to_pi(bins: int) -> None:
    values = bin_values(bins)
    assert values.shape == (bins,) and values.dtype == torch.float32
    assert torch.equal(values, -values.flip(0)) and values[bins // 2] == 0
    steps = values.diff()
    quarter = bins // 4
    torch.testing.assert_close(steps[: quarter - 1], steps[:1].expand(quarter - 1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values[-1 - quarter], torch.tensor(math.log1p(math.pi)))
    assert values[-1] == 6
    assert (steps > 0).all() and steps.min() == pytest.approx(math.log1p(math.pi) / quarter, rel=1e-4)


def test_the_bins_are_those_of_simulus() -> None:
    """31 steps from 0 to symlog(pi), and 31 from there to 6, on both sides."""
    dense, coarse = np.linspace(0, np.log1p(np.pi), 32), np.linspace(np.log1p(np.pi), 6, 32)[1:]
    positive = np.concatenate((dense, coarse))
    want = np.concatenate((-positive[:0:-1], positive))
    assert TokenizerSettings().vector_bins == len(want) == 125
    np.testing.assert_allclose(bin_values(125).numpy(), want, atol=1e-6)


def test_a_number_of_bins_that_cannot_be_divided() -> None:
    with pytest.raises(UsageError, match="vector_bins = 100 must be a multiple of 4 plus 1; set vector_bins = 101"):
        validate(TokenizerSettings, {"vector_bins": 100}, "tokenizer")


def test_vectors_lose_at_most_half_a_bin() -> None:
    model = make(Vector(1), vector_bins=125)
    values = bin_values(125)
    x = torch.linspace(-402, 402, 100_001)[:, None]
    error = (symlog(model.decode(model.encode(x))) - symlog(x)).abs()
    assert error.max() < values.diff().max() / 2 + 1e-5
    small = x.abs() < math.pi
    assert error[small].max() < values.diff().min() / 2 + 1e-5
    beyond = torch.tensor([[-1e9], [0.0], [1e9], [math.inf]])
    assert model.encode(beyond)[:, 0].tolist() == [0, 62, 124, 124]
    assert model.decode(model.encode(beyond))[1] == 0


@pytest.mark.parametrize("space", ["vector", "two vectors"])
def test_decoded_numbers_are_those_nearest(space: str) -> None:
    model = make(space)
    seen = observations(model.observation_space, 50)
    tokens = model.encode(seen)
    assert torch.equal(model.encode(model.decode(tokens)), tokens)
    distance = (symlog(torch.cat(list(parts_of(seen).values()), -1))[..., None] - bin_values(9)).abs()
    assert torch.equal(distance.argmin(-1), tokens)


def test_categories_come_back_exactly() -> None:
    model = make("all kinds")
    seen = observations(model.observation_space, 4, 10)
    decoded = model.decode(model.encode(seen))
    assert torch.equal(decoded["gear"], seen["gear"])
    assert torch.equal(model.encode(seen | {"gear": seen["gear"].int()}), model.encode(seen)), "int32, as on disk"


# -- images beside other parts ----------------------------------------------------------------------------------------


def test_an_image_has_the_tokens_that_it_has_alone() -> None:
    space = SPACES["all kinds"]
    assert isinstance(space, dict)
    alone, together = make(space["camera"]), make(space)
    assert list(alone.state_dict()) == list(together.state_dict())
    together.load_state_dict(alone.state_dict())
    seen = observations(space, 5)
    tokens = together.encode(seen)
    assert torch.equal(tokens[:, 3:9], alone.encode(seen["camera"]))
    assert torch.equal(together.decode(tokens)["camera"], alone.decode(tokens[:, 3:9]))
    (want, terms), (got, same) = alone.loss(seen["camera"]), together.loss(seen)
    assert torch.equal(got, want)
    assert same == {f"{name}.camera": value for name, value in terms.items()}
    usage, others = together.usage(seen), alone.usage(seen["camera"])
    assert {name: usage[f"{name}.camera"] for name in others} == others


def test_images_of_one_shape_share_their_network() -> None:
    model = make("two images")
    seen = observations(model.observation_space, 5)
    swapped = {"left": seen["right"], "body": seen["body"], "right": seen["left"]}
    tokens, others = model.encode(seen), model.encode(swapped)
    assert torch.equal(tokens[:, :4], others[:, 7:]) and torch.equal(tokens[:, 7:], others[:, :4])
    assert list(model.state_dict()) == list(make("image").state_dict())
    _, losses = model.loss(seen)
    assert set(losses) == {
        f"{name}.{part}" for name in ("reconstruction", "codebook", "commitment") for part in ("left", "right")
    }


@pytest.mark.parametrize("network", ["slim", "patch", "residual"])
@pytest.mark.parametrize("quantizer", ["vq", "vq-ema", "fsq"])
def test_images_of_each_shape_have_their_own_network_and_all_of_it_learns(network: str, quantizer: str) -> None:
    channels = 32 if network == "residual" else 8
    model = make("two shapes", network=network, quantizer=quantizer, channels=channels, fsq_levels=(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    seen = observations(model.observation_space, 6)
    history = []
    for _ in range(10):
        optimizer.zero_grad()
        total, losses = model.loss(seen)
        assert total.item() == pytest.approx(sum(float(value) for value in losses.values()))
        total.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        history.append(sum(float(losses[f"reconstruction.{part}"]) for part in ("near", "far")))
    assert history[-1] < history[0]
    assert not torch.equal(*model.codebook().split(6))


def test_state_with_several_networks_survives_a_file(tmp_path: Any) -> None:
    model = make("two shapes")
    seen = observations(model.observation_space, 6)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(5)
    other = VQTokenizer(SETTINGS, SPACES["two shapes"])
    assert not torch.equal(other.codebook(), model.codebook())
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other.encode(seen), model.encode(seen))


# -- features and measures --------------------------------------------------------------------------------------------


def test_features_of_one_image_are_a_grid_and_others_are_flat() -> None:
    for space in ("image", "named image"):
        model = make(space)
        tokens = model.encode(observations(model.observation_space, 2))
        assert model.grid is not None and model.feature_shape == (16, *model.grid)
        grid = model.embed(tokens).unflatten(1, model.grid)
        assert torch.equal(model.features(tokens), grid.permute(0, 3, 1, 2))
    model = make("all kinds")
    seen = observations(model.observation_space, 5)
    tokens = model.encode(seen)
    assert model.grid is None and model.feature_shape == (7 + 6 * 16 + 3,)
    gear, camera, body = model.features(tokens).split((7, 96, 3), -1)
    for number, (part, size) in enumerate(zip(gear.split((2, 4, 1), -1), (2, 4, 1), strict=True)):
        assert torch.equal(part, torch.nn.functional.one_hot(seen["gear"][:, number], size).float())
    assert torch.equal(camera, model.embed(tokens[:, 3:9]).flatten(1))
    torch.testing.assert_close(body, symlog(model.decode(tokens)["body"]))


def test_features_of_two_shapes_are_the_vectors_of_their_own_codes() -> None:
    model = make("two shapes")
    tokens = model.encode(observations(model.observation_space, 5))
    assert torch.equal(model.features(tokens)[:, : 8 * 16], model.embed(tokens[:, :8]).flatten(1))


def test_usage_of_each_part() -> None:
    model = make({"body": Vector(2), "gear": Categories((2, 2))})
    body = torch.tensor([[0.0, 0.0], [0.0, 1000.0], [0.0, 0.0], [0.0, 0.0]])
    gear = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    usage = model.usage({"body": body, "gear": gear})
    assert set(usage) == {"codes_used.body", "perplexity.body", "l1.body", "codes_used.gear", "perplexity.gear"}
    assert (usage["codes_used.body"], usage["codes_used.gear"]) == (2, 4)
    assert usage["perplexity.gear"] == pytest.approx(4)
    assert usage["l1.body"] == pytest.approx((1000 - math.expm1(6)) / 8, rel=1e-4)


# -- nothing to learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["vector", "categories", "two vectors"])
def test_a_tokenizer_without_images_is_published_without_updates(space: str) -> None:
    model = make(space)
    assert not list(model.parameters()) and not model.state_dict()
    rows = 20
    frames = observations(model.observation_space, rows)

    class Rows(SimpleNamespace):
        def __len__(self) -> int:
            return rows

    replay: Any = Rows(observation=frames, runs=lambda _: (Episodes(np.array([0]), np.array([rows])), np.arange(rows)))
    machine = Machine(torch.device("cpu"), "float32", 1)
    trainer = TokenizerTrainer(
        model, replay, SETTINGS, TrainingSettings(), machine=machine, rng=np.random.default_rng(0)
    )
    assert not trainer.learns
    assert fit(trainer, 50) == {} and trainer.state.update == 0
    assert trainer.measure() == model.usage(frames)


# -- settings that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "changes", "message"),
    [
        (Image(8, 10), {}, "frames of 8x10 pixels cannot be halved 2 times.*multiple of 4"),
        (Image(16, 16, 1), {"lpips_weights": "x"}, "in three colors, these have 16x16 in 1.*perceptual=none"),
        ({"a": Image(32, 32), "b": Image(8, 32)}, {"lpips_weights": "x"}, "at least 16 pixels.*8x32"),
    ],
)
def test_images_that_do_not_fit(space: ObservationSpace, changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(space, **changes)
