"""A training block equals a block of the published inference package, through a saved folder."""

import pytest
import torch
from rounding import EXACT, in_float64

from dflashdist.model.blocks import block_ids
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import save_drafter


def parity_error(drafter: Drafter, folder, device: str = "cpu") -> float:
    """Largest difference between our training blocks and dflash's forward, context [0, a)."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    shape, dtype = drafter.shape, drafter.norm.weight.dtype
    save_drafter(folder, drafter, str(dtype).removeprefix("torch."))
    model = DFlash2DraftModel if shape.variant == "dflash2" else DFlashDraftModel
    theirs = model.from_pretrained(folder, dtype=dtype).to(device).eval()
    if dtype == torch.float64:
        in_float64(theirs)
    ours = drafter.to(device)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 40, shape.num_features * shape.hidden_size, generator=generator).to(
        device
    )
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).to(device)
    ids = torch.randint(shape.vocab_size, (2, 40), generator=generator).to(device)
    anchors = torch.tensor([[1, 2, 17, 33, 39], [5, 6, 7, 8, 38]], device=device)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    inputs = block_ids(
        ids, anchors, keep, block_size=shape.block_size, mask_token_id=shape.mask_token_id
    )
    embeds = embedding[inputs]
    worst = 0.0
    with torch.no_grad():
        blocks = ours(hidden, embeds, anchors, keep).unflatten(1, (-1, shape.block_size))
        embeds = embeds.unflatten(1, (-1, shape.block_size))
        for b in range(anchors.shape[0]):
            for n in range(anchors.shape[1]):
                a = int(anchors[b, n])
                expected = theirs(
                    position_ids=torch.arange(a + shape.block_size, device=device)[None],
                    noise_embedding=embeds[b, n][None],
                    target_hidden=hidden[b, :a][None],
                )
                worst = max(worst, (blocks[b, n] - expected[0]).abs().max().item())
    return worst


@pytest.mark.usefixtures("float64")
def test_training_block_equals_inference_block(drafter, tmp_path):
    pytest.importorskip("dflash.model", reason="the package dflash (extra `dev`) is not installed")
    assert parity_error(drafter, tmp_path) < EXACT
