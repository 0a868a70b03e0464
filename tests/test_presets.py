"""Presets: each resolves, says what it is, holds the published numbers, trains; wrong settings are one clear line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import assert_deviation, assert_torchs_default
from torch import nn

from wmcli.assemble import build_controller, build_tokenizer, build_world_model, parameter_counts
from wmcli.cli.presets import SYSTEMS
from wmcli.config import flat, preset_header, preset_names, preset_values, read_preset
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.settings import Settings, flatten, resolve
from wmcli.spaces import Spaces
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.grid_world import evaluate_grid_world
from wmcli.stages.imagine import imagine
from wmcli.stages.memory_tasks import evaluate_memory
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer

PRESETS = preset_names()

# What each ablation of REM's table changes, and to what.
ABLATIONS: dict[str, dict[str, Any]] = {
    "rem-no-pop": {"dynamics.prediction": "sequential"},
    "rem-separate-embeddings": {"dynamics.shared_embeddings": False},
    "rem-4x4": {"tokenizer.downsamples": 4},
    # one thing, IRIS's controller, is two keys
    "rem-pixel-controller": {"controller.input": "pixels", "controller.action_inputs": False},
    "rem-no-action-inputs": {"controller.action_inputs": False},
}

# What makes IRIS in REM's configuration (REM figure 11); its transformer has further keys of its own.
IRIS_IN_REM = {
    "dynamics.prediction": "sequential",
    "dynamics.shared_embeddings": False,
    "dynamics.initialization": "gpt",
    "backbone.kind": "transformer",
    "backbone.activation": "gelu",
    "controller.input": "pixels",
    "controller.action_inputs": False,
}
_OF_RETNET = ("decay", "decay_range_blocks", "chunk_size", "copied_layers")

# What the public code chooses otherwise than its paper, or than what works better.
CODE: dict[str, dict[str, Any]] = {
    "rem-code": {
        "collect.feed_executed_action": False,
        "tokenizer.lpips_dropout": True,
        "dynamics.reward_burn_in": 2,
        "dynamics.end_on_truncation": True,
        "backbone.copied_layers": True,
        "controller.burn_in_actions": False,
    },
    "iris-code": {"tokenizer.lpips_dropout": True, "dynamics.end_on_truncation": True},
    "drama-code": {
        "dynamics.reset_at_ends": False,
        "dynamics.truncate_latents": True,
        "controller.returns": "drama",
    },
}
# And what the paper prints otherwise than its public code, where the preset of the bare name has the code's.
PAPER: dict[str, dict[str, Any]] = {
    "rem-paper": {
        "tokenizer.reconstruction": "l1",  # equation 8
        "backbone.activation": "gelu",  # the equation of its feed-forward layers
        "backbone.decay": "paper",
        "dynamics.pop_calls": 2,  # table 6, the default mode
    },
    "drama-paper": {
        "dynamics.free_nats_of": "each",  # equation 7
        "backbone.head_width": 128,  # table 6
        "controller.actor_layers": 2,  # table 8
        "controller.critic_layers": 2,
        "controller.normalize_inputs": False,
        "controller.slow_target": "values",  # DreamerV3's losses, section 2.3
    },
}
PRIOR = "backbone.prior"
# The numbers of the paper's table, by the kinds of prior that have them.
LEARNED_PRIOR = {f"{PRIOR}.form": "additive", f"{PRIOR}.unit": "token", f"{PRIOR}.leak": False}
GAUSSIAN = {f"{PRIOR}.mean": 6.0, f"{PRIOR}.deviation": 1.0}
SPAN = {
    f"{PRIOR}.span_mask": "ramp",  # the paper's equation is hard, which no gradient passes; its table has a ramp
    f"{PRIOR}.ramp": 3.0,
    f"{PRIOR}.strength": 0.025,
    f"{PRIOR}.span_limit": 20.0,
}
# Keys that the table has no number for.
FREE_GAUSSIAN = {f"{PRIOR}.mean_bound": "sigmoid"}
FREE_SPAN = {f"{PRIOR}.max_span": 6.0}
# What each prior of the paper changes in UniZero, and the public code that multiplies.
VARIANTS: dict[str, dict[str, Any]] = {
    "unizero-gaussian": {f"{PRIOR}.kind": "gaussian"} | LEARNED_PRIOR | GAUSSIAN | FREE_GAUSSIAN,
    # of the paper's three regularizers the one that its section on spans names; its ablation prefers l2
    "unizero-span": {f"{PRIOR}.kind": "span", f"{PRIOR}.span": 6.0, f"{PRIOR}.regularizer": "l1"}
    | (LEARNED_PRIOR | SPAN | FREE_SPAN),
    "unizero-combined": {f"{PRIOR}.kind": "gaussian_span", f"{PRIOR}.span": 10.0, f"{PRIOR}.regularizer": "l1"}
    | (LEARNED_PRIOR | GAUSSIAN | SPAN | FREE_GAUSSIAN | FREE_SPAN),
    "unizero-reference": {
        "environment.protocol": "unizero",
        "dynamics.activation": "gelu_tanh",
        "dynamics.clip": 20.0,
        "dynamics.end_on_truncation": True,
        **LEARNED_PRIOR,
        **GAUSSIAN,
        f"{PRIOR}.kind": "gaussian",
        f"{PRIOR}.form": "scale",
        f"{PRIOR}.mean": 2.0,
        f"{PRIOR}.mean_bound": "clamp",
        "controller.rule": "lightzero",
        "controller.updates": 0,  # it never searches again
    },
}
# What each variant of S4WM changes, and the ablation of TSSM-XL's cache.
MEMORY: dict[str, dict[str, Any]] = {
    "s4wm-full-posterior": {"dynamics.posterior": "full"},
    "s4wm-no-mlp": {"backbone.ffn": 0},
    "s5wm": {"backbone.kind": "s5", "backbone.state_size": 256, "backbone.blocks": 8, "backbone.tied": None},
}
SHORT: dict[str, dict[str, Any]] = {
    "s4wm-3d-short": {
        "collect.episodes": 3000,
        "collect.validation": 200,
        "collect.test": 200,
        "dynamics.updates": 7500,  # as many passes over the episodes
        "evaluation.episodes": 200,
    },
}
CACHES: dict[str, dict[str, Any]] = {
    "tssm-xl-3d-256": {"backbone.memory_length": 256, "backbone.segment_length": 256},
    "tssm-xl-3d-512": {"backbone.memory_length": 512, "backbone.segment_length": 512},
}
BASES = (
    dict.fromkeys(ABLATIONS, "rem")
    | {name: name.removesuffix("-code") for name in CODE}
    | {name: name.removesuffix("-paper") for name in PAPER}
    | dict.fromkeys(VARIANTS, "unizero")
    | dict.fromkeys(MEMORY | SHORT, "s4wm-3d")
    | dict.fromkeys(CACHES, "tssm-xl-3d")
)

# Deng et al. 2023, tables 7 and 8, whose numbers are not in the text: Memory Maze's Dreamer for 3D, DreamerV3-S for 2D.
S4WM_2D = {
    "environment.size": 40,
    "collect.policy": "scripted",
    "collect.episodes": 8000,
    "collect.validation": 1000,
    "collect.test": 1000,
    "tokenizer.categoricals": 32,
    "tokenizer.classes": 32,
    "tokenizer.unimix": 0.01,
    "tokenizer.channels": [32, 64, 128],
    "tokenizer.kernel": 4,
    "tokenizer.norm_eps": 1e-3,
    "tokenizer.posterior_width": 512,
    "dynamics.posterior": "factorized",
    "dynamics.rows": "episodes",
    "dynamics.first_frame": False,
    "dynamics.reconstruction_weight": 1.0,
    "dynamics.reward_weight": 1.0,
    "dynamics.dynamics_weight": 0.8,
    "dynamics.representation_weight": 0.2,
    "dynamics.free_nats": 0.0,
    "dynamics.reward": "bernoulli",
    "dynamics.optimizer": "adamw",
    "dynamics.batch": 8,
    "dynamics.learning_rate": 1e-3,
    "dynamics.warmup": 1000,
    "dynamics.schedule": "cosine",
    "dynamics.weight_decay": 1e-2,
    "dynamics.clip": 1000.0,
    "backbone.width": 256,
    "backbone.layers": 4,
}
_S4 = {
    "backbone.kind": "s4",
    "backbone.state_size": 64,
    "backbone.ffn": 4,
    "backbone.glu": True,
    "backbone.tied": True,
}
S4WM_3D = S4WM_2D | {
    "environment.size": 64,
    "collect.episodes": 28000,
    "collect.validation": 1000,
    "collect.test": 1000,
    "tokenizer.channels": [48, 96, 192, 384],
    "tokenizer.posterior_width": 1000,
    "dynamics.prior_width": 1000,
    "dynamics.reward": "none",
    "dynamics.learning_rate": 5e-4,
    "backbone.width": 512,
    "backbone.layers": 8,
}
_TSSM = {
    "dynamics.warmup": 0,
    "dynamics.learning_rate": 2e-4,
    "dynamics.schedule": "constant",
    "dynamics.clip": 100.0,
    "backbone.kind": "transformer-xl",
    "backbone.memory_length": 128,
    "backbone.segment_length": 128,
    "backbone.ffn": 4,
}
_RSSM = {
    "dynamics.warmup": 0,
    "dynamics.posterior": "recurrent",
    "dynamics.rows": "streams",
    "dynamics.sequence_length": 48,
    "dynamics.batch": 32,
    "dynamics.learning_rate": 3e-4,
    "dynamics.eps": 1e-5,
    "dynamics.schedule": "constant",
    "dynamics.clip": 200.0,
    "backbone.kind": "dreamer-gru",
    "backbone.layers": 1,
}

# Cohen et al. 2024, table of hyper-parameters; where paper and public code differ, the code, which made the scores.
REM = {
    "seed": 1,
    "environment.protocol": "rem",
    "environment.size": 64,
    "environment.count": 1,
    "collect.steps": 200,
    "collect.temperature": 1.0,
    "collect.epsilon": 0.01,
    "tokenizer.quantizer": "vq",
    "tokenizer.network": "slim",
    "tokenizer.codes": 512,
    "tokenizer.width": 256,
    "tokenizer.channels": 32,
    "tokenizer.downsamples": 3,  # 64 / 2^3 = 8, so 8 x 8 = 64 tokens
    "tokenizer.commitment": 1.0,
    "tokenizer.reconstruction": "mse",
    "tokenizer.optimizer": "adamw",
    "tokenizer.learning_rate": 1e-4,
    "tokenizer.weight_decay": 0.01,
    "tokenizer.clip": 10.0,
    "tokenizer.batch": 128,
    "tokenizer.updates": 200,
    "dynamics.prediction": "pop",
    "dynamics.shared_embeddings": True,
    "dynamics.sequence_length": 10,
    "dynamics.context": 2,
    "dynamics.learning_rate": 2e-4,
    "dynamics.weight_decay": 0.05,
    "dynamics.clip": 100.0,
    "dynamics.batch": 64,
    "dynamics.updates": 200,
    "backbone.kind": "retnet",
    "backbone.width": 256,
    "backbone.layers": 5,
    "backbone.dropout": 0.1,
    "backbone.heads": 4,
    "backbone.ffn": 4,
    "backbone.activation": "silu",
    "controller.input": "latent",
    "controller.action_inputs": True,
    "controller.width": 512,
    "controller.latent_channels": [128, 64],
    "controller.burn_in": 20,
    "controller.imagination_horizon": 8,  # 10 blocks less 2 of context: 9 decisions, 8 transitions that count
    "controller.discount": 0.995,
    "controller.trace_decay": 0.95,
    "controller.entropy_weight": 0.001,
    "controller.learn_after_end": True,
    "controller.optimizer": "adamw",
    "controller.learning_rate": 1e-4,
    "controller.weight_decay": 0.01,
    "controller.clip": 3.0,
    "controller.batch": 128,
    "controller.updates": 100,
    "evaluation.episodes": 100,
    "evaluation.environments": 8,
    "evaluation.temperature": 0.5,
    "run.epochs": 600,
    "run.collect_epochs": 500,
    "run.tokenizer_after": 5,
    "run.tokenizer_epochs": 600,
    "run.dynamics_after": 25,
    "run.controller_after": 50,
    "run.evaluate_every": 10,
    "run.evaluate_episodes": 16,
    "training.sampling": "windows",
}
# Micheli et al. 2023, where it is not as REM.
IRIS = REM | {
    "tokenizer.network": "residual",
    "tokenizer.channels": 64,
    "tokenizer.downsamples": 4,  # 4 x 4 = 16 tokens
    "tokenizer.width": 512,
    "tokenizer.reconstruction": "l1",
    "tokenizer.optimizer": "adam",
    "tokenizer.weight_decay": 0.0,
    "tokenizer.batch": 256,
    "dynamics.prediction": "sequential",
    "dynamics.shared_embeddings": False,
    "dynamics.initialization": "gpt",
    "dynamics.sequence_length": 20,
    "dynamics.context": 1,
    "dynamics.observation_burn_in": 0,
    "dynamics.reward_burn_in": 0,
    "dynamics.learning_rate": 1e-4,
    "dynamics.weight_decay": 0.01,
    "dynamics.clip": 10.0,
    "backbone.kind": "transformer",
    "backbone.activation": "gelu",
    "backbone.layers": 10,
    "backbone.heads": 4,
    "backbone.ffn": 4,
    "controller.input": "pixels",
    "controller.action_inputs": False,
    "controller.pixel_channels": [32, 32, 64, 64],
    "controller.imagination_horizon": 19,  # 20 frames, the first of them real
    "controller.optimizer": "adam",
    "controller.weight_decay": 0.0,
    "controller.clip": 10.0,
    "controller.batch": 64,
    "controller.updates": 200,
    "run.evaluate_every": 5,
    "training.sampling": "episodes",
}

# Wang et al. 2024, tables 5 to 8, and what all three presets take from the public code.
DRAMA = {
    "environment.size": 64,
    "tokenizer.channels": [16, 32, 48, 64, 64],
    "tokenizer.kernel": 5,
    "tokenizer.activation": "silu",
    "tokenizer.norm": "batch",
    "dynamics.head_layers": 1,
    "dynamics.head_width": 256,
    "dynamics.context": 8,
    "dynamics.dynamics_weight": 1.0,  # equation 6, as the next two
    "dynamics.representation_weight": 0.1,
    "dynamics.free_nats": 1.0,
    "backbone.kind": "mamba2",
    "backbone.width": 512,
    "backbone.layers": 2,
    "backbone.state_size": 16,
    "controller.actor_width": 256,
    "controller.critic_width": 512,
    "controller.norm": "rms",
    "controller.activation": "silu",
    "controller.discount": 0.985,
    "controller.trace_decay": 0.95,
    "controller.entropy_weight": 3e-4,
    "controller.clip": 100.0,
    "controller.batch": 1024,
    "training.sampling": "dfs",
}

# De Dios Allegue et al. 2025, table of hyper-parameters, and what stands behind it: the encoder, the transformer and
# the losses of UniZero. Where the paper says nothing, or cannot be meant, a comment says what is taken.
PLANNING = {
    "seed": 1,
    "environment.protocol": "unizero",  # one frame of 4, signs of rewards; no sticky actions, as in LightZero
    "environment.size": 64,
    "environment.count": 8,  # public code
    "collect.temperature": 0.25,
    "collect.epsilon": 0.0,
    "dynamics.discount": 0.997,
    "dynamics.td_steps": 5,
    "dynamics.bootstrap": "target",
    "dynamics.end_on_truncation": False,  # public code: True
    "dynamics.predict_termination": False,
    "dynamics.weight_decay": 1e-4,
    "controller.kind": "mcts",
    "controller.simulations": 50,
    "controller.rule": "mctx",  # public code: its own variant of the rule
    "controller.pb_c_init": 1.25,
    "controller.pb_c_base": 19652.0,
    "controller.dirichlet_alpha": 0.3,
    "controller.dirichlet_fraction": 0.25,
    "evaluation.episodes": 20,  # public code: 3
    "evaluation.temperature": 0.0,
    "run.tokenizer_epochs": 0,
    "run.evaluate_every": 50,  # 10,000 steps
    "training.sampling": "uniform",  # from all there is: 100,000 steps are less than the paper's 1,000,000
}
UNIZERO = PLANNING | {
    "environment.protocol": "unizero-sticky",  # appendix A, twice; not in the code
    "dynamics.kind": "unizero",
    "dynamics.sequence_length": 10,
    "dynamics.context": 4,
    "dynamics.channels": [32, 64],
    "dynamics.activation": "leaky_relu",
    "dynamics.group": 8,  # at temperature 1, as the table has it; the text would learn it
    "dynamics.bound": 50,  # 101 bins
    "dynamics.latent_weight": 10.0,
    "dynamics.reward_weight": 1.0,
    "dynamics.policy_weight": 1.0,
    "dynamics.value_weight": 0.5,
    "dynamics.entropy_weight": 1e-4,
    "dynamics.target_rate": 0.05,  # after every update; the table's copy every 100 updates is MuZero's
    "dynamics.batch": 64,
    "dynamics.optimizer": "adamw",
    "dynamics.learning_rate": 1e-4,
    "dynamics.beta2": 0.95,  # public code
    "dynamics.clip": 5.0,
    "backbone.kind": "transformer",
    "backbone.width": 768,
    "backbone.layers": 2,
    "backbone.dropout": 0.1,
    "backbone.heads": 8,
    "backbone.ffn": 4,
    "backbone.activation": "gelu_tanh",
    "backbone.norm": "pre",
    "backbone.norm_eps": 1e-5,
    "backbone.embedding_norm": False,
    "backbone.attention_bias": True,
    "backbone.initialization": "gpt",
    f"{PRIOR}.kind": "none",
    # Every round 32 frames are searched again; the paper's 1/50 is 160 windows of 10 frames every 50 rounds.
    "controller.batch": 32,
    "controller.updates": 1,
}
# Beside the kind, in every preset with a prior of the paper's. Offsets are elements: two to a step.
# As LightZero trains it on Atari 100k (Niu et al. 2023), from which the paper's column is quoted.
MUZERO = PLANNING | {
    "dynamics.kind": "muzero",
    "dynamics.frame_stack": 4,
    "dynamics.unroll_steps": 5,
    "dynamics.channels": [32, 64],
    "dynamics.head_channels": 16,
    "dynamics.head_width": 32,
    "dynamics.projection_width": 1024,
    "dynamics.predictor_width": 512,
    "dynamics.bound": 300,  # 601 bins
    "dynamics.reward_weight": 1.0,
    "dynamics.policy_weight": 1.0,
    "dynamics.value_weight": 0.25,
    "dynamics.consistency_weight": 2.0,
    "dynamics.shift": 4,
    "dynamics.intensity": 0.05,
    "dynamics.target_every": 100,
    "dynamics.batch": 256,
    "dynamics.optimizer": "sgd",
    "dynamics.learning_rate": 0.2,
    "dynamics.momentum": 0.9,
    "dynamics.decay_after": [25_000, 50_000],
    "dynamics.clip": 10.0,
    "controller.updates": 0,  # nothing is searched again
}

ROOMS = [f"wm/{rooms}Rooms{kind}-v0" for rooms in ("Two", "Four", "Ten") for kind in ("", "Teleport")]
PAPER_TASKS = {  # by the side of their frames
    40: [f"wm/{task}-v0" for task in ("DistractingMemory-100", "DistractingMemory-200", "DistractingMemory-400")]
    + [f"wm/MultiDoorsKeys-{keys}-v0" for keys in (3, 5, 7)],
    64: ROOMS,
}

QUICK = [  # one update of each kind in an environment that costs nothing
    "environment.count=1",
    "tokenizer.batch=2",
    "tokenizer.updates=1",
    "dynamics.batch=1",
    "dynamics.updates=1",
    "controller.batch=8",
    "controller.updates=1",
    "evaluation.episodes=1",
    "training.device=cpu",
    "training.threads=1",
]
CATCH = ["environment.id=wm/Catch-v0", "environment.protocol=plain"]
SCRIPTED = {  # short episodes of a memory task, by the side of its frames
    40: ["environment.id=wm/DistractingMemory-12-v0"],
    64: ["environment.id=wm/TwoRoomsSmall-v0", "environment.size=32"],
    32: [],
}
OF_ENCODER = {  # and by what encodes frames
    "tokenizer": [*CATCH, "collect.steps=21", "tokenizer.perceptual=none", "controller.burn_in=2"],
    "dynamics": [*CATCH, "collect.steps=150", "dynamics.batch=2"],  # a segment of 128 frames, batch statistics
    "rules": ["collect.steps=150"],
    "itself": [*CATCH, "collect.steps=150", "dynamics.batch=2"],  # as above
}
TRAINED = {"rules": ["dynamics"], "itself": ["dynamics", "controller"]}  # else all three


def counts(settings: Settings, actions: int) -> dict[str, int]:
    return parameter_counts(settings, Spaces.of_images(settings.environment.size, actions))


def changes(preset: str, base: str, *overrides: str) -> dict[str, Any]:
    """What `preset` with overrides has otherwise than `base`."""
    ours, theirs = flatten(resolve(preset, overrides)), flatten(resolve(base))
    return {key: ours.get(key) for key in ours | theirs if ours.get(key) != theirs.get(key)}


def leaves(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found


def epochs_of(settings: Settings) -> float:
    """How often a model of a memory task learns from each frame."""
    dynamics, task = settings.dynamics, TASKS[settings.environment.id]
    episode = task.context + task.query
    row = episode if dynamics.rows == "episodes" else dynamics.sequence_length
    return dynamics.updates * dynamics.batch * row / (settings.collect.episodes * episode)


def complaint(preset: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(preset, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_preset_has_a_description() -> None:
    for name in PRESETS:
        header = preset_header(name)
        assert header["system"] in SYSTEMS, name
        assert header["about"] and header["paper"] and header["cost"], name


def test_a_time_is_a_presets_own() -> None:
    """Who takes over the settings of a preset does not take as long."""
    inherited = [name for name in PRESETS if "cost" not in read_preset(name)]
    assert not [name for name in inherited if " min" in preset_header(name)["cost"]]


def test_the_presets_of_the_papers_are_there() -> None:
    assert {"rem", "iris", "iris-rem-config", "unizero", "muzero", "quickstart", *BASES} <= set(PRESETS)
    files = (Path(__file__).parent.parent / "presets").glob("*.toml")
    assert sorted(PRESETS) == sorted(file.stem for file in files)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_with_description_and_source(name: str) -> None:
    assert isinstance(resolve(name), Settings)
    table = read_preset(name)
    for key in ("about", "paper"):
        assert isinstance(table[key], str) and 10 < len(table[key]) < 120 and "\n" not in table[key]


@pytest.mark.parametrize("name", BASES)
def test_a_variant_states_only_differing_settings(name: str) -> None:
    """A key that repeats its base hides what the variant is about."""
    above = flatten(Settings.model_validate(preset_values(read_preset(name)["base"])))
    stated = leaves({key: value for key, value in read_preset(name).items() if isinstance(value, dict)})
    assert stated
    assert not [key for key, value in stated.items() if above.get(key) == value]


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_an_ablation_changes_only_the_ablated_settings(name: str, base: str) -> None:
    assert changes(name, base) == (ABLATIONS | CODE | PAPER | VARIANTS | MEMORY | SHORT | CACHES)[name]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("rem", REM | {"backbone.decay": "log"}),
        ("rem-paper", REM | {"tokenizer.reconstruction": "l1", "backbone.activation": "gelu"}),
        ("iris", IRIS),
        ("drama", DRAMA),
        ("drama-paper", DRAMA | PAPER["drama-paper"]),
        ("unizero", UNIZERO),
        ("unizero-gaussian", LEARNED_PRIOR | GAUSSIAN),
        ("unizero-span", LEARNED_PRIOR | SPAN | {f"{PRIOR}.span": 6.0}),
        ("unizero-combined", LEARNED_PRIOR | GAUSSIAN | SPAN),
        ("muzero", MUZERO),
        ("s4wm-2d", S4WM_2D | _S4),
        ("s4wm-3d", S4WM_3D | _S4),
        ("tssm-xl-2d", S4WM_2D | _TSSM | {"backbone.heads": 4}),
        ("tssm-xl-3d", S4WM_3D | _TSSM | {"backbone.heads": 8}),
        ("rssm-tbtt-2d", S4WM_2D | _RSSM | {"backbone.width": 512}),
        ("rssm-tbtt-3d", S4WM_3D | _RSSM | {"backbone.width": 2048, "backbone.input_width": 1000}),
    ],
)
def test_a_preset_holds_the_numbers_of_its_paper(name: str, numbers: dict[str, Any]) -> None:
    values = flatten(resolve(name))
    assert {key: values[key] for key in numbers} == numbers
    stated = flat(preset_values(name))
    if name not in BASES:
        assert numbers.keys() - stated.keys() <= {"seed"}, "the file states them, also where they are defaults"


def test_iris_in_rems_configuration_is_iris_with_the_numbers_of_rem() -> None:
    rem, mixed, iris = (flatten(resolve(name)) for name in ("rem", "iris-rem-config", "iris"))
    assert {key: mixed[key] for key in rem if key in mixed and mixed[key] != rem[key]} == IRIS_IN_REM
    assert rem.keys() - mixed.keys() == {f"backbone.{key}" for key in _OF_RETNET}
    of_the_transformer = [key for key in mixed if key not in rem]
    assert all(mixed[key] == iris[key] for key in (*IRIS_IN_REM, *of_the_transformer))


def test_drama_and_the_small_dreamer_are_as_large_as_the_paper_says() -> None:
    """A world model of 7 million parameters, in all 10 with the slow critic. Its Dreamer is the size 12m, whose
    numbers `tests/test_dreamer_sizes.py` has."""
    assert resolve("dreamer-xs") == resolve("dreamer")
    for actions in (3, 18):
        counted = counts(resolve("drama-paper"), actions)
        assert round(counted["dynamics"] / 1e6) == 7
        assert round((counted["dynamics"] + counted["controller"]) / 1e6) == 10


def test_overrides_of_a_kind_and_of_its_keys_come_in_any_order() -> None:
    orders = (
        ["backbone.memory_length=9", "backbone.kind=transformer-xl"],
        ["backbone.kind=transformer-xl", "backbone.memory_length=9"],
    )
    for overrides in orders:
        backbone = resolve("rem", overrides).backbone
        assert (backbone.kind, backbone.memory_length, backbone.width) == ("transformer-xl", 9, 256)


def test_storm_starts_with_torchs_defaults() -> None:
    """As its public code does: no module there is initialized by hand."""
    torch.manual_seed(0)
    settings, spaces = resolve("storm"), Spaces.of_images(64, 6)
    world_model = build_world_model(settings, build_tokenizer(settings, spaces), spaces)
    controller = build_controller(settings, world_model)
    layers = [layer for model in (world_model, controller) for layer in model.modules()]
    assert sum(isinstance(layer, nn.Linear) for layer in layers) == 28
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            assert_torchs_default(layer)
        elif isinstance(layer, nn.Embedding):
            assert_deviation(layer.weight, 1)


def test_steps_and_updates_of_a_whole_run_are_those_of_the_benchmark() -> None:
    """100,000 steps; 119,000, 115,000 and 55,000 updates of tokenizer, dynamics and controller."""
    settings = resolve("rem")
    run = settings.run
    assert run.collect_epochs * settings.collect.steps == 100_000
    assert (run.tokenizer_epochs - run.tokenizer_after) * settings.tokenizer.updates == 119_000
    assert (run.epochs - run.dynamics_after) * settings.dynamics.updates == 115_000
    assert (run.epochs - run.controller_after) * settings.controller.updates == 55_000


@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        *((name, 50) for name in ("s4wm-2d", "rssm-tbtt-2d", "tssm-xl-2d")),
        *((name, 20) for name in ("s4wm-3d", "rssm-tbtt-3d", "tssm-xl-3d", *MEMORY, *SHORT, *CACHES)),
    ],
)
def test_memory_models_go_through_their_data_equally_often(name: str, epochs: int) -> None:
    """Within half an update, on each task of the paper: every row holds its episode, or a part of fixed length."""
    for task in PAPER_TASKS[resolve(name).environment.size]:
        settings = resolve(name, [f"environment.id={task}"])
        assert abs(epochs_of(settings) / epochs - 1) * settings.dynamics.updates <= 0.5
        episode = TASKS[task].context + TASKS[task].query
        assert settings.dynamics.sequence_length == (48 if settings.dynamics.rows == "streams" else episode)


def test_numbers_of_a_task_can_be_given_as_numbers() -> None:
    """They are the same settings then, so the jobs of runs that were given numbers are recognized."""
    doors = "environment.id=wm/MultiDoorsKeys-7-v0"
    words, numbers = resolve("s4wm-2d", [doors]), ["dynamics.sequence_length=720", "dynamics.updates=50000"]
    assert resolve("s4wm-2d", [doors, *numbers]) == words
    assert resolve("s4wm-2d", base=words.plain()) == words
    assert words.identity("dynamics").values == resolve("s4wm-2d", [doors, *numbers]).identity("dynamics").values
    assert resolve("s4wm-2d", ["dynamics.updates=1 epoch"]).dynamics.updates == 1_000
    assert resolve("s4wm-2d", ["dynamics.updates=3 epochs", "collect.episodes=80"]).dynamics.updates == 30
    assert resolve("s4wm-2d", ["dynamics.updates=3 epochs", "dynamics.batch=4"]).dynamics.updates == 6_000
    windows = ["dynamics.rows=windows", "dynamics.sequence_length=50", "dynamics.updates=1 epoch"]
    assert resolve("s4wm-2d", [*windows, "dynamics.across_ends=true"]).dynamics.updates == 5_000
    padded = (201 * 50 + sum(range(2, 50))) / 249  # frames in a window of 250, of which the last 48 begin too late
    assert resolve("s4wm-2d", windows).dynamics.updates == round(8_000 * 250 / (8 * padded))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.id=Pong"], ["sequence_length = 'episode'", "'Pong' is none", "set dynamics.sequence_length="]),
        (
            ["environment.id=Pong", "dynamics.sequence_length=9"],
            ["updates = '50 epochs'", "'Pong' is none", "set dynamics.updates="],
        ),
        (["collect.policy=learned"], ["updates = '50 epochs'", "collect.policy = learned", "set dynamics.updates="]),
        (["dynamics.sequence_length=epsiode"], ["dynamics.sequence_length = 'epsiode'", "valid integer"]),
        (["dynamics.updates=0 epochs"], ["dynamics.updates = '0 epochs'", "valid integer"]),
        (["dynamics.batch=0"], ["dynamics.batch = 0", "greater than or equal to 1"]),
    ],
)
def test_numbers_of_no_task_are_one_line(overrides: list[str], words: list[str]) -> None:
    message = complaint("s4wm-2d", *overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["unizero", *VARIANTS, "muzero"])
def test_steps_and_updates_of_a_whole_run_of_the_planners(name: str) -> None:
    """100,000 steps, and one update for every 4 of them once there are 2,000."""
    settings = resolve(name)
    run = settings.run
    assert run.epochs == run.collect_epochs
    assert run.epochs * settings.collect.steps == 100_000
    assert run.dynamics_after * settings.collect.steps == 2_000
    assert settings.dynamics.updates / settings.collect.steps == 0.25
    assert (run.epochs - run.dynamics_after) * settings.dynamics.updates == 25_000 - 500
    assert run.evaluate_every * settings.collect.steps == 10_000


# Every ablation of the paper, and those that the spec adds: what it changes in the preset.
DELTAS = [
    *(("unizero-span", {"regularizer": each}) for each in ("l1", "l2", "max")),  # max: none above 6
    *(("unizero-span", {"span": each}) for each in (2.0, 6.0, 10.0)),
    *(("unizero-gaussian", {"mean": each}) for each in (2.0, 6.0, 10.0)),
    *(("unizero-gaussian", {"deviation": each}) for each in (1.0, 3.0)),
    ("unizero-gaussian", {"unit": "step", "mean": 3.0}),
    *(("unizero", {"kind": "local", "window": each}) for each in (2, 4, 6, 8, 12)),
    # public code: its span, its baseline
    ("unizero-reference", {"kind": "span", "span": 2.0, "span_mask": "triangle", "leak": True}),
    ("unizero-reference", {"kind": "none"}),
    # the other form of all three; beyond the span the public code hides nothing
    ("unizero-gaussian", {"form": "scale"}),
    ("unizero-span", {"form": "scale", "span_mask": "triangle", "leak": True}),
    ("unizero-combined", {"form": "scale", "span_mask": "triangle", "leak": True}),
]


@pytest.mark.parametrize(("name", "delta"), DELTAS)
def test_the_papers_ablations_are_overrides(name: str, delta: dict[str, Any]) -> None:
    overrides = [f"{PRIOR}.{key}={str(value).lower()}" for key, value in delta.items()]
    before, after = flatten(resolve(name)), flatten(resolve(name, overrides))
    wanted = {f"{PRIOR}.{key}": value for key, value in delta.items()}
    changed = {key: value for key, value in changes(name, name, *overrides).items() if key in before and key in after}
    assert changed == {key: value for key, value in wanted.items() if key in before and value != before[key]}
    assert {key: after[key] for key in wanted} == wanted
    assert counts(resolve(name, overrides), 5)["dynamics"] > 0  # and it can be built


@pytest.mark.parametrize("name", PRESETS)
def test_the_models_of_a_preset_can_be_built(name: str) -> None:
    settings = resolve(name)
    counted = counts(settings, 5)
    models = {"dynamics"} | ({"controller"} if settings.controller.acts else set())
    models |= {"tokenizer"} if settings.dynamics.encoder in ("tokenizer", "dynamics") else set()
    assert {name for name in counted if "." not in name} == models
    assert all((counted[model] > 0) == (model != "controller" or not settings.controller.searches) for model in models)


# -- training ---------------------------------------------------------------------------------------------------------


def quickly(name: str, *more: str) -> list[str]:
    """Return overrides for one update of each model that a preset has, on a backbone of at most two layers."""
    settings = resolve(name)
    models = {part for part in ("tokenizer", "controller") if getattr(settings, part).kind == "none"}
    layers = ["backbone.layers=2"] if settings.backbone.layers > 2 else []
    return [*(each for each in QUICK if each.partition(".")[0] not in models), *layers, *more]


def one_update_of_everything(name: str, folder: Path, *overrides: str) -> None:
    encoder, plans = resolve(name).dynamics.encoder, resolve(name).controller.searches
    if resolve(name).collect.policy == "scripted":
        one_update_on_a_memory_task(name, folder)
        return
    search = ["controller.simulations=2"] if plans else []
    quick = quickly(name, *OF_ENCODER[encoder], *search, *overrides)
    context = open_context(folder, name, quick, create=True, quiet=True)
    experience = collect(context)
    assert experience.metrics["steps"] >= 21
    stages = {"tokenizer": train_tokenizer, "dynamics": train_dynamics, "controller": imagine}
    for kind in TRAINED.get(encoder, stages):
        artifact = stages[kind](context)
        assert artifact.metrics["updates"] == 1
        if kind == "controller" and plans:  # it searched again, and has no weights
            assert artifact.metrics["search_entropy"] >= 0
        else:
            assert artifact.metrics["gradient_norm"] > 0
        assert artifact.manifest["preset"] == name
    if encoder == "rules":
        assert evaluate_grid_world(context).metrics["sequences"] == 1
    else:
        assert evaluate(context).metrics["episodes"] == 1


def one_update_on_a_memory_task(name: str, folder: Path) -> None:
    settings = resolve(name)
    few = ["collect.episodes=2", "collect.validation=1", "collect.test=1", "dynamics.validate_every=1"]
    task = SCRIPTED[settings.environment.size]
    context = open_context(folder, name, quickly(name, *few, *task), create=True, quiet=True)
    assert collect(context).metrics["episodes"] == 2
    assert train_dynamics(context).metrics["best_update"] == 1
    found = evaluate_memory(context, "generation").metrics
    assert found["episodes"] == 1 and found["generation"]["value"] > 0


FAST = ["quickstart", "unizero-quick", "muzero-quick", "memory-small"]


@pytest.mark.parametrize("name", FAST)
def test_quick_presets_train(name: str, tmp_path: Path) -> None:
    one_update_of_everything(name, tmp_path / "run")


# They are `dreamer-1m` in other sizes, and take up to 20 GB.
LARGE = [f"dreamer-{millions}m" for millions in (25, 50, 100, 200, 400)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(FAST) - set(LARGE)))
def test_every_model_of_a_preset_takes_an_update(name: str, tmp_path: Path) -> None:
    one_update_of_everything(name, tmp_path / "run")


# -- settings that cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backbone.width=128"], ["tokenizer.width is 256", "backbone.width is 128", "dynamics.shared_embeddings"]),
        (["tokenizer.width=512"], ["tokenizer.width is 512", "backbone.width is 256"]),
        (
            ["controller.imagination_horizon=9"],
            [
                "dynamics.context + controller.imagination_horizon = 11",
                "dynamics.sequence_length = 10",
                "lower controller.imagination_horizon",
            ],
        ),
        (
            ["dynamics.context=3"],
            ["dynamics.context + controller.imagination_horizon = 11", "dynamics.sequence_length = 10"],
        ),
        (
            ["dynamics.sequence_length=9"],
            ["dynamics.context + controller.imagination_horizon = 10", "dynamics.sequence_length = 9"],
        ),
        (["dynamics.sequence_length=2"], ["dynamics", "context = 2", "sequence_length = 2"]),
        (["dynamics.reward_burn_in=10"], ["dynamics", "reward_burn_in = 10", "sequence_length = 10"]),
        (["tokenizer.quantizer=fsq", "tokenizer.fsq_levels=[4, 4]"], ["fsq_levels [4, 4] make 16", "codes = 512"]),
        (["tokenizer.kind=categorical"], ["dynamics.kind = 'token'", "kind 'vq'", "'categorical'"]),
        (["dynamics.kind=latnt"], ["dynamics.kind = 'latnt'", "did you mean 'latent'?"]),
        (["controller.kind=actor-critic", "controller.optimizer=adam"], ["controller.warmup = 1000", "warmup=0"]),
    ],
)
def test_sections_that_do_not_fit_together_are_one_line_with_both_keys(overrides: list[str], words: list[str]) -> None:
    message = complaint("rem", *overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("genration", ["there is no measure 'genration'", "did you mean 'generation'?"]),
        ('["rewrd", "doors"]', ["there is no measure 'rewrd'", "did you mean 'reward'?"]),
        ("atuo", ["did you mean 'auto'?"]),
        ("reward", ['write ["reward"], or auto']),
        ('["auto"]', ["or auto alone"]),
        ("3", ["3 is no list"]),
        ("[3]", ["there is no measure 3"]),
    ],
)
def test_measures_that_there_are_not_are_one_line(given: str, words: list[str]) -> None:
    message = complaint("s4wm-2d", f"evaluation.measures={given}")
    assert all(word in message for word in ["evaluation.measures", *words]), message


def test_measures_are_a_list_or_auto() -> None:
    for given, measures in (("auto", "auto"), ("[]", ()), ('["doors", "reward"]', ("doors", "reward"))):
        assert resolve("s4wm-3d", [f"evaluation.measures={given}"]).evaluation.measures == measures


@pytest.mark.parametrize(
    ("preset", "overrides", "rows"),
    [
        ("s4wm-2d", ["training.sampling=dfs"], "episodes"),
        ("s4wm-2d", ["training.sampling=prioritized"], "episodes"),
        ("rssm-tbtt-3d", ["training.sampling=dfs"], "streams"),
        ("drama", ["dynamics.rows=episodes", "dynamics.across_ends=false"], "episodes"),
    ],
)
def test_frequency_sampling_is_of_windows(preset: str, overrides: list[str], rows: str) -> None:
    message = complaint(preset, *overrides)
    named = "prioritized" if "training.sampling=prioritized" in overrides else "dfs"
    words = [f"training.sampling = '{named}'", f"dynamics.rows = '{rows}'", "training.sampling=windows"]
    assert all(word in message for word in words), message
    for sampling in ("windows", "episodes", "uniform"):
        assert resolve(preset, [*overrides, f"training.sampling={sampling}"]).training.sampling == sampling


def test_a_run_that_began_with_a_setting_that_counts_for_nothing_is_read() -> None:
    """0.1.0 let it pass: such a run, and what was made in it, stays usable."""
    values = resolve("s4wm-2d").model_dump(mode="json")
    values["training"]["sampling"] = "dfs"
    assert Settings.model_validate_json(json.dumps(values)) == resolve("s4wm-2d", base=values)
    assert resolve("s4wm-2d", ["evaluation.episodes=3"], base=values).evaluation.episodes == 3
    assert resolve("s4wm-2d", ["training.sampling=windows"], base=values) == resolve("s4wm-2d")


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("rem", ["controller.kind=mcts"], ["controller.kind = 'mcts'", "kind 'token'", "unizero or muzero"]),
        ("drama", ["controller.kind=mcts"], ["controller.kind = 'mcts'", "kind 'latent'", "unizero or muzero"]),
        ("unizero-gaussian", [f"{PRIOR}.leak=true"], [PRIOR, "leak = true", "form = 'scale'", "leak = false"]),
        ("unizero-reference", [f"{PRIOR}.kind=local", f"{PRIOR}.form=scale"], [f"'{PRIOR}.form'", "kind 'local'"]),
        ("unizero-span", [f"{PRIOR}.deviation=1"], [f"'{PRIOR}.deviation'", "kind 'span'", "gaussian, gaussian_span"]),
        ("unizero-combined", [f"{PRIOR}.deviation=0"], [f"{PRIOR}.deviation = 0"]),
        ("unizero", ["dynamics.context=11"], ["context = 11", "sequence_length = 10"]),
        ("unizero", ["dynamics.optimizer=sgd"], ["dynamics.optimizer = 'sgd'", "'adamw'"]),
        ("unizero", ["dynamics.unroll_steps=3"], ["unknown key 'dynamics.unroll_steps'", "only muzero has it"]),
        ("muzero", ["dynamics.context=3"], ["unknown key 'dynamics.context'"]),
    ],
)
def test_planning_that_cannot_work_is_one_line(preset: str, overrides: list[str], words: list[str]) -> None:
    message = complaint(preset, *overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("unizero-gaussian", [f"{PRIOR}.mean=20"], [f"{PRIOR}.mean = 20", "largest offset here is 19"]),
        ("unizero-gaussian", [f"{PRIOR}.unit=step", f"{PRIOR}.mean=10"], ["mean = 10", "largest offset here is 9"]),
        ("unizero", ["backbone.width=100", "backbone.heads=4"], ["width = 100", "dynamics.group = 8"]),
        ("unizero", ["backbone.heads=7"], ["heads = 7", "backbone.width = 768"]),
    ],
)
def test_planning_whose_model_cannot_be_built_is_one_line(preset: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        counts(resolve(preset, overrides), 5)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        (
            "rem-quick",
            ["controller.kind=actor-critic", "controller.input=frame", "controller.imagination_horizon=3"],
            ["controller.input = frame", "controller.input=state"],
        ),
        (
            "s4wm-quick",
            ["controller.input=memory", "backbone.kind=transformer"],
            ["controller.input=state", "another backbone.kind"],
        ),
        ("rem-quick", ["backbone.kind=dreamer-gru", "backbone.input_width=7"], ["backbone.input_width = 7"]),
        ("storm", ["dynamics.across_ends=false", "dynamics.rows=streams"], ["rows = 'streams'", "transformer-xl"]),
    ],
)
def test_models_that_cannot_be_built_are_one_line(preset: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        counts(resolve(preset, overrides), 3)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_calls_of_parallel_prediction_are_how_and_not_what() -> None:
    """They reach the model, and identify no job."""
    two = resolve("rem-quick", ["dynamics.pop_calls=2"])
    spaces = Spaces.of_images(two.environment.size, 3)
    assert build_world_model(two, build_tokenizer(two, spaces), spaces).settings.pop_calls == 2
    assert two.identity("dynamics", "backbone").values == resolve("rem-quick").identity("dynamics", "backbone").values
    for name in ("rem-no-pop", "iris"):
        assert "set pop_calls = 1" in complaint(name, "dynamics.pop_calls=2")


def test_another_kind_starts_its_section_from_the_defaults() -> None:
    mixed = ["controller.kind=actor-critic", "controller.imagination_horizon=6", "dynamics.sequence_length=12"]
    settings = resolve("quickstart", mixed)
    assert (settings.controller.kind, settings.controller.actor_width, settings.controller.imagination_horizon) == (
        "actor-critic",
        256,
        6,
    )
    bound = resolve("quickstart").model_dump(mode="json")
    assert resolve("quickstart", mixed, base=bound) == settings
    same = resolve("quickstart", ["controller.kind=reinforce"])
    assert same == resolve("quickstart")


def test_another_kind_keeps_the_keys_that_it_shares() -> None:
    recorded = resolve("s4wm-3d", ["collect.policy=recorded", "collect.recordings=here"]).collect
    assert (recorded.policy, recorded.episodes, recorded.recordings) == ("recorded", 28_000, "here")
    bound = resolve("s4wm-3d").plain()
    learned = resolve("s4wm-3d", ["collect.steps=9", "collect.policy=learned"], base=bound).collect
    assert learned == resolve("rem", ["collect.steps=9"]).collect
    spans = resolve("unizero-combined", [f"{PRIOR}.kind=span"]).backbone.prior
    assert (spans.kind, spans.span, spans.regularizer) == ("span", 10.0, "l1")
    assert resolve("unizero-combined", [f"{PRIOR}.kind=none"]).backbone == resolve("unizero").backbone
    lists = resolve("unizero-combined", ["backbone.kind=mamba2"]).backbone
    assert lists == resolve("unizero", ["backbone.kind=mamba2"]).backbone


@pytest.mark.parametrize(
    ("preset", "override", "message"),
    [
        ("s4wm-3d", "collect.steps=5", "'collect.steps': policy 'scripted' has no such key, only learned has it"),
        ("rem", "collect.test=5", "'collect.test': policy 'learned' has no such key, scripted, recorded have it"),
        ("rem", "collect.policy=scrpted", "collect.policy = 'scrpted': there is none; did you mean 'scripted'?"),
        ("iris", f"{PRIOR}.mean=2", f"'{PRIOR}.mean': kind 'none' has no such key"),
        ("unizero", "tokenizer.batch=2", "'tokenizer.batch': kind 'none' has no such key, vq, categorical have it"),
        ("s4wm-2d", "controller.batch=2", "'controller.batch': kind 'none' has no such key"),
    ],
)
def test_a_key_of_another_kind_names_the_kinds_that_have_it(preset: str, override: str, message: str) -> None:
    assert message in complaint(preset, override)


def test_a_resolved_preset_has_few_keys() -> None:
    counts = [sum(not key.startswith("alternatives") for key in flatten(resolve(name))) for name in PRESETS]
    assert statistics.median(counts) <= 145, sorted(counts)


def test_both_kinds_of_unknown_key_name_the_nearest_of_their_own_kind() -> None:
    assert "did you mean 'act_window'?" in complaint("drama", "dynamics.act_windw=3")
    assert "unknown key 'dynamics.act_windw'" in complaint("drama", "dynamics.act_windw=3")
    assert "dynamics.batch = 0" in complaint("drama", "dynamics.batch=0")


def test_the_advised_command_works() -> None:
    assert resolve("rem", ["backbone.width=128", "dynamics.shared_embeddings=false"]).backbone.width == 128
    assert (
        resolve(
            "rem", ["controller.imagination_horizon=9", "dynamics.sequence_length=11"]
        ).controller.imagination_horizon
        == 9
    )
    assert resolve("rem", ["controller.imagination_horizon=7", "dynamics.context=3"]).dynamics.context == 3


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("controller.imagination_horizn=9", "imagination_horizon"),
        ("tokeniser.codes=9", "tokenizer"),
        ("backbone.head=2", "heads"),
        ("training.theads=2", "threads"),
        ("sed=2", "seed"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    message = complaint("rem", override)
    assert f"unknown key '{override.partition('=')[0].partition('.codes')[0]}'" in message
    assert f"did you mean '{nearest}'?" in message


@pytest.mark.parametrize("override", ["seed=-1", "seed=1.5", "collect.epsilon=2", "controller.input=sound", "run=3"])
def test_a_wrong_value_names_its_key(override: str) -> None:
    key, _, value = override.partition("=")
    message = complaint("rem", override)
    assert key in message and value in message


def test_an_unknown_preset_names_the_nearest() -> None:
    assert "did you mean 'rem-no-pop'?" in complaint("rem-nopop")


def test_overrides_come_last_and_the_base_replaces_the_preset() -> None:
    assert resolve("quickstart", ["seed=3", "seed=4"]).seed == 4
    bound = resolve("rem", ["controller.imagination_horizon=5"])
    again = resolve("quickstart", ["seed=9"], base=bound.model_dump(mode="json"))
    assert again == bound.model_copy(update={"seed": 9})


def test_flat_settings_can_be_given_back_as_overrides() -> None:
    flat = flatten(resolve("iris"))
    texts = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in flat.items()]
    assert resolve("quickstart", texts) == resolve("iris")
