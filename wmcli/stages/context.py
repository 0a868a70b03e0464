"""What every stage is given: the run, its settings, where to talk, and what several stages of one process share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wmcli.artifacts import Artifact, Job, Run, Work
from wmcli.artifacts.job import REVISIONS
from wmcli.artifacts.manifest import MAKERS
from wmcli.assemble import parameter_counts
from wmcli.config import digest, is_file, names_kind, parse_override, preset_values
from wmcli.envs import Streams, protocol
from wmcli.errors import ArtifactError, BusyError, MachineError, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import load_experience, load_held_out
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.settings import Settings, flatten, resolve
from wmcli.training.device import Machine, has_bfloat16

if TYPE_CHECKING:
    from torch import Tensor

    from wmcli.training.logs import EventLog

DEFAULT_PRESET = "quickstart"
TRAINED_FROM_EPOCH = ("collect", "tokenizer", "dynamics", "controller", "evaluation")
"""Sections that may change from one epoch of `wm run` to the next: the others say what is trained where."""
NEVER_TRAINED_ANEW = ("evaluation", "profile")
"""Kinds that are made again under other settings without a question."""


class PrunedInputError(ArtifactError):
    """Work needs an artifact whose files were removed to save space."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(
            f"{artifact} is needed for this, and its files were removed to save space: go on from a newer one, or let"
            " wm run train it again with --force."
        )
        self.artifact = artifact


@dataclass(frozen=True)
class Binding:
    """What run.toml says, or will say as soon as work begins."""

    preset: str
    settings: Mapping[str, Any]
    changes: tuple[Mapping[str, Any], ...] = ()
    """See `Run.bound`."""
    preset_digest: str | None = None
    """Digest of the settings that a preset file stated."""
    found: Mapping[str, Any] | None = None
    """What run.toml held when the command began."""

    def at(self, epoch: int | None = None) -> Settings:
        """Resolve the settings of an epoch of `wm run`, or (None) those of the last ones."""
        texts = [text for each in self.changes if epoch is None or each["epoch"] <= epoch for text in each["set"]]
        return resolve(self.preset, texts, base=self.settings)


