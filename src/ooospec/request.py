"""One request on its way through a decoder, from the rendered prompt to the finished answer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ooospec.calibration import Calibrator
from ooospec.chat.answer import THINK, AnswerStream, Content, Reasoning, ThinkSplitter
from ooospec.chat.choice import FirstCall, ToolChoice, read_response_format, read_tool_choice
from ooospec.chat.formats.registry import format_named
from ooospec.chat.schema import openai_tools
from ooospec.chat.template import Conversation, RawPrompt, check_content, plain_text, read_request, render
from ooospec.config import DEFAULT_MAX_NEW_TOKENS
from ooospec.constraint import AfterThinking, StrictCalls
from ooospec.core import Commit, DecodeContext, Hint, Tool, ToolCall
from ooospec.engine import decode
from ooospec.errors import RequestStopped, UsageError
from ooospec.generation import Generation, HintReport
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.planner import Budget, check_policy
from ooospec.proposers.prediction import PredictedText
from ooospec.sampling import Constraint, Sampling, make_chooser
from ooospec.sidecar.boilerplate import Boilerplate
from ooospec.sidecar.mailbox import Mailbox
from ooospec.stopping import Limits
from ooospec.target.stock import stock_decode

if TYPE_CHECKING:
    from ooospec.runtime import Decoder


MAX_VAIN_QUESTIONS = 2
"""Where the target waits for answers, a request asks no more after so many in a row that did not pay."""
ANSWER_PAYS = 4
"""So many accepted tokens of a hint are worth waiting for it: about a pass of the target or two."""

ENOUGH_OUTPUT = 4 * ANSWER_PAYS
"""Tokens behind which an answer that was cut at its longest length tells whether its hint was of use."""


def check_request(messages: Any, tools: Any = None, **options: Any) -> None:
    """Raise what `Request` would raise for the same arguments, as far as it takes neither decoder nor time to tell."""
    checked, known, _ = read_request(messages, tools)
    check_content(checked)
    schema = read_response_format(options.get("response_format"))
    _check_grammar(read_tool_choice(options.get("tool_choice"), known), tools, known, schema)
    Sampling.of({name: options[name] for name in Sampling.__dataclass_fields__ if name in options})


def _check_grammar(choice: ToolChoice, given: Any, known: Sequence[Tool], schema: Any) -> None:
    """Raise UsageError where what the answer must be is asked for twice, or needs tools that were not `given`."""
    if schema is not None and choice.active(known):
        raise UsageError("response_format and tools cannot be combined; use tool_choice none or leave one out.")
    if choice.forced and not given:
        raise UsageError("tool_choice required needs tools in the request itself, not in the system prompt.")


def _later(ms: float | None, by: float) -> float | None:
    return None if ms is None else ms + by


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
        skip_special_tokens: bool = True,
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
        single = FirstCall(codec, self.call_format, self.tools, self._splitter()) if watched else None
        self.limits = Limits(max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop or ()), single)
        self.hidden = codec.eos_ids
        """Ids that are no part of the text: those that end it, and control tokens where no call is looked for."""
        if skip_special_tokens and not self.tools and self.call_format.headers is None:
            self.hidden |= codec.control_ids(THINK)
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
        """`time.perf_counter()` after which the request is stopped."""
        self._stopped = False
        self.ready_round: int | None = None
        self._asked_in, self._vain_questions = -1, 0
        self.cached_tokens = 0
        self.total_ms = 0.0

    def _constraint(self, tools: Any, schema: Any) -> Constraint | None:
        """Return what the answer must be after its reasoning, if the request says so."""
        inner = self._grammar(tools, schema)
        if inner is None or isinstance(inner, StrictCalls) or not self.conversation.thinking:
            return inner
        return AfterThinking(inner, self.decoder.loaded.codec, self._splitter())

    def _splitter(self) -> ThinkSplitter:
        return ThinkSplitter.of(self.call_format, self.conversation.thinking, self.conversation.reasons)

    def _grammar(self, tools: Any, schema: Any) -> Constraint | None:
        grammars, conversation = self.decoder.grammars, self.conversation
        _check_grammar(self.choice, tools, conversation.tools, schema)
        if schema is not None:
            return grammars.schema(schema)
        if not self.choice.forced:
            functions = [tool["function"] for tool in openai_tools(tools or ())] if self.tools else []
            return grammars.strict(self.call_format, self.tools, functions, self._splitter())
        functions = [tool["function"] for tool in openai_tools(tools)]
        wanted = [function for function in functions if not self.choice.name or function["name"] == self.choice.name]
        return grammars.calls(self.call_format, conversation.prompt, wanted)

    def stop(self) -> None:
        """Ask from any thread that the request end: `run` raises RequestStopped within one pass of the target."""
        self._stopped = True

    def check(self) -> None:
        """Raise RequestStopped if the request was asked to end or its time is over."""
        if self._stopped or time.perf_counter() > self.deadline:
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
            turns = self.memory.part(Boilerplate).move_up(turns)
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
        try:
            decoder._take_turns(self.mailbox)
            for commit in self._commits(context):
                self.total_ms = (time.perf_counter() - self.clock) * 1e3
                self.cached_tokens = decoder.target.cached_tokens
                self.commits.append(replace(commit, top=None, prompt_top=None, prompt_state=None))
                self._judge_question(commit)
                yield commit
                if not commit.finish_reason:
                    self.check()
        finally:
            decoder._mailbox = None
            if self.mailbox is not None:
                self.mailbox.poll()
                if self._tells_of_hint():
                    accepted = sum(source == "hint" for commit in self.commits for source in commit.sources)
                    self.mailbox.judge(accepted >= ANSWER_PAYS)
                self.mailbox.close()

    def _tells_of_hint(self) -> bool:
        """Tell whether the request went far enough for its hint to have been of use."""
        reason = self.commits[-1].finish_reason if self.commits else None
        return reason is not None and (reason != "length" or len(self.output) >= ENOUGH_OUTPUT)

    def _commits(self, context: DecodeContext) -> Iterator[Commit]:
        decoder = self.decoder
        if self.method.stock:
            return stock_decode(decoder.target, context, self.output, self.limits, self.salt, self.clock)
        chooser = make_chooser(self.sampling, context.prompt_ids, self.constraint)
        draft = decoder.draft.proposer if decoder.draft is not None else None
        sources = self.method.build(Setup(self.memory, self._poll, draft, self._ask_slots))
        if self.prediction and self.method.name != "ar":
            self._predicted = PredictedText(self.prediction)
            sources = [self._predicted, *sources]
        return decode(
            decoder.target, context, self.output, sources, chooser, self.limits, self.budget,
            calibrator=self.memory.part(Calibrator), next_chunk=decoder._next_chunk, salt=self.salt,
            clock=self.clock, faults=decoder.faults,
        )  # fmt: skip

    def _poll(self) -> Hint | None:
        hint = self.fixed_hint if self.mailbox is None else self.mailbox.poll()
        if hint is not None and hint.function is not None and self.ready_round is None:
            self.ready_round = len(self.commits)
        return hint

    def _ask_slots(self, tool: Tool, slot: str, written: str) -> None:
        """Ask the sidecar for more, and give it its turn for that."""
        if self.mailbox is None or (self.decoder.by_turns and self._vain_questions >= MAX_VAIN_QUESTIONS):
            return
        if self.mailbox.ask(tool.name, slot, written):
            self._asked_in = len(self.commits)
            self.decoder._take_turns(self.mailbox)

    def _judge_question(self, commit: Commit) -> None:
        """Take note of whether the round's question to the sidecar, if there was one, paid."""
        if commit.round == self._asked_in:
            paid = sum(source == "hint" for source in commit.sources) >= ANSWER_PAYS
            self._vain_questions = 0 if paid else self._vain_questions + 1

    def answer_stream(self) -> AnswerStream:
        """Return what splits the answer's text into content, reasoning and calls."""
        conversation = self.conversation
        return AnswerStream(self.call_format, self.tools, conversation.thinking, conversation.reasons)

    def result(self) -> Generation:
        """Sum the request up."""
        codec = self.decoder.loaded.codec
        shown = [token for token in self.output if token not in self.hidden]
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
            right_predicted_tokens=self._predicted.right if self._predicted is not None else 0,
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
        since = (self.mailbox.submitted - self.clock) * 1e3 if self.mailbox is not None else 0.0
        ready = _later(self.mailbox.ready_ms, since) if self.mailbox is not None else 0.0
        complete = _later(self.mailbox.complete_ms, since) if self.mailbox is not None else 0.0
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
