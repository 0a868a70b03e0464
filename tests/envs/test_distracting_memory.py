from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from wmcli.envs.distracting_memory import DistractingMemory
from wmcli.envs.tiles import AGENT, EMPTY, KEY, SQUARE, WALL
from wmcli.errors import UsageError

STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (x, y) of east, south, west and north
LEFT, RIGHT, FORWARD = range(3)


def is_wall(x: int, y: int, width: int) -> bool:
    """The layout in words, cell by cell."""
    outer = x <= 0 or x >= width - 1 or y <= 0 or y >= 8
    room = (y in (2, 6) and 1 <= x <= 4) or (x == 4 and y in (3, 5))
    hallway = y in (3, 5) and 5 <= x <= width - 4
    across = x == width - 3 and y != 4
    return outer or room or hallway or across


def play(width: int, seeds: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Actions (E, N), compact_states (E, N, 25), rewards and ends (E, N); the script's where no actions are given."""
    episodes = DistractingMemory(width).begin(seeds)
    actions = episodes.script() if actions is None else actions
    steps = [(episodes.compact_state(), *episodes.step(action)) for action in actions.T]
    return actions, *(np.stack(parts, axis=1) for parts in zip(*steps, strict=True))


def chart(width: int, actions: np.ndarray, compact_states: np.ndarray) -> tuple[dict[tuple[int, int], int], list]:
    """From one episode's frames: what lies in each cell that was seen, checked against the layout, and the agent's
    (x, y, heading) in each frame, by rules of this test's own."""
    x, y, heading = (width - 2) // 2, 4, 0
    seen: dict[tuple[int, int], int] = {}
    poses = []
    for action, one in zip(actions, compact_states, strict=True):
        poses.append((x, y, heading))
        for place, code in enumerate(one.tolist()):
            cell = (x + place % 5 - 2, y + place // 5 - 2)
            if place == 12:
                assert code == AGENT + heading
            else:
                assert (code == WALL) == is_wall(*cell, width)
                assert code in (EMPTY, WALL) or SQUARE <= code < KEY
                assert seen.setdefault(cell, code) == code
        if x == width - 2 and y in (3, 5):
            continue
        if action == FORWARD:
            ahead = (x + STEPS[heading][0], y + STEPS[heading][1])
            x, y = (x, y) if is_wall(*ahead, width) else ahead
        else:
            heading = (heading + (1 if action == RIGHT else -1)) % 4
    return seen, poses


@pytest.mark.parametrize(("width", "context", "query"), [(100, 199, 51), (200, 399, 101), (400, 799, 201), (12, 23, 7)])
def test_a_script_is_as_long_as_published(width: int, context: int, query: int) -> None:
    task = DistractingMemory(width)
    assert (task.context, task.query, task.side, task.padding) == (context, query, 40, None)
    actions, compact_states, _, ends = play(width, np.arange(4))
    assert actions.shape == (4, context + query)
    assert (ends == (np.arange(context + query) == context + query - 1)).all()
    _, poses = chart(width, actions[0], compact_states[0])
    assert poses[0] == poses[context - 1] == ((width - 2) // 2, 4, 0) and poses[context][0] == (width - 2) // 2 + 1
    assert poses[-1][:2] in ((width - 2, 3), (width - 2, 5)) and poses[-2][:2] == (width - 2, 4)
    assert {pose[0] for pose in poses[:context]} == set(range(1, width - 1))


def test_headings_follow_the_published_video() -> None:
    _, compact_states, _, _ = play(100, np.arange(20))
    runs = set()
    for headings in compact_states[:, :, 12] - AGENT:
        runs.add(tuple((int(heading), len(list(run))) for heading, run in itertools.groupby(headings)))
    common = ((0, 50), (1, 1), (2, 98), (1, 1), (0, 98))
    assert runs == {(*common, (1, 2)), (*common, (3, 2))}


@pytest.mark.parametrize("width", [12, 30])
def test_frames_show_the_same_layout_for_any_actions(width: int) -> None:
    seeds = np.arange(20)
    scripted = play(width, seeds)
    random = np.random.default_rng(0).choice(3, size=scripted[0].shape, p=[0.1, 0.2, 0.7])
    for actions, compact_states, *_ in (scripted, play(width, seeds, random)):
        for episode in range(len(seeds)):
            seen, _ = chart(width, actions[episode], compact_states[episode])
            squares = {cell for cell, code in seen.items() if SQUARE <= code < KEY}
            fixed = {(3, 5), (width - 2, 2), (width - 2, 6)}
            assert all(y == 4 and 4 <= x <= width - 5 for x, y in squares - fixed)
            if actions is scripted[0]:
                assert fixed <= squares


def test_half_of_the_hallway_is_filled_in_four_colors_alike() -> None:
    width, seeds = 30, np.arange(200)
    actions, compact_states, _, _ = play(width, seeds)
    charts = [chart(width, actions[episode], compact_states[episode])[0] for episode in seeds]
    cells = np.array([[found[x, 4] for x in range(4, width - 4)] for found in charts])
    filled = cells != EMPTY
    assert abs(filled.mean() - 0.5) < 4 * 0.5 / np.sqrt(cells.size)
    assert np.abs(filled.mean(axis=0) - 0.5).max() < 4 * 0.5 / np.sqrt(
        len(seeds)
    )  # in every cell, the first and last too
    shares = np.bincount(cells[filled] - SQUARE) / filled.sum()
    assert len(shares) == 4 and np.abs(shares - 0.25).max() < 4 * 0.43 / np.sqrt(filled.sum())
    pairs = [(found[width - 2, 2], found[width - 2, 6]) for found in charts]
    assert len(set(pairs)) == 12 and all(one != other for one, other in pairs)  # all pairs of two colors of four


def test_the_reward_says_whether_the_chosen_square_has_the_remembered_color() -> None:
    width, seeds = 12, np.arange(1000)
    actions, compact_states, rewards, _ = play(width, seeds)
    assert not rewards[:, :-2].any() and not rewards[:, -1].any()
    kinds = Counter()
    for episode in seeds:
        seen, poses = chart(width, actions[episode], compact_states[episode])
        south = poses[-1][1] == 5
        right = seen[3, 5] == seen[width - 2, 6 if south else 2]
        assert seen[3, 5] in (seen[width - 2, 2], seen[width - 2, 6])
        assert rewards[episode, -2] == right
        kinds[south, right] += 1
    assert all(
        abs(kinds[kind] / 1000 - 0.25) < 4 * 0.43 / np.sqrt(1000) for kind in itertools.product((False, True), repeat=2)
    )


def test_half_of_the_labels_are_one() -> None:
    rewards = play(12, np.arange(4000))[2].sum(axis=1)
    assert set(rewards.tolist()) == {0.0, 1.0}
    assert abs(rewards.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(rewards))


@pytest.mark.parametrize("turn", [LEFT, RIGHT])
def test_a_player_may_choose_at_once_and_the_episode_is_over_there(turn: int) -> None:
    seeds, way = np.arange(40), [FORWARD] * 5 + [turn, FORWARD]
    still = [FORWARD, LEFT, FORWARD, RIGHT, RIGHT, FORWARD]
    actions = np.tile(way + still, (len(seeds), 1))
    _, compact_states, rewards, ends = play(12, seeds, actions)
    assert (ends == (np.arange(actions.shape[1]) >= len(way))).all()
    assert (compact_states[:, len(way) :] == compact_states[:, len(way) : len(way) + 1]).all()
    assert 5 < rewards[:, len(way) - 1].sum() < 35 and not np.delete(rewards, len(way) - 1, axis=1).any()
    script, _, scripted, _ = play(12, seeds)
    same = script[:, -3] == turn
    agree = rewards.sum(axis=1) == scripted.sum(axis=1)
    assert (agree == same).all() and same.any() and not same.all()  # one of the two targets is right, the other is not


@pytest.mark.parametrize("width", [-2, 0, 10, 13, 101])
def test_a_hallway_without_a_middle_is_refused(width: int) -> None:
    with pytest.raises(UsageError, match=f"width = {width}.*even"):
        DistractingMemory(width)
