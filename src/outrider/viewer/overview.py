"""The overview of a run: eight questions, answered on the first tab of the viewer and in the report."""

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from outrider.errors import DataError
from outrider.printing import plural
from outrider.rollout.evaluate import PairedGain, paired_gain
from outrider.viewer.effects import effects
from outrider.viewer.evaluations import evaluation_charts, format_evaluation, gain_of_main
from outrider.viewer.findings import find_problems
from outrider.viewer.ranges import OutOfRange, out_of_range
from outrider.viewer.records import SCHEMA, StepFiles, step_file
from outrider.viewer.report_parts import Chart, Point, Series, page_template, svg_chart
from outrider.viewer.run_reader import Evaluation, RunData, finite, live_state, read_alarms, read_notes
from outrider.viewer.summary import cluster_lines, cost_lines

STYLE: Final = Path(__file__).with_name("page") / "overview.css"
"""Style sheet of the overview and of the charts."""
_TEMPLATE: Final = Path(__file__).with_name("overview.html.j2")
_NUM_RECENT: Final = 10  # steps whose turns are read, because turns are most of a run's bytes
_NUM_ITEMS: Final = 3  # of a list in an answer
_NUM_ALARMS: Final = 200
_MAX_NAME: Final = 40  # characters of the name of a tool
_MAX_LABEL: Final = 60  # of an evaluation
_SIZE: Final[Mapping[str, Any]] = {"width": 280, "height": 150}
_FATES: Final[Mapping[str, tuple[str, ...]]] = {
    "rewarded": (),
    "wrong": ("finished",),
    "turn limit": ("truncated_turns",),
    "token limit": ("truncated_tokens",),
    "invalid": ("invalid",),
    "fault": ("tool_fault", "environment_fault", "engine_fault", "cancelled"),
}
_UNSOLVED: Final = ("wrong", "turn limit", "token limit", "invalid")
_SIGNS: Final = ("positive", "zero", "negative")
_REWARDS: Final = {"on-policy": "retrieval/reward_on_policy", "hybrid": "retrieval/reward_hybrid"}
_STAGES: Final = (
    ("rollouts", "train", "time/rollout"),
    ("update", "train", "time/update"),
    ("evaluation", "eval", "time/evaluation"),
)
_INVISIBLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_Rows = Sequence[Mapping[str, Any]]
_Values = Mapping[int, Mapping[str, float]]  # by step and label


