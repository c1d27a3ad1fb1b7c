"""The comparison as one self-contained page, with the timeline to scale."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ooospec.bench.compare import Comparison
from ooospec.chat.codec import TextCodec
from ooospec.demo.terminal import METHOD_NAMES, call_text
from ooospec.generation import Generation

_STYLE = """
:root{--bg:#fbfbfa;--fg:#1c1e21;--dim:#62676d;--line:#dcdfe3;--card:#fff;--prefill:#c9ced4;
--hint:#1a7f43;--schema:#0b69c7;--retrieval:#7a4fd0;--recycling:#b45309;--lookup:#8a6d00;--target:#7b8188}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e6e8ea;--dim:#9aa1a9;--line:#30343a;--card:#1c1f23;
--prefill:#454b53;--hint:#4cc27a;--schema:#58a6f5;--retrieval:#b197fc;--recycling:#f0a04b;--lookup:#e0c341;--target:#8b929a}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.5rem;margin:0 0 4px}
.dim{color:var(--dim)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:18px 0}
h2{font-size:1.05rem;margin:0 0 4px}
.call{font-family:ui-monospace,monospace;font-weight:600;overflow-wrap:anywhere;margin:8px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500;font-size:.85rem}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}
tr.best td{font-weight:650}.ok{color:var(--hint)}.tie{color:var(--recycling)}.bad{color:#d1242f;font-weight:700}
.lane{display:grid;grid-template-columns:118px 1fr;align-items:center;margin:5px 0;font-size:.85rem}
.track{position:relative;height:18px;background:var(--bg);border-radius:3px;overflow:hidden}
.track i{position:absolute;top:0;bottom:0;border-right:1px solid var(--card)}
.axis{display:flex;justify-content:space-between;margin-left:118px;font-size:.8rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 ui-monospace,monospace;margin:12px 0 0}
pre span{border-radius:3px}pre .odd{background:color-mix(in srgb,var(--dim) 18%,transparent)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 14px;vertical-align:-1px}
"""
_SOURCES = ("hint", "schema", "retrieval", "recycling", "lookup", "target")


def _block(start: float, end: float, scale: float, colour: str, title: str) -> str:
    left, width = 100 * start / scale, 100 * max(end - start, scale / 400) / scale
    return f'<i style="left:{left:.2f}%;width:{width:.2f}%;background:var(--{colour})" title="{escape(title)}"></i>'


def _target_lane(name: str, result: Generation, scale: float, codec: TextCodec) -> str:
    blocks = [_block(0, result.rounds[0].start_ms, scale, "prefill", "prefill")]
    for commit in result.rounds:
        drafted = next((source for source in commit.sources if source != "target"), "target")
        text = codec.decode_inside(commit.tokens)
        title = f"round {commit.round}: {commit.drafted} drafted, {len(commit.tokens)} committed: {text}"
        blocks.append(_block(commit.start_ms, commit.start_ms + commit.verify_ms, scale, drafted, title))
    return f'<div class="lane"><span>{escape(name)}</span><div class="track">{"".join(blocks)}</div></div>'


def _sidecar_lane(result: Generation, scale: float) -> str:
    hint = result.hint
    if hint is None or not hint.wave_ms:
        return ""
    blocks = _block(0, hint.prefill_ms, scale, "prefill", "sidecar prefill")
    blocks += _block(
        hint.prefill_ms, hint.wave_ms, scale, "hint", f"wave: {hint.steps} passes, {hint.payload_bytes} bytes sent"
    )
    return f'<div class="lane"><span class="dim">sidecar</span><div class="track">{blocks}</div></div>'


def _output(result: Generation, codec: TextCodec) -> str:
    spans, stream = [], codec.stream()
    for commit in result.rounds:
        odd = ' class="odd"' if commit.round % 2 else ""
        for token, source in zip(commit.tokens, commit.sources, strict=True):
            text = "⏎" if token in codec.eos_ids else stream.push([token])
            spans.append(
                f'<span{odd} style="color:var(--{source})" title="{source}, round {commit.round}">{escape(text)}</span>'
            )
    return f"<pre>{''.join(spans)}</pre>"


def _rows(comparison: Comparison) -> str:
    rows, first = [], next(iter(comparison.results))
    base = comparison.results[first]
    fastest = min(comparison.results, key=lambda method: comparison.results[method].total_ms)
    for method, r in comparison.results.items():
        found = comparison.divergences.get(method)
        verdict = '<td class="ok">identical</td>'
        if method == first:
            verdict = '<td class="dim">reference</td>'
        elif found is not None:
            kind, css = ("rounding tie", "tie") if found.is_tie else ("different", "bad")
            verdict = f'<td class="{css}">{kind} at {found.position}, gap {found.gap:.3f}</td>'
        cells = (
            f"{r.total_ms / 1e3:.2f} s", f"{base.total_ms / r.total_ms:.2f}x", f"{r.prefill_ms / 1e3:.2f} s",
            f"{r.decode_ms_beside(base) / 1e3:.2f} s", f"{base.decode_ms / r.decode_ms_beside(base):.2f}x",
            str(r.num_rounds), f"{r.acceptance_length:.2f}",
        )  # fmt: skip
        best = ' class="best"' if method == fastest else ""
        rows.append(
            f"<tr{best}><td>{escape(METHOD_NAMES.get(method, method))}</td>{verdict}"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return "".join(rows)


def _section(comparison: Comparison, codec: TextCodec) -> str:
    scale = max(r.total_ms for r in comparison.results.values())
    last = list(comparison.results.values())[-1]
    calls = [call_text(call.name, call.arguments) for call in last.calls] or [last.text.strip()[:300]]
    lanes = "".join(_target_lane(METHOD_NAMES.get(m, m), r, scale, codec) for m, r in comparison.results.items())
    question = str(comparison.request.messages[-1]["content"]).strip()
    heads = ("method", "output", "total", "speedup", "prefill", "decode", "speedup", "rounds", "tokens/round")
    return (
        f"<section><h2>{escape(comparison.request.id)}</h2><div class=dim>{escape(question[-400:])}</div>"
        + "".join(f'<div class="call">{escape(call)}</div>' for call in calls)
        + '<div class="scroll"><table><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr>"
        + f"{_rows(comparison)}</table></div><p></p>{lanes}{_sidecar_lane(last, scale)}"
        + f'<div class="axis dim"><span>0 s</span><span>{scale / 1e3:.1f} s</span></div>'
        + f"{_output(last, codec)}</section>"
    )


def render_page(comparisons: Sequence[Comparison], codec: TextCodec, conditions: str) -> str:
    """Return the page as text; it needs no other file and no network."""
    key = "".join(f'<i style="background:var(--{source})"></i>{source}' for source in ("prefill", *_SOURCES))
    body = "".join(_section(comparison, codec) for comparison in comparisons)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>OoO-Spec demonstration</title><style>{_STYLE}</style><main><h1>OoO-Spec demonstration</h1>"
        f"<div class=dim>{escape(conditions)}</div><p class=key>A round or token drafted by {key} "
        "<span class=dim>(hover for details; shaded tokens: every second round)</span></p>"
        f"{body}</main></html>\n"
    )
