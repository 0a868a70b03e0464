"""`wm watch`: what it refuses, that it starts without torch, and that a signal ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from wmcli.cli import main

pytest.importorskip("websockets")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.run(["watch", *arguments]) == 2
    return capsys.readouterr().err


def test_wrong_use_is_refused_before_a_server_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.toml"
    file.write_text("preset = 3")
    assert "omit RUN" in refused(capsys, str(tmp_path), "--sweep", str(file))
    assert f"{file}: is a file" in refused(capsys, str(file))
    assert f"{file}: preset" in refused(capsys, "--sweep", str(file))
    assert "no such file" in refused(capsys, "--sweep", str(tmp_path / "none.toml"))
    assert "no suite called" in refused(capsys, "--sweep", "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in refused(capsys, str(tmp_path), "--no-open", "--port", str(taken.getsockname()[1]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_its_page_until_a_signal(tmp_path: Path, number: int) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from wmcli.cli.main import run;"
        f" sys.exit(run(['watch', {str(tmp_path / 'later')!r}, '--port', '0', '--no-open']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert child.stderr is not None
    line = child.stderr.readline()
    assert line.startswith("watching ") and "http://127.0.0.1:" in line
    address = line.partition("http")[1] + line.partition("http")[2].split()[0]
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    assert "<title>wm watch</title>" in text and "src=" not in text.partition("</head>")[0]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?")[0])
    child.send_signal(number)
    out, talk = child.communicate(timeout=30)
    assert (child.returncode, out, talk) == (0, "False\n", "")
