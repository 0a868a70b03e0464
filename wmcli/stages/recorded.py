"""`wm collect --policy recorded`: trajectories of Memory Maze as one version of experience.

Its offline data (Pasukonis, Lillicrap and Hafner 2022, arXiv 2210.13383) are npz files, each a trajectory of T frames
in a maze of n x n cells with K objects: `image` (T, side, side, 3) uint8; `action` (T, 6), one-hot, and `reward` (T,),
both of the step that led to the frame, so that the first ones mean nothing; `maze_layout` (T, n, n), 1 where a cell is
free; `agent_pos` (T, 2), cells; `agent_dir` (T, 2), of length 1; `targets_pos` (T, K, 2), cells; `targets_vec`
(T, K, 2), cells to the right and ahead of the agent. Positions are (x, y) from the inner corner in the south-west, and
row 0 of the layout is the south; ours begin at the outer corner in the north-west. Actions are ours, in our order.

A trajectory becomes an episode of the task with as many cells, objects and frames (wm/Maze-9-v0, wm/Maze-15-v0). Its
compact states have all positions. Textures are unknown, so the recorded frames are stored too.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact, Job
from wmcli.artifacts.environment import check_same_environment
from wmcli.envs.mazes import BLOCKS, Maze, MazeContent
from wmcli.envs.memory_task import Played
from wmcli.envs.walking import NOOP
from wmcli.errors import UsageError
from wmcli.experience import segment_about
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.settings import RecordedCollectSettings
from wmcli.stages.context import Context
from wmcli.stages.scripted import publish_episodes, task_of, write_episodes

HELD_BACK = ("eval", "test")  # folders that test trajectories may lie in
CLOSE = 0.05  # cells that places may differ from each other and be the same, since files may have rounded them

Name = tuple[str, int]
"""Name of a file and its size in bytes, which identify it in any folder."""


class Recording(NamedTuple):
    """One trajectory without its frames, as ours are."""

    compact_states: np.ndarray
    """uint8 (T, S), textures 0."""
    action: np.ndarray
    """int32 (T,), taken in each frame; none in the last."""
    reward: np.ndarray
    """float32 (T,), of each action."""


def recorded_job(context: Context, before: Artifact | None) -> Job:
    """Return the job, identified by the names and sizes of the files. Raises UsageError, see `chosen`."""
    return _job(context, before, chosen(context, before))


def collect_recorded(context: Context, before: Artifact | None) -> Artifact:
    """Read `collect.episodes` new trajectories and the held-out ones, and publish them.

    All files are checked before anything is written.

    Raises:
        UsageError: The task is no maze, files are missing (see `chosen`), or a file is damaged or has other arrays.
        ArtifactError: The experience `before` is of another environment.
    """
    task = _maze(context)
    if before is not None:
        check_same_environment(context.environment, before)
    files = chosen(context, before)
    job = _job(context, before, files)
    if existing := context.done(job):
        context.progress.say(f"collect: {existing.name} is up to date, nothing to do")
        return existing
    counts = {part: len(paths) for part, paths in files.items()}
    total = sum(counts.values())
    with context.work(job, fresh=True) as work:
        counted = ", ".join(f"{count} {part}" for part, count in counts.items())
        context.progress.say(f"collect: trajectories from {_settings(context).recordings}: {counted}")
        played: dict[str, Played] = {}
        with context.progress.bar("collect labels", total, "trajectories") as bar:
            for part, paths in files.items():
                if paths:
                    played[part] = _played(paths, task, bar.advance)
        summary: dict[str, Any] = {"recorded": total}
        with context.progress.bar("collect frames", total, "trajectories") as bar:
            for part, episodes in played.items():
                about = {"environment": context.settings.environment.id, "files": [_name(path) for path in files[part]]}
                summary |= write_episodes(work, part, episodes, _frames(files[part], task, bar.advance), **about)
        return publish_episodes(context, work, before, summary | counts)


def chosen(context: Context, before: Artifact | None) -> dict[str, list[Path]]:
    """Return the files of each part, sorted by name.

    Training takes the first files that `before` lacks, validation the last ones. Test takes the first of the folder
    `eval` or `test`, or else the last ones after validation.

    Raises:
        UsageError: The folder is missing or has too few files.
    """
    collect = _settings(context)
    where = f"collect.recordings = '{collect.recordings}'"
    folder = Path(collect.recordings).expanduser()
    if not folder.is_dir():
        raise UsageError(f"{where}: no such folder.")
    training = folder / "train" if (folder / "train").is_dir() else folder
    evaluation = next((folder / name for name in HELD_BACK if (folder / name).is_dir()), None)
    pool = _recordings(training)
    if not pool:
        raise UsageError(f"{where}: no npz files in {training}; see docs/artifacts.md for how they may lie.")
    earlier = _read_before(before)
    behind = collect.validation + (0 if evaluation else collect.test)
    free = [path for path in pool[: max(0, len(pool) - behind)] if _name(path) not in earlier]
    tests = _recordings(evaluation) if evaluation else pool[len(pool) - collect.test :]
    if len(free) < collect.episodes:
        raise UsageError(
            f"{where}: {len(free)} of {len(pool)} trajectories in {training} are left to train on ({behind} held"
            f" back, {len(earlier)} in the run already), but collect.episodes = {collect.episodes}."
        )
    if len(tests) < collect.test:
        raise UsageError(f"{where}: {len(tests)} trajectories in {evaluation}, but collect.test = {collect.test}.")
    held = pool[len(pool) - behind :]
    files = {"validation": held[: collect.validation], "test": tests[: collect.test]}
    return {"train": free[: collect.episodes]} | {part: files[part] for part in HELD_OUT}


def read_recording(path: Path, task: Maze) -> Recording:
    """Read a file without its frames.

    Raises:
        UsageError: It is damaged, lacks an array, or contradicts the task."""
    time, cells = task.context + task.query, task.cells
    arrays = _arrays(
        path,
        {
            "action": (time, len(task.meanings)),
            "reward": (time,),
            "maze_layout": (time, cells, cells),
            "agent_pos": (time, 2),
            "agent_dir": (time, 2),
            "targets_pos": (time, task.objects, 2),
            "targets_vec": (time, task.objects, 2),
        },
    )
    taken, layout = arrays["action"][1:], arrays["maze_layout"]
    walls = np.ones((cells + 2, cells + 2), bool)
    walls[1:-1, 1:-1] = layout[0, ::-1] == 0
    position, objects = (_from_the_north(arrays[key], cells) for key in ("agent_pos", "targets_pos"))
    east, north = arrays["agent_dir"].astype(np.float64).T
    content = MazeContent(
        position=position,
        heading=np.rad2deg(np.arctan2(north, east)) % 360,
        walls=np.broadcast_to(walls, (time, *walls.shape)),
        textures=np.zeros((time, BLOCKS**2), np.uint8),
        objects=objects,
    )
    _check(path, (np.count_nonzero(taken, axis=-1) == 1).all(), "action is not one-hot")
    _check(path, (layout == layout[0]).all(), "maze_layout changes on the way")
    _check(path, np.allclose(objects, objects[0], atol=CLOSE), "targets_pos changes on the way")
    _check(path, not _cell(walls, position).any(), "agent_pos lies where maze_layout has a wall")
    _check(path, not _cell(walls, objects).any(), "targets_pos lies where maze_layout has a wall")
    _check(path, np.abs(objects % 1 - 0.5).max() < CLOSE, "targets_pos is not in the middles of cells")
    compact_states = task.write(content)
    agree = np.allclose(task.labels(compact_states).objects[..., ::-1], arrays["targets_vec"], atol=2 * CLOSE)
    _check(path, agree, "targets_vec is not where targets_pos is seen from agent_pos in the direction of agent_dir")
    return Recording(
        compact_states,
        np.append(taken.argmax(-1), NOOP).astype(np.int32),
        np.append(arrays["reward"][1:], 0).astype(np.float32),
    )


def _maze(context: Context) -> Maze:
    task = task_of(context)
    if not isinstance(task, Maze):
        name = context.settings.environment.id
        raise UsageError(
            f"environment.id = '{name}': --policy recorded reads trajectories of Memory Maze; use --env wm/Maze-9-v0 or"
            " wm/Maze-15-v0"
        )
    return task


def _settings(context: Context) -> RecordedCollectSettings:
    """Return the settings of collecting."""
    assert isinstance(context.settings.collect, RecordedCollectSettings)
    return context.settings.collect


def _job(context: Context, before: Artifact | None, files: dict[str, list[Path]]) -> Job:
    identity = context.settings.identity("environment") | {
        "policy": "recorded",
        "files": {part: [_name(path) for path in paths] for part, paths in files.items()},
    }
    return context.run.job("experience", identity, {} if before is None else {"previous": before})


def _recordings(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"), key=lambda path: path.name)


def _name(path: Path) -> Name:
    return path.name, path.stat().st_size


def _read_before(before: Artifact | None) -> set[Name]:
    """The files that were trained on up to `before`."""
    earlier: set[Name] = set()
    while before is not None:
        earlier |= {(name, size) for name, size in segment_about(before.path / SEGMENT)["files"]}
        before = before.input("previous") if "previous" in before.inputs else None
    return earlier


def _played(paths: list[Path], task: Maze, advance: Callable[[], None]) -> Played:
    """All of one part."""
    recordings = []
    for path in paths:
        recordings.append(read_recording(path, task))
        advance()
    compact_states, action, reward = (np.stack(arrays) for arrays in zip(*recordings, strict=True))
    over = np.zeros(action.shape, bool)
    over[:, -1] = True
    return Played(compact_states, action, reward, over)


def _frames(paths: list[Path], task: Maze, advance: Callable[[], None]) -> Iterator[np.ndarray]:
    """The frames (T, H, W, 3) of one file after the other."""
    for path in paths:
        frames = _arrays(path, {"image": (task.context + task.query, task.side, task.side, 3)})["image"]
        _check(path, frames.dtype == np.uint8, f"image is {frames.dtype}, not uint8")
        yield frames
        advance()


def _arrays(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays of numbers of these shapes."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for key in shapes:
                _check(path, key in file, f"no {key} in it")
            arrays = {key: file[key] for key in shapes}
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: damaged, or no trajectory of Memory Maze: {reason}") from error
    for key, shape in shapes.items():
        array = arrays[key]
        _check(path, array.shape == shape, f"{key} is {array.shape}, but this task's is {shape}")
        _check(path, array.dtype.kind in "biuf" and np.isfinite(array).all(), f"{key} is not made of finite numbers")
    return arrays


def _check(path: Path, fine: Any, problem: str) -> None:
    if not fine:
        raise UsageError(f"{path}: {problem}.")


def _from_the_north(places: np.ndarray, cells: int) -> np.ndarray:
    """Theirs (..., 2) to ours, and back: from the south-western inner corner, from the north-western outer one."""
    return np.stack([places[..., 0] + 1.0, cells + 1.0 - places[..., 1]], -1)


def _cell(walls: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Whether there is a wall at places (..., 2); outside there is nothing but."""
    column, row = np.moveaxis(np.clip(np.floor(places), 0, len(walls) - 1).astype(np.int64), -1, 0)
    return walls[row, column]
