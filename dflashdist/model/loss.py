"""The training objective over the supervised slots of a micro-batch, as sums.

Never a mean: the gradient of a step is that of one big batch, so the caller adds loss sums over
micro-batches and ranks and divides by the summed weight once. DFlash, section 4.2.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflashdist.config import InputError, LossConfig
from dflashdist.model.blocks import block_ids, block_labels, slot_weights
from dflashdist.model.drafter import Drafter
from dflashdist.model.heads import confidence_loss, selector_loss
from dflashdist.model.objective import (
    Chunk,
    ChunkedObjective,
    Objective,
    Scores,
    Teacher,
    block_chunks,
    dpace_weights,
    even_chunks,
)
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import TargetTensors


@dataclass
class DrafterBatch:
    """One micro-batch as the drafter reads it; B rows padded on the right to S."""

    ids: Tensor  # int64 [B, S]
    loss_mask: Tensor  # bool [B, S], true where a token is supervised
    hidden: Tensor  # [B, S, K*H], zero at the padding
    anchors: Tensor  # int64 [B, N], ascending
    keep: Tensor  # bool [B, N]
    lengths: Tensor  # int64 [B]
    last: Tensor | None = None  # [B, S, H], the target's states after its final norm
    prefix: Tensor | None = None  # int64 [B, N], slots that hold real tokens; None = slot 0 alone

    def to(self, device: str | torch.device) -> "DrafterBatch":
        """A copy with every tensor on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: t.to(device, non_blocking=True) for n, t in tensors.items() if t is not None}
        return replace(self, **moved)


def sums_layout(block_size: int) -> dict[str, slice]:
    """Name -> place in the float64 vector of sums, of 4 + 2 * (block_size - 1) numbers.

    loss: the weighted terms, what is trained on. weight: of the supervised slots, the loss's
    denominator; under D-PACE their number. blocks: with a supervised slot. accepted: leading
    correct slots, added over these blocks (the bonus token not counted, nor, with a variable
    prefix, the slots that were shown). correct, count: supervised slots 1 to block_size - 1, each
    its own number.
    """
    layout = {
        name: slice(i, i + 1) for i, name in enumerate(("loss", "weight", "blocks", "accepted"))
    }
    slots = block_size - 1
    return layout | {"correct": slice(4, 4 + slots), "count": slice(4 + slots, 4 + 2 * slots)}


@dataclass(frozen=True)
class LossSums:
    """A vector of sums, of one micro-batch or of many added up, read by name."""

    vector: Tensor  # float64, laid out by `sums_layout`
    block_size: int

    @staticmethod
    def size(block_size: int) -> int:
        """Numbers in the vector."""
        return 4 + 2 * (block_size - 1)

    @classmethod
    def zeros(cls, block_size: int, device: str | torch.device = "cpu") -> "LossSums":
        """The sums of nothing."""
        return cls(
            torch.zeros(cls.size(block_size), dtype=torch.float64, device=device), block_size
        )

    def part(self, name: str) -> Tensor:
        """A view of one entry, by its name in `sums_layout`."""
        return self.vector[sums_layout(self.block_size)[name]]

    @property
    def loss(self) -> float:
        """Mean weighted loss; nan where nothing was supervised."""
        return (self.part("loss") / self.part("weight")).item()

    @property
    def weight(self) -> float:
        """The denominator."""
        return self.part("weight").item()

    @property
    def block_prefix(self) -> float:
        """1 + the mean number of leading slots of a block that are right against the data's tokens.
        No acceptance length: blocks begin at random anchors, and the target is not asked."""
        return (1 + self.part("accepted") / self.part("blocks")).item()

    @property
    def accuracy(self) -> list[float]:
        """Of slots 1 to block_size - 1; nan where a slot was never supervised."""
        return (self.part("correct") / self.part("count")).tolist()


