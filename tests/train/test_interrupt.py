"""Ctrl-C: the first asks for a checkpoint, the second ends at once, and nothing stays installed in the process."""

import os
import signal
from collections.abc import Callable

import pytest

from outrider import cli
from outrider.cli import _stoppable

Install = Callable[[Callable[[], None]], None]


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_asks_for_a_stop_and_the_exit_status_tells(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        press()
        asked.append("went on to the end of the step")

    assert _stoppable(run) == 130
    assert asked == ["stop", "went on to the end of the step"] and "Ctrl-C again ends at once" in capfd.readouterr().err


def test_the_second_one_ends_at_once() -> None:
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        press()
        press()
        asked.append("never")

    with pytest.raises(KeyboardInterrupt):
        _stoppable(run)
    assert asked == ["stop"]


def test_sigterm_alone_is_a_clean_exit() -> None:
    asked: list[str] = []

    def run(install: Install) -> None:
        install(lambda: asked.append("stop"))
        os.kill(os.getpid(), signal.SIGTERM)

    assert _stoppable(run) == 0 and asked == ["stop"]


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    _stoppable(lambda install: install(lambda: None))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "x.toml", "--run", "r"], "outrider: interrupted; continue with: outrider train --resume RUN\n"),
        (["buffer", "build", "x.toml", "--out", "b"], "outrider: interrupted; the same command continues\n"),
        (["view", "r"], "outrider: interrupted\n"),
    ],
)
def test_an_interrupted_command_says_how_it_goes_on_where_it_does(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    for command in ("_train", "_buffer_build", "_view"):
        monkeypatch.setattr(cli, command, interrupted)
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == told
