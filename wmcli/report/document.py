"""The content of a report, without its looks: sections of text, tables, figures and films.

`wmcli.report.html` writes a document as one HTML file. All text is plain; nothing in it is read as HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from wmcli.report.tables import Rows


@dataclass(frozen=True)
class Text:
    """Paragraphs, with a blank line between two. Words between backticks are code."""

    body: str
    tone: Literal["plain", "note", "warning"] = "plain"


class Tile(NamedTuple):
    """One number that people look for first."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Tiles:
    """Numbers in large type, side by side."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Table:
    """A table to read, and the same as CSV and JSON to take away."""

    name: str
    """Of the files to take away: letters, digits and dashes, once in a document."""
    rows: Rows
    """For people. A row that is None is a rule."""
    columns: tuple[str, ...]
    caption: str = ""
    exact: Rows | None = None
    """Rows to take away, unrounded, with columns of their own; None takes `rows`. Lists and mappings become text."""
    emphasis: frozenset[int] = frozenset()
    """Places in `rows` of those to stand out, such as our own among published ones."""


@dataclass(frozen=True)
class Drawing:
    """A vector picture."""

    svg: str
    """An `<svg>` element whose colors are variables of the page, by `plots.svg_text` or `lineage_drawing`."""
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A film or a picture of pixels: WebP, GIF or PNG."""

    data: bytes
    alt: str
    caption: str = ""
    sharp: bool = True
    """Enlarge it by whole pixels."""


@dataclass(frozen=True)
class Facts:
    """Names and their values, one below the other."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Commands:
    """Lines to copy into a terminal."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Blocks side by side where there is room."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Fold:
    """Blocks that are hidden until asked for. On paper they are shown."""

    title: str
    blocks: tuple[Block, ...]


Block = Text | Tiles | Table | Drawing | Picture | Facts | Commands | Row | Fold


@dataclass(frozen=True)
class Section:
    """A part with a heading and an entry in the contents."""

    name: str
    """Of its anchor: letters, digits and dashes, once in a document."""
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    footer: str = ""
