"""BFCL's own checker where its package is installed; a stand-in shows how it is asked."""

import sys
import types

import pytest

from ooospec.bench import bfcl_checker
from ooospec.bench.datasets import BenchRequest
from ooospec.bench.gold import bfcl_gold
from ooospec.core import ToolCall

PARAMETERS = {
    "type": "dict", "properties": {"base": {"type": "integer"}, "unit": {"type": "string"}}, "required": ["base"],
}  # fmt: skip
REQUEST = BenchRequest(
    "bfcl-simple_python_7", ({"role": "user", "content": "x"},),
    [{"name": "area", "parameters": PARAMETERS}],
    bfcl_gold([{"area": {"base": [10], "unit": ["cm", ""]}}]),
)  # fmt: skip
CALL = ToolCall("area", {"base": 10}, '{"base": 10}')


@pytest.fixture
def stand_in(monkeypatch):
    """A package of the same shape whose table of models cannot be imported, as without a dozen client libraries."""
    asked = []

    def ast_checker(functions, given, right, language, category, model):
        asked.append((given, right, language, category))
        if given == [{"area": {"base": "trip"}}]:
            raise TypeError("unhashable")
        return {"valid": given == [{"area": {"base": 10}}]}

    for name in ("", ".constants", ".eval_checker", ".eval_checker.ast_eval"):
        package = types.ModuleType(f"bfcl_eval{name}")
        package.__path__ = []
        package.__spec__ = types.SimpleNamespace(origin=None, submodule_search_locations=[])
        monkeypatch.setitem(sys.modules, package.__name__, package)
    enums = types.ModuleType("bfcl_eval.constants.enums")
    enums.Language = types.SimpleNamespace(PYTHON="python", JAVA="java", JAVASCRIPT="javascript")
    checker = types.ModuleType("bfcl_eval.eval_checker.ast_eval.ast_checker")
    checker.ast_checker = ast_checker
    monkeypatch.setitem(sys.modules, enums.__name__, enums)
    monkeypatch.setitem(sys.modules, checker.__name__, checker)
    monkeypatch.delitem(sys.modules, "bfcl_eval.constants.model_config", raising=False)
    bfcl_checker._load.cache_clear()
    yield asked
    sys.modules.pop("bfcl_eval.constants.model_config", None)
    bfcl_checker._load.cache_clear()


def test_the_checker_is_asked_with_the_packages_own_forms(stand_in):
    assert bfcl_checker.leaderboard_verdict(REQUEST, [CALL]) is True
    given, right, language, category = stand_in[0]
    assert (given, right) == ([{"area": {"base": 10}}], [{"area": {"base": [10], "unit": ["cm", ""]}}])
    assert (language, category) == ("python", "simple_python")
    assert bfcl_checker.leaderboard_verdict(REQUEST, []) is False
    assert bfcl_checker.leaderboard_verdict(REQUEST, [ToolCall("area", {"base": "trip"}, "")]) is False


@pytest.mark.parametrize(
    ("id", "language"),
    [("bfcl-simple_java_3", "java"), ("bfcl-simple_javascript_3", "javascript"), ("bfcl-live_simple_1-2-3", "python")],
)
def test_languages(stand_in, id, language):
    bfcl_checker.leaderboard_verdict(BenchRequest(id, REQUEST.messages, REQUEST.tools, REQUEST.gold), [CALL])
    assert stand_in[0][2] == language


def test_without_the_package_or_a_right_answer_there_is_no_verdict(stand_in, monkeypatch):
    assert bfcl_checker.leaderboard_verdict(BenchRequest("bfcl-irrelevance_1", (), [], ()), []) is None
    monkeypatch.setattr(bfcl_checker.importlib.util, "find_spec", lambda name: None)
    bfcl_checker._load.cache_clear()
    assert bfcl_checker.leaderboard_verdict(REQUEST, [CALL]) is None and bfcl_checker.checker_version() is None


def test_the_real_checker():
    pytest.importorskip("bfcl_eval")
    bfcl_checker._load.cache_clear()
    assert bfcl_checker.leaderboard_verdict(REQUEST, [CALL]) is True
    assert bfcl_checker.leaderboard_verdict(REQUEST, [ToolCall("area", {"base": 11}, "")]) is False
