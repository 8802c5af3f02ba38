"""Rollouts of more than ``max_tokens`` that are split between their contexts: the same loss, gradient and
metrics in float64, for any split and number of ranks.
"""

import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.base import Attribution, ObjectiveSettings, OffPolicyObjective, write_advantages
from outrider.algorithms.losses import TokenLoss, TokenLossInputs
from outrider.config import validate
from outrider.engines.local.unpacked import segment_paths
from outrider.trace import BODY, Insertion, Leaf, Node, Trace, split_contexts
from outrider.training.packing import PackedBatch, pack
from outrider.training.policy import SingleRank, TokenScores, score_logits
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.step_records import values_by_node
from outrider.training.update import UpdateReport, make_mini_batches, measure_kl, rollout_paths, update
from outrider.types import Message, Origin, Outcome, Task
from tests.training.test_distill_update import ThreadRanks

VOCABULARY, WIDTH = 40, 5
TEXT = Message(role="user", content="")


class ContextPolicy:
    """Scores that depend on all tokens of a context and their positions, in float64. A step moves the
    weights, so that the ratios of a second epoch are not 1.
    """

    settings = OptimizerSettings()

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
        self.head = torch.randn(WIDTH, VOCABULARY, generator=draw, dtype=torch.float64)
        self.ranks: Any = SingleRank()
        self.num_steps = 0
        self.gradients: list[Tensor] = []
        self.sizes: list[int] = []

    def score(self, batch: PackedBatch, *, trains_entropy: bool = False, support: Any = None) -> TokenScores:
        self.sizes.append(batch.num_tokens)
        embedded = self.table[batch.ids_N] * torch.cos(batch.positions_N.double())[:, None]
        hidden: dict[int, Tensor] = {}
        for path in segment_paths(batch.plan):
            hidden |= dict(zip(path, embedded[path].cumsum(0).tanh(), strict=True))
        places = batch.predictors_U[batch.token_T].tolist()
        logits = torch.stack([hidden[place] for place in places]) @ self.head
        targets = batch.targets_U[batch.token_T]
        values = score_logits(logits, targets, trains_entropy=trains_entropy, support=support)
        names = ("logprobs_T", "entropies_T", "support_TK", "support_ids_TK")
        observed_M = None
        if len(batch.observed_M):
            places = batch.predictors_U[batch.observed_M].tolist()
            logits = torch.stack([hidden[place] for place in places]) @ self.head
            observed_M = score_logits(logits, batch.targets_U[batch.observed_M])[0]
        return TokenScores(**dict(zip(names, values, strict=False)), observed_M=observed_M)

    def dummy_forward(self) -> Tensor:
        return 0.0 * self.table.sum()

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        return batch.num_tokens

    def step(self) -> float:
        assert self.table.grad is not None
        gradient = torch.stack(self.ranks.gather(self.table.grad)).sum(0)
        self.gradients.append(gradient)
        self.table.grad = None
        with torch.no_grad():
            self.table -= 0.3 * gradient
        self.num_steps += 1
        return float(gradient.norm())


def window_group(number: int, *, attribution: Attribution = "soft", tips: bool = False) -> Trace:
    """Three rollouts of 2 to 5 turns, each turn with a context of its own. The first two share their first
    two turns; the third has the same first prompt.
    """
    dice = Random(number)
    trace = Trace(task=Task(key=f"t{number}", question=""), modes=("plain",) * 3)
    trace.without_memory = tips

    def add(parent: Node | None, origin: Origin, size: int, **options: Any) -> Node:
        ids = tuple(dice.randrange(VOCABULARY) for _ in range(size))
        if origin is Origin.POLICY:
            options = {"logprobs": tuple(-4 * dice.random() for _ in ids), "entropies": (0.5,) * size}
        parent_id = None if parent is None else parent.node_id
        return trace.append(parent=parent_id, origin=origin, token_ids=ids, message=TEXT, **options)

    def turn(node: Node) -> Node:
        if node is not root:
            node = add(node, Origin.ENVIRONMENT, dice.randint(4, 9), restarts=True, metadata={BODY: [[1, 3]]})
        if tips and dice.random() < 0.5:
            node = add(add(node, Origin.MEMORY, 3), Origin.ENVIRONMENT, 1)
        return add(node, Origin.POLICY, dice.randint(1, 4))

    root = add(None, Origin.PROMPT, 6)
    fork = turn(turn(root))
    for rollout, (node, turns) in enumerate(((fork, 3), (fork, 1), (root, 2 + number % 3))):
        for _ in range(turns):
            node = turn(node)
        value = float((rollout + number) % 2)
        trace.finish(
            Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value,
                 success=value > 0.0)
        )  # fmt: skip
    for leaf, path in list(trace.rollouts())[1:]:  # help in the prompt of the second turn
        prompt = split_contexts(path)[1][0]
        help_ = Insertion(node_id=prompt.node_id, offset=1, token_ids=(7, 8), text="", source="file")
        trace.help[leaf.rollout] = () if tips else (help_,)
    if tips:
        trace.help.clear()
    returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
    write_advantages(trace, group_normalized_advantages_per_rollout(returns=returns), attribution=attribution)
    return trace


