"""Infrastructure faults of rollouts: counters, reasons, guarded calls, and limits that truncate rollouts."""

import asyncio
import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar

from outrider.environments.base import EnvironmentEpisode
from outrider.errors import (
    ConfigError,
    EngineFault,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolFault,
    UnusableReward,
    unwrap_group,
)
from outrider.printing import plural
from outrider.rollout.settings import Limits
from outrider.tools.base import CallClock
from outrider.trace import REBUILT, Leaf, Node, Trace, split_contexts, split_episodes
from outrider.types import Origin, Outcome

_MAX_CHARS = 300
NON_FINITE: Final = "non_finite"

Fault = ToolFault | EnvironmentFault | EngineFault


def fault_outcome(fault: Fault) -> Outcome:
    """Return the outcome of a rollout that is lost to this fault."""
    if isinstance(fault, ToolFault):
        return Outcome.TOOL_FAULT
    return Outcome.ENVIRONMENT_FAULT if isinstance(fault, EnvironmentFault) else Outcome.ENGINE_FAULT


def locate_invalid_result(environment: object, task_key: str, error: InvalidResult) -> InvalidResult:
    """Add the environment and the task to the error message."""
    return InvalidResult(f"the environment {_name(environment)}, task {task_key}: {error}")


def fault_detail(fault: Fault, environment: object | None) -> str:
    """Return the reason of a lost rollout, with the environment's name if its result was not finite."""
    if isinstance(fault, NonFiniteResult) and environment is not None:
        return f"the environment {_name(environment)}: {fault}"
    return str(fault)


def _name(environment: object) -> str:
    if isinstance(environment, EnvironmentEpisode):
        environment = environment.environment  # the user's class
    kind = type(environment)
    return f"{kind.__module__}.{kind.__qualname__}"


def lost_leaf(rollout: int, outcome: Outcome, detail: str) -> Leaf:
    """Return the leaf of a lost rollout.

    It has no return, so it is masked and never counts as a reward of 0.
    """
    return Leaf(node_id=None, rollout=rollout, outcome=outcome, episode_return=None, detail=detail)


def cancelled_leaf(rollout: int) -> Leaf:
    """Return the leaf of a rollout whose group exceeded its time limit."""
    return lost_leaf(rollout, Outcome.CANCELLED, "its group took longer than train.group_timeout_s")


@dataclass(slots=True)
class FaultLog:
    """Counts faults and records their reasons.

    ``counts`` has the number of faults per outcome, ``retries``, ``close`` and ``copy`` (environments that
    failed to close or to be copied), ``reflection`` (rollouts without the reflection that a hook requested)
    and ``non_finite`` (rollouts that were lost because of NaN or infinity).
    """

    counts: Counter[str] = field(default_factory=Counter)
    _reasons: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def add(self, fault: Fault, *, group: int, rollout: int, attempt: int, task_key: str) -> Outcome:
        """Count a fault of one attempt of a rollout. Returns its outcome."""
        outcome = fault_outcome(fault)
        self.counts[outcome.value] += 1
        self._reasons[group, rollout, attempt] = f"{outcome.value} in {task_key}, rollout {rollout}: {fault}"
        return outcome

    def add_lost(self, fault: Fault) -> None:
        """Count a lost rollout under ``non_finite`` if its result was not finite."""
        if isinstance(fault, NonFiniteResult):
            self.counts[NON_FINITE] += 1

    def add_harmless(self, kind: Literal["close", "copy"], fault: Exception) -> None:
        """Count an environment that failed to close or to be copied, which changes no outcome."""
        self.counts[kind] += 1
        done = {"close": "closing", "copy": "copying"}[kind]
        self._reasons[-1, -1, len(self._reasons)] = f"{done} an environment: {fault}"

    def add_reflection(self, detail: str, *, group: int, rollout: int, attempt: int, task_key: str) -> None:
        """Count a reflection that the engine could not generate. The rollout keeps its outcome."""
        self.counts["reflection"] += 1
        self._reasons[group, rollout, attempt] = f"{detail} in {task_key}, rollout {rollout}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of the faults in the order of groups, rollouts and attempts; harmless ones last."""
        ordered = sorted(self._reasons.items(), key=lambda entry: (entry[0][0] < 0, entry[0]))
        return tuple(reason for _, reason in ordered)


