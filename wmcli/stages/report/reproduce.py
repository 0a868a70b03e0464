"""Section 8: the commands that make these runs again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from wmcli.artifacts import KINDS, Artifact, Run
from wmcli.artifacts.environment import is_imported
from wmcli.artifacts.manifest import MAKERS
from wmcli.config import format_override, names_kind
from wmcli.errors import ArtifactError, WmError
from wmcli.report.document import Block, Commands, Fold, Section, Text
from wmcli.settings import flatten, resolve
from wmcli.stages.dreaming.tape import PLAYED
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.report.runs import ReportedRun
from wmcli.stages.report.settings import compared
from wmcli.stages.report.study import Study

MOST_RUNS = 200
MOST_STAGES = 60
"""Commands of one run that was made stage by stage."""
IMPORT, PLAY = "wm import SOURCE", "wm play --browser"
"""Makers of experience that no command repeats."""


def reproduce(study: Study) -> Section:
    """Return the commands."""
    blocks: list[Block] = []
    if study.suite is not None:
        blocks.append(Commands((f"wm sweep {shlex.quote(str(study.suite.file))}",)))
    lines: list[str] = []
    notes: list[str] = []
    for each in study.runs[:MOST_RUNS]:
        mine, note = commands(each)
        lines += mine
        notes += [f"{each.name}: {note}"] if note else []
    if len(study.runs) > MOST_RUNS:
        notes.append(f"The commands of {len(study.runs) - MOST_RUNS} runs are left out.")
    if lines:
        blocks.append(Text("In another folder (`--run`) these commands make the runs again."))
    every = Commands(tuple(lines))
    blocks.append(every if study.suite is None and len(study.runs) == 1 else Fold("Commands of each run", (every,)))
    if notes:
        blocks.append(Text("\n\n".join(notes), "note"))
    return Section("reproduce", "Reproduce", tuple(blocks))


def commands(run: ReportedRun) -> tuple[list[str], str]:
    """Return the command lines that make a run again, and a line on what they cannot tell, or an empty one."""
    folder = shlex.quote(str(run.path))
    texts = overrides(run)
    if texts is None:
        return [], f"the preset {run.preset} cannot be read here; its settings are in {run.path}/run.toml"
    sets = "".join(f" --set {shlex.quote(text)}" for text in texts)
    artifacts = list(_artifacts(run.run))
    note = ""
    if any(_maker(each) == IMPORT for each in artifacts):
        note = "begins with imported data: give them with --data, or wm import, first"
    if any(_maker(each) == PLAY for each in artifacts):
        note = "; ".join(filter(None, [note, "holds steps that somebody played, which no command repeats"]))
    if any(_epoch(each) is not None for each in artifacts):
        lines = [f"wm run {shlex.quote(run.preset)} --run {folder}{sets}"]
        for change in run.binding.changes if run.binding is not None else ():
            changed = "".join(f" --set {shlex.quote(text)}" for text in change["set"])
            lines.append(f"wm run --run {folder} --from-epoch {change['epoch']}{changed}")
        later = [each for each in artifacts if _epoch(each) is None]
    else:
        lines, later = [], artifacts
    for each in later[:MOST_STAGES]:
        first = "" if lines else f" --preset {shlex.quote(run.preset)}{sets}"
        lines.append(f"{_maker(each)} --run {folder}{first}{_more(each)}")
    if len(later) > MOST_STAGES:
        note = "; ".join(filter(None, [note, f"{len(later) - MOST_STAGES} later commands are left out"]))
    return lines, note


def _artifacts(run: Run) -> Iterator[Artifact]:
    """Yield every version that can be read, in the order in which they were made."""
    found = []
    for place, kind in enumerate(KINDS):
        for version in run.versions(kind):
            try:
                artifact = run.get(kind, version)
            except ArtifactError:
                continue
            found.append((artifact.manifest["created"], place, version, artifact))
    yield from (artifact for *_, artifact in sorted(found, key=lambda each: each[:3]))


def _epoch(artifact: Artifact) -> Any:
    return artifact.manifest["extra"].get("epoch")


def _maker(artifact: Artifact) -> str:
    if artifact.kind == "experience" and is_imported(artifact):
        return PLAY if artifact.metrics.get("format") == PLAYED else IMPORT
    command = MAKERS[artifact.kind]
    protocol = artifact.metrics.get("protocol", PROTOCOL) if artifact.kind == "evaluation" else PROTOCOL
    return command if protocol == PROTOCOL else f"{command} --protocol {protocol}"


def _more(artifact: Artifact) -> str:
    """Return `--more` for a version that continues another one."""
    return " --more" if "parent" in artifact.inputs else ""


def overrides(run: ReportedRun) -> list[str] | None:
    """Return the texts of `--set` that make the preset the settings of a run; None where that cannot be done."""
    try:
        ours = compared(flatten(run.bound))
        base = compared(flatten(resolve(run.preset)))
        kinds = _texts({key: value for key, value in ours.items() if names_kind(key) and base.get(key) != value})
        base = compared(flatten(resolve(run.preset, kinds))) if kinds else base
        texts = [*kinds, *_texts({key: value for key, value in ours.items() if base.get(key) != value})]
        again = compared(flatten(resolve(run.preset, texts)))
    except WmError:
        return None
    return texts if again == ours else None


def _texts(values: dict[str, Any]) -> list[str]:
    return [format_override(key, value) for key, value in values.items()]
