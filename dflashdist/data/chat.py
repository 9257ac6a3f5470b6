"""A target's chat format: rows to token ids, and which of them the target would write itself.

turns.py says what is supervised and what is refused, template.py how messages become text,
tokenizer.py how text becomes ids; here they meet a target's files and the settings.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflashdist.config import InputError
from dflashdist.data.conversations import Conversation, Message, PlainText, Row, RowError, TokenRow
from dflashdist.data.messages import NO_SUPERVISED, NOT_UNICODE, THINK
from dflashdist.data.template import ChatTemplate, special_literals
from dflashdist.data.tokenizer import DEFAULT, PieceEncoder, TargetTokenizer
from dflashdist.data.turns import AnswerFinder, AnswerText, TrainingRow, Turns, assemble

UNTAGGED = "no answer has generation tags"
UNKNOWN_IDS = "token ids that the target's tokenizer does not have"
OWN = "own"  # the template of the target itself


@dataclass(frozen=True)
class ChatTokenizer:
    """A target's tokenizer and chat template."""

    name: str
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]  # tokens that end a turn
    pad_id: int
    vocab_size: int  # rows of the target's embedding
    fingerprint: str  # hex: of all that decides ids and masks, settings and date included
    tokenizer_fingerprint: str  # hex: of the tokenizer alone
    rendering: dict[str, Any]  # plain values: template, template_sha256, settings, date
    _target: TargetTokenizer
    _template: ChatTemplate
    _answers: AnswerFinder
    _pieces: PieceEncoder

    @classmethod
    def load(
        cls,
        path: str | Path,
        revision: str | None = None,
        *,
        template: str | None = None,
        settings: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> "ChatTokenizer":
        """The chat format of a local folder or of a model's name.

        Args:
            template: a file to use in place of the target's own chat template.
            settings: variables of the template (enable_thinking, ...), values that JSON can hold.
            date: YYYY-MM-DD, for templates that write the date; today by default.

        Raises InputError when there is no tokenizer, chat template or end-of-turn token, when one
        of the arguments cannot be used, or when the tokenizer has ids that the target's embedding
        has no row for.
        """
        target = TargetTokenizer.read(path, revision)
        templates = target.templates if template is None else {DEFAULT: _read_template(template)}
        if not templates:
            raise InputError(
                f"{path}: no chat template; add chat_template.jinja to the target's folder, or "
                "give one with data.template"
            )
        origin = str(path) if template is None else template
        settings = _plain(settings or {})
        chat = ChatTemplate(origin, templates, target.specials, settings, date)
        tokenizer = target.tokenizer
        ends = [token for i in target.end_ids if (token := tokenizer.id_to_token(i))]
        rendering = {
            "template": OWN if template is None else Path(template).name,
            "template_sha256": chat.sha256,
            "settings": settings,
            "date": chat.date,
        }
        decisive = {k: v for k, v in rendering.items() if k != "template"}
        decisive |= {"ends": ends, "specials": target.specials, "tokenizer": target.fingerprint}
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
        return cls(
            name=target.name,
            tokenizer=tokenizer,
            end_ids=target.end_ids,
            pad_id=target.pad_id,
            vocab_size=target.vocab_size,
            fingerprint=digest,
            tokenizer_fingerprint=target.fingerprint,
            rendering=rendering,
            _target=target,
            _template=chat,
            _answers=AnswerFinder(chat, ends),
            _pieces=PieceEncoder(tokenizer, _written(tokenizer, chat.literals, ends)),
        )

    @property
    def length(self) -> int:
        """Token ids in use, added tokens included: the first embedding row past them is free."""
        return self._target.length

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Canonical messages as the target reads them. Raises RowError if the template refuses."""
        inputs = self._template.inputs(messages, tools)
        return self._template.render(inputs, tools, add_generation_prompt)

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers` encodings of rendered texts; no special token is added to them."""
        return self.tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def encode_prompt(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> list[int]:
        """Ids of the conversation with the generation prompt after it. Raises RowError."""
        return self._pieces.encode([self.render(messages, tools, add_generation_prompt=True)])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def training_rows(self, row: Row, turns: str = "all") -> Turns:
        """What a source row trains on.

        Args:
            turns: answers to supervise of a conversation: all, in as few rows as hold them
                exactly; the last; or auto: all of them if one row holds them, else the last.

        Plain text is supervised whole, but for what the tokenizer puts around it; token rows are
        as they are. Raises RowError with the reason.
        """
        if isinstance(row, PlainText):
            return Turns([self._text_row(row.text)], 0)
        if isinstance(row, TokenRow):
            if row.ids and not 0 <= min(row.ids) <= max(row.ids) < self.length:
                raise RowError(UNKNOWN_IDS)
            ids, mask = np.array(row.ids, dtype=np.int32), np.array(row.loss_mask, dtype=np.uint8)
            return Turns([TrainingRow(ids, mask, ())], 0)
        return self._conversation_rows(row, turns)

    def check(self, row: TrainingRow, source: Row) -> None:
        """Decode every supervised run and hold it against its answer and end of turn, and against
        what the source row says, to the character but for blanks at its edges.

        Tokenizers that do not give back the text that they were given (a normaliser, a blank before
        the first word) are held to what they make of the answer, blanks aside. A row without
        answers came as token ids: nothing to hold. Raises InputError naming the source's origin.
        """
        origin = source.origin
        if not row.answers:
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]])))
        written = [self.decode(row.ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
        if len(written) != len(row.answers):
            raise InputError(
                f"{origin}: {len(written)} supervised runs for {len(row.answers)} answers: the "
                f"loss mask made with {self.name} is wrong"
            )
        for found, expected in zip(written, row.answers, strict=True):
            if found != expected and not self._same(found, expected):
                raise InputError(
                    f"{origin}: the supervised tokens decode to {found[:80]!r}, the answer is "
                    f"{expected[:80]!r}: the tokenizer of {self.name} does not keep its text"
                )
        if isinstance(source, Conversation):
            # Tags may begin within an answer.
            whole = self._template.tagged(source.tools)
            self._check_source(
                self.decode(row.ids.tolist()) if whole else "".join(row.answers), row.turns, source
            )

    def _check_source(self, written: str, turns: Sequence[int], source: Conversation) -> None:
        """Hold that the answers of a source are in the text `written`. Raises InputError."""
        at = 0
        for turn in turns:
            for said in self._template.said(source.messages[turn], source.tools):
                found = written.find(said.strip(), at)
                if found < 0:
                    raise InputError(
                        f"{source.origin}: {said.strip()[:80]!r} is not in what is supervised, "
                        f"{written[at : at + 80]!r}: a fault of dflashdist; please report it"
                    )
                at = found + len(said.strip())

    def warnings(self) -> list[str]:
        """What about the template and its settings is probably not meant, a line each."""
        found = []
        single = self.tokenizer.token_to_id
        strange = [t for t in special_literals(self._template.literals) if single(t) is None]
        if self.rendering["template"] == OWN:
            # Llama-2 and the first Mistral write [INST] in several tokens, and mean to.
            strange = [token for token in strange if token[0] != "[" and "SYS>>" not in token]
        if strange:
            found.append(
                f"the chat template writes {', '.join(strange[:5])}, which {self.name} has no "
                "single token for: it may belong to another tokenizer"
            )
        unread = sorted(set(self.rendering["settings"]) - self._template.names)
        if unread:
            found.append(f"data.template_settings.{unread[0]}: the chat template does not read it")
        return found

    def _conversation_rows(self, conversation: Conversation, turns: str) -> Turns:
        messages, tools = conversation.messages, conversation.tools
        at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in at if messages[i].get("supervised", True)]
        if not wanted:
            raise RowError(NO_SUPERVISED)
        inputs = self._template.inputs(messages, tools)
        answers: list[AnswerText] = []
        for i in reversed(wanted):
            answer = self._answers.find(inputs, i, tools, messages[i].get("cut_off", False))
            if answer is not None:
                answers.insert(0, answer)
            if answers and turns == "last":
                break
        if not answers:
            raise RowError(UNTAGGED)
        rows = assemble(answers, self._pieces, self.end_ids)
        if turns == "auto" and len(rows) > 1:
            answers = answers[-1:]
            rows = assemble(answers, self._pieces, self.end_ids)
        blocks = ((answer.text, messages[answer.turn].get("written", "")) for answer in answers)
        reframed = any(block.strip().removeprefix(THINK) not in text for text, block in blocks)
        return Turns(rows, len(at), reframed)

    def _text_row(self, text: str) -> TrainingRow:
        """Plain text as a completion endpoint reads it: a BOS, if the tokenizer has one, once."""
        bare = self.tokenizer.encode("").ids  # what the tokenizer puts around a text
        if bare and (first := self.tokenizer.id_to_token(bare[0])):
            text = text.removeprefix(first)
        try:
            encoding = self.tokenizer.encode(text)
        except TypeError as error:
            raise RowError(NOT_UNICODE) from error
        mask = 1 - np.array(encoding.special_tokens_mask, dtype=np.uint8)
        return TrainingRow(np.array(encoding.ids, dtype=np.int32), mask, (text,) if text else ())

    def _same(self, found: str, expected: str) -> bool:
        """Whether decoded text is an answer's, as far as the tokenizer keeps text."""
        if unicodedata.normalize("NFC", found) == unicodedata.normalize("NFC", expected):
            return True
        kept = self.decode(self._pieces.encode([expected])[0])
        exact = self._pieces.keeps_blanks and kept == expected
        return not exact and _squeezed(found) == _squeezed(kept)


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _read_template(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data.template={file}: cannot be read: {error}") from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON gives them back, for the store and the export."""
    try:
        return json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"data.template_settings: values must be plain JSON: {error}") from error


def _written(tokenizer: Tokenizer, literals: Iterable[str], ends: Sequence[str]) -> list[str]:
    """Added tokens that a template writes as they stand, and the end-of-turn tokens."""
    text = "\0".join(literals)
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return [*ends, *(content for content in added if content in text)]
