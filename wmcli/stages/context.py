"""What every stage is given: the run, its settings, where to talk, and what several stages of one process share."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import parameter_counts
from wmcli.envs import Streams, protocol
from wmcli.envs.memory_task import Task
from wmcli.envs.tasks import TASKS
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Memory, read_frames, read_segment
from wmcli.progress import Progress
from wmcli.settings import Settings, resolve
from wmcli.training.device import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from wmcli.training.logs import EventLog

DEFAULT_PRESET = "quickstart"
SEGMENT = "segment.zarr"  # an experience artifact's own segment
HELD_OUT = {"validation": "validation.zarr", "test": "test.zarr"}
"""Segments of whole episodes that scripted and recorded experience hold beside it, and nobody trains on."""
DRAWN_AT_ONCE = 4096  # frames


@dataclass
class Context:
    run: Run
    preset: str
    settings: Settings
    progress: Progress
    fresh: bool = False
    """Start again instead of taking up an interrupted job."""
    force: bool = False
    """Make another version although this one exists."""
    more: bool = False
    """Train the newest version further."""
    pictures: bool = True
    """Leave pictures beside the weights."""
    memory: Memory | None = None
    """Experience that a stage of this process has loaded already."""
    latents: dict[str, Tensor] = field(default_factory=dict)
    """Latents of all frames in `memory`, under the digest of what made them (one entry at a time)."""
    streams: tuple[str, Streams] | None = None
    """The environments where the experience of that digest left them, so that the next collect need not restore
    them."""
    machine: Machine = field(init=False)
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        from wmcli.training.logs import EventLog

        self.machine = Machine.choose(self.settings.training)
        self.events = EventLog(self.run.path)

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The protocol block of this run's environment."""
        return protocol(self.settings.environment)

    def experience(self, artifact: Artifact) -> Memory:
        """All experience up to `artifact`, verified, in memory once; only segments not loaded yet are read."""
        chain = [artifact]
        while not (self.memory is not None and chain[-1].digest == self.memory.upto) and "previous" in chain[-1].inputs:
            chain.append(chain[-1].input("previous"))
        if self.memory is not None and chain[-1].digest == self.memory.upto:
            memory, chain = self.memory, chain[:-1]
        else:
            memory = Memory.empty(self.machine.device)
            self.latents = {}  # they were of other frames
        for segment in reversed(chain):
            segment.verify()
            _extend(memory, segment, SEGMENT)
            memory.upto = segment.digest
        self.memory = memory
        return memory

    def held_out(self, artifact: Artifact, part: str) -> Memory:
        """The episodes that experience holds back as its `part`, "validation" or "test", in memory.

        Raises ArtifactError where it has none.
        """
        folder = artifact.path / HELD_OUT[part]
        if not folder.exists():
            raise ArtifactError(
                f"{artifact.name} has no {part} episodes; make some with: wm collect --policy scripted --set"
                f" collect.{part}=100"
            )
        artifact.verify()
        memory = Memory.empty(self.machine.device)
        _extend(memory, artifact, HELD_OUT[part])
        return memory

    def log(self, record: dict[str, Any]) -> None:
        """One line in metrics.jsonl, the same numbers in the TensorBoard events."""
        self.run.log({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **record})
        self.events.add(record)


def _extend(memory: Memory, artifact: Artifact, part: str) -> None:
    """Read the segment `part` into memory, its frames block by block or, where it has but sketches, drawn from them."""
    folder = artifact.path / part
    arrays = read_segment(folder, frames=False)
    frames = read_frames(folder)
    if frames is None:
        frames = _drawn(TASKS[artifact.manifest["environment"]["id"]], arrays["sketch"])
    memory.extend(arrays, frames)


def _drawn(task: Task, sketch: np.ndarray) -> Iterator[np.ndarray]:
    """The frames of sketches (N, S), in blocks (n, H, W, 3)."""
    pieces = np.split(sketch, range(DRAWN_AT_ONCE, len(sketch), DRAWN_AT_ONCE))
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count) as workers:  # NumPy lets go of the interpreter while it computes
        for start in range(0, len(pieces), count):
            yield from workers.map(task.draw, pieces[start : start + count])


def open_context(
    run: Path,
    preset: str | None,
    overrides: Sequence[str] = (),
    *,
    create: bool,
    quiet: bool = False,
    fresh: bool = False,
    force: bool = False,
    more: bool = False,
) -> Context:
    """Open a run, and bind it to its preset and overrides if it is new.

    In a bound run `overrides` count for this one command. Raises UsageError for settings that do not resolve or a
    preset other than the bound one, ArtifactError when the run does not exist and `create` is off.
    """
    progress = Progress(quiet)
    if not create and not run.exists():
        raise ArtifactError(f"no run at {run}; start one with: wm collect --run {run}")
    bound = Run.open(run, create=False).bound() if run.exists() else None
    if bound is None:
        preset = preset or DEFAULT_PRESET
        settings = resolve(preset, overrides)
        _check(settings)
        opened = Run.open(run, create=True)
        opened.bind(preset, settings.model_dump(mode="json"))
        progress.say(f"new run {run}: preset {preset}" + (f", {', '.join(overrides)}" if overrides else ""))
    else:
        if preset not in (None, bound["preset"]):
            raise UsageError(
                f"run {run} is bound to preset {bound['preset']}, not {preset}; give another --run for another preset."
            )
        preset = bound["preset"]
        settings = resolve(preset, overrides, base=bound["settings"])
        opened = Run.open(run, create=False)
    return Context(opened, preset, settings, progress, fresh=fresh, force=force, more=more)


def _check(settings: Settings) -> None:
    """Raises UsageError for settings that no machine or environment could serve, before a run is bound to them."""
    Machine.choose(settings.training)
    parameter_counts(settings, protocol(settings.environment)["actions"])


def check_same_environment(ours: dict[str, Any], artifact: Artifact) -> None:
    """Raises ArtifactError naming both sides unless `artifact` was made in the environment that `ours` describes."""
    theirs = artifact.manifest["environment"]
    for key in ("id", "protocol", "size", "actions"):
        if ours[key] != theirs[key]:
            raise ArtifactError(
                f"{artifact.name} was made with environment {key} = {theirs[key]}, but this needs {ours[key]};"
                f" make one that fits, or give another reference (environments: {theirs['id']} and {ours['id']})."
            )
