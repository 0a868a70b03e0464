"""The categorical tokenizer on observations of several parts: shapes, the loss by hand, and what is learned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.errors import UsageError
from wmcli.nn.categorical import draw_one_hot
from wmcli.spaces import Categories, Image, ObservationSpace, Spaces, Vector, map_parts, parts_of
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.tokenizers.measures import object_weights, relative_error

K, C = 6, 5
SPACES: dict[str, ObservationSpace] = {
    "image": Image(12, 20, 1),
    "vector": Vector(4),
    "categories": Categories((3, 2)),
    "dict": {"b.touch": Vector(2), "camera": Image(16, 8, 3), "a": Categories((4,)), "depth": Image(8, 8, 2)},
}
ALL = pytest.mark.parametrize("name", SPACES)


def make(space: ObservationSpace, **changes) -> CategoricalTokenizer:
    torch.manual_seed(0)
    values = {"categoricals": K, "classes": C, "channels": (8, 12), "strides": (2, 2), "kernel": 4, "norm": "rms"}
    values |= {"mlp_layers": 2, "mlp_width": 9}
    return CategoricalTokenizer(CategoricalTokenizerSettings(**values | changes), space)


def seen(space: ObservationSpace, *lead: int, seed: int = 1) -> Tensor | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def part(space) -> Tensor:
        if isinstance(space, Image):
            return torch.randint(256, (*lead, *space.shape), dtype=torch.uint8, generator=generator)
        if isinstance(space, Vector):
            return 3 * torch.randn(*lead, space.size, generator=generator)
        return torch.stack([torch.randint(size, lead, generator=generator) for size in space.sizes], -1)

    return map_parts(part, space)


def pairs(got, want) -> list[tuple[Tensor, Tensor]]:
    """The parts of two observations, which have them in one order."""
    assert list(parts_of(got)) == list(parts_of(want))
    return list(zip(parts_of(got).values(), parts_of(want).values(), strict=True))


@ALL
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_any_leading_axes(name, lead):
    tokenizer = make(SPACES[name]).eval()
    observation = seen(SPACES[name], *lead)
    latent = tokenizer.encode(observation)
    assert latent.shape == (*lead, K, C) and latent.dtype == torch.float32
    decoded = tokenizer.decode(latent)
    assert all((got.shape, got.dtype) == (want.shape, want.dtype) for got, want in pairs(decoded, observation))
    if lead == (2, 3):
        one = map_parts(lambda part: part[1, 2], observation)
        assert_close(tokenizer.encode(one), latent[1, 2])
        for got, want in pairs(tokenizer.decode(latent[1, 2]), map_parts(lambda part: part[1, 2], decoded)):
            assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_order_of_an_observations_parts_has_no_effect():
    tokenizer = make(SPACES["dict"]).eval()
    observation = seen(SPACES["dict"], 3)
    turned = dict(reversed(observation.items()))
    assert torch.equal(tokenizer.encode(observation), tokenizer.encode(turned))
    z = draw_one_hot(torch.rand(3, K, C))
    assert torch.equal(
        tokenizer.reconstruction_error(z, None, observation), tokenizer.reconstruction_error(z, None, turned)
    )
    assert list(tokenizer.decode(z)) == list(SPACES["dict"])


def test_every_part_is_encoded():
    tokenizer = make(SPACES["dict"]).eval()
    observation, other = seen(SPACES["dict"], 3), seen(SPACES["dict"], 3, seed=2)
    latent = tokenizer.encode(observation)
    for name in SPACES["dict"]:
        assert (tokenizer.encode(observation | {name: other[name]}) - latent).abs().max() > 1e-5, name


@pytest.mark.parametrize("output", ["sigmoid", "centered"])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_losses_of_parts_are_their_definitions(output, share):
    space = SPACES["dict"]
    tokenizer = make(space, output=output, object_share=share).eval()
    observation, z = seen(space, 3), draw_one_hot(torch.rand(3, K, C))
    losses = tokenizer.reconstruction_losses(z, None, observation)
    shown = tokenizer.reconstruct(z)
    plain = {}
    for name in ("camera", "depth"):
        error = (shown[name] - observation[name].permute(0, 3, 1, 2) / 255).square().sum(1)
        plain[name] = error.sum((1, 2))
        weights = object_weights(observation[name], share) if share else 1
        assert_close(losses[name], (weights * error).sum((1, 2)), rtol=1e-4, atol=0)
    touch, logits = tokenizer.vector_decoder(z.flatten(1))
    plain["b.touch"] = (touch - observation["b.touch"].sign() * observation["b.touch"].abs().log1p()).square().sum(1)
    plain["a"] = F.cross_entropy(logits, observation["a"][:, 0], reduction="none")
    for name in ("b.touch", "a"):
        assert_close(losses[name], plain[name])
    assert_close(shown["b.touch"], touch.sign() * touch.abs().expm1())
    assert torch.equal(shown["a"][:, 0], logits.argmax(-1))
    assert_close(tokenizer.reconstruction_error(z, None, observation), sum(plain.values()), rtol=1e-4, atol=0)


def test_the_loss_is_the_sum_over_parts_and_each_is_logged():
    tokenizer = make(SPACES["dict"])
    loss, metrics = tokenizer.loss(seen(SPACES["dict"], 4))
    assert_close(metrics["reconstruction"], loss.detach())
    of_parts = {name: value for name, value in metrics.items() if name.startswith("reconstruction.")}
    assert of_parts.keys() == {f"reconstruction.{name}" for name in SPACES["dict"]}
    assert_close(sum(of_parts.values()), loss.detach())
    _, alone = make(SPACES["vector"]).loss(seen(SPACES["vector"], 4))
    assert alone.keys() == {"reconstruction", "posterior_entropy"}


@ALL
def test_every_parameter_learns(name):
    tokenizer = make(SPACES[name])
    loss, _ = tokenizer.loss(seen(SPACES[name], 4))
    loss.backward()
    assert all(parameter.grad is not None for parameter in tokenizer.parameters())
    assert tokenizer.posterior_head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("frames_at_once", [1, 3])
def test_parts_of_a_batch_are_encoded_and_decoded_as_the_whole(frames_at_once):
    tokenizer, observation = make(SPACES["dict"]), seen(SPACES["dict"], 5)
    z, found = draw_one_hot(torch.rand(5, K, C)), []
    for at_once in (0, frames_at_once):
        features = tokenizer.embed(observation, at_once)
        losses = tokenizer.reconstruction_losses(z, None, observation, at_once)
        tokenizer.zero_grad()
        (features.sum() + sum(losses.values()).sum()).backward()
        found.append(
            [features, *losses.values(), *(each.grad for each in tokenizer.parameters() if each.grad is not None)]
        )
    for whole, parted in zip(*found, strict=True):
        assert_close(parted, whole, rtol=1e-4, atol=1e-5 * float(whole.detach().abs().max()))


def test_the_names_of_an_images_weights_do_not_depend_on_other_parts():
    alone = make(Image(16, 8)).state_dict()
    among = make(SPACES["dict"]).state_dict()
    of_image = {name for name in alone if name.startswith(("encoder.", "decoder."))}
    assert of_image and of_image <= among.keys()
    assert {name.split(".")[0] for name in among} == {
        *("encoder", "encoder_1", "vector_encoder", "posterior_head", "decoder", "decoder_1", "vector_decoder"),
    }
    assert alone["encoder.0.weight"].shape == among["encoder.0.weight"].shape


@ALL
def test_features_are_counted_without_a_tokenizer(name):
    tokenizer = make(SPACES[name])
    assert tokenizer.settings.features(SPACES[name]) == tokenizer.features
    assert tokenizer.embed(seen(SPACES[name], 2)).shape == (2, tokenizer.features)
    assert tokenizer.settings.build(SPACES[name]).observation_space == SPACES[name]


def test_pooled_networks_take_any_images():
    space = {"camera": Image(16, 8, 1), "body": Vector(3)}
    torch.manual_seed(0)
    settings = CategoricalTokenizerSettings(
        categoricals=K,
        classes=C,
        channels=(8, 12),
        strides=(2, 2),
        kernel=5,
        norm="rms",
        network="pooled",
        decoder_blocks=2,
        decoder_width=10,
        mlp_width=9,
    )
    tokenizer = CategoricalTokenizer(settings, space, past=14)
    observation, past = seen(space, 3), torch.randn(3, 14)
    latent = tokenizer.encode(observation)
    assert all(got.shape == want.shape for got, want in pairs(tokenizer.decode(latent, past), observation))
    losses = tokenizer.reconstruction_losses(latent, past, observation)
    assert losses.keys() == {"camera", "body"} and all(loss.shape == (3,) for loss in losses.values())
    moved = tokenizer.reconstruction_losses(latent, past + 1, observation)
    assert all((losses[name] != moved[name]).all() for name in losses)


def test_strides_that_do_not_divide_a_side_are_one_line():
    with pytest.raises(UsageError, match="frames of 12x18 pixels cannot be shrunk by tokenizer.strides"):
        make({"camera": Image(12, 18, 3)})


# -- measures ---------------------------------------------------------------------------------------------------------


def test_measures_of_each_part():
    tokenizer = make(SPACES["dict"]).eval()
    usage = tokenizer.usage(seen(SPACES["dict"], 20))
    assert usage.keys() == {
        *("relative_error.b.touch", "object_recall.camera", "l1.camera", "accuracy.a"),
        *("object_recall.depth", "l1.depth", "posterior_entropy"),
    }
    assert make(SPACES["vector"]).eval().usage(seen(SPACES["vector"], 20)).keys() == {
        "relative_error",
        "posterior_entropy",
    }


def test_the_error_of_vectors_is_in_standard_deviations():
    vector = torch.tensor([[1.0, 10.0, 0.1], [3.0, 30.0, 0.1]])  # deviations 1, 10 and none
    assert relative_error(vector, vector) == 0
    assert relative_error(vector, vector + torch.tensor([0.5, 1.0, 9.0])) == pytest.approx((0.5 + 0.1) / 2)
    assert relative_error(vector[:, 2:], vector[:, 2:] + 1) == 0
    normal = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 1.0, 300.0])
    assert relative_error(normal, torch.zeros_like(normal)) == pytest.approx(0.8, abs=0.01)


def test_all_parts_are_learned():
    """A dot's place on an image, as a number and as a category: after training each is reconstructed."""
    space = {"camera": Image(8, 8, 1), "place": Vector(2), "side": Categories((2,))}
    tokenizer = make(space, mlp_width=32)
    place = torch.arange(16)
    y, x = place // 4, place % 4
    image = torch.zeros(16, 8, 8, 1, dtype=torch.uint8)
    for i in range(16):
        image[i, 2 * y[i] : 2 * y[i] + 2, 2 * x[i] : 2 * x[i] + 2] = 255
    observation = {"camera": image, "place": torch.stack((y, 10 * x), -1).float(), "side": (x > 1).long()[:, None]}
    before = tokenizer.eval().usage(observation)
    optimizer = torch.optim.AdamW(tokenizer.train().parameters(), lr=3e-3)
    for _ in range(300):
        loss, _ = tokenizer.loss(observation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = tokenizer.eval().usage(observation)
    assert before["relative_error.place"] > 0.5 > 0.2 > after["relative_error.place"]
    assert after["l1.camera"] < 0.05 < before["l1.camera"] and after["accuracy.side"] == 1


def test_spaces_of_an_environment_build_it():
    spaces = Spaces.of({"size": 8, "actions": 3, "observation": {"body": {"kind": "vector", "size": 3}}})
    tokenizer = CategoricalTokenizerSettings().build(spaces.observation)
    assert tokenizer.decode(tokenizer.encode({"body": torch.randn(2, 3)}))["body"].shape == (2, 3)
