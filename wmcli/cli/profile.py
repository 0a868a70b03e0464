"""`wm profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.human import count
from wmcli.cli.options import (
    DEFAULT_RUN,
    RUN_PANEL,
    Device,
    Force,
    Json,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    complete_preset,
    overrides,
)
from wmcli.cli.output import Row, answer, draw_beside, emit_json, line, published
from wmcli.errors import UsageError
from wmcli.progress import duration, size

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

COMPARE_PANEL = "Comparison"
SEVERAL = ("models", "presets")
COMPARED = ("backbones", *SEVERAL)
SUITE_PANEL = "Suite"
SIZE = ("backbone", "layers", "width", "parameters", "note", "error")
MODEL = ("preset", "backbone", "layers", "width", "cache", "parameters", "frames_at_once")


def profile(
    run: RunFolder = DEFAULT_RUN,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Preset of a new run, see wm presets. A run keeps its own. Repeatable with --compare models, presets.",
            rich_help_panel=RUN_PANEL,
            autocompletion=complete_preset,
        ),
    ] = None,
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
        Literal["backbones", "models", "presets"] | None,
        typer.Option(
            metavar="WHAT",
            help="Measure only the cost of each backbone by length, at equal parameter counts (backbones); of the whole"
            " world models of each --preset by length, decoding included (models; without --preset S4WM's and its"
            " baselines); or the seconds of an epoch of each --preset by stage (presets).",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths in elements of a backbone, or in frames of an episode. Default: 64,256,1024,4096 for"
            " backbones, 128,256,512,1024 for models.",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Time the tiles of each kernel in the stages of the settings, and store the fastest for all later"
            " commands on this GPU. A run that is resumed afterwards is no longer equal in every bit.",
        ),
    ] = False,
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
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Only estimate time and memory of wm run with these settings, from some seconds of its work.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Try the suite out: small batches, one sample.", rich_help_panel=SUITE_PANEL),
    ] = False,
    force: Force = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Measure time and memory of each stage and kernel, beside the limits of the machine.

    Examples:
        wm profile --run runs/catch --device cuda
        wm profile --compare backbones --lengths 64,1024
        wm profile --compare models --preset s4wm-2d --lengths 100,200
        wm profile --compare presets --preset rem --preset iris-rem-config
        wm profile --estimate --preset drama-atari --set environment.id=ALE/Pong-v5
        wm profile --suite h100.json --device cuda
        wm profile --preset rem --tune --device cuda
    """
    changes = overrides(settings, {"seed": seed, "training.device": device})
    preset = presets[0] if presets else None
    if presets and len(presets) > 1 and compare not in SEVERAL:
        raise UsageError("several presets are for --compare models and --compare presets: give one --preset.")
    if quick and not suite:
        raise UsageError("--quick is for --suite: give both.")
    if suite:
        if part or frames or trace or compare or lengths or tune or estimate:
            raise UsageError(
                "--suite measures everything: omit --part, --frames, --trace, --compare, --lengths, --tune, --estimate."
            )
        _profile_suite(suite, preset, changes, quick, force, as_json, quiet)
        return
    arguments: dict[str, Any] = {"parts": part and [part], "frames": frames, "trace": trace or None}
    if estimate and (part or frames or trace or compare or lengths or tune or force):
        raise UsageError(
            "--estimate measures nothing else: omit --part, --frames, --trace, --compare, --tune, --force."
        )
    if tune and (part or frames or trace or compare or lengths or force):
        raise UsageError("--tune measures nothing else: omit --part, --frames, --trace, --compare, --lengths, --force.")
    if compare and (part or frames or trace):
        raise UsageError(f"--compare measures {compare} only: omit --part, --frames and --trace.")
    if trace and part not in (None, "stages"):
        raise UsageError(f"--trace is a trace of the stages, and --part {part} measures none: omit one of them.")
    if frames and part != "experience":
        raise UsageError("--frames is for --part experience: give both.")
    if lengths is not None and compare not in ("backbones", "models"):
        raise UsageError("--lengths is for --compare backbones and --compare models: give both.")
    some = None if lengths is None else _lengths(lengths)
    if compare == "presets" and not presets:
        raise UsageError("--compare presets needs two presets or more: repeat --preset NAME.")
    if compare == "models" and not presets:
        from wmcli.stages.profile_models import MODELS

        presets = list(MODELS)
    from wmcli.stages.opening import open_context

    preset = presets[0] if presets else None
    context = open_context(run, preset, changes, create=True, quiet=quiet or estimate, force=force, trust=trust)
    if estimate:
        from wmcli.stages.profile_cycle import estimate_run

        _show_estimate(estimate_run(context), as_json)
        return
    if tune:
        from wmcli.stages.profile import tune_kernels

        _show_tiles(tune_kernels(context), as_json)
        return
    if compare:
        from wmcli.stages.profile_comparison import compare as stage

        artifact = stage(context, what=compare, presets=presets or (), lengths=some)
    else:
        from wmcli.stages.profile import profile as measure

        artifact = measure(context, **{name: value for name, value in arguments.items() if value is not None})
    if not (as_json or quiet):
        show_profile(artifact)
    published(artifact, as_json)


def _show_estimate(estimate: dict[str, Any], as_json: bool) -> None:
    """Print the work of a run, and its sum."""
    if as_json:
        emit_json(estimate)
        return
    rows = [
        {
            "work": row["what"],
            "count": count(row["count"]),
            "unit": row["unit"],
            "seconds each": float(f"{row['seconds']:.3g}"),
            "in all": duration(row["total_seconds"]),
            "share": f"{row['share']:.0%}",
        }
        for row in estimate["rows"]
    ]
    answer(rows, list(rows[0]))
    device = f", {size(estimate['device_memory'])} on the GPU" if estimate["device_memory"] else ""
    typer.echo(
        f"about {duration(estimate['seconds'])} and {size(estimate['memory'])}{device}, without the evaluation of"
        f" {estimate['evaluation_episodes']} episodes",
        err=True,
    )


def _show_tiles(tuned: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(tuned)
        return
    if rows := tuned["chosen"]:
        shown = [row | {"tile": ", ".join(f"{key} {value}" for key, value in row["tile"].items())} for row in rows]
        draw_beside(shown, list(rows[0]), "fastest tiles")
    line(tuned["file"])


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
    from wmcli.report.cost import epoch_table
    from wmcli.report.profile_tables import by_length, operator_share, readable

    metrics = artifact.metrics
    of: defaultdict[str, list[Row]] = defaultdict(list)
    for row in metrics["rows"]:
        of[row["part"]].append(row)
    tables: dict[str, Sequence[Row]] = {
        "ceilings": [readable(row) for row in metrics["ceilings"]],
        "backbones of about one size": [{name: row[name] for name in SIZE} for row in metrics.get("backbones", [])],
        "elements a second, and how many times as long as the preset's backbone": by_length(
            of["backbones"], "backbone"
        ),
        "models": [{name: row[name] for name in MODEL} for row in metrics.get("models", [])],
        "frames a second, and how many times as long as the first model": by_length(of["models"], "preset"),
        "seconds of an epoch, and how many times as long as the first preset": epoch_table(of["presets"], "preset"),
    }
    tables |= {part: [readable(row) for row in rows] for part, rows in of.items() if part not in COMPARED}
    tables["backbones"] = [readable(row) for row in of["backbones"] if "backbone" not in row]
    tables["where the time goes"] = [operator_share(row) for row in metrics.get("operators", [])]
    for title, rows in tables.items():
        columns = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
        if rows:
            draw_beside(rows, list(columns), f"{artifact.name}: {title}")
