"""`ooospec doctor`: what is here and what it costs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version

import torch
from rich.console import Console

from ooospec.chat.formats.registry import format_named
from ooospec.chat.template import template_format
from ooospec.config import cache_dir
from ooospec.models.catalogue import catalogue
from ooospec.models.resolver import converted_folder
from ooospec.placement import Placement
from ooospec.runtime import Decoder
from ooospec.target.cost import PREFIX_TOKENS, CostCurve

BAR_WIDTH = 40


def _calls(decoder: Decoder) -> str:
    """Say in which format calls are expected, and why."""
    tokenizer = decoder.loaded.tokenizer
    if decoder.call_format is not None:
        return f"{decoder.call_format} ({format_named(decoder.call_format).about}), as asked for"
    if "tools" not in str(tokenizer.chat_template or ""):
        return "json (one JSON object): its chat template knows no tools, they are listed in a system message"
    found, why = template_format(tokenizer)
    return f"{found.name} ({found.about}), because {why}"


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
        console.print(f"calls      {_calls(decoder)}", highlight=False, markup=False)
        curve = decoder.cost
    assert isinstance(curve, CostCurve)
    console.print(f"\nverify cost ({PREFIX_TOKENS} cached tokens; never less than for fewer tokens)")
    for width, ms in zip(curve.widths, curve.ms, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * ms / curve.ms[-1]))
        console.print(f"{width:4d} tokens  {ms:8.1f} ms  {ms / curve.ms[0]:5.2f}x  {bar}")