class DrafterLoss(nn.Module):
    """Drafter, target's embedding and head, and loss as one module: what DDP wraps.

    Its parameters are the drafter's alone; the frozen tensors are not registered, so they are
    neither reduced, nor moved, nor saved.
    """

    def __init__(
        self, drafter: Drafter, frozen: TargetTensors, shape: DrafterShape, loss: LossConfig
    ):
        """Raises InputError when the target's tensors do not fit the drafter."""
        super().__init__()
        expected = (shape.vocab_size, shape.hidden_size)
        for name, tensor in (("embedding", frozen.embedding), ("head", frozen.head)):
            if tuple(tensor.shape) != expected:
                raise InputError(
                    f"the target's {name} is {tuple(tensor.shape)}, the drafter's {expected}: "
                    "take the target that this drafter was made for"
                )
        self.drafter = drafter
        self.frozen = frozen
        self.shape = shape
        self.config = loss
        by_distance = "decay" if loss.weights == "dpace" else loss.weights
        self.slot_weights = slot_weights(
            shape.block_size + shape.ahead, weights=by_distance, gamma=loss.gamma
        )

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, Tensor]:
        """Loss sum and the vector of sums of one micro-batch.

        One host synchronisation on CUDA: the number of supervised slots, which sizes the head's
        input; under D-PACE a second right after it, for those of each block.

        Returns:
            float32 scalar, the sum of weight x terms, connected to every parameter also when no
            slot is supervised; and the detached float64 vector of `sums_layout`.
        """
        shape = self.shape
        inputs = block_ids(
            batch.ids,
            batch.anchors,
            batch.keep,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            prefix=batch.prefix,
        )
        embeds = F.embedding(inputs, self.frozen.embedding)
        output = self.drafter(batch.hidden, embeds, batch.anchors, batch.keep)
        labels, supervised = block_labels(
            batch.ids,
            batch.loss_mask,
            batch.anchors,
            batch.keep,
            block_size=shape.block_size,
            contiguous_only=self.config.contiguous_only,
            ahead=shape.ahead,
            prefix=batch.prefix,
        )
        slots = supervised.flatten().nonzero().squeeze(1)
        states = output.flatten(0, 1).index_select(0, slots)
        labels = labels.flatten().index_select(0, slots)
        before = self._before(batch, slots)
        previous = batch.ids.flatten().index_select(0, before)
        bias: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if (markov := self.drafter.markov_head) is not None:
            bias = F.embedding(previous, markov.markov_w1.weight), markov.markov_w2.weight
        scores = Scores(
            *ChunkedObjective.apply(
                states,
                self.frozen.head,
                labels,
                None if batch.last is None else Teacher(batch.last.flatten(0, 1), before),
                *bias,
                self._objective(batch, slots, supervised),
            )
        )
        fixed = scores.weights
        if self.config.weights == "dpace":
            fixed = self._table_weights(batch, slots)
        added, hits = self._added(states, scores, previous, labels, bias[0], fixed)
        correct = torch.zeros_like(supervised).flatten().index_copy_(0, slots, hits)
        sums = _sums(
            scores.losses, scores.weights, correct.view_as(supervised), supervised, 1 - shape.ahead
        )
        if self.config.weights == "dpace":
            LossSums(sums, shape.block_size + shape.ahead).part("weight").fill_(len(slots))
        if added is None:
            return scores.loss, sums
        LossSums(sums, shape.block_size + shape.ahead).part("loss").add_(added.detach())
        return scores.loss + added, sums

    def _added(
        self,
        states: Tensor,
        scores: Scores,
        previous: Tensor,
        labels: Tensor,
        embedded: Tensor | None,
        fixed: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        """The loss of the variant's own head, of the same slots; and which drafts are right, by the
        rule that the variant drafts by, the true token before each given.

        The selector's has the terms' weights, of D-PACE those by the data's token. The confidence's
        has `fixed` ones, float32 [M], under D-PACE the decay's: it learns no token, so D-PACE's
        reason to weigh a slot is not its own.
        """
        drafter, config = self.drafter, self.config
        if drafter.candidate_selector is not None:
            assert scores.top_ids is not None
            loss, hits = selector_loss(
                drafter.candidate_selector,
                states,
                scores.top_ids,
                self.frozen.head,
                previous,
                labels,
                scores.weights,
                config.chunk_size,
            )
            return config.selector * loss, hits
        if drafter.confidence_head is not None:
            assert embedded is not None
            share = torch.ones_like(scores.weights) if scores.overlap is None else scores.overlap
            loss = confidence_loss(drafter.confidence_head, states, embedded, share, fixed)
            # Also where the coefficient is 0: connected to every parameter.
            return config.confidence * loss, scores.hits
        return None, scores.hits

    def _objective(self, batch: DrafterBatch, slots: Tensor, supervised: Tensor) -> Objective:
        """Terms, chunks and weights of the supervised slots, int64 [M] in the flat blocks."""
        config, size = self.config, self.shape.block_size
        if config.weights == "dpace":  # weights that need the losses of a block together
            counts = supervised.flatten(0, 1).sum(-1).tolist()

            def weigh(chunk: Chunk, losses: Tensor) -> Tensor:
                first, stop = chunk.blocks.start, chunk.blocks.stop
                places = slots[chunk.slots] - first * size
                return dpace_weights(losses, places, (stop - first, size), config.dpace_alpha)

            chunks, by_term = block_chunks(counts, config.chunk_size), config.dpace_by == "terms"
            return Objective(config.terms, chunks, weigh, by_term, *self._extras)
        weights = self._table_weights(batch, slots)
        chunks = even_chunks(len(slots), config.chunk_size)
        return Objective(
            config.terms, chunks, lambda chunk, _: weights[chunk.slots], False, *self._extras
        )

    def _table_weights(self, batch: DrafterBatch, slots: Tensor) -> Tensor:
        """Weights by distance alone, float32 [M]."""
        size = self.shape.block_size
        dtype = torch.promote_types(self.frozen.head.dtype, torch.float32)
        self.slot_weights = self.slot_weights.to(slots.device, dtype)
        distance = slots % size + self.shape.ahead
        if batch.prefix is not None:  # the decay begins at the first slot that is not shown
            distance = distance - (batch.prefix.flatten()[slots // size] - 1)
        return self.slot_weights[distance]

    @property
    def _extras(self) -> tuple[bool, int]:
        """What the variant's heads learn from: the target's share, the best tokens."""
        overlap = self.drafter.confidence_head is not None and self.config.confidence > 0
        return overlap, self.shape.selector_top_k

    def _before(self, batch: DrafterBatch, slots: Tensor) -> Tensor:
        """Places in the flat rows of the positions before each label's: the tokens that a draft
        follows, and where the target said the label. int64 [M]."""
        size, ahead = self.shape.block_size, self.shape.ahead
        block = slots // size
        row, anchor = block // batch.anchors.shape[1], batch.anchors.flatten()[block]
        return row * batch.ids.shape[1] + anchor + slots % size + ahead - 1


def _sums(
    losses: Tensor, weights: Tensor, correct: Tensor, supervised: Tensor, first: int = 1
) -> Tensor:
    """The float64 vector of `sums_layout`; losses have their weights, correct and supervised are
    bool [B, N, block_size], and slot `first` is the first that drafts."""
    correct, supervised = correct[..., first:], supervised[..., first:]
    # A slot that is not supervised neither counts nor breaks the run.
    unbroken = (correct | ~supervised).cumprod(-1) * supervised
    head = [
        losses.double().sum(),
        weights.double().sum(),
        supervised.any(-1).sum().double(),
        unbroken.sum().double(),
    ]
    by_slot = [correct.sum((0, 1)).double(), supervised.sum((0, 1)).double()]
    return torch.cat([torch.stack(head), *by_slot])
