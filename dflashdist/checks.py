"""Refusing a configuration that cannot work, before anything is loaded."""

import math
from contextlib import suppress
from datetime import date
from fractions import Fraction

from dflashdist.config import (
    AUTO,
    FIELDS,
    Config,
    DataConfig,
    DrafterConfig,
    InputError,
    LossConfig,
    ScheduleConfig,
    value_of,
)

FULL, SLIDING = "full_attention", "sliding_attention"
SOFT = ("kl", "reverse_kl", "tv")
TERMS = ("ce", "hard", *SOFT)


def validate(config: Config) -> None:
    """Refuse impossible values, naming key, value and fix. Raises InputError."""
    positive = [
        "data.max_length", "data.workers",
        "schedule.max_tokens", "schedule.max_anchors",
        "schedule.num_buckets", "schedule.grid", "roles.num_targets",
        "roles.num_drafters", "pipeline.max_unsent", "pipeline.prefetch",
        "pipeline.silence_seconds", "pipeline.stall_seconds", "target.tensor_parallel",
        "drafter.num_layers", "drafter.num_anchors", "drafter.num_features",
        "drafter.intermediate_size", "drafter.num_attention_heads",
        "drafter.num_key_value_heads", "drafter.head_dim", "loss.gamma", "loss.chunk_size",
        "optim.lr", "optim.eps", "optim.max_grad_norm", "train.accumulation_steps",
        "train.max_steps", "train.epochs", "train.max_bad_steps", "train.log_every",
        "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every",
        "evaluate.every", "evaluate.max_rows", "evaluate.max_prompts", "evaluate.max_new_tokens",
        "evaluate.batch_size", "drafter.sliding_window", "drafter.conv_kernel_size",
        "drafter.conv_group_size", "drafter.selector_rank", "drafter.selector_top_k",
        "drafter.markov_rank", "optim.muon_lr",
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
        "drafter.init": ("fan_in", "random", "published", "target_layers"),
        "drafter.variant": ("dflash", "dflash2", "dspark"),
        "loss.weights": ("decay", "uniform", "dpace"),
        "loss.dpace_by": ("data", "terms"),
        "optim.kind": ("adamw", "muon"),
        "optim.schedule": ("cosine", "wsd", "constant"),
        "train.device": (AUTO, "cpu", "cuda"),
        "train.warm_up_widest": (AUTO, "always", "never"),
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
    _validate_drafter(config.drafter)
    _validate_loss(config.loss)
    if config.loss.variable_prefix is not None and config.drafter.block_size < 3:
        raise InputError(
            f"loss.variable_prefix: blocks of {config.drafter.block_size} have no room for one"
        )
    if config.optim.ema is not None and not 0 <= config.optim.ema < 1:
        raise InputError(f"optim.ema={config.optim.ema}: a decay from 0 to below 1, such as 0.999")
    if not 0 <= config.optim.muon_momentum < 1:
        raise InputError(f"optim.muon_momentum={config.optim.muon_momentum}: from 0 to below 1")
    for gate in config.gates:
        bounds = (gate.below, gate.above, gate.not_below)
        if not all(math.isfinite(bound) for bound in bounds if bound is not None):
            raise InputError(f"gates: the one on {gate.metric} has a bound that is not finite")
        if gate.not_below is not None and gate.step == 0:
            raise InputError(
                f"gates: the one on {gate.metric} has not_below={gate.not_below}, which holds "
                "before `step`: name the step"
            )
        if gate.step < 0:
            raise InputError(f"gates: the one on {gate.metric} has step={gate.step}: from 0 on")
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise InputError(f"optim.betas={config.optim.betas}: two numbers from 0 to below 1")
    for key in (
        "optim.weight_decay", "pipeline.delay_ms", "evaluate.temperature", "loss.selector",
        "loss.confidence",
    ):  # fmt: skip
        if not 0 <= value_of(config, key) < math.inf:
            raise InputError(f"{key}={value_of(config, key)}: must not be negative, and finite")
    for key in ("seed", "evaluate.seed"):
        if not 0 <= value_of(config, key) < 1 << 64:
            raise InputError(f"{key}={value_of(config, key)}: from 0 to below 2^64")
    edges = config.schedule.bucket_edges
    if edges is not None and (not edges or sorted(set(edges)) != list(edges) or edges[0] < 1):
        raise InputError(f"schedule.bucket_edges={edges}: must ascend from at least 1")
    least_share(config.schedule, 1)
    depth = config.pipeline.hidden_state_queue_depth
    if depth != AUTO and not (depth.isdigit() and int(depth) > 0):
        raise InputError(f"pipeline.hidden_state_queue_depth={depth}: a positive number, or auto")
    if config.train.max_steps is not None and config.train.epochs is not None:
        raise InputError("train.max_steps and train.epochs are both set: give one, null the other")


def least_share(schedule: ScheduleConfig, window: int) -> Fraction:
    """What each bucket has of the micro-batches at least, with `window` of them a step.

    With 2 / W every step holds every bucket: W consecutive micro-batches hold a bucket's share of W
    to within less than 2. Raises InputError.
    """
    if schedule.min_share == AUTO:
        return Fraction(2, window)
    with suppress(ValueError, ZeroDivisionError):
        share = Fraction(schedule.min_share)
        if 0 <= share <= 1:
            return share
    raise InputError(f"schedule.min_share={schedule.min_share}: a share from 0 to 1, or auto")


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


def _validate_drafter(drafter: DrafterConfig) -> None:
    if drafter.block_size < 2:
        raise InputError(f"drafter.block_size={drafter.block_size}: an anchor and a draft need 2")
    ids = drafter.target_layer_ids
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
    if drafter.init_from and drafter.init == "target_layers":
        raise InputError("drafter.init=target_layers and drafter.init_from are both set: give one")
    if drafter.variant == "dflash2" and drafter.conv_kernel_size > drafter.block_size:
        raise InputError(
            f"drafter.conv_kernel_size={drafter.conv_kernel_size}: more than a block "
            f"({drafter.block_size})"
        )
    types, window = drafter.layer_types, drafter.sliding_window
    if types is not None:
        if len(types) != drafter.num_layers or set(types) - {FULL, SLIDING}:
            raise InputError(
                f"drafter.layer_types={types}: one of {FULL}, {SLIDING} for each of the "
                f"{drafter.num_layers} layers"
            )
        if (SLIDING in types) != (window is not None):
            raise InputError("drafter.sliding_window and a sliding layer need each other")
    if window is not None and window < drafter.block_size:
        raise InputError(
            f"drafter.sliding_window={window}: less than a block ({drafter.block_size}); raise it"
        )


def _validate_loss(loss: LossConfig) -> None:
    unknown = sorted(set(loss.terms) - set(TERMS))
    if unknown:
        raise InputError(f"loss.terms.{unknown[0]}: the terms are {', '.join(TERMS)}")
    if not all(0 <= share < math.inf for share in loss.terms.values()) or not any(
        loss.terms.values()
    ):
        raise InputError(f"loss.terms={loss.terms}: coefficients of 0 or more, one of them above 0")
    if loss.gamma is not None and loss.weights == "uniform":
        raise InputError(
            f"loss.gamma={loss.gamma}: of no effect with loss.weights=uniform; null it"
        )
    if not 0 <= loss.dpace_alpha <= 1:
        raise InputError(f"loss.dpace_alpha={loss.dpace_alpha}: a number from 0 to 1")
    if loss.variable_prefix is not None and not 0 < loss.variable_prefix <= 1:
        raise InputError(f"loss.variable_prefix={loss.variable_prefix}: a base above 0, at most 1")


def needs_last(loss: LossConfig, drafter: DrafterConfig) -> bool:
    """Whether the target must also send its last layer's normed state, for its distribution."""
    confidence = drafter.variant == "dspark" and drafter.confidence_head and loss.confidence > 0
    return confidence or any(loss.terms.get(name, 0) > 0 for name in ("hard", *SOFT))