@dataclass
class Context:
    run: Run
    preset: str
    settings: Settings
    progress: Progress
    fresh: bool = False
    """Start again instead of taking up an interrupted job."""
    force: bool = False
    """Make another version although this one exists."""
    more: bool = False
    """Train the newest version further."""
    binding: Binding | None = None
    """The settings of each epoch of `wm run`."""
    to_bind: bool = False
    """Write the binding to run.toml when work begins: no command that fails before leaves a trace."""
    began: bool = False
    """This command bound a new run."""
    epoch: int | None = None
    """The epoch of `wm run` that is being worked at; None outside of it."""
    guarded: bool = False
    """Refuse to train anew what was published under other settings."""
    again: set[str] = field(default_factory=set)
    """Digests of pruned artifacts that are needed: their jobs are to be done again."""
    worked: int = 0
    """Jobs that were worked at, not found done."""
    pictures: bool = True
    """Leave pictures beside the weights."""
    replay: Replay | None = None
    """Experience that a stage of this process has loaded already."""
    latents: dict[str, Tensor] = field(default_factory=dict)
    """Latents of all frames in `memory`, under the digest of what made them (one entry at a time)."""
    streams: tuple[str, Streams] | None = None
    """The environments where the experience of that digest left them, so that the next collect need not restore
    them."""
    machine: Machine = field(init=False)
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        from wmcli.training.logs import EventLog

        self.machine = Machine.choose(self.settings.training)
        self.events = EventLog(self.run.path)

    def for_loop(self) -> Context:
        """Return the context of the stages inside `wm run`, whose lines and bars stand below its own."""
        return Context(
            self.run,
            self.preset,
            self.settings,
            self.progress.inside(),
            fresh=self.fresh,
            guarded=not self.force,
            binding=self.binding,
            to_bind=self.to_bind,
        )

    def at(self, epoch: int) -> Context:
        """Return this context as it is in an epoch of `wm run`; what was loaded is shared."""
        assert self.binding is not None
        context = copy.copy(self)
        context.epoch, context.settings = epoch, self.binding.at(epoch)
        return context

    def bind(self) -> None:
        """Write down what the run is bound to, if that is new.

        Raises UsageError or MachineError where the folder cannot be written to.
        """
        if not self.to_bind or self.binding is None:
            return
        run = Run.open(self.run.path, create=True)
        binding = self.binding
        run.bind(
            binding.preset,
            dict(binding.settings),
            binding.changes,
            preset_digest=binding.preset_digest,
            expected=binding.found,
        )
        self.to_bind, self.began = False, self.binding.found is None

    def done(self, job: Job) -> Artifact | None:
        """The version that a job has published; None if there is none or another is wanted."""
        existing = job.done()
        if existing is None or self.force or (existing.pruned and existing.digest in self.again):
            return None
        return existing

    def prepare(self, job: Job) -> None:
        """Make sure that work at a job may begin: bind the run, and tell other runs that their artifacts are used.

        Raises UsageError where `guarded` work would be done anew, or where the folder cannot be written to;
        PrunedInputError where the files of an input are gone.
        """
        if self.guarded and job.kind not in NEVER_TRAINED_ANEW and (changed := self.otherwise(job)):
            raise UsageError(
                f"{self.run}: {changed}; with these it would be made again, and all that came of it. To do so add"
                " --force; to change settings for the epochs to come only, give --from-epoch N; to keep both, give"
                " another --run."
            )
        for artifact in job.inputs.values():
            if artifact.pruned:
                raise PrunedInputError(artifact)
        self.bind()
        self._note_use(job)

    @contextmanager
    def work(self, job: Job, *, fresh: bool | None = None) -> Iterator[Work]:
        """Work at a job of this run; a run that this command began is taken back if nothing comes of it.

        Signals ask for a checkpoint from here on. Raises what `prepare` and `Job.work` raise.
        """
        with stop_requests():
            try:
                self.prepare(job)
                self.worked += 1
                with job.work(fresh=self.fresh if fresh is None else fresh) as work:
                    yield work
            except BaseException:
                if self.began:
                    self.run.unbind()
                raise

    def publish(self, work: Work, metrics: dict[str, Any], settings: Mapping[str, Any] | None = None) -> Artifact:
        """Publish a payload with these metrics and all that every artifact of this run says."""
        return work.publish(
            settings=self.settings.plain() if settings is None else dict(settings),
            metrics=metrics,
            environment=self.environment,
            machine=self.machine.describe(),
            extra={"epoch": self.epoch},
        )

    def otherwise(self, job: Job) -> str | None:
        """Say what `wm run` made of a job's inputs under which other settings; None if nothing."""
        if (other := job.otherwise()) is None:
            return None
        then, now = flatten(other.settings), flatten(self.settings)
        sections = (*job.sections, "training.sampling", "training.dfs")
        changed = [
            f"{key} {then[key]} -> {now[key]}"
            for key in now
            if key in then and then[key] != now[key] and any(f"{key}.".startswith(f"{each}.") for each in sections)
        ]
        before, revision = other.manifest.get("revision", 1), REVISIONS[job.kind]
        if before != revision:
            changed.append(f"revision of {MAKERS[job.kind]} {before} -> {revision}")
        precision = other.manifest["machine"].get("precision")
        if precision != job.identity.get("precision", precision):
            changed.append(f"training.precision {precision} -> {job.identity['precision']}")
        why = ", ".join(changed) or "some that only one of the two versions of wm has"
        return f"{other.name} was made under other settings ({why})"

    def _note_use(self, job: Job) -> None:
        here = self.run.path.resolve()
        for artifact in job.inputs.values():
            if artifact.run != here and not artifact.path.is_relative_to(here):
                try:
                    Run(artifact.run).note_use(artifact.digest, here)
                except (MachineError, BusyError):
                    self.progress.warn(
                        f"{artifact}: its run cannot be written to, so it does not learn that {self.run} is made from"
                        " it and may remove its files to save space; copy it if it must stay."
                    )

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The protocol block of this run's environment."""
        return protocol(self.settings.environment)

    def experience(self, artifact: Artifact) -> Replay:
        """All experience up to `artifact`, verified, in memory once; only segments not loaded yet are read."""
        replay = load_experience(artifact, self.machine.device, self.replay)
        if replay is not self.replay:
            self.latents = {}  # they were of other frames
        self.replay = replay
        return replay

    def held_out(self, artifact: Artifact, part: str) -> Replay:
        """The episodes that experience holds back as its `part`, "validation" or "test", in memory.

        Raises ArtifactError where it has none.
        """
        return load_held_out(artifact, part, self.machine.device)

    def log(self, job: Job, environment_step: int, record: dict[str, Any]) -> None:
        """Write one line to metrics.jsonl, and the same numbers as TensorBoard events.

        Args:
            job: What is being worked at: its digest and the version that comes of it go into the line.
            environment_step: Decisions taken in the environment so far, of the experience this is about.
            record: `stage`, numbers, and for a training stage `update`.
        """
        about = {"job": job.digest, "version": job.run.next_version(job.kind), "environment_step": environment_step}
        if self.epoch is not None:
            about["epoch"] = self.epoch
        whole = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **about, **record}
        self.run.log(whole)
        self.events.add(whole)


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
) -> Context:
    """Open a run. A new one is bound to its preset and overrides when the first work in it begins.

    In a bound run `overrides` count for this one command. With `bind` the run is bound to them as well, from
    `from_epoch` on or from the beginning.

    Raises UsageError for settings that do not resolve, a preset other than the bound one, or settings that cannot
    change on the way; ArtifactError when the run does not exist and `create` is off.
    """
    progress = Progress(quiet)
    if not create and not run.exists():
        raise ArtifactError(f"no run at {run}; start one with: wm collect --run {run}")
    bound = Run.open(run, create=False).bound() if run.exists() else None
    opened = Run(run.absolute())
    if bound is None:
        if from_epoch is not None:
            raise UsageError(f"--from-epoch {from_epoch}: {run} has no epochs yet; leave it out.")
        preset = preset or DEFAULT_PRESET
        settings = _on_this_machine(resolve(preset, overrides))
        _check(settings)
        binding = Binding(preset, settings.plain(), preset_digest=_preset_digest(preset))
        progress.say(f"new run {run}: preset {preset}" + (f", {', '.join(overrides)}" if overrides else ""))
    else:
        if preset is not None:
            _check_same_preset(run, bound, preset)
        preset = bound["preset"]
        begun = _as_begun(opened, resolve(preset, base=bound["settings"]))
        binding = Binding(preset, begun, tuple(bound["changes"]), bound.get("preset_digest"), found=bound)
        binding = _changed(binding, overrides, from_epoch)
        settings = resolve(preset, overrides, base=binding.at().plain())
    context = Context(opened, preset, settings, progress, fresh=fresh, force=force, more=more)
    context.binding, context.to_bind = binding, bind or bound is None
    if settings.training.precision == "bfloat16" and not has_bfloat16(context.machine.device):
        progress.warn(
            f"{run} computes in bfloat16, as it was begun, which this machine has to emulate; float32 would be faster"
            " here, in another run: --set training.precision=float32"
        )
    return context


