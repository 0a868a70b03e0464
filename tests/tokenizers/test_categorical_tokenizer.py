"""The categorical tokenizer: shapes, the exact values of what it does, and that it keeps small objects."""

from __future__ import annotations

import pytest
import torch
from draws import assert_fan_average, assert_torchs_default
from torch import nn
from torch.testing import assert_close

from wmcli.config import validate
from wmcli.errors import UsageError
from wmcli.nn.categorical import draw_one_hot
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.tokenizers.measures import object_weights

K, C, SIZE = 6, 5, 16


def make(**changes) -> CategoricalTokenizer:
    torch.manual_seed(0)
    values = {"categoricals": K, "classes": C, "channels": (8, 12), "strides": (2, 2), "kernel": 4} | changes
    return CategoricalTokenizer(CategoricalTokenizerSettings(**values), SIZE)


def frames(*lead: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (*lead, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("kind", ["fan-average", "torch"])
@pytest.mark.parametrize("hidden", [0, 1])
def test_first_weights(kind, hidden):
    """A posterior without hidden layers is torch's in both, as in Drama and STORM."""
    tokenizer = make(initialization=kind, posterior_layers=hidden, channels=(32, 64), categoricals=32)
    for name, layer in tokenizer.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            torchs = kind == "torch" or name == "posterior_head"
            (assert_torchs_default if torchs else assert_fan_average)(layer)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_any_leading_axes(lead):
    tokenizer = make().eval()
    latent = tokenizer.encode(frames(*lead))
    assert latent.shape == (*lead, K, C) and latent.dtype == torch.float32
    assert_close(latent.sum(-1), torch.ones(*lead, K))
    decoded = tokenizer.decode(latent)
    assert decoded.shape == (*lead, SIZE, SIZE, 3) and decoded.dtype == torch.uint8
    if lead == (2, 3):
        assert_close(tokenizer.encode(frames(2, 3)[1, 2]), latent[1, 2])
        assert torch.equal(tokenizer.decode(latent[1, 2]), decoded[1, 2])


def test_the_latent_is_the_unimixed_posterior():
    tokenizer = make(unimix=0.2).eval()
    features = tokenizer.encoder(frames(3).permute(0, 3, 1, 2).float() / 255)
    logits = tokenizer.posterior_head(features).view(3, K, C)
    assert_close(tokenizer.encode(frames(3)), 0.8 * logits.softmax(-1) + 0.2 / C)


@pytest.mark.parametrize("output", ["sigmoid", "linear"])
def test_decoding_takes_the_likeliest_classes(output):
    tokenizer = make(output=output).eval()
    latent = torch.rand(4, K, C)
    likeliest = torch.nn.functional.one_hot(latent.argmax(-1), C).float()
    raw = tokenizer.decoder(likeliest.flatten(1))
    image = raw.sigmoid() if output == "sigmoid" else raw
    want = (image * 255).round().clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8)
    assert torch.equal(tokenizer.decode(latent), want)


@pytest.mark.parametrize("output", ["sigmoid", "linear", "centered"])
def test_the_reconstruction_error_is_summed_over_a_frame(output):
    tokenizer = make(output=output).eval()
    z = draw_one_hot(torch.rand(2, K, C))
    image = tokenizer.reconstruct(z)
    want = [(image[i] - frames(2)[i].permute(2, 0, 1) / 255).square().sum() for i in range(2)]
    assert_close(tokenizer.reconstruction_error(z, None, frames(2)), torch.stack(want))


@pytest.mark.parametrize("output", ["sigmoid", "linear", "centered"])
def test_the_loss_weighs_object_pixels(output):
    tokenizer = make(output=output, object_share=0.4).eval()
    observation = torch.full((6, SIZE, SIZE, 3), 90, dtype=torch.uint8)
    for frame in range(5):
        observation[frame, frame : frame + 3, frame : frame + 2] = 250
    z = draw_one_hot(torch.rand(6, K, C))
    error = (tokenizer.reconstruct(z) - observation.permute(0, 3, 1, 2) / 255).square().sum(1)
    want = (object_weights(observation, 0.4) * error).sum((1, 2))
    assert_close(tokenizer.reconstruction_losses(z, None, observation), {"": want})
    plain = make(output=output).eval()
    assert_close(
        plain.reconstruction_losses(z, None, observation)[""],
        plain.reconstruction_error(z, None, observation),
        rtol=0,
        atol=0,
    )


def test_every_parameter_learns():
    tokenizer = make()
    loss, metrics = tokenizer.loss(frames(4))
    loss.backward()
    assert_close(metrics["reconstruction"], loss.detach())
    assert all(parameter.grad is not None for parameter in tokenizer.parameters())
    assert tokenizer.posterior_head.weight.grad.abs().max() > 0  # through the draw


def test_distributions_are_float32_under_autocast():
    tokenizer = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert tokenizer.encode(frames(2)).dtype == torch.float32
        assert tokenizer.loss(frames(2))[0].dtype == torch.float32
        assert tokenizer.reconstruct(draw_one_hot(torch.rand(2, K, C))).dtype == torch.float32


def test_a_tiny_object_survives_where_objects_have_a_share():
    """One pixel of 256 that is a little brighter, in places by chance; the same training without a share loses it."""
    recall = {}
    for share in (0.0, 0.5):
        torch.manual_seed(0)
        tokenizer = make(object_share=share)
        optimizer = torch.optim.AdamW(tokenizer.parameters(), lr=3e-3)
        observation = torch.full((16, SIZE, SIZE, 3), 90, dtype=torch.uint8)
        for place in range(16):
            observation[place, 5 * place % SIZE, place] = 150
        for _ in range(150):
            loss, _ = tokenizer.loss(observation)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        recall[share] = tokenizer.eval().usage(observation)["object_recall"]
    assert recall[0.0] < 0.3 < 0.8 < recall[0.5]


def test_a_small_object_survives():
    """One bright cell of 4 x 4 pixels somewhere on a dark board."""
    tokenizer = make()
    optimizer = torch.optim.AdamW(tokenizer.parameters(), lr=3e-3)
    board = torch.zeros(16, SIZE, SIZE, 3, dtype=torch.uint8)
    for place in range(16):
        y, x = 4 * (place // 4), 4 * (place % 4)
        board[place, y : y + 4, x : x + 4] = 220
    before = tokenizer.eval().usage(board)
    tokenizer.train()
    for _ in range(200):
        loss, _ = tokenizer.loss(board)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = tokenizer.eval().usage(board)
    assert before["l1"] > 0.2 and after["l1"] < 0.06 and after["object_recall"] > 0.95
    assert after["posterior_entropy"] < before["posterior_entropy"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"channels": [8], "strides": [2, 2]}, ["channels [8]", "strides [2, 2]"]),
        ({"kernel": 4}, ["kernel = 4", "odd"]),
        ({"classes": 1}, ["classes = 1"]),
    ],
)
def test_settings_that_cannot_be_are_one_line(values, words):
    with pytest.raises(UsageError) as caught:
        validate(CategoricalTokenizerSettings, values, "here")
    assert all(word in str(caught.value) for word in words), str(caught.value)
