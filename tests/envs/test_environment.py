from __future__ import annotations

import json
import subprocess
import sys
import warnings
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from wmcli.envs import EnvironmentSettings, list_environments, make, protocol
from wmcli.errors import UsageError
from wmcli.spaces import Discrete

GREY = spaces.Box(0, 255, (6, 10), np.uint8)


class Fake(gymnasium.Env):
    """An environment with any spaces; it draws every frame into the same buffer, and rewards with numpy arrays."""

    def __init__(self, observation: spaces.Space, action: spaces.Space, frame=None) -> None:
        self.observation_space, self.action_space = observation, action
        self.buffer = np.zeros(observation.shape, np.uint8) if frame is None else frame
        self.taken: list[int] = []

    def reset(self, *, seed=None, options=None):
        return self.buffer, {}

    def step(self, action):
        self.taken.append(action)
        if self.buffer.dtype == np.uint8:
            self.buffer += 1
        return self.buffer, np.array([2], np.int64), np.bool_(False), False, {"lives": 3}


def opened(observation: spaces.Space, action: spaces.Space | None = None, size: int = 8, frame=None) -> gymnasium.Env:
    action = spaces.Discrete(3) if action is None else action
    gymnasium.registry.pop("test/Fake-v0", None)
    gymnasium.register("test/Fake-v0", entry_point=lambda: Fake(observation, action, frame))
    return make(EnvironmentSettings(id="test/Fake-v0", size=size), train=True)


@pytest.mark.parametrize("shape", [(16, 24), (16, 24, 1), (16, 24, 3), (4, 3), (5, 30, 3), (8, 8, 3)])
def test_any_image_becomes_a_square_color_frame(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    picture = np.random.default_rng(0).integers(0, 200, shape).astype(np.uint8)
    env = opened(space, frame=picture.copy())
    frame, _ = env.reset(seed=0)
    assert frame.shape == (8, 8, 3) and frame.dtype == np.uint8
    if len(shape) == 2 or shape[2] == 1:
        assert (frame[..., 0] == frame[..., 2]).all()
    if shape[:2] == (16, 24):  # box: the mean of blocks of 2 x 3 pixels
        blocks = picture.reshape(8, 2, 8, 3, -1).mean(axis=(1, 3))
        assert np.abs(frame - blocks).max() <= 1.0  # Pillow rounds after each axis
    if shape == (4, 3):  # nearest: no new colors
        assert set(np.unique(frame)) <= set(np.unique(picture))
    if shape == (8, 8, 3):
        assert (frame == picture).all()


def test_frames_are_copies_and_rewards_and_actions_are_mapped() -> None:
    env = opened(spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(4, start=-2))
    frames = [env.reset(seed=0)[0]]
    for action in (0, 3):
        frame, reward, terminated, truncated, info = env.step(np.int64(action))
        frames.append(frame)
        assert type(reward) is float and reward == 2.0
        assert type(terminated) is bool and info["lives"] == 3
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2]
    assert env.unwrapped.taken == [-2, 1]
    assert env.spaces.action == Discrete(4)


def test_rewards_of_other_number_types_are_taken(monkeypatch) -> None:
    env = opened(GREY)
    env.reset(seed=0)
    for reward, want in [(1, 1.0), (np.float32(0.5), 0.5), (Fraction(1, 4), 0.25), (True, 1.0)]:
        monkeypatch.setattr(
            Fake, "step", lambda self, action, reward=reward: (self.buffer, reward, False, False, {}), raising=True
        )
        assert env.step(0)[1] == want


def message(call) -> str:
    with pytest.raises(UsageError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        (spaces.Box(0, 1, (8, 8, 3), np.float32), None, ["float32 (8, 8, 3)", "uint8"]),
        (spaces.Box(0, 255, (80, 90, 90), np.uint8), None, ["(80, 90, 90)", "1 to 64 channels"]),
        (spaces.Dict(image=GREY, mission=spaces.Text(9)), None, ["mission", "a Text"]),
        (GREY, spaces.Box(-np.inf, np.inf, (2,), np.float32), ["Box of float32 (2,)", "without bounds", "wrapper"]),
        (GREY, spaces.Dict(a=spaces.Discrete(2)), ["Dict of a", "bounded Boxes"]),
    ],
)
def test_mismatches_end_in_one_line(observation, action, words: list[str]) -> None:
    text = message(lambda: opened(observation, action, frame=np.zeros(0)))
    assert all(word in text for word in ["test/Fake-v0", *words]), text


