"""Ctrl-C in a terminal: the display says that it is stopping, nothing is drawn over, and a second press
ends with one line."""

import time
from pathlib import Path

import pytest
import torch

from outrider.signals import _REPEAT_S, STOPPING
from outrider.training import learner
from tests.log_lines import messages
from tests.training.terminal import OnTerminal, Screen
from tests.training.tool_run import write_tool_run

OVERRIDES = (
    "train.num_steps=400",
    "evaluation.at_start=false",
    "evaluation.every=0",
    "evaluation.num_tasks=1",
)
TOLD = "outrider: stopping (an update in flight ends first); what is finished goes into a checkpoint."


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("runs") / "data")


def update_without_end() -> None:
    """In the command's process: the first update computes for ever."""

    def compute(*_: object, **__: object) -> None:
        print("in the update", flush=True)
        square = torch.eye(256)
        while True:
            square = square @ square

    learner.update = compute  # type: ignore[attr-defined]


def command(recipe: Path, run: Path, progress: str) -> tuple[str | Path, ...]:
    return ("train", recipe, "--run", run, "--progress", progress, *OVERRIDES)


@pytest.mark.parametrize("progress", ["rich", "plain"])
def test_a_second_press_in_an_update_ends_with_one_line(recipe: Path, tmp_path: Path, progress: str) -> None:
    on = OnTerminal(*command(recipe, tmp_path / "r", progress), prepare=update_without_end)
    try:
        on.wait_for("in the update")
        on.press_ctrl_c()
        on.wait_for(STOPPING if progress == "rich" else TOLD)
        if progress == "rich":  # and it stays, once, under the stage
            on.wait_for_redraws(3)
            on.wait_for(STOPPING)  # the last redraw may be incomplete
            last = on.screen.shown[-1]
            assert [STOPPING in line for line in on.screen.shown].count(True) == 1 and STOPPING in last
            assert not any("outrider: stopping" in line for line in on.screen.shown)
        time.sleep(2 * _REPEAT_S)  # a clock of the code: earlier, it would be the same request
        on.press_ctrl_c()
        status = on.end()
    finally:
        on.kill()
    shown = on.screen.shown
    assert status == 130 and on.screen.is_cursor_shown
    how = f"continue with: outrider train --resume {tmp_path / 'r'}"
    assert shown[-1] == f"outrider: ended at once by a second signal; {how}"
    assert not any("Traceback" in line or "Error" in line for line in shown)
    if progress == "rich":  # the display is gone
        assert not any(STOPPING in line or ("elapsed" in line and "left" in line) for line in shown)


@pytest.mark.parametrize("progress", ["rich", "plain"])
def test_one_press_ends_with_a_checkpoint_and_whole_lines(
    recipe: Path, tmp_path: Path, progress: str
) -> None:
    on = OnTerminal(*command(recipe, tmp_path / "r", progress))
    try:
        on.wait_for("train: start, 400" if progress == "plain" else "reward")
        on.press_ctrl_c()
        status = on.end()
    finally:
        on.kill()
    shown = messages("\n".join(on.screen.shown))
    assert status == 130 and on.screen.is_cursor_shown
    stopped = next(line for line in shown if line.startswith("stopped on request after step "))
    assert stopped.endswith(f"--resume {tmp_path / 'r'}")
    assert any(line.startswith("report: ") for line in shown)
    assert not any("Traceback" in line for line in shown) and not any(STOPPING in line for line in shown)
    assert any(TOLD in line for line in shown) == (progress == "plain")


def test_the_screen_shows_what_a_terminal_would() -> None:
    screen = Screen()
    screen.feed("one\r\ntwo\r\nthree\x1b[?25l\r\x1b[2K\x1b[1A\x1b[2Kfour\rF")
    assert screen.shown == ["one", "Four"] and not screen.is_cursor_shown
