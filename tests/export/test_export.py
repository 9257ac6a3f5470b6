"""What an export holds, that training goes on from it, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks, train_overrides
from run_folder import assert_same_bits, weights
from safetensors.torch import load_file, save_file

from dflashdist.config import EvaluateConfig, InputError
from dflashdist.export.folder import export_drafter
from dflashdist.model.drafter import Drafter, load_drafter, save_drafter

RENDERING = {
    "template": "own", "template_sha256": "ab12", "settings": {"enable_thinking": False},
    "date": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def overrides(tiny_target, tiny_store) -> list[str]:
    return [
        f"data.store={tiny_store}", f"target.path={tiny_target}", "data.max_length=200",
        "schedule.max_tokens=400", "schedule.max_anchors=32", "schedule.num_buckets=4",
        "schedule.grid=8", "schedule.sort_block=2", "drafter.num_layers=2", "drafter.block_size=4",
        "drafter.num_anchors=8", "drafter.target_layer_ids=[1,3]", "optim.lr=3e-2",
        "train.device=cpu", "train.accumulation_steps=2", "roles.layout=colocated",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, overrides) -> Path:
    """Two steps of training with an average of the weights; with the rendering of its store."""
    folder = tmp_path_factory.mktemp("run")
    more = [f"run.dir={folder}", "train.max_steps=2", "checkpoint.every=2", "optim.ema=0.5"]
    Ranks(1, train_overrides, [*overrides, *more]).results()
    place = folder / "checkpoints/step_00000002"
    state = json.loads((place / "trainer/state.json").read_text())
    (place / "trainer/state.json").write_text(json.dumps(state | {"rendering": RENDERING}))
    return place


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


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


def test_card_shows_what_was_measured(checkpoint, tiny_target, tmp_path):
    from dflashdist.eval.acceptance import evaluate_drafters

    rows = [{"messages": [{"role": "user", "content": f"w{i} w{i + 3}"}]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    both = [checkpoint, checkpoint / "ema"]
    settings = EvaluateConfig(max_new_tokens=12)
    reports = evaluate_drafters(both, tiny_target, tmp_path / "rows.jsonl", settings, "cpu")
    (tmp_path / "report.json").write_text(json.dumps(reports))
    out = export_drafter(checkpoint, tmp_path / "out", report=tmp_path / "report.json", ema=True)
    card, one = (out / "README.md").read_text(), reports[1]["all"]
    low, high = one["acceptance_length_interval"]
    shown = f"{one['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"
    assert f"| acceptance length, pooled | {shown} |" in card
    assert f"| answers | {one['num_answers']} | {reports[1]['clean']['num_answers']} |" in card
    assert f"| draft 3 accepted | {one['position_acceptance'][2]:.2f} [" in card
    assert "greedy, at most 12 new tokens, float32 on cpu" in card
    # A report of other weights, or of none at all, is no measurement of this drafter.
    (tmp_path / "raw.json").write_text(json.dumps(reports[0]))
    (tmp_path / "odd.json").write_text("[1]")
    for name, fault in (("raw", "measured of"), ("odd", "not a report"), ("none", "not a report")):
        with pytest.raises(InputError, match=fault):
            export_drafter(checkpoint, tmp_path / "bad", report=tmp_path / f"{name}.json", ema=True)
    # Measured elsewhere, where the run's folder had another name.
    (tmp_path / "far.json").write_text(
        json.dumps(reports[0] | {"checkpoint": "/elsewhere/checkpoints/step_00000002"})
    )
    export_drafter(checkpoint, tmp_path / "far", report=tmp_path / "far.json")
    assert "## Measured" in (tmp_path / "far/README.md").read_text()


def test_card_runs_as_it_stands(checkpoint, tiny_target, tmp_path, monkeypatch, capsys):
    """Its Python, on a CPU: the answer is the target's own."""
    pytest.importorskip("dflash.model", reason="the package dflash (extra `dev`) is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export_drafter(checkpoint, tmp_path / "drafter", dtype="float32")
    monkeypatch.chdir(tmp_path)
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace('"cuda"', '"cpu"').replace('"Hello"', '"w5 w6"'), {})
    answer = capsys.readouterr().out.strip()
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    prompt = [{"role": "user", "content": "w5 w6"}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    plain = target.generate(ids, max_new_tokens=64, do_sample=False)
    assert answer == tokenizer.decode(plain[0, ids.shape[1] :]).strip()


def test_existing_folders_are_kept(checkpoint, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out")
    with pytest.raises(InputError, match="--overwrite"):
        export_drafter(checkpoint, out)
    export_drafter(checkpoint, out, dtype="float32", overwrite=True)
    assert config_of(out)["dtype"] == "float32"
    before = sorted(path.name for path in checkpoint.iterdir())
    with pytest.raises(InputError, match="no export"):
        export_drafter(checkpoint, checkpoint, overwrite=True)
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    (tmp_path / "mine").mkdir()
    export_drafter(checkpoint, tmp_path / "mine")  # empty
    with pytest.raises(InputError, match="no such folder"):
        export_drafter(checkpoint, tmp_path / "a/b")


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
    card = (tmp_path / "fine/README.md").read_text()
    assert "base_model: owner/name" in card and "vllm serve owner/name --revision abc" in card


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
