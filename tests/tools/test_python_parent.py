"""E7: a Python server whose trainer was killed ends without a word and takes its folder with it."""

import dataclasses
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from outrider.tools.python.sandbox import Limits
from outrider.tools.python.server import REPLY, REQUEST, ServerSettings
from outrider.tools.python.tool import _COMMAND, _SOURCE


@pytest.mark.parametrize(
    "sent", [None, REQUEST.pack(100) + b"print(1)"], ids=["while it starts", "inside a request"]
)
def test_e7_a_server_without_a_trainer_leaves_neither_traceback_nor_folder(
    sent: bytes | None, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    limits = Limits(wall_seconds=5.0, cpu_seconds=5, memory_bytes=2**28, disk_bytes=2**20, output_bytes=2**16)
    settings = ServerSettings(
        root=str(root),
        parent=os.getpid(),
        packages=(),
        landlock=False,
        seccomp=False,
        mounts=False,
        limits=limits,
    )
    ours, theirs = socket.socketpair()
    command = [*_COMMAND, json.dumps(dataclasses.asdict(settings)), _SOURCE]
    with theirs:
        server = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    with ours:
        if sent is not None:
            ours.settimeout(60)
            assert ours.recv(REPLY.size)
            ours.sendall(sent)
    _, stderr = server.communicate(timeout=60)
    assert stderr.decode() == "" and not root.exists()
