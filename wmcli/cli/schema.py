"""The JSON of published artifacts: one schema, whichever command prints it.

Numbers that JSON lacks (NaN, infinity) are printed as null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact
    from wmcli.stages.scores import Score


class Published(TypedDict):
    """An artifact: `--json` of every command that publishes, and of `wm artifacts`."""

    kind: str
    version: int
    name: str
    """`kind@version`."""
    path: str
    digest: str
    metrics: dict[str, Any]


class Reference(TypedDict):
    """A published score of the same environment, or that of random play."""

    name: str
    score: float
    """Mean return over runs."""
    lowest: float | None
    """Return of the lowest run, if several are known; likewise `highest`."""
    highest: float | None
    runs: int | None
    human_normalized: float | None
    caveat: str | None


class Evaluation(Published):
    """An evaluation: `--json` of `wm eval`, `wm run`, `wm compare` and `wm artifacts`.

    `metrics` holds the numbers. Its keys depend on the protocol: `mean`, `stderr` and `returns` for `returns`, ...
    """

    protocol: str
    environment: str
    model: str
    """Controller or dynamics under evaluation, or experience, `kind@version`, possibly of another run."""
    episodes: int
    """Episodes or sequences that make the score."""
    references: list[Reference]
    """Empty if the score is not a return."""


class RunEvaluation(Evaluation):
    """An evaluation in `wm compare --json`."""

    run: str
    """Path as the user wrote it."""


class Comparison(TypedDict):
    """`wm compare --json`. Without --by, `--protocol returns` adds statistics: `iqm`, `performance_profile`, ..."""

    protocol: str
    evaluations: list[RunEvaluation]
    against: list[RunEvaluation]
    rows: list[dict[str, Any]]
    """The table, as `--format csv` prints it."""


def describe(artifact: Artifact) -> Published | Evaluation:
    """Return the JSON of an artifact."""
    return _describe_evaluation(artifact) if artifact.kind == "evaluation" else _describe(artifact)


def describe_comparison(
    protocol: str,
    scores: Sequence[Score],
    against: Sequence[Score],
    rows: list[dict[str, Any]],
    statistics: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON of a comparison: a `Comparison` and its statistics."""
    comparison: Comparison = {
        "protocol": protocol,
        "evaluations": [_of_run(score) for score in scores],
        "against": [_of_run(score) for score in against],
        "rows": rows,
    }
    return {**comparison, **statistics}


def _describe(artifact: Artifact) -> Published:
    return {
        "kind": artifact.kind,
        "version": artifact.version,
        "name": artifact.name,
        "path": str(artifact.path),
        "digest": artifact.digest,
        "metrics": artifact.metrics,
    }


def _describe_evaluation(artifact: Artifact) -> Evaluation:
    metrics = artifact.metrics
    (model,) = (each for role, each in artifact.inputs.items() if role != "experience" or len(artifact.inputs) == 1)
    return {
        **_describe(artifact),
        "protocol": metrics["protocol"],
        "environment": metrics["environment"],
        "model": f"{model.kind}@{model.version}",
        "episodes": metrics["episodes"] if "episodes" in metrics else metrics["sequences"],
        "references": _references(metrics),
    }


def _references(metrics: Mapping[str, Any]) -> list[Reference]:
    from wmcli.metrics.atari import references

    if "random_mean" not in metrics:
        return []
    rows: list[Any] = references(metrics["environment"], metrics["random_mean"])
    return [Reference(**{key: row.get(key) for key in Reference.__annotations__}) for row in rows]  # type: ignore[typeddict-item]


def _of_run(score: Score) -> RunEvaluation:
    return {**_describe_evaluation(score.evaluation), "run": str(score.run)}
