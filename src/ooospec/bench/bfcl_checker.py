"""BFCL's own checker, where its package is installed: the verdict the leaderboard would give.

The package's checker needs only its own type tables, but imports a table of all models and with it the client
libraries of a dozen providers. Where those are missing, a table that says the same of every model (names are compared
as they are) takes its place.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ooospec.bench.datasets import BenchRequest
from ooospec.core import ToolCall

PACKAGE = "bfcl_eval"
_MODELS = f"{PACKAGE}.constants.model_config"
_CHECKER = f"{PACKAGE}.eval_checker.ast_eval.ast_checker"


def checker_version() -> str | None:
    """Return the version of the installed package; None without it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _load() -> tuple[Callable[..., Any], Any] | None:
    """Return the checker and its Language enum, or None where it cannot be had."""
    if checker_version() is None:
        return None
    try:
        try:
            importlib.import_module(_MODELS)
        except ImportError:
            table = types.ModuleType(_MODELS)
            same = types.SimpleNamespace(underscore_to_dot=False)
            table.MODEL_CONFIG_MAPPING = defaultdict(lambda: same)  # type: ignore[attr-defined]
            sys.modules[_MODELS] = table
        checker = importlib.import_module(_CHECKER).ast_checker
        language = importlib.import_module(f"{PACKAGE}.constants.enums").Language
    except (ImportError, AttributeError):
        return None
    return checker, language


def leaderboard_verdict(request: BenchRequest, calls: Sequence[ToolCall]) -> bool | None:
    """Say whether BFCL's checker takes the calls; None without the checker or without a right answer."""
    loaded = _load()
    if loaded is None or not request.gold or request.tools is None:
        return None
    checker, language = loaded
    category = request.id.removeprefix("bfcl-").rsplit("_", 1)[0]
    spoken = language.JAVA if "java" in category and "javascript" not in category else language.PYTHON
    spoken = language.JAVASCRIPT if "javascript" in category else spoken
    right = [{call.name: {k: list(v) for k, v in (call.arguments or {}).items()}} for call in request.gold]
    given = [{call.name: dict(call.arguments)} for call in calls]
    try:
        verdict = checker(request.tools, given, right, spoken, category, "ooospec")
    except Exception:  # the checker trips over values no API would take: to the leaderboard that is a wrong answer
        return False
    return bool(verdict["valid"])
