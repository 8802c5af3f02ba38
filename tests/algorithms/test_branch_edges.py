"""The branching rule on its borders, by hand (arXiv 2507.19849 section 3.1; arXiv 2510.14545)."""

import math
from typing import Any

import pytest

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.entropy_branching import branches, first_wave_budget, require_countable
from outrider.algorithms.loss_settings import (
    CispoLoss,
    GppoLoss,
    GspoLoss,
    ReinforceLoss,
    RejectionMask,
    SamplerCorrection,
)

STREAK = {"penalty": 0.5, "streak": 1}


@pytest.mark.parametrize(
    ("u", "options", "expected"),
    [
        # Released ARPO: clip(u - w dH, 0, 1) <= p.
        (0.5, {"base": 0.5}, True),
        (0.5001, {"base": 0.5}, False),
        (0.75, {"base": 0.5, "change": 1.0}, True),
        (0.76, {"base": 0.5, "change": 1.0}, False),
        (0.1, {"base": 0.0, "change": 1.0}, True),  # clipped to 0
        (0.9, {"base": 1.0, "change": -1.0}, True),  # clipped to 1
        (
            0.5,
            {"base": 0.5, "penalty": 0.5},
            True,
        ),  # a penalty without a streak, and a streak without a penalty
        (0.5, {"base": 0.5, "streak": 3}, True),
        # With both, a draw below the probability.
        (0.25, {"base": 0.5, **STREAK}, False),
        (0.2499, {"base": 0.5, **STREAK}, True),
        # The paper's threshold must be exceeded.
        (0.0, {"base": 0.5, "decision": "threshold"}, False),
        (0.99, {"base": 0.5, "change": 0.1, "decision": "threshold"}, True),
        (0.99, {"base": 0.5, "change": 0.1, "decision": "threshold", "threshold": 0.6}, False),
        (0.0, {"base": 0.5, "change": 0.1, "decision": "threshold", **STREAK}, False),
        # Released AEPO: clip((u + w dH) (1 - penalty l), 0, 1) >= p.
        (0.5, {"base": 0.5, "decision": "aepo_released"}, True),
        (0.4999, {"base": 0.5, "decision": "aepo_released"}, False),
        (0.25, {"base": 0.5, "change": 1.0, "decision": "aepo_released"}, True),
        (0.25, {"base": 0.25, "change": 1.0, "decision": "aepo_released", **STREAK}, True),
        (0.24, {"base": 0.25, "change": 1.0, "decision": "aepo_released", **STREAK}, False),
        (0.9, {"base": 1.0, "change": 9.0, "decision": "aepo_released"}, True),
        (0.1, {"base": 0.0, "change": -9.0, "decision": "aepo_released"}, True),
        (0.1, {"base": 0.1, "change": -9.0, "decision": "aepo_released", "penalty": 1.0, "streak": 3}, False),
    ],
)
def test_decisions_on_their_borders(u: float, options: dict[str, Any], expected: bool) -> None:
    assert branches(u, **{"change": 0.0, "weight": 0.25} | options) is expected


def test_the_first_wave_is_between_one_and_the_group() -> None:
    def budget(root: float, tools: float) -> int:
        return first_wave_budget(total=8, entropy_root=root, entropy_tools=tools)

    assert [budget(1.0, 1.0), budget(0.0, 900.0), budget(900.0, 0.0)] == [5, 1, 8]
    assert budget(2 * math.log(3), 0.0) == 7  # a share of 3/4: the paper's slope is a half
    assert budget(0.0, 2 * math.log(3)) == 3  # and of 1/4


OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("soft", {"loss": GspoLoss()}),
    ("soft", {"sampler_correction": SamplerCorrection(level="sequence")}),
    ("soft", {"sampler_correction": SamplerCorrection(level="geometric")}),
    ("soft", {"sampler_correction": None, "sampler_rejection": RejectionMask(scope="mean")}),
    ("hard", {"positive_nll": 0.1}),
    ("hard", {"aggregation": "sequence_mean_token_mean"}),
]


@pytest.mark.parametrize(("attribution", "options"), OBJECTIVES)
def test_what_shared_tokens_cannot_count_is_refused(attribution: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        require_countable(ObjectiveSettings(**options), attribution)


@pytest.mark.parametrize(
    ("attribution", "options"),
    [
        ("soft", {"positive_nll": 0.1}),
        ("soft", {"aggregation": "sequence_mean_token_mean"}),
        ("hard", {}),
        ("soft", {"sampler_correction": None}),
        ("soft", {"sampler_rejection": RejectionMask(scope="token")}),
        *(("soft", {"loss": loss}) for loss in (GppoLoss(), CispoLoss(ratio_cap=2.0), ReinforceLoss())),
    ],
)
def test_what_shared_tokens_can_count_is_not(attribution: Any, options: dict[str, Any]) -> None:
    require_countable(ObjectiveSettings(**options), attribution)
