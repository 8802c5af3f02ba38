"""The end of a run in a few lines: what was learned, what it cost, and what to look at."""

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import score
from outrider.rollout.paired import gain_over_start
from outrider.watch.report_evaluations import SHARES
from outrider.watch.run_directory import Evaluation, RunData, read_run
from outrider.watch.span import duration
from outrider.watch.stage_clock import compact
from outrider.watch.viewer.alarms import read_alarms

_COLUMNS: Final = 80
_NUM_ALARMS: Final = 3
_STAGES: Final = (("rollouts", "time/rollout"), ("updates", "time/update"))


def summary_lines(run: Path) -> list[str]:
    """Of what is on file, within 80 columns but for a long path. Scores are in per cent, with 95 %
    intervals; of seconds those that were recorded, over every process that the run had.
    """
    data = read_run(run)
    return [
        *_with_title("learned", _score_lines(data)),
        *_with_title("cost", _cost_lines(data)),
        *_with_title("look at", _alarm_lines(run)),
    ]


def one_line_summary(run: Path) -> str:
    """Method, task, steps, and the last score with its interval, as far as they are on file."""
    data = read_run(run)
    method, task = (data.config.get(f"{name}.type", "?") for name in ("algorithm", "environment"))
    parts = [f"{method} on {task}", f"{data.num_steps} of {data.config.get('train.num_steps', '?')} steps"]
    scored = [evaluation for evaluation in data.evaluations if evaluation.metrics]
    if scored:
        parts.append(f"{scored[-1].label}: {_score(scored[-1])}")
    return ", ".join(parts)


def _with_title(title: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<8} {line}"


def _score_lines(data: RunData) -> Iterator[str]:
    scored = [evaluation for evaluation in data.evaluations if evaluation.metrics]
    if not scored:
        yield "no evaluation was recorded"
        return
    width = max(len(evaluation.label) for evaluation in scored)
    for evaluation in scored:
        yield f"{evaluation.label:<{min(width, 24)}}  {_score(evaluation)}"
        if (graded := evaluation.graded_return) is not None:
            yield f"{'':<{min(width, 24)}}  mean return {score(graded, is_share=False)}"
    if (gain := gain_over_start([asdict(evaluation) for evaluation in scored])) is not None:
        gained, _, over = str(gain).partition(" over ")
        yield gained
        yield f"over {over}"


def _score(evaluation: Evaluation) -> str:
    name = "score" if "score" in evaluation.metrics else next(iter(evaluation.metrics))
    metric = evaluation.metrics[name]
    text = score(metric.value, metric.ci_low, metric.ci_high, is_share=name in SHARES)
    kind = "training tasks" if evaluation.num_training_tasks >= evaluation.num_tasks else "tasks"
    share = (
        f" ({evaluation.num_training_tasks} of training)"
        if 0 < evaluation.num_training_tasks < evaluation.num_tasks
        else ""
    )
    return f"{text}  {evaluation.num_tasks} {kind}{share}, temperature {evaluation.temperature:g}"


def _cost_lines(data: RunData) -> Iterator[str]:
    seconds = data.total("train", "time/step")
    parts = [f"{name} {duration(spent)}" for name, key in _STAGES if (spent := data.total("train", key))]
    yield f"{data.num_steps} steps in {duration(seconds)}" + (f": {', '.join(parts)}" if parts else "")
    durations = [value for _, value in data.curve("eval", "time/evaluation") if value is not None]
    if durations:
        yield f"{len(durations)} evaluations in {duration(sum(durations))}"
    tokens = sum(data.total("train", name) for name in WRITTEN_TOKENS)
    calls = data.total("train", "rollout/num_tool_calls")
    yield f"{compact(round(tokens))} tokens written, {compact(round(calls))} tool calls in training"


def _alarm_lines(run: Path) -> Iterator[str]:
    alarms = read_alarms(run)
    if alarms:
        steps = Counter(alarm["step"] for alarm in alarms)
        yield f"{len(alarms)} alarms, of {len(steps)} steps; the last:"
    for alarm in alarms[-_NUM_ALARMS:]:
        prefix = (
            ""
            if alarm["step"] is None or f"step {alarm['step']}" in alarm["text"]
            else f"step {alarm['step']}: "
        )
        yield _cut(f"  {prefix}{alarm['text']}")
    yield f"outrider view {shlex.quote(str(run))}"


def _cut(text: str) -> str:
    room = _COLUMNS - 9
    return text if len(text) <= room else text[: room - 1] + "…"
