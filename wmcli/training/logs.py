"""What a run logs, for programs that draw curves: TensorBoard, and others that follow metrics.jsonl."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensorboardX import SummaryWriter

from wmcli.artifacts import Run
from wmcli.artifacts.store import refuse_link
from wmcli.training import sinks

TENSORBOARD = "tensorboard"


class EventLog:
    """Passes records on to TensorBoard and other sinks; files and processes appear with the first record.

    TensorBoard's event files are `<run>/tensorboard/<stage>`.

    Args:
        run: The run. It has a record in metrics.jsonl before it is added here.
        names: Of the sinks, as in `training.log_to`.
        config: Settings of the run, to show beside the curves.
        warn: Shows one line to the user.
    """

    def __init__(self, run: Run, names: Sequence[str], config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._run, self._config, self._warn = run, config, warn
        self._others = [name for name in names if name != TENSORBOARD]
        self._folder = run.path / TENSORBOARD if TENSORBOARD in names else None
        self._writers: dict[str, SummaryWriter] = {}
        weakref.finalize(self, _close, self._writers)  # each has a file and a thread

    def check(self) -> None:
        """Raise UsageError if the library of a sink is missing, ArtifactError if a folder to write to is a link."""
        sinks.check_installed(self._others)
        if self._folder is not None:
            refuse_link(self._folder)

    def add(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record with a `stage`.

        The x axis is `update` in a training stage, `environment_step` elsewhere. After a resume, new steps supersede
        older ones in TensorBoard.
        """
        sinks.follow(self._others, self._run.metrics, self._config, self._warn)
        if self._folder is None:
            return
        point = sinks.Point.of(record)
        if point.stage not in self._writers:
            refuse_link(self._folder)
            refuse_link(self._folder / point.stage)
            self._writers[point.stage] = SummaryWriter(str(self._folder / point.stage), purge_step=point.step)
        writer = self._writers[point.stage]
        for name, value in point.values.items():
            writer.add_scalar(name, value, point.step)
        writer.flush()


def _close(writers: dict[str, SummaryWriter]) -> None:
    for writer in writers.values():
        with suppress(OSError):  # what was not written is in metrics.jsonl
            writer.close()
