"""Atari by named protocols, which state every detail and never rely on defaults of an environment id.

Protocol `rem` is the chain of REM (Cohen et al. 2024, arXiv 2402.05643) and IRIS (Micheli et al. 2023, arXiv
2209.00588), as their public code runs it (leor-c/REM and eloialonso/iris, after openai/baselines), innermost first:

1. the bare emulator: one frame an action, no sticky actions, the game's minimal action set;
2. each 210 x 160 frame is resized to size x size with Pillow's bilinear filter, which is antialiased;
3. a time limit, counted in emulator frames;
4. after a reset of the game, a number of no-op frames;
5. each action is repeated for 4 frames, rewards are summed, and the observation is the elementwise maximum of the
   resized frames 3 and 4;
6. in training the loss of a life ends the episode, and the reset after it plays one no-op action in the same game.

Only frames 3 and 4 are resized here. That is exact, because frames 1 and 2 never enter the maximum. If a game ends
inside the repeat, the maximum is over the present content of the two-frame buffer, older frames included, as in the
public code. The frame after the last action of an episode is not used.

One thing differs on purpose: a time limit is a truncation here and a termination in the public code.

Protocol `drama` is the chain of Drama (Wang et al. 2024, arXiv 2410.08893), as its public code runs it
(realwenlongwang/drama), innermost first:

1. the bare emulator, as above;
2. each action is repeated for 4 frames, rewards are summed, and the observation is the elementwise maximum of the last
   two frames played, or the first alone if the game ended with it;
3. that maximum is resized to size x size, each pixel the mean of the area it covers: OpenCV's INTER_AREA, equal to the
   bit at Drama's 64 x 64;
4. a time limit of 108,000 emulator frames; no no-op frames and no action to begin with;
5. in training the loss of a life is a termination, and the game continues with the very next frame. For samplers of
   episodes that frame is the first of one. A model whose segments cross the ends of episodes reads on until the game
   ends, as in the public code, which has no episodes.

Three things differ on purpose. Each game has a seed of its own; the public code gives every reset the same one. A life
lost soon after one was won counts; the public code never raises its count of lives. 0 lives before the end of a game
are no end of an episode, as under `rem`.

Protocol `unizero` is the chain of UniZero (Pu et al. 2024, arXiv 2406.10667), as its public code runs it
(opendilab/LightZero, after openai/baselines), innermost first:

1. the bare emulator, as above;
2. after a reset of the game, 1 to 30 no-op frames, in training and test alike; no FIRE to begin with;
3. each action is repeated for 4 frames, rewards are summed, and the observation is the elementwise maximum of the last
   two frames played, as under `drama`;
4. in training the loss of a life ends the episode, and the reset after it plays one no-op action in the same game, as
   under `rem`;
5. a time limit of 432,000 emulator frames, 108,000 decisions;
6. the observation is resized by the mean of areas, as under `drama`;
7. in training the reward is the sign of the sum; in test it is the sum.

Protocol `unizero-sticky` adds sticky actions: on each frame the emulator repeats the previous action with probability
0.25. Learning to Focus (De Dios Allegue et al. 2025) states them; no public code has them.

Three things differ on purpose. Each game has a seed of its own. A time limit is a truncation, as above. The limit
counts frames since the reset of the game, no-ops included; the public code counts decisions since the start of the
episode, and its ids (`*NoFrameskip-v4`) end a game after 108,000 frames anyway.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, SupportsInt

import gymnasium
import numpy as np
from PIL import Image

from wmcli.errors import UsageError
from wmcli.spaces import Spaces

CONTINUES = "wm/continues"  # info key: this episode is over, but reset() without a seed goes on with the same game
NOOP = 0  # index of the no-op in every minimal action set


@dataclass(frozen=True)
class Rules:
    """Rules that differ between training and test."""

    life_loss_ends_episode: bool
    no_ops_min: int  # emulator frames after a reset of the game, drawn uniformly, both ends included
    no_ops_max: int
    time_limit: int  # emulator frames since the reset of the game, no-ops included
    clip_reward: bool  # the reward of a decision is the sign of the sum over its frames
    # With which frame the next episode opens after a lost life: that which the last action led to, or, if None, the one
    # after a no-op action.
    after_life_loss: Literal["same frame"] | None = None


@dataclass(frozen=True)
class AtariProtocol:
    """How Atari is played: the whole of it."""

    frameskip: int  # the emulator's own; the repeat below comes on top
    repeat_action_probability: float  # sticky actions
    full_action_space: bool
    action_repeat: int  # emulator frames a decision
    max_over_last: int  # frames of each repeat that are merged by an elementwise maximum
    resize: Literal["pillow bilinear, before the maximum", "area, after the maximum"]
    color: str
    train: Rules
    test: Rules


_UNIZERO = AtariProtocol(
    frameskip=1,
    repeat_action_probability=0.0,
    full_action_space=False,
    action_repeat=4,
    max_over_last=2,
    resize="area, after the maximum",
    color="rgb",
    train=Rules(life_loss_ends_episode=True, no_ops_min=1, no_ops_max=30, time_limit=432_000, clip_reward=True),
    test=Rules(life_loss_ends_episode=False, no_ops_min=1, no_ops_max=30, time_limit=432_000, clip_reward=False),
)

PROTOCOLS = {
    "rem": AtariProtocol(
        frameskip=1,
        repeat_action_probability=0.0,
        full_action_space=False,
        action_repeat=4,
        max_over_last=2,
        resize="pillow bilinear, before the maximum",
        color="rgb",
        train=Rules(life_loss_ends_episode=True, no_ops_min=1, no_ops_max=30, time_limit=20_000, clip_reward=False),
        test=Rules(life_loss_ends_episode=False, no_ops_min=1, no_ops_max=1, time_limit=108_000, clip_reward=False),
    ),
    "drama": AtariProtocol(
        frameskip=1,
        repeat_action_probability=0.0,
        full_action_space=False,
        action_repeat=4,
        max_over_last=2,
        resize="area, after the maximum",
        color="rgb",
        train=Rules(
            life_loss_ends_episode=True,
            no_ops_min=0,
            no_ops_max=0,
            time_limit=108_000,
            clip_reward=False,
            after_life_loss="same frame",
        ),
        test=Rules(life_loss_ends_episode=False, no_ops_min=0, no_ops_max=0, time_limit=108_000, clip_reward=False),
    ),
    "unizero": _UNIZERO,
    "unizero-sticky": replace(_UNIZERO, repeat_action_probability=0.25),
}


class Atari(gymnasium.Env[np.ndarray, int]):
    """One Atari game under one protocol. Frames (size, size, 3) uint8; minimal actions 0 .. n-1.

    `reset(seed=...)` always starts a new game; all that follows depends on the seed and the actions alone. `reset()`
    goes on with the same game after a lost life (training) and starts a new one otherwise.
    info: `lives`, and `wm/continues` when an episode has ended but its game has not.

    `drawing`: set it to False to play known actions again without pictures, about four times as fast; the frames that
    come back are then old. One step of a running game with `drawing` on makes the next frames right again.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, game: str, size: int, protocol: str, *, train: bool) -> None:
        self.drawing = True
        self._protocol = PROTOCOLS[protocol]
        self._rules = self._protocol.train if train else self._protocol.test
        self._size = size
        self._emulator = _open_emulator(game, self._protocol)
        self._ale = self._emulator.ale
        self._actions = self._emulator._action_set
        self._resized_first = self._protocol.resize == "pillow bilinear, before the maximum"
        shape = (size, size) if self._resized_first else self._ale.getScreenDims()
        self._recent = np.zeros((self._protocol.max_over_last, *shape, 3), np.uint8)  # frames under the maximum
        self._frame = np.zeros((size, size, 3), np.uint8)  # the last observation
        self._elapsed = 0  # emulator frames since the reset of the game
        self._game_over = True
        self._lives = 0
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))  # type: ignore[assignment]
        self.spaces = Spaces.of_images(size, len(self._actions))

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return [action.name for action in self._actions]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Open the next episode: a new game, or the next life of this one."""
        super().reset(seed=seed)
        if seed is not None or self._game_over:
            self._start_game(seed)
        elif self._rules.after_life_loss is None:
            # Should this no-op end the game, the next step finds it over at once and says so.
            self._repeat(NOOP)
        self._lives = self._ale.lives()
        return self._frame, {"lives": self._lives}

    def step(self, action: SupportsInt) -> tuple[np.ndarray, float, bool, bool, dict]:
        """One decision: `action` for 4 emulator frames."""
        reward = self._repeat(int(action))
        if self._rules.clip_reward:
            reward = float(np.sign(reward))
        over = self._over()
        truncated = not over and self._elapsed >= self._rules.time_limit
        self._game_over = over or truncated
        lives = self._ale.lives()
        # Some games (Qbert) show 0 lives for a few frames before they are over: that is no end of its own.
        life_lost = self._rules.life_loss_ends_episode and 0 < lives < self._lives
        self._lives = lives
        info = {"lives": lives, CONTINUES: life_lost and not self._game_over}
        return self._frame, reward, over or life_lost, truncated, info

    def _start_game(self, seed: int | None) -> None:
        no_ops = self.np_random.integers(self._rules.no_ops_min, self._rules.no_ops_max + 1)
        self._reset_emulator(seed)
        for _ in range(no_ops):
            self._ale.act(self._actions[NOOP])
            self._elapsed += 1
            if self._over() or self._elapsed >= self._rules.time_limit:
                self._reset_emulator(None)
        self._game_over = False
        self._frame = self._resized(self._ale.getScreenRGB())

    def _reset_emulator(self, seed: int | None) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # ale-py prints where it loads ROMs from
            self._emulator.reset(seed=seed)
        self._elapsed = 0

    def _repeat(self, action: int) -> float:
        """Play `action` until the repeat or the game is over; returns the summed reward."""
        reward = 0.0
        for frame in range(self._protocol.action_repeat):
            reward += self._ale.act(self._actions[action])
            self._elapsed += 1
            if self.drawing:
                self._look(frame)
            if self._over() or self._elapsed >= self._rules.time_limit:
                break
        if self.drawing:
            merged = self._recent.max(axis=0)
            self._frame = merged if self._resized_first else self._resized(merged)
        return reward

    def _over(self) -> bool:
        return self._ale.game_over(with_truncation=False)

    def _look(self, frame: int) -> None:
        """Put frame number `frame` of a repeat into the buffer of the maximum."""
        last = self._protocol.max_over_last
        if self._resized_first:
            slot = frame - (self._protocol.action_repeat - last)
            if slot >= 0:
                self._recent[slot] = self._resized(self._ale.getScreenRGB())
        elif frame == 0:
            self._recent[:] = self._ale.getScreenRGB()  # nothing of the repeat before is left
        else:
            self._recent[frame % last] = self._ale.getScreenRGB()

    def _resized(self, screen: np.ndarray) -> np.ndarray:
        if self._resized_first:
            return np.array(Image.fromarray(screen).resize((self._size, self._size), Image.Resampling.BILINEAR))
        return area_mean(screen, self._size)

    def close(self) -> None:
        """Free the emulator."""
        self._emulator.close()


def area_mean(image: np.ndarray, size: int) -> np.ndarray:
    """(H, W, C) uint8 to (size, size, C): each pixel the mean of the area it covers, halves rounded to even.

    Pillow's box filter weights whole pixels by 0 or 1, which is something else where `size` divides neither H nor W.
    """
    height, width = image.shape[:2]
    # Shares and sums are whole numbers below 2^24 for any screen, so float32 holds them exactly on every machine.
    rows = np.tensordot(_shares(height, size), image.astype(np.float32), (1, 0))  # (size, W, C)
    sums = np.tensordot(rows, _shares(width, size), (1, 1))  # (size, C, size)
    return np.rint(sums.transpose(0, 2, 1) / np.float32(height * width)).astype(np.uint8)


@functools.cache
def _shares(count: int, size: int) -> np.ndarray:
    """How much of each of `count` pixels each of `size` larger ones covers, in units of 1 / size: (size, count)."""
    ours, theirs = np.arange(size)[:, None] * count, np.arange(count) * size
    overlap = np.minimum(ours + count, theirs + size) - np.maximum(ours, theirs)
    return overlap.clip(min=0).astype(np.float32)


def _open_emulator(game: str, protocol: AtariProtocol) -> Any:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    with contextlib.redirect_stdout(sys.stderr):
        return gymnasium.make(
            f"ALE/{game}-v5",
            frameskip=protocol.frameskip,
            repeat_action_probability=protocol.repeat_action_probability,
            full_action_space=protocol.full_action_space,
            max_num_frames_per_episode=None,  # the time limit is the protocol's
            disable_env_checker=True,
        ).unwrapped


# -- names ------------------------------------------------------------------------------------------------------------


@functools.cache
def games() -> dict[str, str]:
    """Every game that can be played alone: its name (`MsPacman`) and its ROM's (`ms_pacman`)."""
    import ale_py.roms  # importing ale_py registers its games with gymnasium

    names = {rom.title().replace("_", ""): rom for rom in sorted(ale_py.roms.get_all_rom_ids())}
    return {name: rom for name, rom in names.items() if f"ALE/{name}-v5" in gymnasium.registry}


