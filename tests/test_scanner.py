"""The call scanner: every division into chunks gives the same calls; no input breaks it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooospec.chat.scanner import CallScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=12), st.dictionaries(st.text(max_size=8), JSON, max_size=4)),
    min_size=1,
    max_size=3,
)
AROUND = st.sampled_from(["", "\n", "<tool_call>\n", "```json\n", "Text, then a call: ", "[", "{not json} ", "{} "])


def scan(text, cuts=()):
    scanner, at = CallScanner(), 0
    for cut in [*sorted(cuts), len(text)]:
        scanner.feed(text[at:cut])
        at = max(at, cut)
    return scanner


@settings(max_examples=200)
@given(CALLS, AROUND, AROUND, st.sampled_from([None, 2]), st.booleans(), st.data())
def test_calls_are_found_under_every_division(calls, before, between, indent, ascii_only, data):
    text = before + between.join(
        json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii_only)
        for name, arguments in calls
    )
    whole = list(scan(text).finished())
    assert [(name, arguments) for name, arguments, _ in whole] == calls
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert list(scan(text, cuts).finished()) == whole
    assert list(scan(text, range(len(text))).finished()) == whole


@settings(max_examples=500)
@given(st.text(alphabet='{}[]",:\\ \nabnameargumts123true-.é', max_size=80), st.data())
def test_no_text_breaks_it_and_chunks_do_not_matter(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert list(scan(text, cuts).finished()) == list(scan(text).finished())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "a", "parameters": {}}', ["a"]),
        ('{"arguments": {"x": 1}, "name": "a"}', ["a"]),
        ('{"name": "a"}', []),
        ('{"name": 3, "arguments": {}}', []),
        ('{"name": "a", "arguments": "text"}', []),
        ('function() { return } {"name": "a", "arguments": {}}', ["a"]),
        ('{{"name": "a", "arguments": {}}}', ["a"]),
        ('{"name": "a", "arguments": {"x": 1, // comment\n "y": 2}}', []),
        ('[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', ["a", "b"]),
        ('{"name": "a", "arguments": {"x": "}}"}}', ["a"]),
        ('{"name": "a", "arguments": {"x": "unfinished', []),
    ],
)
def test_what_counts_as_a_call(text, names):
    assert [name for name, _, _ in scan(text).finished()] == names


def test_raw_arguments_are_kept_byte_for_byte():
    raw = '{"id": 12345678901234567890, "x": 1.10, "q": "\\ubcd1\\u00e9"}'
    (_, arguments, kept) = next(scan('{"name": "a", "arguments": ' + raw + "}").finished())
    assert kept == raw
    assert arguments["id"] == 12345678901234567890


def test_work_is_linear():
    """Ten times the text takes at most about ten times the steps, also for text that keeps breaking off."""

    def steps(size):
        scanner, count = CallScanner(), 0
        step = scanner._step

        def counted(index):
            nonlocal count
            count += 1
            return step(index)

        scanner._step = counted
        scanner.feed('{"a":' * size + "{" * size + '{"name": "x", "arguments": {"k": "' + "v" * size)
        return count

    assert steps(20_000) < 12 * steps(2_000)
