"""The drafter: a few Qwen3-style layers whose blocks attend to the target's hidden states.

The tapped hidden states are projected once (`fc`, `hidden_norm`) into a context that every layer
shares and none updates; each layer's own key and value projections serve the context and the
blocks alike. DFlash, section 4.1. The parameters carry the published names: 11 per layer and 3 on
top, no embedding and no head (those are the target's, see `frozen`). Variants add convolutions
(`convolution`) and heads (`heads`).

Legend: B rows, S context positions, N blocks a row, Q = N * block_size slots, H hidden size,
K tapped layers, D head dimension. The layers are in `layers`.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflashdist.config import InputError
from dflashdist.model.attention import BlockLayout, decode_view
from dflashdist.model.blocks import block_positions
from dflashdist.model.convolution import GroupedDynamicConv
from dflashdist.model.heads import CandidateSelector, ConfidenceHead, MarkovHead
from dflashdist.model.layers import Layer, RMSNorm, Rope
from dflashdist.model.shape import DrafterShape

AVERAGE = "ema"  # the averaged weights' folder in a checkpoint
KeyValues = list[tuple[Tensor, Tensor]]  # a layer each: keys and values [B, kv_heads, S, D]
VariantPart = GroupedDynamicConv | CandidateSelector | MarkovHead | ConfidenceHead


class Drafter(nn.Module):
    """The trainable model. Weights are drawn by `reset_parameters` or loaded by `load_drafter`."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self._sights = [shape.sight(i) for i in range(shape.num_layers)]
        self.fc = nn.Linear(shape.num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if shape.selector_rank:
            self.candidate_selector = CandidateSelector(
                shape.hidden_size, shape.vocab_size, shape.selector_rank
            )
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape.vocab_size, shape.markov_rank)
        if shape.confidence_head:
            self.confidence_head = ConfidenceHead(shape.hidden_size, shape.markov_rank)

    @torch.no_grad()
    def reset_parameters(self, init: str, *, seed: int, final_norm: Tensor | None = None) -> None:
        """Draw the weights, the same on every rank and device for one seed.

        `fan_in`: normal with std 1/sqrt(fan_in), norms 1, the last norm copied from the target's
        (`final_norm` [H]), so that the first losses are near ln V. `published`: normal with std
        0.02, norms 1. What a variant adds is drawn last and begins without effect: a new drafter
        of any variant computes what the DFlash drafter of that seed computes.
        """
        assert init in ("fan_in", "published"), init
        generator = torch.Generator().manual_seed(seed)  # CPU: one stream for all devices
        added = self.variant_parts()
        for name, parameter in self.named_parameters():
            if name.startswith(tuple(added)):
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = parameter.shape[1] ** -0.5 if init == "fan_in" else 0.02
            drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.copy_(drawn)
        if init == "fan_in" and final_norm is not None:
            self.norm.weight.copy_(final_norm)
        for part in added.values():
            part.reset_parameters(generator)

    def variant_parts(self) -> dict[str, VariantPart]:
        """The modules that this variant adds to the DFlash drafter, by the names' beginnings."""
        return {
            name + ".": module
            for name, module in self.named_modules()
            if isinstance(module, VariantPart)
        }

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
        layouts = {
            sight: BlockLayout.build(anchors, keep, hidden.shape[1], size, sight)
            for sight in set(self._sights)
        }
        # The residual stream has the parameters' dtype: float32 also under bfloat16 autocast.
        x = block_embeds.to(self.norm.weight.dtype)
        for layer, sight in zip(self.layers, self._sights, strict=True):
            assert isinstance(layer, Layer)
            kv_ctx = layer.self_attn.keys_values(context, rope_ctx)
            x = layer(x, rope_blk, kv_ctx, layouts[sight], size)
        return self.norm(x)

    def context_kv(self, hidden: Tensor, start: int | Tensor) -> KeyValues:
        """Keys and values of new context positions start, start + 1, ..., a pair per layer.

        Args:
            hidden: [B, S, K*H] of the target, those positions only. Append the result to what
                earlier calls gave (dimension 2): nothing in it depends on other positions.
            start: one position for all rows, or int64 [B].
        """
        context = self._context(hidden)
        steps = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rope = self._rope(steps + (start[:, None] if isinstance(start, Tensor) else start))
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
        num_slots, device, length = block_embeds.shape[1], block_embeds.device, kv[0][0].shape[2]
        views = {
            sight: decode_view(start, length, num_slots, sight, device)
            for sight in set(self._sights)
        }
        anchors = torch.as_tensor(start, device=device).view(-1, 1)
        rope = self._rope(block_positions(anchors, num_slots))
        x = block_embeds.to(self.norm.weight.dtype)
        for layer, sight, (k, v) in zip(self.layers, self._sights, kv, strict=True):
            assert isinstance(layer, Layer)
            positions, mask = views[sight]
            x = layer.decode(x, rope, (k[:, :, positions], v[:, :, positions]), mask)
        return self.norm(x)

    def _context(self, hidden: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(hidden))

    def _rope(self, positions: Tensor) -> Rope:
        """cos and sin of the rotary angles, float32 or wider, for int64 positions [B or 1, P]."""
        dtype = torch.promote_types(self.norm.weight.dtype, torch.float32)
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=dtype)
        frequencies = 1.0 / self.shape.rope_theta ** (half / self.shape.head_dim)
        angles = positions[..., None, None].to(dtype) * frequencies
        return angles.cos(), angles.sin()


