"""Groups on rollout workers: how they are shared, put together again, and what happens if they break their
worker. The workers are real processes that play nothing.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import load_settings, validate
from outrider.distributed.processes import Cluster, Process
from outrider.distributed.recipe import Recipe
from outrider.distributed.remote import RemoteProcesses, Repairs
from outrider.distributed.rollouts import (
    GroupPool,
    Job,
    PoolRollouts,
    RolloutWorker,
    WorkerSettings,
    _Group,
    worker_room,
)
from outrider.environments.factbook.environment import FactbookConfig
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import CheckpointError, ConfigError, NoRepair
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.plugins.listing import server_digests
from outrider.rollout.hooks import Hook, RolloutStatus, StatelessHook
from outrider.trace import Trace
from outrider.training.restarts import Allowance
from outrider.training.run_dir import check_settings, comparable_settings
from outrider.training.settings import ClusterSettings, RunSettings
from outrider.types import Message, Outcome, Step, Task, Trajectory
from tests.distributed.served import Player, Reader

HEARTBEAT_S = 1.5


class Players:
    """Engines that are never called, and workers; replaced as in a run."""

    replace = RemoteProcesses.replace
    is_current = RemoteProcesses.is_current
    faults = RemoteProcesses.faults

    def __init__(self, cluster: Cluster, *, num_engines: int = 2, num_workers: int = 2) -> None:
        self.cluster = cluster
        self.settings = SimpleNamespace(
            num_concurrent=4 * num_workers, cluster=SimpleNamespace(num_rollout_workers=num_workers)
        )
        self.engine = SimpleNamespace(weight_version=5)
        self.repairs = Repairs(Allowance(20))
        self.engines = {f"engine {n}": _engine(n) for n in range(num_engines)}
        self.workers: dict[str, Process] = {}
        for number in range(num_workers):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        name = f"rollout worker {number}"
        self.workers[name] = self.cluster.start(
            name, Player, str(self.cluster.folder), name,
            busy_s=3.0, has_progress=False, place=("worker", number),
        )  # fmt: skip

    def _worker_settings(self) -> None:
        return None


def _engine(number: int) -> Process:
    return Process(name=f"engine {number}", address="", key=b"", pid=-1)


@pytest.fixture
def players(cluster: Cluster) -> Iterator[Any]:
    cluster.settings = ClusterSettings(heartbeat_s=HEARTBEAT_S)
    players = Players(cluster)
    yield players
    for process in players.workers.values():
        cluster.kill(process)


class Notes(StatelessHook):
    """Records the calls of the pool, in order."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def snapshot(self) -> Any:
        return len(self.records)

    def absorb(self, gathered: Any) -> None:
        self.records.append(f"gathered {gathered}")

    def after_group(self, trace: Trace) -> None:
        self.records.append(trace.task.key)


def rollouts_of(players: Any, *hooks: Hook, max_calls: int | None = None) -> PoolRollouts:
    return PoolRollouts(
        GroupPool(players, hooks, RolloutStatus()),
        hooks=hooks,
        is_training=True,
        max_calls=max_calls,
        on_finished=lambda done, total: None,
    )


def tasks_of(num: int, **questions: str) -> list[Task]:
    return [Task(key=f"t{number}", question=questions.get(f"t{number}", "")) for number in range(num)]


@pytest.mark.parametrize(("num_engines", "num_workers", "num_groups"), [(4, 2, 16), (4, 2, 7), (3, 1, 9)])
def test_every_engine_has_its_share_of_rollouts(num_engines: int, num_workers: int, num_groups: int) -> None:
    """Groups are shared before any has ended, as with engines that need minutes for a turn."""
    players: Any = SimpleNamespace(
        engines={f"engine {n}": _engine(n) for n in range(num_engines)},
        workers={
            f"rollout worker {n}": SimpleNamespace(name=f"rollout worker {n}") for n in range(num_workers)
        },
        engine=SimpleNamespace(weight_version=0),
    )
    jobs: list[tuple[str, Job]] = []
    for name, worker in players.workers.items():
        worker.call = lambda method, job, name=name: jobs.append((name, job)) or object()
    tasks = {(0, n): (task, ("plain",) * 16) for n, task in enumerate(tasks_of(num_groups))}
    GroupPool(players, (), RolloutStatus()).submit(tasks, training_step=0, is_training=True)
    for kind, num, loads in (
        ("engine", num_engines, Counter(job.engine.name for _, job in jobs)),
        ("worker", num_workers, Counter(name for name, _ in jobs)),
    ):
        assert len(loads) == num and max(loads.values()) - min(loads.values()) <= 1, (kind, loads)


