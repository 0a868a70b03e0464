"""The binding of a run: preset and settings in run.toml, and changes from one epoch of `wm run` to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wmcli.artifacts import Run
from wmcli.config import digest, is_file, names_kind, parse_override, preset_values
from wmcli.errors import UsageError
from wmcli.settings import Settings, resolve
from wmcli.training.device import Machine

CHANGEABLE = ("collect", "tokenizer", "dynamics", "controller", "evaluation")
"""Sections that may change from one epoch of `wm run` to the next. The others fix the run as a whole."""


@dataclass(frozen=True)
class Binding:
    """Content of run.toml, possibly before it is written."""

    preset: str
    settings: Mapping[str, Any]
    changes: tuple[Mapping[str, Any], ...] = ()
    """See `Run.bound`."""
    preset_digest: str | None = None
    """Digest of the settings that a preset file stated."""
    original: Mapping[str, Any] | None = None
    """Content of run.toml at the start of the command."""
    _resolved: dict[tuple[str, ...], Settings] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By the changes that apply: most epochs have the same settings."""

    def at(self, epoch: int | None = None) -> Settings:
        """Resolve the settings of an epoch of `wm run`, by default of the last one."""
        applied = (each for each in self.changes if epoch is None or each["epoch"] <= epoch)
        texts = tuple(text for each in applied for text in each["set"])
        if texts not in self._resolved:
            check_changeable(texts, "run.toml: changes")
            self._resolved[texts] = resolve(self.preset, texts, base=self.settings)
        return self._resolved[texts]


def preset_digest(preset: str) -> str | None:
    """Return the digest of the settings in a preset file, None for a preset of the package."""
    return digest(preset_values(preset)) if is_file(preset) else None


def check_same_preset(run: Path, bound: Mapping[str, Any], preset: str) -> None:
    """Raise UsageError if a bound run is given another preset, or a preset file that has changed."""
    same = preset == bound["preset"] or (
        is_file(preset) and is_file(bound["preset"]) and Path(preset).name == Path(bound["preset"]).name
    )
    if not same:
        raise UsageError(
            f"run {run} is bound to preset {bound['preset']}, not {preset}; give another --run for another preset."
        )
    if preset_digest(preset) != bound.get("preset_digest"):
        raise UsageError(
            f"{preset} has changed since run {run} was bound to it; change settings of the run with --set, or give"
            " another --run."
        )


def fix_precision(settings: Settings, precision: str | None = None) -> Settings:
    """Replace precision "auto", which depends on the machine, by the precision of this one or the given one."""
    if settings.training.precision != "auto":
        return settings
    chosen = precision or Machine.choose(settings.training).precision
    return settings.model_copy(update={"training": settings.training.model_copy(update={"precision": chosen})})


def original_settings(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the settings of a bound run. If it recorded precision "auto", its newest model has the precision used."""
    used = None
    if settings.training.precision == "auto":
        models = [artifact for kind in ("controller", "dynamics", "tokenizer") for artifact in run.artifacts(kind)[-1:]]
        used = models[0].manifest["machine"].get("precision") if models else None
    return fix_precision(settings, used).plain()


def change_settings(binding: Binding, overrides: Sequence[str], from_epoch: int | None) -> Binding:
    """Return a binding with other settings, from an epoch on or from the start.

    Raises:
        UsageError: A setting does not resolve, or cannot change between epochs.
    """
    if from_epoch is None:
        settings = resolve(binding.preset, overrides, base=binding.settings)
        return replace(binding, settings=settings.plain())
    if not overrides:
        raise UsageError("--from-epoch changes settings between epochs: give them with --set.")
    check_changeable(overrides, f"--from-epoch {from_epoch} --set")
    change = {"epoch": from_epoch, "set": list(overrides)}
    return replace(binding, changes=(*binding.changes, change))


def check_changeable(overrides: Sequence[str], where: str) -> None:
    """Raise UsageError if overrides change what cannot change between epochs."""
    for text in overrides:
        path, _ = parse_override(text)
        if path[0] not in CHANGEABLE or names_kind(".".join(path)):
            raise UsageError(
                f"{where} {text}: only {', '.join(CHANGEABLE)} can change between epochs, and no kind; omit it."
            )
