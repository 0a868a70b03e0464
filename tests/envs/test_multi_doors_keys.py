from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from wmcli.envs.multi_doors_keys import NOOP, PICKUP, TOGGLE, MultiDoorsKeys
from wmcli.envs.tiles import AGENT, EMPTY, FORWARD, KEY, LEFT, LOCKED, OPEN, RIGHT, WALL
from wmcli.errors import UsageError

STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (x, y) of east, south, west and north


def play(keys: int, seeds: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Actions (E, N), compact_states (E, N, 25), rewards and ends (E, N); the script's where no actions are given."""
    episodes = MultiDoorsKeys(keys).begin(seeds)
    actions = episodes.script() if actions is None else actions
    steps = [(episodes.compact_state(), *episodes.step(action)) for action in actions.T]
    return actions, *(np.stack(parts, axis=1) for parts in zip(*steps, strict=True))


class Replay:
    """One episode by rules of this test's own: a board as a dictionary, a hand with keys, and what happened."""

    def __init__(self, keys: int, start: tuple[int, int], doors: list[int], lying: list[int]) -> None:
        """`doors`, `lying`: colors of doors and keys from the west on. `start`: x and heading."""
        width = 4 * keys + 1
        columns = [2 + 4 * place for place in range(keys)]
        self.board = {(x, y): EMPTY for x in range(width) for y in range(9)}
        for x, y in self.board:
            outer = x in (0, width - 1) or y in (0, 8)
            if outer or y == 2 or (y in (1, 7) and x % 4 == 0) or (y == 6 and x not in columns):
                self.board[x, y] = WALL
        for x, door, key in zip(columns, doors, lying, strict=True):
            self.board[x, 2], self.board[x, 7] = LOCKED + door, KEY + key
        (self.x, self.heading), self.y = start, 4
        self.hand: Counter[int] = Counter()
        self.events: list[tuple[str, int, bool]] = []  # what was tried, in which column, and whether it succeeded

    def view(self) -> list[int]:
        cells = [(self.x + right, self.y + down) for down in range(-2, 3) for right in range(-2, 3)]
        codes = [self.board.get(cell, WALL) for cell in cells]
        codes[12] = AGENT + self.heading
        return codes

    def act(self, action: int) -> int:
        """Returns doors opened."""
        ahead = (self.x + STEPS[self.heading][0], self.y + STEPS[self.heading][1])
        found = self.board[ahead]
        if action in (LEFT, RIGHT):
            self.heading = (self.heading + (1 if action == RIGHT else -1)) % 4
        elif action == FORWARD and (found == EMPTY or found >= OPEN):
            self.x, self.y = ahead
        elif action == PICKUP:
            taken = KEY <= found < LOCKED
            self.events.append(("take", ahead[0], taken))
            if taken:
                self.hand[found - KEY] += 1
                self.board[ahead] = EMPTY
        elif action == TOGGLE:
            opened = LOCKED <= found < OPEN and self.hand[found - LOCKED] > 0
            self.events.append(("try", ahead[0], opened))
            if opened:
                self.hand[found - LOCKED] -= 1
                self.board[ahead] = found - LOCKED + OPEN
            return int(opened)
        return 0


def replay_of(keys: int, actions: np.ndarray, compact_states: np.ndarray) -> Replay:
    """The episode at its start, read off the frames of its context. The start is found by trying all of them."""
    codes = compact_states.tolist()
    for place in range(keys):
        x, y, heading = 2 + 4 * place, 4, int(codes[0][12]) - AGENT
        start, seen = (x, heading), {}
        for action, seen_codes in zip(actions[: 14 * keys - 2].tolist(), codes, strict=False):
            for spot, code in enumerate(seen_codes):
                seen.setdefault((x + spot % 5 - 2, y + spot // 5 - 2), code)
            if action == FORWARD:
                x, y = x + STEPS[heading][0], y + STEPS[heading][1]
            elif action in (LEFT, RIGHT):
                heading = (heading + (1 if action == RIGHT else -1)) % 4
        doors = [seen.get((2 + 4 * column, 2), -1) - LOCKED for column in range(keys)]
        lying = [seen.get((2 + 4 * column, 7), -1) - KEY for column in range(keys)]
        if all(0 <= color < 4 for color in doors + lying):
            return Replay(keys, start, doors, lying)
    raise AssertionError("the context does not show all doors and keys")


@pytest.mark.parametrize("keys", [2, 3, 5, 7])
def test_a_replay_by_the_rules_shows_the_same_frames_and_every_key_is_consumed_by_a_door(keys: int) -> None:
    context = 14 * keys - 2
    actions, compact_states, rewards, _ = play(keys, np.arange(15))
    for episode in range(len(actions)):
        replay = replay_of(keys, actions[episode], compact_states[episode])
        colors = [code for code in replay.board.values() if code >= KEY]
        assert Counter(code - KEY for code in colors if code < LOCKED) == Counter(
            code - LOCKED for code in colors if code >= LOCKED
        )
        taken = opened = 0
        home = (replay.x, replay.y)
        visited: list[int] = []
        for frame, action in enumerate(actions[episode].tolist()):
            assert compact_states[episode, frame].tolist() == replay.view()
            if replay.y == 5 and frame < context and replay.x not in visited:
                visited.append(replay.x)
            if frame == context - 1:
                assert (replay.x, replay.y) == home and not replay.events
                assert visited == [2 + 4 * column for column in range(keys)]
            assert rewards[episode, frame] == replay.act(action)
            taken = sum(kind == "take" and done for kind, _, done in replay.events)
            opened = sum(kind == "try" and done for kind, _, done in replay.events)
            assert min(replay.hand.values(), default=0) >= 0
            assert taken - opened == sum(replay.hand.values())
        assert taken == opened == keys == rewards[episode].sum()
        assert {code for (_, y), code in replay.board.items() if y == 2} <= {WALL, *range(OPEN, OPEN + 4)}
        query = [(kind, column) for kind, column, _ in replay.events]
        rounds, last = query[: 3 * keys], query[3 * keys :]
        assert [kind for kind, _ in query] == ["take", "try", "try"] * keys + ["try"] * keys
        assert len({column for _, column in rounds[::3]}) == len({column for _, column in last}) == keys
        assert all(one != other for one, other in zip(rounds[1::3], rounds[2::3], strict=True))


@pytest.mark.parametrize(
    ("keys", "context", "query", "raw_context", "raw_query", "mean"),
    [
        (3, 40, 176, (33, 36), (104, 174), 138),
        (5, 68, 360, (61, 64), (221, 357), 289),
        (7, 96, 624, (89, 92), (359, 619), 483),
    ],
)
def test_scripts_take_as_long_as_measured_before(
    keys: int, context: int, query: int, raw_context: tuple[int, int], raw_query: tuple[int, int], mean: int
) -> None:
    task = MultiDoorsKeys(keys)
    assert (task.context, task.query, task.side, task.padding) == (context, query, 40, NOOP)
    counts = task.begin(np.arange(3000)).script() != NOOP
    in_context, in_query = counts[:, : context - 1].sum(axis=1), counts[:, context - 1 :].sum(axis=1)
    assert (in_context.min(), in_context.max()) == raw_context
    assert abs(in_query.mean() - mean) < 3 and in_query.max() <= query
    # The extremes of 3000 draws, which vary from sample to sample by a few percent.
    assert in_query.min() == pytest.approx(raw_query[0], rel=0.07)
    assert in_query.max() == pytest.approx(raw_query[1], rel=0.07)


@pytest.mark.parametrize("keys", [2, 4, 6, 9])
def test_every_script_fits_for_other_numbers_of_keys(keys: int) -> None:
    task = MultiDoorsKeys(keys)
    actions = task.begin(np.arange(1500)).script()
    assert actions.shape == (1500, task.context + task.query)
    assert ((actions == TOGGLE).sum(axis=1) == 3 * keys).all() and ((actions == PICKUP).sum(axis=1) == keys).all()
    phases = np.split(actions, [task.context - 1], axis=1)
    assert all((np.diff((phase == NOOP).astype(int), axis=1) >= 0).all() for phase in phases)  # only at the end


def test_padding_changes_nothing() -> None:
    actions, compact_states, rewards, _ = play(3, np.arange(50))
    idle = actions[:, :-1] == NOOP
    assert (
        idle.any()
        and (compact_states[:, 1:][idle] == compact_states[:, :-1][idle]).all()
        and not rewards[:, :-1][idle].any()
    )


@pytest.mark.parametrize("keys", [2, 3])
def test_a_free_player_meets_the_same_rules(keys: int) -> None:
    random = np.random.default_rng(7)
    script, compact_states, _, _ = play(keys, np.arange(40))
    noise = random.choice(6, size=script.shape, p=[0.2, 0.2, 0.3, 0.15, 0.15, 0])
    often = np.where(np.arange(40) % 2, 0.3, 0.01)[:, None]  # half of them get far from the script, half stay close
    actions = np.where(random.random(script.shape) < often, noise, script)
    actions[:, : 14 * keys - 2] = script[:, : 14 * keys - 2]
    _, played, rewards, _ = play(keys, np.arange(40), actions)
    events: Counter[tuple[str, bool]] = Counter()
    for episode in range(len(actions)):
        replay = replay_of(keys, script[episode], compact_states[episode])
        for frame, action in enumerate(actions[episode].tolist()):
            assert played[episode, frame].tolist() == replay.view()
            if frame < actions.shape[1] - 1:
                assert rewards[episode, frame] == replay.act(action)
        events.update((kind, done) for kind, _, done in replay.events)
    assert min(events[kind, done] for kind in ("take", "try") for done in (False, True)) > 5


def test_without_its_key_a_door_stays_locked_and_once_open_it_stays_open() -> None:
    seeds = np.arange(60)
    north = [np.flatnonzero(play(2, seeds)[1][:, 0, 12] == AGENT + heading) for heading in range(4)][3]
    knock = np.tile([FORWARD, TOGGLE, TOGGLE], (len(north), 1))
    _, compact_states, rewards, _ = play(2, seeds[north], knock)
    assert len(north) > 5 and not rewards.any() and (compact_states[:, 1] == compact_states[:, 2]).all()
    assert (compact_states[:, 1, 7] >= LOCKED).all() and (compact_states[:, 1, 7] < OPEN).all()
    actions, compact_states, rewards, _ = play(3, seeds)
    opening = np.argwhere(rewards)
    for episode, frame in opening:
        again = actions[episode].copy()
        again[frame + 1] = TOGGLE
        _, after, earned, _ = play(3, seeds[episode : episode + 1], again[None, : frame + 3])
        assert OPEN <= after[0, frame + 1, 7] == after[0, frame + 2, 7] and not earned[0, frame + 1]
        if episode > 5:
            break


@pytest.mark.parametrize("keys", [-1, 0, 1])
def test_fewer_than_two_doors_are_refused(keys: int) -> None:
    with pytest.raises(UsageError, match=f"keys = {keys}.*2 keys or more"):
        MultiDoorsKeys(keys)
