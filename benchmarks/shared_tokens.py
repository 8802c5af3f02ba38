"""Tokens that an update computes for recorded rollouts: every rollout by itself, shared nodes once, and equal
texts once.

    python -m benchmarks.shared_tokens RUN [RUN ...]

A prompt and the prefix that forks share are nodes of the tree of a group. Siblings with equal texts after
equal texts have nodes of their own, which packing merges (``outrider.training.packing``). Texts that the
policy did not write are counted with the tokenizer of the run's model. Groups without signal are included,
although an update skips them.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.markdown_table import markdown
from outrider.config import load_settings
from outrider.engines.local.model import load_model
from outrider.tokens import Tokenizer
from outrider.training.settings import RunSettings
from outrider.viewer.records import TraceReader, TraceRow

HEADER = ("run", "steps", "every rollout", "shared nodes once", "the same text once", "less")


def counted(rows: Sequence[TraceRow], tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the tokens of the groups of a step: summed over rollouts, over nodes, and over different texts
    after equal texts.
    """
    sizes: dict[str, int] = {}

    def size(row: TraceRow) -> int:
        if row.tokens:
            return len(row.tokens)
        if row.text not in sizes:
            sizes[row.text] = len(tokenizer.encode(row.text, add_special_tokens=False))
        return sizes[row.text]

    alone = sum(size(row) for path in rollout_paths(rows) for row in path)
    nodes = sum(size(row) for row in rows)
    places = {
        tuple(row.text for row in path[: depth + 1]): path[depth]
        for path in rollout_paths(rows)
        for depth in range(len(path))
    }
    return alone, nodes, sum(size(row) for row in places.values())


def rollout_paths(rows: Sequence[TraceRow]) -> Iterable[list[TraceRow]]:
    """The nodes of each rollout from the root to its leaf."""
    by_id = {(row.trace_id, row.node_id): row for row in rows}
    for leaf in rows:
        if leaf.outcome is None:
            continue
        path = [leaf]
        while path[-1].parent_id >= 0:
            path.append(by_id[path[-1].trace_id, path[-1].parent_id])
        yield path[::-1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    lines = []
    for run in parser.parse_args().runs:
        name = load_settings(RunSettings, file=run / "config.toml").model.name
        tokenizer = load_model(name, precision="float32").tokenizer
        reader = TraceReader(run / "traces")
        alone, nodes, texts = map(
            sum, zip(*(counted(reader.read(step), tokenizer) for step in reader.steps()), strict=True)
        )
        lines.append(
            (
                run.name,
                str(len(reader.steps())),
                f"{alone:,}",
                f"{nodes:,}",
                f"{texts:,}",
                f"{100 * (1 - texts / nodes):.0f} %",
            )
        )
    Console(soft_wrap=True).print(markdown(HEADER, lines))


if __name__ == "__main__":
    main()
