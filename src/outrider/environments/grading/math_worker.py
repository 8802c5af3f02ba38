"""The grading process: it loads the algebra system once, and forks a child that evaluates pairs until one of
them kills it.

Input and output are lines of JSON: a list of pairs of texts, and a list of true, false or null (undecided).
The first line of output is ``[]`` (ready). A pair has a limit of processor time, which the kernel enforces
even within a call of C, so that a verdict does not depend on the load of the machine. There is no limit of
wall time: while the child uses the processor, ``"alive"`` is written from time to time; a child that does not
is a fault of the machine.
"""

import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from outrider.tools.python.sandbox import die_with_parent

STALL_SECONDS: Final = 60.0
ALIVE: Final = "alive"
_MEMORY_BYTES = 1 << 30  # beyond what is mapped at the start
_Comparison = Callable[[str, str], bool]
_VERDICTS = {b"1": True, b"0": False, b"?": None}


def main(parent: int, cpu_seconds: int) -> None:
    """Serve until standard input or the process ``parent`` ends. ``cpu_seconds`` is the limit of a pair."""
    from outrider.environments.grading.math_comparison import is_same_value

    logging.disable(logging.CRITICAL)
    # Before the first fork and outside the limit of a pair, because imports at the first use may have to be
    # compiled, which takes seconds. A verdict must not depend on it.
    is_same_value(r"\frac{1}{2}", "0.5")
    is_same_value(r"(1, \sqrt{2})", r"[1, \ln{2}]")
    _write_line([])
    child: _Child | None = None
    requests = select.poll()
    requests.register(0, select.POLLIN)
    while os.getppid() == parent:
        if not requests.poll(1000):
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            break
        verdicts: list[bool | None] = []
        for left, right in json.loads(line):
            verdict = b""
            # If a child did not end by its time limit, but for example by memory that earlier pairs used,
            # another one evaluates the pair once more.
            for _ in range(2):
                child = child or _Child(cpu_seconds, is_same_value)
                verdict = child.compare(left, right)
                if verdict:
                    break
                signal_number = child.end()
                child = None
                if signal_number == signal.SIGPROF:
                    break
            verdicts.append(_VERDICTS.get(verdict))
        _write_line(verdicts)
    if child is not None:
        child.end()


def _write_line(line: object) -> None:
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()


class _Child:
    """A fork of this process that evaluates one pair after another."""

    def __init__(self, cpu_seconds: int, is_same_value: _Comparison) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _evaluate(theirs, cpu_seconds, is_same_value)
        theirs.close()

    def compare(self, left: str, right: str) -> bytes:
        """The verdict; empty if the child ended. Raises TimeoutError if it neither ends nor works."""
        self._socket.settimeout(STALL_SECONDS)
        ticks = -1
        try:
            self._socket.send(json.dumps([left, right]).encode())
            while True:
                try:
                    return self._socket.recv(16)
                except TimeoutError:
                    with open(f"/proc/{self._pid}/stat", encoding="ascii") as file:
                        fields = file.read().rpartition(")")[2].split()
                    before, ticks = ticks, int(fields[11]) + int(fields[12])  # processor time
                    if ticks == before:
                        raise
                    _write_line(ALIVE)
        except ConnectionError:
            return b""

    def end(self) -> int:
        """Kill the child; returns the number of the signal that ended it."""
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._socket.close()
        return -os.waitstatus_to_exitcode(status)


def _evaluate(pairs: socket.socket, cpu_seconds: int, is_same_value: _Comparison) -> NoReturn:
    """Answer requests until the other end closes. The kernel kills this process at its limits."""
    try:
        die_with_parent()
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        for kind, value in ((resource.RLIMIT_AS, mapped + _MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
        while request := pairs.recv(1 << 17):
            left, right = json.loads(request)
            # Kills with SIGPROF. RLIMIT_CPU counts whole seconds of the process's life, so a pair would lose
            # up to one.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            verdict = _verdict(left, right, is_same_value)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if not verdict:
                break
            pairs.send(verdict)
    finally:
        os._exit(0)


def _verdict(left: str, right: str, is_same_value: _Comparison) -> bytes:
    try:
        return b"1" if is_same_value(left, right) else b"0"
    except MemoryError:  # a new process has more
        return b""
    except Exception:  # an exhausted stack, or a fault of the library: no verdict
        return b"?"
