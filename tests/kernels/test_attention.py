"""Attention: both forms against the definition, and priors as tables of biases against values worked out by hand.

Axes: B batch, H heads, T queries, S places, K width of a head, R distances of the table of biases.
"""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICE
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.kernels import tiles
from wmcli.kernels.attention import attention, masked_attention, reference
from wmcli.kernels.dispatch import using

pytestmark = pytest.mark.matrix

B, H = 2, 2

BOTH = pytest.mark.parametrize("implementation", ["torch", "triton"])


def operands(queries: int, places: int, width: int, reach: int | None, with_reset: bool, dtype=torch.float32):
    """q, k, v, bias in float32 numbers, and reset; on the device."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, length, width) for length in (queries, places, places))
    bias = None if reach is None else torch.randn(H, reach)
    reset = None
    if with_reset:
        reset = torch.zeros(B, places, dtype=torch.bool, device=DEVICE)
        reset[0, [at for at in (0, 2, places // 2, places // 2 + 1) if at < places]] = True
        reset[1, -1] = True
    return *(None if x is None else x.to(DEVICE, dtype) for x in (q, k, v, bias)), reset


def with_gradients(form, q, k, v, bias, reset):
    """The output, and the gradients of all floating-point operands that there are."""
    operands = [x.detach().requires_grad_() for x in (q, k, v, bias) if x is not None]
    y = form(*operands[:3], operands[3] if len(operands) == 4 else None, reset)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view_as(y)
    return y, *torch.autograd.grad((weights * y).sum(), operands)


SHAPES = [  # T, S, K, R
    (1, 1, 1, None),
    (1, 9, 5, 4),
    (3, 7, 16, None),
    (7, 7, 6, 20),
    (20, 20, 8, 1),
    (5, 50, 12, 9),
    (40, 40, 5, 2),
    (40, 40, 5, None),
    (40, 75, 4, 75),
    (35, 75, 4, 20),
    (17, 17, 100, 12),
]


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
def test_equals_the_definition(implementation, shape, with_reset):
    """Output and all gradients: tiles of queries and places that are cut off, windows, tables longer than the past."""
    dtype = torch.float64 if implementation == "torch" else torch.float32
    arguments = operands(*shape, with_reset, dtype)
    want = with_gradients(reference, *(x if x is None or x.dtype == torch.bool else x.double() for x in arguments))
    with using(implementation):
        got = with_gradients(attention, *arguments)
    tolerance = 1e-11 if implementation == "torch" else 2e-5
    assert all(x.dtype == dtype for x in got)
    assert_close([x.double() for x in got], list(want), rtol=tolerance, atol=tolerance)


@BOTH
def test_a_distance_may_be_hidden(implementation):
    """-inf in a table; also at the start of what is read, where a query has seen nothing yet."""
    q, k, v, bias, reset = operands(40, 75, 4, 60, True)
    bias[0, 30:], bias[1, 3] = float("-inf"), float("-inf")
    want = with_gradients(reference, *(x.double() for x in (q, k, v, bias)), reset)
    with using(implementation):
        got = with_gradients(attention, q, k, v, bias, reset)
    assert_close([x.double() for x in got], list(want), rtol=2e-5, atol=2e-5)
    assert not got[4][bias.isinf()].any()


@BOTH
def test_operands_need_not_be_contiguous(implementation):
    """As a transformer's layers give them: parts of one product, keys and values part of a longer cache."""
    torch.manual_seed(0)
    q = torch.randn(B, 6, 3, H, 8, device=DEVICE).permute(0, 2, 3, 1, 4)[:, 0]
    k, v = torch.randn(2, B, H, 8, 20, device=DEVICE).mT[..., :11, :].unbind(0)
    copies = [x.double() for x in (q, k, v)]
    with using(implementation):
        got = with_gradients(attention, q, k, v, None, None)
    assert_close([x.double() for x in got], list(with_gradients(reference, *copies, None, None)), rtol=1e-5, atol=1e-5)


@BOTH
def test_scores_of_any_size(implementation):
    q, k, v, bias, reset = operands(20, 20, 8, 12, False)
    with using(implementation):
        got = with_gradients(attention, 1e2 * q, k, v, 50 * bias, reset)
    want = with_gradients(reference, *(x.double() for x in (1e2 * q, k, v, 50 * bias)), reset)
    assert all(x.isfinite().all() for x in got)
    assert_close(got[0].double(), want[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("implementation", "tile"), [("torch", 0), ("triton", 0), ("triton", 1)])
def test_bfloat16_operands(implementation, tile):
    """Results in bfloat16, and as near as those of float32 operands with the same numbers once rounded."""
    arguments = operands(40, 90, 16, 30, True, torch.bfloat16)
    want = with_gradients(reference, *(x.double() for x in arguments[:4]), arguments[4])
    with using(implementation), tiles.using(tile):
        got = with_gradients(attention, *arguments)
    assert {x.dtype for x in got} == {torch.bfloat16}
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).abs().max() < 2e-2 * y.abs().max()


