"""Training sets, decontamination, variation, teachers, collection: nothing mended, nothing lost."""

import json
import os
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from ooospec.errors import UsageError
from ooospec.train.augment import Variation, after_calls, as_prose, tool_pool, vary, with_closing
from ooospec.train.collect import Plan, collect, is_dev, plan
from ooospec.train.decontaminate import Inventory, normalized_name
from ooospec.train.records import Call, Example, append_example, fault, read_examples
from ooospec.train.sources import SOURCES, load_source
from ooospec.train.teachers import EndpointTeacher, NoAnswer, NoCall, TeacherGone, gold_hint, parse_tool_call
from scripted import ScriptedTarget
from test_train import example, tool

NOTHING = Inventory(frozenset(), frozenset())


class Scripted:
    """Gives every request its own call with one more argument changed; some have none."""

    name = "scripted"

    def __init__(self, die_after=None):
        self.asked, self.die_after = [], die_after

    def answer(self, asked):
        self.asked.append(asked.id)
        if self.die_after is not None and len(self.asked) > self.die_after:
            raise TeacherGone("gone")
        if asked.id == "e3":
            raise NoCall("no call")
        return Call("weather", {"city": "Rome"})


def planned(count=6):
    return Plan([example(i) for i in range(count)], {})


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


# ---------------------------------------------------------------- collection


def test_collection_goes_on_after_a_kill_and_counts_what_it_left_out(tmp_path):
    with pytest.raises(TeacherGone):
        collect(planned(), Scripted(die_after=2), tmp_path, NOTHING)
    assert len(list(read_examples(tmp_path / "traces.jsonl"))) == 2
    with (tmp_path / "traces.jsonl").open("ab") as sink:
        sink.write(b'{"id": "e2"')
    again = Scripted()
    counts = collect(planned(), again, tmp_path, NOTHING)
    assert again.asked == ["e2", "e3", "e4", "e5"] and counts == {"traces": 5, "no call": 1}
    traces = list(read_examples(tmp_path / "traces.jsonl"))
    assert {t.teacher for t in traces} == {"scripted"} and traces[0].calls == (Call("weather", {"city": "Rome"}),)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["answers"] == {"traces": 5, "no call": 1} and len(card["sha256"]) == 64
    third = Scripted()
    collect(planned(), third, tmp_path, NOTHING)
    assert third.asked == []


def test_a_teacher_that_calls_a_function_of_an_evaluation_set_is_not_learned_from(tmp_path):
    inventory = Inventory(frozenset({"weather"}), frozenset())
    counts = collect(planned(2), Scripted(), tmp_path, inventory)
    assert counts["traces"] == 0 and counts["calls a function named like one of an evaluation set"] == 2


def test_collection_stops_after_its_time(tmp_path):
    assert collect(planned(), Scripted(), tmp_path, NOTHING, seconds=0)["traces"] == 1


def test_plan_leaves_out_clashes_and_keeps_to_limits(tmp_path):
    rows = [rlla_row() for _ in range(5)]
    for number, row in enumerate(rows):
        row["input"] = f"<user> Weather in Rome on day {number}? </user>"
    write(tmp_path / "toolrl_rlla" / "rlla_sft.json", json.dumps(rows))
    assert len(plan(["toolrl_rlla"], tmp_path, NOTHING, limit=3).examples) == 3
    bad = plan(["toolrl_rlla"], tmp_path, Inventory(frozenset({"weather"}), frozenset()))
    assert (
        bad.examples == [] and bad.left_out["toolrl_rlla"]["calls a function named like one of an evaluation set"] == 5
    )
    assert plan(["toolrl_rlla"], tmp_path, NOTHING, max_chars=50).left_out["toolrl_rlla"]["longer than asked for"] == 5


def test_held_out_requests_are_asked_first(tmp_path):
    rows = [json.loads(json.dumps(rlla_row()).replace("weather", f"weather{i}")) for i in range(60)]
    write(tmp_path / "toolrl_rlla" / "rlla_sft.json", json.dumps(rows))
    sides = [is_dev(e) for e in plan(["toolrl_rlla"], tmp_path, NOTHING).examples]
    assert sides == sorted(sides, reverse=True) and set(sides) == {True, False}


def test_the_held_out_part_is_chosen_by_the_called_function():
    calls = [Example(id="x", source="s", messages=(), calls=(Call(f"g{i}", {"a": i}),)) for i in range(1000)]
    assert 20 < sum(map(is_dev, calls)) < 90
    spelt = [msgspec.structs.replace(e, source="t", calls=(Call(e.calls[0].name.upper() + "_", {}),)) for e in calls]
    assert list(map(is_dev, spelt)) == list(map(is_dev, calls))


