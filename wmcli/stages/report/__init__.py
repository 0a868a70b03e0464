"""`wm report`: one page on one or several runs, from manifests, logs and pictures alone.

`runs.py` reads the runs and groups them into variants, `study.py` holds what the sections share, and each other file
writes a section. No model is loaded, and no file is read whose size grows with a model or with experience.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from wmcli import __version__
from wmcli.errors import ArtifactError
from wmcli.progress import Progress, some
from wmcli.report.document import Document, Section
from wmcli.report.html import write_html
from wmcli.stages.report.blocks import count, task
from wmcli.stages.report.curves import curves
from wmcli.stages.report.headline import headline
from wmcli.stages.report.planning import priors, search
from wmcli.stages.report.provenance import provenance
from wmcli.stages.report.reproduce import reproduce
from wmcli.stages.report.runs import Notes, find_all, group, read_runs
from wmcli.stages.report.settings import settings
from wmcli.stages.report.several import several
from wmcli.stages.report.study import Study, Suite, choose_detailed, read_logs
from wmcli.stages.report.world_model import world_model

__all__ = ["Suite", "compose", "report"]

SECTIONS: tuple[Callable[[Study], Section | None], ...] = (
    *(headline, curves, several, world_model, priors, search, settings, provenance, reproduce),
)
"""In the order of the page."""


def report(
    paths: Sequence[Path], out: Path, progress: Progress, *, by: Sequence[str] = (), suite: Suite | None = None
) -> None:
    """Write a report as one HTML file. See `compose`."""
    document = compose(paths, progress, by=by, suite=suite)
    write_html(document, out)


def compose(
    paths: Sequence[Path], progress: Progress, *, by: Sequence[str] = (), suite: Suite | None = None
) -> Document:
    """Compose the document on some runs.

    Args:
        paths: Run directories, or folders of some.
        progress: Shows bars.
        by: Settings (`section.key`) that make the variants; empty takes those of the suite, or derives them.
        suite: The sweep that the runs belong to, in place of `paths`.

    Raises:
        ArtifactError: A path is missing, or no run can be reported.
        UsageError: A path holds no run, a key of `by` is unknown, or two runs are the same.
    """
    notes = Notes()
    if suite is None:
        places, left_out = find_all(paths), []
    else:
        every = [path for members in suite.variants.values() for path in members]
        places = [path for path in every if path.is_dir() and path not in suite.changed]
        left_out = [
            f"{path.name}: has not begun; see: wm sweep status {suite.file}" for path in every if not path.is_dir()
        ]
        left_out += [
            f"{path.name}: made with other settings than {suite.file} has now ({some(list(keys))})"
            for path, keys in suite.changed.items()
        ]
    runs, unread = read_runs(places, notes, progress)
    left_out += unread
    if not runs:
        raise ArtifactError(f"nothing to report: {some(left_out)}")
    if suite is not None and not by:
        found = {each.path: each for each in runs}
        named = {name: [found[path] for path in members if path in found] for name, members in suite.variants.items()}
        variants = {name: members for name, members in named.items() if members}
    else:
        variants = group(runs, by)
    logs = read_logs(runs, choose_detailed(variants), notes, progress)
    sections = []
    with progress.bar("report: page", len(SECTIONS) + 1, "parts") as bar:
        study = Study(variants, logs, left_out, notes, suite)
        bar.advance()
        for write in SECTIONS:
            section = write(study)
            sections += [] if section is None else [section]
            bar.advance()
    return Document(_title(study), _subtitle(study), tuple(sections), _footer())


def _title(study: Study) -> str:
    games = some(list(map(task, study.environments)))
    if len(study.runs) == 1:
        return f"{study.runs[0].preset} in {games}"
    presets = list(dict.fromkeys(each.preset for each in study.runs))
    return f"{some(presets)} in {games}"


def _subtitle(study: Study) -> str:
    if len(study.runs) == 1:
        return study.runs[0].name
    return f"{count(len(study.runs), 'run')}, {count(len(study.variants), 'variant')}: {some(list(study.variants), 6)}"


def _footer() -> str:
    return f"Written by wm {__version__} on {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC."
