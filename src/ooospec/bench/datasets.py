"""Requests of the public benchmarks, read from a data folder (where to get it: docs/benchmarks.md)."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooospec.bench.gold import GoldCall, bfcl_gold, text_gold
from ooospec.bench.toolalpaca import read_toolalpaca
from ooospec.errors import UsageError

BFCL_CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple", "irrelevance", "simple_java", "simple_javascript",
)  # fmt: skip
"""Single-turn files; the last two are only in the `bfcl-eval` package."""
BFCL_PAPER = ("bfcl-simple_java", "bfcl-simple_javascript")
HUB_SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark. API-Bank's tools stand as prose in its system prompt, so `tools` is None there."""

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    gold: tuple[GoldCall, ...] | None = None
    """The right calls in any order, () = no call is right, None = unknown."""


def _api_bank(folder: Path) -> Iterator[BenchRequest]:
    for level in (1, 2, 3):
        rows = json.loads((folder / f"level-{level}-api_processed.json").read_text("utf-8"))
        for index, row in enumerate(rows):
            messages = ({"role": "system", "content": row["system"]}, {"role": "user", "content": row["user"]})
            answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            gold = tuple(text_gold(answer["name"], answer["parameters"]) for answer in answers)
            yield BenchRequest(f"api_bank-{level}-{index}", messages, None, gold)


def _toolalpaca(folder: Path) -> Iterator[BenchRequest]:
    for api in read_toolalpaca(folder / "eval_simulated.json"):
        for index, (instruction, gold) in enumerate(zip(api.instructions, api.gold, strict=True)):
            messages = ({"role": "user", "content": instruction},)
            yield BenchRequest(f"toolalpaca-{api.name}-{index}", messages, list(api.tools), gold)


def _bfcl(folder: Path) -> Iterator[BenchRequest]:
    present = [c for c in BFCL_CATEGORIES if (folder / f"BFCL_v4_{c}.json").is_file()]
    if not present:
        raise FileNotFoundError(folder / f"BFCL_v4_{BFCL_CATEGORIES[0]}.json")
    for category in present:
        answers = folder / "possible_answer" / f"BFCL_v4_{category}.json"
        gold = {row["id"]: bfcl_gold(row["ground_truth"]) for row in _json_lines(answers)} if answers.is_file() else {}
        for row in _json_lines(folder / f"BFCL_v4_{category}.json"):
            right = () if category == "irrelevance" else gold.get(row["id"])
            yield BenchRequest(f"bfcl-{row['id']}", tuple(row["question"][0]), row["function"], right)


def _json_lines(path: Path) -> Iterator[Any]:
    return (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())


_LOADERS: dict[str, Callable[[Path], Iterator[BenchRequest]]] = {
    "api_bank": _api_bank,
    "toolalpaca": _toolalpaca,
    "bfcl": _bfcl,
}
BENCHMARKS = tuple(_LOADERS)


def data_folder(data: str | None) -> Path | None:
    """Return the data folder that `--data` names, fetching it first for `hf://OWNER/DATASET`."""
    if data is None or not data.startswith(HUB_SCHEME):
        return None if data is None else Path(data).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(data.removeprefix(HUB_SCHEME), repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"Cannot fetch the data set {data!r} ({reason}); give --data FOLDER or hf://OWNER/DATASET."
        ) from error


def load_benchmark(name: str, data: Path | None) -> list[BenchRequest]:
    """Read all requests of a benchmark from `data/<name>`; BFCL also out of an installed `bfcl-eval`.

    Raises UsageError saying what is missing and how to get it, or which file is damaged.
    """
    if name not in _LOADERS:
        raise UsageError(f"Unknown benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    folders = [data / name, data] if data is not None else []
    spec = importlib.util.find_spec("bfcl_eval") if name == "bfcl" else None
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "data")
    requests: dict[str, BenchRequest] = {}
    for folder in folders:  # what an earlier folder lacks (BFCL's Java files, say) comes from a later one
        try:
            requests = {**{request.id: request for request in _LOADERS[name](folder)}, **requests}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"A file of {name} in {folder} is damaged or of another version ({type(error).__name__}: {error}); "
                "fetch it again (docs/benchmarks.md)."
            ) from error
    if requests:
        return list(requests.values())
    wheel = " or install the bfcl-eval package" if name == "bfcl" else ""
    looked = ", ".join(map(str, folders)) or "nowhere (no --data given)"
    raise UsageError(f"No data for {name}; looked in: {looked}. Give --data FOLDER with a subfolder {name}/{wheel}.")


def sample(requests: list[BenchRequest], limit: int | None, seed: int) -> list[BenchRequest]:
    """Choose `limit` requests at random (all if None), in an order that depends on the seed alone."""
    chosen = list(requests)
    random.Random(seed).shuffle(chosen)
    return chosen[:limit]


def suite(name: str, benchmark: str, requests: list[BenchRequest]) -> list[BenchRequest]:
    """Choose a suite's requests: `quick` = the 30 listed in the package, `paper` = what was published, `all`.

    Raises UsageError for an unknown suite, or when a listed request is not in the data.
    """
    if name == "all" or (name == "paper" and benchmark != "bfcl"):
        return requests
    if name == "paper":  # the publication reports BFCL's Java and JavaScript categories
        found = [request for request in requests if request.id.startswith(BFCL_PAPER)]
        if not found:
            raise UsageError(
                "Suite paper takes BFCL's Java and JavaScript requests, which are not in the data folder; install the "
                "bfcl-eval package or choose --suite all."
            )
        return found
    if name != "quick":
        raise UsageError(f"Unknown suite {name!r}; choose one of quick, paper, all.")
    listed = json.loads((Path(__file__).parent / "quick.json").read_text("utf-8"))[benchmark]
    by_id = {request.id: request for request in requests}
    missing = [wanted for wanted in listed if wanted not in by_id]
    if missing:
        raise UsageError(
            f"Suite quick needs {len(missing)} requests that the data of {benchmark} lacks, such as {missing[0]!r}; "
            "fetch the version named in docs/benchmarks.md."
        )
    return [by_id[wanted] for wanted in listed]
