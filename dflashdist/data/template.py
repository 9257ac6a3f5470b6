"""A chat template: messages to the text that a server would show the target.

The rules are those of `transformers.apply_chat_template`, whose text this equals: blocks are
trimmed, `tojson` leaves HTML and Unicode alone, tools take the template named `tool_use` where
there is one. Two things differ, both by intent: the date is fixed, and `{% generation %}` tags
can be asked where they stand.

Reasoning is given to the template under every name that templates know. A template that writes
none of them gets the answer's text as it came, a `<think>` block in it included. Reasoning that
came in a field of its own is put before it as such targets write it; and where the generation
prompt opens the block, an answer begins with that very opening.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflashdist.config import InputError
from dflashdist.data.messages import END_THINK, THINK, Message, RowError
from dflashdist.data.tokenizer import DEFAULT, template_digest

TEMPLATE_REFUSES = "template refuses the conversation"
TAGS_CHANGE_TEXT = "generation tags cannot be told from the text"

TOOL_USE = "tool_use"
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
# Unicode noncharacters, which no text that is exchanged holds, stand around a tagged body.
OPENED = re.compile(rf"{THINK}\s*\Z")
OPEN, CLOSE = "\ufdd0", "\ufdd1"
# What a template's code may raise on messages that it was not written for.
FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+\uff5c>|<\|[^<>|\s]+>|<[^<>|\s]+\|>"
    r"|<(?:start|end)_of_(?:turn|image)>|<</?SYS>>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS)\]"
)

Span = tuple[int, int]


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which a plain rendering passes through."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it
    edges = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        """The body as a call of `_written`: a scope of its own, as transformers makes it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_written")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return self.edges[0] + caller() + self.edges[1]


class MarkedGeneration(Generation):
    """The same with a mark at either edge of the body."""

    edges = (OPEN, CLOSE)


@dataclass(frozen=True)
class Variant:
    """One of a target's named templates, compiled."""

    plain: Template
    marked: Template | None  # None: the template has no tags
    names: frozenset[str]  # variables that it reads
    literals: frozenset[str]  # the texts that it holds
    inline_reasoning: bool  # it writes no reasoning field
    opening: str  # the end of its generation prompt that opens a block, and blanks after it; or ""


