"""`wm profile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.options import DEFAULT_RUN, Device, Force, Json, Preset, Quiet, RunFolder, Seed, Set, overrides
from wmcli.cli.output import Row, draw_beside, emit_json, line, published
from wmcli.errors import UsageError
from wmcli.report.profile_tables import arithmetic, duration, megabytes, short_number

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

COMPARE_PANEL = "Comparison"
SUITE_PANEL = "Suite"
SIZE = ("backbone", "layers", "width", "parameters", "note", "error")


def profile(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    part: Annotated[
        Literal["stages", "kernels", "experience"] | None,
        typer.Option(
            metavar="PART", help="Part to measure: stages, kernels or experience. Default: stages and kernels."
        ),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Frames that --part experience writes and reads. Default: 100,000."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write a trace of one call of each stage into the artifact, for Perfetto.")
    ] = False,
    compare: Annotated[
        Literal["backbones"] | None,
        typer.Option(
            metavar="PARTS",
            help="backbones: measure only the cost of each backbone by length, at equal parameter counts.",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Lengths in elements. Default: 64,256,1024,4096.", rich_help_panel=COMPARE_PANEL
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Measure everything worth knowing of a machine into this file, without a run directory: its limits,"
            " kernels beside public ones, the stages of the papers' presets (or of --preset), and the time of whole"
            " runs. The same command goes on where it stopped. Tables are written beside it, into FILE.md.",
            rich_help_panel=SUITE_PANEL,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Try the suite out: small batches, one sample.", rich_help_panel=SUITE_PANEL),
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure time and memory of each stage and kernel, beside the limits of the machine.

    Examples:
        wm profile --run runs/catch --device cuda
        wm profile --compare backbones --lengths 64,1024
        wm profile --suite h100.json --device cuda
    """
    changes = overrides(settings, {"seed": seed, "training.device": device})
    if quick and not suite:
        raise UsageError("--quick is for --suite: give both.")
    if suite:
        if part or frames or trace or compare or lengths:
            raise UsageError("--suite measures everything: omit --part, --frames, --trace, --compare and --lengths.")
        _profile_suite(suite, preset, changes, quick, force, as_json, quiet)
        return
    arguments: dict[str, Any] = {"parts": part and [part], "frames": frames, "trace": trace or None, "compare": compare}
    if compare and (part or frames or trace):
        raise UsageError("--compare measures backbones only: omit --part, --frames and --trace.")
    if trace and part not in (None, "stages"):
        raise UsageError(f"--trace is a trace of the stages, and --part {part} measures none: omit one of them.")
    if frames and part != "experience":
        raise UsageError("--frames is for --part experience: give both.")
    if lengths is not None:
        if not compare:
            raise UsageError("--lengths is for --compare backbones: give both.")
        arguments["lengths"] = _lengths(lengths)
    from wmcli.stages.opening import open_context
    from wmcli.stages.profile import profile as stage

    context = open_context(run, preset, changes, create=True, quiet=quiet, force=force)
    artifact = stage(context, **{name: value for name, value in arguments.items() if value is not None})
    if not (as_json or quiet):
        show_profile(artifact)
    published(artifact, as_json)


def _profile_suite(
    file: Path, preset: str | None, changes: list[str], quick: bool, force: bool, as_json: bool, quiet: bool
) -> None:
    from wmcli.progress import Progress
    from wmcli.stages.profile_suite import profile_suite

    presets = None if preset is None else [preset]
    document = profile_suite(
        file, presets=presets, overrides=changes, quick=quick, force=force, progress=Progress(quiet)
    )
    if as_json:
        emit_json(document)
    else:
        line(str(file))
        line(str(file.with_suffix(".md")))


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise UsageError(f"--lengths {text}: give numbers of elements, 2 or more, as in --lengths 64,256,1024.")
    return lengths


# -- tables for people ------------------------------------------------------------------------------------------------


def show_profile(artifact: Artifact) -> None:
    """Draw the tables of a profile on the terminal."""
    metrics = artifact.metrics
    tables: dict[str, Sequence[Row]] = {
        "ceilings": [_readable(row) for row in metrics["ceilings"]],
        "backbones of about one size": [{name: row[name] for name in SIZE} for row in metrics.get("backbones", [])],
        "elements a second, and how many times as long as the preset's backbone": _by_length(metrics["rows"]),
    }
    for row in metrics["rows"]:
        if "backbone" not in row:
            tables[row["part"]] = [*tables.get(row["part"], []), _readable(row)]
    tables["where the time goes"] = [_share(row) for row in metrics.get("operators", [])]
    for title, rows in tables.items():
        columns = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
        if rows:
            draw_beside(rows, list(columns), f"{artifact.name}: {title}")


def _readable(row: Row) -> Row:
    """Return a row in fewer columns, with units."""
    shown: dict[str, Any] = {"what": row["what"], "shape": row["shape"], "in": row.get("implementation")}
    if "skipped" in row:
        return shown | {"time": f"skipped: {row['skipped']}"}
    if "ratio" in row:
        return shown | {"time": f"{row['ratio']:.3g} times ({row['ratio_low']:.3g} to {row['ratio_high']:.3g})"}
    shown["time"] = duration(row["seconds"], row["seconds_low"], row["seconds_high"])
    if row["rate"] is not None:
        shown["rate"] = f"{short_number(row['rate'])} {row['unit']}"
    if row["operations_per_second"]:  # 0 where nothing was counted
        shown["arithmetic"] = arithmetic(row)
    if row["bytes_per_second"] is not None:
        shown["traffic"] = f"{short_number(row['bytes_per_second'] / 1e9)} GB/s, {100 * row['of_copy']:.3g} %"
    if row["peak_bytes"] is not None:
        shown["peak"] = megabytes(row["peak_bytes"])
    if "seconds_in_all" in row:
        shown["in all"] = f"{short_number(row['seconds_in_all'])} s, {megabytes(row['bytes_on_disk'])} on disk"
    if "epoch_share" in row:
        shown["epoch"] = f"{short_number(row['epoch_seconds'])} s, {100 * row['epoch_share']:.3g} %"
    if row.get("launches") is not None:
        shown["launches"] = f"{row['launches']:,}, {row['waits']} waits"
    if row.get("error") is not None:
        shown["error"] = f"{row['error']:.1g}"
    return shown


def _by_length(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each length and backbone, training and imagination side by side."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if "backbone" in row:
            cell = shown.setdefault(
                (row["length"], row["backbone"]), {"length": row["length"], "backbone": row["backbone"]}
            )
            if "skipped" in row:
                cell[row["what"]] = f"skipped: {row['skipped']}"
                continue
            times = "" if row["times_as_long"] is None else f", {row['times_as_long']:.3g} times"
            cell[row["what"]] = f"{short_number(row['rate'])}/s{times}"
            if "state_bytes" in row:
                cell["state"] = megabytes(row["state_bytes"])
            elif row["peak_bytes"] is not None:
                cell["peak"] = megabytes(row["peak_bytes"])
    return list(shown.values())


def _share(row: Row) -> Row:
    shown = {
        "what": row["what"],
        "operator": row["operator"],
        "share": f"{100 * row['share']:.1f} %",
        "calls": row["calls"],
    }
    if row["operations_per_second"]:
        shown["GFLOP"] = short_number(row["operations"] / 1e9)
        shown["arithmetic"] = arithmetic(row)
    return shown
