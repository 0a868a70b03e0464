"""Make the pictures of the pages of wm from runs: report.png, play.webp and watch.png.

    wm run quickstart --run runs/catch
    python docs/pictures.py --run runs/catch --runs runs --out docs

It needs `pip install 'wmcli[browser]' playwright` and a Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

SIZE = {"width": 1280, "height": 800}
FRAMES_A_SECOND = 8


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run a command that serves a page, and yield its address."""
    command = [sys.executable, "-m", "wmcli", *arguments, "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
    finally:
        process.terminate()
        process.communicate()


def page_at(browser: Browser, address: str, wait: str, **context: Any) -> Page:
    """Open a page and wait for an element of it."""
    page = browser.new_context(viewport=SIZE, color_scheme="light", **context).new_page()
    page.goto(address)
    page.wait_for_selector(wait)
    return page


def picture_of_report(browser: Browser, run: Path, out: Path) -> None:
    """Take the top of a report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "wmcli", "report", str(run), "--out", str(file), "-q"], check=True)
        page = page_at(browser, file.as_uri(), "main")
        page.wait_for_timeout(500)
        page.screenshot(path=out, full_page=True, clip={"x": 0, "y": 0, **SIZE, "height": 1500})


def film_of_play(browser: Browser, run: Path, out: Path) -> None:
    """Film some seconds of a dream beside the environment, which branches on the way."""
    with served("play", "--run", str(run), "--browser") as address:
        page = page_at(browser, address, "article.card canvas")
        send = "request => wm.send(request)"
        page.evaluate(send, {"do": "options", "mode": "turns"})
        page.evaluate(send, {"do": "actor", "pane": None, "actor": "dreamer"})
        page.evaluate(send, {"do": "restart", "seed": 3})
        frames = []
        for step in range(40):
            if step == 16:
                page.evaluate(send, {"do": "branch", "pane": 0})
                page.evaluate(send, {"do": "actor", "pane": 1, "actor": {"action": 0}})
            page.evaluate(send, {"do": "step"})
            page.wait_for_timeout(150)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize((960, 600)))
    duration = 1000 // FRAMES_A_SECOND
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=80, method=6)


def picture_of_watch(browser: Browser, runs: Path, name: str, out: Path) -> None:
    """Take the page of one run among those below a folder."""
    with served("watch", str(runs)) as address:
        page = page_at(browser, address, "td.name a")
        page.locator("td.name a", has_text=name).first.click()
        page.wait_for_selector(".metric path.curve")
        page.wait_for_timeout(1500)
        page.screenshot(path=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished run of quickstart")
    parser.add_argument("--runs", type=Path, required=True, help="the folder of runs to watch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        picture_of_report(browser, given.run, given.out / "report.png")
        film_of_play(browser, given.run, given.out / "play.webp")
        picture_of_watch(browser, given.runs, given.run.name, given.out / "watch.png")
        browser.close()


if __name__ == "__main__":
    main()
