"""The configuration: one dataclass per section, from YAML and dotted overrides, checked early.

Imports no torch, so that `dflashdist plan` and the tests of the schedule start at once.
An unknown key, a wrong type or an impossible value is an `InputError` naming key and fix.
"""

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

AUTO = "auto"
# What a row may hold, under these names or those that data.fields gives them.
FIELDS = (
    "messages", "tools", "system", "prompt", "input", "answer", "text", "input_ids", "loss_mask",
)  # fmt: skip


class InputError(ValueError):
    """Bad input or configuration. The message is one line: the thing at fault, and the fix."""


@dataclass
class RunConfig:
    """Where a run leaves its files."""

    dir: str = "runs/default"


@dataclass
class DataConfig:
    """What to train on: a token store, and how `dflashdist prepare` makes it."""

    store: str | None = None
    lengths: str | None = None  # plan only: int .npy [N] lengths, or [2, N] with supervised counts
    max_length: int = 3072  # tokens; longer rows are cut on the right
    min_supervised: int = 2  # rows with fewer supervised tokens are rejected
    sources: list[str] = field(default_factory=list)  # as on the command line: PATH[,cap=N][,...]
    format: str = AUTO  # auto = found row by row | messages | sharegpt | pairs | text | tokens
    fields: dict[str, str] = field(default_factory=dict)  # prompt: the name that your rows have
    turns: str = (
        "all"  # answers supervised: all | last | auto = all if one row holds them, else last
    )
    template: str | None = None  # a chat template's file, in place of the target's own
    template_settings: dict[str, Any] = field(default_factory=dict)  # enable_thinking: false, ...
    date: str | None = None  # YYYY-MM-DD, for templates that write the date; null = today
    max_rejected: float = 0.05  # the share of rows that may be rejected
    strict: bool = False  # the first rejected row ends the command
    validation: Any = None  # a share of the conversations (0.01), or sources of their own
    deduplicate: bool = False  # drop exact copies of a conversation (they are counted anyway)
    workers: int | None = None  # processes that render and tokenise; null = one a core


@dataclass
class ScheduleConfig:
    """How rows become micro-batches (schedule/)."""

    max_tokens: int = 18432  # padded tokens a micro-batch: the target's budget
    max_anchors: int = 3072  # padded anchors a micro-batch (rows x most): the drafters' budget
    num_buckets: int = 4  # at most; fewer where min_share leaves room for fewer
    # Of the micro-batches, what each bucket has at least; auto = 2 / W, which puts every bucket in
    # every step of W micro-batches.
    min_share: str = AUTO
    bucket_edges: list[int] | None = None  # ascending inclusive upper ends; null = chosen
    grid: int = 16  # tokens; edges and widths are multiples of it


@dataclass
class RolesConfig:
    """Which ranks run the target and which train."""

    layout: str = AUTO  # auto | split | colocated
    num_targets: int | None = None  # target groups; null = the rest, or 1 if neither is given
    num_drafters: int | None = None  # null = the rest


@dataclass
class PipelineConfig:
    """How micro-batches travel from targets to drafters (cluster/)."""

    hidden_state_queue_depth: str = AUTO  # micro-batches published and unconsumed, or auto
    max_unsent: int = 2  # finished messages a target may hold
    prefetch: int = 1  # micro-batches a target pads ahead of its forward
    checksum: bool = False  # CRC32 of every message
    trace: bool = False  # logs/trace_rank{r}.jsonl: every send, receive, publication, slot
    silence_seconds: float = 20.0  # a rank that gives no sign of life for so long is lost
    stall_seconds: float = 25.0  # a rank whose phase lasts longer is stuck (first ones: 24 x)
    delay_ms: float = 0.0  # random sleep up to this before forwards, prefetches and sends (a test)


@dataclass
class TargetConfig:
    """The frozen model."""

    path: str | None = None
    revision: str | None = None
    tensor_parallel: int = 1
    dtype: str = AUTO  # auto = bfloat16 on CUDA, float32 on CPU
    attention: str = AUTO  # transformers' attn_implementation; auto = its own choice
    trust_remote_code: bool = False


