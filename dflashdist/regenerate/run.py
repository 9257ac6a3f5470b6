"""Answers written by the target for whole files of conversations, over days and across kills.

Invariants:
- Two append-only files (journal.py): OUT has the finished conversations, OUT.failed.jsonl those
  without a usable answer, why, and the answers that they did get. A row is written as soon as it
  is known, in the order of completion.
- The same command goes on after any end. A conversation in OUT is not asked again. One that the
  server failed is, from its first missing answer on. One whose first answer the target itself made
  unusable (cut off, say) is asked again only with other settings (a larger max_tokens), or once
  OUT.failed.jsonl is deleted. Paid for twice is only what a kill found in flight; Ctrl-C and
  SIGTERM keep the answers even of that.
- A conversation that ends early by an unusable answer keeps the answers before it, and succeeded.
  If that answer was cut off, its row says so, and a larger max_tokens asks it again from there. The
  row that follows replaces the first for whoever reads the file (data/sources.py).
- Every row names the model and its settings. OUT grows by the same alone, but that max_tokens may
  be raised, which the answers that are there already would not have noticed. Answers in
  OUT.failed.jsonl that were made otherwise are not gone on with.
- A conversation that stands in the input several times is asked as many times.
- Source rows read = succeeded + failed + skipped + already there (+ unfinished when interrupted).
- Memory: what is in flight, and a key a conversation.
"""

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflashdist.config import AUTO, InputError
from dflashdist.data.conversations import Conversation, Message, Rejections, RowError, parse_prompt
from dflashdist.data.locate import refuse_inside
from dflashdist.data.sources import Source, Sources
from dflashdist.regenerate.journal import CUT_OFF, Journal
from dflashdist.regenerate.replay import (
    LENGTH,
    Answerer,
    AnswerError,
    replay,
    spell,
    to_last_answer,
    unspell,
)

NO_QUESTION = "no question"
INTERRUPTED = "interrupted"
# Between two lines of progress where stderr is no terminal, and where answers are waited for.
LINE_SECONDS, WAITING_LINE_SECONDS = 30.0, 10.0


def regenerate(
    sources: Sequence[str | Path | Source],
    out: str | Path,
    answerer: Answerer,
    *,
    concurrency: int,
    limit: int | None = None,
    format: str = AUTO,
    fields: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Ask for what `out`, a .jsonl file, does not hold yet, and add it there.

    Args:
        concurrency: conversations in flight.
        limit: source rows read, at most; a larger one goes on where a smaller one ended.
        format, fields: as of `parse_prompt`.

    Returns:
        Counts {input, succeeded, failed, skipped, already, unfinished}, and `reasons`: for failed,
        shortened (ended early, and succeeded) and skipped, counts and first rows by reason.

    Raises:
        InputError: sources or `out` cannot be used, `out` holds answers that were made with other
            settings, or the answerer will not answer.
        KeyboardInterrupt: on Ctrl-C or SIGTERM. Either way the counts so far are printed.
    """
    if concurrency < 1 or (limit is not None and limit < 1):
        raise InputError(f"concurrency={concurrency}, limit={limit}: must be greater than 0")
    opened = Sources(sources)
    _check_place(Path(out), opened.sources)
    run = Regeneration(opened, Path(out), answerer, limit, format, fields or {})
    try:
        asyncio.run(run.ask_all(concurrency))
    except BaseException as error:
        print(f"{format_counts(run.counts())}\nthe same command goes on from here", file=sys.stderr)
        if isinstance(error, asyncio.CancelledError):  # SIGTERM; Ctrl-C is KeyboardInterrupt
            raise KeyboardInterrupt from None
        if isinstance(error, BaseExceptionGroup):  # of workers that failed at once
            raise error.exceptions[0] from None
        raise
    finally:
        run.close()
    return run.counts()


def failed_path(out: Path) -> Path:
    """Where the conversations without a usable answer are: OUT.failed.jsonl."""
    return out.with_name(f"{out.name}.failed.jsonl")


def refuse_ignored(mode: str, options: Mapping[str, Any]) -> None:
    """Raises InputError if one of the options, by the names that users write, is not None.

    For options that are None unless they are given, and that `mode` ("--local") has no use for.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)}: nothing that {mode} uses; leave out")


