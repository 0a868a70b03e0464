"""What may be on a disk after the power went, computed from the recorded calls of a command.

The model is that of a journaling file system at its least helpful. What is certain is what was synchronized. Of a file,
bytes that were not may be missing, cut or zero. Of a folder, changes of entries that were not may have reached the disk
or not, each for itself; a rename between two folders reaches the disk in both at once, and synchronizing either folder
is enough. Synchronizing a file does not make its name certain.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fault_shim import Call

SINGLE = 6
"""Uncertain changes of which each is lost alone and kept alone; of more, some are drawn."""
SUBSETS = 3
"""Uncertain changes of which all subsets are tried."""
Tree = dict[str, bytes | str | None]
"""Content of files, targets of links (text) and None for folders, by path."""


@dataclass(eq=False)
class File:
    data: bytes = b""
    certain: bytes = b""


@dataclass(eq=False)
class Link:
    target: str


@dataclass(eq=False)
class Folder:
    entries: dict[str, Node] = field(default_factory=dict)
    certain: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Folder


class Change(NamedTuple):
    """Entries that one call sets (a node) or removes (None)."""

    effects: tuple[tuple[Folder, str, Node | None], ...]

    def touches(self, folders: Iterable[Folder]) -> bool:
        return any(folder is each for folder, _, _ in self.effects for each in folders)

    def apply(self, entries_of: Callable[[Folder], dict[str, Node]]) -> None:
        for folder, name, node in self.effects:
            if node is None:
                entries_of(folder).pop(name, None)
            else:
                entries_of(folder)[name] = node


def _lost(file: File) -> bytes:
    return file.certain


def _cut(file: File) -> bytes:
    least = min(len(file.certain), len(file.data))
    return file.data[: least + (len(file.data) - least) // 2]


def _zeros(file: File) -> bytes:
    kept = len(file.certain) if file.data.startswith(file.certain) else 0
    return file.data[:kept] + bytes(len(file.data) - kept)


def _whole(file: File) -> bytes:
    return file.data


DATA: tuple[Callable[[File], bytes], ...] = (_whole, _lost, _cut, _zeros)
"""What is left of data that were not synchronized."""


class Disk:
    """A disk on which a folder is certain to be, and then calls change it."""

    def __init__(self, place: Path) -> None:
        self._place = PurePosixPath(place)
        self.root = _read(place)
        self.uncertain: list[Change] = []

    def apply(self, call: Call) -> None:
        """Do what a call did. Raises KeyError if it concerns a file that no earlier call can have made."""
        if call.kind in ("mark", "flock", "read") or call.path.endswith(" (deleted)"):
            return
        assert (call.kind, call.other) != ("mmap", "written"), f"{call.path} is written through memory"
        if call.kind == "open":
            folder, name = self._entry(call.path)
            node = folder.entries.get(name)
            if node is None:
                self._change((folder, name, File()))
            elif isinstance(node, File) and call.other == "truncate":
                node.data = b""
        elif call.kind == "write":
            node = self._file(call.path)
            before = node.data[: call.offset].ljust(call.offset, b"\0")
            node.data = before + call.data + node.data[call.offset + len(call.data) :]
        elif call.kind == "truncate":
            node = self._file(call.path)
            node.data = node.data[: call.offset].ljust(call.offset, b"\0")
        elif call.kind == "fsync":
            self._sync(self._node(call.path))
        elif call.kind == "mkdir":
            self._change((*self._entry(call.path), Folder()))
        elif call.kind == "symlink":
            self._change((*self._entry(call.path), Link(call.other)))
        elif call.kind in ("unlink", "rmdir"):
            self._change((*self._entry(call.path), None))
        elif call.kind == "link":
            self._change((*self._entry(call.other), self._node(call.path)))
        elif call.kind == "rename":
            folder, name = self._entry(call.path)
            self._change((folder, name, None), (*self._entry(call.other), folder.entries[name]))

    def tree(self) -> Tree:
        """The folder as programs see it now."""
        return _tree(self.root, lambda folder: folder.entries, _whole)

    def after_power_loss(self, seed: int) -> Iterator[Tree]:
        """Yield what may be on the disk if the power goes now."""
        for kept in self._kept(random.Random(seed)):
            entries = {}

            def entries_of(folder: Folder, entries: dict[Folder, dict[str, Node]] = entries) -> dict[str, Node]:
                return entries.setdefault(folder, dict(folder.certain))

            for change in kept:
                change.apply(entries_of)
            for data in DATA:
                yield _tree(self.root, entries_of, data)

    def _kept(self, rng: random.Random) -> Iterator[list[Change]]:
        """Yield the changes of entries that reach the disk: all, none, all but one, one, and all subsets of a few."""
        changes = self.uncertain
        yield changes
        if len(changes) <= SUBSETS:
            for count in range(len(changes)):
                yield from map(list, itertools.combinations(changes, count))
            return
        yield []
        for change in changes if len(changes) <= SINGLE else [*rng.sample(changes, SINGLE - 2), *changes[-2:]]:
            yield [each for each in changes if each is not change]
            yield [change]

    def _change(self, *effects: tuple[Folder, str, Node | None]) -> None:
        change = Change(effects)
        change.apply(lambda folder: folder.entries)
        self.uncertain.append(change)

    def _sync(self, node: Node) -> None:
        if isinstance(node, File):
            node.certain = node.data
        if not isinstance(node, Folder):
            return
        folders, chosen = [node], set[int]()
        for number in reversed(range(len(self.uncertain))):  # changes of one folder reach the disk in their order
            if self.uncertain[number].touches(folders):
                chosen.add(number)
                folders += [folder for folder, _, _ in self.uncertain[number].effects]
        for number in sorted(chosen):
            self.uncertain[number].apply(lambda folder: folder.certain)
        self.uncertain = [change for number, change in enumerate(self.uncertain) if number not in chosen]

    def _entry(self, path: str) -> tuple[Folder, str]:
        place = PurePosixPath(path)
        folder = self._node(str(place.parent))
        assert isinstance(folder, Folder), path
        return folder, place.name

    def _file(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File), path
        return node

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for name in PurePosixPath(path).relative_to(self._place).parts:
            assert isinstance(node, Folder), path
            child = node.entries[name]
            while isinstance(child, Link):
                child = node.entries[child.target]
            node = child
        return node


def _read(place: Path) -> Folder:
    entries: dict[str, Node] = {}
    for each in place.iterdir():
        if each.is_symlink():
            entries[each.name] = Link(str(each.readlink()))
        elif each.is_dir():
            entries[each.name] = _read(each)
        else:
            entries[each.name] = File(each.read_bytes(), each.read_bytes())
    return Folder(entries, dict(entries))


def _tree(root: Folder, entries_of: Callable[[Folder], Mapping[str, Node]], data: Callable[[File], bytes]) -> Tree:
    found: Tree = {}
    pending: list[tuple[str, Folder]] = [("", root)]
    while pending:
        path, folder = pending.pop()
        for name, node in entries_of(folder).items():
            if isinstance(node, Folder):
                found[f"{path}{name}"] = None
                pending.append((f"{path}{name}/", node))
            else:
                found[f"{path}{name}"] = data(node) if isinstance(node, File) else node.target
    return found


def read_tree(place: Path) -> Tree:
    """Return a folder on this disk as a tree."""
    return _tree(_read(place), lambda folder: folder.entries, _whole)


def write_tree(tree: Tree, place: Path) -> None:
    """Write a tree into a new folder."""
    place.mkdir()
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (place / path).mkdir()
        elif isinstance(content, str):
            (place / path).symlink_to(content)
        else:
            (place / path).write_bytes(content)
