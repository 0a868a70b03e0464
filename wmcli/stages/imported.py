"""`wm import`: recorded experience of others as one version of experience.

Every episode is read and checked before anything is written. Images are read once more while they are written, so that
no more than a shard of them is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from wmcli.artifacts import Artifact, Run, Work
from wmcli.artifacts.environment import RECORDED, check_same_environment, is_recorded
from wmcli.assemble import parameter_counts
from wmcli.config import digest
from wmcli.errors import UsageError
from wmcli.exchange import Episode, Format, Recording, digest_of_files, located, open_recording
from wmcli.exchange.convert import slug
from wmcli.exchange.minari import PREFIX
from wmcli.exchange.npz import Actions
from wmcli.experience import write_segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.experience.segment import CLOSING, IMPORTED
from wmcli.spaces import Spaces, column_names, images_of, map_parts
from wmcli.stages.binding import change_settings
from wmcli.stages.context import Context
from wmcli.stages.scripted import publish_episodes
from wmcli.training.device import derived_seed

PACKAGES = ("numpy", "zarr", "pillow")
SIZES = (8, 1024)  # of images in `environment.size`


@dataclass(frozen=True)
class Importing:
    """How to read a source."""

    source: str
    """A file, a folder, or `minari:ID`."""
    form: Format | None = None
    """Its format; None: what it looks like."""
    size: int | None = None
    """Height and width that images are resized to. [pixels]"""
    parts: tuple[str, ...] = ()
    """Parts of the observation to read; all if empty."""
    actions: Actions | None = None
    """Of npz files in Dreamer's layout: when the action of a row was taken."""
    held_out: int = 0
    """Episodes for validation, and as many for test."""
    shuffled: bool = False
    """Draw the held-out episodes by the seed of the run, instead of the last ones."""
    drop_last: bool = False
    """Leave out the last action of episodes whose closing observation is unknown, so that it becomes known."""

    def defaults(self, run: Path, overrides: Sequence[str]) -> list[str]:
        """Return settings of a new run that `overrides` do not name: the environment `data/NAME`, and no collecting."""
        if run.exists() and Run.open(run, create=False).bound() is not None:
            return []
        path = Path(self.source.removeprefix(PREFIX))
        name = slug(str(path) if self.source.startswith(PREFIX) else path.resolve().stem)
        texts = (f"environment.id={RECORDED}{name}", "run.collect_epochs=0")
        named = {text.partition("=")[0] for text in overrides}
        return [text for text in texts if text.partition("=")[0] not in named]

    def open(self, spaces: Spaces | None) -> Recording:
        """Open the source. Raises UsageError, see `open_recording`."""
        return open_recording(
            self.source, form=self.form, size=self.size, parts=self.parts, spaces=spaces, actions=self.actions
        )


def import_experience(context: Context, importing: Importing) -> Artifact:
    """Publish recorded episodes behind the newest experience of a run.

    Args:
        context: Of the run, see `Importing.defaults`.
        importing: The source, and how to read it.

    Raises:
        UsageError: The source cannot be read, an episode is damaged or does not fit, there are too few to hold some
            out, or the run has imported the same files with other options.
        ArtifactError: The run has experience of another environment.
    """
    before = context.run.latest("experience")
    begins = is_recorded(context.settings.environment.id) and before is None
    recording = importing.open(None if begins else context.spaces)
    if begins:
        _take_environment(context, recording)
    if context.to_bind:
        parameter_counts(context.settings, recording.spaces)  # raises UsageError if the models cannot read such data
    if before is not None:
        check_same_environment(context.environment, before)
    path, _ = located(importing.source, importing.form)
    sections = ("seed", "environment") if importing.shuffled else ("environment",)
    options = {key: value for key, value in asdict(importing).items() if key not in ("source", "form")}
    files = digest_of_files(path)
    content = digest({"format": recording.format, "files": files, **options})
    identity = context.settings.identity(*sections) | {"policy": "imported", "content": content}
    job = context.run.job("experience", identity, {} if before is None else {"previous": before})
    if existing := context.done(job) or _imported(before, "content", content):
        context.progress.say(f"import: {existing.name} is up to date, nothing to do")
        return existing
    if existing := _imported(before, "files", files):
        raise UsageError(
            f"{importing.source}: {existing.name} of {context.run} was made from the same files with other options;"
            " give the same, or another --run."
        )
    chosen = _chosen(len(recording), importing, context.settings.seed)
    with context.work(job, fresh=True) as work:
        context.progress.say(f"import: {len(recording)} episodes from {importing.source} ({recording.format})")
        for note in recording.notes:
            context.progress.warn(f"{importing.source}: {note}.")
        about = {"content": content, "files": files}
        return publish_recording(
            context, work, before, recording, chosen, about, command="import", drop_last=importing.drop_last
        )


