"""The benchmark's methods: on literal token lists against slow obvious references, and whole on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import load_tiny
from ooospec.chat.style import StyleBook, default_styles
from ooospec.core import Commit, DecodeContext, TopTokens
from ooospec.errors import UsageError
from ooospec.memory import Memory
from ooospec.methods import METHODS, Method, Setup, method_named, register
from ooospec.proposers.automaton import SuffixAutomaton
from ooospec.proposers.recycling import SuccessorTable, TokenRecycling, _leaves
from ooospec.proposers.retrieval import RetrievalMemory
from ooospec.proposers.samd import CHAIN, MIN_MATCH, SuffixAutomatonDrafts
from ooospec.runtime import Decoder
from ooospec.target.draft import DraftModel, DraftProposer
from ooospec.target.model import TargetModel
from ooospec.verify import first_largest, top_indices
from test_proposers import Numbers, begin, commit

MESSAGES = [{"role": "user", "content": "abcabcabc weather in Oslo, abcabc"}]


def longest_earlier_suffix(tokens):
    """(length of the longest suffix that also ends earlier, tokens after its first occurrence), by brute force."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == suffix:
                return length, tokens[start + length :]
    return 0, []


@given(st.lists(st.integers(0, 3), max_size=60))
def test_automaton_finds_the_longest_suffix_seen_before(tokens):
    automaton = SuffixAutomaton()
    for count in range(len(tokens)):
        automaton.extend(tokens[count : count + 1])
        length, rest = longest_earlier_suffix(tokens[: count + 1])
        assert automaton.matched == length
        assert automaton.continuation(1000) == rest


def test_samd_copies_after_a_long_match_and_recycles_after_a_short_one():
    samd = SuffixAutomatonDrafts(SuccessorTable())
    output = begin(samd, [*range(1, 20), 1, 2, 3, 4])
    rows = np.full((1, 8), 50)
    commit(samd, output, [40], top=TopTokens([40], rows))
    assert samd.propose()[0].tokens[0] == 50  # nothing matched: the table
    commit(samd, output, list(range(1, MIN_MATCH)))
    assert samd.propose() == []  # one too short, and no row for this token
    commit(samd, output, [MIN_MATCH])
    (chain,) = samd.propose()
    assert chain.tokens == tuple([*range(6, 20), 1, 2, 3, 4, 40, 1, 2, 3, 4, 5][:CHAIN])


def test_samd_table_is_filled_from_the_prompt():
    samd = SuffixAutomatonDrafts(SuccessorTable())
    output = begin(samd, [7, 8])
    commit(samd, output, [7], prompt_top=TopTokens([7], np.arange(8)[None] + 30))
    assert {draft.tokens[0] for draft in samd.propose()} == set(range(30, 38))


def test_samd_tree_has_sixty_nodes():
    table = SuccessorTable()
    table.reserve(100)
    table.update(TopTokens(list(range(100)), (np.arange(100)[:, None] * 8 + np.arange(8)[None]) % 100))
    for nodes in (60, 80):
        recycling = TokenRecycling(table, nodes)
        begin(recycling, [1])
        paths = {draft.tokens[:depth] for draft in recycling.propose() for depth in range(1, len(draft.tokens) + 1)}
        assert len(paths) <= nodes
        ranks = {leaf[:depth] for leaf in _leaves(nodes) for depth in range(1, len(leaf) + 1)}
        assert len(ranks) == nodes


def test_later_rows_of_the_same_token_win():
    table = SuccessorTable()
    table.reserve(10)
    table.update(TopTokens([3, 3], np.array([[1] * 8, [2] * 8])))
    assert table.successors(3) == [2] * 8
    assert table.successors(4) == [] == table.successors(-1) == table.successors(99)


def test_suffix_decoding_drafts_from_prompt_and_earlier_outputs():
    pytest.importorskip("arctic_inference")
    from ooospec.proposers.suffix import SuffixDecoding, SuffixMemory

    memory = SuffixMemory()
    proposer = SuffixDecoding(memory)
    output = begin(proposer, [1, 2, 3, 4, 5, 6, 7])
    commit(proposer, output, [20, 21, 22, 23])
    assert proposer.propose() == []
    commit(proposer, output, [1, 2, 3])
    assert proposer.propose()[0].tokens == (4, 5, 6)  # factor 1.0: as many as matched
    proposer.end()
    loaded = SuffixMemory()
    loaded.load(memory.dump())
    for known in (memory, loaded):
        again = SuffixDecoding(known)
        output = begin(again, [9])
        commit(again, output, [20, 21])
        draft = again.propose()[0]
        assert draft.tokens == (22, 23)
        assert all(0 < chance <= 1 for chance in draft.probabilities)
        again.end()


