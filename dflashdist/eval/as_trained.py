"""What training says of a drafter that is served: its own count over the decoded text, and the last
round of evaluation that it had while it trained."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflashdist.eval.decode import Decoded, Rule, padded, parts
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import AVERAGE, STATE, read_provenance
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced

# A round's metric of the weights, and of their average (train/evaluation.py).
_METRIC, _METRIC_OF_AVERAGE = "eval/acceptance_length", "eval_ema/acceptance_length"


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
