"""Whatever an environment does in the middle of a game: one line, what was played before is kept, and wm goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from misbehaving import AT, DOES, MISBEHAVING, ONCE
from test_stage_collect import assert_same_experience, time_line
from tiny_run import TRAINING, copied, latest, opened

from wmcli.artifacts import Run
from wmcli.envs import Streams
from wmcli.errors import EnvironmentFault, Stopped
from wmcli.stages.collect import collect
from wmcli.stages.evaluate import evaluate
from wmcli.stages.play import play

GAME = f"environment.id={MISBEHAVING}"
APART = "collect.apart=true"
TWO, LIMIT = "environment.processes=2", "environment.step_seconds=0.5"
KEPT = 3 * (AT - 1)


def collected_in_spite(folder: Path, words: str, *overrides: str) -> None:
    """Collect until it is done: each command tells of a fault and keeps what it played."""
    opened(folder, GAME, new=True)
    for kept in (KEPT, 2 * KEPT):
        with pytest.raises(EnvironmentFault, match=f"^{MISBEHAVING}: .*({words}).* The {kept} of 69 steps") as caught:
            collect(opened(folder, *overrides), steps=69)
        assert "\n" not in str(caught.value)
    for stream in time_line(collect(opened(folder, *overrides), steps=69)):
        times = [*range(AT - 1), *range(AT - 1), 0][: len(stream["first"])]
        assert stream["observation"][:, 0, 1, 0].tolist() == times
        assert len(set(stream["observation"][:, 0, 0, 0])) > 1  # other games


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("exit", r"raised SystemExit: 0 \(misbehaving.py"),
        ("eat", "raised .*MemoryError"),
        ("other_actions", r"changed the action space from Discrete\(4\) to Discrete\(3\)"),
        ("other_frames", r"uint8 \(8, 8, 3\); its observation space is uint8 \(16, 16, 3\)"),
    ],
)
def test_what_a_step_does_in_place_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, words: str
) -> None:
    monkeypatch.setenv(DOES, does)
    collected_in_spite(tmp_path / "run", rf"step {AT} after reset, action \d: step\(\) in environment 0 .*{words}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "words", "overrides"),
    [
        ("kill", "did not end: its process was ended by SIGKILL", [TWO]),
        ("close_files", "did not end: its process|the process of environment 0 to 1 ended", [TWO]),
        ("exit", "raised SystemExit: 0", [TWO]),
        ("hang", r"took longer than environment.step_seconds = 0\.5", [TWO, LIMIT]),
        ("hang", r"took longer than environment.step_seconds = 0\.5", [LIMIT]),
    ],
)
def test_what_ends_or_blocks_a_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, words: str, overrides: list[str]
) -> None:
    monkeypatch.setenv(DOES, does)
    began = time.monotonic()
    collected_in_spite(tmp_path / "run", words, *overrides)
    assert time.monotonic() - began < 90


@pytest.mark.slow
def test_environments_apart_are_limited_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOES, "hang")
    monkeypatch.setenv(ONCE, str(tmp_path / "once"))
    monkeypatch.setattr("wmcli.stages.collect.check_seed", lambda context: None)  # it would meet the fault first
    whole = collect(opened(tmp_path / "whole", GAME, APART, new=True), steps=45)
    (tmp_path / "once").touch()
    opened(tmp_path / "run", GAME, APART, new=True)
    with pytest.raises(EnvironmentFault, match="environment 0 took longer.*The 11 of 15 steps of environment 0 before"):
        collect(opened(tmp_path / "run", LIMIT), steps=45)
    made = time_line(collect(opened(tmp_path / "run", LIMIT), steps=45))
    assert made[0]["observation"][:, 0, 1, 0].tolist() == [*range(11), *range(4)]
    others = time_line(whole)
    assert all((made[stream]["observation"] == others[stream]["observation"]).all() for stream in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("does", ["kill", "hang"])
def test_a_game_that_dies_while_it_is_played_again_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], does: str
) -> None:
    monkeypatch.setenv(DOES, does)
    monkeypatch.setenv(ONCE, str(tmp_path / "once"))
    opened(tmp_path / "run", GAME, new=True)
    first = collect(opened(tmp_path / "run"), steps=3 * (AT + 1))
    (tmp_path / "once").touch()
    second = collect(opened(tmp_path / "run", "environment.processes=1", LIMIT), steps=9)
    assert not (tmp_path / "once").exists()
    assert "New episodes start" in capsys.readouterr().err
    for stream in time_line(first, second):
        assert stream["observation"][:, 0, 1, 0].tolist() == [*range(AT + 1), 0, 1, 2]


def test_a_forked_process_that_comes_back_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DOES, "fork")
    process = os.getpid()
    collect(opened(tmp_path / "run", GAME, "environment.count=1", new=True), steps=14)
    assert os.getpid() == process, "the child has come to the end of the test"
    while True:
        try:
            assert os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) == 1
        except ChildProcessError:
            break
    assert f"{MISBEHAVING}: step {AT} after reset, action" in (told := capfd.readouterr().err)
    assert "came back in a process that it forked, which was ended" in told
    assert Run.open(tmp_path / "run", create=False).versions("experience") == [1]


def test_what_it_changes_in_the_process_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = []
    for does in ("nothing", "meddle"):
        monkeypatch.setenv(DOES, does)
        made.append(collect(opened(Path(does), GAME, new=True), steps=60))
        assert (Path.cwd(), torch.get_num_threads()) == (tmp_path, 1)
    assert_same_experience(*made)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_request_to_stop_arrives_behind_handlers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOES, "meddle")
    step = Streams.step

    def stepped(streams: Streams, action: object) -> object:
        after = step(streams, action)
        if streams.age(True)[0] == AT and len(streams.first) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return after

    monkeypatch.setattr(Streams, "step", stepped)
    with pytest.raises(Stopped, match=f"stopped after step {3 * AT} of 60"):
        collect(opened(tmp_path / "run", GAME, new=True), steps=60)


@pytest.fixture
def player(tmp_path: Path) -> Path:
    """A run with a controller for the game."""
    folder = tmp_path / "player"
    collect(opened(folder, GAME, new=True), steps=90)
    for stage in TRAINING.values():
        stage(opened(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("does", "overrides"), [("exit", []), ("hang", [LIMIT])])
def test_an_evaluation_goes_on_with_new_games(
    tmp_path: Path, player: Path, monkeypatch: pytest.MonkeyPatch, does: str, overrides: list[str]
) -> None:
    folder = copied(player, tmp_path / "run")
    monkeypatch.setenv(DOES, does)
    monkeypatch.setenv(ONCE, str(tmp_path / "once"))
    (tmp_path / "once").touch()
    words = f"step {AT} .*environment 0 .* The 0 of 5 episodes before it are saved; those that it was amid begin again"
    with pytest.raises(EnvironmentFault, match=words):
        evaluate(opened(folder, *overrides))
    assert len([*folder.glob("evaluation/.work-*/eval.safetensors")]) == 1  # or the same games would come again
    assert evaluate(opened(folder, *overrides)).metrics["lengths"] == [15] * 5
    assert latest(folder, "evaluation").metrics["returns"] == [15.0] * 5


@pytest.mark.slow
def test_a_film_is_limited_as_well(tmp_path: Path, player: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOES, "hang")
    with pytest.raises(EnvironmentFault, match=f"step {AT} of a game in environment 0 took longer"):
        play(opened(player, LIMIT), source="real", out=tmp_path / "film.gif", controller=None, seed=0)
    assert not (tmp_path / "film.gif").exists()
