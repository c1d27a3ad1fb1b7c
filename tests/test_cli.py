"""The command line: errors are one clear line and exit code 2, with nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from conftest import SEARCH, WEATHER
from ooospec.cli import app

BASE = ["generate", "--message", "hi", "--sidecar", "none", "--dtype", "float32"]


@pytest.fixture
def folder(folder_of_tiny):
    return folder_of_tiny


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
        (["--method", "magic"], "choose one of ar, stock, lookup"),
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


@pytest.mark.parametrize(
    "address, message",
    [
        ("tcp://127.0.0.1:9", "No sidecar at tcp://127.0.0.1:9"),
        ("tcp://no.such.host.invalid:99", "No sidecar at tcp://no.such"),
        ("tcp://127.0.0.1:99999", "give one like tcp://"),
        ("tcp://bad", "give one like tcp://"),
        ("carrier://pigeon", "Cannot use sidecar address"),
    ],
)
def test_refused_sidecar_address(run, folder, address, message):
    result = run("generate", "--message", "hi", "--target", folder, "--sidecar", address, "--dtype", "float32")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--address", "tcp://127.0.0.1:99999"], "no such port"),
        (["--address", "foo"], "Cannot listen on 'foo'"),
        (["--address", "tcp://192.0.2.9:7777"], "Cannot listen on"),
        (["--device", "tpu"], "No device 'tpu' here; choose one of cpu"),
        (["--dtype", "x"], "Unknown sidecar dtype 'x'; choose one of auto, int8"),
        (["--adapter", "/nope"], "No adapter at '/nope'"),
    ],
)
def test_sidecar_command_refuses_before_it_says_that_it_listens(run, folder, arguments, message):
    result = run("sidecar", "--model", folder, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "listening" not in result.stdout


def test_every_kind_of_unusable_file_is_one_line(run, folder, tmp_path):
    deep, empty = tmp_path / "deep.json", tmp_path / "empty.json"
    deep.write_text("[" * 100_000)
    empty.write_text("")
    for tools, message in ((tmp_path, "Is a directory"), (deep, "is not JSON"), (empty, "is empty")):
        result = run("generate", "--message", "hi", "--target", folder, "--sidecar", "none", "--tools", tools)
        assert result.exit_code == 2
        assert message in result.stderr


def test_unusable_cache_folder_says_what_to_do(run, monkeypatch):
    monkeypatch.setenv("OOOSPEC_CACHE", "/proc/x")
    result = run("models", "pull", "smollm2-135m-instruct")
    assert result.exit_code == 2
    assert "set OOOSPEC_CACHE to a folder" in result.stderr


def test_full_cache_disk_is_told_before_the_download(run, monkeypatch, tmp_path):
    monkeypatch.setenv("OOOSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("ooospec.models.resolver.hub_reachable", lambda: False)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    result = run("models", "pull", "smollm2-135m-instruct")
    assert result.exit_code == 2
    assert "1 MB are free" in result.stderr


def test_broken_model_folder(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = run("generate", "--message", "hi", "--target", tmp_path, "--sidecar", "none")
    assert result.exit_code == 2
    assert "Cannot load" in result.stderr


SWALLOWED = """
import os, signal, time
from ooospec.console import clean_errors

class Finalizer:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

@clean_errors
def command():
    Finalizer()
    time.sleep(30)

import typer
typer.run(command)
"""


def test_an_interrupt_that_python_swallows_comes_again():
    """The first Ctrl-C lands in a finalizer, where exceptions are only printed."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=25)
    assert done.returncode == 130
    assert "ooospec: interrupted" in done.stderr


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
