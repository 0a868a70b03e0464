"""`wm export`: experience in the formats of others, and a controller as a folder to hand on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wmcli import __version__
from wmcli.artifacts import Artifact, Run, needed
from wmcli.artifacts.environment import RECORDED
from wmcli.artifacts.files import disk_errors
from wmcli.artifacts.manifest import MANIFEST, MODEL, MODEL_FORMAT, PRUNED, shown, version_name
from wmcli.artifacts.store import BINDING
from wmcli.assemble import settings_of, spaces_of
from wmcli.config import MAX_TOML_BYTES
from wmcli.envs.tasks import TASKS
from wmcli.errors import ArtifactError, MachineError, UsageError
from wmcli.exchange import Episode, Recording, WritableFormat, write_recording
from wmcli.exchange.convert import recording_of
from wmcli.exchange.zarr_folder import Segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.metrics.statistics import bootstrap
from wmcli.progress import Progress
from wmcli.reading import read_file
from wmcli.spaces import Categories, Continuous, Discrete, Image, Vector, parts_of

HeldOut = Literal["validation", "test"]
CARD = "README.md"


# -- experience --------------------------------------------------------------------------------------------------------


def recording_in(experience: Artifact, held_out: HeldOut | None = None) -> Recording:
    """Return the episodes of an experience artifact and of all that it continues, or those that it holds back.

    Args:
        experience: The artifact. It and the others are verified.
        held_out: Only these episodes.

    Raises:
        ArtifactError: One of them is damaged or pruned, or holds no such episodes back.
    """
    environment = experience.manifest["environment"]
    if held_out is None:
        chain = [experience]
        while "previous" in chain[-1].inputs:
            chain.append(chain[-1].input("previous"))
        folders = [artifact.path / SEGMENT for artifact in reversed(chain)]
    else:
        chain, folders = [experience], [experience.path / HELD_OUT[held_out]]
        if not folders[0].exists():
            raise ArtifactError(f"{experience.name} holds no {held_out} episodes back.")
    for artifact in chain:
        artifact.verify()
    task = TASKS.get(environment["id"])
    reader = Segment(
        folders, environment["id"].removeprefix(RECORDED), spaces_of(experience), None if task is None else task.draw
    )
    recording = recording_of(reader)
    lossy = experience.metrics.get("lossy")
    source = experience.metrics.get("source", {}) | ({"lossy": lossy} if lossy else {})
    source |= {
        "environment": environment["id"],
        "protocol": environment["protocol"],
        "experience": experience.digest,
        "wm": __version__,
    }
    return replace(recording, source=source, lossy=lossy)


def export_experience(
    experience: Artifact,
    form: WritableFormat,
    out: Path,
    progress: Progress,
    *,
    held_out: HeldOut | None = None,
    lossy: bool = False,
) -> Path:
    """Write experience as a new folder in a format of others.

    Args:
        experience: The artifact; all that it continues is written with it.
        form: The format.
        out: The folder, which must not exist or be empty.
        progress: Shows a bar.
        held_out: Only the episodes that it holds back.
        lossy: Write images as videos.

    Returns:
        The folder.

    Raises:
        UsageError: The folder is not empty, or the format cannot hold such data.
        ArtifactError: See `recording_in`.
    """
    recording, open_ended = recording_in(experience, held_out), 0
    with _whole(out) as draft, progress.bar("export", len(recording), "episodes") as bar:

        def read(index: int) -> Episode:
            nonlocal open_ended
            episode = recording.read(index)
            open_ended += not episode.has_closing
            bar.advance()
            return episode

        write_recording(replace(recording, read=read), form, draft, lossy=lossy)
    if open_ended and form == "minari":
        progress.warn(
            f"{shown(out)}: Minari needs an observation behind the last action. {open_ended} episodes have none, and"
            " got their last one again; metadata.json says which."
        )
    progress.say(f"export: {len(recording)} episodes of {experience.name} in {shown(out)}")
    return out


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a folder to write to. It gets its name when all is written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: exists and is not empty; give another --out.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.absolute().parent}; create it first.")
    draft = out.absolute().with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with disk_errors(out):
            draft.mkdir()
            yield draft
            if out.exists():
                out.rmdir()
            draft.rename(out)
    except shutil.Error as errors:  # those of `shutil.copytree`
        raise MachineError(f"{out}: {errors.args[0][0][2]}; nothing was exported.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# -- controllers -------------------------------------------------------------------------------------------------------


def export_controller(controller: Artifact, out: Path, progress: Progress) -> Path:
    """Write a controller with all that it needs, as a run directory of its own with a model card.

    `wmcli.load(out)` and `wm eval --run out` read it. Of experience it holds the manifest alone.

    Args:
        controller: The artifact. It and what it needs are verified.
        out: The folder, which must not exist or be empty.
        progress: Names the folder.

    Returns:
        The folder.

    Raises:
        UsageError: The folder is not empty.
        ArtifactError: Something that it needs is missing, damaged or pruned.
    """
    whole = list(needed([controller]))
    for artifact in whole:
        artifact.verify()
    if "dynamics" not in [artifact.kind for artifact in whole]:
        controller.input("dynamics")  # raises ArtifactError: it cannot be read
    evaluations = _evaluations(controller)
    for artifact in evaluations:
        artifact.verify()
    with _whole(out) as draft:
        for artifact in (*whole, *evaluations):
            shutil.copytree(artifact.path.resolve(), _place(draft, artifact))
        for artifact in _mentioned(whole):
            place = _place(draft, artifact)
            if not place.exists():
                place.mkdir(parents=True)
                shutil.copy(artifact.path / MANIFEST, place)
                (place / PRUNED).write_text("Left out by wm export; the manifest was kept.\n", encoding="utf-8")
        with suppress(FileNotFoundError):
            (draft / BINDING).write_bytes(read_file(controller.run / BINDING, MAX_TOML_BYTES))
        marker = {**MODEL_FORMAT, "controller": f"controller/{version_name(controller.version)}"}
        (draft / MODEL).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        (draft / CARD).write_text(_card(controller, evaluations, out.name), encoding="utf-8")
        for kind in {artifact.kind for artifact in whole}:
            Run(draft).point_latest(kind)
    progress.say(f"export: {controller.name} in {shown(out)}; say in its {CARD} what license the weights have")
    return out


def _place(folder: Path, artifact: Artifact) -> Path:
    return folder / artifact.kind / version_name(artifact.version)


def _mentioned(artifacts: list[Artifact]) -> Iterator[Artifact]:
    """Yield the existing experience that artifacts were made from."""
    for artifact in artifacts:
        if "experience" in artifact.inputs:
            with suppress(ArtifactError):
                yield artifact.input("experience")


def _evaluations(controller: Artifact) -> list[Artifact]:
    """Return the evaluations of a controller in its run."""
    evaluations = Run(controller.run).artifacts("evaluation")
    own = [each for each in evaluations if "controller" in each.inputs]
    return [each for each in own if each.inputs["controller"].digest == controller.digest]


def _card(controller: Artifact, evaluations: list[Artifact], name: str) -> str:
    """Return the model card, in Markdown."""
    environment, settings = controller.manifest["environment"], settings_of(controller)
    metrics: dict[str, Any] = {}
    with suppress(KeyError, ArtifactError):
        metrics = controller.input("experience").metrics
    rows = {
        "environment": f"`{environment['id']}`",
        "protocol": f"`{environment['protocol']}`",
        "observation": ", ".join(
            _described(name, part) for name, part in parts_of(spaces_of(controller).observation).items()
        ),
        "actions": _described("", spaces_of(controller).action),
        "preset": f"`{controller.manifest.get('preset') or 'none'}`",
        "world model": f"`{settings.dynamics.kind}`, backbone `{settings.backbone.kind}`",
        "controller": f"`{settings.controller.kind}`",
        "environment steps": metrics.get("total_steps", "unknown"),
        "data": _origin(metrics),
        "license of the environment or the data": metrics.get("source", {}).get("license", "not stated by its source"),
        "license of these weights": "to be stated here",
        "written by": f"wm {__version__}, digest `{controller.digest[:12]}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    scores = "\n".join(map(_score, evaluations)) or "| none yet | | | |"
    return f"""# {name}

