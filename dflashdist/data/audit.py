"""What a store holds and what was left out of it: counted while it is written, shown in a table, in
audit.json, in audit.md with a dozen rows whose supervised text is marked, and row by row.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflashdist.config import InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import NULLS, Rejections
from dflashdist.data.parts import KINDS, Part
from dflashdist.data.shards import AUDIT_JSON, AUDIT_TEXT, TokenStore
from dflashdist.data.tokenizer import TargetTokenizer

FREQUENT = 20  # supervised tokens listed
ROWS_SHOWN = 12
# Characters of one run of supervised or unsupervised text in audit.md; the middle is left out.
RUN_SHOWN = 1200
CUT_WARNED, LEFT_OUT_WARNED, UNSUPERVISED_WARNED = 0.1, 0.1, 0.5  # shares
OPEN, CLOSE = "\u27e6", "\u27e7"  # around supervised text
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass
class Tally:
    """Counts of what goes into one store. `frequency`: supervised tokens by id."""

    vocab_size: int
    conversations: np.ndarray = field(default_factory=lambda: np.zeros(len(KINDS), np.int64))
    answers: int = 0
    unsupervised_answers: int = 0
    training_rows: int = 0
    left_out: Rejections = field(default_factory=Rejections)
    remarks: Rejections = field(default_factory=Rejections)  # on kept conversations
    cut_rows: int = 0
    cut_tokens: int = 0
    chat_tokens: int = 0
    chat_supervised: int = 0

    def __post_init__(self) -> None:
        self.frequency = np.zeros(self.vocab_size, np.int64)

    def add(self, part: Part, chosen: np.ndarray, chosen_rows: np.ndarray) -> None:
        """Count the chosen conversations, bool [C], and their rows, bool [R], of a loaded part."""
        conversations, rows = part.conversations[chosen], part.rows[chosen_rows]
        self.conversations += np.bincount(conversations["kind"], minlength=len(KINDS))
        self.answers += int(conversations["answers"].sum())
        self.unsupervised_answers += int(conversations["unsupervised"].sum())
        self.training_rows += len(rows)
        for found, entries in ((self.left_out, part.left_out), (self.remarks, part.remarks)):
            for conversation, reason, origin in entries:
                if chosen[conversation]:
                    found.add(reason, origin)
        self.cut_rows += int(np.count_nonzero(rows["lost"]))
        self.cut_tokens += int(rows["lost"].sum())
        chat = rows[np.repeat(conversations["kind"], conversations["rows"]) == KINDS.index("chat")]
        self.chat_tokens += int(chat["length"].sum())
        self.chat_supervised += int(chat["supervised"].sum())

    def count_tokens(self, ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Count supervised tokens of ids int32 [T] by loss_mask uint8 [T]."""
        self.frequency += np.bincount(ids[loss_mask == 1], minlength=self.vocab_size)

    def audit(self, chat: ChatTokenizer) -> dict[str, Any]:
        """The counts as plain values."""
        order = np.argsort(-self.frequency, kind="stable")[:FREQUENT]
        return {
            "conversations": dict(zip(KINDS, map(int, self.conversations), strict=True)),
            "answers": self.answers,
            "unsupervised_answers": self.unsupervised_answers,
            "training_rows_made": self.training_rows + self.left_out.total,
            "training_rows": self.training_rows,
            "left_out": self.left_out.counts,
            "left_out_examples": self.left_out.examples,
            "remarks": self.remarks.counts,
            "remarks_examples": self.remarks.examples,
            "cut_rows": self.cut_rows,
            "cut_tokens": self.cut_tokens,
            "frequent_tokens": [
                [int(i), chat.decode([int(i)]), int(self.frequency[i])]
                for i in order
                if self.frequency[i]
            ],
        }

    def warnings(self) -> list[str]:
        """What is absurd about the counts."""
        found = []
        share = self.chat_supervised / max(1, self.chat_tokens)
        if self.chat_tokens and not 0.005 <= share <= 0.995:
            found.append(
                f"{share:.1%} of the conversations' tokens are supervised: see in audit.md whether "
                "these are the answers"
            )
        if self.cut_rows > CUT_WARNED * self.training_rows:
            found.append(
                f"{self.cut_rows:,} of {self.training_rows:,} rows are cut: raise data.max_length"
            )
        made = self.training_rows + self.left_out.total
        if self.left_out.total > LEFT_OUT_WARNED * made:
            found.append(
                f"{self.left_out.total:,} of {made:,} training rows are left out "
                f"({', '.join(self.left_out.counts)})"
            )
        if NULLS in self.remarks.counts:
            found.append(
                f"{self.remarks.counts[NULLS]:,} conversations: {NULLS}, as columns of a table "
                "cannot tell a null from an absent value; give these as JSON text, or rows as JSONL"
            )
        if self.unsupervised_answers > UNSUPERVISED_WARNED * self.answers:
            found.append(
                f"{self.unsupervised_answers:,} of {self.answers:,} answers are not supervised "
                "(data.turns, weight 0, rows cut or left out, or a template without tags for them)"
            )
        return found


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
    counts = {name: f"{value:,}" for name, value in summary.items() if isinstance(value, int)}
    share = summary["supervised_tokens"] / summary["tokens"]
    kept = ", ".join(f"{n:,} {kind}" for kind, n in summary["conversations"].items() if n)
    if summary["to_validation"]:
        kept = f"to train on: {kept}; for validation: {counts['to_validation']}"
    repeated = "dropped" if summary["deduplicated"] else "kept; data.deduplicate=true drops them"
    lines = [
        ("store", summary["store"] + ("  (was there already)" if summary.get("reused") else "")),
        ("fingerprint", summary["fingerprint"]),
        ("source rows read", counts["source_rows"]),
        ("  kept", f"{counts['kept']}  ({kept})"),
        ("  rejected", f"{sum(summary['rejected'].values()):,}"),
        *_reasons(summary["rejected"], summary["examples"]),
        ("duplicates", f"{counts['duplicates']}  ({repeated})"),
        ("training rows", counts["training_rows"]),
        *_of_rows(summary),
        ("answers", f"{counts['answers']}  ({counts['unsupervised_answers']} not supervised)"),
        *_reasons(summary["remarks"], summary["remarks_examples"]),
        ("tokens", counts["tokens"]),
        ("supervised tokens", f"{counts['supervised_tokens']}  ({share:.1%})"),
        ("length p10/50/90/99/max", " / ".join(map(str, summary["length_p10_p50_p90_p99_max"]))),
        ("frequent when supervised", _frequent(summary)),
    ]
    if summary.get("validation"):
        inside = summary["validation"]
        rows = f"{inside['training_rows']:,} rows, {inside['tokens']:,} tokens"
        lines += [
            ("validation store", rows),
            ("  rejected", f"{sum(inside['rejected'].values()):,}"),
            *_reasons(inside["rejected"], inside["examples"]),
            *_of_rows(inside),
            *_reasons(inside["remarks"], inside["remarks_examples"]),
        ]
    if "checked_rows" in summary:
        checked = f"{counts['checked_rows']} rows, {counts['checked_tokens']} tokens"
        lines.append(("checked by decoding", checked))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _of_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a store that were left out or cut."""
    cut = f"{summary['cut_rows']:,}  ({summary['cut_tokens']:,} tokens lost)"
    return [
        ("  left out", f"{sum(summary['left_out'].values()):,}"),
        *_reasons(summary["left_out"], summary["left_out_examples"]),
        (f"  cut at {summary['max_length']:,}", cut),
    ]


def _reasons(counts: dict[str, int], examples: dict[str, list[str]]) -> list[tuple[str, str]]:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [(f"    {reason}", f"{n:,}  ({', '.join(examples[reason])})") for reason, n in ordered]


def _frequent(summary: dict[str, Any]) -> str:
    total = summary["supervised_tokens"]
    shown = summary["frequent_tokens"][:8]
    return ", ".join(f"{_visible(repr(text))} {n / total:.1%}" for _, text, n in shown)


def inspect_row(store: TokenStore, target: TargetTokenizer, n: int, color: bool) -> str:
    """Row `n` as text, what is supervised in green, or between marks without colour.

    Raises InputError when there is no such row, or the store was made with another tokenizer.
    """
    if not 0 <= n < store.num_rows:
        raise InputError(f"{store.path}: no row {n}; it has rows 0 to {store.num_rows - 1}")
    if target.fingerprint != store.meta["tokenizer_fingerprint"]:
        raise InputError(f"{store.path}: made with another tokenizer than {target.name} has")
    start, end = (GREEN, PLAIN) if color else (OPEN, CLOSE)
    head = f"row {n} of {store.num_rows}: {store.lengths[n]} tokens, {store.supervised[n]} of them"
    return f"{head} supervised\n{_marked(store, target.tokenizer, n, start, end)}"


def write_audit(store: TokenStore, chat: ChatTokenizer) -> None:
    """Write audit.json and audit.md into a store's folder; they do not name the place."""
    summary = {name: value for name, value in summarise(store).items() if name != "store"}
    text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    (store.path / AUDIT_JSON).write_text(text, encoding="utf-8", errors="backslashreplace")
    shown = np.random.default_rng(0).permutation(store.num_rows)[:ROWS_SHOWN]
    table = format_summary({"store": "this folder"} | summary)
    pieces = ["# Audit", _fenced(table)]
    pieces += [f"**Warning:** {warning}" for warning in summary["warnings"]]
    pieces += [f"Supervised text stands between {OPEN} and {CLOSE}."]
    for n in sorted(map(int, shown)):
        pieces.append(f"## Row {n}")
        pieces.append(f"{store.lengths[n]} tokens, {store.supervised[n]} of them supervised.")
        pieces.append(_fenced(_marked(store, chat.tokenizer, n, OPEN, CLOSE, RUN_SHOWN)))
    text = "\n\n".join(pieces) + "\n"
    (store.path / AUDIT_TEXT).write_text(text, encoding="utf-8", errors="backslashreplace")


def _marked(
    store: TokenStore, tokenizer: Tokenizer, n: int, start: str, end: str,
    longest: int | None = None,
) -> str:  # fmt: skip
    """Row n's text, runs of supervised tokens between `start` and `end`."""
    ids, mask = store.row(n)
    pieces = []
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
        text = _visible(tokenizer.decode(ids[run].tolist(), skip_special_tokens=False))
        if longest and len(text) > longest:
            hidden = len(text) - longest
            text = f"{text[: longest // 2]} ... {hidden:,} characters ... {text[-longest // 2 :]}"
        pieces.append(f"{start}{text}{end}" if mask[run[0]] else text)
    return "".join(pieces)


def _visible(text: str) -> str:
    """Control characters as pictures: a row's text must not drive the reader's terminal."""
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    controls = {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}
    return text.translate(pictures | controls)


def _fenced(text: str) -> str:
    """A code block whose fence no run of backticks in the text can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
