"""The context of a stage: run, settings, progress, and data that the stages of one process share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from wmcli import ranks
from wmcli.artifacts import Artifact, Job, Run, Work
from wmcli.artifacts.environment import is_recorded, recorded_environment
from wmcli.artifacts.job import REVISIONS
from wmcli.artifacts.manifest import MAKERS
from wmcli.artifacts.trust import note_trusted
from wmcli.envs import AnyStreams, protocol
from wmcli.errors import ArtifactError, BusyError, MachineError, Stopped, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import load_experience, load_held_out
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.settings import LearnedCollectSettings, Settings, flatten
from wmcli.spaces import Spaces, bytes_of
from wmcli.stages.binding import Binding
from wmcli.training.device import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from wmcli.training.logs import EventLog

TRAINED = ("tokenizer", "dynamics", "controller")
REPEATABLE = ("evaluation", "profile")
"""Kinds that are made again under other settings without asking."""


class PrunedInputError(ArtifactError):
    """A job needs an artifact without files, which were removed to save space."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(
            f"{artifact} is needed here, and its files were removed to save space: continue from a newer one, or train"
            " it again with wm run --force."
        )
        self.artifact = artifact

    def __reduce__(self) -> tuple[type[PrunedInputError], tuple[Artifact]]:
        return PrunedInputError, (self.artifact,)


