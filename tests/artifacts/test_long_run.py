"""What long runs cost: finding the jobs of a run again is work for each version once, and stays right meanwhile."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from small_stage import publish

from wmcli.artifacts import Run, manifest, store


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the lists of folders and the manifests that are read. Time stamps count as old at once."""
    counts: Counter[str] = Counter()
    scan, read = os.scandir, manifest.read_file

    def counting_scan(path: str) -> object:
        counts["lists"] += 1
        return scan(path)

    def counting_read(path: Path, limit: int) -> bytes:
        counts["manifests"] += 1
        return read(path, limit)

    monkeypatch.setattr(store.os, "scandir", counting_scan)
    monkeypatch.setattr(manifest, "read_file", counting_read)
    monkeypatch.setattr(store, "CLOCK_TICK", -(10**18))
    monkeypatch.setattr(manifest, "CLOCK_TICK", -(10**18))
    return counts


def finish(run: Run, epochs: int) -> None:
    """Find all jobs of a finished run again, epoch after epoch."""
    model = None
    for epoch in range(epochs):
        job = run.job("dynamics", {"identity": epoch}, {} if model is None else {"parent": model})
        model = job.done()
        assert model is not None and model.version == epoch + 1


def test_finding_finished_jobs_again_reads_each_version_once(run: Run, work: Counter[str]) -> None:
    model = None
    for epoch in range(20):
        model = publish(run, "dynamics", epoch, **({} if model is None else {"parent": model}))
    for epochs in (10, 20):
        manifest._opened.clear()
        work.clear()
        finish(Run.open(run.path, create=False), epochs)
        assert work == {"lists": 1, "manifests": 20}


def test_what_others_publish_and_remove_meanwhile_counts(run: Run, work: Counter[str]) -> None:
    ours, job = Run.open(run.path, create=False), {"identity": 1}
    assert ours.job("dynamics", job, {}).done() is None
    for version in (1, 2, 3):
        publish(run, "dynamics", version % 2)
        assert ours.versions("dynamics") == list(range(1, version + 1)) and ours.next_version("dynamics") == version + 1
        found = ours.job("dynamics", job, {}).done()
        assert found is not None and found.version == (3 if version == 3 else 1)
    shutil.rmtree(run.path / "dynamics" / "v0003")
    found = ours.job("dynamics", job, {}).done()
    assert found is not None and found.version == 1
    other = (run.path / "dynamics" / "v0002" / "manifest.json").read_bytes()
    (run.path / "dynamics" / "v0001" / "manifest.json").write_bytes(other)
    assert ours.job("dynamics", job, {}).done() is None, "what holds another version now is not taken"
    latest = run.path / "dynamics" / "latest"
    latest.unlink()
    latest.symlink_to("v0001")
    ours.point_latest("dynamics")
    assert latest.readlink() == Path("v0002")