def window_groups(**options: Any) -> list[Trace]:
    traces = [window_group(number, **options) for number in range(3)]
    traces[2].is_replayed = True
    return traces


def train(
    policies: Sequence[ContextPolicy], traces: Sequence[Trace], objective: ObjectiveSettings, **chosen: Any
) -> UpdateReport:
    """One update; the policies are the ranks."""
    barrier, values = threading.Barrier(len(policies)), [None] * len(policies)
    reports: dict[int, UpdateReport] = {}
    settings = {"max_logprob_gap": 1e9, "num_epochs": 2} | chosen

    def work(rank: int) -> None:
        reference = ContextPolicy(seed=1)
        if len(policies) > 1:
            policies[rank].ranks = ThreadRanks(rank, len(policies), barrier, values)
        reports[rank] = update(
            policies[rank], traces, objective=objective,  # type: ignore[arg-type]
            settings=UpdateSettings(**settings), reference=reference,  # type: ignore[arg-type]
            token_loss=objective.token_loss,
        )  # fmt: skip

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(policies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return reports[0]


def longest_context(traces: Sequence[Trace]) -> int:
    """Tokens of the longest context, in any rendering."""
    paths = rollout_paths(traces)
    every = [nodes for path in paths for nodes in (path.nodes, path.nodes_with_tips, path.nodes_with_help)]
    contexts = [context for nodes in every if nodes for context in split_contexts(nodes)]
    return max(sum(len(node.token_ids) for node in context) for context in contexts)


TIPS = {"tips": True}
CLOSE = {"type": "clip", "clip_low": 0.1, "clip_high": 0.1}
EXACT: list[tuple[type[ObjectiveSettings], dict[str, Any], dict[str, Any]]] = [
    (ObjectiveSettings, {"loss": CLOSE, "kl_weight": 0.1, "kl_estimator": "k3_ratio"}, {}),
    (ObjectiveSettings, {"entropy_bonus": 0.01, "positive_nll": 0.3}, {"attribution": "hard"}),
    (ObjectiveSettings, {"aggregation": "sequence_mean_token_mean", "sampler_correction": None}, {}),
    (ObjectiveSettings, {"aggregation": "sequence_mean_token_sum",
                         "sampler_correction": {"level": "token", "upper": 1.1}}, {}),
    (ObjectiveSettings, {"aggregation": "constant_length", "max_length": 9,
                         "sampler_rejection": {"scope": "token", "upper": 3.0}}, {}),
    (ObjectiveSettings, {"aggregation": "sum_over_length", "max_length": 9, "loss": {"type": "gppo"}}, {}),
    (OffPolicyObjective, {"student_mask": "token", "min_probability": 0.05}, TIPS),
    (OffPolicyObjective, {"student_mask": "turn", "old_context": "student", "min_probability": 0.01}, TIPS),
    (ObjectiveSettings, {"distill": {"form": "reverse_kl", "gate": "gap", "skip_first": 1}}, {}),
    (ObjectiveSettings, {"distill": {"support": 4, "over": "all"}}, {}),
    (ObjectiveSettings, {"distill": {"form": "likelihood", "gate": "gap_centered"}}, {}),
]  # fmt: skip
WHOLE: list[tuple[type[ObjectiveSettings], dict[str, Any], dict[str, Any]]] = [
    (ObjectiveSettings, {"loss": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1}}, {}),
    (ObjectiveSettings, {"sampler_correction": {"level": "sequence"}}, {}),
    (ObjectiveSettings, {"sampler_rejection": {"scope": "mean", "upper": 3.0}}, {"attribution": "hard"}),
    (ObjectiveSettings, {"distill": {"form": "reverse_kl", "discount": 0.7}}, {}),
    (ObjectiveSettings, {"observation_nll": 0.2}, {"attribution": "hard"}),
]


def objective_of(kind: type[ObjectiveSettings], options: dict[str, Any]) -> ObjectiveSettings:
    if "distill" in options:
        options = options | {"distill": {"help": "file", "path": "x"} | options["distill"]}
    return validate(kind, options)


