"""The published Atari-100k numbers and the names they are found under."""

from __future__ import annotations

import re
from importlib import resources

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.metrics import atari


@pytest.mark.parametrize(
    ("environment", "game"),
    [
        ("ALE/Pong-v5", "Pong"),
        ("PongNoFrameskip-v4", "Pong"),
        ("PongDeterministic-v0", "Pong"),
        ("Pong", "Pong"),
        ("pong", "Pong"),
        ("ALE/MsPacman-v5", "MsPacman"),
        ("ms_pacman", "MsPacman"),
        ("up_n_down", "UpNDown"),
        ("ALE/UpNDown-v5", "UpNDown"),
        ("ALE/Tetris-v5", None),
        ("wm/Catch-v0", None),
        ("wm/Pong-v0", None),
        ("CartPole-v1", None),
        ("", None),
    ],
)
def test_game_name(environment, game):
    assert atari.game_name(environment) == game


def test_every_game_is_found_under_the_ids_gymnasium_gives_it():
    assert len(atari.games()) == 26
    for game in atari.games():
        for environment in (game, f"ALE/{game}-v5", f"{game}NoFrameskip-v4", re.sub(r"(?<!^)([A-Z])", r"_\1", game)):
            assert atari.game_name(environment) == game


def test_columns_and_scores_name_each_other_and_hold_usable_numbers():
    kinds = {column.name: column.kind for column in atari.columns()}
    assert kinds["random"] == kinds["human"] == "reference"
    assert kinds["REM"] == "system" and kinds["REM-no-pop"] == "ablation"
    assert kinds["DreamerV3-in-Drama"] == "copy"
    assert {c.name for k in ("reference", "system", "ablation", "copy") for c in atari.columns(k)} == set(kinds)
    for column in atari.columns():
        assert column.paper and column.data and column.scores
        scores = atari.normalized_runs(column.name)
        assert set(scores) <= set(atari.games()) and len(scores) in (8, 26)
        assert all(np.isfinite(runs).all() and len(runs) in (1, 3, 4, 5) for runs in scores.values())


def test_only_columns_with_runs_have_statistics_over_runs():
    assert {column.name for column in atari.columns("system") if not atari.has_runs(column.name)} == {
        *("EfficientZero", "Drama", "DreamerV3-XS", "MuZero", "UniZero")
    }
    assert atari.has_runs("REM-no-pop") and not atari.has_runs("human")
    assert atari.column_of("REM").name == "REM"
    with pytest.raises(UsageError, match="no published scores called 'IRIZ'; did you mean 'IRIS'"):
        atari.column_of("IRIZ")


def test_the_columns_of_drama_say_that_they_are_training_scores_and_copies_where_they_differ():
    caveats = {column.name: column.caveat for column in atari.columns()}
    for name in ("Drama", "DreamerV3-XS", "Drama-uniform"):
        assert "Training scores" in caveats[name]
    differing = [
        game
        for game in atari.games()
        if abs(atari.reference(game, "DreamerV3-in-Drama") - atari.reference(game, "DreamerV3")) > 0.5
    ]
    assert sorted({*atari.games()} - {*differing}) == ["Freeway"]
    assert (
        "every game but Freeway" in caveats["DreamerV3"] and "every game but Freeway" in caveats["DreamerV3-in-Drama"]
    )
    assert (atari.reference("Freeway", "STORM"), atari.reference("Freeway", "STORM-in-Drama")) == (0, 34)
    assert "Freeway" in caveats["STORM"] and "Freeway" in caveats["STORM-in-Drama"]


def test_a_score_half_way_between_random_and_human_is_one_half():
    for game in atari.games():
        random, human = atari.reference(game, "random"), atari.reference(game, "human")
        assert random < human
        assert atari.human_normalized(game, random) == 0
        assert atari.human_normalized(game, human) == 1
        assert atari.human_normalized(f"ALE/{game}-v5", (random + human) / 2) == pytest.approx(0.5)
    assert atari.human_normalized("wm/Catch-v0", 1.0) is None


def test_reference_is_the_mean_of_the_published_runs():
    assert atari.reference_runs("Pong", "REM") == [20.52, 20, 21, 8.15, 20.15]
    assert atari.reference("ALE/Pong-v5", "REM") == pytest.approx(17.964)
    assert atari.reference("Pong", "REM-4x4-tokenizer") is None  # eight games only
    assert atari.reference("ALE/Tetris-v5", "REM") is None
    with pytest.raises(UsageError, match="did you mean 'DreamerV3'"):
        atari.reference("Pong", "DreamerV33")


def test_changing_the_returned_runs_does_not_change_the_data():
    atari.reference_runs("Pong", "IRIS").clear()
    assert len(atari.reference_runs("Pong", "IRIS")) == 5


def test_game_table_puts_ours_beside_the_published_numbers():
    rows = {row.name: row for row in atari.game_table("ALE/Pong-v5", [10.0, 16.0])}
    assert next(iter(rows)) == "this run"
    assert rows["this run"][:5] == ("this run", 13.0, 10.0, 16.0, 2)
    assert rows["this run"].human_normalized == pytest.approx((13 + 20.7) / (14.6 + 20.7))
    assert rows["REM"][1:5] == (pytest.approx(17.964), 8.15, 21.0, 5)
    assert rows["human"].human_normalized == 1
    assert "sticky" in rows["STORM"].caveat
    assert not any("REM-" in name or "-in-Drama" in name for name in rows)
    assert [row.name for row in atari.game_table("Pong")] == list(rows)[1:]
    assert atari.game_table("wm/Catch-v0", [1.0]) is None


def test_the_data_file_holds_facts_and_their_sources_only():
    text = resources.files("wmcli.metrics").joinpath("atari100k.json").read_text(encoding="utf-8")
    assert not re.search(r'"/\w|home/|NaN|Infinity', text)
