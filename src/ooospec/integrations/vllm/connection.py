"""The way from vLLM's processes to the sidecar, and what the environment says of both sides."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ooospec.errors import OooSpecError
from ooospec.sidecar.client import SidecarClient

logger = logging.getLogger("vllm.ooospec")
ADDRESS_VARIABLE, DEFAULT_ADDRESS = "OOOSPEC_SIDECAR", "tcp://127.0.0.1:7777"
MEMORY_VARIABLE, STATS_VARIABLE = "OOOSPEC_MEMORY", "OOOSPEC_STATS"
FIRST_WAIT_SECONDS, RETRY_SECONDS = 0.3, 60.0


def remembers() -> bool:
    """Tell whether anything is kept from one request to the next: unless OOOSPEC_MEMORY is 0."""
    return os.environ.get(MEMORY_VARIABLE, "1") != "0"


def sidecar_address() -> str | None:
    """Return where the sidecar is; None where OOOSPEC_SIDECAR says `none`."""
    address = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    return None if address == "none" else address


class Connection:
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
