"""Train quick presets on the small games and print how far from random to scripted play each came.

    python tests/learning/suite.py --runs runs/suite --preset rem-quick drama-quick --slots 2

Every pair is a run of its own, `RUNS/PRESET-GAME`, with what it printed in `RUNS/PRESET-GAME.log`. `wm run` recognizes
finished work and resumes the rest, so the same command prints the same table again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
from small_games import DEVELOPMENT, GAMES, REFERENCES, UNSEEN

import wmcli

PRESETS = ("rem-quick", "drama-quick", "muzero-quick", "unizero-quick")
FOLDER = Path(__file__).parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--preset", nargs="+", default=PRESETS, help="default: %(default)s")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=DEVELOPMENT, help="default: %(default)s")
    parser.add_argument("--unseen", dest="games", action="store_const", const=UNSEEN, help="the games of UNSEEN")
    parser.add_argument("--seed", type=int, default=1, help="another seed needs another --runs; default: %(default)s")
    parser.add_argument("--slots", type=int, default=1, help="runs at once, of one thread each if there are several")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run, as in wm run")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, preset: str, game: str) -> bool:
    """Run, resume or recognize one run. Returns whether it is finished."""
    run = options.runs / f"{preset}-{game}"
    settings = [f"environment.id=small_games:{game}-v0", f"seed={options.seed}", *options.set]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    if options.slots > 1:
        settings.append("training.threads=1")
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "wmcli", "run", preset, "--run", str(run)]
    with Path(f"{run}.log").open("a", encoding="utf-8") as log:
        code = subprocess.call(
            [*command, *(word for setting in settings for word in ("--set", setting))],
            env=environment,
            stdout=log,
            stderr=log,
        )
    print(f"{run.name}: {'finished' if code == 0 else f'exit code {code}, see {run}.log'}", file=sys.stderr)
    return code == 0


def table(runs: Path, presets: list[str], games: list[str], finished: dict[tuple[str, str], bool]) -> str:
    """The scores in Markdown: a row for each game, and one for the mean shares of each part of the suite.

    A cell is the mean return ± its standard error, the share of the way from random to scripted play, and the minutes
    from the first line of the run's log to the score, pauses included.
    """
    lines = [["game", "part", "random", "scripted", *presets], ["---", "---", *["---:"] * (2 + len(presets))]]
    shares: dict[tuple[str, str], list[float]] = {}
    for game in games:
        reference, part = REFERENCES[game], "development" if game in DEVELOPMENT else "unseen"
        cells = [game, part, f"{reference.random:.2f}", f"{reference.scripted:.2f}"]
        for preset in presets:
            if not finished[preset, game]:
                cells.append("-")
                continue
            opened = wmcli.open_run(runs / f"{preset}-{game}")
            evaluation = opened.artifact("evaluation")
            score, error = evaluation.metrics["mean"], evaluation.metrics["stderr"]
            began = datetime.fromisoformat(opened.run.history()[0]["time"])
            minutes = (datetime.fromisoformat(evaluation.manifest["created"]) - began).total_seconds() / 60
            share = reference.share(score)
            shares.setdefault((part, preset), []).append(share)
            cells.append(f"{score:.2f} ± {error:.2f} ({share:.0%}, {minutes:.1f} min)")
        lines.append(cells)
    for part in ("development", "unseen"):
        means = [shares.get((part, preset)) for preset in presets]
        if any(means):
            lines.append(["mean share", part, "", "", *(f"{np.mean(each):.0%}" if each else "-" for each in means)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: list[str] | None = None) -> int:
    """Train what is not finished and print the table. Returns 1 if a run failed."""
    options = parse(arguments)
    options.runs.mkdir(parents=True, exist_ok=True)
    pairs = [(preset, game) for game in options.games for preset in options.preset]
    with ThreadPoolExecutor(options.slots) as pool:
        done = pool.map(lambda pair: train(options, *pair), pairs)
        finished = dict(zip(pairs, done, strict=True))
    print(table(options.runs, options.preset, options.games, finished))
    return 0 if all(finished.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
