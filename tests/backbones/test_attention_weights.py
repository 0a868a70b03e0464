"""Attention weights and priors as matrices: those of the real computation, with every mask, prior and kernel.

Axes: B batch, T time (elements), D width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_backbones import TINY, B, D, L, N, Q, T, close, inputs, tiny
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones.attention_weights import (
    AttentionBackbone,
    attention_weights,
    query_weights,
    watching,
    weights_of,
)
from wmcli.backbones.transformer_xl import TransformerXL, _sinusoids

PRIORS = {
    "none": {"kind": "none"},
    "local": {"kind": "local", "window": 3},
    "gaussian": {"kind": "gaussian", "mean": 2.3, "deviation": 1.7},
    "span": {"kind": "span", "span": 3.4, "span_mask": "triangle"},
    "both": {"kind": "gaussian_span", "mean": 2.3, "deviation": 1.7, "span": 3.4},
    "gaussian, scale": {"kind": "gaussian", "mean": 2.3, "deviation": 1.7, "form": "scale"},
    "span, scale": {"kind": "span", "span": 3.4, "form": "scale"},
}
BACKBONES = {name: TINY[name] for name in TINY if name.startswith("transformer") and "prior" not in TINY[name]}
STEPS = {"kind": "gaussian", "mean": 1.0, "deviation": 0.7, "unit": "step"}
LEAK = {"kind": "span", "span": 3.4, "form": "scale", "leak": True}
CASES = [(name, prior) for name in BACKBONES for prior in PRIORS.values()]
CASES += [("transformer", STEPS), ("transformer", LEAK)]
EVERY = pytest.mark.parametrize(("name", "prior"), CASES, ids=str)


@pytest.fixture
def make(monkeypatch):
    """Small models whose heads all differ."""

    def made(name: str, prior: dict) -> AttentionBackbone:
        monkeypatch.setitem(TINY, f"{name}, as a case", {**TINY[name], "prior": prior})
        return tiny(f"{name}, as a case")

    return made


@EVERY
def test_weights_times_values_are_the_outputs_and_rows_sum_to_one(make, name, prior):
    model, x = make(name, prior), inputs(B, T, D)
    seen = []
    with torch.no_grad(), watching(model, lambda *call: seen.append(call)):
        model(x, None)
    assert [index for index, _, _ in seen] == [0, 1]
    found = attention_weights(model, x)
    assert found.shape == (2, B, 2, T, T)
    for index, attend, values in seen:
        close(weights_of(attend, values) @ values, attend(values))
        close(found[index], weights_of(attend, values))
    close(found.sum(-1), torch.ones(2, B, 2, T, dtype=torch.float64))
    hidden = model.prior_matrix(T)
    hidden = hidden.isnan() | hidden.isinf()
    assert (found[hidden[:, None].expand_as(found)] == 0).all()
    assert (found[~hidden[:, None].expand_as(found)] > 0).all()
    assert hidden.triu(1).any() == ("leak" not in prior)


@EVERY
def test_the_prior_matrix_is_what_attention_applies(make, name, prior):
    """The first layer's scores, written out: with the matrix they give the recorded weights."""
    model, x = make(name, prior), inputs(B, T, D)
    layer = model.layers[0]
    with torch.no_grad():
        if isinstance(model, TransformerXL):
            q, kv, _ = layer.project(x)
            place = torch.arange(T)
            distance = (place[:, None] - place).clamp(0, model.window)
            table = _sinusoids(model.window, D, x.device, x.dtype).flip(0)[distance]  # (T, T, D)
            relative = (table @ layer.distance.weight.T).unflatten(-1, (2, -1))  # (T, T, H, K)
            u, v = (bias.unflatten(0, (2, 1, -1)) for bias in (layer.u, layer.v))
            scores = (q + u) @ kv[:, 0].mT + torch.einsum("bhqk,qshk->bhqs", q + v, relative)
        else:
            element = x if model.positions is None else x + model.positions(torch.arange(T))
            q, kv = layer.project(model.embedding_norm(element))
            k = kv[:, 0]
            if model.positions is None:
                q, k = rotated(q), rotated(k)
            scores = q @ k.mT
        scores = scores / math.sqrt(q.shape[-1])
        applied = model.prior_matrix(T)[0].double()
        hidden = applied.isnan()
        applied = applied.masked_fill(hidden, 0)
        scaled = model.prior is not None and model.prior.settings.multiplies
        scores = scores * applied if scaled else scores + applied
        want = scores.masked_fill(hidden, -math.inf).softmax(-1)
    near = 1e-6 if "rotary" in name else 1e-10  # its angles are float32
    assert_close(attention_weights(model, x)[0], want, rtol=0, atol=near)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Each pair of features turned by its angle at each position, as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


@EVERY
def test_queries_stand_in_the_places_of_what_they_predict(make, name, prior):
    if prior.get("leak"):
        pytest.skip("a leak is not defined for queries")
    model, x, queries = make(name, prior), inputs(B, N, L, D), inputs(Q, D) + 0.3
    found = query_weights(model, x, queries)
    close(found.sum(-1), torch.ones(found.shape[:-1], dtype=torch.float64))
    plain = attention_weights(model, x.flatten(1, 2))
    rows = torch.arange(N * L)
    of_queries = (rows >= L) & (rows % L < Q)
    close(found[..., ~of_queries, :], plain[..., ~of_queries, :])
    assert not torch.allclose(found[..., of_queries, :], plain[..., of_queries, :])

    layer, seen = model.layers[-1], []
    if isinstance(model, TransformerXL):  # `fork` attends in its own way: what it really answers from, by its values
        attend = layer.attend
        layer.attend = lambda *given, **how: seen.append((given, attend(*given, **how))) or seen[-1][1]
        with torch.no_grad():
            model.fork(x[:, :-1], queries, None)
        kv, y = seen[1][0][1], seen[1][1].unflatten(0, (B, N - 1))
        keys = model.window + Q
        values = kv[:, 1, :, -keys:].unflatten(0, (B, N - 1))
        for block in range(1, N):
            mine = found[-1, :, :, block * L : block * L + Q, : block * L + Q]
            mine = F.pad(mine, (max(0, keys - mine.shape[-1]), 0))[..., -keys:]
            close(mine @ values[:, block - 1], y[:, block - 1])
        return
    with torch.no_grad(), watching(model, lambda *call: seen.append(call)):
        model.fork(x[:, :-1], queries, None)
    real = weights_of(*seen[-1][1:])[..., (N - 1) * L :, :].unflatten(-2, (N - 1, Q))  # of queries (B, H, N - 1, Q, S)
    for block in range(1, N):
        mine = found[-1, :, :, block * L : block * L + Q]
        own = (N - 1) * L + (block - 1) * Q
        close(mine[..., : block * L], real[:, :, block - 1, :, : block * L])
        close(mine[..., block * L : block * L + Q], real[:, :, block - 1, :, own : own + Q])


def test_nobody_watches_after_the_context_and_training_is_refused(make):
    model, x = make("transformer", PRIORS["gaussian"]), inputs(B, T, D)
    before = model(x, None)[0]
    attention_weights(model, x)
    assert model.watch is None and torch.equal(model(x, None)[0], before)
    with pytest.raises(ZeroDivisionError), watching(model, lambda *_: 1 / 0):
        model(x, None)
    assert model.watch is None
    with pytest.raises(AssertionError, match="dropout"):
        attention_weights(model.train(), x)
