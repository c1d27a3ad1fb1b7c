"""The packed wave and what a trained adapter changes in reading its answers."""

import msgspec
import numpy as np
import pytest
import torch

from ooospec.errors import ContextLengthError, UsageError
from ooospec.sidecar import protocol
from ooospec.sidecar.adapter import Habits, adapter_label, check_base, find_adapter, read_habits, shape_of, write_habits
from ooospec.sidecar.branches import MAX_ANSWER_TOKENS, Branch, Trie, _finished_part
from ooospec.sidecar.mentioned import is_mentioned
from ooospec.sidecar.predictor import WavePredictor, _Pass
from ooospec.sidecar.prompt import prefix_ids
from ooospec.sidecar.protocol import Function, SlotValue, Submit, ToolSlot, Turn

SLOTS = (
    ToolSlot("city", ("string",), True, "", ()),
    ToolSlot("days", ("integer",), True, "", ()),
    ToolSlot("unit", ("string",), True, "", ("celsius", "fahrenheit")),
    ToolSlot("deep", (), True, "", ()),
)
SIGNATURES = (protocol.ToolSignature("get_weather", "Weather", SLOTS), protocol.ToolSignature("other", "x", SLOTS[:1]))
REQUEST = Submit(1, SIGNATURES, (Turn("user", "Oslo for 3 days"),))


def test_wave_answers_every_kind_of_slot(tiny):
    predictor = WavePredictor(tiny, min_tool_chance=0.0)
    answers = [m for m in predictor.wave(REQUEST) if m is not None]
    assert isinstance(answers[0], Function)
    assert set(answers[0].tools) == {0, 1}
    found = {(m.tool, m.slot): m for m in answers[1:]}
    assert isinstance(found[0, 2].value, str)
    assert found[0, 2].value in ("celsius", "fahrenheit")
    for (_, slot), message in found.items():
        if slot == 0:
            assert isinstance(message.value, str)
        if slot == 1:
            assert isinstance(message.value, int | float)
        assert 1 <= message.percent <= 99
    again = [m for m in WavePredictor(tiny, min_tool_chance=0.0).wave(REQUEST) if m is not None]
    assert again == answers  # deterministic, and equal with a warm prefix:
    assert [m for m in predictor.wave(REQUEST) if m is not None] == answers


def test_large_inventories_ask_for_the_function_first(tiny):
    small = WavePredictor(tiny, max_first_nodes=1, min_tool_chance=0.0)
    large = WavePredictor(tiny, max_first_nodes=10_000, min_tool_chance=0.0)
    one, two = ([m for m in p.wave(REQUEST) if isinstance(m, SlotValue)] for p in (small, large))
    key = lambda m: (m.tool, m.slot)  # noqa: E731
    assert [(key(m), m.value) for m in sorted(one, key=key)] == [(key(m), m.value) for m in sorted(two, key=key)]
    assert small.stats.steps > large.stats.steps


def test_the_slots_of_a_tool_that_the_target_chose_are_asked_for_alone(tiny):
    predictor = WavePredictor(tiny, min_tool_chance=0.0)
    everything = [m for m in predictor.wave(REQUEST) if isinstance(m, SlotValue)]
    for only in (0, 1):
        asked = msgspec.structs.replace(REQUEST, request=9, only=only)
        answers = [m for m in predictor.wave(asked) if m is not None]
        assert all(isinstance(m, SlotValue) and m.request == 9 and m.tool == only for m in answers)
        found = {m.slot: m.value for m in answers}
        assert found == {m.slot: m.value for m in everything if m.tool == only}
        assert predictor.stats.cached_tokens > 0
        assert predictor.stats.steps < 30
    for nowhere in ({"only": 7}, {"only": 0, "slot": 9}):
        assert [m for m in predictor.wave(msgspec.structs.replace(REQUEST, **nowhere)) if m is not None] == []


