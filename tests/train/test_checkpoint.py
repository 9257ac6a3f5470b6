"""What is kept, what is resumed from, what is refused; and that it comes back to the bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflashdist.cluster.world import Place
from dflashdist.config import Config, InputError, dump_config, load_config
from dflashdist.data.shards import TokenStoreWriter
from dflashdist.files import remove
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import load_drafter
from dflashdist.train.checkpoint import load_training
from dflashdist.train.job import TrainingJob
from dflashdist.train.optim import WeightAverage, build_optimizer
from dflashdist.train.resume import Start, begin_whole

CPU = torch.device("cpu")
TARGET = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> list[str]:
    """A target's config.json and a store of 40 rows: all that resuming is decided from."""
    folder = tmp_path_factory.mktemp("inputs")
    target = write_target(folder / "target", 0)
    return [f"target.path={target}", f"data.store={write_store(folder / 'store', 0)}"]


def write_target(folder: Path, seed: int) -> Path:
    """Models of one shape for any seed, but other weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET))
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    save_file({"model.embed_tokens.weight": rows}, folder / "model.safetensors")
    return folder


def write_store(folder: Path, seed: int) -> Path:
    """Rows of equal lengths for any seed, but other tokens."""
    random = np.random.default_rng(seed)
    settings = {
        "target": "t", "tokenizer_fingerprint": "f", "tokenizer_length": 60,
        "vocab_size": 64, "pad_id": 0, "max_length": 32, "min_supervised": 2,
    }  # fmt: skip
    with TokenStoreWriter(folder, settings) as writer:
        for row in range(40):
            ids = random.integers(1, 60, 8 + row % 20).astype(np.int32)
            writer.add(ids, (np.arange(len(ids)) >= 4).astype(np.uint8))
        counts = {"rows": 40, "kept": 40, "rejected": {}, "examples": {}}
        writer.audit = counts | {"cut_rows": 0, "cut_tokens": 0}
    return folder


@pytest.fixture
def overrides(inputs, tmp_path) -> list[str]:
    return [
        *inputs, f"run.dir={tmp_path / 'run'}", "data.max_length=32", "schedule.max_tokens=64",
        "schedule.grid=8", "drafter.num_layers=1", "drafter.block_size=4", "drafter.num_anchors=4",
        "drafter.target_layer_ids=[1,2]", "train.max_steps=50", "roles.layout=colocated",
        "checkpoint.keep_last=2",
    ]  # fmt: skip


def begin(overrides: list[str], *more: str) -> Start:
    """What a rank that starts now would do."""
    config: Config = load_config(None, [*overrides, *more])
    return Start(TrainingJob(config, 1), Place())


class Trained:
    """A drafter with an optimizer that has state, saved as a run would."""

    def __init__(self, begun: Start, seed: int = 0) -> None:
        self.begun = begun
        self.drafter = Drafter(begun.job.shape)
        self.drafter.reset_parameters("fan_in", seed=seed)
        self.optimizer = build_optimizer(begun.job.config.optim, self.drafter)
        self.average: WeightAverage | None = None
        self.learn()

    def learn(self) -> None:
        draw = torch.Generator().manual_seed(5)
        for parameter in self.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        self.optimizer.step()

    def save(self, step: int) -> Path:
        facts = self.begun.facts() | {
            "cursor": step * self.begun.job.steps.window,
            "config": dump_config(self.begun.job.config),
        }
        return self.begun.checkpoints.save(step, self.drafter, self.optimizer, facts, self.average)


@pytest.fixture
def trained(overrides) -> Trained:
    return Trained(begin(overrides))


def names(trained: Trained) -> list[str]:
    return sorted(path.name for path in trained.begun.checkpoints.folder.iterdir())


def test_kept(overrides):
    """The last 2, each fourth, and the untrained one at the start."""
    trained = Trained(begin(overrides, "checkpoint.keep_every=4"))
    for step in range(0, 12):
        trained.save(step)
    kept = [0, 4, 8, 10, 11]
    assert names(trained) == [f"step_{step:08d}" for step in kept]
    assert list(trained.begun.checkpoints.steps()) == kept


def test_only_the_last_and_the_start(overrides):
    trained = Trained(begin(overrides, "checkpoint.keep_last=1"))
    for step in (0, 3, 6, 9):
        trained.save(step)
    assert names(trained) == ["step_00000000", "step_00000009"]


def test_leftovers_of_a_killed_run(trained, overrides):
    """Neither a folder aside nor one without its last file is a checkpoint; the next save, also of
    that very step, removes what was left aside."""
    whole = trained.save(1)
    folder = whole.parent
    for left in (".step_00000002.partial", ".step_00000007.partial"):
        shutil.copytree(whole, folder / left)
    shutil.copytree(whole, folder / "step_00000009")
    (folder / "step_00000009" / "trainer/state.json").unlink()
    assert begin(overrides).checkpoint == whole
    trained.save(2)
    assert names(trained) == ["step_00000001", "step_00000002", "step_00000009"]
    assert begin(overrides).step == 2


def test_saving_a_step_again_replaces_it(trained):
    trained.save(1)
    trained.learn()
    place = trained.save(1)
    assert names(trained) == ["step_00000001"]
    fresh = Drafter(trained.begun.job.shape)
    load_training(place, fresh, build_optimizer(trained.begun.job.config.optim, fresh), CPU)
    for name, tensor in trained.drafter.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_restored_to_the_bit(trained):
    """Weights in float32 and AdamW's state: one more step from either is the same step."""
    place = trained.save(3)
    published = load_drafter(place)  # what serving engines read is the same, in bfloat16
    for name, tensor in trained.drafter.state_dict().items():
        assert torch.equal(published.state_dict()[name], tensor.bfloat16().float()), name
    other = Trained(trained.begun, seed=1)
    load_training(place, other.drafter, other.optimizer, CPU)
    for each in (trained, other):
        each.learn()
    for name, tensor in trained.drafter.state_dict().items():
        assert torch.equal(other.drafter.state_dict()[name], tensor), name


