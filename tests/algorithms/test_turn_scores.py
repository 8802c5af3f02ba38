"""Scores of turns: ``invalid_penalty`` and ``statistics`` of the group methods, against numpy references."""

import math
import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.advantages import whitened_per_token
from outrider.algorithms.base import Algorithm, GroupAdvantages, turn_advantages
from outrider.algorithms.exploration import Arpo, ArpoSettings, Rapo, RapoSettings
from outrider.algorithms.gigpo import Gigpo, GigpoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings, ReinforcePlusPlus, ReinforcePlusPlusSettings
from outrider.algorithms.retrieval import combined_advantages_per_rollout
from outrider.config import to_toml, validate
from outrider.errors import ConfigError
from outrider.trace import Trace
from outrider.types import Origin
from tests.algorithms.builders import add_node, empo2, finish, new_trace
from tests.vectors import load_vector

Group = list[tuple[float | None, list[bool]]]
"""The return of each rollout (None: a fault), and which of its turns are invalid."""


def build(group: Group, *, num_tokens: int = 1, restarts: bool = False) -> Trace:
    trace = new_trace(modes=("plain",) * len(group))
    root = add_node(trace, None, Origin.PROMPT)
    for value, invalid in group:
        node = root
        for turn, flag in enumerate(invalid):
            if turn:
                node = add_node(trace, node, Origin.ENVIRONMENT, f"seen {turn}", restarts=restarts)
            node = add_node(
                trace, node, Origin.POLICY, f"act {turn}", num_tokens=num_tokens, metadata={"invalid": flag}
            )
        finish(trace, node, value)
    return trace


def by_turn(trace: Trace) -> list[list[float]]:
    """The advantages of the turns of the rollouts without a fault."""
    return [
        [node.credit[0] for node in path if node.trainable and node.credit is not None]
        for _, path in trace.scored_rollouts()
    ]


def assign(algorithm: Algorithm, group: Group, **options: Any) -> tuple[list[list[float]], GroupAdvantages]:
    trace = build(group, **options)
    result = algorithm.assign_advantages(trace)
    return by_turn(trace), result


def grpo(**options: Any) -> Grpo:
    return Grpo(validate(GrpoSettings, options))


def released_rows(group: Group, penalty: float) -> list[list[float]]:
    """GRPO of the released code: a row per turn, whose score is the return minus its penalty; mean and
    sample std over the rows of a task, and 1e-6 beside the std.
    """
    rows = [[value - penalty * flag for flag in invalid] for value, invalid in group if value is not None]
    scores = np.array([score for own in rows for score in own])
    std = scores.std(ddof=1) if len(scores) > 1 else 1.0
    mean = scores.mean() if len(scores) > 1 else scores[0]
    return [[(score - mean) / (std + 1e-6) for score in own] for own in rows]


RETURNS = st.sampled_from([0.0, 1.0, 10.0, -1.0, 0.3])
GROUPS = st.lists(st.tuples(RETURNS, st.lists(st.booleans(), min_size=1, max_size=4)), min_size=1, max_size=4)


def has_rounding_spread(expected: Sequence[Sequence[float]]) -> bool:
    """Whether the reference divides rounding errors by 1e-6 where ours is exactly 0."""
    return max(abs(value) for own in expected for value in own) < 1e-6


@given(group=GROUPS, penalty=st.sampled_from([0.0, 0.1, 0.5]))
def test_statistics_over_samples_are_grpo_of_the_released_code(group: Group, penalty: float) -> None:
    """GiGPO without its step part, and GRPO with ``statistics = "samples"``."""
    expected = released_rows(group, penalty)
    options: dict[str, Any] = {"invalid_penalty": penalty, "statistics": "samples"}
    gigpo = Gigpo(validate(GigpoSettings, {"normalization": "std", "step_weight": 0.0, **options}))
    for algorithm in (gigpo, grpo(**options)):
        for restarts in (False, True):
            values, result = assign(algorithm, group, restarts=restarts)
            for own, wanted in zip(values, expected, strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-10, atol=1e-9)
            assert result.advantages.has_signal is not has_rounding_spread(expected)


