"""Models to call: tokenizer, dynamics, controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wmcli.api.evaluation import EpisodeScores, play
from wmcli.api.experience import Experience, check_fits
from wmcli.artifacts import Artifact
from wmcli.artifacts.trust import check_trusted
from wmcli.assemble import Tokenizer, load_controller, load_tokenizer, load_world_model, settings_of
from wmcli.controllers.agent import Agent
from wmcli.controllers.base import Controller
from wmcli.dream import Dreams, DreamVectorEnv, Observation, Output, Reference, RenderMode, machine_for, open_kind
from wmcli.nn.actions import no_action, put_observation
from wmcli.settings import Settings
from wmcli.spaces import Spaces, first_part
from wmcli.training.device import Machine, derived_seed
from wmcli.transfer import to_device
from wmcli.world_models.base import ImaginedStep, State, WorldModel
from wmcli.world_models.open_loop import open_loop

ArrayLike = np.ndarray | Tensor
Frames = ArrayLike | dict[str, ArrayLike]
"""Observations: images (..., H, W, C) uint8 or another part, or a dict of parts. See `wmcli.spaces`."""


@dataclass(frozen=True)
class TokenizerModel:
    """A tokenizer: frames to latents and back."""

    tokenizer: Tokenizer
    settings: Settings
    machine: Machine
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Published with it, or of its training."""
    artifact: Artifact | None = None
    """The artifact that it was loaded from."""

    @classmethod
    def load(cls, reference: Reference, *, device: str = "auto") -> TokenizerModel:
        """Load a tokenizer artifact. Raises ArtifactError, see `load`."""
        artifact = open_kind(reference, "tokenizer")
        settings = settings_of(artifact)
        machine = machine_for(settings.training, device)
        return cls(load_tokenizer(artifact, machine), settings, machine, artifact.metrics, artifact)

    def encode(self, frames: Frames) -> Tensor:
        """Encode observations (..., *part) to tokens (..., K), a categorical tokenizer to probabilities (..., K, C)."""
        with torch.no_grad(), self.machine.autocast():
            return self.tokenizer.encode(put_observation(frames, self.machine.device))

    def decode(self, latents: ArrayLike) -> Any:
        """Decode tokens or latents, as `encode` gives them, to observations: for images (..., H, W, C) uint8."""
        with torch.no_grad(), self.machine.autocast():
            return self.tokenizer.decode(_on(self.machine, latents))


class OpenLoop(NamedTuple):
    """Predictions of a dynamics model under given actions, S steps."""

    frames: Any
    """Observations (B, S, *part), for images (B, S, H, W, C) uint8; None for a model that decodes none."""
    features: Tensor
    """(B, S, ...) float32, the input of a controller."""
    reward: Tensor
    """(B, S) float32."""
    terminated: Tensor
    """(B, S) bool. Steps behind a termination mean nothing."""