def overview(
    run: Path,
    data: RunData,
    table: pa.Table,
    *,
    title: str,
    notes: Sequence[str] = (),
    address: str = "",
    is_shared: bool = False,
) -> Markup:
    """The overview as an HTML fragment without scripts.

    Args:
        run: Folder of the run.
        data: Its metrics and evaluations.
        table: Its rollouts (:meth:`~outrider.viewer.search.RolloutIndex.table`).
        title: The heading.
        notes: Files and lines that could not be read.
        address: Address of the run in the viewer; "" for a page without links.
        is_shared: Whether the page is for other machines: host and folders are left out.
    """
    training = table.filter(pc.starts_with(pc.cast(table["where"], pa.string()), "step-"))
    steps: list[int] = sorted(pc.unique(training["step"]).to_pylist())
    newest = _rows(training, steps[-1]) if steps else []
    sets = [(svg_chart(replace(chart, **_SIZE)), note) for chart, note in evaluation_charts(data)]
    losses = [(step, loss) for step, loss in data.curve("sft", "sft/loss") if loss is not None]
    fates = _fates(data, training)
    recent = StepFiles(run / "traces").steps()[-_NUM_RECENT:]
    items, calls, unread = _recent(run, recent)
    names = [name for name in map(step_file, unread) if not any(name in note for note in notes)]
    notes = [*notes, *(f"traces/{name} cannot be read" for name in names)]
    alarms = read_alarms(run)
    page = page_template(_TEMPLATE).render(
        title=title,
        address=address,
        notes=notes,
        facts=_facts(data),
        origin=_origin(run, is_shared=is_shared),
        verdict=_verdict(data),
        sets=sets,
        reward=_chart("Reward", "reward", _rewards(data, training)),
        trend=_trend(data, [loss for _, loss in losses]),
        fates=_chart("Outcomes", "rollouts", _series(fates, _FATES), is_stacked=True),
        fall=_fall(data, training, fates),
        signs=_chart(
            "Advantage", "share, %", _series(_signs(training), _SIGNS), is_stacked=True, is_share=True
        ),
        signal=_signal(newest),
        steps=steps,
        recent=recent,
        insertions=plural(items.total(), "insertion"),
        last_steps="the last step" if len(recent) == 1 else f"the last {len(recent)} steps",
        unread=f"the turns of {plural(len(unread), 'step')} cannot be read" if unread else "",
        items=items.most_common(_NUM_ITEMS),
        effects=effects(run),
        failures=_failures(data, training, calls),
        findings=find_problems(run),
        outside=_outside(data),
        alarms=[
            {
                "text": _without_run(alarm["text"], run),
                "time": _date(alarm["time"]),
                "step": alarm["step"] if isinstance(alarm["step"], int) else None,
            }
            for alarm in alarms[: -_NUM_ALARMS - 1 : -1]
        ],
        num_alarms=len(alarms),
        seconds=_chart(
            "Time", "seconds", _series(_seconds(data), [name for name, *_ in _STAGES]), is_stacked=True
        ),
        costs=_costs(data),
        idle=_chart("Idle", "share of the step, %", _idle(data), is_share=True),
        cluster=list(cluster_lines(data)),
        cold_start=_chart("Cold start loss", "nats", _series({x: {"loss": y} for x, y in losses}, ["loss"])),
    )
    # Text of models must not turn the reading direction. None of these characters is a part of the markup.
    return Markup(_INVISIBLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", page))


def _chart(title: str, unit: str, series: Sequence[Series], **options: Any) -> Markup:
    """A chart over steps, or nothing if no series has a value."""
    if not any(line.values for line in series):
        return Markup("")
    return svg_chart(
        Chart(title=title, x_label="step", y_label=unit, series=tuple(series), **_SIZE, **options)
    )


def _series(values: Mapping[int, Mapping[str, float | None]], labels: Iterable[str]) -> list[Series]:
    """One series for each label."""
    return [
        Series(
            label=label, points=tuple(Point(x=step, value=values[step].get(label)) for step in sorted(values))
        )
        for label in labels
    ]


def _rows(training: pa.Table, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = training.filter(pc.equal(training["step"], step)).to_pylist()
    return rows


def _returns(rows: _Rows, column: str) -> dict[str, list[float]]:
    """The finite returns by the values of a column."""
    returns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if (value := finite(row["episode_return"])) is not None:
            returns[row[column]].append(value)
    return returns


def _change(first: float, second: float) -> str:
    return f"{first:.3g} → {second:.3g}"


def _date(seconds: object) -> str:
    value = finite(seconds)
    return "" if value is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(0.0, value), 1e11)))


# What the run is.


def _facts(data: RunData) -> list[str]:
    names = {"environment.type": "", "model.name": "", "seed": "seed "}
    facts = [f"{prefix}{data.config[name]}" for name, prefix in names.items() if name in data.config]
    if (num := data.config.get("train.num_steps", "?")) != "0":
        facts.append(f"{data.num_steps} of {num} training step{'' if num == '1' else 's'}")
    return [data.method, *facts] if data.method else facts


def _origin(run: Path, *, is_shared: bool) -> str:
    """The header of the log (version, commit, machine, recipe), and the dates of the first and last note."""
    notes = read_notes(run)
    text = next((text for note in notes if re.match(r"outrider \d", text := str(note["text"]))), "")
    text = _without_run(text, run)
    if is_shared:
        text = re.sub(r"(?<![^\s'])~?/[^\s';]*/", ".../", re.sub(r", host [^,;]*", "", text))
    times = [
        value for one in (*notes, live_state(run) or {}) if (value := finite(one.get("time"))) is not None
    ]
    dates = f"{_date(min(times))} to {_date(max(times))} UTC" if times else ""
    return "; ".join(filter(None, (text, dates)))


