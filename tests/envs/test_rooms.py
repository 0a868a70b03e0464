"""Rooms: layout, motion by the measured formulas, the script's round, what the context shows, teleport, gymnasium."""

from __future__ import annotations

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from wmcli.envs.memory_task import EpisodeBatch, MemoryEnv
from wmcli.envs.ray_caster import EYE, RADIUS, SPHERE_COLORS, WALL_COLORS, axes, cast
from wmcli.envs.rooms import FULL, SMALL, TELEPORT, Rooms, TeleportRooms
from wmcli.envs.walking import BODY, FORWARD, FORWARD_LEFT, FORWARD_RIGHT, LEFT, NOOP, REACH, RIGHT, State
from wmcli.errors import UsageError

SLOPE = np.tan(np.deg2rad(40))
ALL = [Rooms(rooms, size) for size in (FULL, SMALL) for rooms in (2, 4, 10)]
LENGTHS = {(2, 64): (301, 200), (4, 64): (501, 500), (10, 64): (1101, 900), (2, 32): (61, 44)}


def name(task: Rooms) -> str:
    return f"{task.rooms}-{task.side}" + "-teleport" * isinstance(task, TeleportRooms)


def play(episodes: EpisodeBatch, actions: np.ndarray) -> np.ndarray:
    """Compact states (E, T, S) before each of the actions (E, T)."""
    compact_states = []
    for action in actions.T:
        compact_states.append(episodes.compact_state())
        reward, _ = episodes.step(action)
        assert reward.dtype == np.float32 and not reward.any()
    return np.stack(compact_states, 1)


def scripted(task: Rooms, seeds) -> np.ndarray:
    episodes = task.begin(np.asarray(seeds))
    return play(episodes, episodes.script())


def in_view(task: Rooms, compact_states: np.ndarray) -> np.ndarray:
    """Which spheres' middles are in the picture with nothing before them, bool (..., P, 2): by angles, by a ray through
    the walls, and by the distance of every other sphere from the line of sight."""
    content = task.read(compact_states.reshape(-1, compact_states.shape[-1]))
    forward, right = axes(content.heading)
    way = content.objects.reshape(len(content.heading), -1, 2).astype(float) - content.position[:, None]
    ahead, aside = (way * forward[:, None]).sum(-1), (way * right[:, None]).sum(-1)
    seen = (ahead > 0) & (np.abs(aside) < SLOPE * ahead) & (ahead > EYE / SLOPE)
    frame, which = np.nonzero(seen)
    line = np.concatenate([way[frame, which], np.full((len(frame), 1), -EYE)], -1)
    free = cast(task.layout.walls, content.position[frame].astype(float), line[:, :2]).depth > 1
    for other in range(way.shape[1]):
        middle = np.concatenate([way[frame, other], np.full((len(frame), 1), -EYE)], -1)
        part = ((middle * line).sum(-1) / (line * line).sum(-1)).clip(0, 1)
        free &= (np.linalg.norm(middle - part[:, None] * line, axis=-1) > RADIUS) | (which == other)
    seen[frame, which] = free
    return seen.reshape(*compact_states.shape[:-1], task.rooms, 2)


def state_at(task: Rooms, x: float, y: float, heading: float) -> State:
    return State(np.array([[x, y]]), np.array([heading]), np.zeros(1), np.zeros(1))


def test_grids_and_lengths_are_those_of_the_tasks() -> None:
    for rooms, shape, corridors in ((2, (7, 15), 1), (4, (15, 15), 4), (10, (15, 39), 10)):
        layout = Rooms(rooms).layout
        assert layout.walls.shape == shape
        assert (~layout.walls).sum() == rooms * 25 + corridors * 3
        assert (layout.slots[~layout.walls] == rooms * 4).all(-1).sum() == corridors * 3
        assert (np.abs(layout.middles - np.roll(layout.middles, -1, 0)).sum(-1) == 8).all()
        recall = {2: 150, 4: 250, 10: 550}[rooms]
        assert (TeleportRooms(rooms).context, TeleportRooms(rooms).query) == (LENGTHS[rooms, 64][0], recall + 1)
    for (rooms, side), lengths in LENGTHS.items():
        task = Rooms(rooms, FULL if side == 64 else SMALL)
        assert (task.context, task.query, task.side) == (*lengths, side)
    with pytest.raises(UsageError, match="rooms = 3: .* 2, 4, 10"):
        Rooms(3)


