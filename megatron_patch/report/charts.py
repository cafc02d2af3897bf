"""Line charts and heat maps as inline SVG: no script, no request, readable in light, dark, print.

Every drawing has a title and a description in words for those who cannot see it, and its figures
stand in a table or in the run's metrics.csv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_patch.report.markup import Child, Markup, tag

WIDTH, HEIGHT = 760, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
MAX_POINTS = 700
TITLED_CELLS = 1600
"""Heat maps with more cells have no tooltip in each."""
LARGEST = 1e100
"""A figure beyond it is drawn as infinite: no float32 is, and distances between such overflow."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Values that are not finite interrupt it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False


def thin(series: Series, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about ``most`` points: the lowest and the highest of each bucket, so spikes stay."""
    points = list(zip(series.steps, series.values, strict=True))
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        bucket = points[at : at + size]
        broken = [p for p in bucket if not math.isfinite(p[1])]
        finite = [p for p in bucket if math.isfinite(p[1])]
        chosen = {min(finite, key=_value), max(finite, key=_value)} if finite else set()
        chosen |= set(broken[:1])
        kept += sorted(chosen, key=lambda p: p[0])
    return kept


def _value(point: tuple[float, float]) -> float:
    return point[1]


def ticks(low: float, high: float, *, log: bool = False, count: int = 5) -> list[float]:
    """Round positions in [low, high]."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / (count + 1)))
        found = [10.0**e for e in range(first, last + 1, step)]
        return found if len(found) > 1 else [low, high]
    if high <= low:
        return [low]
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step_size = base * next((m for m in (1, 2, 2.5, 5, 10) if m * base >= raw), 10)
    first_tick = math.ceil(low / step_size - 1e-9)
    return [i * step_size for i in range(first_tick, math.floor(high / step_size + 1e-9) + 1)]


def number(x: float) -> str:
    """A figure short enough for an axis."""
    if not math.isfinite(x):
        return str(x)
    if x == 0:
        return "0"
    if abs(x) >= 1e7 or abs(x) < 1e-3:
        return f"{x:.1e}".replace("e+0", "e").replace("e-0", "e-").replace(".0e", "e")
    return f"{x:,.4g}" if abs(x) < 1000 else f"{x:,.0f}"


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool
    start: float
    length: float

    def __call__(self, x: float) -> float:
        low, high = self.low, self.high
        if self.log:
            x, low, high = math.log10(x), math.log10(low), math.log10(high)
        share = (x - low) / (high - low) if high > low else 0.5
        return self.start + self.length * min(1.0, max(0.0, share))


def line_chart(
    name: str, series: Sequence[Series], *, title: str, unit: str, log: bool = False
) -> Markup:
    """A chart over steps; ``name`` is unique on the page. Says so where there is nothing to draw.

    With ``log`` values that are not positive are left out.
    """
    usable = [_usable(s, log) for s in series]
    finite = [v for s in usable for v in s.values if math.isfinite(v)]
    steps = [x for s in usable for x in s.steps]
    if not finite:
        return tag("p", f"{title}: nothing was recorded.", class_="none")
    x = _Scale(min(steps), max(steps), False, LEFT, WIDTH - LEFT - RIGHT)
    low, high = min(finite), max(finite)
    if not log:
        pad = 0.04 * (high - low) or max(abs(high), 1e-9) * 0.05
        low, high = low - pad, high + pad
    elif high <= low * 1.001:
        low, high = low / 2, high * 2
    y = _Scale(low, high, log, HEIGHT - BOTTOM, -(HEIGHT - TOP - BOTTOM))
    parts: list[Child] = [_frame(x, y, unit)]
    for index, one in enumerate(usable):
        parts.append(_line(one, index, x, y))
    said = "; ".join(_describe(s) for s in usable)
    drawing = _svg(name, title, said, WIDTH, HEIGHT, parts)
    legend = _legend(usable) if len(usable) > 1 else None
    return tag("figure", tag("figcaption", title), drawing, legend)


def _usable(series: Series, log: bool) -> Series:
    values = [v if abs(v) < LARGEST and (v > 0 or not log) else math.nan for v in series.values]
    return Series(series.label, series.steps, values, series.dots)


def _frame(x: _Scale, y: _Scale, unit: str) -> list[Child]:
    parts: list[Child] = []
    for value in ticks(y.low, y.high, log=y.log):
        at = f"{y(value):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", number(value), x=LEFT - 6, y=at, dy="0.35em", class_="end"))
    for value in ticks(x.low, x.high, count=8):
        at = f"{x(value):.1f}"
        bottom = HEIGHT - BOTTOM
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", number(value), x=at, y=bottom + 16, class_="middle"))
    bottom = HEIGHT - BOTTOM
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", "step", x=WIDTH - RIGHT, y=HEIGHT - 4, class_="end"))
    middle = (TOP + bottom) / 2
    turn = f"rotate(-90 12 {middle:.0f})"
    parts.append(tag("text", unit, x=12, y=f"{middle:.0f}", transform=turn, class_="middle"))
    return parts


def _line(series: Series, index: int, x: _Scale, y: _Scale) -> list[Child]:
    color = f"c{index % 8}"
    points = thin(series)
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            pieces[-1].append((x(step), y(value)))
        elif pieces[-1]:
            pieces.append([])
    parts: list[Child] = []
    for piece in pieces:
        if len(piece) > 1 and not series.dots:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in piece)
            parts.append(tag("path", d=path, class_=f"line {color}"))
        else:
            parts += [
                tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=2.5, class_=f"dot {color}")
                for a, b in piece
            ]
    return parts


