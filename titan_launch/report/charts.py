"""Charts as SVG text, without a script and without a library. Colors are classes of the page's style sheet."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from operator import itemgetter

Points = Sequence[tuple[float, float]]
"""Pairs (x, value), with increasing x."""

NUM_COLORS = 9
"""Number of colors. Lines have the CSS classes `line0`, `line1`, ..., and areas have `part0`, `part1`, ..."""

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 560, 260, 64, 32, 42, 22
_WIDE = 1150
"""Width of a chart that is as wide as the page, in SVG units."""

_LABELS = 120
"""Width of the names at the right of a stacked chart, in SVG units."""

_MAX_POINTS = 600
"""Largest number of finite points of a line. A longer series is divided into intervals. Of each interval, the line has
the smallest value, the largest value, and the first value that is not finite."""

_MAX_NAMES = 8
"""Largest number of series in the legend, and in the text at the mouse pointer of a line chart."""

_MAX_COLUMNS = 120
"""Largest number of columns of a line chart that show a text at the mouse pointer."""

_FAR = 4
"""A limit of more than this number times the longest bar is not drawn, because the bars would be too short to read."""

_SLOW = 3
"""A column of a stacked chart that is higher than this number times the median column is cut off."""


def line_chart(
    title: str,
    series: Mapping[str, Points],
    x: str = "step",
    *,
    is_difference: bool = False,
    has_hover: bool = True,
) -> str:
    """Return a chart with a line for each series. If no value is finite, return only a caption that says this.

    Values that are not finite are gaps. A series without finite values has no line. `title` contains the unit of the
    values. `x` is the name of the horizontal axis. `title` and all names are plain text.

    `is_difference`: True if the series are differences from another series. The chart then has a line at 0, and the
    first color is not used, because it belongs to that other series. `has_hover`: True to show the values at the mouse
    pointer.
    """
    lines = {name: [list(part) for part in _parts(_thinned(points))] for name, points in series.items()}
    finite = [point for parts in lines.values() for part in parts for point in part]
    if not finite:
        return f"<figure><figcaption>{escape(title)}: no finite value</figcaption></figure>"
    values = [y for _, y in finite] + [0.0] * is_difference
    y_ticks = _ticks(min(values), max(values))
    to_y = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    axis, to_x = _x_axis(min(x for x, _ in finite), max(x for x, _ in finite), x, _WIDTH - _RIGHT)
    body = [*_y_axis(title, y_ticks, to_y, _WIDTH - _RIGHT), *axis]
    if is_difference:
        body.append(f'<path class="zero" d="M{_LEFT} {to_y(0):.1f}H{_WIDTH - _RIGHT}"/>')
    colors = {name: f"line{index % NUM_COLORS}" for index, name in enumerate(lines, start=int(is_difference))}
    if len(colors) == 1:
        colors = {name: f"{color} solid" for name, color in colors.items()}
    for name, parts in lines.items():
        color = colors[name]
        for part in parts:
            path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in part)
            if len(part) == 1:
                at_x, at_y = part[0]
                shape = f'<circle class="{color}" cx="{to_x(at_x):.1f}" cy="{to_y(at_y):.1f}" r="2.5">'
                body.append(f"{shape}<title>{escape(name)}</title></circle>")
            else:
                body.append(f'<path class="line {color}" d="M{path}"><title>{escape(name)}</title></path>')
    if has_hover:
        body += _hover_of_lines(lines, x, to_x)
    keys = _legend(colors) if len(lines) > 1 or is_difference else ""
    return f"<figure>{_svg(title, _WIDTH, _HEIGHT, body)}{keys}</figure>"


def _hover_of_lines(lines: Mapping[str, Sequence[Points]], x: str, to_x: Callable[[float], float]) -> Iterator[str]:
    """Yield invisible columns, each with a text for the mouse pointer: the values of the first `_MAX_NAMES` lines at
    one x."""
    shown = {name: dict(point for part in parts for point in part) for name, parts in [*lines.items()][:_MAX_NAMES]}
    places = sorted({place for values in shown.values() for place in values})
    places = places[:: -(-len(places) // _MAX_COLUMNS)] if places else []
    for index, place in enumerate(places):
        left = to_x(place if index == 0 else (places[index - 1] + place) / 2)
        right = to_x(place if index == len(places) - 1 else (place + places[index + 1]) / 2)
        values = (f"{name}: {found[place]:.6g}" for name, found in shown.items() if place in found)
        yield _column(left, max(right - left, 1), [f"{x} {place:,.0f}", *values])


@dataclass(frozen=True)
class Column:
    """A column of a stacked chart, for the steps from `first` to `last`."""

    first: int
    last: int
    parts: Mapping[str, float]
    """Height of each part. A part that is negative or not finite has no area."""

    @property
    def height(self) -> float:
        return sum(self.parts.values())


def stacked_chart(title: str, columns: Sequence[Column], unit: str, colors: Mapping[str, int]) -> str:
    """Return a chart with a column for each interval of steps, divided into parts; "" if no column has a height. Very
    high columns are cut off and labelled with their height. `colors`: number of the color of each part. The parts are
    in this order from bottom to top."""
    heights = [sum(map(_extent, column.parts.values())) for column in columns]
    if not columns or not max(heights) > 0:
        return ""
    limit = _SLOW * sorted(heights)[len(heights) // 2]
    y_ticks = _ticks(0.0, max([height for height in heights if height <= limit] or heights) or max(heights))
    right = _WIDE - _LABELS
    to_y = _scale(0.0, y_ticks[-1], _HEIGHT - _BOTTOM, _TOP + 16)
    axis, to_x = _x_axis(columns[0].first - 1, columns[-1].last, "step", right)
    body = [*_y_axis(title, y_ticks, to_y, right), *axis]
    shapes: dict[str, list[str]] = {name: [] for name in colors}
    labels, hover = [], []
    label_end = 0.0
    for column, height in zip(columns, heights, strict=True):
        left, width = to_x(column.first - 1), max(to_x(column.last) - to_x(column.first - 1), 0.5)
        for name, low, high in _segments(column.parts, colors):
            end, top = (to_y(min(value, y_ticks[-1])) for value in (low, high))
            if end - top >= 0.05:
                shapes[name].append(f"M{left:.1f} {end:.1f}V{top:.1f}h{width:.1f}V{end:.1f}z")
        if height > y_ticks[-1] and left >= label_end:
            text = f"{height:.3g} {unit}"
            labels.append(f'<text class="tick" x="{left:.1f}" y="{_TOP + 12}">^ {text}</text>')
            label_end = left + 8 * (len(text) + 3)
        hover.append(_column(left, width, _describe(column, unit, colors)))
    body += [f'<path class="area part{colors[name]}" d="{"".join(paths)}"/>' for name, paths in shapes.items() if paths]
    body += [*labels, *_names_at_the_right(columns[-1], colors, right, to_y, y_ticks[-1]), *hover]
    keys = _legend({name: f"part{color}" for name, color in colors.items()})
    return f'<figure class="wide">{_svg(title, _WIDE, _HEIGHT, body)}{keys}</figure>'


def _segments(parts: Mapping[str, float], names: Iterable[str]) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the start and the end of each part. Each part starts where the previous one ends."""
    end = 0.0
    for name in names:
        start, end = end, end + _extent(parts.get(name, 0.0))
        yield name, start, end


