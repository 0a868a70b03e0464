"""Collecting: one time line over many calls, and the same experience however often the process dies.

E environments side by side, H W image.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from odd_lengths import LONG, ODD_LENGTHS, SHORT
from tiny_run import Killed, command, copied, kill_at, latest, opened, sha256
from wrong_steps import EXITS, FAULTY, UNSEEDED

from wmcli.artifacts import Artifact, Run
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.envs import EnvironmentSettings, make
from wmcli.errors import ArtifactError, EnvironmentFault, Stopped
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT, load_experience
from wmcli.experience.segment import CLOSING, kind_of
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.imagine import imagine

EAGER = "training.checkpoint_seconds=0"


def rows_of(artifact: Artifact) -> dict[str, np.ndarray]:
    return read_segment(artifact.path / SEGMENT)


def time_line(*artifacts: Artifact) -> list[dict[str, np.ndarray]]:
    """The rows of each stream, over all segments."""
    segments = [rows_of(artifact) for artifact in artifacts]
    names = [name for name in segments[0] if kind_of(name) != CLOSING]
    joined = {name: np.concatenate([segment[name] for segment in segments]) for name in names}
    return [
        {name: column[joined["stream"] == stream] for name, column in joined.items()}
        for stream in range(joined["stream"].max() + 1)
    ]


def assert_same_experience(ours: Artifact, theirs: Artifact) -> None:
    mine, other = rows_of(ours), rows_of(theirs)
    for name, column in mine.items():
        np.testing.assert_array_equal(column, other[name], err_msg=name)
    assert sha256(ours, "streams.safetensors") == sha256(theirs, "streams.safetensors")
    assert ours.metrics == theirs.metrics


def started(folder: Path, *overrides: str) -> Context:
    """A new run with experience of random play in Catch, stopped amid an episode: 7 steps an episode, 10 each."""
    context = opened(folder, *overrides, new=True)
    collect(context, steps=30)
    return opened(folder)


@pytest.fixture
def acting(tiny: Path, tmp_path: Path) -> Path:
    """A run whose newest experience ends amid an episode, and whose controller plays next."""
    folder = copied(tiny, tmp_path / "acting")
    collect(opened(folder), steps=12)
    return folder


# -- one time line ----------------------------------------------------------------------------------------------------


def test_the_memory_of_rows_to_come_is_allocated_once(tmp_path: Path) -> None:
    context = started(tmp_path / "run", "run.epochs=9", "run.collect_epochs=4", "collect.steps=30")
    collect(context)
    row = 16 * 16 * 3
    replay = load_experience(latest(tmp_path / "run", "experience"), "cpu")
    assert replay.observation.untyped_storage().nbytes() == 60 * row
    context.epoch = 2
    at = context.experience(latest(tmp_path / "run", "experience")).observation.data_ptr()
    for _ in range(2):
        replay = context.experience(collect(context))
        assert replay.observation.data_ptr() == at and replay.observation.untyped_storage().nbytes() == 120 * row
    assert len(context.experience(collect(context))) == 150, "more than was foreseen"


def test_a_long_game_is_given_up_when_the_next_collect_begins(tmp_path: Path) -> None:
    """Of 3 steps here, in the process that played it as in a later one."""
    within = "collect.longest_game=3"
    for limit, is_new in ((within, False), ("collect.longest_game=2", True)):
        for folder, processes in ((tmp_path / f"one {is_new}", 1), (tmp_path / f"two {is_new}", 2)):
            context = opened(folder, limit, new=True)
            collect(context, steps=30)
            collect(context if processes == 1 else opened(folder), steps=30)
        assert_same_experience(latest(tmp_path / f"one {is_new}", "experience"), latest(folder, "experience"))
        rows = rows_of(latest(folder, "experience"))
        assert rows["first"][:3].tolist() == [is_new] * 3


@pytest.mark.parametrize("one_process", [True, False])
def test_episodes_go_on_where_the_collect_before_left_them(tmp_path: Path, one_process: bool) -> None:
    context = started(tmp_path / "run")
    for steps in (12, 3, 45):
        collect(context, steps=steps)
        if not one_process:
            context = opened(tmp_path / "run")
    run = Run.open(tmp_path / "run", create=False)
    artifacts = [run.get("experience", version) for version in run.versions("experience")]
    assert [artifact.metrics["steps"] for artifact in artifacts] == [30, 12, 3, 45]
    assert [artifact.metrics["total_steps"] for artifact in artifacts] == [30, 42, 45, 90]
    env = make(EnvironmentSettings(size=16), train=True)
    for stream in time_line(*artifacts):
        assert np.flatnonzero(stream["first"]).tolist() == [0, 7, 14, 21, 28]  # Catch takes 7 steps
        ended = stream["terminated"] | stream["truncated"]
        np.testing.assert_array_equal(stream["first"][1:], ended[:-1])
        for begin in (0, 7, 14, 21, 28):
            replay(env, {name: column[begin : begin + 7] for name, column in stream.items()})
    streams = time_line(*artifacts)
    assert any((streams[0]["action"] != other["action"]).any() for other in streams[1:])
    first, second = rows_of(artifacts[0])["action"], rows_of(artifacts[1])["action"]
    assert (first[:12] != second).any()  # other draws in every call


def replay(env, episode: dict[str, np.ndarray]) -> None:
    """Play the recorded actions in an environment of our own: frames, rewards and ends must be those recorded."""
    seed = next(
        seed for seed in range(200) if (env.reset(seed=seed)[0] == episode["observation"][0]).all()
    )  # one of few beginnings
    frame, _ = env.reset(seed=seed)
    for t, action in enumerate(episode["action"]):
        np.testing.assert_array_equal(frame, episode["observation"][t])
        frame, reward, terminated, truncated, _ = env.step(action)
        assert (reward, terminated, truncated) == tuple(
            episode[name][t] for name in ("reward", "terminated", "truncated")
        )


def test_environments_kept_in_memory_stand_where_replayed_ones_do(tmp_path: Path) -> None:
    context = started(tmp_path / "kept")
    started(tmp_path / "replayed")
    for steps in (12, 24):
        collect(context, steps=steps)
        collect(opened(tmp_path / "replayed"), steps=steps)
        assert_same_experience(latest(tmp_path / "kept", "experience"), latest(tmp_path / "replayed", "experience"))


def test_a_collect_that_failed_does_not_move_the_environments_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path / "fresh")
    context = started(tmp_path / "run")
    collect(context, steps=3)
    collect(opened(tmp_path / "fresh"), steps=3)
    steps = 0

    def fails(self: UniformAgent, observation: np.ndarray, first: np.ndarray) -> np.ndarray:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise Killed
        return np.zeros(3, np.int64)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(UniformAgent, "act", fails)
        collect(context, steps=12)
    collect(opened(tmp_path / "fresh"), steps=12)
    assert_same_experience(collect(context, steps=12), latest(tmp_path / "fresh", "experience"))


def test_only_whole_rounds_of_all_environments(tmp_path: Path) -> None:
    artifact = collect(opened(tmp_path / "run", new=True), steps=7)
    assert artifact.metrics["steps"] == 9
    assert rows_of(artifact)["stream"].tolist() == [0, 1, 2] * 3


def test_the_summary_counts_whole_episodes(tmp_path: Path) -> None:
    context = started(tmp_path / "run", f"environment.id={ODD_LENGTHS}")
    first, second = latest(tmp_path / "run", "experience"), collect(context, steps=330)
    for artifact, before in [(first, 0), (second, 30)]:
        returns = []
        for stream in time_line(artifact):
            starts = [*np.flatnonzero(stream["first"])]
            ends = np.flatnonzero(stream["terminated"])
            for start in starts:
                end = next((end for end in ends if end >= start), None)
                if end is not None:
                    returns.append(stream["reward"][start : end + 1].sum())
        assert set(returns) <= {SHORT / 2, LONG / 2}
        assert artifact.metrics["episodes"] == len(returns)
        assert artifact.metrics["mean_return"] == pytest.approx(np.mean(returns) if returns else None)
        assert artifact.metrics["total_steps"] == artifact.metrics["steps"] + before
    assert {SHORT / 2, LONG / 2} == set(returns)


def test_who_acts(acting: Path) -> None:
    first, second = (Run.open(acting, create=False).get("experience", version) for version in (1, 2))
    assert set(first.inputs) == set()
    assert {role: reference.name for role, reference in second.inputs.items()} == {
        "previous": "experience@1",
        "controller": "controller@1",
    }
    assert set(collect(opened(acting), controller="random").inputs) == {"previous"}
    with pytest.raises(ArtifactError, match="controller@7"):
        collect(opened(acting), controller="controller@7")


def test_every_call_adds_but_not_when_told_where_it_begins(acting: Path) -> None:
    assert [collect(opened(acting)).version for _ in range(2)] == [3, 4]
    assert collect(opened(acting), controller="random", extend=False, steps=90).version == 1
    assert collect(opened(acting), previous="experience@1", steps=12).version == 2
    assert collect(opened(acting), previous="experience@1", steps=15).version == 5


@pytest.mark.parametrize("steps", [3, 12, 15])  # of all: one frame and those before; amid an episode; at its end
def test_an_agent_is_warmed_up_with_the_frames_before(run: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Burn-in of 2 frames: those right before, of the running episodes only."""
    collect(opened(run), steps=steps)
    warmed = []
    monkeypatch.setattr(Agent, "burn_in", lambda self, *given: warmed.append(given))
    collect(opened(run), steps=3)
    frames, actions, valid = warmed[0]
    store = Run.open(run, create=False)
    streams = time_line(store.get("experience", 1), store.get("experience", 2))
    for stream, rows in enumerate(streams):
        since = len(rows["first"]) - np.flatnonzero(rows["first"])[-1]
        ended = rows["terminated"][-1]
        length = 0 if ended else min(2, since)
        assert valid[stream].tolist() == [False] * (2 - length) + [True] * length
        if length:
            np.testing.assert_array_equal(frames[stream, -length:], rows["observation"][-length:])
            np.testing.assert_array_equal(actions[stream, -length:], rows["action"][-length:])
    assert valid.any() == (steps != 15)


