"""The server of pages, over real sockets."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets")
from serving import serving
from websockets.exceptions import ConnectionClosed, InvalidStatus

from wmcli.browser import page as pages
from wmcli.browser.server import (
    ELSEWHERE,
    GONE,
    LARGEST_REQUEST,
    MOST_SESSIONS,
    REFUSED,
    Message,
    Session,
    bind,
    encode,
    parse_request,
    serve,
)
from wmcli.errors import EnvironmentFault, UsageError
from wmcli.progress import Progress

FRAME = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


class Echo:
    """Answers every request with it, and counts its calls. `rate` 0: says nothing by itself."""

    def __init__(self, rate: float = 0.0, view: Message | None = None) -> None:
        self.rate, self.view = rate, view
        self.hellos = self.advances = self.closes = 0
        self.received: list[dict[str, Any]] = []
        self.threads: set[int] = set()

    def hello(self) -> Message:
        self.threads.add(threading.get_ident())
        self.hellos += 1
        return Message({"type": "hello", "count": self.hellos})

    def receive(self, request: dict[str, Any]) -> Message | None:
        self.threads.add(threading.get_ident())
        self.received.append(request)
        if request.get("do") == "fail":
            raise UsageError("there is no such action.")
        if request.get("do") == "break":
            raise ZeroDivisionError
        if request.get("do") == "sleep":
            time.sleep(request["seconds"])
        return Message({"type": "answer", "request": request})

    def advance(self) -> Message | None:
        self.threads.add(threading.get_ident())
        self.advances += 1
        return self.view

    def close(self) -> str | None:
        self.threads.add(threading.get_ident())
        self.closes += 1
        return f"closed after {len(self.received)} requests"


def keeping(made: list[Echo], make: Callable[[], Echo] = Echo) -> Callable[[], Session]:
    def open_session() -> Session:
        made.append(make())
        return made[-1]

    return open_session


def read(raw: str | bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The head and the frames of a message in its wire form."""
    if isinstance(raw, str):
        return json.loads(raw), []
    (length,) = struct.unpack_from("<I", raw)
    head, rest, frames = json.loads(raw[4 : 4 + length]), raw[4 + length :], []
    for height, width in head["frames"]:
        frames.append(np.frombuffer(rest[: height * width * 3], np.uint8).reshape(height, width, 3))
        rest = rest[height * width * 3 :]
    assert not rest
    return head, frames


