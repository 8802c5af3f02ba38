"""Whether retrieval, tips or branching raised the return, compared within groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

import pyarrow as pa

from outrider.errors import DataError
from outrider.rollout.evaluate import difference_interval
from outrider.viewer.records import ROLLOUT_SCHEMA, ROLLOUTS, StepFiles, step_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Mean difference of the return between the rollouts of ``kind`` (``hybrid``, ``tips`` or ``forked``) and
    the on-policy rollouts of the same group, with its 95 % interval over ``num_groups`` groups (NaN for fewer
    than two).

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
_COLUMNS: Final = pa.schema(
    [
        ROLLOUT_SCHEMA.field(name)
        for name in ("trace_id", "rollout", "episode_return", "mode", "kind", "forked_from")
    ]
)
Rows: TypeAlias = Sequence[Mapping[str, Any]]


def effects(run: Path) -> list[Effect]:
    """One entry per kind that the run has together with on-policy rollouts in at least one group. Missing and
    damaged files are skipped.

    The mean over groups of the difference of the group's two means; groups are resampled for the interval.
    """
    files = StepFiles(run / ROLLOUTS)
    differences: dict[str, dict[int, list[float]]] = {kind: {} for kind in _NAMES}
    siblings: dict[str, list[str]] = {kind: [] for kind in _NAMES}  # modes of the on-policy rollouts
    for step in files.steps():
        for group in _groups(files, step):
            by_kind: dict[str, Rows] = {
                kind: [row for row in group if _kind(row) == kind] for kind in (*_NAMES, "on-policy")
            }
            for kind in _NAMES:
                if by_kind[kind] and by_kind["on-policy"]:
                    difference = _mean_return(by_kind[kind]) - _mean_return(by_kind["on-policy"])
                    differences[kind].setdefault(step, []).append(difference)
                    siblings[kind] += [row["mode"] for row in by_kind["on-policy"]]
    return [_effect(kind, differences[kind], siblings[kind]) for kind in _NAMES if differences[kind]]


def _groups(files: StepFiles, step: int) -> list[Rows]:
    """The rollouts of a step that have a return, by group."""
    try:
        rows = files.read_table(step_file(step), _COLUMNS).to_pylist()
    except DataError:
        return []
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["episode_return"] is not None:
            groups.setdefault(row["trace_id"], []).append(row)
    return list(groups.values())


def _kind(row: Mapping[str, Any]) -> str:
    is_forked = row["kind"] == "on-policy" and row["forked_from"] != row["rollout"]
    return "forked" if is_forked else str(row["kind"])


def _mean_return(rows: Rows) -> float:
    return fmean(row["episode_return"] for row in rows)


def _effect(kind: str, by_step: Mapping[int, Sequence[float]], modes: Sequence[str]) -> Effect:
    values = [value for differences in by_step.values() for value in differences]
    low, high = difference_interval(values) if len(values) > 1 else (float("nan"), float("nan"))
    mean = fmean(values)
    interval = f" [{low:+.2f}, {high:+.2f}]" if len(values) > 1 else ""
    groups = "1 group" if len(values) == 1 else f"{len(values)} groups"
    return Effect(
        kind=kind,
        difference=mean,
        low=low,
        high=high,
        num_groups=len(values),
        by_step=tuple((step, fmean(part), len(part)) for step, part in sorted(by_step.items())),
        text=f"The return of rollouts that {_NAMES[kind]} minus that of on-policy rollouts of the same group "
        f"is {mean:+.2f}{interval} over {groups}, {_caveat(kind, modes)}.",
    )


def _caveat(kind: str, modes: Sequence[str]) -> str:
    """How the two sides were selected; ``modes`` are those of the on-policy rollouts."""
    if kind == "forked":
        return "but only rollouts that got as far as a branching point can branch, which is no random choice"
    word = "retrieval" if kind == "hybrid" else "tips"
    num = sum(kind in mode for mode in modes)
    if num:
        return (
            f"but the choice is not random: {num} of the {len(modes)} on-policy rollouts could have had "
            f"{word}, and had none, for example because they ended early"
        )
    return f"and {word} were assigned before sampling, so the two sides differ by nothing else"
