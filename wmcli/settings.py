"""All sections of the settings in one tree, and how a preset and overrides become it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag, field_validator, model_validator

from wmcli.backbones import BackboneSettings
from wmcli.config import Section, chosen_by_kind, did_you_mean, merge, nested, parse_override, preset_values, validate
from wmcli.controllers.actor_critic import ActorCriticSettings
from wmcli.controllers.mcts import MCTSSettings
from wmcli.controllers.reinforce import ReinforceSettings
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import UsageError
from wmcli.nn.attention_prior import AttentionPriorSettings
from wmcli.tokenizers.categorical import CategoricalTokenizerSettings
from wmcli.tokenizers.vq import TokenizerSettings
from wmcli.training.settings import TrainingSettings
from wmcli.world_models.cells import CellsSettings
from wmcli.world_models.latent import LatentWorldModelSettings
from wmcli.world_models.muzero import MuZeroSettings
from wmcli.world_models.token import TokenWorldModelSettings
from wmcli.world_models.unizero import UniZeroSettings

DEFAULT_KINDS = {"tokenizer": "vq", "dynamics": "token", "controller": "reinforce"}
"""Sections of which there are several kinds, and the one of each where none is named."""
AnyTokenizer = Annotated[
    Annotated[TokenizerSettings, Tag("vq")] | Annotated[CategoricalTokenizerSettings, Tag("categorical")],
    chosen_by_kind(DEFAULT_KINDS["tokenizer"]),
]
AnyDynamics = Annotated[
    Annotated[TokenWorldModelSettings, Tag("token")]
    | Annotated[LatentWorldModelSettings, Tag("latent")]
    | Annotated[CellsSettings, Tag("cells")]
    | Annotated[UniZeroSettings, Tag("unizero")]
    | Annotated[MuZeroSettings, Tag("muzero")],
    chosen_by_kind(DEFAULT_KINDS["dynamics"]),
]
AnyController = Annotated[
    Annotated[ReinforceSettings, Tag("reinforce")]
    | Annotated[ActorCriticSettings, Tag("actor-critic")]
    | Annotated[MCTSSettings, Tag("mcts")],
    chosen_by_kind(DEFAULT_KINDS["controller"]),
]
WANTED_TOKENIZER = {"token": "vq", "latent": "categorical", "cells": None, "unizero": None, "muzero": None}
"""The kind of tokenizer that each kind of dynamics works on; None has no use for one."""
PLANNED = ("unizero", "muzero")
"""Kinds of dynamics that learn a policy and a value, for a search to plan with."""


Measure = Literal["generation", "recall", "reward", "doors", "probe"]
"""What can be measured of a memory model: see wmcli/stages/memory.py and probe.py."""


MAX_EPISODES = 50_000
"""Returns and lengths of so many episodes fit into the manifest of an evaluation."""


class CollectSettings(Section):
    policy: Literal["learned", "scripted", "recorded"] = "learned"
    """Who plays: the newest controller (at random before there is one), a memory task's script, whole episodes, or
    whoever played the trajectories of Memory Maze that lie in `recorded`."""
    recorded: str = ""
    """Recorded: the folder of Memory Maze's offline data, npz files, in `train` and `eval` below it if there are."""
    episodes: int = Field(1000, ge=1)
    """Scripted, recorded: episodes to train on that one collect adds."""
    validation: int = Field(100, ge=0)
    """Scripted, recorded: episodes held back to choose weights by."""
    test: int = Field(200, ge=0)
    """Scripted, recorded: episodes held back for what `wm eval` measures."""
    steps: int = Field(200, ge=1)
    """Decisions one collect takes, over all environments together (a decision is 4 frames in Atari)."""
    temperature: float = Field(1.0, gt=0)
    """Divides the policy's logits before an action is sampled."""
    epsilon: float = Field(0.01, ge=0, le=1)
    """Probability of replacing the action by a uniformly random one."""
    feed_executed_action: bool = True
    """Tell the controller the action that was executed; the public code of REM tells it the one before epsilon."""

    @model_validator(mode="after")
    def _recordings_lie_somewhere(self) -> CollectSettings:
        if self.policy == "recorded" and not self.recorded:
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


