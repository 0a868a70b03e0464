"""Assemble a page: one HTML text that needs nothing else, neither from the server nor from a network."""

from __future__ import annotations

import re
from importlib import resources

NONCE = "$NONCE$"
"""Stands in every style and script; the server puts a new random one in its place, which the page's policy names."""
_LINK = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


def page(name: str) -> str:
    """Return the page `name`.html with the style sheets and scripts that it links put in their places."""

    def put_style(link: re.Match[str]) -> str:
        return f'<style nonce="{NONCE}">\n{_read(link[1])}</style>'

    def put_script(link: re.Match[str]) -> str:
        return f'<script nonce="{NONCE}">\n{_read(link[1])}</script>'

    return _SCRIPT.sub(put_script, _LINK.sub(put_style, _read(f"{name}.html")))


def _read(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
