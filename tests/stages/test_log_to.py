"""`training.log_to`: what a run does besides is the same, and all of its processes are heard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stand_in_wandb import entries, install
from test_stage_loop import LOOP
from tiny_run import TINY, latest, opened

from wmcli.artifacts import Run
from wmcli.errors import UsageError
from wmcli.stages.collect import collect
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.play import play
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training import sinks

BOTH = 'training.log_to=["tensorboard", "wandb"]'


def test_a_missing_library_is_told_before_the_work(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"training.log_to holds wandb.*pip install 'wmcli\[wandb\]'"):
        collect(open_context(tmp_path / "run", None, [*TINY, BOTH], create=True, quiet=True))
    assert not (tmp_path / "run").exists()
    film = play(opened(tiny, BOTH), source="real", out=tmp_path / "a.webp", controller=None, seed=1)
    assert film.path.exists(), "what logs nothing needs no library"


def test_where_a_run_logs_identifies_no_job(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = install(tmp_path, monkeypatch)
    for texts in ([BOTH], ["training.log_to=[]"]):
        assert train_tokenizer(opened(tiny, *texts)).digest == latest(tiny, "tokenizer").digest
    sinks.close()
    assert not stored.exists()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_every_record_of_every_process_is_sent_once(
    tmp_path: Path, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = install(tmp_path, monkeypatch)
    how = [*LOOP, "run.collect_epochs=5", "run.controller_after=1", f"run.overlap={overlap}", BOTH]
    run_loop(opened(tmp_path / "run", *how, new=True))
    sinks.close()
    run = Run.open(tmp_path / "run", create=False)
    points = [sinks.Point.of(record) for record in run.history()]
    assert {point.stage for point in points} == {"collect", "train-tokenizer", "train-dynamics", "imagine", "eval"}
    wanted = [
        {f"{point.stage}/{name}": value for name, value in point.values.items()}
        | {f"{point.stage}/{point.axis}": point.step}
        for point in points
    ]
    assert entries(stored, "log") == wanted
    assert len(entries(stored, "init")) == 1
    assert {folder.name for folder in (run.path / "tensorboard").iterdir()} == {point.stage for point in points}
