"""The configuration: one dataclass per section, from YAML and dotted overrides, checked early.

Imports no torch, so that `dflashdist plan` and the tests of the schedule start at once.
An unknown key, a wrong type or an impossible value is an `InputError` naming key and fix.
"""

import difflib
import math
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
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

    max_tokens: int = 16384  # padded tokens a micro-batch: the target's budget
    max_anchors: int = 3072  # anchors a micro-batch: the drafters' budget
    num_buckets: int = 8  # 8 for W <= 32, 16 for W >= 64: a step must hold every bucket
    bucket_edges: list[int] | None = None  # ascending inclusive upper ends; null = chosen
    grid: int = 64  # tokens; edges and widths are multiples of it
    sort_block: int = 16  # micro-batches of a bucket that are sorted by length together


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
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    init: str = "fan_in"  # fan_in: normal, std 1/sqrt(fan_in) | published: normal, std 0.02


@dataclass
class LossConfig:
    """The training objective (DFlash, section 4.2)."""

    decay: bool = True  # weights exp(-(k-1)/gamma); false = uniform
    gamma: float | None = None  # null = by block size: 16: 7, 10: 5, 8: 4, else 0.45 x block size
    contiguous_only: bool = True  # nothing after an unsupervised gap of a block counts
    chunk_size: int = 1024  # supervised slots whose logits exist at once


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 6e-4
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
    """Acceptance by speculative decoding."""

    prompts: str | None = None  # JSONL with `messages`; a final assistant message is left out
    max_prompts: int = 64
    max_new_tokens: int = 256


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
            tree = _merge(tree, OmegaConf.load(path), str(path))
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
        tree = _merge(tree, layer, item)
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    validate(config)
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _merge(tree: Any, layer: Any, origin: str) -> Any:
    try:
        return OmegaConf.merge(tree, layer)
    except ConfigKeyError as error:
        key = str(error.full_key or error.key)
        if origin.startswith(key):  # an override: all of its key, not only the unknown section
            key = origin.partition("=")[0]
        near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.0)
        raise InputError(
            f"{origin}: unknown key {key!r}; nearest known key: {near[0]!r}"
        ) from error
    except (ValidationError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{origin}: {error.full_key or 'value'}: {reason}") from error


def validate(config: Config) -> None:
    """Refuse impossible values, naming key, value and fix. Raises InputError."""
    positive = [
        "data.max_length", "data.workers",
        "schedule.max_tokens", "schedule.max_anchors",
        "schedule.num_buckets", "schedule.grid", "schedule.sort_block", "roles.num_targets",
        "roles.num_drafters", "pipeline.max_unsent", "pipeline.prefetch",
        "pipeline.silence_seconds", "pipeline.stall_seconds", "target.tensor_parallel",
        "drafter.num_layers", "drafter.num_anchors", "drafter.num_features",
        "drafter.intermediate_size", "drafter.num_attention_heads",
        "drafter.num_key_value_heads", "drafter.head_dim", "loss.gamma", "loss.chunk_size",
        "optim.lr", "optim.eps", "optim.max_grad_norm", "train.accumulation_steps",
        "train.max_steps", "train.epochs", "train.max_bad_steps", "train.log_every",
        "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every",
        "evaluate.max_prompts", "evaluate.max_new_tokens",
    ]  # fmt: skip
    for key in positive:
        value = value_of(config, key)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{key}={value}: must be greater than 0, and finite")
    choices = {
        "data.format": (AUTO, "messages", "sharegpt", "pairs", "text", "tokens"),
        "data.turns": ("all", "last", AUTO),
        "roles.layout": (AUTO, "split", "colocated"),
        "target.dtype": (AUTO, "float32", "bfloat16", "float16"),
        "drafter.init": ("fan_in", "published"),
        "optim.schedule": ("cosine", "wsd", "constant"),
        "train.device": (AUTO, "cpu", "cuda"),
        "checkpoint.dtype": ("bfloat16", "float16", "float32"),
    }
    for key, allowed in choices.items():
        value = value_of(config, key)
        if value not in allowed:
            raise InputError(f"{key}={value}: must be one of {', '.join(allowed)}")
    for key in (
        "data.max_rejected",
        "optim.warmup_fraction",
        "optim.decay_fraction",
        "optim.min_lr_fraction",
    ):
        if not 0 <= value_of(config, key) <= 1:
            raise InputError(f"{key}={value_of(config, key)}: a fraction from 0 to 1")
    _validate_data(config.data)
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise InputError(f"optim.betas={config.optim.betas}: two numbers from 0 to below 1")
    for key in ("optim.weight_decay", "pipeline.delay_ms"):
        if value_of(config, key) < 0:
            raise InputError(f"{key}={value_of(config, key)}: must not be negative")
    if config.drafter.block_size < 2:
        raise InputError(
            f"drafter.block_size={config.drafter.block_size}: an anchor and a draft need 2"
        )
    ids = config.drafter.target_layer_ids
    if ids is not None:
        if not ids:
            raise InputError(
                "drafter.target_layer_ids=[]: name a layer, or null for the published rule"
            )
        if len(set(ids)) != len(ids):
            raise InputError(f"drafter.target_layer_ids={ids}: a layer is named twice")
        if min(ids) < 0:
            raise InputError(
                f"drafter.target_layer_ids={ids}: ids are 0-based layers; {min(ids)} is none"
            )
    edges = config.schedule.bucket_edges
    if edges is not None and (not edges or sorted(set(edges)) != list(edges) or edges[0] < 1):
        raise InputError(f"schedule.bucket_edges={edges}: must ascend from at least 1")
    depth = config.pipeline.hidden_state_queue_depth
    if depth != AUTO and not (depth.isdigit() and int(depth) > 0):
        raise InputError(f"pipeline.hidden_state_queue_depth={depth}: a positive number, or auto")
    if config.train.max_steps is not None and config.train.epochs is not None:
        raise InputError("train.max_steps and train.epochs are both set: give one, null the other")


def _validate_data(data: DataConfig) -> None:
    if data.min_supervised < 2:
        raise InputError(
            f"data.min_supervised={data.min_supervised}: at least 2, an anchor and what follows it"
        )
    share = data.validation
    if isinstance(share, int | float) and not 0 < share < 1:
        raise InputError(
            f"data.validation={share}: a share above 0 and below 1, or a list of sources"
        )
    if share is not None and not isinstance(share, int | float | str | list):
        raise InputError(f"data.validation={share!r}: a share, or a list of sources")
    unknown = sorted(set(data.fields) - set(FIELDS))
    if unknown:
        raise InputError(f"data.fields.{unknown[0]}: the names are {', '.join(FIELDS)}")
    if data.date is not None:
        try:
            date.fromisoformat(data.date)
        except ValueError as error:
            raise InputError(f"data.date={data.date}: a day is YYYY-MM-DD") from error


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def queue_depth(config: PipelineConfig, window: int, num_targets: int) -> int:
    """Micro-batches that may be published and unconsumed; `auto` is max(12, 2W + 2T).

    In-order consumption costs nothing once 2W of them, W a step, are on their way or waiting. Each
    of T targets holds two more, the one it computes and the one it has padded: without those the
    share of the ideal rate falls to .87 at 6 targets and W = 8 (tests/bench/pipeline.py).
    """
    depth = config.hidden_state_queue_depth
    return max(12, 2 * (window + num_targets)) if depth == AUTO else int(depth)
