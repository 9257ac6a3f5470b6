"""What training gives does not depend on how the work is spread, nor on being interrupted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import train_overrides
from run_folder import assert_same_bits, losses, scalars, slots, trace, weights

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("numbers", "objective"),
    [
        ((1, 2, 4), []),
        ((1, 2), ["drafter.variant=dspark", "loss.terms={ce: 0.1, tv: 1.8}", "loss.weights=dpace"]),
        ((1, 2), ["drafter.variant=dflash2", "drafter.selector_top_k=4", "drafter.selector_rank=8",
                  "loss.terms={kl: 1.0, hard: 0.5}", "loss.variable_prefix=0.8"]),
    ],
    ids=["plain", "dspark", "dflash2"],
)  # fmt: skip
def test_number_of_drafters(run_ranks, tiny_overrides, tmp_path, numbers, objective):
    """W = 4 held: the sums are the same but for the order of float32 additions, about 1e-7 of a
    gradient. AdamW divides each gradient by its own size, so it can blow that up where a gradient
    is itself only rounding noise; eps well above the noise keeps the comparison about the sums."""
    for drafters in numbers:
        run_ranks(
            drafters,
            train_overrides,
            [
                *tiny_overrides, f"run.dir={tmp_path / str(drafters)}", "roles.layout=colocated",
                f"train.accumulation_steps={4 // drafters}", "optim.eps=1e-4", *objective,
            ],
        )  # fmt: skip
    reference, reference_losses = weights(tmp_path / "1", 6), losses(tmp_path / "1")
    for drafters in map(str, numbers[1:]):
        other, other_losses = weights(tmp_path / drafters, 6), losses(tmp_path / drafters)
        assert slots(tmp_path / drafters).keys() == slots(tmp_path / "1").keys()
        for step, loss in reference_losses.items():
            assert other_losses[step] == pytest.approx(loss, rel=1e-6)
        for name, tensor in reference.items():
            # Weights of size 1, of the same kernels on the same shapes: 8 roundings in 6 steps.
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("drafters", [1, 2])
def test_split_equals_colocated(run_ranks, tiny_overrides, tmp_path, drafters):
    """Bit-equal for 1, 2 and 3 targets with random delays in targets, prefetchers and sends, and
    with the widest micro-batches run first; the queue never holds more than its credit."""
    common = [*tiny_overrides, f"train.accumulation_steps={4 // drafters}"]
    run_ranks(
        drafters, train_overrides, [*common, f"run.dir={tmp_path / '0'}", "roles.layout=colocated"]
    )
    for targets, depth in ((1, 5), (2, 12), (3, 1)):
        folder = tmp_path / str(targets)
        run_ranks(
            drafters + targets,
            train_overrides,
            [*common, f"run.dir={folder}", f"roles.num_targets={targets}",
             f"pipeline.hidden_state_queue_depth={depth}", "pipeline.delay_ms=20",
             "pipeline.checksum=true",
             f"train.warm_up_widest={'always' if targets == 2 else 'never'}"],
        )  # fmt: skip
        assert_same_bits(weights(tmp_path / "0", 6), weights(folder, 6))
        assert_shown(folder)
        assert slots(folder) == slots(tmp_path / "0")
        held, most = 0, 0
        for fact in sorted(
            trace(folder, "publish") + trace(folder, "consume"), key=lambda f: f["ns"]
        ):
            held += 1 if fact["event"] == "publish" else -1
            most = max(most, held)
        assert held == 0 and most <= depth
        assert_rules_of_nccl(folder, range(drafters), range(drafters, drafters + targets))


def assert_shown(folder: Path) -> None:
    """What tensorboard must have, and that shares of time are shares."""
    points = scalars(folder)
    assert {
        "loss", "block_prefix", "accuracy/all", "accuracy/position_01", "accuracy/position_03",
        "lr", "grad_norm", "skipped_steps", "empty_micro_batches", "padding_efficiency",
        "queue_depth",
        "tokens_per_second/drafters", "time/drafters_wait",
    } <= points.keys()  # fmt: skip
    assert any(name.startswith("bucket_micro_batches/") for name in points)
    for role in ("drafters", "targets"):  # of targets only once a sign of life, one a second, came
        for step in points.get(f"time/{role}_wait", ()):
            parts = [
                points[f"time/{role}_{part}"][step] for part in ("wait", "transfer", "compute")
            ]
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(1, abs=1e-6)  # float32 in the file


def assert_rules_of_nccl(folder: Path, drafters: range, targets: range) -> None:
    """What NCCL needs and gloo does not check: each pair sends and receives the same messages in
    the same increasing order, with sizes known to both; one thread issues a rank's operations;
    every pair was connected first, in one order."""
    sent, received = trace(folder, "send"), trace(folder, "receive")
    for facts in (sent, received):
        for rank in {fact["rank"] for fact in facts}:
            assert {fact["thread"] for fact in facts if fact["rank"] == rank} == {"transport"}
    for target in targets:
        for drafter in drafters:
            out = [
                (f["seq"], f["bytes"]) for f in sent if (f["rank"], f["peer"]) == (target, drafter)
            ]
            into = [
                (f["seq"], f["bytes"])
                for f in received
                if (f["rank"], f["peer"]) == (drafter, target)
            ]
            assert out == into
            assert out[0][0] == -1, "the pair was not warmed up"
            assert out == sorted(set(out)), "not in increasing order"
    for rank in [*drafters, *targets]:
        mine = [f["peer"] for f in sent + received if f["rank"] == rank and f["seq"] == -1]
        assert mine == sorted(mine)


def test_partial_last_step(run_ranks, tiny_overrides, tmp_path):
    """One epoch whose micro-batches do not fill the last step: every row once, nothing repeated."""
    folder = tmp_path / "epoch"
    overrides = [*tiny_overrides, f"run.dir={folder}", "train.max_steps=null", "train.epochs=1",
                 "roles.num_targets=1", "train.accumulation_steps=3",
                 "schedule.max_anchors=100"]  # fmt: skip
    run_ranks(4, train_overrides, overrides)
    facts = json.loads((folder / "plan.json").read_text())
    assert (
        facts["micro_batches_per_epoch"] % 9
        and facts["num_steps"] * 9 > facts["micro_batches_per_epoch"]
    )
    rows = sorted(row for _, _, rows in slots(folder).values() for row in rows)
    assert rows == list(range(120))


def test_stopped_and_resumed_with_other_roles(run_ranks, tiny_overrides, tmp_path):
    """4 steps by 1 drafter and 2 targets, then the rest by 1 target: bit-equal to the unbroken run,
    as the number of targets changes nothing. The learning rate looks ahead to the same end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, train_overrides, [*tiny_overrides, f"run.dir={whole}", "roles.num_targets=1"])
    run_ranks(3, train_overrides, [*tiny_overrides, f"run.dir={parts}", "roles.num_targets=2"])
    shutil.rmtree(parts / "checkpoints" / "step_00000006")
    run_ranks(2, train_overrides, [*tiny_overrides, f"run.dir={parts}", "roles.num_targets=1"])
    assert_same_bits(weights(whole, 6), weights(parts, 6))
    assert slots(whole) == slots(parts)
    assert [fact["step"] for fact in trace(parts, "start") if fact["rank"] == 0] == [0, 4]
    assert losses(whole) == losses(parts) and list(losses(parts)) == [1, 2, 3, 4, 5, 6]
    optimizers = [
        torch.load(f / "checkpoints/step_00000006/trainer/optimizer.pt", weights_only=True)
        for f in (whole, parts)
    ]
    for index, state in optimizers[0]["state"].items():
        assert torch.equal(state["exp_avg_sq"], optimizers[1]["state"][index]["exp_avg_sq"])
