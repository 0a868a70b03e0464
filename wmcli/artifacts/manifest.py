"""An artifact: an immutable folder of files with a manifest of its kind, inputs, settings, metrics and files.

`manifest.json` has one canonical form and contains the sha256 of its own content, without that entry. It lists size and
sha256 of every other file, so every changed byte is detected. A manifest is untrusted input: its size is limited before
parsing, and its paths are checked before use.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from wmcli.artifacts.files import regular_files, sync_folder
from wmcli.config import Section, canonical_json, check_schema, digest, is_deeper, problem, upgrade
from wmcli.errors import ArtifactError, LaterVersionError, MachineError, UsageError
from wmcli.reading import damage, open_file, read_errors, read_file

MANIFEST = "manifest.json"
MODEL = "model.json"
"""File of a folder that `wm export controller` wrote: where the controller in it is."""
MODEL_FORMAT = {"format": "wm-model", "schema": 1}
PRUNED = "pruned"  # marker file: only manifest and pictures remain, to save space
MANIFEST_SCHEMA = 2
"""1 (wm 0.1.0) has no `settings_schema`."""
MAX_MANIFEST_BYTES = 2 << 20  # 50,000 episodes of an evaluation, or 15,000 files; hostile JSON takes a second
MOST_DEPTH = 40  # of tables and lists inside one another
MOST_DIGITS = 40  # of an integer
SAFETENSORS = ".safetensors"
MAX_HEADER_BYTES = 16 << 20  # of a file of tensors; 100,000 tensors have less
FILMS = (".webp", ".gif")
"""Suffixes of films. Artifacts of earlier versions of wm have GIFs."""
PICTURES = frozenset({".png", *FILMS})
"""Suffixes of files for people only: an artifact is usable without them."""
IMAGINATION = "imagination.json"
"""File with the error of each frame of imagined episodes, which is kept as long as their film."""

Kind = Literal["experience", "tokenizer", "dynamics", "controller", "evaluation", "profile"]
KINDS: tuple[Kind, ...] = ("experience", "tokenizer", "dynamics", "controller", "evaluation", "profile")

MAKERS: dict[str, str] = {
    "experience": "wm collect",
    "tokenizer": "wm train-tokenizer",
    "dynamics": "wm train-dynamics",
    "controller": "wm imagine",
    "evaluation": "wm eval",
    "profile": "wm profile",
}
"""The command that makes an artifact of each kind."""

KEY_METRICS: dict[str, tuple[str, ...]] = {
    "experience": ("mean_return", "mean_game_return"),
    "tokenizer": ("reconstruction",),
    "dynamics": ("observation_loss",),
    "controller": ("imagined_return",),
    "evaluation": ("mean",),
}
"""Main metrics of each kind of artifact, if present."""


# -- the manifest's form ----------------------------------------------------------------------------------------------


def _inside(path: str) -> str:
    if not path.isprintable() or "\\" in path or path.startswith("/"):
        raise ValueError(f"{path[:80]!r} is no path inside the artifact")
    if {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"{path[:80]!r} is no path inside the artifact")
    return path


def _input_place(path: str) -> str:
    return "/" + _inside(path.removeprefix("/")) if path.startswith("/") else _inside(path)


Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class FileEntry(Section):
    path: Annotated[str, AfterValidator(_inside)]
    """Inside the artifact, with forward slashes."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: Sha256
    """Of the file's bytes."""


class InputRef(Section):
    """A reference to an input of an artifact."""

    kind: Kind
    version: int = Field(ge=1)
    digest: Sha256
    path: Annotated[str, AfterValidator(_input_place)]
    """Path at publication: relative to the run directory for an input of the same run, else absolute."""

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.version}"


class _Manifest(Section):
    kind: Kind
    version: int = Field(ge=1)
    created: str
    job: Sha256
    preset: str = ""
    settings: dict[str, Any]
    settings_schema: int = 1
    revision: int = Field(1, ge=1)
    environment: dict[str, Any] | None
    inputs: dict[str, InputRef]
    metrics: dict[str, Any]
    machine: dict[str, Any]
    files: list[FileEntry]
    extra: dict[str, Any]
    digest: Sha256


