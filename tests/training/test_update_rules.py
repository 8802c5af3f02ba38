"""An update does not depend on the micro-batches, ignores no term silently, and reports means as means."""

import random
from dataclasses import replace

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.errors import EngineFault
from outrider.trace import Leaf, Trace
from outrider.training.packing import pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import UpdateReport, measure_kl, rollout_paths, update
from outrider.types import Origin, Outcome, Task
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    double_precision,
    eager,
    honest,
    ids,
    node,
    padded_logprobs,
    random_trace,
    shift,
)


def trained(
    traces: list[Trace], objective: ObjectiveSettings, chosen: UpdateSettings, *, is_first: bool = False
) -> tuple[Recorder, UpdateReport]:
    policy = Recorder(tiny_model(dtype=torch.float64), shift, is_first=is_first)
    reference = (
        Recorder(tiny_model(dtype=torch.float64, seed=9)).frozen_copy() if objective.kl_weight else None
    )
    return policy, update(policy, traces, objective=objective, settings=chosen, reference=reference)


def disagreeing(gap: float) -> list[Trace]:
    """One rollout whose engine is ``gap`` nats away on each token, and others that agree."""
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in (31, 32, 33)]
    honest(Policy(tiny_model(dtype=torch.float64), OptimizerSettings()), traces)
    victim = next(path for path in rollout_paths(traces) if any(any(one.credit or ()) for one in path.nodes))
    for one in victim.nodes:
        one.logprobs = tuple(value + gap for value in one.logprobs)
    return traces


@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_the_engine_check_uses_the_whole_mini_batch(max_tokens: int) -> None:
    """A short rollout in a micro-batch of its own is noisier than the mean that the setting bounds."""
    objective, calm = (
        ObjectiveSettings(sampler_correction=None),
        UpdateSettings(max_tokens=max_tokens, max_logprob_gap=99.0),
    )
    _, report = trained(disagreeing(1.0), objective, calm)
    mean = report.metrics["gap/logprob_mean"]
    assert 0.0 < mean < 0.5
    just = calm.model_copy(update={"max_logprob_gap": 1.01 * mean})
    policy, _ = trained(disagreeing(1.0), objective, just, is_first=True)
    assert len(policy.gradients) == 1
    policy = Recorder(tiny_model(dtype=torch.float64), shift, is_first=True)
    with pytest.raises(EngineFault, match=f"{mean:.4f} nats"):
        update(
            policy, disagreeing(1.0), objective=objective, reference=None,
            settings=calm.model_copy(update={"max_logprob_gap": 0.99 * mean}),
        )  # fmt: skip
    assert policy.gradients == [] and all(master.grad is None for master in policy.masters.values())


def test_a_kl_term_without_a_reference_is_refused() -> None:
    policy = Recorder(tiny_model(dtype=torch.float64))
    with pytest.raises(ValueError, match="reference"):
        update(
            policy, [random_trace(1)], objective=ObjectiveSettings(kl_weight=0.1), settings=UpdateSettings(),
            reference=None,
        )  # fmt: skip


def test_the_losses_that_are_reported_are_means_over_the_optimiser_steps() -> None:
    """Equal epochs of equal mini-batches have the loss of one."""
    objective = ObjectiveSettings(positive_nll=0.5)
    trace = random_trace(3, faults=False)
    for leaf in trace.leaves.values():
        leaf.success = True
    twins = [replace_credit(trace), replace_credit(trace)]
    still = UpdateSettings(max_tokens=1)
    reports = []
    for traces, chosen in (
        ([trace], still),
        ([trace], still.model_copy(update={"num_epochs": 3})),
        (twins, still.model_copy(update={"num_mini_batches": 2, "num_epochs": 2})),
    ):
        policy = Recorder(tiny_model(dtype=torch.float64))  # its weights stay
        reports.append(update(policy, traces, objective=objective, settings=chosen, reference=None).metrics)
    for name in ("loss/policy", "loss/positive_nll"):
        assert reports[0][name] != 0.0
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-9)
        assert reports[2][name] == pytest.approx(reports[0][name], rel=1e-9)


def replace_credit(trace: Trace) -> Trace:
    """The same group once more, with nodes of its own."""
    twin = Trace(task=trace.task)
    twin.nodes = [replace(one) for one in trace.nodes]
    twin.leaves = {rollout: replace(leaf) for rollout, leaf in trace.leaves.items()}
    return twin


def test_a_mini_batch_that_is_skipped_reports_no_loss() -> None:
    """Its first micro-batches were computed before the fault was found."""
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in (31, 32)]
    last = [
        one for path in rollout_paths(traces) for one in path.nodes if one.trainable and any(one.credit or ())
    ][-1]
    last.logprobs = (float("nan"),) * len(last.logprobs)
    policy, report = trained(traces, ObjectiveSettings(), UpdateSettings(max_tokens=1))
    assert policy.gradients == [] and report.metrics["grad/num_skipped"] == 1.0
    assert "loss/policy" not in report.metrics


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_turn_without_tokens_is_no_fault(kl_weight: float) -> None:
    """Alone in a micro-batch it leaves nothing to compute."""
    trace, dice = Trace(task=Task(key="t", question="")), random.Random(0)
    root = node(trace, None, Origin.PROMPT, ids(dice, 2, 3))
    for rollout, length in enumerate((0, 3)):
        tip = node(trace, root, Origin.POLICY, ids(dice, length, length), dice=dice)
        tip.credit = (1.0,) * length
        trace.finish(Leaf(node_id=tip.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=1.0))
    policy, _ = trained([trace], ObjectiveSettings(kl_weight=kl_weight), UpdateSettings(max_tokens=1))
    assert len(policy.gradients) == 1
    reference = Recorder(tiny_model(dtype=torch.float64, seed=9)).frozen_copy()
    measure_kl(policy, reference, [trace], max_tokens=1)
    assert [len(one.kl) for one in trace.nodes] == [0, 0, 3]
    assert len(list(pack(rollout_paths([trace]), max_tokens=100))) == 1


def test_the_measured_kl_is_that_of_two_plain_passes() -> None:
    traces = [random_trace(seed, key=str(seed)) for seed in range(3)]
    for trace in traces:
        for each in trace.nodes:
            each.credit = None  # it is measured before there is any
    policy = Policy(tiny_model(dtype=torch.float64), OptimizerSettings())
    reference = Policy(tiny_model(dtype=torch.float64, seed=9), OptimizerSettings()).frozen_copy()
    paths = rollout_paths(traces)
    with torch.no_grad():
        ours, theirs = (padded_logprobs(eager(one.language_model), paths) for one in (policy, reference))
    for max_tokens in (1, 60, 10_000):
        measure_kl(policy, reference, traces, max_tokens=max_tokens)
        for path, mine, other in zip(paths, ours, theirs, strict=True):
            found = [value for each in path.nodes if each.trainable for value in each.kl]
            assert found == pytest.approx((mine - other).tolist(), abs=1e-9)
    assert all(each.credit is None for trace in traces for each in trace.nodes)
