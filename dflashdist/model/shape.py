"""The drafter's shape: everything that fixes its tensors, what it takes from the target, and
what its layers see."""

import json
from dataclasses import dataclass, fields
from typing import Any

from dflashdist.checks import FULL, SLIDING
from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.target_files import check_supported, need

# What a variant adds to the shape, by the names that config.json and the configuration share.
PARTS = {
    "dflash": (),
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "dspark": ("markov_rank", "confidence_head"),
}


@dataclass(frozen=True)
class Sight:
    """What the slots of one layer see, beside the rule that all layers share (`blocks.visible`)."""

    window: int | None = None  # keys at a distance of this many positions or more are not seen
    causal: bool = False  # no slot sees a later slot of its block


WHOLE = Sight()  # all of the context before the block, and all of the block: DFlash's own


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and its reading of the target."""

    hidden_size: int  # the target's own: embedding and head are shared
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the target's embedding
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int  # a row of the target's embedding that is never emitted
    target_layer_ids: tuple[int, ...]  # 0-based; id l is the output of decoder layer l
    num_target_layers: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    variant: str = "dflash"  # dflash | dflash2 | dspark
    layer_types: tuple[str, ...] = ()  # of each layer; () = full attention in all
    sliding_window: int | None = None  # of the sliding layers
    is_causal: bool | None = None  # inside a block: all layers or none; None = the sliding ones
    conv_kernel_size: int = 0  # from here on: 0 where the variant has no such part
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    confidence_head: bool = False

    def __post_init__(self) -> None:
        """Raises InputError for ids or sizes that no drafter can have."""
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"drafter.mask_token_id={self.mask_token_id}: the target's embedding has rows 0 to "
                f"{self.vocab_size - 1}; name one that is never emitted"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"drafter.num_attention_heads={self.num_attention_heads}: must be a multiple of "
                f"drafter.num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"drafter.head_dim={self.head_dim}: rotary positions need an even one")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise InputError(
                f"drafter.layer_types={list(self.layer_types)}: {self.num_layers} layers need as "
                "many types"
            )
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise InputError(
                f"drafter.sliding_window={self.sliding_window}: it and a sliding layer need each "
                "other; name both (drafter.layer_types), or neither"
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise InputError(
                f"drafter.sliding_window={self.sliding_window}: less than a block "
                f"({self.block_size}); raise it"
            )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise InputError(
                f"drafter.conv_group_size={self.conv_group_size}: must divide the hidden size, "
                f"{self.hidden_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise InputError(
                f"drafter.selector_top_k={self.selector_top_k}: more than the vocabulary "
                f"({self.vocab_size})"
            )

    @property
    def num_features(self) -> int:
        """Tapped target layers, K; independent of the number of draft layers."""
        return len(self.target_layer_ids)

    @property
    def ahead(self) -> int:
        """Slot k of a block with its anchor at a drafts the token of position a + k + ahead.

        0: slots from 1 on draft. 1 (DSpark): the anchor's own slot drafts as well.
        """
        return 1 if self.variant == "dspark" else 0

    @property
    def num_drafts(self) -> int:
        """Drafts of a whole block: block_size - 1; of DSpark, whose anchor slot drafts, all."""
        return self.block_size - 1 + self.ahead

    def sight(self, layer: int) -> Sight:
        """What a layer's slots see, by its number. Sliding layers are causal inside a block unless
        `is_causal` says otherwise, as in the package `dflash`, vLLM and SGLang."""
        sliding = bool(self.layer_types) and self.layer_types[layer] == SLIDING
        causal = sliding if self.is_causal is None else self.is_causal
        return Sight(self.sliding_window if sliding else None, causal)

    def facts(self) -> dict[str, Any]:
        """The fields as JSON reads them back, for checkpoints. Those of variants and of sliding
        layers only where they are set: checkpoints from before they existed stay equal."""
        always = ("bos_token_id", "eos_token_id")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {
            f.name: values[f.name]
            for f in fields(self)
            if f.name in always or values[f.name] != f.default
        }
        return json.loads(json.dumps(kept))

    @classmethod
    def from_target(
        cls, target_config: dict[str, Any], tokenizer_len: int | None, drafter: DrafterConfig
    ) -> "DrafterShape":
        """The shape for a target's config.json; what `drafter` leaves null follows the target.

        The mask token is `drafter.mask_token_id`, else the first embedding row past the tokenizer
        (Qwen3: 151669). Never a pad or eos token: those are emitted, or are one that is.

        Raises InputError for an unsupported target, bad layer ids, or when no row is free to be
        the mask token.
        """
        check_supported(target_config)
        hidden_size = need(target_config, "hidden_size")
        heads = need(target_config, "num_attention_heads")
        num_target_layers = need(target_config, "num_hidden_layers")
        vocab_size = need(target_config, "vocab_size")
        ids = drafter.target_layer_ids
        if ids is None:
            ids = default_layer_ids(num_target_layers, drafter.num_features)
        mask = drafter.mask_token_id
        if mask is None:
            if tokenizer_len is None or tokenizer_len >= vocab_size:
                raise InputError(
                    f"the tokenizer ({tokenizer_len} tokens) leaves no spare row in the target's "
                    f"embedding ({vocab_size}): set drafter.mask_token_id to a token that is never "
                    "emitted (not pad or eos)"
                )
            mask = tokenizer_len
        types = drafter.layer_types
        if types is None and drafter.sliding_window:
            types = [SLIDING] * (drafter.num_layers - 1) + [FULL]
        causal = drafter.causal
        if causal is None and drafter.variant == "dflash2":
            causal = False  # published ones have sliding layers that look both ways
        eos = target_config.get("eos_token_id")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=drafter.intermediate_size or need(target_config, "intermediate_size"),
            num_layers=drafter.num_layers,
            num_attention_heads=drafter.num_attention_heads or heads,
            num_key_value_heads=drafter.num_key_value_heads
            or target_config.get("num_key_value_heads")
            or heads,
            head_dim=drafter.head_dim or target_config.get("head_dim") or hidden_size // heads,
            vocab_size=vocab_size,
            rms_norm_eps=float(target_config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta(target_config),
            max_position_embeddings=int(target_config.get("max_position_embeddings", 40960)),
            block_size=drafter.block_size,
            mask_token_id=int(mask),
            target_layer_ids=tuple(int(i) for i in ids),
            num_target_layers=num_target_layers,
            bos_token_id=target_config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            variant=drafter.variant,
            layer_types=layer_types(types),
            sliding_window=drafter.sliding_window,
            is_causal=causal,
            **{key: getattr(drafter, key) for key in PARTS[drafter.variant]},
        )

    def to_config(self, dtype: str) -> dict[str, Any]:
        """The published config.json; see `config_json.write_config`."""
        from dflashdist.model.config_json import write_config  # which reads this class

        return write_config(self, dtype)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrafterShape":
        """The shape in a drafter's config.json; see `config_json.read_config`."""
        from dflashdist.model.config_json import read_config

        return read_config(config)


