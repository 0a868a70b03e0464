"""Options that several commands share, and their shell completion.

`wm --help` imports this file, so it may not import torch, zarr or the settings at module level.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wmcli.cli.output import Form
from wmcli.errors import UsageError

DEFAULT_RUN = Path("runs/default")

RUN_PANEL = "Run and settings"
INPUT_PANEL = "Inputs"
REPEAT_PANEL = "Repeating work"
OUTPUT_PANEL = "Output"


# -- shell completion -------------------------------------------------------------------------------------------------


def complete_preset() -> list[str]:
    from wmcli.config import preset_names

    return preset_names()


def complete_kind() -> list[str]:
    from wmcli.artifacts import KINDS

    return list(KINDS)


def complete_reference(context: typer.Context) -> list[str]:
    """Return the kinds of artifacts, and every version in the run of `--run`."""
    from wmcli.artifacts import KINDS, Run

    folder = Path(context.params.get("run") or DEFAULT_RUN)
    if not folder.is_dir():
        return list(KINDS)
    run = Run.open(folder, create=False)
    return [*KINDS, *(f"{kind}@{version}" for kind in KINDS for version in run.versions(kind))]


def complete_setting(incomplete: str) -> list[str]:
    """Return `section.key=` for every setting, and `section.key=value` for a key of few values."""
    from wmcli.cli.setting_keys import setting_keys

    keys = setting_keys()
    key, equals, _ = incomplete.partition("=")
    matching = [key] if equals else [each for each in keys if each.startswith(key)]
    if len(matching) == 1 and (values := _values(matching[0], keys)):
        return [f"{matching[0]}={value}" for value in values]
    return [f"{each}=" for each in matching]


def complete_key() -> list[str]:
    from wmcli.cli.setting_keys import setting_keys

    return list(setting_keys())


def _values(key: str, keys: Mapping[str, Sequence[str]]) -> Sequence[str]:
    own = {
        "environment.id": complete_environment,
        "training.device": complete_device,
    }
    return own[key]() if key in own else keys.get(key, ())


def complete_backbone() -> list[str]:
    from wmcli.cli.setting_keys import setting_keys

    return list(setting_keys()["backbone.kind"])


def complete_environment() -> list[str]:
    from wmcli.envs import list_environments

    return [row["id"] for row in list_environments()]


def complete_device() -> list[str]:
    """Return the devices. NVIDIA's driver has a file for each GPU; torch would take seconds."""
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return ["auto", "cpu", *(["cuda"] if gpus else []), *(f"cuda:{gpu.name[len('nvidia') :]}" for gpu in gpus)]


def _reference(flag: str, purpose: str) -> Any:
    return typer.Option(
        flag,
        metavar="REF",
        help=f"{purpose}: {flag[2:]}@7, or the path of one in another run. Default: the newest of this run.",
        rich_help_panel=INPUT_PANEL,
        autocompletion=_complete_kind_of(flag[2:]),
    )


def _complete_kind_of(kind: str) -> Callable[[typer.Context], list[str]]:
    def complete(context: typer.Context) -> list[str]:
        return [name for name in complete_reference(context) if name.partition("@")[0] == kind]

    return complete


def complete_actor(context: typer.Context) -> list[str]:
    return [*_complete_kind_of("controller")(context), "random"]


# -- options ----------------------------------------------------------------------------------------------------------

HeldOut = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Hold the last N recorded episodes out for test, N before them for validation.",
        rich_help_panel=INPUT_PANEL,
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        min=8, max=1024, metavar="N", help="Resize recorded images to N x N pixels.", rich_help_panel=INPUT_PANEL
    ),
]
RunFolder = Annotated[
    Path,
    typer.Option("--run", metavar="DIR", envvar="WM_RUN", help="The run directory.", rich_help_panel=RUN_PANEL),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Preset of a new run, see wm presets. A run keeps its own.",
        rich_help_panel=RUN_PANEL,
        autocompletion=complete_preset,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, e.g. training.precision=float32; wm run keeps it, others use it once. Repeatable.",
        rich_help_panel=RUN_PANEL,
        autocompletion=complete_setting,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Short for --set seed=N.", rich_help_panel=RUN_PANEL)
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda, cuda:1, ... Short for --set training.device=NAME.",
        rich_help_panel=RUN_PANEL,
        autocompletion=complete_device,
    ),
]

