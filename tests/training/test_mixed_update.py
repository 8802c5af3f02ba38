"""Demonstrations and replayed groups in the real update: upstream numbers, written-out gradients, measures
that leave them out.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.losses import token_weights, weighted_loss
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.rollout_replay import RolloutReplaySettings
from outrider.config import validate
from outrider.engines.local.attention import TreePlan
from outrider.errors import ConfigError, EngineFault
from outrider.trace import Trace
from outrider.training.data import interleave
from outrider.training.packing import PackedBatch, RolloutPath
from outrider.training.settings import UpdateSettings
from outrider.training.update import MetricAccumulator, UpdateReport, loss_inputs, rollout_paths, update
from outrider.types import Origin, Task
from tests.objectives import nested
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    random_trace,
    shift,
)

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "objectives.json").read_text())
}


def batch_of(
    inputs: dict[str, Any], *, foreign: Tensor, engine: Tensor
) -> tuple[PackedBatch, Tensor, Tensor]:
    """The policy tokens of padded upstream rows as one micro-batch, with their places and the rollouts that
    they belong to.
    """
    mask = torch.tensor(inputs["response_mask"]).bool()
    rows = torch.nonzero(mask)[:, 0]
    advantages = (
        torch.tensor(inputs["advantages"], dtype=torch.float64)
        .reshape(len(mask), -1)
        .expand(mask.shape)[mask]
    )
    numbers = torch.arange(len(rows))
    batch = PackedBatch(
        ids_N=numbers, positions_N=numbers, plan=TreePlan(segments=()), predictors_U=numbers,
        targets_U=numbers, token_T=numbers, advantages_T=advantages,
        ratio_scale_T=torch.ones_like(advantages),
        engine_logprobs_T=engine[mask], rollout_index_T=rows, ordinal_T=numbers, turn_T=numbers,
        is_off_policy_T=foreign[mask], version_T=-torch.ones_like(numbers),
    )  # fmt: skip
    return batch, mask, rows


def check_vector(
    name: str, objective: ObjectiveSettings, *, foreign: str | None, behaviour: str | None, start: str
) -> None:
    case = CASES[name]
    inputs = case["inputs"]
    logprobs = torch.tensor(inputs["log_prob"], dtype=torch.float64)
    marks = (
        torch.ones_like(logprobs) if foreign is None else torch.tensor(inputs[foreign]).expand(logprobs.shape)
    )
    engine = (
        torch.zeros_like(logprobs)
        if behaviour is None
        else torch.tensor(inputs[behaviour], dtype=torch.float64)
    )
    batch, mask, rows = batch_of(inputs, foreign=marks > 0, engine=engine)
    own_T = logprobs[mask].requires_grad_()
    old_T = torch.tensor(inputs[start], dtype=torch.float64)[mask]
    surrogate = objective.token_loss(
        loss_inputs(own_T, batch, objective.old_logprobs(old_T, None), MetricAccumulator())
    )
    weights = token_weights(
        kind=objective.aggregation,
        rollout_index=rows,
        num_rollouts=len(mask),
        max_length=objective.max_length,
        dtype=torch.float64,
    )
    loss = weighted_loss(losses=surrogate.losses, weights=weights)
    assert loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-9)
    expected = torch.tensor(case["expected"]["grad_log_prob"], dtype=torch.float64)[mask]
    torch.testing.assert_close(torch.autograd.grad(loss, own_T)[0], expected, atol=1e-9, rtol=0)


def test_the_official_preset_gives_the_released_loss_and_the_paper_like_ones_theirs() -> None:
    """The released width of the response is that of its rows, 7 here and 8192 in the script."""
    official = validate(LuffySettings, {"preset": "luffy-official", "max_length": 7})
    plain = validate(LuffySettings, {"shaping": "none"})
    half = validate(LuffySettings, {"shaping": 0.5})
    for name, objective in (("official", official), ("no_shaping", plain), ("gamma0.5", half)):
        check_vector(
            f"loss.luffy.{name}",
            objective,
            foreign="is_off_policy_token",
            behaviour=None,
            start="old_log_prob",
        )
    assert validate(LuffySettings, {"preset": "luffy-official"}).max_length == 8192


def test_without_a_cap_replay_gives_the_released_loss() -> None:
    objective = validate(RolloutReplaySettings, {"preset": "rollout-replay-official"})
    assert (objective.selection, objective.sampler_correction) == ("difficulty", None)
    check_vector(
        "loss.rollout_replay",
        objective,
        foreign=None,
        behaviour="behaviour_log_prob",
        start="step_start_log_prob",
    )


def with_demonstration(trace: Trace, rollout: int) -> Trace:
    """The same group, with this rollout as if a demonstrator had played it."""
    leaf = trace.leaves[rollout]
    leaf.is_demonstration = True
    for node in trace.path(leaf.node_id) if leaf.node_id is not None else ():
        if node.trainable:
            node.origin, node.logprobs, node.entropies = Origin.DEMONSTRATION, (), ()
    return trace


def replayed(trace: Trace) -> Trace:
    """The same group, as if an earlier policy had played it; its log-probs are near those of the model in
    places.
    """
    trace.is_replayed = True
    return trace


def credited_logprobs(model: LlamaForCausalLM, paths: Sequence[RolloutPath]) -> list[Tensor]:
    """Log-probs of every token that takes credit, one rollout at a time."""
    found = []
    for path in paths:
        row = torch.tensor([[token for node in path.nodes for token in node.token_ids]])
        scores = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0], dim=-1)
        owners = [node for node in path.nodes for _ in node.token_ids]
        found.append(
            torch.stack(
                [scores[i - 1, row[0, i]] for i in range(1, row.shape[1]) if owners[i].receives_advantages]
            )
        )
    return found


def written(
    logprobs: Sequence[Tensor], olds: Sequence[Tensor], paths: Sequence[RolloutPath], o: ObjectiveSettings
) -> Tensor:
    """The loss of a mini-batch, token by token."""
    weight = 1 / sum(map(len, logprobs)) if o.aggregation == "token_mean" else 1 / (o.max_length or 1)
    total = torch.zeros((), dtype=torch.float64)
    for own, old, path in zip(logprobs, olds, paths, strict=True):
        nodes = [node for node in path.nodes if node.receives_advantages for _ in node.token_ids]
        engine = [value for node in path.nodes for value in node.logprobs]
        for t, node in enumerate(nodes):
            assert node.credit is not None
            advantage = node.credit[0]
            if node.origin is Origin.DEMONSTRATION:
                assert isinstance(o, LuffySettings) and o.shaping is not None
                probability = own[t].exp()
                total = total - weight * advantage * probability / (probability + o.shaping)
                continue
            start = math.exp(float(old[t]) - engine[t])  # pi_start over the author of the token
            corrected = 1.0 if o.sampler_correction is None else min(start, o.sampler_correction.upper)
            if path.is_replayed:
                assert isinstance(o, RolloutReplaySettings)
                corrected = min(start, o.weight_cap or math.inf)
            factor = corrected / start
            ratio = torch.exp(own[t] - engine[t])
            value = float(ratio.detach())
            clips = not isinstance(o, LuffySettings) or o.clip_own
            assert o.loss.type == "clip"
            low, high = (
                ((1 - o.loss.clip_low) * start, (1 + o.loss.clip_high) * start) if clips else (0.0, math.inf)
            )
            bounded = min(max(value, low), high) * advantage
            gain = (
                ratio * advantage
                if value * advantage <= bounded
                else torch.tensor(bounded, dtype=torch.float64)
            )
            total = total - weight * factor * gain
    return total


LUFFY = [
    {"clip_low": 0.02, "clip_high": 0.01, "sampler_correction": 1.1},
    {"preset": "luffy-official", "max_length": 19}, {"shaping": 0.5, "clip_low": 0.02},
]  # fmt: skip
REPLAY: list[dict[str, Any]] = [
    {"clip_low": 0.02, "clip_high": 0.01, "weight_cap": 1.0},
    {"clip_low": 0.03, "weight_cap": "none"},
]


@pytest.mark.parametrize("options", [*LUFFY, *REPLAY], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize(
    "max_tokens", [40, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 10_000))]
)
def test_gradients_of_every_step_are_those_of_the_written_loss(
    options: dict[str, Any], max_tokens: int
) -> None:
    """Two mini-batches, two epochs, for any micro-batches; the log-probs of engine and author are far from
    the model's.
    """
    kind = RolloutReplaySettings if "weight_cap" in options else LuffySettings
    objective: Any = validate(kind, nested(options))
    traces = [random_trace(seed, key=str(seed)) for seed in range(4)]
    if kind is LuffySettings:
        traces = [with_demonstration(trace, number % 3) for number, trace in enumerate(traces)]
    else:
        traces = [replayed(trace) if number % 2 else trace for number, trace in enumerate(traces)]
    model = tiny_model(dtype=torch.float64)
    plain, policy = eager(model), Recorder(model, shift)
    chosen = UpdateSettings(num_mini_batches=2, num_epochs=2, max_tokens=max_tokens)
    report = update(policy, traces, objective=objective, reference=None, settings=chosen)
    minis = [rollout_paths(traces[:2]), rollout_paths(traces[2:])]
    with torch.no_grad():
        olds = [credited_logprobs(plain, paths) for paths in minis]
    assert len(policy.gradients) == 4
    for step, found in enumerate(policy.gradients):
        loss = written(credited_logprobs(plain, minis[step % 2]), olds[step % 2], minis[step % 2], objective)
        assert_equal_gradients(found, gradients_of(plain, loss))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift(name, parameter))
    foreign = [
        path
        for mini in minis
        for path in mini
        if path.is_replayed or path.nodes[-1].origin is Origin.DEMONSTRATION
    ]
    assert (
        foreign and report.metrics["luffy/num_tokens" if kind is LuffySettings else "replay/num_tokens"] > 0
    )
    if kind is LuffySettings and objective.clip_own:
        assert report.metrics["ratio/clip_fraction_low"] > 0


def test_no_metric_and_no_check_of_the_engine_uses_off_policy_tokens() -> None:
    """What an engine of today is held against are its own tokens: an old author, or a demonstrator, is no
    fault of it.
    """
    objective = validate(RolloutReplaySettings, {})
    alone = random_trace(5, faults=False)
    with pytest.raises(EngineFault, match="disagree"):
        trained([alone], objective, UpdateSettings())
    report = trained([replayed(alone)], objective, UpdateSettings())
    assert report.metrics["replay/num_tokens"] == report.num_scored_tokens
    own = (
        "ratio/mean",
        "ratio/clip_fraction_low",
        "ratio/importance_mean",
        "gap/logprob_mean",
        "entropy/trainer_mean",
    )
    assert not any(name in report.metrics for name in own)

    def measured(traces: list[Trace], kind: Any) -> dict[str, float]:
        return trained(traces, validate(kind, {}), UpdateSettings(max_logprob_gap=99.0)).metrics

    pure, other = random_trace(7, key="a", faults=False), random_trace(8, key="b", faults=False)
    plain = measured([pure], RolloutReplaySettings)
    beside = measured([random_trace(7, key="a", faults=False), replayed(other)], RolloutReplaySettings)
    shown = measured([random_trace(7, key="a", faults=False), *demonstrations_only(9)], LuffySettings)
    for name in own:
        assert beside[name] == pytest.approx(plain[name], rel=1e-12) and shown[name] == pytest.approx(
            plain[name], rel=1e-12
        )
    assert beside["replay/weight_max"] >= beside["replay/weight_mean"] > 0
    assert 0 < shown["luffy/probability_mean"] < 1


@pytest.mark.parametrize("kind", [LuffySettings, RolloutReplaySettings])
def test_the_kl_term_and_the_imitation_of_successes_hold_own_tokens_alone(kind: Any) -> None:
    """With credit 0 nothing else is left; the denominator of the KL counts foreign tokens too, that of the
    imitation does not.
    """
    traces = [random_trace(seed, key=str(seed), faults=False, flat=True) for seed in (3, 4)]
    for trace in traces:
        for leaf in trace.leaves.values():
            leaf.success = True
    traces = (
        [with_demonstration(traces[0], 1), traces[1]]
        if kind is LuffySettings
        else [replayed(traces[0]), traces[1]]
    )
    model, frozen = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64, seed=9)
    plain, policy, paths = eager(model), Recorder(model), rollout_paths(traces)
    objective = validate(kind, {"kl_weight": 0.3, "positive_nll": 0.2})
    update(
        policy, traces, objective=objective, settings=UpdateSettings(max_tokens=40),
        reference=Recorder(frozen).frozen_copy(),
    )  # fmt: skip
    is_own = [
        not path.is_replayed and all(node.origin is not Origin.DEMONSTRATION for node in path.nodes)
        for path in paths
    ]
    every, fixed = credited_logprobs(plain, paths), credited_logprobs(eager(frozen), paths)
    own = torch.cat([one for one, mine in zip(every, is_own, strict=True) if mine])
    reference = torch.cat([one.detach() for one, mine in zip(fixed, is_own, strict=True) if mine])
    loss = 0.3 * (0.5 * (own - reference) ** 2).sum() / sum(map(len, every)) - 0.2 * own.mean()
    assert 0 < len(own) < sum(map(len, every))
    assert_equal_gradients(policy.gradients[0], gradients_of(plain, loss))


def trained(traces: list[Trace], objective: ObjectiveSettings, settings: UpdateSettings) -> UpdateReport:
    policy = Recorder(tiny_model(dtype=torch.float64), is_first=True)
    return update(policy, traces, objective=objective, settings=settings, reference=None)


def demonstrations_only(seed: int) -> list[Trace]:
    trace = random_trace(seed, key="c", faults=False)
    for rollout in list(trace.leaves):
        with_demonstration(trace, rollout)
    return [trace]


def test_a_mini_batch_gets_its_share_of_replayed_groups() -> None:
    def named(prefix: str, count: int) -> list[Trace]:
        return [Trace(task=Task(key=f"{prefix}{i}", question="")) for i in range(count)]

    def keys(fresh: int, old: int) -> list[str]:
        return [trace.task.key for trace in interleave(named("f", fresh), named("r", old))]

    assert keys(2, 2) == ["f0", "r0", "f1", "r1"] and keys(3, 0) == ["f0", "f1", "f2"]
    assert keys(4, 2) == ["f0", "r0", "f1", "f2", "r1", "f3"]
    draws = random.Random(0)
    for _ in range(20):
        fresh, old = draws.randrange(1, 9), draws.randrange(0, 9)
        assert sorted(keys(fresh, old)) == sorted(
            trace.task.key for trace in named("f", fresh) + named("r", old)
        )


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (LuffySettings, {"dual_clip": 3.0}, "its own token loss"),
    (LuffySettings, {"loss": "gspo"}, "its own token loss"),
    (LuffySettings, {"advantage": "leave_one_out"}, "leave_one_out"),
    (LuffySettings, {"group_size": 1}, "than or equal to 2"),
    (LuffySettings, {"shaping": 0.0}, "greater than 0"),
    (LuffySettings, {"num_demonstrations": 2}, "less than or equal"),
    (RolloutReplaySettings, {"dual_clip": 3.0}, "its own token loss"),
    (RolloutReplaySettings, {"weight_cap": 0.9}, "than or equal"),
    (RolloutReplaySettings, {"fresh_share": 0.0}, "greater than 0"),
    (RolloutReplaySettings, {"group_size": 1}, "than or equal to 2"),
    (LuffySettings, {"num_demonstrations": 0, "demonstrations": "shown.jsonl"}, "disables demonstrations"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "says"), WRONG, ids=str)
def test_what_has_no_meaning_is_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(kind, nested(options))
