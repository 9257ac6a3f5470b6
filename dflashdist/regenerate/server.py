"""Answers of a model behind an OpenAI-compatible server (vLLM, SGLang, a hosted one).

What the network or an overloaded server does to a request (no connection, a broken stream, 429,
5xx, something that is no completion) is tried again, with growing pauses or those that Retry-After
asks for. Where nothing but such troubles came for `wait` seconds, the run ends: the server is gone.
What the server says about the request itself is final for its conversation. A wrong key, model or
address, found before anything was answered, ends the run; later it is taken for a hiccup.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from tqdm import tqdm

from dflashdist.config import InputError
from dflashdist.data.conversations import Message, RowError
from dflashdist.data.messages import EMPTY_ANSWER, NOT_UNICODE, read_message
from dflashdist.regenerate.replay import LENGTH, AnswerError, spell

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; doubled in between
CONNECT_SECONDS = 15.0
WAIT_SECONDS = 600.0  # for a server that gives no answer at all, at most
LONGEST_ASKED_PAUSE = 600.0  # seconds of a Retry-After that are waited for
NOTICE_SECONDS = 30.0  # between two lines about troubles that begin
# Nobody answers: no fault of the request, whose tries are not used up by it.
AWAY = ("connection failed", "server error 502", "server error 503", "server error 504")
TRIED_AGAIN = (408, 409, 425, 429)  # and all from 500 on
MISCONFIGURED = {
    401: "set OPENAI_API_KEY to the server's key",
    403: "set OPENAI_API_KEY to a key that may use this model",
    404: "check the address (it often ends in /v1) and the model's name",
}
REFUSALS = 20  # before anything was answered, end the run
FINISHED = ("stop", "tool_calls", "function_call")
MOST_CONNECTIONS = 1000  # that the client holds


class Incomplete(Exception):
    """A reply that is no whole completion; worth another try."""


class ServerAnswerer:
    """One model of one server. The key comes from OPENAI_API_KEY, `none` where there is none."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        temperature: float = 0.0,
        max_tokens: int = 2048,
        stream: bool = True,
        extra: Mapping[str, Any] | None = None,
        wait: float = WAIT_SECONDS,
        timeout: float = 600.0,
        tries: int = 12,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """
        Args:
            base_url: the server's, http(s)://host:port/v1.
            extra: goes into each request's body: chat_template_kwargs, top_p, ...
            wait: seconds of nothing but troubles, with two or more of each request in flight, that
                end the run.
            timeout: seconds of silence that end a try of a stream. Six times that end any try, and
                after as long an answer is not tried again, however few its tries: an answer that
                is too slow is not paid for over and over.
            tries: of one answer, those left out that found nobody at the address.
            first_pause: seconds before the second try, doubled for each further one.

        Raises InputError for an address or settings that cannot be.
        """
        if not base_url.startswith(("http://", "https://")):
            raise InputError(f"--base-url {base_url}: an address is http://HOST:PORT/v1")
        if temperature < 0 or max_tokens < 1 or wait < 0:
            raise InputError(
                f"temperature={temperature}, max_tokens={max_tokens}, wait={wait}: at least 0, 1, 0"
            )
        try:
            import openai
        except ImportError as error:
            raise InputError(f"no `openai` package ({error}): pip install 'openai>=2'") from error
        self.model = model
        self.settings = {
            "temperature": temperature, "max_tokens": max_tokens, "extra": dict(extra or {}),
        }  # fmt: skip
        self._openai: Any = openai
        self._base_url, self._stream, self._wait = base_url, stream, wait
        self._longest, self._tries, self._first_pause = 6 * timeout, tries, first_pause
        # Tries are counted here: the client's own would not include a stream that breaks.
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "").strip() or "none",
            timeout=openai.Timeout(
                timeout if stream else self._longest, connect=min(timeout, CONNECT_SECONDS)
            ),
            max_retries=0,
        )
        self._answered, self._refused = False, 0
        self._closed_until = 0.0  # time.monotonic() before which the server wants no request
        self._open = 0  # answers that are asked for
        self._signs = 0  # of life, that the server has given
        # Tries that failed since the last one, when the first did, and how the latest.
        self._failures, self._failing_since, self._trouble = 0, 0.0, ""
        self._last_notice = -NOTICE_SECONDS

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def answer(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Message:
        """The model's next turn, its text as the server gave it. Errors: `Answerer.answer`."""
        self._open += 1
        try:
            return await self._try_on(messages, tools)
        finally:
            self._open -= 1

    def trouble(self) -> str:
        """What the run is waiting for, in words; empty where the server answers."""
        if not self._failures:
            return ""
        seconds = time.monotonic() - self._failing_since
        return (
            f"{self._base_url}: no answer for {seconds:.0f} of {self._wait:.0f} s, "
            f"{self._failures} tries, {self._trouble}"
        )

    async def _try_on(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Message:
        """Try until there is an answer, or it is not worth another try."""
        tries, counted, spent, signs = 0, 0, 0.0, self._signs
        while True:
            await self._wait_until_open()
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._longest):
                    message = await self._ask(messages, tools)
                self._answered = True
                return message
            except AnswerError:
                self._answered = True
                raise
            except Exception as error:
                trouble = self._judge(error)
            spent += time.monotonic() - began
            self._note(trouble)
            counted += str(trouble) not in AWAY or self._signs > signs  # meanwhile others heard it
            signs = self._signs
            if counted >= self._tries or spent > self._longest:
                raise trouble
            pause = min(self._first_pause * 2 ** min(tries, 20), LONGEST_PAUSE)
            tries += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _ask(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Message:
        """One try."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [_to_send(message) for message in messages],
            "temperature": self.settings["temperature"],
            "max_tokens": self.settings["max_tokens"],
            "stream": self._stream,
            "extra_body": self.settings["extra"] or None,
        }
        if tools:
            request["tools"] = tools
        reply = _Reply()
        result: Any = await self._client.chat.completions.create(**request)
        if self._stream:
            async with result:
                async for chunk in result:
                    reply.add(chunk, "delta")
                    self._hear()
        else:
            reply.add(result, "message")
            self._hear()
        return reply.message()

    def _judge(self, error: Exception) -> AnswerError:
        """What to count a try's failure under, when it is worth another.

        Raises AnswerError when it is not, InputError when no request is; other errors go on up.
        """
        openai = self._openai
        if isinstance(error, openai.APIStatusError):
            return self._judge_status(error)
        connecting = type(error.__cause__).__name__ == "ConnectTimeout"
        if isinstance(error, openai.APITimeoutError | TimeoutError) and not connecting:
            return AnswerError("no answer in time", str(error))
        if isinstance(error, openai.APIResponseValidationError | Incomplete | ValueError):
            return AnswerError("reply is no whole completion", str(error))
        if isinstance(error, openai.APIConnectionError) or _is_of_http(error):
            return AnswerError("connection failed", f"{error} {error.__cause__ or ''}".strip())
        if isinstance(error, openai.APIError):  # sent amid a stream
            return AnswerError("server error", str(error))
        raise error

    def _judge_status(self, error: Any) -> AnswerError:
        status, said = error.status_code, f"{error.status_code} {error.message}"
        if status == 429 and error.code == "insufficient_quota":
            raise InputError(f"{self._base_url}: {said}: the account has no quota left")
        if status in MISCONFIGURED and not self._answered:
            raise InputError(f"{self._base_url}: {said}; {MISCONFIGURED[status]}")
        if status not in (*TRIED_AGAIN, *MISCONFIGURED) and status < 500:
            self._refused += 1
            if self._refused == REFUSALS and not self._answered:
                raise InputError(f"{self._base_url}: refuses every request: {said}")
            raise AnswerError("server refuses the request", said, final=True)
        asked_pause = _retry_after(error.response.headers)
        until = time.monotonic() + min(asked_pause, LONGEST_ASKED_PAUSE)
        self._closed_until = max(self._closed_until, until)
        return AnswerError("too many requests" if status == 429 else f"server error {status}", said)

    async def _wait_until_open(self) -> None:
        """Keep the pause that the server asked of any request; then not all at once."""
        pause = self._closed_until - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause + random.uniform(0, min(1.0, pause / 10)))

    def _hear(self) -> None:
        """Note a sign of life: a reply, or a piece of one."""
        self._failures = 0
        self._signs += 1

    def _note(self, trouble: AnswerError) -> None:
        """Count a try that failed, and say so where it is the first for a while. Raises InputError
        once nothing else has come for long enough."""
        now, self._trouble = time.monotonic(), str(trouble)
        if not self._failures:
            self._failing_since = now
            if now - self._last_notice >= NOTICE_SECONDS:
                self._last_notice = now
                said = f"{self._base_url}: {trouble}: {trouble.detail}; trying again"
                tqdm.write(" ".join(said.split()), file=sys.stderr)
        self._failures += 1
        if now - self._failing_since > self._wait and self._failures >= 2 * self._open:
            detail = " ".join(trouble.detail.split())
            raise InputError(
                f"{self.trouble()} ({detail}); start the server, or mend --base-url, and run the "
                "same command again: it goes on from here (--wait SECONDS waits longer)"
            )


@dataclass
class _Reply:
    """A completion as it comes in: whole, or piece by piece."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    reasoning_content: list[str] = field(default_factory=list)  # its other name
    calls: dict[int, dict[str, str]] = field(default_factory=dict)  # by index: id, name, arguments
    finish: str | None = None

    def add(self, completion: Any, part: str) -> None:
        """A completion or chunk, whose choice has a `message` or `delta`. Raises Incomplete."""
        choices = getattr(completion, "choices", None)
        if not isinstance(choices, list):
            raise Incomplete(f"no choices in {str(completion)[:200]!r}")
        for choice in choices[:1]:  # none in a chunk that only counts tokens
            piece = getattr(choice, part, None)
            self.finish = getattr(choice, "finish_reason", None) or self.finish
            self.content.append(_text(piece, "content"))
            self.reasoning.append(_text(piece, "reasoning"))
            self.reasoning_content.append(_text(piece, "reasoning_content"))
            for number, call in enumerate(getattr(piece, "tool_calls", None) or ()):
                index = getattr(call, "index", None)
                self._add_call(number if index is None else index, call)

    def _add_call(self, index: int, call: Any) -> None:
        known = self.calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        function = getattr(call, "function", None)
        known["id"] = known["id"] or _text(call, "id")
        known["name"] = known["name"] or _text(function, "name")
        known["arguments"] += _text(function, "arguments")

    def message(self) -> Message:
        """The turn. Raises Incomplete for a part of one, AnswerError for one without use."""
        if self.finish == "length":
            raise AnswerError(LENGTH, paid=True)
        if self.finish == "content_filter":
            raise AnswerError("server filtered the answer", paid=True)
        if self.finish not in FINISHED:
            raise Incomplete(f"the answer broke off (finish_reason {self.finish})")
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        # Servers send it under one name or under both.
        reasoning = "".join(self.reasoning) or "".join(self.reasoning_content)
        if reasoning.strip():
            turn["reasoning"] = reasoning.strip("\r\n")
        if self.calls:
            calls = [self.calls[index] for index in sorted(self.calls)]
            turn["tool_calls"] = [{"id": call.pop("id"), "function": call} for call in calls]
        try:
            json.dumps(turn, ensure_ascii=False).encode()
            canonical = read_message(turn)
        except UnicodeEncodeError as error:
            raise AnswerError(NOT_UNICODE, paid=True) from error
        except RowError as error:
            raise AnswerError(str(error), paid=True) from error
        if not canonical["content"].strip() and "tool_calls" not in canonical:
            raise AnswerError(EMPTY_ANSWER, paid=True)
        # The text stays as it came, so that it goes back to the server like that.
        return turn | {key: value for key, value in canonical.items() if key == "tool_calls"}


def _text(owner: Any, name: str) -> str:
    """A text that may be absent. The client does not check types. Raises Incomplete."""
    value = getattr(owner, name, None)
    if value is not None and not isinstance(value, str):
        raise Incomplete(f"{name} is no text")
    return value or ""


def _to_send(message: Message) -> dict[str, Any]:
    """A message for a request. Servers differ in what they call the reasoning of earlier turns."""
    sent = spell(message)
    if "reasoning_content" in sent:
        sent["reasoning"] = sent["reasoning_content"]
    return sent


def _is_of_http(error: Exception) -> bool:
    """Whether it is of the HTTP client inside `openai`, which lets some through: httpx, httpx2."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait, 0 where it does not say."""
    value = headers.get("retry-after") or ""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
