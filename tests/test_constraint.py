"""Constrained choice: only what the grammar allows, the same with and without drafts, after the reasoning."""

import json

import pytest
import torch

from conftest import load_tiny
from ooospec.chat.answer import ThinkSplitter
from ooospec.chat.choice import FirstCall, read_response_format, read_tool_choice
from ooospec.chat.formats.registry import FORMATS
from ooospec.chat.schema import read_tools
from ooospec.constraint import AfterThinking, Grammars, call_grammar
from ooospec.errors import UsageError
from ooospec.runtime import Decoder
from ooospec.sampling import Sampler, Sampling, make_chooser
from test_exactness import PROMPT, Scripted, noisy, run

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {
    "city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False}}  # fmt: skip
PING = {"name": "ping"}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(load_tiny("llama"))


def accepted(grammars, constraint, text):
    """How many characters of a text the constraint takes."""
    codec = grammars._loaded.codec
    ids = codec.encode(text)
    return len(codec.decode(ids[: constraint.allowed_length(ids)]))


@pytest.mark.parametrize(
    "name", ["hermes", "json", "llama3_json", "mistral", "mistral_named", "deepseek_v3", "harmony"]
)
def test_only_calls_of_the_functions_fit(grammars, name):
    style = FORMATS[name].styles("")[0]
    right = (
        f'{style.opening}{style.head}get_weather{style.middle}city{style.colon}"Oslo"{style.comma}days{style.colon}3'
    )
    right += style.tail
    constraint = grammars.calls(FORMATS[name], "", [WEATHER, PING])
    assert accepted(grammars, constraint, right) == len(right)
    for wrong in (right.replace("Oslo", "Bonn"), right.replace("get_weather", "get_news"), right.replace("3", "33")):
        assert accepted(grammars, constraint, wrong) < len(wrong)
    empty = f"{style.opening}{style.head}ping{style.empty}"
    assert accepted(grammars, constraint, empty) == len(empty)


def test_after_the_call_the_target_is_free(grammars):
    codec = grammars._loaded.codec
    constraint = grammars.calls(FORMATS["json"], "", [PING])
    logits = torch.zeros(codec.vocab_size + 6)
    for token in codec.encode('{"name": "ping", "arguments": {}}'):
        assert (constraint.mask(logits) == -torch.inf).any()
        constraint.advance(token)
    assert torch.equal(constraint.mask(logits), logits) and constraint.allowed_length([1, 2, 3]) == 3


def test_schemas_without_a_type_and_with_references(grammars):
    tree = {"properties": {"child": {"$ref": "#"}, "v": {"$ref": "#/$defs/v"}}, "additionalProperties": False,
            "$defs": {"v": {"type": "integer"}}}  # fmt: skip
    constraint = grammars.calls(FORMATS["json"], "", [{"name": 'odd "name"', "parameters": tree}])
    call = '{"name": "odd \\"name\\"", "arguments": {"child": {"v": 1}}}'
    assert accepted(grammars, constraint, call) == len(call)
    for wrong in ('{"name": "odd \\"name\\"", "arguments": 5}', call.replace('"v": 1', '"name": 1')):
        assert accepted(grammars, constraint, wrong) < len(wrong)


STRICT = {**WEATHER, "strict": True}
LOOSE = {"name": "note", "parameters": WEATHER["parameters"]}


def strict(grammars, name, *functions, splitter=None):
    tools = read_tools(list(functions))
    return grammars.strict(FORMATS[name], tools, functions, splitter or ThinkSplitter.of(FORMATS[name], False, False))


def taken(grammars, constraint, text):
    """The part of a text that the target may write, token by token."""
    codec, written = grammars._loaded.codec, []
    for token in codec.encode(text):
        if constraint.mask(torch.zeros(codec.vocab_size + 6))[token] == -torch.inf:
            break
        assert constraint.allowed_length([token]) == 1
        constraint.advance(token)
        written.append(token)
    return codec.decode(written)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_named", "deepseek_v3", "harmony"])
def test_strict_functions_keep_to_their_schema_wherever_they_are_called(grammars, name):
    style = FORMATS[name].styles("")[0]
    call = f'{style.opening}{style.head}get_weather{style.middle}city{style.colon}"Oslo"{style.comma}days{style.colon}3'
    call += style.tail
    loose = call.replace("get_weather", "note").replace("Oslo", "Bonn")
    words = "" if name in ("llama3_json", "harmony") else 'I say {"city": "Bonn"}. '
    for text in (words + call + style.closing, call + style.between + call if style.between else call, loose):
        assert taken(grammars, strict(grammars, name, STRICT, LOOSE), text) == text
    for wrong in (call.replace("Oslo", "Bonn"), call.replace("3", "33")):
        assert len(taken(grammars, strict(grammars, name, STRICT, LOOSE), words + wrong)) < len(words + wrong)


def test_strict_arguments_may_be_indented_and_come_in_a_fence(grammars):
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, indent=2)
    text = f"```json\n{call}\n```\nDone."
    assert taken(grammars, strict(grammars, "hermes", STRICT), text) == text
    wrong = text.replace("Oslo", "Bonn")
    assert taken(grammars, strict(grammars, "hermes", STRICT), wrong) in wrong[: wrong.index("Bonn") + 1]


