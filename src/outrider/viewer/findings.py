"""Problems of a run that its files show, with the numbers behind them.

Every detector compares the last steps with the first ones or with a fixed bound. The bounds leave room for
what recorded runs that learn do (``records/packs``), so that a finding is worth a look.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outrider.errors import DataError
from outrider.seeding import stream
from outrider.types import Origin
from outrider.viewer.records import SCHEMA, StepFiles, step_file
from outrider.viewer.run_reader import RunData, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: its ``kind``, one or two sentences with numbers, the training ``steps`` that it is about,
    and what to check or change.
    """

    kind: str
    text: str
    steps: tuple[int, ...]
    look_at: str


def find_problems(run: Path) -> list[Finding]:
    """The problems of a run, most serious first. Missing and damaged files are skipped."""
    data = read_run(run)
    findings = [
        _no_signal(data),
        _logprob_mismatch(data),
        _entropy_collapse(data),
        _template_collapse(run),
        _tool_calls_die_out(data),
        _truncation(data),
        _unread_tips(data),
        _unread_buffer(data),
        *(_crutch(data, *names) for names in _CRUTCHES),
    ]
    return [finding for finding in findings if finding is not None]


# Parts of a run's curves.


Curve: TypeAlias = Sequence[tuple[int, float]]
_WINDOW: Final = 10
"""Most steps at each end of a run that are compared: a mean over them is hardly noise."""
_MIN_WINDOW: Final = 2
_FEW: Final = 8
"""Fewest groups, or retrievals, that support a statement about their share."""


def _curve(data: RunData, name: str) -> Curve:
    return [(step, value) for step, value in data.curve("train", name) if value is not None]


