"""The tokenizer as a whole: published sizes, shapes, losses, learning, measures, settings that make no sense."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wmcli.config import validate
from wmcli.errors import UsageError
from wmcli.nn.lpips import weight_shapes
from wmcli.tokenizers import TokenizerSettings, VQTokenizer, perceptual_in_use

SMALL = TokenizerSettings(channels=8, downsamples=2, width=32, codes=24)
QUANTISERS = {
    "vq": SMALL,
    "vq-ema": SMALL.model_copy(update={"quantizer": "vq-ema"}),
    "fsq": SMALL.model_copy(update={"quantizer": "fsq", "fsq_levels": (4, 3, 2)}),
}


def small(name: str, image_size: int = 20) -> VQTokenizer:
    torch.manual_seed(0)
    return VQTokenizer(QUANTISERS[name], image_size)


def frames(*lead: int, size: int = 20) -> Tensor:
    """Dark frames with one bright square of 5 pixels at a random place each: uint8 (*lead, size, size, 3)."""
    flat = torch.zeros(math.prod(lead), size, size, 3, dtype=torch.uint8)
    for frame in flat:
        y, x = torch.randint(size - 4, (2,)).tolist()
        frame[y : y + 5, x : x + 5] = torch.tensor([250, 120, 40], dtype=torch.uint8)
    return flat.view(*lead, size, size, 3)


def count(*parts: nn.Module) -> int:
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "encoder", "decoder", "pair", "codebook", "total"),
    [
        ({}, 1_754_048, 1_172_963, 131_584, 131_072, 3_189_667),
        ({"downsamples": 4}, 5_884_864, 1_191_523, 131_584, 131_072, 7_339_043),
        (
            {"network": "residual", "channels": 64, "downsamples": 4, "width": 512},
            1_418_240,
            1_821_827,
            525_312,
            262_144,
            4_027_523,
        ),
    ],
    ids=["rem", "rem-4x4", "iris"],
)
def test_parameter_counts_are_the_published_ones(
    changes: dict, encoder: int, decoder: int, pair: int, codebook: int, total: int
) -> None:
    model = VQTokenizer(validate(TokenizerSettings, changes, "test"), 64)
    assert count(model.encoder) == encoder
    assert count(model.decoder) == decoder
    assert count(model.pre_quant, model.post_quant) == pair
    assert count(model.quantizer) == codebook
    assert count(model) == total


def test_rem_makes_64_tokens_of_a_frame_and_its_variant_16() -> None:
    assert VQTokenizer(TokenizerSettings(), 64).grid == (8, 8)
    model = VQTokenizer(TokenizerSettings(downsamples=4, channels=8), 64)
    assert (model.grid, model.tokens, model.codes, model.width) == ((4, 4), 16, 512, 256)


# -- encode, embed, decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 0)])
def test_leading_dimensions_are_kept(name: str, lead: tuple[int, ...]) -> None:
    model = small(name)
    tokens = model.encode(frames(*lead))
    assert tokens.shape == (*lead, 25) and tokens.dtype == torch.int64
    assert model.codebook().shape == (24, 32)
    assert model.embed(tokens).shape == (*lead, 25, 32)
    image = model.decode(tokens)
    assert image.shape == (*lead, 20, 20, 3) and image.dtype == torch.uint8


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_frame_has_the_same_tokens_alone_and_in_a_batch(name: str) -> None:
    model = small(name)
    batch = frames(2, 3)
    tokens, images = model.encode(batch), model.decode(model.encode(batch))
    for i in range(2):
        for j in range(3):
            assert torch.equal(model.encode(batch[i, j]), tokens[i, j])
            assert (model.decode(tokens[i, j]).int() - images[i, j].int()).abs().max() <= 1
    assert len(tokens.unique()) > 1


@pytest.mark.parametrize("name", QUANTISERS)
def test_encoding_and_decoding_change_nothing(name: str) -> None:
    model = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tokens = model.encode(frames(3))
    model.decode(tokens)
    model.usage(frames(3))
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval().encode(frames(3)) >= 0, tokens >= 0)
    assert not model.decode(tokens).requires_grad


def test_decoded_pixels_are_rounded_and_clamped() -> None:
    model = small("vq")
    nn.init.zeros_(model.decoder.conv_out.weight)
    with torch.no_grad():
        model.decoder.conv_out.bias.copy_(torch.tensor([-1.5, 76.7 / 127.5 - 1, 1.5]))
    assert model.decode(torch.zeros(2, 25, dtype=torch.int64)).view(-1, 3).unique(dim=0).tolist() == [[0, 77, 255]]


def test_tokens_are_row_by_row() -> None:
    model = small("vq")
    blank = torch.zeros(1, 20, 20, 3, dtype=torch.uint8)
    with torch.no_grad():
        images = model.parts[0].codes
        plain = images.inputs(torch.zeros(1, 3, 20, 20))
        lit = torch.zeros(1, 3, 20, 20)
        lit[:, :, 19, 0] = 5.0  # bottom left
        moved = (images.inputs(lit) - plain).norm(dim=1).view(5, 5)
    assert moved[4, 0] == moved.max()
    assert model.encode(blank).shape == (1, 25)
    embedding = torch.zeros(25, 32)
    embedding[4] = 50.0  # top right
    with torch.no_grad():
        change = (images.image(embedding) - images.image(torch.zeros(25, 32))).abs().sum(1)[0]
    assert change[:8, -8:].mean() > change[-8:, :8].mean()


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("vq", {"reconstruction", "codebook", "commitment"}),
        ("vq-ema", {"reconstruction", "commitment"}),
        ("fsq", {"reconstruction", "spread"}),
    ],
)
def test_loss_is_the_sum_of_its_terms(name: str, terms: set[str]) -> None:
    model = small(name).eval()
    total, losses = model.loss(frames(4))
    assert set(losses) == terms
    assert total.item() == pytest.approx(sum(float(value) for value in losses.values()))
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(value.requires_grad for value in losses.values())


@pytest.mark.parametrize(("kind", "power"), [("mse", 2), ("l1", 1)])
def test_reconstruction_is_measured_between_minus_one_and_one(kind: str, power: int) -> None:
    model = VQTokenizer(SMALL.model_copy(update={"reconstruction": kind}), 20)
    nn.init.zeros_(model.decoder.conv_out.weight)
    nn.init.constant_(model.decoder.conv_out.bias, 0.5)
    _, losses = model.loss(torch.zeros(2, 20, 20, 3, dtype=torch.uint8))
    assert float(losses["reconstruction"]) == pytest.approx(1.5**power)


def test_object_share_splits_the_pixel_loss_between_objects_and_the_whole() -> None:
    model = VQTokenizer(SMALL.model_copy(update={"object_share": 0.25}), 20)
    nn.init.zeros_(model.decoder.conv_out.weight)
    nn.init.constant_(model.decoder.conv_out.bias, -1.0)  # black everywhere
    batch = torch.zeros(5, 20, 20, 3, dtype=torch.uint8)
    batch[0, :4, :5] = 255  # 20 of 2000 pixels, and the median frame is black
    _, losses = model.loss(batch)
    assert float(losses["reconstruction"]) == pytest.approx(0.75 * 4 * 20 / 2000 + 0.25 * 4)
    _, losses = model.loss(batch[1:])
    assert float(losses["reconstruction"]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", QUANTISERS)
def test_training_reduces_the_loss(name: str) -> None:
    model = small(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    history = []
    for _ in range(30):
        optimizer.zero_grad()
        total, losses = model.loss(frames(8))
        total.backward()
        optimizer.step()
        history.append(float(losses["reconstruction"]))
    assert sum(history[-5:]) < 0.5 * sum(history[:5])


@pytest.mark.parametrize("name", QUANTISERS)
def test_two_runs_from_one_seed_end_in_the_same_weights(name: str) -> None:
    def trained() -> dict[str, Tensor]:
        model = small(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(frames(4))[0].backward()
            optimizer.step()
        return model.state_dict()

    first, second = trained(), trained()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", QUANTISERS)
def test_autocast_stays_close(name: str) -> None:
    model = small(name).eval()
    batch = frames(6)
    exact, _ = model.loss(batch)
    tokens = model.encode(batch)
    with torch.autocast("cpu", torch.bfloat16):
        close, losses = model.loss(batch)
        assert (model.encode(batch) == tokens).float().mean() > 0.8
        assert model.codebook().dtype == torch.float32
        assert (model.decode(tokens).int() - model.decode(tokens).int()).abs().max() == 0
    assert close.dtype == torch.float32 and all(value.dtype == torch.float32 for value in losses.values())
    assert close.item() == pytest.approx(exact.item(), rel=0.02)


@pytest.mark.parametrize("name", QUANTISERS)
def test_state_survives_a_safetensors_file(name: str, tmp_path: Path) -> None:
    model = small(name)
    model.loss(frames(4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = VQTokenizer(QUANTISERS[name], 20)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    batch = frames(3)
    assert torch.equal(other.encode(batch), model.encode(batch))
    assert torch.equal(other.codebook(), model.codebook())


# -- perceptual loss --------------------------------------------------------------------------------------------------


def test_perceptual_loss_is_added_and_its_weights_are_not_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = tmp_path / "w.safetensors"
    save_file({name: torch.rand(shape) * 0.02 for name, shape in weight_shapes().items()}, file)
    settings = SMALL.model_copy(update={"lpips_weights": str(file)})
    assert perceptual_in_use(settings) == "lpips"
    model = VQTokenizer(settings, 20)
    total, losses = model.loss(frames(2))
    assert float(losses["perceptual"]) > 0
    assert total.item() == pytest.approx(sum(float(value) for value in losses.values()))
    assert set(model.state_dict()) == set(small("vq").state_dict())
    assert count(model) == count(small("vq"))


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_makes_the_perceptual_loss_of_training_alone_noisy(tmp_path: Path, dropout: bool) -> None:
    """As in the public code of REM and IRIS: their trainers put the perceptual network into training mode as well."""
    torch.manual_seed(0)
    file = tmp_path / "w.safetensors"
    save_file({name: torch.rand(shape) * 0.02 for name, shape in weight_shapes().items()}, file)
    model = VQTokenizer(SMALL.model_copy(update={"lpips_weights": str(file), "lpips_dropout": dropout}), 20)
    batch = frames(2)

    def twice() -> list[float]:
        return [float(model.loss(batch)[1]["perceptual"]) for _ in range(2)]

    one, other = twice()
    assert (one != other) == dropout
    model.eval()
    assert len(set(twice())) == 1
    model.train()
    assert len({one, *twice()}) == (3 if dropout else 1)


def test_perceptual_loss_in_use() -> None:
    assert perceptual_in_use(SMALL) == "none"
    assert perceptual_in_use(SMALL.model_copy(update={"perceptual": "none", "lpips_weights": "x"})) == "none"
    with pytest.raises(UsageError, match=r"lpips_weights.*VGG16.*channel weightings.*tokenizer\.perceptual=none"):
        perceptual_in_use(SMALL.model_copy(update={"perceptual": "lpips"}))


def test_weights_that_are_gone_stop_training_but_not_encoding(tmp_path: Path) -> None:
    model = VQTokenizer(SMALL.model_copy(update={"lpips_weights": str(tmp_path / "gone")}), 20)
    assert model.encode(frames(2)).shape == (2, 25)
    with pytest.raises(UsageError, match="no file at"):
        model.loss(frames(2))


# -- measures ---------------------------------------------------------------------------------------------------------


class Scripted(VQTokenizer):
    """A tokenizer whose codes and pictures the test dictates."""

    said: Tensor
    shown: Tensor

    def encode(self, observation: Tensor) -> Tensor:
        return self.said

    def decode(self, tokens: Tensor) -> Tensor:
        return self.shown


def test_usage_counts_codes_and_objects() -> None:
    model = Scripted(SMALL, 20)
    truth = torch.zeros(5, 20, 20, 3, dtype=torch.uint8)
    truth[0, 0, :8] = 200  # 8 pixels of an object
    truth[1, 5, 5] = 20  # below a tenth of full scale: no object
    model.said = torch.tensor([[0, 1, 1, 0], [23, 23, 23, 23], [0, 0, 1, 1], [23] * 4, [23] * 4])
    model.shown = torch.zeros_like(truth)
    model.shown[0, 0, :6] = torch.tensor([200, 180, 120, 90, 30, 0], dtype=torch.uint8)[:, None]
    usage = model.usage(truth)
    assert usage["codes_used"] == 3
    assert usage["perplexity"] == pytest.approx(math.exp(-0.4 * math.log(0.2) - 0.6 * math.log(0.6)))
    assert usage["object_recall"] == pytest.approx(3 / 8)
    lost = (0 + 20 + 80 + 110 + 170 + 200 + 200 + 200 + 20) * 3 / 255
    assert usage["l1"] == pytest.approx(lost / truth.numel())


def test_usage_of_frames_without_objects() -> None:
    usage = small("fsq").usage(torch.full((3, 20, 20, 3), 77, dtype=torch.uint8))
    assert usage["object_recall"] == 1.0
    assert all(math.isfinite(value) for value in usage.values())


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "image_size", "message"),
    [
        ({}, 20, "20x20 pixels cannot be halved 3 times.*multiple of 8"),
        ({"downsamples": 6}, 32, "32x32 pixels cannot be halved 6 times"),
        ({"channels": 12}, 16, "layer of 12 channels.*multiples of 8"),
        ({"width": 100}, 16, "tokenizer.width gives a layer of 100 channels"),
        ({"network": "residual", "channels": 16}, 16, "channels = 16.*multiple of 32"),
        (
            {"quantizer": "fsq", "codes": 64},
            16,
            r"fsq_levels \[8, 8, 8\] make 512 codes, but codes = 64; set codes = 512",
        ),
        ({"fsq_levels": [4, True]}, 16, "fsq_levels"),
        ({"quantizer": "vqvae"}, 16, "quantizer = 'vqvae'"),
        ({"lpips_weights": "x"}, 8, "at least 16 pixels"),
        ({"codes": 1}, 16, "codes = 1"),
    ],
)
def test_settings_that_do_not_fit(changes: dict, image_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        VQTokenizer(validate(TokenizerSettings, changes, "test"), image_size)


def test_levels_may_come_as_a_list_as_toml_gives_them() -> None:
    settings = validate(TokenizerSettings, {"quantizer": "fsq", "fsq_levels": [4, 4, 4], "codes": 64}, "test")
    assert settings.fsq_levels == (4, 4, 4)
    assert VQTokenizer(settings, 16).pre_quant.out_channels == 3