def save_drafter(path: str | Path, drafter: Drafter, dtype: str = "bfloat16") -> None:
    """Write config.json and model.safetensors, loadable by the serving engines, into a folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    to = getattr(torch, dtype)
    tensors = {
        name: tensor.detach().to("cpu", to, copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_tensors(tensors, folder / "model.safetensors")
    config = json.dumps(drafter.shape.to_config(dtype), indent=2)
    (folder / "config.json").write_text(config + "\n")


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """A safetensors file that whoever may read new files may read: the library's own is private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def load_drafter(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter in a published folder, ours or another trainer's, on the CPU in `dtype`.

    Raises InputError naming what is missing, unexpected or of another shape.
    """
    folder = Path(path)
    shape = read_shape(folder / "config.json")
    with torch.device("meta"):
        drafter = Drafter(shape)
    tensors = read_weights(folder / "model.safetensors", drafter)
    drafter.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, assign=True)
    return drafter.requires_grad_(True)


def read_shape(file: Path) -> DrafterShape:
    """The shape in a drafter's config.json. Raises InputError if there is none that can be read."""
    if not file.is_file():
        raise InputError(
            f"{file.parent}: no {file.name}; a drafter's folder holds config.json and "
            "model.safetensors"
        )
    try:
        return DrafterShape.from_config(json.loads(file.read_text()))
    except InputError as error:
        raise InputError(f"{file.parent}: {error}") from error
    except ValueError as error:
        raise InputError(f"{file.parent}: cannot be read ({error})") from error


def exact_weights(folder: Path) -> Path:
    """The file of a drafter's weights: the float32 ones of a checkpoint or of the average in it
    (ema/), else those that are served."""
    if folder.name == AVERAGE:
        exact = folder.parent / "trainer/ema.safetensors"
    else:
        exact = folder / "trainer/weights.safetensors"
    return exact if exact.is_file() else folder / "model.safetensors"


def read_weights(file: Path, drafter: Drafter, optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must be the drafter's, on the CPU.

    Raises InputError as `check_weights` does.
    """
    check_weights(file, drafter, optional)
    return load_file(file)


def check_weights(file: Path, drafter: Drafter, optional: tuple[str, ...] = ()) -> None:
    """Hold the tensors of a safetensors file to a drafter's, by its header alone.

    Args:
        optional: beginnings of names that the file may lack.

    Raises InputError naming what is missing, unexpected or of another shape.
    """
    if not file.is_file():
        raise InputError(
            f"{file.parent}: no {file.name}; a drafter's folder holds config.json and "
            "model.safetensors"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{file.parent}: cannot be read ({error})") from error
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    missing = [name for name in expected.keys() - found.keys() if not name.startswith(optional)]
    problems = {
        "missing": sorted(missing),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} {found[name]}, not {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ],
    }
    told = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if told:
        raise InputError(f"{file} does not fit its config.json; {'; '.join(told)}")


def weights_digest(drafter: Drafter, through: torch.dtype = torch.float32) -> str:
    """Hex, of all names, shapes and values, these as bfloat16: what a measurement was made of.

    The float32 and the bfloat16 folder of one drafter have the same digest; a float16 folder has
    the one that its drafter has `through` float16, which is rounded to first.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        rounded = tensor.detach().cpu().to(through).to(torch.bfloat16)
        digest.update(rounded.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
