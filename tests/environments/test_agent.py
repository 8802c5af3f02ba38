"""Agent programs behind the recording proxy: every token that is trained on stands behind the context that it
was sampled in, and every episode has one outcome, whatever its program does.
"""

import json
import os
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.engines.base import Request  # noqa: E402
from outrider.engines.scripted import ScriptedEngine  # noqa: E402
from outrider.environments.agent.environment import AgentConfig, AgentFactory, AgentTaskSet
from outrider.environments.agent.programs import Programs, Report
from outrider.environments.agent.server import Gateway, PendingRequest, ProgramExit, Session
from outrider.environments.tool_qa.datasets import DatasetConfig  # noqa: E402
from outrider.errors import ToolUnavailable  # noqa: E402
from outrider.rollout.episode import Sampling  # noqa: E402
from outrider.rollout.scheduler import RolloutReport, Scheduler  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Message, Outcome, Task, ToolCall  # noqa: E402
from tests.environments.agents.named import NAMED, with_program  # noqa: E402
from tests.environments.agents.shared import shared_factory  # noqa: E402
from tests.rollout.fakes import Forking  # noqa: E402
from tests.tiny import tiny_tokenizer  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

TOKENIZER = tiny_tokenizer()
PROGRAMS = "tests.environments.agents.programs"
ONE = (Task(key="t", question="say b", answers=("b",)),)


def halve(request: Request, text: str) -> str:
    low, high = 1, 50
    for number, hint in re.findall(r"(\d+) is too (high|low)", text):
        high, low = (int(number) - 1, low) if hint == "high" else (high, int(number) + 1)
    return str((low + high) // 2)


def counted(request: Request, text: str) -> str:
    return f"turn {request.request_id.rsplit('/', 1)[1]}"


@contextmanager
def scheduled(
    program: str = "",
    *,
    script: Callable[[Request, str], str] = counted,
    seen: list[tuple[str, str]] | None = None,
    limits: Limits | None = None,
    max_retries: int = 0,
    renderer: ChatRenderer | None = None,
    shared: bool = False,
    **settings: Any,
) -> Iterator[Scheduler]:
    """A scheduler of one agent program. ``shared``: with a factory that other tests of the module use too."""
    if program:
        settings["function"] = f"{PROGRAMS}:{program}"
    renderer = renderer or ChatRenderer(TOKENIZER)

    def answer(request: Request, text: str) -> str:
        if seen is not None:
            seen.append((request.request_id, text))
        return script(request, text)

    factory = shared_factory(**settings) if shared else AgentFactory(AgentConfig(**settings))
    try:
        yield Scheduler(
            engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=answer, context_length=8192),
            renderer=renderer,
            factory=factory,
            limits=limits or Limits(max_turns=10, max_turn_tokens=64, max_response_tokens=4000),
            sampling=Sampling(),
            run_seed=0,
            max_retries=max_retries,
        )
    finally:
        if not shared:
            factory.close()


def play(program: str, *, tasks: Sequence[Task] = ONE, group: int = 1, **settings: Any) -> RolloutReport:
    with scheduled(function=NAMED, shared=True, **settings) as scheduler:
        named = with_program(tasks, "programs", program)
        return scheduler.run(named, modes=("m",) * group, training_step=0)


def test_a_program_that_owns_its_loop() -> None:
    tasks = [Task(key=str(n), question="", answers=(str(n),)) for n in (3, 25, 49)]
    seen: list[tuple[str, str]] = []
    report = play("guess", tasks=tasks, group=4, script=halve, seen=seen)
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            assert (leaf.outcome, leaf.episode_return, leaf.success) == (Outcome.FINISHED, 1.0, True)
            assert len(split_contexts(path)) == 1  # a history that only grows is one context
            assert leaf.metrics["num_requests"] == sum(node.trainable for node in path)
    assert not report.faults


def contexts(report: RolloutReport, seen: list[tuple[str, str]]) -> None:
    """Every sampled turn stands behind exactly the ids that the engine was given for it."""
    asked = dict(seen)
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            turn = 0
            for sample in split_contexts(path):
                before: list[int] = []
                for node in sample:
                    if node.trainable:
                        text = asked[f"{trace.task.key}/{leaf.rollout:04d}/{turn:03d}"]
                        assert TOKENIZER.decode(before, skip_special_tokens=False) == text
                        turn += 1
                    before += node.token_ids


