"""A draft that the client gives (OpenAI's `prediction`), followed from where the output has come to."""

from __future__ import annotations

from itertools import takewhile

from ooospec.core import Commit, DecodeContext, Draft

MAX_MATCH, MIN_MATCH = 8, 2
DRAFT_TOKENS = 24
FIRST, FOLLOWING = 0.7, 0.9


class PredictedText:
    """Propose the tokens of a predicted text: from its beginning, then after the last place the output agrees with."""

    name = "prediction"
    wants_top = False

    def __init__(self, text: str) -> None:
        self._text = text
        self.offered = 0
        """How many of its tokens have been drafted, from the beginning."""
        self._right: dict[int, int] = {}
        """Place in the output -> place in the prediction that it agrees with."""

    @property
    def right(self) -> int:
        """How many of those the target wrote."""
        return len({place for place in self._right.values() if place < self.offered})

    def begin(self, context: DecodeContext) -> None:
        """Tokenize the prediction as it would follow the prompt."""
        self._context = context
        self._tokens: list[int] = list(context.codec.encode(self._text))
        self._at: int | None = 0

    def propose(self) -> list[Draft]:
        """Offer what follows in the prediction."""
        if self._at is None or self._at >= len(self._tokens):
            return []
        tokens = self._tokens[self._at : self._at + DRAFT_TOKENS]
        self.offered = max(self.offered, self._at + len(tokens))
        return [Draft.uniform(tokens, self.name, FIRST, FOLLOWING)]

    def observe(self, commit: Commit) -> None:
        """Find the output's place in the prediction again: where it was, or the nearest place after it."""
        new, output = list(commit.tokens), self._context.output_ids
        if self._at is not None:
            pairs = zip(self._tokens[self._at :], new, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._agree(len(output) - len(new), self._at, same)
            if same == len(new):
                self._at += same
                return
        known, self._at = self._at or 0, None
        for size in range(min(MAX_MATCH, len(output)), MIN_MATCH - 1, -1):
            tail = list(output[-size:])
            places = [i for i in range(len(self._tokens) - size + 1) if self._tokens[i : i + size] == tail]
            if places:
                self._at = min((place + size for place in places), key=lambda place: abs(place - known))
                self._agree(len(output) - size, self._at - size, size)
                return

    def _agree(self, at: int, place: int, size: int) -> None:
        """Take note that so many tokens of the output are those of the prediction from `place` on."""
        self._right.update((at + i, place + i) for i in range(size))

    def end(self) -> None:
        """Keep nothing."""
