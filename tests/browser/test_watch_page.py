"""The page of `wm watch` in Chromium, over small run directories that change under it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("websockets")
pytest.importorskip("playwright.sync_api")
from serving import Running, serving

from wmcli.artifacts import Run
from wmcli.artifacts.lock import exclusive
from wmcli.browser.page import page as page_of
from wmcli.stages import watch as module
from wmcli.stages.watch import Watch, WatchSession

pytestmark = pytest.mark.slow
PHONE = {"width": 360, "height": 740}
ODD = "<img src=x onerror=alert(1)>&amp; #50%"
SETTINGS = {"seed": 3, "environment": {"id": "wm/Catch-v0"}, "run": {"epochs": 2}}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE", 20.0)
    monkeypatch.setattr(module, "LOOK_SHARE", 1.0)


def publish(run: Run, kind: str, metrics: dict[str, Any], epoch: int, film: int | None = None) -> None:
    with run.job(kind, {"epoch": epoch}, {}).work() as work:
        if film is None:
            (work.payload / "data.bin").write_bytes(b"12345")
        else:
            frames = [Image.fromarray(np.full((8, 12, 3), film + shade, np.uint8)) for shade in (0, 40)]
            frames[0].save(work.payload / "imagination.webp", save_all=True, append_images=frames[1:], lossless=True)
        work.publish(settings=SETTINGS, metrics=metrics, environment=None, machine={}, extra={"epoch": epoch})


def score(run: Run, epoch: int, mean: float) -> None:
    metrics = {"protocol": "returns", "mean": mean, "stderr": 0.25, "episodes": 9, "total_steps": 70 * epoch}
    publish(run, "evaluation", metrics, epoch, film=100 * epoch)


def log(run: Run, updates: range, process: int = 0, value: float = 1.0) -> None:
    for update in updates:
        at = f"2024-05-01T{10 + process}:{update // 60:02d}:{update % 60:02d}+00:00"
        about = {
            "stage": "train-dynamics",
            "job": "j",
            "epoch": 1,
            "time": at,
            "began": f"2024-05-01T{10 + process}:00:00+00:00",
        }
        run.log({**about, "update": update, "loss": value * update, "kl_loss": -1.0, "environment_step": 70})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, one that logs, and one with a hostile name."""
    for name, preset, epochs in (("done", "rem", 2), ("live", "drama", 1), (ODD, "<b>x</b>", 0)):
        run = Run.open(tmp_path / "runs" / name, create=True)
        run.bind(preset, SETTINGS)
        log(run, range(1, 41))
        for epoch in range(1, epochs + 1):
            publish(run, "experience", {"total_steps": 70 * epoch, "mean_return": 1.5}, epoch)
            score(run, epoch, -float(epoch))
    return tmp_path / "runs"


