"""Hybrid rollouts through the real loop and a real buffer, and RAPO's credit against its formulas written
down again.
"""

import copy
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.retrieval import (
    RetrievalHook,
    RetrievalSettings,
    retrieval_reward,
    scheduled_probability,
)
from outrider.engines.base import Request
from outrider.environments.base import StepResult
from outrider.errors import ToolFault
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.metrics.registry import declared_metric
from outrider.rollout.hooks import EpisodeState
from outrider.rollout.settings import Limits
from outrider.trace import Node, Trace
from outrider.training.step_metrics import retrieval_metrics
from outrider.types import Message, Origin, Outcome, Step, Task, Trajectory
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, tasks

NUM_STEPS = 5  # of a stored trajectory; the last one is terminal


def stored(task: Task, number: int) -> Trajectory:
    steps = [
        Step(
            text=f"do {task.key} {number} {i}",
            observation=f"saw {number} {i}",
            is_terminal=i == NUM_STEPS - 1,
        )
        for i in range(NUM_STEPS)
    ]
    return Trajectory(
        trajectory_id=f"{task.key}/{number}",
        task_key=task.key,
        agent="expert",
        prompt=(),
        steps=tuple(steps),
        reward=1.0,
    )


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepTraceBuffer]:
    path: Path = tmp_path_factory.mktemp("buffer") / "steps.sqlite"
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as made:
        everyone = tasks(3)
        made.add_trajectories(
            [stored(t, n) for t in everyone for n in range(2)],
            questions={t.key: t.question for t in everyone},
        )
        yield made


def play(
    buffer: StepTraceBuffer, *, modes: Sequence[str] = ("hybrid",) * 6, num_tasks: int = 2, step: int = 0,
    on_step: Any = None, limits: Limits | None = None, seed: int = 0, **chosen: Any,
) -> tuple[list[Trace], RetrievalHook, Factory]:  # fmt: skip
    hook = RetrievalHook(
        RetrievalSettings(**({"probability": 1.0} | chosen)), buffer=buffer, num_training_steps=10
    )

    def ids(request: Request) -> list[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(2, 9))]

    def make(task: Task, number: int) -> Fake:
        dice = random.Random(f"{task.key} {number}")
        answer = on_step or (lambda n, text: StepResult(message=None, done=True) if n == 6 else say(f" o{n}"))
        return Fake(on_step=answer, episode_return=float(dice.random() < 0.5))

    factory = Factory(make)
    runs = scheduler(
        RawEngine(TOKENIZER, ids),
        factory,
        hooks=[hook],
        limits=limits or Limits(max_turns=9),
        seed=seed,
        max_concurrent=1,
    )
    return runs.run(tasks(num_tasks), modes=modes, training_step=step).traces, hook, factory


def paths(traces: Sequence[Trace]) -> list[list[Node]]:
    return [path for trace in traces for _, path in trace.rollouts()]


def test_a_retried_rollout_is_counted_once(buffer: StepTraceBuffer) -> None:
    """What the tries before it counted is taken back."""
    calls = itertools.count()

    def flaky(number: int, text: str) -> StepResult:
        if next(calls) % 17 == 16:
            raise ToolFault("gone")
        return StepResult(message=None, done=True) if number == 6 else say(f" o{number}")

    _, plain, _ = play(buffer, probability=0.5)
    _, retried, factory = play(buffer, probability=0.5, on_step=flaky)
    assert len(factory.made) > 12 and retried.counts == plain.counts


