"""Decoding: by the target alone, and by drafter and target together; greedy and sampled.

Both loops run the same target through the same cache, so that their token rates compare, and are
lossless: greedily, each token is the target's own argmax; sampled, each is drawn from the target's
own distribution, by rejection sampling (2211.17192). DFlash, section 3.1.

Legend: M rows (answers that still go on), n tokens, D drafts a block, V vocabulary.
"""

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflashdist.config import InputError
from dflashdist.model.drafter import Drafter, greedy_drafts, sampled_drafts
from dflashdist.model.layers import widen


@dataclass(frozen=True)
class Rule:
    """How tokens are picked and when an answer ends."""

    max_new_tokens: int
    end_ids: Collection[int] = ()
    temperature: float = 0.0  # 0 = greedy
    generator: torch.Generator | None = None  # of sampling, on the target's device

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether an answer is complete."""
        return tokens[-1] in self.end_ids or len(tokens) >= self.max_new_tokens

    def probs(self, logits: Tensor) -> Tensor:
        """The target's distribution at the temperature, float32 or wider."""
        return (widen(logits) / self.temperature).softmax(-1)

    def pick(self, logits: Tensor) -> Tensor:
        """The next tokens, int64 [M], of logits [M, V]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return _draw(self.probs(logits), self.generator)


@dataclass
class Decoded:
    """One answer and how it came about. The first token is the prefill's and belongs to no pass."""

    tokens: list[int]  # the end-of-turn token included, when it was reached
    emitted: list[int] = field(default_factory=list)  # tokens of each later pass: sum = len - 1
    offered: list[int] = field(default_factory=list)  # drafts before the answer's end, of each pass
    accepted: list[int] = field(default_factory=list)  # leading drafts that the target agreed with

    def take(self, tokens: list[int], offered: int, end_ids: Collection[int]) -> None:
        """A pass: its accepted drafts and the bonus token, cut after an end token among them."""
        stop = next((i for i, token in enumerate(tokens, 1) if token in end_ids), len(tokens))
        ended = tokens[stop - 1] in end_ids
        self.tokens += tokens[:stop]
        self.emitted.append(stop)
        self.offered.append(min(offered, stop) if ended else offered)
        self.accepted.append(min(len(tokens) - 1, stop))


