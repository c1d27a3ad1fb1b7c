"""The benchmark's runner and its report."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from ooospec.bench.command import BenchSettings, run_bench
from ooospec.bench.report import ceiling_text, write_report
from ooospec.bench.rows import Results
from ooospec.bench.runner import Job, plan_jobs, quality_faults, sole_user, whole_groups
from ooospec.bench.summary import conditions, rows_of, summarize
from ooospec.errors import UsageError
from ooospec.runtime import Decoder


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


def test_packed_rows_are_read_and_gone_on_with(bench):
    folder, _ = bench(limit=1)
    results = Results(folder)
    rows, data = results.rows(), results.rows_file.read_bytes()
    results.rows_file.unlink()
    results.packed_file.write_bytes(gzip.compress(data))
    assert results.rows() == rows
    assert bench(limit=1)[1] == [] and not results.rows_file.exists()
    bench(limit=2)
    assert results.rows_file.read_bytes().startswith(data) and len(results.rows()) == 2 * len(rows)
    results.rows_file.unlink()
    results.packed_file.write_bytes(gzip.compress(data)[:-20])
    with pytest.raises(UsageError, match=r"rows\.jsonl\.gz is damaged"):
        results.rows()


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
    assert ceiling_text(summaries["ar"]) == (
        "The prompt takes 5 % of plain decoding's time, so no drafting could make the total more than 20.0x as fast."
    )


def test_report_files(bench):
    folder, _ = bench()
    markdown, page, summary = (path.read_text("utf-8") for path in write_report(folder, "A <title>"))
    assert "| ToolSpec |" in markdown.replace("**", "")
    assert "Revision" in markdown
    assert "cold memory" in markdown
    assert markdown.count("so no drafting could") == page.count("so no drafting could") > 0
    assert "A &lt;title&gt;" in page
    assert not re.search(r'(?:src|href)="http', page)  # self-contained
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    timelines = json.loads(embedded[1])
    assert {m["name"] for m in timelines[0]["methods"]} == {"AR", "Prompt Lookup", "Token Recycling", "ToolSpec"}
    assert all(row["requests"] for row in json.loads(summary))


def test_report_without_results(tmp_path):
    with pytest.raises(UsageError, match="No benchmark results in"):
        write_report(tmp_path, "x")
