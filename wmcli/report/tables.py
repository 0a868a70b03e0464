"""Tables as text: TSV, CSV, Markdown and LaTeX.

A row maps column names to plain values. A missing column or None is an empty cell. A row that is None is a rule between
its neighbors, in forms that have rules.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row | None]

EMPTY = "-"
_NUMBER = re.compile(r"[-+]?\d[\d.,e+-]*( ?%| [kMGT]?B)?( ± \S+)?( \(.*\)| to \S+)?|[-+]?(inf|nan)|-")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~&$])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def tsv(rows: Rows, columns: Sequence[str]) -> str:
    """Write a heading and one line a row, tabs between the cells; an empty cell is "-"."""
    lines = [columns, *([plain(row.get(column)) for column in columns] for row in rows if row is not None)]
    return "\n".join("\t".join(cells) for cells in lines)


def csv_text(rows: Rows, columns: Sequence[str]) -> str:
    """Write a heading and one record a row, quoted where needed; an empty cell has no characters."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if row is not None:
            writer.writerow("" if row.get(column) is None else plain(row[column]) for column in columns)
    return text.getvalue().removesuffix("\n")


def markdown(rows: Rows, columns: Sequence[str]) -> str:
    """Write a table of GitHub's Markdown, numbers to the right."""
    rule = ["---:" if numeric(rows, column) else "---" for column in columns]
    body = [[_MARKDOWN.sub(r"\\\1", short(row.get(column))) for column in columns] for row in rows if row is not None]
    lines = [[_MARKDOWN.sub(r"\\\1", heading(column)) for column in columns], rule, *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def latex(rows: Rows, columns: Sequence[str]) -> str:
    """Write a `tabular` with the rules of the package booktabs, numbers to the right."""
    spec = "".join("r" if numeric(rows, column) else "l" for column in columns)
    lines = ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{{spec}}}", "\\toprule"]
    lines += [_latex_line(map(heading, columns)), "\\midrule"]
    for row in rows:
        lines.append("\\midrule" if row is None else _latex_line(short(row.get(column)) for column in columns))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


FORMS: dict[str, Callable[[Rows, Sequence[str]], str]] = {
    "tsv": tsv,
    "csv": csv_text,
    "markdown": markdown,
    "latex": latex,
}
"""Forms by their names in `--format`."""


# -- cells ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> str:
    """Return a value as the exact text of a cell, without tabs or line breaks."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return " ".join(f"{key}={plain(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return " ".join(str(value).split())


def short(value: Any) -> str:
    """Return a value as text, floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else plain(value)


def heading(column: str) -> str:
    """Return a column's name with spaces."""
    return column.replace("_", " ")


def numeric(rows: Rows, column: str) -> bool:
    """Return whether a column holds numbers only, possibly with their errors. Such a column is aligned right."""
    return all(_NUMBER.fullmatch(short(row.get(column))) for row in rows if row is not None)


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex_cell, cells)) + r" \\"


def _latex_cell(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)
