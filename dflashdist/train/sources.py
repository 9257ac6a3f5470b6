"""Where a drafter's hidden states come from: received from target ranks, or computed on the spot.

Both yield the same batch for the same seq, to the bit: the target runs the same padded micro-batch,
only real tokens are kept, and padding is filled with zeros.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dflashdist.cluster.trace import Trace
from dflashdist.cluster.transport import Receiver
from dflashdist.cluster.workqueue import WorkQueue
from dflashdist.data.collate import TokenBatch, collate
from dflashdist.data.shards import TokenStore
from dflashdist.model.blocks import draw_anchors, unpack
from dflashdist.model.loss import DrafterBatch
from dflashdist.schedule.plan import Plan


class Rows:
    """The micro-batches of the plan, read from the token store."""

    def __init__(self, store: TokenStore, plan: Plan, pad_id: int) -> None:
        self._store, self._plan, self._pad_id = store, plan, pad_id

    def tokens(self, seq: int) -> TokenBatch:
        """Micro-batch `seq`, padded."""
        micro_batch = self._plan.micro_batch(seq)
        return collate(
            self._store,
            seq=seq,
            epoch=micro_batch.epoch,
            rows=micro_batch.rows,
            width=micro_batch.width,
            pad_id=self._pad_id,
        )


class Batches:
    """Hidden states [tokens, K*H] of a seq to the batch that the drafter trains on."""

    def __init__(self, rows: Rows, *, seed: int, num_anchors: int, device: torch.device) -> None:
        self._rows, self._seed, self._num_anchors, self._device = rows, seed, num_anchors, device

    def batch(self, seq: int, states_of: Callable[[TokenBatch], Tensor]) -> DrafterBatch:
        """The batch of `seq`, with the hidden states [tokens, K*H] that `states_of` has for it."""
        tokens = self._rows.tokens(seq)
        packed = states_of(tokens)
        anchors, keep = draw_anchors(
            tokens.loss_mask,
            tokens.row_ids,
            seed=self._seed,
            epoch=tokens.epoch,
            num_anchors=self._num_anchors,
        )
        return DrafterBatch(
            ids=tokens.ids.to(self._device),
            loss_mask=tokens.loss_mask.to(self._device),
            hidden=unpack(packed, tokens.lengths, tokens.ids.shape[1]),
            anchors=anchors.to(self._device),
            keep=keep.to(self._device),
            lengths=tokens.lengths.to(self._device),
        )


class Source(Protocol):
    """What the drafter loop sees."""

    def hidden_states(self, seq: int) -> DrafterBatch:
        """The batch of `seq`; blocks until it is here."""
        ...


class ReceivedStates:
    """Layout `split`: hidden states come from target ranks, by seq."""

    def __init__(
        self, batches: Batches, receiver: Receiver, queue: WorkQueue, trace: Trace
    ) -> None:
        self._batches, self._receiver, self._queue, self._trace = batches, receiver, queue, trace

    def hidden_states(self, seq: int) -> DrafterBatch:
        batch = self._batches.batch(seq, lambda _tokens: self._receiver.get(seq))
        # Copied out of its message, whose memory is free from here. Not later: a drafter that waits
        # in the step's all-reduce must hold no credit, or the others may wait for it for ever.
        self._trace("consume")
        self._queue.consumed()
        return batch


class ComputedStates:
    """Layout `colocated`: this rank runs the target itself. `forward`: tokens -> [tokens, K*H]."""

    def __init__(self, batches: Batches, forward: Callable[[TokenBatch], Tensor]) -> None:
        self._batches, self._forward = batches, forward

    def hidden_states(self, seq: int) -> DrafterBatch:
        return self._batches.batch(seq, self._forward)