@pytest.mark.parametrize(
    ("program", "num_samples", "value"), [("rewriting", 2, 0.5), ("nested", 3, 1.0), ("several", 3, 3.0)]
)
def test_what_is_not_appended_is_a_sample_more(program: str, num_samples: int, value: float) -> None:
    seen: list[tuple[str, str]] = []
    report = play(program, group=2, seen=seen)
    contexts(report, seen)
    for _, path in report.traces[0].rollouts():
        assert len(split_contexts(path)) == num_samples
    assert [leaf.episode_return for leaf in report.traces[0].leaves.values()] == [value] * 2


def test_a_conversation_that_goes_on_keeps_its_ids() -> None:
    """The main agent's context is found again behind the helper's."""
    report = play("nested")
    [(_, path)] = report.traces[0].rollouts()
    first, helper, again = split_contexts(path)
    before = [token for node in first for token in node.token_ids]
    assert list(again[0].token_ids[: len(before)]) == before
    assert "it said turn 001" in TOKENIZER.decode(again[0].token_ids, skip_special_tokens=False)
    assert "You help." in TOKENIZER.decode(helper[0].token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("silent", "without asking the policy"),
        ("dying", "signal 9"),
        ("raising", "RuntimeError: no idea"),
        ("hanging", "longer than 1 s"),
        ("odd", "no finite number"),
        ("words", "no finite number"),
    ],
)
def test_a_program_that_breaks_is_one_fault(program: str, reason: str) -> None:
    report = play(program, group=2, max_retries=1, time_limit_s=1.0 if program == "hanging" else 60.0)
    leaves = report.traces[0].leaves.values()
    assert [leaf.outcome for leaf in leaves] == [Outcome.ENVIRONMENT_FAULT] * 2
    assert report.faults["environment_fault"] == 4 and report.faults["retries"] == 2
    assert all(reason in told for told in report.fault_reasons)


@pytest.mark.parametrize("program", ["dying", "raising", "hanging"])
def test_or_an_episode_that_failed(program: str) -> None:
    report = play(program, failed_return=-0.5, time_limit_s=1.0)
    [leaf] = report.traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return, leaf.success) == (Outcome.FINISHED, -0.5, False)
    assert leaf.metrics["num_failed"] == 1 and not report.faults


def test_a_step_may_take_as_long_as_its_program() -> None:
    """Else the rollout's limit of a step makes a fault of what ``failed_return`` pays."""
    assert AgentConfig(function="a:b", time_limit_s=300.0).waiting_s(8) >= 300


def test_garbage_is_answered_in_words() -> None:
    [leaf] = play("garbage").traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 21.0)
    assert leaf.metrics["num_refused_requests"] == 21 and leaf.metrics["num_requests"] == 1


@pytest.mark.parametrize(
    ("stop", "written", "content", "reasoning"),
    [
        (("\n",), "one\ntwo</think>3", "", "one"),
        (("think",), "2+2</think>four", "", "2+2</"),
        (("<think>",), "why<think>not", "", "why"),
        (("</think>",), "2+2</think>four", "", "2+2"),
        ((".", ","), "2+2</think>four, five.", "four", "2+2"),
        (("<",), "nothing else", "", "nothing else"),
    ],
)
def test_a_stop_string_ends_what_the_policy_wrote_and_not_what_the_template_opened(
    stop: tuple[str, ...], written: str, content: str, reasoning: str
) -> None:
    family = FAMILIES["qwen3, always thinking"]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes", observations=("tool",)
    )
    seen: list[tuple[str, str]] = []
    report = play(
        "halting",
        tasks=[Task(key="t", question="", answers=stop)],
        renderer=renderer,
        script=lambda *_: written,
        seen=seen,
        tool_calls="hermes",
    )
    [leaf] = report.traces[0].leaves.values()
    assert leaf.outcome is Outcome.FINISHED, report.fault_reasons
    assert json.dumps([content, reasoning]) in seen[1][1]


def test_half_a_surrogate_pair_breaks_nothing() -> None:
    family = FAMILIES["qwen3"]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes", observations=("tool",)
    )
    report = play("halves", renderer=renderer, tool_calls="hermes")
    [leaf] = report.traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), report.fault_reasons


