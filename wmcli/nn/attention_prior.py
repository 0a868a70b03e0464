"""Attention priors: a fixed or learned prior over distances for each head of each layer.

With offset d = i - j of query i and key j, and score s_ij = q_i k_j / sqrt(K), one head has

    b(d) = -(d - mean)^2 / (2 deviation^2) + ln m(d)        each term as the kind has it
    additive: softmax_j(s_ij + b(d))        scale: softmax_j(s_ij e^b(d))

where m is 1 within the span and 0 far beyond it. The equations of the paper are the additive form; its public code
computes the other. In the scale form a distant key is not masked but gets the weight of the score 0. With `leak` keys
after the query get it too. A prior depends on offsets only, so caches, windows and resets do not change it.

Axes: B batch, H heads, T queries, S keys, K width of a head, R offsets.

Sources: "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946); the ramp is that of adaptive spans
(Sukhbaatar et al. 2019, arXiv 1905.07799).
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
SLACK = 1e-4  # a hard span that is initially a whole number includes that offset despite the rounding of softplus


class AttentionPriorSettings(Section):
    """Base of the attention priors, of each head of each layer."""

    kind: str
    """Kind of prior."""

    @property
    def multiplies(self) -> bool:
        """Whether the prior multiplies scores. Otherwise its logarithm is added to them."""
        return False

    @property
    def leaks(self) -> bool:
        """Whether keys after the query get the weight of the score 0."""
        return False


class NoPriorSettings(AttentionPriorSettings):
    kind: Literal["none"] = "none"
    """Attention has no prior over distances."""


class PriorSettings(AttentionPriorSettings):
    """Base of all priors but `none`."""

    unit: Literal["token", "step"] = "token"
    """Unit of offsets: elements, or blocks of elements (environment steps)."""


class LocalPriorSettings(PriorSettings):
    kind: Literal["local"] = "local"
    """Fixed attention window."""
    window: int = Field(default=6, ge=0)
    """Largest offset that an element attends to. [offsets]"""


class LearnedPriorSettings(PriorSettings):
    """Base of the priors with parameters."""

    form: Literal["additive", "scale"] = "additive"
    """Add the prior's logarithm to the scores, or multiply them by the prior as in the paper's public code."""
    leak: bool = False
    """Give keys after the query the weight of the score 0 over whole sequences, as in the public code. Form scale
    only."""

    @model_validator(mode="after")
    def _leaks_only_where_it_multiplies(self) -> LearnedPriorSettings:
        if self.leak and self.form != "scale":
            raise ValueError("leak = true exists with form = 'scale' only; set form = 'scale' or leak = false")
        return self

    @property
    def multiplies(self) -> bool:
        return self.form == "scale"

    @property
    def leaks(self) -> bool:
        return self.leak


class _Gaussian(Section):
    """Settings of a learned mean and deviation."""

    mean: float = Field(default=6.0, gt=0)
    """Initial offset of the Gaussian's mean. [offsets]"""
    deviation: float = Field(default=1.0, gt=SMALLEST_DEVIATION)
    """Initial standard deviation of the Gaussian. [offsets]"""
    mean_bound: Literal["sigmoid", "clamp"] = "sigmoid"
    """Bound of the mean within the offsets: smooth (sigmoid), or a clamp as in the public code."""


class _Span(Section):
    """Settings of a learned span."""

    span: float = Field(default=6.0, gt=0)
    """Initial span. [offsets]"""
    span_mask: Literal["hard", "ramp", "triangle"] = "ramp"
    """Weight beyond the span: 0; falling to 0 over the ramp; or falling from 1 at the query over the whole span. The
    hard mask has no gradient."""
    ramp: float = Field(default=3.0, gt=0)
    """Length of the ramp beyond the span. [offsets]"""
    regularizer: Literal["none", "l1", "l2", "max"] = "none"
    """Regularizer of the spans: their sum (l1), the sum of their squares (l2), or a limit of max_span (max)."""
    strength: float = Field(default=0.025, ge=0)
    """Weight of the regularizers l1 and l2 in the loss."""
    max_span: float = Field(default=6.0, gt=0)
    """Largest span, for the regularizer max. [offsets]"""
    span_limit: float = Field(default=0.0, ge=0)
    """Largest span under any regularizer, as adaptive spans have it (the paper's table: 20); 0 for none. [offsets]"""

    @model_validator(mode="after")
    def _begins_within_its_limit(self) -> _Span:
        if self.span_limit and self.span > self.span_limit:
            raise ValueError(f"span = {self.span:g} is more than span_limit = {self.span_limit:g}: lower span")
        return self

    @property
    def largest_span(self) -> float | None:
        """Span that no head exceeds; None without such a limit."""
        limits = [self.span_limit] if self.span_limit else []
        return min([*limits, self.max_span] if self.regularizer == "max" else limits, default=None)


