"""Keys of all settings and values of some, for completion in the shell.

They are parsed from source: importing the sections imports torch, which takes seconds. `tests/cli/test_completion.py`
compares the result with the settings.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Place(NamedTuple):
    """A name in a module: `wmcli.settings`, `Settings`."""

    module: str
    name: str


@functools.cache
def setting_keys() -> dict[str, tuple[str, ...]]:
    """Return the possible values of every key, `section.key`: those of a Literal, true and false, else none.

    The keys of all kinds of a section are included.
    """
    keys: dict[str, tuple[str, ...]] = {}
    for key, value in _keys("", Place("wmcli.settings", "Settings")):
        keys[key] = tuple(dict.fromkeys([*keys.get(key, ()), *value]))
    return keys


def _keys(prefix: str, section: Place) -> Iterator[tuple[str, list[str]]]:
    """Yield every key of a section and of the sections inside it."""
    for name, module, annotation in _fields(section):
        meanings = list(_meanings(module, annotation))
        sections = [each for each in meanings if isinstance(each, Place)]
        for each in sections:
            yield from _keys(f"{prefix}{name}.", each)
        if not sections:
            yield prefix + name, [each for each in meanings if isinstance(each, str)]


def _fields(section: Place) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield `(name, module, annotation)` of a class's fields, those of its bases first."""
    node = _names(section.module)[section.name]
    if isinstance(node, Place):  # imported there
        yield from _fields(node)
        return
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        for place in _meanings(section.module, base):
            if isinstance(place, Place):
                yield from _fields(place)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not _is_class_variable(line):
            yield line.target.id, section.module, line.annotation


def _is_class_variable(line: ast.AnnAssign) -> bool:
    return isinstance(line.annotation, ast.Subscript) and ast.unparse(line.annotation.value) == "ClassVar"


def _meanings(module: str, annotation: ast.expr) -> Iterator[Place | str]:
    """Yield the sections and values that an annotation allows, values as written after `--set key=`."""
    match annotation:
        case ast.Constant(value=str(value)):
            yield value
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _meanings(module, left)
            yield from _meanings(module, right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            yield from _meanings(module, first)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            for value in values:
                yield from _meanings(module, value)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=value):
            yield from _meanings(module, value)
        case ast.Name(id="bool"):
            yield from ("true", "false")
        case ast.Name(id=name) if name in _names(module):
            node = _names(module)[name]
            if isinstance(node, Place):
                if node.module.startswith("wmcli."):
                    yield from _meanings(node.module, ast.Name(node.name))
            elif isinstance(node, ast.ClassDef):
                yield Place(module, name)
            else:
                yield from _meanings(module, node)


@functools.cache
def _names(module: str) -> dict[str, ast.ClassDef | ast.expr | Place]:
    """Return the classes, aliases and imported names at the top level of a module of ours."""
    path = ROOT.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names: dict[str, ast.ClassDef | ast.expr | Place] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef():
                names[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.ImportFrom(module=str(source_module)):
                for alias in node.names:
                    names[alias.asname or alias.name] = Place(source_module, alias.name)
    return names
