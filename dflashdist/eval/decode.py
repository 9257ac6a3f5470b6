"""Greedy decoding at batch size 1: by the target alone, and by drafter and target together.

Both loops run the same target through the same cache code, so that their token rates compare. The
speculative loop is lossless: each token it emits is the target's own argmax. DFlash, section 3.1.
"""

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflashdist.model.drafter import Drafter


@dataclass
class Decoded:
    """One answer and how it came about. The first token is the prefill's and belongs to no pass."""

    tokens: list[int]  # the end-of-turn token included, when it was reached
    emitted: list[int] = field(default_factory=list)  # tokens of each later pass: sum = len - 1
    offered: list[int] = field(default_factory=list)  # drafts before the answer's end, of each pass
    accepted: list[int] = field(default_factory=list)  # leading drafts that the target agreed with
    seconds: float = 0.0  # after the prefill


class CachedTarget:
    """The whole target with its key-value cache, for one sequence, and taps on some layers."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int] = ()) -> None:
        """`model` is a causal LM of transformers; id l taps the output of decoder layer l."""
        self.model: Any = model
        self.device: torch.device = next(model.parameters()).device
        self._cache_keyword = cache_keyword(model)
        self._layer_ids = tuple(layer_ids)
        self._tapped: dict[int, Tensor] = {}
        layers = self.model.get_decoder().layers
        self._hooks = [layers[i].register_forward_hook(self._tap(i)) for i in self._layer_ids]
        self.start()

    def start(self) -> None:
        """Forget the sequence."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self.model.config)

    def forward(self, ids: Sequence[int] | Tensor, last_only: bool = False) -> Tensor:
        """Logits [n, V] of the next n tokens, or [1, V] of the last, appended to the cache."""
        ids = torch.as_tensor(ids, device=self.device)[None]
        keywords = {self._cache_keyword: self._cache}
        keep = 1 if last_only else 0  # 0 = all; a prompt's logits would be the largest tensor here
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **keywords).logits[0]

    def hidden(self) -> Tensor:
        """[1, n, K*H]: outputs of the tapped layers for the last forward's tokens."""
        return torch.cat([self._tapped[i] for i in self._layer_ids], -1)

    def rollback(self, num_tokens: int) -> None:
        """Drop the last tokens from the cache."""
        if num_tokens:  # crop(0) may also shrink what sliding layers hold
            self._cache.crop(-num_tokens)

    def close(self) -> None:
        """Remove the taps."""
        for hook in self._hooks:
            hook.remove()

    def _tap(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


def cache_keyword(model: Any) -> str:
    """The name of forward's cache argument: `cache` from transformers 5.24 on, else the older."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def plain_greedy(
    target: CachedTarget, prompt: Sequence[int], max_new_tokens: int, end_ids: Collection[int]
) -> Decoded:
    """The target's own greedy answer, a token a pass, up to an end id or `max_new_tokens`."""
    target.start()
    decoded = Decoded([int(target.forward(prompt, last_only=True).argmax())])
    began = time.perf_counter()
    while decoded.tokens[-1] not in end_ids and len(decoded.tokens) < max_new_tokens:
        decoded.tokens.append(int(target.forward(decoded.tokens[-1:]).argmax()))
        decoded.emitted.append(1)
    decoded.seconds = time.perf_counter() - began
    return decoded


@torch.inference_mode()
def speculative_greedy(
    target: CachedTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: Collection[int],
) -> Decoded:
    """The same answer with a block of drafts a pass.

    The target must be tapped at the drafter's layers, and both be of one dtype. The last block is
    clipped to what `max_new_tokens` leaves, and an end id stops inside a block.
    """
    embed, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    block_size, masks = drafter.shape.block_size, [drafter.shape.mask_token_id]
    target.start()
    decoded = Decoded([int(target.forward(prompt, last_only=True).argmax())])
    context = drafter.context_kv(target.hidden(), 0)
    start = len(prompt)  # position of the anchor, the newest token, which no layer has seen yet
    began = time.perf_counter()
    while decoded.tokens[-1] not in end_ids and len(decoded.tokens) < max_new_tokens:
        block = torch.tensor([decoded.tokens[-1:] + masks * (block_size - 1)], device=target.device)
        width = min(block_size, max_new_tokens - len(decoded.tokens))  # a pass emits at most that
        states = drafter.decode_block(embed(block), start, context)
        block[0, 1:width] = head(states[0, 1:width]).argmax(-1)
        own = target.forward(block[0, :width]).argmax(-1)  # [width], the target's next tokens
        agreed = int((block[0, 1:width] == own[:-1]).long().cumprod(0).sum())
        tokens = own[: agreed + 1].tolist()  # accepted drafts, and the bonus token after them
        stop = next((i for i, token in enumerate(tokens, 1) if token in end_ids), len(tokens))
        decoded.tokens += tokens[:stop]
        decoded.emitted.append(stop)
        decoded.accepted.append(min(agreed, stop))
        decoded.offered.append(min(width - 1, stop) if tokens[stop - 1] in end_ids else width - 1)
        target.rollback(width - agreed - 1)
        new = drafter.context_kv(target.hidden()[:, : agreed + 1], start)
        context = [
            (torch.cat([k, k_new], 2), torch.cat([v, v_new], 2))
            for (k, v), (k_new, v_new) in zip(context, new, strict=True)
        ]
        start += agreed + 1
    decoded.seconds = time.perf_counter() - began
    return decoded


def is_looping(tokens: Sequence[int], max_period: int = 32) -> bool:
    """Whether a piece of up to 32 tokens is said 3 times over (its last token may be missing).

    A stretch of fewer than 12 tokens does not count: `a, a, a` is an answer.
    """
    values = np.asarray(tokens)
    for period in range(1, min(max_period, len(values) // 3) + 1):
        same = np.concatenate([[0], values[period:] == values[:-period], [0]])
        breaks = np.flatnonzero(same == 0)
        longest = int(np.diff(breaks).max()) - 1  # tokens that equal the one a period before
        if longest >= max(2 * period - 1, 12 - period):
            return True
    return False
