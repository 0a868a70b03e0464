"""The commands that faults are tried on: a tiny run before each of them, and what must be true after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_shim import Control
from tiny_run import TINY
from warm import TORCHRUN, Ended, Warm

from wmcli.artifacts import KINDS, Run, check
from wmcli.artifacts.lock import HOLDER, LOCK
from wmcli.artifacts.manifest import VERSION_NAME

# A checkpoint after every update, and little else.
SETTINGS = [
    *TINY,
    *("environment.count=2", "collect.steps=24", "tokenizer.updates=3", "dynamics.updates=3", "controller.updates=2"),
    *("evaluation.episodes=2", "evaluation.environments=1", "training.checkpoint_seconds=0", "training.log_every=1"),
    *("run.epochs=2", "run.collect_epochs=2", "run.tokenizer_after=0", "run.dynamics_after=0"),
    "run.controller_after=0",
    *("run.evaluate_every=1", "run.evaluate_episodes=1", "run.keep=1"),
]
STAGES = ("collect", "train-tokenizer", "train-dynamics", "imagine", "eval")
MODELS = ("tokenizer", "dynamics", "controller")


def sets(*overrides: str) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


NEW = ["--preset", "quickstart", *sets(*SETTINGS)]


@dataclass(frozen=True)
class Command:
    """A command to try faults on. All its paths are relative to the place, its current folder."""

    arguments: tuple[str, ...]
    before: str
    """Name of the place before it, of `Places.made`."""
    results: Callable[[Path], Any]
    """What it leads to, from its place, without times."""
    runs: tuple[str, ...] = ("run",)
    """Run directories that stay whole."""
    tidies: tuple[str, ...] = KINDS
    """Kinds of which the same command again removes what it left when it was interrupted. Others do so later."""
    seconds: float = 120


def results_of(place: Path, name: str = "run") -> dict[str, Any]:
    """All that a run leads to: contents of experience and weights, returns of evaluations, links, settings."""
    found: dict[str, Any] = {}
    run = Run.open(place / name, create=False)
    for kind in KINDS:
        run.point_latest(kind)  # as every reader does
        for version in run.versions(kind):
            artifact = run.get(kind, version)
            files = {each["path"]: each["sha256"] for each in artifact.manifest["files"]}
            content = files if kind == "experience" else {k: v for k, v in files.items() if k.endswith(".safetensors")}
            found[artifact.name] = (content, artifact.metrics.get("returns"), artifact.pruned)
        found |= {f"{kind}/{link.name}": str(link.readlink()) for link in _links(place / name / kind)}
    return found | {"settings": run.bound()}


def _links(folder: Path) -> list[Path]:
    return [link for link in (folder / "best", folder / "latest") if link.is_symlink()]


def tree_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder that is no run, by their paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _exported_run(place: Path) -> dict[str, Any]:
    return results_of(place, "out") | {"files": sorted(each for each in tree_of(place / "out") if each[0] != ".")}


def _copy(place: Path) -> dict[str, Any]:
    return {name: data for name, data in tree_of(place / "store").items() if not name.startswith(("files/", "wm-run"))}


def _cleaned(place: Path) -> dict[str, Any]:
    left = Run.open(place / "run", create=False).unfinished()
    return results_of(place) | {"stopped work": [each.name for each in left]}


SWEPT = ("runs/seed-1", "runs/seed-2")
COMMANDS = {
    "collect": Command(("collect", "--run", "run", *NEW), "nothing", results_of),
    "train-tokenizer": Command(("train-tokenizer", "--run", "run"), "collect", results_of),
    "train-dynamics": Command(("train-dynamics", "--run", "run"), "train-tokenizer", results_of),
    "imagine": Command(("imagine", "--run", "run"), "train-dynamics", results_of),
    "eval": Command(("eval", "--run", "run"), "imagine", results_of, tidies=("evaluation",)),
    "run": Command(("run", "quickstart", "--run", "run", *sets(*SETTINGS)), "nothing", results_of),
    "rebind": Command(("run", "--run", "run", *sets("run.keep=7")), "run", results_of),
    "import": Command(
        ("import", "data", "--run", "run", *NEW[:2], *sets(*SETTINGS[1:])), "data", results_of, tidies=()
    ),
    "profile": Command(("profile", "--part", "experience", "--frames", "128", "--run", "run"), "collect", results_of),
    "export controller": Command(("export", "controller", "--run", "run", "--out", "out"), "eval", _exported_run),
    "export experience": Command(
        ("export", "experience", "--run", "run", "--out", "out"), "eval", lambda place: sorted(tree_of(place / "out"))
    ),
    "push": Command(("push", "run", "file://STORE"), "eval", _copy),
    "pull": Command(("pull", "file://STORE", "--run", "copy"), "push", lambda place: results_of(place, "copy")),
    "clean": Command(("clean", "run", "--yes"), "old", _cleaned, tidies=()),
}

ONE_EPOCH = sets(*SETTINGS, "run.epochs=1", "run.collect_epochs=1", "tokenizer.batch=8", "controller.batch=6")
PROCESSES = {
    "overlap": Command(
        ("run", "quickstart", "--run", "run", *sets(*SETTINGS, "run.overlap=true", "run.keep=2")), "nothing", results_of
    ),
    "sweep": Command(
        ("sweep", "sweep.toml", "--retry"),
        "sweep file",
        lambda place: [results_of(place, each) for each in SWEPT],
        SWEPT,
        seconds=240,
    ),
    "ranks": Command((*TORCHRUN, "run", "quickstart", "--run", "run", *ONE_EPOCH), "nothing", results_of, seconds=240),
}
"""Commands that start processes, whose calls count together; any of them is killed."""
ALL = COMMANDS | PROCESSES
ADDS = {"collect": "run/experience/v0001", "profile": "run/profile/v0001"}
"""Commands that make another version each time, and the first one."""


class Places:
    """Folders with a run before each command, made once, and copied to one place to be changed at will."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.folder = warm, folder
        self.place = folder / "place"
        """Where every command works, since some write absolute paths."""
        self._made: dict[str, Path] = {}
        self._results: dict[tuple[str, bool], Any] = {}

    def begin(self, name: str) -> Path:
        """Make the place as it was before a command, and return it."""
        source = self.made(ALL[name].before)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(source, self.place, symlinks=True)
        return self.place

    def call(self, name: str, control: Control | None = None, broken: str | None = None) -> Ended:
        """Run a command in the place."""
        command = ALL[name]
        arguments = [each.replace("STORE", str(self.place / "store")) for each in command.arguments]
        return self.warm.run(*arguments, control=control, broken=broken, cwd=self.place, seconds=command.seconds)

    def control(self, **fault: Any) -> Control:
        """A control file for what happens in the place."""
        return Control(self.folder / "control", self.place, **fault)

    def know(self, name: str) -> None:
        """Find out what a command leads to where nothing disturbs it, for `differences`."""
        if (name, False) not in self._results:
            self.begin(name)
            for twice in [False, *[True] * (name in ADDS)]:
                self._succeed(name)
                self._results[name, twice] = ALL[name].results(self.place)

    def calls(self, name: str) -> dict[str, int]:
        """System calls of a command by kind, and their `total`."""
        self.begin(name)
        control = self.control()
        assert self.call(name, control).code == 0
        return control.counts | {"total": control.total}

    def made(self, name: str) -> Path:
        """The place after a command, or one of those that `_first` makes. Only to be read."""
        if name not in self._made:
            if name in ALL:
                self.begin(name)
                self._succeed(name)
            else:
                self._first(name)
            kept = self.folder / f"after {name}"
            shutil.copytree(self.place, kept, symlinks=True)
            self._made[name] = kept
        return self._made[name]

    def _first(self, name: str) -> None:
        source = self.made("eval") if name == "old" else None
        shutil.rmtree(self.place, ignore_errors=True)
        if source is not None:  # a run with stopped work and old weights
            shutil.copytree(source, self.place, symlinks=True)
            for stage in STAGES[1:4]:
                ended = self.warm.run(stage, "--force", "--run", "run", cwd=self.place)
                assert ended.code == 0, ended.said
            control = self.control(kind="rename", at=2, action=-9)
            assert self.warm.run("imagine", "--force", "--run", "run", control=control, cwd=self.place).code == -9
            return
        self.place.mkdir()
        if name == "data":
            _write_episodes(self.place / "data")
        if name == "sweep file":
            values = dict(each.split("=", 1) for each in [*SETTINGS, "run.epochs=1", "run.collect_epochs=1"])
            lines = [f"{key} = {_as_toml(value)}" for key, value in values.items()]
            head = 'preset = "quickstart"\nfolder = "runs"\nvary.seed = [1, 2]\nlocal.slots = 2\n[settings]\n'
            (self.place / "sweep.toml").write_text(head + "\n".join(lines) + "\n")

    def _succeed(self, name: str) -> None:
        ended = self.call(name)
        assert ended.code == 0, f"{name}: {ended.said}"

    # -- what must be true --------------------------------------------------------------------------------------------

    def faults(self, name: str) -> Iterator[str]:
        """Yield what is wrong with the runs in the place, as readers see them."""
        for run in ALL[name].runs:
            yield from damage(self.place / run)

    def has_added(self, name: str) -> bool:
        """Return whether a command has published, and would publish another version."""
        return name in ADDS and (self.place / ADDS[name]).exists()

    def repeat(self, name: str) -> Iterator[str]:
        """Run the command again, and yield what is wrong then. Its `results` must be known."""
        twice = self.has_added(name)
        ended = self.call(name)
        if ended.code != 0:
            yield f"the same command again ended with {ended.code}: {ended.said[-400:]}"
            return
        yield from self.faults(name)
        yield from self.differences(name, twice=twice)
        yield from (f"left over: {each}" for each in self.left_over(name))

    def left_over(self, name: str) -> list[str]:
        """Name what no finished command leaves behind."""
        return [
            f"{run}/{kind}/{left}"
            for run in ALL[name].runs
            for kind in ALL[name].tidies
            for left in _left_over(self.place / run / kind)
        ]

    def differences(self, name: str, *, twice: bool = False) -> Iterator[str]:
        """Yield how the place differs from one where nothing disturbed the command, or the same `twice`."""
        found, expected = ALL[name].results(self.place), self._results[name, twice]
        if found != expected:
            if isinstance(found, dict) and found.keys() == expected.keys():
                found = {key: value for key, value in found.items() if expected.get(key) != value}
            yield f"other results than undisturbed: {str(found)[:1000]}"


