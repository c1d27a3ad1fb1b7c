"""Guesses about the rest of a JSON value that is being written, for where the predicted value does not hold."""

from __future__ import annotations

import re
from functools import lru_cache

MIN_COPY_CHARACTERS = 2
MAX_COPY_CHARACTERS = 28
_OPEN = {"{": "}", "[": "]"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("|\\?\Z)', re.DOTALL)


@lru_cache(4)
def ending(partial: str) -> str | None:
    """Return the characters that end a value that says `partial` so far; "" where it may end as it is, None if not.

    Strings get their quote, lists and objects their brackets: '["a", "b' -> '"]', '{"k": 1' -> '}', '12' -> ''.
    """
    if not partial.strip():
        return None
    bare, in_string = _without_strings(partial)
    if in_string is None or (not in_string and bare.rstrip()[-1] in ",:"):
        return None
    closers: list[str] = []
    for char in bare:
        if char in _OPEN:
            closers.append(_OPEN[char])
        elif char in "}]" and closers:
            closers.pop()
    return ('"' if in_string else "") + "".join(reversed(closers))


def _without_strings(text: str) -> tuple[str, bool | None]:
    """Replace strings by `"`; tell whether the text ends inside one, None if amid an escape."""
    ends = [found[1] for found in _STRING.finditer(text)]
    last = ends[-1] if ends else '"'
    return _STRING.sub('"', text), None if last == "\\" else not last


def realigned(partial: str, predicted: str) -> str:
    """Return the rest of `predicted` from where `partial` has come to, if the two begin alike but differ since.

    A date or time with one wrong part goes on as predicted after it: '"2023-03-20 14' and '"2023-03-20 12:00"' give
    ':00"'.
    """
    alike = next((i for i, (a, b) in enumerate(zip(partial, predicted, strict=False)) if a != b), len(partial))
    if alike < 2 or alike == len(partial) or len(partial) >= len(predicted):
        return ""
    return predicted[len(partial) :]


@lru_cache(4)
def copied(partial: str, source: str) -> str:
    """Return what follows the last place in `source` that ends like `partial` (2 characters or more), within a line.

    Values are mostly spans of the request; the suffix is searched inside the value only, the longest that there is:
    where one is missing, longer ones are too.
    """
    content = partial[partial.rfind('"') + 1 :]
    after, size, longest = -1, MIN_COPY_CHARACTERS - 1, min(len(content), MAX_COPY_CHARACTERS)
    while size < longest:
        middle = (size + longest + 1) // 2
        at = source.rfind(content[-middle:])
        if at >= 0:
            after, size = at + middle, middle
        else:
            longest = middle - 1
    return _span(source[after : after + MAX_COPY_CHARACTERS]) if after >= 0 else ""


def _span(text: str) -> str:
    """Cut at what cannot stand inside a string value."""
    for index, char in enumerate(text):
        if char in '"\n\\<>{}[]':
            return text[:index]
    return text
