"""The page of `wm play --browser` in Chromium, with a session without models behind it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("playwright.sync_api")
from fake_play import FakePlay
from serving import Running, serving

from wmcli.browser.page import page as page_of

pytestmark = pytest.mark.slow
PHONE = {"width": 390, "height": 844}


class Opened:
    """A page that is connected, and the session behind it."""

    def __init__(self, page: Any, running: Running, session: FakePlay) -> None:
        self.page, self.running, self.session = page, running, session

    def view(self) -> dict[str, Any]:
        return self.page.evaluate("wm.view")

    def wait(self, condition: Callable[[], Any], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.page.wait_for_timeout(20)

    def acts(self) -> list[tuple[Any, bool]]:
        return [(each["action"], each["hold"]) for each in self.session.received if each["do"] == "act"]

    def done(self) -> list[dict[str, Any]]:
        """What else was asked for."""
        return [{k: v for k, v in each.items() if k != "id"} for each in self.session.received if each["do"] != "act"]


@contextmanager
def opened(browser: Any, kind: str = "discrete", **context: Any) -> Iterator[Opened]:
    """Open the page; at the end nothing was complained of, and nothing was asked of another server."""
    made: list[FakePlay] = []

    def open_session() -> FakePlay:
        made.append(FakePlay(kind))
        return made[-1]

    with serving(open_session, page_of("play")) as running:
        scope = browser.new_context(**context)
        page = scope.new_page()
        faults: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(running.address)
        page.wait_for_selector("article.card canvas:visible")
        yield Opened(page, running, made[0])
        assert faults == []
        assert all(url.startswith((f"http://{running.host}/", "data:")) for url in asked)
        scope.close()


def slide(slider: Any, value: float) -> None:
    """Move a slider and let go."""
    events = "it.dispatchEvent(new Event('input')); it.dispatchEvent(new Event('change'));"
    slider.evaluate(f"(it, value) => {{ it.value = value; {events} }}", value)


def pixels(page: Any, pane: str) -> np.ndarray:
    """The pixels that a card shows (H, W, 3), as its canvas has them."""
    width, height, data = page.evaluate(
        """(pane) => {
            const canvas = document.querySelector(`article[data-pane="${pane}"] .screen canvas`);
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return [canvas.width, canvas.height, [...data]];
        }""",
        pane,
    )
    return np.array(data, np.uint8).reshape(height, width, 4)[..., :3]


def test_frames_are_drawn_exactly_and_scaled_by_whole_pixels(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 1)
        it.page.wait_for_timeout(100)
        _, frames = it.session._view()
        np.testing.assert_array_equal(pixels(it.page, "null"), frames[0])
        np.testing.assert_array_equal(pixels(it.page, "0"), frames[1])
        assert not np.array_equal(frames[0], frames[1])
        for pane in ("null", "0"):
            canvas = it.page.locator(f"article[data-pane='{pane}'] .screen canvas").first
            box = canvas.bounding_box()
            scale = box["width"] / 64
            assert scale == int(scale) >= 2 and box["height"] == 48 * scale
            assert canvas.evaluate("canvas => getComputedStyle(canvas).imageRendering") == "pixelated"


def test_a_pane_without_picture_shows_its_tree(browser: Any) -> None:
    with opened(browser) as it:
        card = it.page.locator("article[data-pane='1']")
        assert card.get_by_text("decodes no frames").is_visible()
        assert not card.locator(".screen > canvas").is_visible()
        nodes = it.view()["panes"][1]["search"]["nodes"]
        assert len(nodes) > 80
        assert card.locator("svg.tree circle").count() == 80
        line = it.view()["panes"][1]["search"]["line"]
        assert card.locator("svg.tree circle.line").count() == len(line)
        card.locator("svg.tree circle.line").last.hover()
        assert card.locator(".search .words").inner_text() == "root: 120 visits, value 0.400, prior 1"
        amber = card.locator("path.edge.line").first.evaluate("path => getComputedStyle(path).stroke")
        assert amber == "rgb(179, 107, 0)"


def test_bars_and_numbers_are_those_of_the_view(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 1)
        it.page.wait_for_timeout(100)
        pane = it.view()["panes"][0]
        card = it.page.locator("article[data-pane='0']")
        rows = card.locator(".bars.percents .bar").all_inner_texts()
        names = ["STAY", "NORTH", "EAST", "SOUTH", "WEST", "TOGGLE"]
        assert [row.split("\n")[0] for row in rows] == names
        assert [int(row.split("\n")[1].split()[0]) for row in rows] == [round(100 * p) for p in pane["policy"]]
        meters = dict(text.split("\n") for text in card.locator(".meter:visible").all_inner_texts())
        assert meters["Value"] == f"{pane['value']:.2f}" and meters["P(end)"] == f"{pane['termination']:.4f}"
        cell = card.locator("canvas.cells")
        box = cell.bounding_box()
        cell.hover(position={"x": box["width"] * 2.5 / 8, "y": box["height"] * 1.5 / 8})
        code = pane["latent"]["values"][10]
        assert card.locator(".latent .words").inner_text() == f"row 1, column 2: code {code} of 512"


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_held_key_holds_and_no_repeats_are_sent(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press(" ")
        it.wait(lambda: it.view()["playing"])
        it.page.keyboard.down("ArrowRight")
        for _ in range(5):
            it.page.keyboard.down("ArrowRight")  # as the keyboard repeats it
        it.wait(lambda: it.view()["real"]["action"] == 2)
        began = it.view()["time"]
        it.wait(lambda: it.view()["time"] > began + 2)
        assert it.view()["real"]["action"] == 2
        it.page.keyboard.up("ArrowRight")
        it.wait(lambda: it.view()["real"]["action"] is None)
        assert it.acts() == [(2, True), (None, True)]


def test_a_tap_between_two_steps_counts_once(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press("ArrowUp")  # down and up, and no step between
        it.wait(lambda: len(it.acts()) == 2)
        assert it.acts() == [(1, True), (None, True)]
        actions = []
        for step in (1, 2):
            it.page.keyboard.press(".")
            it.wait(lambda step=step: it.view()["time"] == step)
            actions.append(it.view()["real"]["action"])
        assert actions == [1, None]


def test_keys_that_are_held_together_are_one_action(browser: Any) -> None:
    names = FakePlay("atari").actions["names"]
    with opened(browser, "atari") as it:
        it.page.keyboard.press("p")
        it.wait(lambda: it.view()["playing"])
        for key, name in (("ArrowUp", "UP"), ("ArrowRight", "UPRIGHT"), (" ", "UPRIGHTFIRE")):
            it.page.keyboard.down(key)
            it.wait(lambda name=name: it.view()["real"]["action"] == names.index(name))
        it.page.keyboard.down("ArrowDown")  # the newer one of two opposites
        it.wait(lambda: it.view()["real"]["action"] == names.index("DOWNRIGHTFIRE"))
        for key in ("ArrowDown", "ArrowUp", "ArrowRight"):
            it.page.keyboard.up(key)
        it.wait(lambda: it.view()["real"]["action"] == names.index("FIRE"))
        it.page.evaluate("dispatchEvent(new Event('blur'))")
        it.wait(lambda: it.view()["real"]["action"] is None)
        assert it.acts()[-1] == (None, True)


def test_a_short_chord_counts_as_one(browser: Any) -> None:
    names = FakePlay("atari").actions["names"]
    with opened(browser, "atari") as it:
        for key in ("ArrowUp", " "):
            it.page.keyboard.down(key)
        for key in (" ", "ArrowUp"):
            it.page.keyboard.up(key)
        it.wait(lambda: it.acts() and it.acts()[-1] == (None, True))
        assert it.acts()[-2] == (names.index("UPFIRE"), True), "which counts for one step at least"


def test_in_turns_each_key_is_one_step(browser: Any) -> None:
    with opened(browser, "atari") as it:
        it.page.locator("#mode").select_option("turns")
        it.wait(lambda: it.view()["options"]["mode"] == "turns")
        it.page.keyboard.press("ArrowUp")
        it.wait(lambda: it.view()["time"] == 1)
        for key in ("ArrowUp", "ArrowRight"):
            it.page.keyboard.down(key)
        it.wait(lambda: it.view()["time"] == 2)
        for key in ("ArrowUp", "ArrowRight"):
            it.page.keyboard.up(key)
        it.page.wait_for_timeout(150)
        names = it.session.actions["names"]
        assert it.acts() == [(names.index("UP"), False), (names.index("UPRIGHT"), False)]


KEYS = """(names) => {
    const map = keys.map(names), ids = Object.fromEntries(map.list.map(({ id, name }) => [name, id]));
    return { ids, usesSpace: map.usesSpace, chords: map.chords,
             of: (map.list.map(({ id }) => map.actionOf([id]))), list: map.list.map(({ name }) => name) };
}"""


def test_actions_of_other_environments_have_keys(browser: Any) -> None:
    with opened(browser) as it:
        moves = ["noop", *(f"move_{way}" for way in ("left", "right", "up", "down")), "do", "sleep"]
        places = [f"place_{thing}" for thing in ("stone", "table", "furnace", "plant")]
        tools = [f"make_{stuff}_{tool}" for tool in ("pickaxe", "sword") for stuff in ("wood", "stone", "iron")]
        crafter = [*moves, *places, *tools]
        found = it.page.evaluate(KEYS, crafter)
        assert found["ids"]["move_left"] == "ArrowLeft" and found["ids"]["do"] == " " and found["usesSpace"]
        assert len(set(found["ids"].values())) == 17 and not set(found["ids"].values()) & set("bworp")
        assert [crafter[action] for action in found["of"]] == found["list"]  # each key does what stands on it
        mazes = it.page.evaluate(KEYS, ["NOOP", "FORWARD", "LEFT", "RIGHT", "FORWARD_LEFT", "FORWARD_RIGHT"])
        assert mazes["ids"]["FORWARD"] == "ArrowUp" and mazes["chords"] and len(mazes["ids"]) == 4
        doors = it.page.evaluate(KEYS, ["LEFT", "RIGHT", "FORWARD", "PICKUP", "TOGGLE", "NOOP"])
        assert doors["ids"] | {"PICKUP": "g", "TOGGLE": "t", "NOOP": "n", "FORWARD": "ArrowUp"} == doors["ids"]
        numbers = it.page.evaluate(KEYS, [str(n) for n in range(3)])
        assert numbers["ids"] == {"0": "0", "1": "1", "2": "2"} and not numbers["usesSpace"]
        many = it.page.evaluate(KEYS, [f"action {n}" for n in range(60)])
        assert len(many["list"]) == 60 and many["of"] == list(range(60))


def test_keys_in_fields_and_dialogs_do_not_play(browser: Any) -> None:
    with opened(browser) as it:
        it.page.locator("#horizon").fill("7")
        it.page.locator("#horizon").press("ArrowUp")
        it.page.locator("#horizon").press("Enter")
        it.wait(lambda: it.view()["options"]["horizon"] == 8)
        it.page.keyboard.press("?")
        assert it.page.locator("#helping").is_visible()
        it.page.keyboard.press("ArrowUp")
        it.page.keyboard.press("r")
        it.page.keyboard.press("Escape")
        assert not it.page.locator("#helping").is_visible()
        assert it.acts() == [] and [each["do"] for each in it.done()] == ["options"]


def test_after_a_click_or_a_choice_keys_play_again(browser: Any) -> None:
    with opened(browser) as it:
        it.page.locator("#restart").click()
        it.page.keyboard.press(" ")
        it.wait(lambda: len(it.done()) == 2)
        it.page.locator("#rate").focus()
        it.page.locator("#rate").select_option("30")
        it.page.keyboard.press("ArrowUp")
        it.wait(lambda: it.acts() and it.acts()[0] == (1, True))
        assert [each["do"] for each in it.done()] == ["restart", "play", "options"]
        it.page.locator("#restart").focus()  # by the keyboard: it is the button's
        it.page.keyboard.press(" ")
        it.wait(lambda: len(it.done()) == 4)
        assert it.done()[-1] == {"do": "restart", "seed": None}


# -- controls ----------------------------------------------------------------------------------------------------------


def test_branch_back_goto_wake_and_close(browser: Any) -> None:
    with opened(browser) as it:
        for step in range(1, 13):
            it.page.keyboard.press(".")
            it.wait(lambda step=step: it.view()["time"] == step)
        it.page.keyboard.press("b")
        it.wait(lambda: len(it.view()["panes"]) == 3)
        assert it.view()["actor"] == "dreamer" and it.view()["panes"][2]["actor"] == "you"
        it.page.wait_for_timeout(100)
        assert it.page.locator("article[data-pane='2'] select").input_value() == "you"
        assert it.page.locator("article[data-pane='null'] select").input_value() == "dreamer"
        it.page.locator("article[data-pane='2'] button[aria-label='Close this dream']").click()
        it.wait(lambda: len(it.view()["panes"]) == 2)
        it.page.keyboard.press(",")
        it.wait(lambda: it.view()["time"] == 11)
        slider = it.page.locator("#time")
        slide(slider, 4)
        it.wait(lambda: it.view()["time"] == 4)
        it.page.wait_for_timeout(100)
        assert it.page.locator("#clock").inner_text() == "step 4 of 12"
        slide(slider, 12)  # what was ahead is kept
        it.wait(lambda: it.view()["time"] == 12)
        it.page.keyboard.press("w")
        it.wait(lambda: [pane["age"] for pane in it.view()["panes"]] == [0, 0])
        it.page.keyboard.press("r")
        it.wait(lambda: it.view()["time"] == 0)
        assert it.done()[-1] == {"do": "restart", "seed": None}


def test_the_small_charts_follow_time_and_history(browser: Any) -> None:
    with opened(browser) as it:
        for step in range(1, 15):
            it.page.keyboard.press(".")
            it.wait(lambda step=step: it.view()["time"] == step)
        track = it.page.evaluate("wm.tracks[0]")
        assert [each["time"] for each in track] == list(range(15))
        assert [each["reward"] for each in track] == [float(step == 12) for step in range(15)]
        slide(it.page.locator("#time"), 4)
        it.wait(lambda: it.view()["time"] == 4)
        past = "wm.tracks[0].slice(0, -1)"  # before the view that came with it
        it.wait(lambda: it.page.evaluate(f"{past}.every(each => each.entropy === null)"))
        for pane in ("0", "1", "null"):
            assert [each["time"] for each in it.page.evaluate(f"wm.tracks['{pane}']")] == list(range(5))
        values = [2 + np.sin(step / 9) for step in range(5)]
        np.testing.assert_allclose([each["value"] for each in it.page.evaluate("wm.tracks[0]")], values)
        drawn = it.page.locator("article[data-pane='0'] canvas.spark:visible").first.evaluate(
            "it => it.getContext('2d').getImageData(0, 0, it.width, it.height).data.some(Boolean)"
        )
        assert drawn
        it.page.keyboard.press("r")
        it.wait(lambda: it.view()["time"] == 0)
        assert [each["time"] for each in it.page.evaluate("wm.tracks[0]")] == [0]


def test_recording_shows_its_steps_and_what_came_of_it(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press("o")
        it.wait(lambda: it.view()["recording"] == {"steps": 0})
        for step in (1, 2):
            it.page.keyboard.press(".")
            it.wait(lambda step=step: it.view()["time"] == step)
        button = it.page.locator("#record")
        it.wait(lambda: button.inner_text().strip() == "2 steps")
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        it.page.wait_for_selector(".toast")
        text = it.page.locator(".toast").inner_text()
        assert "Recorded 2 steps of 1 episode as runs/fake/human/v1" in text and "wm train-dynamics" in text
        it.wait(lambda: button.get_attribute("aria-pressed") == "false")


def test_a_stored_episode_is_found_and_started(browser: Any) -> None:
    with opened(browser) as it:
        it.page.locator("#start").click()
        it.page.locator("#filter").fill("test 3")
        rows = it.page.locator("#episodes tr")
        assert {row.split("\t")[3] for row in rows.all_inner_texts()} == {"test"}
        assert all("3" in row.split("\t")[0] for row in rows.all_inner_texts())
        rows.first.click()
        slide(it.page.locator("#frame"), 9)
        it.page.locator("#startEpisode").click()
        it.wait(lambda: it.done() and it.done()[-1] == {"do": "start", "episode": 3, "frame": 9})
        assert not it.page.locator("#starting").is_visible()
        it.page.locator("#start").click()
        it.page.locator("#seed").fill("42")
        it.page.locator("#startSeed").click()
        it.wait(lambda: it.done()[-1] == {"do": "restart", "seed": 42})


def test_settings_and_actors_are_sent_as_the_protocol_has_them(browser: Any) -> None:
    with opened(browser) as it:
        it.page.locator("#rate").select_option("30")
        it.page.locator("#temperature").fill("0.5")
        it.page.locator("#temperature").press("Enter")
        it.page.locator("article[data-pane='null'] select").select_option("agent")
        it.page.locator("article[data-pane='0'] select").select_option("random")
        it.page.locator("article[data-pane='0'] select").select_option(label="EAST")
        it.wait(lambda: len(it.done()) == 5)
        assert it.done() == [
            {"do": "options", "rate": 30},
            {"do": "options", "temperature": 0.5},
            {"do": "actor", "pane": None, "actor": "agent"},
            {"do": "actor", "pane": 0, "actor": "random"},
            {"do": "actor", "pane": 0, "actor": {"action": 2}},
        ]
        it.page.keyboard.press(".")  # keys play again after a choice
        it.wait(lambda: it.view()["time"] == 1)
        it.page.wait_for_timeout(100)
        assert it.page.locator("article[data-pane='0'] select").input_value() == '{"action":2}'


def test_several_numbers_have_a_row_of_buttons_each(browser: Any) -> None:
    with opened(browser, "categories") as it:
        rows = it.page.locator("#pad .number-row")
        assert [rows.nth(n).locator("button").count() for n in range(3)] == [3, 3, 2]
        rows.nth(0).locator("button").nth(2).click()
        rows.nth(2).locator("button").nth(1).click()
        it.wait(lambda: len(it.acts()) == 2)
        assert it.acts() == [([2, 0, 0], True), ([2, 0, 1], True)]
        assert rows.nth(0).locator("[aria-pressed=true]").inner_text() == "2"


def test_continuous_actions_have_sliders_and_a_stick(browser: Any) -> None:
    with opened(browser, "continuous") as it:
        it.page.keyboard.down("ArrowRight")
        it.wait(lambda: it.acts() == [([1, 0, 0.5], True)])
        it.page.keyboard.down("ArrowDown")
        it.page.keyboard.up("ArrowRight")
        it.wait(lambda: it.acts()[1:] == [([1, -2, 0.5], True), ([0, -2, 0.5], True)])
        it.page.keyboard.up("ArrowDown")
        slide(it.page.locator("#pad input").nth(2), 1)
        it.wait(lambda: it.acts()[3:] == [([0, 0, 0.5], True), ([0, 0, 1], True)])


def test_errors_are_told_and_play_goes_on(browser: Any) -> None:
    with opened(browser) as it:
        for count in (3, 4):
            it.page.keyboard.press("b")
            it.wait(lambda count=count: len(it.view()["panes"]) == count)
        it.page.keyboard.press("b")
        it.page.wait_for_selector(".toast.error")
        assert "four dreams are the most" in it.page.locator(".toast.error").inner_text()
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 1)


# -- connection --------------------------------------------------------------------------------------------------------


def test_a_lost_connection_comes_back_to_the_same_session(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 1)
        (outbox,) = it.running.server.outboxes
        loop = outbox.connection.loop
        loop.call_soon_threadsafe(outbox.connection.transport.abort)
        it.page.wait_for_selector(".banner")
        assert "Connection lost" in it.page.locator(".banner").inner_text()
        it.page.wait_for_selector(".banner", state="detached")
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 2)
        it.page.reload()
        it.page.wait_for_selector("article.card canvas:visible")
        assert it.view()["time"] == 2 and len(it.running.server.slots) == 1


def test_another_tab_takes_over_and_can_be_taken_back(browser: Any) -> None:
    with opened(browser) as it:
        identifier = it.page.evaluate("sessionStorage.getItem('wm-session')")
        with it.running.socket(identifier) as other:
            other.recv(10)
            it.page.wait_for_selector(".banner")
            assert "Continued in another tab." in it.page.locator(".banner").inner_text()
            it.page.get_by_role("button", name="Continue here").click()
            it.page.wait_for_selector(".banner", state="detached")


def test_the_end_of_the_server_names_the_command(browser: Any) -> None:
    with serving(FakePlay, page_of("play")) as running:
        page = browser.new_page()
        page.goto(running.address)
        page.wait_for_selector("article.card canvas:visible")
    page.wait_for_selector(".banner")
    assert "wm play --browser" in page.locator(".banner").inner_text()
    page.close()


def test_another_server_in_its_place_is_told_from_a_lost_connection(browser: Any) -> None:
    with serving(FakePlay, page_of("play")) as running:
        page = browser.new_page()
        page.goto(running.address)
        page.wait_for_selector("article.card canvas:visible")
        running.server.token = "of-another-server"
        (outbox,) = running.server.outboxes
        outbox.connection.loop.call_soon_threadsafe(outbox.connection.transport.abort)
        page.get_by_text("Another server runs here now. Open the address that it printed.").wait_for()
        page.close()


# -- looks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "atari", "categories", "continuous"])
def test_a_phone_scrolls_down_only_and_has_a_pad(browser: Any, kind: str) -> None:
    with opened(browser, kind, viewport=PHONE, has_touch=True, is_mobile=True) as it:
        it.page.wait_for_timeout(200)
        assert it.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        lefts = it.page.locator("article.card").evaluate_all("cards => cards.map(card => card.offsetLeft)")
        assert len(set(lefts)) == 1  # one below the other
        assert it.page.locator("#pad").bounding_box()["y"] + 40 < PHONE["height"]
        if kind in ("discrete", "atari"):
            button = it.page.locator("#pad button").first
            assert button.bounding_box()["height"] >= 40
            button.tap()
            it.wait(lambda: len(it.acts()) == 2)


def luminance(color: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", color)[:3])
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


TEXTS = """() => {
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const color = getComputedStyle(each).backgroundColor;
            if (!/, 0\\)|transparent/.test(color)) return color;
        }
    };
    const found = [];
    for (const element of document.querySelectorAll("body *:not(script, style, option, optgroup)")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.closest(":disabled, svg")) continue;
        found.push([element.textContent.slice(0, 30), getComputedStyle(element).color, behind(element)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser: Any, scheme: str) -> None:
    with opened(browser, color_scheme=scheme) as it:
        it.page.keyboard.press("o")
        it.page.keyboard.down("ArrowUp")
        it.page.keyboard.press(".")
        it.wait(lambda: it.view()["time"] == 1)
        it.page.wait_for_timeout(200)
        paper = it.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 20, 24)"}[scheme]
        texts = it.page.evaluate(TEXTS)
        assert len(texts) > 40
        for text, front, back in texts:
            one, two = sorted((luminance(front), luminance(back)))
            assert (two + 0.05) / (one + 0.05) >= 4.5, (text, front, back)
        it.page.keyboard.up("ArrowUp")


