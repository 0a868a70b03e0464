"""Settings that earlier versions wrote, read with today's names; and today's settings as earlier versions spelled them.

The settings of a run and of an artifact carry the number of the schema that they were written in. `upgrade` leads from
there to `SCHEMA`. `earlier_identities` leads back: a job is known by a digest of its settings, and an artifact of an
earlier version is recognized by the digest that this version took.

To rename or move a key: raise `SCHEMA`, add a `Schema` to `EARLIER` with both directions, and keep the defaults of the
schema that ends in `schema_N.json` beside this file. To add a key or to change what a key at its default does, see
`Section.changed` and the `REVISION` of the stages.

Schema 1 (wm 0.1.0): jobs were known by all values of whole sections, every backbone's settings included.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from wmcli.config.tables import flat, merge, unflat
from wmcli.errors import UsageError

SCHEMA = 2
"""The schema of settings written by this version."""

Values = Mapping[str, Any]
"""Plain values by section, complete or in part."""


class Schema(NamedTuple):
    """A schema that ended."""

    upgrade: Callable[[Values], dict[str, Any]]
    """From its values to those of the schema after it."""
    upgrade_key: Callable[[str], str]
    """From a key, `section.key`, to that of the schema after it."""
    identity: Callable[[Values, Values], dict[str, Any]]
    """From all values of the schema after it, and those that are not at their defaults, to the values by which its
    version knew a job."""


# -- schema 1 ---------------------------------------------------------------------------------------------------------

RENAMED = {
    "collect.recorded": "collect.recordings",
    "tokenizer.quantiser": "tokenizer.quantizer",
    "tokenizer.initialisation": "tokenizer.initialization",
    "tokenizer.optimiser": "tokenizer.optimizer",
    "dynamics.horizon": "dynamics.sequence_length",
    "dynamics.ends": "dynamics.predict_termination",
    "dynamics.termination": "dynamics.predict_termination",
    "dynamics.initialisation": "dynamics.initialization",
    "dynamics.optimiser": "dynamics.optimizer",
    "dynamics.stack": "dynamics.frame_stack",
    "dynamics.unroll": "dynamics.unroll_steps",
    "controller.horizon": "controller.imagination_horizon",
    "controller.entropy": "controller.entropy_weight",
    "controller.sees": "controller.input",
    "controller.initialisation": "controller.initialization",
    "controller.normalise_inputs": "controller.normalize_inputs",
    "controller.optimiser": "controller.optimizer",
    "controller.rules": "controller.rule",
    "controller.considered": "controller.max_num_considered_actions",
    "controller.dirichlet_weight": "controller.dirichlet_fraction",
    "controller.visit_constant": "controller.maxvisit_init",
    "backbone.name": "backbone.kind",
}
"""Keys of schema 1 and their names in schema 2. Keys of a backbone's own section moved up into `backbone` as well."""

RENAMED_OF_BACKBONES = {
    "state": "state_size",
    "conv": "conv_kernel",
    "chunk": "chunk_size",
    "hidden": "hidden_size",
    "inputs": "input_width",
    "memory": "memory_length",
    "segment": "segment_length",
    "discretisation": "discretization",
    "initialisation": "initialization",
    "prior.regulariser": "prior.regularizer",
}
"""The same for keys of the backbones' own sections."""

RENAMED_VALUES = {
    "dynamics.posterior": {"factorised": "factorized"},
    "tokenizer.output": {"centred": "centered"},
}
"""Values, under the key's name in schema 2, that were spelled otherwise in schema 1."""

BACKBONES_1 = {
    name.replace("-", "_"): name
    for name in (
        "retnet",
        "transformer",
        "transformer-xl",
        "gru",
        "dreamer-gru",
        "mamba1",
        "mamba2",
        "s4",
        "s4d",
        "s5",
    )
}
"""The section that each backbone had in schema 1, and the backbone's name."""


@functools.cache
def _defaults_1() -> dict[str, Any]:
    """Return the defaults of schema 1 by section; of `tokenizer`, `dynamics` and `controller` by kind."""
    text = resources.files("wmcli.config").joinpath("schema_1.json").read_text(encoding="utf-8")
    defaults: dict[str, Any] = json.loads(text)
    return defaults


def _upgrade_key_1(key: str) -> str:
    section, _, rest = key.partition(".")
    kind, _, own = rest.partition(".")
    if section == "backbone" and own and kind in BACKBONES_1:
        return f"backbone.{RENAMED_OF_BACKBONES.get(own, own)}"
    return RENAMED.get(key, key)


def _upgrade_1(values: Values) -> dict[str, Any]:
    upgraded: dict[str, Any] = {}
    for section, table in values.items():
        if section == "backbone" and isinstance(table, Mapping):
            upgraded = merge(upgraded, _upgrade_backbone(table))
        elif isinstance(table, Mapping):
            renamed = {_upgrade_key_1(f"{section}.{key}"): value for key, value in flat(table).items()}
            renamed = {key: _respelled(key, value, RENAMED_VALUES) for key, value in renamed.items()}
            upgraded = merge(upgraded, {section: {}} | unflat(renamed))
        else:
            upgraded[section] = table
    return upgraded


