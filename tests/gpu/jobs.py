"""Whole training jobs for run.sh: the demo's recipe, colocated, and split over communicators."""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
STEPS = 40
DEMO = ROOT / "launch/demo"


@cache
def store() -> Path:
    """The demo's token store, made once."""
    from dflashdist.config import load_config
    from dflashdist.data.prepare import prepare

    folder = Path(tempfile.mkdtemp()) / "store"
    # In this process: a worker would import this script again, torch and all.
    data = load_config(None, ["data.max_length=512", "data.workers=1"]).data
    prepare([DEMO / "train.jsonl.gz"], DEMO / "target", folder, data)
    return folder


def job(device: str, ranks: int, *overrides: str, environment: dict[str, str] | None = None):
    """Run `STEPS` steps of the demo's recipe; returns (losses, weights). Raises RuntimeError."""
    folder = Path(tempfile.mkdtemp())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        "-m", "dflashdist", "train", str(ROOT / "conf/demo.yaml"), f"run.dir={folder}",
        f"data.store={store()}", f"target.path={DEMO / 'target'}", f"train.device={device}",
        "target.dtype=float32", f"train.max_steps={STEPS}", "train.log_every=1", *overrides,
    ]  # fmt: skip
    paths = [os.environ.get("PYTHONPATH", ""), os.environ.get("GPU_CHECK_PACKAGES", "")]
    extra = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | (environment or {})
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=os.environ | extra, cwd=ROOT
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("dflashdist")]
        raise RuntimeError((lines or result.stderr.splitlines()[-1:] or ["no output"])[0])
    losses = [float(text) for text in re.findall(r"\| loss ([\d.]+) \|", result.stdout)]
    assert len(losses) == STEPS, result.stdout
    weights = load_file(folder / f"checkpoints/step_{STEPS:08d}/trainer/weights.safetensors")
    return losses, weights


@cache
def colocated(device: str):
    """The reference: one rank that computes its own hidden states."""
    return job(device, 1, "roles.layout=colocated", "roles.num_targets=null",
               "roles.num_drafters=null", "train.accumulation_steps=2")  # fmt: skip


def nccl_shares_a_gpu() -> str:
    """Why several ranks cannot share this GPU over NCCL; empty where they can."""
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        return f"NCCL {'.'.join(map(str, version))}: several ranks on one GPU need 2.30"
    return ""


def split(device: str):
    """The split job, 2 drafters and 1 target, over NCCL on one GPU or gloo."""
    extra = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if device == "cuda" else {}
    return job(device, 3, "roles.num_targets=1", "roles.num_drafters=2", environment=extra)
