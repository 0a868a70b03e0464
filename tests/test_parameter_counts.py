"""Exact numbers of parameters, by layer arithmetic from the papers' tables: a layer too wide or a bias too few shows.

The public code of REM (leor-c/REM) keeps parameters that are never used; ours does not, see
`test_the_public_layout_of_rem_adds_parameters`. A actions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from wmcli.assemble import build_tokenizer, build_world_model, count, parameter_counts
from wmcli.backbones import BACKBONES
from wmcli.cli.presets import count_parameters
from wmcli.config import preset_names
from wmcli.settings import resolve
from wmcli.spaces import Spaces

ROOT = Path(__file__).parent.parent
ACTIONS = [3, 4, 18]


def text_of(preset: str) -> str:
    """A preset file, with the lines of its comments joined."""
    text = (ROOT / "presets" / f"{preset}.toml").read_text(encoding="utf-8")
    return " ".join(re.sub(r"^# ?", "", text, flags=re.MULTILINE).split())


def counts(preset: str, actions: int = 4, *overrides: str) -> dict[str, int]:
    settings = resolve(preset, overrides)
    return parameter_counts(settings, Spaces.of_images(settings.environment.size, actions))


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def conv(inputs: int, outputs: int, kernel: int = 3) -> int:
    return inputs * outputs * kernel**2 + outputs


def lstm(inputs: int, width: int) -> int:
    return 4 * width * (inputs + width) + 8 * width


# -- REM --------------------------------------------------------------------------------------------------------------


def test_rem_tokenizer() -> None:
    found = counts("rem")
    assert found["tokenizer"] == 3_189_667
    assert found["tokenizer.encoder"] == 1_754_048
    assert found["tokenizer.decoder"] == 1_172_963
    assert found["tokenizer.pre_quant"] + found["tokenizer.post_quant"] == 131_584 == 2 * conv(256, 256, 1)
    assert found["tokenizer.quantizer"] == 131_072 == 512 * 256


def test_rem_tokenizer_of_4x4() -> None:
    found = counts("rem-4x4")
    assert found["tokenizer"] == 7_339_043
    assert found["tokenizer.encoder"] == 5_884_864
    assert found["tokenizer.decoder"] == 1_191_523
    same = ("tokenizer.pre_quant", "tokenizer.post_quant", "tokenizer.quantizer")
    assert {part: found[part] for part in same} == {part: counts("rem")[part] for part in same}


@pytest.mark.parametrize("actions", ACTIONS)
def test_rem_dynamics(actions: int) -> None:
    found = counts("rem", actions)
    assert found["dynamics"] == 4_624_389 + 256 * actions
    assert found["dynamics.backbone"] == 5 * 855_552 == 4_277_760
    assert found["dynamics.queries"] == 64 * 256
    assert found["dynamics.action_embedding"] == actions * 256
    assert found["dynamics.observation_head"] == 197_376 == linear(256, 256) + linear(256, 512)
    assert found["dynamics.reward_head"] == 66_563 == linear(256, 256) + linear(256, 3)
    assert found["dynamics.termination_head"] == 66_306 == linear(256, 256) + linear(256, 2)
    heads = ("dynamics.observation_head", "dynamics.reward_head", "dynamics.termination_head")
    assert sum(found[head] for head in heads) == 330_245


@pytest.mark.parametrize("actions", ACTIONS)
def test_the_public_layout_of_rem_adds_parameters(actions: int) -> None:
    """leor-c/REM has an embedding table of 513 + A rows although observation tokens enter as the tokenizer's vectors:
    512 rows for them and one for padding, none of them ever used. And a 65th query, whose answer is thrown away."""
    unused = 513 * 256 + 1 * 256
    assert counts("rem", actions)["dynamics"] + unused == 4_755_973 + 256 * actions


def test_a_layer_of_rems_retnet() -> None:
    with torch.device("meta"):
        settings, spaces = resolve("rem"), Spaces.of_images(64, 4)
        backbone = build_world_model(settings, build_tokenizer(settings, spaces), spaces).backbone
    layer = backbone.layers[0]
    parts = {name: count(child) for name, child in layer.named_children()}
    norms = sum(count(module) for module in layer.modules() if isinstance(module, torch.nn.LayerNorm))
    projections = 5 * linear(256, 256)
    feed_forward = linear(256, 1024) + linear(1024, 256)
    assert (projections, norms, feed_forward) == (328_960, 1_024, 525_568)
    assert sum(parts.values()) == count(layer) == 855_552 == projections + norms + feed_forward


@pytest.mark.parametrize("actions", ACTIONS)
def test_rem_controller(actions: int) -> None:
    found = counts("rem", actions)
    assert found["controller"] == 4_568_257 + 1_025 * actions
    assert found["controller.encoder"] == 2_466_496 == conv(256, 128) + conv(128, 64) + linear(64 * 8 * 8, 512)
    assert found["controller.lstm"] == 2_101_248 == lstm(512, 512)
    assert found["controller.policy_head"] + found["controller.value_head"] == 513 * (actions + 1)
    assert found["controller.action_embedding"] == 512 * actions


def test_rem_controller_on_4x4_tokens() -> None:
    assert counts("rem-4x4", 4)["controller"] == 2_999_493


def test_ablations_change_parameter_counts() -> None:
    rem = counts("rem")
    assert rem["dynamics"] - counts("rem-no-pop")["dynamics"] == 64 * 256  # no queries
    assert "dynamics.queries" not in counts("rem-no-pop")
    separate = counts("rem-separate-embeddings")
    assert separate["dynamics"] - rem["dynamics"] == separate["dynamics.token_embedding"] == 512 * 256
    assert rem["controller"] - counts("rem-no-action-inputs")["controller"] == 512 * 4  # no table of actions
    assert counts("rem-pixel-controller")["controller"] == counts("iris")["controller"]
    for name in ("rem-no-pop", "rem-separate-embeddings", "rem-pixel-controller", "rem-no-action-inputs"):
        assert counts(name)["tokenizer"] == rem["tokenizer"]


@pytest.mark.parametrize("name", ["rem", "iris", "drama"])
def test_the_choices_of_public_code_change_no_sizes(name: str) -> None:
    assert counts(f"{name}-code") == counts(name)


# -- IRIS -------------------------------------------------------------------------------------------------------------


def test_iris_tokenizer() -> None:
    found = counts("iris")
    assert found["tokenizer"] == 4_027_523
    assert found["tokenizer.encoder"] == 1_418_240
    assert found["tokenizer.decoder"] == 1_821_827
    assert found["tokenizer.pre_quant"] + found["tokenizer.post_quant"] == 525_312
    assert found["tokenizer.quantizer"] == 262_144 == 512 * 512


@pytest.mark.parametrize("actions", ACTIONS)
def test_iris_dynamics(actions: int) -> None:
    found = counts("iris", actions)
    assert found["dynamics"] == 8_446_469 + 256 * actions
    assert found["dynamics.backbone"] == 10 * 789_760 + 512 + 87_040  # layers, last norm, 340 positions
    assert found["dynamics.token_embedding"] + found["dynamics.action_embedding"] == (512 + actions) * 256
    heads = ("dynamics.observation_head", "dynamics.reward_head", "dynamics.termination_head")
    assert sum(found[head] for head in heads) == 330_245
    assert "dynamics.queries" not in found


@pytest.mark.parametrize("actions", ACTIONS)
def test_iris_controller(actions: int) -> None:
    found = counts("iris", actions)
    assert found["controller"] == 3_215_905 + 513 * actions
    assert found["controller.encoder"] == 65_568 == conv(3, 32) + conv(32, 32) + conv(32, 64) + conv(64, 64)
    assert found["controller.lstm"] == 3_149_824 == lstm(1024, 512)
    assert found["controller.policy_head"] + found["controller.value_head"] == 513 * (actions + 1)
    assert "controller.action_embedding" not in found


# -- Drama ------------------------------------------------------------------------------------------------------------

# The whole world model at 6 actions, tokenizer included, by what differs from Drama XS.
DRAMA = {
    "XS": ("drama", [], 7_155_459),
    "S": ("drama-s", [], 10_672_803),
    "heads of 128": ("drama", ["backbone.head_width=128"], 7_147_219),
    "four heads of 128": ("drama", ["backbone.head_width=128", "backbone.expand=1"], 5_564_091),
    "Mamba-1": ("drama-mamba1", [], 7_337_315),
    "S with Mamba-1": ("drama-s", ["backbone.kind=mamba1", "backbone.state_size=32"], 10_919_875),
    "STORM's transformer": (
        "storm",
        [
            "tokenizer.channels=[16, 32, 48, 64, 64]",
            "tokenizer.strides=[1, 2, 2, 2, 2]",
            "tokenizer.kernel=5",
            "tokenizer.bias=true",
            "dynamics.head_layers=1",
            "dynamics.head_width=256",
            "dynamics.head_norm=rms",
            "dynamics.sequence_length=128",
        ],
        8_477_539,
    ),
}


@pytest.mark.parametrize("which", DRAMA)
def test_drama_world_models(which: str) -> None:
    preset, overrides, total = DRAMA[which]
    assert counts(preset, 6, *overrides)["dynamics"] == total


@pytest.mark.parametrize("actions", ACTIONS)
def test_drama_by_its_parts(actions: int) -> None:
    found = counts("drama", actions)
    assert found["tokenizer.encoder"] == 232_272
    assert found["tokenizer.posterior_head"] == 1_049_600
    assert found["tokenizer.decoder"] == 1_281_811
    assert found["dynamics.tokenizer"] == found["tokenizer"] == 2_563_683
    assert found["dynamics.stem"] == 528_384 + 512 * (actions - 6)
    assert found["dynamics.backbone"] == 2 * 1_604_304 + 512
    assert found["dynamics.prior_head"] == 525_312
    assert found["dynamics.reward_head"] == 197_119
    assert found["dynamics.termination_head"] == 131_841


@pytest.mark.parametrize(("layers", "actor", "critic"), [(3, 527_366, 1_444_607), (2, 461_318, 1_181_439)])
def test_drama_actor_and_critic(layers: int, actor: int, critic: int) -> None:
    found = counts("drama", 6, f"controller.actor_layers={layers}", f"controller.critic_layers={layers}")
    assert (found["controller.actor"], found["controller.critic"]) == (actor, critic)
    whole = counts("drama", 6)["dynamics"] + actor + 2 * critic  # with the slow critic
    assert whole == {3: 10_572_039, 2: 9_979_655}[layers]


def test_storm() -> None:
    """As in its public code, at 6 actions; the slow critic is a copy."""
    found = counts("storm", 6)
    assert found["dynamics"] == 16_507_011
    assert found["dynamics.reward_head"] == 2 * (512 * 512 + 2 * 512) + 513 * 255  # no bias before a LayerNorm
    assert found["controller.actor"] + found["controller.critic"] == 2_235_141


# -- S4WM -------------------------------------------------------------------------------------------------------------


def dreamer_convolutions(channels: list[int]) -> int:
    """Kernels of 4 x 4 without bias, each with a norm, from 3 colors."""
    pairs = zip([3, *channels], channels, strict=False)
    return sum(16 * inputs * outputs + 2 * outputs for inputs, outputs in pairs)


def dreamer_head(inputs: int, width: int, outputs: int = 1024) -> int:
    """One hidden layer with a norm in the place of its bias."""
    return inputs * width + 2 * width + linear(width, outputs)


def s4_block(width: int, state: int = 64, ffn: int = 4) -> int:
    """Two S4 layers with a norm and a gated mixture each, and an MLP with a norm."""
    shared = 6 * state // 2  # Lambda, P and B of one system, complex
    layer = 2 * width + shared + width * (1 + state + 1) + linear(width, 2 * width)
    return 2 * layer + (2 * width + linear(width, ffn * width) + linear(ffn * width, width) if ffn else 0)


@pytest.mark.parametrize(
    ("preset", "channels", "side", "units", "width", "layers", "actions", "millions"),
    [
        ("s4wm-3d", [48, 96, 192, 384], 4, 1000, 512, 8, 6, 47.6),
        ("s4wm-2d", [32, 64, 128], 5, 512, 256, 4, 3, 10.8),
    ],
)
def test_s4wm(preset, channels, side, units, width, layers, actions, millions) -> None:
    """As many as the sheet of the paper's models counts, the reward head of the 2D tasks aside."""
    found = counts(preset, actions)
    convolutions, flat = dreamer_convolutions(channels), channels[-1] * side**2
    decoder = (1024 + width) * flat + 2 * channels[-1]  # no bias, then norms of what comes in and of all but the last
    decoder += convolutions - 2 * channels[-1] + 3
    assert found["dynamics.tokenizer"] == convolutions + dreamer_head(flat, units) + decoder
    assert found["dynamics.stem"] == (1024 + actions) * width + 2 * width
    assert found["dynamics.backbone"] == layers * s4_block(width) + 2 * width
    assert found["dynamics.prior_head"] == dreamer_head(width, units)
    assert round((found["dynamics"] - found.get("dynamics.reward_head", 0)) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("preset", "actions", "total"),
    [("tssm-xl-3d", 6, 49_088_739), ("tssm-xl-2d", 3, 10_932_867), ("rssm-tbtt-2d", 3, 10_564_995)],
)
def test_the_baselines_of_s4wm_are_as_large(preset: str, actions: int, total: int) -> None:
    found = counts(preset, actions)
    assert found["dynamics"] - found.get("dynamics.reward_head", 0) == total
    ours = counts("s4wm" + preset[-3:], actions)
    assert 0.9 < total / (ours["dynamics"] - ours.get("dynamics.reward_head", 0)) < 1.1


