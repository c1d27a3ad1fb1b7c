"""Kinds of faults found by attacking the software; each stands for its whole kind."""

from __future__ import annotations

import copy
import json
import os
import time

import msgspec
import pytest
import torch

from ooospec.chat.codec import TextStream
from ooospec.chat.scanner import CallScanner
from ooospec.chat.schema import normalize_schema, prose_tools, read_tools
from ooospec.chat.template import render
from ooospec.core import Draft, FunctionHint, Hint
from ooospec.errors import UsageError
from ooospec.methods import METHODS, Method
from ooospec.placement import Placement, usable_cores
from ooospec.proposers.lookup import PromptLookup
from ooospec.runtime import Decoder
from ooospec.sidecar import client as client_module
from ooospec.sidecar import protocol
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.protocol import Function
from ooospec.stopping import Limits
from ooospec.target.model import TargetModel
from ooospec.target.prefix_cache import PrefixCache
from ooospec.tree import build_tree
from scripted import write
from test_exactness import PROMPT, Scripted, run, stock
from test_hints import hint_of, text_of
from test_sidecar import fake, wait_for


class Failing(TargetModel):
    """Breaks off inside a forward pass, after the first layer's cache has grown."""

    broken_at = 1

    def verify(self, tree, lead=(), all_rows=False):
        self.passes = getattr(self, "passes", -1) + 1
        if self.passes == self.broken_at:
            with torch.inference_mode():
                self.cache.layers[0].update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
            raise KeyboardInterrupt
        return super().verify(tree, lead)


@pytest.mark.parametrize("broken_at", [0, 1, 3])
def test_an_interrupted_pass_does_not_poison_the_prefix_cache(tiny_llama, broken_at):
    cache = PrefixCache()
    target = Failing(tiny_llama.model, cache)
    target.broken_at = broken_at
    with pytest.raises(KeyboardInterrupt):
        run(tiny_llama, [], target=target, next_chunk=lambda left: 10 if left > 10 else 0)
    again = TargetModel(tiny_llama.model, cache)
    assert run(tiny_llama, [], target=again)[0] == stock(tiny_llama)
    assert again.cached_tokens >= len(PROMPT) - 11


def test_a_second_stream_on_one_decoder_is_refused(tiny_llama):
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        first = decoder.stream("one", max_new_tokens=5)
        next(first)
        with pytest.raises(UsageError, match="one at a time"):
            next(decoder.stream("two", max_new_tokens=5))
        first.close()
        decoder.generate("two", max_new_tokens=5)


def test_prefix_conditions_leave_the_cache_as_it_was(tiny_llama, tools):
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        kept = decoder.target.prefix_cache
        outputs = set()
        for prefix in ("cold", "warm", "auto", "warm", "cold"):
            result = decoder.generate("Weather?", tools, prefix=prefix, salt="s", max_new_tokens=20)
            outputs.add(result.output_ids)
            assert (result.cached_tokens > 20) == (prefix == "warm")
            assert decoder.target.prefix_cache is kept
        assert len(outputs) == 1
        with pytest.raises(UsageError):
            decoder.generate(None, tools, prefix="warm")
        assert decoder.target.prefix_cache is kept


@pytest.mark.parametrize("stop", ["", ["x", ""], [3]])
def test_bad_stop_strings_are_refused(tiny_llama, stop):
    with Decoder(tiny_llama, None, budget="fixed") as decoder, pytest.raises(UsageError, match="Stop strings"):
        decoder.generate("hi", stop=stop)


def test_stop_written_in_many_tokens_is_found_for_any_division(codec):
    limits = Limits(100, ("<|eos|>",))  # one token, spelled out as many
    spelled = [token for char in "say <|eos|> now" for token in codec.encode(char)]
    whole, reason = limits.cut(codec, [], spelled)
    assert reason == "stop"
    for size in (1, 2, 5):
        output: list[int] = []
        reason = None
        while reason != "stop":
            kept, reason = limits.cut(codec, output, spelled[len(output) : len(output) + size])
            output += spelled[len(output) : len(output) + kept]
        assert len(output) == whole


def test_streams_survive_broken_characters():
    vocab = {0: b"Z", 1: b"\xf0", 2: b"\x9f", 3: b"\x98", 4: b"\x80", 5: b"a"}

    def decode(ids):
        return b"".join(vocab[i] for i in ids).decode("utf-8", "replace")

    for ids in ([0, 1, 5], [1, 2, 3, 4, 0], [1] * 50, [0, 1, 2, 5, 1, 2, 3, 4]):
        stream = TextStream(decode)
        text = "".join(stream.push([i]) for i in ids)
        assert decode(ids).replace("\ufffd", "").startswith(text.replace("\ufffd", ""))
    lengths = []
    TextStream(lambda ids: lengths.append(len(ids)) or decode(ids)).push([1] * 400)
    assert max(lengths) < 20  # a broken character is not decoded again and again


