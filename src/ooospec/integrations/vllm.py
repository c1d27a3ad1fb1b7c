"""OoO-Spec inside vLLM: a proposer for its workers and a middleware for its front end (docs/vllm.md).

    vllm serve MODEL --middleware ooospec.integrations.vllm.OooSpecMiddleware \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 24,
                               "model": "ooospec.integrations.vllm.OooSpecProposer"}'

The middleware submits the sidecar's wave when a chat request arrives, before scheduling, and names it by its prompt's
tokens; the proposer, in the worker, is told of named requests by the sidecar and finds a row's hint by the same key.
Both find the sidecar (`ooospec sidecar`) at OOOSPEC_SIDECAR, tcp://127.0.0.1:7777 by default; without one the proposer
drafts from schemas and earlier calls alone.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version
from transformers import AutoTokenizer, GenerationConfig

from ooospec.chat.codec import TextCodec
from ooospec.chat.template import plain_text, read_request, template_format
from ooospec.errors import OooSpecError, UsageError
from ooospec.integrations.rows import Known, RowDrafter, Situation, prompt_key
from ooospec.sidecar.boilerplate import Boilerplate
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.mailbox import Mailbox

logger = logging.getLogger("vllm.ooospec")
ADDRESS_VARIABLE, DEFAULT_ADDRESS = "OOOSPEC_SIDECAR", "tcp://127.0.0.1:7777"
MEMORY_VARIABLE, STATS_VARIABLE = "OOOSPEC_MEMORY", "OOOSPEC_STATS"
TESTED = (Version("0.32.0"), Version("0.33.0"))
"""vLLM versions from the first to before the second."""
FIRST_WAIT_SECONDS, RETRY_SECONDS = 0.3, 60.0
REPORT_SECONDS, LOG_SECONDS = 1.0, 10.0
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


def sidecar_address() -> str | None:
    """Return where the sidecar is; None where OOOSPEC_SIDECAR says `none`."""
    address = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    return None if address == "none" else address


class _Connection:
    """A client of the sidecar, which may come, go and come again; nothing waits for it after the start."""

    def __init__(self, made: Callable[[SidecarClient], None] | None = None) -> None:
        self._address, self._made = sidecar_address(), made
        self._client: SidecarClient | None = None
        self._retry_at = 0.0

    def get(self) -> SidecarClient | None:
        """Return the client; None where there is none to have."""
        if self._client is None and self._address is not None and time.monotonic() >= self._retry_at:
            first, self._retry_at = not self._retry_at, time.monotonic() + RETRY_SECONDS
            try:
                self._client = SidecarClient(self._address, patient=False)
            except OooSpecError as error:  # no such address
                if first:
                    logger.warning("No hints: %s", error)
                return None
            if not self._client.greet(FIRST_WAIT_SECONDS):
                logger.warning("No sidecar at %s yet: no hints until `ooospec sidecar` runs there.", self._address)
            if self._made is not None:
                self._made(self._client)
        return self._client

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None


# ---------------------------------------------------------------- the worker's side


class _Hints:
    """Hints of the requests that front ends named."""

    def __init__(self) -> None:
        self._connection = _Connection(SidecarClient.subscribe)
        self._connection.get()

    def drain(self) -> None:
        """Read what has come, so that nothing is lost for want of room."""
        client = self._connection.get()
        if client is not None:
            client.receive()

    def find(self, key: bytes) -> Known | None:
        """Look a request up; None for one that was not named."""
        client = self._connection.get()
        mailbox = client.announced(key) if client is not None else None
        return Known(mailbox.tools, mailbox.poll, mailbox.ask) if mailbox is not None else None


class OooSpecProposer:
    """What vLLM's `custom_class` hook instantiates in every worker; `propose` never raises.

    The scheduler takes the drafts of one rank and hands them to all, so ranks cannot disagree; others draft nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises UsageError for a vLLM that was not tested, or a target whose state cannot be rolled back."""
        check_version(version_of_vllm())
        model = vllm_config.model_config
        if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
            raise UsageError(
                f"{model.model} keeps a recurrent state (Mamba or linear attention), which vLLM does not roll back for "
                "drafts of varying length; OoO-Spec does not run with it. Serve it without --speculative-config."
            )
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise UsageError(
                "With the external_launcher backend every rank schedules by itself: all would have to draft the same "
                "at the same time; hints come when they come. Use another backend, or leave out --speculative-config."
            )
        self.max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        _keep_asking(vllm_config.speculative_config, self.max_tokens)
        self._drafts = parallel.rank % parallel.tensor_parallel_size == 0
        """Whether the scheduler takes this rank's drafts."""
        self._hints = _Hints() if self._drafts else None
        remember = os.environ.get(MEMORY_VARIABLE, "1") != "0"
        self.drafter = RowDrafter(
            read_situation(model), self.max_tokens, int(model.max_model_len), self._hints, remember
        )
        self._replica = f".{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
        self._report_at = self._log_at = 0.0
        self._reported = ""
        if self._drafts:
            atexit.register(self._report)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return the draft of every row: at most `num_speculative_tokens` ids each, [] where nothing pays."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._hints is None:
            return drafts
        try:
            self._hints.drain()
        except Exception:
            self.drafter.fault("the hints of a step")
        try:
            ran = _tokens_run(slot_mappings)
            drafts = self.drafter.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, ran)
            if time.monotonic() > self._report_at:
                self._report()
        except Exception:
            self.drafter.fault("a step")
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model in this process."""

    def _report(self) -> None:
        """Log the counts when they changed, and write them to the file that OOOSPEC_STATS names."""
        now = time.monotonic()
        self._report_at = now + REPORT_SECONDS
        text, path = json.dumps(dict(sorted(self.drafter.counts.items()))), os.environ.get(STATS_VARIABLE)
        if text == self._reported:
            return
        self._reported = text
        if now >= self._log_at:
            self._log_at = now + LOG_SECONDS
            logger.info("OoO-Spec: %s", text)
        if path:
            try:
                temporary = Path(f"{path}{self._replica}.tmp")
                temporary.write_text(text + "\n", "utf-8")
                temporary.replace(f"{path}{self._replica}")
            except OSError as error:
                logger.warning("%s=%s cannot be written: %s", STATS_VARIABLE, path, error)


def _keep_asking(speculative: Any, most: int) -> None:
    """Have vLLM ask for drafts up to the end of a row.

    Otherwise it verifies `num_speculative_tokens` zeros in every row as soon as one row of the batch is so near the
    longest length that a full draft would not fit. The drafter looks at each row's room itself.
    """
    longer = copy.copy(speculative.draft_model_config)
    longer.max_model_len += most
    speculative.draft_model_config = longer


def _tokens_run(slot_mappings: Any) -> int | None:
    """Return how many tokens the step before ran, padding included; None where vLLM does not tell."""
    parts = slot_mappings if isinstance(slot_mappings, list) else [slot_mappings]
    if not parts or not all(parts):
        return None
    return sum(int(next(iter(part.values())).shape[0]) for part in parts)


def version_of_vllm() -> str:
    """Return the installed version, whichever wheel carries it."""
    import vllm

    return str(vllm.__version__)


def check_version(found: str) -> None:
    """Raise UsageError for a vLLM outside the tested range: the hook's signature differs between versions."""
    first, before = TESTED
    if not first <= Version(Version(found).base_version) < before:
        raise UsageError(
            f"OoO-Spec {version('ooo-spec')} was tested with vLLM from {first} to before {before}; this is {found}. "
            "Install one of those, or serve without --speculative-config."
        )


def read_situation(model: Any) -> Situation:
    """Load the target's tokenizer and read its call format (vLLM's ModelConfig). Raises UsageError for a slow one."""
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=bool(model.trust_remote_code)
    )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UsageError(f"The tokenizer of {model.tokenizer} has no fast form; OoO-Spec needs one.")
    try:
        ended = GenerationConfig.from_pretrained(model.model, revision=model.revision).eos_token_id
    except OSError:
        ended = None
    ended = tokenizer.eos_token_id if ended is None else ended
    ids = list(ended) if isinstance(ended, list | tuple) else [] if ended is None else [int(ended)]
    call_format, _ = template_format(tokenizer)
    reasons = "<think>" in str(tokenizer.chat_template or "")
    codec = TextCodec(tokenizer.backend_tokenizer, ids)
    return Situation(codec, call_format.name, reasons, Path(model.model).name, int(model.get_vocab_size()))


# ---------------------------------------------------------------- the front end's side


class Announcer:
    """Submits waves and names them."""

    def __init__(self) -> None:
        self._connection = _Connection()
        self._connection.get()
        self._boilerplate = Boilerplate() if os.environ.get(MEMORY_VARIABLE, "1") != "0" else None

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
        if mailbox is not None:
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
