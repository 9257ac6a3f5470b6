"""Conversations to a token store: rendered, tokenised, masked, cut, and every row accounted for."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflashdist.config import DataConfig, InputError
from dflashdist.data.chat import ChatTokenizer, Rendering
from dflashdist.data.conversations import (
    Conversation,
    Rejections,
    RowError,
    find_files,
    read_conversations,
)
from dflashdist.data.shards import TokenStore, TokenStoreWriter

NOT_ADJACENT = "no two adjacent supervised tokens"
BEYOND = "answers begin beyond data.max_length"
CHUNK = 512  # rows tokenised in one call: enough for the tokenizer's threads, little memory
CHECKED = 32  # rows whose mask is verified by decoding


def prepare(
    sources: Sequence[str | Path],
    target: str | Path,
    out: str | Path,
    data: DataConfig,
    overwrite: bool = False,
    revision: str | None = None,
) -> dict[str, Any]:
    """Write the token store `out` of the conversations in `sources` for the target.

    Rows are cut at data.max_length tokens on the right. A row needs max(2, data.min_supervised)
    supervised tokens, two of them adjacent: a block of a drafter is an anchor and what follows it.
    Returns the summary that `format_summary` prints; rows = kept + sum of rejected, always.
    Raises InputError for bad sources, targets, masks, an existing `out`, or when no row is usable.
    """
    files = find_files(sources)
    chat = ChatTokenizer.load(target, revision)
    settings = {
        "target": str(target),
        "tokenizer_fingerprint": chat.fingerprint,
        "tokenizer_length": chat.length,
        "vocab_size": chat.vocab_size,
        "pad_id": chat.pad_id,
        "max_length": data.max_length,
        "min_supervised": max(2, data.min_supervised),
    }
    rejections = Rejections()
    conversations = read_conversations(files, rejections)
    cut_rows = cut_tokens = 0
    with TokenStoreWriter(out, settings, overwrite) as writer, _progress() as progress:
        for origin, ids, mask in _tokenised(conversations, chat, rejections):
            progress.update()
            reason = _unusable(mask, data)
            if reason:
                rejections.add(reason, origin)
                continue
            if len(ids) > data.max_length:
                cut_rows += 1
                cut_tokens += len(ids) - data.max_length
            writer.add(ids[: data.max_length], mask[: data.max_length])
        writer.audit = {
            "rows": writer.num_rows + rejections.total,
            "kept": writer.num_rows,
            "rejected": rejections.counts,
            "examples": rejections.examples,
            "cut_rows": cut_rows,
            "cut_tokens": cut_tokens,
        }
        if not writer.num_rows:
            raise InputError(f"no usable row among {rejections.total}: {_reasons(rejections)}")
    return summarise(TokenStore.open(out))


def summarise(store: TokenStore) -> dict[str, Any]:
    """What a store holds and what was left out of it; plain values, for JSON or a table."""
    quantiles = np.quantile(store.lengths, [0.1, 0.5, 0.9, 0.99, 1], method="higher")
    return {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "target": store.meta["target"],
        "max_length": store.meta["max_length"],
        **store.meta["audit"],
        "tokens": int(store.lengths.sum(dtype=np.int64)),
        "supervised_tokens": int(store.supervised.sum(dtype=np.int64)),
        "length_p10_p50_p90_p99_max": [int(value) for value in quantiles],
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as a table."""
    lengths = " / ".join(map(str, summary["length_p10_p50_p90_p99_max"]))
    share = summary["supervised_tokens"] / summary["tokens"]
    lines = [
        ("store", summary["store"]),
        ("fingerprint", summary["fingerprint"]),
        ("rows read", f"{summary['rows']:,}"),
        ("rows kept", f"{summary['kept']:,}"),
        ("rows rejected", f"{sum(summary['rejected'].values()):,}"),
    ]
    for reason, count in sorted(summary["rejected"].items(), key=lambda item: -item[1]):
        lines.append((f"  {reason}", f"{count:,}  ({', '.join(summary['examples'][reason])})"))
    lines += [
        (
            f"rows cut at {summary['max_length']:,}",
            f"{summary['cut_rows']:,}  ({summary['cut_tokens']:,} tokens lost)",
        ),
        ("tokens", f"{summary['tokens']:,}"),
        ("supervised tokens", f"{summary['supervised_tokens']:,}  ({share:.0%})"),
        ("length p10/50/90/99/max", lengths),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _tokenised(
    conversations: Iterable[Conversation], chat: ChatTokenizer, rejections: Rejections
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(origin, ids int32, loss mask uint8) of each row that renders and masks exactly."""
    to_check = CHECKED
    rows = iter(conversations)
    while chunk := list(islice(rows, CHUNK)):
        rendered: list[tuple[str, Rendering]] = []
        for conversation in chunk:
            try:
                rendered.append((conversation.origin, chat.render_answers(conversation.messages)))
            except RowError as error:
                rejections.add(str(error), conversation.origin)
        encodings = chat.encode([rendering.text for _, rendering in rendered])
        for (origin, rendering), encoding in zip(rendered, encodings, strict=True):
            try:
                mask = chat.loss_mask(encoding, rendering.spans)
            except RowError as error:
                rejections.add(str(error), origin)
                continue
            if to_check:
                chat.check_mask(encoding, mask, rendering, origin)
                to_check -= 1
            yield origin, np.array(encoding.ids, dtype=np.int32), mask


def _unusable(mask: np.ndarray, data: DataConfig) -> str | None:
    """Why a row with this mask cannot be trained on, or None."""
    kept = mask[: data.max_length]
    least = max(2, data.min_supervised)
    if kept.sum() < least:
        return BEYOND if mask.sum() >= least else f"fewer than {least} supervised tokens"
    return None if (kept[1:] & kept[:-1]).any() else NOT_ADJACENT


def _reasons(rejections: Rejections) -> str:
    if not rejections.counts:
        return "the sources are empty"
    return "; ".join(
        f"{count} x {reason} (first: {rejections.examples[reason][0]})"
        for reason, count in rejections.counts.items()
    )


def _progress() -> Any:
    """A bar on a terminal, nothing elsewhere."""
    return tqdm(desc="prepare", unit=" rows", disable=None)
