"""First weights: from another drafter, from the target's layers, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from variants import CHANGES, variant_drafter

from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import save_drafter
from dflashdist.model.initial import check_initial, initialise


def started(shape, target: str, **settings) -> Drafter:
    """A drafter of this shape, checked and initialised as a run with these `drafter` settings."""
    check_initial(shape, DrafterConfig(**settings), target, None)
    drafter = Drafter(shape)
    final_norm = torch.full((shape.hidden_size,), 2.0)
    initialise(drafter, DrafterConfig(**settings), target, None, seed=5, final_norm=final_norm)
    return drafter


def equal(a: Drafter, b: Drafter) -> list[str]:
    """Names of the tensors that both have and that are equal to the bit."""
    other = b.state_dict()
    return [n for n, t in a.state_dict().items() if n in other and torch.equal(t, other[n])]


@pytest.mark.parametrize("init", ["fan_in", "random", "published"])
def test_drawn(shape, init):
    expected = Drafter(shape)
    drawn = "fan_in" if init == "random" else init
    expected.reset_parameters(drawn, seed=5, final_norm=torch.full((shape.hidden_size,), 2.0))
    assert equal(started(shape, "nowhere", init=init), expected) == list(expected.state_dict())


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_from_a_published_folder(shape, tmp_path, name):
    """bfloat16 weights, widened; and of a checkpoint the float32 ones beside them."""
    drafter = variant_drafter(shape, name)
    save_drafter(tmp_path, drafter, "bfloat16")
    loaded = started(drafter.shape, "nowhere", init_from=str(tmp_path))
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.bfloat16().float()), key
        assert loaded.state_dict()[key].dtype == torch.float32
    (tmp_path / "trainer").mkdir()
    save_file(drafter.state_dict(), tmp_path / "trainer/weights.safetensors")
    exact = started(drafter.shape, "nowhere", init_from=str(tmp_path))
    assert equal(exact, drafter) == list(drafter.state_dict())


def test_from_the_average_of_a_checkpoint(shape, tmp_path):
    """Its float32 weights too, not those that are served."""
    raw, average = variant_drafter(shape, "dflash"), variant_drafter(shape, "dflash", seed=9)
    save_drafter(tmp_path, raw)
    save_drafter(tmp_path / "ema", average)
    (tmp_path / "trainer").mkdir()
    save_file(raw.state_dict(), tmp_path / "trainer/weights.safetensors")
    save_file(average.state_dict(), tmp_path / "trainer/ema.safetensors")
    loaded = started(shape, "nowhere", init_from=str(tmp_path / "ema"))
    assert equal(loaded, average) == list(average.state_dict())


@pytest.mark.parametrize("name", ["dflash2 full", "dspark"])
def test_a_variant_from_a_plain_drafter(shape, tmp_path, name):
    """The backbone is taken; the variant's parts are as new, without effect."""
    plain = variant_drafter(shape, "dflash")
    save_drafter(tmp_path, plain, "float32")
    own = replace(shape, **CHANGES[name])
    loaded, new = started(own, "nowhere", init_from=str(tmp_path)), started(own, "nowhere")
    assert set(plain.state_dict()) <= set(equal(loaded, plain))
    parts = tuple(new.variant_parts())
    added = [key for key in new.state_dict() if key.startswith(parts)]
    assert added and set(added) <= set(equal(loaded, new))


def test_fine_tuning_to_other_blocks_and_another_sight(shape, tmp_path, caplog):
    """Allowed, and told: nothing else would say that the layers now see something else."""
    plain = variant_drafter(shape, "dflash")
    save_drafter(tmp_path, plain, "float32")
    other = replace(shape, **CHANGES["causal sliding"], block_size=8)
    assert equal(started(other, "nowhere", init_from=str(tmp_path)), plain) == list(
        plain.state_dict()
    )

    assert [record.getMessage() for record in caplog.records] == [
        "drafter.init_from: block_size was 4 there and is 8 here",
        "drafter.init_from: layer_types was () there and is "
        "('sliding_attention', 'full_attention') here",
        "drafter.init_from: sliding_window was None there and is 9 here",
        "drafter.init_from: is_causal was None there and is True here",
    ]
    caplog.clear()
    started(shape, "nowhere", init_from=str(tmp_path))
    assert not caplog.records
    started(replace(shape, **CHANGES["dspark"]), "nowhere", init_from=str(tmp_path))
    assert "drafts the next one here" in caplog.text


