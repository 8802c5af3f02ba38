"""Rejection sampling: who is kept, what is written, what is reported, and whose gradient it is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.grpo import Rejection, RejectionSettings
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.trace import Trace
from tests.algorithms.builders import Rollout, build_trace, token_advantages
from tests.algorithms.test_exact_gradient import bias


def kept(trace: Trace, **options: Any) -> list[int]:
    Rejection(validate(RejectionSettings, options)).assign_advantages(trace)
    return [leaf.rollout for leaf, _ in trace.rollouts() if leaf.advantage]


def group() -> Trace:
    """Rollouts 1 and 3 wrote the same; 4 is the best; 5 is a fault."""
    values = [0.5, 1.0, 1.5, 1.0, 2.0, None]
    return build_trace(
        [
            Rollout(value=value, mask=[1, 0, 1], first_token=5 if row in (1, 3) else 10 * row + 5)
            for row, value in enumerate(values)
        ]
    )


def test_options_by_hand() -> None:
    for options, expected in (
        ({}, [1, 2, 4]),
        ({"deduplicate": False}, [1, 2, 3, 4]),
        ({"keep": "best"}, [4]),
        ({"keep": "first"}, [1]),
        ({"max_kept": 2}, [1, 2]),
        ({"threshold": 1.2}, [2, 4]),
        ({"threshold": 2.5}, []),
        ({"threshold": -1.0, "deduplicate": False}, [0, 1, 2, 3, 4]),
    ):
        assert kept(group(), **options) == expected, options
    ties = build_trace([Rollout(value=1.0, first_token=10 * row) for row in range(3)])
    assert kept(ties, keep="best") == [0]


def test_written_advantages_and_measurements() -> None:
    trace = credited_trace = group()
    credit = Rejection(validate(RejectionSettings, {})).assign_advantages(trace)
    assert [leaf.advantage for leaf, _ in trace.rollouts()] == [0.0, 1.0, 1.0, 0.0, 1.0, None]
    # rejected tokens have no credit: they are in no denominator
    assert token_advantages([trace]).tolist() == [1.0] * 6
    assert (credit.advantages.has_signal, credit.advantages.reason) == (True, None)
    means = {name: np.mean(values) for name, values in credit.measurements.items()}
    assert means == {
        "rejection/passed_fraction": 0.8,
        "rejection/kept_fraction": 0.6,
        "rejection/task_fraction": 1.0,
    }
    nobody = Rejection(validate(RejectionSettings, {"threshold": 3.0})).assign_advantages(trace := group())
    assert (nobody.advantages.reason, nobody.measurements["rejection/task_fraction"]) == ("rejected", [0.0])
    assert token_advantages([trace]).size == 0 and trace.leaves[0].advantage == 0.0
    faults = Rejection(validate(RejectionSettings, {})).assign_advantages(build_trace([Rollout(value=None)]))
    assert faults.advantages.reason == "unscorable" and not any(faults.measurements.values())
    with pytest.raises(ValueError, match="already has an advantage"):
        kept(credited_trace)


@given(
    values=st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8),
    keep=st.sampled_from(["all", "best", "first"]),
    deduplicate=st.booleans(),
    tokens=st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_no_rollout_below_the_threshold_is_ever_kept(
    values: Any, keep: str, deduplicate: bool, tokens: list[int]
) -> None:
    trace = build_trace(
        [Rollout(value=value, first_token=token) for value, token in zip(values, tokens, strict=False)]
    )
    found = kept(trace, threshold=0.5, keep=keep, deduplicate=deduplicate)
    good = [row for row, value in enumerate(values) if value is not None and value >= 0.5]
    assert set(found) <= set(good) and bool(found) == bool(good)
    assert len(found) <= (
        1 if keep != "all" else len({tokens[row] for row in good}) if deduplicate else len(good)
    )
    if keep == "all":
        assert {tokens[row] for row in found} == {tokens[row] for row in good}
    elif found:
        assert found == [good[0] if keep == "first" else max(good, key=lambda row: (values[row], -row))]
    assert set(token_advantages([trace]).tolist()) <= {1.0}


def test_it_climbs_the_chance_of_passing_and_nothing_else() -> None:
    """Over all groups the expected gradient is exactly that of P(return >= threshold), whatever the returns
    above are.
    """
    tree = bias.make_tree(seed=2)
    algorithm = Rejection(validate(RejectionSettings, {"threshold": 0.6, "deduplicate": False}))

    def credit(paths: Any) -> Any:
        return algorithm.assign_advantages(
            build_trace([Rollout(value=float(tree.returns[path])) for path in paths])
        ).advantages

    found = bias.expected_gradient(tree, credit, group_size=2)
    weights = tree.path_probabilities * (tree.returns >= 0.6)
    np.testing.assert_allclose(found, np.tensordot(weights, tree.scores, axes=1), atol=1e-12)
    assert np.abs(found).max() > 0.01


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"advantage": "leave_one_out"}, "remove advantage"),
        ({"aggregation": "sequence_mean_token_mean"}, "token_mean"),
        ({"keep": "best", "max_kept": 2}, "remove max_kept"),
        ({"group_size": 1}, "group_size"),
        ({"positive_nll": 0.1}, "remove positive_nll"),
        ({"observation_nll": 0.1}, "observation_nll also trains on rollouts that rejection sampling drops"),
        ({"distill": {"help": ["sibling"]}}, "distill also trains"),
    ],
    ids=str,
)
def test_settings_without_meaning_are_errors(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate(RejectionSettings, wrong)
