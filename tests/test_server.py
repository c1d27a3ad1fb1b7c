"""The server with a scripted target: OpenAI's shapes, streaming as made, errors, queue, aborts, metrics."""

import copy
import dataclasses
import json
import socket

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from ooospec.cli import app
from ooospec.errors import UsageError
from ooospec.runtime import Decoder
from ooospec.server.app import ServerSettings, create_app
from ooospec.server.flags import limit_context, merged, use_template, warn_of_other_format
from ooospec.target.model import TargetModel
from served import CALL, SCRIPTS, WEATHER, body, chat, chunks, joined

# ---------------------------------------------------------------- answers


def test_a_call(client):
    answer = chat(client)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    speculation = answer["metrics"]["speculative_decoding"]
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_by_source"].values()) > 0
    emitted = speculation["num_accepted_tokens"] + speculation["num_rounds"]
    assert emitted - answer["usage"]["completion_tokens"] in (0, 1)  # a drafted end leaves no room for a bonus token


def test_words_and_no_call(client):
    answer = chat(client, "hello")
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "Hello there, how are you?", "refusal": None}  # fmt: skip
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("content", ["weather", "two", "hello", "words"])
def test_streamed_equals_whole(client, content):
    whole = chat(client, content)["choices"][0]
    streamed = chunks(client, content)
    text, calls, reason = joined(streamed)
    assert text == (whole["message"]["content"] or "")
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in whole["message"].get("tool_calls", [])
    ]
    assert reason == whole["finish_reason"]
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {chunk["id"] for chunk in streamed} == {streamed[0]["id"]}
    assert list(calls) == list(range(len(calls))) and len({c["id"] for c in calls.values()}) == len(calls)


def test_arguments_are_streamed_before_the_call_ends(client):
    parts = [
        call["function"]["arguments"]
        for chunk in chunks(client, speculative=False)
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len([part for part in parts if part]) > 3


def test_usage_in_the_stream_when_asked(client):
    streamed = chunks(client, stream_options={"include_usage": True})
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in streamed[:-1])
    assert all("usage" not in chunk for chunk in chunks(client))


def test_limits_stops_and_choices(client):
    cut = chat(client, max_tokens=7)
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 7
    assert joined(chunks(client, max_tokens=7))[2] == "length"
    for streamed in (False, True):
        text = (
            joined(chunks(client, "hello", stop=["how"]))[0]
            if streamed
            else chat(client, "hello", stop=["how"])["choices"][0]["message"]["content"]
        )
        assert text == "Hello there,"
    for stop, shown in [
        ("Oslo", '{"city": "'),
        ('"days": 3}}', '{"city": "Oslo", '),
        ("}", '{"city": "Oslo", "days": 3'),
    ]:
        whole, streamed = chat(client, stop=stop)["choices"][0], joined(chunks(client, stop=[stop]))
        assert whole["message"]["tool_calls"][0]["function"]["arguments"] == shown == streamed[1][0]["arguments"]
        assert whole["finish_reason"] == streamed[2] == "stop"  # a call that was cut short is none
    for script in ("unclosed", "nan"):  # nothing cut these: what came of the call is the answer
        assert chat(client, script)["choices"][0]["finish_reason"] == joined(chunks(client, script))[2] == "tool_calls"
    shown = chat(client, "hello", stop=["how", "there"], include_stop_str_in_output=True)["choices"][0]
    assert shown["message"]["content"] == "Hello there"
    assert joined(chunks(client, "hello", stop=["there"], include_stop_str_in_output=True))[0] == "Hello there"
    many = chat(client, n=3)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in many["choices"]}) == 3


def test_tool_choice_none_and_single_calls(client, scripted_decoder):
    plain = chat(client, tool_choice="none")
    assert plain["choices"][0]["message"]["content"] == CALL and "tool_calls" not in plain["choices"][0]["message"]
    assert plain["metrics"]["speculative_decoding"]["accepted_by_source"].get("schema") is None
    assert plain["usage"]["prompt_tokens"] == chat(client)["usage"]["prompt_tokens"]
    one = chat(client, "two", parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1 and one["choices"][0]["finish_reason"] == "tool_calls"
    assert len(joined(chunks(client, "two", parallel_tool_calls=False))[1]) == 1
    assert len(chat(client, "two")["choices"][0]["message"]["tool_calls"]) == 2


def test_tool_results_in_a_second_turn(client):
    call = chat(client)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "result: sunny"}
    again = chat(client, [{"role": "user", "content": "weather"}, call, result])
    assert again["choices"][0]["message"]["content"] == SCRIPTS["sunny"]


