"""Self-distillation through the update: enumerated gradients of every form, and splits of a mini-batch."""

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_losses import divergence_per_token
from outrider.algorithms.loss_settings import ClipLoss, SamplerCorrection
from outrider.config import validate
from outrider.trace import Insertion, Leaf, Node, Trace
from outrider.training.packing import PackedBatch
from outrider.training.policy import (
    FullTeacher,
    Policy,
    SingleRank,
    TokenScores,
    score_logits,
)
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import UpdateReport, update
from outrider.types import Message, Origin, Outcome, Task
from tests.vectors import load_vectors

HELP = 98
TEXT = Message(role="user", content="")
VECTORS = load_vectors("distill")
CASES = {case["name"]: case for case in VECTORS["enumerated.token_gradients"]["cases"]}
TREE = CASES["tree"]
ROOMY = UpdateSettings(max_logprob_gap=1e9)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TablePolicy:
    """Scores with the logits of a table, one row for each token of each rollout, and with other logits where
    the context contains help.
    """

    settings = OptimizerSettings()

    def __init__(self, student: Tensor, helped: Tensor, rows: Sequence[Sequence[int]]) -> None:
        self.student, self.helped, self.rows = student.clone().requires_grad_(), helped, rows
        self.ranks: Any = SingleRank()
        self.num_steps = 0
        self.gradient = torch.zeros_like(student)
        self.moves: Sequence[Tensor] = ()  # added to the table after each step
        self.num_passes = 0

    def score(self, batch: PackedBatch, *, trains_entropy: bool = False, support: Any = None) -> TokenScores:
        self.num_passes += 1
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        rows = [self.rows[rollout][ordinal] for rollout, ordinal in entries]
        logits = (self.helped if HELP in batch.ids_N.tolist() else self.student)[rows]
        targets = batch.targets_U[batch.token_T]
        if support == "all":
            logprobs, entropies = score_logits(logits, targets)
            return TokenScores(logprobs_T=logprobs, entropies_T=entropies, hidden_TE=logits)
        if isinstance(support, FullTeacher):
            logprobs, entropies = score_logits(logits, targets)
            divergence = divergence_per_token(
                logits.log_softmax(-1),
                support.head(support.hidden_TE).log_softmax(-1),
                alpha=support.alpha,
                tail=False,
            )
            return TokenScores(logprobs_T=logprobs, entropies_T=entropies, divergence_T=divergence)
        values = score_logits(logits, targets, support=support)
        names = ("logprobs_T", "entropies_T", "support_TK", "support_ids_TK")
        return TokenScores(**dict(zip(names, values, strict=False)))

    def frozen_head(self) -> nn.Module:
        return nn.Identity()

    def dummy_forward(self) -> Tensor:
        return 0.0 * self.student.sum()

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        return batch.num_tokens

    def step(self) -> float:
        assert self.student.grad is not None
        self.gradient = self.gradient + self.student.grad
        self.student.grad = None
        with torch.no_grad():
            for move in self.moves[self.num_steps : self.num_steps + 1]:
                self.student += move
        self.num_steps += 1
        return 1.0

    def drop_gradients(self) -> None:
        self.student.grad = None


