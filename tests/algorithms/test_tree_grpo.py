"""Tree-GRPO on trees that the scheduler grew: upstream's advantages, sums over leaves as gradients, what its
settings refuse.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.tree_grpo import TreeGrpo, TreeGrpoSettings
from outrider.config import load_settings, validate
from outrider.errors import ConfigError
from outrider.rollout.settings import Limits
from outrider.trace import Trace
from outrider.training.packing import RolloutPath
from outrider.training.settings import RunSettings, UpdateSettings
from outrider.training.update import update
from tests.objectives import nested
from tests.rollout.fakes import (
    CopyableFake,
    Factory,
    random_ids_engine,
    scheduler,
    tasks,
    three_observations,
)
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    padded_logprobs,
    shift,
    written_loss,
)
from tests.vectors import load_vectors

CASES = load_vectors("advantages")


def grown(algorithm: TreeGrpo, returns: list[float], *, seed: int = 0) -> Trace:
    """A group of real trees whose leaves have these returns."""
    runs = scheduler(
        random_ids_engine(),
        Factory(lambda task, number: CopyableFake(on_step=three_observations)), hooks=algorithm.hooks,
        limits=Limits(step_timeout_s=60), seed=seed,
    )  # fmt: skip
    [trace] = runs.run(tasks(1), modes=algorithm.modes, training_step=0).traces
    for rollout, value in enumerate(returns):
        trace.leaves[rollout].episode_return = value
    return trace


def algorithm(**options: Any) -> TreeGrpo:
    return TreeGrpo(validate(TreeGrpoSettings, nested(options)))


@pytest.mark.parametrize(("name", "combination"), [("tree_inner", "inner"), ("tree_2norm", "nested")])
def test_upstream_advantages_on_grown_trees(name: str, combination: str) -> None:
    case = CASES[f"tree_grpo.{name}"]
    returns, expected = case["inputs"]["leaf_rewards"][:6], case["expected"]["advantage"][:6]
    chosen = algorithm(combination=combination)
    trace = grown(chosen, returns)
    credit = chosen.assign_advantages(trace)
    np.testing.assert_allclose([leaf.advantage or 0.0 for leaf, _ in trace.rollouts()], expected, atol=1e-9)
    assert credit.measurements["tree/fraction_without_spread"] == [0.0, 1.0]
    both = algorithm()
    sums = grown(both, returns)
    both.assign_advantages(sums)
    outer = group_normalized_advantages_per_rollout(returns=returns).values
    inner = np.array(CASES["tree_grpo.tree_inner"]["expected"]["advantage"][:6])
    np.testing.assert_allclose(
        [leaf.advantage or 0.0 for leaf, _ in sums.rollouts()], outer + inner, atol=1e-9
    )


def test_within_a_tree_the_sum_is_zero_and_one_tree_is_twice_grpo() -> None:
    returns = [0.2, 1.0, 0.0, 0.4, 0.9, 0.9, 0.1, 0.5]
    inner = algorithm(num_expansions=3, combination="inner")
    trace = grown(inner, returns)
    inner.assign_advantages(trace)
    values = [leaf.advantage or 0.0 for leaf, _ in trace.rollouts()]
    assert abs(sum(values[:4])) < 1e-12 and abs(sum(values[4:])) < 1e-12 and any(values)
    alone = algorithm(num_trees=1, num_expansions=7)
    trace = grown(alone, returns)
    alone.assign_advantages(trace)
    grpo = group_normalized_advantages_per_rollout(returns=returns).values
    np.testing.assert_allclose(
        [leaf.advantage or 0.0 for leaf, _ in trace.rollouts()], 2.0 * grpo, rtol=1e-12
    )


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
@pytest.mark.parametrize(
    "options", [{}, {"num_kept": 2}, {"num_rounds": 2, "aggregation": "sequence_mean_token_mean"}], ids=str
)
def test_a_shared_tokens_gradient_is_the_sum_over_its_leaves(
    options: dict[str, Any], max_tokens: int
) -> None:
    """Against every kept leaf as a sequence of its own, in float64, over two epochs in which clips act."""
    chosen = algorithm(dual_clip=1.05, clip_high=0.01, clip_low=0.02, **options)
    returns = np.random.default_rng(1).random(chosen.settings.group_size).round(2).tolist()
    trace = grown(chosen, returns, seed=4)
    credit = chosen.assign_advantages(trace)
    assert credit.measurements["tree/tokens_shared"][0] > 0
    kept = [(leaf, path) for leaf, path in trace.rollouts() if leaf.rollout not in trace.pruned]
    assert len(kept) == 2 * (chosen.settings.num_kept or chosen.settings.tree_size)
    paths = []
    for index, (leaf, path) in enumerate(kept):
        assert leaf.advantage is not None
        own = [
            replace(node, shares=None, owner=None, credit=(leaf.advantage,) * len(node.token_ids))
            for node in path
        ]
        paths.append(RolloutPath(nodes=own, rollout_index=index))
    model = tiny_model(dtype=torch.float64)
    plain, policy = eager(model), Recorder(model, shift)
    settings = UpdateSettings(num_epochs=2, max_tokens=max_tokens)
    report = update(policy, [trace], objective=chosen.objective, settings=settings, reference=None)
    with torch.no_grad():
        olds = padded_logprobs(plain, paths)
    for found in policy.gradients:
        loss = written_loss(padded_logprobs(plain, paths), olds, paths, chosen.objective, None)
        assert_equal_gradients(found, gradients_of(plain, loss))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift(name, parameter))
    assert report.metrics["ratio/clip_fraction_high"] > 0
    if max_tokens == 10_000:
        unique = {node.node_id: len(node.token_ids) for _, path in kept for node in path if node.trainable}
        assert report.num_scored_tokens == 2 * sum(unique.values())  # each token once an epoch


def test_pruned_leaves_are_in_no_statistic() -> None:
    chosen = algorithm(num_kept=2)
    trace = grown(chosen, [1.0] * 6)
    for rollout in trace.pruned:
        trace.leaves[rollout].episode_return = 0.0
    credit = chosen.assign_advantages(trace)
    assert credit.advantages.reason == "no_spread" and len(trace.pruned) == 2
    for leaf, path in trace.rollouts():
        assert (leaf.advantage is None) == (leaf.rollout in trace.pruned)
        assert leaf.advantage is not None or path[-1].credit is None


def test_the_size_of_a_group_follows_and_presets_fill_in() -> None:
    assert validate(TreeGrpoSettings, {}).group_size == 6
    assert validate(TreeGrpoSettings, {"num_trees": 3, "num_rounds": 2}).group_size == 15
    official = validate(TreeGrpoSettings, {"preset": "tree-grpo-official", "kl_weight": 0.0})
    assert official.loss.dual_clip == 3.0 and official.kl_weight == 0.0 and official.kl_estimator == "k3"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 7}, "derived from the trees"), ({"num_kept": 4}, "exceeds the 3 leaves"),
        ({"advantage": "group_centered"}, "combination"), ({"loss": "gspo"}, "shares tokens"),
        ({"combination": "inner", "num_kept": 1}, "two leaves per tree"),
        ({"sampler_rejection": {"scope": "sum"}}, "shares tokens"),
        ({"num_trees": 1, "num_rounds": 0}, "greater than or equal to 2"),
        ({"num_expansions": "two"}, "integer"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_meaning_are_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(TreeGrpoSettings, nested(options))


def test_expanding_is_an_error_if_a_replay_would_not_be_exact() -> None:
    growing = ["environment.type=scienceworld", "algorithm.type=tree_grpo"]
    load_settings(RunSettings, file=None, overrides=growing)
    with pytest.raises(ConfigError, match=r"tree_grpo forks by replay.*find-animal"):
        load_settings(RunSettings, file=None, overrides=[*growing, "environment.deterministic=false"])
