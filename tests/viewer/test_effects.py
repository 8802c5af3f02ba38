"""Whether retrieval, tips or branching raised the return: differences within groups, with an interval."""

import math
import random
from pathlib import Path

import pytest

from outrider.types import Outcome
from outrider.viewer.effects import Effect, effects
from outrider.viewer.records import RolloutRow
from tests.viewer.made_up_runs import rollout, write_rollouts


def group(
    step: int, number: int, on_policy: list[float], others: list[float], **fields: object
) -> list[RolloutRow]:
    """A group of on-policy rollouts and of others with these fields."""
    rows = [rollout(step, number, i, value, mode="plain") for i, value in enumerate(on_policy)]
    return rows + [rollout(step, number, len(rows) + i, value, **fields) for i, value in enumerate(others)]


def only(run: Path) -> Effect:
    [effect] = effects(run)
    return effect


def test_the_difference_is_the_mean_over_groups(tmp_path: Path) -> None:
    """Groups count equally, whatever their mean or number of rollouts."""
    rows = group(1, 0, [0.0, 0.0], [1.0], kind="hybrid") + group(
        1, 1, [10.0], [10.5, 9.5, 10.0], kind="hybrid"
    )
    rows += group(2, 0, [0.5], [0.25], kind="hybrid")
    rows += group(2, 1, [0.5, 0.5], []) + group(2, 2, [], [100.0], kind="hybrid")  # of one kind only
    write_rollouts(tmp_path, rows)
    effect = only(tmp_path)
    assert (effect.kind, effect.num_groups) == ("hybrid", 3)
    assert effect.difference == pytest.approx((1 + 0 - 0.25) / 3)
    assert effect.by_step == ((1, 0.5, 2), (2, -0.25, 1))
    assert effect.low <= effect.difference <= effect.high
    assert "+0.25" in effect.text and "groups: 3" in effect.text


@pytest.mark.parametrize("num_groups", [60, 400])
@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_the_interval_covers_the_true_difference_and_excludes_zero_if_there_is_one(
    tmp_path: Path, gain: float, num_groups: int
) -> None:
    draw = random.Random(3)
    rows = []
    for number in range(num_groups):
        level = draw.uniform(0.1, 0.6)  # tasks differ more than kinds
        returns = [float(draw.random() < level + (gain if i > 3 else 0.0)) for i in range(8)]
        rows += group(1 + number // 40, number, returns[:4], returns[4:], kind="tips", mode="tips_on")
    write_rollouts(tmp_path, rows)
    effect = only(tmp_path)
    assert effect.low < gain < effect.high and (effect.low > 0) == (gain > 0)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"kind": "hybrid"}, "hybrid"), ({"kind": "tips"}, "tips"), ({"forked_from": 0}, "forked")],
)
def test_every_kind_is_compared_with_on_policy_rollouts(
    tmp_path: Path, fields: dict[str, object], kind: str
) -> None:
    write_rollouts(tmp_path, group(1, 0, [0.0], [1.0, 1.0], **fields))
    effect = only(tmp_path)
    assert (effect.kind, effect.difference, effect.num_groups) == (kind, 1.0, 1)
    assert math.isnan(effect.low) and math.isnan(effect.high) and "nan" not in effect.text


def test_a_forked_hybrid_rollout_counts_as_hybrid(tmp_path: Path) -> None:
    write_rollouts(tmp_path, group(1, 0, [0.0], [1.0], kind="hybrid", forked_from=0))
    assert [effect.kind for effect in effects(tmp_path)] == ["hybrid"]


def test_the_text_names_the_selection(tmp_path: Path) -> None:
    """On-policy rollouts that could have retrieved and did not are no random sample."""
    rows = [rollout(1, 0, 0, 0.0), rollout(1, 0, 1, 0.0, mode="plain"), rollout(1, 0, 2, 1.0, kind="hybrid")]
    write_rollouts(tmp_path / "chosen", rows)
    assert "not random: 1 of the 2 on-policy rollouts" in only(tmp_path / "chosen").text
    write_rollouts(tmp_path / "assigned", rows[1:])
    assert "assigned before sampling" in only(tmp_path / "assigned").text
    write_rollouts(tmp_path / "forked", group(1, 0, [0.0], [1.0], forked_from=0))
    assert "branching point" in only(tmp_path / "forked").text


def test_faults_and_damaged_files_are_skipped(tmp_path: Path) -> None:
    rows = group(1, 0, [0.0], [1.0], kind="hybrid")
    rows.append(rollout(1, 0, 7, None, kind="hybrid", outcome=Outcome.TOOL_FAULT))
    rows.append(rollout(1, 0, 8, math.nan, kind="hybrid"))
    write_rollouts(tmp_path, rows + group(2, 0, [0.0], [1.0], kind="hybrid"))
    (tmp_path / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    assert only(tmp_path).by_step == ((1, 1.0, 1),)
    assert effects(tmp_path / "none") == []
