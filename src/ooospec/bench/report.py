"""`ooospec report`: report.md, report.html (self-contained) and summary.json from the rows of a benchmark run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from ooospec.bench import charts
from ooospec.bench.provenance import origin_text
from ooospec.bench.rows import Results, Row, Run
from ooospec.bench.runner import REFERENCE
from ooospec.bench.summary import Condition, Summary, best, conditions, rows_of, summarize
from ooospec.errors import UsageError
from ooospec.methods import METHODS

BENCHMARK_NAMES = {"api_bank": "API-Bank", "toolalpaca": "ToolAlpaca", "bfcl": "BFCL"}
SOURCES = ("hint", "schema", "retrieval", "recycling", "lookup", "samd", "suffix", "draft", "target")
TIMELINES_A_CELL = 6
"""Requests of a cell whose timelines the page holds."""


def method_name(name: str) -> str:
    """Return the name people know a method by."""
    special = {"ar": "AR", "stock": "AR (generate)"}
    return special.get(name) or (METHODS[name].summary if name in METHODS else name)


def write_report(folder: Path, title: str) -> list[Path]:
    """Write the report files into `folder`; returns their paths. Raises UsageError where there is nothing to report."""
    results = Results(folder)
    rows, runs = results.rows(), results.runs()
    if not rows:
        raise UsageError(f"No benchmark results in {folder}; run: ooospec bench --out {folder} --data DATA")
    if not runs:
        raise UsageError(f"{results.runs_file} is missing or empty; it says how the rows were measured. Fetch it anew.")
    tables = [(condition, summarize(rows_of(rows, condition))) for condition in conditions(rows)]
    files = {
        "report.md": _markdown(title, tables, runs),
        "report.html": _html(title, tables, runs, rows),
        "summary.json": json.dumps(
            [
                {**condition._asdict(), **msgspec.to_builtins(s, str_keys=True)}
                for condition, summaries in tables
                for s in summaries
            ],
            indent=1,
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n", "utf-8")
    return [folder / name for name in files]


# ---------------------------------------------------------------- what both reports say


def conditions_text(runs: Sequence[Run]) -> list[str]:
    """Say under which conditions the results came about, a fact a line."""
    last = runs[-1]
    settings = last.settings
    sidecars = dict.fromkeys(run.settings.get("sidecar_model") or f"none ({run.settings['target']})" for run in runs)
    adapter = f" with adapter {settings['adapter']}" if settings["adapter"] else " (zero-shot)"
    lines = [
        *origin_text(runs),
        f"Sidecar {', '.join(sidecars)}"
        + (adapter if any(run.settings.get("sidecar_model") for run in runs) else "")
        + f"; {settings['dtype']}, {settings['device']}",
        f"Greedy, batch one, at most {settings['max_new_tokens']} tokens",
        f"Suite {settings['suite']}; clock from request arrival to the last committed token, sidecar inside the clock; "
        "methods back to back per request, in rotated order",
    ]
    threads = {run.settings["placement"]: run.settings["threads"] for run in runs}
    for placement, count in threads.items():
        lines.append(
            f"Placement {placement}: target {count['target']} threads ({count['target_during_wave']} while the sidecar "
            f"works), sidecar {count['sidecar']}"
        )
    left_out = {f"{m} ({run.settings['target']})": why for run in runs for m, why in run.left_out.items()}
    lines += [f"Not measured: {name}: {why}" for name, why in left_out.items()]
    return lines


def _cells(summaries: Sequence[Summary]) -> dict[tuple[str, str], list[Summary]]:
    cells: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for summary in summaries:
        cells[summary.target, summary.benchmark].append(summary)
    return cells


def _cell_name(cell: tuple[str, str]) -> str:
    return f"{cell[0]}, {BENCHMARK_NAMES.get(cell[1], cell[1])}"


# ---------------------------------------------------------------- markdown


def _markdown(title: str, tables: Sequence[tuple[Condition, Sequence[Summary]]], runs: Sequence[Run]) -> str:
    lines = [f"# {title}", "", *(f"- {line}" for line in conditions_text(runs)), ""]
    lines += [
        "Total = ratio of summed total times, rate = ratio of mean tokens per second (the papers' formula), decode = "
        "ratio of what is left of the times when plain decoding's prefill is taken off both, all over plain decoding "
        "(AR) of the same requests in the same run. Half of the requests lie in the range given. Tokens per round "
        "count the bonus token. Host = everything in the rounds that is not the target's pass.",
        "",
    ]
    for condition, summaries in tables:
        lines += [f"## {str(condition).capitalize()}", ""]
        for cell, group in _cells(summaries).items():
            lines += _markdown_cell(cell, group, best(summaries)[cell])
    return "\n".join(lines).rstrip()


def _plain(group: Sequence[Summary]) -> Summary:
    """Return plain decoding's summary of a cell; another one where there is none."""
    return next((s for s in group if s.method == REFERENCE), group[0])