def test_other_settings_of_the_environment_do_not_go_on_with_these_streams(run: Path) -> None:
    with pytest.raises(ArtifactError, match="--set environment.count=3"):
        collect(opened(run, "environment.count=2"))


# -- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failpoint", ["checkpoint", "write-synced"])
@pytest.mark.parametrize("actor", ["random", "controller"])
def test_killed_again_and_again_it_is_the_same_experience(
    acting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: str, actor: str
) -> None:
    """Dies at a later point in every process. Points between two files of a checkpoint are among them."""
    undisturbed = collect(opened(copied(acting, tmp_path / "whole")), controller=actor, steps=21)
    artifact, kills = None, 0
    while artifact is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, failpoint, kills + 1)
                artifact = collect(opened(acting, EAGER), controller=actor, steps=21)
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills > 2
    assert artifact.version == undisturbed.version == 3
    assert_same_experience(artifact, undisturbed)


def test_the_environments_ending_together_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 7 steps of Catch no environment has an action to replay."""
    undisturbed = collect(opened(tmp_path / "whole", new=True), steps=27)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 7)
        collect(opened(tmp_path / "run", EAGER, new=True), steps=27)
    assert_same_experience(collect(opened(tmp_path / "run"), steps=27), undisturbed)


def test_fresh_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 2)
        collect(opened(tmp_path / "run", EAGER, new=True))
    loads = []
    monkeypatch.setattr("wmcli.stages.player.load_tensors", lambda path: loads.append(path))
    collect(opened(tmp_path / "run", fresh=True))
    assert loads == []
    assert_same_experience(latest(tmp_path / "run", "experience"), collect(opened(tmp_path / "whole", new=True)))


@pytest.mark.parametrize("step", [1, 4, 10])
def test_asked_to_stop_it_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    act, steps = UniformAgent.act, 0

    def signals(self: UniformAgent, observation: np.ndarray, first: np.ndarray) -> np.ndarray:
        nonlocal steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return act(self, observation, first)

    monkeypatch.setattr(UniformAgent, "act", signals)
    with pytest.raises(Stopped, match=f"collect stopped after step {3 * step} of 30; the same command resumes it"):
        collect(opened(tmp_path / "run", new=True), steps=30)
    assert Run.open(tmp_path / "run", create=False).versions("experience") == []
    artifact = collect(opened(tmp_path / "run"), steps=30)
    assert steps == 10  # none was played twice
    assert_same_experience(artifact, collect(opened(tmp_path / "whole", new=True), steps=30))


def test_interrupted_and_published_work_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 4)
        collect(opened(tmp_path / "run", EAGER, new=True))
    collect(opened(tmp_path / "run"))
    names = {entry.name for entry in (tmp_path / "run" / "experience").iterdir()} - {".lock", ".holder"}
    assert names == {"v0001", "latest"}


# -- environments that do something wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 33])  # the 12th step of a game fails: then none is played before it
def test_steps_before_a_fault_are_kept_and_new_games_begin(tmp_path: Path, steps_before: int) -> None:
    context = opened(tmp_path / "run", f"environment.id={FAULTY}", new=True)
    before = collect(context, steps=steps_before) if steps_before else None
    for kept in [33, 66] if before is None else [0, 33, 66]:
        with pytest.raises(EnvironmentFault, match="wm-test/Faulty-v0: step 12 after reset, .* reward nan") as error:
            collect(opened(tmp_path / "run"), steps=75)
        assert (f"The {kept} of 75 steps before it are saved" in str(error.value)) == (kept > 0)
    artifact = collect(opened(tmp_path / "run"), steps=75)
    artifacts = [artifact] if before is None else [before, artifact]
    for stream in time_line(*artifacts):
        times = [*range(11)] * (2 + len(artifacts)) + [0, 1, 2]
        assert stream["observation"][:, 0, 1, 0].tolist() == times[: len(stream["first"])]
        assert stream["first"].tolist() == [time == 0 for time in times[: len(stream["first"])]]
        assert len(set(stream["observation"][:, 0, 0, 0])) > 2  # other games
        assert np.isfinite(stream["reward"]).all()
        assert not (stream["terminated"] | stream["truncated"]).any()  # as the environment said
    assert artifact.metrics["episodes"] == 0 and artifact.metrics["steps"] == 75
    memory = opened(tmp_path / "run").experience(artifact)
    assert int(memory.truncated.sum()) == int(memory.first.sum()) - 3  # all that were cut


def test_an_environment_that_does_not_follow_its_seed_begins_new_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(opened(tmp_path / "run", f"environment.id={UNSEEDED}", new=True), steps=18)
    assert capsys.readouterr().err == (
        f"warning: collect: {UNSEEDED} does not follow the seed given to reset(): the same actions led elsewhere."
        " Results cannot be repeated exactly, and each later command begins new episodes.\n"
    )
    collect(opened(tmp_path / "run"), steps=18)
    (warning,) = capsys.readouterr().err.splitlines()
    assert UNSEEDED in warning and "gave other frames" in warning and "New episodes start" in warning
    run = Run.open(tmp_path / "run", create=False)
    first, second = run.get("experience", 1), run.get("experience", 2)
    for stream in time_line(first, second):
        assert stream["observation"][:, 0, 1, 0].tolist() == [0, 1, 2, 3, 0, 1] * 2
        assert stream["terminated"].tolist() == [False, False, False, True, False, False] * 2
    assert [artifact.metrics["mean_return"] for artifact in (first, second)] == [4.0, 4.0]
    memory = opened(tmp_path / "run").experience(second)
    assert np.flatnonzero(memory.truncated.numpy()).tolist() == [15, 16, 17]  # where they were cut


def test_an_environment_that_follows_its_seed_is_not_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for new in (True, False):
        collect(opened(tmp_path / "run", new=new), steps=30)
    assert capsys.readouterr().err == ""


def test_resumed_where_it_does_not_follow_its_seed_it_begins_new_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 6)
        collect(opened(tmp_path / "run", EAGER, f"environment.id={UNSEEDED}", new=True), steps=30)
    for stream in time_line(collect(opened(tmp_path / "run"), steps=30)):
        assert stream["observation"][:, 0, 1, 0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
        assert np.flatnonzero(stream["first"]).tolist() == [0, 4, 6]


@pytest.mark.slow
def test_an_environment_that_exits_and_talks_ends_in_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "run", f"environment.id={FAULTY}", new=True)
    monkeypatch.setenv(EXITS, "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    for steps, code in [("33", 0), ("36", 2)]:
        child = command(tmp_path / "run", "collect", "--controller", "random", "--steps", steps)
        out, talk = child.communicate(timeout=120)
        assert child.returncode == code, talk
        assert out == (f"{latest(tmp_path / 'run', 'experience').path}\n" if code == 0 else "")
        assert {"a step", "a step in C", "a step in a shell", "an exit"} <= set(talk.splitlines())
    (line,) = (line for line in talk.splitlines() if line.startswith("wm collect:"))
    assert "step 12 after reset" in line and "raised SystemExit: 0 (wrong_steps.py:" in line
    assert "Traceback" not in talk and "defect" not in talk


# -- what training reads ----------------------------------------------------------------------------------------------


def test_training_reads_all_segments_as_one_memory(acting: Path) -> None:
    context = opened(acting)
    newest = latest(acting, "experience")
    memory = context.experience(newest)
    assert len(memory) == 102
    run = Run.open(acting, create=False)
    rows = [rows_of(run.get("experience", version)) for version in (1, 2)]
    for name, column in {"observation": memory.observation, "action": memory.action, "reward": memory.reward}.items():
        np.testing.assert_array_equal(column.numpy(), np.concatenate([segment[name] for segment in rows]))
    assert context.experience(newest) is memory
    collect(opened(acting), steps=6)
    assert context.experience(latest(acting, "experience")) is memory and len(memory) == 108  # only what was missing
    assert len(context.experience(run.get("experience", 1))) == 90
    assert imagine(opened(acting)).inputs["experience"].name == "experience@3"
