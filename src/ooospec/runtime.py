"""Put the pieces together: load a target, start a sidecar, decode requests."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from ooospec.calibration import Calibrator
from ooospec.chat.answer import AnswerStream, Content, Reasoning, ThinkSplitter
from ooospec.chat.choice import FirstCall, read_response_format, read_tool_choice
from ooospec.chat.formats.registry import format_named
from ooospec.chat.schema import openai_tools
from ooospec.chat.template import Conversation, RawPrompt, check_messages, plain_text, render
from ooospec.config import DEFAULT_MAX_NEW_TOKENS, DEFAULT_SIDECAR, DEFAULT_TARGET, cache_dir
from ooospec.constraint import AfterThinking, Grammars
from ooospec.core import Commit, DecodeContext, Hint, ToolCall
from ooospec.engine import decode
from ooospec.errors import RequestStopped, UsageError
from ooospec.generation import Generation, HintReport
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.models.progress import Progress, Silent
from ooospec.models.resolver import resolve_model
from ooospec.placement import Placement
from ooospec.planner import Budget, check_policy
from ooospec.proposers.prediction import PredictedText
from ooospec.sampling import Constraint, Sampling, make_chooser
from ooospec.sidecar.adapter import AUTO, find_adapter
from ooospec.sidecar.client import Mailbox, SidecarClient
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.sidecar.prompt import NEUTRAL_DIALOGUE
from ooospec.stopping import Limits
from ooospec.target.cost import CostCurve, cached_cost, cost_key
from ooospec.target.draft import DraftModel
from ooospec.target.loading import LoadedModel, check_adapter, load_model, parse_device, parse_dtype
from ooospec.target.model import TargetModel
from ooospec.target.prefix_cache import PrefixCache, common_prefix
from ooospec.target.stock import stock_decode

READY_TIMEOUT_S = 120.0
TURN_S = 1.5
"""Longest time that a target which shares its cores waits for the sidecar's wave."""
CHUNK_BUSY, CHUNK_IDLE = 64, 512
"""Prompt tokens per prefill pass while the sidecar works on cores that the target will take back, and otherwise."""
LAST_CHUNK = 8
"""Prompt tokens left for the pass of the first tree while a hint is expected, so that it can still come in time."""


