"""The age of tokens of rollouts during an update, and the check of the engine with older tokens."""

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.errors import EngineFault
from outrider.trace import Trace
from outrider.training.settings import UpdateSettings
from outrider.training.step_metrics import staleness_alarms, staleness_metrics
from outrider.training.update import update
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    double_precision,
    honest,
    random_trace,
    shift,
)

CALM = UpdateSettings(max_logprob_gap=0.01)


def aged(*versions: int) -> list[Trace]:
    traces = [random_trace(seed, key=str(seed), faults=False) for seed in range(40, 40 + len(versions))]
    for trace, version in zip(traces, versions, strict=True):
        for one in trace.nodes:
            one.weight_version = version if one.trainable else None
    return traces


def test_the_age_of_tokens_is_counted_from_the_weights_of_the_update() -> None:
    traces = aged(4, 5)
    old, new = (sum(len(n.token_ids) for n in trace.nodes if n.trainable) for trace in traces)
    found = staleness_metrics(traces, version=5, limit=1)
    assert found == {"staleness/mean": pytest.approx(old / (old + new)), "staleness/max": 1.0}
    for version, limit in ((6, 1), (5, 0), (4, 1)):
        with pytest.raises(EngineFault, match=r"weights \d came to an update of weights"):
            staleness_metrics(traces, version=version, limit=limit)
    assert staleness_metrics([], version=5, limit=1) == {}


@pytest.mark.parametrize(
    ("values", "num"),
    [
        ({}, 0),
        ({"staleness/max": 0.0, "ratio/importance_ess_share": 0.1}, 0),
        ({"staleness/max": 1.0, "staleness/truncated_fraction": 0.05, "ratio/importance_ess_share": 0.5}, 0),
        ({"staleness/max": 1.0, "staleness/truncated_fraction": 0.051, "ratio/importance_ess_share": 0.5}, 1),
        ({"staleness/max": 1.0, "staleness/truncated_fraction": 0.2, "ratio/importance_ess_share": 0.49}, 2),
    ],
)
def test_a_policy_that_moves_too_fast_is_an_alarm(values: dict[str, float], num: int) -> None:
    lines = staleness_alarms(7, values)
    assert len(lines) == num and all("step 7" in line and "ALARM" in line for line in lines)


def updated(traces: list[Trace], *, version: int | None, probes: list[Trace]) -> dict[str, float]:
    policy = Recorder(tiny_model(dtype=torch.float64), shift)
    return update(
        policy, traces, objective=ObjectiveSettings(), settings=CALM, reference=None,
        always_check_mismatch=True, version=version, probes=probes,
    ).metrics  # fmt: skip


def shifted(traces: list[Trace], *, by: float) -> list[Trace]:
    for trace in traces:
        for one in trace.nodes:
            one.logprobs = tuple(value + by for value in one.logprobs)
    return traces


def true(traces: list[Trace]) -> list[Trace]:
    honest(Recorder(tiny_model(dtype=torch.float64), shift), traces)
    return traces


def test_the_engine_is_checked_with_current_tokens_and_not_with_older_ones() -> None:
    older, newer = true(aged(4)), true(aged(5))
    with pytest.raises(EngineFault, match="disagree"):
        updated(shifted(true(aged(5)), by=-0.5), version=5, probes=[])
    shifted(older, by=-0.5)
    values = updated([*older, *newer], version=5, probes=[])
    assert values["gap/logprob_mean"] < 1e-9 and values["staleness/logprob_shift"] == pytest.approx(0.5)
    # exp(0.5) is below the bound of 2: nothing was cut
    assert values["staleness/truncated_fraction"] == 0.0
    far = updated(shifted(true(aged(4)), by=-1.0), version=5, probes=[])
    assert far["staleness/truncated_fraction"] == 1.0
    with pytest.raises(EngineFault, match="disagree"):
        updated(older, version=None, probes=[])


def test_a_probe_detects_an_engine_with_other_weights_and_is_not_trained_on() -> None:
    older, probes = shifted(true(aged(4)), by=-0.5), true(aged(5, 5))
    for probe in probes:
        for one in probe.nodes:
            one.credit = (0.0,) * len(one.token_ids) if one.trainable else None
    plain = updated(older, version=5, probes=[])
    values = updated(older, version=5, probes=probes)
    assert values["gap/logprob_max"] < 1e-9 and "gap/logprob_max" not in plain
    assert {name: one for name, one in values.items() if not name.startswith("gap/")} == plain
    with pytest.raises(EngineFault, match=r"disagree by 0\.5000"):
        updated(older, version=5, probes=shifted(probes, by=0.5))
