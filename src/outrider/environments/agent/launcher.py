"""The process that runs agent programs: it imports the agent once and forks a child for every episode.

Requests and reports are JSON lines on the socket at file descriptor 0. When the socket ends, because the
trainer closed it or was killed, every program and its children are killed.
"""

import asyncio
import contextlib
import gc
import inspect
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeAlias

from outrider.environments.base import as_float
from outrider.environments.process_supervisor import STATUS_PREFIX, supervised_command
from outrider.errors import ConfigError, InvalidResult, NonFiniteResult, OutriderError, unwrap_group
from outrider.plugins.imports import describe_exception, import_function
from outrider.tools.python import sandbox
from outrider.types import Task

FunctionRole: TypeAlias = Literal["function", "reward", "expert"]
_ARGUMENTS: Final[Mapping[FunctionRole, tuple[str, ...]]] = {
    "function": ("task",),
    "reward": ("task", "result"),
    "expert": ("task", "messages"),
}
ENDPOINT_VARIABLES: Final = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY")
"""Variables with which a program finds the policy. LlamaIndex reads ``OPENAI_API_BASE`` alone, and LangChain
prefers it.
"""
_TAIL_BYTES: Final = 8 << 10  # of a program's output
_MAX_RESULT: Final = 4 << 20
_POLL_S: Final = 0.2  # between checks for the end of children whose pipe another process has open


def load_function(key: FunctionRole, path: str) -> Callable[..., Any]:
    """Import the function of a setting. Raises ConfigError unless it can be called with the setting's
    arguments.
    """
    function = import_function(path, *_ARGUMENTS[key])
    if key == "expert" and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{path} is a coroutine function; define the expert with def")
    return function


class CommandFailed(Exception):
    """A command ended with an error. The text explains it, so no traceback is printed."""


class _RewardFailed(Exception):
    """The reward function raised an exception, which is no failure of the program."""


@dataclass(slots=True)
class _Child:
    """A running program, and its result and output so far."""

    name: int
    pid: int
    result_pipe: int  # read ends
    output_pipe: int
    result: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)


def main(settings_json: str) -> None:
    """Import the agent, report that it is ready, and serve.

    ``settings_json`` is a JSON object with ``function`` or ``command``, and ``reward``.
    """
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers and their children block SIGINT
    settings = json.loads(settings_json)
    command: Sequence[str] = settings["command"]
    try:
        run = partial(_run_command, command) if command else load_function("function", settings["function"])
        reward = load_function("reward", settings["reward"]) if settings["reward"] else None
    except (OutriderError, Exception, SystemExit) as error:
        _send(sock, {"failed": f"{type(error).__name__}: {error}"})
        return
    if command and reward is None:  # the output of a command is no reward: the command posts it
        reward = lambda task, output: None  # noqa: E731
    gc.collect()
    gc.freeze()
    _send(sock, {"ready": True})
    with contextlib.suppress(ConnectionError):
        _Launcher(sock, run, reward).serve()


def _run_command(command: Sequence[str], task: Task) -> str:
    """Run a command with the task as JSON on its standard input, and return its standard output.

    A supervisor ends it and its children with this process: the kernel would only end this process itself.
    Raises CommandFailed.
    """
    words = [word.replace("{question}", task.question) for word in command]
    fields = {name: getattr(task, name) for name in ("key", "question", "answers", "metadata")}
    status_read, status_write = os.pipe()
    with tempfile.TemporaryFile() as stdin, open(status_read, encoding="utf-8", errors="replace") as line:
        stdin.write(json.dumps(fields).encode())
        stdin.seek(0)
        with subprocess.Popen(
            supervised_command(words, stdin_fd=stdin.fileno(), status_fd=status_write),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(stdin.fileno(), status_write),
            start_new_session=True,
        ) as process:
            os.close(status_write)
            output = process.stdout.read() if process.stdout is not None else b""
            status = line.read().strip() or f"{words[0]} was killed"
    if not status.endswith(f"{STATUS_PREFIX}0"):
        raise CommandFailed(status)
    return output.decode("utf-8", "replace").strip()


