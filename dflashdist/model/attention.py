"""Attention of blocks over their context, without ever computing the whole square.

Q slots see [context; own block] (`blocks.visible`). Of the square Q x (S + Q) that is a small
part, and with anchors sorted it is a regular one:

- CPU: the blocks are taken in groups of neighbours, each with the context up to the group's last
  anchor and the group's own slots, through SDPA under a dense mask of that size. A sliding layer
  leaves out the context before the window of the group's first anchor.
- CUDA: FlexAttention with a sparse BlockMask over tiles of 128 x 128, computed from the anchors
  by interval arithmetic (no dense mask is ever made, no host synchronisation).
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dflashdist.model.blocks import dense_mask, visible
from dflashdist.model.shape import WHOLE, Sight

# Slots in a group on CPU. Smaller groups compute less of the square and start more kernels; 96 to
# 256 measured alike at 2,048 slots over 1,024 positions, 128 a third faster than 256 at 256 slots.
_GROUP_SLOTS = 128
_TILE = 128  # FlexAttention's own tile


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks [first, last) that attend in one SDPA call."""

    num_slots: int
    context: slice  # the context positions that any of them sees
    mask: Tensor  # bool [B, 1, num_slots, positions + num_slots]


@dataclass(frozen=True)
class BlockLayout:
    """What attention needs to know of a micro-batch's blocks; used by all layers of one sight."""

    groups: tuple[Group, ...] = ()  # CPU
    block_mask: object | None = None  # CUDA: a torch BlockMask

    @classmethod
    def build(
        cls, anchors: Tensor, keep: Tensor, context: int, block_size: int, sight: Sight = WHOLE
    ) -> "BlockLayout":
        """For anchors int64 [B, N] ascending, keep bool [B, N], over a context of S positions.

        Right padding of the context needs no mention: anchors lie before it.
        """
        if anchors.is_cuda:
            return cls(block_mask=flex_mask(anchors, keep, context, block_size, sight))
        return cls(groups=tuple(_groups(anchors, keep, block_size, sight)))


def block_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, layout: BlockLayout
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over [context; blocks] as `layout` allows: [B, heads, Q, D].

    Args:
        q: [B, heads, Q, D].
        k_ctx, v_ctx: [B, kv_heads, S, D].
        k_blk, v_blk: [B, kv_heads, Q, D]. One dtype for all.
    """
    if layout.block_mask is not None:
        return flex_block_attention(q, k_ctx, v_ctx, k_blk, v_blk, layout.block_mask)
    sizes = [group.num_slots for group in layout.groups]
    parts = zip(q.split(sizes, 2), k_blk.split(sizes, 2), v_blk.split(sizes, 2), strict=True)
    out = []
    for group, (q_part, k_part, v_part) in zip(layout.groups, parts, strict=True):
        k = torch.cat([k_ctx[:, :, group.context], k_part], 2)
        v = torch.cat([v_ctx[:, :, group.context], v_part], 2)
        out.append(masked_attention(q_part, k, v, group.mask))
    return torch.cat(out, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """SDPA with fewer key-value heads than query heads. mask: bool [B or 1, 1, Q, K], or None."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )


def dense_block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    anchors: Tensor,
    keep: Tensor,
    sight: Sight = WHOLE,
) -> Tensor:
    """The reference: one call under the whole square's mask. Same result as `block_attention`."""
    mask = dense_mask(anchors, keep, k_ctx.shape[2], q.shape[2] // anchors.shape[1], sight)
    return masked_attention(q, torch.cat([k_ctx, k_blk], 2), torch.cat([v_ctx, v_blk], 2), mask)


def decode_view(
    start: int | Tensor, length: int, num_slots: int, sight: Sight, device: torch.device
) -> tuple[slice, Tensor | None]:
    """What one block a row may see of a cached context, by the rule of training.

    Args:
        start: the blocks' anchor, one for all rows or int64 [B].
        length: cached positions, at least the largest start.

    Returns:
        the context positions to take, and the mask over them and the block's own slots, bool
        [B or 1, 1, num_slots, positions + num_slots]; None where it hides nothing.
    """
    if isinstance(start, int):
        if sight == WHOLE:
            return slice(0, start), None
        start, length = torch.full((1,), start, device=device), start
    first = 0
    if sight.window is not None:
        first = max(0, int(start.min()) - sight.window + 1)
    keep = torch.ones_like(start, dtype=torch.bool)[:, None]
    mask = dense_mask(start[:, None] - first, keep, length - first, num_slots, sight)
    return slice(first, length), mask


def _groups(anchors: Tensor, keep: Tensor, block_size: int, sight: Sight) -> list[Group]:
    blocks = max(1, _GROUP_SLOTS // block_size)
    groups = []
    for anchor, kept in zip(anchors.split(blocks, 1), keep.split(blocks, 1), strict=True):
        first, end = 0, int(torch.where(kept, anchor, 0).max())
        if sight.window is not None:
            first = max(0, int(torch.where(kept, anchor, end).min()) - sight.window + 1)
        # Only distances matter to the rule, so positions may count from the first one taken.
        mask = dense_mask(anchor - first, kept, end - first, block_size, sight)
        groups.append(Group(anchor.shape[1] * block_size, slice(first, end), mask))
    return groups


def flex_mask(anchors: Tensor, keep: Tensor, context: int, block_size: int, sight: Sight = WHOLE):
    """The BlockMask of FlexAttention for `blocks.visible`, on the anchors' device.

    A tile of 128 slots x 128 keys is left out where no slot sees any key, taken whole where all
    slots see all keys, and checked element by element with the rule otherwise. Which is which
    follows from the first and last context position that each of the tile's slots sees.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = anchors.device
    num_slots = anchors.shape[1] * block_size
    num_keys = context + num_slots
    first = torch.arange(0, num_slots, _TILE, device=device)
    last = (first + _TILE - 1).clamp(max=num_slots - 1)
    # Block of each tile row, tiles x 128, the last tile's tail repeating its last block.
    inside = (first[:, None] + torch.arange(_TILE, device=device)).clamp(max=num_slots - 1)
    reach = torch.where(keep, anchors, 0)[:, inside // block_size]  # context seen, [B, tiles, 128]
    key_first = torch.arange(0, num_keys, _TILE, device=device)
    key_end = key_first + _TILE
    own_first = context + first // block_size * block_size
    own_end = context + (last // block_size + 1) * block_size
    own = (key_first < own_end[:, None]) & (key_end > own_first[:, None])
    some = key_first < reach.amax(-1, keepdim=True)
    full = key_end <= reach.amin(-1, keepdim=True)
    if sight.window is not None:
        begin = reach + inside % block_size - sight.window + 1  # first context position seen
        some &= key_end > torch.where(reach > 0, begin, num_keys).amin(-1, keepdim=True)
        full &= key_first >= begin.amax(-1, keepdim=True)
    some |= own
    partial = some & ~full

    # A tensor, because an int in the closure would make one compilation per width.
    width = torch.full((), context, device=device)

    def mask_mod(b, h, q, key):
        block = q // block_size
        return visible(q, anchors[b, block], keep[b, block], key, width, block_size, sight)

    return BlockMask.from_kv_blocks(
        *_tile_lists(partial), *_tile_lists(full), _TILE, mask_mod, (num_slots, num_keys)
    )


def _tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, q tiles, key tiles] -> how many, and which first, int32 [B, 1, ...]."""
    count = tiles.sum(-1, dtype=torch.int32)[:, None]
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return count, order.to(torch.int32)[:, None].contiguous()


def flex_block_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, block_mask
) -> Tensor:
    """`block_attention` by FlexAttention. Compiled once a process; backward needs CUDA."""
    k, v = torch.cat([k_ctx, k_blk], 2), torch.cat([v_ctx, v_blk], 2)
    return _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled_flex():
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # A graph each for gradients or none, one row or several, one tile or several, each window.
    config.recompile_limit = max(64, config.recompile_limit)
    # fullgraph: an error, not a dense fallback, past the limit of recompilations.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
