"""The training objective: weighted cross-entropy of the supervised slots, as sums.

Never a mean: the gradient of a step is that of one big batch, so the caller adds loss sums over
micro-batches and ranks and divides by the summed weight once. DFlash, section 4.2.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflashdist.config import InputError, LossConfig
from dflashdist.model.blocks import block_ids, block_labels, decay_weights
from dflashdist.model.drafter import Drafter
from dflashdist.model.frozen import Frozen
from dflashdist.model.shape import DrafterShape


@dataclass
class DrafterBatch:
    """One micro-batch as the drafter reads it; B rows padded on the right to S."""

    ids: Tensor  # int64 [B, S]
    loss_mask: Tensor  # bool [B, S], true where a token is supervised
    hidden: Tensor  # [B, S, K*H], zero at the padding
    anchors: Tensor  # int64 [B, N], ascending
    keep: Tensor  # bool [B, N]
    lengths: Tensor  # int64 [B]

    def to(self, device: str | torch.device) -> "DrafterBatch":
        """A copy with every tensor on `device`."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return DrafterBatch(**moved)


def sums_layout(block_size: int) -> dict[str, slice]:
    """Name -> place in the float64 vector of sums, of 4 + 2 * (block_size - 1) numbers.

    loss: weighted cross-entropy. weight: of the supervised slots, the loss's denominator. blocks:
    with a supervised slot. accepted: leading correct slots, added over these blocks (the bonus
    token not counted). correct, count: supervised slots 1 to block_size - 1, each its own number.
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
    def accept_length(self) -> float:
        """Tokens a target pass would emit, the bonus token counted; teacher-forced proxy."""
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

    def __init__(self, drafter: Drafter, frozen: Frozen, shape: DrafterShape, loss: LossConfig):
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
        self.slot_weights = decay_weights(shape.block_size, decay=loss.decay, gamma=loss.gamma)

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, Tensor]:
        """Loss sum and the vector of sums of one micro-batch.

        One host synchronisation on CUDA: the number of supervised slots, which sizes the head's
        input.

        Returns:
            float32 scalar, sum of weight x cross-entropy, connected to every parameter also when
            no slot is supervised; and the detached float64 vector of `sums_layout`.
        """
        shape = self.shape
        inputs = block_ids(
            batch.ids,
            batch.anchors,
            batch.keep,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
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
        )
        if self.slot_weights.device != output.device:
            self.slot_weights = self.slot_weights.to(output.device)
        slots = supervised.flatten().nonzero().squeeze(1)
        weights = self.slot_weights[slots % shape.block_size]
        loss, losses, hits = ChunkedCrossEntropy.apply(
            output.flatten(0, 1).index_select(0, slots),
            self.frozen.head,
            labels.flatten().index_select(0, slots),
            weights,
            self.config.chunk_size,
        )
        correct = torch.zeros_like(supervised).flatten().index_copy_(0, slots, hits)
        return loss, _sums(losses, weights, correct.view_as(supervised), supervised)


def _sums(losses: Tensor, weights: Tensor, correct: Tensor, supervised: Tensor) -> Tensor:
    """The float64 vector of `sums_layout`; correct and supervised are bool [B, N, block_size]."""
    correct, supervised = correct[..., 1:], supervised[..., 1:]
    # A slot that is not supervised neither counts nor breaks the run.
    unbroken = (correct | ~supervised).cumprod(-1) * supervised
    weights = weights.double()
    head = [
        (weights * losses.double()).sum(),
        weights.sum(),
        supervised.any(-1).sum().double(),
        unbroken.sum().double(),
    ]
    by_slot = [correct.sum((0, 1)).double(), supervised.sum((0, 1)).double()]
    return torch.cat([torch.stack(head), *by_slot])


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy over chunks of slots, the gradient computed while the logits exist.

    The logits of all slots would be the largest tensor of the step by far (8,192 slots x 151,936
    words are 5 GB in float32); here those of one chunk exist at a time, and only the gradient of
    the hidden states is kept. The frozen head gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [M, H], head [V, H], labels int64 [M], weights float32 [M].

        The product runs in the head's dtype (or autocast's), everything after it in float32.

        Returns:
            the weighted sum (float32 scalar), losses float32 [M], hits bool [M] (arg max = label);
            only the first is differentiable.
        """
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        hits = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            label = labels[part, None]
            logits = F.linear(hidden[part].to(head.dtype), head).float()
            top, best = logits.max(-1, keepdim=True)
            hits[part] = (best == label).squeeze(1)
            own = logits.gather(1, label)
            exp = logits.sub_(top).exp_()
            total = exp.sum(-1, keepdim=True)
            losses[part] = (total.log() + top - own).squeeze(1)
            if gradient is not None:
                weight = weights[part, None]
                d_logits = exp.mul_(weight / total).scatter_add_(1, label, -weight)
                gradient[part] = d_logits.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return None if gradient is None else gradient * grads[0], None, None, None, None
