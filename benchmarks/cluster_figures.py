"""Costs and gains of several processes, compared with the limits of the design (docs/benchmarks.md).

    python -m benchmarks.cluster_figures [--model smollm2-135m-instruct] [--pairs 3] [--only restarts ...]

Each process has one thread. With two cores nothing else may run: two ranks, or an engine and a trainer, need
one each. Seconds depend on the machine; compare the ratios.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.cluster_measures import (
    Figure,
    imbalance,
    loop_lag,
    overlap,
    recovery,
    restarts,
    transfer,
    two_ranks,
)
from benchmarks.markdown_table import markdown

MEASURES: Final = (imbalance, two_ranks, transfer, restarts, recovery, loop_lag, overlap)


def main() -> None:
    """Print the table, row by row as they are measured."""
    parser = argparse.ArgumentParser(description="Figures of a run on several processes.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=3, help="repetitions; medians are printed")
    parser.add_argument("--only", nargs="+", choices=[each.__name__ for each in MEASURES], metavar="NAME")
    given = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for measure in MEASURES:
            if given.only and measure.__name__ not in given.only:
                continue
            found = measure(given.model, Path(folder), given.pairs)
            figures += found
            for one in found:
                print(f"{one.name}: {one.measured}", flush=True)
    print(markdown(["figure", "measured", "accepted"], [[f.name, f.measured, f.accepted] for f in figures]))


if __name__ == "__main__":
    main()
