"""Quantizers: nearest by brute force, straight-through gradients, round trips, restarts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wmcli.tokenizers.quantizers import (
    AverageVectorQuantizer,
    Quantizer,
    ScalarQuantizer,
    VectorQuantizer,
    straight_through,
)


def make(name: str, codes: int = 15, width: int = 6) -> Quantizer:
    torch.manual_seed(0)
    if name == "vq":
        return VectorQuantizer(codes, width, 0.25)
    if name == "vq-ema":
        return AverageVectorQuantizer(codes, width, 0.25, 0.9, 0.1)
    return ScalarQuantizer((3, 5), width)


NAMES = ("vq", "vq-ema", "fsq")


@pytest.mark.parametrize("name", ["vq", "vq-ema"])
def test_token_is_the_nearest_code(name: str) -> None:
    quantizer = make(name)
    h = torch.randn(40, 6) / 15
    codebook = quantizer.vectors().detach()
    want = [min(range(15), key=lambda code: float((row - codebook[code]).square().sum())) for row in h]
    assert quantizer.tokens(h).tolist() == want
    assert len(set(want)) > 5


@pytest.mark.parametrize("name", ["vq", "vq-ema"])
def test_nearest_resolves_codes_that_are_close_together_far_from_the_origin(name: str) -> None:
    quantizer = make(name)
    with torch.no_grad():
        quantizer.codebook.mul_(0.01)
    h = quantizer.vectors().detach() + 0
    assert quantizer.tokens(h).tolist() == list(range(15))
    with torch.autocast("cpu", torch.bfloat16):
        assert quantizer.tokens(h).tolist() == list(range(15))


def test_straight_through_is_exact_forward_and_identity_backward() -> None:
    torch.manual_seed(0)
    h = torch.randn(4, 3, requires_grad=True)
    value = torch.randn(4, 3) * 1e-3
    out = straight_through(value, h)
    assert torch.equal(out, value)
    upstream = torch.randn(4, 3)
    out.backward(upstream)
    assert h.grad is not None and torch.equal(h.grad, upstream)


@pytest.mark.parametrize("name", NAMES)
def test_forward_gives_the_rows_that_its_tokens_name(name: str) -> None:
    quantizer = make(name).eval()
    h = torch.randn(33, quantizer.inputs)
    out = quantizer(h)
    assert torch.equal(out.tokens, quantizer.tokens(h))
    torch.testing.assert_close(out.vectors, quantizer.vectors()[out.tokens])


@pytest.mark.parametrize("name", NAMES)
def test_gradient_reaches_the_features(name: str) -> None:
    quantizer = make(name)
    h = torch.randn(33, quantizer.inputs, requires_grad=True)
    upstream = torch.randn(33, 6)
    (quantizer(h).vectors * upstream).sum().backward()
    assert h.grad is not None
    if name == "fsq":  # through the projection and tanh, as if nothing had been rounded
        assert isinstance(quantizer, ScalarQuantizer)
        smooth = h.detach().requires_grad_()
        (quantizer.project(torch.tanh(smooth)) * upstream).sum().backward()
        torch.testing.assert_close(h.grad, smooth.grad)
    else:
        assert torch.equal(h.grad, upstream)


def test_losses_of_the_learned_codebook_pull_each_side_to_the_other() -> None:
    quantizer = make("vq")
    h = torch.randn(20, 6, requires_grad=True)
    losses = quantizer(h).losses
    error = float((h - quantizer.vectors()[quantizer.tokens(h)]).detach().square().mean())
    assert losses["codebook"].item() == pytest.approx(error)
    assert losses["commitment"].item() == pytest.approx(0.25 * error)
    losses["codebook"].backward()
    assert h.grad is None
    quantizer.zero_grad()
    quantizer(h).losses["commitment"].backward()
    assert h.grad is not None and all(parameter.grad is None for parameter in quantizer.parameters())


@pytest.mark.parametrize("levels", [(4, 4, 4), (3, 5, 2, 7), (8,)])
def test_fsq_tokens_and_combinations_are_each_others_inverse(levels: tuple[int, ...]) -> None:
    quantizer = ScalarQuantizer(levels, 9)
    code = quantizer.combinations()
    assert code.shape == (math.prod(levels), len(levels))
    assert len({tuple(row) for row in code.tolist()}) == math.prod(levels)
    tokens = torch.arange(math.prod(levels))
    assert torch.equal(quantizer.tokens(torch.atanh(code * 0.999)), tokens)
    vectors = quantizer(torch.atanh(code * 0.999)).vectors
    torch.testing.assert_close(vectors, quantizer.vectors())


def test_fsq_levels_are_evenly_spaced_and_first_channel_runs_fastest() -> None:
    code = ScalarQuantizer((3, 2), 4).combinations()
    assert code.tolist() == [[-1, -1], [0, -1], [1, -1], [-1, 1], [0, 1], [1, 1]]
    extreme = torch.tensor([[-90.0, 90.0], [90.0, 90.0], [90.0, -90.0]])
    assert ScalarQuantizer((3, 2), 4).tokens(extreme).tolist() == [3, 5, 2]


def test_fsq_spread_measures_centre_and_width_of_each_channel() -> None:
    h = torch.tensor([[1.0, -2.0], [1.0, 2.0], [1.0, -2.0], [1.0, 2.0]])
    losses = ScalarQuantizer((4, 4), 3, spread=0.5)(h).losses
    assert float(losses["spread"]) == pytest.approx(
        0.5 * ((1 + 1) + (0 + 1)) / 2
    )  # channel 0 flat at 1; channel 1 twice as wide
    assert not ScalarQuantizer((4, 4), 3)(h).losses


def test_fsq_spread_pulls_saturated_features_back() -> None:
    torch.manual_seed(0)
    h = (torch.randn(50, 2) * 0.1 + 6).requires_grad_()
    quantizer = ScalarQuantizer((4, 4), 3, spread=1.0)
    assert len(quantizer.tokens(h).unique()) == 1
    optimizer = torch.optim.Adam([h], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        quantizer(h).losses["spread"].backward()
        optimizer.step()
    assert len(quantizer.tokens(h).unique()) > 4


# -- moving averages --------------------------------------------------------------------------------------------------


def clusters(count: int, rows: int) -> Tensor:
    """`count` tight groups of vectors, the first of which holds nine tenths of all rows."""
    centre = torch.eye(6).repeat(2, 1)[:count] * torch.arange(1, count + 1)[:, None]
    member = torch.where(torch.rand(rows) < 0.9, 0, torch.randint(count, (rows,)))
    return centre[member] + 0.01 * torch.randn(rows, 6)


def test_restarts_bring_dead_codes_to_rare_clusters() -> None:
    torch.manual_seed(0)
    quantizer = AverageVectorQuantizer(24, 6, 1.0, 0.9, 0.03)
    with torch.no_grad():  # all codes but one far away, so that nothing ever uses them
        quantizer.codebook[1:] = 1000.0
        quantizer.uses[0] = 100
    h = clusters(8, 500)
    assert len(quantizer.tokens(h).unique()) == 1
    for _ in range(60):
        quantizer(clusters(8, 500))
    assert len(quantizer.tokens(h).unique()) >= 8
    assert (h - quantizer.vectors()[quantizer.tokens(h)]).norm(dim=1).max() < 0.5


def test_no_restarts_when_switched_off() -> None:
    torch.manual_seed(0)
    quantizer = AverageVectorQuantizer(24, 6, 1.0, 0.9, 0.0)
    with torch.no_grad():
        quantizer.codebook[1:] = 1000.0
        quantizer.uses.fill_(100.0)
        quantizer.sums.copy_(quantizer.codebook * 100)
    for _ in range(20):
        quantizer(clusters(8, 500))
    assert len(quantizer.tokens(clusters(8, 500)).unique()) == 1


def test_average_is_that_of_the_vectors_that_use_the_code() -> None:
    torch.manual_seed(0)
    quantizer = AverageVectorQuantizer(2, 6, 1.0, 0.5, 0.01)
    with torch.no_grad():
        quantizer.codebook.copy_(torch.tensor([[1.0] * 6, [-1.0] * 6]))
        quantizer.uses.fill_(4.0)
        quantizer.sums.copy_(quantizer.codebook * 4)
    h = torch.cat([torch.full((3, 6), 2.0), torch.full((5, 6), -0.5)])
    quantizer(h)
    # uses: 0.5 * 4 + 0.5 * 3 = 3.5, sum: 0.5 * 4 + 0.5 * 6 = 5; and 4.5 with -0.5 * 4 - 0.5 * 2.5 = -3.25
    torch.testing.assert_close(quantizer.vectors()[:, 0], torch.tensor([5 / 3.5, -3.25 / 4.5]))


def test_updates_stop_outside_training() -> None:
    quantizer = make("vq-ema").eval()
    before = quantizer.vectors().clone()
    quantizer(torch.randn(30, 6))
    assert torch.equal(before, quantizer.vectors())


def test_resume_from_buffers_and_generator_is_exact() -> None:
    quantizer = make("vq-ema")
    for _ in range(3):
        quantizer(torch.randn(50, 6))
    other = make("vq-ema", 15, 6)
    other.load_state_dict(quantizer.state_dict())
    h = torch.randn(4, 50, 6)
    state = torch.get_rng_state()
    for batch in h:
        quantizer(batch)
    torch.set_rng_state(state)
    for batch in h:
        other(batch)
    for name, tensor in quantizer.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