def fault_line(reasons: Sequence[str]) -> str:
    """Format the first reason and the number of others; empty without reasons."""
    if not reasons:
        return ""
    first = reasons[0] if len(reasons[0]) <= _MAX_CHARS else reasons[0][:_MAX_CHARS] + "..."
    return first + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def lost_reasons(traces: Sequence[Trace], *, only: Outcome | None = None) -> list[str]:
    """Return the reasons of lost rollouts, in the order of tasks and rollouts; ``only``: of this outcome."""
    leaves = [(trace.task.key, leaf) for trace in traces for leaf, _ in trace.rollouts()]
    return [
        f"{key}: {leaf.detail}"
        for key, leaf in leaves
        if leaf.outcome.is_fault and only in (None, leaf.outcome)
    ]


def require_results(traces: Sequence[Trace], counts: Mapping[str, int]) -> None:
    """Check that the code that computes rewards works.

    Raises:
        InvalidResult: if an agent program returned something that is not a reward, or if every rollout was
            lost because its result was NaN or infinite.
    """
    reasons = lost_reasons(traces)
    if unusable := [reason for reason in reasons if UnusableReward.PREFIX in reason]:
        raise InvalidResult(f"task {unusable[0]}")
    num = sum(len(trace.leaves) for trace in traces)
    if num and counts.get(NON_FINITE, 0) == num:
        raise InvalidResult(f"no rollout has a finite result: task {fault_line(reasons)}")


# Calls of environments in threads, with a time limit and typed faults.


ResultT = TypeVar("ResultT")
_TICK = 0.05  # seconds between checks of a clock that is paused
_Outcome: TypeAlias = tuple[ResultT, None] | tuple[None, BaseException]


