"""Acceptance counted without decoding is that of the real loop, on text that the target wrote."""

from functools import cache

import pytest
import torch
from demo_files import DEMO
from rounding import in_float64

from dflashdist.config import DrafterConfig, LossConfig
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import parse_row
from dflashdist.data.sources import Sources
from dflashdist.eval.decode import CachedTarget, Rule, decode_speculative
from dflashdist.model.blocks import draw_anchors
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors, read_target_config
from dflashdist.model.teacher_forced import AcceptanceSums, find_answers, teacher_forced

FOLDER = str(DEMO / "target")
LAYERS, BLOCK = (0, 2, 4), 4
NUM_ROWS = 6


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def shape(chat):
    settings = DrafterConfig(num_layers=1, block_size=BLOCK, target_layer_ids=list(LAYERS))
    return DrafterShape.from_target(read_target_config(FOLDER), chat.length, settings)


@pytest.fixture(scope="module")
def batch(chat):
    """Shipped conversations that the target wrote, half of them of more than one answer."""
    single, several = [], []
    for origin, payload in Sources([DEMO / "train.jsonl.gz"]).rows():
        conversation = parse_row(origin, payload)
        (single if len(conversation.messages) == 2 else several).append(conversation)
    rows = []
    for conversation in single[: NUM_ROWS // 2] + several[: NUM_ROWS // 2]:
        (row,) = chat.training_rows(conversation).rows
        rows.append((torch.from_numpy(row.ids).long(), torch.from_numpy(row.loss_mask).bool()))
    return collated(rows)


# In float64, where no draft is near a tie that another order of summation decides otherwise.


def frozen():
    return TargetTensors.load(FOLDER, dtype=torch.float64)


def collated(rows):
    ids, masks = zip(*rows, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(one) for one in ids])
    ids, mask = pad(list(ids), True), pad(list(masks), True)
    hidden = Target(FOLDER, LAYERS, loaded=whole_target().model).hidden_states(ids, lengths)
    nothing = torch.zeros(len(rows), 1, dtype=torch.long)
    return DrafterBatch(ids, mask, hidden, nothing, nothing.bool(), lengths)


@pytest.fixture(scope="module")
def drafter(shape, batch):
    """Has half of the rows nearly by heart: right, wrong and nearly right blocks."""
    drafter = Drafter(shape)  # learns in float32, which is faster
    drafter.reset_parameters("fan_in", seed=0)
    loss = DrafterLoss(drafter, TargetTensors.load(FOLDER), shape, LossConfig())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    half = slice(0, None, 2)
    for step in range(115):
        mask = batch.loss_mask[half]
        anchors, keep = draw_anchors(
            mask, tuple(range(len(mask))), seed=0, epoch=step, num_anchors=24
        )
        part = DrafterBatch(
            batch.ids[half], mask, batch.hidden[half], anchors, keep, batch.lengths[half]
        )
        total, sums = loss(part)
        optimizer.zero_grad()
        (total / sums[1]).backward()
        optimizer.step()
    return drafter.double().eval()


@cache
def whole_target():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    return CachedTarget(in_float64(model), LAYERS)


def decoded_sums(drafter, batch, end_ids, max_new_tokens):
    """The real loop's, of all answers in one batch; and whether it wrote the same texts."""
    answers = find_answers(batch, end_ids)
    texts = [batch.ids[answer.row].tolist() for answer in answers]
    prompts = [ids[: answer.first] for ids, answer in zip(texts, answers, strict=True)]
    rule = Rule(max_new_tokens, end_ids)
    decoded, _ = decode_speculative(whole_target(), drafter, prompts, rule)
    parts, equal = [], True
    for one, ids, answer in zip(decoded, texts, answers, strict=True):
        equal &= one.tokens == ids[answer.first : answer.stop][:max_new_tokens]
        parts.append(AcceptanceSums.of_answer(one.emitted, one.offered, one.accepted, BLOCK - 1))
    return AcceptanceSums.total(parts, BLOCK - 1), equal