def add_rollout(
    trace: Trace, turns: Sequence[Sequence[int]], *, is_helped: bool, value: float = 0.0,
    advantage: float = 0.0, engine: Callable[[int], float] = lambda ordinal: -1.0, help_: bool = True,
) -> None:  # fmt: skip
    """A prompt, and after it a message of the environment before each turn. A helped rollout has read the
    help; for another one only the teacher reads it.
    """
    rollout = len(trace.leaves)

    def add(parent: Node | None, origin: Origin, ids: Sequence[int], **options: Any) -> Node:
        parent_id = None if parent is None else parent.node_id
        return trace.append(parent=parent_id, origin=origin, token_ids=tuple(ids), message=TEXT, **options)

    node = trace.nodes[0] if trace.nodes else add(None, Origin.PROMPT, (50,))
    if is_helped:
        node = add(node, Origin.MEMORY, (HELP,))
    node = prompt = add(node, Origin.PROMPT, (51, 52))
    ordinal = 0
    for number, ids in enumerate(turns):
        if number:
            node = add(node, Origin.ENVIRONMENT, (60,))
        logprobs = tuple(engine(ordinal + i) for i in range(len(ids)))
        ordinal += len(ids)
        node = add(node, Origin.POLICY, ids, logprobs=logprobs, entropies=(0.5,) * len(ids))
        node.credit = (advantage,) * len(ids)
    trace.finish(
        Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value,
             success=value > 0.0)
    )  # fmt: skip
    if help_ and not is_helped:
        trace.help[rollout] = (
            Insertion(node_id=prompt.node_id, offset=1, token_ids=(HELP,), text="", source="file"),
        )


def group(*, is_helped: bool = False, num: int = 2, key: str = "t") -> Trace:
    trace = Trace(task=Task(key=key, question=""), modes=("plain",) * num)
    trace.without_memory = is_helped
    return trace


def objective(
    distill: dict[str, Any] | DistillSettings | None, kind: type[ObjectiveSettings] = ObjectiveSettings,
    **options: Any,
) -> ObjectiveSettings:  # fmt: skip
    if isinstance(distill, dict):
        is_file = distill.get("help", "file") == "file"
        distill = validate(DistillSettings, ({"help": "file", "path": "x"} if is_file else {}) | distill)
    made = validate(kind, {"sampler_correction": None, **options})
    return made.model_copy(update={"distill": distill})


def run(
    policy: Any, traces: Sequence[Trace], chosen: ObjectiveSettings, settings: UpdateSettings = ROOMY,
    **options: Any,
) -> UpdateReport:  # fmt: skip
    return update(
        cast(Policy, policy), traces, objective=chosen, settings=settings,
        **({"reference": None} | options),
    )  # fmt: skip


# The enumerated tree


def expected_gradient(
    chosen: ObjectiveSettings, *, plays_helped: bool = False, advantages: bool = False
) -> np.ndarray[Any, Any]:
    """Minus the expected gradient: every trajectory once through an update, times its probability."""
    student, helped = tensor(TREE["student_logits"]), tensor(TREE["helped_logits"])
    acting = (helped if plays_helped else student).log_softmax(-1)
    total = torch.zeros_like(student)
    chances = (acting[0, :, None] + acting[1:]).exp()
    unhelped = student.log_softmax(-1)
    mean = float(((unhelped[0, :, None] + unhelped[1:]).exp() * tensor(TREE["returns"])).sum())
    for first, second in itertools.product(range(3), repeat=2):
        probability = float(chances[first, second])
        trace = group(is_helped=plays_helped, num=1)
        value = TREE["returns"][first][second]
        add_rollout(
            trace, [[first], [second]], is_helped=plays_helped, value=value,
            advantage=value - mean if advantages else 0.0,
        )  # fmt: skip
        policy = TablePolicy(student, helped, [[0, 1 + first]])
        run(policy, [trace], chosen)
        total += probability * policy.gradient
    return -total.numpy()


SUMS = {"aggregation": "sequence_mean_token_sum"}
GATED = {"form": "likelihood", "gate": "gap"}