def test_what_does_not_fit_is_refused_before_weights_are_read(shape, target_folder, tmp_path):
    """By configuration and headers: there are no weights to read."""
    save_drafter(tmp_path, variant_drafter(shape, "dflash"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="intermediate_size is 48 there, 64 here"):
        settings = DrafterConfig(init_from=str(tmp_path))
        check_initial(replace(shape, intermediate_size=64), settings, "nowhere", None)
    with pytest.raises(InputError, match=r"gate_proj\.weight is \(48, 32\), .* \(64, 32\)"):
        settings = DrafterConfig(init="target_layers")
        check_initial(replace(shape, intermediate_size=64), settings, target_folder, None)


def test_what_does_not_fit_is_refused(shape, tmp_path):
    save_drafter(tmp_path / "plain", variant_drafter(shape, "dflash"), "float32")
    save_drafter(tmp_path / "second", variant_drafter(shape, "dflash2"), "float32")
    for change, message in (
        ({"intermediate_size": 64}, "intermediate_size is 48 there, 64 here"),
        ({"target_layer_ids": (1, 3)}, r"target_layer_ids is \(3, 1\) there"),
        ({"mask_token_id": 3}, "mask_token_id is 97 there, 3 here"),
        ({"num_layers": 3, "rope_theta": 5.0}, "num_layers .*; rope_theta"),
    ):
        with pytest.raises(InputError, match=message):
            started(replace(shape, **change), "nowhere", init_from=str(tmp_path / "plain"))
    with pytest.raises(InputError, match="variant is dflash2 there, dflash here"):
        started(shape, "nowhere", init_from=str(tmp_path / "second"))
    with pytest.raises(InputError, match=r"drafter\.init_from=.*: no such folder"):
        started(shape, "nowhere", init_from=str(tmp_path / "absent"))
    tensors = load_file(tmp_path / "plain/model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "plain/model.safetensors")
    for own in (shape, replace(shape, **CHANGES["dspark"])):
        with pytest.raises(InputError, match=r"missing: layers\.1\.mlp\.up_proj\.weight$"):
            started(own, "nowhere", init_from=str(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_from_the_last_layers_of_the_target(shape, target_folder, name):
    shape = replace(shape, **CHANGES[name])
    drafter = started(shape, target_folder, init="target_layers")
    target = load_file(Path(target_folder) / "model.safetensors")
    own, drawn = drafter.state_dict(), started(shape, target_folder)
    copied = [key for key in own if "layers." in key and "_conv." not in key]
    for key in copied:
        _, i, rest = key.split(".", 2)
        assert torch.equal(own[key], target[f"model.layers.{int(i) + 4}.{rest}"]), key
    assert len(copied) == 22
    assert set(equal(drafter, drawn)) == set(own) - set(copied)  # fc and norms as fan_in


def test_layers_in_shards(shape, target_folder, tmp_path):
    tensors = load_file(Path(target_folder) / "model.safetensors")
    places = {}
    for i, key in enumerate(sorted(tensors)):
        places.setdefault(f"model-{i % 3}.safetensors", {})[key] = tensors[key]
    for name, part in places.items():
        save_file(part, tmp_path / name)
    index = {key: name for name, part in places.items() for key in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole = started(shape, target_folder, init="target_layers")
    assert equal(started(shape, str(tmp_path), init="target_layers"), whole) == list(
        whole.state_dict()
    )


def test_targets_with_other_layers_are_refused(shape, target_folder, tmp_path):
    with pytest.raises(InputError, match=r"gate_proj\.weight is \(48, 32\), .* \(64, 32\)"):
        started(replace(shape, intermediate_size=64), target_folder, init="target_layers")
    tensors = load_file(Path(target_folder) / "model.safetensors")
    tensors = {key: t for key, t in tensors.items() if "q_norm" not in key}
    tensors["model.layers.4.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"\(self_attn\.q_norm\.weight, self_attn\.q_proj\.bias\)"):
        started(shape, str(tmp_path), init="target_layers")
    with pytest.raises(InputError, match="has 6 layers, the drafter 7"):
        started(replace(shape, num_layers=7), target_folder, init="target_layers")
