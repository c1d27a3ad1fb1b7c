"""The server over the wire: real clients and agents, aborts, queue, load, fuzz, traces."""

import asyncio
import json
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from load import run_load
from ooospec.server.app import ServerSettings, create_app
from ooospec.server.bodies import ChatBody
from ooospec.server.tracing import Tracing
from served import SCRIPTS, Served, body

FIELDS = sorted(ChatBody.model_fields)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["user", "function", "auto", "required", "json_schema", "tiny", "get_weather"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "function", "name", "parameters", "role", "content", "schema", "json_schema", "text",
                         "tool_calls", "properties", "method", "include_usage", "7", "x"]), inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


def test_openais_client(scripted_decoder):
    with Served(scripted_decoder) as served:
        client = openai.OpenAI(base_url=served.url, api_key="x", max_retries=0)
        answer = client.chat.completions.create(**body())
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
        with client.chat.completions.stream(**body("two")) as stream:
            for _ in stream:
                pass
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "São José 😀"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**body(temperature=-3))
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**body(), "model": "x"})
        assert [model.id for model in client.models.list()] == ["tiny"]

        async def both():
            async with openai.AsyncOpenAI(base_url=served.url, api_key="x", max_retries=0) as async_client:
                asked = [async_client.chat.completions.create(**body(c)) for c in ("weather", "hello", "two")]
                return await asyncio.gather(*asked)

        one, two, three = asyncio.run(both())
        assert one.choices[0].message.tool_calls and two.choices[0].message.content == SCRIPTS["hello"]
        assert len(three.choices[0].message.tool_calls) == 2


