"""What must hold for every method of the group family, through the algorithms that a run uses.

docs/algorithms/objectives.md lists all rules with their tests; those about gradients are in
``tests/train/test_objective_rules.py``.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.algorithms.base import Algorithm
from outrider.algorithms.grpo import Grpo, GrpoSettings, ReinforcePlusPlus, ReinforcePlusPlusSettings
from outrider.algorithms.losses import clipped_surrogate_per_token
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
    page.advantages(traces)
    return token_credit(traces)


def is_spread(groups: Any) -> bool:
    """No group has a spread so small that scaling could carry it over the tolerance."""
    returns = [[value for value, _ in rollouts] for rollouts in groups]
    every = [value for own in returns for value in own]
    return np.ptp(every) > 0.1 and all(np.ptp(own) == 0.0 or np.ptp(own) > 0.1 for own in returns)


NAMES = [*GRPO_PRESETS, *REINFORCE_PLUS_PLUS_PRESETS]


@settings(deadline=None, max_examples=50)
@given(groups=GROUPS, name=st.sampled_from(NAMES), shift=RETURN, scale=st.floats(0.5, 20.0))
def test_returns_may_be_shifted_and_scaled(groups: Any, name: str, shift: float, scale: float) -> None:
    """Scaling multiplies what divides by no std; up to the epsilon of the std, everything else stays."""
    assume(is_spread(groups))
    page = algorithm(name)
    base = credit(page, groups)
    assume("++" not in name or base.size == 0 or np.ptp(base) > 0.1)
    np.testing.assert_allclose(credit(page, groups, shift=shift), base, atol=1e-3)
    factor = scale if name == "dr-grpo" or name.startswith("rloo") else 1.0
    np.testing.assert_allclose(credit(page, groups, scale=scale), factor * base, rtol=1e-3, atol=1e-3)


def test_a_kl_in_the_reward_has_a_scale_of_its_own() -> None:
    """The exception: the reward's scale sets what a nat costs."""
    found = []
    for scale in (1.0, 10.0):
        trace = trace_of(
            [Played(value=0.0, mask=[1], kl=[1.0]), Played(value=scale, mask=[1, 1], kl=[0.5, 0.0])]
        )
        algorithm("reinforce++", reward_kl_weight=0.5).advantages([trace])
        found.append(token_credit([trace]))
    assert np.abs(found[0] - found[1]).max() > 0.05


@settings(deadline=None, max_examples=30)
@given(groups=GROUPS, name=st.sampled_from(list(GRPO_PRESETS)), std=st.sampled_from([None, "batch"]))
def test_the_advantages_of_a_group_sum_to_zero(groups: Any, name: str, std: str | None) -> None:
    assume(std is None or GRPO_PRESETS[name].get("advantage") != "group_centered")
    page = algorithm(name, **({"advantage_std": std} if std else {}))
    traces = [
        trace_of([Played(value=value) for value, _ in rollouts], key=str(n))
        for n, rollouts in enumerate(groups)
    ]
    page.advantages(traces)
    for trace in traces:
        assert abs(token_credit([trace]).sum()) < 1e-6


@settings(deadline=None, max_examples=30)
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
    page.advantages(traces)
    assert token_credit(traces).tolist() == base.tolist()


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(-2.0, 2.0)), min_size=1, max_size=12),
    delta=st.floats(1.3, 6.0),
)
def test_a_bound_on_the_unclipped_ratio_is_the_dual_clip(tokens: Any, delta: float) -> None:
    """TRL's ``delta``: max(-A min(r, delta), -A clip(r)) is verl's dual clip with c = delta, in value and
    gradient.
    """
    log_ratio, advantages = (
        torch.tensor(list(column), dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    logprobs = log_ratio.requires_grad_()
    ratio = logprobs.exp()
    bounded = torch.where(ratio > delta, torch.full_like(ratio, delta), ratio)
    written = torch.maximum(-advantages * bounded, -advantages * ratio.clamp(0.8, 1.2))
    ours = clipped_surrogate_per_token(
        logprobs=logprobs, old_logprobs=torch.zeros_like(log_ratio), advantages=advantages, dual_clip=delta
    ).losses
    np.testing.assert_allclose(ours.detach(), written.detach(), atol=1e-12)
    moved = torch.tensor([abs(a) > 1e-9 and abs(abs(x) - 0.2) > 1e-9 for x, a in tokens])
    gradients = [
        torch.autograd.grad(losses.sum(), logprobs, retain_graph=True)[0][moved] for losses in (ours, written)
    ]
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_groups_changes_no_credit(name: str) -> None:
    groups = [[(0.0, [1]), (1.0, [1, 1])], [(3.0, [1, 0, 1]), (2.5, [1])]]
    base = credit(algorithm(name), groups)
    found = credit(algorithm(name), groups[::-1])
    np.testing.assert_allclose(np.concatenate([found[3:], found[:3]]), base, atol=1e-12)
