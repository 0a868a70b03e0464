"""Write a document as one HTML file that needs no network.

The file holds its style, its script, its pictures and the data of its tables. `page.html` lays it out. Without
JavaScript all of it can be read; sorting, downloads and buttons need it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wmcli.errors import UsageError
from wmcli.report.document import Block, Document, Drawing, Fold, Picture, Row, Table
from wmcli.report.files import write_whole
from wmcli.report.tables import heading, numeric, plain, short

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDEST = 760  # pixels: the width of the column
_LARGEST = 8  # pixels of the screen to a pixel of a small picture
_LEAST = 0.66  # a narrower drawing scrolls, since its text would be too small
_TOGETHER = 28  # letters
_NAME = re.compile(r"[A-Za-z0-9-]+")


def write_html(document: Document, path: Path) -> None:
    """Write a document as one HTML file, completely or not at all. Raises as `render` and `write_whole` do."""
    data = render(document).encode("utf-8", "replace")  # names of files may hold what no encoding has
    write_whole(path, lambda draft: draft.write_bytes(data))


def render(document: Document) -> str:
    """Return a document as HTML. Equal documents give equal text.

    Raises:
        UsageError: A picture cannot be read.
        ValueError: A name is not made of letters, digits and dashes, or occurs twice.
    """
    from markupsafe import Markup

    blocks = [block for section in document.sections for block in _flat(section.blocks)]
    _check_names([section.name for section in document.sections])
    _check_names([block.name for block in blocks if isinstance(block, Table)])
    style, script = _asset("page.css") + _sizes(blocks), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _environment().get_template("page.html")
    return page.render(document=document, style=Markup(style), script=Markup(script), policy=policy) + "\n"


def _flat(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Row | Fold):
            yield from _flat(block.blocks)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name {name!r}: use letters, digits and dashes")
        if names.count(name) > 1:
            raise ValueError(f"name {name!r} occurs {names.count(name)} times in a document")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=PackageLoader("wmcli.report", ""), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "spans": _spans,
        "paragraphs": _paragraphs,
        "pieces": lambda text: re.split(r"(?<=[=._/,])(?=\w)", text),
        "columns": _columns,
        "groups": _groups,
        "records": lambda table: Markup(_records(table)),
        "width": _width,
        "svg": lambda drawing: Markup(drawing.svg),
        "image": _image,
    }
    return environment


@functools.cache
def _asset(name: str) -> str:
    return resources.files("wmcli.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression by which a content security policy allows a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- text -------------------------------------------------------------------------------------------------------------


def _paragraphs(body: str) -> list[list[tuple[bool, str]]]:
    return [_spans(paragraph) for paragraph in re.split(r"\n\s*\n", body.strip())]


def _spans(text: str) -> list[tuple[bool, str]]:
    """Split a text into spans: whether one is code, and its text. A backtick without a partner is text."""
    parts = re.split(r"`([^`\n]+)`", text)
    return [(place % 2 == 1, part) for place, part in enumerate(parts) if part]


# -- tables -----------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    heading: str
    numeric: bool


class _Cell(NamedTuple):
    text: str
    numeric: bool
    short: bool
    """Whether it stands on one line where there is room, since a table's first column names its rows."""
    value: str | None
    """Of a rounded number, to sort by."""


class _Row(NamedTuple):
    cells: list[_Cell]
    emphasis: bool


def _columns(table: Table) -> list[_Column]:
    return [_Column(heading(column), numeric(table.rows, column)) for column in table.columns]


def _groups(table: Table) -> list[list[_Row]]:
    """Return the rows between the rules."""
    numerics = [numeric(table.rows, column) for column in table.columns]
    groups: list[list[_Row]] = [[]]
    for place, row in enumerate(table.rows):
        if row is None:
            groups.append([])
            continue
        values = [row.get(column) for column in table.columns]
        cells: list[_Cell] = []
        for value, aligned in zip(values, numerics, strict=True):
            text, exact = short(value), plain(value)
            together = not cells and len(text) <= _TOGETHER
            cells.append(_Cell(text, aligned, together, exact if exact != text else None))
        groups[-1].append(_Row(cells, place in table.emphasis))
    return [group for group in groups if group]


def _records(table: Table) -> str:
    """Return the exact rows as a JSON array of objects, one a line, that may stand in a script element."""
    if table.exact is None:
        rows, columns = table.rows, table.columns
    else:
        rows = table.exact
        columns = tuple(dict.fromkeys(column for row in rows if row is not None for column in row))
    lines = [
        json.dumps({column: _scalar(row.get(column)) for column in columns}, ensure_ascii=False, allow_nan=False)
        for row in rows
        if row is not None
    ]
    return ("[\n" + ",\n".join(lines) + "\n]").replace("<", "\\u003c")


def _scalar(value: Any) -> Any:
    """Return a cell of JSON. NaN and infinity, which JSON lacks, become null; a list or a mapping becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else plain(value)


# -- pictures ---------------------------------------------------------------------------------------------------------


class _Image(NamedTuple):
    uri: str
    still: str
    """The first frame of a film; empty for a picture."""
    width: int
    """Of its own pixels."""
    shown: tuple[int, int]
    """Width and height on a wide screen, pixels."""


@functools.lru_cache(maxsize=1)
def _image(picture: Picture) -> _Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(picture.data), formats=("PNG", "GIF", "WEBP")) as image:
            image.load()
            (width, height), kind, still = image.size, image.format or "", io.BytesIO()
            if getattr(image, "is_animated", False):
                image.convert("RGB").save(still, "PNG", optimize=True)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        raise UsageError(f"cannot read a picture of the report ({picture.alt}); remove or make it again.") from None
    factor = max(1, min(_LARGEST, _WIDEST // 2 // width)) if picture.sharp else 1
    return _Image(
        _data_uri(kind.lower(), picture.data),
        _data_uri("png", still.getvalue()) if still.getvalue() else "",
        width,
        (factor * width, factor * height),
    )


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _width(drawing: Drawing) -> int:
    """Return the width at which a drawing's text is as large as the page's, in pixels."""
    found = re.match(r'<svg [^>]*?\bwidth="(\d+)"', drawing.svg)
    if found is None:
        raise ValueError(f"the drawing '{drawing.alt}' does not state its width in pixels")
    return int(found[1])


def _sizes(blocks: Sequence[Block]) -> str:
    """Return the rules of style for the widths of drawings and pictures, which the policy allows in one place only."""
    rules = set()
    for block in blocks:
        if isinstance(block, Drawing):
            width = _width(block)
            rules.add(f".w{width} svg{{max-width:{min(width, _WIDEST)}px;min-width:{round(_LEAST * width)}px}}")
        elif isinstance(block, Picture) and block.sharp:
            # Whole pixels also where there is less room.
            image = _image(block)
            fitting = f"max(round(down,100%,{image.width}px),min(100%,{image.width}px))"
            rules.add(f".x{image.width}{{width:min({image.shown[0]}px,{fitting})}}")
    return "\n".join(sorted(rules))
