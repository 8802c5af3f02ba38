"""Environments behind a real OpenEnv server: the contract, sessions, seeds, and a server that dies or
hangs.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core.env_server.http_server", reason="needs the package openenv-core")

from outrider.environments.base import CopyableEnvironment  # noqa: E402
from outrider.environments.openenv.environment import OpenEnvEnvironment, OpenEnvTaskSet
from outrider.environments.openenv.server import OpenEnvConfig, Server
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable  # noqa: E402
from outrider.plugins.listing import plugin_digests  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.types import Message, Outcome  # noqa: E402
from tests.environments.openenv_worlds import NUM_SESSIONS  # noqa: E402
from tests.rollout.fakes import scheduler, scripted  # noqa: E402

COMMAND = ("{python}", "-m", "tests.environments.openenv_worlds", "{port}")
EXPERTS = "tests.environments.openenv_experts"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server(COMMAND, start_limit_s=120)
    try:
        yield server.address()[0]
    finally:
        server.close()


def of(address: str | None, **settings: Any) -> OpenEnvConfig:
    few = {"num_train": 3, "num_valid": 0, "num_test": 2, "observation": ("text",)}
    where = {"command": COMMAND} if address is None else {"server_url": address}
    return OpenEnvConfig(**{**where, **few, **settings})


def started(config: OpenEnvConfig, number: int = 0) -> OpenEnvEnvironment:
    family = OpenEnvTaskSet(config)
    environment = family.make()(family.tasks("train")[number])
    environment.reset(0)
    return environment


def say(environment: OpenEnvEnvironment, text: str) -> Any:
    return environment.step(Message(role="assistant", content=text))


def act(environment: OpenEnvEnvironment, text: str) -> Any:
    return say(environment, f"<action>{text}</action>")


def opening(environment: OpenEnvEnvironment, seed: int = 0) -> str:
    try:
        return environment.reset(seed)[0].content
    finally:
        environment.close()


def word_of(environment: OpenEnvEnvironment) -> str:
    return environment.reset(0)[0].content.split()[-1].strip(".")


def test_an_episode(url: str) -> None:
    """Prompt, reward, success and metrics; the session is closed when the episode ends."""
    environment = started(of(f"{url}/single"))
    assert not isinstance(environment, CopyableEnvironment)
    for _ in range(2):  # the server has one session
        prompt = environment.reset(0)[0].content
        assert prompt.startswith("Write one action a turn, for example <action>text</action>.\n\nSay ")
        word = prompt.split()[-1].strip(".")
        assert say(environment, "nothing").invalid
        seen = [act(environment, text) for text in (word, "a\n  b", word)]
        assert [one.reward for one in seen] == [1.0, 0.0, 1.0]
        assert seen[1].text == "You said a\n  b." and seen[2].done and not seen[2].truncated
        record = environment.result()
        assert (record.episode_return, record.success) == (2.0, True)
        assert record.metrics == {"num_moves": 3, "num_turns": 4, "num_invalid": 1, "num_restarts": 0}
        with pytest.raises(RuntimeError, match="has ended"):
            act(environment, word)


def test_success_key_is_a_field_of_the_observation(url: str) -> None:
    environment = started(of(url, success_key="won", success_at=99.0))
    word = word_of(environment)
    assert not [act(environment, word) for _ in range(2)][-1].done and not environment.result().success
    act(environment, word)
    assert environment.result().success


def test_actions_of_several_fields_are_json_and_their_errors_are_explained(url: str) -> None:
    """With the messages of the schema and of JSON; the environment does not change."""
    environment = started(of(f"{url}/grid", observation=("left", "cells"), max_moves=2))
    prompt = environment.reset(0)[0].content
    assert '<action>{"row": 0, "column": 0}</action>' in prompt
    assert "left: 8\ncells: [[0, 0, 0], [0, 1, 0], [0, 0, 0]]" in prompt
    for text, expected in {
        "row 1": "The action is no JSON",
        "[1, 2]": "The action is no JSON object",
        '{"row": NaN, "column": 1}': "NaN is no number",
        "[" * 20_000: "The action is no JSON",
        '{"row": 7, "column": 0}': "row: Input should be less than or equal to 2",
        '{"row": 1}': "column: Field required",
        '{"row": 1, "column": 1, "depth": 1}': "depth: Extra inputs are not permitted",
    }.items():
        answer = act(environment, text)
        assert answer.invalid and expected in answer.text and not answer.done
    assert act(environment, '{"row": 0, "column": 0}').reward == 0.25
    last = act(environment, '{"row": 0, "column": 0, "note": "again"}')
    assert (last.reward, last.done, last.truncated) == (-0.5, True, True)
    assert environment.result().metrics["num_invalid"] == 7


def test_a_task_is_a_seed_of_a_server_and_its_version(url: str) -> None:
    family = OpenEnvTaskSet(of(url, first_seed=7, reset_options={"ending": "!"}))
    tasks = family.tasks("train")
    assert [task.key for task in tasks] == [f"openenv/echo/train/{seed}" for seed in (7, 8, 9)]
    assert tasks[0].metadata == {"environment": "echo", "seed": 7, "server_version": "2.1"}
    assert [task.metadata["seed"] for task in family.tasks("test")] == [2_000_007, 2_000_008]
    factory = family.make()
    openings = [opening(factory(task), seed) for task in tasks for seed in range(2)]
    assert openings[::2] == openings[1::2] and all(one.endswith("!") for one in openings)
    with pytest.raises(ConfigError, match="is no task of Grid"):
        OpenEnvTaskSet(of(f"{url}/grid", observation=())).make()(tasks[0])
    with pytest.raises(ConfigError, match="unknown split"):
        family.tasks("dev")


def test_a_server_that_ignores_seeds_needs_takes_seeds_false(url: str) -> None:
    """Methods that fork by replay then refuse it."""
    with pytest.raises(ConfigError, match=r"another game when it is reset .*takes_seeds = false"):
        OpenEnvTaskSet(of(f"{url}/unseeded")).make()
    config = of(f"{url}/unseeded", takes_seeds=False)
    family = OpenEnvTaskSet(config)
    factory, task = family.make(), family.tasks("train")[0]
    assert opening(factory(task)) != opening(factory(task))
    assert config.replayed_differently() and not of(url).replayed_differently()


def test_an_expert_gets_the_observations_and_its_code_is_recorded(url: str) -> None:
    config = of(url, expert=f"{EXPERTS}:says_the_word")
    family = OpenEnvTaskSet(config)
    steps = family.expert(family.tasks("train")[0], 0)
    assert steps is not None and [one.is_terminal for one in steps] == [False, False, True]
    assert steps[0].observation == f"You said {steps[0].text[8:-9]}."
    assert list(plugin_digests(config)) == ["plug-in expert"]
    lost = OpenEnvTaskSet(of(url, expert=f"{EXPERTS}:gives_up"))
    assert lost.expert(lost.tasks("train")[0], 0) is None
    assert OpenEnvTaskSet(of(url)).expert(lost.tasks("train")[0], 0) is None
    with pytest.raises(EnvironmentFault, match="expert raised KeyError"):
        OpenEnvTaskSet(of(url, expert=f"{EXPERTS}:breaks")).expert(lost.tasks("train")[0], 0)


def test_the_number_of_sessions_is_limited_by_the_server(url: str) -> None:
    """More are an error before the run; one more episode waits for a free session."""
    with pytest.raises(
        ConfigError, match=f"allows {NUM_SESSIONS} concurrent sessions .*num_sessions = {NUM_SESSIONS}"
    ):
        OpenEnvTaskSet(of(url, num_sessions=NUM_SESSIONS + 1)).make()
    config = of(url, num_sessions=NUM_SESSIONS)
    assert config.max_concurrent == NUM_SESSIONS
    family = OpenEnvTaskSet(config)
    factory, tasks = family.make(), family.tasks("train")

    def play(number: int) -> float:
        environment = factory(tasks[number % 3])
        word = word_of(environment)
        for _ in range(3):
            act(environment, word)
        return environment.result().episode_return

    with ThreadPoolExecutor(3 * NUM_SESSIONS) as pool:  # more than it has: they wait in their reset
        assert list(pool.map(play, range(24))) == [3.0] * 24


def test_no_free_session_is_a_fault_that_names_the_setting(url: str) -> None:
    first = started(of(f"{url}/single"))
    second = OpenEnvTaskSet(of(f"{url}/single", borrow_limit_s=0.1, takes_seeds=False))
    task = second.tasks("train")[0]
    with pytest.raises(EnvironmentFault, match=r"no free session: .*CAPACITY_REACHED.*num_sessions is 1"):
        second.make()(task).reset(0)
    waiting = OpenEnvTaskSet(of(f"{url}/single", takes_seeds=False)).make()(task)
    with ThreadPoolExecutor(1) as pool:
        reset = pool.submit(waiting.reset, 0)
        waiting.close()  # the loop gave it up: it ends now, not after a minute
        with pytest.raises(EnvironmentFault):
            reset.result(timeout=30)
    first.close()
    OpenEnvTaskSet(of(f"{url}/single")).make()(task).reset(0)


def test_an_error_of_the_server_is_a_fault_and_no_reward(url: str) -> None:
    environment = started(of(url))
    with pytest.raises(EnvironmentFault, match=r"step failed: the world is broken \(EXECUTION_ERROR\)"):
        act(environment, "raise")
    assert environment.result().episode_return == 0
    with pytest.raises(EnvironmentFault, match="never reset, or its session is closed"):
        act(environment, "sun")
    environment.close()


def test_a_hanging_step_is_a_fault_after_its_limit_or_when_it_is_closed(url: str) -> None:
    slow = started(of(url, step_limit_s=1.0))
    with pytest.raises(EnvironmentFault, match="no answer to step within 1 s"):
        act(slow, "hang")
    given_up = started(of(url))
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(act, given_up, "hang")
        while not given_up._record.num_turns:
            threading.Event().wait(0.01)
        given_up.close()
        with pytest.raises(EnvironmentFault):
            step.result(timeout=30)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"observation": ("words",)}, r"observations have no field 'words' \(their fields: text, won\)"),
        ({"success_key": "solved"}, "no field 'solved'"),
        ({"action_field": "say"}, r"actions have no field 'say' \(their fields: text\)"),
    ],
)
def test_unknown_fields_are_errors_before_the_first_rollout(
    url: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        OpenEnvTaskSet(of(url, **settings)).make()


def test_action_field_requires_that_other_fields_are_optional(url: str) -> None:
    with pytest.raises(ConfigError, match="need row, column besides note"):
        OpenEnvTaskSet(of(f"{url}/grid", observation=(), action_field="note")).make()


def group_is_gone(group: int) -> bool:
    """Whether no process of the group runs; zombies may still be listed."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while it was looked at
            state, _, of_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return False
    return True


