"""Hybrid rollouts through the real loop and a real buffer, and RAPO's advantages against its formulas."""

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.retrieval import (
    RetrievalHook,
    RetrievalSettings,
)
from outrider.engines.base import Request
from outrider.environments.base import StepResult
from outrider.errors import ToolFault
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import StepRecord
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


def done_at(last: int) -> Callable[[int, str], StepResult]:
    """Return an environment's answers, of which number ``last`` ends the episode."""
    return lambda n, text: StepResult(message=None, done=True) if n == last else say(f" o{n}")


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
        return Fake(on_step=on_step or done_at(6), episode_return=float(dice.random() < 0.5))

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
    """The counts of failed attempts are rolled back."""
    calls = itertools.count()

    def flaky(number: int, text: str) -> StepResult:
        if next(calls) % 17 == 16:
            raise ToolFault("gone")
        return StepResult(message=None, done=True) if number == 6 else say(f" o{number}")

    _, plain, _ = play(buffer, probability=0.5)
    _, retried, factory = play(buffer, probability=0.5, on_step=flaky)
    assert len(factory.made) > 12 and retried.counts == plain.counts


@functools.cache
def all_records(buffer: StepTraceBuffer) -> dict[int, StepRecord]:
    found = [r for t in tasks(3) for n in range(7) for r in buffer.trajectory(f"{t.key}/{n}")]
    return {record.step_id: record for record in found}


def retrieved(path: Sequence[Node]) -> list[Node]:
    return [node for node in path if node.origin is Origin.BUFFER]


def records(buffer: StepTraceBuffer, node: Node) -> list[StepRecord]:
    return [all_records(buffer)[step_id] for step_id in node.metadata["step_ids"]]


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
        shown = [step_id for node in retrieved(path) for step_id in node.metadata["step_ids"]]
        assert len(shown) == len(set(shown))  # never the same step twice
        num += len(shown)
        for node in retrieved(path):
            [record] = records(buffer, node)
            assert not record.is_terminal
            assert node.message.content == f"<retrieve>{record.text}\n{record.observation}</retrieve>\n"
            assert TOKENIZER.decode(node.token_ids) == node.message.content
            assert node.logprobs == () and not node.trainable
            assert node.metadata["num_calls_saved"] == 1
            assert node.metadata["source_task"] == record.task_key
    assert hook.counts["retrievals"] == num > 0 and hook.counts["opportunities"] == 12 * 6
    assert num == 72 if probability == 1.0 else 20 < num < 52


def test_the_nearest_step_is_shown(buffer: StepTraceBuffer) -> None:
    """The best hit of the buffer for the rollout's own steps, found by independent code. Steps that it was
    shown are not its own.
    """
    embed = load_embedder("hash").embed
    traces, _, _ = play(buffer, num_tasks=1, modes=("hybrid",) * 2)
    for path in paths(traces):
        history, shown = ["question 0"], set()
        for place, node in enumerate(path):
            if node.origin is Origin.BUFFER:
                [key] = embed(["\n".join(part.strip() for part in history if part.strip())])
                allowed = [r for r in all_records(buffer).values() if not r.is_terminal]
                allowed = [r for r in allowed if r.step_id not in shown]
                cosines = embed([r.history_text for r in allowed]) @ key
                assert node.metadata["similarity"] == pytest.approx(cosines.max(), abs=1e-5)
                [step_id] = node.metadata["step_ids"]
                best = np.flatnonzero(cosines > cosines.max() - 1e-5)
                assert step_id in {allowed[index].step_id for index in best}
                shown.add(step_id)
            elif node.trainable:
                observation = path[place + 1].message.content if place + 1 < len(path) else ""
                history += [node.message.content, observation]


def test_in_the_form_of_a_turn_nothing_marks_the_step(buffer: StepTraceBuffer) -> None:
    shown = [n for path in paths(play(buffer, form="turn", num_tasks=1)[0]) for n in retrieved(path)]
    for node in shown:
        [record] = records(buffer, node)
        assert node.message.content == f"{record.text}\n{record.observation}" and not node.trainable
    assert shown


def test_nothing_below_the_least_similarity_is_shown(buffer: StepTraceBuffer) -> None:
    def similarities(**chosen: Any) -> tuple[list[float], RetrievalHook]:
        traces, hook, _ = play(buffer, num_tasks=1, **chosen)
        return [n.metadata["similarity"] for path in paths(traces) for n in retrieved(path)], hook

    without, _ = similarities()
    middle = float(np.median(without))
    above, hook = similarities(min_similarity=middle)
    assert min(without) < middle and above and min(above) >= middle
    # a cosine of 1 may be rounded down
    assert similarities(min_similarity=min(1.0, max(without) + 5e-7))[0]
    # steps that were too far count as an opportunity without a candidate
    assert hook.counts["retrievals"] == len(above)
    assert hook.counts["empty"] == hook.counts["opportunities"] - len(above) > 0


