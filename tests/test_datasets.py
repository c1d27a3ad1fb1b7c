"""The benchmarks' data sets, their gold answers, and the fields of calls."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ooospec.bench.datasets import BENCHMARKS, data_folder, load_benchmark, sample, suite
from ooospec.bench.fields import token_fields, token_pieces
from ooospec.bench.gold import GoldCall, bfcl_gold, judge, text_gold
from ooospec.core import ToolCall
from ooospec.errors import UsageError


def test_loaders_read_every_form(data):
    bank, alpaca, bfcl = (load_benchmark(name, data) for name in BENCHMARKS)
    assert [r.id for r in bank] == ["api_bank-1-0", "api_bank-2-0", "api_bank-3-0"]
    assert all(r.tools is None and r.gold == (text_gold("get_weather", {"city": "Oslo"}),) for r in bank)
    assert [r.id for r in alpaca] == ["toolalpaca-Weather API-0", "toolalpaca-Weather API-1"]
    assert alpaca[1].gold == (GoldCall("get_weather", None),)
    assert len(bfcl) == 6
    assert bfcl[0].gold == (GoldCall("get_weather", {"city": ("Oslo", "oslo")}),)
    assert bfcl[4].gold == ()


def test_toolalpaca_tools_become_json_schema(data):
    (tool,) = load_benchmark("toolalpaca", data)[0].tools
    assert tool["description"] == "Weather of a place."
    assert tool["parameters"]["required"] == ["city"]
    slots = tool["parameters"]["properties"]
    assert slots["city"] == {"type": "string", "description": "The city."}
    assert slots["unit"] == {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Unit."}
    assert slots["days"] == {"type": "integer", "description": "How many. Really."}
    assert slots["tags"] == {"type": "array", "items": {"type": "string"}, "description": ""}
    assert slots["more"]["type"] == "object"


def test_missing_and_damaged_data_say_what_to_do(data):
    with pytest.raises(UsageError, match=r"No data for api_bank; looked in: .*Give --data FOLDER"):
        load_benchmark("api_bank", data / "bfcl")
    (data / "toolalpaca" / "eval_simulated.json").write_text('[{"Name": "x"}]')
    with pytest.raises(UsageError, match=r"A file of toolalpaca in .* is damaged .*KeyError"):
        load_benchmark("toolalpaca", data)
    with pytest.raises(UsageError, match="Unknown benchmark 'x'; choose one of api_bank, toolalpaca, bfcl"):
        load_benchmark("x", data)


def test_suites(data):
    requests = load_benchmark("bfcl", data)
    assert suite("all", "bfcl", requests) == requests
    with pytest.raises(UsageError, match="Java and JavaScript"):
        suite("paper", "bfcl", requests)
    java = [replace(requests[0], id="bfcl-simple_java_0")]
    assert suite("paper", "bfcl", [*requests, *java]) == java
    with pytest.raises(UsageError, match="Suite quick needs 30 requests that the data of bfcl lacks"):
        suite("quick", "bfcl", requests)
    with pytest.raises(UsageError, match="Unknown suite 'fast'; choose one of quick, paper, all"):
        suite("fast", "bfcl", requests)
    assert sample(requests, 3, 1) == sample(requests, 3, 1) != sample(requests, 3, 2)


def test_quick_suite_has_thirty_different_requests_each():
    from pathlib import Path

    import ooospec.bench

    listed = json.loads((Path(ooospec.bench.__file__).parent / "quick.json").read_text("utf-8"))
    assert set(listed) == set(BENCHMARKS)
    assert all(len(ids) == 30 == len(set(ids)) for ids in listed.values())


def test_data_from_the_hub(monkeypatch, data):
    asked = []

    def snapshot_download(name, repo_type):
        asked.append((name, repo_type))
        if "missing" in name:
            raise OSError("404 not found\nmore")
        return str(data)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert data_folder("hf://someone/benchmarks") == data
    assert asked == [("someone/benchmarks", "dataset")]
    with pytest.raises(UsageError, match=r"hf://missing/x.*\(404 not found\)"):
        data_folder("hf://missing/x")
    assert data_folder(None) is None


def call(name, **arguments):
    return ToolCall(name, arguments, json.dumps(arguments))


@pytest.mark.parametrize(
    "calls, gold, names, arguments",
    [
        ([call("f", a="Oslo ")], [text_gold("f", {"a": "oslo"})], True, True),
        (
            [call("f", a=["Al"], b=True, c=3)],
            [text_gold("f", {"a": "['Al']", "b": "True", "c": "3"})],
            True,
            True,
        ),
        ([call("f", a=4)], [text_gold("f", {"a": "3"})], True, False),
        ([call("f", a="x", b="")], [text_gold("f", {"a": "x"})], True, True),
        ([call("f", a="x", b="y")], [text_gold("f", {"a": "x"})], True, False),
        ([call("g", a="x")], [text_gold("f", {"a": "x"})], False, False),
        ([call("f")], [GoldCall("f", None)], True, None),
        ([], [], True, True),
        ([call("f")], [], False, False),
        ([call("a_b", x=1), call("a_b", x=2)], bfcl_gold([{"a.b": {"x": [2]}}, {"a.b": {"x": [1, "1"]}}]), True, True),
        ([call("a_b", x=1), call("a_b", x=1)], bfcl_gold([{"a.b": {"x": [2]}}, {"a.b": {"x": [1]}}]), True, False),
        ([call("f", a=1)], bfcl_gold([{"f": {"a": [1], "b": [2, ""]}}]), True, True),
        ([call("f", a=1, b=3)], bfcl_gold([{"f": {"a": [1], "b": [2, ""]}}]), True, False),
        ([call("f")], bfcl_gold([{"f": {"a": []}}]), True, True),
        ([call("f", a={"k": 2})], bfcl_gold([{"f": {"a": [{"k": [1, 2]}]}}]), True, True),
        ([call("f", a={"k": 3})], bfcl_gold([{"f": {"a": [{"k": [1, 2]}]}}]), True, False),
        ([call("f", a=[1.0, 2])], bfcl_gold([{"f": {"a": [[1, 2]]}}]), True, True),
    ],
)
def test_quality_against_gold(calls, gold, names, arguments):
    quality = judge(calls, gold)
    assert (quality.names, quality.arguments) == (names, arguments)


def test_fields_of_tokens(codec):
    text = 'Sure.\n```json\n{"name": "f", "arguments": {"k": "v1"}}\n```'
    ids = [*codec.encode(text), codec.eos_id]
    pieces = token_pieces(codec, ids)
    fields = token_fields(codec, ids, pieces)
    assert "".join(pieces) == text
    got: dict[str, str] = {}
    for field, piece in zip(fields, pieces, strict=True):
        got[field] = got.get(field, "") + piece
    assert got["text"] == "Sure.\n"
    assert got["name"] == "f"
    assert got["key"] == "k"
    assert "v1" in got["value"]
    assert fields[-1] == "end"
    assert got["structure"].startswith("```json\n{")
