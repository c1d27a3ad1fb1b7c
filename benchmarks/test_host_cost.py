"""Host cost of a round: proposing and tree building, per proposer, over prompt length and number of tools.

pytest benchmarks/test_host_cost.py --benchmark-columns=median,iqr   (needs the tokenizer of the default target)
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.schema import read_tools
from ooospec.config import DEFAULT_TARGET
from ooospec.core import Commit, DecodeContext, FunctionHint, Hint, SlotHint, TopTokens
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.models.resolver import resolve_model
from ooospec.target.cost import CostCurve
from ooospec.tree import build_tree

WORDS = "the meeting in room A starts at 09:30 on 2023-03-22 with Jane Doe and John Smith about sales figures"
CALL = '```json\n{\n  "name": "tool_0_lookup",\n  "arguments": {\n    "first": "room A",\n    "second": "Jane'
ANSWERS = {
    "in a call": CALL,
    "in a value of its own": CALL.replace("Jane", "Zq\u00fctter vb"),
    "in words": "There is no function for this. Please tell me which room you mean,\nand at what time you want",
}
COST = CostCurve((1, 8, 16, 32, 64), (200.0, 230.0, 290.0, 420.0, 690.0))


@pytest.fixture(scope="module")
def codec():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_TARGET))
    return TextCodec(tokenizer.backend_tokenizer, [tokenizer.eos_token_id])


def tool(index):
    names = ("first", "second", "third", "fourth")
    properties = {name: {"type": "string", "description": "A value"} for name in names}
    schema = {"type": "object", "properties": properties, "required": list(names[:2])}
    return {"name": f"tool_{index}_lookup", "description": "Look something up", "parameters": schema}


def hint_of(tools):
    slots = {(t.name, s.name): SlotHint(t.name, s.name, "room A", s.required, 0.7) for t in tools[:3] for s in t.slots}
    return Hint(FunctionHint(tuple(t.name for t in tools[:3]), (0.8, 0.1, 0.05)[: len(tools)]), slots, True)


def prepared(codec, method, prompt_tokens, count, text):
    """A method's proposers in the middle of an answer, after two earlier requests."""
    tools = read_tools([tool(i) for i in range(count)])
    words = codec.encode(" ".join(itertools.repeat(WORDS, prompt_tokens // 20)))[:prompt_tokens]
    answer = codec.encode(text)
    memory, hint, rng = Memory(), hint_of(tools), np.random.default_rng(0)
    for _ in range(3):
        output: list[int] = []
        context = DecodeContext(codec, words, output, tools, "bench")
        proposers = method_named(method).build(Setup(memory, lambda: hint))
        for proposer in proposers:
            proposer.begin(context)
        for start in range(0, len(answer), 8):
            new = answer[start : start + 8]
            output += new
            top = TopTokens(new, rng.integers(0, 50_000, (len(new), 8)))
            commit = Commit(tuple(new), ("hint",) * len(new), start // 8, 8, top=top,
                            prompt_state=np.ones(64, np.float32) if not start else None)  # fmt: skip
            for proposer in proposers:
                proposer.observe(commit)
        last = proposers, output
    return *last, memory


@pytest.mark.parametrize("at", list(ANSWERS))
@pytest.mark.parametrize("tools", [1, 10, 100, 263])
@pytest.mark.parametrize("prompt_tokens", [400, 4000])
@pytest.mark.parametrize("method", ["lookup", "recycling", "samd", "toolspec", "ooo"])
def test_round(benchmark, codec, method, prompt_tokens, tools, at):
    """Propose, calibrate, build the tree: what a round does besides the target's pass."""
    proposers, output, memory = prepared(codec, method, prompt_tokens, tools, ANSWERS[at])
    calibrator = memory.part(Calibrator)

    def round_trip():
        drafts = [calibrator.calibrate(d) for proposer in proposers for d in proposer.propose()]
        return build_tree(output[-1], drafts, 64, COST, 200, None, 0.02)

    tree = benchmark(round_trip)
    benchmark.extra_info["nodes"] = len(tree)
    assert json.dumps(benchmark.extra_info)
