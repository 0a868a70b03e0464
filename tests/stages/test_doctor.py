"""`wm doctor`: every fault that it is to find, made on purpose."""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wmcli import memory
from wmcli.artifacts import Run, filesystem
from wmcli.artifacts.lock import HOLDER, exclusive
from wmcli.cli import main
from wmcli.settings import resolve
from wmcli.stages import doctor
from wmcli.stages.doctor import Finding

Patch = pytest.MonkeyPatch


def only(findings: Iterator[Finding], name: str) -> Finding:
    (found,) = [each for each in findings if each.name == name]
    return found


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open(tmp_path / "run", create=True)
    run.bind("quickstart", resolve("quickstart").plain())
    return run


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_sound_machine_and_run_have_no_problem_and_are_left_as_they_were(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run.path.parent)
    assert main.run(["doctor", str(run.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["topic"] for row in rows} == {
        *("versions", "extras", "devices", "processor", "memory", "disk", "programs", "run")
    }
    assert {row["state"] for row in rows} <= {"ok", "warning"}
    assert all(row["remedy"] for row in rows if row["state"] != "ok")
    assert tree(run.path.parent) == before


def test_a_problem_ends_with_1_and_a_run_that_is_not_there_with_3(run: Run, monkeypatch: Patch) -> None:
    (run.path / "run.toml").write_text('schema = 99\npreset = "quickstart"\n[settings]\n')
    monkeypatch.setattr(doctor, "examine_machine", lambda folder: iter(()))
    assert main.run(["doctor", str(run.path)]) == 1
    assert main.run(["doctor", str(run.path / "nowhere")]) == 3


# -- the machine ------------------------------------------------------------------------------------------------------


def test_a_missing_and_an_old_package_are_problems(monkeypatch: Patch) -> None:
    versions = {"wmcli": "0.2.0", "torch": "2.5.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    needed = ["torch>=2.11,<2.14", "zarr>=3.1.3", "h5py>=3; extra == 'data'", "nothing; sys_platform == 'none'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    monkeypatch.setattr(metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda key: ["data", "test"]))
    found = {each.name: each for each in doctor._versions()}
    assert found.keys() == {"python", "wmcli", "torch", "zarr"}
    assert found["torch"].state == found["zarr"].state == "problem" and "2.5.0+cpu" in found["torch"].found
    assert found["zarr"].remedy == "pip install 'zarr>=3.1.3'"
    (extra,) = doctor._extras()
    assert (extra.state, extra.remedy) == ("ok", "if you need it: pip install 'wmcli[data]'")
    versions["h5py"] = "2.1"
    (extra,) = doctor._extras()
    assert extra.state == "warning" and "h5py 2.1" in extra.found
    del versions["wmcli"]
    assert [each.state for each in doctor._versions()] == ["ok", "warning"] and not list(doctor._extras())


def test_torch_that_cannot_be_imported_is_a_problem(monkeypatch: Patch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    (found,) = doctor._devices()
    assert found.state == "problem" and "libcudart" in found.found


def test_a_gpu_that_torch_cannot_use_is_named_with_the_reason(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    assert only(doctor._devices(), "gpu").state == "ok"
    (tmp_path / "version").write_text("NVRM version: 470.42\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "for CPUs" in only(doctor._devices(), "gpu").found
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "init", init)
    found = only(doctor._devices(), "gpu")
    assert found.state == "warning" and "(driver 470.42)" in found.found and "update the driver" in found.remedy
    assert found.found.endswith("driver on your system is too old")


def test_a_gpu_is_named_with_its_driver(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n")
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    about = SimpleNamespace(name="NVIDIA H100", total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = {each.name: each.found for each in doctor._devices()}
    assert found["cuda:0"] == "NVIDIA H100, 80 GB, CUDA 12.8, driver 570.86.15"
    assert found["precision"] == "bfloat16 on cuda:0 (training.precision = auto)" and "cuda:0" in found["triton"]


def test_limits_of_a_container_are_seen(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert only(doctor._processor(), "cores").state == "ok"
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert only(doctor._processor(), "cores").remedy.startswith("set OMP_NUM_THREADS=2")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert only(doctor._processor(), "cores").remedy == "set OMP_NUM_THREADS=8"
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert only(doctor._memory(), "memory").state == "ok"
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("3500000000\n")
    found = only(doctor._memory(), "memory")
    assert found.state == "warning" and found.found == "500 MB free of 4.0 GB, the limit of a container"


def test_a_missing_rom_is_a_warning(monkeypatch: Patch) -> None:
    import ale_py.roms

    def get_rom_path(name: str) -> Path:
        raise FileNotFoundError(errno.ENOENT, "No such file", name)

    monkeypatch.setattr(ale_py.roms, "get_rom_path", get_rom_path)
    assert only(doctor._programs(), "ALE ROMs").state == "warning"


# -- the disk ---------------------------------------------------------------------------------------------------------


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def replace_folder(self: Path, target: Path) -> Path:
    if self.is_dir() and target.is_dir():
        (target / "file").unlink()
    return self.replace(target)


FAULTS: dict[str, tuple[str, str, Callable[[Patch], None]]] = {
    "no locks": ("locks", "problem", lambda patch: patch.setattr(fcntl, "flock", fail)),
    "locks without effect": ("locks", "problem", lambda patch: patch.setattr(fcntl, "flock", lambda *_: None)),
    "renames that overwrite": ("renames", "problem", lambda patch: patch.setattr(Path, "rename", replace_folder)),
    "no folder fsync": ("folder fsync", "problem", lambda patch: patch.setattr(filesystem, "sync_folder", fail)),
    "no symlinks": ("symlinks", "warning", lambda patch: patch.setattr(Path, "symlink_to", fail)),
    "one case": ("case", "warning", lambda patch: patch.setattr(Path, "exists", lambda _: True)),
    "slow": ("fsync", "warning", lambda patch: patch.setattr(os, "fsync", lambda _: time.sleep(0.11))),
    "ahead": ("clock", "warning", lambda patch: patch.setattr(filesystem.time, "time", lambda t=time.time: t() - 60)),
    "behind": ("clock", "warning", lambda patch: patch.setattr(filesystem.time, "time", lambda t=time.time: t() + 60)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_file_system_is_found(fault: str, tmp_path: Path, monkeypatch: Patch) -> None:
    name, state, break_it = FAULTS[fault]
    assert only(doctor._disk(tmp_path), name).state == "ok"
    break_it(monkeypatch)
    found = only(doctor._disk(tmp_path), name)
    assert found.state == state and found.remedy
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_and_one_that_cannot_be_written_are_found(tmp_path: Path, monkeypatch: Patch) -> None:
    later = tmp_path / "not" / "there"  # the folder above it counts
    for free, state in ((5e8, "problem"), (5e9, "warning"), (5e10, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert only(doctor._disk(later), "space").state == state
    monkeypatch.setattr(filesystem.tempfile, "mkdtemp", fail)
    assert only(doctor._disk(later), "probes").state == "warning"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rw,relatime - ext4 /dev/vda rw", None),
        ("rw - nfs4 server:/export rw,vers=4.2,local_lock=none", None),
        ("rw - nfs server:/export rw,vers=3,nolock", "nolock"),
        ("rw - nfs server:/export rw,vers=3,local_lock=flock", "local_lock=flock"),
        ("rw - cifs //server/share rw,nobrl", "nobrl"),
        ("rw - lustre mgs@tcp:/scratch rw,flock", None),
        ("rw - lustre mgs@tcp:/scratch rw,localflock", "without flock"),
        ("rw - fuse.sshfs me@server:/ rw", "sshfs"),
        ("rw - fuse.s3fs s3fs rw", "rename"),
        ("rw - virtiofs shared rw", "virtiofs"),
    ],
)
def test_a_mount_without_shared_locks_is_known(line: str, said: str | None, tmp_path: Path, monkeypatch: Patch) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / {escaped} {line}\n")
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "mounts")
    mount = filesystem.mount_of(place / "run")
    assert mount is not None and mount.kind in line
    trouble = filesystem.trouble_between_machines(mount)
    assert (trouble is None) == (said is None) and (said or "") in (trouble or "")
    assert only(doctor._disk(place), "file system").state == ("ok" if said is None else "warning")
    assert only(doctor._disk(tmp_path), "file system").found.startswith("overlay: in the layer of a container")


# -- a run ------------------------------------------------------------------------------------------------------------


def test_who_works_on_a_run_and_what_was_left_are_told(run: Run) -> None:
    (run.path / "dynamics").mkdir()
    assert only(doctor.examine_run(run.path), "lock").found == "no process of this machine works on it"
    with exclusive(run.path / "dynamics", "dynamics"):
        assert only(doctor.examine_run(run.path), "lock").found.startswith("dynamics is being written by ")
    (run.path / "dynamics" / HOLDER).write_text("1")  # after a crash
    (run.path / "dynamics" / ".work-0123").mkdir()
    (run.path / "dynamics" / ".work-0123" / "checkpoint.safetensors").touch()
    found = list(doctor.examine_run(run.path))
    assert only(iter(found), "leftovers").found == "of killed processes: dynamics/.holder"
    assert "resumes" in only(iter(found), "stopped work").remedy


def test_a_damaged_manifest_is_a_problem_and_an_old_schema_is_none(run: Run) -> None:
    assert only(doctor.examine_run(run.path), "schema").remedy == ""
    text = (run.path / "run.toml").read_text()
    (run.path / "run.toml").write_text(text.replace("schema = 2", "schema = 1"))
    found = only(doctor.examine_run(run.path), "schema")
    assert found.state == "ok" and f"wm upgrade {run}" in found.remedy
    (run.path / "dynamics" / "v0001").mkdir(parents=True)
    (run.path / "dynamics" / "v0001" / "manifest.json").write_text("{")
    assert only(doctor.examine_run(run.path), "manifest").state == "problem"


def test_permissions_of_a_run_are_looked_at(run: Run, monkeypatch: Patch) -> None:
    def deny(name: str, denied: int) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode, **_: not (Path(path).name == name and mode & denied))

    assert only(doctor.examine_run(run.path), "permissions").state == "ok"
    deny("run.toml", os.W_OK)
    assert only(doctor.examine_run(run.path), "permissions").state == "warning"
    for name in ("run.toml", "run"):
        deny(name, os.R_OK)
        (found,) = doctor.examine_run(run.path)  # what cannot be read is not looked into
        assert (found.name, found.state) == ("permissions", "problem") and name in found.found
