"""Every call format: what is written is read back, however the text is divided; and how a format is recognised."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooospec.chat.drafter import Guess, continuations
from ooospec.chat.formats.registry import FORMATS, CallFormat, detect_format, format_named, register_format
from ooospec.chat.formats.tagged import json_of_raw
from ooospec.chat.scanner import CallScanner
from ooospec.chat.schema import read_tools
from ooospec.chat.style import default_styles
from ooospec.chat.template import render
from ooospec.core import Slot, SlotHint
from ooospec.errors import UsageError

TYPES = {"s": "string", "i": "integer", "f": "number", "b": "boolean", "l": "array", "o": "object"}
TOOLS = read_tools(
    [
        {"name": name, "parameters": {"type": "object", "properties": {k: {"type": t} for k, t in TYPES.items()}}}
        for name in ("get_weather", "other")
    ]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>"), max_size=12)
SIMPLE = (
    WORDS | st.integers(-(2**53), 2**53) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.none()
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": WORDS.map(str.strip), "i": st.integers(-(2**70), 2**70), "f": FLOATS,
        "b": st.booleans(), "l": st.lists(SIMPLE, max_size=3), "o": st.dictionaries(WORDS, SIMPLE, max_size=2),
    },
)  # fmt: skip


def written_in(call_format, style, tools, name, arguments):
    """The text of one call of any tool, if the hint says all."""
    tool = next(tool for tool in tools if tool.name == name)
    names = [slot.name for slot in tool.slots]
    values = {s: SlotHint(name, s, arguments.get(s), s in arguments, 0.9) for s in names}
    guess = Guess([(tool, 0.9)], lambda _, slot: values[slot])
    pieces = next(iter(continuations(call_format.scanner(tools), style, guess)))
    return "".join(piece.text for piece in pieces)


def written(call_format, style, calls):
    """The text a drafter would write for these calls in this style, if the hint says all."""
    text = ""
    for name, arguments in calls:
        values = {s: SlotHint(name, s, arguments.get(s), s in arguments, 0.9) for s in TYPES}
        tool = next(tool for tool in TOOLS if tool.name == name)
        guess = Guess([(tool, 0.9)], lambda _, slot, v=values: v[slot])
        scanner = call_format.scanner(TOOLS)
        pieces = next(iter(continuations(scanner, style, guess)))
        one = "".join(piece.text for piece in pieces)
        text = one if not text else text.removesuffix(style.closing) + style.between + one.removeprefix(style.opening)
    return text


def scan(call_format, text, cuts=(), tools=TOOLS):
    scanner, at = call_format.scanner(tools), 0
    for cut in [*sorted(cuts), len(text)]:
        scanner.feed(text[at:cut])
        at = max(at, cut)
    return [(name, arguments) for name, arguments, _ in scanner.finished()]


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=60)
@given(data=st.data())
def test_what_is_written_is_read_back_under_every_division(name, data):
    call_format = FORMATS[name]
    style = data.draw(st.sampled_from(call_format.styles("")))
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["get_weather", "other"]), ARGUMENTS), min_size=1, max_size=3))
    text = written(call_format, style, calls)
    assert scan(call_format, text) == calls
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert scan(call_format, text, cuts) == calls
    assert scan(call_format, text, range(len(text))) == calls


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=60)
@given(data=st.data())
def test_drafts_go_on_from_every_point_of_a_call(name, data):
    """From any beginning of what the target writes, some draft continues it exactly, if the hint is right."""
    call_format = FORMATS[name]
    style = call_format.styles("")[0]
    arguments = data.draw(ARGUMENTS)
    text = written(call_format, style, [("get_weather", arguments)])
    at = data.draw(st.integers(0, len(text) - 1))
    scanner = call_format.scanner(TOOLS)
    scanner.feed(text[:at])
    values = {s: SlotHint("get_weather", s, arguments.get(s), s in arguments, 0.9) for s in TYPES}
    guess = Guess([(TOOLS[0], 0.9), (TOOLS[1], 0.1)], lambda _, slot: values[slot])
    drafts = ["".join(piece.text for piece in pieces) for pieces in continuations(scanner, style, guess)]
    assert any(draft and text[at:].startswith(draft) for draft in drafts), (text[:at], text[at:], drafts)


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=150)
@given(data=st.data())
def test_no_text_breaks_a_scanner_and_chunks_do_not_matter(name, data):
    call_format = FORMATS[name]
    style = call_format.styles("")[0]
    parts = ["get_weather", "s", '"x"', *"1{}()[],=\n é<'\\", style.head, style.opening, style.middle, style.colon]
    parts += [style.comma, style.tail, style.closing, style.between]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=25)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert scan(call_format, text, cuts) == scan(call_format, text)


@pytest.mark.parametrize("name", list(FORMATS))
def test_work_is_linear(name):
    style = FORMATS[name].styles("")[0]

    def steps(size):
        scanner, count = FORMATS[name].scanner(TOOLS), 0
        step = scanner._step

        def counted(index):
            nonlocal count
            count += 1
            return step(index)

        scanner._step = counted
        text = (style.opening + style.head + "get_weather" + style.middle + "s" + style.colon + '"x' + "v ") * size
        for at in range(0, len(text), 7):
            scanner.feed(text[at : at + 7])
        return count

    assert steps(2_000) < 12 * steps(200)


SAMPLES = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"s": "Oslo", "i": 3}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"s": "Oslo", "i": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"s": "Oslo", "i": 3}}]',
    "mistral_named": '[TOOL_CALLS]get_weather[ARGS]{"s": "Oslo", "i": 3}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"s": "Oslo", "i": 3}}]',
    "phi": '<|tool_call|>[{"name": "get_weather", "arguments": {"s": "Oslo", "i": 3}}]<|/tool_call|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"s": "Oslo", "i": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"s": "Oslo", "i": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"s": "Oslo", "i": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"s": "Oslo", "i": 3}<|call|>',
    "function_tag": '<function=get_weather>{"s": "Oslo", "i": 3}</function>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=s>\nOslo\n</parameter>\n"
    "<parameter=i>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>s</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>i</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "pythonic": '[get_weather(s="Oslo", i=3)]',
    "json": '```json\n{"name": "get_weather", "arguments": {"s": "Oslo", "i": 3}}\n```',
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_call_as_the_models_write_it(name):
    assert scan(FORMATS[name], SAMPLES[name]) == [("get_weather", {"s": "Oslo", "i": 3})]


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("json", "hermes")])
def test_the_style_writes_what_the_models_write(name):
    texts = [
        written(FORMATS[name], style, [("get_weather", {"s": "Oslo", "i": 3})]) for style in FORMATS[name].styles("")
    ]
    assert SAMPLES[name] in texts, texts


def test_digits_of_numbers_are_kept_in_every_format():
    for name in ("pythonic", "qwen3_coder", "mistral_named"):
        call_format = FORMATS[name]
        text = written(call_format, call_format.styles("")[0], [("get_weather", {"i": 12345678901234567890})])
        scanner = call_format.scanner(TOOLS)
        scanner.feed(text)
        assert '"i": 12345678901234567890' in next(scanner.finished())[2]
    scanner = FORMATS["pythonic"].scanner(TOOLS)
    scanner.feed("[get_weather(f=1.10)]")
    assert next(scanner.finished())[2] == '{"f": 1.10}'


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("3", ("string",), '"3"'),
        ("3", ("integer",), "3"),
        ("3", (), "3"),
        ("Oslo", (), '"Oslo"'),
        ('"Oslo"', (), '"Oslo"'),
        ('"Oslo"', ("string",), '"\\"Oslo\\""'),
        ("True", ("boolean",), "true"),
        ("[1, 2]", ("array",), "[1, 2]"),
        ("1.10", ("number",), "1.10"),
        ("nonsense", ("integer",), '"nonsense"'),
        ("3", ("string", "null"), '"3"'),
        ("null", ("string", "null"), "null"),
    ],
)
def test_raw_values_get_the_type_of_their_slot(text, types, expected):
    assert json_of_raw(text, Slot("x", types, True)) == expected


def test_python_literals():
    scanner = FORMATS["pythonic"].scanner(TOOLS)
    scanner.feed(
        """[get_weather(s='it\\'s "so"', l=[1, 'a', None], o={'k': (1, 2)}, b=True), other()] get_weather is fine"""
    )
    assert list(scan(FORMATS["pythonic"], scanner.text)) == [
        ("get_weather", {"s": 'it\'s "so"', "l": [1, "a", None], "o": {"k": [1, 2]}, "b": True}),
        ("other", {}),
    ]
    assert scan(FORMATS["pythonic"], "say print(x=1), get_weather_now(s=1), get_weather(1), get_weather (s=2)") == []


TEMPLATES = {
    "hermes": 'return a json object within <tool_call></tool_call> tags: {"name": .., "arguments": ..}',
    "llama3_json": 'in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "pythonic": "in the format of [func_name1(params_name1=params_value1, ...), func_name2(params)]",
    "mistral": "{{ '[AVAILABLE_TOOLS] ' }} {{ '[TOOL_CALLS] [' }}",
    "mistral_named": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "qwen3_coder": '<tool_call>\n<function=example>\n<parameter=one>\nvalue "arguments"',
    "deepseek_v3": "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
    "deepseek_v31": "{{'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'}}",
    "granite": "{{ '<|tool_call|>' }}",
    "phi": "<|tool|>{{ tools }}<|/tool|> <|tool_call|><|/tool_call|>",
    "harmony": "<|start|>assistant<|channel|>commentary <|constrain|>json<|message|>",
    "kimi_k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "glm": "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value> arguments",
    "function_tag": '<function=example_function_name>{"example_name": "value"}</function>',
    "json": "plain",
}


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_formats_are_recognised_by_their_templates(name):
    found, why = detect_format(TEMPLATES[name])
    assert found.name == name, why


def test_the_words_of_a_dialogue_choose_no_format(tiny_llama):
    user = {"role": "user", "content": "What do <function=f> and <parameter=p> and [ARGS] mean?"}
    tools = [{"name": "f", "parameters": {}}]
    prose = "You can use the following tools:\n1. Name: f\nDescription: d\nParameters: {}\n\n**Only generate .."
    listed = SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=lambda m, **_: str(m))
    assert render(tiny_llama.tokenizer, [user], tools).call_format == "json"
    assert render(listed, [user], tools).call_format == "json"
    system = {"role": "system", "content": prose + '<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'}
    assert render(tiny_llama.tokenizer, [system, user]).call_format == "hermes"
    assert render(tiny_llama.tokenizer, [user], tools, "pythonic").call_format == "pythonic"


def test_a_format_of_ones_own():
    mine = CallFormat("mine", "x", (("@@call",),), lambda tools: CallScanner(), default_styles)
    register_format(mine)
    try:
        assert format_named("mine") is mine and detect_format("@@call")[0] is mine
    finally:
        del FORMATS["mine"]
    with pytest.raises(UsageError, match="Unknown call format 'mine'; choose one of deepseek_v3"):
        format_named("mine")


def test_the_documented_format_of_ones_own():
    from pathlib import Path

    page = Path(__file__).parents[1] / "docs" / "write_a_call_format.md"
    code = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    try:
        exec(compile(code, str(page), "exec"), {})
        mine = format_named("mine")
        text = written(mine, mine.styles("")[0], [("get_weather", {"s": "Oslo", "i": 3}), ("other", {})])
        assert text.startswith('@call get_weather with {"s": "Oslo", "i": 3}')
        assert scan(mine, text, range(len(text))) == [("get_weather", {"s": "Oslo", "i": 3}), ("other", {})]
        assert detect_format("say @call name")[0] is mine
    finally:
        FORMATS.pop("mine", None)
