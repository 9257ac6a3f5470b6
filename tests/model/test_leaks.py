"""Nothing a block must not know reaches it, to the bit; and padding reaches nobody."""

import pytest
import torch
from rounding import EXACT

from dflashdist.model import attention
from dflashdist.model.blocks import block_ids
from dflashdist.model.drafter import Drafter
from dflashdist.model.target_files import TargetTensors

pytestmark = pytest.mark.usefixtures("float64")

ANCHORS = torch.tensor([[2, 9, 10, 25, 36], [4, 5, 20, 20, 20]])
KEEP = torch.tensor([[True] * 5, [True, True, True, False, False]])
WIDTH = 40
BLOCK = 2  # the block under test, of row 0: anchor 10


@pytest.fixture(params=[8, 128], autouse=True)
def group_slots(request, monkeypatch):
    """Two blocks a group, and all blocks in one."""
    monkeypatch.setattr(attention, "_GROUP_SLOTS", request.param)


def inputs(drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor, TargetTensors]:
    """Random ids, hidden states and frozen tensors."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 90, (2, WIDTH), generator=generator)
    hidden = torch.randn(2, WIDTH, shape.num_features * shape.hidden_size, generator=generator)
    table = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return ids, hidden, TargetTensors(table, table, torch.ones(shape.hidden_size))


def logits(drafter: Drafter, ids, hidden, frozen: TargetTensors, anchors=ANCHORS, keep=KEEP):
    """[B, N, block_size, V], on the drafter's device and back."""
    shape = drafter.shape
    device = drafter.norm.weight.device
    ids, hidden = ids.to(device), hidden.to(device)
    anchors, keep = anchors.to(device), keep.to(device)
    with torch.no_grad():
        tokens = block_ids(
            ids, anchors, keep, block_size=shape.block_size, mask_token_id=shape.mask_token_id
        )
        out = drafter(hidden, frozen.embedding.to(device)[tokens], anchors, keep)
        out = out @ frozen.head.to(device).T
    return out.unflatten(1, (-1, shape.block_size)).cpu()


def changed_by(drafter: Drafter, what: str) -> bool:
    """Whether a change of `what` alters any bit of the logits of block BLOCK of row 0."""
    ids, hidden, frozen = inputs(drafter)
    before = logits(drafter, ids, hidden, frozen)[0, BLOCK]
    anchor = int(ANCHORS[0, BLOCK])
    size = drafter.shape.block_size
    if what == "context at the anchor and after":
        hidden[0, anchor:] = 100 * torch.randn_like(hidden[0, anchor:])
    elif what == "context just before the anchor":
        hidden[0, anchor - 1] += 1e-2
    elif what == "the other row":
        hidden[1] += 1.0
        ids[1] = 3
    elif what == "tokens of other blocks":
        for other in ANCHORS[0].tolist():
            if other != anchor:
                ids[0, other] = (ids[0, other] + 1) % 90
    elif what == "real tokens under the mask":
        ids[0, anchor + 1 : anchor + size] = 7
    elif what == "the anchor's token":
        ids[0, anchor] = (ids[0, anchor] + 1) % 90
    else:
        raise AssertionError(what)
    return not torch.equal(before, logits(drafter, ids, hidden, frozen)[0, BLOCK])


UNSEEN = (
    "context at the anchor and after",
    "the other row",
    "tokens of other blocks",
    "real tokens under the mask",
)
SEEN = ("context just before the anchor", "the anchor's token")


@pytest.mark.parametrize("what", UNSEEN)
def test_block_does_not_see(drafter, what):
    assert not changed_by(drafter, what)


@pytest.mark.parametrize("what", SEEN)
def test_block_sees(drafter, what):
    assert changed_by(drafter, what)


def padding_error(drafter: Drafter) -> float:
    """Largest change of any kept block's logits by 24 more padded positions of garbage."""
    ids, hidden, frozen = inputs(drafter)
    before = logits(drafter, ids, hidden, frozen)
    garbage = torch.full((2, 24, hidden.shape[-1]), 50.0)
    wide = logits(
        drafter,
        torch.cat([ids, torch.zeros(2, 24, dtype=ids.dtype)], 1),
        torch.cat([hidden, garbage], 1),
        frozen,
    )
    return (before - wide)[KEEP].abs().max().item() / before[KEEP].abs().max().item()


def batch_error(drafter: Drafter) -> float:
    """Largest difference between a row in a batch and the same row alone without dropped blocks."""
    ids, hidden, frozen = inputs(drafter)
    together = logits(drafter, ids, hidden, frozen)[1, :3]
    alone = logits(drafter, ids[1:], hidden[1:], frozen, ANCHORS[1:, :3], KEEP[1:, :3])[0]
    return (together - alone).abs().max().item() / together.abs().max().item()


def test_padding_changes_nothing(drafter):
    assert padding_error(drafter) < EXACT


def test_row_alone_equals_row_in_batch(drafter):
    assert batch_error(drafter) < EXACT
