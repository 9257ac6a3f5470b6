"""The drafting rule: from a block's hidden states to the tokens that are offered to the target.

One rule for decoding and for teacher-forced acceptance. DFlash drafts all slots at once, each by
its own logits (section 4.1). Variants walk over the slots, so that a draft may depend on the one
before it, the first on the anchor's token: DFlash 2 chooses among each slot's top candidates,
DSpark adds a bias to its logits (`heads`).

Legend: M blocks, S slots a block (block_size, or fewer where a block is clipped), H hidden size,
V vocabulary, D drafts a block, C choices of a slot (V, or the candidates of DFlash 2).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dflashdist.model.drafter import Drafter
from dflashdist.model.layers import widen
from dflashdist.model.shape import DrafterShape

# (choices' tokens int64 [M, C] or None for the vocabulary itself, scores [M, C]) -> [M]
Choose = Callable[[Tensor | None, Tensor], Tensor]


def num_drafts(shape: DrafterShape) -> int:
    """Drafts of a whole block: block_size - 1; of DSpark, whose anchor slot drafts, block_size."""
    return shape.block_size - 1 + shape.ahead


@torch.no_grad()
def greedy_drafts(
    drafter: Drafter, states: Tensor, anchor_ids: Tensor, head: Tensor, chunk_size: int = 1024
) -> Tensor:
    """The most likely drafts, each after the one drafted before it: int64 [M, D].

    Args:
        states: [M, S, H] of the drafter, after its final norm; slot 0 is the anchor's, and at
            least one slot drafts.
        anchor_ids: int64 [M], the tokens that the blocks start from.
        head: [V, H] of the target; the product runs in its dtype.
        chunk_size: slots whose logits exist at once.
    """
    blocks = max(1, chunk_size // states.shape[1])
    parts = zip(states.split(blocks), anchor_ids.split(blocks), strict=True)
    return torch.cat([_walk(drafter, *part, head, lambda _, s: s.argmax(-1)) for part in parts])


@torch.no_grad()
def sampled_drafts(
    drafter: Drafter,
    states: Tensor,
    anchor_ids: Tensor,
    head: Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Drafts drawn at a temperature above 0, and the distribution that each was drawn from.

    Args: as `greedy_drafts`; `generator` is of the states' device.

    Returns:
        int64 [M, D] and float32 (or wider) [M, D, V]: what rejection sampling needs to stay
        lossless.
    """
    drawn_from: list[Tensor] = []

    def draw(tokens: Tensor | None, scores: Tensor) -> Tensor:
        probs = (scores / temperature).softmax(-1)
        whole = probs
        if tokens is not None:
            whole = probs.new_zeros(len(probs), len(head)).scatter_(1, tokens, probs)
        drawn_from.append(whole)
        return torch.multinomial(probs, 1, generator=generator).squeeze(1)

    drafts = _walk(drafter, states, anchor_ids, head, draw)
    return drafts, torch.stack(drawn_from, 1)


def _walk(
    drafter: Drafter, states: Tensor, anchor_ids: Tensor, head: Tensor, choose: Choose
) -> Tensor:
    """Drafts int64 [M, D], slot after slot, each chosen by `choose`."""
    states = states[:, 1 - drafter.shape.ahead :]
    logits = widen(F.linear(states.to(head.dtype), head))
    selector, markov = drafter.candidate_selector, drafter.markov_head
    previous, drafts = anchor_ids, []
    for slot in range(states.shape[1]):
        tokens, scores = None, logits[:, slot]
        if selector is not None:
            scores, tokens = scores.topk(drafter.shape.selector_top_k)
            scores = selector(states[:, slot], scores, tokens, previous)
        elif markov is not None:
            scores = scores + markov(previous)
        previous = choose(tokens, scores)
        if tokens is not None:
            previous = tokens.gather(1, previous[:, None]).squeeze(1)
        drafts.append(previous)
    return torch.stack(drafts, 1)
