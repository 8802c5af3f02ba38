"""Which tasks a step plays and which groups it trains on: the order, its cursor, and dynamic sampling with
its bound.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import TaskChoice
from outrider.algorithms.grpo import (
    DynamicSamplingSettings,
    Grpo,
    GrpoSettings,
    ReinforcePlusPlusSettings,
    groups_worth_training,
)
from outrider.algorithms.rollout_replay import RolloutReplay
from outrider.config import validate
from outrider.rollout.scheduler import RolloutReport
from outrider.seeding import stream
from outrider.training.data import SampledStep, TaskOrder, play_step
from outrider.types import Task
from tests.algorithms.builders import Rollout, build_trace, build_traces


def order(num_tasks: int, tasks_per_step: int, seed: int = 0) -> TaskOrder:
    tasks = [Task(key=f"t{i}", question="") for i in range(num_tasks)]
    return TaskOrder(tasks=tasks, tasks_per_step=tasks_per_step, seed=seed)


@given(num_tasks=st.integers(1, 12), size=st.integers(1, 12), step=st.integers(0, 30), seed=st.integers(0, 5))
def test_without_dynamic_sampling_a_step_s_tasks_follow_from_its_number(
    num_tasks: int, size: int, step: int, seed: int
) -> None:
    """Whole steps of a fresh permutation an epoch; what does not fill a step is left out of that epoch."""
    size = min(size, num_tasks)
    tasks, cursor = order(num_tasks, size, seed).draw(size, cursor=step * size)
    epoch, position = divmod(step, num_tasks // size)
    expected = stream(seed, "task order", epoch).permutation(num_tasks)[
        position * size : (position + 1) * size
    ]
    assert [task.key for task in tasks] == [f"t{i}" for i in expected] and cursor == (step + 1) * size


@given(
    num_tasks=st.integers(2, 9), size=st.integers(1, 4),
    takes=st.lists(st.integers(0, 6), min_size=1, max_size=6), seen=st.sets(st.integers(0, 8)),
)  # fmt: skip
def test_the_cursor_continues_and_no_task_comes_twice_in_a_step(
    num_tasks: int, size: int, takes: list[int], seen: set[int]
) -> None:
    tasks_of = order(num_tasks, min(size, num_tasks))
    played = {f"t{i}" for i in seen}
    cursor = 0
    for num in takes:
        tasks, after = tasks_of.draw(num, cursor=cursor, seen=played)
        assert len({task.key for task in tasks} - played) == len(tasks) <= num and after >= cursor
        left = {task.key for task in tasks_of.tasks} - played
        assert len(tasks) == min(num, len(left))  # fewer come only where none is left
        again, _ = tasks_of.draw(num, cursor=cursor, seen=played)
        assert again == tasks
        played |= {task.key for task in tasks}
        cursor = after


class FakeScheduler:
    """Groups with the returns that ``returns(task number, call)`` gives, in place of rollouts."""

    def __init__(self, returns: Callable[[int, int], Sequence[float | None]]) -> None:
        self.returns = returns
        self.calls: list[list[str]] = []
        self.groups: list[int] = []

    def run(
        self,
        tasks: Sequence[Task],
        *,
        modes: Callable[[int], Sequence[str]],
        training_step: int,
        continued: bool = False,
    ) -> RolloutReport:
        assert continued == bool(self.calls)  # one step is one batch, however many rounds it takes
        self.calls.append([task.key for task in tasks])
        self.groups += [int(modes(number)[0]) for number in range(len(tasks))]
        traces = [
            build_trace(
                [Rollout(value=value) for value in self.returns(int(task.key[1:]), len(self.calls))],
                key=task.key,
            )
            for task in tasks
        ]
        reasons = (f"call {len(self.calls)}",)
        return RolloutReport(
            traces=traces, num_batches=1, num_retries=1, faults=Counter({"retries": 1}), fault_reasons=reasons
        )


class Numbered(Grpo):
    """Modes with the number of the group, and fixed tasks if there are some."""

    def __init__(self, rule: DynamicSamplingSettings | None, tasks: Sequence[Task] | None = None) -> None:
        super().__init__(GrpoSettings(dynamic_sampling=rule))
        self.tasks = tasks

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        return (str(group),)

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        if self.tasks is not None:
            return TaskChoice(num_groups=len(self.tasks), tasks=self.tasks)
        return super().choose_tasks(tasks, step=step, num_groups=num_groups)


def play(
    scheduler: Any, *, num_tasks: int = 12, rule: DynamicSamplingSettings | None, cursor: int = 0
) -> SampledStep:
    return play_step(parts_of(Numbered(rule), num_tasks), scheduler, step=0, cursor=cursor)


def test_groups_without_spread_are_replaced_by_as_many_further_tasks() -> None:
    scheduler = FakeScheduler(lambda task, call: [0.0, 1.0] if task % 3 == 0 else [1.0, 1.0])
    step = play(scheduler, rule=DynamicSamplingSettings(max_extra_batches=9))
    assert [trace.task.key for trace in step.selected] == [
        key for call in scheduler.calls for key in call if int(key[1:]) % 3 == 0
    ]
    assert len(step.selected) == 4 and all(len(call) <= 4 for call in scheduler.calls)
    found = 0
    for call in scheduler.calls:
        assert len(call) == 4 - found
        found += sum(int(key[1:]) % 3 == 0 for key in call)
    flat = [key for call in scheduler.calls for key in call]
    assert len(set(flat)) == len(flat) == len(step.traces) and scheduler.groups == list(range(len(flat)))
    assert step.faults == {"retries": len(scheduler.calls)} and len(step.fault_reasons) == len(
        scheduler.calls
    )
    assert step.num_extra_batches == len(scheduler.calls) - 1
    assert step.metrics(4) == {
        "group/num_dropped": len(flat) - 4, "group/num_missing": 0.0,
        "group/num_extra_batches": step.num_extra_batches,
    }  # fmt: skip
    assert step.cursor == len(flat)
    again = play(FakeScheduler(scheduler.returns), rule=DynamicSamplingSettings())
    assert [trace.task.key for trace in again.traces] == flat


def test_a_group_that_replaces_another_one_has_its_share_of_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the groups that are trained have exact shares, however many were dropped."""
    scheduler = FakeScheduler(lambda task, call: [0.0, 1.0] if task % 3 == 0 else [1.0, 1.0])
    helped: list[tuple[int, int]] = []

    def with_help(modes: Sequence[str], settings: object, *, group: int, **options: object) -> Sequence[str]:
        helped.append((int(modes[0]), group))
        return modes

    monkeypatch.setattr("outrider.training.data.with_helped_mode", with_help)
    step = play(scheduler, rule=DynamicSamplingSettings(max_extra_batches=9))
    own, places = zip(*helped, strict=True)
    assert own == tuple(range(len(step.traces))) and places[:4] == (0, 1, 2, 3)
    chosen = [
        place
        for place, trace in zip(places, step.traces, strict=True)
        if any(trace is other for other in step.selected)
    ]
    assert sorted(chosen) == [0, 1, 2, 3]