class GaussianPriorSettings(_Gaussian, LearnedPriorSettings):
    kind: Literal["gaussian"] = "gaussian"
    """Learned mean and deviation of a Gaussian over offsets, for each head."""


class SpanPriorSettings(_Span, LearnedPriorSettings):
    kind: Literal["span"] = "span"
    """Learned span for each head."""


class GaussianSpanPriorSettings(_Span, _Gaussian, LearnedPriorSettings):
    kind: Literal["gaussian_span"] = "gaussian_span"
    """Learned Gaussian over offsets and learned span, for each head."""


AnyAttentionPrior = Annotated[
    Annotated[NoPriorSettings, Tag("none")]
    | Annotated[LocalPriorSettings, Tag("local")]
    | Annotated[SpanPriorSettings, Tag("span")]
    | Annotated[GaussianPriorSettings, Tag("gaussian")]
    | Annotated[GaussianSpanPriorSettings, Tag("gaussian_span")],
    chosen_by_kind("backbone.prior"),
]
"""Settings of one prior."""


def warnings(settings: AttentionPriorSettings) -> list[str]:
    """Return warnings about training with these settings, one line each."""
    lines = []
    if settings.leaks:
        lines.append(
            "prior.leak = true: in training attention includes future elements, the targets of prediction among them; "
            "acting has none. It reproduces a flaw of public code."
        )
    if isinstance(settings, _Span) and settings.span_mask == "hard":
        lines.append("prior.span_mask = hard: it gives the spans no gradient; only a regularizer changes them.")
    return lines


class AttentionPrior(nn.Module):
    """Priors of all heads of all layers of one transformer.

    The parameters are (layers, heads) each, float32 (float64 in a float64 model). The kind determines which exist.

    Args:
        settings: Settings of the prior.
        layers: Number of layers.
        heads: Heads of a layer.
        reach: R, the number of offsets 0 ... R - 1, in units.
        key: Key of the settings, for messages.

    Raises:
        UsageError: The initial mean of the Gaussian exceeds all offsets.
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
        """Whether the prior is a table of biases by distance in elements, as `kernels.attention` takes it."""
        return not self.settings.multiplies and self.settings.unit == "token"

    def values(self) -> dict[str, Tensor]:
        """Return the `mean`, `deviation` and `span` of the kind, in units, (layers, heads) each."""
        values = {}
        if isinstance(self.settings, _Gaussian):
            assert self.raw_mean is not None and self.raw_deviation is not None
            if self.settings.mean_bound == "sigmoid":
                values["mean"] = self.reach * self.raw_mean.sigmoid()
            else:
                values["mean"] = F.softplus(self.raw_mean).clamp(max=self.reach - 1)
            values["deviation"] = F.softplus(self.raw_deviation) + SMALLEST_DEVIATION
        if self.raw_span is not None:
            values["span"] = F.softplus(self.raw_span)
        return values

    def forward(self) -> Tensor:
        """Return the summands or factors of scores by offset: (layers, heads, R), float32."""
        table = log_prior(self.settings, self.offsets, **self.values())
        table = table.exp() if self.settings.multiplies else table
        return table.expand(self.layers, self.heads, -1)

    def penalty(self) -> Tensor | None:
        """Return the regularizer's summand of the loss: strength times a sum over all heads; None without one."""
        if not isinstance(self.settings, _Span) or self.settings.regularizer not in ("l1", "l2"):
            return None
        assert self.raw_span is not None
        span = F.softplus(self.raw_span)
        return self.settings.strength * (span if self.settings.regularizer == "l1" else span.square()).sum()

    @torch.no_grad()
    def project(self) -> None:
        """Clamp the spans to their limit, if they have one."""
        if isinstance(self.settings, _Span) and (largest := self.settings.largest_span) is not None:
            assert self.raw_span is not None
            self.raw_span.clamp_(max=_raw(largest))


