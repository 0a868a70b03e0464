"""Imports run downwards only, as the table of rooms in docs/architecture.md says."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FLOOR = {
    "errors",
    "config",
    "interrupt",
    "progress",
    "spaces",
    "transfer",
    "memory",
    "ranks",
    "reading",
}  # anyone may import them; `wmcli` itself imports only `api`, late

# Room -> the other rooms it may import. A room is a folder or a file directly in wmcli/.
MAY = {
    "__main__": {"cli"},
    "cli": {
        "sweeps",
        "stages",
        "assemble",
        "settings",
        "artifacts",
        "browser",
        "exchange",
        "experience",
        "envs",
        "metrics",
        "report",
    },
    "stages": {
        "browser",
        "assemble",
        "settings",
        "trainers",
        "controllers",
        "world_models",
        "tokenizers",
        "backbones",
        "nn",
        "kernels",
        "training",
        "exchange",
        "experience",
        "artifacts",
        "envs",
        "metrics",
        "report",
    },
    "sweeps": {"stages", "settings", "exchange", "artifacts", "metrics"},
    "api": {
        "dream",
        "nn",
        "stages",
        "trainers",
        "assemble",
        "settings",
        "controllers",
        "world_models",
        "training",
        "experience",
        "artifacts",
        "envs",
    },
    "dream": {
        "report",
        "trainers",
        "assemble",
        "controllers",
        "world_models",
        "nn",
        "training",
        "experience",
        "artifacts",
    },
    "trainers": {"controllers", "world_models", "tokenizers", "backbones", "nn", "training", "experience"},
    "assemble": {"settings", "controllers", "world_models", "tokenizers", "backbones", "nn", "training", "artifacts"},
    "settings": {"controllers", "world_models", "tokenizers", "backbones", "nn", "training", "envs"},
    "controllers": {"world_models", "nn", "kernels"},
    "world_models": {"tokenizers", "backbones", "nn"},
    "tokenizers": {"nn", "kernels"},
    "backbones": {"nn", "kernels"},
    "nn": {"kernels"},
    "kernels": set(),
    "training": {"artifacts", "kernels"},
    "exchange": {"experience", "envs"},
    "experience": {"artifacts", "envs"},
    "artifacts": set(),
    "envs": set(),
    "browser": set(),
    "metrics": set(),
    "report": set(),
    "presets": set(),
    "errors": set(),
    "config": {"presets"},
    "ranks": set(),
    "interrupt": set(),
    "progress": set(),
    "spaces": set(),
    "transfer": set(),
    "memory": set(),
    "reading": set(),
}
NO_TORCH = {
    "errors",
    "config",
    "interrupt",
    "progress",
    "transfer",
    "memory",
    "reading",
    "ranks",
    "artifacts",
    "browser",
    "envs",
    "metrics",
    "report",
    "cli",
    "presets",
    "experience",
    "exchange",
}


class Import(NamedTuple):
    file: str
    line: int
    room: str
    """Of the file that imports."""
    module: str
    """Absolute, down to the imported name: `wmcli.config.Section`."""
    when: str
    """module: while the file is imported. function: when a function is called. typing: only for type checkers."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(file: Path, module: str) -> Iterator[Import]:
    """Every import in a file; `module` is its dotted name."""
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, room_of(module), alias.name, when)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(name, node.lineno, room_of(module), f"{source}.{alias.name}", when)
        for child in ast.iter_child_nodes(node):
            inside = when
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inside = "function" if when == "module" else when
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and child in node.body:
                inside = "typing"
            yield from visit(child, inside)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), "module")


