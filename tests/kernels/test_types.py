"""Type checkers resolve `wmcli.kernels`, whose folder stands outside `wmcli`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIP_TORCH = "[mypy]\nignore_missing_imports = true\n[mypy-torch.*]\nfollow_imports = skip\n"  # ten times as fast
CALLS = """from torch import reward, terminated, value
from wmcli.kernels.lambda_returns import lambda_returns

lambda_returns("nonsense", 3, wrong=1)
lambda_returns(value, reward, terminated, "0.99", 0.95)
"""


@pytest.mark.slow
def test_a_wrong_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy comes with the extra `dev`")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    (tmp_path / "mypy.ini").write_text(SKIP_TORCH, encoding="utf-8")
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    report, _, status = api.run([*options, "-c", CALLS])
    assert status == 1
    assert 'Unexpected keyword argument "wrong" for "lambda_returns"' in report
    assert 'Argument 4 to "lambda_returns" has incompatible type "str"; expected "float"' in report
    assert "Found 2 errors" in report