def test_the_vector_of_rows_of_unequal_rollouts() -> None:
    """The same numbers as in the record of EMPO²'s released code: long rollouts weigh more."""
    inputs, expected = load_vector("empo2", "grpo_row_level_bias")
    group = [
        (value, [False] * turns) for value, turns in zip(inputs["returns"], inputs["turns"], strict=True)
    ]
    for statistics, name in (
        ("samples", "advantage_per_rollout"),
        ("rollouts", "rollout_level_for_comparison"),
    ):
        _, result = assign(grpo(statistics=statistics), group)
        np.testing.assert_allclose(result.advantages.values, expected[name], atol=1e-4)


def reference(
    group: Group, *, penalty: float, samples: bool, kind: str, std: str
) -> tuple[list[list[float]], list[float]]:
    """The documented formula in plain loops, for one group."""
    rows = [[value - penalty * flag for flag in invalid] for value, invalid in group if value is not None]
    means = [float(np.mean(own)) for own in rows]
    parts = rows if samples else [[mean] for mean in means]
    everything = np.array([value for part in parts for value in part])
    compared = np.array([*everything, *(v for own in rows for v in own if kind == "leave_one_out")])
    if len(compared) < 2 or np.ptp(compared) <= 1e-9 * max(1.0, np.abs(compared).max()):
        return [[0.0] * len(own) for own in rows], [0.0] * len(rows)
    baselines = [everything.mean()] * len(rows)
    if kind == "leave_one_out":
        others = [[v for j, part in enumerate(parts) if j != i for v in part] for i in range(len(rows))]
        if not all(others):
            return [[0.0] * len(own) for own in rows], [0.0] * len(rows)
        baselines = [float(np.mean(own)) for own in others]
    scale = 1.0
    if std == "batch":
        counted = (
            [v - b for part, b in zip(parts, baselines, strict=True) for v in part]
            if kind == "leave_one_out"
            else everything
        )
        scale = float(np.std(counted, ddof=1)) + 1e-4
    elif kind == "group_normalized":
        scale = float(everything.std(ddof=1 if std == "sample" else 0)) + 1e-6
    return (
        [[(score - b) / scale for score in own] for own, b in zip(rows, baselines, strict=True)],
        [(mean - b) / scale for mean, b in zip(means, baselines, strict=True)],
    )


@given(group=GROUPS, penalty=st.sampled_from([0.0, 0.25]), samples=st.booleans(),
       chosen=st.sampled_from([("group_normalized", "sample"), ("group_normalized", "population"),
                               ("group_normalized", "batch"), ("group_centered", "sample"),
                               ("leave_one_out", "sample"), ("leave_one_out", "batch")]))  # fmt: skip
def test_every_baseline_and_std(group: Group, penalty: float, samples: bool, chosen: tuple[str, str]) -> None:
    kind, std = chosen
    algorithm = grpo(
        advantage=kind, advantage_std=std, invalid_penalty=penalty,
        statistics="samples" if samples else "rollouts",
    )  # fmt: skip
    values, result = assign(algorithm, group)
    expected, of_rollouts = reference(group, penalty=penalty, samples=samples, kind=kind, std=std)
    for own, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.advantages.values, of_rollouts, rtol=1e-9, atol=1e-9)
    assert (result.advantages.reason is None) is result.advantages.has_signal


MIXED: Group = [(1.0, [False, True, False]), (None, [True]), (0.0, [True]), (1.0, [False, False])]


def test_the_batch_std_spans_the_groups_of_a_step() -> None:
    groups: list[Group] = [[(1.0, [True, False]), (0.0, [False])], [(5.0, [False]), (5.0, [False])]]
    traces = [build(group) for group in groups]
    grpo(advantage_std="batch", invalid_penalty=0.5, statistics="samples").assign_step_advantages(traces)
    scale = np.std([0.5, 1.0, 0.0, 5.0, 5.0], ddof=1) + 1e-4
    assert by_turn(traces[0]) == [pytest.approx([0.0, 0.5 / scale]), pytest.approx([-0.5 / scale])]
    assert by_turn(traces[1]) == [[0.0], [0.0]]