def _preset_digest(preset: str) -> str | None:
    """Return a digest of the settings that a preset file states; None for a preset of the package."""
    return digest(preset_values(preset)) if is_file(preset) else None


def _check_same_preset(run: Path, bound: Mapping[str, Any], preset: str) -> None:
    """Raise UsageError if a bound run is given another preset, or a preset file that has changed."""
    same = preset == bound["preset"] or (
        is_file(preset) and is_file(bound["preset"]) and Path(preset).name == Path(bound["preset"]).name
    )
    if not same:
        raise UsageError(
            f"run {run} is bound to preset {bound['preset']}, not {preset}; give another --run for another preset."
        )
    if _preset_digest(preset) != bound.get("preset_digest"):
        raise UsageError(
            f"{preset} has changed since run {run} was bound to it; change settings of the run with --set, or give"
            " another --run."
        )


def _on_this_machine(settings: Settings, precision: str | None = None) -> Settings:
    """The settings with what `auto` becomes, where results hang on it: another machine must not change that."""
    if settings.training.precision != "auto":
        return settings
    chosen = precision or Machine.choose(settings.training).precision
    return settings.model_copy(update={"training": settings.training.model_copy(update={"precision": chosen})})


def _as_begun(run: Run, settings: Settings) -> dict[str, Any]:
    """The settings of a bound run. Older ones recorded `auto`: then its newest model tells what that was."""
    used = None
    if settings.training.precision == "auto":
        models = [artifact for kind in ("controller", "dynamics", "tokenizer") for artifact in run.artifacts(kind)[-1:]]
        used = models[0].manifest["machine"].get("precision") if models else None
    return _on_this_machine(settings, used).plain()


def _changed(binding: Binding, overrides: Sequence[str], from_epoch: int | None) -> Binding:
    """The binding with other settings, from an epoch on or from the beginning."""
    if from_epoch is None:
        settings = resolve(binding.preset, overrides, base=binding.settings)
        return replace(binding, settings=settings.plain())
    if not overrides:
        raise UsageError("--from-epoch changes settings on the way: give them with --set.")
    for text in overrides:
        path, _ = parse_override(text)
        if path[0] not in TRAINED_FROM_EPOCH or names_kind(".".join(path)):
            raise UsageError(
                f"--from-epoch {from_epoch} --set {text}: only {', '.join(TRAINED_FROM_EPOCH)} can change on the way,"
                " and no kind; leave out --from-epoch."
            )
    change = {"epoch": from_epoch, "set": list(overrides)}
    return replace(binding, changes=(*binding.changes, change))


def _check(settings: Settings) -> None:
    """Raises UsageError for settings that no machine or environment could serve, before a run is bound to them."""
    Machine.choose(settings.training)
    parameter_counts(settings, protocol(settings.environment)["actions"])
