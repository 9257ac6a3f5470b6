"""Acceptance of greedy speculative decoding, counted without decoding.

Where the target wrote a text greedily, decoding it again is known in advance: the target's pass
over a block agrees with the drafts up to the first that differs from the text. So one forward of
the target over the row, and the drafts of every block that could start in an answer, give the
numbers of the real loop (eval/decode.py), to the token. Blocks, masks and drafts are those of
training and decoding: `Drafter.forward`, `blocks.block_ids`, `drafter.greedy_drafts`.

Of a text that the target did not write, the numbers are those of a target that would have.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflashdist.model.blocks import block_ids
from dflashdist.model.drafter import Drafter, greedy_drafts
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.target_files import TargetTensors

_BLOCKS = 512  # drafted at once: as many as a training row has anchors


@dataclass(frozen=True)
class AcceptanceSums:
    """What passes emitted, as sums: of one answer, or added up over answers, rows and ranks.

    `vector` is float64 [4 + 2 n + (n + 1)] with n drafts a pass:
    tokens: emitted by passes, the bonus tokens counted. passes: of the target, without the prefill.
    answers: with at least one pass. means: the sum of those answers' own tokens / passes.
    offered[k], accepted[k], k = 1..n: passes that offered a k-th draft before the answer's end, and
    those in which it and all before it were accepted. emitted[m], m = 1..n + 1: passes of m tokens.
    """

    vector: Tensor

    @staticmethod
    def size(num_drafts: int) -> int:
        """Numbers in the vector."""
        return 5 + 3 * num_drafts

    @classmethod
    def zeros(cls, num_drafts: int, device: str | torch.device = "cpu") -> "AcceptanceSums":
        """The sums of nothing."""
        return cls(torch.zeros(cls.size(num_drafts), dtype=torch.float64, device=device))

    @classmethod
    def of_answer(
        cls,
        emitted: Sequence[int],
        offered: Sequence[int],
        accepted: Sequence[int],
        num_drafts: int,
    ) -> "AcceptanceSums":
        """One answer, from each pass's tokens, drafts before the end, and accepted drafts."""
        sums = cls.zeros(num_drafts)
        if emitted:
            tokens, passes = sum(emitted), len(emitted)
            head = [tokens, passes, 1, tokens / passes]
            sums.vector[:4] = torch.tensor(head, dtype=torch.float64)
            for name, counts in (("offered", offered), ("accepted", accepted)):
                reached = torch.tensor(counts)[:, None] >= torch.arange(1, num_drafts + 1)
                sums.part(name).copy_(reached.sum(0))
            sums.part("emitted").copy_(
                torch.bincount(torch.tensor(emitted), minlength=num_drafts + 2)[1:]
            )
        return sums

    @classmethod
    def total(cls, parts: Iterable["AcceptanceSums"], num_drafts: int) -> "AcceptanceSums":
        """The sum of parts on one device; `zeros` where there is none."""
        vectors = [part.vector for part in parts]
        return cls(torch.stack(vectors).sum(0)) if vectors else cls.zeros(num_drafts)

    @property
    def num_drafts(self) -> int:
        """Drafts a pass, n."""
        return (self.vector.shape[-1] - 5) // 3

    def part(self, name: str) -> Tensor:
        """A view of one entry by its name above; the counted ones are [n] or [n + 1].

        Leading dimensions of `vector`, of several such sums side by side, stay.
        """
        n = self.num_drafts
        places = {
            "tokens": slice(0, 1), "passes": slice(1, 2), "answers": slice(2, 3),
            "means": slice(3, 4), "offered": slice(4, 4 + n), "accepted": slice(4 + n, 4 + 2 * n),
            "emitted": slice(4 + 2 * n, None),
        }  # fmt: skip
        return self.vector[..., places[name]]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, pooled: 1 is plain decoding, n + 1 the most. nan of nothing."""
        return (self.part("tokens") / self.part("passes")).item()

    @property
    def mean_acceptance_length(self) -> float:
        """The mean of the answers' own acceptance lengths; nan of nothing."""
        return (self.part("means") / self.part("answers")).item()

    @property
    def position_acceptance(self) -> list[float]:
        """For draft k = 1..n, its share accepted of those offered; nan where none was."""
        return (self.part("accepted") / self.part("offered")).tolist()


@torch.no_grad()
def teacher_forced(
    drafter: Drafter,
    frozen: TargetTensors,
    batch: DrafterBatch,
    *,
    end_ids: Collection[int] | None = None,
    max_new_tokens: int | None = None,
    blocks_at_once: int = _BLOCKS,
) -> AcceptanceSums:
    """The sums of greedy decoding of every answer in the rows.

    An answer is a run of supervised tokens up to its first end token. Decoding it starts from the
    tokens before it; its first token is the prefill's and the first anchor. One that is cut by the
    row's end counts as one that reached `max_new_tokens`: its last block is clipped.

    Args:
        drafter: on the batch's device; not changed. Call it under the autocast of training.
        frozen: the target's embedding and head, on the same device.
        batch: its `anchors` and `keep` are not looked at.
        end_ids: tokens that end an answer; None = those of the target's config.json.
        max_new_tokens: tokens of an answer, at most, as in the decoding that this stands for;
            None = no limit, and a cut answer is of just that many.
        blocks_at_once: bounds the memory; changes nothing else than rounding.

    Returns:
        Sums on the batch's device, ready to be added over micro-batches and ranks.
    """
    if end_ids is None:
        eos = drafter.shape.eos_token_id
        end_ids = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
    drafts = drafter.shape.num_drafts
    answers = find_answers(batch, end_ids)
    limits = []
    for answer in answers:
        limit = max_new_tokens
        if not answer.ended:
            limit = min(limit or answer.stop, answer.stop - answer.first)
        limits.append(limit)
    agreed = _agreed(drafter, frozen, batch, answers, limits, blocks_at_once)
    sums = [
        walk(answer, agreed[answer.row], limit, drafts)
        for answer, limit in zip(answers, limits, strict=True)
    ]
    return AcceptanceSums(AcceptanceSums.total(sums, drafts).vector.to(batch.ids.device))


