"""Packing and training on tiny models: the same questions and mask as the wave, exact resume, clear errors."""

import json

import msgspec
import pytest
import torch

from conftest import load_tiny
from ooospec.errors import UsageError
from ooospec.train.packing import FUNCTION, NULL, VALUE, pack, questions
from ooospec.train.recipe import SHIPPED, Recipe, read_recipe
from ooospec.train.records import Call, Example
from ooospec.train.trainer import Trainer, learning_rate, packed_loss


def tool(name, *slots, required=()):
    properties = {slot: {"type": "string", "description": slot} for slot in slots}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}


def example(number=0, **arguments):
    arguments = arguments or {"city": f"town {number}"}
    return Example(
        id=f"e{number}", source="test", messages=({"role": "user", "content": f"weather {number}"},),
        tools=(tool("weather", "city", "unit"), tool("news", "topic")), calls=(Call("weather", arguments),),
    )  # fmt: skip


def trainer(out, recipe=None, count=6, dev=(), seed=0, start=None, data=""):
    loaded = load_tiny("llama", seed)
    recipe = recipe or Recipe(rank=4, alpha=8, batch=2, learning_rate=3e-3, checkpoint_every=1, evaluate_every=2)
    packed_dev = [pack(e, loaded) for e in dev]
    return Trainer(loaded, recipe, out, count, lambda i: pack(example(i), loaded), packed_dev, start, data)


def test_a_question_for_the_function_and_every_slot_of_the_called_tool():
    asked = list(questions(example()))
    assert [(q.kind, q.answer) for q in asked] == [
        (FUNCTION, 'weather"'),
        (VALUE, ' "town 0"}}'),
        (NULL, " null}}"),
    ]
    assert list(questions(msgspec.structs.replace(example(), calls=()))) == []


def test_packed_logits_equal_those_of_each_question_alone(tiny):
    packed = pack(example(), tiny)
    with torch.inference_mode():
        _, right = packed_loss(tiny.model, packed, torch.device("cpu"))
        together = tiny.model(
            input_ids=torch.tensor([packed.tokens]), position_ids=torch.tensor([packed.positions]),
            attention_mask=torch.from_numpy(packed.visible)[None, None],
        ).logits[0]  # fmt: skip
        from ooospec.sidecar.prompt import prefix_ids

        prefix = prefix_ids(tiny, *example().signatures())
        for number, question in enumerate(questions(example())):
            ids = tiny.codec.encode(question.text + question.answer)
            alone = tiny.model(input_ids=torch.tensor([[*prefix, *ids]])).logits[0]
            rows = [row for row, owner in zip(packed.rows, packed.owners, strict=True) if owner == number]
            torch.testing.assert_close(together[rows], alone[-len(rows) - 1 : -1], rtol=1e-4, atol=1e-4)
    assert {kind: len(hits) for kind, hits in right.items()} == {FUNCTION: 1, VALUE: 1, NULL: 1}


def test_weights_of_a_question_sum_to_its_share():
    packed = pack(example(), load_tiny("llama"))
    sums = [sum(w for w, o in zip(packed.weights, packed.owners, strict=True) if o == n) for n in range(3)]
    assert sums == pytest.approx([1.0, 1.0, 0.5])


def test_too_long_or_without_calls_is_not_packed(tiny_llama):
    assert pack(example(), tiny_llama, max_tokens=10) is None
    assert pack(msgspec.structs.replace(example(), calls=()), tiny_llama) is None


def test_training_lowers_the_loss_and_leaves_the_base_alone(tmp_path):
    recipe = Recipe(rank=8, alpha=16, dropout=0.0, batch=6, epochs=25, learning_rate=1e-2, evaluate_every=25)
    run = trainer(tmp_path, recipe, dev=[example(2)])
    before = {name: p.clone() for name, p in run.model.named_parameters() if not p.requires_grad}
    reports = list(run.run())
    assert reports[-1].step == 25 and reports[-1].loss < 0.5 * reports[0].loss
    assert reports[-1].dev_loss < reports[0].loss and set(reports[-1].dev_right) == {FUNCTION, VALUE, NULL}
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters() if name in before)