def test_predictions_are_drafts_and_are_counted(client):
    right = chat(client, "hello", tools=None, prediction={"type": "content", "content": SCRIPTS["hello"]})
    details = right["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10 and right["choices"][0]["message"]["content"] == SCRIPTS["hello"]
    wrong = chat(client, "hello", tools=None, prediction={"type": "content", "content": "Something else entirely."})
    assert wrong["choices"][0]["message"]["content"] == SCRIPTS["hello"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_speculation_can_be_switched_off_or_chosen(client):
    off = chat(client, speculative=False)["metrics"]["speculative_decoding"]
    assert off["num_draft_tokens"] == 0 and off["num_rounds"] > 20
    only = chat(client, speculative={"method": "lookup"})["metrics"]["speculative_decoding"]
    assert set(only["accepted_by_source"]) <= {"lookup"}


def test_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    streamed = [
        e for c in chunks(client, logprobs=True) for e in ((c["choices"][0]["logprobs"] or {}).get("content", []))
    ]
    assert len(streamed) == len(entries)


def test_completions(client):
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 400}).json()
    assert response["object"] == "text_completion" and response["choices"][0]["text"] == SCRIPTS["hello"]
    cut = client.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "echo": True, "logprobs": 1}).json()
    assert cut["choices"][0]["finish_reason"] == "length" and cut["choices"][0]["text"].startswith("helloHello")
    assert len(cut["choices"][0]["logprobs"]["tokens"]) == 16
    two = client.post(
        "/v1/completions", json={"model": "tiny", "prompt": ["hello", "weather"], "max_tokens": 400}
    ).json()
    assert [choice["text"] for choice in two["choices"]] == [SCRIPTS["hello"], CALL]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"messages": None}, 400, "messages", "required"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, None, "role must be one of"),
        ({"messages": ["x"]}, 400, "messages[0]", 'messages[0]: must be an object; got "x"'),
        ({"model": None}, 400, "model", "required"),
        ({"model": "gpt"}, 404, "model", "No model 'gpt' here; this server has tiny, alias"),
        ({"tools": []}, 400, "tools", "at least 1"),
        ({"tools": [{"type": "web"}]}, 400, "tools[0].type", "must be \"function\""),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, 400, "tools[0].function.name", "1 to 256"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, 400,
         "tools[0].function.parameters", "got list"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, 400,
         "tools[0].function.parameters", "type \"object\""),
        *(({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **wrong}}}]}, 400,
           "tools[0].function.parameters", words) for wrong, words in [
            ({"properties": []}, "properties must be an object; got list"), ({"properties": "x"}, "got str"),
            ({"properties": {"a": 5}}, "property 'a' must have a schema; got int"),
            ({"required": "a"}, "required must be a list of names; got str")]),
        ({"tools": [{"type": "web"}] * 100}, 400, "tools[0].type", "(100 tools are wrong in all)"),
        ({"messages": [{"role": 5}] * 4000}, 400, "messages[0]", "(4000 messages are wrong in all)"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": {"a": 1}}]}, 400, "messages[1]",
         "content must be text"),
        ({"speculative": "x"}, 400, "speculative", 'must be true or false or an object; got "x"'),
        ({"stop": 5}, 400, "stop", "must be text or a list of texts; got 5"),
        ({"temperature": True}, 400, "temperature", "must be a number; got true"),
        ({"stream_options": 1}, 400, "stream_options", "must be an object; got 1"),
        ({"prediction": {"type": "content", "content": 5}}, 400, "prediction.content", "text or a list; got 5"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, 400, "messages[0]", "must be a list; got str"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, 400, "messages[0]", "tool_calls[0] must"),
        ({"prediction": {"type": "content", "content": [5]}}, 400, "prediction.content[0]", "must be an object; got 5"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools", "Two tools are named"),
        ({"tool_choice": "sometimes"}, 400, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}}, 400, "tool_choice", "not among"),
        ({"tools": None, "tool_choice": "required"}, 400, "tool_choice", "no tools"),
        ({"temperature": -1}, 400, "temperature", "from 0"),
        ({"temperature": "hot"}, 400, "temperature", "number"),
        ({"top_p": 3}, 400, "top_p", "from 0 to 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"n": 99}, 400, "n", "less than or equal to 8"),
        ({"logit_bias": {"word": 1}}, 400, "logit_bias", "token ids"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
        ({"speculative": {"method": "magic"}}, 400, "speculative", "one of ar"),
        ({"response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
        ({"stop": 3}, 400, "stop", "list"),
        ({"stop": ["x"] * 17}, 400, "stop", "at most 16"),
        ({"stop": "x" * 300}, 400, "stop", "at most 256"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "token ids"),
        ({"repetition_penalty": 1e-308}, 400, "repetition_penalty", "from 0.01"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, 400, "messages", "this target takes"),
    ],
)  # fmt: skip
def test_wrong_requests(client, scripted_decoder, change, status, param, words):
    scripted_decoder.target.context_length = 2000
    sent = {key: value for key, value in {**body(), **change}.items() if value is not None}
    for stream in (False, True):
        response = client.post("/v1/chat/completions", json={**sent, "stream": stream})
        error = response.json()["error"]
        assert response.status_code == status, error
        assert words in error["message"] and set(error) == {"message", "type", "param", "code"}
        assert param is None or (error["param"] or "").startswith(param)
        assert len(response.content) < 16_000
    assert chat(client)["choices"][0]["finish_reason"] == "tool_calls"  # the next request works


def test_the_code_for_a_prompt_that_is_too_long(client, scripted_decoder):
    scripted_decoder.target.context_length = 100
    error = client.post("/v1/chat/completions", json=body("long " * 300)).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"


def test_bodies_that_are_no_json_or_too_large(scripted_decoder):
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), max_body_bytes=4000))) as client:
        for raw in (b"{", b"", b"[1", b"\xff\xfe", b"nul", b'{"model": "tiny", "messages": '):
            response = client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        big = client.post("/v1/chat/completions", json=body("x" * 5000))
        assert big.status_code == 413 and "this server takes 4000" in big.json()["error"]["message"]
        assert client.get("/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
        assert client.get("/v1/chat/completions").status_code == 405
        assert chat(client)


def test_half_characters_and_deep_arguments(client):
    raw = json.dumps(body("half \ud800"))
    response = client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "surrogate" in response.json()["error"]["message"]
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "[" * 100_000}}
    history = [{"role": "user", "content": "weather"}, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "result: sunny"}]  # fmt: skip
    assert chat(client, history)["choices"][0]["message"]["content"] == SCRIPTS["sunny"]
    assert client.get("/ui/recent").status_code == 200