def ceiling_text(plain: Summary) -> str:
    """Say what the prompt leaves for any drafting method to gain."""
    share = plain.prefill_ms / plain.total_ms
    return (
        f"The prompt takes {100 * share:.0f} % of plain decoding's time, so no drafting could make the total more than "
        f"{1 / share:.1f}x as fast."
    )


def _markdown_cell(cell: tuple[str, str], group: Sequence[Summary], winner: str) -> list[str]:
    plain = _plain(group)
    right, known = plain.names_right
    exact, exact_known = plain.arguments_right
    lines = [
        f"### {_cell_name(cell)} ({plain.requests} requests)",
        "",
        f"Quality, the same for every method: tool names right {right}/{known}, whole calls right "
        f"{exact}/{exact_known}. {ceiling_text(plain)}",
        "",
        "| method | total | middle half | rate | decode | tokens per round | rounds | nodes | host | identical |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in group:
        name = f"**{method_name(s.method)}**" if s.method == winner else method_name(s.method)
        total = f"**{s.total_speedup:.2f}x**" if s.method == winner else f"{s.total_speedup:.2f}x"
        lines.append(
            f"| {name} | {total} | {s.spread.low:.2f} to {s.spread.high:.2f} | {s.rate_speedup:.2f}x | "
            f"{s.decode_speedup:.2f}x | {s.tokens_per_round:.2f} | {s.rounds:.1f} | {s.drafted:.1f} | "
            f"{s.host_ms_a_round:.1f} ms, {100 * s.host_share:.1f} % | {s.identical}/{s.requests} |"
        )
    lines.append("")
    for s in group:
        if s.ready_ms is not None and s.payload_bytes is not None:
            first = s.ready_rounds.get("0", 0)
            lines += [
                f"{method_name(s.method)}: function choice there before the first round in {first}/{s.requests} "
                f"requests, "
                f"seen by the target after {s.ready_ms.median:,.0f} ms; {s.payload_bytes:.0f} bytes a request.",
                "",
            ]
    return lines


# ---------------------------------------------------------------- page


def _html(
    title: str, tables: Sequence[tuple[Condition, Sequence[Summary]]], runs: Sequence[Run], rows: list[Row]
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    views = [_view(condition, summaries, rows_of(rows, condition)) for condition, summaries in tables]
    text: str = environment.get_template("report.html.j2").render(
        title=title,
        facts=conditions_text(runs),
        views=views,
        sources=SOURCES,
        timelines=_timelines(tables, rows),
    )
    return text


def _view(condition: Condition, summaries: Sequence[Summary], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything the page shows for one condition."""
    cells = _cells(summaries)
    winners = best(summaries)
    methods = list(dict.fromkeys(s.method for s in summaries))
    names = {method: method_name(method) for method in methods}
    by = {(s.target, s.benchmark, s.method): s for s in summaries}
    return {
        "name": str(condition),
        "cells": [{"name": _cell_name(cell), "requests": group[0].requests} for cell, group in cells.items()],
        "table": [
            {"name": names[method], "cells": [(by.get((*cell, method)), winners[cell] == method) for cell in cells]}
            for method in methods
        ],
        "panels": [
            _panel(cell, group, names, [r for r in rows if (r.target, r.benchmark) == cell])
            for cell, group in cells.items()
        ],
    }


def _panel(
    cell: tuple[str, str], group: Sequence[Summary], names: Mapping[str, str], rows: Sequence[Row]
) -> dict[str, Any]:
    slowest = max(s.total_ms for s in group)
    return {
        "name": _cell_name(cell),
        "quality": _plain(group),
        "ceiling": ceiling_text(_plain(group)),
        "bars": charts.speedup_bars(group, names),
        "drafting": [s for s in group if s.tokens_per_round > 1.0],
        "names": names,
        "histograms": {s.method: charts.histogram(s.round_sizes) for s in group},
        "sources": {s.method: _source_bar(s) for s in group},
        "fields": _field_table(group),
        "time": {
            s.method: charts.stacked(
                [
                    ("prefill and first pass", s.prefill_ms, "var(--prefill)"),
                    ("later passes", s.verify_ms, "var(--verify)"),
                    ("everything else", max(0.0, s.total_ms - s.prefill_ms - s.verify_ms), "var(--host)"),
                ],
                slowest,
                "ms",
            )
            for s in group
        },
        "ready": [_ready(s) for s in group if s.ready_rounds],
        "scatter": charts.scatter(
            [
                (len(r.rounds), r.total_ms / 1e3, f"var(--m-{r.method}, var(--m-other))",
                 f"{names[r.method]}, {r.request}: {len(r.rounds)} rounds, {r.total_ms / 1e3:.2f} s")
                for r in rows
            ],
            "rounds", "seconds",
        ),
    }  # fmt: skip


def _source_bar(s: Summary) -> str:
    order = [*SOURCES, *sorted(set(s.by_source) - set(SOURCES))]
    parts = [(source, float(s.by_source.get(source, 0)), f"var(--{source}, var(--m-other))") for source in order]
    return charts.stacked(parts, sum(s.by_source.values()), "tokens")


def _field_table(group: Sequence[Summary]) -> dict[str, list[tuple[str, float | None]]]:
    """Share of each field's tokens that a draft held, per method."""
    fields = [f for f in ("text", "structure", "name", "key", "value", "end") if any(f in s.by_field for s in group)]
    return {
        field: [
            (s.method, s.by_field[field][0] / s.by_field[field][1] if s.by_field.get(field, (0, 0))[1] else None)
            for s in group
            if s.tokens_per_round > 1.0
        ]
        for field in fields
    }


def _ready(s: Summary) -> dict[str, Any]:
    total = sum(s.ready_rounds.values())
    order = sorted(s.ready_rounds, key=lambda key: (key == "never", int(key) if key != "never" else 0))
    return {
        "method": s.method,
        "shares": [(key, s.ready_rounds[key], 100 * s.ready_rounds[key] / total) for key in order],
        "ready": s.ready_ms,
        "payload": s.payload_bytes,
    }


def _timelines(tables: Sequence[tuple[Condition, Sequence[Summary]]], rows: Sequence[Row]) -> str:
    """The rounds of some requests of every cell, as JSON for the page's script."""
    listed: list[dict[str, Any]] = []
    for condition, _ in tables:
        here = rows_of(rows, condition)
        for cell in dict.fromkeys((row.target, row.benchmark) for row in here):
            mine = [row for row in here if (row.target, row.benchmark) == cell]
            for request in list(dict.fromkeys(row.request for row in mine))[:TIMELINES_A_CELL]:
                group = sorted(
                    (r for r in mine if r.request == request), key=lambda r: [*METHODS, r.method].index(r.method)
                )
                plain = next((row for row in group if row.method == REFERENCE), group[0])
                listed.append(
                    {
                        "name": f"{_cell_name(cell)} - {request} - {condition}",
                        "methods": [_timeline(row, row.pieces or plain.pieces) for row in group],
                    }
                )
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _timeline(row: Row, pieces: Sequence[str]) -> dict[str, Any]:
    rounds, position = [], 0
    for r in row.rounds:
        text = "".join(pieces[position : position + r.committed])
        position += r.committed
        rounds.append([round(r.start_ms), round(r.verify_ms), r.drafted, r.sources, text])
    hint = row.hint
    return {
        "name": method_name(row.method),
        "total": round(row.total_ms),
        "rounds": rounds,
        "hint": None if hint is None else [hint.prefill_ms, hint.wave_ms, hint.payload_bytes],
    }
