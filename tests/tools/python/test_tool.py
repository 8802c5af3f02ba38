"""The Python tool as a caller sees it: values, errors, cuts, packages, limits, threads, missing locks."""

import ast
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.errors import ConfigError, ToolUnavailable
from outrider.tools.python import sandbox
from outrider.tools.python.tool import PythonTool, PythonToolConfig, cut, extract_code
from outrider.tools.python.worker import print_last_expression
from tests.tools.python.processes import needs_locks, server_pids

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
    with PythonTool(PythonToolConfig(wall_seconds=5, max_output_chars=1000)) as tool:
        yield tool


@pytest.mark.parametrize(("code", "rewritten", "_"), RELEASED)
def test_rewriting_agrees_with_the_released_tool(code: str, rewritten: str, _: str) -> None:
    assert ast.unparse(print_last_expression(code)) == ast.unparse(ast.parse(rewritten))


@needs_locks
@pytest.mark.parametrize(("code", "_", "output"), RELEASED)
def test_results_agree_with_the_released_tool(tool: PythonTool, code: str, _: str, output: str) -> None:
    result = tool.run(code)
    if code == "1/0":
        assert (result.status, result.output.splitlines()[-1]) == ("error", output)
    else:
        assert (result.status, result.output) == ("ok", output)
    assert not result.truncated
    assert result.sandboxed


@given(st.integers() | st.text() | st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_last_expression_prints_its_value(value: object) -> None:
    lines: list[object] = []
    program = compile(print_last_expression(f"x = 1\n{value!r}"), "test", "exec")
    exec(program, {"print": lines.append})
    assert lines == [value]


@given(st.text(max_size=300), st.integers(1, 200))
def test_cut_keeps_both_ends_and_marks_the_middle(text: str, max_chars: int) -> None:
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
        ("  \n# only a comment\n", "error", "[error: no code to run]"),
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
def test_statuses_and_outputs(tool: PythonTool, code: str, status: str, output: str) -> None:
    result = tool.run(code)
    assert result.status == status
    if status == "ok" or not output:
        assert result.output == output
    else:
        assert output in result.output


@needs_locks
def test_a_traceback_has_frames_of_the_program_and_no_frame_of_the_tool(tool: PythonTool) -> None:
    result = tool.run("print('before')\ndef half(x):\n    return x / 0\nhalf(3)")
    lines = result.output.splitlines()
    assert lines[:2] == ["before", "Traceback (most recent call last):"]
    assert [line.strip() for line in lines if "File" in line] == [
        'File "<python>", line 4, in <module>',
        'File "<python>", line 3, in half',
    ]
    assert "    return x / 0" in lines
    result = tool.run(
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as error:\n"
        "    raise KeyError('k') from error"
    )
    assert result.output.count("Traceback") == 2
    assert result.output.count('File "') == result.output.count('File "<python>"') == 2
    result = tool.run(
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as error:\n"
        "    raise ExceptionGroup('lines', [error, ExceptionGroup('others', [error])]) from None"
    )
    assert result.output.count('File "') == result.output.count('File "<python>"') == 3
    assert result.output.count("JSONDecodeError") == 2


@needs_locks
def test_a_long_output_is_cut_with_a_mark(tool: PythonTool) -> None:
    result = tool.run("print('a' * 3000)\n1/0")
    assert (result.status, result.truncated) == ("error", True)
    assert "characters cut" in result.output
    assert result.output.startswith("a" * 500)
    assert result.output.endswith("ZeroDivisionError: division by zero")


@needs_locks
def test_calls_share_no_state_and_repeat_exactly(tool: PythonTool) -> None:
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
def test_generators_without_a_seed_repeat_exactly() -> None:
    pytest.importorskip("sympy")
    pytest.importorskip("numpy")
    code = (
        "import numpy, os, random, secrets, sympy, tempfile, uuid\n"
        "print(random.Random().random(), random.SystemRandom().random(), secrets.randbelow(10**9))\n"
        "print(uuid.uuid4(), os.urandom(4), numpy.random.default_rng().random(), random.Random(1).random())\n"
        "print(sympy.randprime(1, 10**9), sympy.randMatrix(1, 2, 0, 10**6))\n"
        "random.seed(), numpy.random.seed()\n"
        "print(random.random(), numpy.random.rand())\n"
        "with tempfile.TemporaryFile() as a, tempfile.NamedTemporaryFile() as b: print(b.write(b'abc'))"
    )
    outputs = set()
    for _ in range(2):
        with PythonTool(PythonToolConfig(packages=("sympy", "numpy"))) as tool:
            for _ in range(2):
                result = tool.run(code)
                assert result.status == "ok", result.output
                outputs.add(result.output)
    assert len(outputs) == 1
    assert "0.13436424411240122" in outputs.pop()  # of random.Random(1): a given seed counts


@needs_locks
def test_a_limit_on_code_that_prints_slowly_keeps_what_was_printed() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=0.3)) as tool:
        result = tool.run("import time\nfor i in range(100):\n    print(i)\n    time.sleep(.05)")
    assert result.status == "timeout"
    assert result.output.startswith("0\n1\n")
    assert result.output.endswith("[stopped: ran longer than 0.3 s]")
    assert 0.3 <= result.seconds < 2