def _upgrade_backbone(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of the chosen backbone, and those of others that are not at their defaults as alternatives."""
    kind = table.get("name", _defaults_1()["backbone"]["name"])
    backbone = {key: value for key, value in table.items() if key not in BACKBONES_1 and key != "name"}
    alternatives = {}
    for section, own in table.items():
        if section not in BACKBONES_1 or not isinstance(own, Mapping):
            continue
        defaults = flat(_defaults_1()["backbone"].get(section, {}))
        chosen = BACKBONES_1[section] == kind
        kept = {key: each for key, each in flat(own).items() if chosen or each != defaults.get(key)}
        renamed = unflat({RENAMED_OF_BACKBONES.get(key, key): each for key, each in kept.items()})
        if chosen:
            backbone |= renamed
        elif renamed:
            alternatives[BACKBONES_1[section]] = renamed
    upgraded: dict[str, Any] = {"backbone": {"kind": kind} | backbone}
    return upgraded | ({"alternatives": {"backbone": alternatives}} if alternatives else {})


def _identity_1(values: Values, changed: Values) -> dict[str, Any]:
    identity = {}
    for section, table in values.items():
        if section == "backbone":
            identity[section] = _downgrade_backbone(table, values.get("alternatives", {}).get("backbone", {}))
        elif isinstance(table, Mapping) and section in _defaults_1():
            defaults = _defaults_1()[section]
            defaults = flat(defaults.get(table["kind"], {}) if "kind" in table else defaults)
            back = {new: old for old, new in RENAMED.items() if old in {f"{section}.{key}" for key in defaults}}
            values_back = {key: {new: old for old, new in words.items()} for key, words in RENAMED_VALUES.items()}
            kept = {}
            for key, value in flat(table).items():
                old = back.get(f"{section}.{key}", f"{section}.{key}").partition(".")[2]
                if old in defaults or key in flat(changed.get(section, {})):  # else it came later and changes nothing
                    kept[old] = _respelled(f"{section}.{key}", value, values_back)
            identity[section] = unflat(kept)
        else:
            identity[section] = table
    return identity


def _downgrade_backbone(backbone: Mapping[str, Any], alternatives: Mapping[str, Any]) -> dict[str, Any]:
    defaults = _defaults_1()["backbone"]
    back = {new: old for old, new in RENAMED_OF_BACKBONES.items()}
    table: dict[str, Any] = {"name": backbone["kind"]}
    for section, kind in BACKBONES_1.items():
        own = backbone if kind == backbone["kind"] else alternatives.get(kind, {})
        known = flat(defaults[section])
        renamed = {back.get(key, key): value for key, value in flat(own).items()}
        table[section] = merge(defaults[section], unflat({key: renamed[key] for key in known if key in renamed}))
    shared = {key: value for key, value in backbone.items() if key in defaults and key not in table}
    return table | shared


def _respelled(key: str, value: Any, words: Mapping[str, Mapping[str, str]]) -> Any:
    return words[key].get(value, value) if key in words and isinstance(value, str) else value


# -- all schemas ------------------------------------------------------------------------------------------------------

EARLIER = (Schema(_upgrade_1, _upgrade_key_1, _identity_1),)
"""Schemas 1, 2, ... up to the one before `SCHEMA`."""


def upgrade(values: Values, schema: int) -> dict[str, Any]:
    """Return settings, complete or in part, that were written in `schema` as they are written today."""
    upgraded = dict(values)
    for step in EARLIER[schema - 1 :]:
        upgraded = step.upgrade(upgraded)
    return upgraded


def upgrade_override(text: str, schema: int) -> str:
    """Return an override, `section.key=value`, that was written in `schema` as it is written today."""
    key, equals, value = text.partition("=")
    for step in EARLIER[schema - 1 :]:
        key = step.upgrade_key(key.strip())
    return f"{key}{equals}{value}"


def earlier_identities(values: Values, changed: Values) -> list[dict[str, Any]]:
    """Return the values by which earlier versions of wm knew a job, the latest version first.

    Args:
        values: All values of some sections, and the `alternatives`.
        changed: Those of them that are not at their defaults.
    """
    identities = []
    for step in reversed(EARLIER):
        identity = step.identity(values, changed)
        identity.pop("alternatives", None)
        identities.append(identity)
    return identities


def new_name(key: str) -> str | None:
    """Return the name that a key of an earlier schema has now; None for a key that was not renamed."""
    name = upgrade_override(key, 1)
    return None if name == key else name


def refuse_old_keys(table: Mapping[str, Any], where: str) -> None:
    """Raise UsageError, naming old and new name, if a table of settings has a key that was renamed."""
    for key in flat(table):
        if (name := new_name(key)) is not None:
            raise UsageError(f"{where}: {key} is called {name} since wm 0.2.0.")


def check_schema(schema: Any, where: str) -> int:
    """Return the number of a schema that this version reads. Raises UsageError for any other value."""
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        known = ", ".join(str(number) for number in range(1, SCHEMA + 1))
        raise UsageError(
            f"{where}: settings of schema {str(schema)[:20]}, but this wm reads {known}; use the wm of it."
        )
    return schema