@pytest.mark.parametrize(("kind", "options", "grouped"), EXACT + WHOLE, ids=str)
def test_a_split_changes_no_gradient_and_no_metric(
    kind: type[ObjectiveSettings], options: dict[str, Any], grouped: dict[str, Any]
) -> None:
    traces, objective = window_groups(**grouped), objective_of(kind, options)
    longest, is_whole = longest_context(traces), (kind, options, grouped) in WHOLE
    plain = ContextPolicy()
    wanted = train([plain], traces, objective, max_tokens=10_000)
    assert max(plain.sizes) > 3 * longest and float(plain.gradients[1].abs().max()) > 1e-3
    for max_tokens, num_ranks in ((1, 1), (longest + 4, 1), (1, 2)):
        ranks = [ContextPolicy() for _ in range(num_ranks)]
        found = train(ranks, traces, objective, max_tokens=max_tokens)
        for gradient, expected in zip(ranks[0].gradients, plain.gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        ignored = ("time/help",)
        assert {name: value for name, value in found.metrics.items() if name not in ignored} == {
            name: pytest.approx(value, rel=1e-6, abs=1e-9)  # some shares are float32
            for name, value in wanted.metrics.items() if name not in ignored
        }  # fmt: skip
        assert found.num_scored_tokens >= wanted.num_scored_tokens
        assert (max(max(each.sizes) for each in ranks) > max(max_tokens, longest)) == is_whole
        if num_ranks > 1:
            assert len({len(each.sizes) for each in ranks}) == 2 or is_whole
        mini_batches = make_mini_batches(traces, UpdateSettings(), seed=0, first_step=0)
        records = [values_by_node(mini_batches, report.tokens) for report in (found, wanted)]
        assert records[0].keys() == records[1].keys()
        for key, values in records[1].items():
            assert records[0][key].trainer.tolist() == pytest.approx(values.trainer.tolist(), rel=1e-6)
            assert records[0][key].ratio.tolist() == pytest.approx(values.ratio.tolist(), rel=1e-6)


def test_an_own_loss_gets_whole_rollouts() -> None:
    traces, policy = window_groups(), ContextPolicy()
    objective = ObjectiveSettings()

    def token_loss(inputs: TokenLossInputs) -> TokenLoss:
        return objective.token_loss(inputs)

    update(
        policy, traces, objective=objective, reference=None, token_loss=token_loss,  # type: ignore[arg-type]
        settings=UpdateSettings(max_tokens=1, max_logprob_gap=1e9),
    )  # fmt: skip
    assert len(policy.sizes) == 9 and max(policy.sizes) > longest_context(traces)


def test_a_rollout_that_fits_stays_whole() -> None:
    """The same rows as without splitting, also beside rollouts that are split."""
    paths = rollout_paths(window_groups())
    sizes = [batch.num_tokens for batch in pack(paths, max_tokens=1, whole_rollouts=True)]
    for max_tokens in (max(sizes), 2 * max(sizes), 10_000):
        found, wanted = (
            list(pack(paths, max_tokens=max_tokens, whole_rollouts=whole)) for whole in (False, True)
        )
        assert [batch.ids_N.tolist() for batch in found] == [batch.ids_N.tolist() for batch in wanted]
    limit = sorted(sizes)[4]
    in_batches: dict[int, int] = {}
    for batch in pack(paths, max_tokens=limit):
        assert batch.num_tokens <= limit
        for rollout in batch.rollout_index_T.unique().tolist():
            in_batches[rollout] = in_batches.get(rollout, 0) + 1
    assert all(in_batches[number] == 1 for number, size in enumerate(sizes) if size <= limit)
    assert max(in_batches.values()) > 1


def test_the_kl_of_a_reward_is_that_of_whole_rollouts() -> None:
    values = []
    for max_tokens in (1, 10_000):
        trace = window_group(2)
        del trace.leaves[0]  # no shared turns
        policy, reference = ContextPolicy(), ContextPolicy(seed=1)
        measure_kl(policy, reference, [trace], max_tokens=max_tokens)  # type: ignore[arg-type]
        values.append([value for node in trace.nodes for value in node.kl or ()])
        assert (max(policy.sizes) > 20) == (max_tokens > 1)
    assert values[0] == pytest.approx(values[1], rel=1e-12) and len(values[0]) > 9


def test_fifty_turns_make_no_micro_batch_of_fifty_contexts() -> None:
    trace = Trace(task=Task(key="t", question=""))
    node: Node | None = None
    for turn in range(50):
        prompt = (turn,) * 590
        node = trace.append(
            parent=None if node is None else node.node_id, token_ids=prompt, message=TEXT,
            origin=Origin.ENVIRONMENT if turn else Origin.PROMPT, restarts=turn > 0,
        )  # fmt: skip
        node = trace.append(
            parent=node.node_id, origin=Origin.POLICY, token_ids=(1,) * 10, message=TEXT,
            logprobs=(-1.0,) * 10, entropies=(0.1,) * 10,
        )  # fmt: skip
        node.credit = (1.0,) * 10
    assert node is not None
    trace.finish(Leaf(node_id=node.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=1.0))
    batches = list(pack(rollout_paths([trace]), max_tokens=4096))
    assert [batch.num_tokens for batch in batches] == [*[3600] * 8, 1200]
    entries = [number for batch in batches for number in batch.ordinal_T.tolist()]
    assert entries == list(range(500))
