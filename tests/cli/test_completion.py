"""What the shell completes: options, keys and values of settings, versions; at once, so without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import typing

import pytest
from pydantic import BaseModel

from wmcli.artifacts import Run
from wmcli.backbones import BACKBONES
from wmcli.cli import bash_words
from wmcli.cli.options import complete_backbone, complete_device
from wmcli.cli.setting_keys import setting_keys
from wmcli.config import preset_names
from wmcli.envs import list_environments
from wmcli.settings import Settings, flatten, resolve
from wmcli.settings.describe import settings_of_section

ASK = """
import sys
from wmcli.cli.main import main
try:
    main()
finally:
    print([name for name in ("torch", "zarr", "matplotlib") if name in sys.modules], file=sys.stderr)
"""


def completed(words, shell="bash", **environment):
    """The answers to `words`, given as a list as the shell has them; the last is the one to complete."""
    asked = {"_WM_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        asked |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    else:
        asked |= {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, env=os.environ | asked | environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["wm", "run", "--backbone", "m"], ["mamba1", "mamba2"]),
        (["wm", "run", "--env", "ALE/Pon"], ["ALE/Pong-v5"]),
        (["wm", "run", "--device", "c"], [name for name in complete_device() if name[0] == "c"]),
        (["wm", "run", "--set", "training.prec"], [f"training.precision={x}" for x in ("auto", "float32", "bfloat16")]),
        (["wm", "run", "--set", "evaluation.e"], ["evaluation.episodes=", "evaluation.environments="]),
        (["wm", "run", "--set", "backbone.kind", "=", "mam"], ["mamba1", "mamba2"]),  # as bash breaks it
        (["wm", "run", "--set", "training.cuda_graph", "="], ["true", "false"]),
        (["wm", "run", "--set", "=", "seed", "=", "3"], []),
        (["wm", "compare", "runs/a", "--by", "evaluation.t"], ["evaluation.temperature"]),
        (["wm", "report", "runs/a", "--by", "evaluation.t"], ["evaluation.temperature"]),
        (["wm", "presets", "--system", "u"], ["unizero"]),
    ],
)
def test_answers_in_bash(words, expected):
    assert completed(words) == expected


def test_answers_elsewhere_are_whole_words():
    assert completed(["wm", "run", "--set", "backbone.kind=mam"], "fish") == [
        "backbone.kind=mamba1",
        "backbone.kind=mamba2",
    ]


def test_a_version_behind_its_kind(tmp_path):
    run = Run.open(tmp_path, create=True)
    with run.job("experience", {}, {}).work() as work:
        work.publish(settings={}, metrics={}, environment=None, machine={})
    words = ["wm", "lineage", "--run", str(tmp_path), "experience", "@"]
    assert completed(words) == ["@1"]  # bash replaces the @ as well


@pytest.mark.parametrize(
    ("words", "whole", "head"),
    [
        (["wm", "run", ""], ["wm", "run", ""], ""),
        (["wm", "--set", "a", "=", "b"], ["wm", "--set", "a=b"], "a="),
        (["wm", "--set", "a", "="], ["wm", "--set", "a="], "a="),
        (["wm", "--set", "=", "a", "=", "b"], ["wm", "--set=a=b"], "a="),
        (["wm", "--env", "ocean", ":", "Fi"], ["wm", "--env", "ocean:Fi"], "ocean:"),
        (["wm", "dynamics", "@", "1"], ["wm", "dynamics@1"], "dynamics"),
    ],
)
def test_bash_words_are_put_together(words, whole, head):
    assert bash_words.join(words, len(words) - 1) == (whole, len(whole) - 1, head)


# -- what is read from the source is what there is --------------------------------------------------------------------


def test_keys_are_those_of_the_settings():
    assert set(setting_keys()) == {each.key for each in settings_of_section()}
    resolved = {key for name in preset_names() for key in flatten(resolve(name)) if not key.startswith("alternatives.")}
    assert resolved <= set(setting_keys()), "every key of a preset"


def literals(section: type[BaseModel], prefix: str = "") -> dict[str, set[str]]:
    """The values of every Literal and bool below a section, of all its kinds together."""
    found: dict[str, set[str]] = {}

    def walk(annotation, key):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            for name, field in annotation.model_fields.items():
                walk(field.annotation, f"{key}.{name}" if key else name)
        elif annotation is bool:
            found.setdefault(key, set()).update(("true", "false"))
        elif typing.get_origin(annotation) is typing.Literal:
            found.setdefault(key, set()).update(map(str, typing.get_args(annotation)))
        else:
            for each in typing.get_args(annotation):
                if typing.get_origin(annotation) is not tuple:
                    walk(each, key)

    walk(section, prefix)
    return found


def test_values_are_those_of_the_settings():
    known = {key: set(values) for key, values in setting_keys().items() if values}
    assert known == literals(Settings)


def test_names_are_those_there_are():
    assert set(complete_backbone()) == set(BACKBONES)
    assert {"auto", "cpu"} <= set(complete_device())
    assert "wm/Catch-v0" in [row["id"] for row in list_environments()]
