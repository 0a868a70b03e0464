"""Attention priors: how far back each head of each layer expects to find what matters, learned besides what it reads.

With offset d = i - j of query i and key j, and score s_ij = q_i k_j / sqrt(K), one head has

    b(d) = -(d - mean)^2 / (2 deviation^2) + ln m(d)        each term as the kind has it
    additive: softmax_j(s_ij + b(d))        scale: softmax_j(s_ij e^b(d))

where m is 1 within the span and 0 far beyond it. From "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv
2511.06946), whose equations are the additive form and whose public code computes the other: there a key far away is not
hidden but gets the weight of the score 0, and with `leak` so do keys behind the query. The ramp is that of adaptive
spans (Sukhbaatar et al. 2019, arXiv 1905.07799). A prior depends on offsets only, so caches, windows and resets do not
change it.

Axes: B batch, H heads, T queries, S keys, K width of a head, R offsets.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, Tag, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.config import Section, chosen_by_kind
from wmcli.errors import UsageError
from wmcli.nn.dropout import dropout

SMALLEST_DEVIATION = 1e-3
SLACK = 1e-4  # so that a hard span that begins at a whole number reaches that far, however softplus rounds it


class AttentionPriorSettings(Section):
    """Base of the attention priors, of each head of each layer."""

    kind: str
    """Which prior."""

    @property
    def multiplies(self) -> bool:
        """Whether the prior multiplies scores. Otherwise its logarithm is added to them."""
        return False

    @property
    def leaks(self) -> bool:
        """Whether keys behind the query get the weight of the score 0."""
        return False


class NoPriorSettings(AttentionPriorSettings):
    kind: Literal["none"] = "none"
    """Attention has no prior over distances."""


class PriorSettings(AttentionPriorSettings):
    """Base of all priors but `none`."""

    unit: Literal["token", "step"] = "token"
    """What offsets count: elements, or blocks of elements (time steps of the environment)."""


class LocalPriorSettings(PriorSettings):
    kind: Literal["local"] = "local"
    """Attention sees a fixed window."""
    window: int = Field(default=6, ge=0)
    """Units before its own that an element attends to. [offsets]"""


class LearnedPriorSettings(PriorSettings):
    """Base of the priors with parameters."""

    form: Literal["additive", "scale"] = "additive"
    """The prior's logarithm is added to the scores, or the prior multiplies them as in the paper's public code."""
    leak: bool = False
    """Over whole sequences, keys behind the query get the weight of the score 0, as in the public code. With form
    scale only, to reproduce its results."""

    @model_validator(mode="after")
    def _leaks_only_where_it_multiplies(self) -> LearnedPriorSettings:
        if self.leak and self.form != "scale":
            raise ValueError("leak = true is an artefact of form = 'scale': set that, or leak = false")
        return self

    @property
    def multiplies(self) -> bool:
        return self.form == "scale"

    @property
    def leaks(self) -> bool:
        return self.leak


class _Gaussian(Section):
    """Keys of a learned mean and deviation."""

    mean: float = Field(default=6.0, gt=0)
    """Initial offset of the Gaussian's mean. [offsets]"""
    deviation: float = Field(default=1.0, gt=SMALLEST_DEVIATION)
    """Initial standard deviation of the Gaussian. [offsets]"""
    mean_bound: Literal["sigmoid", "clamp"] = "sigmoid"
    """How the mean stays within the offsets that there are: smoothly, or cut off there as in the public code."""


class _Span(Section):
    """Keys of a learned span."""

    span: float = Field(default=6.0, gt=0)
    """Initial span. [offsets]"""
    span_mask: Literal["hard", "ramp", "triangle"] = "ramp"
    """Weight beyond the span: none; falling to 0 over the ramp; or falling from 1 at the query over the whole span.
    The hard mask gives the span no gradient."""
    ramp: float = Field(default=3.0, gt=0)
    """Distance beyond the span over which a ramp falls to 0. [offsets]"""
    regularizer: Literal["none", "l1", "l2", "max"] = "none"
    """Of the spans: their sum or the sum of their squares is added to the loss, or none may exceed max_span."""
    strength: float = Field(default=0.025, ge=0)
    """Weight of l1 and l2 in the loss."""
    max_span: float = Field(default=6.0, gt=0)
    """Largest span, for the regularizer max. [offsets]"""


class GaussianPriorSettings(_Gaussian, LearnedPriorSettings):
    kind: Literal["gaussian"] = "gaussian"
    """Each head learns mean and deviation of a Gaussian over offsets."""