A controller and the world model that it learned in, trained by wm.

| | |
|---|---|
{table}

## Scores

| evaluation | mean return | 95 % interval | episodes |
|---|---|---|---|
{scores}

Intervals are bootstrapped over episodes of this one controller; they say nothing about other seeds of training.

## Use

```python
import wmcli

controller = wmcli.load("{name}")
```

```bash
wm eval --controller {name} --episodes 100
```

The folder is a run directory: weights are `controller/`, `dynamics/` and, where the world model has one apart,
`tokenizer/`, each with its settings in `manifest.json`. `wm verify --run {name}` checks every file.
"""


def _described(name: str, space: Any) -> str:
    text = {
        Image: lambda: f"images {space.height} x {space.width} x {space.channels}",
        Vector: lambda: f"{space.size} numbers",
        Categories: lambda: f"categories {list(space.sizes)}",
        Discrete: lambda: f"{space.count} actions",
        Continuous: lambda: f"{len(space.low)} numbers in [-1, 1], for {list(space.low)} to {list(space.high)}",
    }[type(space)]()
    return f"`{name}`: {text}" if name else text


def _origin(metrics: dict[str, Any]) -> str:
    """Return where experience comes from."""
    source = metrics.get("source")
    if source is None:
        return "played by wm"
    text = f"imported from {source.get('name', 'a recording')} ({metrics['format']})"
    return text + (f", images compressed with loss: {metrics['lossy']}" if metrics.get("lossy") else "")


def _score(evaluation: Artifact) -> str:
    metrics = evaluation.metrics
    if "returns" not in metrics:
        return f"| {evaluation.name} ({metrics.get('protocol')}) | | | {metrics.get('episodes', '')} |"
    estimate = bootstrap([metrics["returns"]], "mean", np.random.default_rng(0), repetitions=10_000)
    interval = "" if estimate.low is None else f"{estimate.low:.4g} to {estimate.high:.4g}"
    return f"| {evaluation.name} | {estimate.value:.4g} | {interval} | {metrics['episodes']} |"