def game_of(identifier: str) -> str | None:
    """Return the game of an id: `Pong` for `ALE/Pong-v5`, `PongNoFrameskip-v4`, `Pong-v0` and `Pong`; else None."""
    names = games()
    match = re.fullmatch(r"(?:ale_py:)?(?:ALE/)?(\w+?)(?:NoFrameskip)?(?:-v\d+)?", identifier)
    spec = gymnasium.registry.get(identifier)
    if spec is not None and not str(spec.entry_point).startswith("ale_py"):
        return None  # another package's environment that happens to bear a game's name
    return match[1] if match and match[1] in names else None


def describe(game: str, protocol: str) -> dict[str, Any]:
    """The protocol's table as plain values, with the md5 of the game's ROM. Raises UsageError when that is missing.

    Rules that are None are left out, so that a rule that only one protocol has does not change the tables of others.
    For the same reason `clip_reward` stands beside `train` and `test` where it is one for both.
    """
    import ale_py.roms

    try:
        with contextlib.redirect_stdout(sys.stderr):
            path = ale_py.roms.get_rom_path(games()[game])
        assert path is not None, "games() lists only what ale-py knows"
        rom = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    except OSError as error:
        raise UsageError(f"{game}: its ROM cannot be read: {' '.join(str(error).split())}") from None
    table = asdict(PROTOCOLS[protocol], dict_factory=lambda rules: {k: v for k, v in rules if v is not None})
    train, test = table["train"], table["test"]
    if train["clip_reward"] == test["clip_reward"]:
        del train["clip_reward"]
        table["clip_reward"] = test.pop("clip_reward")
    return {"game": game, "rom_md5": rom, **table}
