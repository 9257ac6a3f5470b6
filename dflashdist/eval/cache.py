"""Keys and values of several sequences at once, each of its own length.

What a row holds is decided by its length alone: a token that was not kept lies after it, is seen
by nobody (a key is visible to queries at or after its position) and is overwritten by the next one.
So nothing is ever cropped, and rows that accept different numbers of drafts stay in one batch.

`KeyValueCache.update` is what transformers' attention layers call on a cache (5.17 to 5.24 and
later); masks and positions are passed to the model ready made, so nothing else of theirs is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflashdist.config import InputError


class KeyValueCache:
    """Preallocated keys and values [rows, heads, capacity, D] of each layer that writes.

    A forward is `begin(n)`, one `update` a layer, then `advance` with the tokens that each row
    keeps of these n, counted from the first.
    """

    def __init__(self, num_rows: int, capacity: int, device: str | torch.device) -> None:
        self.lengths = [0] * num_rows  # tokens kept of each row; on the host, as decoding is
        self._capacity, self.device = capacity, torch.device(device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.begin(0)

    def begin(self, num_tokens: int) -> Tensor:
        """Positions of each row's next tokens, int64 [rows, num_tokens]."""
        self._used = max(self.lengths, default=0) + num_tokens
        assert self._used <= self._capacity, (self._used, self._capacity)
        starts = torch.tensor(self.lengths, device=self.device)
        self.positions = starts[:, None] + torch.arange(num_tokens, device=self.device)
        self._rows = torch.arange(len(starts), device=self.device)[:, None]
        return self.positions

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_ignored: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, n, D] at `positions`; all keys and values up to the longest row.

        Further arguments are those of some releases of transformers, of no use here.
        """
        if layer_idx not in self._layers:
            # Zeros: a value that no query sees is still multiplied, by 0, and must be finite.
            self._layers[layer_idx] = (self._room(keys), self._room(values))
        for stored, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            stored[self._rows, :, self.positions] = new.transpose(1, 2)
        return self.layer(layer_idx)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views [rows, heads, used, D] of a layer, up to the end of the longest row."""
        keys, values = self._layers[layer_idx]
        return keys[:, :, : self._used], values[:, :, : self._used]

    def advance(self, kept: Sequence[int]) -> None:
        """Lengthen each row by the tokens kept of those last written."""
        self.lengths = [n + more for n, more in zip(self.lengths, kept, strict=True)]
        self._used = max(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows alone, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self._layers = {i: (k[index], v[index]) for i, (k, v) in self._layers.items()}
        self.lengths = [self.lengths[row] for row in rows]
        self._used = max(self.lengths, default=0)

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Asked for by models that would otherwise make positions of their own."""
        return max(self.lengths)

    def visible(self, window: int | None = None) -> Tensor:
        """bool [rows, 1, n, used]: which keys each of the n tokens sees: itself, those before it,
        and of them only the last `window`, itself counted."""
        query = self.positions[:, None, :, None]
        key = torch.arange(self._used, device=self.device)
        seen = key <= query
        return seen if window is None else seen & (query - key < window)

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self._capacity, like.shape[3])


def attention_masks(config: Any, cache: KeyValueCache, dtype: torch.dtype) -> Any:
    """The masks of a model's forward over the cache: one, or one for each type of its layers.

    Args:
        config: of a causal language model of transformers.
        dtype: of the model; what its eager attention adds to the scores.

    Raises InputError for a layer that is neither full nor sliding.
    """
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if not types:  # of one kind, and sliding where there is a window
        types = {"full_attention" if window is None else "sliding_attention"}
    masks = {}
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise InputError(
                f"the target has layers of type {name}, which `evaluate` cannot decode with; "
                "take one with full or sliding attention"
            )
        seen = cache.visible(window if name == "sliding_attention" else None)
        if getattr(config, "_attn_implementation", "sdpa") == "eager":
            lowest = torch.finfo(dtype).min
            masks[name] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, lowest)
        else:
            masks[name] = seen
    return masks if len(masks) > 1 else masks.popitem()[1]
