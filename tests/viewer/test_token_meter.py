"""Tokens on the display: counted from the first one, shown once there is a stage to show them in."""

import io
from itertools import count

import pytest

from outrider.viewer import progress as token_meter
from outrider.viewer.progress import PlainProgress, TokenMeter


def test_tokens_and_their_speed_are_shown_beside_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(token_meter.time, "monotonic", lambda: float(next(seconds)))
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