@contextmanager
def opened(browser: Any, folder: Path, run: str = "", **context: Any) -> Iterator[tuple[Any, Running]]:
    """Open the page; at the end nothing was complained of, and nothing was asked of another server."""
    watch = Watch([folder])
    with serving(lambda: WatchSession(watch, "runs"), page_of("watch")) as running:
        scope = browser.new_context(**context)
        page = scope.new_page()
        faults: list[str] = []
        asked: list[str] = []
        page.on("console", lambda it: faults.append(it.text) if it.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        host = running.host
        page.goto(running.address + (f"#{run}" if run else ""))
        wait(page, "document.querySelectorAll('#counts > *').length")
        yield page, running
        assert faults == []
        assert all(url.startswith((f"http://{host}/", "data:")) for url in asked)
        scope.close()


def shown(page: Any) -> dict[str, str]:
    """The names of the runs, in order, with their states."""
    read = "(tr) => ['name', 'status'].map((key) => tr.querySelector('td.' + key).innerText)"
    return dict(page.evaluate(f"[...document.querySelectorAll('#runs tbody tr')].map({read})"))


def wait(page: Any, condition: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):  # the page's policy forbids what `wait_for_function` does
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(30)


def curve(page: Any, metric: str) -> str:
    """The path of a metric's curve."""
    return str(
        page.locator(".metric", has=page.locator("h4", has_text=re.compile(f"^{metric}")))
        .locator("path.curve")
        .last.get_attribute("d")
    )


def scrolls_sideways(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_the_overview_follows_runs_and_finds_them(browser: Any, folder: Path) -> None:
    with opened(browser, folder) as (page, _):
        assert shown(page) == {ODD: "idle", "live": "idle", "done": "finished"}
        with exclusive(folder / "live" / "evaluation", "x"):
            wait(page, "document.querySelector('#runs tbody tr td.status').innerText === 'running'")
            assert list(shown(page)) == ["live", ODD, "done"] and page.title() == "1 running – wm watch"
            assert "1 running" in page.locator("#counts").inner_text()
        wait(page, "document.title === 'wm watch'")
        page.locator("#filter").fill("drama wm/catch")
        assert list(shown(page)) == ["live"] and page.locator("#matches").inner_text() == "1 of 3"
        page.locator("#filter").fill("")
        page.get_by_role("button", name="score").click()
        assert list(shown(page)) == ["live", "done", ODD]
        page.get_by_role("button", name="score").click()
        assert list(shown(page)) == [ODD, "done", "live"]
        assert page.locator("th[aria-sort=ascending]").inner_text().startswith("score")
        assert page.locator("th[data-key=attempts]").is_hidden(), "nothing is known of it"
        shutil.rmtree(folder / "done")
        wait(page, "document.querySelectorAll('#runs tbody tr').length === 2")


def test_a_run_grows_and_vanishes_under_the_page(browser: Any, folder: Path) -> None:
    run = Run.open(folder / "live", create=False)
    with opened(browser, folder) as (page, _):
        page.locator("td.name", has_text="live").click()
        wait(page, "document.querySelector('.metric path.curve')")
        assert page.locator("#name").inner_text() == "live" and page.locator("#status").inner_text() == "idle"
        assert page.locator("#notes code").inner_text().startswith("wm run --run ")
        before = curve(page, "loss")
        assert before.count("L") == 39
        log(run, range(41, 61))
        wait(page, "document.querySelector('.metric path.curve').getAttribute('d').split('L').length === 60")
        log(run, range(50, 56), process=1, value=2.0)
        wait(page, "document.querySelector('.metric path.curve').getAttribute('d').split('L').length === 55")
        assert "train-dynamics resumed after" in page.locator("#events").inner_text()
        plain = curve(page, "loss")
        page.locator("#log").check()
        logarithmic = curve(page, "loss")
        assert logarithmic != plain
        page.locator("#smoothing").evaluate("it => { it.value = 0.9; it.dispatchEvent(new Event('input')); }")
        assert curve(page, "loss") not in (plain, logarithmic) and page.locator("path.faint").count() >= 1
        page.locator("#metrics").fill("kl")
        assert page.locator(".metric:visible h4").all_inner_texts()[0].startswith("kl loss")
        film = page.locator("#film img").get_attribute("src")
        score(run, 2, 0.5)
        wait(page, "document.querySelector('#returns-note').textContent.startsWith('2 evaluations of 9 episodes')")
        assert film is not None and film.startswith("data:image/webp;base64,")
        assert page.locator("#film img").get_attribute("src") != film
        assert page.locator("#film img").evaluate("it => [it.naturalWidth, it.naturalHeight]") == [12, 8]
        page.locator("#over").select_option("minutes")
        shutil.rmtree(folder / "live")
        wait(page, "document.querySelector('#status').innerText === 'deleted'")
        assert "was deleted" in page.locator("#notes").inner_text() and page.locator(".metric").count() == 2
        page.keyboard.press("Escape")  # leaves the selection
        page.keyboard.press("Escape")
        wait(page, "!document.querySelector('#overview').hidden")
        assert "live" not in shown(page)


def test_names_are_only_text_and_the_address_leads_to_a_run(browser: Any, folder: Path) -> None:
    with opened(browser, folder) as (page, _):
        page.locator("td.name a").first.click()
        wait(page, "document.querySelector('.metric path.curve')")
        assert page.locator("#name").inner_text() == ODD and page.locator("img[src=x]").count() == 0
        assert "<b>x</b>" in page.locator("#facts").inner_text()
        page.reload()
        wait(page, "document.querySelector('.metric path.curve')")
        assert page.locator("#name").inner_text() == ODD
        page.go_back()
        wait(page, "!document.querySelector('#overview').hidden")
    with opened(browser, folder, "later") as (page, _):
        wait(page, "document.querySelector('#notes').innerText.includes('appears here when it begins')")
        shutil.copytree(folder / "done", folder / "later")
        wait(page, "document.querySelector('.metric path.curve')")
        assert page.locator("#status").inner_text() == "finished"


def test_a_server_that_is_gone_is_told(browser: Any, folder: Path) -> None:
    with opened(browser, folder) as (page, running):
        assert page.locator("#fresh").inner_text() == "live"
        running.stop()
        wait(page, "/^not updated since [0-9:]{8}$/.test(document.querySelector('#fresh').innerText)")
        assert list(shown(page)) == [ODD, "live", "done"], "what was known stays"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Any, folder: Path, scheme: str) -> None:
    shutil.copytree(folder / "done", folder / ("long-name-" * 12))
    with opened(browser, folder, viewport=PHONE, color_scheme=scheme) as (page, _):
        assert not scrolls_sideways(page) and page.locator("#runs thead").is_hidden()
        assert page.locator("#order").is_visible() and page.locator("#runs td.score").last.is_visible()
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert color == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 20, 24)"}[scheme]
        page.get_by_title("Light or dark").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != color
        page.locator("td.name", has_text="long-name").click()
        assert not scrolls_sideways(page)
        wait(page, "document.querySelector('.metric')")
        page.evaluate("document.querySelector('#stages').scrollIntoView()")  # curves are drawn when they are in view
        wait(page, "document.querySelector('.metric path.curve')")
        assert not scrolls_sideways(page)


def test_a_hundred_and_thirty_runs_are_drawn_fast(browser: Any, folder: Path) -> None:
    for number in range(130):
        shutil.copytree(folder / "done", folder / "many" / f"seed-{number}")
    with opened(browser, folder / "many") as (page, _):
        wait(page, "document.querySelectorAll('#runs tbody tr').length === 130")
        assert list(shown(page))[:3] == ["seed-0", "seed-1", "seed-2"] and list(shown(page))[-1] == "seed-129"
        took = page.evaluate(
            """(() => {
                const began = performance.now();
                document.querySelector("#filter").dispatchEvent(new Event("input"));
                document.body.offsetHeight;
                return performance.now() - began;
            })()"""
        )
        assert took < 200, f"{took} ms"
