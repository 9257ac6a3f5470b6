"""The drafter: a few Qwen3-style layers whose blocks attend to the target's hidden states; and its
drafting rule, from a block's states to the tokens that are offered to the target.

The tapped hidden states are projected once (`fc`, `hidden_norm`) into a context that every layer
shares and none updates; each layer's own key and value projections serve the context and the
blocks alike. DFlash, section 4.1. The parameters carry the published names: 11 per layer and 3 on
top, no embedding and no head (those are the target's, see `target_files`).

One drafting rule for decoding and for teacher-forced acceptance. DFlash drafts all slots at once,
each by its own logits (section 4.1). Variants walk over the slots, so that a draft may depend on
the one before it, the first on the anchor's token: DFlash 2 chooses among each slot's top
candidates, DSpark adds a bias to its logits (`heads`).

Legend: B rows, S context positions, N blocks a row, Q = N * block_size slots, H hidden size,
K tapped layers, D head dimension (the layers are in `layers`). Of drafting: M blocks, S slots a
block (block_size, or fewer where a block is clipped), V vocabulary, D drafts a block, C choices of
a slot (V, or the candidates of DFlash 2).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflashdist.model.attention import BlockLayout, decode_view
from dflashdist.model.blocks import block_positions
from dflashdist.model.heads import CandidateSelector, ConfidenceHead, MarkovHead
from dflashdist.model.layers import GroupedDynamicConv, Layer, RMSNorm, Rope, widen
from dflashdist.model.shape import DrafterShape

# (choices' tokens int64 [M, C] or None for the vocabulary itself, scores [M, C]) -> [M]
Choose = Callable[[Tensor | None, Tensor], Tensor]
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


@torch.no_grad()
def greedy_drafts(
    drafter: Drafter, states: Tensor, anchor_ids: Tensor, head: Tensor, chunk_size: int = 1024
) -> Tensor:
    """The most likely drafts, each after the one drafted before it: int64 [M, D].

    Args:
        states: [M, S, H] of the drafter, after its final norm; slot 0 is the anchor's, and at
            least one slot drafts.
        anchor_ids: int64 [M], the tokens that the blocks start from.
        head: [V, H] of the target; the product runs in its dtype.
        chunk_size: slots whose logits exist at once.
    """
    blocks = max(1, chunk_size // states.shape[1])
    parts = zip(states.split(blocks), anchor_ids.split(blocks), strict=True)
    return torch.cat([_walk(drafter, *part, head, lambda _, s: s.argmax(-1)) for part in parts])


@torch.no_grad()
def sampled_drafts(
    drafter: Drafter,
    states: Tensor,
    anchor_ids: Tensor,
    head: Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Drafts drawn at a temperature above 0, and the distribution that each was drawn from.

    Args: as `greedy_drafts`; `generator` is of the states' device.

    Returns:
        int64 [M, D] and float32 (or wider) [M, D, V]: what rejection sampling needs to stay
        lossless.
    """
    drawn_from: list[Tensor] = []

    def draw(tokens: Tensor | None, scores: Tensor) -> Tensor:
        probs = (scores / temperature).softmax(-1)
        whole = probs
        if tokens is not None:
            whole = probs.new_zeros(len(probs), len(head)).scatter_(1, tokens, probs)
        drawn_from.append(whole)
        return torch.multinomial(probs, 1, generator=generator).squeeze(1)

    drafts = _walk(drafter, states, anchor_ids, head, draw)
    return drafts, torch.stack(drawn_from, 1)


def _walk(
    drafter: Drafter, states: Tensor, anchor_ids: Tensor, head: Tensor, choose: Choose
) -> Tensor:
    """Drafts int64 [M, D], slot after slot, each chosen by `choose`."""
    states = states[:, 1 - drafter.shape.ahead :]
    logits = widen(F.linear(states.to(head.dtype), head))
    selector, markov = drafter.candidate_selector, drafter.markov_head
    previous, drafts = anchor_ids, []
    for slot in range(states.shape[1]):
        tokens, scores = None, logits[:, slot]
        if selector is not None:
            scores, tokens = scores.topk(drafter.shape.selector_top_k)
            scores = selector(states[:, slot], scores, tokens, previous)
        elif markov is not None:
            scores = scores + markov(previous)
        previous = choose(tokens, scores)
        if tokens is not None:
            previous = tokens.gather(1, previous[:, None]).squeeze(1)
        drafts.append(previous)
    return torch.stack(drafts, 1)
