"""Every metric of an update against values by hand, over micro-batches of unequal size."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.loss_settings import ClipLoss, GppoLoss, SamplerCorrection
from outrider.algorithms.losses import without_tips_mask
from outrider.algorithms.luffy import LuffySettings
from outrider.errors import EngineFault
from outrider.trace import Trace
from outrider.training.packing import PackedBatch
from outrider.training.policy import Policy, Scorer, SingleRank, TokenScores
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import UpdateReport, update
from outrider.types import Message, Origin
from tests.algorithms.builders import Rollout, build_trace

TIP = 99
APART = UpdateSettings(max_tokens=1, max_logprob_gap=1e9)  # a micro-batch for each rollout
Table = Sequence[Sequence[float]]  # a row a rollout, a value a trained token


def logs(rows: Table) -> list[list[float]]:
    return [[math.log(value) for value in row] for row in rows]


class TablePolicy:
    """Scores tokens from a table: one for every optimiser step, and one for the rendering with tips."""

    settings = OptimizerSettings()
    ranks = SingleRank()

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        entropies: Table | None = None,
        with_tips: Table = (),
        norms: Sequence[float] = (1.0,),
    ) -> None:
        self.tables, self.with_tips, self.norms = tables, with_tips, norms
        self.entropies = entropies or tables[0]
        self.num_steps, self.num_dropped = 0, 0
        self.scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def score(self, batch: PackedBatch) -> TokenScores:
        table = self.with_tips if TIP in batch.ids_N.tolist() else self.tables[self.num_steps]
        places = list(zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True))
        values, spread = ([rows[r][o] for r, o in places] for rows in (table, self.entropies))
        logprobs = torch.tensor(values, dtype=torch.float64) * self.scale
        return TokenScores(logprobs_T=logprobs, entropies_T=torch.tensor(spread, dtype=torch.float64))

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        return batch.num_tokens

    def step(self) -> float:
        self.num_steps += 1
        return self.norms[self.num_steps - 1]

    def drop_gradients(self) -> None:
        self.num_dropped += 1


def two_rollouts(*, engine: Table, credit: Sequence[float], scale: Sequence[float] = (1.0, 1.0)) -> Trace:
    """One of a single token, one of three."""
    trace = build_trace([Rollout(value=1.0, mask=(1,)), Rollout(value=0.0, mask=(1, 1, 1), first_token=20)])
    for number, (_, path) in enumerate(trace.rollouts()):
        node = path[-1]
        node.logprobs = tuple(engine[number])
        node.credit, node.ratio_scale = (credit[number],) * len(node.token_ids), scale[number]
    return trace


def run(
    policy: TablePolicy, traces: Sequence[Trace], objective: ObjectiveSettings,
    chosen: UpdateSettings = APART, reference: TablePolicy | None = None,
) -> UpdateReport:  # fmt: skip
    return update(
        cast(Policy, policy),
        traces,
        objective=objective,
        settings=chosen,
        reference=cast(Scorer, reference),
    )


ENGINE = ((-1.0,), (-1.0, -1.0, -1.0))
TRAINER = ((-1.5,), (-1.1, -1.2, -2.0))
PLAIN = ObjectiveSettings(sampler_correction=None)


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_every_metric_of_two_optimiser_steps_is_the_one_by_hand(max_tokens: int) -> None:
    """The second step has ratios of 0.5 and of 1, 2 and 4, times scales of 1.5 and 0.5."""
    later = ((-1.5 + math.log(0.5),), (-1.1, -1.2 + math.log(2), -2.0 + math.log(4)))
    policy = TablePolicy([TRAINER, later], entropies=((0.5,), (1.0, 2.0, 3.0)), norms=(3.0, 1.0))
    reference = TablePolicy([((-2.5,), (-1.1, -1.7, -4.0))])
    objective = ObjectiveSettings(
        sampler_correction=None, loss=ClipLoss(dual_clip=1.5), kl_weight=0.1, kl_estimator="k2"
    )
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0), scale=(1.5, 0.5))
    reason: list[int] = []
    report = update(
        cast(Policy, policy), [trace], objective=objective,
        settings=APART.model_copy(update={"num_epochs": 2, "max_tokens": max_tokens}),
        reference=cast(Scorer, reference),
        on_batch=reason.append,
    )  # fmt: skip
    # Step 1: 3 x 1.2 (clipped) - 3 x 0.8 (clipped). Step 2: 3 x 0.75 - 0.8 (clipped) - 1 - 1.5 (the dual clip
    # of 2).
    losses = (-(3 * 1.2 - 3 * 0.8) / 4, -(3 * 0.75 - 0.8 - 1 - 1.5) / 4)
    kl = [(1.0, 0.0, 0.5, 2.0), (1.0 + math.log(0.5), 0.0, 0.5 + math.log(2), 2.0 + math.log(4))]
    assert report.metrics == pytest.approx(
        {
            "loss/policy": sum(losses) / 2,
            "loss/kl": sum(d * d / 2 for step in kl for d in step) / 8,
            "ratio/clip_fraction_high": (1 / 4 + 0) / 2,
            "ratio/clip_fraction_low": (3 / 4 + 1 / 4) / 2,
            "ratio/clip_fraction_dual": (0 + 1 / 4) / 2,
            "ratio/mean": ((1.5 + 3 * 0.5) / 4 + (0.75 + 0.5 + 1.0 + 2.0) / 4) / 2,
            "ratio/shaping_mean": (1.5 + 3 * 0.5) / 4,
            "ratio/min": 0.5,
            "ratio/max": 2.0,
            "entropy/trainer_mean": 6.5 / 4,
            "gap/logprob_mean": (0.5 + 0.1 + 0.2 + 1.0) / 4,
            "gap/logprob_max": 1.0,
            "grad/norm": 2.0,
            "grad/clipped_fraction": 0.5,  # a norm at the limit is not clipped
            "grad/num_skipped": 0.0,
        },
        rel=1e-6,
    )
    # Each epoch computes 2 + 1 and 2 + 3 tokens apart, or the prompt of 2 once.
    assert reason == ([1, 4, 5, 8] if max_tokens == 1 else [4, 8])
    assert (report.num_scored_tokens, report.num_computed_tokens) == (8, 16 if max_tokens == 1 else 12)


def test_the_loss_that_is_differentiated_has_the_kl_term_and_the_likelihood_at_their_weights() -> None:
    """All log-probs are the table's times one number, so its gradient is the sum of d loss / d log p times
    log p.
    """
    policy, reference = TablePolicy([TRAINER]), TablePolicy([((-2.5,), (-1.1, -1.7, -4.0))])
    trace = two_rollouts(engine=TRAINER, credit=(3.0, -1.0))
    trace.leaves[1].success = True
    objective = ObjectiveSettings(sampler_correction=None, kl_weight=0.1, kl_estimator="k2", positive_nll=0.5)
    report = run(policy, [trace], objective, reference=reference)
    values = (-1.5, -1.1, -1.2, -2.0)
    surrogate = sum(-a * p for a, p in zip((3.0, -1.0, -1.0, -1.0), values, strict=True)) / 4
    kl = sum(d * p for d, p in zip((1.0, 0.0, 0.5, 2.0), values, strict=True)) / 4
    likelihood = -sum(values[1:]) / 3
    assert policy.scale.grad is not None
    assert float(policy.scale.grad) == pytest.approx(surrogate + 0.1 * kl + 0.5 * likelihood, rel=1e-9)
    assert report.metrics["loss/positive_nll"] == pytest.approx(likelihood, rel=1e-9)


def test_the_sampler_correction_is_measured_over_the_tokens_of_all_micro_batches() -> None:
    """Weights of 1/2, 1, 2 and 4, the last one cut to 2."""
    weights = ((0.5,), (1.0, 2.0, 4.0))
    engine = tuple(tuple(-1.0 - w for w in row) for row in logs(weights))
    policy = TablePolicy([((-1.0,), (-1.0, -1.0, -1.0))])
    report = run(policy, [two_rollouts(engine=engine, credit=(3.0, -1.0))], ObjectiveSettings())
    found = {
        name: value
        for name, value in report.metrics.items()
        if name.startswith(("ratio/importance", "ratio/num_"))
    }
    assert found == pytest.approx(
        {
            "ratio/importance_mean": 5.5 / 4,
            "ratio/importance_max": 4.0,
            "ratio/importance_ess_share": 5.5**2 / (4 * (0.25 + 1 + 4 + 4)),
            "ratio/num_truncated": 1.0,
        }
    )
    assert report.metrics["loss/policy"] == pytest.approx(-(3 * 0.5 - 1 - 2 - 2) / 4)
    assert report.metrics["ratio/mean"] == pytest.approx(1.0)  # not corrected


def with_left_out_tip() -> Trace:
    """The rollout of three tokens saw a tip."""
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0))
    tip = Message(role="user", content="tip")
    reason = trace.append(parent=0, origin=Origin.MEMORY, token_ids=(TIP,), message=tip)
    trace.nodes[2] = replace(trace.nodes[2], parent=reason.node_id)
    trace.without_memory = True
    return trace


def test_the_measures_of_left_out_tips_are_means_over_the_tokens_that_lost_them() -> None:
    """The rollout of three tokens saw a tip. Odds of student and acting policy are 1/2, 2 and 1/8."""
    trace = with_left_out_tip()
    acting = ((0.0,), (-1.0, -1.0, -1.0))
    student = ((-1.5,), (-1.0 + math.log(0.5), -1.0 + math.log(2), -1.0 + math.log(0.125)))
    objective = OffPolicyObjective(
        sampler_correction=None,
        min_probability=math.exp(-1.0) / 4,
        loss=ClipLoss(clip_low=1.0, clip_high=9.0),
    )
    report = run(TablePolicy([student], with_tips=acting), [trace], objective)
    found = {name: value for name, value in report.metrics.items() if name.startswith("tips/")}
    assert found == pytest.approx(
        {
            "tips/kl_acting_student": (math.log(2) - math.log(2) + math.log(8)) / 3,
            "tips/ratio_mean": (0.5 + 2.0 + 0.125) / 3,
            "tips/masked_fraction": 1 / 3,  # less likely than a quarter of 1 / e: the last one
            "tips/num_off_tokens": 3.0,
        }
    )
    assert report.metrics["loss/policy"] == pytest.approx(-(3 * 1.0 - 0.5 - 2.0) / 4)
    # The gap is the engine's from the policy that acted.
    assert report.metrics["gap/logprob_mean"] == pytest.approx(0.5 / 4)
    assert report.metrics["ratio/mean"] == pytest.approx((1.0 + 0.5 + 2.0 + 0.125) / 4)


def test_one_token_with_a_huge_ratio_leaves_the_metrics_finite() -> None:
    """Metrics and records have the ratios of the loss, whose logarithm is clamped to +-20."""
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0))
    policy = TablePolicy([TRAINER, ((1e4,), TRAINER[1])], norms=(1.0, 1.0))
    report = run(policy, [trace], PLAIN, APART.model_copy(update={"num_epochs": 2}))
    assert report.metrics["ratio/max"] == pytest.approx(math.exp(20.0))
    assert report.metrics["ratio/mean"] == pytest.approx((math.exp(20.0) + 7.0) / 8)
    assert max(float(record.ratio_T.max()) for record in report.tokens) == pytest.approx(math.exp(20.0))
    student = TablePolicy([((-1.5,), (1e4, -1.0, -1.0))], with_tips=((0.0,), (-1.0, -1.0, -1.0)))
    report = run(student, [with_left_out_tip()], OffPolicyObjective(sampler_correction=None))
    assert report.metrics["tips/ratio_mean"] == pytest.approx((math.exp(20.0) + 2.0) / 3)


def test_nothing_to_train_on_has_a_gradient_of_zero() -> None:
    """Without groups, and with groups without credit: a norm, no step, and no other measure."""
    still = TablePolicy([TRAINER])
    assert run(still, [], PLAIN).metrics == {"grad/norm": 0.0}
    assert run(still, [two_rollouts(engine=ENGINE, credit=(0.0, 0.0))], PLAIN).metrics == {"grad/norm": 0.0}
    assert still.num_steps == 0
    both = [two_rollouts(engine=ENGINE, credit=credit) for credit in ((0.0, 0.0), (3.0, -1.0))]
    halves = run(
        TablePolicy([TRAINER], norms=(3.0,)), both, PLAIN, APART.model_copy(update={"num_mini_batches": 2})
    )
    assert halves.metrics["grad/norm"] == 1.5 and halves.metrics["loss/policy"] == 0.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_whose_norm_is_not_finite_is_counted_and_in_no_mean(norm: float) -> None:
    """The norms of the two other steps are 3, which is clipped, and 1."""
    policy = TablePolicy([TRAINER] * 3, norms=(3.0, norm, 1.0))
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0))
    metrics = run(policy, [trace], PLAIN, APART.model_copy(update={"num_epochs": 3})).metrics
    found = {name: value for name, value in metrics.items() if name.startswith("grad/")}
    assert found == {"grad/num_skipped": 1.0, "grad/norm": 2.0, "grad/clipped_fraction": 0.5}
    alone = run(TablePolicy([TRAINER], norms=(norm,)), [trace], PLAIN).metrics
    assert alone["grad/num_skipped"] == 1.0 and "grad/norm" not in alone


def test_log_probs_that_are_not_finite_drop_the_gradients_of_the_whole_mini_batch() -> None:
    policy = TablePolicy([((-1.5,), (-1.1, math.nan, -2.0))] * 2)
    policy.num_steps = 1
    report = run(policy, [two_rollouts(engine=ENGINE, credit=(3.0, -1.0))], PLAIN)
    assert (policy.num_dropped, policy.num_steps, report.metrics["grad/num_skipped"]) == (1, 1, 1.0)


def test_only_the_first_step_of_a_run_checks_the_engine() -> None:
    """The mean gap is 1.8 / 4. After the first step it is the policy's own change."""
    trainer = ((-1.5,), (-1.0, -1.25, -2.05))
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0))
    strict = UpdateSettings(max_tokens=1, max_logprob_gap=0.45 - 1e-9)
    refused = TablePolicy([trainer])
    with pytest.raises(EngineFault, match=r"0\.4500 nats"):
        run(refused, [trace], PLAIN, strict)
    assert (refused.num_dropped, refused.num_steps) == (1, 0)
    near = TablePolicy([trainer])
    run(near, [trace], PLAIN, UpdateSettings(max_tokens=1, max_logprob_gap=0.45 + 1e-9))
    later = TablePolicy([trainer] * 2, norms=(1.0, 1.0))
    later.num_steps = 1
    run(later, [trace], PLAIN, strict)
    assert (near.num_steps, later.num_steps) == (1, 2)