@pytest.mark.parametrize(
    ("name", "distill"),
    [
        ("reverse_kl, unhelped plays", {"form": "reverse_kl"}),
        *(
            (f"divergence alpha {alpha}, {who} plays", {"alpha": alpha, "support": support})
            for alpha, who in ((0.0, "unhelped"), (0.5, "unhelped"), (1.0, "unhelped"), (0.0, "helped"))
            for support in (3, "all")
        ),
        ("sdar released beta 1.0, unhelped plays", GATED | {"gate_beta": 1.0}),
        ("sdar released beta 5.0, unhelped plays", GATED),
        ("gated reverse_kl beta 5, unhelped plays", {"form": "reverse_kl", "gate": "gap"}),
        ("likelihood of helped successes", {"form": "likelihood", "where": "succeeded"}),
        (
            "reverse_kl to go (discount 1), unhelped plays: the KL of whole sequences",
            {"form": "reverse_kl", "discount": 1.0},
        ),
    ],
)
def test_enumerated_gradients_of_every_form(name: str, distill: dict[str, Any]) -> None:
    plays_helped = "helped plays" in name.replace("unhelped", "") or "of helped" in name
    more = {"plays": "helped", "help": "tips"} if plays_helped else {}
    found = expected_gradient(objective(distill | more, **SUMS), plays_helped=plays_helped)
    np.testing.assert_allclose(found, CASES[name]["minus_expected_gradient"], atol=1e-10)


def test_weights_scale_the_terms_and_policy_weight_leaves_the_other_alone() -> None:
    term = np.array(CASES["reverse_kl, unhelped plays"]["minus_expected_gradient"])
    policy = np.array(CASES["policy gradient, unhelped plays"]["minus_expected_gradient"])
    for weight, factor in ((1.0, 1.0), (0.3, 0.0), (2.0, 0.5)):
        chosen = objective({"form": "reverse_kl", "weight": weight, "policy_weight": factor}, **SUMS)
        found = expected_gradient(chosen, advantages=True)
        np.testing.assert_allclose(found, weight * term + factor * policy, atol=1e-10)


@pytest.mark.parametrize("old_context", ["acting", "student"])
def test_the_ratio_is_that_of_empo2_and_a_term_adds_to_it(old_context: str) -> None:
    denominator = "acting denominator, helped plays (EMPO2 without mask and clip)"
    if old_context == "student":
        denominator = "student denominator, helped plays"
    ratio = np.array(CASES[f"ratio, {denominator}"]["minus_expected_gradient"])
    term = np.array(CASES["divergence alpha 0.0, helped plays"]["minus_expected_gradient"])
    wide = ClipLoss(clip_low=1.0, clip_high=1e6).model_dump()
    options = SUMS | {"old_context": old_context, "student_mask": "none", "loss": wide}
    plain, ratio_form, with_term = (
        expected_gradient(
            objective(None if distill is None else {"help": "tips", "plays": "helped"} | distill,
                      OffPolicyObjective, **options),
            plays_helped=True,
            advantages=True,
        )
        for distill in (None, {"form": "ratio"}, {"support": 3})
    )  # fmt: skip
    np.testing.assert_allclose(plain, ratio, atol=1e-10)
    assert np.array_equal(plain, ratio_form)  # bit for bit
    np.testing.assert_allclose(with_term, ratio + term, atol=1e-10)


def test_added_advantages_are_the_reverse_kl_in_the_policy_term() -> None:
    """At the start the ratio is 1, so A + weight times the gap is the policy gradient and the reverse KL."""
    term = np.array(CASES["reverse_kl, unhelped plays"]["minus_expected_gradient"])
    to_go = np.array(
        CASES["reverse_kl to go (discount 1), unhelped plays: the KL of whole sequences"][
            "minus_expected_gradient"
        ]
    )
    policy = np.array(CASES["policy gradient, unhelped plays"]["minus_expected_gradient"])
    for discount, wanted in ((0.0, term), (1.0, to_go)):
        distill = {"form": "advantage_add", "weight": 0.4, "discount": discount}
        found = expected_gradient(objective(distill, **SUMS), advantages=True)
        np.testing.assert_allclose(found, policy + 0.4 * wanted, atol=1e-10)


