"""The page of a report: all of its blocks, nothing from elsewhere, and what a browser makes of it."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from wmcli.errors import UsageError
from wmcli.report.document import (
    Block,
    Commands,
    Document,
    Drawing,
    Facts,
    Fold,
    Picture,
    Row,
    Section,
    Table,
    Text,
    Tile,
    Tiles,
)
from wmcli.report.html import render, write_html
from wmcli.report.tables import csv_text

HOSTILE = "\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}</script></title></style><script>alert(2)</script><!-- &amp; ]]>"
SVG = '<svg viewBox="0 0 400 100" width="600" height="150"><text x="9" y="50" fill="var(--ink)">drawn</text></svg>'
EXACT = [
    {"name": 'a "b", c\nd', "seed": 2**63 + 1, "score": 0.1 + 0.2, "low": None, "ok": True},
    None,
    {"name": HOSTILE, "seed": -1, "score": 1e-7, "low": 1e22, "ok": False},
    {"name": "ä ☃ \u2028", "seed": 0, "score": -0.0, "low": 100.0, "ok": True},
]


def pixels(*sizes: tuple[int, int], kind: str = "WEBP") -> bytes:
    """A lossless film of one frame for each size, or a picture."""
    rng, data = np.random.default_rng(0), io.BytesIO()
    first, *others = (Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes)
    more: dict[str, Any] = {"save_all": True, "append_images": others, "duration": 100, "loop": 0} if others else {}
    first.save(data, kind, **more | ({"lossless": True} if kind == "WEBP" else {}))
    return data.getvalue()


FILM, PICTURE = pixels((90, 16), (90, 16), (90, 16)), pixels((16, 16), kind="PNG")


def every_block(text: str) -> tuple[Block, ...]:
    """Each kind of block, with a text in all places that hold one."""
    rows = [{text: text, "x": 1.23456}, None, {text: text, "x": None}]
    return (
        Text(f"{text}\n\nsecond `{text}`", "warning"),
        Tiles((Tile(text, text, text), Tile("steps", "100"))),
        Table("table", rows, (text, "x"), text, emphasis=frozenset({2})),
        Drawing(SVG, text, text),
        Picture(FILM, text, text),
        Facts(((text, text),)),
        Commands((text, "second")),
        Row((Text("left"), Picture(PICTURE, text, text, sharp=False))),
        Fold(text, (Text("hidden", "note"),)),
    )


def document(*blocks: Block, text: str = "A report") -> Document:
    return Document(text, text, (Section("first", text, blocks), Section("second", "Second", ())), text)


VOID = {"meta", "link", "img", "source"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the texts directly in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[int] = []  # places in `elements`
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "wbr":  # says where a long name may break
            return
        if tag not in VOID:
            self.open.append(len(self.elements))
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self.texts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] += data

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str], str]]:
        """Attributes and first text of the elements of a name and with these attributes."""
        return [
            (found, text)
            for (name, found), text in zip(self.elements, self.texts, strict=True)
            if name == tag and attributes.items() <= found.items()
        ]


def test_every_kind_of_block_is_there_in_order():
    blocks = every_block("plain words")
    assert {type(block) for block in blocks} == set(get_args(Block))
    html = render(document(*blocks))
    page = Page(html)
    assert [text for _, text in page.all("h2")] == ["A report", "Second"]
    assert [found["href"] for found, _ in page.all("a")][1:] == ["#first", "#second"]
    marks = ['class="text warning"', 'class="tiles"', "<table>", "drawn", "<picture>", 'class="facts"', "<pre>"]
    place = html.index("<main")
    for mark in [*marks, "left", "<details class", "hidden", 'id="second-title"']:
        place = html.index(mark, place)
    assert "second <code>plain words</code>" in html
    assert [text for _, text in page.all("strong")] == ["plain words", "100"]


def test_nothing_in_a_document_is_read_as_html():
    plain, hostile = (
        Page(render(document(*every_block(text), text=text))) for text in ("words" + " and more" * 5, HOSTILE)
    )
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    for (_, ours), (_, theirs) in zip(plain.elements, hostile.elements, strict=True):
        assert ours.keys() == theirs.keys()
    assert [text for _, text in hostile.all("title")] == [text for _, text in hostile.all("h1")] == [HOSTILE]
    assert {found["alt"] for found, _ in hostile.all("img")} == {HOSTILE}
    assert hostile.texts.count(HOSTILE) >= 10
    words, marked = (
        sum(text.count(each) for text in page.texts) for page, each in ((plain, "words"), (hostile, "7 * 7"))
    )
    assert words == marked
    (_, data) = hostile.all("script", type="application/json")[0]
    assert json.loads(data)[0] == {HOSTILE: HOSTILE, "x": 1.23456}


def test_a_page_is_whole_and_its_policy_allows_its_own_style_and_script_only():
    page = Page(render(document(*every_block("words"))))
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "form", "base", "audio", "video"}
        assert not any(key.startswith("on") or key == "style" for key in attributes)
        for key in {"src", "href", "srcset", "data", "action", "poster"} & attributes.keys():
            assert attributes[key].startswith(("data:", "#")), (tag, attributes[key])
    (policy,) = (found["content"] for found, _ in page.all("meta") if found.get("http-equiv"))
    ((_, style),), (script, *data) = page.all("style"), page.all("script")
    assert "url(" not in style and "@import" not in style and data
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script[1])]
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_equal_documents_give_equal_pages_in_another_process():
    code = "import sys, test_html as t; sys.stdout.write(t.render(t.document(*t.every_block('x'))))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"},
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
    )
    assert there.stdout.decode() == render(document(*every_block("x")))


def test_data_to_take_away_are_the_exact_rows():
    columns = ("name", "seed", "score", "low", "ok")
    shown = [{"name": "a", "score": "0.3"}]
    for table in (Table("t", EXACT, columns), Table("t", shown, ("name", "score"), exact=EXACT)):
        (found, data) = Page(render(document(table))).all("script", type="application/json")[0]
        assert found["data-name"] == "t"
        rows = json.loads(data)
        assert rows == [row for row in EXACT if row is not None]
        assert [repr(row["score"]) for row in rows] == ["0.30000000000000004", "1e-07", "-0.0"]
    odd = [{"a": float("nan"), "b": {"x": [1, 2]}}, {"a": float("-inf")}]
    (_, data) = Page(render(document(Table("t", odd, ("a", "b"))))).all("script", type="application/json")[0]
    assert json.loads(data) == [{"a": None, "b": "x=[1, 2]"}, {"a": None, "b": None}]


def test_cells_are_short_and_keep_exact_values_to_sort_by():
    rows = [
        {"name": "a", "mean_return": 1234.5678, "score": "0.7 (0.5 to 1)"},
        None,
        {"name": "b", "mean_return": 3, "score": None},
    ]
    page = Page(render(document(Table("t", rows, ("name", "mean_return", "score"), "All", emphasis=frozenset({2})))))
    heads = page.all("th", scope="col")
    assert [text for _, text in heads] == ["name", "mean return", "score"]
    assert [found.get("class") for found, _ in heads] == [None, "n", "n"]
    assert [text for _, text in page.all("th", scope="row")] == ["a", "b"]
    assert [(found.get("data-v"), text) for found, text in page.all("td")] == [
        ("1234.5678", "1235"),
        (None, "0.7 (0.5 to 1)"),
        (None, "3"),
        (None, "-"),
    ]
    assert len(page.all("tbody")) == 2, "a rule parts the rows"
    assert [found.get("class") for found, _ in page.all("tr")] == [None, None, "em"]


@pytest.mark.parametrize("rows", [[], [None], [None, {"a": 1}, None, None]])
def test_tables_of_few_rows_and_of_rules_only(rows):
    page = Page(render(document(Table("t", rows, ("a",)))))
    assert len(page.all("tr")) == 1 + sum(row is not None for row in rows)


@pytest.mark.parametrize(
    ("text", "code"),
    [("a `b` c", ["b"]), ("a ` b", []), ("`a``b`", ["a", "b"]), ("`a\nb`", []), ("``", []), ("`a` `b", ["a"])],
)
def test_words_between_backticks_are_code(text, code):
    page = Page(render(document(Text(text))))
    assert [text for _, text in page.all("code")] == code


def test_films_have_a_still_and_pictures_none():
    (film,), (still,) = (Page(render(document(Picture(FILM, "film")))).all(tag) for tag in ("img", "source"))
    kind, _, data = film[0]["src"].partition(",")
    assert kind == "data:image/webp;base64" and base64.b64decode(data) == FILM
    assert "prefers-reduced-motion" in still[0]["media"]
    data = base64.b64decode(still[0]["srcset"].partition(",")[2])
    with Image.open(io.BytesIO(data)) as first, Image.open(io.BytesIO(FILM)) as frames:
        np.testing.assert_array_equal(np.asarray(first), np.asarray(frames.convert("RGB")))
    assert not Page(render(document(Picture(PICTURE, "picture")))).all("source")
    gif = Page(render(document(Picture(pixels((8, 8), (8, 8), kind="GIF"), "gif"))))
    assert gif.all("img")[0][0]["src"].startswith("data:image/gif;") and gif.all("source")


@pytest.mark.parametrize(
    ("size", "sharp", "shown"),
    [
        ((16, 16), True, (128, 128)),
        ((100, 50), True, (300, 150)),
        ((500, 9), True, (500, 9)),
        ((16, 16), False, (16, 16)),
    ],
)
def test_sharp_pictures_are_enlarged_by_whole_pixels(size, sharp, shown):
    ((image, _),) = Page(render(document(Picture(pixels(size, kind="PNG"), "x", sharp=sharp)))).all("img")
    assert (image["width"], image["height"]) == tuple(map(str, shown))
    assert ("sharp" in image["class"]) == sharp


@pytest.mark.parametrize("data", [b"", b"no picture", PICTURE[:60], pixels((4, 4), kind="BMP"), b"<svg/>"])
def test_what_is_no_picture_is_named_and_nothing_is_written(tmp_path, data):
    path = tmp_path / "report.html"
    path.write_text("before")
    with pytest.raises(UsageError, match="the film of runs/a"):
        write_html(document(Picture(data, "the film of runs/a")), path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_names_that_cannot_be_anchors_are_refused():
    table = Table("t", [], ("a",))
    for blocks in ((Table("a b", [], ("a",)),), (table, table), (table, Fold("x", (Row((table,)),)))):
        with pytest.raises(ValueError, match="name 'a b'|name 't' occurs 2"):
            render(document(*blocks))
    with pytest.raises(ValueError, match="name"):
        render(Document("", "", (Section('"><', "", ()),)))
    with pytest.raises(ValueError, match="width"):
        render(document(Drawing("<svg></svg>", "x")))


def test_text_that_no_encoding_holds_is_written_with_a_mark(tmp_path):
    write_html(document(Text("runs/\udcff \x00")), tmp_path / "report.html")
    assert "runs/? " in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_text_has_enough_contrast_in_both_themes():
    css = Path(sys.modules[render.__module__].__file__ or "").with_name("page.css").read_text(encoding="utf-8")
    themes = re.findall(r"color-scheme: (\w+);\s*(--paper.+?);\s*(--c0.+?);\s*}", css, re.DOTALL)
    assert [name for name, *_ in themes] == ["light", "dark", "dark"] and themes[1] == themes[2]

    def luminance(color: str) -> float:
        channels = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for _, colors, _ in themes[:2]:
        values = {name: luminance(color) for name, color in re.findall(r"--(\w+): (#\w{6})", colors)}
        for text, ground in itertools.product(("ink", "muted", "accent"), ("paper", "panel")):
            high, low = sorted((values[text], values[ground]), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_the_page_is_installed_with_the_package():
    settings = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"wmcli.report" = ["*.html", "*.css", "*.js"]' in settings


def test_all_pages_have_one_palette():
    """The report and the pages of a server are no users of each other, so each has its own list."""

    def palette(package: str, file: str) -> list[tuple[str, str]]:
        style = resources.files(package).joinpath(file).read_text(encoding="utf-8")
        names = "paper|panel|ink|muted|line|accent|amber|c[0-6]"
        return sorted(set(re.findall(rf"--({names}): ?(#[0-9a-f]+)", style)))

    ours, theirs = palette("wmcli.report", "page.css"), palette("wmcli.browser", "style.css")
    assert ours == theirs and len(ours) == 2 * 14


# -- in a browser -----------------------------------------------------------------------------------------------------

in_browser = pytest.mark.slow


@functools.cache
def long_document() -> Document:
    rng = np.random.default_rng(0)
    runs = [
        {"run": f"runs/a-rather-long-name-{n}", "score": float(rng.normal()), "bytes": f"{n + 1} kB"} for n in range(45)
    ]
    wide = [{f"column_{n}_of_many": float(rng.normal()) for n in range(20)}]
    blocks = every_block("word " * 30 + "a" * 200)
    return document(
        *blocks,
        Table("exact", EXACT, ("name", "seed", "score", "low", "ok"), "Exact"),
        Table("runs", runs, ("run", "score", "bytes"), "Runs"),
        Table("wide", wide, tuple(wide[0]), "Wide"),
        text="Report " + "b" * 120,
    )


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open a document from a file. At the end nothing was requested from elsewhere and nothing went wrong."""
    path, contexts, problems = tmp_path / "report.html", [], []

    def visit(page: Document | None = None, **options: Any) -> Any:
        write_html(page or long_document(), path)
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(dialog.message))
        tab.on(
            "request",
            lambda sent: None if sent.url.startswith(("file:", "data:", "blob:")) else problems.append(sent.url),
        )
        tab.goto(path.as_uri())
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert not problems


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_a_page_fits_its_window(visit, width, scheme):
    tab = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.evaluate("document.querySelectorAll('main details').forEach((fold) => { fold.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    inside = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth"
    assert tab.evaluate(f"{inside} && !e.closest('.scroll')).map((e) => e.outerHTML.slice(0, 80))") == []
    wide = tab.locator("#table-wide .scroll")
    assert wide.evaluate("(box) => box.scrollWidth > box.clientWidth"), "a wide table scrolls in its box"
    wide.evaluate("(box) => { box.scrollLeft = 300; }")
    box, first = wide.bounding_box(), wide.locator("tbody th").bounding_box()
    assert first["x"] == pytest.approx(box["x"], abs=1), "and its first column stays"
    assert tab.locator("nav li").first.is_visible() == (width > 1000)
    for name in ("first", "second"):
        tab.evaluate(f"document.querySelector('#{name}').scrollIntoView({{behavior: 'instant'}})")
        tab.locator(f"nav a[href='#{name}'][aria-current=true]").wait_for(state="attached", timeout=3000)
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 20, 24)"}[scheme]
    sharp = tab.locator("img.sharp")
    assert sharp.evaluate("(image) => getComputedStyle(image).imageRendering") == "pixelated"
    scale = sharp.evaluate("(image) => image.getBoundingClientRect().width / image.naturalWidth")
    assert scale == {1280: 4, 360: 3}[width], "whole pixels"