@pytest.mark.parametrize(("program", "num_faults"), [("going_on", 0), ("unsteady", 1)])
def test_a_fork_asks_the_same_or_is_a_fault(program: str, num_faults: int) -> None:
    seen: list[tuple[str, str]] = []
    with scheduled(program, seen=seen) as scheduler:
        hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=1)
        scheduler.hooks = (hook,)
        report = scheduler.run(ONE, modes=("m",) * 2, training_step=0)
    assert report.faults.get("environment_fault", 0) == num_faults, report.fault_reasons
    if not num_faults:
        assert seen[-1] == ("t/0001/001", seen[1][1]) and "length 3 3" in seen[1][1]


def test_a_call_with_another_id_is_the_same_call_where_the_template_writes_none() -> None:
    family = FAMILIES["qwen3"]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes", observations=("tool",)
    )
    call = '<tool_call>{"name":"look","arguments":{}}</tool_call>'  # not as a template writes it
    limits = Limits(max_turn_tokens=200)
    report = play("renaming", renderer=renderer, script=lambda *_: call, tool_calls="hermes", limits=limits)
    [(leaf, path)] = report.traces[0].rollouts()
    assert leaf.episode_return == 1 and len(split_contexts(path)) == 1


def test_calls_that_a_server_read_have_ids_too() -> None:
    factory = AgentFactory(AgentConfig(function=f"{PROGRAMS}:ids", tool_calls="hermes"))
    environment = factory(ONE[0])
    try:
        environment.reset(0)
        look = ToolCall(name="look")
        result = environment.step(Message(role="assistant", content="", tool_calls=(look, look)))
        assert result.done and environment.result().episode_return == 2
    finally:
        environment.close()
        factory.close()


def test_output_without_end_is_read_and_forgotten() -> None:
    [leaf] = play("printing").traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0)


def test_budgets_end_a_program_that_asks_for_ever() -> None:
    [leaf] = play("endless", limits=Limits(max_turns=3), cut_return=-1.0).traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.TRUNCATED_TURNS, -1.0)
    [leaf] = play("endless", limits=Limits(max_response_tokens=100)).traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.TRUNCATED_TOKENS, 0.0)


def test_a_reward_over_the_wire() -> None:
    [leaf] = play("handing_in").traces[0].leaves.values()
    assert (leaf.episode_return, leaf.success, leaf.metrics["num_words"]) == (0.25, True, 3.0)


def test_a_function_that_scores() -> None:
    report = play("words", reward=f"{PROGRAMS}:score", script=lambda request, text: "b")
    [leaf] = report.traces[0].leaves.values()
    assert (leaf.episode_return, leaf.success) == (1.0, True)


def test_a_proxy_of_the_network_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    with scheduled("guess", script=halve) as scheduler:  # its launcher has this environment
        task = Task(key="t", question="", answers=("25",))
        [leaf] = scheduler.run([task], modes=("m",), training_step=0).traces[0].leaves.values()
    assert leaf.outcome is Outcome.FINISHED


def test_a_command() -> None:
    code = (
        "import json, os, sys, urllib.request as u\n"
        "task = json.load(sys.stdin)\n"
        "said = {'role': 'user', 'content': task['question'] + sys.argv[1]}\n"
        "body = json.dumps({'messages': [said]}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "ask = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)\n"
        "print(json.load(u.urlopen(ask))['choices'][0]['message']['content'])\n"
    )
    seen: list[tuple[str, str]] = []
    with scheduled(
        command=("python", "-c", code, "{question}!"), reward=f"{PROGRAMS}:score", seen=seen,
        script=lambda request, text: "b",
    ) as scheduler:  # fmt: skip
        [leaf] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].leaves.values()
    assert leaf.episode_return == 1.0 and "say bsay b!" in seen[0][1]


LEAVING = """
import json, os, subprocess, sys, urllib.request as u
held = open(sys.argv[1], "w")
subprocess.Popen(["sleep", "600"], pass_fds=[held.fileno()])
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(int(sys.argv[2])):
    u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)).read()
print("b")
"""


