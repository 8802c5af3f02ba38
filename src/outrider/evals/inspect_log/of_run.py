"""An evaluation of a run directory (of training, or of ``outrider eval RECIPE``), from its records."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.environments.families import make_task_set
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.evals.inspect_log.logged import LoggedEvaluation, LoggedRollout, modified_time
from outrider.evals.inspect_log.turns import AFTER_POLICY, node_messages
from outrider.json_lines import parsed, whole_lines
from outrider.train.state.recorded import recorded_settings
from outrider.types import Outcome
from outrider.watch.rollout_rows import read_rollouts
from outrider.watch.step_files import evaluation_file
from outrider.watch.traces import TraceReader, TraceRow

EVALUATIONS: Final = "evaluations.jsonl"


def load_run_evaluation(run: Path, number: int | None = None) -> LoggedEvaluation:
    """The evaluation in line ``number`` (from 0) of ``evaluations.jsonl``; None is the last one.

    Raises ConfigError where there is none, DataError for damaged records.
    """
    try:
        evaluations = [parsed(line) for line in whole_lines(run / EVALUATIONS)]
    except ValueError as error:
        raise DataError(f"{run / EVALUATIONS} is damaged: {error}") from error
    if not evaluations:
        raise ConfigError(f"{run} has no evaluation")
    index = len(evaluations) - 1 if number is None else number
    if not 0 <= index < len(evaluations):
        raise ConfigError(f"{run} has evaluations 0 to {len(evaluations) - 1}, not {index}")
    record = evaluations[index]
    recipe = (run / "config.toml").read_text(encoding="utf-8")
    config = tomllib.loads(recipe)
    targets, form, notes = _environment(run, record["split"])
    score = record["metric"]["score"]
    return LoggedEvaluation(
        task=str(config["environment"]["type"]),
        model=f"{config['model']['name']}, step {record['step']}",
        created=modified_time(run / EVALUATIONS),
        panel_hash=record["panel_hash"],
        rollouts=tuple(_rollouts(run, index, targets, form)),
        summary={
            "mean": score["value"],
            "ci_low": score["ci_low"],
            "ci_high": score["ci_high"],
            "mean_return": record["mean_return"],
        },
        metadata={
            "label": record["label"],
            "step": record["step"],
            "split": record["split"],
            "temperature": record["temperature"],
            "num_faults": record["num_faults"],
            "recipe": recipe,
        },
        notes=tuple(notes),
    )


def _environment(run: Path, split: str) -> tuple[Mapping[str, tuple[str, ...]], str | None, list[str]]:
    """Answers by task key, of the tasks as this machine has them, and the form of native calls."""
    form: str | None = None
    try:
        settings = recorded_settings(run / "config.toml").environment
        form = settings.call_format
        task_set = make_task_set(settings)
        try:
            return {task.key: task.answers for task in task_set.tasks(split)}, form, []
        finally:
            task_set.close()
    except (OutriderError, OSError) as error:
        return {}, form, [f"without targets: {error}"]


def _rollouts(
    run: Path, number: int, targets: Mapping[str, tuple[str, ...]], form: str | None
) -> list[LoggedRollout]:
    rows = {(row.trace_id, row.node_id): row for row in TraceReader(run / "traces").read_evaluation(number)}
    seen: Counter[str] = Counter()
    rollouts = []
    for record in read_rollouts(run, evaluation_file(number)).to_pylist():
        seen[record["task_key"]] += 1
        path = _path(rows, record["trace_id"], record["node_id"])
        first = next((i for i, row in enumerate(path) if row.origin in AFTER_POLICY), len(path))
        prompt = [message for row in path[:first] for message in node_messages(row, form)]
        answered = [message for row in path[first:] for message in node_messages(row, form)]
        rollouts.append(
            LoggedRollout(
                task_key=record["task_key"],
                epoch=seen[record["task_key"]],
                prompt=tuple(prompt),
                messages=(*prompt, *answered),
                target=targets.get(record["task_key"], ()),
                outcome=Outcome(record["outcome"]),
                detail=record["fault"],
                scores=_scores(record),
                num_tokens=record["num_tokens"],
                metadata={name: record[name] for name in ("mode", "kind", "num_turns", "num_calls")},
            )
        )
    return rollouts


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    values = {"return": row["episode_return"], "success": row["success"]}
    return {name: float(value) for name, value in values.items() if value is not None}


def _path(rows: Mapping[tuple[str, int], TraceRow], trace_id: str, node_id: int) -> Sequence[TraceRow]:
    """From the prompt to the rollout's last node; empty where a fault left none."""
    path: list[TraceRow] = []
    node = rows.get((trace_id, node_id))
    while node is not None:
        path.append(node)
        node = rows.get((trace_id, node.parent_id))
    return path[::-1]
