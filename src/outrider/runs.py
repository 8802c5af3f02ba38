"""A run directory for analysis: settings, and metrics, evaluations and traces as Arrow tables
(``.to_pandas()`` needs pandas)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import DataError
from outrider.files import read_toml
from outrider.viewer.run_reader import numbered_checkpoints, read_records, task_evaluation_message

if TYPE_CHECKING:
    import pyarrow as pa

    from outrider.training.settings import RunSettings


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run directory. Every call reads the files again, so you can inspect a run while it is training.
    Raises DataError for damaged files.
    """

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> "Run":
        """Open a run directory. Raises DataError if ``path`` is not one."""
        if not (path / "config.toml").is_file():
            raise DataError(
                task_evaluation_message(path) or f"{path} is no run directory: it has no config.toml"
            )
        return cls(path)

    def __repr__(self) -> str:
        """Folder, method, task, steps and the last score."""
        from outrider.viewer.summary import one_line_summary

        return f"<Run {self.path}: {one_line_summary(self.path)}>"

    @property
    def config(self) -> dict[str, Any]:
        """The stored resolved recipe, which can be read without the run's plug-ins."""
        return read_toml(self.path / "config.toml")

    @property
    def settings(self) -> "RunSettings":
        """The validated settings of the run. Raises ConfigError if a plug-in cannot be imported."""
        from outrider.training.run_dir import recorded_settings

        return recorded_settings(self.path / "config.toml")

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        return [path for _, path in numbered_checkpoints(self.path / "checkpoints")]

    def metrics(self, kind: Literal["train", "sft", "eval"] = "train") -> "pa.Table":
        """One row per step and one column per metric (docs/metrics.md); null if the metric was undefined."""
        records = read_records(self.path / "metrics.jsonl")
        return _table(record for record in records if record.get("kind") == kind)

    def evaluations(self) -> "pa.Table":
        """One row per evaluation in chronological order; the score and the bounds of its 95 % interval are
        separate columns."""
        rows = []
        for record in read_records(self.path / "evaluations.jsonl"):
            scores = {
                f"{name}.{part}": value
                for name, interval in record["metric"].items()
                for part, value in interval.items()
            }
            rows.append({key: value for key, value in record.items() if not isinstance(value, dict)} | scores)
        return _table(rows)

    def steps(self) -> tuple[int, ...]:
        """Training steps with stored traces."""
        from outrider.viewer.records import TraceReader

        return TraceReader(self.path / "traces").steps()

    def traces(self, step: int) -> "pa.Table":
        """The nodes of a training step's rollouts, one per row."""
        return self._parquet(f"step-{step:06d}.parquet")

    def evaluation_traces(self, number: int) -> "pa.Table":
        """The nodes of the rollouts of the evaluation in row ``number`` of :meth:`evaluations`."""
        return self._parquet(f"evaluation-{number:03d}.parquet")

    def rollouts(self, step: int | None = None) -> "pa.Table":
        """The rollouts of a training step, or of all training steps in order if ``step`` is None. One row per
        rollout with its step; faulted rollouts have their reason. Records of version 1 have no rollout files,
        so their rollouts are derived from the nodes.
        """
        import pyarrow as pa

        from outrider.viewer.records import ROLLOUT_SCHEMA, ROLLOUTS, StepFiles, read_rollouts, step_file

        if step is not None:
            return read_rollouts(self.path, step_file(step))
        steps = sorted({*self.steps(), *StepFiles(self.path / ROLLOUTS).steps()})
        tables = [read_rollouts(self.path, step_file(training_step)) for training_step in steps]
        return pa.concat_tables(tables, promote_options="default") if tables else ROLLOUT_SCHEMA.empty_table()

    def evaluation_rollouts(self, number: int) -> "pa.Table":
        """The rollouts of the evaluation in row ``number`` of :meth:`evaluations`."""
        from outrider.viewer.records import evaluation_file, read_rollouts

        return read_rollouts(self.path, evaluation_file(number))

    def expert_rollouts(self) -> "pa.Table":
        """The expert rollouts of the cold start, one per row, with the columns of :meth:`rollouts`. Raises
        DataError if the run has none.
        """
        from outrider.viewer.records import EXPERTS_FILE, read_rollouts

        return read_rollouts(self.path, EXPERTS_FILE)

    def memory_changes(self, step: int) -> "pa.Table":
        """Tips and stored steps that a training step added to or removed from the memories, one per row."""
        from outrider.viewer.records import MEMORY, MEMORY_SCHEMA, StepFiles, step_file

        files = StepFiles(self.path / MEMORY)
        if step not in files.steps():
            return MEMORY_SCHEMA.empty_table()
        return files.read_table(step_file(step), MEMORY_SCHEMA)

    def _parquet(self, name: str) -> "pa.Table":
        from outrider.viewer.records import SCHEMA, StepFiles

        return StepFiles(self.path / "traces").read_table(name, SCHEMA)


def plot(runs: Mapping[str, Run], metric: str) -> str:
    """Plot a training metric over the steps, one line per run, as an SVG image for an HTML page.

    Args:
        runs: the runs by the label of their line.
        metric: name of a column of :meth:`Run.metrics`.
    """
    from outrider.viewer.report_parts import Chart, Point, Series, svg_chart

    lines = []
    for label, run in runs.items():
        table = run.metrics()
        values = zip(table["step"].to_pylist(), table[metric].to_pylist(), strict=True)
        points = tuple(Point(x=step, value=value) for step, value in values)
        lines.append(Series(label=label, points=points))
    return svg_chart(Chart(title=metric, x_label="step", y_label=metric, series=tuple(lines)))


def _table(rows: Iterable[Mapping[str, Any]]) -> "pa.Table":
    """Build a table with columns in the order of first appearance, and null for missing values."""
    import pyarrow as pa

    records = list(rows)
    names = dict.fromkeys(name for row in records for name in row)
    return pa.table({name: pa.array([row.get(name) for row in records]) for name in names})
