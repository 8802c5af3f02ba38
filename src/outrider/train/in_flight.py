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
from outrider.train.data.task_sampling import SampledStep, plan_step
from outrider.train.state.flight_queue import GroupResult, PendingStep, QueueSnapshot
from outrider.train.state.queue import QueuedStep

GroupName = tuple[int, int]  # step, and number in it


class GroupPlayer(Protocol):
    """Whoever plays the groups that are begun, several at a time."""

    def begin(self, step: PendingStep, groups: Sequence[int], *, is_again: bool) -> None:
        """Begin these groups of a step, from what hooks know now; returns at once. ``is_again``: they had
        begun, and are lost.
        """
        ...

    def poll(self, *, waits: bool) -> Mapping[GroupName, GroupResult]:
        """What has come to an end since the last call; ``waits``: for a moment, where that is nothing. Raises
        ClusterFault.
        """
        ...

    def cancel(self) -> None:
        """Nobody wants what is under way: it ends soon, and nothing of it comes back."""
        ...


class AsyncRolloutQueue:
    """The steps that have begun and are not trained on. Its methods are called by the thread that trains."""

    def __init__(
        self,
        parts: Components,
        player: GroupPlayer,
        *,
        step: int,
        cursor: int,
        snapshot: QueueSnapshot | None,
    ) -> None:
        """``step`` is the next one to train on, ``cursor`` where its tasks begin; ``snapshot`` comes of a
        checkpoint: of its steps, groups that had not ended begin anew. Raises ConfigError for hooks that
        branch.
        """
        hooks = parts.algorithm.hooks
        if any(isinstance(hook, Brancher | Expansion) for hook in hooks):
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
        """Begin the groups of all steps up to ``last``; those that have begun go on."""
        while self._next <= last:
            pending = self._steps[self._next] = self._plan(self._next)
            self._next, self._cursor = self._next + 1, pending.cursor
            self._player.begin(pending, range(len(pending.tasks)), is_again=False)

    def _plan(self, step: int) -> PendingStep:
        order, cursor, choice = plan_step(self._parts, step=step, cursor=self._cursor)
        if choice.groups is not None:
            raise ConfigError("cluster.in_flight goes without an algorithm that leaves groups out of a step")
        if choice.tasks is not None:
            tasks = list(choice.tasks)
        else:
            tasks, cursor = order.draw(choice.num_groups, cursor=cursor)
        modes = [tuple(self._parts.algorithm.modes_of(step, group)) for group in range(len(tasks))]
        return PendingStep(step=step, tasks=tasks, modes=modes, cursor=cursor)

    def collect(self, step: int, *, on_tick: Callable[[str], None]) -> QueuedStep:
        """Wait for all groups of a step that has begun, and take in what came of them, group by group.
        ``on_tick`` is told how many have ended, again and again. Raises what the player raises.
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
            trained=traces,
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
        """What came of the groups that have ended, in their order."""
        hooks: Sequence[Hook] = self._parts.algorithm.hooks
        portable_hooks = [hook for hook in hooks if isinstance(hook, Portable)]
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
        """The metrics of a step are on record: what hooks count from here on is the next one's."""
        self._counts = self._parts.algorithm.counts()

    def cancel(self) -> None:
        """Nobody wants the steps that have begun."""
        if self._steps:
            self._player.cancel()

    def snapshot(self) -> QueueSnapshot:
        """What a checkpoint holds: groups that have ended. They are taken in, so that the memories beside
        them in the checkpoint know of them.
        """
        self._poll(waits=False)
        steps = [self._steps[number] for number in sorted(self._steps)]
        for pending in steps:
            self._absorb(pending)
        return QueueSnapshot(steps=steps, counts=self._counts)
