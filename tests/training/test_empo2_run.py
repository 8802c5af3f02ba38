"""EMPO² end to end with a tiny real model: GRPO's bits without memory, the off-policy gradient by an
independent way, a report.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from outrider.algorithms.base import OffPolicyObjective
from outrider.algorithms.loss_settings import ClipLoss
from outrider.config import load_settings
from outrider.engines.local.attention import Segment, TreePlan
from outrider.trace import Leaf, Trace, without_memory
from outrider.training.policy import Policy
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import OptimizerSettings, RunSettings, UpdateSettings
from outrider.training.setup import run_training
from outrider.training.update import update
from outrider.types import Message, Origin, Outcome, Task
from tests.algorithms.tip_groups import vector
from tests.tiny import tiny_model
from tests.training.tool_run import write_tool_run

TIPS = (
    "algorithm.memory.embedder=hash", "algorithm.memory.min_similarity=0.1",
    "algorithm.memory.max_shown_tokens=120", "algorithm.memory.max_tip_tokens=24",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("empo2"))
    path.write_text(path.read_text().replace("num_hybrid = 2\n", ""))
    return path


def train(
    recipe: Path, name: str, *overrides: str, num_steps: int = 3, progress: Literal["none", "plain"] = "none"
) -> Path:
    settings = load_settings(
        RunSettings, file=recipe, overrides=["evaluation.every=0", f"train.num_steps={num_steps}", *overrides]
    )
    run = recipe.parent / name
    run_training(
        (RunDirectory.create(run, settings), settings), progress=progress, on_start=lambda stop: None
    )
    return run


def steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    "preset",
    ["empo2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("empo2-alg1", "empo2-released"))],
)
def test_a_preset_trains_in_all_modes(recipe: Path, preset: str) -> None:
    run = train(
        recipe,
        preset,
        "algorithm.type=empo2",
        f"algorithm.preset={preset}",
        "algorithm.memory_probability=0.7",
        *TIPS,
        num_steps=6,
    )
    records = steps(run)
    groups = {
        mode: sum(record[f"tips/num_groups_{mode}"] for record in records)
        for mode in ("plain", "tips_on", "tips_off")
    }
    assert sum(groups.values()) == 12 and all(groups.values())
    assert sum(record["tips/num_shown"] for record in records) > 0 and records[-1]["tips/memory_size"] > 0
    assert all(record["rollout/num_masked"] == 0 for record in records)
    assert sum(record.get("tips/num_off_tokens", 0) for record in records) > 0
    for record in records:
        if record.get("tips/num_off_tokens"):
            assert (
                math.isfinite(record["tips/kl_acting_student"]) and 0 <= record["tips/masked_fraction"] <= 1
            )
            # one step on data of the same weights: the student is its own denominator
            if preset == "empo2-alg1":
                assert record["tips/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert record["gap/logprob_mean"] < 1e-4  # the engine is compared with the context that it saw
    assert (run / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("q", [0, 1])
def test_in_a_run_the_first_ratio_of_tips_on_is_one_and_that_of_tips_off_is_not(recipe: Path, q: int) -> None:
    """Two optimiser steps that move nothing: denominators are scored before the first one, and only a context
    can tell them apart.
    """
    run = train(
        recipe,
        f"ratios-{q}",
        "algorithm.type=empo2",
        "algorithm.memory_probability=1",
        f"algorithm.off_policy_probability={q}",
        "update.num_mini_batches=2",
        "optimizer.learning_rate=1e-15",
        *TIPS,
        num_steps=5,
    )
    found = [record for record in steps(run) if record["tips/num_shown"] and "ratio/min" in record]
    assert found
    for record in found:
        assert record["gap/logprob_mean"] < 1e-4
        is_one = max(abs(record[name] - 1.0) for name in ("ratio/min", "ratio/max")) < 1e-6
        assert is_one == (q == 0)


def test_a_run_that_can_show_no_tip_says_so_at_its_start(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six tasks, two a step: after three steps none has been played twice."""
    for num_steps, scope, silent in ((3, "task", True), (4, "task", False)):
        chosen = (
            "algorithm.type=empo2",
            "algorithm.memory_probability=1",
            f"algorithm.memory.scope={scope}",
            *TIPS,
        )
        run = train(recipe, f"said-{num_steps}-{scope}", *chosen, num_steps=num_steps, progress="plain")
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NO TIPS")]
        shown = sum(record["tips/num_shown"] for record in steps(run))
        assert (len(told), shown == 0) == (int(silent), silent)
        if silent:
            assert "6 groups" in told[0] and "6 tasks" in told[0] and "algorithm.memory.scope" in told[0]


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
    own = [i for i, node in zip(_places(path), _owners(path), strict=True) if node.trainable]
    return torch.stack([logits[i - 1, tokens[0, i]] for i in own])


def _places(path: list[Any]) -> list[int]:
    return list(range(sum(len(node.token_ids) for node in path)))


def _owners(path: list[Any]) -> list[Any]:
    return [node for node in path for _ in node.token_ids]


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


def test_a_step_makes_as_many_optimiser_steps_as_are_asked_for_and_drops_no_rollout() -> None:
    """The released trainer makes one for every 128 rows and drops the rows that do not fill 16: up to 2 of
    the vector's 130.
    """
    given, expected = vector("optimizer_steps_per_iteration")
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
