"""The prompts that acceptance is measured on: files, token stores, usual benchmarks, built-in ones.

A drafter is measured on what the target is asked in the field's benchmarks (`TASKS`, read from the
user's own copies, in the shape of the published measurements), on the held-out rows of its own
token store, whose rendering is then that of training to the token, or on the prompts shipped here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflashdist.config import DataConfig, EvaluateConfig, InputError
from dflashdist.data.chat import OWN, ChatTokenizer
from dflashdist.data.conversations import Message, RowError, parse_prompt
from dflashdist.data.messages import NOT_JSON
from dflashdist.data.shards import META, TokenStore
from dflashdist.data.sources import Sources
from dflashdist.data.tokenizer import template_file
from dflashdist.model.drafter_folder import read_provenance

BUILTIN = Path(__file__).parent / "builtin.jsonl"  # chat, code, math and writing in turn

VALIDATION = "validation"  # the folder of a store's held-out rows, in it
_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, as tokens, and what it is asked once it has answered that."""

    ids: list[int]  # generation prompt included
    task: str
    origin: str  # file:line, or a store's row
    messages: tuple[Message, ...] = ()
    tools: list[dict[str, Any]] | None = None
    follow_ups: tuple[str, ...] = ()

    def follow_up(self, answer: str, chat: ChatTokenizer) -> "Prompt | None":
        """The next question after the target's own answer, or None. Raises RowError."""
        if not self.follow_ups:
            return None
        said = {"role": "assistant", "content": answer}
        asked = {"role": "user", "content": self.follow_ups[0]}
        messages = (*self.messages, said, asked)
        ids = chat.encode_prompt(messages, self.tools)
        return replace(self, ids=ids, messages=messages, follow_ups=self.follow_ups[1:])


def chat_of(
    checkpoints: Sequence[str | Path], target: str, revision: str | None, data: DataConfig
) -> ChatTokenizer:
    """The chat format that the checkpoints were trained with, unless `data` names another.

    Checkpoints and exports record it; a folder that does not is asked as the others are.

    Raises InputError where the recorded formats differ, or where training used a template's file
    that `data.template` does not name and the folder does not hold.
    """
    found: dict[str, tuple[str | Path, dict[str, Any]]] = {}
    for checkpoint in checkpoints:
        asked = _rendering(Path(checkpoint), data)
        if asked:
            text = {key: value for key, value in asked.items() if key != "template"}
            found.setdefault(json.dumps(text, sort_keys=True), (checkpoint, asked))
    if len(found) > 1:
        (first, one), (second, other) = list(found.values())[:2]
        keys = [key for key in one if one[key] != other[key]]
        raise InputError(
            f"{first} and {second} were trained with different renderings ({', '.join(keys)}): "
            "evaluate them one by one, or name one by data.template, template_settings and date"
        )
    template, settings, date = data.template, data.template_settings, data.date
    for checkpoint, asked in found.values():
        settings, date = asked["template_settings"], asked["date"]
        if template is None and asked["template"] != OWN:
            template = _template_file(Path(checkpoint).expanduser(), asked)
    return ChatTokenizer.load(target, revision, template=template, settings=settings, date=date)


def _rendering(folder: Path, data: DataConfig) -> dict[str, Any] | None:
    """What a folder records of the chat format, under what `data` says; None where nothing."""
    rendering = read_provenance(folder).rendering
    if not rendering:
        return None
    own = data.template is None
    return {
        "template": rendering.get("template", OWN) if own else data.template,
        "template_sha256": rendering.get("template_sha256") if own else None,
        "template_settings": data.template_settings or rendering.get("settings") or {},
        "date": data.date or rendering.get("date"),
    }


def _template_file(folder: Path, rendering: dict[str, Any]) -> str:
    """The template's file, in an export or where training read it. Raises InputError where it is
    not there, or another."""
    places = read_provenance(folder).template_places(folder)
    file = template_file(places, rendering["template_sha256"])
    if file is None:
        raise InputError(
            f"{folder}: trained with the chat template {rendering['template']}; name its file by "
            "data.template"
        )
    return str(file)


