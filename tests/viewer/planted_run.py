"""A made-up run with known answers to the questions of the overview, healthy or with planted problems."""

import json
from pathlib import Path

from outrider.metrics import MetricsWriter
from outrider.types import Origin, Outcome
from outrider.viewer.effects import Effect
from outrider.viewer.findings import Finding
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    SCHEMA,
    RolloutRow,
    StepFiles,
    TraceRow,
    step_file,
)

Node = tuple[Origin, str, dict[str, object]]  # with its text and metadata
STEPS, GROUPS, SIZE = 6, 4, 8
FALL = 4  # the step in which every second rollout reaches the turn limit
HEADER = "outrider 0.3.0 (commit abc), torch 2.13.0, host planted-host, 1 thread on 2 cores, CPU; recipe "
EFFECT = Effect(
    kind="hybrid",
    difference=0.25,
    low=0.1,
    high=0.4,
    num_groups=20,
    by_step=((1, 0.25, 20),),
    text="Rollouts with a retrieved step have a return of +0.25 [+0.10, +0.40] over on-policy ones "
    "of the same group (groups: 20), and the kinds were assigned before sampling.",
)
FINDINGS = tuple(
    Finding(kind=f"kind-{number}", text=f"Problem {number}: " + 20 * "words ", steps=(number,), look_at="x")
    for number in range(1, 5)
)


def write_planted_run(run: Path, *, is_bad: bool) -> Path:
    """Write all files of a run with tips, retrieved steps, tool calls and, if ``is_bad``, alarms."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        f'seed = 3\n[algorithm]\ntype = "rapo"\n[model]\nname = "tiny"\n[train]\nnum_steps = {STEPS}\n'
    )
    for label, step, share in (("before", 0, 0.5), ("after", STEPS, 0.25 if is_bad else 0.9375)):
        _add_evaluation(run, label, step, share)
    notes = [f"{HEADER}/home/someone/recipes/planted.toml; run {run.resolve()}"]
    notes += [f"ALARM: step {step}: {run.resolve()} is planted" for step in range(1, 6) if is_bad]
    with (run / "notes.jsonl").open("w") as stream:
        for number, text in enumerate(notes):
            stream.write(
                json.dumps({"time": 1.7e9 + 60 * number, "step": number or None, "text": text}) + "\n"
            )
    metrics = MetricsWriter(run / "metrics.jsonl")
    metrics.write(0, "eval", {"eval/score": 0.5, "time/evaluation": 30.0})
    metrics.write(1, "sft", {"sft/loss": 2.0})
    metrics.write(2, "sft", {"sft/loss": 0.5})
    for step in range(1, STEPS + 1):
        _write_step(run, metrics, step, is_bad=is_bad)
    metrics.close()
    return run


def _add_evaluation(run: Path, label: str, step: int, share: float) -> None:
    scores = {f"held-out-{task}": float(task < 64 * share) for task in range(64)}
    line = {
        "label": label,
        "split": "test",
        "num_tasks": 64,
        "metric": {"score": {"value": share, "ci_low": share - 0.05, "ci_high": share + 0.05}},
        "step": step,
        "temperature": 0.0,
        "panel_hash": "9f2c" * 16,
        "task_scores": scores,
    }
    with (run / "evaluations.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def _write_step(run: Path, metrics: MetricsWriter, step: int, *, is_bad: bool) -> None:
    rollouts: list[RolloutRow] = []
    nodes: list[TraceRow] = []
    for group in range(GROUPS):
        for number in range(SIZE):
            is_cut = step == FALL and (number % 2 == 1 if is_bad else number == 1)
            is_solved = not is_cut and (number + group) % 2 == 1
            common = {
                "step": step,
                "task_key": f"task-{group}",
                "trace_id": f"{step}/{group}",
                "rollout": number,
            }
            kind = ("on-policy", "on-policy", "hybrid", "tips")[number % 4]
            end = 3 * number + 2
            outcome = Outcome.TRUNCATED_TURNS if is_cut else Outcome.FINISHED
            rollouts.append(
                RolloutRow(
                    **common, node_id=end, outcome=outcome, episode_return=float(is_solved),
                    success=is_solved, advantage=0.5 if is_solved else -0.5, kind=kind, num_calls=2,
                )
            )  # fmt: skip
            parent = -1
            for node_id, (origin, text, metadata) in enumerate(
                _path(kind, number, is_bad=is_bad), start=end - 2
            ):
                is_leaf = node_id == end
                nodes.append(
                    TraceRow(
                        **common, node_id=node_id, parent_id=parent, origin=origin, text=text,
                        metadata=json.dumps(metadata), outcome=outcome if is_leaf else None,
                        episode_return=float(is_solved) if is_leaf else None,
                    )
                )  # fmt: skip
                parent = node_id
    StepFiles(run / ROLLOUTS).write_rows(step_file(step), rollouts, ROLLOUT_SCHEMA)
    StepFiles(run / "traces").write_rows(step_file(step), nodes, SCHEMA)
    num_cut = sum(row.outcome is Outcome.TRUNCATED_TURNS for row in rollouts)
    solved = sum(bool(row.success) for row in rollouts) / len(rollouts)
    values = {
        "reward/mean": solved,
        "reward/success_rate": solved,
        "rollout/num": len(rollouts),
        "rollout/num_finished": len(rollouts) - num_cut,
        "rollout/num_truncated_turns": num_cut,
        "rollout/num_tool_calls": 64.0,
        "tokens/policy": 1000.0,
        "time/rollout": 6.0,
        "time/update": 4.0,
        "time/step": 10.0,
        "memory/peak_rss": 2048.0,
    }
    metrics.write(step, "train", values)


def _path(kind: str, number: int, *, is_bad: bool) -> list[Node]:
    status = "error" if is_bad and number % 2 else "ok"
    call = {"name": "search", "arguments": {"query": "x"}, "status": status, "seconds": 0.1}
    inserted: Node = (
        Origin.ENVIRONMENT,
        "result",
        {"tool_calls": [call, call]},
    )
    if kind == "hybrid":
        inserted = (
            Origin.BUFFER,
            "the retrieved step",
            {"step_ids": [7], "similarity": 0.9, "source": "expert#7"},
        )
    if kind == "tips":
        inserted = Origin.MEMORY, "a tip", {"tip_ids": [1 + number // 4]}
    return [(Origin.PROMPT, "question", {}), inserted, (Origin.POLICY, "answer", {})]