def records(buffer: StepTraceBuffer, node: Node) -> list[Any]:
    everything = {r.step_id: r for t in tasks(3) for n in range(2) for r in buffer.trajectory(f"{t.key}/{n}")}
    return [everything[step_id] for step_id in node.metadata["step_ids"]]


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_the_form_of_a_hybrid_rollout(buffer: StepTraceBuffer, probability: float) -> None:
    traces, hook, _ = play(buffer, probability=probability)
    num = 0
    for path in paths(traces):
        origins = [node.origin for node in path]
        assert origins[:2] == [Origin.PROMPT, Origin.POLICY]  # step 0 is on-policy
        for place, origin in enumerate(origins):
            if origin is Origin.BUFFER:
                assert origins[place + 1] is Origin.POLICY and origins[place - 1] is Origin.ENVIRONMENT
                assert Origin.BUFFER not in origins[place + 1 : place + 3]
        shown = [
            step_id for node in path if node.origin is Origin.BUFFER for step_id in node.metadata["step_ids"]
        ]
        assert len(shown) == len(set(shown))  # never the same step twice
        num += len(shown)
        for node in path:
            if node.origin is Origin.BUFFER:
                [record] = records(buffer, node)
                assert not record.is_terminal
                assert node.message.content == f"<retrieve>{record.text}\n{record.observation}</retrieve>\n"
                assert (
                    TOKENIZER.decode(node.token_ids) == node.message.content
                    and node.logprobs == ()
                    and not node.trainable
                )
                assert (
                    node.metadata["num_calls_saved"] == 1 and node.metadata["source_task"] == record.task_key
                )
    assert hook.counts["retrievals"] == num > 0 and hook.counts["opportunities"] == 12 * 6
    assert num == 72 if probability == 1.0 else 20 < num < 52


def test_the_nearest_step_is_shown(buffer: StepTraceBuffer) -> None:
    """The best hit of the buffer for the rollout's own steps, asked for by independent code; what it was
    shown is not its own.
    """
    traces, _, _ = play(buffer, num_tasks=1, modes=("hybrid",) * 2)
    for path in paths(traces):
        history, shown = ["question 0"], set()
        for place, node in enumerate(path):
            if node.origin is Origin.BUFFER:
                key = load_embedder("hash").embed(
                    ["\n".join(part.strip() for part in history if part.strip())]
                )[0]
                everything = [
                    r for t in tasks(3) for n in range(2) for r in buffer.trajectory(f"{t.key}/{n}")
                ]
                allowed = [r for r in everything if not r.is_terminal and r.step_id not in shown]
                nearness = [
                    float(np.dot(load_embedder("hash").embed([r.history_text])[0], key)) for r in allowed
                ]
                assert node.metadata["similarity"] == pytest.approx(max(nearness), abs=1e-5)
                assert records(buffer, node)[0].step_id in {
                    r.step_id
                    for r, near in zip(allowed, nearness, strict=True)
                    if near > max(nearness) - 1e-5
                }
                shown.add(records(buffer, node)[0].step_id)
            elif node.trainable:
                history += [
                    node.message.content,
                    path[place + 1].message.content if place + 1 < len(path) else "",
                ]


def test_in_the_form_of_a_turn_nothing_marks_the_step(buffer: StepTraceBuffer) -> None:
    shown = [n for path in paths(play(buffer, form="turn")[0]) for n in path if n.origin is Origin.BUFFER]
    for node in shown:
        [record] = records(buffer, node)
        assert node.message.content == f"{record.text}\n{record.observation}" and not node.trainable
    assert shown


def test_nothing_below_the_least_similarity_is_shown(buffer: StepTraceBuffer) -> None:
    def similarities(**chosen: Any) -> list[float]:
        return [
            n.metadata["similarity"]
            for p in paths(play(buffer, **chosen)[0])
            for n in p
            if n.origin is Origin.BUFFER
        ]

    without = similarities()
    middle = float(np.median(without))
    above = similarities(min_similarity=middle)
    assert min(without) < middle and above and min(above) >= middle
    _, hook, _ = play(buffer, min_similarity=middle)
    # what was too far counts as an opportunity without a candidate
    assert hook.counts["retrievals"] == len(above)
    assert hook.counts["empty"] == hook.counts["opportunities"] - len(above) > 0