def _without_run(text: str, run: Path) -> str:
    for path in (run.resolve(), run.absolute()):
        text = text.replace(str(path), run.resolve().name)
    return text


# Did it learn?


def _verdict(data: RunData) -> tuple[str, str]:
    """(CSS class, sentence) about the first and the last evaluation of the main set."""
    scored = [evaluation for evaluation in data.main_evaluations if evaluation.interval]
    if not scored:
        return "", "Not known whether it learned: no evaluation is recorded."
    result = format_evaluation(scored[-1]).replace("  ", " on ", 1)
    last = f"{_shortened(scored[-1].label, _MAX_LABEL)}: {result}"
    if (gain := gain_of_main(data)) is None:
        return "", f"Not known whether it learned: {_missing_start(scored, last)}"
    start = [evaluation for evaluation in scored if evaluation.step == 0][-1]
    is_graded = any(evaluation.graded_return is not None for evaluation in (start, scored[-1]))
    of_what = " of the solved share" if is_graded else ""
    css, verdict = "", f"No change{of_what} is shown, the interval of the gain includes 0"
    if gain.ci_low > 0 or gain.ci_high < 0:
        css, verdict = ("good", "It learned") if gain.ci_low > 0 else ("bad", "It got worse")
    text = f"{verdict}: {format_evaluation(start).partition('  ')[0]} → {last}. {_gain_text(gain)}"
    before, after = start.mean_return, scored[-1].mean_return
    if is_graded and before is not None and after is not None:
        text += f" Mean return {_change(before, after)}."
    return css, text


def _missing_start(scored: Sequence[Evaluation], last: str) -> str:
    """Why there is no gain over the start, and the gain over the first evaluation on the same tasks."""
    same = [evaluation for evaluation in scored if evaluation.conditions == scored[-1].conditions]
    if len(same) < 2 or same[0].step == 0:
        return f"two evaluations of the same tasks are needed. {last}."
    gain = paired_gain(asdict(same[0]), asdict(same[-1]))
    about = "" if gain is None else f" {_gain_text(gain)} That is the first evaluation, not the start."
    return f"no evaluation of the start (step 0) on these tasks exists. {last}.{about}"


def _gain_text(gain: PairedGain) -> str:
    return f"Paired gain {replace(gain, earlier=_shortened(gain.earlier, _MAX_LABEL))}."