@BOTH
def test_only_requested_inputs_get_a_gradient(implementation):
    *floats, reset = operands(20, 30, 4, 12, True)
    with using(implementation):
        assert not attention(*floats, reset).requires_grad
        want = with_gradients(attention, *floats, reset)[1:]
        for at in range(len(floats)):
            alone = [y.detach() for y in floats]
            alone[at].requires_grad_()
            y = attention(*alone, reset)
            y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y))
            assert [z.grad is None for z in alone] == [z is not alone[at] for z in alone]
            assert_close(alone[at].grad, want[at])


def test_the_gradient_of_the_bias_is_the_same_every_time():
    arguments = operands(50, 50, 4, 40, False)
    with using("triton"):
        first, again = (with_gradients(attention, *arguments)[4] for _ in range(2))
    assert torch.equal(first, again)


def test_gradients_equal_finite_differences():
    *floats, reset = operands(4, 6, 3, 4, True, torch.float64)
    arguments = [x.requires_grad_() for x in floats]
    assert torch.autograd.gradcheck(lambda *o: attention(*o, reset), arguments, fast_mode=True)
    assert torch.autograd.gradcheck(attention, arguments[:3], fast_mode=True)
    assert torch.autograd.gradcheck(reference, arguments[:3], fast_mode=True)


# -- attention priors: with no content and the places themselves as values, the output is the weights ------------------


def weights(implementation: str, bias: torch.Tensor, places: int, score=None):
    """The weights (S, S) of one head; `score` (S, S) is what the content gives."""
    k = torch.eye(places, device=DEVICE)[None, None]
    q = torch.zeros_like(k) if score is None else score.to(DEVICE)[None, None] * places**0.5
    with using(implementation):
        return attention(q, k, k, bias.to(DEVICE)[None])[0, 0]


def gaussian(distances: int, mu, sigma) -> torch.Tensor:
    return -((torch.arange(distances) - mu) ** 2) / (2 * sigma**2)


ROWS = [[1, 0, 0, 0], [0.62246, 0.37754, 0, 0], [0.27407, 0.45186, 0.27407, 0], [0.05763, 0.25827, 0.42582, 0.25827]]
CONTENT = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [1, -1, 0.5, 0], [2, 0, -2, 1]])


@BOTH
def test_golden_priors(implementation):
    def check(got, want) -> None:
        assert_close(got.cpu(), torch.tensor(want, dtype=torch.float32), rtol=0, atol=1e-5)

    check(weights(implementation, gaussian(4, 1, 1), 4), ROWS)
    check(weights(implementation, gaussian(4, 2, 0.5), 4)[3], [0.10648, 0.78678, 0.10648, 0.00026])
    check(weights(implementation, gaussian(4, 1, 1), 4, CONTENT)[3], [0.29493, 0.17889, 0.03991, 0.48626])
    check(weights(implementation, torch.zeros(3), 4)[3], [0, 1 / 3, 1 / 3, 1 / 3])  # a span of 2
    check(weights(implementation, gaussian(3, 1, 1), 4)[3], [0, 0.27407, 0.45186, 0.27407])
    ramp = torch.tensor([1, 1, 2 / 3, 1 / 3, 0, 0]).log()
    check(weights(implementation, ramp, 4)[3], [0.11111, 0.22222, 0.33333, 0.33333])


@BOTH
def test_golden_gradients_of_a_prior(implementation):
    """The mean distance that the last of four places attends to, and how it changes with the prior's numbers."""
    mu, sigma = (torch.tensor(1.0, requires_grad=True) for _ in range(2))
    mean = (weights(implementation, gaussian(4, mu, sigma), 4)[3].cpu() * torch.arange(3, -1, -1)).sum()
    got = torch.stack((mean, *torch.autograd.grad(mean, (mu, sigma))))
    assert_close(got, torch.tensor([1.115258, 0.733780, 0.374926]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["none", "seen", "added"])
@pytest.mark.parametrize("queries", [1, 3])
def test_masked_attention_is_torchs(kind, queries):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64, requires_grad=True) for n in (queries, 7, 7))
    mask = None
    if kind == "seen":
        mask = torch.rand(2, 1, queries, 7) < 0.6
        mask[..., 0] = True
    if kind == "added":
        mask = torch.randn(1, 3, queries, 7, dtype=torch.float64)
    got, want = masked_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    weight = torch.randn_like(want)
    assert_close(got, want)
    gradients = (torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, want))
    assert_close(*gradients)
    low = [x.detach().bfloat16() for x in (q, k, v)]
    rough = masked_attention(*low, mask if mask is None or mask.dtype == torch.bool else mask.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert_close(rough.double(), want.detach(), atol=0.03, rtol=0.03)