def test_what_a_demonstrator_wrote_is_in_the_loss_and_in_no_measure_of_the_policy() -> None:
    """Its one token: -A p / (p + 0.1). The ratios of the policy's are 1, 2 and 4 in the second step, cut to
    1.2.
    """
    trace = two_rollouts(engine=ENGINE, credit=(3.0, 1.0))
    trace.leaves[0].success = trace.leaves[1].success = True
    trace.nodes[1].origin, trace.nodes[1].logprobs, trace.nodes[1].entropies = Origin.DEMONSTRATION, (), ()
    own = (-1.1, -1.2, -2.0)
    tables = [((-1.5,), own), ((math.log(0.3),), (own[0], own[1] + math.log(2), own[2] + math.log(4)))]
    reference = TablePolicy([((-9.0,), (-1.1, -1.7, -4.0))])
    objective = LuffySettings(
        sampler_correction=SamplerCorrection(upper=2.0), positive_nll=0.5, kl_weight=0.1
    )
    policy = TablePolicy(tables, entropies=((50.0,), (1.0, 2.0, 3.0)), norms=(1.0, 1.0))
    metrics = run(
        policy, [trace], objective, APART.model_copy(update={"num_epochs": 2}), reference=reference
    ).metrics
    weights = [math.exp(value + 1.0) for value in own]  # trainer / engine, all below 2
    shaped = [3.0 * p / (p + 0.1) for p in (math.exp(-1.5), 0.3)]
    losses = -(shaped[0] + sum(weights)) / 4, -(shaped[1] + weights[0] + 1.2 * (weights[1] + weights[2])) / 4
    kl = [0.0, 0.5, 2.0, 0.0, 0.5 + math.log(2), 2.0 + math.log(4)]
    expected = {
        "loss/policy": sum(losses) / 2,
        "loss/kl": sum(d * d / 2 for d in kl) / 6,
        "loss/positive_nll": (-sum(own) - sum(tables[1][1])) / 6,
        "entropy/trainer_mean": 2.0,
        "gap/logprob_mean": 1.3 / 3,
        "gap/logprob_max": 1.0,
        "ratio/mean": (3.0 + 7.0) / 6,
        "ratio/max": 4.0,
        "ratio/clip_fraction_high": 2 / 6,
        "ratio/importance_mean": sum(weights) / 3,
        "luffy/probability_mean": (math.exp(-1.5) + 0.3) / 2,
        "luffy/num_tokens": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("successes", "weight", "is_replayed", "expected"),
    [
        ((True, True), 0.0, False, 3),  # nothing but the credit of the second
        ((True, False), 0.5, False, 4),  # and the likelihood of the first
        ((False, False), 0.5, False, 3),
        ((True, False), 0.5, True, 3),  # an earlier policy wrote it
    ],
)
def test_rollouts_without_credit_are_computed_where_a_term_trains_them(
    successes: tuple[bool, bool], weight: float, is_replayed: bool, expected: int
) -> None:
    trace = two_rollouts(engine=ENGINE, credit=(0.0, -1.0))
    trace.is_replayed = is_replayed
    for leaf, success in zip(trace.leaves.values(), successes, strict=True):
        leaf.success = success
    objective = ObjectiveSettings(sampler_correction=None, positive_nll=weight)
    assert run(TablePolicy([TRAINER]), [trace], objective).num_scored_tokens == expected


