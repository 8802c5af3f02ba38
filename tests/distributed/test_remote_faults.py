"""Engines and rollout workers that die, or stand still: others take their place and the batch comes to the
same bits, or one typed error says who, in time; nothing is left behind. One Ray and four actors at a time.
"""

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.config import validate
from outrider.distributed.actors import Repairs
from outrider.engines.local.engine import LocalEngine
from outrider.errors import ClusterFault, ProcessLost
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.testing import check_engine
from outrider.training.components import Components
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings
from outrider.training.setup import build, local_learner
from tests.distributed.processes import lives

if TYPE_CHECKING:
    from outrider.distributed.actors import RemoteProcesses
    from outrider.distributed.ray_session import Session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SILENT_S = 6.0


def settings_of(folder: Path, **changed: Any) -> RunSettings:
    cluster = {
        "num_engines": 2, "num_rollout_workers": 2, "turn_timeout_s": SILENT_S, "heartbeat_s": SILENT_S,
        "placement_timeout_s": 60, "max_restarts": 20,
    }  # fmt: skip
    return validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo", "group_size": 2},
            "model": {"name": str(folder), "precision": "float32"},
            "rollout": {"max_turns": 2, "max_turn_tokens": 8},
            "train": {"tasks_per_step": 4},
            "num_threads": 1,
            "cluster": cluster | changed,
        },
    )


@dataclass
class Crew:
    """The parts of a run whose rollouts are played elsewhere."""

    parts: Components
    remote: "RemoteProcesses"

    def play(self, *, step: int = 0, limit_s: float = 60.0) -> RolloutReport:
        began = time.monotonic()
        rollouts = self.remote.rollouts(self.parts, training=True, on_finished=lambda done, owed: None)
        try:
            return rollouts.run(self.parts.train_tasks[:4], modes=("plain",) * 2, training_step=step)
        finally:
            assert time.monotonic() - began < limit_s

    def play_here(self) -> RolloutReport:
        """The same groups in this process."""
        parts = self.parts
        local = LocalEngine(parts.learner.language_model)
        local.load(self.remote.engine.weight_version)
        return Scheduler(
            engine=local,
            renderer=parts.renderer,
            factory=parts.factory,
            limits=parts.settings.limits,
            sampling=Sampling(temperature=1.0, stop=parts.task_set.stop),
            run_seed=parts.settings.seed,
        ).run(parts.train_tasks[:4], modes=("plain",) * 2, training_step=0)


