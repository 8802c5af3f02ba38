"""Rollouts that are generated during updates: those of the next step (``cluster.max_staleness``), or groups
of several steps (``cluster.in_flight``). ``queue.jsonl`` of a checkpoint stores them, so that a resumed run
trains on the same ones.

The first line of the file describes the steps, every other line is a group. Floats keep all their bits;
nothing is pickled.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import TypeAdapter

from outrider.errors import ConfigError
from outrider.files import parsed, whole_lines
from outrider.printing import plural
from outrider.rollout.branching import Expansion
from outrider.rollout.scheduler import RolloutReport, largest
from outrider.trace import Insertion, Leaf, Node, Trace
from outrider.training.components import Components
from outrider.training.data import (
    QueuedStep,
    SampledStep,
    demonstrate_tasks,
    group_modes,
    plan_step,
    play_step,
)
from outrider.types import Task

if TYPE_CHECKING:
    from outrider.distributed.rollouts import RemoteGroupPlayer
    from outrider.training.resume import RunState

_HELP: Final = dict[int, tuple[Insertion, ...]]
QUEUE: Final = "queue.jsonl"
_ValueT = TypeVar("_ValueT")


def write_queue(folder: Path, queued: QueuedStep) -> None:
    """Write the prefetched step into a checkpoint. Raises OSError."""
    sampled = queued.sampled
    selected = {id(trace) for trace in sampled.selected}
    head = {
        "is_filtered": sampled.is_filtered,
        "faults": dict(sampled.faults),
        "fault_reasons": list(sampled.fault_reasons),
        "num_extra_batches": sampled.num_extra_batches,
        "cursor": sampled.cursor,
        "loop_lag_s": sampled.loop_lag_s,
        "counts": [dict(entry) for entry in queued.counts],
        "seconds": queued.seconds,
    }
    groups = [group_to_dict(trace) | {"is_trained": id(trace) in selected} for trace in sampled.traces]
    # An environment may put any object into a node's metadata; the trace files have its text too.
    lines = [json.dumps(entry, default=str) + "\n" for entry in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_queue(folder: Path) -> QueuedStep | None:
    """Read the prefetched step of a checkpoint whose files are complete; None if there is none.

    Raises OSError, and ValueError, KeyError or TypeError for damaged data.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
    traces = [read_group(group) for group in groups]
    sampled = SampledStep(
        is_filtered=bool(head["is_filtered"]),
        traces=traces,
        selected=[trace for trace, group in zip(traces, groups, strict=True) if group["is_trained"]],
        faults=Counter(head["faults"]),
        fault_reasons=tuple(head["fault_reasons"]),
        num_extra_batches=int(head["num_extra_batches"]),
        cursor=int(head["cursor"]),
        loop_lag_s=head.get("loop_lag_s"),
    )
    return QueuedStep(sampled=sampled, counts=head["counts"], seconds=float(head["seconds"]))


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
    """Plain values of metadata. pydantic would replace lone surrogates in the keys of a mapping."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _dump(Any, value)


def _parse(kind: Callable[..., _ValueT], value: object) -> _ValueT:
    result: _ValueT = _adapter(kind).validate_python(value)
    return result


# ``queue.jsonl`` with groups of several steps (``cluster.in_flight``): those that have ended.


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """One group that has ended after ``seconds``; ``gathered`` are the results of the copies of the hooks,
    None after the hooks have absorbed them.
    """

    report: RolloutReport
    gathered: list[Any] | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that has begun: the task and the modes of every group, the ``cursor`` after its tasks, and the
    groups that have ended, by number.
    """

    step: int
    tasks: Sequence[Task]
    modes: Sequence[tuple[str, ...]]
    cursor: int
    results: dict[int, GroupResult] = field(default_factory=dict)


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
                "tasks": [asdict(task) for task in entry.tasks],
                "modes": [list(modes) for modes in entry.modes],
                "cursor": entry.cursor,
            }
            for entry in snapshot.steps
        ],
    }
    groups = [
        {
            "step": entry.step,
            "group": number,
            "seconds": group.seconds,
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
    lines = [json.dumps(entry, default=str) + "\n" for entry in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_snapshot(folder: Path) -> QueueSnapshot | None:
    """Read the queue of a checkpoint whose files are complete; None if no step was in progress.

    Raises OSError, and ValueError, KeyError or TypeError for damaged data.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
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
        result = GroupResult(report=report, gathered=None, seconds=float(group["seconds"]))
        steps[int(group["step"])].results[int(group["group"])] = result
    return QueueSnapshot(steps=list(steps.values()), counts=head["counts"])


def _parse_step(values: Mapping[str, Any]) -> PendingStep:
    return PendingStep(
        step=int(values["step"]),
        tasks=[read_task(task) for task in values["tasks"]],
        modes=[tuple(modes) for modes in values["modes"]],
        cursor=int(values["cursor"]),
    )


# Rollouts of the next step during the update of this one (``cluster.max_staleness`` 1).
#
# A thread waits for the rollout workers. Their results are absorbed only after the previous step is recorded.
# So this thread never changes state that the main thread reads, and everything happens in the order of a run
# that alternates rollouts and updates: the same bits at any speed.


_TICK_S: Final = 0.5  # between updates of the display
_JOIN_TIMEOUT_S: Final = 10.0  # a thread that replaces a process may take longer to end


class _Cancelled(Exception):
    """Ends the thread after :meth:`RolloutPrefetch.cancel`."""


class RolloutPrefetch:
    """The rollouts of one step, generated in a thread of their own.

    ``play`` gets this object and returns the step. It must call :meth:`mark_sent` and :meth:`mark_done`.
    """

    def __init__(
        self, play: Callable[["RolloutPrefetch"], SampledStep], *, counts: list[dict[str, int]]
    ) -> None:
        self._counts = counts
        self._sent, self._done, self._released = (threading.Event() for _ in range(3))
        self._is_cancelled = False
        self._sampled: SampledStep | None = None
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self._seconds = 0.0
        self.progress = ""
        self._thread = threading.Thread(
            target=self._run, args=(play,), name="rollouts of the next step", daemon=True
        )
        self._thread.start()

    def _run(self, play: Callable[["RolloutPrefetch"], SampledStep]) -> None:
        try:
            self._sampled = play(self)
        except BaseException as error:  # raised in the thread that waits
            self._error = error
        finally:
            self._sent.set()
            self._done.set()

    def mark_sent(self) -> None:
        """The rollout workers have everything that they need from this process."""
        self._sent.set()
        self.raise_if_cancelled()

    def mark_done(self) -> None:
        """The rollouts are finished; wait until this process may absorb their results."""
        if not self._done.is_set():  # else these are further ones for groups that a filter dropped
            self._seconds = time.perf_counter() - self._began
        self._done.set()
        self._released.wait()
        self.raise_if_cancelled()

    def on_finished(self, num_done: int, num_total: int) -> None:
        """Store the progress of the rollouts for :meth:`wait`."""
        self.progress = f"{num_done}/{num_total}"
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """End the thread if the rollouts were cancelled; ``play`` calls this regularly while it waits."""
        if self._is_cancelled:
            raise _Cancelled

    def wait_until_sent(self) -> None:
        """Afterwards this process may change what rollouts begin with. Raises what the thread raised."""
        self._sent.wait()
        self._raise()

    def wait(self, *, on_tick: Callable[[str], None]) -> None:
        """Wait until the rollouts have ended: then the engines are idle and can get new weights. Raises what
        the thread raised.
        """
        while not self._done.wait(_TICK_S):
            on_tick(self.progress)
        self._raise()

    def collect(self) -> QueuedStep:
        """Absorb the results and return the step. Raises what the thread raised."""
        self._released.set()
        self._thread.join()
        self._raise()
        assert self._sampled is not None
        return QueuedStep(sampled=self._sampled, counts=self._counts, seconds=self._seconds)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Discard the rollouts and end their thread. If it still ran when the processes end, it would replace
        them.
        """
        self._is_cancelled = True
        self._released.set()
        self._thread.join(_JOIN_TIMEOUT_S)


@contextmanager
def prefetch_rollouts(parts: Components, sampled: SampledStep, *, step: int) -> Iterator[RolloutPrefetch]:
    """Generate the rollouts of the next ``step`` during the update on ``sampled``; they are cancelled if the
    update fails.
    """
    remote = parts.remote
    assert remote is not None  # the settings require engines in other processes

    def play(prefetch: RolloutPrefetch) -> SampledStep:
        rollouts = remote.rollouts(parts, training=True, on_finished=prefetch.on_finished, prefetch=prefetch)
        return play_step(parts, rollouts, step=step, cursor=sampled.cursor)

    prefetch = RolloutPrefetch(play, counts=parts.algorithm.counts())
    try:
        prefetch.wait_until_sent()
        yield prefetch
    except BaseException:
        prefetch.cancel()
        raise


# Groups of several steps in progress at once (``cluster.in_flight``), collected in the order of their tasks.
#
# Update u begins with weights of version u. A group of update u begins once the engines have version u - k (k
# = ``cluster.max_staleness``), and their version never decreases. So none of its tokens is older than k
# versions when it is trained on, and nothing is dropped for its age. Which version samples a turn depends on
# speed, so the same seed does not give the same bits.


GroupName = tuple[int, int]  # step, and number in it


class AsyncRolloutQueue:
    """The steps that have begun and are not trained on. Its methods are called by the thread that trains."""

    def __init__(
        self,
        parts: Components,
        player: "RemoteGroupPlayer",
        *,
        step: int,
        cursor: int,
        snapshot: QueueSnapshot | None,
    ) -> None:
        """``step`` is the next one to train on, ``cursor`` where its tasks begin. Groups of the ``snapshot``
        of a checkpoint that had not ended start again. Raises ConfigError for hooks that branch.
        """
        hooks = parts.algorithm.hooks
        if any(hook.first_wave is not None or isinstance(hook, Expansion) for hook in hooks):
            raise ConfigError("cluster.in_flight goes without rollouts that branch")
        self._parts, self._player = parts, player
        self._counts = parts.algorithm.counts() if snapshot is None else snapshot.counts
        self._steps = {} if snapshot is None else {pending.step: pending for pending in snapshot.steps}
        self._next = max(self._steps, default=step - 1) + 1
        self._cursor = self._steps[self._next - 1].cursor if self._steps else cursor
        self.num_restarted_groups = 0
        for pending in self._steps.values():
            missing = [group for group in range(len(pending.tasks)) if group not in pending.results]
            self.num_restarted_groups += len(missing)
            player.begin(pending, missing, is_again=True)

    def begin(self, last: int) -> None:
        """Start the groups of all steps up to ``last``; groups in progress continue."""
        while self._next <= last:
            pending = self._steps[self._next] = self._plan(self._next)
            self._next, self._cursor = self._next + 1, pending.cursor
            self._player.begin(pending, range(len(pending.tasks)), is_again=False)

    def _plan(self, step: int) -> PendingStep:
        order, cursor, choice = plan_step(self._parts, step=step, cursor=self._cursor)
        if choice.group_filter is not None:
            raise ConfigError("cluster.in_flight goes without an algorithm that leaves groups out of a step")
        if choice.tasks is not None:
            tasks = list(choice.tasks)
        else:
            tasks, cursor = order.draw(choice.num_groups, cursor=cursor)
        demonstrate_tasks(self._parts, tasks)
        modes = [tuple(group_modes(self._parts, step, group)) for group in range(len(tasks))]
        return PendingStep(step=step, tasks=tasks, modes=modes, cursor=cursor)

    def collect(self, step: int, *, on_tick: Callable[[str], None]) -> QueuedStep:
        """Wait for all groups of a step, and collect their results in the order of the groups.

        ``on_tick`` is called regularly with the number of finished groups. Raises what the player raises.
        """
        pending = self._steps[step]
        while len(pending.results) < len(pending.tasks):
            on_tick(f"{len(pending.results)}/{len(pending.tasks)} groups")
            self._poll(waits=True)
        self._absorb(pending)
        del self._steps[step]
        groups = [pending.results[number] for number in range(len(pending.tasks))]
        traces = [trace for group in groups for trace in group.report.traces]
        sampled = SampledStep(
            is_filtered=False,
            traces=traces,
            selected=traces,
            faults=sum((group.report.faults for group in groups), Counter()),
            fault_reasons=tuple(reason for group in groups for reason in group.report.fault_reasons),
            num_extra_batches=0,
            cursor=pending.cursor,
            loop_lag_s=largest([group.report.loop_lag_s for group in groups]),
        )
        seconds = max((group.seconds for group in groups), default=0.0)
        return QueuedStep(sampled=sampled, counts=self._counts, seconds=seconds)

    def _poll(self, *, waits: bool) -> None:
        for (step, group), result in self._player.poll(waits=waits).items():
            results = self._steps[step].results
            if group in results:
                raise AssertionError(f"group {group} of step {step} has ended twice")
            results[group] = result

    def _absorb(self, pending: PendingStep) -> None:
        """Absorb the results of the groups that have ended, in their order."""
        hooks = self._parts.algorithm.hooks
        portable_hooks = [hook for hook in hooks if hook.is_portable]
        for _, group in sorted(pending.results.items()):
            if group.gathered is None:
                continue
            for copy, gathered in zip(portable_hooks, group.gathered, strict=True):
                copy.absorb(gathered)
            for hook in hooks:
                for trace in group.report.traces:
                    hook.after_group(trace)
            group.gathered = None

    def on_step_recorded(self) -> None:
        """The metrics of a step are recorded: from now on hooks count for the next one."""
        self._counts = self._parts.algorithm.counts()

    def cancel(self) -> None:
        """Cancel the steps that have begun."""
        if self._steps:
            self._player.cancel()

    def snapshot(self) -> QueueSnapshot:
        """Return the groups that have ended, for a checkpoint. They are absorbed first, so that the memories
        in the same checkpoint contain them.
        """
        self._poll(waits=False)
        steps = [self._steps[number] for number in sorted(self._steps)]
        for pending in steps:
            self._absorb(pending)
        return QueueSnapshot(steps=steps, counts=self._counts)


def start_queue(parts: Components, state: "RunState", *, note: Callable[[str], None]) -> AsyncRolloutQueue:
    """The queue of a run, with the steps that its checkpoint has. From now on ``state`` saves the queue."""
    assert parts.remote is not None  # the settings require engines in other processes
    queue = AsyncRolloutQueue(
        parts,
        parts.remote.group_player(parts),
        step=state.step,
        cursor=state.task_cursor,
        snapshot=state.queue_snapshot,
    )
    if queue.num_restarted_groups:
        note(
            f"{plural(queue.num_restarted_groups, 'group')} that had not ended at the checkpoint "
            "will start again"
        )
    state.queue_snapshot, state.snapshot_queue = None, queue.snapshot
    return queue
