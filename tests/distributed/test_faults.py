"""What no rank may decide alone, ranks that die or hang, and what a cluster needs; nothing waits for ever."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.config import validate
from outrider.distributed import require_packages
from outrider.distributed.ray_session import Session
from outrider.errors import ClusterFault, ConfigError, EngineFault
from outrider.training.settings import ClusterSettings, RunSettings, UpdateSettings
from tests.distributed.forked_ranks import ForkedRanks
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, rank_group, run
from tests.distributed.test_same_update import differs, objective_of

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
def test_a_rank_that_dies_or_hangs_is_told_within_the_limit(
    session: Session, folder: Path, kind: signal.Signals
) -> None:
    ranks = rank_group(session, folder, 2, timeout_s=300.0)
    ranks._timeout_s = 4.0 if kind is signal.SIGSTOP else 60.0  # a start may take longer
    pids = ranks.pids
    os.kill(pids[1], kind)
    began = time.monotonic()
    told = "rank . did not end" if kind is signal.SIGSTOP else "rank . (broke|died) in found"
    with pytest.raises(ClusterFault, match=told):
        ranks.call("found", groups(4), objective_of("grpo"), SETTINGS)
    assert time.monotonic() - began < 40
    os.kill(pids[1], signal.SIGCONT) if kind is signal.SIGSTOP and _lives(pids[1]) else None
    _wait_for(lambda: not any(map(_lives, pids)), "the ranks to end")


def test_processors_that_are_not_there_are_named_in_time(session: Session, folder: Path) -> None:
    hasty = ClusterSettings(num_trainers=2, placement_timeout_s=1.0)
    asked = Session.__new__(Session)
    asked.ray, asked._settings, asked._folder, asked.is_local = session.ray, hasty, None, True
    with pytest.raises(ClusterFault, match=r"needs 500 processors, and .* within 1 s"):
        asked.reserve([{"CPU": 1}] * 500, subject="cluster.num_trainers = 500 needs")


def test_a_ray_that_is_not_there_is_named_in_time() -> None:
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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cluster": {"placement": "colocate", "max_staleness": 1}}, "engines sleep"),
        ({"cluster": {"max_staleness": 2}}, "needs in_flight"),
        ({"cluster": {"tensor_parallel": 2}}, "tensor_parallel needs engines in processes of their own"),
        ({"cluster": {"tensor_parallel": 2, "weights": "store"}}, "needs engine.type = vllm"),
        ({"cluster": {"in_flight": True}}, "in_flight needs max_staleness of at least 1"),
        ({"cluster": {"num_trainers": 2}, "model": {"device": "cuda:1"}}, "Ray says which GPU is whose"),
        ({"cluster": {"num_trainers": 8}, "model": {"device": "cuda"}}, "needs engines of their own"),
        (
            {"cluster": {"num_trainers": 2}, "model": {"device": "cuda"}, "engine": {"type": "vllm"}},
            "cluster.placement=colocate cluster.num_engines=2",
        ),
        ({"cluster": {"num_trainers": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_read(changed: dict, told: str) -> None:
    recipe = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}}
    validate(RunSettings, recipe)
    with pytest.raises(ConfigError, match=told):
        validate(RunSettings, {**recipe, **changed})


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def _wait_for(done: Callable[[], bool], what: str, *, limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < until, f"waited {limit_s} s for {what}"
        time.sleep(0.1)
