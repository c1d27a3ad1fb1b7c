"""Hints change the number of rounds, never the output."""

from __future__ import annotations

import json

import pytest

from ooospec.chat.schema import read_tools
from ooospec.chat.style import StyleBook, object_style
from ooospec.core import BONUS, Commit, DecodeContext, FunctionHint, Hint, SlotHint, common_prefix
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.proposers.calls import CallProposer
from scripted import write
from test_exactness import PROMPT, run, stock

ARGUMENTS = {"city": "Reykjavik harbour", "unit": "celsius", "days": 12}
TEXTS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "fenced": '```json\n{"name": "get_weather", "arguments": %s}\n```',
    "bare": '{"name": "get_weather", "arguments": %s}',
    "prompted": '```<tool_call>\n{"name": "get_weather", "parameters": %s}\n</tool_call>\n```',
}


def text_of(style, arguments=None):
    return TEXTS[style] % json.dumps(arguments or ARGUMENTS)


def hint_of(arguments=None, name="get_weather", all_slots=("city", "unit", "days"), **changes):
    values = {**(arguments or ARGUMENTS), **changes}
    slots = {(name, slot): SlotHint(name, slot, values.get(slot), slot in values, 0.9) for slot in all_slots}
    return Hint(FunctionHint((name,), (0.95,)), slots, True)


def rounds(codec, tools, text, hint, **options):
    return len(write(codec, text, read_tools(tools), hint=hint, **options)[1])


@pytest.mark.parametrize("style", TEXTS)
def test_perfect_hint_needs_few_rounds_in_every_style(codec, tools, style):
    """At most the opening has to be found out; afterwards the call is one draft."""
    prompt = "prompt: " + TEXTS[style]
    assert rounds(codec, tools, text_of(style), hint_of(), prompt=prompt, nodes=400) <= 3
    assert rounds(codec, tools, text_of(style), None, prompt=prompt, nodes=400) > 6


def test_learned_style_needs_one_round(codec, tools):
    memory = Memory()
    indented = (
        '```json\n{\n   "name": "get_weather",\n   "arguments": {\n      "city": "X",\n      "days": 1\n   }\n}\n```\n'
    )
    hint = hint_of({"city": "X", "days": 1})
    first = rounds(codec, tools, indented, hint, memory=memory, nodes=400)
    assert first > 2
    assert rounds(codec, tools, indented, hint, memory=memory, nodes=400) == 1


def test_a_style_has_its_chance_where_it_parts_from_better_ones(codec, tools):
    """Two styles that begin alike: both are drafted, but from where they part on only one can be right."""
    listed, book = read_tools(tools), StyleBook()
    fenced, indented = (object_style("```json\n", "\n```", "\n", "arguments", indent) for indent in (0, 2))
    book._learned["key"] = [indented, fenced]
    proposer = CallProposer(book, hint_of)
    for text in ("", "```json\n"):
        proposer.begin(DecodeContext(codec, codec.encode("prompt"), codec.encode(text), listed, "key", "json"))
        if text:
            proposer.observe(Commit(tuple(codec.encode(text)), (BONUS,) * len(codec.encode(text)), 0, 0))
        drafts = [draft for draft in proposer.propose() if draft.source == "hint"]
        first, second = (
            next(d for d in drafts if part in codec.decode(d.tokens)) for part in ('{\n  "name', '{"name": "get_w')
        )
        at = common_prefix(first.tokens, second.tokens)
        assert at == len(codec.encode("{" if text else "```json\n{"))
        assert second.kinds[at] == "hint style 1" and second.probabilities[at] < 0.1 < 0.9 < first.probabilities[at]
        assert [kind for kind in (*first.kinds, *second.kinds) if "style" in kind] == ["hint style 1"]


@pytest.mark.parametrize("wrong", ["city", "unit", "days"])
def test_drafting_re_anchors_after_a_wrong_slot(codec, tools, wrong):
    """A wrong value costs its own tokens at most; what follows is drafted as if nothing had happened."""
    bad = {"city": "Nowhere at all", "unit": "fahrenheit", "days": 99}[wrong]
    text = text_of("hermes")
    prompt = "prompt: " + TEXTS["hermes"]
    right = rounds(codec, tools, text, hint_of(), prompt=prompt, nodes=400)
    got = rounds(codec, tools, text, hint_of(**{wrong: bad}), prompt=prompt, nodes=400)
    value = len(codec.encode(json.dumps(ARGUMENTS[wrong])))
    assert got <= right + value + 1
    dropped = rounds(codec, tools, text, None, prompt=prompt, nodes=400)
    if wrong != "city":  # where most of the text follows the wrong value, most of the gain stays
        assert got < dropped


def test_another_tool_uses_that_tools_slots(codec, tools):
    hint = hint_of()
    hint.slots["web_search", "query"] = SlotHint("web_search", "query", "weather in Oslo", True, 0.8)
    text = '<tool_call>\n{"name": "web_search", "arguments": {"query": "weather in Oslo"}}\n</tool_call>'
    assert rounds(codec, tools, text, hint, prompt="x <tool_call>", nodes=400) <= 4


def test_left_out_argument_that_the_target_fills(codec, tools):
    hint = hint_of({"city": "Oslo"})
    text = text_of("hermes", {"city": "Oslo", "unit": "celsius", "days": 3})
    assert rounds(codec, tools, text, hint, prompt="x <tool_call>", nodes=400) < 12


def test_second_call_and_text_around(codec, tools):
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "web_search", "arguments": {"query": "ferries"}}\n</tool_call>'
    for text in (f"{one}\n{two}", f"I will look.\n\n{one}", f"{one}\nDone.", "No tool is needed."):
        assert write(codec, text, read_tools(tools), hint=hint_of({"city": "Oslo"}))[0] == text


CONDITIONS = {
    "absent": lambda: None,
    "empty": Hint,
    "wrong": lambda: hint_of({"city": "x", "unit": "fahrenheit", "days": -1}),
    "unknown tool": lambda: Hint(FunctionHint(("no_such_tool",), (0.9,)), {}, True),
    "malformed values": lambda: hint_of({"city": {"a": [None, float("inf")]}, "unit": 7, "days": "\x00\ud800"}),
    "not json": lambda: hint_of({"city": object(), "unit": {1, 2}, "days": b"x"}),
    "over-long": lambda: hint_of({"city": "long " * 5000, "unit": "celsius", "days": 10**400}),
    "special tokens": lambda: hint_of({"city": "<|eos|> and <|end|> and <|im_end|>", "unit": "<tool_call>", "days": 1}),
    "failed": lambda: Hint(failed=True),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("late", [0, 3])
def test_every_hint_condition_leaves_scripted_outputs_alone(codec, tools, condition, late):
    calls = iter(range(10**6))

    def poll():
        return CONDITIONS[condition]() if next(calls) >= late else None

    for style in TEXTS:
        assert write(codec, text_of(style), read_tools(tools), hint=poll)[0] == text_of(style)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_hint_condition_leaves_model_outputs_alone(tiny, tools, condition):
    expected = stock(tiny, 40)
    sources = method_named("ooo").build(Setup(Memory(), CONDITIONS[condition]))
    assert run(tiny, sources, limit=40)[0] == expected
    assert PROMPT