def test_scaled_advantages_and_their_schedule() -> None:
    student, helped = tensor([[0.0, 1.0]]), tensor([[0.5, -0.5]])
    gap = float((helped.log_softmax(-1) - student.log_softmax(-1))[0, 0])
    assert gap > np.log(1.2)
    for training_step, scale in ((0, 0.5), (25, 0.25), (50, 0.0), (80, 0.0)):
        trace = group(num=1)
        add_rollout(trace, [[0]], is_helped=False, advantage=2.0)
        policy = TablePolicy(student, helped, [[0]])
        run(policy, [trace], objective({"form": "advantage_scale"}), training_step=training_step)
        slope = float(policy.gradient[0, 0] / (1.0 - student.softmax(-1)[0, 0]))
        assert slope == pytest.approx(-2.0 * (1.0 - scale + scale * 1.2), rel=1e-12)


def test_the_schedule_counts_training_steps_and_the_head_is_copied_once() -> None:
    """An update with two mini-batches makes two steps of the optimizer, and one without a signal none."""
    student, helped = tensor([[0.0, 1.0]]), tensor([[0.5, -0.5]])
    two = UpdateSettings(num_mini_batches=2, max_logprob_gap=1e9)
    traces = [group(num=1, key=key) for key in ("a", "b")]
    for trace in traces:
        add_rollout(trace, [[0]], is_helped=False, advantage=2.0)
    policy = TablePolicy(student, helped, [[0]])
    policy.num_steps = 30  # in 25 training steps
    run(policy, traces, objective({"form": "advantage_scale"}), two, training_step=25)
    slope = float(policy.gradient[0, 0] / (1.0 - student.softmax(-1)[0, 0]))
    assert slope == pytest.approx(2 * -2.0 * (0.75 + 0.25 * 1.2), rel=1e-12)

    policy, copies = TablePolicy(student, helped, [[0]]), list[nn.Module]()
    policy.frozen_head = lambda: copies.append(nn.Identity()) or copies[-1]  # type: ignore[method-assign, func-returns-value]
    run(policy, traces, objective({"support": "all"}), two)
    assert len(copies) == 1


def test_a_centred_gate_has_the_mean_of_the_mini_batch() -> None:
    """Of all of its micro-batches: a token that the teacher likes less than the mean is pushed down."""
    student, helped = tensor([[0.0, 1.0, 0.3]]), tensor([[0.5, -0.5, 0.1]])
    gates = torch.sigmoid(5.0 * (helped.log_softmax(-1) - student.log_softmax(-1)))[0]
    tokens = [0, 1, 1, 2]
    factors = gates[tokens] - gates[tokens].mean()
    onehot = torch.eye(3, dtype=torch.float64)[tokens]
    wanted = (factors[:, None] * (student.softmax(-1) - onehot)).sum(0) / 4
    for max_tokens in (1, 1000):
        trace = group(num=4)
        for token in tokens:
            add_rollout(trace, [[token]], is_helped=False)
        policy = TablePolicy(student, helped, [[0]] * 4)
        chosen = objective({"form": "likelihood", "gate": "gap_centered"})
        run(policy, [trace], chosen, UpdateSettings(max_tokens=max_tokens, max_logprob_gap=1e9))
        torch.testing.assert_close(policy.gradient[0], wanted, rtol=1e-12, atol=1e-14)


def test_the_mean_gate_is_that_of_the_current_policy_in_later_epochs() -> None:
    student, helped = tensor([[0.0, 1.0, 0.3]]), tensor([[0.5, -0.5, 0.1]])
    move, tokens = tensor([[2.0, -1.0, 0.0]]), [0, 1, 1, 2]
    onehot = torch.eye(3, dtype=torch.float64)[tokens]
    wanted = torch.zeros(3, dtype=torch.float64)
    for logits in (student, student + move):
        gates = torch.sigmoid(5.0 * (helped.log_softmax(-1) - logits.log_softmax(-1)))[0]
        factors = gates[tokens] - gates[tokens].mean()
        wanted += (factors[:, None] * (logits.softmax(-1) - onehot)).sum(0) / 4
    trace = group(num=4)
    for token in tokens:
        add_rollout(trace, [[token]], is_helped=False)
    policy = TablePolicy(student, helped, [[0]] * 4)
    policy.moves = [move]
    chosen = objective({"form": "likelihood", "gate": "gap_centered"})
    run(policy, [trace], chosen, UpdateSettings(num_epochs=2, max_logprob_gap=1e9))
    torch.testing.assert_close(policy.gradient[0], wanted, rtol=1e-12, atol=1e-14)


