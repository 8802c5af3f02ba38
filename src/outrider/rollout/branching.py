"""Rollouts that leave another one in mid-episode: where they begin, how their environment gets there, and how
many may.

A fork shares the parent's nodes; the engine shares the keys and values of its context; nothing of it is
computed again.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    """A snapshot of a running rollout before a policy turn. ``environment`` is a copy that nobody plays;
    None: the steps of ``state.episode`` are replayed in a fresh one.
    """

    state: EpisodeState
    environment: CopyableEnvironment | None


async def make_fork(state: EpisodeState, last_node: Node, *, timeout_s: float) -> Fork:
    """The rollout as it is in front of the turn that it has just written. A copy that fails is replaced by
    replaying.
    """
    environment = state.episode.environment
    copy = None
    if isinstance(environment, CopyableEnvironment):
        with suppress(ToolFault, EnvironmentFault):
            copy = await run_guarded(environment.copy, timeout_s=timeout_s)
    snapshot = state.snapshot()
    snapshot.last_node, snapshot.is_forked = last_node, True
    # Without the turn that was just written: the fork writes one of its own.
    snapshot.num_response_tokens -= len(state.last_node.token_ids)
    return Fork(state=snapshot, environment=copy)


async def fork_environment(
    fork: Fork | None, factory: EnvironmentFactory, trace: Trace, *, timeout_s: float
) -> Env:
    """An environment for one try: a copy of the fork's, or a fresh one."""
    if fork is not None and fork.environment is not None:
        # A copy of the copy: other forks and retries begin from the same one.
        return await run_guarded(fork.environment.copy, timeout_s=timeout_s)
    return await run_guarded(factory, trace.task, timeout_s=timeout_s)


class Copies:
    """Environments that forks begin from. Each is closed once no rollout can begin there any more."""

    def __init__(self, close: Callable[[CopyableEnvironment], object]) -> None:
        self._close = close
        # By identity: a fork holds nodes, which cannot be hashed.
        self._open: dict[int, Fork] = {}

    def add(self, fork: Fork) -> None:
        """A fork was taken, maybe with a copy."""
        if fork.environment is not None:
            self._open[id(fork)] = fork

    def drop(self, fork: Fork) -> None:
        """Nobody will begin at this fork any more."""
        if self._open.pop(id(fork), None) is not None and fork.environment is not None:
            self._close(fork.environment)

    @property
    def open(self) -> list[CopyableEnvironment]:
        """Those that are still kept, for the end of a run that broke."""
        return [fork.environment for fork in self._open.values() if fork.environment is not None]


class GroupScheduler(Protocol):
    """Who begins when in the groups of one run, and from where; it is told of every turn that was written.

    ``first`` rollouts of every group begin at its prompt.
    """

    first: Sequence[int]

    def on_turn_start(self, state: EpisodeState, *, is_known: bool) -> bool:
        """The policy has written a turn; whether a fork in front of it should be taken.

        ``is_known``: this rollout left another one here, which has come by already.
        """
        ...

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """The same turn, now with the fork if one was asked for; the environment acts next."""
        ...

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """A rollout has its outcome."""
        ...


# to be played: group, number, where it begins (None: the prompt)
Enqueue = Callable[[Trace, int, Fork | None], None]


# Who begins when in a group whose rollouts fork, decided in an order that nobody's speed can change.
#
# A rollout's turns have *rounds*, as if all rollouts of its group were played in lock step: those from the
# prompt begin in round 0, and a fork in the round behind that of the turn in front of which it leaves, as in
# the released loop. Points are decided in the order of round and rollout, each as soon as nothing can come
# before it any more. No rollout waits for a decision, because it would hold its place: it goes on, its point
# is kept, and a fork that is granted later begins later. So the tree is the same with one place as with a
# hundred.


_Position = tuple[int, int]  # round and rollout: the order of decisions


