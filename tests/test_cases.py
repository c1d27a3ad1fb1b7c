"""Kinds of faults that users of tool calling have met elsewhere: each with its neighbours, under every division."""

import json

import pytest

from ooospec.chat.formats.registry import FORMATS
from ooospec.chat.schema import read_tools
from ooospec.core import BONUS, FunctionHint, Hint, SlotHint
from ooospec.memory import Memory
from scripted import write
from test_answer import answer
from test_formats import scan, written_in

TOOLS = read_tools(
    [
        {"name": "note", "parameters": {"type": "object", "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"},
            "on": {"type": "boolean"}, "free": {}, "maybe": {"type": ["string", "null"]},
            "list": {"type": "array"}, "map": {"type": "object"}}, "required": ["text"]}},
        {"name": "files-read.all", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
        {"name": "wetter_für", "parameters": {"type": "object", "properties": {"straße": {"type": "string"}}}},
        {"name": "ping"},
    ]
)  # fmt: skip


def hermes(name, arguments, raw=None):
    text = json.dumps(arguments, ensure_ascii=False) if raw is None else raw
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def coder(name, **arguments):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def check(name, text, calls, content="", reasoning="", **options):
    for cuts in ((), range(len(text)), range(0, len(text), 3), range(0, len(text), 11)):
        found = answer(FORMATS[name], text, cuts, tools=TOOLS, **options)
        assert found == (content, reasoning, calls), (cuts, found)


VALUES = [
    {"text": "São José 😀 漢字"}, {"text": 'say "hi" to them'}, {"text": "tab\there\nand a break"},
    {"text": "C:\\new\\table\\"}, {"text": "ends in a backslash \\"}, {"text": ""}, {"text": " spaces around "},
    {"text": "</tool_call> and {\"name\": \"ping\", \"arguments\": {}}"}, {"text": "null"}, {"text": "true"},
    {"text": "007"}, {"text": "1e5"}, {"text": "x", "count": -5}, {"text": "x", "ratio": -74.0046539},
    {"text": "x", "count": 12345678901234567890}, {"text": "x", "on": False}, {"text": "x", "maybe": None},
    {"text": "x", "list": [[1, 2.5], [-3, "a"]], "map": {"k": None, "s": "it's", "deep": {"er": [{}]}}},
]  # fmt: skip


@pytest.mark.parametrize("arguments", VALUES, ids=lambda a: json.dumps(a)[:40])
@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "qwen3_coder", "harmony"]
)
def test_values_of_every_kind_survive_in_every_family(name, arguments):
    text = written_in(FORMATS[name], FORMATS[name].styles("")[0], TOOLS, "note", arguments)
    if name == "qwen3_coder" and any(mark in str(arguments) for mark in ("</", " spaces ", "\\n")):
        pytest.skip("raw text between tags: line breaks and tags of its own are the format's limit")
    (found,) = scan(FORMATS[name], text, tools=TOOLS)
    assert found == ("note", arguments)
    _, _, calls = answer(FORMATS[name], text, range(len(text)), tools=TOOLS)
    assert [(n, json.loads(raw, strict=False)) for n, raw in calls] == [found]


@pytest.mark.parametrize("drafted", [1, 3, 8, 16])
@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "qwen3_coder", "harmony"]
)
def test_no_value_in_any_family_comes_out_otherwise_with_drafts(codec, name, drafted):
    """Every method, every size of draft, hints that are right, wrong and none: the target's own tokens, each time."""
    memories = {method: Memory() for method in ("lookup", "recycling", "samd", "toolspec", "ooo")}
    for number, arguments in enumerate(VALUES):
        text = written_in(FORMATS[name], FORMATS[name].styles("")[0], TOOLS, "note", arguments)
        said = arguments if number % 3 else VALUES[number - 1]
        slots = {("note", slot): SlotHint("note", slot, value, True, 0.9) for slot, value in said.items()}
        hint = Hint(FunctionHint(("note",), (0.9,)), slots, complete=True) if number % 4 else None
        for method in memories if number < 4 else ("ooo",):
            options = {"method": method, "memory": memories[method], "hint": hint if method == "ooo" else None}
            out, commits = write(codec, text, TOOLS, nodes=drafted + 1, form=name, **options)
            assert out == text and all(commit.drafted <= drafted for commit in commits)
            accepted = sum(source != BONUS for commit in commits for source in commit.sources)
            assert accepted <= sum(commit.drafted for commit in commits)
            assert accepted + len(commits) >= sum(len(commit.tokens) for commit in commits)


