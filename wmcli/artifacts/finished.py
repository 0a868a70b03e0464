"""A note of what `wm run` led to, so that the same command on a finished run answers at once.

Without a note the loop recognizes its finished jobs one after another, which takes seconds where there are thousands.
The note counts only while the settings and all versions of the run are those that it was made of. It can be removed at
any time, and a copy of a run has none that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress

from wmcli import __version__
from wmcli.artifacts.files import write_durable
from wmcli.artifacts.job import REVISIONS
from wmcli.artifacts.manifest import KINDS, Artifact, manifest_state, version_name
from wmcli.artifacts.store import BEST, BINDING, LATEST, Run, folder_state, link_target
from wmcli.config import MAX_TOML_BYTES, SCHEMA, digest, is_file
from wmcli.errors import WmError
from wmcli.reading import read_file

NOTE = ".finished.json"
MAX_BYTES = 1 << 20


def note_finished(run: Run, asked: Sequence[str], result: Artifact) -> None:
    """Note what `wm run` led to. A run that is not writable gets no note.

    Args:
        run: The run, which has its settings.
        asked: The command's own settings: `section.key=value` texts.
        result: What the command printed.
    """
    with suppress(WmError, OSError):
        note = {"asked": list(asked), "state": _state(run), "kind": result.kind, "version": result.version}
        if note["state"] is not None:
            write_durable(run.path / NOTE, [json.dumps(note).encode()])


def find_finished(run: Run, preset: str | None, asked: Sequence[str]) -> Artifact | None:
    """Return what `wm run` leads to if it has nothing to do. None if that is not known.

    Args:
        run: The run; it may be missing.
        preset: What the command names, if anything.
        asked: The command's own settings: `section.key=value` texts.
    """
    with suppress(WmError, OSError, ValueError, LookupError, TypeError, RecursionError):
        note = json.loads(read_file(run.path / NOTE, MAX_BYTES))
        if asked and list(asked) != note["asked"]:
            return None
        if preset is not None and (is_file(preset) or preset != (run.bound() or {}).get("preset")):
            return None
        state = _state(run)
        if state is not None and state == note["state"] and note["kind"] in KINDS:
            return run.get(note["kind"], note["version"])
    return None


def _state(run: Run) -> str | None:
    """Return a digest of all that decides what the loop finds to do; None with stopped or unfinished work."""
    if any(run.remains(kind) for kind in KINDS):
        return None
    settings = read_file(run.path / BINDING, MAX_TOML_BYTES).decode()
    return digest([__version__, SCHEMA, REVISIONS, settings, [list(_states(run, kind)) for kind in KINDS]])


def _states(run: Run, kind: str) -> Iterator[tuple[object, ...]]:
    """Yield what changes with a version, for each version of a kind, and where its links lead."""
    folder = run.path / kind
    for version in run.versions(kind):
        place = f"{folder}/{version_name(version)}"
        yield version, manifest_state(place), folder_state(place)
    for name in (LATEST, BEST):
        yield name, link_target(folder / name)
