from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from odd_lengths import ODD_LENGTHS
from small_systems import Make, begun, learn
from tiny_run import EVERY_STAGE, copied, opened

from wmcli.stages.collect import collect
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training import measure


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests kill processes, not the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def copies_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of runs stand elsewhere than where they began, and some play environments of the tests."""
    monkeypatch.setenv("WM_TRUST", "1")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Stages set the number of torch's threads for the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in samples that are as short as can be."""
    monkeypatch.setattr(measure, "REPEATS", 2)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # slow where so much is loaded


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through every stage once, each with a context of its own. Only to be read."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    collect(opened(folder, new=True))
    for stage in EVERY_STAGE.values():
        stage(opened(folder, pictures=True))
    return folder


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Path:
    """A copy of `tiny` to change at will."""
    return copied(tiny, tmp_path / "run")


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in another environment, up to its tokenizer. Only to be read."""
    folder = tmp_path_factory.mktemp("elsewhere") / "run"
    context = opened(folder, f"environment.id={ODD_LENGTHS}", "tokenizer.updates=1", new=True)
    collect(context)
    train_tokenizer(context)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`small(system)`: a run of that kind, `trained` with a dynamics model as well. Only to be read."""
    made: dict[tuple[str, bool], Path] = {}

    def run(name: str, trained: bool = False) -> Path:
        if (name, trained) not in made:
            folder = tmp_path_factory.mktemp("small") / "run"
            if trained:
                learn(copied(run(name), folder), "dynamics", "dynamics.updates=2")
            made[name, trained] = folder if trained else begun(name, folder)
        return made[name, trained]

    return run


@pytest.fixture
def make(small: Make, tmp_path: Path) -> Make:
    """The same, copied to change at will."""
    return lambda name, trained=False: copied(small(name, trained), tmp_path / name)
