"""The benchmark: data sets, gold, runner, resume, report; on tiny models and literal data."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from conftest import WEATHER
from ooospec.bench.command import BenchSettings, run_bench
from ooospec.bench.datasets import BENCHMARKS, data_folder, load_benchmark, sample, suite
from ooospec.bench.fields import token_fields, token_pieces
from ooospec.bench.gold import GoldCall, bfcl_gold, judge, text_gold
from ooospec.bench.report import write_report
from ooospec.bench.rows import Results
from ooospec.bench.runner import Job, plan_jobs, quality_faults, sole_user, whole_groups
from ooospec.bench.summary import conditions, rows_of, summarize
from ooospec.core import ToolCall
from ooospec.errors import UsageError
from ooospec.runtime import Decoder

ALPACA = {
    "Name": "Weather API",
    "Function_Description": {
        "get_weather": 'Weather of a place.\nParameters: {"city": "Required. string. The city.", "unit": "string. '
        'One of: [celsius, fahrenheit]. Unit.", "days": "integer. How many. Really.", "tags": "Array[string].", '
        '"more": "Object{a: string, b: integer}. Extra."}\nOutput: ok.',
        "components": "",
    },
    "Instructions": ["Weather in Oslo?", "And then?"],
    "Golden_Answers": [
        [{"Action": "get_weather", "Action_Input": '{"city": "Oslo", "unit": ""}'}],
        [{"Action": "[Optional]get_weather", "Action_Input": '{"city": ${name from search}}'}],
    ],
}


@pytest.fixture
def data(tmp_path):
    """Six BFCL requests, two of ToolAlpaca, three of API-Bank in the files' own forms."""
    bfcl = tmp_path / "bfcl"
    (bfcl / "possible_answer").mkdir(parents=True)
    tools = [{**WEATHER["function"], "parameters": {**WEATHER["function"]["parameters"], "type": "dict"}}]
    rows = [
        {"id": f"simple_python_{i}", "question": [[{"role": "user", "content": f"Weather {i}?"}]], "function": tools}
        for i in range(4)
    ]
    (bfcl / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, rows)))
    gold = [{"id": r["id"], "ground_truth": [{"get_weather": {"city": ["Oslo", "oslo"]}}]} for r in rows]
    (bfcl / "possible_answer" / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, gold)))
    odd = [{**row, "id": f"irrelevance_{i}"} for i, row in enumerate(rows[:2])]
    (bfcl / "BFCL_v4_irrelevance.json").write_text("\n".join(map(json.dumps, odd)))
    alpaca = tmp_path / "toolalpaca"
    alpaca.mkdir()
    (alpaca / "eval_simulated.json").write_text(json.dumps([ALPACA]))
    bank = tmp_path / "api_bank"
    bank.mkdir()
    answer = {"name": "get_weather", "parameters": {"city": "Oslo"}}
    for level, given in ((1, [answer]), (2, answer), (3, [answer])):
        row = {"system": "You may use tools.", "user": "Weather?", "answer": given}
        (bank / f"level-{level}-api_processed.json").write_text(json.dumps([row]))
    return tmp_path


# ---------------------------------------------------------------- data sets and gold


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


# ---------------------------------------------------------------- runner


