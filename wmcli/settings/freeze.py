"""Write the defaults of the current schema to `wmcli/config/schema_N.json`: python -m wmcli.settings.freeze.

Settings that are not at their defaults identify a job. Later versions therefore need the defaults of this one, see
`wmcli.config.migrations`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wmcli import config
from wmcli.config import SCHEMA
from wmcli.settings.describe import settings_of_section


def defaults() -> dict[str, dict[str, Any]]:
    """Return defaults by key and kind."""
    table: dict[str, dict[str, Any]] = {}
    for each in settings_of_section():
        if not each.key.startswith("alternatives."):
            table.setdefault(each.key, {})[each.kind] = each.default
    return table


def write(folder: Path) -> Path:
    """Write the file into a folder and return its path."""
    path = folder / f"schema_{SCHEMA}.json"
    path.write_text(json.dumps(defaults(), indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(config.__file__).parent))  # noqa: T201
