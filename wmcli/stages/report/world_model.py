"""Section 4: what the world model imagines, how far off it is, and what its latents hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.artifacts.manifest import IMAGINATION, film_of
from wmcli.errors import WmError
from wmcli.metrics import statistics
from wmcli.progress import some
from wmcli.reading import read_file
from wmcli.report.document import Block, Fold, Picture, Row, Section, Text
from wmcli.report.plots import compared_curves, error_curves
from wmcli.stages.report.blocks import count, drawing, table, task
from wmcli.stages.report.runs import ReportedRun
from wmcli.stages.report.study import Study

FILMED = ("evaluation", "dynamics")
"""Kinds whose newest version may hold a film of frames beside imagined ones, the first choice first."""
MEASURED = ("dynamics", "evaluation")
"""Kinds with errors by imagined step; those of dynamics are over more episodes."""
MOST_ERRORS_BYTES = 1 << 20
REPETITIONS = 2_000  # resamples of a curve's intervals
MOST_ENVIRONMENTS = 4
TRACED = ("codes_used", "perplexity", "posterior_entropy", "prior_entropy", "ensemble_loss", "imagined_bonus")
"""Metrics that are drawn over training: codes, entropies [nats] and disagreement."""
KEYS: Mapping[str, Sequence[str]] = {
    "tokenizer": (
        *("reconstruction", "l1", "relative_error", "accuracy", "object_recall", "codes_used", "perplexity"),
        "posterior_entropy",
    ),
    "dynamics": (
        *("observation_loss", "observation_accuracy", "reconstruction", "latent_loss", "consistency_loss"),
        *("reward_loss", "termination_loss", "prior_entropy", "posterior_entropy", "ensemble_loss"),
    ),
    "controller": ("imagined_return", "fresh_imagined_return", "fresh_real_return", "entropy", "imagined_bonus"),
}
"""Metrics of a version that tell how good it is. `fresh` returns are of the same states, imagined and real."""


class Errors(NamedTuple):
    """Squared errors by frame of one run."""

    context: int
    """Frames that the model observed."""
    episodes: int
    values: np.ndarray
    """(T,): of pictures in [0, 1]; before `context` of reconstructions."""


def world_model(study: Study) -> Section | None:
    """Return films, errors and measures of the latents, or None without any."""
    blocks = [*_films(study), *_reconstructions(study), *_errors(study), *_measures(study), *_traces(study)]
    if study.pictures.left_out:
        blocks.append(Text(f"Left out to keep this page small: {count(study.pictures.left_out, 'picture')}.", "note"))
    if study.pictures.damaged:
        blocks.append(Text(f"Pictures that cannot be shown: {some(study.pictures.damaged)}.", "warning"))
    return Section("world-model", "World model", tuple(blocks)) if blocks else None


# -- pictures ---------------------------------------------------------------------------------------------------------


def _films(study: Study) -> Iterator[Block]:
    """Yield a film of each variant, and more pictures of some runs folded."""
    shown = _first_films(study, "imagination")
    if shown:
        yield Text("Left the environment, right what the model imagines under the same actions.")
    elif shown := _first_films(study, "episode"):
        yield Text("These models decode no frames. Test episodes of their controllers:")
    if shown:
        yield Row(tuple(shown)) if len(shown) > 1 else shown[0]
    for each in study.detailed:
        more = [
            picture
            for kind, alt in (
                ("evaluation", "Frames of a test episode above imagined ones"),
                ("dynamics", "Frames of the experience above imagined ones"),
            )
            if (picture := _still(study, each, kind, "imagination.png", alt)) is not None
        ]
        artifact = each.newest.get("evaluation")
        if artifact is not None:
            data = study.pictures.read(film_of(artifact, "episode"), film=True)
            if data is not None:
                more.append(Picture(data, f"A test episode of {each.name}.", f"{artifact.name}: a test episode"))
        if more:
            yield Fold(f"More pictures of {each.name}", tuple(more))


def _first_films(study: Study, name: str) -> list[Picture]:
    """Return a film of each variant, of its first run that has one."""
    films = []
    for variant, members in study.variants.items():
        filmed = (each for each in members if _film_of(each, name) is not None)
        if (run := next(filmed, None)) is not None and (film := _film(study, run, name, variant)) is not None:
            films.append(film)
    return films


def _film_of(run: ReportedRun, name: str) -> tuple[Artifact, Path] | None:
    """Return the newest film of a name, with its artifact."""
    for kind in FILMED:
        if kind in run.newest and (path := film_of(run.newest[kind], name)) is not None:
            return run.newest[kind], path
    return None


def _film(study: Study, run: ReportedRun, name: str, variant: str) -> Picture | None:
    found = _film_of(run, name)
    if found is None:
        return None
    artifact, path = found
    if (data := study.pictures.read(path, film=True)) is None:
        return None
    which = f"{variant}: " if len(study.variants) > 1 else ""
    return Picture(data, f"Film of {run.name}.", f"{which}{run.name}, {artifact.name}")


def _still(study: Study, run: ReportedRun, kind: str, file: str, alt: str) -> Picture | None:
    artifact = run.newest.get(kind)
    data = None if artifact is None else study.pictures.read(artifact.path / file)
    if artifact is None or data is None:
        return None
    return Picture(data, f"{alt}, {run.name}.", f"{artifact.name} of {run.name}: {alt.lower()}")


def _reconstructions(study: Study) -> Iterator[Block]:
    shown = []
    for run in study.detailed:
        alt = "Frames of the experience above their reconstructions"
        if (picture := _still(study, run, "tokenizer", "reconstructions.png", alt)) is not None:
            shown.append(picture)
    if shown:
        yield Fold("Reconstructions of the tokenizer", tuple(shown))


# -- errors by imagined step ------------------------------------------------------------------------------------------


def read_errors(run: ReportedRun) -> tuple[Artifact, Errors] | None:
    """Return the errors by imagined step of the newest version that recorded them. Versions before 0.3 did not."""
    for kind in MEASURED:
        artifact = run.newest.get(kind)
        if artifact is None:
            continue
        path = artifact.path / IMAGINATION
        try:
            content = json.loads(read_file(path, MOST_ERRORS_BYTES))
            errors = Errors(
                int(content["context"]), int(content["episodes"]), np.array(content["mean_squared_error"], float)
            )
        except (WmError, OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if errors.values.ndim == 1 and 0 < errors.context < len(errors.values) and np.isfinite(errors.values).all():
            return artifact, errors
    return None


def _errors(study: Study) -> Iterator[Block]:
    found = [
        (name, run, *both)
        for name, members in study.variants.items()
        for run in members
        if (both := read_errors(run)) is not None
    ]
    environments = list(dict.fromkeys(run.environment for _, run, _, _ in found))
    drawn: list[Block] = []
    for place, environment in enumerate(environments[:MOST_ENVIRONMENTS]):
        lines: dict[str, Any] = {}
        for name in study.variants:
            mine = [each for variant, run, _, each in found if variant == name and run.environment == environment]
            if mine:
                label = f"{name} ({len(mine)} runs)" if len(mine) > 1 else name
                lines[label] = _line([each.values[each.context :] for each in mine])
        figure = error_curves(lines, x_label="imagined step", y_label="mean squared error", title=task(environment))
        bands = ", with 95 % intervals over runs" if any(band[1] is not None for _, band in lines.values()) else ""
        alt = f"Error of imagined frames in {task(environment)} over imagined steps, a line for each variant."
        caption = f"{task(environment)}: error of imagined pictures in [0, 1] by imagined step{bands}."
        drawn.append(drawing(figure, f"errors-{place}", alt, caption))
    yield from drawn[:1]
    if folded := drawn[1:]:
        yield Fold(f"Errors in {count(len(folded), 'more environment')}", tuple(folded))
    if left := environments[MOST_ENVIRONMENTS:]:
        yield Text(f"Errors in {some(list(map(task, left)))} are in the table alone.")
    rows = [
        {"variant": name, "run": run.name, "artifact": artifact.name, "episodes": errors.episodes}
        | {"step": step, "mean squared error": value}
        for name, run, artifact, errors in found
        for step, value in enumerate(errors.values[errors.context :].tolist(), 1)
    ]
    if rows:
        yield Fold("Numbers of these errors", (table("errors-by-step", rows),))


def _line(runs: Sequence[np.ndarray]) -> tuple[range, tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]:
    """Return steps, mean and interval of the errors (T,) of several runs, over the steps that all have."""
    length = min(map(len, runs))
    values = np.stack([each[:length] for each in runs])  # (runs, T)
    steps = range(1, length + 1)
    if len(runs) == 1:
        return steps, (values[0], None, None)
    rng = np.random.default_rng(0)
    estimates = [statistics.bootstrap([column], "mean", rng, repetitions=REPETITIONS) for column in values.T]
    low, high = (np.array([getattr(each, name) for each in estimates], float) for name in ("low", "high"))
    return steps, (values.mean(0), low, high)


# -- measures ---------------------------------------------------------------------------------------------------------


def _measures(study: Study) -> Iterator[Block]:
    """Yield what the newest versions measured: means over the runs of each variant."""
    for kind, keys in KEYS.items():
        rows, exact = [], []
        for name, members in study.variants.items():
            of_runs = [each.newest[kind].metrics for each in members if kind in each.newest]
            for each in members:
                if kind in each.newest:
                    exact.append({"variant": name, "run": each.name} | _numbers(each.newest[kind].metrics, keys))
            if of_runs:
                values = {
                    key: [found[key] for metrics in of_runs if key in (found := _numbers(metrics, keys))]
                    for key in keys
                }
                means = {key: float(np.mean(some_values)) for key, some_values in values.items() if some_values}
                if means:
                    rows.append({"variant": name, "runs": len(of_runs)} | means)
        if rows:
            yield table(f"measures-{kind}", rows, f"Newest {kind}: means over runs.", exact=exact)


def _numbers(metrics: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    return {key: metrics[key] for key in keys if isinstance(metrics.get(key), int | float)}


def _traces(study: Study) -> Iterator[Block]:
    """Yield codes, entropies and disagreement over training, of the runs that are shown in detail."""
    lines = {}
    for each in study.detailed:
        logged = {name: line for metrics in study.log(each).curves.values() for name, line in metrics.items()}
        logged |= _over_versions(each)
        if found := {name: logged[name] for name in TRACED if name in logged}:
            lines[study.label(each)] = found
    if lines:
        alt = "Codes, entropies and disagreement over updates" + (", a line for each run." if len(lines) > 1 else ".")
        figure = drawing(compared_curves(lines), "latents", alt, "Latents over training; entropies in nats.")
        yield Fold("Latents over training", (figure,))


def _over_versions(run: ReportedRun) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what tokenizers measured only when they were published: codes used and perplexity over updates."""
    points: dict[str, dict[float, float]] = {}
    artifact = run.newest.get("tokenizer")
    while artifact is not None:
        for key, value in _numbers(artifact.metrics, ("codes_used", "perplexity")).items():
            points.setdefault(key, {})[float(artifact.metrics.get("updates", 0))] = value
        try:
            artifact = artifact.input("parent") if "parent" in artifact.inputs else None
        except WmError:
            break
    found = {key: sorted(values.items()) for key, values in points.items() if len(values) > 1}
    return {key: (np.array([x for x, _ in each]), np.array([y for _, y in each])) for key, each in found.items()}
