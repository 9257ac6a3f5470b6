"""Whether decoding is lossless, judged by the target itself, token by token.

Every answer is replayed: one forward of the target over prompt and answer, without the cache, gives
what it says after each token. Greedily decoded, a token is the largest of these logits, or close to
it: the passes of one, of several and of all tokens round differently. So each token is held to a
bound that rounding never reaches, whatever stands before it; and those that are not the largest, or
lie further below it than rounding usually explains, may not be clearly more frequent in speculative
decoding than in plain decoding, which rounds as much.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval.decode import CachedTarget, Decoded, Rule, padded, parts

# How far below the largest logit a token may lie, in roundings of the larger of the two. The most
# measured in bfloat16: of the demo's target 1.7 in 11,912 tokens (a gap of 0.125), of random ones
# of 24 and 36 layers, whose logits are flat, 6.9. In float32 all 11,754 were the largest.
USUAL, MOST = 4, 16
# A rounding is an eps of the dtype; of float32 64, as its products are summed in float32 as well:
# two passes of a random target of 24 layers differed by up to 290 eps, where one channel is huge.
_EPS_A_ROUNDING = {torch.float32: 64}
# Shares of the tokens, above plain decoding's and 3 standard errors, that are a fault: of those not
# the largest, and of those beyond `USUAL`. On the demo in bfloat16 0.3 % and none.
MORE, MORE_UNUSUAL = 0.01, 0.002
_TOKENS_AT_ONCE = 512  # whose logits exist


class OutputsDiffer(RuntimeError):
    """Speculative decoding emitted something that plain decoding does not: a bug, never noise."""


@dataclass(frozen=True)
class Replayed:
    """An answer, or several added up, beside the target's own greedy choice after each token."""

    tokens: int = 0
    other: int = 0  # not the largest logit
    unusual: int = 0  # of these, beyond `USUAL`

    def __add__(self, more: "Replayed") -> "Replayed":
        return Replayed(
            self.tokens + more.tokens, self.other + more.other, self.unusual + more.unusual
        )


@torch.no_grad()  # as in training: inference_mode would compile CUDA's attention once more
def replay(
    target: CachedTarget,
    chat: ChatTokenizer,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Decoded],
    rule: Rule,
    loop: str,
) -> list[Replayed]:
    """Hold greedy answers to a batch of prompts to what the target says without the cache.

    Args:
        rule: of these answers; says where each ends.
        loop: `speculative` or `plain`, for messages.

    Raises OutputsDiffer for a token that the target would not say, or an answer that goes on after
    its end or stops before it.
    """
    found = []
    for prompt, answer, row in _states(target, prompts, answers):
        begin, tokens = len(prompt) - 1, answer.tokens
        gaps, units = _gaps(target, row[begin : begin + len(tokens)], tokens)
        fault = _fault(tokens, gaps, units, rule)
        if fault:
            at, why = fault
            raise OutputsDiffer(
                f"{loop} decoding is not lossless: token {at} of the answer to "
                f"{chat.decode(prompt)!r} is {tokens[at]}, {why}"
            )
        other, unusual = (sum(unit > bound for unit in units) for bound in (0, USUAL))
        found.append(Replayed(len(tokens), other, unusual))
    return found


def _states(
    target: CachedTarget, prompts: Sequence[Sequence[int]], answers: Sequence[Decoded]
) -> Iterator[tuple[Sequence[int], Decoded, Tensor]]:
    """Each prompt and answer with the states [n, H] of its text."""
    texts = [[*p, *answer.tokens[:-1]] for p, answer in zip(prompts, answers, strict=True)]
    for part in parts(texts):
        states = target.last_states(padded(texts[part]))
        yield from zip(prompts[part], answers[part], states, strict=True)


def check_shares(plain: Replayed, speculative: Replayed) -> None:
    """Raises OutputsDiffer where speculative decoding leaves the target's first choice clearly more
    often than plain decoding: by `MORE` of the tokens and 3 standard errors of the difference, or
    by `MORE_UNUSUAL` where rounding does not usually do it."""
    if not plain.tokens or not speculative.tokens:
        return
    for counts, more, what in (
        ((plain.other, speculative.other), MORE, ""),
        ((plain.unusual, speculative.unusual), MORE_UNUSUAL, " by more than usual rounding"),
    ):
        before, after = counts[0] / plain.tokens, counts[1] / speculative.tokens
        both = sum(counts) / (plain.tokens + speculative.tokens)
        error = math.sqrt(both * (1 - both) * (1 / plain.tokens + 1 / speculative.tokens))
        if after - before > more + 3 * error:
            raise OutputsDiffer(
                f"speculative decoding is not lossless: {after:.2%} of its tokens are not the "
                f"target's first choice{what}, {before:.2%} of plain decoding's"
            )


def equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _fault(
    tokens: Sequence[int], gaps: Sequence[float], units: Sequence[float], rule: Rule
) -> tuple[int, str] | None:
    """The first token that the target would not say, and why; else a wrong end; else None."""
    for at, (gap, unit) in enumerate(zip(gaps, units, strict=True)):
        if not unit <= MOST:
            return at, f"logit margin {gap:.3g}, {unit:.3g} times what one rounding explains"
    last = len(tokens) - 1
    ends = (at for at, token in enumerate(tokens) if token in rule.end_ids)
    end = min(next(ends, len(tokens)), rule.max_new_tokens - 1)
    if end < last:
        return end, "an end, after which it goes on"
    return None if end == last else (last, "no end, and the last one")


def _gaps(
    target: CachedTarget, states: Tensor, tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """How far each token's logit lies below the largest; and the same in roundings of the larger.

    `states`: [n, H], which the head reads.
    """
    gaps, units = [], []
    rounding = torch.finfo(states.dtype).eps * _EPS_A_ROUNDING.get(states.dtype, 1)
    ids = torch.tensor(tokens, device=states.device)[:, None]
    for some, said in zip(states.split(_TOKENS_AT_ONCE), ids.split(_TOKENS_AT_ONCE), strict=True):
        logits = target.logits(some)
        top, own = logits.amax(-1).float(), logits.gather(1, said).squeeze(1).float()
        larger = torch.maximum(top.abs(), own.abs()).clamp(min=torch.finfo(torch.float32).tiny)
        gaps += (top - own).tolist()
        units += ((top - own) / (rounding * larger)).tolist()
    return gaps, units
