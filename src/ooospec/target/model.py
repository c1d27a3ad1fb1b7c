"""The only module that calls a transformers model. Batch size one.

Shapes: P = cached prefix, L = lead (prompt tokens not cached yet, before the root), T = tree nodes, V = vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ooospec.errors import UnsupportedModelError
from ooospec.target.kv_cache import TreeCache, slot_tensor
from ooospec.target.prefix_cache import PrefixCache
from ooospec.tree import CandidateTree


class TreeModel:
    """A causal LM whose forward pass takes explicit positions and visibility, over a cache that can forget."""

    def __init__(self, model: PreTrainedModel) -> None:
        if model.config._attn_implementation != "sdpa":
            raise UnsupportedModelError(
                f"{type(model).__name__} was loaded with attention {model.config._attn_implementation!r}; load it with "
                "attn_implementation='sdpa' (eager adds a boolean mask to the scores instead of applying it)."
            )
        self.model = model
        self.device = model.device
        self.cache = TreeCache.empty(model.config)
        self.threads: Callable[[], int] | None = None
        """Asked before every forward pass for the number of CPU threads to use."""
        # transformers 5.24 renames the argument and drops the old name in 5.40
        self.cache_name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        self._last_hidden: Tensor | None = None
        self._hook = model.get_output_embeddings().register_forward_pre_hook(self._remember_hidden)

    def _remember_hidden(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._last_hidden = args[0]

    def close(self) -> None:
        """Let go of the transformers model, which may serve others."""
        self._hook.remove()

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model can take."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def last_hidden(self) -> NDArray[np.float32]:
        """Hidden states that the last forward pass gave to the output layer. [rows kept, H]"""
        assert self._last_hidden is not None
        hidden: NDArray[np.float32] = self._last_hidden[0].float().cpu().numpy()
        return hidden

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        visible: NDArray[np.bool_] | None = None,
        keep: int | Sequence[int] = 0,
    ) -> Tensor:
        """Append `tokens` to the cache; return the logits of the last `keep` (0 = all) or of the listed ones. [keep, V]

        Without `positions` and `visible` [len(tokens), P + len(tokens)] the tokens continue the cache causally.
        """
        if self.threads is not None and (wanted := self.threads()) != torch.get_num_threads():
            torch.set_num_threads(wanted)
        kwargs: dict[str, Any] = {self.cache_name: self.cache}
        if positions is not None:
            kwargs["position_ids"] = torch.tensor([list(positions)], device=self.device)
        if visible is not None:
            kwargs["attention_mask"] = torch.from_numpy(visible)[None, None].to(self.device)
        ids = torch.tensor([list(tokens)], device=self.device)
        rows = keep if isinstance(keep, int) else torch.tensor(list(keep), device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=True, logits_to_keep=rows, **kwargs).logits
        return logits[0]


class TargetModel(TreeModel):
    """The model whose output is reproduced: prefills, verifies candidate trees, keeps what was committed."""

    def __init__(self, model: PreTrainedModel, prefix_cache: PrefixCache | None = None) -> None:
        super().__init__(model)
        self.prefix_cache = prefix_cache
        self.salt = ""
        self._limit = 1 << 30
        self._committed = 0  # slots that hold committed tokens; more may be in use after a pass that failed
        self.cached_tokens = 0
        """Prompt tokens of the current request that came from the prefix cache."""

    @property
    def context_length(self) -> int:
        """Largest number of positions: what the model was made for, or a lower limit that was set."""
        return min(self._limit, int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 30))

    def limit_context(self, length: int) -> None:
        """Use fewer positions than the model was made for."""
        self._limit = length

    def begin(self, prompt_ids: Sequence[int], salt: str = "") -> int:
        """Start a request; return how many prompt tokens the prefix cache supplied (always leaves the last one)."""
        self.salt = salt
        found = self.prefix_cache.take(prompt_ids, salt) if self.prefix_cache is not None else None
        self.cache = found or TreeCache.empty(self.model.config)
        self.cached_tokens = min(self.cache.length, len(prompt_ids) - 1)
        self.cache.set_length(self.cached_tokens)
        self._committed = self.cached_tokens
        return self.cached_tokens

    def prefilled(self, ids: Sequence[int], salt: str = "") -> PrefixCache:
        """Make a read-only prefix cache that holds exactly `ids`."""
        warm = PrefixCache()
        self.prefix_cache = None
        self.begin([*ids, 0])
        self.prefill(ids)
        warm.put(ids, self.cache, salt)
        warm.read_only = True
        return warm

    def rewind(self, length: int) -> None:
        """Keep the first `length` slots, which hold committed tokens, and forget the rest."""
        self._committed = min(length, self.cache.length)
        self.cache.set_length(self._committed)

    def end(self, ids: Sequence[int]) -> None:
        """Hand the cache to the prefix cache; `ids` are the prompt and the output that was kept."""
        if self.prefix_cache is not None:
            self.cache.set_length(min(self._committed, len(ids)))
            self.prefix_cache.put(ids, self.cache, self.salt)
        self.cache = TreeCache.empty(self.model.config)

    def prefill(self, ids: Sequence[int], all_rows: bool = False) -> Tensor:
        """Cache one chunk of the prompt; return the logits of its last token, or of all. [1 or len(ids), V]"""
        logits = self.forward(ids, keep=0 if all_rows else 1)
        self._committed = self.cache.length
        return logits

    def verify(self, tree: CandidateTree, lead: Sequence[int] = (), all_rows: bool = False) -> Tensor:
        """Run one forward pass over the rest of the prompt and the tree; return the logits of every node. [T, V]

        With `all_rows` the logits of the lead come first. [L + T, V]
        """
        prefix, before, size = self.cache.length, len(lead), len(tree)
        keep = 0 if all_rows else size
        if tree.is_chain():
            return self.forward([*lead, *tree.tokens], keep=keep)
        total = before + size
        visible = np.ones((total, prefix + total), dtype=np.bool_)
        visible[:, prefix:] = np.tri(total, dtype=np.bool_)
        visible[before:, prefix + before :] = tree.ancestor_mask()
        positions = [*range(prefix, prefix + before), *(prefix + before + d for d in tree.depths())]
        return self.forward([*lead, *tree.tokens], positions, visible, keep=keep)

    def commit(self, tree: CandidateTree, path: Sequence[int]) -> None:
        """Keep the accepted root-to-node `path` of the tree that was just verified and forget the rest."""
        start = self.cache.length - len(tree)
        if list(path) == list(range(len(path))):  # the best branch was right so far: its slots are in order already
            self.cache.set_length(start + len(path))
        else:
            self.cache.keep(start, slot_tensor([start + node for node in path], self.device))
        self._committed = self.cache.length
