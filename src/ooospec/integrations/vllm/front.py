"""The front end's side: waves start when requests arrive, and are named by the tokens of their prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from ooospec.chat.template import plain_text, read_request
from ooospec.errors import OooSpecError
from ooospec.integrations.rows import prompt_key
from ooospec.integrations.vllm.connection import Connection, logger, remembers
from ooospec.sidecar.boilerplate import Boilerplate
from ooospec.sidecar.mailbox import Mailbox

KEPT_WAVES = 256
TOKENIZE_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
TEMPLATE_FIELDS = ("reasoning_effort", "documents")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Announcer:
    """Submits waves and names them."""

    def __init__(self) -> None:
        self._connection = Connection()
        self._connection.get()
        self._boilerplate = Boilerplate() if remembers() else None

    def submit(self, messages: Any, tools: Any) -> Mailbox | None:
        """Start the wave of a chat request; None for one without tools, or without a sidecar to have."""
        client = self._connection.get()
        if client is None:
            return None
        try:
            _, known, said = read_request(messages, tools)
        except OooSpecError:
            return None  # vLLM says what is wrong with it
        if not known:
            return None
        turns = [(str(m["role"]), plain_text(m)) for m in said]
        return client.submit(known, self._boilerplate.move_up(turns) if self._boilerplate is not None else turns)

    def name(self, mailbox: Mailbox, prompt_ids: Sequence[int]) -> None:
        """Tell the workers whose wave it is."""
        client = self._connection.get()
        if client is not None:
            client.name(mailbox, prompt_key(prompt_ids))
            client.receive()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


_offline: Announcer | None = None
_announced: deque[Mailbox] = deque()


def announce(tokenizer: Any, messages: Any, tools: Any = None, **template: Any) -> bool:
    """Start the wave of a request that `LLM.chat` gets next, with the same messages and tools.

    `tokenizer` = `llm.get_tokenizer()`; `template` = further arguments of its chat template. False where there is
    nothing to start: no tools, or no sidecar. Of requests that are not answered yet the last 256 keep their hints.
    Without it `LLM.chat` drafts from the tools in the prompt alone.
    """
    global _offline
    _offline = _offline or Announcer()
    mailbox = _offline.submit(list(messages), tools)
    if mailbox is None or mailbox.hint.failed:
        return False
    _announced.append(mailbox)
    if len(_announced) > KEPT_WAVES:
        _announced.popleft().close()
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True, **template)
    _offline.name(mailbox, ids["input_ids"] if isinstance(ids, Mapping) else ids)
    return True


def _has_media(messages: Any) -> bool:
    """Tell whether messages hold images or the like, which `/tokenize` would fetch and process a second time."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS for part in parts)


class OooSpecMiddleware:
    """ASGI middleware for `vllm serve --middleware`: reads chat requests along with the server, changes nothing."""

    def __init__(self, app: App) -> None:
        self.app, self._announcer = app, Announcer()
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on; start its wave the moment the server has read the body of a chat request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            self._announcer.close()
            return
        if scope["type"] != "http" or scope.get("method") != "POST" or not scope["path"].endswith("/chat/completions"):
            await self.app(scope, receive, send)
            return
        body, mailbox = bytearray(), None

        async def read() -> MutableMapping[str, Any]:
            nonlocal mailbox
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    mailbox = self._start(scope, bytes(body))
                    body.clear()
            return message

        try:
            await self.app(scope, read, send)
        finally:
            if mailbox is not None:
                mailbox.close()  # a wave that still runs is of no use any more

    def _start(self, scope: MutableMapping[str, Any], body: bytes) -> Mailbox | None:
        """Submit the wave of a chat request; None where there is none to submit. Never raises."""
        try:
            asked = msgspec.json.decode(body)
            if not isinstance(asked, dict) or asked.get("tool_choice") == "none" or _has_media(asked.get("messages")):
                return None
            mailbox = self._announcer.submit(asked.get("messages"), asked.get("tools"))
        except msgspec.DecodeError:
            return None  # vLLM says what is wrong with it
        except Exception:
            logger.exception("a request could not be read; it goes on without hints")
            return None
        if mailbox is not None and not mailbox.hint.failed:
            task = asyncio.ensure_future(self._name(scope, asked, mailbox))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return mailbox

    async def _name(self, scope: MutableMapping[str, Any], asked: Mapping[str, Any], mailbox: Mailbox) -> None:
        """Have the server itself tokenize the request as it will for decoding, through its own route."""
        known = {name: asked[name] for name in TOKENIZE_FIELDS if name in asked}
        more = {name: asked[name] for name in TEMPLATE_FIELDS if asked.get(name) is not None}
        if "reasoning_effort" in more:
            more.setdefault("enable_thinking", more["reasoning_effort"] != "none")
        if more:  # what chat requests hand to the template by fields of their own
            known["chat_template_kwargs"] = {**more, **(asked.get("chat_template_kwargs") or {})}
        sent = msgspec.json.encode(known)
        path = scope["path"].removesuffix("/v1/chat/completions") + "/tokenize"
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
        inner = {
            **scope, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [*headers, (b"content-length", str(len(sent)).encode())],
        }  # fmt: skip
        got, status = bytearray(), 0
        over = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            if not over.is_set():
                over.set()
                return {"type": "http.request", "body": sent, "more_body": False}
            await asyncio.Event().wait()  # the client stays until the answer is there
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            got.extend(message.get("body", b""))

        try:
            await self.app(inner, receive, send)
            if status == 200:
                self._announcer.name(mailbox, msgspec.json.decode(bytes(got))["tokens"])
        except Exception:
            logger.exception("a request could not be named; it goes on without hints")
