"""Anchors, block contents, labels, weights and the rule of attention, against plain loops."""

import math

import numpy as np
import pytest
import torch

from dflashdist.model.blocks import (
    block_ids,
    block_labels,
    dense_mask,
    draw_anchors,
    pack,
    slot_weights,
    unpack,
)

# Row 0 has a gap at 6; row 1 one pair at 3, 4; row 2 a single supervised token, so no anchor.
LOSS_MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
    ]
).bool()


def test_anchors_are_supervised_pairs_drawn_without_repeat():
    anchors, keep = draw_anchors(LOSS_MASK, (0, 1, 2), seed=1, epoch=0, num_anchors=10)
    assert keep.sum(1).tolist() == [5, 1, 0]
    assert anchors[0].tolist() == [2, 3, 4, 7, 8]  # all candidates, ascending
    assert anchors[1].tolist() == [3] * 5
    assert anchors.dtype == torch.int64 and keep.dtype == torch.bool


def test_anchors_follow_the_words_of_philox():
    """The draw spelled out: a change of this stream would silently break resumed runs."""
    mask = torch.ones(1, 50, dtype=torch.bool)
    anchors, _ = draw_anchors(mask, (7,), seed=3, epoch=2, num_anchors=5)
    key = np.array([3, 2], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=np.array([0, 0, 7, 10], np.uint64)).random_raw(49)
    assert anchors[0].tolist() == sorted(sorted(range(49), key=lambda a: (words[a], a))[:5])
    assert anchors[0].tolist() == [6, 31, 35, 40, 41]


def test_anchors_depend_on_seed_epoch_and_row_but_not_on_company():
    mask = torch.ones(1, 200, dtype=torch.bool)

    def draw(seed=0, epoch=0, row=0):
        return draw_anchors(mask, (row,), seed=seed, epoch=epoch, num_anchors=20)[0][0].tolist()

    assert draw() == draw()
    assert len({tuple(draw(*key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}) == 4
    wide = torch.nn.functional.pad(mask.repeat(2, 1), (0, 30))
    together, _ = draw_anchors(wide, (9, 0), seed=0, epoch=0, num_anchors=20)
    assert together[1].tolist() == draw()


def test_anchors_are_uniform():
    mask = torch.ones(1, 11, dtype=torch.bool)
    counts = np.zeros(10)
    for row in range(2000):
        anchors, _ = draw_anchors(mask, (row,), seed=0, epoch=0, num_anchors=3)
        counts[anchors[0]] += 1
    # Binomial(2000, 0.3): standard deviation 20.5; five of them.
    assert abs(counts - 600).max() < 103


def test_block_ids_hold_the_anchor_and_masks():
    ids = torch.arange(10, 20)[None]
    anchors, keep = torch.tensor([[2, 8, 8]]), torch.tensor([[True, True, False]])
    tokens = block_ids(ids, anchors, keep, block_size=3, mask_token_id=99)
    assert tokens.tolist() == [[12, 99, 99, 18, 99, 99, 99, 99, 99]]


@pytest.mark.parametrize("contiguous_only", [False, True])
def test_labels_against_the_definition(contiguous_only):
    ids = torch.arange(30).view(3, 10)
    anchors, keep = draw_anchors(LOSS_MASK, (0, 1, 2), seed=0, epoch=0, num_anchors=9)
    labels, supervised = block_labels(
        ids, LOSS_MASK, anchors, keep, block_size=4, contiguous_only=contiguous_only
    )
    for b in range(3):
        for n in range(anchors.shape[1]):
            unbroken = True
            for k in range(4):
                at = int(anchors[b, n]) + k
                taught = bool(k > 0 and keep[b, n] and at < 10 and LOSS_MASK[b, at])
                if k > 0 and contiguous_only:
                    unbroken = unbroken and taught
                    taught = unbroken
                assert supervised[b, n, k].item() == taught
                assert labels[b, n, k].item() == (int(ids[b, at]) if taught else 0)
    assert supervised.any()


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (6, 2.7)])
def test_slot_weights(block_size, gamma):
    weights = slot_weights(block_size, weights="decay", gamma=None)
    expected = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)  # a rounding or two
    for kind in ("uniform", "dpace"):
        ones = slot_weights(block_size, weights=kind, gamma=None).tolist()
        assert ones == [0.0] + [1.0] * (block_size - 1)


def test_dense_mask_against_the_definition():
    anchors, keep = (
        torch.tensor([[0, 3, 5], [2, 4, 4]]),
        torch.tensor([[True] * 3, [True, True, False]]),
    )
    mask = dense_mask(anchors, keep, 6, 2)
    assert mask.shape == (2, 1, 6, 12)
    for b in range(2):
        for q in range(6):
            for key in range(12):
                n = q // 2
                if key < 6:
                    expected = bool(keep[b, n]) and key < int(anchors[b, n])  # strict
                else:
                    expected = (key - 6) // 2 == n
                assert mask[b, 0, q, key].item() == expected


def test_pack_and_unpack():
    hidden = torch.randn(3, 5, 2)
    lengths = torch.tensor([5, 1, 3])
    packed = pack(hidden, lengths)
    assert torch.equal(packed, torch.cat([hidden[0], hidden[1, :1], hidden[2, :3]]))
    back = unpack(packed, lengths, 7)
    assert back.shape == (3, 7, 2)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(back[b, :n], hidden[b, :n])
        assert not back[b, n:].any()
