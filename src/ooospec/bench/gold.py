"""Gold calls, and whether an answer's calls equal them.

BFCL lists acceptable values per argument; API-Bank and ToolAlpaca give one value as text, which is compared as text
with case, spaces and the quoting of numbers and lists aside. "" among the values = the argument may be left out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ooospec.core import ToolCall

MAY_BE_LEFT_OUT = ""


@dataclass(frozen=True, slots=True)
class GoldCall:
    """One right call. `arguments` maps a name to its acceptable values; None = not known."""

    name: str
    arguments: Mapping[str, tuple[Any, ...]] | None


@dataclass(frozen=True, slots=True)
class Quality:
    """How an answer compares with gold; `arguments` is None where gold does not know them."""

    names: bool
    arguments: bool | None


def text_gold(name: str, arguments: Mapping[str, Any]) -> GoldCall:
    """Make a gold call of one value an argument; an empty value means it is not given."""
    return GoldCall(name, {key: (value,) for key, value in arguments.items()})


def bfcl_gold(calls: Iterable[Mapping[str, Mapping[str, Sequence[Any]]]]) -> tuple[GoldCall, ...]:
    """Read BFCL's `ground_truth`."""
    return tuple(
        GoldCall(name, {key: tuple(values) or (MAY_BE_LEFT_OUT,) for key, values in arguments.items()})
        for call in calls
        for name, arguments in call.items()
    )


def judge(calls: Sequence[ToolCall], gold: Sequence[GoldCall]) -> Quality:
    """Compare an answer's calls with the gold calls, in any order."""
    names = sorted(_plain_name(call.name) for call in calls) == sorted(_plain_name(g.name) for g in gold)
    if any(g.arguments is None for g in gold):
        return Quality(names, None)
    left = list(calls)
    for wanted in gold:
        found = next((call for call in left if _same_call(call, wanted)), None)
        if found is None:
            return Quality(names, False)
        left.remove(found)
    return Quality(names, not left)


def _plain_name(name: str) -> str:
    return name.replace(".", "_").strip()


def _same_call(call: ToolCall, gold: GoldCall) -> bool:
    if _plain_name(call.name) != _plain_name(gold.name) or gold.arguments is None:
        return False
    given = {key: value for key, value in call.arguments.items() if value not in ("", None)}
    if not set(given) <= set(gold.arguments):
        return False
    return all(_acceptable(given, key, values) for key, values in gold.arguments.items())


def _acceptable(given: Mapping[str, Any], key: str, values: Sequence[Any]) -> bool:
    if key not in given:
        return any(value in (MAY_BE_LEFT_OUT, None) for value in values)
    return any(same_value(given[key], value) for value in values)


def same_value(given: Any, gold: Any) -> bool:
    """Tell whether a value is the gold one; how it is quoted or spelled does not matter."""
    if isinstance(given, dict) and isinstance(gold, dict):  # BFCL nests lists of acceptable values
        nested = {key: value if isinstance(value, list) else [value] for key, value in gold.items()}
        return set(given) <= set(nested) and all(_acceptable(given, key, values) for key, values in nested.items())
    if isinstance(given, list) and isinstance(gold, list):
        return len(given) == len(gold) and all(same_value(a, b) for a, b in zip(given, gold, strict=True))
    return bool(_plain(given) == _plain(gold))


def _plain(value: Any) -> Any:
    """Bring a value to the form in which quoting, case and spaces do not matter."""
    if isinstance(value, str):
        text = value.strip()
        try:
            read = ast.literal_eval(text) if text[:1] in "[{-0123456789" or text in ("True", "False") else text
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            read = text
        return _plain(read) if not isinstance(read, str) else "".join(text.lower().split())
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    return json.dumps(value, sort_keys=True, ensure_ascii=False).lower()