def test_a_value_goes_on_from_what_the_target_has_written(tiny):
    predictor = WavePredictor(tiny)
    for slot, written, value in ((0, '"Oslo"', "Oslo"), (3, '{"a": [1, 2]}', {"a": [1, 2]}), (3, "true ", True)):
        asked = msgspec.structs.replace(REQUEST, only=0, slot=slot, written=written)
        (answer,) = [m for m in predictor.wave(asked) if m is not None]
        assert (answer.tool, answer.slot, answer.value, answer.present) == (0, slot, value, True)
    asked = msgspec.structs.replace(REQUEST, only=0, slot=0, written='"Os')
    answers = [m for m in predictor.wave(asked) if m is not None]
    assert all(m.value.startswith("Os") for m in answers) and predictor.stats.steps <= 1 + MAX_ANSWER_TOKENS


def test_a_branch_equals_asking_alone(tiny):
    """The packed pass gives every question the same next token as a plain forward pass over its own text."""
    predictor = WavePredictor(tiny)
    prefix = prefix_ids(tiny, REQUEST.tools, REQUEST.dialogue)
    predictor.model.begin(prefix)
    predictor.model.prefill(prefix[:-1])
    trie, names, branches = predictor._plant(REQUEST, prefix[-1], (0, 1))
    first = predictor._pass(trie, names, branches)
    for branch in branches:
        asked = [trie.tokens[node] for node in trie.ancestors(branch.end)][1:]
        with torch.inference_mode():
            plain = tiny.model(torch.tensor([[*prefix, *asked]])).logits[0, -1].log_softmax(-1)
        assert np.allclose(first.rows[branch.end].numpy(), plain.numpy(), atol=1e-4)


def test_answers_stop_where_the_value_ends(codec):
    trie = Trie([0])
    string = Branch.plant(trie, codec, (0, "f"), (0, SLOTS[0]))
    string.answer = codec.encode(' "Os"lo')
    assert string.finish(codec) == (True, "Os")
    string.answer = codec.encode(r' "a \" b')
    assert string.finish(codec) == (False, None)
    string.answer = [*codec.encode(" \"Os'}}"), codec.eos_id, *codec.encode('lo"')]
    assert string.finish(codec) == (True, "Os")
    number = Branch.plant(trie, codec, (0, "f"), (1, SLOTS[1]))
    number.answer = codec.encode("12")
    assert number.finish(codec)[0] is False
    number.answer = codec.encode("12,")
    assert number.finish(codec) == (True, 12)
    free = Branch.plant(trie, codec, (0, "f"), (3, SLOTS[3]))
    free.answer = codec.encode(' [1, "a"]}')
    assert free.finish(codec) == (True, [1, "a"])
    free.answer = codec.encode(" [{'a': 'b]'}, 2]}}")
    assert free.finish(codec) == (True, [{"a": "b]"}, 2])
    for unfinished in (" [{'a': 'b", " ['a'", " {'a', 'b'}", " [b'a']", "'a']"):
        free.answer = codec.encode(unfinished)
        assert free.finish(codec) == (False, None)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("https://a.no/b.wav.", "https://a.no/b.wav"),
        ("abcd1234.", "abcd1234"),
        ("Main St. 4.", "Main St. 4."),
        ("Inc.", "Inc."),
        ("3.5", "3.5"),
    ],
)
def test_of_codes_and_addresses_a_sentences_full_stop_is_no_part(codec, written, value):
    string = Branch.plant(Trie([0]), codec, (0, "f"), (0, SLOTS[0]))
    string.answer = codec.encode(f' "{written}"')
    assert string.finish(codec) == (True, value)


@pytest.mark.parametrize(
    ("value", "mentioned"),
    [
        ("Oslo", True),
        ("osl", False),
        (3, True),
        (33, False),
        (["Oslo", "3"], True),
        ({}, False),
        (None, False),
        (True, False),
    ],
)
def test_mentioned_values(value, mentioned):
    assert is_mentioned(value, "In OSLO for 3 days") is mentioned


def test_payload_is_small():
    messages = [Function(7, (0, 1), (93, 5)), SlotValue(7, 0, 1, 88, "Reykjavik"), SlotValue(7, 0, 2, 90, 3)]
    assert sum(len(protocol.encoder.encode(m)) for m in messages) < 50


