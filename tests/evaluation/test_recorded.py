"""What a critic learns from is what was done: also what a retrieved step did, and nothing of held-out tasks
unless they are asked for.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.algorithms.retrieval import RetrievalHook, RetrievalSettings
from outrider.algorithms.retrospex import CriticSettings, encode_turns
from outrider.algorithms.retrospex_critic import train
from outrider.engines.base import Request
from outrider.environments.base import StepResult
from outrider.errors import DataError
from outrider.evaluation.critic_training import build_trajectories, recorded_trajectories
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.settings import Limits
from outrider.trace import Trace
from outrider.training.step_records import trace_rows
from outrider.types import Origin, Step, Task, Trajectory
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, evaluation_file
from tests.rollout.fakes import TOKENIZER, Factory, Fake, say, scheduler, scripted, tasks


def turns_of(trajectories: list[Trajectory]) -> list[list[tuple[str, str]]]:
    return [[(step.text, step.observation) for step in one.steps] for one in trajectories]


def played_with_retrieval(folder: Path) -> list[Trace]:
    [task] = tasks(1)
    steps = [Step(text=f"look {i}", observation=f"stored {i}", is_terminal=i == 3) for i in range(4)]
    stored = Trajectory(
        trajectory_id="expert", task_key=task.key, agent="expert", prompt=(), steps=tuple(steps), reward=1.0
    )

    def make(task: Task, number: int) -> Fake:
        return Fake(
            on_step=lambda n, text: StepResult(message=None, done=True) if n == 5 else say(f" saw {text}")
        )

    def act(request: Request, text: str) -> str:
        return f"go {request.seed % 7}."

    with StepTraceBuffer(folder / "steps.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories([stored], questions={task.key: task.question})
        hook = RetrievalHook(
            RetrievalSettings(probability=1.0, mode="execute"), buffer=buffer, num_training_steps=10
        )
        made = scheduler(
            scripted(act), Factory(make), hooks=[hook], limits=Limits(max_turns=6), max_concurrent=1
        )
        return made.run(tasks(1), modes=("hybrid",) * 4, training_step=0).traces


def test_an_executed_retrieved_step_is_a_turn(tmp_path: Path) -> None:
    """It was left out, and its observation stood behind the turn before it."""
    traces = played_with_retrieval(tmp_path)
    found = build_trajectories(trace_rows(traces, step=0, tokenizer=TOKENIZER).nodes, name="run")
    leaves = [path for trace in traces for _, path in trace.rollouts()]
    assert len(found) == len(leaves) == 4
    for steps, path in zip(turns_of(found), leaves, strict=True):
        done = [node for node in path if node.origin in (Origin.POLICY, Origin.BUFFER)]
        assert [text for text, _ in steps] == [
            node.metadata["action"] if node.origin is Origin.BUFFER else TOKENIZER.decode(node.token_ids)
            for node in done
        ]
        assert any(node.origin is Origin.BUFFER for node in done)
        for text, observation in steps[:-1]:
            assert observation.strip() == f"saw {text}"


def test_an_empty_node_does_not_hide_the_observation(tmp_path: Path) -> None:
    """Where a tip was shown, the template's end of the message is a node of its own."""
    rows = list(trace_rows(played_with_retrieval(tmp_path), step=0, tokenizer=TOKENIZER).nodes)
    before = turns_of(build_trajectories(rows, name="run"))
    seen = next(row for row in rows if row.origin is Origin.ENVIRONMENT)
    end = replace(seen, node_id=max(row.node_id for row in rows) + 1, parent_id=seen.node_id, text="")
    ended = [*rows, end]
    for number, row in enumerate(ended[:-1]):
        if row.trace_id == seen.trace_id and row.parent_id == seen.node_id:
            ended[number] = replace(row, parent_id=end.node_id)
    assert turns_of(build_trajectories(ended, name="run")) == before


def run_of(folder: Path, *splits: str) -> Path:
    """A run directory with an evaluation on each of these splits."""
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    rows: list[TraceRow] = list(trace_rows(played_with_retrieval(folder), step=0, tokenizer=TOKENIZER).nodes)
    writer = StepFiles(run / "traces")
    lines = []
    for number, split in enumerate(splits):
        writer.write_rows(evaluation_file(number), rows, SCHEMA)
        lines.append(json.dumps({"step": number, "split": split}) + "\n")
    (run / "evaluations.jsonl").write_text("".join(lines))
    return run


def test_held_out_tasks_are_excluded_by_default(tmp_path: Path) -> None:
    """A critic of the tasks that it is evaluated on was the shortest way, and nothing told it."""
    run = run_of(tmp_path, "train", "test", "valid")
    assert len(recorded_trajectories(run)) == 4
    assert len(recorded_trajectories(run, held_out=True)) == 12


def test_a_run_with_held_out_tasks_alone_is_an_error_with_advice(tmp_path: Path) -> None:
    run = run_of(tmp_path, "test")
    with pytest.raises(DataError, match=r"held-out tasks alone \(split test\).*--held-out"):
        recorded_trajectories(run)
    assert len(recorded_trajectories(run, held_out=True)) == 4


def test_a_diverging_critic_is_an_error(tmp_path: Path) -> None:
    """It was written down, and every choice of it was the first candidate."""
    settings = CriticSettings(embedder="hash", hidden=8, learning_rate=1e30, num_updates=200)
    found = build_trajectories(
        trace_rows(played_with_retrieval(tmp_path), step=0, tokenizer=TOKENIZER).nodes, name="run"
    )
    with pytest.raises(DataError, match=r"critic diverged in update .*: set a smaller learning_rate"):
        train(encode_turns(found, HashEmbedder()), settings)
