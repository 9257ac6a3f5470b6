"""Training jobs on another objective: the target's last states in the messages, D-PACE's weights
and variable prefixes at once. Split is colocated to the bit, and resuming changes nothing."""

import json
import shutil

import pytest
import torch
from ranks import train_overrides
from run_folder import assert_same_bits, losses, slots, trace, weights

from dflashdist.config import InputError, load_config
from dflashdist.data.shards import TokenStore
from dflashdist.schedule.stream import EVALUATION
from dflashdist.train.job import TrainingJob
from dflashdist.train.sources import Batches, Rows

OBJECTIVE = [
    "loss.terms={ce: 0.5, kl: 0.3, tv: 0.2}", "loss.weights=dpace", "loss.variable_prefix=0.9",
    "loss.chunk_size=32", "drafter.block_size=6", "checkpoint.every=2", "train.max_steps=4",
    "train.accumulation_steps=2",
]  # fmt: skip


@pytest.mark.dist
def test_split_equals_colocated_and_resumes(run_ranks, tiny_overrides, tiny_store, tmp_path):
    common = [*tiny_overrides, *OBJECTIVE]
    together, apart = tmp_path / "together", tmp_path / "apart"
    run_ranks(1, train_overrides, [*common, f"run.dir={together}", "roles.layout=colocated"])
    split = [*common, f"run.dir={apart}", "roles.num_targets=1", "pipeline.delay_ms=5",
             "pipeline.checksum=true"]  # fmt: skip
    run_ranks(2, train_overrides, split)
    assert_same_bits(weights(together, 4), weights(apart, 4))
    assert losses(together) == losses(apart)
    assert_messages(apart, TokenStore.open(tiny_store).lengths)
    shutil.rmtree(apart / "checkpoints" / "step_00000004")
    run_ranks(2, train_overrides, split)
    assert_same_bits(weights(together, 4), weights(apart, 4))
    assert slots(together) == slots(apart) and len(slots(apart)) == 8


def assert_messages(folder, lengths) -> None:
    """Two tapped states and the last one, of 32 float32 numbers each, for every token."""
    received = {f["seq"]: f["bytes"] for f in trace(folder, "receive") if f["seq"] >= 0}
    rows = {seq: fact[2] for seq, fact in slots(folder).items()}
    frames = {
        size - sum(int(lengths[row]) for row in rows[seq]) * 3 * 32 * 4
        for seq, size in received.items()
    }
    assert len(received) == 8
    assert len(frames) == 1 and 0 < frames.pop() < 100  # header and trailer


def test_batches_split_the_states_and_show_prefixes_in_training_alone(tiny_overrides, tiny_store):
    held_out = ["evaluate.every=2", f"evaluate.store={tiny_store}"]
    config = load_config(None, [*tiny_overrides, *OBJECTIVE, *held_out])
    job = TrainingJob(config, 1)
    assert job.num_states == 3 and job.shape.num_features == 2
    batches = Batches(
        Rows(job),
        seed=0,
        num_anchors=8,
        block_size=6,
        features=64,
        variable_prefix=0.9,
        device=torch.device("cpu"),
    )

    def states_of(tokens) -> torch.Tensor:
        return torch.arange(int(tokens.lengths.sum()) * 96.0).view(-1, 96)

    trained, evaluated = (batches.batch(seq, states_of) for seq in (0, EVALUATION))
    assert trained.prefix is not None and trained.prefix.shape == trained.anchors.shape
    assert trained.prefix.max() > 1 and evaluated.prefix is None
    for batch in (trained, evaluated):
        start = 0
        assert batch.last is not None
        for b, n in enumerate(batch.lengths.tolist()):
            expected = torch.arange(start, start + n * 96.0).view(n, 96)
            assert torch.equal(batch.hidden[b, :n], expected[:, :64])
            assert torch.equal(batch.last[b, :n], expected[:, 64:])
            assert not batch.hidden[b, n:].any() and not batch.last[b, n:].any()
            start += n * 96


def test_a_target_that_rescales_its_logits_is_refused(tiny_overrides, tiny_target, tmp_path):
    """Before anything is loaded, and only where its distribution is read."""
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"logit_scale": 0.5}))
    overrides = [*tiny_overrides, f"target.path={folder}"]
    TrainingJob(load_config(None, overrides), 1)
    with pytest.raises(InputError, match=r"logit_scale=0\.5"):
        TrainingJob(load_config(None, [*overrides, *OBJECTIVE]), 1)
