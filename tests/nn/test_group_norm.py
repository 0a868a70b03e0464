"""GroupNorm equals torch's in float64, with its gradients; channels last; the same whatever the chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wmcli.nn import group_norm
from wmcli.nn.group_norm import GroupNorm


def normed(norm: nn.GroupNorm, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of x, weight and bias."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, norm.weight, norm.bias], dy)]


def like(norm: nn.GroupNorm, dtype: torch.dtype) -> nn.GroupNorm:
    """torch's norm with the same weight and bias."""
    theirs = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps).to(dtype)
    theirs.load_state_dict(norm.state_dict())  # the names are torch's
    return theirs


def make(groups: int, channels: int, dtype: torch.dtype, eps: float = 1e-6) -> GroupNorm:
    norm = GroupNorm(groups, channels, eps).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "channels-first"])
@pytest.mark.parametrize("chunk", [1, 300, 1 << 19])  # a frame each; two frames, then one; all
@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        (4, (3, 12, 3, 4)),
        (1, (3, 12, 4, 3)),
        (12, (3, 12, 5, 2)),
        (2, (2, 6, 1, 1)),
        (1, (1, 1, 7, 3)),
        (4, (0, 8, 3, 3)),
    ],
)
def test_equals_torch_in_float64(
    groups: int, shape: tuple[int, ...], chunk: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_norm, "CHUNK", chunk)
    torch.manual_seed(0)
    norm = make(groups, shape[1], torch.float64, eps=0.1)  # large, so that it counts where it stands
    x, dy = 2 * torch.randn(shape, dtype=torch.float64) + 3, torch.randn(shape, dtype=torch.float64)
    layout = torch.channels_last if last else torch.contiguous_format
    ours = normed(norm, x.contiguous(memory_format=layout), dy.contiguous(memory_format=layout))
    for a, b in zip(ours, normed(like(norm, torch.float64), x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (norm(x), ours[0]))


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((2, 6, 3, 2), (6,), (6,)))
    norm = GroupNorm(2, 6, eps=0.1)

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, x)

    assert torch.autograd.gradcheck(normalize, (x, weight, bias))


def test_bfloat16_is_the_exact_result_rounded_once() -> None:
    torch.manual_seed(0)
    norm = make(8, 32, torch.float32)
    x, dy = ((torch.randn(3, 32, 9, 7) + 5).bfloat16() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        ours = normed(norm, x, dy)
    exact = normed(like(norm, torch.float64), x.double(), dy.double())
    assert [each.dtype for each in ours] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-4)
    for a, b in zip(ours[2:], exact[2:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-2)


def test_a_mean_far_above_the_deviation_costs_no_digits_of_the_variance() -> None:
    torch.manual_seed(0)
    norm = make(2, 8, torch.float32)
    x = (torch.randn(2, 8, 16, 16) + 1000).contiguous(memory_format=torch.channels_last)
    exact = F.group_norm(x.double(), 2, norm.weight.double(), norm.bias.double(), norm.eps)
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-3, atol=1e-3)
