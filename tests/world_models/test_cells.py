"""The language model over cells: loss, prediction and imagination against the backbone run one token at a time.

Axes: B batch, T frames, K = 25 cells, L = 26 tokens of a frame, V = 9 tokens, D width.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import SECTIONS, build
from wmcli.config import validate
from wmcli.envs import grid_world as world
from wmcli.errors import UsageError
from wmcli.metrics import grid_world as metrics
from wmcli.nn.categorical import sample
from wmcli.spaces import Continuous, Discrete, Image, ObservationSpace, Vector
from wmcli.world_models import cells
from wmcli.world_models.base import Batch, Parts
from wmcli.world_models.cells import CellsSettings, CellsWorldModel

B, T, K, L, V, D = 3, 3, 25, 26, 9, 16
SMALL = {
    "retnet": {"heads": 2},
    "transformer": {"heads": 2},
    "transformer-xl": {"heads": 2, "memory_length": 3 * L},
    "mamba1": {},
    "mamba2": {"head_width": 8},
    "gru": {},
}
BACKBONES = ["retnet", "transformer"]


def make(backbone="retnet", *, size=40, actions=5, layers=2, **settings) -> CellsWorldModel:
    torch.manual_seed(0)
    part = validate(
        SECTIONS[backbone], {"width": D, "layers": layers, "dropout": 0.1} | SMALL.get(backbone, {}), "backbone"
    )
    settings = CellsSettings(**{"sequence_length": T, **settings})
    network = build(part, max_length=settings.sequence_length * L, block=L)
    return CellsWorldModel(settings, network, actions, size).eval()


def played(time=T, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames (B, time, 40, 40, 3) of the environment and random actions (B, time)."""
    action = np.random.default_rng(seed).integers(5, size=(B, time))
    rows = []
    for row in range(B):
        env = world.GridWorld()
        frames = [env.reset(seed=seed + row)[0]]
        frames += [env.step(each)[0] for each in action[row, :-1].tolist()]
        rows.append(np.stack(frames))
    return torch.from_numpy(np.stack(rows)), torch.from_numpy(action)


