"""Muon for matrices with AdamW for the rest, and the average of the weights: by hand, and in a run
that is stopped and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks, train_overrides
from rounding import rounding
from run_folder import assert_same_bits, scalars, weights
from safetensors.torch import load_file

from dflashdist.config import CheckpointConfig, InputError, OptimConfig, load_config
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import load_drafter
from dflashdist.model.shape import DrafterShape
from dflashdist.train.checkpoint import Checkpoints, load_training
from dflashdist.train.optim import MuonAndAdamW, WeightAverage, build_optimizer, set_rate

CPU = torch.device("cpu")
MUON = OptimConfig(kind="muon", lr=1e-3, muon_lr=0.02, weight_decay=0.1)


def make_drafter(**changes) -> Drafter:
    sizes = {
        "hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 32, "block_size": 2, "mask_token_id": 15,
        "target_layer_ids": (1, 2), "num_target_layers": 4,
    }  # fmt: skip
    drafter = Drafter(DrafterShape(**sizes | changes))
    drafter.reset_parameters("fan_in", seed=0)
    return drafter


def give_gradients(drafter: Drafter, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


# ---- Muon


def test_who_gets_muon():
    """The matrices of the layers and fc; norms, and the heads of a variant, keep AdamW."""
    drafter = make_drafter(variant="dspark", markov_rank=4, confidence_head=True)
    optimizer = build_optimizer(MUON, drafter)
    assert isinstance(optimizer, MuonAndAdamW)
    names = {id(p): name for name, p in drafter.named_parameters()}
    muon, decayed, rest = [
        {names[id(p)] for p in group["params"]} for group in optimizer.param_groups
    ]
    assert muon == {n for n in names.values() if n.endswith("_proj.weight")} | {"fc.weight"}
    assert len(muon) == 7 * 2 + 1
    assert all("head" in name for name in decayed)
    assert all("norm" in name or name.endswith("bias") for name in rest)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_identity_of_convolutions_does_not_decay(kind):
    """Nor do norms; the matrices that make the kernels do, as every matrix."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3}
    drafter = make_drafter(variant="dflash2", **sizes)
    optimizer = build_optimizer(replace(MUON, kind=kind), drafter)
    names = {id(p): name for name, p in drafter.named_parameters()}
    groups = [
        ({names[id(p)] for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups
    ]
    still = {name for members, decay in groups if decay == 0 for name in members}
    assert still == {n for n in names.values() if n.endswith(("base_kernel", "norm.weight"))}
    assert len(still) == 4 + 2 * 4 + 2
    if kind == "muon":
        assert {n for n in names.values() if "kernel_projection" in n} < groups[0][0]
        assert not any("candidate_selector" in name for name in groups[0][0])


def test_a_step_is_each_optimizer_s_own():
    """Against torch's two optimizers on copies, over three steps of a changing rate."""
    drafter, other = make_drafter(), make_drafter()
    optimizer = build_optimizer(MUON, drafter)
    named = dict(other.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(
        [p for p in named.values() if p.ndim == 1], 1e-3, (0.9, 0.95), 1e-8, weight_decay=0.0
    )
    for step, rate in enumerate((1e-3, 5e-4, 1e-4)):
        for each in (drafter, other):
            give_gradients(each, step)
        set_rate(optimizer, rate)
        optimizer.step()
        # rate x (0.02 / 1e-3), the same product: one schedule for both
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = rate * (0.02 / 1e-3), rate
        muon.step()
        adamw.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in drafter.parameters())
    assert_same_bits(drafter.state_dict(), other.state_dict())


def test_an_update_of_muon_is_nearly_orthogonal():
    """All singular values of a step of rate 1 lie near 1: within 0.5 to 1.5 by the five steps of
    Newton and Schulz (torch's own words), times sqrt(rows / columns) where there are more rows."""
    drafter = make_drafter()
    before = drafter.layers[0].mlp.gate_proj.weight.detach().clone()  # [12, 8]
    optimizer = build_optimizer(OptimConfig(kind="muon", lr=1e-3, muon_lr=1.0), drafter)
    give_gradients(drafter, 0)
    optimizer.step()
    moved = drafter.layers[0].mlp.gate_proj.weight.detach() - before
    values = torch.linalg.svdvals(moved) / (12 / 8) ** 0.5
    assert values.min() > 0.5 and values.max() < 1.5


# ---- the average


def test_the_average_by_hand():
    """In float64 by its definition: at the n-th update w_avg <- d w_avg + (1 - d) w with
    d = min(decay, n / (n + 9)); float32 rounds each of 20 updates."""
    drafter = make_drafter()
    average = WeightAverage(drafter, 0.6)
    wanted = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    for number in range(1, 21):
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += torch.randn(parameter.shape, generator=draw)
        average.update(number)
        decay = min(0.6, number / (number + 9))
        assert (decay == 0.6) == (number >= 14)
        for name, tensor in drafter.state_dict().items():
            wanted[name] = decay * wanted[name] + (1 - decay) * tensor.double()
    for name, tensor in average.drafter.state_dict().items():
        assert tensor.dtype == torch.float32
        bound = rounding(20, tensor.abs().max().item())
        assert (tensor.double() - wanted[name]).abs().max() < bound < 1e-3, name
        assert not torch.equal(tensor, drafter.state_dict()[name])
    assert not any(p.requires_grad for p in average.drafter.parameters())


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_no_decay(decay):
    with pytest.raises(InputError, match=rf"optim\.ema={decay}: a decay from 0 to below 1"):
        load_config(None, [f"optim.ema={decay}"])


# ---- saved and restored


class Run:
    """A drafter, its optimizer and its average, as a drafter rank has them."""

    def __init__(self, config: OptimConfig) -> None:
        self.drafter = make_drafter()
        self.optimizer = build_optimizer(config, self.drafter)
        self.average = WeightAverage(self.drafter, 0.9)

    def learn(self, number: int) -> None:
        give_gradients(self.drafter, number)
        set_rate(self.optimizer, 1e-3 / number)
        self.optimizer.step()
        self.average.update(number)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_restored_to_the_bit(tmp_path, kind):
    """Two more steps after a restart are the two of the unbroken run."""
    config = OptimConfig(kind=kind, lr=1e-3)
    whole, resumed = Run(config), Run(config)
    for number in (1, 2, 3):
        whole.learn(number)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    place = checkpoints.save(3, whole.drafter, whole.optimizer, {}, whole.average)
    load_training(place, resumed.drafter, resumed.optimizer, CPU, resumed.average)
    for number in (4, 5):
        whole.learn(number)
        resumed.learn(number)
    assert_same_bits(whole.drafter.state_dict(), resumed.drafter.state_dict())
    assert_same_bits(whole.average.drafter.state_dict(), resumed.average.drafter.state_dict())


def test_the_average_s_folder_is_a_drafter(tmp_path):
    """`ema/` loads as the checkpoint itself does, with its own weights, in the same dtype."""
    run = Run(OptimConfig())
    run.learn(1)
    place = Checkpoints(tmp_path, CheckpointConfig()).save(
        1, run.drafter, run.optimizer, {}, run.average
    )
    for folder, drafter in ((place, run.drafter), (place / "ema", run.average.drafter)):
        loaded = load_drafter(folder).state_dict()
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded[name], tensor.bfloat16().float()), name
    assert_same_bits(load_file(place / "trainer/ema.safetensors"), run.average.drafter.state_dict())


def test_an_average_that_begins_later(tmp_path, caplog):
    """Of a checkpoint without one, it begins with the weights that were loaded, and says so."""
    run, later = Run(OptimConfig()), Run(OptimConfig())
    run.learn(1)
    place = Checkpoints(tmp_path, CheckpointConfig()).save(1, run.drafter, run.optimizer, {})
    assert not (place / "ema").exists()
    load_training(place, later.drafter, later.optimizer, CPU, later.average)
    assert_same_bits(later.average.drafter.state_dict(), run.drafter.state_dict())
    assert "has no average of the weights: it begins here" in caplog.text


# ---- in a run


def state(folder: Path, step: int, file: str) -> Path:
    return folder / f"checkpoints/step_{step:08d}/trainer/{file}"


@pytest.mark.dist
def test_a_run_stopped_and_resumed(tiny_overrides, tiny_store, tmp_path):
    """Muon and an average, 2 drafters and a target, a round every 2 steps: resumed from step 4 by
    another number of targets, everything ends with the same bits."""
    common = [
        *tiny_overrides, "train.accumulation_steps=2", "optim.kind=muon", "optim.ema=0.9",
        "evaluate.every=2", f"evaluate.store={tiny_store}", "evaluate.max_rows=12",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = [*common, f"run.dir={whole}", "roles.num_targets=1"]
    Ranks(3, train_overrides, job).results()
    shutil.copytree(whole, parts, symlinks=True)
    shutil.rmtree(parts / "checkpoints/step_00000006")
    Ranks(4, train_overrides, [*common, f"run.dir={parts}", "roles.num_targets=2"]).results()
    assert_same_bits(weights(whole, 6), weights(parts, 6))
    averages = [load_file(state(folder, 6, "ema.safetensors")) for folder in (whole, parts)]
    assert_same_bits(*averages)
    assert any(not torch.equal(averages[0][n], tensor) for n, tensor in weights(whole, 6).items())
    saved = [torch.load(state(f, 6, "optimizer.pt"), weights_only=True) for f in (whole, parts)]
    for part, kept in (("muon", "momentum_buffer"), ("adamw", "exp_avg_sq")):
        assert saved[0][part]["state"]
        for index, each in saved[0][part]["state"].items():
            assert torch.equal(each[kept], saved[1][part]["state"][index][kept])
    for folder in (whole, parts):
        points = scalars(folder)
        assert list(points["eval_ema/acceptance_length"]) == [2, 4, 6]
        assert "eval_ema/position_01" in points
    lines = [
        [json.loads(line) for line in (f / "eval/rounds.jsonl").read_text().splitlines()]
        for f in (whole, parts)
    ]
    for one, other in zip(*lines, strict=True):
        assert one | {"eval/seconds": 0} == other | {"eval/seconds": 0}
    # a checkpoint is continued by the optimizer that made it
    codes = Ranks(3, train_overrides, [*job, "optim.kind=adamw"])
    kinds = [codes.queue.get(timeout=60) for _ in codes.processes]
    assert {kind for _, kind, _ in kinds} == {"error"}
    assert all("optimizer was muon and is adamw; restore optim.kind" in text for *_, text in kinds)
