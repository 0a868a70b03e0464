"""The convolutional encoders and decoders: shapes, and that attention stands where it is said to."""

from __future__ import annotations

import pytest
import torch

from wmcli.errors import UsageError
from wmcli.nn.patch_conv import PatchDecoder, PatchEncoder
from wmcli.nn.residual_conv import Attention, ResidualDecoder, ResidualEncoder
from wmcli.nn.slim_conv import SlimDecoder, SlimEncoder


def test_slim_networks_undo_each_others_shapes() -> None:
    x = torch.randn(2, 3, 24, 40)  # B, C, H, W
    h = SlimEncoder(8, 2, 32)(x)
    assert h.shape == (2, 32, 6, 10)
    assert SlimDecoder(8, 2, 32)(h[:, :, :4]).shape == (2, 3, 16, 40)


def test_residual_networks_undo_each_others_shapes() -> None:
    x = torch.randn(2, 3, 24, 40)
    h = ResidualEncoder(32, 3, 7, 24)(x)
    assert h.shape == (2, 7, 3, 5)
    assert ResidualDecoder(32, 3, 7, 24)(h).shape == x.shape


@pytest.mark.parametrize("colors", [1, 4])
@torch.no_grad()
def test_images_may_be_wide_and_have_other_colors(colors: int) -> None:
    x = torch.randn(2, colors, 16, 32)
    for encoder, decoder in (
        (SlimEncoder(8, 2, 32, colors), SlimDecoder(8, 2, 32, colors)),
        (ResidualEncoder(32, 2, 7, 16, colors), ResidualDecoder(32, 2, 7, 16, colors)),
        (PatchEncoder(16, 4, (4, 8), 12, colors), PatchDecoder(16, 4, (4, 8), 12, colors)),
    ):
        h = encoder(x)
        assert h.shape[2:] == (4, 8)
        assert decoder(h).shape == x.shape


@torch.no_grad()
def test_patch_networks_keep_patches_apart_and_know_their_places() -> None:
    torch.manual_seed(0)
    encoder, decoder = PatchEncoder(16, 8, (3, 3), 12), PatchDecoder(16, 8, (3, 3), 12)
    x = torch.randn(1, 3, 24, 24)
    h = encoder(x)
    image = decoder(h)
    assert h.shape == (1, 12, 3, 3)
    assert image.shape == x.shape

    x[:, :, 8:16, 16:] += 1  # the patch in row 1, column 2
    moved = encoder(x)
    assert ((moved - h).abs().amax((0, 1)) > 1e-6).nonzero().tolist() == [[1, 2]]
    changed = (decoder(moved) - image).abs().amax((0, 1)) > 1e-6
    assert changed[8:16, 16:].any()
    changed[8:16, 16:] = False
    assert not changed.any()

    encoder.place[:, 0, 1] = 1.0
    decoder.place[:, 2, 0] = 1.0
    assert (encoder(torch.zeros_like(x))[0].std((1, 2)) > 1e-3).all()
    assert not torch.allclose(decoder(torch.zeros_like(h))[..., 16:, :8], decoder(torch.zeros_like(h))[..., :8, :8])


@pytest.mark.parametrize(("height", "downsamples", "encoder", "decoder"), [(64, 4, 5, 7), (16, 1, 5, 7), (24, 3, 1, 1)])
def test_attention_stands_at_heights_16_and_8_and_in_the_middle(
    height: int, downsamples: int, encoder: int, decoder: int
) -> None:
    nets = ResidualEncoder(32, downsamples, 4, height), ResidualDecoder(32, downsamples, 4, height)
    assert [sum(isinstance(part, Attention) for part in net.modules()) for net in nets] == [encoder, decoder]


def test_encoder_pads_at_the_bottom_and_right_only() -> None:
    torch.manual_seed(0)
    shrink = SlimEncoder(8, 1, 16).blocks[0]
    x = torch.randn(1, 8, 6, 6)
    moved = x.clone()
    moved[:, :, 0, 0] += 1  # with padding at the top left this pixel would lie in two windows of stride 2
    with torch.no_grad():
        weight = torch.zeros_like(shrink.shrink.weight)
        weight[:, :, 0, 0] = 1  # each output is the top left pixel of its window
        shrink.shrink.weight.copy_(weight)
        shrink.conv = torch.nn.Identity()
        shrink.norm = torch.nn.Identity()
        changed = (shrink(moved) - shrink(x)).abs().amax((0, 1)) > 1e-6
    assert changed.nonzero().tolist() == [[0, 0]]


def test_channels_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.channels gives a layer of 12 channels.*multiples of 8"):
        SlimEncoder(12, 2, 32)
    with pytest.raises(UsageError, match=r"tokenizer\.width gives a layer of 12 channels"):
        SlimDecoder(8, 2, 24)
    with pytest.raises(UsageError, match=r"tokenizer\.channels = 48.*multiple of 32"):
        ResidualEncoder(48, 2, 16, 16)
