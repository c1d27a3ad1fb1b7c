"""Who writes the calls that a sidecar learns: a target on this machine, or any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import httpx

from ooospec.chat.scanner import CallScanner
from ooospec.core import FunctionHint, Hint, SlotHint, Tool
from ooospec.errors import ContextLengthError, OooSpecError, UsageError
from ooospec.runtime import Decoder
from ooospec.train.records import Call, Example

MAX_NEW_TOKENS = 256
GOLD_CHANCE = 0.9


class NoCall(Exception):
    """A teacher's answer holds no call that can be kept; the text says why."""


class TeacherGone(OooSpecError):
    """A teacher cannot be reached, or takes no requests."""


class NoAnswer(TeacherGone):
    """A teacher gave no answer to one request; it may have one for others."""


class Teacher(Protocol):
    """Answers requests greedily."""

    name: str

    def answer(self, example: Example) -> Call:
        """Return the first call of the answer. Raises NoCall, NoAnswer or TeacherGone."""


def checked_call(name: Any, arguments: Any, tools: Mapping[str, Tool]) -> Call:
    """Return a call that fits its tool's schema by names. Raises NoCall: a malformed answer is never repaired."""
    if not isinstance(name, str) or name not in tools:
        raise NoCall("calls an unknown function")
    if not isinstance(arguments, dict):
        raise NoCall("arguments that are no object")
    if not set(arguments) <= {slot.name for slot in tools[name].slots}:
        raise NoCall("arguments that the schema lacks")
    try:  # no NaN, no half of a surrogate pair
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise NoCall("arguments that are no JSON") from None
    return Call(name, arguments)


def gold_hint(example: Example) -> Hint | None:
    """Make a hint of the data set's own first call: most of the teacher's words, so it answers in few rounds."""
    if not example.calls:
        return None
    call = example.calls[0]
    slots = {(call.name, slot): SlotHint(call.name, slot, v, True, GOLD_CHANCE) for slot, v in call.arguments.items()}
    return Hint(FunctionHint((call.name,), (GOLD_CHANCE,)), slots, complete=True)


class LocalTeacher:
    """A target on this machine; the data set's own call is its hint, which in greedy decoding changes no output."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.name = decoder, decoder.loaded.name

    def answer(self, example: Example) -> Call:
        """Decode until the first call of an offered function is complete."""
        try:
            result = self.decoder.generate(
                list(example.messages), list(example.tools) or None, hint=gold_hint(example),
                max_new_tokens=MAX_NEW_TOKENS, parallel_tool_calls=False,
            )  # fmt: skip
        except ContextLengthError:
            raise NoCall("longer than the teacher reads") from None
        if not result.calls:
            raise NoCall("cut off before a call" if result.finish_reason == "length" else "no call")
        call = result.calls[0]
        return checked_call(call.name, dict(call.arguments), {tool.name: tool for tool in example.request()[0]})


def parse_tool_call(message: Mapping[str, Any], tools: Mapping[str, Tool]) -> Call:
    """Read the first call of an OpenAI chat completion's message. Raises NoCall."""
    made = message.get("tool_calls")
    if isinstance(made, list) and made:
        function = made[0].get("function") if isinstance(made[0], dict) else None
        if not isinstance(function, dict):
            raise NoCall("no call")
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError):
            raise NoCall("arguments that are no JSON") from None
        return checked_call(function.get("name"), arguments, tools)
    scanner = CallScanner()
    scanner.feed(str(message.get("content") or ""))
    found = next(iter(scanner.finished()), None)
    if found is None:
        raise NoCall("no call")
    return checked_call(found[0], found[1], tools)


class EndpointTeacher:
    """A model behind an OpenAI-compatible endpoint; safe to ask from several threads."""

    def __init__(
        self,
        base_url: str,
        model: str,
        key: str = "",
        per_minute: float | None = None,
        timeout_s: float = 120.0,
        retries: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`retries` = how often an answer that did not come is asked for again, with doubling pauses."""
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://; got {base_url!r}.")
        if not key.isascii() or not key.isprintable():
            raise UsageError("The key holds characters that no header can; set OPENAI_API_KEY to the key alone.")
        self.name, self.retries = model, retries
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"--base-url {base_url!r} is no URL: {error}.") from None
        self._pause_s = 60.0 / per_minute if per_minute else 0.0
        self._next, self._lock = 0.0, threading.Lock()

    def answer(self, example: Example) -> Call:
        """Ask greedily; wait and ask again where the endpoint is busy, silent or answers nonsense."""
        tools = {tool.name: tool for tool in example.request()[0]}
        body: dict[str, Any] = {"model": self.name, "messages": list(example.messages), "temperature": 0}
        body["max_tokens"] = MAX_NEW_TOKENS
        if example.tools:
            body["tools"] = list(example.tools)
        problem, wait_s = "", 1.0
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(wait_s)
            self._wait_for_turn()
            try:
                response = self._client.post("/chat/completions", json=body)
            except httpx.HTTPError as error:
                problem, wait_s = f"{type(error).__name__}: {error}", min(60.0, 2.0**attempt)
                continue
            if response.status_code == 429 or response.status_code >= 500:
                problem = f"status {response.status_code}"
                wait_s = _retry_after(response, min(60.0, 2.0**attempt))
                continue
            if response.status_code != 200:
                raise _refusal(self.name, response)
            message = _message_of(response)
            if message is None:
                problem, wait_s = "a body that is no chat completion", min(60.0, 2.0**attempt)
                continue
            return parse_tool_call(message, tools)
        raise NoAnswer(f"{self.name} gave no answer in {self.retries + 1} attempts ({problem}); start again later.")

    def _wait_for_turn(self) -> None:
        """Keep to the rate, over all threads."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now) + self._pause_s
            wait_s = self._next - self._pause_s - now
        if wait_s > 0:
            time.sleep(wait_s)


def _message_of(response: httpx.Response) -> dict[str, Any] | None:
    try:
        message = response.json()["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _refusal(name: str, response: httpx.Response) -> TeacherGone:
    """Say what a status other than 200 means: 400, 413 and 422 are about the request, others about the caller."""
    status = response.status_code
    told = " ".join(response.text.split())[:200] or response.reason_phrase
    if status in (400, 413, 422):
        return NoAnswer(f"{name} refused requests: status {status}, {told}")
    advice = "Look at the endpoint's log."
    if status in (401, 403):
        advice = "The key is read from OPENAI_API_KEY."
    elif status == 404 or response.is_redirect:
        advice = "Give --base-url as the API's root, such as http://HOST/v1."
    return TeacherGone(f"{name} refused the request: status {status}, {told}. {advice}")


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    try:
        return min(120.0, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return otherwise