def settings(**changes):
    base = {
        "targets": ("tiny",), "sidecar": None, "adapter": None, "draft": None, "benchmarks": ("toolalpaca", "bfcl"),
        "suite": "all", "data": None, "methods": ("ar", "lookup", "recycling", "toolspec"), "placement": ("shared",),
        "prefix": ("warm",), "memory": ("warm", "cold"), "budget": ("fixed",), "limit": None, "seed": None,
        "max_new_tokens": 12, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    return BenchSettings(**{**base, **changes})


def test_a_method_runs_once_for_conditions_that_do_not_concern_it():
    jobs = plan_jobs(["ar", "lookup", "toolspec"], ["warm"], ["warm", "cold"], ["measured", "fixed"])
    assert jobs.count(Job("ar", "warm", "-", "-")) == 1
    assert [j for j in jobs if j.method == "lookup"] == [
        Job("lookup", "warm", "-", "measured"),
        Job("lookup", "warm", "-", "fixed"),
    ]
    assert len([j for j in jobs if j.method == "toolspec"]) == 4


@pytest.fixture
def bench(tiny_llama, data, tmp_path):
    def run(out="out", fail_after=None, **changes):
        started = []

        def load(target, placement):
            decoder = Decoder(tiny_llama, None, budget="fixed")
            real = decoder.generate

            def generate(*args, **options):
                started.append(options["method"])
                if fail_after is not None and len(started) > fail_after:
                    raise KeyboardInterrupt
                return real(*args, **options)

            decoder.generate = generate
            return decoder

        folder = tmp_path / out
        run_bench(load, settings(**{"data": str(data), **changes}), folder, skip_missing=False)
        return folder, started

    return run


def plain(rows):
    """What does not depend on the clock."""
    return [(*r.group, r.method, r.memory, r.order, r.output_ids, len(r.rounds), [x.sources for x in r.rounds])
            for r in rows]  # fmt: skip


def test_run_measures_every_job_in_rotated_order_and_all_are_identical(bench):
    folder, started = bench()
    rows = Results(folder).rows()
    assert len(rows) == 8 * 6 == len(started)
    assert all(row.identical for row in rows)
    firsts = [row.method for row in rows if row.order == 0 and row.benchmark == "bfcl"]
    assert len(set(firsts)) > 2
    assert sum(bool(row.pieces) for row in rows) == 8  # the text stands in the reference's row only
    (run,) = Results(folder).runs()
    assert run.settings["methods"] == ["ar", "lookup", "recycling", "toolspec"]
    assert run.versions["torch"]


def test_a_killed_run_goes_on_where_it_was_with_the_same_memories(bench):
    whole, _ = bench("whole")
    for fail_after in (0, 5, 13, 40):
        name = f"killed{fail_after}"
        with pytest.raises(KeyboardInterrupt):
            bench(name, fail_after=fail_after)
        folder, started = bench(name)
        assert plain(Results(folder).rows()) == plain(Results(whole).rows())
        assert len(started) == 48 - 6 * (fail_after // 6)
    folder, started = bench("whole")
    assert started == []  # nothing is left to do
    assert len(Results(folder).runs()) == 1


def test_torn_and_half_written_groups_are_measured_again(bench):
    folder, _ = bench()
    results = Results(folder)
    lines = results.rows_file.read_bytes().splitlines(keepends=True)
    for damaged in (lines[:-1], [*lines[:-1], lines[-1][: len(lines[-1]) // 2]], lines[:-4]):
        results.rows_file.write_bytes(b"".join(damaged))
        _, started = bench()
        assert len(started) == 6
        assert len(results.rows()) == 48
    results.rows_file.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 2 is not a benchmark row"):
        bench()


def test_a_full_disk_leaves_no_torn_line(bench, monkeypatch):
    folder, _ = bench(limit=1, benchmarks=("bfcl",))
    before = Results(folder).rows_file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        bench(limit=2, benchmarks=("bfcl",))
    assert Results(folder).rows_file.read_bytes() == before
    monkeypatch.undo()
    bench(limit=2, benchmarks=("bfcl",))
    assert len(Results(folder).rows()) == 12


def test_other_settings_need_another_folder(bench):
    bench(limit=1)
    with pytest.raises(UsageError, match=r"max_new_tokens: 12 -> 9.*another --out"):
        bench(limit=1, max_new_tokens=9)
    bench(limit=2)  # more of the same is welcome
    bench(limit=3, device=None)  # the best one here, which it was
    with pytest.raises(UsageError, match="device: cpu -> mps"):
        bench(limit=3, device="mps")


def test_requests_added_later_find_the_memories_of_the_first(bench):
    whole, _ = bench("whole")
    for limit in (1, 2, None):
        folder, _ = bench("grown", limit=limit)
    grown = {(*r.group, r.method, r.memory): r for r in Results(folder).rows()}
    for row in Results(whole).rows():
        assert plain([grown[(*row.group, row.method, row.memory)]]) == plain([row])
    for file in (folder / "state").iterdir():
        file.unlink()
    results = Results(folder)
    results.keep(results.rows()[:-6])
    with pytest.raises(UsageError, match="lacks what the methods remembered after 5 requests of bfcl"):
        bench("grown")


def test_a_kill_between_memories_and_rows_loses_nothing(bench, monkeypatch):
    whole, _ = bench("whole")
    real = Results.append

    def killed(self, rows):
        if len(self.rows()) == 12:
            raise KeyboardInterrupt
        real(self, rows)

    monkeypatch.setattr(Results, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        bench("killed")
    monkeypatch.undo()
    folder, _ = bench("killed")
    assert plain(Results(folder).rows()) == plain(Results(whole).rows())


def test_two_runs_do_not_share_a_folder(tmp_path):
    with sole_user(tmp_path), pytest.raises(UsageError, match="Another run writes to"), sole_user(tmp_path):
        pass


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ("ar", "magic")}, "--methods: unknown magic; choose from ar, stock"),
        ({"methods": ("lookup",)}, "must contain ar"),
        ({"methods": ("ar", "ooo")}, "Method ooo needs a sidecar"),
        ({"methods": ("ar", "draft")}, "Method draft needs a draft model"),
        ({"benchmarks": ("gsm8k",)}, "--benchmarks: unknown gsm8k; choose from api_bank"),
        ({"prefix": ("hot",)}, "--prefix: unknown hot; choose from warm, cold"),
        ({"memory": ()}, r"--memory: unknown \(nothing given\)"),
        ({"targets": ()}, "--targets is empty"),
        ({"data": "/nonexistent"}, "No data for toolalpaca; looked in"),
    ],
)
def test_bad_settings(bench, changes, message):
    with pytest.raises(UsageError, match=message):
        bench(**changes)


def test_missing_benchmarks_are_left_out_and_said_so(bench, data, capsys):
    (data / "toolalpaca" / "eval_simulated.json").unlink()
    folder, _ = bench(limit=1)
    assert {row.benchmark for row in Results(folder).rows()} == {"bfcl"}
    assert "left out: No data for toolalpaca" in capsys.readouterr().err


def test_a_wrong_output_fails_the_run(bench):
    folder, _ = bench(limit=1, benchmarks=("bfcl",))
    rows = Results(folder).rows()
    assert quality_faults(rows, "float32") == []
    wrong = [replace_struct(row, identical=row.method != "toolspec") for row in rows]
    assert quality_faults(wrong, "float32") == ["bfcl-simple_python_0/toolspec"] * 2
    assert quality_faults(wrong, "bfloat16") == []  # no divergence is recorded that rounding does not explain


def replace_struct(row, **changes):
    import msgspec

    return msgspec.structs.replace(row, **changes)


def test_incomplete_groups_are_dropped(bench):
    folder, _ = bench(limit=2, benchmarks=("bfcl",))
    rows = Results(folder).rows()
    jobs = plan_jobs(settings().methods, ("warm",), ("warm", "cold"), ("fixed",))
    assert whole_groups(rows, jobs) == rows
    assert whole_groups(rows[:-1], jobs) == rows[:6]
    assert whole_groups([*rows, rows[0]], jobs) == rows[6:]


# ---------------------------------------------------------------- report


def test_summary_on_known_rows(bench):
    folder, _ = bench(benchmarks=("bfcl",), limit=3)
    rows = Results(folder).rows()
    slow = [replace_struct(r, total_ms=1000.0 if r.method == "ar" else 250.0, prefill_ms=50.0) for r in rows]
    assert [str(c) for c in conditions(slow)] == [
        "shared placement, warm prefix, warm memory, fixed budget",
        "shared placement, warm prefix, cold memory, fixed budget",
    ]
    summaries = {s.method: s for s in summarize(rows_of(slow, conditions(slow)[0]))}
    assert list(summaries) == ["ar", "lookup", "recycling", "toolspec"]
    lookup = summaries["lookup"]
    assert lookup.total_speedup == lookup.spread.median == pytest.approx(4.0)
    assert lookup.decode_speedup == pytest.approx(950 / 200)
    assert lookup.rate_speedup == pytest.approx(4.0)
    assert (lookup.requests, lookup.identical) == (3, 3)
    tokens = sum(len(r.output_ids) for r in slow if r.method == "lookup")
    assert sum(size * count for size, count in lookup.round_sizes.items()) == tokens
    assert sum(lookup.by_source.values()) == tokens
    assert summaries["ar"].tokens_per_round == 1.0


def test_report_files(bench):
    folder, _ = bench()
    markdown, page, summary = (path.read_text("utf-8") for path in write_report(folder, "A <title>"))
    assert "| ToolSpec |" in markdown.replace("**", "")
    assert "Revision" in markdown
    assert "cold memory" in markdown
    assert "A &lt;title&gt;" in page
    assert not re.search(r'(?:src|href)="http', page)  # self-contained
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    timelines = json.loads(embedded[1])
    assert {m["name"] for m in timelines[0]["methods"]} == {"AR", "Prompt Lookup", "Token Recycling", "ToolSpec"}
    assert all(row["requests"] for row in json.loads(summary))


def test_report_without_results(tmp_path):
    with pytest.raises(UsageError, match="No benchmark results in"):
        write_report(tmp_path, "x")
