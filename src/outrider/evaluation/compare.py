"""The runs of a comparison: their costs, rewards and evaluations, read from disk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.errors import ConfigError, DataError, OutriderError
from outrider.evaluation.statistics import (
    Band,
    Estimate,
    PairedTest,
    Sample,
    Scores,
    Verdict,
    bin_means,
    gain_of_best,
    holm,
    improvement_estimate,
    iqm_band,
    iqm_difference,
    iqm_estimate,
    paired_test,
    seeds_p,
    verdict,
)
from outrider.files import read_toml
from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import plural
from outrider.protocols import differing_points
from outrider.viewer.configuration import algorithm_name, comparable, digest, is_trained
from outrider.viewer.run_reader import Evaluation, RunData, numbered_checkpoints, pending_trials, read_run

# axes of curves, and the metrics of a step that are summed for them
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "training steps": ("step",),
    "policy tokens": WRITTEN_TOKENS,
    "tool calls": ("rollout/num_tool_calls",),
    "seconds": ("time/step",),
}
STEPS: Final = "training steps"
_REWARD: Final = "reward/mean"


class Incomparable(OutriderError):
    """Runs whose results do not measure the same thing, or do not measure it independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run on disk. ``config`` is for display, ``settings`` has absolute paths
    (:class:`~outrider.viewer.run_reader.RunData`).

    ``costs`` are cumulative costs after each training step, by axis. ``rewards`` are the mean training
    rewards of the steps, NaN if unknown. ``evaluations`` are sorted by step, with the last evaluation of each
    step. ``trials`` are all evaluations of a run that adapts at test time, which have the same step.
    ``record`` is config.toml.
    """

    name: str
    config: Mapping[str, str]
    settings: Mapping[str, str]
    costs: Mapping[str, Scores]
    rewards: Scores
    evaluations: tuple[Evaluation, ...]
    trials: tuple[Evaluation, ...]
    notes: tuple[str, ...]
    record: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        """The last training step on record."""
        return int(self.costs[STEPS][-1]) if len(self.rewards) else 0

    @property
    def best(self) -> Evaluation:
        """The evaluation with the highest score; of equal ones, the first."""
        return max(self.evaluations, key=lambda evaluation: evaluation.score)

    @property
    def gain_of_best(self) -> float:
        """How much the best of the run's evaluations exceeds the true score by chance
        (:func:`~outrider.evaluation.statistics.gain_of_best`), at the final score.
        """
        final = self.evaluations[-1]
        num_samples = int(self.config.get("evaluation.num_samples", "1"))
        return gain_of_best(
            final.score,
            num_episodes=max(1, (len(final.task_scores) or final.num_tasks) * num_samples - final.num_faults),
            num_evaluations=len(self.evaluations),
        )

    def cost_at_step(self, axis: str, step: int) -> float:
        """Cost of the run up to ``step`` training steps; NaN if it was not recorded."""
        if step == 0 or axis == STEPS:
            return float(step)
        indices = np.flatnonzero(self.costs[STEPS] == step)
        return float(self.costs[axis][indices[0]]) if axis in self.costs and len(indices) else math.nan


def load_run(path: Path, name: str) -> ComparedRun:
    """Read one run directory; ``name`` is used in messages.

    Raises DataError if it has no configuration, or one without seed, algorithm or number of steps.
    """
    data = read_run(path)
    if not {"seed", "algorithm.type"} <= data.config.keys():
        reason = "its config.toml has no seed and algorithm" if data.config else data.notes[0]
        raise DataError(f"{name} is no run that can be compared: {reason} ({path})")
    for key in ("train.num_steps", "train.max_policy_tokens"):
        if not (value := data.config.get(key, "none")).isdecimal() and value != "none":
            raise DataError(f"{name} is no run that can be compared: {key} = {value!r} is no number ({path})")
    notes = list(data.notes)
    # if a step was recorded twice, the last record counts
    steps = sorted({step for step, _ in data.curve("train", "step")})
    rewards = {step: value for step, value in dict(data.curve("train", _REWARD)).items() if value is not None}
    return ComparedRun(
        name=name,
        config=data.config,
        settings=data.settings,
        costs=_costs(data, steps, notes),
        rewards=np.asarray([rewards.get(step, math.nan) for step in steps], dtype=np.float64),
        evaluations=_evaluations(data, notes),
        trials=tuple(evaluation for evaluation in data.main_evaluations if evaluation.interval)
        if data.has_trials
        else (),
        notes=tuple(notes),
        record=read_toml(path / "config.toml"),
    )


def short_ends(names: Sequence[Sequence[str]]) -> list[str]:
    """The shortest suffixes, with the same number of parts each, that distinguish different names."""
    num_different = len(set(map(tuple, names)))
    length = next(
        n
        for n in range(1, max(map(len, names)) + 1)
        if len({tuple(name[-n:]) for name in names}) == num_different
    )
    return ["/".join(name[-length:]) for name in names]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names of runs: suffixes of their paths. Raises :class:`Incomparable` if two paths are the same
    folder."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise Incomparable("a run directory is given twice")
    return short_ends(parts)


def _costs(data: RunData, steps: Sequence[int], notes: list[str]) -> dict[str, Scores]:
    costs: dict[str, Scores] = {STEPS: np.asarray(steps, dtype=np.float64)}
    for axis, (metric, *more) in AXES.items():
        values = {
            step: value for step, value in dict(data.curve("train", metric)).items() if value is not None
        }
        if axis != STEPS and values:
            others = [dict(data.curve("train", name)) for name in more]
            costs[axis] = np.cumsum(
                [values.get(step, 0.0) + sum(curve.get(step) or 0.0 for curve in others) for step in steps]
            )
            if len(values) < len(steps):
                counted = plural(len(steps) - len(values), "step counts", "steps count")
                notes.append(f"{counted} as 0 without {metric}")
    return costs


def _evaluations(data: RunData, notes: list[str]) -> tuple[Evaluation, ...]:
    """The last evaluation of each step, limited to evaluations with the tasks of the last one."""
    scored_by_step = {
        evaluation.step: evaluation for evaluation in data.main_evaluations if evaluation.interval
    }
    ascending = [scored_by_step[step] for step in sorted(scored_by_step)]
    comparable = tuple(
        evaluation for evaluation in ascending if evaluation.conditions == ascending[-1].conditions
    )
    if len(comparable) < len(ascending):
        others = plural(len(ascending) - len(comparable), "evaluation")
        notes.append(f"left out: {others} on another panel than the last")
    return comparable


# Grouping of runs that differ only in the seed, labels of groups, and settings in which groups differ.


_NUM_DIGITS: Final = 6  # of a hash in a label


def group_runs(runs: Sequence[ComparedRun]) -> dict[str, tuple[ComparedRun, ...]]:
    """Runs by label, sorted by label. A label is the algorithm, followed by the start of the settings' hash
    if several groups have the same algorithm.

    Absolute paths distinguish groups, but are part of the hash only if nothing else differs, so that labels
    do not depend on the machine's folders. Raises :class:`Incomparable` if a group has a seed twice, or seeds
    of an evaluation instead of a training.
    """
    runs_by_key: dict[tuple[str, str, str], list[ComparedRun]] = {}
    for run in runs:
        key = (algorithm_name(run.config), digest(comparable(run.config)), digest(comparable(run.settings)))
        runs_by_key.setdefault(key, []).append(run)
    for members in runs_by_key.values():
        _check_seeds(members)
    names = {
        (algorithm, shown, exact): (
            algorithm,
            f"{algorithm} {shown[:_NUM_DIGITS]}",
            f"{algorithm} {exact[:_NUM_DIGITS]}",
            f"{algorithm} {exact}",
        )
        for algorithm, shown, exact in runs_by_key
    }
    labels = [  # the first candidate that is unique among groups
        next(
            name
            for level, name in enumerate(own)
            if [other[level] for other in names.values()].count(name) == 1
        )
        for own in names.values()
    ]
    return {
        label: tuple(members)
        for label, members in sorted(
            zip(labels, runs_by_key.values(), strict=True), key=lambda entry: entry[0]
        )
    }


def differing(groups: Mapping[str, Sequence[ComparedRun]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(key, one value per group) of the settings in which groups differ. Paths with the same name are
    shortened to the suffixes that differ.
    """
    first = [members[0] for members in groups.values()]
    displayed = [{**run.config, **comparable(run.config)} for run in first]
    exact = [{**run.settings, **comparable(run.settings)} for run in first]
    rows = []
    for key in sorted({key for run in first for key in comparable(run.settings)}):
        values, wholes = (
            [config.get(key, "not set") for config in configs] for configs in (displayed, exact)
        )
        if len(set(values)) < len(set(wholes)):
            ends = short_ends([whole.split("/") for whole in wholes])
            values = [end if end == whole else f".../{end}" for end, whole in zip(ends, wholes, strict=True)]
        if len(set(values)) > 1:
            rows.append((key, tuple(values)))
    return tuple(rows)


