"""The frozen target: hidden states of its tapped layers, from the fewest layers that give them.

With its last state, all layers: what the head makes the target's distribution of.

The only place of training that imports transformers (inside functions: the import takes seconds
and drafter ranks never need it).
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflashdist.config import AUTO, InputError
from dflashdist.model.shape import check_layer_ids
from dflashdist.model.target_files import check_target


class Target:
    """A dense causal language model of transformers, cut after the last layer needed, no head."""

    def __init__(
        self,
        path: str,
        layer_ids: tuple[int, ...] | list[int],
        *,
        with_last: bool = False,
        dtype: str | torch.dtype = AUTO,
        device: str | torch.device = "cpu",
        revision: str | None = None,
        attention: str = AUTO,
        trust_remote_code: bool = False,
        loaded: nn.Module | None = None,
    ):
        """Load from a folder or hub name; weights past the last layer needed are never read.

        Args:
            layer_ids: tapped layers, 0-based, in the order in which they are concatenated; id l is
                the output of decoder layer l, before any final norm.
            with_last: keep all layers, and give the state after the final norm as well.
            dtype: auto = bfloat16 on CUDA, float32 elsewhere.
            attention: transformers' attn_implementation; auto = its own choice, SDPA.
            loaded: the whole causal language model of `path`, in memory already: its weights are
                shared, and dtype, device and attention are its own.

        Raises InputError for ids that are not distinct layers, and for a hybrid, multimodal or
        otherwise unsupported model.
        """
        config = check_target(path, revision)
        self.num_layers: int = config["num_hidden_layers"]
        check_layer_ids(tuple(layer_ids), self.num_layers)
        self.layer_ids, self.with_last = tuple(layer_ids), with_last
        num_needed = self.num_layers if with_last else 1 + max(layer_ids)
        if loaded is not None:
            self.device = next(loaded.parameters()).device
            self.model, layers = _share(path, loaded, num_needed)
        else:
            self.device = torch.device(device)
            if dtype == AUTO:
                dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.model, layers = _load(
                path,
                num_needed,
                dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
                revision=revision,
                attention=attention,
                trust_remote_code=trust_remote_code,
            )
            self.model.to(self.device)
        self.hidden_size: int = config["hidden_size"]
        self._tapped: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(self._keep(layer_id))

    @torch.no_grad()  # not inference_mode: a drafter in the same process saves these for backward
    def hidden_states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Outputs of the tapped layers side by side, then the last normed one; 0 at the padding.

        No attention mask is passed: with padding on the right, a causal model's real tokens never
        see it, and SDPA runs its faster causal kernel.

        Args:
            ids: int64 [B, S], right padded. lengths: int64 [B].

        Returns:
            [B, S, K*H] in the model's dtype, on its device; [B, S, (K+1)*H] `with_last`.
        """
        ids, lengths = ids.to(self.device), lengths.to(self.device)
        output = self.model(input_ids=ids, use_cache=False)
        states = [self._tapped.pop(layer_id) for layer_id in self.layer_ids]
        if self.with_last:
            states.append(output.last_hidden_state)
        hidden = torch.cat(states, -1)
        padding = torch.arange(ids.shape[1], device=self.device) >= lengths[:, None]
        return hidden.masked_fill_(padding[..., None], 0.0)

    def _keep(self, layer_id: int):
        def hook(_module, _inputs, output) -> None:
            self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


def _load(
    path: str,
    num_layers: int,
    *,
    dtype: torch.dtype,
    revision: str | None,
    attention: str,
    trust_remote_code: bool,
) -> tuple[nn.Module, nn.ModuleList]:
    """The base model of `path` with its first `num_layers` layers, frozen; and these layers.

    Raises InputError.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would list every left-out tensor as unexpected
    try:
        config = AutoConfig.from_pretrained(
            where, revision=revision, trust_remote_code=trust_remote_code
        )
        _cut(config, num_layers)
        model = AutoModel.from_pretrained(
            where,
            config=config,
            revision=revision,
            dtype=dtype,
            attn_implementation=None if attention == AUTO else attention,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(f"{path}: transformers cannot load this target ({reason})") from error
    finally:
        logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False), _layers(path, model, num_layers)


def _share(path: str, loaded: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """As `_load`, of a whole causal language model's own modules. Raises InputError."""
    whole: Any = getattr(loaded, "base_model", loaded)
    all_layers = _layers(path, whole, whole.config.num_hidden_layers)
    config = deepcopy(whole.config)
    _cut(config, num_layers)
    with torch.device("meta"):
        model: Any = type(whole)(config)
    for name, module in whole.named_children():
        setattr(model, name, module)
    model.layers = all_layers[:num_layers]
    return model.eval(), model.layers


def _cut(config: Any, num_layers: int) -> None:
    """Let a model's configuration end after so many layers."""
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def _layers(path: str, model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder layers of a base model. Raises InputError."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
        raise InputError(
            f"{path}: a {type(model).__name__} does not keep its decoder layers in `layers`: "
            "unsupported target"
        )
    return layers
