"""What loads an export: the package dflash itself; vLLM and SGLang by what their loaders read.

The lists follow vllm/model_executor/models/qwen3_dflash.py and qwen3_dspark.py, and
sglang/srt/models/dflash.py with srt/speculative/dflash_utils.py, of August 2026.
"""

import ast
import json
from types import SimpleNamespace

import pytest
import torch
from rounding import EXACT, in_float64
from safetensors import safe_open
from variants import CHANGES, WORDS, target_of_few_words, variant_drafter

from dflashdist.config import DrafterConfig
from dflashdist.eval.decode import CachedTarget, Rule, decode_speculative
from dflashdist.export.folder import export_drafter
from dflashdist.model.blocks import block_ids
from dflashdist.model.drafter_folder import load_drafter, save_drafter
from dflashdist.model.shape import FULL, SLIDING, DrafterShape

PACKAGE_FIX = "pip install --no-deps dflash==0.1.0"
PACKAGE = [name for name in CHANGES if name != "dspark"]  # the variants that dflash 0.1 has


@pytest.fixture(scope="module")
def model():
    """In float64, as the drafters are loaded here: rounding must not decide a token."""
    return in_float64(target_of_few_words())


@pytest.fixture
def exported(model, tmp_path):
    """Name of a variant -> its drafter, and the export of it in float32."""

    def export(name: str, **options):
        settings = DrafterConfig(
            num_layers=2, block_size=5, target_layer_ids=[0, 2], mask_token_id=WORDS - 1
        )
        shape = DrafterShape.from_target(model.config.to_dict(), None, settings)
        drafter = variant_drafter(shape, name).eval()
        save_drafter(tmp_path / "source", drafter, "float32")
        options = {"target": "owner/name", "dtype": "float32"} | options
        return drafter, export_drafter(tmp_path / "source", tmp_path / "out", **options)

    return export


def in_package(folder, shape):
    """The drafter as the package dflash loads it; every name must be found."""
    dflash = pytest.importorskip("dflash.model", reason=PACKAGE_FIX)
    two = shape.variant == "dflash2"
    kind = dflash.DFlash2DraftModel if two else dflash.DFlashDraftModel
    loaded, found = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return in_float64(loaded).eval()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", PACKAGE)
