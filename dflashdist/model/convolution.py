"""Grouped dynamic convolution over the slots of a block: what DFlash 2 puts around each sublayer.

Attention mixes slots through keys; a convolution with a kernel of 2 lets each slot read its
neighbour directly, with weights that depend on its own state. Names and arithmetic are those of
the package `dflash` and of vLLM (DFlash 2, 2026; no paper).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedDynamicConv(nn.Module):
    """A sublayer between two causal convolutions, both of whose kernels its input decides.

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