class SpanPriorSettings(_Span, LearnedPriorSettings):
    kind: Literal["span"] = "span"
    """Each head learns a span."""


class GaussianSpanPriorSettings(_Span, _Gaussian, LearnedPriorSettings):
    kind: Literal["gaussian_span"] = "gaussian_span"
    """Each head learns a Gaussian over offsets and a span that cuts it off."""


AnyAttentionPrior = Annotated[
    Annotated[NoPriorSettings, Tag("none")]
    | Annotated[LocalPriorSettings, Tag("local")]
    | Annotated[SpanPriorSettings, Tag("span")]
    | Annotated[GaussianPriorSettings, Tag("gaussian")]
    | Annotated[GaussianSpanPriorSettings, Tag("gaussian_span")],
    chosen_by_kind("backbone.prior"),
]
"""The settings of one prior."""


def warnings(settings: AttentionPriorSettings) -> list[str]:
    """What whoever trains with these settings should know, a line each."""
    found = []
    if settings.leaks:
        found.append(
            "prior.leak = true: in training attention sees the future, among it what it is to predict, and when acting "
            "there is none. It reproduces a flaw of public code."
        )
    if isinstance(settings, _Span) and settings.span_mask == "hard":
        found.append("prior.span_mask = hard: it gives the spans no gradient; nothing but a regularizer moves them.")
    return found


class AttentionPrior(nn.Module):
    """The priors of all heads of all layers of one transformer, given to it once.

    The parameters are (layers, heads) each, as the kind has them, float32 (float64 in a float64 model).

    Args:
        reach: R, how many offsets there are, in units: 0 ... R - 1.
        key: of the settings, for messages.

    Raises:
        UsageError: the Gaussian begins beyond all offsets.
    """

    offsets: Tensor
    """(R,) int64."""

    def __init__(self, settings: PriorSettings, layers: int, heads: int, reach: int, key: str) -> None:
        super().__init__()
        self.settings, self.layers, self.heads, self.reach = settings, layers, heads, reach
        self.register_buffer("offsets", torch.arange(reach), persistent=False)
        self.raw_mean: nn.Parameter | None = None
        self.raw_deviation: nn.Parameter | None = None
        self.raw_span: nn.Parameter | None = None
        if isinstance(settings, _Gaussian):
            if settings.mean > reach - 1:
                raise UsageError(f"{key}.mean = {settings.mean:g}: the largest offset here is {reach - 1}; lower it.")
            share = settings.mean / reach
            bounded = settings.mean_bound == "sigmoid"
            self.raw_mean = self._parameter(math.log(share / (1 - share)) if bounded else _raw(settings.mean))
            self.raw_deviation = self._parameter(_raw(settings.deviation - SMALLEST_DEVIATION))
        if isinstance(settings, _Span):
            self.raw_span = self._parameter(_raw(settings.span))

    def _parameter(self, value: float) -> nn.Parameter:
        parameter = nn.Parameter(torch.full((self.layers, self.heads), value))
        parameter._no_weight_decay = True  # type: ignore[attr-defined]  # it would pull raw values to 0, which is no prior
        return parameter

    @property
    def by_distance(self) -> bool:
        """Whether it is a table of biases by distance in elements, as `kernels.attention` takes it."""
        return not self.settings.multiplies and self.settings.unit == "token"

    def values(self) -> dict[str, Tensor]:
        """`mean`, `deviation` and `span` in units, (layers, heads) each, as far as the kind has them."""
        found = {}
        if isinstance(self.settings, _Gaussian):
            assert self.raw_mean is not None and self.raw_deviation is not None
            if self.settings.mean_bound == "sigmoid":
                found["mean"] = self.reach * self.raw_mean.sigmoid()
            else:
                found["mean"] = F.softplus(self.raw_mean).clamp(max=self.reach - 1)
            found["deviation"] = F.softplus(self.raw_deviation) + SMALLEST_DEVIATION
        if self.raw_span is not None:
            found["span"] = F.softplus(self.raw_span)
        return found

    def forward(self) -> Tensor:
        """What is added to the score of a key, or multiplies it, by its offset: (layers, heads, R), float32."""
        table = log_prior(self.settings, self.offsets, **self.values())
        table = table.exp() if self.settings.multiplies else table
        return table.expand(self.layers, self.heads, -1)

    def penalty(self) -> Tensor | None:
        """The regularizer as a part of the loss, None where there is none. Strength times a sum over all heads."""
        if not isinstance(self.settings, _Span) or self.settings.regularizer not in ("l1", "l2"):
            return None
        assert self.raw_span is not None
        span = F.softplus(self.raw_span)
        return self.settings.strength * (span if self.settings.regularizer == "l1" else span.square()).sum()

    @torch.no_grad()
    def project(self) -> None:
        """Cut the spans down to max_span where that is the regularizer."""
        if isinstance(self.settings, _Span) and self.settings.regularizer == "max":
            assert self.raw_span is not None
            self.raw_span.clamp_(max=_raw(self.settings.max_span))