@dataclass(slots=True, kw_only=True, order=True)
class _Point:
    """In front of a turn that was ``turn_node``, undecided.

    ``max_forks`` rollouts should leave here, exactly so many without a ``state``: that is what the hook is
    asked with again once the group's streak is known. ``fork`` is there as long as it may be granted.
    """

    position: _Position
    max_forks: int = field(compare=False)
    turn_node: Node = field(compare=False)
    state: EpisodeState | None = field(default=None, compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class _Group:
    """``next_rounds`` maps every rollout that has not ended to the first round in which it may still come to
    a point.

    ``offsets`` are the rounds of all rollouts minus their turns; ``active_forks`` says where forks that have
    not ended began.
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
        """The next ``num`` numbers, for rollouts that write ``turn`` in that round."""
        numbers = range(self.num_started, self.num_started + num)
        self.num_started += num
        self.num_rounds = max(self.num_rounds, round_number)
        self.next_rounds |= dict.fromkeys(numbers, round_number)
        self.offsets |= dict.fromkeys(numbers, round_number - turn)
        return numbers

    def is_decidable(self, point: _Point) -> bool:
        """Whether no rollout can still come to a point before this one."""
        return all(point.position < (number, rollout) for rollout, number in self.next_rounds.items())


class BranchingGroupScheduler:
    """How many rollouts of every group have begun and ended, and the points at which others may leave them.

    A fault that starts a rollout again takes no decision back and makes none twice: a point is that of the
    try that came there first. A copy is kept only where a fork can still be granted: at most one for every
    place that a group has left, unless streaks are the group's (``streak_scope`` prompt): there every earlier
    point may yet turn out to want none.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        *,
        size: int,
        brancher: Hook | None,
        enqueue: Enqueue,
        copies: Copies,
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

    def on_turn_start(self, state: EpisodeState, *, is_known: bool) -> bool:
        """Note the point, unless an earlier try did; whether a fork could be granted there."""
        if self._brancher is None or is_known:
            return False
        group = self._groups[state.task.key]
        position = (group.offsets[state.rollout] + state.turn, state.rollout)
        point = _make_point(self._brancher, state, position)
        # An earlier try has come by here: its point is the one that counts.
        if point is None or position[0] < group.next_rounds[state.rollout]:
            return False
        insort(group.points, point)
        return point in self._grantable(group)

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """The rollout goes on, and so may the decisions."""
        if self._brancher is None:
            return
        group = self._groups[state.task.key]
        number = group.offsets[state.rollout] + state.turn
        if fork is not None:
            self._copies.add(fork)
            next(point for point in group.points if point.position == (number, state.rollout)).fork = fork
        # Never back, also for a retry: points were decided because nothing could come before them any more.
        group.next_rounds[state.rollout] = max(group.next_rounds[state.rollout], number + 1)
        group.num_rounds = max(group.num_rounds, number + 1)
        self._decide(self._brancher, group)

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """Decide what waited for this rollout; then fresh ones, for a wave that waited for it or to fill the
        group up.
        """
        if self._brancher is None:
            return
        group = self._groups[trace.task.key]
        group.num_finished += 1
        del group.next_rounds[rollout]
        fork = group.active_forks.pop(rollout, None)
        # By identity: several rollouts may have left at this fork, and the last of them closes its copy.
        if fork is not None and all(fork is not other for other in group.active_forks.values()):
            self._copies.drop(fork)
        self._decide(self._brancher, group)
        num_fresh = self._num_fresh(self._brancher, group)
        for number in group.begin(num_fresh, round_number=group.num_rounds + 1):
            self._enqueue(trace, number, None)

    def _num_fresh(self, brancher: Hook, group: _Group) -> int:
        # Whoever still plays may want forks, and they come before fresh rollouts.
        if group.num_finished < group.num_started:
            return 0
        num_left = self._size - group.num_started
        if self._needs_budget and group.num_finished == 1:
            wave = brancher.budget(group.trace)
            if wave is not None and wave > 1:
                return min(wave - 1, num_left)
        return num_left

    def _decide(self, brancher: Hook, group: _Group) -> None:
        """Decide all points that nothing can come before; let go of the copies that no place is left for."""
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
                raise AssertionError("a fork was granted at a point that was not kept")
            return
        if not granted:
            self._copies.drop(fork)
            return
        point.turn_node.metadata["is_replayed"] = fork.environment is None
        for number in group.begin(granted, round_number=point.position[0] + 1, turn=fork.state.turn):
            group.active_forks[number] = fork
            self._enqueue(group.trace, number, fork)

    def _grantable(self, group: _Group) -> list[_Point]:
        """Points at which a fork may still be granted: those in front of them do not surely take every
        place.
        """
        points = []
        num_left = self._size - group.num_started
        for point in group.points:
            if point.max_forks and num_left > 0:
                points.append(point)
            num_left -= point.max_forks if point.state is None else 0
        return points


def _make_point(brancher: Hook, state: EpisodeState, position: _Position) -> _Point | None:
    """The hook's wish here. A streak of the group is not known yet: the hook wants most without one."""
    if brancher.streak_scope == "lineage":
        num_requested = brancher.num_forks(state)
        if num_requested is not None:
            state.branch_streak = state.branch_streak + 1 if num_requested else 0
        return (
            None
            if num_requested is None
            else _Point(position=position, max_forks=num_requested, turn_node=state.last_node)
        )
    snapshot = state.snapshot()  # the rollout goes on while its point waits for a decision
    snapshot.branch_streak = 0
    num_requested = brancher.num_forks(snapshot)
    return (
        None
        if num_requested is None
        else _Point(position=position, max_forks=num_requested, turn_node=state.last_node, state=snapshot)
    )


# Trees that grow in rounds: a finished chain first, then expansions that leave it, or one another, in front
# of any turn.
#
# Where :mod:`outrider.rollout.branching` decides in the middle of an episode, a round is drawn once all
# rollouts of its tree have ended (Tree-GRPO, arXiv 2509.21240). The points that they passed are kept until
# then, as the same forks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion(StatelessHook):
    """The shape of a group, as a hook that says it to the scheduler: ``num_trees`` M, ``num_expansions`` N in
    each of ``num_rounds`` L.

    ``num_trained_leaves`` K of the 1 + N L leaves of a tree are trained on. Rollouts are numbered tree by
    tree, the chain first.
    """

    num_trees: int
    num_expansions: int
    num_rounds: int
    num_trained_leaves: int

    @property
    def tree_size(self) -> int:
        """Leaves of a tree before pruning."""
        return 1 + self.num_expansions * self.num_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpansionPoint:
    """In front of ``turn`` of a rollout; ``turn_node`` is the node of that turn."""

    fork: Fork
    turn_node: Node


class ExpansionScheduler:
    """Counts what has begun and ended in every tree, and keeps the points for expansions. Draws depend on the
    trees alone, not on who was fast.
    """

    def __init__(
        self, expansion: Expansion, *, run_seed: int, training_step: int, enqueue: Enqueue, copies: Copies
    ) -> None:
        """Every point of a tree is kept in ``copies`` until the tree is whole."""
        self._expansion = expansion
        self._enqueue = enqueue
        self._copies = copies
        self._key = (run_seed, training_step)
        self._points: dict[tuple[str, int], dict[int, _ExpansionPoint]] = {}
        self._num_finished: Counter[tuple[str, int]] = Counter()
        self.first: Sequence[int] = [tree * expansion.tree_size for tree in range(expansion.num_trees)]

    def on_turn_start(self, state: EpisodeState, *, is_known: bool) -> bool:
        """A later round may leave anywhere but in front of the first turn, where a fresh rollout does the
        same.
        """
        return not is_known and state.turn > 0

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """A rollout has written a turn, and ``fork`` is the point in front of it. A retry comes by again: its
        own points count.
        """
        if fork is None:
            return
        points = self._points.setdefault((state.task.key, state.rollout), {})
        self._drop_points(points, [turn for turn in points if turn >= state.turn])
        points[state.turn] = _ExpansionPoint(fork=fork, turn_node=state.last_node)
        self._copies.add(fork)

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """A rollout has its outcome: the expansions that are owed now begin at the prompt or at a fork."""
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
        # The chain, then N rollouts per round: 0 inside means that all that were drawn so far have ended.
        number, inside = divmod(num_finished - 1, shape.num_expansions)
        for expansion, fork in self._expand(key, tree, number) if inside == 0 else ():
            self._enqueue(trace, expansion, fork)

    def _drop_points(self, points: dict[int, _ExpansionPoint], turns: Sequence[int]) -> None:
        for turn in turns:
            self._copies.drop(points.pop(turn).fork)

    def _drop_failed_points(self, trace: Trace, rollout: int) -> None:
        """Forget the points of a try that failed, which the retry need not have passed: their turns are in no
        rollout.
        """
        points = self._points.get((trace.task.key, rollout), {})
        leaf = trace.leaves[rollout].node_id
        own = set() if leaf is None else {node.node_id for node in trace.path(leaf)}
        self._drop_points(
            points, [turn for turn, point in points.items() if point.turn_node.node_id not in own]
        )

    def _expand(self, key: str, tree: int, number: int) -> list[tuple[int, Fork | None]]:
        """Round ``number``: N nodes, uniformly and with replacement, among the root and the turns that
        another turn follows.
        """
        size = self._expansion.tree_size
        rollouts = range(tree * size, (tree + 1) * size)
        # By rollout and turn, not by arrival: a draw has to mean the same point in every run.
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
    """The fork, with what the report shows on the turn in front of which it leaves."""
    metadata = point.turn_node.metadata
    num_forks = metadata.get("num_forks", 0) + 1
    metadata |= {
        "num_forks": num_forks,
        "num_forks_wanted": num_forks,
        "is_replayed": point.fork.environment is None,
    }
    return point.fork


deprecated.keep_old_names(__name__)