@needs_locks
def test_processor_time_is_limited_apart_from_wall_time() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=60, cpu_seconds=1)) as tool:
        result = tool.run("print('begun')\nwhile True: pass")
    assert (result.status, result.output) == (
        "timeout",
        "begun\n[stopped: used more than 1 s of processor time]",
    )


@needs_locks
def test_standard_error_comes_after_what_was_printed_before(tool: PythonTool) -> None:
    code = "import sys\nprint('sum:', end=' ')\nprint('warning', end=' ', file=sys.stderr)\nprint(3)"
    assert tool.run(code).output == "sum: warning 3"
    assert tool.run("import sys\nsys.stdout.close()\nprint('a', file=sys.stderr)").output == "a"


@needs_locks
@pytest.mark.parametrize(("limit", "code"), [
    ("wall", "import time\ntime.sleep(9)"), ("wall", "while True: pass"), ("cpu", "while True: pass"),
])  # fmt: skip
def test_a_time_limit_keeps_what_is_buffered(limit: str, code: str) -> None:
    config = PythonToolConfig(wall_seconds=0.3 if limit == "wall" else 60, cpu_seconds=1)
    with PythonTool(config) as tool:
        result = tool.run(f"print('42', end='')\n{code}")
    assert result.status == "timeout"
    assert result.output.startswith("42\n[stopped: ")


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
def test_libraries_that_the_code_loads_start_no_threads(tool: PythonTool) -> None:
    assert (
        tool.run("import os\nos.environ['OPENBLAS_NUM_THREADS'] + os.environ['OMP_NUM_THREADS']").output
        == "11"
    )


@needs_locks
def test_coroutines_run(tool: PythonTool) -> None:
    code = """
import asyncio

async def double(n):
    await asyncio.sleep(0.01 * (3 - n))
    print(n, end=" ")
    return 2 * n

async def main():
    async with asyncio.timeout(5):
        return await asyncio.gather(*map(double, range(3)))

print(asyncio.run(main()))
loop = asyncio.new_event_loop()
print(loop.run_until_complete(double(1)))
loop.close()
assert loop.is_closed()
"""
    result = tool.run(code)
    assert (result.status, result.output) == ("ok", "2 1 0 [0, 2, 4]\n1 2")


@needs_locks
def test_submodules_of_scipy_can_be_imported() -> None:
    pytest.importorskip("scipy")
    with PythonTool(PythonToolConfig(packages=("numpy", "scipy"))) as tool:
        assert tool.run("from scipy.linalg import det\nround(det([[1, 2], [3, 4]]))").output == "-2"


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


def test_missing_locks_can_be_allowed_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    with pytest.warns(RuntimeWarning, match="NOT SANDBOXED"):
        tool = PythonTool(PythonToolConfig(allow_unsafe=True, wall_seconds=0.3))
    with tool:
        result = tool.run("6 * 7")
        assert (result.output, result.status, result.sandboxed) == ("42", "ok", False)
        assert tool.run("while True: pass").status == "timeout"
        tool.check()


@needs_locks
def test_a_lock_that_does_not_work_is_reported_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PythonTool(PythonToolConfig()) as tool:
        tool.check()
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    monkeypatch.setattr(sandbox, "problems", tuple)
    with pytest.raises(ToolUnavailable, match="does not hold"):
        ToolEnvironment.build(ToolsConfig(tools=("python",))).make()


@pytest.mark.parametrize(
    "options", [{"wall_seconds": 0}, {"memory_bytes": -1}, {"num_servers": 0}, {"max_output_chars": 0}]
)
def test_limits_must_be_positive(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="greater than 0"):
        PythonToolConfig(**options)  # type: ignore[arg-type]


def test_the_config_can_be_pickled() -> None:
    config = PythonToolConfig(packages=("sympy",), wall_seconds=3)
    assert pickle.loads(pickle.dumps(config)) == config


@needs_locks
def test_many_threads_get_their_own_answers() -> None:
    with PythonTool(PythonToolConfig(num_servers=2)) as tool, ThreadPoolExecutor(8) as threads:
        result = list(
            threads.map(
                lambda i: tool.run(f"import os\nopen('{i}', 'w').close()\nprint({i}, os.listdir())"),
                range(16),
            )
        )
    assert [item.output for item in result] == [f"{i} ['{i}']" for i in range(16)]


@needs_locks
def test_the_scratch_folder_may_be_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    with PythonTool(PythonToolConfig(scratch_folder="scratch")) as tool:
        assert tool.run("6 * 7").output == "42"
    assert list((tmp_path / "scratch").iterdir()) == []


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
        ("  # text\nx = '''\n   \n  a'''", "  # text\nx = '''\n   \n  a'''"),
        ("~~~x\n1", "~~~x\n1"),
        ("x = 1\n    y = = 2", "x = 1\n    y = = 2"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_fence_and_a_shared_indentation_are_stripped(text: str, code: str) -> None:
    assert extract_code(text) == code
