"""Properties of the gradient and the metrics of every objective, in the real update with a tiny float64
model.
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.exploration import RapoSettings
from outrider.algorithms.grpo import GrpoSettings
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.rollout_replay import RolloutReplaySettings
from outrider.config import validate
from outrider.trace import Trace
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import rollout_paths, update
from outrider.types import Origin
from tests.objectives import nested
from tests.tiny import tiny_model
from tests.training.test_mixed_update import with_demonstration
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    padded_distributions,
    padded_logprobs,
    random_trace,
    shift,
)

ONE_BATCH = UpdateSettings(max_tokens=10_000)


def traces_of(seed: int, *, num_groups: int = 4, scaled: bool = True) -> list[Trace]:
    """Groups with credit, some of whose rollouts succeeded."""
    dice, traces = (
        random.Random(seed),
        [random_trace(seed + number, key=str(number)) for number in range(num_groups)],
    )
    for trace in traces:
        for leaf in trace.leaves.values():
            leaf.success = leaf.episode_return is not None and dice.random() < 0.5
        for node in trace.nodes:
            node.ratio_scale = node.ratio_scale if scaled else 1.0
    return traces


def run(
    traces: list[Trace],
    options: dict[str, Any],
    *,
    chosen: UpdateSettings = ONE_BATCH,
    kind: type[ObjectiveSettings] = ObjectiveSettings,
) -> tuple[Recorder, dict[str, float]]:
    objective = validate(kind, nested(options))
    reference = (
        Policy(tiny_model(dtype=torch.float64, seed=9), OptimizerSettings()).frozen_copy()
        if objective.kl_weight
        else None
    )
    policy = Recorder(tiny_model(dtype=torch.float64), shift)
    report = update(policy, traces, objective=objective, settings=chosen, reference=reference)
    return policy, report.metrics


SOME: list[dict[str, Any]] = [
    {"dual_clip": 1.5, "kl_weight": 0.1, "kl_estimator": "k3"},
    {"loss": "gspo", "sequence_ratio": "product", "aggregation": "sequence_mean_token_mean",
     "sampler_outside": "zero"},
    {"sampler_rejection": {"statistic": "k3", "scope": "mean", "upper": 1.2}},
]  # fmt: skip
LOSSES: list[dict[str, Any]] = [
    {}, {"dual_clip": 1.05}, {"keep_clipped_gradient": True}, {"loss": "gppo", "dual_clip": 1.05},
    {"loss": "cispo", "ratio_cap": 1.01}, {"loss": "reinforce"},
    *({"loss": "gspo", "sequence_ratio": form} for form in ("token", "sequence", "product")),
]  # fmt: skip
AGGREGATIONS: list[dict[str, Any]] = [
    *(
        {"aggregation": kind}
        for kind in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
    ),
    *({"aggregation": kind, "max_length": 30} for kind in ("constant_length", "sum_over_length")),
]
CORRECTIONS: list[dict[str, Any]] = [
    {"sampler_correction": "none"}, {"sampler_correction": 0.2},
    {"sampler_correction": 0.2, "sampler_outside": "zero"},
    *({"sampler_level": level, "sampler_correction": 0.2, "sampler_floor": 0.05}
      for level in ("sequence", "geometric")),
]  # fmt: skip
REJECTIONS: list[dict[str, Any]] = [
    {}, *({"sampler_rejection": one} for one in (
        {"upper": 8.0, "lower": 0.125}, {"upper": 8.0, "scope": "mean"},
        {"statistic": "k3", "upper": 1.3, "scope": "max"}, {"statistic": "k2", "upper": 20.0, "scope": "sum"},
    )),
]  # fmt: skip
TERMS: list[dict[str, Any]] = [
    {}, {"positive_nll": 0.1},
    *({"kl_weight": 0.1, "kl_estimator": kind} for kind in ("k2", "k3", "k3_ratio")),
    {"positive_nll": 0.1, "kl_weight": 0.1}, {"entropy_bonus": 0.01}, {"observation_nll": 0.1},
]  # fmt: skip


def prepared(kind: type[ObjectiveSettings], seed: int) -> list[Trace]:
    """The groups as this kind of update meets them: with demonstrations, replayed, or without their tips."""
    traces = traces_of(seed)
    for number, trace in enumerate(traces):
        if kind is LuffySettings:
            with_demonstration(trace, number % 4)
        trace.is_replayed = kind is RolloutReplaySettings and number % 2 == 0
        trace.without_memory = kind is OffPolicyObjective and number % 2 == 0
        for node in trace.nodes if trace.without_memory else ():
            node.origin = Origin.MEMORY if node.origin in (Origin.ENVIRONMENT, Origin.BUFFER) else node.origin
    return traces


@settings(max_examples=6)
@given(
    kind=st.sampled_from(
        [ObjectiveSettings] * 3 + [LuffySettings, RolloutReplaySettings, OffPolicyObjective]
    ),
    parts=st.tuples(*map(st.sampled_from, (LOSSES, AGGREGATIONS, CORRECTIONS, REJECTIONS, TERMS))),
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, 150),
    num_epochs=st.sampled_from([1, 2]),
)
def test_any_split_into_micro_batches_gives_the_same_metrics_loss_and_gradient(
    kind: Any, parts: tuple[dict[str, Any], ...], seed: int, max_tokens: int, num_epochs: int
) -> None:
    """Every loss with every aggregation, correction, rejection and further term; means over micro-batches
    would depend on the split.
    """
    loss, *others = parts
    if kind in (LuffySettings, RolloutReplaySettings):
        loss = {}  # they have their own
    if kind is OffPolicyObjective:
        loss = (
            {"student_mask": "none"}
            if loss.get("loss") in ("gspo", "reinforce")
            else loss | {"min_probability": 0.003}
        )
    has_clip = loss.get("loss", "clip") not in ("cispo", "reinforce")
    options = ({"clip_low": 0.02, "clip_high": 0.01} if has_clip else {}) | loss
    for one in others:
        options |= one
    plain = UpdateSettings(num_mini_batches=2, num_epochs=num_epochs, max_tokens=10_000)
    whole, expected = run(prepared(kind, seed), options, chosen=plain, kind=kind)
    split, found = run(
        prepared(kind, seed), options, chosen=plain.model_copy(update={"max_tokens": max_tokens}), kind=kind
    )
    assert len(split.gradients) == len(whole.gradients)
    for mine, theirs in zip(split.gradients, whole.gradients, strict=True):
        assert_equal_gradients(mine, theirs)
    # entropies and ratios are float64, their means float32 at times
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_on_policy_the_losses_have_one_gradient(aggregation: str) -> None:
    traces = traces_of(5, scaled=False)
    # a weight a token is not one of the whole sequence
    common = {"aggregation": aggregation, "sampler_correction": "none"}
    expected = run(traces, {"loss": "reinforce"} | common)[0].gradients
    kinds: list[dict[str, Any]] = [
        {}, {"loss": "gppo"}, {"loss": "gppo", "dual_clip": 10.0}, {"loss": "cispo", "ratio_cap": 1.2},
        {"loss": "gspo"}, {"clip_high": 0.28, "dual_clip": 3.0},
    ]  # fmt: skip
    if aggregation == "sequence_mean_token_mean":
        kinds.append({"loss": "gspo", "sequence_ratio": "sequence"})
    for options in kinds:
        assert_equal_gradients(run(traces, options | common)[0].gradients[0], expected[0])
    if aggregation == "token_mean":
        dapo = validate(GrpoSettings, {"preset": "dapo-paper", "sampler_correction": "none"})
        policy = Recorder(tiny_model(dtype=torch.float64))
        update(policy, traces, objective=dapo, settings=ONE_BATCH, reference=None)
        assert_equal_gradients(policy.gradients[0], expected[0])


def test_gppo_has_the_value_of_the_clip_in_every_step() -> None:
    chosen = UpdateSettings(num_mini_batches=2, num_epochs=2, max_tokens=50)
    clip = {"clip_low": 0.02, "clip_high": 0.01, "dual_clip": 1.05}
    plain, expected = run(traces_of(7, scaled=False), clip, chosen=chosen)
    other, found = run(traces_of(7, scaled=False), clip | {"loss": "gppo"}, chosen=chosen)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12) and found["ratio/clip_fraction_high"] > 0
    with pytest.raises(AssertionError):
        assert_equal_gradients(other.gradients[-1], plain.gradients[-1])


def test_what_the_policy_did_not_write_has_no_part_in_the_update() -> None:
    for options in SOME:  # packing leaves these tokens out, whatever the loss
        expected, values = run(traces_of(11), options)
        spoiled = traces_of(11)
        for trace in spoiled:
            for node in trace.nodes:
                if node.origin is not Origin.POLICY:
                    node.credit, node.reward, node.ratio_scale = (99.0,) * len(node.token_ids), 99.0, 9.0
        found, others = run(spoiled, options)
        assert others == values
        assert_equal_gradients(found.gradients[0], expected.gradients[0])


def test_an_engine_that_agrees_with_the_trainer_is_not_corrected() -> None:
    traces = traces_of(13)
    paths = rollout_paths(traces)
    with torch.no_grad():
        for path, values in zip(
            paths, padded_logprobs(eager(tiny_model(dtype=torch.float64)), paths), strict=True
        ):
            each = iter(values.tolist())
            for node in path.nodes:
                node.logprobs = tuple(next(each) for _ in node.token_ids) if node.trainable else ()
    expected = run(traces, {"sampler_correction": "none"})[0].gradients[0]
    kinds: list[dict[str, Any]] = [
        {"sampler_level": level, "sampler_outside": outside, "sampler_floor": 0.9, "sampler_correction": 1.1}
        for level in ("token", "sequence", "geometric") for outside in ("truncate", "zero")
    ]  # fmt: skip
    kinds += [{"sampler_rejection": {"upper": 1.01, "scope": scope}} for scope in ("token", "sum", "mean")]
    kinds += [{"sampler_rejection": {"statistic": "k2", "upper": 1e-6, "scope": "max"}}]
    for options in kinds:
        found, metrics = run(traces, options)
        assert_equal_gradients(found.gradients[0], expected)
        assert metrics.get("ratio/num_rejected", 0.0) == 0.0 and metrics["ratio/num_truncated"] == 0.0


def test_rejected_tokens_stay_in_the_denominators_and_are_counted() -> None:
    """Bounds that no token meets: no gradient at all, also not from the KL, and every trained token
    counted.
    """
    options = {"sampler_rejection": {"upper": 1.0 + 1e-9}, "kl_weight": 0.5}
    policy, metrics = run(traces_of(17), options)
    assert metrics["loss/policy"] == 0.0 and metrics["ratio/num_rejected"] > 0
    assert all(not gradient.any() for gradient in policy.gradients[0].values())


@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_the_entropy_bonus_is_the_mean_over_all_policy_tokens_also_where_the_group_has_no_spread(
    max_tokens: int,
) -> None:
    traces = traces_of(23)
    for trace in traces:
        for node in trace.nodes:
            node.credit = None if node.credit is None else (0.0,) * len(node.credit)
    policy, metrics = run(traces, {"entropy_bonus": 0.01}, chosen=UpdateSettings(max_tokens=max_tokens))
    plain = eager(tiny_model(dtype=torch.float64))
    scores = torch.cat([scores for scores, _ in padded_distributions(plain, rollout_paths(traces))])
    entropy = -(scores.exp() * scores).sum(-1).mean()
    parameters = dict(plain.named_parameters())
    gradients = torch.autograd.grad(-0.01 * entropy, list(parameters.values()))
    assert_equal_gradients(policy.gradients[0], dict(zip(parameters, gradients, strict=True)))
    assert metrics["loss/entropy"] == pytest.approx(entropy.item(), rel=1e-9)
    without, metrics = run(traces, {})
    assert not without.gradients and "loss/entropy" not in metrics


def test_a_mini_batch_of_replayed_rollouts_is_not_in_the_mean_entropy() -> None:
    traces = traces_of(23)[:2]
    traces[1].is_replayed = True
    _, metrics = run(traces, {"entropy_bonus": 0.01}, chosen=UpdateSettings(num_mini_batches=2))
    assert metrics["loss/entropy"] == pytest.approx(metrics["entropy/trainer_mean"], rel=1e-9)


def test_a_large_entropy_bonus_is_named_at_the_start() -> None:
    for kind in (GrpoSettings, RapoSettings):
        large, small = (validate(kind, {"entropy_bonus": weight}) for weight in (0.02, 0.01))
        (line,) = large.warnings(num_groups=8, num_tasks=8)
        assert "algorithm.entropy_bonus = 0.02 is above 0.01" in line
        assert not small.warnings(num_groups=8, num_tasks=8)


def test_successful_rollouts_are_imitated_also_where_the_group_has_no_spread() -> None:
    """GPPO's second term: the mean over their tokens alone, with credit 0 everywhere."""
    traces = traces_of(19)
    for trace in traces:
        for node in trace.nodes:
            node.credit = None if node.credit is None else (0.0,) * len(node.credit)
    policy, metrics = run(traces, {"positive_nll": 0.1})
    plain = eager(tiny_model(dtype=torch.float64))
    every = rollout_paths(traces)
    own = [
        values for path, values in zip(every, padded_logprobs(plain, every), strict=True) if path.succeeded
    ]
    nll = -torch.cat(own).mean()
    parameters = dict(plain.named_parameters())
    gradients = torch.autograd.grad(0.1 * nll, list(parameters.values()))
    assert_equal_gradients(policy.gradients[0], dict(zip(parameters, gradients, strict=True)))
    assert metrics["loss/positive_nll"] == pytest.approx(nll.item(), rel=1e-9)
    nobody = traces_of(19)
    for trace in nobody:
        for leaf in trace.leaves.values():
            leaf.success = False
    _, metrics = run(nobody, {"positive_nll": 0.1})
    assert metrics["loss/positive_nll"] == 0.0
