"""The code of docs/python.md and of README.md runs, block after block, on a tiny run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(r'^```python( title="Stable-Baselines3")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHORTER = [
    ("episodes=500", "episodes=5"),
    ("total_timesteps=60_000", "total_timesteps=256"),
    ("n_steps=32", "n_steps=4"),
    ("batch_size=256", "batch_size=64"),
    ("num_envs=64", "num_envs=16"),
    ('    "quickstart",\n', '    "quickstart",\n    "training.threads=1",\n'),
]
"""What the page has, and what the test runs in its place."""


@pytest.mark.slow
def test_the_code_of_the_page_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks entitled Stable-Baselines3 only where it is installed."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "catch").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    page, names = PAGE.read_text(encoding="utf-8"), dict[str, Any](__name__="page")
    for words, _ in SHORTER:
        assert page.count(words) == 1, words
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) == page.count("```python") >= 6
    for block in blocks:
        if block[1] and importlib.util.find_spec("stable_baselines3") is None:
            continue
        code = "\n" * page[: block.start(2)].count("\n") + block[2]  # errors name the page's own lines
        for words, shorter in SHORTER:
            code = code.replace(words, shorter)
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["scores"].lengths.tolist() == [7] * len(names["scores"].lengths)
    assert names["controller"].artifact is None and "reward" in names["columns"]


def test_the_code_of_the_readme_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "default").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    (block,) = BLOCK.finditer((PAGE.parents[1] / "README.md").read_text(encoding="utf-8"))
    names = dict[str, Any](__name__="readme")
    exec(compile(block[2], "README.md", "exec"), names)
    assert names["predicted"].frames.shape[:2] == (8, 3)
