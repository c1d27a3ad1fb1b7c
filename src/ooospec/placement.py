"""Which CPU threads and cores the target and the sidecar use."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


def usable_cores() -> int:
    """Count the physical cores this process may use: its CPU affinity and its container's quota included."""
    counts = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        counts.append(max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or no quota
        pass
    return min(counts)


FEW_CORES = 4
"""With fewer cores than this, target and sidecar take turns instead of sharing them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """CPU threads: the target's while the sidecar works and when it does not, and the sidecar's."""

    target_busy: int
    """0 = the target waits its turn while the sidecar works (for `runtime.TURN_S` at most)."""
    target_idle: int
    sidecar: int
    target_cores: tuple[int, ...] = ()
    """CPUs that the target stays on; empty = any."""
    sidecar_cores: tuple[int, ...] = ()

    def apply(self) -> None:
        """Put this process (all of its threads) on the target's cores and set its thread count."""
        torch.set_num_threads(self.target_idle)
        if self.target_cores:
            _stay_on(set(self.target_cores))

    def undo(self) -> None:
        """Let the process use all cores of target and sidecar again."""
        if self.target_cores:
            _stay_on({*self.target_cores, *self.sidecar_cores})

    @classmethod
    def shared(cls, cores: int | None = None) -> Placement:
        """Everything on one device: the sidecar borrows a quarter of the cores while its wave runs, or all of few."""
        cores = cores or usable_cores()
        if cores < FEW_CORES:
            return cls(0, cores, cores)
        sidecar = max(1, cores // 4)
        return cls(max(1, cores - sidecar), cores, sidecar)

    @classmethod
    def split(cls, cores: int | None = None) -> Placement:
        """Target and sidecar own half of the cores each, always: stands for two devices."""
        half = max(1, (cores or usable_cores()) // 2)
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(allowed) < 2 * half:
            return cls(half, half, half)
        return cls(half, half, half, tuple(allowed[:half]), tuple(allowed[half : 2 * half]))


def _stay_on(cores: set[int]) -> None:
    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)