def test_escapes_are_the_targets_own_byte_for_byte():
    for raw in (
        '{"text": "\\ubcd1\\ubaa9 \\ud83d\\ude00"}',
        '{"text": "a\\\\nb"}',
        '{"text":"a\\/b", "count":   3}',
        '{"ratio": 1.10}',
    ):
        check("hermes", hermes("note", None, raw), [("note", raw)])


def test_raw_control_characters_in_strings_are_escaped():
    raw, escaped = '{"text": "a\nb\tc\\"', '{"text": "a\\nb\\tc\\"'
    for name in ("hermes", "mistral_named", "llama3_json"):
        style = FORMATS[name].styles("")[0]
        for end in ('\\n", "map": {"k":\n "l\nm"}}', '"}'):
            text = f"{style.opening}{style.head}note{style.empty.rsplit('{}', 1)[0]}{raw}{end}"
            text += style.empty.rsplit("{}", 1)[1] + style.closing
            wanted = escaped + end.replace('"l\nm"', '"l\\nm"')
            assert json.loads(wanted)
            check(name, text, [("note", wanted)])


def test_halves_of_surrogate_pairs_do_not_come_out():
    check("qwen3_coder", coder("note", text="x", maybe='"\\ud83d"'), [("note", '{"text": "x", "maybe": "\ufffd"}')])
    quoted = '{"name": "note", "arguments": "{\\"text\\": \\"\ud83d\\"}"}'.replace("\ud83d", "\\ud83d")
    ((name, raw),) = answer(FORMATS["hermes"], f"<tool_call>\n{quoted}\n</tool_call>", (), tools=TOOLS)[2]
    assert name == "note" and raw.encode()


def test_values_in_formats_that_are_not_json():
    both = read_tools([{"name": "f", "parameters": {"properties": {"x": {"type": ["string", "number"]}}}}])
    text = coder("f", x="3")
    assert scan(FORMATS["qwen3_coder"], text, tools=both) == [("f", {"x": 3})]
    call = [("note", '{"text": "01234"}')]
    check("pythonic", "[note(text=01234)]", call)
    check("pythonic", "[note(text='01234')]", call)
    check("pythonic", "[note(text=\u0663)]", [("note", '{"text": "\u0663"}')])
    check("pythonic", '[note(text="a\nb")]', [("note", '{"text": "a\\nb"}')])


def test_raw_values_are_typed_by_the_schema():
    text = coder("note", text="02134", count="5", on="True", free="5", maybe="null", map='{"k": 1}', list="[1]")
    wanted = '{"text": "02134", "count": 5, "on": true, "free": 5, "maybe": null, "map": {"k": 1}, "list": [1]}'
    check("qwen3_coder", text, [("note", wanted)])
    check("qwen3_coder", coder("note", text="null", free="true"), [("note", '{"text": "null", "free": true}')])


def test_names_of_every_kind():
    check("hermes", hermes("files-read.all", {"path": "x"}), [("files-read.all", '{"path": "x"}')])
    check("hermes", hermes("wetter_für", {"straße": "Ä 1"}), [("wetter_für", '{"straße": "Ä 1"}')])
    check("pythonic", '[files-read.all(path="x")]', [("files-read.all", '{"path": "x"}')])
    check("mistral_named", '[TOOL_CALLS]files-read.all[ARGS]{"path": "x"}', [("files-read.all", '{"path": "x"}')])
    check("hermes", hermes("wetter_f\\u00fcr", {}), [("wetter_für", "{}")])
    long = read_tools([{"name": "n" * 64}])
    assert answer(FORMATS["hermes"], hermes("n" * 64, {}), range(200), tools=long)[2] == [("n" * 64, "{}")]


