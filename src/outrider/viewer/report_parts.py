"""Parts of the HTML reports: line charts as static SVG, sample rollouts, and groups as trees.

The charts are drawn here because no lightweight library fits: pygal's output loads a script from the network
and leather uses fixed colours, while these charts use the colours of the page (dark or light) and need only
axes with units.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from typing import Final, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from outrider.errors import DataError
from outrider.printing import score
from outrider.types import Origin
from outrider.viewer.records import TraceReader, TraceRow, parse_metadata, path_to_leaf
from outrider.viewer.run_reader import finite


@cache  # compiling a template takes longer than rendering it
def page_template(path: Path) -> Template:
    """The template at ``path``, which escapes all values and raises an error for undefined names."""
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(path.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


# Line charts.


MAX_POINTS: Final = 160  # more are averaged in buckets: the drawing is 380 units wide
_SMOOTHING_MIN_POINTS: Final = 40  # points from which a moving mean is drawn over the faint raw line
_LEFT, _TOP = 58, 26  # of the plot's frame
_LEGEND_ROW: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value over ``x``; ``value`` None breaks the line. ``low`` and ``high`` are an interval around the
    value.

    ``name`` replaces ``x`` in the tooltip of the point.
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
    """A chart of up to four lines, or of up to six parts of stacked bars, that share a unit.

    ``is_share``: values are shares from 0 to 1, written in per cent. ``x_tick_labels`` name positions on the
    x axis that are not steps; they must be left of all other points. ``is_stacked``: a bar for each x, with
    the values of all series on top of each other. ``height`` is without the second and further rows of the
    legend.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_share: bool = False
    x_tick_labels: Mapping[float, str] = field(default_factory=dict)
    is_stacked: bool = False
    width: int = 460
    height: int = 230

    @property
    def right(self) -> int:
        """Right end of the plot's frame."""
        return self.width - 12

    @property
    def bottom(self) -> int:
        """Bottom of the plot's frame."""
        return self.height - 44

    def format_value(self, value: float) -> str:
        """Format a value for display."""
        return score(value) if self.is_share else number(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    chart: Chart
    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.chart.right - _LEFT)

    def y(self, value: float) -> float:
        low, high, bottom = self.y_ticks[0], self.y_ticks[-1], self.chart.bottom
        return bottom - (value - low) / (high - low) * (bottom - _TOP)


def svg_chart(chart: Chart) -> Markup:
    """The chart as an ``<svg>`` element; every label is escaped. Raises ``ValueError`` when no series has a
    value.
    """
    series = [
        Series(label=line.label, points=_thinned(line.points, is_stacked=chart.is_stacked))
        for line in chart.series
    ]
    points = [point for line in series for point in line.points if point.value is not None]
    if not points:
        raise ValueError(f"chart {chart.title!r} has no values")
    heights = [
        height for point in points for height in (point.value, point.low, point.high) if height is not None
    ]
    xs = [point.x for point in points if point.x not in chart.x_tick_labels] or list(chart.x_tick_labels)
    low, high = math.floor(min(xs)), math.ceil(max(xs))
    # Steps are whole numbers: no tick at step 2.5.
    x_ticks = ticks(low, high) if high - low >= 8 else list(map(float, range(low, max(high, low + 1) + 1)))
    x_range = min(x_ticks[0], *chart.x_tick_labels, math.inf), x_ticks[-1]
    if chart.is_stacked:
        bars = _stacked(series)
        gap = min((after - before for before, after in pairwise(bars)), default=1.0)
        x_range = low - gap / 2, high + gap / 2
        x_ticks = [tick for tick in x_ticks if low <= tick <= high]
        heights = [0.0, *(ends[-1] for ends in bars.values())]
    frame = _Frame(chart=chart, x_ticks=x_ticks, y_ticks=ticks(min(heights), max(heights)), x_range=x_range)
    drawn = (
        [_bars(bars, index, gap, frame) for index in range(len(series))]
        if chart.is_stacked
        else [_line(line, index, frame, chart) for index, line in enumerate(series)]
    )
    legend, num_rows = _legend(series, chart)
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        chart.width, chart.height + (num_rows - 1) * _LEGEND_ROW, _summary(chart)
    )
    return head + Markup("").join([_axes(chart, frame), *drawn, legend]) + Markup("</svg>")


