"""Every command prints an evaluation in one form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints, is_typeddict

import pytest
from pydantic import TypeAdapter

from wmcli.artifacts import Run
from wmcli.cli import main
from wmcli.cli.schema import Comparison, Evaluation, Published, RunEvaluation
from wmcli.stages.protocols import PROTOCOLS

RETURNS = {"mean": 0.5, "median": 0.5, "stderr": 0.1, "human_normalized": None, "returns": [0.4, 0.6], "episodes": 2}
RETURNS |= {"random_mean": -0.5, "total_steps": 100}
DYNAMICS = {"loss": 0.5, "updates": 3}
REWARD = {"episodes": 3, "backbone": "s4", "posterior": "factorized", "rows": "episodes", "parameters": 7, "updates": 3}
REWARD |= {name: {"value": 0.5, "low": 0.4, "high": 0.6} for name in ("inference", "imagination")}


def publish(run: Run, kind: str, inputs: dict[str, Any], metrics: dict[str, Any], environment: str) -> Any:
    with run.job(kind, {"of": metrics}, inputs).work() as work:
        (work.payload / "x").touch()
        block = {"id": environment, "protocol": "plain"}
        return work.publish(settings={}, metrics=metrics, environment=block, machine={})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with an evaluation of either kind of artifact."""
    run = Run.open(tmp_path / "run", create=True)
    monkeypatch.setenv("WM_RUN", str(run.path))
    experience = publish(run, "experience", {}, {}, "wm/Catch-v0")
    dynamics = publish(run, "dynamics", {"experience": experience}, DYNAMICS, "wm/Catch-v0")
    controller = publish(run, "controller", {"dynamics": dynamics}, {}, "wm/Catch-v0")
    for protocol, environment, inputs, metrics in [
        ("returns", "ALE/Pong-v5", {"controller": controller}, RETURNS),
        ("reward", "wm/DistractingMemory-100-v0", {"dynamics": dynamics, "experience": experience}, REWARD),
    ]:
        publish(run, "evaluation", inputs, metrics | {"protocol": protocol, "environment": environment}, environment)
    return run


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check(value: dict[str, Any], form: Any) -> None:
    """Check the keys and the types of their values."""
    hints = get_type_hints(form)
    assert value.keys() == hints.keys()
    for key, hint in hints.items():
        (item,) = getattr(hint, "__args__", [None])[:1]
        if get_origin(hint) is list and is_typeddict(item):
            for each in value[key]:
                check(each, item)
        else:
            TypeAdapter(hint).validate_python(value[key], strict=True)


@pytest.mark.parametrize(
    ("protocol", "name", "model", "episodes", "references"),
    [("returns", "evaluation@1", "controller@1", 2, True), ("reward", "evaluation@2", "dynamics@1", 3, False)],
)
def test_four_commands_print_an_evaluation_in_one_form(
    protocol: str,
    name: str,
    model: str,
    episodes: int,
    references: bool,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluation = run.resolve(name, "evaluation")
    monkeypatch.setattr("wmcli.stages.opening.open_context", lambda *_, **__: None)
    monkeypatch.setattr("wmcli.stages.loop.run_loop", lambda *_, **__: evaluation)
    ran = answer(capsys, "run", "quickstart")
    check(ran, Evaluation)
    assert (ran["protocol"], ran["model"], ran["episodes"]) == (protocol, model, episodes)
    assert ran["metrics"] == evaluation.metrics
    assert ("REM" in {row["name"] for row in ran["references"]}) == references

    made = replace(PROTOCOLS[protocol], evaluate=lambda *_, **__: evaluation)
    monkeypatch.setitem(PROTOCOLS, protocol, made)
    assert answer(capsys, "eval", "--protocol", protocol) == ran

    compared = answer(capsys, "compare", str(run.path), "--protocol", protocol)
    for each in compared["evaluations"]:
        check(each, RunEvaluation)
    assert compared["evaluations"] == [ran | {"run": str(run.path)}]
    assert compared.keys() >= get_type_hints(Comparison).keys() and compared["protocol"] == protocol

    (listed,) = [row for row in answer(capsys, "artifacts", "evaluation") if row["name"] == name]
    assert {key: listed[key] for key in ran} == ran


def test_other_artifacts_have_the_common_keys(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = answer(capsys, "artifacts", "dynamics")
    check({key: listed[key] for key in get_type_hints(Published)}, Published)
    assert "references" not in listed


def test_the_two_sides_of_a_comparison_are_apart(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Run.open(tmp_path / "other", create=True)
    controller = publish(other, "controller", {}, {"of": "other"}, "ALE/Pong-v5")
    metrics = RETURNS | {"protocol": "returns", "environment": "ALE/Pong-v5", "mean": 0.25}
    publish(other, "evaluation", {"controller": controller}, metrics, "ALE/Pong-v5")
    compared = answer(capsys, "compare", str(run.path), "--against", str(other.path))
    assert [each["run"] for each in compared["evaluations"]] == [str(run.path)]
    assert [each["run"] for each in compared["against"]] == [str(other.path)]
    assert compared["probability_of_improvement"]["value"] == 1.0
    grouped = answer(capsys, "compare", str(run.path), str(other.path), "--by", "seed")
    assert len(grouped["evaluations"]) == 2 and grouped["rows"][0]["runs"] == 2
    check(grouped, Comparison)
