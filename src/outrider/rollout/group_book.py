"""Who begins when in a group whose rollouts fork, decided in an order that nobody's speed can change.

A rollout's turns have *rounds*, as if all rollouts of its group were played in lock step: those from the
prompt begin in round 0, and a fork in the round behind that of the turn in front of which it leaves, as in
the released loop. Points are decided in the order of round and rollout, each as soon as nothing can come
before it any more. No rollout waits for a decision, because it would hold its place: it goes on, its point is
kept, and a fork that is granted later begins later. So the tree is the same with one place as with a hundred.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.rollout.branch import Brancher, Copies, Enqueue, Fork
from outrider.rollout.hooks import EpisodeState
from outrider.trace import Node, Trace

_Position = tuple[int, int]  # round and rollout: the order of decisions


@dataclass(slots=True, kw_only=True, order=True)
class _Point:
    """In front of a turn that was ``turn_node``, undecided.

    ``max_forks`` rollouts should leave here, exactly so many without a ``state``: that is what the hook is asked
    with again once the group's streak is known. ``fork`` is there as long as it may be granted.
    """

    position: _Position
    max_forks: int = field(compare=False)
    turn_node: Node = field(compare=False)
    state: EpisodeState | None = field(default=None, compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class _Group:
    """``next_rounds`` maps every rollout that has not ended to the first round in which it may still come to a
    point.

    ``offsets`` are the rounds of all rollouts minus their turns; ``active_forks`` says where forks that have not
    ended began.
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
        brancher: Brancher | None,
        enqueue: Enqueue,
        copies: Copies,
    ) -> None:
        first_wave = size if brancher is None else min(brancher.first_wave, size)
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

    def _num_fresh(self, brancher: Brancher, group: _Group) -> int:
        # Whoever still plays may want forks, and they come before fresh rollouts.
        if group.num_finished < group.num_started:
            return 0
        num_left = self._size - group.num_started
        if self._needs_budget and group.num_finished == 1:
            wave = brancher.budget(group.trace)
            if wave is not None and wave > 1:
                return min(wave - 1, num_left)
        return num_left

    def _decide(self, brancher: Brancher, group: _Group) -> None:
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
        for number in group.begin(granted, round_number=point.position[0] + 1, turn=fork.turn):
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


def _make_point(brancher: Brancher, state: EpisodeState, position: _Position) -> _Point | None:
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
    # Lists are copied: the rollout goes on while its point waits for a decision.
    snapshot = replace(
        state,
        branch_streak=0,
        steps=list(state.steps),
        actions=list(state.actions),
        results=list(state.results),
    )
    num_requested = brancher.num_forks(snapshot)
    return (
        None
        if num_requested is None
        else _Point(position=position, max_forks=num_requested, turn_node=state.last_node, state=snapshot)
    )