def test_on_policy_rollouts_and_evaluation_never_retrieve(buffer: StepTraceBuffer) -> None:
    for modes in (("on_policy",) * 3, ("evaluate",) * 2):
        traces, hook, _ = play(buffer, modes=modes)
        assert all(node.origin is not Origin.BUFFER for path in paths(traces) for node in path)
        assert hook.counts["opportunities"] == 0


@pytest.mark.parametrize("scope", ["same_task", "other_tasks", "all"])
def test_scope(buffer: StepTraceBuffer, scope: str) -> None:
    traces, hook, _ = play(buffer, scope=scope)
    for trace in traces:
        sources = {
            n.metadata["source_task"]
            for _, path in trace.rollouts()
            for n in path
            if n.origin is Origin.BUFFER
        }
        assert sources and (scope != "same_task" or sources == {trace.task.key})
        assert scope != "other_tasks" or trace.task.key not in sources
    assert hook.counts["empty"] == 0


def test_terminal_steps_come_only_when_asked_for_and_a_spent_scope_is_counted(
    buffer: StepTraceBuffer,
) -> None:
    """One task has 8 plain and 2 terminal steps; 11 turns ask 10 times."""
    answer = lambda n, text: StepResult(message=None, done=True) if n == 10 else say(f" o{n}")  # noqa: E731
    for include, most in ((False, 8), (True, 10)):
        traces, hook, _ = play(
            buffer,
            scope="same_task",
            include_terminal=include,
            on_step=answer,
            limits=Limits(max_turns=11),
            num_tasks=1,
            modes=("hybrid",),
        )
        shown = [
            record
            for node in paths(traces)[0]
            if node.origin is Origin.BUFFER
            for record in records(buffer, node)
        ]
        assert len(shown) == most and any(r.is_terminal for r in shown) is include
        assert hook.counts == {"opportunities": 10, "retrievals": most} | (
            {"empty": 10 - most} if most < 10 else {}
        )


def test_noise_shows_random_steps_of_the_scope_by_its_own_stream(buffer: StepTraceBuffer) -> None:
    noisy, _, _ = play(buffer, noise=1.0, modes=("hybrid",) * 20)
    again, _, _ = play(buffer, noise=1.0, modes=("hybrid",) * 20)
    nodes = [node for path in paths(noisy) for node in path if node.origin is Origin.BUFFER]
    assert [n.token_ids for n in nodes] == [
        n.token_ids for path in paths(again) for n in path if n.origin is Origin.BUFFER
    ]
    assert all(math.isnan(node.metadata["similarity"]) for node in nodes)
    drawn = {step_id for node in nodes for step_id in node.metadata["step_ids"]}
    assert len(drawn) == 3 * 2 * (NUM_STEPS - 1)  # every non-terminal step turns up


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.2, 0.2, 0.2, 0.2, 0.2]),
        ("linear", [0.2, 0.35, 0.5, 0.8, 0.8]),
        ("cosine", [0.2, 0.2 + 0.6 * (1 - math.cos(math.pi / 4)) / 2, 0.5, 0.8, 0.8]),
    ],
)
def test_schedules_at_their_ends(schedule: Any, expected: list[float]) -> None:
    chosen = RetrievalSettings(
        probability=0.2, final_probability=None if schedule == "constant" else 0.8, schedule=schedule
    )
    assert [scheduled_probability(chosen, step, 9) for step in (0, 2, 4, 8, 50)] == pytest.approx(
        expected, abs=1e-12
    )
    assert scheduled_probability(chosen, 0, 1) == scheduled_probability(chosen, 0, 0) == 0.2


def test_the_schedule_is_followed_by_the_rollouts(buffer: StepTraceBuffer) -> None:
    chosen: dict[str, Any] = {"probability": 0.0, "final_probability": 1.0, "schedule": "linear"}
    assert [play(buffer, step=step, **chosen)[1].counts["retrievals"] > 0 for step in (0, 9)] == [False, True]


