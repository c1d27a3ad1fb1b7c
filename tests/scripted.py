"""A stub target that greedily writes a given text, so that call drafting is exercised without a real model."""

from __future__ import annotations

import numpy as np
import torch

from ooospec.core import DecodeContext
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.planner import Budget
from ooospec.stopping import Limits
from ooospec.verify import Greedy


class ScriptedTarget:
    """Answers every node on the script's path with the script's next token, all others with a fixed wrong one."""

    context_length = 1 << 20
    cached_tokens = 0

    def __init__(self, script, vocab):
        self.script, self.vocab = list(script), vocab
        self.vocabulary = vocab

    def begin(self, prompt_ids, salt=""):
        self.committed = []
        return 0

    def end(self, ids):
        pass

    def prefill(self, ids, all_rows=False):
        return torch.zeros(len(ids), self.vocab)

    @property
    def last_hidden(self):
        return np.ones((1, 4), dtype=np.float32)

    def verify(self, tree, lead=(), all_rows=False):
        logits = torch.zeros(len(tree), self.vocab)
        paths = [()]
        for node in range(1, len(tree)):
            paths.append((*paths[tree.parents[node]], tree.tokens[node]))
        for node, path in enumerate(paths):
            done = [*self.committed, *path]
            on_script = done == self.script[: len(done)] and len(done) < len(self.script)
            logits[node, self.script[len(done)] if on_script else 0] = 1.0
        self._paths = paths
        return torch.cat([torch.zeros(len(lead), self.vocab), logits]) if all_rows else logits

    def commit(self, tree, path):
        new = list(self._paths[path[-1]])
        following = [*self.committed, *new][: len(self.script)]  # what comes after the end is cut off by the loop
        assert following == self.script[: len(following)]
        self.committed = self.script[: len(following) + 1]


def write(codec, text, tools, method="ooo", hint=None, memory=None, nodes=64, limit=400, prompt="prompt:", form="json"):
    """Decode a scripted text; returns (output text, commits)."""
    script = [*codec.encode(text), codec.eos_id]
    output: list[int] = []
    context = DecodeContext(codec, codec.encode(prompt), output, tools, f"test/{form}", form)
    poll = (lambda: None) if hint is None else (hint if callable(hint) else lambda: hint)
    sources = method_named(method).build(Setup(memory or Memory(), poll))
    target = ScriptedTarget(script, codec.vocab_size)
    commits = list(decode(target, context, output, sources, Greedy(), Limits(limit), Budget(nodes)))
    assert output == script[:limit]
    return codec.decode(output[:-1]), commits
