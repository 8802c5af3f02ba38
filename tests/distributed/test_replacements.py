"""What is gone while nobody waits for rollouts, or while nobody wants them any more: without Ray, but for a
Ray that was ended.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import validate
from outrider.distributed.actors import RemoteProcesses, Repairs
from outrider.distributed.engines import DirectPool, EnginePool, probes
from outrider.distributed.ray_session import Recipe
from outrider.distributed.rollouts import HeartbeatMonitor, WorkerRollouts
from outrider.distributed.worker import RolloutWorker, WorkerSettings
from outrider.engines.base import FinishReason, Generation, LocalSettings, Request
from outrider.environments.factbook.environment import FactbookConfig
from outrider.errors import CheckpointError, ClusterFault, ConfigError, NoRepair, ProcessLost
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.plugins.listing import server_digests
from outrider.rollout.hooks import RolloutStatus
from outrider.trace import Leaf, Trace
from outrider.training.async_rollouts import RolloutPrefetch
from outrider.training.data import SampledStep
from outrider.training.restarts import Allowance
from outrider.training.run_dir import check_settings, flat_settings
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Step, Task, Trajectory

TASK = Task(key="a", question="?", answers=("!",))


class Died(Exception):
    """As Ray says it."""


class FakeRay:
    """Calls are answers, or errors; those of ``pending`` come when they are let go."""

    exceptions = SimpleNamespace(RayTaskError=type("T", (Exception,), {}), RayError=Died,
                                 OutOfMemoryError=type("O", (Exception,), {}))  # fmt: skip

    def __init__(self) -> None:
        self.dead = threading.Event()
        self.num_asked = 0

    def wait(self, references: list[Any], **given: Any) -> tuple[list[Any], list[Any]]:
        self.num_asked += 1
        if references[0] != "pending" or self.dead.wait(0.01):
            return references[:1], references[1:]
        return [], references

    def get(self, reference: Any) -> Any:
        if reference == "pending" or isinstance(reference, Exception):
            raise Died
        return reference


def actor(**answers: Any) -> Any:
    """Every method is answered at once, by a value or by what a function gives."""

    def method(name: str) -> Any:
        found = answers[name]
        return SimpleNamespace(remote=lambda *given: found(*given) if callable(found) else found)

    return SimpleNamespace(**{name: method(name) for name in answers})


class Crew:
    def __init__(self) -> None:
        self.workers = [actor(run="pending", beat="beat")]
        self.replaced: list[str] = []

    def replace(self, gone: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        self.replaced += gone
        raise ClusterFault("too late")


def test_cancelled_rollouts_replace_no_process_and_send_no_call() -> None:
    """The run begins anew at once: its processes are ended, which is no death, and so is its Ray."""
    ray, crew = FakeRay(), Crew()

    def play(ahead: RolloutPrefetch) -> SampledStep:
        WorkerRollouts(
            ray, crew, hooks=(), is_training=True, version=lambda: 0, max_concurrent=1,
            on_finished=ahead.on_finished, prefetch=ahead,
            new_monitor=partial(HeartbeatMonitor, ray, limit_s=60.0, rollout_status=RolloutStatus()),
        ).run([TASK], modes=("plain",), training_step=1)  # fmt: skip
        raise AssertionError("unreachable")

    ahead = RolloutPrefetch(play, counts=[])
    ahead.wait_until_sent()
    ahead.cancel()
    num_asked = ray.num_asked
    ray.dead.set()
    ahead._thread.join(10.0)
    assert not ahead._thread.is_alive()
    assert (crew.replaced, ray.num_asked) == ([], num_asked)


@pytest.mark.long
@pytest.mark.cluster
def test_a_call_after_the_end_starts_no_other_ray() -> None:
    pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
    code = """
from outrider.distributed.ray_session import Session
from outrider.training.settings import ClusterSettings
session = Session(ClusterSettings())
session.close()
try:
    session.ray.wait([session.ray.ObjectRef(b"0" * 28)], timeout=0)
except Exception:
    pass
assert not session.ray.is_initialized()
"""
    environ = {name: one for name, one in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=120)


def pool(engines: list[Any], anew: Any) -> EnginePool:
    return EnginePool(
        SimpleNamespace(), SimpleNamespace(), settings=LocalSettings(), load_s=1.0, anew=anew,  # type: ignore[arg-type]
        ray=FakeRay(), actors=engines, tokenizer=SimpleNamespace(), context_length=64, timeout_s=1.0,
    )  # fmt: skip


REQUEST = Request(request_id="g/0", cache_key="g/0", token_ids=(1,), max_tokens=1, seed=0)
GENERATION = Generation(
    request_id="g/0", token_ids=(1,), logprobs=(0.0,), entropies=(0.0,), weight_version=0,
    finish_reason=FinishReason.EOS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (EnginePool.free_cache, None),
        (EnginePool.busy_s, 2.0),
        (lambda engine: engine.generate([REQUEST]), [GENERATION]),
    ],
)
def test_an_engine_that_died_between_two_batches_is_replaced_at_its_next_call(ask: Any, found: Any) -> None:
    """And does not make the whole run begin anew."""
    reported: list[tuple[str, bool]] = []

    def anew(gone: ProcessLost, is_loading: bool) -> None:
        reported.append((gone.process, is_loading))
        engines.put(0, actor(free_cache=True, busy_s=2.0, generate=(GENERATION,)))

    engines = pool([actor(free_cache=Died(), busy_s=Died(), generate=Died())], anew)
    assert ask(engines) == found
    assert reported == [("engine 0", False)]


def test_busy_seconds_of_a_replaced_engine_count() -> None:
    """Else an engine in its place makes a step's sum smaller than the one before, and nobody seems busy."""

    def anew(gone: ProcessLost, is_loading: bool) -> None:
        engines.put(0, actor(busy_s=0.5))

    answers: list[Any] = [4.0, Died()]
    engines = pool([actor(busy_s=lambda: answers.pop(0)), actor(busy_s=2.0)], anew)
    assert engines.busy_s() == 3.0
    assert engines.busy_s() == (4.0 + 0.5 + 2.0) / 2


