"""Evaluation of sidecars: what counts as right, calibration, and the pages."""

import json
import math
import random

import pytest

from ooospec.bench.datasets import BenchRequest
from ooospec.bench.gold import GoldCall
from ooospec.errors import UsageError
from ooospec.sidecar.adapter import read_habits
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.protocol import Function, SlotValue
from ooospec.train.evaluate import (
    Tally,
    best_scaling,
    calibration_error,
    calibration_noise,
    cases_of_examples,
    cases_of_gold,
    count,
    evaluate,
)  # fmt: skip
from ooospec.train.plots import evaluation_page, line_chart, training_page
from ooospec.train.records import append_example
from ooospec.train.run import gather_cases, load_traces, run_training
from ooospec.train.trainer import LOG
from test_train import example, trainer


def case(**arguments):
    return next(iter(cases_of_examples([example(0, **arguments)])))


def test_counts_of_values_and_nulls():
    tally = Tally()
    answers = [Function(0, (0, 1), (90, 10)), SlotValue(0, 0, 0, 80, "Rome"), SlotValue(0, 0, 1, 60, None, False)]
    count(tally, case(city="Rome"), answers)
    shown = tally.to_dict()
    assert (
        shown["function_accuracy"] == shown["value_accuracy"] == shown["null_recall"] == shown["null_precision"] == 1.0
    )
    count(tally, case(city="Oslo", unit="c"), answers)
    shown = tally.to_dict()
    assert (shown["values"], shown["value_accuracy"]) == (3, pytest.approx(1 / 3, abs=1e-4))
    assert (shown["nulls"], shown["null_recall"], shown["null_precision"]) == (1, 1.0, 0.5)


def test_an_unanswered_slot_is_wrong_and_a_wrong_function_counts():
    tally = Tally()
    count(tally, case(city="Rome"), [Function(0, (1, 0), (90, 10))])
    assert (tally.functions_right, tally.values_right, tally.nulls_right) == (0, 0, 0)


def test_a_trace_must_be_met_exactly_and_gold_in_spirit():
    strict = next(iter(cases_of_examples([example(0, city="3")])))
    assert strict.exact is False  # the data set's own call: text
    request = BenchRequest("r", ({"role": "user", "content": "x"},), list(example().tools), (
        GoldCall("weather", {"city": ("Rome", "Roma"), "unit": ("c", "")}),))  # fmt: skip
    gold = next(iter(cases_of_gold("bfcl", [request])))
    assert gold.right("city", SlotValue(0, 0, 0, 50, "roma")) and not gold.right("city", SlotValue(0, 0, 0, 50, "Oslo"))
    assert gold.right("unit", SlotValue(0, 0, 1, 50, None, False)) and not gold.filled("unit")
    assert gold.right("unit", SlotValue(0, 0, 1, 50, "c")) and not gold.right("unit", None)
    import msgspec

    trace = next(iter(cases_of_examples([msgspec.structs.replace(example(0, city="Rome"), teacher="t")])))
    assert trace.exact and not trace.right("city", SlotValue(0, 0, 0, 50, "rome"))
    assert list(cases_of_gold("bfcl", [BenchRequest("r", request.messages, request.tools, ())])) == []


def test_calibration_error_of_honest_and_of_sure_but_wrong_answers():
    honest = [(0.75, True)] * 75 + [(0.75, False)] * 25
    assert calibration_error(honest) == pytest.approx(0.0)
    assert calibration_error([(0.95, False)] * 10) == pytest.approx(0.95)
    assert calibration_error([]) == 0.0 == calibration_noise([])


def test_what_honest_chances_show_by_chance():
    draw = random.Random(0)
    chances = [draw.random() for _ in range(60)]
    seen = [calibration_error([(chance, draw.random() < chance) for chance in chances]) for _ in range(400)]
    assert calibration_noise([(chance, True) for chance in chances]) == pytest.approx(sum(seen) / 400, rel=0.1)


def test_scaling_makes_chances_honest():
    sure = [(0.99, True)] * 60 + [(0.99, False)] * 40
    for shifted in (True, False):
        scale, shift = best_scaling(sure, shifted)
        honest = 1 / (1 + math.exp(-(scale * math.log(99) + shift)))
        assert honest == pytest.approx(0.6, abs=0.03) and (shifted or shift == 0.0)
    mixed = sure + [(0.3, True)] * 5 + [(0.3, False)] * 45
    scale, shift = best_scaling(mixed)
    scaled = [(1 / (1 + math.exp(-(scale * math.log(c / (1 - c)) + shift))), r) for c, r in mixed]
    assert calibration_error(scaled) < 0.05 < calibration_error(mixed)
    assert best_scaling(sure[:10]) == (1.0, 0.0)


def test_evaluation_of_a_wave_and_its_page(tiny):
    cases = list(cases_of_examples([example(i) for i in range(2)]))
    tallies = evaluate(WavePredictor(tiny), cases)
    assert tallies["test"].requests == 2 and tallies["test"].payload_bytes[0] > 0
    page = evaluation_page(tallies, "T", "about <b>")
    assert "Calibration: values" in page and "about &lt;b&gt;" in page and "<script" not in page


def test_line_chart_of_nothing_is_nothing():
    assert line_chart({"a": []}) == ""
    assert "polyline" in line_chart({"a": [(0.0, 0.0), (1.0, 2.0)]})


def test_a_whole_run_from_traces_to_a_calibrated_adapter(tmp_path, folder_of_tiny):
    import msgspec

    from ooospec.models.progress import Silent
    from ooospec.train.recipe import Recipe

    for number in range(40):
        append_example(tmp_path / "t.jsonl", msgspec.structs.replace(example(number), group=f"g{number}"))
    kept, held_out = load_traces([tmp_path / "t.jsonl"])
    assert len(kept) + len(held_out) == 40 and held_out
    recipe = Recipe(rank=4, alpha=8, batch=4, dropout=0.0)
    adapter = run_training(
        folder_of_tiny, "tiny", [tmp_path / "t.jsonl"], tmp_path / "run", recipe, 8, "float32", "cpu", Silent()
    )
    habits = read_habits(str(adapter))
    assert habits.answers_null and habits.prior_weight == 0.0 and habits.base == "tiny"
    assert habits.base_shape["hidden_size"] == 64
    assert "Loss per question" in (tmp_path / "run" / "training.html").read_text()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny" and str(tmp_path) not in json.dumps(config)


def test_traces_that_do_not_fit_are_refused(tmp_path):
    import msgspec

    append_example(tmp_path / "t.jsonl", msgspec.structs.replace(example(), tools=()))
    with pytest.raises(UsageError, match=r"cannot be trained on .no tools"):
        load_traces([tmp_path / "t.jsonl"])
    with pytest.raises(UsageError, match="Nothing to evaluate on"):
        gather_cases((), None, "quick", [], [], None)


def test_training_page_of_a_run(tmp_path):
    list(trainer(tmp_path, dev=[example(3)]).run())
    page = training_page(tmp_path / LOG, "T", "x")
    assert page.count("<svg") == 2
