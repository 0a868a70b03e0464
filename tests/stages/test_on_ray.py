"""`collect.on = ray`: the same experience as here, whatever happens to the machines of the cluster."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_stage_collect import assert_same_experience
from test_stage_loop import LOOP, results
from tiny_run import TRAINING, command, copied, latest, opened
from witness import FILE, WITNESS
from wrong_steps import FAULTY

import wmcli
from wmcli.errors import EnvironmentFault, MachineError, UsageError
from wmcli.stages import on_ray as module
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.loop import run_loop

APART, RAY = "collect.apart=true", "collect.on=ray"
CHANGED = ["collect.epsilon=0.3", "collect.temperature=0.6", "collect.random_actions=held"]


class Nodes:
    """A cluster whose second machine can be taken away."""

    def __init__(self) -> None:
        utils = pytest.importorskip("ray.cluster_utils")
        self.cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self.second = self.cluster.add_node(num_cpus=1)
        self.cluster.wait_for_nodes()

    def lose_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nodes]:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv(FILE, str(tmp_path / "log"))  # the machines inherit it
    nodes = Nodes()
    monkeypatch.setenv("RAY_ADDRESS", nodes.cluster.address)
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)
    return found


def nodes_in(log: Path) -> list[str]:
    return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_a_machine_that_is_lost_changes_nothing(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A controller plays behind a segment that ends amid its episodes, by settings of this command.

    Ray tells of the loss, and not on stdout, which is for results.
    """
    log, runs = tmp_path / "log", [tmp_path / "there", tmp_path / "here"]
    with monkeypatch.context() as patch:
        patch.delenv(FILE)
        collect(opened(runs[0], f"environment.id={WITNESS}", new=True), steps=30)
        for stage in TRAINING.values():
            stage(opened(runs[0]))
    copied(runs[0], runs[1])

    def lose() -> None:
        wait_for(lambda: nodes.second.node_id in nodes_in(log))
        nodes.lose_second()

    losing = threading.Thread(target=lose, daemon=True)
    losing.start()
    ours = collect(opened(runs[0], APART, *CHANGED, RAY), steps=120)
    losing.join(timeout=60)
    played = nodes_in(log)
    assert set(played) == {nodes.cluster.head_node.node_id, nodes.second.node_id}
    assert len(played) > 3, "no environment was played again"
    said = capsys.readouterr()
    assert said.out == "" and "raylet" in said.err
    with monkeypatch.context() as patch:
        patch.delenv(FILE)
        theirs = collect(opened(runs[1], APART, *CHANGED), steps=120)
        assert_same_experience(ours, theirs)
        assert ours.manifest["job"] == theirs.manifest["job"] and "controller" in ours.inputs
        assert train_dynamics(opened(runs[0])).inputs["experience"].digest == ours.digest


@pytest.mark.slow
def test_each_epoch_of_a_run_collects_there(tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmcli.stages.evaluate._write_plots", lambda *_: None)
    changed = ["run.epochs=3", "run.collect_epochs=3", "run.controller_after=1"]
    for name, where in (("there", RAY), ("here", "collect.on=here")):
        run_loop(opened(tmp_path / name, *LOOP, *changed, APART, where, new=True))
    assert results(tmp_path / "there") == results(tmp_path / "here")
    experience = latest(tmp_path / "there", "experience")
    assert experience.version == 3 and "controller" in experience.inputs


@pytest.mark.slow
def test_a_fault_there_is_one_here_and_new_games_follow(tmp_path: Path, nodes: Nodes) -> None:
    made = []
    for name, where in (("there", RAY), ("here", "collect.on=here")):
        settings = [f"environment.id={FAULTY}", APART, "environment.count=1"]
        opened(tmp_path / name, *settings, new=True)
        with pytest.raises(EnvironmentFault, match="The 11 of 20 steps of environment 0 before it are saved") as caught:
            collect(opened(tmp_path / name, where), steps=20)
        assert "\n" not in str(caught.value)
        made.append(collect(opened(tmp_path / name, where), steps=20))
    assert_same_experience(*made)


@pytest.mark.slow
def test_asked_to_stop_it_keeps_what_has_been_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with a cluster of its own, which says nothing on stdout. The rest is played here."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    settings = [APART, f"environment.id={WITNESS}", "environment.count=6"]
    for name in ("run", "whole"):
        opened(tmp_path / name, *settings, new=True)
    with monkeypatch.context() as patch:
        patch.setenv(FILE, str(tmp_path / "log"))
        child = command(tmp_path / "run", "collect", "--on", "ray")
        files = lambda: [*(tmp_path / "run" / "experience").glob(".work-*/stream-*.safetensors")]  # noqa: E731
        wait_for(files)
        child.send_signal(signal.SIGTERM)
        out, talk = child.communicate(timeout=60)
    assert (child.returncode, out) == (75, ""), talk
    assert "of 6 environments; the same command plays the others" in talk and "Traceback" not in talk
    kept = len(files())
    assert 0 < kept < 6
    made, whole = collect(opened(tmp_path / "run")), collect(opened(tmp_path / "whole"))
    assert_same_experience(made, whole)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_without_ray_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[ray\]'"):
        collect(opened(tmp_path / "run", APART, RAY, new=True))
    assert not (tmp_path / "run" / "experience" / "v0001").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_no_cluster_at_the_address_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(MachineError, match=f"^no Ray cluster at {address}: .*; give its address: --address HOST:PORT$"):
        collect(opened(tmp_path / "run", APART, RAY, new=True))


def test_a_machine_with_another_wm_or_another_view_is_refused(tiny: Path, tmp_path: Path) -> None:
    context, controller = opened(tiny), latest(tiny, "controller")

    def task(**changed: Any) -> bytes:
        values = (
            wmcli.__version__,
            tiny,
            context.preset,
            context.settings,
            None,
            (controller.path, controller.digest),
            3,
        )
        return pickle.dumps(module._Task(*values)._replace(**changed))

    assert module._play(task(), 1, {}).played is not None
    for changed, words in (
        ({"version": "0.0.1"}, f"has wm {wmcli.__version__}, but this machine 0.0.1: install the same"),
        ({"actor": (tmp_path / "nowhere", "")}, "does not see .*nowhere as this machine does: put --run on a file"),
        ({"actor": (controller.path, "another")}, "does not see .* as this machine does"),
    ):
        reply = module._play(task(**changed), 1, {})
        assert reply.played is None and type(reply.error) is MachineError
        with pytest.raises(MachineError, match=words):
            raise reply.error
