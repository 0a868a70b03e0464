"""`wm profile`."""

from __future__ import annotations

from wmcli.cli.options import DEFAULT_RUN, Device, Force, Json, Preset, Quiet, RunFolder, Seed, Set, overrides
from wmcli.cli.output import draw_beside, published


def profile(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure where the time and the memory of each stage go on this machine.

    Example: wm profile --run runs/catch --device cuda
    """
    from wmcli.stages.context import open_context
    from wmcli.stages.profile import profile as stage

    changes = overrides(settings, {"seed": seed, "training.device": device})
    artifact = stage(open_context(run, preset, changes, create=True, quiet=quiet, force=force))
    if not (as_json or quiet):
        rows = artifact.metrics["rows"]
        draw_beside(rows, list(rows[0]), artifact.name)
    published(artifact, as_json)
