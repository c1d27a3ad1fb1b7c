"""The packed wave: one prefix, every question a branch under a block mask, one forward pass a step for all of them.

Argument questions do not see the function's answer: that is what makes it one wave (arXiv 2608.00814). Tools that the
first pass makes unlikely are dropped from later steps, and inventories too large for one pass are asked for the
function first.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooospec.errors import ContextLengthError
from ooospec.sidecar.adapter import Habits
from ooospec.sidecar.branches import Branch, Trie
from ooospec.sidecar.copying import CopyIndex
from ooospec.sidecar.mentioned import is_mentioned, may_be_mentioned
from ooospec.sidecar.prompt import FUNCTION_QUESTION, NEUTRAL_DIALOGUE, prefix_ids
from ooospec.sidecar.protocol import Function, SlotValue, Submit, encoder
from ooospec.target.loading import LoadedModel
from ooospec.target.model import TargetModel
from ooospec.target.prefix_cache import PrefixCache

PREFILL_CHUNK = 256
SINK_TOKENS = 2
"""The first tokens have activations hundreds of times larger than the rest; a pass of their own keeps them from
setting the scale that dynamic quantization uses for a whole chunk."""
TOP_FUNCTIONS = 3
STEP_ROWS = 8
"""Rows of a step that copied drafts may fill: up to here a row costs next to nothing on a CPU."""
PRIORS_KEPT = 256
ROOM = 128
"""Positions left for a question and its answer behind a prefix."""
_NUMERIC = re.compile(r"\s*-?[0-9]+\s*")


@dataclass(slots=True)
class WaveStats:
    """What a wave cost."""

    prefill_ms: float = 0.0
    wave_ms: float = 0.0
    steps: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Pass:
    """Log-probabilities after some nodes of a trie whose node i sits in KV slot `base + i`."""

    trie: Trie
    base: int
    rows: dict[int, Tensor]

    def log_chance(self, nodes: Iterable[int]) -> float:
        """Sum the log-probability of every node given its parent."""
        return sum(float(self.rows[self.trie.parents[node]][self.trie.tokens[node]]) for node in nodes)


class WavePredictor:
    """Answers all questions about a request with a causal LM."""

    def __init__(
        self,
        loaded: LoadedModel,
        habits: Habits | None = None,
        max_first_nodes: int = 64,
        min_tool_chance: float = 0.05,
    ) -> None:
        self.loaded, self.codec, self.habits = loaded, loaded.codec, habits or Habits()
        self.max_first_nodes, self.min_tool_chance = max_first_nodes, min_tool_chance
        self.model = TargetModel(loaded.model, PrefixCache(1 << 29))
        self.stats = WaveStats()
        self._texts = self.codec.token_texts()
        self._numeric_ids = _numeric_tokens(self._texts).nonzero()[:, 0].to(loaded.model.device)
        self._beginning: dict[str, Tensor] = {}
        """Ids of the tokens whose text begins with a text."""
        self._openings: dict[tuple[str, int], Tensor] = {}
        """Ids of the tokens that an answer may begin with, by its type and its usual first token."""
        self._copies = CopyIndex([], self._texts)
        self._priors: dict[bytes, list[float]] = {}

    def wave(self, request: Submit) -> Iterator[Function | SlotValue | None]:
        """Yield answers as they become known, and None between forward passes so that the caller can look up."""
        start = time.perf_counter()
        stats = self.stats = WaveStats()
        if request.fresh and self.model.prefix_cache is not None:
            self.model.prefix_cache.clear()
        prefix = self._prefix(request)
        prior = self._prior(request) if request.only < 0 else []
        yield None
        self._copies = CopyIndex(prefix, self._texts)
        stats.cached_tokens = self.model.begin(prefix)
        try:
            lead = prefix[stats.cached_tokens : -1]
            while lead:
                lead = self._prefill(lead, PREFILL_CHUNK)
                yield None
            stats.prefill_ms = (time.perf_counter() - start) * 1e3
            if request.only < 0:
                yield from self._ask(request, prefix[-1], prior)
            elif request.only < len(request.tools) and request.slot < len(request.tools[request.only].slots):
                if request.slot < 0:
                    yield from self._ask_slots(request, prefix[-1], [request.only])
                else:
                    yield from self._go_on(request, prefix[-1])
        finally:
            self.model.end(prefix)
            stats.wave_ms = (time.perf_counter() - start) * 1e3

    def _prefix(self, request: Submit) -> list[int]:
        """Tokenize tools and dialogue; of a dialogue that is longer than the model reads, the newest turns."""
        dialogue = request.dialogue
        while True:
            prefix = prefix_ids(self.loaded, request.tools, dialogue)
            if len(prefix) + ROOM <= self.model.context_length:
                return prefix
            if len(dialogue) < 2:
                raise ContextLengthError(f"{len(prefix)} tokens are more than the sidecar reads.")
            dialogue = dialogue[len(dialogue) // 2 :]

    def _prefill(self, lead: list[int], limit: int = 1 << 30) -> list[int]:
        """Cache about `limit` tokens of `lead`; return the rest."""
        start = 0
        while start < min(limit, len(lead)):
            chunk = PREFILL_CHUNK if self.model.cache.length else SINK_TOKENS
            self.model.prefill(lead[start : start + chunk])
            start += chunk
        return lead[start:]

    def timings(self) -> tuple[int, int, int]:
        """Return (prefill_ms, wave_ms, steps) of the last wave."""
        return round(self.stats.prefill_ms), round(self.stats.wave_ms), self.stats.steps

    def _prior(self, request: Submit) -> list[float]:
        """Return the log-probability of each tool's name when nothing is asked for; kept per list of tools."""
        if len(request.tools) < 2 or not self.habits.prior_weight:
            return [0.0] * len(request.tools)
        key = encoder.encode(request.tools)  # choices may hold lists, so the tools themselves have no hash
        if key in self._priors and not request.fresh:
            return self._priors[key]
        prefix = prefix_ids(self.loaded, request.tools, NEUTRAL_DIALOGUE)
        lead = prefix[self.model.begin(prefix) : -1]
        self._prefill(lead)
        trie, names, _ = self._plant(request, prefix[-1], ())
        first = self._pass(trie, names, [])
        self.model.cache.set_length(first.base)
        self.model.end(prefix)
        if len(self._priors) >= PRIORS_KEPT:
            self._priors.pop(next(iter(self._priors)))
        self._priors[key] = [first.log_chance(nodes) for nodes in names]
        return self._priors[key]

    def _ask(self, request: Submit, root: int, prior: Sequence[float]) -> Iterator[Function | SlotValue | None]:
        if not request.tools:
            return
        everything = range(len(request.tools))
        slots = sum(len(tool.slots) for tool in request.tools)
        trie, names, branches = self._plant(request, root, everything if slots <= self.max_first_nodes else ())
        if len(trie.tokens) > self.max_first_nodes:  # too many questions for one pass: the function alone first
            trie, names, branches = self._plant(request, root, ())
        first = self._pass(trie, names, branches)
        scores = [first.log_chance(n) - self.habits.prior_weight * p for n, p in zip(names, prior, strict=True)]
        chances = _softmax([score / self.habits.function_temperature for score in scores])
        ranked = sorted(everything, key=lambda tool: -chances[tool])
        best = ranked[:TOP_FUNCTIONS]
        yield Function(request.request, tuple(best), tuple(_percent(chances[tool]) for tool in best))
        likely = [tool for tool in ranked if tool == ranked[0] or chances[tool] >= self.min_tool_chance]
        if branches:
            yield from self._answer(request, [branch for branch in branches if branch.tool in likely], first)
        else:
            self.model.cache.set_length(first.base)
            yield from self._ask_slots(request, root, likely)

    def _ask_slots(self, request: Submit, root: int, tools: Sequence[int]) -> Iterator[SlotValue | None]:
        trie, _, branches = self._plant(request, root, tools, function=False)
        if branches:
            yield from self._answer(request, branches, self._pass(trie, [], branches))

    def _go_on(self, request: Submit, root: int) -> Iterator[SlotValue | None]:
        """Continue a value that the target has begun otherwise than predicted."""
        tool, trie = request.tools[request.only], Trie([root])
        named, slot = (request.only, tool.name), (request.slot, tool.slots[request.slot])
        branch = Branch.continuing(trie, self.codec, named, slot, request.written)
        first = self._pass(trie, [], [branch])
        self._take(branch, first.rows[branch.end])
        yield from self._decode(request, [branch], first)

    def _plant(
        self, request: Submit, root: int, tools: Sequence[int], function: bool = True
    ) -> tuple[Trie, list[list[int]], list[Branch]]:
        """Put the function question and the slot questions of `tools` into one trie."""
        trie = Trie([root])
        asked = request.tools if function else ()
        names = [trie.add(self.codec.encode(f'{FUNCTION_QUESTION}{tool.name}"')) for tool in asked]
        branches = [
            Branch.plant(trie, self.codec, (tool, request.tools[tool].name), (index, slot))
            for tool in tools
            for index, slot in enumerate(request.tools[tool].slots)
        ]
        return trie, names, branches

    def _pass(self, trie: Trie, names: list[list[int]], branches: list[Branch]) -> _Pass:
        """Run the model over the trie; keep the rows that scores and next tokens need."""
        scored = [node for nodes in names for node in nodes]
        scored += [node for branch in branches for nodes in branch.options for node in nodes]
        wanted = {trie.parents[node] for node in scored}
        wanted |= {node for branch in branches for node in (branch.colon, branch.end)}
        wanted |= {nodes[-1] for branch in branches for nodes in branch.options if nodes and self._is_open(trie, nodes)}
        rows = sorted(wanted)
        base, size = self.model.cache.length, len(trie.tokens)
        visible = np.ones((size, base + size), dtype=np.bool_)
        visible[:, base:] = np.eye(size, dtype=np.bool_)
        depths = [0] * size
        for node in range(1, size):
            parent = trie.parents[node]
            visible[node, base:] |= visible[parent, base:]
            depths[node] = depths[parent] + 1
        logits = self.model.forward(trie.tokens, [base + depth for depth in depths], visible, keep=rows)
        for branch in branches:
            line = trie.ancestors(branch.end)
            branch.seen, branch.position = [base + node for node in line], base + len(line)
        self.stats.steps += 1
        return _Pass(trie, base, dict(zip(rows, torch.log_softmax(logits.float(), -1), strict=True)))

    # ------------------------------------------------------------------ answers

    def _answer(self, request: Submit, live: list[Branch], first: _Pass) -> Iterator[SlotValue | None]:
        dialogue = "\n".join(turn.text for turn in request.dialogue)
        decoding = []
        for branch in live:
            null = self._chance_of_null(branch, first.rows[branch.colon])
            if branch.kind == "scored":
                yield self._choose(request, branch, first, dialogue, null)
            elif null > 0.5:
                yield SlotValue(request.request, branch.tool, branch.slot, _percent(null), None, False)
            else:
                self._open(branch, first)
                decoding.append(branch)
        yield from self._decode(request, decoding, first)

    def _decode(self, request: Submit, decoding: list[Branch], first: _Pass) -> Iterator[SlotValue | None]:
        dialogue = "\n".join(turn.text for turn in request.dialogue)
        while decoding:
            still = []
            for branch in decoding:
                if self._is_invented(branch, dialogue):
                    yield SlotValue(
                        request.request, branch.tool, branch.slot, _percent(self._chance(branch)), None, False
                    )
                    continue
                done, value = branch.finish(self.codec)
                if not done:
                    still.append(branch)
                elif value is not None:
                    yield self._slot_value(request, branch, value, self._chance(branch), dialogue)
            decoding = still
            if decoding:
                yield None
                self._step(decoding, first.base)

    def _choose(self, request: Submit, branch: Branch, first: _Pass, dialogue: str, null: float) -> SlotValue:
        scores = [self._log_chance_of_choice(first, nodes) if nodes else -math.inf for nodes in branch.options]
        best = max(range(len(scores)), key=scores.__getitem__)
        if self.habits.answers_null and null > math.exp(scores[best]):
            return SlotValue(request.request, branch.tool, branch.slot, _percent(null), None, False)
        chance = self._honest(_softmax(scores)[best])
        return self._slot_value(request, branch, branch.spec.choices[best], chance, dialogue)

    def _is_open(self, trie: Trie, nodes: list[int]) -> bool:
        """Tell whether a choice ends in a digit, which others may follow."""
        return self._texts[trie.tokens[nodes[-1]]][-1:].isdigit()

    def _log_chance_of_choice(self, first: _Pass, nodes: list[int]) -> float:
        """Score a choice; its last quote may be a part of a longer token, such as `"}}`, and no digit follows a 1."""
        last = self._texts[first.trie.tokens[nodes[-1]]]
        if self._is_open(first.trie, nodes):
            going_on = float(first.rows[nodes[-1]][self._numeric_ids].logsumexp(0))
            return first.log_chance(nodes) + math.log(max(1e-9, 1 - math.exp(min(0.0, going_on))))
        if not last.endswith('"'):
            return first.log_chance(nodes)
        if last not in self._beginning:
            same = [token for token, text in enumerate(self._texts) if text.startswith(last)]
            self._beginning[last] = torch.tensor(same, device=self.loaded.model.device)
        row = first.rows[first.trie.parents[nodes[-1]]]
        return first.log_chance(nodes[:-1]) + float(row[self._beginning[last]].logsumexp(0))

    def _chance_of_null(self, branch: Branch, row: Tensor) -> float:
        """Chance of null against the slot's type of value; 0 where the answer is not believed."""
        if branch.null < 0 or (branch.spec.required and "null" not in branch.spec.types):
            return 0.0
        if not branch.opening:
            return float(row[branch.null].exp()) if self.habits.answers_null else 0.0
        value = row[self._first_tokens(branch)].logsumexp(0)
        return 1 / (1 + math.exp(min(50.0, float(value - row[branch.null]))))

    def _first_tokens(self, branch: Branch) -> Tensor:
        """Return the ids that an answer may begin with."""
        key = (branch.type, branch.opening[0])
        if key not in self._openings:
            ids = {branch.opening[0], *(token for token, text in enumerate(self._texts) if branch.may_begin(text))}
            self._openings[key] = torch.tensor(sorted(ids), device=self.loaded.model.device)
        return self._openings[key]

    def _open(self, branch: Branch, first: _Pass) -> None:
        """Begin an answer as the model does: its first token may hold more than a quote or a bracket, as ` -` or ` [{`.

        Most begin as usual, and the first pass has what follows then.
        """
        if branch.opening:
            ids = self._first_tokens(branch)
            row = first.rows[branch.colon][ids].log_softmax(0)
            best = int(row.argmax())
            if int(ids[best]) != branch.opening[0]:
                line = first.trie.ancestors(branch.colon)
                branch.seen, branch.position = [first.base + node for node in line], first.base + len(line)
                branch.answer, branch.log_chance = [int(ids[best])], float(row[best])
                return
            branch.answer, branch.given = list(branch.opening), len(branch.opening)
        self._take(branch, first.rows[branch.end])

    def _is_invented(self, branch: Branch, dialogue: str) -> bool:
        """Tell whether an optional slot's unfinished answer cannot become words of the dialogue."""
        if branch.spec.required or self.habits.answers_null:
            return False
        return not may_be_mentioned(self.codec.decode(branch.answer), dialogue)

    def _chance(self, branch: Branch) -> float:
        return self._honest(math.exp(branch.log_chance))

    def _honest(self, chance: float) -> float:
        """Scale the log-odds of a value's chance as calibration found."""
        chance = min(1 - 1e-6, max(1e-6, chance))
        odds = self.habits.value_scale * math.log(chance / (1 - chance)) + self.habits.value_shift
        return 1 / (1 + math.exp(-odds))

    def _slot_value(self, request: Submit, branch: Branch, value: Any, chance: float, dialogue: str) -> SlotValue:
        """Publish an answer; zero-shot models fill every optional slot, so one that nobody mentioned is left out."""
        present = branch.spec.required or self.habits.answers_null or is_mentioned(value, dialogue)
        return SlotValue(
            request.request, branch.tool, branch.slot, _percent(chance), value if present else None, present
        )

    def _take(self, branch: Branch, row: Tensor) -> None:
        """Append the likeliest next token; a number begins with a digit or a sign."""
        if branch.kind == "number" and len(branch.answer) == branch.given:
            allowed = row[self._numeric_ids].log_softmax(0)
            place = int(allowed.argmax())
            token, chance = int(self._numeric_ids[place]), float(allowed[place])
        else:
            token = int(row.argmax())
            chance = float(row[token])
        branch.answer.append(token)
        branch.log_chance += chance

    def _step(self, branches: list[Branch], base: int) -> None:
        """Advance every branch by its newest token and by as much of a copied draft as the model agrees with."""
        spare = max(0, STEP_ROWS - len(branches)) // len(branches)
        chains = [[b.answer[-1], *self._copies.continuation(b.answer, spare)] for b in branches]
        start, size = self.model.cache.length, sum(map(len, chains))
        visible = np.zeros((size, start + size), dtype=np.bool_)
        visible[:, :base] = True
        positions: list[int] = []
        row = 0
        for branch, chain in zip(branches, chains, strict=True):
            visible[row : row + len(chain), branch.seen] = True
            block = slice(row, row + len(chain))
            visible[block, start + row : start + row + len(chain)] = np.tri(len(chain), dtype=np.bool_)
            positions += range(branch.position, branch.position + len(chain))
            row += len(chain)
        logits = self.model.forward([token for chain in chains for token in chain], positions, visible, keep=size)
        chances, row = torch.log_softmax(logits.float(), -1), 0
        for branch, chain in zip(branches, chains, strict=True):
            self._follow(branch, chain, start + row, chances[row : row + len(chain)])
            row += len(chain)
        self.stats.steps += 1

    def _follow(self, branch: Branch, chain: list[int], slot: int, rows: Tensor) -> None:
        """Take the model's own tokens as long as they are the chain's. `rows` [len(chain), V]"""
        for index in range(len(chain)):
            branch.seen.append(slot + index)
            branch.position += 1
            self._take(branch, rows[index])
            agrees = index + 1 < len(chain) and branch.answer[-1] == chain[index + 1]
            if not agrees or branch.finish(self.codec)[0]:
                return


def _percent(chance: float) -> int:
    return max(1, min(99, round(chance * 100)))


def _softmax(values: Sequence[float]) -> list[float]:
    top = max(values, default=0.0)
    weights = [math.exp(value - top) if top > -math.inf else 1.0 for value in values]
    return [weight / sum(weights) for weight in weights]


def _numeric_tokens(texts: Sequence[str]) -> Tensor:
    """Mark the ids that can begin a number. [V]"""
    return torch.tensor([bool(_NUMERIC.fullmatch(text)) or text.strip() == "-" for text in texts], dtype=torch.bool)
