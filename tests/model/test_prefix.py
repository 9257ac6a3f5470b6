"""The real tokens at the start of a block: how many, by which law, and what they change."""

import numpy as np
import pytest
import torch

from dflashdist.model.blocks import block_ids, block_labels, draw_anchors, draw_prefixes

SIZE = 6


def draw(mask, rows=(0,), seed=0, epoch=0, base=0.9, num_anchors=1000, size=SIZE):
    """anchors, keep, prefixes."""
    where = {"seed": seed, "epoch": epoch}
    anchors, keep = draw_anchors(mask, rows, num_anchors=num_anchors, **where)
    prefix = draw_prefixes(mask, anchors, rows, block_size=size, base=base, **where)
    return anchors, keep, prefix


@pytest.mark.parametrize("base", [0.5, 1.0])
def test_law_of_the_lengths(base):
    """4,000 blocks with room for all of l = 2 to 5; five standard deviations of a binomial."""
    mask = torch.ones(20, 220, dtype=torch.bool)
    anchors, _, prefix = draw(mask, tuple(range(20)), base=base)
    drawn = prefix[anchors + SIZE < 220]
    assert drawn.min() == 2 and drawn.max() == SIZE - 1
    share = base ** np.arange(2, SIZE)
    share /= share.sum()
    for length, expected in zip(range(2, SIZE), share, strict=True):
        found = (drawn == length).double().mean().item()
        assert abs(found - expected) < 5 * (expected * (1 - expected) / len(drawn)) ** 0.5


def test_what_the_row_has_is_the_limit():
    """Tokens a to a + l are supervised: l shown, and one to teach."""
    mask = torch.zeros(1, 30, dtype=torch.bool)
    mask[0, 2:9] = True
    mask[0, 10:13] = True
    lengths = {}
    for epoch in range(60):
        anchors, _, prefix = draw(mask, epoch=epoch)
        for anchor, length in zip(anchors[0].tolist(), prefix[0].tolist(), strict=True):
            lengths.setdefault(anchor, set()).add(length)
    assert lengths == {
        2: {2, 3, 4, 5}, 3: {2, 3, 4, 5}, 4: {2, 3, 4}, 5: {2, 3}, 6: {2}, 7: {1},
        10: {2}, 11: {1},
    }  # fmt: skip


def test_every_block_is_taught_something():
    mask = torch.rand(8, 60, generator=torch.Generator().manual_seed(0)) < 0.8
    anchors, keep, prefix = draw(mask, tuple(range(8)))
    _, supervised = block_labels(
        mask.long(), mask, anchors, keep, block_size=SIZE, contiguous_only=True, prefix=prefix
    )
    assert keep.sum() > 100
    assert torch.equal(supervised.any(-1), keep)
    offset = torch.arange(SIZE)
    assert not (supervised & (offset < prefix[..., None])).any()
    first = supervised.int().argmax(-1)
    assert torch.equal(first[keep], prefix[keep])


def test_lengths_follow_the_words_of_philox():
    """The draw spelled out: a change of this stream would silently break resumed runs."""
    mask = torch.ones(1, 60, dtype=torch.bool)
    anchors, _, prefix = draw(mask, (7,), seed=3, epoch=2, num_anchors=5)
    key, counter = np.array([3, 2], np.uint64), np.array([0, 0, 7, 11], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(60)
    for anchor, length in zip(anchors[0].tolist(), prefix[0].tolist(), strict=True):
        left = (int(words[anchor]) / 2**64) * sum(0.9**k for k in range(4))
        expected = 2
        while left >= 0.9 ** (expected - 2):
            left -= 0.9 ** (expected - 2)
            expected += 1
        assert length == expected
    assert prefix[0].tolist() == [2, 4, 2, 2, 2]


def test_lengths_depend_on_the_anchor_and_not_on_company():
    """Nor on how many anchors are drawn, nor on padding."""
    mask = torch.ones(1, 100, dtype=torch.bool)
    few_anchors, _, few = draw(mask, (5,), num_anchors=10)
    wide = torch.nn.functional.pad(mask.repeat(2, 1), (0, 30))
    many_anchors, _, many = draw(wide, (9, 5), num_anchors=1000)
    by_anchor = dict(zip(many_anchors[1].tolist(), many[1].tolist(), strict=True))
    assert [by_anchor[a] for a in few_anchors[0].tolist()] == few[0].tolist()
    others = [draw(mask, (5,), **key)[2][0].tolist() for key in ({"seed": 1}, {"epoch": 1})]
    others.append(draw(mask, (6,))[2][0].tolist())
    whole = draw(mask, (5,))[2][0].tolist()
    assert all(other != whole for other in others)


def test_blocks_of_two_have_no_room():
    _, _, prefix = draw(torch.ones(1, 20, dtype=torch.bool), size=2)
    assert set(prefix.flatten().tolist()) == {1}


def test_dropped_blocks_show_nothing():
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 2:15] = True
    anchors, keep, prefix = draw(mask, (0, 1), num_anchors=4)
    assert not keep[1].any()
    ids = torch.arange(40).view(2, 20)
    blocks = block_ids(ids, anchors, keep, block_size=SIZE, mask_token_id=99, prefix=prefix)
    blocks = blocks.unflatten(1, (-1, SIZE))
    assert (blocks[1] == 99).all()
    for n in range(anchors.shape[1]):
        anchor, shown = int(anchors[0, n]), int(prefix[0, n])
        expected = list(range(anchor, anchor + shown)) + [99] * (SIZE - shown)
        assert blocks[0, n].tolist() == expected


@pytest.mark.parametrize("contiguous_only", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
def test_labels_ahead_and_after_a_prefix(ahead, contiguous_only):
    """Against the definition, with a gap, and blocks past the row's end."""
    mask = torch.rand(4, 24, generator=torch.Generator().manual_seed(3)) < 0.8
    ids = torch.arange(96).view(4, 24)
    anchors, keep, prefix = draw(mask, tuple(range(4)), num_anchors=12)
    labels, supervised = block_labels(
        ids,
        mask,
        anchors,
        keep,
        block_size=SIZE,
        contiguous_only=contiguous_only,
        ahead=ahead,
        prefix=prefix,
    )
    for b in range(4):
        for n in range(anchors.shape[1]):
            unbroken = True
            for k in range(SIZE):
                at = int(anchors[b, n]) + k + ahead
                taught = bool(keep[b, n] and k + ahead > 0 and at < 24 and mask[b, at])
                if contiguous_only and k + ahead > 0:
                    unbroken = taught = unbroken and taught
                taught = taught and k + ahead >= int(prefix[b, n])
                assert supervised[b, n, k].item() == taught
                assert labels[b, n, k].item() == (int(ids[b, at]) if taught else 0)
    assert supervised.any()