def test_the_recurrence_of_the_3d_baseline() -> None:
    """54.0 million in all; the sheet has 54.1."""
    found = counts("rssm-tbtt-3d", 6)
    assert found["dynamics.backbone"] == 3 * 2048 * (1000 + 2048) + 2 * 3 * 2048
    assert found["dynamics"] == 54_043_683


def test_the_variants_of_s4wm() -> None:
    plain, full, bare = counts("s4wm-3d", 6), counts("s4wm-full-posterior", 6), counts("s4wm-no-mlp", 6)
    assert full["dynamics.posterior_encoder"] == full["dynamics.backbone"] == plain["dynamics.backbone"]
    assert full["dynamics.posterior_stem"] == (6144 + 6) * 512 + 2 * 512
    assert bare["dynamics.backbone"] == 8 * s4_block(512, ffn=0) + 2 * 512


# -- UniZero ----------------------------------------------------------------------------------------------------------

POSITIONS = 20 * 768  # which the paper's table does not count into the transformer
UNIZERO_TOTALS = [  # by the actions of Freeway, Breakout, Pong and Alien
    (3, 20_766_701),
    (4, 20_768_238),
    (6, 20_771_312),
    (18, 20_789_756),
]


def conv_and_norm(inputs: int, outputs: int, kernel: int = 3) -> int:
    """Without a bias, and two for each channel."""
    return inputs * outputs * kernel**2 + 2 * outputs