def test_a_kill_while_a_step_is_saved_again(trained, overrides):
    """Between the two renames the step has no checkpoint of its name; the next start mends it."""
    place = trained.save(3)
    hidden = place.with_name(f".{place.name}.old.partial")
    place.rename(hidden)
    assert begin(overrides).checkpoint == place
    assert place.is_dir() and not hidden.exists()
    shutil.copytree(place, hidden)  # killed after both: the new one counts
    (place / "trainer/newer").touch()
    assert begin(overrides).checkpoint == place and (place / "trainer/newer").exists()


def test_what_is_removed_loses_its_name_first(trained, overrides, monkeypatch):
    """A kill while an old checkpoint's files go leaves no half of one under its name."""
    checkpoints = trained.begun.checkpoints
    old = trained.save(3)
    (old.parent / ".step_00000009.old.partial.dropped.partial").mkdir()  # of a kill before

    def killed(folder, ignore_errors=False):
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(old)
    assert not checkpoints.steps() and begin(overrides).checkpoint is None
    remove(old)
    trained.save(9)
    assert {path.name for path in old.parent.iterdir()} == {"step_00000009"}


# ---- resuming


def test_resume_auto_none_and_a_path(trained, overrides, tmp_path):
    fresh = begin(overrides)
    assert fresh.checkpoint is None and fresh.step == 0
    assert begin(overrides, "train.resume=none").checkpoint is None
    for step in (5, 10):
        trained.save(step)
    newest = begin(overrides)
    assert newest.checkpoint is not None and newest.checkpoint.name == "step_00000010"
    assert next(newest.seqs()) == 10 * newest.job.steps.window
    path = tmp_path / "run/checkpoints/step_00000005"
    elsewhere = f"run.dir={tmp_path / 'elsewhere'}"
    assert begin(overrides, elsewhere, f"train.resume={path}").step == 5
    with pytest.raises(InputError, match=r"train\.resume=none: .* holds 2 checkpoints"):
        begin(overrides, "train.resume=none")
    with pytest.raises(InputError, match=r"train\.resume=.*/nowhere: no complete checkpoint"):
        begin(overrides, f"train.resume={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("schedule.max_tokens=96", "max_tokens 64 -> 96"),
        ("schedule.min_share=0.2", "min_share 1/2 -> 1/5"),
        ("drafter.num_anchors=3", "num_anchors 4 -> 3"),
        ("seed=1", "seed 0 -> 1"),
        ("train.accumulation_steps=8", "window was 4 and is 8; keep drafters x"),
        ("drafter.num_layers=2", "drafter was {'num_layers': 1} and is {'num_layers': 2}; rest"),
        ("loss.weights=uniform", "was {'weights': 'default'} and is {'weights': 'uniform'}"),
        ("loss.contiguous_only=false", "is {'contiguous_only': False}"),
        ("loss.terms.kl=0.5", "restore the loss section, or start anew from these weights"),
        ("optim.kind=muon", "optimizer was adamw and is muon; restore optim.kind"),
        ("drafter.target_layer_ids=[2,1]", "drafter was "),
    ],
)
def test_what_differs_is_named(trained, overrides, change, named):
    trained.save(5)
    with pytest.raises(InputError) as error:
        begin(overrides, change)
    assert named in str(error.value)
    assert "step_00000005" in str(error.value) and "\n" not in str(error.value)