def test_walking_covers_the_measured_distance() -> None:
    task = Rooms(10)
    state = state_at(task, 3.5, 3.5, 0.0)
    for n in range(8):
        moved = task.advance(state, np.array([FORWARD]))
        covered = moved.position[0, 0] - state.position[0, 0]
        assert covered == pytest.approx(0.25 - 0.138 * 0.225**n) and moved.position[0, 1] == 3.5
        state = moved
    glided = [task.advance(state, np.array([NOOP])).position[0, 0] - state.position[0, 0]]
    for _ in range(60):
        state = task.advance(state, np.array([NOOP]))
    assert glided[0] == pytest.approx(0.138, rel=1e-3)
    assert state.position[0, 0] - 3.5 == pytest.approx(8 * 0.25)  # what the beginning lacks the end has


def test_turning_follows_the_measured_rates() -> None:
    task = Rooms(2)
    for action, sign in ((LEFT, 1), (RIGHT, -1), (FORWARD_LEFT, 1), (FORWARD_RIGHT, -1)):
        state, headings = state_at(task, 3.5, 3.5, 180.0), [180.0]
        for taken in (action, action, action, action, NOOP, NOOP):
            state = task.advance(state, np.array([taken]))
            headings.append(state.heading[0])
        assert np.allclose(np.diff(headings), sign * np.array([15.5, 18.4, 18.4, 18.4, 2.9, 0]))
    small = Rooms(2, SMALL)
    state = small.advance(state_at(small, 2.5, 2.5, 0.0), np.array([LEFT]))
    state = small.advance(state, np.array([FORWARD]))
    assert state.heading[0] == 45 and np.allclose(state.position, [2.5 + np.sqrt(0.125), 2.5 - np.sqrt(0.125)])


def test_walls_stop_an_agent_and_let_it_slide() -> None:
    task = Rooms(2)
    state = state_at(task, 2.5, 1.3, 30.0)
    for _ in range(8):
        state = task.advance(state, np.array([FORWARD]))
    assert state.position[0, 1] == pytest.approx(1 + BODY, abs=1e-5)
    assert state.position[0, 0] - 2.5 == pytest.approx(np.cos(np.pi / 6) * (8 * 0.25 - 0.138 / 0.775), abs=1e-4)
    for _ in range(20):
        state = task.advance(state, np.array([FORWARD]))
    assert np.allclose(state.position, [[6 - BODY, 1 + BODY]], atol=1e-5)  # in the corner


@pytest.mark.parametrize("task", [Rooms(4), TeleportRooms(10), TeleportRooms(2, SMALL), Rooms(4, SMALL)], ids=name)
def test_no_agent_is_ever_inside_a_wall(task) -> None:
    rng = np.random.default_rng(0)
    count = 64
    chances = np.array([1, 6, 1, 1, 2, 2, 0.3])[: len(task.meanings)]
    actions = rng.choice(len(task.meanings), size=(count, 400), p=chances / chances.sum())
    position = task.read(play(task.begin(np.arange(count)), actions)).position
    for corner in np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)]) * BODY:
        column, row = np.moveaxis(np.floor(position + corner).astype(int), -1, 0)
        assert not task.layout.walls[row, column].any()
    assert position[:, -1].std(0).min() > 0.5  # they did get about


def test_random_layouts_follow_the_rules() -> None:
    task = Rooms(4)
    content = task.read(task.begin(np.arange(400)).compact_state())
    shift = content.objects - task.layout.middles[:, None]
    assert (np.abs(shift).max(-1) <= 2).all() and (shift % 1 == 0).all() and shift.any(-1).all()
    assert (shift[:, :, 0] != shift[:, :, 1]).any(-1).all()
    assert (content.colors[..., 0] != content.colors[..., 1]).all()
    for values, kinds in ((content.colors, len(SPHERE_COLORS)), (content.textures, len(WALL_COLORS))):
        share = np.bincount(values.reshape(-1), minlength=kinds) / values.size
        assert np.abs(share - 1 / kinds).max() < 4.5 * np.sqrt(1 / kinds / values.size)
    begun = np.abs(content.position[:, None] - task.layout.middles).sum(-1) == 0
    assert (begun.sum(1) == 1).all() and begun.sum(0).min() > 60 and set(content.heading) == {0, 90, 180, 270}


@pytest.mark.parametrize("task", ALL, ids=name)
def test_the_script_goes_round_twice_in_the_same_order_and_in_time(task) -> None:
    compact_states = scripted(task, np.arange(3 if task.side == 64 else 40))
    assert compact_states.shape[1] == task.context + task.query
    position, budget = task.read(compact_states).position, task.budget
    begun = (position[:, 0, None] == task.layout.middles).all(-1).argmax(-1)
    arrivals = [
        *range(0, task.context, budget.context),
        *range(task.context - 1, compact_states.shape[1], budget.query),
    ]
    for visit, frame in zip([*range(task.rooms + 1), *range(task.rooms + 1)], arrivals, strict=False):
        off = position[:, frame] - task.layout.middles[(begun + visit) % task.rooms]
        assert (np.hypot(*off.T) < REACH).all(), (visit, frame)


