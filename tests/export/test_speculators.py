"""The layout `speculators`: its keys, and that the library computes the same from it."""

import json
from dataclasses import replace

import pytest
import torch
from rounding import EXACT, in_float64
from variants import CHANGES, variant_drafter

from dflashdist.config import DrafterConfig, InputError
from dflashdist.export.folder import export_drafter
from dflashdist.model.blocks import block_ids
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import save_drafter
from dflashdist.model.shape import FULL, SLIDING, DrafterShape
from dflashdist.model.target_files import read_target_config

# What its readers would see otherwise: full layers beside causal ones, or causal themselves.
REFUSED = {"one sliding layer", "causal", "causal sliding"}
SAID = [name for name in CHANGES if name not in REFUSED]


@pytest.fixture
def exported(tiny_target, tmp_path):
    def export(name: str, **options):
        settings = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[1, 3])
        shape = DrafterShape.from_target(read_target_config(tiny_target), 200, settings)
        drafter = variant_drafter(shape, name).float()  # as it is saved
        save_drafter(tmp_path / "source", drafter, "float32")
        out = export_drafter(
            tmp_path / "source", tmp_path / "out", format="speculators", dtype="float32",
            **{"target": tiny_target} | options,
        )  # fmt: skip
        return drafter, out

    return export


@pytest.mark.parametrize("name", SAID)
def test_keys(exported, tiny_target, name):
    drafter, out = exported(name)
    shape, config = drafter.shape, json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == shape.variant
    assert config["aux_hidden_state_layer_ids"] == [2, 4]  # vLLM's: one more than ours
    assert config["mask_token_id"] == 200 and config["block_size"] == 4
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 208
    told = config["speculators_config"]
    assert told["algorithm"] == config["speculators_model_type"]
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel",
             "dspark": "DSparkDraftModel"}  # fmt: skip
    assert config["architectures"] == [names[shape.variant]]
    assert told["verifier"] == {
        "name_or_path": tiny_target, "architectures": ["Qwen3ForCausalLM"]
    }  # fmt: skip
    drafts = 4 if shape.variant == "dspark" else 3
    assert told["proposal_methods"][0]["speculative_tokens"] == drafts
    assert config["sample_from_anchor"] is (shape.variant == "dspark")
    # vLLM makes every layer causal, full ones too, unless this is true.
    sights = [shape.sight(i) for i in range(2)]
    assert [s.causal for s in sights] == [not config["sliding_window_non_causal"]] * 2
    layers = config["transformer_layer_config"]
    assert layers["dtype"] == config["dtype"] == "float32"
    assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"] == 1e4
    assert "dflash_config" not in config and "block_size" not in layers
    assert config["dflashdist"]["target"]["name"] == tiny_target


@pytest.mark.parametrize("name", SAID)
def test_command(exported, name):
    """Of vLLM, which finds the target in config.json, though not its revision."""
    drafter, out = exported(name, target="owner/name", revision="abc")
    card = (out / "README.md").read_text()
    served = drafter.shape.variant != "dflash2"  # vLLM reads it in the other layout only
    command = "vllm serve ./out --revision abc --attention-backend flash_attn\n"
    assert (command in card) == served and ("vllm serve" in card) == served
    assert ("in the layout `hf` only" in card) != served
    assert ("`--revision` is the target's" in card) == served
    assert "sglang" not in card and "```python" not in card


def test_layers_of_two_kinds_need_vllms_newer_runner(exported, tmp_path):
    drafter, _ = exported("dflash")
    kinds = {"layer_types": (SLIDING, FULL), "sliding_window": 6, "is_causal": False}
    mixed = Drafter(replace(drafter.shape, **kinds))
    mixed.load_state_dict(drafter.state_dict())
    save_drafter(tmp_path / "mixed", mixed)
    out = export_drafter(
        tmp_path / "mixed", tmp_path / "served", format="speculators", target="owner/name"
    )
    assert "\nVLLM_USE_V2_MODEL_RUNNER=1 vllm serve ./served " in (out / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_it_cannot_say_is_refused(exported, name):
    with pytest.raises(InputError, match=r"one causality for all layers.* take --format hf"):
        exported(name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", SAID)
def test_library_computes_the_same(exported, tiny_target, name):
    pytest.importorskip(
        "speculators",
        reason="pip install --no-deps speculators hs-connectors loguru pydantic-settings",
    )
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from transformers import AutoModelForCausalLM

    drafter, out = exported(name)
    shape = drafter.shape
    config = SpeculatorModelConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "sdpa"
    theirs = SpeculatorModel.from_pretrained(out, config=config, dtype=torch.float64)
    theirs = in_float64(theirs).eval()
    drafter = drafter.double()
    missing = drafter.state_dict().keys() - theirs.state_dict().keys()
    assert not missing
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float64)
    embedding = target.get_input_embeddings().weight.detach()
    assert torch.equal(theirs.lm_head.weight, target.lm_head.weight)
    generator = torch.Generator().manual_seed(5)
    length = 14
    ids = torch.randint(3, 200, (1, length), generator=generator)
    hidden = torch.randn(1, length, 64, generator=generator)
    torch.manual_seed(0)  # the library draws the anchors
    with torch.no_grad():
        states, logits, *_, indices = theirs._backbone_forward(
            hidden, ids, torch.ones_like(ids), hidden[..., :32], torch.zeros_like(ids),
            max_anchors=6,
        )  # fmt: skip
    anchors = indices.view(1, -1, 4)[..., 0]
    keep = torch.ones_like(anchors, dtype=torch.bool)
    inputs = block_ids(ids, anchors, keep, block_size=4, mask_token_id=shape.mask_token_id)
    with torch.no_grad():
        ours = drafter(hidden, embedding[inputs], anchors, keep)
    if shape.sliding_window:  # the library's window begins at the anchor for every slot
        near = anchors[0] < shape.sliding_window - 3
        assert near.any() and not near.all()
        keep_rows = near.repeat_interleave(4)
        ours, states, logits = ours[:, keep_rows], states[:, keep_rows], logits[:, keep_rows]
    assert (ours - states).abs().max() < EXACT
    assert (ours @ target.lm_head.weight.T - logits).abs().max() < EXACT
    _heads_are_the_same(drafter, theirs, ours.detach()[0], ids[0])


def _heads_are_the_same(drafter, theirs, states, ids):
    """The parts of a variant, on these states [M, H] and any tokens before."""
    before = ids[torch.arange(len(states)) % len(ids)]
    with torch.no_grad():
        if drafter.markov_head is not None:
            bias = theirs.markov_head.block_bias(
                prev_token_ids=before[None], hidden_states=states[None]
            )
            assert (drafter.markov_head(before) - bias[0]).abs().max() < EXACT
            embedded = drafter.markov_head.markov_w1(before)
            chance = theirs.confidence_head(torch.cat([states, embedded], -1))
            ours = drafter.confidence_head(states, embedded)
            assert (ours - chance).abs().max() < EXACT
        if drafter.candidate_selector is not None:
            logits = states @ theirs.lm_head.weight.T
            unary, top = logits.topk(3)
            expected = theirs.candidate_selector.score_candidates(logits, states, before, top)
            ours = drafter.candidate_selector(states, unary, top, before)
            assert (ours - expected).abs().max() < EXACT
