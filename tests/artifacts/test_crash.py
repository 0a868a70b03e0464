"""Killed, out of space or beaten to it at any point, the store is whole and the same command finishes the work."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import failpoints
import pytest
from small_stage import publish, stage, start, wait

import wmcli
from wmcli.artifacts import Artifact, Run, check, lock
from wmcli.artifacts.lock import exclusive
from wmcli.errors import BusyError, MachineError

FAILPOINTS = (*failpoints.PUBLISHING, failpoints.PUBLISHED)


def test_every_failpoint_is_known() -> None:
    sources = (file.read_text(encoding="utf-8") for file in Path(wmcli.__file__).parent.rglob("*.py"))
    found = {name for source in sources for name in re.findall(r'^ +failpoint\("([^"]+)"\)', source, re.MULTILINE)}
    assert found == {*FAILPOINTS, failpoints.REMOVING, failpoints.REPLACING}


def assert_whole(run: Run, published: Artifact, before: Artifact) -> None:
    """One new version after `before`, both intact, and nothing else in the folder."""
    assert check(run) == [("tokenizer@1", "ok", ""), ("tokenizer@2", "ok", "")]
    assert (published.version, before.version) == (2, 1)
    assert published.file("model.safetensors").read_text() == "weights 7 after 3"
    assert {entry.name for entry in (run.path / "tokenizer").iterdir()} - {".lock", ".holder"} == {
        "v0001",
        "v0002",
        "latest",
    }
    assert (run.path / "tokenizer" / "latest").readlink() == Path("v0002")


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_kill_at_any_failpoint_is_repaired_by_the_same_command(tmp_path: Path, name: str) -> None:
    killed = 0
    while True:
        folder = tmp_path / f"run{killed}"
        before = stage(folder, identity=1)
        status = wait(start(lambda: stage(folder, identity=7), {"WM_FAILPOINT": f"{name}:{killed + 1}"}))  # noqa: B023
        run = Run.open(folder, create=False)
        assert {state for _, state, _ in check(run)} == {"ok"}
        assert_whole(run, stage(folder, identity=7), before)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed > 0, "never reached"


def test_a_kill_while_the_run_is_bound_leaves_a_run_that_can_be_bound(tmp_path: Path) -> None:
    assert wait(start(lambda: stage(tmp_path / "run"), {"WM_FAILPOINT": "write-synced"})) == -signal.SIGKILL
    assert Run.open(tmp_path / "run", create=False).bound() is None
    stage(tmp_path / "run")
    assert Run.open(tmp_path / "run", create=False).bound()["preset"] == "catch"


def test_a_failpoint_is_set_from_outside(tmp_path: Path) -> None:
    code = f"from small_stage import stage, Path; stage(Path({str(tmp_path / 'run')!r}))"
    environment = {**os.environ, "WM_FAILPOINT": "publish-renamed", "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
    assert Run.open(tmp_path / "run", create=False).versions("tokenizer") == [1]


def test_a_kill_while_old_work_is_removed_leaves_no_half_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.job("dynamics", {}, {})
    with job.work() as work:
        (work.path / "a").touch()
        (work.path / "b").touch()

    def remove_one(folder: Path, **_: object) -> None:
        (Path(folder) / "a").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_afresh() -> None:
        shutil.rmtree(work.payload)
        work.payload.mkdir()
        monkeypatch.setattr(shutil, "rmtree", remove_one)
        with job.work(fresh=True):
            pass

    assert wait(start(begin_afresh)) == -signal.SIGKILL
    with job.work() as work:
        assert not work.resumed
    assert {entry.name for entry in (run.path / "dynamics").iterdir()} == {".lock"}


def test_kills_during_prune_leave_a_pruned_version(tmp_path: Path) -> None:
    run = Run.open(tmp_path, create=True)
    for identity in range(3):
        publish(run, "dynamics", identity)
    assert wait(start(lambda: run.prune("dynamics", {1, 2}), {"WM_FAILPOINT": "prune-file:2"})) == -signal.SIGKILL
    assert [state for _, state, _ in check(run)] == ["pruned", "ok", "ok"]
    assert run.prune("dynamics", {1, 2}) == [1, 2]
    assert [state for _, state, _ in check(run)] == ["pruned", "pruned", "ok"]
    assert sorted(entry.name for entry in (tmp_path / "dynamics" / "v0001").iterdir()) == ["manifest.json", "pruned"]


def test_a_kill_while_the_marker_is_written_prunes_nothing(tmp_path: Path) -> None:
    run = Run.open(tmp_path, create=True)
    publish(run, "dynamics", 1)
    assert wait(start(lambda: run.prune("dynamics", {1}), {"WM_FAILPOINT": "write-synced"})) == -signal.SIGKILL
    folder = tmp_path / "dynamics" / "v0001"
    assert ".pruned.partial" in {entry.name for entry in folder.iterdir()}
    assert [state for _, state, _ in check(run)] == ["ok"]
    assert run.prune("dynamics", {1}) == [1]
    assert sorted(entry.name for entry in folder.iterdir()) == ["manifest.json", "pruned"]


def test_publish_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not forced to the disk: the payload is before the rename, the rename is after it."""
    events = []
    rename = os.rename

    def fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()).rpartition("/run/")[2])

    def renames(source: Path, target: Path) -> None:
        events.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    run = Run.open(tmp_path / "run", create=True)
    job = run.job("dynamics", {}, {})
    with job.work() as work:
        (work.payload / "chunks").mkdir()
        for name in ("chunks/0", "chunks/1", "model"):
            (work.payload / name).write_text(name)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", renames)
        work.publish(settings={}, metrics={}, environment=None, machine={})
    home = f"dynamics/{job.work_folder.name}"
    start = events.index("rename payload v0001")
    payload = f"{home}/payload"
    assert set(events[: start - 2]) == {
        f"{payload}{name}" for name in ("/chunks/0", "/chunks/1", "/model", "/chunks", "")
    }
    assert events[start - 2 : start] == [f"{payload}/manifest.json", payload]
    assert set(events[start + 1 : start + 3]) == {home, "dynamics"}


