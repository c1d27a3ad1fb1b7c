"""What the server answers to wrong requests, wrong keys and faults: OpenAI's shapes, and it goes on."""

import json

import pytest
from fastapi.testclient import TestClient

from ooospec.runtime import Decoder
from ooospec.server.app import ServerSettings, create_app
from served import SCRIPTS, WEATHER, body, chat


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
        ({"functions": [{"name": "f"}]}, 400, "functions", "use tools and tool_choice"),
        ({"function_call": {"name": "f"}}, 400, "function_call", "use tools and tool_choice"),
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


@pytest.mark.parametrize(("change", "param"), [({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix")])
def test_what_completions_lack_is_refused(client, change, param):
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    error = client.post("/v1/completions", json={**asked, **change}).json()["error"]
    assert error["param"] == param and "not supported" in error["message"]
    assert client.post("/v1/completions", json={**asked, "best_of": 2, "n": 2}).status_code == 200


def test_the_code_for_a_prompt_that_is_too_long(client, scripted_decoder):
    scripted_decoder.target.context_length = 100
    error = client.post("/v1/chat/completions", json=body("long " * 300)).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    raw = client.post("/v1/completions", json={"model": "tiny", "prompt": "long " * 300}).json()["error"]
    assert raw["code"] == "context_length_exceeded" and raw["param"] == "prompt"


def test_bodies_that_are_no_json_or_too_large(scripted_decoder):
    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny",), max_body_bytes=4000))) as client:
        for raw in (b"{", b"", b"[1", b"\xff\xfe", b"nul", b'{"model": "tiny", "messages": '):
            response = client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        big = client.post("/v1/chat/completions", json=body("x" * 5000))
        assert 'ooospec:error_responses_total{status="413"} 1.0' in client.get("/metrics").text
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
        assert 'ooospec:error_responses_total{status="401"} 4.0' in client.get("/metrics").text


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
