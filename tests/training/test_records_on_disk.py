"""The records of a run: faults with reasons, values per token, splices with their source, tips with their
writer, versions of memories; read by Arrow, pandas, DuckDB and ``load_run``."""

import json
import math
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

import outrider
from outrider.memory.tips import MemoryChange
from outrider.runs import Run
from outrider.viewer.records import (
    MEMORY,
    MEMORY_SCHEMA,
    ROLLOUT_SCHEMA,
    SCHEMA,
    StepFiles,
    TraceReader,
    changes_to_table,
    read_changes,
    rows_to_table,
    step_file,
)
from tests.training.recorded_run import REASON, record_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return outrider.load_run(record_run(tmp_path_factory.mktemp("recorded")))


def test_faulted_rollouts_are_recorded_with_their_reason(run: Run) -> None:
    rows = [row for step in run.steps() for row in run.rollouts(step).to_pylist()]
    faults = [row for row in rows if row["outcome"] == "tool_fault"]
    assert len(rows) == 3 * 2 * 4 and faults
    for row in rows:
        is_fault = row in faults
        assert row["fault"] == (REASON if is_fault else "")
        assert (row["episode_return"] is None) == (row["success"] is None) == is_fault
    nodes = {
        (row.trace_id, row.node_id): row
        for s in run.steps()
        for row in TraceReader(run.path / "traces").read(s)
    }
    for row in faults:
        last = nodes[row["trace_id"], row["node_id"]]
        assert last.outcome is None and last.rollout == row["rollout"] and row["num_turns"] >= 1
    counted = run.metrics().to_pylist()
    assert sum(row["rollout/num_tool_fault"] for row in counted) == len(faults)


def test_a_row_of_a_rollout_is_the_sum_of_its_nodes(run: Run) -> None:
    for step in run.steps():
        rows = {(row["trace_id"], row["node_id"]): row for row in run.traces(step).to_pylist()}
        for rollout in run.rollouts(step).to_pylist():
            path, at = [], rollout["node_id"]
            while at != -1:
                path.append(rows[rollout["trace_id"], at])
                at = path[-1]["parent_id"]
            entropies = [value for row in path for value in row["entropies"]]
            assert rollout["num_tokens"] == len(entropies)
            assert rollout["num_turns"] == sum(row["origin"] == "policy" for row in path)
            assert rollout["num_splices"] == sum(row["origin"] == "buffer" for row in path)
            assert rollout["num_tips"] == sum(row["origin"] == "memory" for row in path)
            assert rollout["mean_entropy"] == pytest.approx(sum(entropies) / len(entropies))


def test_trained_tokens_have_advantage_ratio_and_the_trainers_logprob(run: Run) -> None:
    trained, ratios = 0, []
    for step in run.steps():
        for row in TraceReader(run.path / "traces").read(step):
            assert len(row.ratios) == len(row.trainer_logprobs) in (0, len(row.tokens))
            if row.ratios:
                trained += 1
                ratios += row.ratios
                assert len(row.advantages) == len(row.tokens) and any(row.advantages)
                assert row.weight_version is not None
                # the engine has the trainer's weights, so that the two agree on what was sampled
                gaps = [abs(a - b) for a, b in zip(row.trainer_logprobs, row.logprobs, strict=True)]
                assert max(gaps) < 1e-3
    assert trained > 5
    # Of the second of two passes: the policy has moved. The metrics count both, over own tokens.
    measured = run.metrics().to_pylist()
    assert max(abs(math.log(ratio)) for ratio in ratios) > 1e-4 and len(set(ratios)) > 10
    assert max(ratios) <= max(row["ratio/max"] for row in measured if row["ratio/max"]) * (1 + 1e-6)
    assert min(ratios) >= min(row["ratio/min"] for row in measured if row["ratio/min"]) * (1 - 1e-6)


def test_splices_have_their_source_and_tips_their_writer(run: Run) -> None:
    splices, tips = [], []
    for step in run.steps():
        rows = TraceReader(run.path / "traces").read(step)
        splices += [json.loads(row.metadata) for row in rows if row.origin == "buffer"]
        tips += [(step, json.loads(row.metadata)) for row in rows if row.origin == "memory"]
    assert splices and tips
    for splice in splices:
        assert -1 <= splice["similarity"] <= 1 and splice["source"].count("#") == 1
        assert splice["memory_version"] >= 1
    for step, tip in tips:
        assert len(tip["writers"]) == len(tip["tip_ids"]) and tip["memory_version"] > max(tip["tip_ids"])
        written = [int(writer.partition(":")[0]) for writer in tip["writers"]]
        assert all(0 <= at < step for at in written)


def test_memory_changes_lead_to_what_the_checkpoint_holds(run: Run) -> None:
    held: dict[tuple[str, int], str] = {}
    revisions = []
    for _, change in read_changes(run.path, until=3):
        if change.memory == "steps":
            revisions.append(change.version)
        elif change.change == "added":
            held[change.key, change.item_id] = change.text
        else:
            del held[change.key, change.item_id]
    state = json.loads((run.checkpoints[-1] / "state.json").read_text())
    kept = state["memory"]["tips"]["buffers"]
    assert held == {(key, tip["tip_id"]): tip["text"] for key, one in kept.items() for tip in one["tips"]}
    assert len(held) > 3 and len(revisions) == 3 and revisions[-1] == state["buffer_revision"]


def test_an_eviction_is_a_change(tmp_path: Path) -> None:
    gone = MemoryChange(memory="tips", change="removed", version=3, key="a", item_id=0, text="old\ud800")
    StepFiles(tmp_path / MEMORY).write_table(step_file(2), changes_to_table(2, [gone]))
    [(step, read)] = list(read_changes(tmp_path, until=9))
    assert (step, read.change, read.text) == (2, "removed", "old\\ud800")
    assert list(read_changes(tmp_path, until=1)) == []


def test_the_files_have_a_version_and_every_reader_reads_them(run: Run) -> None:
    folders = {"traces": SCHEMA, "rollouts": ROLLOUT_SCHEMA, "memory": MEMORY_SCHEMA}
    for folder, schema in folders.items():
        path = run.path / folder / "step-000002.parquet"
        found = pq.read_schema(path)
        assert found.metadata[b"outrider.format"] == b"2" and found.remove_metadata().equals(schema)
        assert list(pd.read_parquet(path).columns) == schema.names
    assert run.memory_changes(2).num_rows > 0 and run.memory_changes(9).num_rows == 0
    assert run.evaluation_rollouts(0).num_rows == 3
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    found = duckdb.sql(f"select outcome, count(*) from '{run.path}/rollouts/step-*.parquet' group by 1")
    assert sum(number for _, number in found.fetchall()) == 24


def test_rollouts_of_version_1_are_made_from_its_nodes() -> None:
    old = outrider.load_run(Path(__file__).parents[1] / "compat" / "c91e788" / "empo2")
    found = old.rollouts(2)
    assert found.schema.equals(ROLLOUT_SCHEMA) and found.num_rows == 8
    assert set(found["outcome"].to_pylist()) <= {"finished", "invalid", "truncated_turns", "truncated_tokens"}
    assert set(found["success"].to_pylist()) == {None} and min(found["num_turns"].to_pylist()) >= 1
    assert all(not row.ratios for row in TraceReader(old.path / "traces").read(2))


def test_no_rollouts_are_a_table_too() -> None:
    assert rows_to_table([], ROLLOUT_SCHEMA).schema.equals(ROLLOUT_SCHEMA)
