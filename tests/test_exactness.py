"""Outputs with speculation equal outputs without, whatever the drafts: the contract of docs/losslessness.md."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import FAMILIES, load_tiny
from ooospec.core import DecodeContext, Draft
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.planner import Budget
from ooospec.sampling import Sampler, Sampling
from ooospec.stopping import Limits
from ooospec.target.model import TargetModel
from ooospec.target.packing import pack
from ooospec.target.prefix_cache import PrefixCache
from ooospec.tree import CandidateTree, build_tree
from ooospec.verify import Greedy, accept

PROMPT = list(b"Call a tool to find the weather in Oslo, please. ")


class Scripted:
    """Drafts given by a function of the output so far."""

    name = "scripted"
    wants_top = False

    def __init__(self, make):
        self.make = make

    def begin(self, context):
        self.context = context

    def propose(self):
        return [Draft.uniform(d, "scripted", 0.9, 0.9) for d in self.make(self.context.output_ids) if d]

    def observe(self, commit):
        pass

    def end(self):
        pass


def run(loaded, sources, *, prompt=PROMPT, limit=60, stop=(), chooser=None, target=None, budget=None, **options):
    output: list[int] = []
    context = DecodeContext(loaded.codec, prompt, output, ())
    target = target or TargetModel(loaded.model)
    commits = list(
        decode(
            target, context, output, sources, chooser or Greedy(), Limits(limit, stop), budget or Budget(32), **options
        )
    )
    assert [t for c in commits for t in c.tokens] == output
    return output, commits


def stock(loaded, limit=60):
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def noisy(reference, seed):
    """Drafts that are right, half right and wrong, in any order."""
    rng = random.Random(seed)

    def make(output):
        rest = reference[len(output) : len(output) + 8]
        good = [t if rng.random() < 0.9 else rng.randrange(256) for t in rest]
        drafts = [good, [rng.randrange(256) for _ in range(3)], [*good[:2], rng.randrange(256), *good[3:5]]]
        rng.shuffle(drafts)
        return drafts

    return make


def test_autoregressive_equals_stock_generate(tiny):
    assert run(tiny, [])[0] == stock(tiny)


@pytest.mark.parametrize("method", ["lookup", "recycling", "samd", "suffix", "toolspec", "ooo"])
def test_methods_equal_stock_generate(tiny, method):
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    memory = Memory()
    expected = stock(tiny)
    for _ in range(2):  # the second time with warm memories
        assert run(tiny, method_named(method).build(Setup(memory)))[0] == expected


@pytest.mark.parametrize("seed", range(4))
def test_noisy_drafts_change_nothing(tiny, seed):
    expected = stock(tiny)
    got, commits = run(tiny, [Scripted(noisy(expected, seed))])
    assert got == expected
    assert len(commits) < len(expected)  # and they do help


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_change_nothing(family):
    plain, packed = load_tiny(family), load_tiny(family)
    pack(packed.model)
    expected = stock(plain)
    assert run(packed, [])[0] == expected
    for seed in range(3):
        assert run(packed, [Scripted(noisy(expected, seed))])[0] == expected
    memory = Memory()
    for name in ("lookup", "recycling", "samd", "toolspec"):
        assert run(packed, method_named(name).build(Setup(memory)))[0] == expected


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_trees_change_nothing(tiny_llama, data):
    expected = stock(tiny_llama, 24)
    token = st.integers(0, 255)

    def make(output):
        rest = expected[len(output) :]
        cut = data.draw(st.integers(0, min(6, len(rest))))
        free = data.draw(st.lists(st.lists(token, max_size=5), max_size=4))
        return [*free, [*rest[:cut], *data.draw(st.lists(token, max_size=2))]]

    nodes = data.draw(st.integers(1, 24))
    assert run(tiny_llama, [Scripted(make)], limit=24, budget=Budget(nodes))[0] == expected


def random_tree(rng, size):
    parents = [-1] + [rng.randrange(node) for node in range(1, size)]
    order, children = [], {p: [n for n in range(size) if parents[n] == p] for p in range(-1, size)}

    def walk(node):
        order.append(node)
        for child in children[node]:
            walk(child)

    walk(0)
    place = {node: index for index, node in enumerate(order)}
    return CandidateTree(
        tuple(rng.randrange(256) for _ in order), tuple(place.get(parents[n], -1) for n in order), ("",) * size
    )


@pytest.mark.parametrize("lead", [0, 5])
def test_tree_logits_equal_one_token_at_a_time(tiny, lead):
    rng = random.Random(lead)
    target = TargetModel(tiny.model)
    for _ in range(5):
        tree = random_tree(rng, 14)
        target.begin(PROMPT)
        target.prefill(PROMPT[: len(PROMPT) - lead])
        logits = target.verify(tree, PROMPT[len(PROMPT) - lead :])
        for node in range(len(tree)):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            with torch.inference_mode():
                plain = tiny.model(torch.tensor([PROMPT + [tree.tokens[n] for n in path]])).logits[0, -1]
            assert (logits[node] - plain).abs().max() < 1e-4


# ---------------------------------------------------------------- twins that must fail


class WrongMask(TargetModel):
    """Every node sees all nodes before it, like a plain causal chain."""

    def verify(self, tree, lead=(), all_rows=False):
        depths = [self.cache.length + len(lead) + d for d in tree.depths()]
        return self.forward(
            [*lead, *tree.tokens], [*range(self.cache.length, self.cache.length + len(lead)), *depths], keep=len(tree)
        )


class WrongPositions(TargetModel):
    """Positions by index in the tree instead of by depth."""

    def forward(self, tokens, positions=None, visible=None, keep=0):
        if positions is not None:
            positions = range(positions[0], positions[0] + len(tokens))
        return super().forward(tokens, positions, visible, keep)


class NoCompaction(TargetModel):
    """Keeps the first KV slots of the tree instead of those on the accepted path."""

    def commit(self, tree, path):
        self.cache.set_length(self.cache.length - len(tree) + len(path))


@pytest.mark.parametrize("broken", [WrongMask, WrongPositions, NoCompaction])
def test_negative_controls_fail(tiny, broken):
    expected = stock(tiny)
    wrong = 0
    for seed in range(6):
        rng = random.Random(seed)

        def make(output, rng=rng):
            rest = expected[len(output) : len(output) + 6]
            return [[rng.randrange(256) for _ in range(4)], [(rest or [0])[0], rng.randrange(256)], rest]

        budget = Budget(32)
        source = Scripted(make)
        source.propose = lambda s=source: [  # the wrong branches first in depth-first order
            Draft.uniform(d, "scripted", 0.9 - 0.2 * i, 0.9) for i, d in enumerate(s.make(s.context.output_ids)) if d
        ]
        wrong += run(tiny, [source], target=broken(tiny.model), budget=budget)[0] != expected
    assert wrong


# ---------------------------------------------------------------- ends


def test_all_eos_ids_stop_every_method_alike(tiny_llama):
    expected = stock(tiny_llama)
    for position in (3, 9):
        eos = expected[position]
        codec = type(tiny_llama.codec)(tiny_llama.tokenizer.backend_tokenizer, [260, eos])
        loaded = type(tiny_llama)("t", tiny_llama.model, tiny_llama.tokenizer, codec, "float32", "cpu")
        cut = expected[: expected.index(eos) + 1]
        for make in (lambda o: [], lambda o: [expected[len(o) : len(o) + 12]]):
            got, commits = run(loaded, [Scripted(make)])
            assert got == cut
            assert commits[-1].finish_reason == "eos"


@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_token_limit_cuts_exactly(tiny_llama, limit):
    expected = stock(tiny_llama)
    for make in (lambda o: [], lambda o: [expected[len(o) : len(o) + 12]]):
        got, commits = run(tiny_llama, [Scripted(make)], limit=limit)
        assert got == expected[:limit]
        assert commits[-1].finish_reason == "length"


def test_stop_strings_cut_alike(tiny_llama):
    expected = stock(tiny_llama)
    text = tiny_llama.codec.decode(expected[10:12])
    results = [
        run(tiny_llama, [Scripted(make)], stop=(text,))
        for make in (
            lambda o: [],
            lambda o: [expected[len(o) : len(o) + 12]],
            lambda o: [expected[len(o) : len(o) + 3]],
        )
    ]
    assert results[0][1][-1].finish_reason == "stop"
    assert results[0][0] == results[1][0] == results[2][0] == expected[: len(results[0][0])]
    assert text in tiny_llama.codec.decode(results[0][0])


def test_context_end_is_respected(tiny_llama):
    prompt = [7] * 2044  # 2048 positions
    got, commits = run(tiny_llama, [Scripted(lambda o: [[1] * 10])], prompt=prompt, limit=100)
    assert len(got) <= 4
    assert commits[-1].finish_reason in ("length", "eos")


# ---------------------------------------------------------------- prefix reuse


def test_prefix_reuse_changes_nothing(tiny):
    expected = stock(tiny)
    target = TargetModel(tiny.model, PrefixCache())
    for _ in range(3):
        assert run(tiny, [Scripted(noisy(expected, 1))], target=target)[0] == expected
    assert target.cached_tokens == len(PROMPT) - 1
    other = [*PROMPT[:30], *b"something else entirely"]
    fresh = run(tiny, [], prompt=other)[0]
    assert run(tiny, [], prompt=other, target=target)[0] == fresh
    assert target.cached_tokens == 30


def test_salts_never_share(tiny_llama):
    target = TargetModel(tiny_llama.model, PrefixCache())
    run(tiny_llama, [], target=target, salt="a", limit=4)
    run(tiny_llama, [], target=target, salt="b", limit=4)
    assert target.cached_tokens == 0
    run(tiny_llama, [], target=target, salt="a", limit=4)
    assert target.cached_tokens == len(PROMPT) - 1


def test_prefix_cache_is_bounded(tiny_llama):
    cache = PrefixCache(max_bytes=1 << 20)
    target = TargetModel(tiny_llama.model, cache)
    for start in range(8):
        run(tiny_llama, [], prompt=[start, *PROMPT], target=target, limit=3)
        assert sum(entry.cache.used_bytes() for entry in cache._entries) <= 1 << 20


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prefill_chunks_change_nothing(tiny, chunk):
    assert run(tiny, [], next_chunk=lambda left: chunk if left > chunk else 0)[0] == stock(tiny)


# ---------------------------------------------------------------- sampling


def test_sampling_with_one_seed_is_the_same_with_and_without_drafts(tiny):
    for seed in range(3):
        plain, drafted = (Sampler(Sampling(temperature=1.0, seed=seed)) for _ in range(2))
        expected = run(tiny, [], chooser=plain)[0]
        assert run(tiny, [Scripted(noisy(expected, seed))], chooser=drafted)[0] == expected


def test_sampled_acceptance_has_the_target_distribution():
    """Draw-and-follow over a fixed tree: second tokens are distributed as the target says (chi-square)."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    tree = build_tree(0, [Draft.uniform((2, 3), "s", 0.9, 0.9), Draft.uniform((4,), "s", 0.5, 0.5)], 8)
    sampler, counts, draws = Sampler(Sampling(temperature=1.0, seed=3)), np.zeros(6), 6000
    for _ in range(draws):
        accepted = accept(tree, logits, sampler)
        first = tree.tokens[accepted.path[1]] if len(accepted.path) > 1 else accepted.bonus
        counts[first] += 1
    wanted = torch.softmax(logits[0].double(), -1).numpy() * draws
    assert ((counts - wanted) ** 2 / wanted).sum() < 20.5  # 5 degrees of freedom, p = 0.001
