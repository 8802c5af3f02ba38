"""Where the rollouts of a training step come from: played when their turn comes, played beside the step
before (:mod:`outrider.train.overlap`), or in flight for several steps (:mod:`outrider.train.in_flight`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.metrics import WRITTEN_TOKENS
from outrider.rollout.scheduler import Rollouts
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.data.task_sampling import SampledStep, play_step
from outrider.train.in_flight import AsyncRolloutQueue
from outrider.train.metrics.step_metrics import rollout_metrics
from outrider.train.state.queue import QueuedStep
from outrider.train.state.run_state import RunState


@dataclass(slots=True, kw_only=True)
class StepSource:
    """``rollouts`` makes what plays a step here and now; ``tick`` is told how far rollouts are that are
    waited for, and may raise, which gives the wait up.
    """

    parts: Components
    state: RunState
    rollouts: Callable[[], Rollouts]
    tick: Callable[[str], None]
    note: Callable[[str], None]
    _async_queue: AsyncRolloutQueue | None = None

    def next(self) -> QueuedStep:
        """The rollouts of the step that comes, once they are there. Raises what playing and ``tick``
        raise.
        """
        if self.parts.settings.cluster.in_flight:
            async_queue = self._async_queue = self._async_queue or self._start_queue()
            async_queue.begin(self._newest)
            return async_queue.collect(self.state.step, on_tick=self.tick)
        return self.state.queued or self._play()

    def _play(self) -> QueuedStep:
        """With nothing beside them."""
        parts, state = self.parts, self.state
        counts = parts.algorithm.counts()
        try:
            sampled = play_step(parts, self.rollouts(), step=state.step, cursor=state.task_cursor)
        except BaseException:
            # the step is given up: it will be played again, to the same bits
            parts.algorithm.restore_counts(counts)
            raise
        return QueuedStep(sampled=sampled, counts=counts, seconds=0.0)

    def _start_queue(self) -> AsyncRolloutQueue:
        assert self.parts.remote is not None  # the settings ask for engines of their own
        state = self.state
        player = self.parts.remote.group_player(self.parts)
        async_queue = AsyncRolloutQueue(
            self.parts, player, step=state.step, cursor=state.task_cursor, snapshot=state.queue_snapshot
        )
        if async_queue.num_restarted_groups:
            self.note(
                f"{async_queue.num_restarted_groups} groups that had not ended at the checkpoint begin anew"
            )
        state.queue_snapshot, state.snapshot_queue = None, async_queue.snapshot
        return async_queue

    @property
    def _newest(self) -> int:
        settings = self.parts.settings
        return min(self.state.step + settings.cluster.max_staleness, settings.train.num_steps - 1)

    def on_weights_updated(self) -> None:
        """The engines have new weights, and the step that they are for is the next one: more may begin."""
        if self._async_queue is not None:
            self._async_queue.begin(self._newest)

    def on_step_recorded(self) -> None:
        """The metrics of a step are on record."""
        if self._async_queue is not None:
            self._async_queue.on_step_recorded()

    def end(self) -> None:
        """No further step comes: what is still under way is given up."""
        if self._async_queue is not None:
            self._async_queue.cancel()

    def is_last(self, report: SampledStep) -> bool:
        """Whether no step comes behind the one of these rollouts."""
        state, settings = self.state, self.parts.settings.train
        written = rollout_metrics(report.traces)
        num_tokens = state.num_policy_tokens + sum(written.get(name, 0.0) for name in WRITTEN_TOKENS)
        budget = settings.max_policy_tokens
        return state.step + 1 >= settings.num_steps or (budget is not None and num_tokens >= budget)

    def probes(self, report: SampledStep) -> list[Trace]:
        """What says that the engines have the newest weights, where the rollouts cannot."""
        remote = self.parts.remote
        if remote is None or not self.parts.settings.cluster.max_staleness:
            return []
        # the first group may have been lost to a fault
        return next(filter(None, map(remote.probes, report.traces)), [])