def room_of(module: str) -> str:
    """`wmcli.nn.lpips` -> `nn`; empty for wmcli itself and what it takes from its own __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__version__" else ""


def all_imports() -> list[Import]:
    found: list[Import] = []
    for top, package in {"wmcli": "wmcli", "kernels": "wmcli.kernels", "presets": "wmcli.presets"}.items():
        files = sorted((ROOT / top).rglob("*.py"))
        assert files
        for file in files:
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            found += imports_of(file, ".".join([package, *(part for part in parts if part != "__init__")]))
    return found


IMPORTS = all_imports()
OURS = [each for each in IMPORTS if each.module.split(".")[0] == "wmcli"]


def reaches(imports: list[Import], *prefixes: str) -> list[str]:
    """Those that import something at or below one of the dotted `prefixes`."""
    return [str(each) for each in imports if any(f"{each.module}.".startswith(f"{prefix}.") for prefix in prefixes)]


def test_every_room_is_in_the_table() -> None:
    rooms = {each.room for each in IMPORTS} - {""}
    assert rooms <= set(MAY), rooms - set(MAY)
    folders = {folder.name for folder in (ROOT / "wmcli").iterdir() if any(folder.glob("*.py"))}
    documented = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (folders | {"kernels", "presets"}) - {"__pycache__"}:
        assert re.search(rf"`(wmcli/)?{folder}/`", documented), f"{folder}/ is not in docs/architecture.md"
        assert folder in MAY


def test_the_table_itself_has_no_circle() -> None:
    def below(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " -> ".join((*path, room))
        for lower in MAY[room]:
            below(lower, (*path, room))

    below("__main__", ())


@pytest.mark.parametrize("room", sorted(MAY))
def test_imports_run_downwards_only(room: str) -> None:
    allowed = MAY[room] | FLOOR | {room, ""}
    wrong = [str(each) for each in OURS if each.room == room and room_of(each.module) not in allowed]
    assert not wrong, wrong


def test_a_controller_knows_only_the_contract_of_world_models() -> None:
    mine = [each for each in OURS if each.room == "controllers" and room_of(each.module) == "world_models"]
    assert mine and reaches(mine, "wmcli.world_models.base") == [str(each) for each in mine]


def test_a_world_model_knows_only_the_contract_of_backbones() -> None:
    mine = [each for each in OURS if each.room == "world_models" and room_of(each.module) == "backbones"]
    assert mine and reaches(mine, "wmcli.backbones.base") == [str(each) for each in mine]


def test_quick_commands_import_no_torch() -> None:
    light = [each for each in IMPORTS if each.room in NO_TORCH and each.when == "module"]
    assert reaches([each for each in IMPORTS if each.room == "stages"], "torch")  # the search finds it where it is
    heavy = reaches(light, "torch", "safetensors.torch")
    assert not heavy, heavy


def test_commands_import_the_work_inside_functions() -> None:
    mine = [each for each in OURS if each.room == "cli"]
    work = [each for each in mine if room_of(each.module) not in FLOOR | {"cli", ""}]
    assert work
    early = [str(each) for each in work if each.when == "module"]
    assert not early, early


def test_kernels_need_only_torch_and_the_standard_library() -> None:
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    others = [each for each in IMPORTS if each.room == "kernels" and each not in OURS]
    wrong = [str(each) for each in others if each.module.split(".")[0] not in allowed]
    assert not wrong, wrong


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(
        "import torch.nn as nn\n"
        "from wmcli import config\n"
        "from . import base\n"
        "from ..errors import WmError\n"
        "if TYPE_CHECKING:\n    from wmcli.stages import loop\n"
        "else:\n    import late\n"
        "def f():\n    if x:\n        import zarr\n"
        "class C:\n    import early\n"
    )
    found = [(each.module, each.when) for each in imports_of(file, "wmcli.nn.example")]
    assert found == [
        ("torch.nn", "module"),
        ("wmcli.config", "module"),
        ("wmcli.nn.base", "module"),
        ("wmcli.errors.WmError", "module"),
        ("wmcli.stages.loop", "typing"),
        ("late", "module"),
        ("zarr", "function"),
        ("early", "module"),
    ]