def test_workers_have_room_for_all_engines_at_default_settings() -> None:
    """64 concurrent rollouts per engine: 4 engines generate for 256, and no worker halves them."""
    recipe = {
        "environment": {"type": "factbook"},
        "algorithm": {"type": "grpo", "group_size": 16},
        "cluster": {"num_engines": 4, "num_rollout_workers": 2},
    }
    settings = validate(RunSettings, recipe)
    assert settings.num_concurrent == 4 * 64


def test_groups_return_in_order_with_the_work_of_the_copies(players: Any) -> None:
    hook, tasks = Notes(), tasks_of(6)
    rollouts = rollouts_of(players, hook, max_calls=20)
    report = rollouts.run(tasks, modes=lambda group: (f"m{group}", "plain"), training_step=3)
    assert [trace.task for trace in report.traces] == tasks
    assert [tuple(trace.modes) for trace in report.traces] == [(f"m{n}", "plain") for n in range(6)]
    # what the copy of a group gathered, and then the group, in order
    assert hook.records == [record for task in tasks for record in (f"gathered {task.key}", task.key)]
    assert (report.num_batches, report.num_retries, report.faults) == (6, 6, Counter(retries=6))
    jobs = [reason.split() for reason in report.fault_reasons]
    assert {(version, step) for _, _, version, step, _, _ in jobs} == {("5", "3")}
    shares = [int(job[4]) for job in jobs]  # of the limit on tool calls
    assert sum(shares) == 20 and max(shares) - min(shares) <= 1
    # a further round has the calls that are left: each group has executed 2
    report = rollouts.run(tasks_of(2), modes=("plain",), training_step=3, continued=True)
    assert [int(reason.split()[4]) for reason in report.fault_reasons] == [4, 4]
    tasks = [Task(key=f"game {number}", question="") for number in range(140)]
    report = rollouts.run(tasks, modes=("evaluation",), training_step=-1)
    assert hash_tasks([trace.task for trace in report.traces]) == hash_tasks(tasks)


def test_an_invalid_batch_is_refused_before_any_rollout(players: Any) -> None:
    task = Task(key="a", question="die")
    with pytest.raises(ValueError, match="share a key"):
        rollouts_of(players).run([task, task], modes=("plain",), training_step=0)
    with pytest.raises(ValueError, match="differ in size"):
        rollouts_of(players).run(
            [task, Task(key="b", question="")], modes=lambda group: ("plain",) * (group + 1), training_step=0
        )
    assert players.cluster.check() == {}


def test_a_hook_without_copies_is_named(players: Any) -> None:
    class Own(Hook):
        """A hook without snapshots."""

    with pytest.raises(ConfigError, match="Own has no copies in other processes"):
        rollouts_of(players, Own())


def test_only_the_groups_of_a_lost_worker_are_played_again(players: Any) -> None:
    hook, tasks = Notes(), tasks_of(8, t2="die once")
    report = rollouts_of(players, hook).run(tasks, modes=("plain",), training_step=0)
    assert [trace.task for trace in report.traces] == tasks
    assert hook.records == [record for task in tasks for record in (f"gathered {task.key}", task.key)]
    attempts = [int(int(reason.split()[5]) >= 8) for reason in report.fault_reasons]
    assert attempts[2] == 1 and attempts[1::2] == [0] * 4
    counts = players.repairs.pop_counts()
    assert counts["cluster/worker_deaths"] == 1 and counts["rollout/num_groups_replayed"] == sum(attempts)


@pytest.mark.parametrize(
    ("poisoned", "what"),
    [
        ({"t1"}, "die"),
        ({"t1", "t2", "t5"}, "die"),
        pytest.param({"t1"}, "hold the lock", marks=pytest.mark.long),
    ],
)
def test_a_group_that_breaks_its_worker_is_masked_and_named(
    players: Any, poisoned: set[str], what: str
) -> None:
    """The run continues; it is not restarted, which would break it again, with ``--resume`` too."""
    players.repairs = Repairs(Allowance(2 * len(poisoned)))
    tasks = tasks_of(6, **dict.fromkeys(poisoned, what))
    hook = Notes()
    report = rollouts_of(players, hook).run(tasks, modes=("plain", "other"), training_step=0)
    assert [trace.task for trace in report.traces] == tasks
    for trace in report.traces:
        outcomes = [leaf.outcome for leaf, _ in trace.rollouts()]
        assert outcomes == ([Outcome.ENVIRONMENT_FAULT] * 2 if trace.task.key in poisoned else [])
    assert report.faults["environment_fault"] == 2 * len(poisoned)
    masked = [reason for reason in report.fault_reasons if reason.startswith("environment_fault")]
    assert len(masked) == len(poisoned)
    for key in poisoned:
        assert any(
            f"in {key}: masked, because it breaks its rollout worker: rollout worker" in reason
            and f"last seen at {key}/0: an environment's step" in reason
            for reason in masked
        ), masked
    # innocent groups: their results are complete, however often they were lost beside it
    assert [record for record in hook.records if "gathered" in record] == [
        f"gathered {task.key}" for task in tasks if task.key not in poisoned
    ]


