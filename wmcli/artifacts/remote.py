"""Runs elsewhere: copies at any URL of fsspec (file, s3, gs, hf, ...), checked on arrival.

A copy has the versions of the run as they are, the settings and the metrics, and an index that is written last:

    wm-run.json                           every version with its digest, every file with its size and sha256
    files/<sha256>-run.toml               also metrics.jsonl
    dynamics/v0003/manifest.json ...      as in the run

So an interrupted push leaves the copy as it was. Checkpoints of unfinished work, locks, TensorBoard's files and
`used-by.txt`, which names folders of one machine, stay behind.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.artifacts.files import discard, disk_errors, make_folder, regular_files, sync_folder, write_durable
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.manifest import KINDS, VERSION_NAME, Artifact, open_artifact, shown
from wmcli.artifacts.store import BEST, BINDING, MAX_METRICS_BYTES, Run
from wmcli.config import canonical_json
from wmcli.errors import ArtifactError, MachineError, UsageError, WmError
from wmcli.progress import Bar, Progress
from wmcli.reading import open_file, read_errors, read_file

INDEX = "wm-run.json"
FORMAT = {"format": "wm run", "schema": 1}
METRICS = "metrics.jsonl"
MAX_INDEX_BYTES = 1 << 28
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "hf", "abfs", "az", "oss"}
CHUNK_BYTES = 1 << 22
AT_ONCE = 8  # files; Hugging Face makes a commit of each, and takes one at a time
_VERSION = re.compile(rf"({'|'.join(KINDS)})/{VERSION_NAME.pattern}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _File(NamedTuple):
    """A file of a copy."""

    path: str
    """In the copy."""
    size: int
    sha256: str


class _Store:
    """A folder at a URL."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise UsageError("copies elsewhere need fsspec: pip install 'wmcli[remote]'") from None
        self.url = url.rstrip("/")
        with _store_errors(url):
            self.files, root = fsspec.core.url_to_fs(self.url)
        self._root = root.rstrip("/")
        named = self.files.protocol
        self.protocols = {named} if isinstance(named, str) else set(named)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read_index(self) -> dict[str, Any] | None:
        """Return the index, None without one. Raises ArtifactError if it is none."""
        with _store_errors(self.url):
            try:
                if self.files.size(self.path(INDEX)) > MAX_INDEX_BYTES:
                    raise ArtifactError(f"{self.url}/{INDEX}: larger than {MAX_INDEX_BYTES} bytes: no index of a run.")
                data = self.files.cat_file(self.path(INDEX))
            except FileNotFoundError:
                return None
        try:
            return _checked(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{self.url}/{INDEX}: no index of a run, or a damaged one: {error}") from None

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        """Write a file, which appears whole: in object stores by itself, elsewhere as far as fsspec can."""
        with _store_errors(self.url):
            if not OBJECT_STORES.intersection(self.protocols):  # those have no folders, and would make a bucket
                self.files.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
            if "file" in self.protocols:  # fsspec writes to /tmp and copies from there
                write_durable(Path(self.path(name)), parts)
                return
            with self.files.open(self.path(name), "wb", autocommit=False) as file:
                for part in parts:
                    file.write(part)
            file.commit()

    def read(self, name: str) -> Iterator[bytes]:
        with _store_errors(self.url), self.files.open(self.path(name), "rb") as file:
            while part := file.read(CHUNK_BYTES):
                yield part


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Turn any error of a file system, which may be of a library of its own, into one line."""
    try:
        yield
    except WmError:
        raise
    except ImportError as error:
        raise UsageError(f"{url}: {error}; or pip install 'wmcli[remote]'") from None
    except ValueError as error:
        raise UsageError(f"{url}: {' '.join(str(error).split())[:200]}") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise MachineError(f"{url}: {type(error).__name__}: {reason}") from error


# -- push -------------------------------------------------------------------------------------------------------------


def push(run: Run, url: str, progress: Progress) -> dict[str, Any]:
    """Copy a run to a URL, or the versions that a copy there lacks.

    Args:
        run: The run. Every version is verified before it is sent.
        url: A folder.
        progress: Display of progress.

    Returns:
        `url`, and the names of the `versions` that were sent.

    Raises:
        ArtifactError: A version is damaged, or the copy is of another run.
        UsageError, MachineError: The store refuses.
    """
    store = _Store(url)
    index = store.read_index() or {**FORMAT, "files": {}, "versions": {}, "best": None}
    new: dict[str, Artifact] = {}
    for artifact in _versions(run):
        key = f"{artifact.kind}/{artifact.path.name}"
        there = index["versions"].get(key)
        if there is None:
            new[key] = artifact
        elif there["digest"] != artifact.digest:
            raise ArtifactError(
                f"{url} has another {artifact.name} ({there['digest'][:12]}) than {run} ({artifact.digest[:12]}):"
                " it is a copy of another run; give another URL."
            )
    _warn_of_other_runs(run, new, url, progress)
    with disk_errors(run.path):
        sent = {key: _files_of(artifact) for key, artifact in new.items()}
        changing = {name: _of_file(run.path / name) for name in (BINDING, METRICS) if (run.path / name).exists()}
    before = dict(index["files"])
    todo = [(run.path / key / path.path, f"{key}/{path.path}", path) for key, files in sent.items() for path in files]
    todo += [
        (run.path / name, file.path, file) for name, file in changing.items() if before.get(name) != file._asdict()
    ]

    def send(each: tuple[Path, str, _File], count: Callable[[int], None]) -> None:
        local, name, file = each
        store.write(name, _counted(_checked_parts(_parts(local), file, shown(local)), count))

    _in_parallel("push", store, todo, send, progress)
    index["files"] = {name: file._asdict() for name, file in changing.items()}
    for key, files in sent.items():
        index["versions"][key] = {"digest": new[key].digest, "files": [file._asdict() for file in files]}
    index["best"] = _best(run)
    store.write(INDEX, iter([canonical_json(index).encode()]))
    with suppress(MachineError, UsageError), _store_errors(url):  # no reader needs them any more
        for name, file in before.items():
            if index["files"].get(name) != file:
                store.files.rm_file(store.path(file["path"]))
    return {"url": store.url, "versions": [artifact.name for artifact in new.values()]}


def _versions(run: Run) -> Iterator[Artifact]:
    for kind in KINDS:
        for version in run.versions(kind):
            artifact = run.get(kind, version)
            if not artifact.pruned:
                artifact.verify()
            yield artifact


def _files_of(artifact: Artifact) -> list[_File]:
    """Return all files of a version: of a pruned one those that are left."""
    listed = {entry["path"]: entry["sha256"] for entry in artifact.manifest["files"]}
    sizes = regular_files(artifact.path, str(artifact))
    return [
        _File(path, size, listed.get(path) or _sha256(artifact.path / path))
        for path, size in sizes.items()
        if path in listed or not path.split("/")[-1].startswith(".")
    ]


def _of_file(path: Path) -> _File:
    sha256 = _sha256(path, MAX_METRICS_BYTES)
    return _File(f"files/{sha256}-{path.name}", path.stat().st_size, sha256)


def _sha256(path: Path, limit: int | None = None) -> str:
    with open_file(path, limit) as file, read_errors(path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def _best(run: Run) -> str | None:
    link = run.path / "controller" / BEST
    return link.resolve().name if link.exists() else None


def _warn_of_other_runs(run: Run, new: Mapping[str, Artifact], url: str, progress: Progress) -> None:
    for artifact in new.values():
        for reference in artifact.inputs.values():
            if Path(reference.path).is_absolute():
                other = Path(reference.path).parent.parent
                progress.warn(
                    f"{artifact.name} was made from {reference.name} of another run, which does not travel with this"
                    f" one: wm push {shown(other)} {url.rpartition('/')[0]}/{other.name}"
                )


# -- pull -------------------------------------------------------------------------------------------------------------


def pull(url: str, folder: Path, progress: Progress) -> dict[str, Any]:
    """Copy a run from a URL, or the versions that the folder lacks. Everything is checked before it gets there.

    Args:
        url: Where `push` put it.
        folder: The run directory: new, or an earlier copy of the same run.
        progress: Display of progress.

    Returns:
        `run`, its folder, and the names of the `versions` that were fetched.

    Raises:
        ArtifactError: There is no complete copy, a file was damaged on the way, or the folder holds another run.
        UsageError, MachineError: The store or the disk refuses.
    """
    store = _Store(url)
    index = store.read_index()
    if index is None:
        raise ArtifactError(f"{url}: no {INDEX}: no run was pushed there, or not to its end; see: wm push --help")
    run = Run(folder.absolute())
    missing = _missing(run, index, url)
    with disk_errors(folder):
        make_folder(run.path.parent)
        draft = run.path.with_name(f".{run.path.name}.pull-{uuid.uuid4().hex[:8]}")
        try:
            _fetch(store, index, missing, draft, progress)
            versions = [open_artifact(draft / key) for key in missing]
            for artifact in versions:
                if not artifact.pruned:
                    artifact.verify_again()
            _merge(run, index, missing, draft, url)
        finally:
            with suppress(OSError):  # it would hide the error that ended the block
                discard(draft)
    for key in missing:
        run.point_latest(key.partition("/")[0])
    if index["best"] is not None and (run.path / "controller" / index["best"]).exists():
        with disk_errors(folder):
            run.point("controller", BEST, int(index["best"][1:]))
    return {"run": str(run.path), "versions": [artifact.name for artifact in versions]}


def _missing(run: Run, index: Mapping[str, Any], url: str) -> list[str]:
    """Return the versions of the index that the run lacks. Raises ArtifactError where it has another one."""
    missing = []
    for key, version in sorted(index["versions"].items(), key=lambda each: _order(each[0])):
        kind, _, name = key.partition("/")
        if not (run.path / kind / name).exists():
            missing.append(key)
            continue
        here = run.get(kind, int(name[1:]))
        if here.digest != version["digest"]:
            raise ArtifactError(
                f"{run} has another {here.name} ({here.digest[:12]}) than {url} ({version['digest'][:12]}):"
                " two different runs; give another --run."
            )
    return missing


def _order(key: str) -> tuple[int, int]:
    """Return the place of a version among the others: inputs come before what was made from them, mostly."""
    kind, _, name = key.partition("/")
    return KINDS.index(kind), int(name[1:])


def _fetch(store: _Store, index: Mapping[str, Any], missing: list[str], draft: Path, progress: Progress) -> None:
    """Download versions, settings and metrics to a new folder, and check them against the index."""
    todo = [
        (f"{key}/{file['path']}", draft / key / file["path"], _File(**file))
        for key in missing
        for file in index["versions"][key]["files"]
    ]
    todo += [(file["path"], draft / name, _File(**file)) for name, file in index["files"].items()]
    for _, local, _ in todo:
        local.parent.mkdir(parents=True, exist_ok=True)

    def receive(each: tuple[str, Path, _File], count: Callable[[int], None]) -> None:
        name, local, file = each
        with local.open("wb") as target:
            for part in _counted(_checked_parts(store.read(name), file, f"{store.url}/{name}"), count):
                target.write(part)

    _in_parallel("pull", store, todo, receive, progress)


def _merge(run: Run, index: Mapping[str, Any], missing: list[str], draft: Path, url: str) -> None:
    """Move what was fetched into the run, version by version. Metrics and settings are taken where they go on."""
    make_folder(run.path)
    with exclusive(run.path, str(run)):
        ours, theirs = (
            read_file(path, MAX_METRICS_BYTES) if path.exists() else b"" for path in (run.metrics, draft / METRICS)
        )
        if not (theirs.startswith(ours) or ours.startswith(theirs)):
            raise ArtifactError(f"{run}: its {METRICS} is not that of {url}: two different runs; give another --run.")
        for key in missing:
            kind = run.path / key.partition("/")[0]
            make_folder(kind)
            with exclusive(kind, f"{kind.name} in {run}"):
                (draft / key).rename(run.path / key)
                sync_folder(kind)
        if theirs.startswith(ours):
            for name in index["files"]:
                write_durable(run.path / name, [(draft / name).read_bytes()])


# -- both -------------------------------------------------------------------------------------------------------------


def _checked(index: Any) -> dict[str, Any]:
    """Return an index, if it has the form of one. Raises ValueError."""
    if {**index, **FORMAT} != index:
        form, schema = repr(index.get("format"))[:40], repr(index.get("schema"))[:20]
        raise ValueError(f"format {form}, schema {schema}, but this wm reads {FORMAT}; use the wm that wrote it")
    for key, version in index["versions"].items():
        if not _VERSION.fullmatch(key) or not _SHA256.fullmatch(version["digest"]):
            raise ValueError(f"version {key[:80]!r}")
        for file in version["files"]:
            _check_file(file)
    for name, file in index["files"].items():
        if name not in (BINDING, METRICS) or file["path"] != f"files/{file['sha256']}-{name}":
            raise ValueError(f"file {name[:80]!r}")
        _check_file(file)
    if index["best"] is not None and not VERSION_NAME.fullmatch(index["best"]):
        raise ValueError("best")
    return dict(index)


def _check_file(file: Mapping[str, Any]) -> None:
    parts = file["path"].split("/")
    inside = all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
    known = file.keys() == {*_File._fields} and isinstance(file["size"], int) and _SHA256.fullmatch(file["sha256"])
    if not inside or not known:
        raise ValueError(f"file {file['path'][:80]!r} leaves its folder, or has other keys than path, size and sha256")


def _parts(path: Path) -> Iterator[bytes]:
    with open_file(path) as file, read_errors(path):
        while part := file.read(CHUNK_BYTES):
            yield part


def _checked_parts(parts: Iterator[bytes], file: _File, where: str) -> Iterator[bytes]:
    """Yield the parts of a file. Raises ArtifactError at their end if they are not those of `file`."""
    sha256, size = hashlib.sha256(), 0
    for part in parts:
        sha256.update(part)
        size += len(part)
        yield part
    if size != file.size:
        raise ArtifactError(f"{where}: has {size} bytes instead of {file.size}; nothing was kept.")
    if sha256.hexdigest() != file.sha256:
        raise ArtifactError(f"{where}: its sha256 is wrong: it was damaged on the way; nothing was kept.")


def _counted(parts: Iterator[bytes], count: Callable[[int], None]) -> Iterator[bytes]:
    for part in parts:
        yield part
        count(len(part))


def _in_parallel(
    label: str,
    store: _Store,
    todo: list[Any],
    work: Callable[[Any, Callable[[int], None]], None],
    progress: Progress,
) -> None:
    """Copy some files at once, with a bar over their bytes."""
    total = sum(each[2].size for each in todo)
    at_once = 1 if "hf" in store.protocols else AT_ONCE
    with progress.bar(label, max(1, total // 10**6), "MB") as bar, ThreadPoolExecutor(at_once) as workers:
        counter = _Counter(bar)
        jobs = [workers.submit(work, each, counter.add) for each in todo]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


class _Counter:
    """Adds bytes of several threads up for a bar of megabytes."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._lock = bar, threading.Lock()
        self._bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            before = self._bytes // 10**6
            self._bytes += count
            self._bar.advance(self._bytes // 10**6 - before)
