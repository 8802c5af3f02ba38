"""Threads share one arena of glibc's: with many, a run held on to memory that no thread needed (the soak's
campaigns).
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ARENAS = """
import contextlib, ctypes, json, os, sys, threading
from outrider.cli import main

if sys.argv[1] == "main":
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
        main(["--version"])
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(4)

def allocate():
    together.wait()
    libc.malloc(100_000)
    together.wait()  # no thread takes the arena of one that has ended

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
stream = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(json.dumps(open(sys.argv[2]).read().count("<heap nr=")))
"""


def num_arenas(way: str, file: str, **variables: str) -> int:
    """Of a process whose four threads allocate at once."""
    environment = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"} | variables
    command = [sys.executable, "-c", ARENAS, way, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_of_the_command_line_share_one_arena(tmp_path: Path) -> None:
    file = str(tmp_path / "info.xml")
    assert num_arenas("main", file) == 1 < num_arenas("plain", file)
    assert num_arenas("main", file, MALLOC_ARENA_MAX="3") > 1  # who chooses is asked
