"""A run directory for analysis: settings, and metrics, evaluations and traces as Arrow tables
(``.to_pandas()`` needs pandas)."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import DataError
from outrider.viewer.run_reader import read_records, task_evaluation_message

if TYPE_CHECKING:
    import pyarrow as pa

    from outrider.training.settings import RunSettings


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """Reads what is on disk when it is asked, so a run that goes on may be looked at. Raises DataError for
    damaged files."""

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> "Run":
        """Raises DataError where no run directory is."""
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
        """The resolved recipe as it is on file; needs none of its plug-ins."""
        return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))

    @property
    def settings(self) -> "RunSettings":
        """The same, checked. Raises ConfigError where a plug-in cannot be imported."""
        from outrider.training.run_dir import recorded_settings

        return recorded_settings(self.path / "config.toml")

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def metrics(self, kind: Literal["train", "sft", "eval"] = "train") -> "pa.Table":
        """One row per step, one column a metric (docs/metrics.md); null where it was not defined."""
        records = read_records(self.path / "metrics.jsonl")
        return _table(record for record in records if record.get("kind") == kind)

    def evaluations(self) -> "pa.Table":
        """One row per evaluation, in the order of play; the score with its 95 % interval in columns of their
        own."""
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
        """Training steps with traces on file."""
        from outrider.viewer.records import TraceReader

        return TraceReader(self.path / "traces").steps()

    def traces(self, step: int) -> "pa.Table":
        """The nodes of a training step's rollouts, one per row."""
        return self._parquet(f"step-{step:06d}.parquet")

    def evaluation_traces(self, number: int) -> "pa.Table":
        """Those of the evaluation in row ``number`` of :meth:`evaluations`."""
        return self._parquet(f"evaluation-{number:03d}.parquet")

    def rollouts(self, step: int | None = None) -> "pa.Table":
        """The rollouts of a training step, or without ``step`` of all of them in order: one per row, with its
        step, faulted ones with their reason. Of a run of version 1 of the records, which has none of those,
        they are made from the nodes.
        """
        import pyarrow as pa

        from outrider.viewer.records import ROLLOUT_SCHEMA, ROLLOUTS, StepFiles, read_rollouts, step_file

        if step is not None:
            return read_rollouts(self.path, step_file(step))
        steps = sorted({*self.steps(), *StepFiles(self.path / ROLLOUTS).steps()})
        tables = [read_rollouts(self.path, step_file(training_step)) for training_step in steps]
        return pa.concat_tables(tables, promote_options="default") if tables else ROLLOUT_SCHEMA.empty_table()

    def evaluation_rollouts(self, number: int) -> "pa.Table":
        """Those of the evaluation in row ``number`` of :meth:`evaluations`."""
        from outrider.viewer.records import evaluation_file, read_rollouts

        return read_rollouts(self.path, evaluation_file(number))

    def expert_rollouts(self) -> "pa.Table":
        """The expert rollouts of the cold start, one per row, as of :meth:`rollouts`. Raises DataError for a
        run without any on file.
        """
        from outrider.viewer.records import EXPERTS_FILE, read_rollouts

        return read_rollouts(self.path, EXPERTS_FILE)

    def memory_changes(self, step: int) -> "pa.Table":
        """What a training step brought into memories and took out of them; no row where nothing changed."""
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
    """Columns in the order in which they first appear; a row without one has null there."""
    import pyarrow as pa

    records = list(rows)
    names = dict.fromkeys(name for row in records for name in row)
    return pa.table({name: pa.array([row.get(name) for row in records]) for name in names})
