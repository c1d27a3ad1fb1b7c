"""Which CPU threads and cores the target and the sidecar use."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Placement:
    """CPU threads: the target's while the sidecar works and when it does not, and the sidecar's."""

    target_busy: int
    target_idle: int
    sidecar: int
    target_cores: tuple[int, ...] = ()
    """CPUs that the target stays on; empty = any."""
    sidecar_cores: tuple[int, ...] = ()

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
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(allowed) < 2 * half:
            return cls(half, half, half)
        return cls(half, half, half, tuple(allowed[:half]), tuple(allowed[half : 2 * half]))