def _check_seeds(members: Sequence[ComparedRun]) -> None:
    seeds = [run.config["seed"] for run in members]
    if len(members) > 1 and not is_trained(members[0].config):
        names = f"{members[0].name} and {members[1].name}"
        raise Incomparable(
            f"{names} evaluate the same weights: seeds of an evaluation are no trainings of their own"
        )
    for number, run in enumerate(members):
        if run.config["seed"] in seeds[:number]:
            twin = members[seeds.index(run.config["seed"])]
            raise Incomparable(
                f"{twin.name} and {run.name} have one configuration and one seed: leave one of them out"
            )


# Curves of groups of runs over common costs: binned training reward, and held-out scores that are linearly
# interpolated between evaluations.


SCORE: Final = "held-out score"
REWARD: Final = "training reward"
_NUM_POINTS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One quantity over one axis: ``x`` of shape (points,) is common to all groups; ``bands`` are by
    group."""

    quantity: str
    axis: str
    x: Scores
    bands: Mapping[str, Band]


def reward_curves(groups: Mapping[str, Sequence[ComparedRun]], axis: str, *, seed: int) -> Curves | None:
    """Training reward in bins of equal cost, up to the cost that every run reached; None if it was not
    recorded for every run.
    """
    runs = [run for members in groups.values() for run in members]
    end = min(float(run.costs[axis][-1]) if axis in run.costs and len(run.rewards) else 0.0 for run in runs)
    if end <= 0:
        return None
    edges = np.linspace(0.0, end, 1 + min(_NUM_POINTS, *(len(run.rewards) for run in runs)))
    if axis == STEPS:
        edges = np.unique(np.round(edges))  # a bin ends with a step
    values = {
        label: np.stack([bin_means(run.costs[axis], run.rewards, edges) for run in members])
        for label, members in groups.items()
    }
    bands = {label: iqm_band(label, curves, seed=seed) for label, curves in values.items()}
    return Curves(quantity=REWARD, axis=axis, x=edges[1:], bands=bands)


def score_curves(groups: Mapping[str, Sequence[ComparedRun]], axis: str, *, seed: int) -> Curves | None:
    """Held-out score, linearly interpolated between the evaluations of a run, within the range of costs that
    the evaluations of every run cover; None if there is no common range.
    """
    lines = {label: [_score_line(run, axis) for run in members] for label, members in groups.items()}
    every = [x for members in lines.values() for x, _ in members]
    if not all(len(x) for x in every):
        return None
    start, end = max(x[0] for x in every), min(x[-1] for x in every)
    if end <= start:
        return None
    grid = np.unique(np.concatenate(every))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _NUM_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, _NUM_POINTS).round().astype(int)]
    values = {
        label: np.stack([np.interp(grid, x, y) for x, y in members]) for label, members in lines.items()
    }
    bands = {label: iqm_band(label, curves, within=(0.0, 1.0), seed=seed) for label, curves in values.items()}
    return Curves(quantity=SCORE, axis=axis, x=grid, bands=bands)


def _score_line(run: ComparedRun, axis: str) -> tuple[Scores, Scores]:
    """(cost, score) of a run's evaluations with strictly ascending costs: of several at one cost, the
    last.
    """
    scores_by_cost = {
        run.cost_at_step(axis, evaluation.step): evaluation.score for evaluation in run.evaluations
    }
    known = sorted(cost for cost in scores_by_cost if math.isfinite(cost))
    return np.asarray(known, dtype=np.float64), np.asarray(
        [scores_by_cost[cost] for cost in known], dtype=np.float64
    )


# Comparison of runs: groups of equal configuration, with curves over common costs.
#
# A group contains all runs that differ only in the seed. Settings of hardware, speed, checkpoints and
# evaluation are ignored. Final scores are compared only if the tasks, the split and the temperature of the
# evaluations are the same; otherwise the comparison is an error.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one configuration. ``score`` is the interquartile mean of their last evaluations, ``best`` that
    of their best ones (None if one has none); ``costs`` are mean totals at the end of training.
    ``seed_scores`` are the last scores of the runs, over the same tasks as ``score``; empty without one.
    """

    label: str
    runs: tuple[ComparedRun, ...]
    score: Estimate | None
    best: Estimate | None
    costs: Mapping[str, float]
    seed_scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two groups: ``difference`` is first minus second, ``improvement`` the probability that a run of the
    first group scores higher.

    ``p_corrected`` is from the paired test over tasks, ``p_seeds`` from the test over runs; both are
    corrected over all pairs (Holm). ``p_seeds`` is None if a group has fewer than two runs.
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
    """Results of a comparison. ``conditions`` is an evaluation with the common conditions. ``num_tasks``
    counts the tasks that every run scored (None: only means were recorded), ``num_left_out`` those that only
    some runs scored. ``settings`` are (key, one value per group) of the settings in which groups differ,
    ``points`` the values per group of the points of a protocol (``outrider.protocols``) in which they differ.
    """

    conditions: Evaluation | None
    num_tasks: int | None
    num_left_out: int
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    curves: tuple[Curves, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    points: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]