@pytest.mark.parametrize("statistics", ["rollouts", "samples"])
def test_a_faulted_rollout_counts_nowhere(statistics: str) -> None:
    algorithm = grpo(invalid_penalty=0.5, statistics=statistics)
    values, result = assign(algorithm, MIXED)
    without, plain = assign(algorithm, [one for one in MIXED if one[0] is not None])
    assert values == without
    assert result.advantages.assigned.tolist() == [True, False, True, True]
    assert result.advantages.values.tolist() == np.insert(plain.advantages.values, 1, 0.0).tolist()


def test_equal_returns_with_different_invalid_turns_have_a_signal() -> None:
    group: Group = [(1.0, [False, True]), (1.0, [False, False])]
    _, plain = assign(grpo(), group)
    assert plain.advantages.reason == "no_spread"
    for statistics in ("rollouts", "samples"):
        values, result = assign(grpo(invalid_penalty=0.1, statistics=statistics), group)
        assert result.advantages.has_signal and values[0][1] < 0 < values[0][0]
    # Both rollouts have the same mean score: no rollout is better, only a turn is worse than another.
    alike: Group = [(1.0, [False, True]), (1.0, [True, False])]
    assert not assign(grpo(invalid_penalty=0.1), alike)[1].advantages.has_signal
    assert assign(grpo(invalid_penalty=0.1, statistics="samples"), alike)[1].advantages.has_signal
    left_out, _ = assign(grpo(invalid_penalty=0.1, advantage="leave_one_out"), alike)
    assert left_out == [pytest.approx([0.05, -0.05]), pytest.approx([-0.05, 0.05])]


@pytest.mark.parametrize("kind", ["group_normalized", "group_centered"])
def test_a_penalty_without_invalid_turns_and_rows_of_single_turns_change_no_bit(kind: str) -> None:
    group: Group = [(0.3, [False]), (1.0, [False]), (0.1, [False]), (0.3, [False])]
    plain, _ = assign(grpo(advantage=kind), group)
    for options in ({"invalid_penalty": 0.7}, {"statistics": "samples"}):
        assert assign(grpo(advantage=kind, **options), group)[0] == plain


def test_the_exploration_methods_have_the_same_advantages() -> None:
    group = [one for one in MIXED if one[0] is not None]
    for statistics in ("rollouts", "samples"):
        options = {"group_size": 3, "invalid_penalty": 0.2, "statistics": statistics}
        expected, _ = assign(grpo(**options), group)
        arpo = Arpo(validate(ArpoSettings, {"sampler_correction": None, **options}))
        found, result = assign(arpo, group)
        assert found == expected and result.advantages.has_signal
        tips = empo2(**options, intrinsic_coefficient=0.0, memory={"embedder": "hash"})
        assert assign(tips, group)[0] == expected
        rapo = Rapo(validate(RapoSettings, {**options, "num_hybrid": 0}))
        assert assign(rapo, group)[0] == expected


def test_a_shared_turn_has_a_score_in_each_of_its_rollouts() -> None:
    trace = new_trace()
    root = add_node(trace, None, Origin.PROMPT)
    shared = add_node(trace, root, Origin.POLICY, metadata={"invalid": True})
    for value in (1.0, 0.0):
        finish(trace, add_node(trace, shared, Origin.POLICY), value)
    options = {
        "group_size": 2,
        "invalid_penalty": 0.5,
        "statistics": "samples",
        "advantage": "group_centered",
    }
    Arpo(validate(ArpoSettings, options)).assign_advantages(trace)
    mean = (0.5 + 1.0 - 0.5 + 0.0) / 4
    assert shared.shares is not None
    assert [shared.shares[rollout].credit for rollout in (0, 1)] == [(0.5 - mean,), (-0.5 - mean,)]
    assert [node.credit for node in trace.nodes[2:]] == [(1.0 - mean,), (0.0 - mean,)]


