"""Healthy ranges as numbers: what is outside is listed, and a metric that leaves its range makes an alarm."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.metrics import DECLARED, Metric
from outrider.metrics.metric import group
from outrider.viewer.answers import describe_metric
from outrider.viewer.ranges import OutOfRange, RangeWatch, bounds, out_of_range
from outrider.viewer.run_reader import RunData, read_run
from tests.viewer.made_up_runs import write_records

LINEAR = {"algorithm.retrieval.schedule": "linear"}
CONSTANT = {"algorithm.retrieval.schedule": "constant"}


def run_data(folder: Path, name: str, values: Sequence[float | None], config: str = "") -> RunData:
    return read_run(write_records(folder / "run", name, values, config=config))


def test_the_text_of_a_range_is_made_of_its_bounds() -> None:
    [metric, plain] = group(
        "made",
        ("up", "1", "meaning", {"low": 0, "high": 0.5, "at_least": "made/plain", "healthy": "falls"}, "here"),
        ("plain", "1", "meaning", {"high": 0, "only_if": ("a.b", "c")}, "here"),
    )
    assert metric.healthy_range == "above 0, at most 0.5, at least made/plain, falls"
    assert plain.healthy_range == "0 (if a.b = c)"


def test_no_text_states_a_number_that_is_no_bound() -> None:
    """A number in words is one of a setting or of some runs only."""
    stated = re.compile(r"^(above|below|at most|at least) [\d.]+$|^0$")
    assert [metric.name for metric in DECLARED if stated.match(metric.healthy)] == []
    names = {metric.name for metric in DECLARED}
    assert {other for metric in DECLARED for other in (metric.at_least, metric.at_most) if other} <= names


def test_a_bound_does_not_apply_while_a_schedule_fades() -> None:
    assert bounds("retrieval/share_hybrid_retrieved", CONSTANT) == (0.5, None)
    assert bounds("retrieval/share_hybrid_retrieved", LINEAR) == (None, None)
    assert bounds("gap/logprob_mean", {"model.precision": "bfloat16"}) == (None, None)
    assert bounds("gap/logprob_mean", {"model.precision": "float32"}) == (None, 0.01)
    assert bounds("no/such", {}) == bounds("grad/norm", {}) == (None, None)


def test_a_metric_is_described_with_the_bounds_of_the_run() -> None:
    described = describe_metric("retrieval/num_inserted", CONSTANT)
    assert (described["low"], described["high"]) == (0, None)
    assert "above 0" in str(described["healthy"])
    assert describe_metric("retrieval/num_inserted", LINEAR)["low"] is None
    assert describe_metric("of/a_plugin", {})["high"] is None


def test_a_metric_that_ends_outside_is_listed(tmp_path: Path) -> None:
    data = run_data(tmp_path, "rollout/truncated_fraction", [0.0, 0.2, 0.05, 0.3, None, 0.4])
    assert out_of_range(data) == [
        OutOfRange(name="rollout/truncated_fraction", value=0.4, low=None, high=0.1, steps=(2, 4, 6))
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rollout/truncated_fraction", [0.3, 0.3, 0.05]),  # ends inside
        ("rollout/truncated_fraction", [0.0, 0.0, 0.0, 0.05, 0.2]),  # one step
        ("rollout/truncated_fraction", [0.1, 0.1]),  # the bound itself
        ("rollout/truncated_fraction", [None]),
        ("reward/mean", [-5.0]),  # has no bound
        ("made/up", [1.0]),
    ],
)
def test_what_ends_inside_is_not_listed(tmp_path: Path, name: str, values: list[float | None]) -> None:
    assert out_of_range(run_data(tmp_path, name, values)) == []


def test_zero_is_outside_of_above_zero(tmp_path: Path) -> None:
    assert [entry.low for entry in out_of_range(run_data(tmp_path, "reward/std", [0.0, 0.0]))] == [0]


@pytest.mark.parametrize(("name", "value"), [("reward/std", 0.0), ("group/fraction_without_signal", 1.0)])
def test_equal_returns_are_healthy_if_solved_or_if_only_distillation_trains(
    tmp_path: Path, name: str, value: float
) -> None:
    data = run_data(tmp_path, name, [value] * 2)
    assert [entry.name for entry in out_of_range(data)] == [name]
    solved = [{**record, "reward/success_rate": 0.95} for record in data.records]
    assert out_of_range(replace(data, records=tuple(solved))) == []
    assert bounds(name, {"algorithm.distill.policy_weight": "0.0"}) == (None, None)


def test_the_bound_of_clipped_tokens_is_for_ratios_of_tokens() -> None:
    for name in ("ratio/clip_fraction_low", "ratio/clip_fraction_high"):
        assert bounds(name, {"algorithm.loss.type": "clip"}) == (None, 0.1)
        assert bounds(name, {"algorithm.loss.type": "gspo"}) == (None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distill/gap_abs", 0.001),
        ("tips/num_stored", 0.0),
        ("retrieval/g_mean", -0.1),
        ("retrieval/share_g_positive", 0.4),
    ],
)
def test_values_of_runs_that_learn_are_inside(tmp_path: Path, name: str, value: float) -> None:
    assert out_of_range(run_data(tmp_path, name, [value] * 2)) == []


def test_a_bound_can_be_another_metric(tmp_path: Path) -> None:
    data = run_data(tmp_path, "retrieval/reward_hybrid", [0.2, 0.2])
    both = [{**record, "retrieval/reward_on_policy": 0.5} for record in data.records]
    [entry] = out_of_range(RunData(config={}, settings={}, records=tuple(both), evaluations=(), notes=()))
    assert (entry.name, entry.low, entry.steps) == ("retrieval/reward_hybrid", 0.5, (1, 2))
    assert out_of_range(data) == []


def alarms(values: Sequence[float | None], name: str = "rollout/truncated_fraction") -> list[str]:
    watch = RangeWatch({})
    return [line for step, value in enumerate(values, 1) for line in watch.update(step, {name: value})]


def test_an_alarm_at_the_fifth_step_outside() -> None:
    [line] = alarms([0.05] * 6 + [None] + [0.3] * 8)
    assert line.startswith("ALARM: step 12: rollout/truncated_fraction is 0.3 ") and "at most 0.1" in line


@pytest.mark.parametrize(
    "values",
    [
        [0.3] * 20,  # a property of the run
        [0.05] * 6 + [0.3] * 4 + [0.05] + [0.3] * 4,  # noise
        [0.05, 0.2] * 5 + [0.3] * 9,  # was outside half of the time before
        [0.05] * 4 + [0.3] * 9,  # too short before
    ],
)
def test_no_alarm_without_a_change(values: list[float]) -> None:
    assert alarms(values) == []


def test_the_watch_continues_after_the_recorded_steps(tmp_path: Path) -> None:
    values = [0.05] * 6 + [0.3] * 4
    watch = RangeWatch.from_run(run_data(tmp_path, "rollout/truncated_fraction", values))
    assert len(watch.update(11, {"rollout/truncated_fraction": 0.3})) == 1
    assert watch.update(12, {"rollout/truncated_fraction": 0.3}) == []


def test_a_metric_without_range_has_none() -> None:
    metric = Metric(name="a/b", unit="1", meaning="m", healthy="rises", look_at="l")
    assert metric.healthy_range == "rises" and (metric.low, metric.high) == (None, None)
