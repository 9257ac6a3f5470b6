"""Blocks: where they are anchored, what goes into them, what each may see, what each is taught.

A block of `block_size` slots starts at an anchor position a: slot 0 holds the real token of a, the
others the mask token, and slot k (k >= 1) predicts the token of position a + k. DFlash, section
4.2. Shapes: B rows, S padded positions, N anchors a row, Q = N * block_size slots.
"""

import numpy as np
import torch
from torch import Tensor

from dflashdist.model.shape import WHOLE, Sight

# Counter words that keep these streams apart from any other drawn under the same key.
_ANCHOR_STREAM = 0xA
_PREFIX_STREAM = 0xB


def draw_anchors(
    loss_mask: Tensor, row_ids: tuple[int, ...], *, seed: int, epoch: int, num_anchors: int
) -> tuple[Tensor, Tensor]:
    """Anchors of a micro-batch, a pure function of (seed, epoch, row) and the row's loss mask.

    Candidates are the positions a with a and a + 1 supervised. Each gets one raw 64-bit word of a
    Philox generator keyed by (seed, epoch), at a counter given by the row; the first
    min(num_anchors, candidates) by (word, position) are taken, ascending. Raw words, because the
    streams of numpy's higher methods change between its versions.

    Args:
        loss_mask: bool [B, S] on the CPU, true where a token is supervised.
        row_ids: the rows' numbers in the token store.

    Returns:
        anchors int64 [B, N], ascending, and keep bool [B, N], with N the largest count of the
        batch, at least 1. Where keep is false the row's last anchor (or 0) fills the place.
    """
    masks = loss_mask.cpu().numpy().astype(bool)
    drawn = []
    for mask, row in zip(masks, row_ids, strict=True):
        candidates = np.flatnonzero(mask[:-1] & mask[1:])
        words = _words(len(candidates), seed, epoch, row, _ANCHOR_STREAM)
        drawn.append(np.sort(candidates[np.argsort(words, kind="stable")[:num_anchors]]))
    width = max(1, *(len(one) for one in drawn))
    anchors = np.zeros((len(drawn), width), dtype=np.int64)
    keep = np.zeros((len(drawn), width), dtype=bool)
    for b, one in enumerate(drawn):
        anchors[b, : len(one)] = one
        anchors[b, len(one) :] = one[-1] if len(one) else 0
        keep[b, : len(one)] = True
    return torch.from_numpy(anchors), torch.from_numpy(keep)


def draw_prefixes(
    loss_mask: Tensor,
    anchors: Tensor,
    row_ids: tuple[int, ...],
    *,
    seed: int,
    epoch: int,
    block_size: int,
    base: float,
) -> Tensor:
    """How many slots of each block hold real tokens, int64 [B, N] on the CPU; D2SD, 2606.04446.

    l from 2 to block_size - 1 with probability ~ base^l, among those for which tokens a to a + l
    are all supervised: the block is shown tokens of one answer, and slot l is taught. Where there
    is no such l, l = 1: a block as DFlash's. A pure function of (seed, epoch, row, anchor): it
    comes from the word at the anchor's place in a stream of the row.

    Args: as `draw_anchors`, and the anchors that it returned.
    """
    masks = np.pad(loss_mask.cpu().numpy().astype(bool), ((0, 0), (0, block_size)))
    places = anchors.cpu().numpy()[..., None] + np.arange(block_size)
    share = np.cumsum(base ** np.arange(block_size, dtype=np.float64))  # of l = 2, 3, ...
    prefixes = np.ones(anchors.shape, dtype=np.int64)
    for b, row in enumerate(row_ids):
        longest = np.logical_and.accumulate(masks[b, places[b]], axis=1).sum(1) - 1
        words = _words(loss_mask.shape[1], seed, epoch, row, _PREFIX_STREAM)[places[b, :, 0]]
        uniform = (words >> np.uint64(11)) * 2.0**-53  # from 0 to below 1
        whole = share[np.maximum(longest, 2) - 2]
        drawn = 2 + np.searchsorted(share, uniform * whole, side="right")
        # The product may round up to the whole, one too far.
        prefixes[b] = np.where(longest >= 2, np.minimum(drawn, longest), 1)
    return torch.from_numpy(prefixes)