def test_the_theme_is_toggled_and_remembered(browser: Any) -> None:
    with opened(browser, color_scheme="light") as it:
        paper = "getComputedStyle(document.body).backgroundColor"
        it.page.get_by_role("button", name="Light or dark").click()
        assert it.page.evaluate(paper) == "rgb(17, 20, 24)"
        it.page.reload()
        it.page.wait_for_selector("article.card canvas:visible")
        assert it.page.evaluate(paper) == "rgb(17, 20, 24)"


def test_every_button_says_what_it_does(browser: Any) -> None:
    with opened(browser) as it:
        controls = it.page.locator("#controls button, .card button, .card select, header button")
        silent = controls.evaluate_all("all => all.filter(each => !each.title).map(each => each.outerHTML)")
        assert silent == []
        assert it.page.locator("#play").get_attribute("title") == "Play (space)"


def test_speed_and_latency_are_measured(browser: Any) -> None:
    with opened(browser) as it:
        it.page.keyboard.press(" ")
        it.page.wait_for_timeout(2500)
        assert it.page.evaluate("wm.fps") >= 5
        latencies = it.page.evaluate("wm.latencies")
        assert len(latencies) == 1 and 0 < latencies[0] < 2000
        assert re.fullmatch(r"\d+ fps · \d+ / \d+ ms", it.page.locator("#speed").inner_text())
