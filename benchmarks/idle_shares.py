"""How long the processes of a run waited for each other, step by step, from its metrics.

    python -m benchmarks.idle_shares --run runs/demo-cluster

With rollouts during updates, the first step generates two batches.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.markdown_table import markdown
from outrider.viewer.run_reader import finite, read_records

COLUMNS = {
    "rollouts, s": "time/rollout",
    "update, s": "time/update",
    "step, s": "time/step",
    "trainers idle": "time/idle_trainers",
    "engines idle": "time/idle_engines",
    "age of tokens": "staleness/mean",
    "weights, s": "time/weights",
    "no signal": "group/fraction_without_signal",
    "gradient norm": "grad/norm",
}


def rows(run: Path) -> list[list[str]]:
    """A row per training step, and their medians."""
    steps = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]
    columns = [[finite(record.get(key)) for record in steps] for key in COLUMNS.values()]
    cells = [
        ["–" if value is None else f"{value:.2f}" for value in [*column, _median(column)]]
        for column in columns
    ]
    names = [*(str(record["step"]) for record in steps), "median"]
    return [list(row) for row in zip(names, *cells, strict=True)]


def _median(column: Sequence[float | None]) -> float | None:
    known = [value for value in column if value is not None]
    return median(known) if known else None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Idle shares of a run with [cluster].")
    parser.add_argument("--run", type=Path, required=True)
    print(markdown(["step", *COLUMNS], rows(parser.parse_args().run)))


if __name__ == "__main__":
    main()