LONG = "please repeat abc abc abc abcabc Reykjavik harbour Reykjavik harbour 1234512345 " * 3


def test_copying_inside_the_wave_changes_no_answer(tiny, monkeypatch):
    """Copied drafts are checked by the sidecar's own pass: fewer steps or as many, the same answers."""
    tools = REQUEST.tools
    request = Submit(7, tools, (Turn("user", LONG),))
    found, steps = [], []
    for rows in (1, 64):
        monkeypatch.setattr("ooospec.sidecar.predictor.STEP_ROWS", rows)
        predictor = WavePredictor(tiny)
        found.append([answer for answer in predictor.wave(request) if answer is not None])
        steps.append(predictor.stats.steps)
    key = repr
    assert sorted(found[0], key=key) == sorted(found[1], key=key)
    assert steps[1] <= steps[0]


def test_copy_index_continues_the_last_match():
    from ooospec.sidecar.copying import CopyIndex

    texts = ["a", " Oslo", "Oslo", " harbour", " today", '"', " in"]
    index = CopyIndex([0, 1, 3, 6, 1, 4], texts)
    assert index.continuation([5, 2], 2) == [4]  # a space more or less does not matter; the last place counts
    assert index.continuation([2, 3], 2) == [6, 1]
    assert index.continuation([0], 3) == []  # too short to start a copy
    assert index.continuation([2], 0) == index.continuation([], 3) == []


def test_function_choice_takes_off_what_a_name_scores_without_a_request(tiny_llama, monkeypatch):
    predictor = WavePredictor(tiny_llama)
    asked = []
    real = predictor._pass
    monkeypatch.setattr(predictor, "_pass", lambda *a: asked.append(len(a[0].tokens)) or real(*a))
    first = [a for a in predictor.wave(REQUEST) if isinstance(a, Function)]
    passes = len(asked)
    again = [a for a in predictor.wave(REQUEST) if isinstance(a, Function)]
    assert first == again
    assert len(asked) - passes == passes - 1  # the prior of a tool list is asked for once


# ---------------------------------------------------------------- trained sidecars

OPTIONAL = tuple(ToolSlot(s.name, s.types, False, "", s.choices) for s in SLOTS)
ASKED = Submit(2, (protocol.ToolSignature("get_weather", "Weather", OPTIONAL),), (Turn("user", "Weather, please"),))


def answers(loaded, habits, request=ASKED):
    return [m for m in WavePredictor(loaded, habits, min_tool_chance=0.0).wave(request) if isinstance(m, SlotValue)]


def test_only_a_trained_sidecar_may_fill_what_nobody_mentioned(tiny):
    untrained = answers(tiny, Habits())
    assert all(not m.present for m in untrained)  # a random model's values stand nowhere in the dialogue
    trained = answers(tiny, Habits(answers_null=True))
    assert any(m.present for m in trained)


def test_a_trained_sidecar_leaves_out_required_slots_too(tiny_llama, monkeypatch):
    monkeypatch.setattr(WavePredictor, "_chance_of_null", lambda self, branch, row: 0.98)
    required = answers(tiny_llama, Habits(answers_null=True), REQUEST)
    assert required and all(not m.present and m.percent == 98 for m in required)


def test_chance_of_null_is_asked_only_where_it_is_believed(tiny_llama):
    predictor = WavePredictor(tiny_llama)
    trie = Trie([0])
    branch = Branch.plant(trie, tiny_llama.codec, (0, "f"), (0, SLOTS[0]))
    row = torch.zeros(300).log_softmax(-1)
    assert predictor._chance_of_null(branch, row) == 0.0  # required, untrained
    branch.spec = OPTIONAL[0]
    assert predictor._chance_of_null(branch, row) == pytest.approx(0.5)
    row[branch.null] += 2.0
    assert predictor._chance_of_null(branch, row) == pytest.approx(1 / (1 + np.exp(-2.0)))


