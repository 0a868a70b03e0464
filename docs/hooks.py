"""MkDocs hooks: pages that are made while the site is built.

README.md, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md stand at the top of the repository. They become pages with
their links rewritten. The page of commands comes from the command line's own help.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from wmcli.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_rewrite_links((ROOT / source).read_text())))
    files.append(File.generated(config, "commands.md", content="\n".join(_commands())))
    return files


def _rewrite_links(text: str) -> str:
    text = text.replace("](docs/", "](")
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Every command takes `-h`. Progress and errors go to stderr; stdout carries the result alone."
    yield "[Exit codes](artifacts.md#exit-codes) tell scripts how a command ended.\n"
    yield from _below(typer.main.get_command(app), "wm")


def _below(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        words = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _below(command, words)
        else:
            yield from _command(command, words)


def _command(command: Any, words: str) -> Iterator[str]:
    text, _, examples = (command.help or "").partition("Examples:")
    context = command.make_context(words, [], resilient_parsing=True)
    parameters = command.get_params(context)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    yield f"## {words}\n"
    yield f"```\n{usage}\n```\n"
    yield text.strip() + "\n"
    if examples.strip():
        yield "```sh\n" + "\n".join(line.strip() for line in examples.strip().splitlines() if line.strip()) + "\n```\n"
    yield "| option | description |\n|---|---|"
    for each in parameters:
        record = each.get_help_record(context)
        if record and "--help" not in record[0]:
            option, description = (" ".join(part.split()).replace("|", "\\|") for part in record)
            yield f"| `{option}` | {description} |"
    yield ""
