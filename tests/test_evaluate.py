"""Evaluation of sidecars: what counts as right, calibration, and the pages."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from ooospec.bench.datasets import BenchRequest
from ooospec.bench.gold import GoldCall
from ooospec.errors import UsageError
from ooospec.sidecar.adapter import read_habits
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.protocol import Function, SlotValue
from ooospec.train.collect import is_dev
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
from ooospec.train.records import Call, append_example
from ooospec.train.run import gather_cases, load_traces, run_training
from ooospec.train.trainer import LOG
from test_train import example, tool, trainer


def held_out(number):
    """Make a request that calls a function of the held-out part, for each number another one."""
    import msgspec

    for attempt in range(1000):
        name = f"held{number}x{attempt}"
        found = msgspec.structs.replace(
            example(number), tools=(tool(name, "city"), tool("news", "topic")), calls=(Call(name, {"city": "Rome"}),)
        )
        if is_dev(found):
            return found
    raise AssertionError("no name is held out")


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


def test_what_a_target_left_empty_is_a_value_and_null_is_none():
    import msgspec

    written = msgspec.structs.replace(example(0, city="", unit=None), teacher="t")
    trace = next(iter(cases_of_examples([written])))
    assert trace.filled("city") and trace.right("city", SlotValue(0, 0, 0, 50, ""))
    assert not trace.right("city", SlotValue(0, 0, 0, 50, None, False))
    assert not trace.filled("unit") and trace.right("unit", SlotValue(0, 0, 1, 50, None, False))


def test_a_request_that_the_sidecar_cannot_read_counts_as_unanswered(tiny):
    import msgspec

    long = msgspec.structs.replace(example(0), messages=({"role": "user", "content": "word " * 5000},))
    tally = evaluate(WavePredictor(tiny), list(cases_of_examples([long, example(1)])))["test"]
    assert tally.requests == 2 and tally.values == 2 and min(tally.payload_bytes) == 0


def test_a_limit_is_of_each_data_set_and_conditions_count_once(tmp_path):
    import msgspec

    for number in range(4):
        for source in ("a", "b"):
            said = ({"role": "user", "content": f"{source} {number}"},)
            one = msgspec.structs.replace(held_out(number), source=source, id=f"e{number}", messages=said)
            append_example(tmp_path / "t.jsonl", one)
    found = gather_cases((), None, "quick", [], [tmp_path / "t.jsonl"], 2)
    assert sorted((case.dataset, case.id) for case in found) == [("a", "e0"), ("a", "e1"), ("b", "e0"), ("b", "e1")]
    with pytest.raises(UsageError, match=r"No benchmark results in .*nowhere"):
        gather_cases((), str(tmp_path), "quick", [tmp_path / "nowhere"], [], None)


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


def test_at_most_four_requests_of_a_held_out_function(tmp_path):
    import msgspec

    one = held_out(0)
    for number in range(9):
        said = ({"role": "user", "content": f"weather {number}"},)
        append_example(tmp_path / "t.jsonl", msgspec.structs.replace(one, id=f"e{number}", messages=said))
    kept, found = load_traces([tmp_path / "t.jsonl"])
    assert (len(kept), len(found)) == (0, 4)


def test_calibrating_twice_is_calibrating_once(tmp_path, folder_of_tiny, monkeypatch):
    from ooospec.models.progress import Silent
    from ooospec.sidecar.adapter import Habits, write_habits
    from ooospec.train import run as runs

    def sure(predictor, cases, progress=None):
        chance = 1 / (1 + math.exp(-(predictor.habits.value_scale * 3 + predictor.habits.value_shift)))
        tally = Tally()
        tally.value_chances = [(chance, number < 24) for number in range(40)]
        return {"test": tally}

    monkeypatch.setattr(runs, "evaluate", sure)
    monkeypatch.setattr(runs, "load_sidecar", lambda *args: None)
    monkeypatch.setattr(runs, "WavePredictor", lambda loaded, habits: SimpleNamespace(habits=habits))
    write_habits(tmp_path, Habits(function_temperature=3.0))
    found = []
    for _ in range(2):
        told = runs.calibrate(folder_of_tiny, "tiny", tmp_path, [], None, Silent())
        found.append(read_habits(str(tmp_path)))
    assert found[0] == found[1] and found[0].value_scale < 1 and found[0].function_temperature == 1.0
    assert told == "chances calibrated on 40 values and 0 functions (too few: left as they are)"


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

    from ooospec.models.progress import Silent
    from ooospec.train.recipe import Recipe

    for number in range(40):
        append_example(tmp_path / "t.jsonl", held_out(number) if number % 8 == 0 else example(number))
    kept, others = load_traces([tmp_path / "t.jsonl"])
    assert (len(kept), len(others)) == (35, 5)
    recipe = Recipe(rank=4, alpha=8, batch=4, dropout=0.0)
    adapter, told = run_training(
        folder_of_tiny, "tiny", [tmp_path / "t.jsonl"], tmp_path / "run", recipe, 8, "float32", "cpu", Silent()
    )
    assert told.startswith("trained on 8 of 8 requests, 0 too long; chances calibrated on ")
    assert "too few: left as they are" in told
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
