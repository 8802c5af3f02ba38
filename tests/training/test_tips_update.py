"""The update of EMPO² with tips and without them: the off-policy gradient by an independent way."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.algorithms.base import OffPolicyObjective
from outrider.algorithms.loss_settings import ClipLoss
from outrider.engines.local.attention import Segment, TreePlan
from outrider.trace import Leaf, Trace, without_memory
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from outrider.types import Message, Origin, Outcome, Task
from tests.tiny import tiny_model
from tests.vectors import load_vector


def group(lm: Any, *, off: bool, num_with_tips: int = 2) -> Trace:
    """Two rollouts of two turns, the first of them with tips of their own, with the log-probs of another
    policy.
    """
    trace = Trace(task=Task(key="t", question=""), modes=("tips_off" if off else "tips_on",) * 2)
    text = Message(role="user", content="x")
    draw = torch.Generator().manual_seed(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 90, (count,), generator=draw).tolist())

    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids(5), message=text)
    for rollout, advantage in enumerate((1.0, -0.7)):
        parent = root.node_id
        for _ in range(2):
            if rollout < num_with_tips:
                parent = trace.append(
                    parent=parent, origin=Origin.MEMORY, token_ids=ids(4), message=text
                ).node_id
            rest = trace.append(parent=parent, origin=Origin.ENVIRONMENT, token_ids=ids(2), message=text)
            said = ids(3)
            node = trace.append(
                parent=rest.node_id,
                origin=Origin.POLICY,
                token_ids=said,
                message=text,
                logprobs=(-2.0,) * 3,
                entropies=(1.0,) * 3,
            )
            node.credit = (advantage,) * 3
            parent = node.node_id
        trace.finish(
            Leaf(node_id=parent, rollout=rollout, outcome=Outcome.FINISHED, episode_return=advantage)
        )
    trace.without_memory = off
    return trace


def reference(
    lm: Any, trace: Trace, objective: OffPolicyObjective
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same gradient with one plain forward pass for each rollout and context."""
    policy = lm.model
    losses = []
    ratios: list[float] = []
    for leaf, path in trace.rollouts():
        student = scored(policy, without_memory(path))
        with torch.no_grad():
            acting = scored(policy, path)
        old = acting if objective.old_context == "acting" else student.detach()
        ratio = (student - old).exp()
        ratios += ratio.detach().tolist()
        advantage = torch.tensor(leaf.episode_return, dtype=ratio.dtype)
        clipped = ratio.clamp(1 - objective.loss.clip_low, 1 + objective.loss.clip_high)
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        if advantage < 0 and objective.loss.dual_clip:
            loss = torch.minimum(loss, -advantage * objective.loss.dual_clip)
        threshold = math.log(objective.min_probability)
        if all(node.origin is not Origin.MEMORY for node in path):
            pass  # acted and trained in one rendering
        elif objective.student_mask == "token":
            loss = loss * (student.detach() >= threshold)
        elif objective.student_mask == "turn":
            loss = loss * (acting.view(2, 3).amin(dim=1, keepdim=True) >= threshold).expand(2, 3).reshape(-1)
        losses.append(loss)
    (torch.cat(losses).sum() / 12).backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return grads, ratios


def scored(model: Any, path: list[Any]) -> torch.Tensor:
    """Log-probs of the policy's own tokens, in one plain pass over the path."""
    tokens = torch.tensor([[t for node in path for t in node.token_ids]])
    plan = TreePlan(segments=(Segment(length=tokens.shape[1]),))
    logits = model(input_ids=tokens, use_cache=False, plan=plan).logits[0].log_softmax(-1)
    owners = [node for node in path for _ in node.token_ids]
    own = [i for i, node in enumerate(owners) if node.trainable]
    return torch.stack([logits[i - 1, tokens[0, i]] for i in own])


@pytest.mark.parametrize("mask", ["token", "turn"])
@pytest.mark.parametrize("num_with_tips", [0, 1])
def test_the_mask_leaves_rollouts_alone_that_saw_no_tip(mask: Any, num_with_tips: int) -> None:
    """In a group that is trained without its tips. They cost no second pass either. The mask here takes
    every token it may.
    """
    lm = tiny_model(dtype=torch.float64)
    objective = OffPolicyObjective(student_mask=mask, min_probability=0.999, sampler_correction=None)
    trace = group(lm, off=True, num_with_tips=num_with_tips)
    wanted, _ = reference(lm, trace, objective)
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-9, max_grad_norm=1e9))
    found, report, num_passes = updated(policy, trace, objective, max_tokens=1000)
    assert num_passes == 1 + num_with_tips
    assert report.metrics.get("tips/num_off_tokens", 0.0) == 6 * num_with_tips
    assert report.metrics.get("tips/masked_fraction", 1.0) == 1.0
    assert any(gradient.abs().max() > 1e-4 for gradient in found.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient.to(found[name].dtype), rtol=1e-4, atol=1e-6)