@pytest.mark.parametrize("way", ["the command ends", "the budget ends it", "the launcher is killed"])
def test_nothing_that_a_command_has_started_is_left(way: str, tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # at its end once no process holds the other one
    asks = "2" if way == "the budget ends it" else "1"
    command = (sys.executable, "-c", LEAVING, str(fifo), asks)
    with scheduled(command=command, reward=f"{PROGRAMS}:score", limits=Limits(max_turns=1)) as scheduler:
        launcher = scheduler.factory._programs.pid  # type: ignore[attr-defined]

        def script(request: Request, text: str) -> str:
            if way == "the launcher is killed":
                os.kill(launcher, signal.SIGKILL)
            return "b"

        scheduler.engine = ScriptedEngine(tokenizer=TOKENIZER, script=script, context_length=8192)
        [leaf] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].leaves.values()
        try:
            assert select.select([reader], [], [], 60)[0] and not os.read(reader, 1)
        finally:
            os.close(reader)
    ends = {"the command ends": Outcome.FINISHED, "the budget ends it": Outcome.TRUNCATED_TURNS}
    assert leaf.outcome is ends.get(way, Outcome.ENVIRONMENT_FAULT), leaf.detail


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "import sys; sys.exit(3)"), "ended with status 3"),
        (("sh", "-c", "kill -9 $$"), "ended with status -9"),
        (("/no/such/program",), "cannot be started: .*No such file"),
    ],
)
def test_a_command_that_fails_says_how(command: tuple[str, ...], reason: str) -> None:
    ended: queue.SimpleQueue[Report] = queue.SimpleQueue()
    programs = Programs(function=None, command=command, reward=None)
    try:
        programs.start(ONE[0], {}, ended.put)
        assert re.search(reason, ended.get(timeout=60).result)
    finally:
        programs.close()


def test_a_hundred_at_once() -> None:
    tasks = [Task(key=f"{n:03d}", question="", answers=(str(n % 50 + 1),)) for n in range(100)]
    with scheduled("guess", script=halve) as scheduler:
        scheduler.max_concurrent = 100
        report = scheduler.run(tasks, modes=("m",), training_step=0)
    outcomes = [leaf.outcome for trace in report.traces for leaf in trace.leaves.values()]
    assert outcomes == [Outcome.FINISHED] * 100 and not report.faults


def test_long_tasks_and_long_results_pass_each_other() -> None:
    """Neither side may wait for the other to read while it does not read itself."""
    programs = Programs(function=f"{PROGRAMS}:bulky", command=(), reward=None)
    ended: queue.SimpleQueue[Report] = queue.SimpleQueue()
    task = Task(key="t", question="q" * 1_000_000)

    def start() -> None:
        for _ in range(40):
            programs.start(task, {}, ended.put)

    try:
        threading.Thread(target=start, daemon=True).start()
        assert [ended.get(timeout=60).status for _ in range(40)] == [0] * 40
    finally:
        programs.close()


