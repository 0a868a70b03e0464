"""A run so small that every stage takes a fraction of a second, and helpers to look at what it left."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.failpoint import failpoint
from wmcli.config import names_kind
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer

# Sizes all differ, where they may, so that a swapped axis shows. What tests of memory tasks share:
TINY_S4WM = [
    "tokenizer.categoricals=3",
    "tokenizer.classes=5",
    "tokenizer.channels=[4, 6]",
    "tokenizer.strides=[4, 2]",
    "tokenizer.kernel=4",
    "tokenizer.posterior_width=8",
    "dynamics.prior_width=7",
    "dynamics.batch=2",
    "backbone.width=16",
    "backbone.layers=1",
    "backbone.state_size=4",
    "training.device=cpu",
    "training.precision=float32",
    "training.threads=1",
]
# 4 x 4 tokens a frame.
TINY = [
    "environment.size=16",
    "environment.count=3",
    "collect.steps=90",
    "tokenizer.downsamples=2",
    "tokenizer.channels=8",
    "tokenizer.width=32",
    "tokenizer.fsq_levels=[4, 5]",
    "tokenizer.codes=20",
    "tokenizer.batch=7",
    "tokenizer.updates=6",
    "dynamics.sequence_length=6",
    "dynamics.context=2",
    "dynamics.min_segment=2",
    "dynamics.observation_burn_in=2",
    "dynamics.reward_burn_in=1",
    "dynamics.batch=4",
    "dynamics.updates=5",
    "backbone.width=32",
    "backbone.layers=1",
    "backbone.dropout=0.25",
    "backbone.heads=2",
    "controller.width=24",
    "controller.latent_channels=[10]",
    "controller.burn_in=2",
    "controller.imagination_horizon=3",
    "controller.batch=5",
    "controller.updates=4",
    "evaluation.episodes=5",
    "evaluation.environments=2",
    "training.device=cpu",
    "training.precision=float32",
    "training.threads=1",
    "training.log_every=2",
]

TRAINING: dict[str, Callable[..., Artifact]] = {
    "tokenizer": train_tokenizer,
    "dynamics": train_dynamics,
    "controller": imagine,
}
EVERY_STAGE: dict[str, Callable[..., Artifact]] = TRAINING | {"evaluation": evaluate}
"""Behind collect, in the order of their inputs, by the kind of what they make."""


def opened(
    folder: Path,
    *overrides: str,
    fresh: bool = False,
    force: bool = False,
    more: bool = False,
    new: bool = False,
    pictures: bool = False,
) -> Context:
    """The context of one command. `new` binds the run to the tiny settings first. Pictures would take most time."""
    context = open_context(
        folder,
        None,
        [*TINY, *overrides] if new else overrides,
        create=new,
        quiet=True,
        fresh=fresh,
        force=force,
        more=more,
    )
    context.pictures = pictures
    if new:
        context.bind()
    return context


def with_kinds(settings: Sequence[str], *overrides: str) -> list[str]:
    """Return settings and overrides, without settings of a section whose kind the overrides choose otherwise.

    Only the width of a backbone stays, as all of them have it.
    """
    keys = [each.partition("=")[0] for each in overrides]
    sections = {key.rpartition(".")[0] for key in keys if names_kind(key)}
    shared = ("backbone.width=", "backbone.layers=", "backbone.dropout=")
    kept = [each for each in settings if each.startswith(shared) or each.partition(".")[0] not in sections]
    return [*kept, *overrides]


def copied(run: Path, folder: Path) -> Path:
    """A copy of a run to change at will."""
    shutil.copytree(run, folder, symlinks=True)
    return folder


def sha256(artifact: Artifact, name: str = "model.safetensors") -> str:
    return hashlib.sha256(artifact.file(name).read_bytes()).hexdigest()


def latest(folder: Path, kind: str) -> Artifact:
    artifact = Run.open(folder, create=False).latest(kind)
    assert artifact is not None
    return artifact


class Killed(BaseException):
    """Stands for the death of the process: nothing catches it."""


def kill_at(patch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """From here on the `times`-th failpoint called `name` raises Killed, and every one after it."""
    reached = 0

    def count(here: str) -> None:
        nonlocal reached
        failpoint(here)
        reached += here == name
        if reached >= times:
            raise Killed(f"{here} {reached}")

    for module in ("wmcli.stages.player", "wmcli.stages.episodes", "wmcli.training.loop", "wmcli.artifacts.files"):
        patch.setattr(f"{module}.failpoint", count)


def command(folder: Path, *arguments: str, failpoint: str = "") -> subprocess.Popen[str]:
    """`wm ARGUMENTS --run FOLDER` in a process of its own, which dies at `failpoint` if it is given."""
    environment = {key: value for key, value in os.environ.items() if key not in ("WM_RUN", "WM_FAILPOINT")}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"WM_FAILPOINT": failpoint} if failpoint else {})
    line = [sys.executable, "-m", "wmcli", *arguments, "--run", str(folder)]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def settings(*overrides: str) -> list[str]:
    """Overrides as `wm` takes them."""
    return [part for text in overrides for part in ("--set", text)]