def _extent(part: float) -> float:
    return part if 0 < part < math.inf else 0.0


def _describe(column: Column, unit: str, names: Mapping[str, int]) -> Iterator[str]:
    steps = f"step {column.last:,}" if column.first == column.last else f"steps {column.first:,} to {column.last:,}"
    yield f"{steps}: {column.height:.4g} {unit}"
    for name in names:
        if name in column.parts:
            value = column.parts[name]
            share = f" ({100 * value / column.height:.1f} %)" if column.height > 0 else ""
            yield f"{name}: {value:.4g} {unit}{share}"


def _names_at_the_right(
    column: Column, names: Mapping[str, int], x: float, to_y: Callable[[float], float], top: float
) -> Iterator[str]:
    for name, low, high in _segments(column.parts, names):
        end, start = to_y(min(low, top)), to_y(min(high, top))
        if end - start >= 14:
            yield f'<text class="name" x="{x + 8:.1f}" y="{(start + end) / 2 + 4:.1f}">{escape(name[:16])}</text>'


@dataclass(frozen=True)
class Bar:
    """A horizontal bar."""

    label: str
    """Text above the bar."""

    parts: Mapping[str, float]
    """Length of each part. A part that is negative or not finite is not drawn."""


_ROW = 44
"""Height of a bar with its label, in SVG units."""