class KeyValueCache:
    """Keys and values [rows, heads, capacity, D] of several sequences, each of its own length.

    A forward is `begin(n)`, one `update` a layer, then `advance` with the tokens that each row
    keeps of these n, counted from the first. What a row holds is decided by its length alone: a
    token that was not kept lies after it, is seen by nobody (a key is visible to queries at or
    after its position) and is overwritten by the next one. So nothing is ever cropped, and rows
    that accept different numbers of drafts stay in one batch.

    `update` is what transformers' attention layers call on a cache (5.17 to 5.24 and later); the
    model gets masks and positions ready made, so nothing else of theirs is used.
    """

    def __init__(self, num_rows: int, capacity: int, device: str | torch.device) -> None:
        self.lengths = [0] * num_rows  # tokens kept of each row; on the host, as decoding is
        self._capacity, self.device = capacity, torch.device(device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.begin(0)

    def begin(self, num_tokens: int) -> Tensor:
        """Positions of each row's next tokens, int64 [rows, num_tokens]."""
        self._used = max(self.lengths, default=0) + num_tokens
        assert self._used <= self._capacity, (self._used, self._capacity)
        starts = torch.tensor(self.lengths, device=self.device)
        self.positions = starts[:, None] + torch.arange(num_tokens, device=self.device)
        self._rows = torch.arange(len(starts), device=self.device)[:, None]
        return self.positions

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_ignored: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, n, D] at `positions`; returns `layer`. Further arguments are those of
        some releases of transformers, of no use here."""
        if layer_idx not in self._layers:
            # Zeros: a value that no query sees is still multiplied, by 0, and must be finite.
            self._layers[layer_idx] = (self._room(keys), self._room(values))
        for stored, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            stored[self._rows, :, self.positions] = new.transpose(1, 2)
        return self.layer(layer_idx)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views [rows, heads, used, D] of a layer, up to the end of the longest row."""
        keys, values = self._layers[layer_idx]
        return keys[:, :, : self._used], values[:, :, : self._used]

    def advance(self, kept: Sequence[int]) -> None:
        """Lengthen each row by the tokens kept of those last written."""
        self.lengths = [n + more for n, more in zip(self.lengths, kept, strict=True)]
        self._used = max(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows alone, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self._layers = {i: (k[index], v[index]) for i, (k, v) in self._layers.items()}
        self.lengths = [self.lengths[row] for row in rows]
        self._used = max(self.lengths, default=0)

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Asked for by models that would otherwise make positions of their own."""
        return max(self.lengths)

    def visible(self, window: int | None = None) -> Tensor:
        """bool [rows, 1, n, used]: which keys each of the n tokens sees: itself, those before it,
        and of them only the last `window`, itself counted."""
        query = self.positions[:, None, :, None]
        key = torch.arange(self._used, device=self.device)
        seen = key <= query
        return seen if window is None else seen & (query - key < window)

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self._capacity, like.shape[3])


def attention_masks(config: Any, cache: KeyValueCache, dtype: torch.dtype) -> Any:
    """The masks of a model's forward over the cache: one, or one for each type of its layers; of
    the model's dtype where its eager attention adds them to the scores. Raises InputError for a
    layer that is neither full nor sliding."""
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if not types:  # of one kind, and sliding where there is a window
        types = {"full_attention" if window is None else "sliding_attention"}
    masks = {}
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise InputError(
                f"the target has layers of type {name}, which `evaluate` cannot decode with; "
                "take one with full or sliding attention"
            )
        seen = cache.visible(window if name == "sliding_attention" else None)
        if getattr(config, "_attn_implementation", "sdpa") == "eager":
            lowest = torch.finfo(dtype).min
            masks[name] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, lowest)
        else:
            masks[name] = seen
    return masks if len(masks) > 1 else masks.popitem()[1]


class CachedTarget:
    """The whole target with its key-value cache, for a batch of sequences, and taps on layers."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int] = ()) -> None:
        """`model` is a causal LM of transformers; id l taps the output of decoder layer l."""
        self.model: Any = model
        weights = next(model.parameters())
        self.device, self.dtype = weights.device, weights.dtype
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: Tensor = self.model.get_output_embeddings().weight
        self.cache = KeyValueCache(0, 0, self.device)
        self._cache_keyword = cache_keyword(model)
        self._layer_ids = tuple(layer_ids)
        self._tapped: dict[int, Tensor] = {}
        layers = self.model.get_decoder().layers
        for i in self._layer_ids:
            layers[i].register_forward_hook(self._tap(i))

    def prefill(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Start anew with these prompts, and room for so many tokens after the longest.

        Returns the logits [M, V] after each prompt.
        """
        lengths = [len(prompt) for prompt in prompts]
        self.cache = KeyValueCache(len(prompts), max(lengths) + room, self.device)
        last = sorted({n - 1 for n in lengths})  # a prompt's logits would be the largest tensor
        logits = self.forward(padded(prompts), torch.tensor(last, device=self.device))
        self.cache.advance(lengths)
        return logits[torch.arange(len(prompts)), [last.index(n - 1) for n in lengths]]

    def forward(self, ids: Tensor, places: Tensor | int = 0) -> Tensor:
        """Logits [M, n, V] of the next n tokens of each row, or at some places alone.

        They lie in the cache, but count only once `cache.advance` says which are kept.
        """
        positions = self.cache.begin(ids.shape[1])
        keywords = {
            self._cache_keyword: self.cache,
            "attention_mask": attention_masks(self.model.config, self.cache, self.dtype),
        }
        return self.model(
            input_ids=ids.to(self.device),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=places,
            **keywords,
        ).logits

    def last_states(self, ids: Tensor) -> Tensor:
        """[M, n, H], what the head reads of whole texts int64 [M, n], padded on the right: without
        the cache and its masks."""
        decoder = self.model.get_decoder()
        return decoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """The model's own [..., V] of states [..., H], but for a constant factor."""
        logits = self.model.get_output_embeddings()(states)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap  # where large ones tie

    def hidden(self) -> Tensor:
        """[M, n, K*H]: outputs of the tapped layers for the last forward's tokens."""
        return torch.cat([self._tapped[i] for i in self._layer_ids], -1)

    def _tap(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


class DrafterContext:
    """The drafter's keys and values of what the target has read, of each row."""

    def __init__(self, drafter: Drafter, num_rows: int, capacity: int, device: torch.device):
        self._drafter = drafter
        self.cache = KeyValueCache(num_rows, capacity, device)

    def append(self, hidden: Tensor, kept: Sequence[int]) -> None:
        """The target's states [M, n, K*H] of each row's next tokens, the first `kept` count."""
        self.cache.begin(hidden.shape[1])
        for layer, pair in enumerate(self._drafter.context_kv(hidden, self._starts())):
            self.cache.update(*pair, layer)
        self.cache.advance(kept)

    def states(self, block_embeds: Tensor) -> Tensor:
        """[M, block_size, H] of a block after each row, of embeddings of the same shape."""
        layers = [self.cache.layer(i) for i in range(self._drafter.shape.num_layers)]
        return self._drafter.decode_block(block_embeds, self._starts(), layers)

    def _starts(self) -> int | Tensor:
        """The position after each row; one number where they are alike."""
        starts = self.cache.lengths
        if len(set(starts)) == 1:
            return starts[0]
        return torch.tensor(starts, device=self.cache.device)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Texts as one int64 [rows, longest], zeros on the right."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    return ids


def cache_keyword(model: Any) -> str:
    """The name of forward's cache argument: `cache` from transformers 5.24 on, else the older."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def decode_plain(
    target: CachedTarget, prompts: Sequence[Sequence[int]], rule: Rule
) -> tuple[list[Decoded], float]:
    """The target's own answers, a token a pass; and the seconds after the prefill."""
    first = rule.pick(target.prefill(prompts, rule.max_new_tokens)).tolist()
    answers = [Decoded([token]) for token in first]
    began = _now(target.device)
    going = _going(answers, range(len(answers)), rule, [target.cache])
    while going:
        newest = torch.tensor([answers[i].tokens[-1:] for i in going])
        picked = rule.pick(target.forward(newest)[:, -1]).tolist()
        target.cache.advance([1] * len(going))
        for i, token in zip(going, picked, strict=True):
            answers[i].tokens.append(token)
            answers[i].emitted.append(1)
        going = _going(answers, going, rule, [target.cache])
    return answers, _now(target.device) - began


@torch.inference_mode()
def decode_speculative(
    target: CachedTarget, drafter: Drafter, prompts: Sequence[Sequence[int]], rule: Rule
) -> tuple[list[Decoded], float]:
    """Answers of the same distribution, a block of drafts a pass; and seconds after the prefill.

    The target must be tapped at the drafter's layers, and both be of one dtype. The last block of
    an answer is clipped to what `max_new_tokens` leaves, and an end token stops inside a block.
    """
    block_size, drafts_of_block = drafter.shape.block_size, drafter.shape.num_drafts
    room = rule.max_new_tokens + drafts_of_block  # of other rows' drafts after a row's end
    first = rule.pick(target.prefill(prompts, room)).tolist()
    answers = [Decoded([token]) for token in first]
    context = DrafterContext(drafter, len(prompts), max(target.cache.lengths) + room, target.device)
    context.append(target.hidden(), target.cache.lengths)
    began = _now(target.device)
    caches = [target.cache, context.cache]
    going = _going(answers, range(len(answers)), rule, caches)
    while going:
        anchors = torch.tensor([answers[i].tokens[-1] for i in going], device=target.device)
        block = anchors.new_full((len(going), block_size), drafter.shape.mask_token_id)
        block[:, 0] = anchors
        states = context.states(F.embedding(block, target.embedding))
        if rule.temperature == 0:
            drafts, probs = greedy_drafts(drafter, states, anchors, target.head), None
        else:
            drafts, probs = sampled_drafts(
                drafter, states, anchors, target.head, rule.temperature, rule.generator
            )
        left = [rule.max_new_tokens - len(answers[i].tokens) for i in going]
        offered = [min(drafts_of_block, tokens - 1) for tokens in left]  # the bonus token follows
        drafts = drafts[:, : max(offered)]
        logits = target.forward(torch.cat([anchors[:, None], drafts], 1))
        limits = torch.tensor(offered, device=target.device)
        agreed, bonus = verify(logits, drafts, probs, limits, rule)
        passes = torch.cat([agreed[:, None], bonus[:, None], drafts], 1).tolist()
        for i, offer, (count, last, *drafted) in zip(going, offered, passes, strict=True):
            answers[i].take([*drafted[:count], last], offer, rule.end_ids)
        kept = [1 + count for count, *_ in passes]  # the anchor and the accepted drafts
        context.append(target.hidden(), kept)
        target.cache.advance(kept)
        going = _going(answers, going, rule, caches)
    return answers, _now(target.device) - began


def verify(
    logits: Tensor, drafts: Tensor, probs: Tensor | None, limits: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """How many leading drafts the target takes, and the token it says after them.

    Greedy: a draft is taken if it is the target's argmax. Sampled: with probability min(1, p/q),
    and after a rejection the token is drawn from max(p - q, 0), which makes its distribution p.

    Args:
        logits: [M, n + 1, V] of the target, after the anchor and after each draft.
        drafts: int64 [M, n].
        probs: [M, at least n, V], what the drafts were drawn from; None if greedy.
        limits: int64 [M], drafts of each row that may be taken, at most n.

    Returns:
        counts int64 [M] from 0 to limits, tokens int64 [M].
    """
    allowed = torch.arange(drafts.shape[1], device=drafts.device) < limits[:, None]
    if probs is None:
        own = logits.argmax(-1)
        agreed = ((drafts == own[:, :-1]) & allowed).long().cumprod(1).sum(1)
        return agreed, own.gather(1, agreed[:, None]).squeeze(1)
    p, q = rule.probs(logits), probs[:, : drafts.shape[1]]
    p_draft = p[:, :-1].gather(2, drafts[..., None]).squeeze(2)
    q_draft = q.gather(2, drafts[..., None]).squeeze(2)
    uniform = torch.rand(q_draft.shape, generator=rule.generator, device=q.device)
    taken = (uniform * q_draft < p_draft) & allowed
    agreed = taken.long().cumprod(1).sum(1)
    rows = torch.arange(len(agreed), device=agreed.device)
    rest = p[rows, agreed]
    q = F.pad(q, (0, 0, 0, 1))  # after the last draft nothing was rejected
    rejected = (agreed < limits)[:, None]
    rest = torch.where(rejected, (rest - q[rows, agreed]).clamp(min=0), rest)
    # Where p and q are equal but for rounding, a rejection leaves nothing to draw from.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[rows, agreed])
    return agreed, _draw(rest, rule.generator)


def _going(
    answers: Sequence[Decoded], going: Sequence[int], rule: Rule, caches: Sequence[KeyValueCache]
) -> list[int]:
    """The answers that are not complete; the caches drop the rows of the others."""
    rows = [row for row, i in enumerate(going) if not rule.ends(answers[i].tokens)]
    if len(rows) < len(going):
        for cache in caches:
            cache.select(rows)
    return [going[row] for row in rows]


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token a row, int64 [M], with probabilities in proportion to weights [M, V]."""
    return torch.multinomial(weights, 1, generator=generator).squeeze(1)


def _now(device: torch.device) -> float:
    """Seconds, after all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
