"""The state of training and its file: one safetensors file, nothing pickled. Resuming from it is bit-exact.

A work file (a checkpoint, or a part of one) is sealed: it ends with a tensor `sha256`, the digest of all bytes before.
No manifest knows such a file yet. Published files have no seal.

Tensor names are `model/<module>/<parameter>`, `optimizer/<index>/<moment>`, `random/torch`, `random/cuda`, `unlogged`,
and `parts/<part>/<array>` for arrays of samplers and the like. The rest of their states, counters and the NumPy
generator's state are canonical JSON under the metadata key `wm`. (Safetensors' own writer has no order of several keys,
and published files are the same bytes as its.)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wmcli import ranks
from wmcli.artifacts.files import SEAL_BYTES, is_whole, write_durable
from wmcli.artifacts.manifest import MAX_HEADER_BYTES
from wmcli.config import canonical_json
from wmcli.errors import ArtifactError
from wmcli.reading import damage, open_file, read_errors
from wmcli.training.optim import LAPROP_MOMENT, LaProp

CHECKPOINT = "checkpoint.safetensors"
"""The file that an unfinished job resumes from."""
TRAINING = "training.safetensors"
"""The file beside the weights of a model that training continues from: optimizer, generators, counters. It has weights
only if they are others than those beside it."""
WEIGHTS = "model.safetensors"
"""The file of a model's weights inside its artifact."""


class Resumable(Protocol):
    """A part of training with a state of its own besides weights, such as a sampler."""

    def state(self) -> dict[str, Any]:
        """Return plain JSON values and, at the top level, NumPy arrays. Both are restored unchanged."""

    def load(self, state: dict[str, Any]) -> None:
        """Resume exactly where `state` was returned."""

    def continue_from(self, state: dict[str, Any]) -> None:
        """Continue from the `state` at the end of a finished stage; the data may have grown since."""


@dataclass
class TrainState:
    """The state that changes from update to update, and therefore the content of a checkpoint."""

    modules: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer | None
    """None if nothing is learned by gradient."""
    rng: np.random.Generator
    parts: dict[str, Resumable] = field(default_factory=dict)
    update: int = 0
    """Updates done in this stage."""
    trained: int = 0
    """Updates of earlier versions, if training continues one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The means in the last logged record."""
    unlogged: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Metrics of each update since then."""
    losses: list[float] = field(default_factory=list)
    """Sizes of the losses of the last logged updates, see `wmcli.training.loop`."""
    loss_spikes: int = 0
    """Logged updates of this stage whose loss was far above those."""

    def save(self, path: Path, device: torch.device) -> None:
        """Write a checkpoint, with the state of torch's generators on `device`; see `save_checkpoint`.

        All ranks take part, since each holds its rows of some parts. The first one writes.
        """
        tensors, metadata = self._content(device)
        metadata["losses"] = self.losses
        metadata["loss_spikes"] = self.loss_spikes
        tensors |= module_tensors(self.modules)
        if ranks.is_first():
            save_checkpoint(path, tensors, metadata, f"update {self.update}")

    def save_training(self, path: Path, device: torch.device, *, weights: bool) -> str:
        """Write the file that `continue_from` reads. All ranks take part, as in `save`.

        Args:
            path: The file.
            device: Device of training.
            weights: False leaves out the weights, where they stand in `WEIGHTS` beside the file.

        Returns:
            The file's sha256, empty on the other ranks.
        """
        tensors, metadata = self._content(device)
        if weights:
            tensors |= module_tensors(self.modules)
        return save_tensors(path, tensors, metadata) if ranks.is_first() else ""

    def _content(self, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON values of everything but weights."""
        tensors, parts = part_tensors({name: part.state() for name, part in self.parts.items()})
        metadata = {
            "update": self.update,
            "trained": self.trained,
            "metrics": self.metrics,
            "unlogged": list(self.unlogged[0]) if self.unlogged else [],
            "rng": generator_state(self.rng),
            "parts": parts,
        }
        tensors |= random_tensors(device)
        if self.optimizer is not None:
            tensors |= optimizer_tensors(self.optimizer)
        if self.unlogged:
            tensors["unlogged"] = ranks.average_metrics(stack_metrics(self.unlogged))
        return tensors, metadata

    def load(self, path: Path, device: torch.device) -> None:
        """Resume exactly where `save` was called; see `load_checkpoint`.

        Raises:
            ArtifactError: The file is damaged or of another model.
        """
        tensors, metadata, _ = load_checkpoint(path)
        with damage(path):
            self._load_learned(tensors, str(path))
            load_random(tensors, device)
            self.update, self.trained, self.metrics = metadata["update"], metadata["trained"], metadata["metrics"]
            if metadata["unlogged"]:
                rows = tensors["unlogged"].to(device)
                self.unlogged = [dict(zip(metadata["unlogged"], row, strict=True)) for row in rows]
            self.losses, self.loss_spikes = metadata.get("losses", []), metadata.get("loss_spikes", 0)
            states = part_states(tensors, metadata["parts"])
            for name, part in self.parts.items():
                part.load(states[name])
            load_generator(self.rng, metadata["rng"])  # after the parts, which may draw from it while they load

    def continue_from(self, path: Path) -> None:
        """Load weights and moments of a finished stage, and the parts of its state that still apply.

        Raises:
            ArtifactError: The file is damaged or of another model.
        """
        tensors, metadata = load_tensors(path)
        if not any(name.startswith(MODEL) for name in tensors):
            tensors |= load_tensors(path.with_name(WEIGHTS), MODEL)[0]
        with damage(path):
            self._load_learned(tensors, str(path))
            self.trained = metadata["trained"] + metadata["update"]
            states = part_states(tensors, metadata["parts"])
            for name, part in self.parts.items():
                if name in states:
                    part.continue_from(states[name])

    def _load_learned(self, tensors: Mapping[str, Tensor], where: str) -> None:
        load_modules(self.modules, tensors, where)
        if self.optimizer is not None:
            load_optimizer(self.optimizer, tensors)


