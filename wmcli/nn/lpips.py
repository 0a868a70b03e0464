"""LPIPS: the perceptual distance of two images, from the features of a frozen VGG16.

At five depths the features of both images are scaled to length one over channels. Their squared difference is weighted
by channel, averaged over positions, and summed over the depths.

The weights are not part of this package. `wm convert-lpips` writes them to one safetensors file. It contains two sets,
under the names of their sources:

- VGG16 trained on ImageNet, convolutions only (torchvision's `vgg16`, without its `classifier.*`):
  `features.N.weight` (out, in, 3, 3) and `features.N.bias` (out,), N = 0 2 5 7 10 12 14 17 19 21 24 26 28.
- The five learned channel weightings of `vgg.pth` (md5 `WEIGHTINGS_MD5`):
  `linN.model.1.weight` (1, C, 1, 1), N = 0 1 2 3 4, C = 64 128 256 512 512.

Axes: B batch, C channels, H height, W width.

Source: Zhang et al. 2018, CVPR, arXiv 1801.03924, in the form of the tokenizers of IRIS and REM (the LPIPS of
CompVis/taming-transformers, weights `vgg.pth`).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.dropout import torch_dropout

# One row per depth: the convolutions up to the compared features, as (index in torchvision's vgg16, in, out). Rows are
# separated by a 2x2 max pooling.
STAGES = (
    ((0, 3, 64), (2, 64, 64)),
    ((5, 64, 128), (7, 128, 128)),
    ((10, 128, 256), (12, 256, 256), (14, 256, 256)),
    ((17, 256, 512), (19, 512, 512), (21, 512, 512)),
    ((24, 512, 512), (26, 512, 512), (28, 512, 512)),
)
SMALLEST_IMAGE = 16  # pixels; four poolings must leave at least one
SHIFT = (-0.030, -0.088, -0.188)  # per color channel, for images in [-1, 1]
SCALE = (0.458, 0.448, 0.450)

WEIGHTINGS_MD5 = "d507d7349b931f0638a25a48a722f98a"

WEIGHTS_NEEDED = (
    "a safetensors file with VGG16's convolutions and LPIPS's channel weightings (make one with: wm convert-lpips)"
)


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of the weights file, 14,716,160 numbers in all."""
    shapes: dict[str, tuple[int, ...]] = {}
    for depth, convolutions in enumerate(STAGES):
        for index, inputs, outputs in convolutions:
            shapes[f"features.{index}.weight"] = (outputs, inputs, 3, 3)
            shapes[f"features.{index}.bias"] = (outputs,)
        shapes[f"lin{depth}.model.1.weight"] = (1, convolutions[-1][2], 1, 1)
    return shapes


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in `path` as float32.

    Raises:
        UsageError: The file is absent or unreadable, or its names or shapes are wrong.
    """
    hint = "or train without the perceptual loss: --set tokenizer.perceptual=none"
    if not path.is_file():
        raise UsageError(f"tokenizer.lpips_weights: no file at {path}; give {WEIGHTS_NEEDED}, {hint}")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"tokenizer.lpips_weights: {path} is no readable safetensors file ({error}); {hint}") from None
    shapes = weight_shapes()
    problems = [f"missing {name}" for name in shapes if name not in weights]
    problems += [f"unexpected {name}" for name in weights if name not in shapes]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise UsageError(f"tokenizer.lpips_weights: {path} does not fit: {', '.join(problems)}; {hint}")
    return {name: tensor.float() for name, tensor in weights.items()}


class LPIPS(nn.Module):
    """Perceptual distance with frozen weights.

    The weights move with the module but are neither parameters nor part of its state_dict, because they come from the
    user's file.

    `dropout` drops half of the channel differences in training mode. The published trainers of IRIS and REM do so by
    accident, because their whole model is in training mode. The expectation is the same, the loss noisier.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, weights: dict[str, Tensor], *, dropout: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        for name, tensor in weights.items():
            self.register_buffer(_buffer_name(name), tensor, persistent=False)
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)

    def features(self, image: Tensor) -> list[Tensor]:
        """Return float32 features of images (B, 3, H, W) in [-1, 1] at five depths, of length one over channels."""
        x = (image.float() - self.shift) / self.scale
        features = []
        for depth, convolutions in enumerate(STAGES):
            if depth > 0:
                x = F.max_pool2d(x, 2)
            for index, _, _ in convolutions:
                weight = self.get_buffer(_buffer_name(f"features.{index}.weight"))
                bias = self.get_buffer(_buffer_name(f"features.{index}.bias"))
                x = F.relu(F.conv2d(x, weight, bias, padding=1))
            tall = x.float()  # float32 here even under bf16 autocast: the length is a small sum of squares
            features.append(tall / (tall.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return features

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """Return the distances (B,) of two images (B, 3, H, W) in [-1, 1]. Gradients flow into `image` only."""
        with torch.no_grad():
            references = self.features(target)
        total = torch.zeros(image.shape[0], device=image.device)
        for depth, (features, reference) in enumerate(zip(self.features(image), references, strict=True)):
            difference = torch_dropout((features - reference).square(), 0.5, self.dropout and self.training)
            weighting = self.get_buffer(_buffer_name(f"lin{depth}.model.1.weight"))
            total = total + (difference * weighting).sum(1).mean((1, 2))  # channels, then positions
        return total


def _buffer_name(name: str) -> str:
    return name.replace(".", "_")  # torch allows no dots in buffer names
