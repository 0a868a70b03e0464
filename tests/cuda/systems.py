"""Presets made tiny, for every stage of their systems in seconds. Sizes differ, where they may."""

from __future__ import annotations

_RUN = [
    *("environment.size=16", "environment.count=3", "collect.steps=45", "evaluation.episodes=2"),
    *("evaluation.environments=2", "run.epochs=2", "run.collect_epochs=2", "run.dynamics_after=0"),
    *("run.controller_after=0", "run.evaluate_every=0", "dynamics.updates=4", "controller.updates=4"),
    *("training.log_every=2", "training.threads=1", "training.precision=float32"),
    "training.kernels=torch",  # Triton's interpreter takes minutes
]
_TOKENIZER = ["tokenizer.batch=7", "tokenizer.updates=4", "run.tokenizer_after=0", "run.tokenizer_epochs=2"]
PATCHES = [
    "tokenizer.fsq_levels=[4, 5]",
    "tokenizer.channels=8",
    "tokenizer.downsamples=2",
    "tokenizer.width=16",
    "tokenizer.codes=20",
]
_TOKENS = [
    *(*_TOKENIZER, *PATCHES, "dynamics.sequence_length=6", "dynamics.batch=4", "backbone.width=16"),
    *("backbone.layers=1", "backbone.dropout=0.25", "backbone.heads=2", "controller.width=12"),
    *("controller.burn_in=2", "controller.imagination_horizon=3", "controller.batch=5"),
]
LATENTS = [
    *("tokenizer.categoricals=4", "tokenizer.classes=5", "tokenizer.channels=[6, 8]", "tokenizer.strides=[2, 2]"),
    *("dynamics.head_width=10", "dynamics.batch=4", "dynamics.warmup=0", "backbone.width=16", "backbone.layers=1"),
    *("controller.actor_width=12", "controller.critic_width=14", "controller.imagination_horizon=2"),
    *("controller.batch=6", "controller.warmup=0"),
]
_WINDOWS = ["dynamics.sequence_length=9", "dynamics.context=3", "dynamics.act_window=4"]
_PLANNER = [
    *("dynamics.td_steps=2", "dynamics.channels=[6, 8]", "dynamics.batch=4", "controller.simulations=3"),
    "controller.batch=5",
]

SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "rem": ("rem-quick", [*_RUN, *_TOKENS, "dynamics.context=2", "controller.latent_channels=[10]"]),
    "iris": ("iris-quick", [*_RUN, *_TOKENS, "dynamics.context=3", "controller.pixel_channels=[4, 6, 8]"]),
    "drama": ("drama-quick", [*_RUN, *LATENTS, *_WINDOWS, "backbone.head_width=8", "backbone.dropout=0.25"]),
    "storm": ("drama-quick", [*_RUN, *LATENTS, *_WINDOWS, "backbone.kind=transformer", "backbone.heads=2"]),
    "s4wm": ("s4wm-quick", [*_RUN, *LATENTS, *_WINDOWS, "backbone.state_size=4", "backbone.dropout=0.25"]),
    "rssm": ("rssm-quick", [*_RUN, *LATENTS, *_WINDOWS, "dynamics.act_window=0"]),
    "unizero": (
        "unizero-quick",
        [
            *(*_RUN, *_PLANNER, "dynamics.sequence_length=4", "dynamics.context=2", "backbone.width=16"),
            *("backbone.layers=1", "backbone.heads=2", "backbone.dropout=0.25"),
        ],
    ),
    "muzero": ("muzero-quick", [*_RUN, *_PLANNER, "dynamics.unroll_steps=2", "dynamics.frame_stack=3"]),
    "cells": (
        "gridworld",
        [
            *("environment.count=3", "collect.steps=60", "run.epochs=1", "dynamics.sequence_length=4"),
            *("dynamics.batch=3", "dynamics.updates=4", "backbone.width=16", "backbone.layers=1"),
            *("backbone.dropout=0.25", "controller.imagination_horizon=2", "evaluation.episodes=1", *_RUN[-4:]),
        ],
    ),
    "memory": (
        "memory-small",
        [
            *("environment.id=wm/DistractingMemory-20-v0", "collect.episodes=4", "collect.validation=2"),
            *("collect.test=1", "run.epochs=1", "evaluation.episodes=1", "tokenizer.categoricals=3"),
            *("tokenizer.classes=5", "tokenizer.channels=[4, 6]", "tokenizer.strides=[4, 2]", "tokenizer.kernel=4"),
            *("tokenizer.posterior_width=8", "dynamics.prior_width=7", "dynamics.head_width=9", "dynamics.batch=2"),
            *("dynamics.sequence_length=50", "dynamics.warmup=0", "dynamics.updates=4", "dynamics.validate_every=3"),
            *("backbone.width=16", "backbone.layers=1", "backbone.state_size=4", "backbone.dropout=0.25", *_RUN[-4:]),
        ],
    ),
}
"""The preset and what makes it tiny, by system."""