def read_part(path: Path, part: str) -> dict[str, Any]:
    """Return the state of one part as `TrainState.save` wrote it, without reading weights and moments.

    Raises:
        ArtifactError: The file is damaged or has no such part.
    """
    tensors, metadata = load_tensors(path, f"parts/{part}/")
    with damage(path):
        if part not in metadata["parts"]:
            raise ArtifactError(
                f"{path} holds no state of '{part}' (it has: {', '.join(metadata['parts']) or 'none'})."
            )
        return part_states(tensors, metadata["parts"])[part]


def stack_metrics(records: list[Mapping[str, Tensor]]) -> Tensor:
    """Stack the metrics of R updates to (R, M) float32, in the order of their names in the first."""
    return torch.stack(
        [torch.stack([record[name].detach().float().reshape(()) for name in records[0]]) for record in records]
    )


# -- tensors in a file ------------------------------------------------------------------------------------------------


DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes, in the order of tensors in a file."""


SEAL = "sha256"
"""The tensor that seals a work file, and the metadata key that says so: a flip in one leaves the other."""


class DamagedFileError(ArtifactError):
    """A file is not as it was written, or not there."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Any) -> str:
    """Write tensors and JSON values `metadata` atomically and durably: an interrupted write leaves the old file.

    The bytes are those of `safetensors.torch.save`, which would copy all tensors to one place first.

    Returns:
        The file's sha256.
    """
    return write_durable(path, _safetensors(tensors, {"wm": canonical_json(metadata)}))


def save_work(
    path: Path, tensors: Mapping[str, Tensor], metadata: Any, at: str = "", *, before: Path | None = None
) -> None:
    """Write tensors and JSON values into a sealed file of unfinished work.

    Args:
        path: The file.
        tensors: None is called "sha256".
        metadata: The JSON values.
        at: Where the work stands, for messages.
        before: See `write_durable`.
    """
    about = {"wm": canonical_json(metadata), SEAL: at}
    write_durable(path, _safetensors(tensors, about, sealed=True), sealed=True, before=before)


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Any, at: str) -> None:
    """Write a checkpoint, and keep the one before it beside it, see `save_work`."""
    save_work(path, tensors, metadata, at, before=_before(path))


