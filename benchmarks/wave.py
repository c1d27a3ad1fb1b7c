"""Measure a sidecar: time of its passes and how often its answers equal API-Bank's gold, by dtype.

    python benchmarks/wave.py [--sidecar NAME] [--dtypes bfloat16,int8] [--threads 1] [--data FOLDER] [--limit N]

Values are compared as text, since API-Bank's gold values are all strings. Without --data only times are measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from ooospec.bench.datasets import BenchRequest, load_benchmark, sample
from ooospec.chat.template import plain_text, render
from ooospec.config import DEFAULT_SIDECAR
from ooospec.models.resolver import resolve_model
from ooospec.sidecar.client import signature
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.protocol import Function, SlotValue, Submit, Turn
from ooospec.sidecar.quantize import load_sidecar
from ooospec.target.loading import LoadedModel


def pass_times(loaded: LoadedModel) -> str:
    """Time a prefill of 256 tokens and steps of 1 and 8 branches after it; medians of 5."""
    model = WavePredictor(loaded).model
    found = {}
    for name, size in (("prefill of 256", 256), ("step of 1", 1), ("step of 8", 8)):
        times = []
        for _ in range(5):
            model.begin([0])
            model.prefill(list(range(100, 356 if size < 256 else 102)))
            start = time.perf_counter()
            model.forward(list(range(500, 500 + size)), keep=min(size, 8))
            times.append((time.perf_counter() - start) * 1e3)
        found[name] = statistics.median(times)
    return ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items())


def answers(predictor: WavePredictor, request: BenchRequest) -> tuple[str, dict[tuple[str, str], str]]:
    """Run one wave; return the function choice and the values of all slots as text."""
    conversation = render(predictor.loaded.tokenizer, list(request.messages), request.tools)
    tools = tuple(signature(tool) for tool in conversation.tools)
    turns = tuple(Turn(str(m["role"]), plain_text(m)) for m in conversation.messages)
    name, values = "", {}
    for message in predictor.wave(Submit(1, tools, turns, fresh=True)):
        if isinstance(message, Function):
            name = tools[message.tools[0]].name
        elif isinstance(message, SlotValue) and message.present:
            tool = tools[message.tool]
            values[tool.name, tool.slots[message.slot].name] = str(message.value)
    return name, values


def accuracy(loaded: LoadedModel, requests: list[BenchRequest]) -> str:
    """Compare with gold; return function and slot accuracy and the mean wave time."""
    predictor = WavePredictor(loaded)
    functions = slots = right = 0
    waves = []
    for request in requests:
        gold = request.gold[0]
        name, values = answers(predictor, request)
        waves.append(predictor.stats.wave_ms)
        functions += name == gold.name
        for key, (value,) in gold.arguments.items():
            slots += 1
            right += values.get((gold.name, key)) == str(value)
    return (
        f"function {functions}/{len(requests)}, slots {right}/{slots} = {100 * right / slots:.0f} %, "
        f"wave {statistics.mean(waves):.0f} ms in the mean, cold"
    )


def main() -> None:
    """Print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecar", default=DEFAULT_SIDECAR)
    parser.add_argument("--dtypes", default="bfloat16,int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--limit", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = resolve_model(options.sidecar)
    for dtype in options.dtypes.split(","):
        loaded = load_sidecar(path, options.sidecar, dtype, "cpu", None)
        sys.stdout.write(f"{options.sidecar}, {dtype}, {options.threads} threads: {pass_times(loaded)}\n")
        if options.data is not None:
            requests = sample(load_benchmark("api_bank", options.data), options.limit, 0)
            sys.stdout.write(f"    API-Bank: {accuracy(loaded, requests)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