def test_draft_ids_beyond_the_embedding_are_cut():
    tree = build_tree(
        0, [Draft.uniform((1, 2, 500, 3), "s", 0.9, 0.9), Draft.uniform((-1,), "s", 0.9, 0.9)], 16, vocabulary=300
    )
    assert tree.tokens == (0, 1, 2)


# ---------------------------------------------------------------- sidecar


def test_an_idle_minute_does_not_restart_a_healthy_sidecar(tools, monkeypatch):
    monkeypatch.setattr(client_module, "HANG_SECONDS", 0.05)
    client = SidecarClient(process=fake("good"))
    client.wait_ready(20)
    pid = client._process.pid
    for _ in range(3):
        box = client.submit(read_tools(tools), [("user", "x")])
        assert wait_for(lambda box=box: box.poll().complete)
        box.close()
        time.sleep(0.1)
    assert (client._process.pid, client.warnings) == (pid, {})
    client.close()


def test_a_hung_sidecar_is_restarted_without_waiting(tools, monkeypatch):
    monkeypatch.setattr(client_module, "HANG_SECONDS", 0.05)
    client = SidecarClient(process=fake("hang"))
    client.wait_ready(20)
    pid = client._process.pid
    client.submit(read_tools(tools), [("user", "x")])
    time.sleep(0.1)
    start = time.perf_counter()
    client.submit(read_tools(tools), [("user", "x")])
    assert time.perf_counter() - start < 0.5
    assert client._process.pid != pid
    client.close()


def test_a_sidecar_that_keeps_dying_is_retried_less_and_less(tools):
    client = SidecarClient(process=fake("good"))
    client.wait_ready(20)
    client._process._command = [os.devnull]
    for _ in range(4):
        os.kill(client._process.pid, 9) if client._process.pid else None
        time.sleep(0.02)
        box = client.submit(read_tools(tools), [("user", "x")])
        box.poll()
    assert client.warnings["restarted"] == 1
    assert client.warnings["unstartable"] == 1
    assert box.hint.failed
    client.close()


@pytest.mark.parametrize("what", ["text", "enum", "odd"])
def test_requests_that_cannot_be_encoded_do_not_raise(what):
    client = SidecarClient(process=fake("good"))
    client.wait_ready(20)
    enum = {"text": ["a"], "enum": [2**70], "odd": [object()]}[what]
    tools = [{"name": "f", "parameters": {"properties": {"a": {"enum": enum}}}}]
    box = client.submit(read_tools(tools), [("user", "half an emoji \ud83d")])
    if what == "text":
        assert wait_for(lambda: box.poll().complete)
    else:
        assert box.poll().failed
    box.close()
    assert client._mailboxes == {}
    client.close()


def test_odd_messages_are_counted_not_raised(tools):
    client = SidecarClient(process=fake("hang"))
    client.wait_ready(20)
    box = client.submit(read_tools(tools), [("user", "x")])
    client._file(protocol.encoder.encode(Function(1, (0, 1), (90,))))
    nested = b"\x91" * 5000 + b"\xc0"
    client._file(msgspec.msgpack.encode(["s", 1, 0, 0, 50])[:-1] + b"\x32" + nested)
    client._file(b"\x96\xa1s\x01\x00\x00\x32" + nested)
    client._file(protocol.encoder.encode(Function(1, (0, 1), (1000, -5))))
    assert client.warnings["garbage"] == 3
    assert box.hint.function.confidences == (0.99, 0.01)
    client.close()


def test_a_wave_does_not_count_as_working_for_ever(tools, monkeypatch):
    monkeypatch.setattr("ooospec.sidecar.mailbox.WAVE_SECONDS", 0.05)
    client = SidecarClient(process=fake("hang"))
    client.wait_ready(20)
    box = client.submit(read_tools(tools), [("user", "x")])
    assert box.working
    time.sleep(0.1)
    assert not box.working
    client.close()


def test_hint_with_fewer_chances_than_names(codec, tools):
    hint = Hint(FunctionHint(("get_weather", "web_search"), (0.9,)), hint_of().slots)
    assert write(codec, text_of("hermes"), read_tools(tools), hint=hint)[0] == text_of("hermes")


# ---------------------------------------------------------------- schemas and messages


def test_hostile_schemas_end():
    def properties(schema):
        return read_tools([{"name": "f", "parameters": {**schema, "properties": {"a": {"$ref": "#/$defs/A"}}}}])

    start = time.perf_counter()
    properties({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 30}}})
    properties({"$defs": {"A": True}})
    properties({"$defs": {"A": [1]}})
    prose_tools("use the following tools:\n" + "1. Name: x\nDescription: y\nParameters: {'a'\n" * 2000)
    prose_tools("use the following tools:\n1. Name: x\nDescription: y\nParameters: {{'a': 1}}")
    assert time.perf_counter() - start < 20  # unbounded, it is hours