# ---------------------------------------------------------------- teachers


def endpoint(handler, **options):
    return EndpointTeacher("http://127.0.0.1:1/v1", "m", transport=httpx.MockTransport(handler), **options)


def completion(message):
    return httpx.Response(200, json={"choices": [{"message": message}]})


def test_an_endpoint_is_asked_greedily_and_its_tool_call_read():
    seen = []

    def handler(request):
        seen.append((json.loads(request.content), request.headers.get("authorization")))
        call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        return completion({"content": None, "tool_calls": [call]})

    assert endpoint(handler, key="k").answer(example()) == Call("weather", {"city": "Rome"})
    body, key = seen[0]
    assert body["temperature"] == 0 and len(body["tools"]) == 2 and key == "Bearer k"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "I cannot."}, "no call"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": "{broken"}}]}, "no JSON"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": "[]"}}]}, "no object"),
        ({"tool_calls": [{"function": {"name": "nope", "arguments": "{}"}}]}, "unknown function"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": '{"x": 1}'}}]}, "schema lacks"),
        ({"tool_calls": ["nonsense"]}, "no call"),
    ],
)
def test_malformed_answers_are_counted_not_repaired(message, why):
    tools = {t.name: t for t in example().request()[0]}
    with pytest.raises(NoCall, match=why):
        parse_tool_call(message, tools)