def remote_of(limit: int, reported: list[tuple[str, int]], *, builds: list[Any]) -> Any:
    """Two engines and two workers, the first of which is gone; ``builds``: what a new process answers first,
    one after the other, and then that it is built.
    """
    cluster = {"num_engines": 2, "num_rollout_workers": 2}
    recipe = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": cluster}
    remote: Any = RemoteProcesses.__new__(RemoteProcesses)
    remote._settings = validate(RunSettings, recipe)
    remote._session = SimpleNamespace(ray=FakeRay(), is_local=False, await_placement=lambda actor, name: None)
    remote.repairs, remote._parts = Repairs(Allowance(limit)), "parts"

    def another(kind: str) -> Any:
        def made(number: int) -> Any:
            reported.append((kind, number))
            return actor(build=builds.pop(0) if builds else ("pid", 64), use_engine="accepted")

        return made

    remote._new_engine, remote._new_worker = another("engine"), another("rollout worker")
    remote._worker_settings, remote._end = lambda: "settings", lambda one, pid: None
    remote.workers, remote.worker_pids = [actor(use_engine=Died()), actor(use_engine="accepted")], [1, 2]
    remote._engines, remote.engine_pids = ["one", "two"], [3, 4]
    remote.engine = SimpleNamespace(put=lambda number, one: reported.append(("put", number)))
    return remote


def test_a_worker_that_does_not_accept_the_new_engine_is_replaced_too() -> None:
    """A node had both, and the engine was missed first: one repair, and nobody is replaced twice."""
    reported: list[tuple[str, int]] = []
    remote = remote_of(1, reported, builds=[])
    remote.replace({"engine 1": ProcessLost("engine 1 died in load; ...", "engine 1")}, num_groups=0)
    assert reported == [("engine", 1), ("put", 1), ("rollout worker", 0)]
    counts = {name: one for name, one in remote.repairs.pop_counts().items() if one}
    assert counts == {"cluster/engine_deaths": 1.0, "cluster/worker_deaths": 1.0}
    notes = remote.notes()
    assert ["engine 1 died" in notes[0], "rollout worker 0 died" in notes[1]] == [True, True]
    assert {line.rpartition(", ")[2] for line in notes} == {"repair 1 of 1 within an hour"}


@pytest.mark.parametrize("who", ["engine 0", "rollout worker 0"])
def test_a_replacement_that_dies_is_replaced_too(who: str) -> None:
    """A node that is being lost takes one more process in, which dies too: another repair."""
    reported: list[tuple[str, int]] = []
    remote = remote_of(2, reported, builds=[Died()])
    remote.workers[0] = actor(use_engine="accepted")
    remote.replace({who: ProcessLost(f"{who} died in its rollouts; ...", who)}, num_groups=1)
    kind = who.rpartition(" ")[0]
    assert [one for one in reported if one[0] != "put"] == [(kind, 0), (kind, 0)]
    assert remote.repairs.num_replaced == {who: 2}
    assert [line.rpartition("repair ")[2][0] for line in remote.notes()] == ["1", "2"]
    for limit, error in ((1, NoRepair), (9, ProcessLost)):  # all begin anew, where that may be
        worse = remote_of(limit, [], builds=[Died(), Died()])
        with pytest.raises(error):
            worse.replace({who: ProcessLost(f"{who} died in its rollouts; ...", who)}, num_groups=1)
        assert worse.repairs.num_replaced[who] == min(limit, 2)


