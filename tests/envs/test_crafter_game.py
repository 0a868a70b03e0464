"""Crafter."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("crafter")

from wmcli.envs import EnvironmentSettings, protocol  # noqa: E402
from wmcli.envs.crafter_game import CrafterGame, _Members  # noqa: E402
from wmcli.spaces import Image, Spaces  # noqa: E402


@pytest.fixture(scope="module")
def game() -> CrafterGame:
    return CrafterGame()


def test_the_manifest_has_spaces_meanings_and_the_limit() -> None:
    block = protocol(EnvironmentSettings(id="Crafter"))
    assert json.loads(json.dumps(block)) == block
    assert Spaces.of(block).observation == Image(64, 64) and block["actions"] == 17
    assert block["action_meanings"][:2] == ["noop", "move_left"] and len(block["action_meanings"]) == 17
    assert block["train"] == {"time_limit": 10_000} and block["versions"]["crafter"] and block["resize"] == "none"


@pytest.mark.slow
def test_a_seed_gives_the_same_game_whatever_came_before(game: CrafterGame) -> None:
    def seen(seed: int) -> bytes:
        rng = np.random.default_rng(0)
        frames = [game.reset(seed=seed)[0]]
        frames += [game.step(int(action))[0] for action in rng.integers(17, size=60)]
        return np.stack(frames).tobytes()

    once = seen(5)
    assert seen(6) != once
    assert seen(5) == once


def test_creatures_are_kept_in_the_order_of_their_additions(game: CrafterGame) -> None:
    """Which of them disappears is drawn from this order: that of a set would differ from process to process."""
    game.reset(seed=0)
    chunks: dict[Any, Any] = game._game._world.chunks
    assert chunks and all(isinstance(members, _Members) for members in chunks.values())
    assert any(len(members) > 1 for members in chunks.values())
    world = game._game._world
    for members in chunks.values():
        places = [world._objects.index(each) for each in members]
        assert places == sorted(places)


def test_death_terminates_and_time_truncates(game: CrafterGame) -> None:
    game.reset(seed=0)
    assert game.step(0)[2:4] == (False, False)
    game._game._step = game.max_steps - 1
    assert game.step(0)[2:4] == (False, True)
    game._game._player.health = 0
    assert game.step(0)[2:4] == (True, False)


def test_the_achievements_are_told(game: CrafterGame) -> None:
    game.reset(seed=0)
    info = game.step(0)[4]
    assert len(info["achievements"]) == 22
