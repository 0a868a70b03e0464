"""The median frame, found bit by bit, is the one that sorting gives; object pixels get their share of the weight."""

from __future__ import annotations

import pytest
import torch

from wmcli.tokenizers.measures import median, object_weights, objects


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


def board(frames: int, side: int = 6) -> torch.Tensor:
    """Dark frames, with a bright pixel at another place in each but the last."""
    observation = torch.full((frames, side, side, 3), 20, dtype=torch.uint8)
    for frame in range(frames - 1):
        observation[frame, frame // side, frame % side] = 200
    return observation


def test_object_pixels_get_their_share_of_the_weight() -> None:
    observation = torch.cat([board(8), board(8).flip(1)])
    observation[:8, 2:4, 2:4] += 100
    is_object, weights = objects(observation), object_weights(observation, 0.3)
    assert 16 < int(is_object.sum()) < 100
    assert weights.mean().item() == pytest.approx(1)
    assert weights[~is_object].unique().tolist() == pytest.approx([0.7])
    assert (weights - 0.7).sum().item() == pytest.approx(0.3 * weights.numel(), rel=1e-4)


def test_a_lone_object_pixel_weighs_no_more_than_a_frame() -> None:
    observation = board(8)
    observation[1:] = observation[-1]
    weights = object_weights(observation, 0.25)
    assert weights[0, 0, 0].item() == pytest.approx(0.75 + 0.25 * 36)
    assert object_weights(board(8)[-1:].expand(8, -1, -1, -1), 0.25).unique().tolist() == [0.75]