def _shortened(text: str, size: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _rewards(data: RunData, training: pa.Table) -> list[Series]:
    """The mean return by kind of rollout; from the metrics if rollouts of some steps are not on file."""
    curve = data.curve("train", "reward/mean")
    if len(training) and {step for step, _ in curve} <= set(pc.unique(training["step"]).to_pylist()):
        scored = training.filter(pc.is_finite(training["episode_return"]))
        kinds = pa.table(
            [scored["step"], pc.cast(scored["kind"], pa.string()), scored["episode_return"]], "xky"
        )
        means: dict[int, dict[str, float]] = defaultdict(dict)
        for row in kinds.group_by(["x", "k"]).aggregate([("y", "mean")]).to_pylist():
            means[row["x"]][row["k"]] = row["y_mean"]
        labels = {kind for one in means.values() for kind in one}
        return _series(means, sorted(labels, key=lambda kind: (kind != "on-policy", kind))[:4])
    values: dict[int, dict[str, float | None]] = defaultdict(dict)
    for label, name in {"all rollouts": "reward/mean", **_REWARDS}.items():
        for step, value in data.curve("train", name):
            values[step][label] = value
    split = _series(values, tuple(_REWARDS))
    return split if all(line.values for line in split) else _series(values, ["all rollouts"])


def _trend(data: RunData, losses: Sequence[float]) -> str:
    rewards = [value for _, value in data.curve("train", "reward/mean") if value is not None]
    text = ""
    if len(rewards) > 1:
        num = max(1, len(rewards) // 3)
        parts = "step" if num == 1 else "third"
        change = _change(fmean(rewards[:num]), fmean(rewards[-num:]))
        text = f"Training reward {change} (first and last {parts}). "
    return text + (
        f"Cold start: loss {_change(losses[0], losses[-1])} in {plural(len(losses), 'update')}."
        if losses
        else ""
    )


# Why did a step fall?


def _fates(data: RunData, training: pa.Table) -> dict[int, dict[str, float]]:
    """The number of rollouts by step of which each has one fate: a fault, else solved, else its outcome.

    Steps whose rollouts are not all on file have only the counts of outcomes and the share of solved ones:
    the solved ones are subtracted from the finished ones first.
    """
    recorded = _recorded_fates(training)
    fates: dict[int, dict[str, float]] = {}
    for record in data.records:
        step = record["step"]
        if record["kind"] != "train" or not isinstance(step, int):
            continue
        counts = {
            fate: math.fsum(finite(record.get(f"rollout/num_{name}")) or 0.0 for name in outcomes)
            for fate, outcomes in _FATES.items()
        }
        total = sum(counts.values())
        num = finite(record.get("rollout/num")) or total
        if step in recorded and recorded[step].total() == num:
            fates[step] = {fate: float(recorded[step][fate]) for fate in _FATES}
            continue
        rate = finite(record.get("reward/success_rate"))
        if rate is None and not 0 < counts["fault"] == record.get("rollout/num"):
            continue  # not recorded; if every rollout ended in a fault, there is no rate, and none is solved
        num_left = counts["rewarded"] = float(round((rate or 0.0) * (total - counts["fault"])))
        for fate in _UNSOLVED:
            taken = min(num_left, counts[fate])
            counts[fate], num_left = counts[fate] - taken, num_left - taken
        fates[step] = counts
    return fates


def _recorded_fates(training: pa.Table) -> dict[int, Counter[str]]:
    """The fates of the rollouts on file, of steps where the success of all is known."""
    names = {outcome: fate for fate, outcomes in _FATES.items() for outcome in outcomes}
    keys = pa.table([training["step"], pc.cast(training["outcome"], pa.string()), training["success"]], "xos")
    fates: dict[int, Counter[str]] = defaultdict(Counter)
    for row in keys.group_by(["x", "o", "s"]).aggregate([([], "count_all")]).to_pylist():
        fate = names.get(row["o"], "unknown")
        if fate != "fault" and row["s"] is not False:
            fate = "unknown" if row["s"] is None else "rewarded"
        fates[row["x"]][fate] += row["count_all"]
    return {step: counts for step, counts in fates.items() if not counts["unknown"]}


def _fall(data: RunData, training: pa.Table, fates: _Values) -> Iterator[str]:
    """The largest fall of the training reward, and what differs between its two steps."""
    rewards = [(step, value) for step, value in data.curve("train", "reward/mean") if value is not None]
    falls = [(one[1] - other[1], one, other) for one, other in pairwise(rewards) if other[1] < one[1]]
    if not falls:
        is_faulted = fates and all(sum(one.values()) == one["fault"] for one in fates.values())
        none = (
            "No step has a reward: every rollout ended in a fault." if is_faulted else "No step has a reward."
        )
        has_steps = any(record["kind"] == "train" for record in data.records)
        without = none if has_steps else "No training step is recorded."
        yield "The training reward fell in no step." if rewards else without
        return
    amount, (first, high), (second, low) = max(falls)
    sides = [_rows(training, first), _rows(training, second)]
    yield f"Largest fall: {_change(high, low)}, step {first} to {second}{_noise(amount, sides)}."
    if first in fates and second in fates:
        before, after = (
            {fate: num / max(1.0, sum(fates[step].values())) for fate, num in fates[step].items()}
            for step in (first, second)
        )
        grown = sorted(
            (fate for fate in _FATES if fate != "rewarded" and after[fate] > before[fate]),
            key=lambda fate: before[fate] - after[fate],
        )
        changes = [f"{fate} {before[fate]:.0%} → {after[fate]:.0%}" for fate in grown[:_NUM_ITEMS]]
        yield f"More of: {', '.join(changes)}." if changes else "No other outcome grew."
    by_kind = [_returns(rows, "kind") for rows in sides]
    for kind in sorted(by_kind[0].keys() & by_kind[1].keys()):
        one, other = (side[kind] for side in by_kind)
        yield f"{kind}: {_change(fmean(one), fmean(other))} ({len(one)} → {plural(len(other), 'rollout')})."
    if all(sides):
        yield _difficulty(training, (first, second), sides)


def _noise(amount: float, sides: Sequence[_Rows]) -> str:
    """Whether the fall is larger than the 95 % margin of the difference of two means over groups."""
    means = [[fmean(group) for group in _returns(rows, "trace_id").values()] for rows in sides]
    if min(map(len, means)) < 2:
        return ""
    margin = 1.96 * math.sqrt(sum(variance(side) / len(side) for side in means))
    compared = "more" if amount > margin else "not more"
    return f", {compared} than the draw of {len(means[1])} groups explains (±{margin:.2g})"


def _difficulty(training: pa.Table, steps: tuple[int, int], sides: Sequence[_Rows]) -> str:
    keys = [{row["task_key"] for row in rows} for rows in sides]
    names = pc.cast(training["task_key"], pa.string())
    others = pa.table([names, training["episode_return"]], "ky").filter(
        pc.and_(
            pc.and_(
                pc.is_in(names, pa.array(keys[0] | keys[1], pa.string())),
                pc.is_finite(training["episode_return"]),
            ),
            pc.invert(pc.is_in(training["step"], pa.array(steps, pa.int64()))),
        )
    )
    grouped = others.group_by("k").aggregate([("y", "mean")]).to_pylist()
    known = {row["k"]: row["y_mean"] for row in grouped}
    means = [[known[key] for key in side if key in known] for side in keys]
    if not all(means):
        return "Difficulty of the tasks: not known, other steps have other tasks."
    return f"The same tasks in other steps: {_change(*map(fmean, means))}."


# Which rollouts got a positive advantage?


def _signs(training: pa.Table) -> dict[int, dict[str, float]]:
    """The shares of rollouts by the sign of their advantage, by step; empty if no rollout has one."""
    signs = pc.sign(pc.fill_null(training["advantage"], 0.0))
    counts = (
        pa.table([training["step"], signs], "xs").group_by(["x", "s"]).aggregate([("s", "count")]).to_pylist()
    )
    shares: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_SIGNS, 0.0))
    totals: Counter[int] = Counter()
    for row in counts:
        shares[row["x"]]["positive" if row["s"] > 0 else "negative" if row["s"] < 0 else "zero"] += row[
            "s_count"
        ]
        totals[row["x"]] += row["s_count"]
    has_any = any(row["s"] for row in counts)
    return {x: {sign: num / totals[x] for sign, num in one.items()} for x, one in shares.items() if has_any}


