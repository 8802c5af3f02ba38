"""Problems of a run that its files show, with the numbers behind them.

Every detector compares the last steps with the first ones or with a fixed bound. The bounds leave room for
what recorded runs that learn do (``records/packs``), so that a finding is worth a look.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, variance
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outrider.errors import DataError
from outrider.seeding import stream
from outrider.types import Origin
from outrider.viewer.evaluations import gain_of_main
from outrider.viewer.ranges import has_policy_term
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
    misses = [f"retrieval/num_{name}" for name in ("no_candidate", "refused", "dropped")]
    found = [
        ("no_signal", _no_signal(data)),
        ("logprob_mismatch", _logprob_mismatch(data)),
        ("entropy_collapse", _entropy_collapse(data)),
        ("template_collapse", _template_collapse(run, data)),
        ("tool_calls_die_out", _tool_calls_die_out(data)),
        ("truncation", _truncation(data)),
        ("unread_memory", _unread(data, "tips/memory_size", "tips/num_shown", ["tips/num_turns_without"])),
        ("unread_memory", _unread(data, "buffer/num_steps", "retrieval/num_inserted", misses)),
        ("retrieval_crutch", _crutch(data, "retrieval/reward_hybrid", "retrieval/reward_on_policy")),
        ("tips_crutch", _crutch(data, "tips/return_tips_on", "tips/return_plain")),
    ]
    return [
        Finding(kind=kind, text=problem[0], steps=tuple(step for step, _ in problem[1]), look_at=problem[2])
        for kind, problem in found
        if problem is not None
    ]


Curve: TypeAlias = Sequence[tuple[int, float]]  # (step, value)
Problem: TypeAlias = tuple[str, Curve, str] | None  # text, the steps with their values, what to look at

_WINDOW: Final = 5  # most steps at each end of the run that are compared
_RECENT: Final = 10  # last steps whose shares are looked at
_MIN_WINDOW: Final = 2
_FEW: Final = 8  # groups, or retrievals, below which a share has no meaning


def _curve(data: RunData, name: str) -> Curve:
    return [(step, value) for step, value in data.curve("train", name) if value is not None]


def _recent(data: RunData, name: str) -> Curve:
    """The values of a metric in the last steps of the run."""
    return [(step, value) for step, value in _curve(data, name) if step > data.num_steps - _RECENT]


def _total(curve: Curve) -> float:
    return sum(value for _, value in curve)


def _mean(curve: Curve) -> float:
    return _total(curve) / max(len(curve), 1)


def _ends(data: RunData, name: str) -> tuple[Curve, Curve] | None:
    """The first and the last steps of a metric, at most a third each; None if there are too few."""
    curve = _curve(data, name)
    size = min(_WINDOW, len(curve) // 3)
    return None if size < _MIN_WINDOW else (curve[:size], curve[-size:])


def _change(ends: tuple[Curve, Curve]) -> str:
    return " to ".join(f"{_mean(curve):.2g} ({_span(curve)})" for curve in ends)


def _span(curve: Curve) -> str:
    first, last = curve[0][0], curve[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _return_rises(data: RunData) -> bool:
    """Whether the mean return rises by more than its noise from step to step."""
    if (ends := _ends(data, "reward/mean")) is None:
        return False
    noise = math.sqrt(sum(variance(value for _, value in part) / len(part) for part in ends))
    return _mean(ends[1]) - _mean(ends[0]) > 2 * noise


def _is_solved(data: RunData) -> bool:
    returns, (low, high) = _ends(data, "reward/mean"), _return_range(data)
    return returns is not None and low < high and _mean(returns[1]) >= low + _SOLVED * (high - low)


def _return_range(data: RunData) -> tuple[float, float]:
    """Lowest and highest return of the run."""
    lows, highs = _curve(data, "reward/min"), _curve(data, "reward/max")
    return min((low for _, low in lows), default=0.0), max((high for _, high in highs), default=0.0)


_NO_SIGNAL: Final = 0.8  # share of groups without a gradient: most of the tokens teach nothing
_CAUSES: Final = {
    "singleton": ("are single rollouts", "algorithm.group_size, and rollouts that were lost to faults"),
    "unscorable": ("were lost to faults", "the log: it names the faults of tools, simulators and engines"),
    "rejected": ("have no rollout that reaches the threshold", "algorithm.threshold against reward/max"),
    "all_right": ("have only rollouts that solve the task", "harder tasks"),
    "truncated_tokens": ("were cut by a token limit", "rollout.max_turn_tokens, rollout.max_response_tokens"),
    "truncated_turns": ("were cut by the turn limit", "rollout.max_turns; a cold start"),
    "invalid": ("ended with turns that are no action", "outrider prompt, the stop strings; a cold start"),
    "all_wrong": (
        "have only rollouts that fail",
        "easier tasks, a cold start, a larger algorithm.group_size",
    ),
}


def _no_signal(data: RunData) -> Problem:
    fractions, num_groups = (_recent(data, f"group/{name}") for name in ("fraction_without_signal", "num"))
    if _total(num_groups) < _FEW or _mean(fractions) < _NO_SIGNAL:
        return None
    is_distilled = _total(_recent(data, "distill/num_tokens")) > 0
    if is_distilled and not has_policy_term(data.settings):
        return None
    prefix, reasons = "group/num_without_signal_", ("no_spread", "singleton", "unscorable", "rejected")
    cause = max(reasons, key=lambda reason: _total(_recent(data, prefix + reason)))
    solved, num = _mean(_recent(data, "reward/success_rate")), _total(_recent(data, "rollout/num"))
    if cause == "no_spread":
        ends = ("truncated_tokens", "truncated_turns", "invalid")
        shares = {"all_right": solved} | {
            end: _total(_recent(data, f"rollout/num_{end}")) / max(num, 1) for end in ends
        }
        cause = next((name for name, share in shares.items() if share > 0.5), "all_wrong")
    if cause == "all_right" and _mean(_curve(data, "group/fraction_without_signal")) < _NO_SIGNAL:
        return None  # the run has learned its tasks
    text, look_at = _CAUSES[cause]
    gradient = "policy gradient" if is_distilled else "gradient"
    return (
        f"{_mean(fractions):.0%} of the {_total(num_groups):.0f} groups of {_span(fractions)} give no "
        f"{gradient}: most of them {text}. {solved:.0%} of all rollouts solve their task.",
        [(step, value) for step, value in fractions if value >= _NO_SIGNAL],
        look_at,
    )


_MAX_GAP: Final = {"float32": 0.01, "bfloat16": 0.1}  # nats; engine and trainer round bfloat16 differently
_MIN_EFFECTIVE: Final = 0.5  # share of the tokens that the correction weights leave


def _logprob_mismatch(data: RunData) -> Problem:
    gaps, effective = _recent(data, "gap/logprob_mean"), _recent(data, "ratio/importance_ess_share")
    limit = _MAX_GAP.get(data.config.get("model.precision", ""), max(_MAX_GAP.values()))
    share = _mean(effective) if effective else 1.0
    if not gaps or (_mean(gaps) <= limit and share >= _MIN_EFFECTIVE):
        return None
    return (
        f"Log-probs of trainer and engine differ by {_mean(gaps):.2g} nats per token in {_span(gaps)}; at "
        f"most {limit:g} is healthy. As correction weights, they leave {share:.0%} of the tokens.",
        gaps,
        "precision, chat template (outrider doctor --model NAME), and the age of the rollouts",
    )


_COLLAPSED: Final = 0.1  # share of its first value to which entropy falls; runs that learn fall to a fifth
_COLLAPSED_IN_VAIN: Final = 0.25  # the same if the return does not rise meanwhile
_SOLVED: Final = 0.9  # share of the range of returns; a policy that solves its tasks needs no entropy


def _entropy_collapse(data: RunData) -> Problem:
    entropy, returns = _ends(data, "entropy/token_mean"), _ends(data, "reward/mean")
    if entropy is None or returns is None:
        return None
    (before, after), (first, last) = map(_mean, entropy), map(_mean, returns)
    share = _COLLAPSED_IN_VAIN if last <= first else _COLLAPSED
    if before <= 0 or after > before * share or _is_solved(data):
        return None
    return (
        f"The entropy per token falls from {_change(entropy)} nats, the mean return changes from "
        f"{_change(returns)}.",
        entropy[1],
        "optimizer.learning_rate (lower), algorithm.loss.clip_high (higher)",
    )


_DIED_OUT: Final = 0.25  # share of its first value; a policy that learns drops redundant calls, not most
_FEW_CALLS: Final = 0.25  # per rollout; a policy with fewer in the first steps does not use tools


def _tool_calls_die_out(data: RunData) -> Problem:
    calls = _ends(data, "rollout/tool_calls_per_leaf")
    if calls is None or _mean(calls[0]) < _FEW_CALLS or _mean(calls[1]) > _DIED_OUT * _mean(calls[0]):
        return None
    if _return_rises(data):  # calls that are not needed, for example repeated ones
        return None
    return (
        f"The executed tool calls per rollout fall from {_change(calls)}.",
        calls[1],
        "rollouts of the last steps: whether calls fail, or are not needed for the reward",
    )


_TRUNCATED: Final = 0.5  # share of the rollouts; the demo, whose limit allows no detour, stays below it


def _truncation(data: RunData) -> Problem:
    rollouts = _recent(data, "rollout/num")
    num = max(_total(rollouts), 1.0)
    by_turns, by_tokens = (
        _total(_recent(data, f"rollout/num_truncated_{name}")) / num for name in ("turns", "tokens")
    )
    if not rollouts or by_turns + by_tokens < _TRUNCATED or _return_rises(data):
        return None
    limit = "max_turns" if by_turns > by_tokens else "max_turn_tokens, rollout.max_response_tokens"
    return (
        f"{by_turns + by_tokens:.0%} of the rollouts of {_span(rollouts)} are truncated: {by_turns:.0%} by "
        f"turns, {by_tokens:.0%} by tokens.",
        rollouts,
        f"rollout.{limit} (higher), or a cold start that teaches shorter episodes",
    )


_UNREAD: Final = 0.05  # share of the reads that find something


def _unread(data: RunData, size: str, found: str, missed: Sequence[str]) -> Problem:
    sizes, hits = _recent(data, size), _total(_recent(data, found))
    misses = {name: _total(_recent(data, name)) for name in missed}
    num = hits + sum(misses.values())
    has_faded = num < _FEW and data.settings.get("algorithm.retrieval.schedule") in ("linear", "cosine")
    is_only_help = num == 0 and _total(_recent(data, "distill/help_tokens")) > 0  # only the teacher reads
    is_empty = len(sizes) < _MIN_WINDOW or min(value for _, value in sizes) <= 0
    if is_empty or is_only_help or has_faded or hits > _UNREAD * num or 0 < num < _FEW:
        return None
    counts = ", ".join(f"{name} = {count:.0f}" for name, count in {found: hits, **misses}.items())
    return (
        f"The memory is hardly read in {_span(sizes)}, although {size} = {sizes[-1][1]:.0f}: {counts}.",
        sizes,
        "probability, min_similarity and scope of the memory; whether rollouts end before their second turn",
    )


_RISE: Final = 0.2  # of the return with help, as a share of the range of returns: more than noise
_FOLLOWS: Final = 0.25  # share of it by which the return without help rises; half and more in the demo


def _crutch(data: RunData, helped: str, alone: str) -> Problem:
    with_help, without_help, (low, high) = _ends(data, helped), _ends(data, alone), _return_range(data)
    if with_help is None or without_help is None:
        return None
    rise, rise_alone = (_mean(ends[1]) - _mean(ends[0]) for ends in (with_help, without_help))
    if rise < _RISE * ((high - low) or 1.0) or rise_alone >= _FOLLOWS * rise:
        return None
    keys = ("algorithm.num_hybrid", "algorithm.retrieval.num_hybrid")
    num_hybrid = next((data.settings[key] for key in keys if key in data.settings), "0")
    # if all rollouts are hybrid, the ones without retrieval are those that ended before it
    is_selected = num_hybrid != "0" and num_hybrid == data.settings.get("algorithm.group_size")
    gain = gain_of_main(data)  # evaluations have no help
    if is_selected if gain is None else gain.ci_low > 0:
        return None
    text = f"{helped} rises from {_change(with_help)}, {alone} only from {_change(without_help)}."
    text += f" The held-out score changes by {gain}." if gain else ""
    return text, with_help[1], "algorithm.retrieval.final_probability, algorithm.off_policy_probability"


# Template collapse: turns that no longer depend on the task.


_WORD: Final = re.compile(r"\w+|[^\w\s]")
_MOST: Final = 8  # tasks of a step, and rollouts of a task: more would take seconds
_MOST_WORDS: Final = 300  # of a rollout
_NUM_PERMUTATIONS: Final = 10
_RECOGNIZED: Final = 0.25  # least excess over chance in the first steps: else there is nothing to lose
_LOST: Final = 0.25  # share of this excess that remains; policies that learn their tasks keep or raise it
_COLUMNS: Final = pa.schema([SCHEMA.field(name) for name in ("task_key", "rollout", "origin", "text")])


def _template_collapse(run: Path, data: RunData) -> Problem:
    if _is_solved(data):
        return None
    files = StepFiles(run / "traces")
    steps = files.steps()
    size = min(_WINDOW, len(steps) // 3)
    windows = [steps[:size], steps[-size:]] if size >= _MIN_WINDOW else []
    shares = [
        [(step, *share) for step in window if (share := _recognized(files, step)) is not None]
        for window in windows
    ]
    if not shares or not all(shares):
        return None
    ends = [[(step, share) for step, share, _ in part] for part in shares]
    chance, chance_before = (fmean(by_chance for *_, by_chance in part) for part in reversed(shares))
    excess = _mean(ends[0]) - chance_before
    if excess < _RECOGNIZED or _mean(ends[1]) - chance > _LOST * excess:
        return None
    return (
        "Turns no longer depend on the task: the share of rollouts whose task can be recognized from the "
        f"policy's turns falls from {_change((ends[0], ends[1]))}; {chance:.2g} is chance.",
        ends[1],
        "rollouts of different tasks side by side; optimizer.learning_rate; rewards of a constant answer",
    )


def _recognized(files: StepFiles, step: int) -> tuple[float, float] | None:
    """Share of a step's rollouts whose task can be recognized from the policy's turns, and the same for
    permuted tasks; None if there are fewer than two tasks with two rollouts.

    The share bounds the mutual information between task and turns from below (Fano's inequality). Its loss is
    the template collapse of RAGEN-2 (Reasoning Collapse in Agentic RL, 2026). As there, turns are scored
    under every task of the step, here by their likelihood under the words of the task's other rollouts: the
    files have no log-probs under other prompts. Permuted tasks correct the bias of few rollouts.
    """
    try:
        table = files.read_table(step_file(step), _COLUMNS)
    except DataError:
        return None
    turns: dict[str, dict[int, list[str]]] = {}
    for row in table.to_pylist():
        if row["origin"] == Origin.POLICY:
            turns.setdefault(row["task_key"], {}).setdefault(row["rollout"], []).append(row["text"].lower())
    groups = [
        [
            Counter(match[0] for match in islice(_WORD.finditer(" ".join(texts)), _MOST_WORDS))
            for texts in islice(group.values(), _MOST)
        ]
        for group in islice((group for group in turns.values() if len(group) > 1), _MOST)
    ]
    if len(groups) < 2:
        return None
    words = {word: 0 for group in groups for counter in group for word in counter}
    counts = np.array([[counter[word] for word in words] for group in groups for counter in group], float)
    tasks = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    draws = stream(0, "findings", "tasks")
    permuted = (_share_recognized(counts, draws.permutation(tasks)) for _ in range(_NUM_PERMUTATIONS))
    return _share_recognized(counts, tasks), fmean(permuted)


def _share_recognized(counts: npt.NDArray[np.float64], tasks: npt.NDArray[np.int64]) -> float:
    """Share of the rows (rollouts) of ``counts`` (rollouts, words) that are most likely under the words of
    their own task's other rows. A tie is not recognized.
    """
    prior = (counts.sum(axis=0) + 1.0) * counts.sum(axis=1).mean() / (counts.sum() + counts.shape[1])
    is_own = np.eye(tasks.max() + 1)[tasks]
    totals = is_own.T @ counts + prior
    scores = counts @ np.log(totals / totals.sum(axis=1, keepdims=True)).T
    without = totals[tasks] - counts
    own = (counts * np.log(without / without.sum(axis=1, keepdims=True))).sum(axis=1)
    scores[is_own == 1.0] = -np.inf
    return float(np.mean(own > scores.max(axis=1) + 1e-9))
