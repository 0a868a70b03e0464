"""Sections and their validation, presets, overrides, migrations, and the identities of jobs."""

from wmcli.config.digests import canonical_json, digest, is_deeper
from wmcli.config.identity import Identity
from wmcli.config.kinds import KINDS, chosen_by_kind, kinds_above, names_kind
from wmcli.config.migrations import SCHEMA, check_schema, new_name, upgrade, upgrade_override
from wmcli.config.presets import (
    PRESET_HEADER,
    is_file,
    lay_over,
    preset_header,
    preset_names,
    preset_values,
    read_preset,
)
from wmcli.config.sections import Section, did_you_mean, problem, validate
from wmcli.config.tables import flat, format_override, merge, nested, parse_override
from wmcli.config.toml import MAX_TOML_BYTES, read_toml, to_toml

__all__ = [
    "KINDS",
    "MAX_TOML_BYTES",
    "PRESET_HEADER",
    "SCHEMA",
    "Identity",
    "Section",
    "canonical_json",
    "check_schema",
    "chosen_by_kind",
    "did_you_mean",
    "digest",
    "flat",
    "format_override",
    "is_deeper",
    "is_file",
    "kinds_above",
    "lay_over",
    "merge",
    "names_kind",
    "nested",
    "new_name",
    "parse_override",
    "preset_header",
    "preset_names",
    "preset_values",
    "problem",
    "read_preset",
    "read_toml",
    "to_toml",
    "upgrade",
    "upgrade_override",
    "validate",
]
