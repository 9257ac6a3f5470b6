"""Variants against the published inference package, through saved folders."""

import pytest
import torch
from rounding import EXACT, in_float64, rounding
from safetensors.torch import load_file
from test_dflash_parity import parity_error
from torch import nn
from variants import CHANGES, variant_drafter

from dflashdist.model.drafter import greedy_drafts, sampled_drafts
from dflashdist.model.drafter_folder import load_drafter, save_drafter


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("dflash.model", reason="the package dflash (extra `dev`) is not installed")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"dspark"}))
def test_training_block_equals_the_package(shape, tmp_path, name):
    assert parity_error(variant_drafter(shape, name), tmp_path) < EXACT


def package_model(folder):
    """The package's DFlash 2 model from a folder of ours, and what it did not find or know."""
    from dflash.model import DFlash2DraftModel

    model, info = DFlash2DraftModel.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    return in_float64(model).eval(), {k: set(v) for k, v in info.items() if k != "error_msgs"}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["dflash2", "dflash2 full"])
def test_proposals_equal_the_package(shape, tmp_path, name):
    """Greedy proposals of whole blocks, and the distribution that the first draft is drawn from."""
    drafter = variant_drafter(shape, name)
    save_drafter(tmp_path, drafter, "float64")
    theirs, info = package_model(tmp_path)
    assert not any(info.values()), info
    generator = torch.Generator().manual_seed(0)
    states = 2 * torch.randn(60, shape.block_size, shape.hidden_size, generator=generator)
    head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False).requires_grad_(False)
    anchors = torch.randint(shape.vocab_size, (60,), generator=generator)
    ours = greedy_drafts(drafter, states, anchors, head.weight)
    with torch.no_grad():
        expected, candidates, _ = theirs.propose(states[:, 1:], anchors, head, 0.0)
        assert torch.equal(ours, expected)
        # The selector decides: its choice is not the most likely token of the slot.
        assert (ours != head(states[:, 1:]).argmax(-1)).float().mean() > 0.2
        _, candidates, probs = theirs.propose(states[:, 1:], anchors, head, 0.7)
    _, own = sampled_drafts(drafter, states, anchors, head.weight, 0.7, generator)
    whole = torch.zeros(60, shape.vocab_size).scatter_(1, candidates[:, 0], probs[:, 0].double())
    # The package rounds its scores, of up to 20, to float32 and divides them by 0.7.
    assert (own[:, 0] - whole).abs().max() < rounding(1, 20 / 0.7)


def test_files_of_dflash2_have_the_published_names(shape, tmp_path):
    drafter = variant_drafter(shape, "dflash2")
    save_drafter(tmp_path, drafter, "bfloat16")
    sizes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    width, vocabulary, groups = shape.hidden_size, shape.vocab_size, shape.hidden_size // 8
    for i in range(shape.num_layers):
        for conv in ("attention_conv", "mlp_conv"):
            assert sizes[f"layers.{i}.{conv}.base_kernel"] == (2, 2, width)
            assert sizes[f"layers.{i}.{conv}.kernel_projection.weight"] == (2 * 2 * groups, width)
    assert sizes["candidate_selector.predecessor_codebook"] == (vocabulary, 5)
    assert sizes["candidate_selector.successor_codebook"] == (vocabulary, 5)
    assert sizes["candidate_selector.hidden_projection.weight"] == (5, width)
    assert len(sizes) == (11 + 4) * shape.num_layers + 3 + 3
    _, info = package_model(tmp_path)
    assert not any(info.values()), info


def test_files_of_dspark_have_the_published_names(shape, tmp_path):
    drafter = variant_drafter(shape, "dspark")
    save_drafter(tmp_path, drafter, "bfloat16")
    sizes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    added = {name: size for name, size in sizes.items() if "_head." in name}
    assert added == {
        "markov_head.markov_w1.weight": (shape.vocab_size, 4),
        "markov_head.markov_w2.weight": (shape.vocab_size, 4),
        "confidence_head.proj.weight": (1, shape.hidden_size + 4),
        "confidence_head.proj.bias": (1,),
    }


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_save_and_load(shape, tmp_path, name):
    drafter = variant_drafter(shape, name)
    save_drafter(tmp_path, drafter, "float32")
    loaded = load_drafter(tmp_path)
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
