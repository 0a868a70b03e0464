"""A run folder from somebody else: every answer is one line in two seconds, takes little memory and changes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numcodecs.zstd import Zstd
from seconds import within
from small_stage import publish

from wmcli.api import open_run
from wmcli.artifacts import Artifact, Run, check, manifest
from wmcli.artifacts.files import write_durable
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.overview import describe_run, last_record
from wmcli.artifacts.tail import Tail
from wmcli.cli import main
from wmcli.config import digest
from wmcli.errors import ArtifactError, MachineError, UsageError, WmError
from wmcli.experience.segment import open_frames, read_frames, read_segment, write_segment
from wmcli.memory import PROC, peak_resident, resident
from wmcli.settings import resolve
from wmcli.spaces import Spaces
from wmcli.training.checkpoint import TrainState, load_tensors, read_part, save_tensors
from wmcli.training.logs import EventLog

SECONDS = 2.0
MEMORY = 300_000_000
linux = pytest.mark.skipif(not PROC.exists(), reason="needs /proc")
ENVIRONMENT = {"id": "wm/Catch-v0", "protocol": "plain"} | Spaces.of_images(16, 3).describe() | {"size": 16}
SCORE = {"protocol": "returns", "environment": "wm/Catch-v0", "episodes": 3, "mean": 0.5, "stderr": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with settings, a log, and an artifact of most kinds."""
    run = Run.open(tmp_path_factory.mktemp("base") / "run", create=True)
    settings = resolve("quickstart", ["environment.size=16", "training.precision=float32"]).plain()
    run.bind("quickstart", settings)
    run.log({"stage": "collect", "time": "2026-01-01T00:00:00+00:00", "began": "2026-01-01T00:00:00+00:00"})
    made: dict[str, Artifact] = {}
    for kind, inputs in {
        "experience": (),
        "tokenizer": ("experience",),
        "dynamics": ("tokenizer", "experience"),
        "controller": ("dynamics",),
        "evaluation": ("controller",),
    }.items():
        with run.job(kind, {"identity": 0}, {role: made[role] for role in inputs}).work() as work:
            if kind == "experience":
                write_segment(work.payload / "segment.zarr", columns())
            else:
                save_tensors(work.payload / "model.safetensors", {"model/x/weight": torch.zeros(3)}, {})
            metrics = SCORE if kind == "evaluation" else {"total_steps": 130}
            made[kind] = work.publish(
                settings=settings, metrics=metrics, environment=ENVIRONMENT, machine={"precision": "float32"}
            )
    return run.path


@pytest.fixture
def received(base: Path, tmp_path: Path) -> Run:
    return Run(shutil.copytree(base, tmp_path / "run", symlinks=True))


def columns(rows: int = 130) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observation": rng.integers(0, 256, (rows, 16, 16, 3), dtype=np.uint8),
        "action": np.arange(rows, dtype=np.int32) % 3,
        "reward": np.zeros(rows, np.float32),
        "terminated": np.zeros(rows, bool),
        "truncated": np.zeros(rows, bool),
        "first": np.arange(rows) == 0,
        "lives": np.full(rows, -1, np.int16),
        "stream": np.zeros(rows, np.int16),
    }


def answers(*arguments: str, codes: tuple[int, ...] = (0, 2, 3)) -> Callable[[pytest.CaptureFixture[str]], str]:
    """Run one command, which must end with one of the codes, and with one line if that is not 0."""

    def check_answer(capsys: pytest.CaptureFixture[str]) -> str:
        with within(SECONDS):
            code = main.run(arguments)
        err = capsys.readouterr().err
        assert code in codes, (arguments, code, err)
        assert "Traceback" not in err
        said = [line for line in err.splitlines() if not line.startswith("warning: ")]
        assert code == 0 or len(said) == 1, err
        return err

    return check_answer


