"""Rollouts by filter, sorted, a page at a time, with the histogram of returns that the filter leaves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PAGE: Final = 100
NUM_BINS: Final = 20
COLUMNS: Final = (
    "where", "step", "task_key", "trace_id", "rollout", "node_id", "outcome", "fault", "episode_return",
    "success", "advantage", "mode", "kind", "num_turns", "num_tokens", "num_calls", "mean_entropy",
    "num_splices", "num_tips", "forked_from",
)  # fmt: skip
_CHOICES: Final = ("where", "task_key", "kind", "mode", "outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """``choices`` are exact values by column. ``low`` and ``high`` bound the return, both inclusive;
    ``training`` leaves evaluations out.
    """

    choices: Mapping[str, str]
    low: float | None = None
    high: float | None = None
    training: bool = False
    sort: str = "step"
    descending: bool = False
    offset: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> "Query":
        """Of an address. Raises ValueError for what is no number or no column."""
        sort = params.get("sort", "step")
        if sort not in COLUMNS:
            raise ValueError(f"no column {sort!r}")
        low, high = (_number(params.get(name)) for name in ("low", "high"))
        return cls(
            choices={name: params[name] for name in _CHOICES if params.get(name)},
            low=low,
            high=high,
            training=params.get("training") == "1",
            sort=sort,
            descending=params.get("descending") == "1",
            offset=max(0, int(params.get("offset", "0"))),
        )


def find(table: pa.Table, query: Query) -> dict[str, Any]:
    """``total`` rollouts, one page of them as ``rows``, a histogram (of all choices but the return's bounds),
    and how often each kind, mode and outcome occurs.
    """
    chosen = table.filter(_mask(table, query)) if query.choices or query.training else table
    bounded = _filter_returns(chosen, query)
    order = "descending" if query.descending else "ascending"
    sort_column = bounded[query.sort]
    sort_column = (
        pc.cast(sort_column, pa.string()) if pa.types.is_dictionary(sort_column.type) else sort_column
    )
    keys = pa.table(
        {"by": sort_column, "place": pa.array(np.arange(len(bounded)))}
    )  # equal ones in the order of files
    indices = pc.sort_indices(keys, sort_keys=[("by", order), ("place", "ascending")])
    page = bounded.take(indices[query.offset : query.offset + PAGE])
    return {
        "total": len(bounded),
        "offset": query.offset,
        "rows": rows_of_table(page),
        "histogram": histogram(chosen),
        "counts": {name: _counts(bounded, name) for name in ("kind", "mode", "outcome")},
    }


def rows_of_table(table: pa.Table) -> list[dict[str, Any]]:
    """Plain data; numbers that JSON has not become null."""
    return [{name: _plain(value) for name, value in row.items()} for row in table.select(COLUMNS).to_pylist()]


def histogram(table: pa.Table) -> dict[str, Any]:
    """``edges`` (one more than ``numbers``) over the finite returns, and how many rollouts have none."""
    values = table["episode_return"].to_numpy(zero_copy_only=False).astype(float)
    finite = values[np.isfinite(values)]
    missing = int(len(values) - len(finite))
    if not len(finite):
        return {"edges": [], "numbers": [], "missing": missing}
    different = np.unique(finite)
    if len(different) == 1:
        edges = np.array([different[0] - 0.5, different[0] + 0.5])
    else:
        edges = np.linspace(different[0], different[-1], NUM_BINS + 1)
    numbers, edges = np.histogram(finite, bins=edges)
    return {"edges": edges.tolist(), "numbers": numbers.tolist(), "missing": missing}


def _mask(table: pa.Table, query: Query) -> pa.Array:
    masks = [pc.equal(table[name], value) for name, value in query.choices.items()]
    if query.training:
        masks.append(pc.starts_with(pc.cast(table["where"], pa.string()), "step-"))
    whole = masks[0]
    for mask in masks[1:]:
        whole = pc.and_(whole, mask)
    return whole


def _filter_returns(table: pa.Table, query: Query) -> pa.Table:
    for bound, compare in ((query.low, pc.greater_equal), (query.high, pc.less_equal)):
        if bound is not None:
            table = table.filter(pc.fill_null(compare(table["episode_return"], bound), False))
    return table


def _counts(table: pa.Table, name: str) -> dict[str, int]:
    counts = pc.value_counts(table[name].combine_chunks() if len(table) else table[name])
    return {str(entry["values"]): entry["counts"] for entry in counts.to_pylist()}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(text: str | None) -> float | None:
    return float(text) if text else None