def residual_block(channels: int) -> int:
    return 2 * conv_and_norm(channels, channels)


def trunk(inputs: int) -> int:
    """The convolutions of either planner: 64 x 64 pixels to 64 channels of 8 x 8."""
    halved = conv_and_norm(32, 64) + conv_and_norm(64, 64) + 32 * 64 * 9  # the skip has no norm
    return conv_and_norm(inputs, 32) + residual_block(32) + halved + 3 * residual_block(64)


def learning(found: dict[str, int]) -> int:
    """Of the dynamics model: the target, a copy that follows, is no part of the paper's numbers."""
    assert found["dynamics.trained"] == found["dynamics"] - found["dynamics.target"]
    return found["dynamics.trained"]


@pytest.mark.parametrize(("actions", "total"), UNIZERO_TOTALS)
def test_unizero(actions: int, total: int) -> None:
    found = counts("unizero", actions)
    assert learning(found) == 20_762_090 + 1_537 * actions == total
    assert found["controller"] == 0


@pytest.mark.parametrize("backbone", BACKBONES)
def test_unizero_can_be_sized_on_every_backbone(backbone: str) -> None:
    """Without allocating anything, as a new run is."""
    found = counts("unizero-quick", 3, f"backbone.kind={backbone}")
    settings = resolve("unizero-quick", [f"backbone.kind={backbone}"])
    learned = build_world_model(settings, None, Spaces.of_images(settings.environment.size, 3))
    assert found["dynamics"] == count(learned) and found["dynamics.backbone"] > 0