def _stacked(series: Sequence[Series]) -> dict[float, list[float]]:
    """The ends of the parts of each bar, from 0, by x in ascending order; a missing value is 0."""
    values = [{point.x: point.value or 0.0 for point in line.points} for line in series]
    xs = sorted({x for line in values for x in line})
    return {x: [0.0, *accumulate(line.get(x, 0.0) for line in values)] for x in xs}


def _bars(bars: Mapping[float, Sequence[float]], index: int, gap: float, frame: _Frame) -> Markup:
    """One part of all bars, as one path."""
    boxes = [
        f"M{frame.x(x - 0.4 * gap):.1f} {frame.y(ends[index]):.1f}V{frame.y(ends[index + 1]):.1f}"
        f"H{frame.x(x + 0.4 * gap):.1f}V{frame.y(ends[index]):.1f}z"
        for x, ends in bars.items()
        if ends[index + 1] > ends[index]
    ]
    return Markup('<path class="bar s{}" d="{}"/>').format(index, "".join(boxes))


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the range, ascending, at least two."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(
        factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= raw * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def tick_labels(marks: Sequence[float]) -> list[str]:
    """Labels of ticks at equal distances, with as many decimals as the distance needs."""
    largest, distance = max(map(abs, marks)), marks[1] - marks[0]
    order = math.floor(math.log10(distance) + 1e-9)
    if largest < 1e-3 or largest >= 1e10:
        digits = max(0, math.floor(math.log10(largest)) - order)
        return [f"{mark:.{digits}e}" if abs(mark) > distance / 2 else "0" for mark in marks]
    # A unit only if that saves digits: 12,001 is no shorter in thousands.
    units = (("M", 6, 1e6), ("k", 3, 1e4))
    fitting = ((unit, power) for unit, power, least in units if largest >= least and order >= power - 1)
    unit, power = next(fitting, ("", 0))
    digits = max(0, power - order)
    return [f"{mark / 10**power:,.{digits}f}{unit}" if abs(mark) > distance / 2 else "0" for mark in marks]


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


def _thinned(points: tuple[Point, ...], *, is_stacked: bool) -> tuple[Point, ...]:
    """At most ``MAX_POINTS`` points, each the mean of as many neighbours as necessary. A missing value is 0
    in a stacked bar and left out of the mean of a line.
    """
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        missing = [0.0] * sum(point.value is None for point in bucket) if is_stacked else []
        values = missing + [point.value for point in bucket if point.value is not None]
        thinned.append(Point(x=bucket[-1].x, value=math.fsum(values) / len(values) if values else None))
    return tuple(thinned)


def _axes(chart: Chart, frame: _Frame) -> Markup:
    parts = [Markup('<text class="title" x="{}" y="14">{}</text>').format(_LEFT, chart.title)]
    scale = 100.0 if chart.is_share else 1.0
    for tick, name in zip(frame.y_ticks, tick_labels([scale * tick for tick in frame.y_ticks]), strict=True):
        y = round(frame.y(tick), 1)
        parts.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, y, chart.right))
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_LEFT - 6, y + 4, name))
    names = tick_labels(frame.x_ticks) if len(frame.x_ticks) > 1 else list(map(number, frame.x_ticks))
    for tick, name in (*zip(frame.x_ticks, names, strict=True), *chart.x_tick_labels.items()):
        x = round(frame.x(tick), 1)
        parts.append(Markup('<path class="axis" d="M{} {}v4"/>').format(x, chart.bottom))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x, chart.bottom + 16, name)
        )
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, chart.bottom, chart.right))
    parts.append(
        Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
            chart.right, chart.bottom + 31, chart.x_label
        )
    )
    middle = (_TOP + chart.bottom) // 2
    label = Markup('<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>')
    return Markup("").join([*parts, label.format(middle, chart.y_label)])


