"""Rounds of evaluation inside a run: training does not notice them, every held-out row is counted
once, nobody waits for ever, and a stopped run goes on with the round that it owes."""

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks, train_overrides
from run_folder import assert_same_bits, losses, scalars, slots, trace, weights

from dflashdist.cluster.world import Place
from dflashdist.config import CheckpointConfig, InputError, load_config
from dflashdist.data.shards import TokenStore, TokenStoreWriter, collate
from dflashdist.model.blocks import pack
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced
from dflashdist.schedule.stream import EVALUATION
from dflashdist.train.checkpoint import SAME, Checkpoints
from dflashdist.train.evaluation import RoundLog
from dflashdist.train.job import TrainingJob
from dflashdist.train.optim import build_optimizer
from dflashdist.train.resume import Start

VOCABULARY = 200  # of the tiny target, spare rows aside
HELD_OUT, MAX_ROWS, STEPS = 50, 30, 6


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_target) -> Path:
    """Rows of mostly one token, which a few steps learn, with a validation split inside."""
    from dflashdist.data.chat import ChatTokenizer

    folder = tmp_path_factory.mktemp("easy") / "store"
    write_store(folder, 120, 1, ChatTokenizer.load(tiny_target).tokenizer_fingerprint)
    write_store(
        folder / "validation", HELD_OUT, 2, ChatTokenizer.load(tiny_target).tokenizer_fingerprint
    )
    return folder


