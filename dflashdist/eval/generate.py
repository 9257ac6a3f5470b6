"""Greedy answers of a local model to many prompts at once.

Prompts are padded on the left; whoever has ended leaves the batch, so that a few long answers do
not hold up the memory of all. In float32 each answer is the one that the model gives alone.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflashdist.config import AUTO, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, Message, RowError
from dflashdist.data.messages import EMPTY_ANSWER, read_message
from dflashdist.data.sources import Source
from dflashdist.eval.decode import cache_keyword
from dflashdist.regenerate.replay import LENGTH, AnswerError
from dflashdist.regenerate.run import regenerate

OTHER_TOKENS = "answer's text encodes to other tokens"
TOO_LONG = "prompt leaves no room for max_tokens"
LOOKED_AT = 8  # tokens between two looks for answers that have ended


class GreedyBatch:
    """A causal LM of transformers that answers batches. `num_tokens`: generated, all told."""

    def __init__(self, model: torch.nn.Module, end_ids: Collection[int], pad_id: int) -> None:
        self.model: Any = model
        self.end_ids, self.pad_id = frozenset(end_ids), pad_id
        self.device: torch.device = next(model.parameters()).device
        self.num_tokens = 0

    @torch.inference_mode()
    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        give_up: Callable[[Sequence[int]], bool] = lambda tokens: False,
    ) -> list[list[int] | None]:
        """Each prompt's answer, its end id included.

        None for one that does not end within `max_new_tokens`, or that `give_up` refuses by its
        tokens so far (without the end id), shown to it every 8 tokens.
        """
        from transformers import DynamicCache

        answers: list[list[int] | None] = [None] * len(prompts)
        ids, mask = self._left_padded(prompts)
        cache: Any = DynamicCache(config=self.model.config)
        keywords = {cache_keyword(self.model): cache}
        rows, said = list(range(len(prompts))), ids[:, :0]
        for step in range(1, max_new_tokens + 1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                logits_to_keep=1, **keywords,
            ).logits  # fmt: skip
            ids = logits[:, -1:].argmax(-1)
            said = torch.cat([said, ids], 1)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            self.num_tokens += len(ids)
            if step % LOOKED_AT and step < max_new_tokens:
                continue
            stay = []
            for i, tokens in enumerate(said.tolist()):
                end = next((at for at, token in enumerate(tokens) if token in self.end_ids), None)
                if give_up(tokens[:end]):
                    continue
                if end is None:
                    stay.append(i)
                else:
                    answers[rows[i]] = tokens[: end + 1]
            if not stay:
                break
            if len(stay) < len(rows):
                keep = torch.tensor(stay, device=self.device)
                cache.batch_select_indices(keep)
                said, ids, mask = said[keep], ids[keep], mask[keep]
                rows = [rows[i] for i in stay]
        return answers

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """ids and attention mask, int64 [B, longest], padded on the left."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        return ids.to(self.device), mask.to(self.device)


