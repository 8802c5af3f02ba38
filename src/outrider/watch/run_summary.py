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
from outrider.watch.viewer.alarms import alarms_of

_COLUMNS: Final = 80
_NUM_ALARMS: Final = 3
_STAGES: Final = (("rollouts", "time/rollout"), ("updates", "time/update"))


def summary_lines(run: Path) -> list[str]:
    """Of what is on file, within 80 columns but for a long path. Scores are in per cent, with 95 %
    intervals; of seconds those that were recorded, over every process that the run had.
    """
    data = read_run(run)
    return [
        *_titled("learned", _learned(data)),
        *_titled("cost", _cost(data)),
        *_titled("look at", _look_at(run)),
    ]


def one_line_summary(run: Path) -> str:
    """Method, task, steps, and the last score with its interval, as far as they are on file."""
    data = read_run(run)
    method, task = (data.config.get(f"{name}.type", "?") for name in ("algorithm", "environment"))
    parts = [f"{method} on {task}", f"{data.num_steps} of {data.config.get('train.num_steps', '?')} steps"]
    scored = [one for one in data.evaluations if one.metrics]
    if scored:
        parts.append(f"{scored[-1].label}: {_score(scored[-1])}")
    return ", ".join(parts)


def _titled(title: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<8} {line}"


def _learned(data: RunData) -> Iterator[str]:
    scored = [one for one in data.evaluations if one.metrics]
    if not scored:
        yield "no evaluation was recorded"
        return
    width = max(len(one.label) for one in scored)
    for one in scored:
        yield f"{one.label:<{min(width, 24)}}  {_score(one)}"
        if (graded := one.graded_return) is not None:
            yield f"{'':<{min(width, 24)}}  mean return {score(graded, is_share=False)}"
    if (gain := gain_over_start([asdict(one) for one in scored])) is not None:
        gained, _, over = str(gain).partition(" over ")
        yield gained
        yield f"over {over}"


def _score(one: Evaluation) -> str:
    name = "score" if "score" in one.metrics else next(iter(one.metrics))
    found = one.metrics[name]
    told = score(found.value, found.ci_low, found.ci_high, is_share=name in SHARES)
    kind = "training tasks" if one.num_training_tasks >= one.num_tasks else "tasks"
    some = f" ({one.num_training_tasks} of training)" if 0 < one.num_training_tasks < one.num_tasks else ""
    return f"{told}  {one.num_tasks} {kind}{some}, temperature {one.temperature:g}"


def _cost(data: RunData) -> Iterator[str]:
    seconds = data.total("train", "time/step")
    parts = [f"{name} {duration(spent)}" for name, key in _STAGES if (spent := data.total("train", key))]
    yield f"{data.num_steps} steps in {duration(seconds)}" + (f": {', '.join(parts)}" if parts else "")
    played = [value for _, value in data.curve("eval", "time/evaluation") if value is not None]
    if played:
        yield f"{len(played)} evaluations in {duration(sum(played))}"
    tokens = sum(data.total("train", name) for name in WRITTEN_TOKENS)
    calls = data.total("train", "rollout/num_tool_calls")
    yield f"{compact(round(tokens))} tokens written, {compact(round(calls))} tool calls in training"


def _look_at(run: Path) -> Iterator[str]:
    alarms = alarms_of(run)
    if alarms:
        steps = Counter(one["step"] for one in alarms)
        yield f"{len(alarms)} alarms, of {len(steps)} steps; the last:"
    for one in alarms[-_NUM_ALARMS:]:
        where = "" if one["step"] is None or f"step {one['step']}" in one["text"] else f"step {one['step']}: "
        yield _cut(f"  {where}{one['text']}")
    yield f"outrider view {shlex.quote(str(run))}"


def _cut(text: str) -> str:
    room = _COLUMNS - 9
    return text if len(text) <= room else text[: room - 1] + "…"
