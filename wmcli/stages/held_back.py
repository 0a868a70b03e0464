"""Whole games that `wm collect` plays beside a segment and holds back (`collect.test_games`).

They are played as the segment is, by the same controller and by the rules of training, in environments and with random
numbers of their own. So the segment is the same with and without them. Nothing is trained on them.

T steps, E environments, N rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import is_imported
from wmcli.envs import AnyStreams, open_streams
from wmcli.errors import EnvironmentFault, Stopped, UsageError
from wmcli.experience.load import HELD_OUT
from wmcli.experience.segment import CLOSING
from wmcli.interrupt import stop_requests
from wmcli.settings import LearnedCollectSettings
from wmcli.spaces import column_names, map_parts
from wmcli.stages.context import Context
from wmcli.stages.episodes import LONGEST_EPISODE
from wmcli.stages.evaluate import unfit
from wmcli.stages.player import actor_of, load_models, step_columns
from wmcli.training.checkpoint import load_work, save_work
from wmcli.training.device import derived_seed

FILE = "test-games.safetensors"  # in the folder of unfinished work


def holds_back(context: Context, before: Artifact | None) -> bool:
    """Return whether the collect behind `before` plays games to hold back: none of the last `test_games_every` - 1 has.

    Raises:
        UsageError: Games of the environment never end.
    """
    collecting = context.settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    if not collecting.test_games:
        return False
    if reason := unfit(context.settings):
        why = reason.partition(":")[0]
        raise UsageError(f"collect.test_games = {collecting.test_games}: {why}; set collect.test_games=0.")
    for _ in range(collecting.test_games_every - 1):
        if before is None or is_imported(before):
            return True
        if (before.path / HELD_OUT["test"]).exists():
            return False
        before = before.input("previous") if "previous" in before.inputs else None
    return True


def play_test_games(
    context: Context, before: Artifact | None, actor: Artifact | None, folder: Path
) -> dict[str, np.ndarray]:
    """Play `collect.test_games` games, or load those that were played before an interruption.

    Every game that starts counts, however long it takes.

    Args:
        context: Of the run.
        before: The experience that the segment continues.
        actor: The controller; None plays uniformly at random.
        folder: Of the unfinished work.

    Returns:
        Columns for `write_segment`: the games one behind the other, as one stream.

    Raises:
        EnvironmentFault: The environment failed. The same call begins these games again.
        Stopped: A signal arrived. Likewise.
        UsageError: A game of an environment without a time limit does not end.
    """
    if (folder / FILE).exists():
        return {name: tensor.numpy() for name, tensor in load_work(folder / FILE)[0].items()}
    settings, collecting = context.settings, context.settings.collect
    assert isinstance(collecting, LearnedCollectSettings)
    count = min(collecting.test_games, settings.evaluation.environments)
    environment = settings.environment.model_copy(update={"count": count})
    number = before.version if before else 0
    models = load_models(context, actor)
    generator = torch.Generator().manual_seed(derived_seed(settings.seed, "collect test actions", number))
    agent = actor_of(context, models, count, generator)
    streams = open_streams(environment, train=True, seed=derived_seed(settings.seed, "collect test", number))
    try:
        arrays = _play(context, streams, agent, collecting.test_games)
    except EnvironmentFault as fault:
        raise EnvironmentFault(
            f"{fault} The games that are held back begin again; to hold none back: --set collect.test_games=0"
        ) from fault
    streams.close()
    save_work(folder / FILE, {name: torch.from_numpy(array) for name, array in arrays.items()}, {})
    return arrays


def _play(context: Context, streams: AnyStreams, agent: Any, games: int) -> dict[str, np.ndarray]:
    count = len(streams.first)
    number = np.arange(count)  # (E,), the game that each plays; those from `games` on do not count
    started = count
    steps: list[dict[str, np.ndarray]] = []
    numbers: list[np.ndarray] = []
    closing: dict[tuple[int, int], Any] = {}  # by step and environment, the observation that closed an episode
    length = np.zeros(count, np.int64)
    with stop_requests() as stop, context.progress.bar("collect test games", games, "games") as bar:
        while (number < games).any():
            observation, first = map_parts(np.array, streams.observation), streams.first
            with context.machine.autocast():
                action = agent.act(observation, streams.age(agent.across_ends) == 0)
            after = streams.step(action)
            closing |= {(len(steps), stream): final for stream, final in after.final.items()}
            steps.append(step_columns(observation, first, action, after) | agent.summarize_search())
            numbers.append(number.copy())
            length += 1
            if not streams.has_time_limit and length[number < games].max() > LONGEST_EPISODE:
                raise UsageError(
                    f"{context.settings.environment.id}: a game has not ended after {LONGEST_EPISODE:,} steps, and the"
                    " environment has no time limit; set collect.test_games=0"
                )
            for stream in np.flatnonzero(after.game_over):
                bar.advance(int(number[stream] < games))
                number[stream], length[stream] = started, 0
                started += 1
            if stop:
                raise Stopped("collect stopped among the games that are held back; the same command begins them again.")
    played = np.stack(numbers)  # (T, E)
    where = [np.argwhere(played == game) for game in range(games)]
    place = np.concatenate(where)  # (N, 2): step and environment of each row
    arrays = {name: np.stack([step[name] for step in steps])[place[:, 0], place[:, 1]] for name in steps[0]}
    arrays["stream"] = np.zeros(len(place), np.int16)
    ended = np.flatnonzero(arrays["terminated"] | arrays["truncated"])
    finals = [column_names(CLOSING, closing[int(t), int(stream)]) for t, stream in place[ended]]
    return arrays | {name: np.stack([final[name] for final in finals]) for name in finals[0]}