class Settings(Section):
    seed: int = Field(1, ge=0)
    """Every random stream of every stage derives from it."""
    environment: EnvironmentSettings = EnvironmentSettings()
    collect: CollectSettings = CollectSettings()
    tokenizer: AnyTokenizer = TokenizerSettings()
    dynamics: AnyDynamics = TokenWorldModelSettings()
    backbone: BackboneSettings = BackboneSettings()
    controller: AnyController = ReinforceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    run: RunSettings = RunSettings()
    training: TrainingSettings = TrainingSettings()

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        wanted = WANTED_TOKENIZER[self.dynamics.kind]
        if wanted is not None and self.tokenizer.kind != wanted:
            raise ValueError(
                f"dynamics.kind = '{self.dynamics.kind}' works on a tokenizer of kind '{wanted}', but tokenizer.kind is"
                f" '{self.tokenizer.kind}'"
            )
        if (
            isinstance(self.dynamics, TokenWorldModelSettings)
            and isinstance(self.tokenizer, TokenizerSettings)
            and self.dynamics.shared_embeddings
            and self.tokenizer.width != self.backbone.width
        ):
            raise ValueError(
                f"tokenizer.width is {self.tokenizer.width} but backbone.width is {self.backbone.width}: shared"
                " embeddings need them equal, or set dynamics.shared_embeddings=false"
            )
        for name in DEFAULT_KINDS:
            section = getattr(self, name)
            if getattr(section, "warmup", 0) and section.optimizer != "laprop" and not hasattr(section, "schedule"):
                raise ValueError(
                    f"{name}.warmup = {section.warmup}, but {name}.optimizer = '{section.optimizer}' does not warm up:"
                    f" set {name}.warmup=0, or the optimizer to laprop"
                )
        if self.controller.searches and self.dynamics.kind not in PLANNED:
            raise ValueError(
                f"controller.kind = 'mcts' searches with a policy and a value that the dynamics learn, and dynamics of"
                f" kind '{self.dynamics.kind}' learn none: set dynamics.kind to {' or '.join(PLANNED)}"
            )
        if self.dynamics.kind in PLANNED and getattr(self.controller, "input", "") == "pixels":
            raise ValueError(
                f"controller.input = 'pixels' looks at imagined frames, and dynamics of kind '{self.dynamics.kind}'"
                " make none: set controller.input = 'latent'"
            )
        if self.collect.policy != "learned" and self.run.overlap:
            raise ValueError(
                f"run.overlap = true collects while models train, and {self.collect.policy} episodes are all there"
                " before: set run.overlap=false"
            )
        if isinstance(self.dynamics, UniZeroSettings | MuZeroSettings) or isinstance(self.controller, MCTSSettings):
            return self  # these may imagine for longer than they were trained to
        self._check_horizon(self.dynamics, self.controller)
        return self

    @staticmethod
    def _check_horizon(
        dynamics: TokenWorldModelSettings | LatentWorldModelSettings | CellsSettings,
        controller: ReinforceSettings | ActorCriticSettings,
    ) -> None:
        """Imagination goes no further than training did."""
        context = dynamics.context
        if isinstance(dynamics, LatentWorldModelSettings) and isinstance(controller, ReinforceSettings):
            context = max(context, controller.burn_in + 1)  # it reads all the frames of the burn-in
        blocks = context + controller.imagination_horizon
        if isinstance(controller, ActorCriticSettings) and controller.start == "prior":
            blocks += 1
        if blocks > dynamics.sequence_length:
            raise ValueError(
                f"{'dynamics.context' if context == dynamics.context else 'controller.burn_in + 1'} +"
                f" controller.imagination_horizon = {blocks} blocks, but the dynamics model is trained on"
                f" dynamics.sequence_length = {dynamics.sequence_length}: lower controller.imagination_horizon or raise dynamics.sequence_length"
            )

    @property
    def plans(self) -> bool:
        """Whether the controller searches in the dynamics model."""
        return isinstance(self.controller, MCTSSettings)

    @property
    def attention_prior(self) -> AttentionPriorSettings:
        """What the backbone's attention expects of distance; of kind "none" where there is no attention."""
        chosen = getattr(self.backbone, self.backbone.kind.replace("-", "_"))
        if self.dynamics.kind == "muzero":
            return AttentionPriorSettings()
        return getattr(chosen, "prior", AttentionPriorSettings())

    @property
    def encoder(self) -> Literal["tokenizer", "dynamics", "itself", "rules"]:
        """What turns frames into latents: a tokenizer trained before, one that is a part of the dynamics model and
        trained with it, the dynamics model itself, or fixed rules."""
        if self.dynamics.kind in PLANNED:
            return "itself"
        if isinstance(self.dynamics, CellsSettings):
            return "rules"
        if isinstance(self.dynamics, LatentWorldModelSettings):
            return "itself" if self.dynamics.decodes_state else "dynamics"
        return "tokenizer"

    @property
    def acting(self) -> dict[str, Any]:
        """The settings of dynamics and controller that matter when it is acted with, and not when it is trained."""
        if isinstance(self.controller, MCTSSettings):
            search = self.controller.identity()
            return {"search": {key: value for key, value in search.items() if key not in ("batch", "updates")}}
        if not isinstance(self.dynamics, LatentWorldModelSettings):
            return {}
        return {key: getattr(self.dynamics, key) for key in ("act_on", "act_window")}

    def select(self, *sections: str) -> dict[str, Any]:
        """Plain values of some sections: what a stage's result depends on."""
        return {name: value for name, value in self.identity().items() if name in sections}


