"""The thread that owns the decoder: takes requests in fair order, sends what is committed, ends what is aborted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ooospec.chat.answer import Event
from ooospec.core import Commit
from ooospec.errors import OooSpecError, RequestStopped
from ooospec.generation import Generation
from ooospec.memory import Memory
from ooospec.request import Request
from ooospec.runtime import Decoder
from ooospec.server.errors import ApiError, as_api_error
from ooospec.server.pipe import TextPipe

logger = logging.getLogger("ooospec.server")
ENTRY_BYTES = 4096
"""What a memory takes before anything is remembered."""
EXPECTED_S = 5.0
"""Time of a request before any was measured, for Retry-After."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one commit of one choice made visible."""

    choice: int
    events: list[Event]
    commit: Commit
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """One choice is complete."""

    choice: int
    events: list[Event]
    result: Generation
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class AllDone:
    """The request is over."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends with an error."""

    error: ApiError


Item = Step | ChoiceDone | AllDone | Failed


@dataclass
class Job:
    """One HTTP request on its way through the worker."""

    make: Callable[[Decoder, int, Memory], Request]
    """Builds the decoder's request of choice number i."""
    choices: int
    key: str
    """API key: whose turn it is."""
    salt: str
    """API key and salt: whose memory and prefix it may use."""
    loop: asyncio.AbstractEventLoop
    time_limit_s: float
    out: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    """When its turn came."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers that may continue a client's trace."""
    prompt_field: str = "messages"
    """Which field of the body holds the prompt."""
    include_stop: bool = False
    """A stop string that ends an answer is shown."""
    aborted: str = ""
    """Why it ends early: "aborted" by its client, "timed_out", or "dropped" by the server."""
    first: Request | None = None

    def send(self, item: Item) -> None:
        """Hand an item to the connection's task."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.out.put_nowait, item)

    def too_late(self) -> ApiError:
        """Say that the time is over."""
        return ApiError(408, f"The request took longer than {self.time_limit_s:g} s.", "timeout_error")

    def abort(self, why: str = "aborted") -> None:
        """Ask for the end; the worker stops within one round."""
        self.aborted = self.aborted or why
        request = self.first
        if request is not None:
            request.stop()


class Worker(threading.Thread):
    """Decodes one request at a time; queues of different keys take turns."""

    def __init__(
        self, decoder: Decoder, max_queue: int, memory_bytes: int, observe: Callable[[str, Any], None]
    ) -> None:
        """`memory_bytes` = for all memories together; `observe(kind, value)` is told what happened, for metrics."""
        super().__init__(name="ooospec-worker", daemon=True)
        self.decoder, self.max_queue, self._memory_bytes, self._observe = decoder, max_queue, memory_bytes, observe
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._ending = False
        self._job: Job | None = None
        self._left: list[Request] = []
        """Of jobs whose clients left the queue: launched, to be closed by this thread."""
        self._memories: OrderedDict[str, tuple[Memory, int]] = OrderedDict()
        """By API key and salt, with the bytes after its last use; the one used longest ago is dropped first."""
        self._memories_total = 0
        self._mean_s = EXPECTED_S

    # ------------------------------------------------------------------ from other threads

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ApiError 429 when the queue is full and 503 when the server is going down."""
        with self._changed:
            if self._ending:
                raise ApiError(503, "The server is shutting down; try again later.", "server_error")
            self._forget_aborted()
            waiting = sum(map(len, self._queues.values()))
            if waiting >= self.max_queue:
                seconds = max(1, round(self._mean_s * (waiting + 1)))
                self._observe("refused", 1)
                raise ApiError(
                    429, f"The queue is full ({waiting} requests wait); try again in about {seconds} s.",
                    "rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)},
                )  # fmt: skip
            self._queues.setdefault(job.key, deque()).append(job)
            self._observe("waiting", waiting + 1)
            self._changed.notify()

    def _forget_aborted(self) -> None:
        """Drop waiting jobs whose client has gone away; what they launched is closed by the worker."""
        for key, queue in list(self._queues.items()):
            for job in [job for job in queue if job.aborted]:
                queue.remove(job)
                self._left += [job.first] if job.first is not None else []
                self._observe(job.aborted, 1)
            if not queue:
                del self._queues[key]
        self._observe("waiting", sum(map(len, self._queues.values())))

    def drain(self, timeout_s: float) -> None:
        """Take no more jobs, finish those that are here, and end."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self.join(timeout_s)

    def unfinished(self) -> int:
        """Count the requests that run or wait."""
        with self._changed:
            return sum(map(len, self._queues.values())) + (self._job is not None)

    def drop(self) -> None:
        """End all requests at once; their clients are told."""
        with self._changed:
            self._ending = True
            jobs = [job for queue in self._queues.values() for job in queue]
            jobs += [self._job] if self._job is not None else []
        for job in jobs:
            job.send(Failed(ApiError(503, "The server was stopped before the answer was whole.", "server_error")))
            job.abort("dropped")

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Serve until drained."""
        while (job := self._next()) is not None:
            self._observe("running", 1)
            try:
                self._serve(job)
            except Exception as error:  # whatever it was, the next job is served
                logger.exception("after request %s", job.id, exc_info=error)
            self._observe("running", 0)
            with self._changed:
                self._job = None

    def _next(self) -> Job | None:
        with self._changed:
            while not self._queues:
                if self._ending:
                    return None
                self._changed.wait()
            key, queue = next(iter(self._queues.items()))
            job = self._job = queue.popleft()
            self._queues.move_to_end(key)  # the others first, next time
            if not queue:
                del self._queues[key]
            self._observe("waiting", sum(map(len, self._queues.values())))
            return job

    def _serve(self, job: Job) -> None:
        start = job.started = time.perf_counter()
        whole = False
        try:
            for choice in range(job.choices):
                if job.aborted:
                    break
                self._decode(job, choice)
            else:
                whole = True
            job.send(AllDone())
        except RequestStopped:
            if not job.aborted:
                job.aborted = "timed_out"
                job.send(Failed(job.too_late()))
        except Exception as error:
            self._fail(job, error)
            whole = True
        finally:
            if job.first is not None:
                job.first.close()
            if job.aborted and not whole:
                self._observe(job.aborted, 1)
            self._mean_s += 0.2 * (time.perf_counter() - start - self._mean_s)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, OooSpecError | ApiError):
            logger.error("request %s failed", job.id, exc_info=error)
            self._observe("failed", 1)
        job.send(Failed(as_api_error(error, job.prompt_field)))

    def _decode(self, job: Job, choice: int) -> None:
        request = job.first if choice == 0 and job.first is not None else self._build(job, choice)
        job.first = request
        request.deadline = job.arrived + job.time_limit_s
        if job.aborted:
            raise RequestStopped("The client left.")
        pipe = TextPipe(self.decoder.loaded.codec, request, job.include_stop)
        rounds = request.run()
        try:
            for commit in rounds:
                text, events = pipe.push(commit)
                job.send(Step(choice, events, commit, text))
                self._look_ahead()
        finally:
            rounds.close()
        result = request.result()
        text, events = pipe.close()
        self._bound_memories(job.salt)
        self._observe("result", (job, result))
        job.send(ChoiceDone(choice, events, result, pipe.finish_reason(result), text))

    def _build(self, job: Job, choice: int) -> Request:
        return job.make(self.decoder, choice, self._memory(job.salt))

    def _look_ahead(self) -> None:
        """Start the wave of a waiting request where the sidecar has cores of its own, so that its hint is ready.

        One a round: to render and tokenize it takes time that the running answer waits.
        """
        with self._changed:
            left, self._left = self._left, []
            queued = [job for queue in self._queues.values() for job in queue]
        for request in left:
            request.close()
        waiting = [job for job in queued if job.first is None and not job.aborted]
        for job in waiting[:1] if self.decoder.waves_run_ahead else ():
            try:
                request = self._build(job, 0)
                request.launch()
                with self._changed:
                    waits = job in self._queues.get(job.key, ())
                    job.first = request if waits else None
                if not waits:  # its client left in the meantime
                    request.close()
            except Exception as error:
                self._fail(job, error)
                with self._changed:
                    queue = self._queues.get(job.key)
                    if queue is not None and job in queue:
                        queue.remove(job)
                        if not queue:
                            del self._queues[job.key]
                    self._observe("waiting", sum(map(len, self._queues.values())))

    def _memory(self, key: str) -> Memory:
        if key not in self._memories:
            self._memories[key] = Memory(), 0
        self._memories.move_to_end(key)
        memory = self._memories[key][0]
        self._bound_memories(key)
        return memory

    def _bound_memories(self, used: str) -> None:
        """Measure the memory that is used, and drop old ones while all together take too much."""
        if used in self._memories:
            memory, before = self._memories[used]
            size = ENTRY_BYTES + len(used) + memory.nbytes
            self._memories[used] = memory, size
            self._memories_total += size - before
        while self._memories and self._memories_total > self._memory_bytes:
            self._memories_total -= self._memories.popitem(last=False)[1][1]
            self._observe("memories_dropped", 1)
        self._observe("memory_bytes", self._memories_total)
