"""How many held-out tasks of an evaluation have the same answers, independently of the question:

    python -m benchmarks.same_answers RUN ... --words billing,shipping,returns urgent,normal

A policy that converges to one answer scores as often as that answer is right, without learning to read. The
first of the words in each turn counts. Prints one line per run.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "--words", nargs="+", required=True, help="those of the first turn, of the second, ... with commas"
    )
    arguments = parser.parse_args(given)
    words = [one.split(",") for one in arguments.words]
    for run in arguments.runs:
        file = sorted((run / "traces").glob("evaluation-*.parquet"))[-1]
        number, answers, total = most_common(file, words)
        told = ", ".join(one or "none of them" for one in answers)
        print(f"{run.name}: {number} of {total} got {told}")
    return 0


def most_common(file: Path, words: Sequence[Sequence[str]]) -> tuple[int, tuple[str, ...], int]:
    """How often the most common answers were given, these, and of how many tasks."""
    turns: dict[str, list[str]] = defaultdict(list)
    for row in pq.read_table(file, columns=["task_key", "origin", "text"]).to_pylist():
        if row["origin"] == "policy":
            turns[row["task_key"]].append(row["text"].lower())
    said = Counter(
        tuple(first_of(text, known) for text, known in zip(texts, words, strict=False))
        for texts in turns.values()
    )
    [(answers, number)] = said.most_common(1)
    return number, answers, len(turns)


def first_of(text: str, words: Sequence[str]) -> str:
    """Return the word that occurs first in the text; empty if none occurs."""
    return min(((text.find(one), one) for one in words if one in text), default=(0, ""))[1]


if __name__ == "__main__":
    raise SystemExit(main())