@pytest.mark.parametrize("task", ALL, ids=name)
def test_every_visit_begins_with_a_full_turn(task) -> None:
    episodes = task.begin(np.arange(6))
    script, budget = episodes.script(), task.budget
    steps = 20 if task.side == 64 else 8
    starts = [*range(0, task.context - 1, budget.context), *range(task.context - 1, script.shape[1] - 1, budget.query)]
    for start in starts:
        turned = script[:, start : start + steps]
        assert np.isin(turned, (LEFT, RIGHT)).all() and (turned == turned[:, :1]).all()


@pytest.mark.parametrize("task", ALL, ids=name)
def test_the_context_shows_every_sphere(task) -> None:
    seeds = np.arange(6 if task.rooms == 10 and task.side == 64 else 24)
    seen = in_view(task, scripted(task, seeds)[:, : task.context])
    assert seen.any(1).all()


@pytest.mark.parametrize("task", [Rooms(4), Rooms(2, SMALL)], ids=name)
@pytest.mark.slow
def test_a_frame_shows_its_compact_state(task) -> None:
    """Where a sphere's middle is projected to, and on the wall ahead, frames have the colors that `read` names."""
    compact_states = np.concatenate(scripted(task, np.arange(8 if task.side == 64 else 40)))[::5]
    content, frames, half = task.read(compact_states), task.draw(compact_states).astype(float), task.side / 2
    light = frames / np.linalg.norm(frames, axis=-1, keepdims=True).clip(1)
    frame, room, which = np.nonzero(in_view(task, compact_states))
    forward, right = axes(content.heading)
    way = content.objects[frame, room, which] - content.position[frame]
    ahead, aside = (way * forward[frame]).sum(-1), (way * right[frame]).sum(-1)
    column = np.floor(half * (1 + aside / ahead / SLOPE)).astype(int)
    row = np.floor(half * (1 + EYE / ahead / SLOPE)).astype(int)
    close = (row < task.side - 1) & (ahead < 2.5)  # a distant middle lies on its lower edge
    colors = np.array(list(SPHERE_COLORS.values()), float)[content.colors[frame, room, which]]
    likeness = (light[frame, row - 1, column] * colors).sum(-1) / np.linalg.norm(colors, axis=-1)
    assert close.sum() > 50 and (likeness[close] > 0.995).all()

    ray = forward + 0.5 / half * SLOPE * right  # of the column right of the middle
    towards = cast(task.layout.walls, content.position.astype(float), ray)
    off = (content.position + towards.depth[:, None] * ray)[:, None] - task.layout.middles  # of the point ahead
    (along, across), edge = np.moveaxis(np.sort(np.abs(off), -1), -1, 0), task.size.room / 2
    on_wall = (np.abs(across - edge) < 1e-4) & (along > 0.5) & (along < edge)  # beside corridors
    inside, room = np.nonzero(on_wall & (towards.depth[:, None] < 4))
    east, south = (off[inside, room] / edge).round(3).T
    side = np.select([east == 1, south == 1, east == -1, south == -1], range(4))
    named = content.textures[inside, room, side]
    colors = np.array(list(WALL_COLORS.values()), float)[named]
    middle = int(half)
    shown = light[inside, middle - 1, middle]  # just above the horizon no sphere reaches
    assert len(inside) > 50
    likeness = (shown * colors).sum(-1) / np.linalg.norm(colors, axis=-1)
    assert (likeness > 0.99).all()


@pytest.mark.parametrize("task", [TeleportRooms(2), TeleportRooms(4, SMALL), TeleportRooms(2, SMALL)], ids=name)
def test_after_a_teleport_frames_are_those_of_the_context_byte_by_byte(task) -> None:
    count = 12
    episodes = task.begin(np.arange(count))
    script = episodes.script()
    compact_states = play(episodes, script)
    assert (script[:, : task.context - 1] != TELEPORT).all() and (script[:, task.context - 1] == TELEPORT).all()
    recall, found = task.budget.recall, []
    for row in compact_states:
        context, query = row[: task.context], row[task.context :]
        starts = [t for t in range(task.context - recall) if (context[t : t + recall + 1] == query).all()]
        assert starts, "no stretch of the context comes back"
        tau = starts[0]
        assert (task.draw(query) == task.draw(context)[tau : tau + recall + 1]).all()
        found.append(tau)
    assert len(set(found)) > count // 2 and min(found) < (task.context - recall) / 2 < max(found)
    plain = Rooms(task.rooms, task.size)
    assert (plain.begin(np.arange(count)).script()[:, : task.context - 1] == script[:, : task.context - 1]).all()
    assert (scripted(plain, np.arange(count))[:, : task.context] == compact_states[:, : task.context]).all()


