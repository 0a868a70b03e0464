"""Recorded experience in the formats of others: read into wm's form, and written from it."""

from __future__ import annotations

from wmcli.exchange.episode import Episode, Recording, digest_of
from wmcli.exchange.formats import (
    Format,
    WritableFormat,
    digest_of_files,
    located,
    open_recording,
    write_recording,
)

__all__ = [
    "Episode",
    "Format",
    "Recording",
    "WritableFormat",
    "digest_of",
    "digest_of_files",
    "located",
    "open_recording",
    "write_recording",
]
