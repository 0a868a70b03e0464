"""The nearest code: both forms against brute force in float64.

Axes: M vectors, N codes, C channels.
"""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from wmcli.kernels import nearest as module
from wmcli.kernels.dispatch import using
from wmcli.kernels.nearest import nearest, reference


@pytest.fixture(params=["torch", "triton"])
def form(request):
    with using(request.param):
        yield request.param


def operands(vectors: int, codes: int, width: int, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(vectors, width).to(DEVICE, dtype), torch.randn(codes, width).to(DEVICE, dtype)


def check(h, codebook) -> None:
    """No code is nearer than the one found, but for float32 rounding."""
    got = nearest(h, codebook)
    assert got.shape == h.shape[:1] and got.dtype == torch.int64
    distances = (h.double()[:, None] - codebook.double()).square().sum(2)
    chosen = distances.gather(1, got[:, None]).squeeze(1)
    assert_close(chosen, distances.amin(1), rtol=1e-6, atol=1e-6)
    clear = distances.sort(1).values[:, :2].diff(dim=1).squeeze(1) > 1e-4 if len(codebook) > 1 else got == 0
    assert clear.float().mean() > 0.9 and torch.equal(got[clear], reference(h, codebook)[clear])


@pytest.mark.parametrize(
    ("vectors", "codes", "width"), [(1, 1, 1), (7, 5, 3), (130, 70, 33), (64, 300, 64), (65, 64, 7)]
)
def test_no_code_is_nearer(vectors, codes, width):
    check(*operands(vectors, codes, width))


def test_vectors_and_codes_in_parts(form, monkeypatch):
    """More vectors than are compared at once on a CPU; fewer programs than parts of the codebook."""
    monkeypatch.setattr(module, "CACHED", 1000)
    monkeypatch.setattr(module, "PROGRAMS", 6)
    check(*operands(130, 200, 5))  # CPU: 26 parts; Triton: 3 tiles of vectors, 2 shares of the codes
    check(*operands(3, 2000, 5))  # CPU: one vector at a time


@pytest.mark.parametrize("programs", [1, 128])
def test_the_first_of_equals(form, monkeypatch, programs):
    """Also when equal codes are compared by different programs. Whole numbers: nothing is rounded."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    h, codebook = (operand.mul(4).round() for operand in operands(40, 50, 6))
    want = reference(h, codebook)
    assert torch.equal(nearest(h, codebook.repeat(5, 1)), want)
    assert not nearest(h, codebook[:1].expand(130, -1)).any()


def test_codes_close_together(form):
    """Distances much smaller than the vectors themselves."""
    _, codebook = operands(1, 60, 8)
    codebook = 1 + 1e-2 * codebook
    assert nearest(codebook, codebook).tolist() == list(range(60))


def test_operands_as_they_come(form):
    """No vectors at all; strides; bfloat16, whose products are float32 also under autocast; no gradient."""
    h, codebook = operands(70, 70, 40)
    want = nearest(h, codebook)
    assert nearest(h[:0], codebook).shape == (0,)
    assert torch.equal(nearest(h.T.contiguous().T, codebook.repeat(1, 2)[:, :40]), want)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(nearest(h, codebook.requires_grad_()), want)
    low, codebook = h.bfloat16(), codebook.detach()
    assert torch.equal(nearest(low, codebook), nearest(low.float(), codebook))


class _NoMatrix(TorchDispatchMode):
    """No tensor of more than that many numbers is made."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.numel() <= self.most, func
        return out


def test_the_distances_never_exist_as_a_whole(form, monkeypatch):
    if form == "torch" and DEVICE.type != "cpu":
        pytest.skip("in torch a GPU computes them at once")
    monkeypatch.setattr(module, "CACHED", 4000)
    h, codebook = operands(200, 100, 4)
    with _NoMatrix(4000):
        nearest(h, codebook)