def test_both_ways_in_which_phi_writes_calls():
    calls = '[{"name": "note", "arguments": {"text": "x"}}, {"name": "ping", "arguments": {}}]'
    for text in (f"<|tool_call|>{calls}<|/tool_call|>", f"functools{calls}"):
        check("phi", text, [("note", '{"text": "x"}'), ("ping", "{}")])
    check("phi", "functools are a module", [], content="functools are a module")


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json", "mistral", "granite", "phi"])
def test_code_beside_a_call_keeps_its_fences(name):
    code, call = "```python\nprint(1)\n```", '{"name": "ping", "arguments": {}}'
    style = FORMATS[name].styles("")[0]
    shown = style.opening + call + style.closing if style.head.startswith('{"name') else call
    check(name, f"Here:\n{code}\n\n{shown}", [("ping", "{}")], content=f"Here:\n{code}")
    check(name, f"{shown}\n{code}\nDone.", [("ping", "{}")], content=f"{code}\nDone.")
    fenced = f"```json\n{call}\n```"
    check(name, f"{fenced}\n{code}", [("ping", "{}")], content=code)
    check(name, f"{code}\n{fenced}\nDone.", [("ping", "{}")], content=f"{code}\nDone.")
    check(name, f"```\n{call}\n```", [("ping", "{}")])


def test_calls_without_arguments():
    check("hermes", hermes("ping", {}), [("ping", "{}")])
    check("pythonic", "[ping()]", [("ping", "{}")])
    check("qwen3_coder", "<tool_call>\n<function=ping>\n</function>\n</tool_call>", [("ping", "{}")])


def test_words_and_calls_side_by_side():
    two = hermes("ping", {}) + "\n" + hermes("note", {"text": "b"})
    check("hermes", "Sure!\n" + two, [("ping", "{}"), ("note", '{"text": "b"}')], "Sure!")
    check("hermes", "<tool_call> I should ping.\n" + hermes("ping", {}), [("ping", "{}")], "I should ping.")


@pytest.mark.parametrize(
    "text",
    [
        'Here: {"name": "Bingo", "age": 30}',
        'As JSON: {"name": "Bingo", "arguments": {"age": 30}}',
        'Call it with {"path": "x"}.',
        "Use ping() or note(text='x') in Python.",
    ],
)
def test_answers_that_only_look_like_calls_are_content(text):
    check("hermes", text, [], text)


def test_an_object_in_a_fence_is_a_call_if_its_function_was_offered():
    check("hermes", '```json\n{"name": "ping", "arguments": {}}\n```', [("ping", "{}")])
    check(
        "hermes",
        '```json\n{"name": "pong", "arguments": {}}\n```',
        [],
        '```json\n{"name": "pong", "arguments": {}}\n```',
    )


def test_extra_keys_and_other_names_for_arguments():
    check("llama3_json", '{"type": "function", "name": "ping", "parameters": {}}', [("ping", "{}")])
    check(
        "granite",
        '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"a b\\"}"}</tool_call>',
        [("note", '{"text": "a b"}')],
    )
    text = '{"name": "note", "arguments": "no object"}'
    check("granite", text, [], text)


def test_calls_in_reasoning_are_reasoning():
    inside = hermes("ping", {}) + " or not"
    check("hermes", f"<think>{inside}</think>\n" + hermes("ping", {}), [("ping", "{}")], "", inside, reasons=True)


def test_harmony_channels():
    call = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text":"x"}<|call|>'
    check(
        "harmony",
        f"<|channel|>analysis<|message|>Look.<|end|><|start|>assistant{call}",
        [("note", '{"text":"x"}')],
        "",
        "Look.",
    )
    check("harmony", "<|channel|>final<|message|>Done.", [], "Done.")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<|channel|>commentary?<|channel|>commentary to=functions.note<|message|>{}<|call|>", ["note"], ""),
        ("<|channel|>analysis to=functions.note code<|message|>{}<|call|>", ["note"], ""),
        (
            "<|start|>assistant to=functions.note<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            ["note"],
            "",
        ),
        ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', [], '{"a": 1}'),
        ('<|channel|>commentary to=functions.absent <|constrain|>json<|message|>{"a": 1}<|call|>', [], '{"a": 1}'),
        ("<|start|>assistant<|channel|>final<|message|>Done.<|return|>", [], "Done."),
        ("<|channel|>final<|message|>Use <|start|> first.<|return|>", [], "Use <|start|> first."),
        (f"{'<|start|>assistant<|channel|>final<|message|>a<|end|>' * 3}", [], "aaa"),
        ("a <|channel|>final", [], "a final"),
        (f"<|channel|>{'long ' * 60}", [], ("long " * 60).strip()),
    ],
)
def test_no_header_of_harmony_is_content(text, calls, content):
    check("harmony", text, [(name, "{}") for name in calls], content)


