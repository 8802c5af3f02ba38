"""Do hybrid rollouts do more kinds of things? Clusters of step embeddings by PCA and DBSCAN, RAPO's measure
of diversity (arXiv 2603.03078).

    python -m benchmarks.diversity RUN... [--on-policy RUN...] [--by retrieved|mode] [--steps N...]
                                          [--embedder minilm|hash] [--eps ...] [--min-samples ...]

Embeds every turn that the policy wrote in recorded training rollouts, and counts the clusters of hybrid and
of on-policy rollouts by task and training step, at equal numbers of turns. From the paper: PCA, DBSCAN and
the comparison. Our choices, because the paper does not give its settings: turns without observations, MiniLM,
PCA by task and step on equal numbers of turns of both groups, DBSCAN on each group, all numbers below, and
means over draws from the larger group.

A rollout is hybrid if it contains a retrieved step. A minimum similarity makes that a selection: rollouts on
the path of the expert retrieve. Therefore on-policy rollouts can come from another run of the same tasks
(--on-policy, one run for each RUN), and hybrid ones can be all that were allowed to retrieve (--by mode).

Prints Markdown. Intervals are of the paired difference, 95 %, over tasks and steps, not over runs.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

import numpy as np

from benchmarks.diversity_clusters import Count, HybridBy, Steps, count, steps_by_task
from benchmarks.markdown_table import markdown
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.memory.embedders import Embedder, load_embedder
from outrider.rollout.evaluate import difference_interval
from outrider.runs import Run

EPS: Final = (0.1, 0.3, 0.5)
MIN_SAMPLES: Final = (1, 2, 3)
COLUMNS: Final = (
    "eps", "least turns of a cluster", "clusters, hybrid", "on-policy", "difference", "difference by run",
    "turns in no cluster, hybrid", "on-policy",
)  # fmt: skip
Key: TypeAlias = tuple[int, int, str]
"""Number of the run, training step, task."""


def read_groups(
    runs: Sequence[Path], others: Sequence[Path], *, steps: Sequence[int], by: HybridBy, with_retrieved: bool
) -> dict[Key, Steps]:
    """Return both groups by run, step and task, with on-policy rollouts of ``others`` if given.

    Raises ConfigError for unequal numbers of runs, and DataError for unreadable runs.
    """
    if others and len(others) != len(runs):
        raise ConfigError(f"--on-policy: {len(others)} runs beside {len(runs)}; give one for each")
    groups: dict[Key, Steps] = {}
    for number, path in enumerate(runs):
        run, other = Run.from_path(path), Run.from_path(others[number]) if others else None
        for step in steps or run.steps():
            found = steps_by_task(run.traces(step).to_pylist(), hybrid_by=by, with_retrieved=with_retrieved)
            beside = found if other is None else steps_by_task(other.traces(step).to_pylist(), hybrid_by=by)
            for task in found.keys() & beside.keys():
                pair = Steps(hybrid=found[task].hybrid, on_policy=beside[task].on_policy)
                groups[number, step, task] = pair
    return dict(sorted(groups.items()))


def counted(
    groups: Mapping[Key, Steps],
    embedder: Embedder,
    settings: Sequence[tuple[float, int]],
    parsed: argparse.Namespace,
) -> dict[Key, list[Count]]:
    """Return the tasks and steps with enough turns of both groups. Raises DataError if there are none."""
    found = {}
    for (run, step, task), steps in groups.items():
        if min(len(steps.hybrid), len(steps.on_policy)) >= parsed.least_turns:
            hybrid, on_policy = (
                np.asarray(embedder.embed(texts), np.float64) for texts in (steps.hybrid, steps.on_policy)
            )
            found[run, step, task] = count(
                hybrid, on_policy, settings=settings, num_components=parsed.components,
                num_draws=parsed.draws, seed=parsed.seed, key=(run, step, task),
            )  # fmt: skip
    if not found:
        raise DataError(
            f"no task has {parsed.least_turns} turns of hybrid and of on-policy rollouts in one training step"
        )
    return found


def table(found: Mapping[Key, Sequence[Count]], settings: Sequence[tuple[float, int]]) -> str:
    """A row a pair of settings."""
    runs = sorted({run for run, _, _ in found})
    rows = []
    for number, (eps, least) in enumerate(settings):
        counts = {key: each[number] for key, each in found.items()}
        differences = [one.difference for one in counts.values()]
        low, high = difference_interval(differences)
        by_run = [fmean(one.difference for key, one in counts.items() if key[0] == run) for run in runs]
        clusters, noise = (
            [fmean(getattr(one, name)[kind] for one in counts.values()) for kind in (0, 1)]
            for name in ("clusters", "noise")
        )
        rows.append(
            (
                f"{eps:g}", str(least), f"{clusters[0]:.2f}", f"{clusters[1]:.2f}",
                f"{fmean(differences):+.2f} [{low:+.2f}, {high:+.2f}]",
                ", ".join(f"{one:+.2f}" for one in by_run), f"{noise[0]:.0%}", f"{noise[1]:.0%}",
            )
        )  # fmt: skip
    return markdown(COLUMNS, rows)


def summary(groups: Mapping[Key, Steps], found: Mapping[Key, Sequence[Count]]) -> str:
    """Describe the comparison in one line."""
    sizes = [min(len(groups[key].hybrid), len(groups[key].on_policy)) for key in found]
    variance = fmean(each[0].variance_kept for each in found.values())
    return (
        f"{len(found)} of {len(groups)} tasks and steps, {min(sizes)} to {max(sizes)} turns of either kind "
        f"(mean {fmean(sizes):.1f}); PCA keeps {variance:.0%} of the variance"
    )


def make_parser() -> argparse.ArgumentParser:
    """Defaults are ours, not the paper's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diversity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories with hybrid rollouts")
    add("--on-policy", nargs="+", type=Path, default=[], metavar="RUN", help="runs of the on-policy rollouts")
    add("--by", choices=("retrieved", "mode"), default="retrieved", help="criterion of hybrid rollouts")
    add("--with-retrieved", action="store_true", help="count the retrieved steps themselves too")
    add("--steps", nargs="+", type=int, default=[], help="training steps (default: all with traces)")
    add("--embedder", default="minilm", help="minilm (default), hash, or another by its name")
    add("--eps", nargs="+", type=float, default=EPS, help="DBSCAN's radius (ours: 0.1 0.3 0.5)")
    add("--min-samples", nargs="+", type=int, default=MIN_SAMPLES, help="turns of a cluster (ours: 1 2 3)")
    add("--components", type=int, default=2, help="of the PCA (ours: 2)")
    add("--draws", type=int, default=20, help="subsamples of the kind with more turns (ours: 20)")
    add("--least-turns", type=int, default=5, help="of either kind, or the group is left out (ours: 5)")
    add("--seed", type=int, default=0, help="of the subsamples")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 runs cannot be read or compared, 2 bad arguments or no scikit-learn."""
    parsed = make_parser().parse_args(given)
    settings = [(eps, least) for eps in parsed.eps for least in parsed.min_samples]
    try:
        numbers = (*parsed.eps, *parsed.min_samples, parsed.components, parsed.draws, parsed.least_turns)
        if min(numbers) <= 0:
            raise ConfigError("eps, sizes and numbers of draws must be above 0")
        groups = read_groups(
            parsed.runs, parsed.on_policy, steps=parsed.steps, by=parsed.by,
            with_retrieved=parsed.with_retrieved,
        )  # fmt: skip
        found = counted(groups, load_embedder(parsed.embedder), settings, parsed)
    except OutriderError as error:
        print(f"benchmarks.diversity: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{table(found, settings)}\n\n{summary(groups, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
