"""Options of the commands that show a page in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable
from typing import Annotated

import typer

BROWSER_PANEL = "Browser"

Host = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Address to listen at; others than the default are reached from other machines.",
        rich_help_panel=BROWSER_PANEL,
    ),
]
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port to listen at; 0 takes any free one.", rich_help_panel=BROWSER_PANEL),
]
OpenPage = Annotated[
    bool | None,
    typer.Option(
        "--open/--no-open",
        help="Open the page in this machine's browser. Default: if there is a display.",
        rich_help_panel=BROWSER_PANEL,
        show_default=False,
    ),
]
LOCAL, PORT = "127.0.0.1", 8765


def opener(wanted: bool | None) -> Callable[[str], object]:
    """Return a function that opens an address in the system's browser, if that is wanted.

    Args:
        wanted: None opens it if there is a display.
    """
    if wanted is None:
        wanted = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return webbrowser.open if wanted else lambda _: None
