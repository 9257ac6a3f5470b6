"""The objective of a slot: terms against its token and the target's distribution, in closed form.

p is the drafter's distribution at a slot, t the target's for the same token, y the token of the
data. With z the drafter's logits, each term and its gradient:

    ce          -log p[y]               p - onehot(y)
    hard        -log p[arg max t]       p - onehot(arg max t)
    kl          sum t log(t / p)        p - t
    reverse_kl  sum p log(p / t)        p (log(p / t) - reverse_kl)
    tv          sum |p - t| / 2         p (s - sum p s), s = sign(p - t) / 2

Legend: M supervised slots, m of a chunk, H hidden size, V vocabulary, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflashdist.checks import SOFT


class Chunk(NamedTuple):
    """Slots whose logits exist at once, and the blocks that they belong to."""

    slots: slice
    blocks: slice


def even_chunks(num_slots: int, chunk_size: int) -> list[Chunk]:
    """Chunks of `chunk_size` slots, wherever blocks begin and end."""
    starts = range(0, num_slots, chunk_size)
    return [Chunk(slice(start, start + chunk_size), slice(0)) for start in starts]


def block_chunks(counts: list[int], chunk_size: int) -> list[Chunk]:
    """Chunks of whole blocks, of at most `chunk_size` slots or else of one block.

    `counts`: supervised slots of each block.
    """
    chunks, first, start, stop = [], 0, 0, 0
    for block, count in enumerate(counts):
        if stop > start and stop + count - start > chunk_size:
            chunks.append(Chunk(slice(start, stop), slice(first, block)))
            first, start = block, stop
        stop += count
    if stop > start:
        chunks.append(Chunk(slice(start, stop), slice(first, len(counts))))
    return chunks


def dpace_weights(losses: Tensor, places: Tensor, shape: tuple[int, int], alpha: float) -> Tensor:
    """D-PACE's weights of the supervised slots of whole blocks; 2605.18810.

    q = (1 - alpha) exp(-loss) + alpha, 1 where a slot is not supervised; P the product of q up to a
    slot, how likely the drafts up to there are accepted; a slot's weight is the sum of P over the
    supervised slots from it to the block's end.

    Args:
        losses: [m], cross-entropy with the data's token, so that exp(-loss) is the drafter's
            chance of it; or another term's. No gradient flows through them.
        places: int64 [m], each slot's place in the flat blocks. shape: (blocks, slots a block).
    """
    taught = losses.new_zeros(shape[0] * shape[1]).index_fill_(0, places, 1.0)
    q = torch.ones_like(taught).index_copy_(0, places, (1 - alpha) * (-losses).exp() + alpha)
    reached = q.view(shape).cumprod(-1) * taught.view(shape)
    return reached.flip(-1).cumsum(-1).flip(-1).flatten().index_select(0, places)


@dataclass(frozen=True)
class Objective:
    """What one micro-batch is trained on, beside its tensors."""

    terms: dict[str, float]  # coefficients, of LossConfig.terms
    chunks: list[Chunk]
    weigh: Callable[[Chunk, Tensor], Tensor]  # a chunk and losses of its slots [m] -> weights [m]
    by_term: bool = False  # weigh each term by its own losses, not all by the cross-entropy
    overlap: bool = False  # also the share that p and t have in common
    top_k: int = 0  # also the ids of so many best tokens

    def coefficient(self, term: str) -> float:
        """0 where the term is not named."""
        return float(self.terms.get(term, 0.0))

    @property
    def is_soft(self) -> bool:
        """Whether the target's whole distribution is read."""
        return self.overlap or any(self.coefficient(term) > 0 for term in SOFT)


class Teacher(NamedTuple):
    """The target's states, read in place: slot m's distribution is that of states[places[m]]."""

    states: Tensor  # [T, H], after the target's final norm
    places: Tensor  # int64 [M]


class Scores(NamedTuple):
    """What `ChunkedObjective` returns, in this order; only `loss` is differentiable."""

    loss: Tensor  # scalar, the sum of `losses`
    losses: Tensor  # [M], the sum of weight x coefficient x term
    weights: Tensor  # [M], by the cross-entropy
    hits: Tensor  # bool [M], arg max = label
    overlap: Tensor | None  # [M], 1 - tv: how likely a sampled draft is accepted
    top_ids: Tensor | None  # int64 [M, top_k], best first


