"""The training loop: buffer, cold start, then steps of rollout, credit and update, with evaluations between."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from outrider.algorithms.base import GroupCredit, Remembering
from outrider.algorithms.empo2 import Empo2, Empo2Settings, never_shows_a_tip
from outrider.algorithms.grpo import GrpoSettings
from outrider.algorithms.reinforce_plus_plus import ReinforcePlusPlusSettings
from outrider.algorithms.retrieval_hook import RetrievalHook
from outrider.environments.datasets import panel_hash
from outrider.environments.tool_episode import EpisodeConfig
from outrider.errors import CheckpointError
from outrider.evals.runner import evaluate
from outrider.metrics.writer import MetricsWriter
from outrider.rollout.branch import Brancher
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.trace import Trace
from outrider.train.checkpoint import (
    checkpoints_newest_first,
    load_checkpoint,
    load_memory,
    load_reference,
    prune_checkpoints,
    save_checkpoint,
    save_reference,
)
from outrider.train.components import Components
from outrider.train.credit_stage import credit_step
from outrider.train.evolving import evolve_buffer
from outrider.train.imitation import imitate_experts
from outrider.train.mixing import interleaved, mix_in
from outrider.train.run_directory import RunDirectory
from outrider.train.sampling import play_step
from outrider.train.step_metrics import (
    branch_metrics,
    credit_metrics,
    diversity,
    retrieval_metrics,
    rollout_metrics,
    timing_metrics,
)
from outrider.train.tip_metrics import tip_metrics
from outrider.train.trace_rows import rows_of
from outrider.train.update import update
from outrider.watch.progress import Progress
from outrider.watch.traces import TraceWriter
from outrider.watch.trackers import TrackerSet


class _StopRequested(Exception):
    """Raised where work can be given up without harm."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One run. ``stop`` is set by a signal handler: an update in flight ends, anything else is given up; what was finished
    is then in a checkpoint."""

    run: RunDirectory
    parts: Components
    progress: Progress
    trackers: TrackerSet
    metrics: MetricsWriter = field(init=False)
    traces: TraceWriter = field(init=False)
    step: int = 0
    num_policy_tokens: int = 0
    task_cursor: int = 0  # tasks taken so far
    saved_step: int = -1
    stop: Event = field(default_factory=Event)
    num_done: int = 0  # of the stage that is shown

    def __post_init__(self) -> None:
        self.metrics = MetricsWriter(self.run.path / "metrics.jsonl")
        self.traces = TraceWriter(self.run.path / "traces")

    def train(self) -> None:
        """Everything that is still to do, from the newest checkpoint on, or until a stop is asked for."""
        try:
            self._train()
        except _StopRequested:
            if self.step and self.saved_step != self.step:
                self._save()
            saved = f"the checkpoint of step {self.step} is written" if self.saved_step >= 0 else "nothing was trained yet"
            self.progress.note(
                f"stopped on request after step {self.step} of {self.parts.settings.train.num_steps}, {saved}; "
                f"continue with: outrider train --resume {self.run.path}"
            )

    def _leave_if_asked(self) -> None:
        if self.stop.is_set():
            raise _StopRequested

    def _train(self) -> None:
        self._leave_if_asked()
        settings = self.parts.settings
        checkpoints = checkpoints_newest_first(self.run.checkpoints)
        if not checkpoints:
            self.run.cut_evaluations(0)
            self.metrics.cut(0)
            self.traces.resume(-1)
            self._warn_of_no_tips()
            given = settings.model.initial_checkpoint
            self._evaluate("before training" if given is None else f"of {given}")
            self._cold_start()
            self._freeze_reference()
            self._save()
        else:
            state = self._load_newest(checkpoints)
            if self._is_finished():
                self.progress.note(f"this run is finished: {self.step} of {settings.train.num_steps} steps; nothing to do")
                return
            self._rewind(state)
        if settings.cold_start.num_examples:
            self._evaluate("after cold start")
        every = settings.evaluation.every
        if every and 0 < self.step < settings.train.num_steps and self.step % every == 0:
            self._evaluate(f"step {self.step}")  # where a stop came between the step and its evaluation
        self._stage("train", settings.train.num_steps, done=self.step)
        while self.step < settings.train.num_steps and not self._budget_spent():
            self._train_step()
            self._leave_if_asked()
            if every and self.step % every == 0 and self.step < settings.train.num_steps:
                self._evaluate(f"step {self.step}")
                self._stage("train", settings.train.num_steps, done=self.step)
            if self.step % settings.train.checkpoint_every == 0:
                self._save()
        if self.step and self.saved_step != self.step:
            self._save()
        if self.step:
            self._evaluate(self._last_label)

    @property
    def _last_label(self) -> str:
        chosen = self.parts.settings.algorithm
        name = chosen.preset if isinstance(chosen, GrpoSettings | ReinforcePlusPlusSettings) else chosen.type
        if not self.parts.settings.train.num_steps and self.parts.settings.cold_start.num_examples:
            return "after cold start"  # supervised fine-tuning and nothing else
        plain = not self.parts.algorithm.hooks  # without hybrid rollouts, or without tips and novelty, it is GRPO, bit for bit
        novelty = isinstance(chosen, Empo2Settings) and chosen.intrinsic_coefficient > 0
        is_grpo = chosen.type in ("rapo", "empo2") and plain and not novelty
        return f"after {'GRPO' if is_grpo else name.upper()}"

    def _is_finished(self) -> bool:
        """Whether all steps are done and the last evaluation, where there is a panel, is on file."""
        ended = self.step >= self.parts.settings.train.num_steps or self._budget_spent()
        return ended and (
            not self.parts.test_tasks or any(one["label"] == self._last_label for one in self.run.finished_evaluations())
        )

    def _stage(self, name: str, total: int, *, done: int = 0) -> None:
        self.num_done = done
        self.progress.stage(name, total)

    def _budget_spent(self) -> bool:
        budget = self.parts.settings.train.max_policy_tokens
        return budget is not None and self.num_policy_tokens >= budget

    def _cold_start(self) -> None:
        if not self.parts.settings.cold_start.num_examples:
            return

        def on_step(done: int, values: dict[str, float]) -> None:
            self.metrics.write(done, "sft", values)
            self.num_done = done
            self.progress.advance(done, loss=values["sft/loss"])
            self._leave_if_asked()

        self.parts.engine.free_cache()
        imitate_experts(self.parts, stage=self._stage, note=self.progress.note, on_step=on_step)

    def _freeze_reference(self) -> None:
        """The KL term holds the policy to what it was when reinforcement learning began."""
        if self.parts.reference is not None:
            self.parts.reference = self.parts.policy.frozen_copy()
            save_reference(self.run.path / "reference.safetensors", self.parts.reference)

    def scheduler(self, *, training: bool) -> Scheduler:
        """The rollout scheduler of training (with the algorithm's hooks) or of evaluation (without any)."""
        settings, parts = self.parts.settings, self.parts

        def on_finished(done: int, total: int) -> None:
            if not training:
                self.num_done = done
            self.progress.advance(self.num_done, rollouts=f"{done}/{total}")
            self._leave_if_asked()

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
            on_finished=on_finished,
        )

    def _train_step(self) -> None:
        """Rollout, credit, update, record."""
        began = time.perf_counter()
        parts = self.parts
        counts = [dict(hook.counts) for hook in self._retrieval_hooks]
        try:
            report = play_step(parts, self.scheduler(training=True), step=self.step, cursor=self.task_cursor)
        except _StopRequested:
            self._restore_counts(counts)  # the step is given up: it will be played again, to the same bits
            raise
        replayed, mixed = mix_in(parts, report.traces, step=self.step)
        rolled = time.perf_counter()
        parts.engine.free_cache()
        credits_ = credit_step(parts, report.trained)
        updated = update(
            parts.policy,
            interleaved(report.trained, replayed),
            objective=parts.algorithm.objective,
            settings=parts.settings.update,
            reference=parts.reference,
            first=parts.policy.num_steps == 0,
            gate_always=parts.settings.engine.type == "vllm",
            on_batch=lambda num_tokens: self.progress.advance(self.num_done, trained=num_tokens),
        )
        parts.engine.weights_changed()
        self.step += 1
        self.task_cursor = report.cursor
        ended = time.perf_counter()
        values = (
            rollout_metrics(report.traces)
            | credit_metrics(credits_)
            | self._tips(report.traces)
            | (branch_metrics(report.traces) if any(isinstance(hook, Brancher) for hook in parts.algorithm.hooks) else {})
            | mixed
            | updated.metrics
            | self._retrieval(report.traces, credits_, counts)
        )
        values["rollout/num_retries"] = float(report.num_retries)
        if report.rule is not None:
            values |= report.metrics(parts.settings.train.tasks_per_step)
        if (spread := diversity(report.traces)) is not None:
            values["rollout/diversity"] = spread
        if parts.buffer is not None:
            values |= evolve_buffer(parts.buffer, report.traces, settings=parts.settings.buffer, step=self.step)
        values |= timing_metrics(
            rollout_s=rolled - began,
            update_s=ended - rolled,
            num_policy_tokens=values.get("tokens/policy", 0.0),
            num_computed_tokens=updated.num_computed_tokens,
        )
        self.num_policy_tokens += int(values.get("tokens/policy", 0.0) + values.get("tokens/remarks", 0.0))
        values["tokens/policy_total"] = float(self.num_policy_tokens)
        values["grad/learning_rate"] = parts.policy.learning_rate
        self.traces.write(self.step, rows_of(report.traces, step=self.step, tokenizer=parts.renderer.tokenizer))
        self.metrics.write(self.step, "train", values)
        self.trackers.log(self.step, values)
        self._warn(values)
        self._show(values)

    def _warn(self, values: dict[str, float]) -> None:
        """Say aloud what a run must not do in silence."""
        if isinstance(self.parts.settings.environment, EpisodeConfig) and values.get("rollout/num_tool_calls") == 0.0:
            self.progress.note(f"ALARM: no rollout of step {self.step} executed a tool call; look at the sample rollouts")
        if missing := values.get("group/num_missing"):
            self.progress.note(
                f"step {self.step}: {missing:.0f} of {self.parts.settings.train.tasks_per_step} groups are missing after "
                f"{values['group/num_extra_batches']:.0f} extra batches without spread; trained on the others"
            )

    def _warn_of_no_tips(self) -> None:
        train, num_tasks = self.parts.settings.train, len(self.parts.train_tasks)
        chosen, num_groups = self.parts.settings.algorithm, train.num_steps * train.tasks_per_step
        if isinstance(chosen, Empo2Settings) and never_shows_a_tip(chosen, num_groups=num_groups, num_tasks=num_tasks):
            self.progress.note(
                f"NO TIPS: {num_groups} groups play none of the {num_tasks} tasks twice, and a task is shown its own tips only; "
                "algorithm.memory.scope=all shares them"
            )

    def _tips(self, traces: Sequence[Trace]) -> dict[str, float]:
        algorithm = self.parts.algorithm
        return tip_metrics(traces, algorithm.tips) if isinstance(algorithm, Empo2) else {}

    @property
    def _retrieval_hooks(self) -> list[RetrievalHook]:
        return [hook for hook in self.parts.algorithm.hooks if isinstance(hook, RetrievalHook)]

    def _restore_counts(self, saved: Sequence[dict[str, int]]) -> None:
        for hook, counts in zip(self._retrieval_hooks, saved, strict=True):
            hook.counts = Counter(counts)

    def _retrieval(
        self, traces: Sequence[Trace], credits_: Sequence[GroupCredit], before: Sequence[dict[str, int]]
    ) -> dict[str, float]:
        if not self._retrieval_hooks:
            return {}
        counts = {name: number - before[0].get(name, 0) for name, number in self._retrieval_hooks[0].counts.items()}
        return retrieval_metrics(traces, credits_, self.parts.algorithm.modes, counts)

    def _show(self, values: dict[str, float]) -> None:
        shown = {
            "reward": "reward/mean",
            "no signal": "group/fraction_without_signal",
            "tokens/s": "speed/rollout_tokens",
            "s/step": "time/step",
        }
        self.num_done = self.step
        self.progress.advance(self.step, **{name: values[key] for name, key in shown.items() if key in values})

    def _evaluate(self, label: str) -> None:
        """Play the frozen panel unless its result is on file already."""
        settings = self.parts.settings.evaluation
        if not self.parts.test_tasks or any(one["label"] == label for one in self.run.finished_evaluations()):
            return
        self._stage(f"evaluate {label}", len(self.parts.test_tasks) * settings.num_samples)
        scheduler = self.scheduler(training=False)
        evaluation, _ = evaluate(scheduler, self.parts.test_tasks, num_samples=settings.num_samples, label=label, step=self.step)
        values = {
            "eval/score": evaluation.score,
            "eval/ci_low": evaluation.ci_low,
            "eval/ci_high": evaluation.ci_high,
            "eval/num_tasks": float(evaluation.num_tasks),
            "eval/num_faults": float(evaluation.num_faults),
        }
        self.metrics.write(self.step, "eval", values)
        # Last, because it marks the evaluation as done.
        self.run.add_evaluation(
            evaluation, split=settings.split, temperature=settings.temperature, panel_hash=panel_hash(self.parts.test_tasks)
        )
        self.trackers.log(self.step, values)
        self.progress.note(
            f"{label}: {100 * evaluation.score:.1f} % [{100 * evaluation.ci_low:.1f}, {100 * evaluation.ci_high:.1f}] "
            f"on {evaluation.num_tasks} held-out tasks, {evaluation.num_faults} faults"
        )

    def _checkpoint_path(self) -> Path:
        return self.run.checkpoints / f"step-{self.step:06d}"

    def _save(self) -> None:
        buffer = self.parts.buffer
        state: dict[str, Any] = {
            "step": self.step,
            "num_policy_tokens": self.num_policy_tokens,
            "task_cursor": self.task_cursor,
            "num_metric_records": self.metrics.num_records,
            "num_evaluations": len(self.run.finished_evaluations()),
            "buffer_revision": buffer.revision if buffer is not None else None,
            "hook_counts": [dict(hook.counts) for hook in self._retrieval_hooks],
        }
        arrays = None
        if isinstance(self.parts.algorithm, Remembering):
            state["memory"], arrays = self.parts.algorithm.memory_state()
        save_checkpoint(self._checkpoint_path(), self.parts.policy, state, arrays)
        self.saved_step = self.step
        prune_checkpoints(self.run.checkpoints, keep=self.parts.settings.train.keep_checkpoints)

    def _load_newest(self, checkpoints: Sequence[Path]) -> dict[str, Any]:
        """Weights and optimiser of the newest checkpoint that can be read; its state. Raises CheckpointError if none can."""
        for checkpoint in checkpoints:
            try:
                state = load_checkpoint(checkpoint, self.parts.policy)
            except CheckpointError as error:
                if checkpoint == checkpoints[-1]:
                    raise
                self.progress.note(f"DAMAGED CHECKPOINT, going back to an older one: {error}")
                continue
            self.step = self.saved_step = int(state["step"])
            self.num_policy_tokens = int(state["num_policy_tokens"])
            self.task_cursor = int(state.get("task_cursor", self.step * self.parts.settings.train.tasks_per_step))
            if isinstance(self.parts.algorithm, Remembering):
                self.parts.algorithm.restore_memory(state["memory"], load_memory(checkpoint))
            return state
        raise CheckpointError(f"{self.run.path} has no checkpoint")

    def _rewind(self, state: dict[str, Any]) -> None:
        """Take back what was written after the checkpoint: it is computed again, to the same bits."""
        if self.parts.reference is not None:
            load_reference(self.run.path / "reference.safetensors", self.parts.reference)
        self.metrics.cut(int(state["num_metric_records"]))
        self.run.cut_evaluations(int(state["num_evaluations"]))
        self.traces.resume(self.step)
        self._restore_counts(state["hook_counts"])
        if (buffer := self.parts.buffer) is not None and buffer.revision != state["buffer_revision"]:
            if not self.parts.settings.buffer.evolve:
                raise CheckpointError(
                    f"the step-trace buffer is at revision {buffer.revision}; the checkpoint used {state['buffer_revision']}"
                )
            buffer.rollback(int(state["buffer_revision"]))
        self.parts.engine.weights_changed()
        self.progress.note(f"continuing from step {self.step}")
