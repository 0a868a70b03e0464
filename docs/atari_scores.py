"""Add finished Atari runs to results/atari*.csv, and renew the tables and the picture of atari.md from these files.

    python docs/atari_scores.py --commit 1a2b3c4 wm-best=runs/atari/wm-best-Pong-1 "wm-best, clip 1000=runs/other"

A name is a preset, or a preset, a comma and what was changed. Without runs only the page is renewed.
"""

from __future__ import annotations

import argparse
import csv
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from wmcli.metrics import atari

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "atari.md", DOCS / "atari-curves.png"
SCORES, CURVES = DOCS / "results" / "atari.csv", DOCS / "results" / "atari-curves.csv"
GAMES = ("Boxing", "CrazyClimber", "RoadRunner", "Freeway", "Breakout", "Pong")
PRESETS = ("drama-atari", "storm-atari", "dreamer-atari", "rem-atari", "unizero-atari", "muzero-atari", "wm-best")
STUDENT = 2.093  # 97.5 % quantile of Student's t for 20 games

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def write(file: Path, rows: list[Row]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rows_of(name: str, run: Path, commit: str) -> tuple[Row, list[Row]]:
    """Return the row of a run's last evaluation, of 20 games, and those of all its evaluations.

    Minutes are from the start of the run to an evaluation's end, so the run must not have been interrupted.
    """
    evaluations = [json.loads(file.read_text()) for file in sorted(run.glob("evaluation/v*/manifest.json"))]
    with (run / "metrics.jsonl").open() as lines:
        began = datetime.fromisoformat(json.loads(next(lines))["began"])
    last = evaluations[-1]
    game = last["environment"]["game"]
    of_run = {"preset": name, "game": game, "seed": last["settings"]["seed"]}
    curve = []
    for evaluation in evaluations:
        minutes = (datetime.fromisoformat(evaluation["created"]) - began).total_seconds() / 60
        metrics = evaluation["metrics"]
        at = of_run | {"steps": metrics["total_steps"], "minutes": f"{minutes:.1f}"}
        curve.append(at | {"games": len(metrics["returns"]), "mean": f"{metrics['mean']:.2f}"})
    returns = np.array(last["metrics"]["returns"])
    if len(returns) != 20:
        raise SystemExit(
            f"{run}: its last evaluation has {len(returns)} games, not 20; finish it with: wm run --run {run}"
        )
    half = STUDENT * returns.std(ddof=1) / 20**0.5
    score = of_run | {"commit": commit} | {key: curve[-1][key] for key in ("steps", "minutes", "mean")}
    score |= {"low": f"{returns.mean() - half:.2f}", "high": f"{returns.mean() + half:.2f}"}
    score |= {
        "random": atari.reference(game, "random"),
        "human_normalized": f"{last['metrics']['human_normalized']:.3f}",
    }
    return score | {"returns": " ".join(f"{value:g}" for value in returns)}, curve


def interval(row: Row) -> str:
    form = "{:,.0f}" if row["game"] in ("CrazyClimber", "RoadRunner") else "{:.1f}"
    mean, low, high = (form.format(float(row[key])) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def table(scores: list[Row]) -> list[str]:
    """Return the table of games and presets, first seeds, in Markdown."""
    by_name = {(row["preset"], row["game"]): row for row in reversed(scores) if row["seed"] in ("0", "1", 1)}
    lines = [
        f"| game | random | {' | '.join(f'`{preset}`' for preset in PRESETS)} |",
        "|---" * (len(PRESETS) + 2) + "|",
    ]
    for game in GAMES:
        random = by_name["random", game]
        cells = [interval(random)]
        for preset in PRESETS:
            row = by_name.get((preset, game))
            above = row is not None and float(row["low"]) > float(random["high"])
            cells.append("" if row is None else f"**{interval(row)}**" if above else interval(row))
        lines.append(f"| {game} | {' | '.join(cells)} |")
    return lines


def table_of_others(scores: list[Row]) -> list[str]:
    """Return the table of changed presets and of further seeds, in Markdown."""
    lines = ["| preset | game | score | steps | minutes | commit |", "|---" * 6 + "|"]
    for row in scores:
        preset, comma, change = row["preset"].partition(",")
        seed = f", seed {row['seed']}" if int(row["seed"]) > 1 else ""
        if comma or seed:
            cells = (f"`{preset}`{comma}{change}{seed}", row["game"], interval(row), f"{int(row['steps']):,}")
            lines.append(f"| {' | '.join(cells)} | {float(row['minutes']):.0f} | {row['commit']} |")
    return lines


def renewed(page: str, lines: list[str]) -> str:
    """Return `page` with the table of the same head as `lines` replaced by them."""
    before, head, rest = page.partition(lines[0] + "\n")
    if not head:
        raise SystemExit(f"{PAGE} has no table that begins with: {lines[0]}")
    _, _, after = rest.partition("\n\n")
    return before + "\n".join(lines) + "\n\n" + after


def draw(scores: list[Row], curves: list[Row]) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.2), layout="constrained")
    lines = {}
    for panel, game in zip(axes.flat, GAMES, strict=True):
        random = next(float(row["mean"]) for row in scores if (row["preset"], row["game"]) == ("random", game))
        for color, preset in enumerate(PRESETS):
            points = [row for row in curves if (row["preset"], row["game"], str(row["seed"])) == (preset, game, "1")]
            if points:
                minutes = [0.0, *(float(row["minutes"]) for row in points)]
                means = [random, *(float(row["mean"]) for row in points)]
                [lines[preset]] = panel.plot(minutes, means, marker="o", markersize=3, color=f"C{color}")
        panel.axhline(random, color="0.6", linestyle=":", linewidth=1)
        panel.set(title=game, xlabel="minutes")
    for row in axes:
        row[0].set_ylabel("mean return")
    drawn = [preset for preset in PRESETS if preset in lines]
    figure.legend(
        [lines[preset] for preset in drawn], drawn, loc="outside lower center", ncols=len(drawn), frameon=False
    )
    figure.savefig(PICTURE, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="NAME=RUN")
    parser.add_argument("--commit", help="commit that the runs were made with")
    options = parser.parse_args()
    scores, curves = read(SCORES), read(CURVES)
    if options.runs and not options.commit:
        parser.error("name the commit that the runs were made with: --commit 1a2b3c4")
    for pair in options.runs:
        name, _, run = pair.rpartition("=")
        score, curve = rows_of(name, Path(run), options.commit)
        key = [name, score["game"], str(score["seed"])]
        if key in [[row["preset"], row["game"], row["seed"]] for row in scores]:
            parser.error(f"{SCORES} has a row of {', '.join(key)}: name what differed, there and in {CURVES}, or here")
        scores.append(score)
        curves += curve
    write(SCORES, scores)
    write(CURVES, curves)
    page = PAGE.read_text()
    for lines in (table(scores), table_of_others(scores)):
        page = renewed(page, lines)
    PAGE.write_text(page)
    draw(scores, curves)


if __name__ == "__main__":
    main()
