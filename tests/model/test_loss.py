"""The loss module: sums, chunks, connection of every parameter, the accepted prefix."""

import pytest
import torch
import torch.nn.functional as F
from rounding import EXACT

from dflashdist.config import InputError, LossConfig
from dflashdist.model.blocks import block_ids, block_labels, draw_anchors, slot_weights
from dflashdist.model.loss import (
    DrafterBatch,
    DrafterLoss,
    LossSums,
    _sums,
    sums_layout,
)
from dflashdist.model.target_files import TargetTensors

pytestmark = pytest.mark.usefixtures("float64")


def make_frozen(shape) -> TargetTensors:
    generator = torch.Generator().manual_seed(11)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    head = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return TargetTensors(embedding, head, torch.ones(shape.hidden_size))


def make_batch(shape, *, supervised: bool = True) -> DrafterBatch:
    generator = torch.Generator().manual_seed(12)
    ids = torch.randint(0, 90, (2, 30), generator=generator)
    mask = torch.zeros(2, 30, dtype=torch.bool)
    if supervised:
        mask[0, 4:20] = True
        mask[1, 8:12] = True
        mask[1, 14:28] = True
    anchors, keep = draw_anchors(mask, (0, 1), seed=0, epoch=0, num_anchors=7)
    return DrafterBatch(
        ids=ids,
        loss_mask=mask,
        hidden=torch.randn(2, 30, shape.num_features * shape.hidden_size, generator=generator),
        anchors=anchors,
        keep=keep,
        lengths=torch.tensor([25, 30]),
    )


@pytest.mark.parametrize("contiguous_only", [False, True])
def test_sums_against_a_plain_loop(shape, drafter, contiguous_only):
    frozen, batch = make_frozen(shape), make_batch(shape)
    config = LossConfig(contiguous_only=contiguous_only, chunk_size=4)
    loss, vector = DrafterLoss(drafter, frozen, shape, config)(batch)
    size = shape.block_size
    with torch.no_grad():
        tokens = block_ids(
            batch.ids, batch.anchors, batch.keep, block_size=size, mask_token_id=shape.mask_token_id
        )
        out = drafter(batch.hidden, frozen.embedding[tokens], batch.anchors, batch.keep)
        logits = (out @ frozen.head.T).unflatten(1, (-1, size))
    labels, supervised = block_labels(
        batch.ids,
        batch.loss_mask,
        batch.anchors,
        batch.keep,
        block_size=size,
        contiguous_only=contiguous_only,
    )
    weights = slot_weights(size, weights="decay", gamma=None)
    expected = torch.zeros(LossSums.size(size), dtype=torch.float64)
    layout = sums_layout(size)
    for b in range(2):
        for n in range(batch.anchors.shape[1]):
            running, any_taught = True, False
            for k in range(1, size):
                if not supervised[b, n, k]:
                    continue
                any_taught = True
                scores, label = logits[b, n, k], labels[b, n, k]
                hit = bool(scores.argmax() == label)
                running = running and hit
                expected[layout["loss"]] += weights[k] * F.cross_entropy(scores, label)
                expected[layout["weight"]] += weights[k]
                expected[layout["accepted"]] += running
                expected[layout["correct"]][k - 1] += hit
                expected[layout["count"]][k - 1] += 1
            expected[layout["blocks"]] += any_taught
    assert expected[layout["blocks"]] == 14
    assert (vector - expected).abs().max() < EXACT
    assert abs(loss - expected[0]) < EXACT
    assert not vector.requires_grad


def test_accepted_prefix():
    """Slot 0 never counts; an unsupervised slot neither counts nor breaks the run."""
    supervised = torch.tensor(
        [[[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]]]
    ).bool()
    correct = torch.tensor(
        [[[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]]]
    ).bool()
    count = int(supervised.sum())
    vector = _sums(torch.ones(count), torch.ones(count), correct, supervised)
    sums = LossSums(vector, 4)
    assert sums.part("accepted").item() == 2 + 0 + 2 + 3
    assert sums.part("blocks").item() == 4
    assert sums.block_prefix == 1 + 7 / 4
    assert sums.part("correct").tolist() == [3, 3, 3]
    assert sums.part("count").tolist() == [4, 3, 4]


def test_without_supervision_every_parameter_has_a_zero_gradient(shape, drafter):
    """DDP would wait for ever for a parameter that takes no part."""
    module = DrafterLoss(drafter, make_frozen(shape), shape, LossConfig())
    loss, vector = module(make_batch(shape, supervised=False))
    loss.backward()
    assert loss.item() == 0.0 and not vector.any()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_loss_is_float32_and_its_sums_float64(shape, drafter):
    """Also of a target whose head is of bfloat16."""
    frozen, drafter = make_frozen(shape), drafter.float()
    for dtype in (torch.float32, torch.bfloat16):
        of = TargetTensors(frozen.embedding.to(dtype), frozen.head.to(dtype), frozen.final_norm)
        loss, vector = DrafterLoss(drafter, of, shape, LossConfig())(make_batch(shape))
        assert loss.dtype == torch.float32 and loss.dim() == 0 and vector.dtype == torch.float64


def test_every_parameter_learns(shape, drafter):
    loss, _ = DrafterLoss(drafter, make_frozen(shape), shape, LossConfig())(make_batch(shape))
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_sums_add_over_a_split_of_the_batch(shape, drafter):
    """Two rows at once give the sums and the gradient of one after the other."""
    module = DrafterLoss(drafter, make_frozen(shape), shape, LossConfig())
    batch = make_batch(shape)
    loss, vector = module(batch)
    loss.backward()
    together = {n: p.grad for n, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    parts = torch.zeros_like(vector)
    for b in range(2):
        parts_of = {k: v[b : b + 1] for k, v in vars(batch).items() if v is not None}
        row = DrafterBatch(**parts_of)
        loss, vector_row = module(row)
        loss.backward()
        parts += vector_row
    assert (vector - parts).abs().max() < EXACT
    for name, parameter in drafter.named_parameters():
        whole = together[name]
        assert parameter.grad is not None and whole is not None
        assert (parameter.grad - whole).abs().max() < EXACT, name


def test_only_the_drafter_is_registered(shape, drafter):
    module = DrafterLoss(drafter, make_frozen(shape), shape, LossConfig())
    names = {"drafter." + name for name, _ in drafter.named_parameters()}
    assert {name for name, _ in module.named_parameters()} == names
    assert set(module.state_dict()) == names


def test_another_target_is_refused(shape, drafter):
    table = torch.zeros(50, shape.hidden_size)
    with pytest.raises(InputError, match=r"embedding is \(50, 32\)"):
        DrafterLoss(drafter, TargetTensors(table, table, table[0]), shape, LossConfig())