def compare(paths: Sequence[Path], *, seed: int = 0) -> Comparison:
    """Compare run directories, independent of the order of ``paths``. ``seed`` is the seed of the random
    draws.

    Raises ConfigError for fewer than two runs, DataError for a folder that is not a run, and
    :class:`Incomparable` if evaluations have different tasks, splits or temperatures, if some are of a
    training's final step and others of a chosen checkpoint, or for duplicate runs.
    """
    if len(paths) < 2:
        raise ConfigError("compare needs at least two runs")
    runs = [
        load_run(path, name)
        for path, name in sorted(zip(paths, run_names(paths), strict=True), key=lambda entry: entry[1])
    ]
    conditions = _common_conditions(runs)
    chosen = _chosen_checkpoints(runs)
    runs_by_label = group_runs(runs)
    samples, tasks, num_left_out = _samples(runs_by_label)
    scores, best_scores = (
        {name: iqm_estimate(sample, seed=seed, within=(0.0, 1.0)) for name, sample in by_label.items()}
        for by_label in (samples, _samples(runs_by_label, best=True)[0])
    )
    groups = [
        Group(
            label=label,
            runs=members,
            score=scores.get(label),
            best=best_scores.get(label),
            costs={
                axis: math.fsum(run.cost_at_step(axis, run.num_steps) for run in members) / len(members)
                for axis in AXES
                if all(axis in run.costs for run in members)
            },
            seed_scores=tuple(samples[label].scores.mean(axis=1).tolist()) if label in samples else (),
        )
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
        points=differing_points({label: members[0].record for label, members in runs_by_label.items()}),
        notes=(
            *(f"{run.name}: {note}" for run in runs for note in run.notes),
            *(why for run in runs if run.evaluations for why in unfinished(run)),
            *_without_curve(runs, curves),
            *chosen,
        ),
    )


