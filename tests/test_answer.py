"""The streamed view equals the whole one, in every format, for every division; no marker in content, nothing lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooospec.chat.answer import AnswerStream, ArgumentsGrow, CallBegins, Content, Reasoning
from ooospec.chat.formats.registry import FORMATS
from test_formats import ARGUMENTS, SAMPLES, TOOLS, written


def view(events):
    """(content, reasoning, [(name, arguments text)])"""
    content, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsGrow(index, text):
                assert index == len(calls) - 1
                calls[index] = calls[index][0], calls[index][1] + text
    return content, reasoning, calls


def answer(call_format, text, cuts=(), tools=TOOLS, **options):
    stream, at, events = AnswerStream(call_format, tools, **options), 0, []
    for cut in [*sorted(cuts), len(text)]:
        events += stream.push(text[at:cut])
        at = max(at, cut)
    return view(events + stream.close())


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=60)
@given(data=st.data())
def test_streamed_equals_whole_and_arguments_are_those_of_the_calls(name, data):
    call_format = FORMATS[name]
    style = data.draw(st.sampled_from(call_format.styles("")))
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["get_weather", "other"]), ARGUMENTS), min_size=1, max_size=3))
    before = data.draw(st.sampled_from(["", "Let me see. ", "I will look:\n", "First {this}, then:\n\n"]))
    text = before + written(call_format, style, calls)
    content, _, found = answer(call_format, text)
    assert [(n, json.loads(raw, strict=False)) for n, raw in found] == calls
    assert content == before.strip()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    for division in (cuts, range(len(text))):
        streamed = answer(call_format, text, division)
        assert streamed == (content, "", found)


@pytest.mark.parametrize("name", list(FORMATS))
def test_arguments_come_before_the_call_ends(name):
    text = SAMPLES[name]
    stream, seen = AnswerStream(FORMATS[name], TOOLS), []
    for char in text[: text.index("3")]:
        seen += stream.push(char)
    _, _, calls = view(seen)
    assert calls and calls[0][0] == "get_weather" and "Oslo" in calls[0][1]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello.", "Hello."),
        ("  Hello.\n", "Hello."),
        ('Use {"a": 1} as input.', 'Use {"a": 1} as input.'),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
        ("a < b and <tool", "a < b and <tool"),
        ("Sorry. <tool_call>", "Sorry."),
        ('<tool_call>\n{"name": "get_w', '{"name": "get_w'),
        ("", ""),
        ("{{{", "{{{"),
        ("text with ``` in it", "text with ``` in it"),
    ],
)
def test_text_without_a_call_is_all_content(text, content):
    for cuts in ((), range(len(text))):
        assert answer(FORMATS["hermes"], text, cuts) == (content, "", [])


def test_words_around_calls_are_kept_and_markers_are_not():
    call = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    text = f"Before.\n{call}\n{call}\nAfter <b>."
    for cuts in ((), range(len(text)), range(0, len(text), 5)):
        content, _, calls = answer(FORMATS["hermes"], text, cuts)
        assert calls == [("other", "{}")] * 2
        assert content.replace("\n", "") == "Before.After <b>."
        assert "tool_call" not in content


def test_an_unfinished_call_is_streamed_as_far_as_it_came():
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"s": "Os'
    for cuts in ((), range(len(text))):
        assert answer(FORMATS["hermes"], text, cuts) == ("", "", [("get_weather", '{"s": "Os')])


@pytest.mark.parametrize(("options", "text"), [
    ({"thinking": True}, "I think <tool_call> {x}</think>\n\n"),
    ({"reasons": True}, "<think>I think <tool_call> {x}</think>\n\n"),
])  # fmt: skip
def test_calls_inside_reasoning_are_reasoning(options, text):
    whole = text + SAMPLES["hermes"]
    for cuts in ((), range(len(whole))):
        content, reasoning, calls = answer(FORMATS["hermes"], whole, cuts, **options)
        assert (content, reasoning) == ("", "I think <tool_call> {x}")
        assert calls == [("get_weather", '{"s": "Oslo", "i": 3}')]


def test_without_reasoning_nothing_is_held_for_it():
    assert answer(FORMATS["hermes"], "Hi", (1,), reasons=True) == ("Hi", "", [])
    assert answer(FORMATS["hermes"], "<thin", (1,), reasons=True) == ("<thin", "", [])
    assert answer(None, '<tool_call>{"name": "other", "arguments": {}}', (3,))[2] == []


def test_reasoning_that_never_ends():
    assert answer(FORMATS["hermes"], "on and on </thi", (4, 12), thinking=True) == ("", "on and on </thi", [])


BROKEN = '{"name": "other", "arguments": {"s": "x" "i": 3}}'
PARTS = [
    BROKEN,
    "<tool_call>",
    "</tool_call>",
    "```json",
    "```",
    "word",
    '{"name": "other", "arguments": {}}',
    *'\n {}":,é<',
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=14), st.data())
def test_any_text_streams_as_it_reads(parts, data):
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole = answer(FORMATS["hermes"], text)
    assert answer(FORMATS["hermes"], text, cuts) == whole
    assert answer(FORMATS["hermes"], text, range(len(text))) == whole
    words = "".join(part for part in parts if part == "word")
    assert whole[0].count("word") * "word" == words