def test_every_round_is_prepared_before_its_rollouts() -> None:
    """An algorithm may request experts for the tasks and modes of a round."""
    scheduler = FakeScheduler(lambda task, call: [0.0, 1.0] if task % 3 == 0 else [1.0, 1.0])
    prepared: list[list[str]] = []

    class Prepared(Numbered):
        def prepare(
            self, tasks: Sequence[Task], modes: Sequence[Sequence[str]], **options: object
        ) -> list[str]:
            assert len(prepared) == len(scheduler.calls)  # before the rollouts of the round
            begin = sum(map(len, prepared))
            assert modes == [(str(begin + number),) for number in range(len(tasks))]
            prepared.append([task.key for task in tasks])
            return ["an expert failed"]

    rule = DynamicSamplingSettings()
    for algorithm in (Prepared(rule), Prepared(None), Prepared(rule, order(12, 4).tasks[:2])):
        scheduler.calls.clear()
        prepared.clear()
        step = play_step(parts_of(algorithm), scheduler, step=0, cursor=0)  # type: ignore[arg-type]
        assert prepared == scheduler.calls and prepared
        assert step.faults["expert"] == len(prepared)
        assert step.fault_reasons.count("an expert failed") == len(prepared)


def test_a_bound_and_a_small_task_set_end_the_search() -> None:
    nothing = FakeScheduler(lambda task, call: [0.5, 0.5])
    step = play(nothing, rule=DynamicSamplingSettings(max_extra_batches=1))
    assert (len(nothing.calls), step.selected, len(step.traces), step.num_extra_batches) == (2, [], 8, 1)
    assert step.metrics(4)["group/num_missing"] == 4.0
    every = FakeScheduler(lambda task, call: [0.5, 0.5])
    step = play(every, rule=DynamicSamplingSettings(max_extra_batches=9))
    assert sorted(key for call in every.calls for key in call) == sorted(f"t{i}" for i in range(12))
    assert step.num_extra_batches == 2
    one = FakeScheduler(lambda task, call: [0.0, 1.0])
    step = play(one, rule=DynamicSamplingSettings())
    plain = play(FakeScheduler(one.returns), rule=None)
    assert [t.task.key for t in step.traces] == [
        t.task.key for t in plain.traces
    ] and step.cursor == plain.cursor == 4
    unfiltered = play(FakeScheduler(lambda task, call: [0.5, 0.5]), rule=None)
    assert len(unfiltered.selected) == 4 and unfiltered.num_extra_batches == 0


