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

from outrider.rollout.branch import Brancher, Copies, Fork, Owe
from outrider.rollout.hooks import EpisodeState
from outrider.trace import Node, Trace

_At = tuple[int, int]  # round and rollout: the order of decisions


@dataclass(slots=True, kw_only=True, order=True)
class _Point:
    """In front of a turn that was ``written``, undecided.

    ``most`` rollouts should leave here, exactly so many without a ``state``: that is what the hook is asked
    with again once the group's streak is known. ``fork`` is there as long as it may be granted.
    """

    at: _At
    most: int = field(compare=False)
    written: Node = field(compare=False)
    state: EpisodeState | None = field(default=None, compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class _Group:
    """``ahead`` maps every rollout that has not ended to the first round in which it may still come to a
    point.

    ``offsets`` are the rounds of all rollouts minus their turns; ``left_at`` says where forks that have not
    ended began.
    """

    trace: Trace
    num_begun: int = 0
    num_ended: int = 0
    num_rounds: int = 0
    streak: int = 0
    ahead: dict[int, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    points: list[_Point] = field(default_factory=list)
    left_at: dict[int, Fork] = field(default_factory=dict)

    def begin(self, num: int, *, in_round: int, turn: int = 0) -> range:
        """The next ``num`` numbers, for rollouts that write ``turn`` in that round."""
        numbers = range(self.num_begun, self.num_begun + num)
        self.num_begun += num
        self.num_rounds = max(self.num_rounds, in_round)
        self.ahead |= dict.fromkeys(numbers, in_round)
        self.offsets |= dict.fromkeys(numbers, in_round - turn)
        return numbers

    def is_decidable(self, point: _Point) -> bool:
        """Whether no rollout can still come to a point before this one."""
        return all(point.at < (number, rollout) for rollout, number in self.ahead.items())


class GroupBook:
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
        owe: Owe,
        copies: Copies,
    ) -> None:
        first_wave = size if brancher is None else min(brancher.first_wave, size)
        self._brancher = brancher
        self._asks_budget = first_wave == 1 < size
        self._size = size
        self._owe = owe
        self._copies = copies
        self.first: Sequence[int] = range(first_wave)
        self._groups = {trace.task.key: _Group(trace=trace) for trace in traces}
        for group in self._groups.values():
            group.begin(first_wave, in_round=0)

    def arrived(self, state: EpisodeState, *, is_known: bool) -> bool:
        """Note the point, unless an earlier try did; whether a fork could be granted there."""
        if self._brancher is None or is_known:
            return False
        group = self._groups[state.task.key]
        at = (group.offsets[state.rollout] + state.turn, state.rollout)
        point = _asked(self._brancher, state, at)
        # An earlier try has come by here: its point is the one that counts.
        if point is None or at[0] < group.ahead[state.rollout]:
            return False
        insort(group.points, point)
        return point in self._grantable(group)

    def passed(self, state: EpisodeState, fork: Fork | None) -> None:
        """The rollout goes on, and so may the decisions."""
        if self._brancher is None:
            return
        group = self._groups[state.task.key]
        number = group.offsets[state.rollout] + state.turn
        if fork is not None:
            self._copies.keep(fork)
            next(point for point in group.points if point.at == (number, state.rollout)).fork = fork
        # Never back, also for a retry: points were decided because nothing could come before them any more.
        group.ahead[state.rollout] = max(group.ahead[state.rollout], number + 1)
        group.num_rounds = max(group.num_rounds, number + 1)
        self._settle(self._brancher, group)

    def ended(self, trace: Trace, rollout: int) -> None:
        """Decide what waited for this rollout; then fresh ones, for a wave that waited for it or to fill the
        group up.
        """
        if self._brancher is None:
            return
        group = self._groups[trace.task.key]
        group.num_ended += 1
        del group.ahead[rollout]
        fork = group.left_at.pop(rollout, None)
        # By identity: several rollouts may have left at this fork, and the last of them closes its copy.
        if fork is not None and all(fork is not other for other in group.left_at.values()):
            self._copies.drop(fork)
        self._settle(self._brancher, group)
        num_following = self._num_following(self._brancher, group)
        for number in group.begin(num_following, in_round=group.num_rounds + 1):
            self._owe(trace, number, None)

    def _num_following(self, brancher: Brancher, group: _Group) -> int:
        # Whoever still plays may want forks, and they come before fresh rollouts.
        if group.num_ended < group.num_begun:
            return 0
        num_left = self._size - group.num_begun
        if self._asks_budget and group.num_ended == 1:
            wave = brancher.budget(group.trace)
            if wave is not None and wave > 1:
                return min(wave - 1, num_left)
        return num_left

    def _settle(self, brancher: Brancher, group: _Group) -> None:
        """Decide all points that nothing can come before; let go of the copies that no place is left for."""
        while group.points and group.is_decidable(group.points[0]):
            point = group.points.pop(0)
            wanted = point.most
            if point.state is not None:
                wanted = brancher.num_forks(replace(point.state, branch_streak=group.streak)) or 0
                group.streak = group.streak + 1 if wanted else 0
            self._grant(group, point, wanted)
        grantable = self._grantable(group)
        for point in group.points:
            if point.fork is not None and point not in grantable:
                self._copies.drop(point.fork)
                point.fork = None

    def _grant(self, group: _Group, point: _Point, wanted: int) -> None:
        granted = min(wanted, self._size - group.num_begun)
        if wanted:
            point.written.metadata |= {"num_forks": granted, "num_forks_wanted": wanted}
        fork = point.fork
        if fork is None:
            if granted:
                raise AssertionError("a fork was granted at a point that was not kept")
            return
        if not granted:
            self._copies.drop(fork)
            return
        point.written.metadata["is_replayed"] = fork.environment is None
        for number in group.begin(granted, in_round=point.at[0] + 1, turn=fork.turn):
            group.left_at[number] = fork
            self._owe(group.trace, number, fork)

    def _grantable(self, group: _Group) -> list[_Point]:
        """Points at which a fork may still be granted: those in front of them do not surely take every
        place.
        """
        found = []
        num_left = self._size - group.num_begun
        for point in group.points:
            if point.most and num_left > 0:
                found.append(point)
            num_left -= point.most if point.state is None else 0
        return found


def _asked(brancher: Brancher, state: EpisodeState, at: _At) -> _Point | None:
    """The hook's wish here. A streak of the group is not known yet: the hook wants most without one."""
    if brancher.streak_scope == "lineage":
        wanted = brancher.num_forks(state)
        if wanted is not None:
            state.branch_streak = state.branch_streak + 1 if wanted else 0
        return None if wanted is None else _Point(at=at, most=wanted, written=state.last_node)
    # Lists are copied: the rollout goes on while its point waits for a decision.
    as_now = replace(
        state,
        branch_streak=0,
        steps=list(state.steps),
        actions=list(state.actions),
        results=list(state.results),
    )
    wanted = brancher.num_forks(as_now)
    return None if wanted is None else _Point(at=at, most=wanted, written=state.last_node, state=as_now)
