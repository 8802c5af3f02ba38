"""Tables of benchmarks.learning in Markdown, with the statistics and verdicts of outrider.evaluation."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.learning_methods import BASELINE, Method
from benchmarks.markdown_table import MethodTable, markdown
from outrider.errors import DataError
from outrider.evaluation.compare import Comparison, Pair
from outrider.evaluation.compare_report import notes
from outrider.evaluation.statistics import (
    Estimate,
    PairedTest,
    Sample,
    Verdict,
    holm,
    improvement_estimate,
    iqm_difference,
    iqm_estimate,
    paired_test,
    verdict,
)

if TYPE_CHECKING:  # torch: the figures' check reads tables without it
    from tests.toy_result import Result

DECIMALS: Final = 3  # of an expected return: smaller differences are ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A method compared with the baseline. ``improvement`` is the probability that one of its runs ends
    higher; ties count one half.
    """

    improvement: Estimate
    verdict: Verdict


def toy_table(
    chosen: Sequence[Method], results: "Mapping[str, Mapping[int, Result]]", *, toy: str, num_seeds: int
) -> MethodTable:
    """Return the table of a toy: exact expected returns over seeds. Rows of methods without a meaning give
    the reason.
    """
    header = (
        "method", "seeds", "mean", "interquartile mean", "lowest, highest", "policy tokens",
        "rewarded, on-policy / hybrid", "chance to end above GRPO", "against GRPO",
    )  # fmt: skip
    standings = toy_standings(results, num_seeds=num_seeds)
    names = {method.key: method.name for method in chosen}
    rows = []
    for method in chosen:
        if toy in method.undefined:
            rows.append((method.name, f"not defined: {method.undefined[toy]}", *[""] * (len(header) - 2)))
        elif found := list(results.get(method.key, {}).values()):
            standing = standings.get(method.key)
            rows.append(
                (method.name, str(len(found)), *_returns(method.key, found), *_against(standing, names))
            )
        else:
            rows.append((method.name, "not played", *[""] * (len(header) - 2)))
    return MethodTable(header, rows)


def toy_standings(results: "Mapping[str, Mapping[int, Result]]", *, num_seeds: int) -> dict[str, Standing]:
    """Compare every method with the baseline, over seeds.

    A seed is a toy of its own (its combination is drawn from it) and the same for all methods, so the paired
    test of :func:`~outrider.evaluation.statistics.verdict` runs over seeds instead of tasks. Holm's
    correction includes all methods of the toy.
    """
    samples = {key: _sample(key, found) for key, found in results.items() if found}
    base = samples.get(BASELINE)
    if base is None:
        return {}
    others = [sample for key, sample in samples.items() if key != BASELINE]
    paired = [one for one in others if sorted(results[one.name]) == sorted(results[BASELINE])]
    tests = {one.name: paired_test(one.scores[:, 0], base.scores[:, 0], seed=0) for one in paired}
    corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    missing = [
        f"{key} has {len(found)} of {num_seeds} seeds"
        for key, found in results.items()
        if len(found) < num_seeds
    ]
    return {
        one.name: _standing(
            one, base, test=tests.get(one.name), p_corrected=corrected.get(one.name),
            missing=[said for said in missing if said.split(" ", 1)[0] in (one.name, BASELINE)],
        )
        for one in others
    }  # fmt: skip


def _standing(
    sample: Sample,
    base: Sample,
    *,
    test: PairedTest | None,
    p_corrected: float | None,
    missing: Sequence[str],
) -> Standing:
    difference = iqm_difference(sample, base, seed=0, within=(-1.0, 1.0))
    return Standing(
        improvement=improvement_estimate(sample, base, seed=0),
        verdict=verdict(
            sample,
            base,
            difference=difference,
            test=test,
            p_corrected=p_corrected,
            p_seeds=None,
            obstacles=missing,
        ),
    )


def _sample(key: str, found: "Mapping[int, Result]") -> Sample:
    scores = [[round(found[seed].expected_return, DECIMALS)] for seed in sorted(found)]
    return Sample(name=key, scores=np.asarray(scores, dtype=np.float64))


def _returns(key: str, found: "Sequence[Result]") -> tuple[str, ...]:
    returns = [one.expected_return for one in found]
    iqm = iqm_estimate(_sample(key, dict(enumerate(found))), seed=0, within=(0.0, 1.0))
    rewards = (
        f"{sum(one.num_on_policy_rewards for one in found)} / {sum(one.num_hybrid_rewards for one in found)}"
    )
    tokens = f"{sum(one.num_policy_tokens for one in found) / len(found):,.0f}"
    span = f"{min(returns):.3f}, {max(returns):.3f}"
    return (
        f"{math.fsum(returns) / len(returns):.3f}",
        _range(iqm, f"{{:.{DECIMALS}f}}"),
        span,
        tokens,
        rewards,
    )


