"""The processes of agent programs and the endpoint that they call: order, ends, and what is left."""

import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.environment import AgentConfig, AgentTaskSet  # noqa: E402
from outrider.environments.agent.launcher import ENDPOINT_VARIABLES  # noqa: E402
from outrider.environments.agent.programs import Report, run_agent  # noqa: E402
from outrider.environments.agent.requests import read_request  # noqa: E402
from outrider.environments.agent.server import MAX_BYTES, Gateway, PendingRequest, ProgramFailure, Session  # noqa: E402  # noqa: E402
from outrider.errors import ToolUnavailable  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    PROGRAMS,
    closing,
    finished,
    own_factory,
    scheduler,
    shared_factory,
    task,
)
from tests.environments.test_agent import halve  # noqa: E402

READ = partial(read_request, takes_tools=False)
HELLO = b'{"messages": [{"role": "user", "content": "a"}]}'


def test_a_hundred_programs_at_once() -> None:
    tasks = [task("guess", "12", key=f"{n:03d}") for n in range(100)]
    made = scheduler(shared_factory(), script=halve)
    made.max_concurrent = 100
    report = made.run(tasks, modes=("m",), training_step=0)
    outcomes = [leaf.outcome for trace in report.traces for leaf in trace.leaves.values()]
    assert outcomes == [Outcome.FINISHED] * 100 and not report.faults


def test_a_proxy_of_the_network_is_not_used_for_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    with closing(own_factory(function=f"{PROGRAMS}:words", reward=f"{PROGRAMS}:score")) as factory:
        report = scheduler(factory, script=lambda *_: "b").run([task("", "b")], modes=("m",), training_step=0)
    [leaf] = report.traces[0].leaves.values()
    assert finished(leaf) and leaf.success


@pytest.mark.parametrize("failed_return", [None, 0.0])
@pytest.mark.parametrize(
    ("reward", "reason"), [("judged", "KeyError: 'OPENAI_BASE_URL'"), ("exiting", "SystemExit: no key")]
)
def test_a_reward_function_that_fails_is_a_fault_and_finds_no_policy(
    reward: str, reason: str, failed_return: float | None
) -> None:
    settings = {"reward": f"{PROGRAMS}:{reward}", "failed_return": failed_return}
    with closing(own_factory(function=f"{PROGRAMS}:words", **settings)) as factory:
        report = scheduler(factory, script=lambda *_: "b").run([task("", "b")], modes=("m",), training_step=0)
    [leaf] = report.traces[0].leaves.values()
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
    assert "the reward function" in leaf.detail and reason in leaf.detail


def test_programs_find_the_policy_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.setenv(name, "1")
    code = "import os; exit(7 * (os.environ['OPENAI_API_BASE'] == os.environ['OPENAI_BASE_URL'] != '1'))"
    command = (sys.executable, "-c", code)
    with closing(own_factory(command=command)) as factory:
        report = scheduler(factory).run([task("")], modes=("m",), training_step=0)
    [leaf] = report.traces[0].leaves.values()
    assert "ended with status 7" in leaf.detail


