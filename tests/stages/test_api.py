"""`import wmcli`: runs and artifacts by path, models to call, training without a run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_systems import Make, learn, same, tensors, weights
from tiny_run import TINY, copied, latest

import wmcli
import wmcli.api
from wmcli.assemble import load_world_model, settings_of
from wmcli.dream import machine_for, make_vec
from wmcli.envs import EnvironmentSettings
from wmcli.errors import ArtifactError, UsageError
from wmcli.spaces import Discrete

KINDS = ["rem", "drama", "s4wm", "cells", "unizero", "muzero"]


@pytest.fixture
def opened(small: Make) -> Any:
    """`opened(system)`: a tiny run with trained dynamics."""
    return lambda system: wmcli.open_run(small(system, trained=True), device="cpu")


# -- names ------------------------------------------------------------------------------------------------------------


def test_importing_is_light_and_names_are_imported_at_their_first_use() -> None:
    code = (
        "import sys, wmcli; assert not {'torch', 'numpy', 'gymnasium', 'pydantic'} & set(sys.modules);"
        "assert 'open_run' in dir(wmcli); wmcli.__version__; from wmcli import errors;"
        "assert not hasattr(wmcli, 'opne_run') and 'torch' not in sys.modules;"
        "wmcli.open_run; assert 'torch' in sys.modules and 'wmcli.envs' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_are_those_of_the_api() -> None:
    assert wmcli.__all__ == wmcli.api.__all__
    assert all(getattr(wmcli, name) is getattr(wmcli.api, name) for name in wmcli.__all__)


# -- opening ----------------------------------------------------------------------------------------------------------


def test_a_run_and_its_artifacts_are_opened_by_path(tiny: Path) -> None:
    run = wmcli.open_run(tiny, device="cpu")
    assert run.settings.environment.size == 16
    loaded = {kind: wmcli.load(tiny / kind / "latest", device="cpu") for kind in ("experience", "tokenizer")}
    assert isinstance(loaded["experience"], wmcli.Experience) and isinstance(loaded["tokenizer"], wmcli.TokenizerModel)
    assert isinstance(wmcli.load(str(tiny / "dynamics" / "v0001"), device="cpu"), wmcli.DynamicsModel)
    controller = wmcli.load(tiny / "controller" / "best", device="cpu")
    assert isinstance(controller, wmcli.ControllerModel) and controller.artifact is not None
    assert run.controller("best").artifact == run.controller(1).artifact == controller.artifact
    assert run.experience().artifact == latest(tiny, "experience")
    assert controller.metrics["updates"] == 4
    with pytest.raises(UsageError, match="evaluation, which holds no model"):
        wmcli.load(tiny / "evaluation" / "latest")
    with pytest.raises(ArtifactError, match="no dynamics@7 in"):
        run.dynamics(7)
    with pytest.raises(ArtifactError, match="tokenizer@1, but dynamics is needed"):
        wmcli.DynamicsModel.load(tiny / "tokenizer" / "latest")


def test_missing_or_damaged_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no run at"):
        wmcli.open_run(tmp_path / "none")
    run = copied(tiny, tmp_path / "run")
    (run / "run.toml").unlink()
    with pytest.raises(UsageError, match="has no settings yet"):
        _ = wmcli.open_run(run).settings
    file = run / "dynamics" / "v0001" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        wmcli.load(run / "dynamics" / "latest", device="cpu")


# -- experience -------------------------------------------------------------------------------------------------------


def arrays(frames: int = 23, size: int = 16, actions: int = 3) -> dict[str, np.ndarray]:
    """Random play in episodes of 5 frames."""
    rng = np.random.default_rng(0)
    ends = np.arange(frames) % 5 == 4
    return {
        "frames": rng.integers(0, 256, (frames, size, size, 3), np.uint8),
        "action": rng.integers(0, actions, frames),
        "reward": rng.normal(size=frames),
        "terminated": ends & (np.arange(frames) % 2 == 0),
        "truncated": ends & (np.arange(frames) % 2 == 1),
    }


def test_arrays_of_ones_own_are_experience() -> None:
    given = arrays()
    experience = wmcli.Experience.from_arrays(**given, actions=3)
    assert len(experience) == 23 and experience.episodes == 5
    rows = experience.rows()
    for name, values in given.items():
        assert np.array_equal(getattr(rows, name).numpy(), values.astype(getattr(rows, name).numpy().dtype))
    assert rows.is_first.tolist() == [index % 5 == 0 for index in range(23)]
    segments = experience.sample(40, 4, seed=1)
    assert segments.frames.shape == (40, 4, 16, 16, 3) and segments.action.shape == (40, 4)
    assert not segments.is_first[:, 1:].any() and segments.is_first[:, 0].any()
    assert torch.equal(segments.action, experience.sample(40, 4, seed=1).action)
    assert not torch.equal(segments.action, experience.sample(40, 4, seed=2).action)
    with pytest.raises(UsageError, match="no 6 consecutive frames"):
        experience.sample(1, 6)


def test_collected_experience_is_returned_by_episode(opened: Any) -> None:
    experience = opened("rem").experience()
    rows = experience.rows()
    again = wmcli.Experience.from_arrays(
        *(getattr(rows, name).numpy() for name in ("frames", "action", "reward", "terminated", "truncated")), actions=3
    )
    opens = rows.is_first.numpy()
    assert opens.sum() == experience.episodes >= again.episodes  # unfinished episodes of streams end without a flag
    assert (again.rows().is_first <= rows.is_first).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frames": np.zeros((23, 16), np.uint8)}, "frames: uint8"),
        ({"frames": np.zeros((23, 16, 16, 3))}, "frames: float64"),
        ({"frames": {"at": np.full((23, 2), np.nan)}}, "frames at: a value is not finite"),
        ({"reward": np.zeros(22)}, r"reward: shape \(22,\), but there are 23 frames"),
        ({"action": np.full(23, 3)}, "action: whole numbers from 0 to 2"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wmcli.Experience.from_arrays(**arrays() | change, actions=3)


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_encodes_and_decodes(opened: Any) -> None:
    run = opened("rem")
    frames = run.experience().rows().frames[:6]
    tokenizer = run.tokenizer()
    tokens = tokenizer.encode(frames.numpy())
    assert tokens.shape == (6, 16) and torch.equal(tokens, tokenizer.tokenizer.encode(frames))
    assert tokenizer.decode(tokens.numpy()).shape == frames.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_dynamics_model_observes_and_imagines(kind: str, opened: Any) -> None:
    run = opened(kind)
    model, context = run.dynamics(), run.dynamics().context
    segments = run.experience().sample(3, context + 3, seed=1)
    frames, action = segments.frames[:, :context], segments.action[:, :context]
    state = model.observe(frames.numpy(), action.numpy(), generator=torch.Generator().manual_seed(1))
    again = model.observe(frames, action, segments.is_first[:, :context], generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.features(state), model.features(again))
    step, state = model.imagine(state, action[:, -1].numpy(), generator=torch.Generator().manual_seed(2))
    other, after = model.imagine(again, action[:, -1], generator=torch.Generator().manual_seed(2))
    assert torch.equal(step.reward, other.reward) and torch.equal(model.features(state), model.features(after))
    assert step.reward.shape == step.terminated.shape == (3,)

    torch.manual_seed(3)
    predicted = model.open_loop(frames, segments.action)
    assert predicted.reward.shape == predicted.terminated.shape == predicted.features.shape[:2] == (3, 3)
    if model.world_model.decodes is None:
        assert predicted.frames is None
        return
    assert model.frame(state).shape == frames[:, 0].shape and model.frame(state).dtype == torch.uint8
    assert predicted.frames is not None and predicted.frames.shape == (3, 3, *frames.shape[2:])
    torch.manual_seed(3)
    state = model.observe(frames, action)
    for index in range(3):
        step, state = model.imagine(state, segments.action[:, context - 1 + index])
        difference = predicted.frames[:, index].int() - model.frame(state).int()
        assert difference.abs().max() <= 1  # they are decoded in batches of other sizes
        assert torch.equal(predicted.reward[:, index], step.reward)


def test_a_frame_that_opens_an_episode_forgets_those_before_it(opened: Any) -> None:
    model, segments = opened("drama").dynamics(), opened("drama").experience().sample(4, 3, seed=1)
    opens = torch.tensor([[True, False, True]]).expand(4, 3)
    past = model.world_model.frame_features
    assert (model.features(model.observe(segments.frames, segments.action, opens))[:, past:] == 0).all()
    assert (model.features(model.observe(segments.frames, segments.action))[:, past:] != 0).any()


def test_a_model_dreams_as_its_artifact_does(opened: Any) -> None:
    run = opened("drama")
    model = run.dynamics()
    one = model.dream(run.experience(), 4, observation="features", horizon=3)
    other = make_vec(model.artifact, 4, observation="features", horizon=3, device="cpu")
    assert np.array_equal(one.reset(seed=1)[0], other.reset(seed=1)[0])
    for _ in range(5):
        assert np.array_equal(one.step(np.ones(4, int))[0], other.step(np.ones(4, int))[0])
    small = wmcli.Experience.from_arrays(**arrays(size=8), actions=3)
    with pytest.raises(UsageError, match="the experience has 8×8 .* but the model was made for 16×16"):
        model.dream(small)


def test_a_controller_acts_and_is_evaluated_as_wm_eval_does(tiny: Path) -> None:
    controller = wmcli.open_run(tiny, device="cpu").controller()
    player = controller.player(2, seed=1)
    action = player.act(np.zeros((2, 16, 16, 3), np.uint8), np.ones(2, bool))
    assert action.shape == (2,) and set(action.tolist()) <= {0, 1, 2}
    published = latest(tiny, "evaluation").metrics
    settings = controller.settings
    scores = controller.evaluate(5, num_envs=settings.evaluation.environments, seed=settings.seed)
    assert scores.returns.tolist() == published["returns"] and scores.lengths.tolist() == published["lengths"]
    assert scores.mean == published["mean"] and scores.stderr == pytest.approx(published["stderr"])


def test_models_that_compute_in_bfloat16_are_called_in_it(make: Make) -> None:
    run = make("rem")
    for kind in ("dynamics", "controller"):
        learn(run, kind, f"{kind}.updates=1", "training.precision=bfloat16")
    opened = wmcli.open_run(run, device="cpu")
    model, controller, segments = opened.dynamics(), opened.controller(), opened.experience().sample(2, 4)
    assert model.machine.precision == "bfloat16"
    state = model.observe(segments.frames, segments.action)
    _, state = model.imagine(state, segments.action[:, -1])
    assert model.features(state).dtype == torch.float32
    assert torch.equal(model.decode(model.world_model.latent(state)), model.frame(state))
    assert model.open_loop(segments.frames[:, :2], segments.action).features.dtype == torch.float32
    assert controller.player(2).act(segments.frames[:, 0], np.ones(2, bool)).shape == (2,)
    assert controller.evaluate(1).lengths.tolist() == [7]
    env = model.dream(opened.experience(), 2, observation="features", render_mode="rgb_array")
    env.reset(seed=1)
    assert env.step(np.zeros(2, int))[0].dtype == np.float32 and env.render() is not None


def test_a_policy_of_ones_own_is_evaluated() -> None:
    """One that knows Catch, and that the ball opens an episode in the top row."""
    opened = []

    def policy(frames: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        bright = frames[:, ::2, ::2].sum(-1) > 200  # cells
        top = frames[:, 0, ::2, 0] == 255
        assert (top.any(1) == is_first).all()
        opened.append(is_first)
        ball, paddle = bright[:, :-1].any(1).argmax(1), bright[:, -1].argmax(1)
        return np.sign(ball - paddle) + 1

    scores = wmcli.evaluate(policy, EnvironmentSettings(id="wm/Catch-v0", size=16), 20, num_envs=3)
    assert scores.returns.tolist() == [1.0] * 20 and scores.lengths.tolist() == [7] * 20
    assert np.stack(opened).shape[1] == 3


# -- training ---------------------------------------------------------------------------------------------------------


def test_everything_is_trained_without_a_run_directory(tiny: Path) -> None:
    run = wmcli.open_run(tiny, device="cpu")
    experience = run.experience()
    tokenizer = wmcli.train_tokenizer(run.settings, experience, device="cpu")
    assert same(tensors(tokenizer.tokenizer), weights(latest(tiny, "tokenizer")))
    assert tokenizer.metrics["updates"] == 6 and np.isfinite(tokenizer.metrics["loss"])

    def train(seed: int) -> wmcli.ControllerModel:
        settings = wmcli.load_settings("quickstart", *TINY, f"seed={seed}")
        dynamics = wmcli.train_dynamics(settings, experience, tokenizer=tokenizer, device="cpu")
        assert dynamics.metrics["updates"] == 5 and dynamics.world_model.tokenizer is tokenizer.tokenizer
        return wmcli.train_controller(settings, dynamics, experience)

    one, again, other = train(1), train(1), train(2)
    for part in (lambda it: it.dynamics.world_model, lambda it: it.controller):
        assert same(tensors(part(one)), tensors(part(again)))
        assert not same(tensors(part(one)), tensors(part(other)))
    assert one.evaluate(2).lengths.tolist() == [7, 7]
    assert one.controller.training is False and not any(each.requires_grad for each in one.controller.parameters())


@pytest.mark.parametrize("kind", ["drama", "cells", "unizero", "muzero"])
def test_other_dynamics_learn_as_in_the_stage(kind: str, opened: Any) -> None:
    run = opened(kind)
    artifact = run.artifact("dynamics")
    model = wmcli.train_dynamics(settings_of(artifact), run.experience(), device="cpu")
    loaded = load_world_model(artifact, machine_for(settings_of(artifact).training, "cpu"))
    assert same(tensors(model.world_model), tensors(loaded))


def test_dynamics_learn_from_arrays_of_ones_own() -> None:
    changes = ["environment.size=16", "dynamics.updates=2", "dynamics.batch=3", "training.precision=float32"]
    settings = wmcli.load_settings("muzero-quick", *changes)
    experience = wmcli.Experience.from_arrays(**arrays(), actions=3)
    model = wmcli.train_dynamics(settings, experience, device="cpu")
    assert model.spaces.action == Discrete(3) and model.metrics["updates"] == 2 and np.isfinite(model.metrics["loss"])
    planner = wmcli.train_controller(settings, model, experience)
    assert planner.player().act(np.zeros((1, 16, 16, 3), np.uint8), np.ones(1, bool)).shape == (1,)


def test_weights_are_selected_by_held_out_episodes(opened: Any) -> None:
    run = opened("s4wm")
    plain = settings_of(run.artifact("dynamics"))

    def after(updates: int) -> wmcli.DynamicsModel:
        """At a rate that makes every update after the first one worse."""
        changes = {"validate_every": 1, "updates": updates, "learning_rate": 1.0, "schedule": "constant"}
        settings = plain.model_copy(update={"dynamics": plain.dynamics.model_copy(update=changes)})
        return wmcli.train_dynamics(settings, run.experience(), validation=validation, device="cpu")

    validation = run.experience(held_out="validation")
    assert validation.episodes == 2 and run.experience(held_out="test").episodes == 1
    three = after(3)
    best = three.metrics["best_update"]
    assert best < 3 and same(tensors(three.world_model), tensors(after(best).world_model))
    settings = plain.model_copy(update={"dynamics": plain.dynamics.model_copy(update={"validate_every": 1})})
    with pytest.raises(UsageError, match="validation: dynamics.validate_every"):
        wmcli.train_dynamics(settings, run.experience(), device="cpu")
    with pytest.raises(ArtifactError, match="no test episodes"):
        opened("rem").experience(held_out="test")


def test_mismatches_are_refused_before_training(opened: Any) -> None:
    experience = wmcli.Experience.from_arrays(**arrays(), actions=3)
    rem, muzero = (wmcli.load_settings(name, "environment.size=16") for name in ("quickstart", "muzero-quick"))
    with pytest.raises(UsageError, match="'token' need a trained one: give tokenizer="):
        wmcli.train_dynamics(rem, experience, device="cpu")
    with pytest.raises(UsageError, match="'muzero' take none: omit it"):
        wmcli.train_dynamics(muzero, experience, tokenizer=opened("rem").tokenizer(), device="cpu")
    with pytest.raises(UsageError, match="unknown key 'dynamics.lr'"):
        wmcli.load_settings("quickstart", "dynamics.lr=1")