def write_store(folder: Path, rows: int, seed: int, tokenizer: str, scale: int = 1) -> None:
    draw = np.random.default_rng(seed)
    settings = {
        "target": "t", "tokenizer_fingerprint": tokenizer, "tokenizer_length": VOCABULARY,
        "vocab_size": VOCABULARY + 8, "pad_id": 0, "max_length": 200, "min_supervised": 2,
    }  # fmt: skip
    with TokenStoreWriter(folder, settings) as writer:
        for _ in range(rows):
            length = scale * int(np.clip(draw.lognormal(3.3, 0.8), 8, 200))
            ids = np.where(draw.random(length) < 0.8, 7, draw.integers(3, VOCABULARY, length))
            writer.add(ids, np.arange(length) >= length // 3)


@pytest.fixture(scope="module")
def overrides(store, tiny_target) -> list[str]:
    return [
        f"data.store={store}", f"target.path={tiny_target}", "data.max_length=200",
        "schedule.max_tokens=400", "schedule.max_anchors=32", "schedule.num_buckets=4",
        "schedule.min_share=0.1", "schedule.grid=8", "drafter.num_layers=2",
        "drafter.block_size=4",
        "drafter.num_anchors=8", "drafter.target_layer_ids=[1,3]", "optim.lr=2e-3",
        "train.device=cpu", "pipeline.trace=true", "checkpoint.every=4", "checkpoint.keep_last=9",
        "train.accumulation_steps=2", f"train.max_steps={STEPS}", f"evaluate.max_rows={MAX_ROWS}",
    ]  # fmt: skip


def run(world: int, overrides: list[str], folder: Path, *more: str) -> Path:
    Ranks(world, train_overrides, [*overrides, f"run.dir={folder}", *more]).results()
    return folder


@pytest.fixture(scope="module")
def plain(overrides, tmp_path_factory) -> Path:
    """The run without rounds: 2 drafters that compute their own hidden states."""
    return run(2, overrides, tmp_path_factory.mktemp("plain") / "run", "roles.layout=colocated")


@pytest.fixture(scope="module")
def colocated(overrides, tmp_path_factory) -> Path:
    """The same with a round every 2 steps."""
    folder = tmp_path_factory.mktemp("colocated") / "run"
    return run(2, overrides, folder, "roles.layout=colocated", "evaluate.every=2")


@pytest.fixture(scope="module")
def split(overrides, tmp_path_factory) -> Path:
    """The same with 2 targets, random delays, and a credit of one micro-batch in the whole job."""
    folder = tmp_path_factory.mktemp("split") / "run"
    return run(
        4, overrides, folder, "roles.num_targets=2", "evaluate.every=2", "pipeline.delay_ms=10",
        "pipeline.hidden_state_queue_depth=1",
    )  # fmt: skip


def rounds(folder: Path) -> list[dict]:
    """The run's rounds, without their times."""
    lines = map(json.loads, (folder / "eval/rounds.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "eval/seconds"} for line in lines]


def facts(folder: Path, step: int) -> dict:
    file = folder / f"checkpoints/step_{step:08d}/trainer/state.json"
    return json.loads(file.read_text())


def begin(overrides: list[str], folder: Path, *more: str) -> Start:
    config = load_config(None, [*overrides, f"run.dir={folder}", *more])
    return Start(TrainingJob(config, 1), Place())


# ---- inside a run


@pytest.mark.dist
def test_training_is_the_same_with_and_without_rounds(plain, colocated, split):
    """To the bit: weights, losses, slots, and the optimizer's state; also at a credit far below a
    round, with delays in targets, prefetchers and sends."""
    for other in (colocated, split):
        for step in (4, STEPS):
            assert_same_bits(weights(plain, step), weights(other, step))
        assert losses(plain) == losses(other) and slots(plain) == slots(other)
        file = f"checkpoints/step_{STEPS:08d}/trainer/optimizer.pt"
        states = [torch.load(f / file, weights_only=True)["state"] for f in (plain, other)]
        for index, state in states[0].items():
            assert torch.equal(state["exp_avg"], states[1][index]["exp_avg"])


@pytest.mark.dist
def test_rounds_do_not_depend_on_the_layout(colocated, split):
    """Counts are whole numbers of equal states: the metrics are equal, not just near."""
    assert [line["step"] for line in rounds(split)] == [2, 4, 6]
    assert rounds(colocated) == rounds(split)
    first, last = rounds(split)[0], rounds(split)[-1]
    assert last["eval/acceptance_length"] > 1.1 * first["eval/acceptance_length"] > 1.1


@pytest.mark.dist
def test_every_held_out_micro_batch_once_a_round(split):
    """And each round by the same drafters, both of which have a share."""
    by_step = {
        step: sorted((f["seq"], f["rank"]) for f in trace(split, "evaluate") if f["step"] == step)
        for step in (2, 4, 6)
    }
    size = len(by_step[2])
    for number, found in enumerate(by_step.values()):
        first = EVALUATION + number * size
        assert [seq for seq, _ in found] == list(range(first, first + size))
        assert [rank for _, rank in found] == [rank for _, rank in by_step[2]]
    assert {rank for _, rank in by_step[2]} == {0, 1}


@pytest.mark.dist
def test_the_credit_holds_over_rounds(split):
    """One micro-batch at most is published and not consumed, of training or evaluation; each pair
    of ranks sends and receives the same messages in the same order."""
    events = trace(split, "publish") + trace(split, "consume")
    held, most = 0, 0
    for fact in sorted(events, key=lambda fact: fact["ns"]):
        held += 1 if fact["event"] == "publish" else -1
        most = max(most, held)
    assert (held, most) == (0, 1)
    published = [fact["seq"] for fact in trace(split, "publish")]
    place = {seq: n for n, seq in enumerate(published)}
    assert len(place) == len(published) and sum(seq >= EVALUATION for seq in published) > 3 * 4
    for target in (2, 3):
        for drafter in (0, 1):
            out, into = (
                [f["seq"] for f in trace(split, event) if (f["rank"], f["peer"]) == pair][1:]
                for event, pair in (("send", (target, drafter)), ("receive", (drafter, target)))
            )
            assert out == into == sorted(out, key=place.__getitem__)


@pytest.mark.dist
def test_the_numbers_are_teacher_forced_acceptance(colocated, overrides, tiny_target):
    """The last round against the same weights and rows one by one, each row a forward of its own:
    the right rows, states and sums. Counts are whole numbers, so pooled lengths are equal unless
    another padding turns a near tie: none here."""
    alone = ["roles.layout=colocated", "train.accumulation_steps=4"]
    plan = begin(overrides, colocated, *alone, "evaluate.every=2").job
    assert plan.stream.rounds
    drafter = Drafter(plan.shape)
    drafter.load_state_dict(weights(colocated, STEPS))
    frozen = TargetTensors.load(tiny_target)
    target = Target(tiny_target, plan.shape.target_layer_ids, dtype=torch.float32, device="cpu")
    held_out = TokenStore.open(Path(plan.store.path) / "validation")
    assert sorted(plan.stream.rounds.rows) == [n * HELD_OUT // MAX_ROWS for n in range(MAX_ROWS)]
    micro_batches = map(plan.stream.micro_batch, plan.stream.round(STEPS))
    bucket_of = {int(row): one.bucket for one in micro_batches for row in one.rows}
    total = AcceptanceSums.zeros(3)
    buckets = [AcceptanceSums.zeros(3) for _ in plan.stream.rounds.plan.edges]
    for row in plan.stream.rounds.rows:
        tokens = collate(
            held_out, seq=0, epoch=0, rows=np.array([row]), width=int(held_out.lengths[row]),
            pad_id=0,
        )  # fmt: skip
        states = pack(target.hidden_states(tokens.ids, tokens.lengths), tokens.lengths)
        batch = batch_of(tokens, states)
        counted = teacher_forced(drafter, frozen, batch, max_new_tokens=256).vector
        total.vector.add_(counted)
        buckets[bucket_of[int(row)]].vector.add_(counted)
    last = rounds(colocated)[-1]
    assert last["eval/acceptance_length"] == total.acceptance_length
    shares = [last[f"eval/position_{k:02d}"] for k in (1, 2, 3)]
    assert shares == total.position_acceptance and shares[0] > shares[1] > 0
    by_bucket = {
        f"eval/bucket_{edge:05d}": sums.acceptance_length
        for edge, sums in zip(plan.stream.rounds.plan.edges, buckets, strict=True)
    }
    by_bucket = {name: length for name, length in by_bucket.items() if not math.isnan(length)}
    assert {n: v for n, v in last.items() if n.startswith("eval/bucket_")} == by_bucket
    assert len(set(by_bucket.values())) > 1


def batch_of(tokens, states: torch.Tensor) -> DrafterBatch:
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return DrafterBatch(
        tokens.ids, tokens.loss_mask, states[None], nothing, nothing.bool(), tokens.lengths
    )


@pytest.mark.dist
def test_what_is_shown(colocated):
    """Tensorboard has every metric at every round; buckets are named as in training."""
    points, lines = scalars(colocated), rounds(colocated)
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                assert points[name][line["step"]] == pytest.approx(value, rel=1e-6)  # float32
    assert list(points["eval/seconds"]) == [2, 4, 6]
    buckets = {name.split("_")[-1] for name in lines[0] if name.startswith("eval/bucket_")}
    trained = {n.split("/")[-1] for n in points if n.startswith("bucket_micro_batches/")}
    assert buckets and len(buckets - trained) <= 1, "one more for rows longer than training's"


# ---- the best checkpoint, and resuming


@pytest.mark.dist
def test_the_best_is_remembered(colocated):
    lines = rounds(colocated)
    values = [line["eval/acceptance_length"] for line in lines]
    best = lines[values.index(max(values))]["step"]
    assert [line["best"] for line in lines] == [
        value > max([0.0, *values[:n]]) for n, value in enumerate(values)
    ]
    last = facts(colocated, STEPS)
    assert last["evaluated"] == STEPS
    assert (last["best"]["step"], last["best"]["acceptance_length"]) == (best, max(values))
    link = colocated / "checkpoints/best"
    assert os.readlink(link) == f"step_{best:08d}" and (link / "config.json").is_file()
    for line in lines:  # saved at its own step, whatever checkpoint.every says
        saved = colocated / f"checkpoints/step_{line['step']:08d}"
        assert not line["best"] or saved.is_dir()


@pytest.mark.dist
def test_resumed_across_rounds(split, overrides, tmp_path):
    """From step 4 on, with another number of targets: the same bits, rounds and best."""
    folder = tmp_path / "parts"
    shutil.copytree(split, folder, symlinks=True)
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > 4:
            shutil.rmtree(path)
    shutil.rmtree(folder / "logs")
    run(3, overrides, folder, "roles.num_targets=1", "evaluate.every=2")
    assert_same_bits(weights(split, STEPS), weights(folder, STEPS))
    assert rounds(split) == rounds(folder), "neither lost nor twice"
    assert facts(folder, STEPS)["best"] == facts(split, STEPS)["best"]
    assert {f["seq"] for f in trace(folder, "evaluate")} == {
        f["seq"] for f in trace(split, "evaluate") if f["step"] > 4
    }


@pytest.mark.dist
def test_stopped_where_a_round_is_due(plain, overrides, tmp_path):
    """With a round after every step: the stop does not wait for one, the next start begins with
    it. Each step is evaluated once, and training is the one without rounds or stop."""
    folder, common = tmp_path / "run", ["roles.num_targets=1", "evaluate.every=1"]
    slow = [*overrides, f"run.dir={folder}", *common, "pipeline.delay_ms=60"]
    ranks = Ranks(3, train_overrides, slow)
    deadline = time.monotonic() + 120
    while not any(f["step"] == 2 for f in trace(folder, "slot")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in ranks.processes:
        assert process.pid
        os.kill(process.pid, signal.SIGTERM)
    ranks.results()
    stopped = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    assert 2 <= stopped < STEPS and facts(folder, stopped)["evaluated"] == stopped - 1
    assert [line["step"] for line in rounds(folder)] == list(range(1, stopped))
    run(3, overrides, folder, *common)
    assert [line["step"] for line in rounds(folder)] == list(range(1, STEPS + 1))
    assert facts(folder, STEPS)["evaluated"] == STEPS
    assert_same_bits(weights(plain, STEPS), weights(folder, STEPS))
    assert losses(plain) == losses(folder)


def test_a_best_that_does_not_compare_is_kept_and_not_compared(colocated, overrides, tmp_path):
    """Of other held-out rows, or answers cut elsewhere, the best is still to come; the old one's
    checkpoint stays. Without rounds the best stays what it was."""
    same = ["roles.layout=colocated", "train.accumulation_steps=4"]
    kept = begin(overrides, colocated, *same, "evaluate.every=2")
    assert kept.best and kept.best.step == facts(colocated, STEPS)["best"]["step"]
    assert kept.checkpoints.best == kept.best.step and not kept.round_first
    assert kept.checkpoints.kept == set() and kept.notes == []
    for other in ("evaluate.max_rows=9", "evaluate.max_new_tokens=3"):
        fewer = begin(overrides, colocated, *same, "evaluate.every=2", other)
        assert fewer.best is None and fewer.checkpoints.best is None
        assert fewer.checkpoints.kept == {kept.best.step}
        assert f"step {kept.best.step}) was measured on other rows" in fewer.notes[0]
    path = colocated / f"checkpoints/step_{STEPS:08d}"
    elsewhere = ["evaluate.every=2", f"train.resume={path}"]
    assert begin(overrides, tmp_path / "new", *same, *elsewhere).best is None
    assert begin(overrides, colocated, *same).best == kept.best


@pytest.mark.dist
def test_resumed_with_other_rounds(colocated, overrides, tmp_path):
    """The old best survives the pruning, and what `best` leads to is there after every start."""
    folder = tmp_path / "run"
    shutil.copytree(colocated, folder, symlinks=True)
    old = facts(folder, STEPS)["best"]["step"]
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > max(old, 4):
            shutil.rmtree(path)
    resumed = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    common = ["roles.layout=colocated", "checkpoint.keep_last=1", "checkpoint.every=1"]
    for more, steps in (([], STEPS + 2), (["evaluate.every=2", "evaluate.max_rows=9"], STEPS + 4)):
        run(2, overrides, folder, *common, *more, f"train.max_steps={steps}")
        assert (folder / "checkpoints/best/config.json").is_file()
        assert (folder / f"checkpoints/step_{old:08d}/config.json").is_file()
    assert resumed < STEPS and facts(folder, STEPS + 4)["kept"] == [old]
    assert facts(folder, STEPS + 4)["best"]["step"] > STEPS


def test_the_best_is_never_pruned(tmp_path):
    shape = DrafterShape(
        hidden_size=8, intermediate_size=8, num_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, vocab_size=16, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=32, block_size=2, mask_token_id=15, target_layer_ids=(1,),
        num_target_layers=3,
    )  # fmt: skip
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=0)
    optimizer = build_optimizer(load_config(None).optim, drafter)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    facts = dict.fromkeys(("fingerprint", "fingerprint_parts", "config", *SAME), "of this run")
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        checkpoints.best = best
        checkpoints.save(step, drafter, optimizer, facts)
        assert list(checkpoints.steps()) == sorted({step, best or step})
        assert not best or os.readlink(tmp_path / "best") == f"step_{best:08d}"
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000005", "step_00000006", "best"}
    checkpoints.kept = {5}
    checkpoints.best = 7
    checkpoints.save(7, drafter, optimizer, facts)
    assert list(checkpoints.steps()) == [5, 7]


def test_the_log_of_rounds_drops_what_is_repeated(tmp_path):
    file = tmp_path / "eval/rounds.jsonl"
    for step in (2, 4, 6):
        RoundLog(file, step).add(step, {"eval/acceptance_length": 1.5}, {"best": False})
    with open(file, "a") as end:
        end.write('{"step": 8, "ev')  # cut short by a kill
    RoundLog(file, 5).add(6, {"eval/acceptance_length": 2.5}, {"best": True})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[2] == {"step": 6, "best": True, "eval/acceptance_length": 2.5}


# ---- refused


def test_held_out_rows_rendered_otherwise(overrides, store, tmp_path):
    """They are asked in another way than training's: acceptance would be of other prompts."""
    shutil.copytree(store, tmp_path / "store")
    own = {"template_sha256": "ab", "settings": {"enable_thinking": False}, "date": "2026-01-01"}
    for folder, change in (("", {}), ("validation", {"date": "2026-01-02"})):
        file = tmp_path / "store" / folder / "meta.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rendering": own | change}))
    job = ["roles.layout=colocated", "evaluate.every=2", f"data.store={tmp_path / 'store'}"]
    assert begin(overrides, tmp_path / "run", *job).job.stream.rounds
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"rendering": own | {"settings": {}}})
    )
    with pytest.raises(
        InputError, match=r"another settings than .* \(\{\} against .*prepare it alike"
    ):
        begin(overrides, tmp_path / "run", *job)
    same = [*job, f"evaluate.store={tmp_path / 'store'}"]
    notes = begin(overrides, tmp_path / "run", *same).job.notes
    assert "evaluate.store holds the rows that are trained on" in notes


def test_held_out_rows_that_do_not_fit(overrides, store, tmp_path):
    every = ["roles.layout=colocated", "evaluate.every=2"]
    shutil.copytree(store, tmp_path / "bare", ignore=shutil.ignore_patterns("validation"))
    with pytest.raises(InputError, match=r"bare has no validation split; prepare it with"):
        begin(overrides, tmp_path / "a", *every, f"data.store={tmp_path / 'bare'}")
    write_store(tmp_path / "foreign", 5, 3, "another tokenizer")
    with pytest.raises(InputError, match=r"foreign: made with another tokenizer than"):
        begin(overrides, tmp_path / "a", *every, f"evaluate.store={tmp_path / 'foreign'}")
    same = TokenStore.open(store).meta["tokenizer_fingerprint"]
    write_store(tmp_path / "long", 50, 3, same, scale=5)
    with pytest.raises(InputError, match=r"long: has rows of up to \d{3} tokens, above"):
        begin(overrides, tmp_path / "a", *every, f"evaluate.store={tmp_path / 'long'}")
    assert begin(overrides, tmp_path / "a", *every[:1]).job.stream.rounds is None