def test_trajectory_level_shows_the_rest_of_the_trajectory_and_nothing_twice(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, level="trajectory", modes=("hybrid",) * 10, noise=0.5)
    longest = 0
    for path in paths(traces):
        shown: list[int] = []
        for node in path:
            if node.origin is Origin.BUFFER:
                found = records(buffer, node)
                assert len({r.trajectory_id for r in found}) == 1 and not any(r.is_terminal for r in found)
                rest = [
                    r
                    for r in buffer.trajectory(found[0].trajectory_id)[found[0].step_index :]
                    if not r.is_terminal
                ]
                assert [r.step_id for r in found] == [r.step_id for r in rest if r.step_id not in shown]
                assert node.metadata["num_calls_saved"] == len(found)
                shown += [r.step_id for r in found]
                longest = max(longest, len(found))
        assert len(shown) == len(set(shown))
    assert longest > 1


def test_segment_level_shows_a_random_part_of_what_followed(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, level="segment", modes=("hybrid",) * 20)
    lengths = []
    for path in paths(traces):
        first = next(node for node in path if node.origin is Origin.BUFFER)
        found = records(buffer, first)
        rest = [
            r for r in buffer.trajectory(found[0].trajectory_id)[found[0].step_index :] if not r.is_terminal
        ]
        assert [r.step_id for r in found] == [r.step_id for r in rest[: len(found)]]
        lengths.append(len(found) / len(rest))
    assert min(lengths) < 0.5 and max(lengths) == 1.0 and len(set(lengths)) > 2


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepTraceBuffer]:
    """Seven trajectories a task whose steps are the same, but for one step of the last."""
    path: Path = tmp_path_factory.mktemp("twins") / "steps.sqlite"
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as made:
        every = [
            replace(stored(task, 0), trajectory_id=f"{task.key}/{number}")
            for task in tasks(2)
            for number in range(7)
        ]
        other = Step(text="do other", observation="saw other")
        every[-1] = replace(every[-1], steps=(*every[-1].steps[:2], other, *every[-1].steps[3:]))
        made.add_trajectories(every, keep_best=None, questions={task.key: task.question for task in tasks(2)})
        yield made


@pytest.mark.parametrize(
    "chosen", [{}, {"noise": 1.0}, {"level": "trajectory"}, {"mode": "execute"}, {"scope": "same_task"}]
)
def test_equal_steps_of_sibling_trajectories_are_one_step(
    twins: StepTraceBuffer, chosen: dict[str, Any]
) -> None:
    """Never the same step twice in a rollout, by what it says and not by its number; what is left is
    found all the same.
    """
    answer = lambda n, text: StepResult(message=None, done=True) if n == 29 else say(f" o{n}")  # noqa: E731
    limits = Limits(max_turns=14, max_response_tokens=6000, max_splice_tokens=2000)
    traces, hook, _ = play(twins, on_step=answer, limits=limits, num_tasks=2, modes=("hybrid",) * 2, **chosen)
    every = {r.step_id: r for t in tasks(2) for n in range(7) for r in twins.trajectory(f"{t.key}/{n}")}
    num_different = len({(r.text, r.observation) for r in every.values() if not r.is_terminal})
    for key, path in ((trace.task.key, path) for trace in traces for _, path in trace.rollouts()):
        ids = [
            step_id for node in path if node.origin is Origin.BUFFER for step_id in node.metadata["step_ids"]
        ]
        shown = [(every[step_id].text, every[step_id].observation) for step_id in ids]
        own = 5 if key == "task 1" else 4
        assert len(shown) == len(set(shown)) == (own if chosen.get("scope") else num_different)
    assert hook.counts["empty"] > 0


def test_retrievals_of_a_certain_policy_are_counted(buffer: StepTraceBuffer) -> None:
    """The entropy before them is under the floor that Eq. 5 divides by."""
    algorithm = Rapo(RapoSettings(group_size=6, num_hybrid=6), buffer=buffer, num_training_steps=10)
    traces, hook, _ = play(buffer, num_tasks=1)
    for certain, expected in ((False, 0), (True, hook.counts["retrievals"])):
        for node in traces[0].nodes:
            node.entropies, node.credit = (1e-5,) * len(node.entropies) if certain else node.entropies, None
        metrics = retrieval_metrics(traces, [algorithm.assign_advantages(traces[0])], hook.counts)
        assert (
            metrics["retrieval/num_floored"] == expected
            and declared_metric("retrieval/num_floored").unit == "steps"
        )


