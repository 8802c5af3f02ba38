"""ScienceWorld with its real simulator: one Java process for the whole file."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.environments.base import Env, TaskSet
from outrider.environments.scienceworld import tasks as scienceworld_tasks
from outrider.environments.scienceworld.environment import ScienceWorldConfig, ScienceWorldEnvironment
from outrider.environments.scienceworld.simulator import JavaSimulator
from outrider.errors import EnvironmentFault
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.rollout.settings import Limits
from outrider.types import Message, Outcome
from tests.rollout.fakes import scheduler, scripted

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(
        shutil.which("java") is None, reason="no 'java' on PATH; ScienceWorld runs in a Java process"
    ),
]

CONFIG = ScienceWorldConfig(
    task_names=("find-animal", "lifespan-longest-lived", "chemistry-mix-paint-secondary-color"),
    borrow_limit_s=5.0,
)


@pytest.fixture(scope="module")
def family() -> TaskSet:
    pytest.importorskip("scienceworld", reason="ScienceWorld is an optional extra")
    return ScienceWorldEnvironment.build(CONFIG)


@pytest.fixture(scope="module")
def factory(family: TaskSet) -> Iterator[Any]:
    made = family.make()
    yield made
    made.close()


@pytest.fixture
def simulator(factory: Any) -> Iterator[JavaSimulator]:
    simulator = factory._shared.borrow()
    assert isinstance(simulator, JavaSimulator)
    yield simulator
    factory._shared.release(simulator)


def act(environment: Env, action: str) -> str:
    return environment.step(Message(role="assistant", content=f"<action>{action}</action>")).text


def test_our_frozen_split_is_the_simulators(simulator: JavaSimulator) -> None:
    for name, size in scienceworld_tasks.NUM_VARIATIONS.items():
        assert simulator.num_variations(name) == size
    for name in ("boil", "identify-life-stages-1", "chemistry-mix"):
        simulator.load(task_name=name, variation=0, simplification="")
        for split, method in (
            ("train", "getVariationsTrain"),
            ("valid", "getVariationsDev"),
            ("test", "getVariationsTest"),
        ):
            told = simulator._strings(simulator._call(method))
            assert [int(variation) for variation in told] == list(scienceworld_tasks.variations(name, split))


def test_the_gold_path_wins_and_repeats_exactly(family: TaskSet, factory: Any) -> None:
    # This task is one whose listing of objects changes from load to load in the published set-up.
    task = next(task for task in family.tasks("train") if "paint" in task.key)
    gold = factory._shared.borrow()
    actions = gold.gold_actions(
        task_name="chemistry-mix-paint-secondary-color", variation=0, simplification=""
    )
    factory._shared.release(gold)
    environment = factory(task)
    episodes = []
    for seed in (1, 2):
        seen = [environment.reset(seed)[0].content]
        rewards = []
        for action in actions:
            result = environment.step(Message(role="assistant", content=f"<action>{action}</action>"))
            rewards.append(result.reward)
            seen.append(result.text)
            if result.done:
                break
        record = environment.result()
        assert (record.episode_return, record.success, sum(rewards)) == (100.0, True, 100.0)
        episodes.append(seen)
    assert episodes[0] == episodes[1]
    assert "paint" in episodes[0][0] and "open OBJ" in episodes[0][0]


def test_the_expert_gives_steps_with_real_observations(simulator: JavaSimulator) -> None:

    class OneProcess(ScienceWorldEnvironment):
        @classmethod
        def start_simulator(cls, settings: ScienceWorldConfig) -> Any:
            return simulator

    family = OneProcess.build(CONFIG)
    steps = family.expert(family.tasks("train")[0], 0)
    assert steps is not None and len(steps) > 3
    assert [step.is_terminal for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all(step.text.startswith("<action>") and step.observation for step in steps)


def test_a_wrong_focus_ends_the_episode_at_minus_100(family: TaskSet, factory: Any) -> None:
    environment = factory(family.tasks("train")[0])
    environment.reset(0)
    refused = environment.step(Message(role="assistant", content="<action>go to kitchen</action>"))
    assert refused.refused and refused.text == "The door is not open."
    assert "No known action" in act(environment, "dance wildly")
    assert "Ambiguous" in act(environment, "open door")
    act(environment, "0")
    before = environment.result().metrics
    assert (before["num_invalid"], before["num_ambiguous"]) == (1, 1)
    assert 0 < before["score"] < 100  # the opened door leads where the task wants to go
    result = environment.step(Message(role="assistant", content="<action>focus on picture</action>"))
    assert (result.reward, result.done) == (-100.0 - before["score"], True)
    assert environment.result().episode_return == -100.0
    assert environment.result().metrics["wrong_focus"] == 1


def test_the_list_of_valid_actions_comes_on_demand(simulator: JavaSimulator) -> None:
    simulator.load(task_name="find-animal", variation=0, simplification="easy")
    actions = simulator.valid_actions()
    assert len(actions) > 100 and "look around" in actions
    assert any(action.startswith("teleport") for action in actions)


def test_a_failed_load_is_a_fault_with_the_simulators_message(factory: Any) -> None:
    simulator = factory._shared.borrow()
    with pytest.raises(EnvironmentFault, match="exceeds the total number"):
        simulator.load(task_name="boil", variation=999, simplification="")
    assert not simulator.is_alive()
    factory._shared.release(simulator)


@pytest.mark.slow
def test_a_killed_process_is_a_fault_and_is_replaced(family: TaskSet, factory: Any) -> None:
    simulator = factory._shared.borrow()
    assert isinstance(simulator, JavaSimulator)
    pid, num_replaced = simulator.pid, factory._shared.num_replaced
    factory._shared.release(simulator)
    environment = factory(family.tasks("train")[0])
    environment.reset(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="died"):
        act(environment, "look around")
    environment.reset(0)
    assert "room" in act(environment, "look around")
    environment.close()
    assert factory._shared.num_replaced == num_replaced + 1


class KillsOnce(Hook):
    """After the second turn of the first rollout that gets there, its simulator is killed."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        if state.turn == 2 and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = None
        return ()


