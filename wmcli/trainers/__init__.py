"""Trainers: updates from models, experience in memory and settings, without a run directory.

`wmcli.training.loop.fit` runs any of them. Stages resolve their inputs and publish the result.
"""

from __future__ import annotations

from wmcli.trainers.dynamics import DynamicsTrainer
from wmcli.trainers.held_out import HeldOutLosses
from wmcli.trainers.imagination import ImaginationTrainer
from wmcli.trainers.reanalysis import ReanalysisTrainer
from wmcli.trainers.tokenizer import TokenizerTrainer

__all__ = ["DynamicsTrainer", "HeldOutLosses", "ImaginationTrainer", "ReanalysisTrainer", "TokenizerTrainer"]
