"""Whose code a run may import: that of runs begun here, and of those that the user has said to trust.

The settings of a run can name a module of Python for its environment, and importing it runs its code. So a run from
elsewhere imports nothing until the user says so. Its owner tells nothing: whoever unpacks a run owns it. A note outside
of the run does, in the user's own folder for such states: a line for each run, by its place and by what it imports. A
copy, another place or another module has no such line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wmcli.artifacts.manifest import shown
from wmcli.config import digest
from wmcli.errors import UsageError, WmError
from wmcli.reading import read_file

VARIABLE = "WM_TRUST"
"""Environment variable that, as 1, trusts every run: for jobs on machines that do not share the notes."""
MAX_NOTES_BYTES = 1 << 24


def notes() -> Path:
    """Return the file of the notes. Raises RuntimeError where the user has no home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "wm" / "trusted-runs"


def check_trusted(run: Path, code: Sequence[str], *, here: Sequence[str] = (), trust: bool = False) -> None:
    """Check that a run may import code, and note it where the user says so now.

    Args:
        run: The run.
        code: What its settings import, see `EnvironmentSettings.code`.
        here: What the command itself names, so that the user has said it.
        trust: The user trusts the run.

    Raises:
        UsageError: It may not.
    """
    if not code or os.environ.get(VARIABLE) == "1" or _line(run, code) in _lines():
        return
    if not trust and not set(code) <= set(here):
        raise UsageError(
            f"{shown(run)} was not begun on this machine, at this place, and it imports code: {', '.join(code)[:200]}."
            f" Look at that code; then run it with --trust, once, or with {VARIABLE}=1."
        )
    note_trusted(run, code)


def note_trusted(run: Path, code: Sequence[str]) -> None:
    """Note that a run may import code. Without a place for notes, later commands on it will ask."""
    if not code or (line := _line(run, code)) in _lines():
        return
    with suppress(OSError, RuntimeError):
        path = notes()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def _line(run: Path, code: Sequence[str]) -> str:
    place = str(run.resolve())
    return f"{digest([place, sorted(code)])} {place!r}"


def _lines() -> set[str]:
    with suppress(OSError, RuntimeError, WmError):
        return set(read_file(notes(), MAX_NOTES_BYTES).decode(errors="replace").splitlines())
    return set()
