"""The training loop of a run: cold start, then steps of rollouts, advantages, update and record, with
evaluations and checkpoints in between.

``Trainer._train_step`` is one step. :mod:`outrider.training.setup` builds the components,
:mod:`outrider.training.data` chooses the tasks of a step, and :mod:`outrider.training.update` has the forward
and backward passes.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from outrider.algorithms.base import GroupAdvantages
from outrider.config import shown_path
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import EnvironmentFault
from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import format_mean_return, plural, score, shell_command
from outrider.rollout.evaluate import (
    averages_over_sets,
    describe_conditions,
    evaluate,
    evaluation_label,
    gain_over_start,
)
from outrider.rollout.faults import (
    count_cut,
    cut_line,
    fault_line,
    lost_reasons,
    require_results,
    require_room,
)
from outrider.rollout.scheduler import Rollouts
from outrider.trace import Trace
from outrider.training.checkpoint import checkpoint_step_or_none, checkpoints_newest_first
from outrider.training.cold_start import imitate_experts
from outrider.training.components import Components, EvaluationTasks
from outrider.training.data import (
    QueuedStep,
    SampledStep,
    add_off_policy_groups,
    count_groups,
    interleave,
    kind_of_tasks,
    play_step,
    stage_lines,
    stage_metrics,
)
from outrider.training.experts import evolve_buffer
from outrider.training.resume import RunState
from outrider.training.run_dir import RunDirectory
from outrider.training.step_metrics import (
    Advice,
    StepClock,
    environment_metrics,
    evaluation_fields,
    evaluation_metrics,
    rollout_metrics,
    skipped_alarms,
    staleness_metrics,
    step_alarms,
    step_record,
)
from outrider.training.step_records import NodeValues, collect_node_values
from outrider.training.unused_keys import unused_keys
from outrider.types import Outcome
from outrider.viewer.progress import Field, Progress
from outrider.viewer.ranges import RangeWatch
from outrider.viewer.run_reader import read_run
from outrider.viewer.summary import STEP_FIELDS
from outrider.viewer.trackers import TrackerSet

if TYPE_CHECKING:
    from outrider.training.async_rollouts import AsyncRolloutQueue


class _StopRequested(Exception):
    """Ends the training loop at a point where the unfinished step can be discarded."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The training loop of one run.

    A signal handler sets ``stop``. The trainer then finishes an update in progress, discards the rollouts of
    an unfinished step, and saves a checkpoint of the finished steps.
    """

    run: RunDirectory
    parts: Components
    progress: Progress
    trackers: TrackerSet
    stop: Event = field(default_factory=Event)
    num_restarts: int = 0  # by this command, from a checkpoint, before this object was made
    num_done: int = 0  # of the stage that is displayed
    checkpoint_seconds: float = 0.0  # of the last checkpoint that this process wrote
    state: RunState = field(init=False)
    advice: Advice = field(init=False)
    range_watch: RangeWatch | None = None  # from the first step of this command on
    async_queue: "AsyncRolloutQueue | None" = None  # with cluster.max_staleness, from the first step on

    def __post_init__(self) -> None:
        self.advice = Advice(
            settings=self.parts.settings,
            context_length=self.parts.engine.context_length,
            stop=self.parts.task_set.stop,
        )
        self.state = RunState(run=self.run, parts=self.parts, note=self.progress.note)

    def train(self) -> None:
        """Do everything that is still to do, from the newest checkpoint on, or until a stop is requested."""
        state = self.state
        try:
            self._train()
        except _StopRequested:
            if state.step and state.saved_step != state.step:
                state.save()
            saved = (
                f"the checkpoint of step {state.step} is written"
                if state.saved_step >= 0
                else "nothing was trained yet"
            )
            self.progress.note(
                f"stopped on request after step {state.step} of {self.parts.settings.train.num_steps}, "
                f"{saved}; "
                f"continue with: {shell_command('train', '--resume', self.run.path)}"
            )

    def _train(self) -> None:
        settings, state = self.parts.settings, self.state
        num_steps = settings.train.num_steps
        checkpoints = checkpoints_newest_first(self.run.checkpoints)
        if not checkpoints:
            self.run.commit()
        elif not self._resume(checkpoints):
            return
        self._raise_if_stopped()  # after larger limits of a resume are recorded
        if not checkpoints:
            self._begin()
        if settings.cold_start.num_examples:
            self._evaluate("after cold start")
        if state.step and self._evaluates_now():
            self._evaluate(f"step {state.step}")  # if the run was stopped between the step and its evaluation
        if state.step < num_steps:
            self._show_training()
        while state.step < num_steps and not self._is_budget_spent():
            fields = self._train_step()
            self.num_done = state.step
            self.progress.advance(state.step, **fields)
            self._raise_if_stopped()
            if self._evaluates_now():
                self._evaluate(f"step {state.step}")
                self._show_training()
            if state.step % settings.train.checkpoint_every == 0:
                self._save()
        if state.step and state.saved_step != state.step:
            self._save()
        if self.async_queue is not None:
            self.async_queue.cancel()
        if state.step:
            self._evaluate(self._last_label)

    def _begin(self) -> None:
        """Everything up to the checkpoint of step 0."""
        self.state.begin()
        settings, tasks = self.parts.settings, self.parts.train_tasks
        for num_groups, num_tasks in count_groups(settings.train, tasks):
            self._note_lines(settings.algorithm.warnings(num_groups=num_groups, num_tasks=num_tasks))
        self._note_lines(stage_lines(settings.train, tasks))
        self._note_lines(unused_keys(settings))
        if settings.evaluation.at_start:
            self._evaluate_start(settings.model.initial_checkpoint)
        self._cold_start()
        self.state.freeze_reference()
        self._save()

    def _resume(self, checkpoints: Sequence[Path]) -> bool:
        """Load the newest checkpoint that can be read. Returns False if the run is already finished."""
        settings, state = self.parts.settings, self.state
        saved = state.load_newest(checkpoints)
        is_done = state.step >= settings.train.num_steps or self._is_budget_spent()
        # A run without cold start and training steps has only the evaluation at its start.
        trains = state.step or settings.cold_start.num_examples
        if is_done and (not trains or not self._pending_sets(self._last_label)):
            self.progress.note(
                f"this run is finished: {state.step} of {plural(settings.train.num_steps, 'step')}; "
                "nothing to do"
            )
            self.run.commit()
            return False
        state.rewind(saved, last_label=self._last_label, is_done=is_done)
        if settings.cluster.max_staleness and state.queue_snapshot is None and state.step:
            self.progress.note(
                f"no rollouts were ahead at step {state.step}, where this run had ended: those of the next "
                "step come from the newest weights, unlike those of a run with more steps from the start"
            )
        return True

    def _train_step(self) -> dict[str, Field]:
        """Run one training step, and return the fields of the progress display."""
        parts, state, cluster = self.parts, self.state, self.parts.settings.cluster
        clock = StepClock(parts.remote)
        self.progress.advance(self.num_done, phase="collecting rollouts")
        queued = self._next_rollouts()
        sampled = queued.sampled
        require_results(sampled.traces, sampled.faults)
        for line in require_room(sampled.traces, context_length=parts.engine.context_length):
            self.progress.note(f"step {state.step + 1}: {line}")
        off_policy, mix_metrics = add_off_policy_groups(
            parts, sampled.traces, step=state.step, note=self.progress.note
        )
        clock.mark("rollouts")
        if not cluster.max_staleness:  # otherwise turns are being generated
            parts.engine.free_cache()
        group_advantages = assign_step_advantages(parts, sampled.selected)
        probes: list[Trace] = []
        if parts.remote is not None and cluster.max_staleness:
            # Rollouts of older weights cannot show that the engines have the newest ones, and the first group
            # may have been lost to a fault.
            probes = next(filter(None, map(parts.remote.probes, sampled.traces)), [])
        if self.async_queue is not None and not self._is_last(sampled):
            # rolled out during this update
            self.async_queue.begin(self._last_step(state.step + cluster.max_staleness))
        clock.mark("update_start")
        self.progress.advance(self.num_done, phase="update")
        update_traces = interleave(sampled.selected, off_policy)
        version = parts.engine.weight_version if cluster.max_staleness else None
        staleness = {}
        if version is not None:
            staleness = staleness_metrics(sampled.traces, version=version, limit=cluster.max_staleness)
        update_report = parts.learner.update(
            update_traces,
            parts.algorithm,
            on_batch=lambda num_tokens: self.progress.advance(
                self.num_done, phase="update", trained=num_tokens
            ),
            version=version,
            probes=probes,
            training_step=state.step,
        )
        clock.mark("update_end")
        if self.async_queue is not None:
            self.async_queue.wait_for_weights(
                on_tick=lambda text: self.progress.advance(
                    self.num_done, phase="waiting for rollouts of the next step", rollouts=text
                )
            )
        clock.mark("wait_end")
        self.progress.advance(self.num_done, phase="loading the new weights into the engine")
        parts.engine.load(parts.engine.weight_version + 1)
        state.step += 1
        state.task_cursor = sampled.cursor
        values = step_record(
            parts,
            sampled,
            group_advantages,
            mix_metrics=mix_metrics,
            update_metrics=update_report.metrics,
            counts_before=queued.counts,
        )
        values |= staleness | clock.metrics(
            prefetch_s=queued.seconds or None,
            num_policy_tokens=values.get("tokens/policy", 0.0),
            num_computed_tokens=update_report.num_computed_tokens,
        )
        if parts.buffer is not None:
            values |= evolve_buffer(
                parts.buffer,
                sampled.traces,
                settings=parts.settings.buffer,
                step=state.step,
                count_tokens=parts.renderer.count_tokens,
            )
        if parts.remote is not None:
            values |= parts.remote.metrics()
        self._record(sampled, values, collect_node_values(parts, update_traces, update_report))
        if self.async_queue is not None:
            self.async_queue.on_step_recorded()
        fields: dict[str, Field] = {name: values[key] for name, key in STEP_FIELDS.items() if key in values}
        limits = parts.settings.limits.at_step(state.step - 1)
        cut = count_cut(sampled.traces, limits, context_length=parts.engine.context_length)
        if cut:
            fields["truncated"] = f"{cut.total()}: {cut_line(cut)}"
        return fields

    def _next_rollouts(self) -> QueuedStep:
        """The rollouts of the next step: generated now, or during the updates of earlier steps
        (``cluster.max_staleness``).
        """
        parts, state = self.parts, self.state
        if ahead := parts.settings.cluster.max_staleness:
            if self.async_queue is None:
                from outrider.training.async_rollouts import start_queue

                self.async_queue = start_queue(parts, state, note=self.progress.note)
            self.async_queue.begin(self._last_step(state.step + ahead - 1))
            return self.async_queue.collect(state.step, on_tick=self._tick)
        counts = parts.algorithm.counts()
        try:
            sampled = play_step(
                parts, self.rollouts(training=True), step=state.step, cursor=state.task_cursor
            )
        except BaseException:
            # The step will be generated again, with the same bits: nothing may be counted twice.
            parts.algorithm.restore_counts(counts)
            parts.algorithm.discard_step()
            raise
        return QueuedStep(sampled=sampled, counts=counts, seconds=0.0)

    def _last_step(self, step: int) -> int:
        """The step, or the last one of the run if it has fewer."""
        return min(step, self.parts.settings.train.num_steps - 1)

    def _is_last(self, sampled: SampledStep) -> bool:
        """Whether the step of these rollouts ends the run."""
        settings = self.parts.settings.train
        written = rollout_metrics(sampled.traces)
        num_tokens = self.state.num_policy_tokens + sum(written.get(name, 0.0) for name in WRITTEN_TOKENS)
        budget = settings.max_policy_tokens
        return self.state.step + 1 >= settings.num_steps or (budget is not None and num_tokens >= budget)

    def rollouts(self, *, training: bool) -> Rollouts:
        """Return the runner of rollouts for training (with the algorithm's hooks) or evaluation."""
        parts = self.parts

        def on_finished(done: int, total: int) -> None:
            if training:
                self._tick(f"{done}/{total}")
            else:
                self.num_done = done
                self.progress.advance(done)
                self._raise_if_stopped()

        if parts.remote is not None:
            return parts.remote.rollouts(parts, training=training, on_finished=on_finished)
        hooks = parts.algorithm.hooks if training else ()
        return parts.scheduler(training=training, hooks=hooks, on_finished=on_finished)

    def _record(self, sampled: SampledStep, values: dict[str, float], node_values: NodeValues) -> None:
        """Write traces, metrics and alarms of a finished step; adds the run's totals to ``values``."""
        parts, state = self.parts, self.state
        state.num_policy_tokens += int(sum(values.get(name, 0.0) for name in WRITTEN_TOKENS))
        values["tokens/policy_total"] = float(state.num_policy_tokens)
        values["grad/learning_rate"] = parts.learner.learning_rate
        values |= stage_metrics(parts.settings.train, step=state.step - 1)
        if parts.settings.rollout.earlier_max_turns:
            values["stage/max_turns"] = float(parts.settings.limits.at_step(state.step - 1).max_turns)
        if self.num_restarts:
            values["cluster/trainer_restarts"] = float(self.num_restarts)
            self.num_restarts = 0
        values["time/checkpoint"] = self.checkpoint_seconds
        state.files.write_step(parts, sampled.traces, node_values, step=state.step)
        if self.range_watch is None:
            self.range_watch = RangeWatch.from_run(read_run(self.run.path))
        state.metrics.write(state.step, "train", values)
        self.trackers.log(state.step, values)
        self.trackers.log_rollouts(state.step, sampled.traces)
        cancelled = lost_reasons(sampled.traces, only=Outcome.CANCELLED)  # they are faults of no try
        reasons = [*cancelled, *sampled.fault_reasons]
        self._note_lines(step_alarms(parts.settings, step=state.step, values=values, fault_reasons=reasons))
        self._note_lines(self.advice.lines(sampled.traces, step=state.step, values=values))
        self._note_lines(self.range_watch.update(state.step, values))
        if parts.remote is not None:
            self._note_lines(parts.remote.notes())

    def _cold_start(self) -> None:
        if not self.parts.settings.cold_start.num_examples:
            return
        first = -self.parts.settings.cold_start.max_steps
        losses: list[float] = []

        def on_step(done: int, values: dict[str, float]) -> None:
            losses.append(values["sft/loss"])
            self.state.metrics.write(done, "sft", values)
            self.trackers.log(first + done, values)
            self._note_lines(skipped_alarms(done, values))
            self.num_done = done
            self.progress.advance(done, loss=values["sft/loss"])
            self._raise_if_stopped()

        def on_done(done: int) -> None:
            self.num_done = done
            self.progress.advance(done)

        self.parts.engine.free_cache()
        imitate_experts(
            self.parts,
            stage=self._stage,
            note=self.progress.note,
            on_done=on_done,
            on_step=on_step,
            on_rollouts=lambda traces: self.state.files.write_experts(self.parts, traces),
        )
        if losses:
            self.progress.note(
                f"cold start: fine-tuned, optimizer steps: {len(losses)}, "
                f"loss {losses[0]:.3g} to {losses[-1]:.3g}",
                event="cold_start",
                steps=len(losses),
                first_loss=losses[0],
                last_loss=losses[-1],
            )

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
        if settings.trains:
            self._evaluate(label, tracker_step=before)
        else:
            self._evaluate(label, step=checkpoint_step_or_none(folder))

    def _evaluate(self, label: str, *, step: int | None = None, tracker_step: int | None = None) -> None:
        """Evaluate on every evaluation set and record the results, except those that are on file already.

        ``step`` None is that of the run, ``tracker_step`` the step for trackers if it is another one. Raises
        EnvironmentFault if no rollout of a set has a result.
        """
        step = self.state.step if step is None else step
        for eval_tasks in (pending := self._pending_sets(label)):
            self._evaluate_set(
                label, eval_tasks, step=step, tracker_step=step if tracker_step is None else tracker_step
            )
        finished = [entry for entry in self.run.finished_evaluations() if entry["label"] == label]
        if pending and len(finished) > 1:
            averages = averages_over_sets(finished)
            num_tasks = sum(entry["num_tasks"] for entry in finished)
            self.progress.note(
                f"{label}, all sets: {score(averages['macro'])} is the mean of "
                f"{plural(len(finished), 'set')} (macro), "
                f"{score(averages['micro'])} the mean over their {plural(num_tasks, 'task')} (micro)"
            )

    def _evaluate_set(self, label: str, eval_tasks: EvaluationTasks, *, step: int, tracker_step: int) -> None:
        parts, state, settings = self.parts, self.state, self.parts.settings.evaluation
        tasks, panel = eval_tasks.tasks, eval_tasks.name
        full_label = evaluation_label(label, panel)
        num_rollouts = len(tasks) * settings.num_samples
        self._stage(f"evaluation {full_label}", num_rollouts, num_parallel=parts.settings.num_concurrent)
        rollouts = self.rollouts(training=False)
        began = time.monotonic()
        evaluation, traces = evaluate(
            rollouts, tasks, num_samples=settings.num_samples, label=label, step=step
        )
        seconds = time.monotonic() - began
        for line in require_room(traces, context_length=parts.engine.context_length):
            self.progress.note(f"{full_label}: {line}")
        lost = lost_reasons(traces)
        if not evaluation.num_tasks:
            raise EnvironmentFault(
                f"the evaluation {full_label!r} has no result, every rollout was lost to a fault: "
                f"{fault_line(lost)}"
            )
        is_main = panel == parts.eval_sets[0].name
        values = evaluation_metrics(evaluation, panel="" if is_main else panel) | {"time/evaluation": seconds}
        if is_main and parts.settings.environment.reports_metrics:
            values |= environment_metrics(traces)
        state.metrics.write(step, "eval", values)
        number = len(self.run.finished_evaluations())
        state.files.write_evaluation(parts, traces, number=number, step=step)
        # Last, because it marks the evaluation as done.
        self.run.add_evaluation(
            evaluation,
            split=eval_tasks.split,
            temperature=settings.temperature,
            tasks_hash=(tasks_hash := hash_tasks(tasks)),
            num_training_tasks=eval_tasks.num_training_tasks,
            panel=panel,
            truncation=settings.truncation,
        )
        self.trackers.log(tracker_step, values)
        self.trackers.log_rollouts(tracker_step, traces, label=full_label)
        repeated = (
            f", {plural(evaluation.num_retries, 'try', 'tries')} repeated" if evaluation.num_retries else ""
        )
        if len(evaluation.fault_reasons) > len(lost):
            self.progress.note(
                f"evaluation {full_label}: all faults, also of repeated tries and of closed environments: "
                f"{fault_line(evaluation.fault_reasons)}"
            )
        gain = gain_over_start(
            [entry for entry in self.run.finished_evaluations() if entry.get("panel", "") == panel]
        )
        conditions = describe_conditions(
            split=eval_tasks.split,
            panel_hash=tasks_hash,
            temperature=settings.temperature,
            num_samples=settings.num_samples,
            truncation=settings.truncation,
        )
        kind = kind_of_tasks(len(tasks), eval_tasks.num_training_tasks)
        self.progress.note(
            f"{full_label}: {score(evaluation.score, evaluation.ci_low, evaluation.ci_high)}"
            f"{format_mean_return(evaluation.score, evaluation.mean_return)} "
            f"on {plural(evaluation.num_tasks, kind.replace('tasks', 'task', 1), kind)}, "
            f"{plural(evaluation.num_faults, 'fault')}"
            f"{': ' if lost else ''}{fault_line(lost)}{repeated}{'' if gain is None else f'; {gain}'}; "
            f"{conditions}",
            event="evaluation",
            **evaluation_fields(evaluation),
            **({"panel": panel} if panel else {}),
        )

    def _pending_sets(self, label: str) -> list[EvaluationTasks]:
        """The evaluation sets without a result of this evaluation, in order."""
        done = {
            entry.get("panel", "") for entry in self.run.finished_evaluations() if entry["label"] == label
        }
        return [entry for entry in self.parts.eval_sets if entry.tasks and entry.name not in done]

    @property
    def _last_label(self) -> str:
        if not self.parts.settings.train.num_steps and self.parts.settings.cold_start.num_examples:
            return "after cold start"  # supervised fine-tuning and nothing else
        return f"after {self.parts.algorithm.label.upper()}"

    def _evaluates_now(self) -> bool:
        """Whether there is an evaluation after the current step, which the last one does not need."""
        every, step = self.parts.settings.evaluation.every, self.state.step
        is_last = step >= self.parts.settings.train.num_steps or self._is_budget_spent()
        return bool(every) and step % every == 0 and not is_last

    def _is_budget_spent(self) -> bool:
        budget = self.parts.settings.train.max_policy_tokens
        return budget is not None and self.state.num_policy_tokens >= budget

    def _save(self) -> None:
        began = time.monotonic()
        self.state.save()
        self.checkpoint_seconds = time.monotonic() - began
        path = checkpoints_newest_first(self.run.checkpoints)[0]
        self.progress.note(
            f"checkpoint: {shlex.quote(str(path))} in {self.checkpoint_seconds:.1f} s",
            event="checkpoint",
            step=self.state.step,
            path=str(path),
        )

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise _StopRequested

    def _tick(self, rollouts: str) -> None:
        """Display how many rollouts are done. Raises _StopRequested if a stop was requested."""
        self.progress.advance(self.num_done, phase="collecting rollouts", rollouts=rollouts)
        self._raise_if_stopped()

    def _stage(self, name: str, total: int, *, num_parallel: int = 1) -> None:
        self.num_done = 0
        self.progress.stage(name, total, done=0, num_parallel=num_parallel)

    def _show_training(self) -> None:
        self.num_done = self.state.step
        total = self.parts.settings.train.num_steps
        self.progress.stage("train", total, done=self.num_done, unit="step")

    def _note_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.progress.note(line)


def assign_step_advantages(parts: Components, traces: Sequence[Trace]) -> list[GroupAdvantages]:
    """Assign advantages to the groups of an update; one entry per group.

    If the reward counts a KL term, it is measured first.
    """
    if parts.settings.algorithm.rewards_kl and parts.learner.has_reference:
        # Before the update, so that the KL is that of the policy that sampled the tokens.
        parts.learner.score(traces)
    return parts.algorithm.assign_step_advantages(traces)
