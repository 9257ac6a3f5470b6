"""The demo's conversations: questions about the standard library, answered by the target itself.

A drafter learns to predict one target, so it is trained on what that target says. Answers that
loop or reach the cap are dropped, which the small target does on every third question or more;
so are answers seen before. No held-out answer, nor a module it is about, is in the training set.

    python launch/demo/answers.py OUT_DIR    writes train.jsonl.gz and heldout.jsonl.gz
"""

import argparse
import gzip
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from corpus import conversations, library_things
from tqdm import tqdm

from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Message
from dflashdist.eval.generate import GreedyBatch, encodes_back, is_looping, load_model

TARGET = Path(__file__).parent / "target"
MAX_NEW_TOKENS = 128
MIN_NEW_TOKENS = 8  # an answer of one block shows nothing
BATCH = 192


class Answerer:
    """Greedy answers of a target to many prompts at once."""

    def __init__(self, folder: str | Path) -> None:
        self.chat = ChatTokenizer.load(folder)
        model = load_model(str(folder), dtype="float32", device="cpu")
        self.batch = GreedyBatch(model, self.chat.end_ids, self.chat.pad_id)

    def converse(self, prompts: Sequence[Sequence[Message]]) -> list[list[Message]]:
        """Each prompt's questions in turn, the target's own earlier answers before the next.

        A conversation ends before the first answer that is dropped, so it may come back empty.
        """
        histories: list[list[Message]] = [[] for _ in prompts]
        asked = [[m for m in messages if m["role"] == "user"] for messages in prompts]
        going = list(range(len(prompts)))
        for turn in range(max(map(len, asked), default=0)):
            going = [i for i in going if turn < len(asked[i])]
            if not going:
                break
            texts = [self.chat.encode_prompt([*histories[i], asked[i][turn]]) for i in going]
            kept = []
            for i, answer in zip(going, self.generate(texts), strict=True):
                turn_taken = self._turn(histories[i], asked[i][turn], answer)
                if turn_taken:
                    histories[i] += turn_taken
                    kept.append(i)
            going = kept
        return histories

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """Greedy answers, end id included; None for those that loop or reach the cap."""
        return self.batch.answers(prompts, MAX_NEW_TOKENS, give_up=is_looping)

    def _turn(
        self, history: list[Message], question: Message, answer: list[int] | None
    ) -> list[Message] | None:
        """Both, or None for an answer dropped, repeated, or whose text encodes to other tokens."""
        if answer is None or len(answer) < MIN_NEW_TOKENS:
            return None
        text = self.chat.decode(answer[:-1])
        if text in [message["content"] for message in history] or text != text.strip():
            return None
        messages = [*history, question, {"role": "assistant", "content": text}]
        return messages[-2:] if encodes_back(self.chat, messages, None, answer) else None


def library_prompts() -> tuple[list[list[Message]], list[list[Message]]]:
    """Questions to train on and held-out ones, each in a fixed random order.

    Listings of a module's names and imports are left out (the shipped target loops on them), and
    held out are single questions only.
    """
    train, heldout = [], []
    for thing in library_things():
        if "names" in thing.answers or "imports" in thing.answers:
            continue
        for messages in conversations(thing):
            if not thing.held_out:
                train.append(messages)
            elif len(messages) == 2:
                heldout.append(messages[:1])
    for prompts in (train, heldout):
        prompts.sort(key=lambda messages: hashlib.md5(messages[0]["content"].encode()).digest())
    return train, heldout


def answered(
    answerer: Answerer, prompts: list[list[Message]], wanted: int, seconds: float, taken: set[str]
) -> list[list[Message]]:
    """Up to `wanted` conversations with an answer not in `taken`, which grows by theirs."""
    kept: list[list[Message]] = []
    until = time.monotonic() + seconds
    with tqdm(total=wanted, desc="answers", unit=" conversations", disable=None) as progress:
        for first in range(0, len(prompts), BATCH):
            if len(kept) >= wanted or time.monotonic() > until:
                break
            for messages in answerer.converse(prompts[first : first + BATCH]):
                said = {m["content"] for m in messages if m["role"] == "assistant"}
                if said - taken and len(kept) < wanted:
                    kept.append(messages)
                    progress.update()
                taken |= said
    return kept


def write_gzip(path: Path, rows: Iterable[Any]) -> None:
    """JSON Lines, gzipped; the same bytes for the same rows."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(
        description="Questions about the standard library, answered by a target."
    )
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--target", type=Path, default=TARGET, help="the model that answers")
    parser.add_argument("--train", type=int, default=4000, help="conversations to train on")
    parser.add_argument("--heldout", type=int, default=128, help="held-out prompts")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="the most that training may take"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    answerer = Answerer(options.target)
    train_prompts, heldout_prompts = library_prompts()
    taken: set[str] = set()
    began = time.monotonic()
    seconds = 60 * options.minutes
    train = answered(answerer, train_prompts, options.train, seconds, taken)
    write_gzip(options.out / "train.jsonl.gz", [{"messages": messages} for messages in train])
    heldout = answered(answerer, heldout_prompts, options.heldout, seconds, taken)
    write_gzip(options.out / "heldout.jsonl.gz", [{"messages": messages} for messages in heldout])
    rate = answerer.batch.num_tokens / (time.monotonic() - began)
    print(f"{len(train)} conversations, {len(heldout)} held out; {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
