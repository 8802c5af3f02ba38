"""A ScienceWorld simulator in a Java process, over Py4J's wire protocol.

Py4J's own client is not used: it logs stack traces to the root logger when the process dies, and has one
time-out for all calls. The code relies on these facts (ScienceWorld 1.2.3, Py4J 0.10.9, Java 17):

* The simulator prints to standard output; if the pipe is full, ``load`` hangs. So the pipe is drained.
* Its random draws are seeded by the variation, but its object sets are ordered by identity hash. With a
  constant hash (``-XX:hashCode=2``) every task replays identically, also in a new process, at no measured
  cost (3 to 10 ms per step either way). Otherwise the order of a room's contents, and with it the result of
  draws, changes between two loads. * ``load`` returns an empty text on success, else a text that starts with
  ERROR.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.environments.process_supervisor import drain_output
from outrider.errors import EnvironmentFault
from outrider.files import FileLock

if TYPE_CHECKING:
    from outrider.environments.scienceworld.environment import ScienceWorldConfig

_PREFIX: Final = "scienceworld-"  # of temporary folders
_LOCK: Final = ".owner"
_FIXED_ORDER: Final = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
_ESCAPES: Final = {"n": "\n", "r": "\r", "\\": "\\"}
_ESCAPED: Final = re.compile(r"\\([nr\\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The start of an episode. ``action_templates`` are, for example, ``open OBJ``."""

    task_text: str
    observation: str
    action_templates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The state after an action: ``score`` from -100 to 100; ``num_moves`` since the start, where an action
    may count several times.
    """

    observation: str
    score: int
    completed: bool
    num_moves: int


class JavaSimulator:
    """A simulator in its own Java process. A lock allows one request at a time.

    Every method raises EnvironmentFault if the process died or stalled.

    ``port`` is the process's loopback port. A connection needs a secret that the process prints to its
    standard output.
    """

    def __init__(self, java: str, class_path: str, settings: "ScienceWorldConfig") -> None:
        """Start the process (0.8 to 2.1 s). Raises EnvironmentFault with Java's last output if it fails."""
        self._settings = settings
        self._lock = threading.Lock()
        # The simulator writes a list of object types into its working directory.
        self._directory = SimulatorFolder()
        self._process = _spawn(java, class_path, settings, self._directory.name)
        self._last_lines: deque[bytes] = deque(maxlen=20)
        self._errors = drain_output(self._process.stderr, self._last_lines)
        self._connection: socket.socket | None = None
        self._pending = b""
        try:
            self.port, token = self._handshake()
            limit = settings.start_limit_s
            self._connection = socket.create_connection(("127.0.0.1", self.port), timeout=limit)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._request(f"A\n{token}\n", limit)
            self._server = self._request("i\nscienceworld.runtime.pythonapi.PythonInterface\ne\n", limit)
        except (OSError, ValueError) as error:
            raise self._fault(f"did not start: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the Java process."""
        return self._process.pid

    def load(self, *, task_name: str, variation: int, simplification: str) -> Opening:
        """Start an episode. In deterministic mode, equal arguments give an equal episode."""
        self._load(task_name, variation, simplification, with_gold=False)
        return Opening(
            task_text=self._call("getTaskDescription"),
            observation=self._call("step", "look around"),
            action_templates=self._strings(self._call("getPossibleActions")),
        )

    def act(self, action: str) -> Reply:
        observation = self._call("step", action)
        return Reply(
            observation=observation,
            score=round(100 * float(self._call("getScore"))),  # as in the published wrapper
            completed=self._call("getCompleted") == "true",
            num_moves=int(self._call("getNumMoves")),
        )

    def valid_actions(self) -> tuple[str, ...]:
        """All actions that the simulator would understand now (200 to 1,400; 20 to 80 ms)."""
        listing = json.loads(self._call("getValidActionObjectCombinationsJSON"))
        return tuple(str(entry["action"]) for entry in listing["validActions"])

    def objects(self) -> tuple[str, ...]:
        """Names of the objects that commands can refer to now."""
        return self._strings(self._call("getPossibleObjects"))

    def gold_actions(self, *, task_name: str, variation: int, simplification: str) -> tuple[str, ...]:
        """A winning action sequence for the episode that ``load`` starts with the same arguments (0.1 to 8
        s).
        """
        self._load(task_name, variation, simplification, with_gold=True)
        return self._strings(self._call("getGoldActionSequence"))

    def num_variations(self, task_name: str) -> int:
        return int(self._call("getTaskMaxVariations", task_name))

    def is_alive(self) -> bool:
        return self._connection is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the process and wait for it. Takes no lock, so that it ends a call that hangs in another
        thread.
        """
        connection, self._connection = self._connection, None
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if connection is not None:
            connection.close()
        self._directory.cleanup()

    def _load(self, task_name: str, variation: int, simplification: str, *, with_gold: bool) -> None:
        limit = self._settings.load_limit_s
        answer = self._call("load", task_name, variation, simplification, with_gold, limit_s=limit)
        if answer:
            raise self._fault(f"cannot load {task_name} variation {variation}: {answer}")

    def _strings(self, reference: str) -> tuple[str, ...]:
        """Read a Java list of texts and release it; it would stay in the heap until the process ends."""
        num_entries = int(self._call("size", target=reference))
        entries = tuple(self._call("get", index, target=reference) for index in range(num_entries))
        self._request(f"m\nd\n{reference}\ne\n", self._settings.step_limit_s)
        return entries

    def _call(
        self,
        method: str,
        *arguments: str | int | bool,
        target: str | None = None,
        limit_s: float | None = None,
    ) -> str:
        encoded = "".join(_encode(argument) + "\n" for argument in arguments)
        return self._request(
            f"c\n{target or self._server}\n{method}\n{encoded}e\n", limit_s or self._settings.step_limit_s
        )

    def _request(self, command: str, limit_s: float) -> str:
        with self._lock:
            if self._connection is None:
                raise EnvironmentFault("the ScienceWorld simulator was closed")
            try:
                self._connection.settimeout(limit_s)
                self._connection.sendall(command.encode("utf-8"))
                line = self._read_line(self._connection)
            except TimeoutError as error:
                raise self._fault(f"stalled longer than {limit_s:g} s") from error
            except (OSError, EOFError) as error:
                raise self._fault("died") from error
        if not line.startswith("!y"):
            raise self._fault(f"answered with an error: {_unescape(line)[:500]}")
        # A type letter, then a text with escapes, a number, ``true`` or an object name; empty for nothing.
        return _unescape(line[3:]) if line[2:3] == "s" else line[3:]

    def _read_line(self, connection: socket.socket) -> str:
        while b"\n" not in self._pending:
            chunk = connection.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode("utf-8")

    def _handshake(self) -> tuple[int, str]:
        """Read the port and the secret that the process prints first, then discard its output."""
        output = self._process.stdout
        if output is None:
            raise ValueError("no output pipe")
        watchdog = threading.Timer(self._settings.start_limit_s, self._process.kill)
        watchdog.start()
        try:
            port, token = int(output.readline()), output.readline().decode("ascii").strip()
        finally:
            watchdog.cancel()
        drain_output(output, deque(maxlen=0))
        return port, token

    def _fault(self, problem: str) -> EnvironmentFault:
        """Kill the process and return the error, with the process's last output."""
        self.close()
        self._errors.join(timeout=1.0)
        words = b"".join(self._last_lines).decode("utf-8", "replace").strip()
        return EnvironmentFault(
            f"the ScienceWorld simulator {problem}" + (f" ({words[-500:]})" if words else "")
        )


def _spawn(
    java: str, class_path: str, settings: "ScienceWorldConfig", directory: str
) -> subprocess.Popen[bytes]:
    """Start Java on a free loopback port with a secret; it exits when its standard input is closed."""
    options = _FIXED_ORDER if settings.deterministic else ()
    command: Sequence[str] = (
        java, f"-Xmx{settings.heap}", *options, "-classpath", class_path,
        "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0",
    )  # fmt: skip
    try:
        # In its own session: an interrupt at the terminal must reach only the trainer, which closes its
        # simulators itself.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFault(f"cannot start {java}: {error}") from error


def _encode(argument: str | int | bool) -> str:
    """An argument in Py4J's wire format: a type letter and the value on one line."""
    if isinstance(argument, str):
        return "s" + argument.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
    if isinstance(argument, bool):
        return f"b{argument}"
    return f"i{argument}"


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: _ESCAPES[match.group(1)], text)


