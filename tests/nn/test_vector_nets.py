"""MLPs of vectors and categories: DreamerV3's formulas written once more, and what is read and predicted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import assert_fan_average, assert_torchs_default
from torch import nn
from torch.testing import assert_close

from wmcli.nn.vector_nets import (
    DenseStack,
    VectorDecoder,
    VectorEncoder,
    read_vectors,
    vector_loss,
    vector_value,
)
from wmcli.spaces import Categories, Vector

SPACES = (Vector(3), Categories((2, 4)), Vector(1))
STACK = DenseStack(2, 7, "rms", "silu", 1e-4, "fan-in")
B = 5


def parts() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    categories = torch.stack([torch.randint(size, (B,), generator=generator) for size in (2, 4)], -1)
    vector = torch.randn(B, 3, generator=generator) * torch.tensor([0.1, 10.0, 1e4])
    return vector, categories, torch.randn(B, 1, generator=generator)


def by_formula(layers: nn.Sequential, x: np.ndarray) -> np.ndarray:
    """The public code's MLP: linear, RMSNorm with eps 1e-4 inside of the root, SiLU."""
    weights = [each.detach().double().numpy() for each in layers.parameters()]
    for weight, bias, scale in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        x = x @ weight.T + bias
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-4) * scale
        x = x / (1 + np.exp(-x))
    return x


def read_by_formula() -> np.ndarray:
    vector, categories, other = (part.numpy() for part in parts())
    symlog = [np.sign(each) * np.log(1 + np.abs(each)) for each in (vector.astype(float), other.astype(float))]
    return np.concatenate([symlog[0], np.eye(2)[categories[:, 0]], np.eye(4)[categories[:, 1]], symlog[1]], -1)


def scrambled(module: nn.Module) -> nn.Module:
    """With norms and biases that are not 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            if each.ndim == 1:
                each.add_(0.3 * torch.randn(each.shape, generator=generator))
    return module


def test_the_encoder_is_the_formula():
    inputs = read_vectors(SPACES, parts())
    assert inputs.shape == (B, sum(space.encoded for space in SPACES)) and inputs.dtype == torch.float32
    assert_close(inputs.double().numpy(), read_by_formula(), rtol=1e-5, atol=1e-6)
    encoder = scrambled(VectorEncoder(SPACES, STACK))
    assert_close(
        encoder(inputs).detach().double().numpy(), by_formula(encoder, read_by_formula()), rtol=1e-4, atol=1e-5
    )


def test_the_decoder_and_its_losses_are_the_formulas():
    decoder = scrambled(VectorDecoder(6, SPACES, STACK))
    x = torch.randn(B, 6, generator=torch.Generator().manual_seed(2))
    hidden = by_formula(decoder.hidden, x.double().numpy())
    outputs = [
        hidden @ head.weight.detach().double().numpy().T + head.bias.detach().double().numpy() for head in decoder.heads
    ]
    found = decoder(x)
    for got, want in zip(found, outputs, strict=True):
        assert_close(got.detach().double().numpy(), want, rtol=1e-4, atol=1e-5)

    vector, categories, _ = (part.numpy() for part in parts())
    symlog = np.sign(vector) * np.log(1 + np.abs(vector.astype(float)))
    squared = np.square(outputs[0] - symlog).sum(-1)
    log_p = [each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in (outputs[1][:, :2], outputs[1][:, 2:])]
    nats = -sum(each[np.arange(B), index] for each, index in zip(log_p, categories.T, strict=True))
    losses = [vector_loss(*each) for each in zip(SPACES, found, parts(), strict=True)]
    assert_close(losses[0].detach().double().numpy(), squared, rtol=1e-4, atol=1e-4)
    assert_close(losses[1].detach().double().numpy(), nats, rtol=1e-4, atol=1e-5)

    values = [vector_value(*each) for each in zip(SPACES, found, strict=True)]
    assert_close(
        values[0].detach().double().numpy(),
        np.sign(outputs[0]) * (np.exp(np.abs(outputs[0])) - 1),
        rtol=1e-3,
        atol=1e-4,
    )
    assert values[1].dtype == torch.int64
    assert values[1].tolist() == np.stack([each.argmax(-1) for each in log_p], -1).tolist()


def test_a_perfect_output_has_no_loss_and_is_the_part():
    vector, categories, _ = parts()
    output = vector.sign() * vector.abs().log1p()
    assert_close(vector_loss(SPACES[0], output, vector), torch.zeros(B), atol=1e-6, rtol=0)
    assert_close(vector_value(SPACES[0], output), vector, rtol=1e-4, atol=1e-6)
    logits = 1e4 * read_vectors((SPACES[1],), (categories,))
    assert_close(vector_loss(SPACES[1], logits, categories), torch.zeros(B))
    assert torch.equal(vector_value(SPACES[1], logits), categories)
    assert_close(vector_loss(SPACES[1], torch.zeros(B, 6), categories), torch.full((B,), math.log(8)))


@pytest.mark.parametrize("kind", ["fan-average", "torch"])
def test_first_weights(kind):
    torch.manual_seed(0)
    stack = DenseStack(2, 64, "layer", "silu", 0.0, kind)
    networks = VectorEncoder((Vector(40),), stack), VectorDecoder(50, (Vector(30), Categories((9, 9))), stack)
    for network in networks:
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                (assert_torchs_default if kind == "torch" else assert_fan_average)(layer)


def test_predictions_are_float32_under_autocast():
    decoder = VectorDecoder(6, SPACES, STACK)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = decoder(torch.randn(B, 6))
        losses = [vector_loss(*each) for each in zip(SPACES, outputs, parts(), strict=True)]
    assert {each.dtype for each in (*outputs, *losses)} == {torch.float32}