def test_scaling_changes_the_chances_and_no_answer(tiny):
    plain, scaled = (answers(tiny, Habits(answers_null=True, value_shift=shift), REQUEST) for shift in (0.0, 1.0))
    assert [(m.tool, m.slot, m.value) for m in plain] == [(m.tool, m.slot, m.value) for m in scaled]
    percents = [(a.percent, b.percent) for a, b in zip(plain, scaled, strict=True) if a.present]
    assert percents and all(b >= a for a, b in percents) and any(b > a for a, b in percents)


def test_without_a_prior_no_neutral_dialogue_is_read(tiny_llama):
    predictor = WavePredictor(tiny_llama, Habits(prior_weight=0.0))
    list(predictor.wave(REQUEST))
    assert predictor._priors == {}


def test_habits_are_kept_beside_the_weights(tmp_path):
    assert read_habits(None) == read_habits(str(tmp_path)) == Habits()
    habits = Habits(base="b", base_shape={"hidden_size": 64}, answers_null=True, value_scale=1.5)
    write_habits(tmp_path, habits)
    assert read_habits(str(tmp_path)) == habits
    (tmp_path / "ooospec.json").write_text('{"answers_null": 3}')
    with pytest.raises(UsageError, match="damaged"):
        read_habits(str(tmp_path))


def test_an_adapter_of_another_base_is_refused(tmp_path):
    habits = Habits(base="small", base_shape={"hidden_size": 64, "num_hidden_layers": 2})
    check_base(habits, "a", "b", {"hidden_size": 64, "num_hidden_layers": 2})
    with pytest.raises(UsageError, match=r"trained on small and does not fit sidecar 'b' \(hidden_size 64, here 128\)"):
        check_base(habits, "a", "b", {"hidden_size": 128, "num_hidden_layers": 2})
    assert shape_of({"hidden_size": 64, "vocab_size": None}) == {"hidden_size": 64}


def test_the_shipped_adapter_is_found_by_the_sidecars_name(tmp_path, monkeypatch):
    monkeypatch.setattr("ooospec.sidecar.adapter.SHIPPED", tmp_path)
    assert find_adapter("auto", "tiny") is None
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "adapter_config.json").write_text("{}")
    assert find_adapter("auto", "tiny") == str(tmp_path / "tiny")
    assert find_adapter("none", "tiny") is find_adapter(None, "tiny") is None
    assert find_adapter("mine", "tiny") == "mine"
    assert adapter_label("auto", "tiny") == "shipped" and adapter_label("mine", "tiny") == "mine"


