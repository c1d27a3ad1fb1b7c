"""Answers in OpenAI's shape, whole and as chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ooospec.chat.answer import ArgumentsGrow, CallBegins, Content, Event, Reasoning
from ooospec.chat.codec import TextCodec
from ooospec.chat.template import RawPrompt
from ooospec.core import Commit, TokenChances
from ooospec.generation import Generation
from ooospec.server.bodies import ChatBody, CompletionBody
from ooospec.server.metrics import speculation_of
from ooospec.server.worker import ChoiceDone, Step


@dataclass
class ChatChoice:
    """One choice of a chat completion as it grows."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    chances: list[TokenChances] = field(default_factory=list)

    def deltas(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Take events in; return each as a delta."""
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                self.content += text
                return {"content": text}
            case Reasoning(text):
                self.reasoning += text
                return {"reasoning_content": text}
            case CallBegins(index, name):
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self.calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
            case ArgumentsGrow(index, text):
                self.calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        raise TypeError(event)

    def message(self) -> dict[str, Any]:
        """Give the whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        else:
            message["content"] = self.content
        return message


@dataclass
class Envelope:
    """What all parts of one answer share."""

    model: str
    kind: str
    """chat.completion or text_completion."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind.startswith("chat") else "cmpl"
        self.id = self.id or f"{prefix}-{uuid.uuid4().hex}"

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Wrap choices as one chunk of a stream."""
        kind = "chat.completion.chunk" if self.kind.startswith("chat") else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def whole(self, choices: list[dict[str, Any]], results: list[Generation], n: int) -> dict[str, Any]:
        """Wrap choices as one answer."""
        return {
            "id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices,
            "usage": usage(results, n), "metrics": {"speculative_decoding": speculation_of(results)},
        }  # fmt: skip


def usage(results: Sequence[Generation], choices: int = 1) -> dict[str, Any]:
    """Count tokens: every prompt once (it has `choices` results in a row), the outputs of all choices."""
    if not results:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt, output = sum(r.prompt_tokens for r in results[::choices]), sum(len(r.output_ids) for r in results)
    accepted = sum(result.right_predicted_tokens for result in results)
    offered = sum(result.predicted_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in results[::choices])},
        "completion_tokens_details": {
            "reasoning_tokens": sum(result.reasoning_tokens for result in results),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": offered - accepted,
        },
    }


def chat_logprobs(codec: TextCodec, chances: Sequence[TokenChances]) -> dict[str, Any]:
    """Write log-probabilities as chat completions do."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = codec.decode_inside([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(codec.token_bytes(token))}

    return {
        "content": [
            {**entry(c.token, c.logprob), "top_logprobs": [entry(*likely) for likely in c.likeliest]} for c in chances
        ],
        "refusal": None,
    }


def text_logprobs(codec: TextCodec, chances: Sequence[TokenChances], offset: int) -> dict[str, Any]:
    """Write log-probabilities as completions do."""
    tokens, offsets = [codec.decode_inside([c.token]) for c in chances], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(c.logprob, -9999.0) for c in chances],
        "top_logprobs": [{codec.decode_inside([token]): value for token, value in c.likeliest} for c in chances],
        "text_offset": offsets,
    }


def source_runs(codec: TextCodec, commit: Commit) -> list[dict[str, Any]]:
    """Say which source each stretch of a commit's text came from, for the inspector."""
    runs: list[dict[str, Any]] = []
    for token, source in zip(commit.tokens, commit.sources, strict=True):
        text = "" if token in codec.eos_ids else codec.decode_inside([token])
        if runs and runs[-1]["source"] == source:
            runs[-1]["text"] += text
        else:
            runs.append({"source": source, "text": text})
    return runs


def round_of(codec: TextCodec, step: Step) -> dict[str, Any]:
    """Give one round as the inspector draws it."""
    commit = step.commit
    return {
        "round": commit.round, "start_ms": round(commit.start_ms, 1), "propose_ms": round(commit.propose_ms, 2),
        "verify_ms": round(commit.verify_ms, 1), "drafted": commit.drafted, "lead_tokens": commit.lead_tokens,
        "tokens": len(commit.tokens), "runs": source_runs(codec, commit),
    }  # fmt: skip


def finish(done: ChoiceDone) -> dict[str, Any]:
    """Give what the inspector shows of a finished answer: times, the hint's fate, calls and content."""
    hint = done.result.hint
    return {
        "total_ms": round(done.result.total_ms, 1),
        "prefill_ms": round(done.result.prefill_ms, 1),
        "calls": [{"name": call.name, "arguments": call.raw_arguments} for call in done.result.calls],
        "content": done.result.content,
        "hint": None if hint is None else {
            "ready_round": hint.ready_round, "ready_ms": hint.ready_ms, "complete_ms": hint.complete_ms,
            "function": hint.function, "slots": dict(hint.slots), "payload_bytes": hint.payload_bytes,
            "wave_ms": hint.wave_ms,
        },
    }  # fmt: skip


