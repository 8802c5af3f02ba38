"""Processes of a run: their start, calls between them, and their limits.

A process runs a :class:`Server` around one object; a :class:`Process` is its handle, which can be pickled and
calls the object from any process. On one machine, processes are forked from a fork server that has imported
torch before. On several machines, Ray places them (:mod:`outrider.distributed.nodes`). Calls are the same.

A process that dies fails its pending calls at once, because its sockets close. A process that does not
respond is found by :meth:`Cluster.check`, by progress and not by a deadline: the only place with such limits.
"""

import asyncio
import ctypes
import fcntl
import inspect
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, Literal

import numpy as np

from outrider.errors import ClusterFault, OutriderError, ProcessLost
from outrider.rollout.hooks import RolloutStatus
from outrider.training.settings import ClusterSettings, RunSettings

AGAIN: Final = "continue from the newest checkpoint with --resume (resume= in Python)"
TICK_S: Final = 0.5  # the longest time that a signal has to wait
_BETWEEN_BEATS_S: Final = 1.0
_BUSY_SHARE: Final = 0.05  # of one processor
_PREFIX: Final = "outrider-"
_LOCK: Final = "lock"
_PARENT_BYTES: Final = 70
SHARED_MEMORY: Final = Path("/dev/shm")
_BEAT: Final = "__beat__"
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_NAME: Final = 15
_END_S: Final = 10.0
_START_S: Final = 600.0  # importing torch from a slow disk takes minutes
_MAX_THREADS: Final = 1024  # concurrent calls of one process
_PRELOADED: Final = (
    "outrider.distributed.learner", "outrider.distributed.engines", "outrider.distributed.rollouts"
)  # fmt: skip

Address = str | tuple[str, int]
Kind = Literal["ranks", "rollouts"]
Place = tuple[Literal["rank", "engine", "worker"], int]


# --- In the process that is called ---


class Progress:
    """What this process does: a counter that moves with its work, and the location of its rollouts.

    ``num_pending`` is the number of running calls, ``changed`` the time at which the counter moved or the
    first of them began.
    """

    def __init__(self) -> None:
        self.count = self.num_pending = 0
        self.changed = 0.0
        self.location: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()

    def advance(self, num: int = 1) -> None:
        """Count work, for example tokens of an engine or micro-batches of a rank."""
        self.count += num
        self.changed = time.monotonic()

    def begin_call(self) -> None:
        with self._lock:
            if not self.num_pending:
                self.changed = time.monotonic()
            self.num_pending += 1

    def end_call(self) -> None:
        with self._lock:
            self.num_pending -= 1

    def beat(self) -> tuple[int, float, str | None]:
        """Return the answer to a heartbeat: the counter, the seconds without progress, and the location."""
        stalled_s = time.monotonic() - self.changed if self.num_pending else 0.0
        return self.count, stalled_s, self.location()


PROGRESS: Final = Progress()


