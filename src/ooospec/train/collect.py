"""Collect a teacher's calls for training requests: resumable, decontaminated, with a data card."""

from __future__ import annotations

import hashlib
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ooospec.errors import UsageError
from ooospec.models.progress import Progress, Silent
from ooospec.train.augment import Variation, tool_pool, vary
from ooospec.train.decontaminate import Inventory, normalized_name
from ooospec.train.records import Example, append_example, read_examples
from ooospec.train.sources import ROW_FAULTS, SOURCES, load_source
from ooospec.train.teachers import NoAnswer, NoCall, Teacher

TRACES, SKIPPED, CARD = "traces.jsonl", "skipped.jsonl", "card.json"
DEV_PERCENT = 5
GIVE_UP = 2
"""Requests without an answer, one after the other, that end a collection."""


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
            try:
                reason = "" if example.calls else "no call"
                reason = reason or inventory.clash(example)
                reason = reason or ("the same request again" if example.fingerprint() in seen else "")
                if not reason:
                    seen.add(example.fingerprint())
                    example = vary(example, pool, variation or Variation(), seed)
                    size = len(json.dumps([example.messages, example.tools], allow_nan=False))
                    reason = "longer than asked for" if size > max_chars else inventory.clash(example)
            except ROW_FAULTS:
                reason = "row of another form"
            reasons[reason] += bool(reason)
            kept += [] if reason else [example]
        chosen += kept
        left_out[source] = dict(+reasons)
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

    Every answer is on the disk as soon as it is there, so a kill loses none. Stops after `seconds`. A request whose
    answer did not come is asked again at the next start. Raises TeacherGone when the teacher cannot be reached; what
    was collected, and asked meanwhile, stays. Raises UsageError for a folder of another teacher's answers.
    """
    progress = progress or Silent()
    out.mkdir(parents=True, exist_ok=True)
    done = _answered(out, teacher.name)
    todo = [example for example in planned.examples if example.id not in done]
    total, finished = len(planned.examples), len(planned.examples) - len(todo)
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    progress.update("collect", finished, total)
    stop, failure, silent, unanswered = threading.Event(), None, 0, 0
    try:
        for example, answer in _ask_all(teacher, todo, concurrency, stop):
            if isinstance(answer, Exception):
                postponed = isinstance(answer, NoAnswer)
                silent, unanswered = silent + postponed, unanswered + postponed
                if not postponed or silent >= GIVE_UP:
                    failure = failure or answer
                    stop.set()
                continue
            _keep(out, example, answer, inventory)
            silent, finished = 0, finished + 1
            progress.update("collect", finished, total)
            if time.monotonic() >= end:
                stop.set()
    finally:
        stop.set()
        counts = write_card(out, planned, inventory)
    if failure is not None:
        raise failure
    return counts + Counter({"without an answer, to be asked again": unanswered})


Answer = Example | str | Exception
"""The request with the teacher's call, why there is none, or why there is no answer."""


def _ask_all(
    teacher: Teacher, todo: Sequence[Example], concurrency: int, stop: threading.Event
) -> Iterator[tuple[Example, Answer]]:
    """Ask until `stop`, and give all answers to what was asked. Threads are daemons: an interrupt waits for none."""
    waiting, lock, room = iter(todo), threading.Lock(), threading.Semaphore(concurrency)
    given: queue.SimpleQueue[tuple[Example, Answer] | None] = queue.SimpleQueue()

    def work() -> None:
        while room.acquire() and not stop.is_set():
            with lock:
                example = next(waiting, None)
            if example is None:
                break
            given.put((example, _ask(teacher, example)))
        given.put(None)

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    running = concurrency
    while running:
        answered = given.get()
        if answered is None:
            running -= 1
        else:
            yield answered
            room.release()


def _ask(teacher: Teacher, example: Example) -> Answer:
    try:
        return msgspec.structs.replace(example, calls=(teacher.answer(example),), teacher=teacher.name)
    except NoCall as reason:
        return str(reason)
    except Exception as error:
        return error


def _keep(out: Path, example: Example, answer: Example | str, inventory: Inventory) -> None:
    """Write down an answer, or why there is none; the teacher may have called another tool than the data set."""
    reason = answer if isinstance(answer, str) else inventory.clash(answer)
    if isinstance(answer, str) or reason:
        with (out / SKIPPED).open("ab") as sink:
            sink.write(msgspec.json.encode(_Skipped(example.id, reason)) + b"\n")
    else:
        append_example(out / TRACES, answer)


def _answered(out: Path, teacher: str) -> set[str]:
    for name in (TRACES, SKIPPED):
        _drop_torn_end(out / name)
    traces = _traces(out)
    others = {trace.teacher for trace in traces} - {teacher}
    if others:
        raise UsageError(
            f"{out} holds answers of {', '.join(sorted(others))}; choose another --out for those of {teacher} "
            "(`ooospec train` takes several folders)."
        )
    return {trace.id for trace in traces} | set(_skipped(out))


def _traces(out: Path) -> list[Example]:
    return list(read_examples(out / TRACES)) if (out / TRACES).exists() else []


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
    found: dict[str, str] = {}
    for number, line in enumerate((out / SKIPPED).read_bytes().splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=_Skipped)
        except msgspec.DecodeError as error:
            raise UsageError(f"{out / SKIPPED}, line {number} is damaged ({error}); remove that line.") from error
        found[row.id] = row.reason
    return found


def is_dev(example: Example) -> bool:
    """Tell whether an example is held out: by the name of the function that it calls first."""
    name = normalized_name(example.calls[0].name) if example.calls else ""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < DEV_PERCENT


def write_card(out: Path, planned: Plan, inventory: Inventory) -> Counter[str]:
    """Write the data card beside the traces; return the counts of answers by kind."""
    traces = _traces(out)
    counts = Counter({"traces": len(traces)})
    counts.update(_skipped(out).values())
    by_source = Counter(example.source for example in traces)
    own = {example.id: example.calls[:1] for example in planned.examples}
    agree = sum(own.get(example.id) == example.calls for example in traces)
    card = {
        "teachers": dict(Counter(trace.teacher for trace in traces)),
        "decoding": "greedy; the first call of an answer, if its name and argument names fit the schema",
        "answers": dict(counts),
        "equal_to_the_data_set": agree,
        "sources": {
            name: {"traces": by_source[name], "licence": SOURCES[name].licence, "left_out": planned.left_out.get(name)}
            for name in SOURCES
            if name in by_source or name in planned.left_out
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
