"""Forks of running rollouts: where they start, how their environment reaches that state, and how many start.

A fork shares its parent's nodes, and the engine reuses the KV cache of the shared context.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from outrider import deprecated
from outrider.environments.base import CopyableEnvironment, Env, EnvironmentFactory
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.faults import run_guarded
from outrider.rollout.hooks import EpisodeState, Hook, StatelessHook
from outrider.seeding import stream
from outrider.trace import Node, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A snapshot of a running rollout before a policy turn.

    ``environment`` is a copy that is never stepped itself; None: the actions of ``state.episode`` are
    replayed in a new environment, also because of ``copy_fault``.
    """

    state: EpisodeState
    environment: CopyableEnvironment | None
    copy_fault: ToolFault | EnvironmentFault | None = None


async def make_fork(state: EpisodeState, last_node: Node, *, timeout_s: float) -> Fork:
    """Take a snapshot of a rollout before the turn that it has just sampled.

    If copying the environment fails, the fork replays the parent's actions instead.

    Args:
        state: the rollout after the turn.
        last_node: the last node before the turn.
        timeout_s: time limit of the copy, in seconds.
    """
    environment = state.episode.environment
    copy, copy_fault = None, None
    if isinstance(environment, CopyableEnvironment):
        try:
            copy = await run_guarded(environment.copy, timeout_s=timeout_s)
        except (ToolFault, EnvironmentFault) as fault:
            copy_fault = fault
    snapshot = state.snapshot()
    snapshot.last_node, snapshot.is_forked = last_node, True
    # Exclude the turn that was just sampled: the fork samples its own.
    snapshot.num_response_tokens -= len(state.last_node.token_ids)
    return Fork(state=snapshot, environment=copy, copy_fault=copy_fault)


async def fork_environment(
    fork: Fork | None, factory: EnvironmentFactory, trace: Trace, *, timeout_s: float
) -> Env:
    """Return an environment for one attempt: a copy of the fork's environment, or a new one."""
    if fork is not None and fork.environment is not None:
        # Copy the copy, because other rollouts and retries start from the same fork.
        return await run_guarded(fork.environment.copy, timeout_s=timeout_s)
    return await run_guarded(factory, trace.task, timeout_s=timeout_s)


class Copies:
    """Environment copies of forks. Each is closed once no rollout can start from it any more. ``on_fault``
    receives the faults of environments that could not be copied.
    """

    def __init__(
        self, close: Callable[[CopyableEnvironment], object], on_fault: Callable[[Exception], object]
    ) -> None:
        self._close, self._on_fault = close, on_fault
        # Keyed by identity, because forks contain nodes, which are not hashable.
        self._open: dict[int, Fork] = {}

    def add(self, fork: Fork) -> None:
        """Register a new fork; ignored if it has no copy."""
        if fork.environment is not None:
            self._open[id(fork)] = fork
        if fork.copy_fault is not None:
            self._on_fault(fork.copy_fault)

    def drop(self, fork: Fork) -> None:
        """Close the copy of a fork from which no rollout will start any more."""
        if self._open.pop(id(fork), None) is not None and fork.environment is not None:
            self._close(fork.environment)

    @property
    def open(self) -> list[CopyableEnvironment]:
        """Copies that are not closed yet, to be closed if a run fails."""
        return [fork.environment for fork in self._open.values() if fork.environment is not None]


class GroupScheduler(Protocol):
    """Decides which rollouts of the groups start when, and from which fork. Called at every policy turn.

    ``first`` are the numbers of the rollouts of every group that start at its prompt right away.
    """

    first: Sequence[int]

    def should_fork(self, state: EpisodeState, *, is_known: bool) -> bool:
        """Called after the policy sampled a turn. Returns whether a fork before it should be taken.

        ``is_known``: the rollout is itself a fork that started at this turn, so its parent has already passed
        this point.
        """

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """Called for the same turn before the environment steps, with the fork if one was requested."""

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """Called when a rollout has its outcome."""


# Enqueue a rollout: group, rollout number, fork (None: start at the prompt).
Enqueue = Callable[[Trace, int, Fork | None], None]


# Branching decisions in an order that does not depend on timing.
#
# Every turn has a *round* number, as if all rollouts of the group ran in lockstep: rollouts from the prompt
# start in round 0, and a fork starts in the round after that of the turn before which it branches, as in the
# released code. A branching point is decided in the order of (round, rollout), as soon as no earlier point
# can appear. A rollout does not wait for the decision, because it would occupy one of the concurrent places:
# it continues, its point is stored, and a fork that is granted later starts later. The tree is therefore the
# same for every max_concurrent.


