"""Compatibility of artifacts: they must have the same environment and protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wmcli.artifacts.manifest import Artifact
from wmcli.artifacts.store import Run
from wmcli.errors import ArtifactError

RECORDED = "data/"
"""How the id of an environment begins that exists only as imported data."""


def is_recorded(identifier: str) -> bool:
    """Return whether an environment is imported data, which nobody can play."""
    return identifier.startswith(RECORDED)


def is_imported(experience: Artifact) -> bool:
    """Return whether a version of experience was imported."""
    return "content" in experience.metrics


def recorded_environment(run: Run) -> dict[str, Any]:
    """Return `environment` of a run of imported data: that of its newest experience.

    Raises:
        ArtifactError: It has none yet.
    """
    newest = run.latest("experience")
    if newest is None:
        raise ArtifactError(f"no experience in {run}, which has no environment but its data; import some: wm import")
    environment: dict[str, Any] = newest.manifest["environment"]
    return environment


ALWAYS = ("id", "protocol", "size", "actions")
SOMETIMES = ("observation", "kwargs", "observe", "wrappers", "time_limit", "action_repeat")


def check_same_environment(ours: Mapping[str, Any], artifact: Artifact) -> None:
    """Check that an artifact was made in the environment `ours`.

    Args:
        ours: `environment` of a manifest.
        artifact: The artifact to check.

    Raises:
        ArtifactError: It was made in another one. The message names both.
    """
    theirs = artifact.manifest["environment"]
    for key in (*ALWAYS, *SOMETIMES):
        if ours.get(key) != theirs.get(key):
            raise ArtifactError(
                f"{artifact.name} was made with environment {key} = {theirs.get(key)}, but this needs {ours.get(key)};"
                f" make one there, or give another reference (environments: {theirs['id']} and {ours['id']})."
            )
