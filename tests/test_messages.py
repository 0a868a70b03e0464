"""What `wm` tells people to type exists: settings keys, commands and their options, in every text of the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import COMMANDS, KEYS, parse, words, wrong_mentions

from wmcli.artifacts import KINDS, Artifact
from wmcli.artifacts.manifest import PRUNED, make_command
from wmcli.errors import ArtifactError

ROOT = Path(__file__).parent.parent
OLD_NAMES = ROOT / "wmcli" / "config" / "migrations.py"
SOURCES = sorted(path for folder in ("wmcli", "kernels") for path in (ROOT / folder).rglob("*.py") if path != OLD_NAMES)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and content of every string; what is put into one at run time reads {}."""
    inside: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # a string before its parts
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_name_existing_things(path):
    found = [f"{path.name}:{line}: {each}" for line, text in texts(path.read_text()) for each in wrong_mentions(text)]
    assert not found


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_that_makes_an_artifact_is_one(kind):
    assert parse(words(make_command(kind, Path("runs/with space"))))["run"] == Path("runs/with space")


@pytest.mark.parametrize("kind", KINDS)
def test_the_remedy_for_a_damaged_artifact_is_a_command(kind, tmp_path):
    (tmp_path / PRUNED).touch()
    with pytest.raises(ArtifactError) as error:
        Artifact(tmp_path, {"kind": kind, "version": 1}).verify_again()
    assert not wrong_mentions(str(error.value))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("set it with --set controller.lr=3e-4", ["key controller.lr", "key controller.lr"]),
        ("dynamics.{} = 3: lower dynamics.batch, or dynamics.no_such.", ["key dynamics.no_such"]),
        ("make another with: wm collect --run {} --force", ["wm collect --force"]),
        ("see `wm artefacts`", ["command wm artefacts"]),
        ("leave out --experiense", ["option --experiense"]),
        ("begin with --set SECTION.learning_rate=... or --set key=3, not --set horizon=3", ["key horizon"]),
        ("this wm reads training.safetensors and wmcli/backbones/gru.py", []),
        ("use --policy scripted, or: wm presets show NAME --parameters --set training.threads=1", []),
    ],
)
def test_missing_names_are_detected(text, wrong):
    assert wrong_mentions(text) == wrong


def test_keys_of_every_kind_are_known():
    assert {"seed", "controller.burn_in", "controller.simulations", "backbone.prior.kind"} <= KEYS
    assert ("presets", "show") in COMMANDS
