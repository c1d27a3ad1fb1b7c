"""Schemas, templates, styles and the codec."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooospec.chat.scanner import CallScanner
from ooospec.chat.schema import normalize_schema, openai_tools, prose_tools, read_tools
from ooospec.chat.style import StyleBook, default_styles, learn_style
from ooospec.chat.template import plain_text, render, template_format
from ooospec.chat.values import ending
from ooospec.errors import ToolsError, UsageError


def slots(parameters):
    return {s.name: s for s in read_tools([{"name": "f", "parameters": parameters}])[0].slots}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "f"}, "must be a JSON list"),
        ("text", "must be a JSON list"),
        ([3], "Tool 0 must be an object"),
        ([{"type": "function", "function": {"description": "x"}}], "Tool 0 needs a name"),
        ([{"name": ""}], "Tool 0 needs a name"),
        ([{"name": "f", "parameters": [1]}], "parameters must be a JSON Schema object"),
    ],
)
def test_bad_tools_are_refused_saying_what_came(tools, message):
    with pytest.raises(ToolsError, match=message):
        read_tools(tools)


def test_types_of_every_dialect():
    found = slots(
        {
            "type": "dict",
            "properties": {
                "a": {"type": "dict"}, "b": {"type": "float"}, "c": {"type": "tuple"}, "d": {"type": "list(str)"},
                "e": {"type": "any"}, "f": {"type": ["string", "null"]}, "g": {}, "h": {"type": "boolean"},
                "i": {"enum": ["x", 3]}, "j": {"const": 1}, "k": {"type": "weird"}, "l": None,
            },
            "required": ["a"],
        }
    )  # fmt: skip
    assert {n: s.types for n, s in found.items()} == {
        "a": ("object",), "b": ("number",), "c": ("array",), "d": ("array",), "e": (), "f": ("string", "null"),
        "g": (), "h": ("boolean",), "i": (), "j": (), "k": (), "l": (),
    }  # fmt: skip
    assert (found["h"].choices, found["i"].choices, found["j"].choices) == ((True, False), ("x", 3), (1,))
    assert [s.required for s in found.values()].count(True) == 1


@pytest.mark.parametrize(
    "reference", ["#/$defs/a~1b", "#/$defs/a%7E1b", "#here", "tools:x#/$defs/a~1b", "#/$defs/list/anyOf/0"]
)
def test_references_of_every_form_are_followed(reference):
    wanted = {"type": "integer", "$anchor": "here"}
    (tool,) = read_tools(
        [{"name": "f", "parameters": {"$id": "tools:x", "$defs": {"a/b": wanted, "list": {"anyOf": [wanted]}},
          "properties": {"n": {"$ref": reference}}}}]
    )  # fmt: skip
    assert tool.slots[0].types == ("integer",)


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "http://127.0.0.1:9/x.json", "%%%", "", "#/$defs/a/0"])
@pytest.mark.parametrize("broken", [{}, {"$id": 5}, {"$defs": 7}, {"allOf": 5}, {"$anchor": 3}])
def test_references_to_nowhere_and_broken_schemas_allow_everything(reference, broken):
    schema = {"$defs": {"a": {}}, "properties": {"n": {"$ref": reference}}, **broken}
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert [slot.types for slot in tool.slots] == [()]


class Chat:
    def __init__(self, template, added=()):
        self.chat_template, self._added = template, dict.fromkeys(added, 0)

    def get_added_vocab(self):
        return self._added


def test_the_format_is_read_off_the_template_or_else_the_vocabulary():
    found, why = template_format(Chat("{{ tools }} <tool_call> tool_calls", ["<|python_tag|>"]))
    assert found.name == "hermes" and why.startswith("of its chat template: it holds '<tool_call>'")
    found, why = template_format(Chat("{{ tools }}", ["<s>", "[TOOL_CALLS]", "[ARGS]"]))
    assert found.name == "mistral_named" and why == "of its vocabulary: it holds '[ARGS]'"
    found, why = template_format(Chat("{{ tools }}", ["<s>"]))
    assert found.name == "json" and "nothing tells another one" in why


def test_references_and_unions():
    found = slots(
        {
            "$defs": {"Unit": {"type": "string", "enum": ["c", "f"]}, "Loop": {"$ref": "#/$defs/Loop"}},
            "properties": {
                "unit": {"$ref": "#/$defs/Unit"},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
                "loop": {"$ref": "#/$defs/Loop"},
                "missing": {"$ref": "#/$defs/Nowhere"},
            },
        }
    )
    assert found["unit"].choices == ("c", "f")
    assert found["maybe"].types == ("string", "null")
    assert found["loop"].types == found["missing"].types == ()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "properties", "enum", "anyOf", "$ref", "required", "const", "a"]),
                x,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_schema_breaks_the_resolver(schema):
    if isinstance(schema, dict) or schema is None:
        read_tools([{"name": "f", "parameters": schema}])
        openai_tools([{"name": "f", "parameters": schema}])


def test_normalised_schemas_are_json_schema():
    schema = {"type": "dict", "properties": {"x": {"type": "float"}, "type": {"type": "any"}}}
    assert normalize_schema(schema) == {"type": "object", "properties": {"x": {"type": "number"}, "type": {}}}


API_BANK = """You can use tools.

**Available Tools**
In your response, you can use the following tools:
1. Name: GetUserToken
Description: Get the user token: by username.
Parameters: {'username': {'type': 'str', 'description': "The user's name."}, 'on': {'type': 'bool', 'description': 'x'}}
2. QueryMeeting: The API for meetings.
Parameters: {}

