"""Progress: what a person or a CI log sees, with a clock that the test turns."""

import io
import json
import re
import sys
import time
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outrider.errors import ConfigError
from outrider.printing import one_line
from outrider.viewer.progress import (
    Field,
    JsonProgress,
    PlainProgress,
    Progress,
    ProgressMode,
    RichProgress,
    StageClock,
    TokenMeter,
    compact,
    duration,
    is_alarm,
    make_progress,
)
from tests.log_lines import texts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(stream=stream, clock=clock), stream


def test_plain_prints_no_report_twice() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 10, unit="step")
    for _ in range(100):
        clock.now += 10.0
        progress.advance(0, phase="update")
        progress.tick()
    assert texts(stream.getvalue()) == ["train: start, 10 to do", "step 1/10: update"]


def test_a_heartbeat_follows_a_minute_of_silence_and_names_what_is_done() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 9, done=3, unit="step")
    progress.advance(3, phase="collecting rollouts", rollouts="2/32")
    progress.advance(3, generated=5231)
    clock.now += 59.0
    progress.tick()
    assert len(texts(stream.getvalue())) == 1
    clock.now += 1.0
    progress.tick()
    progress.advance(3, phase="update")
    clock.now += 50.0
    progress.note("ALARM: a note breaks the silence")
    clock.now += 50.0
    progress.tick()
    clock.now += 10.0
    progress.tick()
    clock.now += 600.0
    progress.tick()  # nothing new
    progress.advance(4, reward=0.5)
    clock.now += 600.0
    progress.tick()  # the step has its line
    progress.stage("evaluation step 4", 64)
    progress.advance(12, generated=6000)
    clock.now += 61.0
    progress.tick()
    assert texts(stream.getvalue()) == [
        "train: 3 of 9 done",
        "step 4/9: collecting rollouts 2/32, generated 5231",
        "ALARM: a note breaks the silence",
        "step 4/9: update",
        "step 4/9  reward 0.500 (mean 0.500 of 1)  left 1h04",
        "evaluation step 4: start, 64 to do",
        "evaluation step 4 12/64: generated 6000, left 3:59",
    ]


def test_every_line_begins_with_the_time_and_a_new_day_with_its_date() -> None:
    now = [time.mktime((2026, 3, 1, 23, 59, 58, 0, 0, -1))]
    stream = io.StringIO()
    progress = PlainProgress(stream=stream, clock=Clock(), wall_clock=lambda: now[0])
    for text in ("one", "two", "three", "four"):
        progress.note(text)
        now[0] += 1.0
    assert stream.getvalue().splitlines() == [
        "2026-03-01 23:59:58 one", "23:59:59 two", "2026-03-02 00:00:00 three", "00:00:01 four",
    ]  # fmt: skip


def test_alarms_are_repeated_on_the_error_stream() -> None:
    errors = io.StringIO()
    progress = PlainProgress(stream=io.StringIO(), error_stream=errors, clock=Clock())
    for text in ("buffer: 8 steps", "ALARM: no rollout executed a tool call", "step 3: 2 rollouts were lost"):
        progress.note(text)
        assert is_alarm(text) == (not text.startswith("buffer"))
    progress.note("look at ALARM: again", event="summary")
    assert texts(errors.getvalue()) == [
        "ALARM: no rollout executed a tool call", "step 3: 2 rollouts were lost",
    ]  # fmt: skip


def test_alarms_reach_the_error_stream_after_the_log_broke() -> None:
    errors, log = io.StringIO(), io.StringIO()
    log.close()
    progress = PlainProgress(stream=log, error_stream=errors, clock=Clock())
    progress.note("buffer: 8 steps")
    progress.note("ALARM: no rollout executed a tool call")
    assert texts(errors.getvalue()) == ["ALARM: no rollout executed a tool call"]


