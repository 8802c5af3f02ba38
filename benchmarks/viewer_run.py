"""Generates a run directory with many recorded rollouts, the largest case for the viewer.

    python -m benchmarks.viewer_run FOLDER [--rollouts 100000]

One step is generated row by row; the others have its shape and numbers with texts of their own, so that a
search reads as much as in a real run. The texts are words of a fixed list, and the numbers are random.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outrider.types import Origin, Outcome
from outrider.viewer.records import (
    FORMAT,
    ROLLOUT_SCHEMA,
    SCHEMA,
    RolloutRow,
    TraceRow,
    rollout_row,
    rows_to_table,
    step_file,
)

GROUPS, SIZE, TURNS, TOKENS = 16, 16, 3, 40
PER_STEP = GROUPS * SIZE
WORDS = (
    "search",
    "river",
    "answer",
    "the",
    "Vienna",
    "lamp",
    "of",
    "where",
    "bridge",
    "castle",
    "find",
    "open",
)
CONFIG = """seed = 0
[algorithm]
type = "rapo"
[environment]
type = "generated"
[model]
name = "none"
[train]
num_steps = {num_steps}
"""


def write_run(folder: Path, num_rollouts: int) -> Path:
    """A finished run of at least ``num_rollouts``; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = -(-num_rollouts // PER_STEP)
    (folder / "config.toml").write_text(CONFIG.format(num_steps=num_steps))
    nodes, rollouts = one_step()
    node_base, rollout_base = rows_to_table(nodes, SCHEMA), rows_to_table(rollouts, ROLLOUT_SCHEMA)
    traces, index = (_made(folder / name) for name in ("traces", "rollouts"))
    random = np.random.default_rng(1)
    returns = rollout_base["episode_return"].to_numpy(zero_copy_only=False)
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, num_steps + 1):
            suffix = pa.array([f" {step}-{row}" for row in range(len(node_base))])
            _write(
                traces / step_file(step),
                _with(
                    _of_step(node_base, step),
                    "text",
                    pc.binary_join_element_wise(node_base["text"], suffix, ""),
                ),
            )
            moved = np.where(
                np.isnan(returns), np.nan, np.clip(returns + random.normal(0, 0.2, PER_STEP), -1, 2)
            )
            table = _with(_of_step(rollout_base, step), "episode_return", pa.array(moved, from_pandas=True))
            _write(index / step_file(step), table)
            values = {"reward/mean": float(np.nanmean(moved)), "entropy/token_mean": 2.0 / (1 + step / 100)}
            metrics.write(json.dumps({"step": step, "kind": "train", **values, "time/step": 9.0}) + "\n")
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _write(path: Path, table: pa.Table) -> None:
    """Write a file without forcing it to disk, because there are hundreds."""
    pq.write_table(table.replace_schema_metadata(FORMAT), path, compression="zstd")


def one_step() -> tuple[list[TraceRow], list[RolloutRow]]:
    """Return nodes and rollouts; one of 64 rollouts ends in a fault, one of 4 has a retrieved step."""
    random = np.random.default_rng(0)
    nodes: list[TraceRow] = []
    rollouts: list[RolloutRow] = []
    for group in range(GROUPS):
        first = len(nodes)
        nodes.append(_node(group, 0, -1, 0, Origin.PROMPT, _text(random, 60)))
        for rollout in range(SIZE):
            path = [nodes[first], *_turns(random, group, rollout, len(nodes) - first)]
            nodes += path[1:]
            is_lost = (group * SIZE + rollout) % 64 == 63
            leaf = replace(
                path[-1],
                outcome=Outcome.TOOL_FAULT if is_lost else Outcome.FINISHED,
                episode_return=None if is_lost else float(random.integers(2)),
                advantage=None if is_lost else float(random.normal()),
                hybrid=rollout % 4 == 3,
            )
            if not is_lost:
                nodes[-1] = path[-1] = leaf
            rollouts.append(rollout_row(path, leaf, fault="the tool hung up" if is_lost else ""))
    return nodes, rollouts


def _turns(random: np.random.Generator, group: int, rollout: int, node: int) -> Iterator[TraceRow]:
    parent = 0
    for turn in range(TURNS):
        if turn == 1 and rollout % 4 == 3:
            told = json.dumps({"similarity": 0.9, "source": "expert#1", "step_ids": [7], "agent": "expert"})
            yield replace(
                _node(group, node, parent, rollout, Origin.BUFFER, _text(random, 20)), metadata=told
            )
            parent, node = node, node + 1
        tokens = tuple(f" {word}" for word in random.choice(WORDS, TOKENS))
        yield replace(
            _node(group, node, parent, rollout, Origin.POLICY, "".join(tokens)),
            tokens=tokens,
            logprobs=tuple((-random.exponential(size=TOKENS)).tolist()),
            entropies=tuple(random.exponential(size=TOKENS).tolist()),
            advantages=(0.5,) * TOKENS,
            trainer_logprobs=tuple((-random.exponential(size=TOKENS)).tolist()),
            ratios=(1.0,) * TOKENS,
            metadata='{"num_tool_calls": 1}',
        )
        parent, node = node, node + 1
        if turn < TURNS - 1:
            yield _node(group, node, parent, rollout, Origin.ENVIRONMENT, _text(random, 50))
            parent, node = node, node + 1


def _node(group: int, node: int, parent: int, rollout: int, origin: Origin, text: str) -> TraceRow:
    return TraceRow(
        step=0,
        task_key=f"task-{group}",
        trace_id=f"0/{group}",
        node_id=node,
        parent_id=parent,
        rollout=rollout,
        origin=origin,
        text=text,
    )


def _text(random: np.random.Generator, num_words: int) -> str:
    return " ".join(random.choice(WORDS, num_words))


def _of_step(table: pa.Table, step: int) -> pa.Table:
    traces = pc.replace_substring(table["trace_id"], "0/", f"{step}/", max_replacements=1)
    return _with(_with(table, "step", pa.array([step] * len(table))), "trace_id", traces)


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    position = table.schema.get_field_index(name)
    return table.set_column(position, table.schema.field(position), column)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    given = parser.parse_args()
    print(write_run(given.folder, given.rollouts))


if __name__ == "__main__":
    main()
