"""Serve a page to the browsers of one user, and to each of them a session of its own over a WebSocket.

The server knows no models and no runs. One thread works for all sessions, in turn; another one, with the event loop,
talks to the browsers. So a session needs no locks, and a slow browser makes nobody wait.

A message goes out as text with its JSON. With frames it is binary: the length of the JSON (uint32, little-endian), the
JSON with "frames": [[height, width], ...], then the RGB bytes of all frames.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import struct
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar
from urllib.parse import parse_qs

import numpy as np

from wmcli.browser.page import NONCE
from wmcli.errors import UsageError, WmError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from websockets.asyncio.server import Server as Listener
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

T = TypeVar("T")

GRACE = 60.0  # seconds that a session waits for its browser to come back
MOST_SESSIONS = 8
MOST_WAITING = 64  # requests of one session; then its browser is not read
MOST_UNSENT = 256  # messages to one browser; then it is disconnected, and may connect again
LARGEST_REQUEST = 64 * 1024  # bytes; one up to the next limit is answered by an error, a larger one ends the connection
_LARGEST_READ = 1024 * 1024
_SEND_BUFFER = 256 * 1024  # bytes that the kernel keeps for a browser; more would be old views
_CLOSING_SECONDS = 1.0
_LATE_SECONDS = 0.2  # that calls of advance may be behind their rate and catch up

# Codes of closed connections, for shared.js. Those from 4000 on end the page's tries to connect.
GONE, AGAIN, ELSEWHERE, REFUSED = 1001, 1012, 4001, 4002

_SESSION = re.compile(r"[A-Za-z0-9_-]{8,64}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PLAIN = "text/plain; charset=utf-8"


class Message(NamedTuple):
    """A message to the page. Whoever returns one leaves its contents as they are from then on."""

    head: dict[str, Any]
    """JSON. NaN and infinity, which JSON lacks, become null."""
    frames: tuple[np.ndarray, ...] = ()
    """uint8 (H, W, 3) each."""


class Session(Protocol):
    """One browser's session. Its methods are called in one thread, never two at a time, of other sessions neither."""

    @property
    def rate(self) -> float:
        """Calls of `advance` a second; read before each call. 0: none."""
        ...

    def hello(self) -> Message:
        """Return all that a page needs that has just connected, for the first time or again."""
        ...

    def receive(self, request: dict[str, Any]) -> Message | None:
        """Take a request, and return an answer to it.

        Raises:
            WmError: The browser is told, and the session goes on.
        """
        ...

    def advance(self) -> Message | None:
        """Return the news; None if there is none. It is not called while there is no browser."""
        ...

    def close(self) -> str | None:
        """End the session, and return a line for the user."""
        ...


def check_installed() -> None:
    """Check that the server can run, before the work.

    Raises:
        UsageError: The extra `browser` is not installed.
    """
    try:
        import websockets.asyncio.server  # noqa: F401
    except ImportError:
        raise UsageError("pages need websockets 13 or newer: pip install 'wmcli[browser]'") from None


