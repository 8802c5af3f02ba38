"""A run in a few lines: the summary at its end, and its state seen from another terminal."""

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Final, Literal, TypeAlias

from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import plural, score, shell_command
from outrider.viewer.evaluations import format_evaluation, gain_of_main
from outrider.viewer.progress import compact, duration
from outrider.viewer.run_reader import (
    RunData,
    finite,
    live_state,
    read_alarms,
    read_notes,
    read_run,
    run_status,
)

_COLUMNS: Final = 80
_NUM_ALARMS: Final = 3
_STAGES: Final = (("rollouts", "time/rollout"), ("updates", "time/update"))
_REPAIRS: Final[Mapping[str, tuple[str, ...]]] = {
    "trainer restart": ("cluster/trainer_restarts",),
    "engine replacement": ("cluster/engine_deaths", "cluster/engine_hangs"),
    "worker replacement": ("cluster/worker_deaths",),
    "failed weight transfer": ("weights/num_failed",),
    "repeated group": ("rollout/num_groups_replayed",),
}


def summary_lines(run: Path) -> list[str]:
    """Summary lines from the run's files, at most 80 columns wide except for long paths. Scores are in per
    cent with 95 % intervals; seconds are the recorded ones, summed over all processes of the run.
    """
    data = read_run(run)
    return [
        *_with_title("learned", _score_lines(data)),
        *_with_title("cost", cost_lines(data)),
        *_with_title("cluster", cluster_lines(data)),
        *_with_title("look at", _alarm_lines(run)),
    ]


def one_line_summary(run: Path) -> str:
    """Method, task, steps, and the last score with its interval, as far as they are recorded."""
    data = read_run(run)
    parts = [f"{data.method or '?'} on {data.config.get('environment.type', '?')}", _steps_text(data)]
    scored = [evaluation for evaluation in data.main_evaluations if evaluation.interval]
    if scored:
        parts.append(f"{scored[-1].label}: {format_evaluation(scored[-1])}")
    return ", ".join(parts)


def _steps_text(data: RunData) -> str:
    """``5 of 9 steps``, or the recorded steps alone if the token budget ended the run before the others."""
    if data.is_budget_spent:
        return f"{plural(data.num_steps, 'step')} until the token budget was spent"
    num_steps = data.config.get("train.num_steps", "?")
    return f"{data.num_steps} of {num_steps} step{'' if num_steps == '1' else 's'}"


