"""Configuration: YAML and overrides, and what is refused, with key and fix."""

import pytest

from dflashdist.config import (
    Config,
    InputError,
    changed_settings,
    dump_config,
    known_keys,
    load_config,
    queue_depth,
    value_of,
)


def test_yaml_then_overrides(tmp_path):
    file = tmp_path / "conf.yaml"
    file.write_text("optim: {lr: 1.0e-3}\ndrafter: {target_layer_ids: [1, 3]}\n")
    config = load_config(file, ["optim.lr=2e-3", "train.epochs=1.5"])
    assert config.optim.lr == 2e-3
    assert config.drafter.target_layer_ids == [1, 3]
    assert config.train.epochs == 1.5
    assert isinstance(config, Config)


def test_dump_reads_back(tmp_path):
    config = load_config(None, ["seed=7", "schedule.bucket_edges=[64,128]"])
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dump.yaml") == config


def test_shipped_recipes_load():
    for name in ("demo", "qwen3-8b"):
        assert load_config(f"conf/{name}.yaml").target.path


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=1", ["optim.lrr", "'optim.lr'"]),
        ("trian.epochs=1", ["trian", "train"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("optim.lr=-1", ["optim.lr=-1", "greater than 0"]),
        ("optim.betas=[0.9]", ["optim.betas", "two numbers"]),
        ("data.min_supervised=1", ["data.min_supervised=1", "at least 2"]),
        ("drafter.block_size=1", ["drafter.block_size=1"]),
        ("drafter.target_layer_ids=[1,1]", ["twice"]),
        ("drafter.target_layer_ids=[-1]", ["-1 is none"]),
        ("drafter.target_layer_ids=[]", ["target_layer_ids=[]"]),
        ("roles.layout=mixed", ["roles.layout=mixed", "split", "colocated"]),
        ("schedule.bucket_edges=[128,64]", ["bucket_edges", "ascend"]),
        ("pipeline.hidden_state_queue_depth=0", ["hidden_state_queue_depth=0"]),
        ("optim.warmup_fraction=2", ["optim.warmup_fraction=2", "0 to 1"]),
        ("pipeline.delay_ms=-1", ["pipeline.delay_ms", "negative"]),
        ("optim.lr", ["key=value"]),
        ("train.max_steps=0", ["train.max_steps=0"]),
        ("loss.terms.foo=1", ["loss.terms.foo", "reverse_kl"]),
        ("loss.terms={}", ["loss.terms={}", "above 0"]),
        ("loss.terms={ce: 0.0}", ["loss.terms", "above 0"]),
        ("loss.terms.kl=-1", ["loss.terms", "0 or more"]),
        ("loss.terms.kl=.nan", ["loss.terms", "0 or more"]),
        ("loss.terms.kl=.inf", ["loss.terms", "0 or more"]),
        ("loss.weights=flat", ["loss.weights=flat", "decay, uniform, dpace"]),
        ("loss.gamma=0", ["loss.gamma=0", "greater than 0"]),
        ("loss.dpace_alpha=1.5", ["loss.dpace_alpha=1.5", "0 to 1"]),
        ("loss.variable_prefix=0", ["loss.variable_prefix=0", "above 0"]),
        ("loss.selector=-1", ["loss.selector", "negative"]),
        ("loss.confidence=.nan", ["loss.confidence", "negative, and finite"]),
        ("drafter.variant=dflash3", ["drafter.variant=dflash3", "dspark"]),
        ("drafter.init=zeros", ["drafter.init=zeros", "target_layers"]),
        ("drafter.layer_types=[full_attention]", ["drafter.layer_types", "each of the 5 layers"]),
        ("drafter.sliding_window=15", ["drafter.sliding_window=15", "less than a block (16)"]),
        ("drafter.conv_kernel_size=0", ["drafter.conv_kernel_size=0"]),
        ("drafter.selector_rank=0", ["drafter.selector_rank=0"]),
        ("drafter.selector_top_k=-1", ["drafter.selector_top_k=-1"]),
        ("drafter.markov_rank=0", ["drafter.markov_rank=0"]),
        ("optim.kind=sgd", ["optim.kind=sgd", "adamw, muon"]),
        ("optim.muon_lr=0", ["optim.muon_lr=0"]),
        ("optim.muon_momentum=1", ["optim.muon_momentum=1", "below 1"]),
        ("optim.weight_decay=.inf", ["optim.weight_decay", "finite"]),
        ("evaluate.temperature=.nan", ["evaluate.temperature", "finite"]),
        ("evaluate.every=0", ["evaluate.every=0"]),
        ("gates=[{metric: loss, below: 1.0, step: -1}]", ["step=-1"]),
        ("gates=[{metric: loss, belw: 1.0}]", ["unknown key 'belw'", "'below'"]),
        ("gates=[{metric: loss, not_below: 1.0}]", ["not_below=1.0", "name the step"]),
        ("gates=[{metric: loss, above: .nan}]", ["loss", "not finite"]),
        ("evaluate.seed=-1", ["evaluate.seed=-1", "from 0 to below"]),
    ],
)
def test_refused(override, parts):
    with pytest.raises(InputError) as refusal:
        load_config(None, [override])
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["drafter.init_from=x", "drafter.init=target_layers"], ["both set"]),
        (["drafter.variant=dflash2", "drafter.block_size=2", "drafter.conv_kernel_size=3"],
         ["drafter.conv_kernel_size=3", "more than a block (2)"]),
        (["loss.variable_prefix=0.9", "drafter.block_size=2"], ["loss.variable_prefix", "2"]),
        (["loss.weights=uniform", "loss.gamma=3"], ["loss.gamma=3", "no effect"]),
        (["drafter.num_layers=2", "drafter.layer_types=[full_attention, sliding_attention]"],
         ["drafter.sliding_window", "need each other"]),
        (["drafter.num_layers=1", "drafter.layer_types=[full_attention]",
          "drafter.sliding_window=64"], ["drafter.sliding_window", "need each other"]),
    ],
)  # fmt: skip
def test_refused_together(overrides, parts):
    with pytest.raises(InputError) as refusal:
        load_config(None, overrides)
    assert all(part in str(refusal.value) for part in parts)


