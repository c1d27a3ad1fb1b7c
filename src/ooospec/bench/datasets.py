"""Requests of the public benchmarks, read from a data folder (where to get it: docs/benchmarks.md)."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooospec.errors import UsageError

BFCL_CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple", "irrelevance",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark. API-Bank's tools stand as prose in its system prompt, so `tools` is None there."""

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    gold: Any = None


def _api_bank(folder: Path) -> list[BenchRequest]:
    requests = []
    for level in (1, 2, 3):
        rows = json.loads((folder / f"level-{level}-api_processed.json").read_text("utf-8"))
        for index, row in enumerate(rows):
            messages = ({"role": "system", "content": row["system"]}, {"role": "user", "content": row["user"]})
            gold = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            requests.append(BenchRequest(f"api_bank-{level}-{index}", messages, None, gold))
    return requests


def _bfcl(folder: Path) -> list[BenchRequest]:
    requests = []
    for category in BFCL_CATEGORIES:
        path = folder / f"BFCL_v4_{category}.json"
        if not path.is_file():
            continue
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            requests.append(BenchRequest(f"bfcl-{row['id']}", tuple(row["question"][0]), row["function"]))
    if not requests:
        raise FileNotFoundError(folder / "BFCL_v4_simple_python.json")
    return requests


_LOADERS: dict[str, Callable[[Path], list[BenchRequest]]] = {"api_bank": _api_bank, "bfcl": _bfcl}
BENCHMARKS = tuple(_LOADERS)


def load_benchmark(name: str, data: Path | None) -> list[BenchRequest]:
    """Read all requests of a benchmark from `data/<name>`; BFCL also out of an installed `bfcl-eval`.

    Raises UsageError saying what is missing and how to get it.
    """
    if name not in _LOADERS:
        raise UsageError(f"Unknown benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    folders = [data / name, data] if data is not None else []
    spec = importlib.util.find_spec("bfcl_eval") if name == "bfcl" else None
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "data")
    for folder in folders:
        try:
            return _LOADERS[name](folder)
        except FileNotFoundError:
            continue
    wheel = " or install the bfcl-eval package" if name == "bfcl" else ""
    looked = ", ".join(map(str, folders)) or "nowhere (no --data given)"
    raise UsageError(f"No data for {name}; looked in: {looked}. Give --data FOLDER with a subfolder {name}/{wheel}.")


def sample(requests: list[BenchRequest], limit: int | None, seed: int) -> list[BenchRequest]:
    """Choose `limit` requests at random (all if None), in an order that depends on the seed alone."""
    chosen = list(requests)
    random.Random(seed).shuffle(chosen)
    return chosen[:limit]
