"""Wiring of whoever acts: each setting, artifact and half of a protocol reaches it, in every stage that plays.

What an `Agent` makes of them is tested in tests/controllers/test_agent.py; here, that the stages hand them on.

E environments side by side, T steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_stage_joint import opened as opened_joint
from test_stage_overlap import OVERLAP, InTurn
from test_stage_planning import opened as opened_planning
from tiny_run import TRAINING, Killed, copied, kill_at, latest, opened

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import load_controller
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.reinforce import ReinforceController
from wmcli.envs.atari import PROTOCOLS
from wmcli.errors import ArtifactError, EnvironmentFault, UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.stages import collector as collector_module
from wmcli.stages import dynamics as dynamics_stage
from wmcli.stages.collect import collect
from wmcli.stages.collector import Collector
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.play import play
from wmcli.trainers import dynamics as dynamics_trainer
from wmcli.training.checkpoint import TRAINING as TRAINED
from wmcli.training.checkpoint import WEIGHTS, load_tensors, module_tensors, read_part
from wmcli.training.device import Machine
from wmcli.world_models.base import WorldModel

CPU = Machine(torch.device("cpu"), "float32", 1)
STAGES = ("collect", "eval", "play")
FAVOURITE = 1  # action


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time here."""
    for name in ("evaluate._write_plots", "evaluate.write_webp", "evaluate.write_imagination", "play.write_animation"):
        monkeypatch.setattr(f"wmcli.stages.{name}", lambda *_, **__: None)


@dataclass
class Decisions:
    """All that agents saw and did, in order."""

    agents: list[Agent] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    """(E, H, W, C) of each step."""
    first: list[np.ndarray] = field(default_factory=list)
    """(E,)"""
    actions: list[np.ndarray] = field(default_factory=list)
    """(E,)"""
    policies: list[np.ndarray] = field(default_factory=list)
    """(E, A), what a search found."""
    at_random: list[np.ndarray] = field(default_factory=list)
    """(E,), actions of uniform play."""


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """What is decided from here on, in this process."""
    made = Decisions()
    perceive, decide, at_random = Agent.perceive, Agent.decide, UniformAgent.act

    def watched_perceive(agent: Agent, observation: np.ndarray, first: np.ndarray) -> None:
        made.frames.append(observation.copy())
        made.first.append(first.copy())
        perceive(agent, observation, first)

    def watched_decide(agent: Agent, instead: np.ndarray | None = None) -> np.ndarray:
        action = decide(agent, instead)
        made.agents.append(agent)
        made.actions.append(action.copy())
        made.policies += [agent.summarize_search()["policy"]] if agent.summarize_search() else []
        return action

    def watched_at_random(agent: UniformAgent, observation: np.ndarray, first: np.ndarray) -> np.ndarray:
        made.at_random.append(at_random(agent, observation, first))
        return made.at_random[-1].copy()

    monkeypatch.setattr(UniformAgent, "act", watched_at_random)
    monkeypatch.setattr(Agent, "perceive", watched_perceive)
    monkeypatch.setattr(Agent, "decide", watched_decide)
    return made


def prefer(patch: pytest.MonkeyPatch, action: int, by: float) -> None:
    """From here on REINFORCE prefers an action to the others by so many nats, whatever it sees."""
    decide = ReinforceController.decide

    def known(*given: Any) -> tuple[torch.Tensor, Any]:
        logits, state = decide(*given)
        preferred = torch.zeros_like(logits)
        preferred[:, action] = by
        return preferred, state

    patch.setattr(ReinforceController, "decide", known)


@pytest.fixture
def known_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that likes FAVOURITE a little more than the other actions."""
    prefer(monkeypatch, FAVOURITE, 0.1)


def act(stage: str, folder: Path, *overrides: str, controller: str | None = None, seed: int = 1) -> Any:
    """Let the run's controller act from the beginning of new episodes."""
    context = opened(folder, f"seed={seed}", *overrides)
    if stage == "collect":
        return collect(context, controller=controller, extend=False)
    if stage == "eval":
        return evaluate(context, controller=controller)
    return play(context, source="real", out=folder.parent / "film.gif", controller=controller, seed=seed)


