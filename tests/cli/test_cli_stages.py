"""What each stage command hands to its stage, and what it prints: the stages are replaced by recorders."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from wmcli.cli import main
from wmcli.cli.evaluate import ProtocolName
from wmcli.cli.schema import Reference
from wmcli.errors import UsageError
from wmcli.settings import resolve
from wmcli.stages.protocols import PROTOCOLS

pytestmark = pytest.mark.matrix

SCORE = {
    "protocol": "returns",
    "mean": 0.5,
    "median": 1.0,
    "stderr": 0.25,
    "episodes": 4,
    "environment": "wm/Catch-v0",
    "returns": [1.0, 1.0, -1.0, 1.0],
    "random_mean": -0.5,
    "human_normalized": None,
    "ceilings": [],
    "rows": [
        {
            "part": "stages", "what": "encode", "shape": "64 frames",
            "seconds": 0.125, "seconds_low": 0.1, "seconds_high": 1.5, "rate": 512.0, "unit": "frames/s",
            "operations_per_second": 3e9, "of_matmul": 0.25,
            "bytes_per_second": None, "of_copy": None, "peak_bytes": 12_300_000,
        },
        {"part": "stages", "what": "fast over slow", "shape": "1", "ratio": 2.04, "ratio_low": 1.5, "ratio_high": 3.0},
        {"part": "backbones", "what": "training", "backbone": "gru", "length": 4096, "skipped": "slower than 5 s"},
        {
            "part": "models", "what": "training", "preset": "rssm-tbtt-2d", "length": 500, "rate": 40.0,
            "times_as_long": 2.5, "times_as_long_25": 2.25, "times_as_long_75": 3.0, "peak_bytes": 7_000_000,
        },
        {
            "part": "presets", "what": "epoch", "preset": "iris", "stage": "imagine", "seconds": 309.0,
            "seconds_25": 300.0, "seconds_75": 310.0,
            "times_as_long": 15.5, "times_as_long_25": 15.0, "times_as_long_75": 16.0,
        },
    ],
    "operators": [
        {
            "what": "encode", "operator": "aten::convolution", "share": 0.625, "calls": 4,
            "operations": 1.5e9, "operations_per_second": 7.5e9, "of_matmul": 0.0625,
        },
        {
            "what": "encode", "operator": "aten::silu", "share": 0.25, "calls": 3,
            "operations": None, "operations_per_second": None, "of_matmul": None,
        },
    ],
}  # fmt: skip
ROW = dict.fromkeys(
    ["name", "environment", "statistic", "score", "low", "high", "stderr", "unit", "human_normalized"]
    + ["runs", "episodes", "steps", "evaluation", "caveat"]
)
PONG = ROW | {"environment": "ALE/Pong-v5", "statistic": "mean", "unit": "return"}
AGGREGATE = {
    "scores": {"Pong": [0.5, 1.0]},
    "runs": 3,
    "iqm": {"value": 0.75, "low": 0.5, "high": float("nan")},
    "rows": [
        PONG | {"name": "runs/a", "score": 12.25, "stderr": 1.5, "human_normalized": 0.93, "runs": 1,
                "episodes": 100, "steps": 400_000, "evaluation": "evaluation@3"},
        PONG | {"name": "all", "statistic": "iqm", "score": 0.75, "low": 0.5, "high": 1.0, "runs": 3,
                "unit": "human-normalized score", "human_normalized": 0.75},
        PONG | {"name": "REM", "score": 17.964, "human_normalized": 1.095, "runs": 5, "caveat": "Other rules."},
    ],
}  # fmt: skip
# module, function, command line, what the context is opened with beyond the defaults, what the stage is given
CASES = [
    ("collect", "collect", ["collect"], {"create": True}, {"controller": None, "steps": None}),
    ("collect", "collect", ["collect", "--steps", "7", "--controller", "controller@2", "--fresh"],
     {"create": True, "fresh": True}, {"controller": "controller@2", "steps": 7}),
    ("collect", "collect", ["collect", "--env", "ALE/Pong-v5"],
     {"create": True, "overrides": ["environment.id=ALE/Pong-v5"]}, {"controller": None, "steps": None}),
    ("collect", "collect", ["collect", "--policy", "scripted", "--episodes", "50"],
     {"create": True, "overrides": ["collect.policy=scripted", "collect.episodes=50"]},
     {"controller": None, "steps": None}),
    ("collect", "collect", ["collect", "--policy", "recorded"],
     {"create": True, "overrides": ["collect.policy=recorded"]},
     {"controller": None, "steps": None}),
    ("tokenizer", "train_tokenizer", ["train-tokenizer", "--updates", "9", "--more"],
     {"overrides": ["tokenizer.updates=9"], "more": True}, {"experience": None}),
    ("tokenizer", "train_tokenizer", ["train-tokenizer", "--experience", "."],
     {"create": True}, {"experience": "."}),
    ("dynamics", "train_dynamics", ["train-dynamics", "--backbone", "transformer", "--updates", "5", "--force"],
     {"overrides": ["backbone.kind=transformer", "dynamics.updates=5"], "force": True},
     {"tokenizer": None, "experience": None, "controller": None}),
    ("dynamics", "train_dynamics", ["train-dynamics", "--controller", "none"], {},
     {"tokenizer": None, "experience": None, "controller": "none"}),
    ("dynamics", "train_dynamics", ["train-dynamics", "--tokenizer", ".", "--experience", "experience@1"],
     {"create": False}, {"tokenizer": ".", "experience": "experience@1", "controller": None}),
    ("imagine", "imagine", ["imagine", "--updates", "3", "--dynamics", "dynamics@4"],
     {"overrides": ["controller.updates=3"]}, {"dynamics": "dynamics@4", "experience": None}),
    ("evaluate", "evaluate", ["eval", "--episodes", "11", "--fresh"],
     {"fresh": True}, {"controller": None, "episodes": 11}),
    ("grid_world", "evaluate_grid_world",
     ["eval", "--protocol", "gridworld", "--dynamics", "dynamics@2", "--episodes", "5", "--force"],
     {"overrides": ["evaluation.episodes=5"], "force": True}, {"dynamics": "dynamics@2"}),
    ("memory_tasks", "evaluate_memory", ["eval", "--protocol", "generation"], {},
     {"measure": "generation", "dynamics": None, "experience": None}),
    ("memory_tasks", "evaluate_memory",
     ["eval", "--protocol", "recall", "--dynamics", ".", "--experience", "experience@2", "--episodes", "5"],
     {"overrides": ["evaluation.episodes=5"], "create": True},
     {"measure": "recall", "dynamics": ".", "experience": "experience@2"}),
    ("profile", "profile", ["profile", "--force"], {"create": True, "force": True}, {}),
    ("profile", "profile", ["profile", "--part", "stages", "--trace"], {"create": True},
     {"parts": ["stages"], "trace": True}),
    ("profile", "profile", ["profile", "--part", "experience", "--frames", "500"], {"create": True},
     {"parts": ["experience"], "frames": 500}),
    ("profile_comparison", "compare", ["profile", "--compare", "backbones"], {"create": True},
     {"what": "backbones", "presets": (), "lengths": None}),
    ("profile_comparison", "compare",
     ["profile", "--compare", "models", "--preset", "s4wm-2d", "--preset", "rssm-tbtt-2d", "--lengths", "64,256"],
     {"create": True, "preset": "s4wm-2d"},
     {"what": "models", "presets": ["s4wm-2d", "rssm-tbtt-2d"], "lengths": [64, 256]}),
    ("profile_comparison", "compare", ["profile", "--compare", "presets", "--preset", "rem", "--preset", "iris"],
     {"create": True, "preset": "rem"}, {"what": "presets", "presets": ["rem", "iris"], "lengths": None}),
    ("loop", "run_loop", ["run", "quickstart"], {"create": True, "preset": "quickstart"}, {"importing": None}),
    ("loop", "run_loop", ["run"], {"create": True}, {"importing": None}),
    ("play", "play", ["play", "--out", "a.gif", "--imagination", "--context", "3"], {},
     {"source": "imagination", "out": Path("a.gif"), "controller": None, "seed": 17,
      "actions": None, "context_frames": 3}),
    ("play", "play", ["play", "-o", "b.gif", "--actions", "0,UP"], {},
     {"source": "real", "out": Path("b.gif"), "controller": None, "seed": 17,
      "actions": "0,UP", "context_frames": None}),
]  # fmt: skip
STAGES = [case for case in CASES if case[0] != "play"]


@dataclass
class Recorder:
    """Stands for every stage: keeps what it was called with and returns a made-up artifact."""

    opened: list[dict[str, Any]] = field(default_factory=list)
    called: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    aggregated: list[Any] = field(default_factory=list)

    def open_context(self, run: Path, preset: str | None, overrides: list[str], **keywords: bool) -> Any:
        self.opened.append({"run": run, "preset": preset, "overrides": overrides} | keywords)
        return SimpleNamespace(settings=SimpleNamespace(seed=17))

    def stage(self, name: str) -> Any:
        def run(context: Any, **keywords: Any) -> Any:
            print("talk", file=sys.stderr)
            self.called.append((name, keywords))
            if name == "play":
                return SimpleNamespace(path=keywords["out"], frames=7, total=0.5, ended="time limit")
            return ARTIFACT

        return run

    def protocol(self, name: str) -> Any:
        """In place of the `evaluate` of a protocol."""
        if PROTOCOLS[name].reads_experience:
            return partial(self.stage("memory_tasks"), measure=name)
        return self.stage({"returns": "evaluate", "gridworld": "grid_world"}[name])

    def aggregate(self, scores: list[Any], against: list[Any], progress: Any) -> dict[str, Any]:
        self.aggregated.append(([score.run for score in scores], [score.run for score in against]))
        return dict(AGGREGATE)

    def modules_of_compare(self) -> dict[str, Any]:
        """In place of the modules behind `wm compare`."""
        grouped = [{"backbone.kind": "gru", "runs": 2, "mean": 0.5, "low": 0.25, "high": None, "unit": "return"}]
        scores = SimpleNamespace(
            read_scores=lambda runs, *_: [SimpleNamespace(run=run, evaluation=ARTIFACT) for run in runs],
            label_groups=lambda scores, keys: {f"by {' and '.join(keys)}": scores},
            differences=lambda *_: [],
            NORMALIZED="human-normalized score",
        )
        aggregate = SimpleNamespace(ALL="all", aggregate=self.aggregate, compare_settings=lambda *_: grouped)
        pictures = SimpleNamespace(
            compare_priors=None,
            draw_intervals=None,
            draw_improvement=None,
            draw_curves=lambda groups, out, _, **options: self.aggregated.append((of_runs(groups), out, options)),
            draw_profiles=lambda groups, out, _: self.aggregated.append((of_runs(groups), out)),
        )
        pools = SimpleNamespace(pool_variants=lambda groups, columns: groups)
        return {"scores": scores, "aggregate": aggregate, "score_pictures": pictures, "pools": pools}


def of_runs(groups: Any) -> dict[str, list[Path]]:
    return {name: [each.run for each in members] for name, members in groups.items()}


ARTIFACT = SimpleNamespace(
    kind="evaluation",
    version=3,
    name="evaluation@3",
    path=Path("runs/x/evaluation/v0003"),
    digest="ab12",
    metrics=SCORE,
    inputs={"controller": SimpleNamespace(kind="controller", version=2)},
    manifest={"environment": {"id": "wm/Catch-v0"}},
)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    context = SimpleNamespace(open_context=recorder.open_context)
    monkeypatch.setitem(sys.modules, "wmcli.stages.opening", context)
    for module, function, *_ in CASES:
        monkeypatch.setitem(
            sys.modules, f"wmcli.stages.{module}", SimpleNamespace(**{function: recorder.stage(module)})
        )
    protocols = {name: replace(protocol, evaluate=recorder.protocol(name)) for name, protocol in PROTOCOLS.items()}
    monkeypatch.setitem(sys.modules, "wmcli.stages.protocols", SimpleNamespace(PROTOCOLS=protocols))
    for name, module in recorder.modules_of_compare().items():
        monkeypatch.setitem(sys.modules, f"wmcli.stages.{name}", module)
    monkeypatch.delenv("WM_RUN", raising=False)
    return recorder


@pytest.mark.parametrize(("module", "function", "line", "opened", "given"), CASES)
def test_the_stage_gets_the_settings_of_the_command_line(module, function, line, opened, given, recorder):
    assert main.run(line) == 0
    want = {"run": Path("runs/default"), "preset": None, "overrides": [], "create": False, "quiet": False} | opened
    got = recorder.opened[0]
    assert {key: got[key] for key in want} == want
    assert not any(got[key] for key in ("fresh", "force", "more") if key in got and key not in opened)
    assert recorder.called == [(module, given)]


@pytest.mark.parametrize(("module", "function", "line", "opened", "given"), CASES)
def test_the_real_stages_take_these_arguments(module, function, line, opened, given):
    stage = getattr(importlib.import_module(f"wmcli.stages.{module}"), function)
    inspect.signature(stage).bind(object(), **given)


def test_the_real_context_takes_these_arguments(recorder):
    recorded = recorder.open_context
    sys.modules.pop("wmcli.stages.opening")
    real = inspect.signature(importlib.import_module("wmcli.stages.opening").open_context)
    sys.modules["wmcli.stages.opening"] = SimpleNamespace(open_context=recorded)  # type: ignore[assignment]
    for _, _, line, _, _ in CASES:
        main.run(line)
    for call in recorder.opened:
        real.bind(**call)


@pytest.mark.parametrize("line", [case[2] for case in CASES])
def test_options_that_all_share(line, recorder, monkeypatch):
    monkeypatch.setenv("WM_RUN", "runs/from-environment")
    shared = ["--set", "a.b=1", "--set", "c=x y", "--seed", "4", "--device", "cuda:1", "--quiet"]
    assert main.run([*line, *shared]) == 0
    assert recorder.opened[0]["run"] == Path("runs/from-environment")
    assert recorder.opened[0]["overrides"][:4] == ["a.b=1", "c=x y", "seed=4", "training.device=cuda:1"]
    assert recorder.opened[0]["quiet"]
    assert main.run([*line, "--run", "runs/flag"]) == 0
    assert recorder.opened[1]["run"] == Path("runs/flag")


@pytest.mark.parametrize("line", [case[2] for case in STAGES])
def test_stdout_is_the_published_path_and_nothing_else(line, recorder, capsys):
    assert main.run(line) == 0
    out, err = capsys.readouterr()
    assert out == "runs/x/evaluation/v0003\n"
    assert err == "talk\n"


@pytest.mark.parametrize("line", [case[2] for case in STAGES])
def test_json_is_one_object(line, recorder, capsys):
    assert main.run([*line, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "kind": "evaluation",
        "version": 3,
        "name": "evaluation@3",
        "path": "runs/x/evaluation/v0003",
        "digest": "ab12",
        "metrics": SCORE,
        "protocol": "returns",
        "environment": "wm/Catch-v0",
        "model": "controller@2",
        "episodes": 4,
        "references": [dict.fromkeys(Reference.__annotations__) | {"name": "random", "score": -0.5}],
    }


def test_play_prints_where_the_video_is(recorder, capsys):
    assert main.run(["play", "--out", "a.gif"]) == 0
    assert capsys.readouterr().out == "a.gif\n"
    assert main.run(["play", "--out", "a.gif", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": "a.gif",
        "frames": 7,
        "return": 0.5,
        "ended": "time limit",
    }


def test_context_belongs_to_imagination(recorder, capsys):
    assert main.run(["play", "--out", "a.gif", "--context", "3"]) == 2
    assert "add --imagination" in capsys.readouterr().err and not recorder.called


@pytest.mark.parametrize(("line", "expected"), [
    (["eval"], ["0.5", "-0.5"]),
    (["profile"], ["encode", "125 ms (100 to 1,500)", "512 frames/s", "3 GFLOP/s, 25 %", "12.3 MB",
                   "2.04 times (1.5 to 3)", "gru", "skipped: slower than 5 s",
                   "40/s, 2.5 times (2.25 to 3)", "7 MB", "309 s (300 to 310), 15.5 times",
                   "aten::silu", "62.5 %", "1.5", "7.5 GFLOP/s, 6.25 %"]),
])  # fmt: skip
def test_a_person_gets_a_table_beside_the_path(line, expected, recorder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main.run(line) == 0
    out, err = capsys.readouterr()
    assert out == "runs/x/evaluation/v0003\n"
    assert all(text in err for text in expected)
    for silent in ("--json", "--quiet"):
        assert main.run([*line, silent]) == 0
        assert capsys.readouterr().err == "talk\n"


@pytest.mark.parametrize("line", [
    ["--compare", "backbones", "--part", "stages"],
    ["--compare", "backbones", "--trace"],
    ["--frames", "500"],
    ["--part", "stages", "--frames", "500"],
    ["--part", "kernels", "--trace"],
    ["--lengths", "64"],
    ["--compare", "backbones", "--lengths", "64,1"],
    ["--compare", "backbones", "--lengths", "long"],
    ["--compare", "backbones", "--lengths", ""],
    ["--compare", "tokenizers"],
    ["--compare", "presets"],
    ["--compare", "presets", "--preset", "rem", "--preset", "iris", "--lengths", "64"],
    ["--compare", "backbones", "--preset", "rem", "--preset", "iris"],
    ["--compare", "models", "--part", "stages"],
    ["--preset", "rem", "--preset", "iris"],
    ["--quick"],
    ["--suite", "a.json", "--part", "kernels"],
    ["--suite", "a.json", "--frames", "5"],
    ["--suite", "a.json", "--trace"],
    ["--suite", "a.json", "--compare", "backbones"],
    ["--suite", "a.json", "--lengths", "64"],
    ["--suite", "a.json", "--tune"],
    ["--tune", "--part", "kernels"],
    ["--tune", "--force"],
])  # fmt: skip
def test_a_profile_of_two_things_or_of_none_is_refused(line, recorder, capsys):
    assert main.run(["profile", *line]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert recorder.opened == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_suite_needs_no_run(as_json, recorder, capsys, monkeypatch):
    given = []
    module = SimpleNamespace(profile_suite=lambda *rest, **more: (given.append((rest, more)), {"parts": {}})[1])
    monkeypatch.setitem(sys.modules, "wmcli.stages.profile_suite", module)
    line = ["profile", "--suite", "a.json", "--preset", "rem", "--device", "cuda", "--quick", "--force"]
    assert main.run([*line, *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == {"parts": {}} if as_json else out == "a.json\na.md\n"
    ((rest, more),) = given
    progress = more.pop("progress")
    assert rest == (Path("a.json"),) and not progress.quiet
    assert more == {"presets": ["rem"], "overrides": ["training.device=cuda"], "quick": True, "force": True}
    assert recorder.opened == []


def test_one_episode_has_no_standard_error(recorder, capsys, monkeypatch):
    monkeypatch.setitem(SCORE, "stderr", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main.run(["eval"]) == 0
    assert "stderr" not in capsys.readouterr().err


def test_an_atari_score_stands_beside_the_published_ones(recorder, capsys, monkeypatch):
    monkeypatch.setitem(SCORE, "environment", "ALE/Pong-v5")
    assert main.run(["eval", "--json"]) == 0
    references = json.loads(capsys.readouterr().out)["references"]
    assert {"random", "human", "REM", "IRIS"} <= {row["name"] for row in references}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main.run(["eval"]) == 0
    assert "EfficientZero" in capsys.readouterr().err


def test_many_runs(recorder, capsys):
    assert main.run(["compare", "runs/a", "runs/b", "--against", "runs/c", "--against", "runs/d"]) == 0
    assert recorder.aggregated == [([Path("runs/a"), Path("runs/b")], [Path("runs/c"), Path("runs/d")])]
    assert recorder.opened == []
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == list(ROW)
    assert [line[:4] for line in lines[1:]] == [
        ["runs/a", "ALE/Pong-v5", "mean", "12.25"],
        ["all", "ALE/Pong-v5", "iqm", "0.75"],
        ["REM", "ALE/Pong-v5", "mean", "17.964"],
    ]
    assert main.run(["compare", "runs/a", "--json"]) == 0
    assert recorder.aggregated[1] == ([Path("runs/a")], [])
    shown = json.loads(capsys.readouterr().out)
    assert shown["scores"] == AGGREGATE["scores"]
    assert shown["iqm"] == {"value": 0.75, "low": 0.5, "high": None}
    assert shown["rows"] == AGGREGATE["rows"]


def test_many_runs_for_a_person_have_errors_beside_the_numbers(recorder, capsys):
    assert main.run(["compare", "runs/a", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| name | score | human-normalized | environment | episodes | steps | runs |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
        "| runs/a | 12.25 ± 1.5 | 0.93 | Pong | 100 | 400000 | 1 |",
        "| all: iqm | - | 0.75 (0.5 to 1) | Pong | - | - | 3 |",
        "| REM | 17.96 | 1.095 | Pong | - | - | 5 |",
        "",
        "- REM: Other rules.",
    ]
    assert main.run(["compare", "runs/a", "--format", "latex"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\\midrule") == 3  # under the heading, and around the aggregates
    assert shown.endswith("\n% REM: Other rules.\n")
    assert main.run(["compare", "runs/a", "--by", "backbone.kind", "--format", "csv"]) == 0
    assert capsys.readouterr().out == "backbone.kind,runs,mean,low,high,unit\ngru,2,0.5,0.25,,return\n"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_lines(width, recorder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "25")
    monkeypatch.setenv("TERM", "dumb")  # no bold letters
    assert main.run(["compare", "runs/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("runs/a" in line and "12.25 ± 1.5" in line for line in lines)
    heading, left_out = " ".join(lines[:2]), " ".join(lines).partition("A wider terminal shows: ")[2]
    assert all((name in heading) != (name in left_out) for name in ("environment", "human-normalized", "steps"))


def test_curves_of_returns(recorder):
    runs = [Path("runs/a"), Path("runs/b")]
    assert main.run(["compare", "runs/a", "runs/b", "--by", "backbone.kind", "--curves", "x.png"]) == 0
    options = {"over": "steps", "band": "bootstrap", "published": []}
    assert recorder.aggregated == [({"by backbone.kind": runs}, Path("x.png"), options)]
    line = ["compare", "runs/a", "runs/b", "--curves", "x.png", "--over", "minutes", "--band", "stderr"]
    assert main.run(line) == 0  # a line for each run
    options |= {"over": "minutes", "band": "stderr"}
    assert recorder.aggregated[1] == ({str(run): [run] for run in runs}, Path("x.png"), options)


def test_profiles_of_two_sides(recorder):
    line = ["compare", "runs/a", "--against", "runs/b", "--profiles", "x.png"]
    assert main.run(line) == 0
    sides = [Path("runs/a")], [Path("runs/b")]
    assert recorder.aggregated == [({"RUN": sides[0], "--against": sides[1]}, Path("x.png")), sides]


@pytest.mark.parametrize(
    "line",
    [
        ["compare", "runs/a", "--format", "csv", "--json"],
        ["compare", "runs/a", "--format", "yaml"],
        ["compare", "runs/a", "--against", "runs/b", "--curves", "x.png"],
    ],
)
def test_a_form_that_has_no_table_is_refused(line, recorder, capsys):
    assert main.run(line) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert recorder.opened == recorder.aggregated == []


def test_the_names_of_protocols_are_those_of_the_registry(capsys):
    assert set(get_args(ProtocolName)) == set(PROTOCOLS)
    assert all(name == protocol.name for name, protocol in PROTOCOLS.items())
    for command in ("eval", "compare"):
        assert main.run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in PROTOCOLS)


@pytest.mark.parametrize(
    ("protocol", "preset", "changes", "reason"),
    [
        ("returns", "rem-quick", ["environment.id=wm/GridWorld-v0"], "never end"),
        ("gridworld", "rem-quick", [], "needs dynamics of kind 'cells'"),
        ("recall", "s4wm-2d", ["environment.id=wm/DistractingMemory-100-v0"], "needs a task with a teleport"),
        ("reward", "s4wm-2d", ["environment.id=wm/DistractingMemory-100-v0", "dynamics.reward=none"], "learn rewards"),
    ],
)
def test_a_protocol_refuses_from_settings_alone(protocol, preset, changes, reason):
    with pytest.raises(UsageError, match=f"--protocol {protocol}: .*{reason}"):
        PROTOCOLS[protocol].check(resolve(preset, changes))


def test_a_fitting_run_passes_the_check():
    PROTOCOLS["returns"].check(resolve("rem-quick"))
    PROTOCOLS["gridworld"].check(resolve("gridworld"))
    PROTOCOLS["generation"].check(resolve("s4wm-2d"))
