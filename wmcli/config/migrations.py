"""Migrations: read the settings of earlier versions, and recognize their jobs.

The settings of a run or artifact have the number of the schema that they were written in. `upgrade` converts them to
`SCHEMA`. `earlier_identities` goes back. A job is identified by a digest of its settings, and an artifact of an earlier
version has the digest of that version's spelling.

`schema_N.json` holds the defaults of schema N. The identity of a job leaves out settings at their defaults. Therefore:

- To add a key: give it a default that changes nothing, and run `python -m wmcli.settings.freeze`.
- To rename a key or to change a default: raise `SCHEMA`, add `renamed(N, {"old.key": "new.key"})` to `EARLIER` for the
  schema N that ends (with an empty table for a default alone), and run `python -m wmcli.settings.freeze`.
- To change the results of a stage under the same settings: raise its number in `wmcli.artifacts.job.REVISIONS`.

Schema 1 (wm 0.1.0) identified jobs by all values of whole sections, with the settings of every backbone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from wmcli.config.kinds import kinds_above
from wmcli.config.tables import flat, merge, unflat
from wmcli.errors import UsageError

SCHEMA = 2
"""The schema of settings written by this version."""

Values = Mapping[str, Any]
"""Plain values by section, complete or in part."""


class Schema(NamedTuple):
    """Conversions of an earlier schema, `section.key` being the form of a key."""

    upgrade: Callable[[Values], dict[str, Any]]
    """Convert values to the next schema."""
    upgrade_key: Callable[[str], str]
    """Convert a key to the next schema."""
    downgrade: Callable[[Values], dict[str, Any]]
    """Convert complete values of some sections back from the next schema."""
    downgrade_key: Callable[[str], str]
    """Convert a key back from the next schema."""
    identity: Callable[[Values], dict[str, Any]]
    """Return the part of complete values that identified a job."""


@functools.cache
def frozen_defaults(schema: int) -> dict[str, Any]:
    """Return `schema_N.json`: defaults by key and kind, `{"backbone.heads": {"retnet": 4, ...}}`.

    A space joins the kinds of nested sections. Schema 1 has the form `{"backbone": {"retnet": {"heads": 4, ...}}}`.
    """
    text = resources.files("wmcli.config").joinpath(f"schema_{schema}.json").read_text(encoding="utf-8")
    defaults: dict[str, Any] = json.loads(text)
    return defaults


def changed_since(schema: int, values: Values) -> dict[str, Any]:
    """Return complete values of some sections without those at their defaults in a schema.

    The result equals `Section.changed` of the version that wrote the schema.
    """
    table = flat(values)
    changed = {}
    for key, value in table.items():
        at_default = value == _default(schema, key, table)
        if key.endswith(".kind") or not at_default:
            changed[key] = value
    return unflat(changed)


_NONE = object()


def _default(schema: int, key: str, table: Values) -> Any:
    """Return a key's default in a schema, under the kinds that a flat table states; `_NONE` if it has none."""
    by_kind, kinds = frozen_defaults(schema).get(key, {}), kinds_above(key, table)
    names = (" ".join(kinds[:depth]) for depth in range(len(kinds), -1, -1))
    return next((by_kind[name] for name in names if name in by_kind), _NONE)


def keys_of_kind(section: str, kind: str) -> set[str]:
    """Return the keys of a section that one kind of it has today."""
    keys = {key.removeprefix(f"{section}."): kinds for key, kinds in frozen_defaults(SCHEMA).items()}
    return {key for key, kinds in keys.items() if any(name.split()[-1:] == [kind] for name in kinds)}