def rows_of(artifact: Artifact) -> dict[str, np.ndarray]:
    return read_segment(artifact.path / SEGMENT)


# -- settings of acting -----------------------------------------------------------------------------------------------

MANY = ("environment.count=64", "collect.steps=1280", "evaluation.environments=64", "evaluation.episodes=64")
COLD, NONE = "collect.temperature=0.01", "collect.epsilon=0"
UNSHARPENED = 1 / (1 + 2 * np.exp(-0.1))


@pytest.mark.parametrize(
    ("stage", "overrides", "share"),
    [
        ("collect", [COLD, NONE, "evaluation.temperature=1"], 1),
        ("collect", ["collect.temperature=1", NONE, "evaluation.temperature=0"], UNSHARPENED),
        ("collect", [COLD, "collect.epsilon=0.5"], 0.5 + 0.5 / 3),
        ("collect", [COLD, "collect.epsilon=1"], 1 / 3),
        *((stage, ["evaluation.temperature=0", "collect.epsilon=1"], 1) for stage in ("eval", "play")),
        *((stage, ["evaluation.temperature=1", COLD, NONE], UNSHARPENED) for stage in ("eval", "play")),
    ],
)
def test_temperature_and_epsilon_reach_who_acts(
    run: Path, known_policy: None, decisions: Decisions, stage: str, overrides: list[str], share: float
) -> None:
    act(stage, run, *MANY, *overrides)
    actions = np.stack(decisions.actions)
    assert actions.size == {"collect": 1280, "eval": 64 * 7, "play": 7}[stage]
    error = np.sqrt(share * (1 - share) / actions.size)
    assert np.mean(actions == FAVOURITE) == pytest.approx(share, abs=3 * error + 1e-9)


@pytest.mark.parametrize("feed", [True, False])
def test_collecting_tells_the_controller_the_executed_action_or_its_own(
    run: Path, known_policy: None, decisions: Decisions, monkeypatch: pytest.MonkeyPatch, feed: bool
) -> None:
    told, follow = [], ReinforceController.follow

    def watched(controller: ReinforceController, action: torch.Tensor, state: Any) -> Any:
        told.append(action.numpy().copy())
        return follow(controller, action, state)

    monkeypatch.setattr(ReinforceController, "follow", watched)
    act("collect", run, COLD, "collect.epsilon=1", f"collect.feed_executed_action={str(feed).lower()}")
    executed = np.stack(decisions.actions)
    assert (executed != FAVOURITE).any()
    np.testing.assert_array_equal(told, executed if feed else np.full_like(executed, FAVOURITE))


@pytest.mark.parametrize("stage", STAGES)
def test_episodes_are_opened_for_who_acts(run: Path, decisions: Decisions, stage: str) -> None:
    act(stage, run, "evaluation.environments=1", "evaluation.episodes=3")
    opened_at = np.flatnonzero(np.stack(decisions.first)[:, 0]).tolist()
    assert opened_at == {"collect": [0, 7, 14, 21, 28], "eval": [0, 7, 14], "play": [0]}[stage]  # Catch: 7 steps
    if stage == "collect":
        np.testing.assert_array_equal(np.concatenate(decisions.first), rows_of(latest(run, "experience"))["first"])


@pytest.mark.parametrize("stage", STAGES)
def test_actions_and_games_follow_the_seed(
    tiny: Path, tmp_path: Path, known_policy: None, decisions: Decisions, stage: str
) -> None:
    """The policy does not look, so other actions are other draws."""
    found = []
    for number, seed in enumerate((1, 1, 2)):
        made = Decisions()
        vars(decisions).update(vars(made))
        act(stage, copied(tiny, tmp_path / str(number)), *MANY, "evaluation.temperature=1", seed=seed)
        found.append((made.frames, made.actions, made.at_random))
    for first, again, other in zip(*found, strict=True):
        np.testing.assert_array_equal(first, again)
        assert len(first) == len(other) and (not first or (np.stack(first) != np.stack(other)).any())
    (games, *_), (_, *_), (others, *_) = found
    assert (games[0] != others[0]).any()
    assert (stage == "eval") == bool(found[0][2])