@pytest.fixture(scope="module")
def crew(session: "Session", folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_of(session, folder, tmp_path_factory.mktemp("crew")) as made:
        yield made


def crew_of(session: "Session", folder: Path, place: Path, **changed: Any) -> AbstractContextManager[Crew]:
    """With these fields of the section ``cluster``."""
    return crew_with(session, settings_of(folder, **changed), place)


@contextmanager
def crew_with(session: "Session", settings: RunSettings, place: Path) -> Iterator[Crew]:
    from outrider.distributed.actors import RemoteProcesses

    parts = build(
        settings,
        buffer_path=place / "buffer.sqlite",
        resumed=False,
        on_tokens=lambda num: None,
        note=lambda line: None,
        start_learner=local_learner,
        start_remote=partial(RemoteProcesses, session=session),
    )
    assert isinstance(parts.remote, RemoteProcesses)
    yield Crew(parts, parts.remote)
    parts.remote.close()
    parts.factory.close()


def check_fault(crew: Crew, message: str) -> None:
    with pytest.raises(ClusterFault, match=message) as found:
        crew.play()
    assert "\n" not in str(found.value) and "--resume" in str(found.value)


@pytest.mark.long
def test_all_engines_together_keep_the_contract_of_one(crew: Crew) -> None:
    assert len({*crew.remote.engine_pids, *crew.remote.worker_pids, os.getpid()}) == 5
    check_engine(crew.remote.engine)
    assert crew.remote.metrics()["weights/rpcs"] == 2


@pytest.mark.long
def test_groups_keep_their_order_and_equal_ones_have_the_same_bits(crew: Crew) -> None:
    first, again, other = crew.play(), crew.play(), crew.play(step=1)
    assert [one.task.key for one in first.traces] == [task.key for task in crew.parts.train_tasks[:4]]
    bits = [[(node.token_ids, node.logprobs) for one in each.traces for node in one.nodes]
            for each in (first, again, other)]  # fmt: skip
    assert bits[0] == bits[1] != bits[2]
    versions = {node.weight_version for one in first.traces for node in one.nodes if node.trainable}
    assert versions == {crew.remote.engine.weight_version}


@pytest.mark.long
def test_several_workers_generate_the_tokens_of_one_process(crew: Crew) -> None:
    """Log-probs may differ in their last bits: they depend on which requests share a batch."""
    alone, elsewhere = crew.play_here(), crew.play()
    mine, theirs = ([n for trace in each.traces for n in trace.nodes] for each in (alone, elsewhere))
    assert len(mine) == len(theirs) == 12
    for one, other in zip(mine, theirs, strict=True):
        assert (one.node_id, one.parent, one.token_ids) == (other.node_id, other.parent, other.token_ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for one, other in zip(alone.traces, elsewhere.traces, strict=True):
        assert one.leaves == other.leaves


@pytest.mark.long
def test_an_older_weight_version_is_refused(crew: Crew) -> None:
    engine = crew.remote.engine
    engine.weight_version += 1  # as if a transfer had been forgotten
    check_fault(crew, r"engine [01] has weights of version \d+, and version \d+ was requested")
    engine.weight_version -= 1
    crew.play()


@pytest.fixture(scope="module")
def unbroken(crew: Crew) -> object:
    return bits(crew.play())


def bits(report: RolloutReport) -> object:
    nodes = [
        [(n.token_ids, n.logprobs, n.entropies, n.weight_version) for n in trace.nodes]
        for trace in report.traces
    ]
    return nodes, [trace.leaves for trace in report.traces]


def replaced(crew: Crew, unbroken: object, counted: str, message: str, *, num_groups: int) -> None:
    """The batch comes to the same bits, and what happened is counted and told once."""
    assert bits(crew.play()) == unbroken
    counts = {name: one for name, one in crew.remote.repairs.pop_counts().items() if one}
    assert counts == {counted: 1.0, "rollout/num_groups_replayed": float(num_groups)}
    [line] = crew.remote.notes()
    assert message in line and "replaced" in line and "\n" not in line
    assert bits(crew.play()) == unbroken and crew.remote.notes() == []


# a worker that Ray ends is long, in test_programs.py: the same bits, counts and notes
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_is_gone_is_replaced(crew: Crew, unbroken: object, how: signal.Signals) -> None:
    pid = crew.remote.worker_pids[1]
    os.kill(pid, how)
    silent = "rollout worker 1 did not end a heartbeat within 6 s (cluster.heartbeat_s)"
    message = silent if how is signal.SIGSTOP else "rollout worker 1 died in its rollouts"
    replaced(crew, unbroken, "cluster/worker_deaths", message, num_groups=2)
    assert not lives(pid) and crew.remote.worker_pids[1] != pid


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_engine_that_is_gone_is_replaced(crew: Crew, unbroken: object, how: signal.Signals) -> None:
    pid = crew.remote.engine_pids[1]
    os.kill(pid, how)
    silent = how is signal.SIGSTOP
    counted = "cluster/engine_hangs" if silent else "cluster/engine_deaths"
    message = (
        "engine 1 did not end generate within 6 s (cluster.turn_timeout_s)"
        if silent
        else "engine 1 died in generate"
    )
    # both workers have a group there
    replaced(crew, unbroken, counted, message, num_groups=4)
    assert not lives(pid) and crew.remote.engine_pids[1] != pid


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_process_may_die_at_any_moment(crew: Crew, unbroken: object, seed: int) -> None:
    """Nothing hangs, no token has another version, and the bits are those of an unbroken batch."""
    draw = random.Random(seed)
    pids = [*crew.remote.engine_pids, *crew.remote.worker_pids]
    killer = threading.Timer(draw.uniform(0.0, 0.6), os.kill, (draw.choice(pids), signal.SIGKILL))
    killer.start()
    assert bits(crew.play()) == unbroken
    killer.join()
    assert bits(crew.play()) == unbroken  # where it came after the batch
    counts = crew.remote.repairs.pop_counts()
    assert counts["cluster/worker_deaths"] + counts["cluster/engine_deaths"] == 1.0
    crew.remote.notes()


@pytest.mark.slow
def test_an_engine_that_dies_between_two_batches_is_replaced(crew: Crew, unbroken: object) -> None:
    """Where it is asked first; the run does not begin anew for it."""
    os.kill(crew.remote.engine_pids[0], signal.SIGKILL)
    crew.remote.engine.free_cache()
    counts = {name: one for name, one in crew.remote.repairs.pop_counts().items() if one}
    assert counts == {"cluster/engine_deaths": 1.0}
    assert "engine 0 died in free_cache" in crew.remote.notes()[0]
    assert bits(crew.play()) == unbroken


@pytest.mark.long
def test_an_engine_that_dies_in_front_of_a_transfer_is_replaced(crew: Crew) -> None:
    engine = crew.remote.engine
    os.kill(crew.remote.engine_pids[0], signal.SIGKILL)
    engine.load(engine.weight_version + 1)
    counts = {name: one for name, one in crew.remote.repairs.pop_counts().items() if one}
    assert counts == {"cluster/engine_deaths": 1.0, "weights/num_failed": 1.0}
    versions = {n.weight_version for trace in crew.play().traces for n in trace.nodes if n.trainable}
    assert versions == {engine.weight_version}
    assert "engine 0 died in loading the weights of version" in crew.remote.notes()[0]


@pytest.mark.slow
def test_an_engine_and_a_worker_that_are_gone_at_once_are_replaced(crew: Crew) -> None:
    """As with a node that had both: the engine is missed first, and the worker cannot be told of another."""
    unbroken = bits(crew.play())  # of this version: the test before sent another one
    for pid in (crew.remote.engine_pids[1], crew.remote.worker_pids[0]):
        os.kill(pid, signal.SIGKILL)
    crew.remote.engine.free_cache()
    counts = {name: one for name, one in crew.remote.repairs.pop_counts().items() if one}
    assert counts == {"cluster/engine_deaths": 1.0, "cluster/worker_deaths": 1.0}
    notes = crew.remote.notes()
    assert len({line.rpartition(", ")[2] for line in notes}) == 1 and len(notes) == 2  # one repair
    assert bits(crew.play()) == unbroken


@pytest.mark.long
def test_too_many_repairs_end_the_run_with_one_line(crew: Crew) -> None:
    crew.remote.repairs = Repairs(Allowance(0))
    os.kill(crew.remote.engine_pids[1], signal.SIGKILL)
    check_fault(crew, "engine 1 died in generate")
    os.kill(crew.remote.worker_pids[1], signal.SIGKILL)
    check_fault(crew, "rollout worker 1 died in its rollouts")


def test_replacements_are_counted_by_the_hour() -> None:
    clock = [0.0]
    repairs = Repairs(Allowance(2, clock=lambda: clock[0]))
    gone = ProcessLost("engine 1 died in generate (X); continue", "engine 1")
    for now in (0.0, 1800.0, 3700.0):
        clock[0] = now
        repairs.allow(gone)
    assert repairs.pop_notes()[-1] == "engine 1 died in generate (X); replaced, repair 2 of 2 within an hour"
    with pytest.raises(ClusterFault, match=r"engine 1 died .*after 2 repairs within an hour, cluster\.max"):
        repairs.allow(gone)
    again = pickle.loads(pickle.dumps(gone))
    assert (str(again), again.process, again.is_silent) == (str(gone), "engine 1", False)


@pytest.mark.long
def test_close_ends_all_processes(crew: Crew) -> None:
    pids = [*crew.remote.engine_pids, *crew.remote.worker_pids]
    crew.remote.close()
    crew.remote.close()
    until = time.monotonic() + 30
    while any(map(lives, pids)):
        assert time.monotonic() < until, "actors live on"
        time.sleep(0.1)


@pytest.mark.long
def test_missing_processors_are_named(session: "Session", folder: Path) -> None:
    from outrider.distributed.actors import RemoteProcesses

    settings = settings_of(folder, num_engines=300)
    learner = local_learner(settings, initial=True)
    before = session._settings
    session._settings = before.model_copy(update={"placement_timeout_s": 1.0})
    try:
        with pytest.raises(ClusterFault, match=r"num_engines = 300 and .*need 302 .* within 1 s"):
            RemoteProcesses(settings, learner, folder=folder, session=session)
    finally:
        session._settings = before
