"""Parts of observations as the inputs of one network."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from wmcli.errors import UsageError
from wmcli.nn.observations import as_input, count_numbers, joint_image, split_parts
from wmcli.spaces import Categories, Image, Vector

PARTS = {"a": Vector(3), "b": Image(6, 8, 3), "c": Categories((2, 3)), "d": Image(6, 8, 1)}


def test_images_join_their_channels_and_the_rest_its_numbers() -> None:
    assert joint_image(PARTS, "muzero") == Image(6, 8, 4) and count_numbers(PARTS) == 3 + 5
    assert joint_image(Image(6, 8, 2), "muzero") == Image(6, 8, 2) and count_numbers(Image(6, 8)) == 0
    assert joint_image(Vector(4), "muzero") is None and count_numbers(Vector(4)) == 4
    images, numbers = split_parts(PARTS, {"d": 4, "c": 3, "b": 2, "a": 1})
    assert images == [2, 4] and numbers == [1, 3], "in the order of the space"
    assert split_parts(Image(6, 8), 7) == ([7], []) and split_parts(Vector(2), 7) == ([], [7])


def test_images_of_two_sizes_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"'unizero' takes images of one size, .* shows far 6 x 8, near 6 x 6: give"):
        joint_image({"far": Image(6, 8), "near": Image(6, 6)}, "unizero")


def test_inputs() -> None:
    image = torch.arange(2 * 4 * 3, dtype=torch.uint8).view(1, 2, 4, 3)
    assert torch.equal(as_input(Image(2, 4), image)[0, 1], image[0, :, :, 1])
    with pytest.raises(AssertionError, match="uint8 with the channels last"):
        as_input(Image(2, 4), image.float())
    vector = torch.tensor([[0.0, 1.0, -9.0]])
    assert_close(
        as_input(Vector(3), vector), torch.tensor([[0.0, 2.0, -10.0]]).abs().clamp(min=1).log() * vector.sign()
    )
    one_hot = as_input(Categories((2, 3)), torch.tensor([[1, 0]]))
    assert one_hot.tolist() == [[0, 1, 1, 0, 0]] and one_hot.dtype == torch.float32
