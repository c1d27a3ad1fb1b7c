"""Plans, teachers, collection: nothing lost."""

import json
import threading

import httpx
import msgspec
import pytest

from ooospec.errors import UsageError
from ooospec.train.collect import Plan, collect, is_dev, plan
from ooospec.train.decontaminate import Inventory
from ooospec.train.records import Call, Example, read_examples
from ooospec.train.teachers import EndpointTeacher, NoAnswer, NoCall, TeacherGone, gold_hint, parse_tool_call
from scripted import ScriptedTarget
from test_sources import rlla_row, write
from test_train import example

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
        endpoint(lambda request: httpx.Response(401, text="bad\nkey")).answer(example())
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