def resolve(preset: str, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Settings:
    """The settings of `preset` (or the plain values `base` in its place) with `a.b=c` overrides laid on top.

    An override that changes the `kind` of a section starts that section from its defaults.

    Raises UsageError with one line for an unknown preset or key, a wrong type or an impossible combination.
    """
    values = dict(base) if base is not None else preset_values(preset)
    where = f"preset {preset}"
    for text in overrides:
        path, value = parse_override(text)
        if path[1:] == ("kind",) and value != _kind(values, path[0]):
            values = {**values, path[0]: {}}  # the keys of another kind mean nothing to this one
        values = merge(values, nested(path, value))
        where = f"--set {text}" if len(overrides) == 1 else "--set"
    settings = validate(Settings, values, where)
    ignored = _ignored(settings)
    if ignored and (base is None or not _ignored(validate(Settings, base, where))):
        raise UsageError(f"{where}: {ignored}")
    return settings


def _ignored(settings: Settings) -> str | None:
    """Say which setting would count for nothing. Runs of 0.1.0 may have it: they are read, and go on, as they began."""
    rows = getattr(settings.dynamics, "rows", "windows")
    if settings.training.sampling == "dfs" and rows != "windows":
        return (
            f"training.sampling = 'dfs' favors windows that were drawn less often, but dynamics.rows = '{rows}' takes"
            " all episodes in turn: set training.sampling=windows, or dynamics.rows=windows"
        )
    return None


def _kind(values: Mapping[str, Any], section: str) -> Any:
    given = values.get(section, {})
    return given.get("kind", DEFAULT_KINDS.get(section)) if isinstance(given, Mapping) else None


def flatten(values: Section | Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, or their plain values, as `{"controller.learning_rate": 1e-4, ...}` in the same order."""

    def walk(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield prefix + key, value

    return dict(walk("", values.model_dump(mode="json") if isinstance(values, Section) else values))
