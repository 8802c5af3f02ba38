"""Groups of later steps that are rolled out during the updates of earlier ones (``cluster.max_staleness``).

The queue begins the groups of step s + k when those of step s are collected, with weights of version s or
newer ones, so that none of their tokens is older than k versions at their update. Up to k = 1, new weights
wait until all groups have ended: everything then happens in the order of a run that alternates rollouts and
updates, and the same seed gives the same bits. With more, engines take new weights between two turns of an
episode, and which version samples a turn depends on speed.

``queue.jsonl`` of a checkpoint stores the groups that have ended, so that a resumed run trains on the same
ones. Its first line describes the steps, every other line is a group. Floats keep all their bits; nothing is
pickled.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import TypeAdapter

from outrider.algorithms.base import TaskChoice
from outrider.errors import ConfigError
from outrider.files import parsed, whole_lines
from outrider.printing import plural
from outrider.rollout.branching import Expansion
from outrider.rollout.hooks import Hook
from outrider.rollout.scheduler import RolloutReport, largest
from outrider.trace import Insertion, Leaf, Node, Trace
from outrider.training.components import Components
from outrider.training.data import QueuedStep, Round, Rounds, SampledStep, plan_step, sample_rounds
from outrider.types import Task

if TYPE_CHECKING:
    from outrider.training.resume import RunState

_HELP: Final = dict[int, tuple[Insertion, ...]]
QUEUE: Final = "queue.jsonl"
_TICK_S: Final = 0.5  # between updates of the display
_ValueT = TypeVar("_ValueT")

GroupName = tuple[int, int]  # step, and number in it


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """One group that has ended after ``seconds``; ``gathered`` are the results of the copies of the hooks,
    which the hooks absorb once. None: the group is masked, or it is from a checkpoint.
    """

    report: RolloutReport
    gathered: list[Any] | None
    seconds: float
    num_calls: int = 0
    is_absorbed: bool = False


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that has begun, and its groups that have ended, numbered through its rounds.

    ``cursor`` is the position in the order of tasks before the step. ``round`` is the current one, ``offset``
    the number of groups before it.
    """

    step: int
    cursor: int
    first: Round
    is_chosen: bool  # by the algorithm, not drawn from the order of tasks
    results: dict[int, GroupResult] = field(default_factory=dict)
    rounds: Rounds | None = None  # None: it is from a checkpoint and has not begun again
    sampled: SampledStep | None = None  # at once for a step without groups, for example of replays only
    offset: int = 0
    round: Round = field(init=False)

    def __post_init__(self) -> None:
        self.round = self.first

    @property
    def numbers(self) -> range:
        """The groups of the current round."""
        return range(self.offset, self.offset + len(self.round.tasks))

    @property
    def missing(self) -> list[int]:
        """The groups of the current round that have not ended."""
        return [number for number in self.numbers if number not in self.results]

    def next_round(self, rounds: Rounds) -> Round | None:
        """Begin with the rounds; returns the first one, or None if there is none."""
        self.rounds = rounds
        try:
            return next(rounds)
        except StopIteration as end:
            self.sampled = end.value
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """Steps that have begun, in order; ``counts`` are the algorithm's at the newest recorded metrics."""

    steps: Sequence[PendingStep]
    counts: Sequence[Mapping[str, int]]


