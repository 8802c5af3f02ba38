"""Groups of several steps under way at once (``cluster.in_flight``), taken in the order of their tasks.

Update u begins with weights of version u. A group of update u is begun once version u - k is out (k =
``cluster.max_staleness``), and the engines never go back, so none of its tokens is older than k versions when
it is trained on; nothing is thrown away for its age. Which version a turn meets depends on who is fast:
the same seed does not give the same bits.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.errors import ConfigError
from outrider.rollout.branch import Brancher
from outrider.rollout.hooks import Hook, Portable
from outrider.rollout.loop_lag import largest
from outrider.rollout.tree_growth import Expansion
from outrider.train.components import Components
from outrider.train.data.task_sampling import SampledStep, drawn_from
from outrider.train.state.flight_queue import Kept, OpenStep, PlayedGroup
from outrider.train.state.queue import Played

GroupName = tuple[int, int]  # step, and number in it


class GroupPlayer(Protocol):
    """Whoever plays the groups that are begun, several at a time."""

    def begin(self, step: OpenStep, groups: Sequence[int], *, is_again: bool) -> None:
        """Begin these groups of a step, from what hooks know now; returns at once. ``is_again``: they had
        begun, and are lost.
        """
        ...

    def ended(self, *, waits: bool) -> Mapping[GroupName, PlayedGroup]:
        """What has come to an end since the last call; ``waits``: for a moment, where that is nothing. Raises
        ClusterFault.
        """
        ...

    def give_up(self) -> None:
        """Nobody wants what is under way: it ends soon, and nothing of it comes back."""
        ...


class Flight:
    """The steps that have begun and are not trained on. Its methods are called by the thread that trains."""

    def __init__(
        self, parts: Components, player: GroupPlayer, *, step: int, cursor: int, kept: Kept | None
    ) -> None:
        """``step`` is the next one to train on, ``cursor`` where its tasks begin; ``kept`` comes of a
        checkpoint: of its steps, groups that had not ended begin anew. Raises ConfigError for hooks that
        branch.
        """
        hooks = parts.algorithm.hooks
        if any(isinstance(hook, Brancher | Expansion) for hook in hooks):
            raise ConfigError("cluster.in_flight goes without rollouts that branch")
        self._parts, self._player = parts, player
        self._counts = parts.algorithm.counts() if kept is None else kept.counts
        self._steps = {} if kept is None else {one.step: one for one in kept.steps}
        self._next = max(self._steps, default=step - 1) + 1
        self._cursor = self._steps[self._next - 1].cursor if self._steps else cursor
        self.num_begun_anew = 0
        for one in self._steps.values():
            missing = [group for group in range(len(one.tasks)) if group not in one.ended]
            self.num_begun_anew += len(missing)
            player.begin(one, missing, is_again=True)

    def begin(self, last: int) -> None:
        """Begin the groups of all steps up to ``last``; those that have begun go on."""
        while self._next <= last:
            one = self._steps[self._next] = self._drawn(self._next)
            self._next, self._cursor = self._next + 1, one.cursor
            self._player.begin(one, range(len(one.tasks)), is_again=False)

    def _drawn(self, step: int) -> OpenStep:
        order, cursor, choice = drawn_from(self._parts, step=step, cursor=self._cursor)
        if choice.groups is not None:
            raise ConfigError("cluster.in_flight goes without an algorithm that leaves groups out of a step")
        if choice.tasks is not None:
            tasks = list(choice.tasks)
        else:
            tasks, cursor = order.take(choice.num_groups, cursor=cursor)
        modes = [tuple(self._parts.algorithm.modes_of(step, group)) for group in range(len(tasks))]
        return OpenStep(step=step, tasks=tasks, modes=modes, cursor=cursor)

    def collect(self, step: int, *, on_tick: Callable[[str], None]) -> Played:
        """Wait for all groups of a step that has begun, and take in what came of them, group by group.
        ``on_tick`` is told how many have ended, again and again. Raises what the player raises.
        """
        one = self._steps[step]
        while len(one.ended) < len(one.tasks):
            on_tick(f"{len(one.ended)}/{len(one.tasks)} groups")
            self._take_note(waits=True)
        self._take_in(one)
        del self._steps[step]
        groups = [one.ended[number] for number in range(len(one.tasks))]
        traces = [trace for group in groups for trace in group.report.traces]
        sampled = SampledStep(
            is_filtered=False,
            traces=traces,
            trained=traces,
            faults=sum((group.report.faults for group in groups), Counter()),
            fault_reasons=tuple(reason for group in groups for reason in group.report.fault_reasons),
            num_extra_batches=0,
            cursor=one.cursor,
            loop_lag_s=largest([group.report.loop_lag_s for group in groups]),
        )
        seconds = max((group.seconds for group in groups), default=0.0)
        return Played(sampled=sampled, counts=self._counts, seconds=seconds)

    def _take_note(self, *, waits: bool) -> None:
        for (step, group), played in self._player.ended(waits=waits).items():
            ended = self._steps[step].ended
            if group in ended:
                raise AssertionError(f"group {group} of step {step} has ended twice")
            ended[group] = played

    def _take_in(self, one: OpenStep) -> None:
        """What came of the groups that have ended, in their order."""
        hooks: Sequence[Hook] = self._parts.algorithm.hooks
        copied = [hook for hook in hooks if isinstance(hook, Portable)]
        for _, group in sorted(one.ended.items()):
            if group.gathered is None:
                continue
            for copy, gathered in zip(copied, group.gathered, strict=True):
                copy.absorb(gathered)
            for hook in hooks:
                for trace in group.report.traces:
                    hook.after_group(trace)
            group.gathered = None

    def recorded(self) -> None:
        """The metrics of a step are on record: what hooks count from here on is the next one's."""
        self._counts = self._parts.algorithm.counts()

    def give_up(self) -> None:
        """Nobody wants the steps that have begun."""
        if self._steps:
            self._player.give_up()

    def kept(self) -> Kept:
        """What a checkpoint holds: groups that have ended. They are taken in, so that the memories beside
        them in the checkpoint know of them.
        """
        self._take_note(waits=False)
        steps = [self._steps[number] for number in sorted(self._steps)]
        for one in steps:
            self._take_in(one)
        return Kept(steps=steps, counts=self._counts)
