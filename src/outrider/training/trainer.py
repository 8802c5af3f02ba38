"""Credit of one step: by group, or over the whole batch where the algorithm's statistics span it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from outrider.algorithms.base import GroupAdvantages
from outrider.config import shown_path
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import EnvironmentFault
from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import format_mean_return, score
from outrider.rollout.episode import Sampling
from outrider.rollout.evaluate import Evaluation, evaluate, gain_over_start
from outrider.rollout.faults import fault_line, lost_reasons, require_results, require_room
from outrider.rollout.scheduler import Rollouts, Scheduler
from outrider.trace import Trace
from outrider.training.async_rollouts import AsyncRolloutQueue, QueuedStep, prefetch_rollouts
from outrider.training.buffers import evolve_buffer
from outrider.training.checkpoint import checkpoint_step_or_none, checkpoints_newest_first
from outrider.training.cold_start import imitate_experts
from outrider.training.components import Components, token_counter
from outrider.training.data import (
    SampledStep,
    add_off_policy_groups,
    count_groups,
    interleave,
    kind_of_tasks,
    play_step,
    stage_lines,
    stage_metrics,
)
from outrider.training.resume import RunState
from outrider.training.run_dir import RunDirectory
from outrider.training.step_metrics import (
    Advice,
    StepClock,
    environment_metrics,
    rollout_metrics,
    skipped_alarms,
    staleness_metrics,
    step_alarms,
    step_record,
)
from outrider.training.step_records import NodeValues, collect_node_values
from outrider.training.update import UpdateReport
from outrider.viewer.progress import Progress
from outrider.viewer.summary import STEP_FIELDS
from outrider.viewer.trackers import TrackerSet


def assign_step_advantages(parts: Components, traces: Sequence[Trace]) -> list[GroupAdvantages]:
    """Assign credit to the groups that the update gets; one entry a trace. A KL that the reward counts is
    measured first.
    """
    if parts.settings.algorithm.rewards_kl and parts.learner.has_reference:
        # Before the update, so that the KL is that of the policy which wrote the tokens.
        parts.learner.score(traces)
    return parts.algorithm.advantages(traces)


# Where the rollouts of a training step come from: played when their turn comes, played beside the step
# before (:mod:`outrider.training.async_rollouts`), or in flight for several steps
# (:mod:`outrider.training.async_rollouts`).


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


# What an evaluation of a run leaves on file, and what is said of it.


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers of an evaluation under their declared names."""
    return {
        "eval/score": evaluation.score,
        "eval/ci_low": evaluation.ci_low,
        "eval/ci_high": evaluation.ci_high,
        "eval/mean_return": evaluation.mean_return,
        "eval/num_tasks": float(evaluation.num_tasks),
        "eval/num_faults": float(evaluation.num_faults),
    }


def record_evaluation(
    state: RunState, evaluation: Evaluation, traces: Sequence[Trace], *, seconds: float
) -> tuple[dict[str, float], list[str]]:
    """Write metrics, traces and the result, which marks the evaluation as done; the metrics, and lines for
    the person who watches. Raises EnvironmentFault where no rollout has a result.
    """
    label, step, run, parts = evaluation.label, evaluation.step, state.run, state.parts
    lost = lost_reasons(traces)
    if not evaluation.num_tasks:
        raise EnvironmentFault(
            f"the evaluation {label!r} has no result, every rollout was lost to a fault: {fault_line(lost)}"
        )
    values = evaluation_metrics(evaluation) | {"time/evaluation": seconds}
    if parts.settings.environment.reports_metrics:
        values |= environment_metrics(traces)
    state.metrics.write(step, "eval", values)
    number = len(run.finished_evaluations())
    state.files.write_evaluation(parts, traces, number=number, step=step)
    # Last, because it marks the evaluation as done.
    run.add_evaluation(
        evaluation,
        split=parts.settings.evaluation.split,
        temperature=parts.settings.evaluation.temperature,
        tasks_hash=hash_tasks(parts.test_tasks),
        num_training_tasks=parts.num_training_tasks,
    )
    repeated = f", {evaluation.num_retries} tries repeated" if evaluation.num_retries else ""
    lines = [
        f"{label}: {score(evaluation.score, evaluation.ci_low, evaluation.ci_high)}"
        f"{format_mean_return(evaluation.score, evaluation.mean_return)} "
        f"on {evaluation.num_tasks} {kind_of_tasks(len(parts.test_tasks), parts.num_training_tasks)}, "
        f"{evaluation.num_faults} "
        f"faults{': ' if lost else ''}{fault_line(lost)}{repeated}"
    ]
    if (gain := gain_over_start(run.finished_evaluations())) is not None:
        lines.append(f"{label}: {gain}")
    return values, lines


# The training loop: buffer, cold start, then steps of rollout, credit and update, with evaluations
# between.


