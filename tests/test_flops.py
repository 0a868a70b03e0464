"""Operations of UniZero's transformer as the paper on attention priors counts them (arXiv 2511.06946, Table 3): by
torch's profiler over one sequence of 16 elements, two for a multiply-add of a matrix product, one for an element of a
sum or a product, none for norms, softmax and GELU. That pins every width, and what a prior costs.

The profiler does not look into fused attention, so attention runs in its plain form. That divides the scores, which the
profiler does not count, where the public code multiplies them, which it does: here a division counts as a product. As
in the paper's count of parameters, positions are no part of the transformer.

T elements, D width, H heads.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from wmcli.backbones import build, transformer
from wmcli.kernels.attention import reference
from wmcli.settings import resolve

D, H, LAYERS, HORIZON = 768, 8, 2, 10
PRODUCTS = ("aten::addmm", "aten::bmm")
ELEMENTWISE = ("aten::add", "aten::mul", "aten::div")
PAPER = {"none": 454_610_944, "span": 454_615_040, "gaussian": 454_619_136, "gaussian_span": 454_619_136}


def operations(monkeypatch: pytest.MonkeyPatch, elements: int, kind: str, form: str = "additive") -> Counter[str]:
    """By what they are for; `table` is what it takes to make the priors' tables, once for all layers."""
    monkeypatch.setattr(transformer, "attention", reference)
    prior = "backbone.prior"
    forms = [] if kind == "none" else [f"{prior}.form={form}"]
    settings = resolve("unizero", [f"{prior}.kind={kind}", *forms])
    backbone = build(settings.backbone, max_length=2 * HORIZON, block=2).eval()
    x = torch.randn(1, elements, D)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as profiler:
        backbone(x, None)
    purposes = {(1, elements, D): "residual", (1, H, elements, elements): "score"}
    found: Counter[str] = Counter()
    for event in profiler.events():
        assert not event.flops or event.name in PRODUCTS + ELEMENTWISE, event.name
        if event.name in PRODUCTS:
            found[event.name] += event.flops
        if event.name in ELEMENTWISE:
            shape = tuple(event.input_shapes[0])
            assert event.flops == math.prod(shape) or event.name == "aten::div"
            found[purposes.get(shape, "table")] += math.prod(shape)
    found["residual"] -= elements * D  # what adds the positions
    return found


@pytest.mark.parametrize(("elements", "total"), [(16, PAPER["none"]), (20, 568_756_480)])
def test_the_transformer(elements: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the paper's table, and over a whole segment of training."""
    scores = LAYERS * H * elements**2
    found = operations(monkeypatch, elements, "none")
    assert found == {
        "aten::addmm": 2 * elements * LAYERS * 12 * D**2,  # four projections, and two to and from four times the width
        "aten::bmm": 2 * scores * 2 * D // H,  # queries by keys, weights by values
        "residual": LAYERS * 2 * elements * D,
        "score": scores,  # each divided once
    }
    assert found.total() == total
    if elements == 16:
        assert found == {"aten::addmm": 452_984_832, "aten::bmm": 1_572_864, "residual": 49_152, "score": 4_096}


@pytest.mark.parametrize("form", ["additive", "scale"])
@pytest.mark.parametrize("kind", ["span", "gaussian", "gaussian_span"])
def test_a_prior_is_one_more_operation_for_each_score(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kind, since its table is made first. The paper counts two where there is a Gaussian."""
    plain, found = (operations(monkeypatch, 16, each, form) for each in ("none", kind))
    table = found.pop("table")
    scores = LAYERS * H * 16**2
    assert found == plain + Counter(score=scores)
    assert found.total() == PAPER["span"] == PAPER[kind] - (0 if kind == "span" else scores)
    assert 0 < table < scores / 2
