"""Collect a teacher's calls for training requests: resumable, decontaminated, with a data card."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ooospec.models.progress import Progress, Silent
from ooospec.train.augment import Variation, tool_pool, vary
from ooospec.train.decontaminate import Inventory
from ooospec.train.records import Call, Example, append_example, read_examples
from ooospec.train.sources import SOURCES, load_source
from ooospec.train.teachers import NoCall, Teacher

TRACES, SKIPPED, CARD = "traces.jsonl", "skipped.jsonl", "card.json"
DEV_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask a teacher."""

    examples: list[Example]
    left_out: dict[str, dict[str, int]]
    """Source -> reason -> count."""


def plan(
    sources: Sequence[str],
    data: Path,
    inventory: Inventory,
    limit: int | None = None,
    seed: int = 0,
    variation: Variation | None = None,
    max_chars: int = 1 << 30,
) -> Plan:
    """Choose at most `limit` requests of each source, without what clashes with evaluation, in mixed order.

    The held-out ones come first: a collection that is stopped early has what calibration needs. `max_chars` bounds
    messages and tools together. Raises UsageError for unknown or missing sources.
    """
    chosen, left_out = list[Example](), dict[str, dict[str, int]]()
    for source in sources:
        examples, reasons = load_source(source, data)
        pool = tool_pool(examples)
        random.Random(f"{seed}-{source}").shuffle(examples)
        kept, seen = list[Example](), set[str]()
        for example in examples:
            if limit is not None and len(kept) >= limit:
                break
            reason = "" if example.calls else "no call"
            reason = reason or inventory.clash(example)
            if not reason:
                example = vary(example, pool, variation or Variation(), seed)
                size = len(json.dumps([example.messages, example.tools]))
                reason = "longer than asked for" if size > max_chars else inventory.clash(example)
            if not reason and example.fingerprint() in seen:
                reason = "the same request again"
            if reason:
                reasons[reason] += 1
                continue
            seen.add(example.fingerprint())
            kept.append(example)
        chosen += kept
        left_out[source] = dict(reasons)
    random.Random(f"{seed}-order").shuffle(chosen)
    chosen.sort(key=lambda example: not is_dev(example))
    return Plan(chosen, left_out)


class _Skipped(msgspec.Struct):
    id: str
    reason: str


def collect(
    planned: Plan,
    teacher: Teacher,
    out: Path,
    inventory: Inventory,
    concurrency: int = 1,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Counter[str]:
    """Ask the teacher every planned request that `out` has no answer for; return the counts of this and earlier runs.

    Every answer is on the disk before the next is asked for, so a kill loses none. Stops after `seconds`.
    Raises TeacherGone when the teacher cannot be reached; what was collected stays.
    """
    progress = progress or Silent()
    out.mkdir(parents=True, exist_ok=True)
    done = _answered(out)
    todo = [example for example in planned.examples if example.id not in done]
    total, finished = len(planned.examples), len(planned.examples) - len(todo)
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    progress.update("collect", finished, total)
    try:
        with ThreadPoolExecutor(max(1, concurrency)) as pool:
            waiting = iter(todo)
            running = {pool.submit(_ask, teacher, e): e for e in islice(waiting, concurrency)}
            while running:
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    example = running.pop(future)
                    _keep(out, example, future.result(), teacher.name, inventory)
                    finished += 1
                    progress.update("collect", finished, total)
                    following = next(waiting, None) if time.monotonic() < end else None
                    if following is not None:
                        running[pool.submit(_ask, teacher, following)] = following
    finally:
        counts = write_card(out, planned, teacher.name, inventory)
    return counts


def _ask(teacher: Teacher, example: Example) -> Any:
    try:
        return teacher.answer(example)
    except NoCall as reason:
        return str(reason)


def _keep(out: Path, example: Example, answer: Any, teacher: str, inventory: Inventory) -> None:
    """Write down an answer, or why there is none; the teacher may have called another tool than the data set."""
    trace = msgspec.structs.replace(example, calls=(answer,), teacher=teacher) if isinstance(answer, Call) else None
    if trace is None or (answer := inventory.clash(trace)):
        with (out / SKIPPED).open("ab") as sink:
            sink.write(msgspec.json.encode(_Skipped(example.id, answer)) + b"\n")
    else:
        append_example(out / TRACES, trace)


def _answered(out: Path) -> set[str]:
    for name in (TRACES, SKIPPED):
        _drop_torn_end(out / name)
    done = {example.id for example in read_examples(out / TRACES)} if (out / TRACES).exists() else set()
    return done | set(_skipped(out))


def _drop_torn_end(path: Path) -> None:
    """Cut off a last line that a kill left unfinished."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with path.open("r+b") as sink:
                sink.truncate(data.rfind(b"\n") + 1)


def _skipped(out: Path) -> dict[str, str]:
    if not (out / SKIPPED).exists():
        return {}
    lines = (out / SKIPPED).read_bytes().splitlines()
    return {row.id: row.reason for row in (msgspec.json.decode(line, type=_Skipped) for line in lines)}


def is_dev(example: Example) -> bool:
    """Tell whether an example belongs to the held-out part; all requests of an API are on the same side."""
    return int(hashlib.sha256(example.group.encode()).hexdigest(), 16) % 100 < DEV_PERCENT


def write_card(out: Path, planned: Plan, teacher: str, inventory: Inventory) -> Counter[str]:
    """Write the data card beside the traces; return the counts of answers by kind."""
    traces = list(read_examples(out / TRACES)) if (out / TRACES).exists() else []
    counts = Counter({"traces": len(traces)})
    counts.update(_skipped(out).values())
    by_source = Counter(example.source for example in traces)
    own = {example.id: example.calls[:1] for example in planned.examples}
    agree = sum(own.get(example.id) == example.calls for example in traces)
    card = {
        "teacher": teacher,
        "decoding": "greedy; the first call of an answer, if its name and argument names fit the schema",
        "answers": dict(counts),
        "equal_to_the_data_set": agree,
        "sources": {
            name: {"traces": by_source[name], "licence": SOURCES[name].licence, "left_out": planned.left_out[name]}
            for name in planned.left_out
        },
        "dev": sum(is_dev(example) for example in traces),
        "sha256": hashlib.sha256((out / TRACES).read_bytes()).hexdigest() if traces else None,
        "decontamination": {
            "evaluation_function_names": len(inventory.names),
            "evaluation_word_8_grams": len(inventory.ngrams),
            "clashes_left": sum(bool(inventory.clash(example)) for example in traces),
        },
    }
    temporary = out / f"{CARD}.tmp"
    temporary.write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
    temporary.replace(out / CARD)
    return counts