def find_checkpoint(path: Path) -> Path | None:
    """Return the file of the newest checkpoint: `path`, or the one before it where a crash left that alone."""
    return next((file for file in (path, _before(path)) if file.exists()), None)


def load_checkpoint(
    path: Path, parts: Callable[[Any], list[Path]] = lambda about: []
) -> tuple[dict[str, Tensor], Any, list[dict[str, Tensor]]]:
    """Load the newest checkpoint of `save_checkpoint`.

    Args:
        path: Its file.
        parts: From its JSON values to the other files that belong to it.

    Returns:
        Tensors, JSON values, and the tensors of each part.

    Raises:
        ArtifactError: A file is damaged or missing. The message says how to go on.
    """
    newest, before = find_checkpoint(path) or path, _before(path)
    try:
        return _load_whole(newest, parts)
    except DamagedFileError as error:
        if newest == before or not before.exists():
            raise ArtifactError(f"{error}; restart the stage with --fresh.") from None
        try:
            _load_whole(before, parts)
        except DamagedFileError:
            raise ArtifactError(
                f"{error}, and the checkpoint before it does not help; restart the stage with --fresh."
            ) from None
        raise ArtifactError(
            f"{error}; to go on from the checkpoint before it ({_position(before)}), remove {path} and run the same"
            " command again; or restart the stage with --fresh."
        ) from None


def _load_whole(
    path: Path, parts: Callable[[Any], list[Path]]
) -> tuple[dict[str, Tensor], Any, list[dict[str, Tensor]]]:
    tensors, about = load_work(path)
    return tensors, about, [load_work(part)[0] for part in parts(about)]


def _before(path: Path) -> Path:
    """Return the file of the checkpoint before the one in `path`."""
    return path.with_stem(f"{path.stem}-before")


def _position(path: Path) -> str:
    """Return where the work stood at a whole checkpoint."""
    with _opened(path) as file:
        return (file.metadata() or {}).get(SEAL) or "by an earlier version of wm"