async def run_guarded(call: Callable[..., ResultT], *arguments: object, timeout_s: float) -> ResultT:
    """Run ``call`` in a new thread and wait for at most ``timeout_s`` seconds.

    The thread is a daemon and not part of a pool, so that a hanging call neither blocks other calls nor keeps
    the process alive. Time spent waiting for shared processes does not count towards the limit
    (:mod:`outrider.tools.base`). After a timeout or cancellation, the call is removed from their queues.

    Raises:
        ToolFault, EnvironmentFault, InvalidResult: any other exception of ``call`` and a timeout become an
            EnvironmentFault. A cancellation is never swallowed.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome[ResultT]] = loop.create_future()
    clock = CallClock(timeout_s)

    def deliver(outcome: _Outcome[ResultT]) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        with clock.running_here():
            outcome = _run_call(call, *arguments)
        # the loop is closed if the call outlived the run
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, daemon=True).start()
    try:
        # Not asyncio.wait_for: on Python 3.11 it swallows a cancellation that arrives after the result, and
        # the worker would then wait for a batch that never forms. If the loop was blocked for longer than the
        # limit, it sees the result and the timeout at the same time, and the result counts.
        while not future.done() and (left := clock.seconds_left()) > 0:
            await asyncio.wait({future}, timeout=max(left, _TICK))
        if not future.done():
            fault = EnvironmentFault(f"no answer within {timeout_s:g} s")
            fault.tool_calls = tuple(clock.tool_calls)
            raise fault from TimeoutError()
    finally:
        if not future.done():
            clock.abandon()
    return _unwrap(future.result(), clock)


def run_timed(call: Callable[..., ResultT], *arguments: object, timeout_s: float) -> ResultT:
    """Blocking version of :func:`run_guarded` for code outside of an event loop."""
    outcomes: queue.SimpleQueue[_Outcome[ResultT]] = queue.SimpleQueue()
    clock = CallClock(timeout_s)

    def run() -> None:
        with clock.running_here():
            outcomes.put(_run_call(call, *arguments))

    threading.Thread(target=run, daemon=True).start()
    outcome: _Outcome[ResultT] | None = None
    try:
        while outcome is None and (left := clock.seconds_left()) > 0:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=max(left, _TICK))
    finally:
        if outcome is None:
            clock.abandon()
    if outcome is None:
        raise EnvironmentFault(f"no answer within {timeout_s:g} s")
    return _unwrap(outcome, clock)


def _run_call(call: Callable[..., ResultT], *arguments: object) -> _Outcome[ResultT]:
    try:
        return call(*arguments), None
    except BaseException as error:  # SystemExit too: a tool that exits must not end the run
        return None, error


def _unwrap(outcome: _Outcome[ResultT], clock: CallClock) -> ResultT:
    result, error = outcome
    if error is not None:
        error = unwrap_group(error, ToolFault, EnvironmentFault, InvalidResult)
        if isinstance(error, ToolFault | EnvironmentFault | InvalidResult):
            raise error
        fault = EnvironmentFault(f"{type(error).__name__}: {error}")
        fault.tool_calls = tuple(clock.tool_calls)
        raise fault from error
    return result  # type: ignore[return-value]  # without an error there is a result


# Retries: equal nodes of several attempts are merged, so that faults do not change prefix sharing.


_DECIDED: Final = ("entropy_change", "num_forks", "num_forks_wanted", "is_replayed")  # metadata of decisions


def rejoin(trace: Trace) -> None:
    """Move forks of a failed attempt to the equal nodes of the attempt that counts, if there are any.

    Nodes are equal if the same rollout wrote the same tokens after equal nodes. The attempt that counts is
    the last one or, if all failed, the first one that reached the node. Other nodes of failed attempts stay
    in the trace and count as cost. Call this function before the nodes are numbered.
    """
    own = [
        node
        for leaf, path in trace.rollouts()
        for node in path
        if node.metadata.get("rollout") == leaf.rollout
    ]
    counts = {node.node_id for node in own}
    first: dict[Hashable, int] = {}  # content and parent -> first node
    same: list[int] = []  # for every node, the first equal node
    representatives: dict[int, int] = {}  # first equal node -> the node that represents all of them
    for node in trace.nodes:
        is_own = node.parent is not None and "rollout" in node.metadata
        parent = None if node.parent is None else same[node.parent]
        key = (parent, node.metadata["rollout"], node.origin, node.token_ids) if is_own else node.node_id
        same.append(first.setdefault(key, node.node_id))
        if node.node_id in counts or node.node_id == same[-1]:
            representatives[same[-1]] = node.node_id
    for node in trace.nodes:
        counted = trace.nodes[representatives[same[node.node_id]]]
        if node is not counted:  # the report reads decisions from the rollout's path
            counted.metadata |= {name: node.metadata.pop(name) for name in _DECIDED if name in node.metadata}
        if node.parent is not None:
            node.parent = representatives[same[node.parent]]
    for leaf in trace.leaves.values():
        if leaf.node_id is not None:
            leaf.node_id = representatives[same[leaf.node_id]]


# Reasons of unsuccessful rollouts, with the settings of the limits that truncated them.


CUT = "cut by "
LIMIT: Final = "limit"
"""Key of a node's metadata: the limit that left no room for what would follow the node."""


