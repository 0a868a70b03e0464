"""The world model as a gymnasium environment: `wm/Dream-v0`.

An episode starts from real frames and continues in imagination:

    gymnasium.make_vec("wm/Dream-v0", dynamics="runs/x/dynamics/latest", num_envs=64)

All environments of a batch are one state of the world model on its device. A step is one call of the model. When
episodes end, new ones are read into their rows. The host waits for the device once a step, for the flags.

E environments side by side, k of them that start, T real frames. Observations are those of `wmcli.spaces`: of one part,
or a dict. Continuous actions are from -1 to 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from wmcli.artifacts import Artifact, make_command, open_artifact
from wmcli.artifacts.environment import check_same_environment
from wmcli.artifacts.manifest import shown
from wmcli.assemble import load_world_model, settings_of
from wmcli.controllers.base import episode_starts
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import load_experience
from wmcli.experience.sampler import WindowTable
from wmcli.nn.actions import no_action
from wmcli.nn.categorical import uniform
from wmcli.report.observations import draw_observations
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete, Image, PartSpace, map_parts, row_of
from wmcli.trainers.batches import gather
from wmcli.training.device import Machine
from wmcli.training.settings import TrainingSettings
from wmcli.transfer import to_device
from wmcli.world_models.base import ImaginedStep, State, WorldModel

Reference = Artifact | Path | str
"""An artifact, or the path of a version such as `runs/x/dynamics/latest`."""
Observation = Literal["pixels", "features"]
Output = Literal["numpy", "torch"]
RenderMode = Literal["rgb_array"]
UNLIMITED_HORIZON = 15
"""Imagined steps of an episode where the world model has no limit of its own: as DreamerV3 has."""


class Dreams:
    """Imagined episodes side by side on the device, without any rule about when they restart.

    Args:
        world_model: In eval mode.
        replay: Experience whose frames episodes start from.
        machine: Device and precision.
        num_envs: Episodes side by side, E.
        observation: "pixels" are decoded frames, "features" the input of a controller.
        horizon: Imagined steps of an episode; None goes as far as the world model was trained to.

    Raises:
        UsageError: The world model cannot serve as an environment in this way, or the experience is too short.
    """

    def __init__(
        self,
        world_model: WorldModel,
        replay: Replay,
        machine: Machine,
        *,
        num_envs: int,
        observation: Observation = "pixels",
        horizon: int | None = None,
    ) -> None:
        if num_envs < 1:
            raise UsageError(f"num_envs = {num_envs}: at least one environment is needed.")
        if observation not in ("pixels", "features"):
            raise UsageError(f"observation = {observation!r}: use 'pixels' or 'features'.")
        self.world_model, self.replay, self.machine = world_model, replay, machine
        self.num_envs, self.observation = num_envs, observation
        self.kind = world_model.settings.kind
        self.horizon = _horizon(world_model, horizon)
        if not world_model.learns_rewards:
            raise UsageError(
                "this dynamics model has learned no rewards (dynamics.reward = none), so there is nothing to gain in"
                " it; train one with another dynamics.reward."
            )
        if observation == "pixels":
            self.check_decodes("observation = 'pixels'")
        runs, order = replay.runs(world_model.across_ends)
        context = world_model.context
        minimum = context if world_model.across_ends else min(world_model.min_context, context)
        self._starts = WindowTable(runs, order, length=context, minimum=minimum, pad="left")
        self._state: State = None
        self.ages = np.zeros(num_envs, np.int64)
        """(E,) imagined steps of the running episodes."""
        self._host = np.random.default_rng(0)
        self._uniforms = torch.Generator()

    @property
    def space(self) -> gymnasium.Space:
        """The observation space of one environment."""
        if self.observation == "pixels":
            space = map_parts(_gymnasium_space, self.world_model.observation_space)
            return gymnasium.spaces.Dict(space) if isinstance(space, dict) else space
        return gymnasium.spaces.Box(-np.inf, np.inf, self.world_model.feature_shape, np.float32)

    def check_decodes(self, purpose: str) -> None:
        """Raise UsageError if the world model makes no frames, which are needed for some purpose."""
        if self.world_model.decodes is None:
            raise UsageError(
                f"{purpose}: dynamics of kind '{self.kind}' plan in latents and decode no frames; use"
                " observation='features', without render_mode."
            )

    def seed(self, seed: int) -> None:
        """Seed the choice of real frames and everything that the world model draws."""
        self._host = np.random.default_rng(seed)
        self._uniforms.manual_seed(int(self._host.integers(2**63)))

    @torch.no_grad()
    def start(self, rows: np.ndarray) -> Any:
        """Start new episodes from real frames in some rows (k,). Returns their first observations (k, ...)."""
        model, device = self.world_model, self.machine.device
        windows = self._starts.windows(self._host.integers(len(self._starts), size=len(rows)))
        batch = gather(self.replay, self.replay.observation, windows, across_ends=model.across_ends)
        uniforms = uniform((*batch.valid.shape, model.uniforms_per_frame), device, self._uniforms)
        with self.machine.autocast():
            _, fresh = model.observe(model.encode(batch.inputs), batch.action, episode_starts(batch), uniforms)
            if len(rows) == self.num_envs:
                self._state = fresh
            else:
                self._state = model.replace_rows(self._state, torch.from_numpy(rows).to(device), fresh)
            self.ages[rows] = 0
            return self._view(fresh)

    @torch.no_grad()
    def step(self, action: Tensor) -> ImaginedStep:
        """Imagine one step under the actions (E, ...), and move on to the next frames."""
        uniforms = uniform((self.num_envs, self.world_model.uniforms_per_step), self.machine.device, self._uniforms)
        with self.machine.autocast():
            imagined, self._state = self.world_model.imagine(self._state, action, uniforms)
        self.ages += 1
        return imagined

    @torch.no_grad()
    def observe(self) -> Any:
        """Return the current observations as they are decoded, (E, *part), or features (E, ...) float32."""
        with self.machine.autocast():
            return self._view(self._state)

    @torch.no_grad()
    def pictures(self) -> np.ndarray:
        """Return pictures of the current observations as the world model decodes them, (E, H, W, 3) uint8."""
        with self.machine.autocast():
            frame = map_parts(lambda part: part.cpu().numpy(), self.world_model.frame(self._state))
        return draw_observations(self.world_model.observation_space, frame)

    def _view(self, state: State) -> Any:
        if self.observation == "pixels":
            return self.world_model.frame(state)
        return self.world_model.features(state).float()


class DreamVectorEnv(VectorEnv[Any, Any, Any]):
    """`wm/Dream-v0` for `gymnasium.make_vec`: E imagined episodes in one batch.

    An episode terminates where the world model predicts it, and is truncated after `horizon` imagined steps. It starts
    anew in the same step (`AutoresetMode.SAME_STEP`): the observation is the first of the next episode, and
    `info["final_obs"]` holds the last of the old one where `info["_final_obs"]` is True.

    Seeding: `reset(seed=...)` determines everything that follows under the same actions.

    Args:
        dreams: The episodes.
        output: See `make_vec`.
        render_mode: See `make_vec`.

    Raises:
        UsageError: An argument is unknown, or frames are to be rendered of a world model that decodes none.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        dreams: Dreams,
        *,
        output: Output = "numpy",
        render_mode: RenderMode | None = None,
    ) -> None:
        if output not in ("numpy", "torch"):
            raise UsageError(f"output = {output!r}: use 'numpy' or 'torch'.")
        _check_render_mode(dreams, render_mode)
        self.dreams, self.num_envs, self.render_mode, self._output = dreams, dreams.num_envs, render_mode, output
        self.single_observation_space = self.dreams.space
        self.single_action_space = _gymnasium_space(self.dreams.world_model.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start all episodes anew. A `seed` makes everything from here on reproducible; `options` are not used."""
        first = self._np_random is None
        super().reset(seed=seed)
        if seed is not None or first:
            self.dreams.seed(int(self.np_random.integers(2**63)))
        return self._out(self.dreams.start(np.arange(self.num_envs))), {}

    def step(self, actions: np.ndarray | Tensor) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take one action (E, ...) in every environment; see the class for the ends of episodes."""
        dreams = self.dreams
        if self._np_random is None:
            raise gymnasium.error.ResetNeeded("no imagined episode has begun: call reset() first")
        like = no_action(dreams.world_model.action_space, (0,))
        action = to_device(actions, dreams.machine.device).to(like.dtype)
        imagined = dreams.step(action)
        observation = dreams.observe()
        terminated = imagined.terminated.cpu().numpy()
        truncated = ~terminated & (dreams.ages >= dreams.horizon)
        ended = terminated | truncated
        info: dict[str, Any] = {}
        if ended.any():
            info = {"final_obs": self._final(observation, ended), "_final_obs": ended}
            info |= {"final_info": {}, "_final_info": ended.copy()}
            rows = np.flatnonzero(ended)
            where = torch.from_numpy(rows).to(action.device)
            observation = map_parts(
                lambda part, fresh: part.index_copy(0, where, fresh), observation, dreams.start(rows)
            )
        if self._output == "torch":
            return (
                observation,
                imagined.reward,
                imagined.terminated,
                torch.from_numpy(truncated).to(action.device),
                info,
            )
        return self._out(observation), self._out(imagined.reward), terminated, truncated, info

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return a picture of the current frame (H, W, 3) uint8 of each environment, None without `render_mode`."""
        return None if self.render_mode is None else tuple(self.dreams.pictures())

    def _out(self, values: Any) -> Any:
        return values if self._output == "torch" else map_parts(lambda part: part.cpu().numpy(), values)

    def _final(self, observation: Any, ended: np.ndarray) -> Any:
        """Return the last observations of the episodes that ended, in gymnasium's form for NumPy."""
        if self._output == "torch":
            return observation
        rows = np.flatnonzero(ended)
        final = np.full(self.num_envs, None, dtype=object)
        lasts = map_parts(lambda part: part[torch.from_numpy(rows)].cpu().numpy(), observation)
        for place, row in enumerate(rows):
            final[row] = row_of(lasts, place)
        return final


class DreamEnv(gymnasium.Env[Any, Any]):
    """`wm/Dream-v0` for `gymnasium.make`: one imagined episode, which is reset by hand.

    Args:
        dreams: A batch of one.
        render_mode: See `make`.

    Raises:
        UsageError: Frames are to be rendered of a world model that decodes none.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, dreams: Dreams, *, render_mode: RenderMode | None = None) -> None:
        assert dreams.num_envs == 1
        _check_render_mode(dreams, render_mode)
        self.dreams, self.render_mode = dreams, render_mode
        self.observation_space = self.dreams.space
        self.action_space = _gymnasium_space(self.dreams.world_model.action_space)
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode. A `seed` makes everything from here on reproducible; `options` are not used."""
        first = self._np_random is None
        super().reset(seed=seed)
        if seed is not None or first:
            self.dreams.seed(int(self.np_random.integers(2**63)))
        self._over = False
        return map_parts(lambda part: part[0].cpu().numpy(), self.dreams.start(np.arange(1))), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action."""
        if self._over:
            raise gymnasium.error.ResetNeeded("the imagined episode is over: call reset() first")
        imagined = self.dreams.step(_one_action(self.dreams, action))
        terminated = bool(imagined.terminated)
        truncated = not terminated and bool(self.dreams.ages[0] >= self.dreams.horizon)
        self._over = terminated or truncated
        observation = map_parts(lambda part: part[0].cpu().numpy(), self.dreams.observe())
        return observation, float(imagined.reward), terminated, truncated, {}

    def render(self) -> np.ndarray | None:
        """Return a picture of the current frame (H, W, 3) uint8, None without `render_mode`."""
        return None if self.render_mode is None else self.dreams.pictures()[0]


def make_vec(
    dynamics: Reference,
    num_envs: int = 1,
    *,
    experience: Reference | None = None,
    observation: Observation = "pixels",
    horizon: int | None = None,
    device: str = "auto",
    output: Output = "numpy",
    render_mode: RenderMode | None = None,
) -> DreamVectorEnv:
    """Open `wm/Dream-v0` as a vector environment, as `gymnasium.make_vec` does.

    Args:
        dynamics: The dynamics artifact.
        num_envs: Environments side by side, E.
        experience: Experience whose frames episodes start from; None takes that which the dynamics were trained on.
        observation: "pixels" are decoded frames (H, W, C) uint8, "features" the input of a controller, float32.
        horizon: Imagined steps until truncation. None goes as far as the model was trained to imagine.
        device: "auto", "cpu", "cuda" or "cuda:1".
        output: "numpy" arrays, or "torch" tensors that stay on the device. Actions may be either. With "torch",
            `info["final_obs"]` is a tensor (E, ...), of which only the rows of `info["_final_obs"]` count.
        render_mode: "rgb_array" lets `render` return frames.

    Raises:
        ArtifactError: The dynamics or the experience are missing, pruned, damaged or of another environment.
        UsageError: The world model cannot serve as an environment in this way.
    """
    dreams = open_dreams(dynamics, experience, device, num_envs=num_envs, observation=observation, horizon=horizon)
    return DreamVectorEnv(dreams, output=output, render_mode=render_mode)


def make(
    dynamics: Reference,
    *,
    experience: Reference | None = None,
    observation: Observation = "pixels",
    horizon: int | None = None,
    device: str = "auto",
    render_mode: RenderMode | None = None,
) -> DreamEnv:
    """Open `wm/Dream-v0` as a single environment, as `gymnasium.make` does. See `make_vec`."""
    dreams = open_dreams(dynamics, experience, device, num_envs=1, observation=observation, horizon=horizon)
    return DreamEnv(dreams, render_mode=render_mode)


def open_dreams(dynamics: Reference, experience: Reference | None, device: str, **options: Any) -> Dreams:
    """Load a dynamics model and the experience to start from.

    Args:
        dynamics: The dynamics artifact.
        experience: Experience of the same environment; None takes that which the dynamics were trained on.
        device: "auto", "cpu", "cuda" or "cuda:1".
        options: Further arguments of `Dreams`.

    Raises:
        ArtifactError: An artifact is missing, pruned, damaged, of another kind or of another environment.
        UsageError: See `Dreams`.
    """
    model = open_kind(dynamics, "dynamics")
    machine = machine_for(settings_of(model).training, device)
    world_model = load_world_model(model, machine)
    if experience is None:
        replay = _own_experience(model, machine)
    else:
        frames = open_kind(experience, "experience")
        check_same_environment(model.manifest["environment"], frames)
        replay = load_experience(frames, machine.device)
    return Dreams(world_model, replay, machine, **options)


def open_kind(reference: Reference, kind: str) -> Artifact:
    """Open an artifact, by its path if it is not open.

    Raises:
        ArtifactError: It is missing, damaged or of another kind.
    """
    artifact = reference if isinstance(reference, Artifact) else open_artifact(reference)
    if artifact.kind != kind:
        raise ArtifactError(
            f"{shown(artifact.path)} is {artifact.name}, but {kind} is needed here: give a path such as"
            f" {shown(artifact.run / kind / 'latest')}, or make one with: {make_command(kind, artifact.run)}"
        )
    return artifact


def machine_for(settings: TrainingSettings, device: str) -> Machine:
    """Return the machine to use a trained model on: the given device, in the precision that it was trained in.

    Raises:
        UsageError: The device is not there.
    """
    changes = {"device": device, "kernels": "auto", "threads": 0, "cuda_graph": False}
    return Machine.choose(settings.model_copy(update=changes))


def _own_experience(dynamics: Artifact, machine: Machine) -> Replay:
    try:
        return load_experience(dynamics.input("experience"), machine.device)
    except ArtifactError as error:
        raise ArtifactError(
            f"{error} To start {dynamics.name} from other experience, give experience=RUN/experience/latest."
        ) from None


def _horizon(world_model: WorldModel, horizon: int | None) -> int:
    """Return the imagined steps of an episode.

    Raises:
        UsageError: The backbone has not learned as many positions.
    """
    settings = world_model.settings
    longest = settings.longest_imagination
    if horizon is not None and horizon < 1:
        raise UsageError(f"horizon = {horizon}: an episode has at least one step.")
    if longest is None:
        return horizon or UNLIMITED_HORIZON
    most = longest - settings.context
    limited = world_model.backbone.max_length is not None  # type: ignore[union-attr]
    if horizon is not None and limited and horizon > most:
        raise UsageError(
            f"horizon = {horizon}: this backbone has learned {longest} frames (dynamics.sequence_length), of which"
            f" {settings.context} are real; use horizon={most} or less, or train with a longer sequence."
        )
    return horizon or most


def _check_render_mode(dreams: Dreams, mode: str | None) -> None:
    if mode not in (None, "rgb_array"):
        raise UsageError(f"render_mode = {mode!r}: use 'rgb_array' or None.")
    if mode is not None:
        dreams.check_decodes("render_mode = 'rgb_array'")


def _one_action(dreams: Dreams, action: Any) -> Tensor:
    like = no_action(dreams.world_model.action_space, (0,))
    return to_device(np.asarray(action), dreams.machine.device).to(like.dtype)[None]


def _gymnasium_space(space: PartSpace | ActionSpace) -> gymnasium.Space:
    """Return the space of gymnasium whose values are those of `wmcli.spaces`."""
    if isinstance(space, Discrete):
        return gymnasium.spaces.Discrete(space.count)
    if isinstance(space, Categories):
        return gymnasium.spaces.MultiDiscrete(list(space.sizes))
    if isinstance(space, Image):
        return gymnasium.spaces.Box(0, 255, space.shape, np.uint8)
    bound = 1.0 if isinstance(space, Continuous) else np.inf
    return gymnasium.spaces.Box(-bound, bound, space.shape, np.float32)
