"""Rollouts during an update, without Ray: the order in which results are absorbed, their checkpoint, the
age of tokens, and the check of the engine with older tokens.
"""

import math
import random
import struct
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import ObjectiveSettings
from outrider.errors import EngineFault
from outrider.trace import Leaf, Trace
from outrider.training.async_rollouts import QUEUE, RolloutPrefetch, read_queue, write_queue
from outrider.training.data import QueuedStep, SampledStep
from outrider.training.settings import UpdateSettings
from outrider.training.step_metrics import staleness_alarms, staleness_metrics
from outrider.training.update import update
from outrider.types import Message, Origin, Outcome, Task
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    double_precision,
    honest,
    random_trace,
    shift,
)

# half of a pair too: a broken tool may say anything
TEXTS = st.text(st.characters(exclude_categories=()))
CALM = UpdateSettings(max_logprob_gap=0.01)


def sampled(*traces: Trace, trained: tuple[Trace, ...] | None = None) -> SampledStep:
    return SampledStep(
        is_filtered=trained is not None,
        traces=list(traces),
        selected=list(traces if trained is None else trained),
        faults=Counter(retries=2, tool_fault=1),
        fault_reasons=("it broke",),
        num_extra_batches=1,
        cursor=17,
    )


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_absorbed_before_the_step_is_recorded(seed: int) -> None:
    """Whoever is slower, and with further rounds for groups that a filter left out."""
    draw = random.Random(seed)
    rounds, happened = draw.randint(1, 3), []

    def pause() -> None:
        time.sleep(draw.choice([0.0, 0.0, 0.002, 0.01]))

    def play(ahead: RolloutPrefetch) -> SampledStep:
        for number in range(rounds):
            pause()
            happened.append("sent")
            ahead.mark_sent()
            pause()
            ahead.on_finished(number, rounds)
            ahead.mark_done()
            happened.append("absorbed")
        return sampled()

    ahead = RolloutPrefetch(play, counts=[{"seen": 1}])
    ahead.wait_until_sent()
    assert happened == ["sent"]
    pause()
    happened.append("updated")
    ahead.wait(on_tick=lambda shown: None)
    pause()
    happened.append("recorded")
    played = ahead.collect()
    assert happened == ["sent", "updated", "recorded", "absorbed", *["sent", "absorbed"] * (rounds - 1)]
    assert (played.sampled.cursor, played.counts) == (17, [{"seen": 1}]) and played.seconds >= 0.0


def test_cancelled_rollouts_are_not_absorbed_and_their_thread_ends() -> None:
    absorbed = []

    def play(ahead: RolloutPrefetch) -> SampledStep:
        ahead.mark_sent()
        ahead.mark_done()
        absorbed.append(True)
        return sampled()

    ahead = RolloutPrefetch(play, counts=[])
    ahead.wait_until_sent()
    ahead.cancel()
    until = time.monotonic() + 10
    while any(one.name == "rollouts of the next step" for one in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert absorbed == []


@pytest.mark.parametrize("when", ["before it is sent", "while it plays", "while it is taken in"])
def test_what_breaks_in_the_thread_breaks_the_step(when: str) -> None:
    def play(ahead: RolloutPrefetch) -> SampledStep:
        for place in ("before it is sent", "while it plays", "while it is taken in"):
            if place == when:
                raise EngineFault(place)
            (ahead.mark_sent if place == "before it is sent" else ahead.mark_done)()
        raise AssertionError("unreachable")

    ahead = RolloutPrefetch(play, counts=[])
    with pytest.raises(EngineFault, match=when):
        ahead.wait_until_sent()
        ahead.wait(on_tick=lambda shown: None)
        ahead.collect()


def bits(value: object) -> object:
    """Floats as their bits: -0.0 is not 0.0, and NaN is NaN."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def plain_values(trace: Trace) -> object:
    flags = (trace.modes, trace.without_memory, trace.is_replayed, trace.pruned, asdict(trace.task))
    return bits(
        [flags, [asdict(one) for one in trace.nodes], {n: asdict(x) for n, x in trace.leaves.items()}]
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_keeps_groups_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    traces = [random_trace(10 * seed + number) for number in range(3)]
    traces[0].without_memory, traces[1].is_replayed, traces[2].pruned = True, True, frozenset({1, 3})
    played = QueuedStep(sampled=sampled(*traces, trained=(traces[2],)), counts=[{"a": 3}, {}], seconds=0.1)
    write_queue(tmp_path, played)
    found = read_queue(tmp_path)
    assert found is not None
    assert [plain_values(one) for one in found.sampled.traces] == [plain_values(one) for one in traces]
    assert [id(one) for one in found.sampled.selected] == [id(found.sampled.traces[2])]
    assert (found.sampled.faults, found.sampled.fault_reasons) == (
        Counter(retries=2, tool_fault=1),
        ("it broke",),
    )
    assert (found.sampled.num_extra_batches, found.sampled.cursor, found.sampled.is_filtered) == (1, 17, True)
    assert (found.counts, found.seconds) == ([{"a": 3}, {}], 0.1)
    write_queue(tmp_path / "..", found)
    assert (tmp_path / ".." / QUEUE).read_bytes() == (tmp_path / QUEUE).read_bytes()


@given(st.lists(st.floats(width=64), max_size=6), TEXTS, st.dictionaries(TEXTS, TEXTS | st.integers()))
def test_any_float_and_any_text_comes_back(
    values: list[float], text: str, metadata: dict[str, object]
) -> None:
    trace = Trace(task=Task(key=text, question=text, answers=(text,), metadata={text: [1, {"x": 0.1}]}))
    node = trace.append(
        parent=None, origin=Origin.POLICY, token_ids=tuple(range(len(values))),
        message=Message(role="assistant", content=text), logprobs=tuple(values), entropies=tuple(values),
        metadata=metadata,
    )  # fmt: skip
    end = values[0] if values and math.isfinite(values[0]) else 0.0
    trace.finish(
        Leaf(node_id=node.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=end, intrinsic=end)
    )
    with tempfile.TemporaryDirectory() as folder:
        write_queue(Path(folder), QueuedStep(sampled=sampled(trace), counts=[], seconds=0.0))
        found = read_queue(Path(folder))
    assert found is not None and plain_values(found.sampled.traces[0]) == plain_values(trace)


def test_a_missing_queue_is_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert read_queue(tmp_path) is None
    (tmp_path / QUEUE).write_text('{"cursor": 3}\n')
    with pytest.raises(KeyError):
        read_queue(tmp_path)
    (tmp_path / QUEUE).write_text("[1]\n")
    with pytest.raises(ValueError, match="expected an object"):
        read_queue(tmp_path)


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
