"""The command line: errors are one clear line and exit code 2, with nothing half-written."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from conftest import SEARCH, WEATHER, load_tiny
from ooospec.cli import app

BASE = ["generate", "--message", "hi", "--sidecar", "none", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    loaded = load_tiny("llama")
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("OOOSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


BAD = {
    "tools not a list": ("--tools", {"name": "x"}, "must be a JSON list"),
    "tool without name": ("--tools", [{"type": "function", "function": {}}], "needs a name"),
    "tools not json": ("--tools", "[{", "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tools(run, folder, tmp_path, case):
    flag, value, message = BAD[case]
    result = run(*BASE, "--target", folder, flag, write(tmp_path / "tools.json", value))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nope"], "Unknown model 'nope'"),
        (["--tools", "/no/such.json"], "No file '/no/such.json'"),
        (["--method", "magic"], "choose one of ar, lookup, toolspec, ooo"),
        (["--dtype", "int3"], "bfloat16, float16, float32"),
        (["--placement", "up"], "shared, split"),
    ],
)
def test_bad_options(run, folder, arguments, message):
    given = arguments if "--target" in arguments else ["--target", folder, *arguments]
    result = run(*BASE, *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_prompt_longer_than_the_context(run, folder):
    result = run("generate", "--message", "x" * 5000, "--target", folder, "--method", "ar", "--dtype", "float32")
    assert result.exit_code == 2
    assert "this target takes 1 to 2047" in result.stderr


def test_refused_sidecar_address(run, folder, monkeypatch):
    monkeypatch.setattr("ooospec.runtime.READY_TIMEOUT_S", 0.3)
    result = run(
        "generate", "--message", "hi", "--target", folder, "--sidecar", "tcp://127.0.0.1:9", "--dtype", "float32"
    )
    assert result.exit_code == 2
    assert "No sidecar answered at tcp://127.0.0.1:9" in result.stderr


def test_missing_data_and_html_folder(run, folder, tmp_path):
    result = run("verify", "--target", folder, "--benchmark", "api_bank", "--data", tmp_path, "--sidecar", "none")
    assert result.exit_code == 2
    assert "No data for api_bank" in result.stderr
    result = run("demo", "--target", folder, "--html", tmp_path / "no" / "x.html")
    assert (result.exit_code, "No folder" in result.stderr) == (2, True)


KEYS = {
    "calls", "text", "output_ids", "num_rounds", "acceptance_length", "accepted_by_source", "prefill_ms", "decode_ms",
    "total_ms", "hint", "tree_nodes",
}  # fmt: skip


@pytest.mark.parametrize("method", ["ar", "lookup", "toolspec", "ooo"])
def test_json_output(run, folder, tmp_path, method):
    tools = write(tmp_path / "tools.json", [WEATHER, SEARCH])
    result = run(*BASE, "--target", folder, "--tools", tools, "--method", method, "--json", "--max-new-tokens", 20)
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert set(printed) >= KEYS
    assert sum(printed["accepted_by_source"].values()) == len(printed["output_ids"])
    assert len(printed["tree_nodes"]) == printed["num_rounds"]
    assert printed["acceptance_length"] == pytest.approx(len(printed["output_ids"]) / printed["num_rounds"], abs=1e-3)


def test_verify_and_demo_on_a_tiny_model(run, folder, tmp_path):
    result = run(
        "verify",
        "--target",
        folder,
        "--sidecar",
        "none",
        "--dtype",
        "float32",
        "--limit",
        2,
        "--json",
        "--max-new-tokens",
        30,
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)["methods"]
    assert [(row["method"], row["identical"]) for row in report] == [("lookup", 2), ("toolspec", 2), ("ooo", 2)]
    page = tmp_path / "page.html"
    result = run("demo", "--target", folder, "--sidecar", "none", "--dtype", "float32", "--limit", 0, "--html", page)
    assert result.exit_code == 0, result.output
    assert "identical 4/4" in result.stdout
    assert page.read_text().count("<section>") == 4


def test_models_list_and_doctor(run, folder):
    assert "qwen2.5-coder-1.5b-instruct" in run("models", "list").stdout
    result = run("doctor", "--target", folder, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "64 tokens" in result.stdout
