"""`wm settings`: every key with its type, default, unit and description."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, complete_key, refuse_both_forms
from wmcli.cli.output import answer, emit_json
from wmcli.errors import UsageError


def settings(
    section: Annotated[
        str | None,
        typer.Argument(metavar="SECTION", help="A section, such as controller, or a key.", autocompletion=complete_key),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="NAME", help="Only keys of this kind, such as mamba2.")
    ] = None,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """List the settings: key, type, default, unit and description.

    Examples:
        wm settings
        wm settings backbone --kind mamba2
        wm settings controller.discount
    """
    from wmcli.config import did_you_mean
    from wmcli.settings.describe import settings_of_section

    refuse_both_forms(as_json, form)
    every = settings_of_section()
    rows = [each for each in settings_of_section(section) if kind in (None, *each.kind.split())]
    if not rows:
        sections = {each.key.partition(".")[0] for each in every}
        keys = {each.key for each in every if each.key.startswith(str(section).partition(".")[0] + ".")}
        raise UsageError(
            f"no setting {section or ''} of kind {kind}."
            if kind
            else f"no setting or section '{section}'; {did_you_mean(str(section), keys or sections)}"
        )
    if as_json:
        emit_json([each._asdict() for each in rows])
    else:
        answer([each._asdict() for each in rows], ["key", "kind", "type", "default", "unit", "description"], form)
