"""Whether a template writes tool calls as they were made: all of them, names and arguments.

Targets write arguments as JSON, as Python (`search(text='a')`), or value by value in a markup of
their own, so it is not one text that is looked for but its parts, in order: every call's name,
then its keys and values, each as a word of its own and after the one before it. What no target
means is not taken for a part: Python's spelling of an object in a template that does not write
Python, and a text between double quotes that JSON would escape.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    ends = [_after_parts(_parts(arguments, order), text, at, python) for order in (list, _sorted)]
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


def _sorted(value: dict[str, Any]) -> list[str]:
    return sorted(value, key=str.lower)


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