# -- the disk fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_at_any_call_publishes_nothing_or_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    works = getattr(os, call)
    failures = 0
    while True:
        folder = tmp_path / f"run{failures}"
        before = stage(folder, identity=1)
        run = Run.open(folder, create=False)
        left = failures

        def fails(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(number, os.strerror(number))
            return works(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            try:
                stage(folder, identity=7)
            except MachineError as error:
                assert os.strerror(number) in str(error) and "\n" not in str(error)
        assert {state for _, state, _ in check(run)} == {"ok"}
        assert_whole(run, stage(folder, identity=7), before)
        if left >= 0:
            break
        failures += 1
    assert failures > 0, "never called"


def test_a_limit_on_file_sizes_is_a_limit_of_the_machine(run: Run) -> None:
    def too_big() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(MachineError, match="File too large"), run.job("profile", {}, {}).work() as work:
            (work.payload / "big").write_bytes(bytes(8192))

    assert wait(start(too_big)) == 0
    assert run.versions("profile") == []


def test_other_oserrors_are_not_taken_for_the_machines_limits(run: Run) -> None:
    with pytest.raises(FileNotFoundError), run.job("profile", {}, {}).work() as work:
        (work.path / "missing").read_bytes()


# -- several processes ------------------------------------------------------------------------------------------------


def test_the_lock_names_its_holder_and_dies_with_it(run: Run) -> None:
    ready, tell = os.pipe()

    def hold() -> None:
        with run.job("dynamics", {"seed": 1}, {}).work():
            os.write(tell, b"!")
            time.sleep(60)

    child = start(hold)
    os.read(ready, 1)
    try:
        began = time.monotonic()
        for identity in ({"seed": 1}, {"seed": 2}):  # another job of the same kind would be in the way as well
            with pytest.raises(BusyError, match=f"process {child}"), run.job("dynamics", identity, {}).work():
                pass
        with pytest.raises(BusyError):
            publish(run, "dynamics")
        assert time.monotonic() - began < 2, "nobody waits for a lock"
        publish(run, "tokenizer")  # other kinds are free
    finally:
        os.kill(child, signal.SIGKILL)
        wait(child)
        os.close(ready)
        os.close(tell)
    assert publish(run, "dynamics").version == 1


@pytest.mark.parametrize("same", [True, False])
def test_processes_that_publish_at_once_never_lose_or_mix_versions(tmp_path: Path, same: bool) -> None:
    folder = tmp_path / "run"
    Run.open(folder, create=True).bind("catch", {"seed": 3, "tokenizer": {"codes": 17}})
    won = 0
    for turn in range(8):

        def attempt(identity: int) -> None:
            try:
                stage(folder, identity=identity, updates=1)
            except BusyError:
                os._exit(BusyError.exit_code)

        children = [start(lambda each=each: attempt(10 * turn if same else 10 * turn + each)) for each in range(3)]  # noqa: B023
        statuses = [wait(child) for child in children]
        assert set(statuses) <= {0, BusyError.exit_code}
        assert 0 in statuses
        won += 1 if same else statuses.count(0)
    run = Run.open(folder, create=False)
    assert run.versions("tokenizer") == list(range(1, won + 1))
    assert {state for _, state, _ in check(run)} == {"ok"}
    assert (folder / "tokenizer" / "latest").readlink() == Path(f"v{won:04d}")


def test_a_version_taken_meanwhile_is_not_overwritten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish(run, "dynamics", 1)
    numbers = iter([1, 1, 2])  # what a process believes that looked before the other one published
    monkeypatch.setattr(Run, "next_version", lambda self, kind: next(numbers))
    second = publish(run, "dynamics", 2)
    assert (first.version, second.version) == (1, 2)
    assert check(run) == [("dynamics@1", "ok", ""), ("dynamics@2", "ok", "")]


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_who_waits_for_a_lock_gets_it_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders: list[str] = []
    with ExitStack() as other:
        other.enter_context(exclusive(tmp_path, "x"))
        monkeypatch.setattr(lock.time, "sleep", lambda _: other.close())
        with exclusive(tmp_path, "x", waiting=holders.append):
            assert holders == [f"process {os.getpid()}"]
            monkeypatch.undo()
            with pytest.raises(BusyError), exclusive(tmp_path, "x", seconds=0):
                pass


def test_a_removed_lock_file_lets_no_second_writer_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process removed the file between its opening and its locking here."""
    flock = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        (tmp_path / lock.LOCK).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", remove_first)
    with exclusive(tmp_path, "x"):  # noqa: SIM117 (the second one is to fail)
        with pytest.raises(BusyError), exclusive(tmp_path, "x", seconds=0):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(number: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.raises(MachineError, match=f"{run.path}/dynamics: this file system has no locks"):
        publish(run, "dynamics")