def _signal(rows: _Rows) -> Iterator[str]:
    """The rollouts of one step by the sign of their advantage."""
    groups = {row["trace_id"] for row in rows if finite(row["advantage"])}
    num_groups = plural(len({row["trace_id"] for row in rows}), "group has", "groups have")
    yield f"{len(groups)} of {num_groups} a signal."
    for name, sign in (("Positive", 1), ("Negative", -1)):
        side = [row for row in rows if sign * (finite(row["advantage"]) or 0.0) > 0]
        returns = [value for values in _returns(side, "kind").values() for value in values]
        parts = [f"mean return {fmean(returns):.3g}"] if returns else []
        parts += [f"{num} {kind}" for kind, num in Counter(row["kind"] for row in side).most_common()]
        about = f" ({', '.join(parts)})" if parts else ""
        yield f"{name}: {len(side)} of {plural(len(rows), 'rollout')}{about}."


# What was retrieved, and which tool calls failed?


def _recent(
    run: Path, steps: Sequence[int]
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]], list[int]]:
    """How often these steps inserted each retrieved step and tip (name and text), their tool calls by name
    and status, and the steps that cannot be read."""
    items: Counter[str] = Counter()
    texts: dict[str, str] = {}
    calls: Counter[tuple[str, str]] = Counter()
    unread: list[int] = []
    for row in _recent_nodes(run, steps, unread):
        try:
            metadata = json.loads(row["metadata"])
            for call in metadata.get("tool_calls", ()):
                calls[str(call["name"]), str(call["status"])] += 1
            for kind, name in (("step", "step_ids"), ("tip", "tip_ids")):
                for item in metadata.get(name, ()):
                    items[f"{kind} {item}"] += 1
                    if len(metadata[name]) == 1:
                        texts[f"{kind} {item}"] = " ".join(row["text"][:300].split())
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            continue  # metadata of another program
    return Counter({(name, texts.get(name, "")): num for name, num in items.items()}), calls, unread