def test_logits_are_those_of_the_package(exported, name):
    drafter, out = exported(name)
    shape, theirs = drafter.shape, in_package(out, drafter.shape)
    ours = load_drafter(out, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 30, shape.num_features * 32, generator=generator)
    embedding = torch.randn(WORDS, 32, generator=generator)
    head = torch.randn(WORDS, 32, generator=generator) / 32**0.5
    ids = torch.randint(WORDS, (1, 30), generator=generator)
    anchors = torch.tensor([[1, 7, 25]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    inputs = block_ids(ids, anchors, keep, block_size=5, mask_token_id=shape.mask_token_id)
    embeds = embedding[inputs]
    with torch.no_grad():
        blocks = ours(hidden, embeds, anchors, keep).unflatten(1, (3, 5)) @ head.T
        for n, a in enumerate(anchors[0].tolist()):
            states = theirs(
                position_ids=torch.arange(a + 5)[None],
                noise_embedding=embeds.unflatten(1, (3, 5))[:, n],
                target_hidden=hidden[:, :a],
            )
            assert (blocks[:, n] - states @ head.T).abs().max() < EXACT


@pytest.mark.parametrize("name", PACKAGE)
def test_package_decodes_as_we_do(exported, model, name):
    """dflash_generate of the export: the target's own greedy output, by passes as ours."""
    dflash = pytest.importorskip("dflash.model", reason=PACKAGE_FIX)
    drafter, out = exported(name)
    theirs = in_package(out, drafter.shape)
    prompts = [[first % 7, 3, 5, first % 3, 2, 6, 1][: 3 + first % 5] for first in range(5)]
    target = CachedTarget(model, drafter.shape.target_layer_ids)
    own = load_drafter(out, dtype=torch.float64).eval()
    answers, _ = decode_speculative(target, own, prompts, Rule(24, (0,)))
    longest = 0
    for prompt, ours in zip(prompts, answers, strict=True):
        starts: list[int] = []  # of the passes' blocks, after the prefill's 0
        spy = model.register_forward_pre_hook(noting(starts), with_kwargs=True)
        # Near its limit the package drafts shorter blocks, where we and the servers draft whole
        # ones and offer less of them: so its limit lies a block further.
        output = dflash.dflash_generate(theirs, model, torch.tensor([prompt]), 24 + 5, [0])
        spy.remove()
        said = output[0, len(prompt) :][:24].tolist()
        assert said == ours.tokens
        own = [len(prompt) + sum(ours.emitted[:i]) for i in range(len(ours.emitted))]
        assert starts[1 : len(own) + 1] == own
        longest = max([longest, *ours.emitted])
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert plain[0, len(prompt) :].tolist() == said
    assert longest > 1  # drafts were taken


def noting(starts: list[int]):
    """A hook before the target's forward: the first position of each."""

    def hook(_model, _arguments, given):
        starts.append(int(given["position_ids"][0, 0]))

    return hook


def read(folder):
    """config.json, and the tensors' shapes and dtype."""
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        dtypes = {str(file.get_tensor(name).dtype).removeprefix("torch.") for name in shapes}
        assert file.metadata() == {"format": "pt"}
    return SimpleNamespace(config=config, shapes=shapes, dtypes=dtypes)


def layer_names(layers: int) -> set[str]:
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    return {f"layers.{i}.{part}.weight" for i in range(layers) for part in parts}


@pytest.mark.parametrize("name", CHANGES)
def test_names_are_the_published_ones(exported, name):
    """No prefix (vLLM puts `model.` before each name), nothing of the target, nothing unknown:
    SGLang passes over names it does not know."""
    drafter, out = exported(name, dtype="bfloat16")
    found = read(out)
    added = {
        "dflash": set(),
        "dflash2": {
            "candidate_selector.predecessor_codebook",
            "candidate_selector.successor_codebook",
            "candidate_selector.hidden_projection.weight",
        }
        | {
            f"layers.{i}.{conv}.{part}"
            for i in range(2)
            for conv in ("attention_conv", "mlp_conv")
            for part in ("base_kernel", "kernel_projection.weight")
        },
        "dspark": {
            "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
            "confidence_head.proj.weight", "confidence_head.proj.bias",
        },
    }[drafter.shape.variant]  # fmt: skip
    top = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert found.shapes.keys() == layer_names(2) | top | added
    assert found.dtypes == {found.config["dtype"]} == {"bfloat16"}
    assert not any(part in key for key in found.shapes for part in ("lm_head", "embed", "d2t"))


@pytest.mark.parametrize("name", CHANGES)
def test_vllm_reads(exported, name):
    drafter, out = exported(name)
    shape, found = drafter.shape, read(out)
    config, extra = found.config, found.config["dflash_config"]
    assert config["architectures"] == [
        {
            "dflash": "DFlashDraftModel",
            "dflash2": "DFlash2DraftModel",
            "dspark": "Qwen3DSparkModel",
        }[shape.variant]
    ]
    # Outputs of layer l are tapped as what enters layer l + 1; fc takes them side by side.
    taps = [i + 1 for i in extra["target_layer_ids"]]
    assert taps == [1, 3]
    assert found.shapes["fc.weight"] == (config["hidden_size"], len(taps) * config["hidden_size"])
    assert extra["mask_token_id"] == shape.mask_token_id
    assert "mask_embedding" not in extra and not (out / "mask_embedding.pt").exists()
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert not any(
        key in config for key in ("draft_vocab_size", "target_hidden_size", "logit_scale")
    )
    types = config["layer_types"]
    assert len(types) == config["num_hidden_layers"] and not extra.get("use_swa")
    for i, kind in enumerate(types):
        override = config.get("is_causal", extra.get("causal"))
        causal = kind == SLIDING if override is None else override
        window = config["sliding_window"] if kind == SLIDING else None
        sight = shape.sight(i)
        assert (window, causal) == (sight.window, sight.causal)
    if shape.variant == "dflash2":
        sizes = {key: extra[key] for key in ("conv_kernel_size", "conv_group_size")}
        taps, groups = sizes["conv_kernel_size"], 32 // sizes["conv_group_size"]
        assert found.shapes["layers.0.mlp_conv.base_kernel"] == (2, taps, 32)
        kernels = found.shapes["layers.0.mlp_conv.kernel_projection.weight"]
        assert kernels == (2 * taps * groups, 32)
        codebook = found.shapes["candidate_selector.predecessor_codebook"]
        assert codebook == (WORDS, extra["selector_rank"]) and extra["selector_top_k"] <= WORDS
    if shape.variant == "dspark":  # read at the top level
        assert config["target_layer_ids"] == [0, 2] and config["mask_token_id"] == WORDS - 1
        assert config["markov_head_type"] == "vanilla" and not config.get("dspark_bonus_anchor")
        rank = config["markov_rank"]
        assert found.shapes["markov_head.markov_w1.weight"] == (WORDS, rank)
        assert found.shapes["confidence_head.proj.weight"] == (
            1, 32 + rank * config["confidence_head_with_markov"]
        )  # fmt: skip
    command = (out / "README.md").read_text().split("--speculative-config '")[1].split("'")[0]
    method = "dspark" if shape.variant == "dspark" else "dflash"
    drafts = config["block_size"] - (method == "dflash")
    assert json.loads(command) == {
        "method": method, "model": "./out", "num_speculative_tokens": drafts
    }  # fmt: skip
    assert drafts == shape.num_drafts
    card = (out / "README.md").read_text()
    runner = len(set(types)) > 1 or shape.variant == "dflash2"
    assert ("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve owner/name" in card) == runner
    since = {"dflash": "vLLM 0.20 or newer", "dflash2": "#52816", "dspark": "#46995"}
    assert since[shape.variant] in card and "--chat-template" not in card


@pytest.mark.parametrize("name", CHANGES)
def test_sglang_reads(exported, name):
    drafter, out = exported(name)
    found = read(out)
    config, extra = found.config, found.config["dflash_config"]
    assert config["block_size"] == extra["block_size"] == 5  # one or the other, else 16
    ids, layers = extra["target_layer_ids"], config["num_target_layers"]
    assert layers == 4 and all(0 <= i < layers for i in ids) and len(set(ids)) == len(ids)
    assert config["hidden_act"] == "silu" and config["attention_bias"] is False
    assert found.shapes["fc.weight"] == (32, len(ids) * 32)
    assert set(config["layer_types"]) <= {FULL, SLIDING}
    if SLIDING in config["layer_types"]:
        assert config["sliding_window"] == drafter.shape.sliding_window
        assert config["use_sliding_window"] is True
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] is None
    assert config.get("is_neox_style", True) and config["intermediate_size"] == 64
    width = (config["num_attention_heads"] * config["head_dim"], 32)
    assert found.shapes["layers.0.self_attn.q_proj.weight"] == width
    card = (out / "README.md").read_text()
    dspark = drafter.shape.variant == "dspark"
    assert ("--speculative-algorithm DSPARK" in card) == dspark
    assert ("--speculative-num-draft-tokens 5" in card) != dspark
    assert ("--speculative-dspark-block-size 5" in card) == dspark
    noted = "Not every version of SGLang reads `is_causal`" in card
    assert noted == ("is_causal" in config) == (drafter.shape.is_causal is not None)
    since = {"dflash": "#22077", "dflash2": "#35371", "dspark": "#30261"}
    assert f"SGLang with pull request {since[drafter.shape.variant]}" in card


def test_older_and_newer_transformers_read_one_rope(exported):
    """Readers of version 4 take `rope_theta`, those of version 5 `rope_parameters`."""
    from transformers import AutoConfig

    _, out = exported("dflash")
    assert AutoConfig.from_pretrained(out).rope_parameters["rope_theta"] == 5e5
    assert "auto_map" not in json.loads((out / "config.json").read_text())


def test_names_are_quoted(exported, tmp_path):
    """In the shell's way and in Python's, whatever a target is called."""
    odd = tmp_path / 'a "b" c'
    odd.mkdir()
    target_of_few_words().save_pretrained(odd)
    _, out = exported("dflash", target=str(odd), revision='x"y')
    card = (out / "README.md").read_text()
    assert f"vllm serve '{odd}' --revision 'x\"y' " in card
    assert f"--model-path '{odd}' --revision 'x\"y' " in card
    code = card.split("```python\n")[1].split("```")[0]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = ("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained")
    read = [call for call in calls if ast.unparse(call.func) in names]
    assert [ast.literal_eval(call.args[0]) for call in read] == [str(odd)] * 2
    revisions = [key.value for call in read for key in call.keywords if key.arg == "revision"]
    assert [ast.literal_eval(one) for one in revisions] == ['x"y'] * 2


def test_reading_the_last_layer_is_warned_of(model, tmp_path, caplog):
    settings = DrafterConfig(
        num_layers=1, block_size=5, target_layer_ids=[1, 3], mask_token_id=WORDS - 1
    )
    shape = DrafterShape.from_target(model.config.to_dict(), None, settings)
    save_drafter(tmp_path / "source", variant_drafter(shape, "causal"), "float32")
    out = export_drafter(tmp_path / "source", tmp_path / "out", target="owner/name")
    assert (
        "last layer" in caplog.text and "before the final norm" in (out / "README.md").read_text()
    )
