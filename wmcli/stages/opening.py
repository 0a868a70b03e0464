"""Open a run for a command: resolve its settings, and check them before any work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wmcli.artifacts import Run
from wmcli.artifacts.environment import is_recorded
from wmcli.artifacts.trust import check_trusted
from wmcli.assemble import parameter_counts
from wmcli.envs import protocol
from wmcli.errors import ArtifactError, UsageError
from wmcli.progress import Progress
from wmcli.settings import Settings, resolve
from wmcli.spaces import Spaces
from wmcli.stages.binding import (
    Binding,
    change_settings,
    check_same_preset,
    fix_precision,
    original_settings,
    preset_digest,
)
from wmcli.stages.checks import check_batches
from wmcli.stages.context import Context
from wmcli.training.device import Machine, has_bfloat16

DEFAULT_PRESET = "quickstart"


def open_context(
    run: Path,
    preset: str | None,
    overrides: Sequence[str] = (),
    *,
    create: bool,
    quiet: bool = False,
    fresh: bool = False,
    force: bool = False,
    more: bool = False,
    bind: bool = False,
    from_epoch: int | None = None,
    trust: bool = False,
) -> Context:
    """Open a run for a command. A new run is bound to its preset and overrides when its first job starts.

    Args:
        run: The run directory.
        preset: Preset of a new run; None is the bound one, or `quickstart`.
        overrides: `section.key=value` texts. In a bound run they count for this command only, without `bind`.
        create: Allow a new run.
        quiet: Show no progress.
        fresh: Discard the checkpoints of interrupted jobs.
        force: Make another version even if a job is done.
        more: Train the newest version further.
        bind: Bind the run to the overrides, from `from_epoch` on or from the start.
        from_epoch: Epoch of `wm run`.
        trust: Import what the settings of the run name, also if it was begun elsewhere.

    Raises:
        UsageError: The settings do not resolve, the run is bound to another preset, a setting cannot change between
            epochs, or a run from elsewhere imports code.
        ArtifactError: The run does not exist and `create` is False.
    """
    progress = Progress(quiet)
    if not create and not run.exists():
        raise ArtifactError(f"no run at {run}; start one with: wm collect --run {run}")
    bound = Run.open(run, create=False).bound() if run.exists() else None
    opened = Run(run.absolute())
    if bound is None:
        if from_epoch is not None:
            raise UsageError(f"--from-epoch {from_epoch}: {run} has no epochs yet; omit it.")
        preset = preset or DEFAULT_PRESET
        settings = fix_precision(resolve(preset, overrides))
        _check(settings)
        binding = Binding(preset, settings.plain(), preset_digest=preset_digest(preset))
        progress.say(f"new run {run}: preset {preset}" + (f", {', '.join(overrides)}" if overrides else ""))
    else:
        given = preset or DEFAULT_PRESET
        if preset is not None:
            check_same_preset(run, bound, preset)
        preset = bound["preset"]
        original = original_settings(opened, resolve(preset, base=bound["settings"]))
        binding = Binding(preset, original, tuple(bound["changes"]), bound.get("preset_digest"), original=bound)
        binding = change_settings(binding, overrides, from_epoch)
        settings = resolve(preset, overrides, base=binding.at().plain())
        check_trusted(opened.path, settings.environment.code, here=_named(given, overrides), trust=trust)
    check_batches(settings)
    context = Context(
        opened, preset, settings, progress, fresh=fresh, force=force, more=more, overrides=tuple(overrides)
    )
    context.binding, context.to_bind = binding, bind or bound is None
    if settings.training.precision == "bfloat16" and not has_bfloat16(context.machine.device):
        progress.warn(
            f"{run} was started in bfloat16, which this machine emulates slowly; float32 is faster here, in another"
            " run: --set training.precision=float32"
        )
    return context


def _named(preset: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the code that the command itself names, by its preset and its settings of the environment."""
    with suppress(UsageError):
        return resolve(preset, [text for text in overrides if text.startswith("environment.")]).environment.code
    return ()


def _check(settings: Settings) -> None:
    """Raise UsageError if this machine or the environment does not support the settings."""
    Machine.choose(settings.training)
    if not is_recorded(settings.environment.id):  # `import_experience` checks those
        parameter_counts(settings, Spaces.of(protocol(settings.environment)))
