"""Rules for the advantages of every algorithm and preset, as a run builds them: lone rollouts, no spread,
faults, sums, shift and scale. docs/algorithms/details/objectives.md lists the rules with their tests.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings
from outrider.algorithms.exploration import ARPO_PRESETS, EMPO2_PRESETS
from outrider.algorithms.grpo import measured_kl
from outrider.algorithms.loss_settings import CispoLoss, SamplerCorrection
from outrider.algorithms.luffy import PRESETS as LUFFY_PRESETS
from outrider.algorithms.presets import GIGPO_PRESETS, GRPO_PRESETS, REINFORCE_PLUS_PLUS_PRESETS
from outrider.algorithms.rollout_replay import PRESETS as REPLAY_PRESETS
from outrider.algorithms.tree_grpo import PRESETS as TREE_PRESETS
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.plugins.registry import BUILT_IN
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.training.setup import make_algorithm
from tests.algorithms.builders import Rollout, build_trace, token_advantages
from tests.objectives import nested

# without the parts that are no function of the returns alone
PLAIN: dict[str, Any] = {"reward_kl_weight": 0.0, "overlong": "none"}
EVERY: dict[str, dict[str, Any]] = (
    {name: {"type": "grpo", "preset": name, **PLAIN} for name in GRPO_PRESETS}
    | {"batch std": {"type": "grpo", "advantage_std": "batch"}}
    | {"entropy bonus": {"type": "grpo", "entropy_bonus": 0.01}}
    | {"echo": {"type": "grpo", "observation_nll": 0.1}}
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
    | {"lamer": {"type": "lamer"}, "lamer, std": {"type": "lamer", "advantage": "group_normalized"}}
    | {"lamer, state": {"type": "lamer", "anchor": "state"}}
)  # fmt: skip
BATCH = [name for name, table in EVERY.items() if table["type"] == "reinforce++"]
UNCENTRED = [*BATCH, "rejection"]  # advantages relative to the batch, and to a threshold


@functools.cache
def run_settings(name: str) -> RunSettings:
    return validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": EVERY[name]})


def build(groups: Sequence[Sequence[Rollout]]) -> list[Trace]:
    traces = [build_trace(rollouts, key=str(number)) for number, rollouts in enumerate(groups)]
    for trace, rollouts in zip(traces, groups, strict=True):
        trace.modes = ("plain",) * len(rollouts)
    return traces


def assign_to(name: str, traces: list[Trace], **options: Any) -> list[GroupAdvantages]:
    """Assign the advantages of a step; ``options`` change settings of the algorithm."""
    run = run_settings(name)
    if options:
        run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update=options)})
    algorithm = make_algorithm(run, None, vocabulary_size=9, stateful=False, count_tokens=len)
    return algorithm.assign_step_advantages(traces)


def assign(name: str, groups: Sequence[Sequence[Rollout]]) -> tuple[list[Trace], list[GroupAdvantages]]:
    traces = build(groups)
    return traces, assign_to(name, traces)


def rollout_advantages(traces: Sequence[Trace]) -> list[list[float]]:
    return [
        [leaf.advantage for leaf, _ in trace.rollouts() if leaf.advantage is not None] for trace in traces
    ]


def test_no_algorithm_is_missing() -> None:
    assert set(BUILT_IN["algorithms"]) == {table["type"] for table in EVERY.values()}


@pytest.mark.parametrize("name", EVERY)
def test_presets_that_follow_papers_have_the_defaults_of_the_specification(name: str) -> None:
    """Token weights up to 2 against the engine, no KL, no dual clip (except EMPO²'s, which is its paper's).
    Presets that follow released scripts may differ.
    """
    settings_ = run_settings(name).algorithm
    is_script = any(mark in name for mark in ("official", "released", "advised", "verl", "trl"))
    if not is_script and name != "rejection":
        expected = SamplerCorrection(upper=2.0, lower=None, level="token", outside="truncate")
        assert settings_.sampler_correction == expected
    loss = settings_.loss.model_dump()
    assert is_script or "empo2" in name or loss.get("dual_clip") is None
    assert is_script or "-paper" in name or settings_.kl_weight == 0.0
    assert loss.get("ratio_floor", 0.0) == 0.0 and settings_.sampler_rejection is None


def test_the_other_defaults_of_the_specification() -> None:
    """The sample std with 1e-6 added, one value per rollout, a constant length, an absolute cap."""
    long = [Rollout(value=1.0, mask=[1, 0, 1, 0, 1]), Rollout(value=0.0)]  # three turns are one value
    traces, _ = assign("grpo", [long])
    z = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert token_advantages(traces).tolist() == pytest.approx([z, z, z, -z], rel=1e-12)
    assert run_settings("dr-grpo").algorithm.max_length == 3000
    assert run_settings("cispo-paper").algorithm.loss == CispoLoss(ratio_cap=5.0)
    for missing in ({"loss": "cispo"}, {"aggregation": "constant_length"}):
        with pytest.raises(ConfigError):
            validate(ObjectiveSettings, nested(missing))


@pytest.mark.parametrize("name", EVERY)
def test_a_lone_rollout_never_gets_its_raw_return(name: str) -> None:
    """Alone in its group, or the only one left by faults, beside a group with advantages of its own."""
    others = [Rollout(value=0.0), Rollout(value=1.0)]
    for lone in ([Rollout(value=7.0)], [Rollout(value=None), Rollout(value=7.0), Rollout(value=None)]):
        traces, results = assign(name, [lone, others])
        [value] = rollout_advantages(traces[:1])[0]
        if name not in UNCENTRED:
            assert value == 0.0 and results[0].advantages.reason == "singleton"
            assert token_advantages(traces[:1]).tolist() == [0.0]
        assert name == "rejection" or abs(value) < 2.0
        traces, _ = assign(name, [lone])  # nothing beside it
        assert rollout_advantages(traces) == [[1.0 if name == "rejection" else 0.0]]


@pytest.mark.parametrize("name", [name for name in EVERY if name != "rejection"])
def test_no_spread_is_exactly_zero_and_a_fault_is_unassigned(name: str) -> None:
    constant = [Rollout(value=0.3), Rollout(value=0.1 + 0.2), Rollout(value=0.3)]
    traces, results = assign(name, [constant, constant])
    assert not token_advantages(traces).any()
    assert all((one.advantages.has_signal, one.advantages.reason) == (False, "no_spread") for one in results)
    traces, [credit] = assign(name, [[Rollout(value=None)] * 3])
    assert credit.advantages.reason == "unscorable" and rollout_advantages(traces) == [[]]
    assert all(node.credit is None for node in traces[0].nodes)
    with pytest.raises(ValueError, match=r"infinite|finite"):
        assign(name, [[Rollout(value=0.0), Rollout(value=math.inf)]])


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


def from_returns(groups: Sequence[Sequence[float]]) -> list[list[Rollout]]:
    return [[Rollout(value=value) for value in own] for own in groups]


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=10)
@given(groups=GROUPS, num_faults=st.integers(1, 3))
def test_faults_change_no_bit_of_the_others(groups: Any, name: str, num_faults: int) -> None:
    """The faults come last, so that the leaves of a tree stay in their tree."""
    base, _ = assign(name, from_returns(groups))
    lost = [Rollout(value=None, mask=[1, 1])] * num_faults
    found, _ = assign(name, [[*own, *lost] for own in from_returns(groups)])
    assert token_advantages(found).tolist() == token_advantages(base).tolist()
    assert rollout_advantages(found) == rollout_advantages(base)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in UNCENTRED])
@settings(max_examples=10)
@given(groups=GROUPS)
def test_the_advantages_of_a_group_sum_to_zero(groups: Any, name: str) -> None:
    for trace in assign(name, from_returns(groups))[0]:
        assert abs(math.fsum(token_advantages([trace]))) < 1e-6


@pytest.mark.parametrize("name", [name for name in EVERY if name != "rejection"])
@settings(max_examples=10)
@given(groups=GROUPS, shift=RETURN, scale=st.floats(0.5, 20.0))
def test_returns_may_be_shifted_and_scaled(groups: Any, name: str, shift: float, scale: float) -> None:
    assume(is_spread(groups))

    def found(factor: float, offset: float) -> np.ndarray:
        moved = [[factor * value + offset for value in own] for own in groups]
        return token_advantages(assign(name, from_returns(moved))[0])

    base = found(1.0, 0.0)
    if name in BATCH:
        assume(np.ptp(base) > 0.1)
    np.testing.assert_allclose(found(1.0, shift), base, atol=1e-3)
    unscaled = (
        "dr-grpo",
        "luffy-official",
        "empo2-centered",
        "lamer",
        "lamer, state",
        *GIGPO_PRESETS,
    )  # no division by a std
    factor = scale if name in unscaled or name.startswith("rloo") else 1.0
    np.testing.assert_allclose(found(scale, 0.0), factor * base, rtol=1e-3, atol=1e-3)


def test_a_kl_in_the_reward_has_a_scale_of_its_own() -> None:
    """The exception: the scale of the reward determines the weight of the KL."""
    found = []
    for scale in (1.0, 10.0):
        group = [Rollout(value=0.0, kl=[1.0]), Rollout(value=scale, mask=[1, 1], kl=[0.5, 0.0])]
        assign_to("reinforce++", traces := build([group]), reward_kl_weight=0.5)
        found.append(token_advantages(traces))
    assert np.abs(found[0] - found[1]).max() > 0.05


NAMES = [*GRPO_PRESETS, *REINFORCE_PLUS_PLUS_PRESETS]
MASKED = st.lists(
    st.lists(st.tuples(RETURN, st.lists(st.integers(0, 1), min_size=1, max_size=6)), min_size=2, max_size=4),
    min_size=1,
    max_size=3,
)


@given(groups=MASKED, name=st.sampled_from(NAMES), holes=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_observation_tokens_change_no_advantage(groups: Any, name: str, holes: list[int]) -> None:
    """Observations of other lengths and with other rewards: a discount, a whitening or a mean that included
    them would differ.
    """
    options = {"gamma": 0.9} if name == "reinforce++" else {}

    def stuffed(mask: Sequence[int]) -> list[int]:
        runs = [[1] * one + [0] * num for one, num in zip(mask, holes, strict=False)]
        return [one for run in runs for one in run] or [0]

    plain, other = (
        build([[Rollout(value=value, mask=change(mask)) for value, mask in own] for own in groups])
        for change in (list, stuffed)
    )
    for node in (node for trace in other for node in trace.nodes):
        node.reward, node.kl = (0.0, ()) if node.trainable else (77.0, (5.0,))
    for traces in (plain, other):
        assign_to(name, traces, **options)
    assert token_advantages(other).tolist() == token_advantages(plain).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_groups_changes_no_advantage(name: str) -> None:
    groups = [
        [Rollout(value=0.0), Rollout(value=1.0, mask=[1, 1])],
        [Rollout(value=3.0, mask=[1, 0, 1]), Rollout(value=2.5)],
    ]
    base, found = (token_advantages(assign(name, order)[0]) for order in (groups, groups[::-1]))
    np.testing.assert_allclose(np.concatenate([found[3:], found[:3]]), base, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "gigpo"},
        {"type": "grpo", "invalid_penalty": 0.1},
        {"type": "reinforce++", "gamma": 0.9},
        {"type": "lamer"},
    ],
    ids=str,
)
@pytest.mark.parametrize("ratio", ["sequence", "product"])
def test_one_term_per_rollout_has_no_advantage_per_turn(algorithm: dict[str, Any], ratio: str) -> None:
    loss = {"type": "gspo", "sequence_ratio": ratio}
    with pytest.raises(ConfigError, match=r"set loss\.sequence_ratio = token"):
        validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": algorithm | {"loss": loss}})


def test_a_kl_in_the_reward_that_is_no_number_is_an_error() -> None:
    trace = build_trace([Rollout(value=1.0)])
    node = next(node for node in trace.nodes if node.trainable)
    node.kl = (float("nan"),) * len(node.token_ids)
    with pytest.raises(ValueError, match="is not finite"):
        measured_kl(node)
