"""`ooospec doctor`: what is here and what it costs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version

import torch
from rich.console import Console

from ooospec.config import cache_dir
from ooospec.models.catalogue import catalogue
from ooospec.models.resolver import converted_folder
from ooospec.placement import Placement
from ooospec.runtime import Decoder
from ooospec.target.cost import CostCurve

BAR_WIDTH = 40


def run_doctor(console: Console, load: Callable[[], Decoder], fresh: bool) -> None:
    """Print versions, device, models and the verify-cost curve of the target."""
    names = ("ooo-spec", "torch", "transformers", "tokenizers", "pyzmq", "peft")
    console.print("versions   " + ", ".join(f"{name} {version(name)}" for name in names))
    console.print(f"python     {platform.python_version()} on {platform.platform()}")
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    place = Placement.shared()
    threads = f"CPU threads: {place.target_idle}, of which the sidecar borrows {place.sidecar}"
    console.print(f"device     accelerator: {accelerator}; {threads}")
    here = [name for name in catalogue() if converted_folder(name).is_dir()]
    console.print(f"cache      {cache_dir()}; embedded models here: {', '.join(here) or 'none'}")
    if fresh:
        (cache_dir() / "cost_curves.json").unlink(missing_ok=True)
    with load() as decoder:
        console.print(f"target     {decoder.loaded.name}, {decoder.loaded.dtype}, {decoder.loaded.device}")
        curve = decoder.cost
    assert isinstance(curve, CostCurve)
    console.print("\nverify cost (384 cached tokens, median of 3; never less than for fewer tokens)")
    for width, ms in zip(curve.widths, curve.ms, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * ms / curve.ms[-1]))
        console.print(f"{width:4d} tokens  {ms:8.1f} ms  {ms / curve.ms[0]:5.2f}x  {bar}")
