"""A scripted player for each small game, near the best return. It reads the state, all of which frames show.

`python tests/learning/scripted_players.py` measures `small_games.REFERENCES`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import small_games
from small_games import GAMES, STEPS, Game

Player = Callable[[Any], int]
"""From a game, in any state, to an action."""

Place = tuple[int, ...]  # row, column
State = TypeVar("State", bound=Hashable)


def towards(player: np.ndarray, place: np.ndarray) -> int:
    """The step of a shortest way over an empty board, to another place."""
    down, right = place - player
    return (0 if right > 0 else 2) if right else (1 if down > 0 else 3)


def first_action(
    start: State, follow: Callable[[State], Iterable[tuple[int, State]]], goal: Callable[[State], bool]
) -> int | None:
    """The first action of a shortest way to a goal by breadth-first search, None where there is no way.

    Args:
        start: A state.
        follow: From a state to each action with the state that it leads to.
        goal: Whether a state is a goal.
    """
    seen, queue = {start}, deque([(start, -1)])
    while queue:
        state, first = queue.popleft()
        for action, to in follow(state):
            if goal(to):
                return first if first >= 0 else action
            if to not in seen:
                seen.add(to)
                queue.append((to, first if first >= 0 else action))
    return None


def reach(game: small_games.Reach) -> int:
    return towards(game.player, game.goal)


def bounce(game: small_games.Bounce) -> int:
    return 1 + int(np.sign(round((game.ball[1] - game.paddle - 7) / 5)))


def dodge(game: small_games.Dodge) -> int:
    """The first move into a column on which no rock falls next, and which is not a corner to be trapped in."""
    near = {int(column) for row, column in game.rocks if row >= 5}
    for action in (1, 0, 2):
        to = min(max(game.player + action - 1, 0), 7)
        if to not in near:
            return action
    return 1


def gather(game: small_games.Gather) -> int:
    """The best way under all that falls, as if it fell without rest; a rock counts as ten coins."""
    value = np.zeros(8)  # by column, of what lands from here on
    for row in range(7):  # what lands last comes first
        best = np.max([value, np.append(value[1:], value[-1]), np.append(value[0], value[:-1])], axis=0)
        value = np.where(game.sky[row] < 0, -10, game.sky[row]) + 0.9 * best
    columns = [min(max(game.player + move, 0), 7) for move in (-1, 0, 1)]
    return max((1, 0, 2), key=lambda action: value[columns[action]])


def deliver(game: small_games.Deliver) -> int:
    return towards(game.player, game.depot if game.carries else game.parcel)


def cross(game: small_games.Cross) -> int:
    def follow(state: tuple[int, int]) -> Iterable[tuple[int, tuple[int, int]]]:
        row, time = state
        cars = (game.cars + (time + 1) * game.speeds) % 64
        for action in (0, 1, 2):
            to = min(row + action - 1, 4)
            if to in (0, 4) or not 16 < cars[to - 1] < 36:
                yield action, (to, time + 1)

    return first_action((game.row, 0), follow, lambda state: state[0] == 0) or 0


def shoot(game: small_games.Shoot) -> int:
    """Under the lowest target that can still be shot, and fire there."""
    shot = game.missile[1] if game.missile else -1
    steps = np.abs(np.arange(8) - game.player)
    within = (game.targets >= 0) & (game.targets + 4 * steps < 56) & (np.arange(8) != shot)
    if not within.any():
        return 1
    column = int(np.argmax(np.where(within, game.targets, -1)))
    move = int(np.sign(column - game.player))
    return 1 + move + (3 if game.player + move == column else 0)


def push(game: small_games.Push) -> int:
    def follow(state: tuple[Place, Place]) -> Iterable[tuple[int, tuple[Place, Place]]]:
        for action in range(4):
            player, block = game.pushed(np.array(state[0]), np.array(state[1]), action)
            yield action, (tuple(player.tolist()), tuple(block.tolist()))

    start = (tuple(game.player.tolist()), tuple(game.block.tolist()))
    return first_action(start, follow, lambda state: state[1] == tuple(game.goal.tolist())) or 0


def eat(game: small_games.Eat) -> int:
    def follow(place: Place) -> Iterable[tuple[int, Place]]:
        for action, (down, right) in enumerate(STEPS):
            to = (place[0] + down, place[1] + right)
            if 0 <= min(to) <= max(to) < 8 and game.bites[to] >= 0:
                yield action, to

    action = first_action(tuple(game.player.tolist()), follow, lambda place: game.bites[place] > 0)
    return 4 if action is None else action


def jump(game: small_games.Jump) -> int:
    return int(bool(game.hurdles) and game.hurdles[0] <= 28)


PLAYERS: dict[str, Player] = {
    player.__name__.capitalize(): player
    for player in (reach, bounce, dodge, gather, deliver, cross, shoot, push, eat, jump)
}


def random_player(seed: int) -> Player:
    """Uniformly random actions."""
    rng = np.random.default_rng(seed)
    return lambda game: int(rng.integers(game.actions))


def returns(game: Game, player: Player, episodes: int) -> np.ndarray:
    """(episodes,) sums of rewards, of the episodes that begin from seeds 0, 1, 2, ..."""
    totals = np.zeros(episodes)
    for seed in range(episodes):
        game.reset(seed=seed)
        over = False
        while not over:
            _, reward, ended, cut, _ = game.step(player(game))
            totals[seed] += reward
            over = ended or cut
    return totals


if __name__ == "__main__":
    for name, game in GAMES.items():
        random, scripted = returns(game(), random_player(0), 500), returns(game(), PLAYERS[name], 500)
        print(f'    "{name}": Reference(random={random.mean():.2f}, scripted={scripted.mean():.2f}),')
