"""`wm play --browser` behind its page: reality, dreams, going back, branches, stored frames, recordings."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_systems import SYSTEMS, Make, learn, opened
from test_stage_imported import SETTINGS, made
from tiny_run import copied, latest

from wmcli.artifacts import Run
from wmcli.browser.server import Message, encode
from wmcli.controllers.agent import Agent
from wmcli.controllers.mcts import MCTS
from wmcli.envs import Streams
from wmcli.errors import ArtifactError, UsageError
from wmcli.exchange import write_recording
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.report.observations import draw_observations
from wmcli.spaces import map_parts, parts_of
from wmcli.stages.collect import collect
from wmcli.stages.dreaming.insight import entropy_of, latent_of
from wmcli.stages.dreaming.pane import Mind, Pane, Witness
from wmcli.stages.dreaming.reality import LEFT, NO_WAY_BACK, PLAYED_BACK, Reality
from wmcli.stages.dreaming.session import KEPT, MOST_PANES, DreamSession, Studio
from wmcli.stages.dreaming.studio import open_studio
from wmcli.stages.dreaming.tape import FOLDER, episodes_of, left_tapes, read_tape
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.imported import Importing, import_experience
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer

ACTING = [name for name in SYSTEMS if name != "s4wm"]
DREAMING = [name for name in SYSTEMS if name not in ("unizero", "muzero")]

Open = Callable[..., Studio]


@pytest.fixture(scope="session")
def acting(small: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`acting(system)`: a run of that kind with dynamics and, where the system has one, a controller."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            made[name] = copied(small(name, trained=True), tmp_path_factory.mktemp("acting") / name)
            if name in ACTING:
                learn(made[name], "controller", "controller.updates=1")
        return made[name]

    return run


@pytest.fixture
def studio(acting: Make, tmp_path: Path) -> Open:
    """`studio(system)`: opened, on a copy of the run."""
    return lambda name, **how: open_studio(
        opened(copied(acting(name), tmp_path / name)), **({"controller": None} | how)
    )


def session(studio: Studio, **options: Any) -> DreamSession:
    """A session that goes on by itself, whatever the game."""
    made = DreamSession(studio)
    made.receive({"do": "options", "mode": "realtime", **options})
    return made


def ticks(playing: DreamSession, count: int) -> list[dict[str, Any]]:
    """The views of so many ticks."""
    seen: list[dict[str, Any]] = []
    for _ in range(10 * count + 10):
        if len(seen) == count:
            return seen
        message = playing.advance()
        if message is not None:
            assert message.head["type"] != "error", message.head
            if message.head["type"] == "view":
                seen.append(message.head | {"pictures": message.frames})
    raise AssertionError("it stands still")


def look(playing: DreamSession) -> dict[str, Any]:
    """The current view."""
    return playing.hello().head["view"]


def actions(reality: Reality, count: int, seed: int = 0) -> list[np.ndarray]:
    space = reality._streams.spaces.action  # type: ignore[union-attr]
    rng = np.random.default_rng(seed)
    return [np.array(rng.integers(space.count)) for _ in range(count)]


def game(studio: Studio) -> Reality:
    return Reality(studio.context.settings.environment, 3)


def same_frames(one: Any, other: Any) -> bool:
    return all(np.array_equal(part, parts_of(other)[name]) for name, part in parts_of(one).items())


# -- reality ----------------------------------------------------------------------------------------------------------


def test_reality_is_the_environment_under_the_training_rules(studio: Open) -> None:
    ours = studio("drama")
    reality, settings = game(ours), ours.context.settings.environment.model_copy(update={"count": 1})
    streams = Streams(settings, train=True, seed=3)
    for action in actions(reality, 30):
        assert same_frames(reality.moment.observation, map_parts(lambda part: part[0], streams.observation))
        assert reality.moment.opens_episode == bool(streams.first[0])
        after = streams.step(action[None])
        reality.step(action)
        came = reality.came
        assert came is not None
        assert (came.reward, came.terminated, came.truncated) == (
            after.reward[0],
            after.terminated[0],
            after.truncated[0],
        )
        if came.ended:
            assert same_frames(came.final, after.final[0])
    assert sum(moment.opens_game for moment in reality.moments) > 2, "several games"


def test_going_back_and_acting_alike_leads_to_the_same_frames(studio: Open) -> None:
    reality = game(studio("drama"))
    taken = actions(reality, 20)
    for action in taken:
        reality.step(action)
    before = list(reality.moments)
    for back in (19, 12, 5, 0):
        reality.go(back)
        for action in taken[back:]:
            reality.step(action)
        assert all(same_frames(a.observation, b.observation) for a, b in zip(before, reality.moments, strict=True))
        assert [m.outcome and m.outcome.reward for m in before] == [
            m.outcome and m.outcome.reward for m in reality.moments
        ]


def test_going_back_and_acting_otherwise_equals_a_game_that_was_played_so(studio: Open) -> None:
    ours = studio("drama")
    reality, other = game(ours), game(ours)
    one, two = actions(reality, 15, 1), actions(reality, 15, 2)
    for action in one:
        reality.step(action)
    reality.go(4)
    for action in two:
        reality.step(action)
    for action in [*one[:4], *two]:
        other.step(action)
    assert len(reality.moments) == len(other.moments) == 20
    assert all(same_frames(a.observation, b.observation) for a, b in zip(reality.moments, other.moments, strict=True))
    with pytest.raises(UsageError, match="moments from 0 to 19"):
        reality.go(20)


def test_the_return_is_that_of_the_episode_of_the_last_step(studio: Open) -> None:
    reality, total = game(studio("drama")), 0.0
    for action in actions(reality, 30):
        if reality.moment.opens_episode:
            total = 0.0
        reality.step(action)
        assert reality.came is not None
        total += reality.came.reward
        assert reality.total() == total


def test_an_environment_that_ignores_its_seed_begins_a_new_game_and_says_so(
    studio: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    reality = game(studio("drama"))
    for action in actions(reality, 4):
        reality.step(action)
    reality.go(2)
    monkeypatch.setattr(Streams, "_play_again", lambda *_: False)
    reality.step(np.array(0))
    assert reality.note == NO_WAY_BACK and reality.source == "environment"


# -- stored frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["drama", "rem", "muzero"])
def test_the_environment_is_restored_at_any_stored_frame(system: str, studio: Open) -> None:
    ours = studio(system)
    stored = ours.stored
    assert stored is not None and len(stored) > 3
    segment = read_segment(latest(ours.context.run.path, "experience").path / SEGMENT)
    for episode in range(len(stored)):
        length = stored.describe(10_000)[len(stored) - 1 - episode]["frames"]
        for frame in {0, length // 2, length - 1}:
            start = stored.start(episode, frame, 3)
            reality = Reality(ours.context.settings.environment, 0, start)
            assert reality.source == "environment", (episode, frame)
            assert same_frames(reality.moment.observation, start.moments[start.at].observation)
            for place in range(start.at, len(start.moments) - 1):  # the stored actions lead to the stored frames
                action = reality.stored_action()
                assert action is not None
                reality.step(np.array(action))
                assert same_frames(reality.moment.observation, start.moments[place + 1].observation)
            reality.close()
    assert len(segment["action"]) == len(stored.replay)


def test_a_frame_that_cannot_be_restored_is_played_back_as_long_as_actions_agree(studio: Open) -> None:
    ours = studio("drama")
    assert ours.stored is not None
    episode = max(range(len(ours.stored)), key=lambda e: len(ours.stored.start(e, 0, 0).moments))  # type: ignore[union-attr]
    start = ours.stored.start(episode, 1, 3)._replace(state=None)
    reality = Reality(ours.context.settings.environment, 0, start)
    assert reality.source == "recording" and reality.note == PLAYED_BACK
    first = reality.stored_action()
    assert first is not None
    reality.step(np.array(first))
    assert same_frames(reality.moment.observation, start.moments[start.at + 1].observation)
    second = reality.stored_action()
    assert second is not None
    reality.step((np.array(second) + 1) % 3)
    assert reality.source == "none" and reality.note == LEFT and reality.came is None
    reality.step(np.array(second))
    assert reality.source == "none", "nobody knows what follows"
    reality.go(start.at + 1)
    assert reality.source == "recording"
    reality.step(np.array(second))
    assert reality.source == "recording", "the other way is forgotten"


def test_a_wrong_frame_is_refused(studio: Open) -> None:
    stored = studio("drama").stored
    assert stored is not None
    for episode, frame in ((-1, 0), (len(stored), 0), (0, -1), (0, 10_000)):
        with pytest.raises(UsageError, match="episode"):
            stored.start(episode, frame, 3)


# -- minds and dreams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ACTING)
def test_a_witness_reads_one_frame_or_the_whole_past_alike(system: str, studio: Open) -> None:
    ours = studio(system)
    model, reality = ours.models[0], game(ours)
    follows = Witness(model, 0)
    for action in actions(reality, 9):
        follows.attend(reality)
        reality.step(action)
    alone = Witness(model, 0)
    one, other = follows.attend(reality).agent, alone.attend(reality).agent
    with torch.no_grad():
        features = [model.world_model.features(each._world_state).float() for each in (one, other)]
    if system in ("rem", "cells", "unizero", "muzero"):  # the others sample their latents
        torch.testing.assert_close(*features, rtol=1e-4, atol=1e-4)
    assert follows.attend(reality) is follows.mind, "no frame is read twice"


def test_a_witness_acts_as_an_agent_that_plays(studio: Open) -> None:
    ours = studio("rem")
    model, reality = ours.models[0], game(ours)
    witness = Witness(model, 5)
    generator = torch.Generator().manual_seed(5)
    agent = Agent(model.world_model, model.controller, 1, temperature=1.0, epsilon=0.0, generator=generator)
    for _ in range(20):
        frame = map_parts(lambda part: part[None], reality.moment.observation)
        chosen = agent.act(frame, np.array([reality.moment.opens_episode]))
        assert witness.attend(reality).choice == chosen[0]
        reality.step(chosen[0])


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_a_dream_goes_back_to_any_moment_and_on_to_the_bit(system: str, studio: Open) -> None:
    ours = studio(system)
    playing = session(ours, horizon=0)
    playing.receive({"do": "actor", "pane": None, "actor": "random"})
    pane = playing._panes[0]
    pane.actor = {"action": 1}
    before = ticks(playing, 12)

    def dreamt(view: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
        (shown,) = view["panes"]
        names = "age", "reward", "return", "termination", "terminated", "value", "policy", "entropy", "latent", "search"
        picture = None if shown["frame"] is None else view["pictures"][shown["frame"]].tobytes()
        return {name: shown[name] for name in names}, picture

    for back in (9, 3, 0):
        playing.receive({"do": "goto", "time": back})
        assert look(playing)["time"] == back
        if back:
            assert look(playing)["panes"][0]["reward"] == before[back - 1]["panes"][0]["reward"]
        playing.receive({"do": "play"})
        assert [dreamt(view) for view in ticks(playing, 12 - back)] == [dreamt(view) for view in before[back:]]


@pytest.mark.parametrize("system", DREAMING)
def test_a_branch_dreams_the_same_under_the_same_actions_and_leaves_the_other_alone(system: str, studio: Open) -> None:
    ours = studio(system)
    playing, alone = session(ours), session(ours)
    for each in (playing, alone):
        each.receive({"do": "actor", "pane": None, "actor": "random"})
        each._panes[0].actor = {"action": 1}
        ticks(each, 4)
    playing.receive({"do": "branch", "pane": 0})
    one, two = playing._panes
    assert two.actor == "you" and two.number == 1
    two.actor = {"action": 1}
    for view, other in zip(ticks(playing, 6), ticks(alone, 6), strict=True):
        left, right = view["panes"]
        assert left["reward"] == right["reward"] and left["latent"] == right["latent"]
        assert left["latent"] == other["panes"][0]["latent"], "the branch changes nothing in the first dream"
    two.actor = {"action": 0}
    ticks(playing, 5)
    assert one.is_over or one.latent != two.latent or one.reward != two.reward, "other actions, another dream"


def test_a_dream_is_what_the_agent_imagines(studio: Open) -> None:
    ours = studio("drama")
    model, reality = ours.models[0], game(ours)
    witness = Witness(model, 0)
    pane = Pane(0, Mind(model, 0), torch.Generator().manual_seed(9))
    pane.wake(witness.attend(reality), None)
    state = witness.mind.agent._world_state
    generator = torch.Generator().manual_seed(9)
    for action in actions(reality, 6):
        pane.step(action)
        uniforms = torch.rand(1, model.world_model.uniforms_per_step, generator=generator)
        with torch.no_grad(), model.machine.autocast():
            imagined, state = model.world_model.imagine(state, torch.tensor(action)[None], uniforms)
            frame = model.world_model.frame(state).numpy()
        assert pane.reward == float(imagined.reward)
        assert pane.termination == pytest.approx(1 - float(imagined.continuation))
        assert np.array_equal(pane.picture, draw_observations(model.world_model.observation_space, frame)[0])


def test_a_dream_wakes_at_its_horizon_and_with_a_new_episode(studio: Open) -> None:
    playing = session(studio("drama"), horizon=3)
    playing.receive({"do": "actor", "pane": None, "actor": "random"})
    views = ticks(playing, 30)
    ages = [view["panes"][0]["age"] for view in views]
    assert set(ages) <= {0, 1, 2} and ages.count(2) > 1
    for view in views:
        if view["real"]["ended"]:
            assert view["panes"][0]["age"] == 0, "the dream begins with the next episode"
    with torch.no_grad():
        playing.receive({"do": "wake", "pane": None})
    assert look(playing)["panes"][0]["age"] == 0


# -- looking into models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", DREAMING)
def test_the_prior_is_what_the_next_latent_was_drawn_from(system: str, studio: Open) -> None:
    ours = studio(system)
    model, reality = ours.models[0], game(ours)
    mind = Witness(model, 0).attend(reality)
    mind.take(np.array(1))
    drawn = []
    for seed in range(200):
        agent = mind.copy().agent
        agent.restore(mind.agent.snapshot())
        step = agent.imagine(torch.Generator().manual_seed(seed))
        assert step.prior is not None
        latent = step.latent.argmax(-1) if step.latent.ndim == 3 else step.latent
        drawn.append(torch.nn.functional.one_hot(latent[0], step.prior.shape[-1]).float())
    shares = torch.stack(drawn).mean(0)
    assert (shares - step.prior[0].float().softmax(-1)).abs().max() < 0.2
    assert entropy_of(step.prior) == pytest.approx(
        float(torch.distributions.Categorical(logits=step.prior[0].float()).entropy().sum()), rel=1e-4
    )


@pytest.mark.parametrize("system", ["unizero", "muzero"])
def test_the_tree_shown_is_that_of_the_decision(system: str, studio: Open) -> None:
    ours = studio(system)
    model = ours.models[0]
    assert isinstance(model.controller, MCTS)
    mind = Witness(model, 0).attend(game(ours))
    search = mind.thought.search
    assert search is not None
    simulations = model.controller.settings.simulations
    assert sum(search["visits"]) == simulations
    nodes = search["nodes"]
    assert len(nodes) == simulations + 1 and nodes[0][:2] == [-1, -1] and nodes[0][2] == simulations + 1
    for place, (parent, action, visits, q, prior) in enumerate(nodes[1:], 1):
        assert 0 <= parent < place and 0 <= action < 3 and 0 <= prior <= 1
        assert nodes[parent][2] > visits
        if parent == 0:
            assert search["visits"][action] == visits and search["values"][action] == pytest.approx(q, abs=1e-4)
    for parent in range(len(nodes)):
        below = sum(node[2] for node in nodes if node[0] == parent)
        assert nodes[parent][2] == below + 1
    line = search["line"]
    assert line[0] == 0 and all(nodes[b][0] == a for a, b in zip(line, line[1:], strict=False))
    assert nodes[line[1]][2] == max(search["visits"])
    assert search["value"] == pytest.approx(mind.thought.value, abs=1e-4)
    plain = model.controller.decide(model.world_model, mind.agent._world_state, mind.agent._state)[1]
    assert mind.thought.policy == pytest.approx(plain.policy[0].tolist(), abs=1e-4)


@pytest.mark.parametrize("system", ["unizero", "muzero"])
def test_what_the_search_has_imagined_is_not_imagined_again(system: str, studio: Open) -> None:
    ours = studio(system)
    witness, known = Witness(ours.models[0], 0), 0
    reality = game(ours)
    for action in actions(reality, 12):
        panes = [Pane(number, Mind(ours.models[0], 0), torch.Generator()) for number in range(2)]
        for pane, think in zip(panes, (True, False), strict=True):
            pane.wake(witness.attend(reality), None)
            known += int(action) in pane.mind.thought.searched
            pane.step(action, think=think)
        one, other = panes
        assert (one.reward, one.total) == pytest.approx((other.reward, other.total), abs=1e-5)
        assert (one.is_over, one.termination, one.age) == (other.is_over, other.termination, other.age)
        reality.step(action)
    assert known > 6


def test_values_are_those_of_the_controllers_own_networks(studio: Open) -> None:
    for system in ("rem", "drama"):
        ours = studio(system)
        model = ours.models[0]
        agent = Witness(model, 0).attend(game(ours)).agent
        value = agent.value()
        assert value is not None
        if system == "rem":
            view = model.controller.view(model.world_model, agent._world_state)
            expected = model.controller.policy(view, agent._state)[1]
        else:
            torch.nn.init.normal_(model.controller.critic[-1].weight)  # fresh values are all 0
            value = agent.value()
            features = model.controller._read_features(model.world_model, agent._world_state)
            rollout = type("Rollout", (), {"feature": features[:, None]})
            expected = model.controller._value_along(rollout)[:, 0]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        assert abs(float(value)) > 1e-2


def test_latents_are_described_by_their_kind() -> None:
    tokens = latent_of(torch.arange(6)[None], (8, 2, 3), 20)
    assert tokens == {"kind": "tokens", "shape": [2, 3], "values": [0, 1, 2, 3, 4, 5], "codes": 20}
    assert latent_of(torch.arange(6)[None], (8,), None)["shape"] == [1, 6]
    classes = latent_of(torch.eye(4)[None, [2, 0]], (8,), None)
    assert classes == {"kind": "classes", "shape": [2, 4], "values": [2, 0]}
    numbers = latent_of(torch.randn(1, 64, 6, 6), (8,), None)
    assert numbers["kind"] == "numbers" and len(numbers["values"]) == 256


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_both_sides_follow_the_same_keys(studio: Open) -> None:
    playing = session(studio("drama"))
    for action in (0, 2, 1):
        playing.receive({"do": "act", "action": action, "hold": True, "id": action + 10})
        for view in ticks(playing, 3):
            assert view["real"]["action"] == action and view["echo"] == action + 10
            (pane,) = view["panes"]
            assert pane["action"] == action or pane["terminated"]
    playing.receive({"do": "act", "action": None})
    assert ticks(playing, 2)[-1]["real"]["action"] == 1, "STAY, where nothing is pressed"


def test_a_tap_counts_for_one_tick(studio: Open) -> None:
    playing = session(studio("drama"))
    ticks(playing, 2)
    playing.receive({"do": "act", "action": 0, "hold": False})
    assert [view["real"]["action"] for view in ticks(playing, 3)] == [0, 1, 1]
    playing.receive({"do": "act", "action": 2, "hold": True})
    playing.receive({"do": "act", "action": None})
    assert [view["real"]["action"] for view in ticks(playing, 2)] == [2, 1], "released before a tick came"
    playing.receive({"do": "act", "action": 2, "hold": True})
    ticks(playing, 1)
    playing.receive({"do": "act", "action": None})
    assert [view["real"]["action"] for view in ticks(playing, 2)] == [1, 1], "it has counted"


def test_turns_wait_for_an_action(studio: Open) -> None:
    playing = session(studio("drama"))
    playing.receive({"do": "options", "mode": "turns"})
    playing.advance()
    assert [playing.advance() for _ in range(3)] == [None] * 3
    playing.receive({"do": "act", "action": 2, "hold": True})
    (view,) = ticks(playing, 1)
    assert view["real"]["action"] == 2
    assert playing.advance() is None, "a held key is one turn"
    for _ in range(3):
        playing.receive({"do": "step"})
    assert ticks(playing, 3)[-1]["time"] == view["time"] + 3, "each counts"
    assert playing.advance() is None


@pytest.mark.parametrize("actor", ["agent", "dreamer", "random", "you"])
def test_anyone_may_act(actor: str, studio: Open) -> None:
    playing = session(studio("rem"))
    playing.receive({"do": "actor", "pane": None, "actor": actor})
    before = playing._panes[0].mind
    for _ in range(8):
        expected = {"agent": lambda: playing._witness(playing._panes[0]).choice, "dreamer": lambda: before.choice}
        wanted = expected[actor]() if actor in expected else None
        time = playing.time
        while playing.time == time:
            playing.advance()
        if wanted is not None:
            assert look(playing)["real"]["action"] == int(wanted)
    assert look(playing)["actor"] == actor


def test_two_world_models_dream_side_by_side(acting: Make, studio: Open, tmp_path: Path) -> None:
    other = copied(acting("dreamer"), tmp_path / "other")
    ours = studio("drama", against=[str(other)])
    playing = session(ours)
    (view,) = ticks(playing, 1)
    assert [pane["model"] for pane in view["panes"]] == [0, 1]
    assert [row["about"] for row in playing.hello().head["models"]] == ["latent on mamba2", "latent on block-gru"]
    assert len(view["pictures"]) == 3
    (view,) = ticks(playing, 1)
    assert view["panes"][0]["action"] == view["panes"][1]["action"] == view["real"]["action"]


def test_a_world_model_of_another_environment_is_refused(acting: Make) -> None:
    for name, why in ((str(acting("cells")), "environment"), ("/none", "no such run")):
        with pytest.raises(ArtifactError, match=why):
            open_studio(opened(acting("drama")), controller=None, against=[name])


def test_a_world_model_without_a_controller_is_played_too(studio: Open) -> None:
    ours = studio("s4wm")
    playing = session(ours)
    hello = playing.hello().head
    assert "agent" not in hello["actors"] and "dreamer" not in hello["actors"]
    (view,) = ticks(playing, 1)
    assert view["panes"][0]["value"] is None and view["panes"][0]["policy"] is None
    with pytest.raises(UsageError, match="choose one of"):
        playing.receive({"do": "actor", "pane": None, "actor": "agent"})
    with pytest.raises(UsageError, match="nobody learned"):
        playing.receive({"do": "actor", "pane": 0, "actor": "agent"})
    playing.receive({"do": "branch", "pane": 0})
    ticks(playing, 3)


@pytest.mark.parametrize("kind", ["multi-discrete", "continuous"])
@pytest.mark.parametrize("system", ["dreamer", "muzero"])
def test_any_actions_and_observations_are_played(system: str, kind: str, tmp_path: Path) -> None:
    preset, overrides = SYSTEMS[system]
    task = ["environment.id=wm/Quarters-v0", f"environment.kwargs.actions={kind}", "controller.sampled_actions=4"]
    texts = [*overrides, *(task if system == "muzero" else task[:2])]
    collect(open_context(tmp_path / "run", preset, texts, create=True, quiet=True))
    learn(tmp_path / "run", "dynamics", "dynamics.updates=1")
    learn(tmp_path / "run", "controller", "controller.updates=1")
    playing = session(open_studio(opened(tmp_path / "run"), controller=None))
    described = playing.hello().head["actions"]
    assert described["kind"] == {"multi-discrete": "categories", "continuous": "continuous"}[kind]
    yours = [1, 2] if kind == "multi-discrete" else [0.5, -1.0]
    playing.receive({"do": "act", "action": yours, "hold": True})
    view = ticks(playing, 2)[-1]
    assert view["real"]["action"] == yours and view["panes"][0]["action"] == yours
    for wrong in (1, [1], [1, 2, 0], ["a", "b"], [1, 7] if kind == "multi-discrete" else [float("nan"), 0]):
        with pytest.raises(UsageError, match="action"):
            playing.receive({"do": "act", "action": wrong})
    for actor in ("random", "agent", "dreamer"):
        playing.receive({"do": "actor", "pane": None, "actor": actor})
        ticks(playing, 3)
    playing.receive({"do": "back", "steps": 4})
    playing.receive({"do": "branch", "pane": 0})
    playing.receive({"do": "play"})
    assert encode(Message(ticks(playing, 3)[-1] | {"pictures": None}))


def test_imported_data_is_played_from_its_stored_frames(tmp_path: Path) -> None:
    write_recording(made(6), "npz", tmp_path / "made")
    importing, run = Importing(str(tmp_path / "made")), tmp_path / "run"
    texts = [*SETTINGS, *importing.defaults(run, SETTINGS)]
    import_experience(open_context(run, None, texts, create=True, quiet=True), importing)
    train_tokenizer(opened(run))
    train_dynamics(opened(run))
    ours = open_studio(opened(run), controller=None)
    playing = session(ours)
    assert "stored" in playing.hello().head["actors"] and look(playing)["actor"] == "stored"
    assert ours.stored is not None and not ours.plays
    moments = ours.stored.start(len(ours.stored) - 1, 0, 0).moments
    for place, view in enumerate(ticks(playing, min(4, len(moments) - 1)), 1):
        assert view["real"]["source"] == "recording"
        shown = draw_observations(ours.context.spaces.observation, moments[place].observation[None])[0]
        assert np.array_equal(view["pictures"][view["real"]["frame"]], shown)
    for request in ({"do": "restart"}, {"do": "record", "on": True}):
        with pytest.raises(UsageError, match="stored frame|environment"):
            playing.receive(request)
    playing.receive({"do": "start", "episode": 0, "frame": 1})
    playing.receive({"do": "play"})
    ticks(playing, 2)


def test_a_planner_searches_the_real_frame(studio: Open) -> None:
    playing = session(studio("muzero"))
    view = ticks(playing, 4)[-1]
    (pane,) = view["panes"]
    assert pane["frame"] is None and pane["age"] == 0 and pane["search"] is not None
    playing.receive({"do": "options", "horizon": 0})
    assert max(view["panes"][0]["age"] for view in ticks(playing, 5)) >= 2


def test_at_most_so_many_dreams_and_never_none(studio: Open) -> None:
    playing = session(studio("rem"))
    for number in range(MOST_PANES - 1):
        playing.receive({"do": "branch", "pane": number})
    with pytest.raises(UsageError, match="close one"):
        playing.receive({"do": "branch", "pane": 0})
    for pane in look(playing)["panes"][1:]:
        playing.receive({"do": "close", "pane": pane["id"]})
    with pytest.raises(UsageError, match="last dream"):
        playing.receive({"do": "close", "pane": 0})


def test_keys_are_lent_to_a_branch_and_come_back(studio: Open) -> None:
    playing = session(studio("rem"))
    start = look(playing)["time"]

    def actors() -> tuple[str, ...]:
        view = look(playing)
        return view["actor"], *(pane["actor"] for pane in view["panes"])

    ticks(playing, 2)
    playing.receive({"do": "branch", "pane": 0})
    assert actors() == ("dreamer", "main", "you")
    playing.receive({"do": "pause"})
    playing.receive({"do": "goto", "time": start})
    assert actors() == ("you", "main"), "before the branch"
    playing.receive({"do": "goto", "time": start + 2})
    assert actors() == ("dreamer", "main", "you")
    playing.receive({"do": "actor", "pane": look(playing)["panes"][1]["id"], "actor": "agent"})
    assert actors() == ("you", "main", "agent")
    playing.receive({"do": "restart"})
    assert actors()[0] == "you"
    playing.receive({"do": "branch", "pane": look(playing)["panes"][0]["id"]})
    playing.receive({"do": "actor", "pane": None, "actor": "dreamer"})
    playing.receive({"do": "close", "pane": look(playing)["panes"][1]["id"]})
    assert actors() == ("dreamer", "main"), "as chosen"


def test_old_moments_are_forgotten(studio: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmcli.stages.dreaming.session.KEPT", 10)
    playing = session(studio("rem"))
    view = ticks(playing, 30)[-1]
    assert view["earliest"] == view["time"] - 9 and KEPT > 100
    with pytest.raises(UsageError, match="are kept"):
        playing.receive({"do": "goto", "time": view["earliest"] - 1})
    playing.receive({"do": "back", "steps": 1000})
    assert look(playing)["time"] == view["earliest"]
    assert playing._reality is not None and playing._reality.moments[0].observation is None, "its frame is freed"
    playing.receive({"do": "wake", "pane": None})
    playing.receive({"do": "play"})
    ticks(playing, 2)


def test_random_requests_break_nothing(studio: Open) -> None:
    rng = random.Random(0)
    playing = session(studio("drama"))
    names = [*playing._requests(), "nothing", None, 3, [], {"do": "act"}]
    values: list[Any] = [0, 1, 2, 3, 7, -1, 1.5, 1e300, True, None, "you", "agent", "x" * 50, [1], [[1]], {"action": 1}]
    values += [{"action": "x"}, {}, float("nan"), 2**70, "realtime", "turns", "random", "dreamer", "main", "stored"]
    keys = ("action", "hold", "pane", "actor", "time", "steps", "horizon", "temperature", "rate", "mode", "seed", "id")
    keys += ("episode", "frame", "on")
    refused = 0
    for _ in range(1000):
        request: dict[str, Any] = {key: rng.choice(values) for key in rng.sample(keys, rng.randrange(6))}
        request["do"] = rng.choice(names)
        try:
            playing.receive(request)
        except UsageError:
            refused += 1
        if rng.random() < 0.2:
            message = playing.advance()
            if message is not None:
                assert encode(message)
    assert 200 < refused < 900
    playing.receive({"do": "restart"})
    playing.receive({"do": "options", "mode": "realtime", "horizon": 0})
    playing.receive({"do": "play"})
    ticks(playing, 3)


# -- recordings -------------------------------------------------------------------------------------------------------


def recorded_segment(run: Run) -> dict[str, np.ndarray]:
    newest = run.latest("experience")
    assert newest is not None and newest.metrics["format"] == "played"
    return read_segment(newest.path / SEGMENT)


def test_what_is_played_becomes_experience_that_dynamics_train_on(studio: Open) -> None:
    ours = studio("drama")
    playing = session(ours)
    playing.receive({"do": "actor", "pane": None, "actor": "random"})
    ticks(playing, 3)
    playing.receive({"do": "record", "on": True})
    ticks(playing, 26)
    playing.receive({"do": "back", "steps": 6})
    playing.receive({"do": "play"})
    ticks(playing, 5)
    view = look(playing)
    moments = list(playing._reality.moments[3 : playing.time])  # type: ignore[union-attr]
    answer = playing.receive({"do": "record", "on": False})
    assert answer is not None and answer.head["type"] == "recorded"
    assert answer.head["steps"] == view["recording"]["steps"] == len(moments)
    arrays = recorded_segment(ours.context.run)
    assert arrays["action"].tolist() == [int(moment.outcome.action) for moment in moments if moment.outcome]
    assert arrays["reward"].tolist() == [moment.outcome.reward for moment in moments if moment.outcome]
    assert np.array_equal(arrays["observation"], np.stack([moment.observation for moment in moments]))
    assert arrays["first"][0] and arrays["first"][1:].tolist() == [moment.opens_episode for moment in moments[1:]]
    ended = [moment.outcome.final for moment in moments if moment.outcome and moment.outcome.ended]
    assert len(ended) > 2 and np.array_equal(arrays["closing"], np.stack(ended))
    assert not (ours.context.run.path / FOLDER).exists(), "nothing is left behind"
    before = latest(ours.context.run.path, "dynamics")
    trained = train_dynamics(opened(ours.context.run.path, "dynamics.updates=1"))
    assert trained.version == before.version + 1
    assert trained.inputs["experience"].digest == ours.context.run.latest("experience").digest  # type: ignore[union-attr]
    more = collect(opened(ours.context.run.path, "collect.steps=3"))
    assert more.inputs["previous"].version == trained.inputs["experience"].version, "environments go on behind it"


def test_going_back_before_a_recording_began_records_from_there(studio: Open) -> None:
    ours = studio("drama")
    playing = session(ours)
    ticks(playing, 8)
    playing.receive({"do": "record", "on": True})
    ticks(playing, 3)
    playing.receive({"do": "back", "steps": 8})
    start = playing.time
    playing.receive({"do": "play"})
    ticks(playing, 5)
    answer = playing.receive({"do": "record", "on": False})
    assert answer is not None and answer.head["steps"] == playing.time - start


def test_a_closed_session_publishes_its_recording(studio: Open) -> None:
    ours = studio("drama")
    playing = session(ours)
    playing.receive({"do": "record", "on": True})
    ticks(playing, 5)
    line = playing.close()
    assert line is not None and "5 recorded steps are now experience@2" in line
    assert len(recorded_segment(ours.context.run)["action"]) == 5


def test_an_empty_recording_leaves_nothing(studio: Open) -> None:
    ours = studio("drama")
    playing = session(ours)
    playing.receive({"do": "record", "on": True})
    answer = playing.receive({"do": "record", "on": False})
    assert answer is not None and "nothing" in answer.head["message"]
    assert ours.context.run.versions("experience") == [1] and not (ours.context.run.path / FOLDER).exists()
    with pytest.raises(UsageError, match="nothing is being recorded"):
        playing.receive({"do": "record", "on": False})


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {stages!r}]
from small_systems import opened
from wmcli.stages.dreaming.session import DreamSession
from wmcli.stages.dreaming.studio import open_studio
playing = DreamSession(open_studio(opened(Path({run!r})), controller=None))
playing.receive({{"do": "options", "mode": "realtime"}})
playing.receive({{"do": "record", "on": True}})
while playing.time < 9:
    playing.advance()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_recording_is_published_by_the_next_command(
    acting: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(acting("drama"), tmp_path / "run")
    here = Path(__file__).parent
    code = KILLED.format(tests=str(here.parent), stages=str(here), run=str(run))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    (tape,) = left_tapes(Run(run))
    moments = read_tape(tape)
    assert len(moments) == 9
    torn = tape.read_bytes()[:-7]
    tape.write_bytes(torn)
    assert len(read_tape(tape)) == 8, "a row that was not written to its end is left out"
    context = opened(run)
    context.progress.__init__()  # type: ignore[misc]
    open_studio(context, controller=None)
    assert "8 steps of an interrupted recording are now experience@2" in capsys.readouterr().err
    assert len(recorded_segment(Run(run))["action"]) == 8
    assert not (run / FOLDER).exists()


def test_tapes_of_running_sessions_are_left_alone(studio: Open) -> None:
    ours = studio("drama")
    playing = session(ours)
    playing.receive({"do": "record", "on": True})
    ticks(playing, 3)
    assert left_tapes(ours.context.run) == []
    (tape,) = (ours.context.run.path / FOLDER).iterdir()
    assert [len(episode) for episode in episodes_of(read_tape(tape))] == [3]
    playing.close()
    assert not tape.exists()