def log_prior(
    settings: PriorSettings,
    offsets: Tensor,
    mean: Tensor | None = None,
    deviation: Tensor | None = None,
    span: Tensor | None = None,
) -> Tensor:
    """b at offsets (R,), none negative, for means, deviations and spans (...,): (..., R); (R,) for the kind local.

    -inf where nothing is seen, which is never so at offset 0.
    """
    if isinstance(settings, LocalPriorSettings):
        hidden = offsets > settings.window
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -math.inf)
    bias: Tensor | None = None
    if isinstance(settings, _Gaussian):
        assert mean is not None and deviation is not None
        bias = -0.5 * ((offsets - mean[..., None]) / deviation[..., None]).square()
    if isinstance(settings, _Span):
        assert span is not None
        edge = _log_span(settings, offsets, span[..., None])
        bias = edge if bias is None else bias + edge
    assert bias is not None, "kind none has no prior"
    return bias


def _log_span(settings: _Span, offsets: Tensor, span: Tensor) -> Tensor:
    """ln m at offsets (R,) for spans (..., 1)."""
    if settings.span_mask == "hard":
        hidden = offsets > span + SLACK
        return torch.zeros(hidden.shape, dtype=span.dtype, device=span.device).masked_fill(hidden, -math.inf)
    if settings.span_mask == "ramp":
        share = (settings.ramp + span - offsets) / settings.ramp
    else:
        share = 1 - offsets / span.clamp(min=SLACK)  # a span may come to underflow
    hidden = share <= 0
    return share.clamp(max=1).masked_fill(hidden, 1).log().masked_fill(hidden, -math.inf)  # ln 0 has no gradient


def spread(row: Tensor, offset: Tensor) -> Tensor:
    """A layer's row of the table (H, R) at offsets (T, S) or (B, T, S): (1, H, T, S) or (B, H, T, S).

    Negative offsets, those of keys behind the query, count as 0: what is not seen is for the caller to hide.
    """
    values = row[:, offset.clamp(min=0)]
    return values[None] if offset.dim() == 2 else values.transpose(0, 1)


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Tensor, drop: float = 0.0) -> Tensor:
    """softmax(s weight + mask) v with scores s of q (B, H, T, K) and k (B, H, S, K), in the dtype of v (B, H, S, K).

    weight (..., T, S); mask (..., T, S) is True where something is seen, or is added; drop is the chance of each share
    of attention to be dropped. Scores are float32. Returns (B, H, T, K).
    """
    with torch.autocast(q.device.type, enabled=False):
        score = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[3]) * weight
        score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
        return dropout(score.softmax(-1).to(v.dtype), drop, drop > 0) @ v


# -- of whole models ---------------------------------------------------------------------------------------------------


def priors_of(module: nn.Module) -> list[AttentionPrior]:
    """Those in `module` that learn: a frozen copy, such as a slow target network, does not."""
    priors = (each for each in module.modules() if isinstance(each, AttentionPrior))
    return [prior for prior in priors if any(parameter.requires_grad for parameter in prior.parameters())]


def penalty(module: nn.Module) -> Tensor | None:
    """What the regularizers of its priors add to the loss of `module`, a scalar; None where there are none."""
    terms = [term for term in (prior.penalty() for prior in priors_of(module)) if term is not None]
    return torch.stack(terms).sum() if terms else None


def project(module: nn.Module) -> None:
    """Hold the priors in `module` to their limits. After each step of the optimizer."""
    for prior in priors_of(module):
        prior.project()


def learned(module: nn.Module) -> dict[str, Tensor]:
    """What the priors in `module` are by now, in units, without gradient: `mean`, `deviation` and `span` as far as the
    kind has them, (layers, heads) each. Those of several transformers stand below each other."""
    found: dict[str, list[Tensor]] = {}
    for prior in priors_of(module):
        for name, value in prior.values().items():
            found.setdefault(name, []).append(value.detach())
    return {name: torch.cat(values) for name, values in found.items()}


def _raw(value: float) -> float:
    """The number whose softplus is `value` > 0."""
    return value + math.log(-math.expm1(-value))