def test_a_call_in_the_text_is_read_too():
    tools = {t.name: t for t in example().request()[0]}
    text = 'Sure: {"name": "weather", "arguments": {"city": "Rome"}}'
    assert parse_tool_call({"content": text}, tools) == Call("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": 3}]}', b"[" * 100_000]
)
def test_nonsense_from_an_endpoint_is_no_answer(body, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked = []

    def handler(request):
        asked.append(request)
        return httpx.Response(200, content=body)

    with pytest.raises(NoAnswer, match=r"in 5 attempts \(a body that is no chat completion"):
        endpoint(handler).answer(example())
    assert len(asked) == 5


@pytest.mark.parametrize("arguments", ['{"city": NaN}', '{"city": "\\ud800"}', '{"city": ' + "[" * 100_000])
def test_arguments_that_no_file_could_hold_are_no_call(arguments):
    tools = {t.name: t for t in example().request()[0]}
    with pytest.raises(NoCall, match="arguments that are no JSON"):
        parse_tool_call({"tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}, tools)


class Failing(Scripted):
    """Gives no answer to some requests, or refuses all."""

    def __init__(self, silent=(), error=NoAnswer):
        super().__init__()
        self.silent, self.error = silent, error

    def answer(self, asked):
        call = super().answer(asked)
        if asked.id in self.silent:
            raise self.error("status 500")
        return call


def test_a_request_without_an_answer_is_left_for_the_next_start(tmp_path):
    counts = collect(planned(), Failing({"e1", "e4"}), tmp_path, NOTHING)
    assert counts == {"traces": 3, "no call": 1, "without an answer, to be asked again": 2}
    again = Scripted()
    assert collect(planned(), again, tmp_path, NOTHING)["traces"] == 5
    assert again.asked == ["e1", "e4"]


def test_two_requests_without_an_answer_end_a_collection_and_lose_nothing(tmp_path):
    teacher = Failing({"e1", "e2"})
    with pytest.raises(NoAnswer, match="status 500"):
        collect(planned(), teacher, tmp_path, NOTHING)
    assert teacher.asked == ["e0", "e1", "e2"]
    assert [t.id for t in read_examples(tmp_path / "traces.jsonl")] == ["e0"]


def test_answers_that_were_under_way_are_kept_when_another_fails(tmp_path):
    failed = threading.Event()

    class Slow(Failing):
        def answer(self, asked):
            if asked.id in self.silent:
                failed.set()
            else:
                assert failed.wait(10)
            return super().answer(asked)

    with pytest.raises(TeacherGone, match="status 500"):
        collect(planned(3), Slow({"e0"}, TeacherGone), tmp_path, NOTHING, concurrency=3)
    assert {t.id for t in read_examples(tmp_path / "traces.jsonl")} == {"e1", "e2"}


def test_a_folder_holds_the_answers_of_one_teacher(tmp_path):
    collect(planned(2), Scripted(), tmp_path, NOTHING)
    other = Scripted()
    other.name = "other"
    with pytest.raises(UsageError, match=r"holds answers of scripted; choose another --out for those of other"):
        collect(planned(), other, tmp_path, NOTHING)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["teachers"] == {"scripted": 2}


def test_the_card_tells_of_all_traces_whatever_was_planned_last(tmp_path):
    traced = [msgspec.structs.replace(e, source="glaive_demo") for e in planned(2).examples]
    collect(Plan(traced, {"glaive_demo": {}}), Scripted(), tmp_path, NOTHING)
    collect(Plan([], {"sgd": {"no call": 3}}), Scripted(), tmp_path, NOTHING)
    sources = json.loads((tmp_path / "card.json").read_text())["sources"]
    assert sources["glaive_demo"] == {"traces": 2, "licence": "Apache-2.0", "left_out": None}
    assert sources["sgd"]["left_out"] == {"no call": 3}


def test_a_damaged_line_of_skipped_requests_is_named(tmp_path):
    collect(planned(), Scripted(), tmp_path, NOTHING)
    skipped = tmp_path / "skipped.jsonl"
    skipped.write_bytes(b"nonsense\n" + skipped.read_bytes())
    with pytest.raises(UsageError, match=r"skipped\.jsonl, line 1 is damaged.*remove that line"):
        collect(planned(), Scripted(), tmp_path, NOTHING)


def test_rows_that_come_again_or_that_no_file_could_hold_are_left_out(tmp_path):
    odd = json.loads(json.dumps(rlla_row()).replace("Weather in", "\\ud800 in"))
    assert odd != rlla_row()
    nan = rlla_row('{"city": {"type": "str", "default": NaN}}')
    write(tmp_path / "toolrl_rlla" / "rlla_sft.json", json.dumps([rlla_row(), rlla_row(), odd, nan]))
    found = plan(["toolrl_rlla"], tmp_path, NOTHING)
    assert len(found.examples) == 1
    assert found.left_out["toolrl_rlla"] == {"the same request again": 1, "row of another form": 2}


def test_a_busy_or_silent_endpoint_is_asked_again_then_given_up(monkeypatch):
    pauses, answers = [], [httpx.Response(429, headers={"retry-after": "7"}), httpx.Response(503), None]
    monkeypatch.setattr("time.sleep", pauses.append)

    def handler(request):
        answer = answers.pop(0) if answers else httpx.Response(500)
        if answer is None:
            raise httpx.ReadTimeout("silent", request=request)
        return answer

    with pytest.raises(TeacherGone, match="no answer in 5 attempts"):
        endpoint(handler).answer(example())
    assert pauses[0] == 7.0 and len(pauses) == 4


def test_a_refusal_ends_the_collection_at_once():
    with pytest.raises(TeacherGone, match=r"status 401, bad key\. The key is read from OPENAI_API_KEY") as refused:
        endpoint(lambda request: httpx.Response(401, text="<p>bad\nkey".removeprefix("<p>"))).answer(example())
    assert not isinstance(refused.value, NoAnswer)
    with pytest.raises(TeacherGone, match=r"status 404, Not Found.*as the API's root"):
        endpoint(lambda request: httpx.Response(404)).answer(example())
    with pytest.raises(NoAnswer, match="status 400, too long"):
        endpoint(lambda request: httpx.Response(400, text="too long")).answer(example())
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        EndpointTeacher("http://127.0.0.1:1/v1", "m", "schlüssel")
    with pytest.raises(UsageError, match="is no URL"):
        EndpointTeacher("http://[::1", "m")
    with pytest.raises(UsageError, match="http://"):
        EndpointTeacher("localhost:8000", "m")


def test_several_requests_at_once(tmp_path):
    together = threading.Barrier(3, timeout=10)

    def handler(request):
        together.wait()
        return completion({"content": '{"name": "weather", "arguments": {"city": "Rome"}}'})

    assert collect(planned(3), endpoint(handler), tmp_path, NOTHING, concurrency=3)["traces"] == 3


def test_the_data_sets_own_call_is_the_local_teachers_hint():
    hint = gold_hint(example())
    assert hint.function.names == ("weather",) and hint.slots["weather", "city"].value == "town 0"
    assert gold_hint(msgspec.structs.replace(example(), calls=())) is None


def test_a_local_teacher_reads_what_its_target_wrote(tiny_llama):
    from ooospec.runtime import Decoder
    from ooospec.train.teachers import LocalTeacher

    with Decoder(tiny_llama, None, budget="fixed") as decoder, pytest.raises(NoCall, match="no call"):
        LocalTeacher(decoder).answer(example())  # a random model writes noise
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        text = '{"name": "weather", "arguments": {"city": "Rome"}}'
        decoder.target = ScriptedTarget(tiny_llama.codec.encode(f"{text} and more"), tiny_llama.codec.vocab_size)
        decoder.target.prefix_cache = None
        assert LocalTeacher(decoder).answer(example()) == Call("weather", {"city": "Rome"})
        assert len(decoder.target.committed) < len(decoder.target.script)  # the rest of the answer is not decoded