KEPT_ROUNDS = 1000
"""Rounds of a request that the inspector shows."""


class ChatAnswer:
    """Builds a chat completion out of the worker's items."""

    def __init__(
        self, codec: TextCodec, body: ChatBody, key: str, inspect: bool, remember: Callable[[dict[str, Any]], None]
    ) -> None:
        """`inspect` = chunks also tell what each round did; `remember` keeps the record of whoever has `key`."""
        self.codec, self.body, self.inspect, self._remember = codec, body, inspect, remember
        self.envelope = Envelope(body.model, "chat.completion")
        self.choices = [ChatChoice() for _ in range(body.n)]
        self.results: list[Generation] = []
        self._greeted: set[int] = set()
        self._record: dict[str, Any] = {
            "id": self.envelope.id, "at": self.envelope.created, "rounds": [], "key": key,
            "question": str(body.messages[-1].get("content") or "")[:200],
        }  # fmt: skip

    def chunks(self, item: Step | ChoiceDone) -> list[dict[str, Any]]:
        """Take an item in; return the chunks that tell of it."""
        deltas = self.choices[item.choice].deltas(item.events)
        if item.choice not in self._greeted:
            self._greeted.add(item.choice)
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        if isinstance(item, Step):
            return self._step(item, deltas)
        return [*(self._chunk(item.choice, delta, None) for delta in deltas), self._end(item)]

    def _step(self, item: Step, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        chances = item.commit.chances if self.body.logprobs else ()
        drawn = round_of(self.codec, item)
        if item.choice == 0 and len(self._record["rounds"]) < KEPT_ROUNDS:
            self._record["rounds"].append(drawn)
        if not deltas and (chances or self.inspect):
            deltas = [{}]
        chunks = [self._chunk(item.choice, delta, None) for delta in deltas]
        if self.inspect:
            chunks[-1]["ooospec"] = drawn
        if chances:
            self.choices[item.choice].chances += chances
            chunks[-1]["choices"][0]["logprobs"] = chat_logprobs(self.codec, chances)
        return chunks

    def _end(self, item: ChoiceDone) -> dict[str, Any]:
        self.choices[item.choice].finish_reason = item.finish_reason
        self.results.append(item.result)
        chunk = self._chunk(item.choice, {}, item.finish_reason)
        if self.inspect:
            chunk["ooospec"] = finish(item)
        if item.choice == 0:
            self._record.update(finish(item), usage=usage([item.result]), finish_reason=item.finish_reason)
            self._remember(self._record)
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return self.envelope.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}])

    def whole(self) -> dict[str, Any]:
        """Give the whole answer."""
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = chat_logprobs(self.codec, choice.chances) if self.body.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        return self.envelope.whole(choices, self.results, self.body.n)


class TextAnswer:
    """Builds a text completion out of the worker's items."""

    def __init__(self, codec: TextCodec, body: CompletionBody, prompts: list[RawPrompt]) -> None:
        self.codec, self.body, self.prompts = codec, body, prompts
        self.envelope = Envelope(body.model, "text_completion")
        count = body.n * len(prompts)
        self.texts = [prompts[i // body.n].text if body.echo else "" for i in range(count)]
        self._starts = list(map(len, self.texts))
        self._offsets = list(self._starts)
        self.reasons: list[str | None] = [None] * count
        self.chances: list[list[TokenChances]] = [[] for _ in range(count)]
        self.results: list[Generation] = []
        self._begun: set[int] = set()

    def chunks(self, item: Step | ChoiceDone) -> list[dict[str, Any]]:
        """Take an item in; return the chunks that tell of it."""
        index, text = item.choice, item.text
        shown = text
        if index not in self._begun:
            self._begun.add(index)
            shown = self.texts[index] + text
        self.texts[index] += text
        chances = item.commit.chances if isinstance(item, Step) else ()
        self.chances[index] += chances
        logprobs = None
        if chances and self.body.logprobs is not None:
            logprobs = text_logprobs(self.codec, chances, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        reason = None
        if isinstance(item, ChoiceDone):
            reason = "length" if item.finish_reason == "length" else "stop"
            self.reasons[index] = reason
            self.results.append(item.result)
        if not shown and reason is None and logprobs is None:
            return []
        return [self.envelope.chunk([{"index": index, "text": shown, "logprobs": logprobs, "finish_reason": reason}])]

    def whole(self) -> dict[str, Any]:
        """Give the whole answer."""
        asked = self.body.logprobs is not None
        choices = [
            {
                "index": i, "text": text, "finish_reason": self.reasons[i],
                "logprobs": text_logprobs(self.codec, self.chances[i], self._starts[i]) if asked else None,
            }
            for i, text in enumerate(self.texts)
        ]  # fmt: skip
        return self.envelope.whole(choices, self.results, self.body.n)
