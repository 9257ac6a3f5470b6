"""A trained checkpoint, and reports as `evaluate --json` writes them."""

import json
from pathlib import Path

import pytest
from exported import RENDERING, change_state
from ranks import Ranks, train_overrides


@pytest.fixture(scope="session")
def overrides(tiny_target, tiny_store) -> list[str]:
    return [
        f"data.store={tiny_store}", f"target.path={tiny_target}", "data.max_length=200",
        "schedule.max_tokens=400", "schedule.max_anchors=32", "schedule.num_buckets=4",
        "schedule.grid=8", "drafter.num_layers=2", "drafter.block_size=4",
        "drafter.num_anchors=8", "drafter.target_layer_ids=[1,3]", "optim.lr=3e-2",
        "train.device=cpu", "train.accumulation_steps=2", "roles.layout=colocated",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, overrides) -> Path:
    """Two steps of training with an average of the weights; with the rendering of its store."""
    folder = tmp_path_factory.mktemp("run")
    more = [f"run.dir={folder}", "train.max_steps=2", "checkpoint.every=2", "optim.ema=0.5"]
    Ranks(1, train_overrides, [*overrides, *more]).results()
    place = folder / "checkpoints/step_00000002"
    change_state(place, rendering=RENDERING)
    return place


@pytest.fixture(scope="session")
def reports(checkpoint, tiny_target, tmp_path_factory) -> list[dict]:
    """Of the checkpoint and of its average."""
    from dflashdist.config import EvaluateConfig
    from dflashdist.eval.acceptance import evaluate_drafters

    rows = [{"messages": [{"role": "user", "content": f"w{i} w{i + 3}"}]} for i in range(6)]
    file = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    both, settings = [checkpoint, checkpoint / "ema"], EvaluateConfig(max_new_tokens=12)
    return evaluate_drafters(both, tiny_target, file, settings, "cpu")
