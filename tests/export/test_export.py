"""What an export holds, that training goes on from it, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from exported import RENDERING, card_of, config_of, python_of
from ranks import Ranks, train_overrides
from run_folder import assert_same_bits, weights
from safetensors.torch import load_file, save_file

from dflashdist.config import InputError
from dflashdist.export.folder import export_drafter
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import load_drafter, save_drafter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("ema", "exact"), [(False, "weights"), (True, "ema")])
def test_tensors_are_the_float32_weights_rounded_once(checkpoint, tmp_path, dtype, ema, exact):
    out = export_drafter(checkpoint, tmp_path / "out", dtype=dtype, ema=ema)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md"
    }  # fmt: skip
    kind = getattr(torch, dtype)
    tensors = load_file(out / "model.safetensors")
    held = load_file(checkpoint / f"trainer/{exact}.safetensors")
    assert_same_bits(tensors, {name: tensor.to(kind) for name, tensor in held.items()})
    assert config_of(out)["dtype"] == dtype and config_of(out)["dflashdist"]["averaged"] is ema
    assert load_drafter(out).shape == load_drafter(checkpoint).shape


def test_average_differs_and_is_also_found_by_its_folder(checkpoint, tmp_path):
    raw = export_drafter(checkpoint, tmp_path / "raw")
    one = export_drafter(checkpoint, tmp_path / "one", ema=True, dtype="float32")
    two = export_drafter(checkpoint / "ema", tmp_path / "two", dtype="float32")
    first = load_file(one / "model.safetensors")
    assert_same_bits(first, load_file(two / "model.safetensors"))
    assert not torch.equal(first["fc.weight"], load_drafter(raw).fc.weight)
    assert config_of(two)["dflashdist"] == config_of(one)["dflashdist"]


def test_config_says_where_it_comes_from(checkpoint, tiny_target, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out")
    config, own = config_of(out), config_of(out)["dflashdist"]
    state = json.loads((checkpoint / "trainer/state.json").read_text())
    assert own["target"] == {
        "name": tiny_target, "revision": None, "fingerprint": state["target"]
    }  # fmt: skip
    assert own["rendering"] == RENDERING
    assert own["training"]["step"] == 2 and own["training"]["num_steps"] == 2
    assert own["training"]["optim"]["ema"] == 0.5 and own["training"]["loss"]["terms"] == {"ce": 1}
    assert str(checkpoint.parent.parent) not in json.dumps(config)  # nobody's run folder
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    card = (out / "README.md").read_text()
    assert '"chat_template_kwargs": {"enable_thinking": false}' in card and "sha256 `ab12`" in card
    assert "step 2 of 2" in card and "## Measured" not in card


def test_training_goes_on_from_an_export(checkpoint, overrides, tmp_path):
    """The first weights of the next run are those of the export, to the bit; and it trains."""
    out = export_drafter(checkpoint, tmp_path / "out", dtype="float32", ema=True)
    more = [f"run.dir={tmp_path / 'next'}", f"drafter.init_from={out}", "train.max_steps=1"]
    Ranks(1, train_overrides, [*overrides, *more, "checkpoint.at_start=true"]).results()
    first = weights(tmp_path / "next", 0)
    assert_same_bits(first, load_file(checkpoint / "trainer/ema.safetensors"))
    assert not torch.equal(weights(tmp_path / "next", 1)["fc.weight"], first["fc.weight"])


@pytest.mark.parametrize("at_hand", [True, False])
def test_card_runs_as_it_stands(checkpoint, tiny_target, tmp_path, monkeypatch, capsys, at_hand):
    """Its Python, on a CPU: the answer is the target's own, up to a token that ends turns only by
    the tokenizer's word."""
    pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path / "target"  # of the same sizes, and not of one word alone
    shutil.copytree(tiny_target, folder)
    config = Qwen3Config.from_pretrained(folder, initializer_range=0.3, tie_word_embeddings=False)
    torch.manual_seed(2)
    target = Qwen3ForCausalLM(config).eval()
    target.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "w5 w6"}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    plain = target.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
    end = next(token for token in plain[3:] if token not in plain[:3] and 2 < token < 200)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": tokenizer.convert_ids_to_tokens(end), "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = export_drafter(checkpoint, tmp_path / "source", dtype="float32")
    told = config_of(source)
    told["dflashdist"]["target"]["fingerprint"] = None
    (source / "config.json").write_text(json.dumps(told))
    name = str(folder) if at_hand else "owner/name"
    out = export_drafter(source, tmp_path / "drafter", dtype="float32", target=name)
    code = python_of(out)
    assert (f"stop = [{end}]" in code) == at_hand
    assert code.count(f'"{name}"') == 2 and code.count("'enable_thinking': False") == 1
    monkeypatch.chdir(tmp_path)
    code = code.replace("owner/name", str(folder))
    exec(code.replace('"cuda"', '"cpu"').replace('"Hello"', '"w5 w6"'), {})
    answer = capsys.readouterr().out.strip()
    assert answer == tokenizer.decode(plain[: plain.index(end) + 1]).strip()


