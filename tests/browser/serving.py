"""A server of pages in a thread, and a socket to it as a browser opens one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from wmcli.browser.server import GRACE, Server, Session, bind
from wmcli.progress import Progress


class Running(NamedTuple):
    """A server that runs. Its sessions are closed when the block ends."""

    server: Server
    lines: list[str]
    """That it said."""
    stop: Callable[[], object]
    """Ends the server, as a signal does."""

    @property
    def address(self) -> str:
        """Of the page, with the token."""
        return self.server.address

    @property
    def host(self) -> str:
        """Name and port."""
        return urlsplit(self.address).netloc

    @contextmanager
    def socket(
        self, session: str = "a-session", *, token: str | None = None, origin: str | None = "", query: str | None = None
    ) -> Iterator[ClientConnection]:
        """Connect as a page does, or with another token, origin ("": the right one) or query."""
        asked = query if query is not None else f"token={token or self.server.token}&session={session}"
        origin = f"http://{self.host}" if origin == "" else origin
        with connect(f"ws://{self.host}/socket?{asked}", origin=origin, max_size=None, close_timeout=1) as socket:  # type: ignore[arg-type]
            yield socket


class _Lines(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@contextmanager
def serving(
    open_session: Callable[[], Session], page: str = "", *, grace: float = GRACE, host: str = "127.0.0.1"
) -> Iterator[Running]:
    """Serve a page in a thread."""
    listening, progress = bind(host, 0), _Lines()
    started: list[tuple[Server, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def work() -> None:
        stop = asyncio.Event()
        async with Server(open_session, page, listening, host=host, progress=progress, grace=grace) as server:
            started.append((server, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(10)
    server, loop, stop = started[0]
    try:
        yield Running(server, progress.lines, lambda: loop.call_soon_threadsafe(stop.set))
    finally:
        with suppress(RuntimeError):  # it was stopped before
            loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()
