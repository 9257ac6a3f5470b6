"""What a source row holds, in one form whatever its spelling: a conversation, plain text or tokens.

A row is read whole or refused with a reason out of a fixed set (messages.py), and whoever refuses
it later counts it in the same place, so that rows read = rows kept + rows rejected, always.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from dflashdist.config import AUTO
from dflashdist.data import spellings
from dflashdist.data.messages import (
    EMPTY_ANSWER,
    NO_MESSAGES,
    NO_QUESTION,
    NO_SUPERVISED,
    NOT_AN_OBJECT,
    NOT_JSON,
    NOT_PLAIN,
    NOT_UNICODE,
    NOT_UTF8,
    JsonObject,
    Message,
    RowError,
    from_json_text,
)

__all__ = [
    "Conversation", "Message", "PlainText", "Rejections", "Row", "RowError", "TokenRow",
    "parse_prompt", "parse_row",
]  # fmt: skip

# What is remarkable about rows that are kept, for the audit.
GREETING = "answer before any question: not learnt"
CUT_OFF = "answer cut off: no end learnt, the rest left out"
NULLS = "nulls in tool arguments or schemas left out"
# Where columns cannot tell a null from an absent value.
OBJECTS = ("arguments", "parameters")

NO_FIELDS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Conversation:
    """Canonical messages (messages.py), the tools offered, and where they come from.

    `key` and `opening` are 16 bytes. The opening is what a validation split goes by: all that
    stands before the first answer to somebody, so that two answers to one question never part.
    """

    origin: str  # file:line or file[index]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def key(self) -> bytes:
        """Equal for equal conversations, wherever they come from."""
        return _digest("conversation", _alike(self.messages), self.tools)

    @cached_property
    def opening(self) -> bytes:
        """Of the messages before the first answer that follows a question, and the tools.

        A conversation without any has nothing to share with another: its own key.
        """
        roles = [message["role"] for message in self.messages]
        for i, role in enumerate(roles):
            if role == "assistant" and "user" in roles[:i]:
                return _digest("opening", _alike(self.messages[:i]), self.tools)
        return self.key


@dataclass(frozen=True)
class PlainText:
    """Text that is supervised throughout. `key` and `opening`: as of a conversation, both equal."""

    origin: str
    text: str

    @cached_property
    def key(self) -> bytes:
        """Equal for equal texts."""
        return _digest("text", self.text)

    @property
    def opening(self) -> bytes:
        """The key."""
        return self.key


@dataclass(frozen=True)
class TokenRow:
    """Token ids and their loss mask (0 or 1), of equal length, made elsewhere.

    `key` and `opening`: as of a conversation, the opening being the ids before the first
    supervised one. A single id, a BOS say, is nothing to share: the key.
    """

    origin: str
    ids: list[int]
    loss_mask: list[int]

    @cached_property
    def key(self) -> bytes:
        """Equal for equal ids and masks."""
        return _digest("tokens", self.ids, self.loss_mask)

    @cached_property
    def opening(self) -> bytes:
        """Equal for rows that answer the same prompt, whatever they answer."""
        prompt = self.loss_mask.index(1) if 1 in self.loss_mask else 0
        return _digest("prompt", self.ids[:prompt]) if prompt > 1 else self.key


Row = Conversation | PlainText | TokenRow


@dataclass
class Rejections:
    """Rejected rows by reason, with the origins of the first few of each."""

    shown: int = 3
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, error: str | RowError, origin: str) -> None:
        """Count one row; of the first one for a reason its detail is kept, too."""
        reason, detail = str(error), getattr(error, "detail", "")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        first = self.examples.setdefault(reason, [])
        if len(first) < self.shown:
            first.append(f"{origin} [{detail}]" if detail and not first else origin)

    def merge(self, other: "Rejections") -> None:
        """Count what `other` counted, its rows coming after the ones counted so far."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            first = self.examples.setdefault(reason, [])
            first += other.examples[reason][: self.shown - len(first)]

    @property
    def total(self) -> int:
        """Rows rejected so far."""
        return sum(self.counts.values())


