"""Where a run is and what is on disk of it: checkpoints are written here, and a run that was killed goes back
to one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import CheckpointError
from outrider.metrics.writer import MetricsWriter
from outrider.train.components import Components
from outrider.train.state.checkpoint import (
    load_checkpoint,
    load_memory,
    prune_checkpoints,
    save_checkpoint,
)
from outrider.train.state.checkpoint_state import STATE, damaged, file_checksum, has_checksum
from outrider.train.state.flight_queue import QueueSnapshot, read_snapshot, write_snapshot
from outrider.train.state.queue import QueuedStep, read_queue, write_queue
from outrider.train.state.records import Records
from outrider.train.state.run_directory import RunDirectory
from outrider.train.state.same_inputs import BUFFER, check_inputs, input_digests
from outrider.train.state.same_settings import flat_settings
from outrider.train.state.versions import differences, versions
from outrider.train.step_files import RecordFiles

_COUNTS: Final = ("step", "num_policy_tokens", "num_metric_records", "num_evaluations")


@dataclass(slots=True, kw_only=True)
class RunState:
    """Progress of a run. ``task_cursor`` counts the tasks taken, ``saved_step`` is -1 before the first
    checkpoint.

    All that decides how the run goes on is here, in ``parts`` or in a random stream keyed by the step.
    """

    run: RunDirectory
    parts: Components
    note: Callable[[str], None]
    step: int = 0
    num_policy_tokens: int = 0
    task_cursor: int = 0
    saved_step: int = -1
    queued: QueuedStep | None = (
        None  # the next step's rollouts, where they were played beside this one's update
    )
    # of steps under way: what a checkpoint had, and what asks for it now
    queue_snapshot: QueueSnapshot | None = None
    snapshot_queue: Callable[[], QueueSnapshot] | None = None
    metrics: MetricsWriter = field(init=False)
    files: RecordFiles = field(init=False)
    records: Records = field(init=False)
    _reference_checksum: int | None = None
    _tasks: dict[str, str] = field(init=False)
    _inputs: dict[str, str] = field(init=False)
    _buffer_seen: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.metrics = MetricsWriter(self.run.path / "metrics.jsonl")
        self.files = RecordFiles.from_run(self.run.path)
        self.records = Records(self.run.path)
        self._tasks = {
            "train": hash_tasks(self.parts.train_tasks),
            "held-out": hash_tasks(self.parts.test_tasks),
        }
        self._inputs = input_digests(self.parts)

    @property
    def _reference_path(self) -> Path:
        return self.run.path / "reference.safetensors"

    def close(self) -> None:
        """Release the metrics file; may be called twice."""
        self.metrics.close()

    def begin(self) -> None:
        """Forget what a run left that was killed before its first checkpoint."""
        self.run.cut_evaluations(0)
        self.metrics.cut(0)
        self.files.resume(-1)

    def freeze_reference(self) -> None:
        """The KL term holds the policy to what it was when reinforcement learning began."""
        if self.parts.learner.has_reference:
            self._reference_checksum = self.parts.learner.freeze_reference(self._reference_path)

    def save(self) -> None:
        """Write the checkpoint of this step. Raises CheckpointError, which leaves the earlier ones as they
        were.
        """
        buffer = self.parts.buffer
        write = self._queue_writer()  # first: what it takes in, the memories below have to know
        # Before the revision is written down: a power failure may take commits that were not flushed.
        if buffer is not None and self.parts.settings.buffer.evolve:
            buffer.flush()
        state: dict[str, Any] = {
            "step": self.step,
            "num_policy_tokens": self.num_policy_tokens,
            "task_cursor": self.task_cursor,
            "num_metric_records": self.metrics.num_records,
            "weight_version": self.parts.engine.weight_version,
            "num_evaluations": len(self.run.finished_evaluations()),
            "buffer_revision": buffer.revision if buffer is not None else None,
            "hook_counts": self.parts.algorithm.counts(),
            "reference_checksum": self._reference_checksum,
            "tasks": self._tasks,
            "versions": versions(),
            "settings": flat_settings(self.parts.settings),
            "inputs": self._inputs,
            "buffer_digest": self._buffer_digest(),
        }
        arrays = None
        if self.parts.algorithm.remembers:
            state["memory"], arrays = self.parts.algorithm.state()
        folder = self.run.checkpoints / f"step-{self.step:06d}"
        save_checkpoint(
            folder,
            self.parts.learner,
            state,
            arrays,
            records=self.records.checksums(),
            write_queue=write,
        )
        self.saved_step = self.step
        # Only once the new one is on disk.
        prune_checkpoints(
            self.run.checkpoints, max_checkpoints=self.parts.settings.train.keep_checkpoints, newest=self.step
        )

    def _queue_writer(self) -> Callable[[Path], None] | None:
        if self.snapshot_queue is not None:
            snapshot = self.snapshot_queue()
            return partial(write_snapshot, snapshot=snapshot) if snapshot.steps else None
        return None if self.queued is None else partial(write_queue, queued=self.queued)

    def save_if_new(self) -> None:
        """The same, where a training step has been done since the last one."""
        if self.step and self.saved_step != self.step:
            self.save()

    def check_records(self, state: dict[str, Any] | None = None) -> bool:
        """Tell what is gone of metrics, evaluations and traces, or is not what was written; whether nothing
        is.

        With the ``state`` of a finished run, which loads no reference weights, also of those.
        """
        problems = self.records.problems(self._checkpoint)
        if state is not None and (written := state.get("reference_checksum")) is not None:
            checksum = file_checksum(self._reference_path) if self._reference_path.is_file() else None
            if checksum != written:
                reason = "is missing" if checksum is None else "is not what was written"
                problems.append(f"{self._reference_path.name} {reason}")
        for problem in problems:
            self.note(f"DAMAGED RECORDS, of which weights and training know nothing: {problem}")
        return not problems

    def write_record_checksums(self) -> None:
        """At the end of a run: its last evaluation comes behind its last checkpoint."""
        self.records.write_checksums(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self.run.checkpoints / f"step-{self.saved_step:06d}"

    def load_newest(self, checkpoints: Sequence[Path]) -> dict[str, Any]:
        """Weights and optimiser of the newest checkpoint that can be read; its state. Raises CheckpointError
        if none can.
        """
        for checkpoint in checkpoints:
            try:
                return self._load(checkpoint)
            except CheckpointError as error:
                if checkpoint == checkpoints[-1]:
                    raise
                self.note(f"DAMAGED CHECKPOINT, going back to an older one: {error}")
        raise CheckpointError(f"{self.run.path} has no checkpoint")

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        state = load_checkpoint(checkpoint, self.parts.learner)
        try:
            for name in _COUNTS:
                int(state[name])
            self.step = self.saved_step = int(state["step"])
            self.num_policy_tokens = int(state["num_policy_tokens"])
            self.task_cursor = int(
                state.get("task_cursor", self.step * self.parts.settings.train.tasks_per_step)
            )
            if state["buffer_revision"] is not None:
                int(state["buffer_revision"])
            self.parts.algorithm.restore_counts(state["hook_counts"])
            if self.parts.algorithm.remembers:
                self.parts.algorithm.restore(state["memory"], load_memory(checkpoint))
            if self.parts.settings.cluster.in_flight:
                self.queue_snapshot = read_snapshot(checkpoint)
            else:
                self.queued = read_queue(checkpoint)
            is_checksummed = has_checksum(checkpoint / STATE)
        except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise damaged(checkpoint, error) from error
        if not is_checksummed:
            self.note(
                f"NO CHECKSUM in {STATE} of {checkpoint.name} (an earlier Outrider wrote "
                "none): damage to it goes unnoticed"
            )
        return state

    def rewind(self, state: dict[str, Any], *, last_label: str) -> None:
        """Take back what was written after the checkpoint: it is computed again, to the same bits.

        The evaluation at the end of a run that goes on (``last_label``) stays, as that of its step.

        Raises CheckpointError where that cannot be: other tasks, buffer or reference, or records are gone.
        """
        self.records.require_lines(state)
        for name, tasks_hash in state.get("tasks", {}).items():
            if tasks_hash != self._tasks[name]:
                raise CheckpointError(
                    f"the {name} tasks are not those that this run began with: put the data back, "
                    "or begin a new run with model.initial_checkpoint"
                )
        if "settings" not in state:
            self.note(
                f"NO SETTINGS in {STATE} of {self._checkpoint.name} (an earlier Outrider wrote none): "
                "whether config.toml and "
                "the files that it names are what the run began with is not checked"
            )
        other_versions = differences(state.get("versions", {}))
        inputs = check_inputs(
            state.get("inputs", {}),
            self._inputs,
            other_versions=bool(other_versions),
            allow_changed_plugins=self.run.allow_changed_plugins,
        )
        for difference in [*other_versions, *inputs]:
            self.note(difference)
        are_whole = self.check_records()
        self._reference_checksum = state.get("reference_checksum")
        if self.parts.learner.has_reference:
            self.parts.learner.load_reference(self._reference_path, checksum=self._reference_checksum)
        if (buffer := self.parts.buffer) is not None and buffer.revision != state["buffer_revision"]:
            if self.parts.settings.buffer.evolve:
                buffer.rollback(int(state["buffer_revision"]))
            else:
                buffer.pin(int(state["buffer_revision"]))  # others may have added to it since
        if (began_with := state.get("buffer_digest")) is not None:
            check_inputs({BUFFER: began_with}, {BUFFER: self._buffer_digest()}, other_versions=False)
        # From here on files are cut: whatever can refuse has spoken.
        num_retained = self._retain_last_evaluation(state, last_label)
        self.metrics.cut(int(state["num_metric_records"]) + num_retained)
        self.run.cut_evaluations(int(state["num_evaluations"]) + num_retained)
        self.files.resume(self.step)
        if num_retained and are_whole:
            self.write_record_checksums()  # else a kill before the next checkpoint would leave the new label as damage
        # Its keys and values, if any, are of other weights.
        self.parts.engine.load(int(state.get("weight_version", self.parts.engine.weight_version + 1)))
        self.note(f"continuing from step {self.step}")

    def _retain_last_evaluation(self, state: dict[str, Any], last_label: str) -> int:
        """1 where a shorter run ended at this checkpoint with an evaluation, which is named after its step
        from now on.
        """
        number, label = int(state["num_evaluations"]), f"step {self.step}"
        newer = self.run.finished_evaluations()[number:]
        is_last = (
            len(newer) == 1 and newer[0]["step"] == self.step and newer[0]["label"] in (last_label, label)
        )
        if not is_last or self.metrics.kinds[int(state["num_metric_records"]) :] != [(self.step, "eval")]:
            return 0
        if newer[0]["label"] != label:
            self.run.name_evaluation(number, label)
            self.note(f"the evaluation {last_label!r} of the shorter run is kept as {label!r}")
        return 1

    def _buffer_digest(self) -> str | None:
        """Made once for a revision: most runs never change theirs."""
        if (buffer := self.parts.buffer) is None:
            return None
        if self._buffer_seen is None or self._buffer_seen[0] != buffer.revision:
            self._buffer_seen = buffer.revision, buffer.digest()
        return self._buffer_seen[1]