@pytest.mark.parametrize(("known", "seen"), [(None, 2), (4, 4)])  # dynamics.context is 2
def test_imagination_begins_after_so_many_frames(
    tiny: Path, tmp_path: Path, decisions: Decisions, known: int | None, seen: int
) -> None:
    out = tmp_path / "film.gif"
    play(opened(tiny), source="imagination", out=out, controller=None, seed=1, context_frames=known)
    assert len(decisions.frames) == seen


def test_each_version_of_experience_draws_other_actions(run: Path, known_policy: None, decisions: Decisions) -> None:
    for _ in range(2):
        collect(opened(run, "collect.temperature=1", NONE), steps=90)
    first, second = np.split(np.stack(decisions.actions), 2)
    assert (first != second).any()


def test_the_score_beside_is_of_random_play(run: Path, decisions: Decisions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the controller plays."""
    means = []
    for action in (0, 2):
        prefer(monkeypatch, action, 99.0)
        metrics = evaluate(opened(run, *MANY, force=True)).metrics
        means.append((metrics["mean"], metrics["random_mean"]))
    assert means[0][0] != means[1][0] and means[0][1] == means[1][1]
    at_random = np.stack(decisions.at_random)
    assert at_random.shape == (2 * 7, 64)
    np.testing.assert_allclose(np.bincount(at_random.flat) / at_random.size, 1 / 3, atol=0.05)


def test_a_published_random_score_goes_before_a_measured_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {"random": -3.0, "human": 5.0}
    monkeypatch.setattr("wmcli.metrics.atari.reference", lambda _, column: published[column])
    metrics = evaluate(opened(run), episodes=2).metrics
    assert metrics["random_mean"] == -3
    assert metrics["human_normalized"] == pytest.approx((metrics["mean"] + 3) / 8)


def test_random_play_takes_every_action(tiny: Path) -> None:
    assert set(rows_of(latest(tiny, "experience"))["action"]) == {0, 1, 2}


@pytest.mark.parametrize("change", ["seed=2", "collect.epsilon=0.5", "environment.count=2", "collect.steps=12"])
def test_playing_under_other_settings_is_another_job(run: Path, change: str) -> None:
    once, again, other = (act("collect", run, "collect.steps=6", *given).digest for given in ([], [], [change]))
    assert once == again != other


def test_a_film_is_of_a_controller_of_this_environment(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="environment size = 16"):
        play(opened(run, "environment.size=32"), source="real", out=tmp_path / "film.gif", controller=None, seed=1)


# -- whose weights ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def descended(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with controller@1 of dynamics@1, controller@2 of dynamics@2, and dynamics@3 of none. Only to be read."""
    folder = copied(tiny, tmp_path_factory.mktemp("descended") / "run")
    for stage in (train_dynamics, imagine, train_dynamics):
        stage(opened(folder, more=True))
    return folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("reference", "version"), [(None, 2), ("controller@1", 1)])
def test_who_acts_is_the_controller_named_in_the_world_model_it_learned_in(
    descended: Path, tmp_path: Path, decisions: Decisions, stage: str, reference: str | None, version: int
) -> None:
    act(stage, copied(descended, tmp_path / "run"), "collect.steps=3", "evaluation.episodes=1", controller=reference)
    run, agent = Run.open(descended, create=False), decisions.agents[0]
    for kind, module in (("controller", agent.controller), ("dynamics", agent.world_model)):
        published, _ = load_tensors(run.get(kind, version).file(WEIGHTS))
        torch.testing.assert_close(module_tensors({kind: module}), published, rtol=0, atol=0)
        assert not any(part.training for part in module.modules())


