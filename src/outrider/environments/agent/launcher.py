"""The process that runs agent programs: it imports the agent once and forks a child for every episode.

Requests and reports are JSON lines on the socket at file descriptor 0. When the socket ends, because the
trainer closed it or was killed, every program and what it started is killed.
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
from typing import Any, Final, Literal, NoReturn, TypeAlias

from outrider.environments.base import as_float
from outrider.environments.process_supervisor import STATUS_PREFIX, supervised_command
from outrider.errors import ConfigError, InvalidResult, NonFiniteResult, OutriderError
from outrider.plugins.imports import import_function
from outrider.tools.python import sandbox
from outrider.types import Task

# The functions that a recipe names, and how they are called.


FunctionRole: TypeAlias = Literal["function", "reward", "expert"]
_ARGUMENTS: Final[Mapping[FunctionRole, tuple[str, ...]]] = {
    "function": ("task",),
    "reward": ("task", "result"),
    "expert": ("task", "messages"),
}


def load_function(key: FunctionRole, path: str) -> Callable[..., Any]:
    """The function at ``path``. Raises ConfigError unless it is there and can be called as ``key`` is."""
    function = import_function(path, *_ARGUMENTS[key])
    if key == "expert" and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{path} is a coroutine: an expert is called, and not awaited")
    return function


# What a program came back with, as the JSON text that its launcher is told: some text whatever it is.


def normalize_reward(value: Any) -> Any:
    """A reward as :func:`~outrider.environments.agent.server.read_reward` takes it: a pair of a number and
    a mapping is a reward with its metrics, as many libraries give it.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return {"reward": value[0], "metrics": dict(value[1])}
    return value


def result_to_json(result: Mapping[str, Any]) -> str:
    """``result`` as JSON; where that cannot be, why not, under ``unusable``."""
    try:
        return json.dumps(result, default=_plain)
    except Exception as error:  # somebody else's object may raise anything
        kind = type(result.get("value")).__name__
        return json.dumps(
            {"unusable": f"what came back cannot be written as JSON ({kind}): {one_line_text(error)}"}
        )


def format_error(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {one_line_text(error)}"


def one_line_text(value: object) -> str:
    """The words of an object, such as an exception, in one line."""
    try:
        return " ".join(str(value).split())
    except BaseException:  # what a program wrote is as total as it wants
        return "(it has no words)"


def _plain(value: Any) -> float:
    """A number of NumPy's, PyTorch's or another library's; NaN stands for what is not finite."""
    try:
        return as_float(value, "")
    except NonFiniteResult:
        return math.nan
    except InvalidResult as error:
        raise TypeError(f"{type(value).__name__} is no number") from error


_TAIL_BYTES: Final = 8 << 10  # of what a program prints
_MAX_RESULT: Final = 4 << 20
_POLL_S: Final = 0.2  # how often a child is looked for whose pipe somebody else holds open


class CommandFailed(Exception):
    """A command has ended badly: its last words say why, and no traceback of ours stands behind them."""


@dataclass(slots=True)
class _Child:
    """A program that runs, and what came of it so far."""

    name: int
    pid: int
    result: int  # read ends of its pipes
    output: int
    value: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)