def default_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """The published rule: evenly from layer 1 to N-3, with Python's rounding; N=36: 1 9 17 25 33.

    Raises InputError when the target has too few layers for that many distinct ones.
    """
    if num_features == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    ids = [round(1 + i * span / (num_features - 1)) for i in range(num_features)]
    if len(set(ids)) < num_features or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise InputError(
            f"drafter.num_features={num_features}: the published rule gives layers {ids} of "
            f"{num_target_layers}; lower it, or set drafter.target_layer_ids"
        )
    return ids


def check_layer_ids(ids: tuple[int, ...] | list[int], num_target_layers: int) -> None:
    """Raises InputError unless `ids` are distinct layers of a target with that many."""
    if not ids:
        raise InputError("drafter.target_layer_ids is empty: name at least one target layer")
    wrong = [i for i in ids if not 0 <= i < num_target_layers]
    if wrong:
        raise InputError(
            f"drafter.target_layer_ids={list(ids)}: {wrong[0]} is no layer; the target has layers "
            f"0 to {num_target_layers - 1}"
        )
    if len(set(ids)) < len(ids):
        raise InputError(f"drafter.target_layer_ids={list(ids)}: a layer is named twice")


def check_sizes(target: str, target_config: dict[str, Any], shape: DrafterShape) -> None:
    """Hold a target's config.json to what a drafter was made for. Raises InputError."""
    for key, expected in (
        ("hidden_size", shape.hidden_size),
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_target_layers),
    ):
        found = need(target_config, key)
        if found != expected:
            raise InputError(
                f"{target}: {key} is {found}, the drafter was made for a target with {expected}"
            )


def layer_types(types: list[str] | None) -> tuple[str, ...]:
    """() where every layer has full attention. Raises InputError for any other kind of layer."""
    unknown = sorted(set(types or ()) - {FULL, SLIDING})
    if unknown:
        raise InputError(f"drafter layer_types {unknown}: supported are {FULL}, {SLIDING}")
    return tuple(types) if types and SLIDING in types else ()


def rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)  # a set for each kind of layer
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