class SharedRolloutStatus(RolloutStatus):
    """Also writes the newest location to a file, because a process in a call that holds the interpreter's
    lock cannot respond.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)

    def set(self, rollout: str, location: str) -> None:
        super().set(rollout, location)
        PROGRESS.advance()
        line = f"{rollout}: {location}".encode("utf-8", "replace")[:_LOCATION_BYTES]
        os.pwrite(self._file.fileno(), line.ljust(_LOCATION_BYTES, b"\0"), 0)


_LOCATION_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A process to start: an object of class ``target`` (``module:Class``) with ``arguments`` (pickled),
    which listens at ``address``.
    """

    name: str
    target: str
    arguments: bytes
    address: Address
    key: bytes
    folder: str
    environ: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Answers calls of an object's methods. Coroutines run in one event loop, other methods in threads."""

    def __init__(self, spec: Spec) -> None:
        os.environ.update(spec.environ)
        self._spec = spec
        self._target: Any = None
        self._listener = Listener(spec.address, backlog=128)
        self.address: Address = self._listener.address
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="call")
        self._building = threading.Lock()

    def run(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except Exception:  # a client that ended meanwhile
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        lock = threading.Lock()
        try:
            deliver_challenge(connection, self._spec.key)
            answer_challenge(connection, self._spec.key)
        except Exception:  # a client that ended meanwhile, or has another key
            connection.close()
            return
        _keep_alive(connection, self.address)
        while True:
            try:
                number, method, payload = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            reply = partial(self._reply, connection, lock, number, method)
            if method == _BEAT:  # in this thread: all others may be occupied
                done: Future[Any] = Future()
                done.set_result(PROGRESS.beat())
                reply(done)
                continue
            PROGRESS.begin_call()
            self._threads.submit(self._call, method, payload).add_done_callback(reply)

    def _call(self, method: str, payload: bytes) -> Any:
        with self._building:
            if self._target is None:
                module, _, name = self._spec.target.partition(":")
                self._target = getattr(import_module(module), name)(*pickle.loads(self._spec.arguments))
        function, arguments = getattr(self._target, method), pickle.loads(payload)
        if inspect.iscoroutinefunction(function):
            return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)
        return function(*arguments)

    def _reply(
        self, connection: Connection, lock: threading.Lock, number: int, method: str, done: Future[Any]
    ) -> None:
        try:
            result = done.result()
            if isinstance(result, Future):  # of a coroutine, which occupies no thread
                result.add_done_callback(partial(self._reply, connection, lock, number, method))
                return
            data = pickle.dumps((number, True, pickle.dumps(result)))
        except BaseException as error:  # also SystemExit of a user's function
            data = pickle.dumps((number, False, pickle.dumps(self._portable(error, method))))
        if method != _BEAT:
            PROGRESS.end_call()
        with lock, suppress(OSError):  # the caller may have ended
            connection.send_bytes(data)

    def _portable(self, error: BaseException, method: str) -> Exception:
        """Return an OutriderError as it is if it can be pickled, and a ClusterFault for any other error."""
        if isinstance(error, OutriderError):
            with suppress(Exception):
                pickle.loads(pickle.dumps(error))
                return error
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return ClusterFault(
            f"{self._spec.name} broke in {method}: {type(error).__name__}: {reason[:300]}; {AGAIN}"
        )