def read_prompts(
    source: str | Path, chat: ChatTokenizer, evaluate: EvaluateConfig, longest: int
) -> list[Prompt]:
    """The first `evaluate.max_prompts` prompts of a source.

    Args:
        source: a file, folder or data set of conversations (data/sources.py), a token store (its
            `validation` part where it has one), or `builtin`.
        evaluate: its `task` says how a file's rows are read; null = as conversations, of which a
            final answer is left out and a `task` or `category` names the kind.
        longest: tokens that a prompt may have.

    Raises InputError for a row that is no prompt, or one of more than `longest` tokens.
    """
    store = _store_folder(Path(source))
    if store:
        found = _stored(TokenStore.open(store), chat)
    else:
        found = _asked(str(BUILTIN if str(source) == "builtin" else source), chat, evaluate.task)
    prompts: list[Prompt] = []
    for prompt in found:
        if len(prompt.ids) > longest:
            raise InputError(
                f"{prompt.origin}: a prompt of {len(prompt.ids)} tokens, where the target's "
                f"positions leave {longest}; drop it or lower evaluate.max_new_tokens"
            )
        prompts.append(prompt)
        if len(prompts) == evaluate.max_prompts:
            return prompts
    if not prompts:
        raise InputError(f"{source}: no prompts")
    return prompts


def training_rows(source: str | Path) -> Path | None:
    """The token store whose rows `read_prompts` would ask though training may have seen them: one
    that has no validation part and is none. None for other sources."""
    store = _store_folder(Path(source))
    return None if store is None or store.name == VALIDATION else store


def _store_folder(source: Path) -> Path | None:
    """The token store that a source means: its validation part before itself."""
    places = (source / VALIDATION, source)
    return next((place for place in places if (place / META).is_file()), None)


def _stored(store: TokenStore, chat: ChatTokenizer) -> Iterator[Prompt]:
    """What comes before each row's first answer. Raises InputError for another tokenizer."""
    made_with = store.meta.get("tokenizer_fingerprint")
    if made_with != chat.tokenizer_fingerprint:
        raise InputError(
            f"{store.path}: made with another tokenizer ({made_with}, the target's is "
            f"{chat.tokenizer_fingerprint}); prepare it for this target"
        )
    for row in range(store.num_rows):
        ids, mask = store.row(row)
        first = int(np.flatnonzero(mask)[0])
        if first:
            yield Prompt(ids[:first].tolist(), store.path.name, f"{store.path}: row {row}")


def _asked(source: str, chat: ChatTokenizer, task: str | None) -> Iterator[Prompt]:
    if task is not None and task not in TASKS:
        raise InputError(f"evaluate.task={task}: the tasks are {', '.join(TASKS)}")
    for origin, payload in Sources([source]).rows():
        try:
            row = payload if isinstance(payload, dict) else _json(payload)
            read = _conversation(origin, row) if task is None else _task(row, task)
            ids = chat.encode_prompt(read.messages, read.tools)
        except RowError as error:
            raise InputError(f"{origin}: not a prompt: {error}") from error
        kind = read.task or Path(source).name
        yield Prompt(ids, kind, origin, tuple(read.messages), read.tools, tuple(read.follow_ups))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(NOT_JSON) from error


@dataclass(frozen=True)
class _Question:
    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None
    follow_ups: Sequence[str] = ()
    task: str | None = None


def _conversation(origin: str, row: Any) -> _Question:
    """A row as a conversation, without the answer that it may end with. Raises RowError."""
    asked = parse_prompt(origin, row)
    messages = asked.messages
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowError("no messages before the answer")
    kinds = (row.get(name) for name in ("task", "category"))
    kind = next((kind for kind in kinds if isinstance(kind, str)), None)
    return _Question(messages, asked.tools, task=kind)


def _task(row: Any, task: str) -> _Question:
    """A row of a benchmark's data set as its question, and the turns after it. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    try:
        turns = TASKS[task](row)
    except TypeError:  # something else than text was joined with text
        turns = None
    except KeyError as error:
        raise RowError(f"{task} has a column {error}, this row has not") from error
    texts = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
    if not turns or not texts:
        raise RowError(f"no text where {task} has its question")
    return _Question([{"role": "user", "content": turns[0]}], None, turns[1:], task)


def _alpaca(row: dict[str, Any]) -> list[str]:
    more = row.get("input")
    return [row["instruction"] + "\n\nInput:\n" + more if more else row["instruction"]]


def _turns(row: dict[str, Any]) -> Any:
    said = row["turns"] if "turns" in row else row["prompt"]
    return [said] if isinstance(said, str) else said


# Task -> the user's turns of a row of the published data set, asked as in the published
# measurements (DFlash's own harness): openai/gsm8k, HuggingFaceH4/MATH-500, openai_humaneval, mbpp
# (sanitized), mt_bench_prompts (two turns; `turns` in the original file), tatsu-lab/alpaca.
TASKS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "gsm8k": lambda row: [row["question"] + _STEP_BY_STEP],
    "math500": lambda row: [row["problem"] + _STEP_BY_STEP],
    "humaneval": lambda row: [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n" + row["prompt"] + "\n```"
    ],
    "mbpp": lambda row: [row["prompt"]],
    "mtbench": _turns,
    "alpaca": _alpaca,
}
