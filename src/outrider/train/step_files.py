"""What a step and an evaluation leave in the run directory beside metrics: nodes, rollouts, and what changed
in memories."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.memory.changes import MemoryChange
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.metrics.trace_records import NodeValues, trace_rows
from outrider.train.update.token_record import values_by_node
from outrider.train.update.update import UpdateReport, split_mini_batches
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
    def from_run(cls, run: Path) -> "RecordFiles":
        """Below a run directory."""
        return cls(TraceWriter(run / "traces"), RolloutWriter(run), MemoryWriter(run))

    def resume(self, step: int) -> int:
        """Remove what came after the checkpoint step; return how many files."""
        return sum(writer.resume(step) for writer in (self.traces, self.rollouts, self.memory))

    def write_step(
        self, parts: Components, traces: Sequence[Trace], values: NodeValues, *, step: int
    ) -> None:
        """Of a training step that has ended; what tells that it was played comes last. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer, values=values)
        changes = [*parts.algorithm.memory_changes()]
        if parts.buffer is not None:
            changes.append(MemoryChange(memory="steps", change="revision", version=parts.buffer.revision))
        self.memory.write(step, changes)
        self.rollouts.write(step, rows.rollouts)
        self.traces.write(step, rows.nodes)

    def write_evaluation(self, parts: Components, traces: Sequence[Trace], *, number: int, step: int) -> None:
        """Of the evaluation that will be line ``number`` of ``evaluations.jsonl``. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_evaluation(number, rows.rollouts)
        self.traces.write_evaluation(number, rows.nodes)

    def write_experts(self, parts: Components, traces: Sequence[Trace]) -> None:
        """The expert rollouts of the cold start. Raises OSError."""
        rows = trace_rows(traces, step=0, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_experts(rows.rollouts)
        self.traces.write_experts(rows.nodes)


def collect_node_values(
    parts: Components, trained: Sequence[Trace], update_report: UpdateReport
) -> NodeValues:
    """What the update saw of the tokens of these groups, which it trained on in this order."""
    mini_batches = split_mini_batches(trained, parts.settings.update.num_mini_batches)
    return values_by_node(mini_batches, update_report.tokens)
