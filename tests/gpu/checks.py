"""The checks of run.sh: exactness on the device, then speed at the size of an 8B target.

Every check prints its own lines and one verdict; one that fails does not stop the others. To add a
check, write a function `(device) -> str` that raises on failure (CheckFailed with a reason, or
Skipped) and returns what the table should say, and name it in CHECKS.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.append(os.environ.get("GPU_CHECK_PACKAGES", ""))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

import jobs
import rounding
import test_attention
import test_dflash_parity
import test_leaks
import test_reference
import test_sliding
import torch
import variants

from dflashdist.config import LossConfig
from dflashdist.model import attention
from dflashdist.model.attention import BlockLayout, block_attention, dense_block_attention
from dflashdist.model.blocks import draw_anchors
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.shape import FULL, SLIDING, DrafterShape
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import teacher_forced


class CheckFailed(Exception):
    """A check's result is wrong; the message says by how much."""


class Skipped(Exception):
    """A check cannot run here; the message says why."""


def require(holds: bool, text: str) -> str:
    """`text` where it holds, else a failed check."""
    if not holds:
        raise CheckFailed(text)
    return text


def tiny_drafter() -> Drafter:
    """Two layers with heads of 16, the smallest that FlexAttention takes on CUDA."""
    shape = drafter_shape(
        hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=199, block=4
    )
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=1)
    return drafter


def drafter_shape(
    *, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, block, features=2
) -> DrafterShape:
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        block_size=block,
        mask_token_id=vocab - 1,
        target_layer_ids=tuple(range(1, 1 + features)),
        num_target_layers=36,
    )


# Exactness


def reference(device: str) -> str:
    """Loss and every gradient of the recorded reference."""
    errors = [test_reference.reference_error(case, device) for case in ("uniform", "decay_g7")]
    loss, gradient = (max(pair) for pair in zip(*errors, strict=True))
    # Float32 against float32: 2 layers of sums of up to 128 terms; float64 differs by 2e-6.
    return require(max(loss, gradient) < 1e-5, f"loss {loss:.1e}, worst gradient {gradient:.1e}")


def leaks(device: str) -> str:
    """What a block must not see changes no bit of it; what it must see does."""
    drafter = tiny_drafter().to(device)
    seen = [what for what in test_leaks.UNSEEN if test_leaks.changed_by(drafter, what)]
    missed = [what for what in test_leaks.SEEN if not test_leaks.changed_by(drafter, what)]
    padding, batch = test_leaks.padding_error(drafter), test_leaks.batch_error(drafter)
    require(not seen and not missed, f"sees: {seen}; does not see: {missed}")
    # 1e-5: a GPU picks other kernels for other sizes, with other orders of summation.
    return require(
        max(padding, batch) < 1e-5, f"no bit leaks; padding {padding:.1e}, batch {batch:.1e}"
    )


def parity(device: str) -> str:
    """A training block against the forward of the package `dflash`, of each variant it has."""
    try:
        import dflash.model  # noqa: F401
    except ImportError as error:
        raise Skipped(f"dflash is not importable ({error})") from error
    shape, errors = tiny_drafter().shape, {}
    for name in variants.CHANGES:
        if name == "dspark":  # which the package lacks
            continue
        drafter = variants.variant_drafter(shape, name)
        with tempfile.TemporaryDirectory() as folder:
            errors[name] = test_dflash_parity.parity_error(drafter, folder, device)
    worst = max(errors, key=lambda name: errors[name])
    text = f"largest difference {errors[worst]:.1e} ({worst}, of {len(errors)})"
    # Float32, 2 layers of some 6 sums of up to 96 terms each, values of up to 4.
    return require(errors[worst] < rounding.rounding(2 * 6 * 96, 4), text)


def attention_float32(device: str) -> str:
    """The device's attention against the dense mask, output and gradients."""
    sizes = [(5, 4, 60), (37, 16, 300), (128, 16, 1024)]
    errors = [test_attention.attention_errors(*size, device=device) for size in sizes]
    errors += [
        test_attention.attention_errors(37, 16, 300, device=device, sight=sight)
        for sight in test_sliding.SIGHTS  # windows, causal blocks
    ]
    output, gradient = (max(pair) for pair in zip(*errors, strict=True))
    text = f"output {output:.1e}, gradient {gradient:.1e}"
    # Float32 sums over up to 1,024 keys of values of size 1; gradients are of size 10.
    return require(output < 1e-5 and gradient < 1e-4, text)