def test_a_latent_model_acts_as_the_run_says_now(tmp_path: Path, decisions: Decisions) -> None:
    """It was published with a window of four frames, and acts on the frame that it sees."""
    folder = tmp_path / "run"
    collect(opened_joint(folder, new=True))
    for stage in (train_dynamics, imagine):
        stage(opened_joint(folder))
    for overrides, window, looks in (
        ([], 4, "posterior"),
        (["dynamics.act_window=0", "dynamics.act_on=prior"], 0, "prior"),
    ):
        decisions.agents.clear()
        act("collect", folder, "collect.steps=3", *overrides)
        acted = decisions.agents[0].world_model.settings
        assert (acted.act_window, acted.act_on) == (window, looks)


# -- searching --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a planner that played at random, learned and searched 20 of its 60 frames again. Only to be read.

    Its weights are as far from fresh ones as if it had learned for long, so that frames and their past matter.
    """
    folder, build = tmp_path_factory.mktemp("planned") / "run", dynamics_stage.build_world_model

    @torch.no_grad()
    def shaken(*given: Any) -> WorldModel:
        model = build(*given)
        for parameter in model.parameters():
            parameter += 0.3 * (parameter.ndim > 1) * torch.randn_like(parameter)
        return model

    collect(opened_planning(folder, preset="unizero-quick"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamics_stage, "build_world_model", shaken)
        train_dynamics(opened(folder))
    imagine(opened(folder))
    return folder


@pytest.fixture
def planner(planned: Path, tmp_path: Path) -> Path:
    """A copy of `planned` to change at will."""
    return copied(planned, tmp_path / "run")


def noise(weight: float) -> list[str]:
    return [f"controller.dirichlet_fraction={weight}", "controller.simulations=16"]


@pytest.mark.parametrize("stage", STAGES)
def test_only_collecting_explores(planner: Path, decisions: Decisions, stage: str) -> None:
    for weight in (0.0, 1.0):
        act(stage, planner, *noise(weight), "collect.steps=3", "evaluation.episodes=8", "evaluation.environments=8")
    at_start = [policy for policy, first in zip(decisions.policies, decisions.first, strict=True) if first.all()]
    quiet, noisy = at_start[0], at_start[len(at_start) // 2]
    assert (quiet != noisy).any() == (stage == "collect")


@pytest.mark.parametrize("stage", STAGES)
def test_searches_are_as_the_run_says_now(planner: Path, decisions: Decisions, stage: str) -> None:
    """The controller was published with three simulations."""
    act(stage, planner, "controller.simulations=7", "collect.steps=9", "evaluation.episodes=1")
    visits = np.concatenate(decisions.policies) * 7
    np.testing.assert_allclose(visits, visits.round(), atol=1e-5)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.001, True), (1.0, False)])
def test_the_temperature_of_collecting_acts_on_visits(planner: Path, temperature: float, greedy: bool) -> None:
    found = rows_of(act("collect", planner, *noise(0.25), f"collect.temperature={temperature}", "collect.steps=30"))
    shares = np.take_along_axis(found["policy"], found["action"][:, None], axis=1)[:, 0]
    assert (shares == found["policy"].max(1)).all() == greedy


def found_by_playing_again(
    artifact: Artifact, rows: dict[str, np.ndarray], acting: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Policies (N, A) and values (N,) of searches at N rows of three environments, played from the first one on."""
    world_model, searcher = load_controller(artifact, CPU, acting)
    agent = Agent(world_model, searcher, 3, temperature=0, epsilon=0, generator=torch.Generator())
    found = []
    for step in np.arange(len(rows["action"])).reshape(-1, 3):
        agent.perceive(rows["observation"][step], rows["first"][step])
        agent.decide(instead=rows["action"][step])
        found.append(agent.summarize_search())
    policy, value = (np.concatenate([each[name] for each in found]) for name in ("policy", "value"))
    assert np.ptp(policy, axis=0).max() > 0.1 and np.ptp(value) > 0.1
    return policy, value