def test_the_metric_is_unshaped_and_faults_do_not_count() -> None:
    traces = [
        build_trace([Rollout(value=0.5, success=False), Rollout(value=0.7, success=False)], key="graded"),
        build_trace([Rollout(value=0.5, success=True), Rollout(value=0.5, success=False)], key="same return"),
        build_trace([Rollout(value=1.0, success=True), Rollout(value=None)], key="fault"),
        build_trace([Rollout(value=1.0, success=True), Rollout(value=1.0, success=True)], key="right"),
    ]
    traces[3].leaves[0].intrinsic = -1.0  # a punishment of its length must not keep it
    for metric, kept in (("return", ["graded"]), ("success", ["same return"])):
        rule = DynamicSamplingSettings(metric=metric)  # type: ignore[arg-type]
        assert [trace.task.key for trace in groups_worth_training(traces, rule)] == kept


def test_the_filter_of_verl_agent() -> None:
    cases = json.loads((Path(__file__).parents[1] / "vectors" / "advantages.json").read_text())
    [case] = [case for case in cases if case["id"] == "dapo.filter_groups.verl_agent"]
    rewards, size = case["inputs"]["rewards"], case["inputs"]["group_size"]
    traces = build_traces(rewards, [row // size for row in range(len(rewards))])
    kept = groups_worth_training(traces, DynamicSamplingSettings())
    rows = [int(trace.task.key) * size + rollout for trace in kept for rollout in range(size)]
    assert rows == case["expected"]["kept_indices"]


@pytest.mark.parametrize("wrong", [{"metric": "accuracy"}, {"max_extra_batches": -1}], ids=str)
def test_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DynamicSamplingSettings(**wrong)


class Chosen(FakeScheduler):
    """As the scheduler is called for a plain step: what it was given."""

    def run(
        self, tasks: Sequence[Task], *, modes: Any, training_step: int, continued: bool = False
    ) -> RolloutReport:
        self.step = training_step
        return super().run(tasks, modes=modes, training_step=training_step, continued=continued)


def parts_of(algorithm: Any, num_tasks: int = 12) -> Any:
    run = SimpleNamespace(
        seed=3,
        train=SimpleNamespace(tasks_per_step=4, stages=()),
        algorithm=SimpleNamespace(distill=None, tip_memory=None),
    )
    return SimpleNamespace(settings=run, algorithm=algorithm, train_tasks=order(num_tasks, 4).tasks)


def test_a_step_is_played_by_the_run_s_settings() -> None:
    """Tasks in the order of the run's seed, modes of the step and the group, and DAPO's rule where the
    settings have one.
    """

    class Page(Grpo):
        def modes_of(self, step: int, group: int) -> Sequence[str]:
            return (str(10 * step + group),)

    scheduler = Chosen(lambda task, call: [0.5, 0.5])
    plain = play_step(parts_of(Page(GrpoSettings())), scheduler, step=7, cursor=4)  # type: ignore[arg-type]
    expected = stream(3, "task order", 0).permutation(12)[4:8]
    assert [trace.task.key for trace in plain.traces] == [f"t{i}" for i in expected] and plain.cursor == 8
    assert (scheduler.step, scheduler.groups, plain.is_filtered, len(plain.selected)) == (
        7,
        [70, 71, 72, 73],
        False,
        4,
    )
    rule = DynamicSamplingSettings(max_extra_batches=1)
    scheduler = Chosen(lambda task, call: [0.5, 0.5])
    dapo = play_step(
        parts_of(Page(GrpoSettings(dynamic_sampling=rule))),
        scheduler,  # type: ignore[arg-type]
        step=0,
        cursor=0,
    )
    assert dapo.is_filtered and (len(dapo.traces), dapo.selected) == (8, [])


def test_a_step_with_replay_plays_as_many_groups_as_it_has_no_stored_ones_for() -> None:
    asked: list[tuple[int, int]] = []

    class Replay(RolloutReplay):
        def __init__(self) -> None:
            self.modes = ("m",)

        def num_fresh(self, step: int) -> int:
            return step

        def choose(self, tasks: Sequence[Task], *, step: int) -> list[Task] | None:
            asked.append((len(tasks), step))
            return list(tasks[:2]) if step == 3 else None

        def modes_of(self, step: int, group: int) -> Sequence[str]:
            return (str(group),)

    for step, keys in ((1, None), (3, ["t0", "t1"])):
        scheduler = Chosen(lambda task, call: [0.0, 1.0])
        played = play_step(parts_of(Replay()), scheduler, step=step, cursor=5)  # type: ignore[arg-type]
        assert keys is None or [trace.task.key for trace in played.selected] == keys
        assert len(played.traces) == (1 if keys is None else 2) and played.cursor == (
            6 if keys is None else 5
        )
        assert (
            played.faults == {"retries": 1}
            and played.fault_reasons == ("call 1",)
            and played.num_extra_batches == 0
        )
    assert asked == [(12, 1), (12, 3)]


@pytest.mark.parametrize(
    ("advantage", "metric", "kept"),
    [
        ("group_normalized", "return", ["graded", "one wrong"]),
        (
            "group_normalized",
            "success",
            ["one wrong"],
        ),  # without advantages: the returns of "verdicts" are equal
        ("best_minus_second", "return", []),
        ("pass_at_k", "return", ["verdicts"]),
    ],
)
def test_groups_whose_advantages_are_all_zero_are_dropped(
    advantage: Any, metric: Any, kept: list[str]
) -> None:
    """Also where the metric has a spread: two best returns tie, or fewer than k rollouts failed."""
    groups = {
        "graded": [(0.5, False), (0.5, False), (0.2, False), (0.0, False)],
        "verdicts": [(0.5, True), (0.5, False), (0.5, False), (0.5, False)],
        "one wrong": [(1.0, True), (1.0, True), (1.0, True), (0.0, False)],
    }
    traces = [
        build_trace([Rollout(value=value, success=success) for value, success in group], key=name)
        for name, group in groups.items()
    ]
    rule = DynamicSamplingSettings(metric=metric)
    settings = GrpoSettings(
        group_size=4,
        advantage=advantage,
        dynamic_sampling=rule,
        pass_k=2 if advantage == "pass_at_k" else None,
    )
    choice = Grpo(settings).choose_tasks([], step=0, num_groups=2)
    assert choice.group_filter is not None
    assert [trace.task.key for trace in choice.group_filter.select(traces)] == kept


def test_penalties_may_give_a_group_its_advantages() -> None:
    """The two best returns tie until the longer rollout is punished."""
    rule = DynamicSamplingSettings()
    traces = [build_trace([Rollout(value=value) for value in (1.0, 1.0, 0.0)], key="tie")]
    for shaping in ({"overlong": {"buffer": 4}}, {"reward_kl_weight": 0.1}):
        settings = validate(
            GrpoSettings,
            {"group_size": 3, "advantage": "best_minus_second", "dynamic_sampling": {}, **shaping},
        )
        choice = Grpo(settings).choose_tasks([], step=0, num_groups=1)
        assert choice.group_filter is not None and choice.group_filter.select(traces) == traces, shaping
    plain = GrpoSettings(group_size=3, advantage="best_minus_second", dynamic_sampling=rule)
    choice = Grpo(plain).choose_tasks([], step=0, num_groups=1)
    assert choice.group_filter is not None and choice.group_filter.select(traces) == []


def test_reinforce_without_a_baseline_has_no_groups_to_drop() -> None:
    with pytest.raises(ValueError, match="dynamic_sampling drops groups without spread"):
        ReinforcePlusPlusSettings(group_size=1, dynamic_sampling=DynamicSamplingSettings())
    ReinforcePlusPlusSettings(group_baseline=True, dynamic_sampling=DynamicSamplingSettings())
