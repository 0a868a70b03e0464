"""Forms that several sections share: figures, numbers, names."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wmcli.report.document import Drawing, Table
from wmcli.report.plots import svg_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawing(figure: Figure, name: str, alt: str, caption: str = "") -> Drawing:
    """Return a figure as a block. `name` occurs once in a document."""
    return Drawing(svg_text(figure, name), alt, caption)


def table(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    caption: str = "",
    *,
    exact: Sequence[Mapping[str, Any]] | None = None,
    ours: frozenset[int] = frozenset(),
) -> Table:
    """Return a table with the columns of its rows that are not empty, in order of appearance."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if filled(rows, key)]
    return Table(name, list(rows), tuple(columns), caption, None if exact is None else list(exact), ours)


def filled(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def task(environment: str) -> str:
    """Return an environment without namespace and version: `Pong` for `ALE/Pong-v5`."""
    return re.sub(r"^(ALE|wm)/|-v\d+$", "", environment)


def count(number: float, unit: str) -> str:
    """Return `1 run` or `12 runs`."""
    return f"{number:,g} {unit}" + ("" if number == 1 else "s")


def span(values: Sequence[float]) -> str:
    """Return one number, or `3 to 10`; whole numbers with all their digits."""
    low, high = (f"{each:,.0f}" if each == round(each) else f"{each:,.4g}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def is_picture(data: bytes) -> bool:
    """Return whether bytes are a picture that can be shown."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False
    return True