def attention_bfloat16(device: str) -> str:
    """The same in bfloat16 against float32, as relative norms; heads of 128 on CUDA."""
    head_dim = 128 if device == "cuda" else 16
    tensors, anchors, keep = test_attention.draw(64, 16, 1000, head_dim=head_dim, device=device)
    layout = BlockLayout.build(anchors, keep, 1000, 16)
    exact = dense_block_attention(*tensors, anchors, keep)
    up = torch.randn_like(exact)
    wanted = [exact, *torch.autograd.grad((exact * up).sum(), tensors)]
    low = [t.detach().bfloat16().requires_grad_() for t in tensors]
    out = block_attention(*low, layout)
    found = [out, *torch.autograd.grad((out * up).sum(), low)]
    errors = [
        ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)
    ]
    return require(max(errors) < 0.02, f"worst relative error {max(errors):.1e}")


def one_compilation(device: str) -> str:
    """New widths, rows and anchors of later micro-batches compile nothing anew."""
    if device != "cuda":
        raise Skipped("only CUDA compiles attention")
    slowest = 0.0
    for i, (num_blocks, context) in enumerate([(40, 384), (56, 640), (72, 896), (90, 1216)]):
        began = time.perf_counter()
        test_attention.attention_errors(num_blocks, 16, context, device=device)
        torch.cuda.synchronize()
        if i >= 2:
            slowest = max(slowest, time.perf_counter() - began)
    return require(slowest < 2.0, f"slowest later call {slowest:.2f} s")


def rounds_after_training(device: str) -> str:
    """A drafter with sliding and full layers trains, then counts acceptance, in all the shapes that
    compile a graph of their own: one row or several, many blocks or one. None is refused."""
    sizes = dict(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=32)
    shape = drafter_shape(**sizes, vocab=512, block=16)
    shape = dataclasses.replace(shape, layer_types=(SLIDING, FULL), sliding_window=64)
    drafter = Drafter(shape).to(device)
    drafter.reset_parameters("fan_in", seed=0)
    table = torch.randn(512, 128, device=device)
    frozen = TargetTensors(table, table, drafter.norm.weight.detach())
    module = DrafterLoss(drafter, frozen, shape, LossConfig())
    began = time.perf_counter()
    for rows, width, anchors in ((3, 256, 64), (1, 320, 40), (2, 384, 1), (1, 448, 1)):
        batch = full_batch(shape, rows, width, anchors, torch.float32, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            module(batch)[0].backward()
            for at_once in (1, 7, 512):
                part = dataclasses.replace(batch, loss_mask=batch.loss_mask.clone())
                part.loss_mask[:, 12:] = False
                teacher_forced(drafter, frozen, part, end_ids=(), blocks_at_once=at_once)
    return f"4 shapes, with gradients and without, {time.perf_counter() - began:.1f} s"


# Speed


def drafter_step(device: str) -> str:
    """Forward and backward at the size of a Qwen3-8B drafter, bfloat16 products, random weights."""
    big = device == "cuda"
    sizes = dict(hidden=4096, intermediate=12288, layers=5, heads=32, kv_heads=8, head_dim=128)
    if not big:
        sizes = dict(hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, head_dim=32)
    shape = drafter_shape(**sizes, vocab=151936 if big else 2112, block=16, features=5)
    width, anchors = (2048, 512) if big else (256, 32)
    dtype = torch.bfloat16 if big else torch.float32
    with torch.device(device):
        drafter = Drafter(shape)
        table = torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype) * 0.02
        head = torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype) * 0.02
    frozen = TargetTensors(table, head, drafter.norm.weight.detach())
    module = DrafterLoss(drafter, frozen, shape, LossConfig())
    ceiling = matmul_ceiling(device)
    print(f"  matrix-product ceiling {ceiling / 1e12:.1f} TFLOP/s ({dtype}, square)")
    print(f"  {'rows':>4} {'anchors':>7} {'ms':>8} {'ms/anchor':>9} {'peak GB':>8} "
          f"{'TFLOP':>7} {'TFLOP/s':>8} {'of ceiling':>10}")  # fmt: skip
    told = ""
    for rows in (1, 2, 4) if big else (1,):
        batch = full_batch(shape, rows, width, anchors, dtype, device)
        seconds, peak = time_step(module, batch, device)
        flops = step_flops(shape, batch)
        rate = flops / seconds
        print(f"  {rows:4d} {rows * anchors:7d} {1e3 * seconds:8.1f} "
              f"{1e3 * seconds / (rows * anchors):9.3f} {peak:8.1f} {flops / 1e12:7.2f} "
              f"{rate / 1e12:8.1f} {rate / ceiling:10.1%}")  # fmt: skip
        told = (
            f"{rows} rows: {1e3 * seconds:.0f} ms, {peak:.1f} GB, {rate / ceiling:.0%} of ceiling"
        )
    return told