def test_what_changes_no_result_goes_on(trained, overrides):
    """The objective is what it means, not how it is spelled or computed."""
    trained.save(5)
    idle = [
        "loss.gamma=1.8",
        "loss.chunk_size=7",
        "loss.terms.kl=0.0",
        "loss.dpace_alpha=0.1",
        "loss.dpace_by=terms",
        "loss.selector=0.5",
    ]
    assert begin(overrides, *idle).step == 5
    with pytest.raises(InputError, match=r"is \{'weights': 'dpace', 'dpace_by': 'terms'\}"):
        begin(overrides, "loss.dpace_by=terms", "loss.weights=dpace")


def test_other_first_weights_are_refused_where_they_would_not_be_read(trained, overrides):
    trained.save(5)
    assert begin(overrides, "optim.lr=1e-5").step == 5
    with pytest.raises(
        InputError, match=r"init_from: None -> x: .*step_00000005 goes on .* run\.dir"
    ):
        begin(overrides, "drafter.init_from=x")


def test_files_are_as_public_as_others(trained):
    """A server may run under another user."""
    place = trained.save(5)
    modes = {file.stat().st_mode for file in place.rglob("*") if file.is_file()}
    assert len(modes) == 1 and modes == {(place / "config.json").stat().st_mode}


def test_another_store_is_refused(trained, overrides, tmp_path):
    """Also one with rows of the same lengths, which has the same plan."""
    trained.save(5)
    other = write_store(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=r"store_fingerprint was .*; point data.store at"):
        begin(overrides, f"data.store={other}")


def test_another_target_of_the_same_shape_is_refused(trained, overrides, tmp_path):
    trained.save(5)
    other = write_target(tmp_path / "other", 1)
    with pytest.raises(InputError, match=r"target was \w+ and is \w+; point target\.path"):
        begin(overrides, f"target.path={other}")
    with pytest.raises(InputError, match=r"target_dtype was auto and is bfloat16"):
        begin(overrides, "target.dtype=bfloat16")


def test_a_run_that_ended_in_a_partial_step_is_not_extended(overrides):
    """Its checkpoint stands inside a step: the seqs after the end of the run would be left out."""
    overrides = [*overrides, "train.max_steps=null", "train.epochs=1"]
    trained = Trained(begin(overrides, "train.accumulation_steps=5"))
    steps = trained.begun.job.steps
    assert steps.end % 5, "the last step must be partial for this test"
    config = dump_config(trained.begun.job.config)
    facts = trained.begun.facts() | {"cursor": steps.end, "config": config}
    checkpoints = trained.begun.checkpoints
    checkpoints.save(steps.num_steps, trained.drafter, trained.optimizer, facts)
    begin(overrides, "train.accumulation_steps=5")  # finished, and nothing to do
    with pytest.raises(InputError, match=f"seqs {steps.end} to {steps.num_steps * 5 - 1}"):
        begin(overrides, "train.accumulation_steps=5", "train.epochs=2")


