"""Mini-batches of samples (``update.mini_batch_samples``): each sample once, the right denominators, and the
same bits for any split. Gradients are enumerated over all groups of a tree of turns, in float64.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.base import ObjectiveSettings, write_advantages
from outrider.algorithms.gigpo import Gigpo, GigpoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.commands.dry_run import work_lines
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.planning.memory import make_workload
from outrider.seeding import stream
from outrider.trace import Insertion, Leaf, Trace, split_contexts, with_help
from outrider.training.packing import PackedBatch, RolloutPath, advantages_by_rollout, pack
from outrider.training.policy import Policy, SingleRank, TokenScores
from outrider.training.settings import OptimizerSettings, RunSettings, UpdateSettings
from outrider.training.step_records import values_by_node
from outrider.training.update import UpdateReport, make_mini_batches, rollout_paths, shuffle_samples, update
from outrider.types import Message, Origin, Outcome, Task
from tests.distributed.groups import distinct_objectives, groups
from tests.tiny import tiny_model
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.test_samples import act, finish, grown, other
from tests.training.tool_run import write_tool_run

START, SECOND, THIRD = 10, 11, 12
STOP = 0
PATHS = [(STOP,), *((1, below, last) for below, last in product(range(2), repeat=2))]
RETURNS = dict(zip(PATHS, (0.4, 1.0, 0.0, -0.7, 0.3), strict=True))


def is_invalid(path: Sequence[int], turn: int) -> bool:
    """A rollout of one turn is invalid, and action 1 in the second turn."""
    return path == (STOP,) or (turn == 1 and path[1] == 1)


def tree_group(paths: Sequence[tuple[int, ...]]) -> Trace:
    """Rollouts of one or of three turns, with a context for each turn, as window mode and agent programs make
    them.
    """
    trace = Trace(task=Task(key="t", question=""))
    root = other(trace, None, (50, START))
    for rollout, path in enumerate(paths):
        node = root
        for turn, action in enumerate(path):
            if turn:
                node = other(trace, node, (50, START + turn), restarts=True)
            node = act(trace, node, (action,))
            node.metadata["invalid"] = is_invalid(path, turn)
        finish(trace, node, rollout, RETURNS[path])
    return trace


class StatePolicy:
    """A table [S, A] of logits, one row for each state, which is the token before the action."""

    settings = OptimizerSettings()

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.clone().requires_grad_()
        self.ranks: Any = SingleRank()
        self.num_steps = 0
        self.gradients: list[Tensor] = []

    def score(self, batch: PackedBatch) -> TokenScores:
        states = batch.ids_N[batch.predictors_U[batch.token_T]]
        logprobs = self.logits[states - START].log_softmax(-1)
        chosen = logprobs.gather(1, batch.targets_U[batch.token_T][:, None])[:, 0]
        return TokenScores(logprobs_T=chosen, entropies_T=torch.zeros_like(chosen))

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        return batch.num_tokens

    def step(self) -> float:
        assert self.logits.grad is not None
        self.gradients.append(self.logits.grad)
        self.logits.grad = None
        self.num_steps += 1
        return float(self.gradients[-1].norm())


PLAIN: dict[str, Any] = {"sampler_correction": None, "group_size": 2}


def train(
    policy: StatePolicy, traces: Sequence[Trace], objective: ObjectiveSettings, **chosen: Any
) -> UpdateReport:
    return update(
        policy, traces, objective=objective,  # type: ignore[arg-type]
        settings=UpdateSettings(max_logprob_gap=1e9, **chosen), reference=None, seed=3,
    )  # fmt: skip


def written_gradient(
    logits: np.ndarray, paths: Sequence[tuple[int, ...]], *, statistics: str, penalty: float,
    aggregation: str, size: int | None,
) -> np.ndarray:  # fmt: skip
    """Minus the sum of the gradients of all optimizer steps, written out without the library, except for the
    stream of the order.
    """
    rows = [[RETURNS[path] - penalty * is_invalid(path, t) for t in range(len(path))] for path in paths]
    counted = [v for own in rows for v in own] if statistics == "samples" else [sum(o) / len(o) for o in rows]
    mean = sum(counted) / len(counted)
    std = (sum((v - mean) ** 2 for v in counted) / (len(counted) - 1)) ** 0.5
    samples = [(rollout, turn) for rollout, path in enumerate(paths) for turn in range(len(path))]
    order = [samples[i] for i in stream(3, "mini-batches", 0).permutation(len(samples))]
    gradient = np.zeros_like(logits)
    if max(counted) - min(counted) < 1e-9:
        return gradient
    size = size or len(samples)
    for start in range(0, len(samples), size):
        batch = order[start : start + size]
        for rollout, turn in batch:
            num = len(batch)  # tokens
            if aggregation == "sequence_mean_token_mean":
                own = sum(r == rollout for r, _ in batch)
                num = own * len({r for r, _ in batch})
            probabilities = np.exp(logits[turn]) / np.exp(logits[turn]).sum()
            score = np.eye(2)[paths[rollout][turn]] - probabilities
            gradient[turn] += (rows[rollout][turn] - mean) / (std + 1e-6) * score / num
    return gradient


@pytest.mark.parametrize("size", [None, 1, 2, 100])
@pytest.mark.parametrize("penalty", [0.0, 0.25])
@pytest.mark.parametrize("statistics", ["rollouts", "samples"])
def test_the_enumerated_gradient(statistics: str, penalty: float, size: int | None) -> None:
    """Of all pairs of rollouts of one and three turns, with their probabilities: GRPO, and GiGPO without its
    step part under another mean.
    """
    logits = np.random.Generator(np.random.PCG64(1)).normal(size=(3, 2))
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chances = {path: float(np.prod([policy[t, a] for t, a in enumerate(path)])) for path in PATHS}
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-14)
    shared = {**PLAIN, "statistics": statistics, "invalid_penalty": penalty}
    grpo = Grpo(validate(GrpoSettings, shared))
    released = {"step_weight": 0.0, "normalization": "std", "aggregation": "sequence_mean_token_mean"}
    gigpo = Gigpo(validate(GigpoSettings, {**shared, **released}))
    for method in (grpo, gigpo):
        expected, found = np.zeros_like(logits), np.zeros_like(logits)
        for paths in product(PATHS, repeat=2):
            chance = chances[paths[0]] * chances[paths[1]]
            expected += chance * written_gradient(
                logits, paths, statistics=statistics, penalty=penalty, size=size,
                aggregation=method.objective.aggregation,
            )  # fmt: skip
            trace = tree_group(paths)
            method.assign_advantages(trace)
            table = StatePolicy(torch.tensor(logits))
            train(table, [trace], method.objective, mini_batch_samples=size)
            for gradient in table.gradients:
                found -= chance * gradient.numpy()
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("penalty", [0.0, 0.25])
def test_statistics_over_rollouts_keep_the_direction_and_those_over_samples_bend_it(penalty: float) -> None:
    """Mean weighted by turns (agent-lightning #444): with unequal lengths, centring over rows is no multiple
    of the gradient of the expected score, and centring over two rollouts is half of it.
    """
    logits = np.random.Generator(np.random.PCG64(1)).normal(size=(3, 2))
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chances = {path: float(np.prod([policy[t, a] for t, a in enumerate(path)])) for path in PATHS}

    def scores_of(path: tuple[int, ...]) -> np.ndarray:
        rows = np.zeros_like(logits)
        for turn, action in enumerate(path):
            rows[turn] = np.eye(2)[action] - policy[turn]
        return rows

    exact, fines = np.zeros_like(logits), np.zeros_like(logits)
    for path, chance in chances.items():
        exact += chance * RETURNS[path] * scores_of(path)
        for turn in range(len(path)):
            fines[turn] += chance * penalty * is_invalid(path, turn) * scores_of(path)[turn]
    estimates = {}
    for advantage, statistics in product(("group_centered", "leave_one_out"), ("rollouts", "samples")):
        method = Grpo(validate(GrpoSettings, {
            **PLAIN, "advantage": advantage, "statistics": statistics, "invalid_penalty": penalty,
            "aggregation": "sequence_mean_token_sum",
        }))  # fmt: skip
        total = np.zeros_like(logits)
        for paths in product(PATHS, repeat=2):
            trace = tree_group(paths)
            method.assign_advantages(trace)
            table = StatePolicy(torch.tensor(logits))
            train(table, [trace], method.objective)
            total -= chances[paths[0]] * chances[paths[1]] * sum(each.numpy() for each in table.gradients)
        estimates[advantage, statistics] = total
    for statistics in ("rollouts", "samples"):  # the baseline is that of the other rollout
        np.testing.assert_allclose(estimates["leave_one_out", statistics], exact - fines, atol=1e-12)
    if not penalty:
        np.testing.assert_allclose(estimates["group_centered", "rollouts"], exact / 2, atol=1e-12)
    bent = estimates["group_centered", "samples"]
    cosine = (bent * exact).sum() / np.linalg.norm(bent) / np.linalg.norm(exact)
    assert cosine < 0.9995


def attributed(seed: int, attribution: Literal["soft", "hard"]) -> Trace:
    trace = grown(Random(seed))
    returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
    write_advantages(trace, group_normalized_advantages_per_rollout(returns=returns), attribution=attribution)
    return trace


def entries(paths: Sequence[RolloutPath]) -> list[tuple[int, int, int, float]]:
    """The trained tokens: group, rollout, node and advantage."""
    return sorted(
        (path.group, path.rollout, id(node), value)
        for path in paths
        for node in path.nodes
        for _, credit, _ in advantages_by_rollout(node, [path])
        for value in credit
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("attribution", ["soft", "hard"])
def test_every_sample_and_every_share_of_a_token_is_in_one_mini_batch(
    seed: int, attribution: Literal["soft", "hard"]
) -> None:
    """Also of tokens that siblings in different mini-batches share."""
    paths = rollout_paths([attributed(seed, attribution), attributed(100 + seed, attribution)])
    samples = [
        (path.group, path.rollout, tuple(map(id, part)))
        for path in paths
        for part in split_contexts(path.nodes)
    ]
    for size in (1, 2, 3, len(samples), 999):
        mini_batches = shuffle_samples(paths, size, stream(seed, "t"))
        parts = [
            [
                (path.group, path.rollout, tuple(map(id, part)))
                for path in each
                for part in split_contexts(path.nodes)
            ]
            for each in mini_batches
        ]
        assert sorted(one for each in parts for one in each) == sorted(samples)
        assert [len(each) for each in parts[:-1]] == [size] * (len(parts) - 1) and 0 < len(parts[-1]) <= size
        assert [one for each in mini_batches for one in [p.rollout_index for p in each]] == [
            number for each in mini_batches for number in range(len(each))
        ]
        assert entries([path for each in mini_batches for path in each]) == entries(paths)
        for each in mini_batches:  # as they are packed: no token is lost where a part begins with a restart
            trained = [path for path in each if entries([path])]
            assert sum(len(batch.token_T) for batch in pack(trained, max_tokens=7)) == len(entries(each))
    [whole] = shuffle_samples(paths, len(samples), stream(seed, "t"))
    assert whole == paths


def test_the_order_depends_on_the_seed_and_the_optimizer_steps_only() -> None:
    traces = [attributed(seed, "soft") for seed in range(3)]

    def order(*, seed: int = 3, first_step: int = 0, **chosen: Any) -> list[list[tuple[int, int, int]]]:
        settings = UpdateSettings(mini_batch_samples=3, **chosen)
        return [
            [(path.group, path.rollout, len(path.nodes)) for path in paths]
            for paths in make_mini_batches(traces, settings, seed=seed, first_step=first_step)
        ]

    assert order() == order(max_tokens=1, num_epochs=3, checkpoint_activations=True)
    assert len({str(order(seed=seed, first_step=step)) for seed, step in ((3, 0), (4, 0), (3, 1))}) == 3
    policy = StatePolicy(torch.zeros(3, 2, dtype=torch.float64))
    policy.num_steps = 5
    assert train(policy, [tree_group(PATHS[:2])], ObjectiveSettings(), mini_batch_samples=2).first_step == 5


def many_groups() -> list[Trace]:
    method = Grpo(validate(GrpoSettings, {**PLAIN, "group_size": 3, "invalid_penalty": 0.1}))
    traces = [tree_group([PATHS[i], PATHS[j], PATHS[1]]) for i, j in ((0, 3), (2, 4), (1, 1), (0, 2))]
    for trace in traces:
        method.assign_advantages(trace)
    return traces


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_the_split_into_micro_batches_changes_no_gradient(aggregation: Any) -> None:
    objective = validate(GrpoSettings, {**PLAIN, "aggregation": aggregation})
    logits = torch.tensor(np.random.Generator(np.random.PCG64(5)).normal(size=(3, 2)))
    runs = []
    for max_tokens in (1, 20, 10_000):
        policy = StatePolicy(logits)
        report = train(policy, many_groups(), objective, mini_batch_samples=5, max_tokens=max_tokens)
        num_samples = sum(len(split_contexts(path.nodes)) for path in rollout_paths(many_groups()))
        assert len(policy.gradients) == report.metrics["grad/num_steps"] == -(-num_samples // 5)
        runs.append(policy.gradients)
    for gradients in runs[1:]:
        for one, wanted in zip(gradients, runs[0], strict=True):
            np.testing.assert_allclose(one, wanted, atol=1e-15)


def test_one_mini_batch_of_all_samples_is_the_update_of_whole_groups() -> None:
    objective = validate(GrpoSettings, PLAIN)
    logits = torch.tensor(np.random.Generator(np.random.PCG64(5)).normal(size=(3, 2)))
    plain, samples = StatePolicy(logits), StatePolicy(logits)
    wanted = train(plain, many_groups(), objective)
    found = train(samples, many_groups(), objective, mini_batch_samples=10_000)
    assert [one.tolist() for one in samples.gradients] == [one.tolist() for one in plain.gradients]
    assert found.metrics == wanted.metrics | {"grad/num_steps": 1.0}
    assert "grad/num_steps" not in wanted.metrics


def test_the_recorded_log_probs_are_those_of_their_own_tokens() -> None:
    traces, logits = many_groups(), torch.tensor([[0.3, -0.2], [1.0, 0.1], [-0.5, 0.4]], dtype=torch.float64)
    settings = UpdateSettings(mini_batch_samples=4)
    report = train(StatePolicy(logits), traces, validate(GrpoSettings, PLAIN), mini_batch_samples=4)
    values = values_by_node(
        make_mini_batches(traces, settings, seed=3, first_step=report.first_step), report.tokens
    )
    trained = [
        (path, node)
        for path in rollout_paths(traces)
        for node in path.nodes
        if node.trainable and any(node.credit or ())
    ]
    for path, node in trained:
        turn = sum(other_node.trainable for other_node in path.nodes[: path.nodes.index(node)])
        expected = float(logits[turn].log_softmax(-1)[node.token_ids[0]])
        assert values[id(node), path.rollout].trainer.tolist() == [pytest.approx(expected, abs=1e-6)]


def test_another_rendering_has_the_same_contexts() -> None:
    """Tips and help are cut with the contexts that they stand in."""
    trace = tree_group([PATHS[1]])
    tip = trace.append(
        parent=0, origin=Origin.MEMORY, token_ids=(7,), message=Message(role="user", content="tip")
    )
    [leaf], [path] = zip(*trace.rollouts(), strict=True)
    shown = [path[0], tip, *path[1:]]
    helped = with_help(
        path, [Insertion(node_id=path[2].node_id, offset=1, token_ids=(8,), text="", source="file")]
    )
    whole = RolloutPath(nodes=path, rollout_index=0, nodes_with_tips=shown, nodes_with_help=helped)
    found = [one for [one] in shuffle_samples([whole], 1, stream(0, "t"))]
    by_turn = {START: (), SECOND: (), THIRD: ()}  # type: dict[int, Any]
    for one in found:
        assert one.nodes_with_tips is not None and one.nodes_with_help is not None
        by_turn[one.nodes[0].token_ids[-1]] = tuple(
            [token for node in nodes for token in node.token_ids]
            for nodes in (one.nodes, one.nodes_with_tips, one.nodes_with_help)
        )
    assert leaf.rollout == 0 and by_turn == {
        START: ([50, START, 1], [50, START, 7, 1], [50, START, 1]),
        SECOND: ([50, SECOND, 0], [50, SECOND, 0], [50, 8, SECOND, 0]),
        THIRD: ([50, THIRD, 0], [50, THIRD, 0], [50, THIRD, 0]),
    }


def test_faulted_and_pruned_rollouts_are_no_samples() -> None:
    trace = tree_group(PATHS[:3])
    trace.finish(Leaf(node_id=None, rollout=3, outcome=Outcome.TOOL_FAULT, episode_return=None))
    trace.pruned = frozenset({1})
    mini_batches = make_mini_batches([trace], UpdateSettings(mini_batch_samples=2), seed=0, first_step=0)
    rollouts = [path.rollout for each in mini_batches for path in each for _ in split_contexts(path.nodes)]
    assert sorted(rollouts) == [0, 2, 2, 2]


def test_a_context_without_a_turn_is_no_sample_of_its_own() -> None:
    """A limit may end a rollout after its conversation was rendered again."""
    trace = tree_group(PATHS[:2])
    node = other(trace, trace.nodes[-1], (50, START), restarts=True)
    trace.leaves[1].node_id = node.node_id
    mini_batches = make_mini_batches([trace], UpdateSettings(mini_batch_samples=1), seed=0, first_step=0)
    assert len(mini_batches) == 4 and all(
        any(node.trainable for node in path.nodes) for paths in mini_batches for path in paths
    )
    [whole] = make_mini_batches([trace], UpdateSettings(mini_batch_samples=4), seed=0, first_step=0)
    [plain] = make_mini_batches([trace], UpdateSettings(), seed=0, first_step=0)
    assert [path.nodes for path in whole] == [path.nodes for path in plain]


CHAT: dict[str, Any] = {"environment": {"type": "house"}, "update": {"mini_batch_samples": 4}}
DIVIDED: dict[str, Any] = CHAT | {"model": {"history_thinking": "strip"}}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"type": "gspo"}, "algorithm.loss.type = gspo needs all tokens"),
        ({"type": "grpo", "sampler_correction": {"level": "sequence"}}, "sampler_correction.level needs all"),
        ({"type": "grpo", "sampler_rejection": {"scope": "sum"}}, "sampler_rejection.scope needs all tokens"),
        (
            {"type": "grpo", "distill": {"help": ["sibling"], "form": "reverse_kl", "discount": 0.5}},
            "distill.discount needs",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value["type"]),
)
def test_a_value_of_a_whole_rollout_is_refused_only_where_rollouts_have_several_contexts(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, DIVIDED | {"algorithm": algorithm})
    validate(RunSettings, CHAT | {"algorithm": algorithm})
    if "distill" not in algorithm:  # which needs one context here for reasons of its own
        validate(RunSettings, DIVIDED | {"algorithm": algorithm, "update": {}})


def test_other_refusals_and_what_commands_say() -> None:
    with pytest.raises(ConfigError, match="remove num_mini_batches"):
        validate(UpdateSettings, {"mini_batch_samples": 4, "num_mini_batches": 2})
    settings = validate(RunSettings, CHAT | {"algorithm": {"type": "grpo"}})
    assert "an update of the weights for every 4 samples" in "\n".join(work_lines(settings))
    plain = validate(RunSettings, {**CHAT, "update": {}, "algorithm": {"type": "grpo"}})
    several = plain.model_copy(update={"update": UpdateSettings(num_mini_batches=2)})
    expected = make_workload(several, prompt_tokens=100)
    assert make_workload(settings, prompt_tokens=100) == expected != make_workload(plain, prompt_tokens=100)


def test_a_run_continues_with_the_same_order(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    text = recipe.read_text()
    options = ("update.mini_batch_samples=3", "algorithm.invalid_penalty=0.1", "algorithm.statistics=samples")
    run = begin(recipe, tmp_path / "run", *options)
    killed = interrupted(run)
    resume(killed)
    assert_same(run, killed)
    assert text == recipe.read_text()


@pytest.mark.parametrize("nth", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_the_objectives_of_the_algorithms(nth: int) -> None:
    """With forks, demonstrations and replayed groups: one mini-batch of all samples gives the bits of whole
    groups, and several have the same gradients for any split into micro-batches.
    """
    policy = Policy(tiny_model(), OptimizerSettings(learning_rate=1e-3))
    reference = policy.frozen_copy()
    start = {name: one.clone() for name, one in policy.masters.items()}

    def weights(objective: ObjectiveSettings, **chosen: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        traces = groups(3, rollouts=3, longest=12)
        traces[2].is_replayed = True
        for name, one in policy.masters.items():
            one.copy_(start[name])
        policy.fresh_optimizer()
        report = update(
            policy, traces, objective=objective, settings=UpdateSettings(max_logprob_gap=1e9, **chosen),
            reference=reference if objective.kl_weight > 0 else None,
        )  # fmt: skip
        return {name: one.clone() for name, one in policy.masters.items()}, report.metrics

    num_steps = set()
    for objective in list(distinct_objectives().values())[nth::15]:
        plain, wanted = weights(objective)
        found, metrics = weights(objective, mini_batch_samples=9)
        assert all(found[name].equal(one) for name, one in plain.items())
        assert {name: metrics[name] for name in wanted} == wanted
        _, metrics = weights(objective, mini_batch_samples=4)
        _, others = weights(objective, mini_batch_samples=4, max_tokens=40)
        num_steps.add(metrics["grad/num_steps"])
        assert metrics["grad/num_steps"] == others["grad/num_steps"]
        assert metrics["grad/norm"] == pytest.approx(others["grad/norm"], rel=1e-3)
    assert max(num_steps) > 1
