"""The spellings of a row: which columns hold its conversation, text or tokens.

    messages   `messages`: a list of messages (messages.py), or its JSON text
    sharegpt   `conversations` or `conversation`, the same: from/value and role/content may mix
    pairs      a question in `prompt`, `instruction`, `question` or `input`, the answer in
               `completion`, `response`, `output` or `answer`; text, or lists of messages
    tokens     `input_ids` and `loss_mask`
    text       `text`, all of it to be learnt
    chosen     `chosen`, a list of messages: the conversation, or the answer to `prompt`

A row is read as the first of these that it has a column for, empty ones aside, unless the format
is given, which cannot be `chosen`. A row with `train: false`, `weight: 0` or the like (messages.py)
has nothing to be learnt; a row's `finish_reason` is that of its last answer. Beside messages or
pairs, `system` (or `system_prompt`) is a message before the others and `tools` (or OpenAI's older
`functions`) are the tools offered. Beside a pair, `input` or `context` follows the instruction
after a newline, `history`, a list of [question, answer], comes before both, and
`reasoning_content`, `reasoning` or `thinking` is the reasoning of the answer.
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
    FLAGS,
    NO_ANSWER,
    NO_MESSAGES,
    NO_PAIR,
    NO_SUPERVISED,
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
    is_cut_off,
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
# What others call a pair's columns, for hints.
LIKELY = {
    "prompt": ("query", "problem", "user", "human", "inputs", "task"),
    "answer": (
        "chosen",
        "target",
        "targets",
        "solution",
        "assistant",
        "gpt",
        "reply",
        "generation",
    ),
}
SHOWN_COLUMNS, SHOWN_LETTERS = 8, 40  # of a row's columns, in a hint


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
    try:
        content = _content(columns, columns.spelling() if format == AUTO else format)
    except RowError as error:
        if str(error) in (NO_MESSAGES, NO_PAIR, NO_TEXT, NO_TOKENS):
            error.detail = _hint(row, fields)
        raise
    if any(row.get(key) is False for key in FLAGS) or row.get("weight") == 0:
        if not isinstance(content, Dialogue):
            raise RowError(NO_SUPERVISED)
        for message in content.messages:
            message |= {"supervised": False} if message["role"] == "assistant" else {}
    if is_cut_off(row) and isinstance(content, Dialogue):
        last = [message for message in content.messages if message["role"] == "assistant"][-1:]
        for message in last:
            message["cut_off"] = True
    return content


def no_answer(row: dict[str, Any], fields: Mapping[str, str]) -> RowError:
    """What is wrong with a row whose messages hold no answer."""
    asked = _Columns(row, fields).spelling() == "pairs"
    return RowError(NO_ANSWER, _hint(row, fields) if asked else "")


def _hint(row: dict[str, Any], fields: Mapping[str, str]) -> str:
    """The columns of a row of no known shape, and what would make it one."""
    filled = [name for name, value in row.items() if value not in EMPTY]
    # A row's text must not drive the reader's terminal.
    plain = [name if name.isprintable() else ascii(name) for name in filled]
    said = dict(zip(filled, plain, strict=True))
    names = [f"{name[:SHOWN_LETTERS]}..." if name[SHOWN_LETTERS:] else name for name in plain]
    more = f" and {len(names) - SHOWN_COLUMNS} more" if names[SHOWN_COLUMNS:] else ""
    shown = f"its columns are {', '.join(names[:SHOWN_COLUMNS])}{more}" if names else "it is empty"
    columns = _Columns(row, fields)
    free = [name for name in filled if name not in fields.values()]
    lists = [name for name in free if isinstance(row[name], list) and _first(row[name])]
    talks = [name for name in lists if _first(row[name]).keys() & {"role", "from"}]
    if talks:
        return f"{shown}; data.fields.messages={said[talks[0]]} reads it"
    if lists:
        return f"{shown}; give the rows in {said[lists[0]]} a file of their own"
    texts = [name for name in free if isinstance(row[name], str)]
    there = {"prompt": columns.question() not in EMPTY, "answer": columns.answer() not in EMPTY}
    found = {
        ours: name
        for ours, others in LIKELY.items()
        if not there[ours] and (name := next((one for one in others if one in texts), None))
    }
    if all(there[ours] or ours in found for ours in there) and found:
        mapped = " ".join(f"data.fields.{ours}={name}" for ours, name in found.items())
        return f"{shown}; {mapped} reads it"
    return (
        f"{shown}; name them by data.fields.messages (a conversation), data.fields.prompt and "
        "data.fields.answer, or data.fields.text"
    )


def _first(value: list[Any]) -> dict[str, Any]:
    """The first element of a list if it is an object, else an empty one."""
    return value[0] if value and isinstance(value[0], dict) else {}


def _content(columns: "_Columns", format: str | None) -> Dialogue | Tokens | str:
    match format:
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
        case "chosen":
            return _dialogue(columns, _chosen(columns))
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
        chosen = self.get("chosen")
        if isinstance(chosen, list) and _first(chosen):
            return "chosen"
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


def _chosen(columns: _Columns) -> list[Message]:
    """The preferred one of two conversations, or of two answers to a prompt."""
    messages = read_messages(columns.get("chosen"))
    asked = columns.get("prompt", *PROMPTS)
    answers = messages[0]["role"] == "assistant" and asked not in EMPTY
    return _turn("user", asked) + messages if answers else messages


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
        known = last.get("reasoning", "")
        reasoning = one_reasoning([*beside, known])
        if reasoning and not known:
            last["reasoning"] = reasoning
            last.pop("written", None)  # which has no reasoning
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
