"""The queue of groups that begin ahead of the update, with random delays: tokens are never too old, and every
group is trained on once, in the order of its tasks. With one step ahead, the bits do not depend on speed or
kills.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import GroupFilter, TaskChoice
from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.config import validate
from outrider.errors import ConfigError, EngineFault
from outrider.rollout.hooks import StatelessHook
from outrider.rollout.scheduler import RolloutReport
from outrider.trace import Leaf, Trace
from outrider.training.async_rollouts import (
    QUEUE,
    AsyncRolloutQueue,
    GroupName,
    GroupResult,
    PendingStep,
    QueueSnapshot,
    read_snapshot,
    write_snapshot,
)
from outrider.training.data import QueuedStep, Round, TaskOrder
from outrider.training.settings import RunSettings, StageSettings
from outrider.training.step_metrics import staleness_metrics
from outrider.types import Message, Origin, Outcome, Task
from tests.training.test_pack_update import random_trace

TASKS = [Task(key=f"t{number}", question="?", answers=("!",)) for number in range(7)]
SIZE, TURNS = 3, 3
MESSAGE = Message(role="assistant", content="a")


class Memory(StatelessHook):
    """Counts what copies have gathered, and lists the groups seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.sum = 0

    def snapshot(self) -> int:
        return self.sum

    def absorb(self, gathered: Any) -> None:
        self.sum += gathered

    def after_group(self, trace: Trace) -> None:
        self.seen.append(trace.task.key)


@dataclass
class Plain:
    """An algorithm that plays ``SIZE`` rollouts per task, or makes the given choice."""

    hooks: tuple[Any, ...]
    choices: Mapping[int, TaskChoice] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of experts, one per round

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        return self.choices.get(step) or TaskChoice(num_groups=num_groups)

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        return [f"mode {step}.{group}"] * SIZE

    def prepare(self, tasks: Any, modes: Any, *, step: int, play: Any) -> list[str]:
        assert len(tasks) == len(modes)
        return [self.failures.pop()] if self.failures else []

    def counts(self) -> list[dict[str, int]]:
        return [{"sum": hook.sum} for hook in self.hooks]


@dataclass
class Running:
    name: GroupName
    trace: Trace
    memory: int
    nodes: list[int | None] = field(default_factory=lambda: [None] * SIZE)
    turns: list[int] = field(default_factory=lambda: [0] * SIZE)


class RandomPool:
    """Plays turns of random groups at every poll. A turn has the version of its time, and its log-prob is the
    state of the memory at the start of its group.
    """

    def __init__(self, draw: Any, hooks: Sequence[Memory]) -> None:
        self.draw, self.version, self.hooks = draw, 0, hooks
        self.running: list[Running] = []
        self.finished: dict[GroupName, GroupResult] = {}
        self.num_started = 0
        self.limits: list[int | None] = []
        self.is_cancelled = False

    def submit(self, tasks: Mapping[GroupName, Any], *, max_calls: int | None = None, **options: Any) -> None:
        assert options["is_training"]
        self.limits.append(max_calls)
        self.num_started += len(tasks)
        for name, (task, modes) in tasks.items():
            trace = Trace(task=task, modes=modes)
            trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=MESSAGE)
            self.running.append(Running(name, trace, self.hooks[0].snapshot()))

    def pass_time(self, *, at_least: int) -> None:
        for _ in range(at_least + self.draw(0, 6)):
            if not self.running:
                return
            group = self.running[self.draw(0, len(self.running) - 1)]
            unfinished = [rollout for rollout, num in enumerate(group.turns) if num < TURNS]
            rollout = unfinished[self.draw(0, len(unfinished) - 1)]
            node = group.trace.append(
                parent=group.nodes[rollout] or 0, origin=Origin.POLICY, token_ids=(2,), message=MESSAGE,
                logprobs=(-float(group.memory),), entropies=(0.5,), weight_version=self.version,
            )  # fmt: skip
            group.nodes[rollout], group.turns[rollout] = node.node_id, group.turns[rollout] + 1
            if group.turns[rollout] == TURNS:
                value = float(int(group.trace.task.key[1:]) % 2)
                leaf = Leaf(
                    node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value
                )
                group.trace.finish(leaf)
            if min(group.turns) == TURNS:
                self.running.remove(group)
                group.trace.number_by_rollout()
                report = RolloutReport(traces=[group.trace], num_batches=1, num_retries=0)
                self.finished[group.name] = GroupResult(report=report, gathered=[1], seconds=0.5, num_calls=2)

    def poll(self, *, timeout_s: float) -> None:
        self.pass_time(at_least=int(timeout_s > 0))

    def cancel(self) -> None:
        self.is_cancelled = True


