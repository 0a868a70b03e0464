"""TensorBoard event files of a run, one series per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

ABOUT = ("stage", "update", "time", "job", "version")
"""Entries of a record that are not plotted."""


class EventLog:
    """Writes records as scalars to `<run>/tensorboard/<stage>`; files appear with the first record."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record with a `stage`.

        The x axis is `update` in a training stage, `environment_step` elsewhere. After a resume, new steps supersede
        older ones.
        """
        stage, step = record["stage"], record.get("update", record["environment_step"])
        if stage not in self._writers:
            self._writers[stage] = SummaryWriter(str(self._folder / stage), purge_step=step)
        writer = self._writers[stage]
        for name, value in record.items():
            if name not in ABOUT and isinstance(value, int | float):
                writer.add_scalar(name, value, step)
        writer.flush()