@dataclass
class DrafterConfig:
    """The drafter's shape. What is null follows the target."""

    num_layers: int = 5
    block_size: int = 16
    num_anchors: int = 512  # anchors a row, at most
    num_features: int = 5  # tapped target layers, when target_layer_ids is null
    target_layer_ids: list[int] | None = None  # 0-based; id l is the output of decoder layer l
    mask_token_id: int | None = None  # null = the first embedding row past the tokenizer
    mask_token_in_data: bool = False  # true: a mask token that rows hold is a note, no refusal
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    # fan_in (or random): std 1/sqrt(fan_in) | published: std 0.02, as the public trainers |
    # target_layers: copies of the target's last layers (our own; see the study in README)
    init: str = "fan_in"
    init_from: str | None = None  # a checkpoint or a published drafter's folder to fine-tune
    # dflash | dflash2: convolutions and selector (August 2026) | dspark: Markov head (2607.05147)
    variant: str = "dflash"
    layer_types: list[str] | None = None  # full_attention | sliding_attention, each layer
    sliding_window: int | None = None  # tokens; layer_types null: all but the last slide
    # Whether slots of a block see no later slot, in all layers (JetSpec, 2606.18394) or in none;
    # null: in the sliding ones, as published, and for dflash2 in none.
    causal: bool | None = None
    conv_kernel_size: int = 2  # dflash2
    conv_group_size: int = 16  # dflash2
    selector_rank: int = 256  # dflash2
    selector_top_k: int = 16  # dflash2
    markov_rank: int = 256  # dspark
    confidence_head: bool = True  # dspark


@dataclass
class LossConfig:
    """The training objective: DFlash, section 4.2, and what followed it."""

    # Name: coefficient; what is named is all there is. ce: the data's tokens (the paper's). Against
    # the target's distribution: hard (its arg max), kl (JetSpec, 2606.18394), reverse_kl, tv (half
    # the L1 distance; LK, 2602.23881; DSpark's is {ce: 0.1, tv: 1.8}).
    terms: dict[str, float] = field(default_factory=lambda: {"ce": 1.0})
    # decay: exp(-(k-1)/gamma), the paper's | uniform: its ablation | dpace: 2605.18810
    weights: str = "decay"
    # null = by n, block_size (for dspark one more): 16: 7, 10: 5, 8: 4 (DFlash, A.1), else 0.45 x n
    gamma: float | None = None
    dpace_alpha: float = 0.5
    # Whose chance dpace weighs a slot by. data: the data's token's, for all terms | terms: each
    # term's own, exp(-term), as in speculators 0.9. With ce alone the two are one.
    dpace_by: str = "data"
    contiguous_only: bool = True  # nothing after an unsupervised gap of a block counts (DSpark)
    variable_prefix: float | None = None  # 2606.04446: real tokens first, how many ~ base^l (0.9)
    selector: float = 1.0  # dflash2: coefficient of the selector's cross-entropy (NeMo AutoModel)
    confidence: float = 1.0  # dspark: coefficient of the confidence head's loss (2607.05147)
    chunk_size: int = 1024  # supervised slots whose logits exist at once


@dataclass
class OptimConfig:
    """The optimizer and its learning rate."""

    kind: str = "adamw"  # adamw | muon: Muon for the layers' matrices, AdamW for the rest
    lr: float = 6e-4
    muon_lr: float = 0.02  # of Muon's matrices; follows the same schedule
    muon_momentum: float = 0.95
    ema: float | None = None  # decay of an average of the weights, saved and evaluated beside them
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"  # cosine | wsd | constant
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.2  # wsd: the last part of the run
    min_lr_fraction: float = 0.0


@dataclass
class TrainConfig:
    """The training loop."""

    accumulation_steps: int = 4  # micro-batches a drafter and step
    max_steps: int | None = None
    epochs: float | None = None
    resume: str = AUTO  # auto | none | path of a checkpoint folder
    max_bad_steps: int = 5  # skipped steps in a row that end the run
    device: str = AUTO  # auto | cpu | cuda
    warm_up_widest: str = AUTO  # the widest micro-batches first: always | never | auto = on CUDA
    log_every: int = 1  # steps a console line and a tensorboard point


@dataclass
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = 500  # steps; the last step is always saved
    at_start: bool = False  # also save step 0, the untrained drafter
    keep_last: int = 2
    keep_every: int | None = None  # also keep each checkpoint whose step is a multiple
    dtype: str = "bfloat16"  # of model.safetensors; trainer/ holds float32


@dataclass
class EvaluateConfig:
    """Acceptance: by speculative decoding (`evaluate`), and teacher-forced while training."""

    every: int | None = None  # steps; null = not while training
    store: str | None = None  # held-out rows; null = the validation split inside data.store
    max_rows: int = 256  # of them, each time
    keep_best: bool = True  # the checkpoint of the best acceptance length is kept as well
    prompts: str | None = None  # a file of conversations, a token store, or builtin
    task: str | None = None  # how rows of `prompts` are read: gsm8k, humaneval, ...
    max_prompts: int = 64
    max_new_tokens: int = 256  # of an answer, here and there; what follows does not count
    temperature: float = 0.0  # 0 = greedy
    batch_size: int = 1
    seed: int = 0  # of sampling and of the bootstrap


