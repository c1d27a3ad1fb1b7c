"""Small charts as inline SVG or HTML; colours are the page's CSS variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ooospec.bench.summary import Summary

BAR_HEIGHT, GAP, LABEL_WIDTH, WIDTH = 18, 6, 110, 520


def speedup_bars(summaries: Sequence[Summary], names: Mapping[str, str]) -> str:
    """Bars of total speedup with the quartiles of single requests as whiskers; the decode part as a mark."""
    top = max(max(s.total_speedup, s.spread.high, s.decode_speedup) for s in summaries) * 1.08
    rows = []
    for index, s in enumerate(summaries):
        y = index * (BAR_HEIGHT + GAP)
        middle = y + BAR_HEIGHT / 2
        x = lambda value: LABEL_WIDTH + value / top * (WIDTH - LABEL_WIDTH - 44)  # noqa: E731
        title = (
            f"{names[s.method]}: {s.total_speedup:.2f}x of total time (half of the requests between "
            f"{s.spread.low:.2f}x and {s.spread.high:.2f}x), decode part {s.decode_speedup:.2f}x"
        )
        rows.append(
            f'<g><title>{escape(title)}</title><text x="{LABEL_WIDTH - 8}" y="{middle}" class="lab">'
            f"{escape(names[s.method])}</text>"
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{x(s.total_speedup) - LABEL_WIDTH:.1f}" height="{BAR_HEIGHT}" '
            f'fill="var(--m-{s.method}, var(--m-other))" rx="2"/>'
            f'<line x1="{x(s.spread.low):.1f}" x2="{x(s.spread.high):.1f}" y1="{middle}" y2="{middle}" class="whisk"/>'
            f'<circle cx="{x(s.decode_speedup):.1f}" cy="{middle}" r="4" class="dec"/>'
            f'<text x="{max(x(s.total_speedup), x(s.spread.high), x(s.decode_speedup) + 5) + 5:.1f}" y="{middle}" '
            f'class="val">{s.total_speedup:.2f}x</text></g>'
        )
    one = LABEL_WIDTH + 1 / top * (WIDTH - LABEL_WIDTH - 44)
    height = len(summaries) * (BAR_HEIGHT + GAP)
    line = f'<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{height}" class="one"/>'
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{line}{"".join(rows)}</svg>'


def histogram(counts: Mapping[int, int], limit: int = 24) -> str:
    """Columns of how many rounds committed 1, 2, 3, .. tokens; the last column takes the rest."""
    values = [0] * limit
    for size, count in counts.items():
        values[min(max(size, 1), limit) - 1] += count
    total, top = sum(values) or 1, max(values) or 1
    bars = []
    for index, value in enumerate(values):
        height = 60 * value / top
        label = f"{index + 1}{'+' if index == limit - 1 else ''} tokens: {value} rounds ({100 * value / total:.0f} %)"
        bars.append(
            f'<rect x="{index * 9}" y="{62 - height:.1f}" width="8" height="{height:.1f}" class="col">'
            f"<title>{label}</title></rect>"
        )
    ticks = "".join(
        f'<text x="{9 * (n - 1) + 4}" y="76" class="tick">{n}{"+" if n == limit else ""}</text>'
        for n in (1, 4, 8, 12, 16, 20, limit)
    )
    return f'<svg viewBox="0 0 {limit * 9} 80" role="img">{"".join(bars)}{ticks}</svg>'


def stacked(parts: Sequence[tuple[str, float, str]], whole: float, unit: str) -> str:
    """One horizontal bar of labelled parts (label, value, CSS colour), drawn to the scale of `whole`."""
    cells = [
        f'<i style="width:{100 * value / whole:.2f}%;background:{colour}" '
        f'title="{escape(label)}: {value:,.{0 if value >= 20 else 1}f} {unit}"></i>'
        for label, value, colour in parts
        if value > 0 and whole > 0
    ]
    return f'<div class="stack">{"".join(cells)}</div>'


def scatter(points: Sequence[tuple[float, float, str, str]], x_name: str, y_name: str) -> str:
    """Points (x, y, CSS colour, title) with axes from zero."""
    if not points:
        return ""
    x_top = 1.05 * max(x for x, _, _, _ in points) or 1.0
    y_top = 1.05 * max(y for _, y, _, _ in points) or 1.0
    dots = "".join(
        f'<circle cx="{44 + 470 * x / x_top:.1f}" cy="{208 - 196 * y / y_top:.1f}" r="3" fill="{colour}" '
        f'fill-opacity=".65"><title>{escape(title)}</title></circle>'
        for x, y, colour, title in points
    )
    ticks = "".join(
        f'<text x="{44 + 470 * part:.0f}" y="222" class="tick">{x_top * part:.0f}</text>'
        f'<text x="40" y="{212 - 196 * part:.0f}" class="lab">{y_top * part:.0f}</text>'
        f'<line x1="44" x2="514" y1="{208 - 196 * part:.0f}" y2="{208 - 196 * part:.0f}" class="grid"/>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    axes = (
        f'<text x="280" y="238" class="tick">{escape(x_name)}</text>'
        f'<text x="46" y="8" class="val">{escape(y_name)}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} 242" role="img">{ticks}{dots}{axes}</svg>'
