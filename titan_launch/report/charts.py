"""Charts as SVG text, without a script and without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import islice

Points = Sequence[tuple[float, float]]
"""Pairs (step, value), with increasing steps."""

COLORS = ("#2f6fbb", "#d1603d", "#3b8f5a", "#8a5ab5", "#b08a1e", "#c2447e", "#3a9aa8", "#7a7a7a")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 560, 260, 64, 30, 30, 12
_MAX_POINTS = 600
"""Largest number of points of a line. A longer series shows the smallest and the largest value of each interval, and
the first value that is not finite."""

_MAX_NAMES = 8
"""Largest number of series with names below a chart."""


def line_chart(title: str, series: Mapping[str, Points]) -> str:
    """Return a chart of values by step. Values that are not finite are gaps. A series without finite values has no
    line. `title` and names are plain text."""
    lines = {name: [list(part) for part in _parts(_thinned(points))] for name, points in series.items()}
    finite = [point for parts in lines.values() for part in parts for point in part]
    if not finite:
        return f"<figure><figcaption>{escape(title)}: no finite value</figcaption></figure>"
    x_ticks = _ticks(min(x for x, _ in finite), max(x for x, _ in finite), is_whole=True)
    y_ticks = _ticks(min(y for _, y in finite), max(y for _, y in finite))
    to_x = _scale(x_ticks, _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(y_ticks, _HEIGHT - _BOTTOM, _TOP)
    body = [f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>']
    for tick in y_ticks:
        y = to_y(tick)
        body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{_number(tick, y_ticks)}</text>')
    for tick in x_ticks:
        x = to_x(tick)
        body.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" class="tick middle">{tick:,.0f}</text>')
    for index, (name, parts) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        for part in parts:
            path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in part)
            if len(part) == 1:
                x, y = part[0]
                shape = f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.5" fill="{color}">'
                body.append(f"{shape}<title>{escape(name)}</title></circle>")
            else:
                body.append(f'<path class="line" stroke="{color}" d="M{path}"><title>{escape(name)}</title></path>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return f"<figure>{svg}{legend(list(lines)) if len(lines) > 1 else ''}</figure>"


def legend(names: Sequence[str]) -> str:
    """Return the names of series with their colors."""
    shown = [_key(name, COLORS[index % len(COLORS)]) for index, name in enumerate(names[:_MAX_NAMES])]
    more = f"<span>and {len(names) - _MAX_NAMES} more</span>" if len(names) > _MAX_NAMES else ""
    return f'<figcaption class="legend">{"".join(shown)}{more}</figcaption>'


def _key(name: str, color: str) -> str:
    return f'<span><i style="background:{color}"></i>{escape(name)}</span>'


def stacked_bars(bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Return a horizontal bar for each name, divided into parts. All bars have the same scale, and the same part has
    the same color in each."""
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    longest = max((sum(parts.values()) for parts in bars.values()), default=0) or 1
    rows = []
    for name, parts in bars.items():
        cells = []
        for part, value in parts.items():
            share = 100 * value / longest
            text = f"{part}: {value:.3g} {unit} ({100 * value / (sum(parts.values()) or 1):.1f} %)"
            style = f"width:{share:.3f}%;background:{colors[part]}"
            cells.append(f'<i style="{style}" title="{escape(text)}"></i>')
        label = f"<b>{escape(name)}</b>" if len(bars) > 1 else ""
        rows.append(f'{label}<div class="bar">{"".join(cells)}</div>')
    keys = "".join(_key(name, color) for name, color in colors.items())
    return f'<figure class="wide">{"".join(rows)}<figcaption class="legend">{keys}</figcaption></figure>'


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


def _ticks(low: float, high: float, is_whole: bool = False) -> list[float]:
    """Return about five round numbers that enclose an interval."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-12 * size:  # ticks between them could be equal
        low, high = (low - 1, high + 1) if is_whole or not size else (low - size / 10, high + size / 10)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    step = max(1.0, step) if is_whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def _number(value: float, ticks: Sequence[float]) -> str:
    """Return a tick's number with the digits that tell it from the next."""
    step = ticks[1] - ticks[0]
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e7 or largest < 1e-3:
        return f"{value:.2g}" if value else "0"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _scale(ticks: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Return the function from a value to a coordinate between `low` and `high`."""
    return lambda value: low + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (high - low)
