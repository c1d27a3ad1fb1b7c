"""Each proposer on literal token lists, against slow obvious references."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ooospec.core import BONUS, Commit, DecodeContext, TopTokens
from ooospec.proposers.lookup import PromptLookup
from ooospec.proposers.prediction import PredictedText
from ooospec.proposers.recycling import LEVELS, SuccessorTable, TokenRecycling, static_tree
from ooospec.proposers.retrieval import LONGEST_OUTPUT, Retrieval, RetrievalMemory, SuffixIndex

TOKENS = st.lists(st.integers(0, 3), max_size=40)


class Numbers:
    eos_ids = frozenset({99})
    vocab_size = 100

    def encode(self, text):
        return [int(x) for x in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def begin(proposer, prompt):
    output: list[int] = []
    proposer.begin(DecodeContext(Numbers(), prompt, output, ()))
    return output


def commit(proposer, output, tokens, **more):
    output += tokens
    proposer.observe(Commit(tuple(tokens), ("x",) * len(tokens), 0, 0, **more))


@given(TOKENS, st.integers(1, 3), st.integers(0, 20))
def test_lookup_finds_the_first_match(tokens, suffix, prompt):
    expected = []
    for start in range(len(tokens) - suffix):
        if tokens[start : start + suffix] == tokens[len(tokens) - suffix :]:
            expected = tokens[start + suffix : start + suffix + 10]
            break
    lookup = PromptLookup((suffix,))
    output = begin(lookup, tokens[:prompt])
    commit(lookup, output, tokens[prompt:])
    assert [list(draft.tokens) for draft in lookup.propose()] == ([expected] if expected else [])


def test_lookup_prefers_long_suffixes_and_follows_the_output():
    lookup = PromptLookup()
    output = begin(lookup, [1, 2, 3, 4, 5, 9, 3, 7])
    commit(lookup, output, [2, 3])
    assert lookup.propose()[0].tokens == (4, 5, 9, 3, 7, 2, 3)
    commit(lookup, output, [7])
    assert lookup.propose()[0].tokens[:2] == (2, 3)


def test_recycling_tree_has_the_published_shape():
    paths = static_tree()
    assert [sum(len(p) == depth + 1 for p in paths) for depth in range(len(LEVELS))] == list(LEVELS)
    assert len(paths) == 80
    assert all(path[:-1] in paths or len(path) == 1 for path in paths)


def test_recycling_drafts_last_seen_successors():
    recycling = TokenRecycling(SuccessorTable())
    output = begin(recycling, [1])
    assert recycling.propose() == []
    rows = np.arange(16).reshape(2, 8) + 10
    commit(recycling, output, [1], top=TopTokens([1, 10], rows))
    drafts = recycling.propose()
    assert {draft.tokens[0] for draft in drafts} == set(range(10, 18))
    assert any(draft.tokens[:2] == (10, 18) for draft in drafts)
    commit(recycling, output, [1], top=TopTokens([1], rows[1:]))
    assert {draft.tokens[0] for draft in recycling.propose()} == set(range(18, 26))


@given(st.lists(st.tuples(TOKENS, st.booleans(), st.sampled_from([1, 1, 1, 9])), max_size=5), st.integers(1, 7))
def test_suffix_index_finds_all_earlier_occurrences(pieces, size):
    index, text = SuffixIndex((size,)), list[int]()
    for tokens, separate, times in pieces:  # long ones make it grow
        index.extend(tokens * times, separate)
        text += [-1] * separate + tokens * times
    gram = text[-size:]
    assert index.newest(size) == tuple(gram)
    if len(gram) < size:
        return
    expected = [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == gram and -1 not in gram]
    assert index.after_matches(index.newest(size), len(text)) == expected


def test_an_index_without_text_finds_nothing():
    index = SuffixIndex((5,))
    assert index.after_matches((0,) * 5, 4) == []
    index.extend([0] * 5)
    assert index.after_matches((0,) * 5, 4) == []
    index.extend([0])
    assert index.after_matches((0,) * 5, 4) == [5]


def test_retrieval_covers_the_whole_prompt_and_earlier_outputs():
    memory = RetrievalMemory()
    retrieval = Retrieval(memory)
    state = np.array([1.0, 0.0], dtype=np.float32)
    output = begin(retrieval, [1, 2, 3, 4, 5, 6, 7])
    commit(retrieval, output, [20, 21, 22, 23, 24, 25, 26], prompt_state=state)
    retrieval.end()
    output = begin(retrieval, [8, 9, 8, 30, 31, 32, 33, 34])
    commit(retrieval, output, [20, 21, 22, 23, 24], prompt_state=state)
    assert retrieval.propose()[0].tokens == (25, 26)  # from the earlier output
    commit(retrieval, output, [9, 8, 30, 31, 32])
    assert retrieval.propose()[0].tokens[:2] == (33, 34)  # the very end of the prompt


def test_of_a_long_output_its_end_is_remembered():
    memory, long = RetrievalMemory(), list(range(5000))
    memory.add(np.array([1.0], dtype=np.float32), long)
    assert memory.nearest(np.array([1.0], dtype=np.float32)) == [long[-LONGEST_OUTPUT:]]
    assert memory.nbytes < 40 * LONGEST_OUTPUT


def test_retrieval_memory_ranks_by_similarity_and_is_bounded():
    memory = RetrievalMemory(capacity=3)
    for angle in (0.0, 0.5, 1.0, 1.5):
        memory.add(np.array([np.cos(angle), np.sin(angle)], dtype=np.float32), [int(angle * 10)])
    assert len(memory) == 3
    assert memory.nearest(np.array([0.0, 1.0], dtype=np.float32), 2) == [[15], [10]]


def test_each_token_of_the_output_agrees_with_one_place_of_a_predicted_text(codec):
    text = "ab----abcd"
    tokens, output = codec.encode(text), []
    assert len(tokens) == len(text)
    predicted = PredictedText(text)
    predicted.begin(DecodeContext(codec, [], output, ()))
    for token in codec.encode("zabc"):
        predicted.propose()
        output.append(token)
        predicted.observe(Commit((token,), (BONUS,), 0, 0))
    assert predicted.offered == len(text) and predicted.right == 3
    assert [draft.tokens[0] for draft in predicted.propose()] == codec.encode("d")