def _run_forked(spec: Spec, parent: int) -> None:
    """The main function of a forked process. It ends with the fork server, and that ends with the run."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, spec.name.removeprefix("rollout ").encode())  # at most 15 bytes, for ps and top
    if os.getppid() != parent:
        os._exit(1)
    output = os.open(log_path(spec.folder, spec.name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    np.random.seed()  # otherwise all forks have the same state
    Server(spec).run()


def run_fork_server(descriptor: int, folder: str) -> None:
    """Import what all processes need, then fork one for each request, until the run ends or is killed; then
    remove its files.
    """
    control = Connection(descriptor)
    # A job's end may send SIGTERM to all processes; the run stops them after its last checkpoint. Programs
    # that a process starts have the default action.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    for module in _PRELOADED:
        import_module(module)
    while True:
        try:
            request = control.recv()
        except (EOFError, OSError):
            _remove(Path(folder))
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass
        server = os.getpid()
        pid = os.fork()
        if not pid:
            control.close()
            try:
                _run_forked(request, server)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        control.send(pid)


def log_path(folder: str | Path, name: str) -> Path:
    """Return the file with the output of a process."""
    return Path(folder) / f"{name.replace(' ', '-')}.log"


def location_path(folder: str | Path, name: str) -> Path:
    """Return the file with the newest location of the rollouts of a process
    (:class:`SharedRolloutStatus`).
    """
    return Path(folder) / f"{name.replace(' ', '-')}.location"


# --- In the process that calls ---


class _Calls:
    """The connection of this process to another one, and the pending calls.

    A thread connects and sends, because both block while the other process is stopped.
    """

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Future[Any], str]] = {}
        self._number = 0
        self._connection: Connection | None = None
        self._is_lost = False
        self._requests: SimpleQueue[tuple[int, str, bytes] | None] = SimpleQueue()
        threading.Thread(target=self._send_all, name=f"calls of {process.name}", daemon=True).start()

    def send(self, method: str, payload: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a cancelled future could not be set
        with self._lock:
            if not self._is_lost:
                self._number += 1
                self._pending[self._number] = future, method
                self._requests.put((self._number, method, payload))
                return future
        future.set_exception(self._process.lost(method))
        return future

    def _send_all(self) -> None:
        with suppress(Exception):  # the process has ended
            self._connection = Client(self._process.address, authkey=self._process.key)
            _keep_alive(self._connection, self._process.address)
            name = f"answers of {self._process.name}"
            threading.Thread(target=self._receive, name=name, daemon=True).start()
            while (request := self._requests.get()) is not None:
                self._connection.send_bytes(pickle.dumps(request))
        self.close()

    def _receive(self) -> None:
        assert self._connection is not None
        with suppress(Exception):  # the process has ended
            while True:
                number, is_result, data = pickle.loads(self._connection.recv_bytes())
                with self._lock:
                    future, method = self._pending.pop(number)
                try:
                    value = pickle.loads(data)
                except Exception as error:  # of a class that cannot be unpickled
                    is_result = False
                    value = ClusterFault(
                        f"{self._process.name} returned from {method} what cannot be read: "
                        f"{type(error).__name__}: {error}; {AGAIN}"
                    )
                if is_result:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        self.close()
        self._connection.close()

    def close(self) -> None:
        """Fail all pending and later calls; may be called twice."""
        with self._lock:
            self._is_lost = True
            lost, self._pending = list(self._pending.values()), {}
        self._requests.put(None)
        if self._connection is not None:
            with suppress(OSError):  # wakes the thread that receives
                socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)
        for future, method in lost:
            future.set_exception(self._process.lost(method))


def _keep_alive(connection: Connection, address: Address) -> None:
    """Let a connection to another machine end if that machine is lost."""
    if not isinstance(address, str):
        with socket.socket(fileno=os.dup(connection.fileno())) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


# by process, because one that replaces another may get its address
_CONNECTIONS: Final[dict["Process", _Calls]] = {}
_CONNECTING: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Handle of a process; a copy of it in another process calls the same process."""

    name: str
    address: Address
    key: bytes
    pid: int

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the process's object. The result raises an OutriderError of the call as it is,
        ProcessLost if the process died, and ClusterFault for any other exception.
        """
        return self.call_pickled(method, pickle.dumps(arguments))

    def call_pickled(self, method: str, payload: bytes) -> Future[Any]:
        """Call with arguments that were pickled once for several processes."""
        with _CONNECTING:
            if (calls := _CONNECTIONS.get(self)) is None:
                calls = _CONNECTIONS[self] = _Calls(self)
        return calls.send(method, payload)

    def lost(self, method: str) -> ProcessLost:
        """Return the error for a call that a death of the process ended."""
        action = "its heartbeat" if method == _BEAT else method
        return ProcessLost(f"{self.name} died in {action}; {AGAIN}", self.name)

    def disconnect(self) -> None:
        """Close this process's connection; pending and later calls fail."""
        if (calls := _CONNECTIONS.get(self)) is not None:
            calls.close()

    @property
    def host(self) -> str:
        """Address of its machine for the ranks."""
        return "127.0.0.1" if isinstance(self.address, str) else self.address[0]


@dataclass(slots=True)
class _Watch:
    """What :meth:`Cluster.check` knows about a process. Times are those of ``time.monotonic``."""

    process: Process
    busy_s: float  # the longest time without progress or response while it uses its processor
    has_progress: bool  # whether its counter moves with its work
    beat: Future[Any] | None = None
    sent: float = 0.0
    count: int = 0
    location: str | None = None
    cpu_s: float | None = None
    cpu_at: float = 0.0
    is_noted: bool = False
    fault: ProcessLost | None = None


