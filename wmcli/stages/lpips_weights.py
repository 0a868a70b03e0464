"""`wm convert-lpips`: the weights of the perceptual loss, from the two files that their authors publish."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from wmcli.errors import UsageError
from wmcli.nn.lpips import WEIGHTINGS_MD5, weight_shapes
from wmcli.progress import Progress, some
from wmcli.report.files import write_whole

VGG16_SHA256 = "397923af"  # how it begins; torchvision writes it into the file's name
NAMED = 3  # problems that a message lists


def convert_lpips(vgg16: Path, weightings: Path, out: Path, progress: Progress) -> Path:
    """Write the file for `tokenizer.lpips_weights` and return `out`.

    Files other than the published ones are converted if they fit, with a warning.

    Args:
        vgg16: State dict of torchvision's `vgg16` as torch.save wrote it; `classifier.*` is left out.
        weightings: The channel weightings of LPIPS 0.1 for VGG16, `vgg.pth`.
        out: The safetensors file to write. An existing one is replaced.
        progress: Takes the warnings.

    Raises:
        UsageError: A file is absent, unreadable or does not fit, or `out` cannot be written.
    """
    shapes = weight_shapes()
    tensors: dict[str, Tensor] = {}
    for path, model, prefix in ((vgg16, "torchvision's vgg16", "features."), (weightings, "LPIPS for VGG16", "lin")):
        expected = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
        tensors |= _fitting(_state_dict(path), expected, path, model)
    _warn_unless_published(vgg16, "sha256", VGG16_SHA256, progress)
    _warn_unless_published(weightings, "md5", WEIGHTINGS_MD5, progress)
    write_whole(out, lambda draft: save_file(tensors, draft))
    return out


def _state_dict(path: Path) -> Mapping[str, Any]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    with file, suppress(OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError):
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        if isinstance(tensors, Mapping):
            return tensors
    raise UsageError(f"{path}: holds no tensors by name as torch.save writes them.")


def _fitting(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path, model: str
) -> dict[str, Tensor]:
    """Return the tensors of these names and shapes as float32."""
    problems = []
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if not isinstance(tensor, Tensor):
            problems.append(f"{name} is missing")
        elif tensor.shape != shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        elif not tensor.isfinite().all():
            problems.append(f"{name} is not finite")
    if problems:
        raise UsageError(f"{path}: does not hold the weights of {model}: {some(problems, NAMED)}.")
    return {name: tensors[name].float().contiguous() for name in shapes}


def _warn_unless_published(path: Path, algorithm: str, published: str, progress: Progress) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).hexdigest()
    if not digest.startswith(published):
        progress.warn(
            f"{path}: fits, but is not the published file: its {algorithm} is {digest[: len(published)]}, not"
            f" {published}; a tokenizer trained with it is not comparable with published ones."
        )
