"""DreamerV3's image networks: numbers of its public code, and what they refuse.

danijar/dreamerv3, commit e3f0224, in float32, for weights and inputs that formulas make.
"""

from __future__ import annotations

import pytest
import torch
from formulas import filled, numbers
from torch import nn
from torch.testing import assert_close

from wmcli.errors import UsageError
from wmcli.nn.pooled_conv import PooledDecoder, PooledEncoder
from wmcli.nn.strided_conv import ConvStack

STACK = ConvStack((4, 6), (2, 2), 5, True, "rms", "silu", 1e-4, "fan-in")
FIRST = [0.5426483154296875, 0.8601502776145935, 0.35085514187812805, 0.5801318883895874, 0.2528246343135834]
OF_DECODER = {
    "layers.1.bias": 11.660574913024902,
    "layers.1.weight": 49.84664535522461,
    "layers.2.weight": 12.817347526550293,
    "layers.5.bias": 8.400245666503906,
    "layers.5.weight": 36.98707962036133,
    "of_past.bias": 7.568252086639404,
    "of_past.weight": 8.843350410461426,
    "of_latent.0.bias": 4.676108360290527,
    "of_latent.0.weight": 5.684072494506836,
    "of_latent.1.weight": 3.7328732013702393,
    "of_latent.3.bias": 7.568251609802246,
    "of_latent.3.weight": 6.911346435546875,
    "first.0.weight": 8.008108139038086,
}
OF_ENCODER = {
    "0.bias": 4.9325714111328125,
    "0.weight": 29.280963897705078,
    "2.weight": 4.570141792297363,
    "4.bias": 7.152729034423828,
    "4.weight": 46.09432601928711,
    "6.weight": 5.322566986083984,
}


def norms(model: nn.Module) -> dict[str, float]:
    return {name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None}


def test_numbers_of_the_public_code():
    frames = ((numbers(2, 16, 16, 3, phase=1) + 1) * 127).to(torch.uint8).permute(0, 3, 1, 2).double() / 255
    encoder = filled(PooledEncoder(STACK)).double()
    features = encoder(frames)
    assert_close(features[0, :5], torch.tensor(FIRST, dtype=torch.float64), rtol=1e-5, atol=0)
    total = (features * numbers(2, 96, phase=4)).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(-5.6028971672058105, rel=1e-5)
    assert norms(encoder) == pytest.approx(OF_ENCODER, rel=1e-5)

    decoder = filled(PooledDecoder(6, 12, STACK, 16, blocks=2, width=8)).double()
    image = decoder(torch.cat((numbers(2, 6, phase=2), numbers(2, 12, phase=3)), 1)).sigmoid()
    errors = (image - frames).square().sum((1, 2, 3))
    assert_close(errors.tolist(), [80.08365631103516, 73.26313018798828], rtol=1e-5, atol=0)
    errors.mean().backward()
    assert norms(decoder) == pytest.approx(OF_DECODER, rel=1e-5)


def test_parameters_of_the_twelve_million():
    stack = STACK._replace(channels=(32, 48, 64, 64), strides=(2, 2, 2, 2))
    with torch.device("meta"):
        networks = PooledEncoder(stack), PooledDecoder(32 * 16, 2048, stack, 64, blocks=8, width=512)
    assert [sum(each.numel() for each in network.parameters()) for network in networks] == [220_416, 1_272_003]


def test_what_they_refuse():
    with pytest.raises(UsageError, match="tokenizer.kernel = 4 is even"):
        PooledEncoder(STACK._replace(kernel=4))
    with pytest.raises(UsageError, match="tokenizer.norm = batch"):
        PooledEncoder(STACK._replace(norm="batch"))
    with pytest.raises(UsageError, match="set dynamics.decoder_reads=state"):
        PooledDecoder(6, 0, STACK, 16, blocks=2, width=8)
    with pytest.raises(UsageError, match=r"tokenizer.decoder_blocks = 4 must divide backbone.width = 12 and .* = 6"):
        PooledDecoder(6, 12, STACK, 16, blocks=4, width=8)
