"""Whether retrieval, tips or branching raised the return, compared within groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import pyarrow as pa

from outrider.errors import DataError
from outrider.rollout.evaluate import difference_interval
from outrider.viewer.records import ROLLOUT_SCHEMA, ROLLOUTS, StepFiles, step_file
from outrider.viewer.run_reader import finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Mean difference of the return between the rollouts of ``kind`` (``hybrid``, ``tips`` or ``forked``) and
    the on-policy rollouts of the same group, with its 95 % interval over ``num_groups`` groups (NaN for fewer
    than two, too narrow for fewer than ten).

    ``by_step`` has (training step, mean difference, number of groups) in order. ``text`` is one sentence with
    the result and its caveat.
    """

    kind: str
    difference: float
    low: float
    high: float
    num_groups: int
    by_step: tuple[tuple[int, float, int], ...]
    text: str


_NAMES: Final = {"hybrid": "retrieved", "tips": "had tips", "forked": "branched from another one"}
_MANY: Final = 300
_READ: Final = ("trace_id", "rollout", "episode_return", "mode", "kind", "forked_from")
_COLUMNS: Final = pa.schema([ROLLOUT_SCHEMA.field(name) for name in _READ])


def effects(run: Path) -> list[Effect]:
    """One entry per kind that the run has together with on-policy rollouts in at least one group. Missing and
    damaged files are skipped.
    """
    files = StepFiles(run / ROLLOUTS)
    differences: dict[str, dict[int, list[float]]] = {kind: {} for kind in _NAMES}
    modes: dict[str, list[str]] = {kind: [] for kind in _NAMES}  # of the on-policy rollouts
    for step in files.steps():
        try:
            rows = files.read_table(step_file(step), _COLUMNS).to_pylist()
        except DataError:
            continue
        groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            if finite(row["episode_return"]) is not None:
                is_forked = row["kind"] == "on-policy" and row["forked_from"] != row["rollout"]
                kind = "forked" if is_forked else row["kind"]
                groups.setdefault(row["trace_id"], {}).setdefault(kind, []).append(row)
        for group in groups.values():
            means = {kind: fmean(row["episode_return"] for row in part) for kind, part in group.items()}
            for kind in _NAMES.keys() & means.keys() if "on-policy" in means else ():
                differences[kind].setdefault(step, []).append(means[kind] - means["on-policy"])
                modes[kind] += [row["mode"] for row in group["on-policy"]]
    return [_effect(kind, differences[kind], modes[kind]) for kind in _NAMES if differences[kind]]


def _effect(kind: str, by_step: Mapping[int, Sequence[float]], modes: Sequence[str]) -> Effect:
    values = [value for differences in by_step.values() for value in differences]
    low, high, interval = math.nan, math.nan, ""
    if len(values) > 1:
        margin = 1.96 * stdev(values) / math.sqrt(len(values))
        # a bootstrap of thousands of groups takes seconds, and their mean is normal
        normal = fmean(values) - margin, fmean(values) + margin
        low, high = difference_interval(values) if len(values) <= _MANY else normal
        interval = f" [{low:+.2f}, {high:+.2f}]"
    return Effect(
        kind=kind,
        difference=fmean(values),
        low=low,
        high=high,
        num_groups=len(values),
        by_step=tuple((step, fmean(part), len(part)) for step, part in by_step.items()),
        text=f"The return of rollouts that {_NAMES[kind]} minus that of on-policy rollouts of the same group "
        f"is {fmean(values):+.2f}{interval} (groups: {len(values)}), {_caveat(kind, modes)}.",
    )


def _caveat(kind: str, modes: Sequence[str]) -> str:
    """How the two sides were selected; ``modes`` are those of the on-policy rollouts."""
    if kind == "forked":
        return "but only rollouts that reached a branching point could branch, which is no random choice"
    if num := sum(kind in mode for mode in modes):
        return (
            f"but the choice is not random: {num} of the {len(modes)} on-policy rollouts could have had the "
            "same and did not, for example because they ended early"
        )
    return "and the kinds were assigned before sampling"
