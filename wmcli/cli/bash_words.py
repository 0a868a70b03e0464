"""Completion in bash, which breaks words at `=`, `:` and `@` and replaces only the part after them.

For `--set backbone.kind=ma` bash requests completions of `ma`, the word after a word `=`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

BREAKS = ("=", ":", "@")


def is_completing() -> bool:
    """Return whether bash started this process for completions."""
    return os.environ.get("_WM_COMPLETE") == "complete_bash"


def answer(complete: Callable[[], int]) -> int:
    """Call `complete` with whole words, and print the part of each completion that bash lacks."""
    text = os.environ.get("COMP_WORDS", "")
    words = text.split("\n") if "\n" in text else text.split(" ")
    joined, current, head = join(words, int(os.environ.get("COMP_CWORD") or 0))
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(current)}
    with redirect_stdout(StringIO()) as printed:
        code = complete()
    print(*(line.removeprefix(head) for line in printed.getvalue().splitlines()), sep="\n")  # noqa: T201
    return code


def join(words: list[str], current: int) -> tuple[list[str], int, str]:
    """Join the words that bash broke.

    Args:
        words: Words of the command line, as bash has them.
        current: Index of the word to complete.

    Returns:
        The whole words, the index of the one to complete, and the beginning of a completion that bash has already.
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
    if head.startswith("--"):  # without the option of `--set=key=`
        head = head.partition("=")[2]
    return joined, place, head.removesuffix("@")  # bash replaces this one too
