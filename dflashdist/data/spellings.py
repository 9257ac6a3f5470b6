"""The spellings of a row: which columns hold its conversation, text or tokens.

    messages   `messages`: a list of messages (messages.py), or its JSON text
    sharegpt   `conversations` or `conversation`, the same: from/value and role/content may mix
    pairs      a question in `prompt`, `instruction`, `question` or `input`, the answer in
               `completion`, `response`, `output` or `answer`; text, or lists of messages
    tokens     `input_ids` and `loss_mask`
    text       `text`, all of it to be learnt

A row is read as the first of these that it has a column for, empty ones aside, unless the format
is given. Beside messages or pairs, `system` (or `system_prompt`) is a message before the others
and `tools` (or OpenAI's older `functions`) are the tools offered. Beside a pair, `input` or
`context` follows the instruction after a newline, `history`, a list of [question, answer], comes
before both, and `reasoning_content`, `reasoning` or `thinking` is the reasoning of the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflashdist.config import AUTO
from dflashdist.data.messages import (
    BAD_HISTORY,
    BAD_IDS,
    BAD_MASK,
    EMPTY_TEXT,
    NO_MESSAGES,
    NO_PAIR,
    NO_TEXT,
    NO_TOKENS,
    REASONING_KEYS,
    TWO_INPUTS,
    TWO_SYSTEMS,
    UNEQUAL,
    Message,
    RowError,
    Unreadable,
    from_json_text,
    not_text,
    one_reasoning,
    read_content,
    read_message,
    read_messages,
    read_tools,
    refuse_media,
)

CONVERSATIONS = ("conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
EMPTY = (None, "", [])


@dataclass(frozen=True)
class Dialogue:
    """Canonical messages, perhaps without an answer, and the tools offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Tokens:
    """Token ids and their loss mask (0 or 1), of equal length."""

    ids: list[int]
    loss_mask: list[int]


def read_row(
    row: dict[str, Any], format: str, fields: Mapping[str, str]
) -> Dialogue | Tokens | str:
    """The content of a row of plain values; a str is plain text. Raises RowError.

    Args:
        row: values by column.
        format: auto, messages, sharegpt, pairs, text or tokens.
        fields: our names (config.FIELDS) to the row's own.
    """
    columns = _Columns(row, fields)
    match columns.spelling() if format == AUTO else format:
        case "messages":
            return _dialogue(columns, read_messages(columns.get("messages", "messages")))
        case "sharegpt":
            return _dialogue(columns, read_messages(columns.get("messages", *CONVERSATIONS)))
        case "pairs":
            return _dialogue(columns, _pair(columns))
        case "tokens":
            return _tokens(columns.get("input_ids"), columns.get("loss_mask"))
        case "text":
            return _text(columns.get("text"))
    raise RowError(NO_MESSAGES)


@dataclass(frozen=True)
class _Columns:
    """A row's values under our names."""

    row: dict[str, Any]
    fields: Mapping[str, str]

    def get(self, name: str, *spelled: str) -> Any:
        """The first value that is not empty, of the column that `fields` names or of the usual
        ones; failing that an empty one, or None. A column that is mapped has no other meaning.
        Raises RowError for a value that could not be decoded.
        """
        if name in self.fields:
            columns = [self.fields[name]]
        else:
            taken = self.fields.values()
            columns = [column for column in spelled or (name,) if column not in taken]
        there = [self.row[column] for column in columns if self.row.get(column) is not None]
        value = next((value for value in there if value not in EMPTY), there[0] if there else None)
        if isinstance(value, Unreadable):
            raise RowError(value.reason)
        return value

    def question(self) -> Any:
        """A pair's question; an `input` alone is one."""
        question = self.get("prompt", *PROMPTS)
        return self.get("input") if question in EMPTY else question

    def answer(self) -> Any:
        """A pair's answer."""
        return self.get("answer", *ANSWERS)

    def spelling(self) -> str | None:
        """The format of this row."""
        if self.get("messages", "messages") not in EMPTY:
            return "messages"
        if self.get("messages", *CONVERSATIONS) not in EMPTY:
            return "sharegpt"
        asked = self.question() not in EMPTY
        if asked and self.answer() is not None:
            return "pairs"
        if self.get("input_ids") is not None and self.get("loss_mask") is not None:
            return "tokens"
        if self.get("text") is not None:
            return "text"
        return "pairs" if asked else None


def _dialogue(columns: _Columns, messages: list[Message]) -> Dialogue:
    """The messages with the row's own system message and tools."""
    refuse_media(columns.row)
    system = columns.get("system", *SYSTEMS)
    system = "" if system is None else read_content(system)
    if system.strip():
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        elif messages[0]["content"] != system:
            raise RowError(TWO_SYSTEMS)
    return Dialogue(messages, read_tools(columns.get("tools", *TOOLS)))


def _pair(columns: _Columns) -> list[Message]:
    question, more = columns.get("prompt", *PROMPTS), columns.get("input")
    context = columns.get("context")
    if question in EMPTY:
        question, more = more, None
    if context not in EMPTY:  # Dolly's name for `input`
        if columns.get("input") not in EMPTY:
            raise RowError(TWO_INPUTS)
        more = context
    if question in EMPTY:
        raise RowError(NO_PAIR)
    if more not in EMPTY:
        for value in (question, more):
            if not isinstance(value, str):
                raise not_text(value)
        question = f"{question}\n{more}"
    answer = columns.answer()
    turns = [*_history(columns.row.get("history")), ("user", question)]
    messages = [message for role, value in turns for message in _turn(role, value)]
    return messages if answer is None else messages + _answer(columns, answer)


def _answer(columns: _Columns, answer: Any) -> list[Message]:
    """A pair's answer; the reasoning beside it is that of its last turn."""
    messages = _turn("assistant", answer)
    beside = [value for key in REASONING_KEYS if (value := columns.get(key)) not in EMPTY]
    last = next((m for m in reversed(messages) if m["role"] == "assistant"), None)
    if beside and last is not None:
        reasoning = one_reasoning([*beside, last.get("reasoning", "")])
        last |= {"reasoning": reasoning} if reasoning else {}
    return messages


def _history(history: Any) -> list[tuple[str, Any]]:
    history = [] if history in EMPTY else from_json_text(history, BAD_HISTORY)
    if not isinstance(history, list) or not all(_is_pair(pair) for pair in history):
        raise RowError(BAD_HISTORY)
    return [turn for pair in history for turn in zip(("user", "assistant"), pair, strict=True)]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _turn(role: str, value: Any) -> list[Message]:
    if isinstance(value, list):
        return read_messages(value)
    return [read_message({"role": role, "content": value})]


def _text(text: Any) -> str:
    if text is None:
        raise RowError(NO_TEXT)
    if not isinstance(text, str):
        raise not_text(text)
    if not text.strip():
        raise RowError(EMPTY_TEXT)
    return text


def _tokens(ids: Any, mask: Any) -> Tokens:
    if ids is None or mask is None:
        raise RowError(NO_TOKENS)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise RowError(BAD_IDS)
    if not isinstance(mask, list) or not all(isinstance(m, int) and 0 <= m <= 1 for m in mask):
        raise RowError(BAD_MASK)
    if len(ids) != len(mask):
        raise RowError(UNEQUAL)
    if not ids:
        raise RowError(NO_TOKENS)
    return Tokens(ids, [int(bit) for bit in mask])
