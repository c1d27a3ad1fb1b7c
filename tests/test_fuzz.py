"""Fuzz every call format: `make fuzz` (a million inputs, some minutes on two cores), or with a count of your own.

Each input is a random text out of pieces of calls. No scanner, stream or drafter may raise, and a text must give the
same calls whole and in pieces. For the time, texts of 1,000 and 10,000 pieces are compared: at most 12x.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from rich.progress import track

from ooospec.chat.drafter import Guess, continuations
from ooospec.chat.formats.registry import FORMATS, CallFormat
from test_answer import answer
from test_formats import TOOLS, scan

BATCH = 1000
MAX_RATIO = 12.0


def pieces(call_format: CallFormat) -> list[str]:
    """List what random texts are made of."""
    listed = [
        "get_weather",
        "other",
        "s",
        '"s"',
        '"x"',
        '\\"',
        "\\u00e9",
        "é",
        "漢",
        "😀",
        " ",
        "\n",
        "null",
        "1.5e3",
        "</",
        "<think>",
    ]
    listed += [*"1{}()[],:=<>'\"\\", "</think>", *call_format.openers, *call_format.closers]
    for style in call_format.styles(""):
        listed += [style.head, style.opening, style.middle, style.colon, style.comma, style.tail, style.empty]
        listed += [style.closing, style.between]
    return [piece for piece in listed if piece]


def fuzz(name: str, seed: int) -> int:
    """Try a batch of random texts on a format; raises AssertionError naming the text that fails."""
    chance, call_format = random.Random(f"{name}-{seed}"), FORMATS[name]
    parts, style = pieces(call_format), call_format.styles("")[0]
    guess = Guess([(tool, 0.5) for tool in TOOLS], lambda _tool, _slot: None)
    for _ in range(BATCH):
        text = "".join(chance.choices(parts, k=chance.randint(1, 24)))
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 5)))
        try:
            whole = scan(call_format, text)
            assert scan(call_format, text, cuts) == whole, "other calls in pieces"
            assert answer(call_format, text, cuts, tools=TOOLS) == answer(call_format, text, (), tools=TOOLS)
            scanner = call_format.scanner(TOOLS)
            scanner.feed(text)
            for draft in continuations(scanner, style, guess):
                list(draft)
        except Exception as error:
            raise AssertionError(f"{name}: {text!r} cut at {cuts}: {type(error).__name__}: {error}") from error
    return BATCH


@pytest.mark.parametrize("name", list(FORMATS))
def test_random_pieces_of_calls_break_nothing(name):
    assert fuzz(name, 0) == BATCH


def growth(name: str) -> float:
    """Return how much longer a ten times longer text takes, the least of five."""
    chance, call_format = random.Random(name), FORMATS[name]
    long = "".join(chance.choices(pieces(call_format), k=10_000))
    took = []
    for text in (long[: len(long) // 10], long):
        times = []
        for _ in range(5):
            scanner, start = call_format.scanner(TOOLS), time.perf_counter()
            scanner.feed(text)
            times.append(time.perf_counter() - start)
        took.append(min(times))
    return took[1] / took[0]


def main(count: int) -> None:
    """Run the fuzz over all formats and print what was tried."""
    jobs = [(name, seed) for seed in range(-(-count // BATCH // len(FORMATS))) for name in FORMATS]
    with ProcessPoolExecutor() as pool:
        results = pool.map(fuzz, *zip(*jobs, strict=True), chunksize=4)
        done = sum(track(results, "fuzz", total=len(jobs)))
    print(f"{done:,} inputs over {len(FORMATS)} formats: no exception, no difference")
    ratios = {name: growth(name) for name in FORMATS}
    print("ten times the text takes " + ", ".join(f"{name} {ratio:.1f}x" for name, ratio in ratios.items()))
    slow = [name for name, ratio in ratios.items() if ratio > MAX_RATIO]
    if slow:
        sys.exit(f"more than {MAX_RATIO:.0f}x: {', '.join(slow)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
