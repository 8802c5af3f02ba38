"""What must hold for every method of the group family, through the algorithms that a run uses.

docs/algorithms/objectives.md lists all rules with their tests; those about gradients are in
``tests/training/test_objective_rules.py``.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import Algorithm
from outrider.algorithms.grpo import Grpo, GrpoSettings, ReinforcePlusPlus, ReinforcePlusPlusSettings
from outrider.algorithms.presets import GRPO_PRESETS, REINFORCE_PLUS_PLUS_PRESETS
from outrider.config import validate
from tests.algorithms.grouped import Played, token_credit, trace_of

PLAIN = {"reward_kl_weight": 0.0, "overlong": "none"}  # what is not a function of the returns alone
RETURN = st.floats(-5.0, 5.0).map(lambda value: round(value, 2))
ROLLOUT = st.tuples(RETURN, st.lists(st.integers(0, 1), min_size=1, max_size=6))
GROUPS = st.lists(st.lists(ROLLOUT, min_size=2, max_size=4), min_size=1, max_size=3)


def algorithm(name: str, **options: Any) -> Algorithm:
    if name in GRPO_PRESETS:
        return Grpo(validate(GrpoSettings, {"preset": name, **PLAIN, **options}))
    return ReinforcePlusPlus(validate(ReinforcePlusPlusSettings, {"preset": name, **PLAIN, **options}))


def credit(page: Algorithm, groups: Any, *, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    """One value a policy token."""
    traces = [
        trace_of(
            [Played(value=scale * value + shift, mask=mask) for value, mask in rollouts], key=str(number)
        )
        for number, rollouts in enumerate(groups)
    ]
    page.assign_step_advantages(traces)
    return token_credit(traces)


NAMES = [*GRPO_PRESETS, *REINFORCE_PLUS_PLUS_PRESETS]


def test_a_kl_in_the_reward_has_a_scale_of_its_own() -> None:
    """The exception: the reward's scale sets what a nat costs."""
    found = []
    for scale in (1.0, 10.0):
        trace = trace_of(
            [Played(value=0.0, mask=[1], kl=[1.0]), Played(value=scale, mask=[1, 1], kl=[0.5, 0.0])]
        )
        algorithm("reinforce++", reward_kl_weight=0.5).assign_step_advantages([trace])
        found.append(token_credit([trace]))
    assert np.abs(found[0] - found[1]).max() > 0.05


@given(groups=GROUPS, name=st.sampled_from(NAMES), holes=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_tokens_that_the_policy_did_not_write_change_no_credit(
    groups: Any, name: str, holes: list[int]
) -> None:
    """Other observations, of other lengths and with other rewards: a discount, a whitening or a mean that saw
    them would move.
    """
    options = {"gamma": 0.9} if name == "reinforce++" else {}
    page = algorithm(name, **options)
    base = credit(page, groups)
    stuffed = [
        [
            (
                value,
                [one for i, wrote in enumerate(mask) for one in ([wrote] if wrote else []) + [0] * holes[i]],
            )
            for value, mask in own
        ]
        for own in groups
    ]
    traces = [
        trace_of([Played(value=value, mask=mask or [0]) for value, mask in own], key=str(n))
        for n, own in enumerate(stuffed)
    ]
    for trace in traces:
        for node in trace.nodes:
            node.reward, node.kl = (0.0, ()) if node.trainable else (77.0, (5.0,))
    page.assign_step_advantages(traces)
    assert token_credit(traces).tolist() == base.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_groups_changes_no_credit(name: str) -> None:
    groups = [[(0.0, [1]), (1.0, [1, 1])], [(3.0, [1, 0, 1]), (2.5, [1])]]
    base = credit(algorithm(name), groups)
    found = credit(algorithm(name), groups[::-1])
    np.testing.assert_allclose(np.concatenate([found[3:], found[:3]]), base, atol=1e-12)