def test_memory_survives_a_dump():
    memory = Memory()
    table, retrieval, book = memory.part(SuccessorTable), memory.part(RetrievalMemory), memory.part(StyleBook)
    assert memory.part(SuccessorTable) is table
    table.reserve(50)
    table.update(TopTokens([7], np.arange(8)[None]))
    retrieval.add(np.array([3.0, 4.0], dtype=np.float32), [1, 2, 3])
    book._learned["x"] = default_styles("<tool_call>")[:2]
    copy = Memory(memory.dump())
    again = Memory(copy.dump())  # parts that nobody asked for are kept
    assert again.part(SuccessorTable).successors(7) == list(range(8))
    assert again.part(RetrievalMemory).nearest(np.array([1.0, 1.0])) == [[1, 2, 3]]
    assert again.part(StyleBook).ranked("x", default_styles(""))[0][0] == default_styles("<tool_call>")[0]


# ---------------------------------------------------------------- whole methods on tiny models


def test_stock_generate_agrees_with_the_loop_in_every_prefix_condition(tiny):
    with Decoder(tiny, None, budget="fixed") as decoder:
        for prefix in ("cold", "warm", "auto"):
            for options in ({"max_new_tokens": 40}, {"max_new_tokens": 40, "stop": ["e", "a"]}):
                ar, stock = (decoder.generate(MESSAGES, method=m, prefix=prefix, **options) for m in ("ar", "stock"))
                assert stock.output_ids == ar.output_ids
                assert stock.finish_reason == ar.finish_reason
                assert stock.num_rounds == len(stock.output_ids)
                assert 0 < stock.prefill_ms <= stock.total_ms


def test_stock_refuses_to_sample(tiny_llama):
    with Decoder(tiny_llama, None, budget="fixed") as decoder, pytest.raises(UsageError, match="greedily"):
        decoder.generate(MESSAGES, method="stock", temperature=1.0)


def draft_decoder(target, drafting):
    decoder = Decoder(target, None, budget="fixed")
    decoder.draft = DraftModel(drafting, target)
    return decoder


@pytest.mark.parametrize("prefix", ["cold", "warm", "auto"])
def test_draft_model_changes_nothing_and_a_twin_is_always_right(tiny, prefix):
    other = load_tiny(tiny.name.removeprefix("tiny-"), seed=5)
    twin = load_tiny(tiny.name.removeprefix("tiny-"))
    with Decoder(tiny, None, budget="fixed") as decoder:
        expected = decoder.generate(MESSAGES, method="ar", max_new_tokens=40)
    for drafting in (other, twin):
        with draft_decoder(tiny, drafting) as decoder:
            got = [decoder.generate(MESSAGES, method="draft", max_new_tokens=40, prefix=prefix) for _ in range(2)]
        assert all(g.output_ids == expected.output_ids for g in got)
    assert got[0].num_rounds == -(-len(expected.output_ids) // 6)  # five drafted tokens and the bonus a round


def test_draft_cache_holds_the_committed_text(tiny_llama):
    """After every round the draft model's next guess equals that of a fresh pass over the whole text."""
    model = TargetModel(load_tiny("llama", seed=5).model)
    proposer = DraftProposer(model, count=3)
    output: list[int] = []
    prompt = [5, 6, 7, 8]
    proposer.begin(DecodeContext(Numbers(), prompt, output, ()))
    for accepted in (0, 3, 1, 2):
        drafted = proposer.propose()[0].tokens
        with torch.inference_mode():
            row = model.model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0, -1]
        assert drafted[0] == int(row.argmax())
        new = [*drafted[:accepted], 9]
        output += new
        proposer.observe(Commit(tuple(new), ("draft",) * accepted + ("target",), 0, 3))


def test_draft_model_needs_the_targets_tokenizer(tiny_llama):
    other = load_tiny("llama")
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UsageError, match="another tokenizer"):
        DraftModel(other, tiny_llama)
    with Decoder(tiny_llama, None, budget="fixed") as decoder, pytest.raises(UsageError, match="--draft"):
        decoder.generate(MESSAGES, method="draft")


def test_registry_refuses_doubles_and_strangers():
    with pytest.raises(UsageError, match="registered already"):
        register(Method("ar", "", lambda setup: []))
    with pytest.raises(UsageError, match=r"Unknown method 'nothing'.*toolspec"):
        method_named("nothing")
    assert all(method.max_nodes >= 1 for method in METHODS.values())
    assert method_named("ar").build(Setup()) == []


@given(st.integers(1, 5), st.sampled_from([40, 128 * 17, 128 * 40, 128 * 40 + 1]), st.integers(0, 1000))
def test_top_indices_equal_topk(rows, size, seed):
    logits = torch.rand(rows, size, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(logits.gather(1, top_indices(logits, 8)), logits.topk(8).values)  # of equal ones any may come


@given(st.integers(1, 4), st.sampled_from([128 * 3, 128 * 40, 300]), st.integers(0, 1000), st.integers(2, 1000))
def test_first_largest_equals_argmax_with_many_ties(rows, size, seed, levels):
    logits = torch.randint(0, levels, (rows, size), generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert torch.equal(first_largest(logits), logits.argmax(-1))