def test_json_has_null_for_numbers_it_cannot_represent_at_any_depth() -> None:
    stream, before = io.StringIO(), sys.stdout
    progress = JsonProgress(stream=stream)
    progress.note("scores", scores={"a": [float("nan"), 1.0], 2: (float("inf"), {"b": -float("inf")})})
    progress.close()
    assert sys.stdout is before
    assert json.loads(stream.getvalue())["scores"] == {"a": [None, 1.0], "2": [None, {"b": None}]}


@pytest.mark.parametrize("mode", ["auto", "plain", "json"])
def test_a_closed_stdout_leaves_alarms_on_stderr(
    mode: ProgressMode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python sets stdout to None after ``>&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "__stdout__", None)
    progress = make_progress(mode)
    progress.stage("train", 1, unit="step")
    progress.note("ALARM: no rollout executed a tool call")
    progress.close()
    monkeypatch.undo()
    assert texts(capsys.readouterr().err)[-1] == "ALARM: no rollout executed a tool call"


def test_json_has_an_object_per_event_and_stdout_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    progress = make_progress("json")
    assert isinstance(progress, JsonProgress)
    progress.stage("train", 2, unit="step")
    print("a library's message")
    fields: dict[str, Field] = {"no signal": float("nan"), "tokens/s": 8.0, "truncated": "1: x"}
    progress.advance(1, reward=0.25, **fields)
    progress.note("ALARM: \x1b[2J", event="note", number=3)
    progress.note("saved", event="checkpoint", path="runs/a b")
    progress.close()
    progress.close()
    assert sys.stdout is before
    output = capsys.readouterr()
    records = [json.loads(line) for line in output.out.splitlines()]
    assert output.err == "a library's message\n" and all(record.pop("time") > 1e9 for record in records)
    assert records == [
        {"event": "stage", "stage": "train", "done": 0, "total": 2},
        {"event": "step", "step": 1, "total": 2, "reward": 0.25, "no_signal": None, "tokens_per_s": 8.0,
         "truncated": "1: x", "reward_mean": 0.25, "reward_mean_num": 1,
         "seconds_left": records[1]["seconds_left"]},
        {"event": "alarm", "text": "ALARM:  [2J", "number": 3},
        {"event": "checkpoint", "text": "saved", "path": "runs/a b"},
    ]  # fmt: skip


def test_plain_prints_every_slow_event_on_one_line() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 2, unit="step")
    clock.now += 30.0
    progress.advance(1, reward=0.25, tokens_per_s=1234.56, truncated="3: 3 by rollout.max_turns = 4")
    clock.now += 30.0
    progress.note("checkpoint\nsaved")
    progress.advance(2, reward=0.75)
    progress.close()
    assert texts(stream.getvalue()) == [
        "train: start, 2 to do",
        "step 1/2  reward 0.250 (mean 0.250 of 1)  tokens_per_s  1235  left 0:30  "
        "truncated 3: 3 by rollout.max_turns = 4",
        "checkpoint saved",
        "step 2/2  reward 0.750 (mean 0.500 of 2)",
    ]


@pytest.mark.parametrize("pace", [0.01, 0.4, 3.0, 30.0, 59.0])
def test_plain_is_silent_for_a_minute_at_most_while_work_is_reported(pace: float) -> None:
    clock = Clock()
    printed: list[float] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            printed.append(clock.now)

    progress = PlainProgress(stream=Stream(), clock=clock)
    progress.stage("buffer", 100_000)
    for done in range(1, int(600 / pace) + 1):
        clock.now += pace
        progress.advance(done)
    gaps = [b - a for a, b in zip(printed, [*printed[1:], clock.now], strict=True)]
    assert max(gaps) < 60.0 + pace
    assert len(printed) <= 11  # and fast work does not flood the log


def test_a_stage_that_continues_has_no_second_line() -> None:
    progress, stream = plain(Clock())
    for done in (0, 4, 8):
        progress.stage("train", 9, done=done, unit="step")
        progress.advance(done + 1)
        progress.stage(f"evaluation step {done}", 2)
    assert [line.partition("  ")[0] for line in texts(stream.getvalue())] == [
        "train: start, 9 to do", "step 1/9", "evaluation step 0: start, 2 to do",
        "step 5/9", "evaluation step 4: start, 2 to do", "step 9/9", "evaluation step 8: start, 2 to do",
    ]  # fmt: skip


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
    assert raw.getvalue().endswith(b" EMPO?  [31mred \n")