@in_browser
def test_downloads_are_the_exact_rows(visit):
    tab = visit(accept_downloads=True)

    def download(name: str) -> str:
        with tab.expect_download() as started:
            tab.locator("#table-exact").get_by_role("button", name=f"{name} of exact").click()
        assert started.value.suggested_filename == f"exact.{name.lower()}"
        return Path(started.value.path()).read_bytes().decode()

    assert download("CSV") == csv_text(EXACT, ("name", "seed", "score", "low", "ok")) + "\n"
    assert json.loads(download("JSON")) == [row for row in EXACT if row is not None]


@in_browser
def test_tables_are_sorted_and_unfolded(visit):
    tab = visit()
    table = tab.locator("#table-runs")
    rows = list(long_document().sections[0].blocks[-2].rows)  # type: ignore[union-attr]

    def shown() -> list[str]:
        return table.locator("tbody th:visible").all_text_contents()

    def named(ordered: list[Any]) -> list[str]:
        return [row["run"] for row in ordered]

    assert shown() == named(rows[:30])
    table.get_by_role("button", name="score").click()
    assert table.locator("thead th").nth(1).get_attribute("aria-sort") == "descending"
    by_score = sorted(rows, key=lambda row: row["score"])
    assert shown() == named(by_score[::-1][:30])
    table.get_by_role("button", name="Show all 45 rows").click()
    assert shown() == named(by_score[::-1])
    table.get_by_role("button", name="score").click()
    assert shown() == named(by_score)
    table.get_by_role("button", name="bytes").click()
    assert shown() == named(rows[::-1]), "numbers with their unit"
    table.get_by_role("button", name="bytes").press("Enter")
    assert shown() == named(rows), "by keyboard"
    table.get_by_role("button", name="score").press(" ")
    table.get_by_role("button", name="run", exact=True).click()
    assert shown() == named(rows), "2 before 10"
    assert table.locator("thead [aria-sort]").count() == 1
    table.get_by_role("button", name="Show 30 rows").click()
    assert len(shown()) == 30


