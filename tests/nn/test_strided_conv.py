"""Strided convolutions: sizes, counts by arithmetic, mirror, memory layout."""

from __future__ import annotations

import pytest
import torch
from draws import assert_fan_average, assert_torchs_default
from torch import nn

from wmcli.errors import UsageError
from wmcli.nn.mlp import ChannelRMSNorm
from wmcli.nn.strided_conv import (
    ConvStack,
    PatchConv2d,
    PatchTransposedConv2d,
    StridedDecoder,
    StridedEncoder,
    TransposedConv2d,
)

DRAMA = ConvStack((16, 32, 48, 64, 64), (1, 2, 2, 2, 2), 5, True, "batch", "silu")
STORM = ConvStack((32, 64, 128, 256), (2, 2, 2, 2), 4, False, "batch", "relu")


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_drama_has_the_papers_numbers():
    encoder, decoder = StridedEncoder(DRAMA), StridedDecoder(1024, DRAMA, 64)
    assert count(encoder) == 232_272
    assert count(decoder) == 1_281_811
    assert DRAMA.features(64) == 1024
    wide = DRAMA._replace(channels=(32, 64, 96, 128, 128))
    assert count(StridedEncoder(wide)) == 925_344
    assert count(StridedDecoder(1024, wide, 64)) == 3_024_419


def test_storm_flattens_to_4096():
    assert STORM.features(64) == 4096
    assert StridedEncoder(STORM)(torch.rand(2, 3, 64, 64)).shape == (2, 4096)


@pytest.mark.parametrize(
    "stack",
    [
        DRAMA,
        STORM,
        ConvStack((8, 12), (4, 2), 4, True, "rms", "relu"),
        ConvStack((8,), (8,), 8, False, "layer", "silu"),
    ],
)
@pytest.mark.parametrize("size", [32, 64])
def test_the_decoder_ends_at_the_size_the_encoder_began_with(stack, size):
    encoder, decoder = StridedEncoder(stack), StridedDecoder(10, stack, size)
    assert encoder(torch.rand(2, 3, size, size)).shape == (2, stack.features(size))
    assert decoder(torch.rand(2, 10)).shape == (2, 3, size, size)


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride", "padding", "missing", "bias", "size"),
    [
        (5, 3, 5, 1, 2, 0, True, (6, 4)),
        (5, 3, 3, 1, 1, 0, False, (4, 2)),
        (5, 3, 3, 1, 0, 0, True, (4, 2)),
        (5, 3, 4, 1, 1, 0, True, (4, 2)),
        (5, 3, 5, 1, 2, 0, True, (5, 4)),
        (4, 7, 3, 1, 1, 0, True, (4, 4)),
        (4, 7, 5, 2, 2, 1, True, (3, 4)),
        (4, 3, 4, 2, 1, 0, False, (4, 3)),
    ],
)
def test_transposed_convolutions_are_torchs(inputs, outputs, kernel, stride, padding, missing, bias, size):
    torch.manual_seed(0)
    ours = TransposedConv2d(inputs, outputs, kernel, stride, padding, missing, bias=bias).double()
    x = torch.randn(2, inputs, *size, dtype=torch.float64, requires_grad=True)
    arguments = [x, *ours.parameters()]
    theirs = torch.nn.functional.conv_transpose2d(x, ours.weight, ours.bias, stride, padding, missing)
    torch.testing.assert_close(ours(x), theirs, rtol=0, atol=1e-12)
    gradient = torch.randn_like(theirs)
    want = torch.autograd.grad(theirs, arguments, gradient)
    torch.testing.assert_close(torch.autograd.grad(ours(x), arguments, gradient), want, rtol=0, atol=1e-12)
    ours.requires_grad_(False)
    assert ours(x.detach()).grad_fn is None


def test_transposed_convolutions_follow_autocast():
    layer, x = TransposedConv2d(8, 3, 5, 1, 2), torch.randn(2, 8, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0, atol=0.05)
    y.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_the_last_convolution_has_a_bias_and_neither_norm_nor_activation():
    last = StridedDecoder(10, STORM, 64).layers[-1]
    assert isinstance(last, torch.nn.ConvTranspose2d) and last.bias is not None