def _safetensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, sealed: bool = False
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file: the length of the header, the header, and each tensor but the seal."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if sealed:
        header[SEAL] = {"dtype": "U8", "shape": [SEAL_BYTES], "data_offsets": [end, end + SEAL_BYTES]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        dense = tensors[name].detach().cpu().contiguous()
        yield dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def load_tensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Return the tensors whose names begin with `prefix`, on the CPU, and the values `metadata` of `save_tensors`.

    Every tensor is in memory of torch's own: those of the file begin anywhere, see `wmcli.transfer`.

    Raises:
        ArtifactError: The file is damaged.
        MachineError: It cannot be read.
    """
    try:
        return load_work(path, prefix)
    except DamagedFileError as error:
        raise ArtifactError(f"{error}; check the run with wm verify, or restart the stage with --fresh.") from None


def load_work(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Load a file as `load_tensors` does, and check its seal. Those of earlier versions of wm have none.

    Raises:
        DamagedFileError: It is damaged or missing. The message is no sentence yet: the caller knows how to go on.
        MachineError: It cannot be read.
    """
    try:
        with read_errors(path):
            _check_header(path)
        with _opened(path) as file:
            names = list(file.keys())
            if (SEAL in names or SEAL in (file.metadata() or {})) and not is_whole(path):
                raise ValueError("its content does not match its digest")
            metadata = json.loads((file.metadata() or {})["wm"])
            chosen = [name for name in names if name.startswith(prefix) and name != SEAL]
            return {_current_name(name): file.get_tensor(name).clone() for name in chosen}, metadata
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedFileError(f"{path} is damaged ({reason})") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Torch's error for one that it cannot map is the OSError behind it."""
    with read_errors(path):
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except RuntimeError as error:
            if (number := re.search(r"\((\d+)\)$", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def _check_header(path: Path) -> None:
    """Raise an error if the header of a file is larger than any that wm writes: the library takes memory for it."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")


RENAMED = (
    ("optimiser/", "optimizer/"),
    ("/quantiser.", "/quantizer."),
    ("/normaliser.", "/normalizer."),
    ("/evidence.", "/posterior_encoder."),
    ("/evidence_stem.", "/posterior_stem."),
)
"""Parts of tensor names in files of wm 0.1.0, and their current names."""


def _current_name(name: str) -> str:
    for before, now in RENAMED:
        name = name.replace(before, now)
    return name


MODEL = "model/"
"""Prefix of the names of weights."""


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of some modules as `model/<module>/<name>`."""
    return {
        f"{MODEL}{name}/{key}": value for name, module in modules.items() for key, value in module.state_dict().items()
    }


def load_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], where: str) -> None:
    """Load `model/...` tensors into modules.

    Raises:
        ArtifactError: Some are missing, unexpected or of another shape; the message names all of them.
    """
    for name, module in modules.items():
        prefix = f"{MODEL}{name}/"
        weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        expected = module.state_dict()
        missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
        shapes = [key for key in expected.keys() & weights.keys() if expected[key].shape != weights[key].shape]
        if missing or unexpected or shapes:
            raise ArtifactError(
                f"{where}: weights of the {name} do not fit its settings"
                f" (missing: {missing[:3]}, unexpected: {unexpected[:3]}, other shape: {sorted(shapes)[:3]})."
            )
        module.load_state_dict(weights)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return moments and step counts of every parameter as `optimizer/<index>/<name>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer/{index}/{name}": value if value.dim() else value.clone()  # parameters may share a count
        for index, moments in state.items()
        for name, value in moments.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore moments and step counts; learning rates and the like come from the settings.

    Raises:
        ArtifactError: The moments belong to another kind of optimizer.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, index, name = key.split("/")
            state.setdefault(int(index), {})[name] = value
    if state and _kind(next(iter(state.values()))) != _kind_of(optimizer):
        raise ArtifactError(
            f"these weights were trained with an optimizer whose moments do not suit {type(optimizer).__name__}: keep"
            " that optimizer, or train from scratch without --more."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(
        value.dim() == 0 or value.shape == parameters[index].shape
        for index, moments in state.items()
        for value in moments.values()
    ), "moments of other parameters"
    for number, moments in state.items():
        for name, value in moments.items():
            if value.dim():  # fused optimizers need one memory layout for both
                like: Tensor = parameters[number]
                moments[name] = torch.empty_like(like, dtype=value.dtype).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _kind(moments: Mapping[str, Tensor]) -> str:
    """Return the kind of optimizer that these moments of a parameter belong to."""
    marks = {LAPROP_MOMENT: "laprop", "momentum_buffer": "sgd"}
    return next((name for mark, name in marks.items() if mark in moments), "adam")


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    kinds = ((LaProp, "laprop"), (torch.optim.SGD, "sgd"))
    return next((name for kind, name in kinds if isinstance(optimizer, kind)), "adam")


def part_tensors(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Split the states of parts into NumPy arrays, as tensors, and plain JSON values."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for part, state in states.items():
        plain[part] = {}
        for key, value in state.items():
            assert "/" not in part + key
            if isinstance(value, np.ndarray):
                tensors[f"parts/{part}/{key}"] = torch.tensor(value)
            else:
                plain[part][key] = value
    return tensors, plain


def part_states(tensors: Mapping[str, Tensor], plain: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Join the halves that `part_tensors` returned."""
    states = {part: dict(state) for part, state in plain.items()}
    for name, tensor in tensors.items():
        if name.startswith("parts/"):
            _, part, key = name.split("/")
            states[part][key] = tensor.numpy()
    return states


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's global generators."""
    states = {"random/torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state that `random_tensors` returned."""
    torch.set_rng_state(tensors["random/torch"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return a NumPy generator's state as JSON values."""
    return dict(rng.bit_generator.state)


def load_generator(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Restore the state that `generator_state` returned."""
    rng.bit_generator.state = dict(state)
