"""All kernels at the shapes of the papers' presets on a GPU; in Triton's interpreter with one row of few elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpus import DEVICE, TILES
from paper_shapes import Case, Make, cases
from torch import Tensor
from torch.testing import assert_close
from watching import record_without_a_graph

from wmcli.kernels import tiles
from wmcli.kernels.attention import attention
from wmcli.kernels.causal_conv import causal_conv
from wmcli.kernels.dispatch import using
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.kernels.linear_recurrence import linear_recurrence
from wmcli.kernels.nearest import nearest
from wmcli.kernels.selective_scan import selective_scan
from wmcli.training.graph import WARM_UPS, RecordedFunction

pytestmark = pytest.mark.matrix

ON_GPU = DEVICE.type == "cuda"
LOW_TOLERANCE = 1e-2  # bfloat16 rounds results by 2^-9, and so do products on their way
NAMES = [f"{case.kernel}: {case.name}" for case in cases(Make("meta", torch.float32))]
TUNED = ("attention", "linear_recurrence", "selective_scan")

EVERY_CASE = pytest.mark.parametrize("name", NAMES)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def make_case(name: str, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    return next(case for case in cases(Make(DEVICE, dtype, small=not ON_GPU)) if f"{case.kernel}: {case.name}" == name)


def differentiate(case: Case, operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results, and the gradients of all operands of their sum weighted by signs, exact in any dtype."""
    operands = tuple(operand.detach().requires_grad_(case.backward) for operand in operands)
    with torch.set_grad_enabled(case.backward):
        results = case.call(*operands)
    results = [results] if isinstance(results, Tensor) else list(results)
    if not case.backward:
        return results
    weights = [torch.linspace(-9, 9, x.numel(), device=DEVICE).sin().sign().view(x.shape).to(x.dtype) for x in results]
    return [x.detach() for x in results] + list(torch.autograd.grad(results, operands, weights, materialize_grads=True))


def check(case: Case, dtype: torch.dtype) -> None:
    expected = differentiate(case, tuple(operand.double() for operand in case.operands))
    with using("triton"):
        got = differentiate(case, case.operands)
    tolerance = LOW_TOLERANCE if dtype == torch.bfloat16 else case.tolerance
    for ours, true in zip(got, expected, strict=True):
        assert float((ours.double() - true).norm()) <= tolerance * float(true.norm())


@EVERY_CASE
@BOTH
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Against the form in torch on the same operands in float64."""
    case = make_case(name, dtype)
    if case.exact:
        check(case, dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(TUNED)])
@pytest.mark.parametrize("tile", range(1, TILES))
def test_every_tile(name: str, tile: int) -> None:
    with tiles.using(tile):
        check(make_case(name, torch.bfloat16), torch.bfloat16)


@EVERY_CASE
def test_the_same_bits_twice_and_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a second call, and of a recorded graph, are those of the first call."""
    case = make_case(name, torch.bfloat16)
    if not ON_GPU:
        record_without_a_graph(monkeypatch)
    recorded = RecordedFunction(lambda: differentiate(case, case.operands))
    with using("triton"):
        first = differentiate(case, case.operands)
        for _ in range(WARM_UPS + 1):
            places = recorded()
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(places, first, strict=True))
        for place in places:
            place.fill_(torch.nan)
        assert recorded() is places
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(places, first, strict=True))


# -- strides that pass 2^31 elements -----------------------------------------------------------------------------------


def far_apart(*shape: int, axis: int, scale: float = 1.0) -> Tensor:
    """Return random bfloat16 numbers, on a GPU with one axis over more than 2^31 elements (4.3 GB)."""
    values = (scale * torch.randn(shape)).to(DEVICE, torch.bfloat16)
    if not ON_GPU:
        return values
    row = values.numel() // shape[axis]
    step = max(row, -(-(1 << 31) // (shape[axis] - 1)) + 1)
    strides = list(values.select(axis, 0).stride())
    strides.insert(axis, step)
    wide = torch.empty(step * shape[axis], device=DEVICE, dtype=torch.bfloat16)
    return wide.as_strided(shape, [min(s, row) if i != axis else s for i, s in enumerate(strides)]).copy_(values)


def _convolve(x: Tensor) -> Tensor:
    return causal_conv(x, x[0, :4].mT.float(), x[0, 0].float())[0]


def _recur(v: Tensor) -> Tensor:
    return linear_recurrence(v, v, v, torch.full((v.shape[1],), -0.1, device=DEVICE), chunk=16)[0]


def _scan(x: Tensor) -> Tensor:
    a = -torch.ones(x.shape[2], 4, device=DEVICE)
    return selective_scan(x, x.abs(), a, x[..., :4], x[..., :4])[0]


def _returns(value: Tensor) -> Tensor:
    return lambda_returns(value, value, value > 1, 0.9, 0.9)


FAR: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], int]] = {
    "causal_conv, time": (_convolve, (1, 40, 16), 1),
    "linear_recurrence, time": (_recur, (1, 2, 40, 16), 2),
    "selective_scan, time": (_scan, (1, 20, 16), 1),
    "attention, time": (lambda x: attention(x, x, x), (1, 2, 40, 16), 2),
    "lambda_returns, time": (_returns, (5, 8), 1),
    "nearest, vectors": (lambda h: nearest(h, h[:7]).float(), (40, 16), 0),
    "nearest, channels": (lambda h: nearest(h, h[:7].contiguous()).float(), (40, 16), 1),
}


@pytest.mark.parametrize("name", FAR)
def test_offsets_have_64_bits(name: str) -> None:
    call, shape, axis = FAR[name]
    torch.manual_seed(0)
    x = far_apart(*shape, axis=axis, scale=0.3)
    with using("triton"):
        got, expected = call(x), call(x.clone(memory_format=torch.contiguous_format))
    assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles are timed, and the choice is that of later calls and processes."""
    monkeypatch.setattr(tiles, "path", lambda: tmp_path / "tiles.json")
    tiles._stored.cache_clear()
    case = make_case("selective_scan: drama-mamba1, dynamics", torch.bfloat16)
    with using("triton"):
        chosen = tiles.tune(lambda: differentiate(case, case.operands))
        assert len(chosen) == 1 and tiles._stored() == chosen
    check(case, torch.bfloat16)
    tiles._stored.cache_clear()