def set_aside_unused(values: Values) -> dict[str, Any]:
    """Move keys that only other kinds of their section have into `alternatives.unused`.

    Such a key has no effect, but an earlier version identified its jobs by the value. At its default it is dropped.
    """
    table, unused = flat(values), {}

    def without_unused(prefix: str, inside: Values) -> dict[str, Any]:
        result = {}
        for name, value in inside.items():
            key = f"{prefix}{name}"
            by_kind = frozen_defaults(SCHEMA).get(key)
            if not by_kind or _default(SCHEMA, key, table) is not _NONE:
                result[name] = without_unused(f"{key}.", value) if isinstance(value, Mapping) else value
            elif any(value != each for each in by_kind.values()):
                unused[key] = value
        return result

    rest = without_unused("", values)
    return merge(rest, {"alternatives": {"unused": unflat(unused)}}) if unused else rest


def renamed(schema: int, names: Mapping[str, str]) -> Schema:
    """Build the schema before a change of keys or defaults.

    Args:
        schema: Its number.
        names: New names of its keys, in the next schema.
    """
    back = {new: old for old, new in names.items()}

    def rename(values: Values, names: Mapping[str, str]) -> dict[str, Any]:
        return unflat({names.get(key, key): value for key, value in flat(values).items()})

    return Schema(
        upgrade=lambda values: rename(values, names),
        upgrade_key=lambda key: names.get(key, key),
        downgrade=lambda values: rename(values, back),
        downgrade_key=lambda key: back.get(key, key),
        identity=lambda values: changed_since(schema, values),
    )


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
"""New names of keys of schema 1. Keys of a backbone's own section also moved up into `backbone`."""

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
"""New names of keys in the backbones' own sections."""

RENAMED_VALUES = {
    "dynamics.posterior": {"factorised": "factorized"},
    "tokenizer.output": {"centred": "centered"},
}
"""New spellings of values, by the new name of the key."""

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
"""Kind of backbone by its section in schema 1."""


def _upgrade_key_1(key: str) -> str:
    section, _, rest = key.partition(".")
    kind, _, own = rest.partition(".")
    if section == "backbone" and own and kind in BACKBONES_1:
        return f"backbone.{RENAMED_OF_BACKBONES.get(own, own)}"
    return RENAMED.get(key, key)


def _downgrade_key_1(key: str) -> str:
    return next((old for old, new in RENAMED.items() if new == key), key)


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
    """Return the section of the chosen backbone. Values of others that are not at their defaults are alternatives."""
    kind = table.get("name", frozen_defaults(1)["backbone"]["name"])
    backbone = {key: value for key, value in table.items() if key not in BACKBONES_1 and key != "name"}
    alternatives = {}
    for section, own in table.items():
        if section not in BACKBONES_1 or not isinstance(own, Mapping):
            continue
        defaults = flat(frozen_defaults(1)["backbone"].get(section, {}))
        chosen = BACKBONES_1[section] == kind
        stated = {key: each for key, each in flat(own).items() if chosen or each != defaults.get(key)}
        renamed = unflat({RENAMED_OF_BACKBONES.get(key, key): each for key, each in stated.items()})
        if chosen:
            backbone |= renamed
        elif renamed:
            alternatives[BACKBONES_1[section]] = renamed
    upgraded: dict[str, Any] = {"backbone": {"kind": kind} | backbone}
    return upgraded | ({"alternatives": {"backbone": alternatives}} if alternatives else {})


def _downgrade_1(values: Values) -> dict[str, Any]:
    """Return values in the spelling of schema 1, without newer keys at their defaults."""
    changed = flat(changed_since(2, values))
    values_back = {key: {new: old for old, new in words.items()} for key, words in RENAMED_VALUES.items()}
    downgraded: dict[str, Any] = {}
    for section, table in values.items():
        if section == "backbone":
            alternatives = values.get("alternatives", {}).get("backbone", {})
            downgraded[section] = _downgrade_backbone(table, alternatives)
        elif section in frozen_defaults(1):
            defaults = frozen_defaults(1)[section]
            defaults = flat(defaults.get(table["kind"], {}) if "kind" in table else defaults)
            old_names = {RENAMED.get(f"{section}.{key}", f"{section}.{key}"): key for key in defaults}
            old = dict(defaults)  # keys that only other kinds have today are not in `values`
            for key, value in flat({section: table}).items():
                if key in old_names or key in changed:
                    old[old_names.get(key, key.partition(".")[2])] = _respelled(key, value, values_back)
            downgraded[section] = unflat(old)
        elif section != "alternatives":
            downgraded[section] = table
    return downgraded


