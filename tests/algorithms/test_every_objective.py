"""Rules of credit for every page and every preset, as a run builds them: lone rollouts, no spread, faults,
sums, shift and scale.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings
from outrider.algorithms.exploration import ARPO_PRESETS, EMPO2_PRESETS
from outrider.algorithms.loss_settings import CispoLoss, ClipLoss, SamplerCorrection
from outrider.algorithms.luffy import PRESETS as LUFFY_PRESETS
from outrider.algorithms.presets import GIGPO_PRESETS, GRPO_PRESETS, REINFORCE_PLUS_PLUS_PRESETS
from outrider.algorithms.rollout_replay import PRESETS as REPLAY_PRESETS
from outrider.algorithms.sampler_correction import LOG_RATIO_LIMIT
from outrider.algorithms.tree_grpo import PRESETS as TREE_PRESETS
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.plugins.registry import BUILT_IN
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.training.setup import make_algorithm
from tests.algorithms.grouped import Played, token_credit, trace_of
from tests.objectives import nested

# what is not a function of the returns alone
PLAIN: dict[str, Any] = {"reward_kl_weight": 0.0, "overlong": "none"}
EVERY: dict[str, dict[str, Any]] = (
    {name: {"type": "grpo", "preset": name, **PLAIN} for name in GRPO_PRESETS}
    | {"batch std": {"type": "grpo", "advantage_std": "batch"}}
    | {name: {"type": "reinforce++", "preset": name, **PLAIN} for name in REINFORCE_PLUS_PLUS_PRESETS}
    | {name: {"type": "gigpo", "preset": name, "gamma": 1.0} for name in GIGPO_PRESETS}
    | {"gigpo, std": {"type": "gigpo", "normalization": "std", "gamma": 1.0}}
    | {name: {"type": "luffy", "preset": name} for name in LUFFY_PRESETS}
    | {"luffy, split": {"type": "luffy", "statistics": "on_policy"}}
    | {name: {"type": "tree_grpo", "preset": name} for name in TREE_PRESETS}
    | {f"tree-grpo, {kind}": {"type": "tree_grpo", "combination": kind} for kind in ("inner", "nested")}
    | {name: {"type": "arpo", "preset": name, "entropy_advantage": 0.0} for name in ARPO_PRESETS}
    | {name: {"type": "empo2", "preset": name, "intrinsic_coefficient": 0.0, "memory": {"embedder": "hash"}}
       for name in EMPO2_PRESETS}
    | {"combined": {"type": "combined"}}
    | {"rapo": {"type": "rapo", "num_hybrid": 0}, "rejection": {"type": "rejection"}}
    | {name: {"type": "rollout_replay", "preset": name} for name in REPLAY_PRESETS}
)  # fmt: skip
BATCH = [name for name, table in EVERY.items() if table["type"] == "reinforce++"]
UNCENTRED = [*BATCH, "rejection"]  # credit against the batch, and against a threshold
GROUPS_ = [name for name in EVERY if name not in UNCENTRED]


def credited(name: str, groups: Sequence[Sequence[Played]]) -> tuple[list[Trace], list[GroupAdvantages]]:
    """A step's groups with the credit of that page."""
    run = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": EVERY[name]})
    page = make_algorithm(run, None, vocabulary_size=9, stateful=False, count_tokens=len)
    traces = [trace_of(rollouts, key=str(number)) for number, rollouts in enumerate(groups)]
    for trace, rollouts in zip(traces, groups, strict=True):
        trace.modes = ("plain",) * len(rollouts)
    return traces, page.assign_step_advantages(traces)


def advantages(traces: Sequence[Trace]) -> list[list[float]]:
    return [
        [leaf.advantage for leaf, _ in trace.rollouts() if leaf.advantage is not None] for trace in traces
    ]


def test_no_page_is_missing() -> None:
    assert set(BUILT_IN["algorithms"]) == {table["type"] for table in EVERY.values()}


def chosen(name: str) -> ObjectiveSettings:
    return validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": EVERY[name]}).algorithm


@pytest.mark.parametrize("name", EVERY)
def test_what_is_on_by_default_is_what_the_specification_chose(name: str) -> None:
    """Token weights up to 2 against the engine, no KL, no dual clip; scripts say where theirs differ, EMPO²'s
    dual clip is its paper's.
    """
    settings_, is_script = chosen(name), any(mark in name for mark in ("official", "released", "verl", "trl"))
    if not is_script and name != "rejection":
        expected = SamplerCorrection(upper=2.0, lower=None, level="token", outside="truncate")
        assert settings_.sampler_correction == expected
    loss = settings_.loss.model_dump()
    assert is_script or "empo2" in name or loss.get("dual_clip") is None
    assert is_script or "-paper" in name or settings_.kl_weight == 0.0
    assert loss.get("ratio_floor", 0.0) == 0.0 and settings_.sampler_rejection is None


