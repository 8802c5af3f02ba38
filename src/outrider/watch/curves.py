"""Line charts as static SVG, for pages that must work without scripts and without a network.

Drawn here because no light library fits: pygal links a script from the network into its output and leather
fixes its colours, while these charts take theirs from the page (dark and light) and need axes with units and
nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup

from outrider.printing import score

MAX_POINTS: Final = 160  # more are averaged in buckets: the drawing is 380 units wide
_SMOOTHING_MIN_POINTS: Final = 40  # points from which a moving mean is drawn over the faint raw line
_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 448, 26, 186  # the plot's frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value over ``x``; ``value`` None breaks the line. ``low`` and ``high`` are an interval around the
    value.

    ``name`` is what pointing at it tells, in place of ``x``.
    """

    x: float
    value: float | None
    low: float | None = None
    high: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """The values that are defined."""
        return [point.value for point in self.points if point.value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of up to four series that share a unit.

    ``is_share``: values are shares of 0 to 1, written in per cent. ``x_tick_labels`` are names of x that are no
    numbers of the axis: they must lie left of all others.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_share: bool = False
    x_tick_labels: Mapping[float, str] = field(default_factory=dict)

    def format_value(self, value: float) -> str:
        """A value as people read it."""
        return score(value) if self.is_share else number(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    x_ticks: list[float]
    y_ticks: list[float]
    left: float  # the first x

    def x(self, value: float) -> float:
        low, high = self.left, self.x_ticks[-1]
        return _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)


def svg_chart(chart: Chart) -> Markup:
    """The chart as an ``<svg>`` element; every label is escaped. Raises ``ValueError`` when no series has a
    value.
    """
    series = [Series(label=line.label, points=_thinned(line.points)) for line in chart.series]
    points = [point for line in series for point in line.points if point.value is not None]
    if not points:
        raise ValueError(f"chart {chart.title!r} has no values")
    heights = [
        height for point in points for height in (point.value, point.low, point.high) if height is not None
    ]
    x_ticks = _x_ticks(
        [point.x for point in points if point.x not in chart.x_tick_labels] or list(chart.x_tick_labels)
    )
    left = min(x_ticks[0], *chart.x_tick_labels) if chart.x_tick_labels else x_ticks[0]
    frame = _Frame(x_ticks=x_ticks, y_ticks=ticks(min(heights), max(heights)), left=left)
    body = [
        _axes(chart, frame),
        *(_line(line, index, frame, chart) for index, line in enumerate(series)),
        _legend(series),
    ]
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        _WIDTH, _HEIGHT, _summary(chart)
    )
    return head + Markup("").join(body) + Markup("</svg>")


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About ``num`` round numbers that enclose the range, ascending, at least two."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / (num - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(
        factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= raw * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def moving_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the defined values among the last ``window``; None where there is none."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        defined = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(math.fsum(defined) / len(defined) if defined else None)
    return means


