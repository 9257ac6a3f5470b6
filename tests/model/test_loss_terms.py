"""The loss module with every kind of term and weight, against plain loops over its slots."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from rounding import EXACT
from variants import variant_drafter

from dflashdist.config import LossConfig
from dflashdist.model.blocks import block_ids, block_labels, draw_anchors, draw_prefixes
from dflashdist.model.drafter import Drafter, greedy_drafts
from dflashdist.model.loss import DrafterBatch, DrafterLoss, LossSums
from dflashdist.model.target_files import TargetTensors

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, GAMMA = 30, 2.5
ROWS = (4, 9)


@pytest.fixture
def frozen(shape) -> TargetTensors:
    draw = torch.Generator().manual_seed(21)
    table = torch.randn(2, shape.vocab_size, shape.hidden_size, generator=draw)
    return TargetTensors(
        table[0], table[1] * shape.hidden_size**-0.5, torch.ones(shape.hidden_size)
    )


def make_batch(shape, *, prefix: float | None = None) -> DrafterBatch:
    """Two rows; the second has a gap in its loss mask at 12 and 13."""
    draw = torch.Generator().manual_seed(22)
    mask = torch.zeros(2, WIDTH, dtype=torch.bool)
    mask[0, 4:20] = True
    mask[1, 8:28] = True
    mask[1, 12:14] = False
    anchors, keep = draw_anchors(mask, ROWS, seed=0, epoch=0, num_anchors=9)
    where = {"seed": 0, "epoch": 0, "block_size": shape.block_size}
    return DrafterBatch(
        ids=torch.randint(0, 90, (2, WIDTH), generator=draw),
        loss_mask=mask,
        hidden=torch.randn(2, WIDTH, shape.num_features * shape.hidden_size, generator=draw),
        anchors=anchors,
        keep=keep,
        lengths=torch.tensor([25, WIDTH]),
        last=torch.randn(2, WIDTH, shape.hidden_size, generator=draw),
        prefix=None if prefix is None else draw_prefixes(mask, anchors, ROWS, base=prefix, **where),
    )


def term(name: str, logits, teacher_logits, label) -> torch.Tensor:
    log_p, log_t = F.log_softmax(logits, -1), F.log_softmax(teacher_logits, -1)
    p, t = log_p.exp(), log_t.exp()
    return {
        "ce": -log_p[label],
        "hard": -log_p[teacher_logits.argmax()],
        "kl": (t * (log_t - log_p)).sum(),
        "reverse_kl": (p * (log_p - log_t)).sum(),
        "tv": (p - t).abs().sum() / 2,
    }[name]


def plain_loss(drafter, frozen, batch, config: LossConfig) -> tuple[torch.Tensor, float]:
    """Loss sum, for autograd, and its denominator: position by position, all logits at once."""
    shape = drafter.shape
    size = shape.block_size
    prefix = torch.ones_like(batch.anchors) if batch.prefix is None else batch.prefix
    tokens = torch.full((*batch.anchors.shape, size), shape.mask_token_id)
    for b, n in torch.nonzero(batch.keep).tolist():
        for k in range(int(prefix[b, n])):
            tokens[b, n, k] = batch.ids[b, batch.anchors[b, n] + k]
    output = drafter(batch.hidden, frozen.embedding[tokens.flatten(1)], batch.anchors, batch.keep)
    logits = (output @ frozen.head.T).unflatten(1, (-1, size))
    loss, weight = torch.zeros(()), 0.0
    for b, n in torch.nonzero(batch.keep).tolist():
        anchor, shown = int(batch.anchors[b, n]), int(prefix[b, n])
        taught = []  # (slot, position of its label)
        for k in range(size):
            at = anchor + k + shape.ahead
            if at == anchor:
                continue
            if at >= WIDTH or not batch.loss_mask[b, at]:
                if config.contiguous_only:
                    break
                continue
            if at >= anchor + shown:
                taught.append((k, at))
        values = {name: [] for name in {"ce", *config.terms}}
        for k, at in taught:
            teacher_logits = frozen.head @ batch.last[b, at - 1]
            for name, found in values.items():
                found.append(term(name, logits[b, n, k], teacher_logits, batch.ids[b, at]))
        for name, share in config.terms.items():
            survival, reached = 1.0, []
            for value in values[name if config.dpace_by == "terms" else "ce"]:
                q = (1 - config.dpace_alpha) * math.exp(-value.item()) + config.dpace_alpha
                survival *= q
                reached.append(survival)
            for index, (_, at) in enumerate(taught):
                if config.weights == "dpace":
                    w = sum(reached[index:])
                else:
                    uniform = config.weights == "uniform"
                    w = 1.0 if uniform else math.exp(-(at - anchor - shown) / GAMMA)
                loss = loss + w * share * values[name][index]
        for _, at in taught:
            decayed = config.weights == "decay"
            weight += math.exp(-(at - anchor - shown) / GAMMA) if decayed else 1.0
    return loss, weight


CASES = {
    "kl": {"terms": {"kl": 1.0}},
    "mixture": {"terms": {"ce": 0.1, "tv": 0.9, "reverse_kl": 0.5, "hard": 0.3}},
    "hard uniform": {"terms": {"hard": 1.0}, "weights": "uniform"},
    "dpace": {"weights": "dpace"},
    "dpace kl": {"weights": "dpace", "dpace_alpha": 0.2, "terms": {"kl": 1.0}},
    "dpace by terms": {
        "weights": "dpace", "dpace_by": "terms", "dpace_alpha": 0.2,
        "terms": {"ce": 0.1, "tv": 0.9, "kl": 0.7, "reverse_kl": 0.5, "hard": 0.3},
    },
}  # fmt: skip


@pytest.mark.parametrize("contiguous_only", [True, False])
@pytest.mark.parametrize("prefix", [None, 0.9], ids=["", "prefix"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_against_a_plain_loop(
    shape, drafter, frozen, case, prefix, contiguous_only
):
    config = LossConfig(**CASES[case], gamma=GAMMA, chunk_size=5, contiguous_only=contiguous_only)
    batch = make_batch(shape, prefix=prefix)
    check(drafter, frozen, batch, config)


def check(drafter, frozen, batch, config) -> None:
    shape = drafter.shape
    loss, vector = DrafterLoss(drafter, frozen, shape, config)(batch)
    sums = LossSums(vector, shape.block_size + shape.ahead)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    ours = torch.autograd.grad(loss, parameters, allow_unused=True)
    plain, weight = plain_loss(drafter, frozen, batch, config)
    expected = torch.autograd.grad(plain, parameters, allow_unused=True)
    assert abs(loss - plain) < EXACT and abs(sums.part("loss") - plain) < EXACT
    assert abs(sums.weight - weight) < EXACT
    for tensor, other in zip(ours, expected, strict=True):
        assert (tensor is None) == (other is None)
        if tensor is not None:
            assert (tensor - other).abs().max() < EXACT


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_where_the_anchor_drafts_too(shape, frozen, weights):
    """DSpark's labels: slot k says a + k + 1, its decay begins at slot 0."""
    dspark = dataclasses.replace(shape, variant="dspark")  # without its heads
    drafter = Drafter(dspark)
    drafter.reset_parameters("fan_in", seed=1)
    config = LossConfig(terms={"ce": 0.1, "tv": 0.9}, gamma=GAMMA, chunk_size=5, weights=weights)
    check(drafter, frozen, make_batch(dspark), config)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 1000])
