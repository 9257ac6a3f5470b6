"""Variants train through the whole job: split equals colocated to the bit, and resume is exact."""

import pytest
from ranks import train_overrides
from run_folder import assert_same_bits, weights

pytestmark = pytest.mark.dist
VARIANTS = {
    "dflash2": [
        "drafter.variant=dflash2", "drafter.conv_group_size=8", "drafter.selector_rank=4",
        "drafter.selector_top_k=20", "drafter.sliding_window=8",
        "drafter.layer_types=[sliding_attention,sliding_attention]",
    ],
    "dspark": [
        "drafter.variant=dspark", "drafter.markov_rank=4", "loss.terms={ce: 0.1, tv: 1.8}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_split_equals_colocated(run_ranks, tiny_overrides, tmp_path, name):
    common = [*tiny_overrides, *VARIANTS[name], "train.accumulation_steps=2"]
    alone, split = tmp_path / "alone", tmp_path / "split"
    run_ranks(2, train_overrides, [*common, f"run.dir={alone}", "roles.layout=colocated"])
    run_ranks(
        3,
        train_overrides,
        [*common, f"run.dir={split}", "roles.num_targets=1", "pipeline.delay_ms=20"],
    )
    assert_same_bits(weights(alone, 6), weights(split, 6))
    first, last = weights(alone, 4), weights(alone, 6)
    still = [key for key in first if (first[key] == last[key]).all()]
    assert not still  # every parameter is trained
    resumed = tmp_path / "resumed"
    run_ranks(
        3,
        train_overrides,
        [*common, f"run.dir={resumed}", "roles.num_targets=1",
         f"train.resume={alone / 'checkpoints/step_00000004'}"],
    )  # fmt: skip
    assert_same_bits(weights(alone, 6), weights(resumed, 6))
