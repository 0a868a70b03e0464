"""The package runs nothing that it reads: every pickle, eval, shell and import by name is listed with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("wmcli", "kernels", "presets") for path in (ROOT / folder).rglob("*.py"))

MODULES = (
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "xml", "code"),
    *("multiprocessing", "socketserver", "xmlrpc", "ftplib", "telnetlib", "imp", "runpy", "pty"),
)
"""Imports of these and what is below them: they run what they read, or talk without a check of the other side."""
CALLS = (
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execve", "os.execvp"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "tempfile.mktemp"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "gymnasium.make", "gymnasium.make_vec"),
    *("torch.save", "torch.jit.load", "torch.export.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("shutil.unpack_archive", "tarfile.open", "zipfile.ZipFile", "ssl._create_unverified_context"),
)
"""Calls that run, import or unpack what they are given, or ask a name that another one can take."""
NEEDED = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "jinja2.Environment": ("autoescape", True),
    "hashlib.md5": ("usedforsecurity", False),
    "hashlib.sha1": ("usedforsecurity", False),
}
"""Calls that are safe with this argument alone."""
NEVER = {"shell": True, "verify": False, "allow_pickle": True, "weights_only": False}
"""Arguments of any call."""

OWN_CHILD = "it talks to a child process that it started itself, over a pipe that has no name"
ITS_OWN = "an exception of this very process, to and fro, to see whether it can be sent"
CHOSEN = "the user named it in settings or on the command line; a received run needs --trust"
EXCEPTIONS = {
    ("wmcli/envs/processes.py", "multiprocessing"): OWN_CHILD,
    ("wmcli/envs/processes.py", "pickle"): ITS_OWN,
    ("wmcli/stages/collector.py", "multiprocessing"): OWN_CHILD,
    ("wmcli/stages/grid_world.py", "multiprocessing"): OWN_CHILD,
    ("wmcli/stages/scripted.py", "multiprocessing"): OWN_CHILD,
    ("wmcli/sweeps/child.py", "os.execv"): "wm becomes its own next process; no shell sees the arguments",
    ("wmcli/ranks.py", "pickle"): ITS_OWN,
    ("wmcli/stages/on_ray.py", "pickle"): "Ray pickles every task anyway, and carries it inside of a cluster alone",
    ("wmcli/stages/lpips_weights.py", "pickle"): "only the name of an exception of torch.load(weights_only=True)",
    ("wmcli/envs/plain.py", "importlib.import_module"): f"packages of a fixed table; {CHOSEN}",
    ("wmcli/envs/plain.py", "gymnasium.make"): CHOSEN,
    ("wmcli/envs/atari.py", "gymnasium.make"): "a name out of ale-py's own table",
    ("wmcli/envs/display.py", "importlib.import_module"): "imports triton, by that name",
    ("wmcli/exchange/safe.py", "importlib.import_module"): "callers give the name of a library as a literal",
    ("wmcli/exchange/npz.py", "zipfile.ZipFile"): "names, number and sizes are checked, and no member is extracted",
    ("wmcli/report/lineage_drawing.py", "xml"): "makes drawings, or reads one that matplotlib has just made",
    ("wmcli/report/plots.py", "xml"): "makes drawings, or reads one that matplotlib has just made",
}
"""Why each use is safe, by file and what is used."""


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything in a module that could run what it reads."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield from _module(node, alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _module(node, node.module or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            name = _dotted(node, names)
            if name in CALLS and ("." in name or name not in names):  # also handed on, as in `map(eval, texts)`
                yield node.lineno, name
        if isinstance(node, ast.Call):
            given = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
            name = _dotted(node.func, names)
            if name in NEEDED and given.get(NEEDED[name][0], "nothing") is not NEEDED[name][1]:
                yield node.lineno, name
            for keyword, value in given.items():
                if keyword in NEVER and value is not (not NEVER[keyword]):
                    yield node.lineno, keyword


def _module(node: ast.stmt, module: str) -> Iterator[tuple[int, str]]:
    if (top := module.partition(".")[0]) in MODULES:
        yield node.lineno, top


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return `numpy.load` for `np.load` under `import numpy as np`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def test_nothing_runs_what_it_reads() -> None:
    assert len(SOURCES) > 200
    found: dict[tuple[str, str], list[int]] = {}
    for path in SOURCES:
        for line, name in uses(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault((path.relative_to(ROOT).as_posix(), name), []).append(line)
    assert {key: lines for key, lines in found.items() if key not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() - found.keys() == set(), "no longer used: remove the exceptions"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from xml.etree import ElementTree", "xml"),
        ("def f():\n    import yaml", "yaml"),
        ("eval(text)", "eval"),
        ("values = map(eval, texts)", "eval"),
        ("import torch as t\nt.load(file)", "torch.load"),
        ("import torch\ntorch.load(file, weights_only=False)", "torch.load"),
        ("import torch\ntorch.load(file, weights_only=flag)", "torch.load"),
        ("from numpy import load as read\nread(file)", "numpy.load"),
        ("import subprocess\nsubprocess.run(line, shell=True)", "shell"),
        ("run(line, shell=flag)", "shell"),
        ("from importlib import import_module\nimport_module(name)", "importlib.import_module"),
        ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
        ("import hashlib\nhashlib.md5(data)", "hashlib.md5"),
        ("from jinja2 import Environment\nEnvironment()", "jinja2.Environment"),
    ],
)
def test_a_use_is_found(source: str, name: str) -> None:
    assert name in [name for _, name in uses(ast.parse(source))]


def test_safe_uses_are_none() -> None:
    source = (
        "import numpy as np, re, subprocess, torch\n"
        "torch.load(file, weights_only=True)\nnp.load(file, allow_pickle=False)\nmodel.eval()\nre.compile(text)\n"
        "torch.compile(model)\nsubprocess.run(line, shell=False)\n"
    )
    assert list(uses(ast.parse(source))) == []


def test_pages_make_no_code_of_text() -> None:
    pages = [path for folder in ("browser", "report") for path in (ROOT / "wmcli" / folder).glob("*.[hj][ts]*")]
    assert len(pages) > 4
    makers = re.compile(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\|\s*safe\b")
    assert {path.name: makers.findall(path.read_text(encoding="utf-8")) for path in pages} == dict.fromkeys(
        (path.name for path in pages), []
    )