def serve(
    open_session: Callable[[], Session],
    page: str,
    *,
    host: str,
    port: int,
    progress: Progress,
    title: str,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then close all sessions. A second signal ends the process at once.

    Args:
        open_session: Called for each new browser, in the thread of the sessions. A WmError refuses the browser.
        page: HTML, see `wmcli.browser.page`.
        host: Name or address to listen at.
        port: Port to listen at; 0 is any free one.
        progress: Where the address and the last lines of sessions go.
        title: Words before the address.
        ready: Called with the address once the server listens, in a thread of its own.

    Raises:
        UsageError: The extra is not installed, the port is taken, or the host is not one of this machine.
    """
    check_installed()
    listening = bind(host, port)

    async def work() -> None:
        async with Server(open_session, page, listening, host=host, progress=progress) as server:
            if not _is_loopback(host):
                progress.warn(f"--host {host}: everyone who has the address below can see and steer this page.")
            progress.say(f"{title}: {server.address}  (Ctrl-C ends it)")
            if ready is not None:
                threading.Thread(target=ready, args=(server.address,), daemon=True).start()
            await _asked_to_stop()

    asyncio.run(work())


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket at the first address of `host`, IPv4 before IPv6.

    Raises:
        UsageError: The port is taken or forbidden, or the host is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(f"--host {host}: {getattr(error, 'strerror', None) or error}.") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another one with --port, or --port 0 for any free one"
            raise UsageError(f"port {port} is taken, perhaps by another wm: {remedy}.") from None
        raise UsageError(f"cannot listen at --host {host} --port {port}: {error.strerror or error}.") from None


async def _asked_to_stop() -> None:
    """Wait for the first SIGINT or SIGTERM. Outside of the main thread, which gets all signals, wait forever."""
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()

        def ask(number: int) -> None:
            if stop.is_set():
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask, number)
    await stop.wait()


class Server:
    """The server of one page, as an asynchronous context: it listens inside.

    Args:
        open_session: See `serve`.
        page: See `serve`.
        listening: From `bind`.
        host: Its name.
        progress: See `serve`.
        grace: Seconds that a session waits for its browser to come back.
    """

    def __init__(
        self,
        open_session: Callable[[], Session],
        page: str,
        listening: socket.socket,
        *,
        host: str,
        progress: Progress,
        grace: float = GRACE,
    ) -> None:
        self.open_session, self.page, self.progress, self.grace = open_session, page, progress, grace
        self.token = secrets.token_urlsafe(24)
        self.slots: dict[str, _Slot] = {}
        self.outboxes: set[Outbox] = set()  # of open connections
        self._connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._running: set[asyncio.Task[None]] = set()
        self._socket = listening
        self._host = host.lower()
        self._worker = ThreadPoolExecutor(1, "sessions")
        self._listener: Listener | None = None

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        name = socket.gethostname() if _is_wildcard(self._host) else self._host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self._socket.getsockname()[1]}/?token={self.token}"

    async def __aenter__(self) -> Server:
        from websockets.asyncio.server import ServerConnection
        from websockets.asyncio.server import serve as listen

        class Known(ServerConnection):
            def connection_made(connection, transport: asyncio.BaseTransport) -> None:
                self._connections.add(connection)
                super().connection_made(transport)

        silent = logging.getLogger("wmcli.browser")  # of clients' faults; our own are reported by `_report_defect`
        silent.setLevel(logging.CRITICAL + 1)
        self._listener = await listen(
            self._converse,
            sock=self._socket,
            process_request=self._answer,
            compression=None,
            server_header=None,
            max_size=_LARGEST_READ,
            close_timeout=_CLOSING_SECONDS,
            logger=silent,
            create_connection=Known,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close(close_connections=False)
        for outbox in self.outboxes:
            outbox.close(GONE, "the server has ended")
        for slot in [*self.slots.values()]:
            slot.end()
        if self._running:
            await asyncio.wait(self._running)
        for connection in self._connections - {outbox.connection for outbox in self.outboxes}:
            connection.transport.abort()  # browsers open some ahead of requests, which would hold up the end
        await self._listener.wait_closed()
        self._worker.shutdown()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread of the sessions."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the page or a refusal, or None for a socket that may open."""
        place, _, query = request.path.partition("?")
        host = self._own_host(request.headers.get_all("Host"))
        if host is None:
            return _respond(
                HTTPStatus.FORBIDDEN, "wm: not a name of this server: open the address that the command printed.\n"
            )
        if place not in ("/", "/socket"):
            return _respond(HTTPStatus.NOT_FOUND, "wm: there is nothing here but the page.\n")
        given = parse_qs(query)
        token = given.get("token", [""])[-1]
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            fault = "wrong token" if token else "no token"
            return _respond(HTTPStatus.FORBIDDEN, f"wm: {fault}: open the whole address that the command printed.\n")
        if place == "/":
            return self._page(host)
        if request.headers.get_all("Origin") not in ([f"http://{host}"], [f"https://{host}"]):
            return _respond(HTTPStatus.FORBIDDEN, "wm: a page from elsewhere asks for the socket.\n")
        if not _SESSION.fullmatch(given.get("session", [""])[-1]):
            return _respond(HTTPStatus.BAD_REQUEST, "wm: session=ID has 8 to 64 letters, digits, - or _.\n")
        return None

    def _own_host(self, headers: list[str]) -> str | None:
        """Return the host that a request names, if it is this one. Another site may have a name that leads here.

        Ports are not compared: a tunnel may have another one at its end.
        """
        named = _HOST.fullmatch(headers[0].lower()) if len(headers) == 1 else None
        if named is None:
            return None
        name = named[1].strip("[]")
        ours = name in (*_LOCAL, self._host)
        if not ours and _is_wildcard(self._host):
            ours = name in (socket.gethostname().lower(), socket.getfqdn().lower()) or _is_address(name)
        return named[0] if ours else None

    def _page(self, host: str) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:;"
            f" connect-src 'self' ws://{host} wss://{host}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return _respond(
            HTTPStatus.OK,
            self.page.replace(NONCE, nonce),
            "text/html; charset=utf-8",
            {"Content-Security-Policy": policy, "Cross-Origin-Opener-Policy": "same-origin"},
        )

    # -- sockets ------------------------------------------------------------------------------------------------------

    async def _converse(self, connection: ServerConnection) -> None:
        """Serve one open socket until it closes."""
        from websockets.exceptions import ConnectionClosed

        assert connection.request is not None
        identifier = parse_qs(connection.request.path.partition("?")[2])["session"][-1]
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        slot = self.slots.get(identifier)
        if slot is None:
            if len(self.slots) >= MOST_SESSIONS:
                return await connection.close(
                    REFUSED, f"{MOST_SESSIONS} browsers are the most: close a tab, wait a minute"
                )
            slot = self._open_slot(identifier)
        outbox = Outbox(connection)
        self.outboxes.add(outbox)
        try:
            await slot.connect(outbox)
            async for raw in connection:
                try:
                    request = parse_request(raw)
                except UsageError as error:
                    outbox.put(Message(_error(str(error))))
                else:
                    await slot.give(request)
        except ConnectionClosed:
            pass
        except Exception as error:
            _report_defect(error)
        finally:
            self.outboxes.discard(outbox)
            outbox.stop()
            await slot.give(_Left(outbox))
        return None

    def _open_slot(self, identifier: str) -> _Slot:
        slot = self.slots[identifier] = _Slot(self, identifier)
        task = asyncio.create_task(slot.run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return slot


class Outbox:
    """Messages on their way to one browser.

    While it is slow, a view takes the place of an earlier one that was not sent, and its "echo". All others wait.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self._unsent: deque[Message] = deque()
        self._filled = asyncio.Event()
        self._task = asyncio.create_task(self._send())
        self._closing: asyncio.Task[None] | None = None

    def put(self, message: Message) -> None:
        """Send a message as soon as the browser takes it."""
        if self._closing is not None:
            return
        if message.head.get("type") == "view":
            for earlier in self._unsent:
                if earlier.head.get("type") == "view":
                    self._unsent.remove(earlier)
                    if message.head.get("echo") is None:
                        message = message._replace(head={**message.head, "echo": earlier.head.get("echo")})
                    break
        self._unsent.append(message)
        self._filled.set()
        if len(self._unsent) > MOST_UNSENT:
            self.close(AGAIN, "the browser took too long")

    def close(self, code: int, reason: str) -> None:
        """Close the connection and say why, after what was sent so far."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(code, reason))

    def stop(self) -> None:
        """Send no more; the connection is closed."""
        self._task.cancel()
        self._unsent.clear()

    async def _close(self, code: int, reason: str) -> None:
        with suppress(TimeoutError):  # a browser that reads nothing hears nothing of it
            async with asyncio.timeout(_CLOSING_SECONDS):
                await self.connection.close(code, _shorten(reason))
        self.connection.transport.abort()

    async def _send(self) -> None:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._unsent:
                    await self.connection.send(encode(self._unsent.popleft()))


class _Arrived(NamedTuple):
    """An item of a slot's inbox: a browser connected."""

    outbox: Outbox


class _Left(NamedTuple):
    """An item of a slot's inbox: a connection is gone."""

    outbox: Outbox


_Item = dict[str, Any] | _Arrived | _Left | None
"""Of a slot's inbox. A dict is a request; None wakes the slot up."""


class _Slot:
    """A session, and its browser while it is connected."""

    def __init__(self, server: Server, identifier: str) -> None:
        self._server, self._identifier = server, identifier
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue(MOST_WAITING)
        self._newest: Outbox | None = None  # of the last connection
        self._outbox: Outbox | None = None  # the same, once the browser got its hello
        self._ended = False  # asked to end
        self._over = False  # nobody reads the inbox

    async def connect(self, outbox: Outbox) -> None:
        """Continue with another connection; the page at the former one is told."""
        former, self._newest = self._newest, outbox
        if former is not None:
            former.close(ELSEWHERE, "continued in another tab")
        await self.give(_Arrived(outbox))

    async def give(self, item: _Item) -> None:
        """Put an item into the inbox, once there is room."""
        if not self._over:
            await self._inbox.put(item)

    def end(self) -> None:
        """Close the session after the call that is under way."""
        self._ended = True
        with suppress(asyncio.QueueFull):  # then there is something to wake up for
            self._inbox.put_nowait(None)

    async def run(self) -> None:
        """Open the session, work for it, and close it."""
        code, reason, session = AGAIN, "the session was closed", None
        call = self._server.call
        try:
            session = await call(self._server.open_session)
            await self._work(session)
        except WmError as error:
            code, reason = REFUSED, str(error)
        except Exception as error:
            _report_defect(error)
            code, reason = REFUSED, "this is a defect of wm; please report it with the lines on its terminal"
        del self._server.slots[self._identifier]
        if self._newest is not None:
            if _shorten(reason) != reason:
                self._newest.put(Message(_error(reason)))
            self._newest.close(code, reason)
        self._over = True
        while not self._inbox.empty():  # whoever waits for room goes on
            self._inbox.get_nowait()
            await asyncio.sleep(0)
        if session is None:
            return
        try:
            line = await call(session.close)
        except WmError as error:
            line = str(error)
        except Exception as error:
            _report_defect(error)
            return
        if line:
            self._server.progress.say(line)

    async def _work(self, session: Session) -> None:
        """Answer requests and advance, until the browser is gone for good or the server ends."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._server.grace  # the next call of advance or, without a browser, the end
        complaint = ""  # of advance, told once
        while not self._ended:
            try:
                async with asyncio.timeout_at(due if math.isfinite(due) else None):
                    item = await self._inbox.get()
            except TimeoutError:
                pass
            else:
                if isinstance(item, _Left):
                    if item.outbox is self._newest:
                        self._newest = self._outbox = None
                        due = clock() + self._server.grace
                elif isinstance(item, _Arrived):
                    if item.outbox is self._newest:  # else another one has arrived since
                        self._outbox, due = self._newest, clock()
                        self._outbox.put(await self._server.call(session.hello))
                elif item is not None:
                    await self._answer(session, item)
                    if self._outbox is not None:
                        due = min(due, clock() + _period(session))
            if clock() < due:
                continue
            if self._outbox is None:
                return
            try:
                self._put(await self._server.call(session.advance))
                complaint = ""
            except WmError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    self._put(Message(_error(complaint)))
            now, period = clock(), _period(session)
            due = max(due + period, now - _LATE_SECONDS) if math.isfinite(period) else math.inf

    async def _answer(self, session: Session, request: dict[str, Any]) -> None:
        try:
            self._put(await self._server.call(lambda: session.receive(request)))
        except WmError as error:
            self._put(Message(_error(str(error), request.get("id"))))

    def _put(self, message: Message | None) -> None:
        if message is not None and self._outbox is not None:
            self._outbox.put(message)


# -- forms ------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> str | bytes:
    """Return the wire form of a message, see the top of this file."""
    if not message.frames:
        return _json(message.head)
    for frame in message.frames:
        assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3, (frame.dtype, frame.shape)
    head = _json({**message.head, "frames": [frame.shape[:2] for frame in message.frames]}).encode()
    return b"".join([struct.pack("<I", len(head)), head, *(frame.tobytes() for frame in message.frames)])


def parse_request(raw: str | bytes) -> dict[str, Any]:
    """Return a request that came as text.

    Raises:
        UsageError: It is binary, too long, not JSON, or not an object.
    """
    if isinstance(raw, bytes):
        raise UsageError("a request is text with JSON, not binary.")
    if len(raw.encode()) > LARGEST_REQUEST:
        raise UsageError(f"a request has at most {LARGEST_REQUEST // 1024} kB.")
    try:
        request = json.loads(raw, parse_constant=_refuse_number, parse_float=_finite_number)
    except RecursionError:
        raise UsageError("a request is nested too deeply.") from None
    except ValueError as error:
        raise UsageError(f"a request is not JSON: {error}.") from None
    if not isinstance(request, dict):
        raise UsageError("a request is a JSON object.")
    return request


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite_number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # seldom: a model diverged
        return json.dumps(_without_nan(value), allow_nan=False, separators=(",", ":"))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return value


def _error(message: str, identifier: Any = None) -> dict[str, Any]:
    return {"type": "error", "message": message, "id": identifier if isinstance(identifier, int) else None}


def _respond(status: HTTPStatus, text: str, kind: str = _PLAIN, more: dict[str, str] | None = None) -> Response:
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    body = text.encode()
    headers = {
        "Content-Type": kind,
        "Content-Length": str(len(body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",  # the address has the token
        "X-Content-Type-Options": "nosniff",
        **(more or {}),
    }
    return Response(status.value, status.phrase, Headers(headers), body)


def _shorten(reason: str) -> str:
    """Cut the reason of a closed connection to what the protocol allows, 123 bytes."""
    return reason if len(reason.encode()) <= 123 else reason.encode()[:120].decode(errors="ignore") + "…"


def _period(session: Session) -> float:
    """Return the seconds from one call of `advance` to the next."""
    return 1 / session.rate if session.rate > 0 else math.inf


def _is_wildcard(host: str) -> bool:
    """Return whether a host to listen at stands for all addresses of the machine."""
    return host in ("", "0.0.0.0", "::")


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _report_defect(error: Exception) -> None:
    traceback.print_exception(error)
