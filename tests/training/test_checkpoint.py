"""Checkpoints: whole or refused, never unpickled, and what does not fit is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from small_trainer import Killed
from torch import nn

from wmcli.artifacts.files import SEAL_BYTES, disk_errors
from wmcli.config import canonical_json
from wmcli.errors import ArtifactError, MachineError
from wmcli.training.checkpoint import (
    DTYPES,
    TRAINING,
    WEIGHTS,
    DamagedFileError,
    TrainState,
    find_checkpoint,
    generator_state,
    load_checkpoint,
    load_generator,
    load_modules,
    load_optimizer,
    load_random,
    load_tensors,
    load_work,
    module_tensors,
    optimizer_tensors,
    part_states,
    part_tensors,
    random_tensors,
    save_checkpoint,
    save_tensors,
    save_work,
)
from wmcli.training.optim import build_optimizer, update

TENSORS = {
    "float": torch.randn(2, 3),
    "half": torch.randn(5).to(torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.tensor([1 << 60, -3]),
    "nothing": torch.zeros(0, 4, dtype=torch.int32),
    "scalar": torch.tensor(1.5),
    "one": torch.zeros(1, 1, dtype=torch.int32).as_strided((1, 1), (0, 0)),
    "turned": torch.arange(6).view(2, 3).T,
}
ABOUT = {"update": 3, "big": 1 << 127, "names": ["ä", "b"], "metrics": {"loss": 0.1}, "none": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_tensors(tmp_path / "checkpoint.safetensors", TENSORS, ABOUT)
    return tmp_path / "checkpoint.safetensors"


def complaint(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_tensors(path)
    message = str(caught.value)
    assert str(path) in message and "damaged" in message and "\n" not in message
    return message


# -- files ------------------------------------------------------------------------------------------------------------


def test_saved_values_load_unchanged(path: Path) -> None:
    tensors, about = load_tensors(path)
    assert about == ABOUT
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("length", range(0, 64, 8))
def test_loaded_tensors_begin_where_new_ones_do(tmp_path: Path, length: int) -> None:
    """Whatever the length of the head: else a resumed process rounds otherwise than one that was not stopped."""
    tensors = {"state" + "x" * length: torch.randn(3, 5), "t": torch.randn(7)}
    save_tensors(tmp_path / "file", tensors, {})
    loaded, _ = load_tensors(tmp_path / "file")
    assert all(tensor.data_ptr() % 64 == 0 and torch.equal(tensor, tensors[name]) for name, tensor in loaded.items())


def test_the_file_is_plain_safetensors_with_one_metadata_key(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        assert list(file.metadata()) == ["wm"]
        assert json.loads(file.metadata()["wm"]) == ABOUT
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert set(json.loads(data[8 : 8 + length])) == {"__metadata__", *TENSORS}


def test_the_same_content_is_the_same_bytes(path: Path) -> None:
    before = path.read_bytes()
    save_tensors(path, dict(reversed(TENSORS.items())), dict(reversed(ABOUT.items())))
    assert path.read_bytes() == before


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(module, name, forbidden)
    save_tensors(path, TENSORS, ABOUT)
    load_tensors(path)


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "trap").write_bytes(pickle.dumps(Trap()))
    complaint(tmp_path / "trap")
    torch.save({"a": Trap()}, tmp_path / "trap")
    complaint(tmp_path / "trap")
    assert not (tmp_path / "sprung").exists()


def test_a_file_cut_anywhere_is_damaged(path: Path) -> None:
    data = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 200, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:length])
        complaint(path)


def test_a_file_with_another_head_is_damaged(path: Path) -> None:
    data = path.read_bytes()
    for spoilt in (data + b"x", b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:], bytes(len(data)), b"not at all"):
        path.write_bytes(spoilt)
        complaint(path)


@pytest.mark.parametrize("metadata", [None, {"other": "1"}, {"wm": "{"}, {"wm": ""}])
def test_safetensors_of_somebody_else_are_damaged(path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"a": torch.zeros(2)}, path, metadata)
    complaint(path)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("unable to open file <{}> in read-only mode: Too many open files (24)", "raise the limit on open files"),
        ("unable to mmap 128 bytes from file <{}>: Cannot allocate memory (12)", "free some memory"),
    ],
)
def test_a_file_that_torch_cannot_map_is_not_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch, said: str, remedy: str
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError(said.format(path))

    monkeypatch.setattr("wmcli.training.checkpoint.safe_open", fail)
    with pytest.raises(MachineError, match=f"{path}: cannot be read: .*no damage of the run: {remedy}"):
        load_tensors(path)


def test_a_full_disk_keeps_the_checkpoint_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError), disk_errors(path):
        save_tensors(path, {"float": torch.zeros(100)}, {})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_digest_is_that_of_the_file(path: Path) -> None:
    digest = save_tensors(path, TENSORS, ABOUT)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_bytes_are_those_of_the_public_writer(path: Path) -> None:
    tensors = (
        TENSORS | {f"{dtype}": torch.arange(12).view(3, 4).to(dtype) for dtype in DTYPES} | {'"ä\n': torch.ones(2)}
    )
    save_tensors(path, tensors, ABOUT)
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert path.read_bytes() == save(dense, {"wm": canonical_json(ABOUT)})


# -- work files -------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_a_work_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    save_work(path, {"a": torch.arange(3), "f": torch.tensor([True])}, {"update": 3}, "update 3")
    data = path.read_bytes()
    assert load_work(path)[1] == {"update": 3} and list(load_work(path)[0]) == ["a", "f"]
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    for spoilt in (*flipped, data[:-1], data[:-SEAL_BYTES], data + b"x", data[:40], b""):
        path.write_bytes(spoilt)
        with pytest.raises(DamagedFileError, match=f"{path} is damaged"):
            load_work(path)


def test_a_work_file_of_an_earlier_version_has_no_seal(path: Path) -> None:
    tensors, about, parts = load_checkpoint(path, lambda about: [path] * about["update"])
    assert about == ABOUT and len(parts) == 3
    assert tensors.keys() == parts[0].keys() == TENSORS.keys()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """The last of three checkpoints, beside the one before it; each needs one more part."""
    path = tmp_path / "checkpoint.safetensors"
    for number in (1, 2, 3):
        save_work(tmp_path / f"part-{number}", {}, {})
        save_checkpoint(path, {"weight": torch.full((2,), number)}, {"update": number}, f"update {number}")
    return path


def load_with_parts(path: Path) -> int:
    return load_checkpoint(path, lambda about: [path.with_name(f"part-{n + 1}") for n in range(about["update"])])[1][
        "update"
    ]


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("file", ["checkpoint.safetensors", "part-3"])
@pytest.mark.parametrize("how", [damage, Path.unlink])
def test_the_checkpoint_before_is_kept_and_the_message_leads_to_it(
    two: Path, file: str, how: Callable[[Path], None]
) -> None:
    if (file, how) == ("checkpoint.safetensors", Path.unlink):  # as a crash between the two renames leaves it
        two.unlink()
        assert load_with_parts(two) == 2
        return
    how(two.with_name(file))
    with pytest.raises(ArtifactError) as caught:
        load_with_parts(two)
    fault = "missing" if how is Path.unlink else r"damaged \(.*\)"
    assert re.fullmatch(
        rf"{two.with_name(file)} is {fault}; to go on from the checkpoint before it \(update 2\), remove {two} and run"
        " the same command again; or restart the stage with --fresh.",
        str(caught.value),
    )
    two.unlink()
    assert load_with_parts(two) == 2
    save_checkpoint(two, {}, {"update": 3}, "update 3")  # keeps the one before
    assert find_checkpoint(two) == two
    two.unlink()
    assert load_with_parts(two) == 2


@pytest.mark.parametrize("also", ["checkpoint-before.safetensors", "part-1"])
def test_where_the_checkpoint_before_does_not_help_the_message_says_so(two: Path, also: str) -> None:
    damage(two)
    damage(two.with_name(also))
    with pytest.raises(ArtifactError, match="and the checkpoint before it does not help; restart the stage with --fr"):
        load_with_parts(two)
    two.unlink()
    with pytest.raises(ArtifactError, match=rf"{also} is damaged \(.*\); restart the stage with --fresh.$"):
        load_with_parts(two)


def test_a_crash_while_a_checkpoint_is_written_leaves_one(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_at(name: str) -> Callable[[str], None]:
        def failpoint(here: str) -> None:
            if here == name:
                raise Killed

        return failpoint

    for name in ("write-synced", "write-kept"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("wmcli.artifacts.files.failpoint", die_at(name))
            save_checkpoint(two, {}, {"update": 4}, "update 4")
        assert load_with_parts(two) == 3
    save_checkpoint(two, {}, {"update": 0}, "")
    assert load_with_parts(two) == 0


# -- modules ----------------------------------------------------------------------------------------------------------


def test_modules_are_told_apart_by_their_whole_name() -> None:
    modules = {"net": nn.Linear(2, 3), "network": nn.Linear(2, 3), "norm": nn.BatchNorm1d(4)}
    tensors = module_tensors(modules)
    assert "model/norm/running_mean" in tensors  # buffers as well
    others = {"net": nn.Linear(2, 3), "network": nn.Linear(2, 3), "norm": nn.BatchNorm1d(4)}
    load_modules(others, tensors, "here")
    for name, module in modules.items():
        for key, value in module.state_dict().items():
            assert torch.equal(others[name].state_dict()[key], value)


def test_mismatches_are_named_together_and_nothing_is_loaded() -> None:
    found = module_tensors({"net": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False), nn.Linear(1, 1))})
    net = nn.Sequential(nn.Linear(2, 5), nn.Linear(3, 4))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ArtifactError) as caught:
        load_modules({"net": net}, found, "tokenizer@3")
    message = str(caught.value)
    assert message.startswith("tokenizer@3: weights of the net do not fit its settings")
    assert "missing: ['1.bias']" in message
    assert "unexpected: ['2.bias', '2.weight']" in message
    assert "other shape: ['0.bias', '0.weight']" in message
    assert "\n" not in message
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("wanted", "found", "words"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), "missing: ['bias'], unexpected: [], other shape: []"),
        (nn.Linear(2, 3, bias=False), nn.Linear(2, 3), "missing: [], unexpected: ['bias'], other shape: []"),
        (nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False), "unexpected: [], other shape: ['weight']"),
    ],
)
def test_each_kind_of_misfit_alone_is_refused(wanted: nn.Module, found: nn.Module, words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        load_modules({"net": wanted}, module_tensors({"net": found}), "here")
    assert words in str(caught.value)


# -- optimizers and generators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop", "sgd"])
def test_an_optimizer_goes_on_from_its_moments_with_the_settings_of_now(name, tmp_path: Path) -> None:
    """Its kernels lie channels last, as convolutions here do: moments that lie otherwise are those of other weights."""

    def made(learning_rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        return net, build_optimizer(name, net.parameters(), learning_rate, 0.1, momentum=0.9)

    def learn(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        update(optimizer, net(torch.arange(24.0).view(2, 3, 2, 2)).square().sum(), 1e9)

    net, optimizer = made(1e-2)
    for _ in range(3):
        learn(net, optimizer)
    save_tensors(tmp_path / "x", module_tensors({"net": net}) | optimizer_tensors(optimizer), {})
    tensors, _ = load_tensors(tmp_path / "x")
    twin, its_optimizer = made(1e-2)
    load_modules({"net": twin}, tensors, "here")
    load_optimizer(its_optimizer, tensors)
    learn(net, optimizer)
    learn(twin, its_optimizer)
    assert torch.equal(net.weight, twin.weight) and torch.equal(net.bias, twin.bias)
    _, slower = made(1e-5)
    load_optimizer(slower, tensors)
    assert slower.param_groups[0]["lr"] == 1e-5


@pytest.mark.parametrize("inside", [True, False])
def test_training_continues_from_weights_in_the_file_or_beside_it(tmp_path: Path, inside: bool) -> None:
    def state() -> TrainState:
        net = nn.Linear(2, 3)
        optimizer = build_optimizer("adamw", net.parameters(), 1e-2, 0.1)
        update(optimizer, net(torch.randn(4, 2)).square().sum(), 1e9)
        return TrainState({"net": net}, optimizer, np.random.default_rng(0), update=7, trained=2)

    saved, further = state(), state()
    weights = module_tensors(saved.modules)
    save_tensors(tmp_path / WEIGHTS, {name: torch.zeros_like(each) for name, each in weights.items()}, {})
    if not inside:
        save_tensors(tmp_path / WEIGHTS, weights, {})
    saved.save_training(tmp_path / TRAINING, torch.device("cpu"), weights=inside)
    further.continue_from(tmp_path / TRAINING)
    assert further.trained == 9 and further.update == 7
    for name, tensor in module_tensors(further.modules).items():
        assert torch.equal(tensor, weights[name])
    assert torch.equal(
        optimizer_tensors(further.optimizer)["optimizer/0/exp_avg"],
        optimizer_tensors(saved.optimizer)["optimizer/0/exp_avg"],
    )


def test_parts_are_split_into_tensors_and_plain_values_and_put_together_again() -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    states = {"one": {"n": 1, "a": frozen, "b": np.array(2.5)}, "two": {"list": [1, 2]}, "three": {"a": np.zeros(0)}}
    tensors, plain = part_tensors(states)
    assert plain == {"one": {"n": 1}, "two": {"list": [1, 2]}, "three": {}}
    assert sorted(tensors) == ["parts/one/a", "parts/one/b", "parts/three/a"]
    frozen.flags.writeable = True
    frozen[0] = 9  # the tensors are copies
    back = part_states({**tensors, "model/one/a": torch.ones(1)}, plain)
    assert back["two"] == states["two"] and back["one"].keys() == states["one"].keys()
    assert back["one"]["a"].tolist() == [0, 1, 2, 3] and back["one"]["a"].dtype == np.int64
    assert back["one"]["b"].shape == () and back["one"]["b"] == 2.5 and back["three"]["a"].shape == (0,)
    assert plain["one"] == {"n": 1}


def test_only_the_tensors_asked_for_are_read(path: Path) -> None:
    tensors, about = load_tensors(path, "f")
    assert sorted(tensors) == ["flags", "float"] and about == ABOUT


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rng.integers(7)  # leaves half of a 64-bit draw in store
    save_tensors(tmp_path / "x", random_tensors(torch.device("cpu")), generator_state(rng))
    here = rng.integers(7, size=5).tolist(), torch.rand(3).tolist()
    tensors, about = load_tensors(tmp_path / "x")
    other = np.random.default_rng(0)
    torch.manual_seed(0)
    load_random(tensors, torch.device("cpu"))
    load_generator(other, about)
    assert (other.integers(7, size=5).tolist(), torch.rand(3).tolist()) == here