def full_batch(shape, rows, width, anchors, dtype, device) -> DrafterBatch:
    """Every token supervised, so that each row has all its anchors."""
    mask = torch.ones(rows, width, dtype=torch.bool)
    drawn, keep = draw_anchors(mask, tuple(range(rows)), seed=0, epoch=0, num_anchors=anchors)
    features = shape.num_features * shape.hidden_size
    batch = DrafterBatch(
        ids=torch.randint(shape.vocab_size - 1, (rows, width)),
        loss_mask=mask,
        hidden=torch.empty(0),
        anchors=drawn,
        keep=keep,
        lengths=torch.full((rows,), width),
    ).to(device)
    batch.hidden = torch.randn(rows, width, features, dtype=dtype, device=device)
    return batch


def time_step(module: DrafterLoss, batch: DrafterBatch, device: str) -> tuple[float, float]:
    """Median seconds of five steps after three, and the peak memory of them in GB (CUDA)."""
    cuda = device == "cuda"

    def step() -> float:
        module.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss, _ = module(batch)
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(3 if cuda else 1):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step() for _ in range(5))
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")


def step_flops(shape: DrafterShape, batch: DrafterBatch) -> float:
    """Model FLOPs of forward and backward: two a multiply-add, only visible keys counted.

    Backward costs twice the forward, but once for `fc` (its input needs no gradient) and for the
    head (its weight needs none).
    """
    rows, width = batch.ids.shape
    kept = int(batch.keep.sum())
    slots, size, hidden = kept * shape.block_size, shape.block_size, shape.hidden_size
    q_width = shape.num_attention_heads * shape.head_dim
    kv_width = shape.num_key_value_heads * shape.head_dim
    context = rows * width * 2 * hidden * kv_width
    block = slots * hidden * (2 * q_width + 2 * kv_width + 3 * shape.intermediate_size)
    keys = size * int((batch.anchors * batch.keep).sum()) + slots * size
    layer = context + block + 2 * keys * q_width
    fc = rows * width * shape.num_features * hidden * hidden
    inside = batch.anchors[..., None] + torch.arange(1, size, device=batch.anchors.device) < width
    head = int((inside & batch.keep[..., None]).sum()) * hidden * shape.vocab_size
    return 2 * (3 * shape.num_layers * layer + 2 * fc + 2 * head)


def matmul_ceiling(device: str) -> float:
    """FLOP/s of a square matrix product: bfloat16 of 8,192 on CUDA, float32 of 1,024 on CPU."""
    cuda = device == "cuda"
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    if cuda:
        torch.cuda.synchronize()
    return 20 * 2 * n**3 / (time.perf_counter() - began)


def colocated_job(device: str) -> str:
    """One rank trains by the demo's recipe; the loss must fall."""
    losses, _ = jobs.colocated(device)
    return require(losses[-1] < 0.5 * losses[0], f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def split_job(device: str) -> str:
    """Two drafters and a target over real communicators give what one rank gives.

    Not to the bit: the drafters' gradients are added in another order, and on CUDA sums inside
    kernels are too; 1e-3 of a loss after 40 steps is far below what a wrong batch would do.
    """
    if device == "cuda" and (reason := jobs.nccl_shares_a_gpu()):
        raise Skipped(reason)
    losses, _ = jobs.split(device)
    reference, _ = jobs.colocated(device)
    worst = max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))
    return require(worst < 1e-3, f"losses equal to {worst:.1e} of them over {len(losses)} steps")


CHECKS: dict[str, Callable[[str], str]] = {
    "reference": reference,
    "leaks": leaks,
    "parity with dflash": parity,
    "attention float32": attention_float32,
    "attention bfloat16": attention_bfloat16,
    "one compilation": one_compilation,
    "rounds after training": rounds_after_training,
    "drafter step": drafter_step,
    "colocated job": colocated_job,
    "split job": split_job,
}


def main() -> int:
    """Run the checks and print the table; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; --device cpu runs the parts that need none")
        return 1
    torch.set_float32_matmul_precision("highest")  # no TF32 where float32 is compared
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, groups of {attention._GROUP_SLOTS} slots on CPU, device: "
          + (torch.cuda.get_device_name() if options.device == "cuda" else "cpu"))  # fmt: skip
    table = []
    for name in options.only:
        print(f"{name} ...")
        began = time.perf_counter()
        try:
            verdict, text = "PASS", CHECKS[name](options.device)
        except Skipped as reason:
            verdict, text = "SKIP", str(reason)
        except CheckFailed as reason:
            verdict, text = "FAIL", str(reason)
        except Exception as error:  # any other error is this check's failure, not the others'
            traceback.print_exc()
            verdict, text = "FAIL", f"{type(error).__name__}: {error}".splitlines()[0][:120]
        table.append((name, verdict, time.perf_counter() - began, text))
        print(f"  {verdict} {text}")
    print(f"\n{'check':22}{'':6}{'s':>6}  result")
    for name, verdict, seconds, text in table:
        print(f"{name:22}{verdict:6}{seconds:6.1f}  {text}")
    return int(any(verdict == "FAIL" for _, verdict, _, _ in table))


if __name__ == "__main__":
    sys.exit(main())