def parse_row(
    origin: str,
    payload: bytes | str | dict[str, Any],
    format: str = AUTO,
    fields: Mapping[str, str] = NO_FIELDS,
) -> Row:
    """A source row to train on, from its JSON or its columns.

    Args:
        origin: where it stands, for messages and examples.
        payload: JSON in UTF-8, or a mapping of columns whose values may come from numpy or Arrow.
        format: auto, or one of data.format's spellings, in which the row must then be.
        fields: our names (config.FIELDS) to the row's own.

    What follows the last answer of a conversation is left out, and what follows one that was cut
    off. An answer before any question, a greeting, is not to be learnt: nobody asks a server for
    it. Raises RowError with the reason.
    """
    columns = _columns(payload)
    content = spellings.read_row(columns, format, fields)
    row: Row
    if isinstance(content, spellings.Dialogue):
        if all(message["role"] != "assistant" for message in content.messages):
            raise spellings.no_answer(columns, fields)
        messages, remarks = _answered(content.messages)
        remarks += (NULLS,) if isinstance(payload, dict) and _drops_null(payload) else ()
        row = Conversation(origin, messages, content.tools, remarks)
    elif isinstance(content, spellings.Tokens):
        row = TokenRow(origin, content.ids, content.loss_mask)
    else:
        row = PlainText(origin, content)
    _ = row.key  # refuses what has no canonical form
    return row


def parse_prompt(
    origin: str,
    payload: bytes | str | dict[str, Any],
    format: str = AUTO,
    fields: Mapping[str, str] = NO_FIELDS,
) -> Conversation:
    """A source row to be answered: all its messages, whether or not there are answers among them.

    Arguments and RowError as of `parse_row`; a row of text or tokens has no messages.
    """
    content = spellings.read_row(_columns(payload), format, fields)
    if not isinstance(content, spellings.Dialogue):
        raise RowError(NO_MESSAGES)
    prompt = Conversation(origin, content.messages, content.tools)
    _ = prompt.key
    return prompt


def _columns(payload: bytes | str | dict[str, Any]) -> dict[str, Any]:
    """The row as plain Python values."""
    if isinstance(payload, dict):
        return _plain(payload)
    try:
        # A byte order mark stands at the start of a file, or amid files put end to end.
        text = payload.decode("utf-8-sig") if isinstance(payload, bytes) else payload
    except UnicodeDecodeError as error:
        raise RowError(NOT_UTF8) from error
    row = from_json_text(text, NOT_JSON)
    if not isinstance(row, dict):
        raise RowError(NOT_AN_OBJECT)
    return row


def _plain(value: Any) -> Any:
    """Columns of Arrow or numpy as plain values: nulls, which fill up structs, are left out."""
    if isinstance(value, JsonObject):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, dict):
        items = ((str(key), _plain(item)) for key, item in value.items())
        return {key: item for key, item in items if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return None if value != value else value
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist())
    return value


def _drops_null(value: Any, inside: bool = False) -> bool:
    """Whether `_plain` leaves out a null of tool arguments or of a tool's schema."""
    if isinstance(value, dict) and not isinstance(value, JsonObject):
        if inside and any(item is None for item in value.values()):
            return True
        return any(_drops_null(item, inside or key in OBJECTS) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_drops_null(item, inside) for item in value)


def _answered(messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """The messages up to the last answer, or the first that was cut off, and remarks.

    Raises RowError unless all answers are usable and one of them is to be learnt.
    """
    roles = [message["role"] for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    for i in answers:
        if not messages[i]["content"].strip() and "tool_calls" not in messages[i]:
            raise RowError(EMPTY_ANSWER)
    cut = next((i for i in answers if messages[i].get("cut_off")), None)
    messages = messages[: (answers[-1] if cut is None else cut) + 1]
    asked = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    learnt = [i for i in answers if i < len(messages) and messages[i].get("supervised", True)]
    greetings = [i for i in learnt if i < asked]
    if not learnt:
        raise RowError(NO_SUPERVISED)
    if learnt == greetings:
        raise RowError(NO_QUESTION)
    messages = [m | {"supervised": False} if i in greetings else m for i, m in enumerate(messages)]
    remarks = (GREETING,) if greetings else ()
    return messages, remarks + ((CUT_OFF,) if cut in learnt else ())


def _alike(messages: list[Message]) -> list[Message]:
    """The messages without what sets two spellings of one conversation apart."""
    alike = [{k: v for k, v in message.items() if k != "written"} for message in messages]
    for message in alike:
        if "reasoning" in message:
            message["reasoning"] = message["reasoning"].strip()
    return alike


def _digest(*content: Any) -> bytes:
    """16 bytes of plain values. Raises RowError where they are not text, numbers and the like."""
    try:
        text = json.dumps(
            content, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
        return blake2b(text.encode(), digest_size=16).digest()
    except UnicodeEncodeError as error:
        raise RowError(NOT_UNICODE) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(NOT_PLAIN) from error
