"""The heads that variants put behind the drafter's states, and their losses.

DFlash drafts all slots of a block independently; each variant lets a draft depend on the one
before it, at the cost of a short walk over the slots when drafting (`drafter`):

- DFlash 2: the `CandidateSelector` chooses among the top candidates of a slot.
- DSpark (2607.05147): the `MarkovHead` adds a low-rank bias to the logits of a slot, and the
  `ConfidenceHead` says how likely the target is to accept it.

Legend: M slots, H hidden size, V vocabulary, r rank, k candidates. The losses are sums; divide them
by the weight of the step, as the cross-entropy. float32 is float64 where all of a head is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflashdist.model.layers import widen


class CandidateSelector(nn.Module):
    """Scores of a slot's candidates: their logits, plus how well each follows the token before.

    The codebooks are bare parameters, as the published files name them without `.weight`.
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Codebooks of std 1/sqrt(r); the projection 0: the logits alone decide at first."""
        _draw(self.predecessor_codebook, generator)
        _draw(self.successor_codebook, generator)
        nn.init.zeros_(self.hidden_projection.weight)

    def forward(
        self, states: Tensor, unary: Tensor, candidates: Tensor, previous: Tensor
    ) -> Tensor:
        """float32 [M, k]: unary + <A[previous] * (W states), B[candidate]>.

        Args:
            states: [M, H]; unary: [M, k], the candidates' logits.
            candidates: int64 [M, k]; previous: int64 [M], the tokens of the positions before.
        """
        query = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(states)
        keys = F.embedding(candidates, self.successor_codebook)
        return widen(unary) + widen((query[:, None] * keys).sum(-1))


class MarkovHead(nn.Module):
    """A bias on the logits of a slot by the token before it: W2 W1[previous], of low rank."""

    def __init__(self, vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The embedding of std 1/sqrt(r), the output 0: no bias at first."""
        _draw(self.markov_w1.weight, generator)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, previous: Tensor) -> Tensor:
        """int64 [M] -> float32 [M, V]."""
        return widen(self.markov_w2(self.markov_w1(previous)))


class ConfidenceHead(nn.Module):
    """The logit of a draft's chance to be accepted, from its state and the Markov embedding.

    `confidence_head.proj.{weight,bias}` in files, as in DeepSpec and vLLM.
    """

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def reset_parameters(self, _generator: torch.Generator) -> None:
        """0: every draft is as likely as not."""
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """states [M, H], embedded [M, r] of `markov_w1` -> float32 [M]."""
        split = states.shape[-1]  # two products: the two joined would be a copy of the states
        of_state = F.linear(states, self.proj.weight[:, :split], self.proj.bias)
        of_previous = F.linear(embedded.to(states.dtype), self.proj.weight[:, split:])
        return widen((of_state + of_previous).squeeze(-1))


def selector_loss(
    selector: CandidateSelector,
    states: Tensor,
    top_ids: Tensor,
    head: Tensor,
    previous: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the true token among a slot's candidates, given the true token before.

    A slot whose label is not among its candidates counts nothing (as in NeMo AutoModel; the
    original's loss is unpublished). Computed over chunks of slots, and again in the backward pass,
    since the candidates' rows of the head are k times the states.

    Args:
        states: [M, H]; gradients reach them through the logits and through the selector.
        top_ids: int64 [M, k], the most likely tokens of each slot; head: [V, H], frozen.
        previous, labels: int64 [M]; weights: float32 [M].

    Returns:
        float32 scalar, the sum of weight x cross-entropy, connected to every parameter of the
        selector also where M is 0; and bool [M], whether the selector's choice is the label.
    """

    def part_of(states: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        top, before, label, weight = rest
        unary = torch.einsum("mh,mkh->mk", states.to(head.dtype), F.embedding(top, head))
        scores = selector(states, unary, top, before)
        picked = top.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        losses = -((top == label[:, None]) * scores.log_softmax(-1)).sum(-1)
        return (losses * weight).sum(), picked == label  # no product: autocast would round it

    hits = [labels.new_zeros(0, dtype=torch.bool)]
    parts = [one.split(chunk_size) for one in (states, top_ids, previous, labels, weights)]
    total = weights.new_zeros(())
    for part in zip(*parts, strict=True):
        loss, hit = checkpoint(part_of, *part, use_reentrant=False, preserve_rng_state=False)
        total = total + loss
        hits.append(hit)
    return total, torch.cat(hits)


def confidence_loss(
    confidence: ConfidenceHead,
    states: Tensor,
    embedded: Tensor,
    target_share: Tensor,
    weights: Tensor,
) -> Tensor:
    """Binary cross-entropy of the predicted chance against the true one, a weighted sum.

    Args:
        states: [M, H]; embedded: [M, r], `markov_w1` of the tokens before.
        target_share: float32 [M], the chance that the target accepts the draft: 1 - half the L1
            distance between the two distributions. Taken as given: no gradient.
        weights: float32 [M].

    Returns:
        float32 scalar, connected to every parameter of the head also where M is 0.
    """
    logits = confidence(states, embedded)
    losses = F.binary_cross_entropy_with_logits(logits, target_share.detach(), reduction="none")
    return (losses * weights).sum()  # no product: autocast would round it


def _draw(parameter: Tensor, generator: torch.Generator) -> None:
    """Normal with std 1/sqrt(columns), drawn on the CPU: one stream for all devices."""
    drawn = torch.empty(parameter.shape)
    with torch.no_grad():
        parameter.copy_(drawn.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator))
