"""Mistakes in the wiring of the stages that the tests must notice, each a change of a few words in one file.

A mutation is what a tired colleague could write: a target that never moves, exploration left off, an evaluation in the
training environment. `test_mutations.py` makes them one by one in a copy of the package, and runs the tests named.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One mistake."""

    name: str
    file: str
    before: str
    """Stands once in the file."""
    after: str
    tests: str
    """Arguments of pytest, split at spaces. One of these tests fails."""


TRAINING = "tests/stages/test_wiring_training.py"
MODELS = "tests/stages/test_wiring_models.py"
PLAY = "tests/stages/test_wiring_play.py"
LOOP = "tests/stages/test_stage_loop.py"
FINISHED = "tests/stages/test_finished.py"

MUTATIONS = (
    # -- updates and what follows them
    Mutation(
        "no-step-of-the-optimizer",
        "wmcli/training/optim.py",
        "    optimizer.step()\n    return norm",
        "    return norm",
        TRAINING,
    ),
    Mutation(
        "gradients-add-up",
        "wmcli/training/optim.py",
        "    optimizer.zero_grad(set_to_none=True)\n    loss.backward()",
        "    loss.backward()",
        "tests/training/test_optim.py",
    ),
    Mutation(
        "no-clipping",
        "wmcli/training/optim.py",
        "clip_grad_norm_(parameters, clip, foreach=True)",
        "clip_grad_norm_(parameters, 1e9, foreach=True)",
        TRAINING,
    ),
    Mutation(
        "no-adaptive-clipping",
        "wmcli/training/optim.py",
        '        if group.get("agc"):\n',
        '        if group.get("acg"):\n',
        "tests/training tests/controllers/test_actor_critic.py -k agc or adaptive or clip",
    ),
    Mutation(
        "no-schedule",
        "wmcli/trainers/dynamics.py",
        "        self._schedule.apply(self._optimizer, done, trained)\n",
        "",
        TRAINING,
    ),
    Mutation(
        "schedule-forgets-earlier-versions",
        "wmcli/training/optim.py",
        "sum(trained + update >= each",
        "sum(update >= each",
        TRAINING,
    ),
    Mutation(
        "cosine-rises",
        "wmcli/training/optim.py",
        "share = (1 + math.cos(",
        "share = (1 - math.cos(",
        TRAINING,
    ),
    Mutation(
        "world-models-target-stays",
        "wmcli/trainers/dynamics.py",
        "        world_model.after_update()\n        return metrics",
        "        return metrics",
        TRAINING,
    ),
    Mutation(
        "unizeros-target-jumps",
        "wmcli/world_models/unizero.py",
        "self.settings.target_rate)",
        "1.0)",
        TRAINING,
    ),
    Mutation(
        "muzeros-target-is-never-due",
        "wmcli/world_models/muzero.py",
        "        self._updates += 1\n",
        "",
        TRAINING,
    ),
    Mutation(
        "slow-critic-stays",
        "wmcli/trainers/imagination.py",
        "        controller.after_update()\n",
        "",
        TRAINING,
    ),
    Mutation(
        "slow-critic-moves-the-other-way",
        "wmcli/controllers/actor_critic.py",
        "self.settings.slow_rate)\n\n    def parameter_groups",
        "-self.settings.slow_rate)\n\n    def parameter_groups",
        TRAINING,
    ),
    Mutation(
        "priors-are-not-penalized",
        "wmcli/trainers/dynamics.py",
        "total, metrics = total + penalty, metrics",
        "total, metrics = total, metrics",
        TRAINING,
    ),
    Mutation(
        "priors-leave-their-limits",
        "wmcli/trainers/dynamics.py",
        "        attention_prior.project(world_model)\n",
        "",
        TRAINING,
    ),
    Mutation(
        "training-further-starts-anew",
        "wmcli/stages/train.py",
        '                state.continue_from(inputs["parent"].file(TRAINING))\n',
        "",
        TRAINING,
    ),
    Mutation(
        "every-version-draws-the-same",
        "wmcli/stages/train.py",
        "derived_seed(settings.seed, stage, trained)",
        "derived_seed(settings.seed, stage, 0)",
        TRAINING,
    ),
    Mutation(
        "the-seed-is-ignored",
        "wmcli/stages/train.py",
        "derived_seed(settings.seed, stage, trained)",
        "derived_seed(0, stage, trained)",
        TRAINING,
    ),
    # -- modes and precision
    Mutation(
        "world-model-trains-in-eval-mode",
        "wmcli/stages/dynamics.py",
        ".to(machine.device).train()",
        ".to(machine.device).eval()",
        MODELS,
    ),
    Mutation(
        "a-frozen-model-is-in-training-mode",
        "wmcli/training/device.py",
        "module.to(self.device).eval().requires_grad_(False)",
        "module.to(self.device).requires_grad_(False)",
        MODELS,
    ),
    Mutation(
        "tokenizer-is-measured-in-training-mode",
        "wmcli/trainers/tokenizer.py",
        "        self.tokenizer.eval()\n",
        "",
        MODELS,
    ),
    Mutation(
        "validation-with-dropout",
        "wmcli/trainers/best_weights.py",
        "        world_model.eval()\n",
        "",
        MODELS,
    ),
    Mutation(
        "imagination-without-autocast",
        "wmcli/trainers/imagination.py",
        "with machine.autocast(), torch.set_grad_enabled(controller.differentiates):",
        "with torch.set_grad_enabled(controller.differentiates):",
        MODELS,
    ),
    Mutation(
        "dynamics-without-autocast",
        "wmcli/trainers/dynamics.py",
        "        with machine.autocast():\n            if streams is None:",
        "        with machine.autocast() if streams else torch.enable_grad():\n            if streams is None:",
        MODELS,
    ),
    # -- what is sampled
    Mutation(
        "frequency-sampling-inverted",
        "wmcli/experience/frequency.py",
        "return -trained.astype(np.float64) / temperature",
        "return trained.astype(np.float64) / temperature",
        "tests/experience",
    ),
    Mutation(
        "frequencies-are-not-counted",
        "wmcli/experience/frequency.py",
        "        np.add.at(self._kept, rows, 1)  # windows that are padded on the left share rows\n",
        "",
        "tests/experience",
    ),
    Mutation(
        "imagination-counts-at-another-rate",
        "wmcli/stages/imagine.py",
        "ratio=settings_of(model).dynamics.batch / settings.controller.batch",
        "ratio=settings.controller.batch / settings_of(model).dynamics.batch",
        MODELS,
    ),
    Mutation(
        "imagination-forgets-what-was-trained",
        "wmcli/stages/imagine.py",
        'counts=_counts(context, model, frames) if settings.training.sampling == "dfs" else None',
        "counts=None",
        MODELS,
    ),
    Mutation(
        "the-way-of-sampling-is-ignored",
        "wmcli/trainers/batches.py",
        'if training.sampling != "dfs":',
        "if True:",
        MODELS,
    ),
    Mutation(
        "prioritized-rows-are-not-learned",
        "wmcli/trainers/dynamics.py",
        "        if learn_rows is not None and rows is not None:",
        "        if False:",
        MODELS,
    ),
    Mutation(
        "windows-cross-games",
        "wmcli/trainers/imagination.py",
        "            across_ends=world_model.across_ends,\n            counts=counts,",
        "            across_ends=True,\n            counts=counts,",
        MODELS,
    ),
    Mutation(
        "imagination-starts-too-early",
        "wmcli/trainers/imagination.py",
        "minimum=min(world_model.min_context, controller.window),",
        "minimum=1,",
        MODELS,
    ),
    Mutation(
        "windows-are-padded-on-the-wrong-side",
        "wmcli/trainers/imagination.py",
        'pad="left"',
        'pad="right"',
        f"{MODELS} {PLAY} tests/trainers/test_trainers.py",
    ),
    Mutation(
        "streams-begin-anew-in-every-batch",
        "wmcli/trainers/dynamics.py",
        "            streams.tensors = carried\n",
        "            pass\n",
        MODELS,
    ),
    Mutation(
        "search-results-are-not-learned-from",
        "wmcli/trainers/dynamics.py",
        "gather(self.replay, self._frames, windows, self._targets, across_ends",
        "gather(self.replay, self._frames, windows, SearchTargets(self.replay, self.world_model.action_space)"
        " if self._targets else None, across_ends",
        f"{PLAY} {MODELS}",
    ),
    Mutation(
        "reanalysis-is-not-loaded",
        "wmcli/stages/dynamics.py",
        '            targets.load(read_part(planner.file(TRAINING), "targets"))\n',
        "",
        PLAY,
    ),
    Mutation(
        "validation-is-on-training-episodes",
        "wmcli/stages/dynamics.py",
        'held_out = context.held_out(frames, "validation")',
        "held_out = replay",
        "tests/stages/test_stage_memory_tasks.py tests/stages/test_stage_recorded.py",
    ),
    Mutation(
        "the-worst-weights-are-kept",
        "wmcli/trainers/best_weights.py",
        "if self._newest < self._lowest:",
        "if self._newest > self._lowest or not self._weights:",
        "tests/trainers/test_trainers.py",
    ),
    # -- playing
    Mutation(
        "collecting-does-not-explore",
        "wmcli/stages/player.py",
        "        explore=True,\n",
        "        explore=False,\n",
        PLAY,
    ),
    Mutation(
        "evaluation-explores",
        "wmcli/stages/evaluate.py",
        "temperature=settings.evaluation.temperature, epsilon=0.0, generator=generator",
        "temperature=settings.evaluation.temperature, epsilon=0.0, generator=generator, explore=True",
        PLAY,
    ),
    Mutation(
        "evaluation-takes-random-actions",
        "wmcli/stages/evaluate.py",
        "temperature=settings.evaluation.temperature, epsilon=0.0",
        "temperature=settings.evaluation.temperature, epsilon=0.3",
        PLAY,
    ),
    Mutation(
        "evaluation-at-the-temperature-of-collecting",
        "wmcli/stages/evaluate.py",
        "temperature=settings.evaluation.temperature, epsilon=0.0",
        "temperature=settings.collect.temperature, epsilon=0.0",
        PLAY,
    ),
    Mutation(
        "evaluation-in-the-training-environment",
        "wmcli/stages/episodes.py",
        "streams = open_streams(settings, train=False, seed=seed)",
        "streams = open_streams(settings, train=True, seed=seed)",
        PLAY,
    ),
    Mutation(
        "resumed-evaluation-in-the-training-environment",
        "wmcli/stages/episodes.py",
        'train=False, seed=about["seed"]',
        'train=True, seed=about["seed"]',
        PLAY,
    ),
    Mutation(
        "collecting-in-the-test-environment",
        "wmcli/stages/player.py",
        "return open_streams(settings.environment, train=True",
        "return open_streams(settings.environment, train=False",
        PLAY,
    ),
    Mutation(
        "epsilon-of-collecting-is-lost",
        "wmcli/stages/player.py",
        "epsilon=collecting.epsilon",
        "epsilon=0.0",
        PLAY,
    ),
    Mutation(
        "temperature-of-collecting-is-lost",
        "wmcli/stages/player.py",
        "temperature=collecting.temperature",
        "temperature=1.0",
        PLAY,
    ),
    Mutation(
        "the-controller-hears-of-its-choice",
        "wmcli/controllers/agent.py",
        "followed = executed_action if self.feed_executed_action else choice",
        "followed = choice",
        PLAY,
    ),
    Mutation(
        "the-world-model-hears-of-the-choice",
        "wmcli/controllers/agent.py",
        "self._previous_action = self._put(executed_action)",
        "self._previous_action = self._put(choice)",
        f"{PLAY} tests/controllers/test_agent.py",
    ),
    Mutation(
        "collecting-goes-on-without-the-frames-before",
        "wmcli/stages/player.py",
        "        elif before is not None and isinstance(agent, Agent):",
        "        elif False:",
        PLAY,
    ),
    Mutation(
        "episodes-are-not-opened-for-who-acts",
        "wmcli/stages/player.py",
        "streams.age(agent.across_ends) == 0)",
        "streams.age(agent.across_ends) < 0)",
        PLAY,
    ),
    Mutation(
        "every-segment-draws-the-same-actions",
        "wmcli/stages/player.py",
        'place = ("collect actions", number) if stream is None',
        'place = ("collect actions", 0) if stream is None',
        PLAY,
    ),
    Mutation(
        "the-oldest-controller-collects",
        "wmcli/stages/collect.py",
        'return context.run.latest("controller")',
        'return context.run.get("controller", 1) if context.run.versions("controller") else None',
        PLAY,
    ),
    Mutation(
        "reanalysis-does-not-explore",
        "wmcli/trainers/reanalysis.py",
        "world_state, state, torch.default_generator)",
        "world_state, state, None)",
        PLAY,
    ),
    Mutation(
        "reanalysis-keeps-nothing",
        "wmcli/trainers/reanalysis.py",
        "        self.targets.update(due, *every)\n",
        "",
        PLAY,
    ),
    Mutation(
        "the-worst-controller-is-the-best",
        "wmcli/stages/evaluate.py",
        "for evaluation in reversed(ranked):",
        "for evaluation in ranked:",
        "tests/stages/test_stage_evaluate.py tests/stages/test_evaluate_again.py",
    ),
    # -- the loop
    Mutation(
        "the-loop-trains-on-old-experience",
        "wmcli/stages/loop.py",
        "newest[artifact.kind] = artifact",
        "newest.setdefault(artifact.kind, artifact)",
        LOOP,
    ),
    Mutation(
        "the-tokenizer-is-trained-too-long",
        "wmcli/stages/loop.py",
        "if plan.tokenizer_after < epoch <= plan.tokenizer_epochs and not with_dynamics:",
        "if plan.tokenizer_after < epoch and not with_dynamics:",
        LOOP,
    ),
    Mutation(
        "the-controller-begins-at-once",
        "wmcli/stages/loop.py",
        "if settings.controller.acts and epoch > plan.controller_after:",
        "if settings.controller.acts:",
        LOOP,
    ),
    Mutation(
        "patience-is-ignored",
        "wmcli/artifacts/overview.py",
        "if not patience or not means:",
        "if True:",
        LOOP,
    ),
    Mutation(
        "a-changed-run-is-finished-all-the-same",
        "wmcli/artifacts/finished.py",
        'state is not None and state == note["state"] and',
        "state is not None and",
        FINISHED,
    ),
    Mutation(
        "other-settings-are-the-same-command",
        "wmcli/artifacts/finished.py",
        "if asked and list(asked) != note",
        "if False and list(asked) != note",
        FINISHED,
    ),
)