class Cluster:
    """The processes of a run on this machine. Its subclass for Ray places them on several."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.note: Callable[[str], None] = lambda line: None  # gets lines for the log
        self._key = secrets.token_bytes(32)
        self._watches: dict[str, _Watch] = {}
        self._gpus: dict[Place, list[str]] = {}
        _remove_stale()
        # a short name, because paths of sockets are limited to 107 characters
        parent = tempfile.gettempdir()
        parent = parent if len(os.fsencode(parent)) <= _PARENT_BYTES else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self._locks = [_lock(self.folder)]
        with suppress(OSError):  # there is none, or it is read-only
            (SHARED_MEMORY / self.folder.name).mkdir(mode=0o700)
            self._locks.append(_lock(SHARED_MEMORY / self.folder.name))
        self._control: Connection | None = None
        self._num_started = 0
        self._checked = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        """Start the fork server; it imports while the run is set up."""
        own, other = socket.socketpair()
        search = [path for path in sys.path if path]
        code = (
            f"import sys; sys.path[:] = {search!r}; "
            "from outrider.distributed.processes import run_fork_server; "
            f"run_fork_server({other.fileno()}, {str(self.folder)!r})"
        )
        self._fork_server = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # without a user's modules before the standard library
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log_path(self.folder, "fork server").open("wb"),
            start_new_session=True,  # an interruption of the terminal is for the run alone
        )
        other.close()
        self._control = Connection(own.detach())

    @property
    def is_local(self) -> bool:
        """Whether all processes run on this machine."""
        return True

    def start(
        self,
        name: str,
        kind: type,
        *arguments: Any,
        busy_s: float,
        has_progress: bool = True,
        place: Place,
    ) -> Process:
        """Start a process with an object of a class. Its constructor runs with the first call.

        Args:
            name: For example ``engine 1``.
            busy_s: The longest time without progress while it computes.
            has_progress: Whether :data:`PROGRESS` moves in every call.
            place: Its kind and number, for its GPUs and for Ray.
        """
        self._num_started += 1
        process = self._start(
            Spec(
                name=name,
                target=f"{kind.__module__}:{kind.__qualname__}",
                arguments=pickle.dumps(arguments),
                address=self._new_address(name),
                key=self._key,
                folder=str(self.folder),
                environ=self._environ(place),
            ),
            place,
        )
        self._watches[name] = _Watch(process=process, busy_s=busy_s, has_progress=has_progress)
        return process

    def reserve(self, settings: RunSettings, kind: Kind) -> None:
        """Reserve what the processes of a kind need. Raises ClusterFault if there are too few GPUs."""
        model, cluster = settings.model, settings.cluster
        if model.device == "cpu":
            return
        import torch  # late, so that the fork server starts before this process imports it

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        all_gpus = (
            [str(number) for number in range(torch.cuda.device_count())]
            if visible is None
            else visible.split(",")
        )
        is_shared, size = cluster.placement == "colocate", cluster.tensor_parallel
        num_trainers = cluster.num_trainers if settings.has_ranks else 0
        first = 0 if is_shared else num_trainers
        num = max(num_trainers, first + cluster.num_engines * size if cluster.is_remote else 0)
        if num > len(all_gpus):
            raise ClusterFault(
                f"the processes of [cluster] need {num} GPUs, and {len(all_gpus)} are seen here"
            )
        for rank in range(num_trainers):
            self._gpus["rank", rank] = all_gpus[rank : rank + 1]
        for engine in range(cluster.num_engines):
            begin = first + engine * size
            self._gpus["engine", engine] = all_gpus[begin : begin + size]

    def release(self, kind: Kind) -> None:
        """Release what :meth:`reserve` has reserved; may be called twice."""

    def _environ(self, place: Place) -> dict[str, str]:
        environ = {} if place[0] != "rank" else {"GLOO_SOCKET_IFNAME": "lo"}
        if self._gpus:  # none for workers
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus.get(place, []))
        return environ

    def _new_address(self, name: str) -> Address:
        return str(self.folder / f"{self._num_started}.sock")

    def _start(self, spec: Spec, place: Place) -> Process:
        assert self._control is not None and isinstance(spec.address, str)
        if self._fork_server.poll() is not None:
            self._control.close()
            self._begin()
        until = time.monotonic() + _START_S
        try:
            self._control.send(spec)
            if not self._control.poll(_START_S):
                raise EOFError
            pid = self._control.recv()
        except (OSError, EOFError) as error:
            self._fork_server.kill()
            raise ClusterFault(f"{spec.name} could not start: {self._last_line('fork server')}") from error
        while not _is_listening(spec.address):
            if not _is_alive(pid) or time.monotonic() > until:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                raise ClusterFault(f"{spec.name} could not start: {self._last_line(spec.name)}")
            time.sleep(0.005)
        return Process(name=spec.name, address=spec.address, key=spec.key, pid=pid)

    def _last_line(self, name: str) -> str:
        with suppress(OSError):
            lines = log_path(self.folder, name).read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else "no output"
        return "no output"

    def wait(self, calls: Mapping[str, Future[Any]]) -> dict[str, Any]:
        """Return the result of each call, or its :class:`ProcessLost`, in the order of the calls. Raises any
        other error of a call at once.
        """
        results: dict[str, Any] = {}
        while len(results) < len(calls):
            wait_futures([calls[name] for name in calls if name not in results], TICK_S, FIRST_COMPLETED)
            self.check()
            for name, call in calls.items():
                if name not in results and call.done():
                    answer = outcome(call)
                    results[name] = self.locate(answer) if isinstance(answer, ProcessLost) else answer
        return {name: results[name] for name in calls}

    def results(self, calls: Mapping[str, Future[Any]]) -> list[Any]:
        """Return the results of all calls in order. Raises the first ProcessLost."""
        answers = self.wait(calls)
        for answer in answers.values():
            if isinstance(answer, ProcessLost):
                raise answer
        return [answers[name] for name in calls]

    def call_all(self, processes: Sequence[Process], method: str, *arguments: Any) -> list[Any]:
        """Call a method of several processes with arguments that are pickled once; returns the results in
        order. Raises the first ProcessLost.
        """
        payload = pickle.dumps(arguments)
        return self.results({each.name: each.call_pickled(method, payload) for each in processes})

    def check(self) -> dict[str, ProcessLost]:
        """Exchange heartbeats with all processes; returns those that died, and ends those that are silent.

        A process is silent if, for ``cluster.heartbeat_s``, it neither responds nor uses its processor; or
        if it computes for longer than its ``busy_s`` without a response or without progress. A call that
        holds the interpreter's lock (a regular expression, computer algebra) only delays it.
        """
        now = time.monotonic()
        # this process may have been stopped; answers that have arrived meanwhile are not read yet
        was_away, self._checked = now - self._checked > 10 * TICK_S, now
        for watch in self._watches.values():
            if was_away and watch.beat is not None:
                watch.sent = watch.cpu_at = now
                watch.cpu_s = self._cpu_seconds(watch.process) if self.is_local else None
            if watch.fault is None:
                watch.fault = self._check(watch, time.monotonic())
                if watch.fault is not None:  # its pending calls fail, here and in other processes
                    self._kill(watch.process)
                    watch.process.disconnect()
        return {name: watch.fault for name, watch in self._watches.items() if watch.fault is not None}

    def _check(self, watch: _Watch, now: float) -> ProcessLost | None:
        process, limit = watch.process, self.settings.heartbeat_s
        if watch.beat is None:
            if now - watch.sent >= _BETWEEN_BEATS_S:
                watch.beat, watch.sent = process.call(_BEAT), now
                # on another machine only if the answer is late, because that takes a call
                watch.cpu_s, watch.cpu_at = self._cpu_seconds(process) if self.is_local else None, now
            return None
        if watch.beat.done():
            answer, watch.beat = outcome(watch.beat), None
            if isinstance(answer, ProcessLost):
                return self._locate(watch, answer)
            watch.count, stalled_s, watch.location = answer
            if watch.has_progress and stalled_s > watch.busy_s:
                return self._silent(watch, f"made no progress for {watch.busy_s:g} s (cluster.stall_s)")
            return None
        if now - watch.cpu_at < limit:
            return None
        used = self._cpu_seconds(process)
        if watch.cpu_s is None and used is not None:
            watch.cpu_s, watch.cpu_at = used, now
            return None
        is_busy = None not in (used, watch.cpu_s) and used - watch.cpu_s > _BUSY_SHARE * (now - watch.cpu_at)  # type: ignore[operator]
        if not is_busy or now - watch.sent > limit + watch.busy_s:
            seconds = now - watch.sent
            return self._silent(watch, f"has not responded for {seconds:.0f} s (cluster.heartbeat_s)")
        watch.cpu_s, watch.cpu_at = used, now
        if not watch.is_noted:
            watch.is_noted = True
            self.note(
                f"{process.name} works but has not responded for {limit:g} s (cluster.heartbeat_s), last "
                f"seen at {self._location(watch) or 'its start'}: a step that holds Python's lock delays "
                "the others"
            )
        return None

    def _silent(self, watch: _Watch, what: str) -> ProcessLost:
        name = watch.process.name
        return self._locate(watch, ProcessLost(f"{name} {what}; {AGAIN}", name, is_silent=True))

    def _locate(self, watch: _Watch, fault: ProcessLost) -> ProcessLost:
        """Add the task and the location at which the process was last seen."""
        location = self._location(watch)
        if not location or "last seen" in str(fault):
            return fault
        text, separator, rest = str(fault).partition("; ")
        seen = f"{text}, last seen at {location.replace('; ', ', ')}{separator}{rest}"
        return ProcessLost(seen, fault.process, fault.is_silent)

    def locate(self, fault: ProcessLost) -> ProcessLost:
        """Return the fault that :meth:`check` found, or this one with the location at which the process was
        last seen.
        """
        watch = self._watches.get(fault.process)
        return fault if watch is None else watch.fault or self._locate(watch, fault)

    def _location(self, watch: _Watch) -> str | None:
        with suppress(OSError):
            data = location_path(self.folder, watch.process.name).read_bytes()
            return data.rstrip(b"\0").decode("utf-8", "replace") or watch.location
        return watch.location

    def locations(self) -> dict[str, tuple[int, str]]:
        """Return the counter and the newest location of rollouts by the name of their process."""
        return {name: (each.count, each.location) for name, each in self._watches.items() if each.location}

    def _cpu_seconds(self, process: Process) -> float | None:
        return cpu_seconds(process.pid)

    def kill(self, process: Process) -> None:
        """End a process; may be called twice."""
        self._watches.pop(process.name, None)
        self._kill(process)
        process.disconnect()

    def _kill(self, process: Process) -> None:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes and remove their files; may be called twice."""
        for watch in list(self._watches.values()):
            self.kill(watch.process)
        if self._control is not None:
            self._control.close()
            self._control = None
            with suppress(subprocess.TimeoutExpired):
                self._fork_server.wait(_END_S)
            self._fork_server.kill()
            self._fork_server.wait()
        _remove(self.folder)
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def outcome(call: Future[Any]) -> Any:
    """Return the result of a finished call, or its :class:`ProcessLost`. Raises any other error."""
    try:
        return call.result(0)
    except ProcessLost as fault:
        return fault


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process of this machine; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_listening(address: str) -> bool:
    # the file of a socket exists before it listens
    with socket.socket(socket.AF_UNIX) as client:
        return not client.connect_ex(address)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc").exists()


def _lock(folder: Path) -> BinaryIO:
    """Lock a folder until this process ends."""
    file = (folder / _LOCK).open("wb")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove_stale() -> None:
    """Remove the folders of runs that were killed with their fork server: their locks are free. A process id
    would not do, because containers may share these folders.
    """
    for parent in {Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY}:
        for folder in parent.glob(f"{_PREFIX}[0-9]*-*"):
            # not one of another user, a locked one, and one that has just been made or removed
            with suppress(OSError), (folder / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove the folder of a run, and the one in shared memory."""
    for path in (SHARED_MEMORY / folder.name, folder):
        shutil.rmtree(path, ignore_errors=True)