class _StopRequested(Exception):
    """Raised where work can be given up without harm."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One run. ``stop`` is set by a signal handler: an update in flight ends, anything else is given up; what
    was finished is then in a checkpoint.
    """

    run: RunDirectory
    parts: Components
    progress: Progress
    trackers: TrackerSet
    stop: Event = field(default_factory=Event)
    num_restarts: int = 0  # of this command, from a checkpoint, before anything of this object
    num_done: int = 0  # of the stage that is shown
    checkpoint_seconds: float = 0.0  # of the last checkpoint that this process wrote
    state: RunState = field(init=False)
    source: StepSource = field(init=False)
    advice: Advice = field(init=False)

    def __post_init__(self) -> None:
        self.advice = Advice(
            settings=self.parts.settings,
            context_length=self.parts.engine.context_length,
            stop=self.parts.task_set.stop,
        )
        self.state = RunState(run=self.run, parts=self.parts, note=self.progress.note)
        self.source = StepSource(
            parts=self.parts,
            state=self.state,
            rollouts=lambda: self.rollouts(training=True),
            tick=self._tick,
            note=self.progress.note,
        )

    def train(self) -> None:
        """Everything that is still to do, from the newest checkpoint on, or until a stop is asked for."""
        state = self.state
        try:
            self._train()
        except _StopRequested:
            state.save_if_new()
            saved = (
                f"the checkpoint of step {state.step} is written"
                if state.saved_step >= 0
                else "nothing was trained yet"
            )
            self.progress.note(
                f"stopped on request after step {state.step} of {self.parts.settings.train.num_steps}, "
                f"{saved}; "
                f"continue with: outrider train --resume {self.run.path}"
            )

    def _tick(self, rollouts: str) -> None:
        self.progress.advance(self.num_done, rollouts=rollouts)
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise _StopRequested

    def _train(self) -> None:
        self._raise_if_stopped()
        settings, state = self.parts.settings, self.state
        checkpoints = checkpoints_newest_first(self.run.checkpoints)
        if not checkpoints:
            self._begin()
        else:
            saved = state.load_newest(checkpoints)
            if self._is_finished():
                if state.check_records(saved):
                    state.write_record_checksums()  # where a kill came between the last evaluation and that
                self.progress.note(
                    f"this run is finished: {state.step} of {settings.train.num_steps} steps; nothing to do"
                )
                return
            state.rewind(saved, last_label=self._last_label)
            self._note_lines(self._fresh_start())
        if settings.cold_start.num_examples:
            self._evaluate("after cold start")
        every = settings.evaluation.every
        if every and 0 < state.step < settings.train.num_steps and state.step % every == 0:
            self._evaluate(f"step {state.step}")  # where a stop came between the step and its evaluation
        if state.step < settings.train.num_steps:
            self._show_training()
        while state.step < settings.train.num_steps and not self._is_budget_spent():
            fields = self._train_step()
            self.num_done = state.step
            self.progress.advance(state.step, **fields)
            self._raise_if_stopped()
            if every and state.step % every == 0 and state.step < settings.train.num_steps:
                self._evaluate(f"step {state.step}")
                self._show_training()
            if state.step % settings.train.checkpoint_every == 0:
                self._save()
        if state.step and state.saved_step != state.step:
            self._save()
        self.source.end()
        if state.step:
            self._evaluate(self._last_label)
        state.write_record_checksums()

    def _fresh_start(self) -> list[str]:
        """A run of rollouts beside updates has none where it had ended."""
        state, settings = self.state, self.parts.settings
        if (
            not settings.cluster.max_staleness
            or settings.cluster.in_flight
            or state.queued is not None
            or not state.step
        ):
            return []
        return [
            f"no rollouts were ahead at step {state.step}, where this run had ended: those of the next step "
            "come from the newest weights, unlike those of a run with more steps from the start"
        ]

    def _begin(self) -> None:
        """Up to the checkpoint of step 0, from which training goes on."""
        self.state.begin()
        settings, tasks = self.parts.settings, self.parts.train_tasks
        for num_groups, num_tasks in count_groups(settings.train, tasks):
            self._note_lines(settings.algorithm.warnings(num_groups=num_groups, num_tasks=num_tasks))
        self._note_lines(stage_lines(settings.train, tasks))
        if settings.evaluation.at_start:
            self._evaluate_start(settings.model.initial_checkpoint)
        self._cold_start()
        self.state.freeze_reference()
        self._save()

    def _save(self) -> None:
        began = time.monotonic()
        self.state.save()
        self.checkpoint_seconds = time.monotonic() - began

    @property
    def _last_label(self) -> str:
        if not self.parts.settings.train.num_steps and self.parts.settings.cold_start.num_examples:
            return "after cold start"  # supervised fine-tuning and nothing else
        return f"after {self.parts.algorithm.label.upper()}"

    def _is_finished(self) -> bool:
        """Whether all steps are done and the last evaluation, where there is a panel, is on file."""
        is_done = self.state.step >= self.parts.settings.train.num_steps or self._is_budget_spent()
        return is_done and self._is_evaluated(self._last_label)

    def _is_evaluated(self, label: str) -> bool:
        return not self.parts.test_tasks or any(
            evaluation["label"] == label for evaluation in self.run.finished_evaluations()
        )

    def _stage(self, name: str, total: int, *, done: int = 0, num_parallel: int = 1) -> None:
        self.num_done = done
        self.progress.stage(name, total, done=done, num_parallel=num_parallel)

    def _show_training(self) -> None:
        self.num_done = self.state.step
        total = self.parts.settings.train.num_steps
        self.progress.stage("train", total, done=self.num_done, line_per_unit=True)

    def _note_lines(self, lines: list[str]) -> None:
        for line in lines:
            self.progress.note(line)

    def _is_budget_spent(self) -> bool:
        budget = self.parts.settings.train.max_policy_tokens
        return budget is not None and self.state.num_policy_tokens >= budget

    def _cold_start(self) -> None:
        if not self.parts.settings.cold_start.num_examples:
            return

        first = -self.parts.settings.cold_start.max_steps

        def on_step(done: int, values: dict[str, float]) -> None:
            self.state.metrics.write(done, "sft", values)
            self.trackers.log(first + done, values)
            self._note_lines(skipped_alarms(done, values))
            self.num_done = done
            self.progress.advance(done, loss=values["sft/loss"])
            self._raise_if_stopped()

        self.parts.engine.free_cache()
        imitate_experts(
            self.parts,
            stage=self._stage,
            note=self.progress.note,
            on_done=self._advance,
            on_step=on_step,
            on_rollouts=lambda traces: self.state.files.write_experts(self.parts, traces),
        )

    def _advance(self, done: int) -> None:
        self.num_done = done
        self.progress.advance(done)

    def rollouts(self, *, training: bool) -> Rollouts:
        """What plays training (with the algorithm's hooks) or evaluation (without any)."""
        settings, parts = self.parts.settings, self.parts

        def on_finished(done: int, total: int) -> None:
            if not training:
                self.num_done = done
            self._tick(f"{done}/{total}")

        if parts.remote is not None:
            return parts.remote.rollouts(parts, training=training, on_finished=on_finished)
        temperature = 1.0 if training else settings.evaluation.temperature
        return Scheduler(
            engine=parts.engine,
            renderer=parts.renderer,
            factory=parts.factory,
            limits=settings.limits,
            sampling=Sampling(temperature=temperature, stop=parts.task_set.stop),
            run_seed=settings.seed,
            hooks=parts.algorithm.hooks if training else (),
            max_concurrent=settings.num_concurrent,
            max_retries=settings.train.max_retries,
            limits_calls=training,
            group_timeout_s=settings.train.group_timeout_s if training else None,
            on_finished=on_finished,
            rollout_status=parts.rollout_status,
        )

    def _train_step(self) -> dict[str, float]:
        """Rollout, advantages, update, record; what is shown of it."""
        parts, state = self.parts, self.state
        clock = StepClock(remote=parts.remote)
        queued = self.source.next()
        report = queued.sampled
        require_results(report.traces, report.faults)
        for line in require_room(report.traces, context_length=parts.engine.context_length):
            self.progress.note(f"step {state.step + 1}: {line}")
        replayed, mix_metrics = add_off_policy_groups(
            parts, report.traces, step=state.step, note=self.progress.note
        )
        clock.mark_rollouts(prefetch_s=queued.seconds or None)
        if not parts.settings.cluster.in_flight:  # there turns are under way
            parts.engine.free_cache()
        group_advantages = assign_step_advantages(parts, report.trained)
        probes = self.source.probes(report)
        with prefetch_rollouts(
            parts, report, step=state.step + 1, is_last=self.source.is_last(report)
        ) as prefetch:
            clock.mark_update_start()
            trained = interleave(report.trained, replayed)
            update_report, staleness = self._update(report, trained, probes)
            clock.mark_update_end()
            if prefetch is not None:
                prefetch.wait(on_tick=lambda text: self.progress.advance(self.num_done, rollouts=text))
            clock.mark_wait_end()
            parts.engine.load(parts.engine.weight_version + 1)
            state.step += 1
            state.task_cursor = report.cursor
            self.source.on_weights_updated()
            values = step_record(
                parts,
                report,
                group_advantages,
                mix_metrics=mix_metrics,
                update_metrics=update_report.metrics,
                counts_before=queued.counts,
            )
            values |= staleness | clock.metrics(
                num_policy_tokens=values.get("tokens/policy", 0.0),
                num_computed_tokens=update_report.num_computed_tokens,
            )
            values |= self._buffer_metrics(report)
            self._record(report, values, collect_node_values(parts, trained, update_report))
            self.source.on_step_recorded()
            # Only now: what the next rollouts bring is no part of this step's record.
            state.queued = None if prefetch is None else prefetch.collect()
        return {name: values[key] for name, key in STEP_FIELDS.items() if key in values}

    def _buffer_metrics(self, report: SampledStep) -> dict[str, float]:
        """What the buffer takes in of the step, and how the weights went to engines elsewhere."""
        parts = self.parts
        transfer_metrics = {} if parts.remote is None else parts.remote.metrics()
        if parts.buffer is None:
            return transfer_metrics
        growth_metrics = evolve_buffer(
            parts.buffer,
            report.traces,
            settings=parts.settings.buffer,
            step=self.state.step,
            count_tokens=token_counter(parts.renderer),
        )
        return growth_metrics | transfer_metrics

    def _update(
        self, report: SampledStep, trained: Sequence[Trace], probes: Sequence[Trace]
    ) -> tuple[UpdateReport, dict[str, float]]:
        """The optimiser steps on these rollouts, and how old those are where that is a question."""
        parts = self.parts
        limit, version = parts.settings.cluster.max_staleness, parts.engine.weight_version
        staleness = staleness_metrics(report.traces, version=version, limit=limit) if limit else {}
        update_report = parts.learner.update(
            trained,
            parts.algorithm,
            on_batch=lambda num_tokens: self.progress.advance(self.num_done, trained=num_tokens),
            version=version if limit else None,
            probes=probes,
        )
        return update_report, staleness

    def _record(self, report: SampledStep, values: dict[str, float], node_values: NodeValues) -> None:
        """Traces, metrics and alarms of the step that has ended; ``values`` gets what the run counts."""
        parts, state = self.parts, self.state
        state.num_policy_tokens += int(sum(values.get(name, 0.0) for name in WRITTEN_TOKENS))
        values["tokens/policy_total"] = float(state.num_policy_tokens)
        values["grad/learning_rate"] = parts.learner.learning_rate
        values |= stage_metrics(parts.settings.train, step=state.step - 1)
        if self.num_restarts:
            values["cluster/trainer_restarts"] = float(self.num_restarts)
            self.num_restarts = 0
        values["time/checkpoint"] = self.checkpoint_seconds
        state.files.write_step(parts, report.traces, node_values, step=state.step)
        state.metrics.write(state.step, "train", values)
        self.trackers.log(state.step, values)
        self._note_lines(
            step_alarms(parts.settings, step=state.step, values=values, fault_reasons=report.fault_reasons)
        )
        self._note_lines(self.advice.lines(report.traces, step=state.step, values=values))
        if parts.remote is not None:
            self._note_lines(parts.remote.notes())

    def _evaluate_start(self, checkpoint: str | None) -> None:
        """Evaluate the weights that the run begins with. If it does not train them, the evaluation is one of
        the checkpoint's step.
        """
        before = -self.parts.settings.cold_start.max_steps
        if checkpoint is None:
            self._evaluate("before training", tracker_step=before)
            return
        settings, folder = self.parts.settings, Path(checkpoint)
        # An earlier version may have written the path in another way.
        labels = [str(entry["label"]) for entry in self.run.finished_evaluations()]
        label = next((entry for entry in labels if entry.startswith("of ")), f"of {shown_path(folder)}")
        trains = settings.train.num_steps or settings.cold_start.num_examples
        if trains:
            self._evaluate(label, tracker_step=before)
        else:
            self._evaluate(label, step=checkpoint_step_or_none(folder))

    def _evaluate(self, label: str, *, step: int | None = None, tracker_step: int | None = None) -> None:
        """Play the frozen panel unless its result is on file already; ``step`` None is that of the run,
        ``tracker_step`` the step for trackers if it is another one. Raises EnvironmentFault if no rollout has
        a result.
        """
        settings = self.parts.settings.evaluation
        step = self.state.step if step is None else step
        if self._is_evaluated(label):
            return
        num_rollouts = len(self.parts.test_tasks) * settings.num_samples
        self._stage(f"evaluation {label}", num_rollouts, num_parallel=self.parts.settings.num_concurrent)
        rollouts = self.rollouts(training=False)
        began = time.monotonic()
        evaluation, traces = evaluate(
            rollouts, self.parts.test_tasks, num_samples=settings.num_samples, label=label, step=step
        )
        seconds = time.monotonic() - began
        for line in require_room(traces, context_length=self.parts.engine.context_length):
            self.progress.note(f"{label}: {line}")
        values, lines = record_evaluation(self.state, evaluation, traces, seconds=seconds)
        self.trackers.log(step if tracker_step is None else tracker_step, values)
        self._note_lines(lines)
