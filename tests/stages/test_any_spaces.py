"""Every stage, once, on every combination of world model, observation and actions: `wm/Quarters-v0` has them all.

Left out are the cells of the grid world, which are fixed rules of one image, and memory tasks without a controller.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_systems import SYSTEMS, Update, learn, opened
from tiny_run import Killed, copied, kill_at

from wmcli.artifacts import Artifact
from wmcli.assemble import load_world_model, spaces_of
from wmcli.envs.quarters import STEPS
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.nn.actions import NUMBER_TYPES, random_actions, random_observation
from wmcli.spaces import (
    ActionSpace,
    Categories,
    Continuous,
    Discrete,
    Image,
    ObservationSpace,
    Vector,
    column_names,
    from_columns,
    parts_of,
)
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.stages.profile import profile_stages
from wmcli.stages.profile_cycle import profile_cycle
from wmcli.training import measure
from wmcli.training.device import Machine
from wmcli.training.measure import Bench
from wmcli.world_models.base import PlanningWorldModel
from wmcli.world_models.open_loop import open_loop

CPU = Machine(torch.device("cpu"), "float32", 1)
OBSERVED: dict[str, ObservationSpace] = {
    "vector": Vector(6),
    "all": {"image": Image(16, 16), "velocity": Vector(2), "color": Categories((4,))},
    "image": Image(16, 16),
}
ACTIONS: dict[str, ActionSpace] = {
    "discrete": Discrete(5),
    "multi-discrete": Categories((3, 3)),
    "continuous": Continuous((-1.0, -1.0), (1.0, 1.0)),
}
SYSTEMS_HERE = ("rem", "drama", "dreamer", "unizero", "muzero")
ENVIRONMENTS = 3
"""In parallel."""
EPISODES = 3
"""Of the evaluation."""
STEPS_OF_A_COLLECT = 60
"""Twenty of each environment: an episode ends, and another is under way."""


def begin(folder: Path, system: str, observed: str, actions: str) -> Path:
    """A new run with random play."""
    preset, overrides = SYSTEMS[system]
    given = [
        *overrides,
        "environment.id=wm/Quarters-v0",
        f"environment.kwargs.observed={observed}",
        f"environment.kwargs.actions={actions}",
        f"evaluation.episodes={EPISODES}",
        "evaluation.environments=2",
    ]
    for section in ("tokenizer", "dynamics", "controller"):
        given = [each for each in given if not each.startswith(f"{section}.updates=")]
    given += ["dynamics.updates=1", "controller.updates=1"]
    context = open_context(folder, preset, given, create=True, quiet=True)
    check_segment(collect(context), OBSERVED[observed], ACTIONS[actions])
    return folder


def check_segment(experience: Artifact, observation: ObservationSpace, action: ActionSpace) -> dict[str, np.ndarray]:
    """All parts, also of observations that close episodes, and actions, as their spaces say."""
    assert spaces_of(experience).observation == observation and spaces_of(experience).action == action
    arrays = read_segment(experience.path / SEGMENT)
    ended = int((arrays["terminated"] | arrays["truncated"]).sum())
    assert ended >= ENVIRONMENTS
    for column, rows in (("observation", STEPS_OF_A_COLLECT), ("closing", ended)):
        assert {name for name in arrays if name.partition(".")[0] == column} == set(column_names(column, observation))
        parts = parts_of(from_columns(column, arrays))
        for name, space in parts_of(observation).items():
            part = parts[name]
            assert (part.shape, part.dtype) == ((rows, *space.shape), space.dtype)
            assert len(np.unique(part, axis=0)) > 1
    check_actions(arrays["action"], action, STEPS_OF_A_COLLECT)
    return arrays


def check_actions(actions: np.ndarray, space: ActionSpace, *lead: int, most: float = 1.0) -> None:
    """`most` is the largest continuous number."""
    assert (actions.shape, actions.dtype) == ((*lead, *space.shape), space.dtype)
    if isinstance(space, Continuous):
        assert np.abs(actions).max() <= most
    else:
        assert actions.min() >= 0 and actions.max() < (3 if isinstance(space, Categories) else 5)
    flat = actions.reshape(-1, *space.shape)
    assert (flat.max(0) > flat.min(0)).all()  # each number of an action is used


def check_learned(artifact: Artifact, updates: list[Update]) -> None:
    """One update changed each weight that has a gradient, and everything is finite."""
    (update,) = updates
    assert update.metrics and all(math.isfinite(value) for value in update.metrics.values())
    moved = {name for name, gradient in update.gradient.items() if gradient.abs().sum() > 0}
    assert moved and all(not torch.equal(update.before[name], update.after[name]) for name in moved)
    assert all(value.isfinite().all() for value in update.after.values() if value.is_floating_point())
    assert artifact.metrics["updates"] == 1
    assert all(math.isfinite(value) for value in artifact.metrics.values() if isinstance(value, float))


def check_decoded(dynamics: Artifact, space: ObservationSpace) -> None:
    """A world model decodes the parts of the observation, of frames that it read and of those that it imagined."""
    world_model = load_world_model(dynamics, CPU)
    if not world_model.decodes:
        assert isinstance(world_model, PlanningWorldModel)
        return
    frames, actions = random_observation(space, (2, 4)), random_actions(world_model.action_space, (2, 6))
    latent = world_model.encode(frames)
    features, steps = open_loop(world_model, latent, actions)
    if world_model.decodes == "latents":
        features = torch.cat([latent, *(step.latent[:, None] for step in steps)], 1)
    decoded = world_model.decode(features)
    assert parts_of(decoded).keys() == parts_of(space).keys()
    for name, of_part in parts_of(space).items():
        part = parts_of(decoded)[name]
        assert (part.shape, part.dtype) == ((2, 6, *of_part.shape), NUMBER_TYPES[of_part.dtype])
        if isinstance(of_part, Categories):
            assert (part >= 0).all() and (part < torch.tensor(of_part.sizes)).all()


@pytest.mark.matrix
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observed", OBSERVED)
@pytest.mark.parametrize("system", SYSTEMS_HERE)
def test_every_stage(tmp_path: Path, system: str, observed: str, actions: str) -> None:
    observation_space, action_space = OBSERVED[observed], ACTIONS[actions]
    run = begin(tmp_path / "run", system, observed, actions)
    settings = opened(run).settings
    if settings.dynamics.encoder in ("tokenizer", "dynamics"):
        tokenizer, updates = learn(run, "tokenizer", "tokenizer.updates=1")
        if isinstance(observation_space, Vector) and system == "rem":  # its bins are fixed
            assert not updates and tokenizer.metrics["updates"] == 0
        else:
            check_learned(tokenizer, updates)
    dynamics, updates = learn(run, "dynamics")
    check_learned(dynamics, updates)
    controller, updates = learn(run, "controller")
    if not settings.controller.searches:
        check_learned(controller, updates)
    else:
        assert all(math.isfinite(value) for value in updates[0].metrics.values())

    played = check_segment(collect(opened(run)), observation_space, action_space)
    searched = settings.controller.searches
    assert ("policy" in played) == searched
    assert ("sampled" in played) == (searched and not isinstance(action_space, Discrete))
    if searched:
        assert np.abs(played["policy"].sum(1) - 1).max() < 1e-5
    if "sampled" in played:
        check_actions(played["sampled"], action_space, *played["policy"].shape, most=5.0)  # as the policy drew them
    if searched:  # learns from search results beside random play
        check_learned(*learn(run, "dynamics"))

    metrics = evaluate(opened(run)).metrics
    assert metrics["lengths"] == [STEPS] * EPISODES and metrics["episodes"] == EPISODES
    assert {*metrics["returns"]} <= {-1.0, 1.0} and -1 <= metrics["random_mean"] <= 1
    check_decoded(dynamics, observation_space)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "observed"), [*((system, "all") for system in SYSTEMS_HERE), ("rem", "vector")])
def test_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, observed: str) -> None:
    """Every stage is timed, and the time of a run projected. A tokenizer that does not learn is not trained."""
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    context = opened(begin(tmp_path / "run", system, observed, "continuous"))
    bench = Bench(context.machine, context.progress, quick=True)
    staged, _ = profile_stages(context, bench)
    projected = profile_cycle(context, bench, tmp_path / "small")["rows"]
    for rows in (staged, projected):
        what = {row["what"] for row in rows}
        assert {"collect, random policy", "train-dynamics"} <= what
        timed = {row["what"]: row["seconds"] for row in rows if "seconds" in row}
        assert min(timed.values()) >= 0  # 0: what is around a stage is a difference, and noise where that is short
        assert all(seconds > 0 for what, seconds in timed.items() if not what.endswith("start and publish"))
        fitted = ("rem", "drama") if rows is staged else ("rem",)
        assert ("train-tokenizer" in what) == (observed == "all" and system in fitted)
    if system == "rem":
        assert "train-tokenizer, start and publish" in {row["what"] for row in projected}


@pytest.mark.parametrize("kind", ["experience", "dynamics", "controller"])
@pytest.mark.parametrize("system", ["dreamer", "unizero"])
def test_killed_again_and_again_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, kind: str
) -> None:
    """With an observation of several parts and continuous actions, among them the samples of a search."""
    run = begin(tmp_path / "run", system, "all", "continuous")
    if kind != "dynamics":
        train_dynamics(opened(run))
    if kind == "experience":
        imagine(opened(run))
    stage = {"experience": collect, "dynamics": train_dynamics, "controller": imagine}[kind]
    more = ["dynamics.updates=3", "controller.updates=3"]
    undisturbed = stage(opened(copied(run, tmp_path / "whole"), *more))
    artifact, kills = None, 0
    while artifact is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 1 if kind != "experience" else 7)
                artifact = stage(opened(run, *more, "training.checkpoint_seconds=0"))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills > 1
    assert artifact.manifest["files"] == undisturbed.manifest["files"]


def test_a_collection_in_bfloat16_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen MLPs keep their matrices in it, so all that calls them is under autocast."""
    run = begin(tmp_path / "run", "dreamer", "vector", "continuous")
    train_dynamics(opened(run))
    imagine(opened(run))
    settings = ["training.precision=bfloat16", "training.checkpoint_seconds=0"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 2)
        collect(opened(run, *settings))
    assert collect(opened(run, *settings)).metrics["steps"] == STEPS_OF_A_COLLECT