def block_ids(
    ids: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    prefix: Tensor | None = None,
) -> Tensor:
    """Input tokens of all blocks, int64 [B, Q]: the anchor's token, then mask tokens.

    With `prefix` (int64 [B, N], at least 1) so many slots hold the row's tokens. A dropped block
    (keep false) holds mask tokens alone.
    """
    blocks = ids.new_full((*anchors.shape, block_size), mask_token_id)
    if prefix is None:
        blocks[..., 0] = torch.where(keep, ids.gather(1, anchors), mask_token_id)
        return blocks.flatten(1)
    places = block_positions(anchors, block_size).clamp(max=ids.shape[1] - 1)
    real = ids.gather(1, places).view_as(blocks)
    shown = torch.arange(block_size, device=ids.device) < prefix[..., None]
    return torch.where(shown & keep[..., None], real, blocks).flatten(1)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of all slots, int64 [B, Q]: a, a + 1, ..., contiguous with the context."""
    steps = torch.arange(block_size, device=anchors.device)
    return (anchors[..., None] + steps).flatten(1)


def block_labels(
    ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    contiguous_only: bool,
    ahead: int = 0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What slot k of each block must say, and whether it is taught.

    Label y[k] = ids[a + k + ahead]: `ahead` is 0, or 1 where slot 0 predicts too (DSpark). A slot
    is supervised where the block is kept and its label lies after the anchor, in the row and in the
    loss mask. With `contiguous_only` a slot after the block's first unsupervised one is not:
    decoding never drafts past the end of a turn to any use. With `prefix` (int64 [B, N]) neither is
    one whose label the block was shown, at a position below a + prefix.

    Returns:
        labels int64 [B, N, block_size] (0 where unsupervised) and supervised bool, same shape.
    """
    num_positions = ids.shape[1]
    positions = block_positions(anchors, block_size) + ahead
    inside = positions < num_positions
    positions = positions.clamp(max=num_positions - 1)
    shape = (*anchors.shape, block_size)
    supervised = (loss_mask.gather(1, positions) & inside).view(shape) & keep[..., None]
    first = 1 - ahead
    supervised[..., :first] = False
    if contiguous_only:
        supervised[..., first:] = supervised[..., first:].cumprod(-1).bool()
    if prefix is not None:
        offset = torch.arange(block_size, device=ids.device) + ahead
        supervised &= offset >= prefix[..., None]
    labels = ids.gather(1, positions).view(shape)
    return labels.masked_fill(~supervised, 0), supervised


def slot_weights(block_size: int, *, weights: str, gamma: float | None) -> Tensor:
    """Weight of the loss by how far a label lies from the anchor, float64 [block_size], 0 at 0.

    `decay`: exp(-(k-1)/gamma); `gamma` null is `default_gamma`. `uniform` and `dpace` (whose own
    come from the losses): 1.
    """
    if gamma is None:
        gamma = default_gamma(block_size)
    slots = torch.arange(block_size, dtype=torch.float64)
    table = torch.exp(-(slots - 1) / gamma) if weights == "decay" else torch.ones_like(slots)
    table[0] = 0.0
    return table


def default_gamma(block_size: int) -> float:
    """7 for blocks of 16, 5 for 10, 4 for 8 (DFlash, A.1), else 0.45 x block_size."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, 0.45 * block_size)


def visible(
    slot: Tensor,
    anchor: Tensor,
    keep: Tensor,
    key: Tensor,
    context: int | Tensor,
    block_size: int,
    sight: Sight = WHOLE,
) -> Tensor:
    """The one rule of attention: may `slot` see `key`? Elementwise, broadcasting.

    Slots are numbered through all blocks, keys are [context; blocks]; `anchor` and `keep` are those
    of the slot's block. A slot sees the context strictly before its anchor (when a block starts to
    decode, the target has not yet read the anchor) and all slots of its own block, as far as its
    layer's `sight` reaches. A dropped block sees its own slots only: never nothing, which would
    make softmax NaN.
    """
    in_context = key < context
    other = key - context
    own = other // block_size == slot // block_size
    seen = (in_context & (key < anchor) & keep) | (~in_context & own)
    if sight.causal or sight.window is not None:
        position = torch.where(in_context, key, anchor + other % block_size)
        distance = anchor + slot % block_size - position
        if sight.causal:
            seen = seen & (distance >= 0)
        if sight.window is not None:
            seen = seen & (distance.abs() < sight.window)
    return seen


def dense_mask(
    anchors: Tensor, keep: Tensor, context: int, block_size: int, sight: Sight = WHOLE
) -> Tensor:
    """`visible` for all pairs: bool [B, 1, Q, context + Q], true where attention is allowed."""
    num_slots = anchors.shape[1] * block_size
    slot = torch.arange(num_slots, device=anchors.device)
    key = torch.arange(context + num_slots, device=anchors.device)
    block = slot // block_size
    seen = visible(
        slot[None, :, None],
        anchors[:, block, None],
        keep[:, block, None],
        key[None, None, :],
        context,
        block_size,
        sight,
    )
    return seen[:, None]


def pack(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Real tokens of [B, S, F], row after row: [sum(lengths), F]. Lengths int64 [B] on the CPU."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    return flat.index_select(0, _real_tokens(lengths, hidden.shape[1]).to(hidden.device))


def unpack(packed: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The inverse of `pack`: [B, width, F], zero at the padding. Lengths int64 [B] on the CPU."""
    rows = packed.new_zeros(len(lengths) * width, packed.shape[-1])
    rows.index_copy_(0, _real_tokens(lengths, width).to(packed.device), packed)
    return rows.view(len(lengths), width, -1)


def _words(count: int, seed: int, epoch: int, row: int, stream: int) -> np.ndarray:
    """`count` raw 64-bit words of the row's own Philox stream."""
    return np.random.Philox(
        key=np.array([seed, epoch], dtype=np.uint64),
        counter=np.array([0, 0, row, stream], dtype=np.uint64),
    ).random_raw(count)


def _real_tokens(lengths: Tensor, width: int) -> Tensor:
    """Flat indices of the real tokens; made on the CPU so that no device has to be waited for."""
    starts = range(0, len(lengths) * width, width)
    counts = lengths.tolist()
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
