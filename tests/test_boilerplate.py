"""What many requests end with moves up before what they ask."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooospec.memory import Memory
from ooospec.sidecar.boilerplate import KEPT, MAX_CHARS, Boilerplate

LINE = "<user> Based on all this, make exactly one call now.</user>"


def ask(known, text, *before):
    return known.move_up([*before, ("user", text)])[-1][1]


def test_what_others_ended_with_comes_first_from_the_third_request_on():
    known = Boilerplate()
    texts = [f"<user>Book a table in {city}.</user>\n\n{LINE}" for city in ("Oslo", "Rome", "Nuuk", "Rio")]
    assert [ask(known, text) for text in texts[:2]] == texts[:2]
    assert ask(known, texts[2]) == f"{LINE}\n\n<user>Book a table in Nuuk.</user>"
    again = Boilerplate()
    again.load(known.dump())
    said = [("system", "s"), ("user", texts[3]), ("assistant", "call book: {}"), ("tool", "result: done")]
    moved = again.move_up(said)
    assert moved[1] == ("user", f"{LINE}\n\n<user>Book a table in Rio.</user>")
    assert moved[:1] + moved[2:] == said[:1] + said[2:] and again.nbytes > known.nbytes > 0


@pytest.mark.parametrize(
    "texts",
    [
        ["Weather in Oslo, please tell me exactly"] * 5,  # the same request again
        [f"Is it warm in the city of {city}, and will it stay so?" for city in ("Oslo", "Rome", "Nuuk")],  # one line
        [f"Go to {city}\nby train" for city in ("Oslo", "Rome", "Nuuk", "Rio")],  # short
        [f"What does {what} say?\n{'word ' * MAX_CHARS}" for what in ("line 1", "line 2", "the end")],  # material
        [LINE, f"\n{LINE}", f"  \n\n{LINE}"],  # nothing above it
        ["", "\n", "\n\n"],
    ],
)
def test_what_stays_where_it_is(texts):
    known = Boilerplate()
    assert [ask(known, text) for text in texts] == texts


def test_two_requests_are_no_habit_and_old_ones_are_forgotten():
    known = Boilerplate()
    for city in ("Oslo", "Rome"):
        ask(known, f"{city}\n{LINE}")
    for number in range(KEPT):
        ask(known, f"something else, number {number}")
    assert ask(known, f"Nuuk\n{LINE}") == f"Nuuk\n{LINE}"
    assert known.move_up([("system", "nothing asked")]) == [("system", "nothing asked")]


@given(st.lists(st.text(st.sampled_from("ab \n"), max_size=80), max_size=12))
def test_nothing_is_lost(texts):
    known = Boilerplate()
    for text in texts:
        moved = ask(known, text)
        assert sorted(moved.split()) == sorted(text.split())


def test_the_sidecar_is_asked_so(tiny_llama, tools):
    """Through a decoder, each memory with its own habits."""
    from ooospec.runtime import Decoder

    asked = []
    with Decoder(tiny_llama, None, budget="fixed") as decoder:
        decoder._client = type(
            "Client", (), {
                "submit": lambda self, tools, turns, fresh: asked.append(turns[-1][1]), "close": lambda self: None,
                "faults": {},
            },
        )()  # fmt: skip
        for city in ("Oslo", "Rome", "Nuuk"):
            decoder.request([{"role": "user", "content": f"{city}\n{LINE}"}], tools).launch()
        decoder.request([{"role": "user", "content": f"Rio\n{LINE}"}], tools, memory=Memory()).launch()
    assert asked == [f"Oslo\n{LINE}", f"Rome\n{LINE}", f"{LINE}\n\nNuuk", f"Rio\n{LINE}"]
