"""`wm/Dream-v0`: gymnasium's contract on every kind of world model, and what controllers see in imagination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from small_systems import Make, learn
from tiny_run import copied, latest

from wmcli import dream
from wmcli.artifacts import Run
from wmcli.assemble import build_controller, settings_of
from wmcli.controllers.base import Learner, Uniforms
from wmcli.dream import DreamVectorEnv
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.trainers.batches import gather

KINDS = {"rem": 16, "drama": 16, "s4wm": 40, "cells": 10, "unizero": 0, "muzero": 0}
"""Each kind of system, and the pixels of a frame's side; 0 where it decodes no frames."""
E_ROWS, STEPS, HORIZON = 5, 7, 3


@pytest.fixture
def dynamics(small: Make) -> Any:
    """`dynamics(system)`: the path of tiny trained dynamics."""
    return lambda system: latest(small(system, trained=True), "dynamics").path


def opened(path: Path, num_envs: int = E_ROWS, **options: Any) -> DreamVectorEnv:
    options = {"observation": "features", "horizon": HORIZON, "device": "cpu", **options}
    env = gymnasium.make_vec("wm/Dream-v0", dynamics=str(path), num_envs=num_envs, **options)
    assert isinstance(env, DreamVectorEnv)
    return env


def actions(env: DreamVectorEnv, steps: int = STEPS) -> np.ndarray:
    return np.random.default_rng(5).integers(env.dreams.world_model.action_space.count, size=(steps, env.num_envs))


def trajectory(env: DreamVectorEnv, seed: int | None) -> list[np.ndarray]:
    """All that an environment gives under the same actions."""
    seen = [env.reset(seed=seed)[0]]
    for action in actions(env):
        *five, info = env.step(action)
        seen += five
        if info:
            seen.append(np.stack(info["final_obs"][info["_final_obs"]]))
    return [np.asarray(each) for each in seen]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


# -- gymnasium's contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_environment_stays_in_its_spaces_and_ends_at_the_horizon(kind: str, dynamics: Any) -> None:
    for observation in ("features", "pixels") if KINDS[kind] else ("features",):
        env = opened(dynamics(kind), observation=observation)
        assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        assert env.observation_space.shape == (E_ROWS, *env.single_observation_space.shape)
        if observation == "pixels":
            assert env.single_observation_space == gymnasium.spaces.Box(0, 255, (KINDS[kind],) * 2 + (3,), np.uint8)
        seen, info = env.reset(seed=3)
        assert seen in env.observation_space and info == {}
        age = np.zeros(E_ROWS, int)
        for action in actions(env):
            seen, reward, terminated, truncated, info = env.step(action)
            age += 1
            assert seen in env.observation_space
            assert reward.shape == (E_ROWS,) and reward.dtype == np.float32 and np.isfinite(reward).all()
            assert terminated.dtype == truncated.dtype == np.bool_
            assert ((age == HORIZON) <= (terminated | truncated)).all()
            assert (truncated <= (age == HORIZON)).all() and not (truncated & terminated).any()
            ended = terminated | truncated
            assert ended.any() == bool(info)
            if info:
                assert (info["_final_obs"] == ended).all()
                for row, last in enumerate(info["final_obs"]):
                    assert last in env.single_observation_space if ended[row] else last is None
            age[ended] = 0
        env.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*Box observation space.*:UserWarning")
