"""Compares runs: reads their directories, groups them by what was trained, and puts their curves on common costs.

A group is every run of one configuration, whatever its seed; what only decides where and how fast a run computes, how often it
is saved and how it is evaluated does not count. Final scores are compared where the panel, the split and the temperature of the
evaluations are the same, and refused otherwise.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from outrider.errors import ConfigError, DataError, OutriderError
from outrider.evals.statistics import (
    UNBOUNDED,
    Band,
    Estimate,
    PairedTest,
    Sample,
    Scores,
    Verdict,
    bin_means,
    holm,
    improvement_estimate,
    iqm_band,
    iqm_difference,
    iqm_estimate,
    paired_test,
    verdict,
)
from outrider.watch.run_directory import finite, read_run

AXES: Final[Mapping[str, tuple[str, ...]]] = {  # what a curve is drawn over, and the metrics of a step that add up to it
    "training steps": ("step",),
    "policy tokens": ("tokens/policy", "tokens/remarks"),  # the second only where tips are written
    "tool calls": ("rollout/num_tool_calls",),
    "seconds": ("time/step",),
}
STEPS: Final = "training steps"
_REWARD: Final = "reward/mean"
_NUM_POINTS: Final = 24
_SAME_TRAINING: Final = frozenset((  # the token budget follows what another run spent
    "seed", "num_threads", "trackers", "train.max_policy_tokens", "train.checkpoint_every", "train.keep_checkpoints",
    "train.max_concurrent", "train.max_retries",
))  # fmt: skip
_PATHS: Final = frozenset(("model.initial_checkpoint", "buffer.path"))  # whether there is one counts, not where


_ADAPTATION: Final = frozenset(("evaluation.num_trials", "evaluation.memory"))


class Incomparable(OutriderError):
    """Runs whose results do not measure the same thing, or do not measure it independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What an evaluation was made on: scores of different panels are not compared."""

    split: str
    temperature: float
    panel_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """One evaluation: mean success over tasks after ``step`` training steps; ``task_scores`` is empty where not on file."""

    step: int
    score: float
    panel: Panel
    task_scores: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is on disk. ``costs`` are totals since step 0 after each training step, by axis; ``rewards`` are the mean
    training rewards of the steps, NaN where not known. Evaluations ascend by step, one a step (the last made there).
    """

    name: str
    config: Mapping[str, str]
    costs: Mapping[str, Scores]
    rewards: Scores
    evaluations: tuple[ScoredStep, ...]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The last training step on record."""
        return int(self.costs[STEPS][-1]) if len(self.rewards) else 0

    def cost_at(self, axis: str, step: int) -> float:
        """What the run had spent after ``step`` training steps; NaN where the record does not tell."""
        if step == 0 or axis == STEPS:
            return float(step)
        found = np.flatnonzero(self.costs[STEPS] == step)
        return float(self.costs[axis][found[0]]) if axis in self.costs and len(found) else math.nan


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
class Curves:
    """One quantity over one axis: ``x`` of shape (points,) is common to all groups; ``bands`` are by group."""

    quantity: str
    axis: str
    x: Scores
    bands: Mapping[str, Band]


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
    runs = [load_run(path, name) for path, name in sorted(zip(paths, _names(paths), strict=True), key=lambda one: one[1])]
    panel = _common_panel(runs)
    by_label = _grouped(runs)
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
        settings=_differing(by_label),
        notes=tuple(f"{run.name}: {note}" for run in runs for note in run.notes),
    )


def load_run(path: Path, name: str) -> Run:
    """Read one run directory; ``name`` is what messages call it. Raises DataError when it has no configuration."""
    data = read_run(path)
    if not {"seed", "algorithm.type"} <= data.config.keys():
        raise DataError(f"{name} is no run that can be compared: its config.toml has no seed and algorithm ({path})")
    steps = sorted({step for step, _ in data.curve("train", "step")})  # of a step that is there twice, the last record counts
    costs: dict[str, Scores] = {STEPS: np.asarray(steps, dtype=np.float64)}
    notes = list(data.notes)
    for axis, (metric, *more) in AXES.items():
        values = {step: value for step, value in dict(data.curve("train", metric)).items() if value is not None}
        if axis != STEPS and values:
            others = [dict(data.curve("train", name)) for name in more]
            costs[axis] = np.cumsum([values.get(step, 0.0) + sum(one.get(step) or 0.0 for one in others) for step in steps])
            if len(values) < len(steps):
                notes.append(f"{len(steps) - len(values)} step(s) without {metric} count as 0")
    rewards = {step: value for step, value in dict(data.curve("train", _REWARD)).items() if value is not None}
    by_task = _task_scores(path / "evaluations.jsonl")
    evaluations = {
        one.step: ScoredStep(
            step=one.step,
            score=one.metrics["score"].value,
            panel=Panel(split=one.split, temperature=one.temperature, panel_hash=one.panel_hash),
            task_scores=by_task.get((one.label, one.step), {}),
        )
        for one in data.evaluations
        if "score" in one.metrics and math.isfinite(one.metrics["score"].value)
    }
    ascending = [evaluations[step] for step in sorted(evaluations)]
    return Run(
        name=name,
        config=data.config,
        costs=costs,
        rewards=np.asarray([rewards.get(step, math.nan) for step in steps], dtype=np.float64),
        evaluations=tuple(one for one in ascending if one.panel == ascending[-1].panel),
        notes=tuple(notes),
    )


def reward_curves(groups: Mapping[str, Sequence[Run]], axis: str, *, seed: int) -> Curves | None:
    """Training reward in bins of equal cost, up to the cost that every run reached; None where a run lacks the record."""
    runs = [run for members in groups.values() for run in members]
    end = min(float(run.costs[axis][-1]) if axis in run.costs and len(run.rewards) else 0.0 for run in runs)
    if end <= 0:
        return None
    edges = np.linspace(0.0, end, 1 + min(_NUM_POINTS, *(len(run.rewards) for run in runs)))
    if axis == STEPS:
        edges = np.unique(np.round(edges))  # a bin ends with a step
    values = {
        label: np.stack([bin_means(run.costs[axis], run.rewards, edges) for run in members]) for label, members in groups.items()
    }
    return _curves("training reward", axis, edges[1:], values, within=UNBOUNDED, seed=seed)


def score_curves(groups: Mapping[str, Sequence[Run]], axis: str, *, seed: int) -> Curves | None:
    """Held-out score, on straight lines between the evaluations of a run, within the costs that every run's evaluations
    cover; None where they cover no common range.
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
    values = {label: np.stack([np.interp(grid, x, y) for x, y in members]) for label, members in lines.items()}
    return _curves("held-out score", axis, grid, values, within=(0.0, 1.0), seed=seed)