def test_chunks_change_nothing(shape, drafter, frozen, chunk_size):
    """D-PACE's weights need whole blocks, whatever a chunk holds."""
    batch = make_batch(shape)
    vectors = []
    for size in (chunk_size, 12):
        config = LossConfig(weights="dpace", chunk_size=size)
        vectors.append(DrafterLoss(drafter, frozen, shape, config)(batch)[1])
    assert (vectors[0] - vectors[1]).abs().max() < EXACT


def test_a_perfect_drafter_has_no_soft_loss(shape, drafter, frozen):
    """Where the target's states are the drafter's own, kl and reverse_kl are 0, and so is their
    gradient (that of tv jumps there)."""
    batch = make_batch(shape)
    tokens = block_ids(
        batch.ids,
        batch.anchors,
        batch.keep,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    # One block a row, or two blocks would want two states at one position.
    batch = dataclasses.replace(batch, anchors=batch.anchors[:, :1], keep=batch.keep[:, :1])
    tokens = tokens[:, : shape.block_size]
    with torch.no_grad():
        out = drafter(batch.hidden, frozen.embedding[tokens], batch.anchors, batch.keep)
    for b in range(2):
        for k in range(1, shape.block_size):
            batch.last[b, batch.anchors[b, 0] + k - 1] = out[b, k]
    config = LossConfig(terms={"kl": 1.0, "reverse_kl": 1.0})
    loss, _ = DrafterLoss(drafter, frozen, shape, config)(batch)
    loss.backward()
    assert abs(loss.item()) < EXACT
    assert max(p.grad.abs().max().item() for p in drafter.parameters()) < EXACT


def test_without_the_last_state_a_soft_term_is_refused(shape, drafter, frozen):
    batch = dataclasses.replace(make_batch(shape), last=None)
    module = DrafterLoss(drafter, frozen, shape, LossConfig(terms={"kl": 1.0}))
    with pytest.raises(AssertionError, match="last states"):
        module(batch)


def test_prefix_one_is_no_prefix(shape, drafter, frozen):
    """To the bit: loss, sums, inputs and labels."""
    batch = make_batch(shape)
    ones = dataclasses.replace(batch, prefix=torch.ones_like(batch.anchors))
    module = DrafterLoss(drafter, frozen, shape, LossConfig())
    (loss, vector), (other, other_vector) = module(batch), module(ones)
    assert torch.equal(loss, other) and torch.equal(vector, other_vector)


def test_batch_moves_with_what_it_has(shape):
    batch = make_batch(shape, prefix=0.9)
    moved = batch.to("meta")
    assert moved.last is not None and moved.last.device.type == "meta"
    assert moved.prefix is not None and moved.prefix.device.type == "meta"
    assert dataclasses.replace(batch, last=None).to("cpu").last is None


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_accuracy_is_of_what_the_variant_drafts(shape, frozen, name):
    """A text that says what the drafter drafts, by its own rule, is right in every slot."""
    drafter = variant_drafter(shape, name).eval()
    shape = drafter.shape
    batch = make_batch(shape)
    one = {"anchors": torch.tensor([[6], [14]]), "keep": torch.ones(2, 1, dtype=torch.bool)}
    batch = dataclasses.replace(batch, **one)
    size = {"block_size": shape.block_size, "mask_token_id": shape.mask_token_id}
    tokens = block_ids(batch.ids, batch.anchors, batch.keep, **size)
    with torch.no_grad():
        states = drafter(batch.hidden, frozen.embedding[tokens], batch.anchors, batch.keep)
        first = batch.ids.gather(1, batch.anchors).squeeze(1)
        drafts = greedy_drafts(drafter, states, first, frozen.head)
        plain = (states @ frozen.head.T).argmax(-1)[:, 1 - shape.ahead :]
    assert name == "dflash" or not torch.equal(plain, drafts), "the variant's head has no say"
    for row, anchor, said in zip(batch.ids, (6, 14), drafts, strict=True):
        row[anchor + 1 : anchor + 1 + len(said)] = said
    _, vector = DrafterLoss(drafter, frozen, shape, LossConfig())(batch)
    sums = LossSums(vector, shape.block_size + shape.ahead)
    assert sums.accuracy == [1.0] * drafts.shape[1]
    assert sums.block_prefix == 1 + drafts.shape[1]


@pytest.mark.parametrize("weights", ["decay", "uniform", "dpace"])
def test_the_confidence_is_weighted_by_distance(shape, frozen, weights):
    """Also under D-PACE, whose weights come from another loss."""
    drafter = variant_drafter(shape, "dspark")
    shape = drafter.shape
    batch = make_batch(shape)
    losses = {}
    for share in (0.0, 1.0):
        config = LossConfig(weights=weights, gamma=GAMMA, confidence=share)
        losses[share] = DrafterLoss(drafter, frozen, shape, config)(batch)[0].item()
    size = {"block_size": shape.block_size, "mask_token_id": shape.mask_token_id}
    tokens = block_ids(batch.ids, batch.anchors, batch.keep, **size)
    _, supervised = block_labels(
        batch.ids, batch.loss_mask, batch.anchors, batch.keep, block_size=shape.block_size,
        contiguous_only=True, ahead=1,
    )  # fmt: skip
    states = drafter(batch.hidden, frozen.embedding[tokens], batch.anchors, batch.keep)
    states = states.view(*supervised.shape, -1)
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    expected = 0.0
    for b, n, k in supervised.nonzero().tolist():
        place = int(batch.anchors[b, n]) + k
        embedded = drafter.markov_head.markov_w1(batch.ids[b, place])
        logits = frozen.head @ states[b, n, k] + drafter.markov_head.markov_w2(embedded)
        overlap = 1 - term("tv", logits, frozen.head @ batch.last[b, place], 0)
        chance = drafter.confidence_head(states[b, n, k][None], embedded[None])[0].sigmoid()
        loss = -overlap * chance.log() - (1 - overlap) * (1 - chance).log()
        expected += loss.item() * (1.0 if weights == "uniform" else math.exp(-k / GAMMA))
    assert abs(losses[1.0] - losses[0.0] - expected) < EXACT