@pytest.mark.parametrize("variant", ["dflash2", "dspark"])
def test_training_goes_on_from_a_variants_export(overrides, tmp_path, variant):
    """Round trip: one step, export, one step from there; no part of the variant starts anew."""
    small = {
        "dflash2": ["conv_group_size=8", "selector_rank=4", "selector_top_k=4"],
        "dspark": ["markov_rank=4"],
    }[variant]
    more = [*overrides, f"drafter.variant={variant}", *(f"drafter.{item}" for item in small)]
    more += ["train.max_steps=1", "checkpoint.at_start=true"]
    Ranks(1, train_overrides, [*more, f"run.dir={tmp_path / 'one'}"]).results()
    one = tmp_path / "one/checkpoints/step_00000001"
    out = export_drafter(one, tmp_path / "out", dtype="float32")
    more += [f"run.dir={tmp_path / 'two'}", f"drafter.init_from={out}"]
    Ranks(1, train_overrides, more).results()
    first, after = weights(tmp_path / "two", 0), weights(tmp_path / "two", 1)
    assert_same_bits(first, weights(tmp_path / "one", 1))
    parts = {"dflash2": ("candidate_selector", "attention_conv"), "dspark": ("markov_head",)}
    for part in parts[variant]:
        assert any(not torch.equal(after[name], first[name]) for name in first if part in name)


def test_refusals(checkpoint, tiny_target, tmp_path):
    def refused(source, fault, **options):
        with pytest.raises(InputError, match=fault):
            export_drafter(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    plain = tmp_path / "plain"  # as another trainer would publish it
    shutil.copytree(checkpoint, plain, ignore=shutil.ignore_patterns("trainer", "ema"))
    refused(plain, "which target")
    refused(plain, "optim.ema", ema=True, target=tiny_target)
    refused(tmp_path, "no config.json")
    refused(checkpoint, "format 'gguf'", format="gguf")
    refused(checkpoint, "dtype 'int8'", dtype="int8")
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    refused(checkpoint, "another target", target=str(other))
    export_drafter(plain, tmp_path / "fine", target="owner/name", revision="abc")
    own = config_of(tmp_path / "fine")["dflashdist"]
    assert own["target"] == {"name": "owner/name", "revision": "abc", "fingerprint": None}
    card = card_of(tmp_path / "fine")
    assert "base_model: owner/name" in card and "vllm serve owner/name --revision abc" in card
    assert "--model-path owner/name --revision abc" in card
    assert python_of(tmp_path / "fine").count('"owner/name", revision="abc"') == 2


def test_wrong_target_and_broken_weights(checkpoint, tiny_target, tmp_path):
    drafter = load_drafter(checkpoint)
    wide = Drafter(replace(drafter.shape, num_target_layers=9))
    wide.load_state_dict(drafter.state_dict())
    save_drafter(tmp_path / "wide", wide, "float32")
    with pytest.raises(InputError, match="num_hidden_layers is 6"):
        export_drafter(tmp_path / "wide", tmp_path / "out", target=tiny_target)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e5
    save_drafter(tmp_path / "large", drafter, "float32")
    with pytest.raises(InputError, match=r"fc\.weight is too large for float16"):
        export_drafter(tmp_path / "large", tmp_path / "out", target="a/b", dtype="float16")
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    save_drafter(tmp_path / "nan", drafter, "float32")
    with pytest.raises(InputError, match=r"norm\.weight is not finite"):
        export_drafter(tmp_path / "nan", tmp_path / "out", target="a/b")


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_the_card_names_no_licence_and_claims_what_was_checked(checkpoint, tmp_path, layout):
    out = export_drafter(checkpoint, tmp_path / "out", format=layout, target="owner/name")
    card = (out / "README.md").read_text()
    front = card.split("---")[1]
    assert "license" not in front and "add `license: ...` to the block at the top" in card
    loads = {"hf": "The package `dflash` 0.1 loads it.",
             "speculators": "The library `speculators` 0.9 loads it."}  # fmt: skip
    assert loads[layout] in card and "no server was run" in card
