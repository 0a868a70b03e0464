"""A lost life ends an episode and not its game. A latent model whose segments run over ends clears its state with the
game: when it trains, when it imagines, and when it acts, in collecting as in evaluation, which knows no such episodes.

Breakout as Drama plays it: after a lost life the game goes on with the very next frame. E streams, N rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_stage_joint import TINY, opened
from tiny_run import latest

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import load_controller, load_world_model
from wmcli.cli import main
from wmcli.controllers.actor_critic import ActorCritic
from wmcli.controllers.agent import Agent
from wmcli.controllers.base import episode_starts
from wmcli.envs import Streams
from wmcli.experience import Replay, Windows, WindowSampler, read_segment
from wmcli.experience.load import SEGMENT
from wmcli.stages.collect import collect, summary
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.trainers.batches import gather
from wmcli.training.device import Machine, derived_seed
from wmcli.world_models.base import Batch
from wmcli.world_models.latent import LatentWorldModel

CPU = Machine(torch.device("cpu"), "float32", 1)
BREAKOUT = ["environment.id=Breakout", "environment.protocol=drama", "environment.count=2"]
STEPS = 800
RESETS = [[], ["dynamics.across_ends=false"], ["dynamics.reset_at_ends=false"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random play with whole games, and models. Only to be read."""
    folder = tmp_path_factory.mktemp("lives") / "run"
    context = open_context(folder, "drama-quick", [*TINY, *BREAKOUT], create=True, quiet=True)
    context.pictures = False
    collect(context, steps=STEPS)
    train_dynamics(context)
    imagine(context)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` to change at will."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def rows_of(*artifacts: Artifact) -> dict[str, np.ndarray]:
    segments = [read_segment(artifact.path / SEGMENT) for artifact in artifacts]
    return {name: np.concatenate([segment[name] for segment in segments]) for name in segments[0]}


def played(context: Context, rows: dict[str, np.ndarray], *, train: bool) -> list[tuple[np.ndarray, ...]]:
    """Play the recorded actions once more: `first` before each step (E,), whether a game ended with it, the frames."""
    settings = context.settings
    streams = Streams(settings.environment, train=train, seed=derived_seed(settings.seed, "collect"))
    steps = []
    for action in rows["action"].reshape(-1, settings.environment.count):
        first, frames = streams.first, streams.observation
        steps.append((first, streams.step(action).game_over, frames))
    return steps


def games(context: Context, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows open a game and which end one, bool (N,) each, by what the environment says."""
    over = np.stack([game_over for _, game_over, _ in played(context, rows, train=True)])
    opens = np.concatenate([np.ones_like(over[:1]), over[:-1]])
    return opens.ravel(), over.ravel()


def seen_by(patch: pytest.MonkeyPatch, owner: type, method: str, position: int) -> list[Any]:
    """What `owner.method` is given at that position, call by call."""
    seen: list[Any] = []
    original: Callable[..., Any] = getattr(owner, method)

    def spy(*given: Any, **more: Any) -> Any:
        seen.append(given[position])
        return original(*given, **more)

    patch.setattr(owner, method, spy)
    return seen


@pytest.mark.slow
def test_the_environment_knows_lives_and_games(trained: Path) -> None:
    context, rows = opened(trained), rows_of(latest(trained, "experience"))
    opens, over = games(context, rows)
    assert over.sum() >= 2 and (rows["first"] & ~opens).sum() >= 8  # or nothing here was tried
    memory = context.experience(latest(trained, "experience"))
    assert np.array_equal(memory.opens_game.numpy(), opens)
    assert np.array_equal(memory.ends_game.numpy(), over)
    assert np.array_equal(memory.first.numpy(), rows["first"])


@pytest.mark.parametrize("overrides", RESETS, ids=["resets", "one episode", "no resets"])
@pytest.mark.slow
def test_windows_to_train_on_and_to_imagine_from_are_cut_where_games_are(
    run: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """Terminations stay what they are: a lost life is one."""
    windows: list[np.ndarray] = []

    def spy(memory: Replay, data: torch.Tensor, given: Windows, *more: Any, **how: Any) -> Batch:
        windows.append(given.rows)
        return gather(memory, data, given, *more, **how)

    for module in ("dynamics", "imagination"):
        monkeypatch.setattr(f"wmcli.trainers.{module}.gather", spy)
    context = opened(run, *overrides, force=True)
    learned = seen_by(monkeypatch, LatentWorldModel, "loss", 1)
    train_dynamics(context)
    imagined = seen_by(monkeypatch, ActorCritic, "imagine", 2)
    imagine(context)
    rows = rows_of(latest(run, "experience"))
    opens, over = games(context, rows)
    if overrides == RESETS[1]:
        opens, over = rows["first"], None
    batches = learned + imagined
    assert len(batches) == len(windows) and len(imagined) == context.settings.controller.updates
    for batch, places in zip(batches, windows, strict=True):
        valid = batch.valid.numpy()
        assert np.array_equal(batch.is_first.numpy(), opens[places] & valid)
        assert np.array_equal(batch.terminated.numpy(), rows["terminated"][places])
        assert (batch.is_last is None) == (over is None)
        if over is not None:
            assert np.array_equal(batch.is_last.numpy(), over[places])
    assert any((rows["first"] & ~opens)[places[:, 1:]].any() for places in windows) == (over is not None)


@pytest.mark.parametrize("act_window", [0, 4])
@pytest.mark.slow
def test_collecting_and_evaluation_carry_the_same_state_over_a_lost_life(
    run: Path, monkeypatch: pytest.MonkeyPatch, act_window: int
) -> None:
    """The same frames and actions, once as `wm collect` hands them to the agent, once as `wm eval` does."""
    context = opened(run, f"dynamics.act_window={act_window}", "collect.epsilon=0.5")
    features: list[torch.Tensor] = []
    decide = Agent.decide

    def spy(agent: Agent, *given: Any) -> np.ndarray:
        features.append(agent.world_model.features(agent._world_state).clone())
        return decide(agent, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Agent, "decide", spy)
        artifact = collect(context, controller="controller@1", extend=False, steps=STEPS)
    rows = rows_of(artifact)
    lost = (rows["terminated"] & (rows["lives"] > 0)).reshape(-1, 2)
    assert lost.sum() >= 8 and (rows["terminated"] & (rows["lives"] == 0)).any()

    world_model, controller = load_controller(latest(run, "controller"), CPU, context.settings.acting)
    assert isinstance(world_model, LatentWorldModel) and world_model.settings.act_window == act_window
    generator = torch.Generator().manual_seed(derived_seed(context.settings.seed, "collect actions", 0))
    agent = Agent(world_model, controller, 2, temperature=1.0, epsilon=0.5, generator=generator)
    actions = rows["action"].reshape(-1, 2)
    for t, (first, _, frames) in enumerate(played(context, rows, train=False)):
        assert np.array_equal(frames, rows["observation"].reshape(-1, 2, *frames.shape[1:])[t])
        agent.perceive(frames, first)
        torch.testing.assert_close(world_model.features(agent._world_state), features[t], msg=f"step {t}")
        agent.decide(actions[t].astype(np.int64))


@pytest.mark.parametrize("act_window", [0, 8])
@torch.no_grad()
def test_training_imagining_and_acting_read_a_window_over_a_lost_life_alike(trained: Path, act_window: int) -> None:
    memory = opened(trained).experience(latest(trained, "experience"))
    world_model = load_world_model(latest(trained, "dynamics"), CPU)
    assert isinstance(world_model, LatentWorldModel)
    acting = {"act_window": act_window, "act_on": "posterior"}
    world_model.settings = world_model.settings.model_copy(update=acting)
    certain = world_model.tokenizer  # every way draws the same
    certain.settings = certain.settings.model_copy(update={"unimix": 0.0})
    certain.posterior_head.weight.mul_(1e6)
    runs, order = memory.runs(across_ends=True)
    sampler = WindowSampler(
        runs, order, length=9, minimum=9, pad="left", sampling="windows", rng=np.random.default_rng(0)
    )
    batch = gather(memory, memory.observation, sampler.batch(sampler.windows), across_ends=True)
    inside = (batch.terminated & ~batch.is_last)[:, :-1].any(1)
    rows = torch.cat([inside.nonzero()[:12, 0], batch.is_first[:, 1:].any(1).nonzero()[:12, 0]])
    batch = Batch(*(None if part is None else part[rows] for part in batch))
    assert batch.is_first[:, 1:].any() and len(rows) == 24

    starts = episode_starts(batch)
    observed, _ = world_model.observe(world_model.encode(batch.inputs), batch.action, starts)
    past = observed[..., world_model.frame_features :]
    _, _, read, _ = world_model._read(world_model.tokenizer.embed(batch.inputs), batch, starts, None)
    torch.testing.assert_close(read[:, :-1].masked_fill(starts[:, 1:, None], 0), past[:, 1:], rtol=1e-4, atol=1e-4)
    state = None
    for t in range(9):
        state = world_model.perceive(state, batch.inputs[:, t], batch.action[:, t - 1], starts[:, t])
        torch.testing.assert_close(world_model.features(state), observed[:, t], rtol=1e-4, atol=1e-4, msg=f"frame {t}")
    carried = (batch.terminated & ~batch.is_last)[:, :-1]
    assert (past[:, 1:][carried].abs().amax(1) > 0).all()


@pytest.mark.parametrize("across_ends", [True, False])
def test_a_new_agent_is_warmed_up_with_the_running_game(
    run: Path, monkeypatch: pytest.MonkeyPatch, across_ends: bool
) -> None:
    """Ends two steps behind a lost life: three frames before it belong to the game, but to another episode."""
    rows = rows_of(latest(run, "experience"))
    stream = {name: column[rows["stream"] == 0] for name, column in rows.items() if name != "closing"}
    lost = np.flatnonzero(stream["terminated"] & (stream["lives"] > 0))[2]
    context = opened(run)
    if not across_ends:
        monkeypatch.setattr(Agent, "across_ends", property(lambda _: False, lambda *_: None), raising=False)
    collect(context, controller="random", extend=False, steps=2 * (int(lost) + 3))
    warmed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Agent, "burn_in", lambda self, *given: warmed.append(given))
    before = latest(run, "experience")
    collect(context, controller="controller@1", steps=2)
    frames, actions, valid = (each[0] for each in warmed[0])
    rows = rows_of(before)
    names = ("terminated", "lives", "observation", "action")
    stream = {name: rows[name][rows["stream"] == 0] for name in names}
    want = min(4, lost + 3) if across_ends else 2
    assert stream["terminated"][-3] and stream["lives"][-3] > 0
    assert valid.tolist() == [False] * (4 - want) + [True] * want
    np.testing.assert_array_equal(frames[-want:], stream["observation"][-want:])
    np.testing.assert_array_equal(actions[-want:], stream["action"][-want:])


@pytest.mark.slow
def test_returns_of_games_stand_beside_those_of_episodes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what lies in a segment whole counts. The first segment ends right behind a life that stream 0 lost, so that
    the second begins with an episode, amid a game."""
    context, rows = opened(run), rows_of(latest(run, "experience"))
    lost = np.flatnonzero((rows["terminated"] & (rows["lives"] > 0))[::2])[2]
    first = collect(context, controller="random", extend=False, steps=2 * (int(lost) + 1))
    artifacts = [first, *(collect(opened(run), controller="random", steps=STEPS) for _ in range(2))]
    rows = rows_of(*artifacts)
    opens, over = games(context, rows)
    segment = np.repeat(range(3), [len(rows_of(artifact)["action"]) for artifact in artifacts])
    for number, artifact in enumerate(artifacts):
        want = []
        for stream in range(2):
            mine = rows["stream"] == stream
            starts, ends = np.flatnonzero(mine & opens), np.flatnonzero(mine & over)
            for start, end in zip(starts, ends, strict=False):
                if segment[start] == segment[end] == number:
                    want.append(rows["reward"][start : end + 1][mine[start : end + 1]].sum())
        assert artifact.metrics["games"] == len(want) < artifact.metrics["episodes"]
        assert artifact.metrics["mean_game_return"] == (pytest.approx(np.mean(want)) if want else None)
    told = artifact.metrics
    assert told["games"] > 1
    assert summary(artifact) == (
        f"collect: published {artifact.name}: mean return {told['mean_return']:.3f} over {told['episodes']} episodes,"
        f" {told['mean_game_return']:.3f} over {told['games']} whole games"
    )
    logged = [record for record in Run.open(run, create=False).history() if record["stage"] == "collect"]
    assert logged[-1]["mean_game_return"] == told["mean_game_return"] and logged[-1]["games"] == told["games"]
    capsys.readouterr()
    assert main.run(["artifacts", "experience", "--run", str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)[-1]
    assert listed["name"] == artifact.name
    assert listed["metric"] == f"mean_return {told['mean_return']:.4g}, mean_game_return {told['mean_game_return']:.4g}"