def test_a_planner_goes_on_from_the_frames_before(planner: Path) -> None:
    """Experience ends amid episodes, and the search sees the frame before and what was done in it."""
    context = opened(planner, *noise(0.0))
    before, after = rows_of(latest(planner, "experience")), rows_of(collect(context, steps=3))
    assert not after["first"].any()
    rows = {name: np.concatenate([column, after[name]]) for name, column in before.items()}
    policy, value = found_by_playing_again(latest(planner, "controller"), rows, context.settings.acting)
    np.testing.assert_allclose(after["policy"], policy[-3:], atol=1e-5)
    np.testing.assert_allclose(after["value"], value[-3:], rtol=1e-5)


def test_reanalysis_explores(planner: Path) -> None:
    found = [
        read_part(imagine(opened(planner, *noise(weight), force=True)).file(TRAINED), "targets")
        for weight in (0.0, 1.0)
    ]
    np.testing.assert_array_equal(found[0]["rows"], found[1]["rows"])
    assert (found[0]["policy"] != found[1]["policy"]).any()


def test_reanalysis_equals_playing_and_dynamics_learn_from_it(planner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise. All rows are searched, each with the frames of its episode before it."""
    controller = imagine(opened(planner, *noise(0.0), "controller.updates=12", force=True))
    policy, value = found_by_playing_again(controller, rows_of(latest(planner, "experience")), {})
    targets = read_part(controller.file(TRAINED), "targets")
    np.testing.assert_array_equal(targets["rows"], np.arange(60))
    np.testing.assert_allclose(targets["policy"], policy, atol=1e-5)
    np.testing.assert_allclose(targets["value"], value, rtol=1e-5)

    drawn, learned = [], []
    gather, build = dynamics_trainer.gather, dynamics_trainer.world_model_update

    def recording(*given, **named):
        update = build(*given, **named)
        return lambda batch: learned.append(batch.targets) or update(batch)

    monkeypatch.setattr(
        dynamics_trainer, "gather", lambda *given, **named: drawn.append(given[2]) or gather(*given, **named)
    )
    monkeypatch.setattr(dynamics_trainer, "world_model_update", recording)
    train_dynamics(opened(planner, "dynamics.updates=3", more=True))
    assert len(learned) == len(drawn) == 3
    for windows, batch in zip(drawn, learned, strict=True):
        np.testing.assert_array_equal(batch.is_searched.numpy(), windows.valid)
        np.testing.assert_array_equal(batch.policy.numpy(), targets["policy"][windows.rows])
        np.testing.assert_array_equal(batch.value.numpy(), targets["value"][windows.rows])


# -- both halves of an Atari protocol ---------------------------------------------------------------------------------

LIMIT = 60
"""Steps of an episode. In Galaxian the first of several lives is gone by step 12; a hit is worth 30 points or more,
and random play has one by step 50."""
ARCADE = [
    "environment.id=ALE/Galaxian-v5",
    "environment.protocol=unizero",
    "environment.count=2",
    "collect.steps=120",
    "tokenizer.updates=1",
    "dynamics.updates=1",
    "controller.updates=1",
    "evaluation.episodes=2",
    "evaluation.temperature=1",
]
EAGER = "training.checkpoint_seconds=0"


def shorten(patch: pytest.MonkeyPatch) -> None:
    protocol = PROTOCOLS["unizero"]
    limit = 4 * LIMIT + protocol.test.no_ops_max  # emulator frames
    train, test = (replace(rules, time_limit=limit) for rules in (protocol.train, protocol.test))
    patch.setitem(PROTOCOLS, "unizero", replace(protocol, train=train, test=test))


@pytest.fixture(scope="module")
def trained_in_arcade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in Galaxian up to its controller. Only to be read."""
    folder = tmp_path_factory.mktemp("arcade") / "run"
    collect(opened(folder, *ARCADE, new=True))
    for stage in TRAINING.values():
        stage(opened(folder))
    return folder


@pytest.fixture
def arcade(trained_in_arcade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and games of LIMIT steps that are played at random."""
    shorten(monkeypatch)
    prefer(monkeypatch, 0, 0.0)
    return copied(trained_in_arcade, tmp_path / "run")


def assert_training(artifact: Artifact) -> None:
    """Rewards are clipped, and the loss of a life ends an episode."""
    rows = rows_of(artifact)
    assert set(rows["reward"]) == {0, 1}
    lost = rows["terminated"] & (rows["lives"] > 0)
    assert all(lost[rows["stream"] == stream].any() for stream in (0, 1))


@pytest.mark.parametrize("how", ["new", "going on", "resumed"])
def test_collecting_plays_the_training_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder = tmp_path / "run"
    opened(folder, *ARCADE, new=True)
    if how == "going on":
        collect(opened(folder), steps=4)
    if how == "resumed":
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, "checkpoint", 2)
            collect(opened(folder, EAGER))
    assert_training(collect(opened(folder)))


@pytest.mark.slow
def test_the_process_beside_collects_the_training_half_as_its_epoch_says(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    opened(folder, *ARCADE, new=True)
    context = open_context(folder, None, ["collect.steps=8"], create=False, quiet=True, bind=True, from_epoch=2)
    collector, made = Collector(context), []
    try:
        for epoch in (1, 2):
            collector.begin(context.at(epoch), None, made[-1] if made else None)
            made.append(collector.result())
    finally:
        collector.close()
    assert_training(made[0])
    assert [artifact.metrics["steps"] for artifact in made] == [120, 8]
    assert [artifact.manifest["extra"]["epoch"] for artifact in made] == [1, 2]


def test_the_loop_collects_beside_for_the_epoch_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmcli.stages.loop.Collector", InTurn)
    changes = ["run.epochs=3", "run.dynamics_after=9", "run.controller_after=9"]
    run_loop(opened(tmp_path / "run", *OVERLAP, *changes, new=True))
    made = Run.open(tmp_path / "run", create=False).artifacts("experience")
    assert [artifact.manifest["extra"]["epoch"] for artifact in made] == [1, 2, 3]


def test_the_process_beside_makes_nothing_anew_without_being_asked(tmp_path: Path) -> None:
    context = opened(tmp_path / "run", *ARCADE, "collect.steps=4", new=True)
    collect(context.at(1))
    inside = opened(tmp_path / "run", "collect.epsilon=0.5").for_loop()
    with pytest.raises(UsageError, match=r"collect.epsilon 0.01 -> 0.5.*--force"):
        Collector(inside).begin(inside, None, None)


def test_a_first_segment_that_fails_beside_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = open_context(tmp_path / "run", None, ARCADE, create=True, quiet=True)
    ours, theirs = Pipe()
    theirs.send(EnvironmentFault("the game is damaged"))
    monkeypatch.setattr(Collector, "_start", lambda _: collector_module._Other(None, ours))
    collector = Collector(context)
    collector.begin(context, None, None)
    assert (tmp_path / "run" / "run.toml").exists()
    with pytest.raises(EnvironmentFault, match="damaged"):
        collector.result()
    assert not (tmp_path / "run").exists()


def assert_test(returns: Iterable[float], frames: Iterable[int]) -> None:
    """Rewards are whole, and episodes end with the game alone."""
    assert all(value % 10 == 0 for value in returns) and any(returns)
    assert all(LIMIT <= count < LIMIT + 10 for count in frames)


@pytest.mark.slow
def test_evaluation_plays_the_test_half_also_when_it_is_resumed(
    arcade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = evaluate(opened(copied(arcade, tmp_path / "whole"))).metrics
    assert_test(metrics["returns"], metrics["lengths"])
    assert_test([2 * metrics["random_mean"]], [])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 30)
        evaluate(opened(arcade, EAGER))
    assert evaluate(opened(arcade)).metrics == metrics


def test_a_film_is_of_the_test_half(arcade: Path, tmp_path: Path) -> None:
    film = play(opened(arcade), source="real", out=tmp_path / "film.gif", controller=None, seed=1)
    assert_test([film.total], [film.frames])
    assert film.ended == "time limit"