READERS = {
    "runs": lambda run: ("runs", str(run.parent)),
    "artifacts": lambda run: ("artifacts", "--run", str(run)),
    "lineage": lambda run: ("lineage", "controller", "--run", str(run)),
    "verify": lambda run: ("verify", "--run", str(run)),
    "compare": lambda run: ("compare", str(run)),
    "diff": lambda run: ("diff", str(run / "controller/v0001"), str(run / "dynamics/v0001")),
    "clean": lambda run: ("clean", str(run)),
    "push": lambda run: ("push", str(run), f"file://{run.parent}/elsewhere"),
    "export": lambda run: ("export", "controller", "--run", str(run), "--out", f"{run.parent}/exported", "-q"),
    "eval": lambda run: ("eval", "--run", str(run), "-q"),
    "imagine": lambda run: ("imagine", "--run", str(run), "-q"),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


TRAPS = {"pipe": _pipe, "endless": _endless, "large": _large, "folder": _folder, "socket": _socket}
FILES = ("run.toml", "metrics.jsonl", "used-by.txt", ".holder", "controller/v0001/manifest.json")


@pytest.mark.matrix
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_none(
    received: Run, name: str, trap: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that never ends, of a size beyond measure, or none at all."""
    monkeypatch.chdir(received.path.parent)
    (received.path / name).unlink(missing_ok=True)
    TRAPS[trap](received.path / name)
    for reader in ("runs", "artifacts", "lineage", "verify", "compare", "diff", "push", "export", "clean"):
        answers(*READERS[reader](received.path))(capsys)
    for read in (received.bound, received.history, received.uses, lambda: describe_run(received.path)):
        with within(SECONDS):
            quietly(read)
    with within(SECONDS):
        assert isinstance(last_record(received.metrics), dict)
        Tail(received.metrics).read()


def quietly(read: Callable[[], object]) -> None:
    """Read something: it succeeds, or fails with one line."""
    try:
        read()
    except WmError as error:
        assert str(error) and "\n" not in str(error)


# -- links ------------------------------------------------------------------------------------------------------------


def hold(run: Run) -> None:
    with exclusive(run.path, "the run"):
        assert (run.path / ".holder").read_text().split()[0] == str(os.getpid())


def log_to_tensorboard(run: Run) -> None:
    events = EventLog(run, ["tensorboard"], {}, lambda _: None)
    events.check()
    events.add({"stage": "collect", "environment_step": 1, "loss": 0.5})


def work(run: Run) -> None:
    publish(run, "tokenizer", 7)


WRITERS: dict[str, tuple[str, Callable[[Run], object]]] = {
    "holder": (".holder", hold),
    "lock": (".lock", hold),
    "log": ("metrics.jsonl", lambda run: run.log({"loss": 1.0})),
    "tensorboard": ("tensorboard", log_to_tensorboard),
    "a stage of tensorboard": ("tensorboard/collect", log_to_tensorboard),
    "kind": ("tokenizer", work),
    "pruned kind": ("tokenizer", lambda run: run.prune("tokenizer", [1])),
    "version": ("tokenizer/v0001", lambda run: run.prune("tokenizer", [1])),
    "latest": ("tokenizer/latest", work),
    "draft of settings": (".run.toml.partial", lambda run: write_durable(run.path / "run.toml", [b"seed = 3\n"])),
    "draft of notes": (".used-by.txt.partial", lambda run: run.note_use("0" * 64, run.path)),
    "notes": ("used-by.txt", lambda run: run.note_use("0" * 64, run.path)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_no_write_goes_through_a_link(received: Run, case: str, tmp_path: Path) -> None:
    name, write = WRITERS[case]
    place, outside = received.path / name, tmp_path / "precious"
    if place.is_dir() and not place.is_symlink():
        shutil.move(place, outside)
    elif name.startswith("tensorboard"):
        outside.mkdir()
    else:
        outside.write_text("precious")
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside)
    before = content(outside)
    quietly(lambda: write(received))
    assert content(outside) == before


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(file): file.read_bytes() for file in files}


# -- experience -------------------------------------------------------------------------------------------------------


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    write_segment(tmp_path / "segment.zarr", columns())
    return tmp_path / "segment.zarr"


def read_all(segment: Path) -> None:
    read_segment(segment)
    for _ in read_frames(segment) or ():
        pass
    open_frames(segment)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values))


def bomb(path: Path) -> None:
    """Let a chunk unpack to four gigabytes."""
    packed = bytearray(Zstd(level=1).encode(bytes(1 << 20)))
    assert packed[4] >> 6 == 2, "its length takes four bytes"
    begin = 5 + (not packed[4] & 0x20)
    packed[begin : begin + 4] = (2**32 - 1).to_bytes(4, "little")
    path.write_bytes(packed)


def of(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda segment: rewrite(segment / name / "zarr.json", lambda values: values.update(changes))


def _deep(segment: Path) -> None:
    (segment / "reward" / "zarr.json").write_text('{"a":' * 900 + "1" + "}" * 900)


def _deeper(segment: Path) -> None:
    (segment / "zarr.json").write_text("[" * 200_000)


def _whole_shard(segment: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["shape"][0] = 2**39
        values["chunk_grid"]["configuration"]["chunk_shape"][0] = 2**39
        rewrite(segment / "zarr.json", lambda group: group["attributes"].update(rows=2**39))

    rewrite(segment / "observation" / "zarr.json", change)


def _large_chunk(segment: Path) -> None:
    """More rows than there are, by metadata alone."""
    for name in ("action", "reward", "terminated", "truncated", "first", "lives", "stream"):

        def change(values: dict[str, Any]) -> None:
            values["shape"], values["chunk_grid"]["configuration"]["chunk_shape"] = [2**38], [2**38]

        rewrite(segment / name / "zarr.json", change)
    rewrite(segment / "zarr.json", lambda values: values["attributes"].update(rows=2**38))


SEGMENTS: dict[str, Callable[[Path], object]] = {
    "bomb": lambda segment: bomb(segment / "reward/c/0"),
    "no zstd": lambda segment: (segment / "reward/c/0").write_bytes(b"reward"),
    "empty chunk": lambda segment: (segment / "reward/c/0").write_bytes(b""),
    "short shard": lambda segment: (segment / "observation/c/0/0/0/0").write_bytes(b"frames"),
    "deep": _deep,
    "deeper": _deeper,
    "one shard": _whole_shard,
    "many rows": _large_chunk,
    "many axes": of("reward", shape=[1] * 400),
    "no shape": of("reward", shape=None),
    "texts": of("reward", data_type="string"),
    "other codec": of("reward", codecs=[{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]),
    "no codec": of("reward", codecs="zstd"),
    "nested shards": of("observation", codecs=[{"name": "sharding_indexed", "configuration": {}}]),
    "transformers": of("reward", storage_transformers=[{"name": "x"}]),
    "other names": of("reward", chunk_key_encoding={"name": "v2"}),
    "group": of("reward", node_type="group"),
    "no attributes": lambda segment: rewrite(segment / "zarr.json", lambda values: values.update(attributes=3)),
    "a list": lambda segment: (segment / "reward/zarr.json").write_text("[]"),
    "linked chunk": lambda segment: relinked(segment / "reward/c/0"),
    "piped chunk": lambda segment: repiped(segment / "reward/c/0"),
    "piped metadata": lambda segment: repiped(segment / "reward/zarr.json"),
}


def relinked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def repiped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@linux
@pytest.mark.parametrize("case", SEGMENTS)
def test_a_segment_takes_no_more_memory_than_it_declares(segment: Path, case: str) -> None:
    SEGMENTS[case](segment)
    (PROC / "self" / "clear_refs").write_text("5")
    before = resident()
    with within(SECONDS), pytest.raises((ArtifactError, MachineError)) as raised:
        read_all(segment)
    assert "\n" not in str(raised.value)
    assert peak_resident() - before < MEMORY


def test_more_than_the_free_memory_is_not_begun(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmcli.experience.arrays.free_memory", lambda: 1000)
    with pytest.raises(MachineError, match="of memory, of which"):
        read_segment(segment, "observation")


def test_the_corpus_is_refused_for_its_hostility_only(segment: Path) -> None:
    read_all(segment)
    array = zarr.open_array(segment / "reward", mode="r")
    assert array.shape == (130,)


# -- tensors ----------------------------------------------------------------------------------------------------------


class Sampler:
    """A part of training whose state is an array."""

    def state(self) -> dict[str, Any]:
        return {"counts": np.arange(3)}

    def load(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"] + 0

    continue_from = load


def training() -> TrainState:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return TrainState({"x": model}, optimizer, np.random.default_rng(0), {"sampler": Sampler()})


def resaved(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors, about = load_tensors(path)
        change(tensors, about)
        save_tensors(path, tensors, about)

    return damage


def _header(length: int, size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(size)

    return damage


TENSORS: dict[str, Callable[[Path], object]] = {
    "header of a gigabyte": _header((1 << 30) - 8, 1 << 30),
    "header beyond the file": _header(1 << 62, 100),
    "empty": lambda path: path.write_bytes(b""),
    "metadata no table": resaved(lambda _, about: about.clear()),
    "parts no table": resaved(lambda _, about: about.update(parts=3)),
    "part of another form": resaved(lambda _, about: about.update(parts={"sampler": [1]})),
    "counts of texts": resaved(lambda _, about: about.update(update="x", trained=None)),
    "no generator": resaved(lambda _, about: about.update(rng={"a": 1})),
    "many slashes": resaved(lambda tensors, _: tensors.update({"parts/a/b/c/d": torch.ones(1)})),
    "slashes of moments": resaved(lambda tensors, _: tensors.update({"optimizer/0/1/2": torch.ones(1)})),
    "moments of no parameter": resaved(lambda tensors, _: tensors.update({"optimizer/77/exp_avg": torch.ones(1)})),
    "moments of a word": resaved(lambda tensors, _: tensors.update({"optimizer/x/exp_avg": torch.ones(1)})),
    "moments of another shape": resaved(lambda tensors, _: tensors.update({"optimizer/0/exp_avg": torch.ones(9)})),
    "generator of floats": resaved(lambda tensors, _: tensors.update({"random/torch": torch.ones(4)})),
    "no weights": resaved(lambda tensors, _: tensors.pop("model/x/weight")),
    "a pipe": lambda path: repiped(path),
    "endless": lambda path: relinked(path),
}


@linux
@pytest.mark.parametrize("case", TENSORS)
def test_a_state_of_training_that_lies(case: str, tmp_path: Path) -> None:
    path = tmp_path / "training.safetensors"
    training().save(path, torch.device("cpu"))
    TENSORS[case](path)
    before = resident()
    failed = 0
    for read in (
        lambda: training().load(path, torch.device("cpu")),
        lambda: training().continue_from(path),
        lambda: read_part(path, "sampler"),
    ):
        with within(SECONDS):
            try:
                read()
            except (ArtifactError, MachineError) as error:
                failed += 1
                assert "\n" not in str(error)
    assert failed and resident() - before < MEMORY


def test_a_header_of_a_gigabyte_is_not_hashed(received: Run) -> None:
    place = received.path / "tokenizer/v0001"
    _header((1 << 30) - 8, 1 << 30)(place / "model.safetensors")
    reseal(place, lambda values: values["files"][0].update(size=1 << 30))
    with within(SECONDS), pytest.raises(ArtifactError, match="no file of tensors"):
        received.get("tokenizer", 1).verify()


# -- manifests --------------------------------------------------------------------------------------------------------


def reseal(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with a digest that fits."""
    values = json.loads((place / "manifest.json").read_bytes())
    change(values)
    del values["digest"]
    values["digest"] = digest(values)
    (place / "manifest.json").write_bytes(manifest.render(values))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metrics": lambda m: m.update(metrics={}),
    "no protocol": lambda m: m["metrics"].pop("protocol"),
    "no mean": lambda m: m["metrics"].pop("mean"),
    "mean of words": lambda m: m["metrics"].update(mean="high"),
    "returns of words": lambda m: m["metrics"].update(returns=["high"]),
    "episodes of lists": lambda m: m["metrics"].update(episodes=[3]),
    "huge number": lambda m: m["metrics"].update(mean=10**1000),
    "no environment": lambda m: m.update(environment=None),
    "empty environment": lambda m: m.update(environment={}),
    "environment of numbers": lambda m: m["environment"].update(id=3),
    "odd actions": lambda m: m["environment"].update(actions={"kind": "x"}),
    "no settings": lambda m: m.update(settings={}),
    "odd settings": lambda m: m.update(settings={"dynamics": 3, "run": [1]}),
    "deep settings": lambda m: m.update(settings=nested(300)),
    "deep metrics": lambda m: m["metrics"].update(source=nested(900)),
    "no machine": lambda m: m.update(machine={}),
    "odd epoch": lambda m: m["extra"].update(epoch="last"),
    "odd time": lambda m: m.update(created="yesterday"),
    "time without zone": lambda m: m.update(created="2026-01-01"),
    "input of itself": lambda m: m["inputs"].update(controller=m["inputs"].get("controller", {}) | {"path": "a/../b"}),
    "input elsewhere": lambda m: m["inputs"]["controller"].update(path="/dev/zero"),
    "later schema": lambda m: m.update(settings_schema=99),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_of_another_form(
    received: Run, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(received.path.parent)
    reseal(received.path / "evaluation/v0001", MANIFESTS[case])
    for reader in ("runs", "artifacts", "verify", "compare"):
        answers(*READERS[reader](received.path))(capsys)
    answers("lineage", "evaluation", "--run", str(received.path))(capsys)


@pytest.mark.parametrize("case", ["deep", "dots", "digits", "changes", "odd section", "preset"])
def test_settings_of_another_form(received: Run, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = received.path / "run.toml"
    text = path.read_text()
    path.write_text(
        {
            "deep": text + "\n[settings.x]\na = " + "[" * 500 + "]" * 500,
            "dots": ".".join("a" * 60_000) + " = 1",
            "digits": text.replace("seed = 1", f"seed = {'1' * 5000}"),
            "changes": 'changes = [{epoch = 1, set = ["environment.id=evil:Id"]}]\n' + text,
            "odd section": 'preset = "quickstart"\n[settings]\ndynamics = 3\n',
            "preset": text.replace('preset = "quickstart"', 'preset = "/dev/zero/x.toml"'),
        }[case]
    )
    for reader in ("runs", "eval", "imagine"):
        answers(*READERS[reader](received.path))(capsys)


# -- the disk's fault -------------------------------------------------------------------------------------------------

FAULTS = (errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE, errno.ENOTCONN)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Let a file fail when it is opened."""
    opened = os.open

    def fail(name: str, number: int) -> None:
        def wrong(path: Any, *arguments: Any, **named: Any) -> int:
            if str(path).endswith(name):
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *arguments, **named)

        monkeypatch.setattr(os, "open", wrong)

    yield fail
    monkeypatch.undo()


@pytest.mark.matrix
@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("controller/v0001/manifest.json", lambda run: run.get("controller", 1)),
        ("controller/v0001/model.safetensors", lambda run: run.get("controller", 1).verify_again()),
        (
            "v0001/model.safetensors",
            lambda run: load_tensors(run.path / "controller/v0001/model.safetensors"),
        ),
        ("reward/c/0", lambda run: read_segment(run.path / "experience/v0001/segment.zarr")),
        ("reward/zarr.json", lambda run: read_segment(run.path / "experience/v0001/segment.zarr")),
        ("segment.zarr/zarr.json", lambda run: read_segment(run.path / "experience/v0001/segment.zarr")),
        ("run.toml", lambda run: run.bound()),
        ("metrics.jsonl", lambda run: run.history()),
    ],
)
def test_a_fault_of_the_disk_is_no_damage(
    received: Run, name: str, read: Callable[[Run], object], number: int, failing: Callable[[str, int], None]
) -> None:
    manifest._opened.clear()
    failing(name, number)
    with pytest.raises(MachineError) as raised:
        read(received)
    line = str(raised.value)
    assert name in line and os.strerror(number) in line and "no damage" in line and "--force" not in line


def test_a_fault_while_reading_is_no_damage(received: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error names no file by itself."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", fail)
    with pytest.raises(MachineError, match=r"model\.safetensors: cannot be read: Input/output error"):
        received.get("controller", 1).verify_again()


def test_verify_tells_a_fault_of_the_disk_from_damage(
    received: Run, failing: Callable[[str, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing("dynamics/v0001/model.safetensors", errno.EIO)
    states = {name: state for name, state, _ in check(received)}
    assert states["dynamics@1"] == "unreadable" and states["tokenizer@1"] == "ok"
    assert states["controller@1"] == "unusable", "it needs the dynamics"
    assert main.run(["verify", "--run", str(received.path)]) == 6
    assert "check the disk" in capsys.readouterr().err
    (received.path / "tokenizer/v0001/model.safetensors").write_bytes(b"other")
    assert main.run(["verify", "--run", str(received.path)]) == 3


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file when it is imported, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("WM_TRUST", raising=False)
    (tmp_path / "evil_env.py").write_text(
        "from pathlib import Path\nimport gymnasium\nfrom wmcli.envs.catch import Catch\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "gymnasium.register('evil/Catch-v0', entry_point='wmcli.envs.catch:Catch')\n"
    )
    path = list(sys.path)
    yield tmp_path / "imported"
    sys.path[:] = path
    sys.modules.pop("evil_env", None)


COLLECT = ("collect", "--set", "collect.steps=20", "--set", "environment.size=16", "-q")


def forget(imported: Path) -> None:
    imported.unlink(missing_ok=True)
    sys.modules.pop("evil_env", None)


def test_a_run_imports_code_where_it_was_begun(evil: Path, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine")
    assert main.run([*COLLECT, "--run", mine, "--env", "evil_env:evil/Catch-v0"]) == 0
    assert evil.exists()
    forget(evil)
    assert main.run([*COLLECT, "--run", mine]) == 0, "the user named it when the run began"
    assert evil.exists()


@pytest.mark.parametrize("stage", ["collect", "train-tokenizer", "train-dynamics", "imagine", "eval", "play", "run"])
def test_a_copy_of_a_run_imports_nothing_unasked(
    stage: str, evil: Path, received: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = received.path / "run.toml"
    path.write_text(path.read_text().replace('id = "wm/Catch-v0"', 'id = "evil_env:evil/Catch-v0"'))
    out = ["--out", "film.webp"] if stage == "play" else []
    err = answers(stage, "--run", str(received.path), *out, codes=(2,))(capsys)
    assert "evil_env:evil/Catch-v0" in err and "--trust" in err
    assert not evil.exists()


def test_what_allows_a_run_to_import_code(
    evil: Path, received: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = received.path / "run.toml"
    path.write_text(path.read_text().replace('id = "wm/Catch-v0"', 'id = "evil_env:evil/Catch-v0"'))
    line = [*COLLECT, "--run"]
    copy = shutil.copytree(received.path, tmp_path / "copy", symlinks=True)
    other = shutil.copytree(received.path, tmp_path / "other", symlinks=True)
    monkeypatch.setattr("wmcli.cli.collect.published", lambda *_: None)
    monkeypatch.setattr("wmcli.stages.collect.collect", lambda *_, **__: None)
    assert main.run([*line, str(copy)]) == 2
    assert main.run([*line, str(copy), "--trust"]) == 0
    assert main.run([*line, str(copy)]) == 0, "it is remembered"
    assert main.run([*line, str(other)]) == 2, "for that run alone"
    assert main.run([*line, str(other), "--env", "evil_env:evil/Catch-v0"]) == 0, "the command names it"
    (copy / "run.toml").write_text(path.read_text().replace("evil_env:evil/Catch-v0", "evil_env:evil/Other-v0"))
    assert main.run([*line, str(copy)]) == 2, "and for that code alone"
    monkeypatch.setenv("WM_TRUST", "1")
    assert main.run([*line, str(copy)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "wrappers", ['["evil_env:Thing(a=1)"]', "[\"RecordVideo(video_folder='/tmp/x')\"]", '["FlattenObservation"]']
)
def test_wrappers_are_code_too(evil: Path, received: Run, wrappers: str) -> None:
    path = received.path / "run.toml"
    path.write_text(path.read_text().replace("wrappers = []", f"wrappers = {wrappers}"))
    if "Flatten" in wrappers:
        assert open_run(received.path).settings.environment.code == ()
        return
    with pytest.raises(UsageError, match="--trust"):
        _ = open_run(received.path).settings
    assert open_run(received.path, trust=True).settings.environment.code


# -- full disks -------------------------------------------------------------------------------------------------------

FULL = Path("/dev/full")
full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def wm(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "wmcli", *arguments]
    return subprocess.run(line, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)


@full
@pytest.mark.slow
def test_talk_that_cannot_be_written_ends_no_work(tmp_path: Path) -> None:
    with FULL.open("w") as nowhere:
        done = wm(*COLLECT[:-1], "--run", str(tmp_path / "run"), stdout=subprocess.PIPE, stderr=nowhere)
        assert done.returncode == 0 and done.stdout.strip().endswith("experience/v0001")
        assert wm("colect", stdout=subprocess.PIPE, stderr=nowhere).returncode == 2


@full
@pytest.mark.slow
def test_a_result_that_cannot_be_written_says_that_the_work_is_done(tmp_path: Path) -> None:
    with FULL.open("w") as nowhere:
        done = wm(*COLLECT, "--run", str(tmp_path / "run"), stdout=nowhere, stderr=subprocess.PIPE)
    assert done.returncode == 6 and done.stderr.count("\n") == 1
    assert "experience@1 was published" in done.stderr and "do not run the command again" in done.stderr
    assert str(tmp_path / "run/experience/v0001") in done.stderr
    assert Run.open(tmp_path / "run", create=False).versions("experience") == [1]
