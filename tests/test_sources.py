"""Training sets: records, loaders, decontamination, variation; nothing mended."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from ooospec.errors import UsageError
from ooospec.train.augment import Variation, after_calls, as_prose, tool_pool, vary, with_closing
from ooospec.train.decontaminate import Inventory, normalized_name
from ooospec.train.records import Call, append_example, fault, read_examples
from ooospec.train.sources import SOURCES, load_source
from test_train import example, tool

# ---------------------------------------------------------------- records


def test_examples_survive_writing_and_a_torn_last_line(tmp_path):
    path = tmp_path / "t.jsonl"
    for number in range(3):
        append_example(path, example(number))
    with path.open("ab") as sink:
        sink.write(b'{"id": "torn')
    assert list(read_examples(path)) == [example(i) for i in range(3)]


def test_a_wrong_line_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "x"}\n')
    with pytest.raises(UsageError, match=r"line 1 is not a training example.*source"):
        list(read_examples(path))
    with pytest.raises(UsageError, match="Cannot read training examples"):
        list(read_examples(tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tools": ()}, "no tools"),
        ({"tools": (tool("weather", "city"), tool("weather", "town"))}, "two tools of one name"),
        ({"messages": ({"role": "user", "content": " "},)}, "no user's words"),
        ({"calls": (Call("forecast", {}),)}, "call of an unknown tool"),
        ({"calls": (Call("weather", {"town": "Rome"}),)}, "argument that the schema lacks"),
        ({}, ""),
    ],
)
def test_faults_of_examples(change, why):
    assert fault(msgspec.structs.replace(example(), **change)) == why


# ---------------------------------------------------------------- training sets


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rlla_row(parameters='{"city": {"type": "str", "description": "c", "default": ""}}', called="weather"):
    return {
        "instruction": f"tools:\n1. Name: weather\nDescription: It.\nParameters: {parameters}\n",
        "input": "<user> Weather in Rome? </user>",
        "output": f'<tool_call>\n{{"name": "{called}", "parameters": {{"city": "Rome"}}}}\n</tool_call>',
    }


def test_rows_that_do_not_fit_are_counted_and_the_rest_is_kept(tmp_path):
    rows = [rlla_row(), rlla_row("{broken"), {"instruction": "x"}, rlla_row(called="other")]
    write(tmp_path / "toolrl_rlla" / "rlla_sft.json", json.dumps(rows))
    kept, left_out = load_source("toolrl_rlla", tmp_path)
    assert [e.calls for e in kept] == [(Call("weather", {"city": "Rome"}),)]
    assert kept[0].messages == ({"role": "user", "content": "Weather in Rome?"},)
    assert left_out == {"no tools": 1, "row of another form": 1, "call of an unknown tool": 1}


def test_seal_tools_rows(tmp_path):
    apis = [{"api_name": "f", "api_description": "d", "parameters": {"a": {"type": "str", "description": "x"}},
             "required": ["a"], "responses": {}}]  # fmt: skip
    value = f'Do this.\napi_list = {apis!r}\ntask_instruction = "Find it."\nOutput:'
    answer = "[{'api': 'f', 'parameters': {'a': 'it'}, 'responses': []}]"
    row = {"id": 1, "conversations": [{"value": value}, {"value": answer}]}
    write(tmp_path / "seal_tools" / "dataset_for_finetune" / "dev.json", json.dumps([row]))
    kept, left_out = load_source("seal_tools", tmp_path)
    assert kept[0].messages[0]["content"] == "Find it." and kept[0].calls == (Call("f", {"a": "it"}),)
    assert kept[0].request()[0][0].slots[0].required and not left_out


def test_sgd_history_ends_before_the_call(tmp_path):
    schema = [{"service_name": "S", "description": "", "intents": [
        {"name": "Book", "description": "", "required_slots": ["day"], "optional_slots": {"size": "dontcare"}}],
        "slots": [{"name": "day", "description": "d", "is_categorical": False, "possible_values": []},
                  {"name": "size", "description": "s", "is_categorical": True, "possible_values": ["1", "2"]}],
        }]  # fmt: skip
    call = {"method": "Book", "parameters": {"day": "2019-03-01", "size": "dontcare"}}
    turns = [{"speaker": "USER", "utterance": "Book it.", "frames": [{"service": "S"}]},
             {"speaker": "SYSTEM", "utterance": "Booked.", "frames": [{"service": "S", "service_call": call}]},
        ]  # fmt: skip
    write(tmp_path / "sgd" / "train" / "schema.json", json.dumps(schema))
    dialogues = [{"dialogue_id": "1_1", "services": ["S"], "turns": turns}]
    write(tmp_path / "sgd" / "train" / "dialogues_001.json", json.dumps(dialogues))
    kept, _ = load_source("sgd", tmp_path)
    assert kept[0].calls == (Call("Book", {"day": "2019-03-01"}),)
    assert [m["content"] for m in kept[0].messages] == ["Book it."]
    assert kept[0].request()[0][0].slots[1].choices == ("1", "2")


def test_unknown_missing_damaged_and_empty_sets_are_told(tmp_path):
    with pytest.raises(UsageError, match="Unknown training set 'x'; choose from toolrl_rlla"):
        load_source("x", tmp_path)
    with pytest.raises(UsageError, match=r"No folder .*glaive_demo"):
        load_source("glaive_demo", tmp_path)
    write(tmp_path / "glaive_demo" / "glaive_toolcall_en_demo.json", "[{]")
    with pytest.raises(UsageError, match="damaged or of another version"):
        load_source("glaive_demo", tmp_path)
    write(tmp_path / "glaive_demo" / "glaive_toolcall_en_demo.json", '[{"conversations": []}]')
    with pytest.raises(UsageError, match="no usable row"):
        load_source("glaive_demo", tmp_path)


@pytest.fixture
def shared_data():
    """Where the public data sets lie."""
    folder = Path(os.environ.get("OOOSPEC_DATA", "."))
    if not (folder / "train").is_dir():
        pytest.skip("the public training sets are not here; set OOOSPEC_DATA")
    return folder


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_public_set_loads(name, shared_data):
    kept, _ = load_source(name, shared_data / "train")
    assert len(kept) > 200 and any(e.calls for e in kept) and all(not fault(e) for e in kept[:50])


# ---------------------------------------------------------------- decontamination and variation


def test_names_and_wording_of_evaluation_requests_clash():
    said = [{"role": "user", "content": 'Could you play "Shape of You" by Ed Sheeran for me?'}]
    inventory = Inventory.of([(said, [{"name": "play.music", "parameters": {}}])])
    song = "could you play shape of you by ed sheeran FOR ME, please"
    by_words = msgspec.structs.replace(example(), messages=({"role": "user", "content": song},))
    by_name = msgspec.structs.replace(example(), tools=(tool("Play_Music", "city"),), calls=(Call("Play_Music", {}),))
    assert "wording" in inventory.clash(by_words)
    assert "named like" in inventory.clash(by_name)
    assert inventory.clash(example()) == ""
    assert normalized_name("Get_Weather") == normalized_name("get.weather")


def test_words_of_a_template_do_not_clash():
    said = [
        {"role": "user", "content": f"{n} based on our conversation above please only make one call"} for n in range(30)
    ]
    inventory = Inventory.of([([message], None) for message in said])
    assert "based on our conversation above please only make" not in inventory.ngrams
    assert "7 based on our conversation above please only" in inventory.ngrams


def test_variation_keeps_called_tools_is_stable_and_bounded():
    many = msgspec.structs.replace(
        example(), tools=(tool("weather", "city", "unit"), *(tool(f"t{i}", "a") for i in range(9)))
    )
    pool = tool_pool([many, example()])
    shapes = {tuple(t.name for t in vary(many, pool, Variation(), seed).request()[0]) for seed in range(40)}
    assert all("weather" in names and len(names) <= 4 for names in shapes) and len(shapes) > 10
    assert vary(many, pool, Variation(), 7) == vary(many, pool, Variation(), 7)


def test_calls_that_were_made_stand_in_the_dialogue():
    two = msgspec.structs.replace(example(), calls=(Call("news", {"topic": "x"}), Call("weather", {"city": "Rome"})))
    midway = after_calls(two, 1)
    assert midway.calls == (Call("weather", {"city": "Rome"}),) and not fault(midway)
    assert [m["role"] for m in midway.messages] == ["user", "assistant", "tool"]
    text = as_prose(midway).messages[-1]["content"]
    assert '<tool_call>\n{"name": "news", "parameters": {"topic": "x"}}\n</tool_call>\n<obs>{"api_name": "news"' in text
    shapes = {len(vary(msgspec.structs.replace(two, id=str(i)), [], Variation(prose=0.0), 0).calls) for i in range(30)}
    assert shapes == {1, 2}


def test_a_closing_line_stands_under_the_dialogue_or_above_its_last_turn():
    asked = example()
    below, above = with_closing(asked, "One call.", True), with_closing(asked, "One call.", False)
    assert [m["content"] for m in below.messages] == ["weather 0", "One call."] and not fault(below)
    assert [m["content"] for m in above.messages] == ["One call.\n\nweather 0"]
    assert as_prose(below).messages[-1]["content"].endswith("<user>weather 0</user>\n<user>One call.</user>")
    midway = after_calls(msgspec.structs.replace(asked, calls=(*asked.calls, *asked.calls)), 1)
    assert with_closing(midway, "One call.", False).messages[-1] == {"role": "user", "content": "One call."}


def test_prose_has_the_same_tools_and_words():
    prose = as_prose(example())
    assert prose.tools == ()
    assert [t.name for t in prose.request()[0]] == ["weather", "news"]
    assert "<user>weather 0</user>" in prose.messages[-1]["content"]
    odd = msgspec.structs.replace(example(), tools=(tool("two words", "city"),))
    assert as_prose(odd) is odd
