"""Compares runs: reads their directories, groups them by what was trained, and puts their curves on common costs.

A group is every run of one configuration, whatever its seed; what only decides where and how fast a run computes, how often it
is saved and how it is evaluated does not count. Final scores are compared where the panel, the split and the temperature of the
evaluations are the same, and refused otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.evals.compare_curves import Curves, reward_curves, score_curves
from outrider.evals.compare_groups import differing, grouped
from outrider.evals.compare_runs import AXES, Incomparable, Panel, Run, load_run, short_names
from outrider.evals.significance import PairedTest, Verdict, holm, paired_test, verdict
from outrider.evals.statistics import Estimate, Sample, improvement_estimate, iqm_difference, iqm_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one configuration. ``score`` is the interquartile mean of their last evaluations (None if one has none);
    ``costs`` are mean totals at the end of training.
    """

    label: str
    runs: tuple[Run, ...]
    score: Estimate | None
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two groups: ``difference`` is first minus second, ``improvement`` the chance that a run of the first scores higher;
    ``p_corrected`` is Holm's over all pairs.
    """

    first: str
    second: str
    difference: Estimate
    improvement: Estimate
    test: PairedTest | None
    p_corrected: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that is shown. ``settings`` are (key, one value a group) of the settings in which groups differ."""

    panel: Panel | None
    num_tasks: int | None
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    curves: tuple[Curves, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def compare(paths: Sequence[Path], *, seed: int = 0) -> Comparison:
    """Compare run directories; the order of ``paths`` changes nothing. ``seed`` is that of the random draws.

    Raises ConfigError for fewer than two runs, DataError for a folder that is no run, and :class:`Incomparable` where
    evaluations have different panels, splits or temperatures, or a run is there twice.
    """
    if len(paths) < 2:
        raise ConfigError("compare needs at least two runs")
    runs = [load_run(path, name) for path, name in sorted(zip(paths, short_names(paths), strict=True), key=lambda one: one[1])]
    panel = _common_panel(runs)
    by_label = grouped(runs)
    samples, num_tasks = _samples(by_label)
    scores = {name: iqm_estimate(sample, seed=seed, within=(0.0, 1.0)) for name, sample in samples.items()}
    groups = [
        Group(label=label, runs=members, score=scores.get(label), costs=_mean_costs(members))
        for label, members in by_label.items()
    ]
    curves = [
        one for draw in (score_curves, reward_curves) for axis in AXES if (one := draw(by_label, axis, seed=seed)) is not None
    ]
    return Comparison(
        panel=panel,
        num_tasks=num_tasks,
        groups=tuple(groups),
        pairs=_pairs(by_label, samples, by_task=num_tasks is not None, seed=seed),
        curves=tuple(curves),
        settings=differing(by_label),
        notes=tuple(f"{run.name}: {note}" for run in runs for note in run.notes),
    )


def _common_panel(runs: Sequence[Run]) -> Panel | None:
    scored = [(run, run.evaluations[-1].panel) for run in runs if run.evaluations]
    for run, panel in scored:
        first, expected = scored[0]
        differ = [
            f"{name} {ours} and {theirs}"
            for name, ours, theirs in (
                ("splits", expected.split, panel.split),
                ("temperatures", f"{expected.temperature:g}", f"{panel.temperature:g}"),
                ("panels", expected.panel_hash[:12], panel.panel_hash[:12]),
            )
            if ours != theirs
        ]
        if panel != expected:
            raise Incomparable(f"{first.name} and {run.name} were not evaluated alike: {', '.join(differ)}")
    return scored[0][1] if scored else None


def _samples(groups: Mapping[str, Sequence[Run]]) -> tuple[dict[str, Sample], int | None]:
    """Last scores of the groups in which every run has one, and over how many common tasks (None: only means are on file)."""
    scored = {label: members for label, members in groups.items() if all(run.evaluations for run in members)}
    runs = [run for members in scored.values() for run in members]
    tasks = sorted(set.intersection(*(set(run.evaluations[-1].task_scores) for run in runs))) if runs else []
    samples = {}
    for label, members in scored.items():
        last = [run.evaluations[-1] for run in members]
        rows = [[one.task_scores[task] for task in tasks] if tasks else [one.score] for one in last]
        samples[label] = Sample(name=label, scores=np.asarray(rows, dtype=np.float64))
    return samples, len(tasks) or None


def _pairs(groups: Mapping[str, Sequence[Run]], samples: Mapping[str, Sample], *, by_task: bool, seed: int) -> tuple[Pair, ...]:
    pairs = list(combinations(samples.values(), 2))
    tests = [paired_test(a.scores.mean(axis=0), b.scores.mean(axis=0), seed=seed) for a, b in pairs] if by_task else []
    corrected = holm([test.p for test in tests])
    results: list[Pair] = []
    for index, (first, second) in enumerate(pairs):
        obstacles = _unfinished((*groups[first.name], *groups[second.name]))
        test, p = (tests[index], corrected[index]) if by_task else (None, None)
        difference = iqm_difference(first, second, seed=seed, within=(-1.0, 1.0))
        results.append(
            Pair(
                first=first.name,
                second=second.name,
                difference=difference,
                improvement=improvement_estimate(first, second, seed=seed),
                test=test,
                p_corrected=p,
                verdict=verdict(first, second, difference=difference, test=test, p_corrected=p, obstacles=obstacles),
            )
        )
    return tuple(results)


def _unfinished(runs: Sequence[Run]) -> list[str]:
    last = [(run, run.evaluations[-1].step, max(run.num_steps, _num_wanted(run))) for run in runs]
    return [f"{run.name} was last evaluated at step {step} of {wanted}" for run, step, wanted in last if step < wanted]


def _num_wanted(run: Run) -> int:
    """The steps that were asked for; 0 where a token budget ends the run earlier."""
    has_budget = run.config.get("train.max_policy_tokens", "none") != "none"
    return 0 if has_budget else int(run.config.get("train.num_steps", "0"))


def _mean_costs(runs: Sequence[Run]) -> dict[str, float]:
    return {
        axis: math.fsum(run.cost_at(axis, run.num_steps) for run in runs) / len(runs)
        for axis in AXES
        if all(axis in run.costs for run in runs)
    }