def test_columns_of_the_data_are_the_metadata(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a", "files": ["a.txt"]}, {"question": "r", "files": []}]
    rows += [{"question": "s", "answer": answer} for answer in ({"value": 5}, None)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = AgentTaskSet(AgentConfig(function="a:b", train={"path": tmp_path / "rows.jsonl"})).tasks("train")
    assert [(one.answers, one.metadata) for one in tasks] == [
        (("a",), {"files": ["a.txt"]}), ((), {"files": []}), ((), {"answer": {"value": 5}}), ((), {}),
    ]  # fmt: skip


COMMAND = """
import json, os, subprocess, sys, urllib.request as u
task = json.load(sys.stdin)
held = open(sys.argv[2], "w")
subprocess.Popen(["sleep", "600"], pass_fds=[held.fileno()])
body = json.dumps({"messages": [{"role": "user", "content": task["question"] + sys.argv[1]}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(int(sys.argv[3])):
    answer = u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head))
    text = json.load(answer)["choices"][0]["message"]["content"]
print(text)
"""


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("the command ends", Outcome.FINISHED),
        ("the budget ends it", Outcome.TRUNCATED_TURNS),
        ("the launcher is killed", Outcome.ENVIRONMENT_FAULT),
    ],
)
def test_a_command_and_what_it_started_end_with_the_episode(
    end: str, outcome: Outcome, tmp_path: Path
) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # ends when no process has the other end
    requests = "2" if end == "the budget ends it" else "1"
    command = (sys.executable, "-c", COMMAND, "{question}!", str(fifo), requests)
    seen: list[tuple[str, str]] = []
    with closing(own_factory(command=command, reward=f"{PROGRAMS}:score")) as factory:
        launcher = factory._programs.pid

        def script(request: Any, text: str) -> str:
            if end == "the launcher is killed":
                os.kill(launcher, signal.SIGKILL)
            return "b"

        made = scheduler(factory, script=script, limits=Limits(max_turns=1), seen=seen)
        report = made.run([task("", "b", question="say b")], modes=("m",), training_step=0)
        [leaf] = report.traces[0].leaves.values()
        try:
            assert select.select([reader], [], [], 60)[0] and not os.read(reader, 1)
        finally:
            os.close(reader)
    assert leaf.outcome is outcome, leaf.detail
    assert "say bsay b!" in seen[0][1] and leaf.success is (outcome is Outcome.FINISHED)


def test_long_tasks_and_long_results_do_not_block_each_other() -> None:
    """Neither side may wait for the other to read while it does not read itself."""
    ended: queue.SimpleQueue[Report] = queue.SimpleQueue()
    programs = run_agent(function=f"{PROGRAMS}:bulky", command=(), reward=None)

    def start() -> None:
        for _ in range(40):
            programs.start(task("", question="q" * 1_000_000), {}, ended.put)

    try:
        threading.Thread(target=start, daemon=True).start()
        assert [ended.get(timeout=60).status for _ in range(40)] == [0] * 40
    finally:
        programs.close()


def test_a_killed_launcher_is_a_fault_and_is_replaced_and_nothing_is_left() -> None:
    with closing(own_factory(function=f"{PROGRAMS}:run", time_limit_s=1.0)) as factory:
        first = factory._programs.pid
        killed: list[int] = []

        def script(request: Any, text: str) -> str:
            if not killed:
                killed.append(first)
                os.kill(first, signal.SIGKILL)
            return halve(request, text)

        made = scheduler(factory, script=script, max_retries=1)
        report = made.run([task("guess", "7")], modes=("m",) * 2, training_step=0)
        assert all(map(finished, report.traces[0].leaves.values()))
        assert report.faults["environment_fault"] == report.faults["retries"] == 2
        second = factory._programs.pid
        scheduler(factory).run([task("hanging")], modes=("m",) * 3, training_step=0)
        wait_for(lambda: not Path(f"/proc/{second}/task/{second}/children").read_text().split())
    assert not os.path.exists(f"/proc/{second}")


def test_threads_of_an_agent_do_not_outlive_the_trainer() -> None:
    programs = run_agent(function="tests.environments.agents.threaded:run", command=(), reward=None)
    launcher = programs._process
    try:
        launcher._sock.shutdown(socket.SHUT_RDWR)  # as the end of the trainer does
        assert launcher._process.wait(60) == 0
    finally:
        launcher._process.kill()
        programs.close()


# The endpoint.


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()
    made.close()


