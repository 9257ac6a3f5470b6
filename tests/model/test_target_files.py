"""Embedding, head and norm by tensor name: tied or not, one file or shards, any known prefix."""

import json

import pytest
import torch
from rounding import rounding
from safetensors.torch import save_file

from dflashdist.config import InputError
from dflashdist.model.target_files import TargetTensors

TENSORS = {
    "model.embed_tokens.weight": torch.randn(6, 4),
    "lm_head.weight": torch.randn(6, 4),
    "model.norm.weight": torch.randn(4),
    "model.layers.0.mlp.up_proj.weight": torch.randn(3, 4),
}


def write(folder, tensors, *, shards: int = 1, **config) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    places = {}
    for i, name in enumerate(tensors):
        file = f"model-{i % shards}.safetensors"
        places[name] = file
        same = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == i % shards}
        save_file(same, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_untied(tmp_path, shards):
    frozen = TargetTensors.load(write(tmp_path, TENSORS, shards=shards))
    assert torch.equal(frozen.embedding, TENSORS["model.embed_tokens.weight"])
    assert torch.equal(frozen.head, TENSORS["lm_head.weight"])
    assert torch.equal(frozen.final_norm, TENSORS["model.norm.weight"])
    assert not frozen.head.requires_grad


def test_tied_by_configuration_ignores_a_stale_head(tmp_path):
    frozen = TargetTensors.load(write(tmp_path, TENSORS, tie_word_embeddings=True))
    assert frozen.head is frozen.embedding


def test_tied_by_absence(tmp_path):
    tensors = {n: t for n, t in TENSORS.items() if n != "lm_head.weight"}
    frozen = TargetTensors.load(write(tmp_path, tensors))
    assert frozen.head is frozen.embedding


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_language_model_inside_a_larger_one(tmp_path, prefix):
    tensors = {n.replace("model.", prefix): t for n, t in TENSORS.items()}
    frozen = TargetTensors.load(write(tmp_path, tensors))
    assert torch.equal(frozen.embedding, TENSORS["model.embed_tokens.weight"])
    assert torch.equal(frozen.final_norm, TENSORS["model.norm.weight"])


def test_dtype(tmp_path):
    frozen = TargetTensors.load(write(tmp_path, TENSORS), dtype=torch.bfloat16)
    assert frozen.embedding.dtype == frozen.head.dtype == torch.bfloat16


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        TargetTensors.load(str(tmp_path))
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"no tensor named model\.embed_tokens\.weight"):
        TargetTensors.load(str(tmp_path))


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3Text", "Qwen3"])
def test_the_final_norm_is_what_the_target_multiplies_by(tmp_path, name):
    """Some targets keep it less one."""
    import transformers

    kind = {"Gemma3Text": "Gemma3"}.get(name, name)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    states = torch.randn(3, 16)
    expected = model.model.norm(states) / torch.nn.functional.rms_norm(states, (16,), eps=1e-6)
    # Two norms of 16 squares, a product and a quotient, of weights up to 1.5.
    difference = TargetTensors.load(str(tmp_path)).final_norm - expected
    assert difference.abs().max() < rounding(16, 1.5)
