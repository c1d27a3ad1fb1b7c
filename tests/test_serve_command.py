"""`ooospec serve` before any model is loaded: flags, the config file, checks at start."""

import copy
import dataclasses
import socket

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from ooospec.cli import app
from ooospec.errors import UsageError
from ooospec.runtime import Decoder
from ooospec.server.app import ServerSettings, create_app
from ooospec.server.flags import limit_context, merged, use_template, warn_of_other_format
from served import CALL, chat


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"method": "draft"}'], "unknown method 'draft'; choose one of ar"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "from 1 to 511"),
        (["--tool-call-parser", "nope"], "Unknown call format 'nope'"),
        (["--chat-template", "/nope"], "no file that can be read"),
        (["--host", "256.1.1.1"], "Cannot listen on 256.1.1.1:"),
        (["--config", "/nope.yaml"], "Cannot read --config"),
        (["--model", "/nope"], "/nope"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", " "], "--served-model-name must not be empty"),
        (["--otlp-traces-endpoint", "foo"], "must be an http:// or https:// URL; got 'foo'"),
    ],
)
def test_wrong_flags_are_told_in_a_line(arguments, words):
    with socket.socket() as free:  # 8000 may be in use
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = CliRunner().invoke(app, ["serve", "--port", port, *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


def test_a_taken_port_is_told_before_models_are_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--port", port])
    assert result.exit_code == 2 and f"Cannot listen on 127.0.0.1:{port}" in " ".join(result.output.split())


def test_a_parser_that_is_not_the_models_is_warned_of(tiny_llama, capsys):
    tokenizer = copy.copy(tiny_llama.tokenizer)
    tokenizer.chat_template = "{{ messages }}<|python_tag|>"
    for chosen in (None, "llama3_json"):
        warn_of_other_format(chosen, tokenizer)
    assert capsys.readouterr().err == ""
    warn_of_other_format("hermes", tokenizer)
    assert capsys.readouterr().err == ""  # it reads such calls too
    warn_of_other_format("pythonic", tokenizer)
    assert "pythonic was chosen, but the model seems to write llama3_json" in capsys.readouterr().err


def test_templates_and_lengths_that_do_not_fit_the_model_are_refused_at_start(tiny_llama):
    loaded = dataclasses.replace(tiny_llama, tokenizer=copy.copy(tiny_llama.tokenizer))
    with Decoder(loaded, None, budget="fixed") as decoder:
        for template in ("{{ bad", "{{ raise_exception('no') }}"):
            with pytest.raises(UsageError, match="--chat-template cannot render a message"):
                use_template(decoder, template)
        with pytest.raises(UsageError, match="--max-model-len 9999 is more than the 2048 tokens"):
            limit_context(decoder, 9999)


def test_tools_can_be_left_out_of_prompts_that_do_not_use_them(scripted_decoder):
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), exclude_unused_tools=True))) as client:
        used = chat(client)["usage"]["prompt_tokens"]
        unused = chat(client, tool_choice="none")
        assert unused["usage"]["prompt_tokens"] == chat(client, tools=None)["usage"]["prompt_tokens"] < used
        assert unused["choices"][0]["message"]["content"] == CALL


def test_the_config_file_is_read_and_flags_come_first(tmp_path):
    path = tmp_path / "c.yaml"
    flags = {"port": 8000, "served_model_name": None, "max_queue": 64}
    path.write_text("port: 9000\nserved-model-name: x\nmax-queue: 3\n")
    assert merged(flags, lambda name: name == "port", path) == {"port": 8000, "served_model_name": "x", "max_queue": 3}
    for text, words in (("prot: 1", "unknown key 'prot'; known keys: max-queue, port"), ("- 1", "keys and values"),
                        ("a: [", "not YAML")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            merged(flags, lambda name: False, path)