def test_on_policy_rollouts_and_evaluation_never_retrieve(buffer: StepTraceBuffer) -> None:
    for modes in (("on_policy",) * 3, ("evaluate",) * 2):
        traces, hook, _ = play(buffer, modes=modes)
        assert not any(retrieved(path) for path in paths(traces))
        assert hook.counts["opportunities"] == 0


@pytest.mark.parametrize("scope", ["same_task", "other_tasks", "all"])
def test_scope(buffer: StepTraceBuffer, scope: str) -> None:
    traces, hook, _ = play(buffer, scope=scope, modes=("hybrid",) * 3)
    for trace in traces:
        sources = {n.metadata["source_task"] for _, path in trace.rollouts() for n in retrieved(path)}
        assert sources and (scope != "same_task" or sources == {trace.task.key})
        assert scope != "other_tasks" or trace.task.key not in sources
    assert hook.counts["empty"] == 0


def test_terminal_steps_are_optional_and_an_exhausted_scope_is_counted(buffer: StepTraceBuffer) -> None:
    """One task has 8 other steps and 2 terminal ones; 11 turns are 10 opportunities."""
    for include, most in ((False, 8), (True, 10)):
        traces, hook, _ = play(
            buffer, scope="same_task", include_terminal=include, on_step=done_at(10),
            limits=Limits(max_turns=11), num_tasks=1, modes=("hybrid",),
        )  # fmt: skip
        shown = [record for node in retrieved(paths(traces)[0]) for record in records(buffer, node)]
        assert len(shown) == most and any(r.is_terminal for r in shown) is include
        assert hook.counts == {"opportunities": 10, "retrievals": most} | (
            {"empty": 10 - most} if most < 10 else {}
        )


def test_noise_shows_random_steps_of_the_scope_by_its_own_stream(buffer: StepTraceBuffer) -> None:
    noisy, _, _ = play(buffer, noise=1.0, modes=("hybrid",) * 24, num_tasks=1)
    again, _, _ = play(buffer, noise=1.0, modes=("hybrid",) * 2, num_tasks=1)
    for path, same in zip(paths(noisy), paths(again), strict=False):
        assert [n.token_ids for n in retrieved(path)] == [n.token_ids for n in retrieved(same)]
    nodes = [node for path in paths(noisy) for node in retrieved(path)]
    assert all(math.isnan(node.metadata["similarity"]) for node in nodes)
    drawn = {step_id for node in nodes for step_id in node.metadata["step_ids"]}
    assert len(drawn) == 3 * 2 * (NUM_STEPS - 1)  # every non-terminal step turns up


def test_the_schedule_is_followed_by_the_rollouts(buffer: StepTraceBuffer) -> None:
    chosen: dict[str, Any] = {"probability": 0.0, "final_probability": 1.0, "schedule": "linear"}
    assert [
        play(buffer, step=step, num_tasks=1, **chosen)[1].counts["retrievals"] > 0 for step in (0, 9)
    ] == [False, True]


def following(buffer: StepTraceBuffer, first: StepRecord) -> list[StepRecord]:
    """Return a step and all steps after it that are not terminal."""
    later = buffer.trajectory(first.trajectory_id)[first.step_index :]
    return [record for record in later if not record.is_terminal]


def test_trajectory_level_shows_the_rest_of_the_trajectory_and_nothing_twice(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, level="trajectory", modes=("hybrid",) * 5, noise=0.5)
    longest = 0
    for path in paths(traces):
        shown: list[int] = []
        for node in retrieved(path):
            found = records(buffer, node)
            assert len({r.trajectory_id for r in found}) == 1 and not any(r.is_terminal for r in found)
            rest = following(buffer, found[0])
            assert [r.step_id for r in found] == [r.step_id for r in rest if r.step_id not in shown]
            assert node.metadata["num_calls_saved"] == len(found)
            shown += [r.step_id for r in found]
            longest = max(longest, len(found))
        assert len(shown) == len(set(shown))
    assert longest > 1