**Only generate Tool Calls: If a tool is needed, specify it.**
"""


def test_prose_tools_of_both_levels():
    first, second = prose_tools(API_BANK)
    assert (first.name, first.description) == ("GetUserToken", "Get the user token: by username.")
    assert [(s.name, s.types) for s in first.slots] == [("username", ("string",)), ("on", ("boolean",))]
    assert (second.name, second.slots) == ("QueryMeeting", ())
    assert prose_tools("No tools here.") == ()


def test_render(tiny_llama, tools):
    one = render(tiny_llama.tokenizer, "Weather?", tools)
    assert one.prompt.startswith("<tools>")
    assert [t.name for t in one.tools] == ["get_weather", "web_search"]
    prose = render(tiny_llama.tokenizer, [{"role": "system", "content": API_BANK}, {"role": "user", "content": "Hi"}])
    assert [m["role"] for m in prose.messages] == ["user"]
    assert (prose.style_key, len(prose.tools)) == ("prose", 2)
    assert render(tiny_llama.tokenizer, "Hi").tools == ()


@pytest.mark.parametrize("messages", [[], 3, [{"role": "robot", "content": "x"}], ["text"], [{}]])
def test_bad_messages_are_refused(tiny_llama, messages):
    with pytest.raises(UsageError):
        render(tiny_llama.tokenizer, messages)


def test_plain_text_of_every_kind_of_message():
    assert plain_text({"role": "user", "content": None}) == ""
    assert plain_text({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}) == "a\n"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert "call f: {}" in plain_text(call)
    assert plain_text({"role": "tool", "content": "42"}) == "result: 42"


def scanned(text):
    scanner = CallScanner()
    scanner.feed(text)
    return scanner


@pytest.mark.parametrize("indent", [None, 1, 2, 4])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_styles_are_learned_from_one_output(indent, key):
    def write(name, arguments):
        return "Sure:\n" + json.dumps({"name": name, key: arguments}, indent=indent) + "\nThat is it."

    style = learn_style(scanned(write("f", {"a": 1, "b": "x"})), default_styles("")[0])
    assert style is not None
    rendered = f'{style.opening}{style.head}g{style.middle}c{style.colon}2{style.comma}d{style.colon}"y"'
    rendered += style.tail + style.closing
    assert rendered == write("g", {"c": 2, "d": "y"})
    single = learn_style(scanned(write("f", {"a": 1})), default_styles("")[0])
    assert single is not None
    assert (single.comma, single.tail) == (style.comma, style.tail)


def test_style_book_prefers_the_last_seen_and_forgets_nothing_else():
    book = StyleBook()
    assert book.ranked("k", default_styles("<tool_call>"))[0][0].opening == "<tool_call>\n"
    book.learn("k", default_styles(""), scanned('X {"name": "f", "arguments": {}}'))
    assert book.ranked("k", default_styles("<tool_call>"))[0][0].opening == "X "
    book.learn("k", default_styles(""), scanned("no call"))
    assert book.ranked("k", default_styles(""))[0][0].opening == "X "
    assert book.ranked("other", default_styles("<tool_call>"))[0][0].opening == "<tool_call>\n"


def test_what_a_template_does_not_know_is_not_lost():
    """Qwen2.5's template passes over the role developer, SmolLM2's over tools, calls and their results."""

    def written(template, messages, tools=None):
        prompt = []

        def apply(rendered, **_):
            prompt.extend((message["role"], message["content"]) for message in rendered)

        tokenizer = SimpleNamespace(chat_template=template, apply_chat_template=apply)
        render(tokenizer, messages, tools)
        return prompt

    said = [{"role": "developer", "content": "Answer in French."}, {"role": "user", "content": "Hi"}]
    assert written("{{ messages }}", said)[0] == ("system", "Answer in French.")
    assert written("{{ messages }} developer", said)[0] == ("developer", "Answer in French.")
    function = {"name": "f", "arguments": '{"a": 1}'}
    called = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert written("{{ messages }}", called, tools)[2] == ("assistant", '{"name": "f", "arguments": {"a": 1}}')
    assert written("{{ tools }} {{ tool_calls }}", called, tools)[1] == ("assistant", "")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {}}]}]
    with pytest.raises(UsageError, match="Message 0: content may hold parts of type text only; got 'image_url'"):
        written("{{ messages }}", parts)
    assert written("{{ messages }}", [{"role": "user", "content": parts[0]["content"][:1]}]) == [("user", "Look:")]


@settings(max_examples=200)
@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_continuations_are_what_the_whole_text_would_be(codec, before, after):
    committed = codec.encode(before) or [5]
    ids, starts = codec.continue_with(committed, after)
    assert len(ids) == len(starts)
    joined = codec.decode([*committed, *ids])
    assert joined == codec.decode(committed) + after.encode("utf-8", "replace").decode()


def test_streamed_text_equals_whole_text(codec):
    text = "São José 😀 väg"
    stream = codec.stream()
    assert "".join(stream.push([token]) for token in codec.encode(text)) == text


@given(st.recursive(st.text(), st.lists, max_leaves=6), st.data())
def test_a_value_that_is_cut_gets_the_end_that_completes_it(value, data):
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(1, len(text)))]
    end = ending(cut)
    if end is None:
        for quote in ("", '"'):
            for depth in range(cut.count("[") + 1):
                with pytest.raises(json.JSONDecodeError):
                    json.loads(cut + quote + "]" * depth)
    elif "\\u" not in cut[-6:]:
        assert json.loads(cut + end) is not None