class FakeRanks:
    """``sent``: version, and whether these weights were sent before."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.sent: list[tuple[int, bool]] = []
        self._breaks = breaks

    def send(self, version: int, actors: list[Any], *, is_again: bool = False) -> tuple[int, int]:
        if self._breaks:
            raise ProcessLost("engine 1 died in take; ...", "engine 1")
        self.sent.append((version, is_again))
        return 8, 3


def direct(ranks: Any, anew: Any) -> DirectPool:
    return DirectPool(
        ranks, SimpleNamespace(), settings=LocalSettings(), load_s=1.0, anew=anew,  # type: ignore[arg-type]
        ray=FakeRay(), actors=[actor(free_cache=Died())], tokenizer=SimpleNamespace(), context_length=64,
        timeout_s=1.0,
    )  # fmt: skip


def test_a_replaced_engine_gets_the_current_weights_from_the_ranks() -> None:
    ranks = FakeRanks()
    engines = direct(ranks, lambda gone, is_loading: engines.put(0, actor(free_cache=True)))
    engines.load(3)
    engines.free_cache()
    assert ranks.sent == [(3, False), (3, True)]


def test_an_engine_that_dies_in_a_transfer_of_the_ranks_is_not_replaced() -> None:
    """The ranks were ended then: all begin anew."""
    engines = direct(FakeRanks(breaks=True), None)
    for ask in (lambda: engines.load(1), lambda: engines.put(0, actor())):
        with pytest.raises(ClusterFault, match="engine 1 died in take") as raised:
            ask()
        assert not isinstance(raised.value, ProcessLost)


def test_a_worker_that_is_not_built_yet_accepts_another_engine() -> None:
    """An engine may die in the run's very first transfer."""
    worker = RolloutWorker(0, ["one", "two"])
    worker.use_engine(1, "three")
    assert worker._engines == ["one", "three"]


def trajectory(name: str) -> Trajectory:
    steps = (Step(text=f"{name} 1", observation="seen", is_terminal=True),)
    asked = (Message(role="user", content=f"question {name}"),)
    return Trajectory(trajectory_id=name, task_key=name, agent="a", reward=1.0, prompt=asked, steps=steps)


def test_a_replaced_worker_reads_the_current_revision_of_the_buffer(tmp_path: Path) -> None:
    """A run that goes on rolls it back behind what its first workers were told."""
    buffer = StepTraceBuffer(tmp_path / "buffer.sqlite", load_embedder("hash"), mode="write")
    buffer.add_trajectories([trajectory("a")])
    revision = buffer.revision
    buffer.add_trajectories([trajectory("b")])
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7)))
    learner = SimpleNamespace(language_model=SimpleNamespace(model=model))
    settings = SimpleNamespace(environment=FactbookConfig())
    parts: Any = SimpleNamespace(learner=learner, buffer=buffer, train_tasks=[TASK], settings=settings)
    recipe: Any = None
    before = WorkerSettings.from_components(parts, recipe, context_length=8)
    buffer.rollback(revision)
    now = WorkerSettings.from_components(parts, recipe, context_length=8)
    assert before.buffer is not None and now.buffer is not None
    with pytest.raises(CheckpointError):
        StepTraceBuffer(before.buffer[0], load_embedder("hash"), mode="read", revision=before.buffer[1])
    with StepTraceBuffer(now.buffer[0], load_embedder("hash"), mode="read", revision=now.buffer[1]) as reader:
        assert reader.revision == revision
    buffer.close()


def test_a_worker_with_another_tool_server_is_refused(tmp_path: Path) -> None:
    """Another node may have another version of it."""
    pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
    pytest.importorskip("mcp", reason="needs the extra mcp")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    server = {"type": "mcp", "name": "numbers", "script": "tests/tools/mcp/fake_server.py"}
    environment = {"type": "tools", "tools": [server], "train": {"path": tmp_path / "rows.jsonl"}}
    settings = validate(RunSettings, {"environment": environment, "algorithm": {"type": "grpo"}})
    here = server_digests(settings.environment)
    assert here["tools.numbers"] == "numbers 1.0" and len(here["tools.numbers.add"]) == 64
    given = WorkerSettings(
        recipe=Recipe.from_settings(settings), vocabulary_size=8, context_length=8, train_tasks=[],
        buffer=None,
        servers={**here, "tools.numbers": "numbers 0.9"},
    )  # fmt: skip
    message = (
        r"rollout worker 3 has another environment.tools.numbers \(numbers 1.0\) than .* \(numbers 0.9\)"
    )
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(3, []).build(given)


def prompted(num_tokens: int) -> Trace:
    trace = Trace(task=TASK, modes=("plain",))
    root = trace.append(
        parent=None,
        origin=Origin.PROMPT,
        token_ids=(1,) * num_tokens,
        message=Message(role="user", content="?"),
    )
    trace.finish(Leaf(node_id=root.node_id, rollout=0, outcome=Outcome.TRUNCATED_TOKENS, episode_return=0.0))
    return trace


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_a_prompt_without_room_for_a_token_is_no_probe(num_tokens: int) -> None:
    engine: Any = SimpleNamespace(context_length=8)
    assert probes(engine, prompted(num_tokens), num=2) == []


def test_the_limit_of_repairs_can_be_raised_on_resume() -> None:
    def settings(max_restarts: int) -> RunSettings:
        cluster = {"num_rollout_workers": 2, "max_restarts": max_restarts}
        recipe = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": cluster}
        return validate(RunSettings, recipe)

    began_with = flat_settings(settings(3))
    assert check_settings(began_with, settings(20)) == []
    # of a checkpoint from when it was written down
    assert check_settings(began_with | {"cluster.max_restarts": 3}, settings(20)) == []