class Decoder:
    """A target with a sidecar beside it. Decodes one request at a time.

    `target` and `sidecar` are model names (see `resolve_model`); a sidecar `tcp://host:port` attaches to a running
    one, and None goes without. `adapter` is the folder of a trained adapter for the sidecar, "auto" for the one that
    ships for it, or None. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        target: str | LoadedModel = DEFAULT_TARGET,
        sidecar: str | None = DEFAULT_SIDECAR,
        *,
        adapter: str | None = AUTO,
        sidecar_dtype: str = "auto",
        dtype: str = "bfloat16",
        device: str | None = None,
        placement: Placement | None = None,
        draft: str | None = None,
        draft_optional: bool = False,
        max_nodes: int | None = None,
        budget: str = "measured",
        call_format: str | None = None,
        prefix_cache_bytes: int = 1 << 30,
        progress: Progress | None = None,
    ) -> None:
        progress = progress or Silent()
        parse_dtype(dtype)
        parse_device(device)
        check_policy(budget)
        self.call_format = format_named(call_format).name if call_format is not None else None
        adapter = find_adapter(adapter, sidecar or "")
        check_adapter(adapter)
        if adapter and (sidecar is None or "://" in sidecar):
            given = "there is none" if sidecar is None else f"the one at {sidecar} has its own settings"
            raise UsageError(f"An adapter belongs to a sidecar started here, and {given}; leave the adapter out.")
        self.placement = placement or Placement.shared()
        self._client: SidecarClient | None = None
        self._warm: tuple[tuple[str, list[int]], list[PrefixCache]] | None = None
        self._mailbox: Mailbox | None = None
        self._active: Request | None = None
        if sidecar is not None:
            self._client = self._reach(sidecar, adapter, sidecar_dtype, progress)
        self.memories: dict[str, Memory] = {}
        self._grammars: Grammars | None = None
        self.default_method = "ooo"
        """Method of requests that name none."""
        try:
            self.placement.apply()
            self.loaded = self._load(target, dtype, device, progress)
            self.target = TargetModel(self.loaded.model)
            self.draft = self._load_draft(draft, draft_optional, progress) if draft is not None else None
            for model in self._models():
                model.prefix_cache = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
            if self._client is not None:  # before anything is timed: a sidecar that still loads uses the cores
                progress.update("start sidecar", 0, 1)
                self._client.wait_ready(READY_TIMEOUT_S)
                progress.update("start sidecar", 1, 1)
            self.max_nodes, self.budget = max_nodes, budget
            self.cost = self._measure(progress) if budget == "measured" else None
            for model in self._models():
                model.threads = self._threads if self.loaded.device == "cpu" else None
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
        if "://" in sidecar:  # on other cores than the target's
            self.placement = replace(self.placement, target_busy=self.placement.target_idle)
            return SidecarClient(address=sidecar)
        path = resolve_model(sidecar, progress)
        place = self.placement
        spec = SidecarSpec(path, sidecar, adapter, dtype, threads=place.sidecar, cores=place.sidecar_cores)
        return SidecarClient(process=SidecarProcess(spec))

    def _load_draft(self, name: str, optional: bool, progress: Progress) -> DraftModel | None:
        """Load the draft model; None for an `optional` one that does not fit the target."""
        if name == self.loaded.name and optional:
            return None
        loaded = self._load(name, self.loaded.dtype, self.loaded.device, progress)
        try:
            return DraftModel(loaded, self.loaded)
        except UsageError:
            if not optional:
                raise
            return None

    def _models(self) -> list[TargetModel]:
        """List the models that keep a prefix: the target, and the draft model if there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft.model]

    def _measure(self, progress: Progress) -> CostCurve:
        key = cost_key(self.loaded.name, self.loaded.dtype, self.loaded.device)
        file = cache_dir() / "cost_curves.json"

        def report(done: int, total: int) -> None:
            progress.update("measure verify cost", done, total)

        return cached_cost(file, key, self.target, report)

    def _threads(self) -> int:
        mailbox = self._mailbox
        if mailbox is None or not self.placement.target_busy:
            return self.placement.target_idle
        mailbox.poll()
        return self.placement.target_busy if mailbox.working else self.placement.target_idle

    def _take_turns(self, mailbox: Mailbox | None) -> None:
        """On cores that target and sidecar share by turns, let the sidecar finish first, then stop it."""
        if mailbox is not None and not self.placement.target_busy and self.loaded.device == "cpu":
            mailbox.take_turn(TURN_S)

    def _next_chunk(self, left: int) -> int:
        """Say how many of the prompt tokens left to prefill before the next look into the mailbox."""
        if self._active is not None:
            self._active.check()
        if self._mailbox is None or not self._mailbox.working or left <= CHUNK_BUSY:
            return CHUNK_IDLE if left > CHUNK_IDLE else 0
        takes_back = self.loaded.device == "cpu" and self._threads() < self.placement.target_idle
        return min(CHUNK_BUSY if takes_back else CHUNK_IDLE, left - LAST_CHUNK)  # leave some for the first tree's pass

    # ------------------------------------------------------------------ requests

    def stream(self, messages: Any, tools: Any = None, **options: Any) -> Iterator[Commit]:
        """Decode a request and yield its commits; options as in `generate`."""
        yield from Request(self, messages, tools, **options).run()

    def generate(self, messages: Any, tools: Any = None, *, prefix: str = "auto", **options: Any) -> Generation:
        """Decode a request to its end.

        Options: method (a name of `ooospec.methods.METHODS`), max_new_tokens, those of `ooospec.sampling.Sampling`
        (temperature, top_p, top_k, min_p, penalties, logit_bias, seed, logprobs; default: greedy), stop (strings),
        salt (prefix caches of different salts never meet), hint (a Hint to use instead of the sidecar), memory (a
        Memory instead of the method's own), tool_choice, parallel_tool_calls and response_format as in OpenAI's API,
        prediction (text that the output will probably contain), max_nodes (bound of the candidate tree), budget
        ("measured": only nodes that pay by the measured cost curve; "fixed": the method's published tree size).
        `prefix` sets the condition for measurements: "cold" uses no KV entries of earlier requests, "warm" exactly
        those of the tools and the system prompt, prefilled before the clock starts; both leave the cache as it was.
        Raises UsageError for input that cannot be decoded; a failing sidecar never raises.
        """
        if prefix not in ("auto", "cold", "warm"):
            raise UsageError(f"prefix must be auto, cold or warm; got {prefix!r}.")
        kept = [model.prefix_cache for model in self._models()]
        try:
            if prefix == "cold":
                for model in self._models():
                    model.prefix_cache = None
            elif prefix == "warm":
                self._warm_prefix(messages, tools, **options)
            request = Request(self, messages, tools, fresh=prefix == "cold", **options)
            for _ in request.run():
                pass
            return request.result()
        finally:
            for model, cache in zip(self._models(), kept, strict=True):
                model.prefix_cache = cache

    def _warm_prefix(self, messages: Any, tools: Any, **options: Any) -> None:
        """Prefill what other requests with these tools and this system prompt share, on the sidecar's side too."""
        other = [*check_messages(messages)[:-1], {"role": "user", "content": NEUTRAL_DIALOGUE[0].text}]
        salt = str(options.get("salt", ""))
        rendered = [render(self.loaded.tokenizer, m, tools) for m in (messages, other)]
        ids, other_ids = (self.loaded.codec.encode(conversation.prompt) for conversation in rendered)
        shared = ids[: common_prefix(ids, other_ids)]
        if self._warm is None or self._warm[0] != (salt, shared):
            self._warm = (salt, shared), [model.prefilled(shared, salt) for model in self._models()]
        for model, cache in zip(self._models(), self._warm[1], strict=True):
            model.prefix_cache = cache
        if (
            self._client is not None
            and method_named(options.get("method") or self.default_method).hints
            and rendered[1].tools
        ):
            mailbox = self._client.submit(rendered[1].tools, [(turn.role, turn.text) for turn in NEUTRAL_DIALOGUE])
            mailbox.wait(READY_TIMEOUT_S)
            mailbox.close()

    def request(self, messages: Any, tools: Any = None, **options: Any) -> Request:
        """Build a request without decoding it yet; options as in `generate`, and `messages` may be a RawPrompt."""
        return Request(self, messages, tools, **options)

    @property
    def waves_run_ahead(self) -> bool:
        """Tell whether the sidecar can work for waiting requests without taking the target's cores."""
        return self._client is not None and (self.loaded.device != "cpu" or self.placement.target_busy > 0)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this target."""
        if self._grammars is None:
            self._grammars = Grammars(self.loaded)
        return self._grammars

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


class Request:
    """One request on its way through a decoder: built, launched, run, summed up."""

    def __init__(
        self,
        decoder: Decoder,
        messages: Any,
        tools: Any = None,
        *,
        method: str | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] | None = None,
        salt: str = "",
        hint: Hint | None = None,
        memory: Memory | None = None,
        budget: str | None = None,
        fresh: bool = False,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        prediction: str | None = None,
        max_nodes: int | None = None,
        clock: float | None = None,
        **sampling: Any,
    ) -> None:
        """`clock` = `time.perf_counter()` at arrival, where that was earlier."""
        self.clock = time.perf_counter() if clock is None else clock
        self.decoder, self.salt, self.fixed_hint = decoder, salt, hint
        self.method = method_named(method or decoder.default_method)
        self.memory = memory if memory is not None else decoder.memories.setdefault(self.method.name, Memory())
        if isinstance(messages, RawPrompt):
            self.conversation: Conversation = messages.conversation()
        else:
            self.conversation = render(decoder.loaded.tokenizer, messages, tools, decoder.call_format)
        self.prompt_ids = list(messages.ids) if isinstance(messages, RawPrompt) else []
        self.call_format = format_named(self.conversation.call_format)
        self.choice = read_tool_choice(tool_choice, self.conversation.tools)
        self.tools = self.choice.active(self.conversation.tools)
        self.constraint = self._constraint(tools, read_response_format(response_format))
        codec = decoder.loaded.codec
        watched = self.tools and not parallel_tool_calls
        single = (
            FirstCall(codec, self.call_format.scanner(self.tools), self.tools, self._splitter()) if watched else None
        )
        self.limits = Limits(max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop or ()), single)
        self.sampling = Sampling.of(sampling)
        policy = check_policy(budget) if budget is not None else decoder.budget
        nodes = max_nodes or decoder.max_nodes or self.method.max_nodes
        self.prediction = prediction
        self._predicted: PredictedText | None = None
        self.budget = Budget(nodes, decoder.cost if policy == "measured" else None)
        if self.method.stock and (not self.sampling.is_plain or self.constraint is not None or single is not None):
            raise UsageError("Method stock only decodes greedily to the end; leave other options out or the method.")
        self.fresh = fresh
        self.output: list[int] = []
        self.commits: list[Commit] = []
        self.mailbox: Mailbox | None = None
        self.deadline = math.inf
        """`time.monotonic()` after which the request is stopped."""
        self._stopped = False
        self.ready_round: int | None = None
        self.cached_tokens = 0
        self.total_ms = 0.0

    def _constraint(self, tools: Any, schema: Any) -> Constraint | None:
        """Return what the answer must be after its reasoning, if the request says so."""
        inner = self._grammar(tools, schema)
        if inner is None or not self.conversation.thinking:
            return inner
        return AfterThinking(inner, self.decoder.loaded.codec, self._splitter())

    def _splitter(self) -> ThinkSplitter:
        return ThinkSplitter.of(self.call_format, self.conversation.thinking, self.conversation.reasons)

    def _grammar(self, tools: Any, schema: Any) -> Constraint | None:
        grammars, conversation = self.decoder.grammars, self.conversation
        if schema is not None:
            if self.tools:
                raise UsageError("response_format and tools cannot be combined; use tool_choice none or leave one out.")
            return grammars.schema(schema)
        if not self.choice.forced:
            return None
        if not tools:
            raise UsageError("tool_choice required needs tools in the request itself, not in the system prompt.")
        functions = [tool["function"] for tool in openai_tools(tools)]
        wanted = [function for function in functions if not self.choice.name or function["name"] == self.choice.name]
        return grammars.calls(self.call_format, conversation.prompt, wanted)

    def stop(self) -> None:
        """Ask from any thread that the request end: `run` raises RequestStopped within one pass of the target."""
        self._stopped = True

    def check(self) -> None:
        """Raise RequestStopped if the request was asked to end or its time is over."""
        if self._stopped or time.monotonic() > self.deadline:
            raise RequestStopped("The request was stopped.")

    def close(self) -> None:
        """Let go of the sidecar's wave, if one was launched."""
        if self.mailbox is not None:
            self.mailbox.close()

    def launch(self) -> None:
        """Start the sidecar's wave, if it is not started yet and there is one to start."""
        client = self.decoder._client
        wanted = self.method.hints and self.fixed_hint is None and self.tools
        if client is not None and wanted and self.mailbox is None:
            turns = [(str(m["role"]), plain_text(m)) for m in self.conversation.messages]
            self.mailbox = client.submit(self.tools, turns, self.fresh)

    def run(self) -> Generator[Commit, None, None]:
        """Launch the wave, then decode. Raises RequestStopped."""
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
        self.launch()
        if not self.prompt_ids:
            raw = conversation.style_key == "raw"
            self.prompt_ids = decoder.loaded.codec.encode(conversation.prompt, special=raw)
        key = f"{decoder.loaded.name}/{conversation.style_key}"
        context = DecodeContext(
            decoder.loaded.codec, self.prompt_ids, self.output, self.tools, key, conversation.call_format,
            conversation.thinking, conversation.reasons,
        )  # fmt: skip
        decoder._mailbox = self.mailbox
        decoder._take_turns(self.mailbox)
        try:
            for commit in self._commits(context):
                self.total_ms = (time.perf_counter() - self.clock) * 1e3
                self.cached_tokens = decoder.target.cached_tokens
                self.commits.append(replace(commit, top=None, prompt_top=None, prompt_state=None))
                yield commit
                if not commit.finish_reason:
                    self.check()
        finally:
            decoder._mailbox = None
            if self.mailbox is not None:
                self.mailbox.poll()
                self.mailbox.close()

    def _commits(self, context: DecodeContext) -> Iterator[Commit]:
        decoder = self.decoder
        if self.method.stock:
            return stock_decode(decoder.target, context, self.output, self.limits, self.salt, self.clock)
        chooser = make_chooser(self.sampling, context.prompt_ids, self.constraint)
        draft = decoder.draft.proposer if decoder.draft is not None else None
        sources = self.method.build(Setup(self.memory, self._poll, draft))
        if self.prediction and self.method.name != "ar":
            self._predicted = PredictedText(self.prediction)
            sources = [self._predicted, *sources]
        return decode(
            decoder.target, context, self.output, sources, chooser, self.limits, self.budget,
            calibrator=self.memory.part(Calibrator), next_chunk=decoder._next_chunk, salt=self.salt,
            clock=self.clock,
        )  # fmt: skip

    def _poll(self) -> Hint | None:
        hint = self.fixed_hint if self.mailbox is None else self.mailbox.poll()
        if hint is not None and hint.function is not None and self.ready_round is None:
            self.ready_round = len(self.commits)
        return hint

    def answer_stream(self) -> AnswerStream:
        """Return what splits the answer's text into content, reasoning and calls."""
        conversation = self.conversation
        return AnswerStream(self.call_format, self.tools, conversation.thinking, conversation.reasons)

    def result(self) -> Generation:
        """Sum the request up."""
        codec = self.decoder.loaded.codec
        shown = [token for token in self.output if token not in codec.eos_ids]
        text = codec.decode(shown)
        answer = self.answer_stream()
        events = [*answer.push(text), *answer.close()]
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = tuple(ToolCall(*found) for found in answer.calls)
        return Generation(
            calls=calls,
            text=text,
            content="".join(event.text for event in events if isinstance(event, Content)),
            reasoning=reasoning,
            reasoning_tokens=len(codec.encode(reasoning)) if reasoning else 0,
            predicted_tokens=self._predicted.offered if self._predicted is not None else 0,
            output_ids=tuple(self.output),
            finish_reason=self.commits[-1].finish_reason or "length",
            rounds=tuple(self.commits),
            prompt_tokens=len(self.prompt_ids),
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
