"""The job worked out: `plan` and `train` refuse the same, in the same words, and agree on it."""

import json

import numpy as np
import pytest
import torch

from dflashdist.cli import main
from dflashdist.cluster.roles import assign_roles
from dflashdist.cluster.transport import HEADER, TRAILER
from dflashdist.config import InputError, RolesConfig, load_config
from dflashdist.data.shards import TokenStore, TokenStoreWriter
from dflashdist.data.tokenizer import TargetTokenizer
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterLoss
from dflashdist.model.target_files import TargetTensors
from dflashdist.schedule.report import MESSAGE_EXTRA_BYTES
from dflashdist.train.drafter_rank import run_widest, zero_states
from dflashdist.train.job import TrainingJob, check_mask_token
from dflashdist.train.sources import Batches, Rows, message_specs


def made(overrides: list[str], *more: str, world: int | None = None) -> TrainingJob:
    return TrainingJob(load_config(None, [*overrides, *more]), world)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["train.max_steps=null"], "train.max_steps and train.epochs: give one of them"),
        (["train.epochs=1"], "both set"),
        (["train.max_steps=null", "train.epochs=1e-9"], "trains on nothing"),
        (["gates=[{metric: loos, below: 3.0}]"], "gates[0].metric=loos: not a metric"),
        (["gates=[{metric: eval/acceptance_length, above: 1.5}]"], "no such round of evaluation"),
        (["gates=[{metric: loss}]"], "set below, above or not_below"),
        (["evaluate.every=2", "evaluate.store=nowhere"], "nowhere: no token store"),
        (["evaluate.every=2"], "has no validation split"),
        (["data.store=nowhere"], "nowhere: no token store"),
        (["data.store=null"], "data.store is not set"),
        (["data.max_length=20"], "has rows of up to"),
        (["schedule.max_tokens=64"], "schedule.max_tokens=64: row"),
        (["schedule.max_anchors=4"], "schedule.max_anchors=4: row"),
        (["schedule.bucket_edges=[10]"], "below the longest row"),
        (["schedule.min_share=most"], "a share from 0 to 1, or auto"),
        (["roles.layout=colocated", "roles.num_targets=1"], "roles.num_targets=1: a colocated job"),
        (["target.tensor_parallel=2"], "target.tensor_parallel=2"),
        (["target.path=./nowhere"], "no such folder"),
        (["drafter.target_layer_ids=[1,6]"], "6 is no layer"),
        (["drafter.num_attention_heads=3"], "drafter.num_attention_heads=3"),
        (["drafter.mask_token_id=5000"], "drafter.mask_token_id=5000"),
        (["drafter.mask_token_id=EOS"], "is an end-of-turn token of the target"),
        (["drafter.mask_token_id=USED"], "times in the rows"),
        (["seed=-1"], "seed=-1: from 0 to below 2^64"),
        (["evaluate.seed=18446744073709551616"], "from 0 to below 2^64"),
        (["optim.lr=0"], "optim.lr=0.0: must be greater than 0"),
    ],
)
def test_plan_and_train_refuse_the_same(
    tiny_overrides, tiny_store, tiny_target, tmp_path, capsys, monkeypatch, change, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").touch()
    end, used = (
        TargetTokenizer.read(tiny_target).end_ids[0],
        TokenStore.open(tiny_store).row(0)[0][-2],
    )
    change = [item.replace("EOS", str(end)).replace("USED", str(used)) for item in change]
    errors = []
    for command in ("plan", "train"):
        assert main([command, "empty.yaml", *tiny_overrides, *change]) == 2
        errors.append(capsys.readouterr().err.removeprefix(f"dflashdist {command}: "))
    assert errors[0] == errors[1] and said in errors[0] and errors[0].count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_plan_needs_neither_store_nor_target_and_says_what_it_lacks(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.arange(20, 400))
    (tmp_path / "empty.yaml").touch()
    some = [str(tmp_path / "empty.yaml"), f"data.lengths={tmp_path / 'lengths.npy'}"]
    assert main(["plan", *some, "train.epochs=1", "evaluate.every=5"]) == 0
    said = capsys.readouterr().out
    assert "NOTE: target.path is not set" in said and "rounds of evaluation are not planned" in said
    assert main(["train", *some, "train.epochs=1"]) == 2
    assert "data.store is not set" in capsys.readouterr().err


@pytest.mark.parametrize("rounds", [[], ["evaluate.every=3"]])
def test_messages_are_of_the_planned_size(tiny_overrides, tiny_store, tmp_path, capsys, rounds):
    (tmp_path / "empty.yaml").touch()
    more = [*rounds, *(["evaluate.max_rows=20", f"evaluate.store={tiny_store}"] if rounds else [])]
    assert main(["plan", str(tmp_path / "empty.yaml"), *tiny_overrides, *more, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    job = made(tiny_overrides, *more)
    spec_of = message_specs(job, torch.device("cpu"))
    sizes = [spec_of(seq).num_bytes for seq in range(job.plan.micro_batches_per_epoch)]
    if rounds:
        sizes += [spec_of(seq).num_bytes for seq in job.stream.round(3)]
        assert report["evaluation"] == {
            "every": 3, "rounds": 2, "num_rows": 20, "micro_batches": job.stream.round_size,
        }  # fmt: skip
        assert any("rows that are trained on" in note for note in report["notes"])
    else:
        assert report["evaluation"] is None
    assert report["max_message_bytes"] == max(sizes)
    assert report["fingerprint"] == job.plan.fingerprint
    assert HEADER.size + TRAILER.size == MESSAGE_EXTRA_BYTES
    assert report["dtype"] == "float32" and job.config.train.device == "cpu"


@pytest.mark.parametrize(
    ("roles", "ranks"),
    [
        ({}, 1), ({"num_drafters": 1}, 1), ({"num_drafters": 4}, 5), ({"num_targets": 2}, 3),
        ({"num_targets": 2, "num_drafters": 3}, 5), ({"layout": "split"}, 2),
        ({"layout": "colocated", "num_drafters": 4}, 4),
    ],
)  # fmt: skip
def test_roles_of_a_plan_are_those_of_a_job_with_as_many_ranks(roles, ranks):
    planned = assign_roles(RolesConfig(**roles), 1, None)
    assert planned.world_size == ranks
    assert planned == assign_roles(RolesConfig(**roles), 1, ranks)


def test_a_plan_for_more_ranks(tiny_overrides, tmp_path, capsys):
    (tmp_path / "empty.yaml").touch()
    asked = ["plan", str(tmp_path / "empty.yaml"), *tiny_overrides]
    assert main([*asked, "--ranks", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_drafters"], report["num_targets"], report["num_ranks"]) == (3, 1, 4)
    assert report["fingerprint"] == made(tiny_overrides, world=4).plan.fingerprint
    assert main(asked) == 0
    assert "1 rank, colocated" in capsys.readouterr().out


def test_nothing_to_learn_is_refused_and_empty_micro_batches_are_told(
    tiny_overrides, tiny_store, tmp_path
):
    source = TokenStore.open(tiny_store)
    keys = ("tokenizer_fingerprint", "tokenizer_length", "vocab_size", "pad_id")
    settings = {key: source.meta[key] for key in keys} | {"max_length": 200, "min_supervised": 2}
    for name, taught in (("none", 0), ("few", 3)):
        with TokenStoreWriter(tmp_path / name, settings, overwrite=True) as writer:
            for row in range(60):
                mask = np.zeros(40, dtype=np.uint8)
                mask[5:9] = row < taught
                writer.add(np.arange(3, 43, dtype=np.int32), mask)
            writer.notes = {"target": "x", "template": "x"}
    with pytest.raises(InputError, match="no row has two supervised tokens"):
        made(tiny_overrides, f"data.store={tmp_path / 'none'}")
    job = made(tiny_overrides, f"data.store={tmp_path / 'few'}")
    assert any("micro-batches have no anchor" in note for note in job.notes)


def test_a_gap_above_a_step_is_told(tiny_overrides):
    assert made(tiny_overrides, "schedule.min_share=auto").notes == []
    notes = made(tiny_overrides, "schedule.bucket_edges=[24,40,200]").notes
    assert len(notes) == 1 and "is missing in some steps" in notes[0]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_mask_token_that_rows_hold(tiny_overrides, tiny_store, tiny_target, allowed):
    tokenizer = TargetTokenizer.read(tiny_target)
    store = TokenStore.open(tiny_store)
    ids = np.concatenate([store.row(row)[0] for row in range(store.num_rows)])
    values, counts = np.unique(ids, return_counts=True)
    reserved = {*tokenizer.end_ids, tokenizer.pad_id}
    common, times = next(
        (int(value), int(count))
        for value, count in sorted(zip(values, counts, strict=True), key=lambda one: -one[1])
        if int(value) not in reserved
    )
    assert store.count_token(common) == times > 1
    job = made(
        tiny_overrides, f"drafter.mask_token_id={common}",
        f"drafter.mask_token_in_data={str(allowed).lower()}",
    )  # fmt: skip
    if allowed:
        check_mask_token(job, tokenizer)
        assert f"occurs {times:,} times" in job.notes[-1]
    else:
        with pytest.raises(InputError, match=f"occurs {times:,} times in the rows; take"):
            check_mask_token(job, tokenizer)
    for bad in (*tokenizer.end_ids, tokenizer.pad_id):
        with pytest.raises(InputError, match=f"mask_token_id={bad}: is "):
            check_mask_token(made(tiny_overrides, f"drafter.mask_token_id={bad}"), tokenizer)


def test_the_widest_are_those_of_the_epoch(tiny_overrides):
    job = made(tiny_overrides)
    batches = [job.plan.micro_batch(seq) for seq in range(job.plan.micro_batches_per_epoch)]
    padded = [len(one.rows) * one.width for one in batches]
    assert max(padded) in [padded[seq] for seq in job.widest()]
    costs = [one.cost - size for one, size in zip(batches, padded, strict=True)]
    assert max(costs) in [costs[seq] for seq in job.widest()]
    assert not job.warms_up("cpu") and job.warms_up("cuda")
    assert made(tiny_overrides, "train.warm_up_widest=always").warms_up("cpu")
    assert not made(tiny_overrides, "train.warm_up_widest=never").warms_up("cuda")


def test_the_widest_run_first_and_nothing_of_it_stays(tiny_overrides, tiny_target):
    job, cpu = made(tiny_overrides), torch.device("cpu")
    drafter = Drafter(job.shape)
    loss = DrafterLoss(drafter, TargetTensors.load(tiny_target), job.shape, job.config.loss)
    batches = Batches(
        Rows(job), seed=0, num_anchors=8, block_size=4, variable_prefix=None, device=cpu,
        features=job.shape.num_features * job.shape.hidden_size,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    ran, touched = [], []
    loss.register_forward_pre_hook(lambda _, given: ran.append(given[0].ids.shape))
    first = next(drafter.parameters())
    first.register_hook(lambda gradient: touched.append(gradient.shape))
    run_widest(job, loss, batches, zero_states(job, cpu), cpu)
    planned = [job.plan.micro_batch(seq) for seq in job.widest()]
    assert ran == [(len(one.rows), one.width) for one in planned]
    assert len(touched) == len(planned)
    assert all(parameter.grad is None for parameter in drafter.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
