"""The tree of all settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, Tag, field_validator, model_validator

from wmcli.backbones import AnyBackbone, BackboneSettings
from wmcli.backbones.retnet import RetNetSettings
from wmcli.config import Identity, Section, chosen_by_kind, lay_over, validate
from wmcli.controllers.actor_critic import ActorCriticSettings
from wmcli.controllers.base import NoControllerSettings
from wmcli.controllers.mcts import MCTSSettings
from wmcli.controllers.reinforce import ReinforceSettings
from wmcli.envs.settings import EnvironmentSettings
from wmcli.nn.attention_prior import AttentionPriorSettings, NoPriorSettings
from wmcli.settings.sections import (
    EvaluationSettings,
    LearnedCollectSettings,
    RecordedCollectSettings,
    RunSettings,
    ScriptedCollectSettings,
)
from wmcli.settings.words import in_numbers
from wmcli.tokenizers.base import NoTokenizerSettings
from wmcli.tokenizers.categorical import CategoricalTokenizerSettings
from wmcli.tokenizers.vq import TokenizerSettings
from wmcli.training.settings import TrainingSettings
from wmcli.world_models.cells import CellsSettings
from wmcli.world_models.latent import LatentWorldModelSettings
from wmcli.world_models.muzero import MuZeroSettings
from wmcli.world_models.token import TokenWorldModelSettings
from wmcli.world_models.unizero import UniZeroSettings

# To add a kind: a class in the file of its part, a line here, and `python -m wmcli.settings.freeze`.
AnyCollect = Annotated[
    Annotated[LearnedCollectSettings, Tag("learned")]
    | Annotated[ScriptedCollectSettings, Tag("scripted")]
    | Annotated[RecordedCollectSettings, Tag("recorded")],
    chosen_by_kind("collect"),
]
AnyTokenizer = Annotated[
    Annotated[TokenizerSettings, Tag("vq")]
    | Annotated[CategoricalTokenizerSettings, Tag("categorical")]
    | Annotated[NoTokenizerSettings, Tag("none")],
    chosen_by_kind("tokenizer"),
]
AnyDynamics = Annotated[
    Annotated[TokenWorldModelSettings, Tag("token")]
    | Annotated[LatentWorldModelSettings, Tag("latent")]
    | Annotated[CellsSettings, Tag("cells")]
    | Annotated[UniZeroSettings, Tag("unizero")]
    | Annotated[MuZeroSettings, Tag("muzero")],
    chosen_by_kind("dynamics"),
]
AnyController = Annotated[
    Annotated[ReinforceSettings, Tag("reinforce")]
    | Annotated[ActorCriticSettings, Tag("actor-critic")]
    | Annotated[MCTSSettings, Tag("mcts")]
    | Annotated[NoControllerSettings, Tag("none")],
    chosen_by_kind("controller"),
]


class Alternatives(Section):
    """Settings of other kinds, from which a change of kind starts."""

    backbone: dict[str, dict[str, Any]] = {}
    """Settings by kind of backbone. --backbone mamba2 starts from alternatives.backbone.mamba2."""
    unused: dict[str, Any] = {}
    """Values of an earlier version's run for keys of other kinds. They identify its jobs."""

    @field_validator("backbone")
    @classmethod
    def _check_kinds(cls, kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for kind, values in kinds.items():
            validate(_OneBackbone, {"backbone": {"kind": kind, **values}}, f"alternatives.backbone.{kind}")
        return kinds


class _OneBackbone(Section):
    backbone: AnyBackbone


class Settings(Section):
    seed: int = Field(1, ge=0)
    """Seed that every random stream of every stage derives from."""
    environment: EnvironmentSettings = EnvironmentSettings()
    collect: AnyCollect = LearnedCollectSettings()
    tokenizer: AnyTokenizer = TokenizerSettings()
    dynamics: AnyDynamics = TokenWorldModelSettings()
    backbone: AnyBackbone = RetNetSettings()
    controller: AnyController = ReinforceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    run: RunSettings = RunSettings()
    training: TrainingSettings = TrainingSettings()
    alternatives: Alternatives = Alternatives()

    @model_validator(mode="before")
    @classmethod
    def _replace_words(cls, values: Any) -> Any:
        return in_numbers(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_sections(self) -> Settings:
        kind = self.dynamics.tokenizer_kind
        if kind is not None and self.tokenizer.kind != kind:
            raise ValueError(
                f"dynamics.kind = '{self.dynamics.kind}' works on a tokenizer of kind '{kind}', but tokenizer.kind is"
                f" '{self.tokenizer.kind}'"
            )
        self.dynamics.check(self.tokenizer, self.backbone)
        for name in ("tokenizer", "dynamics", "controller"):
            section = getattr(self, name)
            if getattr(section, "warmup", 0) and section.optimizer != "laprop" and not hasattr(section, "schedule"):
                raise ValueError(
                    f"{name}.warmup = {section.warmup}, but {name}.optimizer = '{section.optimizer}' does not warm up:"
                    f" set {name}.warmup=0, or the optimizer to laprop"
                )
        if self.controller.searches and not self.dynamics.learns_policy:
            raise ValueError(
                f"controller.kind = '{self.controller.kind}' searches with a policy and a value that dynamics learn,"
                f" and dynamics of kind '{self.dynamics.kind}' learn none: set dynamics.kind to unizero or muzero"
            )
        if not self.dynamics.makes_frames and getattr(self.controller, "input", "") == "pixels":
            raise ValueError(
                f"controller.input = 'pixels' takes imagined frames, and dynamics of kind '{self.dynamics.kind}'"
                " make none: set controller.input = 'latent'"
            )
        curiosity = getattr(self.controller, "curiosity", 0.0)
        if curiosity and getattr(self.dynamics, "ensemble", 0) < 2:
            raise ValueError(
                f"controller.curiosity = {curiosity} rewards the disagreement of an ensemble, and these"
                " dynamics have none: set dynamics.ensemble = 5 (kinds token and latent), or curiosity to 0"
            )
        if self.collect.policy != "learned" and self.run.overlap:
            raise ValueError(
                f"run.overlap = true collects while models train, and {self.collect.policy} episodes are all"
                " collected before: set run.overlap=false"
            )
        self._check_imagination()
        return self

    def _check_imagination(self) -> None:
        """Check that imagination is no longer than a training sequence."""
        longest = self.dynamics.longest_imagination
        if longest is None or self.controller.searches:
            return
        burn_in = self.controller.burn_in_frames if self.dynamics.reads_burn_in else 0
        context = max(self.dynamics.context, burn_in)
        blocks = context + self.controller.imagined_frames
        if blocks > longest:
            raise ValueError(
                f"{'dynamics.context' if context == self.dynamics.context else 'controller.burn_in + 1'} +"
                f" controller.imagination_horizon = {blocks} blocks, but the dynamics model is trained on"
                f" dynamics.sequence_length = {longest}: lower controller.imagination_horizon or raise"
                " dynamics.sequence_length"
            )

    @property
    def attention_prior(self) -> AttentionPriorSettings:
        """Prior of the backbone's attention, of kind `none` where there is no attention."""
        prior = getattr(self.backbone, "prior", None) if self.dynamics.uses_backbone else None
        return prior or NoPriorSettings()

    @property
    def incidental_keys(self) -> set[str]:
        """Keys, `section.key`, that identify no job, see `Section.incidental`."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"{name}.{key}"
            for name, section in sections.items()
            if isinstance(section, Section)
            for key in section.incidental
        }

    @property
    def acting(self) -> dict[str, dict[str, Any]]:
        """Settings of `dynamics` and `controller` that change acting and not training."""
        return {
            "dynamics": {key: getattr(self.dynamics, key) for key in self.dynamics.acting_keys},
            "controller": {key: getattr(self.controller, key) for key in self.controller.acting_keys},
        }

    def backbone_of_kind(self, kind: str) -> BackboneSettings:
        """Return the section that `--backbone kind` would choose."""
        if kind == self.backbone.kind:
            return self.backbone
        values = lay_over(self.plain(), {"backbone": {"kind": kind}})
        return validate(_OneBackbone, {"backbone": values["backbone"]}, f"backbone.kind = {kind}").backbone

    def identity(self, *sections: str) -> Identity:
        """Return the identity of a job that depends on some sections."""
        return _identity(_Same(self), sections)

    def acting_identity(self) -> Identity:
        """Return the identity of acting: the values of `acting`.

        For a controller that searches, they are those of the search alone.
        """
        return _acting_identity(_Same(self))


class _Same:
    """Settings that equal only themselves, as a key: an epoch asks for the identities of its five jobs again."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __hash__(self) -> int:
        return id(self.settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.settings is self.settings


@functools.lru_cache(maxsize=32)
def _identity(same: _Same, sections: tuple[str, ...]) -> Identity:
    settings = same.settings
    plain, changed = settings.plain(), settings.changed()
    chosen = {name: plain[name] for name in (*sections, "alternatives")}
    for section, key in (name.split(".") for name in settings.incidental_keys):
        if section in sections:
            del chosen[section][key]
    return Identity.of_sections(chosen, {name: changed[name] for name in sections if name in changed}, sections)


@functools.lru_cache(maxsize=32)
def _acting_identity(same: _Same) -> Identity:
    settings = same.settings
    plain, changed = settings.plain(), settings.changed()
    keys = [f"{name}.{key}" for name, values in settings.acting.items() for key in values]
    if settings.controller.searches:
        keys = [key for key in keys if key.startswith("controller.")]
    both = ("dynamics", "controller")
    return Identity.of_acting({name: plain[name] for name in both}, {name: changed[name] for name in both}, keys)
