"""Where a request's answers are filed as they come: the hint, and what else may be asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ooospec.core import FunctionHint, Hint, SlotHint, Tool
from ooospec.sidecar.protocol import Done, Function, SlotValue, Submit

if TYPE_CHECKING:
    from ooospec.sidecar.client import SidecarClient

MAX_TURNS_LOST = 16
USELESS_HINTS = 3
"""So many hints in a row may be of no use before waves are waited for less often."""
WAVE_SECONDS = 20.0
"""After this long a wave no longer counts as working; its answers still do if they come."""


class Mailbox:
    """The hint of one request, filled by `SidecarClient` as messages arrive."""

    def __init__(
        self, client: SidecarClient, request: int, tools: tuple[Tool, ...], asked: Submit | None = None
    ) -> None:
        self._client, self.request, self.tools, self._asked = client, request, tools, asked
        self.hint = Hint()
        self.numbers: list[int] = []
        """Of all waves whose answers belong here; `request` is the last."""
        self._expected_until = time.perf_counter() + WAVE_SECONDS
        self.submitted, self.submitted_at = time.perf_counter(), time.monotonic()
        self.ready_ms: float | None = None
        """When the function choice arrived, from submission."""
        self.complete_ms: float | None = None
        self.wave: Done | None = None
        self.stopped = False
        """The last wave was cut short."""
        self._waited = False
        self._questions: set[tuple[str, str, str]] = set()

    def poll(self) -> Hint:
        """Take what has arrived, without waiting, and return the hint as it stands."""
        self._client.receive()
        return self.hint

    def wait(self, timeout_s: float, check: Callable[[], None] | None = None) -> None:
        """Wait until the wave is over, or until `check` raises."""
        end = time.monotonic() + timeout_s
        while self.working and time.monotonic() < end:
            if check is not None:
                check()
            self.poll()
            time.sleep(0.001)

    def take_turn(self, timeout_s: float, check: Callable[[], None] | None = None) -> None:
        """Give the wave the cores until it is over, then stop it; what has come stays.

        A sidecar that has not answered the request before gets no turn; one that was waited for in vain gets none for
        the next 2, 4, .. `MAX_TURNS_LOST` requests, unless it answers before, and so does one whose last hints were of
        no use (see `judge`). Raises what `check` raises, which is called while it waits.
        """
        if self._client.turns.due() and self._client.worth.due() and self._client.answered_all_but(self):
            before = self.hint.payload_bytes
            self._waited = True
            self.wait(timeout_s, check)
            self._client.turns.taken(not self.working or self.hint.payload_bytes > before)
        if self.working:
            self.stopped = True
            self._client.cancel(self)

    def judge(self, useful: bool) -> None:
        """Take note, at the end of the request, of whether the hint was worth its turn."""
        if self._waited and self.hint.function is not None:
            self._client.worth.taken(useful)

    @property
    def working(self) -> bool:
        """Tell whether answers are still expected."""
        over = self.hint.complete or self.hint.failed or self.stopped
        return not over and time.perf_counter() < self._expected_until

    def ask(self, tool: str, slot: str, written: str) -> bool:
        """Ask for all slots ("") of a tool that the target chose against the hint, or for the rest of one slot's value.

        `written` = how the target has begun the value, as JSON text. The answers come into the same hint. Nothing is
        asked for twice, nothing while it works, and no more after a question that had no answer in time; tells whether
        it was asked.
        """
        named = {known.name: (index, known) for index, known in enumerate(self.tools)}
        known, question = named.get(tool), (tool, slot, written)
        if self.working or self.hint.failed or self.hint.function is None or known is None:
            return False
        if question in self._questions or (self.stopped and self._questions):
            return False
        self._questions.add(question)
        self.hint.complete = self.stopped = False
        self._expected_until = time.perf_counter() + WAVE_SECONDS
        number = [each.name for each in known[1].slots].index(slot) if slot else -1
        if self._asked is None:
            self._client.ask(self, known[0], number, written)
        else:
            more = {"fresh": False, "only": known[0], "slot": number, "written": written}
            self._client.start(self, msgspec.structs.replace(self._asked, **more))
        return True

    def put(self, message: Function | SlotValue | Done, size: int) -> bool:
        """File a message; False if it does not fit the request."""
        now = (time.perf_counter() - self.submitted) * 1e3
        if isinstance(message, Done):
            if message.request != self.request:  # of a wave that another one has taken the place of
                return True
            if self.wave is None:
                self.wave, self.complete_ms = message, now
            self.hint.complete, self.hint.failed = not message.error, bool(message.error)
            return True
        if isinstance(message, Function):
            known = all(0 <= index < len(self.tools) for index in message.tools)
            if not known or len(message.tools) != len(message.percents):
                return False
            names = tuple(self.tools[index].name for index in message.tools)
            self._client.turns.taken(True)
            self.hint.function = FunctionHint(names, tuple(_chance(percent) for percent in message.percents))
            self.ready_ms = now
        else:
            if not (0 <= message.tool < len(self.tools) and 0 <= message.slot < len(self.tools[message.tool].slots)):
                return False
            tool = self.tools[message.tool]
            slot = tool.slots[message.slot].name
            chance = _chance(message.percent)
            self.hint.slots[tool.name, slot] = SlotHint(tool.name, slot, message.value, message.present, chance)
        self.hint.payload_bytes += size
        return True

    def close(self) -> None:
        """Stop the wave if it still runs and forget the request."""
        self._client.release(self)


class Turns:
    """Decides whether the next wave is waited for: less and less often while waiting was in vain."""

    def __init__(self, patience: int = 0) -> None:
        """`patience` = so many times in a row it may be in vain first."""
        self._patience, self._vain, self._skip = patience, 0, 0

    def due(self) -> bool:
        """Tell whether the next request may wait; asked once a request."""
        self._skip = max(0, self._skip - 1)
        return self._skip == 0

    def taken(self, useful: bool) -> None:
        """Take note of what a wait brought."""
        self._vain = 0 if useful else self._vain + 1
        over = self._vain - self._patience
        self._skip = min(2**over, MAX_TURNS_LOST) + 1 if over > 0 else 0


def _chance(percent: int) -> float:
    return min(99, max(1, percent)) / 100
