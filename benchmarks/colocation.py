"""Measure the target's time per round while a sidecar works on the same CPU, under different thread counts.

python benchmarks/colocation.py [--target NAME] [--sidecar NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from ooospec.chat.template import render
from ooospec.config import DEFAULT_SIDECAR, DEFAULT_TARGET
from ooospec.demo.examples import examples
from ooospec.models.resolver import resolve_model
from ooospec.placement import usable_cores
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.target.loading import load_model
from ooospec.target.model import TargetModel
from ooospec.target.packing import pack
from ooospec.tree import CandidateTree

WIDTH = 16


def rounds(target: TargetModel, count: int, keep_busy=lambda: None) -> list[float]:
    """Time verify passes of 16 tokens on a prefix of 384. [count] ms"""
    tree = CandidateTree(tuple(range(WIDTH)), tuple(range(-1, WIDTH - 1)), ("",) * WIDTH)
    times = []
    target.begin([0])
    target.prefill(list(range(384)))
    for _ in range(count):
        keep_busy()
        start = time.perf_counter()
        target.verify(tree).argmax(-1).tolist()
        times.append((time.perf_counter() - start) * 1e3)
        target.commit(tree, [0])
    return times


class Waves:
    """Keeps a sidecar busy and counts its finished waves."""

    def __init__(self, sidecar: str, threads: int, loaded) -> None:
        process = SidecarProcess(SidecarSpec(resolve_model(sidecar), sidecar, threads=threads))
        self.client = SidecarClient(process=process)
        self.client.wait_ready(120)
        request = examples()[1]
        conversation = render(loaded.tokenizer, list(request.messages), request.tools)
        self.request = conversation.tools, [("user", str(request.messages[0]["content"]))]
        self.box, self.times = None, []

    def keep_busy(self) -> None:
        """Submit the next wave when the last one is over."""
        if self.box is not None and self.box.poll().complete:
            self.times.append(self.box.wave.wave_ms)
            self.box.close()
            self.box = None
        if self.box is None:
            self.box = self.client.submit(*self.request, fresh=True)


def main() -> None:
    """Print one line per combination of thread counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--sidecar", default=DEFAULT_SIDECAR)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    loaded = load_model(resolve_model(options.target), options.target, device="cpu")
    pack(loaded.model)
    target, cores = TargetModel(loaded.model), usable_cores()
    few, many = max(1, cores // 4), cores
    for threads in (many, many - few or 1):
        torch.set_num_threads(threads)
        alone = statistics.median(rounds(target, options.rounds))
        sys.stdout.write(f"target {threads} threads alone: {alone:.0f} ms a round of {WIDTH} tokens\n")
    for target_threads, sidecar_threads in ((many - few or 1, few), (many, few), (many, many)):
        torch.set_num_threads(target_threads)
        waves = Waves(options.sidecar, sidecar_threads, loaded)
        times = rounds(target, options.rounds, waves.keep_busy)
        wave = f"{statistics.median(waves.times):.0f} ms" if waves.times else "not finished"
        sys.stdout.write(
            f"target {target_threads} threads, sidecar {sidecar_threads}: {statistics.median(times):.0f} ms a round "
            f"(worst {max(times):.0f}), wave {wave}\n"
        )
        sys.stdout.flush()
        waves.client.close()


if __name__ == "__main__":
    main()