@dataclass
class Context:
    """Run, settings and options of a command, for its stages."""

    run: Run
    preset: str
    settings: Settings
    progress: Progress
    fresh: bool = False
    """Discard the checkpoints of interrupted jobs."""
    force: bool = False
    """Make another version even if a job is done."""
    more: bool = False
    """Train the newest version further."""
    overrides: tuple[str, ...] = ()
    """What the command sets: `section.key=value` texts."""
    binding: Binding | None = None
    """The settings of each epoch of `wm run`."""
    to_bind: bool = False
    """Write the binding to run.toml when the first job starts, so that an earlier failure leaves no trace."""
    is_new: bool = False
    """This command bound a new run."""
    epoch: int | None = None
    """Epoch of `wm run`; None outside of it."""
    guarded: bool = False
    """Refuse to repeat finished training under other settings."""
    again: set[str] = field(default_factory=set)
    """Digests of needed artifacts that were pruned: their jobs run again."""
    worked: int = 0
    """Number of jobs that this process worked on."""
    pictures: bool = True
    """Write pictures beside the weights."""
    replay: Replay | None = None
    """Experience that a stage of this process has loaded."""
    latents: dict[str, Tensor] = field(default_factory=dict)
    """Latents of all frames in `replay`, by the digest of their encoder (at most one entry)."""
    streams: tuple[str, AnyStreams] | None = None
    """Digest of an experience and its environments, which the next collect continues without restoring them."""
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When this process began to work."""
    machine: Machine = field(init=False)
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        from wmcli.training.logs import EventLog

        self.machine = Machine.choose(self.settings.training)
        config = {"preset": self.preset} | self.settings.plain()
        self.events = EventLog(self.run, self.settings.training.log_to, config, self.progress.warn)

    def for_loop(self) -> Context:
        """Return the context of the stages inside `wm run`, whose output is nested."""
        return Context(
            self.run,
            self.preset,
            self.settings,
            self.progress.inside(),
            fresh=self.fresh,
            guarded=not self.force,
            binding=self.binding,
            to_bind=self.to_bind,
            began=self.began,
        )

    def at(self, epoch: int) -> Context:
        """Return this context with the settings of an epoch of `wm run`. Loaded data is shared."""
        assert self.binding is not None
        context = copy.copy(self)
        context.epoch, context.settings = epoch, self.binding.at(epoch)
        return context

    def bind(self) -> None:
        """Write run.toml if the binding is new.

        Raises:
            UsageError, MachineError: The folder is not writable.
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
            expected=binding.original,
        )
        note_trusted(run.path, self.settings.environment.code)
        self.to_bind, self.is_new = False, self.binding.original is None

    def done(self, job: Job) -> Artifact | None:
        """Return the version that a job published; None without one, or if it must be made again."""
        return ranks.first(lambda: self._done(job))

    def _done(self, job: Job) -> Artifact | None:
        existing = job.done()
        if existing is None or self.force or (existing.pruned and existing.digest in self.again):
            return None
        return existing

    def prepare(self, job: Job) -> None:
        """Check that a job may start, bind the run, and record the use of artifacts of other runs.

        Raises:
            UsageError: It would repeat finished training (with `guarded`), the folder is not writable, or the library
                of a sink is missing.
            PrunedInputError: An input was pruned.
        """
        self.events.check()
        if self.guarded and job.kind not in REPEATABLE and (changed := self.otherwise(job)):
            raise UsageError(
                f"{self.run}: {changed}; these settings would repeat it and all later training. To do so add --force;"
                " to change only later epochs, add --from-epoch N; to keep both, give another --run."
            )
        for artifact in job.inputs.values():
            if artifact.pruned:
                raise PrunedInputError(artifact)
        self.bind()
        self._note_use(job)

    @contextmanager
    def work(self, job: Job, *, fresh: bool | None = None) -> Iterator[Work]:
        """Work on a job. If the work fails, a new run without artifacts is removed.

        `wm run` waits while another process writes the kind, other commands fail at once. Signals
        request a checkpoint inside the `with` block. Of several ranks the first one holds the locks.

        Raises:
            WmError: See `prepare` and `Job.work`.
        """

        def begin() -> Work:
            self.prepare(job)
            again = self.fresh if fresh is None else fresh
            return held.enter_context(job.work(fresh=again, waiting=None if self.epoch is None else wait))

        def wait(holder: str) -> None:
            self.progress.warn(f"waiting for {holder}, which writes {job.kind} in {self.run}")
            if stop:
                raise Stopped(f"stopped before {MAKERS[job.kind]} began; the same command resumes the run.")

        with stop_requests() as stop:
            try:
                with ExitStack() as held:
                    work = ranks.first(begin)
                    self.worked += 1
                    yield work
            except BaseException:
                if self.is_new:
                    self.run.unbind()
                raise

    def publish(
        self,
        work: Work,
        metrics: dict[str, Any],
        settings: Mapping[str, Any] | None = None,
        sha256: Mapping[str, str] | None = None,
    ) -> Artifact:
        """Publish a payload with its metrics, and the settings, environment, machine and epoch of this context.

        For `sha256` see `Work.publish`. Of several ranks the first one publishes.
        """
        publish = functools.partial(
            work.publish,
            settings=self.settings.plain() if settings is None else dict(settings),
            metrics=metrics,
            environment=self.environment,
            machine=self.machine.describe(),
            extra={"epoch": self.epoch},
            sha256=sha256,
        )
        return ranks.first(publish)

    def otherwise(self, job: Job) -> str | None:
        """Describe an artifact that `wm run` made from a job's inputs under other settings; None without one."""
        if (other := job.otherwise()) is None:
            return None
        then, now = flatten(other.settings), flatten(self.settings)
        sections = (*job.sections, "training.sampling", "training.dfs", "training.priority")
        incidental = self.settings.incidental_keys
        changed = [
            f"{key} {then[key]} -> {now[key]}"
            for key in now
            if key in then
            and then[key] != now[key]
            and any(f"{key}.".startswith(f"{each}.") for each in sections)
            and key not in incidental
        ]
        before, revision = other.manifest.get("revision", 1), REVISIONS[job.kind]
        if before != revision:
            changed.append(f"revision of {MAKERS[job.kind]} {before} -> {revision}")
        ranks_before, ranks_now = other.manifest["machine"].get("ranks", 1), job.identity.get("ranks", 1)
        if job.kind in TRAINED and ranks_before != ranks_now:
            changed.append(f"processes of torchrun {ranks_before} -> {ranks_now}")
        precision = other.manifest["machine"].get("precision")
        if precision != job.identity.get("precision", precision):
            changed.append(f"training.precision {precision} -> {job.identity['precision']}")
        reason = ", ".join(changed) or "settings that only one of the two versions of wm has"
        return f"{other.name} was made under other settings ({reason})"

    def _note_use(self, job: Job) -> None:
        here = self.run.path.resolve()
        for artifact in job.inputs.values():
            if artifact.run != here and not artifact.path.is_relative_to(here):
                try:
                    Run(artifact.run).note_use(artifact.digest, here)
                except (MachineError, BusyError):
                    self.progress.warn(
                        f"{artifact}: its run is not writable, so the use by {self.run} is not recorded there, and its"
                        " files may be removed to save space; copy it to keep it."
                    )

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """`environment` of this run's manifests."""
        if is_recorded(self.settings.environment.id):
            return recorded_environment(self.run)
        return protocol(self.settings.environment)

    @property
    def spaces(self) -> Spaces:
        """Spaces of the environment."""
        return Spaces.of(self.environment)

    def experience(self, artifact: Artifact) -> Replay:
        """Load an experience artifact and all earlier segments, each segment once."""
        before = self.replay is not None and (self.replay.frames_on_host or self.replay.frames_on_disk)
        frames_on = self.settings.training.replay
        replay = load_experience(
            artifact,
            self.machine.device,
            self.replay,
            closing=self.settings.dynamics.reads_closing,
            frames_on=frames_on,
            growth=self._growth(artifact),
        )
        if replay is not self.replay:
            self.latents, before = {}, False  # the latents are those of other frames
        self.replay = replay
        if (replay.frames_on_host or replay.frames_on_disk) and not before:
            where = "on disk" if replay.frames_on_disk else "in host memory"
            tell = self.progress.warn if frames_on == "auto" else self.progress.say
            size = bytes_of(replay.observation) / 1e9
            tell(f"{artifact.name}: {len(replay)} frames ({size:.1f} GB) stay {where} (training.replay = {frames_on})")
        return replay

    def _growth(self, artifact: Artifact) -> float:
        """Return how many times the experience `artifact` there will be at the end of `wm run`, 1 outside of it."""
        plan, collecting = self.settings.run, self.settings.collect
        if self.epoch is None or not isinstance(collecting, LearnedCollectSettings):
            return 1.0
        to_come = max(min(plan.collect_epochs, plan.epochs) - self.epoch, 0)
        return 1 + to_come * collecting.steps / artifact.metrics["total_steps"]

    def held_out(self, artifact: Artifact, part: str) -> Replay:
        """Load held-out episodes; `part` is "validation" or "test". Raises ArtifactError without any."""
        return load_held_out(
            artifact,
            part,
            self.machine.device,
            closing=self.settings.dynamics.reads_closing,
            frames_on=self.settings.training.replay,
        )

    def log(self, job: Job, environment_step: int, record: dict[str, Any]) -> None:
        """Write one line to metrics.jsonl, and the same numbers to the sinks in `training.log_to`.

        Args:
            job: Its digest and its next version are logged.
            environment_step: Number of decisions in the experience so far.
            record: `stage`, numbers, and for a training stage `update`.
        """
        about = {"job": job.digest, "version": job.run.next_version(job.kind), "environment_step": environment_step}
        if self.epoch is not None:
            about["epoch"] = self.epoch
        now, began = (moment.isoformat(timespec="milliseconds") for moment in (datetime.now(UTC), self.began))
        whole = {"time": now, "began": began, **about, **record}
        self.run.log(whole)
        self.events.add(whole)
