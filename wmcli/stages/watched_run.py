"""The details of one run that somebody watches: curves that grow, returns, the last film, what happened."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.artifacts import KEY_METRICS, Artifact, Run
from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.manifest import KINDS, film_of, finite, make_command, shown
from wmcli.artifacts.overview import SCORE
from wmcli.artifacts.tail import Tail, WorkTime, moment
from wmcli.errors import WmError
from wmcli.progress import duration, size
from wmcli.reading import read_file
from wmcli.report.live_curves import LiveCurves, Point, thin

MOST_EVENTS = 100
MOST_OPENED = 100  # manifests that one look reads
MOST_FILM_BYTES = 4 << 20
LOOKED_FOR_FILM = 30  # of the newest versions
FILMED = ("evaluation", "controller", "dynamics")
FILMS = {"imagination": "real beside imagined", "episode": "as played"}
_MEDIA = {".webp": "image/webp", ".gif": "image/gif"}


class _Version(NamedTuple):
    """What a page shows of a published version."""

    artifact: Artifact
    created: datetime
    trained: datetime | None
    """Of a score: when its controller was published, None if that cannot be read."""

    @property
    def is_score(self) -> bool:
        metrics = self.artifact.metrics
        scored = self.artifact.kind == "evaluation" and metrics.get("protocol") == SCORE
        return scored and isinstance(metrics.get("total_steps"), int)


class RunDetail:
    """What a page shows of one run.

    Args:
        name: Its name for the page.
        path: Its directory, which may be missing.
        resume: The command that goes on with it; None finds one.
    """

    def __init__(self, name: str, path: Path, resume: str | None = None) -> None:
        self.name, self.path = name, path
        self.unread = True
        """There are more records or manifests to read at once."""
        self._run, self._resume = Run(path), resume
        self._tail = Tail(self._run.metrics)
        self._versions: dict[tuple[str, int], _Version | None] = {}  # None: its manifest cannot be read
        self._start_again()
        self.forget_sent()

    def forget_sent(self) -> None:
        """Make the next `news` tell all."""
        self._sent: dict[str, Any] = {}
        self._sent_curves: dict[tuple[str, str], list[Point]] = {}

    def news(self, row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Look at the run and return messages with what has changed.

        Args:
            row: Of the run in the overview; None if the run is gone.

        Returns:
            `{"type": "run", "run": name}` with those of `status`, `problem`, `command`, `killed`, `events`, `returns`,
            `film` and `unread` that changed. `{"type": "points", "run": name, "curves": [{"stage", "metric", "from",
            "points"}]}` with the points of curves behind the first `from`, in place of earlier ones; a curve without
            points is no more.
        """
        if row is None:  # what was known stays
            self.unread = False
            return self._changed({"status": "deleted", "problem": None, "command": None, "killed": False})
        was_unread = self.unread
        logged, published = self._read(), self._open_versions()
        last = row.get("last") if row["status"] in ("failed", "requeued") else None  # line of a sweep's log
        values: dict[str, Any] = {
            "status": row["status"],
            "problem": row.get("problem") or last or None,
            "command": self._command(row),
            "killed": row.get("killed", False),
            "unread": self.unread,
        }
        if logged or published or self.unread != was_unread or not self._sent:
            values |= {"events": self._events(), "returns": self._returns()}
        if published or not self._sent:
            values["film"] = self._film()
        points = self._points() if logged or not self._sent_curves else []
        curves = [{"type": "points", "run": self.name, "curves": points}] if points else []
        return self._changed(values) + curves

    def _changed(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the message with the values that the page does not have."""
        changed = {key: value for key, value in values.items() if key not in self._sent or value != self._sent[key]}
        self._sent |= changed
        return [{"type": "run", "run": self.name, **changed}] if changed else []

    # -- records ------------------------------------------------------------------------------------------------------

    def _start_again(self) -> None:
        self._curves, self._work = LiveCurves(), WorkTime()
        self._happened: list[dict[str, str]] = []
        self._jobs: dict[tuple[str, Any], tuple[int, datetime]] = {}  # update and time of the last record
        self._last: Mapping[str, Any] = {}

    def _read(self) -> bool:
        """Read new records. Return whether there are some."""
        growth = self._tail.read()
        if growth.restarted:
            self._start_again()
        for record in growth.records:
            self._curves.add(record)
            self._note(record)
        self.unread = growth.more
        return bool(growth.records) or growth.restarted

    def _note(self, record: Mapping[str, Any]) -> None:
        """Note what a record says of processes: that one began, and what it repeats."""
        time, stage, update = moment(record.get("time")), record.get("stage"), record.get("update")
        if time is None or not isinstance(stage, str):
            return
        job, before = (stage, str(record.get("job"))), self._work.newest
        if self._work.add(record):
            self._begins(moment(record.get("began")) or time, before, job, update)
        if isinstance(update, int):
            self._jobs[job] = update, time
        self._last = record

    def _begins(self, began: datetime, before: datetime | None, job: tuple[str, Any], update: Any) -> None:
        """Note that a process began, with its first record's job and update, after the last record of another one."""
        stage, known = job[0], self._jobs.get(job)
        pause = "" if before is None or began <= before else f" after {duration((began - before).total_seconds())}"
        if before is None:
            self._happen(began, "started", f"began with {stage}")
        elif known is None:
            self._happen(began, "started", f"another process began with {stage}{pause}")
        else:
            reached, time = known
            repeats = isinstance(update, int) and update <= reached
            self._happen(time, "interrupted", f"{stage} was interrupted at update {reached:,} or later")
            self._happen(began, "resumed", f"{stage} resumed{pause}" + ", repeating some updates" * repeats)

    def _happen(self, time: datetime, kind: str, text: str) -> None:
        self._happened.append({"time": _iso(time), "kind": kind, "text": text})
        del self._happened[:-MOST_EVENTS]

    def _points(self) -> list[dict[str, Any]]:
        """Return how the curves differ from those that the page has."""
        curves = {
            (stage, metric): thin(x, y)
            for stage, metrics in self._curves.by_stage().items()
            for metric, (x, y) in metrics.items()
        }
        changes = []
        for stage, metric in {**self._sent_curves, **curves}:
            now, then = (each.get((stage, metric), []) for each in (curves, self._sent_curves))
            same = next(
                (place for place, (one, other) in enumerate(zip(now, then, strict=False)) if one != other), None
            )
            same = min(len(now), len(then)) if same is None else same
            if same < max(len(now), len(then)):
                changes.append({"stage": stage, "metric": metric, "from": same, "points": now[same:]})
        self._sent_curves = curves
        return changes

    # -- artifacts ----------------------------------------------------------------------------------------------------

    def _open_versions(self) -> bool:
        """Read the manifests of new versions, the newest first. Return whether there are others than before."""
        try:
            here = {(kind, version) for kind in KINDS for version in self._run.versions(kind)}
        except (WmError, OSError):  # it is being deleted
            return False
        changed = not self._versions.keys() <= here
        self._versions = {place: version for place, version in self._versions.items() if place in here}
        missing = sorted(here - self._versions.keys(), key=lambda place: -place[1])
        for place in missing[:MOST_OPENED]:
            self._versions[place] = self._open(*place)
        self.unread = self.unread or len(missing) > MOST_OPENED
        return changed or bool(missing)

    def _open(self, kind: str, number: int) -> _Version | None:
        try:
            artifact = self._run.get(kind, number)
        except (WmError, OSError):
            return None
        version = _Version(artifact, moment(artifact.manifest["created"]) or datetime.min.replace(tzinfo=UTC), None)
        if version.is_score:
            with suppress(WmError, OSError):
                return version._replace(trained=moment(artifact.input("controller").manifest["created"]))
        return version

    def _published(self) -> list[_Version]:
        """Return the readable versions in the order of their publication."""
        readable = [version for version in self._versions.values() if version is not None]
        return sorted(readable, key=lambda each: (each.created, KINDS.index(each.artifact.kind), each.artifact.version))

    def _returns(self) -> list[dict[str, Any]]:
        """Return the scores in the order of steps. Minutes are of work up to the controller, as in `wm compare`."""
        points = []
        for artifact, _, trained in filter(lambda version: version.is_score, self._published()):
            metrics, minutes = artifact.metrics, None
            if trained is not None and not self.unread:
                minutes = self._work.until(trained + timedelta(seconds=1)) / 60  # the manifest's time has no fraction
            score = {key: metrics.get(key) for key in ("mean", "stderr", "episodes")}
            points.append({"step": metrics["total_steps"], "minutes": minutes, **score, "name": artifact.name})
        return finite(sorted(points, key=lambda point: point["step"]))

    def _events(self) -> list[dict[str, str]]:
        """Return the newest events, in the order of time."""
        published = [
            {"time": _iso(version.created), "kind": "published", "text": _headline(version.artifact)}
            for version in self._published()[-MOST_EVENTS:]
        ]
        return sorted([*self._happened, *published], key=lambda event: event["time"])[-MOST_EVENTS:]

    def _film(self) -> dict[str, Any] | None:
        """Return the newest film: its bytes as `src`, None if it is too large, and its `caption`."""
        filmed = [version.artifact for version in self._published() if version.artifact.kind in FILMED]
        for artifact in reversed(filmed[-LOOKED_FOR_FILM:]):
            for name, about in FILMS.items():
                with suppress(OSError, WmError):
                    if (film := film_of(artifact, name)) is not None:
                        return _embed(film, f"{artifact.name}: {about}")
        return None

    def _command(self, row: Mapping[str, Any]) -> str | None:
        """Return the command that goes on with a run; None if it runs or is finished, or nothing is left of it."""
        if row["status"] in ("running", "finished", "done"):
            return None
        if self._resume is not None:
            return self._resume + " --retry" * (row["status"] == "failed")
        if "epoch" in self._last or not self._last:  # by `wm run`
            return f"wm run --run {shlex.quote(shown(self._run.path))}"
        with suppress(OSError):
            stopped = [folder.parent.name for folder in self._run.unfinished() if has_checkpoint(folder)]
            return make_command(stopped[0], self._run.path) if stopped else None
        return None


def _embed(film: Path, caption: str) -> dict[str, Any]:
    if (length := film.stat().st_size) > MOST_FILM_BYTES:
        return {"src": None, "caption": f"{caption}; {size(length)} are too much for this page: {shown(film)}"}
    data = base64.b64encode(read_file(film, MOST_FILM_BYTES)).decode()
    return {"src": f"data:{_MEDIA[film.suffix]};base64,{data}", "caption": caption}


def _headline(artifact: Artifact) -> str:
    """Return an artifact's name, its epoch and its main metric, such as `dynamics@3, epoch 3: observation loss 0.1`."""
    metrics, epoch = artifact.metrics, artifact.manifest["extra"].get("epoch")
    name = artifact.name + (f", epoch {epoch}" if epoch is not None else "")
    if artifact.kind == "evaluation" and metrics.get("protocol") != SCORE:
        return f"{name}: {metrics.get('protocol')}"
    key = next((key for key in KEY_METRICS.get(artifact.kind, ()) if isinstance(metrics.get(key), int | float)), None)
    if key is None:
        return name
    about = "mean return" if key == "mean" else key.replace("_", " ")
    return f"{name}: {about} {f'{metrics[key]:.4g}'.replace('-', '−')}"


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")
