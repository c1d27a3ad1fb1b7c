"""The server with a scripted target: OpenAI's shapes, streaming as made, errors, queue, aborts, metrics."""

import pytest
from fastapi.testclient import TestClient

from ooospec.runtime import Decoder
from ooospec.server.app import ServerSettings, create_app
from ooospec.target.model import TargetModel
from served import CALL, SCRIPTS, body, chat, chunks, joined

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


def test_control_tokens_are_no_text_unless_asked_for(client, scripted_decoder, monkeypatch):
    codec = scripted_decoder.loaded.codec
    token = codec.encode("th")[0]
    monkeypatch.setattr(codec, "_special", {token: "<|control|>"})
    for more, words in (
        ({"tools": None}, "Hello ere, how are you?"),
        ({"tool_choice": "none"}, "Hello ere, how are you?"),
        ({"tools": None, "skip_special_tokens": False}, "Hello there, how are you?"),
        ({}, "Hello there, how are you?"),  # a value may hold anything
    ):
        assert chat(client, "hello", **more)["choices"][0]["message"]["content"] == words
        assert joined(chunks(client, "hello", **more))[0] == words


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
    assert details["rejected_prediction_tokens"] == 0
    for size in (30, 200):  # over several rounds, and cut short
        long = chat(client, "long", tools=None, prediction={"type": "content", "content": "word " * size})
        details = long["usage"]["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] <= 1 and details["accepted_prediction_tokens"] >= size
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
    assert metric("vllm:prefix_cache_queries_total") > 0
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
