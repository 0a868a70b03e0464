"""The median frame, found bit by bit, is the one that sorting gives."""

from __future__ import annotations

import pytest
import torch

from wmcli.tokenizers.measures import median


@pytest.mark.parametrize("frames", [1, 2, 3, 8, 65, 300])
@pytest.mark.parametrize("values", [(0, 256), (0, 2), (254, 256), (127, 129)])
def test_the_median_is_the_lower_middle_value(frames: int, values: tuple[int, int]) -> None:
    torch.manual_seed(frames)
    observation = torch.randint(*values, (frames, 4, 5, 3), dtype=torch.uint8)
    found = median(observation)
    assert found.dtype == torch.uint8
    assert torch.equal(found, observation.sort(0).values[(frames - 1) // 2])


def test_the_median_of_frames_that_are_all_alike() -> None:
    for value in (0, 1, 128, 255):
        assert median(torch.full((7, 2), value, dtype=torch.uint8)).tolist() == [value, value]