def test_an_environment_that_breaks_its_promise_is_told() -> None:
    env = opened(GREY, frame=np.zeros((6, 10), np.float64))
    assert "float64 (6, 10)" in message(lambda: env.reset(seed=0))


def setting(id: str, **more) -> EnvironmentSettings:
    return EnvironmentSettings(id=id, **more)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (setting("wm/Cath-v0"), ["'wm/Cath-v0'", "did you mean 'wm/Catch-v0'?"]),
        (setting("CartPole"), ["did you mean 'CartPole-v1'?"]),
        (setting("zzzzzzzzqq"), ["wm envs"]),
        (setting("no_such_module:Thing-v0"), ["cannot import 'no_such_module'"]),
        (setting(":Thing-v0"), ["module:Name"]),
        (setting("ALE/Pong-v5"), ["protocol=rem"]),
        (setting("ale_py:ALE/Pong-ram-v5"), ["no environment called"]),
        (setting("Pong"), ["protocol=rem"]),
        (setting("CartPole-v1", protocol="rem"), ["no Atari game", "protocol=plain"]),
        (setting("Breakot", protocol="rem"), ["did you mean Breakout?"]),
    ],
)
def test_ids_that_cannot_be_played(settings: EnvironmentSettings, words: list[str]) -> None:
    text = message(lambda: make(settings, train=True))
    assert all(word in text for word in words), text


MODULE = """
import gymnasium
gymnasium.register("reef/Fish-v0", entry_point="reef_envs:Fish")
gymnasium.register("reef/Fish-v2", entry_point="reef_envs:Fish", max_episode_steps=3)
def Fish():
    from gymnasium import spaces
    import numpy as np
    class Env(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 255, (8, 9, 3), np.uint8), spaces.Discrete(2)
        def reset(self, *, seed=None, options=None): return np.zeros((8, 9, 3), np.uint8), {}
        def step(self, action): return np.zeros((8, 9, 3), np.uint8), 0, False, False, {}
    return Env()
gymnasium.register("reef/Wreck-v0", entry_point="reef_envs:Wreck")
def Wreck(): raise RuntimeError("the hull\\nis broken")
"""


def test_a_module_is_imported_for_its_id(tmp_path, monkeypatch) -> None:
    (tmp_path / "reef_envs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "imported first" in message(lambda: make(setting("reef/Fish-v2"), train=True))
    env = make(setting("reef_envs:reef/Fish-v2"), train=True)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(setting("reef_envs:reef/Fish-v0"), train=True)  # an older version: no noise about it
    assert "RuntimeError: the hull is broken" in message(lambda: make(setting("reef_envs:reef/Wreck-v0"), train=True))
    block = protocol(setting("reef_envs:reef/Fish-v2", size=16))
    assert block["train"] == {"time_limit": 3} and block["frame"] == [8, 9, 3] and block["resize"] == "nearest"
    assert "action_meanings" not in block


def test_protocol_is_complete_and_plain_json() -> None:
    block = protocol(setting("BreakoutNoFrameskip-v4", protocol="rem", size=48))
    assert json.loads(json.dumps(block)) == block
    assert block["game"] == "Breakout" and block["actions"] == 4 and block["action_meanings"][0] == "NOOP"
    assert block["rom_md5"] == "f34f08e5eb96e500e851a80be3277a56"
    assert block["train"] == {"life_loss_ends_episode": True, "no_ops_min": 1, "no_ops_max": 30, "time_limit": 20_000}
    assert block["test"] == {"life_loss_ends_episode": False, "no_ops_min": 1, "no_ops_max": 1, "time_limit": 108_000}
    assert (block["frameskip"], block["action_repeat"], block["repeat_action_probability"]) == (1, 4, 0.0)
    assert set(block["versions"]) == {"gymnasium", "ale-py", "pillow"}
    catch = protocol(EnvironmentSettings(size=32))
    assert json.loads(json.dumps(catch)) == catch
    assert catch["action_meanings"] == ["LEFT", "STAY", "RIGHT"] and catch["resize"] == "box"


def test_environments_listed_can_be_made() -> None:
    rows = list_environments()
    assert rows[0]["id"] == "wm/Catch-v0" and len(rows) > 100
    for row in (rows[0], next(row for row in rows if row["id"] == "ALE/Freeway-v5")):
        make(setting(row["id"], protocol=row["protocols"][0]), train=True)


def test_importing_environments_needs_no_torch_and_says_nothing() -> None:
    code = (
        "import sys, wmcli.envs as e\n"
        "e.protocol(e.EnvironmentSettings(id='Pong', protocol='rem'))\n"
        "assert 'torch' not in sys.modules and 'zarr' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