def publish_recording(
    context: Context,
    work: Work,
    before: Artifact | None,
    recording: Recording,
    chosen: Mapping[str, list[int]],
    about: Mapping[str, Any],
    *,
    command: str,
    drop_last: bool = False,
) -> Artifact:
    """Publish recorded episodes, which are a stream of their own, behind the experience `before`.

    Args:
        context: Of the run.
        work: On the job.
        before: The experience to continue; None begins it.
        recording: The episodes.
        chosen: Their numbers by part: "train", and held-out ones.
        about: Further metrics, with `content`, which tells equal recordings.
        command: That publishes, for messages.
        drop_last: See `Importing`.

    Raises:
        UsageError: An episode is damaged or does not fit, or nothing is left of them.
    """
    gathered: dict[str, _Gathered] = {}
    with context.progress.bar(f"{command} check", len(recording), "episodes") as bar:
        for part, numbers in chosen.items():
            gathered[part] = _gather(recording, numbers, drop_last, bar.advance)
    if any(part.left_open for part in gathered.values()):
        context.progress.warn(
            f"{recording.name}: the observations that close episodes are not known for all of them, so none are kept;"
            " to cut the last action off where they are not: --drop-last"
        )
    closed = not any(part.left_open for part in gathered.values())
    attributes = {"environment": context.environment["id"], "spaces": recording.spaces.describe()}
    with context.progress.bar(command, sum(map(len, gathered.values())), "episodes") as bar:
        for part, episodes in gathered.items():
            if len(episodes):
                folder = work.payload / (SEGMENT if part == "train" else HELD_OUT[part])
                frames = _frames(recording, episodes, drop_last, bar.advance)
                write_segment(folder, episodes.columns(closed), frames, **attributes)
    train = gathered["train"]
    metrics = {part: len(episodes) for part, episodes in gathered.items()} | {
        "steps": sum(train.lengths),
        "mean_return": float(np.mean([reward.sum(dtype=np.float64) for reward in train.rewards])),
        **about,
        "format": recording.format,
        "lossy": recording.lossy or recording.source.get("lossy"),
        "closing": closed,
        "source": recording.source | {"name": recording.name},
        "notes": list(recording.notes),
    }
    return publish_episodes(context, work, before, metrics, command=command)


def _imported(newest: Artifact | None, metric: str, value: str) -> Artifact | None:
    """Return the experience up to `newest` whose metric has a value; None without one."""
    while newest is not None and newest.metrics.get(metric) != value:
        newest = newest.input("previous") if "previous" in newest.inputs else None
    return newest


def _take_environment(context: Context, recording: Recording) -> None:
    """Make the data the environment of a run that has none, in its settings and manifests."""
    spaces = recording.spaces
    sides = [image.height for image in images_of(spaces.observation).values()]
    limits = range(SIZES[0], SIZES[1] + 1)
    if context.binding is not None and sides and sides[0] in limits:
        context.binding = change_settings(context.binding, [f"environment.size={sides[0]}"], None)
        context.settings = context.binding.at()
    settings = context.settings.environment
    context.environment = {
        "id": settings.id,
        "protocol": "recorded",
        "size": sides[0] if sides else settings.size,
        **spaces.describe(),
        "train": {"time_limit": None},
        "test": {"time_limit": None},
        "versions": {package: metadata.version(package) for package in PACKAGES},
    }