def test_unizero_by_its_parts() -> None:
    found = counts("unizero", 6)
    assert found["dynamics.encoder"] == 3_461_152 == trunk(3) + 64 * 8 * 8 * 768
    layer = 4 * linear(768, 768) + linear(768, 3072) + linear(3072, 768) + 2 * 2 * 768
    assert layer == 7_087_872
    assert found["dynamics.backbone"] - POSITIONS == 14_177_280 == 2 * layer + 2 * 768
    assert found["dynamics.action_embedding"] == 6 * 768
    hidden = linear(768, 768)
    assert found["dynamics.latent_head"] == 2 * hidden
    assert found["dynamics.reward_head"] == found["dynamics.value_head"] == hidden + linear(768, 101)
    assert found["dynamics.policy_head"] == hidden + linear(768, 6)
    copied = ("encoder", "action_embedding", "backbone", "value_head")
    assert found["dynamics.target"] == sum(found[f"dynamics.{part}"] for part in copied)


@pytest.mark.parametrize(
    ("preset", "overrides", "more"),
    [
        ("unizero-span", [], 16),  # 8 heads of 2 layers, a span each
        ("unizero-gaussian", [], 32),
        ("unizero-combined", [], 48),
        ("unizero-gaussian", ["backbone.prior.unit=step", "backbone.prior.mean=3"], 32),
        ("unizero", ["backbone.prior.kind=local"], 0),
        ("unizero-reference", [], 32),
    ],
)
def test_attention_priors_add_parameters(preset: str, overrides: list[str], more: int) -> None:
    plain, found = counts("unizero", 6), counts(preset, 6, *overrides)
    assert learning(found) - learning(plain) == found["dynamics.backbone"] - plain["dynamics.backbone"] == more