def test_terms_are_replaced_and_one_alone_is_added(tmp_path):
    file = tmp_path / "conf.yaml"
    file.write_text("loss: {terms: {kl: 1.0}}\n")
    assert load_config(file).loss.terms == {"kl": 1.0}
    assert load_config(file, ["loss.terms.tv=0.5"]).loss.terms == {"kl": 1.0, "tv": 0.5}
    assert load_config(file, ["loss.terms={hard: 2}"]).loss.terms == {"hard": 2.0}
    assert load_config(file, ["loss.gamma=3"]).loss.terms == {"kl": 1.0}
    assert load_config(None, ["loss.terms.kl=0.5"]).loss.terms == {"ce": 1.0, "kl": 0.5}
    assert load_config(None).loss.terms == {"ce": 1.0}


def test_refused_files(tmp_path):
    with pytest.raises(InputError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("optim: [")
    with pytest.raises(InputError, match=r"bad\.yaml"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "unknown.yaml").write_text("optim:\n  rate: 1\n")
    with pytest.raises(InputError, match=r"unknown\.yaml: unknown key 'optim\.rate'"):
        load_config(tmp_path / "unknown.yaml")
    with pytest.raises(InputError, match="both set"):
        load_config(None, ["train.max_steps=1", "train.epochs=1"])


def test_known_keys_are_all_there():
    keys = known_keys()
    assert {"run.dir", "seed", "loss.gamma", "pipeline.hidden_state_queue_depth"} <= set(keys)
    config = load_config(None)
    for key in keys:
        value_of(config, key)  # each names an attribute


def test_queue_depth():
    pipeline = load_config(None).pipeline
    assert [queue_depth(pipeline, *sizes) for sizes in ((1, 1), (5, 1), (28, 4))] == [12, 12, 64]
    pipeline.hidden_state_queue_depth = "5"
    assert queue_depth(pipeline, 28, 4) == 5


def test_changed_settings():
    before = load_config(None, ["optim.lr=1e-3", "loss.terms.kl=0.5", "drafter.num_layers=2"])
    now = load_config(None, ["optim.lr=2e-3", "drafter.num_layers=2", "data.store=a b"])
    assert changed_settings(dump_config(before), before) == []
    assert changed_settings(dump_config(before), now) == [
        "data.store: None -> a b",
        "loss.terms: {'ce': 1.0, 'kl': 0.5} -> {'ce': 1.0}",
        "optim.lr: 0.001 -> 0.002",
    ]
