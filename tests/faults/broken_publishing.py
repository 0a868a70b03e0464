"""Ways to break how wm writes, each of which the tests of power loss must notice. A warm child calls one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wmcli.artifacts import files, job, manifest, store


def _without_fsync() -> Any:
    return SimpleNamespace(**vars(os) | {"fsync": lambda descriptor: None})


def leave_out_the_fsync_of_files() -> None:
    job.os = _without_fsync()


def leave_out_the_fsync_of_the_manifest() -> None:
    manifest.os = _without_fsync()


def leave_out_the_fsync_of_settings() -> None:
    files.os = _without_fsync()


def leave_out_the_fsync_of_the_folder() -> None:
    job.sync_folder = lambda folder: None


def rename_before_the_manifest() -> None:
    def claim(self: job.Work, body: dict[str, Any]) -> Path:
        version = self.job.run.next_version(self.job.kind)
        target = self.job.folder / manifest.version_name(version)
        self.payload.rename(target)
        manifest.write_manifest(target, {**body, "version": version})
        return target

    job.Work._claim = claim


def write_in_place() -> None:
    def write(path: Path, data: Any) -> None:
        with path.open("wb") as file:
            for part in data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        files.sync_folder(path.parent)

    store.write_durable = write


def remove_before_replacing() -> None:
    write = store.write_durable

    def replace(path: Path, data: Any) -> str:
        path.unlink(missing_ok=True)
        return write(path, data)

    store.write_durable = replace


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way
    for way in (
        leave_out_the_fsync_of_files,
        leave_out_the_fsync_of_the_manifest,
        leave_out_the_fsync_of_settings,
        leave_out_the_fsync_of_the_folder,
        rename_before_the_manifest,
        write_in_place,
        remove_before_replacing,
    )
}