def _without_curve(runs: Sequence[ComparedRun], curves: Sequence[Curves]) -> list[str]:
    """Explain a missing curve of held-out scores, if the reason is a run with only one evaluation."""
    single_runs = [run.name for run in runs if len(run.evaluations) == 1]
    if not single_runs or any(curve.quantity == SCORE for curve in curves):
        return []
    num_others = len(single_runs) - 1
    others = f" and {plural(num_others, 'other run')}" if num_others else ""
    return [f"no curve of held-out scores: {single_runs[0]}{others} had one evaluation only"]


def _common_conditions(runs: Sequence[ComparedRun]) -> Evaluation | None:
    """An evaluation with the conditions that all have. Raises Incomparable if they differ."""
    scored = [(run, run.evaluations[-1]) for run in runs if run.evaluations]
    for run, theirs in scored:
        first, ours = scored[0]
        differ = [
            f"{name} {mine} and {other}"
            for name, mine, other in (
                ("splits", ours.split, theirs.split),
                ("temperatures", f"{ours.temperature:g}", f"{theirs.temperature:g}"),
                ("top-p and top-k", str(ours.truncation or "none"), str(theirs.truncation or "none")),
                ("panels", ours.panel_hash[:12], theirs.panel_hash[:12]),
            )
            if mine != other
        ]
        if ours.conditions != theirs.conditions:
            raise Incomparable(f"{first.name} and {run.name} were not evaluated alike: {', '.join(differ)}")
    return scored[0][1] if scored else None


