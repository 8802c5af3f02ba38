"""Progress: what a person or a CI log sees, with a clock that the test turns."""

import io
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outrider.errors import ConfigError
from outrider.printing import one_line
from outrider.viewer import progress as progress_module
from outrider.viewer.progress import (
    Field,
    PlainProgress,
    Progress,
    RichProgress,
    StageClock,
    TokenMeter,
    compact,
    duration,
    make_progress,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(stream=stream, clock=clock), stream


def test_plain_thins_out_reports_that_carry_nothing_new() -> None:
    progress, stream = plain(Clock())
    progress.stage("train", 10)
    for _ in range(100):
        progress.advance(0)
    assert len(stream.getvalue().splitlines()) == 2


def test_plain_prints_every_slow_event_on_one_line() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 2)
    clock.now += 30.0
    progress.advance(1, reward=0.25, tokens_per_s=1234.56)
    clock.now += 30.0
    progress.note("checkpoint\nsaved")
    progress.advance(2, reward=0.75)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "train: start, 2 to do",
        "train 1/2  reward 0.250  tokens_per_s  1235  elapsed 0:30   left 0:30",
        "checkpoint saved",
        "train 2/2  reward 0.500  elapsed 1:00",
    ]


@pytest.mark.parametrize("pace", [0.01, 0.4, 3.0, 4.9, 7.0])
def test_plain_is_never_silent_for_ten_seconds_while_work_is_reported(pace: float) -> None:
    clock = Clock()
    printed: list[float] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            printed.append(clock.now)

    progress = PlainProgress(stream=Stream(), clock=clock)
    progress.stage("buffer", 10_000)
    num_reports = int(60 / pace)
    for done in range(1, num_reports + 1):
        clock.now += pace
        progress.advance(done)
    gaps = [b - a for a, b in zip(printed, [*printed[1:], clock.now], strict=True)]
    assert max(gaps) <= 10.0
    assert len(printed) <= 16  # and fast work does not flood the log


def test_plain_prints_the_last_state_of_a_stage_that_ends_between_lines() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("cold start", 50)
    for done in (1, 2, 3):
        progress.advance(done)
    progress.stage("train", None)
    progress.close()
    assert [line.partition("  elapsed")[0] for line in stream.getvalue().splitlines()] == [
        "cold start: start, 50 to do",
        "cold start  1/50",
        "cold start  3/50",
        "train: start",
    ]


def test_plain_survives_a_closed_pipe_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("gone")

    progress = PlainProgress(stream=Broken(), clock=Clock())
    progress.stage("train", 1)
    progress.advance(1)
    assert [record.message for record in caplog.records] == [
        "progress display stopped, the run continues: gone"
    ]


def test_plain_replaces_what_the_stream_cannot_encode() -> None:
    raw = io.BytesIO()
    progress = PlainProgress(stream=io.TextIOWrapper(raw, encoding="ascii"), clock=Clock())
    progress.note("EMPO² \x1b[31mred\r")
    assert raw.getvalue() == b"EMPO?  [31mred \n"


def test_advance_before_a_stage_is_shown_and_not_an_error() -> None:
    progress, stream = plain(Clock())
    progress.advance(1)
    assert "run 1" in stream.getvalue()


def test_rich_shows_stage_count_fields_and_message_without_reading_markup() -> None:
    clock = Clock()
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    progress = RichProgress(console=console, clock=clock)
    progress.stage("train", 4)
    clock.now += 6.0
    progress.advance(1, reward=0.5)
    progress.note("[bold]kept[/bold] \x1b[2J")
    with console.capture() as capture:
        console.print(progress._render())
    progress.close()
    progress.close()
    shown = capture.get()
    for part in ("train", "1/4", "reward 0.5", "elapsed 0:06", "left 0:18", "[bold]kept[/bold]  [2J"):
        assert part in shown
    # stays after the display is gone
    assert "train 1/4  reward 0.500  elapsed 0:06   left 0:18" in stream.getvalue()