def _line(series: Series, index: int, frame: _Frame, chart: Chart) -> Markup:
    parts: list[Markup] = []
    for point in series.points:
        if point.low is not None and point.high is not None:
            x, low, high = (
                round(at, 1) for at in (frame.x(point.x), frame.y(point.low), frame.y(point.high))
            )
            parts.append(Markup('<path class="interval s{}" d="M{} {}V{}"/>').format(index, x, low, high))
    if len(series.points) >= _SMOOTHING_MIN_POINTS:
        window = max(2, len(series.points) // 20)
        means = moving_mean([point.value for point in series.points], window)
        smooth = [Point(x=point.x, value=mean) for point, mean in zip(series.points, means, strict=True)]
        lines = [_path(series.points, f"line raw s{index}", frame), _path(smooth, f"line s{index}", frame)]
        return Markup("").join([*parts, *lines])
    parts.append(_path(series.points, f"line s{index}", frame))
    dot = Markup('<circle class="dot s{}" cx="{}" cy="{}" r="2.6"><title>{}, {}: {}</title></circle>')
    for point in series.points:
        if point.value is not None:
            low, high = (math.nan if end is None else end for end in (point.low, point.high))
            text = score(point.value, low, high) if chart.is_share else number(point.value)
            x, y = round(frame.x(point.x), 1), round(frame.y(point.value), 1)
            parts.append(dot.format(index, x, y, series.label, point.name or number(point.x), text))
    return Markup("").join(parts)


def _path(points: Sequence[Point], css: str, frame: _Frame) -> Markup:
    moves: list[str] = []
    is_down = False
    for point in points:
        if point.value is not None:
            moves.append(f"{'L' if is_down else 'M'}{frame.x(point.x):.1f} {frame.y(point.value):.1f}")
        is_down = point.value is not None
    return Markup('<path class="{}" d="{}"/>').format(css, "".join(moves))


def _legend(series: Sequence[Series], chart: Chart) -> tuple[Markup, int]:
    """The legend below the axis and its number of rows; the first row ends before the label of the axis."""
    parts: list[Markup] = []
    mark = "bar" if chart.is_stacked else "line"
    size = "h10v-8h-10z" if chart.is_stacked else "h22"
    x, row, room = _LEFT if chart.width > 400 else 8, 0, chart.right - 7 * len(chart.x_label)
    for index, line in enumerate(series):
        width = (32 if chart.is_stacked else 44) + round(6.2 * len(line.label))
        if parts and x + width > room + 12:
            x, row, room = 8, row + 1, chart.right
        y = chart.height - 6 + row * _LEGEND_ROW
        parts.append(
            Markup('<path class="{} s{}" d="M{} {}{}"/>').format(
                mark, index, x, y if chart.is_stacked else y - 4, size
            )
        )
        parts.append(
            Markup('<text x="{}" y="{}">{}</text>').format(
                x + (15 if chart.is_stacked else 27), y, line.label
            )
        )
        x += width
    return Markup("").join(parts), row + 1


def _summary(chart: Chart) -> str:
    parts = [
        f"{line.label}: first {chart.format_value(values[0])}, last {chart.format_value(values[-1])}, "
        f"lowest {chart.format_value(min(values))}, highest {chart.format_value(max(values))}"
        for line in chart.series
        if (values := line.values)
    ]
    return f"{chart.title} ({chart.y_label}) over {chart.x_label}. " + "; ".join(parts)


# Sample rollouts for the report: which ones, and what of them fits on the page.


NUM_SAMPLES: Final = 10
# nats; fixed, so that two reports can be compared
ENTROPY_EDGES: Final = (0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
_NUM_STEPS: Final = 3
_LABELS: Final = {
    Origin.PROMPT: "prompt",
    Origin.POLICY: "policy",
    Origin.ENVIRONMENT: "observation",
    Origin.BUFFER: "retrieved step",
    Origin.MEMORY: "tip from memory",
    Origin.DEMONSTRATION: "demonstration",
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNode:
    """One node of a sample: head and tail around what is not shown, of text or, for the policy, of tokens
    (text, class 0 to 7 of its entropy among ``ENTROPY_EDGES``, tooltip).
    """

    origin: str
    label: str
    metadata: str
    head: list[tuple[str, int, str]] | str
    num_hidden: int
    tail: list[tuple[str, int, str]] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout: the facts of its leaf and the path from the root to it."""

    leaf: TraceRow
    path: tuple[TraceRow, ...]

    @property
    def kind(self) -> str:
        """Kind of the rollout, as the report names it."""
        origins = {row.origin for row in self.path}
        if Origin.DEMONSTRATION in origins:
            return "guided" if Origin.POLICY in origins else "demonstration"
        return "hybrid" if self.leaf.hybrid else "on-policy"

    def nodes(self, num_tokens: int) -> list[SampleNode]:
        """The nodes with about ``num_tokens`` policy tokens in all, and four times as many characters in each
        node of another origin.
        """
        num_policy = sum(bool(row.tokens) for row in self.path)
        tokens_per_node = max(10, num_tokens // max(1, num_policy))
        return [_node(row, tokens_per_node, 4 * num_tokens) for row in self.path]


def pick_samples(directory: Path, notes: list[str]) -> tuple[Sample, ...]:
    """Up to ten rollouts from the last, the first and the middle step that can be read, in the order of
    steps.

    Of each step the best and the worst rollout of every kind come first, so that they can be compared.
    """
    steps = _readable_steps(TraceReader(directory), notes)
    rounds = chain.from_iterable(zip_longest(*(_ranked(samples_from_rows(rows, notes)) for rows in steps)))
    chosen = [sample for sample in rounds if sample is not None][:NUM_SAMPLES]
    if not chosen:
        notes.append("traces: no finished rollout to show")
    return tuple(sorted(chosen, key=lambda sample: sample.leaf.step))


def _readable_steps(reader: TraceReader, notes: list[str]) -> Iterator[tuple[TraceRow, ...]]:
    steps = reader.steps()
    preferred = [steps[-1], steps[0], steps[len(steps) // 2]] if steps else []
    num_read = 0
    for step in dict.fromkeys([*preferred, *reversed(steps)]):
        if num_read == _NUM_STEPS:
            return
        try:
            rows = reader.read(step)
        except DataError as error:
            notes.append(f"traces: {error}")
            continue
        num_read += 1
        yield rows


def samples_from_rows(rows: Sequence[TraceRow], notes: list[str]) -> list[Sample]:
    """Every finished rollout with its path; a leaf without a path to a root is left out and noted."""
    nodes = {(row.trace_id, row.node_id): row for row in rows}
    samples: list[Sample] = []
    for leaf in rows:
        if leaf.outcome is None:
            continue
        path = path_to_leaf(nodes, leaf)
        if path[0].parent_id == -1:
            samples.append(Sample(leaf=leaf, path=tuple(path)))
        else:
            notes.append(
                f"traces: step {leaf.step} node {leaf.node_id} has no path to a root and was left out"
            )
    return samples


def _ranked(samples: list[Sample]) -> list[Sample]:
    scored = [sample for sample in samples if sample.leaf.episode_return is not None]
    scored.sort(key=lambda sample: sample.leaf.episode_return or 0.0, reverse=True)
    kinds = [
        [sample for sample in scored if sample.kind == kind]
        for kind in ("hybrid", "on-policy", "guided", "demonstration")
    ]
    best, worst = ([sample for own in kinds for sample in own[part]] for part in (slice(1), slice(-1, None)))
    ordered = {id(sample): sample for sample in [*best, *worst, *scored, *samples]}
    return list(ordered.values())


def _node(row: TraceRow, num_tokens: int, num_chars: int) -> SampleNode:
    head: list[tuple[str, int, str]] | str
    tail: list[tuple[str, int, str]] | str
    if row.tokens:
        tokens = [
            (
                text or "\u2205",
                sum(entropy >= edge for edge in ENTROPY_EDGES),
                f"{text!r}  log-prob {logprob:.3f}  entropy {entropy:.3f} nats",
            )
            for text, logprob, entropy in zip(row.tokens, row.logprobs, row.entropies, strict=True)
        ]
        head, num_hidden, tail = _cut(tokens, num_tokens)
    else:
        letters, num_hidden, rest = _cut(list(row.text), num_chars)
        head, tail = "".join(letters), "".join(rest)
    return SampleNode(
        origin=row.origin.value,
        label=_LABELS[row.origin],
        metadata="" if row.metadata in ("", "{}") else row.metadata[:300],
        head=head,
        num_hidden=num_hidden,
        tail=tail,
    )


def _cut(items: list[_T], limit: int) -> tuple[list[_T], int, list[_T]]:
    """Two thirds of the limit from the beginning and one third from the end, with the number left out
    between.
    """
    if len(items) <= limit:
        return items, 0, []
    num_tail = limit // 3
    return items[: limit - num_tail], len(items) - limit, items[len(items) - num_tail :]


# Groups with branched rollouts, as trees for the report: forks, entropies, and the returns of the leaves.


NUM_TREES: Final = 3
_TEXT: Final = 90
_MAX_ROWS: Final = 600  # a larger group is left out: the page must stay small
_MAX_DEPTH: Final = 40  # forks behind each other; the page's template calls itself for each
_MOST_FORKS: Final = 10**6  # of one node; more is no count


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One policy turn: its text, the mean entropy of its tokens (nats), and how many rollouts left in front
    of it.
    """

    text: str
    num_tokens: int
    entropy: float
    num_forks: int
    entropy_change: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Turns without a fork between them, followed by branches; ``leaf`` is set if a rollout ends here."""

    rollout: int
    turns: tuple[TreeNode, ...]
    leaf: TraceRow | None
    children: tuple["Branch", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One group."""

    step: int
    task_key: str
    roots: tuple[Branch, ...]


def pick_trees(directory: Path, notes: list[str]) -> tuple[Tree, ...]:
    """The groups with most forks of the newest step that has any; empty for a run that never branched."""
    reader = TraceReader(directory)
    for step in reversed(reader.steps()):
        try:
            rows = reader.read(step)
        except DataError as error:
            notes.append(f"traces: {error}")
            continue
        groups: dict[str, list[TraceRow]] = {}
        for row in rows:
            groups.setdefault(row.trace_id, []).append(row)
        branched = []
        for group in map(_drop_faulted, groups.values()):
            num_forks = sum(_count(parse_metadata(row).get("num_forks")) for row in group)
            if num_forks and _fits(group, notes):
                branched.append((num_forks, group))
        if branched:
            branched.sort(key=lambda pair: -pair[0])
            trees: list[Tree] = []
            for _, group in branched[:NUM_TREES]:
                children = _children(group)
                roots = tuple(branch for root in children.get(-1, ()) for branch in _branches(root, children))
                trees.append(Tree(step=group[0].step, task_key=group[0].task_key, roots=roots))
            return tuple(trees)
    return ()


def _children(rows: Sequence[TraceRow]) -> dict[int, list[TraceRow]]:
    children: dict[int, list[TraceRow]] = {}
    for row in rows:
        children.setdefault(row.parent_id, []).append(row)
    return children


def _drop_faulted(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Drop nodes of faulted rollouts, which lead to no leaf."""
    parents = {row.node_id: row.parent_id for row in rows}
    retained: set[int] = set()
    for row in rows:
        node_id = row.node_id if row.outcome is not None else -1
        while node_id in parents and node_id not in retained:
            retained.add(node_id)
            node_id = parents[node_id]
    return [row for row in rows if row.node_id in retained]


def _fits(rows: Sequence[TraceRow], notes: list[str]) -> bool:
    """Whether the group is a tree that the page can hold; a page nests as deeply as its branches do."""
    if len(rows) > _MAX_ROWS:
        return False
    children = _children(rows)
    level, depth = [(row, 0) for row in children.get(-1, ())], 0
    if len({row.node_id for row in rows}) < len(rows):
        notes.append(f"traces: a group of {rows[0].task_key!r} is no tree and was left out")
        return False
    while level:  # every node has one parent, so this ends
        depth = max(depth, *(num_forks for _, num_forks in level))
        level = [
            (child, num_forks + (len(node_children) > 1 or row.outcome is not None))
            for row, num_forks in level
            for node_children in [children.get(row.node_id, [])]
            for child in node_children
        ]
    if depth > _MAX_DEPTH:
        notes.append(
            f"traces: a group of {rows[0].task_key!r} with {depth} forks behind each other was left out"
        )
    return depth <= _MAX_DEPTH


def _count(value: object) -> int:
    return int(count) if (count := finite(value)) is not None and 0 <= count < _MOST_FORKS else 0


def _branches(row: TraceRow, children: dict[int, list[TraceRow]]) -> Iterator[Branch]:
    """One branch for every child of ``row``."""
    for child in children.get(row.node_id, ()):
        turns = [_turn(child)] if child.origin is Origin.POLICY else []
        tip = child
        while len(next_rows := children.get(tip.node_id, [])) == 1 and tip.outcome is None:
            tip = next_rows[0]
            turns += [_turn(tip)] if tip.origin is Origin.POLICY else []
        yield Branch(
            rollout=child.rollout,
            turns=tuple(turns),
            leaf=tip if tip.outcome is not None else None,
            children=tuple(_branches(tip, children)),
        )


def _turn(row: TraceRow) -> TreeNode:
    metadata = parse_metadata(row)
    text = " ".join(row.text.split())
    return TreeNode(
        text=text if len(text) <= _TEXT else text[:_TEXT] + " …",
        num_tokens=len(row.tokens),
        entropy=sum(row.entropies) / len(row.entropies) if row.entropies else 0.0,
        num_forks=_count(metadata.get("num_forks")),
        entropy_change=finite(metadata.get("entropy_change")),
    )