def test_the_factor_of_retrieval_multiplies_the_advantage_of_every_turn() -> None:
    settings = validate(GrpoSettings, {"invalid_penalty": 0.5})
    [outcome] = turn_advantages([build(MIXED)], settings)
    combined, factors = combined_advantages_per_rollout(
        outcome=outcome, rewards=[1.0, None, 0.0, 0.5], weight=0.3
    )
    assert outcome.turns is not None and combined.turns is not None
    for own, plain, factor in zip(combined.turns, outcome.turns, factors, strict=True):
        assert own.tolist() == (factor * plain).tolist()


def test_the_penalty_of_reinforce_plus_plus_stays_in_its_turn() -> None:
    """The score of a row at its last token, returns to go within the row, whitened over all tokens."""
    group: Group = [(1.0, [False, True]), (0.0, [True, False, False])]
    for gamma in (1.0, 0.5):
        options = {"invalid_penalty": 0.4, "gamma": gamma}
        trace = build(group, num_tokens=2)
        ReinforcePlusPlus(validate(ReinforcePlusPlusSettings, options)).assign_advantages(trace)
        scores = []
        for value, invalid in group:
            assert value is not None
            num = 2 * len(invalid)
            for token in range(num):
                to_go = gamma ** (num - 1 - token) * value
                scores.append(to_go - 0.4 * invalid[token // 2] * gamma ** (1 - token % 2))
        array = np.array(scores)
        expected = (array - array.mean()) / math.sqrt(array.var(ddof=1) + 1e-8)
        found = [value for _, path in trace.rollouts() for node in path for value in node.credit or ()]
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("statistics", ["rollouts", "samples"])
def test_the_baseline_of_reinforce_plus_plus_is_that_of_the_group_s_statistics(statistics: str) -> None:
    settings = {"group_baseline": True, "invalid_penalty": 0.4, "statistics": statistics}
    trace = build(MIXED)
    ReinforcePlusPlus(validate(ReinforcePlusPlusSettings, settings)).assign_advantages(trace)
    centred, _ = assign(grpo(advantage="group_centered", invalid_penalty=0.4, statistics=statistics), MIXED)
    expected = whitened_per_token(np.array([value for own in centred for value in own]))
    assert [value for own in by_turn(trace) for value in own] == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (GrpoSettings, {"advantage": advantage, **extra, **more}, "compares whole rollouts")
            for advantage, extra in (
                ("mean_normalized", {}), ("pass_at_k", {"pass_k": 2}), ("best_minus_second", {}),
            )
            for more in ({"invalid_penalty": 0.1}, {"statistics": "samples"})
        ),
        (ReinforcePlusPlusSettings, {"statistics": "samples"}, "needs group_baseline = true"),
        (GrpoSettings, {"statistics": "turns"}, "statistics"),
        (GrpoSettings, {"invalid_penalty": -0.1}, "invalid_penalty"),
    ],
)  # fmt: skip
def test_settings_without_meaning_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(kind, options)


def test_the_older_name_of_gigpo_and_its_preset() -> None:
    old = validate(GigpoSettings, {"episode_statistics": "turns"})
    assert old == validate(GigpoSettings, {"statistics": "samples"}) and old.statistics == "samples"
    with pytest.raises(ConfigError, match="episode_statistics = turns contradicts statistics = rollouts"):
        validate(GigpoSettings, {"episode_statistics": "turns", "statistics": "rollouts"})
    official = validate(GigpoSettings, {"preset": "gigpo-official"})
    changed = validate(GigpoSettings, {"preset": "gigpo-official", "statistics": "rollouts"})
    assert (official.statistics, changed.statistics) == ("samples", "rollouts")
    for one in (old, official, changed):
        recorded = tomllib.loads(to_toml(one.model_dump()))
        assert validate(GigpoSettings, recorded) == one
        older = {"rollouts": "rollouts", "samples": "turns"}[recorded.pop("statistics")]
        assert validate(GigpoSettings, {**recorded, "episode_statistics": older}) == one