def test_gymnasium_finds_no_fault_in_a_single_environment(kind: str, dynamics: Any) -> None:
    mode = {"render_mode": "rgb_array"} if KINDS[kind] else {}
    env = gymnasium.make("wm/Dream-v0", dynamics=dynamics(kind), observation="features", device="cpu", **mode)
    check_env(env.unwrapped, skip_render_check=not mode)
    if mode:
        env.reset(seed=1)
        frame = env.render()
        assert isinstance(frame, np.ndarray) and frame.shape == (KINDS[kind],) * 2 + (3,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one_resets_itself_as_one_would_by_hand(kind: str, dynamics: Any) -> None:
    """Terminal observation, then the observation of `reset`, in the same step."""
    batch = opened(dynamics(kind), 1)
    env = dream.make(dynamics(kind), observation="features", horizon=HORIZON, device="cpu")
    (first,), (own, _) = batch.reset(seed=9)[0], env.reset(seed=9)
    assert np.array_equal(first, own)
    ends = 0
    for action in actions(batch):
        seen, reward, terminated, truncated, info = batch.step(action)
        own, *numbers, _ = env.step(action[0])
        assert numbers == [reward[0], terminated[0], truncated[0]]
        if numbers[1] or numbers[2]:
            ends += 1
            assert np.array_equal(info["final_obs"][0], own)
            own, _ = env.reset()
        assert np.array_equal(seen[0], own)
    assert ends > 1


def test_an_episode_terminates_where_the_model_says(dynamics: Any) -> None:
    env = opened(dynamics("rem"), output="torch")
    last = env.dreams.world_model.termination_head[-1]  # type: ignore[union-attr]
    last.bias.data.copy_(torch.tensor([-100.0, 100.0]))
    env.reset(seed=1)
    _, _, terminated, truncated, info = env.step(np.zeros(E_ROWS, int))
    assert terminated.all() and not truncated.any() and info["_final_obs"].all()
    last.bias.data.copy_(torch.tensor([100.0, -100.0]))
    for step in range(1, HORIZON + 1):
        _, _, terminated, truncated, info = env.step(np.zeros(E_ROWS, int))
        assert not terminated.any() and truncated.all() == (step == HORIZON)


def test_a_step_before_a_reset_is_refused(dynamics: Any) -> None:
    env = dream.make(dynamics("rem"), horizon=1, device="cpu")
    for broken in (env, opened(dynamics("rem"))):
        with pytest.raises(gymnasium.error.ResetNeeded):
            broken.step(0 if broken is env else np.zeros(E_ROWS, int))
    env.reset()
    env.step(0)
    with pytest.raises(gymnasium.error.ResetNeeded, match="over"):
        env.step(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_determines_everything(kind: str, dynamics: Any) -> None:
    env = opened(dynamics(kind))
    once = trajectory(env, seed=1)
    after = trajectory(env, seed=None)
    assert equal(trajectory(env, seed=1), once)
    assert equal(trajectory(opened(dynamics(kind)), seed=1), once)
    assert not equal(after, once)
    assert not equal(trajectory(env, seed=2), once)
    assert equal(trajectory(env, seed=1), once) and equal(trajectory(env, seed=None), after)


def test_tensors_stay_tensors_and_hold_the_same(dynamics: Any) -> None:
    numpy, tensors = opened(dynamics("drama")), opened(dynamics("drama"), output="torch")
    numpy.reset(seed=4)
    tensors.reset(seed=4)
    for action in actions(numpy):
        *want, info = numpy.step(action)
        *got, about = tensors.step(torch.from_numpy(action))
        assert all(isinstance(each, torch.Tensor) for each in got)
        assert equal(want, [each.numpy() for each in got])
        if info:
            ended = info["_final_obs"]
            assert np.array_equal(np.stack(info["final_obs"][ended]), about["final_obs"][ended].numpy())


def test_frames_are_rendered_beside_features(dynamics: Any) -> None:
    env = opened(dynamics("rem"), render_mode="rgb_array")
    pixels = opened(dynamics("rem"), observation="pixels")
    env.reset(seed=2)
    pixels.reset(seed=2)
    for action in actions(env):
        env.step(action)
        shown = env.render()
        assert shown is not None and len(shown) == E_ROWS
        assert np.array_equal(np.stack(shown), pixels.step(action)[0])
    assert pixels.render() is None


# -- what imagination is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rem", "drama", "cells"])
def test_a_controller_sees_the_same_in_its_rollouts(kind: str, dynamics: Any) -> None:
    """For the same windows of experience, actions and uniforms."""
    path = dynamics(kind)
    rows = 40  # some windows run over the ends of episodes
    env = opened(path, rows, horizon=None)
    dreams, model = env.dreams, env.dreams.world_model
    steps = min(dreams.horizon, 4)
    artifact = latest(path.parent.parent, "dynamics")
    settings = settings_of(artifact)
    changes = {"imagination_horizon": steps} | (
        {"start": "posterior"} if kind == "drama" else {"burn_in": model.context - 1}
    )
    controller = settings.controller.model_copy(update=changes)
    torch.manual_seed(0)
    learner = build_controller(settings.model_copy(update={"controller": controller}), model).eval()
    assert isinstance(learner, Learner) and learner.window == model.context

    dreams.seed(6)
    windows = dreams._starts.windows(dreams._host.integers(len(dreams._starts), size=rows))
    batch = gather(
        dreams.replay, model.encode(dreams.replay.observation[None])[0], windows, across_ends=model.across_ends
    )
    draw = dreams._uniforms
    start = torch.rand(*batch.action.shape, model.uniforms_per_frame, generator=draw)
    world = torch.stack([torch.rand(rows, model.uniforms_per_step, generator=draw) for _ in range(steps)])
    rollout = learner.imagine(model, batch, Uniforms(start, torch.rand(steps, rows), world))
    seen = getattr(rollout, "feature", None)
    seen = rollout.observation if seen is None else seen
    reward, terminated = (each[:, -steps:] for each in (rollout.reward, rollout.terminated))

    dreams.seed(6)
    first = dreams.start(np.arange(rows))
    assert torch.equal(first.flatten(1), seen[:, 0].flatten(1))
    for step in range(steps):
        imagined = dreams.step(rollout.action[:, step])
        assert torch.equal(dreams.observe().flatten(1), seen[:, step + 1].flatten(1))
        assert torch.equal(imagined.reward, reward[:, step]) and torch.equal(imagined.terminated, terminated[:, step])


def test_episodes_start_from_given_experience(small: Make) -> None:
    """A start shows the model's picture of a real frame of it, and of no padding."""
    run = small("rem", trained=True)
    env = opened(latest(run, "dynamics").path, observation="pixels", experience=str(latest(run, "experience").path))
    model, memory = env.dreams.world_model, env.dreams.replay
    drawn = {frame.numpy().tobytes() for frame in model.decode(model.encode(memory.observation[None])[0])}
    first = env.reset(seed=1)[0]
    assert all(frame.tobytes() in drawn for frame in first)


# -- errors -----------------------------------------------------------------------------------------------------------


def refused(kind: type[WmError], words: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        dream.make_vec(*arguments, **{"device": "cpu", "num_envs": 2, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["muzero", "unizero"])
def test_a_planner_shows_no_pixels(kind: str, dynamics: Any) -> None:
    refused(UsageError, "decode no frames; use observation='features'", dynamics(kind))
    refused(
        UsageError, "render_mode.*decode no frames", dynamics(kind), observation="features", render_mode="rgb_array"
    )


def test_wrong_arguments_are_named(dynamics: Any) -> None:
    path = dynamics("rem")
    refused(UsageError, "observation = 'pixel': use 'pixels' or 'features'", path, observation="pixel")
    refused(UsageError, "output = 'jax': use 'numpy' or 'torch'", path, output="jax")
    refused(UsageError, "render_mode = 'human'", path, render_mode="human")
    refused(UsageError, "num_envs = 0", path, num_envs=0)
    refused(UsageError, "horizon = 0", path, horizon=0)
    refused(UsageError, "training.device = 'tpu'", path, device="tpu")


def test_a_missing_artifact_and_one_of_another_kind_are_named(small: Make, tmp_path: Path) -> None:
    run = small("rem", trained=True)
    refused(ArtifactError, "No such file.*wm artifacts", tmp_path / "runs" / "dynamics" / "latest")
    refused(ArtifactError, "tokenizer@1, but dynamics is needed.*dynamics/latest", run / "tokenizer" / "latest")
    path = run / "dynamics" / "v0001"
    refused(ArtifactError, "dynamics@1, but experience is needed", path, experience=path)


def test_experience_that_is_gone_can_be_replaced(small: Make, tmp_path: Path) -> None:
    run = copied(small("rem", trained=True), tmp_path / "run")
    path = run / "dynamics" / "v0001"
    assert Run.open(run, create=False).prune("experience", [1]) == [1]
    refused(ArtifactError, "was pruned.*experience=RUN/experience/latest", path)
    other = small("rem", trained=False)
    dream.make_vec(path, 2, experience=other / "experience" / "latest", device="cpu").reset()
    elsewhere = small("cells", trained=False) / "experience" / "latest"
    refused(
        ArtifactError,
        "made with environment id = wm/GridWorld-v0, but this needs wm/Catch-v0",
        path,
        experience=elsewhere,
    )


def test_a_model_without_rewards_is_no_environment(make: Make) -> None:
    run = make("drama")
    learn(run, "dynamics", "dynamics.updates=1", "dynamics.reward=none")
    refused(UsageError, "learned no rewards \\(dynamics.reward = none\\)", run / "dynamics" / "latest")


def test_a_backbone_of_limited_length_is_not_imagined_past_it(make: Make) -> None:
    run = make("rem")
    learn(run, "dynamics", "dynamics.updates=1", "backbone.kind=transformer", "backbone.heads=2")
    path = run / "dynamics" / "latest"  # 6 frames, of which 2 are context
    refused(UsageError, "horizon = 5: this backbone has learned 6 frames.*use horizon=4 or less", path, horizon=5)
    env = dream.make_vec(path, 3, observation="features", device="cpu")
    assert env.dreams.horizon == 4
    env.reset(seed=1)
    for _ in range(30):  # rows of all ages
        seen = env.step(np.random.default_rng(1).integers(3, size=3))[0]
    assert np.isfinite(seen).all()
