"""Sliding and causal layers: the rule, groups and tiles that keep it, and what they leave out."""

from dataclasses import replace

import pytest
import test_attention
import test_leaks
import torch
from rounding import EXACT
from variants import CHANGES, WINDOW, variant_drafter

from dflashdist.model.attention import BlockLayout, block_attention, dense_block_attention
from dflashdist.model.blocks import dense_mask
from dflashdist.model.shape import WHOLE, Sight

pytestmark = pytest.mark.usefixtures("float64")

SIGHTS = [Sight(20, True), Sight(20, False), Sight(None, True), Sight(300, True), Sight(16, False)]


@pytest.mark.parametrize("sight", SIGHTS)
def test_dense_mask_against_the_definition(sight):
    anchors, keep = torch.tensor([[0, 3, 30], [2, 25, 25]]), torch.ones(2, 3, dtype=torch.bool)
    keep[1, 2] = False
    mask = dense_mask(anchors, keep, 31, 16, sight)
    for b in range(2):
        for q in range(48):
            block, position = q // 16, int(anchors[b, q // 16]) + q % 16
            for key in range(31 + 48):
                if key < 31:
                    where, seen = key, bool(keep[b, block]) and key < int(anchors[b, block])
                else:
                    where = int(anchors[b, block]) + (key - 31) % 16
                    seen = (key - 31) // 16 == block
                if sight.causal:
                    seen = seen and where <= position
                if sight.window is not None:
                    seen = seen and abs(position - where) < sight.window
                assert mask[b, 0, q, key].item() == seen


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("num_blocks", "context"), [(50, 200), (37, 300), (1, 40)])
def test_groups_equal_the_dense_mask(sight, num_blocks, context):
    output, gradient = test_attention.attention_errors(num_blocks, 16, context, sight=sight)
    assert max(output, gradient) < EXACT


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("num_blocks", "context"), [(40, 512), (33, 300), (60, 700)])
def test_sparse_tiles_allow_what_the_dense_mask_allows(sight, num_blocks, context):
    allowed, dense, _ = test_attention.tile_mask(num_blocks, 16, context, sight)
    assert torch.equal(allowed, dense)


def test_far_context_is_left_out():
    """Of groups, and of tiles: 64 blocks along 1,024 positions, a window of 128."""
    anchors = torch.arange(0, 1024, 16)[None]
    layout = BlockLayout.build(anchors, torch.ones_like(anchors).bool(), 1024, 16, Sight(128, True))
    widest = max(group.context.stop - group.context.start for group in layout.groups)
    assert widest <= 128 + 128  # the window, and from the group's first anchor to its last
    few = test_attention.tile_mask(64, 16, 2048, Sight(128, True))[2]
    all_of_it = test_attention.tile_mask(64, 16, 2048)[2]
    assert few < 0.6 * all_of_it


def test_dropped_blocks_see_themselves():
    tensors, anchors, keep = test_attention.draw(9, 4, 30)
    keep[:] = False
    for sight in SIGHTS:
        out = block_attention(*tensors, BlockLayout.build(anchors, keep, 30, 4, sight))
        dense = dense_block_attention(*tensors, anchors, keep, sight)
        assert (out - dense).abs().max() < EXACT


# The whole drafter: test_leaks's block, row 0, anchor 10, logits to the bit.


def changed(drafter, position: int) -> torch.Tensor:
    """Which slots of the block change when the context at `position` does: bool [block_size]."""
    ids, hidden, frozen = test_leaks.inputs(drafter)
    before = test_leaks.logits(drafter, ids, hidden, frozen)[0, test_leaks.BLOCK]
    hidden[0, position] += 100.0
    after = test_leaks.logits(drafter, ids, hidden, frozen)[0, test_leaks.BLOCK]
    return (before != after).any(-1)


@pytest.mark.parametrize("name", ["sliding", "sliding both ways", "dflash2"])
def test_a_far_token_has_no_effect(shape, name):
    drafter = variant_drafter(shape, name)
    anchor = int(test_leaks.ANCHORS[0, test_leaks.BLOCK])
    for position in range(anchor - WINDOW + 1):
        assert not changed(drafter, position).any(), position
    # The nearest one out of sight of slot 1 is in sight of slot 0, and through it of the others.
    assert changed(drafter, anchor - WINDOW + 1).all()


def test_a_far_token_of_one_layer(shape):
    """With one layer, which slot sees which context position is the rule itself."""
    name = "sliding"
    drafter = variant_drafter(replace(shape, num_layers=2), name)
    drafter.layers = drafter.layers[:1]
    drafter._sights = drafter._sights[:1]
    anchor = int(test_leaks.ANCHORS[0, test_leaks.BLOCK])
    for position in range(anchor):
        seen = [anchor + slot - position < WINDOW for slot in range(shape.block_size)]
        assert changed(drafter, position).tolist() == seen, position


@pytest.mark.parametrize("name", ["dflash", "one sliding layer"])
def test_a_full_layer_sees_far(shape, name):
    assert changed(variant_drafter(shape, name), 0).all()


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_no_slot_of_a_causal_block_sees_a_later_one(shape, name):
    drafter = variant_drafter(shape, name)
    size = shape.block_size
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 20, shape.num_features * shape.hidden_size, generator=generator)
    embeds = torch.randn(1, 2 * size, shape.hidden_size, generator=generator)
    anchors, keep = torch.tensor([[7, 12]]), torch.ones(1, 2, dtype=torch.bool)
    with torch.no_grad():
        before = drafter(hidden, embeds, anchors, keep)
        embeds[0, size - 1] += 1.0
        after = drafter(hidden, embeds, anchors, keep)
    same = (before == after).all(-1)[0]
    assert not same[size - 1] and same[size:].all()
    causal = all(drafter.shape.sight(i).causal for i in range(shape.num_layers))
    assert same[: size - 1].all() if causal else not same[: size - 1].any()


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_nothing_leaks(shape, name):
    """What a block must not know reaches it in no variant: the convolution stops at its edge."""
    drafter = variant_drafter(shape, name)
    assert not [what for what in test_leaks.UNSEEN if test_leaks.changed_by(drafter, what)]
    assert all(test_leaks.changed_by(drafter, what) for what in test_leaks.SEEN)
    assert test_leaks.padding_error(drafter) < EXACT
    assert test_leaks.batch_error(drafter) < EXACT


def test_default_sight_is_the_papers(shape):
    assert {(shape.sight(i).window, shape.sight(i).causal) for i in range(2)} == {(None, False)}
    assert shape.sight(0) == WHOLE
