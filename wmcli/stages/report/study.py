"""What the sections of a report are made from: the runs by variant, their scores and their logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.artifacts import Artifact
from wmcli.errors import UsageError, WmError
from wmcli.progress import Progress
from wmcli.reading import read_file
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.report.blocks import is_picture
from wmcli.stages.report.runs import Log, Notes, ReportedRun
from wmcli.stages.scores import Score
from wmcli.stages.variants import GAMES, compare_variants

MOST_DETAILED = 6
"""Runs with details of their own."""
MOST_FILMS = 12
MOST_PICTURE_BYTES = 16_000_000  # a third more as text


class Suite(NamedTuple):
    """What a sweep knows of its runs."""

    file: Path
    variants: Mapping[str, Sequence[Path]]
    """Run directories by variant."""
    records: Mapping[Path, Mapping[str, Any]]
    """What the sweep recorded of each run, by its directory."""
    changed: Mapping[Path, Sequence[str]] = {}
    """Settings of runs that were made with others than the sweep has now, by directory. The report leaves these out."""


@dataclass
class Pictures:
    """The pictures of a report, with a limit on their number and size."""

    films: int = 0
    size: int = 0
    left_out: int = 0
    damaged: list[str] = field(default_factory=list)

    def read(self, path: Path | None, *, film: bool = False) -> bytes | None:
        """Return the bytes of a picture, None without one, or where a limit is reached or it cannot be read."""
        if path is None:
            return None
        try:
            size = path.stat().st_size
            if (film and self.films >= MOST_FILMS) or self.size + size > MOST_PICTURE_BYTES:
                self.left_out += 1
                return None
            data = read_file(path, MOST_PICTURE_BYTES)
        except (OSError, WmError):
            return None
        if not is_picture(data):
            self.damaged.append(str(path))
            return None
        self.films += film
        self.size += size
        return data


@dataclass
class Study:
    """Runs to report, by variant."""

    variants: Mapping[str, Sequence[ReportedRun]]
    logs: Mapping[Path, Log]
    left_out: Sequence[str]
    """A line for each run that is left out."""
    notes: Notes
    suite: Suite | None = None
    pictures: Pictures = field(default_factory=Pictures)
    rows: Sequence[Mapping[str, Any]] = field(init=False)
    """See `compare_variants`; empty where no run has a score, or where they cannot stand together."""
    apart: str = field(init=False, default="")
    """Why the scores cannot stand together."""

    def __post_init__(self) -> None:
        self.rows = []
        if self.scores:
            try:
                records = {each.path: {**self.record(each), "seconds": self.seconds(each)} for each in self.runs}
                self.rows = compare_variants(self.scores, records, self.notes)
            except UsageError as error:
                self.apart = str(error)

    def record(self, run: ReportedRun) -> Mapping[str, Any]:
        """Return what the sweep recorded of a run; empty without."""
        return {} if self.suite is None else self.suite.records.get(run.path, {})

    def seconds(self, run: ReportedRun) -> float:
        """Return the seconds of work on a run that the sweep recorded, or else those of its log."""
        return float(self.record(run).get("seconds") or self.log(run).seconds)

    @property
    def runs(self) -> list[ReportedRun]:
        return [each for members in self.variants.values() for each in members]

    @property
    def detailed(self) -> list[ReportedRun]:
        return choose_detailed(self.variants)

    def label(self, run: ReportedRun) -> str:
        """Return the name of a run's lines: that of its variant, if no other run of it is shown in detail."""
        for name, members in self.variants.items():
            if run in members and sum(each in self.detailed for each in members) == 1 and len(self.variants) > 1:
                return name
        return run.name

    @property
    def environments(self) -> list[str]:
        return list(dict.fromkeys(each.environment for each in self.runs))

    @property
    def scores(self) -> dict[str, list[Score]]:
        """By returns, of each variant that has some."""
        scores = {name: [each.score for each in members if each.score] for name, members in self.variants.items()}
        return {name: members for name, members in scores.items() if members}

    def scores_of(self, protocol: str) -> list[Score]:
        """Return the scores under a protocol, one per run."""
        return [each.scores[protocol] for each in self.runs if protocol in each.scores]

    def of_protocol(self, protocol: str) -> list[Artifact]:
        """Return the evaluations of a protocol, one per run."""
        return [score.evaluation for score in self.scores_of(protocol)]

    @property
    def protocols(self) -> list[str]:
        """Protocols other than returns that have evaluations."""
        return [each for each in dict.fromkeys(key for run in self.runs for key in run.scores) if each != PROTOCOL]

    def games(self) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
        """Yield each environment with the rows of our variants and of published scores."""
        rows = [row for row in self.rows if row["table"] == GAMES]
        for environment in dict.fromkeys(row["environment"] for row in rows):
            yield environment, [row for row in rows if row["environment"] == environment]

    def log(self, run: ReportedRun) -> Log:
        return self.logs[run.path]


def choose_detailed(variants: Mapping[str, Sequence[ReportedRun]]) -> list[ReportedRun]:
    """Return the runs to show in detail: the first of each variant, then the second ones, up to `MOST_DETAILED`."""
    longest = max(map(len, variants.values()))
    turns = [members[turn] for turn in range(longest) for members in variants.values() if turn < len(members)]
    return turns[:MOST_DETAILED]


def read_logs(
    runs: Sequence[ReportedRun], detailed: Sequence[ReportedRun], notes: Notes, progress: Progress
) -> dict[Path, Log]:
    """Read the log of each run, with the curves of those that are shown in detail."""
    logs = {}
    with progress.bar("report: logs", len(runs), "runs") as bar:
        for each in runs:
            logs[each.path] = each.read_log(notes, curves=each in detailed)
            bar.advance()
    return logs
