"""Stops: the first signal requests a checkpoint, a second one ends the process, and all handlers are
restored.
"""

import _thread
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import SchemaError

from outrider import cli
from outrider.commands import buffer as buffers
from outrider.commands import train as training
from outrider.commands import view as viewing
from outrider.commands.train import stoppable
from outrider.errors import ConfigError
from outrider.signals import exit_on_second_signal, stop_on_interrupt

Install = Callable[[Callable[[], None]], None]


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_requests_a_stop_and_sets_the_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        press()
        asked.append("went on to the end of the step")

    assert stoppable(run) == 130
    assert (
        asked == ["stop", "went on to the end of the step"]
        and "A second signal ends at once" in capfd.readouterr().err
    )


def test_a_wrapper_may_send_one_request_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """``timeout`` signals its child and the child's process group."""
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        with exit_on_second_signal(""):
            press()
            press()
        asked.append("went on to the end of the step")

    assert stoppable(run) == 130
    assert (
        asked == ["stop", "went on to the end of the step"] and capfd.readouterr().err.count("outrider:") == 1
    )


def test_sigterm_alone_is_a_clean_exit() -> None:
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        os.kill(os.getpid(), signal.SIGTERM)

    assert stoppable(run) == 0 and asked == ["stop"]


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stoppable(lambda install: install(lambda: None))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with exit_on_second_signal(""):
        listening = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(listening)
    assert listening != -1 and signal.set_wakeup_fd(-1) == -1


def test_the_handler_of_asyncio_is_replaced_because_the_block_keeps_its_loop_from_acting() -> None:
    requests: list[bool] = []

    async def main() -> bool:
        with stop_on_interrupt(lambda: requests.append(True)) as stop_requested:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        return stop_requested.is_set()

    assert asyncio.run(main()) and requests == [True]


def test_outside_of_the_main_thread_nothing_is_installed() -> None:
    ran: list[str] = []

    def command() -> None:
        with exit_on_second_signal(""):
            ran.append("without an error")

    thread = threading.Thread(target=command)
    thread.start()
    thread.join(10)
    assert ran == ["without an error"]


INT, TERM = signal.SIGINT, signal.SIGTERM
SWALLOWS = """
    while True:
        try:
            print("stuck", flush=True)
            time.sleep(60)
        except BaseException:
            pass
"""
IN_C = """
    print("stuck", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # without an eye on signals
"""
WAITS = """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        print("stuck", flush=True)
        pool.submit(time.sleep, 60).result()
"""
COMMAND = """
import concurrent.futures, hashlib, signal, time
from outrider import cli
from outrider.commands import train as training
# a shell's background jobs inherit that it is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def stuck(install):
    install(lambda: None)
{stuck}
training._train = lambda parsed: training.stoppable(stuck) if {asks} else stuck(lambda stop: None)
cli.main(["train", "x.toml", "--run", "r"])
"""