def test_resume_after_a_kill_gives_the_same_weights(tmp_path):
    straight = trainer(tmp_path / "a")
    list(straight.run())
    stopped = trainer(tmp_path / "b").run()
    next(stopped)
    next(stopped)
    stopped.close()
    (tmp_path / "b" / "checkpoint.new").mkdir()  # a kill in the middle of the next checkpoint
    again = trainer(tmp_path / "b")
    assert again.step == 2
    list(again.run())
    assert all(torch.equal(a, b) for a, b in zip(straight.masters, again.masters, strict=True))
    steps = [json.loads(line)["step"] for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_a_kill_between_the_two_renames_is_survived(tmp_path):
    run = trainer(tmp_path)
    next(iter(run.run()))
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    assert trainer(tmp_path).step == 1


def test_a_failing_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    steps = run.run()
    next(steps)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        next(steps)
    monkeypatch.undo()
    assert trainer(tmp_path).step == 1


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    next(iter(trainer(tmp_path).run()))
    with pytest.raises(UsageError, match=r"other settings.*rank 4, now 8"):
        trainer(tmp_path, Recipe(rank=8, alpha=8, batch=2, learning_rate=3e-3, checkpoint_every=1, evaluate_every=2))


def test_other_examples_in_the_same_folder_are_refused(tmp_path):
    next(iter(trainer(tmp_path, data="a").run()))
    assert trainer(tmp_path, data="a").step == 1
    with pytest.raises(UsageError, match=r"other settings.*data 'a', now 'b'"):
        trainer(tmp_path, data="b")


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", lambda b: b[:200] + b"x" * 200 + b[400:]])
def test_a_damaged_checkpoint_is_told(tmp_path, damage):
    next(iter(trainer(tmp_path).run()))
    state = tmp_path / "checkpoint" / "state.pt"
    state.write_bytes(damage(state.read_bytes()))
    with pytest.raises(UsageError, match=r"state\.pt is damaged .*remove .*checkpoint to begin anew"):
        trainer(tmp_path)


def test_a_log_without_a_checkpoint_is_begun_anew(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    list(trainer(tmp_path).run())
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_requests_that_are_all_too_long_are_told(tmp_path):
    run = trainer(tmp_path)
    run.pack = lambda index: None
    with pytest.raises(UsageError, match=r"all 6 examples ask nothing, or have more tokens than max_tokens = 2048"):
        list(run.run())


def test_nothing_to_train_on_and_wrong_layers_are_told(tmp_path):
    with pytest.raises(UsageError, match="nothing to train on"):
        trainer(tmp_path, count=0)
    with pytest.raises(UsageError, match="first_layer must be from 0 to 1"):
        trainer(tmp_path, Recipe(first_layer=2))


def test_a_run_may_begin_with_an_adapter(tmp_path):
    first = trainer(tmp_path / "first")
    list(first.run())
    first.save_adapter(tmp_path / "adapter")
    other_scale = Recipe(rank=4, alpha=2, batch=2, learning_rate=3e-3, checkpoint_every=1)
    second = trainer(tmp_path / "second", other_scale, start=tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        first.model.eval(), second.model.eval()
        torch.testing.assert_close(second.model(ids).logits, first.model(ids).logits, rtol=2e-2, atol=2e-2)
        with second.model.disable_adapter():
            assert not torch.allclose(second.model(ids).logits, first.model(ids).logits, rtol=2e-2, atol=2e-2)
    next(iter(second.run()))
    with pytest.raises(UsageError, match=r"start '[0-9a-f]{12}', now None"):
        trainer(tmp_path / "second", other_scale)
    with pytest.raises(UsageError, match=r"has rank 4, the recipe 2; give a --recipe with rank 4"):
        trainer(tmp_path / "third", Recipe(rank=2), start=tmp_path / "adapter")
    with pytest.raises(UsageError, match="on other layers or another base"):
        trainer(tmp_path / "fifth", Recipe(rank=4, first_layer=1), start=tmp_path / "adapter")
    with pytest.raises(UsageError, match="nowhere"):
        trainer(tmp_path / "fourth", other_scale, start=tmp_path / "nowhere")


def test_first_layer_leaves_lower_layers_without_an_adapter(tmp_path):
    run = trainer(tmp_path, Recipe(first_layer=1))
    assert all(".layers.1." in name for name, p in run.model.named_parameters() if p.requires_grad)


def test_learning_rate_warms_up_and_decays():
    recipe = Recipe(learning_rate=1.0, warmup=0.2)
    rates = [learning_rate(step, 10, recipe) for step in range(10)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0]) and rates[-1] < 0.1
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_the_learning_rate_restarts_in_every_cycle():
    once, twice = Recipe(warmup=0.2), Recipe(warmup=0.2, cycles=2)
    one = [learning_rate(step, 10, once) for step in range(10)]
    assert [learning_rate(step, 20, twice) for step in range(20)] == one * 2
    assert learning_rate(19, 19, twice) < learning_rate(10, 19, twice)


def test_the_published_recipe_is_the_default():
    assert read_recipe("published") == Recipe()
    assert set(SHIPPED) == {"published", "small"} and read_recipe("small").dropout == 0.0
    with pytest.raises(UsageError, match="give a file, or one of published, small"):
        read_recipe("smal")


@pytest.mark.parametrize(
    "text",
    [
        "rank = 'x'", "ranks = 4", "rank = ", "cycles = 0", "\x00", "epochs = 0", "batch = -1", "alpha = 0",
        "checkpoint_every = 0", "dropout = 1.5", "learning_rate = nan", "max_tokens = 0",
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_with_the_settings_there_are(tmp_path, text):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"not usable: .*Settings: rank, alpha"):
        read_recipe(str(path))


def test_a_trained_adapter_is_loaded_as_peft_adapter(tmp_path, folder_of_tiny):
    from ooospec.target.loading import load_model

    run = trainer(tmp_path / "run")
    list(run.run())
    run.save_adapter(tmp_path / "adapter")
    loaded = load_model(folder_of_tiny, "tiny", "float32", "cpu", str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        run.model.eval()
        torch.testing.assert_close(loaded.model(ids).logits, run.model(ids).logits, rtol=2e-2, atol=2e-2)