def number(value: float) -> str:
    """A number for people: four significant digits, thousands as k and millions as M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def _x_ticks(xs: Sequence[float]) -> list[float]:
    low, high = math.floor(min(xs)), math.ceil(max(xs))
    if high - low < 8:  # steps are whole numbers: no tick at step 2.5
        return [float(x) for x in range(low, max(high, low + 1) + 1)]
    return ticks(low, high)


def _thinned(points: tuple[Point, ...]) -> tuple[Point, ...]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    return tuple(_average(points[start : start + size]) for start in range(0, len(points), size))


def _average(bucket: Sequence[Point]) -> Point:
    values = [point.value for point in bucket if point.value is not None]
    return Point(x=bucket[-1].x, value=math.fsum(values) / len(values) if values else None)


def _axes(chart: Chart, frame: _Frame) -> Markup:
    parts = [Markup('<text class="title" x="{}" y="14">{}</text>').format(_LEFT, chart.title)]
    scale = 100.0 if chart.is_share else 1.0
    for tick in frame.y_ticks:
        y = round(frame.y(tick), 1)
        parts.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, y, _RIGHT))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
                _LEFT - 6, y + 4, number(scale * tick)
            )
        )
    for tick, name in (*((tick, number(tick)) for tick in frame.x_ticks), *chart.x_tick_labels.items()):
        x = round(frame.x(tick), 1)
        parts.append(Markup('<path class="axis" d="M{} {}v4"/>').format(x, _BOTTOM))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x, _BOTTOM + 16, name)
        )
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, _BOTTOM, _RIGHT))
    parts.append(
        Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_RIGHT, _BOTTOM + 31, chart.x_label)
    )
    middle = (_TOP + _BOTTOM) // 2
    label = Markup('<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>')
    return Markup("").join([*parts, label.format(middle, chart.y_label)])


def _line(series: Series, index: int, frame: _Frame, chart: Chart) -> Markup:
    parts = [_interval(point, index, frame) for point in series.points]
    if len(series.points) >= _SMOOTHING_MIN_POINTS:
        window = max(2, len(series.points) // 20)
        means = moving_mean([point.value for point in series.points], window)
        smooth = [Point(x=point.x, value=mean) for point, mean in zip(series.points, means, strict=True)]
        lines = [_path(series.points, f"line raw s{index}", frame), _path(smooth, f"line s{index}", frame)]
        return Markup("").join([*parts, *lines])
    dots = [_dot(point, series.label, index, frame, chart) for point in series.points]
    return Markup("").join([*parts, _path(series.points, f"line s{index}", frame), *dots])


def _dot(point: Point, label: str, index: int, frame: _Frame, chart: Chart) -> Markup:
    if point.value is None:
        return Markup("")
    low, high = (math.nan if end is None else end for end in (point.low, point.high))
    text = score(point.value, low, high) if chart.is_share else number(point.value)
    dot = Markup('<circle class="dot s{}" cx="{}" cy="{}" r="2.6"><title>{}, {}: {}</title></circle>')
    x, y = round(frame.x(point.x), 1), round(frame.y(point.value), 1)
    return dot.format(index, x, y, label, point.name or number(point.x), text)


def _interval(point: Point, index: int, frame: _Frame) -> Markup:
    if point.low is None or point.high is None:
        return Markup("")
    x, low, high = (
        round(coordinate, 1) for coordinate in (frame.x(point.x), frame.y(point.low), frame.y(point.high))
    )
    return Markup('<path class="interval s{}" d="M{} {}V{}"/>').format(index, x, low, high)


def _path(points: Sequence[Point], css: str, frame: _Frame) -> Markup:
    moves: list[str] = []
    is_down = False
    for point in points:
        if point.value is not None:
            moves.append(f"{'L' if is_down else 'M'}{frame.x(point.x):.1f} {frame.y(point.value):.1f}")
        is_down = point.value is not None
    return Markup('<path class="{}" d="{}"/>').format(css, "".join(moves))


def _legend(series: Sequence[Series]) -> Markup:
    parts: list[Markup] = []
    x = _LEFT
    for index, line in enumerate(series):
        parts.append(Markup('<path class="line s{}" d="M{} {}h22"/>').format(index, x, _HEIGHT - 10))
        parts.append(Markup('<text x="{}" y="{}">{}</text>').format(x + 27, _HEIGHT - 6, line.label))
        x += 44 + 7 * len(line.label)
    return Markup("").join(parts)


def _summary(chart: Chart) -> str:
    parts = [
        f"{line.label}: first {chart.format_value(values[0])}, last {chart.format_value(values[-1])}, "
        f"lowest {chart.format_value(min(values))}, highest {chart.format_value(max(values))}"
        for line in chart.series
        if (values := line.values)
    ]
    return f"{chart.title} ({chart.y_label}) over {chart.x_label}. " + "; ".join(parts)