def get(address: str, **headers: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# -- wire form ---------------------------------------------------------------------------------------------------------


def test_messages_with_frames_are_binary_and_exact() -> None:
    other = np.full((4, 1, 3), 255, np.uint8)
    head, frames = read(encode(Message({"type": "view", "text": "ü"}, (FRAME, other[::-1]))))
    assert (head["type"], head["text"], head["frames"]) == ("view", "ü", [[2, 3], [4, 1]])
    np.testing.assert_array_equal(frames[0], FRAME)
    np.testing.assert_array_equal(frames[1], other)
    assert encode(Message({"a": 1})) == '{"a":1}'


def test_what_json_lacks_becomes_null() -> None:
    head = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (float("-inf"), "x")}}
    assert json.loads(encode(Message(head))) == {"a": None, "b": [1.5, None], "c": {"d": [None, "x"]}}


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"{}", "not binary"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"a": NaN}', "no number"),
        ('{"a": 1e999}', "no number"),
        ("[1]", "a JSON object"),
        ("null", "a JSON object"),
        ("[" * 50_000, "nested|not JSON"),
        ('{"a":' * 12_000, "nested|not JSON"),
        ('{"a":"' + "ü" * 40_000 + '"}', "64 kB"),
    ],
)
def test_what_is_no_request_is_named(raw: str | bytes, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        parse_request(raw)


def test_the_largest_request_is_one() -> None:
    text = "x" * (LARGEST_REQUEST - len('{"a":""}'))
    assert parse_request(json.dumps({"a": text}, separators=(",", ":"))) == {"a": text}


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_the_page_comes_with_a_nonce_of_its_own() -> None:
    text = f'<script nonce="{pages.NONCE}">1</script>'
    with serving(Echo, text) as running:
        nonces = set()
        for _ in range(2):
            status, body, headers = get(running.address)
            nonce = re.fullmatch(r'<script nonce="([\w-]+)">1</script>', body)
            assert status == 200 and nonce
            nonces.add(nonce[1])
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and f"script-src 'nonce-{nonce[1]}'" in policy
            assert "unsafe" not in policy and headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
        assert len(nonces) == 2


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?other=1", "?token=%ff%00", "?token=ü"])
def test_without_the_token_there_is_no_page(query: str) -> None:
    with serving(Echo, "page") as running:
        quoted = query.replace("ü", "%C3%BC")
        status, body, _ = get(f"http://{running.host}/{quoted}")
        assert status == 403 and "token" in body and body.count("\n") == 1 and body != "page"


def test_a_longer_or_shorter_token_is_wrong() -> None:
    with serving(Echo, "page") as running:
        for address in (running.address + "x", running.address[:-1]):
            assert get(address)[0] == 403
        assert get(running.address)[0] == 200


@pytest.mark.parametrize("path", ["favicon.ico", "play.js", "../server.py", "index.html", "socket/", "//x/"])
def test_there_is_nothing_but_the_page(path: str) -> None:
    with serving(Echo, "page") as running:
        status, body, _ = get(f"http://{running.host}/{path}?token={running.server.token}")
        assert status == 404 and body.startswith("wm: ")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),  # a tunnel has a port of its own
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:8765", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil@localhost", 403),
        ("localhost:80:80", 403),
        ("192.168.0.1", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_only_its_own_names_are_answered(host: str, status: int) -> None:
    with serving(Echo, "page") as running:
        assert get(running.address, Host=host)[0] == status


def test_at_all_addresses_other_names_are_refused_still() -> None:
    with serving(Echo, "page", host="0.0.0.0") as running:
        address = f"http://127.0.0.1:{running.host.rpartition(':')[2]}/?token={running.server.token}"
        assert get(address, Host="192.168.0.1:8765")[0] == 200
        assert get(address, Host=socket.gethostname())[0] == 200
        assert get(address, Host="evil.example")[0] == 403
        assert socket.gethostname() in running.address


def raw_request(host: str, text: bytes) -> bytes:
    name, port = host.split(":")
    with socket.create_connection((name, int(port)), timeout=10) as client:
        client.sendall(text)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


def test_odd_requests_end_in_a_status_and_the_server_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Echo, "page") as running:
        host = running.host.encode()
        for text in (
            b"POST / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nHost: " + host + b"\r\n\r\n",
            b"GET //[ HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
            b"GET /socket?token=" + running.server.token.encode() + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
            b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\r\n\r\n",  # TLS
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        ):
            answer = raw_request(running.host, text)
            assert re.match(rb"HTTP/1.1 4\d\d |$", answer), answer
        assert get(running.address)[0] == 200
    assert capfd.readouterr().err == ""


# -- sockets -----------------------------------------------------------------------------------------------------------


def test_a_browser_gets_hello_answers_and_views() -> None:
    made: list[Echo] = []
    view = Message({"type": "view", "echo": None}, (FRAME,))
    with serving(keeping(made, lambda: Echo(50.0, view))) as running, running.socket() as browser:
        assert read(browser.recv(10))[0] == {"type": "hello", "count": 1}
        head, frames = read(browser.recv(10))
        assert head["type"] == "view"
        np.testing.assert_array_equal(frames[0], FRAME)
        browser.send('{"do": "x", "id": 7}')
        while (head := read(browser.recv(10))[0])["type"] == "view":
            pass
        assert head == {"type": "answer", "request": {"do": "x", "id": 7}}
    assert made[0].closes == 1
    assert running.lines == ["closed after 1 requests"]


def test_views_come_at_the_rate_and_a_new_rate_counts_at_once() -> None:
    session = Echo(0.0, Message({"type": "view"}))
    with serving(lambda: session) as running, running.socket() as browser:
        browser.recv(10)
        browser.recv(10)  # the first call, before the rate is known
        time.sleep(0.3)
        assert session.advances == 1
        session.rate = 40.0
        browser.send("{}")
        time.sleep(1.0)
        assert 25 <= session.advances <= 42


@pytest.mark.parametrize(
    "origin", [None, "http://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://"]
)
def test_a_page_from_elsewhere_gets_no_socket(origin: str | None) -> None:
    made: list[Echo] = []
    with serving(keeping(made)) as running:
        with pytest.raises(InvalidStatus, match="403"), running.socket(origin=origin):
            pass
        with running.socket() as browser:  # the same with the right one
            browser.recv(10)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("session=a-session", "403"),
        ("token=wrong&session=a-session", "403"),
        ("token=TOKEN", "400"),
        ("token=TOKEN&session=short", "400"),
        ("token=TOKEN&session=a%2F..%2Fsession", "400"),
        (f"token=TOKEN&session={'x' * 65}", "400"),
    ],
)
def test_a_socket_needs_token_and_session(query: str, status: str) -> None:
    with serving(Echo) as running:
        full = query.replace("TOKEN", running.server.token)
        with pytest.raises(InvalidStatus, match=status), running.socket(query=full):
            pass