def call(gateway: Gateway, key: str, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    head = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(gateway.url + path, body, head, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def begun_request(gateway: Gateway, session: Session, body: bytes, length: int) -> Iterator[None]:
    """A connection on which ``body`` of ``length`` bytes has been sent."""
    url = urlsplit(gateway.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    with socket.create_connection((str(url.hostname), int(url.port or 0))) as connection:
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
        yield


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_refusal_has_a_reason_and_is_counted(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gateway.open(READ)
    cases = [
        ("POST", "/completions", b"{}", 404), ("POST", "/embeddings", b"{}", 404),
        ("GET", "/nope", None, 404),
        ("GET", "/chat/completions", None, 405), ("DELETE", "/models/policy", None, 405),
        ("POST", "/chat/completions", b"x" * (MAX_BYTES + 1), 413),
        ("POST", "/responses", b"{", 400), ("POST", "/reward", b'"much"', 400),
    ]  # fmt: skip
    for number, (method, path, body, status) in enumerate(cases, start=1):
        found, answer = call(gateway, session.key, method, path, body)
        assert found == status and answer["error"]["message"] and answer["error"]["code"], answer
        assert answer["error"]["type"] == "invalid_request_error" and session.num_refused == number
    assert call(gateway, "nobody", "GET", "/nope")[0] == 404 and session.num_refused == len(cases)
    for path, fields, param in (
        ("/chat/completions", {"messages": [], "logit_bias": {"5": 1}}, "logit_bias"),
        ("/responses", {"input": "a", "background": True}, "background"),
    ):
        status, answer = call(gateway, session.key, "POST", path, json.dumps(fields).encode())
        assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["param"] == param and param in answer["error"]["message"]
        assert answer["error"]["code"] == "unsupported_parameter"
    monkeypatch.setattr("outrider.environments.agent.server.MAX_WAITING", 0)
    status, answer = call(gateway, session.key, "POST", "/chat/completions", HELLO)
    assert (status, answer["error"]["code"]) == (429, "too_many_requests")
    assert (session.num_refused, session.num_requests) == (len(cases) + 3, 0)
    gateway.close_session(session)
    assert call(gateway, session.key, "POST", "/chat/completions", HELLO)[0] == 401


def test_a_model_of_any_name_exists(gateway: Gateway) -> None:
    session = gateway.open(READ)
    for name in ("policy", "org/some-model"):
        status, answer = call(gateway, session.key, "GET", f"/models/{name}")
        assert (status, answer["id"], answer["object"]) == (200, name, "model")
    assert call(gateway, "nobody", "GET", "/models/policy")[0] == 401 and session.num_refused == 0


def test_a_broken_off_request_is_ignored(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    session = gateway.open(READ)
    with begun_request(gateway, session, b"{", 100):
        wait_for(lambda: bool(session._arriving))
    wait_for(lambda: not session._arriving)
    assert call(gateway, session.key, "GET", "/models")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_end_of_a_program_comes_after_everything_that_it_sent(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, may_go_on = gateway.open(READ), threading.Event()
    gateway._loop.call_soon_threadsafe(may_go_on.wait)  # a busy server
    with begun_request(gateway, session, HELLO, len(HELLO)):
        pass
    gateway.end(session, ProgramFailure(problem="ended"))
    may_go_on.set()
    assert isinstance(session.next(30.0), PendingRequest)
    assert isinstance(session.next(30.0), ProgramFailure)
    monkeypatch.setattr("outrider.environments.agent.server._CATCH_UP_S", 0.3)  # half a request: not forever
    other = gateway.open(READ)
    with begun_request(gateway, other, b"{", 100):
        wait_for(lambda: bool(other._arriving))
        gateway.end(other, ProgramFailure(problem="ended"))
        assert isinstance(other.next(60.0), ProgramFailure)


@pytest.mark.parametrize("way", ["hangs up", "ends"])
def test_a_request_that_has_arrived_is_a_turn_even_if_the_program_is_gone(way: str) -> None:
    """Otherwise the speed of the policy would determine the number of turns."""
    seen: list[tuple[str, str]] = []
    environments: list[Any] = []

    def factory(task: Task) -> Any:
        environments.append(shared_factory()(task))
        return environments[-1]

    def script(request: Any, text: str) -> str:
        session = environments[0]._session
        wait_for(lambda: session.num_requests == 2)
        if way == "hangs up" and len(seen) == 1:
            wait_for(lambda: session._pending[-1]._future.done())
        return "b"

    report = scheduler(factory, script=script, seen=seen).run(
        [task("leaving", way)], modes=("m",), training_step=0
    )
    [(leaf, path)] = report.traces[0].rollouts()
    assert leaf.outcome is Outcome.FINISHED and sum(node.trainable for node in path) == 2
    assert "second" in seen[1][1]


def test_without_the_servers_packages_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.environments.agent.server", None)
    with pytest.raises(ToolUnavailable, match=r"outrider\[agent\]"):
        own_factory(function=f"{PROGRAMS}:run")
