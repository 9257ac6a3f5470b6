"""Conversations about the Python standard library, made from its own source by `ast`.

A user asks what a function, class or module does, for its source, signature, methods, return
statements, callees, imports or names; the answer is the docstring, the source, the listing. Real
text under the PSF licence, from the interpreter that runs this, the same on every run.

Held out are whole top-level modules, by the md5 of their names: no conversation of the training
file is about a module that the held-out file asks about.

    python launch/demo/corpus.py OUT_DIR     writes train.jsonl and heldout.jsonl (10 s)
"""

import ast
import copy
import hashlib
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from dflashdist.config import InputError

HELD_OUT_OF = 25  # one top-level module in so many
LEFT_OUT = {
    "test", "tests", "idle_test", "idlelib", "lib2to3", "distutils", "encodings", "ensurepip",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
MAX_CHARS = 4000  # of one answer
MAX_ITEMS = 24  # of a listing

QUESTIONS = {
    "doc": ["What does {} do?", "Describe {} please.", "Explain {}.", "What is {} for?"],
    "source": ["Show the source of {}.", "Print the code of {}.", "How is {} implemented?"],
    "signature": [
        "What is the signature of {}?",
        "Write the signature of {}.",
        "Which arguments does {} take?",
    ],
    "returns": ["What can {} return?", "Show the return statements of {}."],
    "calls": ["What does {} call?", "Which functions does {} call?"],
    "methods": ["Which methods does {} have?", "List the methods of {}."],
    "summary": ["Summarize {} in one line.", "Give a one line summary of {}."],
    "imports": ["Which imports does module {} need?", "What does {} import?"],
    "names": ["List the functions and classes of {}.", "Which names does module {} have?"],
}
FOLLOW_UPS = {
    "doc": ["What does it do?", "And what is it for?", "Explain it."],
    "source": ["How is it implemented?", "Show the source.", "Now show the code."],
    "signature": [
        "Which arguments does it take?",
        "Write its signature.",
        "Now only the signature.",
    ],
    "returns": ["What can it return?", "Show its return statements."],
    "calls": ["What does it call?", "Which functions does it call?"],
    "methods": ["Which methods does it have?"],
    "summary": ["Summarize it in one line."],
    "imports": ["Which imports does it need?"],
    "names": ["Which names does it have?"],
}


@dataclass
class Thing:
    """A module, class or function: its dotted name and the answers known about it."""

    name: str
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def held_out(self) -> bool:
        """Whether its top-level module belongs to the held-out part."""
        return is_held_out(self.name)


def is_held_out(name: str) -> bool:
    """Whether the module of a dotted name is held out: md5 of the top-level name mod 25 is 0."""
    return _hash(name.partition(".")[0]) % HELD_OUT_OF == 0


def library_modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of the standard library's modules, sorted, as far as they are used."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for file in sorted(root.rglob("*.py")):
        parts = list(file.relative_to(root).with_suffix("").parts)
        if LEFT_OUT & set(parts) or not all(part.isidentifier() for part in parts):
            continue
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            modules.append((".".join(parts), file))
    return modules


def library_things() -> Iterator[Thing]:
    """Everything in the library that a conversation can be about, in a fixed order.

    Raises InputError when the interpreter comes without the library's source.
    """
    modules = library_modules()
    if not modules:
        raise InputError(f"{sysconfig.get_path('stdlib')}: no library source; use another Python")
    for name, file in tqdm(modules, desc="corpus", unit=" modules", disable=None):
        source = file.read_bytes()
        if not source.isascii():
            continue
        text = source.decode("ascii")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            try:
                tree = ast.parse(text)
            except SyntaxError:  # a template or a file for another version
                continue
        yield _module(name, tree)
        yield from _definitions(name, tree, text.splitlines())


def conversations(thing: Thing) -> Iterator[list[dict[str, str]]]:
    """One conversation a known answer or two, and for one thing in five one of 2 to 5 turns."""
    kinds = list(thing.answers)
    for kind in kinds:
        # The cheap kinds of a function would drown the rest: each is asked of every third one.
        rare = kind in ("signature", "returns", "calls", "summary")
        if not rare or _hash(thing.name + kind) % 3 == 0:
            yield _messages(thing, [kind])
    if len(kinds) >= 2 and _hash(thing.name + "turns") % 5 == 0:
        order = sorted(kinds, key=lambda kind: _hash(thing.name + kind + "order"))
        yield _messages(thing, order[: 2 + _hash(thing.name + "count") % 4])


def question(name: str, kind: str, first: bool = True) -> str:
    """The wording for a thing and kind, always the same one."""
    forms = (QUESTIONS if first else FOLLOW_UPS)[kind]
    return forms[_hash(name + kind) % len(forms)].format(name)


def write_corpus(out: Path) -> dict[str, int]:
    """Write train.jsonl and heldout.jsonl; returns the number of conversations in each."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "heldout": 0}
    with open(out / "train.jsonl", "w") as train, open(out / "heldout.jsonl", "w") as heldout:
        for thing in library_things():
            for messages in conversations(thing):
                (heldout if thing.held_out else train).write(
                    json.dumps({"messages": messages}) + "\n"
                )
                counts["heldout" if thing.held_out else "train"] += 1
    return counts


def _messages(thing: Thing, kinds: list[str]) -> list[dict[str, str]]:
    messages = []
    for turn, kind in enumerate(kinds):
        messages.append({"role": "user", "content": question(thing.name, kind, turn == 0)})
        messages.append({"role": "assistant", "content": thing.answers[kind]})
    return messages


def _definitions(owner: str, node: ast.AST, lines: list[str]) -> Iterator[Thing]:
    """The functions and classes directly inside a module or class, and theirs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{owner}.{child.name}"
            yield _class(name, child, lines)
            yield from _definitions(name, child, lines)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _function(f"{owner}.{child.name}", child, lines)
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(owner, child, lines)


def _module(name: str, tree: ast.Module) -> Thing:
    imports = [
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [
        f"- `{node.name}` ({'class' if isinstance(node, ast.ClassDef) else 'function'})"
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    last = name.rpartition(".")[2]
    return _thing(
        name,
        doc=ast.get_docstring(tree),
        summary=_first_line(tree),
        imports=_code("\n".join(imports[:MAX_ITEMS])),
        names=f"Module `{last}` defines:\n" + "\n".join(names[:MAX_ITEMS]) if names else None,
    )


def _class(name: str, node: ast.ClassDef, lines: list[str]) -> Thing:
    methods = [
        item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    count = f"{len(methods)} method{'s' if len(methods) > 1 else ''}"
    listing = "\n".join(f"- `{method}`" for method in methods[:MAX_ITEMS])
    return _thing(
        name,
        doc=ast.get_docstring(node),
        summary=_first_line(node),
        source=_code(_source(node, lines)),
        signature=_code(_header(node)),
        methods=f"`{node.name}` has {count}:\n{listing}" if methods else None,
    )


def _function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Thing:
    returns, calls = [], []
    for inner in sorted(ast.walk(node), key=_place):
        if isinstance(inner, ast.Return) and inner.value is not None:
            returns.append(ast.unparse(inner))
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name | ast.Attribute):
            calls.append(ast.unparse(inner.func))
    calls = [call for call in dict.fromkeys(calls) if "\n" not in call and len(call) <= 60]
    return _thing(
        name,
        doc=ast.get_docstring(node),
        summary=_first_line(node),
        source=_code(_source(node, lines)),
        signature=_code(_header(node)),
        returns=_code("\n".join(dict.fromkeys(returns[:MAX_ITEMS]))),
        calls="\n".join(f"- `{call}`" for call in calls[:MAX_ITEMS]),
    )


def _place(node: ast.AST) -> tuple[int, int]:
    """Line and column, for the order of the source; `ast.walk` goes level by level."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _thing(name: str, **answers: str | None) -> Thing:
    """A thing with the answers that exist and are neither padded with blanks nor overlong."""
    stripped = {kind: answer.strip() for kind, answer in answers.items() if answer}
    return Thing(name, {k: a for k, a in stripped.items() if a and len(a) <= MAX_CHARS})


def _first_line(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> str | None:
    doc = ast.get_docstring(node)
    return doc.strip().partition("\n")[0].strip() if doc and doc.strip() else None


def _source(node: ast.stmt, lines: list[str]) -> str:
    """The lines of a definition without its decorators. `ast.get_source_segment` splits the whole
    module anew for every node: 20 times slower over the library."""
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def _header(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The `def` or `class` line alone, decorators and annotations as written."""
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [], []
    return ast.unparse(bare)


def _code(text: str | None) -> str | None:
    return f"```python\n{text}\n```" if text else None


def _hash(text: str) -> int:
    return int(hashlib.md5(text.encode()).hexdigest(), 16)


def main() -> None:
    """Command line: the folder to write."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python launch/demo/corpus.py OUT_DIR")
    counts = write_corpus(Path(sys.argv[1]))
    print(f"{counts['train']:,} conversations to train on, {counts['heldout']:,} held out")


if __name__ == "__main__":
    main()
