"""Sections that belong to no part: collecting, evaluation, the loop of `wm run`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from wmcli.config import KINDS, Section, did_you_mean

Measure = Literal["generation", "recall", "reward", "doors", "probe"]
"""What can be measured of a memory model: see wmcli/stages/memory_tasks.py and probe.py."""


MAX_EPISODES = 50_000
"""Returns and lengths of so many episodes fit into the manifest of an evaluation."""


class CollectSettings(Section):
    """Base of the ways to collect experience."""

    tag = KINDS["collect"].tag

    policy: str
    """Who plays."""


class LearnedCollectSettings(CollectSettings):
    policy: Literal["learned"] = "learned"
    """The newest controller plays; before there is one, actions are uniformly random."""
    steps: int = Field(200, ge=1)
    """Steps of one collect, over all environments together; an Atari step is 4 frames. [environment steps]"""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the policy's logits before an action is sampled."""
    epsilon: float = Field(0.01, ge=0, le=1)
    """Probability of replacing the action by a uniformly random one."""
    feed_executed_action: bool = True
    """Feed the executed action to the controller; false feeds the one before epsilon (public code of REM)."""


class EpisodesCollectSettings(CollectSettings):
    """Base of the ways that collect whole episodes and hold some of them out."""

    episodes: int = Field(1000, ge=1)
    """Training episodes that one collect adds. [episodes]"""
    validation: int = Field(100, ge=0)
    """Held-out episodes for the selection of checkpoints. [episodes]"""
    test: int = Field(200, ge=0)
    """Held-out episodes for `wm eval`. [episodes]"""


class ScriptedCollectSettings(EpisodesCollectSettings):
    policy: Literal["scripted"]
    """The script of a memory task plays."""


class RecordedCollectSettings(EpisodesCollectSettings):
    policy: Literal["recorded"]
    """Trajectories of Memory Maze are read from `recordings`."""
    recordings: str = ""
    """Folder of Memory Maze's offline data: npz files, possibly below `train` and `eval`."""

    @model_validator(mode="after")
    def _recordings_lie_somewhere(self) -> RecordedCollectSettings:
        if not self.recordings:
            raise ValueError("policy 'recorded' reads Memory Maze's trajectories: set collect.recordings=FOLDER")
        return self


class EvaluationSettings(Section):
    episodes: int = Field(100, ge=1, le=MAX_EPISODES)
    """Complete episodes that make a score."""
    environments: int = Field(8, ge=1)
    """Environments side by side."""
    temperature: float = Field(0.5, ge=0)
    """Divides the policy's logits before an action is sampled; 0 takes the likeliest action."""
    measures: tuple[Measure, ...] | Literal["auto"] = ()
    """What `wm run` measures in the end of a dynamics model that learned a memory task: a list, or auto, every measure
    that fits the task and the model but the probe, which trains networks of its own."""
    probe_updates: int = Field(2000, ge=1)
    """Updates of the probes that `wm eval --protocol probe` trains."""

    @field_validator("measures", mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        measures = get_args(Measure)
        if given == "auto":
            return given
        words = [given] if isinstance(given, str) else given
        if not isinstance(words, list | tuple) or "auto" in words or given in measures:
            example = given if given in measures else "generation"
            raise ValueError(f'{given!r} is no list of measures: write ["{example}"], or auto alone')
        for word in words:
            if word not in measures:
                raise ValueError(f"there is no measure {word!r}; {did_you_mean(str(word), (*measures, 'auto'))}")
        return tuple(given)


class RunSettings(Section):
    """The papers' loop: each epoch collects, then trains what has started."""

    epochs: int = Field(600, ge=1)
    """Epochs of `wm run`."""
    collect_epochs: int = Field(500, ge=1)
    """Only the first so many epochs collect."""
    tokenizer_after: int = Field(5, ge=0)
    """The tokenizer trains in epochs after this one."""
    tokenizer_epochs: int = Field(600, ge=0)
    """Only the first so many epochs train it: codes that stay spare the models after it learning them anew. 0 where
    the dynamics model trains it."""
    dynamics_after: int = Field(25, ge=0)
    """The dynamics model trains in epochs after this one."""
    controller_after: int = Field(50, ge=0)
    """The controller trains in epochs after this one."""
    evaluate_every: int = Field(10, ge=0)
    """Epochs between evaluations on the way; 0 evaluates only at the end."""
    evaluate_episodes: int = Field(16, ge=1)
    """Episodes of an evaluation on the way; the last one takes evaluation.episodes."""
    keep: int = Field(2, ge=1)
    """Newest versions of each model whose weights stay on disk; of older ones only the manifest does."""
    overlap: bool = False
    """Collect the next epoch's experience in a second process while this epoch's models train. A controller that is one
    epoch older plays it then; what comes out is as reproducible. Off: collect, then train."""

    @model_validator(mode="after")
    def _who_collects_is_kept(self) -> RunSettings:
        if self.overlap and self.keep < 2:
            raise ValueError("overlap collects with the last controller but one, which keep = 1 removes: set keep = 2")
        return self