def test_equal_to_decoding(drafter, batch, chat):
    sums = teacher_forced(drafter, frozen(), batch, max_new_tokens=256)
    decoded, equal = decoded_sums(drafter, batch, chat.end_ids, 256)
    assert equal
    assert torch.equal(sums.vector, decoded.vector)
    assert sums.part("answers") > NUM_ROWS  # several answers a row
    assert 1.3 < sums.acceptance_length < 3.5  # so blocks are taken whole, in part and not at all
    assert sums.part("emitted").min() > 0
    # In one go or block by block: the same sums.
    for at_once in (16, 100):
        again = teacher_forced(drafter, frozen(), batch, max_new_tokens=256, blocks_at_once=at_once)
        assert torch.equal(again.vector, sums.vector)
    # The default end tokens are the target's, and a limit that nothing reaches is none.
    assert torch.equal(teacher_forced(drafter, frozen(), batch).vector[:4], sums.vector[:4])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 12])
def test_equal_to_decoding_that_is_clipped(drafter, batch, chat, max_new_tokens):
    sums = teacher_forced(drafter, frozen(), batch, max_new_tokens=max_new_tokens)
    decoded, equal = decoded_sums(drafter, batch, chat.end_ids, max_new_tokens)
    assert equal
    assert torch.equal(sums.vector, decoded.vector)


def test_rows_that_were_cut(drafter, batch, chat):
    """Without its end token an answer counts as one that reached max_new_tokens."""
    cut = [
        (ids[:n], mask[:n])
        for ids, mask, n in zip(
            batch.ids, batch.loss_mask, (batch.lengths - 9).tolist(), strict=True
        )
    ]
    batch = collated(cut)
    sums = teacher_forced(drafter, frozen(), batch)
    expected = AcceptanceSums.zeros(BLOCK - 1)
    for answer in find_answers(batch, chat.end_ids):
        one = DrafterBatch(
            *(getattr(batch, name)[answer.row : answer.row + 1] for name in ("ids", "loss_mask",
            "hidden", "anchors", "keep", "lengths"))
        )  # fmt: skip
        mask = torch.zeros_like(one.loss_mask)
        mask[0, answer.first : answer.stop] = True
        one.loss_mask = mask
        limit = 256 if answer.ended else answer.stop - answer.first
        part, equal = decoded_sums(drafter, one, chat.end_ids, limit)
        expected.vector.add_(part.vector)
        assert equal
    # Counts are exact; the sum of the answers' own means is of another order here.
    torch.testing.assert_close(sums.vector, expected.vector, atol=0, rtol=1e-12)
    assert not all(answer.ended for answer in find_answers(batch, chat.end_ids))


def test_rows_without_an_answer_count_for_nothing(drafter, batch):
    silent = DrafterBatch(
        batch.ids, batch.loss_mask & False, batch.hidden, batch.anchors, batch.keep, batch.lengths
    )
    sums = teacher_forced(drafter, frozen(), silent)
    assert torch.equal(sums.vector, AcceptanceSums.zeros(BLOCK - 1).vector)


def test_sums_by_hand():
    """Three passes: 3 tokens of which 2 drafts; 1 token; the end, a draft, inside a block."""
    sums = AcceptanceSums.of_answer([3, 1, 2], offered=[3, 3, 2], accepted=[2, 0, 2], num_drafts=3)
    other = AcceptanceSums.of_answer([4, 3, 3], offered=[3] * 3, accepted=[3, 2, 2], num_drafts=3)
    nothing = AcceptanceSums.of_answer([], [], [], num_drafts=3)
    total = AcceptanceSums.total([sums, other, nothing], 3)
    assert len(total.vector) == AcceptanceSums.size(3) == 14
    assert total.part("tokens") == 16 and total.part("passes") == 6 and total.part("answers") == 2
    assert total.acceptance_length == 16 / 6
    assert total.mean_acceptance_length == (6 / 3 + 10 / 3) / 2
    assert total.position_acceptance == [5 / 6, 5 / 6, 1 / 5]
    assert total.part("emitted").tolist() == [1, 1, 3, 1]