def test_two_browsers_have_sessions_of_their_own_in_one_thread() -> None:
    made: list[Echo] = []
    with serving(keeping(made)) as running, running.socket("session-1") as one, running.socket("session-2") as two:
        one.recv(10), two.recv(10)
        began = time.monotonic()
        for browser in (one, two):  # calls wait for each other
            browser.send('{"do": "sleep", "seconds": 0.15}')
        one.recv(10), two.recv(10)
        assert time.monotonic() - began >= 0.3
        one.send('{"n": 1}')
        two.send('{"n": 2}')
        assert read(one.recv(10))[0]["request"] == {"n": 1}
        assert read(two.recv(10))[0]["request"] == {"n": 2}
    assert sorted(session.received[-1]["n"] for session in made) == [1, 2]
    assert len(set.union(*(session.threads for session in made))) == 1
    assert threading.get_ident() not in made[0].threads


def test_a_reload_continues_the_session() -> None:
    made: list[Echo] = []
    with serving(keeping(made)) as running:
        for count in (1, 2, 3):
            with running.socket() as browser:
                assert read(browser.recv(10))[0] == {"type": "hello", "count": count}
    assert len(made) == 1 and made[0].closes == 1


def test_a_closed_tab_ends_its_session_after_the_grace_period() -> None:
    made: list[Echo] = []
    with serving(keeping(made, lambda: Echo(50.0)), grace=0.4) as running:
        with running.socket() as browser:
            browser.recv(10)
            time.sleep(0.8)
            assert made[0].closes == 0  # it is connected
        wait_for(lambda: not running.server.slots and made[0].closes == 1)
        calls = made[0].advances
        time.sleep(0.1)
        assert made[0].advances == calls
        with running.socket() as browser:  # another one then
            assert read(browser.recv(10))[0] == {"type": "hello", "count": 1}
    assert len(made) == 2


def test_nothing_advances_while_there_is_no_browser() -> None:
    made: list[Echo] = []
    with serving(keeping(made, lambda: Echo(100.0))) as running:
        with running.socket() as browser:
            browser.recv(10)
            wait_for(lambda: made[0].advances > 3)
        time.sleep(0.1)
        calls = made[0].advances
        time.sleep(0.2)
        assert made[0].advances == calls and made[0].closes == 0


def test_another_tab_takes_over_and_the_first_one_is_told() -> None:
    made: list[Echo] = []
    with serving(keeping(made)) as running, running.socket() as first:
        first.recv(10)
        with running.socket() as second:
            assert read(second.recv(10))[0] == {"type": "hello", "count": 2}
            with pytest.raises(ConnectionClosed) as closed:
                first.recv(10)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (ELSEWHERE, "continued in another tab")
            second.send('{"n": 2}')
            assert read(second.recv(10))[0]["request"] == {"n": 2}
    assert len(made) == 1


def test_the_ninth_browser_is_refused_in_words() -> None:
    with serving(Echo) as running:
        opened = [running.socket(f"session-{n}") for n in range(MOST_SESSIONS)]
        for each in opened:
            each.__enter__().recv(10)
        with running.socket("session-8") as ninth:
            with pytest.raises(ConnectionClosed) as closed:
                ninth.recv(10)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == REFUSED
            assert "8 browsers" in closed.value.rcvd.reason
        with running.socket("session-0") as again:  # one of them may come again
            assert read(again.recv(10))[0]["count"] == 2
        for each in opened:
            each.__exit__(None, None, None)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_an_error_of_a_request_is_told_and_the_session_goes_on() -> None:
    with serving(Echo) as running, running.socket() as browser:
        browser.recv(10)
        browser.send('{"do": "fail", "id": 3}')
        assert read(browser.recv(10))[0] == {"type": "error", "message": "there is no such action.", "id": 3}
        browser.send('{"do": "fail", "id": [1]}')
        assert read(browser.recv(10))[0]["id"] is None
        browser.send("{}")
        assert read(browser.recv(10))[0]["type"] == "answer"


def test_an_error_that_repeats_is_told_once() -> None:
    class Faulty(Echo):
        def advance(self) -> Message | None:
            super().advance()
            if self.advances == 20:
                return Message({"type": "well"})
            raise EnvironmentFault("the environment fails.")

    session = Faulty(200.0)
    with serving(lambda: session) as running, running.socket() as browser:
        browser.recv(10)
        told = [read(browser.recv(10))[0]["type"] for _ in range(3)]
        assert told == ["error", "well", "error"]
        wait_for(lambda: session.advances > 60)
        with pytest.raises(TimeoutError):
            browser.recv(0.05)