def write_snapshot(folder: Path, snapshot: QueueSnapshot) -> None:
    """Write the queue into a checkpoint. Raises OSError."""
    head = {
        "counts": [dict(entry) for entry in snapshot.counts],
        "steps": [
            {
                "step": entry.step,
                "cursor": entry.cursor,
                "next_cursor": entry.first.cursor,
                "is_chosen": entry.is_chosen,
                "tasks": [asdict(task) for task in entry.first.tasks],
                "modes": [list(modes) for modes in entry.first.modes],
                "lost": list(entry.round.lost),
            }
            for entry in snapshot.steps
        ],
    }
    groups = [
        {
            "step": entry.step,
            "group": number,
            "seconds": group.seconds,
            "num_calls": group.num_calls,
            "num_batches": group.report.num_batches,
            "num_retries": group.report.num_retries,
            "faults": dict(group.report.faults),
            "fault_reasons": list(group.report.fault_reasons),
            "loop_lag_s": group.report.loop_lag_s,
            "traces": [group_to_dict(trace) for trace in group.report.traces],
        }
        for entry in snapshot.steps
        for number, group in sorted(entry.results.items())
    ]
    # An environment may put any object into a node's metadata; the trace files have its text too.
    lines = [json.dumps(entry, default=str) + "\n" for entry in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_snapshot(folder: Path) -> QueueSnapshot | None:
    """Read the queue of a checkpoint whose files are complete; None if no step was in progress.

    Raises ConfigError for a queue of an earlier version, OSError, and ValueError, KeyError or TypeError
    for damaged data.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
    if not all("next_cursor" in entry for entry in head.get("steps", [{}])):
        raise ConfigError(  # no damage, for which an older checkpoint would be taken
            f"{folder / QUEUE} is from an earlier version, whose rollouts ahead cannot be continued: finish "
            "the run with that version, or resume from a checkpoint without this file"
        )
    steps = {int(entry["step"]): _parse_step(entry) for entry in head["steps"]}
    for group in groups:
        report = RolloutReport(
            traces=[read_group(trace) for trace in group["traces"]],
            num_batches=int(group["num_batches"]),
            num_retries=int(group["num_retries"]),
            faults=Counter(group["faults"]),
            fault_reasons=tuple(group["fault_reasons"]),
            loop_lag_s=group["loop_lag_s"],
        )
        steps[int(group["step"])].results[int(group["group"])] = GroupResult(
            report=report,
            gathered=None,
            seconds=float(group["seconds"]),
            num_calls=int(group["num_calls"]),
            is_absorbed=True,
        )
    return QueueSnapshot(steps=list(steps.values()), counts=head["counts"])


def _parse_step(values: Mapping[str, Any]) -> PendingStep:
    return PendingStep(
        step=int(values["step"]),
        cursor=int(values["cursor"]),
        first=Round(
            tasks=[read_task(task) for task in values["tasks"]],
            modes=[tuple(modes) for modes in values["modes"]],
            cursor=int(values["next_cursor"]),
            lost=tuple(values.get("lost", ())),
        ),
        is_chosen=bool(values["is_chosen"]),
    )


def group_to_dict(trace: Trace) -> dict[str, Any]:
    """Convert a group to plain values."""
    return {
        "task": asdict(trace.task),
        "modes": list(trace.modes),
        "without_memory": trace.without_memory,
        "is_replayed": trace.is_replayed,
        "pruned": sorted(trace.pruned),
        "nodes": [_dump(Node, node) | {"metadata": _plain(node.metadata)} for node in trace.nodes],
        # In the order in which they ended, which nothing depends on.
        "leaves": [_dump(Leaf, leaf) for leaf in trace.leaves.values()],
    } | ({"help": _dump(_HELP, trace.help)} if trace.help else {})


def read_group(group: Mapping[str, Any]) -> Trace:
    """Convert plain values to a group. Raises ValueError, KeyError or TypeError for damaged data."""
    trace = Trace(task=read_task(group["task"]), modes=group["modes"])
    trace.without_memory = bool(group["without_memory"])
    trace.is_replayed = bool(group["is_replayed"])
    trace.pruned = frozenset(group["pruned"])
    trace.nodes = [_parse(Node, node) for node in group["nodes"]]
    for leaf in group["leaves"]:
        trace.finish(_parse(Leaf, leaf))
    trace.help = _parse(_HELP, group.get("help", {}))
    return trace


def read_task(values: Mapping[str, Any]) -> Task:
    """Convert plain values to a task. Raises KeyError or TypeError for damaged data."""
    return Task(**{**values, "answers": tuple(values["answers"])})


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _dump(kind: Any, value: object) -> Any:
    return _adapter(kind).dump_python(value, mode="json", fallback=str)


def _plain(value: object) -> Any:
    """Plain values of metadata. pydantic would replace lone surrogates in the keys of a mapping, and numbers
    that are not finite.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else _dump(Any, value)


def _parse(kind: Callable[..., _ValueT], value: object) -> _ValueT:
    result: _ValueT = _adapter(kind).validate_python(value)
    return result


class AsyncRolloutQueue:
    """The steps that have begun and are not trained on. Its methods are called by the thread that trains."""

    def __init__(self, parts: Components, *, step: int, cursor: int, snapshot: QueueSnapshot | None) -> None:
        """``step`` is the next one to train on, ``cursor`` where its tasks begin. Groups of the ``snapshot``
        of a checkpoint that had not ended start again. Raises ConfigError for hooks and algorithms that need
        the results of a step before the next one begins, if several steps are ahead.
        """
        assert parts.remote is not None  # the settings require engines in other processes
        self._parts, self._pool = parts, parts.remote.pool
        self._is_far = parts.settings.cluster.max_staleness > 1
        hooks = parts.algorithm.hooks
        if self._is_far and any(hook.first_wave is not None or isinstance(hook, Expansion) for hook in hooks):
            raise ConfigError("cluster.max_staleness above 1 does not support rollouts that branch")
        self._counts = parts.algorithm.counts() if snapshot is None else snapshot.counts
        self._steps = {} if snapshot is None else {pending.step: pending for pending in snapshot.steps}
        self._next = max(self._steps, default=step - 1) + 1
        self._cursor = self._steps[self._next - 1].first.cursor if self._steps else cursor
        self.num_restarted_groups = 0
        for pending in self._steps.values():
            self.num_restarted_groups += len(pending.missing)
            self._begin_again(pending)

    def begin(self, last: int) -> None:
        """Start the groups of all steps up to ``last``; groups in progress continue."""
        while self._next <= last:
            _, cursor, choice = plan_step(self._parts, step=self._next, cursor=self._cursor)
            if self._is_far and choice.group_filter is not None:
                raise ConfigError(
                    "cluster.max_staleness above 1 does not support algorithms that leave groups out"
                )
            pending = PendingStep(
                step=self._next,
                cursor=self._cursor,
                first=Round(tasks=(), modes=(), cursor=cursor),
                is_chosen=choice.tasks is not None,
            )
            rounds = sample_rounds(self._parts, step=self._next, cursor=self._cursor, choice=choice)
            pending.first = pending.round = pending.next_round(rounds) or pending.first
            self._steps[self._next] = pending
            self._next, self._cursor = self._next + 1, pending.first.cursor
            self._submit(pending)

    def _begin_again(self, pending: PendingStep) -> None:
        """Start what had not ended at a checkpoint. The tasks and their number are those of the checkpoint,
        because the algorithm's choice may depend on what it has learned since.
        """
        tasks = pending.first.tasks
        if pending.is_chosen:
            choice = TaskChoice(num_groups=len(tasks), tasks=tasks)
        else:
            _, _, choice = plan_step(self._parts, step=pending.step, cursor=pending.cursor)
            choice = TaskChoice(num_groups=len(tasks), group_filter=choice.group_filter)
        rounds = sample_rounds(
            self._parts,
            step=pending.step,
            cursor=pending.cursor,
            choice=choice,
            lost_before=pending.first.lost,
        )
        if (again := pending.next_round(rounds)) is not None:
            pending.round = replace(pending.round, lost=again.lost)
        self._submit(pending)

    def _submit(self, pending: PendingStep, *, num_calls: int = 0) -> None:
        """Start the missing groups of the current round, after ``num_calls`` tool calls of earlier rounds."""
        limit: int | None = getattr(self._parts.settings.environment, "max_batch_calls", None)
        tasks, modes = pending.round.tasks, pending.round.modes
        self._pool.submit(
            {
                (pending.step, number): (tasks[number - pending.offset], modes[number - pending.offset])
                for number in pending.missing
            },
            training_step=pending.step,
            is_training=True,
            max_calls=None if limit is None else max(0, limit - num_calls),
        )

    def collect(self, step: int, *, on_tick: Callable[[str], None]) -> QueuedStep:
        """Wait for all groups of a step, and collect their results in the order of the groups.

        ``on_tick`` is called regularly with the number of finished groups. Raises what the pool raises.
        """
        pending = self._steps[step]
        seconds, num_calls = 0.0, 0
        while (sampled := pending.sampled) is None:
            self._wait(pending, on_tick)
            self._absorb(pending)
            groups = [pending.results[number] for number in pending.numbers]
            seconds += max((group.seconds for group in groups), default=0.0)
            num_calls += sum(group.num_calls for group in groups)
            assert pending.rounds is not None
            try:
                following = pending.rounds.send(merge_reports([group.report for group in groups]))
            except StopIteration as end:
                pending.sampled = end.value
            else:
                pending.offset, pending.round = pending.numbers.stop, following
                self._submit(pending, num_calls=num_calls)
        del self._steps[step]
        if not self._steps:
            self._cursor = sampled.cursor
        return QueuedStep(sampled=sampled, counts=self._counts, seconds=seconds)

    def _wait(self, pending: PendingStep, on_tick: Callable[[str], None]) -> None:
        while missing := pending.missing:
            num_groups = len(pending.numbers)
            on_tick(f"{num_groups - len(missing)}/{num_groups} groups")
            self._poll(timeout_s=_TICK_S)

    def wait_for_weights(self, *, on_tick: Callable[[str], None]) -> None:
        """Wait until new weights may be loaded: with at most one step ahead, until its groups have ended."""
        if not self._is_far:
            for pending in self._steps.values():
                self._wait(pending, on_tick)

    def _poll(self, *, timeout_s: float) -> None:
        self._pool.poll(timeout_s=timeout_s)
        for step, pending in self._steps.items():
            for number in pending.missing:
                if (result := self._pool.finished.pop((step, number), None)) is not None:
                    pending.results[number] = result

    def _absorb(self, pending: PendingStep) -> None:
        """Absorb the results of the groups that have ended, in their order."""
        absorb(
            self._pool.hooks,
            self._parts.algorithm.hooks,
            [group for _, group in sorted(pending.results.items())],
        )

    def on_step_recorded(self) -> None:
        """The metrics of a step are recorded: from now on hooks count for the next one."""
        self._counts = self._parts.algorithm.counts()

    def cancel(self) -> None:
        """Cancel the steps that have begun."""
        if self._steps:
            self._pool.cancel()

    def snapshot(self) -> QueueSnapshot:
        """Return the groups that have ended, for a checkpoint. They are absorbed first, so that the memories
        in the same checkpoint contain them.

        With one step ahead, a round that has not ended (after a request to stop) begins again as a whole, so
        that all of its groups begin with the same memories.
        """
        self._poll(timeout_s=0.0)
        steps = [self._steps[number] for number in sorted(self._steps)]
        for pending in steps:
            if pending.missing and not self._is_far:
                for number in pending.numbers:
                    pending.results.pop(number, None)
            self._absorb(pending)
        return QueueSnapshot(steps=steps, counts=self._counts)


def start_queue(parts: Components, state: "RunState", *, note: Callable[[str], None]) -> AsyncRolloutQueue:
    """The queue of a run, with the steps that its checkpoint has. From now on ``state`` saves the queue."""
    queue = AsyncRolloutQueue(parts, step=state.step, cursor=state.task_cursor, snapshot=state.queue_snapshot)
    if queue.num_restarted_groups:
        note(
            f"{plural(queue.num_restarted_groups, 'group')} that had not ended at the checkpoint "
            "will start again"
        )
    state.queue_snapshot, state.snapshot_queue = None, queue.snapshot
    return queue


def absorb(copied: Sequence[Hook], hooks: Sequence[Hook], groups: Sequence[GroupResult]) -> None:
    """Let the hooks absorb what their copies gathered, group by group, and see every group once."""
    for group in groups:
        if group.is_absorbed:
            continue
        if group.gathered is not None:  # otherwise the group is masked
            for hook, gathered in zip(copied, group.gathered, strict=True):
                hook.absorb(gathered)
        for hook in hooks:
            for trace in group.report.traces:
                hook.after_group(trace)
        group.gathered, group.is_absorbed = None, True


def merge_reports(reports: Sequence[RolloutReport]) -> RolloutReport:
    """Return one report of all groups, in their order."""
    return RolloutReport(
        traces=[trace for report in reports for trace in report.traces],
        num_batches=sum(report.num_batches for report in reports),
        num_retries=sum(report.num_retries for report in reports),
        faults=sum((report.faults for report in reports), Counter()),
        fault_reasons=tuple(reason for report in reports for reason in report.fault_reasons),
        loop_lag_s=largest([report.loop_lag_s for report in reports]),
    )
