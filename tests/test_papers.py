"""docs/papers.md: every row has a status, and a command that runs at its smallest scale (`pytest -m papers`)."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from wmcli.cli import main
from wmcli.config import to_toml
from wmcli.config.tables import parse_override, unflat
from wmcli.settings import resolve
from wmcli.stages.measures import check_measures, measures_of
from wmcli.sweeps.plan import read_sweep
from wmcli.sweeps.suite_file import suite_names

PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
PAPERS = {"REM": "rem", "Drama": "drama", "S4WM": "s4wm", "Attention priors": "priors"}


class Row(NamedTuple):
    id: str
    what: str
    command: str
    paper: str
    ours: str
    status: str


def read_rows() -> Iterator[Row]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if re.match(rf"({'|'.join(PAPERS.values())})-", cells[0]):
            yield Row(*cells)


ROWS = list(read_rows())


def test_every_row_has_an_id_of_its_own_a_command_and_a_status() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert all(row), row.id
        assert re.fullmatch(r"complete|(partly|missing|wrong): .+", row.status), row.id
        assert re.fullmatch(r"`wm [^`]+`", row.command), row.id


@pytest.mark.parametrize("paper", PAPERS)
def test_the_counts_above_are_those_of_the_rows(paper: str) -> None:
    found = Counter(row.status.partition(":")[0] for row in ROWS if row.id.startswith(f"{PAPERS[paper]}-"))
    (counted,) = re.findall(rf"^\| {paper} \(.*?\) \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert tuple(map(int, counted)) == (found.total(), found["complete"], found["partly"])


def test_every_suite_makes_a_row() -> None:
    """But for the one that has the backbones which no paper has."""
    named = {suite for row in ROWS for suite in re.findall(r"([\w-]+):(?:paper|cpu)", row.command)}
    assert named == {*suite_names()} - {"memory-backbones"}


MEASURED = sorted(
    {
        (suite, scale, protocol)
        for row in ROWS
        for suite, own, protocol in re.findall(r"wm compare --sweep ([\w-]+):(\w+) --protocol ([\w-]+)", row.command)
        for scale in (own, "smoke")
    }
)


@pytest.mark.parametrize(("suite", "scale", "protocol"), MEASURED)
def test_every_variant_of_a_suite_is_measured_as_its_row_says(suite: str, scale: str, protocol: str) -> None:
    measured: dict[str, bool] = {}
    for run in read_sweep(Path(f"{suite}:{scale}")).runs:
        if ("seed", "seed-1") in run.values:
            settings = resolve(run.arguments[1], list(run.arguments[5::2]))
            check_measures(settings)
            measured[run.variant] = protocol in measures_of(settings) or measured.get(run.variant, False)
    assert measured and all(measured.values()), measured


# -- commands at their smallest scale ----------------------------------------------------------------------------------

_REM = ["tokenizer.batch=2", "dynamics.batch=2", "controller.batch=2", "controller.imagination_horizon=2"]
_LATENT = ["posterior_width=8", "categoricals=2", "classes=2"]
_S4WM = [*(f"tokenizer.{each}" for each in _LATENT), "dynamics.prior_width=8", "dynamics.batch=2", "backbone.width=16"]
SMALL = {
    **dict.fromkeys(("rem", "iris", "iris-rem-config"), _REM),
    "drama": [
        *("dynamics.batch=2", "dynamics.sequence_length=20", "backbone.width=64"),
        *("controller.batch=4", "controller.imagination_horizon=4"),
    ],
    "unizero": ["environment.count=2", "dynamics.batch=2", "controller.simulations=2", "controller.batch=2"],
    "gridworld": ["dynamics.batch=2"],
    "memory-small": _S4WM,
    "priors-study": ["dynamics.batch=2", "controller.simulations=2"],
    **dict.fromkeys(("s4wm-3d", "s4wm-full-posterior", "s4wm-no-mlp"), [*_S4WM, "backbone.layers=1"]),
    "tssm-xl-3d": [*_S4WM, "backbone.layers=1", "backbone.memory_length=4", "backbone.segment_length=4"],
    "rssm-tbtt-3d": [*_S4WM, "dynamics.sequence_length=4", "dynamics.context=2"],
}
"""What makes the presets of commands small that train, act or measure."""
EPOCH = ["collect.steps=40", "tokenizer.updates=1", "dynamics.updates=1", "controller.updates=1"]
BEGUN = {"runs/rem": "rem", "runs/drama": "drama"}
"""Runs that several rows continue, and their presets."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder that all rows work in, on any worker: with files of small presets."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "papers"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            for name, sets in SMALL.items():
                settings: dict[str, object] = {}
                for key, value in map(parse_override, sets):
                    settings[".".join(key)] = value
                (folder / f"{name}.toml").write_text(f'base = "{name}"\n' + to_toml(unflat(settings)))
    return folder


def smallest(line: str) -> list[str]:
    """The words of a command, with the scale smoke and small presets."""
    words = [re.sub(r":(paper|cpu)$", ":smoke", word) for word in shlex.split(line)[1:]]
    for place, word in enumerate(words[:-1]):
        if word == "--preset" and words[place + 1] in SMALL and words[0] != "presets":
            words[place + 1] += ".toml"
    if words[:2] == ["sweep", words[1]]:
        words.append("--no-estimate")
    if words[0] == "profile" and ("models" in words or "backbones" in words):
        if "--lengths" in words:
            words[words.index("--lengths") + 1] = "4,8"
        else:
            words += ["--lengths", "4,8"]
        if "--preset" not in words:
            words += [
                word for name in ("s4wm-3d", "tssm-xl-3d", "rssm-tbtt-3d") for word in ("--preset", f"{name}.toml")
            ]
    return words


def locked(name: str) -> FileLock:
    return FileLock(re.sub(r"\W+", "-", name) + ".lock")


def do(words: list[str]) -> None:
    assert main.run(words) == 0, shlex.join(["wm", *words])


@pytest.mark.papers
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_command_of_a_row_runs(row: Row, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for line in row.command.strip("`").split(" && "):
        words = smallest(line)
        run = words[words.index("--run") + 1] if "--run" in words else words[1]
        with locked(run):
            if run in BEGUN and not Path(run).exists():
                sets = [word for each in EPOCH for word in ("--set", each)]
                do(["collect", "--run", run, "--preset", f"{BEGUN[run]}.toml", "--steps", "300", *sets])
                if run == "runs/rem":
                    do(["train-tokenizer", "--run", run, "--updates", "1"])
                do(["train-dynamics", "--run", run, "--updates", "1"])
            do(words)
        for picture in (word for word in words if word.endswith((".png", ".html"))):
            assert list(Path().glob(f"{Path(picture).stem}*{Path(picture).suffix}")), picture
