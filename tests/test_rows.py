"""Drafting by rows, against a recorded double of vLLM's batches: rows that join, leave, move and are preempted."""

import json
import random

import numpy as np
import pytest

from ooospec.chat.prompt_tools import tools_in_prompt
from ooospec.chat.schema import read_tools
from ooospec.core import FunctionHint, Hint, SlotHint
from ooospec.integrations.rows import EMPTY_ROUNDS, Known, RowDrafter, Situation, prompt_key
from ooospec.integrations.step_cost import StepCost

WIDTH = 2048
FORM = 'Call with {"name": NAME, "arguments": OBJECT}.'


def tool(name):
    slots = {"city": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": slots, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Asked:
    """A request with the answer its target will write."""

    def __init__(self, codec, number, city, said=None):
        self.tools = [tool(f"get_{number}"), tool("other")]
        listed = "\n".join(map(json.dumps, self.tools))
        self.prompt = codec.encode(f"<tools>\n{listed}\n</tools>\n{FORM}\nuser: weather in {said or city}?\nassistant:")
        self.answer = f'{{"name": "get_{number}", "arguments": {{"city": "{city}", "days": {number % 9}}}}}'
        self.script = [*codec.encode(self.answer), codec.eos_id]
        self.written, self.steps = [], 0
        values = {"city": city, "days": number % 9}
        name = f"get_{number}"
        slots = {(name, slot): SlotHint(name, slot, value, True, 0.95) for slot, value in values.items()}
        self.hint = Hint(FunctionHint((name,), (0.95,)), slots, complete=True)


class Engine:
    """Rows as vLLM keeps them: slots of one array, no ids; a draft is accepted as far as the script goes on so."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.rows, self.drafts = [], []
        self.tokens = np.zeros((16, WIDTH), dtype=np.int32)

    def step(self, unfinished=()):
        """Run every row once; rows of `unfinished` are in the middle of their prefill."""
        sampled = []
        for index, row in enumerate(self.rows):
            if row in unfinished:
                sampled.append([])
                continue
            draft = self.drafts[index] if index < len(self.drafts) else []
            accepted = 0
            room = row.script[len(row.written) :]
            while accepted < len(draft) and accepted < len(room) - 1 and draft[accepted] == room[accepted]:
                accepted += 1
            new = room[: accepted + 1]
            row.written += new
            row.steps += 1
            sampled.append(list(new))
        lengths = np.array([len(row.prompt) + len(row.written) for row in self.rows], dtype=np.int32)
        for index, row in enumerate(self.rows):
            self.tokens[index, : lengths[index]] = row.prompt + row.written
        drafts = self.drafter.propose(sampled, lengths, self.tokens)
        assert len(drafts) == len(self.rows) and all(isinstance(token, int) for draft in drafts for token in draft)
        self.drafts = drafts
        return sampled

    def keep(self, indices):
        """Let rows leave or move: the rows of these indices, in this order."""
        self.rows = [self.rows[i] for i in indices]
        self.drafts = [self.drafts[i] for i in indices]

    def done(self, row):
        return row.written == row.script


class Named:
    def __init__(self, asked=()):
        self.asked = []
        self.known = {
            prompt_key(a.prompt): Known(read_tools(a.tools), lambda a=a: a.hint, lambda *more: self.asked.append(more))
            for a in asked
        }

    def find(self, key):
        return self.known.get(key)


@pytest.fixture
def make(codec):
    def made(hints=None, max_tokens=24, max_length=WIDTH):
        drafter = RowDrafter(Situation(codec, "json", False), max_tokens, max_length, hints)
        drafter.cost.ENOUGH = 10**9  # steps of the double take no time
        return drafter

    return made


def run(engine, row, limit=400):
    engine.rows, engine.drafts = [row], []
    while not engine.done(row):
        engine.step()
        assert row.steps < limit
    engine.rows, engine.drafts = [], []
    return row.steps


def test_a_hint_found_by_the_prompts_tokens_saves_steps(codec, make):
    asked = [Asked(codec, number, city) for number, city in ((1, "Oslo"), (2, "Kuala Lumpur"))]
    plain = sum(run(Engine(make()), Asked(codec, n, c)) for n, c in ((1, "Oslo"), (2, "Kuala Lumpur")))
    drafter = make(Named(asked))
    hinted = sum(run(Engine(drafter), row) for row in asked)
    assert drafter.counts["named"] == 2 and drafter.counts["accepted_hint"] > 40
    assert hinted < plain < sum(len(row.script) for row in asked) / 2


def test_without_a_hint_the_tools_are_read_off_the_prompt(codec, make):
    drafter = make()
    row = Asked(codec, 3, "Rome")
    assert run(Engine(drafter), row) < len(row.script) / 3
    assert drafter.counts["accepted_schema"] > 20 and drafter.counts["named"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_join_leave_move_and_return_never_mix(codec, make, seed):
    """A random schedule: every row is drafted from its own hint alone, whatever happens to the batch."""
    chance = random.Random(seed)
    waiting = [Asked(codec, n, "".join(chance.choices("abcdefgh ", k=9)).strip() or "x") for n in range(14)]
    every, preempted = list(waiting), []
    drafter = make(Named(every))
    engine = Engine(drafter)
    for _ in range(3000):
        while waiting and len(engine.rows) < 8 and chance.random() < 0.5:
            engine.rows.append(waiting.pop())
        if preempted and chance.random() < 0.3:
            engine.rows.append(preempted.pop())
        if not engine.rows and not waiting and not preempted:
            break
        if not engine.rows:
            continue
        fresh = [row for row in engine.rows if not row.written]
        engine.step(unfinished=[row for row in fresh if chance.random() < 0.3])
        kept = [index for index, row in enumerate(engine.rows) if not engine.done(row)]
        if len(kept) > 1 and chance.random() < 0.2:
            out = chance.choice(kept)
            kept.remove(out)
            preempted.append(engine.rows[out])
        if chance.random() < 0.3:
            chance.shuffle(kept)
        engine.keep(kept)
    assert all(row.written == row.script for row in every)
    assert drafter.counts["faults"] == 0 and drafter.counts["requests"] == len(every)
    assert sum(row.steps for row in every) < sum(len(row.script) for row in every) / 3


def test_equal_prompts_in_one_batch(codec, make):
    rows = [Asked(codec, 5, "Bergen") for _ in range(4)]
    drafter = make(Named(rows))
    engine = Engine(drafter)
    engine.rows = list(rows)
    while engine.rows:
        engine.step()
        engine.keep([index for index, row in enumerate(engine.rows) if not engine.done(row)])
    assert all(row.written == row.script for row in rows) and drafter.counts["faults"] == 0


def test_earlier_calls_are_remembered_even_of_requests_that_ran_into_a_limit(codec, make):
    drafter = make()
    engine = Engine(drafter)
    first = Asked(codec, 6, "Trondheim", "the old place")
    engine.rows = [first]
    while len(first.written) < len(first.script) - 1:
        engine.step()
    engine.rows, engine.drafts = [], []
    engine.step()
    second, again = (Asked(codec, 7, "Trondheim", "the same place") for _ in range(2))
    assert run(engine, second) < run(Engine(make()), again)


def test_the_next_turn_of_a_request_that_ran_into_a_limit_is_a_request_of_its_own(codec, make):
    drafter = make()
    engine = Engine(drafter)
    first, second = Asked(codec, 6, "Trondheim"), Asked(codec, 7, "Rome")
    engine.rows = [first]
    while len(first.written) < 30:
        engine.step()
    second.prompt = [*first.prompt, *first.written, codec.eos_id, *second.prompt[-60:]]
    drafter._hints = Named([second])
    steps = run(engine, second)
    assert drafter.counts["requests"] == 2 and drafter.counts["named"] == 1 and steps < len(second.script) / 4


def test_steps_that_were_not_asked_about_cost_nothing_else(codec, make):
    drafter = make(Named([row := Asked(codec, 6, "Trondheim")]))
    engine = Engine(drafter)
    engine.rows = [row]
    engine.step()
    row.written += row.script[len(row.written) : 20]
    engine.drafts = [[]]
    while not engine.done(row):
        engine.step()
    assert drafter.counts["requests"] == 1 and row.steps < 6


def test_what_was_drafted_before_a_row_left_counts_for_nothing(codec, make):
    drafter = make(Named([row := Asked(codec, 6, "Trondheim")]))
    engine = Engine(drafter)
    engine.rows = [row]
    engine.step()
    assert engine.drafts[0]
    engine.rows, engine.drafts = [], []
    engine.step()
    before = drafter.counts.copy()
    engine.rows = [row]  # it comes back without its draft and runs one token
    engine.step()
    assert not any(drafter.counts[name] - before[name] for name in drafter.counts if name.startswith("accepted"))
    assert drafter.counts["requests"] == 1 and engine.drafts[0]


def test_rows_without_drafts_do_not_stop_those_with_good_ones(codec, make):
    row, prose = Asked(codec, 4, "Oslo"), Asked(codec, 5, "Rome")
    prose.prompt, prose.script = codec.encode("Tell me a story."), codec.encode("xylophone quartz jumbled verdict" * 2)
    drafter = make(Named([row]))
    engine = Engine(drafter)
    engine.rows = [prose]
    while not engine.done(prose):
        engine.step()
    assert drafter._gain > 0.5
    steps = run(engine, row)
    assert steps < len(row.script) / 4


def test_rows_for_which_nothing_is_found_are_looked_at_now_and_then(codec, make, monkeypatch):
    prose = Asked(codec, 5, "Rome")
    prose.prompt, prose.script = codec.encode("A"), codec.encode("".join(chr(33 + i % 90) for i in range(90)))
    drafter = make()
    engine = Engine(drafter)
    engine.rows, tried = [prose], []
    monkeypatch.setattr("ooospec.integrations.rows.best_chain", lambda *_: [])
    while not engine.done(prose):
        engine.step()
        tried.append(drafter._active[0].tried)
    assert all(tried[:EMPTY_ROUNDS]) and sum(tried[EMPTY_ROUNDS:]) <= len(tried[EMPTY_ROUNDS:]) / 3


def test_a_row_that_has_ended_is_not_taken_for_one_whose_drafts_were_cut(codec, make):
    rows = [Asked(codec, number, "Oslo") for number in (1, 2)]
    drafter = make(Named(rows))
    engine = Engine(drafter)
    rows[1].script = [*rows[1].script[:1], codec.eos_id]
    engine.rows = list(rows)
    while not engine.done(rows[1]):
        engine.step()
    seen = []
    drafter._calibrator.observe_cost = lambda *given: seen.append(given)
    ran = 1 + len(engine.drafts[0])
    engine.keep([0])
    propose = drafter.propose
    drafter.propose = lambda *step: propose(*step, ran)
    engine.step()
    assert len(seen) == 1


def test_a_step_whose_drafts_were_cut_says_nothing_of_what_drafts_are_worth(codec, make):
    for cut in (False, True):
        drafter = make(Named([row := Asked(codec, 6, "Trondheim")]))
        seen = []
        drafter._calibrator.observe_cost = lambda *given, seen=seen: seen.append(given)
        engine = Engine(drafter)
        engine.rows = [row]
        engine.step()
        assert len(seen) == 0
        propose = drafter.propose
        drafter.propose = lambda *step, propose=propose, cut=cut: propose(*step, 1 if cut else 100)
        engine.step()
        assert len(seen) == (not cut)


def test_what_the_target_writes_otherwise_is_asked_for(codec, make):
    row = Asked(codec, 3, "Oslo")
    name = "get_3"
    row.hint.slots[name, "city"] = SlotHint(name, "city", "Rome", True, 0.95)
    named = Named([row])
    run(Engine(make(named)), row)
    assert named.asked and all((tool, slot) == (name, "city") for tool, slot, _ in named.asked)
    assert all('"Oslo"'.startswith(written) and len(written) > 1 for _, _, written in named.asked)
    other = Asked(codec, 4, "Oslo")
    other.hint = Hint(FunctionHint(("other",), (0.9,)), {}, complete=True)
    named = Named([other])
    run(Engine(make(named)), other)
    assert named.asked[0] == ("get_4", "", "")


def test_what_breaks_is_counted_and_the_engine_goes_on(codec, make, caplog):
    class Broken:
        def find(self, key):
            raise RuntimeError("no")

    drafter = make(Broken())
    row = Asked(codec, 8, "Oslo")
    assert run(Engine(drafter), row) == len(row.script)
    assert drafter.counts["faults"] == 1 and len(caplog.records) == 1
    assert drafter.propose([[1]], None, None) == [[]]


def test_drafts_end_at_the_longest_length(codec, make):
    row = Asked(codec, 9, "Oslo")
    drafter = make(Named([row]), max_length=len(row.prompt) + 10)
    engine = Engine(drafter)
    engine.rows = [row]
    while len(row.written) < 8:
        engine.step()
        assert all(not draft or len(row.written) + len(draft) < 10 for draft in engine.drafts)


def test_the_cost_of_a_step_is_learned_and_narrows_drafts_in_large_batches(codec, make):
    cost = StepCost()
    for tokens in (1, 9, 17, 3, 25, 8, 2, 30, 12, 5):
        cost.observe(1, tokens, 0.2 + 0.01 * (tokens - 1))
    assert cost.share(1) == pytest.approx(0.2, rel=0.01) and cost.of(1)(5) == pytest.approx(1.2, rel=0.01)
    for number in range(200):
        rows, drafted = 1 + number % 8, number % 24
        cost.observe(rows, rows + drafted, 0.1 + 0.02 * rows + 0.005 * drafted)
    assert cost.share(8) == pytest.approx(0.26 / 8, rel=0.01)
    assert cost.of(8)(5) == pytest.approx(1 + 4 * 0.005 / (0.26 / 8), rel=0.01)
    for _ in range(2000):  # nothing is drafted for long: worth another try
        cost.observe(8, 8, 0.26)
    assert cost.of(8)(5) < 1.01 and cost.share(8) == pytest.approx(0.26 / 8, rel=0.01)
    lengths = []
    for rows in (1, 8):
        asked = [Asked(codec, n, "Rio") for n in range(rows)]
        drafter = make()
        engine = Engine(drafter)
        engine.rows = asked
        engine.step()
        lengths.append(max(map(len, engine.drafts)))
    assert lengths[0] > lengths[1]


def test_what_a_step_ran_is_learned_from_but_not_while_rows_join_or_after_a_pause(codec, make):
    drafter = make()
    seen = []
    drafter.cost.observe = lambda *step: seen.append(step[:2])
    engine = Engine(drafter)
    propose = drafter.propose
    drafter.propose = lambda *step: propose(*step, 100)
    engine.rows = [Asked(codec, 1, "Rio")]
    engine.step()
    assert seen == []  # the engine may have waited
    engine.rows.append(Asked(codec, 2, "Rio"))
    engine.step()
    assert seen == []
    engine.step()
    assert seen == [(2, 100)]
    both = engine.rows
    engine.keep([0])
    engine.step()
    assert seen[1:] == [(1, 100)]
    engine.rows, engine.drafts = both, [*engine.drafts, []]  # the engine reads what the other row had again
    engine.step()
    assert len(seen) == 2
    engine.rows, engine.drafts = [Asked(codec, 3, "Rio")], []
    engine.step()
    assert len(seen) == 2


def test_rows_are_drafted_for_now_and_then_while_drafting_takes_longer_than_it_saves(codec, make):
    row = Asked(codec, 4, "Oslo")
    drafter = make(Named([row]))
    drafter.cost.ENOUGH, drafter.cost.observe = 0, lambda *step: None
    drafter._drafting_s = 1e9
    run(Engine(drafter), row)
    assert drafter.counts["rounds_without_draft"] >= drafter.counts["rounds"] // 2 > 0
    assert drafter.counts["accepted_hint"] > 0


def test_a_step_that_breaks_costs_one_step(codec, make):
    row = Asked(codec, 5, "Oslo")
    engine = Engine(make(Named([row])))
    engine.rows = [row]
    engine.step()
    assert engine.drafter.propose([[1]], None, None) == [[]]
    engine.drafts = [[]]
    while not engine.done(row):
        engine.step()
    assert engine.drafter.counts["requests"] == engine.drafter.counts["faults"] == 1 and row.steps < 8


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ('<tools>\n{"type": "function", "function": {"name": "a", "description": "x", "parameters": {"type": "object",'
         ' "properties": {}}}}\n</tools> then {"name": "b", "arguments": {}}', ["a"]),
        ('[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "a", "parameters": {"properties": {}}}}, '
         '{"type": "function", "function": {"name": "b", "description": "y"}}][/AVAILABLE_TOOLS]', ["a", "b"]),
        ('{\n    "name": "a",\n    "description": "d",\n    "parameters": {"type": "object"}\n}', ["a"]),
        ('{"name": "Bingo", "age": 3} {"type": "x"} {"function": 5} {"name": ', []),
        ('{"name": "a", "parameters": {"city": "Oslo"}}', []),
        ("no tools", []),
    ],
)  # fmt: skip
def test_tools_are_read_off_prompts(prompt, names):
    assert [found.name for found in tools_in_prompt(prompt)] == names
