"""Plain values: how deep they are, and the digests by which they identify jobs and artifacts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def is_deeper(value: Any, most: int) -> bool:
    """Return whether tables and lists stand more than `most` deep in one another."""
    level = [value]
    for _ in range(most + 1):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def canonical_json(value: Any) -> str:
    """Return the canonical text of a JSON value: sorted keys, no spaces, no NaN."""
    return _ENCODER.encode(value)


def digest(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
