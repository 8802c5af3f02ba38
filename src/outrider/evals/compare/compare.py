"""Compares runs: reads their directories, groups them by what was trained, and puts their curves on common
costs.

A group is every run of one configuration, whatever its seed; what only decides where and how fast a run
computes, how often it is saved and how it is evaluated does not count. Final scores are compared where the
panel, the split and the temperature of the evaluations are the same, and refused otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.evals.compare.curves import SCORE, Curves, reward_curves, score_curves
from outrider.evals.compare.groups import differing, group_runs
from outrider.evals.compare.runs import AXES, EvalConditions, Incomparable, Run, load_run, run_names
from outrider.evals.significance import PairedTest, Verdict, holm, paired_test, seeds_p, verdict
from outrider.evals.statistics import Estimate, Sample, improvement_estimate, iqm_difference, iqm_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one configuration. ``score`` is the interquartile mean of their last evaluations (None if one
    has none); ``costs`` are mean totals at the end of training.
    """

    label: str
    runs: tuple[Run, ...]
    score: Estimate | None
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two groups: ``difference`` is first minus second, ``improvement`` the chance that a run of the first
    scores higher.

    ``p_corrected`` is that of the paired test over tasks, ``p_seeds`` that of the test over runs; both are
    Holm's over all pairs. ``p_seeds`` is None where a group has fewer than two runs.
    """

    first: str
    second: str
    difference: Estimate
    improvement: Estimate
    test: PairedTest | None
    p_corrected: float | None
    p_seeds: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that is shown. ``num_tasks`` are those that every run scored (None: only means are on file),
    ``num_left_out`` those that only some did. ``settings`` are (key, one value per group) of the settings in
    which groups differ.
    """

    conditions: EvalConditions | None
    num_tasks: int | None
    num_left_out: int
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    curves: tuple[Curves, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def compare(paths: Sequence[Path], *, seed: int = 0) -> Comparison:
    """Compare run directories; the order of ``paths`` changes nothing. ``seed`` is that of the random draws.

    Raises ConfigError for fewer than two runs, DataError for a folder that is no run, and
    :class:`Incomparable` where evaluations have different panels, splits or temperatures, or a run is there
    twice.
    """
    if len(paths) < 2:
        raise ConfigError("compare needs at least two runs")
    runs = [
        load_run(path, name)
        for path, name in sorted(zip(paths, run_names(paths), strict=True), key=lambda entry: entry[1])
    ]
    conditions = _common_conditions(runs)
    runs_by_label = group_runs(runs)
    samples, tasks, num_left_out = _samples(runs_by_label)
    scores = {name: iqm_estimate(sample, seed=seed, within=(0.0, 1.0)) for name, sample in samples.items()}
    groups = [
        Group(label=label, runs=members, score=scores.get(label), costs=_mean_costs(members))
        for label, members in runs_by_label.items()
    ]
    curves = [
        entry
        for draw in (score_curves, reward_curves)
        for axis in AXES
        if (entry := draw(runs_by_label, axis, seed=seed)) is not None
    ]
    return Comparison(
        conditions=conditions,
        num_tasks=len(tasks) or None,
        num_left_out=num_left_out,
        groups=tuple(groups),
        pairs=_pairs(runs_by_label, samples, has_task_scores=bool(tasks), seed=seed),
        curves=tuple(curves),
        settings=differing(runs_by_label),
        notes=(
            *(f"{run.name}: {note}" for run in runs for note in run.notes),
            *(why for run in runs if run.evaluations for why in unfinished(run)),
            *_without_curve(runs, curves),
        ),
    )


def _without_curve(runs: Sequence[Run], curves: Sequence[Curves]) -> list[str]:
    """Why there is no curve of held-out scores, where single evaluations are the reason."""
    single_runs = [run.name for run in runs if len(run.evaluations) == 1]
    if not single_runs or any(curve.quantity == SCORE for curve in curves):
        return []
    others = (
        f" and {len(single_runs) - 1} other run{'s' if len(single_runs) > 2 else ''}"
        if len(single_runs) > 1
        else ""
    )
    return [f"no curve of held-out scores: {single_runs[0]}{others} had one evaluation only"]


def _common_conditions(runs: Sequence[Run]) -> EvalConditions | None:
    scored = [(run, run.evaluations[-1].conditions) for run in runs if run.evaluations]
    for run, conditions in scored:
        first, expected = scored[0]
        differ = [
            f"{name} {ours} and {theirs}"
            for name, ours, theirs in (
                ("splits", expected.split, conditions.split),
                ("temperatures", f"{expected.temperature:g}", f"{conditions.temperature:g}"),
                ("panels", expected.panel_hash[:12], conditions.panel_hash[:12]),
            )
            if ours != theirs
        ]
        if conditions != expected:
            raise Incomparable(f"{first.name} and {run.name} were not evaluated alike: {', '.join(differ)}")
    return scored[0][1] if scored else None


def _samples(groups: Mapping[str, Sequence[Run]]) -> tuple[dict[str, Sample], list[str], int]:
    """Last scores of the groups in which every run has one, over the tasks that are common to all of them
    (none: only means are on file), and how many tasks only some of the runs scored.
    """
    scored = {label: members for label, members in groups.items() if all(run.evaluations for run in members)}
    scored_tasks = [set(run.evaluations[-1].task_scores) for members in scored.values() for run in members]
    tasks = sorted(set.intersection(*scored_tasks)) if scored_tasks else []
    samples = {}
    for label, members in scored.items():
        last = [run.evaluations[-1] for run in members]
        rows = [
            [evaluation.task_scores[task] for task in tasks] if tasks else [evaluation.score]
            for evaluation in last
        ]
        samples[label] = Sample(name=label, scores=np.asarray(rows, dtype=np.float64))
    return samples, tasks, len(set().union(*scored_tasks)) - len(tasks)


def _pairs(
    groups: Mapping[str, Sequence[Run]], samples: Mapping[str, Sample], *, has_task_scores: bool, seed: int
) -> tuple[Pair, ...]:
    pairs = list(combinations(samples.values(), 2))
    tests = [
        paired_test(a.scores.mean(axis=0), b.scores.mean(axis=0), seed=seed) if has_task_scores else None
        for a, b in pairs
    ]
    p_tasks = _corrected([None if test is None else test.p for test in tests])
    p_seeds = _corrected([seeds_p(a, b) if min(a.num_runs, b.num_runs) > 1 else None for a, b in pairs])
    results: list[Pair] = []
    for (first, second), test, p, over_seeds in zip(pairs, tests, p_tasks, p_seeds, strict=True):
        obstacles = [why for run in (*groups[first.name], *groups[second.name]) for why in unfinished(run)]
        difference = iqm_difference(first, second, seed=seed, within=(-1.0, 1.0))
        pair_verdict = verdict(
            first, second, difference=difference, test=test, p_corrected=p, p_seeds=over_seeds,
            obstacles=obstacles
        )  # fmt: skip
        results.append(
            Pair(
                first=first.name,
                second=second.name,
                difference=difference,
                improvement=improvement_estimate(first, second, seed=seed),
                test=test,
                p_corrected=p,
                p_seeds=over_seeds,
                verdict=pair_verdict,
            )
        )
    return tuple(results)


def _corrected(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction over the tests that could be made."""
    corrected = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(corrected) for p in p_values]


def unfinished(run: Run) -> list[str]:
    """Why the last evaluation is not that of a finished training."""
    step = run.evaluations[-1].step
    budget = run.config.get("train.max_policy_tokens", "none")
    spent = run.cost_at_step("policy tokens", run.num_steps)
    is_spent = budget != "none" and spent >= int(budget)  # then the run ends before its steps are done
    num_planned = 0 if is_spent else int(run.config.get("train.num_steps", "0"))
    if budget != "none" and run.num_steps < num_planned:
        return [f"{run.name} had spent {spent:.0f} of {budget} policy tokens"]
    target = max(run.num_steps, num_planned)
    return [f"{run.name} was last evaluated at step {step} of {target}"] if step < target else []


def _mean_costs(runs: Sequence[Run]) -> dict[str, float]:
    return {
        axis: math.fsum(run.cost_at_step(axis, run.num_steps) for run in runs) / len(runs)
        for axis in AXES
        if all(axis in run.costs for run in runs)
    }
