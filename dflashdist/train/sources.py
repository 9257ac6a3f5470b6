"""Where a drafter's hidden states come from: received from target ranks, or computed on the spot.

Both yield the same batch for the same seq, to the bit: the target runs the same padded micro-batch,
only real tokens are kept, and padding is filled with zeros.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dflashdist.cluster.transport import MessageSpec, Receiver
from dflashdist.cluster.workqueue import Trace, WorkQueue
from dflashdist.config import states_dtype
from dflashdist.data.shards import TokenBatch, collate
from dflashdist.model.blocks import draw_anchors, draw_prefixes, unpack
from dflashdist.model.loss import DrafterBatch
from dflashdist.schedule.stream import EVALUATION
from dflashdist.train.job import TrainingJob


def states_dtype_on(job: TrainingJob, device: torch.device) -> torch.dtype:
    """The target's dtype on a device, and so that of the hidden states."""
    return getattr(torch, states_dtype(job.config.target.dtype, device.type))


def message_specs(job: TrainingJob, device: torch.device) -> Callable[[int], MessageSpec]:
    """seq -> the message of that micro-batch, known from the plan alone."""
    size, dtype = job.shape.hidden_size, states_dtype_on(job, device)

    def spec_of(seq: int) -> MessageSpec:
        tokens = job.stream.micro_batch(seq).num_tokens
        return MessageSpec(seq, tokens, job.num_states, size, dtype)

    return spec_of


class Rows:
    """The micro-batches of the stream, read from the token stores."""

    def __init__(self, job: TrainingJob) -> None:
        self._stream, self._store, self._held_out = job.stream, job.store, job.held_out
        self._pad_id: int = job.store.meta["pad_id"]

    def tokens(self, seq: int) -> TokenBatch:
        """Micro-batch `seq`, padded."""
        micro_batch = self._stream.micro_batch(seq)
        store = self._store if seq < EVALUATION else self._held_out
        assert store is not None, seq
        return collate(
            store,
            seq=seq,
            epoch=micro_batch.epoch,
            rows=micro_batch.rows,
            width=micro_batch.width,
            pad_id=self._pad_id,
        )


class Batches:
    """The target's states of a seq to the batch that the drafter trains on."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        num_anchors: int,
        block_size: int,
        features: int,
        variable_prefix: float | None,
        device: torch.device,
    ) -> None:
        """`features`: K*H, what the drafter reads of a token's states; a last state may follow."""
        self._rows, self._seed, self._num_anchors, self._device = rows, seed, num_anchors, device
        self._block_size, self._features = block_size, features
        self._variable_prefix = variable_prefix

    def batch(self, seq: int, states_of: Callable[[TokenBatch], Tensor]) -> DrafterBatch:
        """The batch of `seq`, with the states [tokens, num_states * H] that `states_of` gives."""
        tokens = self._rows.tokens(seq)
        hidden, last = states_of(tokens).tensor_split([self._features], -1)
        width = tokens.ids.shape[1]
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
            hidden=unpack(hidden, tokens.lengths, width),
            anchors=anchors.to(self._device),
            keep=keep.to(self._device),
            lengths=tokens.lengths.to(self._device),
            last=unpack(last, tokens.lengths, width) if last.shape[1] else None,
            prefix=self._prefixes(tokens, anchors),
        )

    def _prefixes(self, tokens: TokenBatch, anchors: Tensor) -> Tensor | None:
        """Only training shows blocks more than their anchor; evaluation and decoding never do."""
        if self._variable_prefix is None or tokens.seq >= EVALUATION:
            return None
        prefixes = draw_prefixes(
            tokens.loss_mask,
            anchors,
            tokens.row_ids,
            seed=self._seed,
            epoch=tokens.epoch,
            block_size=self._block_size,
            base=self._variable_prefix,
        )
        return prefixes.to(self._device)


class StateSource(Protocol):
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
    """Layout `colocated`: this rank runs the target itself. `forward`: tokens -> their states."""

    def __init__(self, batches: Batches, forward: Callable[[TokenBatch], Tensor]) -> None:
        self._batches, self._forward = batches, forward

    def hidden_states(self, seq: int) -> DrafterBatch:
        return self._batches.batch(seq, self._forward)