class _Launcher:
    """One thread that waits for requests, the output of programs, and their ends."""

    def __init__(
        self, sock: socket.socket, run: Callable[[Task], Any], reward: Callable[..., Any] | None
    ) -> None:
        self._sock = sock
        self._run = run
        self._reward = reward
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._lines = bytearray()

    def serve(self) -> None:
        """Serve until the socket ends."""
        try:
            while self._poll():
                pass
        finally:
            for child in self._children.values():
                _kill(child.pid)

    def _poll(self) -> bool:
        for key, _ in self._selector.select(_POLL_S if self._children else None):
            if key.fileobj is self._sock:
                if not self._read_requests():
                    return False
            else:
                self._read_pipe(key.data, int(key.fd))
        for child in list(self._children.values()):
            self._reap(child)
        return True

    def _read_requests(self) -> bool:
        data = self._sock.recv(1 << 16)
        self._lines += data
        while (end := self._lines.find(b"\n")) >= 0:
            request = json.loads(self._lines[:end])
            del self._lines[: end + 1]
            if "kill" not in request:
                self._start(request)
            elif request["kill"] in self._children:
                _kill(self._children[request["kill"]].pid)
        return bool(data)

    def _start(self, request: Mapping[str, Any]) -> None:
        result_pipe, result_end = os.pipe()
        output_pipe, output_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._sock.close()
                self._selector.close()
                os.close(result_pipe)
                for sibling in self._children.values():
                    os.close(sibling.result_pipe)
                    os.close(sibling.output_pipe)
                _run_child(request, result_end, output_end, self._run, self._reward)
            finally:  # an exception would otherwise end in this copy of serve(), which kills all siblings
                os._exit(1)
        os.close(result_end)
        os.close(output_end)
        child = self._children[request["name"]] = _Child(request["name"], pid, result_pipe, output_pipe)
        for pipe in (result_pipe, output_pipe):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def _read_pipe(self, child: _Child, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, 1 << 16)
            if not data:
                self._selector.unregister(pipe)
            elif pipe == child.result_pipe:
                child.result += data
                if len(child.result) > _MAX_RESULT:
                    _kill(child.pid)
            else:
                child.tail = (child.tail + data)[-_TAIL_BYTES:]

    def _reap(self, child: _Child) -> None:
        """If a child has ended, kill what it left in its process group, and report its end."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.result_pipe, child.output_pipe):
            for _ in range(64):  # the rest of the pipe
                if pipe not in self._selector.get_map():
                    break
                self._read_pipe(child, pipe)
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            os.close(pipe)
        del self._children[child.name]
        is_too_long = len(child.result) > _MAX_RESULT
        _send(self._sock, {
            "name": child.name,
            "status": os.waitstatus_to_exitcode(status),
            "result": "" if is_too_long else child.result.decode("utf-8", "replace"),
            "tail": child.tail.decode("utf-8", "replace"),
        })  # fmt: skip


def _run_child(
    request: Mapping[str, Any],
    result: int,
    output: int,
    run: Callable[[Task], Any],
    reward: Callable[..., Any] | None,
) -> NoReturn:
    """In the child: run the program, write its result to the pipe, exit."""
    status = 1
    try:
        os.setsid()
        sandbox.die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["environment"])
        for name in ("no_proxy", "NO_PROXY"):  # the endpoint is on this machine
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        fields = request["task"]
        task = Task(**{**fields, "answers": tuple(fields["answers"])})
        value = _call(run, task)
        if reward is not None:
            for name in ENDPOINT_VARIABLES:  # a judge that the function asks is not the policy
                os.environ.pop(name, None)
            try:
                value = _call(reward, task, value)
            except (Exception, SystemExit) as error:
                with contextlib.suppress(BaseException):  # the program may have closed its standard error
                    traceback.print_exc()
                raise _RewardFailed(describe_exception(unwrap_group(error))) from error
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            value = {"reward": value[0], "metrics": dict(value[1])}  # the pair that many libraries return
        outcome: dict[str, Any] = {"value": value}
        status = 0
    except SystemExit as error:
        status = error.code & 0xFF if isinstance(error.code, int) else 1 if error.code else 0
        suffix = "" if isinstance(error.code, int) else f": {_one_line(error.code)}"
        outcome = {"error": f"it exited with status {status}{suffix}"} if status else {"value": None}
    except CommandFailed as error:
        outcome = {"failed": _one_line(error)}
    except _RewardFailed as error:
        outcome = {"fault": f"the reward function{error}"}
    except BaseException as raised:
        with contextlib.suppress(BaseException):  # it may have closed its standard error
            traceback.print_exc()
        cause = unwrap_group(raised)
        outcome = {"error": f"{type(cause).__name__}: {_one_line(cause)}"}
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError), open(result, "wb") as pipe:
        pipe.write(_outcome_json(outcome).encode())
    os._exit(status)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    value = function(*args)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _outcome_json(outcome: Mapping[str, Any]) -> str:
    """The outcome as JSON; if that is not possible, the reason under ``unusable``."""
    try:
        return json.dumps(outcome, default=_plain_number)
    except Exception as error:  # a user's object may raise anything
        kind = type(outcome.get("value")).__name__
        return json.dumps(
            {"unusable": f"what came back cannot be written as JSON ({kind}): {_one_line(error)}"}
        )


def _plain_number(value: Any) -> float:
    """Convert a number of NumPy, PyTorch or another library; NaN stands for NaN and infinity."""
    try:
        return as_float(value, "")
    except NonFiniteResult:
        return math.nan
    except InvalidResult as error:
        raise TypeError(f"{type(value).__name__} is no number") from error


def _one_line(value: object) -> str:
    try:
        return " ".join(str(value).split())
    except BaseException:  # a user's __str__ may raise anything
        return "(no text)"


def _kill(pid: int) -> None:
    """Kill a program and its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):  # it has no process group of its own yet
            os.kill(pid, signal.SIGKILL)


def _send(sock: socket.socket, value: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")
