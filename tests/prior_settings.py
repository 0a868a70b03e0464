"""Settings of attention priors, by their kind."""

from __future__ import annotations

from typing import Any

from wmcli.config import Section, validate
from wmcli.nn.attention_prior import AnyAttentionPrior, NoPriorSettings


class _Backbone(Section):
    prior: AnyAttentionPrior = NoPriorSettings()


def prior_settings(**values: Any) -> Any:
    """Build the section of a prior. Raises UsageError for values that do not fit."""
    return validate(_Backbone, {"prior": values}, "test").prior


def keys_of(kind: str, **values: Any) -> dict[str, Any]:
    """Return those of some values that a kind of prior has, and its `kind`."""
    fields = type(prior_settings(kind=kind)).model_fields
    return {"kind": kind} | {key: value for key, value in values.items() if key in fields}
