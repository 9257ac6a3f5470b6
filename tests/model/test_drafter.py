"""The drafter: names, initialisation, cached decoding, its folder."""

import json

import pytest
import torch
from rounding import EXACT
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflashdist.config import InputError
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import load_drafter, save_drafter

PER_LAYER = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
]  # fmt: skip


def test_names_are_the_published_ones(shape, drafter):
    names = {f"layers.{i}.{part}.weight" for i in range(shape.num_layers) for part in PER_LAYER}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(drafter.state_dict()) == names
    assert len(names) == 11 * shape.num_layers + 3
    assert drafter.fc.weight.shape == (shape.hidden_size, 2 * shape.hidden_size)


def test_fan_in_initialisation(shape):
    drafter = Drafter(shape)
    final_norm = torch.rand(shape.hidden_size)
    drafter.reset_parameters("fan_in", seed=0, final_norm=final_norm)
    assert torch.equal(drafter.norm.weight, final_norm)
    assert bool((drafter.hidden_norm.weight == 1).all())
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            scaled = parameter.std() * parameter.shape[1] ** 0.5
            # At least 512 draws: the sample's deviation is within 4 / sqrt(2 * 512).
            assert abs(scaled.item() - 1) < 0.125, name


def test_published_initialisation_is_seeded(shape):
    first, second, other = Drafter(shape), Drafter(shape), Drafter(shape)
    first.reset_parameters("published", seed=3, final_norm=torch.zeros(shape.hidden_size))
    second.reset_parameters("published", seed=3)
    other.reset_parameters("published", seed=4)
    assert abs(first.fc.weight.std().item() - 0.02) < 0.002  # 2,048 draws
    assert bool((first.norm.weight == 1).all())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, other.fc.weight)


def cached_decoding_error(drafter: Drafter) -> float:
    """Largest difference between training blocks and `decode_block`: context in three pieces, then
    a block at each anchor, rows together and one by one."""
    shape, size = drafter.shape, drafter.shape.block_size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 30, shape.num_features * shape.hidden_size, generator=generator)
    embeds = torch.randn(2, 3 * size, shape.hidden_size, generator=generator)
    anchors = torch.tensor([[3, 11, 27], [1, 18, 29]])
    worst = 0.0
    with torch.no_grad():
        trained = drafter(hidden, embeds, anchors, torch.ones_like(anchors).bool())
        trained = trained.unflatten(1, (3, size))
        pieces = [drafter.context_kv(hidden[:, a:b], a) for a, b in [(0, 7), (7, 8), (8, 30)]]
        kv = [
            (torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2))
            for layer in zip(*pieces, strict=True)
        ]
        for n in range(3):
            block = embeds[:, n * size : (n + 1) * size]
            together = drafter.decode_block(block, anchors[:, n], kv)
            worst = max(worst, (together - trained[:, n]).abs().max().item())
            for b in range(2):
                row = [(k[b : b + 1], v[b : b + 1]) for k, v in kv]
                alone = drafter.decode_block(block[b : b + 1], int(anchors[b, n]), row)
                worst = max(worst, (alone[0] - trained[b, n]).abs().max().item())
    return worst


@pytest.mark.usefixtures("float64")
def test_cached_decoding_equals_the_training_block(drafter):
    assert cached_decoding_error(drafter) < EXACT


def test_a_block_of_a_shorter_draft_than_trained(shape, drafter):
    """decode_block takes as many slots as it is given."""
    hidden = torch.randn(1, 5, shape.num_features * shape.hidden_size)
    out = drafter.decode_block(
        torch.randn(1, 2, shape.hidden_size), 5, drafter.context_kv(hidden, 0)
    )
    assert out.shape == (1, 2, shape.hidden_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(drafter, tmp_path, dtype):
    save_drafter(tmp_path / "d", drafter, dtype)
    with safe_open(tmp_path / "d" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("fc.weight").dtype == getattr(torch, dtype)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dtype"] == dtype
    loaded = load_drafter(tmp_path / "d")
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        expected = tensor.to(getattr(torch, dtype)).float()
        assert torch.equal(loaded.state_dict()[name], expected), name
    assert all(p.requires_grad for p in loaded.parameters())


def test_a_folder_that_does_not_fit_is_refused(drafter, tmp_path):
    save_drafter(tmp_path, drafter, "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    tensors["embed_tokens.weight"] = torch.zeros(2, 2)
    tensors["norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as refusal:
        load_drafter(tmp_path)
    told = str(refusal.value)
    assert "missing: fc.weight" in told
    assert "unexpected: embed_tokens.weight" in told
    assert "norm.weight (3,), not (32,)" in told
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="cannot be read"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        load_drafter(tmp_path)


def test_autocast_keeps_the_residual_stream_and_the_result_close(shape, drafter):
    """bfloat16 products under autocast: the result is float32 and near the float32 one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 12, shape.num_features * shape.hidden_size, generator=generator)
    embeds = torch.randn(1, 2 * shape.block_size, shape.hidden_size, generator=generator)
    anchors, keep = torch.tensor([[4, 9]]), torch.tensor([[True, True]])
    with torch.no_grad():
        exact = drafter(hidden, embeds, anchors, keep)
        with torch.autocast("cpu", torch.bfloat16):
            close = drafter(hidden.bfloat16(), embeds.bfloat16(), anchors, keep)
    assert close.dtype == torch.float32
    # bfloat16 has 8 bits: some 0.4 % per product, over two layers; values of size 1.
    assert (exact - close).abs().mean() < 0.03
