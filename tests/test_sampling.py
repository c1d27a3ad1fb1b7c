"""Sampling parameters at every node: the same tokens as plain decoding, and each does what its name says."""

import math

import numpy as np
import pytest
import torch

from ooospec.core import Draft
from ooospec.errors import UsageError
from ooospec.sampling import Sampler, Sampling, make_chooser
from ooospec.tree import build_tree
from ooospec.verify import Greedy, accept
from test_exactness import PROMPT, Scripted, noisy, run

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])


def frequencies(sampling, draws=4000, logits=LOGITS):
    sampler, counts = Sampler(sampling), np.zeros(logits.shape[1])
    for _ in range(draws):
        sampler.prepare(logits)
        counts[sampler.choose(0)] += 1
    return counts / draws


def softmax(values):
    chances = np.exp(np.array(values, dtype=float) - max(v for v in values if v > -math.inf))
    return chances / chances.sum()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, softmax([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])),
        ({"temperature": 2.0}, softmax([1.0, 0.5, 0.25, 0.0, -0.5, -1.5])),
        ({"top_k": 2}, softmax([2.0, 1.0, -math.inf, -math.inf, -math.inf, -math.inf])),
        ({"top_p": 0.7}, softmax([2.0, 1.0, -math.inf, -math.inf, -math.inf, -math.inf])),
        ({"min_p": 0.3}, softmax([2.0, 1.0, -math.inf, -math.inf, -math.inf, -math.inf])),
        ({"logit_bias": {5: 6.0, 0: -100.0}}, softmax([-98.0, 1.0, 0.5, 0.0, -1.0, 3.0])),
    ],
)
def test_each_parameter_gives_its_distribution(options, expected):
    found = frequencies(Sampling(**{"temperature": 1.0, "seed": 5, **options}))
    assert np.abs(found - expected).max() < 0.03
    assert (found[expected < 1e-9] == 0).all()


def test_penalties_count_what_was_written():
    greedy = Sampler(Sampling(presence_penalty=1.5))
    greedy.prepare(LOGITS)
    assert [greedy.choose(0) for _ in range(3)] == [0, 1, 0]  # 2.0, then 0.5 < 1.0, then 0.5 > -0.5
    counted = Sampler(Sampling(frequency_penalty=0.6))
    counted.prepare(LOGITS)
    assert [counted.choose(0) for _ in range(4)] == [0, 0, 1, 0]
    repeated = Sampler(Sampling(repetition_penalty=4.0), [0])
    repeated.prepare(LOGITS)
    assert [repeated.choose(0) for _ in range(2)] == [1, 0]  # 2.0 / 4, then 1.0 / 4 < 0.5 = 2.0 / 4, first of equals


CHANGES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 12, "min_p": 0.02},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9, "repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0, 7: -9.0}},
    {"temperature": 1.3, "repetition_penalty": 1.1, "logprobs": 3},
]


@pytest.mark.parametrize("options", CHANGES)
def test_drafts_change_no_token_under_any_parameters(tiny, options):
    sampling = Sampling(seed=11, **options)
    plain = run(tiny, [], chooser=make_chooser(sampling, PROMPT))[0]
    for seed in range(3):
        drafted = run(tiny, [Scripted(noisy(plain, seed))], chooser=make_chooser(sampling, PROMPT))
        assert drafted[0] == plain
    assert run(tiny, [], chooser=make_chooser(sampling, PROMPT))[0] == plain


def test_the_distribution_over_two_steps_is_that_of_plain_sampling():
    """20,000 draws over a tree of depth two against the product of the target's chances (chi-square)."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    tree = build_tree(0, [Draft.uniform((2, 3), "s", 0.9, 0.9), Draft.uniform((4,), "s", 0.5, 0.5)], 8)
    sampler, draws = Sampler(Sampling(temperature=0.9, top_k=4, seed=1)), 20_000
    counts = np.zeros((5, 5))
    for _ in range(draws):
        accepted = accept(tree, logits, sampler)
        tokens = [tree.tokens[node] for node in accepted.path[1:]] + [accepted.bonus]
        if len(tokens) > 1:
            counts[tokens[0], tokens[1]] += 1
        else:
            counts[tokens[0]] += 0.2  # nothing drafted below: its successors are not drawn
    top = logits / 0.9
    top = top.masked_fill(top < top.topk(4).values[:, -1:], -math.inf)
    first = torch.softmax(top[0].double(), -1).numpy()
    assert np.abs(counts.sum(1) / draws - first).max() < 0.015
    node = next(n for n in range(1, len(tree)) if tree.tokens[n] == 2)
    second, seen = torch.softmax(top[node].double(), -1).numpy(), counts[2]
    wanted = second * seen.sum()
    used = wanted > 0
    assert ((seen[used] - wanted[used]) ** 2 / wanted[used]).sum() < 16.3  # 3 degrees of freedom, p = 0.001
    assert (seen[~used] == 0).all()


def test_logprobs_are_those_of_the_unchanged_logits_and_fit_the_tokens(tiny):
    chooser = make_chooser(Sampling(logprobs=2), PROMPT)
    plain, commits = run(tiny, [], chooser=chooser)
    again = make_chooser(Sampling(logprobs=2), PROMPT)
    output, drafted = run(tiny, [Scripted(noisy(plain, 1))], chooser=again)
    one = [chances for commit in commits for chances in commit.chances]
    two = [chances for commit in drafted for chances in commit.chances]
    assert [c.token for c in one] == [c.token for c in two] == output
    assert all(len(c.likeliest) == 2 and c.likeliest[0][1] >= c.likeliest[1][1] for c in one)
    assert [c.logprob for c in one] == pytest.approx([c.logprob for c in two], abs=1e-3)
    assert all(c.likeliest[0][0] == c.token for c in one)  # greedy


def test_plain_greedy_needs_no_sampler():
    assert isinstance(make_chooser(Sampling(), []), Greedy)
    assert isinstance(make_chooser(Sampling(logprobs=0), []), Sampler)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 up"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p must be a number from 0 to 1 .above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k must be a whole number"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"logit_bias": {3: 101}}, "logit_bias must be a number from -100 to 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias's token"),
        ({"warmth": 1}, "Unknown option 'warmth'; sampling options are temperature, top_p"),
    ],
)
def test_wrong_parameters_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Sampling.of(options)
