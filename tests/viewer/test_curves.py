"""Charts: round ticks that enclose the data, points where they belong, gaps where nothing was measured,
escaped labels.
"""

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.viewer.report_parts import (
    MAX_POINTS,
    Chart,
    Point,
    Series,
    moving_mean,
    number,
    svg_chart,
    tick_labels,
    ticks,
)

values = st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-9)


def chart(*series: Series, title: str = "Reward") -> Chart:
    return Chart(title=title, x_label="step", y_label="reward", series=series)


def line(*heights: float | None, label: str = "all") -> Series:
    return Series(label=label, points=tuple(Point(x=i, value=h) for i, h in enumerate(heights)))


def paths(svg: str, css: str) -> list[str]:
    return [
        e.attrib["d"]
        for e in ElementTree.fromstring(svg).iter()
        if e.tag.endswith("path") and css == e.attrib.get("class")
    ]


@given(values, values)
def test_ticks_ascend_enclose_the_range_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1.0)
    assert all(x < y for x, y in itertools.pairwise(marks))
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 7


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 60, [0, 20, 40, 60]),
        (3, 3, [2.6, 2.8, 3.0, 3.2, 3.4]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_of_known_ranges(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_points_land_on_the_pixels_of_the_scale() -> None:
    svg = svg_chart(chart(line(0.0, 1.0)))
    assert paths(svg, "line s0")[0] == "M58.0 186.0L448.0 26.0"  # corners of the frame: first low, last high


def test_a_missing_value_breaks_the_line() -> None:
    assert paths(svg_chart(chart(line(1, 2, None, 3, 4))), "line s0")[0].count("M") == 2


def test_a_long_run_is_thinned_by_averaging_and_keeps_its_mean_and_last_step() -> None:
    points = tuple(Point(x=i, value=float(i % 2)) for i in range(10 * MAX_POINTS))
    svg = svg_chart(chart(Series(label="all", points=points)))
    raw = paths(svg, "line raw s0")[0]
    assert raw.count("L") + raw.count("M") == MAX_POINTS
    heights = {step.split(" ")[1] for step in raw[1:].split("L")}
    assert len(heights) == 1  # every bucket averages to one half
    assert len(svg) < 15_000


@given(st.lists(st.none() | values, min_size=1, max_size=30), st.integers(1, 8))
def test_moving_mean_is_the_mean_of_the_window(heights: list[float | None], window: int) -> None:
    for end, mean in enumerate(moving_mean(heights, window), start=1):
        defined = [h for h in heights[:end][-window:] if h is not None]
        assert mean == (pytest.approx(sum(defined) / len(defined), rel=1e-9, abs=1e-3) if defined else None)


def test_labels_are_escaped_and_the_picture_is_described_in_words() -> None:
    svg = svg_chart(chart(line(0.25, 0.5, label='<script>&"'), title="<b>"))
    root = ElementTree.fromstring(svg)  # well-formed although the labels are hostile
    assert "<script" not in svg
    assert "first 0.25, last 0.5" in root.attrib["aria-label"]


def test_intervals_are_drawn_and_inside_the_frame() -> None:
    points = tuple(Point(x=x, value=0.5, low=0.1, high=0.9) for x in (0, 10))
    drawn = paths(svg_chart(chart(Series(label="score", points=points))), "interval s0")
    assert len(drawn) == 2
    assert all(26 <= float(part) <= 186 for d in drawn for part in d.split(" ")[1].split("V"))


def test_a_chart_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        svg_chart(chart(line(None, None)))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.1235"), (0.0, "0"), (12000, "12k"), (2_500_000, "2.5M"), (-15000, "-15k"), (42, "42")],
)
def test_numbers_for_people(value: float, shown: str) -> None:
    assert number(value) == shown


def test_stacked_bars_lie_on_each_other() -> None:
    parts = (line(1.0, 2.0, label="good"), line(3.0, 0.0, label="bad"))
    stacked = Chart(title="Fate", x_label="step", y_label="rollouts", series=parts, is_stacked=True)
    drawn = [paths(svg_chart(stacked), f"bar s{index}")[0] for index in (0, 1)]
    edges = [re.findall(r"M\S+ (\S+?)V(\S+?)H", path) for path in drawn]
    # 40 units of the frame are one rollout: 1 of 4, 2 of 4, and 3 on top of the first.
    assert edges == [[("186.0", "146.0"), ("186.0", "106.0")], [("146.0", "26.0")]]


def test_a_legend_that_is_too_wide_gets_another_row() -> None:
    names = ("rewarded", "wrong", "turn limit", "token limit")
    small = Chart(
        title="Fate", x_label="step", y_label="", width=280, height=150,
        series=tuple(line(1.0, 2.0, label=name) for name in names),
    )  # fmt: skip
    root = ElementTree.fromstring(svg_chart(small))
    height = float(root.attrib["viewBox"].split()[3])
    texts = {e.text: (float(e.attrib["x"]), float(e.attrib["y"])) for e in root.iter() if e.text in names}
    assert len(texts) == 4 and all(y < height for _, y in texts.values()) and height > 150
    assert all(x + 6 * len(name) < 280 for name, (x, _) in texts.items())


@pytest.mark.parametrize(
    ("marks", "labels"),
    [
        ([0, 5000, 10_000, 15_000], ["0", "5k", "10k", "15k"]),
        ([11_999, 12_000, 12_001], ["11,999", "12,000", "12,001"]),
        ([0.9994, 0.9996, 0.9998, 1.0], ["0.9994", "0.9996", "0.9998", "1.0000"]),
        ([-0.5, 0, 0.5], ["-0.5", "0", "0.5"]),
        ([0, 2e-7, 4e-7], ["0", "2e-07", "4e-07"]),
        ([0, 1e6, 2e6], ["0", "1M", "2M"]),
    ],
)
def test_tick_labels_tell_ticks_apart(marks: list[float], labels: list[str]) -> None:
    assert tick_labels(marks) == labels
