"""Scores of the grid-world study: a scripted oracle reaches the floors, a fresh model does not. What a step costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wmcli.backbones import build
from wmcli.backbones.base import Backbone
from wmcli.backbones.retnet import RetNetSettings
from wmcli.envs import EnvironmentSettings, Streams
from wmcli.errors import MachineError, UsageError
from wmcli.experience import Recorder, Replay
from wmcli.metrics import grid_world as metrics
from wmcli.stages import grid_world as stage
from wmcli.training.device import Machine
from wmcli.world_models.cells import CellsSettings, CellsWorldModel

IDS = {"both": "wm/GridWorld-v0", "goal": "wm/GridWorldGoal-v0"}
CPU = Machine(torch.device("cpu"), "float32", 1)


class Oracle(Backbone):
    """Knows the rules: reads tokens one-hot (9 wide) and answers with the log-probabilities of the next one.

    The state: the probability (B, 72) of each board given the cells of the frame so far, the board that the frame
    turned out to be and, as a number, how many tokens of the frame were read.
    """

    width, max_length = 9, None

    def __init__(self, respawn: str) -> None:
        super().__init__()
        pairs = [(agent, goal) for agent in metrics.INNER for goal in metrics.INNER if agent != goal]
        boards = np.full((72, 25), 1)
        boards[:, metrics.INNER] = 0
        after = np.zeros((72, 5, 72))
        for i, (agent, goal) in enumerate(pairs):
            boards[i, agent], boards[i, goal] = 2, 3
            for action in range(5):
                to = int(metrics.SUCCESSOR[action, agent])
                if to != goal:
                    after[i, action, pairs.index((to, goal))] = 1
                else:
                    after[i, action] = [respawn == "both" or pair[0] == to for pair in pairs]
        self.boards = torch.from_numpy(np.eye(9, dtype=np.float32)[boards])  # (72, 25, 9)
        after /= after.sum(-1, keepdims=True)
        self.after = torch.from_numpy(after).float()
        # Random play once it has forgotten its start, by simply going on.
        self.start = torch.from_numpy(np.linalg.matrix_power(after.mean(1), 5000)[0]).float()

    def initial_state(self, batch):
        return self.start.expand(batch, -1), 0

    def step(self, x, state, reset=None):
        boards, read = state
        if read < 25:
            boards = boards * (x @ self.boards[:, read].T)
            boards = boards / boards.sum(-1, keepdim=True)
        else:
            boards = torch.einsum("bs,ba,sat->bt", boards, x[:, 4:], self.after)
        read = (read + 1) % 26
        if read < 25:
            chances = boards @ self.boards[:, read]
        else:
            chances = (torch.arange(9) >= 4).float().expand(len(x), -1) / 5
        return chances.clamp(min=1e-30).log(), (boards, read)

    def forward(self, x, state, reset=None):
        assert reset is None
        given, state = state, self.initial_state(len(x)) if state is None else state
        answers = []
        for element in x.unbind(1):
            y, state = self.step(element, state)
            answers.append(y)
        return torch.stack(answers, 1), None if given is None else state

    def fork(self, x, queries, state):
        raise NotImplementedError


def oracle(respawn: str, horizon: int = 8) -> CellsWorldModel:
    model = CellsWorldModel(CellsSettings(sequence_length=horizon, tied=False), Oracle(respawn), 5, 10)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(9))
        model.head.weight.copy_(torch.eye(9))
    return model.eval()


def collected(respawn: str, rounds: int = 256, streams: int = 16) -> Replay:
    """Random play: `rounds` steps of each stream."""
    games = Streams(EnvironmentSettings(id=IDS[respawn], size=10, count=streams), train=True, seed=1)
    recorder = Recorder(rounds, streams)
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        before, first, action = games.observation, games.first, rng.integers(5, size=streams)
        after = games.step(action)
        recorder.add(
            {
                "observation": before,
                "action": action.astype(np.int32),
                "reward": after.reward,
                "terminated": after.terminated,
                "truncated": after.truncated,
                "first": first,
                "lives": after.lives,
            },
            after.final,
        )
    memory = Replay("cpu")
    memory.extend(recorder.arrays())
    return memory


@pytest.mark.parametrize("respawn", ["both", "goal"])
def test_an_oracle_reaches_every_floor_and_none_is_passed(respawn: str) -> None:
    scores = stage.grid_world_scores(oracle(respawn), collected(respawn), respawn=respawn, sequences=512, seed=0)
    assert (scores["sequences"], scores["frames"]) == (512, 8)
    # A sequence's hits make its loss vary: 7 steps, each a hit of ln 72 or ln 8 nats in 4.6 % of cases.
    deviation = np.sqrt(7 * 0.044) * np.log(72 if respawn == "both" else 8) / 207 / np.sqrt(512)
    assert abs(scores["loss"] - scores["best_loss"]) < 4 * deviation + 2e-4  # and the first frames
    assert scores["best_loss"] == metrics.best_loss(8, respawn)
    assert abs(scores["hit_rate"] - 16 / 345) < 0.015
    nothing = {"error": 0, "geometric": 0, "logic": 0}
    assert scores["teacher"]["without_hits"] == scores["free"]["without_hits"] == nothing
    assert scores["free"]["all"]["geometric"] == 0
    if respawn == "both":
        assert abs(scores["free"]["all"]["logic"] - scores["logic_floor"]) < 0.015
        assert abs(scores["teacher"]["all"]["logic"] - scores["logic_floor"]) < 0.015
    else:
        assert scores["free"]["all"] == nothing
        assert scores["teacher"]["all"]["logic"] == scores["logic_floor"] == 0


def fresh(horizon: int = 3) -> CellsWorldModel:
    torch.manual_seed(0)
    network = build(RetNetSettings(width=16, layers=1), max_length=horizon * 26, block=26)
    return CellsWorldModel(CellsSettings(sequence_length=horizon), network, 5, 10).eval()


def test_a_fresh_model_is_wrong_and_scores_depend_on_the_seed_alone() -> None:
    memory, model = collected("both", 30, 4), fresh()
    state = torch.random.get_rng_state()
    scores = stage.grid_world_scores(model, memory, respawn="both", sequences=20, batch=8, seed=3)
    assert (torch.random.get_rng_state() == state).all()
    assert abs(scores["loss"] - np.log(9)) < 0.1
    assert scores["free"]["all"]["geometric"] == scores["teacher"]["all"]["error"] == 1
    again = stage.grid_world_scores(model, memory, respawn="both", sequences=20, batch=8, seed=3)
    assert again == scores
    whole = stage.grid_world_scores(model, memory, respawn="both", sequences=20, batch=20, seed=3)
    assert abs(whole["loss"] - scores["loss"]) < 1e-5 and whole["teacher"] == scores["teacher"]


def test_sequences_do_not_overlap_and_too_few_are_refused() -> None:
    memory = collected("both", 20, 3)
    rows = stage._cut(memory, 3, 18, np.random.default_rng(0))  # 6 in each of 3 streams
    assert rows.shape == (18, 3) and len(np.unique(rows)) == 54
    assert (np.diff(rows, axis=1) == 3).all()  # streams stand interleaved
    with pytest.raises(UsageError, match="19 sequences of 3 frames, .* has 18"):
        stage.grid_world_scores(fresh(), memory, respawn="both", sequences=19, seed=0)


@pytest.mark.slow
def test_cost_of_a_training_step() -> None:
    settings = CellsSettings(batch=64, sequence_length=8)
    backbone = RetNetSettings(width=16, layers=1)
    cost = stage.time_and_memory(settings, backbone, CPU, repeats=3)
    assert 0 < cost["milliseconds_low"] <= cost["milliseconds"] <= cost["milliseconds_high"]
    # At the least there are the backbone's q, k, v, gate and feed-forward at every token, in float32.
    assert 64 * 207 * 8 * 16 * 4 < cost["peak_bytes"] < 2**30
    assert "resident" in cost["peak_of"]
    model = CellsWorldModel(settings, build(backbone, 208, 26), 5, 10)
    assert cost["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_no_room_is_a_limit_of_the_machine(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stage, "PROC", stage.PROC / "nowhere")
    monkeypatch.setattr(stage, "_training_step", full)
    with pytest.raises(MachineError, match="retnet on 64 x 208 tokens"):
        stage.time_and_memory(CellsSettings(), RetNetSettings(), CPU)


def test_where_memory_cannot_be_measured_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr(stage, "PROC", stage.PROC / "nowhere")
    cost = stage.time_and_memory(
        CellsSettings(batch=1, sequence_length=2), RetNetSettings(width=16, layers=1), CPU, repeats=1
    )
    assert cost["peak_bytes"] is None and cost["peak_of"].startswith("not measured")
