"""One message of a row, in whatever spelling, to its canonical form; the reasons rows are refused.

Canonical: `role` (system, user, assistant or tool) and `content`, always text. An answer may also
have `reasoning` (never blank), `written` (its whole text as it came, where a `<think>` block was
taken out of it), `tool_calls` (arguments as objects), `supervised: False` and `cut_off: True`; a
tool result `name` and `tool_call_id`. A key that has nothing to say is absent, never None, and
null means absent wherever the structure of a message is concerned. Other keys are left out.

Nothing else is repaired, but these things are made uniform:
- Text blocks are joined by a newline. A tool's result that is not text becomes JSON text.
- Reasoning comes from `reasoning_content`, `reasoning`, `thinking`, or a `<think>` block at the
  start of an answer. There `<think>` itself may be missing, which some generation prompts write,
  if `</think>` stands alone on its line or comes first; elsewhere an answer may speak of it.
  Reasoning loses the line breaks at its edges, and a blank one is none. After a block the answer
  loses its leading newlines. Templates without a field for reasoning get the text as it came.
- Tool arguments may be an object or JSON text; nothing at all, or blank text, means no arguments.
- Tools have `type` and `function` first, and in it name, description and parameters, whatever
  order they came in: as servers write them, who read them into a structure of their own.
- `supervised: False` is what `weight: 0` (OpenAI), `train`, `training`, `trainable`, `loss` or
  `loss_mask` of false or 0, `masked: true` (torchtune) and an empty `train_detail` (axolotl) say.
  Other turns than answers are never learnt, whatever they say.
- `cut_off: True` is what a `finish_reason` (or `stop_reason`) of length, max_tokens, ... says.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NOT_UNICODE = "half a surrogate pair in the text"
NOT_PLAIN = "values that JSON cannot hold"
NO_MESSAGES = "no messages"
NO_PAIR = "no prompt and answer"
NO_TEXT = "no text"
NO_TOKENS = "no input_ids and loss_mask"
BAD_MESSAGE = "message is not an object"
UNKNOWN_ROLE = "unknown role"
NO_ANSWER = "no assistant turn"
NO_QUESTION = "no question before an answer"
NO_SUPERVISED = "every answer is marked as not to be learnt: weight 0, train false"
EMPTY_ANSWER = "empty answer"
EMPTY_TEXT = "empty text"
NOT_TEXT = "content is not text"
TYPED = "content is a number or a date, not text (perhaps a guess of the reader of its file)"
MEDIA = "image, audio or video content"
TWO_REASONINGS = "two different reasonings in one answer"
TWO_INPUTS = "both input and context are filled"
TWO_SYSTEMS = "two different system messages"
BAD_FLAG = "weight, train, loss_mask or the like is neither 0 nor 1"
TWO_FLAGS = "weight, train, loss_mask or the like say different things of one answer"
IN_PART = "train_detail: an answer that is learnt in part"
PREFIX = "an answer that is given in part (prefix)"
BAD_HISTORY = "history is not a list of pairs"
BAD_TOOL_CALL = "tool call malformed"
BAD_TOOLS = "tools malformed"
BAD_IDS = "input_ids are not token ids"
BAD_MASK = "loss_mask is not 0 and 1"
UNEQUAL = "input_ids and loss_mask of different length"

Message = dict[str, Any]


class RowError(ValueError):
    """A row that cannot be used. The message is the reason it is counted under, one of few;
    `detail` says more of this one row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


class JsonObject(dict[str, Any]):
    """An object that stood as JSON text in a column: null is a value in it, not a missing field."""


@dataclass(frozen=True)
class Unreadable:
    """A column's value that could not be decoded, and why: a reason for the rows that need it."""

    reason: str


ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "function_response", "tool_response"), "tool"
    ),
}
CALLS = ("function_call", "tool_call")  # an assistant's turn whose text is the call
TEXT_BLOCKS = ("text", "input_text", "output_text")
MEDIA_WORDS = ("image", "audio", "video")
MEDIA_KEYS = frozenset(("image", "images", "audio", "audios", "video", "videos"))
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # of what is learnt
FINISHES = ("finish_reason", "stop_reason")
CUT_OFF = frozenset((
    "length", "max_tokens", "max_output_tokens", "model_length", "incomplete", "content_filter",
    "safety", "error", "abort", "aborted", "cancelled", "timeout",
))  # fmt: skip
THINK, END_THINK = "<think>", "</think>"
# The end of reasoning whose beginning the generation prompt wrote.
LONE_END = re.compile(r"\A\s*</think>|^[ \t]*</think>[ \t]*\r?$", re.MULTILINE)
TOOL_KEYS = ("name", "description", "parameters")