def test_execute_does_the_action_and_shows_the_real_answer(buffer: StepTraceBuffer) -> None:
    def answer(n: int, text: str) -> StepResult:
        return StepResult(message=None, done=True) if n == 8 else say(f"real {n}")

    traces, _, factory = play(buffer, mode="execute", on_step=answer, modes=("hybrid",))
    for path, environment in zip(paths(traces), factory.made, strict=True):
        spoken = [n.message.content for n in path if n.trainable]
        done = [records(buffer, n)[0].text for n in path if n.origin is Origin.BUFFER]
        assert sorted(environment.texts) == sorted(spoken + done)  # type: ignore[attr-defined]
        assert all(
            "real" in n.message.content and "saw" not in n.message.content
            for n in path
            if n.origin is Origin.BUFFER
        )
        assert all(n.metadata["num_calls_saved"] == 0 for n in path if n.origin is Origin.BUFFER)


def test_execute_can_end_the_episode(buffer: StepTraceBuffer) -> None:
    def answer(n: int, text: str) -> StepResult:
        return StepResult(message=None, done=True, reward=1.0) if text.startswith("do ") else say(" o")

    traces, _, _ = play(buffer, mode="execute", on_step=answer)
    for trace in traces:
        for leaf, path in trace.rollouts():
            assert leaf.outcome is Outcome.FINISHED and [n.origin for n in path][2:] == [
                Origin.ENVIRONMENT,
                Origin.BUFFER,
            ]
            assert path[-1].reward == 1.0


@pytest.mark.parametrize("no", [{"invalid": True}, {"refused": True}])
def test_a_refused_action_falls_back_to_the_policy_and_is_counted(
    buffer: StepTraceBuffer, no: dict[str, bool]
) -> None:
    """Whether the environment could not read it or did not do it."""

    def answer(n: int, text: str) -> StepResult:
        if text.startswith("do "):
            return StepResult(message=Message(role="inline", content="no"), **no)
        return say(" o")

    traces, hook, _ = play(buffer, mode="execute", on_step=answer, limits=Limits(max_turns=4))
    assert hook.counts["refused"] == hook.counts["retrievals"] == 12 * 3
    for path in paths(traces):
        assert [n.origin for n in path if n.trainable] == [Origin.POLICY] * 4 and all(
            n.origin is not Origin.BUFFER for n in path
        )


def test_a_long_step_is_cut_with_a_mark_and_stays_closed(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, limits=Limits(max_turns=3, max_splice_tokens=36))
    nodes = [n for path in paths(traces) for n in path if n.origin is Origin.BUFFER]
    assert nodes and all(len(n.token_ids) == 36 and n.metadata["num_tokens_cut"] > 0 for n in nodes)
    texts = [TOKENIZER.decode(n.token_ids) for n in nodes]
    assert all(" [...] " in text and text.endswith("</retrieve>\n") for text in texts)


def mixed(buffer: StepTraceBuffer, seed: int = 0) -> list[Trace]:
    """Groups of on-policy rollouts, hybrid ones, some cut right after a retrieval's turn, and faults."""

    def answer(n: int, text: str) -> StepResult:
        if n == 3 and len(text) == 4:
            raise RuntimeError("a fault")
        return StepResult(message=None, done=True) if n == 3 else say(f" o{n}")

    traces, _, _ = play(
        buffer, modes=("on_policy",) * 3 + ("hybrid",) * 5, num_tasks=3, on_step=answer, probability=0.5,
        seed=seed, limits=Limits(max_turns=6, max_response_tokens=170, max_turn_tokens=20),
    )  # fmt: skip
    return traces


