"""Completion in bash, which breaks words at `=`, `:` and `@` before it asks, and replaces only what comes after.

So in `--set backbone.kind=ma` the shell asks about `ma`, the word after a word `=`. Typer's script passes that on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

BREAKS = ("=", ":", "@")


def asked() -> bool:
    """Whether this process is to answer bash's question for completions."""
    return os.environ.get("_WM_COMPLETE") == "complete_bash"


def answer(complete: Callable[[], int]) -> int:
    """Let `complete` answer for whole words, and print of each answer what bash has not yet."""
    given = os.environ.get("COMP_WORDS", "")
    words = given.split("\n") if "\n" in given else given.split(" ")
    joined, current, head = join(words, int(os.environ.get("COMP_CWORD") or 0))
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(current)}
    with redirect_stdout(StringIO()) as printed:
        code = complete()
    print(*(line.removeprefix(head) for line in printed.getvalue().splitlines()), sep="\n")  # noqa: T201
    return code


def join(words: list[str], current: int) -> tuple[list[str], int, str]:
    """Put broken words together.

    Args:
        words: of the command line, as bash has them.
        current: index of the word to complete.

    Returns:
        The whole words; the index of the one to complete; what of an answer bash has already, and does not replace.
    """
    joined: list[str] = []
    place, head = current, ""
    for index, word in enumerate(words):
        if joined and (word in BREAKS or joined[-1].endswith(BREAKS)):
            joined[-1] += word
        else:
            joined.append(word)
        if index == current:
            place = len(joined) - 1
            head = joined[-1] if word in BREAKS else joined[-1].removesuffix(word)
    if head.startswith("--"):  # of `--set=key=` the option is no part of an answer
        head = head.partition("=")[2]
    return joined, place, head.removesuffix("@")  # which bash replaces too
