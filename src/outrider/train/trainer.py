"""The training loop: buffer, cold start, then steps of rollout, credit and update, with evaluations
between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from outrider.config_paths import shown_path
from outrider.metrics import WRITTEN_TOKENS
from outrider.rollout.episode import Sampling
from outrider.rollout.evaluate import evaluate
from outrider.rollout.faults import require_results
from outrider.rollout.outcome_reasons import require_room
from outrider.rollout.scheduler import Rollouts, Scheduler
from outrider.trace import Trace
from outrider.train.components import Components, token_counter
from outrider.train.data.buffer_growth import evolve_buffer
from outrider.train.data.imitation import imitate_experts
from outrider.train.data.off_policy_data import interleaved, mix_in
from outrider.train.data.stages import groups_on, stage_lines, stage_metrics
from outrider.train.data.task_sampling import SampledStep
from outrider.train.evaluation_record import record_evaluation
from outrider.train.metrics.advice import Advice
from outrider.train.metrics.ahead import work_ahead
from outrider.train.metrics.alarms import skipped_alarms, step_alarms
from outrider.train.metrics.staleness import staleness_metrics
from outrider.train.metrics.step_clock import StepClock
from outrider.train.metrics.step_record import step_record
from outrider.train.metrics.trace_records import NodeValues
from outrider.train.overlap import beside
from outrider.train.state.checkpoint import checkpoints_newest_first, step_named
from outrider.train.state.run_directory import RunDirectory
from outrider.train.state.run_state import RunState
from outrider.train.step_files import seen_by_update
from outrider.train.step_source import StepSource
from outrider.train.update.advantage_stage import credit_step
from outrider.train.update.update import UpdateReport
from outrider.watch.progress import Progress
from outrider.watch.run_pace import RunPace
from outrider.watch.trackers import TrackerSet
from outrider.watch.watching import STEP_FIELDS


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
    pace: RunPace = field(default_factory=RunPace)
    state: RunState = field(init=False)
    source: StepSource = field(init=False)
    advice: Advice = field(init=False)

    def __post_init__(self) -> None:
        self.advice = Advice(
            settings=self.parts.settings,
            context_length=self.parts.engine.context_length,
            stop=self.parts.family.stop,
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
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self.stop.is_set():
            raise _StopRequested

    def _train(self) -> None:
        self._leave_if_asked()
        settings, state = self.parts.settings, self.state
        checkpoints = checkpoints_newest_first(self.run.checkpoints)
        if not checkpoints:
            self._begin()
        else:
            saved = state.load_newest(checkpoints)
            if self._is_finished():
                if state.check_records(saved):
                    state.seal_records()  # where a kill came between the last evaluation and that
                self.progress.note(
                    f"this run is finished: {state.step} of {settings.train.num_steps} steps; nothing to do"
                )
                return
            state.rewind(saved, last_label=self._last_label)
            self.pace.recall(state.metrics.path)
            self._say(self._fresh_start())
        if settings.cold_start.num_examples:
            self._evaluate("after cold start")
        every = settings.evaluation.every
        if every and 0 < state.step < settings.train.num_steps and state.step % every == 0:
            self._evaluate(f"step {state.step}")  # where a stop came between the step and its evaluation
        if state.step < settings.train.num_steps:
            self._show_training()
        while state.step < settings.train.num_steps and not self._budget_spent():
            with self.pace.timed("step"):
                shown = self._train_step()
            self._look_ahead()
            self.num_done = state.step
            self.progress.advance(state.step, **shown)
            self._leave_if_asked()
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
        state.seal_records()

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
        for num_groups, num_tasks in groups_on(settings.train, tasks):
            self._say(settings.algorithm.warnings(num_groups=num_groups, num_tasks=num_tasks))
        self._say(stage_lines(settings.train, tasks))
        if settings.evaluation.at_start:
            self._evaluate_start(settings.model.initial_checkpoint)
        self._cold_start()
        self.state.freeze_reference()
        self._save()

    def _save(self) -> None:
        with self.pace.timed("checkpoint"):
            self.state.save()
        self._look_ahead()

    @property
    def _last_label(self) -> str:
        if not self.parts.settings.train.num_steps and self.parts.settings.cold_start.num_examples:
            return "after cold start"  # supervised fine-tuning and nothing else
        return f"after {self.parts.algorithm.label.upper()}"

    def _is_finished(self) -> bool:
        """Whether all steps are done and the last evaluation, where there is a panel, is on file."""
        ended = self.state.step >= self.parts.settings.train.num_steps or self._budget_spent()
        return ended and self._is_evaluated(self._last_label)

    def _is_evaluated(self, label: str) -> bool:
        return not self.parts.test_tasks or any(
            one["label"] == label for one in self.run.finished_evaluations()
        )

    def _stage(self, name: str, total: int, *, done: int = 0, num_parallel: int = 1) -> None:
        self.num_done = done
        self.progress.stage(name, total, done=done, num_parallel=num_parallel)

    def _show_training(self) -> None:
        """The stage of training, whose time left is that of the run: evaluations and checkpoints come between
        its steps.
        """
        self._look_ahead()
        self.num_done = self.state.step
        total = self.parts.settings.train.num_steps
        self.progress.stage("train", total, done=self.num_done, left_by=lambda: self.pace.left)

    def _look_ahead(self) -> None:
        state = self.state
        self.pace.ahead = work_ahead(
            self.parts.settings,
            step=state.step,
            saved_step=state.saved_step,
            num_policy_tokens=state.num_policy_tokens,
            is_evaluated=self._is_evaluated(f"step {state.step}"),
            ends_evaluated=self._is_evaluated(self._last_label),
        )

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.progress.note(line)

    def _budget_spent(self) -> bool:
        budget = self.parts.settings.train.max_policy_tokens
        return budget is not None and self.state.num_policy_tokens >= budget

    def _cold_start(self) -> None:
        if not self.parts.settings.cold_start.num_examples:
            return

        first = -self.parts.settings.cold_start.max_steps

        def on_step(done: int, values: dict[str, float]) -> None:
            self.state.metrics.write(done, "sft", values)
            self.trackers.log(first + done, values)
            self._say(skipped_alarms(done, values))
            self.num_done = done
            self.progress.advance(done, loss=values["sft/loss"])
            self._leave_if_asked()

        self.parts.engine.free_cache()
        imitate_experts(
            self.parts,
            stage=self._stage,
            note=self.progress.note,
            on_done=self._show,
            on_step=on_step,
            on_played=lambda traces: self.state.files.write_experts(self.parts, traces),
        )

    def _show(self, done: int) -> None:
        self.num_done = done
        self.progress.advance(done)

    def rollouts(self, *, training: bool) -> Rollouts:
        """What plays training (with the algorithm's hooks) or evaluation (without any)."""
        settings, parts = self.parts.settings, self.parts

        def on_finished(done: int, total: int) -> None:
            if not training:
                self.num_done = done
            self._tick(f"{done}/{total}")

        if parts.elsewhere is not None:
            return parts.elsewhere.rollouts(parts, training=training, on_finished=on_finished)
        temperature = 1.0 if training else settings.evaluation.temperature
        return Scheduler(
            engine=parts.engine,
            renderer=parts.renderer,
            factory=parts.factory,
            limits=settings.limits,
            sampling=Sampling(temperature=temperature, stop=parts.family.stop),
            run_seed=settings.seed,
            hooks=parts.algorithm.hooks if training else (),
            max_concurrent=settings.num_concurrent,
            max_retries=settings.train.max_retries,
            limits_calls=training,
            group_timeout_s=settings.train.group_timeout_s if training else None,
            on_finished=on_finished,
            whereabouts=parts.whereabouts,
        )

    def _train_step(self) -> dict[str, float]:
        """Rollout, advantages, update, record; what is shown of it."""
        parts, state = self.parts, self.state
        clock = StepClock(elsewhere=parts.elsewhere)
        played = self.source.next()
        report = played.sampled
        require_results(report.traces, report.faults)
        for line in require_room(report.traces, context_length=parts.engine.context_length):
            self.progress.note(f"step {state.step + 1}: {line}")
        replayed, mixed = mix_in(parts, report.traces, step=state.step, note=self.progress.note)
        clock.rolled(ahead_s=played.seconds or None)
        if not parts.settings.cluster.in_flight:  # there turns are under way
            parts.engine.free_cache()
        credits_ = credit_step(parts, report.trained)
        probes = self.source.probes(report)
        with beside(parts, report, step=state.step + 1, is_last=self.source.is_last(report)) as ahead:
            clock.updating()
            trained = interleaved(report.trained, replayed)
            updated, aged = self._update(report, trained, probes)
            clock.updated()
            if ahead is not None:
                ahead.wait(on_tick=lambda shown: self.progress.advance(self.num_done, rollouts=shown))
            clock.waited()
            parts.engine.load(parts.engine.weight_version + 1)
            state.step += 1
            state.task_cursor = report.cursor
            self.source.weights_moved()
            values = step_record(
                parts, report, credits_, mixed=mixed, updated=updated.metrics, counts_before=played.counts
            )
            values |= aged | clock.ended(
                num_policy_tokens=values.get("tokens/policy", 0.0),
                num_computed_tokens=updated.num_computed_tokens,
            )
            values |= self._grown(report)
            self._record(report, values, seen_by_update(parts, trained, updated))
            self.source.recorded()
            # Only now: what the next rollouts bring is no part of this step's record.
            state.queued = None if ahead is None else ahead.take()
        return {name: values[key] for name, key in STEP_FIELDS.items() if key in values}

    def _grown(self, report: SampledStep) -> dict[str, float]:
        """What the buffer takes in of the step, and how the weights went to engines elsewhere."""
        parts = self.parts
        sent = {} if parts.elsewhere is None else parts.elsewhere.metrics()
        if parts.buffer is None:
            return sent
        grown = evolve_buffer(
            parts.buffer,
            report.traces,
            settings=parts.settings.buffer,
            step=self.state.step,
            count_tokens=token_counter(parts.renderer),
        )
        return grown | sent

    def _update(
        self, report: SampledStep, trained: Sequence[Trace], probes: Sequence[Trace]
    ) -> tuple[UpdateReport, dict[str, float]]:
        """The optimiser steps on these rollouts, and how old those are where that is a question."""
        parts = self.parts
        limit, version = parts.settings.cluster.max_staleness, parts.engine.weight_version
        aged = staleness_metrics(report.traces, version=version, limit=limit) if limit else {}
        updated = parts.learner.update(
            trained,
            parts.algorithm,
            on_batch=lambda num_tokens: self.progress.advance(self.num_done, trained=num_tokens),
            version=version if limit else None,
            probes=probes,
        )
        return updated, aged

    def _record(self, report: SampledStep, values: dict[str, float], seen: NodeValues) -> None:
        """Traces, metrics and alarms of the step that has ended; ``values`` gets what the run counts."""
        parts, state = self.parts, self.state
        state.num_policy_tokens += int(sum(values.get(name, 0.0) for name in WRITTEN_TOKENS))
        values["tokens/policy_total"] = float(state.num_policy_tokens)
        values["grad/learning_rate"] = parts.learner.learning_rate
        values |= stage_metrics(parts.settings.train, step=state.step - 1)
        if self.num_restarts:
            values["cluster/trainer_restarts"] = float(self.num_restarts)
            self.num_restarts = 0
        if (seconds := self.pace.seconds("checkpoint")) is not None:
            values["time/checkpoint"] = seconds
        state.files.write_step(parts, report.traces, seen, step=state.step)
        state.metrics.write(state.step, "train", values)
        self.trackers.log(state.step, values)
        self._say(
            step_alarms(parts.settings, step=state.step, values=values, fault_reasons=report.fault_reasons)
        )
        self._say(self.advice.lines(report.traces, step=state.step, values=values))
        if parts.elsewhere is not None:
            self._say(parts.elsewhere.notes())

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
        on_file = [str(one["label"]) for one in self.run.finished_evaluations()]
        label = next((one for one in on_file if one.startswith("of ")), f"of {shown_path(folder)}")
        trains = settings.train.num_steps or settings.cold_start.num_examples
        if trains:
            self._evaluate(label, tracker_step=before)
        else:
            self._evaluate(label, step=step_named(folder))

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
        with self.pace.timed("evaluation"):
            evaluation, traces = evaluate(
                rollouts, self.parts.test_tasks, num_samples=settings.num_samples, label=label, step=step
            )
        for line in require_room(traces, context_length=self.parts.engine.context_length):
            self.progress.note(f"{label}: {line}")
        values, lines = record_evaluation(
            self.state, evaluation, traces, seconds=self.pace.last("evaluation")
        )
        self.trackers.log(step if tracker_step is None else tracker_step, values)
        self._say(lines)
