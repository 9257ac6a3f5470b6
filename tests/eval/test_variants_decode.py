"""Every variant of the drafter decodes losslessly, and teacher-forced counting follows its rule."""

import pytest
import torch
from rounding import in_float64
from variants import CHANGES, WORDS, target_of_few_words, variant_drafter

from dflashdist.config import DrafterConfig
from dflashdist.eval.decode import CachedTarget, Rule, decode_plain, decode_speculative
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced

PROMPTS = [[first % 7, 3, 5, first % 3, 2, 6, 1][: 3 + first % 5] for first in range(24)]


@pytest.fixture(scope="module")
def target():
    """In float64: of so few words, two are soon so near that rounding would decide."""
    return CachedTarget(in_float64(target_of_few_words()), (0, 2))


@pytest.fixture(scope="module")
def shape(target):
    settings = DrafterConfig(
        num_layers=2, block_size=5, target_layer_ids=[0, 2], mask_token_id=WORDS - 1
    )
    return DrafterShape.from_target(target.model.config.to_dict(), None, settings)


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_is_plain_and_is_counted_without_decoding(target, shape, name):
    drafter = variant_drafter(shape, name, seed=3).double().eval()
    drafts = drafter.shape.num_drafts
    rule = Rule(24, end_ids=(0,))
    plain, _ = decode_plain(target, PROMPTS, rule)
    fast, _ = decode_speculative(target, drafter, PROMPTS, rule)
    assert [one.tokens for one in fast] == [one.tokens for one in plain]
    sums = [AcceptanceSums.of_answer(a.emitted, a.offered, a.accepted, drafts) for a in fast]
    served = AcceptanceSums.total(sums, drafts)
    assert served.part("accepted")[:3].min() > 0
    rows = [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS, fast, strict=True)]
    ids, mask, lengths = padded(rows), padded([[0] * len(p) for p in PROMPTS], 1), []
    for row, one, line in zip(rows, fast, mask, strict=True):
        lengths.append(len(row))
        line[len(row) :] = 0
        assert line.sum() == len(one.tokens)
    nothing = torch.zeros(len(ids), 1, dtype=torch.long)
    with torch.no_grad():
        target.last_states(ids)
        hidden = target.hidden()
    batch = DrafterBatch(ids, mask.bool(), hidden, nothing, nothing.bool(), torch.tensor(lengths))
    frozen = TargetTensors(target.embedding, target.head, torch.ones(32))
    forced = teacher_forced(drafter, frozen, batch, max_new_tokens=24)
    # Counts are exact; the answers' own means are added in another order.
    torch.testing.assert_close(forced.vector, served.vector, atol=0, rtol=1e-12)


def padded(rows, value=0):
    width = 31
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_sampled_is_the_targets_distribution(target, shape, name):
    """The second and third token, drawn in one pass or two, 3,000 times, against the target's."""
    drafter = variant_drafter(shape, name).double().eval()
    rule = Rule(3, temperature=0.8, generator=torch.Generator().manual_seed(5))
    prompt, times = PROMPTS[6], 3000
    answers, _ = decode_speculative(target, drafter, [prompt] * times, rule)
    drawn = torch.tensor([one.tokens for one in answers])
    assert {len(one.emitted) for one in answers} == {1, 2}  # drafts are taken and refused
    with torch.no_grad():
        pairs = torch.cartesian_prod(torch.arange(WORDS), torch.arange(WORDS))
        ids = torch.cat([torch.tensor([prompt]).expand(len(pairs), -1), pairs], 1)
        p = rule.probs(target.model(ids).logits[:, -3:]).double()
    first, second = p[::WORDS, 0], p[::WORDS, 1]  # [WORDS, WORDS], of each first token
    assert z(drawn[:, 0], first[0]) < 4
    joint = first[0][:, None] * second
    assert z(drawn[:, 0] * WORDS + drawn[:, 1], joint.flatten()) < 4
    whole = joint[..., None] * p[:, 2].view(WORDS, WORDS, WORDS)
    index = (drawn[:, 0] * WORDS + drawn[:, 1]) * WORDS + drawn[:, 2]
    assert z(index, whole.flatten()) < 4


def z(drawn: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean; cells that expect less than 5
    are one. With the seed fixed it is a number; 4 would be met by chance once in 2,000 seeds."""
    expected = probs * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = max(1, len(counts) - 1)
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
