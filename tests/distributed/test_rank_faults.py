"""What no rank may decide alone, ranks that die or hang, and what a cluster needs; nothing waits for ever."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.distributed import require_packages
from outrider.distributed.ray_session import Session
from outrider.errors import ClusterFault, ConfigError, EngineFault
from outrider.training.settings import ClusterSettings, UpdateSettings
from tests.distributed.forked_ranks import ForkedRanks
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, rank_group, run
from tests.distributed.processes import lives, wait_until_ended
from tests.distributed.test_rank_updates import differs, objective_of

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]
RanksOf = Callable[[int], ForkedRanks]


def test_one_broken_micro_batch_skips_the_step_of_all_once(ranks_of: RanksOf, folder: Path) -> None:
    """Of one rank alone: the others would wait in the next pass for ever."""
    traces, objective = groups(5, seed=3), objective_of("grpo")
    node = next(node for node in traces[3].nodes if node.logprobs)
    node.logprobs = (float("nan"), *node.logprobs[1:])
    policy, _ = alone(folder)
    before = {name: one.clone() for name, one in policy.masters.items()}
    ranks = ranks_of(3)
    found = ranks.call("found", traces, objective, SETTINGS, 1)[0]
    assert found.norms == [] and found.metrics["grad/num_skipped"] == 1.0
    assert all(found.weights[name].equal(one) for name, one in before.items())
    with pytest.raises(EngineFault, match="disagree by nan"):  # where the engine is checked
        ranks.call("found", traces, objective, SETTINGS, 0)
    # and the next step is as if nothing had been
    ranks.call("anew")
    wanted = run(policy, None, groups(5, seed=4), objective, SETTINGS)
    assert differs(ranks.call("found", groups(5, seed=4), objective, SETTINGS)[0], wanted) == []


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


@pytest.mark.parametrize("kind", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_reported_within_the_limit(
    session: Session, folder: Path, kind: signal.Signals
) -> None:
    ranks = rank_group(session, folder, 2, timeout_s=300.0)
    ranks._timeout_s = 4.0 if kind is signal.SIGSTOP else 60.0  # a start may take longer
    pids = [pid for pid, _ in ranks.built]
    os.kill(pids[1], kind)
    began = time.monotonic()
    message = "rank . did not end" if kind is signal.SIGSTOP else "rank . (broke|died) in found"
    with pytest.raises(ClusterFault, match=message):
        ranks.call("found", groups(4), objective_of("grpo"), SETTINGS)
    assert time.monotonic() - began < 40
    os.kill(pids[1], signal.SIGCONT) if kind is signal.SIGSTOP and lives(pids[1]) else None
    wait_until_ended(pids)


def test_an_unreachable_ray_is_named_in_time() -> None:
    """Ray itself asks for minutes."""
    hasty = ClusterSettings(num_trainers=2, placement_timeout_s=0.5, ray_address="127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(ClusterFault, match=r"cluster\.ray_address = 127\.0\.0\.1:9: .*refused"):
        Session(hasty)
    assert time.monotonic() - began < 20.0


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[cluster\]'"):
        require_packages()