def is_picture(path: str) -> bool:
    """Return whether a file of an artifact is for people only, so that a pruned version keeps it."""
    return PurePosixPath(path).suffix in PICTURES or path == IMAGINATION


def render(manifest: dict[str, Any]) -> bytes:
    """Return a manifest as on disk: canonical JSON with a line for each entry and each file."""
    return _render(manifest)[0]


def _render(manifest: dict[str, Any]) -> tuple[bytes, str]:
    """Return a manifest as on disk, and the digest of its content: the same texts, written once for both."""
    lines, content = [], []
    for key, value in sorted(manifest.items()):
        if key == "files" and value:
            entries = [canonical_json(entry) for entry in value]
            line, text = "[\n  " + ",\n  ".join(entries) + "\n ]", "[" + ",".join(entries) + "]"
        else:
            line = text = canonical_json(value)
        lines.append(f' "{key}": {line}')
        if key != "digest":
            content.append(f'"{key}":{text}')
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return data, hashlib.sha256(("{" + ",".join(content) + "}").encode()).hexdigest()


def write_manifest(folder: Path, body: dict[str, Any]) -> dict[str, Any]:
    """Add schema and digest to `body` and write it durably into `folder`. Return it as read back.

    Raises:
        MachineError: It is larger than readers accept.
    """
    manifest = json.loads(canonical_json({"schema": MANIFEST_SCHEMA, **body}))
    manifest["digest"] = digest(manifest)
    data = render(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise MachineError(
            f"{body['kind']}: its manifest would have {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES};"
            " nothing was published. Make it smaller, for example with fewer --episodes."
        )
    with (folder / MANIFEST).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    return manifest


# -- the artifact -----------------------------------------------------------------------------------------------------

CLOCK_TICK = 2_000_000_000
"""A file that changed within so many nanoseconds may change again under the same time stamp."""

_verified: set[tuple[Path, str]] = set()
_opened: dict[str, tuple[tuple[int, ...], Artifact]] = {}
"""Manifests that this process has read, by the path that they were opened by, with the file's state then. `wm run`
looks through all versions of a run at every stage, and an epoch has several."""


@dataclass(frozen=True)
class Artifact:
    """A published version. `open_artifact` makes it and checks the manifest, not the files."""

    path: Path
    """Absolute path in its run. It may be a link to a folder on another disk."""
    manifest: dict[str, Any]

    @property
    def kind(self) -> Kind:
        kind: Kind = self.manifest["kind"]
        return kind

    @property
    def version(self) -> int:
        return int(self.manifest["version"])

    @property
    def name(self) -> str:
        """Kind and version: `dynamics@3`."""
        return f"{self.kind}@{self.version}"

    @property
    def digest(self) -> str:
        """sha256 of the canonical manifest."""
        return str(self.manifest["digest"])

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of its job, in the schema of this version of wm."""
        with damage(f"{shown(self.path)}/{MANIFEST}: settings"):
            text = _upgraded(canonical_json(self.manifest["settings"]), self.manifest.get("settings_schema", 1))
        settings: dict[str, Any] = json.loads(text)
        return settings

    @property
    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = copy.copy(self.manifest["metrics"])
        return metrics

    @functools.cached_property
    def inputs(self) -> dict[str, InputRef]:
        """Inputs by role."""
        return {role: InputRef.model_validate(value) for role, value in self.manifest["inputs"].items()}

    @property
    def run(self) -> Path:
        """Its run directory."""
        return self.path.parent.parent

    @property
    def pruned(self) -> bool:
        """Whether only manifest and pictures remain."""
        with read_errors(self.path):
            return (self.path / PRUNED).exists()

    def __str__(self) -> str:
        return f"{self.name} ({shown(self.path)})"

    def file(self, name: str) -> Path:
        """Verify the artifact and return the path of one of its files or folders."""
        self.verify()
        files = [entry["path"] for entry in self.manifest["files"]]
        if not any(each == name or each.startswith(f"{name}/") for each in files):
            raise ArtifactError(f"{self} has no {name!r}; it has: {', '.join(files)}. {self._remedy()}")
        return self.path / name

    def verify(self) -> None:
        """Check every file except pictures against the manifest, once per process.

        Raises:
            ArtifactError: A file is damaged; the message names the first one.
            MachineError: A file cannot be read, so that nothing is known about it.
        """
        if (self.path, self.digest) not in _verified or self.pruned:
            self.verify_again()
            self.mark_verified()

    def mark_verified(self) -> None:
        """Take the files to be as in the manifest for the rest of this process, which has just read or written them."""
        _verified.add((self.path, self.digest))

    def verify_again(self) -> None:
        """Check the files as `verify` does, also if this process has checked them before."""
        if problem := self._problem(pictures=False):
            raise ArtifactError(problem)

    def damaged_picture(self) -> str | None:
        """Return a message that names a missing or changed picture, or None."""
        return self._problem(pictures=True)

    def _problem(self, *, pictures: bool) -> str | None:
        """Return a message about damage in the pictures or in all other files, or None."""
        if self.pruned:
            return f"{self} was pruned: only manifest and pictures remain. {self._remedy()}"
        try:
            with read_errors(self.path):
                return self._compare(regular_files(self.path, str(self)), pictures)
        except ArtifactError as error:
            return str(error)
        except OSError as error:
            return f"{self}: {error.filename or self.path}: {error.strerror}. {self._remedy()}"

    def _compare(self, sizes: dict[str, int], pictures: bool) -> str | None:
        listed = {entry["path"]: entry for entry in self.manifest["files"]}
        chosen = {path: entry for path, entry in listed.items() if is_picture(path) == pictures}
        for path, entry in chosen.items():
            if path not in sizes:
                return f"{self}: file {path!r} is missing. {self._remedy()}"
            if sizes[path] != entry["size"]:
                return f"{self}: file {path!r} has {sizes[path]} bytes instead of {entry['size']}. {self._remedy()}"
            if path.endswith(SAFETENSORS) and not _has_header(self.path / path, entry["size"]):
                return f"{self}: file {path!r} is no file of tensors. {self._remedy()}"
        for path in sizes:
            # An unlisted file could be read as a chunk of an array. File managers write hidden files.
            if path not in listed and path != MANIFEST and not path.split("/")[-1].startswith("."):
                return f"{self}: file {path!r} is not in its manifest; remove it."
        for path, entry in chosen.items():
            with open_file(self.path / path) as file, read_errors(self.path / path):
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{self}: file {path!r} is damaged: its sha256 is wrong. {self._remedy()}"
        return None

    def input(self, role: str) -> Artifact:
        """Open an input. Raises ArtifactError if it is missing or has changed, MachineError if it cannot be read."""
        if role not in self.inputs:
            raise ArtifactError(f"{self} names no {role} that it was made from. {self._remedy()}")
        reference = self.inputs[role]
        place = self.run / reference.path
        try:
            artifact = open_artifact(place)
        except ArtifactError as error:
            copied = self.run / reference.kind / version_name(reference.version)
            with suppress(ArtifactError):  # an exported controller has its inputs beside it, wherever they were
                if (beside := open_artifact(copied)).digest == reference.digest:
                    return beside
            raise ArtifactError(
                f"{self} was made from {reference.name} ({reference.digest[:12]}), which cannot be read: {error}"
            ) from None
        if artifact.digest != reference.digest:
            raise ArtifactError(
                f"{self} was made from {reference.name} ({reference.digest[:12]}), but {shown(place)} is now"
                f" another one ({artifact.digest[:12]}). {self._remedy()}"
            )
        return artifact

    def _remedy(self) -> str:
        again = f"{make_command(self.kind, self.run)} --force"
        if self.kind == "experience":  # collecting again would append to it
            return "Restore it from a copy, or collect into another --run."
        return f"Restore it from a copy, or make it and everything made from it again: {again}"


@functools.lru_cache(maxsize=16)
def _upgraded(settings: str, schema: int) -> str:
    """Return settings in today's schema, as JSON; the artifacts of a run have mostly the same."""
    return canonical_json(upgrade(json.loads(settings), schema))


def open_artifact(path: Path | str) -> Artifact:
    """Read and check the manifest of a version, without its files.

    Args:
        path: A version directory, the `manifest.json` in it, or a folder that `wm export controller` wrote.

    Raises:
        ArtifactError: There is no manifest, it is damaged, or a newer wm wrote it.
        MachineError: It cannot be read.
    """
    key = str(path)
    if (known := _opened.get(key)) is not None and known[0] == manifest_state(key) == manifest_state(known[1].path):
        return known[1]
    path = Path(path)
    if path.name == MANIFEST and not path.is_dir():
        path = path.parent
    if (state := manifest_state(path)) is None:
        path = _exported(path)
        state = manifest_state(path)
    where = f"{shown(path)}/{MANIFEST}"
    try:
        with read_errors(f"{shown(path)}/{MANIFEST}"):
            place = _place(path)
        data = read_file(place / MANIFEST, MAX_MANIFEST_BYTES)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{where}: {reason}; list artifacts with: wm artifacts") from None
    artifact = Artifact(place, _parse(data, where))
    if state is not None and time.time_ns() - max(state[-2:]) > CLOCK_TICK and state == manifest_state(place):
        _opened[key] = state, artifact
    return artifact


def _exported(path: Path) -> Path:
    """Return the controller in a folder that `wm export controller` wrote; any other path as it is."""
    marker = path / MODEL
    with (
        suppress(ArtifactError, OSError, ValueError, TypeError, AttributeError, RecursionError),
        read_errors(marker),
    ):
        if marker.is_file():
            values = json.loads(read_file(marker, MAX_MANIFEST_BYTES))
            place = values.get("controller") if {**values, **MODEL_FORMAT} == values else None
            if isinstance(place, str) and re.fullmatch(rf"controller/{VERSION_NAME.pattern}", place):
                return path / place
    return path


def manifest_state(folder: Path | str) -> tuple[int, ...] | None:
    """Return numbers that change when the manifest in a folder changes; None without a manifest."""
    try:
        status = os.stat(f"{folder}/{MANIFEST}")  # noqa: PTH116 (twice as fast, and this is the most frequent call)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _place(path: Path) -> Path:
    """Return the path of an artifact in its run, without links above it.

    A version may be a link to another disk: it remains a version of its run and finds its inputs from there. Links to
    versions, such as `latest`, are followed.
    """
    there = path.absolute()
    if there.is_symlink():
        there.resolve(strict=True)  # raises an error in a loop of links, which would be followed for ever
    while not VERSION_NAME.fullmatch(there.name) and there.is_symlink():
        there = there.parent / there.readlink()
    if VERSION_NAME.fullmatch(there.name):
        return there.parent.resolve(strict=True) / there.name
    return path.resolve(strict=True)


class MissingEntryError(ArtifactError, KeyError):
    """A file lacks an entry that this version of wm needs."""

    __str__ = ArtifactError.__str__  # KeyError would quote the message


class Table(dict[str, Any]):
    """A table of JSON that anybody may have written. An entry that is missing is damage."""

    def __init__(self, where: str, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise MissingEntryError(f"{self._where}: has no entry {key!r}, so wm cannot use it; restore it from a copy.")


_NUMBER = (int, float)
ENTRY_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    "metrics": {
        **dict.fromkeys(("protocol", "environment", "format"), (str,)),
        **dict.fromkeys(("episodes", "sequences"), (int,)),
        **dict.fromkeys(("total_steps", "total_episodes", "updates"), (*_NUMBER, type(None))),
        "source": (dict,),
    },
    "environment": {
        **dict.fromkeys(("id", "protocol"), (str,)),
        **dict.fromkeys(("train", "test", "versions"), (dict,)),
        "size": (int,),
    },
    "machine": {"precision": (str,), "ranks": (int,), "wm": (str,)},
    "extra": {"epoch": (int, type(None))},
}
"""Types of entries that readers take for granted, where a manifest has them."""
OF_RETURNS = ("mean", "median", "stderr", "human_normalized", "random_mean")
"""Metrics of an evaluation by returns that are numbers, or unknown."""


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        manifest = json.loads(data, parse_int=_integer, object_hook=lambda table: Table(where, table))
        if not isinstance(manifest, dict) or "schema" not in manifest:
            raise ArtifactError(f"{where}: not a manifest.")
        if is_deeper(manifest, MOST_DEPTH):
            raise ArtifactError(f"{where}: not a manifest: nested more than {MOST_DEPTH} deep.")
        schema = manifest["schema"]
        if schema not in (1, MANIFEST_SCHEMA) or isinstance(schema, bool):
            raise LaterVersionError(
                f"{where}: manifest schema {str(schema)[:20]}, but this wm reads 1 and {MANIFEST_SCHEMA}; use the wm"
                " that wrote it."
            )
        body = {key: value for key, value in manifest.items() if key != "schema"}
        checked = _Manifest.model_validate(body)
        try:
            check_schema(checked.settings_schema, where)
        except UsageError as error:
            raise LaterVersionError(str(error)) from None
        paths = [entry.path for entry in checked.files]
        if len(set(paths)) != len(paths) or {MANIFEST, PRUNED} & set(paths):
            raise ArtifactError(f"{where}: lists a file twice, or itself.")
        whole = _render(manifest) == (data, checked.digest)
    except ValidationError as error:
        raise ArtifactError(f"{where}: {problem(_Manifest, body, error)}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not valid JSON: {str(error)[:200]}") from None
    if not whole:
        raise ArtifactError(f"{where}: was changed after publication (its digest does not match); restore it.")
    _check_entries(manifest, where)
    if manifest["environment"] is None and manifest["kind"] != "profile":
        manifest["environment"] = Table(where, {})  # whoever needs an entry says so
    return manifest


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _check_entries(manifest: Mapping[str, Any], where: str) -> None:
    """Raise ArtifactError where entries that readers take for granted are of another type."""
    metrics, kind = manifest["metrics"], manifest["kind"]
    is_score = kind == "evaluation" and metrics.get("protocol") == "returns"
    keys = OF_RETURNS if is_score else KEY_METRICS.get(kind, ()) if kind != "evaluation" else ()
    numbers = dict.fromkeys(keys, (*_NUMBER, type(None)))
    for name, types in ENTRY_TYPES.items():
        types = types | numbers if name == "metrics" else types
        for key, value in (manifest[name] or {}).items():
            if key in types and (not isinstance(value, types[key]) or isinstance(value, bool)):
                raise ArtifactError(f"{where}: {name}.{key} is {str(value)[:40]}, which wm never writes there.")
    if is_score and not _are_numbers(metrics.get("returns", [])):
        raise ArtifactError(f"{where}: metrics.returns are no numbers.")
    try:
        is_timed = datetime.fromisoformat(manifest["created"]).tzinfo is not None
    except ValueError:
        is_timed = False
    if not is_timed:
        raise ArtifactError(f"{where}: created is {manifest['created'][:40]!r}, no time with its zone.")


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, _NUMBER) and not isinstance(each, bool) for each in values)


