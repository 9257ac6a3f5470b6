"""A few conversations in their canonical form, and the same as people spell them."""

import json
from collections.abc import Callable
from typing import Any

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}

Canonical = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


CONVERSATIONS: list[Canonical] = [
    ([user("What is two and two?"), assistant("Four.")], None),
    ([{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello 🙂")], None),
    ([user("a b"), assistant("c"), user(" d\n"), assistant("\te  ")], None),
    ([user("Prove it"), assistant("QED", reasoning="First,\n  then.")], None),
    (
        [
            {"role": "system", "content": "Use the tool."},
            user("Weather in Köln?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": '{"rain": true}', "name": "weather"},
            assistant("It rains."),
        ],
        TOOLS,
    ),
    ([user("2+2"), assistant("4", tool_calls=[CALL], reasoning="hm")], TOOLS),
]  # fmt: skip


def openai(messages: list, reasoning: str = "reasoning_content", text_arguments=False) -> list:
    """As a server gives them: null content beside calls, a reasoning field, unknown keys."""
    spelled = []
    for message in messages:
        row = dict(message) | {"refusal": None, "extra": 1}
        if "reasoning" in row:
            row[reasoning] = f"\n{row.pop('reasoning')}\n"
        if "tool_calls" in row:
            row["content"] = row["content"] or None
            if text_arguments:
                row["tool_calls"] = [as_text(call) for call in row["tool_calls"]]
        spelled.append(row)
    return spelled


def as_text(call: dict) -> dict:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


def blocks(messages: list) -> list:
    return [
        message | {"content": [{"type": "text", "text": message["content"], "image_url": None}]}
        for message in messages
    ]


def inline(messages: list, opening: str = "<think>\n") -> list:
    spelled = []
    for message in messages:
        row = dict(message)
        if "reasoning" in row:
            row["content"] = f"{opening}{row.pop('reasoning')}\n</think>\n\n{row['content']}"
        spelled.append(row)
    return spelled


def legacy(messages: list) -> list:
    spelled = []
    for message in messages:
        row = dict(message)
        if "tool_calls" in row:
            row["function_call"] = as_text(row.pop("tool_calls")[0])["function"]
        if row["role"] == "tool":
            row["role"] = "function"
        spelled.append(row)
    return spelled


def sharegpt(messages: list, names: dict[str, str]) -> list:
    return [
        {"from": names[message["role"]], "value": message["content"]}
        | {key: message[key] for key in message if key not in ("role", "content")}
        for message in messages
    ]


def function_calls(messages: list) -> list | None:
    """LLaMA-Factory's: a turn of its own for a call."""
    if any("reasoning" in m or ("tool_calls" in m and m["content"]) for m in messages):
        return None
    return [
        {"from": "function_call", "value": json.dumps(message["tool_calls"][0]["function"])}
        if "tool_calls" in message
        else {"from": {"tool": "observation"}.get(message["role"], message["role"])}
        | {"value": message["content"], "name": message.get("name")}
        for message in messages
    ]


def without_system(messages: list) -> tuple[str | None, list]:
    if messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return None, messages


def split(messages: list, tools: Any) -> dict[str, Any]:
    """TRL's conversational pairs."""
    return {"prompt": messages[:-1], "completion": messages[-1:], "tools": tools}


def alpaca(messages: list, question: str, answer: str, **more: Any) -> dict[str, Any] | None:
    """Text alone, the turns before the last as history."""
    system, turns = without_system(messages)
    if any(set(message) - {"role", "content"} for message in turns):
        return None
    texts = [message["content"] for message in turns]
    row = {question: texts[-2], answer: texts[-1], "system": system} | more
    history = [texts[i : i + 2] for i in range(0, len(texts) - 2, 2)]
    return row | ({"history": history} if history else {})


def beside(messages: list, tools: Any, name: str) -> dict[str, Any]:
    system, turns = without_system(messages)
    return {name: openai(turns), "system": system, "tools": json.dumps(tools) if tools else None}


NAMES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
OTHERS = {"system": "developer", "user": "Prompter", "assistant": "bot", "tool": "observation"}


def mixed(messages: list) -> list:
    return [
        (openai([message]) if i % 2 else sharegpt([message], OTHERS))[0]
        for i, message in enumerate(messages)
    ]


# Each gives a row, or None where it has no way to say it.
SPELLINGS: dict[str, Callable[[list, Any], dict[str, Any] | None]] = {
    "canonical": lambda m, t: {"messages": m, "tools": t},
    "openai": lambda m, t: {"messages": openai(m), "tools": t, "functions": None},
    "reasoning field": lambda m, t: {"messages": openai(m, "reasoning"), "tools": t},
    "thinking field": lambda m, t: {"messages": openai(m, "thinking"), "tools": t},
    "arguments as text": lambda m, t: {
        "messages": openai(m, text_arguments=True),
        "tools": json.dumps(t),
    },
    "flat calls": lambda m, t: {
        "messages": [
            x | {"tool_calls": [call["function"] for call in x["tool_calls"]]}
            if "tool_calls" in x
            else x
            for x in m
        ],
        "tools": t and [tool["function"] for tool in t],
    },
    "messages as text": lambda m, t: {"messages": json.dumps(m), "tools": t},
    "each message as text": lambda m, t: {"messages": list(map(json.dumps, m)), "tools": t},
    "blocks": lambda m, t: {"messages": blocks(m), "tools": t},
    "inline": lambda m, t: {"messages": inline(m), "tools": t},
    "inline, no opening": lambda m, t: {"messages": inline(m, ""), "tools": t},
    "legacy": lambda m, t: {
        "messages": legacy(m),
        "functions": t and [tool["function"] for tool in t],
    },
    "sharegpt": lambda m, t: {"conversations": sharegpt(m, NAMES), "tools": json.dumps(t)},
    "others": lambda m, t: {"conversation": sharegpt(m, OTHERS), "tools": t},
    "mixed": lambda m, t: {"conversations": mixed(m), "tools": t},
    "calls as turns": lambda m, t: (
        {"conversations": turns, "tools": t} if (turns := function_calls(m)) else None
    ),
    "system and tools beside": lambda m, t: beside(m, t, "messages"),
    "system beside sharegpt": lambda m, t: beside(m, t, "conversations"),
    "prompt and completion": split,
    "instruction": lambda m, t: alpaca(m, "instruction", "output", input=""),
    "input": lambda m, t: alpaca(m, "input", "output", instruction=None),
    "question": lambda m, t: alpaca(m, "question", "answer"),
    "response": lambda m, t: alpaca(m, "prompt", "response", history=None),
}  # fmt: skip


def spelled_rows() -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """(number of the conversation, row) by spelling."""
    return {
        name: [
            (i, row)
            for i, (messages, tools) in enumerate(CONVERSATIONS)
            if (row := spell(messages, tools)) is not None
        ]
        for name, spell in SPELLINGS.items()
    }