def test_sampling_without_a_seed_differs_and_with_one_does_not(tiny_llama):
    with Decoder(tiny_llama, None, budget="fixed") as made, TestClient(
        create_app(made, ServerSettings(("tiny",)))
    ) as client:  # fmt: skip

        def text(**more):
            return chat(client, max_tokens=20, temperature=2.0, tools=None, **more)["choices"][0]["message"]["content"]

        assert len({text() for _ in range(4)}) > 1
        assert text(seed=7) == text(seed=7)
        assert text(seed=2**63 - 1, n=2)


def test_deep_schemas_are_refused(client):
    schema = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response = client.post("/v1/chat/completions", json=body(tools=[tool]))
    assert response.status_code == 400 and "nested deeper" in response.json()["error"]["message"]


def test_api_keys(scripted_decoder):
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), api_keys=("secret",)))) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = client.post("/v1/chat/completions", json=body(), headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/v1/chat/completions", json=body(), headers={"authorization": "Bearer secret"}).is_success
        assert client.get("/v1/models").status_code == 401 and client.get("/health").status_code == 200


def test_a_fault_in_mid_stream_is_an_event_and_the_next_request_works(client, scripted_decoder):
    scripted_decoder.target.fail_at = 3
    with client.stream("POST", "/v1/chat/completions", json=body("long", stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "broken" not in error["message"]
    assert client.post("/v1/chat/completions", json=body("long")).status_code == 500
    scripted_decoder.target.fail_at = None
    assert chat(client)
    assert "ooospec:requests_failed_total 2.0" in client.get("/metrics").text


def test_time_limit(scripted_decoder):
    scripted_decoder.target.delay_s = 0.05
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), time_limit_s=0.3))) as client:
        response = client.post("/v1/chat/completions", json=body("long", speculative=False))
        assert response.status_code == 408 and "longer than 0.3 s" in response.json()["error"]["message"]