class ChunkedObjective(torch.autograd.Function):
    """Head and objective over chunks of slots, the gradient computed while the logits exist.

    The logits of all slots would be the largest tensor of the step by far (8,192 slots x 151,936
    words are 5 GB in float32); here those of one chunk exist at a time, and only the gradient of
    the hidden states is kept. A chunk takes one float32 table [m, V] for `ce` and `hard`, and five
    with the target's whole distribution. The frozen head gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: Teacher | None,
        low_rank: Tensor | None,
        low_rank_head: Tensor | None,
        objective: Objective,
    ) -> tuple[Tensor | None, ...]:
        """Of logits = hidden @ head^T, plus low_rank @ low_rank_head^T where these are given.

        The products run in the head's dtype (or autocast's), everything after them in float32 (in
        float64 under a float64 head). Gradients are computed where `hidden` needs one.

        Args:
            hidden: [M, H]. head: [V, H]. labels: int64 [M].
            teacher: where the objective reads the target's logits.
            low_rank: [M, r], and low_rank_head: [V, r]; both get gradients.

        Returns:
            the fields of `Scores`.
        """
        backward, top_k = ctx.needs_input_grad[0], objective.top_k
        dtype = torch.promote_types(head.dtype, torch.float32)
        losses = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        weights = torch.empty_like(losses)
        hits = torch.empty_like(losses, dtype=torch.bool)
        overlap = torch.empty_like(losses) if objective.overlap else None
        top_ids = labels.new_empty(len(labels), top_k) if top_k else None
        d_hidden = torch.empty_like(hidden) if backward else None
        low = None
        if low_rank is not None and low_rank_head is not None:
            low = _LowRank(low_rank, low_rank_head, head.dtype, backward)
        for chunk in objective.chunks:
            part = chunk.slots
            best_t, log_t = _read(teacher, part, head, objective, dtype)
            logits = F.linear(hidden[part].to(head.dtype), head).to(dtype)
            if low is not None:
                logits += low.logits(part)
            if top_ids is not None:
                top_ids[part] = logits.topk(top_k).indices
            scored = _score(logits, labels[part, None], best_t, log_t, chunk, objective, backward)
            losses[part], weights[part], hits[part] = scored.losses, scored.weights, scored.hits
            if overlap is not None and scored.overlap is not None:
                overlap[part] = scored.overlap
            if d_hidden is not None and scored.d_logits is not None:
                d_logits = scored.d_logits.to(head.dtype)
                d_hidden[part] = d_logits @ head
                if low is not None:
                    low.add_gradient(part, d_logits)
        ctx.save_for_backward(d_hidden, *(low.gradients if low else (None, None)))
        fixed = (losses, weights, hits, overlap, top_ids)
        ctx.mark_non_differentiable(*(tensor for tensor in fixed if tensor is not None))
        return Scores(losses.sum(), *fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_low, d_low_head = (
            None if saved is None else saved * grads[0] for saved in ctx.saved_tensors
        )
        return d_hidden, None, None, None, d_low, d_low_head, None


class _LowRank:
    """An addition of rank r to the logits, and its gradients, chunk by chunk."""

    def __init__(self, inner: Tensor, head: Tensor, dtype: torch.dtype, backward: bool) -> None:
        self._inner, self._head = inner.to(dtype), head.to(dtype)
        self.gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if backward:
            self.gradients = torch.empty_like(inner), torch.zeros_like(head)

    def logits(self, part: slice) -> Tensor:
        return F.linear(self._inner[part], self._head)

    def add_gradient(self, part: slice, d_logits: Tensor) -> None:
        d_inner, d_head = self.gradients
        assert d_inner is not None and d_head is not None
        d_inner[part] = d_logits @ self._head
        d_head += d_logits.T @ self._inner[part]


class _Scored(NamedTuple):
    """One chunk: [m] each, and the gradient of the weighted loss by the logits [m, V]."""

    losses: Tensor
    weights: Tensor
    hits: Tensor
    overlap: Tensor | None
    d_logits: Tensor | None


def _read(
    teacher: Teacher | None, part: slice, head: Tensor, objective: Objective, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """What the objective reads of the target: its arg max, int64 [m, 1], and log t [m, V]."""
    hard, soft = objective.coefficient("hard") > 0, objective.is_soft
    if not hard and not soft:
        return None, None
    assert teacher is not None, "the batch lacks the target's last states"
    states = teacher.states.index_select(0, teacher.places[part])
    logits = F.linear(states.to(head.dtype), head)
    best_t = logits.argmax(-1, keepdim=True) if hard else None
    return best_t, F.log_softmax(logits, -1, dtype=dtype) if soft else None


def _score(
    logits: Tensor,
    label: Tensor,
    best_t: Tensor | None,
    log_t: Tensor | None,
    chunk: Chunk,
    objective: Objective,
    backward: bool,
) -> _Scored:
    """Losses and gradient of a chunk, label int64 [m, 1]; writes over `logits` and `log_t`."""
    top, best = logits.max(-1, keepdim=True)
    own = logits.gather(1, label)
    own_t = None if best_t is None else logits.gather(1, best_t)
    shifted = logits.sub_(top)
    exp = shifted.exp_() if log_t is None else shifted.exp()
    total = exp.sum(-1, keepdim=True)
    values = {"ce": total.log() + top - own}
    if own_t is not None:
        values["hard"] = total.log() + top - own_t
    soft = overlap = None
    if log_t is not None:
        soft = _Soft(exp.div_(total), log_t, shifted.sub_(total.log()).sub_(log_t), objective)
        values |= soft.values
        overlap = soft.overlap
    weight = objective.weigh(chunk, values["ce"].squeeze(1))[:, None]
    shares = {}
    for term, value in values.items():
        if coefficient := objective.coefficient(term):
            by = objective.weigh(chunk, value.squeeze(1))[:, None] if objective.by_term else weight
            shares[term] = coefficient * by
    losses = sum((share * values[term] for term, share in shares.items()), torch.zeros_like(own))
    d_logits = None
    if backward:
        factor = sum((shares[t] for t in ("ce", "hard", "kl") if t in shares), 0 * weight)
        d_logits = exp.mul_(factor / total) if soft is None else soft.slope(shares, factor)
        for term, place in (("ce", label), ("hard", best_t)):
            if term in shares and place is not None:
                d_logits.scatter_add_(1, place, -shares[term])
    hits = (best == label).squeeze(1)
    return _Scored(losses.squeeze(1), weight.squeeze(1), hits, overlap, d_logits)


class _Soft:
    """The terms that read the target's whole distribution t; all tables are [m, V]."""

    def __init__(self, p: Tensor, log_t: Tensor, log_ratio: Tensor, objective: Objective) -> None:
        """Of log_ratio = log(p / t); writes over `log_t`, and `slope` over the others."""
        t = log_t.exp_()
        self._p, self._t, self._log_ratio = p, t, log_ratio
        self.values: dict[str, Tensor] = {}  # [m, 1], of the terms that are asked for
        self.overlap: Tensor | None = None  # [m], what p and t have in common
        if objective.coefficient("kl"):
            self.values["kl"] = -(t * log_ratio).sum(-1, keepdim=True)
        if objective.coefficient("reverse_kl"):
            self.values["reverse_kl"] = (p * log_ratio).sum(-1, keepdim=True)
        if objective.overlap or objective.coefficient("tv"):
            self.values["tv"] = (p - t).abs_().sum(-1, keepdim=True) / 2
            self.overlap = 1 - self.values["tv"].squeeze(1)

    def slope(self, shares: dict[str, Tensor], factor: Tensor) -> Tensor:
        """The gradient by the logits of all terms, without what `ce` and `hard` take off at their
        tokens. shares: [m, 1], what a term counts; factor: those of `ce`, `hard` and `kl`."""
        p, t, slope = self._p, self._t, self._log_ratio
        if "reverse_kl" in shares:
            slope = slope.sub_(self.values["reverse_kl"]).mul_(shares["reverse_kl"]).add_(factor)
        else:
            slope = slope.copy_(factor.expand_as(slope))
        if "tv" in shares:
            sign = (p - t).sign_()
            sign.sub_((p * sign).sum(-1, keepdim=True))
            slope.addcmul_(sign, shares["tv"] / 2)
        slope.mul_(p)
        if "kl" in shares:
            slope.addcmul_(t, -shares["kl"])
        return slope
