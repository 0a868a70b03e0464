"""Tables as text: what the readers of each form get back."""

from __future__ import annotations

import csv
import io

import pytest

from wmcli.report.tables import FORMS, numeric

COLUMNS = ["name", "mean_return", "inputs", "score"]
ROWS = [
    {"name": "a_b|c & 100%", "mean_return": 0.123456789, "inputs": {"experience": "experience@1"}, "score": "3 ± 0.2"},
    None,
    {"name": 'say "hi", {x}~$\\', "mean_return": -20.5, "inputs": [1, 2], "score": "-1 (-2 to 0)"},
    {"name": "tabs\tand\nlines", "mean_return": None},
]


def test_tsv_is_read_by_cutting_at_tabs():
    lines = [line.split("\t") for line in FORMS["tsv"](ROWS, COLUMNS).split("\n")]
    assert lines == [
        COLUMNS,
        ["a_b|c & 100%", "0.123456789", "experience=experience@1", "3 ± 0.2"],
        ['say "hi", {x}~$\\', "-20.5", "[1, 2]", "-1 (-2 to 0)"],
        ["tabs and lines", "-", "-", "-"],
    ]


def test_csv_is_read_by_the_standard_reader():
    rows = list(csv.DictReader(io.StringIO(FORMS["csv"](ROWS, COLUMNS))))
    assert [row["name"] for row in rows] == ["a_b|c & 100%", 'say "hi", {x}~$\\', "tabs and lines"]
    assert [row["mean_return"] for row in rows] == ["0.123456789", "-20.5", ""]


def test_markdown_escapes_special_characters():
    lines = FORMS["markdown"](ROWS, COLUMNS).split("\n")
    assert lines[:3] == [
        "| name | mean return | inputs | score |",
        "| --- | ---: | --- | ---: |",
        r"| a\_b\|c \& 100% | 0.1235 | experience=experience@1 | 3 ± 0.2 |",
    ]
    assert len(lines) == 5 and r"say " in lines[3] and r"\~\$\\" in lines[3]


def test_latex_escapes_and_draws_rules():
    lines = FORMS["latex"](ROWS, COLUMNS).split("\n")
    assert lines[1] == r"\begin{tabular}{lrlr}"
    assert lines[3] == r"name & mean return & inputs & score \\"
    assert lines[5] == r"a\_b\textbar{}c \& 100\% & 0.1235 & experience=experience@1 & 3 $\pm$ 0.2 \\"
    assert lines[6] == r"\midrule"
    assert lines[7].startswith(
        r'say "hi", \{x\}\textasciitilde{}\$\textbackslash{} & $-$20.5 & [1, 2] & $-$1 ($-$2 to 0)'
    )
    assert lines[-1] == r"\end{tabular}"


@pytest.mark.parametrize("form", FORMS)
def test_a_table_without_rows_is_its_heading(form):
    assert "name" in FORMS[form]([], ["name", "state"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, True),
        (-0.5, True),
        (None, True),
        ("3 ± 0.2", True),
        ("0.7 (0.5 to 1)", True),
        ("12.5 MB", True),
        ("1 ± 0.1 (50)", True),
    ]
    + [("9c4e6bd3bf57", False), ("2026-11-23T04:36:07", False), ("runs/3", False), (True, False), ([1], False)],
)
def test_numbers_stand_to_the_right(value, expected):
    assert numeric([{"x": 1}, {"x": value}], "x") == expected