def _describe(series: Series) -> str:
    """The line in words."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    if not pairs:
        return f"{series.label}: no finite value"
    low, high = min(pairs, key=_value), max(pairs, key=_value)
    return (
        f"{series.label}: {number(pairs[0][1])} at step {number(pairs[0][0])}, lowest "
        f"{number(low[1])} at {number(low[0])}, highest {number(high[1])} at {number(high[0])}, "
        f"{number(pairs[-1][1])} at {number(pairs[-1][0])}"
    )


def _legend(series: Sequence[Series]) -> Markup:
    return tag(
        "ul",
        [
            tag("li", tag("span", "", class_=f"swatch b{i % 8}", aria_hidden="true"), s.label)
            for i, s in enumerate(series)
        ],
        class_="legend",
    )


def _svg(name: str, title: str, said: str, width: int, height: int, parts: Child) -> Markup:
    labels = f"{name}-title {name}-desc"
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", said, id=f"{name}-desc"),
        parts,
        viewbox=f"0 0 {width} {height}",
        # Charts fill the page; maps keep the size their cells were given.
        class_="wide" if width == WIDTH else None,
        width=None if width == WIDTH else width,
        role="img",
        aria_labelledby=labels,
    )


# Viridis at five places: even steps of lightness, readable in gray and with any color vision.
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def color(share: float) -> str:
    """Color of a value at ``share`` (0..1) of the scale."""
    at = min(1.0, max(0.0, share)) * (len(_STOPS) - 1)
    i = min(int(at), len(_STOPS) - 2)
    mixed = (a + (b - a) * (at - i) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


@dataclass(frozen=True, slots=True)
class Grid:
    """What a heat map shows: rows x columns, None where nothing was measured."""

    values: Sequence[Sequence[float | None]]
    row_name: str
    column_name: str
    rows: Sequence[str]
    columns: Sequence[str]


def heat_map(name: str, grid: Grid, *, title: str, log: bool = False) -> Markup:
    """A grid of colored cells with its scale; says so where nothing was measured."""
    places = [
        (value, i, j)
        for i, row in enumerate(grid.values)
        for j, value in enumerate(row)
        if value is not None and math.isfinite(value) and (value > 0 or not log)
    ]
    if not places:
        return tag("p", f"{title}: nothing was measured.", class_="none")
    low, (high, row, column) = min(places)[0], max(places)
    said = (
        f"{len(grid.rows)} x {len(grid.columns)} values from {number(low)} to {number(high)}; the "
        f"largest is at {grid.row_name} {grid.rows[row]}, {grid.column_name} {grid.columns[column]}"
    )
    side = max(4.0, min(24.0, (WIDTH - LEFT - RIGHT) / len(grid.columns)))
    tall = max(4.0, min(18.0, 420 / len(grid.rows)))
    parts = [
        *_cells(grid, _Scale(low, high, log, 0.0, 1.0), side, tall),
        *_labels(grid, side, tall),
    ]
    width = round(max(LEFT + len(grid.columns) * side + RIGHT, 240))
    height = round(TOP + len(grid.rows) * tall + 34)
    drawing = _svg(name, title, said, width, height, parts)
    return tag("figure", tag("figcaption", title), drawing, _key(low, high))


def _cells(grid: Grid, scale: _Scale, side: float, tall: float) -> Iterator[Markup]:
    """One rectangle a value, with its figure as a tooltip unless there are too many."""
    titled = len(grid.rows) * len(grid.columns) <= TITLED_CELLS
    for i, row in enumerate(grid.values):
        for j, value in enumerate(row):
            shown, fill = "not measured", None
            if value is not None and math.isfinite(value):
                shown = number(value)
                fill = color(scale(value)) if value > 0 or not scale.log else None
            where = f"{grid.row_name} {grid.rows[i]}, {grid.column_name} {grid.columns[j]}: {shown}"
            yield tag(
                "rect",
                *((tag("title", where),) if titled else ()),
                x=f"{LEFT + j * side:.1f}",
                y=f"{TOP + i * tall:.1f}",
                width=f"{side:.1f}",
                height=f"{tall:.1f}",
                fill=fill,
                class_="cell",
            )


def _labels(grid: Grid, side: float, tall: float) -> Iterator[Markup]:
    """Names of rows and columns, as many as there is room for."""
    for i in range(0, len(grid.rows), max(1, math.ceil(9 / tall))):
        y = f"{TOP + (i + 0.5) * tall:.1f}"
        yield tag("text", grid.rows[i], x=LEFT - 6, y=y, dy="0.35em", class_="end")
    bottom = TOP + len(grid.rows) * tall
    longest = max(len(label) for label in grid.columns)
    for j in range(0, len(grid.columns), max(1, math.ceil((7 * longest + 8) / side))):
        x = f"{LEFT + (j + 0.5) * side:.1f}"
        yield tag("text", grid.columns[j], x=x, y=f"{bottom + 14:.1f}", class_="middle")
    yield tag("text", grid.column_name, x=LEFT, y=f"{bottom + 28:.1f}")
    yield tag("text", grid.row_name, x=2, y=TOP - 2)


def _key(low: float, high: float) -> Markup:
    """The color scale in words and colors; squares without a border of their own print too."""
    squares = [tag("rect", x=i * 8, y=0, width=8, height=10, fill=color(i / 19)) for i in range(20)]
    strip = tag("svg", squares, viewbox="0 0 160 10", class_="key", aria_hidden="true")
    return tag("p", number(low), " ", strip, " ", number(high), class_="scale")