def test_marks_in_arguments_are_no_headers():
    text = '<|channel|>commentary to=functions.note<|message|>{"text":"<|channel|> and <|message|>"}<|call|>'
    check("harmony", text, [("note", '{"text":"<|channel|> and <|message|>"}')])


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "mistral_named"])
def test_what_was_cut_off_is_not_lost_without_trace(name):
    arguments = {"text": "one two", "count": 3}
    text = written_in(FORMATS[name], FORMATS[name].styles("")[0], TOOLS, "note", arguments)
    whole = answer(FORMATS[name], text, tools=TOOLS)[2][0][1]
    for end in range(text.index("3"), len(text)):
        _, _, calls = answer(FORMATS[name], text[:end], range(end), tools=TOOLS)
        assert calls == answer(FORMATS[name], text[:end], tools=TOOLS)[2]
        assert calls[0][0] == "note" and whole.startswith(calls[0][1]) and "one two" in calls[0][1]


def test_malformed_tags_stream_as_they_read():
    text = "<tool_call>\n<function=note>\n<parameter=\necho X\n</parameter>\n<parameter=text=\n</parameter>\n"
    text += "</function>\n</tool_call>"
    whole = answer(FORMATS["qwen3_coder"], text, tools=TOOLS)
    for step in (1, 2, 5, 9):
        assert answer(FORMATS["qwen3_coder"], text, range(0, len(text), step), tools=TOOLS) == whole


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{"name": "note", "arguments": {"text": "a" "count": 3}}\n{"name": "ping", "arguments": {}}'),
        ("hermes", '{"name": "note", "arguments": {"text": "a", // why\n "count": 3}}'),
        ("llama3_json", '{"name": "note", "parameters": {"text": tru, "count"}}; {"name": "ping", "parameters": {}}'),
        ("pythonic", '[note(text="a", 3), ping()]'),
        ("pythonic", "You can use note(text) or ping(now) for that."),
        ("pythonic", 'note("positional")'),
        ("qwen3_coder", "<function=note>\n<parameter=text>\na\n</parameter>\noops</function>"),
        ("mistral_named", '[TOOL_CALLS]note[ARGS]{"text": "a" "count": 3}[TOOL_CALLS]ping[ARGS]{}'),
    ],
)
def test_calls_that_break_off_read_alike_under_every_division(name, text):
    whole = answer(FORMATS[name], text, tools=TOOLS)
    for step in (1, 2, 3, 7, 50):
        assert answer(FORMATS[name], text, range(0, len(text), step), tools=TOOLS) == whole
    assert len({call for call, _ in whole[2]}) == len(whole[2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Oslo", '"Oslo"'),
        ("true", "true"),
        ("True", "true"),
        ("1+2", '"1+2"'),
        ("f'{x}'", "\"f'{x}'\""),
        ("1.10", "1.10"),
        ("(1, 2)", "[1, 2]"),
        (r"'\ud83d\ude00'", '"😀"'),
        ("{1, 2}", '"{1, 2}"'),
        ("[" * 3000 + "]" * 3000, None),
    ],
)
def test_python_values_never_fail(value, expected):
    _, _, calls = answer(FORMATS["pythonic"], f"[note(text={value})]", tools=TOOLS)
    ((_, raw),) = calls
    raw.encode()
    if expected is not None:
        assert raw == f'{{"text": {expected}}}'


def test_constants_that_json_lacks_become_text():
    check("qwen3_coder", coder("note", free="NaN"), [("note", '{"free": "NaN"}')])


def test_a_stray_quote_swallows_no_call():
    text = 'He wrote {"quote and left.\n' + hermes("ping", {})
    check("hermes", text, [("ping", "{}")], 'He wrote {"quote and left.')