def test_whoever_teleports_before_its_time_comes_to_the_first_frame() -> None:
    task = TeleportRooms(2, SMALL)
    seeds = np.arange(60)
    actions = np.tile([FORWARD, LEFT, FORWARD, TELEPORT, RIGHT, TELEPORT], (60, 1))
    compact_states = play(task.begin(seeds), np.concatenate([actions, actions[:, :1]], 1))
    first = (compact_states[:, 4] == compact_states[:, 0]).all(-1)
    before = np.stack([(compact_states[:, 4] == compact_states[:, t]).all(-1) for t in range(4)])
    assert before.any(0).all() and 0.8 < first.mean() < 1  # tau < 4 in about 4 of 31
    assert (compact_states[first, 6] == compact_states[first, 0]).all(-1).mean() > 0.9


@pytest.mark.parametrize("task", [Rooms(2), TeleportRooms(4), Rooms(10, SMALL)], ids=name)
def test_episodes_side_by_side_are_the_episodes_alone(task) -> None:
    seeds = np.array([5, 3, 5, 77, 2**31 - 1, 0, 8])
    together = task.begin(seeds)
    script = together.script()
    assert script.dtype == np.int32 and script.shape == (7, task.context + task.query)
    assert (script[0] == script[2]).all() and (script[0] != script[1]).any()
    compact_states = play(together, script)
    assert compact_states.dtype == np.uint8 and (together.script() == script).all()
    for number in (1, 2, 4):
        alone = task.begin(seeds[number : number + 1])
        assert (alone.script() == script[number]).all()
        assert (play(alone, script[number : number + 1]) == compact_states[number]).all()
    few = compact_states[:, ::97]
    frames = task.draw(few)
    assert frames.shape == (*few.shape[:2], task.side, task.side, 3)
    assert (task.draw(few[2, 1]) == frames[2, 1]).all()


def test_an_episode_that_is_over_stands_still() -> None:
    task = TeleportRooms(2, SMALL)
    episodes = task.begin(np.arange(3))
    for number, action in enumerate(episodes.script().T):
        last = episodes.compact_state()
        _, over = episodes.step(action)
        assert (over == (number == task.context + task.query - 1)).all()
    for action in (FORWARD, TELEPORT):
        assert episodes.step(np.full(3, action))[1].all() and (episodes.compact_state() == last).all()


def test_returned_compact_states_do_not_change_later() -> None:
    episodes = Rooms(2).begin(np.arange(2))
    before = episodes.compact_state()
    kept = before.copy()
    episodes.step(np.array([FORWARD_LEFT, FORWARD_RIGHT]))
    assert (before == kept).all() and (episodes.compact_state() != kept).any()


@pytest.mark.parametrize("task", [Rooms(2), TeleportRooms(2, SMALL)], ids=name)
def test_gymnasium_finds_nothing_wrong(task) -> None:
    env = MemoryEnv(task)
    check_env(env, skip_render_check=True)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    assert env.action_space.n == len(task.meanings) == (7 if isinstance(task, TeleportRooms) else 6)


@pytest.mark.parametrize("task", [Rooms(2, SMALL), TeleportRooms(2, SMALL)], ids=name)
def test_the_script_played_through_gymnasium_shows_the_same(task) -> None:
    env = MemoryEnv(task)
    frames = [env.reset(seed=11)[0]]
    env.reset(seed=11)
    episodes = task.begin(np.random.Generator(np.random.PCG64(np.random.SeedSequence(11))).integers(2**31, size=1))
    script = episodes.script()
    for number, action in enumerate(script[0]):
        frame, reward, terminated, truncated, _ = env.step(int(action))
        assert reward == 0 and not truncated
        assert terminated == (number == script.shape[1] - 1)
        frames.append(frame)
    assert (np.stack(frames[:-1]) == task.draw(play(episodes, script))[0]).all()


def test_settings_are_values_and_describe_themselves() -> None:
    assert Rooms(4) == Rooms(4) != Rooms(4, SMALL) and hash(Rooms(4)) == hash(Rooms(4))
    quick = Rooms(2, dataclasses.replace(FULL, pixels=16))
    assert quick.draw(quick.begin(np.arange(2)).compact_state()).shape == (2, 16, 16, 3)
    assert "teleport" in TeleportRooms(4).about and "4 rooms" in Rooms(4).about
