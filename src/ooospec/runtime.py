"""Put the pieces together: load a target, start a sidecar, decode requests."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from ooospec.chat.scanner import CallScanner
from ooospec.chat.template import Conversation, check_messages, plain_text, render
from ooospec.config import DEFAULT_MAX_NEW_TOKENS, DEFAULT_SIDECAR, DEFAULT_TARGET, cache_dir
from ooospec.core import Commit, DecodeContext, Hint, ToolCall
from ooospec.engine import Budget, decode
from ooospec.errors import UsageError
from ooospec.generation import Generation, HintReport
from ooospec.methods import Memory, proposers
from ooospec.models.progress import Progress, Silent
from ooospec.models.resolver import resolve_model
from ooospec.placement import Placement
from ooospec.sidecar.client import Mailbox, SidecarClient
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.stopping import Limits
from ooospec.target.cost import cached_cost, cost_key
from ooospec.target.loading import LoadedModel, load_model
from ooospec.target.model import TargetModel
from ooospec.target.prefix_cache import PrefixCache, common_prefix
from ooospec.verify import Chooser, Greedy, Sampler

READY_TIMEOUT_S = 120.0
CHUNK_BUSY, CHUNK_IDLE = 64, 512
"""Prompt tokens per prefill pass while the sidecar works, and when it does not."""


class Decoder:
    """A target with a sidecar beside it. Decodes one request at a time.

    `target` and `sidecar` are model names (see `resolve_model`); a sidecar `tcp://host:port` attaches to a running
    one, and None goes without. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        target: str | LoadedModel = DEFAULT_TARGET,
        sidecar: str | None = DEFAULT_SIDECAR,
        *,
        adapter: str | None = None,
        sidecar_dtype: str = "auto",
        dtype: str = "bfloat16",
        device: str | None = None,
        placement: Placement | None = None,
        max_nodes: int = 64,
        measured_budget: bool = True,
        prefix_cache_bytes: int = 1 << 30,
        progress: Progress | None = None,
    ) -> None:
        progress = progress or Silent()
        self.placement = placement or Placement.shared()
        self._client: SidecarClient | None = None
        self._warm: tuple[tuple[str, list[int]], PrefixCache] | None = None
        self._mailbox: Mailbox | None = None
        self._active: _Request | None = None
        if sidecar is not None:
            self._client = self._reach(sidecar, adapter, sidecar_dtype, progress)
        self.memories: dict[str, Memory] = {}
        try:
            self.placement.apply()
            self.loaded = self._load(target, dtype, device, progress)
            cache = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
            self.target = TargetModel(self.loaded.model, cache)
            if self._client is not None:  # before anything is timed: a sidecar that still loads uses the cores
                progress.update("start sidecar", 0, 1)
                self._client.wait_ready(READY_TIMEOUT_S)
                progress.update("start sidecar", 1, 1)
            self.budget = self._measure(max_nodes, progress) if measured_budget else Budget(max_nodes)
            if self.loaded.device == "cpu":
                self.target.threads = self._threads
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _load(target: str | LoadedModel, dtype: str, device: str | None, progress: Progress) -> LoadedModel:
        if isinstance(target, LoadedModel):
            return target
        path = resolve_model(target, progress)
        progress.update(f"load {target}", 0, 1)
        loaded = load_model(path, target, dtype, device)
        progress.update(f"load {target}", 1, 1)
        return loaded

    def _reach(self, sidecar: str, adapter: str | None, dtype: str, progress: Progress) -> SidecarClient:
        if "://" in sidecar:
            return SidecarClient(address=sidecar)
        path = resolve_model(sidecar, progress)
        place = self.placement
        spec = SidecarSpec(path, sidecar, adapter, dtype, threads=place.sidecar, cores=place.sidecar_cores)
        return SidecarClient(process=SidecarProcess(spec))

    def _measure(self, max_nodes: int, progress: Progress) -> Budget:
        key = cost_key(self.loaded.name, self.loaded.dtype, self.loaded.device)
        file = cache_dir() / "cost_curves.json"

        def report(done: int, total: int) -> None:
            progress.update("measure verify cost", done, total)

        return Budget(max_nodes, cached_cost(file, key, self.target, report))

    def _threads(self) -> int:
        mailbox = self._mailbox
        if mailbox is None:
            return self.placement.target_idle
        mailbox.poll()
        return self.placement.target_busy if mailbox.working else self.placement.target_idle

    def _prefill_chunk(self) -> int:
        """On a CPU, choose small chunks while the sidecar works, to take its cores back soon after it ends."""
        busy = self.loaded.device == "cpu" and self._threads() < self.placement.target_idle
        return CHUNK_BUSY if busy else CHUNK_IDLE

    # ------------------------------------------------------------------ requests

    def stream(self, messages: Any, tools: Any = None, **options: Any) -> Iterator[Commit]:
        """Decode a request and yield its commits; options as in `generate`."""
        yield from _Request(self, messages, tools, **options).run()

    def generate(self, messages: Any, tools: Any = None, *, prefix: str = "auto", **options: Any) -> Generation:
        """Decode a request to its end.

        Options: method ("ar", "lookup", "toolspec", "ooo"), max_new_tokens, temperature (0 = greedy), seed, stop
        (strings), salt (prefix caches of different salts never meet), hint (a Hint to use instead of the sidecar).
        `prefix` sets the condition for measurements: "cold" uses no KV entries of earlier requests, "warm" exactly
        those of the tools and the system prompt, prefilled before the clock starts; both leave the cache as it was.
        Raises UsageError for input that cannot be decoded; a failing sidecar never raises.
        """
        if prefix not in ("auto", "cold", "warm"):
            raise UsageError(f"prefix must be auto, cold or warm; got {prefix!r}.")
        kept = self.target.prefix_cache
        try:
            if prefix != "auto":
                self.target.prefix_cache = self._warm_prefix(messages, tools, **options) if prefix == "warm" else None
            request = _Request(self, messages, tools, fresh=prefix == "cold", **options)
            for _ in request.run():
                pass
            return request.result()
        finally:
            self.target.prefix_cache = kept

    def _warm_prefix(self, messages: Any, tools: Any, **options: Any) -> PrefixCache:
        """Prefill what other requests with these tools and this system prompt share, on the sidecar's side too."""
        other = [*check_messages(messages)[:-1], {"role": "user", "content": "Hello."}]
        salt = str(options.get("salt", ""))
        rendered = [render(self.loaded.tokenizer, m, tools) for m in (messages, other)]
        ids, other_ids = (self.loaded.codec.encode(conversation.prompt) for conversation in rendered)
        shared = ids[: common_prefix(ids, other_ids)]
        if self._warm is None or self._warm[0] != (salt, shared):
            warm = PrefixCache()
            self.target.prefix_cache = None
            self.target.begin([*shared, 0])
            self.target.prefill(shared)
            warm.put(shared, self.target.cache, salt)
            warm.read_only = True
            self._warm = (salt, shared), warm
        if self._client is not None and options.get("method", "ooo") == "ooo" and rendered[1].tools:
            self._client.submit(rendered[1].tools, [("user", "Hello.")]).wait(READY_TIMEOUT_S)
        return self._warm[1]

    @property
    def sidecar_name(self) -> str:
        """Name of the sidecar's model; empty without one."""
        return self._client.model if self._client is not None else ""

    @property
    def warnings(self) -> dict[str, int]:
        """Faults of the sidecar, counted by kind."""
        return dict(self._client.warnings) if self._client is not None else {}

    def top_gap(self, ids: Sequence[int]) -> tuple[float, float]:
        """Return (difference of the two largest logits after `ids`, the largest), by one plain forward pass."""
        tokens = torch.tensor([list(ids)], device=self.loaded.model.device)
        with torch.inference_mode():
            logits = self.loaded.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.float().topk(2).values.tolist()
        return best[0] - best[1], best[0]

    def close(self) -> None:
        """End the sidecar that this decoder started and let go of its connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self.placement.undo()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Request:
    """One request on its way through the decoder."""

    def __init__(
        self,
        decoder: Decoder,
        messages: Any,
        tools: Any = None,
        *,
        method: str = "ooo",
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        salt: str = "",
        hint: Hint | None = None,
        budget: Budget | None = None,
        fresh: bool = False,
    ) -> None:
        self.clock = time.perf_counter()
        self.decoder, self.method, self.salt, self.fixed_hint = decoder, method, salt, hint
        self.conversation: Conversation = render(decoder.loaded.tokenizer, messages, tools)
        self.limits = Limits(max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop or ()))
        self.chooser: Chooser = Sampler(temperature, seed) if temperature > 0 else Greedy()
        self.budget = budget or decoder.budget
        self.fresh = fresh
        self.output: list[int] = []
        self.commits: list[Commit] = []
        self.mailbox: Mailbox | None = None
        self.ready_round: int | None = None
        self.cached_tokens = 0
        self.total_ms = 0.0

    def run(self) -> Iterator[Commit]:
        """Launch the wave, then decode."""
        decoder, conversation = self.decoder, self.conversation
        if decoder._active is not None:
            raise UsageError(
                "This decoder is decoding another request; it takes one at a time. Finish or close that stream first."
            )
        decoder._active = self
        try:
            yield from self._run(decoder, conversation)
        finally:
            decoder._active = None

    def _run(self, decoder: Decoder, conversation: Conversation) -> Iterator[Commit]:
        wanted = self.method == "ooo" and self.fixed_hint is None and conversation.tools
        if decoder._client is not None and wanted:
            turns = [(str(m["role"]), plain_text(m)) for m in conversation.messages]
            self.mailbox = decoder._client.submit(conversation.tools, turns, self.fresh)
        memory = decoder.memories.setdefault(self.method, Memory())
        sources = proposers(self.method, memory, self._poll)
        prompt_ids = decoder.loaded.codec.encode(conversation.prompt)
        key = f"{decoder.loaded.name}/{conversation.style_key}"
        context = DecodeContext(decoder.loaded.codec, prompt_ids, self.output, conversation.tools, key)
        decoder._mailbox = self.mailbox
        try:
            for commit in decode(
                decoder.target, context, self.output, sources, self.chooser, self.limits, self.budget,
                prefill_chunk=decoder._prefill_chunk, salt=self.salt, clock=self.clock,
            ):  # fmt: skip
                self.total_ms = (time.perf_counter() - self.clock) * 1e3
                self.cached_tokens = decoder.target.cached_tokens
                self.commits.append(replace(commit, top=None, prompt_state=None))
                yield commit
        finally:
            decoder._mailbox = None
            if self.mailbox is not None:
                self.mailbox.poll()
                self.mailbox.close()

    def _poll(self) -> Hint | None:
        hint = self.fixed_hint if self.mailbox is None else self.mailbox.poll()
        if hint is not None and hint.function is not None and self.ready_round is None:
            self.ready_round = len(self.commits)
        return hint

    def result(self) -> Generation:
        """Sum the request up."""
        codec = self.decoder.loaded.codec
        shown = [token for token in self.output if token not in codec.eos_ids]
        text = codec.decode(shown)
        scanner = CallScanner()
        scanner.feed(text)
        calls = tuple(ToolCall(*found) for found in scanner.finished()) if self.conversation.tools else ()
        return Generation(
            calls=calls,
            text=text,
            output_ids=tuple(self.output),
            finish_reason=self.commits[-1].finish_reason or "length",
            rounds=tuple(self.commits),
            prompt_tokens=len(self.decoder.loaded.codec.encode(self.conversation.prompt)),
            cached_tokens=self.cached_tokens,
            total_ms=self.total_ms,
            hint=self._hint_report(),
            warnings=self.decoder.warnings,
        )

    def _hint_report(self) -> HintReport | None:
        hint = self.fixed_hint if self.mailbox is None else self.mailbox.hint
        if hint is None:
            return None
        function = hint.function.names[0] if hint.function is not None and hint.function.names else None
        slots = {s.slot: s.value for s in hint.slots.values() if s.tool == function and s.present}
        ready = self.mailbox.ready_ms if self.mailbox is not None else 0.0
        complete = self.mailbox.complete_ms if self.mailbox is not None else 0.0
        wave = self.mailbox.wave if self.mailbox is not None else None
        later = [(commit.start_ms, commit.verify_ms) for commit in self.commits if not commit.lead_tokens]
        end = complete if complete is not None else math.inf
        busy = [ms for start, ms in later if start < end] if self.mailbox is not None else []
        idle = [ms for start, ms in later if start >= end]
        return HintReport(
            self.ready_round, ready, complete, hint.payload_bytes, function, slots,
            *((wave.prefill_ms, wave.wave_ms, wave.steps) if wave is not None else (0, 0, 0)),
            busy_round_ms=statistics.median(busy) if busy else None,
            idle_round_ms=statistics.median(idle) if idle else None,
        )  # fmt: skip
