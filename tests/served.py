"""A server around a scripted target, and ways to ask it."""

import json
import threading
import time

import uvicorn

from ooospec.server.app import ServerSettings, create_app
from ooospec.server.flags import make_server
from scripted import ScriptedTarget

SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
SCRIPTS = {
    "weather": CALL,
    "two": f"{CALL}\n" + CALL.replace("Oslo", "São José 😀"),
    "unclosed": CALL[:-1],
    "nan": '{"name": "get_weather", "arguments": {"city": "Oslo", "days": NaN}}',
    "hello": "Hello there, how are you?",
    "words": f"Let me look.\n{CALL}",
    "long": "word " * 400,
    "letters": CALL.replace("Oslo", "qwxzvkjyp"),
    "sunny": "It is fine in Oslo.",
}


class ByPrompt(ScriptedTarget):
    """Writes the script whose key the prompt holds last."""

    def __init__(self, codec):
        super().__init__([], codec.vocab_size)
        self.codec, self.prefix_cache, self.begun, self.delay_s, self.fail_at = codec, None, [], 0.0, None
        self.verified = 0

    def begin(self, prompt_ids, salt=""):
        text = self.codec.decode(list(prompt_ids))
        key = max((k for k in SCRIPTS if k in text), key=text.rfind, default="hello")
        self.script = [*self.codec.encode(SCRIPTS[key]), self.codec.eos_id]
        self.begun.append((key, salt))
        self.verified = 0
        return super().begin(prompt_ids, salt)

    def verify(self, tree, lead=(), all_rows=False):
        time.sleep(self.delay_s)
        self.verified += 1
        if self.fail_at == self.verified:
            raise RuntimeError("broken")
        return super().verify(tree, lead, all_rows)


def body(content="weather", **more):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "tools": [WEATHER], **more}


def chat(client, content="weather", **more):
    response = client.post("/v1/chat/completions", json=body(content, **more))
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client, content="weather", **more):
    with client.stream("POST", "/v1/chat/completions", json=body(content, stream=True, **more)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(streamed):
    content, calls, reason = "", {}, None
    for chunk in streamed:
        for choice in chunk.get("choices", []):
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                known = calls.setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
            reason = choice["finish_reason"] or reason
    return content, calls, reason


class Served:
    """The app under uvicorn on a free loopback port."""

    def __init__(self, decoder, **settings):
        app = create_app(decoder, ServerSettings(("tiny",), **settings))
        self.server = make_server(uvicorn.Config(app, port=0, log_level="error"), app.state.ooospec.worker)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
