"""Record real outputs once, then replay any method over them in seconds: rounds without a model, for drafting work.

python benchmarks/replay.py record --data DATA --limit 20 recorded.jsonl   (none of suite quick)
python benchmarks/replay.py replay recorded.jsonl toolspec ooo [--no-hint] [--late ROUNDS] [--show REQUEST]

Tokens per round are exact for everything but token recycling, whose table only sees the successors that were recorded
along the true output. The hint is there from round `--late` on. Decode speedup is estimated from the measured costs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoTokenizer

from ooospec.bench.datasets import BENCHMARKS, load_benchmark, sample, suite
from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.template import plain_text, render
from ooospec.config import DEFAULT_TARGET, cache_dir
from ooospec.core import Commit, DecodeContext, FunctionHint, Hint, SlotHint, Tool
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.models.resolver import resolve_model
from ooospec.planner import Budget
from ooospec.runtime import Decoder
from ooospec.stopping import Limits
from ooospec.target.cost import CostCurve
from ooospec.verify import Greedy, top_indices

WIDTH = 8


class Record(msgspec.Struct):
    """One request with the target's output, its 8 best tokens at every place, and the finished hint."""

    id: str
    benchmark: str
    prompt: list[int]
    output: list[int]
    top: list[list[int]]
    tools: tuple[Tool, ...]
    style_key: str
    function: FunctionHint | None
    slots: list[SlotHint]

    def hint(self) -> Hint:
        return Hint(self.function, {(s.tool, s.slot): s for s in self.slots}, True)


def record(file: Path, data: Path, limit: int) -> None:
    """Decode requests and append what a replay needs; requests in the file already are left out."""
    known = {r.id for r in read(file)} if file.is_file() else set()
    with Decoder() as decoder, file.open("ab") as sink:
        for number, name in itertools.product(range(limit), BENCHMARKS):
            everything = load_benchmark(name, data)
            quick = {request.id for request in suite("quick", name, everything)}
            request = [r for r in sample(everything, None, 7) if r.id not in quick][number]
            if request.id in known:
                continue
            conversation = render(decoder.loaded.tokenizer, list(request.messages), request.tools)
            result = decoder.generate(list(request.messages), request.tools)
            mailbox = decoder._client.submit(
                conversation.tools, [(str(m["role"]), plain_text(m)) for m in conversation.messages]
            )
            mailbox.wait(60)
            mailbox.close()
            prompt, output = decoder.loaded.codec.encode(conversation.prompt), list(result.output_ids)
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *output]])
                logits = decoder.loaded.model(input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0]
            row = Record(
                request.id, name, prompt, output, top_indices(logits, WIDTH).tolist(), conversation.tools,
                conversation.style_key, mailbox.hint.function, list(mailbox.hint.slots.values()),
            )  # fmt: skip
            sink.write(msgspec.json.encode(row) + b"\n")
            sink.flush()
            sys.stderr.write(f"{number + 1}/{limit} {request.id}: {len(output)} tokens\n")


def read(file: Path) -> Iterator[Record]:
    yield from (msgspec.json.decode(line, type=Record) for line in file.read_bytes().splitlines() if line.strip())


class RecordedTarget:
    """Answers every node on the recorded path with the recorded successors, others with what its token had last."""

    context_length, cached_tokens = 1 << 20, 0

    def __init__(self, row: Record, vocabulary: int, known: dict[int, list[int]]) -> None:
        self.row, self.vocabulary, self.known = row, vocabulary, known

    def begin(self, prompt_ids, salt=""):
        self.committed: list[int] = []
        return 0

    def end(self, ids):
        pass

    def prefill(self, ids, all_rows=False):
        return torch.zeros(len(ids), WIDTH)

    @property
    def last_hidden(self):
        counts = np.zeros((1, 64), np.float32)
        np.add.at(counts[0], np.array(self.row.prompt[-400:]) % 64, 1)
        return counts

    def verify(self, tree, lead=(), all_rows=False):
        logits = torch.zeros(len(tree) + (len(lead) if all_rows else 0), self.vocabulary)
        self.paths = [()]
        for node in range(1, len(tree)):
            self.paths.append((*self.paths[tree.parents[node]], tree.tokens[node]))
        for node, path in enumerate(self.paths):
            done = [*self.committed, *path]
            right = done == self.row.output[: len(done)] and len(done) < len(self.row.output)
            successors = self.row.top[len(done)] if right else self.known.get(tree.tokens[node], [])
            for rank, token in enumerate(successors):
                logits[node - len(tree), token] = WIDTH - rank
            if right:
                logits[node - len(tree), self.row.output[len(done)]] = WIDTH + 1
        return logits

    def commit(self, tree, path):
        done = len(self.committed) + len(self.paths[path[-1]])
        self.committed = self.row.output[: done + 1]


def replay(rows: list[Record], method: str, use_hint: bool, late: int, show: str | None) -> None:
    """Print rounds and estimated decode speedup of a method for each benchmark."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_TARGET))
    codec = TextCodec(tokenizer.backend_tokenizer, [tokenizer.eos_token_id])
    curves = msgspec.json.decode((cache_dir() / "cost_curves.json").read_bytes(), type=dict[str, CostCurve])
    cost = next(curve for key, curve in curves.items() if key.startswith(DEFAULT_TARGET))
    known = {t: top for r in rows for t, top in zip([r.prompt[-1], *r.output], r.top, strict=False)}
    memories: defaultdict[str, Memory] = defaultdict(Memory)
    found: defaultdict[str, list[list[Commit]]] = defaultdict(list)
    for row in rows:
        output, polls = list[int](), itertools.count()
        context = DecodeContext(codec, row.prompt, output, row.tools, row.style_key)
        poll = lambda row=row, polls=polls: row.hint() if use_hint and next(polls) >= late else None  # noqa: E731
        memory = memories[row.benchmark]
        commits = list(
            decode(
                RecordedTarget(row, codec.vocab_size, known), context, output,
                method_named(method).build(Setup(memory, poll)), Greedy(), Limits(256), Budget(64, cost),
                calibrator=memory.part(Calibrator),
            )
        )  # fmt: skip
        assert output == row.output, row.id
        found[row.benchmark].append(commits)
        if row.id == show:
            for c in commits:
                sys.stdout.write(f"{c.round:3} {c.drafted:2} drafted {codec.decode(c.tokens)!r} {Counter(c.sources)}\n")
    for benchmark, requests in found.items():
        commits = list(itertools.chain(*requests))
        tokens = sum(len(c.tokens) for c in commits)
        spent = sum(cost(c.drafted + 1) for c in commits)
        sys.stdout.write(
            f"{method:9} {benchmark:11} {len(requests)} requests, {tokens / len(commits):.2f} tokens per round, "
            f"decode speedup about {tokens * cost(1) / spent:.2f}x\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--data", type=Path, required=True)
    recording.add_argument("--limit", type=int, default=20)
    recording.add_argument("file", type=Path)
    replaying = commands.add_parser("replay")
    replaying.add_argument("file", type=Path)
    replaying.add_argument("methods", nargs="+")
    replaying.add_argument("--no-hint", action="store_true")
    replaying.add_argument("--late", type=int, default=0)
    replaying.add_argument("--show")
    options = parser.parse_args()
    if options.command == "record":
        record(options.file, options.data, options.limit)
        return
    rows = list(read(options.file))
    for method in options.methods:
        replay(rows, method, not options.no_hint, options.late, options.show)


if __name__ == "__main__":
    main()
