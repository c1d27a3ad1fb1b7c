"""How long work reports what it has done; the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Take reports of work that proceeds in steps."""

    def update(self, what: str, done: float, total: float, note: str = "") -> None:
        """Say that `done` of `total` units of `what` are finished; `note` is shown beside."""


class Silent:
    """Report nothing."""

    def update(self, what: str, done: float, total: float, note: str = "") -> None:
        """Ignore the report."""