_Position = tuple[int, int]  # (round, rollout), the order of decisions


@dataclass(slots=True, kw_only=True, order=True)
class _Point:
    """An undecided branching point before a turn.

    Attributes:
        position: round and rollout.
        max_forks: number of requested forks. Exact if ``state`` is None, otherwise an upper bound.
        turn_node: the node of the turn.
        state: set if the number depends on the group's streak. The hook is called with it again once the
            streak is known.
        fork: the snapshot, as long as it may be granted.
    """

    position: _Position
    max_forks: int = field(compare=False)
    turn_node: Node = field(compare=False)
    state: EpisodeState | None = field(default=None, compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Counters and undecided points of a group.

    Attributes:
        trace: the tree of the group.
        num_started: number of started rollouts, which is also the next rollout number.
        num_finished: number of finished rollouts.
        num_rounds: the largest round so far.
        streak: number of consecutive branched points of the group.
        next_rounds: for every unfinished rollout, the first round in which it may still reach a point.
        offsets: for every rollout, its round minus its turn.
        points: undecided points, sorted by position.
        active_forks: for every unfinished forked rollout, the fork from which it started.
    """

    trace: Trace
    num_started: int = 0
    num_finished: int = 0
    num_rounds: int = 0
    streak: int = 0
    next_rounds: dict[int, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    points: list[_Point] = field(default_factory=list)
    active_forks: dict[int, Fork] = field(default_factory=dict)

    def begin(self, num: int, *, round_number: int, turn: int = 0) -> range:
        """Return the next ``num`` rollout numbers, for rollouts that sample ``turn`` in this round."""
        numbers = range(self.num_started, self.num_started + num)
        self.num_started += num
        self.num_rounds = max(self.num_rounds, round_number)
        self.next_rounds |= dict.fromkeys(numbers, round_number)
        self.offsets |= dict.fromkeys(numbers, round_number - turn)
        return numbers

    def is_decidable(self, point: _Point) -> bool:
        """Whether no rollout can still reach an earlier point."""
        return all(point.position < (number, rollout) for rollout, number in self.next_rounds.items())


class BranchingGroupScheduler:
    """Group scheduler of hooks that decide on forks at every turn.

    A retry neither reverts nor repeats a decision: the first attempt that reaches a point determines it.
    Environment copies are stored only while a fork can still be granted. These are at most as many as
    rollouts are left to start in the group, except with ``streak_scope = "prompt"``, where any earlier point
    may still turn out to request no forks.
    """

    def __init__(
        self, traces: Sequence[Trace], *, size: int, brancher: Hook | None, enqueue: Enqueue, copies: Copies
    ) -> None:
        first_wave = (
            size if brancher is None or brancher.first_wave is None else min(brancher.first_wave, size)
        )
        self._brancher = brancher
        self._needs_budget = first_wave == 1 < size
        self._size = size
        self._enqueue = enqueue
        self._copies = copies
        self.first: Sequence[int] = range(first_wave)
        self._groups = {trace.task.key: _Group(trace=trace) for trace in traces}
        for group in self._groups.values():
            group.begin(first_wave, round_number=0)

    def should_fork(self, state: EpisodeState, *, is_known: bool) -> bool:
        """Store the point unless an earlier attempt did. Returns whether a fork could be granted there."""
        if self._brancher is None or is_known:
            return False
        group = self._groups[state.task.key]
        position = (group.offsets[state.rollout] + state.turn, state.rollout)
        point = _make_point(self._brancher, state, position)
        # An earlier attempt has passed this point, and its decision stands.
        if point is None or position[0] < group.next_rounds[state.rollout]:
            return False
        insort(group.points, point)
        return point in self._grantable(group)

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """Store the fork of the point and make all decisions that are possible now."""
        if self._brancher is None:
            return
        group = self._groups[state.task.key]
        number = group.offsets[state.rollout] + state.turn
        if fork is not None:
            self._copies.add(fork)
            next(point for point in group.points if point.position == (number, state.rollout)).fork = fork
        # Never decrease, even for a retry: later points were decided because no earlier one could appear.
        group.next_rounds[state.rollout] = max(group.next_rounds[state.rollout], number + 1)
        group.num_rounds = max(group.num_rounds, number + 1)
        self._decide(self._brancher, group)

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """Make the decisions that waited for this rollout, then enqueue new rollouts at the prompt: the next
        wave, or those that complete the group.
        """
        if self._brancher is None:
            return
        group = self._groups[trace.task.key]
        group.num_finished += 1
        del group.next_rounds[rollout]
        fork = group.active_forks.pop(rollout, None)
        # Compare by identity. Several rollouts may use this fork; the last one to end closes its copy.
        if fork is not None and all(fork is not other for other in group.active_forks.values()):
            self._copies.drop(fork)
        self._decide(self._brancher, group)
        num_fresh = self._num_fresh(self._brancher, group)
        for number in group.begin(num_fresh, round_number=group.num_rounds + 1):
            self._enqueue(trace, number, None)

    def _num_fresh(self, brancher: Hook, group: _Group) -> int:
        # Unfinished rollouts may still request forks, which have priority over new rollouts.
        if group.num_finished < group.num_started:
            return 0
        num_left = self._size - group.num_started
        if self._needs_budget and group.num_finished == 1:
            wave = brancher.budget(group.trace)
            if wave is not None:
                # the probe never forks, so at least one more rollout starts at the prompt
                return min(max(1, wave - 1), num_left)
        return num_left

    def _decide(self, brancher: Hook, group: _Group) -> None:
        """Decide all points that no earlier point can precede, and close copies that no rollout can use."""
        while group.points and group.is_decidable(group.points[0]):
            point = group.points.pop(0)
            num_requested = point.max_forks
            if point.state is not None:
                num_requested = brancher.num_forks(replace(point.state, branch_streak=group.streak)) or 0
                group.streak = group.streak + 1 if num_requested else 0
            self._grant(group, point, num_requested)
        grantable = self._grantable(group)
        for point in group.points:
            if point.fork is not None and point not in grantable:
                self._copies.drop(point.fork)
                point.fork = None

    def _grant(self, group: _Group, point: _Point, num_requested: int) -> None:
        granted = min(num_requested, self._size - group.num_started)
        if num_requested:
            point.turn_node.metadata |= {"num_forks": granted, "num_forks_wanted": num_requested}
        fork = point.fork
        if fork is None:
            if granted:
                raise AssertionError("a fork was granted at a point whose fork was dropped")
            return
        if not granted:
            self._copies.drop(fork)
            return
        point.turn_node.metadata["is_replayed"] = fork.environment is None
        for number in group.begin(granted, round_number=point.position[0] + 1, turn=fork.state.turn):
            group.active_forks[number] = fork
            self._enqueue(group.trace, number, fork)

    def _grantable(self, group: _Group) -> list[_Point]:
        """Return the points at which a fork may still be granted.

        At the others, earlier points with exact numbers already use up the remaining rollouts of the group.
        """
        points = []
        num_left = self._size - group.num_started
        for point in group.points:
            if point.max_forks and num_left > 0:
                points.append(point)
            num_left -= point.max_forks if point.state is None else 0
        return points


def _make_point(brancher: Hook, state: EpisodeState, position: _Position) -> _Point | None:
    """Create the point that the hook requests for this turn, if any.

    The streak of a group is not known yet. The hook is called with a streak of 0, which yields the upper
    bound because the number must not increase with the streak.
    """
    snapshot = None
    if brancher.streak_scope != "lineage":
        snapshot = state.snapshot()  # the rollout continues while its point is undecided
        snapshot.branch_streak = 0
    num_requested = brancher.num_forks(snapshot or state)
    if num_requested is None:
        return None
    if snapshot is None:
        state.branch_streak = state.branch_streak + 1 if num_requested else 0
    return _Point(position=position, max_forks=num_requested, turn_node=state.last_node, state=snapshot)


# Trees that grow in rounds (Tree-GRPO, arXiv 2509.21240): a complete chain first, then expansions that branch
# off before any turn of the chain or of earlier expansions. Unlike the decisions above, which are made during
# an episode, a round is drawn after all rollouts of its tree have ended. Forks of all turns are stored until
# then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion(StatelessHook):
    """The shape of a group of trees, as a hook that the scheduler reads. Symbols as in Tree-GRPO.

    Rollouts are numbered tree by tree, the chain first.

    Attributes:
        num_trees: M, trees per group.
        num_expansions: N, expansions per round.
        num_rounds: L, rounds.
        num_trained_leaves: K, leaves of a tree that are trained on, out of 1 + N L.
    """

    num_trees: int
    num_expansions: int
    num_rounds: int
    num_trained_leaves: int

    @property
    def tree_size(self) -> int:
        """Number of leaves of a tree before pruning."""
        return 1 + self.num_expansions * self.num_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpansionPoint:
    """A fork before a turn; ``turn_node`` is the node of that turn."""

    fork: Fork
    turn_node: Node


class ExpansionScheduler:
    """Group scheduler of :class:`Expansion`. Draws depend only on the trees, not on timing."""

    def __init__(
        self, expansion: Expansion, *, run_seed: int, training_step: int, enqueue: Enqueue, copies: Copies
    ) -> None:
        """Store every point of a tree in ``copies`` until the tree is complete."""
        self._expansion = expansion
        self._enqueue = enqueue
        self._copies = copies
        self._key = (run_seed, training_step)
        self._points: dict[tuple[str, int], dict[int, _ExpansionPoint]] = {}
        self._num_finished: Counter[tuple[str, int]] = Counter()
        self.first: Sequence[int] = [tree * expansion.tree_size for tree in range(expansion.num_trees)]

    def should_fork(self, state: EpisodeState, *, is_known: bool) -> bool:
        """Request a fork before every turn but the first, which equals a new rollout from the prompt."""
        return not is_known and state.turn > 0

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """Store the fork before the turn. The points of a retry replace those of the failed attempt."""
        if fork is None:
            return
        points = self._points.setdefault((state.task.key, state.rollout), {})
        self._drop_points(points, [turn for turn in points if turn >= state.turn])
        points[state.turn] = _ExpansionPoint(fork=fork, turn_node=state.last_node)
        self._copies.add(fork)

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """Enqueue the next round of expansions if all rollouts of the tree so far have ended."""
        shape, key = self._expansion, trace.task.key
        tree = rollout // shape.tree_size
        self._drop_failed_points(trace, rollout)
        self._num_finished[key, tree] += 1
        num_finished = self._num_finished[key, tree]
        if num_finished == shape.tree_size:
            trace.pruned |= self._pruned(key, tree)
            for number in range(tree * shape.tree_size, (tree + 1) * shape.tree_size):
                points = self._points.pop((key, number), {})
                self._drop_points(points, list(points))
            return
        # The chain, then N rollouts per round. If `inside` is 0, all rollouts that were drawn so far have
        # ended.
        number, inside = divmod(num_finished - 1, shape.num_expansions)
        for expansion, fork in self._expand(key, tree, number) if inside == 0 else ():
            self._enqueue(trace, expansion, fork)

    def _drop_points(self, points: dict[int, _ExpansionPoint], turns: Sequence[int]) -> None:
        for turn in turns:
            self._copies.drop(points.pop(turn).fork)

    def _drop_failed_points(self, trace: Trace, rollout: int) -> None:
        """Drop points of failed attempts that the retry did not pass: no rollout contains their turns."""
        points = self._points.get((trace.task.key, rollout), {})
        leaf = trace.leaves[rollout].node_id
        own = set() if leaf is None else {node.node_id for node in trace.path(leaf)}
        self._drop_points(
            points, [turn for turn, point in points.items() if point.turn_node.node_id not in own]
        )

    def _expand(self, key: str, tree: int, number: int) -> list[tuple[int, Fork | None]]:
        """Draw round ``number``: N nodes, uniformly with replacement.

        Candidates are the root and all turns that another turn follows. Returns rollout numbers and forks
        (None: the root).
        """
        size = self._expansion.tree_size
        rollouts = range(tree * size, (tree + 1) * size)
        # Order by rollout and turn, not by arrival, so that a draw selects the same point in every run.
        points = [
            point for rollout in rollouts for _, point in sorted(self._points.get((key, rollout), {}).items())
        ]
        draws = self._stream("tree", key, tree, number).integers(
            1 + len(points), size=self._expansion.num_expansions
        )
        first = tree * size + 1 + number * self._expansion.num_expansions
        return [
            (first + i, None if draw == 0 else _mark_fork(points[draw - 1]))
            for i, draw in enumerate(int(value) for value in draws)
        ]

    def _pruned(self, key: str, tree: int) -> frozenset[int]:
        shape = self._expansion
        order = self._stream("tree leaves", key, tree).permutation(shape.tree_size)
        return frozenset(tree * shape.tree_size + int(leaf) for leaf in order[shape.num_trained_leaves :])

    def _stream(self, purpose: str, key: str, *numbers: int) -> np.random.Generator:
        run_seed, training_step = self._key
        return stream(run_seed, purpose, training_step, key, *numbers)


def _mark_fork(point: _ExpansionPoint) -> Fork:
    """Record the fork in the metadata of its turn, for the report, and return it."""
    metadata = point.turn_node.metadata
    num_forks = metadata.get("num_forks", 0) + 1
    metadata |= {
        "num_forks": num_forks,
        "num_forks_wanted": num_forks,
        "is_replayed": point.fork.environment is None,
    }
    return point.fork


deprecated.keep_old_names(__name__)
