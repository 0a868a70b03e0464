"""A library that takes the place of wandb, in other processes as well, and fails where it is asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_LIBRARY = """
import json, os, time

class Settings:
    def __init__(self, **given):
        assert given == {"console": "off", "silent": True}

class Run:
    def __init__(self, **given):
        del given["settings"]
        self.count = 0
        self.write({"init": given})

    def write(self, entry):
        with open(os.environ["STORED"], "a") as file:
            file.write(json.dumps(entry) + "\\n")

    def define_metric(self, name, step_metric=None):
        self.write({"axis": [name, step_metric]})

    def log(self, values):
        self.count += 1
        if self.count > int(os.environ.get("FAILS_AFTER", 10**9)):
            raise ConnectionError("the server\\n is gone")
        self.write({"log": values})

    def finish(self):
        self.write({"finish": self.count})

def init(mode=None, **given):
    print("chatter of a library")
    time.sleep(float(os.environ.get("HANGS", 0)))
    if mode is None and "NO_ACCOUNT" in os.environ:
        raise RuntimeError("no account")
    return Run(mode=mode, **given)
"""


def install(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Install the library for the processes of this test. Return the file where it writes what it is given.

    Environment variables ask it to fail: NO_ACCOUNT, FAILS_AFTER (records), HANGS (seconds of `init`).
    """
    package = folder / "lib" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_LIBRARY, encoding="utf-8")
    patch.syspath_prepend(folder / "lib")
    patch.setenv("STORED", str(folder / "stored"))
    return folder / "stored"


def entries(stored: Path, kind: str) -> list[Any]:
    """Return what was given to the library: of each `init`, `axis`, `log` or `finish`."""
    lines = stored.read_text(encoding="utf-8").splitlines() if stored.exists() else []
    return [each[kind] for each in map(json.loads, lines) if kind in each]