def _recent_nodes(run: Path, steps: Sequence[int], unread: list[int]) -> Iterator[dict[str, Any]]:
    """The nodes with insertions or tool calls. Steps whose file cannot be read are added to ``unread``."""
    files, schema = StepFiles(run / "traces"), pa.schema(map(SCHEMA.field, ("metadata", "text")))
    for step in steps:
        try:
            table = files.read_table(step_file(step), schema)
        except DataError:
            unread.append(step)
            continue
        yield from table.filter(
            pc.match_substring_regex(table["metadata"], '"(step_ids|tip_ids|tool_calls)"')
        ).to_pylist()


def _failures(data: RunData, training: pa.Table, calls: Counter[tuple[str, str]]) -> Iterator[str]:
    column = training["num_failed_calls"] if "num_failed_calls" in training.column_names else None
    if is_known := column is not None and column.null_count < len(column):
        failed, executed = (pc.sum(training[name]).as_py() for name in ("num_failed_calls", "num_calls"))
        yield f"Calls on the paths of all rollouts: {failed} failed or refused, {executed} executed."
    totals: Counter[str] = Counter()
    for (name, _), num in calls.items():
        totals[name] += num
    others = [(key, num) for key, num in calls.most_common() if key[1] != "ok"]
    others.sort(key=lambda entry: entry[0][1] == "empty")  # not failed
    for (name, status), num in others[:_NUM_ITEMS]:
        shown, result = _shortened(name, _MAX_NAME) or "unreadable call", _shortened(status, _MAX_NAME)
        yield (
            f"{shown}: {num} of {totals[name]} found nothing."
            if status == "empty"
            else f"{shown}: {result} {num} of {plural(totals[name], 'call')}."
        )
    if not calls and not is_known:
        yield "Not recorded for single calls."
    if data.curve("train", "rollout/num_tool_calls"):
        executed, refused, invalid, faults = (
            data.total("train", f"rollout/num_{name}")
            for name in ("tool_calls", "tool_calls_refused", "invalid_actions", "tool_fault")
        )
        yield (
            f"Whole run: {plural(executed, 'call')} executed, {plural(refused, 'call')} refused because "
            f"their number was used up, {plural(invalid, 'invalid action')}, "
            f"{plural(faults, 'rollout')} ended by a tool fault."
        )


# Is anything wrong?


def _outside(data: RunData) -> list[str]:
    """The metrics that end outside of their healthy range, with their value and the range."""

    def limit(end: float | None) -> str:
        return "…" if end is None else f"{end:.3g}"

    def limits(one: OutOfRange) -> str:
        if one.value != one.low:
            return f"{limit(one.low)} to {limit(one.high)}"
        return f"above {limit(one.low)}{'' if one.high is None else f', to {limit(one.high)}'}"

    return [f"{one.name} {one.value:.3g} ({limits(one)})" for one in out_of_range(data)]


# What did it cost?


def _seconds(data: RunData) -> dict[int, dict[str, float]]:
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for label, kind, name in _STAGES:
        for step, value in data.curve(kind, name):
            seconds[step][label] += value or 0.0  # several evaluation sets have the same step
    return seconds


def _idle(data: RunData) -> list[Series]:
    """Idle shares of the processes of a run with ``[cluster]``."""
    halves = ("trainers", "engines")
    shares: dict[int, dict[str, float | None]] = defaultdict(dict)
    for half in halves:
        for step, share in data.curve("train", f"time/idle_{half}"):
            shares[step][half] = share
    return _series(shares, halves)


def _costs(data: RunData) -> Iterator[str]:
    yield from cost_lines(data)
    if peaks := [value for _, value in data.curve("train", "memory/peak_rss") if value is not None]:
        yield f"peak memory {max(peaks) / 1024:.3g} GiB"