@dataclass(frozen=True)
class DynamicsModel:
    """A world model: observes real frames and imagines the next ones."""

    world_model: WorldModel
    settings: Settings
    machine: Machine
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Published with it, or of its training."""
    artifact: Artifact | None = None
    """The artifact that it was loaded from."""

    @classmethod
    def load(cls, reference: Reference, *, device: str = "auto") -> DynamicsModel:
        """Load a dynamics artifact with the tokenizer that it uses. Raises ArtifactError, see `load`."""
        artifact = open_kind(reference, "dynamics")
        settings = settings_of(artifact)
        machine = machine_for(settings.training, device)
        return cls(load_world_model(artifact, machine), settings, machine, artifact.metrics, artifact)

    @property
    def context(self) -> int:
        """Real frames that imagination starts from."""
        return self.world_model.context

    @property
    def spaces(self) -> Spaces:
        """Of the observations that it predicts, and of the actions."""
        return Spaces(self.world_model.observation_space, self.world_model.action_space)

    def encode(self, frames: Frames) -> Any:
        """Encode observations (B, T, *part) to latents (B, T, ...)."""
        with torch.no_grad(), self.machine.autocast():
            return self.world_model.encode(put_observation(frames, self.machine.device))

    def observe(
        self,
        frames: Frames,
        actions: ArrayLike,
        is_first: ArrayLike | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> State:
        """Read real frames; imagination continues after the last of them.

        Args:
            frames: Observations (B, T, *part), for images (B, T, H, W, C) uint8.
            actions: (B, T, *action), taken after each frame. The last one is not used.
            is_first: (B, T) bool: the frame opens an episode, and nothing before it counts. None: the first does.
            generator: Draws latents, for models that do; None is torch's global one.

        Returns:
            The state, opaque: give it to `imagine`, `features` or `frame`.
        """
        machine, latents = self.machine, self.encode(frames)
        if is_first is None:
            reset = torch.zeros(first_part(latents).shape[:2], dtype=torch.bool, device=machine.device)
            reset[:, 0] = True
        else:
            reset = _on(machine, is_first, torch.bool)
        with torch.no_grad(), machine.autocast():
            uniforms = self._uniforms((*reset.shape, self.world_model.uniforms_per_frame), generator)
            return self.world_model.observe(latents, self._actions(actions), reset, uniforms)[1]

    def imagine(
        self, state: State, actions: ArrayLike, *, generator: torch.Generator | None = None
    ) -> tuple[ImaginedStep, State]:
        """Imagine one step.

        Args:
            state: Of B rows, from `observe` or `imagine`. Only its newest continuation is sure to stay valid.
            actions: (B, *action).
            generator: Draws the next latent, for models that do; None is torch's global one.

        Returns:
            The next latent, the reward (B,) and whether the episode ends (B,); and the state at the next frame.
        """
        action = self._actions(actions)
        with torch.no_grad(), self.machine.autocast():
            uniforms = self._uniforms((len(action), self.world_model.uniforms_per_step), generator)
            return self.world_model.imagine(state, action, uniforms)

    def features(self, state: State) -> Tensor:
        """Return the features of the current frames, the input of a controller, (B, ...) float32."""
        with torch.no_grad(), self.machine.autocast():
            return self.world_model.features(state).float()

    def decode(self, latents: ArrayLike) -> Any:
        """Decode latents, or for a model that decodes those (`world_model.decodes`) features, to observations."""
        with torch.no_grad(), self.machine.autocast():
            return self.world_model.decode(_on(self.machine, latents))

    def frame(self, state: State) -> Any:
        """Return the current observations as the model decodes them, (B, *part)."""
        with torch.no_grad(), self.machine.autocast():
            return self.world_model.frame(state)

    def open_loop(self, frames: Frames, actions: ArrayLike) -> OpenLoop:
        """Predict the next frames and rewards under given actions, from the first frames of episodes.

        Draws with torch's global generator.

        Args:
            frames: Observations (B, C, *part), the C real ones to start from.
            actions: (B, C + S, *action): those taken after the real frames, then S - 1 more and one that is not used.
        """
        action, model = self._actions(actions), self.world_model
        latents = self.encode(frames)
        with torch.no_grad(), self.machine.autocast():
            features, steps = open_loop(model, latents, action)
            features = features[:, first_part(latents).shape[1] :].float()
            imagined = torch.stack([step.latent for step in steps], 1)
            decoded = None
            if model.decodes is not None:
                decoded = model.decode(features if model.decodes == "features" else imagined)
        reward = torch.stack([step.reward for step in steps], 1)
        return OpenLoop(decoded, features, reward, torch.stack([step.terminated for step in steps], 1))

    def dream(
        self,
        experience: Experience,
        num_envs: int = 1,
        *,
        observation: Observation = "pixels",
        horizon: int | None = None,
        output: Output = "numpy",
        render_mode: RenderMode | None = None,
    ) -> DreamVectorEnv:
        """Return `wm/Dream-v0` of this model, a gymnasium vector environment. See `wmcli.dream.make_vec`.

        Args:
            experience: Whose frames imagined episodes start from, on this model's device.
            num_envs: Environments side by side, E.
            observation: "pixels" or "features".
            horizon: Imagined steps until truncation; None goes as far as the model was trained to.
            output: "numpy" or "torch".
            render_mode: "rgb_array" lets `render` return frames.
        """
        check_fits(experience, self.spaces, self.machine)
        dreams = Dreams(
            self.world_model,
            experience.replay,
            self.machine,
            num_envs=num_envs,
            observation=observation,
            horizon=horizon,
        )
        return DreamVectorEnv(dreams, output=output, render_mode=render_mode)

    def _actions(self, actions: ArrayLike) -> Tensor:
        like = no_action(self.world_model.action_space, (0,))
        return _on(self.machine, actions, like.dtype)

    def _uniforms(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor | None:
        if generator is None:
            return None
        return torch.rand(shape, generator=generator, device=generator.device).to(self.machine.device)


class Player:
    """Plays with a controller in E environments side by side, and remembers the episode of each."""

    def __init__(self, agent: Agent, machine: Machine) -> None:
        self._agent, self._machine = agent, machine

    def act(self, frames: Frames, is_first: ArrayLike) -> np.ndarray:
        """Return actions (E, *action) for the current observations (E, *part).

        `is_first` (E,) bool marks the rows whose observation opens an episode.
        """
        with self._machine.autocast():
            return self._agent.act(frames, is_first)


@dataclass(frozen=True)
class ControllerModel:
    """A controller and the dynamics model that it sees through."""

    controller: Controller
    dynamics: DynamicsModel
    settings: Settings
    machine: Machine
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Published with it, or of its training."""
    artifact: Artifact | None = None
    """The artifact that it was loaded from."""

    @classmethod
    def load(cls, reference: Reference, *, device: str = "auto") -> ControllerModel:
        """Load a controller artifact with the dynamics model that it learned in. Raises ArtifactError, see `load`."""
        artifact = open_kind(reference, "controller")
        settings, behind = settings_of(artifact), artifact.input("dynamics")
        machine = machine_for(settings.training, device)
        world_model, controller = load_controller(artifact, machine, settings.acting)
        dynamics = DynamicsModel(world_model, settings_of(behind), machine, behind.metrics, behind)
        return cls(controller, dynamics, settings, machine, artifact.metrics, artifact)

    def player(self, num_envs: int = 1, *, temperature: float | None = None, seed: int = 0) -> Player:
        """Return a player for environments side by side.

        Args:
            num_envs: Environments side by side, E.
            temperature: Divides the policy's logits, 0 takes the likeliest action; None takes `evaluation.temperature`.
            seed: Of its actions.
        """
        return Player(self._agent(num_envs, temperature, seed), self.machine)

    def evaluate(self, episodes: int = 100, *, num_envs: int = 8, seed: int = 0, trust: bool = False) -> EpisodeScores:
        """Play complete test episodes of the real environment, the one that it was trained for.

        The run's own seed and `evaluation.environments` give the returns of `wm eval`.

        Args:
            episodes: How many.
            num_envs: Environments side by side.
            seed: Of the environment and of all draws.
            trust: Import the code that its settings name, also if its run was begun elsewhere.

        Raises:
            UsageError: It names code that is not trusted, or the environment cannot be opened.
        """
        if self.artifact is not None:
            check_trusted(self.artifact.run, self.settings.environment.code, trust=trust)
        agent = self._agent(min(num_envs, episodes), None, derived_seed(seed, "eval actions"))
        with self.machine.autocast():
            return play(agent, self.settings.environment, episodes, num_envs, seed)

    def _agent(self, num_envs: int, temperature: float | None, seed: int) -> Agent:
        return Agent(
            self.dynamics.world_model,
            self.controller,
            num_envs,
            temperature=self.settings.evaluation.temperature if temperature is None else temperature,
            epsilon=0.0,
            generator=torch.Generator().manual_seed(seed),
        )


def _on(machine: Machine, values: ArrayLike, dtype: torch.dtype | None = None) -> Tensor:
    return to_device(values, machine.device).to(dtype=dtype)
