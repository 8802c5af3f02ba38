"""Decisions that all ranks take together, and ranks that die or hang."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.distributed.learner import RankGroup
from outrider.distributed.processes import Cluster
from outrider.errors import ClusterFault, EngineFault
from outrider.training.settings import ClusterSettings, UpdateSettings
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, rank_group, run
from tests.distributed.processes import send_signal, wait_until_ended
from tests.distributed.test_rank_updates import differs, objective_of

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]
RanksOf = Callable[[int], RankGroup]


def test_one_broken_micro_batch_skips_the_step_of_all_once(ranks_of: RanksOf, folder: Path) -> None:
    """Of one rank alone: the others would wait in the next pass for ever."""
    traces, objective = groups(5, seed=3), objective_of("grpo")
    node = next(node for node in traces[3].nodes if node.logprobs)
    node.logprobs = (float("nan"), *node.logprobs[1:])
    policy, _ = alone(folder)
    before = {name: one.clone() for name, one in policy.masters.items()}
    found = ranks_of(3).call("found", traces, objective, SETTINGS, 1)[0]
    assert found.norms == [] and found.metrics["grad/num_skipped"] == 1.0
    assert all(found.weights[name].equal(one) for name, one in before.items())
    with pytest.raises(EngineFault, match="disagree by nan"):  # where the engine is checked
        ranks_of(3).call("found", traces, objective, SETTINGS, 0)
    wanted = run(policy, None, groups(5, seed=4), objective, SETTINGS)
    assert differs(ranks_of(3).call("found", groups(5, seed=4), objective, SETTINGS)[0], wanted) == []


def test_the_gate_is_that_of_all_tokens_and_stops_all(ranks_of: RanksOf, folder: Path) -> None:
    traces, objective = groups(4), objective_of("grpo")
    strict = UpdateSettings(max_tokens=160, max_logprob_gap=0.1)
    policy, _ = alone(folder)
    with pytest.raises(EngineFault) as wanted:
        run(policy, None, traces, objective, strict)
    ranks = ranks_of(2)
    with pytest.raises(EngineFault, match="trainer and engine disagree") as found:
        ranks.call("found", traces, objective, strict)
    assert str(found.value) == str(wanted.value)


def test_a_step_without_any_gradient_is_none(ranks_of: RanksOf) -> None:
    trace = groups(3)[2]  # equal returns
    found = ranks_of(2).call("found", [trace], objective_of("grpo"), SETTINGS)[0]
    assert found.norms == [] and found.metrics["grad/norm"] == 0.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, None], ids=str)
def test_a_rank_that_dies_or_hangs_ends_all(
    folder: Path, cluster: Cluster, how: signal.Signals | None
) -> None:
    """None: it computes without progress."""
    ranks = rank_group(cluster, folder, 2)
    pids, settings = [pid for pid, _ in ranks.built], cluster.settings
    if how is not None:
        send_signal(pids[1], how)
    try:
        cluster.settings = ClusterSettings(heartbeat_s=4.0)
        cluster._watches["trainer rank 1"].busy_s = 4.0
        message = {
            signal.SIGKILL: "trainer rank . (broke|died) in found",
            signal.SIGSTOP: "rank 1 has not responded for .*heartbeat_s",
            None: "rank 1 made no progress for 4 s .cluster.stall_s",
        }
        call = ("found", groups(4), objective_of("grpo"), SETTINGS) if how is not None else ("spin",)
        with pytest.raises(ClusterFault, match=message[how]):
            ranks.call(*call)
    finally:
        cluster.settings = settings
    wait_until_ended(pids)