@dataclass
class GateConfig:
    """A bound on what a healthy run shows; leaving it warns, or stops the run."""

    metric: str = "loss"  # what all drafters know, by its name in tensorboard
    below: float | None = None  # by step `step` at the latest, and from then on
    above: float | None = None
    not_below: float | None = None  # before step `step`: too good too early is a leak
    step: int = 0


@dataclass
class Config:
    """The whole tree; components receive their own section."""

    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    gates: list[GateConfig] = field(default_factory=list)
    gates_stop: bool = False  # a violated gate ends the run with an error; false = a warning


def known_keys(section: Any = Config, prefix: str = "") -> list[str]:
    """All dotted keys, in the order of the file."""
    keys: list[str] = []
    for entry in fields(section):
        name = prefix + entry.name
        keys += known_keys(entry.type, name + ".") if is_dataclass(entry.type) else [name]
    return keys


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """The defaults, then the YAML file, then `key=value` overrides; checked.

    Raises InputError for a missing file, an unknown key (naming the nearest), a wrong type or an
    impossible value.
    """
    tree = OmegaConf.structured(Config)
    if path is not None:
        if not Path(path).is_file():
            raise InputError(f"{path}: no such configuration file")
        try:
            tree = _merge(tree, OmegaConf.load(path), str(path), whole=True)
        except InputError:
            raise
        except Exception as error:  # a YAML error of any kind: the parser's own line and column
            raise InputError(
                f"{path}: not a YAML configuration: {' '.join(str(error).split())}"
            ) from error
    for item in overrides or []:
        key, sign, _ = item.partition("=")
        if not sign or not key:
            raise InputError(f"{item!r}: an override is key=value, for example optim.lr=1e-3")
        try:
            layer = OmegaConf.from_dotlist([item])
        except Exception as error:  # of the YAML in the value
            raise InputError(f"{item}: not key=value: {' '.join(str(error).split())}") from error
        tree = _merge(tree, layer, item, whole=not key.startswith("loss.terms."))
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    from dflashdist.checks import validate  # which reads the classes of this module

    validate(config)
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def changed_settings(before: str, config: Config) -> list[str]:
    """`key: before -> now` of each key whose value differs from that in a saved `dump_config`."""
    saved, now, changed = OmegaConf.create(before), OmegaConf.structured(config), []
    for key in known_keys():
        old, new = OmegaConf.select(saved, key), OmegaConf.select(now, key)
        if old != new:
            changed.append(f"{key}: {old} -> {new}")
    return changed


def _merge(tree: Any, layer: Any, origin: str, whole: bool) -> Any:
    """`layer` over `tree`, in place. `whole`: the terms that it names are all there are."""
    try:
        if whole and OmegaConf.is_dict(layer) and OmegaConf.select(layer, "loss.terms") is not None:
            tree.loss.terms = {}
        return OmegaConf.unsafe_merge(tree, layer)  # in place: copies would be most of the time
    except ConfigKeyError as error:
        key = str(error.full_key or error.key)
        if origin.startswith(key):  # an override: all of its key, not only the unknown section
            key = origin.partition("=")[0]
        known = known_keys(GateConfig if error.object_type is GateConfig else Config)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        raise InputError(
            f"{origin}: unknown key {key!r}; nearest known key: {near[0]!r}"
        ) from error
    except (ValidationError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{origin}: {error.full_key or 'value'}: {reason}") from error


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def states_dtype(dtype: str, device: str) -> str:
    """The target's dtype by name, and so that of hidden states: auto is bfloat16 on CUDA, else
    float32. device: cpu | cuda."""
    if dtype == AUTO:
        return "bfloat16" if device == "cuda" else "float32"
    return dtype


def queue_depth(config: PipelineConfig, window: int, num_targets: int) -> int:
    """Micro-batches that may be published and unconsumed; `auto` is max(12, 2W + 2T).

    In-order consumption costs nothing once 2W of them, W a step, are on their way or waiting. Each
    of T targets holds two more, the one it computes and the one it has padded: without those the
    share of the ideal rate falls to .87 at 6 targets and W = 8 (tests/bench/pipeline.py).
    """
    depth = config.hidden_state_queue_depth
    return max(12, 2 * (window + num_targets)) if depth == AUTO else int(depth)
