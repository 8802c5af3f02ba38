"""The Python tool as a caller sees it: values, errors, cuts, packages, threads, restarts, refusal."""

import ast
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError, ToolFault, ToolUnavailable
from outrider.tools.python import sandbox
from outrider.tools.python.tool import PythonTool, PythonToolConfig, cut, extract_code
from outrider.tools.python.worker import print_last_expression

needs_locks = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks Landlock or seccomp")

# Code, the program that the released ARPO tool makes of it, its result there (the last line of a traceback).
RELEASED = [
    ("1+1", "print(1 + 1)", "2"),
    ("x=3", "x=3", ""),
    ("import math\nmath.sqrt(16)", "import math\nprint(math.sqrt(16))", "4.0"),
    ("print(1)\nNone", "print(1)\nprint(None)", "1\nNone"),
    ("1/0", "print(1 / 0)", "ZeroDivisionError: division by zero"),
    ("print('a'); 5", "print('a')\nprint(5)", "a\n5"),
    ("raise SystemExit(0)", "raise SystemExit(0)", ""),
]


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with PythonTool(PythonToolConfig(wall_seconds=5, max_output_chars=1000)) as made:
        yield made


def server_pids(folder: Path) -> list[int]:
    """Servers that use ``folder`` and what they forked: a fork keeps the command line, in which the folder
    stands.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (entry / "cmdline").read_bytes()
                if str(folder).encode() in command and b"python.server" in command:
                    found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize(("code", "rewritten", "_"), RELEASED)
def test_rewriting_agrees_with_the_released_tool(code: str, rewritten: str, _: str) -> None:
    assert ast.unparse(print_last_expression(code)) == ast.unparse(ast.parse(rewritten))


@needs_locks
@pytest.mark.parametrize(("code", "_", "result"), RELEASED)
def test_results_agree_with_the_released_tool(tool: PythonTool, code: str, _: str, result: str) -> None:
    found = tool.run(code)
    if code == "1/0":
        assert (found.status, found.output.splitlines()[-1]) == ("error", result)
    else:
        assert (found.status, found.output) == ("ok", result)
    assert not found.truncated
    assert found.sandboxed


@given(st.integers() | st.text() | st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_last_expression_prints_its_value(value: object) -> None:
    lines: list[object] = []
    program = compile(print_last_expression(f"x = 1\n{value!r}"), "test", "exec")
    exec(program, {"print": lines.append})
    assert lines == [value]


@given(st.text(max_size=300), st.integers(1, 200))
def test_cut_keeps_both_ends_and_says_what_is_missing(text: str, max_chars: int) -> None:
    shown, truncated = cut(text, max_chars)
    assert truncated == (len(text) > max_chars)
    if not truncated:
        assert shown == text
        return
    mark = f"\n[... {len(text) - max_chars} of {len(text)} characters cut ...]\n"
    tail = max_chars // 2
    assert len(shown) == max_chars + len(mark)
    assert shown.startswith(text[: max_chars - tail] + mark)
    assert shown.endswith(mark + text[len(text) - tail :])


@needs_locks
@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("", "error", "[error: no code to run]"),
        ("  \n# only a remark\n", "error", "[error: no code to run]"),
        ("import sys\nsys.exit('stopped here')", "error", "stopped here"),
        ("import sys\nsys.exit(3)", "error", ""),
        ("import os\nos.write(1, b'caf\\xe9\\xff ') and None", "ok", "caf\ufffd\ufffd None"),
        ("print(chr(0xd800), 'after')", "ok", "? after"),
        ("print('Zürich 東京')", "ok", "Zürich 東京"),
        ("input()", "error", "EOFError: EOF when reading a line"),
        (
            "if True:\nx",
            "error",
            "IndentationError: expected an indented block after 'if' statement on line 1",
        ),
        ("print('seen')\n1/0", "error", "ZeroDivisionError: division by zero"),
        ("'\ud800'", "error", "surrogates not allowed"),
        ("x\0", "error", "null bytes"),
        ("import sys\nsys.stdout.close()", "error", ""),
        ("raise MemoryError", "memory", "[out of memory: the limit is 536870912 bytes]"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "ok", "A(x=1)"),
        ("__name__", "ok", "__main__"),
        ("import tempfile\nwith tempfile.NamedTemporaryFile() as f: print(f.write(b'abc'))", "ok", "3"),
        ("open('a.txt', 'w').write('abc')\nopen('a.txt').read()", "ok", "abc"),
        ("import sqlite3, csv, bz2, hashlib, zoneinfo\nhashlib.md5(b'').hexdigest()[:4]", "ok", "d41d"),
    ],
)
def test_outcomes(tool: PythonTool, code: str, status: str, output: str) -> None:
    found = tool.run(code)
    assert found.status == status
    if status == "ok" or not output:
        assert found.output == output
    else:
        assert output in found.output


@needs_locks
def test_an_error_shows_the_program_and_nothing_of_the_tool(tool: PythonTool) -> None:
    found = tool.run("print('before')\ndef half(x):\n    return x / 0\nhalf(3)")
    lines = found.output.splitlines()
    assert lines[:2] == ["before", "Traceback (most recent call last):"]
    assert [line.strip() for line in lines if "File" in line] == [
        'File "<python>", line 4, in <module>',
        'File "<python>", line 3, in half',
    ]
    assert "    return x / 0" in lines
    found = tool.run(
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as error:\n"
        "    raise KeyError('k') from error"
    )
    assert found.output.count("Traceback") == 2
    assert found.output.count('File "') == found.output.count('File "<python>"') == 2


@needs_locks
def test_a_long_output_is_cut_with_a_mark(tool: PythonTool) -> None:
    found = tool.run("print('a' * 3000)\n1/0")
    assert (found.status, found.truncated) == ("error", True)
    assert "characters cut" in found.output
    assert found.output.startswith("a" * 500)
    assert found.output.endswith("ZeroDivisionError: division by zero")


@needs_locks
def test_calls_share_nothing_and_repeat_exactly(tool: PythonTool) -> None:
    assert tool.run("import math\nmath.pi = 3\nkept = 1\nopen('kept', 'w').close()").status == "ok"
    code = (
        "import math, os, random\nprint(math.pi, 'kept' in globals(), os.listdir(), "
        "random.random(), hash('a'), list({'b', 'c'}))"
    )
    first, second = tool.run(code), tool.run(code)
    assert first.output.startswith("3.14159")
    assert "False []" in first.output
    assert first.output == second.output
    with PythonTool(PythonToolConfig()) as other:
        assert other.run(code).output == first.output


@needs_locks
def test_a_limit_on_code_that_prints_slowly_keeps_what_was_printed() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=0.3)) as tool:
        found = tool.run("import time\nfor i in range(100):\n    print(i)\n    time.sleep(.05)")
    assert found.status == "timeout"
    assert found.output.startswith("0\n1\n")
    assert found.output.endswith("[stopped: ran longer than 0.3 s]")
    assert 0.3 <= found.seconds < 2


@needs_locks
def test_processor_time_is_limited_apart_from_wall_time() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=60, cpu_seconds=1)) as tool:
        found = tool.run("print('begun')\nwhile True: pass")
    assert (found.status, found.output) == (
        "timeout",
        "begun\n[stopped: used more than 1 s of processor time]",
    )


@needs_locks
def test_only_named_packages_can_be_imported() -> None:
    pytest.importorskip("sympy")
    pytest.importorskip("numpy")
    with PythonTool(PythonToolConfig(packages=("sympy", "numpy"))) as tool:
        assert tool.run("from sympy import *\nx = Symbol('x')\nintegrate(sin(x), x)").output == "-cos(x)"
        code = "import numpy as np\nprint(np.linalg.solve(np.eye(2) * 2, np.ones(2)), np.random.rand())"
        assert tool.run(code).output == tool.run(code).output
        assert tool.run(code).output.startswith("[0.5 0.5] ")
        assert tool.run("import sympy.physics.units, mpmath\nmpmath.mpf(1)").output == "1.0"
        assert "No module named 'pydantic'" in tool.run("import pydantic").output


@needs_locks
def test_a_missing_package_is_refused_before_the_first_call(tmp_path: Path) -> None:
    with pytest.raises(ToolUnavailable, match="no_such_package") as caught:
        PythonTool(PythonToolConfig(packages=("no_such_package",), scratch_folder=str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert server_pids(tmp_path) == []


def test_missing_locks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "problems", lambda: ("Landlock", "seccomp"))
    with pytest.raises(ToolUnavailable, match="lacks Landlock and seccomp") as caught:
        PythonTool(PythonToolConfig())
    assert "\n" not in str(caught.value)


def test_missing_locks_can_be_allowed_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    with pytest.warns(RuntimeWarning, match="NOT SANDBOXED"):
        tool = PythonTool(PythonToolConfig(allow_unsafe=True, wall_seconds=1))
    with tool:
        found = tool.run("6 * 7")
        assert (found.output, found.status, found.sandboxed) == ("42", "ok", False)
        assert tool.run("while True: pass").status == "timeout"
        tool.check()


@needs_locks
def test_check_passes_and_finds_a_lock_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with PythonTool(PythonToolConfig()) as tool:
        tool.check()
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    monkeypatch.setattr(sandbox, "problems", tuple)
    with PythonTool(PythonToolConfig()) as tool, pytest.raises(ToolUnavailable, match="does not hold"):
        tool.check()


@pytest.mark.parametrize(
    "wrong", [{"wall_seconds": 0}, {"memory_bytes": -1}, {"num_servers": 0}, {"max_output_chars": 0}]
)
def test_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="greater than 0"):
        PythonToolConfig(**wrong)  # type: ignore[arg-type]


def test_the_config_travels() -> None:
    config = PythonToolConfig(packages=("sympy",), wall_seconds=3)
    assert pickle.loads(pickle.dumps(config)) == config


@needs_locks
def test_many_threads_get_their_own_answers() -> None:
    with PythonTool(PythonToolConfig(num_servers=2)) as tool, ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(
                lambda i: tool.run(f"import os\nopen('{i}', 'w').close()\nprint({i}, os.listdir())"),
                range(40),
            )
        )
    assert [one.output for one in found] == [f"{i} ['{i}']" for i in range(40)]


@needs_locks
def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        tool = threads.submit(PythonTool, PythonToolConfig(scratch_folder=str(tmp_path))).result()
    with tool:
        (first,) = server_pids(tmp_path)
        time.sleep(0.05)
        assert tool.run("6 * 7").output == "42"
        assert server_pids(tmp_path)[0] == first
        assert tool.num_restarts == 0


@needs_locks
def test_a_lost_server_is_started_again_once(tmp_path: Path) -> None:
    with PythonTool(PythonToolConfig(scratch_folder=str(tmp_path))) as tool:
        (pid,) = server_pids(tmp_path)
        os.kill(pid, signal.SIGKILL)
        assert tool.run("6 * 7").output == "42"
        assert tool.num_restarts == 1
        assert len(list(tmp_path.iterdir())) == 1  # the lost server's folder is gone
    assert list(tmp_path.iterdir()) == []


@needs_locks
def test_a_server_lost_twice_is_a_fault_and_the_tool_recovers(tmp_path: Path) -> None:
    with PythonTool(PythonToolConfig(scratch_folder=str(tmp_path))) as tool, ThreadPoolExecutor(1) as threads:
        call = threads.submit(tool.run, "import time\ntime.sleep(9)")
        for _ in range(2):
            victims = killed_in_call(tmp_path)
            assert victims
        with pytest.raises(ToolFault, match="lost twice"):
            call.result(timeout=60)
        assert tool.run("6 * 7").output == "42"


def killed_in_call(folder: Path) -> list[int]:
    """Kill a server (the oldest of its family) once it has a call under way; the pids that were killed or
    died with it.
    """
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pids = server_pids(folder)
        if len(pids) == 3:
            os.kill(min(pids), signal.SIGKILL)
            while any(pid in server_pids(folder) for pid in pids) and time.monotonic() < end:
                time.sleep(0.01)
            return pids
        time.sleep(0.01)
    return []


@needs_locks
def test_an_interrupted_call_does_not_answer_the_next_one() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with PythonTool(PythonToolConfig()) as tool:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                tool.run("import time\ntime.sleep(.5)\nprint('late')")
            time.sleep(0.5)
            assert tool.run("6 * 7").output == "42"
    finally:
        signal.signal(signal.SIGALRM, before)


@needs_locks
def test_after_close_every_call_is_a_fault(tmp_path: Path) -> None:
    tool = PythonTool(PythonToolConfig(scratch_folder=str(tmp_path)))
    tool.close()
    tool.close()
    assert list(tmp_path.iterdir()) == []
    assert server_pids(tmp_path) == []
    with pytest.raises(ToolFault, match="closed"):
        tool.run("1")


PARENT = """
import os, sys, threading, time
from outrider.tools.python.tool import PythonTool, PythonToolConfig
tool = PythonTool(PythonToolConfig(scratch_folder=sys.argv[1], wall_seconds=60))
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(8)  # a worker of a data loader: it holds a copy of the socket
    os._exit(0)
