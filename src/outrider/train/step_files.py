"""What a step and an evaluation leave in the run directory beside metrics: nodes, rollouts, and what changed
in memories."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.memory.changes import MemoryChange
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.metrics.trace_records import NodeValues, rows_of
from outrider.train.update.token_record import values_by_node
from outrider.train.update.update import UpdateReport, mini_batches_of
from outrider.watch.memory_rows import MemoryWriter
from outrider.watch.rollout_rows import RolloutWriter
from outrider.watch.traces import TraceWriter


@dataclass(frozen=True, slots=True)
class RecordFiles:
    """The three folders of a run."""

    traces: TraceWriter
    rollouts: RolloutWriter
    memory: MemoryWriter

    @classmethod
    def of(cls, run: Path) -> "RecordFiles":
        """Below a run directory."""
        return cls(TraceWriter(run / "traces"), RolloutWriter(run), MemoryWriter(run))

    def resume(self, step: int) -> int:
        """Remove what came after the checkpoint step; return how many files."""
        return sum(one.resume(step) for one in (self.traces, self.rollouts, self.memory))

    def write_step(
        self, parts: Components, traces: Sequence[Trace], values: NodeValues, *, step: int
    ) -> None:
        """Of a training step that has ended; what tells that it was played comes last. Raises OSError."""
        rows = rows_of(traces, step=step, tokenizer=parts.renderer.tokenizer, values=values)
        changes = [*parts.algorithm.memory_changes()]
        if parts.buffer is not None:
            changes.append(MemoryChange(memory="steps", change="revision", version=parts.buffer.revision))
        self.memory.write(step, changes)
        self.rollouts.write(step, rows.rollouts)
        self.traces.write(step, rows.nodes)

    def write_evaluation(self, parts: Components, traces: Sequence[Trace], *, number: int, step: int) -> None:
        """Of the evaluation that will be line ``number`` of ``evaluations.jsonl``. Raises OSError."""
        rows = rows_of(traces, step=step, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_evaluation(number, rows.rollouts)
        self.traces.write_evaluation(number, rows.nodes)

    def write_experts(self, parts: Components, traces: Sequence[Trace]) -> None:
        """The expert rollouts of the cold start. Raises OSError."""
        rows = rows_of(traces, step=0, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_experts(rows.rollouts)
        self.traces.write_experts(rows.nodes)


def seen_by_update(parts: Components, trained: Sequence[Trace], updated: UpdateReport) -> NodeValues:
    """What the update saw of the tokens of these groups, which it trained on in this order."""
    mini_batches = mini_batches_of(trained, parts.settings.update.num_mini_batches)
    return values_by_node(mini_batches, updated.tokens)