@pytest.mark.long
def test_a_killed_simulator_costs_no_rollout(family: TaskSet, factory: Any) -> None:
    simulator = factory._shared.borrow()
    assert isinstance(simulator, JavaSimulator)
    pid, num_replaced = simulator.pid, factory._shared.num_replaced
    factory._shared.release(simulator)
    tasks = [task for task in family.tasks("train") if "find-animal" in task.key][:2]
    reports = []
    for hooks in ((KillsOnce(pid),), ()):
        runs = scheduler(
            scripted(lambda request, text: "<action>look around</action>"), factory, hooks=hooks,
            stop=family.stop, max_concurrent=1,
            limits=Limits(max_turns=4, max_turn_tokens=40, max_response_tokens=3500, step_timeout_s=60),
        )  # fmt: skip
        reports.append(runs.run(tasks, modes=("plain",), training_step=0))
    broken, whole = reports
    assert (dict(broken.faults), whole.faults.total()) == ({"environment_fault": 1, "retries": 1}, 0)
    assert factory._shared.num_replaced == num_replaced + 1
    for one, other in zip(broken.traces, whole.traces, strict=True):
        (leaf, path), (leaf_, path_) = next(one.rollouts()), next(other.rollouts())
        assert (
            leaf.outcome is leaf_.outcome is Outcome.TRUNCATED_TURNS
            and leaf.episode_return == leaf_.episode_return
        )
        assert [node.token_ids for node in path] == [node.token_ids for node in path_]
        assert sum(node.trainable for node in path) == 4


def test_close_leaves_no_process_and_no_port(factory: Any) -> None:
    simulator = factory._shared.borrow()
    assert isinstance(simulator, JavaSimulator)
    assert not Path("object_type_ids.tsv").exists()  # the simulator writes it where it runs
    pid, port = simulator.pid, simulator.port
    factory._shared.release(simulator)
    factory.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def _resident(pid: int) -> int:
    """KiB of resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _live_heap(made: Any) -> int:
    """Bytes of Java's heap that a full collection leaves. What is resident also holds garbage that waits for
    a fuller heap.
    """
    simulator = made._shared.borrow()
    assert isinstance(simulator, JavaSimulator)
    runtime = simulator._call("getRuntime", target="z:java.lang.Runtime")
    try:
        for _ in range(2):  # what finalisers held is free after the second
            simulator._call("gc", target=runtime, limit_s=60.0)
        return int(simulator._call("totalMemory", target=runtime)) - int(
            simulator._call("freeMemory", target=runtime)
        )
    finally:
        simulator._request(f"m\nd\n{runtime}\ne\n", 30.0)
        made._shared.release(simulator)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_thousand_episodes_leak_nothing(family: TaskSet) -> None:
    """One simulator process and port throughout; what either process keeps after 1,000 episodes is what it
    kept after 500.
    """
    made: Any = ScienceWorldEnvironment.build(CONFIG).make()
    pool = made._shared
    simulator = pool.borrow()
    assert isinstance(simulator, JavaSimulator)
    pid, port = simulator.pid, simulator.port
    pool.release(simulator)
    tasks = family.tasks("train")
    own, live, resident = [], [], 0
    for number in range(1, 1001):
        environment = made(
            tasks[number % len(tasks)] if number % 500 else tasks[0]
        )  # the last one stays loaded: compare the same
        environment.reset(number)
        for action in ("look around", "open door to kitchen", "go to kitchen", "nonsense"):
            act(environment, action)
        environment.close()
        resident = max(resident, _resident(pid))
        if number % 500 == 0:
            own.append(_resident(os.getpid()))
            live.append(_live_heap(made))
    simulator = pool.borrow()
    assert isinstance(simulator, JavaSimulator) and (simulator.pid, simulator.port) == (pid, port)
    pool.release(simulator)
    made.close()
    print(
        f"after 500 and 1,000 episodes: Python resident KiB {own}, Java's live heap {live} bytes, "
        f"resident at most {resident} KiB"
    )
    assert own[1] < 1.02 * own[0] and live[1] < 1.02 * live[0] and pool.num_replaced == 0
    assert resident < 640 * 1024  # 512 MiB of heap, and the rest


ROOMS = (
    "kitchen", "hallway", "outside", "workshop", "art studio", "greenhouse", "bedroom", "living room",
    "bathroom", "foundry",
)  # fmt: skip


def test_a_tour_of_the_rooms_is_a_success_by_the_released_rule_only() -> None:
    pytest.importorskip("scienceworld", reason="ScienceWorld is an optional extra")
    config = ScienceWorldConfig(
        task_names=("boil", "find-plant", "inclined-plane-determine-angle"),
        simplification="easy",
        num_test_variations=1,
        success_at="positive",
        max_moves=31,
    )
    family = ScienceWorldEnvironment.build(config)
    factory = family.make()
    successes = []
    for task in family.tasks("test"):
        environment = factory(task)
        environment.reset(0)
        world = environment.environment
        for number in range(30):
            result = world.act(f"teleport to {ROOMS[number]}" if number < len(ROOMS) else "wait")
            if result.done:
                break
        assert result.done and result.truncated
        released = environment.result().success
        world.settings = config.model_copy(update={"success_at": "full"})
        successes.append((released, environment.result().success))
        environment.close()
    factory.close()
    assert successes == [(True, False)] * len(config.task_names)