@dataclass(frozen=True)
class AnswerSpan:
    """Positions [first, stop) of a row, written by the target."""

    row: int
    first: int
    stop: int
    ended: bool  # its last token ends a turn


def find_answers(batch: DrafterBatch, end_ids: Collection[int]) -> list[AnswerSpan]:
    """The runs of supervised tokens, each up to its first end token. One that stops inside the row
    stopped at the end of a turn, whether or not `end_ids` knows that token."""
    lengths = batch.lengths.tolist()
    ids, mask = batch.ids.tolist(), batch.loss_mask.long()
    edges = torch.nn.functional.pad(mask, (1, 1)).diff()  # +1 where a run begins, -1 after it
    begins, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    answers = []
    for (row, first), (_, stop) in zip(begins, ends, strict=True):
        run = ids[row][first:stop]
        end = next((i for i, token in enumerate(run, 1) if token in end_ids), None)
        ended = end is not None or stop < lengths[row]
        answers.append(AnswerSpan(row, first, first + (end or len(run)), ended))
    return answers


def walk(
    answer: AnswerSpan, agreed: dict[int, int], limit: int | None, num_drafts: int
) -> AcceptanceSums:
    """Follow the passes of one answer: from each anchor to the bonus token, which is the next.

    `agreed`: anchor position -> leading drafts that equal the text. The accounting of a pass is
    that of eval/decode.py: drafts after an end token are not offered, unless a rejection came
    before it.
    """
    last = _last(answer, limit)
    ended = answer.ended and last == answer.stop - 1
    emitted, offered, accepted = [], [], []
    anchor = answer.first
    while anchor < last:
        room = limit - (anchor - answer.first + 1) if limit else num_drafts + 1
        offer = min(num_drafts, room - 1)
        correct = min(agreed[anchor], offer)
        step = min(correct + 1, last - anchor)
        at_end = ended and anchor + step == last
        emitted.append(step)
        offered.append(min(offer, step) if at_end else offer)
        accepted.append(min(correct, step))
        anchor += step
    return AcceptanceSums.of_answer(emitted, offered, accepted, num_drafts)


def _last(answer: AnswerSpan, limit: int | None) -> int:
    """Position of the last token that decoding emits."""
    return min(answer.stop, answer.first + (limit or answer.stop)) - 1


def _agreed(
    drafter: Drafter,
    frozen: TargetTensors,
    batch: DrafterBatch,
    answers: Sequence[AnswerSpan],
    limits: Sequence[int | None],
    blocks_at_once: int,
) -> list[dict[int, int]]:
    """For each row, anchor position -> leading drafts that equal the text: of every anchor that
    an answer's decoding could reach, its last token left out."""
    places: list[list[int]] = [[] for _ in batch.ids]
    for answer, limit in zip(answers, limits, strict=True):
        places[answer.row] += range(answer.first, _last(answer, limit))
    width = max(map(len, places), default=0)
    found: list[dict[int, int]] = [{} for _ in places]
    most = max(1, blocks_at_once // max(1, len(places)))
    step = max(1, -(-width // max(1, -(-width // most))))  # nearly equal widths: alike shapes
    for begin in range(0, width, step):
        some = [row[begin : begin + step] for row in places]
        anchors, keep = _padded(some, batch.ids.device)
        counts = _leading(drafter, frozen, batch, anchors, keep).tolist()
        for row, (positions, agreed) in enumerate(zip(some, counts, strict=True)):
            found[row] |= dict(zip(positions, agreed, strict=False))
    return found


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged positions as anchors int64 [B, N] and keep bool [B, N], as `draw_anchors` pads."""
    width = max(map(len, rows))
    filled = [[*row, *([row[-1] if row else 0] * (width - len(row)))] for row in rows]
    counts = torch.tensor([len(row) for row in rows], device=device)
    anchors = torch.tensor(filled, device=device)
    return anchors, torch.arange(width, device=device) < counts[:, None]


def _leading(
    drafter: Drafter, frozen: TargetTensors, batch: DrafterBatch, anchors: Tensor, keep: Tensor
) -> Tensor:
    """Leading drafts of each block that equal the row's tokens, int64 [B, N]; past the row's end
    nothing does. 0 where keep is false."""
    shape = drafter.shape
    block = block_ids(
        batch.ids, anchors, keep, block_size=shape.block_size, mask_token_id=shape.mask_token_id
    )
    embeds = torch.nn.functional.embedding(block, frozen.embedding)
    states = drafter(batch.hidden, embeds, anchors, keep).unflatten(1, (-1, shape.block_size))
    anchor_ids = batch.ids.gather(1, anchors)[keep]
    drafts = greedy_drafts(drafter, states[keep], anchor_ids, frozen.head)  # [M, n]
    rows, _ = keep.nonzero(as_tuple=True)
    offsets = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    positions = anchors[keep][:, None] + offsets
    inside = positions < batch.lengths[rows, None]
    text = batch.ids[rows[:, None], positions.clamp(max=batch.ids.shape[1] - 1)]
    agreed = ((drafts == text) & inside).long().cumprod(1).sum(1)
    return torch.zeros_like(anchors).masked_scatter(keep, agreed)
