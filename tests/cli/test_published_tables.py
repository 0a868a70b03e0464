"""Tables of the papers, recomputed from published scores by the command, to the last printed digit."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from wmcli.cli import main
from wmcli.metrics import atari, statistics

# Cohen et al. 2024, table 1
REM_COLUMNS = ("random", "human", "SimPLe", "DreamerV3", "TWM", "STORM", "IRIS", "REM")
REM_TABLE = """
Alien 227.8 7127.7 616.9 959.4 674.6 983.6 420.0 607.2
Amidar 5.8 1719.5 74.3 139.1 121.8 204.8 143.0 95.3
Assault 222.4 742.0 527.2 705.6 682.6 801.0 1524.4 1764.2
Asterix 210.0 8503.3 1128.3 932.5 1116.6 1028.0 853.6 1637.5
BankHeist 14.2 753.1 34.2 648.7 466.7 641.2 53.1 19.2
BattleZone 2360.0 37187.5 4031.2 12250.0 5068.0 13540.0 13074.0 11826.0
Boxing 0.1 12.1 7.8 78.0 77.5 79.7 70.1 87.5
Breakout 1.7 30.5 16.4 31.1 20.0 15.9 83.7 90.7
ChopperCommand 811.0 7387.8 979.4 410.0 1697.4 1888.0 1565.0 2561.2
CrazyClimber 10780.5 35829.4 62583.6 97190.0 71820.4 66776.0 59324.2 76547.6
DemonAttack 152.1 1971.0 208.1 303.3 350.2 164.6 2034.4 5738.6
Freeway 0.0 29.6 16.7 0.0 24.3 0.0 31.1 32.3
Frostbite 65.2 4334.7 236.9 909.4 1475.6 1316.0 259.1 240.5
Gopher 257.6 2412.5 596.8 3730.0 1674.8 8239.6 2236.1 5452.4
Hero 1027.0 30826.4 2656.6 11160.5 7254.0 11044.3 7037.4 6484.8
Jamesbond 29.0 302.8 100.5 444.6 362.4 509.0 462.7 391.2
Kangaroo 52.0 3035.0 51.2 4098.3 1240.0 4208.0 838.2 467.6
Krull 1598.0 2665.5 2204.8 7781.5 6349.2 8412.6 6616.4 4017.7
KungFuMaster 258.5 22736.3 14862.5 21420.0 24554.6 26182.0 21759.8 25172.2
MsPacman 307.3 6951.6 1480.0 1326.9 1588.4 2673.5 999.1 962.5
Pong -20.7 14.6 12.8 18.4 18.8 11.3 14.6 18.0
PrivateEye 24.9 69571.3 35.0 881.6 86.6 7781.0 100.0 99.6
Qbert 163.9 13455.0 1288.8 3405.1 3330.8 4522.5 745.7 743.0
RoadRunner 11.5 7845.0 5640.6 15565.0 9109.0 17564.0 9614.6 14060.2
Seaquest 68.4 42054.7 683.3 618.0 774.4 525.2 661.3 1036.7
UpNDown 533.4 11693.2 3350.3 7567.1 15981.7 7985.0 3546.2 3757.6
superhuman 0 - 1 9 8 9 10 12
mean 0.000 1.000 0.332 1.124 0.956 1.222 1.046 1.222
median 0.000 1.000 0.134 0.485 0.505 0.425 0.289 0.280
iqm - - 0.130 0.487 0.459 0.561 0.501 0.673
optimality_gap - - 0.729 0.510 0.513 0.472 0.512 0.482
"""
# The same, table 9 (table 8 of the first version, which has no IRIS)
ABLATION_COLUMNS = (
    *("REM", "IRIS", "REM-no-pop", "REM-separate-wm-embeddings", "REM-4x4-tokenizer"),
    *("REM-no-latent-ac", "REM-no-action-input"),
)
ABLATIONS = """
Assault 1764.2 1524.4 1472.2 1269.2 1288.9 1221.5 1498.5
Asterix 1637.5 853.6 1603.4 1185.9 909.6 1376.4 1656.3
ChopperCommand 2561.2 1565.0 1848.0 1928.3 1958.9 2517.6 2302.7
CrazyClimber 76547.6 59324.2 62964.8 74791.3 57814.7 30952.7 42441.2
DemonAttack 5738.6 2034.4 12316.0 4389.9 3863.3 5159.0 5827.0
Gopher 5452.4 2236.1 5338.4 3764.2 2174.9 2891.2 4365.3
Krull 4017.7 6616.4 5138.6 5779.9 4612.8 3866.2 3659.6
RoadRunner 14060.2 9614.6 13161.6 11723.5 6161.7 11692.9 11692.9
superhuman 6 5 6 6 4 5 6
mean 1.947 1.564 2.357 1.778 1.341 1.340 1.571
median 2.339 1.130 2.221 1.821 1.384 1.357 1.699
iqm 2.201 1.191 2.068 1.794 1.026 1.234 1.535
optimality_gap 0.198 0.298 0.209 0.214 0.289 0.261 0.208
"""
# Wang et al. 2025, tables 1, 3 and 4: mean and median in percent. SimPLe, TWM and IRIS are those of REM's table.
DRAMA = {
    "PPO": ("11", "2"),
    "SimPLe": ("33", "13"),
    "SPR": ("62", "40"),
    "TWM": ("96", "51"),
    "IRIS": ("105", "29"),
    "STORM-in-Drama": ("127", "58"),
    "DreamerV3-in-Drama": ("124", "49"),
    "Drama": ("99", "27"),
    "DreamerV3-XS": ("37", "7"),
    "Drama-uniform": ("80", "28"),
}
# De Dios Allegue et al. 2025, table 1
PRIORS = {
    "MuZero": ("0.44", "0.13"),
    "UniZero": ("0.13", "0.05"),
    "UniZero-adaptive": ("0.090", "0.04"),
    "UniZero-gaussian": ("0.23", "0.10"),
    "UniZero-gaussian-adaptive": ("0.00", "0.02"),
}
NOT_AS_PRINTED = {
    "PPO": {"median": "median of 3 %"},
    "DreamerV3-in-Drama": {"mean": "mean of 125 %"},
    "Drama": {"mean": "mean of 105 %"},
    "UniZero-adaptive": {"mean": "mean of 0.095", "median": "median of 0.05"},
}
"""Figures above that are ours, since those of the paper do not follow from its table: words of the column's caveat."""


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values need no resamples, and limits are tested elsewhere."""
    real = statistics._resample
    monkeypatch.setattr(statistics, "_resample", lambda sides, compute, rng, _: real(sides, compute, rng, 50))


def named(columns: Sequence[str]) -> list[str]:
    return [argument for column in columns for argument in ("--published", column)]


def compared(capsys: pytest.CaptureFixture[str], columns: Sequence[str]) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of `wm compare --published ...`: (game or statistic, column) -> row."""
    assert main.run(["compare", *named(columns), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    return {(row["environment"] or row["statistic"], row["variant"]): row for row in rows}


def rounded(value: float | str, like: str) -> str:
    """A number with as many decimals as a printed one."""
    exact = Decimal(format(float(value), ".9f"))
    return str(exact.quantize(Decimal(1).scaleb(-len(like.partition(".")[2])), ROUND_HALF_UP))


@pytest.mark.parametrize(
    ("columns", "printed"), [(REM_COLUMNS, REM_TABLE), (ABLATION_COLUMNS, ABLATIONS)], ids=["table 1", "table 9"]
)
def test_the_tables_of_rem(columns: tuple[str, ...], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, columns)
    table = [line.split() for line in printed.split("\n") if line]
    for name, *numbers in table:
        for column, number in zip(columns, numbers, strict=True):
            if number == "-":
                assert name == "superhuman" or rows[name, column]["value"] == ""  # a single value has no IQM
            else:
                # A tie may be printed either way: 78.05 is 78.0.
                row = rows[name, column]
                assert abs(float(row["value"]) - float(number)) <= 0.5001 * 10.0 ** -len(number.partition(".")[2])
                has_interval = atari.has_runs(column) and (name in atari.games() or float(number) > 0)
                assert bool(row["low"]) == bool(row["high"]) == has_interval, (name, column)
    assert {name for name, _ in rows if name in atari.games()} == {line[0] for line in table} & {*atari.games()}


@pytest.mark.parametrize(("printed", "unit"), [(DRAMA, 100), (PRIORS, 1)], ids=["Drama", "priors"])
def test_the_means_and_medians_of_drama_and_of_the_priors(
    printed: dict[str, tuple[str, str]], unit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compared(capsys, tuple(printed))
    for column, figures in printed.items():
        for statistic, figure in zip(("mean", "median"), figures, strict=True):
            assert rounded(unit * float(rows[statistic, column]["value"]), figure) == figure, (column, statistic)
            assert NOT_AS_PRINTED.get(column, {}).get(statistic, "") in atari.column_of(column).caveat


@pytest.mark.parametrize(
    ("one", "other", "games"),
    [("Drama", "Drama-uniform", (17, 1, 8)), ("UniZero-gaussian", "UniZero", (22, 0, 4)), ("REM", "IRIS", (15, 0, 11))],
)
def test_games_won_by_the_tables(
    one: str, other: str, games: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts of Drama and of the priors count 11, 13 and 2, and 19 of 26: not what their tables have."""
    rows = compared(capsys, (one, other))
    cells = [rows[f"games {than} {other}", one]["value"] for than in ("better than", "equal to", "worse than")]
    counts = tuple(map(int, cells))
    assert counts == games and sum(counts) == 26


def test_the_median_of_ppo_is_that_of_rounded_scores() -> None:
    """Drama prints 3 %: with its own rounded scores of people and of random play the median is 2.9 %."""

    def whole(game: str, column: str) -> float:
        value = atari.reference(game, column)
        assert value is not None
        return float(rounded(value, "1"))

    scores = {
        game: [(whole(game, "PPO") - whole(game, "random")) / (whole(game, "human") - whole(game, "random"))]
        for game in atari.games()
    }
    assert rounded(100 * statistics.median(scores), "1") == "3"


def test_rounding_does_not_explain_the_means_that_do_not_follow_from_their_tables() -> None:
    """Every game's score, and the scores of people and of random play, moved by half a digit in the same direction."""
    for column, printed, half in [
        ("Drama", 1.045, 0.5),
        ("DreamerV3-in-Drama", 1.245, 0.5),
        ("UniZero-adaptive", 0.0945, 0.05),
    ]:
        highest = []
        for game in atari.games():
            score, random, human = (atari.reference(game, name) for name in (column, "random", "human"))
            assert score is not None and random is not None and human is not None
            highest.append((score + half - random) / (human - random))
        assert statistics.mean([[value] for value in highest]) < printed


def test_pictures_of_published_scores_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = {name: tmp_path / f"{name}.png" for name in ("profiles", "intervals", "improvement")}
    options = [argument for name, path in pictures.items() for argument in (f"--{name}", str(path))]
    assert main.run(["compare", *named(["REM", "IRIS", "Drama"]), *options, "--format", "markdown"]) == 0
    for path in pictures.values():
        with Image.open(path) as picture:
            picture.load()
    shown = capsys.readouterr()
    assert "| REM | IRIS | 0.594 (" in shown.out and "means only" in shown.out
    assert shown.out.rstrip().splitlines()[-1].startswith("- Drama: mean of 5 runs per game, rounded; Wang et al.")
    for of in ("performance profiles", "probability of improvement"):
        assert f"left out of the {of}: of Drama only means over runs are published" in shown.err


def test_games_that_a_column_lacks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["compare", *named(["REM", "REM-4x4-tokenizer"]), "--format", "csv"]) == 0
    shown = capsys.readouterr()
    assert (
        "over the 8 environments that all variants have: REM-4x4-tokenizer lacks Alien, Amidar, BankHeist" in shown.err
    )
    assert "Alien" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--published", "RME"], "no published scores called 'RME'; did you mean 'REM'?"),
        (["--published", "REM", "--published", "REM"], "--published REM is given twice"),
        (["--published", "REM", "--curves", "x.png"], "--curves: for runs, and --published alone has none"),
        (["--published", "REM", "--by", "seed"], "--against, --by and --protocol: for runs"),
        (["--published", "REM", "--improvement", "x.png"], "--improvement needs two to compare"),
        (["runs/a", "--improvement", "x.png"], "--improvement needs two to compare"),
        (["--published", "REM", "--profiles", "x.txt"], "x.txt"),
        (["--published", "REM", "--profiles", "x.png", "--band", "range"], "--band range is for curves"),
        (["runs/a", "--protocol", "doors", "--published", "REM"], "omit --against, --by, --published."),
        (
            ["runs/a", "--protocol", "recall", "--curves", "x.png", "--over", "minutes"],
            "--over minutes is for curves of returns",
        ),
        (["runs/a", "--sweep", "x.toml"], "--sweep names runs and groups itself"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["compare", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and line in shown.err and shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