threading.Thread(target=tool.run, args=("import time; time.sleep(50)" if sys.argv[2] == "busy" else "1",)\
).start()
time.sleep(0.5)
print("up", flush=True)
time.sleep(60)
"""


@needs_locks
@pytest.mark.parametrize("state", ["idle", "busy", "fork"])
def test_everything_ends_with_a_killed_parent(tmp_path: Path, state: str) -> None:
    source = str(Path(sandbox.__file__).parents[3])
    command = [sys.executable, "-c", PARENT, str(tmp_path), state]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"up\n"
            num_servers = len(server_pids(tmp_path))
        finally:
            parent.kill()
        assert num_servers == (3 if state == "busy" else 1)
        end = time.monotonic() + 30
        while (server_pids(tmp_path) or any(tmp_path.iterdir())) and time.monotonic() < end:
            time.sleep(0.02)
        assert server_pids(tmp_path) == []
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("\n  ```py\nx = 1\nprint(x)\n```\n", "x = 1\nprint(x)"),
        ("```\nprint(1)", "print(1)"),
        ("~~~python\nprint('```')\n~~~", "print('```')"),
        ("\n    x = 6\n    print(x)\n", "\nx = 6\nprint(x)\n"),
        ("x = 6\n    print(x)", "x = 6\nprint(x)"),
        ("```python\n    x = 6\n    print(x)\n```", "x = 6\nprint(x)"),
        ("if x:\n    print(x)", "if x:\n    print(x)"),
        ("x = """ + '"""' + "\n    a\n    " + '"""', "x = """ + '"""' + "\n    a\n    " + '"""'),
        ("f(1,\n  2)", "f(1,\n  2)"),
        ("x = 1\n    y = = 2", "x = 1\n    y = = 2"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_fence_and_a_shared_indentation_are_taken_off(text: str, code: str) -> None:
    assert extract_code(text) == code
