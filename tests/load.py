"""Load test of the server: `make load` (500 requests over 16 connections), loopback only, ends by itself.

A scripted target with a real sidecar process beside it that is killed again and again; clients go away at random. Every
answer that arrives must be the right one, the counters must add up, and the memory must stay flat.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from conftest import load_tiny
from ooospec.placement import Placement
from ooospec.runtime import Decoder
from served import SCRIPTS, ByPrompt, Served, body

ASKED = ("weather", "two", "hello", "words")
ABORT_SHARE = 0.15
LIMIT_S = 300.0
MAX_GROWTH = 0.05


@dataclass
class Report:
    """What a load test saw."""

    answered: int = 0
    aborted: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    counters_differ: list[str] = field(default_factory=list)
    rss: dict[int, int] = field(default_factory=dict)
    """Requests finished -> resident bytes of the serving process."""


def expected(key: str) -> tuple[str, list[str]]:
    """Return (content, arguments of the calls) of a script."""
    lines = SCRIPTS[key].split("\n")
    calls = [json.loads(line) for line in lines if line.startswith("{")]
    content = "\n".join(line for line in lines if not line.startswith("{"))
    return content, [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]


class Load:
    """One run."""

    def __init__(self, url: str, decoder: Decoder, total: int, kill_every: int) -> None:
        self.url, self.decoder, self.total, self.kill_every = url, decoder, total, kill_every
        self.report, self._lock, self._done, self._due = Report(), threading.Lock(), 0, 0

    def ask(self, number: int, client: httpx.Client) -> None:
        """Send one request, read it whole or go away, and take note."""
        chance = random.Random(number)
        key, streamed, leave = chance.choice(ASKED), chance.random() < 0.5, chance.random() < ABORT_SHARE
        sent = {**body(key, cache_salt=str(number % 7)), "stream": streamed}
        try:
            if leave:
                self._leave(client, sent, chance)
                outcome = None
            else:
                outcome = self._read(client, sent)
        except httpx.HTTPError as error:
            outcome = error, []
        with self._lock:
            self._done += 1
            self.report.aborted += leave
            self.report.answered += not leave
            if outcome is not None and outcome != expected(key):
                self.report.wrong.append(f"{number} {key}: {outcome}")
            self._due += self._done % self.kill_every == 0 and self._done < self.total
            if self._due and self._kill():
                self._due -= 1
            if self._done in (100, self.total):
                self.report.rss[self._done] = psutil.Process().memory_info().rss

    def _leave(self, client: httpx.Client, sent: dict, chance: random.Random) -> None:
        if sent["stream"]:
            with client.stream("POST", self.url + "/chat/completions", json=sent) as response:
                next(response.iter_lines(), None)
            return
        with contextlib.suppress(httpx.TimeoutException):
            client.post(self.url + "/chat/completions", json=sent, timeout=chance.uniform(0.01, 0.2))

    def _read(self, client: httpx.Client, sent: dict) -> tuple[str, list[str]]:
        if not sent["stream"]:
            message = client.post(self.url + "/chat/completions", json=sent).json()["choices"][0]["message"]
            return message["content"] or "", [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        content, calls = "", {}
        with client.stream("POST", self.url + "/chat/completions", json=sent) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                    content += choice["delta"].get("content") or ""
                    for call in choice["delta"].get("tool_calls", []):
                        calls[call["index"]] = calls.get(call["index"], "") + call["function"].get("arguments", "")
        return content, [calls[index] for index in sorted(calls)]

    def _kill(self) -> bool:
        """Kill the sidecar; False while the one killed before has not been started again."""
        process = self.decoder._client._process
        if process.pid is None or not process.alive():
            return False
        os.kill(process.pid, signal.SIGKILL)
        self.report.kills += 1
        return True


def run_load(total: int, connections: int, kill_every: int, sidecar: Path) -> Report:
    """Run the test; raises nothing that a client saw, see the report."""
    with Decoder(load_tiny("llama"), str(sidecar), budget="fixed", prefix_cache_bytes=0, placement=Placement(1, 2, 1),
                 adapter="none") as decoder:  # fmt: skip
        decoder.target = ByPrompt(decoder.loaded.codec)
        with Served(decoder, max_queue=4 * connections) as served:
            load = Load(served.url, decoder, total, kill_every)
            limits = httpx.Limits(max_connections=connections)
            with httpx.Client(timeout=LIMIT_S, limits=limits) as client, ThreadPoolExecutor(connections) as pool:
                list(pool.map(lambda number: load.ask(number, client), range(total)))
            httpx.post(served.url + "/chat/completions", json=body(), timeout=LIMIT_S)  # behind all that were aborted
            text = httpx.get(served.url.removesuffix("/v1") + "/metrics").text
    report = load.report
    counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[:1] != "#"}
    succeeded = sum(value for name, value in counted.items() if name.startswith("vllm:request_success_total"))
    accepted = sum(v for name, v in counted.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_total"))
    places = sum(v for name, v in counted.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_t"))
    left = sum(counted[f"ooospec:requests_{why}_total"] for why in ("aborted", "timed_out", "dropped"))
    checks = {
        f"answered {succeeded:g} and aborted {left:g} of {total + 1}": succeeded + left == total + 1,
        f"accepted {accepted:g} at {places:g} places": accepted == places,
        f"accepted {accepted:g} of {counted['vllm:spec_decode_num_draft_tokens_total']:g} drafted":
            accepted <= counted["vllm:spec_decode_num_draft_tokens_total"],
        f"{counted['ooospec:requests_failed_total']:g} failed": counted["ooospec:requests_failed_total"] == 0,
        f"{counted['vllm:num_requests_waiting']:g} waiting": counted["vllm:num_requests_waiting"] == 0,
    }  # fmt: skip
    report.counters_differ = [said for said, right in checks.items() if not right]
    return report


def main(total: int) -> None:
    """Run the whole test and print what was seen."""
    if total < 100:
        sys.exit(f"COUNT must be at least 100, since memory is compared with that after 100; got {total}.")
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_tiny("llama")
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        report = run_load(total, 16, 50, Path(folder))
    growth = report.rss[total] / report.rss[100] - 1
    early, late = report.rss[100] / 1e6, report.rss[total] / 1e6
    seen = (
        f"{report.answered} answered, {report.aborted} left, {len(report.wrong)} wrong, {report.kills} sidecars killed"
    )
    print(f"{seen}; memory {early:.0f} MB after 100, {late:.0f} MB after {total} ({growth:+.1%})")
    faults = [*report.wrong[:5], *report.counters_differ]
    if growth > MAX_GROWTH:
        faults.append(f"memory grew by {growth:.1%}, more than {MAX_GROWTH:.0%}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