class ChatTemplate:
    """A target's templates with their settings."""

    def __init__(
        self,
        origin: str,
        templates: Mapping[str, str],
        specials: Mapping[str, str],
        settings: Mapping[str, Any],
        date: str | None = None,
    ) -> None:
        """Compile `templates` (name: source), of which `default` must be one.

        Args:
            origin: where they come from, for messages.
            specials: bos_token and the like.
            settings: further variables, JSON values; they win over specials.
            date: YYYY-MM-DD for templates that write the date, today by default.

        Raises InputError for a template that does not compile, a setting that cannot be one, or a
        date that is none.
        """
        if DEFAULT not in templates:
            raise InputError(
                f"{origin}: no chat template named {DEFAULT!r} but {', '.join(sorted(templates))};"
                " give one with data.template"
            )
        taken = sorted(set(settings) & set(RESERVED))
        if taken:
            raise InputError(f"data.template_settings.{taken[0]}: the conversation decides this")
        try:
            day = Date.fromisoformat(date) if date else Date.today()
        except ValueError as error:
            raise InputError(f"data.date={date}: a day is YYYY-MM-DD") from error
        self._specials, self._variables = dict(specials), {**specials, **settings}
        self.settings = dict(settings)
        self.sha256 = template_digest(templates)
        self._variants = {
            name: self._compile(f"{origin} ({name})", source, day)
            for name, source in templates.items()
            if name in (DEFAULT, TOOL_USE)
        }
        uses = any("strftime_now" in variant.names for variant in self._variants.values())
        self.date = day.isoformat() if uses else None

    @property
    def names(self) -> frozenset[str]:
        """Variables that the templates read."""
        return frozenset().union(*(variant.names for variant in self._variants.values()))

    @property
    def literals(self) -> frozenset[str]:
        """Texts that the templates hold."""
        return frozenset().union(*(variant.literals for variant in self._variants.values()))

    def inputs(self, messages: Sequence[Message], tools: list[Any] | None) -> list[dict[str, Any]]:
        """Canonical messages as the template reads them."""
        variant = self._variant(tools)
        opening = variant.opening if variant.inline_reasoning else None
        return [_input(message, opening) for message in messages]

    def tagged(self, tools: list[Any] | None) -> bool:
        """Whether there are `{% generation %}` tags."""
        return self._variant(tools).marked is not None

    def said(self, message: Message, tools: list[Any] | None) -> list[str]:
        """The texts of an answer that must stand in what the target writes, in their order."""
        variant = self._variant(tools)
        if not variant.inline_reasoning or "written" not in message:
            return [message.get("reasoning", ""), message["content"]]
        written = message["written"]
        return [written.strip().removeprefix(THINK) if variant.opening else written]

    def render(
        self, inputs: Sequence[dict[str, Any]], tools: list[Any] | None, prompt: bool = False
    ) -> str:
        """The text of `inputs`, the generation prompt after it if asked. Raises RowError."""
        return self._render(self._variant(tools).plain, inputs, tools, prompt)

    def render_tagged(
        self, inputs: Sequence[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[Span] | None]:
        """The text and the character spans of its `{% generation %}` bodies, in order.

        None in place of the spans when the template has no such tags. Raises RowError.
        """
        variant = self._variant(tools)
        text = self._render(variant.plain, inputs, tools, False)
        if variant.marked is None:
            return text, None
        marked = self._render(variant.marked, inputs, tools, False)
        spans, edges, length, piece_start = [], [], 0, 0
        for mark in re.finditer(f"[{OPEN}{CLOSE}]", marked):
            length += mark.start() - piece_start
            piece_start = mark.end()
            edges.append((mark.group(), length))
        for (first, start), (last, end) in zip(edges[::2], edges[1::2], strict=False):
            if (first, last) == (OPEN, CLOSE):
                spans.append((start, end))
        # A filter outside the tag may see the marks, a conversation may hold them, tags may nest.
        if 2 * len(spans) != len(edges) or re.sub(f"[{OPEN}{CLOSE}]", "", marked) != text:
            raise RowError(TAGS_CHANGE_TEXT)
        return text, spans

    def _variant(self, tools: list[Any] | None) -> Variant:
        return self._variants[TOOL_USE if tools and TOOL_USE in self._variants else DEFAULT]

    def _render(
        self,
        template: Template,
        inputs: Sequence[Any],
        tools: list[Any] | None,
        prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return template.render(
                messages=list(inputs),
                tools=tools or None,
                documents=None,
                add_generation_prompt=prompt,
                **(self._variables if variables is None else variables),
            )
        except FAILURES as error:
            raise RowError(TEMPLATE_REFUSES) from error

    def _compile(self, origin: str, source: str, day: Date) -> Variant:
        environment = _environment(Generation, day)
        try:
            tree = environment.parse(source)
            plain = _loaded(environment, source)
        except TemplateSyntaxError as error:
            raise InputError(
                f"{origin}: line {error.lineno} of the chat template: {error.message}"
            ) from error
        calls = tree.find_all(nodes.ExtensionAttribute)
        tagged = any(call.identifier == Generation.identifier for call in calls)
        marked = _loaded(_environment(MarkedGeneration, day), source) if tagged else None
        names = frozenset(n.name for n in tree.find_all(nodes.Name) if n.ctx == "load")
        literals = {node.data for node in tree.find_all(nodes.TemplateData)}
        literals |= {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
        return Variant(
            plain,
            marked,
            names,
            frozenset(literals),
            not self._writes_reasoning(plain, names),
            self._opening(plain),
        )

    def _opening(self, plain: Template) -> str:
        try:
            prompt = self._render(plain, [{"role": "user", "content": "question"}], None, True)
        except RowError:
            return ""
        found = OPENED.search(prompt)
        return found[0] if found else ""

    def _writes_reasoning(self, plain: Template, names: frozenset[str]) -> bool:
        """Whether a reasoning field shows in the text of an answer, or of one with tool calls.

        Settings that turn thinking off leave out the reasoning of a template that has a field for
        it, so the template is asked with them, without them, and with thinking turned on.
        """
        asked = {"role": "user", "content": "question"}
        call = {"type": "function", "id": "callcall1",
                "function": {"name": "search", "arguments": {"text": "tree"}}}  # fmt: skip
        thinking = dict.fromkeys((name for name in names if "think" in name.lower()), True)
        for settings in ({}, self.settings, thinking):
            for more in ({"content": "answer"}, {"content": "", "tool_calls": [call]}):
                answer = _input({"role": "assistant", "reasoning": "considered", **more}, None)
                variables = self._specials | settings
                try:
                    text = self._render(plain, [asked, answer], None, False, variables)
                except RowError:
                    continue
                if "considered" in text:
                    return True
        return False


def special_literals(texts: frozenset[str]) -> list[str]:
    """What looks like a special token in a template's texts, sorted."""
    return sorted({match for text in texts for match in SPECIAL.findall(text)})


def _input(message: Message, opening: str | None) -> dict[str, Any]:
    """One message as templates read it; `opening` is None for those with a field for reasoning."""
    apart = ("reasoning", "written", "supervised", "cut_off")
    result = {key: message[key] for key in message if key not in apart}
    reasoning, written = message.get("reasoning"), message.get("written")
    if opening is None:
        result |= dict.fromkeys(REASONING_NAMES, reasoning) if reasoning else {}
        return result
    if reasoning and not written:
        space = "" if message["content"].startswith("\n") else "\n\n"
        written = f"{THINK}\n{reasoning}\n{END_THINK}{space}{message['content']}"
    if written:
        result["content"] = _opened(written, opening)
    return result


def _opened(written: str, opening: str) -> str:
    """The text of an answer, its block opened by these characters if there are any."""
    if opening and written.lstrip().startswith(THINK):
        written = written.lstrip().removeprefix(THINK)
        written = written.removeprefix(opening.removeprefix(THINK))
    return opening + written


def _loaded(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
    template = environment.from_string(source)
    # Copied at every rendering, which takes half of the time while they are a chain of two dicts.
    template.globals = dict(template.globals)
    return template


def _environment(generation: type[Generation], day: Date) -> ImmutableSandboxedEnvironment:
    """The rules that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[generation, "jinja2.ext.loopcontrols"],
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(form: str) -> str:
        return datetime(day.year, day.month, day.day).strftime(form)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
