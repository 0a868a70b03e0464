"""Observations of several parts as the inputs of one network: images apart from all that is numbers.

Axes: C channels, H W height and width, N numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wmcli.errors import UsageError
from wmcli.nn.actions import encode_action
from wmcli.nn.two_hot import symlog
from wmcli.spaces import Categories, Image, ObservationSpace, PartSpace, Vector, images_of, parts_of


def joint_image(space: ObservationSpace, kind: str) -> Image | None:
    """Return the image that has the channels of all images, or None without one.

    Args:
        space: What the environment shows.
        kind: Of the world model, to name.

    Raises:
        UsageError: The images differ in size.
    """
    images = images_of(space)
    sizes = {(image.height, image.width) for image in images.values()}
    if len(sizes) > 1:
        shown = ", ".join(f"{name} {image.height} x {image.width}" for name, image in images.items())
        raise UsageError(
            f"dynamics.kind = '{kind}' takes images of one size, and this environment shows {shown}:"
            " give them one size, or choose another kind, as in --set dynamics.kind=latent"
        )
    return Image(*sizes.pop(), sum(image.channels for image in images.values())) if sizes else None


def count_numbers(space: ObservationSpace) -> int:
    """Return the length of all parts but images as numbers, N."""
    return sum(part.encoded for part in parts_of(space).values() if not isinstance(part, Image))


def as_numbers(space: Vector | Categories, part: Tensor) -> Tensor:
    """Return a part that is no image as numbers (..., N) float32: symlog, or one-hot."""
    return encode_action(space, part, torch.float32) if isinstance(space, Categories) else symlog(part.float())


def as_input(space: PartSpace, part: Tensor) -> Tensor:
    """Return an image (..., H, W, C) as (..., C, H, W), and other parts as numbers (..., N)."""
    if isinstance(space, Image):
        assert part.dtype == torch.uint8 and part.shape[-3:] == space.shape, "images are uint8 with the channels last"
        return part.movedim(-1, -3)
    return as_numbers(space, part)


def split_parts(space: ObservationSpace, tree: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a tree has for the images, and for all other parts."""
    pairs = [(part, parts_of(tree)[name]) for name, part in parts_of(space).items()]
    images = [values for part, values in pairs if isinstance(part, Image)]
    return images, [values for part, values in pairs if not isinstance(part, Image)]