@contextmanager
def half_a_request(gateway: Gateway, session: Session) -> Iterator[None]:
    where = urlsplit(gateway.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    with socket.create_connection((str(where.hostname), int(where.port or 0))) as begun:
        begun.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        yield


def test_a_request_that_breaks_off_is_nobody_s_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    gateway = Gateway()
    try:
        session = gateway.open(takes_tools=False)
        with half_a_request(gateway, session):
            time.sleep(0.2)  # until it is read; a faster end would only be seen as less
        key = {"Authorization": f"Bearer {session.key}"}
        whole = urllib.request.Request(f"{gateway.url}/models", headers=key)
        assert urllib.request.urlopen(whole).status == 200
    finally:
        gateway.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("way", ["hangs up", "ends"])
def test_a_request_that_has_arrived_is_a_turn_whether_or_not_the_program_waits(way: str) -> None:
    """Else how fast the policy is would decide how many turns a rollout has."""
    seen: list[tuple[str, str]] = []
    with scheduled("leaving", seen=seen) as scheduler:

        def script(request: Request, text: str) -> str:
            seen.append((request.request_id, text))
            [session] = scheduler.factory._gateway._sessions.values()  # type: ignore[attr-defined]
            wait_for(lambda: session.num_requests == 2)
            if way == "hangs up" and len(seen) == 1:
                wait_for(lambda: session._pending[-1]._future.done())
            return "b"

        scheduler.engine = ScriptedEngine(tokenizer=TOKENIZER, script=script, context_length=8192)
        report = scheduler.run([Task(key="t", question="", answers=(way,))], modes=("m",), training_step=0)
    [(leaf, path)] = report.traces[0].rollouts()
    assert leaf.outcome is Outcome.FINISHED and sum(node.trainable for node in path) == 2
    assert "second" in seen[1][1]


def test_half_a_request_holds_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.environments.agent.server._CAUGHT_UP_S", 0.3)
    gateway = Gateway()
    try:
        session = gateway.open(takes_tools=False)
        with half_a_request(gateway, session):
            wait_for(lambda: bool(session._reading))
            gateway.end(session, ProgramExit(reward=None))
            assert isinstance(session.next(60.0), ProgramExit)
    finally:
        gateway.close()


def test_what_a_program_sent_before_its_end_comes_before_it() -> None:
    gateway = Gateway()
    held = threading.Event()
    try:
        session = gateway.open(takes_tools=False)
        gateway._loop.call_soon_threadsafe(held.wait)  # a server that has other things to do
        body = b'{"messages": [{"role": "user", "content": "a"}]}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        where = urlsplit(gateway.url)
        with socket.create_connection((str(where.hostname), int(where.port or 0))) as begun:
            begun.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        gateway.end(session, ProgramExit(reward=None))
        held.set()
        assert isinstance(session.next(30.0), PendingRequest) and isinstance(session.next(30.0), ProgramExit)
    finally:
        held.set()
        gateway.close()


def test_nothing_is_left_behind() -> None:
    with scheduled("hanging", time_limit_s=1.0) as scheduler:
        scheduler.run(ONE, modes=("m",) * 3, training_step=0)
        launcher = scheduler.factory._programs.pid  # type: ignore[attr-defined]
        deadline = time.monotonic() + 30
        while children(launcher) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not children(launcher)
    assert not os.path.exists(f"/proc/{launcher}")


def test_threads_of_an_agent_do_not_outlive_the_trainer() -> None:
    programs = Programs(function="tests.environments.agents.threaded:run", command=(), reward=None)
    launcher = programs._process
    try:
        launcher._sock.shutdown(socket.SHUT_RDWR)  # as the end of the trainer does
        assert launcher._process.wait(60) == 0
    finally:
        launcher._process.kill()
        programs.close()


def test_a_launcher_that_is_killed_is_a_fault_and_another_one_starts() -> None:
    with scheduled("guess", script=halve, max_retries=1) as scheduler:
        launcher = scheduler.factory._programs.pid  # type: ignore[attr-defined]
        killed: list[int] = []

        def script(request: Request, text: str) -> str:
            if not killed:
                killed.append(launcher)
                os.kill(launcher, signal.SIGKILL)
            return halve(request, text)

        scheduler.engine = ScriptedEngine(tokenizer=TOKENIZER, script=script, context_length=8192)
        task = Task(key="t", question="", answers=("7",))
        report = scheduler.run([task], modes=("m",) * 2, training_step=0)
    assert [leaf.outcome for leaf in report.traces[0].leaves.values()] == [Outcome.FINISHED] * 2
    assert report.faults["environment_fault"] == report.faults["retries"] == 2


def wait_for(come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_an_expert_answers_the_program(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "q", "answer": "7"}\n')
    data = DatasetConfig(path=tmp_path / "tasks.jsonl")
    family = AgentTaskSet(AgentConfig(function=f"{PROGRAMS}:guess", expert=f"{PROGRAMS}:halved", train=data))
    [task] = family.tasks("train")
    steps = family.expert(task, 0)
    assert steps is not None and [step.text for step in steps] == ["25", "12", "6", "9", "7"]
    assert steps[-1].is_terminal and not steps[0].is_terminal
    wrong = AgentTaskSet(AgentConfig(function=f"{PROGRAMS}:guess", expert=f"{PROGRAMS}:one", train=data))
    assert wrong.expert(task, 0) is None  # no success
    for one in (family, wrong):
        one.close()
        one.close()


def test_an_agent_that_cannot_be_loaded() -> None:
    with pytest.raises(ToolUnavailable, match="nosuch"):
        AgentFactory(AgentConfig(function="tests.environments.agents.nosuch:run"))