def _with_title(title: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{'' if number else title:<8} {line}"


def _score_lines(data: RunData) -> Iterator[str]:
    scored = [evaluation for evaluation in data.evaluations if evaluation.interval]
    if not scored:
        yield "no evaluation was recorded"
        return
    width = max(len(evaluation.full_label) for evaluation in scored)
    for evaluation in scored:
        yield f"{evaluation.full_label:<{min(width, 24)}}  {format_evaluation(evaluation)}"
        if (graded := evaluation.graded_return) is not None:
            yield f"{evaluation.full_label:<{min(width, 24)}}  mean return {score(graded, is_share=False)}"
    if (gain := gain_of_main(data)) is not None:
        gained, _, over = str(gain).partition(" over ")
        yield gained
        yield f"over {over}"


def cost_lines(data: RunData) -> Iterator[str]:
    """Time, tokens and tool calls of the training, and the time of the evaluations."""
    seconds = data.total("train", "time/step")
    parts = [f"{name} {duration(spent)}" for name, key in _STAGES if (spent := data.total("train", key))]
    if data.num_steps or seconds:
        yield f"{plural(data.num_steps, 'step')} in {duration(seconds)}" + (
            f": {', '.join(parts)}" if parts else ""
        )
    durations = [value for _, value in data.curve("eval", "time/evaluation") if value is not None]
    if durations:
        yield f"{plural(len(durations), 'evaluation')} in {duration(sum(durations))}"
    tokens = round(sum(data.total("train", name) for name in WRITTEN_TOKENS))
    calls = round(data.total("train", "rollout/num_tool_calls"))
    if data.num_steps or tokens or calls:
        token, call = ("" if num == 1 else "s" for num in (tokens, calls))
        yield f"{compact(tokens)} token{token} written, {compact(calls)} tool call{call} in training"


def cluster_lines(data: RunData) -> Iterator[str]:
    """Idle shares, age of the trained tokens, weight transfers and repairs of a run with ``[cluster]``;
    nothing of other runs.
    """

    def values(name: str) -> list[float]:
        return [value for _, value in data.curve("train", name) if value is not None]

    idle = {half: values(f"time/idle_{half}") for half in ("trainers", "engines")}
    if all(idle.values()):
        shares = ", ".join(f"{half} {median(shares):.0%}" for half, shares in idle.items())
        yield f"idle share of the step time (median): {shares}"
    if ages := values("staleness/mean"):
        oldest = max(values("staleness/max"), default=max(ages))
        yield f"staleness of tokens, in weight versions: mean {fmean(ages):.2f}, max {oldest:.0f}"
    if seconds := values("time/weights"):
        num_bytes = fmean(values("weights/bytes") or [0.0])
        yield f"weights sent per step (mean): {compact(fmean(seconds))} s, {compact(num_bytes)}B"
    counts = {name: round(sum(data.total("train", key) for key in keys)) for name, keys in _REPAIRS.items()}
    if any(counts.values()):
        yield f"repairs: {', '.join(plural(num, name) for name, num in counts.items() if num)}"
    elif all(idle.values()):
        yield "no repairs"


def _alarm_lines(run: Path) -> Iterator[str]:
    alarms = read_alarms(run)
    if alarms:
        steps = {alarm["step"] for alarm in alarms} - {None}
        of_steps = f", of {plural(len(steps), 'step')}" if steps else ""
        yield f"{plural(len(alarms), 'alarm')}{of_steps}; the last:"
    for alarm in alarms[-_NUM_ALARMS:]:
        prefix = (
            ""
            if alarm["step"] is None or f"step {alarm['step']}" in alarm["text"]
            else f"step {alarm['step']}: "
        )
        line, room = f"  {prefix}{alarm['text']}", _COLUMNS - 9
        yield line if len(line) <= room else line[: room - 1] + "…"
    has_viewer = all(map(find_spec, ("starlette", "uvicorn")))  # the extra ``view``; the report needs none
    yield shell_command("view" if has_viewer else "report", run)


Status: TypeAlias = Literal["running", "finished", "stopped", "not started", "gone"]
STEP_FIELDS: Final[Mapping[str, str]] = {
    "reward": "reward/mean",
    "no signal": "group/fraction_without_signal",
    "s/step": "time/step",
    "tokens/s": "speed/rollout_tokens",
    "idle trainers": "time/idle_trainers",
    "idle engines": "time/idle_engines",
    "staleness": "staleness/mean",
    "weights s": "time/weights",
    "weights B": "weights/bytes",
}
"""Displayed label of a step's value, and its metric; the last five exist only in runs with ``[cluster]``."""

_NUM_STEPS: Final = 5
_NUM_NOTES: Final = 3
_SILENT_S: Final = 60.0  # without output, after which a line reports the silence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """State of a run at one moment. ``lines`` may contain any text; ``state_key`` changes with every step,
    stage and note.
    """

    status: Status
    lines: tuple[str, ...]
    state_key: tuple[object, ...]


def read_snapshot(run: Path, *, now: float | None = None) -> RunSnapshot:
    """Read the run's files and skip missing or damaged ones. ``now``: seconds since 1970."""
    data, live, notes = read_run(run), live_state(run), read_notes(run)
    status: Status = run_status(run, data)
    if status != "running" and live is not None and live.get("has_ended") is False:
        status = "gone"
    begin = "start" if status == "not started" else "continue"
    resume_hint = "" if data.has_trials else f"; {begin} with: {shell_command('train', '--resume', run)}"
    description = f"{status}{resume_hint}" if status in ("stopped", "not started") else str(status)
    if status == "gone" and live is not None:
        host = live.get("host")
        host_hint = f"; it ran on {host}, look there" if host != platform.node() else ""
        description = f"its process is gone (killed?){host_hint}{resume_hint}"
    lines = [f"{run}: {description}"]
    if live is None:
        lines.append("no stage is recorded")
    elif status in ("running", "gone"):
        lines.append(str(live.get("line") or f"{live.get('stage')} {live.get('done')}/{live.get('total')}"))
        now = time.time() if now is None else now
        silent = now - (finite(live.get("time")) or now)
        if status == "gone" or silent >= _SILENT_S:
            lines.append(f"last heard of {duration(max(0.0, silent))} ago")
    total = data.config.get("train.num_steps", "?")
    for record in [item for item in data.records if item["kind"] == "train"][-_NUM_STEPS:]:
        values = ((name, finite(record.get(key))) for name, key in STEP_FIELDS.items())
        fields = "".join(f"  {name} {compact(item):>5}" for name, item in values if item is not None)
        lines.append(f"step {record['step']!s:>{len(total)}}/{total}{fields}")
    lines += [f"> {note['text']}" for note in notes[-_NUM_NOTES:]]
    stage = None if live is None else live.get("stage")
    return RunSnapshot(
        status=status, lines=tuple(lines), state_key=(status, stage, data.num_steps, len(notes))
    )
