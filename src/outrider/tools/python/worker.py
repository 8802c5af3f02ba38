"""Runs model-written code in a locked child: prints a last bare expression, reports the error. Standard
library only.
"""

import ast
import linecache
import os
import sys
import traceback
import types

FILENAME = "<python>"
EXIT_OK, EXIT_ERROR, EXIT_MEMORY = 0, 1, 77
_EMPTY = "[error: no code to run]"


def print_last_expression(code: str) -> ast.Module:
    """The parsed program; a last statement that is a bare expression, other than a call of ``print``, is
    printed.

    As in the released ARPO tool a last ``None`` prints ``None`` and the value is shown by ``str``. Line
    numbers are kept. SyntaxError (ValueError before Python 3.12 for a null byte) where the code does not
    parse.
    """
    tree = ast.parse(code, FILENAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not _is_print(last.value):
        call = ast.Call(func=ast.Name(id="print", ctx=ast.Load()), args=[last.value], keywords=[])
        tree.body[-1] = ast.copy_location(ast.Expr(value=ast.copy_location(call, last.value)), last)
    return ast.fix_missing_locations(tree)


def run_program(code: str) -> int:
    """Run ``code`` as a main program in this process; output and traceback go to its streams. The exit
    status.

    Never raises. A ``SystemExit`` means what it means to the interpreter: none or 0 is success, a text is
    printed.
    """
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    try:
        status = _run(code)
        sys.stdout.flush()
    except BaseException as error:
        status = _report(error)
    return status


def _run(code: str) -> int:
    tree = print_last_expression(code)
    if not tree.body:
        print(_EMPTY)
        return EXIT_ERROR
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(tree, FILENAME, "exec"), main.__dict__)
    return EXIT_OK


def _report(error: BaseException) -> int:
    try:
        sys.stdout.flush()
        if isinstance(error, SystemExit):
            return _exit_status(error.code)
        if isinstance(error, MemoryError):
            os.write(2, b"MemoryError\n")
            return EXIT_MEMORY
        print("".join(_program_traceback(error).format()), end="", file=sys.stderr)
    except MemoryError:
        return EXIT_MEMORY
    except BaseException:
        # The program closed or replaced its own streams; the status still says that it failed.
        return EXIT_ERROR
    return EXIT_ERROR


def _program_traceback(error: BaseException) -> traceback.TracebackException:
    """The traceback with the program's own lines only: paths of libraries differ between machines and cost
    tokens.
    """
    report = traceback.TracebackException.from_exception(error)
    parts = [report]
    for part in parts:  # grows while it is walked
        part.stack = traceback.StackSummary.from_list(
            [frame for frame in part.stack if frame.filename == FILENAME]
        )
        parts += [other for other in (part.__cause__, part.__context__) if other is not None]
    return report


def _exit_status(code: object) -> int:
    if code is None or code == 0:
        return EXIT_OK
    if not isinstance(code, int):
        print(code, file=sys.stderr)
    return EXIT_ERROR


def _is_print(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