def test_a_choice_is_scored_though_its_last_quote_is_a_part_of_a_longer_token(tiny_llama):
    """A model that writes `"celsius"}}` with one token for `"}}` has chosen celsius all the same."""
    predictor = WavePredictor(tiny_llama)
    quote, longer = tiny_llama.codec.encode('"')[-1], len(predictor._texts) - 1
    predictor._texts = [*predictor._texts[:-1], '"}}']
    trie = Trie([0])
    nodes = trie.add(tiny_llama.codec.encode(' "celsius"'))
    assert trie.tokens[nodes[-1]] == quote
    rows = {}
    for node in nodes:
        row = torch.full((len(predictor._texts),), -30.0)
        row[longer if node == nodes[-1] else trie.tokens[node]] = 0.0
        rows[trie.parents[node]] = row.log_softmax(-1)
    first = _Pass(trie, 0, rows)
    assert first.log_chance(nodes) < -20
    assert predictor._log_chance_of_choice(first, nodes) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("types", "longer"), [(("integer",), " -"), (("string",), ' "/'), (("array",), " [{"), (("object",), ' {"')]
)
def test_an_answer_begins_with_the_token_that_the_model_writes(tiny_llama, types, longer):
    """`-25` begins with ` -`, not with a space and a sign; the likeliest token of the slot's type is taken."""
    predictor = WavePredictor(tiny_llama)
    token, wrong = len(predictor._texts) - 1, tiny_llama.codec.encode("t")[-1]
    predictor._texts = [*predictor._texts[:-1], longer]
    trie = Trie([0])
    branch = Branch.plant(trie, tiny_llama.codec, (0, "f"), (0, ToolSlot("a", types, True, "", ())))
    digit = tiny_llama.codec.encode("2")[-1]
    for best, answer in ((token, [token]), (branch.opening[0], [*branch.opening, digit])):
        branch.answer, branch.seen, branch.given, branch.position = [], [], 0, 0
        colon, end = (torch.full((len(predictor._texts),), -30.0) for _ in range(2))
        colon[wrong], colon[best], end[digit] = 5.0, 0.0, 0.0
        predictor._open(branch, _Pass(trie, 10, {branch.colon: colon.log_softmax(0), branch.end: end.log_softmax(0)}))
        assert branch.answer == answer
        where = (10 + branch.colon + 1, 0) if best == token else (0, len(branch.opening))  # else it stays at the end
        assert (branch.position, branch.given) == where
        assert branch.log_chance == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('["a", "b', ["a"]),
        ('["Jane D', ["Jane D"]),
        ('["Jane Doe"', ["Jane Doe"]),
        ('["a", "b"', ["a", "b"]),
        ('["', None),
        ("[1, 2", [1]),
        ("[1", None),
        ('["a"}}', ["a"]),
        ('[{"a": "b"}}]', [{"a": "b"}]),
        ('{"a": "b', None),
        ('[{"a": 1}, {"b', [{"a": 1}]),
    ],
)
def test_of_a_list_that_was_cut_short_there_remains_what_can_be_used(text, value):
    assert _finished_part(text) == value


def test_a_required_slot_is_null_only_where_its_schema_says_so(tiny_llama):
    predictor = WavePredictor(tiny_llama, Habits(answers_null=True))
    row = torch.zeros(len(predictor._texts))
    row[7] = 20.0
    for types, required, believed in [
        (("string",), True, False), (("string", "null"), True, True), (("string",), False, True),
    ]:  # fmt: skip
        branch = Branch(0, 0, "string", ToolSlot("a", types, required, "", ()), "string", null=7, opening=[3])
        assert (predictor._chance_of_null(branch, row) > 0.5) is believed


def test_of_a_dialogue_that_is_too_long_the_newest_turns_are_read(tiny_llama, monkeypatch):
    predictor = WavePredictor(tiny_llama, min_tool_chance=0.0)
    room = len(prefix_ids(tiny_llama, SIGNATURES, REQUEST.dialogue)) + 40
    monkeypatch.setattr("ooospec.sidecar.predictor.ROOM", predictor.model.context_length - room)
    old = tuple(Turn("user" if number % 2 else "assistant", "word " * 50) for number in range(9))
    long = msgspec.structs.replace(REQUEST, dialogue=(*old, *REQUEST.dialogue))
    assert [m for m in predictor.wave(long) if m is not None] == [m for m in predictor.wave(REQUEST) if m is not None]
    with pytest.raises(ContextLengthError, match="more than the sidecar reads"):
        list(predictor.wave(msgspec.structs.replace(REQUEST, dialogue=(Turn("user", "word " * 900),))))


def test_a_choice_that_begins_another_one_is_no_better_for_being_shorter(tiny_llama):
    """1 of 1 and 10: what follows the 1 decides."""
    predictor = WavePredictor(tiny_llama)
    texts = predictor._texts
    one, zero, brace = (tiny_llama.codec.encode(text)[-1] for text in ("1", "0", "}"))
    trie = Trie([0])
    short, long = trie.add([one]), trie.add([one, zero])

    def row(likely):
        logits = torch.full((len(texts),), -30.0)
        logits[likely] = 0.0
        return logits.log_softmax(-1)

    for following, best in ((zero, long), (brace, short)):
        first = _Pass(trie, 0, {0: row(one), short[-1]: row(following), long[-1]: row(brace)})
        scores = [predictor._log_chance_of_choice(first, nodes) for nodes in (short, long)]
        assert scores.index(max(scores)) == [short, long].index(best)
