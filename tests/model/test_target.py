"""The target: tapped layers against transformers' own hidden states, and what is refused."""

import json

import pytest
import torch
from rounding import rounding

from dflashdist.config import InputError
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors

IDS = torch.randint(0, 99, (3, 20), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([20, 9, 1])


@pytest.fixture(scope="module")
def full_model(target_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("layer_ids", [(3, 1), (0,), (5, 2)])
def test_tapped_layers_in_the_given_order(target_folder, full_model, layer_ids):
    """Also for the last layer, whose entry in transformers' tuple is normed: taken by a hook."""
    outputs = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, n=n: outputs.update({n: out}))
        for n, layer in enumerate(full_model.model.layers)
    ]
    with torch.no_grad():
        full_model(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    target = Target(target_folder, layer_ids)
    hidden = target.hidden_states(IDS, LENGTHS)
    expected = torch.cat([outputs[i] for i in layer_ids], -1)
    assert hidden.shape == (3, 20, len(layer_ids) * target.hidden_size)
    for b, n in enumerate(LENGTHS.tolist()):
        assert torch.equal(hidden[b, :n], expected[b, :n])  # the same layers, the same kernels
        assert not hidden[b, n:].any()


def test_layer_id_is_the_entry_after_it(target_folder, full_model):
    with torch.no_grad():
        states = full_model(IDS, use_cache=False, output_hidden_states=True).hidden_states
    hidden = Target(target_folder, [2]).hidden_states(IDS, LENGTHS)
    assert torch.equal(hidden[0], states[3][0])  # no padding in this row


def test_only_the_needed_layers_are_kept(target_folder):
    target = Target(target_folder, [1, 3])
    assert target.num_layers == 6
    assert len(target.model.layers) == 4
    assert not hasattr(target.model, "lm_head")
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training


def test_last_state_is_what_the_head_reads(target_folder, full_model):
    """Behind the tapped ones, which do not change; after the final norm, of all layers."""
    target = Target(target_folder, [3, 1], with_last=True)
    assert len(target.model.layers) == 6
    hidden = target.hidden_states(IDS, LENGTHS)
    tapped, last = hidden.tensor_split([2 * target.hidden_size], -1)
    assert last.shape == (3, 20, target.hidden_size)
    assert torch.equal(tapped, Target(target_folder, [3, 1]).hidden_states(IDS, LENGTHS))
    with torch.no_grad():
        output = full_model(IDS, use_cache=False, output_hidden_states=True)
    for b, n in enumerate(LENGTHS.tolist()):
        assert torch.equal(last[b, :n], output.hidden_states[-1][b, :n])
        logits = last[b, :n] @ full_model.lm_head.weight.detach().T
        size = (last[b, :n].abs().max() * full_model.lm_head.weight.abs().max()).item()
        assert (logits - output.logits[b, :n]).abs().max() < rounding(32, size)
        assert not last[b, n:].any()


def test_last_state_of_a_tapped_last_layer(target_folder):
    """The tapped one is from before the final norm, the last one from after it."""
    hidden = Target(target_folder, [5], with_last=True).hidden_states(IDS[:1], LENGTHS[:1])
    before, after = hidden.chunk(2, -1)
    weight = TargetTensors.load(target_folder).final_norm
    normed = torch.nn.functional.rms_norm(before, before.shape[-1:], weight, 1e-6)
    assert (normed - after).abs().max() < rounding(32, after.abs().max().item())


def test_row_alone_equals_row_in_a_padded_batch(target_folder):
    target = Target(target_folder, [1, 3])
    together = target.hidden_states(IDS, LENGTHS)
    alone = target.hidden_states(IDS[1:2, :9], LENGTHS[1:2])
    # Through 4 layers of some 6 sums each, of up to 48 terms.
    assert (together[1, :9] - alone[0]).abs().max() < rounding(4 * 6 * 48, alone.abs().max())


def test_hidden_states_can_feed_training(target_folder):
    """Tensors made in inference mode could not be saved for backward."""
    hidden = Target(target_folder, [1]).hidden_states(IDS, LENGTHS)
    weight = torch.ones(hidden.shape[-1], requires_grad=True)
    (hidden @ weight).sum().backward()
    assert weight.grad is not None


def test_dtype(target_folder):
    target = Target(target_folder, [1], dtype="bfloat16")
    assert target.hidden_states(IDS, LENGTHS).dtype == torch.bfloat16


def test_frozen_tensors_are_the_models(target_folder, full_model):
    frozen = TargetTensors.load(target_folder)
    assert torch.equal(frozen.embedding, full_model.model.embed_tokens.weight)
    assert torch.equal(frozen.head, full_model.lm_head.weight)
    assert torch.equal(frozen.final_norm, full_model.model.norm.weight)


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [([1, 6], "6 is no layer"), ([-1], "-1 is no layer"), ([1, 1], "named twice"), ([], "empty")],
)
def test_bad_layers_are_refused(target_folder, layer_ids, message):
    with pytest.raises(InputError, match=message):
        Target(target_folder, layer_ids)


def test_unsupported_and_unknown_models_are_refused(tmp_path):
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="not supported yet"):
        Target(str(tmp_path), [1])
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    config = {"model_type": "x1", "num_hidden_layers": 2} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="transformers cannot load"):
        Target(str(tmp_path), [1])
