"""The choice of tiles: the first, or the fastest of those timed, in this process and in later ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wmcli.errors import UsageError
from wmcli.kernels import tiles

pytest.importorskip("triton")

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
OFFERED: list[tiles.Tile] = [{"ROWS": 32}, {"ROWS": 16}, {"ROWS": 64}]
SECONDS = {32: 3.0, 16: 1.0, 64: 2.0}


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "cache" / "tiles.json"
    monkeypatch.setattr(tiles, "path", lambda: file)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    tiles._stored.cache_clear()
    yield file
    tiles._stored.cache_clear()


def tune(kernels: tuple[str, ...] = ("scan",)) -> dict[str, tiles.Tile]:
    """Tune launches whose times are those above."""
    launched: dict[str, tiles.Tile] = {}

    def call() -> None:
        launched.update((kernel, tiles.choose(kernel, CUDA, (4, 5), OFFERED)) for kernel in kernels)

    def time(call) -> float:
        call()
        return sum(SECONDS[tile["ROWS"]] for tile in launched.values())

    return tiles.tune(call, time)


def test_the_first_unless_something_is_stored(stored: Path) -> None:
    assert tiles.choose("scan", CUDA, (4, 5), OFFERED) == OFFERED[0]
    assert not stored.exists()


def test_the_fastest_of_each_kernel_is_stored(stored: Path) -> None:
    assert tune(("scan", "conv")) == {"A GPU scan 4 5": {"ROWS": 16}, "A GPU conv 4 5": {"ROWS": 16}}
    tiles._stored.cache_clear()  # as in a later process
    assert tiles.choose("scan", CUDA, (4, 5), OFFERED) == {"ROWS": 16}
    assert tiles.choose("scan", CUDA, (4, 6), OFFERED) == OFFERED[0]
    assert tiles.choose("scan", CPU, (4, 5), OFFERED) == OFFERED[0]
    assert tiles.choose("scan", CUDA, (4, 5), OFFERED[:1]) == OFFERED[0]  # no longer offered
    assert len(json.loads(stored.read_text())) == 2


def test_a_stored_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tune()
    monkeypatch.setitem(SECONDS, 64, 0.1)
    assert tune() == {}
    assert tiles.choose("scan", CUDA, (4, 5), OFFERED) == {"ROWS": 16}


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_damaged_file_is_named(stored: Path, content: str) -> None:
    stored.parent.mkdir()
    stored.write_text(content)
    with pytest.raises(UsageError, match=r"tiles\.json: stored tiles of kernels are damaged; remove the file"):
        tiles.choose("scan", CUDA, (4, 5), OFFERED)


def test_a_tile_by_its_index() -> None:
    with tiles.using(1):
        assert tiles.choose("scan", CPU, (), OFFERED) == OFFERED[1]
        assert tiles.choose("scan", CPU, (), OFFERED[:1]) == OFFERED[0]
    assert tiles.choose("scan", CPU, (), OFFERED) == OFFERED[0]