def test_only_groups_that_a_worker_had_begun_count_its_loss(players: Any) -> None:
    """It begins them in order as it has room for four rollouts."""
    pool = GroupPool(players, (), RolloutStatus())
    worker = players.workers["rollout worker 0"]
    sizes = [(2, True), (9, False), (2, True), (1, True), (1, False)]
    groups = [
        _Group(
            name=(0, number), task=Task(key=f"t{number}", question=""), modes=("plain",) * size,
            training_step=0, is_training=is_training, snapshots=b"", max_calls=None, worker=worker,
        )
        for number, (size, is_training) in enumerate(sizes)
    ]  # fmt: skip
    assert worker_room(players.settings) == 4
    assert [group.name[1] for group in pool._begun(worker, groups)] == [0, 2, 1]


def test_repairs_without_a_guilty_task_are_limited(players: Any) -> None:
    players.repairs = Repairs(Allowance(0))
    with pytest.raises(NoRepair, match=r"rollout worker 0 died in play, last seen at t0/0"):
        rollouts_of(players).run(tasks_of(1, t0="die once"), modes=("plain",), training_step=0)


def test_the_limit_of_repairs_can_be_raised_on_resume() -> None:
    def settings(max_restarts: int) -> RunSettings:
        cluster = {"num_rollout_workers": 2, "max_restarts": max_restarts}
        recipe = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": cluster}
        return validate(RunSettings, recipe)

    began_with = comparable_settings(settings(3))
    assert check_settings(began_with, settings(20)) == []
    assert check_settings(began_with | {"cluster.max_restarts": 3}, settings(20)) == []


def test_a_plug_in_beside_the_recipe_is_found_in_another_process(cluster: Cluster, tmp_path: Path) -> None:
    """Its module has to be found before the settings can be unpickled."""
    (tmp_path / "beside_recipe.py").write_text(
        "from outrider.engines.base import EngineSettings\n"
        "class Mine:\n    class Settings(EngineSettings):\n        size: int = 3\n"
        "    def generate(self, requests): ...\n    def release(self, cache_keys): ...\n"
        "    def free_cache(self): ...\n    def load(self, version): ...\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[environment]\ntype = "factbook"\n[algorithm]\ntype = "grpo"\n'
        '[engine]\ntype = "beside_recipe:Mine"\nsize = 8\n'
    )
    settings = load_settings(RunSettings, file=tmp_path / "recipe.toml", overrides=[])
    recipe = Recipe.from_settings(settings)
    process = cluster.start("reader 0", Reader, recipe, busy_s=60.0, place=("worker", 0))
    assert process.call("read").result(60) == (8, "beside_recipe", "beside_recipe:Mine")
    cluster.kill(process)


def trajectory(name: str) -> Trajectory:
    steps = (Step(text=f"{name} 1", observation="seen", is_terminal=True),)
    prompt = (Message(role="user", content=f"question {name}"),)
    return Trajectory(trajectory_id=name, task_key=name, agent="a", reward=1.0, prompt=prompt, steps=steps)


def test_a_replaced_worker_reads_the_current_revision_of_the_buffer(tmp_path: Path) -> None:
    """A resumed run rolls the buffer back behind the revision of its first workers."""
    buffer = StepTraceBuffer(tmp_path / "buffer.sqlite", load_embedder("hash"), mode="write")
    buffer.add_trajectories([trajectory("a")])
    revision = buffer.revision
    buffer.add_trajectories([trajectory("b")])
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7)))
    learner = SimpleNamespace(language_model=SimpleNamespace(model=model))
    settings = SimpleNamespace(environment=FactbookConfig())
    parts: Any = SimpleNamespace(learner=learner, buffer=buffer, train_tasks=[], settings=settings)
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
    pytest.importorskip("mcp", reason="needs the extra mcp")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    server = {"type": "mcp", "name": "numbers", "script": "tests/tools/mcp/fake_server.py"}
    environment = {"type": "tools", "tools": [server], "train": {"path": tmp_path / "rows.jsonl"}}
    settings = validate(RunSettings, {"environment": environment, "algorithm": {"type": "grpo"}})
    here = server_digests(settings.environment)
    assert here["tools.numbers"] == "numbers 1.0" and len(here["tools.numbers.add"]) == 64
    worker_settings = WorkerSettings(
        recipe=Recipe.from_settings(settings), vocabulary_size=8, context_length=8, train_tasks=[],
        buffer=None,
        servers={**here, "tools.numbers": "numbers 0.9"},
    )  # fmt: skip
    message = (
        r"rollout worker 3 has another environment.tools.numbers \(numbers 1.0\) than .* \(numbers 0.9\)"
    )
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(3, str(tmp_path)).build(worker_settings)
