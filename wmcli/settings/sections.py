"""Settings of collecting, of evaluation and of the loop of `wm run`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from wmcli.config import KINDS, Section, did_you_mean

Measure = Literal["generation", "recall", "reward", "doors", "probe", "gridworld", "held-out", "training"]
"""A protocol of `wm eval` besides returns, see `wmcli.stages.protocols`."""

MAX_EPISODES = 50_000
"""Episodes whose returns and lengths fit into the manifest of an evaluation."""


class CollectSettings(Section):
    """Base of the ways to collect experience."""

    tag = KINDS["collect"].tag

    policy: str
    """Who plays."""


class LearnedCollectSettings(CollectSettings):
    incidental: ClassVar[tuple[str, ...]] = ("on",)

    policy: Literal["learned"] = "learned"
    """The newest controller plays; before there is one, actions are uniformly random."""
    steps: int = Field(200, ge=1)
    """Length of one collect, over all environments together. An Atari step is 4 frames. [environment steps]"""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the policy's logits before an action is sampled."""
    epsilon: float = Field(0.01, ge=0, le=1)
    """Probability of replacing the action by a uniformly random one."""
    random_actions: Literal["independent", "held"] = "independent"
    """Uniformly random actions, before there is a controller and of epsilon: each drawn anew, or held for n decisions,
    P(n) proportional to n^-2, n at most 128. Epsilon is then the probability that a hold begins. A hold ends with the
    episode and with the collect."""
    feed_executed_action: bool = True
    """Feed the executed action to the controller; false feeds the one before epsilon (public code of REM)."""
    longest_game: int = Field(30_000, ge=1)
    """A game that has lasted longer when a collect begins is given up, and a new one begins: a later process would play
    all of it again first. Its episode counts as truncated. Games of Atari are shorter. [decisions]"""
    test_games: int = Field(0, ge=0)
    """Whole games that a collect plays besides, by the same controller, and holds back: no model is trained on them and
    their steps do not count. For `training.held_out_every` and `wm eval --protocol held-out`. [games]"""
    test_games_every: int = Field(1, ge=1)
    """Interval at which games are held back; the newest ones are measured on until then. [collects]"""
    apart: bool = False
    """Play each environment by itself, one after another, on one thread and with random numbers of its own, instead of
    all in one batch. It takes longer here, and the same experience can be made on several machines, see `on`."""
    on: Literal["here", "ray"] = "here"
    """Where environments are played apart: in wm's own process, or as tasks on the machines of a Ray cluster, that of
    RAY_ADDRESS or else a new one of this machine alone. Results are the same."""

    @model_validator(mode="after")
    def _check_apart(self) -> LearnedCollectSettings:
        if self.on == "ray" and not self.apart:
            raise ValueError(
                "on = 'ray' takes environments that are played apart, and playing them in one batch gives other"
                " experience: set collect.apart=true in a run of its own"
            )
        return self


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
    """Complete episodes that make a score. [episodes]"""
    environments: int = Field(8, ge=1)
    """Parallel environments. [environments]"""
    temperature: float = Field(0.5, ge=0)
    """Divisor of the policy's logits before an action is sampled. 0 takes the most probable action."""
    measures: tuple[Measure, ...] | Literal["auto"] = ()
    """Protocols that `wm run` evaluates at its end besides returns. `auto` takes all of memory tasks that fit the task
    and the model, except the probe, which trains networks of its own."""
    probe_updates: int = Field(2000, ge=1)
    """Training of the probes of `wm eval --protocol probe`. [updates]"""

    @field_validator("measures", mode="before")
    @classmethod
    def _check_measures(cls, value: Any) -> Any:
        measures = get_args(Measure)
        if value == "auto":
            return value
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or "auto" in words or value in measures:
            example = value if value in measures else "generation"
            raise ValueError(f'{value!r} is no list of measures: write ["{example}"], or auto alone')
        for word in words:
            if word not in measures:
                raise ValueError(f"there is no measure {word!r}; {did_you_mean(str(word), (*measures, 'auto'))}")
        return tuple(value)


class RunSettings(Section):
    """The papers' loop: each epoch collects, then trains the models that have started."""

    epochs: int = Field(600, ge=1, le=1_000_000)
    """Length of `wm run`. [epochs]"""
    collect_epochs: int = Field(500, ge=0)
    """Last epoch that collects; 0 trains on the experience that the run has. [epochs]"""
    tokenizer_after: int = Field(5, ge=0)
    """Epochs before the tokenizer begins to train. [epochs]"""
    tokenizer_epochs: int = Field(600, ge=0)
    """Last epoch that trains the tokenizer; fixed codes spare the models after it from learning new ones. 0 where the
    dynamics model trains it. [epochs]"""
    dynamics_after: int = Field(25, ge=0)
    """Epochs before the dynamics model begins to train. [epochs]"""
    controller_after: int = Field(50, ge=0)
    """Epochs before the controller begins to train. [epochs]"""
    evaluate_every: int = Field(10, ge=0)
    """Interval of evaluations during the run; 0 evaluates at its end only. [epochs]"""
    evaluate_episodes: int = Field(16, ge=1)
    """Episodes of an evaluation during the run; the last one takes evaluation.episodes. [episodes]"""
    patience: int = Field(0, ge=0)
    """End the run when so many evaluations in a row do not exceed the best one before, and score that controller; 0
    never does. [evaluations]"""
    pictures_every: int = Field(0, ge=0)
    """Interval at which training writes its pictures, such as a film of imagination; 0 writes them in the last epoch
    only. [epochs]"""
    keep: int = Field(2, ge=1)
    """Newest versions of each model that keep their weights; older ones keep manifest and pictures. [versions]"""
    overlap: bool = False
    """Collect the next epoch's experience in a second process while the models train, with the controller of one epoch
    before. Results are as reproducible as without."""

    @model_validator(mode="after")
    def _check_kept_versions(self) -> RunSettings:
        if self.overlap and self.keep < 2:
            raise ValueError("overlap collects with the last controller but one, which keep = 1 removes: set keep = 2")
        return self

    @model_validator(mode="after")
    def _check_evaluations(self) -> RunSettings:
        if self.patience and not self.evaluate_every:
            raise ValueError("patience counts evaluations, and evaluate_every = 0 makes none: set evaluate_every = 1")
        return self