def main(settings_json: str) -> None:
    """Import what the recipe names, say so, and serve. ``settings_json`` is JSON: ``function`` or
    ``command``, and ``reward``.
    """
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and what they start
    settings = json.loads(settings_json)
    try:
        run = _runner(settings)
        reward = load_function("reward", settings["reward"]) if settings["reward"] else None
        if reward is None and settings["command"]:
            reward = _no_reward
    except (OutriderError, Exception, SystemExit) as error:
        _send(sock, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()
    _send(sock, {"ready": True})
    with contextlib.suppress(ConnectionError):
        _Launcher(sock, run, reward).serve()


def _runner(settings: Mapping[str, Any]) -> Callable[[Task], Any]:
    command: Sequence[str] = settings["command"]
    if not command:
        return load_function("function", settings["function"])

    def run(task: Task) -> str:
        """The program's standard output is its answer; the task is its standard input, as JSON."""
        words = [word.replace("{question}", task.question) for word in command]
        fields = {
            "key": task.key,
            "question": task.question,
            "answers": task.answers,
            "metadata": task.metadata,
        }
        return _run_command(words, json.dumps(fields)).strip()

    return run


def _no_reward(task: Task, output: str) -> None:
    """What a command prints is no reward, unless a function reads it: the command posts its reward."""


def _run_command(words: Sequence[str], stdin_text: str) -> str:
    """What a command prints. It runs under a keeper whose input this process holds: the kernel ends this one
    with the launcher, but nothing that a command has started. Raises CommandFailed where it fails.
    """
    status_read, status_write = os.pipe()
    with tempfile.TemporaryFile() as stdin, open(status_read, encoding="utf-8", errors="replace") as line:
        stdin.write(stdin_text.encode())
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
    return output.decode("utf-8", "replace")


class _Launcher:
    """One thread, which waits for requests, for what programs print, and for their ends."""

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
        """Until the socket ends."""
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
        result, result_end = os.pipe()
        output, output_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_inherited()
                os.close(result)
                _run_child(request, result_end, output_end, self._run, self._reward)
            finally:  # what ran up from here would end in this copy of serve(), which kills every sibling
                os._exit(1)
        os.close(result_end)
        os.close(output_end)
        child = _Child(request["name"], pid, result, output)
        self._children[child.name] = child
        for pipe in (result, output):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def _close_inherited(self) -> None:
        """In a child: close what is the launcher's."""
        self._sock.close()
        self._selector.close()
        for child in self._children.values():
            os.close(child.result)
            os.close(child.output)

    def _read_pipe(self, child: _Child, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, 1 << 16)
            if not data:
                self._selector.unregister(pipe)
            elif pipe == child.result:
                child.value += data
                if len(child.value) > _MAX_RESULT:
                    _kill(child.pid)
            else:
                child.tail = (child.tail + data)[-_TAIL_BYTES:]

    def _reap(self, child: _Child) -> None:
        """Report a child that has ended, and end what it left behind."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return
        _kill_rest(child.pid)
        for pipe in (child.result, child.output):
            for _ in range(64):  # what is still in the pipe
                if pipe not in self._selector.get_map():
                    break
                self._read_pipe(child, pipe)
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            os.close(pipe)
        del self._children[child.name]
        _send(self._sock, {
            "name": child.name,
            "status": os.waitstatus_to_exitcode(status),
            "result": child.value.decode("utf-8", "replace") if len(child.value) <= _MAX_RESULT else "",
            "tail": child.tail.decode("utf-8", "replace"),
        })  # fmt: skip


def _run_child(
    request: Mapping[str, Any],
    result: int,
    output: int,
    run: Callable[[Task], Any],
    reward: Callable[..., Any] | None,
) -> NoReturn:
    """In the child: run the program, write what came of it, end."""
    status = 1
    try:
        os.setsid()
        sandbox.die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["environment"])
        for name in ("no_proxy", "NO_PROXY"):  # the endpoint is on this machine, whatever leads out of it
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        fields = request["task"]
        task = Task(**{**fields, "answers": tuple(fields["answers"])})
        value = _call(run, task)
        outcome: dict[str, Any] = {
            "value": normalize_reward(value if reward is None else _call(reward, task, value))
        }
        status = 0
    except SystemExit as error:
        status = error.code & 0xFF if isinstance(error.code, int) else 1 if error.code else 0
        suffix = "" if isinstance(error.code, int) else f": {one_line_text(error.code)}"
        outcome = {"error": f"it exited with status {status}{suffix}"} if status else {"value": None}
    except CommandFailed as error:
        outcome = {"failed": one_line_text(error)}
    except BaseException as error:
        with contextlib.suppress(BaseException):  # it may have closed its standard error
            traceback.print_exc()
        outcome = {"error": format_error(error)}
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError), open(result, "wb") as pipe:
        pipe.write(result_to_json(outcome).encode())
    os._exit(status)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    value = function(*args)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _kill(pid: int) -> None:
    """A program with all that it started and left in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.kill(pid, signal.SIGKILL)


def _kill_rest(pid: int) -> None:
    """What a program that has ended left in its group; nobody can have taken its number meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _send(sock: socket.socket, value: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")
