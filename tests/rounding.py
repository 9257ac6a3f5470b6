"""How far two computations of one number may lie apart, on any processor.

Kernels differ between processors, threads and shapes in the order of their sums and in fused
products. Algorithms are therefore compared in float64 (fixture `float64`), where a bound of `EXACT`
tells rounding from every fault; float32 is compared only where it is what is tested.
"""

import torch
from torch import nn

# Of values up to some 100: float64 rounds them by 1e-14, and a thousand such roundings in a row,
# grown tenfold by softmax and norms, stay below. A wrong term, mask or position is 1e-3 or more.
EXACT = 1e-10


def rounding(terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """A bound of the difference between two sums of `terms` products, none above `size`.

    The errors of single roundings, eps / 2 each, add up as a random walk: sqrt(terms) of them. Two
    sums, and six standard deviations and more: 8.
    """
    return 8 * torch.finfo(dtype).eps * terms**0.5 * size


def in_float64(model: nn.Module) -> nn.Module:
    """A model of transformers, or of a package that uses its parts, in float64 throughout: its
    norms and rotary angles would be of float32 whatever its dtype is."""
    model.double()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            exact: nn.Module = nn.RMSNorm(len(module.weight), module.variance_epsilon)
            exact.weight = module.weight
        elif type(module).__name__.endswith("RotaryEmbedding"):
            exact = _Rotary(module.config)
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, exact)
    return model


class _Rotary(nn.Module):
    """cos and sin as transformers' rotary module gives them."""

    def __init__(self, config) -> None:
        super().__init__()
        assert config.rope_parameters["rope_type"] == "default"
        self.theta, self.head_dim = config.rope_parameters["rope_theta"], config.head_dim

    def forward(self, x, position_ids):
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        angles = position_ids[..., None] * self.theta ** -(half / self.head_dim)
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()