@pytest.mark.parametrize(
    ("stuck", "signals", "asks"),
    [
        (IN_C, (TERM, INT), True),
        (WAITS, (TERM, TERM), True),
        (SWALLOWS, (INT, INT), False),  # of a command that asks for no checkpoint: it met a KeyboardInterrupt
    ],
    ids=["in C", "waits", "swallows without checkpoints"],
)
def test_a_second_signal_of_any_kind_ends_whatever_the_run_is_doing(
    stuck: str, signals: tuple[signal.Signals, signal.Signals], asks: bool
) -> None:
    code = COMMAND.format(stuck=stuck, asks=asks)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "stuck\n"
    try:
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signals[1], stderr
    last = stderr.splitlines()[-1]
    assert last == "outrider: ended at once by a second signal; continue with: outrider train --resume r"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["train", "x.toml", "--run", "r"],
            "outrider: interrupted; continue with: outrider train --resume r\n",
        ),
        (
            ["train", "--resume", "my run"],
            "outrider: interrupted; continue with: outrider train --resume 'my run'\n",
        ),
        (["buffer", "build", "x.toml", "--out", "b"], "outrider: interrupted; the same command continues\n"),
        (["report", "r"], "outrider: interrupted\n"),
    ],
)
def test_an_interrupted_command_prints_how_to_continue_it(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    for module, command in ((training, "_train"), (buffers, "_build"), (viewing, "_report")):
        monkeypatch.setattr(module, command, interrupted)
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == reason


def test_an_interruption_inside_of_a_pydantic_error_is_recognized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that met a schema while it was built: the import of a module of ours failed, with status 2."""
    said = 'Error building "default" validator:\n  SchemaError: Error building "literal" validator:\n  {}: '

    def interrupted(*_: object) -> int:
        try:
            raise SchemaError(said.format(kind))
        except SchemaError as error:
            raise ConfigError("the module 'mine' cannot be imported") from error

    monkeypatch.setattr(training, "_train", interrupted)
    kind = "KeyboardInterrupt"
    assert cli.main(["train", "--resume", "r"]) == 130
    kind = "ValueError"
    assert cli.main(["train", "--resume", "r"]) == 2
    assert capsys.readouterr().err == (
        "outrider: interrupted; continue with: outrider train --resume r\n"
        "outrider: the module 'mine' cannot be imported\n"
    )


class Lost:
    """What Python calls back, and whose errors it prints and forgets."""

    def __del__(self) -> None:
        press()


def test_an_interruption_that_python_would_print_and_forget_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It met a finaliser, or the callback at the end of an import: a traceback, and the run went on. And it
    wakes a thread that waits, which a flag of the interpreter's does not.
    """

    def command(*_: object) -> int:
        lost = Lost()
        del lost
        return int(not threading.Event().wait(120))

    monkeypatch.setattr(viewing, "_report", command)
    before, began = sys.unraisablehook, time.monotonic()
    assert cli.main(["report", "r"]) == 130 and time.monotonic() - began < 60
    assert capsys.readouterr().err == "outrider: interrupted\n" and sys.unraisablehook is before


def test_an_interruption_is_not_lost_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine the main thread may still be where the first one was lost."""
    started = _thread.start_new_thread

    def slow(*given: Any) -> int:
        name = started(*given)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        return name

    def command(*_: object) -> int:
        monkeypatch.setattr(_thread, "start_new_thread", slow)
        lost = Lost()
        del lost
        return int(not threading.Event().wait(10))

    monkeypatch.setattr(viewing, "_report", command)
    with exit_on_second_signal("r"):  # which it is not, although it comes late
        assert cli.main(["report", "r"]) == 130
    assert capsys.readouterr().err == "outrider: interrupted\n"


def test_a_repeated_signal_in_place_of_a_lost_one_is_not_repeated_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`timeout` signals its child twice. A third interruption would end the clean-up of the second."""
    monkeypatch.setattr("outrider.signals._BEHIND_S", 0.1)
    cleaned_up: list[bool] = []

    def command(*_: object) -> int:
        lost = Lost()
        del lost
        try:
            press()
            return 0
        finally:
            time.sleep(0.3)
            cleaned_up.append(True)

    monkeypatch.setattr(viewing, "_report", command)
    assert cli.main(["report", "r"]) == 130
    assert capsys.readouterr().err == "outrider: interrupted\n" and cleaned_up


def test_what_else_python_forgets_is_still_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    reason: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reason.append(lost.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise LookupError

    def command(*_: object) -> int:
        Broken()
        return 0

    monkeypatch.setattr(viewing, "_report", command)
    assert cli.main(["report", "r"]) == 0 and reason == [LookupError]


IMPORTING = """
import builtins, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
real = builtins.__import__

def imported(name, *rest, **named):
    if name == "argparse":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **named)

builtins.__import__ = imported
sys.argv = ["outrider", "--version"]
runpy.run_module("outrider.__main__", run_name="__main__")
"""


def test_an_interruption_while_the_command_line_is_imported_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_interruption_while_the_arguments_are_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The campaign of kills sends a SIGINT from the first instant of the command on."""

    def interrupted(commands: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_parser", interrupted)
    assert cli.main(["report", "r"]) == 130
    assert capsys.readouterr().err == "outrider: interrupted\n"
