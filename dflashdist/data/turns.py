"""The rows that a conversation trains on: at every answer exactly what a server's target would do.

The prompt of an answer is the conversation before it with the generation prompt after it, as a
server renders it. The answer is what the template writes after that very text when the answer is
a message, up to and including the end-of-turn token. A row is the prompt's ids and the answer's,
the latter supervised; it goes on with a later answer for as long as that one's prompt begins with
the whole row so far. A template that rewrites history (Qwen3's think blocks, gpt-oss's <|return|>)
does not keep that up, and the next answer starts another row. What cannot be had exactly is
refused with a reason:

- the template begins the answer otherwise than its generation prompt ends (one that drops the
  reasoning which its prompt has opened, say);
- content, reasoning or a tool call, its name and arguments, is not found in what it writes;
- no end-of-turn token follows, or one stands inside the answer (one that was cut off ends with what
  it says, and is a text that calls no tool);
- `{% generation %}` tags, where a template has them, that end elsewhere. They decide which turns
  are supervised and from where on.

Targets write arguments of tools as JSON, as Python (`search(text='a')`), or value by value in a
markup of their own, so it is not one text that is looked for but its parts, in order: every call's
name, then its keys and values, each as a word of its own and after the one before it. What no
target means is not taken for a part: Python's spelling of an object in a template that does not
write Python, and a text between double quotes that JSON would escape.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from dflashdist.data.messages import RowError
from dflashdist.data.template import ChatTemplate, Span
from dflashdist.data.tokenizer import PieceEncoder

HISTORY_DIFFERS = "template rewrites the conversation before an answer once it is there"
PROMPT_DIFFERS = "template begins an answer otherwise than its generation prompt ends"
REASONING_DROPPED = "template drops the reasoning that its generation prompt opens"
REASONING_LOST = "template leaves out the reasoning"
CUT_CALL = "tool call in an answer that was cut off"
CHANGES_ANSWER = "template changes the answer"
NO_END_OF_TURN = "no end-of-turn token after an answer"
END_INSIDE = "end-of-turn token inside an answer"
TAGS_DISAGREE = "generation tags do not end where the answer does"

OPENERS = ("<think>", "<|channel>thought", "[THINK]")


@dataclass(frozen=True)
class TrainingRow:
    """One row of the store."""

    ids: np.ndarray  # int32 [n]
    loss_mask: np.ndarray  # uint8 [n], 1 on the tokens that the target would write
    answers: tuple[str, ...]  # what each supervised run decodes to, in order; () if ids came as ids
    turns: tuple[int, ...] = ()  # the messages that they are, one or several a run, in order


@dataclass(frozen=True)
class Turns:
    """The training rows of a conversation, without the answers not asked for, or not tagged."""

    rows: list[TrainingRow]  # at least one
    answers: int  # assistant turns of the conversation; 0 for plain text and token rows
    reframed: bool = False  # the template writes an answer's <think> block otherwise than it came


@dataclass(frozen=True)
class AnswerText:
    """One supervised answer as text."""

    prompt: str  # all that the target has read when it begins
    text: str  # all that it writes
    end: str  # the end-of-turn token that `text` ends with; "" if the answer was cut off
    turn: int = 0  # the number of its message


class AnswerFinder:
    """Finds answers in what a template writes."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str]) -> None:
        """`ends`: the end-of-turn tokens as text."""
        self._template = template
        self._ends = sorted(ends, key=len, reverse=True)
        self._next_turn = {
            case: self._end_by_next_turn(*case) for case in product((False, True), repeat=2)
        }

    def find(
        self, inputs: Sequence[dict[str, Any]], turn: int, tools: list[Any] | None,
        cut_off: bool = False,
    ) -> AnswerText | None:  # fmt: skip
        """The answer that message `turn` of a template's inputs is; None if it has no tags.

        Raises RowError.
        """
        message = inputs[turn]
        if cut_off and "tool_calls" in message:
            raise RowError(CUT_CALL)
        said = _said(message)
        if any(end in part for part in said for end in self._ends):
            raise RowError(END_INSIDE)
        prompt = self._template.render(inputs[:turn], tools, prompt=True)
        text, spans = self._template.render_tagged(inputs[: turn + 1], tools)
        if not text.startswith(prompt):
            before = self._template.render(inputs[:turn], tools)
            raise RowError(_why_not_begun(before, prompt, text))
        stop, end = self._end_of_turn(text, len(prompt))
        if not end:  # GLM ends a turn by the token that opens the next one
            end = self._next_turn["tool_calls" in message, bool(tools)]
            text, stop = text + end, len(text) + len(end)
        if not end:
            raise RowError(NO_END_OF_TURN)
        _hold_all_said(message, prompt, text[len(prompt) : stop])
        start = len(prompt)
        if spans is not None:
            own = [span for span in spans if span[1] > len(prompt) and span[0] < stop]
            if not own:
                return None
            start = max(start, _tagged_from(own, stop, end))
        if cut_off:
            said = message["content"]
            said = said if text.rfind(said, 0, stop - len(end)) >= 0 else said.strip()
            stop, end = text.rfind(said, 0, stop - len(end)) + len(said), ""
        return AnswerText(text[:start], text[start:stop], end, turn)

    def _end_of_turn(self, text: str, first: int) -> tuple[int, str]:
        """Where the answer that begins at `first` stops, and its end token; "" if it has none.

        Only white space and further end tokens may follow (Phi-3 writes EOS after <|end|>).
        """
        stop, found, at = 0, "", len(text)
        while True:
            at = first + len(text[first:at].rstrip())
            end = next((end for end in self._ends if text.endswith(end, first, at)), "")
            if not end:
                return stop, found
            stop, found, at = at, end, at - len(end)

    def _end_by_next_turn(self, calls: bool, offered: bool) -> str:
        """The end token that opens what comes after an answer, with tool calls or without; "" if
        none does."""
        function = {"name": "search", "arguments": {"text": "answer"}}
        tools = [{"type": "function", "function": {
            "name": "search", "description": "Searches.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        }}] if offered else None  # fmt: skip
        answer: dict[str, Any] = {"role": "assistant", "content": "answer"}
        follows: dict[str, Any] = {"role": "user", "content": "question"}
        if calls:
            answer["tool_calls"] = [{"type": "function", "id": "callcall1", "function": function}]
            follows = {
                "role": "tool", "content": "result", "name": "search", "tool_call_id": "callcall1",
            }  # fmt: skip
        inputs = self._template.inputs([{"role": "user", "content": "question"}, answer], tools)
        try:
            before = self._template.render(inputs, tools)
            after = self._template.render([*inputs, follows], tools)
        except RowError:
            return ""
        rest = after.removeprefix(before) if after.startswith(before) else ""
        return next((end for end in self._ends if rest.startswith(end)), "")


def assemble(
    answers: Sequence[AnswerText], encoder: PieceEncoder, end_ids: Sequence[int]
) -> list[TrainingRow]:
    """As few rows as hold the answers, in order. Raises RowError."""
    rows: list[_OpenRow] = []
    ends = frozenset(end_ids)
    for answer in answers:
        row = rows[-1] if rows else None
        if row is not None and row.surely_precedes(answer, encoder):
            # The prompt's ids are the row's and those of what lies between, the row's own end
            # token at its beginning.
            start = len(row.text) - len(row.end)
            between, ids, joined = encoder.continue_with(answer.prompt, answer.text, start)
            row.go_on(between[1:], joined)
        else:
            prompt, ids, joined = encoder.continue_with(answer.prompt, answer.text)
            if row is not None and prompt[: len(row.ids)] == row.ids:
                row.go_on(prompt[len(row.ids) :], joined)
            else:
                row = _OpenRow(prompt, joined)
                rows.append(row)
        if not ids or (answer.end and ids[-1] not in ends):
            raise RowError(NO_END_OF_TURN)
        if not ends.isdisjoint(ids[:-1] if answer.end else ids):
            raise RowError(END_INSIDE)
        row.write(answer, ids)
    return [row.finished() for row in rows]


class _OpenRow:
    """A row that may still grow."""

    def __init__(self, prompt: list[int], joined: bool) -> None:
        self.ids = prompt
        self.text = self.end = ""  # of the row so far, and of its last answer
        self._joined = joined  # the ids are those of the text in one
        self._runs: list[Span] = []
        self._answers: list[str] = []
        self._turns: list[int] = []

    def surely_precedes(self, answer: AnswerText, encoder: PieceEncoder) -> bool:
        """Whether the text alone shows that the answer's prompt begins with the row's ids."""
        return self._joined and self.end in encoder.cuts and answer.prompt.startswith(self.text)

    def go_on(self, between: list[int], joined: bool) -> None:
        self.ids = self.ids + between
        self._joined &= joined

    def write(self, answer: AnswerText, ids: list[int]) -> None:
        start, text = len(self.ids), answer.text
        self.ids = self.ids + ids
        self.text, self.end = answer.prompt + text, answer.end
        self._turns.append(answer.turn)
        if self._runs and self._runs[-1][1] == start:  # nothing stands between the two
            start, text = self._runs.pop()[0], self._answers.pop() + text
        self._runs.append((start, len(self.ids)))
        self._answers.append(text)

    def finished(self) -> TrainingRow:
        mask = np.zeros(len(self.ids), dtype=np.uint8)
        for start, stop in self._runs:
            mask[start:stop] = 1
        ids = np.array(self.ids, dtype=np.int32)
        return TrainingRow(ids, mask, tuple(self._answers), tuple(self._turns))


def _said(message: dict[str, Any]) -> list[str]:
    """The texts of an answer's message, tool arguments as JSON."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message["content"], message.get("reasoning_content", "")]
    texts += [call["name"] for call in calls]
    return texts + [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]


def _hold_all_said(message: dict[str, Any], prompt: str, written: str) -> None:
    """Refuse an answer whose parts are not all in the text, the reasoning before the content."""
    reasoning = message.get("reasoning_content", "").strip()
    at = written.find(reasoning)
    if at < 0:
        raise RowError(REASONING_LOST)
    content = message["content"].strip()
    if prompt.rstrip().endswith(OPENERS[0]):  # the prompt holds the beginning of inline reasoning
        content = content.removeprefix(OPENERS[0]).strip()
    rest = written[at + len(reasoning) :]
    unended = content.startswith(OPENERS[0]) and "</think>" not in content
    if unended and not written.lstrip().startswith(content):  # but follows the template's own block
        raise RowError(CHANGES_ANSWER)
    if content not in rest:
        # Reasoning that was put inline for a template without a field for it may be cut off.
        visible = content.rpartition("</think>")[2].strip()
        raise RowError(REASONING_LOST if visible in written else CHANGES_ANSWER)
    # What the content says of a tool is no call. It stands before the calls or after them.
    others = [
        f"{written[:at]}\n{rest[:first]}\n{rest[first + len(content) :]}"
        for first in (rest.find(content), rest.rfind(content))
    ]
    calls = message.get("tool_calls", ())
    if not any(writes_calls(calls, other) for other in others):
        raise RowError(CHANGES_ANSWER)


def _why_not_begun(before: str, prompt: str, text: str) -> str:
    """The reason for an answer whose `text` does not begin with its prompt.

    `before` is the prompt without the generation prompt.
    """
    opened = prompt.rstrip()
    for opener in OPENERS:
        if opened.endswith(opener) and text.startswith(opened.removesuffix(opener)):
            return REASONING_DROPPED
    # What ends a conversation (Phi-3's EOS) does not end one that goes on.
    shown = before if prompt.startswith(before) else prompt
    return PROMPT_DIFFERS if text.startswith(shown) else HISTORY_DIFFERS


def _tagged_from(own: Sequence[Span], stop: int, end: str) -> int:
    """Where the tagged text of a turn begins, which must reach its end token without a gap.

    What a tag holds after the end token is white space and further end tokens, and is left out.
    """
    start, last = own[0]
    for first, last_of_next in own[1:]:
        if first != last:
            raise RowError(TAGS_DISAGREE)
        last = last_of_next
    if last < stop and last != stop - len(end):
        raise RowError(TAGS_DISAGREE)
    return start


CONSTANTS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}
PYTHON_ONLY = ("True", "False", "None")


def writes_calls(calls: Sequence[dict[str, Any]], text: str) -> bool:
    """Whether canonical `tool_calls` (messages.py) stand in `text`, one after the other."""
    at = 0
    for call in calls:
        at = _after_call(call["function"]["name"], call["function"]["arguments"], text, at)
        if at < 0:
            return False
    return True


def _after_call(name: str, arguments: dict[str, Any], text: str, at: int) -> int:
    """Where a call that is looked for from `at` on ends; -1 if it is not there."""
    at = _after(text, at, [name], lambda start, stop: True)
    if at < 0 or not arguments:
        return at
    python = text.startswith("(", at) and text.startswith(f"{next(iter(arguments))}=", at + 1)
    # Keys come as they were given, or sorted as Jinja's dictsort does it.
    orders = (list, lambda keys: sorted(keys, key=str.lower))
    ends = [_after_parts(_parts(arguments, order), text, at, python) for order in orders]
    return min((end for end in ends if end >= 0), default=-1)


def _after_parts(parts: Iterator[tuple[Any, bool]], text: str, at: int, python: bool) -> int:
    for value, is_key in parts:

        def is_meant(start: int, stop: int, value: Any = value, is_key: bool = is_key) -> bool:
            return python or not _is_mistaken(value, is_key, text, start, stop)

        at = _after(text, at, _spellings(value, python), is_meant)
        if at < 0:
            break
    return at


def _is_mistaken(value: Any, is_key: bool, text: str, start: int, stop: int) -> bool:
    """Whether text[start:stop] is Python's spelling, or JSON that forgot to escape."""
    before, after = text[max(0, start - 3) : start], text[stop : stop + 2]
    if not isinstance(value, str):
        return text[start:stop] in PYTHON_ONLY and before.rstrip().endswith('":')
    if before.endswith("'") and after.startswith("'"):
        return not is_key or after == "':"
    return before.endswith('"') and text[start:stop] == value != _escaped(value)


def _parts(value: Any, order: Callable[[dict[str, Any]], list[str]]) -> Iterator[tuple[Any, bool]]:
    """Keys and values without parts, in order, and which of them are keys."""
    if value and isinstance(value, dict):
        for key in order(value):
            yield key, True
            yield from _parts(value[key], order)
    elif value and isinstance(value, list):
        for inner in value:
            yield from _parts(inner, order)
    else:
        yield value, False


def _spellings(value: Any, python: bool) -> list[str]:
    """How a key or a value without parts may be written; quotes belong to the markup."""
    if value is None or isinstance(value, bool):
        return list(CONSTANTS[value])
    if not isinstance(value, str):
        return [json.dumps(value)]
    found = [value, _escaped(value), _escaped(value, True), _escaped(_escaped(value))]
    return list(dict.fromkeys([*found, repr(value)[1:-1]] if python else found))


def _escaped(text: str, ascii_only: bool = False) -> str:
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def _after(
    text: str, at: int, spellings: Sequence[str], is_meant: Callable[[int, int], bool]
) -> int:
    """Where the first of the spellings that stands as a word of its own ends; -1 if none does."""
    ends = []
    for spelling in spellings:
        start = text.find(spelling, at)
        while start >= 0:
            stop = start + len(spelling)
            if _apart(text, start, stop) and is_meant(start, stop):
                ends.append(stop)
                break
            start = text.find(spelling, start + 1)
    return min(ends, default=-1)


def _apart(text: str, start: int, stop: int) -> bool:
    """Whether no word goes on across either edge of text[start:stop]."""
    return not any(
        0 < edge < len(text) and start < stop and _in_word(text[edge - 1]) and _in_word(text[edge])
        for edge in (start, stop)
    )


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"