def _has_header(path: Path, size: int) -> bool:
    """Return whether a large file begins with a header as files of tensors have. Hashing it would take seconds."""
    if size <= MAX_HEADER_BYTES:
        return True
    with open_file(path) as file, read_errors(path):
        length = int.from_bytes(file.read(8), "little")
    return length <= min(MAX_HEADER_BYTES, size - 8)


def finite(value: Any) -> Any:
    """Return a value with NaN and infinity, which JSON lacks, replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(each) for each in value)
    return value


# -- names ------------------------------------------------------------------------------------------------------------


def shown(path: Path) -> str:
    """Return a path for messages: relative if it is below the current folder."""
    text, here = str(path), os.getcwd().rstrip("/")  # noqa: PTH109 (a path would take as long as reading a manifest)
    return "." if text == here else text.removeprefix(f"{here}/") if here else text


def film_of(artifact: Artifact, name: str) -> Path | None:
    """Return the path of an artifact's film, such as "imagination", whichever version of wm wrote it. None without."""
    paths = (artifact.path / f"{name}{suffix}" for suffix in FILMS)
    return next((path for path in paths if path.is_file()), None)


def make_command(kind: str, run: Path) -> str:
    """Return the command that makes an artifact of a kind in a run."""
    return f"{MAKERS[kind]} --run {shlex.quote(shown(run))}"


VERSION_NAME = re.compile(r"v([0-9]{4,9})")


def version_name(version: int) -> str:
    """Return the folder name of a version: `v0007` for 7."""
    return f"v{version:04d}"
