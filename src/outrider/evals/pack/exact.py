"""Exact returns: trainings whose expected return is computed and not sampled, hence without a held-out panel.

One JSON object a training, as ``python -m benchmarks.learning toys`` writes it and as a line of a pack's
``exact.jsonl``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import PackError
from outrider.evals.pack.format import read_bytes
from outrider.evals.statistics import Sample, iqm_estimate

DECIMALS: Final = 3  # of an expected return: what a table does not show is a tie
_Key = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
_MAX_ROWS: Final = 20_000


class ExactResult(BaseModel):
    """One training. ``settings`` and ``max_policy_tokens`` are what it was computed with; ``result`` has the
    ``expected_return`` and what was counted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    toy: _Key
    method: _Key
    seed: int = Field(ge=0, lt=2**63)
    settings: dict[str, Any]
    max_policy_tokens: int = Field(ge=0)
    result: dict[str, float | int]

    @property
    def name(self) -> str:
        """Name of the row in a pack."""
        return f"{self.toy}/{self.method}-{self.seed}"

    @property
    def expected_return(self) -> float:
        """Of the policy at the end."""
        return float(self.result["expected_return"])

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that it wrote in training."""
        return int(self.result.get("num_policy_tokens", 0))


def parse_exact_result(content: bytes | str, location: str) -> ExactResult:
    """Read one object. Raises PackError naming the place."""
    try:
        result = ExactResult.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise PackError(
            f"{location} is no exact result: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
        ) from error
    if "expected_return" not in result.result:
        raise PackError(f"{location} is no exact result: result.expected_return is missing")
    return result


def read_exact(path: Path) -> dict[str, ExactResult]:
    """The rows of an ``exact.jsonl`` by name, in file order. Raises PackError for a malformed line and a row
    that is there twice.
    """
    rows: dict[str, ExactResult] = {}
    lines = read_bytes(path).splitlines()
    if len(lines) > _MAX_ROWS:
        raise PackError(f"{path.name} has more than {_MAX_ROWS} lines")
    for number, line in enumerate(lines, start=1):
        result = parse_exact_result(line, f"{path.name}:{number}")
        if result.name in rows:
            raise PackError(f"{path.name}:{number}: {result.name} is there twice")
        rows[result.name] = result
    return rows


def exact_line(result: ExactResult) -> str:
    """The row as a line of ``exact.jsonl``, without the line's end."""
    return json.dumps(result.model_dump(mode="json"), sort_keys=True)


def group_by_method(rows: Mapping[str, ExactResult]) -> dict[tuple[str, str], list[ExactResult]]:
    """Rows of one toy and method, by seed; the order of the file between methods."""
    groups: dict[tuple[str, str], list[ExactResult]] = {}
    for row in rows.values():
        groups.setdefault((row.toy, row.method), []).append(row)
    return {key: sorted(members, key=lambda member: member.seed) for key, members in groups.items()}


def exact_groups(rows: Mapping[str, ExactResult]) -> list[dict[str, Any]]:
    """For each toy and method the returns by seed, their mean, and the interquartile mean with its interval
    over seeds.
    """
    return [_group(toy, method, members) for (toy, method), members in group_by_method(rows).items()]


def _group(toy: str, method: str, members: Sequence[ExactResult]) -> dict[str, Any]:
    returns = [entry.expected_return for entry in members]
    rounded = np.asarray([[round(entry, DECIMALS)] for entry in returns], dtype=np.float64)
    iqm = iqm_estimate(Sample(name=method, scores=rounded), seed=0, within=(0.0, 1.0))
    return {
        "toy": toy, "method": method, "returns": {str(entry.seed): entry.expected_return for entry in members},
        "mean": math.fsum(returns) / len(returns), "interquartile_mean": iqm.value,
        "ci_low": iqm.low if iqm.has_interval else None, "ci_high": iqm.high if iqm.has_interval else None,
    }  # fmt: skip