def first(least: int, most: int) -> int:
    """Draw the smallest number, so that nothing happens before it is awaited."""
    return least


class Run:
    """The order of calls of a trainer, without an update; a checkpoint is a folder and numbers."""

    def __init__(self, draw: Any = first, *, staleness: int, num_steps: int, **options: Any) -> None:
        self.draw, self.staleness, self.num_steps, self.options = draw, staleness, num_steps, options
        self.step = self.version = self.cursor = 0
        self.trained: list[QueuedStep] = []
        self.begin(None, Memory())

    def begin(self, snapshot: QueueSnapshot | None, memory: Memory) -> None:
        options, self.memory = self.options, memory
        train = SimpleNamespace(
            tasks_per_step=options.get("per_step", 2), num_steps=self.num_steps,
            stages=options.get("stages", ()),
        )  # fmt: skip
        self.pool = RandomPool(self.draw, [memory])
        self.pool.version = self.version
        self.parts: Any = SimpleNamespace(
            settings=SimpleNamespace(
                train=train, seed=5, cluster=SimpleNamespace(max_staleness=self.staleness),
                environment=SimpleNamespace(max_batch_calls=options.get("max_calls")),
                algorithm=SimpleNamespace(tip_memory=None),
            ),
            algorithm=Plain((memory,), options.get("choices", {}), options.get("failures", [])),
            train_tasks=TASKS,
            remote=SimpleNamespace(pool=self.pool),
        )  # fmt: skip
        self.queue = AsyncRolloutQueue(self.parts, step=self.step, cursor=self.cursor, snapshot=snapshot)

    def train_step(self) -> None:
        last = self.num_steps - 1
        self.queue.begin(min(self.step + self.staleness - 1, last))
        queued = self.queue.collect(self.step, on_tick=lambda text: None)
        staleness_metrics(queued.sampled.traces, version=self.version, limit=self.staleness)  # or raises
        self.queue.begin(min(self.step + self.staleness, last))
        self.pool.pass_time(at_least=0)  # during the update
        self.queue.wait_for_weights(on_tick=lambda text: None)
        self.version += 1
        self.pool.version = self.version
        self.step, self.cursor = self.step + 1, queued.sampled.cursor
        self.trained.append(queued)
        self.queue.on_step_recorded()

    def save(self, folder: Path) -> dict[str, Any]:
        write_snapshot(folder, self.queue.snapshot())
        return {
            "step": self.step,
            "cursor": self.cursor,
            "seen": list(self.memory.seen),
            "sum": self.memory.sum,
        }

    def kill_and_resume(self, folder: Path, saved: dict[str, Any]) -> None:
        self.step = self.version = saved["step"]
        self.cursor = saved["cursor"]
        memory = Memory()
        memory.seen, memory.sum = list(saved["seen"]), saved["sum"]
        del self.trained[self.step :]
        snapshot = read_snapshot(folder)
        assert snapshot is not None
        num_missing = sum(len(pending.missing) for pending in snapshot.steps)
        self.begin(snapshot, memory)
        assert self.queue.num_restarted_groups == self.pool.num_started == num_missing

    def play(self, data: Any = None) -> list[Any]:
        """Train all steps, with random checkpoints and kills if there is ``data``; returns plain values."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            saved, kills = self.save(folder), 2 if data else 0
            while self.step < self.num_steps:
                self.train_step()
                if data and data.draw(st.booleans()):
                    saved = self.save(folder)
                if kills and data.draw(st.booleans()):
                    kills -= 1
                    self.kill_and_resume(folder, saved)
        assert not self.pool.running and not self.pool.finished
        return [
            ([tokens_by_rollout(trace) for trace in queued.sampled.traces], queued.sampled.cursor,
             [trace.task.key for trace in queued.sampled.selected], queued.counts)
            for queued in self.trained
        ]  # fmt: skip


def tokens_by_rollout(trace: Trace) -> Any:
    """The values of a group without the order in which turns ended."""
    return (
        trace.task.key,
        list(trace.modes),
        [[(node.logprobs, node.weight_version) for node in path] for _, path in trace.rollouts()],
    )


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_nothing_is_too_old_lost_or_out_of_order(
    data: st.DataObject, staleness: int, num_steps: int, per_step: int
) -> None:
    run = Run(
        lambda least, most: data.draw(st.integers(least, most)),
        staleness=staleness, num_steps=num_steps, per_step=per_step,
    )  # fmt: skip
    run.play(data)
    order, cursor = TaskOrder(tasks=TASKS, tasks_per_step=per_step, seed=5), 0
    for step, queued in enumerate(run.trained):
        tasks, cursor = order.draw(per_step, cursor=cursor)
        assert [trace.task for trace in queued.sampled.traces] == tasks and queued.sampled.cursor == cursor
        for number, trace in enumerate(queued.sampled.traces):
            assert sorted(trace.leaves) == list(range(SIZE))
            assert list(trace.modes) == [f"mode {step}.{number}"] * SIZE
    # hooks have seen every group once, and what was gathered of it
    everything = [trace.task.key for queued in run.trained for trace in queued.sampled.traces]
    assert sorted(run.memory.seen) == sorted(everything) and run.memory.sum == len(everything)


def select_odd(traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if int(trace.task.key[1:]) % 2]


FILTERED = TaskChoice(num_groups=2, group_filter=GroupFilter(select=select_odd, max_extra_batches=2))
ONE_AHEAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups are left out": {"choices": dict.fromkeys(range(9), FILTERED)},
    "tasks of the algorithm": {"choices": {1: TaskChoice(num_groups=2, tasks=TASKS[3:5])}},
    "a step without groups": {"choices": {1: TaskChoice(num_groups=0), 2: TaskChoice(num_groups=1)}},
    "stages": {"stages": [StageSettings(tasks=("t0", "t1", "t2"), num_steps=2),
                          StageSettings(tasks=("t3", "t4", "t5", "t6"))]},
}  # fmt: skip


@pytest.mark.parametrize("kind", ONE_AHEAD)
def test_one_step_ahead_has_the_same_bits_at_any_speed_and_after_kills(kind: str) -> None:
    wanted = Run(staleness=1, num_steps=4, **ONE_AHEAD[kind]).play()
    assert any(traces for traces, *_ in wanted)

    class Data:
        def __init__(self, seed: int) -> None:
            self.dice = random.Random(seed)

        def draw(self, strategy: Any) -> bool:
            return self.dice.random() < 0.5

    for seed in range(12):
        run = Run(random.Random(seed).randint, staleness=1, num_steps=4, **ONE_AHEAD[kind])
        assert run.play(Data(seed)) == wanted


def test_a_stop_in_a_later_round_of_a_step_changes_no_bits(tmp_path: Path) -> None:
    """The rounds that have ended are in the checkpoint and in the memories, and the others begin again."""
    options = {**ONE_AHEAD["groups are left out"], "per_step": 2}
    wanted = Run(staleness=1, num_steps=3, **options).play()
    num_rounds = set()
    for num_ticks in range(0, 60, 4):
        run, ticks = Run(staleness=1, num_steps=3, **options), iter(range(num_ticks))
        run.train_step()
        try:
            run.queue.collect(1, on_tick=lambda text, ticks=ticks: next(ticks))  # type: ignore[misc]
        except StopIteration:
            num_rounds.add(run.queue._steps[1].offset)
        else:
            break
        saved = run.save(tmp_path)
        run.kill_and_resume(tmp_path, saved)
        assert run.play() == wanted
    assert max(num_rounds) > 0


def test_a_choice_that_changes_after_the_checkpoint_keeps_the_tasks_that_have_begun(tmp_path: Path) -> None:
    """A replay counts what it has stored, and that has changed when the run is resumed."""
    for choice in (TaskChoice(num_groups=2, tasks=TASKS[:2]), TaskChoice(num_groups=2)):
        run = Run(staleness=1, num_steps=3, choices={1: choice})
        run.train_step()
        saved = run.save(tmp_path)
        tasks = list(run.queue._steps[1].round.tasks)
        run.options["choices"] = {1: TaskChoice(num_groups=4)}
        run.kill_and_resume(tmp_path, saved)
        run.train_step()
        assert [trace.task for trace in run.trained[1].sampled.traces] == tasks


def test_reasons_of_failed_experts_survive_kills(tmp_path: Path) -> None:
    """An expert that failed for a step ahead is requested again, and answers or fails again."""
    for failures in (["b", "a"], ["b", "b", "a"], ["c", "b", "a"]):
        run = Run(staleness=1, num_steps=2, failures=failures)
        expected = {"a": ["a"], "b": ["c", "b"] if "c" in failures else ["b"]}
        run.train_step()
        for _ in range(2):
            saved = run.save(tmp_path)
            run.kill_and_resume(tmp_path, saved)
        run.train_step()
        for queued, reasons in zip(run.trained, expected.values(), strict=True):
            assert queued.sampled.fault_reasons == tuple(reasons)
            assert queued.sampled.faults["expert"] == len(reasons)


def test_an_extended_run_plays_the_tasks_of_a_longer_one(tmp_path: Path) -> None:
    run = Run(staleness=2, num_steps=2)
    run.play()
    saved = run.save(tmp_path)
    assert json.loads((tmp_path / QUEUE).read_text())["steps"] == []
    run.num_steps = 4
    run.kill_and_resume(tmp_path, saved)
    run.play()
    order = TaskOrder(tasks=TASKS, tasks_per_step=2, seed=5)
    keys = [trace.task.key for queued in run.trained for trace in queued.sampled.traces]
    assert keys == [task.key for step in range(4) for task in order.draw(2, cursor=2 * step)[0]]


def test_rounds_of_a_step_share_its_limit_on_tool_calls() -> None:
    run = Run(staleness=1, num_steps=1, max_calls=5, **ONE_AHEAD["groups are left out"])
    run.train_step()
    num_extra = run.trained[0].sampled.num_extra_batches
    assert (
        run.pool.limits[0] == 5 and run.pool.limits[1:2] == [1] and num_extra == len(run.pool.limits) - 1 > 0
    )


def test_an_episode_spans_versions_and_a_token_none() -> None:
    run = Run(random.Random(0).randint, staleness=2, num_steps=6)
    run.play()
    paths = [
        {node.weight_version for node in path if node.trainable}
        for queued in run.trained
        for trace in queued.sampled.traces
        for _, path in trace.rollouts()
    ]
    assert any(len(versions) > 1 for versions in paths)


def test_a_step_that_is_further_than_the_bound_has_not_begun() -> None:
    run = Run(staleness=2, num_steps=9)
    for step in range(4):
        run.train_step()
        assert max(group.name[0] for group in run.pool.running) == step + 2


def test_a_token_that_is_too_old_is_a_fault() -> None:
    run = Run(staleness=1, num_steps=3)
    run.version = 5  # as if weights had moved without their groups
    with pytest.raises(EngineFault, match="takes none older than 1 versions"):
        run.train_step()


def test_a_stop_ends_the_wait_for_rollouts() -> None:
    run = Run(staleness=1, num_steps=2)
    run.queue.begin(0)

    def stop(text: str) -> None:
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt, match="0/2 groups"):
        run.queue.collect(0, on_tick=stop)


def test_groups_in_progress_are_cancelled_at_the_end() -> None:
    for num_steps in (1, 2):
        run = Run(staleness=1, num_steps=num_steps)
        run.train_step()
        run.queue.cancel()
        assert run.pool.is_cancelled == (num_steps == 2)


def test_more_steps_ahead_refuse_filters_and_branches() -> None:
    run = Run(staleness=2, num_steps=2, **ONE_AHEAD["groups are left out"])
    with pytest.raises(ConfigError, match="leave groups out"):
        run.queue.begin(0)
    run.parts.algorithm.hooks = (BranchHook(BranchSettings(), vocabulary_size=9, group_size=8),)
    with pytest.raises(ConfigError, match="rollouts that branch"):
        AsyncRolloutQueue(run.parts, step=0, cursor=0, snapshot=None)


def plain_values(trace: Trace) -> str:
    flags = (trace.modes, trace.without_memory, trace.is_replayed, trace.pruned, asdict(trace.task))
    nodes = [asdict(node) for node in trace.nodes]
    return repr((flags, nodes, sorted((n, asdict(leaf)) for n, leaf in trace.leaves.items())))


def snapshot_of(*traces: Trace) -> QueueSnapshot:
    round_ = Round(tasks=[trace.task for trace in traces], modes=[trace.modes for trace in traces], cursor=9)
    results = {
        number: GroupResult(
            report=RolloutReport(
                traces=[trace], num_batches=1, num_retries=2, faults=Counter(tool_fault=1),
                fault_reasons=("it broke",),
            ),
            gathered=None, seconds=0.1, num_calls=3,
        )
        for number, trace in enumerate(traces)
    }  # fmt: skip
    return QueueSnapshot(
        steps=[PendingStep(step=4, cursor=7, first=round_, is_chosen=True, results=results)],
        counts=[{"a": 3}],
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_has_groups_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    traces = [random_trace(10 * seed + number) for number in range(3)]
    traces[0].without_memory, traces[1].is_replayed, traces[2].pruned = True, True, frozenset({1, 3})
    written = snapshot_of(*traces)
    write_snapshot(tmp_path, written)
    read = read_snapshot(tmp_path)
    assert read is not None and read.counts == [{"a": 3}]
    [pending], [expected] = read.steps, written.steps
    assert (pending.step, pending.cursor, pending.is_chosen, pending.round.cursor) == (4, 7, True, 9)
    assert pending.round.tasks == list(expected.round.tasks)
    for number, trace in enumerate(traces):
        group = pending.results[number]
        assert plain_values(group.report.traces[0]) == plain_values(trace)
        assert (group.seconds, group.num_calls, group.is_absorbed) == (0.1, 3, True)
        assert (group.report.faults, group.report.fault_reasons) == (Counter(tool_fault=1), ("it broke",))


@given(
    st.lists(st.floats(width=64), max_size=6),
    st.text(st.characters(exclude_categories=())),  # half of a surrogate pair too
    st.integers(),
)
def test_any_float_and_any_text_is_read_again(values: list[float], text: str, number: int) -> None:
    trace = Trace(task=Task(key=text, question=text, answers=(text,), metadata={text: [1, {"x": 0.1}]}))
    node = trace.append(
        parent=None, origin=Origin.POLICY, token_ids=tuple(range(len(values))),
        message=Message(role="assistant", content=text), logprobs=tuple(values), entropies=tuple(values),
        metadata={text: number, "similarity": values},
    )  # fmt: skip
    trace.finish(Leaf(node_id=node.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=-0.0))
    with TemporaryDirectory() as folder:
        write_snapshot(Path(folder), snapshot_of(trace))
        read = read_snapshot(Path(folder))
    assert read is not None
    assert plain_values(read.steps[0].results[0].report.traces[0]) == plain_values(trace)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("[1]", ValueError, "expected an object"),
        ('{"steps": [{"step": 1, "next_cursor": 1}]}', KeyError, "cursor"),
        ('{"cursor": 3}', ConfigError, "from an earlier version"),
        ('{"counts": [], "steps": [{"step": 1, "tasks": [], "cursor": 2}]}', ConfigError, "earlier version"),
    ],
)
def test_a_queue_that_cannot_be_read_is_an_error(
    tmp_path: Path, line: str, error: type[Exception], message: str
) -> None:
    assert read_snapshot(tmp_path) is None
    (tmp_path / QUEUE).write_text(line + "\n")
    with pytest.raises(error, match=message):
        read_snapshot(tmp_path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"algorithm": {"type": "arpo"}}, "does not support rollouts that branch"),
        ({"algorithm": {"type": "tree_grpo"}}, "does not support rollouts that branch"),
        ({"algorithm": {"preset": "dapo-paper"}}, "does not support algorithm.dynamic_sampling"),
        ({"environment": {"max_batch_calls": 9}}, "environment.max_batch_calls counts rounds"),
        ({"buffer": {"evolve": True}, "algorithm": {"type": "rapo"}}, "does not support buffer.evolve"),
        ({"algorithm": {"sampler_correction": None}}, "max_staleness needs algorithm.sampler_correction"),
    ],
)
def test_settings_that_need_fewer_steps_ahead_are_refused(changed: dict[str, Any], reason: str) -> None:
    recipe: dict[str, Any] = {
        "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": {"max_staleness": 2},
    }  # fmt: skip
    validate(RunSettings, recipe)
    with pytest.raises(ConfigError, match=reason):
        validate(RunSettings, {**recipe, **{key: recipe.get(key, {}) | one for key, one in changed.items()}})