@pytest.mark.parametrize(("kind", "check"), [("fan-average", assert_fan_average), ("torch", assert_torchs_default)])
def test_first_weights(kind, check):
    torch.manual_seed(0)
    stack = STORM._replace(initialization=kind)
    encoder, decoder = StridedEncoder(stack), StridedDecoder(1024, stack, 64)
    drawn = [layer for layer in (*encoder.modules(), *decoder.modules()) if hasattr(layer, "in_channels")]
    for layer in (*drawn, decoder.linear):
        check(layer)
    assert len(drawn) == 8


def test_weights_and_outputs_are_channels_last():
    encoder = StridedEncoder(STORM)
    x = torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    inside = torch.nn.Sequential(*list(encoder)[:6])(x)
    assert inside.is_contiguous(memory_format=torch.channels_last)


def test_the_order_of_the_flattened_features_is_channels_rows_columns():
    encoder = StridedEncoder(STORM).eval()
    x = torch.rand(2, 3, 64, 64)
    inside = torch.nn.Sequential(*list(encoder)[:-1])(x)
    assert torch.equal(encoder(x), inside.contiguous().flatten(1))


def test_rms_norm_is_over_the_channels_of_a_pixel():
    x = torch.randn(2, 5, 3, 4)
    want = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(ChannelRMSNorm(5, 1e-6)(x), want)


def test_a_size_that_cannot_be_shrunk_is_one_line():
    with pytest.raises(UsageError, match="frames of 40x40 pixels cannot be shrunk by tokenizer.strides"):
        StridedEncoder(STORM), StridedDecoder(10, STORM, 40)


def test_kernels_as_large_as_their_stride_look_at_patches_and_at_nothing_else():
    """Each pixel belongs to one patch, on the way in and on the way out."""
    stack = ConvStack((6, 7), (4, 2), 4, True, "rms", "silu")
    encoder, decoder = StridedEncoder(stack), StridedDecoder(10, stack, 16)
    image = torch.rand(1, 3, 16, 16, requires_grad=True)
    encoder[0](image)[0, :, 1, 2].sum().backward()
    seen = image.grad.abs().sum((0, 1)) > 0
    want = torch.zeros(16, 16, dtype=torch.bool)
    want[4:8, 8:12] = True
    assert torch.equal(seen, want)
    last = decoder.layers[-1]
    x = torch.zeros(1, 6, 4, 4)
    x[0, :, 3, 3] = 1
    shown = (last(x) - last(torch.zeros_like(x))).abs().sum((0, 1)) > 0
    assert shown[12:, 12:].all() and shown.sum() == 16


@pytest.mark.parametrize("kernel", [2, 3, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_patches_are_torchs(kernel, bias):
    """Values and gradients, there and back."""
    shapes = ((2, 3, 2 * kernel, 3 * kernel), (2, 5, 2, 3))
    for ours, theirs, shape in (
        (PatchConv2d(3, 5, kernel, kernel, bias=bias), nn.Conv2d(3, 5, kernel, kernel, bias=bias), shapes[0]),
        (
            PatchTransposedConv2d(5, 3, kernel, kernel, bias=bias),
            nn.ConvTranspose2d(5, 3, kernel, kernel, bias=bias),
            shapes[1],
        ),
    ):
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        found, want = ours.double()(x), theirs.double()(x)
        torch.testing.assert_close(found, want)
        grad = torch.randn_like(want)
        ours_all, theirs_all = (
            torch.autograd.grad(out, [x, *layer.parameters()], grad) for out, layer in ((found, ours), (want, theirs))
        )
        for one, other in zip(ours_all, theirs_all, strict=True):
            torch.testing.assert_close(one, other)


def test_layer_norm_is_over_the_channels_of_a_pixel_with_its_own_eps():
    stack = ConvStack((6,), (2,), 4, False, "layer", "silu", 1e-3)
    norm = StridedEncoder(stack)[1]
    x = torch.randn(2, 6, 3, 5)
    want = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), want)
