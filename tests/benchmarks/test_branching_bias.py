"""The enumeration behind docs/algorithms/details/arpo.md, on a few of its trees."""

import numpy as np
import pytest
from benchmarks.branching_bias import (
    RULES,
    expected_gradient,
    lowest_cosines,
    make_tree,
    one_first_turn,
    shapes,
)

from tests.algorithms.test_arpo_gradient import exact_gradient, expected_estimate, policy_and_returns


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_probabilities_of_all_tree_shapes_sum_to_one(rule: str) -> None:
    found = list(shapes(make_tree(1), (0, 2), RULES[rule], leaves=4, num_children=2))
    assert sum(chance for chance, _ in found) == pytest.approx(1.0)
    assert all(len(firsts) == 4 and firsts[:2] == (0, 2) for _, firsts in found)


def test_the_enumeration_agrees_with_the_advantages_of_the_update() -> None:
    """Forks that always leave: the fixed shape of tests/algorithms/test_arpo_gradient.py, through traces and
    credit.
    """
    tree = make_tree(2)
    found = expected_gradient(tree, lambda change: 1.0, leaves=4, first_wave=2)
    np.testing.assert_allclose(found, expected_estimate(*policy_and_returns(2), "soft"), atol=1e-12)
    np.testing.assert_allclose(tree.exact_gradient(), exact_gradient(*policy_and_returns(2)), atol=1e-12)


def test_forks_that_depend_on_the_text_bias_the_gradient_of_the_second_turn() -> None:
    second = {
        name: lowest_cosines(rule, num_trees=4, leaves=3, first_wave=2)[1] for name, rule in RULES.items()
    }
    coin, bernoulli, threshold = second.values()
    assert coin == pytest.approx(1.0, abs=1e-12)
    assert 0.99 < bernoulli < 1.0 - 1e-6 and threshold < bernoulli


def test_one_first_turn_for_all_leaves_has_no_gradient() -> None:
    found, exact = one_first_turn(num_trees=3)
    assert found < 1e-12 and exact > 0.01
