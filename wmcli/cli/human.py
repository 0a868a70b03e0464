"""Times and counts in short form."""

from __future__ import annotations

from datetime import UTC, datetime

SHORT = 7  # digits of a digest that distinguish versions


def ago(time: str) -> str:
    """Return the time since an ISO 8601 time: `5 min`, `3 h`, `12 days`."""
    minutes = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds() / 60
    if minutes < 120:
        return f"{max(minutes, 0):.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"


def count(number: int | None) -> str | None:
    """Return an integer with thousands separators."""
    return None if number is None else f"{number:,}"
