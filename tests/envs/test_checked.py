"""Whatever an environment does wrong ends in one line that names it, the step, the action and what was wrong."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from wmcli.envs import EnvironmentSettings, make, protocol
from wmcli.envs.atari import Atari
from wmcli.errors import EnvironmentFault, UsageError

NAME = "test/Wrong-v0"
FRAME = np.zeros((8, 8, 3), np.uint8)
GOOD = (FRAME, 0.0, False, False, {})


def raises(error: BaseException):
    def call(*_args, **_kwargs):
        raise error

    return call


def opened(step=lambda: GOOD, reset=lambda: (FRAME, {}), time_limit: int | None = None) -> gymnasium.Env:
    """An environment whose third step is `step()`; the others are as they should be."""

    class Wrong(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 255, FRAME.shape, np.uint8), spaces.Discrete(3)
        steps = 0

        def reset(self, *, seed=None, options=None):
            return reset()

        def step(self, action):
            self.steps += 1
            return step() if self.steps == 3 else GOOD

    gymnasium.registry.pop(NAME, None)
    gymnasium.register(NAME, entry_point=Wrong, max_episode_steps=time_limit)
    return make(EnvironmentSettings(id=NAME, size=8), train=True)


def message(call, *args, **kwargs) -> str:
    with pytest.raises(EnvironmentFault) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text and text.startswith(NAME) and "run the same command again" in text
    return text


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (raises(ValueError("the net\nis torn")), ["raised ValueError: the net is torn", "test_checked.py:"]),
        (raises(SystemExit(0)), ["raised SystemExit: 0"]),
        (raises(GeneratorExit()), ["raised GeneratorExit ("]),
        (raises(type("Lost", (BaseException,), {})()), ["raised Lost"]),
        (lambda: GOOD[:4], ["returned 4 values", "(observation, reward, terminated, truncated, info)"]),
        (lambda: None, ["returned one NoneType"]),
        (lambda: (FRAME, float("nan"), *GOOD[2:]), ["reward nan", "finite"]),
        (lambda: (FRAME, -np.inf, *GOOD[2:]), ["reward -inf"]),
        (lambda: (FRAME, 1e39, *GOOD[2:]), ["reward 1e+39"]),  # infinite as float32
        (lambda: (FRAME, np.float32("nan"), *GOOD[2:]), ["reward", "nan"]),
        (lambda: (FRAME, None, *GOOD[2:]), ["reward None"]),
        (lambda: (FRAME, "1", *GOOD[2:]), ["reward '1'"]),
        (lambda: (FRAME, np.ones(2), *GOOD[2:]), ["reward array([1., 1.])"]),
        (lambda: (FRAME, [[1], [1, 2]], *GOOD[2:]), ["reward [[1], [1, 2]]"]),
        (lambda: (FRAME, 0.0, 1, False, {}), ["terminated = 1", "True or False"]),
        (lambda: (FRAME, 0.0, False, None, {}), ["truncated = None"]),
        (lambda: (FRAME, 0.0, np.zeros(2, bool), False, {}), ["terminated = array([False, False])"]),
        (lambda: (FRAME, 0.0, False, False, None), ["info = None"]),
        (lambda: (FRAME[:4], *GOOD[1:]), ["uint8 (4, 8, 3)", "uint8 (8, 8, 3)"]),
        (lambda: (FRAME / 255, *GOOD[1:]), ["float64 (8, 8, 3)", "uint8 (8, 8, 3)"]),
        (lambda: (FRAME.tolist(), *GOOD[1:]), ["list", "uint8 (8, 8, 3)"]),
        (lambda: (None, *GOOD[1:]), ["NoneType"]),
    ],
)
def test_a_wrong_step_is_told_with_environment_step_and_action(step, words: list[str]) -> None:
    env = opened(step)
    env.reset(seed=0)
    env.step(0)
    env.step(1)
    text = message(env.step, 2)
    assert all(word in text for word in ["step 3 after reset, action 2", *words]), text


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        (raises(TypeError("no seed")), ["raised TypeError: no seed"]),
        (raises(SystemExit(0)), ["raised SystemExit"]),
        (lambda: FRAME, ["one ndarray", "(observation, info)"]),
        (lambda: (FRAME, {}, 0), ["3 values"]),
        (lambda: (FRAME, None), ["info = None"]),
        (lambda: (FRAME[0], {}), ["uint8 (8, 3)"]),
    ],
)
def test_a_wrong_reset_is_told_with_its_seed(reset, words: list[str]) -> None:
    text = message(opened(reset=reset).reset, seed=7)
    assert all(word in text for word in ["reset(seed=7)", *words]), text


def test_steps_are_counted_from_the_last_reset() -> None:
    env = opened(lambda: None)
    for _ in range(2):
        env.reset(seed=0)
        env.step(0)
    env.reset(seed=0)
    assert "step 1 after reset, action 0" in message(env.step, 0)


def test_old_returns_are_explained_where_a_wrapper_of_gymnasium_stumbles_over_them() -> None:
    env = opened(lambda: GOOD[:4], time_limit=9)
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    assert "older gym" in message(env.step, 0)


def test_the_original_exception_stays_attached() -> None:
    error = ZeroDivisionError("nothing")
    env = opened(reset=raises(error))
    with pytest.raises(UsageError) as caught:  # exit code 2
        env.reset(seed=0)
    assert caught.value.__cause__ is error


def test_a_keyboard_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        opened(reset=raises(KeyboardInterrupt())).reset(seed=0)


def test_atari_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(EnvironmentSettings(id="Pong", protocol="rem", size=16), train=True)
    env.reset(seed=0)
    monkeypatch.setattr(Atari, "_repeat", raises(RuntimeError("no picture")))
    with pytest.raises(
        EnvironmentFault, match=r"^Pong: step 1 after reset, action 4: step\(\) raised RuntimeError: no"
    ):
        env.step(4)


class Talks(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 255, (8, 8), np.uint8), spaces.Discrete(3)

    def __init__(self) -> None:
        print("opened")

    def get_action_meanings(self) -> list[str]:
        print("asked")
        return ["A", "B", "C"]

    def reset(self, *, seed=None, options=None):
        print("reset")
        return np.zeros((8, 8), np.uint8), {}

    def step(self, action):
        print("step")
        return np.zeros((8, 8), np.uint8), 0.0, False, False, {}

    def close(self) -> None:
        print("closed")
        raise RuntimeError("does not close")


def test_output_of_an_environment_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    gymnasium.registry.pop("test/Talks-v0", None)
    gymnasium.register("test/Talks-v0", entry_point=Talks)
    settings = EnvironmentSettings(id="test/Talks-v0", size=8)
    stdout = sys.stdout
    env = make(settings, train=True)
    env.reset(seed=0)
    env.step(0)
    env.close()  # everything has been played: what goes wrong here harms nothing
    assert protocol(settings)["action_meanings"] == ["A", "B", "C"]
    assert sys.stdout is stdout
    captured = capsys.readouterr()
    assert captured.out == "" and " ".join(captured.err.split()) == "opened reset step closed opened asked closed"


def test_stdout_is_back_after_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentFault):
        opened(reset=raises(SystemExit(0))).reset(seed=0)
    print("result")
    assert capsys.readouterr().out == "result\n"


@pytest.mark.parametrize("wrong", ["no_such_name", "raise SystemExit(0)", "1 +", "raise RuntimeError('sea\\nsick')"])
def test_a_module_that_cannot_be_imported_is_told(wrong: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_module.py").write_text(wrong)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="importing 'wrong_module' raised [A-Z]") as error:
        make(EnvironmentSettings(id="wrong_module:Id-v0"), train=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_an_environment_without_spaces_is_told(missing: str) -> None:
    gymnasium.registry.pop(NAME, None)
    space = {"observation_space": spaces.Box(0, 255, (8, 8), np.uint8), "action_space": spaces.Discrete(2)}
    del space[missing]
    gymnasium.register(NAME, entry_point=type("Wrong", (gymnasium.Env,), space))
    assert missing in message(make, EnvironmentSettings(id=NAME, size=8), train=True)


MODULE = """
import gymnasium
from wmcli.envs.catch import Catch
import mygame_parts
gymnasium.register("My-v0", entry_point=Catch)
"""


def test_a_module_is_found_in_the_current_folder_and_told_where_it_is_not(tmp_path, monkeypatch) -> None:
    (tmp_path / "mygame.py").write_text(MODULE)
    (tmp_path / "mygame_parts.py").write_text("")
    code = (
        "import sys; sys.path[:] = [path for path in sys.path if path]\n"  # as of an installed script
        "from wmcli.envs import EnvironmentSettings, make\n"
        "make(EnvironmentSettings(id='mygame:My-v0', size=16), train=True).reset(seed=0)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    (tmp_path / "elsewhere").mkdir()
    lost = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    told = lost.stderr.splitlines()[-1]
    assert f"nor in the current folder {tmp_path / 'elsewhere'}" in told and "PYTHONPATH=FOLDER" in told
    (tmp_path / "mygame_parts.py").unlink()
    broken = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "cannot import 'mygame': No module named 'mygame_parts'" in broken.stderr