def segment(time=T, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    frames, action = played(time, seed)
    return torch.from_numpy(world.cells(frames.numpy())), action


def experience(latent: torch.Tensor, action: torch.Tensor, valid: torch.Tensor | None = None) -> Batch:
    no = torch.zeros(action.shape, dtype=torch.bool)
    return Batch(latent, action, no.float(), no, no, no, ~no if valid is None else valid)


def opening(action: torch.Tensor, frame: int = 0) -> torch.Tensor:
    reset = torch.zeros(action.shape, dtype=torch.bool)
    reset[:, frame] = True
    return reset


def tokens_of(latent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """(B, T * L), put together by hand."""
    return torch.cat([torch.cat((latent[:, t], action[:, t, None] + 4), 1) for t in range(latent.shape[1])], 1)


@torch.no_grad()
def one_by_one(model: CellsWorldModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, n, V) after each of tokens (B, n), from single steps of the backbone."""
    table = model.embedding.weight
    state, logits = model.backbone.initial_state(len(tokens)), []
    for token in tokens.unbind(1):
        y, state = model.backbone.step(table[token], state)
        logits.append(y @ (table if model.head is None else model.head.weight).T)
    return torch.stack(logits, 1)


# -- frames and cells -------------------------------------------------------------------------------------------------


def test_the_world_is_that_of_the_environment_and_the_metrics() -> None:
    assert (cells.SIDE, cells.MOVES, cells.COLORS) == (world.SIDE, world.MOVES, world.COLORS)
    assert [cells.FLOOR, cells.WALL, cells.AGENT, cells.GOAL] == [world.FLOOR, world.WALL, world.AGENT, world.GOAL]
    assert metrics.TOKENS == cells.TOKENS == L
    assert make().successor.tolist() == metrics.SUCCESSOR.tolist()


@pytest.mark.parametrize("size", [10, 20, 40, 55])
def test_frames_to_cells_and_back(size: int) -> None:
    model = make(size=size)
    native, _ = played()
    want = torch.from_numpy(world.cells(native.numpy()))
    frames = model.decode(want)
    assert frames.shape == (B, T, size, size, 3) and frames.dtype == torch.uint8
    assert (model.encode(frames) == want).all() and model.encode(frames).dtype == torch.int64
    assert (world.cells(frames.numpy()) == want.numpy()).all()
    if size == 40:
        assert (frames == native).all()
    tinted = (native.int() + torch.randint(-30, 31, native.shape)).clamp(0, 255).to(torch.uint8)
    assert (make().encode(tinted) == want).all()


def test_a_token_that_is_no_cell_is_seen_and_no_feature() -> None:
    model = make()
    latent, _ = segment()
    wrong = latent[:, 0].clone()
    wrong[:, 12] = 6
    frame = model.decode(wrong)
    assert (frame[:, 16:24, 16:24] == torch.tensor(cells.NO_CELL)).all()
    assert (frame[:, :16] == model.decode(latent[:, 0])[:, :16]).all()
    features = model.features(cells.CellsState(None, wrong, 0))
    assert features.shape == (B, *model.feature_shape) == (B, 4, 5, 5) and features.dtype == torch.float32
    assert (features[:, :, 2, 2] == 0).all() and (features.sum(1).flatten(1).sum(1) == 24).all()
    right = model.features(cells.CellsState(None, latent[:, 0], 0))
    assert (right.argmax(1).flatten(1) == latent[:, 0]).all() and (right.sum(1) == 1).all()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"actions": 3}, "has 3"),
        ({"actions": Continuous((-1.0,), (1.0,))}, "needs the grid world's 5 actions; this environment has others"),
        ({"size": 64}, "size"),
        ({"size": 15}, "10, 20"),
    ],
)
def test_another_environment_is_refused(kwargs: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        make(**kwargs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("space", [Image(40, 45), Image(40, 40, 1), Vector(25), {"grid": Image(40, 40)}])
def test_other_observations_than_square_images_in_colors_are_refused(space: ObservationSpace) -> None:
    settings = CellsSettings()
    part = validate(SECTIONS["gru"], {"width": D, "layers": 1}, "backbone")

    def parts(space: ObservationSpace) -> Parts:
        return Parts(space, Discrete(5), lambda length, block: build(part, max_length=length, block=block), None, None)

    assert settings.build(parts(Image(40, 40))).image_size == 40
    with pytest.raises(UsageError, match="dynamics.kind = 'cells' takes square images in three colors"):
        settings.build(parts(space))


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backbone", ["retnet", "transformer", "transformer-xl", "mamba1", "mamba2", "gru"])
def test_the_loss_is_the_cross_entropy_of_every_token_but_the_first(backbone: str, tied: bool) -> None:
    model = make(backbone, tied=tied)
    latent, action = segment()
    valid = torch.arange(T) < torch.tensor([[T], [T - 1], [1]])
    found, log = model.loss(experience(latent, action, valid))
    tokens = tokens_of(latent, action)
    log_p = one_by_one(model, tokens).log_softmax(-1)
    total, cell, act = [], [], []
    for row in range(B):
        for place in range(1, int(valid[row].sum()) * L):
            nats = -log_p[row, place - 1, tokens[row, place]]
            total.append(nats)
            (act if place % L == K else cell).append(nats)
    assert len(total) == L * (T + T - 1 + 1) - B
    assert_close(found, torch.stack(total).mean(), rtol=1e-4, atol=1e-5)
    assert_close(log["cell_loss"], torch.stack(cell).mean(), rtol=1e-4, atol=1e-5)
    assert_close(log["action_loss"], torch.stack(act).mean(), rtol=1e-4, atol=1e-5)
    assert all(not value.requires_grad for value in log.values())


def test_a_fresh_model_guesses() -> None:
    latent, action = segment()
    found, log = make().loss(experience(latent, action))
    assert abs(float(found.detach()) - math.log(V)) < 0.05
    assert 0 <= float(log["cell_accuracy"]) <= 1


@pytest.mark.parametrize("backbone", ["retnet", "mamba2"])
def test_bfloat16_is_close_and_the_loss_float32(backbone: str) -> None:
    model = make(backbone)
    batch = experience(*segment())
    want, _ = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        found, log = model.loss(batch)
    assert found.dtype == torch.float32 and all(value.dtype == torch.float32 for value in log.values())
    assert_close(found, want, rtol=0.02, atol=0)


def test_padding_changes_nothing() -> None:
    model = make()
    latent, action = segment()
    valid = (torch.arange(T) < 2).expand(B, T)
    other, _ = segment(seed=50)
    found = model.loss(experience(latent, action, valid))[0]
    changed = torch.cat((latent[:, :2], other[:, 2:]), 1)
    assert_close(model.loss(experience(changed, action, valid))[0], found, rtol=0, atol=0)
    assert_close(model.loss(experience(latent[:, :2], action[:, :2]))[0], found)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_teacher_forced_frames_are_the_likeliest_given_real_history(backbone: str) -> None:
    model = make(backbone)
    torch.nn.init.normal_(model.embedding.weight)  # far from the uniform
    latent, action = segment()
    frames = model.predict_frames(latent, action)
    assert frames.shape == (B, T - 1, K)
    likeliest = one_by_one(model, tokens_of(latent, action)).argmax(-1)
    for t in range(1, T):
        for k in range(K):
            assert (frames[:, t - 1, k] == likeliest[:, t * L + k - 1]).all()
    assert len(frames.unique()) > 1


def test_it_learns_and_every_parameter_is_reached() -> None:
    model = make("mamba1", layers=1, sequence_length=2).train()
    latent, action = segment(2)
    groups = model.parameter_groups()
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses = []
    for _ in range(40):
        loss, _ = model.loss(experience(latent, action))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 1 < 2 < losses[0]


def test_decay_spares_the_table() -> None:
    model = make("mamba1", weight_decay=0.1)
    decayed, plain = model.parameter_groups()
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    spared = {id(parameter) for parameter in plain["params"]}
    assert id(model.embedding.weight) in spared
    assert id(model.backbone.layers[0].mixer.in_proj.weight) not in spared


# -- imagination ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_imagination_samples_token_by_token_from_the_context(backbone: str, context: int) -> None:
    model = make(backbone, context=context, sequence_length=5)
    torch.nn.init.normal_(model.embedding.weight)
    latent, action = segment(4)
    features, state = model.observe(latent, action, opening(action))
    assert features.shape == (B, 4, 4, 5, 5)
    assert (features.argmax(2).flatten(2) == latent).all()
    torch.manual_seed(5)
    steps = []
    for t in range(2):
        imagined, state = model.imagine(state, action[:, t])
        assert (model.latent(state) == imagined.latent).all() and imagined.latent.shape == (B, K)
        assert not imagined.terminated.any()
        steps.append(imagined.latent)
    torch.manual_seed(5)
    tokens = tokens_of(latent[:, 4 - context :], action[:, 4 - context :])[:, :-1]
    for t in range(2):
        tokens = torch.cat((tokens, action[:, t, None] + 4), 1)
        numbers = torch.rand(len(tokens), K)
        for k in range(K):
            y, _ = model.backbone(model.embedding(tokens), None)  # all over again
            drawn = sample(y[:, -1] @ model.embedding.weight.T, numbers[:, k])
            assert (drawn == steps[t][:, k]).all()
            tokens = torch.cat((tokens, drawn[:, None]), 1)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_steps_before_a_reset_leave_no_trace(backbone: str) -> None:
    model = make(backbone, context=2)
    latent, action = segment()
    other, _ = segment(seed=9)
    padded = torch.cat((other[:, :1], latent[:, 1:]), 1)
    steps = []
    for frames, reset in ((latent[:, 2:], opening(action[:, 2:])), (padded[:, 1:], opening(action[:, 1:], 1))):
        _, state = model.observe(frames, action[:, -frames.shape[1] :], reset)
        torch.manual_seed(3)
        steps.append(model.imagine(state, action[:, 0])[0].latent)
    assert (steps[0] == steps[1]).all()


def test_a_backbone_without_room_starts_from_the_current_frame() -> None:
    model = make("transformer", sequence_length=2)
    latent, action = segment(1)
    state = model.observe(latent, action, opening(action))[1]
    _, state = model.imagine(state, action[:, 0])  # 25 + 26 of 52 tokens
    fresh = cells.CellsState(None, state.latent, 0)
    torch.manual_seed(1)
    now, after = model.imagine(state, action[:, 0])
    torch.manual_seed(1)
    want, _ = model.imagine(fresh, action[:, 0])
    assert (now.latent == want.latent).all() and after.length == 51


def test_the_reward_follows_the_rules_of_the_environment() -> None:
    model, env = make(), world.GridWorld()
    boards, actions, rewards = [], [], []
    for agent in range(9):
        for goal in set(range(9)) - {agent}:
            for action in range(5):
                env._agent, env._goal = agent, goal
                boards.append(world.cells(env._draw()))
                actions.append(action)
                env.reset(seed=0)
                env._agent, env._goal = agent, goal
                rewards.append(env.step(action)[1])
    board, action = torch.from_numpy(np.stack(boards)), torch.tensor(actions)
    imagined, _ = model.imagine(cells.CellsState(None, board, 0), action)
    assert imagined.reward.dtype == torch.float32 and 0 < sum(rewards) < len(rewards)
    assert imagined.reward.tolist() == rewards


def test_perceiving_reads_the_cells_off_the_frame() -> None:
    model = make()
    frames, action = played()
    first = model.perceive(None, frames[:, 0], action[:, 0], torch.ones(B, dtype=torch.bool))
    second = model.perceive(first, frames[:, 1], action[:, 0], torch.zeros(B, dtype=torch.bool))
    assert (model.latent(second) == model.encode(frames[:, 1])).all()


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backbone", "total"), [("mamba1", 13_664), ("mamba2", 10_128)])
def test_exact_parameter_counts_of_the_study(backbone: str, total: int) -> None:
    """H = 16, 4 layers, N = 16, expand 2; Mamba-2 with 4 heads of 8. Each layer by its parts."""
    h, n, inner, taps, heads = 16, 16, 32, 4, 4
    if backbone == "mamba1":
        rank = 1
        layer = h * 2 * inner + inner * (taps + 1) + inner * (rank + 2 * n) + (rank + 1) * inner + inner * n + inner
    else:
        convolved = inner + 2 * n
        layer = h * (inner + convolved + heads) + convolved * (taps + 1) + 3 * heads + inner
    layer += inner * h + h  # back to the width, and the norm before it
    model = make(backbone, layers=4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 4 * layer + V * h + h == total
    untied = make(backbone, layers=4, tied=False)
    assert sum(parameter.numel() for parameter in untied.parameters()) == total + V * h


def test_defaults_are_those_of_the_study() -> None:
    settings = CellsSettings()
    assert (settings.sequence_length * L, settings.batch, settings.updates, settings.learning_rate) == (
        208,
        64,
        1000,
        3e-3,
    )
    assert next(iter(CellsSettings.model_fields)) == "kind"
    with pytest.raises(UsageError, match="context = 8"):
        validate(CellsSettings, {"context": 8}, "dynamics")
