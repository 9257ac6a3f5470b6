"""A conversation said anew, so that every answer in it is the target's own.

The questions, system messages and tools of the source stay. Wherever it has an answer, or ends
with a question, the target is asked, its own earlier answers standing before. Turns of the source
that answer no question (a greeting, a second answer in a row) are left out. Tool results come from
the source: they are used if the target called the very functions, in the source's order, whose
results they are, with whatever arguments; else the conversation ends with the target's own turn.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from dflashdist.data.conversations import Conversation, Message

LENGTH = "answer cut off at max_tokens"


class AnswerError(Exception):
    """No usable answer. The message is the reason it is counted under; `detail` says more.

    `final`: the conversation cannot go on, now or later in this run; else the server failed it.
    `paid`: the target did answer, and would again like that, so that asking it again is a waste.
    """

    def __init__(
        self, reason: str, detail: str = "", *, final: bool = False, paid: bool = False
    ) -> None:
        super().__init__(reason)
        self.detail = detail[:500].encode(errors="replace").decode()
        self.final, self.paid = final or paid, paid


class Answerer(Protocol):
    """Who answers: a server (regenerate/server.py) or a local model (eval/generate.py)."""

    model: str  # its name, which every row carries
    settings: dict[str, Any]  # what else decides an answer, as plain JSON

    async def answer(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Message:
        """The next turn, canonical but for reasoning that the target wrote into its text.

        Raises AnswerError when there is none, InputError when there will never be one.
        """
        ...

    def trouble(self) -> str:
        """What keeps all answers from coming, for the progress line; empty where nothing does."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...


async def replay(
    conversation: Conversation, answerer: Answerer, said: list[Message], known: Iterable[Message]
) -> None:
    """Say the conversation, message by message, into `said`, which is empty at first.

    `known` are answers that it got before, used up before any is asked. Raises what the answerer
    raises, `said` then ending with what has no answer.
    """
    known = deque(known)
    asked = False  # a question or result has been said that no answer has followed
    calls: deque[dict[str, Any]] = deque()  # of the last answer, their results still to come
    for message in [*conversation.messages, {"role": "assistant"}]:  # the last question, too
        if message["role"] == "tool":
            if not calls:
                return
            said.append(_result(message, calls.popleft()))
            asked = True
        elif message["role"] != "assistant":
            said.append(message)
            asked = asked or message["role"] == "user"
        elif asked:
            said.append(
                known.popleft() if known else await answerer.answer(list(said), conversation.tools)
            )
            asked = False
            calls = deque(said[-1].get("tool_calls", ()))
            if _called(said[-1]) != _called(message):
                return


def to_last_answer(said: Sequence[Message]) -> list[Message]:
    """The messages up to the last answer; none where there is none."""
    answers = [i for i, message in enumerate(said) if message["role"] == "assistant"]
    return list(said[: answers[-1] + 1]) if answers else []


def spell(message: Message) -> dict[str, Any]:
    """A message as OpenAI-compatible servers and files have it: tool arguments are JSON text."""
    spelled = {key: value for key, value in message.items() if key != "supervised"}
    if "written" in spelled:  # the reasoning is in the text, as it came
        spelled["content"] = spelled.pop("written")
        spelled.pop("reasoning", None)
    if "reasoning" in spelled:
        spelled["reasoning_content"] = spelled.pop("reasoning")
    if "tool_calls" in spelled:
        spelled["tool_calls"] = [_spell_call(call) for call in spelled["tool_calls"]]
    return spelled


def unspell(spelled: Mapping[str, Any]) -> Message:
    """The message that `spell` made this of."""
    message = dict(spelled)
    if "reasoning_content" in message:
        message["reasoning"] = message.pop("reasoning_content")
    if "tool_calls" in message:
        calls = [(call, call["function"]) for call in message["tool_calls"]]
        message["tool_calls"] = [
            call | {"function": function | {"arguments": json.loads(function["arguments"])}}
            for call, function in calls
        ]
    return message


def _spell_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _called(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _result(message: Message, call: dict[str, Any]) -> Message:
    """The source's tool result as that of the target's call."""
    result = {key: value for key, value in message.items() if key != "tool_call_id"}
    return result | ({"tool_call_id": call["id"]} if "id" in call else {})