def test_settings_of_the_optimizer_are_this_start_s(trained, overrides):
    """State comes back, settings are the configuration's."""
    place = trained.save(5)
    config = load_config(None, [*overrides, "optim.weight_decay=0.5", "optim.betas=[0.5,0.6]"])
    fresh = Drafter(trained.begun.job.shape)
    optimizer = build_optimizer(config.optim, fresh)
    load_training(place, fresh, optimizer, CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert all(group["betas"] == (0.5, 0.6) for group in optimizer.param_groups)
    assert len(optimizer.state) == len(list(fresh.parameters()))


def test_what_may_differ(trained, overrides):
    """Learning rate, target count and D with the window held change no micro-batch of the rest."""
    trained.save(5)
    config = load_config(None, [*overrides, "optim.lr=1e-5", "train.accumulation_steps=2"])
    assert Start(TrainingJob(config, 2), Place(world_size=2)).step == 5


# ---- what a disk or a copy does to a checkpoint


def resumed(overrides: list[str], *more: str) -> Start:
    """What a run that starts now begins from, once rank 0 has read the files."""
    return begin_whole(begin(overrides, *more))[0]


def removed(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def flipped(file: Path) -> None:
    """One bit in its middle, the size as before."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FILES = [
    "config.json", "model.safetensors", "ema/config.json", "ema/model.safetensors",
    "trainer/ema.safetensors", "trainer/optimizer.pt", "trainer/state.json",
    "trainer/weights.safetensors",
]  # fmt: skip


@pytest.fixture
def averaged(overrides) -> Trained:
    """With every file that a checkpoint may have."""
    trained = Trained(begin(overrides, "optim.ema=0.9"))
    trained.average = WeightAverage(trained.drafter, 0.9)
    return trained


@pytest.mark.parametrize("harm", [removed, cut, emptied, flipped])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over(averaged, overrides, file, harm):
    """And named, with its file; the one before it is used. Asked for by name it is refused."""
    before, newest = averaged.save(5), averaged.save(10)
    names = [str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()]
    assert sorted(names) == sorted(FILES)
    assert resumed(overrides).checkpoint == newest
    harm(newest / file)
    again = resumed(overrides)
    assert again.checkpoint == before and again.step == 5
    (why,) = again.checkpoints.passed_over
    assert why.startswith(f"{newest / file}: "), why
    elsewhere = f"run.dir={newest.parents[1].with_name('elsewhere')}"
    with pytest.raises(InputError, match=rf"train\.resume={newest}: .*{Path(file).name}"):
        resumed(overrides, f"train.resume={newest}", elsewhere)


def test_where_no_checkpoint_is_whole_nothing_starts_anew(trained, overrides):
    older, newest = trained.save(5), trained.save(10)
    flipped(newest / "trainer/optimizer.pt")
    cut(older / "trainer/weights.safetensors")
    with pytest.raises(InputError, match=r"step_00000010/.*optimizer\.pt: .*no checkpoint before"):
        resumed(overrides)


def test_a_checkpoint_of_another_run_is_not_pruned(trained, overrides, tmp_path):
    """Somebody may have put it here."""
    other = Trained(begin(overrides, "seed=7", f"run.dir={tmp_path / 'other'}")).save(3)
    shutil.copytree(other, trained.begun.checkpoints.place(3))
    for step in (5, 6, 7):
        trained.save(step)
    assert names(trained) == [f"step_{step:08d}" for step in (3, 6, 7)]


def test_a_damaged_one_is_replaced_and_pruned_like_others(trained, overrides):
    """It counts among the last n by its name, until its step is saved again."""
    trained.save(5)
    cut(trained.save(10) / "model.safetensors")
    trained.save(10)
    assert resumed(overrides).step == 10 and not resumed(overrides).checkpoints.passed_over