def read_messages(value: Any) -> list[Message]:
    """Canonical messages of a list of them, or of its JSON text. Raises RowError."""
    value = from_json_text(value, NO_MESSAGES)
    if not isinstance(value, list) or not value:
        raise RowError(NO_MESSAGES)
    return [read_message(message) for message in value]


def read_message(message: Any) -> Message:
    """One canonical message of an object, or of its JSON text. Raises RowError."""
    message = from_json_text(message, BAD_MESSAGE)
    if not isinstance(message, dict):
        raise RowError(BAD_MESSAGE)
    spelled, content = (
        message.get(key) if message.get(key) is not None else message.get(other)
        for key, other in (("role", "from"), ("content", "value"))
    )
    spelled = spelled.strip().lower() if isinstance(spelled, str) else ""
    refuse_media(message)
    if spelled in CALLS:
        calls = from_json_text(content, BAD_TOOL_CALL)
        calls = calls if isinstance(calls, list) else [calls]
        return _answer(message | {"tool_calls": calls}, "")
    role = ROLES.get(spelled)
    if role is None:
        raise RowError(UNKNOWN_ROLE)
    if role == "assistant":
        has_calls = message.get("tool_calls") or message.get("function_call")
        return _answer(message, "" if content is None and has_calls else read_content(content))
    if message.get("tool_calls") or message.get("function_call"):
        raise RowError(BAD_TOOL_CALL)
    if role == "tool":
        return _tool_result(message, content)
    return {"role": role, "content": read_content(content)}


def read_content(content: Any) -> str:
    """Text, or the text blocks of a list. Raises RowError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise not_text(content)
    return "\n".join(_block_text(block) for block in content)


def not_text(value: Any) -> RowError:
    """What is wrong with a value that should be text."""
    if isinstance(value, Unreadable):
        return RowError(value.reason)
    return RowError(NOT_TEXT if isinstance(value, bytes | dict | list | None) else TYPED)


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form, of a list of them or of bare functions, or of JSON text; or None.

    Raises RowError.
    """
    tools = from_json_text(tools, BAD_TOOLS) if tools else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError(BAD_TOOLS)
    return [_tool(from_json_text(tool, BAD_TOOLS)) for tool in tools]


def refuse_media(row: dict[str, Any]) -> None:
    """Raises RowError for a row or message with an image, audio or video column that is filled."""
    if any(row[key] for key in MEDIA_KEYS & row.keys()):
        raise RowError(MEDIA)


def from_json_text(value: Any, reason: str) -> Any:
    """A value, decoded if it is JSON text; NaN is what data frames write for null.

    Raises RowError with the reason for text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=lambda name: None if name == "NaN" else float(name))
    except (ValueError, RecursionError) as error:
        raise RowError(reason) from error


def is_cut_off(row: dict[str, Any]) -> bool:
    """Whether an answer ended before its end, by a server's word beside it."""
    said = [row[key].strip().lower() for key in FINISHES if isinstance(row.get(key), str)]
    return not CUT_OFF.isdisjoint(said)


def one_reasoning(given: list[Any]) -> str:
    """The reasoning that all of `given` are, blanks at their edges and blank ones aside.

    Raises RowError.
    """
    if not all(isinstance(reasoning, str) for reasoning in given):
        raise RowError(NOT_TEXT)
    reasonings = [reasoning.strip("\r\n") for reasoning in given if reasoning.strip()]
    if len({reasoning.strip() for reasoning in reasonings}) > 1:
        raise RowError(TWO_REASONINGS)
    return reasonings[0] if reasonings else ""


def _inline_reasoning(content: str) -> tuple[str, str]:
    """The reasoning that an answer's text begins with, or "", and the rest."""
    text = content.lstrip()
    if text.startswith(THINK):
        before, tag, after = text.removeprefix(THINK).partition(END_THINK)
        return (before, after.lstrip("\r\n")) if tag else ("", content)
    end = LONE_END.search(content) if END_THINK in content else None
    if end is None or THINK in content[: end.start()]:
        return "", content
    return content[: end.start()], content[end.end() :].lstrip("\r\n")