Environment = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ID",
        help="The game: wm/Catch-v0, ALE/Pong-v5, ... Short for --set environment.id=ID.",
        rich_help_panel=RUN_PANEL,
        autocompletion=complete_environment,
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        metavar="NAME",
        help="The sequence model: retnet, mamba2, s4, ... Short for --set backbone.kind=NAME.",
        rich_help_panel=RUN_PANEL,
        autocompletion=complete_backbone,
    ),
]

Experience = Annotated[str | None, _reference("--experience", "Experience to learn from")]
Tokenizer = Annotated[str | None, _reference("--tokenizer", "Tokenizer to use, or (Drama) to start from, or none")]
Dynamics = Annotated[str | None, _reference("--dynamics", "Dynamics model to imagine with")]
Controller = Annotated[str | None, _reference("--controller", "Controller that acts")]
Teacher = Annotated[
    str | None,
    _reference("--controller", "For planning: controller whose reanalysis gives the targets, or none"),
]

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code that a run from elsewhere names (environment.id=module:Id). Remembered.",
        rich_help_panel=RUN_PANEL,
    ),
]

Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Start again instead of resuming interrupted work.", rich_help_panel=REPEAT_PANEL),
]
More = Annotated[
    bool,
    typer.Option("--more", help="Train the newest version further.", rich_help_panel=REPEAT_PANEL),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Make another version, even if one exists.", rich_help_panel=REPEAT_PANEL),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=OUTPUT_PANEL)]
Format = Annotated[
    Form | None,
    typer.Option(
        "--format",
        metavar="FORM",
        help="table, tsv, csv, markdown or latex. Default: table on a terminal, tsv in a pipe.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only warnings and errors on stderr.", rich_help_panel=OUTPUT_PANEL)
]


# -- values of options ------------------------------------------------------------------------------------------------


LONGEST_WORD = 1 << 16
"""Characters of one word of a command line."""


def refuse_odd_words(arguments: Sequence[str]) -> None:
    """Check the words of a command line, before anything takes an empty one for one that was not given.

    Raises:
        UsageError: A word, the value of an option or WM_RUN is empty, or has characters that no name or value has.
    """
    before = ""
    for word in arguments:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        option = option or (before if before.startswith("-") else "")
        if not (value.strip() or (word.startswith("--") and not equals)):
            raise UsageError(f"{option or 'an argument'} is empty: give a value, or leave it out.")
        _check_text(word, option or "an argument", is_setting=option == "--set")
        before = word
    if "WM_RUN" in os.environ:
        if not os.environ["WM_RUN"].strip():
            raise UsageError("WM_RUN is empty: give it a folder, or unset it.")
        _check_text(os.environ["WM_RUN"], "WM_RUN")


def _check_text(text: str, where: str, *, is_setting: bool = False) -> None:
    """Raise UsageError if a text has characters of no name; values of settings may have several lines."""
    if len(text) > LONGEST_WORD:
        raise UsageError(f"{where}: {len(text)} characters, more than {LONGEST_WORD}.")
    odd = next((c for c in text if ord(c) < 32 and not (is_setting and c in "\t\n\r") or 0xD800 <= ord(c) < 0xE000), "")
    if odd:
        what = "bytes that are no UTF-8" if ord(odd) >= 0xD800 else f"the control character {odd!r}"
        raise UsageError(f"{where}: {text[:80]!r} has {what}; names and values have neither.")


def overrides(texts: Sequence[str] | None, short: Mapping[str, Any]) -> list[str]:
    """Return the texts of `--set`, then the short forms, which win: `{"seed": 3}` becomes `"seed=3"`."""
    return [*(texts or ()), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def is_default(context: typer.Context, parameter: str) -> bool:
    """Return whether neither the command line nor the environment gave a parameter of a command."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "DEFAULT"


def may_create(*references: str | None) -> bool:
    """Return whether a stage may begin a new run: every input is the path of an artifact that exists."""
    from wmcli.artifacts import KINDS

    return all(
        reference is not None and reference.partition("@")[0] not in KINDS and Path(reference).exists()
        for reference in references
    )


def refuse_both(more: bool, force: bool) -> None:
    if more and force:
        raise UsageError("--more continues the newest version and --force starts without it: give one of them.")


def refuse_both_forms(as_json: bool, form: Form | None) -> None:
    if as_json and form:
        raise UsageError("--json and --format both choose the form of the output: give one of them.")