def test_a_session_that_cannot_open_is_refused_with_its_error() -> None:
    def open_session() -> Session:
        raise UsageError("there is no controller; train one with: wm run")

    with serving(open_session) as running, running.socket() as browser:
        with pytest.raises(ConnectionClosed) as closed:
            browser.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.reason == "there is no controller; train one with: wm run"
        assert closed.value.rcvd.code == REFUSED
    assert running.lines == []


def test_a_reason_that_is_too_long_for_the_protocol_comes_as_a_message() -> None:
    fault = "there is no controller: " + "ü" * 200

    def open_session() -> Session:
        raise UsageError(fault)

    with serving(open_session) as running, running.socket() as browser:
        assert read(browser.recv(10))[0] == {"type": "error", "message": fault, "id": None}
        with pytest.raises(ConnectionClosed) as closed:
            browser.recv(10)
        assert closed.value.rcvd is not None and closed.value.rcvd.reason.endswith("ü…")


def test_a_defect_ends_its_session_alone(capfd: pytest.CaptureFixture[str]) -> None:
    made: list[Echo] = []
    with serving(keeping(made)) as running, running.socket("session-1") as one, running.socket("session-2") as two:
        one.recv(10), two.recv(10)
        one.send('{"do": "break"}')
        with pytest.raises(ConnectionClosed) as closed:
            one.recv(10)
        assert closed.value.rcvd is not None and "defect of wm" in closed.value.rcvd.reason
        two.send("{}")
        assert read(two.recv(10))[0]["type"] == "answer"
    assert sorted(session.closes for session in made) == [1, 1]
    assert "ZeroDivisionError" in capfd.readouterr().err


def random_message(generator: random.Random) -> str | bytes:
    kind = generator.randrange(7)
    if kind == 0:
        return generator.randbytes(generator.randrange(2000))
    if kind == 1:
        return "".join(chr(generator.randrange(1, 0xD7FF)) for _ in range(generator.randrange(200)))
    if kind == 2:
        return generator.choice("[{") * generator.randrange(1, 3000)
    if kind == 3:
        return '{"a":"' + "x" * generator.randrange(LARGEST_REQUEST - 100, LARGEST_REQUEST + 100) + '"}'
    if kind == 4:
        return "[" * 900 + "]" * 900
    if kind == 5:
        return json.dumps(generator.choice([None, True, 3, "do", [], [{}], 1e300]))
    return json.dumps({"do": generator.choice(["fail", "x", None, 3, {}]), "id": generator.choice([1, "1", None, []])})


def test_a_thousand_random_messages_harm_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    generator, made = random.Random(0), list[Echo]()
    with serving(keeping(made)) as running, running.socket("session-1") as wild, running.socket("session-2") as tame:
        wild.recv(10), tame.recv(10)
        types = set()
        for _ in range(1000):
            wild.send(random_message(generator))
            types.add(read(wild.recv(10))[0]["type"])  # one answer each
        assert types == {"error", "answer"}
        tame.send('{"n": 1}')
        assert read(tame.recv(10))[0]["request"] == {"n": 1}
    assert [session.closes for session in made] == [1, 1]
    assert capfd.readouterr().err == ""


def test_a_message_of_megabytes_ends_its_connection_alone() -> None:
    with serving(Echo) as running, running.socket("session-2") as tame:
        tame.recv(10)
        with running.socket("session-1") as wild:
            wild.recv(10)
            with pytest.raises(ConnectionClosed) as closed:
                wild.send("x" * 3_000_000)
                wild.recv(10)
            assert closed.value.rcvd is None or closed.value.rcvd.code == 1009  # too big
        with running.socket("session-1") as again:
            assert read(again.recv(10))[0]["count"] == 2
        tame.send("{}")
        assert read(tame.recv(10))[0]["type"] == "answer"


