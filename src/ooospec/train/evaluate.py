"""How good a sidecar's hints are: against gold, or against what a target really wrote."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ooospec.bench.datasets import BenchRequest
from ooospec.bench.gold import MAY_BE_LEFT_OUT, same_value
from ooospec.bench.rows import Row
from ooospec.errors import ContextLengthError
from ooospec.models.progress import Progress, Silent
from ooospec.sidecar import protocol
from ooospec.sidecar.boilerplate import Boilerplate
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.prompt import NEUTRAL_DIALOGUE
from ooospec.sidecar.protocol import Function, SlotValue, Submit, ToolSignature, Turn
from ooospec.train.records import Example, submission

BINS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A request with the call that is taken for right."""

    id: str
    dataset: str
    tools: tuple[ToolSignature, ...]
    dialogue: tuple[Turn, ...]
    name: str
    arguments: Mapping[str, tuple[Any, ...]]
    """Slot -> acceptable values; `MAY_BE_LEFT_OUT` among them = it need not be given. Slots not here are left out."""
    exact: bool
    """Values must be equal as JSON; otherwise quoting and case do not matter (gold texts)."""

    def right(self, slot: str, answer: SlotValue | None) -> bool:
        """Tell whether an answer about a slot is right; no answer never is."""
        acceptable = self.arguments.get(slot, ())
        if answer is None:
            return False
        if not answer.present:
            return not acceptable or self._optional(acceptable)
        same = _equal if self.exact else same_value
        return any(same(answer.value, value) for value in acceptable)

    def filled(self, slot: str) -> bool:
        """Tell whether the right call gives this slot a value."""
        acceptable = self.arguments.get(slot, ())
        return bool(acceptable) and not self._optional(acceptable) and acceptable != (None,)

    def _optional(self, acceptable: tuple[Any, ...]) -> bool:
        """Tell whether a slot need not be given; what a target wrote is a value, even if it is empty."""
        return not self.exact and MAY_BE_LEFT_OUT in acceptable


def _equal(given: Any, wanted: Any) -> bool:
    return type(given) is type(wanted) and bool(given == wanted)


def cases_of_examples(examples: Iterable[Example]) -> Iterator[Case]:
    """Take the first call of each training example."""
    for example in examples:
        if example.calls:
            tools, dialogue = example.signatures()
            call = example.calls[0]
            arguments = _written(call.arguments)
            yield Case(example.id, example.source, tools, dialogue, call.name, arguments, bool(example.teacher))


def cases_of_gold(benchmark: str, requests: Iterable[BenchRequest]) -> Iterator[Case]:
    """Take benchmark requests whose gold answer is exactly one call of a listed function."""
    for request in requests:
        tools, dialogue = submission(request.messages, request.tools)
        gold = request.gold[0] if request.gold is not None and len(request.gold) == 1 else None
        if gold is None or gold.arguments is None or gold.name not in {tool.name for tool in tools}:
            continue
        yield Case(request.id, f"{benchmark} (gold)", tools, dialogue, gold.name, gold.arguments, exact=False)


def cases_of_results(rows: Iterable[Row], requests: Mapping[str, BenchRequest]) -> Iterator[Case]:
    """Take what the targets of a benchmark run wrote by plain decoding: the first call of each answer."""
    for row in rows:
        request = requests.get(row.request)
        if row.method != "ar" or not row.calls or request is None:
            continue
        tools, dialogue = submission(request.messages, request.tools)
        name, given = row.calls[0]
        if name in {tool.name for tool in tools}:
            arguments = _written(given)
            label = f"{row.benchmark} ({row.target})"
            yield Case(row.request, label, tools, dialogue, name, arguments, exact=True)


