"""Pictures of training and of an evaluation, as self-contained pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from ooospec.train.evaluate import Tally, calibration_bins

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 220, 44, 24
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title><style>
:root { color-scheme: light dark; --ink: light-dark(#1c2430, #e4e8ee); --soft: light-dark(#8a94a3, #7d8794);
--grid: light-dark(#e3e7ec, #2c333d); --page: light-dark(#fff, #161a20) }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1120px;
margin: 2rem auto; padding: 0 1rem } h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 0 0 .3rem }
.charts { display: flex; flex-wrap: wrap; gap: 2rem } svg { width: 520px; max-width: 100% }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } .grid { stroke: var(--grid) }
.line { fill: none; stroke-width: 1.8 } p { color: var(--soft); margin: .2rem 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } th, td { text-align: right; padding: .25rem .7rem;
border-bottom: 1px solid var(--grid) } th:first-child, td:first-child { text-align: left } th { font-weight: 600 }
</style><h1>{{ title }}</h1><p>{{ about }}</p>
{% if head %}<table><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>{% endif %}
<div class="charts">{% for heading, text, chart in charts %}<section><h2>{{ heading }}</h2><p>{{ text }}</p>
{{ chart | safe }}</section>{% endfor %}</div></html>
"""
COLOURS = ("#2f7ed8", "#d9822b", "#3aa655", "#a05bc4", "#c0504d")
Points = Sequence[tuple[float, float]]


def line_chart(
    lines: Mapping[str, Points], top: float | None = None, diagonal: bool = False, dots: bool = False
) -> str:
    """Draw lines over common axes that begin at 0; with a legend."""
    every = [point for points in lines.values() for point in points]
    if not every:
        return ""
    right = max(max(x for x, _ in every), 1e-9)
    top = top or max(max(y for _, y in every) * 1.05, 1e-9)

    def at(x: float, y: float) -> str:
        height = min(y, top) / top * (HEIGHT - BOTTOM - 8)
        return f"{LEFT + x / right * (WIDTH - LEFT - 8):.1f},{HEIGHT - BOTTOM - height:.1f}"

    parts = []
    for step in range(5):
        level, along = top * step / 4, right * step / 4
        (_, y), (px, _) = at(0, level).split(","), at(along, 0).split(",")
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{level:.3g}</text>')
        parts.append(f'<text x="{px}" y="{HEIGHT - 6}" text-anchor="middle">{along:.3g}</text>')
    if diagonal:
        (x1, y1), (x2, y2) = at(0, 0).split(","), at(right, min(top, right)).split(",")
        parts.append(f'<line class="grid" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke-dasharray="4"/>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        if dots:
            for point in points:
                x, y = at(*point).split(",")
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 10 + number * 110}" y="14" style="fill:{colour}">{name}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def training_page(log: Path, title: str, about: str) -> str:
    """Plot loss, dev loss and dev accuracy over optimiser steps."""
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    measured = [row for row in rows if row["dev_right"]]
    kinds = sorted({kind for row in measured for kind in row["dev_right"]})
    losses = {"training": [(row["step"], row["loss"]) for row in rows]}
    losses["dev"] = [(row["step"], row["dev_loss"]) for row in measured]
    right = {k: [(row["step"], row["dev_right"][k]) for row in measured if k in row["dev_right"]] for k in kinds}
    charts = [
        ("Loss per question", "Over optimiser steps.", line_chart({k: v for k, v in losses.items() if v})),
        (
            "Dev questions answered right",
            "All tokens of the answer are the likeliest.",
            line_chart(right, 1.0, dots=True),
        ),
    ]
    return _page(title, about, (), (), charts)


COLUMNS = {
    "requests": "requests", "function_accuracy": "function", "value_accuracy": "values", "null_recall": "null recall",
    "null_precision": "null precision", "function_calibration_error": "ECE function",
    "function_calibration_noise": ".. if honest", "value_calibration_error": "ECE values",
    "value_calibration_noise": ".. if honest", "prefill_ms": "prefill ms", "function_ms": "function at ms",
    "wave_ms": "wave ms", "payload_bytes": "payload B",
}  # fmt: skip


def shown(key: str, value: float | int | None) -> str:
    """Write a figure of `Tally.to_dict`: shares in percent; counts, milliseconds and bytes as they are."""
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, int) or key.endswith(("_ms", "_bytes")) else f"{value:.1%}"


def evaluation_rows(tallies: Mapping[str, Tally]) -> list[tuple[str, ...]]:
    """Return the table of an evaluation with its head: a measure a row, a data set a column, all of them last."""
    summed = {**tallies, "all": _total(tallies)}
    columns = {name: tally.to_dict() for name, tally in summed.items()}
    rows = [(label, *(shown(key, column[key]) for column in columns.values())) for key, label in COLUMNS.items()]
    return [("", *columns), *rows]


def _total(tallies: Mapping[str, Tally]) -> Tally:
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    return total


def evaluation_page(tallies: Mapping[str, Tally], title: str, about: str) -> str:
    """Show the table of an evaluation and its calibration plots."""
    total, (head, *rows) = _total(tallies), evaluation_rows(tallies)
    charts = []
    for heading, chances in (("function choice", total.function_chances), ("values", total.value_chances)):
        points = [(chance, right) for chance, right, _ in calibration_bins(chances)]
        text = f"Share right over the chance that was sent ({len(chances)} answers); the dashed line is honest."
        charts.append((f"Calibration: {heading}", text, line_chart({"share right": points}, 1.0, True, dots=True)))
    return _page(title, about, head, rows, charts)


def _page(
    title: str,
    about: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    charts: Sequence[tuple[str, str, str]],
) -> str:
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(title=title, about=about, head=head, rows=rows, charts=charts)