def bar_chart(title: str, bars: Sequence[Bar], unit: str, colors: Mapping[str, int], limit: float | None = None) -> str:
    """Return horizontal bars with one scale, which begins at 0; "" if no bar has a length. `title`: the measured
    quantity, with its unit. `colors`: number of the color of each part. `limit`: value that is drawn as a line. A
    limit far beyond all bars is only in the title."""
    lengths = [sum(map(_extent, bar.parts.values())) for bar in bars]
    if not bars or not max(lengths) > 0:
        return ""
    note = ""
    if limit is not None and limit > _FAR * max(lengths):
        note, limit = f" (the limit of {limit:.4g} {unit} is far to the right)", None
    ticks = _ticks(0.0, max(*lengths, limit or 0.0))
    left, right, top = 8, _WIDE - 40, 30 if limit is None else 48
    bottom = top + _ROW * len(bars)
    to_x = _scale(0.0, ticks[-1], left, right)
    body = [f'<text x="{left}" y="18" class="title">{escape(title + note)}</text>']
    for tick in ticks:
        body.append(f'<path class="grid" d="M{to_x(tick):.1f} {top}V{bottom}"/>')
        anchor = "middle" if tick else "start"
        body.append(f'<text class="tick {anchor}" x="{to_x(tick):.1f}" y="{bottom + 16}">{_number(tick, ticks)}</text>')
    for index, bar in enumerate(bars):
        y = top + _ROW * index
        body.append(f'<text x="{left}" y="{y + 14}">{escape(without_end(bar.label, most=140))}</text>')
        for name, start, end in _segments(bar.parts, bar.parts):
            if end > start:
                value = end - start
                text = escape(f"{name}: {value:.4g} {unit} ({100 * value / lengths[index]:.1f} %)")
                shape = f"M{to_x(start):.1f} {y + 20}H{to_x(end):.1f}v18H{to_x(start):.1f}z"
                body.append(f'<path class="area part{colors[name]}" d="{shape}"><title>{text}</title></path>')
    if limit is not None:
        x = to_x(limit)
        side = "end" if x > _WIDE / 2 else "start"
        body.append(f'<path class="limit" d="M{x:.1f} {top - 14}V{bottom}"/>')
        label_x = x - 6 if side == "end" else x + 6
        body.append(f'<text class="{side}" x="{label_x:.1f}" y="{top - 4}">limit {limit:.4g} {escape(unit)}</text>')
    names = {name: f"part{colors[name]}" for name in colors if any(name in bar.parts for bar in bars)}
    keys = _legend(names) if len(names) > 1 and any(len(bar.parts) > 1 for bar in bars) else ""
    return f'<figure class="wide">{_svg(title, _WIDE, bottom + 26, body)}{keys}</figure>'


