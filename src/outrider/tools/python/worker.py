"""Runs model-written code in the locked worker process. Uses the standard library only."""

import ast
import linecache
import os
import sys
import traceback
import types
from typing import Any

FILENAME = "<python>"
EXIT_OK, EXIT_ERROR, EXIT_MEMORY, EXIT_TIMEOUT = 0, 1, 77, 78


def print_last_expression(code: str) -> ast.Module:
    """Parse a program and wrap a bare last expression, unless it is a call of ``print``, in ``print(...)``.

    As in the released ARPO tool, a last ``None`` prints ``None`` and the value is formatted with ``str``.
    Line numbers are unchanged. Raises SyntaxError (before Python 3.12 ValueError for a null byte).
    """
    tree = ast.parse(code, FILENAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        node = last.value
        is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if not is_print:
            call = ast.Call(func=ast.Name(id="print", ctx=ast.Load()), args=[node], keywords=[])
            tree.body[-1] = ast.copy_location(ast.Expr(value=ast.copy_location(call, last.value)), last)
    return ast.fix_missing_locations(tree)


def allow_event_loops() -> None:
    """Let event loops of asyncio run without the system calls that the sandbox refuses (``epoll``, and the
    socket pair that only other threads and signals need to wake a loop).
    """
    import selectors
    from asyncio import selector_events

    loops: Any = selector_events.BaseSelectorEventLoop
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc, assignment]
    loops._csock = None
    loops._make_self_pipe = loops._close_self_pipe = lambda self: None


def run_program(code: str) -> int:
    """Run ``code`` as a main program in this process and return its exit status; never raises.

    Output and traceback go to the process's streams. ``SystemExit`` is handled as by the interpreter: None
    or 0 is success, a text is printed.
    """
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    try:
        tree = print_last_expression(code)
        if not tree.body:
            print("[error: no code to run]")
            sys.stdout.flush()
            return EXIT_ERROR
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if "asyncio" in code:  # its import takes a tenth of a second
            allow_event_loops()
        exec(compile(tree, FILENAME, "exec"), main.__dict__)
        sys.stdout.flush()
    except BaseException as error:
        return _report(error)
    return EXIT_OK


def _report(error: BaseException) -> int:
    try:
        sys.stdout.flush()
        if isinstance(error, SystemExit):
            if error.code is None or error.code == 0:
                return EXIT_OK
            if not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            return EXIT_ERROR
        if isinstance(error, MemoryError):
            os.write(2, b"MemoryError\n")
            return EXIT_MEMORY
        # Keep the program's own lines only: paths of libraries differ between machines and cost tokens.
        report = traceback.TracebackException.from_exception(error)
        parts = [report]
        for part in parts:  # grows during the loop
            part.stack = traceback.StackSummary.from_list(
                [frame for frame in part.stack if frame.filename == FILENAME]
            )
            parts += [other for other in (part.__cause__, part.__context__) if other is not None]
            parts += part.exceptions or ()
        print("".join(report.format()), end="", file=sys.stderr)
    except MemoryError:
        return EXIT_MEMORY
    except BaseException:
        # The program closed or replaced its own streams; the exit status still reports the failure.
        return EXIT_ERROR
    return EXIT_ERROR
