"""`wm profile --compare`: backbones of one size, or models or epochs of several presets, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from wmcli.artifacts import Artifact
from wmcli.config import is_file
from wmcli.errors import UsageError
from wmcli.report.cost import draw_epochs
from wmcli.settings import resolve
from wmcli.stages import profile_backbones as backbones
from wmcli.stages import profile_models as models
from wmcli.stages.binding import fix_precision
from wmcli.stages.checks import check_batches
from wmcli.stages.context import Context
from wmcli.stages.loop import COLLECT, DYNAMICS, IMAGINE, TOKENIZER
from wmcli.stages.profile import measuring, publish_rows
from wmcli.stages.profile_cycle import check_projected
from wmcli.stages.profile_presets import compare_presets

What = Literal["backbones", "models", "presets"]


def compare(
    context: Context, *, what: What, presets: Sequence[str] = (), lengths: Sequence[int] | None = None
) -> Artifact:
    """Compare, and publish the rows and their picture.

    Args:
        context: The run, with the settings of the first preset.
        what: What to compare.
        presets: Presets of the models or epochs; the first is the run's own.
        lengths: Lengths of the sequences of backbones and models; None takes those of the comparison.

    Raises:
        UsageError: The presets cannot be compared. Nothing was measured.
        WmError: The steps of a backbone differ from its forward.
    """
    contexts = {_name(context.preset): context}
    for preset in presets[1:]:
        if _name(preset) in contexts:
            raise UsageError(f"--preset {preset}: two presets have the name {_name(preset)}, give each once.")
        contexts[_name(preset)] = _beside(context, preset)
    if what == "models":
        models.check_models(contexts, lengths or models.LENGTHS)
    elif what == "presets":
        if len(contexts) < 2:
            raise UsageError("--compare presets needs two presets or more: repeat --preset NAME.")
        for each in contexts.values():
            check_projected(each, "--compare presets")
    with measuring(context) as (work, bench):
        metrics: dict[str, Any] = {"ceilings": bench.ceilings}
        match what:
            case "backbones":
                metrics[what], rows = backbones.compare_backbones(
                    context.settings, context.machine, bench, lengths or backbones.LENGTHS
                )
            case "models":
                metrics[what], rows = models.compare_models(contexts, bench, lengths or models.LENGTHS)
            case "presets":
                rows = compare_presets(contexts, bench)
        if context.pictures:
            picture = work.payload / f"{what}.png"
            match what:
                case "backbones":
                    backbones.draw_comparison(rows, picture)
                case "models":
                    models.draw_models(rows, picture)
                case "presets":
                    draw_epochs(rows, "preset", (COLLECT, TOKENIZER, DYNAMICS, IMAGINE), picture)
        return publish_rows(context, work, metrics, {what: rows})


def _name(preset: str) -> str:
    """Return the name of a preset in rows and pictures: of a file, without its folder and ending."""
    return Path(preset).stem if is_file(preset) else preset


def _beside(context: Context, preset: str) -> Context:
    """Return the context of another preset on the same machine, with the overrides of the command.

    Raises:
        UsageError: They do not resolve.
    """
    settings = fix_precision(resolve(preset, context.overrides))
    check_batches(settings)
    return Context(context.run, preset, settings, context.progress)
