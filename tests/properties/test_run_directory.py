"""Random sequences of commands on one run, up to four at once, against a model of what must stand there afterwards."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import failpoints
import pytest
from hypothesis import settings as search_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from searching import counts, searching

from wmcli.artifacts import Artifact, Run, check, find_removable
from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import write_durable
from wmcli.artifacts.manifest import version_name
from wmcli.errors import ArtifactError, BusyError, WmError

KINDS = ("tokenizer", "dynamics", "evaluation")
NEEDS = {"dynamics": "tokenizer", "evaluation": "dynamics"}
SETTINGS = {"seed": 3, "tokenizer": {"codes": 17}}
POINTS = (*failpoints.PUBLISHING, failpoints.REMOVING)


def stage(run: Run, kind: str, identity: int, *, force: bool = False, fresh: bool = False) -> Artifact:
    """A stage whose training is to count to three."""
    run.bind("catch", SETTINGS)
    inputs = {}
    if role := NEEDS.get(kind):
        inputs[role] = run.resolve(role, role)
        inputs[role].verify()
    job = run.job(kind, {"identity": identity}, inputs)
    if (existing := job.done()) is not None and not force:
        return existing
    with job.work(fresh=fresh) as work:
        checkpoint = work.path / "checkpoint"
        update = int(checkpoint.read_bytes()) if work.resumed else 0
        while update < 3:
            update += 1
            write_durable(checkpoint, [str(update).encode()])
            failpoint("checkpoint")
        (work.payload / "model.safetensors").write_bytes(f"{kind} {identity} after {update}".encode())
        (work.payload / "curves.png").write_bytes(b"a picture")
        return work.publish(settings=SETTINGS, metrics={"updates": update}, environment=None, machine={"threads": 1})


def every_stage(run: Run, kind: str, identity: int) -> None:
    """As `wm run` does."""
    for each in KINDS:
        stage(run, each, identity)


def clean(run: Run, kind: str, identity: int) -> None:
    for each in find_removable(run):
        each.remove()


def prune(run: Run, kind: str, identity: int) -> None:
    run.prune(kind, set(run.versions(kind)[:-1]))


COMMANDS: dict[str, Callable[[Run, str, int], object]] = {
    "stage": stage,
    "force": lambda run, kind, identity: stage(run, kind, identity, force=True),
    "fresh": lambda run, kind, identity: stage(run, kind, identity, fresh=True),
    "run": every_stage,
    "clean": clean,
    "prune": prune,
}
REMOVING = ("clean", "prune")
ONCE = ("stage", "fresh")
COMMAND = st.tuples(
    st.sampled_from(["stage", "stage", "stage", "run", "force", "fresh", "clean", "prune"]),
    st.sampled_from(KINDS),
    st.integers(1, 3),
)
PLACE = st.integers(0, 99)
KILL = st.none() | st.tuples(st.sampled_from(POINTS), st.integers(1, 3)).map(lambda place: f"{place[0]}:{place[1]}")


def start(run: Path, command: tuple[str, str, int], kill: str | None) -> int:
    """Run a command in a process of its own, which may die at a failpoint; its exit code is the error's."""
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        os.environ.pop("WM_FAILPOINT", None)
        if kill is not None:
            os.environ["WM_FAILPOINT"] = kill
        os.fsync = lambda _: None  # processes die here, not the machine
        name, kind, identity = command
        COMMANDS[name](Run.open(run, create=True), kind, identity)
    except WmError as error:
        code = error.exit_code if "\n" not in str(error) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, str]:
    marker = ("pruned", ".pruned.partial")  # the second is left by a process that was killed while it wrote the first
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in marker)
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class RunDirectory(RuleBasedStateMachine):
    """The model: the files of every version when it was first seen, and what the test itself did to them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run = self.folder / "run"
        self.seen: dict[tuple[str, int], dict[str, str]] = {}
        self.damaged: set[tuple[str, int]] = set()
        self.removed: set[tuple[str, int]] = set()
        self.highest = dict.fromkeys(KINDS, 0)
        self.may_prune = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def opened(self) -> Run:
        return Run.open(self.run, create=False)

    @rule(commands=st.lists(st.tuples(COMMAND, KILL), min_size=1, max_size=4))
    def at_once(self, commands: list[tuple[tuple[str, str, int], str | None]]) -> None:
        """Run some commands at the same time."""
        before = {kind: self.versions(kind) for kind in KINDS}
        children = [start(self.run, command, kill) for command, kill in commands]
        codes = [wait(child) for child in children]
        for code, (_, kill) in zip(codes, commands, strict=True):
            allowed = {0, ArtifactError.exit_code, BusyError.exit_code} | ({-signal.SIGKILL} if kill else set())
            assert code in allowed, (code, commands)
        if len(commands) == 1 and codes[0] == BusyError.exit_code:
            raise AssertionError("nobody else was there")
        for kind in KINDS:
            new = set(self.versions(kind)) - set(before[kind])
            makers = [name for (name, its, _), _ in commands if name == "run" or (its == kind and name not in REMOVING)]
            assert len(new) <= len(makers), (kind, new, commands)
            if kind == "tokenizer":  # the same job of two processes is published once
                jobs = {its for (name, on, its), _ in commands if name == "run" or (on == kind and name in ONCE)}
                assert len(new) <= len(jobs) + makers.count("force"), (new, commands)
            assert all(number > self.highest[kind] or number > max(before[kind], default=0) for number in new)
        self.look(any(name in REMOVING for (name, _, _), _ in commands))

    @rule(command=COMMAND)
    def alone(self, command: tuple[str, str, int]) -> None:
        """A command alone leaves no debris of earlier ones in the kinds that it works on."""
        self.at_once([(command, None)])
        name, kind, _ = command
        if name in ("force", "fresh", "stage") and (self.run / kind).is_dir():
            entries = {entry.name for entry in (self.run / kind).iterdir()}
            versions = {version_name(number) for number in self.versions(kind)}
            others = entries - versions - {"latest", "best", ".lock"}
            assert all(each.startswith((".work-", ".holder")) for each in others), others
            assert not [each for each in others if each == ".holder"] or self.was_killed(kind)

    def was_killed(self, kind: str) -> bool:
        return (self.run / kind / ".holder").exists()  # of a process that is no more: only for messages

    @rule(command=COMMAND, kill=KILL)
    def killed_and_again(self, command: tuple[str, str, int], kill: str | None) -> None:
        """The same command finishes what a killed one began."""
        self.at_once([(command, kill)])
        self.alone(command)

    def one_of_them(self, place: int) -> tuple[str, int] | None:
        """A version. What is drawn must not depend on the versions, since these depend on who was first."""
        return sorted(self.seen)[place % len(self.seen)] if self.seen else None

    @rule(place=PLACE)
    def damage(self, place: int) -> None:
        """Flip a bit of a file that a user of the version reads."""
        if (chosen := self.one_of_them(place)) is None:
            return
        kind, number = chosen
        file = self.run / kind / version_name(number) / "model.safetensors"
        if (kind, number) in self.removed or not file.exists():
            return
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        self.damaged ^= {(kind, number)}

    @rule(place=PLACE)
    def remove(self, place: int) -> None:
        """Remove the folder of a version."""
        if (chosen := self.one_of_them(place)) is None:
            return
        kind, number = chosen
        shutil.rmtree(self.run / kind / version_name(number), ignore_errors=True)
        self.removed.add((kind, number))

    def versions(self, kind: str) -> list[int]:
        return Run(self.run).versions(kind) if self.run.is_dir() else []

    def look(self, pruned: bool) -> None:
        """Note the new versions; the others are what they were, but for files that a command may remove."""
        for kind in KINDS:
            for number in self.versions(kind):
                folder, place = self.run / kind / version_name(number), (kind, number)
                files = contents(folder)
                if place not in self.seen or place in self.removed:  # a number that is free again may be taken again
                    self.seen[place] = files
                    self.removed.discard(place)
                    self.damaged.discard(place)
                self.highest[kind] = max(self.highest[kind], number)
                for name, digest in self.seen[place].items():
                    if name not in files:
                        assert (folder / "pruned").exists(), f"{folder}/{name} is gone"
                    elif not (name == "model.safetensors" and place in self.damaged):
                        assert files[name] == digest, f"{folder}/{name} has changed"
                assert not set(files) - set(self.seen[place]), "files that were not published"

    @invariant()
    def verify_says_what_is_so(self) -> None:
        """The states of all versions are those of the model."""
        if not self.run.is_dir():
            return
        run = self.opened()
        states = {name: state for name, state, _ in check(run)}
        usable: dict[tuple[str, int], str] = {}
        for kind in KINDS:
            for number in self.versions(kind):
                artifact = run.get(kind, number)
                if artifact.pruned:
                    state = "pruned"
                elif (kind, number) in self.damaged:
                    state = "damaged"
                else:
                    state = "ok"
                    if kind == "dynamics":  # an evaluation needs nothing of what it scored
                        tokenizer = artifact.inputs["tokenizer"]
                        place = ("tokenizer", tokenizer.version)
                        if usable.get(place) != "ok" or run.get(*place).digest != tokenizer.digest:
                            state = "unusable"
                usable[kind, number] = state
                assert states[f"{kind}@{number}"] == state, (kind, number, states)
        assert len(states) == len(usable)
        for kind in KINDS:
            versions = self.versions(kind)
            with suppress(ArtifactError):
                run.latest(kind)
            if versions:
                assert (self.run / kind / "latest").readlink() == Path(version_name(versions[-1]))


@counts(3, 200)
def test_whatever_commands_meet_on_a_run_it_is_what_the_model_says(examples: int) -> None:
    chosen: Any = search_settings(searching(examples), stateful_step_count=6 if examples < 50 else 20)
    run_state_machine_as_test(RunDirectory, settings=chosen)


@pytest.fixture(autouse=True)
def no_failpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WM_FAILPOINT", raising=False)