# -- MuZero -----------------------------------------------------------------------------------------------------------


def muzero_head(outputs: int) -> int:
    """A 1 x 1 convolution to 16 channels and a hidden layer of 32, each with norms for a bias, and what comes out."""
    return conv_and_norm(64, 16, 1) + (16 * 8 * 8 * 32 + 2 * 32) + linear(32, outputs)


@pytest.mark.parametrize("actions", ACTIONS)
def test_muzero(actions: int) -> None:
    found = counts("muzero", actions)
    projection = (64 * 8 * 8 * 1024 + 2 * 1024) + 2 * (1024**2 + 2 * 1024)
    predictor = (1024 * 512 + 2 * 512) + linear(512, 1024)
    want = {
        "representation": trunk(4),  # gray frames
        "dynamics": conv_and_norm(64 + actions, 64) + residual_block(64),
        "prediction": residual_block(64),
        "reward_head": muzero_head(601),
        "policy_head": muzero_head(actions),
        "value_head": muzero_head(601),
        "projection": projection,
        "predictor": predictor,
        "target": trunk(4) + residual_block(64) + muzero_head(601),
    }
    parts = {name.removeprefix("dynamics."): n for name, n in found.items() if name.startswith("dynamics.")}
    assert parts == want | {"trained": learning(found)}
    assert learning(found) == 7_990_226 + 609 * actions
    assert found["controller"] == 0


# -- what texts say ---------------------------------------------------------------------------------------------------

SAID = re.compile(r"([\d.]+) (?:M|million) parameters")
OF_PRESET = re.compile(r"`([\w-]+)` has ([\d.]+) M parameters")
IN_ALL = re.compile(r"`([\w-]+)` has [\d.]+ M parameters, ([\d.]+) M with its controller")
OTHERWISE = {("drama-paper", "5.6"): ["backbone.expand=1"]}
"""Numbers of a preset with other settings, which the text names."""


def in_millions(number: int, like: str) -> str:
    """Write a number of parameters with as many digits as another one has."""
    return f"{number / 1e6:.{len(like.partition('.')[2])}f}"


def printed(preset: str, *overrides: str) -> dict[str, int]:
    """What `wm presets show PRESET --parameters` prints: with the actions of its environment."""
    return count_parameters(resolve(preset, overrides))


@pytest.mark.parametrize("preset", [name for name in preset_names() if SAID.search(text_of(name))])
def test_a_preset_says_how_many_parameters_are_counted(preset: str) -> None:
    for said in SAID.findall(text_of(preset)):
        counted = printed(preset, *OTHERWISE.get((preset, said), ()))["dynamics"]
        assert said == in_millions(counted, like=said), f"{preset} says {said} M parameters, and has {counted}"


def test_the_page_of_systems_says_how_many_parameters_are_counted() -> None:
    page = " ".join((ROOT / "docs" / "systems.md").read_text(encoding="utf-8").split())
    said = OF_PRESET.findall(page)
    assert len(said) == len(SAID.findall(page)), "each number names its preset: `NAME` has N M parameters"
    for preset, number in said:
        assert number == in_millions(printed(preset)["dynamics"], like=number), preset
    whole = IN_ALL.findall(page)
    for preset, number in whole:
        counted = printed(preset)
        assert number == in_millions(counted["dynamics"] + counted["controller"], like=number), preset
    assert {"s4wm-2d", "drama-paper"} <= dict(said).keys() and "drama-paper" in dict(whole)


# -- the counting itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["quickstart", "rem", "iris", "drama", "storm", "unizero-gaussian", "muzero"])
def test_the_parts_make_the_whole_and_nothing_is_counted_twice(preset: str) -> None:
    found = counts(preset, 4)
    assert ("tokenizer" in found) == (preset not in ("unizero-gaussian", "muzero"))
    trained = {name.removesuffix(".trained"): found.pop(name) for name in [*found] if name.endswith(".trained")}
    assert all(number < found[model] for model, number in trained.items())
    for model in (name for name in found if "." not in name):
        assert found[model] == sum(number for name, number in found.items() if name.startswith(f"{model}."))


def test_lpips_is_not_ours_to_count() -> None:
    """Its 14,716,160 frozen weights are the user's file; the public log counts them into the tokenizer."""
    with_lpips = counts("rem", 4, "tokenizer.perceptual=lpips", "tokenizer.lpips_weights=vgg.safetensors")
    assert with_lpips == counts("rem")
    assert with_lpips["tokenizer"] + 14_716_160 == 17_905_827