@pytest.mark.parametrize("kind", ["token", "turn", "none"])
def test_a_least_probability_of_zero_masks_nothing(kind: Literal["token", "turn", "none"]) -> None:
    low, is_off = torch.tensor([-1000.0, -math.inf]), torch.ones(2, dtype=torch.bool)
    objective = OffPolicyObjective(student_mask=kind, min_probability=0.0)
    mask = without_tips_mask(
        objective, logprobs_T=low, with_tips_T=low, is_without_tips_T=is_off, turn_T=torch.tensor([0, 1])
    )
    assert mask.tolist() == [1.0, 1.0]


def test_an_update_without_left_out_tips_is_the_plain_one() -> None:
    """EMPO2's objective on groups that saw no tips, and a plain objective on groups that did."""
    trace = two_rollouts(engine=ENGINE, credit=(3.0, -1.0))
    plain = run(TablePolicy([TRAINER]), [trace], PLAIN).metrics
    assert run(TablePolicy([TRAINER]), [trace], OffPolicyObjective(sampler_correction=None)).metrics == plain
    reason = trace.append(
        parent=0, origin=Origin.MEMORY, token_ids=(TIP,), message=Message(role="user", content="tip")
    )
    trace.nodes[2] = replace(trace.nodes[2], parent=reason.node_id)
    trace.without_memory = True
    assert run(TablePolicy([TRAINER], with_tips=ENGINE), [trace], PLAIN).metrics == plain


@pytest.mark.parametrize(("high", "expected"), [(0.5, 1.5), (0.25, 1.25), (2.0, 2.0)])
def test_gppo_has_the_bounds_of_its_settings(high: float, expected: float) -> None:
    """A ratio of 2 in the second step."""
    tables = [ENGINE, ((-1.0 + math.log(2),), ENGINE[1])]
    policy = TablePolicy(tables, norms=(1.0, 1.0))
    objective = ObjectiveSettings(loss=GppoLoss(clip_high=high, clip_low=0.0), sampler_correction=None)
    trace = two_rollouts(engine=ENGINE, credit=(4.0, 0.0))
    metrics = run(policy, [trace], objective, APART.model_copy(update={"num_epochs": 2})).metrics
    assert metrics["loss/policy"] == pytest.approx(-(1.0 + expected) / 2)
