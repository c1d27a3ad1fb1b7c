"""Ordinary speculative decoding (arXiv 2211.17192): a smaller LM of the same tokenizer drafts a chain.

A proposer that runs a model, so it lives beside the target; the loop treats it like any other.
"""

from __future__ import annotations

from ooospec.core import Commit, DecodeContext, Draft
from ooospec.errors import UsageError
from ooospec.target.loading import LoadedModel
from ooospec.target.model import TargetModel

DRAFT_TOKENS = 5
CHUNK = 512


class DraftModel:
    """A loaded draft model; `proposer` is the source of drafts that it serves."""

    def __init__(self, loaded: LoadedModel, target: LoadedModel) -> None:
        """Check that both speak the same token ids. Raises UsageError."""
        if loaded.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise UsageError(
                f"Draft model {loaded.name!r} has another tokenizer than target {target.name!r}; choose a smaller "
                "model of the target's own family."
            )
        self.loaded = loaded
        self.model = TargetModel(loaded.model)

    def proposer(self) -> DraftProposer:
        """Make the proposer of one request."""
        return DraftProposer(self.model)


class DraftProposer:
    """Propose the draft model's own greedy continuation."""

    name = "draft"
    wants_top = False

    def __init__(self, model: TargetModel, count: int = DRAFT_TOKENS) -> None:
        self.model, self.count = model, count
        self._committed: list[int] = []

    def begin(self, context: DecodeContext) -> None:
        """Prefill the prompt but for its last token."""
        self._committed = list(context.prompt_ids)
        lead = self._committed[self.model.begin(self._committed) : -1]
        while lead:
            self.model.prefill(lead[:CHUNK])
            lead = lead[CHUNK:]

    def propose(self) -> list[Draft]:
        """Read what was committed since, then go on greedily."""
        drafted: list[int] = []
        pending = self._committed[self.model.cache.length :]
        room = self.model.context_length - len(self._committed)
        chances: list[float] = []
        while len(drafted) < min(self.count, room):
            row = self.model.forward(pending, keep=1)[0].float()
            token = int(row.argmax())
            chances.append(float(row.softmax(-1)[token]))
            drafted.append(token)
            pending = [token]
        return [Draft(tuple(drafted), self.name, tuple(chances))] if drafted else []

    def observe(self, commit: Commit) -> None:
        """Forget the drafted tokens that were not accepted."""
        before = len(self._committed)
        self._committed += commit.tokens
        accepted = sum(source == self.name for source in commit.sources)
        self.model.rewind(before + accepted)

    def end(self) -> None:
        """Keep the KV entries for the next request."""
        self.model.rewind(len(self._committed))
        self.model.end(self._committed)