def test_advance_before_a_stage_is_shown_and_not_an_error() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.advance(1)
    clock.now += 60.0
    progress.tick()
    assert texts(stream.getvalue()) == ["run: start", "run 1"]


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
    assert "train 1/4  reward 0.500 (mean 0.500 of 1)  elapsed 0:06   left 0:18" in stream.getvalue()


@pytest.mark.parametrize(
    ("stages", "notes", "lines"),
    [
        ([("evaluation", 2, 2)], [("50 % on 2 tasks", "evaluation")], ["evaluation 2/2", "50 % on 2 tasks"]),
        (
            [("evaluation", 2, 2)],
            [("50 %", "evaluation"), ("learned 50 %", "summary"), ("report: a", "end")],
            ["evaluation 2/2", "50 %", "learned 50 %", "report: a"],
        ),
        (
            [("train", 9, 1)],
            [("stopped on request", "note"), ("learned 5 %", "summary"), ("report: a", "end")],
            ["stopped on request", "train 1/9", "learned 5 %", "report: a"],
        ),
        ([("train", 9, 1)], [("a note", "note")], ["a note", "train 1/9"]),
    ],
)
def test_the_line_of_a_stage_comes_before_what_is_printed_after_it(
    stages: list[tuple[str, int, int]], notes: list[tuple[str, str]], lines: list[str]
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    progress = RichProgress(console=console, clock=Clock())
    for name, total, done in stages:
        progress.stage(name, total)
        progress.advance(done)
    for text, event in notes:
        progress.note(text, event=event)
    progress.close()
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue()).replace("\r", "\n").split("\n")
    last = [line.partition("  ")[0].strip() for line in printed if line.strip()]
    assert [line for line in last if line in lines] == lines


def test_the_result_of_an_evaluation_is_no_alarm() -> None:
    assert not is_alarm("step 3: 45.0 % [30.0, 60.0] on 64 held-out tasks, 0 faults")


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


def test_each_step_has_one_line_of_stable_columns() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    progress.stage("train", 1000, unit="step")
    for step, reward in enumerate((-0.25, 0.5, 123.4), start=1):
        for rollouts in range(8):  # they come within a second
            progress.advance(step - 1, generated=rollouts * 1000, rollouts=f"{rollouts}/64")
        clock.now += 0.5
        progress.advance(step, **{"reward": reward, "no signal": 0.5, "s/step": 9.87, "tokens/s": 12345.0})
    lines = texts(stream.getvalue())[1:]
    assert [line.split()[1] for line in lines] == ["1/1000", "2/1000", "3/1000"]
    assert [re.findall(r"reward +(\S+) \(mean +(\S+) of +(\d+)\)", line)[0] for line in lines] == [
        ("-0.25", "-0.25", "1"), ("0.500", "0.125", "2"), ("123.4", "41.22", "3"),
    ]  # fmt: skip
    for name in ("(mean", "no signal", "s/step", "tokens/s", "left"):
        assert len({line.index(name) for line in lines}) == 1


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
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    stream = io.StringIO()
    display = PlainProgress(stream=stream, heartbeat_s=0.0)
    meter = TokenMeter(display)
    meter(8)  # an expert's tokens while the parts are made: no stage to show them in
    assert stream.getvalue() == ""
    display.stage("evaluate", 6)
    meter.num_done = lambda: 2
    for num_tokens in (4, 4, 2):
        meter(num_tokens)
    lines = texts(stream.getvalue())
    assert lines[0] == "evaluate: start, 6 to do" and "tokens/s" not in lines[1]
    assert lines[-1].startswith("evaluate 2/6: generated 18, tokens/s 3")