def checkpoint_rule(settings: Mapping[str, str]) -> str | None:
    """How the scored checkpoint of a run was chosen: "final" for the last one of a training, "none" without a
    training, or "chosen"; None if the training's folder is missing.
    """
    start = settings.get("model.initial_checkpoint", "none")
    if is_trained(settings):
        return "final"
    if start == "none":
        return "none"
    checkpoints = numbered_checkpoints(Path(start).parent)
    if not checkpoints or not Path(start).is_dir():
        return None
    return "final" if Path(start).name == checkpoints[-1][1].name else "chosen"


def _chosen_checkpoints(runs: Sequence[ComparedRun]) -> list[str]:
    """A note for every evaluation of a chosen checkpoint. Raises Incomparable if another training is scored
    at its final step: a column never mixes best scores with final ones. Evaluations of checkpoints of one
    training can be compared.
    """
    scored = [run for run in runs if run.evaluations]
    rules = {run.name: checkpoint_rule(run.settings) for run in scored}
    starts = {run.name: Path(run.settings.get("model.initial_checkpoint", "none")) for run in scored}
    trained = {run.name for run in scored if is_trained(run.settings)}
    chosen = [run.name for run in scored if rules[run.name] == "chosen"]
    for name in chosen:
        for other, rule in rules.items():
            if rule == "final" and (other in trained or starts[other].parent != starts[name].parent):
                raise Incomparable(
                    f"{name} evaluates {starts[name].name}, which is not the last checkpoint of its "
                    f"training, and {other} the final step: best and final scores are not compared; "
                    f"evaluate the last checkpoint in {starts[name].parent}"
                )
    return [f"{name}: {starts[name].name} is not the last checkpoint of its training" for name in chosen]


def _samples(
    groups: Mapping[str, Sequence[ComparedRun]], *, best: bool = False
) -> tuple[dict[str, Sample], list[str], int]:
    """Last scores (or best ones) of the groups in which every run has one, over the tasks common to all of
    them (none if only means were recorded), and the number of tasks that only some of the runs scored.
    """
    scored = {
        label: [run.best if best else run.evaluations[-1] for run in members]
        for label, members in groups.items()
        if all(run.evaluations for run in members)
    }
    scored_tasks = [set(evaluation.task_scores) for members in scored.values() for evaluation in members]
    tasks = sorted(set.intersection(*scored_tasks)) if scored_tasks else []
    samples = {}
    for label, evaluations in scored.items():
        rows = [
            [evaluation.task_scores[task] for task in tasks] if tasks else [evaluation.score]
            for evaluation in evaluations
        ]
        samples[label] = Sample(name=label, scores=np.asarray(rows, dtype=np.float64))
    return samples, tasks, len(set().union(*scored_tasks)) - len(tasks)


def _pairs(
    groups: Mapping[str, Sequence[ComparedRun]],
    samples: Mapping[str, Sample],
    *,
    has_task_scores: bool,
    seed: int,
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
    """Holm's correction over the tests that have a p-value."""
    corrected = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(corrected) for p in p_values]


def unfinished(run: ComparedRun) -> list[str]:
    """Reasons why the last evaluation is not that of a finished training or adaptation."""
    if num := pending_trials(run.config, run.trials):
        return [f"{run.name} made {len(run.trials)} of {len(run.trials) + num} trials"]
    step = run.evaluations[-1].step
    budget = run.config.get("train.max_policy_tokens", "none")
    spent = run.cost_at_step("policy tokens", run.num_steps)
    is_spent = budget != "none" and spent >= int(budget)  # then the run ends before its steps are done
    num_planned = 0 if is_spent else int(run.config.get("train.num_steps", "0"))
    if budget != "none" and run.num_steps < num_planned:
        return [f"{run.name} had spent {spent:.0f} of {budget} policy tokens"]
    target = max(run.num_steps, num_planned)
    return [f"{run.name} was last evaluated at step {step} of {target}"] if step < target else []
