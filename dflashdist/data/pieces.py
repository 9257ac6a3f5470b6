"""Exact encodings in pieces, so that no text is tokenised twice.

Invariant: text that is cut where a cutting token begins encodes to the ids of its two pieces, one
after the other. A tokenizer takes added tokens out of a text before it normalises and splits the
rest, so the text on either side of one is encoded alone. Cutting before the token, not after it,
keeps that true of tokenizers that put a blank before the first word of a text and of no other.
"""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer

from dflashdist.data.messages import NOT_UNICODE, RowError

STRADDLES = "a token straddles the edge of an answer"

TAIL_CHARS = 64  # a generation prompt's header is shorter, and few of them differ
MAX_TAILS = 256
ANCHORS = ("\n", ".", ";", ")", "0")


class PieceEncoder:
    """A tokenizer that adds no special tokens, and knows where its texts may be cut."""

    def __init__(self, tokenizer: Tokenizer, candidates: Iterable[str]) -> None:
        """`candidates`: added tokens worth cutting at, those that the template writes."""
        self._tokenizer = tokenizer
        added = list(tokenizer.get_added_tokens_decoder().values())
        plain = repr(tokenizer.normalizer) in ("None", "Sequence(normalizers=[])")
        wanted = set(candidates)
        self.cuts = tuple(
            sorted(token.content for token in added
                   if token.content in wanted and _cuts(token, added, plain))
        )  # fmt: skip
        self._tails: dict[str, list[int]] = {}
        self._anchors = self._find_anchors()
        # A word at the start gets no blank, and no added token takes blanks away.
        self.keeps_blanks = self._anchors == ("",) and not any(t.lstrip or t.rstrip for t in added)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as it stands. Raises RowError for half a surrogate pair."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise RowError(NOT_UNICODE) from error
        return [encoding.ids for encoding in encodings]

    def continue_with(
        self, prompt: str, answer: str, start: int = 0
    ) -> tuple[list[int], list[int], bool]:
        """Ids of `prompt[start:]`, of `answer` after the prompt, and whether they are joined.

        Joined: the ids of the prompt and of the answer are those of both texts in one. Otherwise a
        token would straddle their edge, which a target cannot write once it has read the prompt;
        the answer's ids are then those of its text alone. `start` is 0 or where a cutting token
        begins. Raises RowError when the tokenizer cannot encode the answer alone.
        """
        cut = max(start, *(prompt.rfind(token, start) for token in self.cuts), start)
        tail = prompt[cut:]
        texts = [tail + answer] if cut == start else [tail + answer, prompt[start:cut]]
        both, *head = self.encode(texts)
        tail_ids = self._encode_tail(tail)
        joined = both[: len(tail_ids)] == tail_ids
        answer_ids = both[len(tail_ids) :] if joined else self._alone(answer)
        return (head[0] if head else []) + tail_ids, answer_ids, joined

    def _encode_tail(self, tail: str) -> list[int]:
        """Ids of a text that is likely to come again."""
        known = self._tails.get(tail)
        if known is None:
            known = self.encode([tail])[0]
            if len(tail) <= TAIL_CHARS and len(self._tails) < MAX_TAILS:
                self._tails[tail] = known
        return known

    def _alone(self, answer: str) -> list[int]:
        """Ids of a text in the middle of another, whatever stands before it."""
        for anchor in self._anchors:
            before, both = self.encode([anchor, anchor + answer])
            if both[: len(before)] == before:
                return both[len(before) :]
        raise RowError(STRADDLES)

    def _find_anchors(self) -> tuple[str, ...]:
        """What to put before a text so that it is not taken for the beginning of one.

        Nothing for byte-level tokenizers. Where the first word of a text gets a blank, characters
        that leave the ids of a word after them alone.
        """
        word, spaced = self.encode(["x", " x"])
        anchors = []
        for anchor in ANCHORS:
            before, *both = self.encode([anchor, anchor + "x", anchor + " x"])
            if anchor not in self._tokenizer.decode(before) or any(
                ids[: len(before)] != before for ids in both
            ):
                continue  # not in the vocabulary, or merged with what follows
            after = [ids[len(before) :] for ids in both]
            if after == [word, spaced]:
                return ("",)
            if after[1] == word != after[0]:
                anchors.append(anchor)
        return tuple(anchors)


def _cuts(token: AddedToken, added: Sequence[AddedToken], plain: bool) -> bool:
    """Whether a text may be cut before every occurrence of this added token.

    It takes no blanks before it away (those after it are in the same piece), it is found in the
    text as it stands, and no other added token can hide a part of it.
    """
    text = token.content
    if token.lstrip or token.single_word or (token.normalized and not plain):
        return False
    return not (text[0].isalnum() or text[0] in "_ ") and not any(
        _overlap(other.content, text) or _overlap(text, other.content)
        for other in added
        if other.content != text
    )


def _overlap(first: str, second: str) -> bool:
    """Whether an occurrence of `first` can end inside `second`, or hold it."""
    return second in first or any(
        first.endswith(second[:n]) for n in range(1, min(len(first), len(second)))
    )