def factbook_table(chosen: Sequence[Method], comparison: Comparison) -> MethodTable:
    """Held-out scores of runs whose folders are named ``<method's key>-<seed>``, with the verdicts of
    ``outrider compare``.
    """
    header = (
        "method", "seeds", "mean %", "interquartile mean %", "seed: score", "policy tokens",
        "executed tool calls", "steps", "chance to end above GRPO", "against GRPO",
    )  # fmt: skip
    keys = {label: key for key, label in method_labels(comparison).items()}
    names = _names(chosen, comparison)
    groups = {keys[group.label]: group for group in comparison.groups}
    pairs = {
        frozenset((keys[pair.first], keys[pair.second])): (keys[pair.first], pair)
        for pair in comparison.pairs
    }
    rows = []
    for method in chosen:
        group = groups.get(method.key)
        if group is None or group.score is None:
            rows.append((method.name, "not run", *[""] * (len(header) - 2)))
            continue
        scores = {int(run.name.rpartition("-")[2]): 100 * run.evaluations[-1].score for run in group.runs}
        by_seed = ", ".join(f"{seed}: {scores[seed]:.1f}" for seed in sorted(scores))
        costs = [
            f"{group.costs[axis]:,.0f}" if axis in group.costs else ""
            for axis in ("policy tokens", "tool calls", "training steps")
        ]
        first, pair = pairs.get(frozenset((method.key, BASELINE)), ("", None))
        standing = None if pair is None else _of_pair(pair, is_first=first == method.key)
        rows.append(
            (method.name, str(len(scores)), f"{math.fsum(scores.values()) / len(scores):.1f}",
             _range(_times(group.score, 100), "{:.1f}"), by_seed, *costs, *_against(standing, names))
        )  # fmt: skip
    return MethodTable(header, rows)


def factbook_notes(chosen: Sequence[Method], comparison: Comparison) -> list[str]:
    """What ``outrider compare`` notes, with the methods' names in place of its labels ("grpo a3c98d")."""
    names = _names(chosen, comparison)
    longest_first = sorted(names, key=len, reverse=True)
    label = re.compile("|".join(rf"(?<![\w-]){re.escape(one)}(?![\w-])" for one in longest_first))
    return [label.sub(lambda found: names[found.group()], note) for note in notes(comparison)]


def method_labels(comparison: Comparison) -> dict[str, str]:
    """Method's key -> label of its group. Raises DataError if runs of one method have different settings,
    because only one of the groups would be in the table.
    """
    labels: dict[str, str] = {}
    for group in comparison.groups:
        for key in {run.name.rpartition("/")[2].rpartition("-")[0] for run in group.runs}:
            if key in labels:
                raise DataError(f"runs of {key} have different settings: {labels[key]} and {group.label}")
            labels[key] = group.label
    return labels


def seed_scores(comparison: Comparison, label: str, measure: str) -> dict[int, float]:
    """Return the success or the mean return (``measure`` "return") in the last evaluation of each run of a
    group, by its seed. Raises DataError for an evaluation without a mean return.
    """
    [group] = [group for group in comparison.groups if group.label == label]
    scores = {}
    for run in group.runs:
        last = run.evaluations[-1]
        score = last.mean_return if measure == "return" else last.score
        if score is None:
            raise DataError(f"{run.name}: its last evaluation has no mean return")
        scores[int(run.config["seed"])] = score
    return dict(sorted(scores.items()))


def returns_table(chosen: Sequence[Method], comparison: Comparison) -> str:
    """The mean returns in the last evaluations, as Markdown."""
    labels = method_labels(comparison)
    rows = []
    for method in chosen:
        returns = seed_scores(comparison, labels[method.key], "return")
        by_seed = ", ".join(f"{seed}: {value:.3f}" for seed, value in returns.items())
        rows.append((method.name, f"{fmean(returns.values()):.3f}", by_seed))
    return markdown(("method", "mean return", "seed: return"), rows)


def _names(chosen: Sequence[Method], comparison: Comparison) -> dict[str, str]:
    labels = method_labels(comparison)
    return {labels[method.key]: method.name for method in chosen if method.key in labels}


def _of_pair(pair: Pair, *, is_first: bool) -> Standing:
    """Return a pair from the point of view of the method."""
    chance = pair.improvement
    turned = Estimate(value=1 - chance.value, low=1 - chance.high, high=1 - chance.low)
    return Standing(improvement=chance if is_first else turned, verdict=pair.verdict)


def _against(standing: Standing | None, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the last two cells; ``names`` maps names of samples in verdicts to names in the table."""
    if standing is None:
        return "", ""
    found = standing.verdict
    if found.winner is not None:
        return _range(standing.improvement, "{:.2f}"), f"**{names[found.winner]}** scores higher"
    return _range(
        standing.improvement, "{:.2f}"
    ), f"no winner: {'; '.join(_named(reason, names) for reason in found.reasons)}"


def _named(reason: str, names: Mapping[str, str]) -> str:
    label = max((one for one in names if reason.startswith(f"{one} has ")), key=len, default=None)
    return reason if label is None else names[label] + reason.removeprefix(label)


def _range(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(part) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.has_interval else f"{value} (one seed)"


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=factor * estimate.value, low=factor * estimate.low, high=factor * estimate.high)