def expected_credit(trace: Trace, *, a: float, m: float) -> dict[int, tuple[float, float] | None]:
    """(A, ratio scale) of every rollout by Eq. 2 and 5-10, straight from the nodes."""
    z: dict[int, float] = {}
    share: dict[int, float] = {}
    for leaf, path in trace.rollouts():
        if leaf.episode_return is None:
            continue
        values = []
        for place, node in enumerate(path):
            if node.origin is not Origin.BUFFER:
                continue
            before = [n for n in path[:place] if n.origin is Origin.POLICY][-1]
            after = [n for n in path[place:] if n.origin is Origin.POLICY][:1]
            if after:
                h_b, h_a = np.mean(before.entropies), np.mean(after[0].entropies)
                values.append(np.tanh(2 * -(h_a - h_b) / h_b) * h_b)
        z[leaf.rollout] = float(np.mean(values)) if values else 0.0
        sizes = {origin: sum(len(n.token_ids) for n in path if n.origin is origin) for origin in Origin}
        response = sum(sizes.values()) - sizes[Origin.PROMPT]
        share[leaf.rollout] = sizes[Origin.BUFFER] / response
    returns = {
        leaf.rollout: leaf.episode_return for leaf, _ in trace.rollouts() if leaf.episode_return is not None
    }

    def normalised(values: dict[int, float]) -> dict[int, float]:
        array = np.array(list(values.values()))
        if len(array) < 2 or np.ptp(array) == 0:
            return dict.fromkeys(values, 0.0)
        return {
            key: float((value - array.mean()) / (array.std(ddof=1) + 1e-6)) for key, value in values.items()
        }

    a_acc, a_ret = normalised(returns), normalised(z)
    return {
        rollout: ((1 + a * a_ret[rollout]) * a_acc[rollout], 1 + m * share[rollout])
        if rollout in returns
        else None
        for rollout in trace.leaves
    }


@pytest.mark.parametrize(("a", "m"), [(0.2, 0.05), (1.0, 0.5), (0.0, 0.3), (0.7, 0.0)])
def test_credit_and_ratio_scale_are_the_formulas(buffer: StepTraceBuffer, a: float, m: float) -> None:
    algorithm = Rapo(
        RapoSettings(group_size=8, num_hybrid=5, advantage_weight=a, ratio_weight=m),
        buffer=buffer,
        num_training_steps=10,
    )
    seen: set[str] = set()
    for trace in [trace for seed in range(3) for trace in mixed(buffer, seed)]:
        algorithm.assign_advantages(trace)
        for (leaf, path), (rollout, expected) in zip(
            trace.rollouts(), expected_credit(trace, a=a, m=m).items(), strict=True
        ):
            assert leaf.rollout == rollout
            seen |= {"retrieved"} if any(n.origin is Origin.BUFFER for n in path) else {"plain"}
            if expected is None:
                seen.add("fault")
                continue
            for node in path:
                if node.trainable:
                    assert node.credit == pytest.approx((expected[0],) * len(node.token_ids), abs=1e-12)
                    assert node.ratio_scale == pytest.approx(expected[1], abs=1e-12)
                else:
                    assert node.credit is None
        owned = {id(node) for _, path in trace.rollouts() for node in path}
        # what a fault left is unassigned
        assert all(node.credit is None for node in trace.nodes if id(node) not in owned)
    assert seen == {"retrieved", "plain", "fault"}


def bits(trace: Trace) -> list[tuple[tuple[float, ...] | None, float]]:
    return [(node.credit, node.ratio_scale) for node in trace.nodes]


