"""The documentation's code runs as it stands."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import WEATHER
from ooospec import methods
from ooospec.chat.schema import read_tools
from ooospec.cli import app
from ooospec.core import FunctionHint, Hint, SlotHint
from scripted import write

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def registry():
    before = dict(methods.METHODS)
    yield
    methods.METHODS.clear()
    methods.METHODS.update(before)


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def test_write_a_proposer(registry, tiny_llama, capsys, tmp_path, monkeypatch):
    proposer, check = blocks("write_a_proposer.md", "python")
    (tmp_path / "my_method.py").write_text(proposer)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = re.sub('^TARGET = ".*"$', "", check, count=1, flags=re.MULTILINE)
    assert tiny != check
    exec(compile(tiny, "check.py", "exec"), {"TARGET": tiny_llama})
    assert "tokens per round" in capsys.readouterr().out
    assert len([line for line in proposer.splitlines() if line.strip()]) <= 30


def test_benchmark_of_a_plugin(registry, folder_of_tiny, tmp_path, monkeypatch):
    """The page's command, with a tiny target in the place of the default one."""
    plugin = tmp_path / "my_method.py"
    plugin.write_text(blocks("write_a_proposer.md", "python")[0])
    bfcl = tmp_path / "data" / "bfcl"
    bfcl.mkdir(parents=True)
    row = {
        "id": "simple_python_0",
        "question": [[{"role": "user", "content": "Hi"}]],
        "function": [WEATHER["function"]],
    }
    (bfcl / "BFCL_v4_simple_python.json").write_text(json.dumps(row))
    (bench, report) = blocks("write_a_proposer.md", "sh")[0].strip().splitlines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", bench.split())
    extra = ["--suite", "all", "--targets", str(folder_of_tiny), "--dtype", "float32", "--benchmarks", "bfcl",
             "--budget", "fixed", "--max-new-tokens", "8", "--sidecar", "none"]  # fmt: skip
    result = CliRunner().invoke(app, [*bench.replace("DATA", "data").split()[1:], *extra])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, report.split()[1:])
    assert result.exit_code == 0, result.output
    assert "Last Follower" in Path("results/report.md").read_text("utf-8")


def test_methods_with_one_part_taken_away_write_the_same_in_more_rounds(registry, codec):
    before = set(methods.METHODS)
    runpy.run_path(str(DOCS.parent / "benchmarks" / "ablations.py"))
    slots = {"type": "object", "properties": {"city": {"type": "string"}, "street": {"type": "string"}}}
    tools = read_tools([{"name": "find", "parameters": {**slots, "required": ["city", "street"]}}])
    text = '{"name": "find", "arguments": {"city": "Oslo", "street": "Storgata 12"}}'

    def rounds(city, complete=True, late=0, text=text):
        """Rounds of every method, with a hint that is right but for the city, whole from round `late` on."""
        counts = {}
        for name in ["ooo", *sorted(set(methods.METHODS) - before)]:
            values = {"city": city, "street": "Storgata 12"}
            known = {("find", slot): SlotHint("find", slot, value, True, 0.9) for slot, value in values.items()}
            hint = Hint(FunctionHint(("find",), (0.9,)), known)
            polls = []

            def poll(hint=hint, polls=polls):
                polls.append(None)
                hint.complete = complete and len(polls) > late
                return hint

            counts[name] = len(write(codec, text, tools, name, poll)[1])
        return counts

    wrong = rounds("Bergen")
    assert wrong["dropped"] > wrong["ooo"]
    early = rounds("Oslo", late=6)
    assert early["joined"] > early["ooo"] and early["serial"] > early["ooo"]
    fenced = rounds("Oslo", text=f"```json\n{text}\n```")
    assert fenced["one-view"] > fenced["ooo"]
    assert len(wrong) == 7
