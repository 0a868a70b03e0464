"""Make the archives of a release, which all later versions are to read: python tests/old_runs/make.py

Run it once for each release, in a checkout of its tag, and commit the files `VERSION-NAME.tar.xz` that it writes beside
itself. `tests/stages/test_old_runs.py` then reads, verifies, resumes, evaluates and upgrades them for good. Runs are as
tiny as in other tests, of one preset of each kind of system, and without pictures; `interrupted` is one that was killed
while its dynamics model trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "stages"))

from small_systems import SYSTEMS, begun, opened  # noqa: E402

import wmcli  # noqa: E402
from wmcli.config import flat  # noqa: E402
from wmcli.settings import resolve  # noqa: E402
from wmcli.stages.context import Context  # noqa: E402
from wmcli.stages.dynamics import train_dynamics  # noqa: E402
from wmcli.stages.loop import run_loop  # noqa: E402
from wmcli.stages.opening import open_context  # noqa: E402

INTERRUPTED = "interrupted"
NAMES = (*SYSTEMS, INTERRUPTED)
LOOP = [
    *("run.epochs=2", "run.collect_epochs=2", "run.tokenizer_after=0", "run.dynamics_after=0"),
    *("run.controller_after=0", "run.evaluate_every=0", "run.keep=2"),
]
SHORT = ("tokenizer.updates=2", "dynamics.updates=2", "controller.updates=2", "evaluation.episodes=2")
LEFT_OUT = ("tensorboard", ".lock", ".holder")


def finish(name: str, folder: Path) -> None:
    """Make a run of a system from its start to its end."""
    preset, overrides = SYSTEMS[name]
    keys = flat(resolve(preset, overrides).plain())
    short = [each for each in SHORT if each.partition("=")[0] in keys]
    loop = ["run.epochs=1"] if name == "cells" else LOOP  # its episodes never end, so its controller has no score
    run_loop(open_context(folder, preset, [*overrides, *short, *loop], create=True, quiet=True))


def interrupt(folder: Path) -> None:
    """Make a run of REM that is killed at the second checkpoint of its dynamics model."""
    begun("rem", folder)
    settings = (*LOOP, "training.checkpoint_seconds=0")
    child = os.fork()
    if child == 0:
        os.environ["WM_FAILPOINT"] = "checkpoint:2"
        context = open_context(folder, None, settings, create=False, quiet=True, bind=True)
        context.bind()
        train_dynamics(context)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0, "it was not killed"
    assert opened(folder).run.unfinished()


def write(target: Path, names: Sequence[str] = NAMES) -> list[Path]:
    """Write archives into a folder and return their paths."""
    archives = []
    # A property: `wm run` asks for pictures in its last epoch.
    Context.pictures = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            folder = Path(place) / name
            if name == INTERRUPTED:
                interrupt(folder)
            else:
                finish(name, folder)
            for left_out in LEFT_OUT:
                for path in folder.rglob(left_out):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            archives.append(target / f"{wmcli.__version__}-{name}.tar.xz")
            with tarfile.open(archives[-1], "w:xz") as archive:
                archive.add(folder, name)
    return archives


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the archives")
    given = parser.parse_args()
    for made in write(given.to, given.names):
        print(made)