def _written(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what a call gives its slots; null is learned, and judged, as left out."""
    return {slot: (value,) for slot, value in arguments.items() if value is not None}


@dataclass(slots=True)
class Tally:
    """Counts over the cases of one data set. "Values" are slots that the right call fills, "nulls" the others."""

    requests: int = 0
    functions_right: int = 0
    values: int = 0
    values_right: int = 0
    nulls: int = 0
    nulls_right: int = 0
    said_null: int = 0
    function_chances: list[tuple[float, bool]] = field(default_factory=list)
    """(chance, right)"""
    value_chances: list[tuple[float, bool]] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    function_ms: list[float] = field(default_factory=list)
    wave_ms: list[float] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, float | int | None]:
        """Give shares and medians as plain values; None where nothing was counted."""

        def share(part: int, whole: int) -> float | None:
            return part / whole if whole else None

        def median(values: Sequence[float]) -> float | None:
            return round(statistics.median(values), 1) if values else None

        return {
            "requests": self.requests,
            "function_accuracy": share(self.functions_right, self.requests),
            "values": self.values,
            "value_accuracy": share(self.values_right, self.values),
            "nulls": self.nulls,
            "null_recall": share(self.nulls_right, self.nulls),
            "null_precision": share(self.nulls_right, self.said_null),
            "function_calibration_error": round(calibration_error(self.function_chances), 4),
            "function_calibration_noise": round(calibration_noise(self.function_chances), 4),
            "value_calibration_error": round(calibration_error(self.value_chances), 4),
            "value_calibration_noise": round(calibration_noise(self.value_chances), 4),
            "prefill_ms": median(self.prefill_ms),
            "function_ms": median(self.function_ms),
            "wave_ms": median(self.wave_ms),
            "payload_bytes": round(statistics.mean(self.payload_bytes), 1) if self.payload_bytes else None,
        }


def calibration_error(chances: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error over ten bins of the chance (Naeini et al., 2015)."""
    return sum(len(part) / len(chances) * abs(chance - right) for chance, right, part in calibration_bins(chances))


def calibration_noise(chances: Sequence[tuple[float, bool]]) -> float:
    """Return the calibration error that so few answers show on average if their chances are honest.

    A bin's share of right answers then differs from its mean chance by sqrt(2 / pi) of its standard deviation.
    """
    spreads = [math.sqrt(sum(chance * (1 - chance) for chance, _ in part)) for _, _, part in calibration_bins(chances)]
    return math.sqrt(2 / math.pi) * sum(spreads) / len(chances) if chances else 0.0


def calibration_bins(chances: Sequence[tuple[float, bool]]) -> Iterator[tuple[float, float, list[tuple[float, bool]]]]:
    """Give (mean chance, share right, members) of every bin that is not empty."""
    for lower in range(BINS):
        part = [(c, r) for c, r in chances if lower <= min(c * BINS, BINS - 1e-9) < lower + 1]
        if part:
            yield statistics.mean(c for c, _ in part), statistics.mean(float(r) for _, r in part), part


MIN_ANSWERS = 30
"""Fewer answers do not say how honest chances are."""
_SCALES, _SHIFTS = np.linspace(0.1, 2.0, 39), np.linspace(-3.0, 3.0, 61)


def best_scaling(chances: Sequence[tuple[float, bool]], shifted: bool = True) -> tuple[float, float]:
    """Return the (scale, shift) of the chances' log-odds with the least log loss (Platt, 1999); (1, 0) for too few.

    Without a shift the scale is one over a temperature (Guo et al., 2017).
    """
    if len(chances) < MIN_ANSWERS:
        return 1.0, 0.0
    given = np.clip(np.array([chance for chance, _ in chances]), 0.01, 0.99)
    right = np.array([hit for _, hit in chances])
    odds = np.log(given / (1 - given))
    shifts = _SHIFTS if shifted else np.zeros(1)
    scaled = _SCALES[:, None, None] * odds + shifts[None, :, None]
    losses = np.logaddexp(0.0, np.where(right, -scaled, scaled)).mean(-1)
    scale, shift = np.unravel_index(int(losses.argmin()), losses.shape)
    return float(_SCALES[scale].round(3)), float(shifts[shift].round(3))


def evaluate(
    predictor: WavePredictor, cases: Sequence[Case], warm: bool = True, progress: Progress | None = None
) -> dict[str, Tally]:
    """Run a wave for every case, in this order; return a tally per data set.

    `warm` = tools are in the sidecar's KV cache before. As in a decoder, what earlier cases end with moves up. A
    request that is longer than the sidecar reads counts as one without answers.
    """
    progress, tallies, boilerplate = progress or Silent(), dict[str, Tally](), Boilerplate()
    for number, case in enumerate(cases):
        progress.update("evaluate sidecar", number, len(cases))
        if warm:
            with contextlib.suppress(ContextLengthError):
                for _ in predictor.wave(Submit(number, case.tools, NEUTRAL_DIALOGUE)):
                    pass
        tally = tallies.setdefault(case.dataset, Tally())
        turns = boilerplate.move_up([(turn.role, turn.text) for turn in case.dialogue])
        dialogue = tuple(Turn(role, text) for role, text in turns)
        start = time.perf_counter()
        answers, function_ms, size = list[Function | SlotValue](), None, 0
        with contextlib.suppress(ContextLengthError):
            for message in predictor.wave(Submit(number, case.tools, dialogue, fresh=not warm)):
                if message is not None:
                    answers.append(message)
                    size += len(protocol.encoder.encode(message))
                    function_ms = function_ms or (time.perf_counter() - start) * 1e3
            tally.wave_ms.append((time.perf_counter() - start) * 1e3)
            tally.function_ms.append(function_ms or tally.wave_ms[-1])
            tally.prefill_ms.append(predictor.stats.prefill_ms)
        tally.payload_bytes.append(size)
        count(tally, case, answers)
    progress.update("evaluate sidecar", len(cases), len(cases))
    return tallies


def count(tally: Tally, case: Case, answers: Sequence[Function | SlotValue]) -> None:
    """Compare the answers about a case's tool with its call."""
    index = next(i for i, tool in enumerate(case.tools) if tool.name == case.name)
    chosen = next((a for a in answers if isinstance(a, Function)), None)
    right = chosen is not None and chosen.tools[0] == index
    tally.requests += 1
    tally.functions_right += right
    if chosen is not None and len(case.tools) > 1:
        tally.function_chances.append((chosen.percents[0] / 100, right))
    said = {a.slot: a for a in answers if isinstance(a, SlotValue) and a.tool == index}
    for number, slot in enumerate(case.tools[index].slots):
        answer = said.get(number)
        hit = case.right(slot.name, answer)
        if case.filled(slot.name):
            tally.values += 1
            tally.values_right += hit
        else:
            tally.nulls += 1
            tally.nulls_right += hit and answer is not None and not answer.present
        if answer is not None:
            tally.said_null += not answer.present
            if answer.present:
                tally.value_chances.append((answer.percent / 100, hit))