def _chosen(count: int, importing: Importing, seed: int) -> dict[str, list[int]]:
    """Return the numbers of the episodes of each part, ascending."""
    held = importing.held_out
    if count <= 2 * held:
        raise UsageError(f"--held-out {held}: {2 * held} episodes for validation and test leave none of {count}.")
    order = np.arange(count)
    if importing.shuffled:
        order = np.random.default_rng(derived_seed(seed, "import", "held out")).permutation(count)
    cut = {"train": order[: count - 2 * held], "validation": order[count - 2 * held : count - held]}
    return {part: sorted(numbers.tolist()) for part, numbers in (cut | {"test": order[count - held :]}).items()}


@dataclass
class _Gathered:
    """All of one part's episodes but their observations, those that close episodes excepted."""

    numbers: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)
    terminated: list[np.ndarray] = field(default_factory=list)
    truncated: list[np.ndarray] = field(default_factory=list)
    closing: list[Any] = field(default_factory=list)
    left_open: int = 0
    """Episodes that ended without a known closing observation."""
    like: Any = None
    """An observation without rows."""

    def __len__(self) -> int:
        return len(self.numbers)

    def columns(self, closed: bool) -> dict[str, np.ndarray]:
        """Return the columns of a segment without observations; those that close episodes if `closed`."""
        rows, starts = sum(self.lengths), np.cumsum([0, *self.lengths[:-1]])
        first = np.zeros(rows, bool)
        first[starts] = True
        arrays = {
            "action": np.concatenate(self.actions),
            "reward": np.concatenate(self.rewards),
            "terminated": np.concatenate(self.terminated),
            "truncated": np.concatenate(self.truncated),
            "first": first,
            "lives": np.full(rows, -1, np.int16),
            "stream": np.full(rows, IMPORTED, np.int16),
        }
        if closed:
            arrays |= column_names(CLOSING, map_parts(lambda *each: np.concatenate(each), self.like, *self.closing))
        return arrays


def _episode(recording: Recording, number: int, drop_last: bool) -> Episode | None:
    """Read an episode; None if nothing is left of it."""
    episode = recording.read(number)
    return episode.without_last_action() if drop_last and episode.ended and not episode.has_closing else episode


def _gather(recording: Recording, numbers: list[int], drop_last: bool, advance: Callable[[], None]) -> _Gathered:
    gathered = _Gathered()
    for number in numbers:
        episode = _episode(recording, number, drop_last)
        advance()
        if episode is None:
            continue
        time = len(episode)
        gathered.numbers.append(number)
        gathered.lengths.append(time)
        gathered.actions.append(episode.action)
        gathered.rewards.append(episode.reward)
        gathered.terminated.append(episode.terminated)
        gathered.truncated.append(episode.truncated)
        gathered.like = map_parts(lambda part: part[:0].copy(), episode.observation)
        if episode.has_closing:
            gathered.closing.append(map_parts(lambda part, end=time: part[end:].copy(), episode.observation))
        elif episode.ended:
            gathered.left_open += 1
    if numbers and not gathered.numbers:
        raise UsageError(f"{recording.name}: nothing is left of its episodes without their last actions.")
    return gathered


def _frames(recording: Recording, gathered: _Gathered, drop_last: bool, advance: Callable[[], None]) -> Iterator[Any]:
    """Yield the observations of one episode after the other, trees of (T, ...)."""
    for number, length in zip(gathered.numbers, gathered.lengths, strict=True):
        episode = _episode(recording, number, drop_last)
        if episode is None or len(episode) != length:
            raise UsageError(f"{recording.name}: episode {number} has changed meanwhile; import it again.")
        yield map_parts(lambda part, end=length: part[:end], episode.observation)
        advance()
