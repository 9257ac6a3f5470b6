"""Loss and every gradient of the recorded reference, from its stored anchors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflashdist.config import LossConfig
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss, LossSums
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import TargetTensors

FIXTURES = Path(__file__).parents[1] / "fixtures"


def reference_error(case: str, device: str = "cpu") -> tuple[float, float]:
    """Relative errors of the loss and of the worst gradient (of its largest value)."""
    record = json.loads((FIXTURES / "dflash_reference.json").read_text())
    tensors = {
        name: tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(FIXTURES / "dflash_reference.safetensors").items()
    }
    sizes, wanted = record["config"], record["losses"][case]
    shape = DrafterShape(
        hidden_size=sizes["H"],
        intermediate_size=128,
        num_layers=sizes["L"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        head_dim=sizes["hd"],
        vocab_size=sizes["V"],
        rms_norm_eps=sizes["eps"],
        rope_theta=sizes["theta"],
        max_position_embeddings=4096,
        block_size=sizes["BS"],
        mask_token_id=sizes["MASK"],
        target_layer_ids=tuple(range(1, 1 + sizes["T"])),
        num_target_layers=8,
    )
    drafter = Drafter(shape)
    prefix = "drafter."
    drafter.load_state_dict(
        {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    )
    loss_config = LossConfig(
        weights="uniform" if wanted["gamma"] is None else "decay",
        gamma=wanted["gamma"],
        contiguous_only=False,
        chunk_size=7,  # several chunks, the last one partial
    )
    frozen = TargetTensors(
        tensors["input.emb"].to(device), tensors["input.head"].to(device), torch.ones(sizes["H"])
    )
    module = DrafterLoss(drafter.to(device), frozen, shape, loss_config)
    batch = DrafterBatch(
        ids=tensors["input.ids"],
        loss_mask=tensors["input.loss_mask"].bool(),
        hidden=tensors["input.hid"],
        anchors=tensors[f"{case}.anchors"],
        keep=tensors[f"{case}.keep"],
        lengths=torch.full((sizes["B"],), sizes["S"]),
    ).to(device)
    loss, vector = module(batch)
    sums = LossSums(vector.cpu(), shape.block_size)
    (loss / sums.weight).backward()
    worst = 0.0
    for name, parameter in drafter.named_parameters():
        expected = tensors[f"{case}.grad.{name}"]
        assert parameter.grad is not None, name
        difference = (parameter.grad.cpu() - expected).abs().max() / expected.abs().max()
        worst = max(worst, difference.item())
    return abs(sums.loss - wanted["loss"]) / wanted["loss"], worst


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", ["uniform", "decay_g7"])
def test_loss_and_gradients_match_the_reference(case):
    loss_error, gradient_error = reference_error(case)
    # The record was made in float32. These are its own errors: we differ by them in float64.
    assert loss_error < 1.5e-7
    assert gradient_error < 2e-6
