"""The part of `wm profile` that writes, loads and reads experience as a run of the preset does.

Frames are those of random play in the preset's environment. The first `PLAYED` of them repeat. Chunks are compressed
separately, so repetition changes neither size nor speed. Files are on the disk of the run. They are synchronized to
disk when written, and in the system's cache when loaded.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wmcli.controllers.agent import UniformAgent
from wmcli.envs import open_streams
from wmcli.errors import UsageError
from wmcli.experience import Recorder, Replay, read_frames, read_segment, write_segment
from wmcli.experience.segment import CLOSING, kind_of
from wmcli.settings import LearnedCollectSettings
from wmcli.spaces import bytes_of, from_columns, row_of
from wmcli.stages.context import Context
from wmcli.stages.player import step_columns
from wmcli.trainers.batches import build_sampler, gather
from wmcli.training.measure import Bench, time_call

PLAYED = 2048
WINDOWS = 64  # in a batch
LENGTH = 64  # frames of a window


def profile_experience(context: Context, bench: Bench, frames: int, folder: Path) -> list[dict[str, Any]]:
    """Rows: write, load and draw windows of `frames` frames or a few more, in segments of `collect.steps` below
    `folder`, which is removed in the end. A sample of the first two is a segment; `seconds_in_all` is the whole. `rate`
    counts frames, or windows.

    Raises UsageError when they are too few for a window.
    """
    settings, count = context.settings, context.settings.environment.count
    steps = min(settings.collect.steps, frames) if isinstance(settings.collect, LearnedCollectSettings) else frames
    rows = -(-steps // count) * count  # of a segment: as many of each environment
    segments = [folder / f"{index:06d}" for index in range(-(-frames // rows))]
    if frames < LENGTH * count:
        raise UsageError(
            f"--frames {frames}: a window is {LENGTH} frames of one environment, of which there are {count}; give"
            f" {LENGTH * count} or more."
        )
    played = _played(context)
    segment = {name: array[np.arange(rows) % len(array)] for name, array in played.items() if kind_of(name) != CLOSING}
    size = bytes_of(from_columns("observation", segment))
    side = settings.environment.size
    shape = f"{len(segments)} segments of {rows} frames, {side}×{side}"
    memory = Replay(bench.device)
    written, loaded = [], []

    def write(path: Path) -> None:
        write_segment(path, segment)
        _force(path)

    def load(path: Path) -> None:
        memory.extend(read_segment(path, frames=False), read_frames(path))

    try:
        with context.progress.bar("profile write", len(segments), "segments") as bar:
            for path in segments:
                written.append(time_call(partial(write, path), bench.device))
                bar.advance()
        stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        with context.progress.bar("profile load", len(segments), "segments") as bar:
            for path in segments:
                loaded.append(time_call(partial(load, path), bench.device))
                bar.advance()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    about = {"frames": len(memory), "bytes_of_frames": size * len(segments), "bytes_on_disk": stored}

    def row(label: str, times: list[float]) -> dict[str, Any]:
        return bench.row(label, shape, times, count=rows, unit="frames", moved=size, seconds_in_all=sum(times), **about)

    return [row("write experience", written), row("load experience", loaded), _windows(context, bench, memory)]


def _played(context: Context) -> dict[str, np.ndarray]:
    """A segment of random play."""
    settings = context.settings.environment
    streams = open_streams(settings, train=True, seed=0)
    agent = UniformAgent(context.spaces.action, settings.count, generator=torch.Generator().manual_seed(0))
    rounds = -(-PLAYED // settings.count)
    recorder = Recorder(rounds, settings.count)
    with context.progress.bar("profile play", rounds, "rounds") as bar:
        for _ in range(rounds):
            observation, first = streams.observation, streams.first
            action = agent.act(observation, first)
            after = streams.step(action)
            recorder.add(step_columns(observation, first, action, after), after.final)
            bar.advance()
    streams.close()
    return recorder.arrays()


def _force(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def _windows(context: Context, bench: Bench, memory: Replay) -> dict[str, Any]:
    """Random windows, full ones, weighted as the preset weights them, with all that belongs to their frames."""
    rng = np.random.default_rng(0)
    sampler = build_sampler(
        context.settings.training, memory, rng, length=LENGTH, minimum=LENGTH, pad="right", across_ends=True
    )

    def draw() -> None:
        gather(memory, memory.observation, sampler.batch(WINDOWS))

    label = "draw random windows"
    frame = bytes_of(row_of(memory.observation))
    shape = f"{WINDOWS} windows of {LENGTH} frames, from {len(memory)}"
    times = bench.time_jobs(label, {label: draw})[label]
    return bench.row(label, shape, times, count=WINDOWS, unit="windows", moved=2 * WINDOWS * LENGTH * frame)
