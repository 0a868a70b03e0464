"""Encoding and decoding in parts, whose activations the backward pass computes again: the same loss and gradients."""

from __future__ import annotations

import pytest
import torch
from small_backbones import small
from test_latent import SIZE, A, D, segment
from torch import Tensor
from torch.testing import assert_close

from wmcli.assemble import build_tokenizer, build_world_model
from wmcli.errors import UsageError
from wmcli.nn.parts import in_parts
from wmcli.settings import resolve
from wmcli.spaces import Spaces
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

READS = {
    "drama": {},
    "s4wm": {"decoder_reads": "state", "heads_read": "state", "act_window": 0, "across_ends": False},
    "rssm": {"posterior": "recurrent", "decoder_reads": "state", "act_window": 0},
}


def learned(reads: dict, object_share: float, frames_at_once: int, autocast: bool) -> dict[str, Tensor]:
    """The loss, its metrics and all gradients of a small model with the same weights and samples in every call."""
    torch.manual_seed(0)
    settings = LatentWorldModelSettings(**{"sequence_length": 12, "context": 3, "act_window": 5, **reads})
    parts = CategoricalTokenizerSettings(
        categoricals=4, classes=5, channels=(6, 8), strides=(2, 2), kernel=4, norm="layer", object_share=object_share
    )
    further = LatentWorldModel.tokenizer_reads(settings, parts.stack.features(SIZE), D)
    tokenizer = CategoricalTokenizer(parts, SIZE, **further)
    model = LatentWorldModel(settings, small("gru", max_length=12, block=1, width=D), tokenizer, A)
    model.frames_at_once = frames_at_once
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, metrics = model.loss(segment())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **metrics, **gradients}


@pytest.mark.parametrize("object_share", [0.0, 0.4])
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("frames_at_once", [1, 4, 21, 100])  # of 21 frames
def test_loss_and_gradients_are_those_of_all_frames_at_once(reads, object_share, frames_at_once):
    whole, parted = (learned(reads, object_share, number, autocast=False) for number in (0, frames_at_once))
    assert sum(".grad" not in name and "tokenizer" in name for name in whole) > 10
    assert whole.keys() == parted.keys()
    for name, value in whole.items():
        assert_close(parted[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_under_autocast_parts_are_computed_again_in_the_same_precision():
    whole, parted = (learned(READS["s4wm"], 0.0, number, autocast=True) for number in (0, 8))
    assert whole["loss"] == parted["loss"]
    for name, value in whole.items():
        assert_close(parted[name], value, rtol=0.02, atol=0.02 * float(value.abs().max()))


def test_only_inputs_and_outputs_are_kept():
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.Tanh()] * 3)
    x, own, kept = torch.randn(10, 8), {id(each) for each in layers.parameters()}, []

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        in_parts(layers, 0, x)
        all_at_once = len(kept)
        kept.clear()
        in_parts(layers, 3, x)
    assert all_at_once >= 4 and kept
    assert all(each.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for each in kept)


def test_no_random_state_is_read(monkeypatch):
    """A recorded update has none on the host, and saving it waits for the device."""
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("the state of the generator was read"))
    x = torch.randn(4, 2, requires_grad=True)
    in_parts(torch.sin, 3, x).sum().backward()
    assert_close(x.grad, x.detach().cos())


def test_settings_that_cannot_be_in_parts_are_refused():
    for preset, message in {
        "drama": "would change the statistics of tokenizer.norm = 'batch'",
        "rem": "has no effect on dynamics of kind 'token'",
        "muzero": "dynamics of kind 'muzero'",
    }.items():
        with pytest.raises(UsageError, match=f"training.frames_at_once = 8.*{message}"):
            resolve(preset, ["training.frames_at_once=8"])


def test_the_setting_reaches_the_model():
    settings, spaces = resolve("s4wm-2d", ["training.frames_at_once=48"]), Spaces.of_images(40, 3)
    with torch.device("meta"):
        model = build_world_model(settings, build_tokenizer(settings, spaces), spaces)
    assert model.frames_at_once == 48
    assert settings.identity("dynamics").values == resolve("s4wm-2d").identity("dynamics").values
