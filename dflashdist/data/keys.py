"""The key of a store, which is all that decides its content: is the one here the one asked for?

The key holds the sources' content, the target's tokenizer, template and settings, the data settings
that matter, the number of the rules that this package makes rows by (FORMAT) and the libraries that
make texts and ids: what the target and a template's file hold, not their names. It is plain JSON,
so that a difference can be named.
"""

import hashlib
import json
from importlib.metadata import version
from typing import Any

from dflashdist.config import DataConfig
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import VERSION

Key = dict[str, Any]
# Raised by hand whenever a source row comes to give other ids, masks or openings, or parts on disk
# are laid out otherwise; tests/data/test_format.py fails where it was forgotten.
FORMAT = 4

Described = list[dict[str, Any]]  # by Sources.describe

# Of the whole store, not of its parts: these are decided when all parts are there.
LATE = ("validation", "deduplicate")
LIBRARIES = ("tokenizers", "jinja2")  # whose behaviour decides ids and texts
NAMES = {
    "rows": "the format of rows, which dflashdist has changed",
    "libraries": "the version of tokenizers or jinja2",
    "sources": "the sources",
    "chat": "the target's tokenizer or chat template",
    "rendering": "the chat template or its settings",
    "validation": "data.validation",
    "verify": "--verify",
}


def store_key(
    sources: Described, validation: Described | float | None, chat: ChatTokenizer,
    data: DataConfig, verify_all: bool,
) -> Key:  # fmt: skip
    """The key of a store; `validation` is a share, or sources of their own."""
    return _plain(
        {
            "version": VERSION,
            "rows": FORMAT,
            "libraries": {name: version(name) for name in LIBRARIES},
            "sources": sources,
            "chat": chat.fingerprint,
            "rendering": decisive(chat),
            "format": data.format,
            "fields": dict(data.fields),
            "turns": data.turns,
            "max_length": data.max_length,
            "min_supervised": data.min_supervised,
            "verify": "all" if verify_all else "a sample",
            "validation": validation,
            "deduplicate": data.deduplicate,
        }
    )


def decisive(chat: ChatTokenizer) -> dict[str, Any]:
    """What of the rendering decides a text: all but where the template came from."""
    return {name: value for name, value in chat.rendering.items() if name != "template"}


def parts_key(key: Key, sources: Described) -> str:
    """Hex, of what decides the parts of `sources`, which are the key's own or its validation's."""
    early = {name: value for name, value in key.items() if name not in LATE}
    text = json.dumps(early | {"sources": sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repeatable(sources: Described) -> bool:
    """Whether the described sources are sure to give the same rows again."""
    return all(source.get("fingerprint", "") is not None for source in sources)


def differences(old: Key, new: Key) -> list[str]:
    """What two keys differ in, in words; empty when a store of key `old` is what `new` asks for."""
    if old.get("version") != new["version"]:
        return ["the store's version"]
    found = []
    for name, value in new.items():
        before = old.get(name)
        if before == value or (name == "verify" and before == "all"):
            continue
        if name in NAMES:
            found.append(NAMES[name])
        else:
            found.append(f"data.{name} ({before} then, {value} now)")
    validation = new["validation"] if isinstance(new["validation"], list) else []
    if not repeatable(new["sources"] + validation):
        found.append("a streamed source without a pinned revision, which may have changed")
    return found


def _plain(key: Key) -> Key:
    """As it comes back from JSON: tuples are lists, keys are strings."""
    return json.loads(json.dumps(key))
