"""Processes of a Python tool, found by the scratch folder in their command line."""

import contextlib
from pathlib import Path

import pytest

from outrider.tools.python import sandbox

needs_locks = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks Landlock or seccomp")


def server_pids(folder: Path) -> list[int]:
    """Servers that use ``folder``, and what they forked: a fork keeps the command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (entry / "cmdline").read_bytes()
                if str(folder).encode() in command and b"python.server" in command:
                    pids.append(int(entry.name))
    return sorted(pids)
