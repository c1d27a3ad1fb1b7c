"""The target's verify cost: milliseconds of one forward pass over 1, 2, 4, .. tokens, measured once and cached."""

from __future__ import annotations

import bisect
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ooospec.target.model import TargetModel
from ooospec.tree import CandidateTree

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PREFIX_TOKENS = 128
REPEATS = 3
SLOW_MS, STEEP, WIDE = 2000.0, 3.0, 16
"""Slower passes are timed once; if they take three times a plain one, too, none wider than 16 tokens is timed."""


class CostCurve(msgspec.Struct, frozen=True):
    """Measured cost of a verify pass: `ms[i]` for `widths[i]` tokens, made monotonic."""

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, width: int) -> float:
        """Interpolate the cost of `width` tokens; beyond the last point it rises as between the last two."""
        right = min(max(1, bisect.bisect_left(self.widths, width)), len(self.widths) - 1)
        x0, x1, y0, y1 = self.widths[right - 1], self.widths[right], self.ms[right - 1], self.ms[right]
        return y0 + (y1 - y0) * (width - x0) / (x1 - x0)


def measure_cost(target: TargetModel, progress: Callable[[int, int], None] | None = None) -> CostCurve:
    """Time verify passes on a prefix of PREFIX_TOKENS, the median of REPEATS each. Uses the target's cache."""
    target.begin([0])
    vocabulary = target.vocabulary
    target.prefill([i % min(997, vocabulary) for i in range(PREFIX_TOKENS)])
    times: list[float] = []
    for step, width in enumerate(WIDTHS):
        tree = CandidateTree(tuple(range(width)), tuple(range(-1, width - 1)), ("",) * width)
        runs = []
        for _ in range(1 if times and times[-1] > SLOW_MS else REPEATS):
            start = time.perf_counter()
            target.verify(tree).argmax(-1).tolist()
            runs.append((time.perf_counter() - start) * 1e3)
            target.commit(tree, [0])
        times.append(max(statistics.median(runs), *times[-1:]) if times else statistics.median(runs))
        enough = width >= WIDE and times[-1] > max(SLOW_MS, STEEP * times[0])
        if progress is not None:
            progress(len(WIDTHS) if enough else step + 1, len(WIDTHS))
        if enough:
            break
    target.end([])
    return CostCurve(WIDTHS[: len(times)], tuple(round(t, 3) for t in times))


def cached_cost(
    path: Path, key: str, target: TargetModel, progress: Callable[[int, int], None] | None = None
) -> CostCurve:
    """Read the curve of `key` from the file, or measure and store it. An unreadable file is measured anew."""
    try:
        curves = msgspec.json.decode(path.read_bytes(), type=dict[str, CostCurve])
    except (OSError, msgspec.DecodeError):
        curves = {}
    if key in curves:
        return curves[key]
    curve = measure_cost(target, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode({**curves, key: curve})))
    temporary.replace(path)
    return curve


def cost_key(name: str, dtype: str, device: str, packed: bool) -> str:
    """Name the conditions that a curve depends on."""
    if device.startswith("cuda"):
        where = torch.cuda.get_device_name()
    else:
        where = f"{device}, {torch.get_num_threads()} threads" + ", packed weights" * packed
    return f"{name}, {dtype}, {where}, prefix {PREFIX_TOKENS}, torch {torch.__version__}"
