"""`wm convert-lpips`, on files of the published form with made-up weights."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wmcli.cli import main
from wmcli.nn.lpips import LPIPS, read_weights, weight_shapes
from wmcli.stages import lpips_weights


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes().items()}


@pytest.fixture(scope="module")
def published(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two published files."""
    folder = tmp_path_factory.mktemp("published")
    classifier = {"classifier.0.weight": torch.zeros(4, 4), "classifier.0.bias": torch.zeros(4)}
    for file, prefix in {"vgg16.pth": "features.", "vgg.pth": "lin"}.items():
        part = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        torch.save(part | (classifier if prefix == "features." else {}), folder / file)
    return folder


@pytest.fixture
def files(published: Path, tmp_path: Path) -> list[str]:
    """The two published files and the one to write."""
    return [str(published / "vgg16.pth"), str(published / "vgg.pth"), str(tmp_path / "out.safetensors")]


def test_the_file_that_is_written_is_the_one_that_is_read(files, weights, capsys):
    assert main.run(["convert-lpips", *files]) == 0
    out, err = capsys.readouterr()
    assert out == f"{files[2]}\n"
    assert err.count("not the published file") == err.count("\n") == 2
    read = read_weights(Path(files[2]))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert LPIPS(read)(torch.zeros(1, 3, 16, 16), torch.ones(1, 3, 16, 16)).shape == (1,)


def test_published_files_are_known_by_their_digests(files, capsys, monkeypatch):
    first, second = (Path(file).read_bytes() for file in files[:2])
    monkeypatch.setattr(lpips_weights, "VGG16_SHA256", hashlib.sha256(first).hexdigest()[:8])
    monkeypatch.setattr(lpips_weights, "WEIGHTINGS_MD5", hashlib.md5(second).hexdigest())
    assert main.run(["convert-lpips", *files]) == 0
    assert capsys.readouterr().err == ""


def cut_short(files: list[str]) -> bytes:
    return Path(files[1]).read_bytes()[:-3000]


def saved(value: object) -> bytes:
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def spoilt(name: str, value: Tensor) -> Callable[[list[str]], bytes]:
    return lambda files: saved(torch.load(files[1]) | {f"{name}.model.1.weight": value})


NO_TENSORS = "wrong.pth: holds no tensors by name"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda files: b"no weights", NO_TENSORS),
        (lambda files: b"", NO_TENSORS),
        (cut_short, NO_TENSORS),
        (lambda files: saved(torch.zeros(3)), NO_TENSORS),
        (lambda files: saved(torch.nn.Linear(2, 2)), NO_TENSORS),  # it needs code to load, which is not run
        (
            lambda files: Path(files[0]).read_bytes(),
            "weights of LPIPS for VGG16: lin0.model.1.weight is missing",
        ),
        (spoilt("lin2", torch.zeros(1, 3, 1, 1)), "lin2.model.1.weight has shape (1, 3, 1, 1), not (1, 256, 1, 1)"),
        (spoilt("lin0", torch.full((1, 64, 1, 1), torch.nan)), "lin0.model.1.weight is not finite."),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(wrong, said, files, tmp_path, capsys):
    (tmp_path / "wrong.pth").write_bytes(wrong(files))
    refused(files[0], str(tmp_path / "wrong.pth"), files[2], said, capsys)


def test_absent_files_and_folders_are_refused_in_one_line(files, tmp_path, capsys):
    refused(str(tmp_path / "absent.pth"), *files[1:], "absent.pth: No such file or directory", capsys)
    refused(str(tmp_path), *files[1:], "Is a directory", capsys)
    refused(files[1], files[0], files[2], "weights of torchvision's vgg16: features.0.weight is missing,", capsys)
    refused(*files[:2], str(tmp_path / "no" / "out.safetensors"), "there is no folder", capsys)


def refused(vgg16: str, weightings: str, out: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["convert-lpips", vgg16, weightings, out]) == 2
    stdout, stderr = capsys.readouterr()
    *warnings, complaint = stderr.splitlines()
    assert stdout == ""
    assert complaint.startswith("wm convert-lpips: ") and said in complaint
    assert all(line.startswith("warning: ") for line in warnings)
    assert not Path(out).exists()
