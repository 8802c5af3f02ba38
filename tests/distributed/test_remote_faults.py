"""Engines and rollout workers that die or stop: others replace them, and the batch has the same bits."""

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.config import validate
from outrider.distributed.remote import RemoteProcesses, Repairs
from outrider.engines.local.engine import LocalEngine
from outrider.errors import ClusterFault, ProcessLost
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.testing import check_engine
from outrider.training.components import Components
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings
from tests.distributed.components import components_on
from tests.distributed.processes import lives, send_signal, wait_until_ended

if TYPE_CHECKING:
    from outrider.distributed.processes import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HEARTBEAT_S = 3.0


def settings_of(folder: Path, **changed: Any) -> RunSettings:
    cluster = {
        "num_engines": 2, "num_rollout_workers": 2, "heartbeat_s": HEARTBEAT_S, "max_restarts": 20,
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
    """The parts of a run whose rollouts are played in other processes."""

    parts: Components
    remote: RemoteProcesses

    def play(self, *, step: int = 0, limit_s: float = 100.0) -> RolloutReport:
        began = time.monotonic()
        rollouts = self.remote.rollouts(self.parts, training=True, on_finished=lambda done, total: None)
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

    @property
    def pids(self) -> dict[str, int]:
        return {name: each.pid for name, each in (self.remote.engines | self.remote.workers).items()}

    def counts(self) -> dict[str, float]:
        return {name: count for name, count in self.remote.repairs.pop_counts().items() if count}


def crew_of(cluster: "Cluster", folder: Path, place: Path, **changed: Any) -> AbstractContextManager[Crew]:
    """With these settings of the section ``cluster``."""
    return crew_with(cluster, settings_of(folder, **changed), place)


@contextmanager
def crew_with(cluster: "Cluster", settings: RunSettings, place: Path) -> Iterator[Crew]:
    cluster.settings = settings.cluster
    with components_on(cluster, settings, place) as parts:
        assert isinstance(parts.remote, RemoteProcesses)
        yield Crew(parts, parts.remote)


@pytest.fixture(scope="module")
def crew(cluster: "Cluster", folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_of(cluster, folder, tmp_path_factory.mktemp("crew")) as started:
        yield started


def bits(report: RolloutReport) -> object:
    nodes = [
        [(n.token_ids, n.logprobs, n.entropies, n.weight_version) for n in trace.nodes]
        for trace in report.traces
    ]
    return nodes, [trace.leaves for trace in report.traces]


@pytest.fixture(scope="module")
def unbroken(crew: Crew) -> object:
    return bits(crew.play())


def test_several_workers_generate_the_tokens_of_one_process(crew: Crew, unbroken: object) -> None:
    """Log-probs may differ in their last bits: they depend on which requests share a batch."""
    assert len({*crew.pids.values(), os.getpid()}) == 5
    alone, remote = crew.play_here(), crew.play()
    assert bits(remote) == unbroken
    here, there = ([n for trace in each.traces for n in trace.nodes] for each in (alone, remote))
    assert len(here) == len(there) == 12
    for node, other in zip(here, there, strict=True):
        assert (node.node_id, node.parent, node.token_ids) == (other.node_id, other.parent, other.token_ids)
        assert node.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert [trace.leaves for trace in alone.traces] == [trace.leaves for trace in remote.traces]


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (("engine 1",), signal.SIGKILL),
        (("rollout worker 1",), signal.SIGKILL),
        (("engine 1", "rollout worker 0"), signal.SIGKILL),
        pytest.param(("engine 1",), signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(("rollout worker 1",), signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(("engine 0", "rollout worker 1"), signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_lost_process_is_replaced_and_the_bits_are_the_same(
    crew: Crew, unbroken: object, names: tuple[str, ...], how: signal.Signals
) -> None:
    before = crew.pids
    for name in names:
        send_signal(before[name], how)
    assert bits(crew.play()) == unbroken
    counts, is_silent = crew.counts(), how is signal.SIGSTOP
    assert counts.pop("rollout/num_groups_replayed") >= 2
    engine = "cluster/engine_hangs" if is_silent else "cluster/engine_deaths"
    kinds = {engine if name.startswith("engine") else "cluster/worker_deaths" for name in names}
    assert counts == dict.fromkeys(kinds, 1.0)
    notes = [note for note in crew.remote.notes() if "replaced, repair " in note]
    assert len(notes) == len(names)
    assert all(("has not responded" if is_silent else "died in") in note for note in notes), notes
    wait_until_ended([before[name] for name in names])
    assert bits(crew.play()) == unbroken and not crew.counts()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_process_may_die_at_any_moment(crew: Crew, unbroken: object, seed: int) -> None:
    draw = random.Random(seed)
    pid = draw.choice(sorted(crew.pids.values()))
    killer = threading.Timer(draw.uniform(0.0, 0.6), os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert bits(crew.play()) == unbroken
    killer.join()
    assert bits(crew.play()) == unbroken  # if the signal came after the batch
    counts = crew.counts()
    assert counts.get("cluster/worker_deaths", 0) + counts.get("cluster/engine_deaths", 0) == 1.0
    crew.remote.notes()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_an_engine_that_is_lost_between_two_batches_is_replaced(crew: Crew, how: signal.Signals) -> None:
    """A probe of the weights calls it first; its call has no name of a process."""
    send_signal(crew.pids["engine 0"], how)
    prompt = crew.play_here().traces[0]
    assert len(crew.remote.probes(prompt)) == 2
    send_signal(crew.pids["engine 1"], how)
    crew.remote.engine.free_cache()
    counts = crew.counts()
    assert counts.get("cluster/engine_deaths", 0) + counts.get("cluster/engine_hangs", 0) == 2.0
    crew.remote.notes()


def test_an_engine_that_dies_before_a_transfer_is_replaced(crew: Crew) -> None:
    engine = crew.remote.engine
    send_signal(crew.pids["engine 0"], signal.SIGKILL)
    engine.load(engine.weight_version + 1)
    assert crew.counts() == {"cluster/engine_deaths": 1.0, "weights/num_failed": 1.0}
    nodes = [node for trace in crew.play().traces for node in trace.nodes if node.trainable]
    assert {node.weight_version for node in nodes} == {engine.weight_version}


@pytest.mark.long
def test_all_engines_together_keep_the_contract_of_one(crew: Crew) -> None:
    """It loads new weights, so it comes after the tests that compare bits."""
    check_engine(crew.remote.engine)


def test_an_older_weight_version_is_refused(crew: Crew) -> None:
    engine = crew.remote.engine
    engine.weight_version += 1  # as if a transfer had been forgotten
    with pytest.raises(ClusterFault, match=r"engine [01] has weights of version \d+, and version \d+ was"):
        crew.play()
    engine.weight_version -= 1


def test_too_many_repairs_end_the_run_with_one_line_and_close_ends_all(crew: Crew) -> None:
    crew.remote.repairs = Repairs(Allowance(0))
    pids = list(crew.pids.values())
    send_signal(crew.pids["rollout worker 1"], signal.SIGKILL)
    with pytest.raises(ClusterFault, match=r"rollout worker 1 died in .*--resume") as raised:
        crew.play()
    assert "\n" not in str(raised.value)
    crew.remote.close()
    crew.remote.close()
    wait_until_ended(pids)
    assert not any(map(lives, pids))


def test_replacements_are_counted_by_the_hour() -> None:
    clock = [0.0]
    repairs = Repairs(Allowance(2, clock=lambda: clock[0]))
    lost = ProcessLost("engine 1 died in generate (X); continue", "engine 1")
    for now in (0.0, 1800.0, 3700.0):
        clock[0] = now
        repairs.allow(lost, is_charged=True)
    assert repairs.pop_notes()[-1] == "engine 1 died in generate (X); replaced, repair 2 of 2 within an hour"
    repairs.allow(lost, is_charged=False)
    with pytest.raises(ClusterFault, match=r"engine 1 died .*after 2 repairs within an hour, cluster\.max"):
        repairs.allow(lost, is_charged=True)
    again = pickle.loads(pickle.dumps(lost))
    assert (str(again), again.process, again.is_silent) == (str(lost), "engine 1", False)