def test_declared_names_with_odd_characters_are_found_before_arguments():
    tools = read_tools([{"name": "weather:get now"}, {"name": "weather"}])
    text = '[TOOL_CALLS]weather:get now[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS]{}'
    for cuts in ((), range(len(text))):
        assert answer(FORMATS["mistral_named"], text, cuts, tools=tools)[2] == [
            ("weather:get now", '{"a": 1}'),
            ("weather", "{}"),
        ]


@pytest.mark.parametrize("text", ["<function=note<parameter=text>\na\n</parameter></function>"])
def test_tags_without_their_line_breaks(text):
    check("qwen3_coder", text, [("note", '{"text": "a"}')])
    check("glm", "<tool_call>ping</tool_call>", [("ping", "{}")])
    check(
        "glm", "<tool_call>note<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>", [("note", '{"text": "a"}')]
    )


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", "<tool_call>\n"),
        ("hermes", "```\n"),
        ("hermes", '{"a": '),
        ("qwen3_coder", "<function=note>\n\n\n"),
        ("pythonic", "note(text=["),
        ("glm", "<tool_call>note\n\n"),
    ],
)
def test_degenerate_output_takes_linear_time(name, piece):
    """Counted in lines of Python: ten times the text takes about ten times as many."""
    import sys

    from ooospec.chat.answer import AnswerStream

    def lines(count):
        stream, seen = AnswerStream(FORMATS[name], TOOLS), 0

        def trace(frame, event, arg):
            nonlocal seen
            seen += event == "line"
            return trace

        sys.settrace(trace)
        try:
            for _ in range(count):
                stream.push(piece)
            stream.close()
        finally:
            sys.settrace(None)
        return seen

    assert lines(1000) < 14 * lines(100)


def test_schemas_that_refer_to_each_other_are_read_in_linear_time():
    names = [f"d{i}" for i in range(40)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names if other != name]} for name in names
    }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert tool.slots[0].name == "a"
    loop = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}  # fmt: skip
    assert read_tools([{"name": "f", "parameters": loop}])[0].slots[0].types == ("object",)


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json"])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("{CALL}", 1, ""),
        ("{CALL}\n{CALL}", 2, ""),
        ("Look: {CALL} there", 1, "Look: there"),
        ("```json\n{CALL}\n```", 1, ""),
        ("{ CALL }", 1, ""),
        ("[CALL, CALL]", 2, ""),
        ("[{CALL}]", 1, ""),
        ("a {x} and {", 0, "a {x} and {"),
        ("[1] {CALL} [2", 1, "[1] [2"),
        ('{"x": CALL}', 0, '{"x": CALL}'),
    ],
)
def test_braces_and_brackets_around_calls_are_no_content(name, text, calls, content):
    """Templates that show `{{"name": ..}}` make models write it; agents would send it back as the answer's words."""
    call = '{"name": "ping", "arguments": {}}'
    check(name, text.replace("CALL", call), [("ping", "{}")] * calls, content.replace("CALL", call))


@pytest.mark.parametrize("types", [["integer", "null"], ["string", "null"], ["null"]])
@pytest.mark.parametrize("name", ["hermes", "mistral_named", "pythonic", "qwen3_coder"])
def test_null_is_drafted_first_where_a_slot_may_hold_it(codec, name, types):
    """Strict schemas list every key as required and mark what may be left out as nullable."""
    properties = {"q": {"type": "string"}, "limit": {"type": types}}
    tools = read_tools([{"name": "find", "parameters": {"properties": properties, "required": ["q", "limit"]}}])
    text = written_in(FORMATS[name], FORMATS[name].styles("")[0], tools, "find", {"q": "cats", "limit": None})
    _, commits = write(codec, text, tools, form=name)
    assert len(commits) <= len(codec.encode("cats")) + 3  # all but the words of q
    slots = {("find", "q"): SlotHint("find", "q", "cats", True, 0.9)}
    slots["find", "limit"] = SlotHint("find", "limit", None, False, 0.9)
    hint = Hint(FunctionHint(("find",), (0.9,)), slots, complete=True)
    assert len(write(codec, text, tools, form=name, hint=hint)[1]) <= 2