def test_a_server_that_dies_is_restarted_and_every_rollout_has_one_outcome(
    tmp_path: Path,
) -> None:
    """In the rollout loop: the death is counted as faults of those that it hit, they are played again, and
    nothing of the server is left at the end.
    """
    family = OpenEnvTaskSet(of(None, command=(*COMMAND, str(tmp_path / "died")), num_sessions=2))
    tasks, factory = family.tasks("train")[:2], family.make()
    server: Any = factory.server
    first = server._process._process.pid

    def policy(request: Any, text: str) -> str:
        return "<action>die</action>" if "/0001/001" in request.request_id else "<action>sun</action>"

    runs = scheduler(
        scripted(policy),
        factory,  # type: ignore[arg-type]
        limits=Limits(max_turns=5, max_turn_tokens=40, max_response_tokens=2000, step_timeout_s=120),
        stop=family.stop,
        max_concurrent=2,
    )
    report = runs.run(tasks, modes=("plain",) * 3, training_step=0)
    assert 1 <= report.faults[Outcome.ENVIRONMENT_FAULT.value] == report.num_retries <= 2
    leaves = [leaf for trace in report.traces for leaf in trace.leaves.values()]
    assert sorted(leaf.rollout for leaf in leaves) == [0, 0, 1, 1, 2, 2]
    assert {leaf.outcome for leaf in leaves} == {Outcome.FINISHED}
    assert server.num_starts == 2 and sum(leaf.metrics["num_restarts"] for leaf in leaves) == 1
    second = server._process._process.pid
    factory.close()
    factory.close()
    family.close()
    assert group_is_gone(first) and group_is_gone(second)
    with pytest.raises(EnvironmentFault, match="was closed"):
        factory(tasks[0]).reset(0)