def _downgrade_backbone(backbone: Mapping[str, Any], alternatives: Mapping[str, Any]) -> dict[str, Any]:
    defaults = frozen_defaults(1)["backbone"]
    back = {new: old for old, new in RENAMED_OF_BACKBONES.items()}
    table: dict[str, Any] = {"name": backbone["kind"]}
    for section, kind in BACKBONES_1.items():
        own = backbone if kind == backbone["kind"] else alternatives.get(kind, {})
        old = flat(defaults[section])
        renamed = {back.get(key, key): value for key, value in flat(own).items()}
        table[section] = merge(defaults[section], unflat({key: renamed[key] for key in old if key in renamed}))
    shared = {key: value for key, value in backbone.items() if key in defaults and key not in table}
    return table | shared


def _respelled(key: str, value: Any, words: Mapping[str, Mapping[str, str]]) -> Any:
    return words[key].get(value, value) if key in words and isinstance(value, str) else value


# -- all schemas ------------------------------------------------------------------------------------------------------

EARLIER = (Schema(_upgrade_1, _upgrade_key_1, _downgrade_1, _downgrade_key_1, identity=dict),)
"""Schemas 1, 2, ... before `SCHEMA`."""


def upgrade(values: Values, schema: int) -> dict[str, Any]:
    """Convert settings that were written in `schema` to today's."""
    upgraded = dict(values)
    for step in EARLIER[schema - 1 :]:
        upgraded = step.upgrade(upgraded)
    return set_aside_unused(upgraded)


def upgrade_override(text: str, schema: int) -> str:
    """Convert an override, `section.key=value`, that was written in `schema` to today's."""
    key, equals, value = text.partition("=")
    for step in EARLIER[schema - 1 :]:
        key = step.upgrade_key(key.strip())
    return f"{key}{equals}{value}"


def earlier_identities(values: Values, changed: Values) -> list[dict[str, Any]]:
    """Return the values by which earlier versions identified a job, the latest version first.

    Args:
        values: Complete values of the job's sections, and the `alternatives`.
        changed: Values that are not at their defaults.
    """
    unused = values.get("alternatives", {}).get("unused", {})
    identities, written = [], merge({key: table for key, table in unused.items() if key in values}, values)
    at_default = set(flat(values)) - set(flat(changed))
    for schema, step in reversed(list(enumerate(EARLIER, 1))):
        written = step.downgrade(written)
        at_default = {step.downgrade_key(key) for key in at_default}
        if schema > 1:  # schema 1 has its own rule
            added = at_default - frozen_defaults(schema).keys()
            written = unflat({key: value for key, value in flat(written).items() if key not in added})
        identities.append(step.identity({key: value for key, value in written.items() if key != "alternatives"}))
    return identities


def earlier_names(key: str) -> list[str]:
    """Return the names of a key in earlier schemas, the latest first."""
    names = []
    for step in reversed(EARLIER):
        key = step.downgrade_key(key)
        names.append(key)
    return names


def new_name(key: str) -> str | None:
    """Return the new name of an earlier key. None if it was not renamed."""
    name = upgrade_override(key, 1)
    return None if name == key else name


def refuse_old_keys(table: Mapping[str, Any], where: str) -> None:
    """Raise UsageError, with the new name, if a table of settings has a renamed key."""
    for key in flat(table):
        if (name := new_name(key)) is not None:
            raise UsageError(f"{where}: {key} is called {name} since wm 0.2.0.")


def check_schema(schema: Any, where: str) -> int:
    """Return the number of a schema. Raises UsageError unless this version reads it."""
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        numbers = ", ".join(str(number) for number in range(1, SCHEMA + 1))
        raise UsageError(
            f"{where}: settings of schema {str(schema)[:20]}, but this wm reads {numbers}; use the wm that wrote them."
        )
    return schema