def is_looping(tokens: Sequence[int], max_period: int = 32) -> bool:
    """Whether a piece of up to 32 tokens is said 3 times over (its last token may be missing).

    A stretch of fewer than 12 tokens does not count: `a, a, a` is an answer.
    """
    values = np.asarray(tokens)
    for period in range(1, min(max_period, len(values) // 3) + 1):
        same = np.concatenate([[0], values[period:] == values[:-period], [0]])
        breaks = np.flatnonzero(same == 0)
        longest = int(np.diff(breaks).max()) - 1  # tokens that equal the one a period before
        if longest >= max(2 * period - 1, 12 - period):
            return True
    return False


def encodes_back(
    chat: ChatTokenizer,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    answer: Sequence[int],
) -> bool:
    """Whether the last message, an answer, is trained on as the very tokens it was written in."""
    conversation = Conversation("", list(messages), tools)
    try:
        row = chat.training_rows(conversation, "last").rows[-1]
    except RowError:
        return False
    return row.ids[row.loss_mask.astype(bool)].tolist() == list(answer)


def load_model(
    path: str,
    dtype: str = AUTO,
    device: str = AUTO,
    revision: str | None = None,
    *,
    attention: str = AUTO,
    trust_remote_code: bool = False,
) -> torch.nn.Module:
    """The whole target, ready to answer; auto: bfloat16 on CUDA where there is one, else float32.

    Raises InputError.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == AUTO:
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    logging.disable_progress_bar()
    folder = Path(path).expanduser()
    auto: Any = AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            str(folder) if folder.is_dir() else path,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=None if attention == AUTO else attention,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(f"{path}: the target cannot be loaded: {reason}") from error
    return model.to(device).eval()


def regenerate_locally(
    sources: Sequence[str | Path | Source],
    out: str | Path,
    *,
    target: str,
    batch_size: int = 64,
    max_tokens: int = 2048,
    limit: int | None = None,
    format: str = AUTO,
    fields: Mapping[str, str] | None = None,
    device: str = AUTO,
    dtype: str = AUTO,
    revision: str | None = None,
    template: str | None = None,
    template_settings: Mapping[str, Any] | None = None,
    date: str | None = None,
) -> dict[str, Any]:
    """`dflashdist regenerate --local`: see `regenerate` and `LocalAnswerer`.

    A date is a setting of the answers only if it is given: else each day's is its own, as a
    server's is, and the same command goes on tomorrow.
    """
    chat = ChatTokenizer.load(
        target, revision, template=template, settings=template_settings, date=date
    )
    model = load_model(target, dtype, device, revision)
    answerer = LocalAnswerer(target, model, chat, batch_size=batch_size, max_tokens=max_tokens)
    given = {"revision": revision, "date": date and chat.rendering["date"]}
    answerer.settings |= {name: value for name, value in given.items() if value is not None}
    return regenerate(
        sources, out, answerer, concurrency=batch_size, limit=limit, format=format, fields=fields
    )


class LocalAnswerer:
    """Collects the questions that are waiting into batches.

    Answers are text, as tokens decode, and kept if that text encodes to the same tokens. A tool
    call is not taken out of it: it stands in the text as the target wrote it, and its conversation
    ends where the source goes on with the tool's result.
    """

    def __init__(
        self, name: str, model: torch.nn.Module, chat: ChatTokenizer, *, batch_size: int,
        max_tokens: int,
    ) -> None:  # fmt: skip
        """`name` stands in every row. Raises InputError for sizes that cannot be."""
        if batch_size < 1 or max_tokens < 1:
            raise InputError(f"batch_size={batch_size}, max_tokens={max_tokens}: at least 1")
        self.model = name
        self.settings: dict[str, Any] = {
            "max_tokens": max_tokens,
            "tokenizer": chat.tokenizer_fingerprint,
            "template_sha256": chat.rendering["template_sha256"],
            "template_settings": chat.rendering["settings"],
        }
        self._chat, self._batch_size, self._max_tokens = chat, batch_size, max_tokens
        self._batch = GreedyBatch(model, chat.end_ids, chat.pad_id)
        self._positions: int | None = getattr(
            self._batch.model.config.get_text_config(), "max_position_embeddings", None
        )
        if self._positions and max_tokens >= self._positions:
            raise InputError(f"max_tokens={max_tokens}: {name} has {self._positions} positions")
        self._waiting: list[tuple[list[int], asyncio.Future[list[int] | None]]] = []
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def answer(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Message:
        """The model's next turn. Raises AnswerError."""
        try:
            prompt = self._chat.encode_prompt(messages, tools)
        except RowError as error:
            raise AnswerError(str(error), final=True) from error
        if self._positions and len(prompt) + self._max_tokens > self._positions:
            raise AnswerError(TOO_LONG, f"{len(prompt)} tokens", final=True)
        future: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        ids = await future
        if ids is None:
            raise AnswerError(LENGTH, paid=True)
        turn = {"role": "assistant", "content": self._chat.decode(ids[:-1])}
        try:
            canonical = read_message(turn)
        except RowError as error:
            raise AnswerError(str(error), paid=True) from error
        if not canonical["content"].strip():
            raise AnswerError(EMPTY_ANSWER, paid=True)
        if not encodes_back(self._chat, [*messages, canonical], tools, ids):
            raise AnswerError(OTHER_TOKENS, paid=True)
        return canonical

    def trouble(self) -> str:
        """Nothing keeps a local model from answering."""
        return ""

    async def close(self) -> None:
        """Wait for the batch that is running, which gives up within a few tokens."""
        self._closed = True
        if self._running is not None:
            await self._running

    async def _run(self) -> None:
        """Answer batch after batch until nobody waits."""
        while self._waiting and not self._closed:
            number = -1
            while number < len(self._waiting) < self._batch_size:  # as long as more come
                number = len(self._waiting)
                await asyncio.sleep(0)
            batch = self._waiting[: self._batch_size]
            del self._waiting[: self._batch_size]
            try:
                answers = await asyncio.to_thread(
                    self._batch.answers,
                    [prompt for prompt, _ in batch],
                    self._max_tokens,
                    lambda _: self._closed,
                )
            except Exception as error:  # whoever waits must hear of it, or waits for ever
                if isinstance(error, torch.OutOfMemoryError):
                    told = f"{len(batch)} answers at a time do not fit the GPU's memory"
                    error = InputError(f"{self.model}: {told}; lower --batch-size")
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), ids in zip(batch, answers, strict=True):
                if not future.done():  # cancelled meanwhile
                    future.set_result(ids)
