"""The parent's end of one fork server: start, one call at a time, stop."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.tools.python_server import REPLY, REQUEST, STATUSES, ServerSettings
from outrider.tools.sandbox import Limits

_START_SECONDS = 120.0  # a cold disk and a large package
_GRACE_SECONDS = 30.0  # on top of the wall limit, which the server itself keeps
# The server must be of the same source tree as this module, whatever else is installed.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from outrider.tools.python_server import main
del sys.path[0]
main(sys.argv[1])
"""
_SOURCE = str(Path(__file__).resolve().parents[2])
# Nothing of the parent's environment may reach model code. One thread: a helper must not disturb the
# trainer's OpenMP team.
_ENVIRONMENT = (
    ("PYTHONHASHSEED", "0"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("MKL_NUM_THREADS", "1"),
    ("LC_ALL", "C.UTF-8"),
)


class ServerLost(Exception):
    """The server did not start, ended, or did not answer in time."""


class ServerProcess:
    """One fork server with its own scratch folder. Not thread-safe; starts at the first call and again after
    a loss.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        packages: tuple[str, ...],
        landlock: bool,
        seccomp: bool,
        mounts: bool,
        folder: str | None,
    ) -> None:
        self._limits, self._packages, self._folder = limits, packages, folder
        self._landlock, self._seccomp, self._mounts = landlock, seccomp, mounts
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._root = ""

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server unless it runs. Raises :class:`ServerLost` with the reason."""
        if self._sock is not None:
            return
        self._root = tempfile.mkdtemp(
            prefix="outrider-python-", dir=self._folder and os.path.abspath(self._folder)
        )
        settings = ServerSettings(
            root=self._root,
            parent=os.getpid(),
            packages=self._packages,
            landlock=self._landlock,
            seccomp=self._seccomp,
            mounts=self._mounts,
            limits=self._limits,
        )
        self._sock, theirs = socket.socketpair()
        library_path = os.environ.get("LD_LIBRARY_PATH")  # the interpreter itself may need it
        command = [
            sys.executable,
            "-s",
            "-P",
            "-B",
            "-X",
            "utf8",
            "-c",
            _BOOT,
            json.dumps(dataclasses.asdict(settings)),
            _SOURCE,
        ]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=dict(_ENVIRONMENT) | ({"LD_LIBRARY_PATH": library_path} if library_path else {}),
                    start_new_session=True,  # Ctrl-C is for the parent, which then stops the server
                )
            except OSError:
                self.stop()
                raise
        status, _, output = self._exchange(self._sock, b"", _START_SECONDS)
        if status != "ready":
            self.stop()
            raise ServerLost(output.decode("utf-8", "replace"))

    def call(self, code: bytes) -> tuple[str, float, bytes]:
        """Run ``code``: status, wall seconds, output. Raises :class:`ServerLost`, after which the next call
        starts afresh.
        """
        self.start()
        assert self._sock is not None
        return self._exchange(
            self._sock, REQUEST.pack(len(code)) + code, self._limits.wall_seconds + _GRACE_SECONDS
        )

    def stop(self) -> None:
        """End the server and whatever it runs, and remove its scratch folder. May be called twice."""
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()  # the kernel then ends the supervisor and the worker
            self._process.wait()
        if self._root and os.path.isdir(self._root):
            shutil.rmtree(self._root)
        self._sock, self._process, self._root = None, None, ""

    def _exchange(self, sock: socket.socket, request: bytes, seconds: float) -> tuple[str, float, bytes]:
        """Send, and wait ``seconds`` for each part of the answer. After any failure the server is gone, also
        when this thread was interrupted: the late answer must not become that of the next call.
        """
        done = False
        sock.settimeout(seconds)
        try:
            sock.sendall(request)
            index, took, length = REPLY.unpack(_receive(sock, REPLY.size))
            reply = STATUSES[index], took, _receive(sock, length)
            done = True
        except (OSError, EOFError) as error:
            raise ServerLost(f"the server ended or hung: {error}") from error
        finally:
            if not done:
                self.stop()
        return reply


def _receive(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = sock.recv(min(length - len(data), 1 << 16))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return bytes(data)
