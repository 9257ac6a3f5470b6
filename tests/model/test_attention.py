"""Grouped attention, and the tiles of the sparse mask, against the dense mask."""

import pytest
import torch
from rounding import EXACT

from dflashdist.model import attention
from dflashdist.model.attention import (
    BlockLayout,
    block_attention,
    dense_block_attention,
    flex_mask,
)
from dflashdist.model.blocks import dense_mask
from dflashdist.model.shape import WHOLE, Sight

pytestmark = pytest.mark.usefixtures("float64")


def draw(
    num_blocks: int,
    block_size: int,
    context: int,
    *,
    head_dim: int = 16,
    seed: int = 0,
    device: str = "cpu",
):
    """Queries (4 heads), keys and values (2 heads) of two rows; the second has dropped blocks."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, context - 1, (2, num_blocks), generator=generator).sort(1).values
    keep = torch.ones(2, num_blocks, dtype=torch.bool)
    kept = max(1, num_blocks // 3)
    keep[1, kept:] = False
    anchors[1, kept:] = anchors[1, kept - 1]
    sizes = [(4, num_blocks * block_size), (2, context), (2, context)]
    sizes += [(2, num_blocks * block_size)] * 2
    tensors = [
        torch.randn(2, heads, length, head_dim, generator=generator).to(device)
        for heads, length in sizes
    ]
    return [t.requires_grad_() for t in tensors], anchors.to(device), keep.to(device)


def attention_errors(
    num_blocks, block_size, context, *, device="cpu", sight=WHOLE
) -> tuple[float, float]:
    """Largest difference from the dense reference, of the output and of any gradient."""
    tensors, anchors, keep = draw(num_blocks, block_size, context, device=device)
    layout = BlockLayout.build(anchors, keep, context, block_size, sight)
    kept = keep.repeat_interleave(block_size, 1)[:, None, :, None]
    up = torch.randn(
        2, 4, num_blocks * block_size, 16, generator=torch.Generator().manual_seed(1)
    ).to(device)
    results = []
    for out in (
        block_attention(*tensors, layout),
        dense_block_attention(*tensors, anchors, keep, sight),
    ):
        grads = torch.autograd.grad((out * up * kept).sum(), tensors)
        results.append((out * kept, grads))
    (ours, our_grads), (dense, dense_grads) = results
    worst = max((a - b).abs().max().item() for a, b in zip(our_grads, dense_grads, strict=True))
    return (ours - dense).abs().max().item(), worst


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "context"), [(1, 16, 40), (50, 8, 200), (37, 16, 300), (3, 4, 2)]
)
def test_groups_equal_the_dense_mask(num_blocks, block_size, context):
    output, gradient = attention_errors(num_blocks, block_size, context)
    assert max(output, gradient) < EXACT


def test_groups_leave_out_most_of_the_square():
    anchors = torch.arange(0, 1024, 8)[None]
    layout = BlockLayout.build(anchors, torch.ones_like(anchors).bool(), 1024, 16)
    computed = sum(group.mask[0].numel() for group in layout.groups)
    assert len(layout.groups) > 4
    assert computed < 0.35 * (128 * 16) * (1024 + 128 * 16)


def test_dropped_blocks_are_finite_and_without_gradient():
    tensors, anchors, keep = draw(9, 4, 30)
    keep[:] = False
    keep[0, :2] = True
    out = block_attention(*tensors, BlockLayout.build(anchors, keep, 30, 4))
    assert out.isfinite().all()
    (out[0, :, : 2 * 4] ** 2).sum().backward()
    q, k_ctx, _, k_blk, v_blk = (t.grad for t in tensors)
    assert q is not None and k_ctx is not None and k_blk is not None and v_blk is not None
    assert all(t.grad is not None and t.grad.isfinite().all() for t in tensors)
    assert not q[1].any() and not k_ctx[1].any() and not v_blk[0, :, 8:].any()
    assert q[0, :, :8].any() and v_blk[0, :, :8].any()


def tile_mask(num_blocks: int, block_size: int, context: int, sight: Sight = WHOLE):
    """(allowed by tiles and rule, allowed by the dense mask, tiles computed / all tiles)."""
    _, anchors, keep = draw(num_blocks, block_size, context, seed=4)
    block_mask = flex_mask(anchors, keep, context, block_size, sight)
    num_slots, num_keys = num_blocks * block_size, context + num_blocks * block_size
    q, key = torch.arange(num_slots)[:, None], torch.arange(num_keys)[None]
    rule = torch.stack([block_mask.mask_mod(torch.tensor(b), 0, q, key) for b in range(2)])

    def spread(counts, indices):
        """Tile lists -> bool [B, Q, K]."""
        tiles = torch.zeros(2, indices.shape[2], indices.shape[3] + 1, dtype=torch.bool)
        for b in range(2):
            for row in range(indices.shape[2]):
                tiles[b, row, indices[b, 0, row, : int(counts[b, 0, row])].long()] = True
        tiles = tiles[..., :-1]
        whole = tiles.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return whole[:, :num_slots, :num_keys], tiles

    partial, partial_tiles = spread(block_mask.kv_num_blocks, block_mask.kv_indices)
    full, full_tiles = spread(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert not (partial_tiles & full_tiles).any()
    share = (partial_tiles | full_tiles).float().mean().item()
    dense = dense_mask(anchors, keep, context, block_size, sight)[:, 0]
    return full | (partial & rule), dense, share


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "context"),
    [(40, 16, 512), (33, 8, 300), (5, 4, 60), (60, 10, 700)],
)
def test_sparse_tiles_allow_what_the_dense_mask_allows(num_blocks, block_size, context):
    """FlexAttention's backward needs CUDA; its mask is checked here without running it."""
    allowed, dense, _ = tile_mask(num_blocks, block_size, context)
    assert torch.equal(allowed, dense)


def test_sparse_tiles_are_sparse():
    assert tile_mask(128, 16, 1024)[2] < 0.3


def test_group_size_does_not_change_the_result(monkeypatch):
    tensors, anchors, keep = draw(40, 8, 100)
    results = []
    for slots in (8, 64, 1000):
        monkeypatch.setattr(attention, "_GROUP_SLOTS", slots)
        results.append(block_attention(*tensors, BlockLayout.build(anchors, keep, 100, 8)))
    for other in results[1:]:
        assert (results[0] - other).abs().max() < EXACT
