"""How much of a call's structure is drafted when its meaning is right: `make structural DATA=FOLDER`, or with
every value wrong: `make structural DATA=FOLDER ARGS=--wrong`.

Takes what real targets wrote by plain decoding (rows of `ooospec bench`), lets a scripted target write it again with
the target's own tokenizer, and gives the drafter the right function and values as its hint. A token counts as missed
when a round ended before it although the drafts went on otherwise, or offered nothing at all. What comes behind the
first call of an answer is left out (hints are about the first one); the token behind a draft that was accepted to its
end is counted apart, and so are calls with arguments that their tool does not have, which no hint can hold.
ARGS=--missed prints each structural token that was missed, and what stood before it.
"""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from pathlib import Path

import msgspec
from transformers import AutoTokenizer

from ooospec.bench.datasets import load_benchmark
from ooospec.bench.fields import FIELDS, token_fields, token_pieces
from ooospec.bench.rows import Row
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import format_named
from ooospec.chat.template import render
from ooospec.core import DecodeContext, FunctionHint, Hint, SlotHint
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.models.resolver import resolve_model
from ooospec.planner import Budget
from ooospec.stopping import Limits
from ooospec.verify import Greedy
from scripted import ScriptedTarget

MAX_TOKENS = 512
WRONG = "--wrong" in sys.argv
MISSED = "--missed" in sys.argv


class Watched(ScriptedTarget):
    """Notes, per round, how many tokens were accepted and whether the drafts went on or were empty."""

    def __init__(self, script, vocab):
        super().__init__(script, vocab)
        self.rounds: list[tuple[int, bool]] = []

    def verify(self, tree, lead=(), all_rows=False):
        at, node = len(self.committed), 0
        while at < len(self.script):
            children = {tree.tokens[n]: n for n in range(1, len(tree)) if tree.parents[n] == node}
            if self.script[at] not in children:
                break
            node, at = children[self.script[at]], at + 1
        self.rounds.append((at, bool(children) or len(tree) == 1))
        return super().verify(tree, lead, all_rows)


def right_hint(tools, name, arguments) -> Hint:
    """Return the hint that a sidecar which is right in all would give; with WRONG, in all but the values."""
    arguments = dict.fromkeys(arguments, "zzz") if WRONG else arguments
    slots = {
        (name, slot.name): SlotHint(name, slot.name, arguments.get(slot.name), slot.name in arguments, 0.99)
        for tool in tools if tool.name == name for slot in tool.slots
    }  # fmt: skip
    return Hint(FunctionHint((name,), (0.99,)), slots, complete=True)


def counted(row: Row, request, tokenizer, codec: TextCodec, memory: Memory) -> tuple[Counter[tuple[str, str]], bool]:
    """Write one answer again; return {(field, drafted or missed): tokens}, and whether the tool has all arguments."""
    conversation = render(tokenizer, list(request.messages), request.tools)
    call_format = format_named(conversation.call_format)
    scanner = call_format.scanner(conversation.tools)
    scanner.feed(codec.decode([t for t in row.output_ids if t not in codec.eos_ids]))
    found = [(call, *parts) for call, parts in zip(scanner.calls, scanner.finished(), strict=False)]
    if not found or found[0][1] not in {tool.name for tool in conversation.tools}:
        return Counter(), True
    call, name, arguments, _ = found[0]
    known = {slot.name for tool in conversation.tools if tool.name == name for slot in tool.slots}
    hint, output = right_hint(conversation.tools, name, arguments), list[int]()
    context = DecodeContext(
        codec, codec.encode(conversation.prompt), output, conversation.tools, f"{row.target}/{conversation.style_key}",
        conversation.call_format,
    )  # fmt: skip
    target = Watched(row.output_ids, codec.vocab_size)
    for _ in decode(target, context, output, method_named("ooo").build(Setup(memory, lambda: hint)), Greedy(),
                    Limits(MAX_TOKENS), Budget(64)):  # fmt: skip
        pass
    pieces = token_pieces(codec, row.output_ids)
    fields = token_fields(codec, row.output_ids, pieces)
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    within = [end <= (call.end or 0) for end in ends]
    counts, at = Counter[tuple[str, str]](), 0
    for stop, missed in target.rounds:
        counts.update((fields[i], "drafted") for i in range(at, stop) if within[i])
        if stop < len(fields) and within[stop]:
            counts[fields[stop], "missed" if missed else "behind"] += 1
            if MISSED and missed and fields[stop] == "structure":
                print(f"{row.request}: {''.join(pieces[max(0, stop - 12) : stop])!r} -> {pieces[stop]!r}")
        at = stop + 1
    return counts, known.issuperset(arguments)


def main(data: Path, files: list[Path]) -> None:
    """Print the shares per target, benchmark and part of the call."""
    totals: dict[tuple[str, str, bool], Counter[tuple[str, str]]] = {}
    memories: dict[tuple[str, str], Memory] = {}
    requests = {r.id: r for name in ("api_bank", "toolalpaca", "bfcl") for r in load_benchmark(name, data)}
    readers: dict[str, tuple[object, TextCodec]] = {}
    for file in files:
        written = file.read_bytes()
        for line in (gzip.decompress(written) if file.suffix == ".gz" else written).splitlines():
            row = msgspec.json.decode(line, type=Row)
            if row.method != "ar":
                continue
            if row.target not in readers:
                tokenizer = AutoTokenizer.from_pretrained(resolve_model(row.target))
                readers[row.target] = tokenizer, TextCodec(tokenizer.backend_tokenizer, [tokenizer.eos_token_id])
            key = row.target, row.benchmark
            memory = memories.setdefault(key, Memory())
            counts, valid = counted(row, requests[row.request], *readers[row.target], memory)
            totals.setdefault((*key, valid), Counter()).update(counts)
    for (target, benchmark, valid), counts in sorted(totals.items()):
        shares = []
        for field in FIELDS:
            drafted, missed = counts[field, "drafted"], counts[field, "missed"]
            if drafted + missed:
                shares.append(f"{field} {drafted / (drafted + missed):.1%} of {drafted + missed}")
        behind = sum(count for (_, kind), count in counts.items() if kind == "behind")
        which = benchmark if valid else f"{benchmark}, calls with arguments that their tool does not have"
        print(f"{target}, {which}: {', '.join(shares)}; {behind} tokens behind a draft's end")


if __name__ == "__main__":
    files = [name for name in sys.argv[1:] if not name.startswith("--")]
    main(Path(files[0]), [Path(name) for name in files[1:]])
