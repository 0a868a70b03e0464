"""LPIPS with made-up weights: what it computes, what it stores, what it says of a weights file that does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from wmcli.errors import UsageError
from wmcli.nn.lpips import LPIPS, read_weights, weight_shapes


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in weight_shapes().items():
        spread = math.sqrt(2 / math.prod(shape[1:])) if len(shape) == 4 else 0.01
        made[name] = torch.randn(shape, generator=generator) * spread
    return {name: tensor.abs() if name.startswith("lin") else tensor for name, tensor in made.items()}


def by_hand(weights: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
    """The definition, written out for one pair: (3, H, W) twice."""
    pair = torch.stack([image, target])
    x = (pair - torch.tensor([-0.030, -0.088, -0.188])[:, None, None]) / torch.tensor([0.458, 0.448, 0.450])[
        :, None, None
    ]
    plan = [0, 2, "depth", 5, 7, "depth", 10, 12, 14, "depth", 17, 19, 21, "depth", 24, 26, 28, "depth"]
    total, depth = torch.zeros(()), 0
    for entry in plan:
        if entry != "depth":
            x = F.conv2d(x, weights[f"features.{entry}.weight"], weights[f"features.{entry}.bias"], padding=1).relu()
            continue
        first, second = (feature / (feature.norm(dim=0, keepdim=True) + 1e-10) for feature in x)
        weighting = weights[f"lin{depth}.model.1.weight"][0]
        total = total + ((first - second) ** 2 * weighting).sum(0).mean()
        depth += 1
        x = F.max_pool2d(x, 2) if depth < 5 else x
    return total


def test_count_is_the_published_one() -> None:
    assert sum(math.prod(shape) for shape in weight_shapes().values()) == 14_716_160


def test_distance_is_the_definition(weights: dict[str, Tensor]) -> None:
    torch.manual_seed(1)
    image, target = torch.rand(2, 3, 16, 32) * 2 - 1, torch.rand(2, 3, 16, 32) * 2 - 1
    got = LPIPS(weights)(image, target)
    assert got.shape == (2,)
    torch.testing.assert_close(got, torch.stack([by_hand(weights, *pair) for pair in zip(image, target, strict=True)]))
    assert LPIPS(weights)(image, image).abs().max() == 0


def test_weights_are_frozen_and_not_stored(weights: dict[str, Tensor]) -> None:
    net = LPIPS(weights)
    assert not list(net.parameters())
    assert not net.state_dict()
    image = torch.zeros(1, 3, 16, 16, requires_grad=True)
    target = torch.ones(1, 3, 16, 16, requires_grad=True)
    net(image, target).sum().backward()
    assert image.grad is not None and image.grad.abs().sum() > 0
    assert target.grad is None


def test_dropout_acts_in_training_only_and_only_when_set(weights: dict[str, Tensor]) -> None:
    torch.manual_seed(2)
    image, target = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)
    noisy, calm = LPIPS(weights, dropout=True), LPIPS(weights)
    assert noisy(image, target) != noisy(image, target)
    assert noisy.eval()(image, target) == calm.train()(image, target) == calm.eval()(image, target)


def test_file_round_trip(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    read = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items()) and len(read) == len(weights)


def test_a_file_that_does_not_fit_is_described_at_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = {
        name: torch.zeros(1) for name in weight_shapes() if name not in ("features.7.bias", "lin3.model.1.weight")
    }
    tensors["classifier.0.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(UsageError) as error:
        read_weights(tmp_path / "w.safetensors")
    message = str(error.value)
    for part in (
        "missing features.7.bias",
        "missing lin3.model.1.weight",
        "unexpected classifier.0.weight",
        "features.0.weight has shape (1,), not (64, 3, 3, 3)",
        "--set tokenizer.perceptual=none",
    ):
        assert part in message
    assert "\n" not in message


def test_no_file_and_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file at .*absent.*VGG16.*channel weightings"):
        read_weights(tmp_path / "absent")
    (tmp_path / "text").write_text("not weights")
    with pytest.raises(UsageError, match="no readable safetensors file"):
        read_weights(tmp_path / "text")