def test_a_slow_reader_neither_blocks_others_nor_gets_old_views() -> None:
    """One browser reads nothing for a while: views of 1 MB are dropped for it, answers are not, echoes neither."""
    frame = np.zeros((512, 683, 3), np.uint8)

    class Views(Echo):
        def advance(self) -> Message | None:
            super().advance()
            return Message({"type": "view", "time": self.advances, "echo": None}, (frame,))

        def receive(self, request: dict[str, Any]) -> Message | None:
            return super().receive(request) if "n" in request else Message({"type": "view", "echo": request["id"]})

    made: list[Echo] = []
    with serving(keeping(made, lambda: Views(100.0))) as running, running.socket("session-1") as slow:
        slow.recv(10)
        with running.socket("session-2") as quick:
            quick.recv(10)
            slow_session = made[0]
            wait_for(lambda: slow_session.advances > 60, 20)
            for n in range(5):
                slow.send(json.dumps({"n": n}))
            slow.send(json.dumps({"id": 77}))
            began, seen = time.monotonic(), 0
            while time.monotonic() - began < 1:
                seen += read(quick.recv(10))[0]["type"] == "view"
            assert seen > 10
        wait_for(lambda: len(slow_session.received) == 5)
        sent = slow_session.advances
        heads = []
        while not heads or heads[-1].get("time", 0) < sent:
            heads.append(read(slow.recv(10))[0])
        views = [head for head in heads if head["type"] == "view"]
        assert len(views) < sent / 2  # kernel buffers hold some, the server one
        assert [head["request"]["n"] for head in heads if head["type"] == "answer"] == [0, 1, 2, 3, 4]
        assert [head["echo"] for head in views if head["echo"] is not None] == [77]
        times = [head["time"] for head in views if "time" in head]
        assert times == sorted(times)


def test_a_browser_that_reads_nothing_is_disconnected_before_memory_fills() -> None:
    """Each request has an answer of 30 kB, and none is read."""
    request, deadline = json.dumps({"a": "x" * 30_000}), time.monotonic() + 10
    with serving(Echo) as running:
        with running.socket() as deaf:
            deaf.recv(10)
            with pytest.raises(ConnectionClosed):
                while time.monotonic() < deadline:
                    deaf.send(request)
        with running.socket() as again:
            assert read(again.recv(10))[0]["type"] == "hello"


# -- the end -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from test_server import Echo
from wmcli.browser.server import serve
from wmcli.progress import Progress
class Slow(Echo):
    def close(self):
        time.sleep(float(sys.argv[1]))
        return super().close()
ready = lambda address: print(address, flush=True)
serve(Slow, "page", host="127.0.0.1", port=0, progress=Progress(), title="Test", ready=ready)
print("returned", flush=True)
"""


def start(slow: str) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)])}
    command = [sys.executable, "-c", PROGRAM, slow]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def connect_to(address: str, session: str) -> Any:
    from websockets.sync.client import connect

    host = address.split("/")[2]
    token = address.partition("token=")[2]
    return connect(f"ws://{host}/socket?token={token}&session={session}", origin=f"http://{host}")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_closes_all_sessions_and_returns(number: signal.Signals) -> None:
    with start("0") as child:
        assert child.stdout is not None and child.stderr is not None
        address = child.stdout.readline().strip()
        with connect_to(address, "session-1") as one, connect_to(address, "session-2") as two:
            one.recv(10), two.recv(10)
            one.send("{}")
            one.recv(10)
            began = time.monotonic()
            child.send_signal(number)
            for browser in (one, two):
                with pytest.raises(ConnectionClosed) as closed:
                    browser.recv(10)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == GONE
        assert child.stdout.read() == "returned\n"
        assert child.wait(10) == 0 and time.monotonic() - began < 5
        lines = child.stderr.read().splitlines()
        assert address in lines[0]
        assert sorted(lines[1:]) == ["closed after 0 requests", "closed after 1 requests"]


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once() -> None:
    with start("60") as child:
        assert child.stdout is not None
        with connect_to(child.stdout.readline().strip(), "session-1") as browser:
            browser.recv(10)
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            assert child.wait(10) == -signal.SIGINT


def test_the_end_waits_for_no_browser_that_says_or_reads_nothing() -> None:
    request = json.dumps({"a": "x" * 60_000})
    with serving(Echo) as running:
        silent = socket.create_connection(("127.0.0.1", int(running.host.partition(":")[2])))
        deaf = running.socket()
        browser = deaf.__enter__()
        for _ in range(200):  # of 12 MB of answers, few are read
            browser.send(request)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    silent.close()
    deaf.__exit__(None, None, None)


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is taken.*--port"):
            serve(Echo, "page", host="127.0.0.1", port=port, progress=Progress(quiet=True), title="Test")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7", "a" * 300])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        bind(host, 0)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets.asyncio.server", None)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[browser\]'"):
        serve(Echo, "page", host="127.0.0.1", port=0, progress=Progress(quiet=True), title="Test")


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["play", "watch"])
def test_a_page_has_all_in_it_and_loads_nothing(name: str) -> None:
    text = pages.page(name)
    assert text.count(f'nonce="{pages.NONCE}"') == text.count("<script") + text.count("<style")
    assert text.count("<script") >= 2 and text.count("</script>") == text.count("<script")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\son\w+=\"|innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
