"""One layer of the drafter: attention from blocks to context and blocks, an MLP, two residuals.

DFlash 2 puts a convolution over the slots of a block around each sublayer: attention mixes slots
through keys; a kernel of 2 lets each slot read its neighbour directly, with weights that depend on
its own state. Names and arithmetic are those of the package `dflash` and of vLLM (August 2026; no
paper).

Legend: B rows, S context positions, Q slots of all blocks, P positions, H hidden size, D head
dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflashdist.model.attention import BlockLayout, block_attention, masked_attention
from dflashdist.model.shape import DrafterShape

Rope = tuple[Tensor, Tensor]  # cos and sin, float32 or wider [B or 1, positions, 1, D / 2]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values of the blocks


def widen(x: Tensor) -> Tensor:
    """x in float32; in float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


class GroupedDynamicConv(nn.Module):
    """DFlash 2's: a sublayer between two causal convolutions whose kernels its input decides.

    Tap t of slot i weighs the value of slot i - t: a learned number per channel, and a predicted
    one per group of channels.
    """

    def __init__(self, width: int, kernel_size: int, group_size: int):
        super().__init__()
        self.num_groups = width // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, width))  # before, after
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * self.num_groups, bias=False)

    def reset_parameters(self, _generator: torch.Generator) -> None:
        """The identity, so that a new DFlash 2 drafter starts as the DFlash drafter."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], block_size: int) -> Tensor:
        """[B, Q, H] -> [B, Q, H], with Q a multiple of block_size and no block reading another."""
        predicted = self.kernel_projection(x).unflatten(-1, (2, -1, self.num_groups))
        before, after = predicted.unbind(-3)
        x = sublayer(convolve(x, before, self.base_kernel[0], block_size))
        return convolve(x, after, self.base_kernel[1], block_size)


def convolve(x: Tensor, predicted: Tensor, base: Tensor, block_size: int) -> Tensor:
    """y[i] = sum over taps t of (base[t] + predicted[i, t]) * x[i - t], zero before a block.

    Args:
        x: [B, Q, H]; predicted: [B, Q, taps, groups], one number for H / groups channels.
        base: [taps, H].
    """
    num_groups = predicted.shape[-1]
    channels = x.unflatten(1, (-1, block_size)).unflatten(-1, (num_groups, -1))
    kernel = (
        base.unflatten(-1, (num_groups, -1)) + predicted.unflatten(1, (-1, block_size))[..., None]
    )
    out = kernel[..., 0, :, :] * channels
    for tap in range(1, min(len(base), block_size)):
        earlier = F.pad(channels[:, :, :-tap], (0, 0, 0, 0, tap, 0))
        out = out + kernel[..., tap, :, :] * earlier
    return out.flatten(-2).flatten(1, 2)


class Layer(nn.Module):
    """Attention and MLP with residuals; only the blocks are normed, the context already is."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention_conv: GroupedDynamicConv | None = None
        self.mlp_conv: GroupedDynamicConv | None = None
        if shape.conv_kernel_size:
            sizes = shape.hidden_size, shape.conv_kernel_size, shape.conv_group_size
            self.attention_conv = GroupedDynamicConv(*sizes)
            self.mlp_conv = GroupedDynamicConv(*sizes)

    def forward(
        self, x: Tensor, rope: Rope, kv_ctx: tuple[Tensor, Tensor], layout: BlockLayout, size: int
    ) -> Tensor:
        """Training: all blocks of a row at once, each seeing its own part of the context."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block_attention(q, *kv_ctx, k, v, layout)

        return self._sublayers(x, rope, attend, size)

    def decode(
        self, x: Tensor, rope: Rope, kv_ctx: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Decoding: one block a row after its cached context."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = torch.cat([kv_ctx[0], k], 2), torch.cat([kv_ctx[1], v], 2)
            return masked_attention(q, k, v, mask)

        return self._sublayers(x, rope, attend, x.shape[1])

    def _sublayers(self, x: Tensor, rope: Rope, attend: Attend, size: int) -> Tensor:
        def attention(normed: Tensor) -> Tensor:
            q = self.self_attn.queries(normed, rope)
            return self.self_attn.output(attend(q, *self.self_attn.keys_values(normed, rope)))

        x = x + _around(self.attention_conv, attention, self.input_layernorm(x), size)
        return x + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(x), size)


def _around(
    conv: GroupedDynamicConv | None, sublayer: Callable[[Tensor], Tensor], x: Tensor, size: int
) -> Tensor:
    return sublayer(x) if conv is None else conv(x, sublayer, size)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions, halves paired (not neighbours). x: [B, P, heads, D], dtype kept."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