def test_the_other_defaults_of_the_specification() -> None:
    """Sample std with 1e-6 on it, one value a rollout, global token mean, a constant length, an absolute cap,
    the clamp at 20.
    """
    plain = ObjectiveSettings()
    assert (plain.advantage, plain.loss.type, plain.aggregation, plain.kl_estimator) == (
        "group_normalized",
        "clip",
        "token_mean",
        "k2",
    )
    assert plain.loss == ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert plain.positive_nll == 0.0 and LOG_RATIO_LIMIT == 20.0
    long = [Played(value=1.0, mask=[1, 0, 1, 0, 1]), Played(value=0.0)]  # three turns are one value
    traces, _ = credited("grpo", [long])
    z = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert token_credit(traces).tolist() == pytest.approx([z, z, z, -z], rel=1e-12)
    assert chosen("dr-grpo").max_length == 3000 and chosen("cispo-paper").loss == CispoLoss(ratio_cap=5.0)
    for missing in ({"loss": "cispo"}, {"aggregation": "constant_length"}):
        with pytest.raises(ConfigError):
            validate(ObjectiveSettings, nested(missing))


@pytest.mark.parametrize("name", EVERY)
def test_a_lone_rollout_never_gets_its_raw_return(name: str) -> None:
    """Alone in its group, or what faults have left of it; its neighbours have credit of their own."""
    others = [Played(value=0.0), Played(value=1.0)]
    for lone in ([Played(value=7.0)], [Played(value=None), Played(value=7.0), Played(value=None)]):
        traces, credits_ = credited(name, [lone, others])
        [value] = advantages(traces[:1])[0]
        if name not in UNCENTRED:
            assert value == 0.0 and credits_[0].advantages.reason == "singleton"
            assert token_credit(traces[:1]).tolist() == [0.0]
        assert name == "rejection" or abs(value) < 2.0
        traces, _ = credited(name, [lone])  # nothing beside it
        assert advantages(traces) == [[1.0 if name == "rejection" else 0.0]]


@pytest.mark.parametrize("name", [name for name in EVERY if name != "rejection"])
def test_no_spread_is_exactly_zero_and_a_fault_is_unassigned(name: str) -> None:
    constant = [Played(value=0.3), Played(value=0.1 + 0.2), Played(value=0.3)]
    traces, credits_ = credited(name, [constant, constant])
    assert not token_credit(traces).any()
    assert all((one.advantages.has_signal, one.advantages.reason) == (False, "no_spread") for one in credits_)
    traces, [credit] = credited(name, [[Played(value=None)] * 3])
    assert credit.advantages.reason == "unscorable" and advantages(traces) == [[]]
    assert all(node.credit is None for node in traces[0].nodes)
    with pytest.raises(ValueError, match=r"infinite|finite"):
        credited(name, [[Played(value=0.0), Played(value=math.inf)]])


RETURN = st.floats(-5.0, 5.0).map(lambda value: round(value, 2))
GROUPS = st.lists(st.lists(RETURN, min_size=2, max_size=7), min_size=1, max_size=3)


def is_spread(groups: Sequence[Sequence[float]]) -> bool:
    """No group, and no tree of three in it, has a spread so small that scaling could carry it over the
    tolerance.
    """
    parts = [
        part for own in groups for part in (own, *(own[start : start + 3] for start in range(0, len(own), 3)))
    ]
    every = [value for own in groups for value in own]
    return np.ptp(every) > 0.1 and all(np.ptp(part) == 0.0 or np.ptp(part) > 0.1 for part in parts)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=10)
@given(groups=GROUPS, num_faults=st.integers(1, 3))
def test_faults_change_no_bit_of_the_others(groups: Any, name: str, num_faults: int) -> None:
    """They come last here, so that the leaves of a tree keep their tree."""
    base, _ = credited(name, [[Played(value=value) for value in own] for own in groups])
    faulty = [
        [*(Played(value=value) for value in own), *[Played(value=None, mask=[1, 1])] * num_faults]
        for own in groups
    ]
    found, _ = credited(name, faulty)
    assert token_credit(found).tolist() == token_credit(base).tolist() and advantages(found) == advantages(
        base
    )


@pytest.mark.parametrize("name", GROUPS_)
@settings(max_examples=10)
@given(groups=GROUPS)
def test_the_advantages_of_a_group_sum_to_zero(groups: Any, name: str) -> None:
    traces, _ = credited(name, [[Played(value=value) for value in own] for own in groups])
    for trace in traces:
        assert abs(math.fsum(token_credit([trace]))) < 1e-6


@pytest.mark.parametrize("name", [name for name in EVERY if name != "rejection"])
@settings(max_examples=10)
@given(groups=GROUPS, shift=RETURN, scale=st.floats(0.5, 20.0))
def test_returns_may_be_shifted_and_scaled(groups: Any, name: str, shift: float, scale: float) -> None:
    assume(is_spread(groups))

    def found(by: float, to: float) -> np.ndarray:
        return token_credit(
            credited(name, [[Played(value=by * value + to) for value in own] for own in groups])[0]
        )

    base = found(1.0, 0.0)
    if name in BATCH:
        assume(np.ptp(base) > 0.1)
    np.testing.assert_allclose(found(1.0, shift), base, atol=1e-3)
    divides_by_no_std = name in (
        "dr-grpo",
        "luffy-official",
        "empo2-centered",
        *GIGPO_PRESETS,
    ) or name.startswith("rloo")
    np.testing.assert_allclose(
        found(scale, 0.0), (scale if divides_by_no_std else 1.0) * base, rtol=1e-3, atol=1e-3
    )