def test_the_step_ratio_is_capped_and_counts_from_the_start_of_the_update() -> None:
    student, helped = tensor([[0.0, 1.0]]), tensor([[0.5, -0.5]])
    move = tensor([[3.0, 0.0]])
    trace = group(num=1)
    add_rollout(trace, [[0]], is_helped=False)
    policy = TablePolicy(student, helped, [[0]])
    policy.moves = [move]
    chosen = objective({"form": "reverse_kl", "step_ratio_cap": 1.5})
    report = run(policy, [trace], chosen, UpdateSettings(num_epochs=2, max_logprob_gap=1e9))
    onehot, total = tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.float64)
    for logits, cap in ((student[0], 1.0), ((student + move)[0], 1.5)):
        gap = helped[0].log_softmax(-1)[0] - logits.log_softmax(-1)[0]
        total += cap * -gap * (onehot - logits.softmax(-1))
    torch.testing.assert_close(policy.gradient[0], total, rtol=1e-12, atol=1e-14)
    ratio = float(((student + move).log_softmax(-1) - student.log_softmax(-1))[0, 0].exp())
    assert report.metrics["distill/step_ratio_max"] == pytest.approx(ratio) and ratio > 1.5


# Splits of a mini-batch


class ThreadRanks:
    """Ranks in threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._values = rank, size, barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = copy.deepcopy(self._values)  # as if sent to other processes
        self._barrier.wait()
        return gathered

    def share(self, paths: Sequence[Any]) -> list[Any]:
        return list(paths)[self.rank :: self.size]


def mixed_groups(*, is_helped: bool = False) -> tuple[list[Trace], list[list[int]]]:
    """Groups of rollouts with and without help, of several turns, and the rows of their tokens."""
    draw = np.random.Generator(np.random.PCG64(5))
    traces, rows = [], []
    for number in range(3):
        trace = group(is_helped=is_helped, num=3, key=f"t{number}")
        for rollout in range(3):
            turns = [draw.integers(0, 6, size=draw.integers(1, 5)).tolist() for _ in range(1 + rollout % 2)]
            has_help = (number + rollout) % 3 != 1
            add_rollout(
                trace, turns, is_helped=is_helped and has_help, help_=has_help,
                value=float(draw.integers(0, 2)), advantage=float(draw.normal()) * (rollout != 0),
                engine=lambda ordinal: -1.2 - 0.1 * ordinal,
            )  # fmt: skip
            rows.append([int(row) for row in draw.integers(0, 12, size=sum(map(len, turns)))])
        traces.append(trace)
    return traces, rows


def split_gradient(
    distill: dict[str, Any], *, max_tokens: int = 4096, size: int = 1, options: dict[str, Any] | None = None
) -> tuple[Tensor, dict[str, float]]:
    traces, rows = mixed_groups(is_helped=distill.get("plays") == "helped")
    draw = torch.Generator().manual_seed(3)
    student, helped = (torch.randn(12, 6, generator=draw, dtype=torch.float64) for _ in "ab")
    settings = UpdateSettings(max_tokens=max_tokens, max_logprob_gap=1e9)
    correction = {"sampler_correction": SamplerCorrection(upper=1.1).model_dump()}
    chosen = objective(distill, **correction | (options or {}))
    barrier, values = threading.Barrier(size), [None] * size
    policies = [TablePolicy(student, helped, rows) for _ in range(size)]
    reports: list[Any] = [None] * size

    def work(rank: int) -> None:
        reports[rank] = run(policies[rank], traces, chosen, settings)

    threads = []
    for rank, policy in enumerate(policies):
        policy.ranks = ThreadRanks(rank, size, barrier, values)
        threads.append(threading.Thread(target=work, args=(rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    metrics = {name: v for name, v in reports[0].metrics.items() if name != "time/help"}
    return torch.stack([policy.gradient for policy in policies]).sum(0), metrics


@pytest.mark.parametrize(
    ("distill", "options"),
    [
        ({"support": 3}, {}),
        ({"support": "all", "alpha": 0.5, "gate": "gap", "skip_first": 1}, {}),
        ({"form": "reverse_kl", "discount": 0.7, "over": "all", "max_gap": 1.0}, {}),
        ({"form": "likelihood", "gate": "gap_centered", "policy_weight": 0.0}, {}),
        ({"form": "k3_ratio", "where": "failed", "policy_outside": 0.3}, {}),
        ({"form": "reverse_kl", "skip_first": 1}, {"aggregation": "sequence_mean_token_mean"}),
        ({"form": "advantage_add", "weight": 0.3, "discount": 0.5}, {}),
        ({"form": "advantage_scale"}, {"aggregation": "constant_length", "max_length": 9}),
        ({"plays": "helped", "help": "tips", "form": "likelihood"}, {"aggregation": "sum_over_length",
                                                                    "max_length": 9}),
        ({"plays": "helped", "help": "tips", "support": 2, "tail": False}, {}),
    ],
)  # fmt: skip
def test_any_split_has_the_same_gradient(distill: dict[str, Any], options: dict[str, Any]) -> None:
    wanted, metrics = split_gradient(distill, options=options)
    assert float(wanted.abs().max()) > 1e-3
    for max_tokens, size in ((1, 1), (14, 1), (4096, 2), (1, 2)):
        found, others = split_gradient(distill, max_tokens=max_tokens, size=size, options=options)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert others == pytest.approx(metrics, rel=1e-6, abs=1e-12)  # shares are float32


@pytest.mark.parametrize(
    "case",
    [case for case in VECTORS["normalisation"]["cases"] if "losses" in case],
    ids=lambda case: case["name"][:40],
)
def test_recorded_means(case: dict[str, Any]) -> None:
    """Token losses are recorded, so the gaps are chosen for them: one token has the loss -gap log S."""
    trace, rows, helped, student = group(num=len(case["losses"])), [], [], []
    for losses, has_help in zip(case["losses"], case["has_help"], strict=True):
        add_rollout(trace, [[0] * len(losses)], is_helped=False, help_=has_help)
        rows.append([len(student) + i for i in range(len(losses))])
        for loss in losses:  # a forward KL of this size, from two tokens
            p = torch.tensor(0.9, dtype=torch.float64)
            low, high = 1e-12, 0.9
            for _ in range(200):
                q = (low + high) / 2
                value = float(p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
                low, high = (q, high) if value > loss else (low, q)
            helped.append([float(p.log()), float((1 - p).log())])
            student.append([np.log(low), np.log1p(-low)])
    kinds = {
        "own_token_mean": ({"over": "own"}, "token_mean"),
        "all_token_mean": ({"over": "all"}, "token_mean"),
        "own_sequence_mean_token_mean": ({"over": "own"}, "sequence_mean_token_mean"),
        "trl_mean_over_all_sequences": ({"over": "all"}, "sequence_mean_token_mean"),
    }
    for name, (distill, aggregation) in kinds.items():
        if name in case:
            policy = TablePolicy(tensor(student), tensor(helped), rows)
            for max_tokens in (1, 1000):
                settings = UpdateSettings(max_tokens=max_tokens, max_logprob_gap=1e9)
                chosen = objective({"support": 2, "tail": False} | distill, aggregation=aggregation)
                metrics = run(policy, [trace], chosen, settings).metrics
                assert metrics.get("distill/loss", 0.0) == pytest.approx(case[name], abs=1e-9)