# ---------------------------------------------------------------- queue, memory, metrics, pages


def test_memory_and_prefix_are_kept_apart_by_key_and_salt(client, scripted_decoder):
    client.post("/v1/chat/completions", json=body(), headers={"authorization": "Bearer a"})
    client.post("/v1/chat/completions", json=body(), headers={"authorization": "Bearer b"})
    client.post("/v1/chat/completions", json=body(cache_salt="s"), headers={"authorization": "Bearer a"})
    assert len({salt for _, salt in scripted_decoder.target.begun}) == 3
    worker = client.app.state.ooospec.worker
    assert len(worker._memories) == 3


def test_memories_are_bounded_in_bytes(scripted_decoder):
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",)))) as client:
        client.post("/v1/chat/completions", json=body(), headers={"authorization": "Bearer a"})
        (_, one), *_ = client.app.state.ooospec.worker._memories.values()
    assert one > 0
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), memory_bytes=int(2.5 * one)))) as client:
        for key in "abacd":
            answer = client.post("/v1/chat/completions", json=body(), headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        kept = [key.split("\n")[0] for key in client.app.state.ooospec.worker._memories]
        text = client.get("/metrics").text
    assert kept == ["Bearer c", "Bearer d"] and "ooospec:memories_dropped_total 2.0" in text
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), memory_bytes=0))) as client:
        client.post("/v1/chat/completions", json=body())
        assert not client.app.state.ooospec.worker._memories
        assert "ooospec:memory_bytes 0.0" in client.get("/metrics").text


def test_metrics_add_up(client):
    answers = [chat(client, content) for content in ("weather", "two", "hello")]
    text = client.get("/metrics").text

    def metric(name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    speculation = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert metric("vllm:spec_decode_num_drafts_total") == sum(s["num_drafts"] for s in speculation)
    assert metric("vllm:spec_decode_num_draft_tokens_total") == sum(s["num_draft_tokens"] for s in speculation)
    assert metric("vllm:spec_decode_num_accepted_tokens_total") == sum(s["num_accepted_tokens"] for s in speculation)
    assert metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") == sum(
        s["num_accepted_tokens"] for s in speculation
    )
    assert metric("vllm:generation_tokens_total") == sum(a["usage"]["completion_tokens"] for a in answers)
    assert metric("vllm:request_success_total") == 3


def test_small_routes(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny", "alias"]
    assert client.get("/v1/models/alias").json()["id"] == "alias"
    assert client.get("/v1/models/other").status_code == 404
    assert "version" in client.get("/version").json()
    assert "OoO-Spec inspector" in client.get("/ui").text
    chat(client)
    (run,) = client.get("/ui/recent").json()
    assert run["question"] == "weather" and run["rounds"] and "key" not in run
    assert client.get("/ui/recent", headers={"authorization": "Bearer other"}).json() == []


def test_a_real_tiny_model_behind_the_server(tiny_llama):
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        assert isinstance(decoder.target, TargetModel)
        with TestClient(create_app(decoder, ServerSettings(("tiny",)))) as client:
            plain = chat(client, max_tokens=30, speculative=False)
            drafted = chat(client, max_tokens=30)
            assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]
            assert drafted["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            forced = chat(client, max_tokens=200, tool_choice="required")
            arguments = forced["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
            assert forced["choices"][0]["finish_reason"] in ("tool_calls", "length") and arguments.startswith("{")


# ---------------------------------------------------------------- the command, before any model is loaded


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
