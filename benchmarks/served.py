"""What a client of `ooospec serve` waits for, with drafting and without, request by request in turn.

    ooospec serve &
    python benchmarks/served.py --data DATA --limit 10

Both ways stream through the `openai` client from one server. Each has a `cache_salt` of its own, so that neither finds
the other's prompts or memories; before each timed request one with the same tools and system prompt and another
user's words was answered (warm prefix, as in the other benchmarks).
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.progress import track

from ooospec.bench.datasets import BenchRequest, load_benchmark, suite
from ooospec.chat.schema import openai_tools

MODES = ("plain", "OoO-Spec")
OTHER_USER = {"role": "user", "content": "Say hello in one word."}


def ask(
    client: openai.OpenAI, model: str, messages: Any, tools: Any, salt: str, mode: str, max_tokens: int
) -> tuple[float, float, str]:
    """Stream one answer; return seconds to the first text or call, seconds in all, and everything written."""
    start, first, written = time.perf_counter(), 0.0, ""
    chunks = client.chat.completions.create(
        model=model, messages=messages, temperature=0, stream=True, max_tokens=max_tokens,
        tools=openai_tools(tools) if tools else openai.omit,
        extra_body={"cache_salt": salt, **({"speculative": False} if mode == "plain" else {})},
    )  # fmt: skip
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                text += (call.function.name or "") + (call.function.arguments or "")
            first = first or (time.perf_counter() - start if text else 0.0)
            written += text
    return first, time.perf_counter() - start, written


def measure(
    client: openai.OpenAI, requests: list[BenchRequest]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, dict[str, str]]]:
    """Ask everything both ways; return (first, total) by mode, and the answers that differ by request and mode."""
    model = client.models.list().data[0].id
    run, times, other = secrets.token_hex(4), {mode: [] for mode in MODES}, {}
    for number, request in enumerate(track(requests, "requests", console=Console(stderr=True))):
        answers = {}
        for mode in MODES if number % 2 else MODES[::-1]:
            salt, system = f"{run}-{mode}", [m for m in request.messages[:1] if m["role"] == "system"]
            ask(client, model, [*system, OTHER_USER], request.tools, salt, mode, 1)
            first, total, answers[mode] = ask(client, model, list(request.messages), request.tools, salt, mode, 256)
            times[mode].append((first, total))
        if len(set(answers.values())) > 1:
            other[request.id] = answers
    return times, other


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--data", type=Path, required=True, help="folder with the benchmarks' files")
    parser.add_argument("--limit", type=int, default=10, help="requests a benchmark")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.url, api_key=arguments.api_key, max_retries=0, timeout=600)
    heads = (
        "benchmark",
        "requests",
        "first token: plain",
        "OoO-Spec",
        "whole call: plain",
        "OoO-Spec",
        "ratio of sums",
    )
    lines = ["| " + " | ".join((*heads, "equal")) + " |", "|---" * (len(heads) + 1) + "|"]
    differ: dict[str, dict[str, str]] = {}
    for name in ("api_bank", "toolalpaca", "bfcl"):
        times, other = measure(client, suite("quick", name, load_benchmark(name, arguments.data))[: arguments.limit])
        differ |= other
        firsts, totals = ([statistics.median(t[i] for t in times[mode]) for mode in MODES] for i in (0, 1))
        ratio = sum(total for _, total in times["plain"]) / sum(total for _, total in times["OoO-Spec"])
        count, shown = len(times["plain"]), [f"{seconds:.2f} s" for seconds in (*firsts, *totals)]
        cells = (name, str(count), *shown, f"{ratio:.2f}x", f"{count - len(other)}/{count}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"differs: {request} {mode}: {text!r}" for request, both in differ.items() for mode, text in both.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
