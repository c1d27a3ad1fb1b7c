"""Replay methods over what a benchmark's target wrote: rounds and time in a minute, without a model, for drafting work.

python benchmarks/replay.py docs/results/quick-split toolspec ooo --data DATA
    [--no-hint] [--late ROUNDS] [--show REQUEST]

FOLDER is one of `ooospec bench` with method ooo, whose finished hints are taken; they are there from round `--late` on,
and count as 90 % sure of the function and 85 % of a value (rows hold no chances). Time = the measured cost of each pass
(`runs.jsonl`). Of the target's second choices nothing is known: token recycling finds less than it would.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ooospec.bench.datasets import BENCHMARKS, load_benchmark
from ooospec.bench.rows import HintRow, Results, Row
from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.template import render
from ooospec.core import Commit, DecodeContext, FunctionHint, Hint, SlotHint, Tool
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import METHODS, Setup, method_named
from ooospec.models.resolver import resolve_model
from ooospec.planner import Budget
from ooospec.stopping import Limits
from ooospec.target.cost import CostCurve
from ooospec.verify import Greedy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from scripted import ScriptedTarget

FUNCTION_CHANCE, VALUE_CHANCE = 0.9, 0.85


def hint_of(found: HintRow | None, tools: Sequence[Tool]) -> Hint | None:
    """Return the hint that a row had in the end; slots that it lacks count as left out."""
    tool = next((tool for tool in tools if found is not None and tool.name == found.function), None)
    if found is None or tool is None:
        return None
    slots = {
        (tool.name, s.name): SlotHint(tool.name, s.name, found.slots.get(s.name), s.name in found.slots, VALUE_CHANCE)
        for s in tool.slots
    }
    return Hint(FunctionHint((tool.name,), (FUNCTION_CHANCE,)), slots, complete=True)


def replay(
    row: Row, request: Any, tokenizer: Any, method: str, memory: Memory, cost: CostCurve, options: Any
) -> list[Commit]:
    """Let a scripted target write the row's output again."""
    codec = TextCodec(tokenizer.backend_tokenizer, [tokenizer.eos_token_id])
    conversation = render(tokenizer, list(request.messages), request.tools)
    hint, polls = None if options.no_hint else hint_of(row.hint, conversation.tools), itertools.count()
    script, output = list(row.output_ids), list[int]()
    script += [codec.eos_id] if script[-1] not in codec.eos_ids else []
    context = DecodeContext(
        codec, codec.encode(conversation.prompt), output, conversation.tools, conversation.style_key,
        conversation.call_format,
    )  # fmt: skip
    proposers = method_named(method).build(Setup(memory, lambda: hint if next(polls) >= options.late else None))
    commits = list(
        decode(
            ScriptedTarget(script, codec.vocab_size), context, output, proposers, Greedy(), Limits(len(script)),
            Budget(64, cost), calibrator=memory.part(Calibrator),
        )
    )  # fmt: skip
    assert output == script[: len(output)] and len(output) >= len(row.output_ids), row.request
    return commits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--no-hint", action="store_true")
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--show", help="Print the rounds of this request.")
    options = parser.parse_args()
    results = Results(options.folder)
    rows = [row for row in results.rows() if row.method == "ooo"]
    measured = [run.settings["cost_ms"] for run in results.runs()]
    if not rows or not measured:
        parser.error(f"{options.folder} has no rows of method ooo, or no runs.jsonl")
    costs = [CostCurve(tuple(map(int, cost)), tuple(cost.values())) for cost in measured]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(rows[0].target))
    for method in options.methods:
        memory, total_ms = Memory(), 0.0
        for name in BENCHMARKS:
            requests = {request.id: request for request in load_benchmark(name, options.data)}
            mine = [row for row in rows if row.benchmark == name]
            found, spent_ms = list[Commit](), 0.0
            for row in mine:
                cost = costs[row.run]
                commits = replay(row, requests[row.request], tokenizer, method, memory, cost, options)
                found += commits
                spent_ms += sum(cost(c.drafted + 1) for c in commits)
                if row.request == options.show:
                    for c in commits:
                        text = tokenizer.decode(c.tokens)
                        sys.stdout.write(f"{c.round:3} {c.drafted:2} drafted {text!r} {dict(Counter(c.sources))}\n")
            tokens, nodes = sum(len(c.tokens) for c in found), sum(c.drafted + 1 for c in found)
            total_ms += spent_ms
            sys.stdout.write(
                f"{method:9} {name:11} {len(mine)} requests, {len(found)} rounds, {tokens / max(1, len(found)):.2f} "
                f"tokens and {nodes / max(1, len(found)):.1f} nodes a round, {spent_ms / 1e3:.1f} s\n"
            )
        sys.stdout.write(f"{method:9} together    {total_ms / 1e3:.1f} s\n")


if __name__ == "__main__":
    main()
