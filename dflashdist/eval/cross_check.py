"""What decoding is held to: the target's own choice of each token, and training's own count.

Every answer is replayed: one forward of the target over prompt and answer, without the cache, gives
what it says after each token. Greedily decoded, a token is the largest of these logits, or close to
it: the passes of one, of several and of all tokens round differently. So each token is held to a
bound that rounding never reaches, whatever stands before it; and those that are not the largest, or
lie further below it than rounding usually explains, may not be clearly more frequent in speculative
decoding than in plain decoding, which rounds as much.

And what training says of the drafter: its own count over the decoded text, and the last round of
evaluation that it had while it trained.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval.decode import CachedTarget, Decoded, Rule, padded
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import AVERAGE, STATE, read_provenance
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced

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
# A round's metric of the weights, and of their average (train/evaluation.py).
_METRIC, _METRIC_OF_AVERAGE = "eval/acceptance_length", "eval_ema/acceptance_length"


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


def parts(texts: Sequence[Sequence[int]], most: int = 16384) -> Iterator[slice]:
    """Texts for one forward after the other, each of at most `most` padded tokens or of one text:
    without a cache all of a layer's states exist at once."""
    at_once = max(1, most // max(map(len, texts), default=1))
    return (slice(i, i + at_once) for i in range(0, len(texts), at_once))


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


class TrainingsCount:
    """Acceptance of decoded answers by the code that trained: its target, cut and tapped, its
    reading of the target's embedding and head, its blocks and masks."""

    def __init__(self, target: Target, frozen: TargetTensors, drafter: Drafter) -> None:
        """All three on one device and of one dtype, the target tapped at the drafter's layers."""
        self._target, self._frozen, self._drafter = target, frozen, drafter

    @torch.no_grad()  # as in training: inference_mode would compile CUDA's attention once more
    def __call__(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Decoded], rule: Rule
    ) -> list[AcceptanceSums]:
        """The sums of each greedy answer, on the CPU: one forward over the texts, side by side."""
        texts = [[*p, *answer.tokens] for p, answer in zip(prompts, answers, strict=True)]
        return [
            sums
            for part in parts(texts)
            for sums in self._sums(texts[part], [len(prompt) for prompt in prompts[part]], rule)
        ]

    def _sums(
        self, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], rule: Rule
    ) -> Iterator[AcceptanceSums]:
        ids = padded(texts).to(self._target.device)
        lengths = torch.tensor([len(text) for text in texts], device=ids.device)
        begins = torch.tensor(prompt_lengths, device=ids.device)
        place = torch.arange(ids.shape[1], device=ids.device)
        mask = (place >= begins[:, None]) & (place < lengths[:, None])
        hidden = self._target.hidden_states(ids, lengths)
        for row in range(len(texts)):
            one = slice(row, row + 1)
            nothing = ids.new_zeros(1, 1)
            batch = DrafterBatch(
                ids[one], mask[one], hidden[one], nothing, nothing.bool(), lengths[one]
            )
            sums = teacher_forced(
                self._drafter, self._frozen, batch, end_ids=rule.end_ids,
                max_new_tokens=rule.max_new_tokens,
            )  # fmt: skip
            yield AcceptanceSums(sums.vector.cpu())


def last_round(checkpoint: str | Path) -> dict[str, Any] | None:
    """The step and acceptance length of a drafter's last round of evaluation in training.

    Of a checkpoint, or the averaged weights in one: from the run folder's log of rounds; the best
    one where that is not at hand, as of an export. None where none is recorded.

    Raises InputError for a state or config.json that cannot be read.
    """
    folder = Path(checkpoint).resolve()  # `best` leads to another
    record = read_provenance(folder)
    step, best = record.training.get("step"), record.training.get("best")
    if not isinstance(step, int):
        return None
    averaged = folder.name == AVERAGE or record.averaged
    place = folder.parent if folder.name == AVERAGE else folder
    log = place.parent.parent / "eval/rounds.jsonl" if (place / STATE).is_file() else None
    rounds = _rounds(log, _METRIC_OF_AVERAGE if averaged else _METRIC)
    known = {at: length for at, length in rounds.items() if at <= step}
    if best and not averaged and isinstance(best.get("step"), int):
        known.setdefault(best["step"], best["acceptance_length"])
    if not known:
        return None
    return {"step": max(known), "acceptance_length": known[max(known)]}


def _rounds(log: Path | None, metric: str) -> dict[int, float]:
    """Step -> a metric, of the lines that hold it; one may be cut short by a kill."""
    found = {}
    lines = log.read_text(errors="replace").splitlines() if log and log.is_file() else []
    for line in lines:
        try:
            values = json.loads(line)
            found[int(values["step"])] = float(values[metric])
        except (ValueError, KeyError, TypeError):
            continue
    return found