def difference(made: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """What keeps answers of two settings out of one file; None where nothing does."""
    old, new = dict(_leaves(made)), dict(_leaves(asked))
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if name == "max_tokens" and before is not None and now is not None and before <= now:
            continue
        if before != now:
            told = [
                "no such setting" if value is None else json.dumps(value) for value in (before, now)
            ]
            grow = " (it may only grow)" if name == "max_tokens" else ""
            return f"{name}: {told[0]} there, {told[1]} now{grow}"
    return None


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def format_counts(counts: Mapping[str, Any]) -> str:
    """The counts as a line that adds up, and the reasons below."""
    parts = [f"{counts['succeeded']:,} succeeded", f"{counts['failed']:,} failed"]
    parts += [f"{counts['skipped']:,} skipped", f"{counts['already']:,} already there"]
    if counts["unfinished"]:
        parts.append(f"{counts['unfinished']:,} unfinished")
    lines = [f"{counts['input']:,} conversations = " + " + ".join(parts)]
    for kind, reasons in counts["reasons"].items():
        for reason, count in sorted(reasons["counts"].items(), key=lambda item: -item[1]):
            examples = ", ".join(reasons["examples"][reason])
            lines.append(f"  {kind}: {reason}: {count:,} ({examples})")
    return "\n".join(lines)


def _check_place(out: Path, sources: Sequence[Source]) -> None:
    """Raises InputError for an `out` that cannot be written or would come to be read."""
    if out.suffix != ".jsonl":
        raise InputError(f"{out}: answers are added line by line; name a file that ends in .jsonl")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder to write {out.name} in")
    refuse_inside(out, [out, failed_path(out)], sources)


class Regeneration:
    """One run's files and counts, all of them touched by the event loop's thread alone."""

    def __init__(
        self, sources: Sources, out: Path, answerer: Answerer, limit: int | None, format: str,
        fields: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._sources, self._limit, self._format, self._fields = sources, limit, format, fields
        self._answerer = answerer
        # Reads all files, so that a damaged one is found before anything is paid for; to try a few
        # rows of many they are not.
        self._total = sources.max_rows if limit is None else limit
        self._numbers: dict[str, int] = dict.fromkeys(
            ("input", "succeeded", "failed", "skipped", "already"), 0
        )
        self._reasons = {kind: Rejections() for kind in ("failed", "shortened", "skipped")}
        self._occurrences: dict[bytes, int] = {}  # by the conversation's own key
        self._settings = json.loads(json.dumps(answerer.settings))  # as rows give it back
        self._done = Journal(out, answerer.model, self._settings)
        try:
            self._refuse_other_settings()
            self._failed = Journal(failed_path(out), answerer.model, self._settings)
        except BaseException:
            self._done.close()
            raise
        self._settled = self._read_settled()
        most = self._settings.get("max_tokens", 0)
        self._longer = {  # in OUT, cut off there, and worth another question
            key for key in self._done.cut_off
            if self._done.row(key)["settings"].get("max_tokens", 0) < most
        }  # fmt: skip

    def _refuse_other_settings(self) -> None:
        for line, settings in self._done.made_with:
            if told := difference(settings, self._settings):
                raise InputError(
                    f"{self._done.path}:{line}: made with other settings ({told}); take the same "
                    "or name another file"
                )

    def counts(self) -> dict[str, Any]:
        """What `regenerate` returns."""
        outcomes = sum(number for kind, number in self._numbers.items() if kind != "input")
        reasons = {
            kind: {"counts": found.counts, "examples": found.examples}
            for kind, found in self._reasons.items()
        }
        return self._numbers | {"unfinished": self._numbers["input"] - outcomes, "reasons": reasons}

    def close(self) -> None:
        """Leave in OUT.failed.jsonl only what still lacks an answer, each conversation once."""
        self._failed.keep([key for key in self._failed.offsets if not self._is_done(key)])
        self._done.close()

    def _is_done(self, key: bytes) -> bool:
        return key in self._done and key not in self._longer

    async def ask_all(self, concurrency: int) -> None:
        """Ask for all that is pending, `concurrency` conversations at a time."""
        if threading.current_thread() is threading.main_thread():
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        reporter = asyncio.create_task(self._report())
        pending = self._pending()
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(pending))
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
            await self._answerer.close()

    async def _work(self, pending: Iterator[tuple[Conversation, bytes] | None]) -> None:
        for item in pending:  # shared by all workers: each takes what none has taken
            if item is None:
                await asyncio.sleep(0)
            else:
                await self._converse(*item)

    def _pending(self) -> Iterator[tuple[Conversation, bytes] | None]:
        """Conversations to ask and their keys, read as they are needed.

        None every 64 rows: time for the event loop, where there may be a million that are done.
        """
        for number, (origin, payload) in enumerate(islice(self._sources.rows(), self._limit), 1):
            if number % 64 == 0:
                yield None
            self._numbers["input"] += 1
            try:
                conversation = parse_prompt(origin, payload, self._format, self._fields)
                if all(message["role"] != "user" for message in conversation.messages):
                    raise RowError(NO_QUESTION)
            except RowError as error:
                self._count("skipped", origin, error)
                continue
            key = self._key(conversation)
            if self._is_done(key):
                self._numbers["already"] += 1
            elif key in self._settled:
                self._count("failed", origin, self._settled[key])
            else:
                yield conversation, key

    def _key(self, conversation: Conversation) -> bytes:
        """16 bytes of the conversation and how often it has been read before."""
        occurrence = self._occurrences.get(conversation.key, 0)
        self._occurrences[conversation.key] = occurrence + 1
        text = conversation.key + occurrence.to_bytes(8, "big")
        return blake2b(text, digest_size=16).digest()

    async def _converse(self, conversation: Conversation, key: bytes) -> None:
        """Ask one conversation's questions in turn, and write down how it went."""
        said: list[Message] = []
        row: dict[str, Any] = {}
        try:
            await replay(conversation, self._answerer, said, self._known(key))
        except AnswerError as error:
            if not (error.final and to_last_answer(said)):
                self._fail(conversation, key, said, error)
                return
            self._reasons["shortened"].add(str(error), conversation.origin)
            row = {CUT_OFF: True} if str(error) == LENGTH else {}
        except (asyncio.CancelledError, InputError):
            if to_last_answer(said):
                self._write_failed(conversation, key, said, {"reason": INTERRUPTED})
            raise
        row |= {"source": conversation.origin, "messages": [*map(spell, to_last_answer(said))]}
        self._done.append(key, row | _tools(conversation))
        self._longer.discard(key)
        self._numbers["succeeded"] += 1

    def _fail(
        self, conversation: Conversation, key: bytes, said: list[Message], error: AnswerError
    ) -> None:
        why: dict[str, Any] = {"reason": str(error)}
        if error.detail:
            why["detail"] = error.detail
        if error.paid:
            why["paid"] = True
        self._write_failed(conversation, key, said, why)
        self._count("failed", conversation.origin, str(error))

    def _write_failed(
        self, conversation: Conversation, key: bytes, said: list[Message], why: dict[str, Any]
    ) -> None:
        row = why | {"source": conversation.origin, "asked": said} | _tools(conversation)
        self._failed.append(key, row)

    def _known(self, key: bytes) -> list[Message]:
        """Answers that the conversation got, with these settings, before the server failed it, or
        before one was cut off."""
        said: list[Message] = []
        if key in self._failed:
            row = self._failed.row(key)
            said = [] if difference(row["settings"], self._settings) else row["asked"]
        if key in self._longer and not said:
            said = [unspell(message) for message in self._done.row(key)["messages"]]
        return [message for message in said if message["role"] == "assistant"]

    def _read_settled(self) -> dict[bytes, str]:
        """Reasons of the failures that asking again with these settings would repeat."""
        return {
            key: sys.intern(row["reason"])
            for key, row in self._failed.rows()
            if row.get("paid") and row["settings"] == self._settings
        }

    def _count(self, outcome: str, origin: str, reason: str | RowError) -> None:
        self._numbers[outcome] += 1
        self._reasons[outcome].add(reason, origin)

    async def _report(self) -> None:
        """Progress with the time left: a bar on a terminal, else a line now and then."""
        began = shown = time.monotonic()
        bar = tqdm(total=self._total, desc="regenerate", unit=" conversations", disable=None)
        try:
            while True:
                await asyncio.sleep(min(0.5, LINE_SECONDS, WAITING_LINE_SECONDS))
                pause = WAITING_LINE_SECONDS if self._answerer.trouble() else LINE_SECONDS
                if not bar.disable or time.monotonic() - shown >= pause:
                    shown = time.monotonic()
                    self._show(bar, began)
        finally:
            if not bar.disable:
                self._show(bar, began)
            bar.close()

    def _show(self, bar: Any, began: float) -> None:
        counts = self.counts()
        finished = counts["input"] - counts["unfinished"]
        free = counts["already"] + counts["skipped"]  # took no time: not in the rate
        failed = f"{counts['failed']:,} failed"
        about = ": ".join(filter(None, ("regenerate", self._answerer.trouble())))
        if bar.disable:
            line = tqdm.format_meter(
                finished, self._total or 0, time.monotonic() - began, prefix=about,
                unit=" conversations", postfix=failed, initial=free, ascii=True, ncols=0,
            )  # fmt: skip
            print(line, file=sys.stderr)
        else:
            bar.n, bar.initial = finished, free
            bar.set_description_str(about, refresh=False)
            bar.set_postfix_str(failed)


def _tools(conversation: Conversation) -> dict[str, Any]:
    return {"tools": conversation.tools} if conversation.tools else {}