@pytest.mark.parametrize("advantage", ["group_normalized", "group_centered", "leave_one_out"])
def test_switched_off_it_is_grpo_bit_for_bit_also_on_retrieved_nodes(
    buffer: StepTraceBuffer, advantage: Any
) -> None:
    traces = mixed(buffer)
    assert any(node.origin is Origin.BUFFER for trace in traces for node in trace.nodes)
    ours, theirs = copy.deepcopy(traces), copy.deepcopy(traces)
    off = RapoSettings(
        group_size=8, num_hybrid=5, advantage_weight=0.0, ratio_weight=0.0, advantage=advantage
    )
    for one, other in zip(ours, theirs, strict=True):
        Rapo(off, buffer=buffer, num_training_steps=1).assign_advantages(one)
        Grpo(GrpoSettings(group_size=8, advantage=advantage)).assign_advantages(other)
        assert bits(one) == bits(other)
    assert any(credit is not None and any(credit) for trace in ours for credit, _ in bits(trace))


def test_a_hybrid_rollout_that_never_retrieved_counts_as_on_policy(buffer: StepTraceBuffer) -> None:
    traces, hook, _ = play(buffer, modes=("on_policy",) * 4 + ("hybrid",) * 4, probability=0.0, num_tasks=3)
    assert hook.counts["opportunities"] > 0 and hook.counts["retrievals"] == 0
    for trace in traces:
        other = copy.deepcopy(trace)
        Rapo(RapoSettings(group_size=8, num_hybrid=4), buffer=buffer, num_training_steps=1).assign_advantages(
            trace
        )
        Grpo(GrpoSettings(group_size=8)).assign_advantages(other)
        assert bits(trace) == bits(other)


def test_branching_comes_beside_retrieval_with_what_the_run_knows() -> None:
    settings = RapoSettings(group_size=6, num_hybrid=2, ratio_weight=0.0, branch=BranchSettings(first_wave=3))
    (only,) = Rapo(settings, buffer=None, num_training_steps=10, vocabulary_size=77, every_action=True).hooks
    assert isinstance(only, BranchHook) and only.settings == settings.branch
    assert (only.group_size, only.vocabulary_size, only.every_action) == (6, 77, True)
    plain = Rapo(settings.model_copy(update={"branch": None}), buffer=None, num_training_steps=10)
    assert plain.hooks == () and plain.modes == ("on_policy",) * 4 + ("hybrid",) * 2


def test_the_streams_of_a_retrieval_have_names_of_their_own(
    buffer: StepTraceBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name would give every run other draws."""
    names: set[str] = set()
    drawn = EpisodeState.stream

    def noted(self: EpisodeState, purpose: str) -> np.random.Generator:
        names.add(purpose)
        return drawn(self, purpose)

    monkeypatch.setattr(EpisodeState, "stream", noted)
    play(buffer, level="segment", noise=0.5)
    assert {name for name in names if name.startswith("retrieval")} == {
        "retrieval",
        "retrieval noise",
        "retrieval length",
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"quality": False}, {"timing": "none"}, {"timing": "inverse_entropy"}, {"sign": "increase"}],
)
def test_the_ablations_of_the_reward_reach_it(options: dict[str, Any]) -> None:
    """One retrieval between steps of entropy 0.5 and 0.2, by hand."""
    trace = Trace(task=Task(key="t", question=""))
    tip = trace.append(
        parent=None, origin=Origin.PROMPT, token_ids=(1,), message=Message(role="user", content="")
    )
    for origin, entropy in ((Origin.POLICY, 0.5), (Origin.BUFFER, None), (Origin.POLICY, 0.2)):
        values = () if entropy is None else (entropy,)
        tip = trace.append(
            parent=tip.node_id, origin=origin, token_ids=(2,), message=Message(role="assistant", content=""),
            logprobs=values, entropies=values,
        )  # fmt: skip
    found = retrieval_reward(trace.path(tip.node_id), RapoSettings(**options))
    gain = math.tanh(2 * (0.5 - 0.2) / 0.5) * (-1 if options.get("sign") else 1)
    factor = {"none": 1.0, "inverse_entropy": 2.0}.get(options.get("timing", ""), 0.5)
    assert found.value == pytest.approx((gain if options.get("quality", True) else 1.0) * factor)