@pytest.mark.long
def test_a_server_that_hangs_is_replaced() -> None:
    family = OpenEnvTaskSet(of(None, step_limit_s=20.0))
    factory = family.make()
    server: Any = factory.server
    environment = factory(family.tasks("train")[0])
    environment.reset(0)
    os.killpg(server._process._process.pid, signal.SIGSTOP)
    environment._config = environment._config.model_copy(update={"step_limit_s": 1.0})
    with pytest.raises(EnvironmentFault, match="no answer to step"):
        act(environment, "sun")
    assert environment.reset(0)[0].content.endswith(".") and server.num_starts == 2
    assert environment.result().metrics["num_restarts"] == 1
    environment.close()
    factory.close()
    family.close()


def test_a_server_that_does_not_start_is_reported_with_its_output() -> None:
    ends = OpenEnvTaskSet(of(None, command=("{python}", "-c", "raise SystemExit('no such port')")))
    with pytest.raises(ToolUnavailable, match=r"did not start: .*no such port.* ended with status 1"):
        ends.make()
    with pytest.raises(ToolUnavailable, match="No such file"):
        OpenEnvTaskSet(of(None, command=("/no/such/program",))).tasks("train")
    slow = ("{python}", "-c", "import threading; threading.Event().wait()")
    with pytest.raises(ToolUnavailable, match=r"not ready after 0\.5 s"):
        OpenEnvTaskSet(of(None, command=slow, start_limit_s=0.5)).make()


def test_the_command_and_its_children_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even if that process is killed, and the child ignores SIGTERM."""
    pid = tmp_path / "pid"
    child = "import signal, threading\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\n"
    parent = f"""
import subprocess, sys
one = subprocess.Popen([sys.executable, "-c", {child + "threading.Event().wait()"!r}], stdout=subprocess.PIPE)
one.stdout.readline()
open({str(pid)!r}, "w").write(str(one.pid))
one.wait()
"""
    program = f"""
import os, signal, subprocess, sys, time
from outrider.environments.process_supervisor import supervised_command
command = supervised_command([sys.executable, "-c", {parent!r}])
one = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
while not os.path.exists({str(pid)!r}):
    time.sleep(0.01)
print(one.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    group, deadline = int(done.stdout), time.monotonic() + 30
    while not group_is_gone(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)
