"""Put the pieces together: load a target, start a sidecar, decode requests."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import psutil
import torch

from ooospec.chat.scanner import CallScanner
from ooospec.chat.template import Conversation, render
from ooospec.config import DEFAULT_MAX_NEW_TOKENS, DEFAULT_SIDECAR, DEFAULT_TARGET, cache_dir
from ooospec.core import Commit, DecodeContext, Hint, ToolCall
from ooospec.engine import Budget, decode
from ooospec.methods import Memory, proposers
from ooospec.models.progress import Progress, Silent
from ooospec.models.resolver import resolve_model
from ooospec.sidecar.client import Mailbox, SidecarClient
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.stopping import Limits
from ooospec.target.cost import cached_cost, cost_key
from ooospec.target.loading import LoadedModel, load_model
from ooospec.target.model import TargetModel
from ooospec.target.prefix_cache import PrefixCache
from ooospec.verify import Chooser, Greedy, Sampler

READY_TIMEOUT_S = 120.0
CHUNK_BUSY, CHUNK_IDLE = 64, 512
"""Prompt tokens per prefill pass while the sidecar works, and when it does not."""


@dataclass(frozen=True, slots=True)
class Placement:
    """CPU threads: the target's while the sidecar works and when it does not, and the sidecar's."""

    target_busy: int
    target_idle: int
    sidecar: int

    @classmethod
    def shared(cls, cores: int | None = None) -> Placement:
        """Everything on one device: the sidecar borrows cores while its wave runs."""
        cores = cores or psutil.cpu_count(logical=False) or os.cpu_count() or 1
        sidecar = max(1, cores // 4)
        return cls(max(1, cores - sidecar), cores, sidecar)

    @classmethod
    def split(cls, cores: int | None = None) -> Placement:
        """Target and sidecar own half of the cores each, always: stands for two devices."""
        half = max(1, (cores or psutil.cpu_count(logical=False) or 2) // 2)
        return cls(half, half, half)


@dataclass(frozen=True, slots=True)
class HintReport:
    """What became of a request's hint."""

    ready_round: int | None
    """First round that could use the function choice; None = it never came in time."""
    ready_ms: float | None
    complete_ms: float | None
    payload_bytes: int
    function: str | None
    slots: Mapping[str, Any]
    """Predicted arguments of the predicted function."""
    prefill_ms: int = 0
    wave_ms: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request."""

    calls: tuple[ToolCall, ...]
    text: str
    output_ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Commit, ...]
    prompt_tokens: int
    cached_tokens: int
    total_ms: float
    hint: HintReport | None = None
    warnings: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Verify passes, the one that ends the prefill included."""
        return len(self.rounds)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round, the bonus token included."""
        return len(self.output_ids) / max(1, len(self.rounds))

    @property
    def prefill_ms(self) -> float:
        """From arrival to the end of the first round, whose pass also caches the prompt's last chunk."""
        first = self.rounds[0]
        return first.start_ms + first.propose_ms + first.verify_ms

    @property
    def decode_ms(self) -> float:
        """From the end of the first round to the last committed token."""
        return self.total_ms - self.prefill_ms

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Committed tokens by the proposer whose draft held them; `target` = bonus tokens."""
        return dict(Counter(source for commit in self.rounds for source in commit.sources))

    @property
    def tree_nodes(self) -> list[int]:
        """Drafted nodes of every round."""
        return [commit.drafted for commit in self.rounds]

    def to_dict(self) -> dict[str, Any]:
        """Give the plain form that `--json` prints."""
        hint = self.hint
        return {
            "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in self.calls],
            "text": self.text,
            "output_ids": list(self.output_ids),
            "finish_reason": self.finish_reason,
            "num_rounds": self.num_rounds,
            "acceptance_length": round(self.acceptance_length, 3),
            "accepted_by_source": self.accepted_by_source,
            "prefill_ms": round(self.prefill_ms, 1),
            "decode_ms": round(self.decode_ms, 1),
            "total_ms": round(self.total_ms, 1),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hint": None
            if hint is None
            else {name: getattr(hint, name) for name in HintReport.__slots__},
            "tree_nodes": self.tree_nodes,
            "warnings": dict(self.warnings),
        }


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
        self._mailbox: Mailbox | None = None
        if sidecar is not None:
            self._client = self._reach(sidecar, adapter, dtype, progress)
        try:
            self.loaded = self._load(target, dtype, device, progress)
            self.target = TargetModel(self.loaded.model, PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None)
            if self.loaded.device == "cpu":
                torch.set_num_threads(self.placement.target_idle)
            self.budget = Budget(max_nodes)
            if measured_budget:
                self.budget = self._measure(max_nodes, progress)
            if self.loaded.device == "cpu":
                self.target.threads = self._threads
            if self._client is not None:
                progress.update("start sidecar", 0, 1)
                self._client.wait_ready(READY_TIMEOUT_S)
                progress.update("start sidecar", 1, 1)
        except BaseException:
            self.close()
            raise
        self.memories: dict[str, Memory] = {}

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
        dtype = dtype if dtype != "float32" else "bfloat16"  # the sidecar's precision changes no output
        return SidecarClient(
            process=SidecarProcess(SidecarSpec(path, sidecar, adapter, dtype, threads=self.placement.sidecar))
        )

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
        """Choose small chunks while the sidecar works, to take its cores back soon after it ends."""
        mailbox = self._mailbox
        return CHUNK_BUSY if mailbox is not None and mailbox.working else CHUNK_IDLE

    # ------------------------------------------------------------------ requests

    def stream(self, messages: Any, tools: Any = None, **options: Any) -> Iterator[Commit]:
        """Decode a request and yield its commits; options as in `generate`."""
        yield from _Request(self, messages, tools, **options).run()

    def generate(self, messages: Any, tools: Any = None, **options: Any) -> Generation:
        """Decode a request to its end.

        Options: method ("ar", "lookup", "toolspec", "ooo"), max_new_tokens, temperature (0 = greedy), seed, stop
        (strings), salt (prefix caches of different salts never meet), hint (a Hint to use instead of the sidecar).
        Raises UsageError for input that cannot be decoded; a failing sidecar never raises.
        """
        request = _Request(self, messages, tools, **options)
        for _ in request.run():
            pass
        return request.result()

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

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        stop: Sequence[str] = (),
        salt: str = "",
        hint: Hint | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.clock = time.perf_counter()
        self.decoder, self.method, self.salt, self.fixed_hint = decoder, method, salt, hint
        self.conversation: Conversation = render(decoder.loaded.tokenizer, messages, tools)
        self.limits = Limits(max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop))
        self.chooser: Chooser = Sampler(temperature, seed) if temperature > 0 else Greedy()
        self.budget = budget or decoder.budget
        self.output: list[int] = []
        self.commits: list[Commit] = []
        self.mailbox: Mailbox | None = None
        self.ready_round: int | None = None
        self.cached_tokens = 0
        self.total_ms = 0.0

    def run(self) -> Iterator[Commit]:
        """Launch the wave, then decode."""
        decoder, conversation = self.decoder, self.conversation
        wanted = self.method == "ooo" and self.fixed_hint is None and conversation.tools
        if decoder._client is not None and wanted:
            turns = [(str(m["role"]), plain_text(m)) for m in conversation.messages]
            self.mailbox = decoder._client.submit(conversation.tools, turns)
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
        return HintReport(
            self.ready_round, ready, complete, hint.payload_bytes, function, slots,
            *((wave.prefill_ms, wave.wave_ms, wave.steps) if wave is not None else ()),
        )  # fmt: skip


def plain_text(message: Mapping[str, Any]) -> str:
    """Return what a message says, tool calls and tool results included, for the sidecar to read."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    text = str(content or "")
    for call in message.get("tool_calls") or []:
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        text += f"\ncall {function.get('name')}: {function.get('arguments')}"
    return f"result: {text}" if message.get("role") == "tool" else text