def _block_text(block: Any) -> str:
    block = {"type": "text", "text": block} if isinstance(block, str) else block
    if not isinstance(block, dict):
        raise RowError(NOT_TEXT)
    kind, text = block.get("type") or "text", block.get("text")
    if kind in TEXT_BLOCKS and isinstance(text, str):
        return text
    raise RowError(MEDIA if _is_media(kind) else NOT_TEXT)


def _is_media(kind: Any) -> bool:
    return isinstance(kind, str) and any(word in kind for word in MEDIA_WORDS)


def _answer(message: dict[str, Any], content: str) -> Message:
    """The assistant's turn, its reasoning taken out of the text where it stands there."""
    given = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    inline, rest = _inline_reasoning(content)
    reasoning = one_reasoning([*given, inline])
    answer: Message = {"role": "assistant", "content": rest}
    if reasoning:
        answer["reasoning"] = reasoning
    if rest != content and (inline.strip() or not reasoning):  # all of it stands in the text
        answer["written"] = content
    calls = _tool_calls(message)
    if calls:
        answer["tool_calls"] = calls
    if message.get("prefix"):
        raise RowError(PREFIX)
    if not _is_learnt(message):
        answer["supervised"] = False
    if is_cut_off(message):
        answer["cut_off"] = True
    return answer


def _is_learnt(message: dict[str, Any]) -> bool:
    """What the flags of an answer say, which goes before axolotl's list of its parts."""
    said = [message[key] for key in FLAGS if message.get(key) is not None]
    masked = message.get("masked")
    if masked is not None:
        said.append(1 - masked if masked in (0, 1) else masked)
    if any(value not in (0, 1) for value in said):
        raise RowError(BAD_FLAG)
    if len(set(said)) > 1:
        raise RowError(TWO_FLAGS)
    parts = message.get("train_detail")
    if parts and 0 not in said:
        raise RowError(IN_PART)
    return bool(said[0]) if said else parts is None


def _tool_result(message: dict[str, Any], content: Any) -> Message:
    kinds = [part.get("type") for part in _objects(content)]
    if any(_is_media(kind) for kind in kinds):
        raise RowError(MEDIA)
    if kinds and len(kinds) == len(content) and all(kind in TEXT_BLOCKS for kind in kinds):
        content = read_content(content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        try:
            content = json.dumps(content, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(NOT_PLAIN) from error
    result: Message = {"role": "tool", "content": content}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str) and message[key]:
            result[key] = message[key]
    return result


def _objects(content: Any) -> list[dict[str, Any]]:
    """The objects in a list."""
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict)]


def _tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    calls = from_json_text(calls, BAD_TOOL_CALL) if calls else []
    legacy = message.get("function_call")
    if legacy and calls:
        raise RowError(BAD_TOOL_CALL)
    calls = [legacy] if legacy else calls
    if not isinstance(calls, list):
        raise RowError(BAD_TOOL_CALL)
    return [_tool_call(from_json_text(call, BAD_TOOL_CALL)) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """A call in OpenAI's form, or its bare name and arguments, to the former."""
    if not isinstance(call, dict) or call.get("type") not in (None, "function"):
        raise RowError(BAD_TOOL_CALL)
    function = call["function"] if call.get("function") is not None else call
    if not isinstance(function, dict):
        raise RowError(BAD_TOOL_CALL)
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json_text(arguments, BAD_TOOL_CALL) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    identity = call.get("id")
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise RowError(BAD_TOOL_CALL)
    canonical: dict[str, Any] = {"type": "function"}
    if isinstance(identity, str) and identity:
        canonical["id"] = identity
    return canonical | {"function": {"name": name, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, or a bare function, to the former."""
    if not isinstance(tool, dict):
        raise RowError(BAD_TOOLS)
    bare = tool.get("function") is None
    function = {key: tool[key] for key in tool if key != "type"} if bare else tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(BAD_TOOLS)
    if isinstance(function.get("parameters"), str):
        function = function | {"parameters": from_json_text(function["parameters"], BAD_TOOLS)}
    if not isinstance(function.get("parameters", {}), dict | None):
        raise RowError(BAD_TOOLS)
    function = {key: function[key] for key in TOOL_KEYS if key in function} | function
    outer = {} if bare else tool
    return {"type": outer.get("type") or "function", "function": function} | {
        key: value for key, value in outer.items() if key not in ("type", "function")
    }
