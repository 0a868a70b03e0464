"""Load what a play needs: models, environment and stored frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.environment import check_same_environment, is_recorded
from wmcli.assemble import load_controller, load_world_model, settings_of
from wmcli.controllers.mcts import MCTS
from wmcli.controllers.random_actions import RandomController
from wmcli.errors import ArtifactError
from wmcli.settings import Settings
from wmcli.stages.context import Context
from wmcli.stages.dreaming.pane import Model
from wmcli.stages.dreaming.session import Studio
from wmcli.stages.dreaming.stored import StoredEpisodes
from wmcli.stages.dreaming.tape import publish_left


def open_studio(
    context: Context, *, controller: str | None, against: Sequence[str] = (), experience: str | None = None
) -> Studio:
    """Load models and stored frames, and publish recordings that an ended process has left behind.

    Args:
        context: Of the run.
        controller: Reference; None is the newest one, or without one the newest dynamics, in which nobody acts.
        against: Runs, or paths of controllers or dynamics, of further world models of the same environment.
        experience: Reference of the frames to start from; None is the newest.

    Raises:
        ArtifactError: An artifact is missing, damaged, or of another environment.
        MachineError: The stored frames do not fit into memory.
    """
    publish_left(context)
    artifacts = [_newest(context.run) if controller is None else context.run.resolve(controller, "controller")]
    artifacts += [_of_path(reference) for reference in against]
    for artifact in artifacts:
        check_same_environment(context.environment, artifact)
    models = [_load(context, artifact) for artifact in artifacts[:1]]
    models += [_load(context, artifact, settings_of(artifact)) for artifact in artifacts[1:]]
    frames = context.run.resolve(experience, "experience") if experience else context.run.latest("experience")
    if frames is not None:
        check_same_environment(context.environment, frames)
    stored = None if frames is None else StoredEpisodes(frames)
    return Studio(context, models, stored, plays=not is_recorded(context.environment["id"]))


def _newest(run: Run) -> Artifact:
    """Return the newest controller of a run, or without one its newest dynamics."""
    newest = run.latest("controller") or run.latest("dynamics")
    return run.resolve("controller", "controller") if newest is None else newest


def _of_path(reference: str) -> Artifact:
    path = Path(reference)
    if not path.is_dir():
        raise ArtifactError(f"--against {reference}: no such run or artifact; list runs with: wm runs")
    if (path / "manifest.json").exists():
        kind = "dynamics" if path.resolve().parent.name == "dynamics" else "controller"
        return Run.open(path.resolve().parent.parent, create=False).resolve(str(path), kind)
    return _newest(Run.open(path, create=False))


def _load(context: Context, artifact: Artifact, own: Settings | None = None) -> Model:
    """Load a model to act by the settings of the run, or by its own."""
    machine = context.machine
    if artifact.kind == "controller":
        world_model, controller = load_controller(artifact, machine, (own or context.settings).acting)
    else:
        world_model = load_world_model(artifact, machine)
        controller = RandomController(world_model.action_space)
    if isinstance(controller, MCTS):
        controller.keep_tree = True
    settings = settings_of(artifact)
    about: str = settings.dynamics.kind
    if settings.dynamics.uses_backbone:
        about += f" on {settings.backbone.kind}"
    name = f"{artifact.run.name} {artifact.name}"
    return Model(name, about, world_model, controller, machine, acts=artifact.kind == "controller")
