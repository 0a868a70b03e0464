"""The parameters that a docstring describes under `Args:` are those of the signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def described(docstring: str) -> set[str]:
    """Return the names under `Args:`, without stars."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^    ([\w*, ]+):", section[1], re.MULTILINE) if section else []
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def parameters(node: Function) -> set[str]:
    given = node.args
    each = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return {argument.arg for argument in each}


def unknown_parameters(tree: ast.Module) -> Iterator[str]:
    """Yield "line name: parameter" for described parameters that do not exist. A class describes `__init__`'s."""
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef):
            continue
        functions = [node] if isinstance(node, Function) else [each for each in node.body if isinstance(each, Function)]
        taker = next((each for each in functions if each is node or each.name == "__init__"), None)
        if taker:
            for name in sorted(described(ast.get_docstring(node) or "") - parameters(taker)):
                yield f"{node.lineno} {node.name}: {name}"


def test_docstrings_describe_parameters_that_exist() -> None:
    files = [file for top in ("wmcli", "kernels") for file in sorted((ROOT / top).rglob("*.py"))]
    assert len(files) > 100
    wrong = [f"{file}:{each}" for file in files for each in unknown_parameters(ast.parse(file.read_text()))]
    assert not wrong, wrong


def test_unknown_parameters_are_reported() -> None:
    source = '''
class Box:
    """A box.

    Args:
        width, height: In cells.

    Raises:
        ValueError: It is empty.
    """

    def __init__(self, width): ...

def fill(box, *more, **settings):
    """Fill.

    Args:
        box: As it is:
            empty.

        *more: Others.
        memory: Gone.
    """
'''
    assert list(unknown_parameters(ast.parse(source))) == ["2 Box: height", "14 fill: memory"]
