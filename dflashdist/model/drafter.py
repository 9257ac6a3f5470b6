"""The drafter: a few Qwen3-style layers whose blocks attend to the target's hidden states.

The tapped hidden states are projected once (`fc`, `hidden_norm`) into a context that every layer
shares and none updates; each layer's own key and value projections serve the context and the
blocks alike. DFlash, section 4.1. The parameters carry the published names: 11 per layer and 3 on
top, no embedding and no head (those are the target's, see `frozen`).

Legend: B rows, S context positions, N blocks a row, Q = N * block_size slots, H hidden size,
K tapped layers, D head dimension.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflashdist.config import InputError
from dflashdist.model.attention import BlockLayout, block_attention, masked_attention
from dflashdist.model.blocks import block_positions
from dflashdist.model.shape import DrafterShape

KeyValues = list[tuple[Tensor, Tensor]]  # a layer each: keys and values [B, kv_heads, S, D]
Rope = tuple[Tensor, Tensor]  # cos and sin, float32 [B or 1, positions, 1, D / 2]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in x's dtype with float32 statistics."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # The last cast undoes autocast's float32 result, where a torch release has one.
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Queries from the blocks; keys and values from context and blocks by the same matrices."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        width, head_dim = shape.hidden_size, shape.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[B, Q, H] -> [B, heads, Q, D], normed and rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q), rope).transpose(1, 2)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[B, P, H] -> keys (normed and rotated) and values, each [B, kv_heads, P, D]."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k), rope).transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """[B, heads, Q, D] -> [B, Q, H]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP with residuals; only the blocks are normed, the context already is."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, kv_ctx: tuple[Tensor, Tensor], layout: BlockLayout
    ) -> Tensor:
        """Training: all blocks of a row at once, each seeing its own part of the context."""
        normed = self.input_layernorm(x)
        q = self.self_attn.queries(normed, rope)
        kv_blk = self.self_attn.keys_values(normed, rope)
        x = x + self.self_attn.output(block_attention(q, *kv_ctx, *kv_blk, layout))
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(
        self, x: Tensor, rope: Rope, kv_ctx: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Decoding: one block a row after its cached context."""
        normed = self.input_layernorm(x)
        q = self.self_attn.queries(normed, rope)
        k, v = self.self_attn.keys_values(normed, rope)
        k, v = torch.cat([kv_ctx[0], k], 2), torch.cat([kv_ctx[1], v], 2)
        x = x + self.self_attn.output(masked_attention(q, k, v, mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable model. Weights are drawn by `reset_parameters` or loaded by `load_drafter`."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @torch.no_grad()
    def reset_parameters(self, init: str, *, seed: int, final_norm: Tensor | None = None) -> None:
        """Draw the weights, the same on every rank and device for one seed.

        `fan_in`: normal with std 1/sqrt(fan_in), norms 1, the last norm copied from the target's
        (`final_norm` [H]), so that the first losses are near ln V. `published`: normal with std
        0.02, norms 1.
        """
        assert init in ("fan_in", "published"), init
        generator = torch.Generator().manual_seed(seed)  # CPU: one stream for all devices
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = parameter.shape[1] ** -0.5 if init == "fan_in" else 0.02
            drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.copy_(drawn)
        if init == "fan_in" and final_norm is not None:
            self.norm.weight.copy_(final_norm)

    def forward(
        self, hidden: Tensor, block_embeds: Tensor, anchors: Tensor, keep: Tensor
    ) -> Tensor:
        """All blocks of a micro-batch.

        Args:
            hidden: [B, S, K*H], the tapped layers side by side, right padded.
            block_embeds: [B, Q, H], the target's embedding of `blocks.block_ids`.
            anchors: int64 [B, N], ascending; keep: bool [B, N].

        Returns:
            [B, Q, H] after the final norm, ready for the target's head. Finite, and without any
            effect on gradients, where keep is false.
        """
        size = block_embeds.shape[1] // anchors.shape[1]
        context = self._context(hidden)
        rope_ctx = self._rope(torch.arange(hidden.shape[1], device=hidden.device)[None])
        rope_blk = self._rope(block_positions(anchors, size))
        layout = BlockLayout.build(anchors, keep, hidden.shape[1], size)
        # The residual stream has the parameters' dtype: float32 also under bfloat16 autocast.
        x = block_embeds.to(self.norm.weight.dtype)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer(x, rope_blk, layer.self_attn.keys_values(context, rope_ctx), layout)
        return self.norm(x)

    def context_kv(self, hidden: Tensor, start: int) -> KeyValues:
        """Keys and values of new context positions start, start + 1, ..., a pair per layer.

        Args:
            hidden: [B, S, K*H] of the target, those positions only. Append the result to what
                earlier calls gave (dimension 2): nothing in it depends on other positions.
        """
        context = self._context(hidden)
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        rope = self._rope(positions[None])
        layers = (layer for layer in self.layers if isinstance(layer, Layer))
        return [layer.self_attn.keys_values(context, rope) for layer in layers]

    def decode_block(self, block_embeds: Tensor, start: int | Tensor, kv: KeyValues) -> Tensor:
        """One block a row, its anchor at position `start`; equal to that block in training.

        Args:
            block_embeds: [B, block_size, H].
            start: one position for all rows, or int64 [B]. Context at or after it is not seen.
            kv: of `context_kv`, positions 0, 1, ... up to at least the largest start.

        Returns:
            [B, block_size, H] after the final norm.
        """
        num_slots, device, mask = block_embeds.shape[1], block_embeds.device, None
        if isinstance(start, Tensor):
            length = kv[0][0].shape[2]
            seen = torch.arange(length, device=device) < start[:, None]
            mask = F.pad(seen, (0, num_slots), value=True)[:, None, None]
            mask = mask.expand(-1, -1, num_slots, -1)
            anchors = start[:, None]
        else:
            kv = [(k[:, :, :start], v[:, :, :start]) for k, v in kv]
            anchors = torch.full((1, 1), start, device=device)
        rope = self._rope(block_positions(anchors, num_slots))
        x = block_embeds.to(self.norm.weight.dtype)
        for layer, kv_ctx in zip(self.layers, kv, strict=True):
            assert isinstance(layer, Layer)
            x = layer.decode(x, rope, kv_ctx, mask)
        return self.norm(x)

    def _context(self, hidden: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(hidden))

    def _rope(self, positions: Tensor) -> Rope:
        """cos and sin of the rotary angles, float32, for int64 positions [B or 1, P]."""
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        frequencies = 1.0 / self.shape.rope_theta ** (half / self.shape.head_dim)
        angles = positions[..., None, None].float() * frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions, halves paired (not neighbours). x: [B, P, heads, D], dtype kept."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def save_drafter(path: str | Path, drafter: Drafter, dtype: str = "bfloat16") -> None:
    """Write config.json and model.safetensors, loadable by the serving engines, into a folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    to = getattr(torch, dtype)
    tensors = {
        name: tensor.detach().to("cpu", to, copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(drafter.shape.to_config(dtype), indent=2)
    (folder / "config.json").write_text(config + "\n")


def load_drafter(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter in a published folder, ours or another trainer's, on the CPU in `dtype`.

    Raises InputError naming what is missing, unexpected or of another shape.
    """
    folder = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise InputError(f"{folder}: no {name}; a drafter's folder holds both")
    try:
        shape = DrafterShape.from_config(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    except (ValueError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot be read ({error})") from error
    with torch.device("meta"):
        drafter = Drafter(shape)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} {found[name]}, not {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ],
    }
    told = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if told:
        raise InputError(
            f"{folder}/model.safetensors does not fit its config.json; {'; '.join(told)}"
        )
    drafter.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, assign=True)
    return drafter.requires_grad_(True)