def _as_toml(value: str) -> str:
    return value if value[0] == "[" or value[0].isdigit() else f'"{value}"'


def damage(run: Path) -> Iterator[str]:
    """Yield what is wrong with a run: versions that are no whole ones, settings or metrics that cannot be read."""
    if not run.exists():
        return
    opened = Run.open(run, create=False)
    for name, state, reason in check(opened):
        if state not in ("ok", "pruned"):
            yield f"{name} is {state}: {reason}"
    try:
        opened.bound()
    except Exception as error:
        yield f"run.toml: {error}"
    opened.history()


def _left_over(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    expected = {LOCK, HOLDER, "latest", "best"}
    names = [each.name for each in folder.iterdir()]
    return [name for name in names if name not in expected and not VERSION_NAME.fullmatch(name)]


def _write_episodes(folder: Path) -> None:
    from wmcli.exchange import Episode, Recording, write_recording
    from wmcli.spaces import Spaces

    rng = np.random.default_rng(0)

    def episode(index: int) -> Episode:
        time = 8 + index
        last = np.arange(time) == time - 1
        frames = rng.integers(0, 256, (time + 1, 16, 16, 3), dtype=np.uint8)
        return Episode(frames, rng.integers(0, 3, time, np.int32), np.ones(time, np.float32), last, ~last & False)

    write_recording(Recording("made", "wm", Spaces.of_images(16, 3), 3, episode, source={}), "npz", folder)