def test_strict_binds_from_the_functions_name_on(grammars):
    """Arguments that one token opens and closes are bound too: no `{}` where an argument is required."""
    empty = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    constraint = strict(grammars, "hermes", STRICT)
    codec = grammars._loaded.codec
    for token in codec.encode(empty[: empty.index(": {}")]):
        constraint.advance(token)
    for text in (": {}", " {}", "{}}"):
        ids = codec.encode(text)
        assert constraint.allowed_length(ids) < len(ids)
    assert constraint.allowed_length(codec.encode(': {"city"')) == len(codec.encode(': {"city"'))
    with pytest.raises(UsageError, match="The schema of strict function 'odd' cannot be enforced"):
        strict(grammars, "hermes", {"name": "odd", "strict": True, "parameters": {"type": "object", "not": {}}})


def test_strict_begins_after_the_reasoning(grammars):
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>'
    constraint = strict(grammars, "hermes", STRICT, splitter=ThinkSplitter(True, True))
    text = f"Perhaps {wrong}?</think>\n{wrong}"
    written = taken(grammars, constraint, text)
    assert wrong + "?</think>" in written and len(written) < len(text)


def test_nothing_is_bound_where_nothing_is_strict_or_arguments_are_not_json(grammars):
    assert strict(grammars, "hermes", LOOSE) is None
    assert strict(grammars, "pythonic", STRICT) is None


def test_formats_without_json_values_cannot_be_enforced():
    with pytest.raises(UsageError, match="cannot be enforced in format pythonic"):
        call_grammar(FORMATS["pythonic"], "", [PING], {})


def test_schemas_that_make_no_sense_are_refused(grammars):
    with pytest.raises(UsageError, match="cannot be enforced"):
        grammars.schema({"type": "object", "properties": {"a": {"type": "nonsense"}}})
    with pytest.raises(UsageError, match="must be an object"):
        grammars.schema([])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0}])
def test_output_fits_and_is_the_same_with_drafts(tiny, options):
    def chooser():
        return make_chooser(Sampling(**options), PROMPT, Grammars(tiny).schema(WEATHER["parameters"]))

    plain = run(tiny, [], chooser=chooser(), limit=120)[0]
    value = json.loads(tiny.codec.decode([token for token in plain if token not in tiny.codec.eos_ids]))
    assert value["city"] in ("Oslo", "Rome") and 1 <= value["days"] <= 9 and plain[-1] in tiny.codec.eos_ids
    for seed in range(2):
        assert run(tiny, [Scripted(noisy(plain, seed))], chooser=chooser(), limit=120)[0] == plain


def test_drafts_are_cut_at_the_first_forbidden_token(grammars):
    codec = grammars._loaded.codec
    sampler = Sampler(Sampling(), (), grammars.calls(FORMATS["json"], "", [PING]))
    ids = codec.encode('{"name": "pong"}')
    size = sampler.allowed_length(ids)
    assert codec.decode(ids[:size]) in ('{"name": "p', '{"name": "') and size < len(ids)


def test_the_constraint_begins_after_the_reasoning(grammars):
    codec = grammars._loaded.codec
    constraint = AfterThinking(grammars.calls(FORMATS["json"], "", [PING]), codec, ThinkSplitter(True, False))
    logits = torch.zeros(codec.vocab_size + 6)
    assert torch.equal(constraint.mask(logits), logits)
    for token in codec.encode("let me think</think>"):
        assert constraint.allowed_length([1, 2, 3]) == 3
        constraint.advance(token)
    assert (constraint.mask(logits) == -torch.inf).any()
    call = codec.encode('{"name": "ping", "arguments": {}}')
    assert constraint.allowed_length(call) == len(call)


def test_a_single_call_ends_after_the_reasoning_only(grammars):
    codec, tools = grammars._loaded.codec, read_tools([PING])
    call = '{"name": "ping", "arguments": {}}'
    watch = FirstCall(codec, FORMATS["json"], tools, ThinkSplitter(True, False))
    assert not any(watch.ends(token) for token in codec.encode(f"{call}</think>"))
    ends = [watch.ends(token) for token in codec.encode(call)]
    assert ends[-1] and not any(ends[:-1])


def test_required_calls_through_the_decoder(tiny_llama):
    tools = [{"type": "function", "function": WEATHER}, {"type": "function", "function": PING}]
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        for choice, names in (("required", {"get_weather", "ping"}),
                              ({"type": "function", "function": {"name": "ping"}}, {"ping"})):  # fmt: skip
            result = decoder.generate("x", tools, tool_choice=choice, parallel_tool_calls=False, max_new_tokens=200)
            assert len(result.calls) == 1 and result.calls[0].name in names
        schema = {"type": "json_schema", "json_schema": {"schema": WEATHER["parameters"]}}
        value = json.loads(decoder.generate("x", response_format=schema, max_new_tokens=200).content)
        assert value["city"] in ("Oslo", "Rome")
        with pytest.raises(UsageError, match="cannot be combined"):
            decoder.generate("x", tools, response_format=schema)


def test_choices_are_checked():
    tools = read_tools([PING])
    assert read_tool_choice(None, tools).active(tools) == tools
    assert read_tool_choice("none", tools).active(tools) == ()
    for value, words in (("must", "auto, none, required"), ({"type": "function"}, "auto, none"), (3, "got '3'")):
        with pytest.raises(UsageError, match=words):
            read_tool_choice(value, tools)
    with pytest.raises(UsageError, match="has no tools"):
        read_tool_choice("required", ())
    assert read_response_format({"type": "text"}) is None and read_response_format(None) is None
    assert read_response_format({"type": "json_object"}) == {"type": "object"}
    with pytest.raises(UsageError, match="response_format"):
        read_response_format({"type": "json_schema", "json_schema": {}})