@in_browser
def test_rules_stay_and_empty_cells_sort_last(visit):
    rows = [{"n": 2}, {"n": None}, {"n": 10}, None, {"n": 99}]
    tab = visit(document(Table("t", rows, ("n",))))
    for expected in (["10", "2", "-", "99"], ["2", "10", "-", "99"]):
        tab.get_by_role("button", name="n", exact=True).click()
        assert tab.locator("tbody th").all_text_contents() == expected


@in_browser
def test_the_theme_is_chosen_and_remembered(visit):
    tab = visit(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    tab.get_by_role("button", name="Dark").click()
    assert tab.evaluate(ground) == "rgb(17, 20, 24)"
    tab.reload()
    assert tab.evaluate(ground) == "rgb(17, 20, 24)"
    tab.get_by_role("button", name="Light").click()
    assert tab.evaluate(ground) == "rgb(255, 255, 255)"


@in_browser
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_films_pause(visit, motion):
    tab = visit(reduced_motion=motion)
    film = tab.locator("figure.film img")
    still = film.evaluate("(image) => image.currentSrc.startsWith('data:image/png')")
    assert still == (motion == "reduce")
    tab.get_by_role("button", name="Play" if still else "Pause").click()
    tab.wait_for_function(
        f"document.querySelector('figure.film img').currentSrc.startsWith('data:image/png') != {str(still).lower()}"
    )
    assert tab.get_by_role("button", name="Pause the film" if still else "Play the film").is_visible()


@in_browser
def test_paper_shows_what_is_folded_and_no_buttons(visit):
    tab = visit(color_scheme="dark")
    assert not tab.get_by_text("hidden", exact=True).is_visible()
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.get_by_text("hidden", exact=True).is_visible()
    assert tab.locator("#table-runs tbody th:visible").count() == 45
    assert tab.locator("button:visible").count() == 0
    assert tab.locator("#table-runs thead").is_visible()
    assert not tab.locator("nav").is_visible()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.emulate_media(media="screen")
    assert not tab.get_by_text("hidden", exact=True).is_visible()
    assert len(tab.pdf(format="A4")) > 10_000


@in_browser
def test_commands_are_copied_as_they_are(visit):
    lines = ("wm run a --set b=c", "wm eval  --run 'x y'")
    tab = visit(document(Commands(lines)), permissions=["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy").click()
    tab.get_by_role("button", name="Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == "\n".join(lines) + "\n"


@in_browser
def test_all_can_be_read_without_javascript(visit):
    tab = visit(java_script_enabled=False)
    assert tab.locator("#table-runs tbody th:visible").count() == 45
    assert tab.locator("button").count() == 0
    assert tab.locator("figure.drawing svg").is_visible()
