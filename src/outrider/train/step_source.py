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
from outrider.train.in_flight import Flight
from outrider.train.metrics.step_metrics import rollout_metrics
from outrider.train.state.queue import Played
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
    _flight: Flight | None = None

    def next(self) -> Played:
        """The rollouts of the step that comes, once they are there. Raises what playing and ``tick``
        raise.
        """
        if self.parts.settings.cluster.in_flight:
            flight = self._flight = self._flight or self._started()
            flight.begin(self._newest)
            return flight.collect(self.state.step, on_tick=self.tick)
        return self.state.queued or self._play()

    def _play(self) -> Played:
        """With nothing beside them."""
        parts, state = self.parts, self.state
        counts = parts.algorithm.counts()
        try:
            sampled = play_step(parts, self.rollouts(), step=state.step, cursor=state.task_cursor)
        except BaseException:
            # the step is given up: it will be played again, to the same bits
            parts.algorithm.restore_counts(counts)
            raise
        return Played(sampled=sampled, counts=counts, seconds=0.0)

    def _started(self) -> Flight:
        assert self.parts.elsewhere is not None  # the settings ask for engines of their own
        state = self.state
        player = self.parts.elsewhere.flight(self.parts)
        flight = Flight(self.parts, player, step=state.step, cursor=state.task_cursor, kept=state.kept)
        if flight.num_begun_anew:
            self.note(f"{flight.num_begun_anew} groups that had not ended at the checkpoint begin anew")
        state.kept, state.keep = None, flight.kept
        return flight

    @property
    def _newest(self) -> int:
        settings = self.parts.settings
        return min(self.state.step + settings.cluster.max_staleness, settings.train.num_steps - 1)

    def weights_moved(self) -> None:
        """The engines have new weights, and the step that they are for is the next one: more may begin."""
        if self._flight is not None:
            self._flight.begin(self._newest)

    def recorded(self) -> None:
        """The metrics of a step are on record."""
        if self._flight is not None:
            self._flight.recorded()

    def end(self) -> None:
        """No further step comes: what is still under way is given up."""
        if self._flight is not None:
            self._flight.give_up()

    def is_last(self, report: SampledStep) -> bool:
        """Whether no step comes behind the one of these rollouts."""
        state, settings = self.state, self.parts.settings.train
        written = rollout_metrics(report.traces)
        num_tokens = state.num_policy_tokens + sum(written.get(name, 0.0) for name in WRITTEN_TOKENS)
        budget = settings.max_policy_tokens
        return state.step + 1 >= settings.num_steps or (budget is not None and num_tokens >= budget)

    def probes(self, report: SampledStep) -> list[Trace]:
        """What says that the engines have the newest weights, where the rollouts cannot."""
        elsewhere = self.parts.elsewhere
        if elsewhere is None or not self.parts.settings.cluster.max_staleness:
            return []
        # the first group may have been lost to a fault
        return next(filter(None, map(elsewhere.probes, report.traces)), [])