def _curves(
    quantity: str, axis: str, x: Scores, values: Mapping[str, Scores], *, within: tuple[float, float], seed: int
) -> Curves:
    bands = {label: iqm_band(label, curves, within=within, seed=seed) for label, curves in values.items()}
    return Curves(quantity=quantity, axis=axis, x=x, bands=bands)


def _score_line(run: Run, axis: str) -> tuple[Scores, Scores]:
    """(cost, score) of a run's evaluations with strictly ascending costs: of several at one cost, the last."""
    by_cost = {run.cost_at(axis, one.step): one.score for one in run.evaluations}
    known = sorted(cost for cost in by_cost if math.isfinite(cost))
    return np.asarray(known, dtype=np.float64), np.asarray([by_cost[cost] for cost in known], dtype=np.float64)


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise Incomparable("a run directory is given twice")
    length = next(n for n in range(1, max(map(len, parts)) + 1) if len({one[-n:] for one in parts}) == len(parts))
    return ["/".join(one[-length:]) for one in parts]


def _task_scores(file: Path) -> dict[tuple[str, int], dict[str, float]]:
    """The optional ``task_scores`` of evaluations by label and step; what cannot be read, :func:`read_run` has noted."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else ():
        try:
            record = json.loads(line)
            scores = {str(key): finite(value) for key, value in record["task_scores"].items()}
            place = (str(record["label"]), int(record["step"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        found[place] = {key: value for key, value in scores.items() if value is not None}
    return found


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


def _is_trained(config: Mapping[str, str]) -> bool:
    return config.get("train.num_steps") != "0" or config.get("cold_start.num_examples", "0") != "0"


def _comparable(config: Mapping[str, str]) -> dict[str, str]:
    """The settings that decide what was trained."""
    is_trained = _is_trained(config)  # else the weights are those of the path
    return {
        key: ("none" if value == "none" else "given") if key in _PATHS and is_trained else value
        for key, value in config.items()
        if key not in _SAME_TRAINING and (not key.startswith("evaluation.") or key in _ADAPTATION)
    }


def _grouped(runs: Sequence[Run]) -> dict[str, tuple[Run, ...]]:
    """Runs by label, in the order of labels: the algorithm, and the start of the settings' hash where one is not enough."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = json.dumps(_comparable(run.config), sort_keys=True).encode()
        by_key.setdefault((_algorithm(run.config), hashlib.blake2b(settings).hexdigest()), []).append(run)
    algorithms = [algorithm for algorithm, _ in by_key]
    groups: dict[str, tuple[Run, ...]] = {}
    for (algorithm, digest), members in sorted(by_key.items(), key=lambda one: one[0]):
        seeds = [run.config["seed"] for run in members]
        if len(members) > 1 and not _is_trained(members[0].config):
            names = f"{members[0].name} and {members[1].name}"
            raise Incomparable(f"{names} evaluate the same weights: seeds of an evaluation are no trainings of their own")
        for number, run in enumerate(members):
            if run.config["seed"] in seeds[:number]:
                twin = members[seeds.index(run.config["seed"])]
                raise Incomparable(f"{twin.name} and {run.name} have one configuration and one seed: leave one of them out")
        groups[algorithm if algorithms.count(algorithm) == 1 else f"{algorithm} {digest[:6]}"] = tuple(members)
    return groups


def _algorithm(config: Mapping[str, str]) -> str:
    name = config["algorithm.type"]
    if name == "rapo" and config.get("algorithm.num_hybrid") == "0":
        return "grpo"  # the same, bit for bit
    return config.get("algorithm.preset", name)


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


def _differing(groups: Mapping[str, Sequence[Run]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    configs = [_comparable(members[0].config) for members in groups.values()]
    rows = [(key, tuple(config.get(key, "not set") for config in configs)) for key in sorted({k for c in configs for k in c})]
    return tuple((key, values) for key, values in rows if len(set(values)) > 1)
