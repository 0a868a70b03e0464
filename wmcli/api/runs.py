"""Runs and artifacts, opened by path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wmcli.api.experience import Experience, HeldOut
from wmcli.api.models import ControllerModel, DynamicsModel, TokenizerModel
from wmcli.artifacts import Artifact, Run, open_artifact
from wmcli.artifacts.trust import check_trusted
from wmcli.dream import Reference
from wmcli.errors import UsageError
from wmcli.settings import Settings, resolve
from wmcli.stages.binding import Binding

Loaded = Experience | TokenizerModel | DynamicsModel | ControllerModel


def load(reference: Reference, *, device: str = "auto") -> Loaded:
    """Load an artifact by its path, such as `runs/x/dynamics/latest`. Each class has a `load` of its own type.

    Args:
        reference: The path of a version, or an artifact.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        ArtifactError: It is missing, pruned, damaged, or of a kind that holds no model or experience.
    """
    artifact = reference if isinstance(reference, Artifact) else open_artifact(reference)
    loaders: dict[str, Any] = {
        "experience": Experience,
        "tokenizer": TokenizerModel,
        "dynamics": DynamicsModel,
        "controller": ControllerModel,
    }
    if artifact.kind not in loaders:
        raise UsageError(f"{artifact} is an {artifact.kind}, which holds no model: read its `.metrics` instead.")
    return loaders[artifact.kind].load(artifact, device=device)


def open_run(path: Path | str, *, device: str = "auto", trust: bool = False) -> OpenedRun:
    """Open a run directory to read from.

    Args:
        path: The run.
        device: Where its models and experience are loaded to.
        trust: Allow code that its settings name, also if it was begun elsewhere.

    Raises:
        ArtifactError: There is no run.
    """
    return OpenedRun(Run.open(path, create=False), device, trust)


@dataclass(frozen=True)
class OpenedRun:
    """A run directory. Its methods load the newest version of a kind, or the version with a number."""

    run: Run
    device: str
    trust: bool = False

    @property
    def settings(self) -> Settings:
        """The settings that the run is bound to. Raises UsageError if it has none, or without `trust` in their code."""
        bound = self.run.bound()
        if bound is None:
            raise UsageError(f"{self.run} has no settings yet; start it with: wm run PRESET --run {self.run}")
        settings = Binding(bound["preset"], bound["settings"], tuple(bound["changes"])).at()
        check_trusted(self.run.path, settings.environment.code, trust=self.trust)  # opening them would import it
        return settings

    def artifact(self, kind: str, version: int | str = "latest") -> Artifact:
        """Open a version by its number; "latest" and, for controllers, "best" are versions too.

        Raises:
            ArtifactError: There is no such version, or it is damaged.
        """
        return self.run.resolve(f"{kind}@{version}", kind)

    def experience(self, version: int | str = "latest", *, held_out: HeldOut | None = None) -> Experience:
        """Load experience with all that it continues, or the episodes that it holds back."""
        return Experience.load(self.artifact("experience", version), device=self.device, held_out=held_out)

    def tokenizer(self, version: int | str = "latest") -> TokenizerModel:
        """Load a tokenizer."""
        return TokenizerModel.load(self.artifact("tokenizer", version), device=self.device)

    def dynamics(self, version: int | str = "latest") -> DynamicsModel:
        """Load a dynamics model with the tokenizer that it uses."""
        return DynamicsModel.load(self.artifact("dynamics", version), device=self.device)

    def controller(self, version: int | str = "latest") -> ControllerModel:
        """Load a controller with the dynamics model that it learned in."""
        return ControllerModel.load(self.artifact("controller", version), device=self.device)


def load_settings(preset: str, *overrides: str) -> Settings:
    """Return the settings of a preset, a name or the path of a TOML file, with overrides such as `"seed=2"`.

    Raises:
        UsageError: An unknown preset or key, or values that do not fit together.
    """
    return resolve(preset, overrides)