def test_unions_of_constants_and_mixed_unions():
    schema = {
        "properties": {
            "described": {"oneOf": [{"const": "x", "description": "1"}, {"const": "y"}]},
            "mixed": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
            "nullable": {"anyOf": [{"enum": ["a"]}, {"type": "null"}]},
        }
    }
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert [slot.choices for slot in tool.slots] == [("x", "y"), (), ("a",)]


def test_normalising_leaves_data_alone():
    schema = {"type": "dict", "properties": {"type": {"type": "float", "default": {"type": "car", "x": 1}}}}
    assert normalize_schema(schema)["properties"]["type"] == {"type": "number", "default": {"type": "car", "x": 1}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": None},
    ],
)
def test_every_form_of_message_is_rendered(tiny_llama, tools, message):
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        decoder.generate([message], tools, max_new_tokens=3)


ITEMS = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% for k, v in
c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}tools"""


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"a": 1}', "a=1;"), ("", ""), ({"a": 2}, "a=2;"), ("no json", None), ("5", None), ("[1]", None), (None, None)],
)
def test_templates_that_take_arguments_apart_get_objects_or_say_where_there_is_none(tiny_llama, arguments, rendered):
    tokenizer = copy.copy(tiny_llama.tokenizer)
    tokenizer.chat_template = ITEMS
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    if rendered is None:
        with pytest.raises(UsageError, match=r"Message 1: .* arguments of a call that are a JSON object"):
            render(tokenizer, messages)
    else:
        assert render(tokenizer, messages).prompt == f"hi{rendered}tools"


class Raising:
    """A proposer that raises at one of its calls."""

    name, wants_top = "failing", False

    def __init__(self, hook, at):
        self.hook, self.at, self.asked = hook, at, 0

    def _call(self, hook):
        self.asked += hook == self.hook
        if hook == self.hook and self.asked == self.at:
            raise RuntimeError("a bug")

    def begin(self, context):
        self._call("begin")

    def propose(self):
        self._call("propose")
        return [Draft.uniform([1, 2], self.name, 0.5, 0.5)]

    def observe(self, commit):
        self._call("observe")

    def end(self):
        self._call("end")


@pytest.mark.faulty
@pytest.mark.parametrize(("hook", "at"), [("begin", 1), ("propose", 1), ("propose", 3), ("observe", 2), ("end", 1)])
def test_a_proposer_that_fails_costs_speed_only(tiny_llama, monkeypatch, caplog, hook, at):
    every = lambda setup: [Raising(hook, at), PromptLookup()]  # noqa: E731
    monkeypatch.setitem(METHODS, "failing", Method("failing", "fails", every, 16))
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        expected = decoder.generate("abcabcabc", method="ar", max_new_tokens=20).output_ids
        for count in (1, 2):
            made = decoder.generate("abcabcabc", method="failing", max_new_tokens=20)
            assert made.output_ids == expected and made.finish_reason
            assert made.warnings == {"proposer failing": count}
    assert [record.name for record in caplog.records].count("ooospec.engine") == 1  # logged once, counted always


def test_template_errors_are_usage_errors(tiny_llama):
    class Refusing:
        chat_template = "x"

        def apply_chat_template(self, conversation, **kwargs):
            raise ValueError("no chat template is set")

    with pytest.raises(UsageError, match="no chat template"):
        render(Refusing(), "hi")


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "NaN", "Infinity"])
def test_degenerate_arguments_are_no_calls(value):
    scanner = CallScanner()
    scanner.feed('{"name": "a", "arguments": {"x": ' + value + '}} {"name": "b", "arguments": {}}')
    assert [name for name, _, _ in scanner.finished()] == ["b"]


def test_items_of_other_objects_are_not_arguments():
    scanner = CallScanner()
    scanner.feed(json.dumps({"name": "a", "arguments": {"x": 1}, "meta": {"y": 2}}))
    assert len(scanner.calls[0].items) == 1


def test_placement_respects_the_cpus_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
        assert Placement.shared() == Placement(0, 1, 1)
    finally:
        os.sched_setaffinity(0, allowed)


def test_split_placement_is_undone(tiny_llama):
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU only")
    placement = Placement.split(2)
    with Decoder(tiny_llama, None, budget="fixed", placement=placement):
        assert os.sched_getaffinity(0) == set(placement.target_cores)
    assert os.sched_getaffinity(0) == {*placement.target_cores, *placement.sidecar_cores}
    os.sched_setaffinity(0, before)
    assert Scripted
