"""A growable KV cache that can forget rejected branches.

Names: a KV *slot* is an index in the cache, a *position* is prefix length + depth. They differ inside a tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, PretrainedConfig

from ooospec.errors import UnsupportedModelError

INITIAL_CAPACITY = 512


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers [1, kv_heads, capacity, head_dim] of which `length` slots are used."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers in the dtype and on the device of the first states."""
        self._grow_to(max(INITIAL_CAPACITY, key_states.shape[-2]), key_states, value_states)
        self.is_initialized = True

    def _grow_to(self, capacity: int, key_like: Tensor, value_like: Tensor) -> None:
        grown = tuple(
            like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3]) for like in (key_like, value_like)
        )
        if self._buffers is not None:
            for new, old in zip(grown, self._buffers, strict=True):
                new[..., : self.length, :] = old[..., : self.length, :]
        self._buffers = (grown[0], grown[1])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [1, kv_heads, n, head_dim]; return all keys and values."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        assert self._buffers is not None
        end = self.length + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._grow_to(2 * end, key_states, value_states)
        keys, values = self._buffers
        keys[..., self.length : end, :] = key_states
        values[..., self.length : end, :] = value_states
        self.set_length(end)
        return self.keys, self.values

    def set_length(self, length: int) -> None:
        """Use the first `length` slots."""
        self.length = length
        if self._buffers is not None:
            self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    @torch.inference_mode()
    def keep(self, start: int, slots: Tensor) -> None:
        """Drop everything from slot `start` on except `slots` (absolute, ascending), closing the gaps."""
        assert self._buffers is not None
        end = start + len(slots)
        for buffer in self._buffers:
            buffer[..., start:end, :] = buffer.index_select(-2, slots)  # index_select copies: no aliasing
        self.set_length(end)

    @torch.inference_mode()
    def copy_prefix(self, length: int) -> TreeCacheLayer:
        """Copy the first `length` slots into a layer of its own."""
        copy = TreeCacheLayer()
        if length and self._buffers is not None:
            keys, values = (buffer[..., :length, :] for buffer in self._buffers)
            copy._grow_to(max(INITIAL_CAPACITY, 2 * length), keys, values)
            copy.is_initialized = True
            copy.update(keys, values)
        return copy

    def used_bytes(self) -> int:
        """Memory that the buffers hold."""
        return sum(b.numel() * b.element_size() for b in self._buffers) if self._buffers is not None else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end; transformers' convention: zero or negative."""
        self.set_length(self.length + tokens_to_remove)

    def get_seq_length(self) -> int:
        """Return the number of slots in use."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys a mask must cover, offset of the first)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class TreeCache(Cache):
    """One `TreeCacheLayer` a layer."""

    layers: list[TreeCacheLayer]

    def __init__(self, layers: list[TreeCacheLayer]) -> None:
        super().__init__(layers=layers)

    @classmethod
    def empty(cls, config: PretrainedConfig) -> TreeCache:
        """Make an empty cache for a model of `config`.

        Raises UnsupportedModelError where a layer keeps anything but full attention: a sliding window or a
        recurrent state takes a tree mask without complaint and gives wrong logits.
        """
        layers = DynamicCache(config=config).layers
        odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
        if odd:
            raise UnsupportedModelError(
                f"{config.model_type} keeps {', '.join(odd)} state; a candidate tree can only be verified with full "
                "attention in every layer. Choose a target without sliding-window or linear-attention layers."
            )
        return cls([TreeCacheLayer() for _ in range(len(layers) or config.num_hidden_layers)])

    @property
    def length(self) -> int:
        """Slots in use."""
        return self.layers[0].length

    def set_length(self, length: int) -> None:
        """Use only the first `length` slots."""
        for layer in self.layers:
            layer.set_length(length)

    def keep(self, start: int, slots: Tensor) -> None:
        """Drop everything from slot `start` on except `slots` (absolute, ascending)."""
        for layer in self.layers:
            layer.keep(start, slots)

    def copy_prefix(self, length: int) -> TreeCache:
        """Copy the first `length` slots into a cache of its own."""
        return TreeCache([layer.copy_prefix(length) for layer in self.layers])

    def used_bytes(self) -> int:
        """Memory that all layers hold."""
        return sum(layer.used_bytes() for layer in self.layers)


def slot_tensor(slots: list[int], device: torch.device) -> Tensor:
    """Put KV slots into an index tensor."""
    return torch.tensor(slots, device=device, dtype=torch.long)