class SimulatorPool:
    """Up to ``num_workers`` simulators, started when first needed and replaced when dead. Thread-safe.

    ``num_starts`` counts started simulators, and ``num_replaced`` those of them that replaced a dead one.
    """

    def __init__(self, *, start: Callable[[], Any], num_workers: int, borrow_limit_s: float) -> None:
        """``start`` makes a :class:`JavaSimulator` (tests substitute it). ``borrow_limit_s`` limits the wait
        for a free simulator.
        """
        self._start = start
        self._borrow_limit_s = borrow_limit_s
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._running: list[JavaSimulator] = []
        self._num_closings = 0
        # Last in, first out, so that a started simulator is preferred to starting another one (None).
        self._free: queue.LifoQueue[JavaSimulator | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._free.put(None)
        self.num_starts = 0
        self.num_replaced = 0

    def borrow(self) -> JavaSimulator:
        """A live simulator for one episode. Raises EnvironmentFault if none is free or none starts."""
        try:
            simulator = self._free.get(timeout=self._borrow_limit_s)
        except queue.Empty:
            raise EnvironmentFault(
                f"no free ScienceWorld simulator within {self._borrow_limit_s:g} s: all {self._num_workers} "
                "are on loan (raise num_workers, lower the rollout concurrency, "
                "or close finished environments)"
            ) from None
        if simulator is not None and simulator.is_alive():
            return simulator
        try:
            return self._start_another(simulator)
        except BaseException:
            self._free.put(simulator)
            raise

    def release(self, simulator: JavaSimulator) -> None:
        """Return a borrowed simulator, dead or alive; call it once per loan."""
        if not simulator.is_alive():
            simulator.close()
        self._free.put(simulator)

    def close(self) -> None:
        """Kill every simulator, also those on loan (their episodes end in a fault). May be called twice."""
        with self._lock:
            running, self._running = self._running, []
            self._num_closings += 1
        for simulator in running:
            simulator.close()

    def _start_another(self, dead: JavaSimulator | None) -> JavaSimulator:
        num_closings = self._num_closings
        if dead is not None:
            dead.close()
        started: JavaSimulator = self._start()
        with self._lock:
            self.num_starts += 1
            self.num_replaced += dead is not None
            if num_closings == self._num_closings:
                self._running = [*(other for other in self._running if other is not dead), started]
                return started
        started.close()
        raise EnvironmentFault("the ScienceWorld pool was closed while a simulator started")


class SimulatorFolder:
    """A new temporary folder; those of dead owners are removed first.

    SIGKILL runs no clean-up. The owner keeps a file in the folder locked, and the kernel releases the lock
    however the owner dies, so that a later process can tell whether a folder is still in use.
    """

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.name = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock: FileLock | None = FileLock(Path(self.name, _LOCK), mode=0o600, waits=True)

    def cleanup(self) -> None:
        """Remove the folder; may be called twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            shutil.rmtree(self.name, ignore_errors=True)
            lock.release()


def remove_abandoned(parent: Path) -> int:
    """Remove this user's folders whose owners are dead, and return their number. A folder without a lock file
    is skipped, because its owner may be about to create it.
    """
    num = 0
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # of another user, in use, or removed at this moment
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with FileLock(folder / _LOCK, flags=os.O_RDWR):
                shutil.rmtree(folder)
                num += 1
    return num