def test_make_progress_is_plain_without_a_terminal_and_refuses_unknown_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(make_progress(), PlainProgress)
    assert type(make_progress("none")) is Progress
    with pytest.raises(ConfigError, match="not one of"):
        make_progress("loud")  # type: ignore[arg-type]


def test_one_line_leaves_only_printable_characters() -> None:
    assert one_line("a\tb\x1b]0;title\x07\u202e c\u2028") == "a b ]0;title   c "


def test_each_step_has_one_line_of_stable_columns_within_80() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 1000, line_per_unit=True)
    for step, reward in enumerate((-0.25, 0.5, 123.4), start=1):
        for rollouts in range(8):  # they come within a second
            progress.advance(step - 1, generated=rollouts * 1000, rollouts=f"{rollouts}/64")
        clock.now += 0.5
        progress.advance(step, **{"reward": reward, "no signal": 0.5, "s/step": 9.87, "tokens/s": 12345.0})
    lines = [line for line in stream.getvalue().splitlines() if "reward" in line]
    assert [line.split()[1] for line in lines] == ["1/1000", "2/1000", "3/1000"]
    for name in ("no signal", "s/step", "left"):
        assert len({line.index(name) for line in lines}) == 1
    assert all(len(line) <= 80 for line in stream.getvalue().splitlines())


@given(
    st.text(max_size=60), st.integers(0, 10**7), st.floats(0, 1e7),
    st.dictionaries(st.text(max_size=12), st.floats() | st.integers() | st.text(max_size=20), max_size=8),
)  # fmt: skip
def test_no_report_is_wider_than_80_columns(
    name: str, total: int, seconds: float, fields: dict[str, Field]
) -> None:
    clock = Clock()
    stage = StageClock(name=name, total=total, clock=clock)
    clock.now += seconds
    stage.advance(total // 2, fields)
    assert len(stage.summary()) <= 80


@pytest.mark.parametrize("width", [80, 40])
def test_the_display_has_a_line_for_each_of_its_parts_at_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    progress = RichProgress(console=console, clock=Clock())
    progress.stage("evaluation before a cold start", 12345)
    progress.advance(1, **{f"a long field {number}": 1.0 for number in range(9)})
    other = Console(file=io.StringIO(), width=width, color_system=None)
    with other.capture() as capture:
        other.print(progress._render())
    progress.close()
    lines = capture.get().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= width and "12345" in lines[0]


@given(st.floats(-1e11, 1e11) | st.integers(-(10**11), 10**11))
def test_a_value_has_five_characters(value: float) -> None:
    assert len(compact(value)) <= 5


def test_values_keep_what_fits() -> None:
    values = (0.4125, -0.25, 123.45, 12345.6, 123456, 7, "3/64", -98765.0)
    assert [compact(one) for one in values] == [
        "0.412", "-0.25", "123.5", "12346", "123k", "7", "3/64", "-99k",
    ]  # fmt: skip


class HungUp(io.StringIO):
    """A terminal whose session has ended."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


# rich's own redrawing thread ends
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    stream = HungUp()
    progress = RichProgress(console=Console(file=stream, force_terminal=True, width=80), clock=Clock())
    progress.stage("train", 4)
    stream.gone = True
    progress.note("still here")
    progress.stage("evaluate", 2)
    progress.advance(1)
    progress.close()


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (0.4, 61.0, 3599.4, 3600.0, 6010.0)] == [
        "0:00", "1:01", "59:59", "1h00", "1h40",
    ]  # fmt: skip


def test_tokens_and_their_speed_are_shown_beside_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: float(next(seconds)))
    stream = io.StringIO()
    display = PlainProgress(stream=stream, interval=0.0)
    meter = TokenMeter(display)
    meter(8)  # an expert's tokens while the parts are made: no stage to show them in
    assert stream.getvalue() == ""
    display.stage("evaluate", 6)
    meter.num_done = lambda: 2
    for num_tokens in (4, 4, 2):
        meter(num_tokens)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "evaluate: start, 6 to do" and "tokens/s" not in lines[1]
    assert lines[-1].split()[:6] == ["evaluate", "2/6", "generated", "18", "tokens/s", "3"]
