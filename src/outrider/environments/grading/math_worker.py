"""The grading process: loads the algebra system once, and forks a child that evaluates pairs until one of
them kills it.

Lines of JSON on standard input and output: a list of pairs of texts in; a list of true, false or null
(undecided) out. The first line out is ``[]``: ready. The limit of a pair is one of processor time, which the
kernel keeps even inside one call of C, so that a verdict does not depend on what else the machine does. There
is no limit of wall time: ``"alive"`` is written now and then while the child uses the processor, and a child
that does not is a fault of the machine.
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
    """Serve until standard input or the process with id ``parent`` ends. ``cpu_seconds`` limits a pair."""
    from outrider.environments.grading.math_comparison import is_same_value

    logging.disable(logging.CRITICAL)
    # Before the first fork, outside the limit of a pair: what is imported now, and at the first use, may
    # have to be compiled, and that costs seconds. A verdict must not depend on it.
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
            # A child that was ended by anything but its time limit (memory that earlier pairs have used, the
            # kernel's killer) has a successor, which evaluates the pair once more.
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
        """The verdict; empty when the child ended. Raises TimeoutError when it neither ends nor works."""
        self._socket.settimeout(STALL_SECONDS)
        used = -1
        try:
            self._socket.send(json.dumps([left, right]).encode())
            while True:
                try:
                    return self._socket.recv(16)
                except TimeoutError:
                    used, before = _cpu_ticks(self._pid), used
                    if used == before:
                        raise
                    _write_line(ALIVE)
        except ConnectionError:
            return b""

    def end(self) -> int:
        """Kill it, whatever it does; the number of the signal that ended it."""
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._socket.close()
        return -os.waitstatus_to_exitcode(status)


def _evaluate(pairs: socket.socket, cpu_seconds: int, is_same_value: _Comparison) -> NoReturn:
    """Answer until the other end closes. The kernel kills this process at its limits."""
    try:
        die_with_parent()
        _limit(resource.RLIMIT_AS, _mapped_bytes() + _MEMORY_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        while request := pairs.recv(1 << 17):
            left, right = json.loads(request)
            # Kills by SIGPROF. RLIMIT_CPU counts whole seconds of the process's life: a pair would lose up
            # to one.
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
    except MemoryError:  # a fresh process has more of it
        return b""
    except Exception:  # an exhausted stack, or a fault of the library: no verdict
        return b"?"


def _limit(resource_id: int, value: int) -> None:
    resource.setrlimit(resource_id, (value, resource.getrlimit(resource_id)[1]))


def _cpu_ticks(pid: int) -> int:
    """Processor time that a process has used, in ticks of the kernel."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