def test_a_client_that_goes_away_ends_the_work(scripted_decoder):
    scripted_decoder.target.delay_s = 0.02
    with Served(scripted_decoder) as served:
        sent = body("long", speculative=False)
        with httpx.stream("POST", f"{served.url}/chat/completions", json={**sent, "stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/chat/completions", json=sent, timeout=0.3)
        start = time.monotonic()
        answer = httpx.post(f"{served.url}/chat/completions", json=body(), timeout=30)
        assert answer.status_code == 200 and time.monotonic() - start < 3
        text = httpx.get(served.url.removesuffix("/v1") + "/metrics").text
        assert "ooospec:requests_aborted_total 2.0" in text


def test_the_first_signal_finishes_what_runs_and_the_second_drops_it(scripted_decoder):
    scripted_decoder.target.delay_s = 0.02
    sent = {**body("long", speculative=False), "stream": True}
    for signals in (1, 2):
        with Served(scripted_decoder) as served, httpx.stream(
            "POST", f"{served.url}/chat/completions", json=sent, timeout=60
        ) as response:  # fmt: skip
            lines = response.iter_lines()
            next(lines)
            for _ in range(signals):
                served.server.handle_exit(signal.SIGINT, None)
                served.server.handle_exit(signal.SIGINT, None)  # at once: the same one, passed on
                time.sleep(0.6)
            shown = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            served.thread.join(20)
            assert not served.thread.is_alive()
        assert shown[-1] == "[DONE]"
        if signals == 1:
            assert len(shown) > 300 and "error" not in shown[-2]
        else:
            assert json.loads(shown[-2])["error"]["message"].startswith("The server was stopped")


def test_a_second_signal_ends_a_server_that_waits_for_half_a_request(scripted_decoder):
    with Served(scripted_decoder) as served:
        host, port = served.url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
            time.sleep(0.2)
            for _ in range(2):
                served.server.handle_exit(signal.SIGTERM, None)
                time.sleep(0.6)
            served.thread.join(10)
            assert not served.thread.is_alive()


def test_the_time_limit_counts_the_queue(scripted_decoder):
    scripted_decoder.target.delay_s = 0.02
    with Served(scripted_decoder, time_limit_s=1.0) as served:
        sent = body("long", speculative=False)
        first = threading.Thread(target=lambda: httpx.post(f"{served.url}/chat/completions", json=sent, timeout=60))
        first.start()
        time.sleep(0.1)
        start = time.monotonic()
        second = httpx.post(f"{served.url}/chat/completions", json=sent, timeout=60)
        first.join()
        assert second.status_code == 408 and time.monotonic() - start < 5
        metrics, end = served.url.removesuffix("/v1") + "/metrics", time.monotonic() + 10
        wanted = {"ooospec:requests_timed_out_total 2.0", "vllm:num_requests_running 0.0"}
        while not (done := wanted <= set(httpx.get(metrics).text.splitlines())) and time.monotonic() < end:
            time.sleep(0.02)
        assert done


def test_what_is_wrong_is_said_at_once_not_when_its_turn_has_come(scripted_decoder):
    scripted_decoder.target.delay_s = 0.02
    wrong = (
        {"temperature": -1}, {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        {"response_format": {"type": "x"}}, {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    )  # fmt: skip
    with Served(scripted_decoder) as served:
        sent = {**body("long", speculative=False), "stream": True}
        with httpx.stream("POST", f"{served.url}/chat/completions", json=sent, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            metrics = f"{served.url.removesuffix('/v1')}/metrics"
            assert "vllm:num_requests_running 1.0" in httpx.get(metrics).text
            for more in wrong:
                assert httpx.post(f"{served.url}/chat/completions", json={**body(), **more}).status_code == 400
            raw = {"model": "tiny", "prompt": "hi", "top_p": 7}
            assert httpx.post(f"{served.url}/completions", json=raw).json()["error"]["param"] == "top_p"
            left = [line for line in lines if line.startswith("data: {")]
        text = httpx.get(metrics).text
    assert len(left) > 100  # the request before them was still running
    assert 'ooospec:error_responses_total{status="400"} 7.0' in text


def test_clients_that_left_the_queue_do_not_fill_it(scripted_decoder):
    scripted_decoder.target.delay_s = 0.02
    with Served(scripted_decoder, max_queue=2) as served:

        def post(timeout, content="long"):
            sent = body(content, speculative=False)
            try:
                return httpx.post(f"{served.url}/chat/completions", json=sent, timeout=timeout).status_code
            except httpx.ReadTimeout:
                return None

        threads = [threading.Thread(target=post, args=(seconds,)) for seconds in (3.0, 0.4, 0.4)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        time.sleep(0.8)
        assert post(30, "hello") == 200
        for thread in threads:
            thread.join()


def test_a_full_queue_says_when_to_come_back_and_keys_take_turns(scripted_decoder):
    scripted_decoder.target.delay_s = 0.01
    with Served(scripted_decoder, max_queue=2) as served:

        def post(key):
            sent = body("hello", speculative=False)
            return httpx.post(f"{served.url}/chat/completions", json=sent, headers={"authorization": key}, timeout=60)

        threads, answers = [], []
        for key in ("a", "a", "a", "b", "a", "a"):
            threads.append(threading.Thread(target=lambda k=key: answers.append((k, post(k)))))
            threads[-1].start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        refused = [answer for _, answer in answers if answer.status_code == 429]
        assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert all(answer.json()["error"]["code"] == "queue_full" for answer in refused)
        assert all(answer.status_code in (200, 429) for _, answer in answers)


def test_the_next_key_is_served_before_the_same_one_again(scripted_decoder):
    scripted_decoder.target.delay_s = 0.01
    with Served(scripted_decoder) as served:

        def post(key):
            sent = body("hello", speculative=False, tools=None)
            httpx.post(
                f"{served.url}/chat/completions", json=sent, headers={"authorization": f"Bearer {key}"}, timeout=60
            )

        threads = []
        for key in ("a", "a", "a", "b"):
            threads.append(threading.Thread(target=post, args=(key,)))
            threads[-1].start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
    order = [salt.split()[1] for _, salt in scripted_decoder.target.begun]
    assert order[0] == "a" and order.index("b") <= 2


def test_an_agent_of_pydantic_ai_holds_a_conversation_of_two_steps(scripted_decoder):
    """The framework's own loop: it calls the tool, sends the result back and gets the words."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []

    def get_weather(city: str, days: int = 1) -> str:
        asked.append((city, days))
        return "sunny"

    async def conversations(url):
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as own:
            provider = OpenAIProvider(openai_client=own)
            agent = Agent(OpenAIChatModel("tiny", provider=provider), tools=[get_weather])
            whole = await agent.run("weather")
            async with agent.run_stream("weather") as run:
                return whole.output, "".join([text async for text in run.stream_text(delta=True)])

    with Served(scripted_decoder) as served:
        assert asyncio.run(conversations(served.url)) == (SCRIPTS["sunny"], SCRIPTS["sunny"])
    assert asked == [("Oslo", 3)] * 2


def test_traces_hold_times_and_counts_and_no_words(scripted_decoder):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    app = create_app(scripted_decoder, ServerSettings(("tiny",)), Tracing(provider, "tiny"))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with TestClient(app) as client:
        client.post("/v1/chat/completions", json=body(), headers={"traceparent": parent})
    spans = {span.name: span for span in kept.get_finished_spans()}
    whole = spans["llm_request"]
    assert set(spans) == {"llm_request", "prefill", "decode"} and f"{whole.context.trace_id:032x}" == parent[3:35]
    assert all(whole.start_time <= span.start_time <= span.end_time <= whole.end_time for span in spans.values())
    assert whole.attributes["gen_ai.usage.completion_tokens"] == len(scripted_decoder.target.script)
    assert whole.attributes["ooospec.accepted.schema"] > 0
    assert "Oslo" not in str([span.to_json() for span in spans.values()])


def test_spans_reach_a_collector(scripted_decoder):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
        with TestClient(
            create_app(scripted_decoder, ServerSettings(("tiny",), otlp_traces_endpoint=endpoint))
        ) as client:
            client.post("/v1/chat/completions", json=body())
        collector.shutdown()
        thread.join()
    assert received[0][0] == "/v1/traces" and b"llm_request" in received[0][1]


@pytest.mark.parametrize(
    "body_bytes", [b"", b"\xff\xfe", b"null", b"[]", b"{", b'"x"', b"0", b"{}" * 1000, b"[" * 50000]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_raw_bytes_are_refused_and_the_next_request_works(client, path, body_bytes):
    for kind in ("application/json", "text/plain", "multipart/form-data", "application/json; charset=utf-16"):
        answer = client.post(path, content=body_bytes, headers={"content-type": kind})
        assert answer.status_code in (400, 422) and answer.json()["error"]["message"], (kind, answer.text)
    assert client.post("/v1/chat/completions", json=body()).status_code == 200


@hypothesis_settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bodies_with_odd_values_never_break_the_server(client, data):
    """Any field of a request with any JSON value: an answer or a 4xx that says why."""
    sent = body(max_tokens=5)
    for name in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        sent[name] = data.draw(ODD)
    answer = client.post("/v1/chat/completions", json=sent)
    assert answer.status_code < 500, (sent, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"], sent


@pytest.mark.filterwarnings("ignore")
def test_its_own_description_holds_under_schemathesis(scripted_decoder):
    import schemathesis
    from schemathesis.checks import not_a_server_error

    with Served(scripted_decoder, time_limit_s=5) as served:
        schema = schemathesis.openapi.from_url(served.url.removesuffix("/v1") + "/openapi.json")
        for operation in schema.get_all_operations():
            cases = operation.ok().as_strategy()

            @hypothesis_settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
            @given(case=cases)
            def check(case):
                case.validate_response(case.call(), checks=[not_a_server_error])

            check()
        assert httpx.post(f"{served.url}/chat/completions", json=body()).status_code == 200


def test_load_with_aborts_and_a_killed_sidecar(folder_of_tiny):
    report = run_load(120, connections=8, kill_every=30, sidecar=folder_of_tiny)
    assert report.wrong == [] and report.answered + report.aborted == 120 and report.kills >= 2
    assert report.counters_differ == []


def test_bfcls_own_openai_handler_runs_against_it(scripted_decoder, monkeypatch):
    """Where bfcl-eval is installed: its handler for OpenAI's API, as it is."""
    pytest.importorskip("bfcl_eval", reason="needs bfcl-eval")
    handlers = pytest.importorskip("bfcl_eval.model_handler.api_inference.openai_completion")
    with Served(scripted_decoder) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        monkeypatch.setenv("OPENAI_API_KEY", "x")
        handler = handlers.OpenAICompletionsHandler("tiny", 0.0, "tiny-FC", True)
        function = {"name": "get_weather", "description": "Weather", "parameters": {
            "type": "dict", "properties": {"city": {"type": "string", "description": "City"},
            "days": {"type": "integer", "description": "Days"}}, "required": ["city"]}}  # fmt: skip
        entry = {
            "id": "simple_python_0",
            "question": [[{"role": "user", "content": "weather"}]],
            "function": [function],
        }
        result, facts = handler.inference(entry, include_input_log=False, exclude_state_log=True)
        assert handler.decode_ast(result, "Python", False) == [{"get_weather": {"city": "Oslo", "days": 3}}]
        assert facts["output_token_count"] == len(scripted_decoder.target.script)
        entry = {**entry, "question": [[{"role": "user", "content": "hello"}]]}
        assert handler.inference(entry, include_input_log=False, exclude_state_log=True)[0] == SCRIPTS["hello"]
        handler.client.close()
