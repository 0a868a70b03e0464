"""Calls of every kernel at the shapes that the papers' presets launch them with.

The compile tests and the table of compiled kernels make them on torch's device `meta`, without memory; the tests of
results on a GPU, or with few rows and short sequences in Triton's interpreter.

B batch, T time, H heads, K and V widths of keys and values, C channels, S state numbers, N blocks, E trees, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wmcli.kernels import s4
from wmcli.kernels.attention import attention
from wmcli.kernels.causal_conv import causal_conv, causal_conv_fork, causal_conv_step
from wmcli.kernels.diagonal_scan import diagonal_scan, diagonal_scan_step
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.kernels.linear_recurrence import linear_recurrence, linear_recurrence_fork, linear_recurrence_step
from wmcli.kernels.nearest import nearest
from wmcli.kernels.selective_scan import selective_scan, selective_scan_fork, selective_scan_step
from wmcli.kernels.tree_search import SearchRule, backup, plant, select
from wmcli.kernels.tree_search_gumbel import gumbel_rule
from wmcli.kernels.tree_search_lightzero import lightzero_rule
from wmcli.kernels.tree_search_mctx import mctx_rule


class Case(NamedTuple):
    """One call. The same call with float64 operands runs in torch and is the expected result."""

    kernel: str
    """The module of the kernel."""
    name: str
    """Preset and use."""
    operands: tuple[Tensor, ...]
    call: Callable[..., Any]
    backward: bool = True
    """Whether it is differentiated with respect to all operands."""
    tolerance: float = 1e-5
    """Of float32 results: norm of the difference over norm of the expected result."""
    exact: bool = True
    """Whether float64 operands give the expected result. Rounding may turn the choices of a search."""


class Make:
    """Makes random operands on a device; `small` ones have one row and few elements, heads and channels."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, small: bool = False) -> None:
        self.device, self.dtype, self.small = torch.device(device), dtype, small

    def rows(self, count: int) -> int:
        return 1 if self.small else count

    def time(self, length: int) -> int:
        return min(length, 10) if self.small else length

    def heads(self, count: int) -> int:
        return 2 if self.small else count

    def channels(self, count: int) -> int:
        return min(count, 20) if self.small else count

    def low(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal numbers in the dtype of the run's matrix products."""
        return self.wide(*shape, scale=scale).to(self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal numbers in float32."""
        return scale * torch.randn(shape, device=self.device)

    def resets(self, rows: int, length: int) -> Tensor:
        """Reset the first element and a few others."""
        reset = torch.rand(rows, length, device=self.device) < 0.05
        reset[:, 0] = True
        return reset


def cases(make: Make) -> Iterator[Case]:
    """Yield all calls."""
    yield from _recurrences(make)
    yield from _convolutions(make)
    yield from _scans(make)
    yield from _attentions(make)
    yield from _state_spaces(make)
    yield from _others(make)


def _recurrences(make: Make) -> Iterator[Case]:
    case = partial(Case, "linear_recurrence")
    heads, blocks = make.heads(4), 2 if make.small else 10
    decays = torch.tensor([1 - 1 / 32, 1 - 1 / 80, 1 - 1 / 200, 1 - 1 / 512][:heads], device=make.device).log()

    def retention(rows: int, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """q and k are parts of one copy, v of the layer's product (B, T, 4 D)."""
        length = torch.Size(shape).numel()
        q, k = make.low(2, make.rows(rows), heads, *shape, 64, scale=64**-0.25).unbind()
        v = make.low(make.rows(rows), length, 4, heads, 64)[:, :, 2].transpose(1, 2)
        return q, k, v.unflatten(2, shape)

    def fork(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> Any:
        return linear_recurrence_fork(q, k, v, decays.to(torch.promote_types(q.dtype, torch.float32)), block, state)

    def chunks(q: Tensor, k: Tensor, v: Tensor) -> Any:
        decay = decays.to(torch.promote_types(q.dtype, torch.float32))
        return linear_recurrence(q, k, v, decay, None, None, 128)

    def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Any:
        return linear_recurrence_step(*(x[:, :, 0] for x in (q, k, v)), decays.to(state.dtype), state)

    block = make.time(65)
    yield case("rem, dynamics", retention(64, blocks, 2 * block - 1), fork)
    state = make.wide(make.rows(128), heads, 64, 64)
    yield case("rem, imagined frame", (*retention(128, 1, 2 * block - 1), state), fork)
    yield case("rem-no-pop, dynamics", retention(64, make.time(650)), chunks)
    yield case("rem-no-pop, step", (*retention(128, 1), state), step, backward=False)

    def duality(rows: int, length: int, keys: int) -> tuple[Tensor, ...]:
        """c and b are parts of the convolution's result (B, T, C); values have heads behind time."""
        rows, length = make.rows(rows), make.time(length)
        mixed = make.low(rows, length, 1024 + 2 * keys)
        c, b = (mixed[:, None, :, first : first + keys] for first in (1024, 1024 + keys))
        v = make.low(rows, length, many, 64, scale=0.1).movedim(-2, 1)
        return c, b, v, -make.wide(rows, length, many, scale=0.1).abs().movedim(-1, 1)

    many, reset = make.heads(16), make.resets(make.rows(16), make.time(128))
    for preset, keys in (("drama", 16), ("drama-s", 32)):
        yield case(f"{preset}, dynamics", duality(16, 128, keys), partial(_recur, reset=reset))
        state = make.wide(make.rows(1024), many, keys, 64)
        yield case(
            f"{preset}, imagined step",
            (*duality(1024, 1, keys), state),
            lambda *x: linear_recurrence_step(*(each[:, :, 0] for each in x[:4]), x[4]),
            backward=False,
        )


def _recur(c: Tensor, b: Tensor, v: Tensor, log_decay: Tensor, reset: Tensor) -> Any:
    return linear_recurrence(c, b, v, log_decay, None, reset, 64)


def _convolutions(make: Make) -> Iterator[Case]:
    case = partial(Case, "causal_conv")
    rows, length = make.rows(16), make.time(128)
    reset = make.resets(rows, length)
    for preset, channels, product in (("drama", 1056, 2096), ("drama-mamba1", 1024, 2048)):
        first = 1024 if preset == "drama" else 0
        channels = make.channels(channels)
        taps, bias = make.wide(channels, 4, scale=0.5), make.wide(channels)

        def part(x: Tensor, first: int = first, channels: int = channels) -> Tensor:
            return x[..., first : first + channels]

        yield case(
            f"{preset}, dynamics",
            (make.low(rows, length, product), taps, bias),
            lambda x, taps, bias, part=part: causal_conv(part(x), taps, bias, None, reset),
        )
        state = make.wide(make.rows(1024), channels, 3)
        yield case(
            f"{preset}, imagined step",
            (make.low(make.rows(1024), product), taps, bias, state),
            lambda x, taps, bias, state, part=part: causal_conv_step(part(x), taps, bias, state),
            backward=False,
        )
    block, blocks, channels = make.time(65), 2 if make.small else 10, make.channels(544)
    taps, bias = make.wide(channels, 4, scale=0.5), make.wide(channels)
    yield case(
        "rem with mamba2, dynamics",
        (make.low(make.rows(64), blocks, 2 * block - 1, channels), taps, bias),
        lambda *x: causal_conv_fork(*x, block),
    )


def _scans(make: Make) -> Iterator[Case]:
    case = partial(Case, "selective_scan")
    rows, length = make.rows(16), make.time(128)
    reset = make.resets(rows, length)
    channels = make.channels(1024)
    rates = -torch.arange(1.0, 17, device=make.device).repeat(channels, 1)

    def operands(rows: int, *shape: int) -> tuple[Tensor, ...]:
        b, c = make.low(rows, *shape, 64)[..., 32:].split(16, -1)  # parts of the product that also gives step sizes
        return make.low(rows, *shape, channels), make.wide(rows, *shape, channels, scale=0.01).abs(), rates, b, c

    yield case("drama-mamba1, dynamics", operands(rows, length), lambda *x: selective_scan(*x, None, reset))
    many = make.rows(1024)
    yield case(
        "drama-mamba1, imagined step",
        (*operands(many), make.wide(many, channels, 16)),
        selective_scan_step,
        backward=False,
    )
    block = make.time(65)
    yield case(
        "rem with mamba1, dynamics",
        operands(make.rows(16), 2 if make.small else 10, 2 * block - 1),
        lambda *x: selective_scan_fork(*x, block),
    )


def _attentions(make: Make) -> Iterator[Case]:
    case = partial(Case, "attention", tolerance=1e-4)

    def operands(rows: int, heads: int, queries: int, places: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries are parts of the layer's product (B, T, 3 D), keys and values parts of it, or of a cache."""
        rows, heads = make.rows(rows), make.heads(heads)
        queries, places = make.time(queries), make.time(places)
        qkv = make.low(rows, queries, 3, heads, width).permute(0, 2, 3, 1, 4)
        if queries == places:
            return qkv[:, 0], qkv[:, 1], qkv[:, 2]
        cache = make.low(rows, 2, heads, places, width)
        return qkv[:, 0], cache[:, 0], cache[:, 1]

    def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias)

    yield case("iris, whole sequence", operands(64, 4, 340, 340, 64), attention)
    yield case("iris, imagined token", operands(64, 4, 1, 340, 64), attention, backward=False)
    yield case("storm, imagined step", operands(1024, 8, 1, 24, 64), attention, backward=False)
    reset = make.resets(make.rows(16), make.time(64))
    segment = operands(16, 8, 64, 64, 64)
    yield case("storm, segment with resets", segment, lambda q, k, v: attention(q, k, v, None, reset))
    yield case("unizero, whole sequence", operands(64, 8, 20, 20, 96), attention)
    yield case("unizero, window of a search", operands(32, 8, 8, 8, 96), attention, backward=False)
    bias = make.wide(make.heads(8), 20)
    yield case("unizero-gaussian, whole sequence", (*operands(64, 8, 20, 20, 96), bias), with_bias)


def _state_spaces(make: Make) -> Iterator[Case]:
    for preset, layers, channels, length in (("s4wm-2d", 4, 256, 250), ("s4wm-3d", 8, 512, 1001)):
        channels = make.channels(channels)
        nodes, systems = make.time(length) // 2 + 1, 3 if make.small else layers * channels
        half = torch.arange(nodes, dtype=torch.float64, device=make.device) * (torch.pi / make.time(length))
        cos, sin = half.cos(), half.sin()
        w = torch.complex(-make.wide(systems, 32).abs() - 0.1, make.wide(systems, 32, scale=3.0))

        def sums(weights: Tensor, real: Tensor, size: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            return torch.view_as_real(s4.cauchy(weights, real, size, cos.to(real.dtype), sin.to(real.dtype)))

        operands = make.wide(systems, 8, 32), w.real.contiguous(), w.abs().square()
        yield Case("s4", f"{preset}, kernel", operands, sums, tolerance=1e-4)
        yield Case(
            "s4",
            f"{preset}, imagined step",
            (
                torch.view_as_real(torch.polar(make.wide(channels, 32).tanh().abs(), make.wide(channels, 32))),
                *(make.wide(channels, 64, scale=0.1) for _ in range(4)),
                make.low(make.rows(8), channels),
                make.wide(make.rows(8), channels, 64),
            ),
            _s4_step,
            backward=False,
        )
    length = make.time(1001)
    width = make.channels(128)
    a = make.wide(width, 2)
    a = 0.999 * a / a.norm(dim=1, keepdim=True)
    rows = make.rows(8)
    reset = make.resets(rows, length)
    yield Case(
        "diagonal_scan",
        "s5wm, dynamics",
        (a, make.wide(rows, length, width, 2), make.wide(rows, width, 2)),
        lambda a, b, state: diagonal_scan(a, b, state, reset),
        tolerance=1e-4,
    )
    yield Case(
        "diagonal_scan",
        "s5wm, imagined step",
        (a, make.wide(rows, width, 2), make.wide(rows, width, 2)),
        lambda a, b, state: diagonal_scan_step(a, b, state),
        backward=False,
    )


def _s4_step(diagonal: Tensor, column: Tensor, row: Tensor, into: Tensor, output: Tensor, u: Tensor, x: Tensor) -> Any:
    return s4.run_step(s4.Step(torch.view_as_complex(diagonal), column, row, into, output), u, x)


def _others(make: Make) -> Iterator[Case]:
    for preset, vectors, width in (("rem", 128 * 64, 256), ("iris", 256 * 16, 512)):
        yield Case(
            "nearest",
            f"{preset}, tokenizer",
            (make.wide(make.rows(vectors), width), make.wide(make.channels(512), width)),
            _distances,
            backward=False,
        )
    for preset, rows, steps, own in (("drama", 1024, 16, "own"), ("rem", 128, 8, "next"), ("iris", 64, 19, "next")):
        rows = make.rows(rows)
        ended = torch.rand(rows, steps + 1, device=make.device) < 0.05
        yield Case(
            "lambda_returns",
            f"{preset}, returns",
            (make.wide(rows, steps + 1), make.wide(rows, steps + 1)),
            lambda reward, value, ended=ended, own=own: lambda_returns(reward, value, ended, 0.985, 0.95, own),
        )
    for preset, rule in (("unizero", mctx_rule()), ("unizero-reference", lightzero_rule()), ("gumbel", gumbel_rule())):
        trees, actions, simulations = make.rows(32), 6, make.time(50)
        operands = tuple(make.wide(simulations + 1, trees, *rest) for rest in ((actions,), (), ()))
        yield Case(
            "tree_search",
            f"{preset}, search",
            operands,
            partial(_search, rule=rule),
            backward=False,
            exact=False,
        )


def _distances(h: Tensor, codebook: Tensor) -> Tensor:
    """Equally near codes are equally right."""
    return (h - codebook[nearest(h, codebook)]).square().sum(1)


def _search(logits: Tensor, value: Tensor, reward: Tensor, rule: SearchRule) -> tuple[Tensor, Tensor]:
    simulations = len(logits) - 1
    tree = plant(rule, simulations, 0.99, logits[0], value[0])
    never = torch.zeros_like(reward[0], dtype=torch.bool)
    for s in range(simulations):
        selection = select(tree, rule, s)
        backup(tree, rule, s, selection, reward[s + 1], never, logits[s + 1], value[s + 1])
    return tree.nodes.clone(), tree.edges.clone()