def _ends(data: RunData, name: str) -> tuple[Curve, Curve] | None:
    """The first and the last steps of a metric, at most a third each; None if there are too few."""
    curve = _curve(data, name)
    size = min(_WINDOW, len(curve) // 3)
    return None if size < _MIN_WINDOW else (curve[:size], curve[-size:])


def _mean(curve: Curve) -> float:
    return fmean(value for _, value in curve)


def _recent(data: RunData, name: str) -> Curve:
    """The values of a metric in the last steps of the run."""
    first = max(data.num_steps - _WINDOW + 1, 1)
    return [(step, value) for step, value in _curve(data, name) if step >= first]


def _return_range(data: RunData) -> tuple[float, float]:
    """Lowest and highest return of the run."""
    lows, highs = _curve(data, "reward/min"), _curve(data, "reward/max")
    return min((low for _, low in lows), default=0.0), max((high for _, high in highs), default=0.0)


def _recent_total(data: RunData, name: str) -> float:
    return sum(value for _, value in _recent(data, name))


def _steps(curve: Curve) -> tuple[int, ...]:
    return tuple(step for step, _ in curve)


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


# Detectors that read metrics.


_NO_SIGNAL: Final = 0.8
"""Share of groups without a gradient. Runs on hard tasks begin at 0.5 to 0.7 and learn."""
_CAUSES: Final = {
    "singleton": ("are single rollouts", "algorithm.group_size, and rollouts that were lost to faults"),
    "unscorable": ("were lost to faults", "the log: it names the faults of tools, simulators and engines"),
    "rejected": ("have no rollout that reaches the threshold", "algorithm.threshold against reward/max"),
    "all right": ("have only rollouts that solve the task", "harder tasks"),
    "truncated_tokens": (
        "have equal returns, and most of their rollouts were cut by the token limit",
        "rollout.max_turn_tokens and rollout.max_response_tokens; a cold start teaches shorter answers",
    ),
    "truncated_turns": (
        "have equal returns, and most of their rollouts were cut by the turn limit",
        "rollout.max_turns; a cold start teaches shorter episodes",
    ),
    "invalid": (
        "have equal returns, and most of their rollouts ended with a turn that the environment cannot parse",
        "outrider prompt and the stop strings; a cold start teaches the format",
    ),
    "all wrong": (
        "have only rollouts that fail",
        "easier tasks, a cold start, a larger algorithm.group_size, or a method that explores",
    ),
}


def _no_signal(data: RunData) -> Finding | None:
    fractions, num_groups = _recent(data, "group/fraction_without_signal"), _recent_total(data, "group/num")
    if num_groups < _FEW or _mean(fractions) < _NO_SIGNAL:
        return None
    reasons = {
        reason: _recent_total(data, f"group/num_without_signal_{reason}")
        for reason in ("no_spread", "singleton", "unscorable", "rejected")
    }
    cause = max(reasons, key=lambda reason: reasons[reason])
    num = _recent_total(data, "rollout/num")
    solved = _recent(data, "reward/success_rate")
    if cause == "no_spread":
        ends = {name: _recent_total(data, f"rollout/num_{name}") for name in _CUTS}
        most = max(ends, key=lambda name: ends[name])
        if solved and _mean(solved) > 0.5:
            cause = "all right"
        else:
            cause = most if ends[most] > num / 2 else "all wrong"
    if cause == "all right" and _mean(_curve(data, "group/fraction_without_signal")) < _NO_SIGNAL:
        return None  # the run has learned its tasks
    cause_text, look_at = _CAUSES[cause]
    share = f"; {_mean(solved):.0%} of the rollouts solve their task" if solved else ""
    return Finding(
        kind="no_signal",
        text=f"{_mean(fractions):.0%} of the {num_groups:.0f} groups of {_span(_steps(fractions))} give no "
        f"gradient: most of them {cause_text}{share}.",
        steps=tuple(step for step, value in fractions if value >= _NO_SIGNAL),
        look_at=look_at,
    )


_CUTS: Final = ("truncated_tokens", "truncated_turns", "invalid")
_MAX_GAP: Final = {"float32": 0.01}
_MAX_GAP_16_BIT: Final = 0.1
"""Largest healthy mean gap, in nats. In bfloat16, engine and trainer round differently; recorded runs stay
below half of it."""
_MIN_EFFECTIVE: Final = 0.5
"""Least share of the tokens that the correction weights may leave."""


def _logprob_mismatch(data: RunData) -> Finding | None:
    gaps, effective = _recent(data, "gap/logprob_mean"), _recent(data, "ratio/importance_ess_share")
    precision = data.config.get("model.precision", "")
    limit = _MAX_GAP.get(precision, _MAX_GAP_16_BIT)
    share = _mean(effective) if effective else 1.0
    if not gaps or (_mean(gaps) <= limit and share >= _MIN_EFFECTIVE):
        return None
    return Finding(
        kind="logprob_mismatch",
        text=f"Log-probs of trainer and engine differ by {_mean(gaps):.3g} nats per token in "
        f"{_span(_steps(gaps))}; at most {limit:g} is healthy{f' in {precision}' if precision else ''}. The "
        f"correction weights leave {share:.0%} of the tokens.",
        steps=tuple(step for step, value in _curve(data, "gap/logprob_mean") if value > limit),
        look_at="precision, chat template (outrider doctor --model NAME), and the age of the rollouts",
    )


_COLLAPSED: Final = 0.1
"""Share of its first value to which the entropy falls. Runs that learn fall to a fifth."""
_COLLAPSED_IN_VAIN: Final = 0.25
"""The same if the return does not rise meanwhile."""
_SOLVED: Final = 0.9
"""Share of the best return. A policy that solves nearly every task needs no entropy."""


def _entropy_collapse(data: RunData) -> Finding | None:
    entropy, returns = _ends(data, "entropy/token_mean"), _ends(data, "reward/mean")
    if entropy is None or returns is None:
        return None
    before, after = map(_mean, entropy)
    first, last = map(_mean, returns)
    low, high = _return_range(data)
    is_solved = low < high and last >= low + _SOLVED * (high - low)
    if is_solved or after > before * (_COLLAPSED_IN_VAIN if last <= first else _COLLAPSED):
        return None
    return Finding(
        kind="entropy_collapse",
        text=f"The entropy per token falls from {before:.3g} nats ({_span(_steps(entropy[0]))}) to "
        f"{after:.3g} ({_span(_steps(entropy[1]))}), while the mean return goes from {first:.3g} to {last:.3g}.",
        steps=_steps(entropy[1]),
        look_at="optimizer.learning_rate (lower) and algorithm.loss.clip_high (higher)",
    )


_DIED_OUT: Final = 0.25
"""Share of its first value to which the number of calls falls. Healthy policies drop a redundant call of
several, not most of them."""
_FEW_CALLS: Final = 0.25
"""Calls per rollout; a policy with fewer in the first steps does not use tools."""


def _tool_calls_die_out(data: RunData) -> Finding | None:
    ends = _ends(data, "rollout/tool_calls_per_leaf")
    if ends is None or _mean(ends[0]) < _FEW_CALLS or _mean(ends[1]) > _DIED_OUT * _mean(ends[0]):
        return None
    return Finding(
        kind="tool_calls_die_out",
        text=f"A rollout executes {_mean(ends[1]):.2g} tool calls in {_span(_steps(ends[1]))}, after "
        f"{_mean(ends[0]):.2g} in {_span(_steps(ends[0]))}.",
        steps=_steps(ends[1]),
        look_at="rollouts of the last steps: whether calls fail, are punished, or are not needed for the "
        "reward",
    )


_TRUNCATED: Final = 0.5
"""Share of truncated rollouts. The demo, whose turn limit leaves no room for a mistake, has 0.1 to 0.4."""
_LIMITS: Final = {
    "tokens": "rollout.max_turn_tokens and rollout.max_response_tokens",
    "turns": "rollout.max_turns",
}


def _truncation(data: RunData) -> Finding | None:
    rollouts = _recent(data, "rollout/num")
    num = sum(value for _, value in rollouts)
    cut = {name: _recent_total(data, f"rollout/num_truncated_{name}") for name in _LIMITS}
    if not num or sum(cut.values()) < _TRUNCATED * num:
        return None
    most = max(cut, key=lambda name: cut[name])
    return Finding(
        kind="truncation",
        text=f"{sum(cut.values()) / num:.0%} of the rollouts of {_span(_steps(rollouts))} are truncated: "
        f"{cut['turns'] / num:.0%} by turns and {cut['tokens'] / num:.0%} by tokens.",
        steps=_steps(rollouts),
        look_at=f"{_LIMITS[most]} (higher), or a cold start that teaches shorter episodes",
    )


_UNREAD: Final = 0.05
"""Share of the reads that find something. A memory of a few steps serves most turns of its tasks."""


def _unread_tips(data: RunData) -> Finding | None:
    sizes = _recent(data, "tips/memory_size")
    if len(sizes) < _MIN_WINDOW or min(value for _, value in sizes) <= 0:
        return None
    shown, missed = (_recent_total(data, f"tips/num_{name}") for name in ("shown", "turns_without"))
    if shown > _UNREAD * (shown + missed):
        return None
    return Finding(
        kind="unread_memory",
        text=f"The memory has {sizes[-1][1]:.0f} tips, and {_span(_steps(sizes))} show {shown:.0f} of them: "
        f"{missed:.0f} turns found none.",
        steps=_steps(sizes),
        look_at="algorithm.memory_probability, min_similarity and the scope of the memory",
    )


def _unread_buffer(data: RunData) -> Finding | None:
    inserted = _recent(data, "retrieval/num_inserted")
    num = sum(value for _, value in inserted)
    misses = {
        text: _recent_total(data, f"retrieval/num_{name}")
        for name, text in (("no_candidate", "no candidate"), ("refused", "refused"), ("dropped", "no room"))
    }
    tried = num + sum(misses.values())
    is_constant = data.settings.get("algorithm.retrieval.schedule") == "constant"
    never_tried = is_constant and len(inserted) >= _MIN_WINDOW and not tried
    if not never_tried and (tried < _FEW or num > _UNREAD * tried):
        return None
    why = ", ".join(f"{text} {count:.0f}" for text, count in misses.items() if count)
    return Finding(
        kind="unread_memory",
        text=f"{_span(_steps(inserted)).capitalize()} insert {num:.0f} stored steps in {tried:.0f} retrievals"
        + (f" ({why})." if why else ": rollouts end before their second turn, or none is hybrid."),
        steps=_steps(inserted),
        look_at="the buffer (outrider buffer stats), min_similarity, scope, and the limits of a rollout",
    )


_CRUTCHES: Final = (
    ("retrieval", "retrieval/reward_hybrid", "retrieval/reward_on_policy"),
    ("tips", "tips/return_tips_on", "tips/return_plain"),
)
_RISE: Final = 0.2
"""Rise of the return with help, as a share of the range of returns, that is no noise of small groups."""
_FOLLOWS: Final = 0.25
"""Share of this rise that the return without help must have. All seeds of the demo have more than half."""


def _crutch(data: RunData, help_name: str, with_help: str, without_help: str) -> Finding | None:
    helped, alone = _ends(data, with_help), _ends(data, without_help)
    if helped is None or alone is None:
        return None
    (before, after), (first, last) = map(_mean, helped), map(_mean, alone)
    low, high = _return_range(data)
    rise = after - before
    if rise < _RISE * ((high - low) or 1.0) or last - first >= _FOLLOWS * rise:
        return None
    return Finding(
        kind=f"{help_name}_crutch",
        text=f"The return with {help_name} rises from {before:.3g} to {after:.3g}, the return without from "
        f"{first:.3g} to {last:.3g} ({_span(_steps(helped[1]))} against {_span(_steps(helped[0]))}).",
        steps=_steps(helped[1]),
        look_at="algorithm.retrieval.schedule = linear with final_probability = 0"
        if help_name == "retrieval"
        else "algorithm.off_policy_probability (higher)",
    )


# Template collapse: turns that no longer depend on the task.


_WORD: Final = re.compile(r"\w+|[^\w\s]")
_MOST_TASKS: Final = 8
_MOST_ROLLOUTS: Final = 8
_TRACE_WINDOW: Final = 5
_NUM_PERMUTATIONS: Final = 10
_RECOGNIZED: Final = 0.25
"""Least excess over chance in the first steps: without a dependence there is none to lose."""
_LOST: Final = 0.25
"""Share of this excess that remains. Policies that learn to solve their tasks keep or raise it."""
_COLUMNS: Final = pa.schema([SCHEMA.field(name) for name in ("task_key", "rollout", "origin", "text")])
Counts: TypeAlias = npt.NDArray[np.float64]


def _template_collapse(run: Path) -> Finding | None:
    files = StepFiles(run / "traces")
    steps = files.steps()
    size = min(_TRACE_WINDOW, len(steps) // 3)
    if size < _MIN_WINDOW:
        return None
    ends = []
    for window in (steps[:size], steps[-size:]):
        shares = [share for step in window if (share := _recognized(files, step)) is not None]
        if not shares:
            return None
        ends.append([fmean(column) for column in zip(*shares, strict=True)])
    (before, chance_before), (after, chance) = ends
    if before - chance_before < _RECOGNIZED or after - chance > _LOST * (before - chance_before):
        return None
    return Finding(
        kind="template_collapse",
        text="The policy's turns no longer depend on the task: from its turns, the task of "
        f"{before:.0%} of the rollouts can be recognized in {_span(steps[:size])} and of {after:.0%} in "
        f"{_span(steps[-size:])} ({chance:.0%} by chance).",
        steps=steps[-size:],
        look_at="rollouts of different tasks next to each other; optimizer.learning_rate, and whether the "
        "reward pays a constant answer",
    )


def _recognized(files: StepFiles, step: int) -> tuple[float, float] | None:
    """Share of a step's rollouts whose task can be recognized from the policy's turns, and the same for
    permuted tasks; None if there are fewer than two tasks with two rollouts.

    The share bounds the mutual information between task and turns from below (Fano's inequality). Its loss is
    the template collapse of RAGEN-2 (Reasoning Collapse in Agentic RL, 2026). As there, turns are scored under
    every task of the step, here by their likelihood under the words of the task's other rollouts: the files
    have no log-probs under other prompts. Permuted tasks correct the bias of few rollouts.
    """
    try:
        table = files.read_table(step_file(step), _COLUMNS)
    except DataError:
        return None
    words: dict[tuple[str, int], Counter[str]] = {}
    for row in table.to_pylist():
        if row["origin"] == Origin.POLICY:
            key = row["task_key"], row["rollout"]
            words.setdefault(key, Counter()).update(_WORD.findall(row["text"].lower()))
    rollouts: dict[str, list[Counter[str]]] = {}
    for (task, _), counter in words.items():
        rollouts.setdefault(task, []).append(counter)
    groups = [group[:_MOST_ROLLOUTS] for group in rollouts.values() if len(group) > 1][:_MOST_TASKS]
    if len(groups) < 2:
        return None
    counters = [counter for group in groups for counter in group]
    vocabulary = {
        word: i for i, word in enumerate(sorted({word for counter in counters for word in counter}))
    }
    counts = np.zeros((len(counters), len(vocabulary)))
    for row_counts, counter in zip(counts, counters, strict=True):
        for word, number in counter.items():
            row_counts[vocabulary[word]] = number
    tasks = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    permuted = stream(0, "findings", "tasks")
    return _share_recognized(counts, tasks), fmean(
        _share_recognized(counts, permuted.permutation(tasks)) for _ in range(_NUM_PERMUTATIONS)
    )


def _share_recognized(counts: Counts, tasks: npt.NDArray[np.int64]) -> float:
    """Share of the rows (rollouts) of ``counts`` (rollouts, words) that are most likely under the words of
    their own task's other rows. A tie is not recognized.
    """
    prior = (counts.sum(axis=0) + 1.0) * counts.sum(axis=1).mean() / (counts.sum() + counts.shape[1])
    of_task = np.eye(tasks.max() + 1)[tasks]
    totals = of_task.T @ counts + prior
    others = counts @ (np.log(totals) - np.log(totals.sum(axis=1, keepdims=True))).T
    without = totals[tasks] - counts
    own = (counts * (np.log(without) - np.log(without.sum(axis=1, keepdims=True)))).sum(axis=1)
    others[of_task == 1.0] = -np.inf
    return float(np.mean(own > others.max(axis=1) + 1e-9))
