"""A process that plays episodes for the trainer: requests and reports are JSON lines on its descriptor 0."""

import contextlib
import itertools
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from outrider.errors import EnvironmentFault, ToolUnavailable
from outrider.types import Task

_NUMBERS: Final = itertools.count(1)  # unique in the trainer: a process may take the place of another one
_MAX_PROCESSES: Final = 8  # of a run; an agent that kills its own launcher would do so for ever
_DRAIN_S: Final = 1.0  # for the last words of a process that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a program ended: its exit status (negative: a signal), what it came back with as JSON text, and the
    end of what it printed.
    """

    status: int
    result: str
    tail: str


OnEnd = Callable[[Report], None]


class ProgramRunner(Protocol):
    """Whoever starts the programs that ask the policy. Called from several threads."""

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        """Start a program; its number. ``environment`` says where the policy is and under which key, in
        OpenAI's variables. ``on_end`` is called once. Raises EnvironmentFault where nothing can be started.
        """
        ...

    def kill(self, number: int) -> None:
        """End a program and what it started; one that has ended is none."""
        ...

    def close(self) -> None:
        """End all of it. May be called twice."""
        ...


class Launched:
    """The process, which first says that it is ready, or why not."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        what: str,
        start_s: float,
        first: Mapping[str, Any] | None = None,
        is_quiet: bool = False,
    ) -> None:
        """Start it, send it ``first``, and wait ``start_s`` seconds at most until it is ready. ``what`` names
        it in messages. Of what a quiet one writes to its standard error only the last line is told, and only
        when it dies. Raises ToolUnavailable.
        """
        self._what = what
        self._last_words = b""
        self._lock = threading.Lock()  # never held while something is sent, or nobody would read meanwhile
        self._sending = threading.Lock()
        self._waiting: dict[int, OnEnd] = {}
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = self._started(command, environment, theirs, is_quiet=is_quiet)
        self._lines = self._sock.makefile("rb")
        self._drain = threading.Thread(target=self._keep_last_words, daemon=True, name=f"outrider {what}")
        self._drain.start()
        self.said = self._greeted(start_s, first)
        if "failed" in self.said:
            self.close()
            raise ToolUnavailable(f"{what} cannot be loaded: {self.said['failed']}")
        self._sock.settimeout(None)
        self.is_over = False
        """Whether it is gone; nothing can be started in it."""
        threading.Thread(target=self._hear, daemon=True, name=f"outrider {what}").start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can start programs."""
        return not self.is_over and self._process.poll() is None

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], end: socket.socket, *, is_quiet: bool
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if is_quiet else None,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the trainer, which then stops the programs
            )
        except OSError as error:
            self._sock.close()
            raise ToolUnavailable(f"{self._what} cannot be started: {error}") from error

    def _greeted(self, start_s: float, first: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """What the process says first; ``failed`` where it is not ready."""
        self._sock.settimeout(start_s)
        try:
            if first is not None:
                self._say(first)
            said: Mapping[str, Any] = json.loads(self._lines.readline() or b"{}")
        except TimeoutError:
            return {"failed": f"it was not ready after {start_s:g} s"}
        except (OSError, ValueError, EnvironmentFault) as error:
            return {"failed": str(error)}
        if not said:
            self._drain.join(_DRAIN_S)
            return {"failed": f"its process ended{self._in_its_words()}"}
        return said

    def begin(self, request: Mapping[str, Any], on_end: OnEnd) -> int:
        """Start an episode; its number. ``on_end`` is called once. Raises EnvironmentFault where the process
        is gone.
        """
        number = next(_NUMBERS)
        with self._lock:
            if self.is_over:
                raise EnvironmentFault(self._gone())
            self._waiting[number] = on_end
        try:
            self._say({"name": number, **request})
        except EnvironmentFault:
            with self._lock:
                is_told = self._waiting.pop(number, None) is None
            if not is_told:
                raise
        return number

    def kill(self, number: int) -> None:
        """End an episode and what it started; one that has ended is none."""
        with self._lock:
            if number not in self._waiting:
                return
        with contextlib.suppress(EnvironmentFault):  # gone with its process
            self._say({"kill": number})

    def close(self) -> None:
        """End all of it. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the process then ends every episode
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._drain.join(_DRAIN_S)
            self._process.stderr.close()

    def _gone(self) -> str:
        return f"the process of {self._what} is gone{self._in_its_words()}"

    def _in_its_words(self) -> str:
        words = " ".join(self._last_words.decode("utf-8", "replace").split())[-200:]
        return f" ({words})" if words else ""

    def _keep_last_words(self) -> None:
        errors = self._process.stderr
        with contextlib.suppress(OSError, ValueError):
            for line in iter(lambda: errors.readline(1 << 12), b"") if errors is not None else ():
                self._last_words = line if line.strip() else self._last_words

    def _say(self, value: Mapping[str, Any]) -> None:
        try:
            with self._sending:
                self._sock.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise EnvironmentFault(f"{self._gone()}: {error}") from error

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                said = json.loads(line)
                with self._lock:
                    on_end = self._waiting.pop(said.pop("name"), None)
                if on_end is not None:
                    on_end(Report(**said))
        self._drain.join(_DRAIN_S)
        with self._lock:
            self.is_over = True
            waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(Report(status=-9, result=json.dumps({"fault": self._gone()}), tail=""))


class Relaunched:
    """Such a process, and another one where it is gone. Called from several threads."""

    def __init__(self, launch: Callable[[], Launched]) -> None:
        """Start it. Raises ToolUnavailable."""
        self._launch = launch
        self._lock = threading.Lock()
        self._num_processes = 1
        self._is_closed = False
        self._process = launch()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def begin(self, request: Mapping[str, Any], on_end: OnEnd) -> int:
        """Start an episode; its number. ``on_end`` is called once. Raises EnvironmentFault where that cannot
        be.
        """
        return self._living().begin(request, on_end)

    def kill(self, number: int) -> None:
        """End an episode and what it started; one that has ended is none."""
        self._process.kill(number)

    def close(self) -> None:
        """End all of it. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._process.close()

    def _living(self) -> Launched:
        with self._lock:
            if not (self._process.is_alive or self._is_closed or self._num_processes == _MAX_PROCESSES):
                self._process.close()
                self._num_processes += 1
                try:
                    self._process = self._launch()
                except ToolUnavailable as error:
                    raise EnvironmentFault(str(error)) from error
            return self._process
