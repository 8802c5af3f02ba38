"""How long the processes of a run waited for each other, step by step, from its metrics.

    python -m benchmarks.idle_shares --run runs/demo-cluster

With rollouts during updates, the first step generates two batches.
"""

import argparse
from pathlib import Path
from statistics import median

from benchmarks.markdown_table import markdown
from outrider.viewer.run_reader import read_records

COLUMNS = {
    "rollouts, s": "time/rollout",
    "update, s": "time/update",
    "step, s": "time/step",
    "trainers idle": "time/idle_trainers",
    "engines idle": "time/idle_engines",
    "age of tokens": "staleness/mean",
}


def rows(run: Path) -> list[list[str]]:
    """A row per training step, and their medians."""
    steps = [one for one in read_records(run / "metrics.jsonl") if one["kind"] == "train"]
    told = [[str(one["step"]), *(f"{one.get(key, 0.0):.2f}" for key in COLUMNS.values())] for one in steps]
    medians = [f"{median(one.get(key, 0.0) for one in steps):.2f}" for key in COLUMNS.values()]
    return [*told, ["median", *medians]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Idle shares of a run with [cluster].")
    parser.add_argument("--run", type=Path, required=True)
    print(markdown(["step", *COLUMNS], rows(parser.parse_args().run)))


if __name__ == "__main__":
    main()