def test_a_pass_with_tips_that_is_not_finite_skips_the_step() -> None:
    lm = tiny_model(dtype=torch.float64)
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-2))
    score = policy.score

    def broken(batch: Any) -> Any:
        scores = score(batch)
        if torch.is_grad_enabled():
            return scores
        return replace(scores, logprobs_T=scores.logprobs_T.index_fill(0, torch.tensor([1]), torch.nan))

    policy.score = broken  # type: ignore[method-assign]
    before = {name: master.clone() for name, master in policy.masters.items()}
    report = update(
        policy, [group(lm, off=True)], objective=OffPolicyObjective(sampler_correction=None),
        settings=UpdateSettings(max_logprob_gap=99.0), reference=None,
    )  # fmt: skip
    assert report.metrics["grad/num_skipped"] == 1.0
    assert all(master.equal(before[name]) for name, master in policy.masters.items())


def updated(policy: Policy, trace: Trace, objective: OffPolicyObjective, *, max_tokens: int) -> Any:
    """Gradients of one update, its report, and how often the policy scored."""
    found: dict[str, torch.Tensor] = {}
    passes: list[int] = []
    step, score = policy.step, policy.score

    def keep(**options: Any) -> float:
        found.update(
            {name: master.grad.clone() for name, master in policy.masters.items() if master.grad is not None}
        )
        return step(**options)

    def count(batch: Any) -> Any:
        passes.append(batch.num_tokens)
        return score(batch)

    policy.step, policy.score = keep, count  # type: ignore[method-assign]
    settings = UpdateSettings(max_tokens=max_tokens, max_logprob_gap=99.0)
    report = update(policy, [trace], objective=objective, settings=settings, reference=None)
    return found, report, len(passes)


@pytest.mark.parametrize("old_context", ["acting", "student"])
@pytest.mark.parametrize("mask", ["token", "turn", "none"])
@pytest.mark.parametrize("max_tokens", [17, 1000])
def test_the_off_policy_gradient_is_that_of_two_plain_passes(
    old_context: Any, mask: Any, max_tokens: int
) -> None:
    lm = tiny_model(dtype=torch.float64, scale=9.0)
    objective = OffPolicyObjective(
        old_context=old_context,
        student_mask=mask,
        min_probability=0.003,
        loss=ClipLoss(clip_high=0.3, dual_clip=10.0),
        sampler_correction=None,
    )
    trace = group(lm, off=True)
    wanted, ratios = reference(lm, trace, objective)
    assert (max(ratios) > 1.3) == (old_context == "acting")  # the clip is at work
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-9, max_grad_norm=1e9))
    found, report, _ = updated(policy, trace, objective, max_tokens=max_tokens)
    assert report.metrics["tips/num_off_tokens"] == 12
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient.to(found[name].dtype), rtol=1e-4, atol=1e-6
        )  # the model's norms are float32


@pytest.mark.parametrize("repeats", [{"num_mini_batches": 2}, {"num_epochs": 2}])
def test_tips_on_is_trained_in_the_context_that_it_acted_in(repeats: dict[str, int]) -> None:
    """Denominators are scored apart where there are several steps; the engine's values are those of a plain
    pass with the tips.
    """
    lm = tiny_model(dtype=torch.float64)
    groups = [group(lm, off=False) for _ in range(2)]
    with torch.no_grad():
        for _, path in (rollout for trace in groups for rollout in trace.rollouts()):
            acting = scored(lm.model, path).tolist()
            assert (
                max(
                    abs(a - b)
                    for a, b in zip(acting, scored(lm.model, without_memory(path)).tolist(), strict=True)
                )
                > 0.1
            )
            for node in (node for node in path if node.trainable):
                node.logprobs, acting = tuple(acting[:3]), acting[3:]
    policy = Policy(lm, OptimizerSettings(learning_rate=1e-15))
    settings = UpdateSettings(max_logprob_gap=1e-5, **repeats)  # type: ignore[arg-type]
    report = update(policy, groups, objective=OffPolicyObjective(), settings=settings, reference=None)
    assert policy.num_steps == 2 and "tips/num_off_tokens" not in report.metrics
    assert report.metrics["gap/logprob_max"] < 1e-5  # the model's norms are float32
    for name in ("ratio/min", "ratio/max"):
        assert report.metrics[name] == pytest.approx(1.0, abs=1e-6)


def test_a_step_makes_one_optimizer_step_per_mini_batch_and_drops_no_rollout() -> None:
    """The released trainer makes one for every 128 rows and drops the rows that do not fill 16: up to 2 of
    the vector's 130.
    """
    given, expected = load_vector("empo2", "optimizer_steps_per_iteration")
    kept = [one[0] for one in expected["kept_steps_lastpartial"]]
    assert [rows - left for rows, left in zip(given["rows"], kept, strict=True)] == [0, 8, 2]
    for num_mini_batches in (1, 2, 3):
        lm = tiny_model(dtype=torch.float64)
        policy = Policy(lm, OptimizerSettings(learning_rate=1e-9))
        groups = [group(lm, off=False) for _ in range(3)]
        chosen = UpdateSettings(num_mini_batches=num_mini_batches, max_logprob_gap=99.0)
        report = update(policy, groups, objective=OffPolicyObjective(), settings=chosen, reference=None)
        assert policy.num_steps == num_mini_batches
        # Of every rollout; the groups say the same, so a mini-batch computes them once, and its gap is over
        # three times as many.
        assert report.num_scored_tokens == num_mini_batches * 12
