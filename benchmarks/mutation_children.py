"""Forked children of the mutation benchmark: limits, how they ended, and how a change gets into them."""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

SURVIVED, KILLED, NO_IMPORT, NOT_SWAPPED = 0, 1, 2, 4
NAMES = {SURVIVED: "survived", KILLED: "killed", NO_IMPORT: "import", NOT_SWAPPED: "not swapped"}
_MEMORY = 6 * 2**30  # of data; a loop that never ends must not take the machine with it


def run_child(work: Callable[[], int], *, cpu_seconds: float, wall_seconds: float) -> str:
    """Run ``work`` in a fork; its exit code's name, ``killed`` for a crash, or ``timeout``."""
    scratch = tempfile.mkdtemp(prefix="mutant-")
    pid = os.fork()
    if pid == 0:
        _become_child(work, cpu_seconds, scratch)
    handle = os.pidfd_open(pid)
    try:
        finished = bool(select.select([handle], [], [], wall_seconds)[0])
        if not finished:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(handle)
        _kill_group(pid)
        shutil.rmtree(scratch, ignore_errors=True)
    if not finished or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "timeout"
    return "killed" if os.WIFSIGNALED(status) else NAMES.get(os.WEXITSTATUS(status), "killed")


def _become_child(work: Callable[[], int], cpu_seconds: float, scratch: str) -> None:
    code = KILLED
    try:
        # No session of its own: a scheduler that groups by session would give it a share of its own.
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(sink, number)
        limit = math.ceil(cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tempfile.tempdir = os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = scratch
        code = work()
    finally:
        os._exit(code)


def _kill_group(pid: int) -> None:
    """What the tests started and left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def live_functions(files: Sequence[str]) -> dict[tuple[str, str], list[FunctionType]]:
    """The functions of these files that exist now, by file and qualified name, whatever decorates them."""
    wanted = {os.path.realpath(file) for file in files}
    found: dict[tuple[str, str], list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and os.path.realpath(one.__code__.co_filename) in wanted:
            key = os.path.realpath(one.__code__.co_filename), one.__code__.co_qualname
            found.setdefault(key, []).append(one)
    return found


def swap_code(functions: Sequence[FunctionType], source: str, path: str) -> bool:
    """Give functions the code that they have in a changed file; every name bound to them then runs it.

    False where that is not possible: the function is gone, or closes over other names.
    """
    every = _codes(compile(source, path, "exec", dont_inherit=True))
    found = {(code.co_qualname, code.co_firstlineno): code for code in every}
    for function in functions:
        changed = found.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if changed is None or changed.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = changed
    return bool(functions)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class ChangedFile(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, name: str, path: str, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of that module alone."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        exec(compile(self.source, self.path, "exec", dont_inherit=True), module.__dict__)

    def install(self) -> None:
        """Come before the file on disk."""
        sys.meta_path.insert(0, self)


def module_name(path: Path, source_root: Path) -> str:
    """Of a file below the root of the sources."""
    return ".".join(path.relative_to(source_root).with_suffix("").parts)