def limiting_setting(leaf: Leaf, path: Sequence[Node], limits: Limits, *, context_length: int) -> str | None:
    """Return the setting and value of the limit that truncated the rollout or one of its turns, or None.

    Of several episodes, the last one counts.
    """
    path = split_episodes(path)[-1]
    turns = [node for node in path if node.receives_advantages]
    shortened = [node for node in turns if node.metadata.get("finish") == "length"]
    if any(len(node.token_ids) >= limits.max_turn_tokens for node in shortened):
        return f"rollout.max_turn_tokens = {limits.max_turn_tokens}"
    if leaf.outcome is Outcome.TRUNCATED_TURNS:
        if len(turns) >= limits.max_turns:
            return f"rollout.max_turns = {limits.max_turns}"
        return "the environment's own limit of moves"
    if leaf.outcome is not Outcome.TRUNCATED_TOKENS and not shortened:
        return None
    if path and LIMIT in path[-1].metadata:
        return str(path[-1].metadata[LIMIT])
    context = split_contexts(path)[-1]
    counted = context if context and REBUILT in context[0].metadata else path
    left = limits.max_response_tokens - sum(node.num_response_tokens for node in counted)
    room = context_length - sum(len(node.token_ids) for node in context)
    if leaf.outcome is not Outcome.TRUNCATED_TOKENS and min(left, room) > 0:
        return None  # an external program's own limit of a turn
    if room <= left:
        return f"the context of {context_length} tokens (model.context_length)"
    return f"rollout.max_response_tokens = {limits.max_response_tokens}"


def failure_reasons(traces: Sequence[Trace], limits: Limits, *, context_length: int) -> Counter[str]:
    """Count the reasons why rollouts ended without success. Faults are not included."""
    reasons: Counter[str] = Counter()
    for trace in traces:
        for leaf, path in trace.scored_rollouts():
            if leaf.success:
                continue
            limit = limiting_setting(leaf, path, limits, context_length=context_length)
            if limit is not None:
                reasons[f"{CUT}{limit}"] += 1
            elif leaf.outcome is Outcome.INVALID:
                reasons["ended with a turn that the environment cannot read"] += 1
            else:
                reasons["ended without success"] += 1
    return reasons


def reasons_line(reasons: Mapping[str, int]) -> str:
    """Format the reasons with their counts, most frequent first; empty without reasons."""
    ordered = sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{num} {reason}" for reason, num in ordered)


def cut_line(cut: Mapping[str, int]) -> str:
    """Format the truncated rollouts per limit, for example ``3 by rollout.max_turn_tokens = 256``."""
    return reasons_line({f"by {limit}": num for limit, num in cut.items()})


def count_cut(traces: Sequence[Trace], limits: Limits, *, context_length: int) -> Counter[str]:
    """Count the rollouts that each limit truncated, including successful ones."""
    limits_by_rollout = (
        limiting_setting(leaf, path, limits, context_length=context_length)
        for trace in traces
        for leaf, path in trace.scored_rollouts()
    )
    return Counter(limit for limit in limits_by_rollout if limit is not None)


def has_no_room(leaf: Leaf, path: Sequence[Node]) -> bool:
    """Whether the prompt left the policy no room for a single token."""
    return (
        leaf.outcome is Outcome.TRUNCATED_TOKENS
        and bool(path)
        and all(node.origin is Origin.PROMPT for node in path)
    )


def require_room(traces: Sequence[Trace], *, context_length: int) -> list[str]:
    """Return a warning about prompts that leave the policy no room, or an empty list.

    Raises:
        ConfigError: if no prompt leaves room, so that nothing can be generated.
    """
    rollouts = [(trace.task.key, leaf, path) for trace in traces for leaf, path in trace.scored_rollouts()]
    paths = {key: path for key, leaf, path in rollouts if has_no_room(leaf, path)}
    lengths = {key: sum(len(node.token_ids) for node in path) for key, path in paths.items()}
    if not lengths:
        return []
    num = sum(has_no_room(leaf, path) for _, leaf, path in rollouts)
    key = min(lengths, key=lambda task_key: lengths[task_key])
    context = f"model.context_length: the context has {context_length} tokens"
    room = paths[key][-1].metadata.get(LIMIT, context)
    if num == len(rollouts):
        raise ConfigError(
            f"no prompt leaves the policy room to write; {room}, the shortest prompt ({key}) has "
            f"{lengths[key]}"
        )
    longest = max(lengths.values())
    return [
        f"{num} of {plural(len(rollouts), 'rollout')} have a prompt that leaves the policy no room; "
        f"{room}, the "
        f"longest prompt has {longest}"
    ]