def test_segment_level_shows_a_random_part_of_what_followed(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, level="segment", modes=("hybrid",) * 8, on_step=done_at(1))
    lengths = []
    for path in paths(traces):
        found = records(buffer, retrieved(path)[0])
        rest = following(buffer, found[0])
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
    """No text is shown twice in a rollout, even under different step ids, and all other steps are found."""
    limits = Limits(max_turns=12, max_response_tokens=6000, max_splice_tokens=2000)
    traces, hook, _ = play(twins, on_step=done_at(29), limits=limits, modes=("hybrid",), **chosen)
    every = all_records(twins)
    num_different = len({(r.text, r.observation) for r in every.values() if not r.is_terminal})
    for key, path in ((trace.task.key, path) for trace in traces for _, path in trace.rollouts()):
        shown = [(record.text, record.observation) for n in retrieved(path) for record in records(twins, n)]
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
        done = [records(buffer, n)[0].text for n in retrieved(path)]
        assert sorted(environment.texts) == sorted(spoken + done)  # type: ignore[attr-defined]
        for node in retrieved(path):
            assert "real" in node.message.content and "saw" not in node.message.content
            assert node.metadata["num_calls_saved"] == 0


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
def test_an_action_that_the_environment_rejects_is_counted_and_the_policy_continues(
    buffer: StepTraceBuffer, no: dict[str, bool]
) -> None:
    """Whether the environment could not read it or did not do it."""

    def answer(n: int, text: str) -> StepResult:
        if text.startswith("do "):
            return StepResult(message=Message(role="inline", content="no"), **no)
        return say(" o")

    limits = Limits(max_turns=4)
    traces, hook, _ = play(buffer, mode="execute", on_step=answer, limits=limits, num_tasks=1)
    assert hook.counts["refused"] == hook.counts["retrievals"] == 6 * 3
    for path in paths(traces):
        assert [n.origin for n in path if n.trainable] == [Origin.POLICY] * 4 and not retrieved(path)


def test_a_long_step_is_truncated_with_a_mark_and_a_closing_tag(buffer: StepTraceBuffer) -> None:
    traces, _, _ = play(buffer, limits=Limits(max_turns=3, max_splice_tokens=36))
    nodes = [n for path in paths(traces) for n in retrieved(path)]
    assert nodes and all(len(n.token_ids) == 36 and n.metadata["num_tokens_cut"] > 0 for n in nodes)
    texts = [TOKENIZER.decode(n.token_ids) for n in nodes]
    assert all(" [...] " in text and text.endswith("</retrieve>\n") for text in texts)


@pytest.fixture(scope="module")
def mixed_groups(buffer: StepTraceBuffer) -> list[Trace]:
    """Groups of on-policy rollouts, hybrid ones, some cut right after a retrieval's turn, and faults. Tests
    copy them before they assign advantages.
    """

    def answer(n: int, text: str) -> StepResult:
        if n == 3 and len(text) == 4:
            raise RuntimeError("a fault")
        return StepResult(message=None, done=True) if n == 3 else say(f" o{n}")

    limits = Limits(max_turns=6, max_response_tokens=170, max_turn_tokens=20)
    modes = ("on_policy",) * 3 + ("hybrid",) * 5
    options: dict[str, Any] = {"on_step": answer, "limits": limits, "probability": 0.5, "num_tasks": 3}
    return [trace for seed in range(2) for trace in play(buffer, modes=modes, seed=seed, **options)[0]]


def expected_advantages(trace: Trace, *, a: float, m: float) -> dict[int, tuple[float, float] | None]:
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
def test_advantages_and_ratio_scales_are_the_formulas(mixed_groups: list[Trace], a: float, m: float) -> None:
    settings = RapoSettings(group_size=8, num_hybrid=5, advantage_weight=a, ratio_weight=m)
    seen: set[str] = set()
    for trace in copy.deepcopy(mixed_groups):
        Rapo(settings).assign_advantages(trace)
        for (leaf, path), (rollout, expected) in zip(
            trace.rollouts(), expected_advantages(trace, a=a, m=m).items(), strict=True
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
def test_without_weights_it_is_grpo_bit_for_bit_also_on_retrieved_nodes(
    mixed_groups: list[Trace], advantage: Any
) -> None:
    assert any(retrieved(path) for path in paths(mixed_groups))
    options: dict[str, Any] = {"group_size": 8, "advantage": advantage}
    rapo = Rapo(RapoSettings(num_hybrid=5, advantage_weight=0.0, ratio_weight=0.0, **options))
    ours, theirs = copy.deepcopy(mixed_groups), copy.deepcopy(mixed_groups)
    for one, other in zip(ours, theirs, strict=True):
        rapo.assign_advantages(one)
        Grpo(GrpoSettings(**options)).assign_advantages(other)
        assert bits(one) == bits(other)
    assert any(credit is not None and any(credit) for trace in ours for credit, _ in bits(trace))


def test_a_hybrid_rollout_that_never_retrieved_counts_as_on_policy(buffer: StepTraceBuffer) -> None:
    modes = ("on_policy",) * 4 + ("hybrid",) * 4
    [trace], hook, _ = play(buffer, modes=modes, probability=0.0, num_tasks=1)
    assert hook.counts["opportunities"] > 0 and hook.counts["retrievals"] == 0
    other = copy.deepcopy(trace)
    Rapo(RapoSettings(group_size=8, num_hybrid=4)).assign_advantages(trace)
    Grpo(GrpoSettings(group_size=8)).assign_advantages(other)
    assert bits(trace) == bits(other)


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
    play(buffer, level="segment", noise=0.5, num_tasks=1)
    assert {name for name in names if name.startswith("retrieval")} == {
        "retrieval",
        "retrieval noise",
        "retrieval length",
    }