def log_prior(
    settings: PriorSettings,
    offsets: Tensor,
    mean: Tensor | None = None,
    deviation: Tensor | None = None,
    span: Tensor | None = None,
) -> Tensor:
    """Return the prior's logarithm b by offset.

    Args:
        settings: Settings of the prior.
        offsets: (R,), not negative.
        mean: (...,).
        deviation: (...,).
        span: (...,).

    Returns:
        (..., R), or (R,) for the kind local. -inf at masked offsets, never at offset 0.
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
    """Return ln m at offsets (R,) for spans (..., 1)."""
    if settings.span_mask == "hard":
        hidden = offsets > span + SLACK
        return torch.zeros(hidden.shape, dtype=span.dtype, device=span.device).masked_fill(hidden, -math.inf)
    if settings.span_mask == "ramp":
        share = (settings.ramp + span - offsets) / settings.ramp
    else:
        share = 1 - offsets / span.clamp(min=SLACK)  # a span may underflow
    hidden = share <= 0
    return share.clamp(max=1).masked_fill(hidden, 1).log().masked_fill(hidden, -math.inf)  # ln 0 has no gradient


def spread(row: Tensor, offset: Tensor) -> Tensor:
    """Return a layer's row of the table (H, R) at offsets (T, S) or (B, T, S): (1, H, T, S) or (B, H, T, S).

    Negative offsets, of keys after the query, count as 0. The caller masks these keys.
    """
    values = row[:, offset.clamp(min=0)]
    return values[None] if offset.dim() == 2 else values.transpose(0, 1)


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Tensor, drop: float = 0.0) -> Tensor:
    """Return softmax(s weight + mask) v with the scores s of q and k, (B, H, T, K) in the dtype of v.

    Scores are float32.

    Args:
        q: (B, H, T, K).
        k: (B, H, S, K).
        v: (B, H, S, K).
        weight: (..., T, S).
        mask: (..., T, S), True for visible keys, or numbers added to the scores.
        drop: Probability of dropout of each attention weight.
    """
    with torch.autocast(q.device.type, enabled=False):
        score = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[3]) * weight
        score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
        return dropout(score.softmax(-1).to(v.dtype), drop, drop > 0) @ v


# -- of whole models ---------------------------------------------------------------------------------------------------


def priors_of(module: nn.Module) -> list[AttentionPrior]:
    """Return the priors in `module` that require gradients. A frozen copy, such as a target network, has none."""
    priors = (each for each in module.modules() if isinstance(each, AttentionPrior))
    return [prior for prior in priors if any(parameter.requires_grad for parameter in prior.parameters())]


def penalty(module: nn.Module) -> Tensor | None:
    """Return the sum of the priors' regularizers in `module`, a scalar; None without any."""
    terms = [term for term in (prior.penalty() for prior in priors_of(module)) if term is not None]
    return torch.stack(terms).sum() if terms else None


def project(module: nn.Module) -> None:
    """Clamp the priors in `module` to their limits, after each step of the optimizer."""
    for prior in priors_of(module):
        prior.project()


def prior_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the current `mean`, `deviation` and `span` of the priors in `module`, in units and without gradient.

    Each is (layers, heads), with several transformers concatenated along layers.
    """
    parts: dict[str, list[Tensor]] = {}
    for prior in priors_of(module):
        for name, value in prior.values().items():
            parts.setdefault(name, []).append(value.detach())
    return {name: torch.cat(values) for name, values in parts.items()}


def _raw(value: float) -> float:
    """Return the number whose softplus is `value` > 0."""
    return value + math.log(-math.expm1(-value))