def without_end(text: str, most: int) -> str:
    """Return a text of at most `most` characters. If `text` is longer, ` ...` replaces its end."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


_TEXT_WIDTH, _TEXT_HEIGHT = 64, 9


def text_chart(series: Mapping[str, Points], x: str) -> list[str]:
    """Return a chart as lines of text, with a horizontal line at 0; [] if no value is finite. Each series is drawn with
    the first character of its name."""
    finite = [point for points in series.values() for point in points if math.isfinite(point[1])]
    if not finite:
        return []
    first, last = min(place for place, _ in finite), max(place for place, _ in finite)
    low, high = min(0.0, *(y for _, y in finite)), max(0.0, *(y for _, y in finite))
    to_row = _scale(low, high if high > low else 1.0, _TEXT_HEIGHT - 1, 0)
    zero = round(to_row(0.0))
    rows = [["-" if row == zero else " "] * _TEXT_WIDTH for row in range(_TEXT_HEIGHT)]
    for name, points in series.items():
        for column in range(_TEXT_WIDTH):
            value = value_at(points, first + (last - first) * column / (_TEXT_WIDTH - 1))
            if math.isfinite(value):
                rows[round(to_row(value))][column] = name[0]
    labels = {0: f"{high:+.3g}" if high else "", _TEXT_HEIGHT - 1: f"{low:+.3g}" if low else "", zero: "0"}
    lines = [f"{labels.get(index, ''):>10} |{''.join(row)}".rstrip() for index, row in enumerate(rows)]
    left, right = f"{x} {first:,.0f}", f"{last:,.0f}"
    return [*lines, f"{'':>10}  {left}{right:>{_TEXT_WIDTH - len(left)}}"]


def value_at(points: Points, place: float) -> float:
    """Return the value of a series at the x coordinate `place`, interpolated between its points. Return NaN before the
    first point and after the last one."""
    if not points or not points[0][0] <= place <= points[-1][0]:
        return math.nan
    index = bisect_left(points, place, key=itemgetter(0))
    after, value = points[index]
    if after == place:
        return value
    before, start = points[index - 1]
    return start + (value - start) * (place - before) / (after - before)


def _svg(title: str, width: int, height: int, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'


def _legend(classes: Mapping[str, str]) -> str:
    """Return the legend of a chart: the first `_MAX_NAMES` names of series or parts, each with a line or an area in its
    CSS class, and the number of further names."""
    names = [*classes]
    shown = [f"<span>{_sample(classes[name])}{escape(name)}</span>" for name in names[:_MAX_NAMES]]
    more = f"<span>and {len(names) - _MAX_NAMES} more</span>" if len(names) > _MAX_NAMES else ""
    return f'<figcaption class="legend">{"".join(shown)}{more}</figcaption>'


def _sample(color: str) -> str:
    """Return a small picture of a line or of an area. `color`: its CSS class."""
    if color.startswith("line"):
        return f'<svg class="key" viewBox="0 0 26 12"><path class="line {color}" d="M0 6H26"/></svg>'
    return f'<svg class="key" viewBox="0 0 12 12"><path class="area {color}" d="M0 0H12V12H0z"/></svg>'


def _y_axis(title: str, ticks: Sequence[float], to_y: Callable[[float], float], right: float) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>'
    for tick in ticks:
        y = to_y(tick)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{_number(tick, ticks)}</text>'


def _x_axis(low: float, high: float, name: str, right: float) -> tuple[list[str], Callable[[float], float]]:
    """Return an axis of whole numbers with its name, and the function from a number to a coordinate."""
    ticks = _ticks(low, high, is_whole=True, intervals=6)
    inside = [tick for tick in ticks if low <= tick <= high] if high > low else []
    low, high = (low, high) if high > low else (low - 1, high + 1)
    to_x = _scale(low, high, _LEFT, right)
    bottom = _HEIGHT - _BOTTOM
    axis = [f'<text x="{right:.1f}" y="{_HEIGHT - 8}" class="tick end">{escape(name)}</text>']
    for tick in inside or [(low + high) / 2]:
        x = to_x(tick)
        axis.append(f'<path class="grid" d="M{x:.1f} {bottom}v4"/>')
        axis.append(f'<text x="{x:.1f}" y="{bottom + 17}" class="tick middle">{_whole(tick)}</text>')
    return axis, to_x


def _whole(value: float) -> str:
    """Return a whole number with separators, or with a suffix from a million on."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.4g}{suffix}"
    return f"{value:,.0f}"


def _column(left: float, width: float, lines: Iterable[str]) -> str:
    """Return an invisible column with a text for the mouse pointer."""
    text = escape("\n".join(lines))
    frame = f'x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _BOTTOM - _TOP}"'
    return f'<rect class="hover" {frame}><title>{text}</title></rect>'


def _thinned(points: Points) -> Points:
    if len(points) <= _MAX_POINTS:
        return points
    size = -(-2 * len(points) // _MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [point for point in part if math.isfinite(point[1])]
        shown = {choose(finite, key=lambda point: point[1]) for choose in (min, max)} if finite else set()
        shown |= {*islice((point for point in part if not math.isfinite(point[1])), 1)}
        kept += sorted(shown)
    return kept


def _parts(points: Points) -> Iterator[Points]:
    """Yield the parts of a series between values that are not finite."""
    part: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            part.append(point)
        elif part:
            yield part
            part = []
    if part:
        yield part


def _ticks(low: float, high: float, is_whole: bool = False, intervals: int = 4) -> list[float]:
    """Return equally spaced round numbers from at most `low` to at least `high`, with about `intervals` gaps."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-12 * size:  # otherwise neighboring ticks could be equal
        low, high = (low - 1, high + 1) if is_whole or not size else (low - size / 10, high + size / 10)
    raw = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    step = max(1.0, step) if is_whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def _number(value: float, ticks: Sequence[float]) -> str:
    """Return the value of a tick as text, with just enough digits to tell it from the next tick."""
    step = ticks[1] - ticks[0]
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e7 or largest < 1e-3:
        return f"{value:.2g}" if value else "0"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function that maps `low` to the coordinate `start`, and `high` to `end`."""
    return lambda value: start + (value - low) / (high - low) * (end - start)
